//! Decisions of speculative decoding: scheduling, KV blocks, slot mappings, acceptance statistics. No Python, no GPU,
//! no I/O, no clock.
//!
#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]
#![deny(missing_docs)]

mod acceptance;
mod block_pool;
mod cost_model;
mod drafts;
mod error;
mod hash;
mod math;
pub mod philox;
mod planner;
pub mod sampling;
pub mod scheduler;
mod slot_mapper;

pub use acceptance::AcceptanceTracker;
pub use block_pool::BlockPool;
pub use cost_model::{CostLine, CostModel};
pub use drafts::{
    Drafter, DrafterKind, GrammarProposer, HostDrafters, NgramProposer, Number, PredictionProposer, PredictionSettings,
    SuffixCache, SuffixDraft, SuffixSettings, SuffixStats,
};
pub use error::{Error, Result, must_be};
pub use hash::{BlockHash, BlockHasher, ExtraKey};
pub use planner::SpeculationPlanner;
pub use sampling::RequestSampling;
pub use scheduler::{
    DueBlock, DueSnapshot, EndedOutput, KvEvent, KvEventBatch, Lora, MergedRoom, PlanOutcome, RequestParams,
    RequestState, RequestView, Scheduler, SchedulerConfig, StateCacheStats, encode_kv_events,
};
pub use slot_mapper::{NO_SLOT, SlotMapper};
