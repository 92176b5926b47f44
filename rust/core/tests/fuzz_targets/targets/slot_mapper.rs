//! Fuzz target for slot arithmetic, which compares each function with the formula in 128 bits.

use super::bytes::Bytes;
use specrs_core::{NO_SLOT, SlotMapper};

pub fn slot_mapper(data: &[u8]) {
    let mut bytes = Bytes(data);
    let block_size = match bytes.byte() {
        255 => bytes.word() as usize,
        small => usize::from(small),
    };
    let Ok(mapper) = SlotMapper::new(block_size) else { return assert_eq!(block_size, 0) };
    let table: Vec<i64> = (0..bytes.below(6)).map(|_| bytes.number()).collect();
    let positions: Vec<i64> = (0..bytes.below(12)).map(|_| bytes.number()).collect();
    let expected: Vec<i64> = positions.iter().map(|&position| slot(&table, block_size, position)).collect();

    let mut out = vec![-7; positions.len()];
    mapper.map(&table, &positions, &mut out).expect("matching lengths");
    assert_eq!(out, expected);
    out.fill(-7);
    mapper.map_batch(&table, &[0, positions.len() as i64], &positions, &mut out).expect("matching lengths");
    assert_eq!(out, expected);
    for (&position, &expected) in positions.iter().zip(&expected) {
        assert_eq!(mapper.slot(&table, position), expected);
        let mut run = [-7; 5];
        if position < i64::MAX - 5 {
            mapper.map_range(&table, position, &mut run);
            assert_eq!(run, [0, 1, 2, 3, 4].map(|i| slot(&table, block_size, position + i)));
        }
    }
    let bounds: Vec<i64> = (0..bytes.below(5)).map(|_| bytes.number()).collect();
    out.fill(-7);
    if mapper.map_batch(&table, &bounds, &positions, &mut out).is_err() {
        assert!(out.iter().all(|&slot| slot == -7), "an error has written");
    }
}

fn slot(table: &[i64], block_size: usize, position: i64) -> i64 {
    let Ok(position) = usize::try_from(position) else { return NO_SLOT };
    let Some(&block) = table.get(position / block_size) else { return NO_SLOT };
    // A block counts if all of its slots fit.
    let last = (i128::from(block) + 1) * block_size as i128 - 1;
    if block < 0 || last >= i128::from(i64::MAX) {
        return NO_SLOT;
    }
    block * block_size as i64 + (position % block_size) as i64
}
