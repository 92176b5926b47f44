//! Tests with too few blocks: first K is reduced, then steps settle, then the least important request is preempted.

use specrs_core::scheduler::PlanOutcome;
use specrs_core::{Error, SchedulerConfig};

use crate::common::driver::{Ask, Driver};
use crate::{ask, drafting, small, speculative};

/// Makes a driver with two requests that decode at K = 0. Each has 9 tokens, so 3 blocks of size 4.
fn two_decoding(num_blocks: usize, max_in_flight: usize) -> Driver {
    let mut driver = Driver::new(SchedulerConfig { num_blocks, max_model_len: 24, max_in_flight, ..small() });
    driver.add(0, &ask(1, 8, 16)).unwrap();
    driver.add(1, &ask(2, 8, 16)).unwrap();
    driver.plan_step();
    driver.settle();
    driver
}

#[test]
fn k_is_lowered_before_anything_else() {
    // 7 blocks of 4: both need a fourth for 10 + 3 positions, and request 1 has 12 positions without it.
    let config = SchedulerConfig { num_blocks: 7, max_model_len: 28, max_num_seqs: 2, ..speculative() };
    let mut driver = Driver::new(config);
    driver.add(0, &drafting(1, 9, 19)).unwrap();
    driver.add(1, &drafting(2, 9, 19)).unwrap();
    let mut lowered = false;
    while driver.scheduler.num_preemptions() == 0 {
        let PlanOutcome::Step(header) = driver.plan() else { panic!("a step, K lowered") };
        let ks = driver.section("seq_k", header.num_decode);
        lowered |= header.num_decode == 2 && (1..3).contains(&ks[1]);
        driver.settle();
    }
    assert!(lowered, "no step with a lowered K came before the first preemption");
    driver.run();
}

#[test]
fn steps_in_flight_settle_before_a_preemption() {
    let mut driver = two_decoding(6, 2);
    let mut settle_first = false;
    while driver.scheduler.num_preemptions() == 0 {
        match driver.plan() {
            PlanOutcome::Step(_) if driver.in_flight.len() < 2 => {}
            PlanOutcome::Step(_) => driver.settle(),
            PlanOutcome::SettleFirst => {
                settle_first = true;
                assert_eq!(driver.scheduler.num_preemptions(), 0);
                driver.settle();
            }
            PlanOutcome::Idle => panic!("idle with requests"),
        }
    }
    assert!(settle_first && driver.in_flight.len() == 1, "preempting needs that nothing else is in flight");
    driver.run();
}

#[test]
fn the_least_important_request_gives_way_and_is_not_admitted_in_the_same_plan() {
    let mut driver = two_decoding(6, 1);
    while driver.scheduler.num_preemptions() == 0 {
        driver.plan_step();
        if driver.scheduler.num_preemptions() == 0 {
            driver.settle();
        }
    }
    let header = driver.steps.last().unwrap();
    assert_eq!((header.num_preempted, header.num_admitted, header.num_decode), (1, 0, 1));
    assert_eq!(driver.section("preempted_request_id", 1), [1]);
    driver.run();
}

#[test]
fn the_victim_is_the_least_important_and_not_the_latest() {
    let mut driver = Driver::new(SchedulerConfig { num_blocks: 6, max_model_len: 24, ..small() });
    driver.add(0, &Ask { priority: 1, ..ask(1, 8, 16) }).unwrap();
    driver.add(1, &ask(2, 8, 16)).unwrap();
    while driver.scheduler.num_preemptions() == 0 {
        driver.plan_step();
        driver.settle();
    }
    let preempted = driver.steps.iter().position(|header| header.num_preempted > 0).unwrap();
    assert_eq!(preempted, driver.steps.len() - 1);
    assert_eq!(driver.section("preempted_request_id", 1), [0]);
    driver.run();
}

