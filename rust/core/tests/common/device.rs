//! Simulated device that executes records on row state by the rules of `docs/start.md`. It panics where a real device
//! would compute nonsense. Examples are reading KV that was not written for exactly these tokens, and writing beyond
//! the block table or into blocks that others may read.
//!
//! The KV of a position is the hash of all tokens up to it, and its group, one number per slot and model.

use std::collections::HashMap;

use super::model::{EMPTY, draft_token, extend, lookup, target_token, with_key};
use specrs_core::sampling::MAX_STOP_IDS;
use specrs_core::scheduler::layout::{
    FINISH_LENGTH, FINISH_NONE, FINISH_STOP, FLAG_DRAFT_NON_FINITE, FLAG_TARGET_NON_FINITE, HEADER_STEP_ID,
    RecordLayout, Section,
};
use specrs_core::scheduler::{Scheduler, SchedulerConfig, StepHeader};
use specrs_core::{Drafter, DrafterKind, HostDrafters};

/// Value of KV after a fault.
const POISON: u64 = u64::MAX;
/// Value of KV that was never written.
const NEVER: u64 = 0;

/// Stop tokens of a request, and the position from which they count.
#[derive(Clone, Debug, Default)]
struct Stops {
    /// Length of the sequence, prompt included, below which stop tokens do not end it.
    min_len: usize,
    ids: Vec<i64>,
}

#[derive(Clone, Debug, Default)]
struct Row {
    request_id: i64,
    active: bool,
    tokens: Vec<i64>,
    /// Hash of tokens `0..=p` for each position p, which is the right KV of that position.
    prefix: Vec<u64>,
    target_len: usize,
    /// Number of positions that the row's states cover.
    state_len: usize,
    draft_len: usize,
    limit: usize,
    capacity: usize,
    /// Block tables of the row, by group.
    tables: Vec<Vec<i64>>,
    /// Blocks that the row holds according to the scheduler, by group.
    held: Vec<Vec<i64>>,
    /// First position whose draft KV is read.
    k_start: usize,
    stops: Stops,
    /// Extra keys of the row's KV by position.
    extra_keys: Vec<(usize, Vec<u8>)>,
    /// Whether the row's draft KV is poisoned; only this row may read it.
    draft_fault: bool,
}

impl Row {
    fn push(&mut self, token: i64) {
        let mut last = self.prefix.last().copied().unwrap_or(EMPTY);
        for (position, key) in &self.extra_keys {
            if *position == self.tokens.len() {
                last = with_key(last, key);
            }
        }
        self.tokens.push(token);
        self.prefix.push(extend(last, token));
    }

    fn masked(&self, ahead: usize) -> &[i64] {
        if self.tokens.len() + ahead < self.stops.min_len { &self.stops.ids } else { &[] }
    }

    /// Appends emitted tokens until one ends the row. Returns how many it took, and why it ended.
    fn emit(&mut self, tokens: &[i64]) -> (usize, i64) {
        for (i, &token) in tokens.iter().enumerate() {
            let stopped = self.tokens.len() >= self.stops.min_len && self.stops.ids.contains(&token);
            self.push(token);
            if stopped || self.tokens.len() == self.limit {
                self.active = false;
                return (i + 1, if stopped { FINISH_STOP } else { FINISH_LENGTH });
            }
        }
        (tokens.len(), FINISH_NONE)
    }
}

/// Report of one sequence.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    pub emitted: Vec<i64>,
    pub accepted: usize,
    pub drafted: usize,
    pub flags: i64,
    pub finish_reason: i64,
}

/// Simulated device: row state, and the KV of target and draft model.
#[derive(Clone, Debug)]
pub struct Device {
    config: SchedulerConfig,
    rows: Vec<Row>,
    target_kv: Vec<u64>,
    draft_kv: Vec<u64>,
    /// Snapshot in each slot: the number of positions, and the hash of their tokens.
    pub snapshots: Vec<(usize, u64)>,
    extra_keys: HashMap<i64, Vec<(usize, Vec<u8>)>>,
    /// Row that each request was given last.
    row_of: HashMap<i64, usize>,
    /// Flags to raise for a request in its next step that can raise them.
    pub faults: HashMap<i64, i64>,
    /// Number of target and draft tokens computed, chunks included.
    pub target_tokens: usize,
    pub draft_tokens: usize,
}

/// Returns the value that a group's layers keep for a position.
fn in_group(group: usize, content: u64) -> u64 {
    content.wrapping_add(group as u64)
}

