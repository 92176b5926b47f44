//! Logits of passes against plain float64 loops, for every family.

mod support;

use specrs_cpu::{Decoder, Isa, ModelShape, Output, Pass, Pool};
use std::sync::Arc;
use support::{BY_32, Host, KINDS, Kind, MISTRAL, MIXTURES, Model, Near, Numbers, QUANTIZED, QWEN3, SMALL};

const SHAPE: ModelShape = ModelShape { vocab_size: 97, ..SMALL };

fn check(shape: ModelShape, kind: Kind) {
    let worst = worst(&Model::random(shape, 2, kind, 7), kind);
    // Nor are they far above what is found.
    assert!(worst < 1.0 && worst > 0.1, "{kind:?}: {worst} of what rounding explains");
}

/// Returns the largest error of logits, where 1 is what rounding in a model of kind `explained` can cause. Two
/// sequences run in passes of uneven numbers of rows, over scattered blocks.
fn worst(model: &Model, explained: Kind) -> f64 {
    let mut decoder = model.decoder(Isa::detect(), 1);
    let (block_size, max_blocks) = (5, 8);
    let mut kv = model.kv_cache(2 * max_blocks, block_size);
    let table: Vec<i64> = (0..2 * max_blocks as i64).map(|i| (i * 7 + 3) % (2 * max_blocks as i64)).collect();
    let n = &mut Numbers(3);
    let sequences: Vec<Vec<usize>> = (0..2).map(|_| (0..40).map(|_| n.below(97)).collect()).collect();
    let exact = Model::random(model.shape, 2, explained, 7);
    let expected: Vec<Vec<Vec<Near>>> = sequences.iter().map(|s| exact.reference(s)).collect();
    let (mut done, mut worst) = ([0, 0], 0.0_f64);
    for counts in [[17, 1], [1, 30], [3, 0], [6, 9], [13, 0]] {
        let (mut tokens, mut positions, mut slots, mut seqs) = (vec![5], vec![-1], vec![-1], vec![9]);
        for seq in 0..2 {
            for p in done[seq]..done[seq] + counts[seq] {
                tokens.push(sequences[seq][p] as i64);
                positions.push(p as i64);
                slots.push(table[seq * max_blocks + p / block_size] * block_size as i64 + (p % block_size) as i64);
                seqs.push(seq);
            }
        }
        let rows: Vec<usize> = (1..tokens.len()).collect();
        let mut logits = vec![f32::NAN; rows.len() * SHAPE.vocab_size];
        let pass = Pass {
            tokens: &tokens,
            positions: &positions,
            slots: &slots,
            sequences: &seqs,
            block_table: &table,
            max_blocks,
            prompts: true,
            ..Pass::default()
        };
        let output = Output::Logits { rows: &rows, num_ids: SHAPE.vocab_size, logits: &mut logits };
        decoder.forward(&pass, &mut kv, output).unwrap();
        for (row, logits) in rows.iter().zip(logits.chunks(SHAPE.vocab_size)) {
            let exact = &expected[seqs[*row]][positions[*row] as usize];
            for (x, exact) in logits.iter().zip(exact) {
                worst = worst.max(exact.off(*x));
                assert!(x.is_finite());
            }
        }
        done = [done[0] + counts[0], done[1] + counts[1]];
    }
    worst
}

#[test]
fn every_family_is_the_reference_within_rounding() {
    for kind in KINDS {
        check(SHAPE, kind);
        check(SHAPE, Kind { bf16: true, ..kind });
    }
}

/// Checks mixtures of experts. A row is sent to the same experts, because no two router logits are within rounding.
#[test]
fn mixtures_are_the_reference_within_rounding() {
    for kind in MIXTURES {
        check(SHAPE, kind);
        check(SHAPE, Kind { bf16: true, ..kind });
    }
}

/// Checks quantized KV caches. The code of a number is known unless the number is close to halfway between two codes.
#[test]
fn quantized_caches_are_the_reference_within_rounding() {
    for kind in QUANTIZED {
        check(SHAPE, kind);
        let unexplained = worst(&Model::random(SHAPE, 2, kind, 7), Kind { fraction: 0, ..kind });
        assert!(unexplained > 100.0, "codes are other numbers");
    }
}

