//! Tests of blocks that a host keeps elsewhere: what it copies out is complete, and what it copies in is used like
//! blocks that were computed. The simulated device panics if KV is not that of its tokens.

use std::collections::HashMap;

use specrs_core::scheduler::layout::FLAG_DRAFT_NON_FINITE;
use specrs_core::{BlockHasher, HostDrafters, KvEvent, PlanOutcome, SchedulerConfig, SuffixSettings};

use crate::common::driver::{Ask, Driver};
use crate::snapshots::{branch, hits, sparse, stateful};
use crate::{ask, drafting, small, speculative};

/// Copy of a block: its target KV, and its draft KV with the token after the block for which that is valid.
type Copy = (Vec<u64>, Option<(u32, Vec<u64>)>);

/// Copies by hash, as a disk has them.
#[derive(Default)]
struct Disk {
    copies: HashMap<u128, Copy>,
    /// Snapshots of states.
    snapshots: HashMap<u128, (usize, u64)>,
    saved: usize,
    loaded: usize,
    loaded_snapshots: usize,
    /// Number of blocks to copy in at a time.
    at_once: usize,
}

impl Disk {
    fn add(&self, driver: &mut Driver, id: i64, ask: &Ask) {
        driver.add(id, ask).unwrap();
        let (cached, missing) = driver.scheduler.missing_prefix(id).unwrap();
        let stored = missing.iter().take_while(|hash| self.copies.contains_key(hash)).count();
        driver.scheduler.note_stored(id, cached + stored).unwrap();
        let has_states = driver.scheduler.config().num_snapshots > 0;
        if if has_states { self.goal(driver, id).is_some() } else { stored > 0 } {
            driver.scheduler.await_load(id).unwrap();
        }
    }

    /// Returns the number of blocks of the longest prefix hit that loads from the host make possible, and the hash of
    /// its last block; `None` if loads make the hit no longer.
    fn goal(&self, driver: &mut Driver, id: i64) -> Option<(usize, u128)> {
        if driver.scheduler.config().num_snapshots == 0 {
            return None;
        }
        let (cached, missing) = driver.scheduler.missing_prefix(id).unwrap();
        let known = cached + missing.iter().take_while(|hash| self.copies.contains_key(hash)).count();
        let (hit, ends) = driver.scheduler.missing_snapshots(id).unwrap();
        let last = ends[..known - hit].iter().rposition(|hash| self.snapshots.contains_key(hash))?;
        Some((hit + last + 1, ends[last]))
    }

    fn save(&mut self, driver: &mut Driver) {
        while let Some(due) = driver.scheduler.take_due_block() {
            let (target, draft) = driver.device.block(due.block);
            let draft = due.draft.map(|next| (next, draft));
            if !due.replaces && draft.is_none() && self.copies.get(&due.hash).is_some_and(|copy| copy.1.is_some()) {
                continue;
            }
            self.copies.insert(due.hash, (target, draft));
            self.saved += 1;
        }
        while let Some(due) = driver.scheduler.take_due_snapshot() {
            let snapshot = driver.device.snapshots[due.slot as usize];
            assert_eq!(snapshot.0, due.len);
            self.snapshots.insert(due.hash, snapshot);
        }
    }

    fn load(&mut self, driver: &mut Driver) -> bool {
        let loads = driver.scheduler.take_loads();
        for &id in &loads {
            let (first, mut missing) = driver.scheduler.missing_prefix(id).unwrap();
            let goal = self.goal(driver, id);
            if driver.scheduler.config().num_snapshots > 0 {
                missing.truncate(goal.map_or(0, |(blocks, _)| blocks.saturating_sub(first)));
            }
            let copies: Vec<_> = missing.iter().map_while(|hash| self.copies.get(hash)).take(self.at_once).collect();
            let drafts: Vec<_> = copies.iter().map(|(_, draft)| draft.as_ref().map(|&(next, _)| next)).collect();
            let blocks = driver.scheduler.adopt(id, first, &drafts).unwrap();
            for ((target, draft), block) in copies.iter().zip(&blocks) {
                if let Some(block) = *block {
                    driver.device.fill_block(block, target, draft.as_ref().map(|(_, kv)| &kv[..]));
                    self.loaded += 1;
                }
            }
            driver.check();
            if blocks.len() < copies.len() || copies.len() < self.at_once {
                if let Some((blocks, hash)) = goal
                    && let Some(slot) = driver.scheduler.adopt_snapshot(id, blocks).unwrap()
                {
                    driver.device.snapshots[slot as usize] = self.snapshots[&hash];
                    self.loaded_snapshots += 1;
                    driver.check();
                }
                driver.scheduler.end_load(id);
            }
        }
        !loads.is_empty()
    }

