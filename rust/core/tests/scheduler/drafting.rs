//! Tests of which rows draft: deferred drafting, catch-up chunks and their budget, claims, and requests whose K returns
//! from 0.

use specrs_core::scheduler::StepHeader;
use specrs_core::scheduler::layout::FLAG_DRAFT_NON_FINITE;
use specrs_core::{CostLine, CostModel, Drafter, Error, SchedulerConfig, SpeculationPlanner};

use crate::common::driver::{Ask, Driver, prompt};
use crate::{ask, drafting, speculative, with_lag};

/// Returns the rows that have claims, once per claim.
fn claimants(driver: &Driver) -> Vec<u32> {
    let pool = driver.scheduler.block_pool();
    (0..pool.num_blocks() as i64).filter_map(|block| pool.claimant(block)).collect()
}

#[test]
fn the_prompt_is_the_targets_alone_and_the_draft_follows() {
    let mut driver = Driver::new(speculative());
    driver.add(0, &drafting(1, 10, 20)).unwrap();
    let header = driver.plan_step();
    assert_eq!((header.num_prefill_tokens, header.num_draft_chunks), (10, 0));
    driver.settle();
    let header = driver.plan_step();
    assert_eq!((header.num_draft_chunks, header.num_draft_tokens, header.max_k), (1, 9, 3));
    assert_eq!((driver.section("draft_chunk_start", 1), driver.section("draft_chunk_len", 1)), (&[0][..], &[9][..]));
    driver.settle();
    for _ in 0..3 {
        let header = driver.plan_step();
        assert_eq!((header.num_draft_chunks, header.max_k), (0, 3), "drafting keeps up by itself");
        driver.settle();
    }
    driver.run();
}

#[test]
fn the_draft_follows_while_the_first_token_is_in_flight() {
    let mut driver = Driver::new(SchedulerConfig { max_in_flight: 2, ..speculative() });
    driver.add(0, &drafting(1, 10, 20)).unwrap();
    driver.plan_step();
    let header = driver.plan_step();
    assert_eq!((header.num_draft_tokens, header.max_k), (9, 3));
    driver.run();
    assert!(driver.steps[2..].iter().all(|header| header.num_draft_chunks == 0));
}

#[test]
fn two_token_prompts_draft_at_once() {
    for len in 1..4 {
        let mut driver = Driver::new(speculative());
        driver.add(0, &drafting(1, len, 20)).unwrap();
        driver.plan_step();
        driver.settle();
        let header = driver.plan_step();
        assert_eq!(
            (header.num_draft_tokens, header.max_k),
            (len - 1, 3),
            "the first pass takes the last 2 of {}",
            len + 1
        );
        driver.run();
    }
}

#[test]
fn requests_at_k_0_cost_no_draft_work() {
    let mut driver = Driver::new(SchedulerConfig { max_in_flight: 2, ..speculative() });
    for id in 0..6 {
        driver.add(id, &ask(id as u64 % 2, 13, 30)).unwrap();
    }
    while driver.step() {
        assert_eq!(claimants(&driver), []);
    }
    assert_eq!(driver.device.draft_tokens, 0);
    assert!(driver.steps.iter().all(|header| header.num_draft_chunks == 0 && header.max_k == 0));
}

#[test]
fn without_a_draft_model_nobody_drafts() {
    let mut driver = Driver::new(SchedulerConfig { drafter: Drafter::None, ..speculative() });
    driver.add(0, &drafting(1, 13, 30)).unwrap();
    driver.run();
    assert_eq!(driver.device.draft_tokens, 0);
}

#[test]
fn a_long_lag_is_closed_over_several_steps_at_k_0() {
    // A quarter of 32 is left next to nothing else; each token costs 4, so 8 tokens a step, less the decode row itself.
    let config = SchedulerConfig { drafter: Drafter::draft_model(64, 4.0), ..speculative() };
    let mut driver = Driver::new(config);
    driver.add(0, &drafting(1, 20, 30)).unwrap();
    let mut chunks = Vec::new();
    loop {
        let header = driver.plan_step();
        if header.num_draft_chunks > 0 {
            chunks.push((driver.section("draft_chunk_start", 1)[0], header.num_draft_tokens, header.max_k));
        }
        driver.settle();
        if header.max_k > 0 {
            break;
        }
    }
    // 32 less 4 decode rows gives 28: 7 tokens. Each step at K = 0 emits one more token to catch up with.
    assert_eq!(chunks, [(0, 7, 0), (7, 7, 0), (14, 7, 3)]);
    driver.run();
}

