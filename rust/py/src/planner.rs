//! `SpeculationPlanner` for Python.

use crate::buffers::{In, Out, readonly, readwrite};
use crate::cost_model::CostModel;
use crate::error::{Class, OrRaise, size};
use pyo3::prelude::*;
use pyo3::sync::MutexExt;
use std::sync::{Mutex, MutexGuard, PoisonError};

#[pyclass(frozen)]
pub(crate) struct SpeculationPlanner(Mutex<specrs_core::SpeculationPlanner>);

impl SpeculationPlanner {
    pub(crate) fn planner(&self, py: Python<'_>) -> MutexGuard<'_, specrs_core::SpeculationPlanner> {
        self.0.lock_py_attached(py).unwrap_or_else(PoisonError::into_inner)
    }
}

#[pymethods]
impl SpeculationPlanner {
    #[new]
    #[pyo3(signature = (*, max_num_seqs, num_speculative_tokens, costs, catch_up_ms = 0.0, lora_costs = None))]
    fn new(
        py: Python<'_>,
        max_num_seqs: i64,
        num_speculative_tokens: i64,
        costs: &CostModel,
        catch_up_ms: f64,
        lora_costs: Option<&CostModel>,
    ) -> PyResult<Self> {
        let rows = size(py, Class::InvalidConfig, "max_num_seqs", max_num_seqs)?;
        let k = size(py, Class::InvalidConfig, "num_speculative_tokens", num_speculative_tokens)?;
        let costs = costs.model(py).clone();
        let mut planner = specrs_core::SpeculationPlanner::new(rows, k, costs, catch_up_ms).or_raise(py)?;
        if let Some(costs) = lora_costs {
            planner = planner.with_lora_costs(costs.model(py).clone());
        }
        Ok(Self(Mutex::new(planner)))
    }

    #[getter]
    fn max_num_seqs(&self, py: Python<'_>) -> usize {
        self.planner(py).max_num_seqs()
    }

    #[getter]
    fn num_speculative_tokens(&self, py: Python<'_>) -> usize {
        self.planner(py).num_speculative_tokens()
    }

    #[pyo3(signature = (*, has_lora = false))]
    fn costs(&self, py: Python<'_>, has_lora: bool) -> CostModel {
        CostModel::from_core(self.planner(py).costs(has_lora).clone())
    }

    fn conditional_acceptance(&self, py: Python<'_>) -> Vec<f64> {
        self.planner(py).conditional_acceptance().to_vec()
    }

    #[pyo3(signature = (row, *, has_lora = false))]
    fn reset(&self, py: Python<'_>, row: i64, has_lora: bool) -> PyResult<()> {
        let row = size(py, Class::InvalidBuffer, "rows", row)?;
        self.planner(py).reset(row, has_lora).or_raise(py)
    }

    fn decide(
        &self,
        py: Python<'_>,
        rows: &Bound<'_, PyAny>,
        caps: &Bound<'_, PyAny>,
        lags: &Bound<'_, PyAny>,
        ks: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let (rows, caps, lags): (In, In, In) =
            (readonly("rows", rows)?, readonly("caps", caps)?, readonly("lags", lags)?);
        let mut ks: Out = readwrite("ks", ks)?;
        let (rows, caps, lags) = (rows.as_slice()?, caps.as_slice()?, lags.as_slice()?);
        self.planner(py).decide(rows, caps, lags, ks.as_slice_mut()?).or_raise(py)
    }

    #[pyo3(signature = (rows, ks, drafted, accepted, ms = None))]
    fn settle(
        &self,
        py: Python<'_>,
        rows: &Bound<'_, PyAny>,
        ks: &Bound<'_, PyAny>,
        drafted: &Bound<'_, PyAny>,
        accepted: &Bound<'_, PyAny>,
        ms: Option<f64>,
    ) -> PyResult<()> {
        let (rows, ks): (In, In) = (readonly("rows", rows)?, readonly("ks", ks)?);
        let (drafted, accepted): (In, In) = (readonly("drafted", drafted)?, readonly("accepted", accepted)?);
        let (drafted, accepted) = (drafted.as_slice()?, accepted.as_slice()?);
        self.planner(py).settle(rows.as_slice()?, ks.as_slice()?, drafted, accepted, ms).or_raise(py)
    }

    fn take_collapsed(&self, py: Python<'_>) -> Vec<i64> {
        self.planner(py).take_collapsed().collect()
    }

    fn __repr__(&self, py: Python<'_>) -> String {
        let planner = self.planner(py);
        format!(
            "SpeculationPlanner(max_num_seqs={}, num_speculative_tokens={}, conditional_acceptance={:.3?})",
            planner.max_num_seqs(),
            planner.num_speculative_tokens(),
            planner.conditional_acceptance(),
        )
    }
}