#[test]
fn of_several_below_the_least_important_gives_way() {
    let mut driver = Driver::new(SchedulerConfig { num_blocks: 9, max_model_len: 24, ..small() });
    for id in 0..3 {
        driver.add(id, &ask(id as u64, 8, 16)).unwrap();
    }
    while driver.scheduler.num_preemptions() == 0 {
        driver.plan_step();
        driver.settle();
    }
    assert_eq!(driver.section("preempted_request_id", 1), [2], "request 0 is the first to need a fourth block");
    driver.run();
}

#[test]
fn blocks_of_a_victim_are_not_for_newcomers_of_the_same_plan() {
    // Request 0 needs a third block at 9 tokens; request 1 holds the other 6; request 2, the most important, waits for 2.
    let mut driver = Driver::new(SchedulerConfig { num_blocks: 8, max_model_len: 32, ..small() });
    driver.add(0, &ask(1, 7, 10)).unwrap();
    driver.add(1, &Ask { priority: 1, ..ask(2, 23, 9) }).unwrap();
    driver.plan_step();
    driver.settle();
    driver.add(2, &Ask { priority: -1, ..ask(3, 6, 5) }).unwrap();
    driver.plan_step();
    assert_eq!(driver.scheduler.num_preemptions(), 0);
    driver.settle();
    let header = driver.plan_step();
    assert_eq!((header.num_preempted, header.num_decode, header.num_admitted), (1, 1, 0));
    driver.settle();
    assert_eq!(driver.plan_step().num_admitted, 1);
    driver.run();
}

#[test]
fn a_row_with_nobody_below_it_is_left_out_until_blocks_come_free() {
    // 5 blocks: request 0 takes 3 for its 9th token, request 1 has 2, needs a third, and is the least important.
    let mut driver = Driver::new(SchedulerConfig { num_blocks: 5, max_model_len: 20, ..small() });
    driver.add(0, &ask(1, 6, 6)).unwrap();
    driver.add(1, &ask(2, 6, 6)).unwrap();
    let decoding: Vec<_> = std::iter::from_fn(|| {
        let more = driver.step();
        more.then(|| driver.steps[driver.steps.len() - 1].num_decode)
    })
    .collect();
    // 7 and 8 tokens fit 2 blocks; then request 0 goes on alone to 12, and request 1 from 9.
    assert_eq!(decoding, [0, 2, 2, 1, 1, 1, 1, 1, 1]);
    assert_eq!(driver.scheduler.num_preemptions(), 0);
}

#[test]
fn a_lone_request_reaches_a_limit_that_fills_the_pool() {
    for block_size in [1, 3, 4, 16] {
        let num_blocks = 48 / block_size;
        let config = SchedulerConfig { num_blocks, block_size, max_model_len: 48, max_in_flight: 2, ..speculative() };
        let mut driver = Driver::new(config);
        driver.add(0, &drafting(1, 5, 43)).unwrap();
        driver.run();
        assert_eq!(driver.output(0).len(), 43);
        assert_eq!(driver.scheduler.num_preemptions(), 0);
    }
}

#[test]
fn a_preempted_request_keeps_its_tokens_and_finds_its_own_blocks() {
    let mut driver = Driver::new(small());
    driver.add(0, &ask(1, 9, 20)).unwrap();
    for _ in 0..5 {
        driver.plan_step();
        driver.settle();
    }
    assert_eq!(driver.output(0).len(), 5);
    driver.preempt(0).unwrap();
    assert_eq!((driver.scheduler.num_waiting(), driver.scheduler.num_running()), (1, 0));
    assert_eq!(driver.scheduler.num_free_blocks(), driver.scheduler.num_blocks());
    let header = driver.plan_step();
    assert_eq!(driver.section("admit_num_tokens", 1), [14]);
    assert_eq!(driver.section("admit_num_cached", 1), [12], "13 tokens had target KV");
    assert_eq!(header.num_prefill_tokens, 2);
    driver.run();
    assert_eq!(driver.output(0).len(), 20);
}

