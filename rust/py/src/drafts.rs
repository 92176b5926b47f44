//! Drafters as schedulers know them, and those that propose on the host.

use crate::buffers::{In, readonly};
use crate::error::{Class, OrRaise, size};
use crate::suffix::settings;
use numpy::PyArray1;
use pyo3::prelude::*;
use specrs_core::{Drafter, HostDrafters, SuffixSettings};

#[pyclass(frozen)]
#[derive(Clone, Copy)]
pub(crate) struct CachedDrafter {
    #[pyo3(get)]
    max_model_len: usize,
    #[pyo3(get)]
    max_draft_lag: usize,
    #[pyo3(get)]
    mask_token_id: Option<i64>,
    #[pyo3(get)]
    cost_ratio: f64,
}

#[pymethods]
impl CachedDrafter {
    #[new]
    #[pyo3(signature = (*, max_model_len, max_draft_lag = 2, mask_token_id = None, cost_ratio = 1.0))]
    fn new(
        py: Python<'_>,
        max_model_len: i64,
        max_draft_lag: i64,
        mask_token_id: Option<i64>,
        cost_ratio: f64,
    ) -> PyResult<Self> {
        let size = |field, value| size(py, Class::InvalidConfig, field, value);
        Ok(Self {
            max_model_len: size("drafter.max_model_len", max_model_len)?,
            max_draft_lag: size("drafter.max_draft_lag", max_draft_lag)?,
            mask_token_id,
            cost_ratio,
        })
    }

    fn __repr__(&self) -> String {
        let Self { max_model_len, max_draft_lag, mask_token_id, cost_ratio } = self;
        let mask = mask_token_id.map_or("None".to_owned(), |id| id.to_string());
        format!(
            "CachedDrafter(max_model_len={max_model_len}, max_draft_lag={max_draft_lag}, mask_token_id={mask}, \
             cost_ratio={cost_ratio})"
        )
    }
}

#[pyclass(frozen)]
#[derive(Clone, Copy)]
pub(crate) struct HiddenDrafter {
    #[pyo3(get)]
    max_model_len: usize,
    #[pyo3(get)]
    max_draft_lag: usize,
}

#[pymethods]
impl HiddenDrafter {
    #[new]
    #[pyo3(signature = (*, max_model_len, max_draft_lag))]
    fn new(py: Python<'_>, max_model_len: i64, max_draft_lag: i64) -> PyResult<Self> {
        let size = |field, value| size(py, Class::InvalidConfig, field, value);
        Ok(Self {
            max_model_len: size("drafter.max_model_len", max_model_len)?,
            max_draft_lag: size("drafter.max_draft_lag", max_draft_lag)?,
        })
    }

    fn __repr__(&self) -> String {
        let Self { max_model_len, max_draft_lag } = self;
        format!("HiddenDrafter(max_model_len={max_model_len}, max_draft_lag={max_draft_lag})")
    }
}

#[pyclass(frozen)]
#[derive(Clone, Copy)]
pub(crate) struct TextDrafter(Drafter);

#[pymethods]
impl TextDrafter {
    #[new]
    fn new() -> Self {
        Self(Drafter::Text)
    }

    fn __repr__(&self) -> String {
        format!("{:?}Drafter()", self.0)
    }
}

/// The most drafts of one proposal, as of a scheduler's K.
pub(crate) const MAX_DRAFTS: usize = 1024;

#[pyclass(frozen)]
pub(crate) struct NgramProposer(specrs_core::NgramProposer);

#[pymethods]
impl NgramProposer {
    #[new]
    #[pyo3(signature = (prompt_lookup_min = 5, prompt_lookup_max = 5))]
    fn new(py: Python<'_>, prompt_lookup_min: i64, prompt_lookup_max: i64) -> PyResult<Self> {
        let min = size(py, Class::InvalidConfig, "prompt_lookup_min", prompt_lookup_min)?;
        let max = size(py, Class::InvalidConfig, "prompt_lookup_max", prompt_lookup_max)?;
        specrs_core::NgramProposer::new(min, max).map(Self).or_raise(py)
    }

    #[getter]
    fn prompt_lookup_min(&self) -> usize {
        self.0.prompt_lookup_min()
    }

    #[getter]
    fn prompt_lookup_max(&self) -> usize {
        self.0.prompt_lookup_max()
    }