/// Checks bf16 rows: a row is off by up to 2^-8 of itself, and other errors are as without rounding.
#[test]
fn bf16_rows_are_the_reference_within_their_rounding() {
    for kind in KINDS {
        let rounded = Kind { bf16: true, bf16_rows: true, ..kind };
        check(BY_32, rounded);
        let unexplained = worst(&Model::random(BY_32, 2, rounded, 7), Kind { bf16_rows: false, ..rounded });
        assert!(unexplained > 1.0, "rows are rounded");
    }
}

/// Checks products by tiles: they are as near to the reference as others, with rounded rows too. Sixteen sums of two
/// inputs each, and sums of parts, are off by less than one sum of all inputs, for which the bound is made.
#[test]
fn tiles_are_the_reference_within_rounding() {
    for kind in [&KINDS[..], &MIXTURES].concat() {
        // Rounded rows may be sent to other experts than the reference's.
        for bf16_rows in [false, true].into_iter().filter(|&rounded| !rounded || kind.experts == 0) {
            let kind = Kind { bf16: true, bf16_rows, prompt_tiles: true, ..kind };
            let worst = worst(&Model::random(BY_32, 2, kind, 7), kind);
            assert!(worst < 1.0 && worst > 0.02, "{kind:?}: {worst} of what rounding explains");
        }
    }
}

/// Checks that only rows of prompts use tiles, whose sums have an order of their own.
#[test]
fn other_rows_are_not_by_tiles() {
    let kind = Kind { bf16: true, ..QWEN3 };
    let model = Model::random(BY_32, 2, kind, 7);
    let by_tiles = Model::random(BY_32, 2, Kind { prompt_tiles: true, ..kind }, 7);
    let logits = |model: &Model, prompts: bool| {
        let (mut kv, mut logits) = (model.kv_cache(1, 4), vec![f32::NAN; 3 * SHAPE.vocab_size]);
        let pass = Pass {
            tokens: &[1, 2, 3],
            positions: &[0, 1, 2],
            slots: &[0, 1, 2],
            sequences: &[0; 3],
            block_table: &[0],
            max_blocks: 1,
            prompts,
            ..Pass::default()
        };
        let output = Output::Logits { rows: &[0, 1, 2], num_ids: SHAPE.vocab_size, logits: &mut logits };
        model.decoder(Isa::detect(), 1).forward(&pass, &mut kv, output).unwrap();
        logits.iter().map(|x| x.to_bits()).collect::<Vec<_>>()
    };
    let vectors = logits(&model, true);
    assert_eq!(vectors, logits(&by_tiles, false));
    assert_ne!(vectors, logits(&by_tiles, true));
}

#[test]
fn bf16_rows_are_refused_by_name() {
    for (shape, kind, message) in [
        (BY_32, QWEN3, "layers[0].qkv's weight=fp32: must be bf16 with bf16 rows"),
        (BY_32, Kind { bf16: true, code_bits: 8, ..QWEN3 }, "layers[0].qkv's weight=INT8: must be bf16 with bf16 rows"),
        (
            ModelShape { intermediate_size: 80, ..BY_32 },
            Kind { bf16: true, ..QWEN3 },
            "layers[0].down's inputs=80: must be a multiple of 32 with bf16 rows",
        ),
    ] {
        let model = Model::random(shape, 1, kind, 7);
        let refused = model.decoder(Isa::detect(), 1).with_bf16_rows().map(|_| ()).unwrap_err();
        assert_eq!(refused.to_string(), message);
    }
}

/// Checks sizes that leave 0 to 15 numbers after the last whole vector of a norm, a head, the MLP and the LM head.
#[test]
fn vectors_of_every_length_are_the_reference() {
    for tail in 0..33 {
        let shape = ModelShape {
            vocab_size: 60 + tail,
            hidden_size: 1 + tail,
            intermediate_size: 1 + (tail + 7) % 33,
            num_heads: 2,
            num_kv_heads: 1,
            head_dim: 2 + 2 * (tail % 17),
            rms_norm_eps: 1e-6,
        };
        let model = Model::random(shape, 1, if tail % 2 == 0 { QWEN3 } else { MISTRAL }, tail as u64);
        let tokens = [3, 1, 4, 1, 5];
        let expected = model.reference(&tokens).concat();
        for isa in Isa::available() {
            let mut decoder = Decoder::with_isa(model.weights(), Arc::new(Pool::new(1).unwrap()), isa);
            decoder.poison();
            let rows: Vec<_> = tokens.iter().enumerate().map(|(p, &token)| (0, Some(p), token)).collect();
            let found = Host::new(&model, 1, tokens.len(), 2, 5).logits(&mut decoder, &rows).concat();
            for (exact, &x) in expected.iter().zip(&found) {
                assert!(exact.off(x) < 1.0, "{shape:?}, {}: {x} for {exact:?}", isa.name());
            }
        }
    }
}

