//! Tests of drafters on the host: what `plan` writes into the record, and what it leaves unchanged.

use specrs_core::{CostLine, CostModel, HostDrafters, NgramProposer, PlanOutcome, SchedulerConfig, SpeculationPlanner};

use crate::common::driver::{Ask, Driver, prompt};

/// Returns settings with K = 3 and n-grams of 1 or 2 tokens: texts of the model contain no longer ones twice.
fn looking_up() -> SchedulerConfig {
    let host_drafters = HostDrafters::ngram(NgramProposer::new(1, 2).expect("allowed"));
    SchedulerConfig { num_speculative_tokens: 3, host_drafters, ..SchedulerConfig::new(4, 64, 64, 4, 32) }
}

#[test]
fn the_record_has_each_sequences_drafts_and_no_draft_kv_is_kept() {
    let mut driver = Driver::new(looking_up());
    for (id, k) in [(1, 3), (2, 1), (3, 0)] {
        driver.add(id, &Ask { k, prompt: prompt(1, 50), max_tokens: 9, ..Ask::default() }).unwrap();
    }
    driver.run();
    let drafted: Vec<_> = driver.steps.iter().map(|header| header.max_k).collect();
    assert!(drafted.contains(&3), "{drafted:?}");
    assert!(driver.steps.iter().all(|header| header.num_draft_chunks == 0), "nothing to catch up");
    let pool = driver.scheduler.block_pool();
    assert!((0..64).any(|block| pool.is_registered(block)), "prefixes are shared");
    assert!((0..64).all(|block| !pool.has_draft(block) && pool.claimant(block).is_none()), "{drafted:?}");
}

#[test]
fn drafts_are_as_many_as_the_request_asks_for_and_has_room_for() {
    let mut driver = Driver::new(looking_up());
    // All tokens of the vocabulary: whatever comes next has been there before.
    let vocabulary: Vec<i64> = (0..55).collect();
    let (mut steps, mut seen) = (0, [0; 4]);
    for seed in 0..40 {
        let start = seed % 42;
        let all: Vec<i64> = vocabulary.iter().map(|token| (token + start) % 97).collect();
        for (id, k, max_tokens) in [(0, 3, 9), (1, 2, 9), (2, 3, 3), (3, 0, 9)] {
            driver.add(seed * 4 + id, &Ask { k, max_tokens, prompt: all.clone(), ..Ask::default() }).unwrap();
        }
        while driver.scheduler.has_unfinished() {
            let PlanOutcome::Step(header) = driver.plan() else { panic!("a step") };
            let (rows, ks) = (driver.section("seq_row", header.num_decode), driver.section("seq_k", header.num_decode));
            assert!(rows.len() == ks.len());
            steps += 1;
            for &k in ks {
                seen[k as usize] += 1;
            }
            driver.settle();
        }
    }
    assert!(steps > 0 && seen.iter().all(|&count| count > 0), "sequences by K: {seen:?}");
    assert!(driver.scheduler.acceptance().drafts() > 0);
}

#[test]
fn a_planner_is_told_what_the_text_proposes() {
    let line = CostLine { draft_ms: 0.001, target_ms: 1.0, vanilla_ms: 1.0 };
    let costs = CostModel::lines(&[1, 4], &[line, line]).expect("allowed");
    let mut planner = SpeculationPlanner::new(4, 3, costs, 0.0).expect("allowed");
    let mut driver = Driver::new(looking_up());
    for id in 0..6 {
        driver.add(id, &Ask { k: 3, max_tokens: 20, prompt: prompt(id as u64, 40), ..Ask::default() }).unwrap();
    }
    while driver.scheduler.has_unfinished() {
        driver.scheduler.speculate(&mut planner).expect("a planner of the same sizes");
        driver.check();
        let PlanOutcome::Step(header) = driver.plan() else { panic!("a step") };
        let rows = driver.section("seq_row", header.num_decode).to_vec();
        let planned = driver.section("seq_k", header.num_decode).to_vec();
        let (_, reports) = driver.in_flight.front().expect("a step");
        let drafted: Vec<_> = reports[..rows.len()].iter().map(|report| report.drafted as i64).collect();
        let accepted: Vec<_> = reports[..rows.len()].iter().map(|report| report.accepted as i64).collect();
        assert_eq!(planned, drafted);
        planner.settle(&rows, &planned, &drafted, &accepted, None).expect("results of its own rows");
        driver.settle();
    }
    driver.run();
}

#[test]
fn a_row_given_to_another_request_proposes_from_its_text() {
    // One row, and requests of equal length one after the other: the proposal of the first is not the second's.
    let mut driver = Driver::new(SchedulerConfig { max_num_seqs: 1, ..looking_up() });
    for id in 0..30 {
        driver.add(id, &Ask { k: 3, max_tokens: 6, prompt: prompt(id as u64, 50), ..Ask::default() }).unwrap();
        if id % 3 == 1 {
            driver.plan_step();
            driver.settle();
            driver.plan_step();
            driver.settle();
            let _ = driver.preempt(id);
        }
    }
    driver.run();
    assert!(driver.scheduler.acceptance().drafts() > 0);
}
