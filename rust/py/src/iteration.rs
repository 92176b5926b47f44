//! A whole launch on a CPU in one call, on row state and record in arrays of the caller.

use crate::buffers::{In, Out, readonly, readwrite};
use crate::cpu::{CpuKVCache, lock, to_py};
use crate::cpu_decoder::CpuDecoder;
use crate::error::Class;
use crate::lora::{GivenAdapters, by_row};
use crate::scheduler::Scheduler;
use crate::tensors::numbers_mut;
use numpy::{Element, IntoPyArray, Ix1, Ix2, PyArray1, PyArray2, PyArrayMethods, PyReadonlyArray1};
use pyo3::exceptions::PyException;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use specrs_core::Drafter;
use specrs_core::sampling::{LogprobsMode, MAX_STOP_IDS, NUM_PARAMS, TokenLogprobs};
use specrs_core::scheduler::{HEADER_LEN, LaunchHeader};
use specrs_cpu::iteration::{
    Cached, Counts, DraftFault, EntryLogprobs, GrammarMasks, HiddenRows, Iteration, PromptLogprobs, RowState, Rule,
};
use specrs_cpu::{Lora, MemoryMut};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// Launches that take longer let other threads of the interpreter run meanwhile. One that gives the interpreter lock up may wait
/// a whole switch interval (5 ms) to get it back, many times what a launch of a small model takes.
const LONG: Duration = Duration::from_millis(2);

/// Prompt tokens of a launch from which on it is taken to be long.
const LONG_PROMPT: i64 = 64;

/// Row state in memory of the caller.
struct Rows {
    num_tokens: MemoryMut<i64>,
    draft_len: MemoryMut<i64>,
    draft_start: MemoryMut<i64>,
    limit: MemoryMut<i64>,
    min_len: MemoryMut<i64>,
    prompt_len: MemoryMut<i64>,
    seeds: MemoryMut<i64>,
    active: MemoryMut<bool>,
    tokens: MemoryMut<i64>,
    block_table: MemoryMut<i64>,
    group_tables: MemoryMut<i64>,
    stop_ids: MemoryMut<i64>,
    params: MemoryMut<f32>,
    hidden: Option<Hidden>,
}

/// What is kept for a drafter that reads hidden states.
struct Hidden {
    states: MemoryMut<f32>,
    start: MemoryMut<i64>,
}

impl Rows {
    /// # Errors
    /// For what is missing, or has another dtype or shape than the rows of a scheduler with these settings.
    fn borrow(arrays: &Bound<'_, PyDict>, config: &specrs_core::SchedulerConfig, hidden_size: usize) -> PyResult<Self> {
        let rows = config.max_num_seqs + 1;
        let (width, blocks) = (config.max_model_len + 1, config.max_model_len.div_ceil(config.block_size));
        let one = |name| numbers::<i64>(arrays, name, &[rows]);
        let wide = |name, width| numbers::<i64>(arrays, name, &[rows, width]);
        let hidden = match config.drafter {
            Drafter::Hidden { max_draft_lag, .. } => Some(Hidden {
                states: numbers(arrays, "hidden_states", &[rows, max_draft_lag * hidden_size])?,
                start: one("hidden_start")?,
            }),
            _ => None,
        };
        Ok(Self {
            hidden,
            num_tokens: one("num_tokens")?,
            draft_len: one("draft_len")?,
            draft_start: one("draft_start")?,
            limit: one("limit")?,
            min_len: one("min_len")?,
            prompt_len: one("prompt_len")?,
            seeds: one("seeds")?,
            active: numbers(arrays, "active", &[rows])?,
            tokens: wide("tokens", width)?,
            block_table: wide("block_table", blocks)?,
            group_tables: match config.num_groups() - 1 {
                0 => MemoryMut::from_vec(Vec::new()),
                further => numbers(arrays, "group_tables", &[further * rows, blocks])?,
            },
            stop_ids: wide("stop_ids", MAX_STOP_IDS)?,
            params: numbers(arrays, "params", &[rows, NUM_PARAMS])?,
        })
    }

