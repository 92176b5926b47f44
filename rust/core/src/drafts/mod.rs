//! Facts about a drafter for the scheduler: its needs before it drafts, and which part of its KV is valid after
//! an iteration. Runs no drafter on a device.

mod host;

use crate::error::{Error, Result};
pub use host::{
    DrafterKind, GrammarProposer, HostDrafters, NgramProposer, Number, PredictionProposer, PredictionSettings,
    SuffixCache, SuffixDraft, SuffixSettings, SuffixStats,
};
pub(crate) use host::{HostProposers, Proposal, Text};

/// Drafter on the device that proposes for a scheduler's requests. It determines what the scheduler knows of draft KV.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[non_exhaustive]
pub enum Drafter {
    /// No drafter on the device: requests use [`HostDrafters`] or do not draft.
    #[default]
    None,
    /// A draft model on the device with its own KV in the target's blocks, which catches up from tokens, in chunks.
    /// Pass 1 ends with the last committed token. Pass i feeds draft i - 1, unless `mask_token_id` makes pass 1 the
    /// only one.
    Cached {
        /// Number of positions that the draft model can take: a request that outgrows them goes on at K = 0. 1 to 2^31.
        max_model_len: usize,
        /// Maximum number of positions that a row's draft KV may lag behind its n tokens so that the row still drafts.
        /// The first pass feeds these positions. At least 1.
        max_draft_lag: usize,
        /// Token id that replaces drafts 1 to K - 1 in a single pass, if it is 0 or above. That pass yields all drafts
        /// of a row, and the KV that it writes for the replaced drafts is not used again.
        mask_token_id: Option<i64>,
        /// Cost of a catch-up token in tokens of the budget: the draft's share of the target's parameters. Finite,
        /// above 0.
        cost_ratio: f64,
    },
    /// A head on the device that reads the target's hidden states (EAGLE-3, MTP), with its own KV in the target's blocks.
    /// The KV of position p is computed from the target's hidden state there and from the token at p + 1.
    ///
    /// The hidden states that passes leave are kept for a row's last `max_draft_lag - 1` positions before n - 1. If the
    /// head's KV lags further, the states in between are lost, and the head starts anew. It then attends from the first
    /// position whose hidden state is kept. So it never catches up in chunks of its own. A draft chunk is what a prompt
    /// chunk of the same step leaves to the head; one of length 0 at position 0 orders a new start.
    Hidden {
        /// Number of positions that the head can take: a request that outgrows them goes on at K = 0. 1 to 2^31.
        max_model_len: usize,
        /// Maximum number of positions that the head's KV may lag behind n so that it continues from there. At least
        /// the lag after a verification, K + 2, and at most 2^31.
        max_draft_lag: usize,
        /// Whether a prefix hit is kept whole if only its last block lacks the head's KV. The head then starts anew
        /// after it. Otherwise the hit gives up that block.
        keeps_hits: bool,
    },
    /// A head on the device without KV of its own (Gemma 4's assistant). It reads the target's hidden state of position
    /// n - 2 and the target's KV of the positions before n - 1. Nothing of it has to be valid before it drafts, so
    /// requests never catch up, and prefix hits and preemption cost it nothing.
    SharedKv {
        /// Number of positions that the head can take: a request that outgrows them goes on at K = 0. 1 to 2^31.
        max_model_len: usize,
    },
    /// A draft model on the device with its own tokenizer, whose drafts are compared as text (SLEM). Its KV is outside
    /// the target's blocks and needs no catch-up. The number of drafts is known only when the model has generated its
    /// text, so `num_drafted` may be less than K.
    Text,
}

/// Number of positions before n, including the last token's own, from which the window of a [`Drafter::SharedKv`] is
/// counted. Its row stands at n - 2 and attends one position more than a row of the target.
pub(crate) const SHARED_KV_LAG: usize = 3;

/// Cost of a token of an EAGLE-3 or MTP head in tokens of the target, when the scheduler compares it with drafters on the
/// host. A head is one layer of many.
const HEAD_COST: f64 = 0.1;

/// Limits that a drafter sets for every row. They are computed once, because planning reads them for each row.
#[derive(Clone, Copy, Debug)]
#[expect(clippy::struct_excessive_bools, reason = "facts about a drafter that do not exclude each other")]
pub(crate) struct DraftBounds {
    /// Whether the scheduler also has drafters on the host.
    pub(crate) on_host: bool,
    /// Whether a request with drafters on the host chooses between them and this drafter.
    pub(crate) mixes: bool,
    /// Whether the drafter has KV in the target's blocks.
    pub(crate) has_kv: bool,
    /// Whether the draft KV is computed from the target's hidden states, so that only steps that compute them write
    /// it.
    pub(crate) from_hidden: bool,
    /// Whether a prefix hit gives up its last block if only that block lacks draft KV.
    pub(crate) trims_hits: bool,
    /// First position that no draft can have, because the drafter takes no more positions.
    pub(crate) end_of_drafts: usize,
    /// Maximum number of positions that a row's draft KV may lag behind its n tokens so that the row still drafts.
    /// Unlimited for a drafter without KV, and for a head that reads hidden states, which drafts at any lag.
    pub(crate) max_draft_lag: usize,
    /// Maximum lag of a row's draft KV after an iteration that drafted: the largest `grown - draft_len_after(..)`. 0 if
    /// `max_draft_lag` is unlimited.
    pub(crate) lag_after_drafting: usize,
}

