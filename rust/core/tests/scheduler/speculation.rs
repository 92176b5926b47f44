//! Tests of K chosen by a planner, and of rebuilt draft KV.

use std::collections::VecDeque;

use specrs_core::{CostLine, CostModel, Drafter, Error, Lora, PlanOutcome, SchedulerConfig, SpeculationPlanner};

use crate::common::driver::{Ask, Driver};
use crate::{ask, drafting, speculative, with_lag};

/// Returns a planner for `speculative()` with drafts that cost `draft_ms`, where the target costs 1.
fn planner(draft_ms: f64) -> SpeculationPlanner {
    SpeculationPlanner::new(4, 3, costs(draft_ms), 0.0).unwrap()
}

fn costs(draft_ms: f64) -> CostModel {
    let line = CostLine { draft_ms, target_ms: 1.0, vanilla_ms: 1.0 };
    CostModel::lines(&[1, 4], &[line, line]).unwrap()
}

/// Runs one round with a planner: speculates and plans until steps are in flight, then settles one. Returns false
/// when idle. `rows` are the rows of the steps in flight.
fn step(driver: &mut Driver, planner: &mut SpeculationPlanner, rows: &mut VecDeque<Vec<i64>>) -> bool {
    while driver.in_flight.len() < driver.scheduler.config().max_in_flight {
        driver.scheduler.speculate(planner).unwrap();
        driver.check();
        let PlanOutcome::Step(header) = driver.plan() else { break };
        rows.push_back(driver.section("seq_row", header.num_decode).to_vec());
    }
    let Some((_, reports)) = driver.in_flight.front() else { return false };
    let rows = rows.pop_front().unwrap();
    let counts: Vec<_> = reports.iter().zip(&rows).map(|(r, _)| (r.drafted as i64, r.accepted as i64)).collect();
    let (drafted, accepted): (Vec<_>, Vec<_>) = counts.into_iter().unzip();
    planner.settle(&rows, &drafted, &drafted, &accepted, None).unwrap();
    driver.settle();
    true
}

#[test]
fn texts_do_not_depend_on_the_planner_and_it_keeps_to_each_requests_bound() {
    for max_in_flight in 1..4 {
        for (draft_ms, drafts) in [(0.01, true), (100.0, false)] {
            let mut driver = Driver::new(SchedulerConfig { max_in_flight, ..speculative() });
            let mut planner = planner(draft_ms);
            for id in 0..7 {
                driver.add(id, &Ask { k: id as usize % 4, ..ask(id as u64 % 3, 13, 40) }).unwrap();
            }
            let mut rows = VecDeque::new();
            while step(&mut driver, &mut planner, &mut rows) {}
            driver.run();
            assert_eq!(driver.steps.iter().any(|header| header.max_k > 0), drafts);
        }
    }
}

#[test]
fn a_request_bound_to_no_drafts_gets_none_from_a_planner() {
    let mut driver = Driver::new(speculative());
    let mut planner = planner(0.01);
    driver.add(0, &ask(1, 9, 30)).unwrap();
    driver.add(1, &Ask { k: 1, ..ask(2, 9, 30) }).unwrap();
    let mut rows = VecDeque::new();
    while step(&mut driver, &mut planner, &mut rows) {}
    assert!(driver.steps.iter().all(|header| header.max_k <= 1));
    assert!(driver.steps.iter().any(|header| header.max_k == 1));
}

#[test]
fn steps_with_an_adapter_are_planned_at_their_own_costs() {
    for (max_in_flight, base_drafts) in [(1, true), (3, true), (1, false), (3, false)] {
        let mut driver = Driver::new(SchedulerConfig { max_in_flight, max_loras: 1, ..speculative() });
        let ms = |draft: bool| if draft { 0.01 } else { 100.0 };
        let mut planner = planner(ms(base_drafts)).with_lora_costs(costs(ms(!base_drafts)));
        driver.add(0, &drafting(1, 9, 60)).unwrap();
        driver.add(1, &Ask { lora: Some(Lora { id: 5, name: "x".into() }), ..drafting(2, 9, 12) }).unwrap();
        let (mut rows, mut seen) = (VecDeque::new(), [false; 2]);
        while step(&mut driver, &mut planner, &mut rows) {
            for header in driver.steps.iter().filter(|header| header.num_prefill == 0) {
                // The request with the adapter ends first, and later ones have none.
                let with_lora = header.num_decode == 2;
                seen[usize::from(with_lora)] |= header.max_k > 0;
            }
        }
        assert_eq!(seen, [base_drafts, !base_drafts], "with {max_in_flight} in flight");
    }
}

