//! Borrows arrays for as long as an object of `specrs-cpu` lives: weights, KV caches, row state.
//!
//! They are checked as those of one call are; then an address is kept, and a reference that keeps the array alive.

#![allow(unsafe_code)]

use crate::buffers::{readonly, readwrite};
use crate::error::{Class, cpu_to_py};
use crate::packed::PackedMatrix;
use numpy::{Element, Ix2, PyArrayDescrMethods, PyUntypedArray, PyUntypedArrayMethods, ndarray::Dimension};
use pyo3::prelude::*;
use specrs_cpu::{Bf16, E4m3, E5m2, Embedding, Memory, MemoryMut, Values, ValuesMut, Weight};
use std::sync::Arc;

/// Returns whether an array's elements are of the first of two types. `expected` names both.
fn is_first<A: Element, B: Element>(name: &str, array: &Bound<'_, PyAny>, expected: &str) -> PyResult<bool> {
    let py = array.py();
    let Ok(untyped) = array.cast::<PyUntypedArray>() else {
        let message = format!("{name}: is a {}; must be a numpy array", array.get_type().name()?);
        return Err(Class::InvalidBuffer.error(py, message));
    };
    let dtype = untyped.dtype();
    if dtype.is_equiv_to(&numpy::dtype::<A>(py)) {
        return Ok(true);
    }
    if dtype.is_equiv_to(&numpy::dtype::<B>(py)) {
        return Ok(false);
    }
    Err(Class::InvalidBuffer.error(py, format!("{name}: dtype is {dtype}; must be {expected}")))
}

/// Returns whether an array is bf16, as the uint16 of its bits; otherwise it is fp32.
fn is_bf16(name: &str, array: &Bound<'_, PyAny>) -> PyResult<bool> {
    is_first::<u16, f32>(name, array, "float32, or uint16 with the bits of bfloat16")
}

/// Returns read-only numbers of rank `D`, and their shape.
pub(crate) fn values<D: Dimension>(name: &str, array: &Bound<'_, PyAny>) -> PyResult<(Values, Vec<usize>)> {
    if is_bf16(name, array)? {
        let (memory, shape) = numbers::<u16, Bf16, D>(name, array)?;
        return Ok((Values::Bf16(memory), shape));
    }
    let (memory, shape) = numbers::<f32, f32, D>(name, array)?;
    Ok((Values::F32(memory), shape))
}

/// Returns the storage of a projection and its number of outputs: an array, or a packed matrix.
pub(crate) fn weight(name: &str, given: &Bound<'_, PyAny>) -> PyResult<(Weight, usize)> {
    if let Ok(packed) = given.cast::<PackedMatrix>() {
        let packed = Arc::clone(&packed.get().0);
        let outputs = packed.outputs();
        return Ok((Weight::Packed(packed), outputs));
    }
    let (values, shape) = values::<Ix2>(name, given)?;
    Ok((values.into(), shape[0]))
}

/// Returns embeddings: an array, or packed blocks.
pub(crate) fn embedding(name: &str, given: &Bound<'_, PyAny>) -> PyResult<Embedding> {
    match given.cast::<PackedMatrix>() {
        Ok(packed) => Ok(Embedding::Packed(Arc::clone(&packed.get().0))),
        Err(_) => Ok(values::<Ix2>(name, given)?.0.into()),
    }
}

/// Borrows elements `T` of rank `D` as `U`, which callers choose to be of the same layout. Returns their shape, too.
fn numbers<T, U, D>(name: &str, array: &Bound<'_, PyAny>) -> PyResult<(Memory<U>, Vec<usize>)>
where
    T: Element,
    U: Copy + Send + Sync + 'static,
    D: Dimension,
{
    let (py, owner) = (array.py(), Box::new(array.clone().unbind()));
    let view = readonly::<T, D>(name, array)?;
    let (address, len) = (view.as_slice()?.as_ptr().cast::<U>(), view.len());
    // SAFETY: the owner keeps the array, numpy moves no array's memory, and callers promise not to write weights. U is
    // T, or the bf16 of its bits.
    let memory = unsafe { Memory::borrow(name, address, len, owner) }.map_err(|error| cpu_to_py(py, &error.into()))?;
    Ok((memory, view.shape().to_vec()))
}

/// Borrows fp32 or bf16 numbers of rank `D` that passes write. Returns their shape, too.
pub(crate) fn values_mut<D: Dimension>(name: &str, array: &Bound<'_, PyAny>) -> PyResult<(ValuesMut, Vec<usize>)> {
    let (py, owner) = (array.py(), Box::new(array.clone().unbind()));
    if is_bf16(name, array)? {
        let mut view = readwrite::<u16, D>(name, array)?;
        let (len, shape) = (view.len(), view.shape().to_vec());
        let address = view.as_slice_mut()?.as_mut_ptr().cast::<Bf16>();
        // SAFETY: the owner keeps the array, numpy moves no array's memory; callers promise that no other thread uses
        // it during a call.
        let memory =
            unsafe { MemoryMut::borrow(name, address, len, owner) }.map_err(|error| cpu_to_py(py, &error.into()))?;
        return Ok((ValuesMut::Bf16(memory), shape));
    }
    let (memory, shape) = numbers_mut::<f32, D>(name, array)?;
    Ok((ValuesMut::F32(memory), shape))
}

/// Returns FP8 codes of rank `D` that passes write, with 3 or 2 fraction bits, and their shape.
pub(crate) fn codes_mut<D: Dimension>(
    name: &str,
    array: &Bound<'_, PyAny>,
    e4m3: bool,
) -> PyResult<(ValuesMut, Vec<usize>)> {
    let (py, owner) = (array.py(), Box::new(array.clone().unbind()));
    let mut view = readwrite::<u8, D>(name, array)?;
    let (len, shape) = (view.len(), view.shape().to_vec());
    let address = view.as_slice_mut()?.as_mut_ptr();
    // SAFETY: as of `values_mut`; both types of codes are bytes.
    let memory = unsafe {
        if e4m3 {
            MemoryMut::borrow(name, address.cast::<E4m3>(), len, owner).map(ValuesMut::E4m3)
        } else {
            MemoryMut::borrow(name, address.cast::<E5m2>(), len, owner).map(ValuesMut::E5m2)
        }
    };
    Ok((memory.map_err(|error| cpu_to_py(py, &error.into()))?, shape))
}

/// Borrows elements of rank `D` that a step writes. Returns their shape, too.
pub(crate) fn numbers_mut<T, D>(name: &str, array: &Bound<'_, PyAny>) -> PyResult<(MemoryMut<T>, Vec<usize>)>
where
    T: Element + Copy + Send + Sync + 'static,
    D: Dimension,
{
    let (py, owner) = (array.py(), Box::new(array.clone().unbind()));
    let mut view = readwrite::<T, D>(name, array)?;
    let (len, shape) = (view.len(), view.shape().to_vec());
    let address = view.as_slice_mut()?.as_mut_ptr();
    // SAFETY: as in `values_mut`.
    let memory =
        unsafe { MemoryMut::borrow(name, address, len, owner) }.map_err(|error| cpu_to_py(py, &error.into()))?;
    Ok((memory, shape))
}
