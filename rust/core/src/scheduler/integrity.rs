//! Check that a scheduler's state agrees with itself and with its pool.

use super::Scheduler;
use super::row::{NO_BLOCK, Row, RowState};
use crate::error::{Error, Result};

macro_rules! ensure {
    ($condition:expr, $($message:tt)*) => {
        if !$condition {
            return Err(Error::integrity(format!($($message)*)));
        }
    };
}

impl Scheduler {
    /// Checks that requests, rows, steps, block references, claims and the prefix cache agree. O(blocks + running
    /// tokens): for tests, and when the engine idles.
    ///
    /// # Errors
    /// [`Error::Integrity`] naming the first contradiction.
    pub fn check_integrity(&self) -> Result<()> {
        self.pool.check_integrity()?;
        self.check_requests()?;
        self.check_rows()?;
        self.check_steps()?;
        self.check_blocks()?;
        self.check_snapshots()
    }

    fn check_requests(&self) -> Result<()> {
        let live = self.requests.iter().count();
        ensure!(live == self.by_id.len(), "{live} requests, but {} ids", self.by_id.len());
        let placed = self.waiting.len() + self.running.len();
        ensure!(live == placed, "{live} requests, but {placed} waiting or running");
        let callers = self.requests.iter().filter(|(_, request)| request.caller.is_some()).count();
        ensure!(callers == self.num_with_caller, "{callers} requests with a caller, not {}", self.num_with_caller);
        for (index, request) in self.requests.iter() {
            let id = request.id;
            ensure!(self.by_id.get(&id) == Some(&index), "request {id} is not found by its id");
            let (n, limit) = (request.tokens.len(), request.limit);
            ensure!(n < limit, "request {id} lives on with {n} tokens at limit {limit}");
            match request.row {
                None => ensure!(self.waiting.get(&request.order) == Some(&index), "request {id} does not wait"),
                Some(row) => {
                    let lease = &self.rows[row as usize];
                    let runs = lease.state == RowState::Live && lease.request == index && self.running.contains(&row);
                    ensure!(runs, "request {id} does not run on row {row}");
                }
            }
        }
        let (loras, most) = (self.num_running_loras(), self.config.max_loras);
        ensure!(loras <= most, "requests of {loras} adapters run, at most {most} may");
        let order = |row: u32| self.requests[self.rows[row as usize].request].order;
        for pair in self.running.windows(2) {
            ensure!(order(pair[0]) < order(pair[1]), "rows {pair:?} run in the wrong order");
        }
        Ok(())
    }

    fn check_rows(&self) -> Result<()> {
        let count = |state| self.rows.iter().filter(|row| row.state == state).count();
        let (free, live) = (count(RowState::Free), count(RowState::Live));
        ensure!(free == self.free_rows.len(), "{free} free rows, but {} listed", self.free_rows.len());
        ensure!(live == self.running.len(), "{live} live rows, but {} running", self.running.len());
        for &row in &self.free_rows {
            let listed = self.free_rows.iter().filter(|&&other| other == row).count();
            ensure!(
                self.rows[row as usize].state == RowState::Free && listed == 1,
                "row {row} is wrongly listed as free"
            );
        }
        for (index, row) in self.rows.iter().enumerate() {
            match row.state {
                RowState::Free => {
                    let groups = self.groups.of(index as u32);
                    let holds = !row.blocks.is_empty() || groups.iter().any(|table| !table.blocks.is_empty());
                    ensure!(!holds && row.in_flight == 0, "free row {index} holds something: {row:?}, {groups:?}");
                }
                RowState::Closed => ensure!(row.in_flight > 0, "closed row {index} waits for no step"),
                RowState::Live => self.check_live_row(index, row)?,
            }
        }
        Ok(())
    }

