//! Simple, slow device: the KV of a position *is* the list of tokens up to it, and every read compares lists.
//!
//! It is written from the record's description alone. It looks up sections by name, as the Python side does, and shares
//! no code with the other simulated device of these tests. It panics where a real device would compute something else
//! than for the sequence alone.

use specrs_core::sampling::MAX_STOP_IDS;
use specrs_core::scheduler::layout::{FINISH_LENGTH, FINISH_NONE, FINISH_STOP, HEADER_FIELDS, HEADER_USED_LEN};
use specrs_core::{Drafter, DrafterKind, NgramProposer, Scheduler};
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet, HashMap};

pub(crate) const VOCAB: i64 = 11;

/// Sampling parameters of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Sampling {
    pub(crate) prompt_len: usize,
    pub(crate) min_tokens: usize,
    pub(crate) stop: Vec<i64>,
    /// Number of a cache salt and adapter: requests share KV only with an equal number.
    pub(crate) tenant: u8,
}

/// Returns the target's token after `prefix`, a function of all its tokens. Stop ids are masked before `min_tokens`.
pub(crate) fn target_next(prefix: &[i64], sampling: &Sampling) -> i64 {
    let mixed = prefix
        .iter()
        .fold(17_u64, |sum, &token| (sum ^ (token as u64 + 3)).wrapping_mul(0x9E37_79B9_7F4A_7C15).rotate_left(23));
    let masked = prefix.len() - sampling.prompt_len < sampling.min_tokens;
    (0..VOCAB as u64)
        .map(|i| ((mixed >> 20) + i) as i64 % VOCAB)
        .find(|token| !(masked && sampling.stop.contains(token)))
        .expect("a token that is not masked")
}

/// Returns the draft's guess of the target's token, right after two of three prefixes.
fn draft_next(prefix: &[i64], sampling: &Sampling) -> i64 {
    let right = target_next(prefix, sampling);
    let sum: i64 = prefix.iter().enumerate().map(|(i, token)| (i as i64 + 2) * (token + 1)).sum();
    if sum % 3 == 0 { (right + 1) % VOCAB } else { right }
}

/// Returns the drafts by the definition of prompt lookup: the longest n-gram first, places from the right, copying onto
/// the end.
fn lookup(tokens: &[i64], min: usize, max: usize, k: usize) -> Vec<i64> {
    let mut text = tokens.to_vec();
    for n in (min..=max).rev() {
        let Some(first) = tokens.len().checked_sub(n) else { continue };
        if let Some(place) = (0..first).rev().find(|&place| tokens[place..place + n] == tokens[first..]) {
            for i in place + n..place + n + k {
                text.push(text[i]);
            }
            break;
        }
    }
    text.split_off(tokens.len())
}

/// Returns the output of a request that runs alone.
pub(crate) fn lone_text(prompt: &[i64], limit: usize, sampling: &Sampling) -> Vec<i64> {
    let mut tokens = prompt.to_vec();
    while tokens.len() < limit {
        let token = target_next(&tokens, sampling);
        tokens.push(token);
        if tokens.len() - prompt.len() > sampling.min_tokens && sampling.stop.contains(&token) {
            break;
        }
    }
    tokens.split_off(prompt.len())
}

#[derive(Clone, Debug, Default)]
struct Row {
    request_id: i64,
    active: bool,
    tokens: Vec<i64>,
    draft_len: usize,
    /// Start of the KV of a drafter that reads hidden states.
    draft_start: usize,
    /// First hidden state that is kept for a drafter that reads hidden states.
    hidden_start: usize,
    /// First position whose KV a drafter reads that does not read hidden states.
    k_start: usize,
    limit: usize,
    capacity: usize,
    /// Block table of the row by group and index.
    table: HashMap<(usize, usize), usize>,
    /// Blocks that the row holds according to the scheduler, by group. Other entries of `table` name blocks of other
    /// rows.
    held: Vec<Vec<i64>>,
    /// Whether a fault ended the row.
    broken: bool,
    /// Whether the row's draft KV contains NaN; only this row may read it.
    draft_poisoned: bool,
    /// Tokens that the row's state has seen, all of them committed.
    state: Vec<i64>,
}

/// Results of one sequence.
#[derive(Clone, Debug, Default)]
pub(crate) struct Outcome {
    pub(crate) tokens: Vec<i64>,
    pub(crate) accepted: usize,
    pub(crate) drafted: usize,
    pub(crate) flags: i64,
    pub(crate) finish_reason: i64,
}

