//! Random inputs of the scheduler's properties: settings, requests, and operations in random order. Checks nothing.

use crate::device::VOCAB;
use proptest::prelude::*;
use specrs_core::{
    Drafter, GrammarProposer, HostDrafters, MergedRoom, NgramProposer, PredictionSettings, SchedulerConfig,
    SuffixSettings,
};

#[derive(Clone, Debug)]
pub(crate) struct Ask {
    /// Index of the long text that the prompt begins with.
    pub(crate) text: i64,
    /// Number of tokens of the long text in the prompt.
    pub(crate) shared: usize,
    /// Number of tokens that follow the long text in the prompt and belong to this request alone.
    pub(crate) own: usize,
    pub(crate) max_tokens: usize,
    pub(crate) min_tokens: usize,
    pub(crate) k: usize,
    pub(crate) priority: i64,
    pub(crate) caller: Option<i64>,
    pub(crate) stop: Vec<i64>,
    pub(crate) salt: u8,
    /// Id of the request's `LoRA` adapter; 0 for none.
    pub(crate) lora: u32,
}

#[derive(Clone, Debug)]
pub(crate) enum Op {
    Add(Ask),
    Plan,
    Settle,
    /// Abort of one of the requests so far. `Preempt`, `Fault` and `Rebuild` name theirs in the same way.
    Abort(prop::sample::Index),
    Preempt(prop::sample::Index),
    Fault(prop::sample::Index, i64),
    /// Loss of a request's draft KV, which is then rebuilt.
    Rebuild(prop::sample::Index),
    ResetPrefixCache,
}

fn ask() -> impl Strategy<Value = Ask> {
    let lengths = (1..24_usize, prop_oneof![3 => Just(0_usize), 1 => 0..8_usize]);
    let rest = (
        -1..2_i64,
        prop::collection::vec(0..VOCAB, 0..3),
        prop_oneof![9 => Just(0_u8), 1 => Just(1)],
        prop_oneof![3 => Just(None), 1 => (0..2_i64).prop_map(Some)],
        prop_oneof![1 => Just(0_u32), 1 => 1..4_u32],
    );
    // Strangers, and a crowd with one long prefix in common, whose draft KV they write for each other.
    let prompt = prop_oneof![
        1 => (0..3_i64, 0..20_usize, 0..12_usize, 0..5_usize),
        2 => (Just(0_i64), 6..20_usize, 0..3_usize, prop_oneof![1 => Just(0_usize), 4 => 1..5_usize]),
    ];
    (prompt, lengths, rest).prop_map(
        |((text, shared, own, k), (max_tokens, min_tokens), (priority, stop, salt, caller, lora))| Ask {
            text,
            shared,
            own,
            max_tokens,
            min_tokens,
            k,
            priority,
            caller,
            stop,
            salt,
            lora,
        },
    )
}

fn op() -> impl Strategy<Value = Op> {
    let any = any::<prop::sample::Index>;
    prop_oneof![
        6 => ask().prop_map(Op::Add),
        16 => Just(Op::Plan),
        16 => Just(Op::Settle),
        1 => any().prop_map(Op::Abort),
        2 => any().prop_map(Op::Preempt),
        2 => (any(), prop::sample::select(vec![1, 2, 2, 2, 4])).prop_map(|(index, flags)| Op::Fault(index, flags)),
        2 => any().prop_map(Op::Rebuild),
        1 => Just(Op::ResetPrefixCache),
    ]
}

/// Token id that one pass for all drafts feeds in their place; it occurs in no text.
const MASK: i64 = VOCAB;

/// Returns the rooms of passes of `total` and of `total / 2` tokens, for up to `max_seqs` sequences with up to `max_k`
/// drafts.
fn rooms(max_seqs: usize, max_k: usize, total: usize) -> Vec<MergedRoom> {
    let of = |k, num_seqs: usize, total: usize| MergedRoom {
        num_speculative_tokens: k,
        num_seqs,
        num_tokens: total.saturating_sub(num_seqs * (k + 1)),
    };
    let seqs = (0..=max_k).flat_map(|k| (1..=max_seqs).map(move |num_seqs| (k, num_seqs)));
    let every = seqs.flat_map(|(k, num_seqs)| [total / 2, total].map(|total| of(k, num_seqs, total)));
    every.filter(|room| room.num_tokens > 0).collect()
}