    fn check_live_row(&self, index: usize, row: &Row) -> Result<()> {
        let request = &self.requests[row.request];
        let (block_size, n) = (self.config.block_size, request.tokens.len());
        ensure!(row.num_computed <= row.prefill_end && row.prefill_end <= n, "row {index} computed too much: {row:?}");
        let k = if request.draft_failed { 0 } else { request.k };
        ensure!(
            (row.n, row.limit, row.max_k as usize) == (n, request.limit, k) && row.k <= row.max_k,
            "row {index} does not know its request's {n} tokens, limit {} and largest K = {k}: {row:?}",
            request.limit
        );
        let most = self.config.blocks_for(request.limit);
        ensure!(row.blocks.len() <= most, "row {index} holds {} blocks, its limit takes {most}", row.blocks.len());
        let (gone, computed) = (row.first_block, if row.is_prefilling() { row.num_computed + 1 } else { n });
        ensure!(
            gone <= self.config.first_block_read(0, computed) && gone <= row.num_sent,
            "row {index} of {computed} positions lacks its first {gone} blocks"
        );
        let missing = row.blocks.iter().take_while(|&&block| block == NO_BLOCK).count();
        ensure!(gone == missing, "row {index} counts {gone} of {missing} blocks that came back");
        for (table, group) in self.groups.of(index as u32).iter().zip(1..) {
            let (gone, held) = (table.first_block, table.blocks.len());
            ensure!(
                held == row.blocks.len(),
                "row {index} has {held} blocks in group {group}, {} in 0",
                row.blocks.len()
            );
            let missing = table.blocks.iter().take_while(|&&block| block == NO_BLOCK).count();
            ensure!(gone == missing, "row {index} counts {gone} of {missing} blocks that came back in group {group}");
            ensure!(
                gone <= self.config.first_block_read(group, computed) && gone <= row.num_sent,
                "row {index} of {computed} positions lacks its first {gone} blocks in group {group}"
            );
        }
        ensure!(row.num_sent <= row.blocks.len(), "row {index} sent {} of {} blocks", row.num_sent, row.blocks.len());
        ensure!(
            row.num_registered * block_size < n,
            "row {index} registered {} blocks of {n} tokens",
            row.num_registered
        );
        let (marked, registered) = (row.num_draft_marked, row.num_registered);
        ensure!(marked <= registered, "row {index} marked {marked} of {registered} blocks");
        let most = row.lower_bound() - 1;
        ensure!(row.drafting > 0 || row.draft_len <= most, "row {index} has draft_len {} above {most}", row.draft_len);

        if let Some(hidden) = self.hidden.get(index) {
            ensure!(hidden.hidden_start < n, "row {index} keeps hidden states from {} of {n}", hidden.hidden_start);
            let (from, to) = (hidden.draft_start, row.draft_len);
            ensure!(row.drafting > 0 || from <= to, "row {index} has draft KV on [{from}, {to})");
            let own = if from == 0 { row.blocks.len() } else { from / block_size };
            let marked = row.blocks[own..].iter().find(|&&block| self.pool.has_draft(block));
            ensure!(marked.is_none(), "draft KV of block {marked:?} of row {index} is valid, but begins at {from}");
        }

        let mut hash = request.root;
        for (place, tokens) in request.tokens.chunks_exact(block_size).take(row.num_registered).enumerate() {
            hash = request.with_extra_keys(hash, place * block_size, block_size, &self.hasher);
            hash = self.hasher.chain_tokens(hash, tokens);
            let further = self.groups.of(index as u32).iter().map(|table| table.blocks[place]);
            for (group, block) in std::iter::once(row.blocks[place]).chain(further).enumerate() {
                let found = self.pool.lookup(self.groups.hash_in(group, hash));
                ensure!(
                    !self.pool.is_registered(block) || found == Some(block),
                    "block {place} of row {index} in group {group} is {block}, but its content is found as {found:?}"
                );
            }
        }
        Ok(())
    }