#[test]
fn the_draft_has_a_quarter_of_the_chunk_budget_next_to_prefill() {
    // Less 4 decode rows; a quarter is rounded up.
    for (budget, tokens) in [(20, (12, 4)), (21, (12, 5)), (23, (14, 5))] {
        let config = SchedulerConfig { max_num_batched_tokens: budget, ..speculative() };
        let mut driver = Driver::new(config);
        driver.add(0, &drafting(1, 20, 30)).unwrap();
        driver.plan_step();
        driver.settle();
        driver.add(1, &ask(2, 50, 5)).unwrap();
        let header = driver.plan_step();
        assert_eq!((header.num_prefill_tokens, header.num_draft_tokens), tokens, "C = {budget}");
        driver.run();
    }
}

#[test]
fn the_first_draft_chunk_makes_progress_at_any_cost() {
    let config =
        SchedulerConfig { drafter: Drafter::draft_model(64, 1000.0), max_num_batched_tokens: 1, ..speculative() };
    let mut driver = Driver::new(config);
    driver.add(0, &drafting(1, 3, 60)).unwrap();
    driver.run();
    let chunk_tokens: Vec<_> = driver.steps.iter().map(|header| header.num_draft_tokens).collect();
    assert_eq!(chunk_tokens.iter().max(), Some(&1));
    assert!(!driver.steps.iter().any(|header| header.max_k > 0), "one token a step never closes a growing lag");
}

#[test]
fn cheap_draft_tokens_are_still_bounded_by_the_record() {
    let config =
        SchedulerConfig { drafter: Drafter::draft_model(64, 0.01), max_num_batched_tokens: 12, ..speculative() };
    let mut driver = Driver::new(config);
    for id in 0..4 {
        driver.add(id, &drafting(id as u64, 12, 30)).unwrap();
    }
    driver.run();
    assert!(driver.steps.iter().all(|header| header.num_draft_tokens <= 12));
}

#[test]
fn one_request_writes_a_shared_prefix_and_the_others_wait_for_its_marks() {
    let mut driver = Driver::new(SchedulerConfig { max_num_batched_tokens: 64, ..speculative() });
    driver.add(0, &ask(1, 21, 1)).unwrap();
    driver.run();
    driver.add(1, &drafting(1, 21, 30)).unwrap();
    driver.add(2, &drafting(1, 21, 30)).unwrap();
    let header = driver.plan_step();
    assert_eq!(driver.section("admit_num_cached", header.num_admitted), [20, 20]);
    assert_eq!(driver.section("admit_draft_len", header.num_admitted), [0, 0]);
    driver.settle();

    let header = driver.plan_step();
    assert_eq!(header.num_draft_chunks, 1, "request 2 finds the first block claimed");
    assert_eq!(driver.section("seq_k", header.num_decode), [3, 0]);
    driver.settle();

    let header = driver.plan_step();
    let part = |name| driver.section(name, header.num_draft_chunks)[0];
    assert_eq!((part("draft_chunk_row"), part("draft_chunk_start"), part("draft_chunk_len")), (1, 20, 1));
    assert_eq!(driver.section("seq_k", header.num_decode), [3, 3], "20 positions came from request 1's marks");
    driver.run();
}

#[test]
fn a_raised_draft_len_is_reported_by_a_chunk_of_length_0() {
    // Blocks of one position: a hit on 19 of 20 tokens, and once request 1's marks are there, 21 - 2 of 21 are drafted.
    let mut driver = Driver::new(SchedulerConfig { max_num_batched_tokens: 64, block_size: 1, ..speculative() });
    driver.add(0, &ask(1, 20, 1)).unwrap();
    driver.run();
    driver.add(1, &drafting(1, 20, 30)).unwrap();
    driver.plan_step();
    driver.settle();
    driver.add(2, &drafting(1, 20, 30)).unwrap();
    driver.plan_step();
    assert_eq!(driver.section("admit_draft_len", 1), [0], "request 1's chunk is in this step");
    driver.settle();
    let header = driver.plan_step();
    let part = |name| driver.section(name, header.num_draft_chunks);
    assert_eq!(
        (part("draft_chunk_row"), part("draft_chunk_start"), part("draft_chunk_len")),
        (&[1][..], &[19][..], &[0][..])
    );
    assert_eq!(driver.section("seq_k", header.num_decode), [3, 3]);
    driver.run();
}

