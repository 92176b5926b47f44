//! Tests of the number of prompt tokens next to decoding requests, on machines whose steps take known times.

use specrs_core::scheduler::StepHeader;
use specrs_core::{Error, PlanOutcome, SchedulerConfig};

use super::{ask, drafting, small, speculative};
use crate::common::driver::{Ask, Driver};

const BOUND: f64 = 100.0;

/// Times of a simulated machine, in milliseconds.
#[derive(Clone, Copy, Debug, Default)]
struct Machine {
    decode: f64,
    /// Time of a step with chunks, without their tokens.
    fixed: f64,
    /// Time of each token in a chunk.
    token: f64,
    /// Time of each position that a chunk's token attends to.
    position: f64,
    /// Minimum length of a long chunk, and the factor of its time.
    long: Option<(usize, f64)>,
    /// Time of each token whose log probabilities are reported.
    told: f64,
    /// Time of each draft token.
    draft: f64,
}

impl Machine {
    /// Returns the time of the chunks in a driver's newest step. Requests with ids from `told_from` on want log
    /// probabilities.
    fn chunk_ms(&self, driver: &Driver, header: StepHeader, told_from: i64) -> f64 {
        let (decode, chunks) = (header.num_decode, header.num_prefill);
        let rows = &driver.section("seq_row", decode + chunks)[decode..];
        let (starts, lens) = (driver.section("chunk_start", chunks), driver.section("chunk_len", chunks));
        let row_of = |id: &i64| driver.scheduler.request(*id).ok().and_then(|view| view.row);
        let told: Vec<_> = driver.outcomes.keys().filter(|&&id| id >= told_from).filter_map(row_of).collect();
        let mut ms = self.draft * header.num_draft_tokens as f64;
        for ((&row, &start), &len) in rows.iter().zip(starts).zip(lens) {
            let part = self.long.filter(|&(least, _)| len as usize >= least).map_or(1.0, |(_, part)| part);
            let (start, len) = (start as f64, len as f64);
            ms += part * len * (self.token + self.position * (start + 0.5 * len));
            ms += if told.contains(&(row as usize)) { self.told * len } else { 0.0 };
        }
        if ms > 0.0 { self.fixed + ms } else { 0.0 }
    }

    /// Executes one step and reports its time to the scheduler. Returns its header, and the time of its chunks.
    fn step(&self, driver: &mut Driver, told_from: i64) -> (StepHeader, f64) {
        let header = driver.plan_step();
        let ms = self.chunk_ms(driver, header, told_from);
        driver.settle();
        driver.scheduler.time_step(header.step_id, ms + self.decode.max(0.01)).expect("the last step");
        (header, ms)
    }
}

/// Id above those of all requests in a test, so that no request wants log probabilities.
const NONE_TOLD: i64 = i64::MAX;

fn bounded() -> SchedulerConfig {
    SchedulerConfig {
        max_num_seqs: 8,
        max_model_len: 9000,
        num_blocks: 1600,
        block_size: 16,
        max_num_batched_tokens: 2048,
        max_prefill_stall_ms: BOUND,
        ..small()
    }
}

/// Makes a driver in which request 0 decodes, after prompts of `lens` tokens were computed alone.
fn decoding(machine: &Machine, config: SchedulerConfig, lens: &[usize]) -> Driver {
    let mut driver = Driver::new(config);
    for (i, &len) in lens.iter().enumerate() {
        let id = 1000 + i as i64;
        driver.add(id, &ask(id as u64, len, 1)).unwrap();
        while driver.output(id).is_empty() {
            machine.step(&mut driver, NONE_TOLD);
        }
    }
    driver.add(0, &ask(1, 3, 2000)).unwrap();
    machine.step(&mut driver, NONE_TOLD);
    machine.step(&mut driver, NONE_TOLD);
    driver
}

const LINEAR: Machine =
    Machine { decode: 20.0, fixed: 5.0, token: 0.5, position: 0.0, long: None, told: 0.0, draft: 0.0 };

