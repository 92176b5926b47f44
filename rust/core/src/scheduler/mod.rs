//! The scheduler: which requests run, on which row and blocks, with how many drafts, in which step.
//!
//! Continuous batching with chunked prefill and deferred drafting. `plan` writes one step into a record, the caller
//! executes it, `settle` takes the results; up to `max_in_flight` steps may be planned and not settled. No clock, no
//! randomness: the same calls give the same records.
//!
//! | file | decides |
//! | --- | --- |
//! | `config` | which settings and parameters are allowed |
//! | `layout`, `header` | where things are in the buffers |
//! | `request`, `row` | what is remembered |
//! | `lifecycle` | how requests come, go, and lose their row |
//! | `plan`, `admission`, `catch_up` | what the next step does |
//! | `prefill_costs` | how many prompt tokens fit into a time |
//! | `sharing` | which caller's request is next, if a caller sends many |
//! | `windows` | which blocks are freed while their request goes on |
//! | `loras` | how many `LoRA` adapters run at once, and which requests share blocks |
//! | `groups` | block tables of layers with other windows |
//! | `snapshots` | where states of layers without KV are kept, for prefix hits |
//! | `host_drafts` | what a drafter on the host proposes |
//! | `hidden` | where the KV of a drafter that reads hidden states begins, and which requests may continue it |
//! | `speculation` | K by a planner; draft KV built again |
//! | `faults` | what a drafter that fails costs |
//! | `record` | how that is written down |
//! | `settle` | what results mean |
//! | `introspection`, `kv_events`, `kv_event_msgpack` | what a host may ask about a request, and about the prefix cache |
//! | `saves`, `snapshot_saves` | which cached blocks and snapshots a host copies elsewhere, and back |
//! | `integrity` | whether all of this agrees |

mod admission;
mod catch_up;
mod config;
mod faults;
mod groups;
mod header;
mod hidden;
mod host_drafts;
mod integrity;
mod introspection;
mod kv_event_msgpack;
mod kv_events;
pub mod layout;
mod lifecycle;
mod loras;
mod merging;
mod plan;
mod prefill_costs;
mod record;
mod request;
mod row;
mod saves;
mod settle;
mod sharing;
mod snapshot_pool;
mod snapshot_saves;
mod snapshots;
mod speculation;
#[cfg(test)]
mod tests;
mod windows;

use std::collections::{BTreeMap, HashMap, VecDeque};

use rustc_hash::FxBuildHasher;

use crate::acceptance::AcceptanceTracker;
use crate::block_pool::BlockPool;
use crate::drafts::{DraftBounds, DrafterKind};
#[cfg(doc)]
use crate::error::Error;
use crate::error::Result;
use crate::hash::BlockHasher;
use crate::slot_mapper::SlotMapper;
pub use config::{Lora, MAX_SPECULATIVE_TOKENS, MergedRoom, RequestParams, SchedulerConfig};
pub use header::{HEADER_LEN, StepHeader};
pub use introspection::{RequestState, RequestView};
pub use kv_event_msgpack::encode_kv_events;
use kv_events::KvEventLog;
pub use kv_events::{KvEvent, KvEventBatch};
use layout::{RecordLayout, ResultsLayout, SettledLayout};
use request::{Order, RequestIndex, Requests};
use row::{Row, RowIndex, Step};
pub use saves::{DueBlock, EndedOutput};
pub use snapshot_pool::StateCacheStats;
pub use snapshot_saves::DueSnapshot;

/// Outcome of `plan`. The enum is exhaustive, because a host that does not know an outcome cannot go on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PlanOutcome {
    /// Nothing can be planned and nothing is in flight. Requests may still wait for the host to copy in blocks
    /// ([`Scheduler::await_load`]).
    Idle,
    /// Nothing can be planned before the oldest step in flight has settled.
    SettleFirst,
    /// The record holds a step, which is in flight from now on.
    Step(StepHeader),
}

