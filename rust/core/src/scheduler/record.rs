//! Writing of a decided step into its record, which puts it in flight.

use super::layout::{RecordLayout, Section};
use super::plan::Plan;
use super::row::{Row, RowIndex, Sequence};
use super::{Scheduler, StepHeader};
use crate::drafts::DrafterKind;
use crate::sampling::{MAX_STOP_IDS, NUM_PARAMS};

impl Scheduler {
    /// Writes `plan` into `record` and puts the step in flight.
    pub(super) fn commit(&mut self, plan: &mut Plan, record: &mut [i64]) -> StepHeader {
        let mut step = self.spare_steps.pop().unwrap_or_default();
        step.id = self.next_step_id;
        step.sequences.clear();
        step.work = plan.work.with_decode_tokens(plan.decode_tokens);
        self.next_step_id += 1;
        let mut header = StepHeader {
            step_id: step.id,
            num_decode: plan.decodes.len(),
            num_prefill: plan.chunks.len(),
            num_admitted: plan.admitted.len(),
            num_draft_chunks: plan.draft_chunks.len(),
            num_preempted: plan.preempted.len(),
            ..StepHeader::default()
        };
        // Admitted rows show their prefix hit only until their first chunk is entered.
        self.write_admissions(plan, record, &mut header);
        self.write_draft_chunks(plan, record, &mut header);
        self.write_decodes(plan, record, &mut header, &mut step.sequences);
        self.write_chunks(plan, record, &mut header, &mut step.sequences);
        if !self.groups.is_empty() {
            self.write_groups(plan, record, &mut header);
        }
        if self.snapshots.is_some() {
            self.write_snapshots(plan, record, &mut header);
        }
        let preempted = self.record_layout.preempted_request_id.offset;
        record[preempted..preempted + plan.preempted.len()].copy_from_slice(&plan.preempted);
        header.used_len = self.record_layout.used_len(&header);
        header.write(record);
        self.steps.push_back(step);
        header
    }

    fn write_decodes(
        &mut self,
        plan: &mut Plan,
        record: &mut [i64],
        header: &mut StepHeader,
        sequences: &mut Vec<Sequence>,
    ) {
        sort_by_k(plan, self.config.num_speculative_tokens);
        let block_size = self.config.block_size;
        let (mut out, mut updates) = split(&self.record_layout, record);
        updates.len = header.num_block_updates;
        plan.unsent.resize(plan.decodes.len() + 1, 0);
        let mut num_unsent = 0;
        for (i, decode) in plan.decodes.iter().enumerate() {
            let row = &mut self.rows[decode.row as usize];
            row.in_flight += 1;
            row.emitting += 1;
            row.emit_upper += decode.k as u32 + 1;
            let sequence = Sequence {
                row: decode.row,
                emit_upper: decode.k as u32 + 1,
                chunk_end: 0,
                drafter: if decode.k > 0 { decode.drafter } else { DrafterKind::Device },
            };
            if sequence.drafts_on_device() {
                row.drafting += 1;
                row.idle_drafts = 0;
            } else {
                row.idle_drafts += 1;
            }
            // Without a branch, which would be mispredicted: any row may need a block.
            plan.unsent[num_unsent] = i as u32;
            num_unsent += usize::from(row.num_sent * block_size < decode.covered);
            out.set(i, decode.row, (decode.k, sequence.drafter), row.num_sent * block_size, decode.n_upper);
            sequences.push(sequence);
        }
        for &i in &plan.unsent[..num_unsent] {
            let decode = &plan.decodes[i as usize];
            let row = &mut self.rows[decode.row as usize];
            updates.extend(decode.row, row, decode.covered, block_size);
            out.capacity[i as usize] = (row.num_sent * block_size) as i64;
        }
        header.num_block_updates = updates.len;
        header.max_k = plan.decodes.first().map_or(0, |decode| decode.k);
        if self.drafts.on_host {
            let offset = self.record_layout.draft_token.offset;
            for (i, decode) in plan.decodes.iter().enumerate() {
                if decode.k == 0 || decode.drafter == DrafterKind::Device {
                    continue;
                }
                let drafts = self.host_drafts_of(decode.row, decode.drafter, decode.k);
                write_tokens(&mut record[offset + i * self.config.num_speculative_tokens..], drafts);
            }
        }
    }

