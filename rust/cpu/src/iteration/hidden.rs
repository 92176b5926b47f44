//! Hidden states for a drafter that reads the target's: the states that are kept, and the inputs of the drafter's
//! passes. Draws nothing.
//!
//! An EAGLE-3 or MTP head is fed the hidden state of position p together with the token at p + 1. After n tokens, the
//! last known state is that of position n - 2. So pass 1 feeds the positions up to n - 2 whose states are kept and
//! whose KV is missing. Pass i >= 2 feeds position n + i - 3 with the state that the pass before output. If KV is
//! missing before the kept states, the head starts anew after the gap. A head that attends the target's KV has no KV
//! that could be missing: each of its passes feeds one row at n - 2.

use specrs_core::Drafter;
use specrs_core::scheduler::layout::RecordView;
use specrs_core::scheduler::{SchedulerConfig, StepHeader};

use super::batch::Batch;
use super::passes::{Want, Whose};
use super::prefill::caught_up;
use super::{HiddenRows, Host, Iteration, Model, RowState, Sequence, Stage};
use crate::error::{Error, Result, check_len};
use crate::{Entries, HeadStates, Output, Pass};

/// Hidden states that are kept between passes and between steps.
#[derive(Debug, Default)]
pub(super) struct HiddenStates {
    /// Layers of the target whose input states are read; empty without a drafter that reads hidden states.
    pub(super) layers: Vec<usize>,
    /// Number of elements of the hidden states of one position, over all of `layers`.
    pub(super) size: usize,
    /// W, the maximum number of positions whose hidden states are kept for a row; 0 if only the last position's is kept.
    width: usize,
    /// Hidden states of the target's last pass, `[N, size]`.
    pub(super) captured: Vec<f32>,
    /// Target's hidden states for the first pass of an EAGLE-3 or MTP head, `[N, size]`.
    fed: Vec<f32>,
    /// Hidden states that a pass of the head reads, `[N, hidden]`. Those of a head that attends the target's KV have
    /// the target's size.
    pub(super) head_states: Vec<f32>,
    /// Hidden states that a pass of the head outputs for the next pass, as in `head_states`.
    pub(super) left: Vec<f32>,
    behind: Behind,
}

/// Pass of the head over a step's prompt chunks, which runs in the next step. It contains all its inputs, because the
/// step's record is gone by then.
#[derive(Debug, Default)]
struct Behind {
    /// Rows of the pass; their `rows` are indices of chunks.
    batch: Batch,
    /// State row of each chunk, `[chunks]`.
    rows: Vec<usize>,
    /// Target's hidden states of the pass, `[N, size]`.
    states: Vec<f32>,
    /// Block table of each chunk, `[chunks, max_blocks]`.
    block_table: Vec<i64>,
    /// First position that each chunk's rows attend, `[chunks]`.
    k_start: Vec<i64>,
    max_blocks: usize,
}

