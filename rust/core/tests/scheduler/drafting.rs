//! Who drafts: deferred drafting, catch-up chunks and their budget, claims, and requests whose K comes back from 0.

use specrs_core::SchedulerConfig;
use specrs_core::scheduler::layout::FLAG_DRAFT_NON_FINITE;

use crate::common::driver::{Ask, Driver};
use crate::{ask, drafting, speculative};

#[test]
fn the_prompt_is_the_targets_alone_and_the_draft_follows() {
    let mut driver = Driver::new(speculative());
    driver.add(0, &drafting(1, 10, 20)).unwrap();
    let header = driver.launch();
    assert_eq!((header.num_prefill_tokens, header.num_draft_chunks), (10, 0));
    driver.settle();
    let header = driver.launch();
    assert_eq!((header.num_draft_chunks, header.num_draft_tokens, header.max_k), (1, 9, 3));
    assert_eq!((driver.section("draft_chunk_start", 1), driver.section("draft_chunk_len", 1)), (&[0][..], &[9][..]));
    driver.settle();
    for _ in 0..3 {
        let header = driver.launch();
        assert_eq!((header.num_draft_chunks, header.max_k), (0, 3), "drafting keeps up by itself");
        driver.settle();
    }
    driver.run();
}

#[test]
fn the_draft_follows_while_the_first_token_is_in_flight() {
    let mut driver = Driver::new(SchedulerConfig { max_in_flight: 2, ..speculative() });
    driver.add(0, &drafting(1, 10, 20)).unwrap();
    driver.launch();
    let header = driver.launch();
    assert_eq!((header.num_draft_tokens, header.max_k), (9, 3));
    driver.run();
    assert!(driver.launches[2..].iter().all(|header| header.num_draft_chunks == 0));
}

