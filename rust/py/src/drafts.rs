//! Drafters as schedulers use them, and drafters that propose on the host.

use crate::acceptance::AcceptanceTracker;
use crate::buffers::{In, readonly};
use crate::error::{Class, OrRaise, size};
use numpy::PyArray1;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use specrs_core::{Drafter, HostDrafters, Number};

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
    #[pyo3(get)]
    keeps_hits: bool,
}

#[pymethods]
impl HiddenDrafter {
    #[new]
    #[pyo3(signature = (*, max_model_len, max_draft_lag, keeps_hits = false))]
    fn new(py: Python<'_>, max_model_len: i64, max_draft_lag: i64, keeps_hits: bool) -> PyResult<Self> {
        let size = |field, value| size(py, Class::InvalidConfig, field, value);
        Ok(Self {
            max_model_len: size("drafter.max_model_len", max_model_len)?,
            max_draft_lag: size("drafter.max_draft_lag", max_draft_lag)?,
            keeps_hits,
        })
    }

    fn __repr__(&self) -> String {
        let Self { max_model_len, max_draft_lag, keeps_hits } = self;
        let keeps = if *keeps_hits { ", keeps_hits=True" } else { "" };
        format!("HiddenDrafter(max_model_len={max_model_len}, max_draft_lag={max_draft_lag}{keeps})")
    }
}

#[pyclass(frozen)]
pub(crate) struct SharedKVDrafter {
    #[pyo3(get)]
    max_model_len: usize,
}

#[pymethods]
impl SharedKVDrafter {
    #[new]
    #[pyo3(signature = (*, max_model_len))]
    fn new(py: Python<'_>, max_model_len: i64) -> PyResult<Self> {
        Ok(Self { max_model_len: size(py, Class::InvalidConfig, "drafter.max_model_len", max_model_len)? })
    }

    fn __repr__(&self) -> String {
        format!("SharedKVDrafter(max_model_len={})", self.max_model_len)
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
        let k = AcceptanceTracker::checked(py, num_speculative_tokens)?;
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

/// Drafter on the host: its method, and its settings by name.
#[pyclass(frozen)]
pub(crate) struct HostDrafter {
    #[pyo3(get)]
    method: String,
    settings: Vec<(String, Number)>,
}

#[pymethods]
impl HostDrafter {
    #[new]
    #[pyo3(signature = (method, **settings))]
    fn new(py: Python<'_>, method: String, settings: Option<&Bound<'_, PyDict>>) -> PyResult<Self> {
        let mut given = Vec::new();
        for (name, value) in settings.into_iter().flatten() {
            let number = value.extract().map(Number::Integer).or_else(|_| value.extract().map(Number::Float))?;
            given.push((name.extract()?, number));
        }
        let drafter = Self { method, settings: given };
        drafter.add_to(py, &mut HostDrafters::default())?;
        Ok(drafter)
    }

    fn __repr__(&self) -> String {
        format!("HostDrafter(method={:?})", self.method)
    }
}

impl HostDrafter {
    /// Adds this drafter to `drafters`. Returns whether it replaced one of the same method.
    ///
    /// # Errors
    /// If the method or a setting is unknown, or a value is outside its range.
    fn add_to(&self, py: Python<'_>, drafters: &mut HostDrafters) -> PyResult<bool> {
        let given: Vec<_> = self.settings.iter().map(|(name, value)| (name.as_str(), *value)).collect();
        drafters.add(&self.method, &given).or_raise(py)
    }
}

/// One drafter in the argument `Scheduler(drafter=...)`.
#[derive(FromPyObject)]
pub(crate) enum OneDrafter<'py> {
    #[pyo3(transparent)]
    Cached(PyRef<'py, CachedDrafter>),
    #[pyo3(transparent)]
    Hidden(PyRef<'py, HiddenDrafter>),
    #[pyo3(transparent)]
    SharedKv(PyRef<'py, SharedKVDrafter>),
    #[pyo3(transparent)]
    Text(PyRef<'py, TextDrafter>),
    #[pyo3(transparent)]
    Host(PyRef<'py, HostDrafter>),
}

/// Argument `Scheduler(drafter=...)`, except None.
#[derive(FromPyObject)]
pub(crate) enum DrafterArgument<'py> {
    #[pyo3(transparent)]
    One(OneDrafter<'py>),
    #[pyo3(transparent)]
    Several(Vec<OneDrafter<'py>>),
}

impl DrafterArgument<'_> {
    /// Converts the argument to the drafter on the device and those on the host.
    ///
    /// # Errors
    /// If there are two drafters on the device, or two on the host with the same method.
    pub(crate) fn into_core(self, py: Python<'_>) -> PyResult<(Drafter, HostDrafters)> {
        let given = match self {
            Self::One(drafter) => vec![drafter],
            Self::Several(drafters) => drafters,
        };
        let (mut device, mut host) = (Drafter::None, HostDrafters::default());
        for drafter in given {
            let taken = match drafter {
                OneDrafter::Host(drafter) => drafter.add_to(py, &mut host)?,
                OneDrafter::Text(drafter) => std::mem::replace(&mut device, drafter.0) != Drafter::None,
                OneDrafter::SharedKv(drafter) => {
                    let drafter = Drafter::SharedKv { max_model_len: drafter.max_model_len };
                    std::mem::replace(&mut device, drafter) != Drafter::None
                }
                OneDrafter::Hidden(drafter) => {
                    let HiddenDrafter { max_model_len, max_draft_lag, keeps_hits } = *drafter;
                    let drafter = Drafter::Hidden { max_model_len, max_draft_lag, keeps_hits };
                    std::mem::replace(&mut device, drafter) != Drafter::None
                }
                OneDrafter::Cached(drafter) => {
                    let CachedDrafter { max_model_len, max_draft_lag, mask_token_id, cost_ratio } = *drafter;
                    let drafter = Drafter::Cached { max_model_len, max_draft_lag, mask_token_id, cost_ratio };
                    std::mem::replace(&mut device, drafter) != Drafter::None
                }
            };
            if taken {
                let allowed = "at most one CachedDrafter, HiddenDrafter, SharedKVDrafter or TextDrafter, and one HostDrafter of each \
                     method";
                return Err(Class::InvalidConfig.out_of_range(py, "drafter", "two of a kind", allowed));
            }
        }
        Ok((device, host))
    }
}