    /// Runs a driver until it is idle.
    fn run(&mut self, driver: &mut Driver) {
        loop {
            let outcome = driver.plan();
            if self.load(driver) {
                continue;
            }
            match outcome {
                PlanOutcome::Idle => break,
                _ if driver.in_flight.len() == driver.scheduler.config().max_in_flight => {}
                PlanOutcome::Step(_) => continue,
                PlanOutcome::SettleFirst => {}
            }
            driver.settle();
            self.save(driver);
        }
        while !driver.in_flight.is_empty() {
            driver.settle();
            self.save(driver);
        }
        driver.run();
    }
}

fn saving(config: &SchedulerConfig) -> Driver {
    Driver::new(SchedulerConfig { enable_block_saves: true, enable_kv_cache_events: true, ..config.clone() })
}

#[test]
fn what_is_saved_serves_other_schedulers() {
    for (name, config) in [
        ("target", small()),
        ("draft", speculative()),
        ("states", stateful(small())),
        ("both", stateful(speculative())),
    ] {
        for (max_in_flight, num_blocks) in [(1, 18), (2, 24), (1, 64)] {
            let config = SchedulerConfig { max_in_flight, num_blocks, ..config.clone() };
            let mut disk = Disk { at_once: 3, ..Disk::default() };
            let mut cached = [0, 0];
            for (round, cached) in cached.iter_mut().enumerate() {
                let mut driver = saving(&config);
                for id in 0..20 {
                    let seed = (id as u64 * 5 + round as u64) % 7;
                    let extra_keys = if id % 5 == 0 { vec![(6, vec![id as u8])] } else { vec![] };
                    let k = config.num_speculative_tokens;
                    disk.add(&mut driver, id, &Ask { k, extra_keys, ..ask(seed, 9 + id as usize % 8, 24) });
                }
                if config.num_speculative_tokens > 0 {
                    driver.device.faults.insert(3, FLAG_DRAFT_NON_FINITE);
                }
                disk.run(&mut driver);
                *cached = driver.scheduler.num_cached_tokens();
            }
            assert!(disk.saved > 50 && disk.loaded > 5, "{name}: {} saved, {} loaded", disk.saved, disk.loaded);
            assert!(cached[1] > 0);
            assert_eq!(disk.loaded_snapshots > 0, config.num_snapshots > 0, "{name}");
            if config.num_speculative_tokens > 0 {
                assert!(disk.copies.values().any(|copy| copy.1.is_some()), "{name}: draft KV");
            }
        }
    }
}

#[test]
fn a_block_is_due_when_it_is_complete() {
    let mut driver = saving(&speculative());
    driver.add(0, &drafting(1, 21, 12)).unwrap();
    let mut taken = vec![];
    while driver.step() {
        while let Some(due) = driver.scheduler.take_due_block() {
            assert!(driver.scheduler.block_pool().is_registered(due.block));
            taken.push((due.hash, due.draft.is_some(), due.replaces));
        }
    }
    let complete = taken.iter().filter(|taken| taken.1).count();
    assert_eq!(complete, 7, "{taken:?}");
    assert!(taken.iter().all(|taken| !taken.2));
    assert_eq!(taken.len(), 8, "the last one at its request's end, without draft KV");
    assert!(!driver.scheduler.has_due());
    driver.add(1, &drafting(1, 21, 12)).unwrap();
    driver.run();
    let again: Vec<_> = std::iter::from_fn(|| driver.scheduler.take_due_block()).collect();
    assert!(again.iter().all(|due| due.draft.is_some()), "a copy of it is there: {again:?}");
}

#[test]
fn nothing_is_due_unless_enabled_nor_of_private_prompts() {
    let mut driver = Driver::new(speculative());
    driver.add(0, &drafting(1, 21, 12)).unwrap();
    driver.run();
    assert!(!driver.scheduler.has_due() && driver.scheduler.take_due_block().is_none());
    let mut driver = saving(&speculative());
    driver.add(0, &Ask { tells_prompt: true, ..drafting(1, 21, 12) }).unwrap();
    driver.run();
    assert_eq!(driver.scheduler.take_due_block(), None);
}

