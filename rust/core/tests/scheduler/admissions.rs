//! Tests of the record's sections for an admitted request, which contain everything that a device must know of it.

use std::collections::HashMap;

use specrs_core::sampling::{
    LOGPROBS_ALL, LOGPROBS_NONE, LogitsDtype, MAX_STOP_IDS, NUM_PARAMS, PARAM_COLUMNS, SAMPLING_STEPS,
};
use specrs_core::scheduler::layout::{FLAG_TARGET_NON_FINITE, StepHeader};
use specrs_core::{PlanOutcome, RequestParams, RequestSampling, Scheduler, SchedulerConfig};

use crate::small;

/// Scheduler with its newest record.
struct Planned {
    scheduler: Scheduler,
    record: Vec<i64>,
}

impl Planned {
    fn new(config: SchedulerConfig) -> Self {
        let scheduler = Scheduler::new(config).unwrap();
        Self { record: vec![-7; scheduler.record_layout().size], scheduler }
    }

    fn plan(&mut self) -> StepHeader {
        self.record.fill(-7);
        let outcome = self.scheduler.plan(&mut self.record).unwrap();
        let PlanOutcome::Step(header) = outcome else { panic!("{outcome:?}") };
        assert_eq!(StepHeader::read(&self.record), header);
        assert!(self.record[header.used_len..].iter().all(|&x| x == -7), "nothing is written that no step reads");
        header
    }

    /// Makes every sequence of the step in flight fail.
    fn fail(&mut self, header: StepHeader) {
        let mut results = vec![0; self.scheduler.results_layout().size];
        results[self.scheduler.results_layout().flags.range()].fill(FLAG_TARGET_NON_FINITE);
        let mut settled = vec![0; self.scheduler.settled_layout().size];
        self.scheduler.settle(header.step_id, &results, &mut settled).unwrap();
    }

    fn section(&self, name: &str) -> &[i64] {
        let sections: HashMap<_, _> = self.scheduler.record_layout().sections().into_iter().collect();
        &self.record[sections[name].range()]
    }

    /// Returns the first admitted request's element of each section.
    fn told(&self, names: &[&str]) -> Vec<i64> {
        names.iter().map(|name| self.section(name)[0]).collect()
    }
}

fn params<'a>(stop: &'a [i64], sampling: RequestSampling<'static>) -> RequestParams<'a> {
    RequestParams { limit: 30, min_tokens: 4, stop_token_ids: stop, sampling, ..RequestParams::default() }
}