impl DraftBounds {
    fn without_kv() -> Self {
        Self {
            on_host: false,
            mixes: false,
            has_kv: false,
            from_hidden: false,
            trims_hits: false,
            end_of_drafts: 0,
            max_draft_lag: usize::MAX,
            lag_after_drafting: 0,
        }
    }
}

impl Drafter {
    /// Makes a [`Drafter::Cached`] for a draft model. Its first pass feeds the two positions that lack KV after all
    /// drafts were accepted.
    pub fn draft_model(max_model_len: usize, cost_ratio: f64) -> Self {
        Self::Cached { max_model_len, max_draft_lag: 2, mask_token_id: None, cost_ratio }
    }

    /// Returns the limits that the drafter sets for every row, with up to `num_speculative_tokens` drafts.
    pub(crate) fn bounds(&self, num_speculative_tokens: usize) -> DraftBounds {
        match *self {
            Self::None => DraftBounds::without_kv(),
            Self::Cached { max_model_len, max_draft_lag, mask_token_id, .. } => DraftBounds {
                on_host: false,
                mixes: true,
                has_kv: true,
                from_hidden: false,
                trims_hits: false,
                // The last draft is drawn from the last position that it can take, and never fed.
                end_of_drafts: max_model_len + 1,
                max_draft_lag,
                // All drafts accepted: neither the last of them nor the token after it was fed, or none of them.
                lag_after_drafting: if mask_token_id.is_none() { 2 } else { num_speculative_tokens + 1 },
            },
            Self::Text => DraftBounds { end_of_drafts: usize::MAX, ..DraftBounds::without_kv() },
            Self::SharedKv { max_model_len } => {
                DraftBounds { mixes: true, end_of_drafts: max_model_len + 1, ..DraftBounds::without_kv() }
            }
            // Whatever the lag is, it drafts.
            Self::Hidden { max_model_len, keeps_hits, .. } => DraftBounds {
                mixes: true,
                has_kv: true,
                from_hidden: true,
                trims_hits: !keeps_hits,
                end_of_drafts: max_model_len + 1,
                ..DraftBounds::without_kv()
            },
        }
    }

    /// Returns the number of positions with valid draft KV after an iteration. The row had `n` tokens, drafted `k` > 0,
    /// and has `grown` tokens afterwards.
    #[inline]
    pub fn draft_len_after(&self, n: usize, k: usize, grown: usize) -> usize {
        match self {
            Self::None | Self::Text | Self::SharedKv { .. } => 0,
            Self::Cached { mask_token_id: None, .. } => grown.min(n + k) - 1,
            Self::Cached { .. } => grown.min(n + 1) - 1,
            // Pass 1 feeds up to position n - 2; what the others write is of no true hidden states.
            Self::Hidden { .. } => n - 1,
        }
    }

    /// Returns the first position whose hidden state is kept after an iteration. The row had `n` tokens and states from
    /// `hidden_start` on, drafted `k`, and has `grown` tokens afterwards. 0 for drafters that read no hidden states.
    #[inline]
    pub fn hidden_start_after(&self, hidden_start: usize, n: usize, k: usize, grown: usize) -> usize {
        match *self {
            // What was fed is needed no more, and what no longer fits is given up for what is new.
            Self::Hidden { max_draft_lag, .. } if k > 0 || grown > hidden_start + max_draft_lag => n - 1,
            Self::Hidden { .. } => hidden_start,
            // The state of the last position that was fed is the only one that it reads.
            Self::SharedKv { .. } => grown - 2,
            Self::None | Self::Text | Self::Cached { .. } => 0,
        }
    }

    /// Returns the cost of a catch-up token in tokens of the budget.
    #[inline]
    pub(crate) fn cost_ratio(&self) -> f64 {
        match *self {
            Self::None | Self::Text => 1.0,
            Self::Hidden { .. } | Self::SharedKv { .. } => HEAD_COST,
            Self::Cached { cost_ratio, .. } => cost_ratio,
        }
    }

    /// Checks the settings of the drafter for `k` drafts per step; sizes may be at most `max_size`.
    ///
    /// # Errors
    /// [`Error::InvalidConfig`] naming the first setting outside its range.
    pub(crate) fn validate(&self, k: usize, max_size: usize) -> Result<()> {
        let (max_model_len, max_draft_lag, least_lag) = match *self {
            Self::None | Self::Text => return Ok(()),
            Self::SharedKv { max_model_len } => (max_model_len, 1, 1),
            Self::Cached { max_model_len, max_draft_lag, .. } => (max_model_len, max_draft_lag, 1),
            Self::Hidden { max_model_len, max_draft_lag, .. } => (max_model_len, max_draft_lag, k + 2),
        };
        for (field, value, least) in
            [("drafter.max_model_len", max_model_len, 1), ("drafter.max_draft_lag", max_draft_lag, least_lag)]
        {
            if !(least..=max_size).contains(&value) {
                return Err(Error::invalid_config(field, value, format!("from {least} to {max_size}")));
            }
        }
        let Self::Cached { mask_token_id, cost_ratio, .. } = *self else { return Ok(()) };
        if let Some(id) = mask_token_id.filter(|&id| id < 0) {
            return Err(Error::invalid_config("drafter.mask_token_id", id, "None, or at least 0"));
        }
        if !cost_ratio.is_finite() || cost_ratio <= 0.0 {
            return Err(Error::invalid_config("drafter.cost_ratio", cost_ratio, "finite and above 0"));
        }
        Ok(())
    }
}
