//! What proposes drafts, as far as scheduling goes: what it needs before it drafts, and what an iteration leaves of its KV. Runs no
//! drafter on a device.

mod ngram;

use crate::error::{Error, Result};
pub use ngram::NgramProposer;

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
    /// A model on the device with KV of its own, in the target's blocks, fed token by token: pass 1 ends with the last committed
    /// token, pass i feeds draft i - 1. It catches up from tokens, in chunks.
    Cached {
        /// Positions that it can take: a request that outgrows them goes on at K = 0. 1 to 2^31.
        max_model_len: usize,
        /// Positions that its KV may lag behind a row's n tokens for it still to draft: its first pass feeds so many. At least 1.
        max_draft_lag: usize,
        /// Cost of a catch-up token in tokens of the budget: its share of the target's parameters. Finite, above 0.
        cost_ratio: f64,
    },
}

impl Drafter {
    /// A draft model: [`Drafter::Cached`] whose first pass feeds the two positions that lack KV after all drafts were accepted.
    pub fn draft_model(max_model_len: usize, cost_ratio: f64) -> Self {
        Self::Cached { max_model_len, max_draft_lag: 2, cost_ratio }
    }

    /// Whether it has KV to keep.
    #[inline]
    pub(crate) fn has_kv(&self) -> bool {
        matches!(self, Self::Cached { .. })
    }

    /// The position before which every draft lies, for want of positions in the drafter.
    #[inline]
    pub(crate) fn end_of_drafts(&self) -> usize {
        match *self {
            Self::None => 0,
            Self::Host(_) => usize::MAX,
            // The last draft is drawn from the last position that it can take, and never fed.
            Self::Cached { max_model_len, .. } => max_model_len + 1,
        }
    }

    /// Positions that draft KV may lag behind n and still draft; without KV it may be any number.
    #[inline]
    pub(crate) fn max_draft_lag(&self) -> usize {
        match *self {
            Self::None | Self::Host(_) => usize::MAX,
            Self::Cached { max_draft_lag, .. } => max_draft_lag,
        }
    }

    /// The furthest that draft KV lags behind n after an iteration that drafted, the largest `grown - draft_len_after(..)`.
    #[inline]
    pub(crate) fn lag_after_drafting(&self) -> usize {
        match self {
            Self::None | Self::Host(_) => 0,
            // All drafts accepted: neither the last of them nor the token after it was fed.
            Self::Cached { .. } => 2,
        }
    }

    /// Positions with valid draft KV after an iteration that drafted `k` > 0 tokens at `n` and left `grown`.
    #[inline]
    pub(crate) fn draft_len_after(&self, n: usize, k: usize, grown: usize) -> usize {
        match self {
            Self::None | Self::Host(_) => 0,
            Self::Cached { .. } => grown.min(n + k) - 1,
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
        let Self::Cached { max_model_len, max_draft_lag, cost_ratio } = *self else { return Ok(()) };
        for (field, value) in [("drafter.max_model_len", max_model_len), ("drafter.max_draft_lag", max_draft_lag)] {
            if !(1..=max_size).contains(&value) {
                return Err(Error::invalid_config(field, value, format!("1 to {max_size}")));
            }
        }
        if !cost_ratio.is_finite() || cost_ratio <= 0.0 {
            return Err(Error::invalid_config("drafter.cost_ratio", cost_ratio, "finite and above 0"));
        }
        Ok(())
    }
}
