//! `SuffixCache` for Python: checks arrays and numbers, calls the core once, maps its error.

use crate::acceptance::AcceptanceTracker;
use crate::buffers::{In, readonly};
use crate::error::{Class, OrRaise, size};
use numpy::PyArray1;
use pyo3::prelude::*;
use pyo3::sync::MutexExt;
use pyo3::types::PyDict;
use specrs_core::SuffixSettings;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Converts Python's numbers to settings and checks them.
pub(crate) fn settings(
    py: Python<'_>,
    max_tree_depth: i64,
    max_cached_requests: i64,
    max_spec_factor: f64,
    min_token_prob: f64,
    max_memory_bytes: i64,
) -> PyResult<SuffixSettings> {
    let size = |field, value| size(py, Class::InvalidConfig, field, value);
    let settings = SuffixSettings {
        max_tree_depth: size("max_tree_depth", max_tree_depth)?,
        max_cached_requests: size("max_cached_requests", max_cached_requests)?,
        max_spec_factor,
        min_token_prob,
        max_memory_bytes: size("max_memory_bytes", max_memory_bytes)?,
    };
    settings.validate().or_raise(py)?;
    Ok(settings)
}

#[pyclass(frozen)]
pub(crate) struct SuffixCache(Mutex<specrs_core::SuffixCache>);

impl SuffixCache {
    fn core(&self, py: Python<'_>) -> MutexGuard<'_, specrs_core::SuffixCache> {
        self.0.lock_py_attached(py).unwrap_or_else(PoisonError::into_inner)
    }
}

#[pymethods]
impl SuffixCache {
    #[new]
    #[pyo3(signature = (
        *, max_tree_depth = 24, max_cached_requests = 10_000, max_spec_factor = 1.0, min_token_prob = 0.1,
        max_memory_bytes = 1_073_741_824,
    ))]
    fn new(
        py: Python<'_>,
        max_tree_depth: i64,
        max_cached_requests: i64,
        max_spec_factor: f64,
        min_token_prob: f64,
        max_memory_bytes: i64,
    ) -> PyResult<Self> {
        let settings =
            settings(py, max_tree_depth, max_cached_requests, max_spec_factor, min_token_prob, max_memory_bytes)?;
        specrs_core::SuffixCache::new(settings).map(|core| Self(Mutex::new(core))).or_raise(py)
    }

    fn start_request(&self, py: Python<'_>, request_id: i64, prompt_token_ids: &Bound<'_, PyAny>) -> PyResult<()> {
        let tokens = tokens(py, "prompt_token_ids", prompt_token_ids)?;
        self.core(py).start_request(request_id, &tokens).or_raise(py)
    }

    fn append(&self, py: Python<'_>, request_id: i64, token_ids: &Bound<'_, PyAny>) -> PyResult<()> {
        let tokens = tokens(py, "token_ids", token_ids)?;
        self.core(py).append(request_id, &tokens).or_raise(py)
    }

    fn propose<'py>(
        &self,
        py: Python<'py>,
        request_id: i64,
        num_speculative_tokens: i64,
    ) -> PyResult<(Bound<'py, PyArray1<i64>>, f64, usize)> {
        let k = AcceptanceTracker::checked(py, num_speculative_tokens)?;
        let mut drafts = vec![0; k];
        let draft = self.core(py).propose(request_id, &mut drafts).or_raise(py)?;
        let tokens = drafts[..draft.len].iter().copied().map(i64::from).collect();
        Ok((PyArray1::from_vec(py, tokens), draft.score, draft.match_len))
    }

    fn stop_request(&self, py: Python<'_>, request_id: i64) -> PyResult<()> {
        self.core(py).stop_request(request_id).or_raise(py)
    }

    fn evict(&self, py: Python<'_>, request_id: i64) -> bool {
        self.core(py).evict(request_id)
    }

    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let stats = self.core(py).stats();
        let dict = PyDict::new(py);
        dict.set_item("num_requests", stats.num_requests)?;
        dict.set_item("num_cached_requests", stats.num_cached_requests)?;
        dict.set_item("num_output_tokens", stats.num_output_tokens)?;
        dict.set_item("num_request_tokens", stats.num_request_tokens)?;
        dict.set_item("num_nodes", stats.num_nodes)?;
        dict.set_item("memory_bytes", stats.memory_bytes)?;
        Ok(dict)
    }

    fn __contains__(&self, py: Python<'_>, request_id: i64) -> bool {
        self.core(py).is_running(request_id)
    }

    fn __repr__(&self, py: Python<'_>) -> String {
        let core = self.core(py);
        let (settings, stats) = (core.settings(), core.stats());
        format!(
            "SuffixCache(max_tree_depth={}, num_requests={}, num_cached_requests={})",
            settings.max_tree_depth, stats.num_requests, stats.num_cached_requests
        )
    }
}

fn tokens(py: Python<'_>, name: &str, array: &Bound<'_, PyAny>) -> PyResult<Vec<u32>> {
    let tokens: In<'_> = readonly(name, array)?;
    let check = |&token: &i64| {
        u32::try_from(token).map_err(|_| {
            Class::InvalidBuffer.out_of_range(py, name, token, format_args!("an id from 0 to {}", u32::MAX))
        })
    };
    tokens.as_slice()?.iter().map(check).collect()
}
