//! Tests of drafts that come with a request: tokens that its grammar forces, and its prediction.

use specrs_core::{
    CostLine, CostModel, Drafter, DrafterKind, Error, HostDrafters, NgramProposer, SchedulerConfig, SpeculationPlanner,
};

use crate::common::driver::{Ask, Driver, prompt};
use crate::with_drafts_of_requests;

/// Returns settings with K = 5 and drafts of requests, next to prompt lookup that never finds anything.
fn requests_draft() -> SchedulerConfig {
    let never = HostDrafters::ngram(NgramProposer::new(1024, 1024).expect("allowed"));
    SchedulerConfig {
        num_speculative_tokens: 5,
        host_drafters: with_drafts_of_requests(never),
        ..SchedulerConfig::new(4, 64, 64, 4, 32)
    }
}

fn asking(seed: u64) -> Ask {
    Ask { k: 5, max_tokens: 20, prompt: prompt(seed, 30), ..Ask::default() }
}

/// Returns a planner of 4 rows and K = 5 for which no draft is worth its time.
fn that_never_drafts() -> SpeculationPlanner {
    let (drafting, plain) = (
        CostLine { draft_ms: 0.0, target_ms: 100.0, vanilla_ms: 1.0 },
        CostLine { draft_ms: 0.0, target_ms: 100.0, vanilla_ms: 1.0 },
    );
    SpeculationPlanner::new(4, 5, CostModel::lines(&[1, 4], &[drafting, plain]).expect("allowed"), 0.0)
        .expect("allowed")
}

/// Runs request 0 until it has output, and returns the tokens that it will have after that.
fn started(driver: &mut Driver, ask: &Ask) -> Vec<i64> {
    driver.add(0, ask).unwrap();
    while driver.outcomes[&0].output.is_empty() {
        driver.step();
    }
    let outcome = &driver.outcomes[&0];
    outcome.expected[outcome.output.len()..].to_vec()
}

/// Plans the next step, which must have one decoding sequence and no prompt, and settles it. Returns the drafter's
/// number and the K draft tokens of the sequence.
fn next_drafts(driver: &mut Driver) -> (i64, Vec<i64>) {
    let header = driver.plan_step();
    assert_eq!((header.num_decode, header.num_prefill), (1, 0));
    let (drafter, k) = (driver.section("seq_drafter", 1)[0], driver.section("seq_k", 1)[0]);
    let drafts = driver.section("draft_token", k as usize).to_vec();
    driver.settle();
    (drafter, drafts)
}

#[test]
fn grammar_drafts_are_drafted_until_the_request_has_more() {
    let mut driver = Driver::new(requests_draft());
    let rest = started(&mut driver, &asking(1));
    driver.scheduler.set_grammar_drafts(0, &rest[..3]).unwrap();
    assert_eq!(next_drafts(&mut driver), (DrafterKind::Grammar as i64, rest[..3].to_vec()));
    assert_eq!(next_drafts(&mut driver).1, [0; 0], "they count for one length of the text");
    let acceptance = driver.scheduler.acceptance_of(DrafterKind::Grammar);
    assert_eq!((acceptance.draft_tokens(), acceptance.accepted_tokens()), (3, 3));
    driver.run();
}

#[test]
fn no_more_than_k_grammar_drafts_are_drafted() {
    let mut driver = Driver::new(requests_draft());
    let rest = started(&mut driver, &Ask { k: 2, ..asking(2) });
    driver.scheduler.set_grammar_drafts(0, &rest[..9]).unwrap();
    assert_eq!(next_drafts(&mut driver).1, rest[..2]);
    driver.run();
}

