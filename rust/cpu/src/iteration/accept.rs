//! End of an iteration: verifies the drafts by the rule, commits, applies stops and limits, and reports. Runs no model.

use crate::error::Result;
use specrs_core::Drafter;
use specrs_core::philox::{Purpose, uniform_from_word, word};
use specrs_core::scheduler::layout::{
    FINISH_LENGTH, FINISH_NONE, FINISH_STOP, FLAG_CAPACITY, FLAG_NO_TOKEN_ALLOWED, FLAG_TARGET_NON_FINITE,
    ResultsLayout,
};

use super::{Iteration, RowState, Sequence};

/// Verdict on a sequence: its first `num_accepted` drafts are accepted, and `token` comes after them.
#[derive(Clone, Copy, Debug)]
pub(super) struct Judged {
    num_accepted: usize,
    token: i64,
    /// Whether the logits of rows 0 to `num_accepted` are finite. Other rows do not count, because plain decoding does
    /// not reach them.
    pub(super) finite: bool,
    /// Whether row 0 allows no token. If only a later row allows none, the drafts before it are accepted, and the next
    /// iteration begins with that row.
    nothing_allowed: bool,
}

impl Default for Judged {
    /// Makes the verdict on a sequence that does not run.
    fn default() -> Self {
        Self { num_accepted: 0, token: 0, finite: true, nothing_allowed: false }
    }
}

impl Iteration {
    /// Verifies all sequences, commits what they emit and reports it.
    pub(super) fn accept(&mut self, results: &mut [i64], state: &mut RowState<'_>) -> Result<()> {
        let sequences = std::mem::take(&mut self.sequences);
        let (mut first, keeps_q) = (0, self.q_width > 0);
        for (b, sequence) in sequences.iter().enumerate() {
            if !sequence.runs() {
                self.update(sequence, &Judged::default(), results, state);
                continue;
            }
            let judged = self.judge(sequence, first, (keeps_q && sequence.on_device()).then_some(b), state)?;
            self.update(sequence, &judged, results, state);
            self.report_logprobs(sequence, first, state)?;
            let grown = state.num_tokens[sequence.row] as usize;
            if let Some(rows) = &mut state.hidden {
                self.hidden.keep_verified(rows, sequence, first, grown);
            }
            first += sequence.k + 1;
        }
        self.sequences = sequences;
        self.q_width = 0;
        Ok(())
    }

    /// Verifies a sequence whose rows start at `first` of the outputs. `q` is its index in q, if its drafts have one.
    ///
    /// Sequences that sample are verified by `rejection` where the drafts have a q, by `coupled` where they have none.
    pub(super) fn judge(
        &mut self,
        sequence: &Sequence,
        first: usize,
        q: Option<usize>,
        state: &RowState<'_>,
    ) -> Result<Judged> {
        let (k, n, vocab_size) = (sequence.k, sequence.n as u64, self.sampler.vocab_size());
        let rows = first..first + k + 1;
        let (logits, best, tops) = if sequence.asked.processing {
            self.process(sequence, 0, rows.clone(), state);
            (&self.processed.logits, &self.processed.best[..=k], Some(&self.processed.tops[..=k]))
        } else {
            (&self.logits, &self.best[rows.clone()], None)
        };
        let start = sequence.row * state.token_width() + sequence.n;
        let drafts = &state.tokens[start..start + k];
        let (mut num_accepted, mut token);
        if sequence.params.greedy {
            num_accepted = drafts.iter().zip(best).take_while(|(draft, best)| draft == best).count();
            token = best[num_accepted];
        } else {
            let start = if sequence.asked.processing { 0 } else { first * vocab_size };
            let rows = &logits[start..][..(k + 1) * vocab_size];
            let verdict = match q {
                Some(b) => {
                    let q = &self.q[b * self.q_width * vocab_size..][..k * vocab_size];
                    self.sampler.verify_rejection(rows, &sequence.params, sequence.seed, n, drafts, q)?
                }
                None => self.sampler.verify_coupled(rows, &sequence.params, sequence.seed, n, drafts)?,
            };
            (num_accepted, token) = (verdict.num_accepted, i64::from(verdict.token));
        }
        if let Some(rates) = self.rates.as_ref().filter(|_| self.drafting) {
            num_accepted = at_rates(&rates[..k], sequence.seed, n);
            token = best[num_accepted];
        }
        let raw = &self.tops[rows];
        let is_empty = |(top, raw): (&f32, &f32)| raw.is_finite() && *top <= f32::NEG_INFINITY;
        let first_empty = tops.and_then(|tops| tops.iter().zip(raw).position(is_empty)).filter(|&i| i <= num_accepted);
        let finite = raw[..=first_empty.unwrap_or(num_accepted)].iter().all(|top| top.is_finite());
        if let Some(empty) = first_empty {
            // The draft that leads to the empty row is the last token, as if it had been drawn in the row before.
            num_accepted = empty.saturating_sub(1);
            token = drafts.get(num_accepted).copied().unwrap_or(0);
        }
        Ok(Judged { num_accepted, token, finite, nothing_allowed: first_empty == Some(0) })
    }