/// KV by slot: the group, the tenant, and the tokens up to the position written there. `None` was never written or is
/// NaN. Neither tenants nor groups ever share KV.
type Kv = Vec<Option<(usize, u8, Vec<i64>)>>;

/// Snapshots by slot: the tenant, and the tokens that the state has seen. `None` was never written or is NaN.
type States = Vec<Option<(u8, Vec<i64>)>>;

pub(crate) struct Device {
    block_size: usize,
    max_draft_lag: usize,
    /// Number of last positions that a query reads, by group.
    windows: Vec<usize>,
    /// Blocks that the step read or wrote.
    touched: RefCell<BTreeSet<i64>>,
    /// Token that one pass for all drafts feeds in their place.
    mask: Option<i64>,
    /// Whether the drafter reads hidden states.
    from_hidden: bool,
    /// Whether the drafter reads the target's KV, and has none.
    shares_kv: bool,
    draft_context: Option<usize>,
    /// n-gram lengths of a drafter on the host.
    ngrams: Option<(usize, usize)>,
    width: usize,
    rows: Vec<Row>,
    /// Row that each request was given last.
    row_of: HashMap<i64, usize>,
    target_kv: Kv,
    draft_kv: Kv,
    snapshots: States,
    /// Row, length and slot of the snapshots that the step may write.
    to_write: Vec<(usize, usize, usize)>,
    pub(crate) sampling: BTreeMap<i64, Sampling>,
    /// Flags to raise in the next step of a request.
    pub(crate) faults: BTreeMap<i64, i64>,
}

/// Sections of a record by name.
pub(crate) struct Record<'a> {
    data: &'a [i64],
    sections: HashMap<&'static str, (usize, usize)>,
}

impl<'a> Record<'a> {
    pub(crate) fn new(scheduler: &Scheduler, data: &'a [i64]) -> Self {
        let sections = scheduler.record_layout().sections();
        Self { data, sections: sections.into_iter().map(|(name, s)| (name, (s.offset, s.len))).collect() }
    }

    pub(crate) fn get(&self, name: &str, i: usize) -> i64 {
        let (offset, len) = self.sections[name];
        assert!(i < len, "{name}[{i}] of {len}");
        let used = self.data[HEADER_USED_LEN];
        assert!(((offset + i) as i64) < used, "{name}[{i}] is read, and used_len = {used}");
        self.data[offset + i]
    }

    pub(crate) fn size(&self, name: &str, i: usize) -> usize {
        let value = self.get(name, i);
        usize::try_from(value).unwrap_or_else(|_| panic!("{name}[{i}] = {value}"))
    }

    /// Returns an element of the header by name.
    pub(crate) fn count(&self, name: &str) -> usize {
        let at = HEADER_FIELDS.iter().position(|&field| field == name).expect("a field of the header");
        self.size("header", at)
    }

    pub(crate) fn num_decode(&self) -> usize {
        self.count("num_decode")
    }

    pub(crate) fn num_seqs(&self) -> usize {
        self.num_decode() + self.count("num_prefill")
    }
}

impl Device {
    pub(crate) fn new(scheduler: &Scheduler) -> Self {
        let config = scheduler.config();
        let slots = config.num_blocks * config.block_size;
        let sizes = |proposer: NgramProposer| (proposer.prompt_lookup_min(), proposer.prompt_lookup_max());
        let ngrams = config.host_drafters.ngram.map(sizes);
        let (max_draft_lag, mask, draft_context) = match config.drafter {
            Drafter::Cached { max_model_len, max_draft_lag, mask_token_id, .. } => {
                (max_draft_lag, mask_token_id, Some(max_model_len))
            }
            Drafter::Hidden { max_model_len, max_draft_lag, .. } => (max_draft_lag, None, Some(max_model_len)),
            Drafter::SharedKv { max_model_len } => (0, None, Some(max_model_len)),
            _ => (0, None, None),
        };
        Self {
            block_size: config.block_size,
            max_draft_lag,
            windows: [&[config.sliding_window.unwrap_or(usize::MAX)], &config.window_groups[..]].concat(),
            touched: RefCell::default(),
            mask,
            from_hidden: matches!(config.drafter, Drafter::Hidden { .. }),
            shares_kv: matches!(config.drafter, Drafter::SharedKv { .. }),
            draft_context,
            ngrams,
            width: config.num_speculative_tokens,
            rows: vec![Row::default(); config.max_num_seqs],
            row_of: HashMap::new(),
            target_kv: vec![None; slots],
            draft_kv: vec![None; slots],
            snapshots: vec![None; config.num_snapshots],
            to_write: vec![],
            sampling: BTreeMap::new(),
            faults: BTreeMap::new(),
        }
    }

