//! Host of an iteration in Python: grammars, texts of other tokenizers, agreement among ranks.

use crate::buffers::readonly;
use crate::called::Raised;
use crate::error::Class;
use numpy::{Ix1, PyArray1, PyReadonlyArray};
use pyo3::prelude::*;
use pyo3::types::PyTuple;
use specrs_core::must_be;
use specrs_cpu::iteration::{Host, Stage};
use specrs_cpu::{Error, Result};

/// Python object with the methods of `_StepHost` in `_core.pyi`; None for steps that need no host.
pub(crate) struct PyHost {
    object: Option<Py<PyAny>>,
    /// Whether the object is called at the stages of a drafter.
    has_ranks: bool,
    raised: Raised,
}

impl PyHost {
    /// Wraps a Python object as a host.
    ///
    /// # Errors
    /// If the object does not have `has_ranks`.
    pub(crate) fn new(py: Python<'_>, object: Option<Py<PyAny>>, raised: Raised) -> PyResult<Self> {
        let has_ranks = match &object {
            Some(object) => object.getattr(py, "has_ranks")?.extract(py)?,
            None => false,
        };
        Ok(Self { object, has_ranks, raised })
    }

    fn call<T>(
        &self,
        name: &str,
        arguments: impl for<'py> FnOnce(Python<'py>) -> PyResult<Bound<'py, PyTuple>>,
        read: impl FnOnce(&Bound<'_, PyAny>) -> PyResult<T>,
    ) -> Result<T> {
        let Some(object) = &self.object else {
            return Err(Error::Host { message: must_be("host", "None", format_args!("an object with {name}()")) });
        };
        let done = Python::attach(|py| read(&object.bind(py).call_method1(name, arguments(py)?)?));
        done.map_err(|raised| self.raised.keep(raised))
    }

    /// Calls a method with two numbers and writes the mask that it returns.
    fn mask(&self, name: &str, numbers: (usize, i64), mask: &mut [u32]) -> Result<()> {
        let copy = |returned: &Bound<'_, PyAny>| {
            let words: PyReadonlyArray<'_, i32, Ix1> = readonly("mask", returned)?;
            let words = words.as_slice()?;
            if words.len() != mask.len() {
                let message = format!("mask: {} words; must be {}", words.len(), mask.len());
                return Err(Class::InvalidBuffer.error(returned.py(), message));
            }
            for (own, &word) in mask.iter_mut().zip(words) {
                *own = word.cast_unsigned();
            }
            Ok(())
        };
        self.call(name, |py| numbers.into_pyobject(py), copy)
    }
}

fn ids(returned: &Bound<'_, PyAny>) -> PyResult<Vec<i64>> {
    let found: PyReadonlyArray<'_, i64, Ix1> = readonly("ids", returned)?;
    Ok(found.as_slice()?.to_vec())
}

impl Host for PyHost {
    fn start_grammar(&mut self, index: usize, row: usize, mask: &mut [u32]) -> Result<()> {
        self.mask("start_grammar", (index, row as i64), mask)
    }

    fn advance_grammar(&mut self, index: usize, token: i64, mask: &mut [u32]) -> Result<()> {
        self.mask("advance_grammar", (index, token), mask)
    }

    fn draft_ids(&mut self, tokens: &[i64]) -> Result<Vec<i64>> {
        self.call("draft_ids", |py| (PyArray1::from_slice(py, tokens),).into_pyobject(py), ids)
    }

    fn target_ids(&mut self, tokens: &[i64], own: &[i64], drafted: &[i64]) -> Result<Vec<i64>> {
        self.call(
            "target_ids",
            |py| {
                let [tokens, own, drafted] = [tokens, own, drafted].map(|ids| PyArray1::from_slice(py, ids));
                (tokens, own, drafted).into_pyobject(py)
            },
            ids,
        )
    }

    fn enter(&mut self, stage: Stage) {
        if self.has_ranks {
            // What it raises is raised again by `leave`, which all ranks come to.
            let _ = self.call("enter", |py| (stage as u8,).into_pyobject(py), |_| Ok(()));
        }
    }

    fn leave(&mut self, stage: Stage, error: Option<&Error>) -> Result<bool> {
        if !self.has_ranks {
            return Ok(error.is_some());
        }
        self.call(
            "leave",
            |py| {
                let raised = error.map(|error| self.raised.of(py, error).into_value(py));
                (stage as u8, raised).into_pyobject(py)
            },
            |returned| returned.extract(),
        )
    }
}