    /// Commits the emitted tokens, applies stops and the limit, and reports. No later code judges them again. A
    /// sequence with a fault commits nothing: its row ends, and only its flags are reported.
    ///
    /// If the drafter has KV, `draft_len` becomes the result of `Drafter::draft_len_after` for `K_r > 0`; else it is
    /// unchanged. A sequence that ended before reports zeros.
    pub(super) fn update(&self, sequence: &Sequence, judged: &Judged, results: &mut [i64], state: &mut RowState<'_>) {
        let mut report = Report::of(results, &self.results, sequence.index);
        report.clear();
        if !sequence.alive {
            return;
        }
        let mut flags = sequence.flags;
        flags |= if judged.finite { 0 } else { FLAG_TARGET_NON_FINITE };
        flags |= if sequence.fits { 0 } else { FLAG_CAPACITY };
        flags |= if judged.nothing_allowed { FLAG_NO_TOKEN_ALLOWED } else { 0 };
        report.set_flags(flags);
        let (row, n) = (sequence.row, sequence.n);
        if !sequence.fits || !judged.finite || judged.nothing_allowed {
            state.active[row] = false;
            return;
        }
        let start = row * state.token_width() + n;
        // Before the last token takes the place of the first of them.
        report.set_rejected(judged.num_accepted, &state.tokens[start + judged.num_accepted..start + sequence.k]);
        state.write_tokens(row, n + judged.num_accepted, &[judged.token]);
        // Where a grammar leaves only the end, stop ids are written before `min_tokens`, and count.
        let min_len = if self.processors[row].has_grammar { 0 } else { state.min_len[row] };
        let stop = (n..=n + judged.num_accepted)
            .find(|&position| position as i64 >= min_len && state.is_stop(row, state.token(row, position)));
        let grown = stop.unwrap_or(n + judged.num_accepted) + 1;
        let at_limit = grown as i64 >= state.limit[row];
        state.num_tokens[row] = grown as i64;
        state.active[row] = stop.is_none() && !at_limit;
        if sequence.k > 0 && sequence.on_device() && !matches!(self.config.drafter, Drafter::None | Drafter::Text) {
            state.draft_len[row] = self.config.drafter.draft_len_after(n, sequence.k, grown) as i64;
        }
        let reason = if stop.is_some() {
            FINISH_STOP
        } else if at_limit {
            FINISH_LENGTH
        } else {
            FINISH_NONE
        };
        report.finish(judged.num_accepted, sequence.k, reason, &state.tokens[start..start + grown - n]);
    }
}

/// Draws m, the number of accepted drafts, so that the i-th draft is accepted with the unconditional probability
/// `rates[i]`. Given the drafts before it, its probability is the ratio of two rates.
fn at_rates(rates: &[f32], seed: u64, n: u64) -> usize {
    let mut before = 1.0;
    rates
        .iter()
        .enumerate()
        .take_while(|&(i, &rate)| {
            let stands = uniform_from_word(word(seed, n + i as u64, Purpose::Accept, 0)) * before < rate;
            before = rate;
            stands
        })
        .count()
}

/// Place of one sequence in the results.
pub(super) struct Report<'a> {
    results: &'a mut [i64],
    layout: &'a ResultsLayout,
    index: usize,
}

impl<'a> Report<'a> {
    pub(super) fn of(results: &'a mut [i64], layout: &'a ResultsLayout, index: usize) -> Self {
        Self { results, layout, index }
    }

    /// Sets the sequence's counts, flags and finish reason in the results to 0. Its tokens are not written.
    pub(super) fn clear(&mut self) {
        let layout = self.layout;
        for section in [layout.num_emitted, layout.num_accepted, layout.num_drafted, layout.flags, layout.finish_reason]
        {
            self.results[section.offset + self.index] = 0;
        }
    }

    pub(super) fn set_flags(&mut self, flags: i64) {
        self.results[self.layout.flags.offset + self.index] = flags;
    }

    /// Writes `drafts`, the verified drafts that were not accepted, into the sequence's tokens in the results. They
    /// start at column `num_accepted + 1`, after the accepted drafts and the token that the target added to them.
    fn set_rejected(&mut self, num_accepted: usize, drafts: &[i64]) {
        self.tokens(num_accepted + 1, drafts.len()).copy_from_slice(drafts);
    }

    /// Returns `len` columns of the sequence's row of tokens in the step's results, from `column` on: the tokens that
    /// it emits, then the drafts that were rejected.
    fn tokens(&mut self, column: usize, len: usize) -> &mut [i64] {
        let width = self.layout.tokens.len / self.layout.flags.len;
        &mut self.results[self.layout.tokens.offset + self.index * width + column..][..len]
    }

    fn finish(&mut self, num_accepted: usize, num_drafted: usize, reason: i64, tokens: &[i64]) {
        let (layout, index) = (self.layout, self.index);
        self.results[layout.num_emitted.offset + index] = tokens.len() as i64;
        self.results[layout.num_accepted.offset + index] = num_accepted as i64;
        self.results[layout.num_drafted.offset + index] = num_drafted as i64;
        self.results[layout.finish_reason.offset + index] = reason;
        self.tokens(0, tokens.len()).copy_from_slice(tokens);
    }
}