    pub(crate) fn request_of(&self, row: usize) -> i64 {
        self.rows[row].request_id
    }

    /// Loses the draft KV of a running request, also in blocks shared with others: reading it before it is written
    /// again panics. Blocks that another row has claimed are left unchanged.
    pub(crate) fn lose_draft(&mut self, scheduler: &Scheduler, request_id: i64) {
        let Some(&row) = self.row_of.get(&request_id) else { return };
        let table = scheduler.request(request_id).map_or(&[][..], |request| request.block_table);
        for &block in table.iter().filter(|&&block| block >= 0) {
            let claimant = scheduler.block_pool().claimant(block);
            if claimant.is_none_or(|claimant| claimant as usize == row) {
                self.draft_kv[block as usize * self.block_size..][..self.block_size].fill(None);
            }
        }
    }

    /// Checks the draft KV that other requests may read, if the drafter reads hidden states. It must come from the
    /// target's hidden states, not from the head's own, and its context must begin at the start of the text. For other
    /// drafters, checks nothing. It judges by the device's state, not the scheduler's.
    pub(crate) fn check_marks(&self, scheduler: &Scheduler) {
        let marked = |slot: &usize| scheduler.block_pool().has_draft((slot / self.block_size) as i64);
        for slot in (0..self.draft_kv.len()).filter(marked).filter(|_| self.from_hidden) {
            let (_, _, content) = self.draft_kv[slot].as_ref().expect("draft KV of a block with `draft_valid`");
            assert_eq!(content.last(), Some(&-1), "draft KV of slot {slot}: {content:?}");
        }
    }

    /// Returns whether a row that wants `k` drafts would draft any if its draft KV were complete.
    pub(crate) fn could_draft(&self, row: usize, k: usize) -> bool {
        let Row { ref tokens, limit, active, draft_poisoned, .. } = self.rows[row];
        k > 0 && active && !draft_poisoned && tokens.len() + 1 < limit && self.draft_context >= Some(tokens.len())
    }

    pub(crate) fn limit_of(&self, row: usize) -> usize {
        self.rows[row].limit
    }

    /// Executes one step: uploads, prefill chunks, draft chunks, the decode iteration.
    pub(crate) fn execute(&mut self, scheduler: &Scheduler, record: &Record<'_>) -> Vec<Outcome> {
        self.upload(record);
        self.to_write = (0..record.count("num_snapshots"))
            .map(|i| {
                let of = |name| record.size(name, i);
                (of("snapshot_row"), of("snapshot_len"), of("snapshot_slot"))
            })
            .collect();
        self.touched.take();
        self.forget(scheduler);
        for sequence in 0..record.num_seqs() {
            let row = &mut self.rows[record.size("seq_row", sequence)];
            row.capacity = record.size("seq_capacity", sequence);
            let n_upper = record.size("seq_n_upper", sequence);
            assert!(row.tokens.len() <= n_upper, "n = {} above n_upper = {n_upper}", row.tokens.len());
        }
        let mut outcomes = vec![Outcome::default(); record.num_seqs()];
        for j in 0..record.count("num_prefill") {
            outcomes[record.num_decode() + j] = self.prefill(scheduler, record, j);
        }
        let mut writers = HashMap::new();
        for j in 0..record.count("num_draft_chunks") {
            if self.from_hidden {
                self.feed_chunk(scheduler, record, j, &mut writers);
            } else {
                self.catch_up(scheduler, record, j, &mut writers);
            }
        }
        for (sequence, outcome) in outcomes.iter_mut().enumerate().take(record.num_decode()) {
            let (row, k) = (record.size("seq_row", sequence), record.size("seq_k", sequence));
            let drafter = record.size("seq_drafter", sequence);
            let drafts = || (0..k).map(|i| record.get("draft_token", sequence * self.width + i)).collect::<Vec<_>>();
            let proposed = (drafter != DrafterKind::Device as usize).then(drafts);
            if let (Some(proposed), Some((min, max)), true) =
                (&proposed, self.ngrams, drafter == DrafterKind::Ngram as usize)
            {
                let tokens = &self.rows[row].tokens;
                assert!(!self.rows[row].active || *proposed == lookup(tokens, min, max, k), "what the text proposes");
            }
            *outcome = self.decode(scheduler, row, k, proposed, &mut writers);
        }
        outcomes
    }