    fn propose<'py>(
        &self,
        py: Python<'py>,
        token_ids: &Bound<'py, PyAny>,
        num_speculative_tokens: i64,
    ) -> PyResult<Bound<'py, PyArray1<i64>>> {
        let token_ids: In<'_> = readonly("token_ids", token_ids)?;
        let k = size(py, Class::InvalidConfig, "num_speculative_tokens", num_speculative_tokens)?;
        if k > MAX_DRAFTS {
            let message = format!("num_speculative_tokens = {k} is not allowed: expected 0 to {MAX_DRAFTS}");
            return Err(Class::InvalidConfig.error(py, message));
        }
        let mut drafts = vec![0; k];
        let len = self.0.propose(token_ids.as_slice()?, &mut drafts);
        drafts.truncate(len);
        Ok(PyArray1::from_vec(py, drafts))
    }

    fn __repr__(&self) -> String {
        let (min, max) = (self.prompt_lookup_min(), self.prompt_lookup_max());
        format!("NgramProposer(prompt_lookup_min={min}, prompt_lookup_max={max})")
    }
}

#[pyclass(frozen)]
#[derive(Clone, Copy)]
pub(crate) struct SuffixDrafter(SuffixSettings);

#[pymethods]
impl SuffixDrafter {
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
        settings(py, max_tree_depth, max_cached_requests, max_spec_factor, min_token_prob, max_memory_bytes).map(Self)
    }

    fn __repr__(&self) -> String {
        let SuffixSettings { max_tree_depth, max_cached_requests, .. } = self.0;
        format!("SuffixDrafter(max_tree_depth={max_tree_depth}, max_cached_requests={max_cached_requests})")
    }
}

/// One of what `Scheduler(drafter=...)` takes.
#[derive(FromPyObject)]
pub(crate) enum OneDrafter<'py> {
    #[pyo3(transparent)]
    Cached(PyRef<'py, CachedDrafter>),
    #[pyo3(transparent)]
    Hidden(PyRef<'py, HiddenDrafter>),
    #[pyo3(transparent)]
    Text(PyRef<'py, TextDrafter>),
    #[pyo3(transparent)]
    Ngram(PyRef<'py, NgramProposer>),
    #[pyo3(transparent)]
    Suffix(PyRef<'py, SuffixDrafter>),
}

/// What it takes, besides None.
#[derive(FromPyObject)]
pub(crate) enum DrafterArgument<'py> {
    #[pyo3(transparent)]
    One(OneDrafter<'py>),
    #[pyo3(transparent)]
    Several(Vec<OneDrafter<'py>>),
}

impl DrafterArgument<'_> {
    /// # Errors
    /// For two of a kind.
    pub(crate) fn into_core(self, py: Python<'_>) -> PyResult<(Drafter, HostDrafters)> {
        let given = match self {
            Self::One(drafter) => vec![drafter],
            Self::Several(drafters) => drafters,
        };
        let (mut device, mut host) = (Drafter::None, HostDrafters::default());
        for drafter in given {
            let taken = match drafter {
                OneDrafter::Ngram(proposer) => host.ngram.replace(proposer.0).is_some(),
                OneDrafter::Suffix(drafter) => host.suffix.replace(drafter.0).is_some(),
                OneDrafter::Text(drafter) => std::mem::replace(&mut device, drafter.0) != Drafter::None,
                OneDrafter::Hidden(drafter) => {
                    let HiddenDrafter { max_model_len, max_draft_lag } = *drafter;
                    let drafter = Drafter::Hidden { max_model_len, max_draft_lag };
                    std::mem::replace(&mut device, drafter) != Drafter::None
                }
                OneDrafter::Cached(drafter) => {
                    let CachedDrafter { max_model_len, max_draft_lag, mask_token_id, cost_ratio } = *drafter;
                    let drafter = Drafter::Cached { max_model_len, max_draft_lag, mask_token_id, cost_ratio };
                    std::mem::replace(&mut device, drafter) != Drafter::None
                }
            };
            if taken {
                let message = "drafter = two of a kind is not allowed: expected at most one CachedDrafter, HiddenDrafter or TextDrafter, NgramProposer, SuffixDrafter each";
                return Err(Class::InvalidConfig.error(py, message));
            }
        }
        Ok((device, host))
    }
}
