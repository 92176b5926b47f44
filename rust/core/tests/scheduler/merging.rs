//! Tests of prompts next to decoding requests on a device whose verification pass has room for some of their tokens.

use std::collections::BTreeMap;

use specrs_core::scheduler::StepHeader;
use specrs_core::{Error, MergedRoom, RequestState, SchedulerConfig};

use super::{ask, drafting, small, speculative};
use crate::common::driver::{Ask, Driver};
use crate::common::model::mix;

const CHUNKS: usize = 3;
const STEPS: usize = 4;

/// Returns the rooms of passes of `total` tokens, for up to `max_seqs` sequences with up to `max_k` drafts.
pub(crate) fn rooms(max_seqs: usize, max_k: usize, total: usize) -> Vec<MergedRoom> {
    let of = |k, num_seqs: usize| MergedRoom {
        num_speculative_tokens: k,
        num_seqs,
        num_tokens: total.saturating_sub(num_seqs * (k + 1)),
    };
    let every = (0..=max_k).flat_map(|k| (1..=max_seqs).map(move |num_seqs| of(k, num_seqs)));
    every.filter(|room| room.num_tokens > 0).collect()
}

/// Returns settings with 8 rows, blocks for all of them, and room for 64 tokens in each verification pass.
fn merging() -> SchedulerConfig {
    SchedulerConfig {
        max_num_seqs: 8,
        max_model_len: 512,
        num_blocks: 300,
        block_size: 16,
        max_num_batched_tokens: 4096,
        merged_rooms: rooms(8, 3, 64),
        max_merged_chunks: CHUNKS,
        max_merged_steps: STEPS,
        enable_prefix_caching: false,
        ..small()
    }
}

/// Makes a driver in which `count` requests decode.
fn decoding(config: SchedulerConfig, count: i64) -> Driver {
    let mut driver = Driver::new(config);
    for id in 0..count {
        driver.add(id, &ask(id as u64 + 1, 3, 300)).unwrap();
    }
    driver.step();
    driver
}

/// Returns the prompt tokens of each step until request `id` has a token.
fn chunks(driver: &mut Driver, id: i64) -> Vec<usize> {
    let mut made = Vec::new();
    while driver.output(id).is_empty() {
        made.push(driver.plan_step().num_prefill_tokens);
        driver.settle();
    }
    made
}

#[test]
fn a_prompt_is_cut_to_the_room() {
    let mut driver = decoding(merging(), 2);
    driver.add(9, &ask(9, 150, 2)).unwrap();
    assert_eq!(chunks(&mut driver, 9), [62, 62, 26]);
}

#[test]
fn a_prompt_alone_is_not_cut() {
    let mut driver = Driver::new(merging());
    driver.add(9, &ask(9, 150, 2)).unwrap();
    assert_eq!(chunks(&mut driver, 9), [150]);
}

#[test]
fn a_prompt_that_takes_too_many_steps_has_passes_of_its_own() {
    for (len, expected) in [(248, &[62, 62, 62, 62][..]), (249, &[249])] {
        let mut driver = decoding(merging(), 2);
        driver.add(9, &ask(9, len, 2)).unwrap();
        assert_eq!(chunks(&mut driver, 9), expected);
    }
}

/// Returns rooms of 16, 40 and 90 tokens next to up to four sequences, and of 100 next to up to eight.
fn several_rooms() -> Vec<MergedRoom> {
    let room = |(num_seqs, num_tokens)| MergedRoom { num_speculative_tokens: 0, num_seqs, num_tokens };
    [(4, 16), (4, 40), (4, 90), (8, 100)].map(room).to_vec()
}

#[test]
fn of_several_rooms_a_step_takes_the_smallest_of_which_two_hold_its_prompts() {
    for (len, expected) in [
        (16, &[16][..]),
        (32, &[16, 16]),
        (33, &[33]),
        (80, &[40, 40]),
        (81, &[81]),
        (150, &[90, 40, 16, 4]),
        (360, &[90, 90, 90, 90]),
        (361, &[361]),
    ] {
        let mut driver = decoding(SchedulerConfig { merged_rooms: several_rooms(), ..merging() }, 2);
        driver.add(9, &ask(9, len, 2)).unwrap();
        assert_eq!(chunks(&mut driver, 9), expected, "{len} tokens");
    }
    let mut driver = decoding(SchedulerConfig { merged_rooms: several_rooms(), ..merging() }, 5);
    driver.add(9, &ask(9, 20, 2)).unwrap();
    driver.add(10, &ask(10, 390, 2)).unwrap();
    assert_eq!(chunks(&mut driver, 10), [410], "next to five there is one room, for 400 tokens in four steps");
}

