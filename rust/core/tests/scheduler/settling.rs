//! Tests of settling results: stops, limits, faults, statistics, and leases that outlive their request.

use specrs_core::sampling::MAX_STOP_IDS;
use specrs_core::scheduler::PlanOutcome;
use specrs_core::scheduler::layout::{
    FINISH_ERROR, FINISH_LENGTH, FINISH_NONE, FINISH_STOP, FLAG_CAPACITY, FLAG_DRAFT_NON_FINITE, FLAG_NO_TOKEN_ALLOWED,
    FLAG_TARGET_NON_FINITE,
};
use specrs_core::{Error, SchedulerConfig};

use crate::common::device::Report;
use crate::common::driver::{Ask, Driver};
use crate::common::model::generate;
use crate::{ask, drafting, small, speculative};

#[test]
fn one_token_is_the_whole_output() {
    let mut driver = Driver::new(SchedulerConfig { max_in_flight: 2, ..speculative() });
    driver.add(0, &drafting(1, 9, 1)).unwrap();
    driver.plan_step();
    assert_eq!(driver.plan(), PlanOutcome::SettleFirst, "its limit is reached, whatever the token is");
    driver.settle();
    assert_eq!((driver.output(0).len(), driver.outcomes[&0].finish), (1, FINISH_LENGTH));
    assert_eq!(driver.plan(), PlanOutcome::Idle);
}

#[test]
fn a_stop_at_the_first_token_drops_what_follows_in_flight() {
    let first = generate(&ask(1, 9, 1).prompt, &[], 10, 0, &[]);
    let mut driver = Driver::new(SchedulerConfig { max_in_flight: 2, ..speculative() });
    driver.add(0, &Ask { stop: first.clone(), ..drafting(1, 9, 20) }).unwrap();
    driver.plan_step();
    assert_eq!(driver.plan_step().num_decode, 1);
    driver.settle();
    assert_eq!((driver.output(0), driver.outcomes[&0].finish), (&first[..], FINISH_STOP));
    assert!(driver.scheduler.num_free_blocks() < driver.scheduler.num_blocks(), "a step in flight names the row");
    driver.settle();
    assert_eq!(driver.scheduler.num_free_blocks(), driver.scheduler.num_blocks());
    assert_eq!(driver.settled[0], -1);
    assert_eq!(driver.scheduler.acceptance().drafts(), 0, "steps after the end count nothing");
}

#[test]
fn a_stop_inside_accepted_drafts_cuts_the_text_and_not_the_statistics() {
    let text = generate(&ask(1, 9, 1).prompt, &[], 60, 0, &[]);
    let mut seen_cut = false;
    for stop in 1..text.len() {
        let mut driver = Driver::new(speculative());
        driver.add(0, &Ask { stop: vec![text[stop]], ..drafting(1, 9, 51) }).unwrap();
        let (mut drafts, mut accepted) = (0, 0);
        while let PlanOutcome::Step(_) = driver.plan() {
            let report = driver.in_flight[0].1[0].clone();
            drafts += u64::from(report.drafted > 0);
            accepted += report.accepted as u64;
            let before = driver.output(0).len();
            driver.settle();
            seen_cut |= driver.output(0).len() - before < report.accepted + 1;
        }
        let end = text.iter().position(|&token| token == text[stop]).unwrap();
        assert_eq!((driver.output(0), driver.outcomes[&0].finish), (&text[..=end], FINISH_STOP));
        let statistics = driver.scheduler.acceptance();
        assert_eq!((statistics.drafts(), statistics.accepted_tokens()), (drafts, accepted));
    }
    assert!(seen_cut);
}

#[test]
fn stop_tokens_do_not_count_before_min_tokens() {
    let stop: Vec<i64> = (0..MAX_STOP_IDS as i64).collect();
    for min_tokens in [0, 1, 7] {
        let mut driver = Driver::new(SchedulerConfig { max_in_flight: 2, ..speculative() });
        driver.add(0, &Ask { min_tokens, stop: stop.clone(), ..drafting(1, 9, 40) }).unwrap();
        driver.run();
        assert!(driver.output(0).len() > min_tokens);
        assert_eq!(driver.outcomes[&0].finish, FINISH_STOP);
    }
}

