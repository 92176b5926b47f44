//! Tests of the view of a request by its id.

use specrs_core::{Error, RequestState, SchedulerConfig};

use crate::common::driver::Driver;
use crate::{ask, drafting, small, speculative};

#[test]
fn a_request_through_its_life() {
    let mut driver = Driver::new(SchedulerConfig { max_num_batched_tokens: 8, ..speculative() });
    driver.add(5, &drafting(1, 13, 20)).unwrap();
    let view = driver.scheduler.request(5).unwrap();
    assert_eq!((view.state, view.row, view.num_tokens, view.limit), (RequestState::Waiting, None, 13, 33));
    assert_eq!((view.num_computed_tokens, view.num_draft_computed_tokens, view.block_table), (0, 0, &[][..]));

    driver.plan_step();
    let view = driver.scheduler.request(5).unwrap();
    assert_eq!((view.state, view.row, view.num_in_flight), (RequestState::Prefill, Some(0), 1));
    assert_eq!((view.num_computed_tokens, view.block_table), (8, &[0, 1][..]), "planned counts");
    driver.settle();
    driver.plan_step();
    driver.settle();
    let view = driver.scheduler.request(5).unwrap();
    assert_eq!((view.state, view.num_tokens), (RequestState::Decode, 14));
    assert_eq!((view.num_computed_tokens, view.num_draft_computed_tokens), (13, 0), "the draft has not begun");
    assert_eq!((view.block_table.len(), view.num_in_flight), (4, 0));

    driver.plan_step();
    let view = driver.scheduler.request(5).unwrap();
    assert_eq!(view.num_computed_tokens, 14, "its iteration adds a token at least");
    assert!(view.num_draft_computed_tokens > 0, "catch-up is planned");
    while driver.scheduler.request(5).is_ok_and(|view| view.num_draft_computed_tokens < 14) {
        driver.step();
    }
    let view = driver.scheduler.request(5).expect("it drafts before it ends");
    assert!(view.num_computed_tokens - view.num_draft_computed_tokens <= 1, "{view:?}");
    assert_eq!(view.num_speculative_tokens, 3);

    driver.run();
    assert_eq!(driver.scheduler.request(5), Err(Error::UnknownRequest { request_id: 5 }));
    assert_eq!(driver.scheduler.request(-1), Err(Error::UnknownRequest { request_id: -1 }));
}

#[test]
fn lengths_and_tables_are_the_devices() {
    for max_in_flight in 1..=3 {
        let mut driver = Driver::new(SchedulerConfig { num_blocks: 22, max_in_flight, ..speculative() });
        for id in 0..6 {
            driver.add(id, &drafting(id as u64 % 2, 9 + id as usize, 30)).unwrap();
        }
        while driver.step() {
            for id in driver.scheduler.request_ids() {
                let view = driver.scheduler.request(id).unwrap();
                assert_eq!(view.num_tokens, driver.outcomes[&id].output.len() + 9 + id as usize);
                let Some(row) = view.row else { continue };
                let (target_len, draft_len, table) = driver.device.row(row);
                assert!(view.num_computed_tokens <= target_len, "{view:?}");
                assert!(view.num_draft_computed_tokens <= draft_len, "{view:?}");
                assert!(view.block_table.starts_with(table));
                if view.num_in_flight == 0 {
                    assert_eq!((view.num_computed_tokens, view.num_draft_computed_tokens), (target_len, draft_len));
                }
            }
        }
        assert_eq!(driver.scheduler.request_ids().count(), 0);
    }
}

#[test]
fn ids_come_by_state_and_importance() {
    let mut driver = Driver::new(SchedulerConfig { max_num_seqs: 2, ..small() });
    for id in 0..5 {
        driver.add(id, &ask(id as u64, 5, 9)).unwrap();
    }
    driver.plan_step();
    assert_eq!(driver.scheduler.request_ids().collect::<Vec<_>>(), [2, 3, 4, 0, 1]);
    driver.preempt(0).unwrap();
    assert_eq!(driver.scheduler.request_ids().collect::<Vec<_>>(), [0, 2, 3, 4, 1]);
    assert_eq!(driver.scheduler.request(0).map(|view| (view.state, view.row)), Ok((RequestState::Waiting, None)));
}
