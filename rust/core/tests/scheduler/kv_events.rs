//! Tests of KV events: a follower knows which blocks are cached, and can copy KV out before it is overwritten.

use std::collections::HashMap;

use specrs_core::{BlockHasher, ExtraKey, KvEvent, SchedulerConfig};

use crate::common::driver::{Ask, Driver};
use crate::{ask, drafting, small, speculative};

/// Cached blocks according to the events: by hash the block, and its target KV when it was stored.
#[derive(Default)]
struct Follower {
    cached: HashMap<u128, (i64, Vec<u64>)>,
    removed: usize,
    /// Number of removed blocks whose draft KV was valid.
    drafted: usize,
}

impl Follower {
    fn follow(&mut self, driver: &mut Driver) {
        let block_size = driver.scheduler.config().block_size;
        for event in driver.scheduler.take_kv_events() {
            match event {
                KvEvent::BlockStored { blocks, block_hashes, parent_block_hash, token_ids, extra_keys, .. } => {
                    assert_eq!(blocks.len(), block_hashes.len());
                    let hasher = BlockHasher::new(&driver.scheduler.config().hash_key);
                    let tokens: Vec<i64> = token_ids.into_iter().map(i64::from).collect();
                    let starts = (0..).step_by(block_size);
                    let keys: Vec<_> = starts
                        .zip(&extra_keys)
                        .flat_map(|(start, keys)| keys.iter().map(move |(at, key)| (start + at, key)))
                        .map(|(position, key)| ExtraKey { position, key })
                        .collect();
                    let parent = parent_block_hash.unwrap_or(hasher.root(b""));
                    assert_eq!(hasher.hash_blocks(parent, &tokens, block_size, &keys).unwrap(), block_hashes);
                    for (&block, hash) in blocks.iter().zip(block_hashes) {
                        let kv = driver.device.target_block(block).to_vec();
                        assert!(self.cached.insert(hash, (block, kv)).is_none(), "stored twice");
                    }
                }
                KvEvent::BlockRemoved { blocks, block_hashes, has_draft, .. } => {
                    assert_eq!(has_draft.len(), blocks.len());
                    self.drafted += has_draft.into_iter().filter(|&drafted| drafted).count();
                    for (block, hash) in blocks.iter().zip(block_hashes) {
                        let (stored, kv) = self.cached.remove(&hash).expect("it was stored");
                        assert_eq!(stored, *block);
                        assert_eq!(driver.device.target_block(*block), kv, "its KV can still be copied out");
                        self.removed += 1;
                    }
                }
                KvEvent::AllBlocksCleared => self.cached.clear(),
                other => panic!("{other:?}"),
            }
        }
        let pool = driver.scheduler.block_pool();
        for (&hash, &(block, _)) in &self.cached {
            assert_eq!(pool.lookup(hash), Some(block));
        }
        let registered = (0..pool.num_blocks() as i64).filter(|&block| pool.is_registered(block)).count();
        assert_eq!(self.cached.len(), registered, "all that is cached was told");
    }
}

fn events(config: &SchedulerConfig) -> Driver {
    Driver::new(SchedulerConfig { enable_kv_cache_events: true, ..config.clone() })
}

#[test]
fn a_follower_knows_what_is_cached() {
    for (max_in_flight, num_blocks) in [(1, 20), (2, 20), (3, 26)] {
        let mut driver = events(&SchedulerConfig { num_blocks, max_in_flight, ..speculative() });
        let mut follower = Follower::default();
        for id in 0..40 {
            let extra_keys = if id % 5 == 0 { vec![(6, vec![id as u8])] } else { vec![] };
            driver.add(id, &Ask { extra_keys, ..drafting(id as u64 % 7, 9 + id as usize % 8, 24) }).unwrap();
        }
        // By hand, because the events of a plan are taken before its step executes.
        loop {
            let outcome = driver.scheduler.plan(&mut driver.record).unwrap();
            follower.follow(&mut driver);
            match outcome {
                specrs_core::PlanOutcome::Step(header) => {
                    let reports = driver.device.execute(&driver.scheduler, header, &driver.record);
                    driver.in_flight.push_back((header, reports));
                }
                specrs_core::PlanOutcome::Idle => break,
                specrs_core::PlanOutcome::SettleFirst => {
                    driver.settle();
                    follower.follow(&mut driver);
                }
            }
        }
        assert!(follower.removed > 50, "{} evictions", follower.removed);
        assert!((1..follower.removed).contains(&follower.drafted), "a text's last blocks have no draft KV");
        assert!(driver.scheduler.reset_prefix_cache());
        follower.follow(&mut driver);
        assert!(follower.cached.is_empty());
    }
}

#[test]
fn a_chain_can_be_computed_from_its_events() {
    let config = SchedulerConfig { hash_key: [9; 16], max_num_batched_tokens: 64, ..small() };
    let mut driver = events(&config);
    let keys = [(0, b"adapter".to_vec()), (9, b"image".to_vec())];
    let request = Ask { extra_keys: keys.to_vec(), ..ask(1, 13, 4) };
    driver.add(0, &request).unwrap();
    driver.run();
    let hasher = BlockHasher::new(&[9; 16]);
    let tokens: Vec<i64> = request.prompt.iter().chain(driver.output(0)).copied().collect();
    let keys: Vec<_> = keys.iter().map(|&(position, ref key)| ExtraKey { position, key }).collect();
    let expected = hasher.hash_blocks(hasher.root(b""), &tokens[..16], 4, &keys).unwrap();
    let (mut hashes, mut told, mut extra) = (vec![], vec![], vec![]);
    for event in driver.scheduler.take_kv_events() {
        let KvEvent::BlockStored { block_hashes, parent_block_hash, token_ids, extra_keys, .. } = event else {
            panic!("{event:?}")
        };
        assert_eq!(parent_block_hash, hashes.last().copied());
        hashes.extend(block_hashes);
        told.extend(token_ids.into_iter().map(i64::from));
        extra.extend(extra_keys);
    }
    assert_eq!((hashes, told), (expected, tokens[..16].to_vec()));
    let key = |offset: usize, key: &[u8]| vec![(offset, key.into())];
    assert_eq!(extra, [key(0, b"adapter"), vec![], key(1, b"image"), vec![]]);
    assert_eq!(driver.scheduler.take_kv_events(), [], "taken once");
}

#[test]
fn events_that_are_not_taken_are_lost_and_that_is_reported() {
    let mut driver = events(&SchedulerConfig { num_blocks: 10, max_model_len: 24, ..small() });
    for id in 0..30 {
        driver.add(id, &ask(id as u64, 9, 8)).unwrap();
    }
    driver.run();
    let events = driver.scheduler.take_kv_events();
    assert_eq!(events[0], KvEvent::AllBlocksCleared);
    let mut blocks = 0;
    for event in &events[1..] {
        blocks += match event {
            KvEvent::BlockStored { blocks, .. } | KvEvent::BlockRemoved { blocks, .. } => blocks.len(),
            _ => panic!("{event:?}"),
        };
    }
    assert!((1..=20).contains(&blocks), "{blocks} of at most 20");
}

#[test]
fn there_are_none_unless_enabled() {
    let mut driver = Driver::new(SchedulerConfig { num_blocks: 10, max_model_len: 24, ..small() });
    for id in 0..9 {
        driver.add(id, &ask(id as u64, 9, 8)).unwrap();
    }
    driver.run();
    assert!(driver.scheduler.reset_prefix_cache());
    assert_eq!(driver.scheduler.take_kv_events(), []);
}
