//! What one request has produced, and how it ended.

use crate::detokenizer::Detokenizer;
use crate::error::Result;
use specrs_core::AcceptanceTracker;
use specrs_core::scheduler::layout::FINISH_ERROR;

/// Finish reason: ended by the caller. No launch settles with it, so its number is none of theirs.
pub const FINISH_ABORT: i64 = 3;

/// How a request ended.
#[derive(Clone, Debug, PartialEq)]
pub struct End {
    /// `FINISH_*`.
    pub reason: i64,
    /// When, by the caller's clock.
    pub time: f64,
    /// Why, where the reason is an error that its launch reported.
    pub error: Option<String>,
    /// The `FLAG_*` bits with which its launch reported the error; 0 for every other end.
    pub flags: i64,
}

/// What an iteration drafted for a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Draft {
    /// The output token that the iteration began with, an index from 0.
    pub start: usize,
    /// Drafts that stood, before stops or the limit cut them.
    pub num_accepted: usize,
    /// The drafts behind them.
    pub rejected: Vec<u32>,
}

/// Output of one request: tokens, text, acceptance books, times, end.
#[derive(Debug)]
pub struct Output {
    request_id: i64,
    num_prompt_tokens: usize,
    tokens: Vec<u32>,
    detokenizer: Option<Detokenizer>,
    /// Whether a stop token has text.
    shows_stop: bool,
    stop: Option<usize>,
    acceptance: AcceptanceTracker,
    drafts: Option<Vec<Draft>>,
    first_token_time: Option<f64>,
    end: Option<End>,
}

impl Output {
    /// Nothing yet. Without a detokenizer there will be tokens and no text. `shows_stop`: a stop token that ends the request is part
    /// of its text.
    pub fn new(
        request_id: i64,
        num_prompt_tokens: usize,
        num_speculative_tokens: usize,
        detokenizer: Option<Detokenizer>,
        shows_stop: bool,
    ) -> Self {
        Self {
            request_id,
            num_prompt_tokens,
            tokens: Vec::new(),
            detokenizer,
            shows_stop,
            stop: None,
            acceptance: AcceptanceTracker::new(num_speculative_tokens),
            drafts: None,
            first_token_time: None,
            end: None,
        }
    }

    /// The same, keeping what was drafted for it. Launches that it is in must report the drafts that they reject.
    #[must_use]
    pub fn keeping_drafts(mut self) -> Self {
        self.drafts = Some(Vec::new());
        self
    }

    /// The request.
    pub fn request_id(&self) -> i64 {
        self.request_id
    }

    /// Tokens of its prompt.
    pub fn num_prompt_tokens(&self) -> usize {
        self.num_prompt_tokens
    }

    /// Its output tokens.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// Its text; see [`Detokenizer::text`].
    pub fn text(&self) -> &str {
        self.detokenizer.as_ref().map_or("", Detokenizer::text)
    }

    /// Its text that no further token can take back.
    pub fn stable_text(&self) -> &str {
        self.detokenizer.as_ref().map_or("", Detokenizer::stable_text)
    }

    /// Which stop string ended it.
    pub fn stop(&self) -> Option<usize> {
        self.stop
    }

    /// How its drafts fared.
    pub fn acceptance(&self) -> &AcceptanceTracker {
        &self.acceptance
    }

    /// The books, to record a draft.
    pub fn acceptance_mut(&mut self) -> &mut AcceptanceTracker {
        &mut self.acceptance
    }

    /// What was drafted in each iteration that drafted, where that is kept.
    pub fn drafts(&self) -> Option<&[Draft]> {
        self.drafts.as_deref()
    }

    /// Keeps the drafts of the iteration whose tokens come next, if any are kept: how many stood, and those that did not.
    pub fn keep_draft(&mut self, num_accepted: usize, rejected: &[i64]) {
        let start = self.tokens.len();
        if let Some(drafts) = &mut self.drafts {
            let rejected = rejected.iter().map(|&token| token as u32).collect();
            drafts.push(Draft { start, num_accepted, rejected });
        }
    }

    /// When its first token came.
    pub fn first_token_time(&self) -> Option<f64> {
        self.first_token_time
    }

    /// How it ended, if it did.
    pub fn end(&self) -> Option<&End> {
        self.end.as_ref()
    }

    /// Takes new tokens; how many were taken, and whether a stop string ended the text among them. Those behind it are dropped.
    ///
    /// `ended_by_token`: the last is a stop token, which is an output token, but no text unless stops are shown.
    ///
    /// # Errors
    /// [`crate::Error::Decode`] if their text cannot be decoded; none is taken then.
    pub fn append(&mut self, tokens: &[i64], ended_by_token: bool, now: f64) -> Result<(usize, bool)> {
        if !tokens.is_empty() {
            self.first_token_time.get_or_insert(now);
        }
        let mut taken = tokens.len();
        if let Some(detokenizer) = &mut self.detokenizer {
            let silent = usize::from(ended_by_token && !self.shows_stop).min(taken);
            let update = detokenizer.update(tokens[..taken - silent].iter().map(|&token| token as u32))?;
            if update.stop.is_some() {
                (taken, self.stop) = (update.taken, update.stop);
            }
        }
        self.tokens.extend(tokens[..taken].iter().map(|&token| token as u32));
        Ok((taken, self.stop.is_some()))
    }

    /// Ends the request, and its text unless because of an error. The first end counts, and an error over any other.
    pub fn finish(&mut self, reason: i64, error: Option<String>, now: f64) {
        self.end_with(End { reason, time: now, error, flags: 0 });
    }

    /// Ends the request because of an error that its launch reported with these `FLAG_*` bits; as [`finish`](Self::finish).
    pub fn fail(&mut self, error: String, flags: i64, now: f64) {
        self.end_with(End { reason: FINISH_ERROR, time: now, error: Some(error), flags });
    }

    fn end_with(&mut self, mut end: End) {
        if self.end.as_ref().is_some_and(|first| end.reason != FINISH_ERROR || first.reason == FINISH_ERROR) {
            return;
        }
        if end.reason != FINISH_ERROR
            && let Some(Err(fault)) = self.detokenizer.as_mut().map(Detokenizer::finish)
        {
            (end.reason, end.error) = (FINISH_ERROR, Some(fault.to_string()));
        }
        self.end = Some(end);
    }
}