#[test]
fn a_preempted_request_goes_back_to_its_place_in_the_queue() {
    let mut driver = Driver::new(SchedulerConfig { max_num_seqs: 1, ..small() });
    for id in 0..3 {
        driver.add(id, &ask(id as u64, 5, 6)).unwrap();
    }
    driver.plan_step();
    driver.preempt(0).unwrap();
    driver.settle();
    driver.plan_step();
    assert_eq!(driver.section("admit_request_id", 1), [0]);
    driver.run();
}

#[test]
fn results_in_flight_of_a_preempted_request_are_dropped() {
    let mut driver = Driver::new(SchedulerConfig { max_in_flight: 3, ..speculative() });
    driver.add(0, &drafting(1, 9, 30)).unwrap();
    driver.plan_step();
    driver.settle();
    driver.plan_step();
    driver.plan_step();
    let held = driver.scheduler.num_blocks() - driver.scheduler.num_free_blocks();
    driver.preempt(0).unwrap();
    assert_eq!(driver.scheduler.num_blocks() - driver.scheduler.num_free_blocks(), held, "steps in flight name them");
    let header = driver.plan_step();
    assert_eq!(header.num_admitted, 1, "on another row, while the old one is still in flight");
    assert_eq!(driver.section("admit_row", 1), [1]);
    driver.settle();
    assert_eq!(driver.settled[0], -1, "a step whose only sequence is dropped");
    driver.settle();
    assert_eq!(driver.output(0).len(), 1);
    driver.run();
    assert_eq!(driver.output(0).len(), 30);
    assert_eq!(driver.scheduler.num_preemptions(), 1);
}

#[test]
fn everyone_ends_in_a_pool_that_holds_one() {
    for (num_blocks, max_in_flight) in [(16, 1), (17, 2), (24, 2), (33, 3)] {
        let mut driver = Driver::new(SchedulerConfig { num_blocks, max_in_flight, ..speculative() });
        for id in 0..10 {
            driver.add(id, &Ask { priority: id % 3, ..drafting(id as u64, 3 + 5 * id as usize, 60) }).unwrap();
        }
        driver.run();
    }
}

#[test]
fn abort_returns_blocks_whether_waiting_running_or_in_flight() {
    let mut driver = Driver::new(SchedulerConfig { max_num_seqs: 1, max_in_flight: 2, ..speculative() });
    for id in 0..3 {
        driver.add(id, &drafting(id as u64, 9, 30)).unwrap();
    }
    driver.abort(1).unwrap();
    assert_eq!(driver.scheduler.num_waiting(), 2);
    driver.plan_step();
    driver.plan_step();
    driver.abort(0).unwrap();
    assert_eq!(driver.abort(0), Err(Error::UnknownRequest { request_id: 0 }));
    assert!(driver.scheduler.num_free_blocks() < driver.scheduler.num_blocks());
    assert_eq!(driver.plan(), PlanOutcome::SettleFirst);
    driver.settle();
    assert_eq!(driver.plan(), PlanOutcome::SettleFirst, "the only row is still named by a step");
    driver.settle();
    assert_eq!(driver.scheduler.num_free_blocks(), driver.scheduler.num_blocks());
    driver.plan_step();
    driver.settle();
    driver.abort(2).unwrap();
    assert_eq!(driver.scheduler.num_free_blocks(), driver.scheduler.num_blocks(), "nothing in flight: at once");
    assert_eq!(driver.plan(), PlanOutcome::Idle);
    assert!(!driver.scheduler.has_unfinished());
}

#[test]
fn an_id_may_be_used_again_while_its_old_row_is_in_flight() {
    let mut driver = Driver::new(SchedulerConfig { max_in_flight: 2, ..speculative() });
    driver.add(0, &drafting(1, 9, 30)).unwrap();
    driver.plan_step();
    driver.plan_step();
    driver.abort(0).unwrap();
    driver.add(0, &drafting(2, 6, 10)).unwrap();
    driver.run();
    assert_eq!(driver.output(0).len(), 10);
}
