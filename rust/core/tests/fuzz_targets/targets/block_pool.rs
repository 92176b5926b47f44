//! Fuzz target for the block pool: holders are also counted here, errors change nothing, and every block can be freed.

use super::bytes::Bytes;
use specrs_core::BlockPool;

pub fn block_pool(data: &[u8]) {
    let mut bytes = Bytes(data);
    let size = 1 + bytes.below(12);
    let mut pool = BlockPool::new(size).expect("a valid size");
    let mut holders = vec![0_usize; size];
    while !bytes.is_empty() {
        let (op, block) = (bytes.byte() % 9, bytes.number());
        let held = usize::try_from(block).ok().filter(|&id| id < size && holders[id] > 0);
        match op {
            0 | 1 => match pool.allocate() {
                Ok(id) => {
                    assert_eq!(holders[id as usize], 0, "block {id} is in two hands");
                    holders[id as usize] = 1;
                }
                Err(_) => assert!(holders.iter().all(|&count| count > 0), "out of blocks with one free"),
            },
            2 => {
                if pool.share(block).is_ok() {
                    holders[block as usize] += 1;
                }
            }
            3 | 4 => {
                assert_eq!(pool.free(block).is_ok(), held.is_some(), "free of block {block}");
                if let Some(id) = held {
                    holders[id] -= 1;
                }
            }
            5 => {
                // Few hashes, so that contents collide; anything, so that all bits are looked at.
                let hash = match bytes.byte() {
                    few @ 0..=200 => u128::from(few % 5) << (few % 3 * 60),
                    _ => u128::from(bytes.word()) << 64 | u128::from(bytes.word()),
                };
                if pool.register(block, hash) == Ok(true) {
                    assert_eq!(pool.lookup(hash), Some(block));
                }
            }
            6 => _ = pool.mark_draft(block),
            7 => {
                let claimant = u32::from(bytes.byte() % 3);
                if pool.claim(block, claimant) == Ok(true) {
                    assert_eq!(pool.claimant(block), Some(claimant));
                    if bytes.byte().is_multiple_of(2) {
                        assert!(pool.release_claim(block, claimant));
                    }
                }
            }
            _ => assert_eq!(pool.reset_prefix_cache(), holders.iter().all(|&count| count == 0)),
        }
        for (id, &count) in holders.iter().enumerate() {
            assert_eq!(pool.ref_count(id as i64), Some(count));
        }
        pool.check_integrity().expect("integrity");
    }
    for (id, &count) in holders.iter().enumerate() {
        for _ in 0..count {
            pool.free(id as i64).expect("a held block");
        }
    }
    assert_eq!(pool.num_free(), size);
    pool.check_integrity().expect("integrity");
}
