//! Tests of rejected calls: which error they return, and that nothing has changed.

use specrs_core::scheduler::layout::{FINISH_LENGTH, FINISH_STOP};
use specrs_core::scheduler::{RequestParams, Scheduler};
use specrs_core::{Drafter, Error, ExtraKey, HostDrafters, NgramProposer, SchedulerConfig};

use crate::common::device::Report;
use crate::common::driver::{Ask, Driver};
use crate::{ask, drafting, small, speculative, with_lag};

fn field_of(error: &Error) -> &'static str {
    match error {
        Error::InvalidConfig { field, .. }
        | Error::InvalidRequest { field, .. }
        | Error::InvalidResults { field, .. } => field,
        other => panic!("{other}"),
    }
}

#[test]
fn settings_outside_their_range() {
    let refused: [(&str, SchedulerConfig); 15] = [
        ("max_num_seqs", SchedulerConfig { max_num_seqs: 0, ..small() }),
        ("max_num_seqs", SchedulerConfig { max_num_seqs: usize::MAX, ..small() }),
        ("max_model_len", SchedulerConfig { max_model_len: 1, ..small() }),
        ("num_blocks", SchedulerConfig { num_blocks: 0, ..small() }),
        ("block_size", SchedulerConfig { block_size: 0, ..small() }),
        ("block_size", SchedulerConfig { block_size: usize::MAX, ..small() }),
        ("max_num_batched_tokens", SchedulerConfig { max_num_batched_tokens: 0, ..small() }),
        ("num_speculative_tokens", SchedulerConfig { num_speculative_tokens: 1025, ..small() }),
        ("drafter.max_model_len", SchedulerConfig { drafter: Drafter::draft_model(0, 1.0), ..small() }),
        (
            "max_in_flight",
            SchedulerConfig {
                host_drafters: HostDrafters::ngram(NgramProposer::default()),
                max_in_flight: 2,
                ..small()
            },
        ),
        ("drafter.max_draft_lag", SchedulerConfig { drafter: with_lag(0), ..small() }),
        ("drafter.cost_ratio", SchedulerConfig { drafter: Drafter::draft_model(64, 0.0), ..small() }),
        ("drafter.cost_ratio", SchedulerConfig { drafter: Drafter::draft_model(64, f64::NAN), ..small() }),
        ("drafter.cost_ratio", SchedulerConfig { drafter: Drafter::draft_model(64, f64::INFINITY), ..small() }),
        ("max_in_flight", SchedulerConfig { max_in_flight: 0, ..small() }),
    ];
    for (field, config) in refused {
        assert_eq!(field_of(&Scheduler::new(config).unwrap_err()), field);
    }
}

