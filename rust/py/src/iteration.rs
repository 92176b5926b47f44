//! Execution of a whole step on a CPU in one call, on row state and record in arrays of the caller.

use crate::buffers::{In, Out, readonly, readwrite};
use crate::called::{Called, Raised};
use crate::cpu_decoder::CpuDecoder;
use crate::cpu_kv_cache::CpuKVCache;
use crate::error::{Class, cpu_to_py};
use crate::host::PyHost;
use crate::lora::{GivenAdapters, by_row};
use crate::mutex::lock;
use crate::rows::Rows;
use crate::scheduler::Scheduler;
use numpy::{IntoPyArray, PyArray1, PyArray2, PyArrayMethods};
use pyo3::prelude::*;
use pyo3::types::PyDict;
use specrs_core::Drafter;
use specrs_core::sampling::{LogprobsMode, TokenLogprobs};
use specrs_core::scheduler::{HEADER_LEN, StepHeader};
use specrs_cpu::iteration::{
    Cached, Counts, DraftFault, Iteration, Model, Pooled, PromptLogprobs, Rule, SequenceLogprobs, TextLimits,
    Translated, Translation,
};
use specrs_cpu::{KvCache, Lora};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// Duration from which a step releases the interpreter lock. A thread that releases the lock may wait a whole switch
/// interval (5 ms) to get it back, many times the duration of a small model's step.
const LONG: Duration = Duration::from_millis(2);

/// Number of prompt tokens from which a step is assumed to be long.
const LONG_PROMPT: i64 = 64;

/// Failure of a drafter: its exception, and the ids of the KV blocks whose draft KV was not written.
type Fault<'py> = (PyErr, Bound<'py, PyArray1<i64>>);

fn fault_of<'py>(py: Python<'py>, raised: &Raised, fault: DraftFault) -> Fault<'py> {
    (raised.of(py, &fault.error), fault.blocks.into_pyarray(py))
}

/// Report of a step in addition to its results: passes of the target and the draft, and the drafter's failure. It
/// also has log probabilities of sequences by index, and of prompts by request id and first position, and the results
/// of requests with pooling by request id.
type Done<'py> = (
    (usize, usize),
    Option<Fault<'py>>,
    Vec<(usize, Logprobs<'py>)>,
    Vec<(i64, usize, Logprobs<'py>)>,
    Vec<(i64, Bound<'py, PyArray1<f32>>)>,
);

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

/// Native model: a decoder and its KV cache; `None` for a head that attends the target's.
type Native = (Py<CpuDecoder>, Option<Py<CpuKVCache>>);

/// Implementation of a model's passes: native or in Python.
enum Source {
    Native(Native),
    Called(Box<Called>),
}

impl Source {
    fn new(given: &Bound<'_, PyAny>, raised: &Raised) -> PyResult<Self> {
        match given.extract::<Native>() {
            Ok(native) => Ok(Self::Native(native)),
            Err(_) => Ok(Self::Called(Box::new(Called::new(given, raised.clone())?))),
        }
    }

    /// Runs `work` on the model.
    fn with<T>(&mut self, adapters: &[Option<&Lora>], work: impl FnOnce(&mut dyn Model) -> T) -> T {
        match self {
            Self::Native((decoder, Some(kv_cache))) => {
                let (mut decoder, mut kv_cache) = (lock(&decoder.get().0), lock(&kv_cache.get().0));
                work(&mut Cached::new(&mut decoder, &mut kv_cache, adapters))
            }
            Self::Native((decoder, None)) => {
                work(&mut Cached::new(&mut lock(&decoder.get().0), &mut KvCache::empty(), adapters))
            }
            Self::Called(called) => work(&mut **called),
        }
    }

    fn shares_memory(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Native(one), Self::Native(other)) => {
                let caches = one.1.as_ref().zip(other.1.as_ref());
                one.0.is(&other.0) || caches.is_some_and(|(one, other)| one.is(other))
            }
            _ => false,
        }
    }
}

/// State that a step runs on.
struct Running {
    iteration: Iteration,
    rows: Rows,
    target: Source,
    draft: Option<Source>,
    translation: Option<Translation>,
}

#[pyclass(frozen)]
pub(crate) struct CpuIteration {
    running: Mutex<Running>,
    raised: Raised,
    has_draft: bool,
    /// Whether passes run without the interpreter.
    native: bool,
    /// Number of state rows.
    rows: usize,
    /// Whether the last step took longer than [`LONG`].
    long: AtomicBool,
}