#[test]
fn grammar_drafts_are_continued_by_another_drafter() {
    let mut driver = Driver::new(requests_draft());
    let rest = started(&mut driver, &asking(3));
    let prediction = rest.clone();
    driver.run();
    // The prediction begins in the middle, so its place is found only after the grammar's drafts.
    let mut driver = Driver::new(requests_draft());
    assert_eq!(started(&mut driver, &Ask { prediction: prediction[1..].to_vec(), ..asking(3) }), rest);
    driver.scheduler.set_grammar_drafts(0, &rest[..2]).unwrap();
    assert_eq!(next_drafts(&mut driver), (DrafterKind::Grammar as i64, rest[..5].to_vec()));
    driver.run();
}

#[test]
fn a_planner_that_never_drafts_leaves_the_drafts_of_requests() {
    let (mut driver, mut planner) = (Driver::new(requests_draft()), that_never_drafts());
    let rest = started(&mut driver, &asking(4));
    driver.scheduler.set_grammar_drafts(0, &rest[..4]).unwrap();
    driver.scheduler.speculate(&mut planner).unwrap();
    assert_eq!(next_drafts(&mut driver).1, rest[..4]);
    driver.scheduler.speculate(&mut planner).unwrap();
    assert_eq!(next_drafts(&mut driver).1, [0; 0]);
    driver.run();
}

#[test]
fn grammar_drafts_and_a_draft_model_take_turns() {
    let config = requests_draft();
    let host_drafters = with_drafts_of_requests(HostDrafters::default());
    let mut driver = Driver::new(SchedulerConfig { host_drafters, drafter: Drafter::draft_model(64, 0.1), ..config });
    for id in 0..8 {
        driver.add(id, &asking(id as u64)).unwrap();
    }
    while driver.step() {
        for (&id, outcome) in driver.outcomes.iter().filter(|(id, _)| *id % 2 == 0) {
            let rest = outcome.expected[outcome.output.len()..].iter().take(5).copied().collect::<Vec<_>>();
            let _ended = driver.scheduler.set_grammar_drafts(id, &rest);
        }
    }
    let drafts = [DrafterKind::Grammar, DrafterKind::Device].map(|kind| driver.scheduler.acceptance_of(kind).drafts());
    assert!(drafts.iter().all(|&drafts| drafts > 4), "{drafts:?}");
}

#[test]
fn predictions_are_drafted_and_never_change_the_output() {
    for wrong in [0, 1, 7] {
        let mut driver = Driver::new(requests_draft());
        let mut prediction = started(&mut driver, &asking(6));
        driver.run();
        for token in prediction.iter_mut().take(wrong) {
            *token = (*token + 1) % 97;
        }
        let mut driver = Driver::new(requests_draft());
        started(&mut driver, &Ask { prediction, ..asking(6) });
        driver.run();
        let acceptance = driver.scheduler.acceptance_of(DrafterKind::Prediction);
        let steps = driver.steps.len();
        assert!(acceptance.accepted_tokens() >= 5 && steps < 16, "{wrong} wrong: {acceptance:?} in {steps} steps");
    }
}

#[test]
fn requests_without_drafts_of_their_own_share_nothing_of_others() {
    let mut driver = Driver::new(requests_draft());
    let rest = started(&mut driver, &asking(7));
    driver.add(1, &asking(7)).unwrap();
    driver.scheduler.set_grammar_drafts(0, &rest[..3]).unwrap();
    driver.run();
    assert_eq!(driver.scheduler.acceptance_of(DrafterKind::Grammar).drafts(), 1);
}

#[test]
fn wrong_grammar_drafts_are_rejected() {
    let mut driver = Driver::new(requests_draft());
    driver.add(0, &asking(8)).unwrap();
    assert!(matches!(driver.scheduler.set_grammar_drafts(3, &[1]), Err(Error::UnknownRequest { request_id: 3 })));
    let wrong = driver.scheduler.set_grammar_drafts(0, &[1, -2]).unwrap_err().to_string();
    assert!(wrong.contains("token_ids=-2 at index 1"), "{wrong}");
    let wrong = driver.add(1, &Ask { prediction: vec![-1], ..asking(8) }).unwrap_err().to_string();
    assert!(wrong.contains("prediction=-1 at index 0"), "{wrong}");
    driver.run();
}