#[test]
fn every_number_that_a_device_needs_is_in_the_record_at_each_admission() {
    let words: &[Vec<i64>] = vec![vec![4], vec![6, 2, 9]].leak();
    let sampling = RequestSampling {
        seed: -3,
        temperature: 0.5,
        top_k: 7,
        top_p: 0.25,
        min_p: 0.125,
        repetition_penalty: 1.5,
        presence_penalty: -0.5,
        frequency_penalty: 2.0,
        logprobs: 3,
        prompt_logprobs: LOGPROBS_ALL,
        allowed_token_ids: Some(&[8, 5]),
        logit_bias_ids: &[1, 2, 3],
        logit_bias: &[0.5, -100.0, 7.0],
        bad_words: words,
        has_extras: true,
        pooling: false,
    };
    let mut planned = Planned::new(SchedulerConfig { max_constraint_len: 14, ..small() });
    planned.scheduler.add_request(9, &[1, 2, 3, 4, 5], &params(&[70, 80], sampling)).unwrap();
    for (time, num_constraints) in [(0, 14), (1, 14)] {
        let header = planned.plan();
        assert_eq!((header.num_admitted, header.num_constraints), (1, num_constraints), "admission {time}");
        let told =
            planned.told(&["admit_request_id", "admit_prompt_len", "admit_limit", "admit_min_len", "admit_seed"]);
        assert_eq!(told, [9, 5, 30, 9, -3]);
        assert_eq!(planned.told(&["admit_logprobs", "admit_prompt_logprobs"]), [3, LOGPROBS_ALL]);
        let values: Vec<_> =
            planned.section("admit_params")[..NUM_PARAMS].iter().map(|&x| f64::from_bits(x as u64)).collect();
        let expected = [
            ("greedy", 0.0),
            ("temperature", 0.5),
            ("top_k", 7.0),
            ("top_p", 0.25),
            ("log_min_p", f64::from(0.125_f32.ln())),
            ("repetition_penalty", 1.5),
            ("presence_penalty", -0.5),
            ("frequency_penalty", 2.0),
        ];
        assert_eq!(PARAM_COLUMNS.iter().copied().zip(values).collect::<Vec<_>>(), expected);
        let bits = planned.section("admit_steps")[0];
        let off: Vec<_> =
            (0..SAMPLING_STEPS.len()).filter(|bit| bits >> bit & 1 == 0).map(|bit| SAMPLING_STEPS[bit]).collect();
        assert_eq!(off, ["greedy", "pooling"], "all other steps are asked for");
        let stops = &planned.section("admit_stop_ids")[..MAX_STOP_IDS];
        assert_eq!((&stops[..2], stops[2..].iter().max()), (&[70, 80][..], Some(&-1)));
        assert_eq!(planned.told(&["admit_num_allowed", "admit_num_biases", "admit_num_bad_words"]), [2, 3, 2]);
        assert_eq!(planned.section("admit_constraint_start")[..2], [0, 14]);
        let biases = [0.5_f64, -100.0, 7.0].map(|bias| bias.to_bits() as i64);
        assert_eq!(planned.section("constraint"), [&[8, 5, 1, 2, 3][..], &biases, &[1, 3, 4, 6, 2, 9]].concat());
        planned.scheduler.preempt(9).unwrap();
        planned.fail(header);
    }
}

#[test]
fn a_plain_request_asks_for_nothing_but_a_draw() {
    let mut planned = Planned::new(small());
    planned.scheduler.add_request(0, &[1, 2], &RequestParams { limit: 9, ..RequestParams::default() }).unwrap();
    let header = planned.plan();
    assert_eq!(header.num_constraints, 0);
    assert_eq!(header.used_len, planned.scheduler.record_layout().upload_token.offset + 2);
    let told = ["admit_steps", "admit_logprobs", "admit_prompt_logprobs", "admit_num_allowed", "admit_min_len"];
    assert_eq!(planned.told(&told), [2, LOGPROBS_NONE, LOGPROBS_NONE, -1, 2]);
    assert_eq!(SAMPLING_STEPS[1], "random");
    assert!(planned.section("admit_stop_ids")[..MAX_STOP_IDS].iter().all(|&id| id == -1));
}

#[test]
fn an_empty_list_of_allowed_tokens_is_not_none() {
    let mut planned = Planned::new(small());
    let sampling = RequestSampling { allowed_token_ids: Some(&[]), ..RequestSampling::default() };
    planned.scheduler.add_request(0, &[1, 2], &params(&[], sampling)).unwrap();
    planned.plan();
    assert_eq!(planned.told(&["admit_num_allowed"]), [0]);
    let constraints = SAMPLING_STEPS.iter().position(|&step| step == "constraints").unwrap();
    assert_eq!(planned.section("admit_steps")[0] >> constraints & 1, 1);
}

#[test]
fn constraints_beyond_what_a_step_has_room_for_wait_for_the_next() {
    let mut planned = Planned::new(SchedulerConfig { max_constraint_len: 5, ..small() });
    for (id, allowed) in [&[1, 2, 3][..], &[4, 5], &[6]].into_iter().enumerate() {
        let sampling = RequestSampling { allowed_token_ids: Some(allowed), ..RequestSampling::default() };
        planned.scheduler.add_request(id as i64, &[1, 2, 3], &params(&[], sampling)).unwrap();
    }
    let header = planned.plan();
    assert_eq!((header.num_admitted, header.num_constraints), (2, 5));
    assert_eq!(planned.section("admit_constraint_start")[..3], [0, 3, 5]);
    assert_eq!(planned.section("constraint"), [1, 2, 3, 4, 5]);
    planned.fail(header);
    let header = planned.plan();
    assert_eq!((header.num_admitted, header.num_constraints), (1, 1));
    assert_eq!(header.used_len, planned.scheduler.record_layout().constraint.offset + 1);
    assert_eq!(planned.section("constraint")[..1], [6]);
}

