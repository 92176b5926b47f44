//! Tests of the scheduler under random requests, aborts, preemptions, faults and plan-settle orders, on a naive device.
//!
//! After every call its state must agree with itself. Every delivered token must equal the token that the request would
//! get alone. Every request must end, and at the end every block must be free.

mod device;
mod drawn;

use device::{Device, Outcome, Record, Sampling, VOCAB, lone_text};
use drawn::{Ask, Op, ops, planned_draft_ms, settings};
use proptest::prelude::*;
use proptest::test_runner::FileFailurePersistence;
use specrs_core::scheduler::layout::{FINISH_ERROR, FINISH_LENGTH, FINISH_NONE, FINISH_STOP};
use specrs_core::{
    CostLine, CostModel, Drafter, Error, Lora, PlanOutcome, RequestParams, RequestSampling, Scheduler, SchedulerConfig,
    SpeculationPlanner,
};
use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// State of a request in the test.
struct Request {
    order: (i64, usize),
    caller: Option<i64>,
    /// Maximum number of drafts: the request's own K, or 0 after a fault of the draft.
    k: usize,
    prompt: Vec<i64>,
    tenant: u8,
    lora: u32,
    expected: Vec<i64>,
    delivered: Vec<i64>,
    ended: bool,
}

/// Step in flight: its id, its rows, K of its decoding sequences, their outcomes, and the blocks that it reads or
/// writes.
type InFlight = (u64, Vec<i64>, Vec<i64>, Vec<Outcome>, BTreeSet<i64>);

struct Run {
    scheduler: Scheduler,
    device: Device,
    requests: BTreeMap<i64, Request>,
    /// Planner that chooses K before each plan, if there is one.
    planner: Option<SpeculationPlanner>,
    in_flight: VecDeque<InFlight>,
    record: Vec<i64>,
    settled: Vec<i64>,
    /// Number of steps so far.
    steps: i64,
    /// Numbers of drafts, draft tokens and accepted tokens of sequences that counted.
    statistics: (u64, u64, u64),
}

impl Run {
    fn new(config: SchedulerConfig, planned_draft_ms: Option<f64>) -> Self {
        let planner = planned_draft_ms.filter(|_| config.num_speculative_tokens > 0).map(|draft_ms| {
            let line = CostLine { draft_ms, target_ms: 1.0, vanilla_ms: 1.0 };
            let costs = CostModel::lines(&[1, 64], &[line, line]).expect("allowed costs");
            SpeculationPlanner::new(config.max_num_seqs, config.num_speculative_tokens, costs, 0.01).expect("a planner")
        });
        let scheduler = Scheduler::new(config).expect("allowed settings");
        let device = Device::new(&scheduler);
        Self {
            record: vec![-5; scheduler.record_layout().size],
            settled: vec![-5; scheduler.settled_layout().size],
            scheduler,
            device,
            requests: BTreeMap::new(),
            planner,
            in_flight: VecDeque::new(),
            steps: 0,
            statistics: (0, 0, 0),
        }
    }

    fn check(&self) {
        self.scheduler.check_integrity().expect("statistics that agree");
        self.device.check_marks(&self.scheduler);
        let held = |block: &i64| self.scheduler.block_pool().ref_count(*block) > Some(0);
        assert!(
            self.in_flight.iter().all(|(.., touched)| touched.iter().all(held)),
            "a step in flight names free blocks"
        );
        let (drafts, draft_tokens, accepted) = self.statistics;
        let statistics = self.scheduler.acceptance();
        assert_eq!(
            (statistics.drafts(), statistics.draft_tokens(), statistics.accepted_tokens()),
            (drafts, draft_tokens, accepted)
        );
        let live = self.requests.values().filter(|request| !request.ended).count();
        assert_eq!(self.scheduler.num_waiting() + self.scheduler.num_running(), live);
    }

