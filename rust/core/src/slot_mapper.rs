//! KV slots of positions: `slot = block_table[position / block_size] * block_size + position % block_size`.
//!
//! This is the definition for the whole project; device kernels that compute slots are tested against it. It reads
//! block tables and never allocates blocks.

use crate::error::{Error, check_len};

/// Slot of a position without a block; a write to it writes nothing.
pub const NO_SLOT: i64 = -1;

/// Value of the const parameter `SIZE` for any block size; the mapper's own block size is used.
const ANY: usize = 0;

/// Calls a method that is generic over the block size. Dividing by a number that the compiler does not know takes most
/// of the time, so the usual sizes are constants.
macro_rules! by_size {
    ($mapper:ident, $method:ident($($argument:expr),*)) => {
        match $mapper.block_size {
            16 => $mapper.$method::<16>($($argument),*),
            32 => $mapper.$method::<32>($($argument),*),
            64 => $mapper.$method::<64>($($argument),*),
            128 => $mapper.$method::<128>($($argument),*),
            _ => $mapper.$method::<ANY>($($argument),*),
        }
    };
}

/// Mapper of positions to KV slots, for blocks of `block_size` positions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlotMapper {
    block_size: usize,
    /// Number of blocks whose slots all fit an i64.
    num_blocks: u64,
}

impl SlotMapper {
    /// Makes a mapper for blocks of `block_size` positions, at least 1.
    ///
    /// # Errors
    /// [`Error::InvalidConfig`] if `block_size` is 0.
    pub fn new(block_size: usize) -> Result<Self, Error> {
        if block_size == 0 {
            return Err(Error::invalid_config("block_size", block_size, "at least 1"));
        }
        Ok(Self { block_size, num_blocks: i64::MAX as u64 / block_size as u64 })
    }

    /// Returns the number of positions per block.
    pub fn block_size(&self) -> usize {
        self.block_size
    }

    /// Returns the slot of `position`. Returns [`NO_SLOT`] if `position` is negative or beyond the table, if its entry
    /// has no block (< 0), or if the slot would not fit an i64.
    ///
    /// ```
    /// use specrs_core::{NO_SLOT, SlotMapper};
    ///
    /// let mapper = SlotMapper::new(16)?;
    /// assert_eq!(mapper.slot(&[7, 3], 17), 3 * 16 + 1);
    /// assert_eq!(mapper.slot(&[7, 3], 32), NO_SLOT);
    /// # Ok::<(), specrs_core::Error>(())
    /// ```
    #[inline]
    pub fn slot(&self, block_table: &[i64], position: i64) -> i64 {
        self.slot_sized::<ANY>(block_table, position)
    }

    /// Computes [`slot`](Self::slot) for blocks of `SIZE` positions.
    #[inline]
    fn slot_sized<const SIZE: usize>(&self, block_table: &[i64], position: i64) -> i64 {
        let size = if SIZE == ANY { self.block_size } else { SIZE };
        let position = position as u64;
        // A negative position is far beyond any table, unless a block is as large as all positions together.
        if SIZE == ANY && position > i64::MAX as u64 {
            return NO_SLOT;
        }
        match block_table.get((position / size as u64) as usize) {
            // One comparison for entries without a block and for those whose slots overflow.
            Some(&block) if (block as u64) < self.num_blocks => block * size as i64 + (position % size as u64) as i64,
            _ => NO_SLOT,
        }
    }

    /// Fills `out[i]` with the slot of `positions[i]`, for blocks of `SIZE` positions.
    #[inline]
    fn fill<const SIZE: usize>(&self, block_table: &[i64], positions: &[i64], out: &mut [i64]) {
        for (slot, &position) in out.iter_mut().zip(positions) {
            *slot = self.slot_sized::<SIZE>(block_table, position);
        }
    }

    /// Fills `out[i]` with the slot of `start + i`. It does one lookup per block, for prefill and catch-up chunks.
    pub fn map_range(&self, block_table: &[i64], start: i64, out: &mut [i64]) {
        let size = i64::try_from(self.block_size).unwrap_or(i64::MAX);
        let (mut rest, mut position) = (out, start);
        let mut run = (size - position.rem_euclid(size)) as usize;
        while !rest.is_empty() {
            let (slots, behind) = rest.split_at_mut(run.min(rest.len()));
            let first = self.slot(block_table, position);
            if first < 0 {
                slots.fill(NO_SLOT);
            } else {
                slots.iter_mut().zip(first..).for_each(|(slot, value)| *slot = value);
            }
            position = position.wrapping_add(slots.len() as i64);
            (rest, run) = (behind, self.block_size);
        }
    }