struct Reader<'a> {
    record: &'a [i64],
}

impl Reader<'_> {
    fn at(&self, section: Section, i: usize) -> usize {
        usize::try_from(self.signed(section, i)).expect("a size")
    }

    fn signed(&self, section: Section, i: usize) -> i64 {
        assert!(i < section.len, "element {i} of a section of {}", section.len);
        self.record[section.offset + i]
    }
}

impl Device {
    pub fn new(config: &SchedulerConfig) -> Self {
        let slots = config.num_blocks * config.block_size;
        Self {
            config: config.clone(),
            rows: vec![Row::default(); config.max_num_seqs],
            target_kv: vec![NEVER; slots],
            draft_kv: vec![NEVER; slots],
            snapshots: vec![(0, NEVER); config.num_snapshots],
            extra_keys: HashMap::new(),
            row_of: HashMap::new(),
            faults: HashMap::new(),
            target_tokens: 0,
            draft_tokens: 0,
        }
    }

    /// Overwrites the draft KV of a running request with values of no tokens, also in blocks shared with others.
    /// Reading it before it is written again panics. Blocks that another row has claimed are left unchanged.
    pub fn corrupt_draft(&mut self, scheduler: &Scheduler, request_id: i64) {
        let pool = scheduler.block_pool();
        let Some(&row) = self.row_of.get(&request_id) else { return };
        let held = scheduler.request(request_id).map_or(&[][..], |request| request.block_table);
        for &block in held.iter().filter(|&&block| block >= 0) {
            if pool.claimant(block).is_none_or(|claimant| claimant as usize == row) {
                let slots = block as usize * self.config.block_size..;
                self.draft_kv[slots][..self.config.block_size].fill(12345);
            }
        }
    }

    /// Returns a row's numbers of positions with valid target and draft KV, and its block table in the first group.
    pub fn row(&self, row: usize) -> (usize, usize, &[i64]) {
        let row = &self.rows[row];
        (row.target_len, row.draft_len, &row.tables[0])
    }

    /// Returns the target KV of a block.
    pub fn target_block(&self, block: i64) -> &[u64] {
        let start = block as usize * self.config.block_size;
        &self.target_kv[start..start + self.config.block_size]
    }

    /// Returns the target and draft KV of a block.
    pub fn block(&self, block: i64) -> (Vec<u64>, Vec<u64>) {
        let start = block as usize * self.config.block_size;
        let kv = |kv: &[u64]| kv[start..start + self.config.block_size].to_vec();
        (kv(&self.target_kv), kv(&self.draft_kv))
    }

    /// Overwrites the target KV of a block, and its draft KV with `draft` or with values of no tokens.
    pub fn fill_block(&mut self, block: i64, target: &[u64], draft: Option<&[u64]>) {
        let slots = block as usize * self.config.block_size..(block as usize + 1) * self.config.block_size;
        self.target_kv[slots.clone()].copy_from_slice(target);
        match draft {
            Some(draft) => self.draft_kv[slots].copy_from_slice(draft),
            None => self.draft_kv[slots].fill(12345),
        }
    }

    /// Sets the extra keys of a request's KV, by position. They are not part of a record.
    pub fn set_extra_keys(&mut self, request_id: i64, extra_keys: Vec<(usize, Vec<u8>)>) {
        self.extra_keys.insert(request_id, extra_keys);
    }