#[test]
fn marks_outlive_their_request_and_spare_the_draft_its_prefix() {
    let mut driver = Driver::new(speculative());
    driver.add(0, &drafting(1, 21, 8)).unwrap();
    driver.run();
    driver.add(1, &drafting(1, 21, 8)).unwrap();
    driver.plan_step();
    assert_eq!(driver.section("admit_draft_len", 1), [20]);
    driver.settle();
    let header = driver.plan_step();
    assert_eq!((header.num_draft_chunks, header.max_k), (0, 3), "22 tokens, draft KV to 20");
    driver.run();
}

#[test]
fn a_claim_ends_with_its_lease() {
    let mut driver =
        Driver::new(SchedulerConfig { drafter: Drafter::draft_model(64, 8.0), max_in_flight: 2, ..speculative() });
    driver.add(0, &ask(1, 33, 1)).unwrap();
    driver.run();
    driver.add(1, &drafting(1, 33, 30)).unwrap();
    driver.add(2, &drafting(1, 33, 30)).unwrap();
    driver.step();
    driver.step();
    let before = claimants(&driver);
    assert!(!before.is_empty() && before.iter().all(|&row| row == before[0]));
    driver.abort(1).unwrap();
    assert_eq!(claimants(&driver), before, "a step in flight may still write there");
    while !driver.in_flight.is_empty() {
        driver.settle();
    }
    assert_eq!(claimants(&driver), []);
    driver.run();
    assert!(driver.steps.last().is_some_and(|header| header.num_draft_chunks == 0));
}

#[test]
fn claims_of_a_row_that_drafts_no_more_pass_to_those_who_want_them() {
    // 3 draft tokens a step at most, and a context that request 1 outgrows long before it has caught up.
    let config = SchedulerConfig { drafter: Drafter::draft_model(40, 8.0), ..speculative() };
    let mut driver = Driver::new(config);
    driver.add(0, &ask(1, 33, 1)).unwrap();
    driver.run();
    driver.add(1, &Ask { prompt: prompt(1, 39), k: 3, max_tokens: 25, ..Ask::default() }).unwrap();
    for _ in 0..4 {
        driver.step();
    }
    assert!(!claimants(&driver).is_empty());
    driver.add(2, &drafting(1, 21, 19)).unwrap();
    while driver.outcomes[&2].finish == 0 && driver.steps.last().is_none_or(|header| header.max_k == 0) {
        driver.step();
    }
    assert!(driver.outcomes[&1].finish == 0 && driver.steps.last().is_some_and(|header| header.max_k == 3));
    driver.run();
}

#[test]
fn a_row_whose_claims_were_taken_catches_up_after_them_when_it_drafts_again() {
    let config = SchedulerConfig { drafter: Drafter::draft_model(64, 8.0), max_in_flight: 2, ..speculative() };
    let mut driver = Driver::new(config);
    driver.add(0, &ask(1, 33, 1)).unwrap();
    driver.run();
    let line = CostLine { draft_ms: 100.0, target_ms: 1.0, vanilla_ms: 1.0 };
    let planner = |draft_ms| {
        let line = CostLine { draft_ms, ..line };
        SpeculationPlanner::new(4, 3, CostModel::lines(&[1, 4], &[line, line]).unwrap(), 0.0).unwrap()
    };
    driver.add(1, &drafting(1, 33, 30)).unwrap();
    for _ in 0..3 {
        driver.step();
    }
    assert_eq!(claimants(&driver).first(), Some(&0));
    driver.scheduler.speculate(&mut planner(100.0)).unwrap();
    // Request 2 has a row once the planner has chosen, so it keeps its own K.
    driver.add(2, &drafting(1, 33, 30)).unwrap();
    for _ in 0..4 {
        driver.step();
    }
    assert_eq!(claimants(&driver).first(), Some(&1));
    driver.scheduler.speculate(&mut planner(0.01)).unwrap();
    driver.run();
    assert_eq!(driver.steps.iter().filter(|header| header.num_decode == 2).map(|header| header.max_k).max(), Some(3));
}