    fn state(&mut self) -> RowState<'_> {
        RowState {
            num_tokens: self.num_tokens.as_mut_slice(),
            draft_len: self.draft_len.as_mut_slice(),
            draft_start: self.draft_start.as_mut_slice(),
            limit: self.limit.as_mut_slice(),
            min_len: self.min_len.as_mut_slice(),
            prompt_len: self.prompt_len.as_mut_slice(),
            seeds: self.seeds.as_mut_slice(),
            active: self.active.as_mut_slice(),
            tokens: self.tokens.as_mut_slice(),
            block_table: self.block_table.as_mut_slice(),
            group_tables: self.group_tables.as_mut_slice(),
            stop_ids: self.stop_ids.as_mut_slice(),
            params: self.params.as_mut_slice(),
            hidden: self
                .hidden
                .as_mut()
                .map(|hidden| HiddenRows { states: hidden.states.as_mut_slice(), start: hidden.start.as_mut_slice() }),
        }
    }
}

fn numbers<T>(arrays: &Bound<'_, PyDict>, name: &str, expected: &[usize]) -> PyResult<MemoryMut<T>>
where
    T: Element + Copy + Send + Sync + 'static,
{
    let py = arrays.py();
    let Some(array) = arrays.get_item(name)? else {
        return Err(Class::InvalidBuffer.error(py, format!("state: has no {name:?}, expected an array")));
    };
    let (memory, shape) =
        if expected.len() == 1 { numbers_mut::<T, Ix1>(name, &array)? } else { numbers_mut::<T, Ix2>(name, &array)? };
    if shape == expected {
        return Ok(memory);
    }
    Err(Class::InvalidBuffer.error(py, format!("{name}: shape is {shape:?}, expected {expected:?}")))
}

/// How a drafter failed: the exception, and the blocks whose draft KV it has not written.
type Fault<'py> = (PyErr, Bound<'py, PyArray1<i64>>);

fn fault_of(py: Python<'_>, fault: DraftFault) -> Fault<'_> {
    (to_py(py, &fault.error), fault.blocks.into_pyarray(py))
}

/// What a launch did: passes of the target and the draft, how the drafter failed, log probabilities of entries by index, and of
/// prompts by request id and first position.
type Done<'py> = ((usize, usize), Option<Fault<'py>>, Vec<(usize, Logprobs<'py>)>, Vec<(i64, usize, Logprobs<'py>)>);

/// Log probabilities of tokens: values and ranks `[m]`, ids and values of the most probable ones `[m, n]`.
type Logprobs<'py> =
    (Bound<'py, PyArray1<f32>>, Bound<'py, PyArray1<i64>>, Bound<'py, PyArray2<i64>>, Bound<'py, PyArray2<f32>>);