/// Tokens in both vocabularies, as pairs (target's id, draft's id), and the draft's input for all other tokens.
type SharedTokens = (Vec<(i64, i64)>, i64);

#[pymethods]
impl CpuIteration {
    #[new]
    #[pyo3(signature = (
        scheduler, state, target, draft = None, *, rule = "rejection", rates = None, logprobs_mode = "raw_logprobs", shared_tokens = None,
        text_limits = None
    ))]
    #[expect(clippy::too_many_arguments, clippy::needless_pass_by_value, reason = "keywords of a Python constructor")]
    fn new(
        py: Python<'_>,
        scheduler: &Scheduler,
        state: &Bound<'_, PyDict>,
        target: &Bound<'_, PyAny>,
        draft: Option<&Bound<'_, PyAny>>,
        rule: &str,
        rates: Option<Vec<f32>>,
        logprobs_mode: &str,
        shared_tokens: Option<SharedTokens>,
        text_limits: Option<(usize, usize, usize)>,
    ) -> PyResult<Self> {
        let refuse =
            |field: &str, value: &str, allowed: &str| Err(Class::InvalidConfig.out_of_range(py, field, value, allowed));
        let rule = rule_of(py, rule)?;
        let Some(mode) = LogprobsMode::of_name(logprobs_mode) else {
            let allowed = "'raw_logprobs', 'raw_logits', 'processed_logprobs' or 'processed_logits'";
            return refuse("logprobs_mode", &format!("{logprobs_mode:?}"), allowed);
        };
        let config = scheduler.core(py).config().clone();
        let raised = Raised::default();
        let mut target = Source::new(target, &raised)?;
        let mut draft = draft.map(|draft| Source::new(draft, &raised)).transpose()?;
        if draft.as_ref().is_some_and(|draft| draft.shares_memory(&target)) {
            return refuse("draft", "the target's decoder or KV cache", "a decoder and KV cache of its own");
        }
        let hidden_size = draft.as_mut().map_or(0, |draft| {
            draft.with(&[], |draft| draft.facts().hidden_layers.0.len() * draft.facts().hidden_layers.1)
        });
        let expected = match config.drafter {
            Drafter::Cached { .. } | Drafter::Text => Some(false),
            Drafter::Hidden { .. } | Drafter::SharedKv { .. } => Some(true),
            _ => None,
        };
        if draft.as_ref().map(|_| hidden_size > 0) != expected {
            let given = draft.as_ref().map_or("None", |_| if hidden_size > 0 { "an EAGLE-3 head" } else { "a model" });
            let allowed = expected.map_or("None", |head| if head { "an EAGLE-3 head" } else { "a model" });
            return refuse("draft", given, &format!("{allowed}, as the scheduler's drafter needs"));
        }
        if matches!(config.drafter, Drafter::Text) != text_limits.is_some() {
            let given = if text_limits.is_some() { "given" } else { "None" };
            return refuse("text_limits", given, "given with a TextDrafter, and None with any other drafter");
        }
        let vocab_size = target.with(&[], |target| target.facts().vocab_size);
        let native = [Some(&target), draft.as_ref()].into_iter().flatten().all(|one| matches!(one, Source::Native(_)));
        let known = |error| cpu_to_py(py, &error);
        let mut translation = match &shared_tokens {
            Some((pairs, unknown)) => Some(Translation::new(pairs, *unknown, vocab_size).map_err(known)?),
            None => None,
        };
        if let (Some(translation), Some(draft)) = (&mut translation, &mut draft) {
            draft.with(&[], |draft| Translated::new(draft, translation).map(|_| ())).map_err(known)?;
        }
        let (count, has_draft) = (config.max_num_seqs + 1, draft.is_some());
        let rows = Rows::borrow(state, &config, hidden_size)?;
        let mut iteration = Iteration::new(config, rule, rates, mode, vocab_size).map_err(known)?;
        if let Some((context, max_fed, block_size)) = text_limits {
            iteration = iteration.with_text_drafts(TextLimits { context, max_fed, block_size });
        }
        let running = Mutex::new(Running { iteration, rows, target, draft, translation });
        Ok(Self { running, raised, has_draft, native, rows: count, long: AtomicBool::new(false) })
    }

    fn set_rule(&self, py: Python<'_>, rule: &str) -> PyResult<()> {
        let rule = rule_of(py, rule)?;
        // A step that holds the lock may wait for the interpreter.
        py.detach(|| lock(&self.running).iteration.set_rule(rule));
        Ok(())
    }

    #[pyo3(signature = (record, results, adapters = vec![], host = None))]
    #[expect(clippy::needless_pass_by_value, reason = "extracted from Python objects")]
    fn run<'py>(
        &self,
        py: Python<'py>,
        record: &Bound<'py, PyAny>,
        results: &Bound<'py, PyAny>,
        adapters: GivenAdapters<'py>,
        host: Option<Py<PyAny>>,
    ) -> PyResult<Done<'py>> {
        let record: In<'_> = readonly("record", record)?;
        let mut results: Out<'_> = readwrite("results", results)?;
        let (record, results) = (record.as_slice()?, results.as_slice_mut()?);
        let adapters = by_row(py, &adapters, self.rows)?;
        self.raised.clear();
        let mut host = PyHost::new(py, host, self.raised.clone())?;
        let mut run = || self.execute(record, results, &adapters, &mut host);
        let is_long = self.long.load(Ordering::Relaxed) || num_prefill_tokens(record) > LONG_PROMPT;
        let done = if self.native && is_long { py.detach(run) } else { run() };
        if let Some(interrupt) = self.raised.interrupt(py) {
            return Err(interrupt);
        }
        let done = done.map_err(|error| self.raised.of(py, &error))?;
        let of_sequence = |sequence: SequenceLogprobs| Ok((sequence.index, logprobs_of(py, sequence.tokens)?));
        let of_prompt = |found: PromptLogprobs| Ok((found.request_id, found.position, logprobs_of(py, found.tokens)?));
        Ok((
            (done.counts.target_passes, done.counts.draft_passes),
            done.fault.map(|fault| fault_of(py, &self.raised, fault)),
            done.logprobs.into_iter().map(of_sequence).collect::<PyResult<_>>()?,
            done.prompt_logprobs.into_iter().map(of_prompt).collect::<PyResult<_>>()?,
            done.pooled.into_iter().map(|pooled| (pooled.request_id, pooled.values.into_pyarray(py))).collect(),
        ))
    }

    fn __repr__(&self) -> String {
        format!("CpuIteration(draft={})", if self.has_draft { "True" } else { "False" })
    }
}

