//! Tests of callers with many requests, which share rows and blocks with the others.

use std::collections::BTreeMap;

use specrs_core::SchedulerConfig;

use crate::common::driver::{Ask, Driver};
use crate::{ask, small};

/// Adds `count` requests of a caller, with ids from `first` on.
fn crowd(driver: &mut Driver, first: i64, count: i64, caller: i64) {
    for id in first..first + count {
        driver.add(id, &Ask { caller: Some(caller), ..ask(id as u64, 6, 50) }).unwrap();
    }
}

/// Plans `steps` times. After each plan, settles until fewer steps are in flight than may be.
fn go_on(driver: &mut Driver, steps: usize) {
    for _ in 0..steps {
        driver.plan();
        while driver.in_flight.len() >= driver.scheduler.config().max_in_flight {
            driver.settle();
        }
    }
}

/// Returns the number of running requests by caller, which is the request id divided by 100.
fn held(driver: &Driver) -> BTreeMap<i64, usize> {
    let mut held = BTreeMap::new();
    let waiting = driver.scheduler.num_waiting();
    for id in driver.scheduler.request_ids().skip(waiting) {
        *held.entry(id / 100).or_default() += 1;
    }
    held
}

fn eight_rows(max_in_flight: usize) -> Driver {
    Driver::new(SchedulerConfig { max_num_seqs: 8, num_blocks: 256, max_in_flight, ..small() })
}

#[test]
fn a_request_after_a_crowd_that_has_every_row_gets_one() {
    for depth in [1, 2, 4] {
        let mut driver = eight_rows(depth);
        crowd(&mut driver, 100, 20, 1);
        go_on(&mut driver, 3);
        assert_eq!(held(&driver), BTreeMap::from([(1, 8)]));
        driver.add(0, &ask(3, 6, 5)).unwrap();
        go_on(&mut driver, depth + 2);
        assert_eq!(held(&driver), BTreeMap::from([(0, 1), (1, 7)]), "depth {depth}");
        driver.run();
        assert_eq!(driver.scheduler.num_preemptions(), 1, "depth {depth}: the crowd's row is not taken back");
    }
}

#[test]
fn callers_come_to_hold_the_same_number_of_rows_and_keep_them() {
    for depth in [1, 2] {
        let mut driver = eight_rows(depth);
        crowd(&mut driver, 100, 20, 1);
        go_on(&mut driver, 2);
        crowd(&mut driver, 200, 20, 2);
        go_on(&mut driver, 16);
        assert_eq!(held(&driver), BTreeMap::from([(1, 4), (2, 4)]));
        let preemptions = driver.scheduler.num_preemptions();
        go_on(&mut driver, 10);
        assert_eq!(
            (held(&driver), driver.scheduler.num_preemptions()),
            (BTreeMap::from([(1, 4), (2, 4)]), preemptions)
        );
        driver.run();
    }
}

#[test]
fn those_that_wait_are_admitted_in_turn() {
    let mut driver = eight_rows(1);
    crowd(&mut driver, 100, 20, 1);
    crowd(&mut driver, 200, 20, 2);
    driver.add(0, &ask(3, 6, 50)).unwrap();
    go_on(&mut driver, 6);
    assert_eq!(held(&driver)[&0], 1);
    assert!(held(&driver)[&1].abs_diff(held(&driver)[&2]) <= 1, "{:?}", held(&driver));
    driver.run();
    assert_eq!(driver.scheduler.num_preemptions(), 0);
}

#[test]
fn who_found_no_blocks_gets_those_of_a_crowd() {
    // Each of the crowd comes to 14 blocks: they take all there are, with rows to spare.
    let mut driver = Driver::new(SchedulerConfig { max_num_seqs: 8, num_blocks: 28, max_in_flight: 2, ..small() });
    crowd(&mut driver, 100, 7, 1);
    while driver.scheduler.num_free_blocks() >= 4 {
        go_on(&mut driver, 1);
    }
    assert!(driver.scheduler.num_running() < 8);
    let (running, preemptions) = (driver.scheduler.num_running(), driver.scheduler.num_preemptions());
    driver.add(0, &ask(3, 30, 3)).unwrap();
    go_on(&mut driver, 4 * running);
    assert_eq!(driver.output(0).len(), 3);
    assert!(driver.scheduler.num_preemptions() > preemptions);
    driver.run();
}

#[test]
fn a_better_priority_keeps_its_rows_and_requests_without_a_caller_their_places() {
    let mut driver = eight_rows(1);
    for id in 100..108 {
        driver.add(id, &Ask { caller: Some(1), priority: -1, ..ask(id as u64, 6, 20) }).unwrap();
    }
    go_on(&mut driver, 3);
    driver.add(0, &ask(3, 6, 5)).unwrap();
    go_on(&mut driver, 3);
    assert_eq!(held(&driver), BTreeMap::from([(1, 8)]));
    driver.run();

    let mut driver = eight_rows(1);
    for id in 100..108 {
        driver.add(id, &ask(id as u64, 6, 20)).unwrap();
    }
    go_on(&mut driver, 3);
    crowd(&mut driver, 200, 4, 2);
    go_on(&mut driver, 3);
    assert_eq!(held(&driver), BTreeMap::from([(1, 8)]));
    driver.run();
    assert_eq!(driver.scheduler.num_preemptions(), 0);
}

#[test]
fn the_last_of_a_crowd_loses_its_blocks_and_not_who_came_last() {
    // All four are admitted with 2 blocks each, and come to need a fourth.
    let mut driver = Driver::new(SchedulerConfig { num_blocks: 12, ..small() });
    for id in 100..103 {
        driver.add(id, &Ask { caller: Some(1), ..ask(id as u64, 6, 20) }).unwrap();
    }
    driver.add(0, &ask(3, 6, 20)).unwrap();
    go_on(&mut driver, 1);
    assert_eq!(driver.scheduler.num_running(), 4);
    while driver.scheduler.num_preemptions() == 0 {
        driver.plan_step();
        driver.settle();
    }
    assert_eq!(driver.section("preempted_request_id", 1), [102], "the third of its caller, before a caller's only one");
    assert_eq!(held(&driver), BTreeMap::from([(0, 1), (1, 2)]));
    driver.run();
}