#[test]
fn prompts_beside_requests_that_decode_take_no_longer_than_the_bound() {
    let machines = [
        ("linear", LINEAR),
        ("fast", Machine { token: 0.001, fixed: 0.01, ..LINEAR }),
        ("slow decoding", Machine { decode: 400.0, ..LINEAR }),
        ("a fixed part", Machine { fixed: 60.0, token: 0.01, ..LINEAR }),
        ("long contexts", Machine { position: 0.5 / 1000.0, ..LINEAR }),
        ("long chunks in another way", Machine { long: Some((256, 0.3)), ..LINEAR }),
    ];
    for (name, machine) in machines {
        let mut driver = decoding(&machine, bounded(), &[2000]);
        driver.add(1, &ask(2, 6000, 2)).unwrap();
        let (mut all, mut steps) = (Vec::new(), 0);
        while driver.output(1).is_empty() {
            let (header, ms) = machine.step(&mut driver, NONE_TOLD);
            assert_eq!(header.num_decode, 1, "{name}: no request waits for a prompt");
            assert!(header.num_prefill_tokens >= 16 || driver.output(1).len() == 1, "{name}: {header:?}");
            all.push(ms);
            steps += 1;
        }
        assert!(all.iter().all(|&ms| ms <= 1.5 * BOUND), "{name}: {all:.0?}");
        let alone = 6000.0 * (machine.token + 3000.0 * machine.position) / (BOUND - machine.fixed);
        assert!(f64::from(steps) <= 2.0 * alone + 8.0, "{name}: {steps} steps, {alone:.1} at best: {all:.0?}");
    }
}

#[test]
fn a_jump_deep_into_a_context_is_estimated_with_what_was_learnt_there() {
    for position in [0.0, 0.1, 0.25, 0.5] {
        let machine = Machine { position: position / 1000.0, ..LINEAR };
        let mut driver = decoding(&machine, bounded(), &[8000]);
        let beginning = ask(2, 8000, 2);
        driver.add(1, &beginning).unwrap();
        while driver.output(1).is_empty() {
            machine.step(&mut driver, NONE_TOLD);
        }
        // Short prompts for a while, then one that goes on behind 8,000 cached positions.
        for id in 2..20 {
            driver.add(id, &ask(id as u64 + 1, 100, 1)).unwrap();
            while driver.output(id).is_empty() {
                machine.step(&mut driver, NONE_TOLD);
            }
        }
        driver.add(20, &Ask { prompt: [beginning.prompt, ask(30, 500, 1).prompt].concat(), ..ask(1, 1, 1) }).unwrap();
        let (header, ms) = machine.step(&mut driver, NONE_TOLD);
        assert_eq!(driver.section("chunk_start", 1), [8000]);
        assert!(header.num_prefill_tokens >= 16, "{header:?}");
        assert!(ms <= 1.5 * BOUND, "{position}: {} tokens took {ms} ms", header.num_prefill_tokens);
    }
}

#[test]
fn without_a_time_and_where_none_fits_16_tokens_go_through() {
    // Nothing was told: depth 1, and no step is timed.
    let mut driver = Driver::new(bounded());
    driver.add(0, &ask(1, 3, 2000)).unwrap();
    driver.plan_step();
    driver.settle();
    driver.add(1, &ask(2, 300, 2)).unwrap();
    for _ in 0..4 {
        assert_eq!(driver.plan_step().num_prefill_tokens, 16);
        driver.settle();
    }
    // Each token alone takes longer than the bound.
    let machine = Machine { token: 3.0 * BOUND, ..LINEAR };
    let mut driver = decoding(&machine, bounded(), &[50]);
    for id in 1..4 {
        driver.add(id, &ask(id as u64 + 1, 100, 2)).unwrap();
    }
    let mut left = 300;
    while left > 0 {
        let (header, _) = machine.step(&mut driver, NONE_TOLD);
        assert_eq!(header.num_prefill_tokens, left.min(16), "shared, and in all");
        left -= header.num_prefill_tokens;
    }
}

#[test]
fn without_requests_that_decode_chunks_are_as_without_a_bound() {
    let slow = Machine { token: 50.0, ..LINEAR };
    let chunks = |max_prefill_stall_ms| {
        let mut driver = Driver::new(SchedulerConfig { max_prefill_stall_ms, ..bounded() });
        let mut chunks = Vec::new();
        for (id, len) in [(0, 5000), (1, 3000), (2, 20)] {
            driver.add(id, &ask(id as u64, len, 1)).unwrap();
        }
        while driver.scheduler.has_unfinished() {
            let (header, _) = slow.step(&mut driver, NONE_TOLD);
            chunks.push(driver.section("chunk_len", header.num_prefill).to_vec());
        }
        chunks
    };
    assert_eq!(chunks(BOUND), chunks(0.0));
}