#[test]
fn non_finite_drafts_turn_drafting_off_for_good() {
    let mut driver = Driver::new(SchedulerConfig { max_in_flight: 2, ..speculative() });
    driver.add(0, &drafting(1, 21, 40)).unwrap();
    driver.device.faults.insert(0, FLAG_DRAFT_NON_FINITE);
    driver.step();
    driver.step();
    driver.step();
    assert!(driver.device.faults.is_empty(), "the fault has happened");
    driver.preempt(0).unwrap();
    let num_steps = driver.steps.len();
    driver.run();
    assert!(driver.steps[num_steps..].iter().all(|header| header.max_k == 0), "not even after a preemption");
    assert_eq!(driver.output(0).len(), 40);
    // Its draft KV was never marked, so the next one writes its own.
    driver.add(1, &drafting(1, 21, 30)).unwrap();
    driver.plan_step();
    assert_eq!(driver.section("admit_draft_len", 1), [0]);
    driver.run();
}

#[test]
fn a_request_that_outgrows_the_drafts_context_goes_on_alone() {
    for context in [1, 5, 20, 21, 22, 25, 40] {
        for max_in_flight in 1..4 {
            let config =
                SchedulerConfig { drafter: Drafter::draft_model(context, 1.0), max_in_flight, ..speculative() };
            let mut driver = Driver::new(config);
            driver.add(0, &drafting(1, 20, 40)).unwrap();
            driver.run();
            assert_eq!(driver.output(0).len(), 40);
            let drafted = driver.steps.iter().any(|header| header.max_k > 0);
            assert_eq!(
                drafted,
                context >= 21,
                "21 tokens after the prompt: feeding the last one takes a context of 21"
            );
            assert!(driver.steps.last().is_some_and(|header| header.max_k == 0));
        }
    }
}

#[test]
fn k_comes_back_after_a_shortage() {
    for max_in_flight in 1..3 {
        let config =
            SchedulerConfig { num_blocks: 32, block_size: 1, max_model_len: 32, max_in_flight, ..speculative() };
        let mut driver = Driver::new(config);
        driver.add(0, &Ask { priority: -1, ..drafting(1, 4, 28) }).unwrap();
        driver.add(1, &ask(2, 22, 4)).unwrap();
        driver.run();
        let ks: Vec<_> = driver.steps.iter().map(|header| header.max_k).collect();
        let lowered =
            ks.iter().position(|&k| k == 3).and_then(|first| Some(first + ks[first..].iter().position(|&k| k < 3)?));
        let restored = lowered.is_some_and(|at| ks[at..].contains(&3));
        assert!(restored, "{ks:?}");
    }
}

#[test]
fn a_drafter_with_one_first_row_catches_up_each_time() {
    let mut driver = Driver::new(SchedulerConfig { drafter: with_lag(1), ..speculative() });
    driver.add(0, &drafting(1, 9, 40)).unwrap();
    driver.run();
    assert!(driver.steps[2..].iter().any(|header| header.num_draft_tokens == 1 && header.max_k > 0));
}

#[test]
fn a_row_without_blocks_for_drafts_does_no_draft_work() {
    // One draft token a step, so the lag stays, while both requests take the pool block by block.
    let config = SchedulerConfig {
        num_blocks: 17,
        block_size: 1,
        max_model_len: 16,
        drafter: Drafter::draft_model(64, 32.0),
        ..speculative()
    };
    let mut driver = Driver::new(config);
    driver.add(0, &ask(1, 6, 10)).unwrap();
    driver.add(1, &drafting(2, 5, 11)).unwrap();
    let mut full = false;
    while driver.scheduler.num_preemptions() == 0 {
        let header = driver.plan_step();
        if header.num_decode == 2 {
            let free = driver.scheduler.num_free_blocks();
            assert_eq!(header.num_draft_tokens, usize::from(free > 0), "{free} blocks free");
            full |= free == 0;
        }
        driver.settle();
    }
    assert!(full);
    driver.run();
}