impl CpuIteration {
    fn execute(
        &self,
        record: &[i64],
        results: &mut [i64],
        adapters: &[Option<Arc<Lora>>],
        host: &mut PyHost,
    ) -> specrs_cpu::Result<StepReport> {
        let begun = Instant::now();
        let adapters: Vec<Option<&Lora>> = adapters.iter().map(Option::as_deref).collect();
        let mut running = lock(&self.running);
        let Running { iteration, rows, target, draft, translation } = &mut *running;
        let mut state = rows.state();
        let done = target.with(&adapters, |target| {
            let Some(draft) = draft else { return iteration.run(record, results, &mut state, target, None, host) };
            draft.with(&[], |draft| match translation {
                None => iteration.run(record, results, &mut state, target, Some(draft), host),
                Some(translation) => {
                    let mut draft = Translated::new(draft, translation)?;
                    iteration.run(record, results, &mut state, target, Some(&mut draft), host)
                }
            })
        });
        self.long.store(begun.elapsed() > LONG, Ordering::Relaxed);
        let fault = iteration.take_draft_fault();
        let (logprobs, prompt_logprobs) = (iteration.take_logprobs(), iteration.take_prompt_logprobs());
        let pooled = iteration.take_pooled();
        done.map(|counts| StepReport { counts, fault, logprobs, prompt_logprobs, pooled })
    }
}

/// Report of a step in addition to its results.
struct StepReport {
    counts: Counts,
    fault: Option<DraftFault>,
    logprobs: Vec<SequenceLogprobs>,
    prompt_logprobs: Vec<PromptLogprobs>,
    pooled: Vec<Pooled>,
}

/// Returns the number of prompt tokens of a record's step. It is 0 if the record is too short, which the step itself
/// reports as an error.
fn num_prefill_tokens(record: &[i64]) -> i64 {
    if record.len() < HEADER_LEN { 0 } else { StepHeader::read(record).num_prefill_tokens as i64 }
}

fn rule_of(py: Python<'_>, rule: &str) -> PyResult<Rule> {
    match rule {
        "rejection" => Ok(Rule::Rejection),
        "coupled" => Ok(Rule::Coupled),
        _ => {
            let allowed = "'rejection' or 'coupled'";
            Err(Class::InvalidConfig.out_of_range(py, "rule", format_args!("{rule:?}"), allowed))
        }
    }
}