#[test]
fn rooms_of_another_k_do_not_count() {
    let room = |num_speculative_tokens, num_tokens| MergedRoom { num_speculative_tokens, num_seqs: 4, num_tokens };
    let mut driver = decoding(SchedulerConfig { merged_rooms: vec![room(0, 20), room(1, 90)], ..merging() }, 2);
    driver.add(9, &ask(9, 60, 2)).unwrap();
    assert_eq!(chunks(&mut driver, 9), [20, 20, 20]);
}

#[test]
fn the_room_counts_the_prompts_that_wait() {
    let config = SchedulerConfig { merged_rooms: several_rooms(), ..merging() };
    let mut driver = decoding(config.clone(), 2);
    driver.add(8, &ask(8, 30, 2)).unwrap();
    driver.add(9, &ask(9, 100, 2)).unwrap();
    let header = driver.plan_step();
    assert_eq!((header.num_prefill, header.num_prefill_tokens), (2, 90), "of 130 tokens");
    let mut driver = decoding(SchedulerConfig { max_num_seqs: 3, ..config }, 2);
    driver.add(8, &ask(8, 30, 2)).unwrap();
    driver.add(9, &ask(9, 100, 2)).unwrap();
    let header = driver.plan_step();
    assert_eq!((header.num_prefill, header.num_prefill_tokens), (1, 16), "there is no row for the second");
}

#[test]
fn prompts_that_arrive_faster_than_merged_steps_take_them_get_passes_of_their_own() {
    let mut driver = decoding(SchedulerConfig { max_num_seqs: 16, ..merging() }, 1);
    let (mut made, mut id) = (Vec::new(), 10);
    for _ in 0..12 {
        for _ in 0..=CHUNKS {
            driver.add(id, &ask(id as u64, 5, 1)).unwrap();
            id += 1;
        }
        made.push(driver.plan_step().num_prefill);
        driver.settle();
    }
    assert_eq!(made, [3, 3, 6, 3, 3, 6, 3, 3, 6, 3, 3, 6], "three prompts a merged step");
}

#[test]
fn prompts_that_wait_for_rows_do_not_wait_for_a_room() {
    let mut driver = decoding(merging(), 5);
    for id in 10..60 {
        driver.add(id, &ask(id as u64, 30, 1)).unwrap();
    }
    let made: Vec<_> = (0..9)
        .map(|_| {
            let header = driver.plan_step();
            driver.settle();
            header.num_prefill_tokens
        })
        .collect();
    assert_eq!(made, [59; 9], "three rows for prompts, all of which have a chunk in each step");
}

#[test]
fn without_a_room_nothing_is_cut() {
    let mut driver = decoding(SchedulerConfig { merged_rooms: rooms(2, 3, 64), ..merging() }, 3);
    driver.add(9, &ask(9, 150, 2)).unwrap();
    assert_eq!(chunks(&mut driver, 9), [150], "no room next to three");
    let k_of_others = SchedulerConfig {
        merged_rooms: rooms(8, 3, 64).into_iter().filter(|room| room.num_speculative_tokens > 0).collect(),
        ..merging()
    };
    let mut driver = decoding(k_of_others, 1);
    driver.add(9, &ask(9, 150, 2)).unwrap();
    assert_eq!(chunks(&mut driver, 9), [150], "no room at K = 0");
}

#[test]
fn a_request_that_needs_logits_keeps_chunks_in_their_own_pass() {
    for asked in [Ask { has_extras: true, ..ask(9, 150, 30) }, Ask { tells_prompt: true, ..ask(9, 150, 30) }] {
        let mut driver = decoding(merging(), 1);
        driver.add(9, &asked).unwrap();
        assert_eq!(chunks(&mut driver, 9), [150], "its own prompt");
        driver.add(10, &ask(10, 150, 2)).unwrap();
        assert_eq!(chunks(&mut driver, 10), [150], "one next to it");
    }
}

#[test]
fn a_new_prompt_beyond_the_room_moves_all_chunks_to_a_pass_of_their_own() {
    let mut driver = decoding(merging(), 1);
    driver.add(8, &ask(8, 40, 2)).unwrap();
    driver.add(9, &ask(9, 300, 2)).unwrap();
    let header = driver.plan_step();
    assert_eq!((header.num_prefill, header.num_prefill_tokens), (2, 340));
    driver.settle();
    // Three decode, so four steps have room for 244 tokens.
    driver.add(10, &ask(10, 200, 2)).unwrap();
    driver.add(11, &ask(11, 60, 2)).unwrap();
    driver.add(12, &ask(12, 60, 2)).unwrap();
    let header = driver.plan_step();
    assert_eq!((header.num_decode, header.num_prefill, header.num_prefill_tokens), (3, 3, 320));
}

