//! Weights to integers and scales, in arrays of the caller.

use crate::buffers::readwrite;
use crate::error::{Class, cpu_to_py};
use crate::packed::usable_threads;
use crate::tensors::{values, values_mut};
use numpy::{Ix2, PyArray2, PyArrayMethods, PyReadwriteArray, PyUntypedArrayMethods};
use pyo3::prelude::*;
use specrs_cpu::{BlockType, ValuesMut};

/// Largest code of 4 bits, and of 8 bits.
const LARGEST: [i8; 2] = [7, 127];

#[pyfunction]
pub(crate) fn quantize_weight(
    py: Python<'_>,
    name: &str,
    weight: &Bound<'_, PyAny>,
    largest: i8,
    codes: &Bound<'_, PyAny>,
    scales: &Bound<'_, PyAny>,
) -> PyResult<()> {
    let (weight, shape) = values::<Ix2>(name, weight)?;
    if !LARGEST.contains(&largest) {
        return Err(Class::InvalidBuffer.out_of_range(py, "largest", largest, "7 (INT4) or 127 (INT8)"));
    }
    let (scales, of_scales) = values_mut::<Ix2>("scales", scales)?;
    let ValuesMut::Bf16(mut scales) = scales else {
        return Err(
            Class::InvalidBuffer.error(py, "scales: dtype is float32; must be uint16 with the bits of bfloat16")
        );
    };
    let mut codes: PyReadwriteArray<'_, i8, Ix2> = readwrite("codes", codes)?;
    if *codes.shape() != *shape {
        let message = format!("codes: shape is {:?}; must be {shape:?}", codes.shape());
        return Err(Class::InvalidBuffer.error(py, message));
    }
    if of_scales[0] != shape[0] {
        let message = format!("scales: shape is {of_scales:?}; must be [{}, groups]", shape[0]);
        return Err(Class::InvalidBuffer.error(py, message));
    }
    let (codes, scales) = (codes.as_slice_mut()?, scales.as_mut_slice());
    py.detach(|| specrs_cpu::quantize(name, &weight, shape[1], largest, codes, scales, usable_threads()))
        .map_err(|error| cpu_to_py(py, &error.into()))
}

#[pyfunction]
pub(crate) fn quantize_q4_k<'py>(
    py: Python<'py>,
    name: &str,
    weight: &Bound<'py, PyAny>,
) -> PyResult<Bound<'py, PyArray2<u8>>> {
    let (weight, shape) = values::<Ix2>(name, weight)?;
    let width = shape[1] / BlockType::Q4_K.numbers() * BlockType::Q4_K.bytes();
    let blocks = PyArray2::<u8>::zeros(py, [shape[0], width], false);
    {
        let mut out = blocks.readwrite();
        let out = out.as_slice_mut()?;
        py.detach(|| specrs_cpu::quantize_q4_k(name, &weight, shape[1], out, usable_threads()))
            .map_err(|error| cpu_to_py(py, &error.into()))?;
    }
    Ok(blocks)
}
