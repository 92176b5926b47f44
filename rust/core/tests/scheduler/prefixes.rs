//! Tests of the prefix cache as requests see it.

use specrs_core::scheduler::layout::FLAG_TARGET_NON_FINITE;
use specrs_core::{Drafter, SchedulerConfig};

use crate::common::driver::{Ask, Driver, prompt};
use crate::{ask, drafting, small, speculative};

fn cached(driver: &Driver) -> u64 {
    driver.scheduler.num_cached_tokens()
}

#[test]
fn a_hit_covers_full_blocks_and_never_the_last_token() {
    for (len, hit) in [(4, 0), (5, 4), (8, 4), (9, 8), (11, 8), (12, 8)] {
        let mut driver = Driver::new(small());
        for id in 0..2 {
            driver.add(id, &ask(1, len, 3)).unwrap();
            driver.run();
        }
        assert_eq!(cached(&driver), hit, "prompt of {len} tokens, blocks of 4");
    }
}

#[test]
fn outputs_are_cached_like_prompts() {
    let mut driver = Driver::new(speculative());
    driver.add(0, &drafting(1, 6, 20)).unwrap();
    driver.run();
    let mut prompt = ask(1, 6, 1).prompt;
    prompt.extend(driver.output(0));
    driver.add(1, &Ask { prompt, k: 3, max_tokens: 5, ..Ask::default() }).unwrap();
    driver.run();
    assert_eq!(cached(&driver), 24, "26 tokens, the last one without KV");
}

#[test]
fn another_salt_or_another_token_shares_nothing_beyond() {
    let mut driver = Driver::new(small());
    driver.add(0, &ask(1, 13, 1)).unwrap();
    driver.run();
    driver.add(1, &Ask { salt: b"tenant".to_vec(), ..ask(1, 13, 1) }).unwrap();
    driver.run();
    assert_eq!(cached(&driver), 0);
    let mut other = ask(1, 13, 1);
    other.prompt[5] = (other.prompt[5] + 1) % 97;
    driver.add(2, &other).unwrap();
    driver.run();
    assert_eq!(cached(&driver), 4);
}

#[test]
fn extra_keys_share_only_with_equal_ones() {
    let with = |keys: &[(usize, &[u8])]| Ask {
        extra_keys: keys.iter().map(|&(position, key)| (position, key.to_vec())).collect(),
        ..drafting(1, 21, 8)
    };
    // Blocks of 4, so of 21 tokens at most 20 are found.
    let cases = [
        (&[(9, &b"image"[..])][..], 20),
        (&[(9, b"other")], 8),
        (&[(9, b"imagf")], 8),
        (&[(10, b"image")], 8),
        (&[(5, b"image")], 4),
        (&[(13, b"image")], 8),
        (&[], 8),
        (&[(9, b"image"), (17, b"more")], 16),
        (&[(0, b"adapter"), (9, b"image")], 0),
    ];
    for (keys, expected) in cases {
        let mut driver = Driver::new(speculative());
        driver.add(0, &with(&[(9, b"image")])).unwrap();
        driver.run();
        driver.add(1, &with(keys)).unwrap();
        driver.run();
        assert_eq!(cached(&driver), expected, "{keys:?}");
    }
}

#[test]
fn nothing_is_cached_when_caching_is_off() {
    let mut driver = Driver::new(SchedulerConfig { enable_prefix_caching: false, ..speculative() });
    for id in 0..3 {
        driver.add(id, &drafting(1, 20, 20)).unwrap();
    }
    driver.run();
    assert_eq!(cached(&driver), 0);
}

#[test]
fn blocks_can_be_found_as_soon_as_their_chunk_has_settled() {
    for max_in_flight in 1..3 {
        let mut driver = Driver::new(SchedulerConfig { max_num_batched_tokens: 9, max_in_flight, ..small() });
        driver.add(0, &ask(1, 21, 5)).unwrap();
        let mut registered = Vec::new();
        for _ in 1..max_in_flight {
            driver.plan_step();
        }
        for _ in 0..3 {
            driver.plan_step();
            driver.settle();
            registered.push((0..64).filter(|&block| driver.scheduler.block_pool().is_registered(block)).count());
        }
        assert_eq!(registered, [2, 4, 5], "chunks end at 9, 18 and 21");
        driver.run();
    }
}