    /// Executes a step that `scheduler` has just planned. Returns a report per sequence.
    pub fn execute(&mut self, scheduler: &Scheduler, header: StepHeader, record: &[i64]) -> Vec<Report> {
        let layout = *scheduler.record_layout();
        let reader = Reader { record };
        assert_eq!(record[HEADER_STEP_ID], header.step_id as i64);
        self.admit(&reader, &layout, header);
        self.update_blocks(&reader, &layout, header);
        for row in self.rows.iter_mut().filter(|row| row.active) {
            let held = |group| scheduler.group_block_table(row.request_id, group).map_or(vec![], <[i64]>::to_vec);
            row.held = (0..self.config.num_groups()).map(held).collect();
        }
        let num_seqs = header.num_decode + header.num_prefill;
        assert!(num_seqs > 0 && num_seqs <= self.config.max_num_seqs);
        for sequence in 0..num_seqs {
            let row = &mut self.rows[reader.at(layout.seq_row, sequence)];
            row.capacity = reader.at(layout.seq_capacity, sequence);
            let covered = row.tables.iter().map(|table| table.len() * self.config.block_size).min();
            assert!(Some(row.capacity) <= covered, "capacity beyond the tables");
            assert!(row.tokens.len() <= reader.at(layout.seq_n_upper, sequence), "n above its upper bound");
        }
        let mut reports = vec![Report::default(); num_seqs];
        for j in 0..header.num_prefill {
            let sequence = header.num_decode + j;
            reports[sequence] = self.prefill(scheduler, &reader, &layout, j, sequence);
            let row = reader.at(layout.seq_row, sequence);
            self.pass_states(&reader, &layout, header, row, self.rows[row].target_len);
        }
        assert_eq!(reader.at(layout.prefill_q_start, header.num_prefill), header.num_prefill_tokens);
        for j in 0..header.num_draft_chunks {
            self.catch_up(scheduler, &reader, &layout, j);
        }
        assert_eq!(reader.at(layout.draft_q_start, header.num_draft_chunks), header.num_draft_tokens);
        let mut last_k = header.max_k;
        for (sequence, report) in reports.iter_mut().enumerate().take(header.num_decode) {
            let k = reader.at(layout.seq_k, sequence);
            assert!(k <= last_k, "decoding sequences are sorted by K");
            last_k = k;
            let on_device = reader.at(layout.seq_drafter, sequence) == DrafterKind::Device as usize;
            let proposed = (!on_device).then(|| {
                let at = sequence * self.config.num_speculative_tokens;
                (at..at + k).map(|at| reader.signed(layout.draft_token, at)).collect::<Vec<_>>()
            });
            let row = reader.at(layout.seq_row, sequence);
            // Drafts reach the states when a later step knows that they were accepted.
            let passed = self.rows[row].tokens.len();
            *report = self.decode(scheduler, row, k, proposed);
            self.pass_states(&reader, &layout, header, row, passed);
        }
        reports
    }

    /// Advances a row's states to `len` positions, and writes the snapshots whose lengths they pass.
    fn pass_states(
        &mut self,
        reader: &Reader<'_>,
        layout: &RecordLayout,
        header: StepHeader,
        row_index: usize,
        len: usize,
    ) {
        let row = &mut self.rows[row_index];
        for i in 0..header.num_snapshots {
            let at = reader.at(layout.snapshot_len, i);
            if reader.at(layout.snapshot_row, i) == row_index && row.state_len < at && at <= len {
                self.snapshots[reader.at(layout.snapshot_slot, i)] = (at, row.prefix[at - 1]);
            }
        }
        row.state_len = row.state_len.max(len);
    }

    fn admit(&mut self, reader: &Reader<'_>, layout: &RecordLayout, header: StepHeader) {
        let mut at = 0;
        for i in 0..header.num_admitted {
            let request_id = reader.signed(layout.admit_request_id, i);
            let num_tokens = reader.at(layout.admit_num_tokens, i);
            let mut row = Row {
                request_id,
                active: true,
                target_len: reader.at(layout.admit_num_cached, i),
                draft_len: reader.at(layout.admit_draft_len, i),
                limit: reader.at(layout.admit_limit, i),
                extra_keys: self.extra_keys[&request_id].clone(),
                tables: vec![vec![]; self.config.num_groups()],
                stops: Stops {
                    min_len: reader.at(layout.admit_min_len, i),
                    ids: (i * MAX_STOP_IDS..(i + 1) * MAX_STOP_IDS)
                        .map(|at| reader.signed(layout.admit_stop_ids, at))
                        .take_while(|&id| id >= 0)
                        .collect(),
                },
                ..Row::default()
            };
            for token in at..at + num_tokens {
                row.push(reader.signed(layout.upload_token, token));
            }
            at += num_tokens;
            row.state_len = row.target_len;
            if row.state_len > 0 && self.config.num_snapshots > 0 {
                let snapshot = self.snapshots[reader.at(layout.admit_snapshot, i)];
                assert_eq!(snapshot, (row.state_len, row.prefix[row.state_len - 1]), "states of request {request_id}");
            }
            let row_index = reader.at(layout.admit_row, i);
            self.row_of.insert(request_id, row_index);
            self.rows[row_index] = row;
        }
        assert_eq!(at, header.num_upload_tokens);
    }

