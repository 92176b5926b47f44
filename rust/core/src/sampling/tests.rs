//! Tests of the filters against a sort, of draws against noise for the whole row, and of verification against its
//! definition.

use super::{Sampler, SamplingParams, Verdict, best};
use crate::math::exp_nonpositive;
use crate::philox::{self, Purpose};
use proptest::prelude::*;

const OFF: f32 = f32::INFINITY;
const PLAIN: SamplingParams =
    SamplingParams { greedy: false, temperature: 1.0, top_k: OFF, top_p: OFF, log_min_p: f32::NEG_INFINITY };

fn logit() -> impl Strategy<Value = f32> {
    let special = prop::sample::select(vec![0.0, -0.0, 1.0, 1.000_000_1, -1.0, 1e-40, 30.0, f32::NEG_INFINITY]);
    prop_oneof![special, -20.0_f32..20.0, -2000.0_f32..2000.0]
}

/// Generates rows of logits with at least one finite logit, and with equal logits in different strides.
fn row() -> impl Strategy<Value = Vec<f32>> {
    (prop::collection::vec(logit(), 1..24), 1..4_usize).prop_map(|(mut values, times)| {
        values[0] = if values[0].is_finite() { values[0] } else { 0.0 };
        values.repeat(times)
    })
}

fn params() -> impl Strategy<Value = SamplingParams> {
    let temperature = prop_oneof![Just(1.0_f32), 0.1_f32..3.0];
    let top_k = prop_oneof![Just(OFF), (1_u8..80).prop_map(f32::from)];
    let top_p = prop_oneof![Just(OFF), 0.001_f32..0.999, Just(1e-30_f32)];
    let log_min_p = prop_oneof![Just(f32::NEG_INFINITY), -12.0_f32..0.0];
    (temperature, top_k, top_p, log_min_p).prop_map(|(temperature, top_k, top_p, log_min_p)| SamplingParams {
        greedy: false,
        temperature,
        top_k,
        top_p,
        log_min_p,
    })
}

/// Returns the tokens that the parameters keep, computed with a sort. `share` is multiplied with top-p.
fn sorted_cut(row: &[f32], params: &SamplingParams, share: f64) -> Vec<u32> {
    let mut kept: Vec<(u32, f32)> = (0..).zip(row.iter().map(|x| x / params.temperature)).collect();
    let max = kept.iter().map(|x| x.1).fold(f32::NEG_INFINITY, f32::max);
    kept.retain(|x| x.1 > f32::NEG_INFINITY && x.1 - max >= params.log_min_p);
    kept.sort_by(|a, b| b.1.total_cmp(&a.1));
    let cut = |kept: &mut Vec<(u32, f32)>, count: usize| {
        if let Some(&(_, lowest)) = kept.get(count - 1) {
            kept.retain(|x| x.1 >= lowest);
        }
    };
    if params.top_k < OFF {
        cut(&mut kept, params.top_k as usize);
    }
    if params.top_p < OFF {
        let weights: Vec<f64> = kept.iter().map(|x| (f64::from(x.1) - f64::from(max)).exp()).collect();
        let target = f64::from(params.top_p) * share * weights.iter().sum::<f64>();
        let mut sum = 0.0;
        let reached = weights.iter().position(|weight| {
            sum += weight;
            sum >= target
        });
        cut(&mut kept, reached.map_or(weights.len(), |last| last + 1));
    }
    let mut tokens: Vec<u32> = kept.into_iter().map(|x| x.0).collect();
    tokens.sort_unstable();
    tokens
}

