//! Tests of whole runs over a grid of configurations: every output equals the output of the model alone.

use specrs_core::{Drafter, HostDrafters, SchedulerConfig};

use super::merging::rooms;

use crate::common::driver::{Ask, Driver, prompt};
use crate::common::model::mix;
use crate::with_drafts_of_requests;

struct Rng(u64);

impl Rng {
    fn below(&mut self, n: u64) -> usize {
        self.0 = self.0.wrapping_add(1);
        (mix(self.0) % n) as usize
    }

    fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.below(from.len() as u64)]
    }
}

fn random_config(rng: &mut Rng) -> SchedulerConfig {
    let block_size = rng.pick(&[1, 2, 3, 4, 8, 16]);
    let max_model_len = rng.pick(&[16, 40, 90]);
    let whole = usize::div_ceil(max_model_len, block_size);
    let on_host = rng.below(3) == 0;
    let merged_tokens = rng.pick(&[0, 0, 5, 12, 30]);
    SchedulerConfig {
        merged_rooms: rooms(6, 5, merged_tokens),
        max_merged_chunks: rng.pick(&[1, 2, 4]),
        max_merged_steps: rng.pick(&[1, 3, 5]),
        num_speculative_tokens: rng.pick(&[0, 1, 2, 5]),
        drafter: match rng.pick(&[None, Some(12), Some(30), Some(200), Some(200), Some(200)]) {
            None => Drafter::None,
            Some(max_model_len) => Drafter::Cached {
                max_model_len,
                max_draft_lag: rng.pick(&[2, 2, 2, 1, 3]),
                mask_token_id: rng.pick(&[None, None, Some(0)]),
                cost_ratio: rng.pick(&[0.05, 0.3, 1.0, 2.5]),
            },
        },
        host_drafters: if on_host { with_drafts_of_requests(HostDrafters::default()) } else { HostDrafters::default() },
        max_in_flight: if on_host { 1 } else { rng.pick(&[1, 2, 2, 3]) },
        enable_prefix_caching: rng.below(4) > 0,
        max_prefill_stall_ms: rng.pick(&[0.0, 0.0, 2.0, 20.0]),
        attention_cost_ratio: rng.pick(&[0.0, 1.0 / 4096.0, 0.1]),
        ..SchedulerConfig::new(
            rng.pick(&[1, 2, 3, 6]),
            max_model_len,
            whole + rng.below(2 * whole as u64),
            block_size,
            rng.pick(&[1, 3, 8, 20, 64]),
        )
    }
}

fn random_ask(rng: &mut Rng, config: &SchedulerConfig) -> Ask {
    let most = config.max_model_len - 1;
    let len = 1 + rng.below(most.min(40) as u64);
    let mut tokens = prompt(rng.pick(&[1, 1, 2]), len);
    if rng.below(3) == 0 {
        *tokens.last_mut().expect("a token") = rng.below(97) as i64;
    }
    let extra_keys = match rng.below(4) {
        0 => vec![(rng.below(len as u64), vec![rng.below(2) as u8])],
        _ => vec![],
    };
    Ask {
        lora: None,
        prompt: tokens,
        max_tokens: 1 + rng.below(40),
        min_tokens: rng.pick(&[0, 0, 3, 10]),
        k: rng.below(config.num_speculative_tokens as u64 + 1),
        priority: rng.below(3) as i64 - 1,
        caller: rng.pick(&[None, None, Some(0), Some(1)]),
        tells_prompt: rng.below(8) == 0,
        has_extras: false,
        stop: (0..rng.below(8)).map(|_| rng.below(97) as i64).collect(),
        salt: rng.pick(&[&b""[..], b"", b"", b"a"]).to_vec(),
        extra_keys,
        prediction: (0..rng.pick(&[0, 0, 30])).map(|_| rng.below(97) as i64).collect(),
    }
}

/// Reports grammar drafts for a request: the tokens that its output will have, with some wrong ones.
fn force(driver: &mut Driver, rng: &mut Rng, id: i64) {
    let outcome = &driver.outcomes[&id];
    let rest = outcome.expected[outcome.output.len()..].iter().take(rng.below(8));
    let tokens: Vec<_> = rest.map(|&token| if rng.below(9) == 0 { (token + 1) % 97 } else { token }).collect();
    let _ = driver.scheduler.set_grammar_drafts(id, &tokens);
}

fn disturbed_run(seed: u64) {
    let mut rng = Rng(mix(seed));
    let config = random_config(&mut rng);
    let mut driver = Driver::new(config.clone());
    let mut next_id = 0;
    for _ in 0..60 + rng.below(100) {
        match rng.below(19) {
            0..4 => {
                driver.add(next_id, &random_ask(&mut rng, &config)).expect("an allowed request");
                next_id += 1;
            }
            4 if next_id > 0 => {
                let _ = driver.abort(rng.below(next_id as u64) as i64);
            }
            5 | 6 if next_id > 0 => {
                let _ = driver.preempt(rng.below(next_id as u64) as i64);
            }
            7 if next_id > 0 => {
                let flag = rng.pick(&[1, 2, 2, 4]);
                driver.device.faults.insert(rng.below(next_id as u64) as i64, flag);
            }
            8 => {
                driver.scheduler.reset_prefix_cache();
                driver.check();
            }
            16 if next_id > 0 => {
                let _ = driver.rebuild_draft(rng.below(next_id as u64) as i64);
            }
            17 | 18 if next_id > 0 => {
                let id = rng.below(next_id as u64) as i64;
                force(&mut driver, &mut rng, id);
            }
            9..13 => {
                driver.plan();
            }
            _ if !driver.in_flight.is_empty() => {
                let step_id = driver.in_flight[0].0.step_id;
                driver.settle();
                driver.scheduler.time_step(step_id, rng.pick(&[0.1, 1.0, 1.0, 30.0])).expect("the last step");
            }
            _ => {}
        }
    }
    driver.run();
}

#[test]
fn disturbed_runs_give_the_models_text() {
    for seed in 0..300 {
        let run = std::panic::catch_unwind(|| disturbed_run(seed));
        assert!(run.is_ok(), "seed {seed}");
    }
}
