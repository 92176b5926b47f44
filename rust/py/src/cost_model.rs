//! `CostModel` for Python.

use crate::error::{Class, OrRaise, size};
use pyo3::prelude::*;
use pyo3::sync::MutexExt;
use specrs_core::CostLine;
use std::sync::{Mutex, MutexGuard, PoisonError};

#[pyclass(frozen)]
pub(crate) struct CostModel(Mutex<specrs_core::CostModel>);

impl CostModel {
    pub(crate) fn from_core(model: specrs_core::CostModel) -> Self {
        Self(Mutex::new(model))
    }

    pub(crate) fn model(&self, py: Python<'_>) -> MutexGuard<'_, specrs_core::CostModel> {
        self.0.lock_py_attached(py).unwrap_or_else(PoisonError::into_inner)
    }
}

fn sizes(py: Python<'_>, field: &str, values: &[i64]) -> PyResult<Vec<usize>> {
    values.iter().map(|&value| size(py, Class::InvalidConfig, field, value)).collect()
}

fn check_len(py: Python<'_>, field: &str, len: usize, expected: usize) -> PyResult<()> {
    if len == expected {
        return Ok(());
    }
    Err(Class::InvalidConfig.out_of_range(py, format_args!("len({field})"), len, expected))
}

#[pymethods]
impl CostModel {
    #[new]
    #[allow(clippy::needless_pass_by_value)] // what PyO3 extracts is owned
    fn new(py: Python<'_>, batches: Vec<i64>, ks: Vec<i64>, ms: Vec<Vec<f64>>) -> PyResult<Self> {
        check_len(py, "ms", ms.len(), batches.len())?;
        for (row, costs) in ms.iter().enumerate() {
            check_len(py, &format!("ms[{row}]"), costs.len(), ks.len())?;
        }
        let (batches, ks) = (sizes(py, "batches", &batches)?, sizes(py, "ks", &ks)?);
        specrs_core::CostModel::new(&batches, &ks, &ms.concat()).map(|model| Self(Mutex::new(model))).or_raise(py)
    }

    #[staticmethod]
    #[allow(clippy::needless_pass_by_value)] // what PyO3 extracts is owned
    fn lines(
        py: Python<'_>,
        batches: Vec<i64>,
        draft_ms: Vec<f64>,
        target_ms: Vec<f64>,
        vanilla_ms: Vec<f64>,
    ) -> PyResult<Self> {
        check_len(py, "draft_ms", draft_ms.len(), batches.len())?;
        check_len(py, "target_ms", target_ms.len(), batches.len())?;
        check_len(py, "vanilla_ms", vanilla_ms.len(), batches.len())?;
        let times = draft_ms.into_iter().zip(target_ms).zip(vanilla_ms);
        let lines: Vec<CostLine> =
            times.map(|((draft_ms, target_ms), vanilla_ms)| CostLine { draft_ms, target_ms, vanilla_ms }).collect();
        let batches = sizes(py, "batches", &batches)?;
        specrs_core::CostModel::lines(&batches, &lines).map(|model| Self(Mutex::new(model))).or_raise(py)
    }

    #[staticmethod]
    fn implied_draft_ms(py: Python<'_>, tpot_ms: f64, k: i64, acceptance_length: f64, target_ms: f64) -> PyResult<f64> {
        let k = size(py, Class::InvalidConfig, "k", k)?;
        CostLine::implied_draft_ms(tpot_ms, k, acceptance_length, target_ms).or_raise(py)
    }

    #[getter]
    fn batches(&self, py: Python<'_>) -> Vec<usize> {
        self.model(py).batches().to_vec()
    }

    #[getter]
    fn ks(&self, py: Python<'_>) -> Vec<usize> {
        self.model(py).ks().to_vec()
    }

    #[getter]
    fn table(&self, py: Python<'_>) -> Vec<Vec<f64>> {
        let model = self.model(py);
        model.table().chunks(model.ks().len()).map(<[f64]>::to_vec).collect()
    }

    fn ms(&self, py: Python<'_>, batch: i64, k: i64) -> PyResult<f64> {
        let (batch, k) = point(py, batch, k)?;
        Ok(self.model(py).ms(batch, k))
    }

    fn tpot(&self, py: Python<'_>, batch: i64, k: i64, acceptance_length: f64) -> PyResult<f64> {
        let (batch, k) = point(py, batch, k)?;
        self.model(py).tpot(batch, k, acceptance_length).or_raise(py)
    }

    fn speedup(&self, py: Python<'_>, batch: i64, k: i64, acceptance_length: f64) -> PyResult<f64> {
        let (batch, k) = point(py, batch, k)?;
        self.model(py).speedup(batch, k, acceptance_length).or_raise(py)
    }

    #[allow(clippy::needless_pass_by_value)] // what PyO3 extracts is owned
    fn best_k(&self, py: Python<'_>, batch: i64, acceptance_lengths: Vec<f64>) -> PyResult<usize> {
        let batch = size(py, Class::InvalidConfig, "batch", batch)?;
        self.model(py).best_k(batch, &acceptance_lengths).or_raise(py)
    }

    #[allow(clippy::needless_pass_by_value)] // what PyO3 extracts is owned
    fn last_paying_k(&self, py: Python<'_>, batch: i64, acceptance_lengths: Vec<f64>) -> PyResult<usize> {
        let batch = size(py, Class::InvalidConfig, "batch", batch)?;
        self.model(py).last_paying_k(batch, &acceptance_lengths).or_raise(py)
    }

    #[allow(clippy::needless_pass_by_value)] // what PyO3 extracts is owned
    fn break_even_batch(&self, py: Python<'_>, acceptance_lengths: Vec<f64>) -> PyResult<Option<usize>> {
        self.model(py).break_even_batch(&acceptance_lengths).or_raise(py)
    }

    fn observe(&self, py: Python<'_>, batch: i64, k: i64, ms: f64, weight: f64) -> PyResult<()> {
        let (batch, k) = point(py, batch, k)?;
        self.model(py).observe(batch, k, ms, weight).or_raise(py)
    }

    fn __repr__(&self, py: Python<'_>) -> String {
        let model = self.model(py);
        format!("CostModel(batches={:?}, ks={:?}, ms={:?})", model.batches(), model.ks(), model.table())
    }
}

fn point(py: Python<'_>, batch: i64, k: i64) -> PyResult<(usize, usize)> {
    Ok((size(py, Class::InvalidConfig, "batch", batch)?, size(py, Class::InvalidConfig, "k", k)?))
}