    fn apply(&mut self, op: &Op) {
        match op {
            Op::Add(ask) => self.add(ask),
            Op::Plan => drop(self.plan()),
            Op::Settle if self.in_flight.is_empty() => {}
            Op::Settle => self.settle(),
            Op::Abort(index) => {
                if let Some((id, ended)) = self.pick(*index) {
                    assert_eq!(self.scheduler.abort(id), live(id, ended));
                    self.requests.get_mut(&id).expect("a request").ended = true;
                }
            }
            Op::Preempt(index) => {
                if let Some((id, ended)) = self.pick(*index) {
                    let running = self.scheduler.num_running();
                    match self.scheduler.preempt(id) {
                        Ok(()) => assert_eq!(self.scheduler.num_running(), running - 1),
                        Err(Error::NotRunning { .. }) => assert!(!ended),
                        error => assert_eq!(error, live(id, ended)),
                    }
                }
            }
            Op::Fault(index, flags) => {
                if let Some((id, _)) = self.pick(*index) {
                    self.device.faults.insert(id, *flags);
                }
            }
            Op::Rebuild(index) => {
                if let Some((id, ended)) = self.pick(*index) {
                    match self.scheduler.rebuild_draft(id) {
                        Ok(()) => self.device.lose_draft(&self.scheduler, id),
                        Err(Error::NotRunning { .. }) => assert!(!ended),
                        error => assert_eq!(error, live(id, ended)),
                    }
                }
            }
            Op::ResetPrefixCache => {
                let idle = self.scheduler.num_free_blocks() == self.scheduler.num_blocks();
                assert_eq!(self.scheduler.reset_prefix_cache(), idle);
            }
        }
        self.check();
    }

    fn pick(&self, index: prop::sample::Index) -> Option<(i64, bool)> {
        let id = index.index(self.requests.len().max(1)) as i64;
        self.requests.get(&id).map(|request| (id, request.ended))
    }

    fn add(&mut self, ask: &Ask) {
        let config = self.scheduler.config();
        let id = self.requests.len() as i64;
        let shared = (0..ask.shared as i64).map(|i| (ask.text * 5 + i * i) % VOCAB);
        let own = (0..ask.own as i64).map(|i| (id * 3 + i) % VOCAB);
        let mut prompt: Vec<i64> = shared.chain(own).collect();
        prompt.truncate(config.max_model_len - 1);
        if prompt.is_empty() {
            prompt.push(ask.text);
        }
        let limit = (prompt.len() + ask.max_tokens).min(config.max_model_len);
        let lora = if config.max_loras == 0 { 0 } else { ask.lora };
        let tenant = 2 * lora as u8 + ask.salt;
        let sampling =
            Sampling { prompt_len: prompt.len(), min_tokens: ask.min_tokens, stop: ask.stop.clone(), tenant };
        let adapter = (lora > 0).then(|| Lora { id: lora, name: "same".into() });
        let params = RequestParams {
            limit,
            min_tokens: ask.min_tokens,
            num_speculative_tokens: ask.k.min(config.num_speculative_tokens),
            priority: ask.priority,
            caller: ask.caller,
            stop_token_ids: &ask.stop,
            sampling: RequestSampling::default(),
            cache_salt: &[ask.salt],
            lora: adapter.as_ref(),
            // It goes on as the prompt began, or in no way that the output does.
            prediction: &prompt[..prompt.len() / 2],
            ..RequestParams::default()
        };
        self.scheduler.add_request(id, &prompt, &params).expect("an allowed request");
        let duplicate = self.scheduler.add_request(id, &prompt, &params);
        assert_eq!(duplicate, Err(Error::DuplicateRequest { request_id: id }));
        let expected = lone_text(&prompt, limit, &sampling);
        let rank = match self.scheduler.config().priority_aging_steps as i64 {
            0 => ask.priority,
            steps => ask.priority * steps + self.steps,
        };
        let order = (rank, self.requests.len());
        self.requests.insert(
            id,
            Request {
                order,
                caller: ask.caller,
                k: params.num_speculative_tokens,
                prompt,
                tenant,
                lora,
                expected,
                delivered: Vec::new(),
                ended: false,
            },
        );
        self.device.sampling.insert(id, sampling);
    }

