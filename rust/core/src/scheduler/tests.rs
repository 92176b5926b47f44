//! Tests that `check_integrity` finds contradictions. The behaviour of the scheduler is tested in `tests/scheduler`.

use super::layout::{FINISH_LENGTH, FINISH_NONE};
use super::row::RowState;
use super::{PlanOutcome, RequestParams, Scheduler, SchedulerConfig};
use crate::drafts::{Drafter, DrafterKind, HostDrafters, SuffixSettings};
use crate::error::Error;

/// Name of a contradiction, and a function that brings it about in a scheduler.
type Damage = (&'static str, fn(&mut Scheduler));

/// Makes a scheduler with two running requests, one waiting, a step in flight, and a closed row.
fn busy() -> Scheduler {
    let config = SchedulerConfig {
        num_speculative_tokens: 2,
        drafter: Drafter::draft_model(32, 1.0),
        max_in_flight: 2,
        ..SchedulerConfig::new(3, 32, 64, 2, 64)
    };
    let mut scheduler = Scheduler::new(config).unwrap();
    for id in 0..4 {
        let params = RequestParams { limit: 20, num_speculative_tokens: 2, ..RequestParams::default() };
        scheduler.add_request(id, &[1, 2, 3, 4, 5 + id], &params).unwrap();
    }
    let mut record = vec![0; scheduler.record_layout.size];
    let mut settled = vec![0; scheduler.settled_layout.size];
    let mut results = vec![0; scheduler.results_layout.size];
    assert!(matches!(scheduler.plan(&mut record), Ok(PlanOutcome::Step(_))));
    results[..3].fill(1);
    scheduler.settle(0, &results, &mut settled).unwrap();
    assert!(matches!(scheduler.plan(&mut record), Ok(PlanOutcome::Step(_))));
    scheduler.abort(1).unwrap();
    scheduler.check_integrity().unwrap();
    scheduler
}

#[test]
fn the_check_sees_each_contradiction() {
    let breaks: [Damage; 22] = [
        ("an id without a request", |s| _ = s.by_id.insert(99, 0)),
        ("a request under another's id", |s| _ = s.by_id.insert(0, 2)),
        ("a request that is nowhere", |s| _ = s.waiting.pop_first()),
        ("a running order that is none", |s| s.running.reverse()),
        ("a row that runs twice", |s| s.running.push(s.running[0])),
        ("a request on another's row", |s| s.requests[0].row = Some(2)),
        ("a request beyond its limit", |s| s.requests[0].limit = 6),
        ("a free row in use", |s| s.free_rows.push(0)),
        ("a row lost", |s| s.rows[1].state = RowState::Free),
        ("a closed row that waits for nothing", |s| s.rows[1].in_flight = 0),
        ("a live row that miscounts steps", |s| s.rows[0].in_flight = 2),
        ("a live row that miscounts tokens", |s| s.rows[0].emit_upper += 1),
        ("a live row that miscounts emissions", |s| s.rows[0].emitting = 0),
        ("a live row that miscounts drafts", |s| s.rows[0].drafting += 1),
        ("prefill beyond the prompt", |s| s.rows[0].num_computed = 99),
        ("more blocks sent than held", |s| s.rows[0].num_sent = 99),
        ("more registered than computed", |s| s.rows[0].num_registered = 3),
        ("more marked than registered", |s| s.rows[0].num_draft_marked = 99),
        ("a block of two private holders", |s| {
            let block = s.rows[0].blocks[3];
            s.rows[2].blocks.push(block);
        }),
        ("a holder that the pool does not know", |s| {
            let block = s.pool.allocate().unwrap();
            s.rows[0].blocks.push(block);
            s.pool.free(block).unwrap();
        }),
        ("other tokens than were registered", |s| s.requests[0].tokens[0] = 9),
        ("steps out of order", |s| s.steps[0].id = 7),
    ];
    for (name, damage) in breaks {
        let mut scheduler = busy();
        damage(&mut scheduler);
        assert!(matches!(scheduler.check_integrity(), Err(Error::Integrity { .. })), "{name}");
    }
}

/// Checks that a view's slices are the sections, in their order and without gaps.
#[test]
fn views_are_the_sections_by_name() {
    let scheduler = busy();
    let layout = *scheduler.record_layout();
    let record: Vec<i64> = (0..layout.size as i64).collect();
    let view = layout.view(&record);
    assert_eq!(view.header, &record[..super::layout::HEADER_LEN]);
    for (section, slice) in [
        (layout.seq_row, view.seq_row),
        (layout.admit_stop_ids, view.admit_stop_ids),
        (layout.upload_token, view.upload_token),
        (layout.constraint, view.constraint),
    ] {
        assert_eq!(slice, &record[section.range()]);
    }
    let (layout, mut results) = (*scheduler.results_layout(), vec![0; scheduler.results_layout().size]);
    layout.num_emitted.of_mut(&mut results)[1] = 5;
    layout.tokens.of_mut(&mut results)[4] = 6;
    let view = layout.view(&results);
    assert_eq!((view.num_emitted, view.tokens[4], view.num_accepted), (&[0, 5, 0][..], 6, &[0, 0, 0][..]));
    assert_eq!(results.iter().filter(|&&value| value != 0).count(), 2);
}

/// Runs one request of 10 tokens. Returns the numbers of drafts that its steps were planned with, and how often its
/// drafter failed.
fn run_alone(damage: fn(&mut Scheduler)) -> (Vec<usize>, u64) {
    let config = SchedulerConfig {
        num_speculative_tokens: 2,
        host_drafters: HostDrafters::suffix(SuffixSettings::default()),
        ..SchedulerConfig::new(1, 32, 64, 2, 64)
    };
    let mut scheduler = Scheduler::new(config).unwrap();
    let params = RequestParams { limit: 16, num_speculative_tokens: 2, ..RequestParams::default() };
    scheduler.add_request(0, &[1, 2, 1, 2, 1, 2], &params).unwrap();
    let (mut record, mut settled) = (vec![0; scheduler.record_layout.size], vec![0; scheduler.settled_layout.size]);
    let (layout, mut n, mut planned) = (scheduler.results_layout, 6, Vec::new());
    while let PlanOutcome::Step(header) = scheduler.plan(&mut record).unwrap() {
        planned.push(header.max_k);
        if n == 8 {
            damage(&mut scheduler);
        }
        // No draft stands, and the text goes on as it began.
        n += 1;
        let mut results = vec![0; layout.size];
        results[layout.num_emitted.offset] = 1;
        results[layout.num_drafted.offset] = header.max_k as i64;
        results[layout.finish_reason.offset] = if n == 16 { FINISH_LENGTH } else { FINISH_NONE };
        results[layout.tokens.offset] = 1 + (n + 1) % 2;
        scheduler.settle(header.step_id, &results, &mut settled).unwrap();
        scheduler.check_integrity().unwrap();
    }
    assert_eq!(n, 16, "it ran to its end");
    (planned, scheduler.draft_errors_of(DrafterKind::Suffix).0)
}

#[test]
fn a_drafter_on_the_host_that_fails_costs_drafts_and_is_counted() {
    let (planned, failures) = run_alone(|_| ());
    assert!(planned[1..9].iter().all(|&k| k > 0), "{planned:?}");
    assert_eq!(failures, 0);
    // Its tree has tokens that the request never had.
    let (broken, failures) =
        run_alone(|s| s.host_drafts.proposers.suffix.as_mut().unwrap().append(0, &[7; 99]).unwrap());
    assert_eq!(broken[..3], planned[..3]);
    assert!(broken[3..].iter().all(|&k| k == 0), "{broken:?}");
    assert!(failures as usize >= broken.len() - 4, "{failures} of {broken:?}");
}
