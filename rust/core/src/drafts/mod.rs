//! What proposes drafts, as far as scheduling goes: what it needs before it drafts, and what an iteration leaves of its KV. Runs no
//! drafter on a device.

mod ngram;
mod suffix;

use crate::error::{Error, Result};
pub use ngram::NgramProposer;
pub use suffix::{SuffixCache, SuffixDraft, SuffixSettings, SuffixStats};

/// What proposes the drafts of a scheduler's requests on the device. The scheduler's books of draft KV follow from it.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[non_exhaustive]
pub enum Drafter {
    /// Nothing: requests have the drafts of [`HostDrafters`], or none.
    #[default]
    None,
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
    /// A head on the device that reads the target's hidden states (EAGLE-3), with KV of its own in the target's blocks. KV of position p
    /// is made of the target's hidden state there and of the token behind it. The hidden states that passes leave are kept for a
    /// row's last `max_draft_lag - 1` positions before n - 1; where its KV lags further behind, those between are gone for good, and the
    /// head starts anew: it attends from the first position whose hidden state it has. So it never catches up in chunks of its own: a
    /// draft chunk is what a prompt chunk of the same launch leaves to the head, or of length 0 at position 0, to start anew.
    Hidden {
        /// Positions that it can take, as for [`Drafter::Cached`].
        max_model_len: usize,
        /// Positions that its KV may lag behind n for it to go on from there. At least K + 2, which a verification leaves, to 2^31.
        max_draft_lag: usize,
    },
    /// A model on the device with a tokenizer of its own, that reads and writes text. Its KV is its own affair, outside the target's blocks, so
    /// there is none to catch up; how many drafts its text comes to is known when it is written: `num_drafted` may be less than K.
    Text,
}

/// What proposes drafts on the host, when a launch is planned, and has no KV: [`crate::Scheduler::plan`] writes them into the record. Needs
/// the last launch settled, so one launch in flight at most.
///
/// Where a scheduler has several drafters, one on the device among them, each request has in each launch the one that promises the most.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct HostDrafters {
    /// Looks for drafts in a request's own tokens.
    pub ngram: Option<NgramProposer>,
    /// Counts what followed in a request's own tokens and in the outputs of others. An output is one that drafted this way, or might have.
    pub suffix: Option<SuffixSettings>,
}

impl HostDrafters {
    /// Prompt lookup alone.
    pub fn ngram(proposer: NgramProposer) -> Self {
        Self { ngram: Some(proposer), suffix: None }
    }

    /// Suffix decoding alone.
    pub fn suffix(settings: SuffixSettings) -> Self {
        Self { ngram: None, suffix: Some(settings) }
    }

    /// Whether there is any.
    pub fn is_some(&self) -> bool {
        self.ngram.is_some() || self.suffix.is_some()
    }

    /// The one that a request has while it is alone; [`DrafterKind::Device`] without any.
    pub(crate) fn first(&self) -> DrafterKind {
        DrafterKind::ON_HOST.into_iter().find(|&kind| self.has(kind)).unwrap_or_default()
    }

    /// By [`DrafterKind`]: whether there is this one.
    pub(crate) fn has(&self, kind: DrafterKind) -> bool {
        match kind {
            DrafterKind::Device => false,
            DrafterKind::Ngram => self.ngram.is_some(),
            DrafterKind::Suffix => self.suffix.is_some(),
        }
    }
}

/// Which drafter: how the record and the books number them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(u8)]
#[non_exhaustive]
pub enum DrafterKind {
    /// [`Drafter`]; of entries without drafts, too.
    #[default]
    Device = 0,
    /// [`HostDrafters::ngram`].
    Ngram = 1,
    /// [`HostDrafters::suffix`].
    Suffix = 2,
}

impl DrafterKind {
    /// All of them, by number.
    pub const ALL: [Self; 3] = [Self::Device, Self::Ngram, Self::Suffix];
    /// Those on the host.
    pub(crate) const ON_HOST: [Self; 2] = [Self::Ngram, Self::Suffix];
}

/// Cost of a token of a head in tokens of the target, where it stands beside drafters on the host: one layer of many.
const HEAD_COST: f64 = 0.1;

