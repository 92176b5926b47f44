//! Tests of several KV groups, whose layers have their own block tables in one pool. Blocks outside a group's window
//! return to the pool, and a prefix is found only if every group has its part of it.

use specrs_core::{Drafter, Error, PlanOutcome, Scheduler, SchedulerConfig};

use crate::common::driver::{Ask, Driver};
use crate::{ask, drafting, small, speculative};

/// Returns settings with three groups: layers that attend to everything, to the last 8 positions, and to the last 5;
/// blocks of 4.
fn grouped() -> SchedulerConfig {
    SchedulerConfig { num_blocks: 80, window_groups: vec![8, 5], ..speculative() }
}

fn cached(driver: &Driver) -> u64 {
    driver.scheduler.num_cached_tokens()
}

fn num_held(driver: &Driver) -> usize {
    driver.scheduler.num_blocks() - driver.scheduler.num_free_blocks()
}

/// Returns for each block of a request's table in a group whether it returned to the pool.
fn gone(driver: &Driver, id: i64, group: usize) -> Vec<bool> {
    let table = driver.scheduler.group_block_table(id, group).unwrap();
    table.iter().map(|&block| block < 0).collect()
}

#[test]
fn each_group_gives_back_what_leaves_its_window() {
    let mut driver = Driver::new(grouped());
    driver.add(0, &ask(1, 20, 30)).unwrap();
    driver.plan_step();
    driver.settle();
    // 21 tokens: the next query is at 20 and sees [13, 20] in group 1, [16, 20] in group 2.
    assert_eq!(gone(&driver, 0, 0), [false; 5]);
    assert_eq!(gone(&driver, 0, 1), [true, true, true, false, false]);
    assert_eq!(gone(&driver, 0, 2), [true, true, true, true, false]);
    assert_eq!(num_held(&driver), 5 + 2 + 1);
    driver.run();
}

#[test]
fn the_record_says_whose_table_a_sequence_is_in() {
    let mut driver = Driver::new(grouped());
    driver.add(0, &ask(1, 5, 3)).unwrap();
    let header = driver.plan_step();
    assert_eq!(header.num_block_updates, 2 * 3);
    assert_eq!(driver.section("block_group", 6), [0, 0, 1, 2, 1, 2]);
    assert_eq!(driver.section("block_index", 6), [0, 1, 0, 0, 1, 1]);
    let tables = [0, 1, 2].map(|group| driver.scheduler.group_block_table(0, group).unwrap().to_vec());
    for (group, table) in tables.iter().enumerate() {
        let slots = &driver.section("prefill_slot", 3 * 32)[group * 32..][..5];
        assert_eq!(slots[..4], [0, 1, 2, 3].map(|offset| table[0] * 4 + offset));
        assert_eq!(slots[4], table[1] * 4);
    }
    driver.settle();
    driver.run();
    // With one group it is what it was.
    let one = Driver::new(speculative());
    let layout = *one.scheduler.record_layout();
    assert_eq!((layout.block_group.len, layout.prefill_slot.len), (0, 32));
}

#[test]
fn a_quarter_of_the_memory_for_32k_positions_with_windows_of_1k_in_5_of_6_layers() {
    let (len, size) = (1 << 15, 16);
    let config = SchedulerConfig { window_groups: vec![1024; 5], ..SchedulerConfig::new(1, len, 4096, size, 2048) };
    let mut driver = Driver::new(config);
    driver.add(0, &ask(1, len - 200, 200)).unwrap();
    let (mut peak, mut behind) = (0, 0);
    while let PlanOutcome::Step(_) = driver.plan() {
        peak = peak.max(num_held(&driver));
        driver.settle();
        behind = behind.max(num_held(&driver));
    }
    // Each group has a sixth of the layers. With a step of 2048 tokens ahead of the windows, and without.
    let share = |blocks: usize| blocks as f64 / (6 * len / size) as f64;
    assert!(share(peak) <= 0.25 && share(behind) <= 0.2, "{} and {}", share(peak), share(behind));
}

#[test]
fn the_smallest_pool_is_reported() {
    // 12 blocks of 48 positions, and of a window the block that it begins in and those that it reaches.
    let least = 12 + 3 + 3;
    for (num_blocks, fits) in [(least, true), (least - 1, false)] {
        for max_in_flight in [1, 2] {
            let mut driver = Driver::new(SchedulerConfig { num_blocks, max_in_flight, ..grouped() });
            let asked = driver.add(0, &drafting(1, 20, 28));
            if fits {
                asked.unwrap();
                driver.run();
            } else {
                let error = asked.unwrap_err().to_string();
                assert!(error.contains("48, which needs 18 blocks"), "{error}");
            }
        }
    }
}