impl HiddenStates {
    /// Rejects a draft model, target or row state that does not match the configured drafter. A drafter that reads
    /// hidden states needs a head and row state that keeps them; other drafters must not have such a head. Sets the
    /// layers and sizes of the kept states.
    pub(super) fn check(
        &mut self,
        config: &SchedulerConfig,
        state: &RowState<'_>,
        target: &dyn Model,
        draft: Option<&dyn Model>,
    ) -> Result<()> {
        let (layers, size) = draft.map_or((&[][..], 0), |draft| draft.facts().hidden_layers);
        self.layers.clear();
        let width = match config.drafter {
            Drafter::Hidden { max_draft_lag, .. } => max_draft_lag - 1,
            Drafter::SharedKv { .. } => 0,
            _ if layers.is_empty() => return Ok(()),
            _ => return Err(Error::invalid("draft", "an EAGLE-3 head", "none with this drafter")),
        };
        let attends = draft.is_some_and(|draft| draft.facts().shares_kv);
        if attends != matches!(config.drafter, Drafter::SharedKv { .. }) {
            let [given, allowed] = if attends { ["none", "some"] } else { ["some", "none"] };
            return Err(Error::invalid(
                "the head's own KV",
                given,
                format!("{allowed}, as the scheduler's drafter says"),
            ));
        }
        let Some(rows) = state.hidden.as_ref().filter(|_| !layers.is_empty()) else {
            return Err(Error::invalid("draft and hidden", "not both given", "an EAGLE-3 head and its row state"));
        };
        let facts = target.facts();
        if size != facts.hidden_size {
            let allowed = format!("the target's hidden_size={}", facts.hidden_size);
            return Err(Error::invalid("fc's inputs for each layer", size, allowed));
        }
        let own = draft.map_or(0, |draft| draft.facts().vocab_size);
        if own != facts.vocab_size {
            let allowed = format!("the target's, {}", facts.vocab_size);
            return Err(Error::invalid("the head's vocab_size", own, allowed));
        }
        if let Some(layer) = layers.iter().find(|&&layer| layer > facts.num_layers + 1) {
            return Err(Error::invalid("hidden_layers", layer, format!("from 0 to {}", facts.num_layers + 1)));
        }
        self.layers.extend_from_slice(layers);
        (self.size, self.width) = (layers.len() * size, width);
        check_len("hidden_states", rows.states.len(), rows.start.len() * (self.width + 1) * self.size)
    }

    /// Returns the range of `HiddenRows::states` with the hidden states in column `column` of row `row`.
    fn column(&self, row: usize, column: usize) -> std::ops::Range<usize> {
        let at = (row * (self.width + 1) + column) * self.size;
        at..at + self.size
    }

    /// Keeps the hidden state of a prompt's last position for the head. It is row `at` of the target's pass.
    pub(super) fn keep_last(&self, rows: &mut HiddenRows<'_>, sequence: &Sequence, at: usize) {
        rows.states[self.column(sequence.row, 0)].copy_from_slice(&self.captured[at * self.size..][..self.size]);
        rows.start[sequence.row] = sequence.n as i64 - 1;
    }

    /// Keeps the hidden states of the tokens that an iteration committed, whose rows start at `first` of the target's
    /// pass. Older states are dropped if the head has used them for drafts, or if all states no longer fit.
    pub(super) fn keep_verified(&self, rows: &mut HiddenRows<'_>, sequence: &Sequence, first: usize, grown: usize) {
        let (row, n) = (sequence.row, sequence.n);
        if grown == n {
            return;
        }
        if self.width == 0 {
            let last = first + grown - n - 1;
            rows.start[row] = grown as i64 - 2;
            return rows.states[self.column(row, 0)].copy_from_slice(&self.captured[last * self.size..][..self.size]);
        }
        let kept = rows.start[row] as usize;
        let drafted = sequence.k > 0 && sequence.on_device();
        let start = if drafted || grown - 1 - kept > self.width { n - 1 } else { kept };
        rows.start[row] = start as i64;
        let columns = self.column(row, n - 1 - start).start..self.column(row, grown - 1 - start).start;
        rows.states[columns].copy_from_slice(&self.captured[first * self.size..][..(grown - n) * self.size]);
    }

    /// Runs the head's pass over the prompt chunks of the step before, whose inputs are in `behind`.
    fn feed_behind(&mut self, head: &mut dyn Model) -> Result<()> {
        let Self { behind, head_states, .. } = self;
        let Behind { batch, states, block_table, k_start, max_blocks, .. } = behind;
        head_states.resize(batch.len() * head.facts().hidden_size, 0.0);
        head.fuse(states, head_states)?;
        let pass = Pass {
            tokens: &batch.tokens,
            positions: &batch.positions,
            slots: &batch.slots,
            sequences: &batch.rows,
            block_table,
            max_blocks: *max_blocks,
            k_start,
            ..Pass::default()
        };
        let (none, head_states) = (Entries { layers: &[], states: &mut [] }, HeadStates { hidden: head_states });
        head.forward(&pass, Some(head_states), Output::Nothing, none)
    }
}

