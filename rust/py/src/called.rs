//! Models whose passes Python computes, such as transformers modules, models on several ranks, and float64 models.

use crate::buffers::readonly;
use crate::error::{Class, cpu_to_py};
use numpy::{Ix1, Ix2, Ix3, PyArray1, PyArray2, PyArray3, PyArrayMethods, PyReadonlyArray};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};
use specrs_core::sampling::{largest, lowest_id};
use specrs_cpu::iteration::{Facts, Model};
use specrs_cpu::{Entries, Error, HeadStates, Output, Pass, Result};
use std::sync::{Arc, Mutex};

/// Exceptions that the host's code has raised in a step, each with the message of the error that represents it.
#[derive(Clone, Default)]
pub(crate) struct Raised(Arc<Mutex<Vec<(String, PyErr)>>>);

impl Raised {
    /// Removes the exceptions of the previous step.
    pub(crate) fn clear(&self) {
        crate::mutex::lock(&self.0).clear();
    }

    /// Stores an exception and returns the error that represents it.
    pub(crate) fn keep(&self, raised: PyErr) -> Error {
        let message = raised.to_string();
        crate::mutex::lock(&self.0).push((message.clone(), raised));
        Error::Host { message }
    }

    /// Returns the exception that an error represents, or a new one for other errors.
    pub(crate) fn of(&self, py: Python<'_>, error: &Error) -> PyErr {
        let raised = crate::mutex::lock(&self.0);
        let found = match error {
            Error::Host { message } => raised.iter().find(|(said, _)| said == message),
            _ => None,
        };
        found.map_or_else(|| cpu_to_py(py, error), |(_, raised)| raised.clone_ref(py))
    }

    /// Returns an interrupt among the exceptions, which must always be raised.
    pub(crate) fn interrupt(&self, py: Python<'_>) -> Option<PyErr> {
        let raised = crate::mutex::lock(&self.0);
        let found = raised.iter().find(|(_, raised)| !raised.is_instance_of::<pyo3::exceptions::PyException>(py));
        found.map(|(_, raised)| raised.clone_ref(py))
    }
}

/// Model as a Python object with `forward`, `logits`, `hidden` and `fuse`; see `_CallableModel` in `_core.pyi`.
pub(crate) struct Called {
    object: Py<PyAny>,
    vocab_size: usize,
    hidden_size: usize,
    num_layers: usize,
    num_ids: usize,
    target_ids: Option<Vec<i64>>,
    hidden_layers: (Vec<usize>, usize),
    finite: Vec<bool>,
    raised: Raised,
}

impl Called {
    /// Wraps a Python object as a model.
    ///
    /// # Errors
    /// If the object lacks one of a model's sizes.
    pub(crate) fn new(object: &Bound<'_, PyAny>, raised: Raised) -> PyResult<Self> {
        let size = |name: &str| object.getattr(name)?.extract::<usize>();
        let target_ids = object.getattr("target_ids")?;
        let target_ids: Option<PyReadonlyArray<'_, i64, Ix1>> =
            if target_ids.is_none() { None } else { Some(readonly("target_ids", &target_ids)?) };
        let target_ids = match target_ids {
            Some(ids) => Some(ids.as_slice()?.to_vec()),
            None => None,
        };
        Ok(Self {
            vocab_size: size("vocab_size")?,
            hidden_size: size("hidden_size")?,
            num_layers: size("num_layers")?,
            num_ids: size("num_ids")?,
            target_ids,
            hidden_layers: (object.getattr("aux_hidden_state_layers")?.extract()?, size("aux_hidden_state_size")?),
            object: object.clone().unbind(),
            finite: Vec::new(),
            raised,
        })
    }