    /// Fills `out[i]` with the slot of `positions[i]`, all of one request.
    ///
    /// # Errors
    /// [`Error::InvalidBuffer`] if `out` and `positions` differ in length; `out` is unchanged.
    pub fn map(&self, block_table: &[i64], positions: &[i64], out: &mut [i64]) -> Result<(), Error> {
        check_len("out", out.len(), positions.len())?;
        by_size!(self, fill(block_table, positions, out));
        Ok(())
    }

    /// Maps positions of a batch: rows `q_start[b]..q_start[b + 1]` belong to request b, whose table is row b of
    /// `block_tables`.
    ///
    /// `block_tables` is `[B, width]` row-major, `q_start` `[B + 1]` from 0 to N without decreasing, `positions` and
    /// `out` `[N]`.
    ///
    /// # Errors
    /// [`Error::InvalidBuffer`] if a length does not match, or `q_start` does not rise from 0 to N; `out` is unchanged.
    pub fn map_batch(
        &self,
        block_tables: &[i64],
        q_start: &[i64],
        positions: &[i64],
        out: &mut [i64],
    ) -> Result<(), Error> {
        check_len("out", out.len(), positions.len())?;
        let Some(requests) = q_start.len().checked_sub(1) else {
            return Err(Error::invalid_buffer("q_start", "0 elements", "at least 1 element"));
        };
        let width = block_tables.len().checked_div(requests).unwrap_or(0);
        if block_tables.len() != requests * width {
            let allowed = format!("a multiple of the {requests} requests of q_start");
            return Err(Error::invalid_buffer("block_tables", format!("{} elements", block_tables.len()), allowed));
        }
        check_q_start(q_start, positions.len())?;
        by_size!(self, fill_batch(block_tables, width, q_start, positions, out));
        Ok(())
    }

    fn fill_batch<const SIZE: usize>(
        &self,
        block_tables: &[i64],
        width: usize,
        q_start: &[i64],
        positions: &[i64],
        out: &mut [i64],
    ) {
        let mut table_start = 0;
        for bounds in q_start.windows(2) {
            let table = &block_tables[table_start..table_start + width];
            let rows = bounds[0] as usize..bounds[1] as usize;
            self.fill::<SIZE>(table, &positions[rows.clone()], &mut out[rows]);
            table_start += width;
        }
    }
}

