//! Tests of one step handed to all its requests: tokens, statistics, ends.

use serde_json::json;
use specrs_core::SchedulerConfig;
use specrs_core::scheduler::layout::{
    FINISH_ERROR, FINISH_LENGTH, FINISH_NONE, FINISH_STOP, FLAG_CAPACITY, FLAG_NO_TOKEN_ALLOWED,
    FLAG_TARGET_NON_FINITE, ResultsLayout, SettledLayout,
};
use specrs_text::{Delivered, Detokenizer, Draft, FINISH_ABORT, Output, Outputs, TextParams, TokenDecoder};
use std::sync::{Arc, Mutex};

const K: usize = 2;
const WORDS: [&str; 5] = ["a", "b", "c", "Ġ", "."];

/// Sequence of a step: request id, tokens, finish reason, drafted, accepted, flags.
type Sequence<'a> = (i64, &'a [i64], i64, i64, i64, i64);

struct Step {
    results_layout: ResultsLayout,
    settled_layout: SettledLayout,
    results: Vec<i64>,
    settled: Vec<i64>,
}

impl Step {
    fn new(sequences: &[Sequence<'_>]) -> Self {
        let mut config = SchedulerConfig::new(8, 32, 8, 16, 32);
        config.num_speculative_tokens = K;
        let (results_layout, settled_layout) = (ResultsLayout::new(&config), SettledLayout::new(&config));
        let mut results = vec![0; results_layout.size];
        let mut settled = vec![0; settled_layout.size];
        settled[settled_layout.request_id.range()].fill(-1);
        for (i, &(id, tokens, reason, drafted, accepted, flags)) in sequences.iter().enumerate() {
            results[results_layout.tokens.offset + i * (K + 1)..][..tokens.len()].copy_from_slice(tokens);
            results[results_layout.num_drafted.offset + i] = drafted;
            results[results_layout.num_accepted.offset + i] = accepted;
            results[results_layout.flags.offset + i] = flags;
            settled[settled_layout.request_id.offset + i] = id;
            settled[settled_layout.num_new.offset + i] = tokens.len() as i64;
            settled[settled_layout.finish_reason.offset + i] = reason;
        }
        Self { results_layout, settled_layout, results, settled }
    }

    fn deliver(&mut self, outputs: &mut Outputs, now: f64, fault: Option<&str>) -> Delivered {
        let results = (&self.results_layout, &self.results[..]);
        outputs.deliver(results, (&self.settled_layout, &mut self.settled), now, fault).clone()
    }

    /// Returns the request id, the number of kept tokens and the finish reason of sequence `i`.
    fn settled(&self, i: usize) -> (i64, i64, i64) {
        let at = |section: specrs_core::scheduler::layout::Section| self.settled[section.offset + i];
        (at(self.settled_layout.request_id), at(self.settled_layout.num_new), at(self.settled_layout.finish_reason))
    }
}

fn add(outputs: &mut Outputs, id: i64, stop: Option<&str>) -> Arc<Mutex<Output>> {
    let vocab: serde_json::Map<_, _> = WORDS.iter().zip(0..).map(|(word, id)| ((*word).into(), json!(id))).collect();
    let json = json!({
        "version": "1.0",
        "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "a"},
        "decoder": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
    });
    let decoder = Arc::new(TokenDecoder::from_json(&json.to_string()).unwrap());
    let params = TextParams { stop: stop.map(str::to_owned).into_iter().collect(), ..TextParams::default() };
    let text = Detokenizer::new(decoder, params, &[]).unwrap();
    let output = Arc::new(Mutex::new(Output::new(id, 3, K, Some(text), false)));
    outputs.insert(id, output.clone());
    output
}

#[test]
fn each_request_gets_its_own() {
    let mut outputs = Outputs::new();
    let made: Vec<_> = (0..3).map(|id| add(&mut outputs, id, (id == 1).then_some("b c"))).collect();
    let mut step = Step::new(&[
        (2, &[0, 1], FINISH_NONE, 2, 1, 0),
        (-1, &[], FINISH_NONE, 1, 1, 0),
        (0, &[2], FINISH_LENGTH, 0, 0, 0),
        (1, &[1, 3, 2], FINISH_NONE, 2, 2, 0),
        (7, &[1], FINISH_NONE, 0, 0, 0),
    ]);
    // The scheduler does not know of the end of 1.
    let expected = Delivered { touched: vec![2, 0, 1], ended: vec![0, 1], stopped: vec![1] };
    assert_eq!(step.deliver(&mut outputs, 1.5, None), expected);
    let [zero, one, two] = [0, 1, 2].map(|i: usize| made[i].lock().unwrap());
    assert_eq!((two.tokens(), two.text(), two.first_token_time()), (&[0, 1][..], "ab", Some(1.5)));
    assert_eq!((two.acceptance().draft_tokens(), two.acceptance().accepted_tokens(), two.end()), (2, 1, None));
    assert_eq!((zero.text(), zero.end().unwrap().reason, zero.acceptance().drafts()), ("c", FINISH_LENGTH, 0));
    assert_eq!((one.tokens(), one.text(), one.stop()), (&[1, 3, 2][..], "", Some(0)));
    assert_eq!((one.end().unwrap().reason, one.end().unwrap().time), (FINISH_STOP, 1.5));
    assert_eq!(step.settled(3), (1, 3, FINISH_STOP));
    assert_eq!(step.settled(4).0, -1, "a request that is not known");
    assert_eq!((outputs.len(), outputs.num_tokens()), (1, 6));
}

#[test]
fn drafts_are_kept_where_they_are_asked_for() {
    let mut outputs = Outputs::new();
    let plain = add(&mut outputs, 0, None);
    let kept = Arc::new(Mutex::new(Output::new(1, 3, K, None, false).keeping_drafts()));
    outputs.insert(1, kept.clone());
    let mut deliver = |drafted: i64, accepted: i64, tokens: &[i64], rejected: &[i64]| {
        let mut step = Step::new(&[0, 1].map(|id| (id, tokens, FINISH_NONE, drafted, accepted, 0)));
        for sequence in 0..2 {
            let after = step.results_layout.tokens.offset + sequence * (K + 1) + accepted as usize + 1;
            step.results[after..][..rejected.len()].copy_from_slice(rejected);
        }
        step.deliver(&mut outputs, 0.0, None);
    };
    deliver(0, 0, &[1], &[]);
    deliver(2, 0, &[2], &[3, 4]);
    deliver(2, 2, &[0, 1, 2], &[]);
    deliver(2, 1, &[0], &[4]); // the first token ended it
    let draft = |start, num_accepted, rejected: &[u32]| Draft { start, num_accepted, rejected: rejected.to_vec() };
    let expected = [draft(1, 0, &[3, 4]), draft(2, 2, &[]), draft(5, 1, &[4])];
    assert_eq!(kept.lock().unwrap().drafts(), Some(&expected[..]));
    assert_eq!(plain.lock().unwrap().drafts(), None);
    assert_eq!(plain.lock().unwrap().acceptance().drafts(), 3);
}

#[test]
fn what_follows_a_stop_string_is_dropped_and_a_stop_token_has_no_text() {
    let mut outputs = Outputs::new();
    let (one, two) = (add(&mut outputs, 1, Some("b")), add(&mut outputs, 2, None));
    let mut step = Step::new(&[(1, &[0, 1, 2], FINISH_LENGTH, 0, 0, 0), (2, &[0, 4], FINISH_STOP, 0, 0, 0)]);
    assert!(step.deliver(&mut outputs, 0.0, None).stopped.is_empty(), "the scheduler knows of both ends");
    assert_eq!((step.settled(0), step.settled(1)), ((1, 2, FINISH_STOP), (2, 2, FINISH_STOP)));
    let (mut one, two) = (one.lock().unwrap(), two.lock().unwrap());
    assert_eq!((one.text(), one.tokens()), ("a", &[0, 1][..]));
    assert_eq!(one.append(&[2], false, 1.0).unwrap(), (0, true));
    assert_eq!((one.text(), one.tokens()), ("a", &[0, 1][..]), "nor is what a later step brings");
    assert_eq!((two.text(), two.tokens()), ("a", &[0, 4][..]));
    assert!(outputs.is_empty());
}

#[test]
fn errors_say_why() {
    let mut outputs = Outputs::new();
    let made: Vec<_> = (0..4).map(|id| add(&mut outputs, id, None)).collect();
    Step::new(&[(0, &[0], FINISH_NONE, 0, 0, 0)]).deliver(&mut outputs, 0.0, None);
    let flags = FLAG_TARGET_NON_FINITE;
    let ends = [(0, flags), (1, FLAG_CAPACITY), (3, FLAG_NO_TOKEN_ALLOWED)];
    Step::new(&ends.map(|(id, flags)| (id, &[][..], FINISH_ERROR, 0, 0, flags))).deliver(&mut outputs, 0.0, None);
    Step::new(&[(2, &[], FINISH_ERROR, 0, 0, flags)]).deliver(&mut outputs, 0.0, Some("out of memory"));
    let error = |i: usize| made[i].lock().unwrap().end().unwrap().error.clone().unwrap();
    assert!(error(0).contains("position 4") && error(0).contains("not finite"), "{}", error(0));
    assert!(error(1).contains("beyond its KV blocks"), "{}", error(1));
    assert_eq!(error(2), "out of memory");
    assert!(error(3).contains("no token is allowed at position 3"), "{}", error(3));
    assert!(!error(3).contains("finite"), "{}", error(3));
    let flags: Vec<_> = made.iter().map(|output| output.lock().unwrap().end().unwrap().flags).collect();
    assert_eq!(flags, [FLAG_TARGET_NON_FINITE, FLAG_CAPACITY, 0, FLAG_NO_TOKEN_ALLOWED]);
}

#[test]
fn the_first_end_counts_but_an_error_over_it() {
    let mut outputs = Outputs::new();
    let output = add(&mut outputs, 0, None);
    let mut output = output.lock().unwrap();
    output.append(&[0], false, 1.0).unwrap();
    output.finish(FINISH_ABORT, None, 2.0);
    output.finish(FINISH_STOP, None, 3.0);
    assert_eq!((output.end().unwrap().reason, output.end().unwrap().time), (FINISH_ABORT, 2.0));
    output.finish(FINISH_ERROR, Some("first".into()), 4.0);
    output.finish(FINISH_ERROR, Some("second".into()), 5.0);
    assert_eq!(output.end().unwrap().error.as_deref(), Some("first"));
}
