//! What a pass is fed and what it gives. Data and its checks; computes nothing.

use crate::error::{Error, Result, check_len};
use crate::kv_cache::KvShape;
use crate::weights::ModelShape;

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
    /// Blocks of a row of the block table.
    pub max_blocks: usize,
    /// By row of the block table the first position that is attended, whatever a window has; empty: 0 for all.
    pub k_start: &'a [i64],
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

impl Pass<'_> {
    /// Rows.
    pub fn len(&self) -> usize {
        self.tokens.len()
    }

    /// Whether there are no rows.
    pub fn is_empty(&self) -> bool {
        self.tokens.is_empty()
    }

    /// Refuses whatever would read or write outside the weights, the cache and the output.
    pub(crate) fn check(&self, shape: &ModelShape, num_ids: usize, kv: &KvShape, output: &Output<'_>) -> Result<()> {
        let rows = self.len();
        check_len("positions", self.positions.len(), rows)?;
        check_len("slots", self.slots.len(), rows)?;
        check_len("entries", self.entries.len(), rows)?;
        for row in 0..rows {
            self.check_slot(row, kv)?;
            if self.positions[row] != -1 {
                self.check_row(row, shape, kv)?;
                self.check_start(row)?;
            }
        }
        output.check(rows, shape, num_ids)
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

    fn check_slot(&self, row: usize, kv: &KvShape) -> Result<()> {
        let slot = self.slots[row];
        if slot == -1 || usize::try_from(slot).is_ok_and(|slot| slot < kv.num_slots()) {
            return Ok(());
        }
        Err(Error::invalid(format!("slots[{row}]"), slot, format!("-1 to {}", kv.num_slots() as i64 - 1)))
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
        if row > 0 && self.entries[row - 1] == entry && self.positions[row - 1] != -1 {
            let below = self.positions[row - 1];
            if below >= position {
                let allowed = format!("above {below}, the position of the row before, of the same entry");
                return Err(Error::invalid(format!("positions[{row}]"), position, allowed));
            }
            from = below as usize / kv.block_size;
        }
        for (i, &block) in blocks[..=position as usize / kv.block_size].iter().enumerate().skip(from) {
            if !usize::try_from(block).is_ok_and(|block| block < kv.num_blocks) {
                let allowed = format!("0 to num_blocks - 1 = {}", kv.num_blocks as i64 - 1);
                return Err(Error::invalid(format!("block_table[{entry}, {i}]"), block, allowed));
            }
        }
        Ok(())
    }
}
