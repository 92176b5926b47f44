//! Inputs and outputs of a pass. Data and its checks; computes nothing.

use crate::error::{Error, Result, check_len};
use crate::kv_cache::{KvCache, KvShape};
use crate::lora::Lora;
pub use crate::shape::MAX_TILE_ROWS;
use crate::shape::ModelShape;
use crate::states::StateSnapshot;
use std::ops::Range;

/// Pass over N flat rows.
///
/// Row i feeds `tokens[i]` at `positions[i]` and writes its K and V to `slots[i]`. It attends the positions 0 to
/// `positions[i]` of row `sequences[i]` of the block table, or those within a layer's window. All of them were written
/// before or are written by this pass. Rows of one sequence have ascending positions.
#[derive(Clone, Copy, Debug, Default)]
pub struct Pass<'a> {
    /// Token ids, `[N]`; any value for a masked row.
    pub tokens: &'a [i64],
    /// Positions, `[N]`. With -1 the row is masked: it attends nothing, and its output is finite and means nothing.
    pub positions: &'a [i64],
    /// KV slots, `[N]`; with -1, K and V are not kept.
    pub slots: &'a [i64],
    /// Row of the block table for each row, `[N]`; any value for a masked row.
    pub sequences: &'a [usize],
    /// Block ids, `[rows, max_blocks]`; entries after a row's position are never read.
    pub block_table: &'a [i64],
    /// KV slots in the groups after the first, `[G - 1, N]`; empty if there is one group.
    pub group_slots: &'a [i64],
    /// Block ids in the groups after the first, `[G - 1, rows, max_blocks]`. Entries before the window of a group's
    /// layers or after a row's position are never read.
    pub group_tables: &'a [i64],
    /// Number of blocks in a row of the block table.
    pub max_blocks: usize,
    /// First position that is attended, by row of the block table, even if a window is longer; empty for 0 everywhere.
    pub k_start: &'a [i64],
    /// Whether all rows belong to prompts: a decoder [with tiles for them](crate::Decoder::with_prompt_tiles)
    /// multiplies them by tiles.
    pub prompts: bool,
    /// Adapter of each row, `[N]`, `None` for no adapter; empty if no row has one.
    pub adapters: &'a [Option<&'a Lora>],
    /// Snapshots of states to write, for models whose layers have some.
    pub snapshots: &'a [StateSnapshot],
}

/// Output of a pass besides K and V. `rows` are rows of the pass, ascending; only the first `num_ids` ids count.
#[derive(Debug)]
pub enum Output<'a> {
    /// No output.
    Nothing,
    /// Final hidden states of `rows` after the final norm, as [`Decoder::logits`](crate::Decoder::logits) takes them.
    Hidden {
        /// Requested rows.
        rows: &'a [usize],
        /// Hidden states, `[rows, hidden_size]`.
        hidden: &'a mut [f32],
    },
    /// Logits of `rows`.
    Logits {
        /// Requested rows.
        rows: &'a [usize],
        /// Number of ids, from 0 on.
        num_ids: usize,
        /// Logits, `[rows, num_ids]`.
        logits: &'a mut [f32],
    },
    /// Most probable id of `rows`, the lowest in a tie, and its logit; the first NaN if there is one.
    Argmax {
        /// Requested rows.
        rows: &'a [usize],
        /// Number of ids, from 0 on.
        num_ids: usize,
        /// Most probable ids, `[rows]`.
        ids: &'a mut [i64],
        /// Logits of the most probable ids, `[rows]`.
        top: &'a mut [f32],
    },
}

/// Hidden states that a pass keeps: the residual stream of all rows as the input of some layers.
#[derive(Debug)]
pub struct Entries<'a> {
    /// Layers in any order. The number of layers stands for the stream after the last layer, before the final norm. One
    /// more stands for the stream after the final norm.
    pub layers: &'a [usize],
    /// Kept hidden states, `[N, layers, hidden_size]`.
    pub states: &'a mut [f32],
}

/// Input of an EAGLE-3 or MTP head's pass in addition to its tokens, which are those after its positions.
#[derive(Clone, Copy, Debug)]
pub struct HeadStates<'a> {
    /// Hidden states, `[N, hidden_size]`: the target's states (of EAGLE-3, fused), or the output of the pass before; any
    /// value for a masked row. A head that attends the target's keys and values is fed states of the target's size.
    pub hidden: &'a [f32],
}

