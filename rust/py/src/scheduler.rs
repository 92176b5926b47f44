//! `Scheduler` for Python: checks buffers, calls the core once, maps its error.

use crate::acceptance::AcceptanceTracker;
use crate::block_pool::{DEFAULT_HASH_KEY, ExtraKeys, NO_SALT, extra_keys, hash_key_bytes};
use crate::buffers::{In, Out, readonly, readwrite};
use crate::drafts::DrafterArgument;
use crate::error::{Class, OrRaise, size};
use crate::kv_events;
use crate::planner::SpeculationPlanner;
use crate::request_sampling::{RequestSampling, parse_dtype};
use crate::request_view::RequestView;
use pyo3::prelude::*;
use pyo3::sync::MutexExt;
use pyo3::types::{PyDict, PyList};
use specrs_core::scheduler::layout::Section;
use specrs_core::{Drafter, DrafterKind, HostDrafters, Lora, MergedRoom, PlanOutcome, RequestParams, SchedulerConfig};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Outcome of `plan`: nothing is to be done and nothing is in flight.
pub(crate) const PLAN_IDLE: i64 = 0;
/// Outcome of `plan`: the record contains a step.
pub(crate) const PLAN_STEP: i64 = 1;
/// Outcome of `plan`: a step in flight must settle first.
pub(crate) const PLAN_SETTLE_FIRST: i64 = 2;

#[pyclass(frozen)]
pub(crate) struct Scheduler(Mutex<specrs_core::Scheduler>);