#[test]
fn requests_that_can_never_be_served() {
    let mut driver = Driver::new(SchedulerConfig { num_blocks: 10, ..speculative() });
    driver.add(5, &ask(1, 5, 5)).unwrap();
    let before = format!("{:?}", driver.scheduler);
    let key = |position| ExtraKey { position, key: b"image" };
    let fine = RequestParams { limit: 10, ..RequestParams::default() };
    let refused: [(&str, i64, &[i64], RequestParams<'_>); 12] = [
        ("request_id", -1, &[1], fine.clone()),
        ("token_ids", 0, &[], fine.clone()),
        ("token_ids", 0, &[1, -1], fine.clone()),
        ("token_ids", 0, &[1 << 32], fine.clone()),
        ("stop_token_ids", 0, &[1], RequestParams { stop_token_ids: &[-3], ..fine.clone() }),
        ("limit", 0, &[1, 2, 3], RequestParams { limit: 3, ..fine.clone() }),
        ("limit", 0, &[1], RequestParams { limit: 65, ..fine.clone() }),
        ("limit", 0, &[1], RequestParams { limit: 41, ..fine.clone() }),
        ("num_speculative_tokens", 0, &[1], RequestParams { num_speculative_tokens: 4, ..fine.clone() }),
        ("extra_keys", 0, &[1, 2], RequestParams { extra_keys: &[key(2)], ..fine.clone() }),
        ("extra_keys", 0, &[1, 2], RequestParams { extra_keys: &[key(1), key(0)], ..fine.clone() }),
        ("extra_keys", 0, &[1], RequestParams { extra_keys: &[ExtraKey { position: 0, key: b"" }], ..fine.clone() }),
    ];
    for (field, id, tokens, params) in refused {
        assert_eq!(field_of(&driver.scheduler.add_request(id, tokens, &params).unwrap_err()), field);
    }
    assert_eq!(driver.scheduler.add_request(5, &[1], &fine), Err(Error::DuplicateRequest { request_id: 5 }));
    assert_eq!(driver.scheduler.abort(6), Err(Error::UnknownRequest { request_id: 6 }));
    assert_eq!(driver.scheduler.preempt(6), Err(Error::UnknownRequest { request_id: 6 }));
    assert_eq!(driver.scheduler.preempt(5), Err(Error::NotRunning { request_id: 5 }));
    assert_eq!(format!("{:?}", driver.scheduler), before);
    driver.scheduler.add_request(0, &[1], &RequestParams { limit: 40, ..fine }).expect("the whole pool is allowed");
}

#[test]
fn buffers_of_the_wrong_size() {
    let mut driver = Driver::new(speculative());
    driver.add(0, &drafting(1, 5, 5)).unwrap();
    let before = format!("{:?}", driver.scheduler);
    for delta in [-1_isize, 1] {
        let mut record = vec![0; driver.record.len().saturating_add_signed(delta)];
        assert!(matches!(driver.scheduler.plan(&mut record), Err(Error::InvalidBuffer { name: "record", .. })));
    }
    assert_eq!(format!("{:?}", driver.scheduler), before);
    driver.plan_step();
    let before = format!("{:?}", driver.scheduler);
    let results = driver.results(&driver.in_flight[0].1);
    let mut settled = driver.settled.clone();
    let short = driver.scheduler.settle(0, &results[1..], &mut settled);
    assert!(matches!(short, Err(Error::InvalidBuffer { name: "results", .. })));
    let short = driver.scheduler.settle(0, &results, &mut settled[1..]);
    assert!(matches!(short, Err(Error::InvalidBuffer { name: "settled", .. })));
    assert_eq!(format!("{:?}", driver.scheduler), before);
    driver.run();
}

#[test]
fn steps_settle_in_order_and_once() {
    let mut driver = Driver::new(SchedulerConfig { max_in_flight: 2, ..speculative() });
    driver.add(0, &drafting(1, 5, 20)).unwrap();
    let results = vec![0; driver.scheduler.results_layout().size];
    let mut settled = driver.settled.clone();
    let mut settle = |driver: &mut Driver, id| driver.scheduler.settle(id, &results, &mut settled);
    assert_eq!(settle(&mut driver, 0), Err(Error::SettleOrder { step_id: 0, expected: None }));
    driver.plan_step();
    driver.plan_step();
    let before = format!("{:?}", driver.scheduler);
    for id in [1, 2, u64::MAX] {
        assert_eq!(settle(&mut driver, id), Err(Error::SettleOrder { step_id: id, expected: Some(0) }));
    }
    assert_eq!(format!("{:?}", driver.scheduler), before);
    driver.settle();
    assert_eq!(settle(&mut driver, 0), Err(Error::SettleOrder { step_id: 0, expected: Some(1) }));
    driver.run();
}

/// Changes a good report of a step with one decoding sequence (K = 3) and one chunk, and expects an error that names
/// `field`.
fn refused(field: &str, sequence: usize, change: impl Fn(&mut Report)) {
    let mut driver = Driver::new(SchedulerConfig { max_num_batched_tokens: 16, ..speculative() });
    driver.add(0, &Ask { stop: vec![96], ..drafting(1, 12, 20) }).unwrap();
    for _ in 0..2 {
        driver.plan_step();
        driver.settle();
    }
    driver.add(1, &ask(2, 40, 5)).unwrap();
    let header = driver.plan_step();
    assert_eq!((header.num_decode, header.num_prefill, header.max_k), (1, 1, 3));
    let before = format!("{:?}", driver.scheduler);
    let mut reports = driver.in_flight[0].1.clone();
    change(&mut reports[sequence]);
    let results = driver.results(&reports);
    let mut settled = driver.settled.clone();
    let error = driver.scheduler.settle(header.step_id, &results, &mut settled).unwrap_err();
    assert_eq!(field_of(&error), field, "{error}");
    assert_eq!(format!("{:?}", driver.scheduler), before);
    assert_eq!(settled, driver.settled);
    driver.run();
}

#[test]
fn results_that_no_step_can_have() {
    refused("flags", 0, |report| report.flags = 32);
    refused("flags", 1, |report| report.flags = -1);
    refused("num_drafted", 0, |report| report.drafted = 4);
    refused("num_drafted", 1, |report| report.drafted = 1);
    refused("num_accepted", 0, |report| (report.drafted, report.accepted) = (1, 2));
    refused("num_accepted", 0, |report| report.accepted = usize::MAX);
    refused("num_emitted", 0, |report| (report.emitted, report.accepted) = (vec![1; 4], 1));
    refused("num_emitted", 0, |report| (report.emitted, report.accepted, report.drafted) = (vec![1; 2], 2, 3));
    refused("num_emitted", 0, |report| *report = Report::default());
    refused("num_emitted", 1, |report| report.emitted = vec![1]);
    refused("finish_reason", 0, |report| report.finish_reason = FINISH_LENGTH);
    refused("finish_reason", 0, |report| report.finish_reason = FINISH_STOP);
    refused("finish_reason", 0, |report| report.finish_reason = -1);
    refused("finish_reason", 1, |report| report.finish_reason = FINISH_LENGTH);
    refused("tokens", 0, |report| (report.emitted, report.accepted) = (vec![-1], 0));
    refused("tokens", 0, |report| (report.emitted, report.accepted) = (vec![1, 1 << 32], 1));
}

#[test]
fn more_tokens_than_the_limit_allows() {
    let mut driver = Driver::new(SchedulerConfig { max_in_flight: 3, ..speculative() });
    driver.add(0, &drafting(1, 5, 7)).unwrap();
    for k in [0, 3, 3] {
        assert_eq!(driver.plan_step().max_k, k);
    }
    driver.settle();
    // Both steps were planned when the request could be short enough for K = 3; a device cuts K when it is not.
    let results = driver.results(&[Report { emitted: vec![1; 4], accepted: 3, drafted: 3, ..Report::default() }]);
    driver.scheduler.settle(1, &results, &mut driver.settled).expect("5 tokens of 7");
    let error = driver.scheduler.settle(2, &results, &mut driver.settled).unwrap_err();
    assert_eq!(field_of(&error), "num_emitted", "{error}");
}
