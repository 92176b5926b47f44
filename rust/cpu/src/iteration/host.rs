//! What the process around an iteration does for it: grammars, text of other tokenizers, agreement among ranks.

use crate::error::{Error, Result};

/// What a drafter does in a step. Each may fail by itself, and costs the step its drafts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// Feeds an EAGLE-3 head what the prompt chunks of the step before have left to it.
    HeadPrefill = 1,
    /// Feeds the draft chunks of the step.
    CatchUp = 2,
    /// Draws drafts.
    Draft = 4,
}

/// Services of the host. Sequences are named by their index in the step's results.
pub trait Host {
    /// Begins the grammar of a sequence, whose request is in `row`. Writes the mask of its next token into `mask`,
    /// `[ceil(V / 32)]`: bit t % 32 of word t / 32 is set for ids that may come.
    ///
    /// The host takes back the tokens of [`advance_grammar`](Self::advance_grammar) after the step: only what the scheduler
    /// settles stays.
    ///
    /// # Errors
    /// What the host says.
    fn start_grammar(&mut self, index: usize, row: usize, mask: &mut [u32]) -> Result<()>;

    /// Goes on with the sequence's next draft. Writes the mask of the token after it, which allows everything after a draft that
    /// the grammar does not allow: verification rejects that draft.
    ///
    /// # Errors
    /// What the host says.
    fn advance_grammar(&mut self, index: usize, token: i64, mask: &mut [u32]) -> Result<()>;

    /// Returns the draft model's ids of a text that is `tokens` for the target; empty where it has none.
    ///
    /// # Errors
    /// What the host says.
    fn draft_ids(&mut self, tokens: &[i64]) -> Result<Vec<i64>>;

    /// Returns the target's ids of what the draft model wrote, `drafted`, after its own ids `own` of a text that is `tokens` for
    /// the target.
    ///
    /// # Errors
    /// What the host says.
    fn target_ids(&mut self, tokens: &[i64], own: &[i64], drafted: &[i64]) -> Result<Vec<i64>>;

    /// A stage begins.
    fn enter(&mut self, _stage: Stage) {}

    /// A stage has ended, here with `error` if it failed. Returns whether it failed: with ranks, on any of them, so that all go on
    /// alike.
    ///
    /// # Errors
    /// Where a rank is lost.
    fn leave(&mut self, _stage: Stage, error: Option<&Error>) -> Result<bool> {
        Ok(error.is_some())
    }
}

/// The host of steps whose requests have no grammar, and whose drafts are not text.
#[derive(Clone, Copy, Debug)]
pub struct NoHost;

impl Host for NoHost {
    fn start_grammar(&mut self, index: usize, _row: usize, _mask: &mut [u32]) -> Result<()> {
        Err(Error::invalid("grammars", "none", format!("that of sequence {index}")))
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
