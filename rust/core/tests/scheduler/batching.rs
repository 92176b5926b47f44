//! Tests of admission, chunked prefill, the token budget, and the order of sequences.

use specrs_core::scheduler::PlanOutcome;
use specrs_core::{Drafter, SchedulerConfig};

use crate::common::driver::{Ask, Driver};
use crate::{ask, drafting, small, speculative};

#[test]
fn a_prompt_is_prefilled_in_chunks_and_only_the_last_emits() {
    let mut driver = Driver::new(SchedulerConfig { max_num_batched_tokens: 4, ..small() });
    driver.add(7, &ask(1, 10, 5)).unwrap();
    let mut chunks = Vec::new();
    for _ in 0..3 {
        let header = driver.plan_step();
        assert_eq!((header.num_decode, header.num_prefill), (0, 1));
        let part = |name| driver.section(name, 1)[0];
        chunks.push((
            part("chunk_start"),
            part("chunk_len"),
            part("chunk_is_last"),
            driver.in_flight[0].1[0].emitted.len(),
        ));
        driver.settle();
    }
    assert_eq!(chunks, [(0, 4, 0, 0), (4, 4, 0, 0), (8, 2, 1, 1)]);
    assert_eq!(driver.output(7).len(), 1);
    let header = driver.plan_step();
    assert_eq!((header.num_decode, header.num_prefill), (1, 0));
    assert_eq!(header.used_len, driver.scheduler.record_layout().prefill_token.offset, "no room for prompts");
    driver.run();
    assert_eq!(driver.output(7).len(), 5);
}

#[test]
fn chunks_of_one_prompt_may_all_be_in_flight() {
    let config = SchedulerConfig { max_num_batched_tokens: 4, max_in_flight: 4, ..small() };
    let mut driver = Driver::new(config);
    driver.add(0, &ask(1, 10, 5)).unwrap();
    for _ in 0..3 {
        assert_eq!(driver.plan_step().num_prefill, 1);
    }
    assert_eq!(driver.plan_step().num_decode, 1, "decoding follows before anything has settled");
    driver.run();
}

#[test]
fn prefill_gets_what_decode_leaves_and_at_least_a_quarter() {
    for (decoding, prefill_tokens) in [(0, 8), (1, 4), (2, 2), (3, 2)] {
        let mut driver = Driver::new(SchedulerConfig { max_num_batched_tokens: 8, ..speculative() });
        for id in 0..decoding {
            driver.add(id, &drafting(id as u64, 3, 60)).unwrap();
        }
        while driver
            .steps
            .last()
            .is_none_or(|header| driver.section("seq_k", header.num_decode) != [3].repeat(decoding as usize))
            && decoding > 0
        {
            driver.plan_step();
            driver.settle();
        }
        driver.add(9, &ask(9, 40, 5)).unwrap();
        let header = driver.plan_step();
        assert_eq!(
            (header.num_decode as i64, header.num_prefill_tokens),
            (decoding, prefill_tokens),
            "4 rows per decoding sequence"
        );
        driver.run();
    }
}

#[test]
fn the_quarter_is_rounded_up() {
    for (budget, prefill_tokens) in [(8, 2), (9, 3), (11, 3), (12, 3), (13, 4)] {
        let mut driver = Driver::new(SchedulerConfig { max_num_batched_tokens: budget, ..speculative() });
        for id in 0..3 {
            driver.add(id, &drafting(id as u64, 3, 60)).unwrap();
        }
        while driver.steps.last().is_none_or(|header| driver.section("seq_k", header.num_decode) != [3; 3]) {
            driver.plan_step();
            driver.settle();
        }
        driver.add(9, &ask(9, 40, 5)).unwrap();
        assert_eq!(driver.plan_step().num_prefill_tokens, prefill_tokens, "C = {budget}, 12 decode rows");
    }
}

/// A prompt that is more important than the decoding sequences and planned before them gets only the tokens that they
/// leave.
#[test]
fn a_more_important_prompt_gets_no_more_than_decode_leaves() {
    for (decoding, prefill_tokens) in [(1, 4), (2, 2), (3, 2)] {
        let mut driver = Driver::new(SchedulerConfig { max_num_batched_tokens: 8, ..speculative() });
        for id in 0..decoding {
            driver.add(id, &drafting(id as u64, 3, 60)).unwrap();
        }
        while driver
            .steps
            .last()
            .is_none_or(|header| driver.section("seq_k", header.num_decode) != [3].repeat(decoding as usize))
        {
            driver.plan_step();
            driver.settle();
        }
        driver.add(9, &Ask { priority: -1, ..ask(9, 40, 5) }).unwrap();
        for _ in 0..2 {
            let header = driver.plan_step();
            driver.settle();
            assert_eq!((header.num_decode as i64, header.num_prefill_tokens), (decoding, prefill_tokens));
        }
        driver.run();
    }
}

#[test]
fn decode_never_waits_for_the_budget() {
    let mut driver = Driver::new(SchedulerConfig { max_num_batched_tokens: 1, ..small() });
    for id in 0..4 {
        driver.add(id, &ask(id as u64, 1, 20)).unwrap();
    }
    driver.run();
    assert!(driver.steps.iter().any(|header| header.num_decode == 4));
}

#[test]
fn admission_goes_by_priority_then_arrival_at_any_extreme() {
    let mut driver = Driver::new(SchedulerConfig { max_num_seqs: 6, ..small() });
    for (id, priority) in [(0, 0), (1, i64::MAX), (2, -5), (3, 0), (4, i64::MIN), (5, -5)] {
        driver.add(id, &Ask { priority, ..ask(id as u64, 3, 5) }).unwrap();
    }
    let header = driver.plan_step();
    assert_eq!(driver.section("admit_request_id", header.num_admitted), [4, 2, 5, 0, 3, 1]);
    driver.run();
}