#[test]
fn two_token_prompts_draft_at_once() {
    for len in 1..4 {
        let mut driver = Driver::new(speculative());
        driver.add(0, &drafting(1, len, 20)).unwrap();
        driver.launch();
        driver.settle();
        let header = driver.launch();
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
    driver.run();
    assert_eq!(driver.device.draft_tokens, 0);
    assert!(driver.launches.iter().all(|header| header.num_draft_chunks == 0 && header.max_k == 0));
}

#[test]
fn without_a_draft_model_nobody_drafts() {
    let mut driver = Driver::new(SchedulerConfig { draft_max_model_len: None, ..speculative() });
    driver.add(0, &drafting(1, 13, 30)).unwrap();
    driver.run();
    assert_eq!(driver.device.draft_tokens, 0);
}

#[test]
fn a_long_lag_is_closed_over_several_launches_at_k_0() {
    // A quarter of 32 is left beside nothing else; each token costs 4, so 8 tokens a launch, less the decode row itself.
    let config = SchedulerConfig { draft_cost_ratio: 4.0, ..speculative() };
    let mut driver = Driver::new(config);
    driver.add(0, &drafting(1, 20, 30)).unwrap();
    let mut chunks = Vec::new();
    loop {
        let header = driver.launch();
        if header.num_draft_chunks > 0 {
            chunks.push((driver.section("draft_chunk_start", 1)[0], header.num_draft_tokens, header.max_k));
        }
        driver.settle();
        if header.max_k > 0 {
            break;
        }
    }
    // 32 less 4 decode rows gives 28: 7 tokens. Each launch at K = 0 emits one more token to catch up with.
    assert_eq!(chunks, [(0, 7, 0), (7, 7, 0), (14, 7, 3)]);
    driver.run();
}

#[test]
fn the_draft_has_a_quarter_of_the_chunk_budget_beside_prefill() {
    let config = SchedulerConfig { max_num_batched_tokens: 20, ..speculative() };
    let mut driver = Driver::new(config);
    driver.add(0, &drafting(1, 20, 30)).unwrap();
    driver.launch();
    driver.settle();
    driver.add(1, &ask(2, 50, 5)).unwrap();
    let header = driver.launch();
    // 20 less 4 decode rows.
    assert_eq!((header.num_prefill_tokens, header.num_draft_tokens), (12, 4));
    driver.run();
}

#[test]
fn the_first_draft_chunk_makes_progress_at_any_cost() {
    let config = SchedulerConfig { draft_cost_ratio: 1000.0, max_num_batched_tokens: 1, ..speculative() };
    let mut driver = Driver::new(config);
    driver.add(0, &drafting(1, 3, 60)).unwrap();
    driver.run();
    let chunk_tokens: Vec<_> = driver.launches.iter().map(|header| header.num_draft_tokens).collect();
    assert_eq!(chunk_tokens.iter().max(), Some(&1));
    assert!(!driver.launches.iter().any(|header| header.max_k > 0), "one token a launch never closes a growing lag");
}

#[test]
fn cheap_draft_tokens_are_still_bounded_by_the_record() {
    let config = SchedulerConfig { draft_cost_ratio: 0.01, max_num_batched_tokens: 12, ..speculative() };
    let mut driver = Driver::new(config);
    for id in 0..4 {
        driver.add(id, &drafting(id as u64, 12, 30)).unwrap();
    }
    driver.run();
    assert!(driver.launches.iter().all(|header| header.num_draft_tokens <= 12));
}

#[test]
fn one_request_writes_a_shared_prefix_and_the_others_wait_for_its_marks() {
    let mut driver = Driver::new(SchedulerConfig { max_num_batched_tokens: 64, ..speculative() });
    driver.add(0, &ask(1, 21, 1)).unwrap();
    driver.run();
    driver.add(1, &drafting(1, 21, 30)).unwrap();
    driver.add(2, &drafting(1, 21, 30)).unwrap();
    let header = driver.launch();
    assert_eq!(driver.section("admit_num_cached", header.num_admitted), [20, 20]);
    assert_eq!(driver.section("admit_draft_len", header.num_admitted), [0, 0]);
    driver.settle();

    let header = driver.launch();
    assert_eq!(header.num_draft_chunks, 1, "request 2 finds the first block claimed");
    assert_eq!(driver.section("entry_k", header.num_decode), [3, 0]);
    driver.settle();

    let header = driver.launch();
    let part = |name| driver.section(name, header.num_draft_chunks)[0];
    assert_eq!((part("draft_chunk_row"), part("draft_chunk_start"), part("draft_chunk_len")), (1, 20, 1));
    assert_eq!(driver.section("entry_k", header.num_decode), [3, 3], "20 positions came from request 1's marks");
    driver.run();
}

#[test]
fn a_raised_draft_len_is_told_by_a_chunk_of_length_0() {
    // Blocks of one position: a hit on 19 of 20 tokens, and once request 1's marks are there, 21 - 2 of 21 are drafted.
    let mut driver = Driver::new(SchedulerConfig { max_num_batched_tokens: 64, block_size: 1, ..speculative() });
    driver.add(0, &ask(1, 20, 1)).unwrap();
    driver.run();
    driver.add(1, &drafting(1, 20, 30)).unwrap();
    driver.launch();
    driver.settle();
    driver.add(2, &drafting(1, 20, 30)).unwrap();
    driver.launch();
    assert_eq!(driver.section("admit_draft_len", 1), [0], "request 1's chunk is in this launch");
    driver.settle();
    let header = driver.launch();
    let part = |name| driver.section(name, header.num_draft_chunks);
    assert_eq!(
        (part("draft_chunk_row"), part("draft_chunk_start"), part("draft_chunk_len")),
        (&[1][..], &[19][..], &[0][..])
    );
    assert_eq!(driver.section("entry_k", header.num_decode), [3, 3]);
    driver.run();
}

#[test]
fn marks_outlive_their_request_and_spare_the_draft_its_prefix() {
    let mut driver = Driver::new(speculative());
    driver.add(0, &drafting(1, 21, 8)).unwrap();
    driver.run();
    driver.add(1, &drafting(1, 21, 8)).unwrap();
    driver.launch();
    assert_eq!(driver.section("admit_draft_len", 1), [20]);
    driver.settle();
    let header = driver.launch();
    assert_eq!((header.num_draft_chunks, header.max_k), (0, 3), "22 tokens, draft KV to 20");
    driver.run();
}

#[test]
fn a_claim_ends_with_its_lease() {
    let mut driver = Driver::new(SchedulerConfig { draft_cost_ratio: 8.0, max_in_flight: 2, ..speculative() });
    driver.add(0, &ask(1, 33, 1)).unwrap();
    driver.run();
    driver.add(1, &drafting(1, 33, 30)).unwrap();
    driver.add(2, &drafting(1, 33, 30)).unwrap();
    driver.step();
    driver.step();
    let claimed =
        |driver: &Driver| (0..64).filter_map(|block| driver.scheduler.block_pool().claimant(block)).collect::<Vec<_>>();
    let before = claimed(&driver);
    assert!(!before.is_empty() && before.iter().all(|&row| row == before[0]));
    driver.abort(1).unwrap();
    assert_eq!(claimed(&driver), before, "a launch in flight may still write there");
    while !driver.in_flight.is_empty() {
        driver.settle();
    }
    assert_eq!(claimed(&driver), []);
    driver.run();
    assert!(driver.launches.last().is_some_and(|header| header.num_draft_chunks == 0));
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
    let launched = driver.launches.len();
    driver.run();
    assert!(driver.launches[launched..].iter().all(|header| header.max_k == 0), "not even after a preemption");
    assert_eq!(driver.output(0).len(), 40);
    // Its draft KV was never marked, so the next one writes its own.
    driver.add(1, &drafting(1, 21, 30)).unwrap();
    driver.launch();
    assert_eq!(driver.section("admit_draft_len", 1), [0]);
    driver.run();
}

#[test]
fn a_request_that_outgrows_the_drafts_context_goes_on_alone() {
    for context in [1, 5, 20, 21, 22, 25, 40] {
        for max_in_flight in 1..4 {
            let config = SchedulerConfig { draft_max_model_len: Some(context), max_in_flight, ..speculative() };
            let mut driver = Driver::new(config);
            driver.add(0, &drafting(1, 20, 40)).unwrap();
            driver.run();
            assert_eq!(driver.output(0).len(), 40);
            let drafted = driver.launches.iter().any(|header| header.max_k > 0);
            assert_eq!(
                drafted,
                context >= 21,
                "21 tokens after the prompt: feeding the last one takes a context of 21"
            );
            assert!(driver.launches.last().is_some_and(|header| header.max_k == 0));
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
        let ks: Vec<_> = driver.launches.iter().map(|header| header.max_k).collect();
        let lowered =
            ks.iter().position(|&k| k == 3).and_then(|first| Some(first + ks[first..].iter().position(|&k| k < 3)?));
        let restored = lowered.is_some_and(|at| ks[at..].contains(&3));
        assert!(restored, "{ks:?}");
    }
}

#[test]
fn a_drafter_with_one_first_row_catches_up_each_time() {
    let mut driver = Driver::new(SchedulerConfig { first_rows: 1, ..speculative() });
    driver.add(0, &drafting(1, 9, 40)).unwrap();
    driver.run();
    assert!(driver.launches[2..].iter().any(|header| header.num_draft_tokens == 1 && header.max_k > 0));
}

#[test]
fn a_row_without_blocks_for_drafts_does_no_draft_work() {
    // 20 positions: request 0 holds 11 or 12, request 1 gets the other 8 or 9 for its 8 or 9 tokens and none for a draft.
    let config = SchedulerConfig { num_blocks: 20, block_size: 1, max_model_len: 20, ..speculative() };
    let mut driver = Driver::new(config);
    driver.add(0, &ask(1, 10, 3)).unwrap();
    driver.launch();
    driver.settle();
    driver.add(1, &drafting(2, 5, 15)).unwrap();
    while driver.step() {
        let header = driver.launches[driver.launches.len() - 1];
        let alone = driver.scheduler.num_running() < 2;
        assert!(header.num_draft_tokens == 0 || header.max_k > 0 || alone, "draft work that leads to no draft");
    }
}