#[test]
fn a_request_preempted_in_mid_prefill_keeps_what_has_settled() {
    let mut driver = Driver::new(SchedulerConfig {
        num_reserved_decode_tokens: 0,
        max_in_flight: 2,
        ..SchedulerConfig::new(2, 600, 64, 16, 50)
    });
    driver.add(0, &ask(1, 500, 5)).unwrap();
    for _ in 0..9 {
        driver.plan_step();
        driver.settle();
    }
    driver.preempt(0).unwrap();
    driver.plan_step();
    assert_eq!(driver.section("admit_num_cached", 1), [448], "28 blocks of 450 positions");
    driver.run();
    assert_eq!(driver.output(0).len(), 5);
}

/// Returns the number of prefill tokens until all of `asks` have ended, with room for all of them at once.
fn prefill_tokens(asks: &[Ask], max_num_batched_tokens: usize, max_in_flight: usize) -> usize {
    let config = SchedulerConfig {
        max_in_flight,
        num_speculative_tokens: 3,
        drafter: Drafter::draft_model(600, 1.0),
        ..SchedulerConfig::new(8, 600, 400, 16, max_num_batched_tokens)
    };
    let mut driver = Driver::new(config);
    for (id, ask) in asks.iter().enumerate() {
        driver.add(id as i64, ask).unwrap();
    }
    driver.run();
    driver.steps.iter().map(|header| header.num_prefill_tokens).sum()
}

#[test]
fn equal_prompts_at_once_are_computed_once() {
    for max_in_flight in 1..4 {
        for budget in [64, 300, 8192] {
            let tokens = prefill_tokens(&vec![drafting(1, 500, 8); 8], budget, max_in_flight);
            // The last 4 tokens, behind the last full block, are each request's own.
            assert_eq!(tokens, 500 + 7 * 4, "C = {budget}, {max_in_flight} in flight");
        }
    }
}

#[test]
fn prompts_that_begin_alike_wait_where_that_saves_more_than_is_left() {
    let with_tail = |id: u64, len: usize| {
        let own = prompt(id + 10, len);
        Ask { prompt: [prompt(1, 320), own].concat(), max_tokens: 4, ..Ask::default() }
    };
    let asks: Vec<_> = (0..4).map(|id| with_tail(id, 100)).collect();
    assert_eq!(prefill_tokens(&asks, 8192, 1), 420 + 3 * 100);
    let asks: Vec<_> =
        (0..4).map(|id| Ask { prompt: with_tail(id, 250).prompt.split_off(160), ..with_tail(id, 1) }).collect();
    assert_eq!(prefill_tokens(&asks, 8192, 1), 4 * 410, "160 in common of 410");
}

#[test]
fn who_waits_for_a_prefix_keeps_its_row_and_blocks_and_others_go_on() {
    // 2 rows: one computes, one is kept for request 1, so request 2 waits although it has nothing in common.
    for (rows, admitted) in [(2, 1), (3, 2)] {
        let mut driver = Driver::new(SchedulerConfig { max_num_seqs: rows, ..small() });
        driver.add(0, &ask(1, 25, 5)).unwrap();
        driver.add(1, &ask(1, 25, 5)).unwrap();
        driver.add(2, &ask(2, 5, 5)).unwrap();
        assert_eq!(driver.plan_step().num_admitted, admitted);
        driver.settle();
        let header = driver.plan_step();
        assert_eq!(driver.section("admit_request_id", header.num_admitted), [1]);
        assert_eq!(driver.section("admit_num_cached", 1), [24]);
        driver.run();
    }
    // 16 blocks: 7 for request 0 and as many for request 1, which leaves 2 of the 3 for request 2.
    for (num_blocks, admitted) in [(16, 1), (17, 2)] {
        let mut driver = Driver::new(SchedulerConfig { num_blocks, ..small() });
        driver.add(0, &ask(1, 25, 3)).unwrap();
        driver.add(1, &ask(1, 25, 3)).unwrap();
        driver.add(2, &ask(2, 9, 3)).unwrap();
        assert_eq!(driver.plan_step().num_admitted, admitted, "{num_blocks} blocks");
        driver.run();
    }
}