    fn update_blocks(&mut self, reader: &Reader<'_>, layout: &RecordLayout, header: StepHeader) {
        for i in 0..header.num_block_updates {
            let group = if self.config.num_groups() > 1 { reader.at(layout.block_group, i) } else { 0 };
            let has_window = self.window(group).is_some();
            let table = &mut self.rows[reader.at(layout.block_row, i)].tables[group];
            let index = reader.at(layout.block_index, i);
            if table.is_empty() && has_window {
                table.resize(index, -1); // a window's blocks alone were found
            }
            assert_eq!(table.len(), index, "block tables grow by one block at a time");
            table.push(reader.at(layout.block_id, i) as i64);
        }
    }

    fn prefill(
        &mut self,
        scheduler: &Scheduler,
        reader: &Reader<'_>,
        layout: &RecordLayout,
        j: usize,
        sequence: usize,
    ) -> Report {
        let row_index = reader.at(layout.seq_row, sequence);
        let (start, len) = (reader.at(layout.chunk_start, j), reader.at(layout.chunk_len, j));
        let is_last = reader.at(layout.chunk_is_last, j) == 1;
        let row = &self.rows[row_index];
        assert!(len > 0);
        if !row.active {
            return Report::default(); // a fault in the step before, which the host has not seen yet
        }
        assert_eq!(start, row.target_len, "chunks follow each other");
        assert_eq!(start + len == row.tokens.len(), is_last);
        let at = reader.at(layout.prefill_q_start, j);
        assert_eq!(reader.at(layout.prefill_q_start, j + 1), at + len);
        for i in 0..len {
            let row = &self.rows[row_index];
            assert_eq!(reader.at(layout.prefill_position, at + i), start + i);
            assert_eq!(reader.signed(layout.prefill_token, at + i), row.tokens[start + i]);
            for group in 0..self.config.num_groups() {
                let slot = reader.at(layout.prefill_slot, group * self.config.max_num_batched_tokens + at + i);
                assert_eq!(slot, self.slot_in(group, row, start + i), "group {group}");
            }
            self.write_target(scheduler, row_index, start + i, row.prefix[start + i]);
        }
        self.target_tokens += len;
        let row = &mut self.rows[row_index];
        row.target_len = start + len;
        if let Some(report) = self.target_fault(row_index, start, start + len) {
            return report;
        }
        self.check_target(row_index, start, start + len);
        if !is_last {
            return Report::default();
        }
        let row = &mut self.rows[row_index];
        let token = target_token(*row.prefix.last().expect("a prompt"), row.masked(0));
        let (_, finish_reason) = row.emit(&[token]);
        Report { emitted: vec![token], finish_reason, ..Report::default() }
    }

    fn catch_up(&mut self, scheduler: &Scheduler, reader: &Reader<'_>, layout: &RecordLayout, j: usize) {
        let row_index = reader.at(layout.draft_chunk_row, j);
        let (start, len) = (reader.at(layout.draft_chunk_start, j), reader.at(layout.draft_chunk_len, j));
        let at = reader.at(layout.draft_q_start, j);
        assert_eq!(reader.at(layout.draft_q_start, j + 1), at + len);
        let row = &self.rows[row_index];
        if !row.active {
            return;
        }
        assert!(start + len < row.tokens.len(), "the last token is not the draft's yet");
        let (context, _) = self.draft_model().expect("a draft model");
        assert!(start + len <= context, "beyond the draft's context");
        self.rows[row_index].k_start = reader.at(layout.draft_chunk_k_start, j);
        self.check_draft(row_index, start, start);
        for i in 0..len {
            let row = &self.rows[row_index];
            assert_eq!(reader.at(layout.draft_position, at + i), start + i);
            let (slot, right) = (self.slot(row, start + i), row.prefix[start + i]);
            match reader.signed(layout.draft_slot, at + i) {
                -1 => assert_eq!(self.draft_kv[slot], right, "slot -1 where draft KV is missing"),
                written => {
                    assert_eq!(written, slot as i64);
                    self.write_draft(scheduler, row_index, slot, right);
                }
            }
        }
        self.draft_tokens += len;
        self.check_draft(row_index, start, start + len);
        self.rows[row_index].draft_len = start + len;
    }