#[test]
fn prompts_with_log_probabilities_have_a_cost_of_their_own() {
    let machine = Machine { token: 0.05, told: 2.0, ..LINEAR };
    let mut driver = decoding(&machine, bounded(), &[1000, 1000, 1000]);
    for id in [100, 101] {
        driver.add(id, &Ask { tells_prompt: true, ..ask(id as u64, 800, 2) }).unwrap();
    }
    driver.add(1, &ask(5, 4000, 2)).unwrap();
    let (mut all, mut plain_behind) = (Vec::new(), 0);
    while driver.output(1).is_empty() || driver.output(101).is_empty() {
        let (header, ms) = machine.step(&mut driver, 100);
        plain_behind += usize::from(header.num_prefill == 3);
        all.push(ms);
    }
    assert!(all.iter().all(|&ms| ms <= 1.5 * BOUND), "{all:.0?}");
    assert!(all.len() <= 60, "1,600 tokens at 2 ms are 33 steps: {all:.0?}");
    assert!(plain_behind > 0, "a prompt that asks for none goes on next to them: {all:.0?}");
    // Alone they have the whole budget.
    driver.abort(0).unwrap();
    driver.run();
    driver.add(102, &Ask { tells_prompt: true, ..ask(77, 1500, 2) }).unwrap();
    assert_eq!(driver.plan_step().num_prefill_tokens, 1500);
    driver.settle();
    driver.run();
}

#[test]
fn catch_up_of_draft_kv_is_cut_beside_others() {
    let machine = Machine { draft: 1.0, token: 1.0, ..LINEAR };
    let config = SchedulerConfig {
        num_speculative_tokens: 3,
        drafter: specrs_core::Drafter::draft_model(9000, 1.0),
        ..bounded()
    };
    let run = |has_others: bool| {
        let mut driver = decoding(&machine, config.clone(), &[500]);
        if !has_others {
            driver.abort(0).unwrap();
            driver.run();
        }
        driver.add(1, &drafting(2, 1500, 40)).unwrap();
        while driver.output(1).is_empty() {
            machine.step(&mut driver, NONE_TOLD);
        }
        let mut chunks = Vec::new();
        while driver.scheduler.request(1).is_ok_and(|view| view.num_tokens < 1530) {
            let (header, _) = machine.step(&mut driver, NONE_TOLD);
            chunks.push(header.num_draft_tokens);
        }
        chunks
    };
    let chunks = run(true);
    assert!(chunks.iter().sum::<usize>() >= 1490, "{chunks:?}");
    // What fits into the bound is fewer than what goes through in any step.
    assert!(chunks.iter().all(|&tokens| tokens <= 512), "{chunks:?}");
    assert!(chunks.iter().filter(|&&tokens| tokens > 0).count() < 6, "{chunks:?}");
    assert!(run(false)[0] >= 1490, "who decodes alone waits for itself: {:?}", run(false));
}

#[test]
fn a_time_is_of_the_step_that_settled_last() {
    let mut driver = Driver::new(SchedulerConfig { max_in_flight: 2, max_prefill_stall_ms: 1.0, ..speculative() });
    driver.add(0, &drafting(1, 5, 20)).unwrap();
    assert_eq!(driver.scheduler.time_step(0, 1.0), Err(Error::SettleOrder { step_id: 0, expected: None }));
    driver.plan_step();
    driver.plan_step();
    driver.settle();
    assert_eq!(driver.scheduler.time_step(1, 1.0), Err(Error::SettleOrder { step_id: 1, expected: Some(0) }));
    for ms in [0.0, -1.0, f64::NAN, f64::INFINITY] {
        let refused = driver.scheduler.time_step(0, ms);
        assert!(matches!(refused, Err(Error::InvalidBuffer { name: "ms", .. })), "{refused:?}");
    }
    driver.scheduler.time_step(0, 2.0).unwrap();
    driver.run();
    for wrong in [-1.0, f64::NAN, f64::INFINITY] {
        let refused = specrs_core::Scheduler::new(SchedulerConfig { max_prefill_stall_ms: wrong, ..small() });
        assert!(matches!(refused, Err(Error::InvalidConfig { field: "max_prefill_stall_ms", .. })));
        let refused = specrs_core::Scheduler::new(SchedulerConfig { attention_cost_ratio: wrong, ..small() });
        assert!(matches!(refused, Err(Error::InvalidConfig { field: "attention_cost_ratio", .. })));
    }
    assert_eq!(driver.plan(), PlanOutcome::Idle);
}