#[test]
fn catch_up_chunks_of_one_step_share_its_budget() {
    let mut driver = Driver::new(SchedulerConfig { max_num_batched_tokens: 24, ..speculative() });
    driver.add(0, &drafting(1, 10, 20)).unwrap();
    driver.add(1, &drafting(2, 10, 20)).unwrap();
    driver.plan_step();
    driver.settle();
    let header = driver.plan_step();
    assert_eq!(driver.section("draft_chunk_len", header.num_draft_chunks), [9, 7], "24 less 2 x 4 decode rows");
    assert_eq!(driver.section("seq_k", 2), [3, 0]);
    driver.run();
}

/// Runs a request with a prompt of `long` tokens until it decodes, then adds seven with prompts of 20 tokens. A step
/// has at most 64 tokens. Returns for each of the eight requests the number of the step in which it first drafts. Only
/// steps in which all eight decode are counted, from 1. A request that drafts before these has 0.
fn steps_until_drafting(long: usize) -> Vec<usize> {
    let config = SchedulerConfig {
        num_speculative_tokens: 3,
        drafter: Drafter::draft_model(8192, 1.0),
        ..SchedulerConfig::new(8, 8192, 1024, 16, 64)
    };
    let mut driver = Driver::new(config);
    driver.add(0, &drafting(1, long, 2000)).unwrap();
    while driver.plan_step().num_decode == 0 {
        driver.settle();
    }
    for id in 1..8 {
        driver.add(id, &drafting(id as u64 + 1, 20, 2000)).unwrap();
    }
    let (mut waits, mut num_steps) = (vec![None; 8], 0);
    while waits.contains(&None) {
        driver.settle();
        let header = driver.plan_step();
        num_steps += usize::from(header.num_decode == 8);
        for (&row, &k) in driver.section("seq_row", 8).iter().zip(driver.section("seq_k", header.num_decode)) {
            if k > 0 {
                waits[row as usize].get_or_insert(num_steps);
            }
        }
        assert!(num_steps < 1900, "{waits:?}");
    }
    waits.into_iter().flatten().collect()
}

#[test]
fn a_long_lag_keeps_nobody_from_drafting_and_is_closed_too() {
    let waits = steps_until_drafting(4000);
    // 7 lags of 20, and 32 tokens a step next to 8 decoding sequences: 5 steps would do if nothing else were to be
    // done.
    assert!(waits[1..].iter().all(|&steps| steps <= 12), "{waits:?}");
    // Alone it would take 125 steps of 32.
    assert!(waits[0] <= 250, "{waits:?}");
}

#[test]
fn a_long_lag_of_an_important_request_is_closed_under_a_stream_of_short_ones() {
    let config = SchedulerConfig {
        num_speculative_tokens: 3,
        drafter: Drafter::draft_model(8192, 1.0),
        ..SchedulerConfig::new(8, 8192, 1024, 16, 64)
    };
    let mut driver = Driver::new(config);
    driver.add(0, &drafting(1, 1000, 2000)).unwrap();
    let drafts = |driver: &Driver, header: StepHeader| {
        let rows = driver.section("seq_row", header.num_decode).iter();
        rows.zip(driver.section("seq_k", header.num_decode)).any(|(&row, &k)| row == 0 && k > 0)
    };
    for id in 1..1000 {
        // Each newcomer lags behind by 28 when it starts, and ends soon.
        driver.add(id, &drafting(id as u64 + 1, 28, 8)).unwrap();
        let header = driver.plan_step();
        if drafts(&driver, header) {
            return;
        }
        driver.settle();
    }
    panic!("request 0 never drafts");
}

#[test]
fn once_caught_up_it_drafts_in_every_step() {
    let mut driver = Driver::new(SchedulerConfig { max_num_batched_tokens: 8, max_in_flight: 2, ..speculative() });
    driver.add(0, &drafting(1, 20, 44)).unwrap();
    driver.run();
    let ks: Vec<_> = driver.steps.iter().map(|header| header.max_k).collect();
    let first = ks.iter().position(|&k| k > 0).expect("it drafts");
    assert!(ks[..first].len() > 5 && ks[first..first + 6] == [3; 6], "{ks:?}");
}