fn read(sampler: &mut Sampler, row: &[f32], params: &SamplingParams) -> Vec<u32> {
    sampler.filter.read(row, params);
    sampler.filter.tokens.clone()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, ..ProptestConfig::default() })]

    /// Compares the tokens that the filter keeps with those of a sort. If rounding decides whether top-p keeps a token,
    /// both results are allowed.
    #[test]
    fn the_exact_cut_is_that_of_a_sort(row in row(), params in params()) {
        let mut sampler = Sampler::new(row.len()).unwrap();
        let kept = read(&mut sampler, &row, &params);
        let allowed = [1.0 - 1e-6, 1.0, 1.0 + 1e-6].map(|share| sorted_cut(&row, &params, share));
        prop_assert!(allowed.contains(&kept), "kept {kept:?}, allowed {allowed:?}");
        let sum: f64 = (0..kept.len()).map(|i| f64::from(sampler.filter.probability(i))).sum();
        prop_assert!((sum - 1.0).abs() < 1e-6, "probabilities sum to {sum}");
    }

    #[test]
    fn a_draw_is_the_argmax_under_the_rows_noise(row in row(), params in params(), seed: u64, position: u64) {
        let mut sampler = Sampler::new(row.len()).unwrap();
        let token = sampler.draw(&row, &params, seed, position, Purpose::Draft).unwrap();
        let (mut left, mut noise) = (vec![0.0; row.len()], vec![0.0; row.len()]);
        sampler.filter(&row, &params, &mut left).unwrap();
        philox::fill_gumbel(seed, position, Purpose::Draft, &mut noise);
        let mut best = 0;
        for (candidate, score) in left.iter().zip(&noise).map(|(x, g)| x + g).enumerate() {
            if score > left[best] + noise[best] {
                best = candidate;
            }
        }
        prop_assert_eq!(token as usize, best);
        let greedy = sampler.draw(&row, &SamplingParams { greedy: true, ..params }, seed, position, Purpose::Draft);
        let max = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        prop_assert_eq!(greedy.unwrap() as usize, row.iter().position(|&x| x >= max).unwrap());
    }

    /// Compares both rules with their definitions, written out over all ids.
    #[test]
    fn verification_is_its_definition(
        rows in prop::collection::vec(prop::collection::vec(-3.0_f32..3.0, 12), 1..5),
        drafts in prop::collection::vec(0_i64..12, 4),
        q_rows in prop::collection::vec(prop::collection::vec(-3.0_f32..3.0, 12), 4),
        params in params(),
        (seed, n) in any::<(u64, u64)>(),
    ) {
        let (k, flat) = (rows.len() - 1, rows.concat());
        let (drafts, mut q) = (&drafts[..k], vec![0.0; k * 12]);
        let mut sampler = Sampler::new(12).unwrap();
        for (row, out) in q_rows.iter().zip(q.chunks_mut(12)) {
            sampler.draw(row, &params, seed, n, Purpose::Draft).unwrap();
            sampler.probabilities(out).unwrap();
        }
        let at = |i: usize| n.wrapping_add(i as u64);
        let drawn: Vec<u32> = (0..=k)
            .map(|i| sampler.draw(&rows[i], &params, seed, at(i), Purpose::Gumbel).unwrap())
            .collect();

        let m = drafts.iter().zip(&drawn).take_while(|(d, a)| **d == i64::from(**a)).count();
        let coupled = sampler.verify_coupled(&flat, &params, seed, n, drafts).unwrap();
        prop_assert_eq!(coupled, Verdict { num_accepted: m, token: drawn[m] });

        let mut expected = Verdict { num_accepted: k, token: drawn[k] };
        for i in 0..k {
            let (mut p, mut u) = ([0.0; 12], [0.0]);
            sampler.draw(&rows[i], &params, seed, at(i), Purpose::Gumbel).unwrap();
            sampler.probabilities(&mut p).unwrap();
            philox::fill_uniform(seed, at(i), Purpose::Accept, &mut u);
            let (q, d) = (&q[i * 12..][..12], drafts[i] as usize);
            if u[0] * q[d] < p[d] {
                continue;
            }
            let mut noise = [0.0; 12];
            philox::fill_gumbel(seed, at(i), Purpose::Gumbel, &mut noise);
            let score = |t: usize| f64::from((p[t] - q[t]).max(0.0)).ln() + f64::from(noise[t]);
            let left = (0..12).any(|t| p[t] > q[t]);
            let token = (0..12).reduce(|a, b| if score(b) > score(a) { b } else { a }).unwrap() as u32;
            expected = Verdict { num_accepted: i, token: if left { token } else { drawn[i] } };
            break;
        }
        prop_assert_eq!(sampler.verify_rejection(&flat, &params, seed, n, drafts, &q).unwrap(), expected);
    }
}