    /// Runs one pass in Python. `wanted` are the rows whose logits it returns, or with `keeps` whose hidden states it
    /// keeps.
    fn pass(
        &mut self,
        pass: &Pass<'_>,
        head_states: Option<HeadStates<'_>>,
        (wanted, keeps): (&[usize], bool),
        entries: &mut Entries<'_>,
        logits: &mut Vec<f32>,
    ) -> Result<()> {
        let done = Python::attach(|py| {
            let inputs = pass_inputs(py, pass)?;
            let width = self.hidden_size;
            let head_states = match head_states {
                Some(head_states) => Some(PyArray1::from_slice(py, head_states.hidden).reshape([pass.len(), width])?),
                None => None,
            };
            let wanted_rows = indices(py, wanted);
            let layers = entries.layers.to_vec();
            let returned =
                self.object.bind(py).call_method1("forward", (inputs, wanted_rows, keeps, layers, head_states))?;
            let (scores, states, finite): (Bound<'_, PyAny>, Bound<'_, PyAny>, Bound<'_, PyAny>) =
                returned.extract()?;
            if !wanted.is_empty() && !keeps {
                copy::<Ix2>("logits", &scores, &[wanted.len(), self.num_ids], logits)?;
            }
            if !entries.layers.is_empty() {
                let mut found = Vec::new();
                copy::<Ix3>("states", &states, &[pass.len(), entries.layers.len(), width], &mut found)?;
                entries.states.copy_from_slice(&found);
            }
            self.finite.clear();
            if !finite.is_none() {
                let rows: PyReadonlyArray<'_, bool, Ix1> = readonly("finite", &finite)?;
                self.finite.extend_from_slice(rows.as_slice()?);
            }
            Ok(())
        });
        done.map_err(|raised| self.raised.keep(raised))
    }
}

impl Model for Called {
    fn facts(&self) -> Facts<'_> {
        Facts {
            vocab_size: self.vocab_size,
            hidden_size: self.hidden_size,
            num_layers: self.num_layers,
            num_ids: self.num_ids,
            target_ids: self.target_ids.as_deref(),
            hidden_layers: (&self.hidden_layers.0, self.hidden_layers.1),
            shares_kv: false,
        }
    }

    fn forward(
        &mut self,
        pass: &Pass<'_>,
        head_states: Option<HeadStates<'_>>,
        output: Output<'_>,
        mut entries: Entries<'_>,
    ) -> Result<()> {
        let rows = match &output {
            Output::Nothing => &[],
            Output::Logits { rows, .. } | Output::Argmax { rows, .. } | Output::Hidden { rows, .. } => *rows,
        };
        let mut scores = Vec::new();
        self.pass(pass, head_states, (rows, false), &mut entries, &mut scores)?;
        let all = scores.chunks_exact(self.num_ids);
        match output {
            Output::Logits { num_ids, logits, .. } => {
                for (scores, logits) in all.zip(logits.chunks_exact_mut(num_ids)) {
                    logits.copy_from_slice(&scores[..num_ids]);
                }
            }
            Output::Argmax { num_ids, ids, top, .. } => {
                for ((scores, id), top) in all.zip(ids).zip(top) {
                    let scores = &scores[..num_ids];
                    *top = largest(scores);
                    *id = lowest_id(scores, *top) as i64;
                }
            }
            Output::Nothing | Output::Hidden { .. } => {}
        }
        Ok(())
    }

    fn forward_keeping(&mut self, pass: &Pass<'_>, rows: &[usize], mut entries: Entries<'_>) -> Result<()> {
        self.pass(pass, None, (rows, true), &mut entries, &mut Vec::new())
    }

    fn logits(&mut self, rows: &[usize], logits: &mut [f32]) -> Result<()> {
        let done = Python::attach(|py| {
            let returned = self.object.bind(py).call_method1("logits", (indices(py, rows),))?;
            let mut found = Vec::new();
            copy::<Ix2>("logits", &returned, &[rows.len(), self.num_ids], &mut found)?;
            logits.copy_from_slice(&found);
            Ok(())
        });
        done.map_err(|raised| self.raised.keep(raised))
    }

    fn hidden(&mut self, rows: &[usize], hidden: &mut [f32]) -> Result<()> {
        let done = Python::attach(|py| {
            let returned = self.object.bind(py).call_method1("hidden", (indices(py, rows),))?;
            let mut found = Vec::new();
            copy::<Ix2>("hidden", &returned, &[rows.len(), self.hidden_size], &mut found)?;
            hidden.copy_from_slice(&found);
            Ok(())
        });
        done.map_err(|raised| self.raised.keep(raised))
    }

    fn finite(&self) -> &[bool] {
        &self.finite
    }

    fn restore_states(&mut self, row: usize, slot: usize) -> Result<()> {
        let done = Python::attach(|py| self.object.bind(py).call_method1("restore_states", (row, slot)).map(|_| ()));
        done.map_err(|raised| self.raised.keep(raised))
    }