#[test]
fn a_grammar_may_end_its_request_before_min_tokens() {
    for (has_extras, token, allowed) in [(true, 5, true), (true, 6, false), (false, 5, false)] {
        let mut driver = Driver::new(small());
        driver.add(0, &Ask { min_tokens: 7, stop: vec![5], has_extras, ..ask(1, 9, 20) }).unwrap();
        driver.plan_step();
        let report = Report { emitted: vec![token], finish_reason: FINISH_STOP, ..Report::default() };
        let results = driver.results(&[report]);
        let settled = driver.scheduler.settle(0, &results, &mut driver.settled);
        assert_eq!(settled.is_ok(), allowed, "{has_extras}, {token}: {settled:?}");
        assert_eq!(driver.scheduler.has_unfinished(), !allowed);
    }
}

#[test]
fn the_device_judges_the_end_and_what_cannot_be_is_refused() {
    // 9 tokens of a prompt, its next token at position 9, of at most `max_tokens`; 5 is its stop token.
    let cases = [
        ((0, 20, 5), FINISH_STOP, true),
        ((0, 20, 6), FINISH_STOP, false),
        ((1, 20, 5), FINISH_STOP, false),
        ((1, 20, 5), FINISH_NONE, true),
        // It judges stop tokens, and this asks only whether it can be.
        ((0, 20, 5), FINISH_NONE, true),
        ((0, 20, 6), FINISH_LENGTH, false),
        ((0, 1, 6), FINISH_LENGTH, true),
        ((0, 1, 6), FINISH_NONE, false),
        ((0, 1, 5), FINISH_STOP, true),
        ((0, 20, 6), FINISH_ERROR, false),
        ((0, 20, 6), -1, false),
    ];
    for ((min_tokens, max_tokens, token), finish_reason, allowed) in cases {
        let mut driver = Driver::new(small());
        driver.add(0, &Ask { min_tokens, stop: vec![5], ..ask(1, 9, max_tokens) }).unwrap();
        driver.plan_step();
        let results = driver.results(&[Report { emitted: vec![token], finish_reason, ..Report::default() }]);
        let settled = driver.scheduler.settle(0, &results, &mut driver.settled);
        if !allowed {
            let Err(Error::InvalidResults { field: "finish_reason", value, .. }) = settled else {
                panic!("{finish_reason} of {token}: {settled:?}");
            };
            assert_eq!(value, finish_reason);
            continue;
        }
        settled.unwrap();
        let layout = driver.scheduler.settled_layout();
        let told = |offset: usize| driver.settled[offset];
        assert_eq!((told(layout.num_new.offset), told(layout.finish_reason.offset)), (1, finish_reason));
        assert_eq!(driver.scheduler.num_running(), usize::from(finish_reason == FINISH_NONE));
    }
}

#[test]
fn a_stop_token_at_the_limit_is_a_stop() {
    let text = generate(&ask(1, 9, 1).prompt, &[], 14, 0, &[]);
    let mut driver = Driver::new(speculative());
    driver.add(0, &Ask { stop: vec![text[4]], ..drafting(1, 9, 5) }).unwrap();
    driver.run();
    let first = text.iter().position(|&token| token == text[4]).unwrap();
    assert_eq!((driver.output(0).len(), driver.outcomes[&0].finish), (first + 1, FINISH_STOP));
}

#[test]
fn no_k_reaches_beyond_the_limit() {
    for max_tokens in 1..12 {
        for max_in_flight in 1..4 {
            let mut driver = Driver::new(SchedulerConfig { max_in_flight, ..speculative() });
            driver.add(0, &drafting(1, 9, max_tokens)).unwrap();
            driver.run();
            assert_eq!((driver.output(0).len(), driver.outcomes[&0].finish), (max_tokens, FINISH_LENGTH));
        }
    }
}