    fn write_chunks(
        &mut self,
        plan: &Plan,
        record: &mut [i64],
        header: &mut StepHeader,
        sequences: &mut Vec<Sequence>,
    ) {
        let layout = self.record_layout;
        record[layout.prefill_q_start.offset] = 0;
        for (j, chunk) in plan.chunks.iter().enumerate() {
            let end = chunk.start + chunk.len;
            let row = &mut self.rows[chunk.row as usize];
            let is_last = end == row.prefill_end;
            row.num_computed = end;
            row.in_flight += 1;
            row.emitting += u32::from(is_last);
            row.emit_upper += u32::from(is_last);

            let (mut out, mut updates) = split(&layout, record);
            updates.len = header.num_block_updates;
            updates.extend(chunk.row, row, end, self.config.block_size);
            header.num_block_updates = updates.len;
            out.set(
                sequences.len(),
                chunk.row,
                (0, DrafterKind::Device),
                row.num_sent * self.config.block_size,
                row.prefill_end,
            );
            record[layout.chunk_start.offset + j] = chunk.start as i64;
            record[layout.chunk_len.offset + j] = chunk.len as i64;
            record[layout.chunk_is_last.offset + j] = i64::from(is_last);
            let drafter = DrafterKind::Device;
            sequences.push(Sequence { row: chunk.row, emit_upper: u32::from(is_last), chunk_end: end as u32, drafter });

            let tokens = &self.requests[row.request].tokens[chunk.start..end];
            let first = header.num_prefill_tokens;
            write_tokens(&mut record[layout.prefill_token.offset + first..], tokens);
            write_positions(&mut record[layout.prefill_position.offset + first..][..chunk.len], chunk.start);
            let slots = &mut record[layout.prefill_slot.offset + first..][..chunk.len];
            self.slot_mapper.map_range(&row.blocks, chunk.start as i64, slots);
            header.num_prefill_tokens += chunk.len;
            record[layout.prefill_q_start.offset + j + 1] = header.num_prefill_tokens as i64;
        }
    }

    fn write_draft_chunks(&mut self, plan: &Plan, record: &mut [i64], header: &mut StepHeader) {
        let layout = self.record_layout;
        record[layout.draft_q_start.offset] = 0;
        for (j, chunk) in plan.draft_chunks.iter().enumerate() {
            record[layout.draft_chunk_row.offset + j] = i64::from(chunk.row);
            record[layout.draft_chunk_start.offset + j] = chunk.start as i64;
            record[layout.draft_chunk_len.offset + j] = chunk.len as i64;
            record[layout.draft_chunk_k_start.offset + j] = self.held_from(chunk.row) as i64;
            let first = header.num_draft_tokens;
            write_positions(&mut record[layout.draft_position.offset + first..][..chunk.len], chunk.start);
            let slots = &mut record[layout.draft_slot.offset + first..][..chunk.len];
            self.map_draft_slots(chunk.row, chunk.start, slots);
            header.num_draft_tokens += chunk.len;
            if self.drafts.from_hidden {
                self.enter_chunk(*chunk);
            }
            record[layout.draft_q_start.offset + j + 1] = header.num_draft_tokens as i64;
        }
    }

    /// Writes the slots of a draft chunk. A block with `draft_valid` that comes after a block without it is fed again,
    /// because later tokens of the chunk attend to it in the same pass. It gets no slots, so it is not written again:
    /// other requests may read it.
    fn map_draft_slots(&self, row: RowIndex, start: usize, slots: &mut [i64]) {
        let (block_size, row) = (self.config.block_size, &self.rows[row as usize]);
        self.slot_mapper.map_range(&row.blocks, start as i64, slots);
        let end = start + slots.len();
        for index in start / block_size..row.num_registered.min(end.div_ceil(block_size)) {
            if self.pool.has_draft(row.blocks[index]) {
                let from = (index * block_size).max(start) - start;
                let to = ((index + 1) * block_size).min(end) - start;
                slots[from..to].fill(crate::slot_mapper::NO_SLOT);
            }
        }
    }

    fn write_admissions(&self, plan: &Plan, record: &mut [i64], header: &mut StepHeader) {
        let layout = self.record_layout;
        record[layout.admit_constraint_start.offset] = 0;
        for (i, &row_index) in plan.admitted.iter().enumerate() {
            let row = &self.rows[row_index as usize];
            let request = &self.requests[row.request];
            let sampling = &request.sampling;
            for (section, value) in [
                (layout.admit_row, i64::from(row_index)),
                (layout.admit_request_id, request.id),
                (layout.admit_num_tokens, request.tokens.len() as i64),
                (layout.admit_prompt_len, request.prompt_len as i64),
                (layout.admit_draft_len, row.draft_len as i64),
                (layout.admit_limit, request.limit as i64),
                (layout.admit_min_len, i64::try_from(request.min_len).unwrap_or(i64::MAX)),
                (layout.admit_num_cached, row.num_computed as i64),
                (layout.admit_lora, self.lora_id(row.request).unwrap_or(0).into()),
                (layout.admit_salt, request.root as i64),
                (layout.admit_seed, sampling.seed),
                (layout.admit_steps, sampling.steps),
                (layout.admit_logprobs, sampling.logprobs),
                (layout.admit_prompt_logprobs, sampling.prompt_logprobs),
                (layout.admit_num_allowed, sampling.num_allowed),
                (layout.admit_num_biases, sampling.num_biases),
                (layout.admit_num_bad_words, sampling.num_bad_words),
            ] {
                record[section.offset + i] = value;
            }
            let params = layout.admit_params.offset + i * NUM_PARAMS;
            for (out, value) in record[params..][..NUM_PARAMS].iter_mut().zip(sampling.params) {
                *out = value.to_bits() as i64;
            }
            let (ids, rest) = record[layout.admit_stop_ids.offset + i * MAX_STOP_IDS..][..MAX_STOP_IDS]
                .split_at_mut(request.stop_token_ids.len());
            ids.copy_from_slice(&request.stop_token_ids);
            rest.fill(-1);
            let start = layout.upload_token.offset + header.num_upload_tokens;
            write_tokens(&mut record[start..], &request.tokens);
            header.num_upload_tokens += request.tokens.len();
            let start = layout.constraint.offset + header.num_constraints;
            record[start..start + sampling.constraints.len()].copy_from_slice(&sampling.constraints);
            header.num_constraints += sampling.constraints.len();
            record[layout.admit_constraint_start.offset + i + 1] = header.num_constraints as i64;
        }
    }
}