    fn upload(&mut self, record: &Record<'_>) {
        let mut token = 0;
        for i in 0..record.count("num_admitted") {
            let len = record.size("admit_num_tokens", i);
            let (id, prompt_len) = (record.get("admit_request_id", i), record.size("admit_prompt_len", i));
            let stop = (i * MAX_STOP_IDS..).map(|at| record.get("admit_stop_ids", at));
            let told = Sampling {
                prompt_len,
                min_tokens: record.size("admit_min_len", i) - prompt_len,
                stop: stop.take(MAX_STOP_IDS).take_while(|&id| id >= 0).collect(),
                tenant: self.sampling[&id].tenant,
            };
            assert_eq!(self.sampling[&id], told, "what the record says of request {id}");
            let row = record.size("admit_row", i);
            self.row_of.insert(id, row);
            self.rows[row] = Row {
                request_id: id,
                active: true,
                tokens: (token..token + len).map(|at| record.get("upload_token", at)).collect(),
                draft_len: record.size("admit_draft_len", i),
                limit: record.size("admit_limit", i),
                ..Row::default()
            };
            self.restore(record, i, row);
            token += len;
        }
        assert_eq!(token, record.count("num_upload_tokens"));
        for i in 0..record.count("num_block_updates") {
            let row = &mut self.rows[record.size("block_row", i)];
            let group = if self.windows.len() > 1 { record.size("block_group", i) } else { 0 };
            row.table.insert((group, record.size("block_index", i)), record.size("block_id", i));
        }
    }

    /// Gives a newly admitted row the state that it begins with.
    fn restore(&mut self, record: &Record<'_>, index: usize, row: usize) {
        let cached = record.size("admit_num_cached", index);
        if self.snapshots.is_empty() {
            return;
        }
        let slot = record.get("admit_snapshot", index);
        assert_eq!(slot >= 0, cached > 0, "a row begins with a state if it does not begin at 0");
        if slot >= 0 {
            let (tenant, tokens) = self.snapshots[slot as usize].clone().expect("a snapshot that was written");
            let own = &self.rows[row];
            assert_eq!(tenant, self.sampling[&own.request_id].tenant);
            assert_eq!(tokens, own.tokens[..cached], "snapshot in slot {slot} for request {}", own.request_id);
            self.rows[row].state = tokens;
        }
    }

    /// Feeds a row's state the committed `tokens` from its last one on, and writes the snapshots that it passes.
    fn feed_state(&mut self, row: usize, start: usize, tokens: &[i64]) {
        if self.snapshots.is_empty() {
            return;
        }
        let own = &mut self.rows[row];
        let seen = own.state.len();
        assert!(seen <= start, "{seen} of the {start} tokens before the next");
        assert_eq!(own.state, tokens[..seen]);
        own.state = tokens.to_vec();
        let tenant = self.sampling[&own.request_id].tenant;
        for &(of, len, slot) in &self.to_write {
            if of == row && seen < len && len <= tokens.len() {
                self.snapshots[slot] = Some((tenant, tokens[..len].to_vec()));
            }
        }
    }

    /// Returns the blocks that the step read or wrote.
    pub(crate) fn touched(&self) -> BTreeSet<i64> {
        self.touched.borrow().clone()
    }

    /// Overwrites KV that no row holds and no request can find, and updates the blocks that each row may use.
    fn forget(&mut self, scheduler: &Scheduler) {
        let pool = scheduler.block_pool();
        for block in (0..pool.num_blocks()).filter(|&block| pool.ref_count(block as i64) == Some(0)) {
            let slots = block * self.block_size..(block + 1) * self.block_size;
            if !pool.is_registered(block as i64) {
                self.target_kv[slots.clone()].fill(None);
            }
            if !pool.has_draft(block as i64) {
                self.draft_kv[slots].fill(None);
            }
        }
        for (index, row) in self.rows.iter_mut().enumerate() {
            // One that ended on the device has its part in steps until the scheduler knows.
            if let Some(request) = scheduler.request(row.request_id).ok().filter(|request| request.row == Some(index)) {
                assert_eq!(request.block_table, scheduler.group_block_table(row.request_id, 0).expect("live"));
                let held = |group| scheduler.group_block_table(row.request_id, group).expect("live").to_vec();
                row.held = (0..self.windows.len()).map(held).collect();
            }
        }
    }

    /// Returns the slot of a position in the first group, which contains the draft's KV.
    fn slot(&self, row: usize, position: usize) -> usize {
        self.slot_in(0, row, position)
    }