    /// Runs a decoding sequence. `proposed` are the drafts of a drafter on the host.
    fn decode(&mut self, scheduler: &Scheduler, row_index: usize, k: usize, proposed: Option<Vec<i64>>) -> Report {
        let row = &self.rows[row_index];
        if !row.active {
            return Report::default();
        }
        let n = row.tokens.len();
        assert_eq!(row.target_len, n - 1, "prefill is complete");
        let on_device = proposed.is_none();
        let drafts = if let Some(proposed) = proposed {
            assert!(k < row.limit - n, "{k} drafts at {n} of {}", row.limit);
            if let HostDrafters { ngram: Some(proposer), suffix: None, grammar: None, .. } = self.config.host_drafters {
                let (min, max) = (proposer.prompt_lookup_min(), proposer.prompt_lookup_max());
                assert_eq!(proposed, lookup(&row.tokens, min, max, k), "what the text itself proposes");
            }
            proposed
        } else {
            let context = self.draft_model().map_or(0, |(context, _)| (context + 1).saturating_sub(n));
            let k = k.min(row.limit - n - 1).min(context);
            self.draft(scheduler, row_index, k)
        };
        let k = drafts.len();

        let row = &self.rows[row_index];
        let (mut prefix, mut emitted) = (row.prefix[n - 1], Vec::new());
        let mut writes = vec![(n - 1, prefix)];
        for (i, &token) in drafts.iter().enumerate() {
            prefix = extend(prefix, token);
            writes.push((n + i, prefix));
        }
        for &(position, content) in &writes {
            self.write_target(scheduler, row_index, position, content);
        }
        self.target_tokens += writes.len();
        if let Some(report) = self.target_fault(row_index, n - 1, n + k) {
            return report;
        }
        self.check_target(row_index, n - 1, n);
        let row = &self.rows[row_index];
        for (i, &(_, prefix)) in writes.iter().enumerate() {
            let token = target_token(prefix, row.masked(i));
            emitted.push(token);
            if drafts.get(i) != Some(&token) {
                break;
            }
        }
        let accepted = emitted.len() - 1;
        let flags = self.draft_fault(row_index, if on_device { k } else { 0 }, n);
        let masked = self.mask().is_some();
        let row = &mut self.rows[row_index];
        let (taken, finish_reason) = row.emit(&emitted);
        emitted.truncate(taken);
        row.target_len = row.tokens.len() - 1;
        if k > 0 && on_device && matches!(self.config.drafter, Drafter::Cached { .. }) {
            row.draft_len = if masked { n } else { (n + accepted).min(n + k - 1) };
        }
        Report { emitted, accepted, drafted: k, flags, finish_reason }
    }

    /// Returns the draft model's context length and the largest lag of its KV with which it drafts.
    fn draft_model(&self) -> Option<(usize, usize)> {
        match self.config.drafter {
            Drafter::Cached { max_model_len, max_draft_lag, .. } => Some((max_model_len, max_draft_lag)),
            _ => None,
        }
    }

    /// Returns the token that one pass for all drafts feeds in their place.
    fn mask(&self) -> Option<i64> {
        match self.config.drafter {
            Drafter::Cached { mask_token_id, .. } => mask_token_id,
            _ => None,
        }
    }

    /// Feeds positions `draft_len..n + k - 1` to the draft model and returns its `k` drafts.
    fn draft(&mut self, scheduler: &Scheduler, row_index: usize, k: usize) -> Vec<i64> {
        if k == 0 {
            return Vec::new();
        }
        let row = &self.rows[row_index];
        let n = row.tokens.len();
        let (context, max_lag) = self.draft_model().expect("a draft model");
        assert!(row.draft_len + max_lag >= n, "drafting with draft KV to {} of {n}", row.draft_len);
        let (mut prefix, mut fed, mask) = (row.prefix[n - 1], row.prefix[n - 1], self.mask());
        let mut writes: Vec<_> = (row.draft_len..n).map(|position| (position, row.prefix[position])).collect();
        let mut drafts = Vec::new();
        for i in 0..k {
            let token = draft_token(prefix, self.rows[row_index].masked(i));
            drafts.push(token);
            prefix = extend(prefix, token);
            fed = extend(fed, mask.unwrap_or(token));
            if i + 1 < k {
                writes.push((n + i, fed));
            }
        }
        for &(position, content) in &writes {
            assert!(position < context);
            let slot = self.slot(&self.rows[row_index], position);
            self.write_draft(scheduler, row_index, slot, content);
        }
        self.draft_tokens += writes.len();
        self.check_draft(row_index, self.rows[row_index].draft_len, n);
        drafts
    }

