//! Output of one request, and how it ended.

use crate::detokenizer::Detokenizer;
use crate::error::Result;
use specrs_core::AcceptanceTracker;
use specrs_core::scheduler::layout::FINISH_ERROR;

/// Finish reason: ended by the caller. Settled steps never report this number.
pub const FINISH_ABORT: i64 = 3;

/// End of a request.
#[derive(Clone, Debug, PartialEq)]
pub struct End {
    /// Finish reason, `FINISH_*`.
    pub reason: i64,
    /// Time of the end, by the caller's clock.
    pub time: f64,
    /// Message, if the reason is an error: of the step, or of text that cannot be decoded.
    pub error: Option<String>,
    /// `FLAG_*` bits with which the step reported the error; 0 for every other end.
    pub flags: i64,
}

/// Drafts of a request in one iteration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Draft {
    /// Index of the output token that the iteration began with, from 0.
    pub start: usize,
    /// Number of accepted drafts, before stops or the limit cut them.
    pub num_accepted: usize,
    /// Rejected drafts, which came after the accepted ones.
    pub rejected: Vec<u32>,
}

/// Output of one request: tokens, text, acceptance statistics, times, end.
#[derive(Debug)]
pub struct Output {
    request_id: i64,
    num_prompt_tokens: usize,
    tokens: Vec<u32>,
    detokenizer: Option<Detokenizer>,
    /// Whether a stop token is part of the text.
    shows_stop: bool,
    stop: Option<usize>,
    acceptance: AcceptanceTracker,
    drafts: Option<Vec<Draft>>,
    first_token_time: Option<f64>,
    end: Option<End>,
}

impl Output {
    /// Makes an empty output. Without a detokenizer it will have tokens and no text. With `shows_stop`, a stop token
    /// that ends the request is part of its text.
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

    /// Makes the output keep the drafts of its request. Steps with the request must report the drafts that they reject.
    #[must_use]
    pub fn keeping_drafts(mut self) -> Self {
        self.drafts = Some(Vec::new());
        self
    }

    /// Returns the id of the request.
    pub fn request_id(&self) -> i64 {
        self.request_id
    }

    /// Returns the number of prompt tokens.
    pub fn num_prompt_tokens(&self) -> usize {
        self.num_prompt_tokens
    }

    /// Returns the output tokens.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// Returns the text so far; see [`Detokenizer::text`].
    pub fn text(&self) -> &str {
        self.detokenizer.as_ref().map_or("", Detokenizer::text)
    }

    /// Returns the part of the text that no further token can remove.
    pub fn stable_text(&self) -> &str {
        self.detokenizer.as_ref().map_or("", Detokenizer::stable_text)
    }

    /// Returns the stable text from byte `start` on, or `None` if `start` is after its end or within a character.
    pub fn stable_text_from(&self, start: usize) -> Option<&str> {
        self.stable_text().get(start..)
    }

    /// Returns the index of the stop string that ended the text.
    pub fn stop(&self) -> Option<usize> {
        self.stop
    }

    /// Returns the acceptance statistics of the request's drafts.
    pub fn acceptance(&self) -> &AcceptanceTracker {
        &self.acceptance
    }

    /// Returns the acceptance statistics, writable, to record a draft.
    pub fn acceptance_mut(&mut self) -> &mut AcceptanceTracker {
        &mut self.acceptance
    }

    /// Returns the drafts of each iteration that drafted, if they are kept.
    pub fn drafts(&self) -> Option<&[Draft]> {
        self.drafts.as_deref()
    }

    /// Keeps the drafts of the iteration whose tokens come next, if drafts are kept: the number of accepted drafts, and
    /// the rejected ones.
    pub fn keep_draft(&mut self, num_accepted: usize, rejected: &[i64]) {
        let start = self.tokens.len();
        if let Some(drafts) = &mut self.drafts {
            let rejected = rejected.iter().map(|&token| token as u32).collect();
            drafts.push(Draft { start, num_accepted, rejected });
        }
    }

    /// Returns the time of the first token.
    pub fn first_token_time(&self) -> Option<f64> {
        self.first_token_time
    }

    /// Returns the end of the request, if it has ended.
    pub fn end(&self) -> Option<&End> {
        self.end.as_ref()
    }

    /// Takes new tokens. Returns how many were taken, and whether a stop string has ended the text. Tokens after the
    /// stop string are not taken, in this call or a later one.
    ///
    /// With `ended_by_token`, the last token is a stop token. It is an output token, but no text unless the output
    /// shows stops.
    ///
    /// # Errors
    /// [`crate::Error::Decode`] if the text of the tokens cannot be decoded; none is taken then.
    pub fn append(&mut self, tokens: &[i64], ended_by_token: bool, now: f64) -> Result<(usize, bool)> {
        if self.stop.is_some() {
            return Ok((0, true));
        }
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

    /// Ends the request, and its text unless the reason is an error. If the end of the text cannot be decoded, the
    /// reason becomes an error. The first end counts, but an error replaces any other end.
    pub fn finish(&mut self, reason: i64, error: Option<String>, now: f64) {
        self.end_with(End { reason, time: now, error, flags: 0 });
    }

    /// Ends the request because of an error that its step reported with these `FLAG_*` bits. An error replaces any
    /// other end.
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
