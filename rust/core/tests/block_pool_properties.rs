//! Comparison of the block pool with a model that keeps its state in plain vectors, over random operations on valid and
//! invalid blocks.

use proptest::prelude::*;
use proptest::test_runner::FileFailurePersistence;
use specrs_core::{BlockPool, Error};

/// State of one block, as the pool's documentation describes it.
#[derive(Clone, Default)]
struct Block {
    holders: usize,
    hash: Option<u128>,
    draft: bool,
    claimant: Option<u32>,
}

struct Model {
    blocks: Vec<Block>,
    /// Cached blocks, least recently freed first.
    cached: Vec<usize>,
}

#[derive(Clone, Debug)]
enum Op {
    Allocate,
    Share(i64),
    Free(i64),
    Register(i64, u128),
    MarkDraft(i64),
    Claim(i64, u32),
    ReleaseClaim(i64, u32),
    Reset,
}

const HASHES: u128 = 6;

fn op(num_blocks: i64) -> impl Strategy<Value = Op> {
    let block = -1..=num_blocks;
    let claimant = 0..3_u32;
    prop_oneof![
        4 => Just(Op::Allocate),
        2 => block.clone().prop_map(Op::Share),
        4 => block.clone().prop_map(Op::Free),
        4 => (block.clone(), 0..HASHES).prop_map(|(block, hash)| Op::Register(block, hash)),
        2 => block.clone().prop_map(Op::MarkDraft),
        3 => (block.clone(), claimant.clone()).prop_map(|(block, claimant)| Op::Claim(block, claimant)),
        1 => (block, claimant).prop_map(|(block, claimant)| Op::ReleaseClaim(block, claimant)),
        1 => Just(Op::Reset),
    ]
}

fn case() -> impl Strategy<Value = (usize, Vec<Op>)> {
    (1..8_usize).prop_flat_map(|num_blocks| (Just(num_blocks), prop::collection::vec(op(num_blocks as i64), 1..200)))
}

impl Model {
    /// Returns the block if it exists and `allowed` is true for it.
    fn get(&mut self, block: i64, allowed: impl Fn(&Block) -> bool) -> Option<(usize, &mut Block)> {
        let id = usize::try_from(block).ok()?;
        self.blocks.get_mut(id).filter(|block| allowed(block)).map(|block| (id, block))
    }

    fn by_hash(&self, hash: u128) -> Option<usize> {
        self.blocks.iter().position(|block| block.hash == Some(hash))
    }

    fn free(&self) -> Vec<usize> {
        (0..self.blocks.len()).filter(|&id| self.blocks[id].holders == 0 && self.blocks[id].hash.is_none()).collect()
    }

    fn apply(&mut self, op: &Op, pool: &mut BlockPool) -> Result<(), TestCaseError> {
        match *op {
            Op::Allocate => self.allocate(pool.allocate())?,
            Op::Share(block) => {
                let done = pool.share(block);
                let Some((id, block)) = self.get(block, |b| b.holders > 0 || b.hash.is_some()) else {
                    return refused(&done);
                };
                block.holders += 1;
                self.cached.retain(|&other| other != id);
                prop_assert_eq!(done, Ok(()));
            }
            Op::Free(block) => {
                let done = pool.free(block);
                let Some((id, block)) = self.get(block, |b| b.holders > 0) else { return refused(&done) };
                block.holders -= 1;
                if block.holders == 0 {
                    block.claimant = None;
                    if block.hash.is_some() {
                        self.cached.push(id);
                    }
                }
                prop_assert_eq!(done, Ok(()));
            }
            Op::Register(block, hash) => {
                let done = pool.register(block, hash);
                let known = self.by_hash(hash).is_some();
                let Some((_, block)) = self.get(block, |b| b.holders > 0 && b.hash.is_none()) else {
                    return refused(&done);
                };
                if !known {
                    block.hash = Some(hash);
                }
                prop_assert_eq!(done, Ok(!known));
            }
            Op::MarkDraft(block) => {
                let done = pool.mark_draft(block);
                let Some((_, block)) = self.get(block, |b| b.holders > 0 && b.hash.is_some()) else {
                    return refused(&done);
                };
                (block.draft, block.claimant) = (true, None);
                prop_assert_eq!(done, Ok(()));
            }
            Op::Claim(block, claimant) => {
                let done = pool.claim(block, claimant);
                let Some((_, block)) = self.get(block, |b| b.holders > 0 && b.hash.is_some() && !b.draft) else {
                    return refused(&done);
                };
                let holder = *block.claimant.get_or_insert(claimant);
                prop_assert_eq!(done, Ok(holder == claimant));
            }
            Op::ReleaseClaim(block, claimant) => {
                let done = pool.release_claim(block, claimant);
                let claim = self.get(block, |b| b.claimant == Some(claimant));
                prop_assert_eq!(done, claim.is_some());
                if let Some((_, block)) = claim {
                    block.claimant = None;
                }
            }
            Op::Reset => {
                let idle = self.blocks.iter().all(|block| block.holders == 0);
                prop_assert_eq!(pool.reset_prefix_cache(), idle);
                if idle {
                    self.blocks.fill(Block::default());
                    self.cached.clear();
                }
            }
        }
        Ok(())
    }