    fn target_fault(&mut self, row_index: usize, start: usize, end: usize) -> Option<Report> {
        let row = &self.rows[row_index];
        let flags = *self.faults.get(&row.request_id)?;
        if flags & !FLAG_DRAFT_NON_FINITE == 0 {
            return None;
        }
        self.faults.remove(&row.request_id);
        if flags & FLAG_TARGET_NON_FINITE != 0 {
            for position in start..end {
                for group in 0..self.config.num_groups() {
                    let slot = self.slot_in(group, &self.rows[row_index], position);
                    self.target_kv[slot] = POISON;
                }
            }
        }
        self.rows[row_index].active = false;
        Some(Report { flags, ..Report::default() })
    }

    fn draft_fault(&mut self, row_index: usize, k: usize, n: usize) -> i64 {
        let row = &self.rows[row_index];
        if k == 0 || self.faults.get(&row.request_id) != Some(&FLAG_DRAFT_NON_FINITE) {
            return 0;
        }
        self.faults.remove(&row.request_id);
        for position in row.draft_len..n + k - 1 {
            let slot = self.slot(&self.rows[row_index], position);
            self.draft_kv[slot] = POISON;
        }
        self.rows[row_index].draft_fault = true;
        FLAG_DRAFT_NON_FINITE
    }

    /// Returns the slot of a position in the first group, which contains the draft's KV.
    fn slot(&self, row: &Row, position: usize) -> usize {
        self.slot_in(0, row, position)
    }

    fn slot_in(&self, group: usize, row: &Row, position: usize) -> usize {
        assert!(position < row.capacity, "position {position} beyond capacity {}", row.capacity);
        let block = row.tables[group][position / self.config.block_size];
        let held = row.held[group].get(position / self.config.block_size);
        assert!(block >= 0 && held == Some(&block), "position {position} of request {}: {block}", row.request_id);
        let block = block as usize;
        block * self.config.block_size + position % self.config.block_size
    }

    fn write_target(&mut self, scheduler: &Scheduler, row_index: usize, position: usize, content: u64) {
        for group in 0..self.config.num_groups() {
            let slot = self.slot_in(group, &self.rows[row_index], position);
            let block = (slot / self.config.block_size) as i64;
            let holders = scheduler.block_pool().ref_count(block);
            assert_eq!(holders, Some(1), "target KV written to block {block} that others hold");
            assert!(!scheduler.block_pool().is_registered(block), "target KV written to cached block {block}");
            self.target_kv[slot] = in_group(group, content);
        }
    }

    fn write_draft(&mut self, scheduler: &Scheduler, row_index: usize, slot: usize, content: u64) {
        let block = (slot / self.config.block_size) as i64;
        let pool = scheduler.block_pool();
        if pool.is_registered(block) && !self.rows[row_index].draft_fault {
            assert!(!pool.has_draft(block), "draft KV of block {block} written again");
            assert_eq!(pool.claimant(block), Some(row_index as u32), "draft KV of block {block} written without claim");
        } else if !pool.is_registered(block) {
            assert_eq!(pool.ref_count(block), Some(1), "draft KV written to private block {block} of others");
        }
        self.draft_kv[slot] = content;
    }

    /// Checks that queries at positions `first` and above read, before `end`, the target KV of exactly this row's
    /// tokens.
    fn check_target(&self, row_index: usize, first: usize, end: usize) {
        let row = &self.rows[row_index];
        for group in 0..self.config.num_groups() {
            for position in self.read_from(group, first)..end {
                let found = self.target_kv[self.slot_in(group, row, position)];
                let right = in_group(group, row.prefix[position]);
                assert_eq!(found, right, "target KV of position {position}, group {group}, request {}", row.request_id);
            }
        }
    }

    fn window(&self, group: usize) -> Option<usize> {
        if group == 0 { self.config.sliding_window } else { Some(self.config.window_groups[group - 1]) }
    }

    /// Returns the first position that a query at `position` reads.
    fn read_from(&self, group: usize, position: usize) -> usize {
        self.window(group).map_or(0, |window| (position + 1).saturating_sub(window))
    }

    fn check_draft(&self, row_index: usize, first: usize, end: usize) {
        let row = &self.rows[row_index];
        for position in self.read_from(0, first).max(row.k_start)..if row.draft_fault { 0 } else { end } {
            let found = self.draft_kv[self.slot(row, position)];
            assert_eq!(found, row.prefix[position], "draft KV of position {position}, request {}", row.request_id);
        }
    }
}
