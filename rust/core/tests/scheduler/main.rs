//! Tests of the scheduler's rules, one test per rule, on a simulated device that panics instead of computing nonsense.

#[path = "../common/mod.rs"]
mod common;

mod admissions;
mod batching;
mod blocks;
mod drafting;
mod errors;
mod groups;
mod host_drafts;
mod introspection;
mod kv_event_msgpack;
mod kv_events;
mod loras;
mod policies;
mod prefill_stalls;
mod prefixes;
mod request_drafts;
mod saves;
mod settling;
mod sharing;
mod snapshots;
mod speculation;
mod sweep;
mod windows;

use common::driver::{Ask, prompt};
use specrs_core::{Drafter, GrammarProposer, HostDrafters, PredictionSettings, SchedulerConfig};

/// Returns settings with 4 rows of at most 64 tokens, 64 blocks of 4, a budget of 32, no speculation, and no reserved
/// blocks.
fn small() -> SchedulerConfig {
    SchedulerConfig { num_reserved_decode_tokens: 0, ..SchedulerConfig::new(4, 64, 64, 4, 32) }
}

/// Returns the settings of `small` with K = 3 and a draft model.
fn speculative() -> SchedulerConfig {
    SchedulerConfig { num_speculative_tokens: 3, drafter: Drafter::draft_model(64, 1.0), ..small() }
}

/// Returns a draft model of 64 positions whose first pass feeds `max_draft_lag` positions.
fn with_lag(max_draft_lag: usize) -> Drafter {
    Drafter::Cached { max_model_len: 64, max_draft_lag, mask_token_id: None, cost_ratio: 1.0 }
}

/// Returns `drafters` and those whose drafts come with requests: predictions, and drafts by grammars.
fn with_drafts_of_requests(mut drafters: HostDrafters) -> HostDrafters {
    (drafters.prediction, drafters.grammar) = (Some(PredictionSettings), Some(GrammarProposer));
    drafters
}

/// Returns a request of `len` prompt tokens that differ from those of other seeds.
fn ask(seed: u64, len: usize, max_tokens: usize) -> Ask {
    Ask { prompt: prompt(seed, len), max_tokens, ..Ask::default() }
}

/// Returns a request of `len` prompt tokens that drafts up to 3 tokens.
fn drafting(seed: u64, len: usize, max_tokens: usize) -> Ask {
    Ask { k: 3, ..ask(seed, len, max_tokens) }
}
