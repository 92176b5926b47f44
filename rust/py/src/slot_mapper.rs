//! `SlotMapper` for Python. It holds one number, so it needs no lock.

use crate::buffers::{In, In2, Out, readonly, readwrite};
use crate::error::{Class, OrRaise, size};
use pyo3::prelude::*;

#[pyclass(frozen)]
pub(crate) struct SlotMapper(specrs_core::SlotMapper);

#[pymethods]
impl SlotMapper {
    #[new]
    fn new(py: Python<'_>, block_size: i64) -> PyResult<Self> {
        let block_size = size(py, Class::InvalidConfig, "block_size", block_size)?;
        specrs_core::SlotMapper::new(block_size).map(Self).or_raise(py)
    }

    #[getter]
    fn block_size(&self) -> usize {
        self.0.block_size()
    }

    fn slot(&self, block_table: &Bound<'_, PyAny>, position: i64) -> PyResult<i64> {
        let block_table: In = readonly("block_table", block_table)?;
        Ok(self.0.slot(block_table.as_slice()?, position))
    }

    fn map(
        &self,
        py: Python<'_>,
        block_table: &Bound<'_, PyAny>,
        positions: &Bound<'_, PyAny>,
        out: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let block_table: In = readonly("block_table", block_table)?;
        let positions: In = readonly("positions", positions)?;
        let mut out: Out = readwrite("out", out)?;
        self.0.map(block_table.as_slice()?, positions.as_slice()?, out.as_slice_mut()?).or_raise(py)
    }

    fn map_batch(
        &self,
        py: Python<'_>,
        block_tables: &Bound<'_, PyAny>,
        q_start: &Bound<'_, PyAny>,
        positions: &Bound<'_, PyAny>,
        out: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let block_tables: In2 = readonly("block_tables", block_tables)?;
        let q_start: In = readonly("q_start", q_start)?;
        let positions: In = readonly("positions", positions)?;
        let mut out: Out = readwrite("out", out)?;
        // The core infers the width from the flat length; only here can it see that the rows are B.
        let (requests, tables) = (q_start.len()?.saturating_sub(1), block_tables.as_array().nrows());
        if tables != requests {
            let message = format!("block_tables: has {tables} rows; must have {requests}, one per request of q_start");
            return Err(Class::InvalidBuffer.error(py, message));
        }
        self.0
            .map_batch(block_tables.as_slice()?, q_start.as_slice()?, positions.as_slice()?, out.as_slice_mut()?)
            .or_raise(py)
    }

    fn __repr__(&self) -> String {
        format!("SlotMapper(block_size={})", self.0.block_size())
    }
}
