//! What a pass is fed and what it gives. Data and its checks; computes nothing.

use crate::error::{Error, Result, check_len};
use crate::kv_cache::{KvCache, KvShape};
use crate::lora::Lora;
use crate::weights::ModelShape;
use std::ops::Range;

/// Rows that go through all layers together; longer passes are cut into tiles of as many, in order.
pub const MAX_TILE_ROWS: usize = 64;

/// One pass over N flat rows.
///
/// Row i feeds `tokens[i]` at `positions[i]`, writes its K and V to `slots[i]`, and attends the positions 0 to
/// `positions[i]` of row `entries[i]` of the block table, or those of a layer's window: all of them were written before or
/// are written by this pass. Rows of one entry have ascending positions.
#[derive(Clone, Copy, Debug, Default)]
pub struct Pass<'a> {
    /// `[N]` ids; of a masked row anything.
    pub tokens: &'a [i64],
    /// `[N]`; -1: the row is masked, attends nothing, and its output is finite and means nothing.
    pub positions: &'a [i64],
    /// `[N]`; -1: K and V are not kept.
    pub slots: &'a [i64],
    /// `[N]` row of the block table; of a masked row anything.
    pub entries: &'a [usize],
    /// `[rows, max_blocks]` block ids; entries past a row's position are never looked at.
    pub block_table: &'a [i64],
    /// `[G - 1, N]` slots in the cache's groups behind the first; empty: there is one.
    pub group_slots: &'a [i64],
    /// `[G - 1, rows, max_blocks]` their block ids; entries before the windows of a group's layers are never looked at, either.
    pub group_tables: &'a [i64],
    /// Blocks of a row of the block table.
    pub max_blocks: usize,
    /// By row of the block table the first position that is attended, whatever a window has; empty: 0 for all.
    pub k_start: &'a [i64],
    /// All rows are of prompts: a decoder [with tiles for them](crate::Decoder::with_prompt_tiles) multiplies them by tiles.
    pub prompts: bool,
    /// `[N]` the adapter that a row is computed with, None for none; empty: none has one.
    pub adapters: &'a [Option<&'a Lora>],
}

/// What a pass leaves beside K and V. `rows` are rows of the pass, ascending; only the first `num_ids` ids count.
#[derive(Debug)]
pub enum Output<'a> {
    /// Nothing.
    Nothing,
    /// The final hidden states of `rows`, behind the final norm: what [`Decoder::logits`](crate::Decoder::logits) takes.
    Hidden {
        /// Rows asked for.
        rows: &'a [usize],
        /// `[rows, hidden_size]`
        hidden: &'a mut [f32],
    },
    /// Logits of `rows`.
    Logits {
        /// Rows asked for.
        rows: &'a [usize],
        /// Ids from 0 on.
        num_ids: usize,
        /// `[rows, num_ids]`
        logits: &'a mut [f32],
    },
    /// The most probable token of `rows`, the lowest id in a tie, and its logit; the first NaN where there is one.
    Argmax {
        /// Rows asked for.
        rows: &'a [usize],
        /// Ids from 0 on.
        num_ids: usize,
        /// `[rows]`
        ids: &'a mut [i64],
        /// `[rows]`
        top: &'a mut [f32],
    },
}

/// Hidden states that a pass keeps on its way: the residual stream of all rows where it enters layers.
#[derive(Debug)]
pub struct Entries<'a> {
    /// Layers in any order; their number itself is where the last one has left the stream, before the final norm.
    pub layers: &'a [usize],
    /// `[N, layers, hidden_size]`
    pub states: &'a mut [f32],
}

/// What a pass of an EAGLE-3 head is fed beside its tokens, which are those behind its positions.
#[derive(Clone, Copy, Debug)]
pub struct Beside<'a> {
    /// `[N, hidden_size]`: the target's states, fused, or what the pass before has left; of a masked row anything.
    pub hidden: &'a [f32],
}

impl Beside<'_> {
    pub(crate) fn check(&self, pass: &Pass<'_>, shape: &ModelShape) -> Result<()> {
        check_len("beside", self.hidden.len(), pass.len() * shape.hidden_size)
    }
}

impl Entries<'_> {
    pub(crate) fn check(&self, num_rows: usize, num_layers: usize, shape: &ModelShape) -> Result<()> {
        check_len("states", self.states.len(), num_rows * self.layers.len() * shape.hidden_size)?;
        match self.layers.iter().find(|&&layer| layer > num_layers) {
            Some(&layer) => Err(Error::invalid("hidden_layers", layer, format!("0 to {num_layers}"))),
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
            return Err(Error::invalid("num_ids", ids, format!("1 to vocab_size = {vocab_size}")));
        }
        let ascending = rows.windows(2).all(|pair| pair[0] < pair[1]);
        if !ascending || rows.last().is_some_and(|&last| last >= num_rows) {
            return Err(Error::invalid("rows", format!("{rows:?}"), format!("ascending rows below {num_rows}")));
        }
        Ok(())
    }
}