/// Sections of the record with an element for each sequence.
struct Sequences<'a> {
    row: &'a mut [i64],
    k: &'a mut [i64],
    drafter: &'a mut [i64],
    capacity: &'a mut [i64],
    n_upper: &'a mut [i64],
}

impl Sequences<'_> {
    #[inline]
    fn set(
        &mut self,
        index: usize,
        row: RowIndex,
        (k, drafter): (usize, DrafterKind),
        capacity: usize,
        n_upper: usize,
    ) {
        self.row[index] = i64::from(row);
        self.k[index] = k as i64;
        self.drafter[index] = drafter as i64;
        self.capacity[index] = capacity as i64;
        self.n_upper[index] = n_upper as i64;
    }
}

/// Block table entries for the device to set, of which the first `len` are filled.
struct BlockUpdates<'a> {
    row: &'a mut [i64],
    index: &'a mut [i64],
    block: &'a mut [i64],
    len: usize,
}

impl BlockUpdates<'_> {
    /// Adds the row's blocks that cover `positions`, except those sent in earlier records.
    #[inline]
    fn extend(&mut self, row_index: RowIndex, row: &mut Row, positions: usize, block_size: usize) {
        while row.num_sent * block_size < positions {
            debug_assert!(self.len < self.row.len(), "block updates beyond what RecordLayout has room for");
            self.row[self.len] = i64::from(row_index);
            self.index[self.len] = row.num_sent as i64;
            self.block[self.len] = row.blocks[row.num_sent];
            self.len += 1;
            row.num_sent += 1;
        }
    }
}

/// Splits a record into the sections of sequences and of block updates.
fn split<'a>(layout: &RecordLayout, record: &'a mut [i64]) -> (Sequences<'a>, BlockUpdates<'a>) {
    let RecordLayout { seq_row, seq_k, seq_drafter, seq_capacity, seq_n_upper, .. } = *layout;
    let RecordLayout { block_row, block_index, block_id, .. } = *layout;
    let sections = [seq_row, seq_k, seq_drafter, seq_capacity, seq_n_upper, block_row, block_index, block_id];
    let sections = sections.map(Section::range);
    let Ok([row, k, drafter, capacity, n_upper, block_row, index, block]) = record.get_disjoint_mut(sections) else {
        unreachable!("sections are disjoint");
    };
    (Sequences { row, k, drafter, capacity, n_upper }, BlockUpdates { row: block_row, index, block, len: 0 })
}

fn write_tokens(out: &mut [i64], tokens: &[u32]) {
    for (out, &token) in out.iter_mut().zip(tokens) {
        *out = i64::from(token);
    }
}

fn write_positions(out: &mut [i64], start: usize) {
    for (i, position) in out.iter_mut().enumerate() {
        *position = (start + i) as i64;
    }
}

/// Sorts the decoding sequences by K descending, those of equal K by importance, with a counting sort.
fn sort_by_k(plan: &mut Plan, max_k: usize) {
    // As a rule all draft the same.
    if plan.decodes.is_sorted_by(|a, b| a.k >= b.k) {
        return;
    }
    plan.counts.clear();
    plan.counts.resize(max_k + 2, 0);
    for decode in &plan.decodes {
        plan.counts[max_k - decode.k + 1] += 1;
    }
    for i in 1..plan.counts.len() {
        plan.counts[i] += plan.counts[i - 1];
    }
    plan.unsorted.clone_from(&plan.decodes);
    for decode in &plan.unsorted {
        let place = &mut plan.counts[max_k - decode.k];
        plan.decodes[*place] = *decode;
        *place += 1;
    }
}