impl RowState<'_> {
    /// Moves the start of a row's draft KV to `first` if its KV ends before, so that the head starts anew.
    fn restart(&mut self, row: usize, first: i64) {
        if self.draft_len[row] < first {
            self.draft_start[row] = first;
        }
    }
}

impl Iteration {
    /// Runs the head's pass over the prompt chunks of the step before, if it had some. If the pass fails, the head
    /// starts anew in the rows of these chunks.
    ///
    /// # Errors
    /// If a rank is lost.
    pub(super) fn feed_behind(
        &mut self,
        state: &mut RowState<'_>,
        head: &mut dyn Model,
        host: &mut dyn Host,
    ) -> Result<()> {
        if self.hidden.behind.batch.is_empty() {
            return Ok(());
        }
        let failed = self.stage(Stage::HeadPrefill, host, |own, _| own.hidden.feed_behind(head))?;
        let behind = &mut self.hidden.behind;
        let blocks = failed.as_ref().map(|_| behind.batch.blocks(self.config.block_size)).unwrap_or_default();
        // What failed is not tried again: every later step would fail, too.
        behind.batch.clear();
        let Some(error) = failed else {
            self.counts.draft_passes += 1;
            return Ok(());
        };
        behind.rows.iter().for_each(|&row| state.draft_len[row] = 0);
        self.note_fault(error, blocks);
        Ok(())
    }

    /// Stores the inputs of the head's pass over this step's prompt chunks, which runs in the next step. A chunk of
    /// length 0 says that the head starts anew in this row.
    ///
    /// Positions whose KV another request has already written (slot -1) are not fed.
    pub(super) fn leave_behind(&mut self, record: &RecordView<'_>, header: StepHeader, state: &mut RowState<'_>) {
        let prefilled = &record.seq_row[header.num_decode..header.num_decode + header.num_prefill];
        let max_blocks = state.table_width();
        let HiddenStates { behind, captured, size, .. } = &mut self.hidden;
        behind.batch.clear();
        behind.rows.clear();
        behind.states.clear();
        behind.block_table.clear();
        behind.k_start.clear();
        behind.max_blocks = max_blocks;
        for chunk in 0..header.num_draft_chunks {
            let row = record.draft_chunk_row[chunk] as usize;
            let (start, len) = (record.draft_chunk_start[chunk], record.draft_chunk_len[chunk]);
            if len == 0 {
                state.draft_start[row] = 0;
            } else {
                state.restart(row, start);
            }
            behind.rows.push(row);
            behind.k_start.push(state.draft_start[row]);
            behind.block_table.extend_from_slice(&state.block_table[row * max_blocks..][..max_blocks]);
            let Some(place) = prefilled.iter().position(|&of| of as usize == row) else { continue };
            let first = record.prefill_q_start[place] as usize;
            let at = record.draft_q_start[chunk] as usize..record.draft_q_start[chunk + 1] as usize;
            for (i, at) in at.enumerate() {
                let (position, slot) = (record.draft_position[at] as usize, record.draft_slot[at]);
                if slot >= 0 {
                    behind.batch.push(chunk, state.token(row, position + 1), position, slot);
                    behind.states.extend_from_slice(&captured[(first + i) * *size..][..*size]);
                }
            }
        }
        caught_up(record, header, state, true);
    }

    /// Runs draft pass `i` of an EAGLE-3 or MTP head.
    pub(super) fn head_pass(&mut self, i: usize, state: &RowState<'_>, head: &mut dyn Model, want: Want) -> Result<()> {
        let hidden_size = head.facts().hidden_size;
        if i == 1 {
            self.gather_first(state);
            self.hidden.head_states.resize(self.batch.len() * hidden_size, 0.0);
            head.fuse(&self.hidden.fed, &mut self.hidden.head_states)?;
        } else {
            self.gather_next(i, state, hidden_size);
        }
        self.pass(state, head, want, Whose::Head)?;
        // What the rows of sequences have left, side by side: it is all that the next pass needs.
        for (at, &row) in self.batch.wanted.iter().enumerate() {
            self.hidden.left.copy_within(row * hidden_size..(row + 1) * hidden_size, at * hidden_size);
        }
        Ok(())
    }