    fn slot_in(&self, group: usize, row: usize, position: usize) -> usize {
        let row = &self.rows[row];
        assert!(position < row.capacity, "position {position} of request {}: {}", row.request_id, row.capacity);
        let index = position / self.block_size;
        let block = *row.table.get(&(group, index)).expect("a block that the device was told of");
        let held = row.held[group].get(index);
        assert_eq!(held, Some(&(block as i64)), "position {position} of request {} is another's", row.request_id);
        self.touched.borrow_mut().insert(block as i64);
        block * self.block_size + position % self.block_size
    }

    /// Checks that queries at the positions of `tokens` from `first` on read the KV of their windows in a group, from
    /// position `start` on.
    fn read(&self, kv: &Kv, group: usize, row: usize, tokens: &[i64], (first, start): (usize, usize)) {
        for position in (first + 1).saturating_sub(self.windows[group]).max(start)..tokens.len() {
            let found = &kv[self.slot_in(group, row, position)];
            let found = found.as_ref().map(|(group, tenant, tokens)| (*group, *tenant, tokens.as_slice()));
            let id = self.rows[row].request_id;
            let right = (group, self.sampling[&id].tenant, &tokens[..=position]);
            assert_eq!(found, Some(right), "KV of request {id} at {position} in group {group}");
        }
    }

    fn read_draft(&self, row: usize, tokens: &[i64], range: (usize, usize)) {
        self.read(&self.draft_kv, 0, row, tokens, range);
    }

    fn read_target(&self, row: usize, tokens: &[i64], first: usize) {
        for group in 0..self.windows.len() {
            self.read(&self.target_kv, group, row, tokens, (first, 0));
        }
    }

    fn write_target(&mut self, scheduler: &Scheduler, row: usize, tokens: &[i64]) {
        for group in 0..self.windows.len() {
            let slot = self.slot_in(group, row, tokens.len() - 1);
            let block = (slot / self.block_size) as i64;
            let holders = scheduler.block_pool().ref_count(block);
            assert!(holders <= Some(1), "target KV written to block {block} of {holders:?} holders");
            self.target_kv[slot] = Some((group, self.sampling[&self.rows[row].request_id].tenant, tokens.to_vec()));
        }
    }

    /// Writes draft KV. Two requests must not write one block in one step, and none may write a block that others
    /// read, because these accesses race on a GPU.
    fn write_draft(&mut self, scheduler: &Scheduler, row: usize, tokens: &[i64], writers: &mut HashMap<usize, usize>) {
        let slot = self.slot(row, tokens.len() - 1);
        let block = slot / self.block_size;
        let writer = *writers.entry(block).or_insert(row);
        assert_eq!(writer, row, "rows {writer} and {row} both write draft KV of block {block}");
        assert!(!scheduler.block_pool().has_draft(block as i64), "draft KV of block {block} is written again");
        self.draft_kv[slot] = Some((0, self.sampling[&self.rows[row].request_id].tenant, tokens.to_vec()));
    }

    fn prefill(&mut self, scheduler: &Scheduler, record: &Record<'_>, j: usize) -> Outcome {
        let row = record.size("seq_row", record.num_decode() + j);
        let (start, len) = (record.size("chunk_start", j), record.size("chunk_len", j));
        let (from, to) = (record.size("prefill_q_start", j), record.size("prefill_q_start", j + 1));
        assert!(len > 0 && to - from == len);
        if !self.rows[row].active {
            return Outcome::default();
        }
        let tokens = self.rows[row].tokens.clone();
        for (i, position) in (start..start + len).enumerate() {
            assert_eq!(record.size("prefill_position", from + i), position);
            assert_eq!(record.get("prefill_token", from + i), tokens[position]);
            for group in 0..self.windows.len() {
                let at = group * scheduler.config().max_num_batched_tokens + from + i;
                assert_eq!(record.size("prefill_slot", at), self.slot_in(group, row, position), "group {group}");
            }
            self.write_target(scheduler, row, &tokens[..=position]);
        }
        assert!(self.snapshots.is_empty() || self.rows[row].state.len() == start, "the state is another position's");
        self.feed_state(row, start, &tokens[..start + len]);
        self.read_target(row, &tokens[..start + len], start);
        if let Some(fatal) = self.fatal(row, start, start + len) {
            return fatal;
        }
        if record.get("chunk_is_last", j) == 0 {
            assert!(start + len < tokens.len());
            return Outcome::default();
        }
        assert_eq!(start + len, tokens.len(), "the last chunk ends the prompt");
        self.rows[row].hidden_start = tokens.len() - 1;
        let first = target_next(&tokens, &self.sampling[&self.rows[row].request_id]);
        let (_, finish_reason) = self.emit(row, &[first]);
        Outcome { tokens: vec![first], finish_reason, ..Outcome::default() }
    }