#[test]
fn values_that_nothing_can_be_drawn_with_are_refused_by_name() {
    let mut planned = Planned::new(SchedulerConfig { max_constraint_len: 4, ..small() });
    let fine = RequestSampling::default();
    let empty: &[Vec<i64>] = vec![vec![]].leak();
    let word: &[Vec<i64>] = vec![vec![3, -1]].leak();
    for (field, sampling) in [
        ("temperature", RequestSampling { temperature: f64::NAN, ..fine }),
        ("temperature", RequestSampling { temperature: -0.5, ..fine }),
        ("top_p", RequestSampling { top_p: 0.0, ..fine }),
        ("top_p", RequestSampling { top_p: 1.5, ..fine }),
        ("min_p", RequestSampling { min_p: -0.1, ..fine }),
        ("repetition_penalty", RequestSampling { repetition_penalty: 0.0, ..fine }),
        ("presence_penalty", RequestSampling { presence_penalty: f64::INFINITY, ..fine }),
        ("frequency_penalty", RequestSampling { frequency_penalty: f64::NAN, ..fine }),
        ("logprobs", RequestSampling { logprobs: -3, ..fine }),
        ("prompt_logprobs", RequestSampling { prompt_logprobs: -3, ..fine }),
        ("allowed_token_ids", RequestSampling { allowed_token_ids: Some(&[-1]), ..fine }),
        ("logit_bias_ids", RequestSampling { logit_bias_ids: &[-1], logit_bias: &[1.0], ..fine }),
        ("logit_bias", RequestSampling { logit_bias_ids: &[1], logit_bias: &[f64::NAN], ..fine }),
        ("logit_bias", RequestSampling { logit_bias_ids: &[1, 2], logit_bias: &[1.0], ..fine }),
        ("bad_words", RequestSampling { bad_words: empty, ..fine }),
        ("bad_words", RequestSampling { bad_words: word, ..fine }),
        ("constraints", RequestSampling { allowed_token_ids: Some(&[1, 2, 3, 4, 5]), ..fine }),
    ] {
        let error = planned.scheduler.add_request(0, &[1], &params(&[], sampling)).unwrap_err();
        assert!(error.to_string().contains(&format!(" {field}=")), "{field}: {error}");
        assert!(!planned.scheduler.has_unfinished());
    }
}

#[test]
#[expect(clippy::float_cmp, reason = "equal to the bit")]
fn columns_hold_what_the_dtype_makes_of_a_value() {
    let at = |name: &str| PARAM_COLUMNS.iter().position(|&column| column == name).unwrap();
    let of = |sampling: RequestSampling<'_>, dtype| sampling.columns(dtype).0;
    let fine = RequestSampling::default();
    for (dtype, below_one, tiny) in [
        (LogitsDtype::Float32, f64::INFINITY, f64::from(f32::MIN_POSITIVE)),
        (LogitsDtype::Float64, 1.0 - 1e-12, 1e-300),
    ] {
        assert_eq!(of(RequestSampling { top_p: 1.0 - 1e-12, ..fine }, dtype)[at("top_p")], below_one);
        assert_eq!(of(RequestSampling { top_p: 1e-300, ..fine }, dtype)[at("top_p")], tiny);
    }
    let greedy = RequestSampling { temperature: 1e-6, top_k: 3, top_p: 0.5, min_p: 0.5, ..fine };
    assert_eq!(of(greedy, LogitsDtype::Float32), of(RequestSampling::greedy(), LogitsDtype::Float32));
    let third = RequestSampling { temperature: 1.0 / 3.0, ..fine };
    assert_eq!(of(third, LogitsDtype::Float32)[at("temperature")], f64::from((1.0_f64 / 3.0) as f32));
    assert_eq!(of(third, LogitsDtype::Float64)[at("temperature")], 1.0 / 3.0);
}
