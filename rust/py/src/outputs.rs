//! `TokenDecoder`, `Output` and `Outputs` for Python: checks, conversions, and one call per step.

use crate::acceptance::AcceptanceTracker;
use crate::buffers::{In, Out, readonly, readwrite};
use crate::error::{Class, OrRaise, size};
use crate::scheduler::Scheduler;
use pyo3::prelude::*;
use pyo3::sync::MutexExt;
use specrs_core::scheduler::layout::{FINISH_ERROR, FINISH_LENGTH, FINISH_STOP};
use specrs_text::{Detokenizer, FINISH_ABORT, TextParams};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

#[pyclass(frozen)]
pub(crate) struct TokenDecoder(Arc<specrs_text::TokenDecoder>);

fn text_error(py: Python<'_>, error: &specrs_text::Error) -> PyErr {
    Class::InvalidTokenizer.error(py, error.to_string())
}

#[pymethods]
impl TokenDecoder {
    #[new]
    fn new(py: Python<'_>, json: &str) -> PyResult<Self> {
        let made = py.detach(|| specrs_text::TokenDecoder::from_json(json));
        made.map(|decoder| Self(Arc::new(decoder))).map_err(|error| text_error(py, &error))
    }

    #[pyo3(signature = (token_ids, *, skip_special_tokens = true))]
    #[expect(clippy::needless_pass_by_value, reason = "what a list converts to")]
    fn decode(&self, py: Python<'_>, token_ids: Vec<u32>, skip_special_tokens: bool) -> PyResult<String> {
        py.detach(|| self.0.decode(&token_ids, skip_special_tokens)).map_err(|error| text_error(py, &error))
    }

    #[expect(clippy::unused_self, reason = "Python's")]
    fn __repr__(&self) -> &'static str {
        "TokenDecoder()"
    }
}

#[pyclass(frozen)]
pub(crate) struct Output(Arc<Mutex<specrs_text::Output>>);

impl Output {
    fn core(&self, py: Python<'_>) -> MutexGuard<'_, specrs_text::Output> {
        self.0.lock_py_attached(py).unwrap_or_else(PoisonError::into_inner)
    }
}

#[pymethods]
impl Output {
    #[new]
    #[pyo3(signature = (
        request_id, prompt_token_ids, *, num_speculative_tokens = 0, decoder = None, skip_special_tokens = true, stop = vec![],
        include_stop_str_in_output = false, min_tokens = 0, keep_drafts = false,
    ))]
    #[expect(clippy::too_many_arguments, reason = "keyword-only settings")]
    #[expect(clippy::needless_pass_by_value, reason = "what a list converts to")]
    fn new(
        py: Python<'_>,
        request_id: i64,
        prompt_token_ids: Vec<u32>,
        num_speculative_tokens: i64,
        decoder: Option<&TokenDecoder>,
        skip_special_tokens: bool,
        stop: Vec<String>,
        include_stop_str_in_output: bool,
        min_tokens: i64,
        keep_drafts: bool,
    ) -> PyResult<Self> {
        let num_speculative_tokens = AcceptanceTracker::checked(py, num_speculative_tokens)?;
        let min_tokens = size(py, Class::InvalidRequest, "min_tokens", min_tokens)?;
        if stop.iter().any(String::is_empty) {
            return Err(Class::InvalidRequest.out_of_range(py, "stop", "''", "a string that is not empty"));
        }
        let params = TextParams { skip_special_tokens, stop, include_stop_str_in_output, min_tokens };
        let detokenizer = decoder
            .map(|decoder| py.detach(|| Detokenizer::new(decoder.0.clone(), params, &prompt_token_ids)))
            .transpose()
            .map_err(|error| text_error(py, &error))?;
        let output = specrs_text::Output::new(
            request_id,
            prompt_token_ids.len(),
            num_speculative_tokens,
            detokenizer,
            include_stop_str_in_output,
        );
        Ok(Self(Arc::new(Mutex::new(if keep_drafts { output.keeping_drafts() } else { output }))))
    }

    #[getter]
    fn request_id(&self, py: Python<'_>) -> i64 {
        self.core(py).request_id()
    }

    #[getter]
    fn num_tokens(&self, py: Python<'_>) -> usize {
        self.core(py).tokens().len()
    }

    #[pyo3(signature = (start = 0))]
    fn token_ids(&self, py: Python<'_>, start: usize) -> Vec<u32> {
        self.core(py).tokens().get(start..).unwrap_or_default().to_vec()
    }

    #[getter]
    fn text(&self, py: Python<'_>) -> String {
        self.core(py).text().to_owned()
    }

    #[getter]
    fn stable_text(&self, py: Python<'_>) -> String {
        self.core(py).stable_text().to_owned()
    }

    #[pyo3(signature = (start = 0))]
    fn stable_text_from(&self, py: Python<'_>, start: usize) -> PyResult<(String, usize)> {
        let core = self.core(py);
        let Some(text) = core.stable_text_from(start) else {
            let allowed = "an end that an earlier call returned";
            return Err(Class::InvalidRequest.out_of_range(py, "start", start, allowed));
        };
        Ok((text.to_owned(), start + text.len()))
    }

    #[getter]
    fn finish_reason(&self, py: Python<'_>) -> Option<i64> {
        self.core(py).end().map(|end| end.reason)
    }

    #[getter]
    fn finish_time(&self, py: Python<'_>) -> Option<f64> {
        self.core(py).end().map(|end| end.time)
    }

    #[getter]
    fn error(&self, py: Python<'_>) -> Option<String> {
        self.core(py).end().and_then(|end| end.error.clone())
    }

    #[getter]
    fn error_flags(&self, py: Python<'_>) -> i64 {
        self.core(py).end().map_or(0, |end| end.flags)
    }

    #[getter]
    fn stop(&self, py: Python<'_>) -> Option<usize> {
        self.core(py).stop()
    }

    #[getter]
    fn first_token_time(&self, py: Python<'_>) -> Option<f64> {
        self.core(py).first_token_time()
    }

    fn acceptance(&self, py: Python<'_>) -> AcceptanceTracker {
        AcceptanceTracker::from_core(self.core(py).acceptance().clone())
    }

    #[pyo3(signature = (start = 0))]
    fn drafts(&self, py: Python<'_>, start: usize) -> Option<Vec<(usize, usize, Vec<u32>)>> {
        let core = self.core(py);
        let drafts = core.drafts()?.get(start..).unwrap_or_default();
        Some(drafts.iter().map(|draft| (draft.start, draft.num_accepted, draft.rejected.clone())).collect())
    }

    fn record(&self, py: Python<'_>, drafted: i64, accepted: i64) -> PyResult<()> {
        let drafted = size(py, Class::InvalidAcceptance, "drafted", drafted)?;
        let accepted = size(py, Class::InvalidAcceptance, "accepted", accepted)?;
        self.core(py).acceptance_mut().record(drafted, accepted).or_raise(py)
    }

    #[pyo3(signature = (token_ids, *, ended_by_token = false, now = 0.0))]
    fn append(&self, py: Python<'_>, token_ids: Vec<u32>, ended_by_token: bool, now: f64) -> PyResult<(usize, bool)> {
        let token_ids: Vec<i64> = token_ids.into_iter().map(i64::from).collect();
        let append = || self.0.lock().unwrap_or_else(PoisonError::into_inner).append(&token_ids, ended_by_token, now);
        py.detach(append).map_err(|error| text_error(py, &error))
    }

    #[pyo3(signature = (reason, *, now = 0.0))]
    fn finish(&self, py: Python<'_>, reason: i64, now: f64) -> PyResult<()> {
        if ![FINISH_STOP, FINISH_LENGTH, FINISH_ABORT, FINISH_ERROR].contains(&reason) {
            return Err(Class::InvalidRequest.out_of_range(py, "reason", reason, "one of the ends, FINISH_*"));
        }
        self.core(py).finish(reason, None, now);
        Ok(())
    }

    fn __repr__(&self, py: Python<'_>) -> String {
        let core = self.core(py);
        format!("Output(request_id={}, num_tokens={})", core.request_id(), core.tokens().len())
    }
}