fn logprobs_of(py: Python<'_>, tokens: TokenLogprobs) -> PyResult<Logprobs<'_>> {
    let shape = [tokens.values.len(), tokens.num_top];
    Ok((
        tokens.values.into_pyarray(py),
        tokens.ranks.into_pyarray(py),
        tokens.top_ids.into_pyarray(py).reshape(shape)?,
        tokens.top_values.into_pyarray(py).reshape(shape)?,
    ))
}

/// Grammars that are kept in Python.
struct Grammars {
    /// With `start(index, row)` and `advance(index, token)`, which return a mask, int32 `[ceil(V / 32)]`; None: no request of the
    /// launch has a grammar.
    host: Option<Py<PyAny>>,
    /// What it raised.
    raised: Option<PyErr>,
}

impl Grammars {
    /// Writes the mask that a method of the host returns for two numbers.
    fn call(&mut self, method: &str, numbers: (usize, i64), mask: &mut [u32]) -> specrs_cpu::Result<()> {
        let Some(host) = &self.host else {
            return Err(specrs_cpu::Error::Grammar { message: "the launch has none".to_string() });
        };
        let asked = Python::attach(|py| {
            let returned = host.bind(py).call_method1(method, numbers)?;
            let words: PyReadonlyArray1<'_, i32> = readonly("mask", &returned)?;
            let words = words.as_slice()?;
            if words.len() != mask.len() {
                let message = format!("mask: {} words, expected {}", words.len(), mask.len());
                return Err(Class::InvalidBuffer.error(py, message));
            }
            for (own, &word) in mask.iter_mut().zip(words) {
                *own = word.cast_unsigned();
            }
            Ok(())
        });
        asked.map_err(|error| {
            let message = error.to_string();
            self.raised = Some(error);
            specrs_cpu::Error::Grammar { message }
        })
    }
}

impl GrammarMasks for Grammars {
    fn start(&mut self, index: usize, row: usize, mask: &mut [u32]) -> specrs_cpu::Result<()> {
        self.call("start", (index, row as i64), mask)
    }

    fn advance(&mut self, index: usize, token: i64, mask: &mut [u32]) -> specrs_cpu::Result<()> {
        self.call("advance", (index, token), mask)
    }
}

/// A model's decoder and its KV cache.
type Model = (Py<CpuDecoder>, Py<CpuKVCache>);

#[pyclass(frozen)]
pub(crate) struct CpuIteration {
    inner: Mutex<(Iteration, Rows)>,
    target: Model,
    draft: Option<Model>,
    /// Of row state.
    rows: usize,
    /// Whether the last launch was.
    long: AtomicBool,
}

#[pymethods]
impl CpuIteration {
    #[new]
    #[pyo3(signature = (scheduler, state, target, draft = None, *, rule = "rejection", rates = None, logprobs_mode = "raw_logprobs"))]
    #[expect(clippy::too_many_arguments, reason = "keywords of a Python constructor")]
    fn new(
        py: Python<'_>,
        scheduler: &Scheduler,
        state: &Bound<'_, PyDict>,
        target: Model,
        draft: Option<Model>,
        rule: &str,
        rates: Option<Vec<f32>>,
        logprobs_mode: &str,
    ) -> PyResult<Self> {
        let rule = rule_of(py, rule)?;
        let Some(mode) = LogprobsMode::of_name(logprobs_mode) else {
            let message = format!(
                "logprobs_mode = {logprobs_mode:?} is not allowed: expected 'raw_logprobs', 'raw_logits', 'processed_logprobs' or \
                 'processed_logits'"
            );
            return Err(Class::InvalidConfig.error(py, message));
        };
        let config = scheduler.core(py).config().clone();
        if let Some((decoder, cache)) = &draft
            && (decoder.is(&target.0) || cache.is(&target.1))
        {
            return Err(Class::InvalidConfig
                .error(py, "draft = the target's decoder or KV cache is not allowed: expected its own"));
        }
        if matches!(config.drafter, Drafter::Text) {
            let message = "drafter = TextDrafter is not allowed: expected CachedDrafter, HiddenDrafter, a drafter on the host \
                           or None, the native pass knows no text";
            return Err(Class::InvalidConfig.error(py, message));
        }
        let hidden_size = draft.as_ref().map_or(0, |(decoder, _)| {
            let decoder = lock(&decoder.get().0);
            let (layers, size) = decoder.weights().hidden_layers();
            layers.len() * size
        });
        let expected = match config.drafter {
            Drafter::Cached { .. } => Some(false),
            Drafter::Hidden { .. } => Some(true),
            _ => None,
        };
        if draft.as_ref().map(|_| hidden_size > 0) != expected {
            let given = draft.as_ref().map_or("None", |_| if hidden_size > 0 { "an EAGLE-3 head" } else { "a model" });
            let allowed = expected.map_or("None", |head| if head { "an EAGLE-3 head" } else { "a model" });
            let message =
                format!("draft = {given} is not allowed: expected {allowed}, as the scheduler's drafter says");
            return Err(Class::InvalidConfig.error(py, message));
        }
        let (rows, count) = (Rows::borrow(state, &config, hidden_size)?, config.max_num_seqs + 1);
        let vocab_size = lock(&target.0.get().0).weights().shape().vocab_size;
        let iteration = Iteration::new(config, rule, rates, mode, vocab_size).map_err(|error| to_py(py, &error))?;
        let (inner, long) = (Mutex::new((iteration, rows)), AtomicBool::new(false));
        Ok(Self { inner, target, draft, rows: count, long })
    }

    fn set_rule(&self, py: Python<'_>, rule: &str) -> PyResult<()> {
        let rule = rule_of(py, rule)?;
        // A launch that holds the lock may wait for the interpreter.
        py.detach(|| lock(&self.inner).0.set_rule(rule));
        Ok(())
    }

    fn admit(&self, py: Python<'_>, record: &Bound<'_, PyAny>) -> PyResult<()> {
        let record: In<'_> = readonly("record", record)?;
        let record = record.as_slice()?;
        py.detach(|| lock(&self.inner).0.admit(record)).map_err(|error| to_py(py, &error))
    }

    #[pyo3(signature = (record, results, adapters = vec![], grammars = None))]
    #[expect(clippy::needless_pass_by_value, reason = "extracted from Python objects")]
    fn run<'py>(
        &self,
        py: Python<'py>,
        record: &Bound<'py, PyAny>,
        results: &Bound<'py, PyAny>,
        adapters: GivenAdapters<'py>,
        grammars: Option<Py<PyAny>>,
    ) -> PyResult<Done<'py>> {
        let record: In<'_> = readonly("record", record)?;
        let mut results: Out<'_> = readwrite("results", results)?;
        let (record, results) = (record.as_slice()?, results.as_slice_mut()?);
        let adapters = by_row(py, &adapters, self.rows)?;
        let mut grammars = Grammars { host: grammars, raised: None };
        let mut run = || self.launch(record, results, &adapters, &mut grammars);
        let is_long = self.long.load(Ordering::Relaxed) || num_prefill_tokens(record) > LONG_PROMPT;
        let done = if is_long { py.detach(run) } else { run() };
        if let Some(error) = grammars.raised
            && (done.is_err() || !error.is_instance_of::<PyException>(py))
        {
            return Err(error);
        }
        let done = done.map_err(|error| to_py(py, &error))?;
        let of_entry = |entry: EntryLogprobs| Ok((entry.index, logprobs_of(py, entry.tokens)?));
        let of_prompt = |found: PromptLogprobs| Ok((found.request_id, found.position, logprobs_of(py, found.tokens)?));
        Ok((
            (done.counts.target_passes, done.counts.draft_passes),
            done.fault.map(|fault| fault_of(py, fault)),
            done.logprobs.into_iter().map(of_entry).collect::<PyResult<_>>()?,
            done.prompt_logprobs.into_iter().map(of_prompt).collect::<PyResult<_>>()?,
        ))
    }

    fn feed_behind<'py>(&self, py: Python<'py>) -> (usize, Option<Fault<'py>>) {
        let (passes, fault) = py.detach(|| {
            let Some((decoder, cache)) = &self.draft else { return (0, None) };
            // In the order of `launch`: two threads would else wait for each other.
            let mut inner = lock(&self.inner);
            let (iteration, rows) = &mut *inner;
            let (mut decoder, mut kv_cache) = (lock(&decoder.get().0), lock(&cache.get().0));
            let mut draft = Cached { decoder: &mut decoder, kv_cache: &mut kv_cache, adapters: &[] };
            (iteration.feed_behind(&mut rows.state(), &mut draft), iteration.take_draft_fault())
        });
        (passes, fault.map(|fault| fault_of(py, fault)))
    }

    fn __repr__(&self) -> String {
        format!("CpuIteration(draft={})", if self.draft.is_some() { "True" } else { "False" })
    }
}