#[test]
fn k_may_change_with_every_step_at_any_depth() {
    for max_in_flight in 1..4 {
        let mut driver = Driver::new(SchedulerConfig { max_in_flight, ..speculative() });
        for id in 0..5 {
            driver.add(id, &drafting(id as u64, 11, 40)).unwrap();
        }
        let (mut turn, mut rows) = (0, VecDeque::new());
        loop {
            // A new planner guesses by its costs alone: slow and fast drafts in turns.
            let mut planner = planner(if turn % 3 == 0 { 100.0 } else { 0.01 });
            turn += 1;
            if !step(&mut driver, &mut planner, &mut rows) {
                break;
            }
        }
        let ks: Vec<_> = driver.steps.iter().map(|header| header.max_k).collect();
        assert!(ks.windows(2).any(|pair| pair == [0, 3]) && ks.windows(2).any(|pair| pair == [3, 0]), "{ks:?}");
    }
}

#[test]
fn a_rebuilt_draft_is_written_from_position_0_before_it_is_read() {
    for max_in_flight in 1..4 {
        let config = SchedulerConfig { max_in_flight, max_num_batched_tokens: 64, ..speculative() };
        let mut driver = Driver::new(config);
        driver.add(0, &drafting(1, 21, 40)).unwrap();
        for _ in 0..6 {
            driver.step();
        }
        driver.rebuild_draft(0).unwrap();
        while !driver.in_flight.is_empty() {
            driver.settle();
        }
        let header = driver.plan_step();
        assert_eq!((header.num_draft_chunks, driver.section("draft_chunk_start", 1)), (1, &[0][..]));
        assert_eq!(header.max_k, 3, "it drafts in the same step");
        let num_steps = driver.steps.len();
        driver.run();
        assert!(driver.steps[num_steps..].iter().all(|header| header.num_draft_chunks == 0), "once is enough");
    }
}

#[test]
fn a_rebuild_waits_for_steps_in_flight_that_draft() {
    let mut driver = Driver::new(SchedulerConfig { max_in_flight: 2, ..speculative() });
    driver.add(0, &drafting(1, 21, 40)).unwrap();
    driver.step();
    driver.step();
    assert_eq!(driver.in_flight.len(), 1);
    driver.rebuild_draft(0).unwrap();
    let header = driver.plan_step();
    assert_eq!((header.num_draft_chunks, header.max_k), (0, 0), "the step before it leaves its own draft_len");
    driver.settle();
    let header = driver.plan_step();
    assert_eq!((header.num_draft_chunks, header.max_k), (1, 3));
    driver.run();
}

#[test]
fn a_rebuild_of_few_positions_tells_the_device_that_it_has_none() {
    let mut driver = Driver::new(SchedulerConfig { drafter: with_lag(8), ..speculative() });
    driver.add(0, &drafting(1, 3, 20)).unwrap();
    driver.step();
    driver.step();
    assert!(driver.scheduler.request(0).unwrap().num_draft_computed_tokens > 0);
    driver.rebuild_draft(0).unwrap();
    let n = driver.scheduler.request(0).unwrap().num_tokens;
    assert!(n <= 8, "the first drafting pass feeds all of {n}");
    let header = driver.plan_step();
    assert_eq!((header.num_draft_chunks, header.max_k), (1, 3));
    assert_eq!((driver.section("draft_chunk_start", 1), driver.section("draft_chunk_len", 1)), (&[0][..], &[0][..]));
    driver.settle();
    driver.plan_step();
    assert_eq!(driver.steps.last().unwrap().num_draft_chunks, 0, "once is enough");
    driver.run();
}

