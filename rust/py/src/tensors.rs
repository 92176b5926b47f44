//! Borrows arrays for as long as an object of `specrs-cpu` lives: weights, KV caches, row state.
//!
//! They are checked as those of one call are; then an address is kept, and a reference that keeps the array alive.

#![allow(unsafe_code)]

use crate::buffers::{readonly, readwrite};
use crate::cpu::to_py;
use crate::error::Class;
use numpy::{Element, PyArrayDescrMethods, PyUntypedArray, PyUntypedArrayMethods, ndarray::Dimension};
use pyo3::prelude::*;
use specrs_cpu::{Bf16, Memory, MemoryMut, Values, ValuesMut};

/// fp32, or bf16 as the uint16 of its bits: whether an array is the latter.
fn is_bf16(name: &str, array: &Bound<'_, PyAny>) -> PyResult<bool> {
    let py = array.py();
    let Ok(untyped) = array.cast::<PyUntypedArray>() else {
        let message = format!("{name}: is a {}, expected a numpy array", array.get_type().name()?);
        return Err(Class::InvalidBuffer.error(py, message));
    };
    let dtype = untyped.dtype();
    if dtype.is_equiv_to(&numpy::dtype::<u16>(py)) {
        return Ok(true);
    }
    if dtype.is_equiv_to(&numpy::dtype::<f32>(py)) {
        return Ok(false);
    }
    let message = format!("{name}: dtype is {dtype}, expected float32, or uint16 with the bits of bfloat16");
    Err(Class::InvalidBuffer.error(py, message))
}

/// Read-only numbers of rank `D`, and their shape.
pub(crate) fn values<D: Dimension>(name: &str, array: &Bound<'_, PyAny>) -> PyResult<(Values, Vec<usize>)> {
    let (py, owner) = (array.py(), Box::new(array.clone().unbind()));
    if is_bf16(name, array)? {
        let view = readonly::<u16, D>(name, array)?;
        let (address, len) = (view.as_slice()?.as_ptr().cast::<Bf16>(), view.len());
        // SAFETY: the owner keeps the array, numpy moves no array's memory, and callers promise not to write weights.
        let memory = unsafe { Memory::borrow(name, address, len, owner) }.map_err(|error| to_py(py, &error))?;
        return Ok((Values::Bf16(memory), view.shape().to_vec()));
    }
    let view = readonly::<f32, D>(name, array)?;
    let (address, len) = (view.as_slice()?.as_ptr(), view.len());
    // SAFETY: as above.
    let memory = unsafe { Memory::borrow(name, address, len, owner) }.map_err(|error| to_py(py, &error))?;
    Ok((Values::F32(memory), view.shape().to_vec()))
}

/// Numbers of rank `D` that passes write, and their shape.
pub(crate) fn values_mut<D: Dimension>(name: &str, array: &Bound<'_, PyAny>) -> PyResult<(ValuesMut, Vec<usize>)> {
    let (py, owner) = (array.py(), Box::new(array.clone().unbind()));
    if is_bf16(name, array)? {
        let mut view = readwrite::<u16, D>(name, array)?;
        let (len, shape) = (view.len(), view.shape().to_vec());
        let address = view.as_slice_mut()?.as_mut_ptr().cast::<Bf16>();
        // SAFETY: the owner keeps the array, numpy moves no array's memory; callers promise that no other thread uses it
        // during a call.
        let memory = unsafe { MemoryMut::borrow(name, address, len, owner) }.map_err(|error| to_py(py, &error))?;
        return Ok((ValuesMut::Bf16(memory), shape));
    }
    let (memory, shape) = numbers_mut::<f32, D>(name, array)?;
    Ok((ValuesMut::F32(memory), shape))
}

/// Elements of rank `D` that a launch writes, and their shape.
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
    let memory = unsafe { MemoryMut::borrow(name, address, len, owner) }.map_err(|error| to_py(py, &error))?;
    Ok((memory, shape))
}
