//! What proposes drafts, as far as scheduling goes: what it needs before it drafts, and what an iteration leaves of its KV. Runs no
//! drafter on a device.

mod ngram;
mod suffix;

use crate::error::{Error, Result};
pub use ngram::NgramProposer;
pub use suffix::{SuffixCache, SuffixDraft, SuffixSettings, SuffixStats};

/// What proposes the drafts of a scheduler's requests. The scheduler's books of draft KV follow from it.
///
/// Drafters that read the target's hidden states, and catch up only where those are, will be a variant of their own.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[non_exhaustive]
pub enum Drafter {
    /// Nothing: every request decodes at K = 0.
    #[default]
    None,
    /// Looks for drafts in a request's own tokens when a launch is planned, and has no KV: [`crate::Scheduler::plan`] writes them into
    /// the record. Needs the last launch settled, so one launch in flight at most.
    Host(NgramProposer),
    /// A model on the device with KV of its own, in the target's blocks, that catches up from tokens, in chunks. Pass 1 ends with
    /// the last committed token; pass i feeds draft i - 1, or there is no other, see `mask_token_id`.
    Cached {
        /// Positions that it can take: a request that outgrows them goes on at K = 0. 1 to 2^31.
        max_model_len: usize,
        /// Positions that its KV may lag behind a row's n tokens for it still to draft: its first pass feeds so many. At least 1.
        max_draft_lag: usize,
        /// With an id, 0 or above, one pass gives all drafts of a row: it feeds this id in place of drafts 1 to K - 1, and what KV it
        /// writes for them is no use to later passes.
        mask_token_id: Option<i64>,
        /// Cost of a catch-up token in tokens of the budget: its share of the target's parameters. Finite, above 0.
        cost_ratio: f64,
    },
}

/// What follows from a drafter for every row: read for each, so not asked of the variants each time.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DraftBounds {
    /// Whether it has KV to keep.
    pub(crate) has_kv: bool,
    /// Whether drafts are proposed when a launch is planned.
    pub(crate) on_host: bool,
    /// The position before which every draft lies, for want of positions in the drafter.
    pub(crate) end_of_drafts: usize,
    /// Positions that draft KV may lag behind n and still draft; without KV it may be any number.
    pub(crate) max_draft_lag: usize,
    /// The furthest that draft KV lags behind n after an iteration that drafted, the largest `grown - draft_len_after(..)`.
    pub(crate) lag_after_drafting: usize,
}

impl DraftBounds {
    fn without_kv() -> Self {
        Self {
            has_kv: false,
            on_host: false,
            end_of_drafts: usize::MAX,
            max_draft_lag: usize::MAX,
            lag_after_drafting: 0,
        }
    }
}

impl Drafter {
    /// A draft model: [`Drafter::Cached`] whose first pass feeds the two positions that lack KV after all drafts were accepted.
    pub fn draft_model(max_model_len: usize, cost_ratio: f64) -> Self {
        Self::Cached { max_model_len, max_draft_lag: 2, mask_token_id: None, cost_ratio }
    }

    /// What the planner asks of it for every row, at up to `num_speculative_tokens` drafts.
    pub(crate) fn bounds(&self, num_speculative_tokens: usize) -> DraftBounds {
        match *self {
            Self::None => DraftBounds { end_of_drafts: 0, ..DraftBounds::without_kv() },
            Self::Host(_) => DraftBounds { on_host: true, ..DraftBounds::without_kv() },
            Self::Cached { max_model_len, max_draft_lag, mask_token_id, .. } => DraftBounds {
                has_kv: true,
                on_host: false,
                // The last draft is drawn from the last position that it can take, and never fed.
                end_of_drafts: max_model_len + 1,
                max_draft_lag,
                // All drafts accepted: neither the last of them nor the token after it was fed, or none of them.
                lag_after_drafting: if mask_token_id.is_none() { 2 } else { num_speculative_tokens + 1 },
            },
        }
    }

    /// Positions with valid draft KV after an iteration that drafted `k` > 0 tokens at `n` and left `grown`.
    #[inline]
    pub fn draft_len_after(&self, n: usize, k: usize, grown: usize) -> usize {
        match self {
            Self::None | Self::Host(_) => 0,
            Self::Cached { mask_token_id: None, .. } => grown.min(n + k) - 1,
            Self::Cached { .. } => grown.min(n + 1) - 1,
        }
    }

    /// Budget tokens of a catch-up token.
    #[inline]
    pub(crate) fn cost_ratio(&self) -> f64 {
        match *self {
            Self::None | Self::Host(_) => 1.0,
            Self::Cached { cost_ratio, .. } => cost_ratio,
        }
    }

    /// # Errors
    /// [`Error::InvalidConfig`] naming the first setting outside its range; sizes are at most `max_size`.
    pub(crate) fn validate(&self, max_size: usize) -> Result<()> {
        let Self::Cached { max_model_len, max_draft_lag, mask_token_id, cost_ratio } = *self else { return Ok(()) };
        for (field, value) in [("drafter.max_model_len", max_model_len), ("drafter.max_draft_lag", max_draft_lag)] {
            if !(1..=max_size).contains(&value) {
                return Err(Error::invalid_config(field, value, format!("1 to {max_size}")));
            }
        }
        if let Some(id) = mask_token_id.filter(|&id| id < 0) {
            return Err(Error::invalid_config("drafter.mask_token_id", id, "None, or 0 and above"));
        }
        if !cost_ratio.is_finite() || cost_ratio <= 0.0 {
            return Err(Error::invalid_config("drafter.cost_ratio", cost_ratio, "finite and above 0"));
        }
        Ok(())
    }
}
