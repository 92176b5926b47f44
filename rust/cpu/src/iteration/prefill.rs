//! Prompt chunks through the target and catch-up chunks through the draft model.

use crate::error::Result;
use specrs_core::sampling::LOGPROBS_NONE;
use specrs_core::scheduler::StepHeader;
use specrs_core::scheduler::layout::{FLAG_TARGET_NON_FINITE, RecordView};

use super::accept::{Judged, Report};
use super::passes::{Want, Whose};
use super::{Asked, Host, Iteration, Model, RowState, Stage};

impl Iteration {
    /// Runs the step's prompt chunks in one pass. A chunk that ends its prompt emits the first token, as an iteration
    /// without drafts does. Other chunks report only whether they are finite.
    pub(super) fn prefill(
        &mut self,
        record: &RecordView<'_>,
        header: StepHeader,
        results: &mut [i64],
        state: &mut RowState<'_>,
        target: &mut dyn Model,
        host: &mut dyn Host,
    ) -> Result<()> {
        self.batch.clear();
        self.batch.prompts = true;
        self.sequences.clear();
        let mut by_hidden = false;
        let chunks = header.num_decode..header.num_decode + header.num_prefill;
        for (chunk, index) in chunks.clone().enumerate() {
            let row = record.seq_row[index] as usize;
            for at in record.prefill_q_start[chunk] as usize..record.prefill_q_start[chunk + 1] as usize {
                let position = record.prefill_position[at] as usize;
                self.batch.push(row, record.prefill_token[at], position, record.prefill_slot[at]);
            }
            let pools = self.processors[row].pooling;
            let wants_prompt = self.processors[row].prompt_logprobs != LOGPROBS_NONE;
            if wants_prompt {
                self.batch.want_from(record.prefill_q_start[chunk] as usize);
            }
            self.batch.want_last();
            by_hidden |= wants_prompt || pools;
            let mut sequence = self.sequence_of(index, row, record.seq_capacity[index], state);
            // Of a chunk that does not end its prompt only whether its largest logit is finite counts.
            if record.chunk_is_last[chunk] == 0 {
                sequence.alive = false;
            }
            // A request with pooling draws no token.
            if record.chunk_is_last[chunk] == 0 || pools {
                (sequence.params.greedy, sequence.asked) = (true, Asked::default());
            }
            self.sequences.push(sequence);
        }
        self.start_grammars(host)?;
        let want = Want::of_target(&self.sequences);
        self.pass(state, target, if by_hidden { Want::Hidden } else { want }, Whose::Target)?;
        self.counts.target_passes += 1;
        if by_hidden {
            let last = self.prompt_logprobs(record, header, state, target)?;
            self.pool(record, header, &last, target)?;
        }
        let mut sequences = std::mem::take(&mut self.sequences);
        for (chunk, (sequence, index)) in sequences.iter().zip(chunks).enumerate() {
            let mut report = Report::of(results, &self.results, index);
            report.clear();
            let seen = chunk_is_finite(record, chunk, target);
            if record.chunk_is_last[chunk] == 0 {
                report.set_flags(if seen && self.tops[chunk].is_finite() { 0 } else { FLAG_TARGET_NON_FINITE });
                continue;
            }
            let mut verdict =
                if sequence.alive { self.judge(sequence, chunk, None, state)? } else { Judged::default() };
            verdict.finite &= seen;
            self.update(sequence, &verdict, results, state);
            self.report_logprobs(sequence, chunk, state)?;
            if let Some(rows) = &mut state.hidden {
                self.hidden.keep_last(rows, sequence, record.prefill_q_start[chunk + 1] as usize - 1);
            }
        }
        sequences.clear();
        self.sequences = sequences;
        Ok(())
    }

    /// Runs the draft's pass over committed tokens that it has not seen (deferred drafting). Afterwards their KV is
    /// valid, unless the pass failed, which is noted as the drafter's fault.
    ///
    /// Positions whose KV another request has already written (slot -1) are not fed, because no other row reads their
    /// outputs.
    pub(super) fn catch_up(
        &mut self,
        record: &RecordView<'_>,
        header: StepHeader,
        state: &mut RowState<'_>,
        draft: Option<&mut dyn Model>,
        host: &mut dyn Host,
    ) -> Result<()> {
        self.batch.clear();
        self.batch.prompts = true;
        for chunk in 0..header.num_draft_chunks {
            let row = record.draft_chunk_row[chunk] as usize;
            state.draft_start[row] = record.draft_chunk_k_start[chunk];
            for at in record.draft_q_start[chunk] as usize..record.draft_q_start[chunk + 1] as usize {
                let (position, slot) = (record.draft_position[at] as usize, record.draft_slot[at]);
                if slot >= 0 {
                    self.batch.push(row, state.token(row, position), position, slot);
                }
            }
        }
        let mut written = true;
        if let Some(draft) = draft
            && !self.batch.is_empty()
        {
            let pass = |own: &mut Self, _: &mut dyn Host| own.pass(state, draft, Want::Nothing, Whose::Draft);
            match self.stage(Stage::CatchUp, host, pass)? {
                None => self.counts.draft_passes += 1,
                Some(error) => {
                    self.note_fault(error, self.batch.blocks(self.config.block_size));
                    written = false;
                }
            }
        }
        caught_up(record, header, state, written);
        Ok(())
    }
}

/// Returns false if a row of a prompt chunk is known not to be finite. Where the last layer attends all positions, only
/// the chunk's last row shows it. Where it has a window, all rows have to be checked.
pub(super) fn chunk_is_finite(record: &RecordView<'_>, chunk: usize, target: &dyn Model) -> bool {
    let rows = record.prefill_q_start[chunk] as usize..record.prefill_q_start[chunk + 1] as usize;
    target.finite().get(rows).is_none_or(|rows| rows.iter().all(|&finite| finite))
}

/// Updates `draft_len` of the step's draft chunks, whose KV is valid now or will be before it is read. Chunks of
/// length 0 do only this. If chunks were not `written`, none of their draft KV is valid, because a chunk may begin
/// before the old end.
pub(super) fn caught_up(record: &RecordView<'_>, header: StepHeader, state: &mut RowState<'_>, written: bool) {
    for chunk in 0..header.num_draft_chunks {
        let (start, len) = (record.draft_chunk_start[chunk], record.draft_chunk_len[chunk]);
        let draft_len = &mut state.draft_len[record.draft_chunk_row[chunk] as usize];
        *draft_len = if written || len == 0 { start + len } else { start.min(*draft_len) };
    }
}