#[test]
fn a_request_waits_until_it_could_be_admitted() {
    let config = SchedulerConfig { max_num_seqs: 1, ..small() };
    let mut driver = saving(&config);
    driver.add(0, &ask(1, 9, 8)).unwrap();
    driver.plan_step();
    driver.add(1, &ask(2, 9, 8)).unwrap();
    driver.scheduler.await_load(1).unwrap();
    while driver.outcomes[&0].finish == 0 {
        assert!(driver.scheduler.take_loads().is_empty(), "no row is free");
        driver.settle();
        driver.plan();
    }
    assert_eq!(driver.scheduler.take_loads(), [1]);
    assert_eq!((driver.plan(), driver.scheduler.take_loads()), (PlanOutcome::Idle, vec![1]), "until it is loaded");
    driver.scheduler.end_load(1);
    driver.run();
    driver.scheduler.end_load(1); // it has ended
}

#[test]
fn adopting_never_evicts_the_prefix_itself() {
    let config = SchedulerConfig { num_blocks: 8, max_model_len: 32, ..small() };
    let mut driver = saving(&config);
    driver.add(0, &ask(1, 17, 3)).unwrap();
    driver.run();
    let prompt = [ask(1, 17, 0).prompt, ask(9, 11, 0).prompt].concat();
    driver.add(1, &Ask { prompt, ..ask(0, 0, 2) }).unwrap();
    let (cached, missing) = driver.scheduler.missing_prefix(1).unwrap();
    assert_eq!((cached, missing.len()), (4, 2));
    driver.scheduler.take_kv_events();
    let blocks = driver.scheduler.adopt(1, cached, &[None, Some(u32::MAX)]).unwrap();
    driver.check();
    assert_eq!(blocks.iter().flatten().count(), 2);
    let pool = driver.scheduler.block_pool();
    assert_eq!(missing.iter().map(|&hash| pool.lookup(hash)).collect::<Vec<_>>(), blocks);
    assert_eq!(blocks.iter().map(|&block| pool.has_draft(block.unwrap())).collect::<Vec<_>>(), [false, true]);
    let events = driver.scheduler.take_kv_events();
    assert!(
        matches!(&events[..], [.., KvEvent::BlockStored { block_hashes, .. }] if *block_hashes == missing),
        "{events:?}"
    );
    assert_eq!(driver.scheduler.adopt(1, cached, &[None, None]).unwrap(), [None, None], "they are there");
    assert!(driver.scheduler.adopt(1, cached, &[None, None, None]).is_err(), "the last token is always fed");
    assert!(driver.scheduler.adopt(7, 0, &[]).is_err());
}

#[test]
fn outputs_are_kept_by_salt() {
    let host_drafters = HostDrafters::suffix(SuffixSettings::default());
    let config = SchedulerConfig { num_speculative_tokens: 3, host_drafters, ..small() };
    let mut driver = saving(&config);
    for (id, salt) in [(0, "a"), (1, "b")] {
        driver.add(id, &Ask { salt: salt.into(), ..drafting(1, 9, 20) }).unwrap();
    }
    driver.run();
    let outputs: Vec<_> = std::iter::from_fn(|| driver.scheduler.take_ended_output()).collect();
    assert_eq!(outputs.len(), 2);
    assert_ne!(outputs[0].salt, outputs[1].salt);
    let expected: Vec<u32> = driver.output(0).iter().map(|&token| token as u32).collect();
    assert!(outputs.iter().all(|output| output.token_ids == expected));
    let drafted = |salt: &str| {
        let mut driver = saving(&config);
        driver.scheduler.restore_output(outputs[0].salt, &outputs[0].token_ids);
        driver.add(0, &Ask { salt: salt.into(), ..drafting(1, 9, 20) }).unwrap();
        driver.run();
        driver.scheduler.acceptance().accepted_tokens()
    };
    assert_eq!(outputs[0].salt, BlockHasher::new(&config.hash_key).root(b"a"));
    let [same, other] = ["a", "b"].map(drafted);
    assert!(same > other + 5, "{same} and {other} drafts accepted");
}

/// Takes all due snapshots and returns their lengths and hashes.
fn due_snapshots(driver: &mut Driver) -> Vec<(usize, u128)> {
    std::iter::from_fn(|| driver.scheduler.take_due_snapshot()).map(|due| (due.len, due.hash)).collect()
}

