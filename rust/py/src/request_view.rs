//! View of a request in the scheduler, for Python: a copy.

use numpy::{PyArray1, ToPyArray};
use pyo3::prelude::*;
use specrs_core::RequestState;

#[pyclass(frozen)]
pub(crate) struct RequestView {
    state: RequestState,
    #[pyo3(get)]
    row: Option<usize>,
    #[pyo3(get)]
    num_tokens: usize,
    #[pyo3(get)]
    limit: usize,
    #[pyo3(get)]
    num_computed_tokens: usize,
    #[pyo3(get)]
    num_draft_computed_tokens: usize,
    #[pyo3(get)]
    num_speculative_tokens: usize,
    #[pyo3(get)]
    num_in_flight: usize,
    block_table: Vec<i64>,
}

impl RequestView {
    pub(crate) fn from_core(view: specrs_core::RequestView<'_>) -> Self {
        Self {
            state: view.state,
            row: view.row,
            num_tokens: view.num_tokens,
            limit: view.limit,
            num_computed_tokens: view.num_computed_tokens,
            num_draft_computed_tokens: view.num_draft_computed_tokens,
            num_speculative_tokens: view.num_speculative_tokens,
            num_in_flight: view.num_in_flight,
            block_table: view.block_table.to_vec(),
        }
    }
}

#[pymethods]
impl RequestView {
    #[getter]
    fn state(&self) -> &'static str {
        match self.state {
            RequestState::Waiting => "waiting",
            RequestState::Prefill => "prefill",
            RequestState::Decode => "decode",
            other => unreachable!("{other:?} has no name here"),
        }
    }

    #[getter]
    fn block_table<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<i64>> {
        self.block_table.to_pyarray(py)
    }

    fn __repr__(&self) -> String {
        format!(
            "RequestView(state={:?}, row={:?}, num_tokens={}, num_computed_tokens={}, num_draft_computed_tokens={}, \
             block_table={:?})",
            self.state(),
            self.row,
            self.num_tokens,
            self.num_computed_tokens,
            self.num_draft_computed_tokens,
            self.block_table,
        )
    }
}