impl CpuIteration {
    fn launch(
        &self,
        record: &[i64],
        results: &mut [i64],
        adapters: &[Option<Arc<Lora>>],
        grammars: &mut Grammars,
    ) -> specrs_cpu::Result<Launched> {
        let begun = Instant::now();
        let adapters: Vec<Option<&Lora>> = adapters.iter().map(Option::as_deref).collect();
        let mut inner = lock(&self.inner);
        let (iteration, rows) = &mut *inner;
        let mut decoder = lock(&self.target.0.get().0);
        let mut kv_cache = lock(&self.target.1.get().0);
        let mut target = Cached { decoder: &mut decoder, kv_cache: &mut kv_cache, adapters: &adapters };
        let mut held = self.draft.as_ref().map(|(decoder, cache)| (lock(&decoder.get().0), lock(&cache.get().0)));
        let mut draft = held.as_mut().map(|(decoder, kv_cache)| Cached { decoder, kv_cache, adapters: &[] });
        let done = iteration.run(record, results, &mut rows.state(), &mut target, draft.as_mut(), grammars);
        self.long.store(begun.elapsed() > LONG, Ordering::Relaxed);
        let fault = iteration.take_draft_fault();
        let (logprobs, prompt_logprobs) = (iteration.take_logprobs(), iteration.take_prompt_logprobs());
        done.map(|counts| Launched { counts, fault, logprobs, prompt_logprobs })
    }
}

/// What a launch did beside its results.
struct Launched {
    counts: Counts,
    fault: Option<DraftFault>,
    logprobs: Vec<EntryLogprobs>,
    prompt_logprobs: Vec<PromptLogprobs>,
}

/// Of a record; 0 where it is too short to say, which the launch finds.
fn num_prefill_tokens(record: &[i64]) -> i64 {
    if record.len() < HEADER_LEN { 0 } else { LaunchHeader::read(record).num_prefill_tokens as i64 }
}

fn rule_of(py: Python<'_>, rule: &str) -> PyResult<Rule> {
    match rule {
        "rejection" => Ok(Rule::Rejection),
        "coupled" => Ok(Rule::Coupled),
        _ => {
            let message = format!("rule = {rule:?} is not allowed: expected 'rejection' or 'coupled'");
            Err(Class::InvalidConfig.error(py, message))
        }
    }
}
