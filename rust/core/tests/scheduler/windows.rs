//! Tests of windows: blocks outside a window return to the pool while their request runs, and no query misses them.

use specrs_core::{Drafter, Error, PlanOutcome, SchedulerConfig};

use crate::common::driver::{Ask, Driver};
use crate::{ask, drafting, small, speculative};

/// Returns settings with 14 blocks of 4 for 2 rows of at most 400 tokens that attend to the last 16.
fn windowed() -> SchedulerConfig {
    SchedulerConfig {
        max_num_seqs: 2,
        max_model_len: 400,
        num_blocks: 14,
        max_num_batched_tokens: 8,
        sliding_window: Some(16),
        ..small()
    }
}

/// Returns the settings of `windowed` with a draft model and K = 3.
fn windowed_drafting() -> SchedulerConfig {
    SchedulerConfig { num_speculative_tokens: 3, drafter: Drafter::draft_model(400, 1.0), ..windowed() }
}

fn cached(driver: &Driver) -> u64 {
    driver.scheduler.num_cached_tokens()
}

/// Runs until idle. Returns the maximum number of blocks held between steps.
fn peak(driver: &mut Driver) -> usize {
    let mut peak = 0;
    while driver.step() {
        peak = peak.max(driver.scheduler.num_blocks() - driver.scheduler.num_free_blocks());
    }
    peak
}

#[test]
fn long_texts_fit_in_a_small_pool() {
    for (max_in_flight, config) in
        [(1, windowed()), (2, windowed()), (1, windowed_drafting()), (2, windowed_drafting())]
    {
        let mut driver = Driver::new(SchedulerConfig { max_in_flight, ..config });
        for id in 0..2 {
            driver
                .add(id, &Ask { k: driver.scheduler.config().num_speculative_tokens, ..ask(id as u64, 30, 300) })
                .unwrap();
        }
        // Of a window of 16 positions, at most 2 steps' tokens ahead of it, and blocks cut at both ends.
        assert!(peak(&mut driver) <= 14);
        assert_eq!(driver.scheduler.num_preemptions(), 0, "{max_in_flight} in flight");
        assert_eq!(driver.output(0).len(), 300);
    }
    let mut all = Driver::new(SchedulerConfig { sliding_window: None, ..windowed() });
    assert!(matches!(all.add(0, &ask(0, 30, 300)), Err(Error::InvalidRequest { field: "limit", .. })));
}

#[test]
fn a_quarter_of_the_memory_for_32k_positions_at_a_window_of_1k() {
    let config = SchedulerConfig {
        max_num_batched_tokens: 2048,
        num_speculative_tokens: 3,
        drafter: Drafter::draft_model(1 << 15, 0.1),
        sliding_window: Some(1024),
        ..SchedulerConfig::new(1, 1 << 15, 2048, 16, 2048)
    };
    let mut driver = Driver::new(config);
    driver.add(0, &drafting(1, (1 << 15) - 200, 200)).unwrap();
    let most = peak(&mut driver);
    assert!(most <= 2048 / 8, "{most} of the 2048 blocks without a window");
}

#[test]
fn a_prompt_longer_than_the_pool_is_computed_in_chunks() {
    for config in [windowed(), windowed_drafting()] {
        let mut driver = Driver::new(SchedulerConfig { num_blocks: 8, ..config });
        driver.add(0, &drafting_if(&driver, 200, 60)).unwrap();
        driver.run();
        assert_eq!(driver.output(0).len(), 60);
    }
}

fn drafting_if(driver: &Driver, len: usize, max_tokens: usize) -> Ask {
    Ask { k: driver.scheduler.config().num_speculative_tokens, ..ask(1, len, max_tokens) }
}

#[test]
fn the_smallest_pool_is_reported() {
    // 16 positions and the block that the first of them begins in; a draft model's first pass looks back one further.
    for (config, least) in [(windowed(), 5), (windowed_drafting(), 6)] {
        for (num_blocks, fits) in [(least, true), (least - 1, false)] {
            let mut driver = Driver::new(SchedulerConfig { num_blocks, ..config.clone() });
            let asked = driver.add(0, &drafting_if(&driver, 50, 100));
            if fits {
                asked.unwrap();
                driver.run();
            } else {
                let error = asked.unwrap_err().to_string();
                assert!(error.contains(&format!("150, which needs {least} blocks")), "{error}");
            }
        }
    }
    for window in [0, 1] {
        let config = SchedulerConfig { sliding_window: Some(window), ..small() };
        assert!(matches!(
            specrs_core::Scheduler::new(config),
            Err(Error::InvalidConfig { field: "sliding_window", .. })
        ));
    }
}

#[test]
fn a_hit_needs_the_blocks_of_its_last_window() {
    let mut driver = Driver::new(SchedulerConfig { num_blocks: 12, ..windowed() });
    driver.add(0, &ask(1, 41, 1)).unwrap();
    driver.run();
    // 10 blocks are cached; another request evicts those that came back first.
    driver.add(1, &ask(2, 21, 1)).unwrap();
    driver.run();
    driver.add(2, &ask(1, 41, 20)).unwrap();
    let header = driver.plan_step();
    assert_eq!((cached(&driver), header.num_prefill_tokens), (40, 1));
    let table = driver.scheduler.request(2).unwrap().block_table.to_vec();
    // A query at 40 sees [25, 40].
    assert_eq!(table.iter().map(|&block| block < 0).collect::<Vec<_>>(), [[true; 6].as_slice(), &[false; 5]].concat());
    driver.run();
}