#[test]
fn results_that_pass_the_limit_by_one_token_are_refused() {
    let mut driver = Driver::new(SchedulerConfig { max_in_flight: 2, ..speculative() });
    driver.add(0, &drafting(1, 9, 8)).unwrap();
    driver.plan_step();
    driver.settle();
    assert_eq!((driver.plan_step().max_k, driver.plan_step().max_k), (3, 3));
    // 10 tokens, then 14, which leaves 3 up to the limit of 17.
    let report = |tokens: usize| Report {
        emitted: vec![5; tokens],
        accepted: tokens - 1,
        drafted: 3,
        finish_reason: if tokens == 3 { FINISH_LENGTH } else { FINISH_NONE },
        ..Report::default()
    };
    let mut settle = |step_id, tokens| {
        let results = driver.results(&[report(tokens)]);
        driver.scheduler.settle(step_id, &results, &mut driver.settled)
    };
    settle(1, 4).unwrap();
    let refused = settle(2, 4).unwrap_err();
    assert!(matches!(refused, Error::InvalidResults { field: "num_emitted", value: 4, .. }), "{refused}");
    settle(2, 3).unwrap();
    assert!(!driver.scheduler.has_unfinished());
}

#[test]
fn a_fault_ends_its_request_and_no_other() {
    let flags =
        [FLAG_TARGET_NON_FINITE, FLAG_CAPACITY, FLAG_NO_TOKEN_ALLOWED, FLAG_TARGET_NON_FINITE | FLAG_DRAFT_NON_FINITE];
    for flag in flags {
        for delay in 0..5 {
            let mut driver =
                Driver::new(SchedulerConfig { max_in_flight: 2, max_num_batched_tokens: 8, ..speculative() });
            driver.add(0, &drafting(1, 12, 30)).unwrap();
            driver.add(1, &drafting(2, 12, 30)).unwrap();
            for _ in 0..delay {
                driver.step();
            }
            driver.device.faults.insert(0, flag);
            driver.run();
            assert_eq!(driver.outcomes[&0].finish, FINISH_ERROR);
            assert_eq!((driver.outcomes[&1].finish, driver.output(1).len()), (FINISH_LENGTH, 30));
            // A request with the same prompt finds only what was computed before the fault; the device checks it.
            driver.add(2, &drafting(1, 12, 30)).unwrap();
            driver.run();
            assert_eq!(driver.output(2).len(), 30);
        }
    }
}

#[test]
fn a_fault_in_the_prompt_leaves_its_blocks_unmarked() {
    let mut driver = Driver::new(small());
    driver.device.faults.insert(0, FLAG_TARGET_NON_FINITE);
    driver.add(0, &ask(1, 20, 5)).unwrap();
    driver.run();
    driver.add(1, &ask(1, 20, 5)).unwrap();
    driver.run();
    assert_eq!(driver.scheduler.num_cached_tokens(), 0);
}

#[test]
fn the_statistics_count_what_the_device_reports() {
    let mut driver = Driver::new(SchedulerConfig { max_in_flight: 2, ..speculative() });
    for id in 0..4 {
        driver.add(id, &Ask { k: id as usize, ..ask(id as u64, 7, 50) }).unwrap();
    }
    let (mut drafts, mut draft_tokens, mut accepted) = (0, 0, 0);
    loop {
        while driver.in_flight.len() < 2 && matches!(driver.plan(), PlanOutcome::Step(_)) {}
        let Some((_, reports)) = driver.in_flight.front().cloned() else { break };
        driver.settle();
        for (sequence, report) in reports.iter().enumerate() {
            if driver.settled[sequence] >= 0 && report.drafted > 0 {
                drafts += 1;
                draft_tokens += report.drafted as u64;
                accepted += report.accepted as u64;
            }
        }
    }
    let statistics = driver.scheduler.acceptance();
    assert!(drafts > 20 && accepted > 20);
    assert_eq!(
        (statistics.drafts(), statistics.draft_tokens(), statistics.accepted_tokens()),
        (drafts, draft_tokens, accepted)
    );
}