impl HeadStates<'_> {
    pub(crate) fn check(&self, pass: &Pass<'_>, state_size: usize) -> Result<()> {
        check_len("head_states", self.hidden.len(), pass.len() * state_size)
    }
}

impl Entries<'_> {
    pub(crate) fn check(&self, num_rows: usize, num_layers: usize, state_size: usize) -> Result<()> {
        check_len("states", self.states.len(), num_rows * self.layers.len() * state_size)?;
        match self.layers.iter().find(|&&layer| layer > num_layers + 1) {
            Some(&layer) => Err(Error::invalid("hidden_layers", layer, format!("from 0 to {}", num_layers + 1))),
            None => Ok(()),
        }
    }
}

impl Output<'_> {
    fn check(&self, num_rows: usize, shape: &ModelShape, vocab_size: usize) -> Result<()> {
        let (rows, ids) = match self {
            Output::Nothing => return Ok(()),
            Output::Hidden { rows, hidden } => {
                check_len("hidden", hidden.len(), rows.len() * shape.hidden_size)?;
                (rows, vocab_size)
            }
            Output::Logits { rows, num_ids, logits } => {
                check_len("logits", logits.len(), rows.len() * num_ids)?;
                (rows, *num_ids)
            }
            Output::Argmax { rows, num_ids, ids, top } => {
                check_len("ids", ids.len(), rows.len())?;
                check_len("top", top.len(), rows.len())?;
                (rows, *num_ids)
            }
        };
        if ids == 0 || ids > vocab_size {
            return Err(Error::invalid("num_ids", ids, format!("from 1 to vocab_size={vocab_size}")));
        }
        let ascending = rows.windows(2).all(|pair| pair[0] < pair[1]);
        if !ascending || rows.last().is_some_and(|&last| last >= num_rows) {
            return Err(Error::invalid("rows", format!("{rows:?}"), format!("ascending rows below {num_rows}")));
        }
        Ok(())
    }
}

impl<'a> Pass<'a> {
    /// Returns the number of rows.
    pub fn len(&self) -> usize {
        self.tokens.len()
    }

    /// Returns whether there are no rows.
    pub fn is_empty(&self) -> bool {
        self.tokens.is_empty()
    }

    /// Returns the slots of `rows` and the block table in a group.
    pub(crate) fn in_group(&self, group: usize, rows: &Range<usize>) -> (&'a [i64], &'a [i64]) {
        match group.checked_sub(1) {
            None => (&self.slots[rows.clone()], self.block_table),
            Some(further) => {
                let (slots, table) = (further * self.len(), further * self.block_table.len());
                let slots = &self.group_slots[slots + rows.start..slots + rows.end];
                (slots, &self.group_tables[table..table + self.block_table.len()])
            }
        }
    }

    /// Rejects a pass that would read or write outside the weights, the cache and the output. `window_of` returns the
    /// maximum number of positions that a row attends in a group.
    pub(crate) fn check(
        &self,
        shape: &ModelShape,
        num_ids: usize,
        cache: &KvCache,
        output: &Output<'_>,
        window_of: impl Fn(usize) -> usize,
    ) -> Result<()> {
        let (rows, kv, further) = (self.len(), &cache.shape, cache.num_groups() - 1);
        check_len("positions", self.positions.len(), rows)?;
        check_len("slots", self.slots.len(), rows)?;
        check_len("sequences", self.sequences.len(), rows)?;
        check_len("group_slots", self.group_slots.len(), further * rows)?;
        check_len("group_tables", self.group_tables.len(), further * self.block_table.len())?;
        for row in 0..rows {
            check_slot(self.slots[row], kv, || format!("slots[{row}]"))?;
            if self.positions[row] != -1 {
                self.check_row(row, shape, kv)?;
                self.check_start(row)?;
            }
        }
        for group in 1..=further {
            self.check_group(group, kv, window_of(group))?;
        }
        output.check(rows, shape, num_ids)
    }