#[test]
fn waiting_for_a_claim_is_no_demand_on_the_budget() {
    let config = SchedulerConfig { max_num_batched_tokens: 64, max_in_flight: 2, ..speculative() };
    let mut driver = Driver::new(config);
    driver.add(0, &ask(1, 21, 1)).unwrap();
    driver.run();
    driver.add(1, &drafting(1, 21, 30)).unwrap();
    driver.add(2, &drafting(1, 21, 30)).unwrap();
    driver.plan_step();
    driver.plan_step();
    assert_eq!(driver.section("seq_k", 2), [3, 0], "request 1 drafts, request 2 waits for it");
    driver.settle();
    driver.add(3, &ask(3, 60, 3)).unwrap();
    let header = driver.plan_step();
    assert_eq!((header.num_decode, header.num_prefill_tokens), (2, 64 - 2 * 4));
    driver.run();
}

#[test]
fn non_finite_drafts_give_their_claims_back() {
    let mut driver = Driver::new(SchedulerConfig { max_num_batched_tokens: 64, ..speculative() });
    driver.add(0, &ask(1, 21, 1)).unwrap();
    driver.run();
    driver.device.faults.insert(1, FLAG_DRAFT_NON_FINITE);
    driver.add(1, &drafting(1, 21, 40)).unwrap();
    driver.add(2, &drafting(1, 21, 40)).unwrap();
    driver.plan_step();
    driver.settle();
    driver.plan_step();
    assert_eq!(claimants(&driver), [0; 5]);
    driver.settle();
    assert_eq!(claimants(&driver), []);
    driver.plan_step();
    assert_eq!((driver.section("seq_row", 2), driver.section("seq_k", 2)), (&[1, 0][..], &[3, 0][..]));
    driver.abort(2).unwrap();
    while driver.step() {
        assert_eq!(claimants(&driver), [], "request 1 registers blocks without claims");
    }
}

#[test]
fn blocks_registered_while_their_draft_kv_is_on_its_way_are_claimed() {
    for (block_size, registered) in [(4, 1), (1, 4)] {
        // Catch-up chunks of 4 tokens: the first is in flight when the prompt's blocks are registered.
        let config = SchedulerConfig { max_num_batched_tokens: 20, max_in_flight: 2, ..speculative() };
        let mut driver = Driver::new(SchedulerConfig { drafter: Drafter::draft_model(64, 4.0), block_size, ..config });
        driver.add(0, &drafting(1, 20, 40)).unwrap();
        driver.plan_step();
        let header = driver.plan_step();
        assert_eq!((header.num_draft_tokens, header.max_k), (4, 0));
        driver.settle();
        assert_eq!(claimants(&driver), vec![0; registered]);
        let mut unmarked = 0;
        while driver.step() {
            // A step with K > 0 in flight may write to any registered block that is not marked yet.
            if driver.in_flight.front().is_some_and(|(header, _)| header.max_k > 0) {
                let pool = driver.scheduler.block_pool();
                let claimable = |&block: &i64| pool.is_registered(block) && !pool.has_draft(block);
                let blocks: Vec<_> = (0..64).filter(claimable).collect();
                assert!(blocks.iter().all(|&block| pool.claimant(block) == Some(0)), "{blocks:?}");
                unmarked += blocks.len();
            }
        }
        assert!(unmarked > 0, "all drafts of an iteration accepted, up to a block's end");
    }
}

/// Makes a driver in which blocks 0 and 1 lack `draft_valid` and blocks 2 to 4 have it. The first two come
/// from a request at K = 0. The others come from a longer request that was prefilled at the same time and has private
/// copies of the first two.
fn draft_marks_with_a_hole(lag: usize) -> Driver {
    let mut driver =
        Driver::new(SchedulerConfig { max_num_batched_tokens: 64, drafter: with_lag(lag), ..speculative() });
    driver.add(0, &Ask { prompt: prompt(1, 9), max_tokens: 1, ..Ask::default() }).unwrap();
    driver.add(1, &drafting(1, 21, 6)).unwrap();
    driver.run();
    let pool = driver.scheduler.block_pool();
    let marks = |block: i64| (pool.is_registered(block), pool.has_draft(block));
    assert_eq!((0..8).map(marks).filter(|&marks| marks == (true, false)).count(), 2);
    driver
}

