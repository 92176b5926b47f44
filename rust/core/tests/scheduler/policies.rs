//! Tests of the costs and gains of policies in steps, tokens and preemptions: blocks reserved on admission, shares
//! of the prefill budget, priorities that age. Runs are long, so the device simulates lengths alone.

use std::collections::{BTreeMap, VecDeque};

use specrs_core::scheduler::layout::{FINISH_LENGTH, FINISH_NONE, HEADER_LEN, Section};
use specrs_core::{PlanOutcome, RequestParams, Scheduler, SchedulerConfig};

/// Results of one run.
#[derive(Debug, Default)]
struct Run {
    steps: usize,
    prefill_tokens: usize,
    preemptions: u64,
    /// Step that produced each request's first token.
    first_token: BTreeMap<i64, usize>,
}

/// Arrival of a request: id, prompt length, limit on output, priority, and the step before which it comes.
type Arrival = (i64, usize, usize, i64, usize);

/// Serves requests without drafts, whose prompts have no common prefix.
fn serve(config: SchedulerConfig, arrivals: &[Arrival]) -> Run {
    let depth = config.max_in_flight;
    let mut scheduler = Scheduler::new(config).unwrap();
    let (record_layout, layout) = (*scheduler.record_layout(), *scheduler.results_layout());
    let settled_layout = *scheduler.settled_layout();
    let mut record = vec![0; record_layout.size];
    let mut results = vec![0; layout.size];
    let mut settled = vec![0; settled_layout.size];
    let mut in_flight = VecDeque::new();
    // Tokens that each row may still emit.
    let mut left = vec![0; scheduler.config().max_num_seqs];
    let (mut run, mut waiting) = (Run::default(), arrivals.iter().peekable());
    loop {
        while let Some(&(id, len, max_tokens, priority, _)) = waiting.next_if(|arrival| arrival.4 <= run.steps) {
            let prompt: Vec<i64> = (0..len as i64).map(|i| id * 10_000 + i).collect();
            let params = RequestParams { limit: len + max_tokens, priority, ..RequestParams::default() };
            scheduler.add_request(id, &prompt, &params).unwrap();
        }
        if in_flight.len() < depth
            && let PlanOutcome::Step(header) = scheduler.plan(&mut record).unwrap()
        {
            let last = |chunk: usize| record[record_layout.chunk_is_last.offset + chunk];
            let emitted =
                (0..header.num_decode).map(|_| 1).chain((0..header.num_prefill).map(last)).collect::<Vec<_>>();
            for i in 0..header.num_admitted {
                let at = |section: Section| record[section.offset + i];
                left[at(record_layout.admit_row) as usize] =
                    at(record_layout.admit_limit) - at(record_layout.admit_num_tokens);
            }
            let mut ends = |(sequence, &emitted): (usize, &i64)| {
                let left = &mut left[record[record_layout.seq_row.offset + sequence] as usize];
                *left -= emitted;
                if emitted > 0 && *left == 0 { FINISH_LENGTH } else { FINISH_NONE }
            };
            let reasons: Vec<_> = emitted.iter().enumerate().map(&mut ends).collect();
            in_flight.push_back((header.step_id, emitted, reasons));
            assert!(record[..HEADER_LEN].iter().all(|&count| count >= 0));
            run.steps += 1;
            run.prefill_tokens += header.num_prefill_tokens;
            continue;
        }
        let Some((step_id, emitted, reasons)) = in_flight.pop_front() else { break };
        results.fill(0);
        results[layout.num_emitted.offset..][..emitted.len()].copy_from_slice(&emitted);
        results[layout.finish_reason.offset..][..reasons.len()].copy_from_slice(&reasons);
        scheduler.settle(step_id, &results, &mut settled).unwrap();
        for sequence in 0..emitted.len() {
            if settled[settled_layout.num_new.offset + sequence] > 0 {
                run.first_token.entry(settled[settled_layout.request_id.offset + sequence]).or_insert(run.steps);
            }
        }
    }
    assert!(waiting.next().is_none(), "idle before the last arrival");
    scheduler.check_integrity().unwrap();
    assert_eq!(scheduler.num_free_blocks(), scheduler.num_blocks());
    run.preemptions = scheduler.num_preemptions();
    run
}