impl<'a> Pass<'a> {
    /// Rows.
    pub fn len(&self) -> usize {
        self.tokens.len()
    }

    /// Whether there are no rows.
    pub fn is_empty(&self) -> bool {
        self.tokens.is_empty()
    }

    /// Slots of `rows` and the block table in a group.
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

    /// Refuses whatever would read or write outside the weights, the cache and the output. `window_of`: the most positions
    /// that a row attends in a group.
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
        check_len("entries", self.entries.len(), rows)?;
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

    /// Refuses what a group's layers would read or write outside the cache, of rows that are right in the first group.
    fn check_group(&self, group: usize, kv: &KvShape, window: usize) -> Result<()> {
        let (slots, table) = self.in_group(group, &(0..self.len()));
        for (row, &slot) in slots.iter().enumerate() {
            check_slot(slot, kv, || format!("group_slots[{}, {row}]", group - 1))?;
            let (position, entry) = (self.positions[row], self.entries[row]);
            if position == -1 {
                continue;
            }
            let below = self.below(row).map(|below| below as usize);
            let from = below.unwrap_or((position as usize + 1).saturating_sub(window)) / kv.block_size;
            let name = |i| format!("group_tables[{}, {entry}, {i}]", group - 1);
            check_blocks(&table[entry * self.max_blocks..], from, position as usize / kv.block_size, kv, name)?;
        }
        Ok(())
    }

    /// The position of the row before, where it is of the same entry.
    fn below(&self, row: usize) -> Option<i64> {
        let before = row.checked_sub(1)?;
        (self.entries[before] == self.entries[row] && self.positions[before] != -1).then(|| self.positions[before])
    }

    /// The first position that rows of an entry attend.
    pub(crate) fn first(&self, entry: usize) -> usize {
        self.k_start.get(entry).map_or(0, |&first| first as usize)
    }

    fn check_start(&self, row: usize) -> Result<()> {
        if self.k_start.is_empty() {
            return Ok(());
        }
        let (entry, position) = (self.entries[row], self.positions[row]);
        let first = self.k_start.get(entry).copied().unwrap_or(-1);
        if (0..=position).contains(&first) {
            return Ok(());
        }
        let allowed = format!("0 to {position}, the position of row {row}");
        Err(Error::invalid(format!("k_start[{entry}]"), first, allowed))
    }

    fn check_row(&self, row: usize, shape: &ModelShape, kv: &KvShape) -> Result<()> {
        let (token, position, entry) = (self.tokens[row], self.positions[row], self.entries[row]);
        if !usize::try_from(token).is_ok_and(|token| token < shape.vocab_size) {
            let allowed = format!("0 to vocab_size - 1 = {}", shape.vocab_size - 1);
            return Err(Error::invalid(format!("tokens[{row}]"), token, allowed));
        }
        let capacity = self.max_blocks * kv.block_size;
        if !usize::try_from(position).is_ok_and(|position| position < capacity) {
            let allowed = format!("-1 to max_blocks * block_size - 1 = {}", capacity as i64 - 1);
            return Err(Error::invalid(format!("positions[{row}]"), position, allowed));
        }
        let Some(blocks) = self.block_table.get(entry * self.max_blocks..(entry + 1) * self.max_blocks) else {
            let allowed = format!("a row of the block table's {}", self.block_table.len() / self.max_blocks);
            return Err(Error::invalid(format!("entries[{row}]"), entry, allowed));
        };
        // What a row below has checked is not checked again.
        let mut from = 0;
        if let Some(below) = self.below(row) {
            if below >= position {
                let allowed = format!("above {below}, the position of the row before, of the same entry");
                return Err(Error::invalid(format!("positions[{row}]"), position, allowed));
            }
            from = below as usize / kv.block_size;
        }
        check_blocks(blocks, from, position as usize / kv.block_size, kv, |i| format!("block_table[{entry}, {i}]"))
    }
}

fn check_slot(slot: i64, kv: &KvShape, name: impl FnOnce() -> String) -> Result<()> {
    if slot == -1 || usize::try_from(slot).is_ok_and(|slot| slot < kv.num_slots()) {
        return Ok(());
    }
    Err(Error::invalid(name(), slot, format!("-1 to {}", kv.num_slots() as i64 - 1)))
}

/// Refuses ids among `from..=to` of a row's blocks that are none.
fn check_blocks(blocks: &[i64], from: usize, to: usize, kv: &KvShape, name: impl Fn(usize) -> String) -> Result<()> {
    for (i, &block) in blocks[..=to].iter().enumerate().skip(from) {
        if !usize::try_from(block).is_ok_and(|block| block < kv.num_blocks) {
            let allowed = format!("0 to num_blocks - 1 = {}", kv.num_blocks as i64 - 1);
            return Err(Error::invalid(name(i), block, allowed));
        }
    }
    Ok(())
}