    /// Rejects a pass whose rows would read or write outside the cache in a group after the first. The rows must be
    /// valid in the first group.
    fn check_group(&self, group: usize, kv: &KvShape, window: usize) -> Result<()> {
        let (slots, table) = self.in_group(group, &(0..self.len()));
        for (row, &slot) in slots.iter().enumerate() {
            check_slot(slot, kv, || format!("group_slots[{}, {row}]", group - 1))?;
            let (position, sequence) = (self.positions[row], self.sequences[row]);
            if position == -1 {
                continue;
            }
            let below = self.below(row).map(|below| below as usize);
            let from = below.unwrap_or((position as usize + 1).saturating_sub(window)) / kv.block_size;
            let name = |i| format!("group_tables[{}, {sequence}, {i}]", group - 1);
            check_blocks(&table[sequence * self.max_blocks..], from, position as usize / kv.block_size, kv, name)?;
        }
        Ok(())
    }

    /// Returns the position of the row before, if it belongs to the same sequence and is not masked.
    fn below(&self, row: usize) -> Option<i64> {
        let before = row.checked_sub(1)?;
        (self.sequences[before] == self.sequences[row] && self.positions[before] != -1).then(|| self.positions[before])
    }

    /// Returns the first position that rows of a sequence attend.
    pub(crate) fn first(&self, sequence: usize) -> usize {
        self.k_start.get(sequence).map_or(0, |&first| first as usize)
    }

    fn check_start(&self, row: usize) -> Result<()> {
        if self.k_start.is_empty() {
            return Ok(());
        }
        let (sequence, position) = (self.sequences[row], self.positions[row]);
        let first = self.k_start.get(sequence).copied().unwrap_or(-1);
        if (0..=position).contains(&first) {
            return Ok(());
        }
        let allowed = format!("from 0 to {position}, the position of row {row}");
        Err(Error::invalid(format!("k_start[{sequence}]"), first, allowed))
    }

    fn check_row(&self, row: usize, shape: &ModelShape, kv: &KvShape) -> Result<()> {
        let (token, position, sequence) = (self.tokens[row], self.positions[row], self.sequences[row]);
        if !usize::try_from(token).is_ok_and(|token| token < shape.vocab_size) {
            let allowed = format!("from 0 to vocab_size - 1 = {}", shape.vocab_size - 1);
            return Err(Error::invalid(format!("tokens[{row}]"), token, allowed));
        }
        let capacity = self.max_blocks * kv.block_size;
        if !usize::try_from(position).is_ok_and(|position| position < capacity) {
            let allowed = format!("from -1 to max_blocks * block_size - 1 = {}", capacity as i64 - 1);
            return Err(Error::invalid(format!("positions[{row}]"), position, allowed));
        }
        let Some(blocks) = self.block_table.get(sequence * self.max_blocks..(sequence + 1) * self.max_blocks) else {
            let allowed = format!("one of the block table's {} rows", self.block_table.len() / self.max_blocks);
            return Err(Error::invalid(format!("sequences[{row}]"), sequence, allowed));
        };
        // What a row below has checked is not checked again.
        let mut from = 0;
        if let Some(below) = self.below(row) {
            if below >= position {
                let allowed = format!("above {below}, the position of the sequence's row before");
                return Err(Error::invalid(format!("positions[{row}]"), position, allowed));
            }
            from = below as usize / kv.block_size;
        }
        check_blocks(blocks, from, position as usize / kv.block_size, kv, |i| format!("block_table[{sequence}, {i}]"))
    }
}

fn check_slot(slot: i64, kv: &KvShape, name: impl FnOnce() -> String) -> Result<()> {
    if slot == -1 || usize::try_from(slot).is_ok_and(|slot| slot < kv.num_slots()) {
        return Ok(());
    }
    Err(Error::invalid(name(), slot, format!("from -1 to {}", kv.num_slots() as i64 - 1)))
}

/// Rejects invalid ids among blocks `from..=to` of a row.
fn check_blocks(blocks: &[i64], from: usize, to: usize, kv: &KvShape, name: impl Fn(usize) -> String) -> Result<()> {
    for (i, &block) in blocks[..=to].iter().enumerate().skip(from) {
        if !usize::try_from(block).is_ok_and(|block| block < kv.num_blocks) {
            let allowed = format!("from 0 to num_blocks - 1 = {}", kv.num_blocks as i64 - 1);
            return Err(Error::invalid(name(i), block, allowed));
        }
    }
    Ok(())
}