    fn catch_up(&mut self, scheduler: &Scheduler, record: &Record<'_>, j: usize, writers: &mut HashMap<usize, usize>) {
        let row = record.size("draft_chunk_row", j);
        let (start, len) = (record.size("draft_chunk_start", j), record.size("draft_chunk_len", j));
        let (from, to) = (record.size("draft_q_start", j), record.size("draft_q_start", j + 1));
        assert_eq!(to - from, len);
        // A row that has ended in an earlier step may lack the tokens of its chunk: then it computes nonsense.
        let (tokens, active) = (self.rows[row].tokens.clone(), self.rows[row].active);
        let faulty = self.faults.get(&self.rows[row].request_id) == Some(&2);
        assert!(self.draft_context >= Some(start + len), "draft chunk to {} of {:?}", start + len, self.draft_context);
        for (i, position) in (start..start + len).enumerate() {
            assert_eq!(record.size("draft_position", from + i), position);
            let slot = record.get("draft_slot", from + i);
            if slot >= 0 {
                assert_eq!(slot as usize, self.slot(row, position));
                if active {
                    self.write_draft(scheduler, row, &tokens[..=position], writers);
                }
                if !active || faulty {
                    self.draft_kv[slot as usize] = None;
                }
            }
        }
        let k_start = record.size("draft_chunk_k_start", j);
        assert!(k_start >= self.rows[row].k_start && k_start <= start, "queries from {k_start} on, chunk at {start}");
        self.rows[row].k_start = k_start;
        // The fault shows only in logits: those of the row's next drafting.
        self.rows[row].draft_poisoned |= faulty;
        if active && !self.rows[row].draft_poisoned {
            self.read_draft(row, &tokens[..start + len], (start, k_start));
        }
        self.rows[row].draft_len = start + len;
    }

    /// Returns the simulated KV of an EAGLE-3 or MTP head at `position`: 0, the tenant, and what the KV depends on.
    /// These are the tokens up to `position + 1`, the start of the head's context, and a mark for hidden states of the
    /// head itself.
    fn hidden_kv(&self, row: usize, tokens: &[i64], position: usize, recurrent: bool) -> (usize, u8, Vec<i64>) {
        let Row { draft_start, request_id, .. } = self.rows[row];
        let mut content = tokens[..=position + 1].to_vec();
        content.push(-(draft_start as i64) - 1);
        if recurrent {
            content.push(i64::MIN);
        }
        (0, self.sampling[&request_id].tenant, content)
    }

    fn write_hidden(
        &mut self,
        scheduler: &Scheduler,
        row: usize,
        tokens: &[i64],
        (position, recurrent): (usize, bool),
        writers: &mut HashMap<usize, usize>,
    ) {
        let content = self.hidden_kv(row, tokens, position, recurrent);
        let claimant = scheduler.block_pool().claimant((self.slot(row, position) / self.block_size) as i64);
        assert!(claimant.is_none_or(|claimant| claimant as usize == row), "row {claimant:?} writes there, not {row}");
        self.write_draft(scheduler, row, &tokens[..=position], writers);
        let slot = self.slot(row, position);
        self.draft_kv[slot] = Some(content);
    }

    /// Checks that queries at positions `first` to `end - 1` read KV of true hidden states from the row's start on, and
    /// recurrent KV from `first_recurrent` on.
    fn read_hidden(&self, row: usize, tokens: &[i64], first_recurrent: usize, (first, end): (usize, usize)) {
        if self.rows[row].draft_poisoned {
            return;
        }
        for position in (first + 1).saturating_sub(self.windows[0]).max(self.rows[row].draft_start)..end {
            let right = self.hidden_kv(row, tokens, position, position >= first_recurrent);
            let found = &self.draft_kv[self.slot(row, position)];
            assert_eq!(found.as_ref(), Some(&right), "KV of request {} at {position}", self.rows[row].request_id);
        }
    }

