//! The flat rows of one pass, gathered from row state. Runs nothing.

use super::state::RowState;

/// Rows of one pass. They are kept between passes, so that gathering allocates nothing after the first.
#[derive(Debug, Default)]
pub(super) struct Batch {
    /// Token of each row.
    pub(super) tokens: Vec<i64>,
    /// Position of each row.
    pub(super) positions: Vec<i64>,
    /// KV slot of each row; -1 writes no KV.
    pub(super) slots: Vec<i64>,
    /// KV slots in the groups after the first, `[G - 1, N]`, as filled by [`find_group_slots`](Self::find_group_slots).
    pub(super) group_slots: Vec<i64>,
    /// State row of each row, whose block table it reads.
    pub(super) rows: Vec<usize>,
    /// Rows whose outputs are requested, ascending.
    pub(super) wanted: Vec<usize>,
    /// Indices, among all requested outputs, of the outputs that are not computed because a grammar allows only the
    /// next draft there. Ascending. The rows of these outputs are not in `wanted`.
    pub(super) forced: Vec<usize>,
    /// Whether all rows belong to prompts or to catch-up.
    pub(super) prompts: bool,
}

impl Batch {
    pub(super) fn clear(&mut self) {
        self.tokens.clear();
        self.positions.clear();
        self.slots.clear();
        self.group_slots.clear();
        self.rows.clear();
        self.wanted.clear();
        self.forced.clear();
        self.prompts = false;
    }

    pub(super) fn len(&self) -> usize {
        self.tokens.len()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.tokens.is_empty()
    }

    pub(super) fn push(&mut self, row: usize, token: i64, position: usize, slot: i64) {
        self.tokens.push(token);
        self.positions.push(position as i64);
        self.slots.push(slot);
        self.rows.push(row);
    }

    /// Appends a masked row: it attends nothing and writes nothing, and its outputs mean nothing.
    pub(super) fn push_masked(&mut self, row: usize) {
        self.tokens.push(0);
        self.positions.push(-1);
        self.slots.push(-1);
        self.rows.push(row);
    }

    /// Appends a row that feeds the token of `row` at `position` and writes its KV.
    pub(super) fn feed(&mut self, state: &RowState<'_>, row: usize, position: usize, block_size: usize) {
        self.push(row, state.token(row, position), position, state.slot(row, position, block_size));
    }

    /// Looks up the KV slots of all rows in the groups after the first; -1 if the slot in the first group is -1.
    pub(super) fn find_group_slots(&mut self, state: &RowState<'_>, block_size: usize) {
        let Self { slots, group_slots, positions, rows, .. } = self;
        let count = slots.len();
        group_slots.clear();
        group_slots.resize(count * (state.group_tables.len() / state.block_table.len()), -1);
        for i in (0..count).filter(|&i| slots[i] >= 0) {
            let found = state.group_slots(rows[i], positions[i] as usize, block_size);
            for (group, slot) in found.enumerate() {
                group_slots[group * count + i] = slot;
            }
        }
    }

    /// Requests the output of all rows from `first` on, except the last.
    pub(super) fn want_from(&mut self, first: usize) {
        self.wanted.extend(first..self.len() - 1);
    }

    /// Requests the output of the row appended last.
    pub(super) fn want_last(&mut self) {
        self.wanted.push(self.len() - 1);
    }

    /// Requests the output of the row appended last. With `is_forced` it is not computed: see [`Self::forced`].
    pub(super) fn want_last_unless(&mut self, is_forced: bool) {
        if is_forced {
            self.forced.push(self.wanted.len() + self.forced.len());
        } else {
            self.want_last();
        }
    }
}
