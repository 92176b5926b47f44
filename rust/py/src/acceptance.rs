//! `AcceptanceTracker` for Python.

use crate::error::{Class, OrRaise, size};
use pyo3::prelude::*;
use pyo3::sync::MutexExt;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Largest number of draft tokens (K) of a tracker, equal to that of a scheduler. It is limited because a tracker
/// allocates one count per draft token.
const MAX_SPECULATIVE_TOKENS: usize = 1 << 10;

#[pyclass(frozen)]
pub(crate) struct AcceptanceTracker(Mutex<specrs_core::AcceptanceTracker>);

impl AcceptanceTracker {
    pub(crate) fn from_core(statistics: specrs_core::AcceptanceTracker) -> Self {
        Self(Mutex::new(statistics))
    }

    /// Converts the K of a tracker, and raises `InvalidConfig` if it is negative or too large.
    pub(crate) fn checked(py: Python<'_>, num_speculative_tokens: i64) -> PyResult<usize> {
        let k = size(py, Class::InvalidConfig, "num_speculative_tokens", num_speculative_tokens)?;
        if k > MAX_SPECULATIVE_TOKENS {
            let allowed = format!("from 0 to {MAX_SPECULATIVE_TOKENS}");
            return Err(Class::InvalidConfig.out_of_range(py, "num_speculative_tokens", k, allowed));
        }
        Ok(k)
    }

    fn statistics(&self, py: Python<'_>) -> MutexGuard<'_, specrs_core::AcceptanceTracker> {
        self.0.lock_py_attached(py).unwrap_or_else(PoisonError::into_inner)
    }
}

#[pymethods]
impl AcceptanceTracker {
    #[new]
    fn new(py: Python<'_>, num_speculative_tokens: i64) -> PyResult<Self> {
        let k = Self::checked(py, num_speculative_tokens)?;
        Ok(Self::from_core(specrs_core::AcceptanceTracker::new(k)))
    }

    #[getter]
    fn num_speculative_tokens(&self, py: Python<'_>) -> usize {
        self.statistics(py).num_speculative_tokens()
    }

    fn record(&self, py: Python<'_>, drafted: i64, accepted: i64) -> PyResult<()> {
        let drafted = size(py, Class::InvalidAcceptance, "drafted", drafted)?;
        let accepted = size(py, Class::InvalidAcceptance, "accepted", accepted)?;
        self.statistics(py).record(drafted, accepted).or_raise(py)
    }

    fn reset(&self, py: Python<'_>) {
        self.statistics(py).reset();
    }

    #[getter]
    fn drafts(&self, py: Python<'_>) -> u64 {
        self.statistics(py).drafts()
    }

    #[getter]
    fn draft_tokens(&self, py: Python<'_>) -> u64 {
        self.statistics(py).draft_tokens()
    }

    #[getter]
    fn accepted_tokens(&self, py: Python<'_>) -> u64 {
        self.statistics(py).accepted_tokens()
    }

    #[getter]
    fn acceptance_length(&self, py: Python<'_>) -> f64 {
        self.statistics(py).acceptance_length()
    }

    #[getter]
    fn acceptance_rate(&self, py: Python<'_>) -> f64 {
        self.statistics(py).acceptance_rate()
    }

    #[getter]
    fn per_position(&self, py: Python<'_>) -> Vec<f64> {
        self.statistics(py).per_position()
    }

    #[getter]
    fn accepted_per_position(&self, py: Python<'_>) -> Vec<u64> {
        self.statistics(py).accepted_per_position()
    }

    #[getter]
    fn histogram(&self, py: Python<'_>) -> Vec<u64> {
        self.statistics(py).histogram().to_vec()
    }

    fn __repr__(&self, py: Python<'_>) -> String {
        let statistics = self.statistics(py);
        format!(
            "AcceptanceTracker(num_speculative_tokens={}, drafts={}, draft_tokens={}, accepted_tokens={}, \
             acceptance_length={:.3}, acceptance_rate={:.3})",
            statistics.num_speculative_tokens(),
            statistics.drafts(),
            statistics.draft_tokens(),
            statistics.accepted_tokens(),
            statistics.acceptance_length(),
            statistics.acceptance_rate(),
        )
    }
}