    fn check_steps(&self) -> Result<()> {
        let (in_flight, most) = (self.steps.len(), self.config.max_in_flight);
        ensure!(in_flight <= most, "{in_flight} steps in flight, at most {most} allowed");
        let mut seen = vec![Row::default(); self.rows.len()];
        for (place, step) in self.steps.iter().enumerate() {
            let expected = self.next_step_id - (in_flight - place) as u64;
            ensure!(step.id == expected, "step {} in flight where {expected} belongs", step.id);
            let mut named: Vec<_> = step.sequences.iter().map(|sequence| sequence.row).collect();
            named.sort_unstable();
            named.dedup();
            ensure!(named.len() == step.sequences.len(), "step {} names a row twice", step.id);
            for sequence in &step.sequences {
                let row = &mut seen[sequence.row as usize];
                row.in_flight += 1;
                row.emitting += u32::from(sequence.emits());
                row.drafting += u32::from(sequence.drafts_on_device());
                row.emit_upper += sequence.emit_upper;
            }
        }
        for (index, (row, seen)) in self.rows.iter().zip(&seen).enumerate() {
            ensure!(
                row.in_flight == seen.in_flight,
                "row {index} counts {} of {} steps",
                row.in_flight,
                seen.in_flight
            );
            let counts = |row: &Row| (row.emitting, row.drafting, row.emit_upper);
            let live = row.state == RowState::Live;
            ensure!(
                !live || counts(row) == counts(seen),
                "row {index} counts {:?}, not {:?}",
                counts(row),
                counts(seen)
            );
        }
        Ok(())
    }

    fn check_snapshots(&self) -> Result<()> {
        let Some(snapshots) = &self.snapshots else { return Ok(()) };
        snapshots.pool.check_integrity()?;
        let mut held = vec![0; snapshots.pool.num_blocks()];
        for (index, (own, row)) in snapshots.rows.iter().zip(&self.rows).enumerate() {
            let idle = own.planned.is_empty() && own.pending.is_empty();
            ensure!(row.state != RowState::Free || idle, "free row {index} has snapshots: {own:?}");
            own.pending.iter().for_each(|snapshot| held[snapshot.slot as usize] += 1);
            let lens: Vec<_> = own.pending.iter().map(|snapshot| snapshot.len).chain(own.planned.clone()).collect();
            ensure!(lens.is_sorted_by(|a, b| a < b), "snapshots of row {index} are out of order: {own:?}");
            let aligned = lens.iter().all(|len| len.is_multiple_of(self.config.block_size));
            ensure!(aligned, "a snapshot of row {index} is not at a block's end: {own:?}");
            if row.state == RowState::Live {
                let later = lens.first().is_none_or(|&len| len > own.passed);
                ensure!(later, "row {index} passed {} positions and still waits for a snapshot: {own:?}", own.passed);
                let planned = own.planned.first().is_none_or(|&len| len > row.num_computed);
                ensure!(planned, "row {index} is to write a snapshot that it passed: {own:?}, {row:?}");
            }
        }
        for (slot, &held) in held.iter().enumerate() {
            let counted = snapshots.pool.ref_count(slot as i64);
            ensure!(counted == Some(held), "snapshot slot {slot} counts {counted:?} holders, not {held}");
            if let Some(hash) = snapshots.pool.block_hash(slot as i64) {
                ensure!(self.pool.lookup(hash).is_some(), "snapshot slot {slot} ends no cached block");
            }
        }
        Ok(())
    }

    fn check_blocks(&self) -> Result<()> {
        let mut holders = vec![0; self.pool.num_blocks()];
        let mut claims = 0;
        for (index, row) in self.rows.iter().enumerate() {
            for &block in row.blocks.iter().filter(|&&block| block != NO_BLOCK) {
                holders[block as usize] += 1;
                claims += usize::from(self.pool.claimant(block) == Some(index as u32));
            }
            let further = self.groups.of(index as u32).iter().flat_map(|table| &table.blocks);
            for &block in further.filter(|&&block| block != NO_BLOCK) {
                holders[block as usize] += 1;
                ensure!(!self.pool.has_draft(block), "block {block} outside the first group has valid draft KV");
            }
        }
        for (block, &holders) in holders.iter().enumerate() {
            let counted = self.pool.ref_count(block as i64);
            ensure!(counted == Some(holders), "block {block} counts {counted:?} holders, not {holders}");
            let shareable = holders <= 1 || self.pool.is_registered(block as i64);
            ensure!(shareable, "block {block} has {holders} holders and is not in the prefix cache");
        }
        let claimed = (0..holders.len()).filter(|&block| self.pool.claimant(block as i64).is_some()).count();
        ensure!(claims == claimed, "{claimed} blocks are claimed, {claims} of them by a row that holds them");
        Ok(())
    }
}