    fn plan(&mut self) -> PlanOutcome {
        let in_flight = self.in_flight.len();
        if let Some(planner) = &mut self.planner {
            self.scheduler.speculate(planner).expect("a planner of its size");
            self.check();
        }
        let outcome = self.scheduler.plan(&mut self.record).expect("a matching buffer");
        match outcome {
            PlanOutcome::Idle => {
                assert!(in_flight == 0 && self.requests.values().all(|request| request.ended), "idle with work");
            }
            PlanOutcome::SettleFirst => assert!(in_flight > 0, "nothing in flight to settle first"),
            PlanOutcome::Step(_) => {
                assert!(in_flight < self.scheduler.config().max_in_flight);
                self.check_record(in_flight == 0);
                let record = Record::new(&self.scheduler, &self.record);
                let outcomes = self.device.execute(&self.scheduler, &record);
                let rows = (0..record.num_seqs()).map(|sequence| record.get("seq_row", sequence)).collect();
                let ks = (0..record.num_decode()).map(|sequence| record.get("seq_k", sequence)).collect();
                self.steps += 1;
                self.in_flight.push_back((record.count("step_id") as u64, rows, ks, outcomes, self.device.touched()));
            }
        }
        outcome
    }

    /// Checks the conditions that every record fulfils, whatever was decided.
    fn check_record(&self, alone: bool) {
        let config = self.scheduler.config();
        let record = Record::new(&self.scheduler, &self.record);
        let (num_decode, num_seqs) = (record.num_decode(), record.num_seqs());
        assert!(num_seqs >= 1 && num_seqs <= config.max_num_seqs);
        let mut rows: Vec<_> = (0..num_seqs).map(|sequence| record.size("seq_row", sequence)).collect();
        rows.sort_unstable();
        rows.dedup();
        assert!(rows.len() == num_seqs && rows.iter().all(|&row| row < config.max_num_seqs), "{rows:?}");

        let ks: Vec<_> = (0..num_decode).map(|sequence| record.size("seq_k", sequence)).collect();
        assert!(ks.is_sorted_by(|a, b| a >= b), "{ks:?}");
        assert_eq!(record.count("max_k"), ks.first().copied().unwrap_or(0));
        for (sequence, k) in ks.iter().enumerate() {
            let (n_upper, capacity) = (record.size("seq_n_upper", sequence), record.size("seq_capacity", sequence));
            let limit = self.device.limit_of(record.size("seq_row", sequence));
            let most = self.requests[&self.device_request(&record, sequence)].k;
            assert!(*k <= most, "K = {k} of a request that drafts {most} at most");
            assert!(capacity >= limit.min(n_upper + k), "capacity {capacity} for {n_upper} + {k} of {limit}");
        }

        // Decode never waits for the budget; chunks share what it leaves, at least a quarter. One draft token may go beyond, and
        // each chunk's cost is rounded up.
        let decode_tokens: usize = ks.iter().map(|k| k + 1).sum();
        let budget = config.max_num_batched_tokens;
        let chunks = budget.saturating_sub(decode_tokens).max(budget.div_ceil(4));
        let (prefill, draft) = (record.count("num_prefill_tokens"), record.count("num_draft_tokens"));
        let ratio = match config.drafter {
            Drafter::Cached { cost_ratio, .. } => cost_ratio,
            Drafter::Hidden { .. } => 0.0, // its chunks are those of the prompts
            _ => 1.0,
        };
        let cost = |tokens: usize| (tokens as f64 * ratio).ceil() as usize;
        assert!(prefill <= chunks, "{prefill} prefill tokens of {chunks}");
        let most = chunks + cost(1) + record.count("num_draft_chunks");
        assert!(prefill + cost(draft) <= most, "{prefill} prefill and {draft} draft tokens of {chunks}");

        // Admitted requests are the first in turn of those that waited, but for those that wait for a prefix, and none is admitted
        // while others are preempted for blocks.
        let admitted: Vec<_> = (0..record.count("num_admitted")).map(|i| record.get("admit_request_id", i)).collect();
        let preempted = record.count("num_preempted");
        assert!(admitted.is_empty() || preempted == 0);
        assert!(alone || preempted == 0, "preempted while steps in flight could still free blocks");
        let loras = self.running_loras();
        if let (Some(last), Some(first)) = (
            admitted.iter().map(|id| self.turn(*id, &admitted)).max(),
            self.waiting()
                .iter()
                .filter(|id| !self.may_wait_for_prefix(**id) && !self.waits_for_lora(**id, &loras))
                .map(|id| self.turn(*id, &admitted))
                .min(),
        ) {
            assert!(last < first, "admitted {last:?} before {first:?}");
        }
        self.check_loras(&record, &admitted, &loras);
        for i in 0..preempted {
            let id = record.get("preempted_request_id", i);
            let important = self.running().iter().map(|id| self.requests[id].order).min();
            assert!(important < Some(self.requests[&id].order), "the most important request {id} was preempted");
        }
        self.check_admissions(&record);
        // With everything settled, the most important running request always advances.
        if alone {
            let first = self.running().into_iter().min_by_key(|id| self.requests[id].order).expect("a running request");
            let advances = (0..num_seqs).any(|sequence| self.device_request(&record, sequence) == first);
            assert!(advances, "request {first} stands still");
            // So does drafting: of those that could draft and have blocks for it, somebody does or comes closer to it. What a
            // preemption freed in this plan comes too late for those placed before it.
            let idle = |&sequence: &usize| {
                let row = record.size("seq_row", sequence);
                record.size("seq_k", sequence) == 0
                    && self.device.could_draft(row, self.requests[&self.device.request_of(row)].k)
            };
            if self.planner.is_none()
                && preempted == 0
                && self.scheduler.num_free_blocks() >= config.num_groups()
                && (0..num_decode).any(|sequence| idle(&sequence))
            {
                assert!(ks[0] > 0 || draft > 0, "none comes closer to drafting");
            }
        }
    }