#[test]
fn only_the_contiguous_prefix_of_marks_counts_and_marked_blocks_are_not_written_again() {
    for lag in 1..5 {
        let mut driver = draft_marks_with_a_hole(lag);
        driver.add(2, &drafting(1, 21, 20)).unwrap();
        driver.plan_step();
        assert_eq!(
            (driver.section("admit_num_cached", 1), driver.section("admit_draft_len", 1)),
            (&[20][..], &[0][..])
        );
        driver.settle();
        let header = driver.plan_step();
        assert_eq!(header.max_k, 3);
        let slots = driver.section("draft_slot", header.num_draft_tokens);
        assert!(slots[..8].iter().all(|&slot| slot >= 0) && slots[8..20].iter().all(|&slot| slot == -1), "{slots:?}");
        driver.run();
    }
}

#[test]
fn drafting_waits_for_a_claim_on_what_its_first_pass_would_write() {
    // Blocks of one position. Some request ends right after all its drafts were accepted, so that its last block has no
    // `draft_valid`.
    let unmarked = |driver: &Driver| {
        let pool = driver.scheduler.block_pool();
        (0..64).filter(|&block| pool.is_registered(block) && !pool.has_draft(block)).count()
    };
    let config = SchedulerConfig { block_size: 1, drafter: with_lag(3), ..speculative() };
    let (mut driver, text) = (2..30)
        .find_map(|max_tokens| {
            let mut driver = Driver::new(config.clone());
            driver.add(0, &drafting(1, 5, max_tokens)).unwrap();
            driver.run();
            let text = [&prompt(1, 5), driver.output(0)].concat();
            (unmarked(&driver) == 1).then_some((driver, text))
        })
        .expect("a request that ends with all drafts accepted");
    for id in 1..3 {
        driver.add(id, &Ask { prompt: text.clone(), k: 3, max_tokens: 20, ..Ask::default() }).unwrap();
    }
    let header = driver.plan_step();
    let draft_len = text.len() as i64 - 2;
    assert_eq!(driver.section("admit_draft_len", header.num_admitted), [draft_len; 2]);
    driver.settle();
    let header = driver.plan_step();
    assert_eq!(
        (header.num_draft_chunks, driver.section("seq_k", 2)),
        (0, &[3, 0][..]),
        "lags of 3 are no lags for 3 first rows"
    );
    driver.run();
}

#[test]
fn a_pause_plans_steps_without_drafts_or_draft_kv() {
    let mut driver = Driver::new(speculative());
    driver.add(0, &drafting(1, 12, 30)).unwrap();
    driver.scheduler.pause_drafting(5);
    driver.run();
    let drafts: Vec<_> = driver.steps.iter().map(|header| (header.max_k, header.num_draft_tokens)).collect();
    assert!(drafts[..5].iter().all(|&drafts| drafts == (0, 0)), "{drafts:?}");
    assert!(drafts[5].1 > 0 && drafts[5..].iter().any(|&(k, _)| k > 0), "{drafts:?}");
}

#[test]
fn draft_kv_that_was_not_written_is_written_again() {
    let mut driver = Driver::new(speculative());
    driver.add(0, &drafting(1, 12, 30)).unwrap();
    driver.step();
    let header = driver.plan_step();
    assert_eq!((header.num_draft_tokens, header.max_k), (11, 3));
    let refused = driver.scheduler.draft_kv_not_written(&[0, 99]);
    assert!(matches!(refused, Err(Error::InvalidBlock { block: 99, .. })), "{refused:?}");
    let blocks = driver.scheduler.request(0).unwrap().block_table.to_vec();
    assert_eq!(driver.scheduler.request(0).unwrap().num_draft_computed_tokens, 11);
    driver.scheduler.draft_kv_not_written(&blocks[1..]).unwrap();
    assert_eq!(driver.scheduler.request(0).unwrap().num_draft_computed_tokens, 4, "what lies in the first block stays");
    driver.check();
}