fn check_q_start(q_start: &[i64], rows: usize) -> Result<(), Error> {
    let (first, last) = (q_start[0], q_start[q_start.len() - 1]);
    if first != 0 || last != rows as i64 {
        let allowed = format!("0..{rows}, where {rows} is the number of positions");
        return Err(Error::invalid_buffer("q_start", format!("{first}..{last}"), allowed));
    }
    match q_start.windows(2).find(|bounds| bounds[0] > bounds[1]) {
        Some(bounds) => Err(Error::invalid_buffer("q_start", format!("{bounds:?}"), "offsets that never decrease")),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    type Case = (&'static [i64], &'static [i64], &'static [i64], &'static str);

    /// Computes the slots by enumeration: walks the table's slots in order and numbers the positions.
    fn enumerate_slots(block_table: &[i64], block_size: usize) -> Vec<i64> {
        let mut slots = Vec::new();
        for &block in block_table {
            for offset in 0..block_size {
                slots.push(if block < 0 { -1 } else { block * block_size as i64 + offset as i64 });
            }
        }
        slots
    }

    /// Tests all forms with block sizes up to 5, tables of up to 3 entries over {-1, 0, 1, 4}, and positions from -6 to
    /// past the end.
    #[test]
    fn small_scope() {
        let mut tables: Vec<Vec<i64>> = vec![vec![]];
        for _ in 0..3 {
            let longer: Vec<_> =
                tables.iter().flat_map(|t| [-1, 0, 1, 4].map(|block| [t.as_slice(), &[block]].concat())).collect();
            tables.extend(longer);
        }
        for block_size in 1..=5 {
            let mapper = SlotMapper::new(block_size).unwrap();
            assert_eq!(mapper.block_size(), block_size);
            for table in &tables {
                let known = enumerate_slots(table, block_size);
                let positions: Vec<i64> = (-6..known.len() as i64 + 6).collect();
                let expected: Vec<i64> = positions
                    .iter()
                    .map(|&p| usize::try_from(p).ok().and_then(|p| known.get(p)).copied().unwrap_or(-1))
                    .collect();
                let mut out = vec![-7; positions.len()];
                mapper.map(table, &positions, &mut out).unwrap();
                assert_eq!(out, expected, "block_size {block_size} table {table:?}");
                for from in 0..positions.len() {
                    for to in from..=positions.len() {
                        let mut out = vec![-7; to - from];
                        mapper.map_range(table, positions[0] + from as i64, &mut out);
                        assert_eq!(out, expected[from..to], "block_size {block_size} table {table:?} {from}..{to}");
                    }
                }
            }
        }
    }

    /// Tests block ids up to the largest: a slot that does not fit an i64 is [`NO_SLOT`], and no arithmetic wraps.
    #[test]
    fn overflow() {
        for block_size in [1_usize, 3, 16, 1 << 40, i64::MAX as usize, usize::MAX] {
            let mapper = SlotMapper::new(block_size).unwrap();
            for block in [0, 1, i64::MAX / 16 - 1, i64::MAX / 16, i64::MAX - 1, i64::MAX, -1, i64::MIN] {
                for position in [0, 1, 15, 16, i64::MAX] {
                    let exact = i128::from(block) * block_size as i128 + i128::from(position) % block_size as i128;
                    let last = (i128::from(block) + 1) * block_size as i128 - 1;
                    let here = position as u128 / (block_size as u128) == 0;
                    let expected =
                        if block >= 0 && here && last < i128::from(i64::MAX) { exact as i64 } else { NO_SLOT };
                    let mut out = [-7];
                    mapper.map(&[block], &[position], &mut out).unwrap();
                    assert_eq!(out, [expected], "block {block} of {block_size}, position {position}");
                    assert_eq!(mapper.slot(&[block], position), expected);
                    mapper.map_range(&[block], position, &mut out);
                    assert_eq!(out, [expected]);
                }
            }
        }
    }

    #[test]
    fn batch_is_each_request_by_itself() {
        let mapper = SlotMapper::new(4).unwrap();
        let block_tables = [3, 1, -1, /**/ 9, 0, 2, /**/ 5, 5, 5];
        let positions = [0, 7, 8, /**/ /**/ 11, -1, 12];
        let mut out = [-7; 6];
        mapper.map_batch(&block_tables, &[0, 3, 3, 6], &positions, &mut out).unwrap();
        assert_eq!(out, [12, 7, -1, 23, -1, -1]);
        let mut empty = [];
        mapper.map_batch(&[], &[0], &[], &mut empty).unwrap();
        mapper.map_batch(&[], &[0, 0, 0], &[], &mut empty).unwrap();
        let mut out = [-7];
        mapper.map_batch(&[], &[0, 1], &[0], &mut out).unwrap();
        assert_eq!(out, [-1]);
    }

    #[test]
    fn disagreeing_buffers_change_nothing() {
        let mapper = SlotMapper::new(4).unwrap();
        let mut out = [-7; 3];
        let cases: [Case; 9] = [
            (&[1, 2], &[0, 1, 2], &[0, 0], "out"),
            (&[1, 2], &[], &[0, 0, 0], "q_start"),
            (&[1, 2, 3], &[0, 1, 3], &[0, 0, 0], "block_tables"),
            (&[1], &[0], &[], "out"),
            (&[1, 2], &[0, 1, 2], &[0, 0, 0], "q_start"),
            (&[1, 2], &[1, 2, 3], &[0, 0, 0], "q_start"),
            (&[1, 2], &[0, 4, 3], &[0, 0, 0], "q_start"),
            (&[1, 2], &[0, -1, 3], &[0, 0, 0], "q_start"),
            (&[1], &[3], &[0, 0, 0], "block_tables"),
        ];
        for (block_tables, q_start, positions, field) in cases {
            let error = mapper.map_batch(block_tables, q_start, positions, &mut out).unwrap_err();
            assert!(matches!(error, Error::InvalidBuffer { name, .. } if name == field), "{error}");
            assert_eq!(out, [-7; 3]);
        }
        assert!(matches!(mapper.map(&[1], &[0], &mut out), Err(Error::InvalidBuffer { name: "out", .. })));
        assert!(matches!(SlotMapper::new(0), Err(Error::InvalidConfig { field: "block_size", .. })));
    }
}