/// Scheduler that plans steps and settles their results.
///
/// A loop around it plans, executes and settles; `examples/host.rs` is a whole host.
///
/// ```
/// use specrs_core::scheduler::layout::{FINISH_LENGTH, FINISH_NONE};
/// use specrs_core::{PlanOutcome, RequestParams, Scheduler, SchedulerConfig};
///
/// let mut scheduler = Scheduler::new(SchedulerConfig::new(4, 64, 32, 16, 128))?;
/// let params = RequestParams { limit: 5, ..RequestParams::default() };
/// scheduler.add_request(7, &[11, 12, 13], &params)?;
///
/// // The caller owns the buffers.
/// let mut record = vec![0; scheduler.record_layout().size];
/// let mut results = vec![0; scheduler.results_layout().size];
/// let mut settled = vec![0; scheduler.settled_layout().size];
/// while let PlanOutcome::Step(header) = scheduler.plan(&mut record)? {
///     let (layout, from) = (*scheduler.results_layout(), *scheduler.record_layout());
///     for sequence in 0..header.num_decode + header.num_prefill {
///         // Here a device would run the sequence's row of `record`; it emits one token, 42, and says whether the row
///         // ends with it.
///         let n = record[from.seq_n_upper.offset + sequence] + 1;
///         results[layout.num_emitted.offset + sequence] = 1;
///         results[layout.tokens.offset + sequence] = 42;
///         results[layout.finish_reason.offset + sequence] = if n == 5 { FINISH_LENGTH } else { FINISH_NONE };
///     }
///     scheduler.settle(header.step_id, &results, &mut settled)?;
///     assert_eq!(settled[scheduler.settled_layout().request_id.offset], 7);
/// }
/// assert_eq!(scheduler.num_free_blocks(), 32);
/// # Ok::<(), specrs_core::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Scheduler {
    config: SchedulerConfig,
    /// Limits that follow from `config.drafter`.
    drafts: DraftBounds,
    record_layout: RecordLayout,
    results_layout: ResultsLayout,
    settled_layout: SettledLayout,
    pool: BlockPool,
    slot_mapper: SlotMapper,
    hasher: BlockHasher,
    acceptance: AcceptanceTracker,
    /// Acceptance statistics of each drafter on the host, which `acceptance` includes.
    acceptance_on_host: [AcceptanceTracker; DrafterKind::ON_HOST.len()],
    requests: Requests,
    by_id: HashMap<i64, RequestIndex, FxBuildHasher>,
    /// Requests without a row, most important first.
    waiting: BTreeMap<Order, RequestIndex>,
    /// Number of last plans in a row whose merged chunks left no room for a waiting request that could have a row.
    num_delays: usize,
    /// Number of live requests with a caller.
    num_with_caller: usize,
    rows: Vec<Row>,
    free_rows: Vec<RowIndex>,
    /// Live rows, most important first.
    running: Vec<RowIndex>,
    /// Steps in flight, oldest first.
    steps: VecDeque<Step>,
    spare_steps: Vec<Step>,
    /// Id and work of the step that settled last.
    settled: Option<(u64, prefill_costs::StepWork)>,
    prefill_costs: prefill_costs::PrefillCosts,
    next_step_id: u64,
    next_arrival: u64,
    num_preemptions: u64,
    num_cached_tokens: u64,
    /// Id of the first step that may draft on the device.
    drafting_from: u64,
    plan: plan::Plan,
    /// Blocks to publish while a step settles, of which `[.., num_unpublished)` are used. One element more than R.
    unpublished: Vec<settle::Publication>,
    num_unpublished: usize,
    speculation: speculation::Speculation,
    host_drafts: host_drafts::HostDrafts,
    groups: groups::Groups,
    /// State for drafters that read hidden states, by row; empty for other drafters.
    hidden: Vec<hidden::HiddenRow>,
    /// Snapshots of states; `None` if no layer has a state.
    snapshots: Option<snapshot_pool::Snapshots>,
    /// Log of KV events; `None` unless events are enabled.
    kv_events: Option<KvEventLog>,
    /// Blocks that the host should copy out; `None` unless block saves are enabled.
    saves: Option<saves::SaveLog>,
    /// Requests that the last plan did not admit because they wait for the host to copy in blocks.
    loads: Vec<i64>,
}