    /// Returns the turn of a request that waited before this plan admitted some: its priority, the number of its
    /// caller's requests before it, its arrival.
    fn turn(&self, id: i64, admitted: &[i64]) -> (i64, usize, usize) {
        let (rank, arrival) = self.requests[&id].order;
        let caller = self.requests[&id].caller;
        let others = |ids: Vec<i64>| ids.into_iter().filter(|other| self.requests[other].caller == caller);
        let ran = others(self.running()).filter(|other| !admitted.contains(other)).count();
        let waited = others(self.waiting()).chain(others(admitted.to_vec()));
        let before = waited.filter(|other| self.requests[other].order < (rank, arrival)).count();
        (rank, if caller.is_some() { ran + before } else { 0 }, arrival)
    }

    /// Returns whether some running request's tokens begin with half of this request's, at least one block.
    fn may_wait_for_prefix(&self, id: i64) -> bool {
        let config = self.scheduler.config();
        let tokens = |id: i64| {
            let request = &self.requests[&id];
            [&request.prompt[..], &request.delivered].concat()
        };
        let (own, tenant) = (tokens(id), self.requests[&id].tenant);
        let alike = |other: &i64| {
            let common = own.iter().zip(tokens(*other)).take_while(|(a, b)| *a == b).count() / config.block_size;
            self.requests[other].tenant == tenant && common > 0 && 2 * common * config.block_size >= own.len()
        };
        config.enable_prefix_caching && self.running().iter().any(alike)
    }

    /// Returns the adapters of the running requests, and 0.
    fn running_loras(&self) -> BTreeSet<u32> {
        let most = self.scheduler.config().max_loras;
        let running = if most == 0 { vec![] } else { self.running() };
        let loras: BTreeSet<_> = running.iter().map(|id| self.requests[id].lora).chain([0]).collect();
        assert!(loras.len() <= 1 + most, "{loras:?} run at once");
        loras
    }

    /// Returns whether a request has an adapter while the maximum number of adapters runs; its own may be one of them.
    fn waits_for_lora(&self, id: i64, running: &BTreeSet<u32>) -> bool {
        self.requests[&id].lora > 0 && running.len() > self.scheduler.config().max_loras
    }

    /// Checks that the record names each admitted request's adapter, and that no request with an adapter overtakes one
    /// that waits for its adapter.
    fn check_loras(&self, record: &Record<'_>, admitted: &[i64], running: &BTreeSet<u32>) {
        if admitted.is_empty() || self.scheduler.config().max_loras == 0 {
            return;
        }
        let waits = self.waiting().into_iter().filter(|id| !running.contains(&self.requests[id].lora));
        let first = waits.map(|id| self.turn(id, admitted)).min();
        for (i, id) in admitted.iter().enumerate() {
            let lora = self.requests[id].lora;
            assert_eq!(record.get("admit_lora", i), i64::from(lora));
            let overtakes = lora > 0 && first.is_some_and(|first| first < self.turn(*id, admitted));
            assert!(!overtakes, "{id} overtook {first:?}");
        }
    }