    /// Feeds the head the hidden states of a prompt chunk, or executes an order to start anew.
    fn feed_chunk(
        &mut self,
        scheduler: &Scheduler,
        record: &Record<'_>,
        j: usize,
        writers: &mut HashMap<usize, usize>,
    ) {
        let row = record.size("draft_chunk_row", j);
        let (start, len) = (record.size("draft_chunk_start", j), record.size("draft_chunk_len", j));
        let (from, to) = (record.size("draft_q_start", j), record.size("draft_q_start", j + 1));
        assert_eq!(to - from, len);
        if len == 0 {
            assert_eq!(start, 0);
            (self.rows[row].draft_start, self.rows[row].draft_len) = (0, 0);
            return;
        }
        let num_decode = record.num_decode();
        let chunk = (0..record.count("num_prefill"))
            .find(|&chunk| record.size("seq_row", num_decode + chunk) == row)
            .expect("hidden states of this step");
        assert_eq!(record.size("chunk_start", chunk), start);
        assert!(len <= record.size("chunk_len", chunk));
        assert!(self.draft_context >= Some(start + len));
        // A row may have ended with its first token, and its KV is right for others.
        let (tokens, sound) = (self.rows[row].tokens.clone(), !self.rows[row].broken);
        if self.rows[row].draft_len < start {
            self.rows[row].draft_start = start;
        }
        for (i, position) in (start..start + len).enumerate() {
            assert_eq!(record.size("draft_position", from + i), position);
            assert_eq!(record.size("draft_slot", from + i), self.slot(row, position));
            if sound {
                self.write_hidden(scheduler, row, &tokens, (position, false), writers);
            } else {
                let slot = self.slot(row, position);
                self.draft_kv[slot] = None;
            }
        }
        if sound {
            self.read_hidden(row, &tokens, usize::MAX, (start, start + len));
        }
        self.rows[row].draft_len = start + len;
    }

    /// Appends `k` drafts of a head to `tokens`.
    fn draft_from_hidden(
        &mut self,
        scheduler: &Scheduler,
        row: usize,
        tokens: &mut Vec<i64>,
        k: usize,
        writers: &mut HashMap<usize, usize>,
    ) {
        let (n, sampling) = (tokens.len(), self.sampling[&self.rows[row].request_id].clone());
        let Row { draft_len, hidden_start, .. } = self.rows[row];
        assert!(n - hidden_start <= self.max_draft_lag, "hidden states from {hidden_start} at {n}");
        if draft_len < hidden_start {
            self.rows[row].draft_start = hidden_start;
        }
        assert!(draft_len.max(hidden_start) < n - 1, "the first pass has a row");
        for position in draft_len.max(hidden_start)..n - 1 {
            self.write_hidden(scheduler, row, tokens, (position, false), writers);
        }
        for i in 0..k {
            if i > 0 {
                self.write_hidden(scheduler, row, tokens, (n - 2 + i, true), writers);
            }
            let first = if i == 0 { draft_len.max(hidden_start) } else { n - 2 + i };
            self.read_hidden(row, tokens, n - 1, (first, n - 1 + i));
            tokens.push(draft_next(tokens, &sampling));
        }
    }

