//! Driver of a scheduler and a simulated device, as in an engine. It checks integrity after every call, and compares
//! every output with the output of the model alone.

use std::collections::{BTreeMap, VecDeque};

use super::device::{Device, Report};
use super::model::generate;
use specrs_core::sampling::LOGPROBS_NONE;
use specrs_core::scheduler::layout::{FINISH_LENGTH, FINISH_NONE, FINISH_STOP};
use specrs_core::scheduler::{PlanOutcome, RequestParams, Scheduler, SchedulerConfig, StepHeader};
use specrs_core::{Error, ExtraKey, Lora, RequestSampling, Result};

/// Request with its own copy of the data that [`RequestParams`] borrows.
#[derive(Clone, Debug, Default)]
pub struct Ask {
    pub prompt: Vec<i64>,
    pub max_tokens: usize,
    pub min_tokens: usize,
    pub k: usize,
    pub priority: i64,
    pub caller: Option<i64>,
    /// Whether log probabilities of the prompt are reported.
    pub tells_prompt: bool,
    /// Whether the request has a grammar, of which the scheduler knows nothing else.
    pub has_extras: bool,
    pub stop: Vec<i64>,
    pub salt: Vec<u8>,
    pub extra_keys: Vec<(usize, Vec<u8>)>,
    pub lora: Option<Lora>,
    pub prediction: Vec<i64>,
}

/// Output of a request so far.
#[derive(Clone, Debug, Default)]
pub struct Outcome {
    pub output: Vec<i64>,
    pub expected: Vec<i64>,
    pub finish: i64,
    pub aborted: bool,
}

pub struct Driver {
    pub scheduler: Scheduler,
    pub device: Device,
    pub outcomes: BTreeMap<i64, Outcome>,
    pub in_flight: VecDeque<(StepHeader, Vec<Report>)>,
    /// Record of the newest step.
    pub record: Vec<i64>,
    /// Headers of all steps.
    pub steps: Vec<StepHeader>,
    pub settled: Vec<i64>,
}

impl Driver {
    pub fn new(config: SchedulerConfig) -> Self {
        let device = Device::new(&config);
        let scheduler = Scheduler::new(config).expect("an allowed configuration");
        Self {
            record: vec![-7; scheduler.record_layout().size],
            settled: vec![-7; scheduler.settled_layout().size],
            scheduler,
            device,
            outcomes: BTreeMap::new(),
            in_flight: VecDeque::new(),
            steps: Vec::new(),
        }
    }

    pub fn add(&mut self, id: i64, ask: &Ask) -> Result<()> {
        let limit = (ask.prompt.len() + ask.max_tokens).min(self.scheduler.config().max_model_len);
        let extra_keys: Vec<_> = ask.extra_keys.iter().map(|&(position, ref key)| ExtraKey { position, key }).collect();
        let params = RequestParams {
            limit,
            min_tokens: ask.min_tokens,
            num_speculative_tokens: ask.k,
            priority: ask.priority,
            caller: ask.caller,
            stop_token_ids: &ask.stop,
            sampling: RequestSampling {
                prompt_logprobs: if ask.tells_prompt { 0 } else { LOGPROBS_NONE },
                has_extras: ask.has_extras,
                ..RequestSampling::default()
            },
            cache_salt: &ask.salt,
            extra_keys: &extra_keys,
            lora: ask.lora.as_ref(),
            prediction: &ask.prediction,
        };
        self.scheduler.add_request(id, &ask.prompt, &params)?;
        self.check();
        self.device.set_extra_keys(id, ask.extra_keys.clone());
        let expected = generate(&ask.prompt, &ask.extra_keys, limit, ask.min_tokens, &ask.stop);
        self.outcomes.insert(id, Outcome { expected, ..Outcome::default() });
        Ok(())
    }

    pub fn check(&self) {
        self.scheduler.check_integrity().expect("integrity");
    }

    /// Plans once and executes the planned step, if there is one.
    pub fn plan(&mut self) -> PlanOutcome {
        let outcome = self.scheduler.plan(&mut self.record).expect("plan");
        self.check();
        if let PlanOutcome::Step(header) = outcome {
            let reports = self.device.execute(&self.scheduler, header, &self.record);
            self.in_flight.push_back((header, reports));
            self.steps.push(header);
        }
        outcome
    }

    /// Plans once, and expects a step.
    pub fn plan_step(&mut self) -> StepHeader {
        match self.plan() {
            PlanOutcome::Step(header) => header,
            other => panic!("expected a step, got {other:?}"),
        }
    }

