//! Tests of the places where snapshots of states are written, and of prefix hits that end at one.

use specrs_core::{KvEvent, Lora, SchedulerConfig};
use std::collections::BTreeSet;

use crate::common::driver::{Ask, Driver};
use crate::{ask, drafting, small, speculative};

/// Returns `config` for a target with states: 8 slots, snapshots every 16 tokens of a prompt and 8 of an output.
pub(crate) fn stateful(config: SchedulerConfig) -> SchedulerConfig {
    SchedulerConfig { num_snapshots: 8, snapshot_interval: 16, decode_snapshot_interval: 8, ..config }
}

/// Returns the settings of `stateful`, with no snapshot on the way to a prompt's end.
pub(crate) fn sparse(config: SchedulerConfig) -> SchedulerConfig {
    SchedulerConfig { snapshot_interval: 64, ..stateful(config) }
}

/// Returns the first `shared` tokens of one prompt, followed by `own` tokens of another.
pub(crate) fn branch(shared: usize, own: usize, seed: u64) -> Ask {
    let mut asked = ask(1, shared, 1);
    asked.prompt.extend(ask(seed, own, 1).prompt);
    asked
}

/// Runs requests one after the other and returns the number of cached tokens that each found.
pub(crate) fn hits(driver: &mut Driver, asks: &[Ask]) -> Vec<u64> {
    let found = |(id, ask): (usize, &Ask)| {
        let before = driver.scheduler.num_cached_tokens();
        driver.add(id as i64, ask).unwrap();
        driver.run();
        driver.scheduler.num_cached_tokens() - before
    };
    asks.iter().enumerate().map(found).collect()
}

#[test]
fn a_hit_ends_at_the_last_block_of_the_prompt_with_and_without_drafts() {
    for (config, ask) in [(small(), ask as fn(u64, usize, usize) -> Ask), (speculative(), drafting)] {
        for (len, hit) in [(4, 0), (5, 4), (8, 4), (30, 28), (32, 28)] {
            let mut driver = Driver::new(stateful(config.clone()));
            assert_eq!(hits(&mut driver, &[ask(1, len, 3), ask(1, len, 3)]), [0, hit], "prompt of {len} tokens");
        }
    }
}

#[test]
fn long_prompts_have_snapshots_on_the_way() {
    let mut driver = Driver::new(stateful(small()));
    assert_eq!(hits(&mut driver, &[ask(1, 60, 1), branch(40, 20, 2), branch(20, 3, 3)]), [0, 32, 16]);
    let written = |driver: &Driver| {
        let header = driver.steps[0];
        driver.section("snapshot_len", header.num_snapshots).to_vec()
    };
    let mut driver = Driver::new(stateful(small()));
    driver.add(0, &ask(1, 32, 1)).unwrap();
    driver.plan_step();
    assert_eq!(written(&driver), [16, 28]);
}

#[test]
fn where_kv_goes_further_than_a_snapshot_the_next_request_leaves_one() {
    let mut driver = Driver::new(sparse(small()));
    let asks = [branch(20, 20, 2), branch(20, 20, 3), branch(20, 20, 4), branch(20, 20, 3)];
    assert_eq!(hits(&mut driver, &asks), [0, 0, 20, 36]);
}

#[test]
fn a_snapshot_serves_its_salt_and_its_adapter_alone() {
    let adapter = |id| Some(Lora { id, name: "adapter".into() });
    let tenants = [(&b""[..], None), (b"a", None), (b"", adapter(1)), (b"a", adapter(1)), (b"", adapter(2))];
    let mut driver =
        Driver::new(SchedulerConfig { max_loras: 1, num_blocks: 256, num_snapshots: 64, ..sparse(small()) });
    let mut id = 0;
    for (salt, lora) in tenants {
        // The second request leaves a snapshot where the others' KV goes further. All tenants have the same texts, so
        // it could have begun with that of an earlier tenant.
        let found = [2, 3, 4].map(|seed| {
            let before = driver.scheduler.num_cached_tokens();
            driver.add(id, &Ask { salt: salt.to_vec(), lora: lora.clone(), ..branch(20, 20, seed) }).unwrap();
            driver.run();
            id += 1;
            driver.scheduler.num_cached_tokens() - before
        });
        assert_eq!(found, [0, 0, 20], "salt {salt:?}, adapter {lora:?}");
    }
}

#[test]
fn requests_that_come_together_share_their_beginning() {
    let mut driver = Driver::new(sparse(small()));
    for (id, seed) in [(0, 2), (1, 3), (2, 4)] {
        driver.add(id, &branch(24, 6, seed)).unwrap();
    }
    driver.add(3, &branch(24, 6, 2)).unwrap();
    let first = driver.plan_step();
    assert_eq!((first.num_prefill, first.num_prefill_tokens), (1, 30), "the others wait");
    assert_eq!(driver.section("snapshot_len", first.num_snapshots), [24, 28]);
    driver.run();
    assert_eq!(driver.scheduler.num_cached_tokens(), 24 + 24 + 28);
    assert_eq!(driver.scheduler.state_cache_stats().hits, 3);
}