    /// Checks an allocation. Any free block is right; without free blocks it must be the least recently freed cached
    /// block.
    fn allocate(&mut self, done: specrs_core::Result<i64>) -> Result<(), TestCaseError> {
        let free = self.free();
        if free.is_empty() && self.cached.is_empty() {
            prop_assert_eq!(done, Err(Error::OutOfBlocks { num_blocks: self.blocks.len() }));
            return Ok(());
        }
        let id = done.map_err(|error| TestCaseError::fail(error.to_string()))? as usize;
        if free.is_empty() {
            prop_assert_eq!(id, self.cached.remove(0));
        } else {
            prop_assert!(free.contains(&id), "block {} was not free", id);
        }
        self.blocks[id] = Block { holders: 1, ..Block::default() };
        Ok(())
    }

    /// Compares everything that the pool shows.
    fn compare(&self, pool: &BlockPool) -> Result<(), TestCaseError> {
        for (id, block) in self.blocks.iter().enumerate() {
            let id = id as i64;
            prop_assert_eq!(pool.ref_count(id), Some(block.holders), "holders of block {}", id);
            prop_assert_eq!(pool.is_registered(id), block.hash.is_some(), "registration of block {}", id);
            prop_assert_eq!(pool.has_draft(id), block.draft, "valid draft KV of block {}", id);
            prop_assert_eq!(pool.claimant(id), block.claimant, "claim on block {}", id);
        }
        for hash in 0..HASHES {
            prop_assert_eq!(pool.lookup(hash), self.by_hash(hash).map(|id| id as i64), "hash {}", hash);
        }
        for outside in [-1, self.blocks.len() as i64, i64::MAX, i64::MIN] {
            prop_assert_eq!((pool.ref_count(outside), pool.claimant(outside)), (None, None));
            prop_assert!(!pool.is_registered(outside) && !pool.has_draft(outside));
        }
        prop_assert_eq!(pool.num_free(), self.free().len() + self.cached.len());
        prop_assert_eq!(pool.num_blocks(), self.blocks.len());
        pool.check_integrity().map_err(|error| TestCaseError::fail(error.to_string()))
    }
}

fn refused<T: std::fmt::Debug>(done: &specrs_core::Result<T>) -> Result<(), TestCaseError> {
    prop_assert!(matches!(done, Err(Error::InvalidBlock { .. })), "{:?}", done);
    Ok(())
}

/// Returns the settings of the test. `SPECRS_OPERATIONS` sets the total number of operations, 100,000 by default.
fn config() -> ProptestConfig {
    let operations = std::env::var("SPECRS_OPERATIONS").ok().and_then(|count| count.parse().ok()).unwrap_or(100_000);
    let cases = operations / 100; // the mean length of a case
    let regressions = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/regressions/block_pool.txt");
    let failure_persistence = Some(Box::new(FileFailurePersistence::Direct(regressions)) as Box<_>);
    ProptestConfig { cases, failure_persistence, ..ProptestConfig::default() }
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn the_pool_does_what_the_model_does((num_blocks, ops) in case()) {
        let mut pool = BlockPool::new(num_blocks).expect("a valid size");
        let mut model = Model { blocks: vec![Block::default(); num_blocks], cached: Vec::new() };
        model.compare(&pool)?;
        for op in &ops {
            model.apply(op, &mut pool)?;
            model.compare(&pool)?;
        }
    }
}