    /// Checks that a newcomer next to other requests has blocks for its whole prompt, because it would soon be
    /// preempted again otherwise.
    fn check_admissions(&self, record: &Record<'_>) {
        let admitted = record.count("num_admitted");
        if self.scheduler.num_running() == admitted.min(1) {
            return;
        }
        let config = self.scheduler.config();
        // With a window, for the window and a whole step's tokens; in every group.
        let most = |window: usize| {
            (window + config.max_num_batched_tokens + config.num_speculative_tokens + 1).div_ceil(config.block_size)
        };
        let first = config.sliding_window.map_or(usize::MAX, most);
        let further = config.window_groups.iter().map(|&window| most(window));
        let missing = |(i, (group, most)): (usize, (usize, usize))| {
            let id = record.get("admit_request_id", i);
            let table = self.scheduler.group_block_table(id, group).expect("a running request");
            let held = table.iter().filter(|&&block| block >= 0).count();
            let missing = record.size("admit_num_tokens", i).div_ceil(config.block_size) - table.len();
            missing.min(most.saturating_sub(held))
        };
        let by_group: Vec<_> = std::iter::once(first).chain(further).enumerate().collect();
        let wanted = (0..admitted).flat_map(|i| by_group.iter().map(move |&group| (i, group)));
        let (missing, free) = (wanted.map(missing).sum::<usize>(), self.scheduler.num_free_blocks());
        assert!(missing <= free, "admitted with {free} free blocks of the {missing} that prompts need");
    }

    /// Returns the request of a sequence, as the device will know it.
    fn device_request(&self, record: &Record<'_>, sequence: usize) -> i64 {
        let row = record.get("seq_row", sequence);
        (0..record.count("num_admitted"))
            .find(|&i| record.get("admit_row", i) == row)
            .map_or_else(|| self.device.request_of(row as usize), |i| record.get("admit_request_id", i))
    }

