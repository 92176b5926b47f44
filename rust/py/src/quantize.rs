//! Weights to codes and scales, in arrays of the caller.

use crate::buffers::readwrite;
use crate::cpu::to_py;
use crate::error::Class;
use crate::tensors::{is_int4, values, values_mut};
use numpy::{Ix2, PyReadwriteArray, PyUntypedArrayMethods};
use pyo3::prelude::*;
use specrs_cpu::{ValuesMut, quantize_int4, quantize_int8};

#[pyfunction]
pub(crate) fn quantize_weight(
    py: Python<'_>,
    name: &str,
    weight: &Bound<'_, PyAny>,
    codes: &Bound<'_, PyAny>,
    scales: &Bound<'_, PyAny>,
) -> PyResult<()> {
    let (weight, shape) = values::<Ix2>(name, weight)?;
    let (inputs, int4) = (shape[1], is_int4("codes", codes)?);
    let (scales, of_scales) = values_mut::<Ix2>("scales", scales)?;
    let ValuesMut::Bf16(mut scales) = scales else {
        return Err(
            Class::InvalidBuffer.error(py, "scales: dtype is float32, expected uint16 with the bits of bfloat16")
        );
    };
    let check = |shape: &[usize], expected: [usize; 2]| {
        if *shape == expected {
            return Ok(());
        }
        Err(Class::InvalidBuffer.error(py, format!("codes: shape is {shape:?}, expected {expected:?}")))
    };
    if of_scales[0] != shape[0] {
        let message = format!("scales: shape is {of_scales:?}, expected [{}, groups]", shape[0]);
        return Err(Class::InvalidBuffer.error(py, message));
    }
    let (threads, scales) = (std::thread::available_parallelism().map_or(1, usize::from), scales.as_mut_slice());
    let quantized = if int4 {
        let mut codes: PyReadwriteArray<'_, u8, Ix2> = readwrite("codes", codes)?;
        check(codes.shape(), [shape[0], inputs / 2])?;
        let codes = codes.as_slice_mut()?;
        py.detach(|| quantize_int4(name, &weight, inputs, codes, scales, threads))
    } else {
        let mut codes: PyReadwriteArray<'_, i8, Ix2> = readwrite("codes", codes)?;
        check(codes.shape(), [shape[0], inputs])?;
        let codes = codes.as_slice_mut()?;
        py.detach(|| quantize_int8(name, &weight, inputs, codes, scales, threads))
    };
    quantized.map_err(|error| to_py(py, &error))
}