    /// Writes some reports into a results buffer; unused elements are garbage.
    pub fn results(&self, reports: &[Report]) -> Vec<i64> {
        let layout = self.scheduler.results_layout();
        let width = self.scheduler.config().num_speculative_tokens + 1;
        let mut results = vec![-99; layout.size];
        for (i, report) in reports.iter().enumerate() {
            results[layout.num_emitted.offset + i] = report.emitted.len() as i64;
            results[layout.num_accepted.offset + i] = report.accepted as i64;
            results[layout.num_drafted.offset + i] = report.drafted as i64;
            results[layout.flags.offset + i] = report.flags;
            results[layout.finish_reason.offset + i] = report.finish_reason;
            for (j, &token) in report.emitted.iter().enumerate() {
                results[layout.tokens.offset + i * width + j] = token;
            }
        }
        results
    }

    /// Settles the oldest step and collects what it delivers.
    pub fn settle(&mut self) {
        let (header, reports) = self.in_flight.pop_front().expect("a step in flight");
        let results = self.results(&reports);
        self.scheduler.settle(header.step_id, &results, &mut self.settled).expect("settle");
        self.check();
        let layout = *self.scheduler.settled_layout();
        for (sequence, report) in reports.iter().enumerate() {
            let id = self.settled[layout.request_id.offset + sequence];
            if id < 0 {
                continue;
            }
            let num_new = self.settled[layout.num_new.offset + sequence] as usize;
            let outcome = self.outcomes.get_mut(&id).expect("a known request");
            assert!(outcome.finish == FINISH_NONE && !outcome.aborted, "request {id} goes on after its end");
            outcome.output.extend(&report.emitted[..num_new]);
            outcome.finish = self.settled[layout.finish_reason.offset + sequence];
            assert!(outcome.expected.starts_with(&outcome.output), "request {id}: {:?}", outcome.output);
            if outcome.finish == FINISH_STOP || outcome.finish == FINISH_LENGTH {
                assert_eq!(outcome.output, outcome.expected, "request {id} ended early");
            }
        }
    }

    /// Runs one round of an engine: fills the steps in flight, then settles the oldest. Returns false when idle.
    pub fn step(&mut self) -> bool {
        while self.in_flight.len() < self.scheduler.config().max_in_flight {
            match self.plan() {
                PlanOutcome::Step(_) => {}
                PlanOutcome::SettleFirst => {
                    assert!(!self.in_flight.is_empty(), "nothing in flight to settle first");
                    break;
                }
                PlanOutcome::Idle => {
                    assert!(self.in_flight.is_empty() && !self.scheduler.has_unfinished(), "idle with requests");
                    return false;
                }
            }
        }
        self.settle();
        true
    }

    /// Steps until idle, and checks that every block is free and that every request has ended.
    pub fn run(&mut self) {
        let mut turns = 0;
        while self.step() {
            turns += 1;
            assert!(turns < 100_000, "no progress");
        }
        assert_eq!(self.scheduler.num_free_blocks(), self.scheduler.num_blocks());
        for (id, outcome) in &self.outcomes {
            assert!(outcome.aborted || outcome.finish != FINISH_NONE, "request {id} never ended");
        }
    }

    pub fn abort(&mut self, id: i64) -> Result<()> {
        self.scheduler.abort(id)?;
        self.check();
        self.outcomes.get_mut(&id).expect("a known request").aborted = true;
        Ok(())
    }

    pub fn preempt(&mut self, id: i64) -> Result<(), Error> {
        self.scheduler.preempt(id)?;
        self.check();
        Ok(())
    }

    /// Asks the scheduler to rebuild a request's draft KV, and overwrites that KV on the device.
    pub fn rebuild_draft(&mut self, id: i64) -> Result<(), Error> {
        self.scheduler.rebuild_draft(id)?;
        self.check();
        self.device.corrupt_draft(&self.scheduler, id);
        Ok(())
    }

    pub fn output(&self, id: i64) -> &[i64] {
        &self.outcomes[&id].output
    }

    /// Returns a section of the newest record.
    pub fn section(&self, name: &str, len: usize) -> &[i64] {
        let sections = self.scheduler.record_layout().sections();
        let (_, section) = sections.iter().find(|(other, _)| *other == name).expect("a section");
        &self.record[section.range()][..len]
    }
}

/// Returns `len` prompt tokens that depend on `seed`.
pub fn prompt(seed: u64, len: usize) -> Vec<i64> {
    (0..len as u64).map(|i| (super::model::mix(seed * 1000 + i) % super::model::VOCAB as u64) as i64).collect()
}