/// Generates settings. `groups` generates the windows of further groups of layers.
pub(crate) fn settings(groups: impl Strategy<Value = Vec<usize>>) -> impl Strategy<Value = SchedulerConfig> {
    let sizes = (1..5_usize, prop::sample::select(vec![2_usize, 9, 24, 48]), 0..24_usize, 1..6_usize);
    let budget = prop_oneof![2 => 1..6_usize, 3 => 6..40_usize];
    let draft = prop_oneof![1 => Just(None), 1 => (1..30_usize).prop_map(Some), 3 => Just(Some(64))];
    let serial = (prop::sample::select(vec![1_usize, 2, 2, 3]), Just(None));
    let parallel = (1..7_usize, Just(Some(MASK)));
    let first_pass = prop_oneof![3 => serial, 1 => parallel];
    let rest = (0..5_usize, draft, first_pass, 1..4_usize, prop::bool::weighted(0.8));
    let ratio = prop::sample::select(vec![0.05, 0.5, 1.0, 3.0]);
    let policy = (
        prop::sample::select(vec![0_usize, 0, 3, 64]),
        prop::sample::select(vec![0_usize, 0, 1, 7]),
        prop::sample::select(vec![0_usize, 0, 1, 4]),
        prop_oneof![1 => Just(0_usize), 1 => 1..4_usize],
        prop::sample::select(vec![0.0, 0.0, 1.0, 20.0]),
        // Tokens of a verification pass with prompt chunks, number of chunks and of steps; 0: no such pass.
        prop_oneof![1 => Just((0_usize, 1, 1)), 1 => (2..30_usize, 1..4_usize, 1..6_usize)],
        // Layers with states, or none.
        prop::option::weighted(0.5, (1..10_usize, 1..14_usize, 1..7_usize)),
    );
    let ngrams = prop::option::weighted(0.2, (1..4_usize, 0..3_usize));
    let hidden = prop::option::weighted(0.4, 0..5_usize);
    let window = prop::option::weighted(0.4, 2..14_usize);
    let more = (ngrams, hidden, (window, groups), policy);
    (sizes, budget, rest, ratio, more).prop_map(
        |(
            (rows, len, spare, block_size),
            budget,
            rest,
            ratio,
            (ngrams, hidden, (sliding_window, window_groups), policy),
        )| {
            let (k, context, (max_draft_lag, mask_token_id), max_in_flight, enable_prefix_caching) = rest;
            let (drafter, lag) = match (context, hidden) {
                // Of schedulers with a drafter on the host some have one on the device, too.
                (Some(_), _) if ngrams.is_some() && rows % 2 == 0 => (Drafter::None, 1),
                (None, _) => (Drafter::None, 1),
                (Some(max_model_len), Some(4)) => (Drafter::SharedKv { max_model_len }, 3),
                (Some(max_model_len), Some(more)) => {
                    let (max_draft_lag, keeps_hits) = (k + 2 + more, more % 2 == 1);
                    (Drafter::Hidden { max_model_len, max_draft_lag, keeps_hits }, max_draft_lag)
                }
                (Some(max_model_len), None) => {
                    (Drafter::Cached { max_model_len, max_draft_lag, mask_token_id, cost_ratio: ratio }, max_draft_lag)
                }
            };
            // The positions that a row needs at least, wherever a block may begin.
            let all = len.div_ceil(block_size);
            let window_groups: Vec<_> =
                window_groups.into_iter().map(|window| window.min(sliding_window.unwrap_or(window))).collect();
            let of_window = |window: usize, lag: usize| all.min((window + lag - 1).div_ceil(block_size) + 1);
            let of_groups = if matches!(drafter, Drafter::SharedKv { .. }) { lag } else { 1 };
            let further: usize = window_groups.iter().map(|&window| of_window(window, of_groups)).sum();
            let least = sliding_window.map_or(all, |window| of_window(window, lag)) + further;
            let spare = spare * (1 + window_groups.len());
            let states = policy.6.filter(|_| enable_prefix_caching && sliding_window.is_none() && further == 0);
            let (num_snapshots, snapshot_interval, decode_snapshot_interval) = states.unwrap_or((0, 1, 1));
            SchedulerConfig {
                num_snapshots,
                snapshot_interval,
                decode_snapshot_interval,
                num_speculative_tokens: k,
                drafter,
                sliding_window,
                window_groups,
                host_drafters: HostDrafters {
                    ngram: ngrams.map(|(min, more)| NgramProposer::new(min, min + more).expect("allowed")),
                    suffix: (ngrams.is_some_and(|(min, _)| min == 1) || ratio > 2.0)
                        .then(|| SuffixSettings { max_tree_depth: 2 + k, ..SuffixSettings::default() }),
                    prediction: ngrams.is_some_and(|(min, _)| min == 1).then_some(PredictionSettings),
                    grammar: ngrams.is_some_and(|(min, _)| min == 1).then_some(GrammarProposer),
                },
                max_in_flight: if ngrams.is_some() || ratio > 2.0 { 1 } else { max_in_flight },
                enable_prefix_caching,
                num_reserved_decode_tokens: policy.0,
                long_prefill_token_threshold: policy.1,
                priority_aging_steps: policy.2,
                max_loras: policy.3,
                max_prefill_stall_ms: policy.4,
                merged_rooms: rooms(rows, k, policy.5.0),
                max_merged_chunks: policy.5.1,
                max_merged_steps: policy.5.2,
                ..SchedulerConfig::new(rows, len, least + spare, block_size, budget)
            }
        },
    )
}

pub(crate) fn ops() -> impl Strategy<Value = Vec<Op>> {
    prop::collection::vec(op(), 1..120)
}

/// Generates the milliseconds of a draft for a planner, or `None` for no planner.
pub(crate) fn planned_draft_ms() -> impl Strategy<Value = Option<f64>> {
    prop::option::weighted(0.4, prop::sample::select(vec![0.01, 0.3, 100.0]))
}