#[test]
fn a_decoding_row_keeps_its_last_snapshot_alone() {
    for config in [small(), SchedulerConfig { max_in_flight: 2, ..speculative() }] {
        let mut driver = Driver::new(stateful(config));
        driver.add(0, &drafting(1, 6, 50)).unwrap_or_else(|_| driver.add(0, &ask(1, 6, 50)).unwrap());
        driver.run();
        let stats = driver.scheduler.state_cache_stats();
        // At 4, the prompt's last block, and at 48; the state never saw the last token.
        assert_eq!((stats.stored, stats.num_cached, stats.evictions), (7, 2, 0));
        let mut longer = ask(1, 6, 1);
        longer.prompt.extend(driver.output(0));
        longer.prompt.push(3);
        driver.add(1, &longer).unwrap();
        driver.run();
        assert_eq!(driver.scheduler.num_cached_tokens(), 48);
    }
}

#[test]
fn a_preempted_request_goes_on_from_its_last_snapshot() {
    let mut driver = Driver::new(stateful(small()));
    driver.add(0, &ask(1, 6, 40)).unwrap();
    while driver.output(0).len() < 25 {
        driver.step();
    }
    driver.preempt(0).unwrap();
    driver.plan_step();
    assert_eq!(driver.section("admit_num_cached", 1), [24]);
    driver.run();
}

#[test]
fn a_snapshot_leaves_with_the_block_at_its_end() {
    let config = SchedulerConfig { num_blocks: 16, ..small() };
    let mut driver = Driver::new(sparse(config));
    assert_eq!(hits(&mut driver, &[ask(1, 30, 1), ask(2, 60, 1), ask(1, 30, 1)]), [0, 0, 0]);
    let stats = driver.scheduler.state_cache_stats();
    // One of the first prompt's blocks is left, at whose end the third request writes another.
    assert_eq!((stats.stored, stats.evictions), (4, 2));
}

#[test]
fn the_least_recently_used_snapshot_gives_way_first() {
    let config = SchedulerConfig { num_snapshots: 2, ..sparse(small()) };
    let mut driver = Driver::new(config);
    let asks = [ask(1, 30, 1), ask(2, 30, 1), ask(1, 30, 1), ask(3, 30, 1), ask(1, 30, 1), ask(2, 30, 1)];
    assert_eq!(hits(&mut driver, &asks), [0, 0, 28, 0, 28, 0]);
}

#[test]
fn nothing_is_written_for_requests_whose_blocks_nobody_finds() {
    let mut driver = Driver::new(stateful(small()));
    assert_eq!(hits(&mut driver, &[Ask { tells_prompt: true, ..ask(1, 30, 20) }, ask(1, 30, 1)]), [0, 0]);
    assert_eq!(driver.steps.iter().map(|header| header.num_snapshots).sum::<usize>(), 2, "the second's, at 16 and 28");
}

#[test]
fn a_reset_forgets_snapshots() {
    let mut driver = Driver::new(stateful(small()));
    assert_eq!(hits(&mut driver, &[ask(1, 30, 1)]), [0]);
    assert!(driver.scheduler.reset_prefix_cache());
    driver.check();
    assert_eq!(driver.scheduler.state_cache_stats().num_cached, 0);
    driver.add(7, &ask(1, 30, 1)).unwrap();
    driver.run();
    assert_eq!(driver.scheduler.num_cached_tokens(), 0);
}

/// Takes the events since the last call. Returns `+` or `-` and the slot for each snapshot that they name.
fn told(driver: &mut Driver) -> Vec<(char, i64)> {
    let change = |event: &KvEvent| -> Vec<(char, i64)> {
        match event {
            KvEvent::BlockStored { blocks, is_snapshot: true, .. } => blocks.iter().map(|&slot| ('+', slot)).collect(),
            KvEvent::BlockRemoved { blocks, is_snapshot: true, .. } => blocks.iter().map(|&slot| ('-', slot)).collect(),
            _ => vec![],
        }
    };
    driver.scheduler.take_kv_events().iter().flat_map(change).collect()
}

#[test]
fn events_name_snapshots_with_the_block_at_their_end() {
    let config = SchedulerConfig { num_snapshots: 2, enable_kv_cache_events: true, ..sparse(small()) };
    let mut driver = Driver::new(config.clone());
    driver.add(0, &ask(1, 30, 1)).unwrap();
    driver.run();
    let events = driver.scheduler.take_kv_events();
    let [KvEvent::BlockStored { block_hashes: all, is_snapshot: false, .. }, snapshot] = &events[..] else {
        panic!("{events:?}");
    };
    let KvEvent::BlockStored { blocks, block_hashes, parent_block_hash, token_ids, is_snapshot: true, .. } = snapshot
    else {
        panic!("{snapshot:?}");
    };
    assert_eq!((&blocks[..], block_hashes[0], *parent_block_hash), (&[0][..], all[6], Some(all[5])));
    assert_eq!(token_ids.iter().map(|&token| i64::from(token)).collect::<Vec<_>>(), ask(1, 30, 1).prompt[24..28]);

    hits(&mut driver, &[ask(2, 30, 1), ask(3, 30, 1)]);
    assert_eq!(told(&mut driver), [('+', 1), ('-', 0), ('+', 0)]);
    // With the KV at its end, and while a row decodes.
    let mut driver = Driver::new(SchedulerConfig { num_blocks: 16, num_snapshots: 8, ..config });
    assert_eq!(hits(&mut driver, &[ask(1, 30, 1), ask(2, 40, 22)]), [0, 0]);
    let (events, mut held) = (told(&mut driver), BTreeSet::new());
    for &(change, slot) in &events {
        // A slot is told free before it is told taken again.
        assert!(if change == '+' { held.insert(slot) } else { held.remove(&slot) }, "{events:?}");
    }
    assert_eq!(events.iter().filter(|event| event.0 == '-').count(), 2, "{events:?}");
    assert_eq!(held.len(), 2, "{events:?}");
}