    fn live(&self) -> impl Iterator<Item = i64> + '_ {
        self.requests.iter().filter(|(_, request)| !request.ended).map(|(&id, _)| id)
    }

    /// Returns the running requests. Whether a request runs is found by preempting it on a copy.
    fn running(&self) -> Vec<i64> {
        self.live().filter(|&id| self.scheduler.clone().preempt(id).is_ok()).collect()
    }

    fn waiting(&self) -> Vec<i64> {
        self.live().filter(|&id| self.scheduler.clone().preempt(id).is_err()).collect()
    }

    fn settle(&mut self) {
        let (step_id, rows, ks, outcomes, _) = self.in_flight.pop_front().expect("a step in flight");
        let results = self.results(&outcomes);
        let late = self.scheduler.settle(step_id + 1, &results, &mut self.settled);
        assert_eq!(late, Err(Error::SettleOrder { step_id: step_id + 1, expected: Some(step_id) }));
        self.scheduler.settle(step_id, &results, &mut self.settled).expect("what the device reported");
        self.scheduler.time_step(step_id, 1.0 + step_id as f64 % 5.0).expect("the step that settled last");

        if let Some(planner) = &mut self.planner {
            let decodes = &outcomes[..ks.len()];
            let (drafted, accepted): (Vec<_>, Vec<_>) =
                decodes.iter().map(|outcome| (outcome.drafted as i64, outcome.accepted as i64)).unzip();
            let ms = (ks.len() == outcomes.len()).then_some(1.0 + step_id as f64 % 7.0);
            planner.settle(&rows[..ks.len()], &ks, &drafted, &accepted, ms).expect("what was drafted and accepted");
        }

        let layout = *self.scheduler.settled_layout();
        for (sequence, outcome) in outcomes.iter().enumerate() {
            let id = self.settled[layout.request_id.offset + sequence];
            let num_new = self.settled[layout.num_new.offset + sequence] as usize;
            let finish = self.settled[layout.finish_reason.offset + sequence];
            if id < 0 {
                assert_eq!((num_new, finish), (0, FINISH_NONE));
                continue;
            }
            let request = self.requests.get_mut(&id).expect("a known request");
            assert!(!request.ended, "request {id} on row {} goes on after its end", rows[sequence]);
            request.delivered.extend(&outcome.tokens[..num_new]);
            assert!(request.expected.starts_with(&request.delivered), "request {id}: {:?}", request.delivered);
            request.ended = finish != FINISH_NONE;
            if outcome.flags & 2 != 0 {
                request.k = 0;
            }
            if outcome.flags & 5 != 0 {
                assert_eq!((num_new, finish), (0, FINISH_ERROR));
                continue;
            }
            let complete = request.delivered == request.expected;
            assert_eq!(complete, finish == FINISH_STOP || finish == FINISH_LENGTH, "request {id}: finish {finish}");
            if outcome.drafted > 0 {
                self.statistics.0 += 1;
                self.statistics.1 += outcome.drafted as u64;
                self.statistics.2 += outcome.accepted as u64;
            }
        }
    }

    fn results(&self, outcomes: &[Outcome]) -> Vec<i64> {
        let layout = self.scheduler.results_layout();
        let width = self.scheduler.config().num_speculative_tokens + 1;
        let mut results = vec![0; layout.size];
        for (i, outcome) in outcomes.iter().enumerate() {
            results[layout.num_emitted.offset + i] = outcome.tokens.len() as i64;
            results[layout.num_accepted.offset + i] = outcome.accepted as i64;
            results[layout.num_drafted.offset + i] = outcome.drafted as i64;
            results[layout.flags.offset + i] = outcome.flags;
            results[layout.finish_reason.offset + i] = outcome.finish_reason;
            let at = layout.tokens.offset + i * width;
            results[at..at + outcome.tokens.len()].copy_from_slice(&outcome.tokens);
        }
        results
    }

    /// Plans and settles as an engine does until nothing is left.
    fn drain(&mut self) {
        for _ in 0..20_000 {
            match self.plan() {
                PlanOutcome::Idle => return self.check_idle(),
                PlanOutcome::Step(_) if self.in_flight.len() < self.scheduler.config().max_in_flight => {}
                _ => self.settle(),
            }
            self.check();
        }
        panic!("no end: {:?}", self.live().collect::<Vec<_>>());
    }

    fn check_idle(&self) {
        assert!(!self.scheduler.has_unfinished());
        assert_eq!(self.scheduler.num_free_blocks(), self.scheduler.num_blocks());
        assert_eq!((self.scheduler.num_waiting(), self.scheduler.num_running()), (0, 0));
        assert_eq!(self.scheduler.num_in_flight(), 0);
    }
}

fn live(id: i64, ended: bool) -> Result<(), Error> {
    if ended { Err(Error::UnknownRequest { request_id: id }) } else { Ok(()) }
}

/// Returns the settings of the tests. `SPECRS_OPERATIONS` sets the total number of operations, 100,000 by default; each
/// of the two tests has half.
fn config() -> ProptestConfig {
    let operations = std::env::var("SPECRS_OPERATIONS").ok().and_then(|count| count.parse().ok()).unwrap_or(100_000);
    let cases = operations / 2 / 60; // the mean length of a case
    let regressions = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/regressions/scheduler.txt");
    let failure_persistence = Some(Box::new(FileFailurePersistence::Direct(regressions)) as Box<_>);
    ProptestConfig { cases, failure_persistence, max_shrink_iters: 4096, ..ProptestConfig::default() }
}

fn run(settings: SchedulerConfig, ops: &[Op], planned_draft_ms: Option<f64>) {
    let mut run = Run::new(settings, planned_draft_ms);
    for op in ops {
        run.apply(op);
    }
    run.drain();
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn everyone_gets_the_text_they_would_get_alone(
        settings in settings(Just(vec![])),
        ops in ops(),
        planned_draft_ms in planned_draft_ms(),
    ) {
        run(settings, &ops, planned_draft_ms);
    }

    #[test]
    fn so_they_do_with_groups_of_layers(
        settings in settings(prop::collection::vec(2..14_usize, 1..4)),
        ops in ops(),
        planned_draft_ms in planned_draft_ms(),
    ) {
        run(settings, &ops, planned_draft_ms);
    }
}