impl Scheduler {
    /// Locks the core's scheduler. Calls stay attached to the interpreter, because they take microseconds. A thread
    /// that releases the interpreter lock may wait a whole switch interval (5 ms) to get it back, in the middle of the
    /// decode loop.
    pub(crate) fn core(&self, py: Python<'_>) -> MutexGuard<'_, specrs_core::Scheduler> {
        self.0.lock_py_attached(py).unwrap_or_else(PoisonError::into_inner)
    }
}

#[pymethods]
impl Scheduler {
    #[new]
    #[pyo3(signature = (
        *, max_num_seqs, max_model_len, num_blocks, block_size, max_num_batched_tokens, num_speculative_tokens = 0,
        drafter = None, sliding_window = None, window_groups = None, max_in_flight = 1, max_constraint_len = 0,
        logits_dtype = "float32", num_reserved_decode_tokens = 64, long_prefill_token_threshold = 0,
        max_prefill_stall_ms = 0.0, attention_cost_ratio = 1.0 / 4096.0, merged_rooms = None, max_merged_chunks = 0,
        max_merged_steps = 0, priority_aging_steps = 0, max_loras = 0, enable_prefix_caching = true,
        num_snapshots = 0, snapshot_interval = 2048, decode_snapshot_interval = 512,
        enable_kv_cache_events = false, enable_block_saves = false,
        hash_key = DEFAULT_HASH_KEY,
    ))]
    #[expect(clippy::too_many_arguments, reason = "keyword-only settings")]
    fn new(
        py: Python<'_>,
        max_num_seqs: i64,
        max_model_len: i64,
        num_blocks: i64,
        block_size: i64,
        max_num_batched_tokens: i64,
        num_speculative_tokens: i64,
        drafter: Option<DrafterArgument<'_>>,
        sliding_window: Option<i64>,
        window_groups: Option<Vec<i64>>,
        max_in_flight: i64,
        max_constraint_len: i64,
        logits_dtype: &str,
        num_reserved_decode_tokens: i64,
        long_prefill_token_threshold: i64,
        max_prefill_stall_ms: f64,
        attention_cost_ratio: f64,
        merged_rooms: Option<Vec<(i64, i64, i64)>>,
        max_merged_chunks: i64,
        max_merged_steps: i64,
        priority_aging_steps: i64,
        max_loras: i64,
        enable_prefix_caching: bool,
        num_snapshots: i64,
        snapshot_interval: i64,
        decode_snapshot_interval: i64,
        enable_kv_cache_events: bool,
        enable_block_saves: bool,
        hash_key: &[u8],
    ) -> PyResult<Self> {
        let size = |field, value| size(py, Class::InvalidConfig, field, value);
        let given = drafter.map(|drafter| drafter.into_core(py)).transpose()?;
        let (drafter, host_drafters) = given.unwrap_or((Drafter::None, HostDrafters::default()));
        let config = SchedulerConfig {
            max_num_seqs: size("max_num_seqs", max_num_seqs)?,
            max_model_len: size("max_model_len", max_model_len)?,
            num_blocks: size("num_blocks", num_blocks)?,
            block_size: size("block_size", block_size)?,
            max_num_batched_tokens: size("max_num_batched_tokens", max_num_batched_tokens)?,
            num_speculative_tokens: size("num_speculative_tokens", num_speculative_tokens)?,
            drafter,
            host_drafters,
            sliding_window: sliding_window.map(|window| size("sliding_window", window)).transpose()?,
            window_groups: (window_groups.unwrap_or_default().into_iter())
                .map(|window| size("window_groups", window))
                .collect::<PyResult<_>>()?,
            max_in_flight: size("max_in_flight", max_in_flight)?,
            max_constraint_len: size("max_constraint_len", max_constraint_len)?,
            logits_dtype: parse_dtype(py, logits_dtype)?,
            num_reserved_decode_tokens: size("num_reserved_decode_tokens", num_reserved_decode_tokens)?,
            long_prefill_token_threshold: size("long_prefill_token_threshold", long_prefill_token_threshold)?,
            max_prefill_stall_ms,
            attention_cost_ratio,
            merged_rooms: (merged_rooms.unwrap_or_default().into_iter())
                .map(|(drafts, seqs, tokens)| {
                    Ok(MergedRoom {
                        num_speculative_tokens: size("merged_rooms", drafts)?,
                        num_seqs: size("merged_rooms", seqs)?,
                        num_tokens: size("merged_rooms", tokens)?,
                    })
                })
                .collect::<PyResult<_>>()?,
            max_merged_chunks: size("max_merged_chunks", max_merged_chunks)?,
            max_merged_steps: size("max_merged_steps", max_merged_steps)?,
            priority_aging_steps: size("priority_aging_steps", priority_aging_steps)?,
            max_loras: size("max_loras", max_loras)?,
            enable_prefix_caching,
            num_snapshots: size("num_snapshots", num_snapshots)?,
            snapshot_interval: size("snapshot_interval", snapshot_interval)?,
            decode_snapshot_interval: size("decode_snapshot_interval", decode_snapshot_interval)?,
            enable_kv_cache_events,
            enable_block_saves,
            hash_key: hash_key_bytes(py, hash_key)?,
        };
        specrs_core::Scheduler::new(config).map(|core| Self(Mutex::new(core))).or_raise(py)
    }

    #[getter]
    fn num_groups(&self, py: Python<'_>) -> usize {
        self.core(py).config().num_groups()
    }

    #[getter]
    fn record_size(&self, py: Python<'_>) -> usize {
        self.core(py).record_layout().size
    }

    #[getter]
    fn results_size(&self, py: Python<'_>) -> usize {
        self.core(py).results_layout().size
    }

    #[getter]
    fn settled_size(&self, py: Python<'_>) -> usize {
        self.core(py).settled_layout().size
    }

    fn record_layout<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        layout_dict(py, &self.core(py).record_layout().sections())
    }

    fn results_layout<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        layout_dict(py, &self.core(py).results_layout().sections())
    }

    fn settled_layout<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        layout_dict(py, &self.core(py).settled_layout().sections())
    }

    #[pyo3(signature = (
        request_id, token_ids, *, limit, min_tokens = 0, num_speculative_tokens = 0, priority = 0, caller = None, stop_token_ids = None,
        sampling = None, cache_salt = NO_SALT, lora = None, extra_keys = None, prediction = None,
    ))]
    #[expect(clippy::too_many_arguments, reason = "keyword-only parameters")]
    #[expect(clippy::needless_pass_by_value, reason = "an argument from Python is owned")]
    fn add_request(
        &self,
        py: Python<'_>,
        request_id: i64,
        token_ids: &Bound<'_, PyAny>,
        limit: i64,
        min_tokens: i64,
        num_speculative_tokens: i64,
        priority: i64,
        caller: Option<i64>,
        stop_token_ids: Option<&Bound<'_, PyAny>>,
        sampling: Option<&RequestSampling>,
        cache_salt: &[u8],
        lora: Option<(i64, String)>,
        extra_keys: Option<ExtraKeys>,
        prediction: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let prediction: Option<In> = prediction.map(|array| readonly("prediction", array)).transpose()?;
        let token_ids: In = readonly("token_ids", token_ids)?;
        let stop_token_ids: Option<In> = stop_token_ids.map(|array| readonly("stop_token_ids", array)).transpose()?;
        let size = |field, value| size(py, Class::InvalidRequest, field, value);
        let extra_keys = self::extra_keys(py, Class::InvalidRequest, extra_keys.as_deref())?;
        let lora = lora.map(|(id, name)| lora_of(py, id, &name)).transpose()?;
        let params = RequestParams {
            limit: size("limit", limit)?,
            min_tokens: size("min_tokens", min_tokens)?,
            num_speculative_tokens: size("num_speculative_tokens", num_speculative_tokens)?,
            priority,
            caller,
            stop_token_ids: stop_token_ids.as_ref().map_or(Ok(&[][..]), |array| array.as_slice())?,
            sampling: sampling.map_or_else(specrs_core::RequestSampling::default, RequestSampling::core),
            cache_salt,
            lora: lora.as_ref(),
            extra_keys: &extra_keys,
            prediction: prediction.as_ref().map_or(Ok(&[][..]), |array| array.as_slice())?,
        };
        self.core(py).add_request(request_id, token_ids.as_slice()?, &params).or_raise(py)
    }

    fn set_grammar_drafts(&self, py: Python<'_>, request_id: i64, token_ids: &Bound<'_, PyAny>) -> PyResult<()> {
        let token_ids: In = readonly("token_ids", token_ids)?;
        self.core(py).set_grammar_drafts(request_id, token_ids.as_slice()?).or_raise(py)
    }

    fn abort(&self, py: Python<'_>, request_id: i64) -> PyResult<()> {
        self.core(py).abort(request_id).or_raise(py)
    }

    fn preempt(&self, py: Python<'_>, request_id: i64) -> PyResult<()> {
        self.core(py).preempt(request_id).or_raise(py)
    }

    fn request(&self, py: Python<'_>, request_id: i64) -> PyResult<RequestView> {
        self.core(py).request(request_id).map(RequestView::from_core).or_raise(py)
    }

    fn request_ids(&self, py: Python<'_>) -> Vec<i64> {
        self.core(py).request_ids().collect()
    }

    fn take_kv_events<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        let events = self.core(py).take_kv_events();
        kv_events::to_list(py, events)
    }

    fn take_kv_event_batch(&self, py: Python<'_>) -> Option<kv_events::KVEventBatch> {
        let mut core = self.core(py);
        let batch = core.take_kv_event_batch();
        let sliding_window = core.config().sliding_window;
        (!batch.is_empty()).then_some(kv_events::KVEventBatch { batch, sliding_window })
    }

    fn plan(&self, py: Python<'_>, record: &Bound<'_, PyAny>) -> PyResult<i64> {
        let mut record: Out = readwrite("record", record)?;
        let outcome = self.core(py).plan(record.as_slice_mut()?).or_raise(py)?;
        Ok(match outcome {
            PlanOutcome::Idle => PLAN_IDLE,
            PlanOutcome::Step(_) => PLAN_STEP,
            PlanOutcome::SettleFirst => PLAN_SETTLE_FIRST,
        })
    }

    fn speculate(&self, py: Python<'_>, planner: &SpeculationPlanner) -> PyResult<()> {
        self.core(py).speculate(&mut planner.planner(py)).or_raise(py)
    }

    #[pyo3(signature = (planner, record, results, ms = None))]
    fn tell(
        &self,
        py: Python<'_>,
        planner: &SpeculationPlanner,
        record: &Bound<'_, PyAny>,
        results: &Bound<'_, PyAny>,
        ms: Option<f64>,
    ) -> PyResult<()> {
        let (record, results): (In, In) = (readonly("record", record)?, readonly("results", results)?);
        let (record, results) = (record.as_slice()?, results.as_slice()?);
        self.core(py).tell(&mut planner.planner(py), record, results, ms).or_raise(py)
    }

    fn time_step(&self, py: Python<'_>, step_id: i64, ms: f64) -> PyResult<()> {
        let step_id = size(py, Class::SettleOrder, "step_id", step_id)? as u64;
        self.core(py).time_step(step_id, ms).or_raise(py)
    }

    fn rebuild_draft(&self, py: Python<'_>, request_id: i64) -> PyResult<()> {
        self.core(py).rebuild_draft(request_id).or_raise(py)
    }

    fn settle(
        &self,
        py: Python<'_>,
        step_id: i64,
        results: &Bound<'_, PyAny>,
        settled: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let step_id = size(py, Class::SettleOrder, "step_id", step_id)? as u64;
        let results: In = readonly("results", results)?;
        let mut settled: Out = readwrite("settled", settled)?;
        self.core(py).settle(step_id, results.as_slice()?, settled.as_slice_mut()?).or_raise(py)
    }

    #[getter]
    fn num_waiting(&self, py: Python<'_>) -> usize {
        self.core(py).num_waiting()
    }

    #[getter]
    fn num_running(&self, py: Python<'_>) -> usize {
        self.core(py).num_running()
    }

    #[getter]
    fn num_steps(&self, py: Python<'_>) -> u64 {
        self.core(py).num_steps()
    }

    #[getter]
    fn num_in_flight(&self, py: Python<'_>) -> usize {
        self.core(py).num_in_flight()
    }

    #[getter]
    fn num_free_blocks(&self, py: Python<'_>) -> usize {
        self.core(py).num_free_blocks()
    }

    #[getter]
    fn num_blocks(&self, py: Python<'_>) -> usize {
        self.core(py).num_blocks()
    }

    fn least_blocks(&self, py: Python<'_>, limit: i64) -> PyResult<usize> {
        Ok(self.core(py).least_blocks(size(py, Class::InvalidConfig, "limit", limit)?))
    }

    #[getter]
    fn num_preemptions(&self, py: Python<'_>) -> u64 {
        self.core(py).num_preemptions()
    }

    #[getter]
    fn num_cached_tokens(&self, py: Python<'_>) -> u64 {
        self.core(py).num_cached_tokens()
    }

    fn state_cache_stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let stats = self.core(py).state_cache_stats();
        let dict = PyDict::new(py);
        for (name, count) in [("num_slots", stats.num_slots as u64), ("num_cached", stats.num_cached as u64)] {
            dict.set_item(name, count)?;
        }
        for (name, count) in [("hits", stats.hits), ("stored", stats.stored), ("evictions", stats.evictions)] {
            dict.set_item(name, count)?;
        }
        Ok(dict)
    }

    fn has_unfinished(&self, py: Python<'_>) -> bool {
        self.core(py).has_unfinished()
    }

    fn acceptance(&self, py: Python<'_>) -> AcceptanceTracker {
        AcceptanceTracker::from_core(self.core(py).acceptance().clone())
    }

    fn acceptance_of(&self, py: Python<'_>, drafter: i64) -> PyResult<AcceptanceTracker> {
        Ok(AcceptanceTracker::from_core(self.core(py).acceptance_of(drafter_kind(py, drafter)?)))
    }

    fn draft_errors_of(&self, py: Python<'_>, drafter: i64) -> PyResult<(u64, Option<String>)> {
        let kind = drafter_kind(py, drafter)?;
        let core = self.core(py);
        let (failures, last) = core.draft_errors_of(kind);
        Ok((failures, last.map(ToString::to_string)))
    }

    fn draft_kv_not_written(&self, py: Python<'_>, blocks: &Bound<'_, PyAny>) -> PyResult<()> {
        let blocks: In = readonly("blocks", blocks)?;
        self.core(py).draft_kv_not_written(blocks.as_slice()?).or_raise(py)
    }

    fn pause_drafting(&self, py: Python<'_>, steps: i64) -> PyResult<()> {
        let steps = size(py, Class::InvalidConfig, "steps", steps)?;
        self.core(py).pause_drafting(steps as u64);
        Ok(())
    }

    fn set_draft_costs(&self, py: Python<'_>, pass_cost: f64, row_costs: Vec<f64>, catch_up_cost: f64) -> PyResult<()> {
        self.core(py).set_draft_costs(pass_cost, row_costs, catch_up_cost).or_raise(py)
    }

    fn take_loads(&self, py: Python<'_>) -> Vec<i64> {
        self.core(py).take_loads()
    }

    fn has_due(&self, py: Python<'_>) -> bool {
        self.core(py).has_due()
    }

    fn reset_prefix_cache(&self, py: Python<'_>) -> bool {
        self.core(py).reset_prefix_cache()
    }

    fn check_integrity(&self, py: Python<'_>) -> PyResult<()> {
        self.core(py).check_integrity().or_raise(py)
    }

    fn __repr__(&self, py: Python<'_>) -> String {
        let core = self.core(py);
        format!(
            "Scheduler(num_waiting={}, num_running={}, num_in_flight={}, num_free_blocks={}/{})",
            core.num_waiting(),
            core.num_running(),
            core.num_in_flight(),
            core.num_free_blocks(),
            core.num_blocks(),
        )
    }
}

fn layout_dict<'py>(py: Python<'py>, sections: &[(&'static str, Section)]) -> PyResult<Bound<'py, PyDict>> {
    let layout = PyDict::new(py);
    for (name, section) in sections {
        layout.set_item(name, (section.offset, section.len))?;
    }
    Ok(layout)
}

fn lora_of(py: Python<'_>, id: i64, name: &str) -> PyResult<Lora> {
    let id = u32::try_from(id).map_err(|_| {
        let (value, allowed) = (format!("({id}, {name:?})"), format!("an id from 1 to {}", u32::MAX));
        Class::InvalidRequest.out_of_range(py, "lora", value, allowed)
    })?;
    Ok(Lora { id, name: name.into() })
}

fn drafter_kind(py: Python<'_>, drafter: i64) -> PyResult<DrafterKind> {
    usize::try_from(drafter).ok().and_then(|index| DrafterKind::ALL.get(index)).copied().ok_or_else(|| {
        let allowed = format!("from 0 to {}", DrafterKind::ALL.len() - 1);
        Class::InvalidConfig.out_of_range(py, "drafter", drafter, allowed)
    })
}
