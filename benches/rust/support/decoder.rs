//! Decoders with the bundled pair's sizes and random weights, and their passes in the middle of a text.

#![allow(dead_code)]

use specrs_core::philox::{Purpose, fill_uniform};
use specrs_cpu::{
    Bf16, Decoder, DecoderWeights, Isa, KvCache, KvShape, LayerWeights, Linear, Memory, Mlp, ModelShape, Output, Part,
    Pass, Pool, QkNorm, Values, VariedLayer, Weights,
};
use std::sync::Arc;

pub(crate) const TARGET: (ModelShape, usize) = (
    ModelShape {
        vocab_size: 2048,
        hidden_size: 256,
        intermediate_size: 768,
        num_heads: 4,
        num_kv_heads: 2,
        head_dim: 64,
        rms_norm_eps: 1e-6,
    },
    6,
);
pub(crate) const DRAFT: (ModelShape, usize) =
    (ModelShape { hidden_size: 128, intermediate_size: 384, num_heads: 2, num_kv_heads: 1, ..TARGET.0 }, 1);

const CONTEXT: usize = 256;
const BLOCK_SIZE: usize = 16;

fn values(position: &mut u64, len: usize, scale: f32, bf16: bool) -> Values {
    let mut x = vec![0.0; len];
    *position += 1;
    fill_uniform(1, *position, Purpose::Accept, &mut x);
    let x = x.into_iter().map(|x| (x - 0.5) * scale);
    if bf16 {
        Values::Bf16(Memory::from_vec(x.map(Bf16::from_f32).collect()))
    } else {
        Values::F32(Memory::from_vec(x.collect()))
    }
}

pub(crate) fn weights((shape, layers): (ModelShape, usize), bf16: bool) -> Arc<Weights> {
    let p = &mut 0;
    let (hidden, dim, intermediate) = (shape.hidden_size, shape.head_dim, shape.intermediate_size);
    let linear = |p: &mut u64, outputs: usize, inputs: usize| {
        let weight = values(p, outputs * inputs, 3.4 / (inputs as f32).sqrt(), bf16);
        Linear::new("bench", inputs, vec![Part::new(weight, None, outputs)]).unwrap()
    };
    let layer = |p: &mut u64| LayerWeights {
        input_norm: Some(values(p, hidden, 2.0, bf16)),
        qkv: linear(p, (shape.num_heads + 2 * shape.num_kv_heads) * dim, hidden),
        qk_norm: Some(QkNorm { q: values(p, dim, 2.0, bf16), k: values(p, dim, 2.0, bf16), whole: false }),
        output_gate: false,
        state: None,
        sinks: None,
        o: linear(p, hidden, shape.num_heads * dim),
        attention_output_norm: None,
        post_attention_norm: Some(values(p, hidden, 2.0, bf16)),
        mlp: Mlp::Dense { gate_up: linear(p, 2 * intermediate, hidden), down: linear(p, hidden, intermediate) },
        mlp_output_norm: None,
        varied: VariedLayer::default(),
    };
    let layers = (0..layers).map(|_| layer(p)).collect();
    let embedding = values(p, shape.vocab_size * hidden, 2.0, bf16).into();
    let lm_head = linear(p, shape.vocab_size, hidden);
    let frequencies = (0..dim / 2).map(|i| 10_000_f32.powf(-2.0 * i as f32 / dim as f32)).collect();
    let final_norm = values(p, hidden, 2.0, bf16);
    let given = DecoderWeights { shape, embedding, layers, final_norm, lm_head, frequencies };
    Arc::new(Weights::new(given).unwrap())
}

/// Decoder and KV cache of one text after its first 256 tokens.
pub(crate) struct Text {
    decoder: Decoder,
    kv: KvCache,
    table: Vec<i64>,
}

impl Text {
    pub(crate) fn new(model: (ModelShape, usize), bf16: bool, bf16_rows: bool, threads: usize, isa: Isa) -> Self {
        let (shape, layers) = model;
        let num_blocks = (CONTEXT + 64).div_ceil(BLOCK_SIZE);
        let kv =
            KvShape { num_blocks, block_size: BLOCK_SIZE, num_kv_heads: shape.num_kv_heads, head_dim: shape.head_dim };
        let kv = KvCache::allocate(kv, layers, bf16).unwrap();
        let decoder = Decoder::with_isa(weights(model, bf16), Arc::new(Pool::new(threads).unwrap()), isa);
        let decoder = if bf16_rows { decoder.with_bf16_rows().unwrap() } else { decoder };
        let mut text = Self { decoder, kv, table: (0..num_blocks as i64).collect() };
        for start in (0..CONTEXT).step_by(64) {
            text.pass(start, 64, false);
        }
        text
    }

    /// Runs a pass over `rows` rows after the first 256 tokens, and finds the most probable token of each.
    pub(crate) fn decode(&mut self, rows: usize) {
        self.pass(CONTEXT, rows, true);
    }

    fn pass(&mut self, start: usize, rows: usize, argmax: bool) {
        let positions: [i64; 64] = std::array::from_fn(|i| (start + i) as i64);
        let tokens: [i64; 64] = std::array::from_fn(|i| (i * 37 % 2048) as i64);
        let asked: [usize; 64] = std::array::from_fn(|i| i);
        let (mut ids, mut top) = ([0; 64], [0.0; 64]);
        let pass = Pass {
            tokens: &tokens[..rows],
            positions: &positions[..rows],
            slots: &positions[..rows],
            sequences: &[0; 64][..rows],
            block_table: &self.table,
            max_blocks: self.table.len(),
            ..Pass::default()
        };
        let output = if argmax {
            let num_ids = self.decoder.weights().shape().vocab_size;
            Output::Argmax { rows: &asked[..rows], num_ids, ids: &mut ids[..rows], top: &mut top[..rows] }
        } else {
            Output::Nothing
        };
        self.decoder.forward(&pass, &mut self.kv, output).unwrap();
    }
}
