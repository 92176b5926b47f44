//! Logits of passes against float64 by plain loops, for every family.

mod support;

use specrs_cpu::{Decoder, ModelShape, Output, Pass, Pool};
use std::sync::Arc;
use support::{Kind, LLAMA_BIAS, LLAMA3, MISTRAL, Model, Numbers, QWEN2, QWEN3};

const SHAPE: ModelShape = ModelShape {
    vocab_size: 97,
    hidden_size: 40,
    intermediate_size: 70,
    num_heads: 6,
    num_kv_heads: 2,
    head_dim: 10,
    rms_norm_eps: 1e-6,
};

/// Two sequences in passes of uneven rows, one block table row each, blocks in no order.
fn check(kind: Kind) {
    let model = Model::random(SHAPE, 2, kind, 7);
    let mut decoder = Decoder::new(model.weights(), Arc::new(Pool::new(1).unwrap())).unwrap();
    let (block_size, max_blocks) = (5, 8);
    let mut kv = model.kv_cache(2 * max_blocks, block_size);
    let table: Vec<i64> = (0..2 * max_blocks as i64).map(|i| (i * 7 + 3) % (2 * max_blocks as i64)).collect();
    let n = &mut Numbers(3);
    let sequences: Vec<Vec<usize>> = (0..2).map(|_| (0..40).map(|_| n.below(97)).collect()).collect();
    let expected: Vec<Vec<Vec<f64>>> = sequences.iter().map(|s| model.reference(s, 0)).collect();
    let (mut done, mut worst) = ([0, 0], 0.0_f64);
    for counts in [[17, 1], [1, 30], [3, 0], [6, 9], [13, 0]] {
        let (mut tokens, mut positions, mut slots, mut entries) = (vec![5], vec![-1], vec![-1], vec![9]);
        for entry in 0..2 {
            for p in done[entry]..done[entry] + counts[entry] {
                tokens.push(sequences[entry][p] as i64);
                positions.push(p as i64);
                slots.push(table[entry * max_blocks + p / block_size] * block_size as i64 + (p % block_size) as i64);
                entries.push(entry);
            }
        }
        let rows: Vec<usize> = (1..tokens.len()).collect();
        let mut logits = vec![f32::NAN; rows.len() * SHAPE.vocab_size];
        let pass = Pass {
            tokens: &tokens,
            positions: &positions,
            slots: &slots,
            entries: &entries,
            block_table: &table,
            max_blocks,
        };
        let output = Output::Logits { rows: &rows, num_ids: SHAPE.vocab_size, logits: &mut logits };
        decoder.forward(&pass, &mut kv, output).unwrap();
        for (row, logits) in rows.iter().zip(logits.chunks(SHAPE.vocab_size)) {
            let exact = &expected[entries[*row]][positions[*row] as usize];
            for (x, exact) in logits.iter().zip(exact) {
                worst = worst.max((f64::from(*x) - exact).abs());
                assert!(x.is_finite());
            }
        }
        done = [done[0] + counts[0], done[1] + counts[1]];
    }
    assert!(worst < if kind.bf16 { 0.05 } else { 2e-5 }, "{kind:?}: off by {worst:e}");
}

#[test]
fn every_family_is_the_reference_within_rounding() {
    for kind in [QWEN3, LLAMA3, LLAMA_BIAS, QWEN2, MISTRAL] {
        check(kind);
        check(Kind { bf16: true, ..kind });
    }
}