#[test]
fn snapshots_of_a_prompt_are_due_at_once_and_the_last_one_of_an_output_at_its_end() {
    let mut driver = saving(&stateful(small()));
    driver.add(0, &ask(1, 22, 30)).unwrap();
    let mut before_end = vec![];
    while driver.outcomes[&0].finish == 0 {
        before_end.extend(due_snapshots(&mut driver).iter().map(|due| due.0));
        driver.step();
    }
    assert_eq!(before_end, [16, 20]);
    assert_eq!(due_snapshots(&mut driver).iter().map(|due| due.0).collect::<Vec<_>>(), [48]);
    assert!(!driver.scheduler.has_due() || driver.scheduler.take_due_block().is_some());
    // The host took none, and one of three slots has another snapshot now.
    let mut driver = saving(&SchedulerConfig { num_snapshots: 3, ..stateful(small()) });
    hits(&mut driver, &[ask(1, 22, 1), ask(2, 22, 1)]);
    assert_eq!(due_snapshots(&mut driver).iter().map(|due| due.0).collect::<Vec<_>>(), [20, 20, 16]);
    // A reset forgets them.
    hits(&mut driver, &[ask(3, 22, 1)]);
    assert!(driver.scheduler.reset_prefix_cache());
    assert!(due_snapshots(&mut driver).is_empty());
    let mut driver = Driver::new(stateful(small()));
    hits(&mut driver, &[ask(1, 22, 1)]);
    assert_eq!(driver.scheduler.take_due_snapshot(), None, "not enabled");
}

#[test]
fn a_snapshot_is_adopted_where_its_kv_is() {
    let mut driver = saving(&SchedulerConfig { num_snapshots: 2, ..stateful(small()) });
    driver.add(0, &ask(1, 22, 1)).unwrap();
    let (hit, ends) = driver.scheduler.missing_snapshots(0).unwrap();
    assert_eq!((hit, ends.len()), (0, 5));
    assert_eq!(driver.scheduler.adopt_snapshot(0, 5).unwrap(), None, "its KV is not cached");
    driver.scheduler.adopt(0, 0, &[None; 5]).unwrap();
    driver.scheduler.take_kv_events();
    let slot = driver.scheduler.adopt_snapshot(0, 5).unwrap();
    driver.check();
    assert_eq!(slot, Some(0));
    let events = driver.scheduler.take_kv_events();
    assert!(
        matches!(&events[..], [KvEvent::BlockStored { block_hashes, is_snapshot: true, .. }] if block_hashes[0] == ends[4]),
        "{events:?}"
    );
    assert_eq!(driver.scheduler.adopt_snapshot(0, 5).unwrap(), None, "it is there");
    assert_eq!(driver.scheduler.missing_snapshots(0).unwrap(), (5, vec![]));
    // The least recently used one gives way.
    assert_eq!(driver.scheduler.adopt_snapshot(0, 4).unwrap(), Some(1));
    assert_eq!(driver.scheduler.adopt_snapshot(0, 3).unwrap(), Some(0));
    assert_eq!(driver.scheduler.missing_snapshots(0).unwrap(), (4, ends[4..].to_vec()));
    assert_eq!(driver.scheduler.state_cache_stats().evictions, 1);
    assert!(due_snapshots(&mut driver).is_empty(), "the host has them");
    for wrong in [0, 6] {
        assert!(driver.scheduler.adopt_snapshot(0, wrong).is_err(), "{wrong} blocks");
    }
    assert!(driver.scheduler.adopt_snapshot(7, 1).is_err());
}

#[test]
fn where_kv_of_the_host_goes_further_than_a_snapshot_the_next_request_leaves_one() {
    let mut disk = Disk { at_once: 64, ..Disk::default() };
    let mut hit = |ask: Ask| {
        let mut driver = saving(&sparse(small()));
        disk.add(&mut driver, 0, &ask);
        disk.run(&mut driver);
        driver.scheduler.num_cached_tokens()
    };
    // Each in a process of its own, as `where_kv_goes_further_than_a_snapshot_the_next_request_leaves_one` is in one.
    let asks = [branch(20, 20, 2), branch(20, 20, 3), branch(20, 20, 4), branch(20, 20, 3)];
    assert_eq!(asks.map(&mut hit), [0, 0, 20, 36]);
}