#[test]
fn rows_without_a_distribution_give_a_token_and_disturb_nothing() {
    let all = SamplingParams { top_k: 2.0, top_p: 0.5, log_min_p: -3.0, ..PLAIN };
    for bad in [[f32::NAN; 5], [f32::INFINITY; 5], [f32::NEG_INFINITY; 5], [0.0, f32::NAN, 1.0, -1.0, f32::INFINITY]] {
        for params in [PLAIN, all, SamplingParams { greedy: true, ..PLAIN }] {
            let mut sampler = Sampler::new(5).unwrap();
            assert!(sampler.draw(&bad, &params, 1, 2, Purpose::Gumbel).unwrap() < 5);
            let rows = [bad, bad, [0.0; 5]].concat();
            let q = [f32::NAN; 10];
            assert!(sampler.verify_rejection(&rows, &params, 1, 2, &[0, 4], &q).unwrap().token < 5);
            assert!(sampler.verify_coupled(&rows, &params, 1, 2, &[0, 4]).unwrap().token < 5);
            let mut fresh = Sampler::new(5).unwrap();
            let good = [0.0, 1.0, 2.0, 1.0, 0.5];
            let after = sampler.draw(&good, &params, 1, 2, Purpose::Gumbel);
            assert_eq!(after, fresh.draw(&good, &params, 1, 2, Purpose::Gumbel));
        }
    }
    for log_min_p in [f32::INFINITY, 1.0, f32::NAN] {
        let mut sampler = Sampler::new(2).unwrap();
        let params = SamplingParams { log_min_p, ..PLAIN };
        assert!(sampler.draw(&[1.0, 2.0], &params, 1, 2, Purpose::Gumbel).unwrap() < 2);
    }
    for temperature in [0.0, f32::NAN, f32::MIN_POSITIVE] {
        let mut sampler = Sampler::new(2).unwrap();
        let params = SamplingParams { temperature, ..all };
        assert!(sampler.draw(&[1.0, 2.0], &params, 1, 2, Purpose::Gumbel).unwrap() < 2);
    }
}

#[test]
fn the_largest_logit_knows_nan_at_every_place() {
    for len in 1..40 {
        let mut row = vec![-1.0_f32; len];
        for i in 0..len {
            row[i] = 3.0;
            assert!((super::largest(&row) - 3.0).abs() <= 0.0);
            row[i] = f32::NAN;
            assert!(super::largest(&row).is_nan(), "{i} of {len}");
            row[i] = -1.0;
        }
    }
}

#[test]
fn the_lowest_id_is_of_the_first_nan_or_the_first_of_equal_logits() {
    let (low, high, nan) = (f32::NEG_INFINITY, f32::INFINITY, f32::NAN);
    for (row, id) in [
        (&[1.0, 3.0, 3.0][..], 1),
        (&[-0.0, 0.0], 0),
        (&[high, high], 0),
        (&[low, low], 0),
        (&[5.0, nan, 7.0, nan], 1),
        (&[], 0),
    ] {
        assert_eq!(super::lowest_id(row, super::largest(row)), id, "{row:?}");
    }
}

#[test]
fn wrong_sizes_are_named() {
    let mut sampler = Sampler::new(3).unwrap();
    let message = |result: Result<Verdict, crate::Error>| result.unwrap_err().to_string();
    let row = [0.0; 6];
    assert_eq!(message(sampler.verify_coupled(&row, &PLAIN, 0, 0, &[])), "rows=6 elements: must be 3");
    assert_eq!(
        message(sampler.verify_rejection(&row, &PLAIN, 0, 0, &[3], &[0.0; 3])),
        "drafts=3: must be an id from 0 to 2"
    );
    assert_eq!(message(sampler.verify_rejection(&row, &PLAIN, 0, 0, &[1], &[0.0; 2])), "q=2 elements: must be 3");
    assert_eq!(Sampler::new(0).unwrap_err().to_string(), "vocab_size=0: must be from 1 to 2147483648");
}

#[test]
fn of_equal_scores_the_first_token_wins() {
    assert_eq!(best(&[4, 7, 9], [1.0, 1.0, 0.5].into_iter()), 4);
    assert_eq!(best(&[4, 7, 9], [0.5, 1.0, 1.0].into_iter()), 7);
    assert_eq!(best(&[4, 7], [f32::NEG_INFINITY; 2].into_iter()), 4);
}

#[test]
fn a_nucleus_that_is_reached_exactly_ends_there() {
    // 127 tokens of weight 1 and 128 of weight 127/128: half of the sum is the first 127, and the next lie in the same cell.
    let weight = 127.0_f32 / 128.0;
    let near = weight.ln().to_bits();
    let logit =
        (near - 1000..near + 1000).map(f32::from_bits).find(|&x| exp_nonpositive(x).to_bits() == weight.to_bits());
    let row = [[0.0; 127].as_slice(), [logit.expect("a logit of this weight"); 128].as_slice()].concat();
    let mut out = vec![0.0; row.len()];
    Sampler::new(row.len()).unwrap().filter(&row, &SamplingParams { top_p: 0.5, ..PLAIN }, &mut out).unwrap();
    assert_eq!(out.iter().filter(|x| x.is_finite()).count(), 127);
}