#[test]
fn nobody_waits_for_a_request_that_is_gone() {
    for max_in_flight in 1..3 {
        for end in 0..3 {
            let config = SchedulerConfig { max_num_batched_tokens: 8, max_in_flight, max_num_seqs: 3, ..small() };
            let mut driver = Driver::new(config);
            for id in 0..3 {
                driver.add(id, &ask(1, 41, 5)).unwrap();
            }
            driver.plan_step();
            driver.settle();
            driver.plan_step();
            assert_eq!((driver.scheduler.num_running(), driver.scheduler.num_waiting()), (1, 2));
            match end {
                0 => driver.abort(0).unwrap(),
                1 => driver.preempt(0).unwrap(),
                _ => _ = driver.device.faults.insert(0, FLAG_TARGET_NON_FINITE),
            }
            driver.run();
            assert_eq!((driver.output(1).len(), driver.output(2).len()), (5, 5));
            let tokens: usize = driver.steps.iter().map(|header| header.num_prefill_tokens).sum();
            assert!(tokens < 2 * 41 + 8, "{tokens} prefill tokens");
        }
    }
}

#[test]
fn equal_prompts_at_once_share_blocks() {
    let mut driver = Driver::new(SchedulerConfig { max_num_batched_tokens: 64, max_in_flight: 2, ..speculative() });
    for id in 0..3 {
        driver.add(id, &drafting(1, 20, 20)).unwrap();
    }
    driver.run();
    assert_eq!(cached(&driver), 32);
    driver.add(3, &drafting(1, 20, 20)).unwrap();
    driver.run();
    assert_eq!(cached(&driver), 48);
}

#[test]
fn hits_count_once_a_request_however_often_it_is_preempted() {
    let mut driver = Driver::new(small());
    driver.add(0, &ask(1, 9, 20)).unwrap();
    for _ in 0..3 {
        for _ in 0..3 {
            driver.step();
        }
        driver.preempt(0).unwrap();
    }
    driver.run();
    assert_eq!(cached(&driver), 0, "it was alone with a cold cache");
    driver.add(1, &ask(1, 9, 20)).unwrap();
    driver.step();
    driver.preempt(1).unwrap();
    driver.run();
    assert_eq!(cached(&driver), 8);
}

#[test]
fn a_sequence_is_forgotten_from_its_tail() {
    // 16 blocks: request 0 leaves 8 cached ones, request 1 needs 10 and so takes 2 of them.
    let config = SchedulerConfig { num_blocks: 16, ..small() };
    let mut driver = Driver::new(config);
    driver.add(0, &ask(1, 33, 1)).unwrap();
    driver.run();
    driver.add(1, &ask(2, 39, 1)).unwrap();
    driver.run();
    driver.add(2, &ask(1, 33, 1)).unwrap();
    driver.run();
    assert_eq!(cached(&driver), 24);
}

#[test]
fn a_reset_waits_until_nobody_holds_a_block() {
    let mut driver = Driver::new(small());
    driver.add(0, &ask(1, 20, 5)).unwrap();
    driver.plan_step();
    assert!(!driver.scheduler.reset_prefix_cache());
    driver.run();
    assert!(driver.scheduler.reset_prefix_cache());
    driver.check();
    driver.add(1, &ask(1, 20, 5)).unwrap();
    driver.run();
    assert_eq!(cached(&driver), 0);
}

#[test]
fn a_long_run_survives_evictions_of_everything() {
    let config =
        SchedulerConfig { num_blocks: 20, block_size: 2, max_model_len: 40, max_in_flight: 2, ..speculative() };
    let mut driver = Driver::new(config);
    for id in 0..60 {
        driver.add(id, &drafting(id as u64 / 5, 5 + id as usize % 20, 20)).unwrap();
    }
    driver.run();
    assert!(cached(&driver) > 0);
}