#[test]
fn the_time_for_prompts_does_not_limit_merged_chunks() {
    let mut driver = decoding(SchedulerConfig { max_prefill_stall_ms: 10.0, ..merging() }, 1);
    driver.add(9, &ask(9, 126, 2)).unwrap();
    assert_eq!(chunks(&mut driver, 9), [63, 63]);
    driver.add(10, &ask(10, 400, 2)).unwrap();
    assert_eq!(chunks(&mut driver, 10)[0], 16, "a pass of its own, of unknown time");
}

#[test]
fn cached_tokens_need_no_room() {
    let mut driver = decoding(SchedulerConfig { enable_prefix_caching: true, ..merging() }, 1);
    driver.add(8, &ask(8, 300, 1)).unwrap();
    assert_eq!(chunks(&mut driver, 8), [300]);
    driver.add(9, &ask(8, 300, 1)).unwrap();
    assert_eq!(chunks(&mut driver, 9), [12], "all but the last block is cached");
}

#[test]
fn the_most_important_prompt_gets_the_room() {
    let mut driver = decoding(merging(), 1);
    driver.add(8, &ask(8, 150, 2)).unwrap();
    driver.plan_step();
    driver.settle();
    driver.add(9, &Ask { priority: -1, ..ask(9, 40, 2) }).unwrap();
    // Admission comes after the running prompt; from then on importance counts.
    let first = driver.plan_step();
    driver.settle();
    assert_eq!(first.num_prefill_tokens, 63);
    let (mut order, mut steps) = (Vec::new(), 0);
    while order.len() < 2 && steps < 9 {
        driver.step();
        steps += 1;
        let begun: Vec<i64> = [8, 9].into_iter().filter(|id| !driver.output(*id).is_empty()).collect();
        for id in begun {
            if !order.contains(&id) {
                order.push(id);
            }
        }
    }
    assert_eq!(order, [9, 8]);
}

#[test]
fn a_draft_model_catches_up_as_without_rooms() {
    let runs = [rooms(8, 3, 64), Vec::new()].map(|merged_rooms| {
        let config = SchedulerConfig {
            num_speculative_tokens: 3,
            drafter: specrs_core::Drafter::draft_model(512, 0.1),
            merged_rooms,
            ..merging()
        };
        let mut driver = Driver::new(config);
        driver.add(0, &drafting(1, 3, 100)).unwrap();
        driver.step();
        driver.add(1, &drafting(2, 150, 40)).unwrap();
        let prefill = chunks(&mut driver, 1);
        let after = driver.plan_step();
        driver.settle();
        let caught_up = (after.num_draft_tokens, after.max_k, after.num_decode);
        driver.run();
        (prefill.len(), caught_up, driver.output(0).to_vec(), driver.output(1).to_vec())
    });
    assert_eq!((runs[0].0, runs[1].0), (3, 1));
    assert_eq!((runs[0].1, &runs[0].2, &runs[0].3), (runs[1].1, &runs[1].2, &runs[1].3));
    assert!(runs[0].1.0 > 100, "the draft reads the prompt: {:?}", runs[0].1);
}

/// State of the prompts before a step, with which the step's chunks are checked.
struct Check {
    /// Number of tokens of each prompt that are not computed, by id.
    rest: BTreeMap<i64, usize>,
    /// Ids of requests whose logits are changed or reported; next to them no chunks are merged.
    on_logits: Vec<i64>,
    /// Whether requests waited after the last two steps. The step then merges chunks only if they waited for rows.
    waited: bool,
}

impl Check {
    /// Reads a driver's prompts before a plan.
    fn before(driver: &Driver, lens: &BTreeMap<i64, usize>, on_logits: &[i64], waited: bool) -> Self {
        let rest = driver.scheduler.request_ids().filter_map(|id| {
            let view = driver.scheduler.request(id).expect("a live request");
            (view.state != RequestState::Decode).then(|| (id, lens[&id] - view.num_computed_tokens))
        });
        Self { rest: rest.collect(), on_logits: on_logits.to_vec(), waited }
    }

