//! Philox random numbers, written into float32 arrays of the caller.

use crate::buffers::{In, check_len, readonly, readwrite};
use crate::error::Class;
use numpy::{Ix2, PyReadwriteArray, PyUntypedArrayMethods};
use pyo3::prelude::*;
use specrs_core::philox::{self, Purpose};

type Fill = fn(u64, u64, Purpose, &mut [f32]);

#[pyfunction]
pub(crate) fn philox_uniform(
    py: Python<'_>,
    seeds: &Bound<'_, PyAny>,
    positions: &Bound<'_, PyAny>,
    purpose: i64,
    out: &Bound<'_, PyAny>,
) -> PyResult<()> {
    fill(py, seeds, positions, purpose, out, philox::fill_uniform)
}

#[pyfunction]
pub(crate) fn philox_gumbel(
    py: Python<'_>,
    seeds: &Bound<'_, PyAny>,
    positions: &Bound<'_, PyAny>,
    purpose: i64,
    out: &Bound<'_, PyAny>,
) -> PyResult<()> {
    fill(py, seeds, positions, purpose, out, philox::fill_gumbel)
}

fn fill(
    py: Python<'_>,
    seeds: &Bound<'_, PyAny>,
    positions: &Bound<'_, PyAny>,
    purpose: i64,
    out: &Bound<'_, PyAny>,
    fill: Fill,
) -> PyResult<()> {
    let seeds: In = readonly("seeds", seeds)?;
    let positions: In = readonly("positions", positions)?;
    let mut out: PyReadwriteArray<'_, f32, Ix2> = readwrite("out", out)?;
    let Some(purpose) = Purpose::from_index(purpose) else {
        return Err(Class::InvalidConfig.out_of_range(py, "purpose", purpose, "from 0 (draft) to 3 (gumbel)"));
    };
    let (rows, columns) = (out.shape()[0], out.shape()[1]);
    check_len(py, "seeds", seeds.len(), rows)?;
    check_len(py, "positions", positions.len(), rows)?;
    if columns == 0 {
        return Ok(());
    }
    let (seeds, positions, out) = (seeds.as_slice()?, positions.as_slice()?, out.as_slice_mut()?);
    // A row of a large vocabulary takes a millisecond; other threads may run meanwhile.
    py.detach(|| {
        for ((row, &seed), &position) in out.chunks_exact_mut(columns).zip(seeds).zip(positions) {
            fill(seed as u64, position as u64, purpose, row);
        }
    });
    Ok(())
}