    fn decode(
        &mut self,
        scheduler: &Scheduler,
        row: usize,
        k: usize,
        proposed: Option<Vec<i64>>,
        writers: &mut HashMap<usize, usize>,
    ) -> Outcome {
        if !self.rows[row].active {
            return Outcome::default();
        }
        let mut tokens = self.rows[row].tokens.clone();
        let (n, limit) = (tokens.len(), self.rows[row].limit);
        let sampling = self.sampling[&self.rows[row].request_id].clone();
        let on_device = proposed.is_none();
        assert!(on_device || k < limit - n, "{k} drafts at {n} of {limit}");
        let context = match proposed {
            Some(_) => usize::MAX,
            None => self.draft_context.map_or(0, |context| (context + 1).saturating_sub(n)),
        };
        let k = k.min(limit - n - 1).min(context);

        if let Some(proposed) = proposed {
            tokens.extend(proposed);
        } else if k > 0 && self.from_hidden {
            self.draft_from_hidden(scheduler, row, &mut tokens, k, writers);
        } else if k > 0 && self.shares_kv {
            assert_eq!(self.rows[row].hidden_start, n - 2, "the hidden state of {} is needed", n - 2);
            for group in 0..self.windows.len() {
                // From n - 2, one position more than a window of the target.
                self.read(&self.target_kv, group, row, &tokens[..n - 1], (n.saturating_sub(3), 0));
            }
            for _ in 0..k {
                tokens.push(draft_next(&tokens, &sampling));
            }
        } else if k > 0 {
            let draft_len = self.rows[row].draft_len;
            assert!(draft_len + self.max_draft_lag >= n, "draft_len {draft_len} at n = {n}");
            let k_start = self.rows[row].k_start;
            let whole = n.saturating_sub(self.max_draft_lag) + 1;
            assert!(k_start <= whole.saturating_sub(self.windows[0]), "drafts at {n} see KV from {k_start} on only");
            // The first pass feeds the last max_draft_lag positions and writes those that the draft does not have yet.
            for position in draft_len..n {
                self.write_draft(scheduler, row, &tokens[..=position], writers);
            }
            let mut fed = tokens.clone();
            for i in 0..k {
                if i > 0 {
                    self.write_draft(scheduler, row, &fed, writers);
                }
                if !self.rows[row].draft_poisoned {
                    let first = if i == 0 { draft_len } else { n - 1 + i };
                    self.read_draft(row, &fed, (first, k_start));
                }
                tokens.push(draft_next(&tokens, &sampling));
                fed.push(self.mask.unwrap_or(tokens[n + i]));
            }
        }
        let drafted_flags = self.draft_fault(row, if on_device { k } else { 0 }, n);
        for end in n..=tokens.len() {
            self.write_target(scheduler, row, &tokens[..end]);
        }
        self.feed_state(row, n - 1, &tokens[..n]);
        self.read_target(row, &tokens, n - 1);
        if let Some(fatal) = self.fatal(row, n - 1, tokens.len()) {
            return fatal;
        }
        let agrees = |i: &usize| target_next(&tokens[..n + i], &sampling) == tokens[n + i];
        let accepted = (0..k).take_while(agrees).count();
        let mut emitted = tokens[n..n + accepted].to_vec();
        emitted.push(target_next(&tokens[..n + accepted], &sampling));
        let (kept, finish_reason) = self.emit(row, &emitted);
        emitted.truncate(kept);
        if self.from_hidden {
            let grown = self.rows[row].tokens.len();
            let drafted = k > 0 && on_device;
            if drafted {
                self.rows[row].draft_len = n - 1;
            }
            // Those that were fed are needed no more; they give way, too, to new ones that do not fit behind them.
            if drafted || grown - self.rows[row].hidden_start > self.max_draft_lag {
                self.rows[row].hidden_start = n - 1;
            }
        } else if self.shares_kv {
            self.rows[row].hidden_start = self.rows[row].tokens.len() - 2;
        } else if k > 0 && on_device {
            // min(n' - 1, n + K - 1), n' being the new number of tokens, stop tokens considered; n where no draft was
            // fed.
            let fed = if self.mask.is_some() { n } else { n + k - 1 };
            self.rows[row].draft_len = (self.rows[row].tokens.len() - 1).min(fed);
        }
        Outcome { tokens: emitted, accepted, drafted: k, flags: drafted_flags, finish_reason }
    }

    /// Appends tokens until a stop token or the limit. Returns how many were taken, and why the row ended.
    fn emit(&mut self, row: usize, emitted: &[i64]) -> (usize, i64) {
        let row = &mut self.rows[row];
        let sampling = &self.sampling[&row.request_id];
        for (i, &token) in emitted.iter().enumerate() {
            row.tokens.push(token);
            let outputs = row.tokens.len() - sampling.prompt_len;
            let stops = outputs > sampling.min_tokens && sampling.stop.contains(&token);
            if stops || row.tokens.len() == row.limit {
                row.active = false;
                return (i + 1, if stops { FINISH_STOP } else { FINISH_LENGTH });
            }
        }
        (emitted.len(), FINISH_NONE)
    }

    /// Applies the target or capacity fault that the test planned for the row's request, if there is one: the row ends,
    /// and the KV that it just wrote becomes NaN.
    fn fatal(&mut self, row: usize, start: usize, end: usize) -> Option<Outcome> {
        let request_id = self.rows[row].request_id;
        let flags = *self.faults.get(&request_id).filter(|&&flags| flags & 5 != 0)?;
        self.faults.remove(&request_id);
        self.rows[row].active = false;
        self.rows[row].broken = true;
        for &(_, _, slot) in self.to_write.iter().filter(|&&(of, ..)| of == row) {
            self.snapshots[slot] = None;
        }
        for position in start..end {
            for group in 0..self.windows.len() {
                let slot = self.slot_in(group, row, position);
                self.target_kv[slot] = None;
            }
        }
        Some(Outcome { flags, ..Outcome::default() })
    }

    /// Applies the request's draft fault, if one is due and it drafted: the KV that the draft just wrote becomes NaN.
    fn draft_fault(&mut self, row: usize, k: usize, n: usize) -> i64 {
        let request_id = self.rows[row].request_id;
        if k == 0 || self.faults.get(&request_id) != Some(&2) {
            return 0;
        }
        self.faults.remove(&request_id);
        self.rows[row].draft_poisoned = true;
        for position in self.rows[row].draft_len.max(self.rows[row].hidden_start)..n + k - 1 {
            let slot = self.slot(row, position);
            self.draft_kv[slot] = None;
        }
        2
    }
}