    /// Checks a step's chunks. If they may be merged, they fit the room, and fill it or end all prompts; else they take
    /// all prompt tokens. Returns whether the step merges chunks.
    fn after(&self, driver: &Driver, header: StepHeader) -> bool {
        let StepHeader { num_decode, num_prefill, num_prefill_tokens, .. } = header;
        let has_row = |id: &i64| driver.scheduler.request(*id).is_ok_and(|view| view.row.is_some());
        let running: Vec<_> = self.rest.iter().filter(|(id, _)| has_row(id)).collect();
        let left: usize = running.iter().map(|(_, left)| **left).sum();
        let config = driver.scheduler.config();
        let num_seqs = config.merged_rooms.iter().map(|room| room.num_seqs).find(|&most| most >= num_decode);
        let of_batch = config.merged_rooms.iter().filter(|room| Some(room.num_seqs) == num_seqs);
        let rooms: Vec<_> = of_batch.map(|room| room.num_tokens).collect();
        let most = rooms.last().map_or(0, |largest| STEPS * largest);
        let plain = driver.scheduler.request_ids().all(|id| !has_row(&id) || !self.on_logits.contains(&id));
        let mut merges =
            num_decode > 0 && !rooms.is_empty() && plain && left <= most && running.len() <= STEPS * CHUNKS;
        merges &= !(self.waited && num_prefill_tokens == left);
        if merges {
            let largest = rooms[rooms.len() - 1];
            assert!(num_prefill_tokens <= largest && num_prefill <= CHUNKS, "{header:?}: rooms for {rooms:?}");
            let full = rooms.contains(&num_prefill_tokens) || num_prefill == CHUNKS;
            assert!(full || num_prefill_tokens == left, "{header:?}: {left} are left, rooms for {rooms:?}");
            let few = rooms.iter().find(|&room| left <= 2 * room).unwrap_or(&largest);
            assert!(num_prefill_tokens >= *few || num_prefill == CHUNKS || num_prefill_tokens == left, "{header:?}");
        } else {
            assert_eq!(num_prefill_tokens, left, "{header:?}: a pass of their own takes all");
        }
        merges && num_prefill > 0
    }
}

#[test]
fn every_merged_chunk_fits_and_no_prompt_starves() {
    let (mut merged, mut alone, mut longest) = (0, 0, 0);
    for seed in 0..60_u64 {
        let mut number = 0_u64;
        let mut below = |n: u64| {
            number += 1;
            (mix(seed * 100_000 + number) % n) as usize
        };
        let merged_rooms = match below(4) {
            3 => several_rooms(),
            of => rooms(6, 0, [20, 40, 64][of]),
        };
        let mut driver = Driver::new(SchedulerConfig { merged_rooms, ..merging() });
        let (mut lens, mut on_logits, mut admitted) = (BTreeMap::new(), Vec::new(), BTreeMap::<i64, usize>::new());
        let mut waits = 0;
        for step in 0..150 {
            for _ in 0..below(2) * below(2) * (1 + below(3)) {
                let id = lens.len() as i64;
                let len = [1 + below(5), 1 + below(60), 1 + below(300)][below(3)];
                let asked = Ask { has_extras: below(12) == 0, ..ask(1000 * seed + id as u64, len, 1 + below(40)) };
                on_logits.extend(asked.has_extras.then_some(id));
                driver.add(id, &asked).unwrap();
                lens.insert(id, len);
            }
            if !driver.scheduler.has_unfinished() {
                continue;
            }
            let check = Check::before(&driver, &lens, &on_logits, waits >= 2);
            let header = driver.plan_step();
            waits = if driver.scheduler.num_waiting() > 0 { waits + 1 } else { 0 };
            *if check.after(&driver, header) { &mut merged } else { &mut alone } += usize::from(header.num_prefill > 0);
            for &id in check.rest.keys() {
                match driver.scheduler.request(id).map(|view| view.state) {
                    Ok(RequestState::Prefill) => {
                        let since = step - *admitted.entry(id).or_insert(step);
                        longest = longest.max(since + 1);
                        assert!(since < 2 * STEPS, "request {id} waits {since} steps");
                    }
                    _ => {
                        admitted.remove(&id);
                    }
                }
            }
            driver.settle();
        }
        driver.run();
    }
    assert!(merged > 300 && alone > 100 && longest >= STEPS, "{merged} merged, {alone} alone, {longest} steps");
}

#[test]
fn rooms_that_no_device_has() {
    let room = |k, num_seqs, num_tokens| MergedRoom { num_speculative_tokens: k, num_seqs, num_tokens };
    let rejected = |field: &str, config: SchedulerConfig| {
        let error = specrs_core::Scheduler::new(config).expect_err(field);
        assert!(matches!(&error, Error::InvalidConfig { field: named, .. } if *named == field), "{error}");
    };
    for wrong in [
        vec![room(0, 0, 8)],
        vec![room(0, 1, 0)],
        vec![room(0, 1, 1 << 40)],
        vec![room(0, 2, 8), room(0, 1, 8)],
        vec![room(1, 1, 8), room(0, 1, 8)],
        vec![room(0, 1, 8), room(0, 1, 8)],
        vec![room(0, 1, 8), room(0, 1, 7)],
    ] {
        rejected("merged_rooms", SchedulerConfig { merged_rooms: wrong, ..merging() });
    }
    rejected("max_merged_chunks", SchedulerConfig { max_merged_chunks: 0, ..merging() });
    rejected("max_merged_steps", SchedulerConfig { max_merged_steps: 0, ..merging() });
    let _ = specrs_core::Scheduler::new(speculative()).expect("no rooms need no numbers of steps");
}
