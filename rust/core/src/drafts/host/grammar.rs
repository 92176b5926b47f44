//! Drafts by a request's grammar. The scheduler's caller follows the grammar, and reports the tokens that it forces or
//! that are likely.

use super::{HostProposer, HostSettings, Proposal, Settings, Text};
use crate::error::Result;

/// Drafter that proposes the tokens that a request's grammar forces or makes likely after its text, reported by
/// [`crate::Scheduler::set_grammar_drafts`].
///
/// Another drafter continues these tokens, if it has a proposal for the text that includes them. The first that has one
/// is taken: the output that the request predicted ([`PredictionProposer`](super::PredictionProposer)),
/// then suffix decoding, then prompt lookup.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GrammarProposer;

impl HostSettings for GrammarProposer {
    type Proposer = Self;

    fn read(_given: &mut Settings<'_>) -> Result<Self> {
        Ok(Self)
    }

    fn start(self) -> Result<Self> {
        Ok(self)
    }
}

impl HostProposer for GrammarProposer {
    /// Writes the tokens that the grammar reported. The match length of the proposal is their number, so that
    /// acceptance is counted separately for short and long runs of forced tokens.
    fn propose(&mut self, text: Text<'_>, drafts: &mut [u32]) -> Result<Proposal> {
        let len = text.grammar_drafts.len().min(drafts.len());
        drafts[..len].copy_from_slice(&text.grammar_drafts[..len]);
        Ok(Proposal { len, match_len: len })
    }

    fn propose_after(&mut self, _text: Text<'_>, _more: &[u32], _drafts: &mut [u32]) -> Result<Proposal> {
        Ok(Proposal::NONE)
    }
}