#[test]
fn a_hole_in_the_window_makes_the_hit_shorter() {
    let mut driver = Driver::new(SchedulerConfig { num_blocks: 40, ..windowed() });
    driver.add(0, &ask(1, 41, 1)).unwrap();
    driver.run();
    // The same up to position 29: of block 7 on, nothing is found.
    let mut other = ask(1, 41, 20);
    other.prompt[30] = (other.prompt[30] + 1) % 97;
    driver.add(1, &other).unwrap();
    driver.run();
    assert_eq!(cached(&driver), 28);
}

#[test]
fn a_preempted_request_goes_on_with_its_last_window() {
    let mut driver = Driver::new(windowed_drafting());
    driver.add(0, &drafting(1, 50, 100)).unwrap();
    for _ in 0..20 {
        driver.step();
    }
    driver.preempt(0).unwrap();
    let steps = driver.steps.len();
    driver.run();
    let prefilled: usize = driver.steps[steps..].iter().map(|header| header.num_prefill_tokens).sum();
    assert!(prefilled <= 8, "{prefilled} tokens computed again");
}

#[test]
fn draft_kv_begins_where_the_row_holds_blocks() {
    let mut driver = Driver::new(SchedulerConfig { max_num_batched_tokens: 64, ..windowed_drafting() });
    driver.add(0, &drafting(1, 50, 40)).unwrap();
    driver.plan_step();
    driver.settle();
    // 51 tokens: the first drafting pass feeds 49, which sees [34, 49].
    let header = driver.plan_step();
    assert_eq!((header.num_draft_chunks, header.max_k), (1, 3));
    for (name, expected) in [("draft_chunk_k_start", 32), ("draft_chunk_start", 32), ("draft_chunk_len", 17)] {
        assert_eq!(driver.section(name, 1), [expected], "{name}");
    }
    driver.settle();
    driver.run();
    // Without a window all of it is drafted from the start.
    let mut all = Driver::new(speculative());
    all.add(0, &drafting(1, 20, 10)).unwrap();
    all.plan_step();
    all.settle();
    all.plan_step();
    assert_eq!((all.section("draft_chunk_k_start", 1), all.section("draft_chunk_start", 1)), (&[0][..], &[0][..]));
}

#[test]
fn what_a_catch_up_chunk_in_flight_reads_stays() {
    let config = SchedulerConfig { max_in_flight: 2, sliding_window: Some(5), num_blocks: 40, ..windowed_drafting() };
    let mut driver = Driver::new(SchedulerConfig { max_num_batched_tokens: 4, ..config });
    driver.add(0, &drafting(1, 40, 100)).unwrap();
    while driver.step() {
        let table = driver.scheduler.request(0).map_or(vec![], |request| request.block_table.to_vec());
        for (header, _) in &driver.in_flight {
            if header.num_draft_chunks > 0 && !table.is_empty() {
                let start = driver.section("draft_chunk_k_start", 1)[0] as usize;
                assert!(table[start / 4] >= 0, "block {} of {table:?}", start / 4);
            }
        }
    }
}

#[test]
fn a_newcomer_gets_what_was_computed_for_its_prompt() {
    // Three steps in flight, so a row holds more than a window and a step's tokens, and asks for more in the plan that
    // admits.
    let config = SchedulerConfig {
        max_model_len: 24,
        num_blocks: 21,
        block_size: 1,
        max_num_batched_tokens: 5,
        sliding_window: Some(2),
        max_in_flight: 3,
        long_prefill_token_threshold: 1,
        enable_prefix_caching: false,
        ..windowed()
    };
    let mut driver = Driver::new(config);
    for (id, (len, priority)) in [(1, 0), (21, 0), (8, 0), (16, -1)].into_iter().enumerate() {
        driver.add(id as i64, &Ask { priority, ..ask(id as u64, len, 2) }).unwrap();
    }
    let mut admitted_beside_others = 0;
    loop {
        while driver.in_flight.len() < 3 && matches!(driver.plan(), PlanOutcome::Step(_)) {
            let admitted = driver.steps.last().expect("a step").num_admitted;
            if admitted == 0 || driver.scheduler.num_running() == 1 {
                continue;
            }
            admitted_beside_others += admitted;
            for &id in driver.section("admit_request_id", admitted) {
                let request = driver.scheduler.request(id).unwrap();
                let held = request.block_table.iter().filter(|&&block| block >= 0).count();
                let missing = (request.num_tokens - request.block_table.len()).min(2 + 5 + 1 - held);
                assert!(missing <= driver.scheduler.num_free_blocks(), "request {id} lacks {missing} blocks");
            }
        }
        if !driver.scheduler.has_unfinished() {
            break;
        }
        driver.settle();
    }
    assert!(admitted_beside_others > 0);
}