/// What follows from a drafter for every row: read for each, so not asked of the variants each time.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DraftBounds {
    /// Whether there are drafters on the host besides.
    pub(crate) on_host: bool,
    /// Whether it has KV to keep.
    pub(crate) has_kv: bool,
    /// Whether that KV is made of the target's hidden states, so that only launches that compute them write it.
    pub(crate) from_hidden: bool,
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
            on_host: false,
            has_kv: false,
            from_hidden: false,
            end_of_drafts: 0,
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
            Self::None => DraftBounds::without_kv(),
            Self::Cached { max_model_len, max_draft_lag, mask_token_id, .. } => DraftBounds {
                on_host: false,
                has_kv: true,
                from_hidden: false,
                // The last draft is drawn from the last position that it can take, and never fed.
                end_of_drafts: max_model_len + 1,
                max_draft_lag,
                // All drafts accepted: neither the last of them nor the token after it was fed, or none of them.
                lag_after_drafting: if mask_token_id.is_none() { 2 } else { num_speculative_tokens + 1 },
            },
            Self::Text => DraftBounds { end_of_drafts: usize::MAX, ..DraftBounds::without_kv() },
            // Whatever the lag is, it drafts.
            Self::Hidden { max_model_len, .. } => DraftBounds {
                has_kv: true,
                from_hidden: true,
                end_of_drafts: max_model_len + 1,
                ..DraftBounds::without_kv()
            },
        }
    }

    /// Positions with valid draft KV after an iteration that drafted `k` > 0 tokens at `n` and left `grown`.
    #[inline]
    pub fn draft_len_after(&self, n: usize, k: usize, grown: usize) -> usize {
        match self {
            Self::None | Self::Text => 0,
            Self::Cached { mask_token_id: None, .. } => grown.min(n + k) - 1,
            Self::Cached { .. } => grown.min(n + 1) - 1,
            // Pass 1 feeds up to position n - 2; what the others write is of no true hidden states.
            Self::Hidden { .. } => n - 1,
        }
    }

    /// The first position whose hidden state is kept after an iteration that drafted `k` tokens at `n` and left `grown`, those from
    /// `hidden_start` on being kept before; 0 where none are read.
    #[inline]
    pub fn hidden_start_after(&self, hidden_start: usize, n: usize, k: usize, grown: usize) -> usize {
        match *self {
            // What was fed is needed no more, and what no longer fits is given up for what is new.
            Self::Hidden { max_draft_lag, .. } if k > 0 || grown > hidden_start + max_draft_lag => n - 1,
            Self::Hidden { .. } => hidden_start,
            Self::None | Self::Text | Self::Cached { .. } => 0,
        }
    }

    /// Budget tokens of a catch-up token.
    #[inline]
    pub(crate) fn cost_ratio(&self) -> f64 {
        match *self {
            Self::None | Self::Text => 1.0,
            Self::Hidden { .. } => HEAD_COST,
            Self::Cached { cost_ratio, .. } => cost_ratio,
        }
    }

    /// # Errors
    /// [`Error::InvalidConfig`] naming the first setting outside its range, at `k` drafts a launch; sizes are at most `max_size`.
    pub(crate) fn validate(&self, k: usize, max_size: usize) -> Result<()> {
        let (max_model_len, max_draft_lag, least_lag) = match *self {
            Self::None | Self::Text => return Ok(()),
            Self::Cached { max_model_len, max_draft_lag, .. } => (max_model_len, max_draft_lag, 1),
            Self::Hidden { max_model_len, max_draft_lag } => (max_model_len, max_draft_lag, k + 2),
        };
        for (field, value, least) in
            [("drafter.max_model_len", max_model_len, 1), ("drafter.max_draft_lag", max_draft_lag, least_lag)]
        {
            if !(least..=max_size).contains(&value) {
                return Err(Error::invalid_config(field, value, format!("{least} to {max_size}")));
            }
        }
        let Self::Cached { mask_token_id, cost_ratio, .. } = *self else { return Ok(()) };
        if let Some(id) = mask_token_id.filter(|&id| id < 0) {
            return Err(Error::invalid_config("drafter.mask_token_id", id, "None, or 0 and above"));
        }
        if !cost_ratio.is_finite() || cost_ratio <= 0.0 {
            return Err(Error::invalid_config("drafter.cost_ratio", cost_ratio, "finite and above 0"));
        }
        Ok(())
    }
}
