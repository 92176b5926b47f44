//! Sampling of fp32 rows in arrays of the caller.

use crate::buffers::{In, In2, Out, check_len, readonly, readwrite};
use crate::error::{Class, OrRaise, size};
use numpy::{Ix2, Ix3, PyReadonlyArray, PyReadwriteArray, PyUntypedArrayMethods};
use pyo3::prelude::*;
use specrs_core::philox::Purpose;
use specrs_core::sampling::{NUM_PARAMS, SamplingParams, largest as largest_of};
use std::sync::{Mutex, MutexGuard, PoisonError};

type Logits<'py> = PyReadonlyArray<'py, f32, Ix2>;

#[pyclass(frozen)]
pub(crate) struct Sampler(Mutex<specrs_core::sampling::Sampler>);

impl Sampler {
    fn lock(&self) -> MutexGuard<'_, specrs_core::sampling::Sampler> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[pymethods]
impl Sampler {
    #[new]
    fn new(py: Python<'_>, vocab_size: i64) -> PyResult<Self> {
        let vocab_size = size(py, Class::InvalidConfig, "vocab_size", vocab_size)?;
        specrs_core::sampling::Sampler::new(vocab_size).map(|sampler| Self(Mutex::new(sampler))).or_raise(py)
    }

    #[getter]
    fn vocab_size(&self) -> usize {
        self.lock().vocab_size()
    }

    #[pyo3(signature = (logits, params, seeds, rows, positions, purpose, tokens, largest, q=None, column=0))]
    #[allow(clippy::too_many_arguments)] // buffers, each with a name of its own
    fn draw(
        &self,
        py: Python<'_>,
        logits: &Bound<'_, PyAny>,
        params: &Bound<'_, PyAny>,
        seeds: &Bound<'_, PyAny>,
        rows: &Bound<'_, PyAny>,
        positions: &Bound<'_, PyAny>,
        purpose: i64,
        tokens: &Bound<'_, PyAny>,
        largest: &Bound<'_, PyAny>,
        q: Option<&Bound<'_, PyAny>>,
        column: i64,
    ) -> PyResult<()> {
        let logits: Logits<'_> = readonly("logits", logits)?;
        let state = State::borrow(py, params, seeds)?;
        let (rows, positions): (In<'_>, In<'_>) = (readonly("rows", rows)?, readonly("positions", positions)?);
        let mut tokens: Out<'_> = readwrite("tokens", tokens)?;
        let mut largest: PyReadwriteArray<'_, f32, numpy::Ix1> = readwrite("largest", largest)?;
        let mut q: Option<PyReadwriteArray<'_, f32, Ix3>> = q.map(|q| readwrite("q", q)).transpose()?;
        let Some(purpose) = Purpose::from_index(purpose) else {
            return Err(Class::InvalidConfig.out_of_range(py, "purpose", purpose, "from 0 (draft) to 3 (gumbel)"));
        };
        let column = size(py, Class::InvalidBuffer, "column", column)?;
        let (count, vocab_size) = (logits.shape()[0], self.vocab_size());
        check_len(py, "logits", logits.len(), count * vocab_size)?;
        let lengths = [("rows", rows.len()), ("positions", positions.len()), ("tokens", tokens.len())];
        for (name, len) in lengths.into_iter().chain([("largest", largest.len())]) {
            check_len(py, name, len, count)?;
        }
        let mut columns = 0;
        if let Some(q) = &q {
            columns = q.shape()[1];
            if q.shape()[0] < count || column >= columns || q.shape()[2] != vocab_size {
                let shape = q.shape();
                let message = format!(
                    "q: shape is {shape:?}; must be [at least {count}, more than column={column}, \
                     vocab_size={vocab_size}]"
                );
                return Err(Class::InvalidBuffer.error(py, message));
            }
        }
        state.check_rows(py, rows.as_slice()?)?;
        let (logits, rows, positions) = (logits.as_slice()?, rows.as_slice()?, positions.as_slice()?);
        let (tokens, largest) = (tokens.as_slice_mut()?, largest.as_slice_mut()?);
        let mut q = q.as_mut().map(|q| q.as_slice_mut()).transpose()?;
        let (params, seeds) = (state.params.as_slice()?, state.seeds.as_slice()?);
        py.detach(|| {
            let mut sampler = self.lock();
            for (i, logits) in logits.chunks_exact(vocab_size).enumerate() {
                let (params, seed) = of_row(params, state.width, seeds, rows[i]);
                tokens[i] = i64::from(sampler.draw(logits, &params, seed, positions[i] as u64, purpose)?);
                largest[i] = largest_of(logits);
                if let Some(q) = &mut q {
                    sampler.probabilities(&mut q[(i * columns + column) * vocab_size..][..vocab_size])?;
                }
            }
            Ok(())
        })
        .or_raise(py)
    }