impl Scheduler {
    /// Makes a scheduler with no requests and all blocks free.
    ///
    /// # Errors
    /// [`Error::InvalidConfig`] naming the first setting that is not allowed.
    pub fn new(config: SchedulerConfig) -> Result<Self> {
        config.validate()?;
        let rows = config.max_num_seqs;
        let hasher = BlockHasher::new(&config.hash_key);
        Ok(Self {
            drafts: DraftBounds {
                on_host: config.host_drafters.is_some(),
                ..config.drafter.bounds(config.num_speculative_tokens)
            },
            record_layout: RecordLayout::new(&config),
            results_layout: ResultsLayout::new(&config),
            settled_layout: SettledLayout::new(&config),
            pool: BlockPool::new(config.num_blocks)?,
            slot_mapper: SlotMapper::new(config.block_size)?,
            groups: groups::Groups::new(&config, &hasher),
            hasher,
            acceptance: AcceptanceTracker::new(config.num_speculative_tokens),
            acceptance_on_host: DrafterKind::ON_HOST.map(|_| AcceptanceTracker::new(config.num_speculative_tokens)),
            requests: Requests::default(),
            by_id: HashMap::default(),
            waiting: BTreeMap::new(),
            num_delays: 0,
            num_with_caller: 0,
            rows: vec![Row::default(); rows],
            free_rows: (0..rows as RowIndex).rev().collect(),
            running: Vec::with_capacity(rows),
            steps: VecDeque::with_capacity(config.max_in_flight),
            spare_steps: Vec::new(),
            settled: None,
            prefill_costs: prefill_costs::PrefillCosts::new(config.attention_cost_ratio),
            next_step_id: 0,
            next_arrival: 0,
            num_preemptions: 0,
            num_cached_tokens: 0,
            drafting_from: 0,
            plan: plan::Plan::default(),
            unpublished: vec![settle::Publication::default(); rows + 1],
            num_unpublished: 0,
            speculation: speculation::Speculation::default(),
            host_drafts: host_drafts::HostDrafts::new(&config)?,
            hidden: vec![
                hidden::HiddenRow::default();
                if config.drafter.bounds(config.num_speculative_tokens).from_hidden { rows } else { 0 }
            ],
            snapshots: snapshot_pool::Snapshots::new(&config)?,
            kv_events: config.enable_kv_cache_events.then(|| KvEventLog::new(&config)),
            saves: config.enable_block_saves.then(|| saves::SaveLog::new(&config)),
            loads: Vec::new(),
            config,
        })
    }

    /// Returns the settings.
    pub fn config(&self) -> &SchedulerConfig {
        &self.config
    }

    /// Returns the sections of the record that [`Self::plan`] writes.
    pub fn record_layout(&self) -> &RecordLayout {
        &self.record_layout
    }

    /// Returns the sections of the results that [`Self::settle`] reads.
    pub fn results_layout(&self) -> &ResultsLayout {
        &self.results_layout
    }

    /// Returns the sections of the settled results that [`Self::settle`] writes.
    pub fn settled_layout(&self) -> &SettledLayout {
        &self.settled_layout
    }

    /// Returns the number of requests without a row.
    pub fn num_waiting(&self) -> usize {
        self.waiting.len()
    }

    /// Returns the number of requests with a row.
    pub fn num_running(&self) -> usize {
        self.running.len()
    }

    /// Returns the number of steps planned since the start, which is the id of the next one.
    pub fn num_steps(&self) -> u64 {
        self.next_step_id
    }

    /// Returns the number of steps planned and not yet settled.
    pub fn num_in_flight(&self) -> usize {
        self.steps.len()
    }

    /// Returns the number of blocks that no request holds, cached ones included.
    pub fn num_free_blocks(&self) -> usize {
        self.pool.num_free()
    }

    /// Returns the number of blocks in the pool.
    pub fn num_blocks(&self) -> usize {
        self.pool.num_blocks()
    }

    /// Returns how often a running request was preempted.
    pub fn num_preemptions(&self) -> u64 {
        self.num_preemptions
    }

    /// Returns the number of prompt tokens whose target KV came from the prefix cache, counted when their request was
    /// first admitted.
    pub fn num_cached_tokens(&self) -> u64 {
        self.num_cached_tokens
    }

    /// Returns whether a request waits or runs, or a step is in flight.
    pub fn has_unfinished(&self) -> bool {
        !self.by_id.is_empty() || !self.steps.is_empty()
    }

    /// Returns the acceptance statistics of all settled steps.
    pub fn acceptance(&self) -> &AcceptanceTracker {
        &self.acceptance
    }

    /// Returns the acceptance statistics of one drafter in all settled steps.
    pub fn acceptance_of(&self, drafter: DrafterKind) -> AcceptanceTracker {
        match drafter {
            DrafterKind::Device => {
                self.acceptance_on_host.iter().fold(self.acceptance.clone(), AcceptanceTracker::without)
            }
            on_host => self.acceptance_on_host[on_host as usize - 1].clone(),
        }
    }

    /// Returns the block pool, read-only.
    pub fn block_pool(&self) -> &BlockPool {
        &self.pool
    }

    /// Forgets all cached prefixes. Returns false, and changes nothing, while any block is held.
    pub fn reset_prefix_cache(&mut self) -> bool {
        let reset = self.pool.reset_prefix_cache();
        if reset && let Some(snapshots) = &mut self.snapshots {
            snapshots.clear();
        }
        if reset && let Some(events) = &mut self.kv_events {
            events.cleared();
        }
        if reset && let Some(saves) = &mut self.saves {
            saves.cleared();
        }
        reset
    }
}
