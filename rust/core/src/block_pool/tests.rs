//! Tests of each pool operation, of the calls that it rejects, and of the order of eviction.

use super::BlockPool;
use crate::error::Error;

/// Name of a contradiction, and a function that brings it about in a pool.
type Damage = (&'static str, fn(&mut BlockPool));

#[allow(clippy::needless_pass_by_value)] // callers have no use for it either
fn refused<T: std::fmt::Debug>(result: Result<T, Error>) {
    assert!(matches!(result, Err(Error::InvalidBlock { .. })), "{result:?}");
}

fn check(pool: &BlockPool) {
    pool.check_integrity().unwrap();
}

#[test]
fn no_block_is_in_two_hands() {
    let mut pool = BlockPool::new(5).unwrap();
    let blocks: Vec<_> = (0..5).map(|_| pool.allocate().unwrap()).collect();
    assert_eq!(blocks, [0, 1, 2, 3, 4]);
    assert_eq!(pool.allocate(), Err(Error::OutOfBlocks { num_blocks: 5 }));
    pool.free(3).unwrap();
    assert_eq!(pool.allocate(), Ok(3));
    assert_eq!(pool.num_free(), 0);
    check(&pool);
}

#[test]
fn a_double_free_is_an_error_and_changes_nothing() {
    let mut pool = BlockPool::new(2).unwrap();
    let block = pool.allocate().unwrap();
    pool.free(block).unwrap();
    let before = format!("{pool:?}");
    refused(pool.free(block));
    refused(pool.free(1));
    refused(pool.free(2));
    refused(pool.free(-1));
    refused(pool.free(i64::MIN));
    assert_eq!(format!("{pool:?}"), before);
}

#[test]
fn a_shared_block_is_free_when_its_last_holder_leaves() {
    let mut pool = BlockPool::new(1).unwrap();
    let block = pool.allocate().unwrap();
    pool.share(block).unwrap();
    assert_eq!(pool.ref_count(block), Some(2));
    pool.free(block).unwrap();
    assert_eq!(pool.num_free(), 0);
    pool.free(block).unwrap();
    assert_eq!(pool.num_free(), 1);
    refused(pool.share(block));
    refused(pool.share(7));
    check(&pool);
}

#[test]
fn registered_content_is_found_until_it_is_evicted() {
    let mut pool = BlockPool::new(2).unwrap();
    let block = pool.allocate().unwrap();
    assert_eq!(pool.register(block, 77), Ok(true));
    assert_eq!(pool.lookup(77), Some(block));
    pool.free(block).unwrap();
    assert_eq!((pool.lookup(77), pool.num_free()), (Some(block), 2));
    check(&pool);
    pool.share(block).unwrap();
    assert_eq!(pool.num_free(), 1);
    pool.free(block).unwrap();
    assert_ne!(pool.allocate(), Ok(block), "a free block goes before a cached one");
    assert_eq!(pool.allocate(), Ok(block));
    assert_eq!(pool.lookup(77), None);
    assert!(!pool.is_registered(block));
    check(&pool);
}

#[test]
fn eviction_takes_the_least_recently_freed() {
    let mut pool = BlockPool::new(4).unwrap();
    for hash in 0..4 {
        let block = pool.allocate().unwrap();
        pool.register(block, hash).unwrap();
    }
    for block in [2, 0, 3, 1] {
        pool.free(block).unwrap();
    }
    pool.share(0).unwrap();
    pool.free(0).unwrap();
    check(&pool);
    let order: Vec<_> = (0..4).map(|_| pool.allocate().unwrap()).collect();
    assert_eq!(order, [2, 3, 1, 0]);
}

#[test]
fn an_eviction_is_known_before_it_happens() {
    let mut pool = BlockPool::new(3).unwrap();
    for hash in [70, 71] {
        let block = pool.allocate().unwrap();
        pool.register(block, hash).unwrap();
    }
    pool.free(1).unwrap();
    pool.free(0).unwrap();
    assert_eq!(pool.next_eviction(), None, "a free block comes first");
    assert_eq!(pool.allocate(), Ok(2));
    for (block, hash) in [(1, 71), (0, 70)] {
        assert_eq!((pool.next_eviction(), pool.block_hash(block)), (Some(block), Some(hash)));
        assert_eq!(pool.allocate(), Ok(block));
        assert_eq!(pool.block_hash(block), None);
    }
    assert_eq!(pool.next_eviction(), None, "nothing is left");
    assert_eq!(pool.allocate(), Err(Error::OutOfBlocks { num_blocks: 3 }));
    assert_eq!((pool.block_hash(-1), pool.block_hash(3)), (None, None));
}

#[test]
fn equal_content_is_registered_once() {
    let mut pool = BlockPool::new(2).unwrap();
    let (a, b) = (pool.allocate().unwrap(), pool.allocate().unwrap());
    assert_eq!(pool.register(a, 5), Ok(true));
    assert_eq!(pool.register(b, 5), Ok(false));
    assert_eq!(pool.lookup(5), Some(a));
    assert!(!pool.is_registered(b));
    refused(pool.register(a, 6));
    pool.free(b).unwrap();
    refused(pool.register(b, 6));
    check(&pool);
}

/// Registers two contents under one hash: the second block stays private to its holder in every operation.
#[test]
fn hash_collision_forced() {
    let mut pool = BlockPool::new(3).unwrap();
    let (first, second) = (pool.allocate().unwrap(), pool.allocate().unwrap());
    assert_eq!(pool.register(first, 7), Ok(true));
    assert_eq!(pool.register(second, 7), Ok(false));
    refused(pool.claim(second, 1));
    refused(pool.mark_draft(second));
    pool.free(second).unwrap();
    assert_eq!(pool.lookup(7), Some(first));
    assert_eq!(pool.allocate(), Ok(second), "it was free, not cached");
    pool.free(first).unwrap();
    assert_eq!(pool.lookup(7), Some(first));
    // The first is forgotten, and then the second may have the name.
    assert_eq!(pool.allocate(), Ok(2));
    assert_eq!(pool.allocate(), Ok(first));
    assert_eq!(pool.lookup(7), None);
    assert_eq!(pool.register(second, 7), Ok(true));
    check(&pool);
}

#[test]
fn overflow_of_the_holders_is_refused() {
    let mut pool = BlockPool::new(1).unwrap();
    let block = pool.allocate().unwrap();
    pool.blocks[0].ref_count = u32::MAX - 1;
    pool.share(block).unwrap();
    refused(pool.share(block));
    assert_eq!(pool.ref_count(block), Some(u32::MAX as usize));
    pool.free(block).unwrap();
    check(&pool);
}

#[test]
fn a_claim_has_one_holder_and_ends_with_the_mark_or_the_last_reference() {
    let mut pool = BlockPool::new(2).unwrap();
    let block = pool.allocate().unwrap();
    refused(pool.claim(block, 1));
    refused(pool.mark_draft(block));
    pool.register(block, 5).unwrap();
    assert_eq!((pool.claim(block, 1), pool.claim(block, 1), pool.claim(block, 2)), (Ok(true), Ok(true), Ok(false)));
    assert!(!pool.release_claim(block, 2));
    assert_eq!(pool.claimant(block), Some(1));
    check(&pool);
    assert!(pool.release_claim(block, 1));
    assert_eq!((pool.claim(block, u32::MAX), pool.claimant(block)), (Ok(false), None), "u32::MAX is no claimant");
    assert_eq!(pool.claim(block, 2), Ok(true));
    pool.free(block).unwrap();
    assert_eq!(pool.claimant(block), None);
    pool.share(block).unwrap();
    assert_eq!(pool.claim(block, 3), Ok(true));
    pool.mark_draft(block).unwrap();
    assert_eq!((pool.claimant(block), pool.has_draft(block)), (None, true));
    refused(pool.claim(block, 3));
    check(&pool);
}

#[test]
fn marks_do_not_outlive_their_content() {
    let mut pool = BlockPool::new(1).unwrap();
    let block = pool.allocate().unwrap();
    pool.register(block, 5).unwrap();
    pool.mark_draft(block).unwrap();
    pool.free(block).unwrap();
    assert!(pool.has_draft(block));
    pool.allocate().unwrap();
    assert!(!pool.has_draft(block) && !pool.is_registered(block));
    check(&pool);
}

#[test]
fn a_reset_forgets_everything_or_nothing() {
    let mut pool = BlockPool::new(3).unwrap();
    for hash in 0..2 {
        let block = pool.allocate().unwrap();
        pool.register(block, hash).unwrap();
    }
    pool.free(0).unwrap();
    assert!(!pool.reset_prefix_cache());
    assert_eq!(pool.lookup(0), Some(0));
    pool.free(1).unwrap();
    assert!(pool.reset_prefix_cache());
    assert_eq!((pool.lookup(0), pool.lookup(1), pool.num_free()), (None, None, 3));
    check(&pool);
}

#[test]
fn sizes_are_checked() {
    for num_blocks in [0, (1 << 31) + 1, usize::MAX] {
        assert!(matches!(BlockPool::new(num_blocks), Err(Error::InvalidConfig { field: "num_blocks", .. })));
    }
}

#[test]
fn the_check_sees_each_contradiction() {
    let mut sound = BlockPool::new(4).unwrap();
    for hash in 0..3 {
        let block = sound.allocate().unwrap();
        sound.register(block, hash).unwrap();
    }
    sound.claim(0, 9).unwrap();
    sound.free(2).unwrap();
    check(&sound);
    let breaks: [Damage; 9] = [
        ("a held block in a list", |pool| pool.lists.push_back(&mut pool.blocks, super::ListId::Free, 0)),
        ("a free block in no list", |pool| {
            assert!(pool.lists.pop_front(&mut pool.blocks, super::ListId::Free).is_some());
        }),
        ("a lost holder", |pool| pool.blocks[1].ref_count = 0),
        ("a holder of a free block", |pool| pool.blocks[3].ref_count = 1),
        ("valid draft KV of a block that is not registered", |pool| pool.blocks[3].has_draft = true),
        ("a claim on a marked block", |pool| pool.blocks[0].has_draft = true),
        ("a claim on a cached block", |pool| pool.blocks[2].claimant = 1),
        ("a wrong hash", |pool| pool.by_hash.remove(&mut pool.blocks, 1)),
        ("a hash of nothing", |pool| _ = pool.by_hash.insert(&mut pool.blocks, 99, 3)),
    ];
    for (name, damage) in breaks {
        let mut pool = sound.clone();
        damage(&mut pool);
        assert!(matches!(pool.check_integrity(), Err(Error::Integrity { .. })), "{name}");
    }
}
