//! Quantized matrices, packed.

use crate::buffers::{In, readonly};
use crate::error::{Class, cpu_to_py, size};
use numpy::{Ix2, PyArray1, PyArray2, PyArrayMethods, PyReadonlyArray, PyUntypedArrayMethods};
use pyo3::prelude::*;
use specrs_cpu::{BlockType, Packed};
use std::sync::Arc;

/// A matrix of integers with scales.
#[pyclass(frozen)]
pub(crate) struct PackedMatrix(pub(crate) Arc<Packed>);

/// Reads the argument `order`: numbers of at least 0.
fn indices(py: Python<'_>, order: Option<&Bound<'_, PyAny>>) -> PyResult<Option<Vec<usize>>> {
    let Some(order) = order else { return Ok(None) };
    let order: In<'_> = readonly("order", order)?;
    order.as_slice()?.iter().map(|&at| size(py, Class::InvalidBuffer, "order", at)).collect::<PyResult<_>>().map(Some)
}

#[pymethods]
impl PackedMatrix {
    #[new]
    #[pyo3(signature = (kind, blocks, order = None))]
    fn new(py: Python<'_>, kind: &str, blocks: &Bound<'_, PyAny>, order: Option<&Bound<'_, PyAny>>) -> PyResult<Self> {
        let Some(kind) = BlockType::by_name(kind) else {
            let known = BlockType::ALL.map(BlockType::name).join(", ");
            let allowed = format!("one of {known}");
            return Err(Class::InvalidBuffer.out_of_range(py, "kind", format_args!("{kind:?}"), allowed));
        };
        let blocks: PyReadonlyArray<'_, u8, Ix2> = readonly("blocks", blocks)?;
        let order = indices(py, order)?;
        let width = blocks.shape()[1];
        if !width.is_multiple_of(kind.bytes()) {
            let message = format!("blocks: rows have {width} bytes; must have a multiple of {}", kind.bytes());
            return Err(Class::InvalidBuffer.error(py, message));
        }
        let (inputs, bytes) = (width / kind.bytes() * kind.numbers(), blocks.as_slice()?);
        py.detach(|| Packed::new("blocks", kind, bytes, inputs, order.as_deref(), usable_threads()))
            .map(|packed| Self(Arc::new(packed)))
            .map_err(|error| cpu_to_py(py, &error.into()))
    }

    #[staticmethod]
    #[pyo3(signature = (values, scales, order = None))]
    fn grouped(
        py: Python<'_>,
        values: &Bound<'_, PyAny>,
        scales: &Bound<'_, PyAny>,
        order: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Self> {
        let values: PyReadonlyArray<'_, i16, Ix2> = readonly("values", values)?;
        let scales: PyReadonlyArray<'_, f32, Ix2> = readonly("scales", scales)?;
        let (outputs, inputs) = (values.shape()[0], values.shape()[1]);
        if scales.shape()[0] != outputs {
            let message = format!("scales: shape is {:?}; must be [{outputs}, groups]", scales.shape());
            return Err(Class::InvalidBuffer.error(py, message));
        }
        let (values, scales, order) = (values.as_slice()?, scales.as_slice()?, indices(py, order)?);
        let packed = || {
            let packed = Packed::grouped("matrix", values, inputs, scales, usable_threads())?;
            match order {
                Some(order) => packed.with_order("matrix", &order),
                None => Ok(packed),
            }
        };
        py.detach(packed).map(|packed| Self(Arc::new(packed))).map_err(|error| cpu_to_py(py, &error.into()))
    }

    #[classattr]
    #[pyo3(name = "KINDS")]
    fn kinds() -> Vec<&'static str> {
        BlockType::ALL.map(BlockType::name).to_vec()
    }

    #[getter]
    fn kind(&self) -> &'static str {
        self.0.kind()
    }

    #[getter]
    fn shape(&self) -> (usize, usize) {
        (self.0.outputs(), self.0.inputs())
    }

    #[getter]
    fn order<'py>(&self, py: Python<'py>) -> Option<Bound<'py, PyArray1<i64>>> {
        self.0.order().map(|order| PyArray1::from_iter(py, order.iter().map(|&input| i64::from(input))))
    }

    #[getter]
    fn nbytes(&self) -> usize {
        self.0.num_bytes()
    }

    fn numbers<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyArray2<f32>>> {
        let array = PyArray2::<f32>::zeros(py, [self.0.outputs(), self.0.inputs()], false);
        {
            let mut out = array.readwrite();
            let rows = out.as_slice_mut()?.chunks_exact_mut(self.0.inputs());
            rows.enumerate().for_each(|(output, row)| self.0.row(output, row));
        }
        Ok(array)
    }

    fn __repr__(&self) -> String {
        format!("PackedMatrix(kind='{}', shape={:?})", self.0.kind(), self.shape())
    }
}

/// Returns the number of threads that work on a matrix while a model is loaded: one for each processor that the process
/// may use.
pub(crate) fn usable_threads() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}