    #[allow(clippy::too_many_arguments)]
    fn verify(
        &self,
        py: Python<'_>,
        logits: &Bound<'_, PyAny>,
        params: &Bound<'_, PyAny>,
        seeds: &Bound<'_, PyAny>,
        rows: &Bound<'_, PyAny>,
        q_start: &Bound<'_, PyAny>,
        num_tokens: &Bound<'_, PyAny>,
        num_drafts: &Bound<'_, PyAny>,
        drafts: &Bound<'_, PyAny>,
        q: Option<&Bound<'_, PyAny>>,
        num_accepted: &Bound<'_, PyAny>,
        tokens: &Bound<'_, PyAny>,
        largest: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let logits: Logits<'_> = readonly("logits", logits)?;
        let state = State::borrow(py, params, seeds)?;
        let (rows, q_start): (In<'_>, In<'_>) = (readonly("rows", rows)?, readonly("q_start", q_start)?);
        let num_tokens: In<'_> = readonly("num_tokens", num_tokens)?;
        let num_drafts: In<'_> = readonly("num_drafts", num_drafts)?;
        let drafts: In2<'_> = readonly("drafts", drafts)?;
        let q: Option<PyReadonlyArray<'_, f32, Ix3>> = q.map(|q| readonly("q", q)).transpose()?;
        let mut num_accepted: Out<'_> = readwrite("num_accepted", num_accepted)?;
        let mut tokens: PyReadwriteArray<'_, i64, Ix2> = readwrite("tokens", tokens)?;
        let mut largest: PyReadwriteArray<'_, f32, numpy::Ix1> = readwrite("largest", largest)?;

        let (count, vocab_size) = (logits.shape()[0], self.vocab_size());
        let (batch, k) = (rows.len(), drafts.shape()[1]);
        check_len(py, "logits", logits.len(), count * vocab_size)?;
        check_len(py, "q_start", q_start.len(), batch + 1)?;
        check_len(py, "num_tokens", num_tokens.len(), batch)?;
        check_len(py, "num_drafts", num_drafts.len(), batch)?;
        check_len(py, "drafts", drafts.len(), batch * k)?;
        check_len(py, "num_accepted", num_accepted.len(), batch)?;
        check_len(py, "tokens", tokens.len(), batch * (k + 1))?;
        check_len(py, "largest", largest.len(), count)?;
        if let Some(q) = &q {
            check_len(py, "q", q.len(), batch * k * vocab_size)?;
        }
        state.check_rows(py, rows.as_slice()?)?;
        let step_drafts = StepDrafts {
            q_start: q_start.as_slice()?,
            num_drafts: num_drafts.as_slice()?,
            drafts: drafts.as_slice()?,
            k,
        };
        step_drafts.check(py, count, vocab_size)?;

        let (logits, rows, num_tokens) = (logits.as_slice()?, rows.as_slice()?, num_tokens.as_slice()?);
        let q = q.as_ref().map(|q| q.as_slice()).transpose()?;
        let (params, seeds) = (state.params.as_slice()?, state.seeds.as_slice()?);
        let (num_accepted, tokens) = (num_accepted.as_slice_mut()?, tokens.as_slice_mut()?);
        let largest = largest.as_slice_mut()?;
        py.detach(|| {
            let mut sampler = self.lock();
            for (out, logits) in largest.iter_mut().zip(logits.chunks_exact(vocab_size)) {
                *out = largest_of(logits);
            }
            for b in 0..batch {
                let (params, seed) = of_row(params, state.width, seeds, rows[b]);
                let (drafts, n) = (step_drafts.drafts_of(b), num_tokens[b] as u64);
                let first = step_drafts.q_start[b] as usize * vocab_size;
                let own = &logits[first..][..(drafts.len() + 1) * vocab_size];
                let verdict = match q {
                    Some(q) => {
                        let q = &q[b * k * vocab_size..][..drafts.len() * vocab_size];
                        sampler.verify_rejection(own, &params, seed, n, drafts, q)?
                    }
                    None => sampler.verify_coupled(own, &params, seed, n, drafts)?,
                };
                let m = verdict.num_accepted;
                let out = &mut tokens[b * (k + 1)..][..=k];
                out[..m].copy_from_slice(&drafts[..m]);
                out[m..].fill(i64::from(verdict.token));
                num_accepted[b] = m as i64;
            }
            Ok(())
        })
        .or_raise(py)
    }