#[test]
fn settings_of_groups_are_checked() {
    let refused = |config| match Scheduler::new(config) {
        Err(Error::InvalidConfig { field, .. }) => field,
        other => panic!("{other:?}"),
    };
    for window in [0, 1, 1 << 40] {
        assert_eq!(refused(SchedulerConfig { window_groups: vec![4, window], ..small() }), "window_groups");
    }
    let longer = SchedulerConfig { sliding_window: Some(4), window_groups: vec![5], ..small() };
    assert_eq!(refused(longer), "window_groups");
    assert_eq!(refused(SchedulerConfig { window_groups: vec![4; 1025], ..small() }), "window_groups");
    let events = SchedulerConfig { window_groups: vec![4], enable_kv_cache_events: true, ..small() };
    assert_eq!(refused(events), "enable_kv_cache_events");
}

#[test]
fn a_hit_needs_the_last_windows_of_all_groups() {
    let mut driver = Driver::new(grouped());
    driver.add(0, &ask(1, 25, 1)).unwrap();
    driver.run();
    driver.add(1, &ask(1, 25, 4)).unwrap();
    let header = driver.plan_step();
    assert_eq!((cached(&driver), header.num_prefill_tokens), (24, 1));
    // A query at 24 sees [17, 24] in group 1, [20, 24] in group 2; the blocks before that were not taken from the cache.
    assert_eq!(gone(&driver, 1, 0), [false; 7]);
    assert_eq!(gone(&driver, 1, 1), [&[true; 4][..], &[false; 3]].concat());
    assert_eq!(gone(&driver, 1, 2), [&[true; 5][..], &[false; 2]].concat());
    driver.settle();
    driver.run();
}

#[test]
fn what_one_group_lacks_no_group_has() {
    // The whole pool is this text's; its first blocks in group 1 were the first to come back, so another takes their place.
    let mut driver = Driver::new(SchedulerConfig { num_blocks: 12, window_groups: vec![8], ..small() });
    driver.add(0, &ask(1, 25, 1)).unwrap();
    driver.run();
    assert_eq!(driver.scheduler.block_pool().num_free(), 12);
    let common = |len: usize| Ask { prompt: [&ask(1, 25, 1).prompt[..len], &[96, 95, 94]].concat(), ..ask(1, 1, 1) };
    // 6 blocks and one begun, of both groups, do not fit in 12: block 0 of group 1 has been another's. Of a prefix of 5 blocks the window reads from
    // block 3 on, of one of 2 from block 0 on.
    for (len, hit) in [(20, 20), (8, 0)] {
        let mut driver =
            Driver { scheduler: driver.scheduler.clone(), device: driver.device.clone(), ..Driver::new(small()) };
        driver.record = vec![0; driver.scheduler.record_layout().size];
        driver.add(1, &common(len)).unwrap();
        let before = cached(&driver);
        driver.plan_step();
        assert_eq!(cached(&driver) - before, hit, "a common prefix of {len}");
    }
}

#[test]
fn prompts_of_several_groups_are_admitted_by_all_their_blocks() {
    // 7 blocks of each group for 24 tokens and one more: 21 for one request, 42 for two.
    for (num_blocks, running) in [(42, 2), (41, 1)] {
        let config = SchedulerConfig { num_blocks, window_groups: vec![64, 64], max_num_batched_tokens: 8, ..small() };
        let mut driver = Driver::new(config);
        driver.add(0, &ask(1, 24, 2)).unwrap();
        driver.add(1, &ask(2, 24, 2)).unwrap();
        driver.plan_step();
        assert_eq!(driver.scheduler.num_running(), running, "{num_blocks} blocks");
        driver.settle();
        driver.run();
        assert_eq!(driver.scheduler.num_preemptions(), 0);
    }
}

#[test]
fn all_groups_come_back_from_requests_that_end() {
    let mut driver = Driver::new(SchedulerConfig { max_in_flight: 2, ..grouped() });
    for id in 0..3 {
        driver.add(id, &drafting(id as u64, 15, 20)).unwrap();
    }
    driver.step();
    driver.preempt(0).unwrap();
    driver.abort(1).unwrap();
    driver.device.faults.insert(2, 1);
    driver.step();
    driver.step();
    driver.run();
    assert_eq!(driver.output(0).len(), 20);
    assert_eq!(num_held(&driver), 0);
}

#[test]
fn draft_kv_is_in_the_first_group() {
    let drafter = Drafter::draft_model(64, 1.0);
    let mut driver = Driver::new(SchedulerConfig { drafter, ..grouped() });
    driver.add(0, &drafting(1, 20, 12)).unwrap();
    driver.run();
    let pool = driver.scheduler.block_pool();
    let marked = (0..80).filter(|&block| pool.has_draft(block)).count();
    // 32 tokens, of which the last is not fed.
    assert_eq!(marked, 7);
    assert!(driver.device.target_tokens > 31, "it drafted");
}