#[pyclass(frozen)]
pub(crate) struct Outputs(Mutex<specrs_text::Outputs>);

impl Outputs {
    fn core(&self, py: Python<'_>) -> MutexGuard<'_, specrs_text::Outputs> {
        self.0.lock_py_attached(py).unwrap_or_else(PoisonError::into_inner)
    }
}

#[pymethods]
impl Outputs {
    #[new]
    fn new() -> Self {
        Self(Mutex::new(specrs_text::Outputs::new()))
    }

    fn add(&self, py: Python<'_>, output: &Output) {
        let id = output.core(py).request_id();
        self.core(py).insert(id, output.0.clone());
    }

    fn remove(&self, py: Python<'_>, request_id: i64) -> bool {
        self.core(py).remove(request_id)
    }

    #[getter]
    fn num_tokens(&self, py: Python<'_>) -> u64 {
        self.core(py).num_tokens()
    }

    fn __len__(&self, py: Python<'_>) -> usize {
        self.core(py).len()
    }

    #[pyo3(signature = (scheduler, step_id, results, settled, *, now = 0.0, fault = None))]
    #[expect(clippy::too_many_arguments, reason = "as Scheduler.settle, and two by keyword")]
    fn settle(
        &self,
        py: Python<'_>,
        scheduler: &Scheduler,
        step_id: i64,
        results: &Bound<'_, PyAny>,
        settled: &Bound<'_, PyAny>,
        now: f64,
        fault: Option<&str>,
    ) -> PyResult<(Vec<i64>, Vec<i64>)> {
        let step_id = size(py, Class::SettleOrder, "step_id", step_id)? as u64;
        let results: In = readonly("results", results)?;
        let mut settled: Out = readwrite("settled", settled)?;
        let (results, settled) = (results.as_slice()?, settled.as_slice_mut()?);
        let layouts = {
            let mut core = scheduler.core(py);
            core.settle(step_id, results, settled).or_raise(py)?;
            (*core.results_layout(), *core.settled_layout())
        };
        // Other threads may run meanwhile; a signal waits for this call to return, so that a step is delivered as a
        // whole.
        let specrs_text::Delivered { touched, ended, stopped } = py.detach(|| {
            let mut outputs = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            outputs.deliver((&layouts.0, results), (&layouts.1, settled), now, fault).clone()
        });
        for request_id in stopped {
            scheduler.core(py).abort(request_id).or_raise(py)?;
        }
        Ok((touched, ended))
    }

    fn __repr__(&self, py: Python<'_>) -> String {
        format!("Outputs(len={})", self.core(py).len())
    }
}