    /// Runs draft pass `i` of a head that attends the target's KV. The pass has one row for each sequence, at position
    /// n - 2, the last one with KV. Pass 1 feeds the last token with the target's state at n - 2. Later passes feed the
    /// draft of the pass before, with the state that it output.
    pub(super) fn attending_pass(
        &mut self,
        i: usize,
        state: &RowState<'_>,
        head: &mut dyn Model,
        want: Want,
    ) -> Result<()> {
        let size = self.hidden.size;
        let Some(rows) = &state.hidden else { return Ok(()) };
        self.batch.clear();
        self.hidden.head_states.clear();
        let before = self.sequences.iter().filter(|sequence| sequence.passes() > 0 && sequence.passes() + 1 >= i);
        for (at, sequence) in before.enumerate().filter(|(_, sequence)| sequence.passes() >= i) {
            let token = state.token(sequence.row, sequence.n + i - 2);
            self.batch.push(sequence.row, token, sequence.n - 2, -1);
            self.batch.want_last();
            let fed = if i == 1 {
                &rows.states[self.hidden.column(sequence.row, 0)]
            } else {
                &self.hidden.left[at * size..][..size]
            };
            self.hidden.head_states.extend_from_slice(fed);
        }
        self.pass(state, head, want, Whose::Attending)
    }

    /// Starts the head anew at the first kept state, in sequences whose draft KV ends before it.
    pub(super) fn begin(&self, state: &mut RowState<'_>) {
        if !matches!(self.config.drafter, Drafter::Hidden { .. }) {
            return;
        }
        for sequence in self.sequences.iter().filter(|sequence| sequence.k > 0 && sequence.on_device()) {
            let Some(first) = state.hidden.as_ref().map(|rows| rows.start[sequence.row]) else { return };
            state.restart(sequence.row, first);
        }
    }

    /// Gathers the rows of pass 1: the positions up to n - 2 whose states are kept and whose KV is missing.
    fn gather_first(&mut self, state: &RowState<'_>) {
        self.batch.clear();
        self.hidden.fed.clear();
        let Some(rows) = &state.hidden else { return };
        let (block_size, width) = (self.config.block_size, self.hidden.width);
        for sequence in self.sequences.iter().filter(|sequence| sequence.passes() > 0) {
            let (row, end) = (sequence.row, sequence.n - 1);
            let start = rows.start[row] as usize;
            let missing = start.max(state.draft_len[row] as usize);
            for position in missing.max(end.saturating_sub(width))..end {
                let slot = state.slot(row, position, block_size);
                self.batch.push(row, state.token(row, position + 1), position, slot);
                let column = self.hidden.column(row, (position - start).min(width));
                self.hidden.fed.extend_from_slice(&rows.states[column]);
            }
            if missing >= end {
                // No plan of the scheduler leads here. The state of n - 2 is not known, so the drafts mean nothing.
                self.batch.push_masked(row);
                self.hidden.fed.resize(self.hidden.fed.len() + self.hidden.size, 0.0);
            }
            self.batch.want_last();
        }
    }

    /// Gathers the rows of pass `i` >= 2: draft i - 1, with the state that its row left in the pass before.
    fn gather_next(&mut self, i: usize, state: &RowState<'_>, hidden_size: usize) {
        self.batch.clear();
        self.hidden.head_states.clear();
        let before = self.sequences.iter().filter(|sequence| sequence.passes() >= i - 1);
        for (at, sequence) in before.enumerate().filter(|(_, sequence)| sequence.passes() >= i) {
            let (row, token) = (sequence.row, sequence.n + i - 2);
            let slot = state.slot(row, token - 1, self.config.block_size);
            self.batch.push(row, state.token(row, token), token - 1, slot);
            self.batch.want_last();
            self.hidden.head_states.extend_from_slice(&self.hidden.left[at * hidden_size..][..hidden_size]);
        }
    }
}