    fn filter(
        &self,
        py: Python<'_>,
        logits: &Bound<'_, PyAny>,
        params: &Bound<'_, PyAny>,
        rows: &Bound<'_, PyAny>,
        out: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let logits: Logits<'_> = readonly("logits", logits)?;
        let params = readonly("params", params)?;
        let rows: In<'_> = readonly("rows", rows)?;
        let mut out: PyReadwriteArray<'_, f32, Ix2> = readwrite("out", out)?;
        let vocab_size = self.vocab_size();
        check_len(py, "logits", logits.len(), rows.len() * vocab_size)?;
        check_len(py, "out", out.len(), rows.len() * vocab_size)?;
        let width = check_params(py, &params)?;
        check_rows(py, rows.as_slice()?, params.shape()[0])?;
        let (logits, params, rows) = (logits.as_slice()?, params.as_slice()?, rows.as_slice()?);
        let out = out.as_slice_mut()?;
        py.detach(|| {
            let mut sampler = self.lock();
            for ((logits, out), &row) in logits.chunks_exact(vocab_size).zip(out.chunks_exact_mut(vocab_size)).zip(rows)
            {
                sampler.filter(logits, &params_of(params, width, row), out)?;
            }
            Ok(())
        })
        .or_raise(py)
    }

    fn __repr__(&self) -> String {
        format!("Sampler(vocab_size={})", self.vocab_size())
    }
}

/// Sampling parameters and seeds of all rows.
struct State<'py> {
    params: PyReadonlyArray<'py, f32, Ix2>,
    seeds: In<'py>,
    width: usize,
}

impl<'py> State<'py> {
    fn borrow(py: Python<'py>, params: &Bound<'py, PyAny>, seeds: &Bound<'py, PyAny>) -> PyResult<Self> {
        let params = readonly("params", params)?;
        let seeds: In<'py> = readonly("seeds", seeds)?;
        let width = check_params(py, &params)?;
        check_len(py, "seeds", seeds.len(), params.shape()[0])?;
        Ok(Self { params, seeds, width })
    }

    fn check_rows(&self, py: Python<'_>, rows: &[i64]) -> PyResult<()> {
        check_rows(py, rows, self.seeds.len())
    }
}

/// Drafts of all requests of a step.
struct StepDrafts<'a> {
    q_start: &'a [i64],
    num_drafts: &'a [i64],
    drafts: &'a [i64],
    k: usize,
}

impl StepDrafts<'_> {
    fn drafts_of(&self, b: usize) -> &[i64] {
        &self.drafts[b * self.k..][..self.num_drafts[b] as usize]
    }

    fn check(&self, py: Python<'_>, count: usize, vocab_size: usize) -> PyResult<()> {
        let refuse = |message: String| Err(Class::InvalidBuffer.error(py, message));
        for (b, &k) in self.num_drafts.iter().enumerate() {
            let (start, end) = (self.q_start[b], self.q_start[b + 1]);
            if start < 0 || end < start || end > count as i64 {
                return refuse(format!(
                    "q_start: sequence {b} has rows {start} to {end}; must be a range within 0 to {count}"
                ));
            }
            let most = (end - start - 1).min(self.k as i64);
            if !(0..=most).contains(&k) {
                return refuse(format!("num_drafts: sequence {b} has {k}; must be from 0 to {most}"));
            }
            if let Some(id) = self.drafts_of(b).iter().find(|id| !(0..vocab_size as i64).contains(id)) {
                return refuse(format!("drafts: sequence {b} has {id}; must be ids from 0 to {}", vocab_size - 1));
            }
        }
        Ok(())
    }
}

fn check_params(py: Python<'_>, params: &PyReadonlyArray<'_, f32, Ix2>) -> PyResult<usize> {
    let width = params.shape()[1];
    if width >= NUM_PARAMS {
        return Ok(width);
    }
    let message = format!("params: shape is {:?}; must have at least {NUM_PARAMS} columns", params.shape());
    Err(Class::InvalidBuffer.error(py, message))
}

fn check_rows(py: Python<'_>, rows: &[i64], count: usize) -> PyResult<()> {
    match rows.iter().find(|row| !(0..count as i64).contains(row)) {
        Some(row) => {
            let allowed = format!("from 0 to {}", count as i64 - 1);
            Err(Class::InvalidBuffer.out_of_range(py, "rows", row, allowed))
        }
        None => Ok(()),
    }
}

fn params_of(params: &[f32], width: usize, row: i64) -> SamplingParams {
    SamplingParams::of_columns(&params[row as usize * width..][..width])
}

fn of_row(params: &[f32], width: usize, seeds: &[i64], row: i64) -> (SamplingParams, u64) {
    (params_of(params, width, row), seeds[row as usize] as u64)
}