#[test]
fn marks_of_a_broken_draft_are_gone_until_it_is_rebuilt() {
    let mut driver = Driver::new(SchedulerConfig { max_num_batched_tokens: 64, ..speculative() });
    driver.add(0, &drafting(1, 21, 40)).unwrap();
    for _ in 0..4 {
        driver.step();
    }
    let marked = |driver: &Driver| {
        let pool = driver.scheduler.block_pool();
        (0..pool.num_blocks() as i64).filter(|&block| pool.has_draft(block)).count()
    };
    assert!(marked(&driver) >= 5);
    driver.rebuild_draft(0).unwrap();
    // A request with the same prompt comes in between: it must not take the old marks at their word.
    driver.add(1, &drafting(1, 21, 30)).unwrap();
    let header = driver.plan_step();
    assert_eq!((header.num_admitted, driver.section("admit_draft_len", 1)), (1, &[0][..]));
    driver.settle();
    assert!(marked(&driver) >= 5, "rebuilt and drafted with, so marked again");
    driver.run();
}

/// Makes a driver in which requests 1 and 2 draft with a prefix that request 3 is admitted with, in the step that is
/// in flight.
fn two_drafting_and_a_sharer() -> Driver {
    let config = SchedulerConfig { max_in_flight: 2, drafter: Drafter::draft_model(64, 2.0), ..speculative() };
    let mut driver = Driver::new(config);
    driver.add(0, &ask(1, 21, 1)).unwrap();
    driver.run();
    driver.add(1, &drafting(1, 21, 40)).unwrap();
    driver.add(2, &drafting(1, 21, 40)).unwrap();
    while driver.plan_step().max_k == 0 {
        driver.settle();
    }
    while !driver.in_flight.is_empty() {
        driver.settle();
    }
    driver.add(3, &drafting(1, 21, 40)).unwrap();
    let header = driver.plan_step();
    assert_eq!(driver.section("seq_k", header.num_decode), [3, 3]);
    assert_eq!(driver.section("admit_draft_len", header.num_admitted), [20]);
    driver
}

#[test]
fn a_step_that_skipped_marked_blocks_does_not_mark_them_again_once_they_are_broken() {
    let mut driver = two_drafting_and_a_sharer();
    driver.rebuild_draft(3).unwrap();
    let marked = |driver: &Driver| (0..64).filter(|&block| driver.scheduler.block_pool().has_draft(block)).count();
    assert_eq!(marked(&driver), 0, "requests 1 and 2 went on from the same blocks");
    // The step in flight is that of request 2, which has looked at no mark yet.
    driver.settle();
    assert_eq!(marked(&driver), 0);
    driver.run();
    assert!(driver.steps[driver.steps.len() - 4..].iter().any(|header| header.max_k == 3));
}

#[test]
fn those_who_share_broken_blocks_rebuild_from_there_and_nobody_else() {
    let mut driver = two_drafting_and_a_sharer();
    driver.add(4, &drafting(9, 5, 40)).unwrap();
    driver.settle();
    while driver.plan_step().max_k == 0 || driver.scheduler.num_waiting() > 0 {
        driver.settle();
    }
    driver.rebuild_draft(1).unwrap();
    while !driver.in_flight.is_empty() {
        driver.settle();
    }
    let header = driver.plan_step();
    let ks: Vec<_> = (0..4)
        .map(|row| {
            let sequence = driver.section("seq_row", 4).iter().position(|&other| other == row).unwrap();
            driver.section("seq_k", header.num_decode)[sequence]
        })
        .collect();
    assert_eq!(ks, [0, 0, 0, 3]);
    driver.run();
}

#[test]
fn a_planner_of_another_size_is_refused_and_so_is_a_rebuild_of_nothing() {
    let mut driver = Driver::new(speculative());
    let line = CostLine { draft_ms: 0.1, target_ms: 1.0, vanilla_ms: 1.0 };
    for (rows, k) in [(4, 2), (3, 3)] {
        let costs = CostModel::lines(&[1], &[line]).unwrap();
        let error = driver.scheduler.speculate(&mut SpeculationPlanner::new(rows, k, costs, 0.0).unwrap()).unwrap_err();
        assert!(matches!(error, Error::InvalidConfig { .. }), "{error}");
    }
    assert_eq!(driver.scheduler.rebuild_draft(7), Err(Error::UnknownRequest { request_id: 7 }));
    driver.add(7, &drafting(1, 9, 9)).unwrap();
    assert_eq!(driver.scheduler.rebuild_draft(7), Err(Error::NotRunning { request_id: 7 }));
    driver.run();
}
