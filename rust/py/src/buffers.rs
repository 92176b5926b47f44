//! Borrowing of numpy arrays as slices, after checks of dtype, rank, layout, size and writability, each with its own
//! message.
//!
//! Arrays are borrowed, never copied or converted: a copy would silently drop what the core writes.

use crate::error::Class;
use numpy::{
    BorrowError, Element, Ix1, Ix2, PyArray, PyArrayDescrMethods, PyArrayMethods, PyReadonlyArray, PyReadwriteArray,
    PyUntypedArray, PyUntypedArrayMethods, dtype, ndarray::Dimension,
};
use pyo3::prelude::*;

/// Borrows a C-contiguous array of `T` and rank `D` for reading; it may be writable.
pub(crate) fn readonly<'py, T: Element, D: Dimension>(
    name: &str,
    array: &Bound<'py, PyAny>,
) -> PyResult<PyReadonlyArray<'py, T, D>> {
    checked::<T, D>(name, array)?.try_readonly().map_err(|error| borrow_error(array.py(), name, &error))
}

/// Borrows a writable, C-contiguous array of `T` and rank `D`.
pub(crate) fn readwrite<'py, T: Element, D: Dimension>(
    name: &str,
    array: &Bound<'py, PyAny>,
) -> PyResult<PyReadwriteArray<'py, T, D>> {
    checked::<T, D>(name, array)?.try_readwrite().map_err(|error| borrow_error(array.py(), name, &error))
}

pub(crate) type In<'py> = PyReadonlyArray<'py, i64, Ix1>;
pub(crate) type In2<'py> = PyReadonlyArray<'py, i64, Ix2>;
pub(crate) type Out<'py> = PyReadwriteArray<'py, i64, Ix1>;

/// Rejects an array that does not have exactly `expected` elements.
pub(crate) fn check_len(py: Python<'_>, name: &str, len: usize, expected: usize) -> PyResult<()> {
    if len == expected {
        return Ok(());
    }
    Err(Class::InvalidBuffer.out_of_range(py, name, format_args!("{len} elements"), expected))
}

fn checked<'a, 'py, T: Element, D: Dimension>(
    name: &str,
    array: &'a Bound<'py, PyAny>,
) -> PyResult<&'a Bound<'py, PyArray<T, D>>> {
    let py = array.py();
    let Ok(untyped) = array.cast::<PyUntypedArray>() else {
        let message = format!("{name}: is a {}; must be a numpy array", array.get_type().name()?);
        return Err(Class::InvalidBuffer.error(py, message));
    };
    let expected = dtype::<T>(py);
    if !untyped.dtype().is_equiv_to(&expected) {
        let message = format!("{name}: dtype is {}; must be {expected}", untyped.dtype());
        return Err(Class::InvalidBuffer.error(py, message));
    }
    let rank = D::NDIM.expect("only fixed ranks are used");
    if untyped.ndim() != rank {
        let message = format!("{name}: shape is {:?}; must have {rank} dimension(s)", untyped.shape());
        return Err(Class::InvalidBuffer.error(py, message));
    }
    if !untyped.is_c_contiguous() || !untyped.is_aligned() {
        let message = format!(
            "{name}: strides are {:?} bytes for shape {:?}; must be a C-contiguous, aligned array",
            untyped.strides(),
            untyped.shape()
        );
        return Err(Class::InvalidBuffer.error(py, message));
    }
    Ok(array.cast::<PyArray<T, D>>()?)
}

fn borrow_error(py: Python<'_>, name: &str, error: &BorrowError) -> PyErr {
    let message = match error {
        BorrowError::NotWriteable => format!("{name}: is read-only; must be a writable array"),
        _ => format!("{name}: shares memory with another argument of this call, or another call is using it"),
    };
    Class::InvalidBuffer.error(py, message)
}
