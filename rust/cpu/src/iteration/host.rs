//! Host of an iteration: services of the surrounding process for grammars, text of other tokenizers, and agreement
//! among ranks.

use crate::error::{Error, Result};

/// Stage of a drafter in a step. Each may fail by itself, which costs the step its drafts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// Feeds an EAGLE-3 or MTP head the states that the prompt chunks of the step before have left to it.
    HeadPrefill = 1,
    /// Feeds the draft chunks of the step.
    CatchUp = 2,
    /// Draws drafts.
    Draft = 4,
}

/// Services of the host. Sequences are named by their index in the step's results.
pub trait Host {
    /// Begins the grammar of a sequence, whose request is in `row`. Writes the mask of its next token into `mask`,
    /// `[ceil(V / 32)]`: bit t % 32 of word t / 32 is set for ids that may come next.
    ///
    /// The host takes back the tokens of [`advance_grammar`](Self::advance_grammar) after the step, so that only
    /// settled tokens remain.
    ///
    /// # Errors
    /// If the host fails.
    fn start_grammar(&mut self, index: usize, row: usize, mask: &mut [u32]) -> Result<()>;

    /// Advances the grammar of a sequence by its next draft `token`. Writes the mask of the token after it. After a
    /// draft that the grammar does not allow, the mask allows everything, because verification rejects that draft.
    ///
    /// # Errors
    /// If the host fails.
    fn advance_grammar(&mut self, index: usize, token: i64, mask: &mut [u32]) -> Result<()>;

    /// Returns the draft model's ids of the text that `tokens` are for the target; empty if the text has none.
    ///
    /// # Errors
    /// If the host fails.
    fn draft_ids(&mut self, tokens: &[i64]) -> Result<Vec<i64>>;

    /// Returns the target's ids of the draft model's continuation `drafted`. The text before it is `own` in the draft
    /// model's ids and `tokens` in the target's.
    ///
    /// # Errors
    /// If the host fails.
    fn target_ids(&mut self, tokens: &[i64], own: &[i64], drafted: &[i64]) -> Result<Vec<i64>>;

    /// Notes that a stage of the drafter begins.
    fn enter(&mut self, _stage: Stage) {}

    /// Ends a stage of the drafter, which failed here if `error` is given. Returns whether it failed. With ranks it is
    /// true if the stage failed on any rank, so that all ranks continue alike.
    ///
    /// # Errors
    /// If a rank is lost.
    fn leave(&mut self, _stage: Stage, error: Option<&Error>) -> Result<bool> {
        Ok(error.is_some())
    }
}

/// Host for steps whose requests have no grammar and whose drafts are not text.
#[derive(Clone, Copy, Debug)]
pub struct NoHost;

impl Host for NoHost {
    fn start_grammar(&mut self, index: usize, _row: usize, _mask: &mut [u32]) -> Result<()> {
        Err(Error::invalid("grammars", "none", format!("the grammar of sequence {index}")))
    }

    fn advance_grammar(&mut self, index: usize, _token: i64, mask: &mut [u32]) -> Result<()> {
        self.start_grammar(index, 0, mask)
    }

    fn draft_ids(&mut self, _tokens: &[i64]) -> Result<Vec<i64>> {
        Err(Error::invalid("host", "none", "one that knows the draft's tokenizer"))
    }

    fn target_ids(&mut self, tokens: &[i64], _own: &[i64], _drafted: &[i64]) -> Result<Vec<i64>> {
        self.draft_ids(tokens)
    }
}