#[test]
fn what_is_reserved_on_admission_ends_the_thrash_of_a_full_pool() {
    // 200 prompts of 200 tokens, outputs of 1 to 1400, and room for some 14 of them.
    let arrivals: Vec<_> = (0..200).map(|id| (id, 200, 1 + (id as usize * 7919) % 1400, 0, 0)).collect();
    let config = SchedulerConfig::new(256, 2048, 700, 16, 2048);
    let greedy = serve(SchedulerConfig { num_reserved_decode_tokens: 0, ..config.clone() }, &arrivals);
    let run = serve(config, &arrivals);
    assert!(greedy.preemptions > 250 && greedy.prefill_tokens > 110_000, "{greedy:?}");
    assert!(run.preemptions <= 90 && run.prefill_tokens <= 73_000, "{run:?}");
    assert!(run.steps * 100 <= greedy.steps * 105, "{} steps, not {}", run.steps, greedy.steps);
}

/// Returns settings with room for all requests.
fn roomy(max_num_batched_tokens: usize) -> SchedulerConfig {
    SchedulerConfig::new(8, 8192, 4096, 16, max_num_batched_tokens)
}

#[test]
fn a_long_prompt_leaves_a_share_to_others_and_takes_all_that_they_leave() {
    // Alone it gets the whole budget: 24 steps of 256.
    assert_eq!(serve(roomy(256), &[(0, 6000, 1, 0, 0)]).first_token[&0], 24);
    let run = serve(roomy(256), &[(0, 6000, 1, 0, 0), (1, 100, 1, 0, 1)]);
    assert!(run.first_token[&1] <= 4, "{run:?}");
    assert_eq!(run.first_token[&0], 24, "6100 tokens are 24 steps, too");
    // So do several long ones together.
    let run = serve(roomy(256), &[(0, 3000, 1, 0, 0), (1, 3000, 1, 0, 0), (2, 3000, 1, 0, 0), (3, 40, 1, 0, 1)]);
    assert!(run.first_token[&3] <= 16, "one after the other it were 36: {run:?}");
    assert_eq!((run.prefill_tokens, run.steps), (9040, 36));
}

#[test]
fn the_share_of_a_long_prompt_can_be_set() {
    let longs: Vec<_> = (0..4).map(|id| (id, 1000, 1, 0, 0)).collect();
    let run = serve(SchedulerConfig { long_prefill_token_threshold: 64, ..roomy(256) }, &longs);
    assert!(run.first_token.values().all(|&step| step >= 15), "they share alike: {run:?}");
    assert_eq!(run.steps, 16);
    let alone = serve(SchedulerConfig { long_prefill_token_threshold: 64, ..roomy(256) }, &[(0, 640, 1, 0, 0)]);
    assert_eq!(alone.first_token[&0], 10, "others leave it nothing beyond that");
    let run = serve(roomy(256), &longs);
    assert!(run.first_token[&0] <= 6, "three quarters of each step: {run:?}");
    assert_eq!(run.steps, 16);
}

#[test]
fn priorities_age_if_they_are_told_to() {
    // One row, and always somebody more important than request 0 who wants it.
    let mut arrivals = vec![(1000, 8, 5, 0, 0), (0, 8, 5, 1, 0)];
    arrivals.extend((1..100).map(|id| (id, 8, 5, 0, 4 * id as usize)));
    let wait = |priority_aging_steps| {
        let config = SchedulerConfig { max_num_seqs: 1, priority_aging_steps, ..roomy(64) };
        serve(config, &arrivals).first_token[&0]
    };
    assert!(wait(0) > 400, "{}", wait(0));
    for steps in [20, 100] {
        // Who came before `steps` of them had passed still goes first, 5 steps each.
        assert!((steps..steps * 5 / 4 + 20).contains(&wait(steps)), "{steps}: {}", wait(steps));
    }
}