/// Checks that the logits and the most probable ids of a pass's hidden states have the bits of those that the pass
/// itself returns.
#[test]
fn logits_and_argmax_of_hidden_states_are_the_pass_s() {
    let model = Model::random(SHAPE, 2, MISTRAL, 11);
    let mut decoder = Decoder::new(model.weights(), Arc::new(Pool::new(1).unwrap()));
    let mut kv = model.kv_cache(4, 5);
    let (positions, seqs): (Vec<i64>, Vec<usize>) = ((0..12).collect(), vec![0; 12]);
    let tokens: Vec<i64> = (0..12).map(|i| i * 7 % 97).collect();
    let pass = Pass {
        tokens: &tokens,
        positions: &positions,
        slots: &positions,
        sequences: &seqs,
        block_table: &[0, 1, 2, 3],
        max_blocks: 4,
        ..Pass::default()
    };
    let (rows, num_ids) = ([2, 7, 11], 90);
    let mut hidden = vec![f32::NAN; rows.len() * SHAPE.hidden_size];
    let (mut expected, mut logits) = (vec![f32::NAN; rows.len() * num_ids], vec![f32::NAN; rows.len() * num_ids]);
    let ((mut ids, mut top), (mut own_ids, mut own_top)) = (([0; 3], [0.0; 3]), ([0; 3], [0.0; 3]));
    decoder.forward(&pass, &mut kv, Output::Hidden { rows: &rows, hidden: &mut hidden }).unwrap();
    decoder.forward(&pass, &mut kv, Output::Logits { rows: &rows, num_ids, logits: &mut expected }).unwrap();
    let argmax = Output::Argmax { rows: &rows, num_ids, ids: &mut ids, top: &mut top };
    decoder.forward(&pass, &mut kv, argmax).unwrap();
    decoder.logits(&hidden, num_ids, &mut logits).unwrap();
    decoder.argmax(&hidden, num_ids, &mut own_ids, &mut own_top).unwrap();
    let bits = |values: &[f32]| values.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
    assert_eq!(bits(&logits), bits(&expected));
    assert_eq!((own_ids, bits(&own_top)), (ids, bits(&top)));
    for (i, row) in expected.chunks(num_ids).enumerate() {
        assert_eq!(row[ids[i] as usize].to_bits(), top[i].to_bits());
        assert!(row.iter().all(|&x| x <= top[i]));
    }
    for bad in [0, 98] {
        let message = decoder.argmax(&hidden, bad, &mut own_ids, &mut own_top).unwrap_err().to_string();
        assert_eq!(message, format!("num_ids={bad}: must be from 1 to vocab_size=97"));
    }
    let message = decoder.logits(&hidden[1..], num_ids, &mut logits).unwrap_err().to_string();
    assert_eq!(message, "hidden=119 elements: must be a multiple of hidden_size=40");
}

/// Checks that a closed pool's decoders return an error, and that a pool without threads of its own still works.
#[test]
fn a_closed_pool_runs_no_pass() {
    let model = Model::random(SHAPE, 1, MISTRAL, 11);
    for threads in [1, 2] {
        let pool = Arc::new(Pool::new(threads).unwrap());
        let mut decoder = Decoder::new(model.weights(), Arc::clone(&pool));
        let mut kv = model.kv_cache(4, 5);
        let (row, slots) = ([1], [0]);
        let pass = Pass {
            tokens: &row,
            positions: &slots,
            slots: &slots,
            sequences: &[0],
            block_table: &[0, 1, 2, 3],
            max_blocks: 4,
            ..Pass::default()
        };
        decoder.forward(&pass, &mut kv, Output::Nothing).unwrap();
        pool.close();
        pool.close();
        let after = decoder.forward(&pass, &mut kv, Output::Nothing);
        if threads == 1 {
            after.unwrap();
        } else {
            assert_eq!(after.unwrap_err().to_string(), "the pool's threads have ended: the engine was shut down");
        }
    }
}
