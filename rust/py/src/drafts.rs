//! Drafters as schedulers know them.

use crate::error::{Class, size};
use pyo3::prelude::*;
use specrs_core::Drafter;

#[pyclass(frozen, module = "specrs._core")]
#[derive(Clone, Copy)]
pub(crate) struct CachedDrafter {
    #[pyo3(get)]
    max_model_len: usize,
    #[pyo3(get)]
    max_draft_lag: usize,
    #[pyo3(get)]
    cost_ratio: f64,
}

#[pymethods]
impl CachedDrafter {
    #[new]
    #[pyo3(signature = (*, max_model_len, max_draft_lag = 2, cost_ratio = 1.0))]
    fn new(py: Python<'_>, max_model_len: i64, max_draft_lag: i64, cost_ratio: f64) -> PyResult<Self> {
        let size = |field, value| size(py, Class::InvalidConfig, field, value);
        Ok(Self {
            max_model_len: size("drafter.max_model_len", max_model_len)?,
            max_draft_lag: size("drafter.max_draft_lag", max_draft_lag)?,
            cost_ratio,
        })
    }

    fn __repr__(&self) -> String {
        let Self { max_model_len, max_draft_lag, cost_ratio } = self;
        format!("CachedDrafter(max_model_len={max_model_len}, max_draft_lag={max_draft_lag}, cost_ratio={cost_ratio})")
    }
}

/// What `Scheduler(drafter=...)` takes, besides None.
#[derive(FromPyObject)]
pub(crate) enum DrafterArgument<'py> {
    #[pyo3(transparent)]
    Cached(PyRef<'py, CachedDrafter>),
}

impl DrafterArgument<'_> {
    pub(crate) fn into_core(self) -> Drafter {
        match self {
            Self::Cached(drafter) => {
                let CachedDrafter { max_model_len, max_draft_lag, cost_ratio } = *drafter;
                Drafter::Cached { max_model_len, max_draft_lag, cost_ratio }
            }
        }
    }
}
