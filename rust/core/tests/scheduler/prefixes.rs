//! The prefix cache as requests see it.

use specrs_core::SchedulerConfig;

use crate::common::driver::{Ask, Driver};
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
fn blocks_can_be_found_only_once_their_prompt_has_finite_logits() {
    let mut driver = Driver::new(SchedulerConfig { max_num_batched_tokens: 8, ..small() });
    driver.add(0, &ask(1, 20, 5)).unwrap();
    let mut registered = Vec::new();
    for _ in 0..3 {
        driver.launch();
        driver.settle();
        registered.push((0..64).filter(|&block| driver.scheduler.block_pool().is_registered(block)).count());
    }
    assert_eq!(registered, [0, 0, 5]);
    driver.run();
}

#[test]
fn equal_prompts_at_once_keep_private_copies() {
    let mut driver = Driver::new(SchedulerConfig { max_num_batched_tokens: 64, max_in_flight: 2, ..speculative() });
    for id in 0..3 {
        driver.add(id, &drafting(1, 20, 20)).unwrap();
    }
    driver.run();
    assert_eq!(cached(&driver), 0, "all three were admitted before any had settled");
    driver.add(3, &drafting(1, 20, 20)).unwrap();
    driver.run();
    assert_eq!(cached(&driver), 16);
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
    driver.launch();
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
