//! Fuzz target for sampling, with any bits as logits and parameters. The result is always a token, and never a removed
//! one if another is left.

use super::bytes::Bytes;
use specrs_core::philox::Purpose;
use specrs_core::sampling::{Sampler, SamplingParams};

pub fn sampling(data: &[u8]) {
    let mut bytes = Bytes(data);
    let vocab_size = 1 + bytes.below(70);
    let params = SamplingParams {
        greedy: bytes.byte().is_multiple_of(4),
        temperature: float(&mut bytes),
        top_k: float(&mut bytes),
        top_p: float(&mut bytes),
        log_min_p: float(&mut bytes),
    };
    let (seed, n) = (bytes.word(), bytes.word());
    let k = bytes.below(4);
    let rows: Vec<f32> = (0..(k + 1) * vocab_size).map(|_| float(&mut bytes)).collect();
    let q: Vec<f32> = (0..k * vocab_size).map(|_| float(&mut bytes)).collect();
    let drafts: Vec<i64> = (0..k).map(|_| bytes.below(vocab_size) as i64).collect();
    let mut sampler = Sampler::new(vocab_size).expect("a valid size");
    let mut left = vec![0.0; vocab_size];
    let mut drawn = Vec::new();
    for (row, position) in rows.chunks(vocab_size).zip(n..=n.saturating_add(k as u64)) {
        let token = sampler.draw(row, &params, seed, position, Purpose::Gumbel).expect("a row of the vocabulary");
        sampler.filter(row, &params, &mut left).expect("a row of the vocabulary");
        let kept = left.iter().any(|&x| x > f32::NEG_INFINITY);
        assert!((token as usize) < vocab_size);
        assert!(!kept || params.greedy || left[token as usize] > f32::NEG_INFINITY, "a removed token was drawn");
        drawn.push(token);
    }
    let coupled = sampler.verify_coupled(&rows, &params, seed, n, &drafts).expect("matching sizes");
    let rejection = sampler.verify_rejection(&rows, &params, seed, n, &drafts, &q).expect("matching sizes");
    for verdict in [coupled, rejection] {
        assert!(verdict.num_accepted <= k && (verdict.token as usize) < vocab_size);
    }
    if drawn.len() == k + 1 {
        assert_eq!(coupled.token, drawn[coupled.num_accepted]);
    }
}

/// Returns a special value or any bits as a float.
fn float(bytes: &mut Bytes<'_>) -> f32 {
    match bytes.byte() {
        0 => f32::NAN,
        1 | 2 => f32::NEG_INFINITY,
        3 | 4 => f32::INFINITY,
        5 => f32::from_bits((bytes.word() >> 32) as u32),
        6 => f32::MIN_POSITIVE,
        7 => -0.0,
        8 => f32::MAX,
        value => (f32::from(value) - 128.0) / 16.0,
    }
}