#[test]
fn a_head_that_does_not_fit_is_not_overtaken() {
    let mut driver = Driver::new(SchedulerConfig { num_blocks: 16, ..small() });
    driver.add(0, &ask(1, 30, 10)).unwrap();
    driver.plan_step();
    driver.settle();
    driver.add(1, &ask(2, 40, 2)).unwrap();
    driver.add(2, &ask(3, 2, 2)).unwrap();
    assert_eq!(
        driver.plan_step().num_admitted,
        0,
        "11 blocks for request 1, 8 of 16 are held, and request 2 is behind it"
    );
    driver.run();
}

#[test]
fn a_newcomer_needs_blocks_for_its_whole_prompt_and_the_growth_of_others() {
    // Request 0 holds 2 blocks of 4 and will ask for one more; request 1 needs 3 for 9 tokens and the one it emits.
    for (num_blocks, admitted) in [(5, 0), (6, 1)] {
        let config = SchedulerConfig { num_blocks, max_model_len: 20, ..small() };
        let mut driver = Driver::new(config);
        driver.add(0, &ask(1, 7, 12)).unwrap();
        driver.plan_step();
        driver.settle();
        driver.add(1, &ask(2, 9, 2)).unwrap();
        assert_eq!(driver.plan_step().num_admitted, admitted, "{num_blocks} blocks");
        driver.run();
    }
}

#[test]
fn newcomers_of_one_plan_count_each_other_s_growth() {
    // Both prompts take 2 blocks now; request 0 needs a third for the token it emits.
    for (num_blocks, admitted) in [(4, 1), (5, 2)] {
        let mut driver = Driver::new(SchedulerConfig { num_blocks, max_model_len: 12, ..small() });
        driver.add(0, &ask(1, 8, 2)).unwrap();
        driver.add(1, &ask(2, 5, 2)).unwrap();
        assert_eq!(driver.plan_step().num_admitted, admitted, "{num_blocks} blocks");
        driver.run();
    }
}

#[test]
fn block_updates_of_one_step_stay_within_the_record() {
    let config = SchedulerConfig {
        num_speculative_tokens: 8,
        drafter: Drafter::draft_model(60, 1.0),
        ..SchedulerConfig::new(64, 60, 64 * 60, 1, 8)
    };
    let mut driver = Driver::new(config);
    for id in 0..64 {
        driver.add(id, &Ask { k: 8, ..ask(id as u64, 1, 59) }).unwrap();
    }
    driver.run();
    let most = driver.steps.iter().map(|header| header.num_block_updates).max();
    assert!(most > Some(64 + 8 + 68), "more than one block a row, and chunks and uploads: {most:?}");
}

#[test]
fn uploads_of_one_step_stay_within_the_record() {
    // Nearly all of each prompt is cached, so the prefill budget alone would admit all of them at once.
    let config = SchedulerConfig { max_num_seqs: 8, max_num_batched_tokens: 16, num_blocks: 200, ..small() };
    let mut driver = Driver::new(config);
    driver.add(0, &ask(1, 60, 1)).unwrap();
    driver.run();
    for id in 1..8 {
        driver.add(id, &ask(1, 60, 3)).unwrap();
    }
    let header = driver.plan_step();
    assert_eq!((header.num_admitted, header.num_upload_tokens), (1, 60), "80 elements: 64 + 16");
    driver.run();
}

#[test]
fn rows_are_used_again() {
    let mut driver = Driver::new(SchedulerConfig { max_num_seqs: 2, max_in_flight: 2, ..small() });
    for id in 0..9 {
        driver.add(id, &ask(id as u64, 5, 4)).unwrap();
    }
    driver.run();
}

#[test]
fn decoding_sequences_are_sorted_by_k_and_then_by_importance() {
    let mut driver = Driver::new(SchedulerConfig { max_num_seqs: 5, ..speculative() });
    for (id, k) in [(0, 1), (1, 3), (2, 0), (3, 3), (4, 1)] {
        driver.add(id, &Ask { k, ..ask(id as u64, 2, 40) }).unwrap();
    }
    driver.plan_step();
    driver.settle();
    let header = driver.plan_step();
    assert_eq!(driver.section("seq_k", 5), [3, 3, 1, 1, 0]);
    assert_eq!(driver.section("seq_row", 5), [1, 3, 0, 4, 2], "rows in order of admission");
    assert_eq!(header.max_k, 3);
    driver.run();
}

#[test]
fn as_many_steps_as_configured_and_not_one_more() {
    for max_in_flight in 1..5 {
        let mut driver = Driver::new(SchedulerConfig { max_in_flight, ..speculative() });
        driver.add(0, &drafting(1, 5, 50)).unwrap();
        for _ in 0..max_in_flight {
            driver.plan_step();
        }
        assert_eq!(driver.plan(), PlanOutcome::SettleFirst);
        assert_eq!(driver.scheduler.num_in_flight(), max_in_flight);
        driver.run();
        assert_eq!(driver.plan(), PlanOutcome::Idle);
    }
}

#[test]
fn equal_calls_give_equal_records() {
    let run = || {
        let mut driver = Driver::new(SchedulerConfig { num_blocks: 20, max_in_flight: 2, ..speculative() });
        for id in 0..12 {
            driver.add(id, &drafting(id as u64 % 3, 11, 20)).unwrap();
        }
        let mut records = Vec::new();
        while driver.step() {
            records.push(driver.record.clone());
        }
        assert!(driver.scheduler.num_preemptions() > 0);
        records
    };
    assert_eq!(run(), run());
}