    fn fuse(&mut self, states: &[f32], fused: &mut [f32]) -> Result<()> {
        let (layers, size) = (self.hidden_layers.0.len(), self.hidden_layers.1);
        let done = Python::attach(|py| {
            let rows = states.len() / (layers * size).max(1);
            let given: Bound<'_, PyArray3<f32>> = PyArray1::from_slice(py, states).reshape([rows, layers, size])?;
            let returned = self.object.bind(py).call_method1("fuse", (given,))?;
            let mut found = Vec::new();
            copy::<Ix2>("fused", &returned, &[rows, self.hidden_size], &mut found)?;
            fused.copy_from_slice(&found);
            Ok(())
        });
        done.map_err(|raised| self.raised.keep(raised))
    }
}

/// Copies an array of the given shape into `out`.
fn copy<D: numpy::ndarray::Dimension>(
    name: &str,
    array: &Bound<'_, PyAny>,
    shape: &[usize],
    out: &mut Vec<f32>,
) -> PyResult<()> {
    let found: PyReadonlyArray<'_, f32, D> = readonly(name, array)?;
    let values = found.as_array();
    if values.shape() != shape {
        let message = format!("{name}: shape is {:?}; must be {shape:?}", values.shape());
        return Err(Class::InvalidBuffer.error(array.py(), message));
    }
    out.extend_from_slice(found.as_slice()?);
    Ok(())
}

fn indices<'py>(py: Python<'py>, rows: &[usize]) -> Bound<'py, PyArray1<i64>> {
    PyArray1::from_iter(py, rows.iter().map(|&row| row as i64))
}

/// Converts a pass to the keywords of `PassInputs`, with new arrays. Rows of one sequence are next to each other.
fn pass_inputs<'py>(py: Python<'py>, pass: &Pass<'_>) -> PyResult<Bound<'py, PyDict>> {
    let (mut q_start, mut rows) = (vec![0_i64], Vec::new());
    for i in 0..pass.len() {
        if i > 0 && pass.sequences[i] != pass.sequences[i - 1] {
            q_start.push(i as i64);
        }
        if rows.last() != Some(&pass.sequences[i]) {
            rows.push(pass.sequences[i]);
        }
    }
    q_start.push(pass.len() as i64);
    let max_q_len = q_start.windows(2).map(|pair| pair[1] - pair[0]).max().unwrap_or(0);
    let max_context = pass.positions.iter().max().map_or(0, |&last| last + 1);
    let table = |whole: &[i64]| -> Vec<i64> {
        let row = |&row: &usize| whole[row * pass.max_blocks..][..pass.max_blocks].iter().copied();
        rows.iter().flat_map(row).collect()
    };
    let two = |values: Vec<i64>, count: usize| -> PyResult<Bound<'py, PyArray2<i64>>> {
        let width = values.len() / count.max(1);
        PyArray1::from_vec(py, values).reshape([count, width])
    };
    let groups = pass.group_tables.len() / pass.block_table.len().max(1);
    let inputs = PyDict::new(py);
    inputs.set_item("input_ids", PyArray1::from_slice(py, pass.tokens))?;
    inputs.set_item("positions", PyArray1::from_slice(py, pass.positions))?;
    inputs.set_item("slots", PyArray1::from_slice(py, pass.slots))?;
    inputs.set_item("q_start", PyArray1::from_vec(py, q_start))?;
    inputs.set_item("block_table", two(table(pass.block_table), rows.len())?)?;
    inputs.set_item("max_q_len", max_q_len)?;
    inputs.set_item("max_context", max_context)?;
    inputs.set_item("prompts", pass.prompts)?;
    inputs.set_item("rows", indices(py, &rows))?;
    if !pass.snapshots.is_empty() {
        let snapshots: Vec<_> = pass.snapshots.iter().map(|one| (one.row, one.len, one.slot)).collect();
        inputs.set_item("snapshots", PyTuple::new(py, snapshots)?)?;
    }
    if !pass.k_start.is_empty() {
        inputs.set_item("k_start", PyArray1::from_iter(py, rows.iter().map(|&row| pass.k_start[row])))?;
    }
    if groups > 0 {
        inputs.set_item("group_slots", two(pass.group_slots.to_vec(), groups)?)?;
        let mut tables = Vec::new();
        for whole in pass.group_tables.chunks_exact(pass.block_table.len()) {
            tables.extend(table(whole));
        }
        let tables = PyArray1::from_vec(py, tables).reshape([groups, rows.len(), pass.max_blocks])?;
        inputs.set_item("group_tables", tables)?;
    }
    Ok(inputs)
}
