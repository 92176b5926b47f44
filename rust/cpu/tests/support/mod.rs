//! Random small models; their forward pass in plain float64 loops is in `reference`, and passes over paged KV are in
//! `host`. Shares no code with the crate.

#![allow(
    dead_code,
    unreachable_pub,
    clippy::match_bool,
    clippy::single_match_else,
    clippy::struct_excessive_bools,
    unused_imports,
    clippy::missing_panics_doc
)]

mod host;
mod reference;
mod weights;

pub use host::Host;
pub use reference::Near;
use specrs_cpu::{
    Activation, Bf16, Decoder, DecoderWeights, E4m3, E5m2, ExpertLora, Experts, Isa, KvCache, KvShape, LayerWeights,
    Linear, Lora, LoraLayer, LoraPart, Memory, MemoryMut, Mlp, ModelShape, Part, Pool, QkNorm, QueryScaling, Rotation,
    Rounding, Tiles, Values, ValuesMut, Weights,
};
use std::sync::Arc;
pub use weights::{Dense, LowRank, Stored, group_of};

/// Generator of uniform random numbers from a seed (splitmix64).
pub struct Numbers(pub u64);

impl Numbers {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// Returns a random number in [-1, 1).
    pub fn unit(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1 << 23) as f32 - 1.0
    }

    pub fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }
}

/// Sizes that are not divisible into vectors.
pub const SMALL: ModelShape = ModelShape {
    vocab_size: 50,
    hidden_size: 40,
    intermediate_size: 70,
    num_heads: 6,
    num_kv_heads: 2,
    head_dim: 10,
    rms_norm_eps: 1e-6,
};

/// Sizes divisible by 32, as packed weights and bf16 pairs need.
pub const BY_32: ModelShape =
    ModelShape { vocab_size: 97, hidden_size: 64, intermediate_size: 96, num_heads: 4, head_dim: 24, ..SMALL };

/// Keys and values of one layer, `[position][head][feature]`.
pub type KeysValues = (Vec<Vec<Vec<f64>>>, Vec<Vec<Vec<f64>>>);

/// Options of a model family.
#[derive(Clone, Copy, Debug)]
pub struct Kind {
    pub qk_norm: bool,
    pub qkv_bias: bool,
    pub other_bias: bool,
    pub tied: bool,
    /// Whether projections that share an input, such as q, k and v, are stored as several weights instead of one.
    pub split: bool,
    pub bf16: bool,
    /// Whether rows are rounded to bf16 before products.
    pub bf16_rows: bool,
    /// Whether rows are rounded to 8 bits for packed weights; otherwise to 16.
    pub int8_rows: bool,
    /// Whether products use tiles: all rows are fed as rows of prompts.
    pub prompt_tiles: bool,
    /// Number of bits of the layers' quantized projections; 0 if they are not quantized.
    pub code_bits: u32,
    /// Whether frequencies have Llama 3.1's scaling.
    pub scaled: bool,
    /// Whether there are norms before attention and MLP.
    pub before: bool,
    /// Whether there are norms after attention and MLP, before the addition to the residual stream.
    pub behind: bool,
    /// Whether queries and keys are normed over all heads.
    pub whole: bool,
    /// Whether the activation is GELU instead of `SiLU`.
    pub gelu: bool,
    /// Window of every layer but the last, and with `all_windows` of the last, too; 0 for full attention.
    pub window: usize,
    pub all_windows: bool,
    /// Number of experts in every layer but the first, two of which each row uses; 0 for none.
    pub experts: usize,
    /// Whether the weights of a row's experts add up to 1.
    pub normalized: bool,
    /// Whether experts and router have biases.
    pub expert_bias: bool,
    /// Whether the experts' activation is a clamped `SwiGLU`.
    pub clamped: bool,
    /// Whether heads have attention sinks: an extra score without a value.
    pub sinks: bool,
    /// Whether queries grow with their position, by [`GROWTH`].
    pub grows: bool,
    /// Whether windows are chunks, neighbouring features are rotated, the last layer is not rotated and alone has queries
    /// that grow, from one position earlier on, and inputs of experts are multiplied by sigmoids of their logits.
    pub llama4: bool,
    /// Number of fraction bits of a FP8 KV cache; 0 if it is not quantized.
    pub fraction: u32,
}

/// Scales of keys and values in a FP8 cache, in every layer.
pub const KV_SCALES: (f32, f32) = (0.043, 0.019);

/// Factor of a clamped activation's sigmoid. Gates and values of these models reach [`LIMIT`].
pub const ALPHA: f32 = 1.702;
pub const LIMIT: f32 = 0.75;

pub const GROWTH: QueryScaling = QueryScaling { beta: 0.6, length: 6, offset: 0, unrotated: false };

pub const QWEN3: Kind = Kind {
    qk_norm: true,
    qkv_bias: false,
    other_bias: false,
    tied: true,
    split: false,
    bf16: false,
    bf16_rows: false,
    int8_rows: false,
    prompt_tiles: false,
    code_bits: 0,
    scaled: false,
    before: true,
    behind: false,
    whole: false,
    gelu: false,
    window: 0,
    all_windows: false,
    experts: 0,
    normalized: false,
    expert_bias: false,
    clamped: false,
    sinks: false,
    grows: false,
    llama4: false,
    fraction: 0,
};
const LLAMA: Kind = Kind { qk_norm: false, ..QWEN3 };
pub const LLAMA3: Kind = Kind { split: true, scaled: true, ..LLAMA };
pub const LLAMA_BIAS: Kind = Kind { qkv_bias: true, other_bias: true, tied: false, split: true, ..LLAMA };
pub const QWEN2: Kind = Kind { qkv_bias: true, ..LLAMA };
pub const MISTRAL: Kind = Kind { tied: false, split: true, ..LLAMA };
pub const MINISTRAL3: Kind = Kind { grows: true, ..MISTRAL };
pub const WINDOWED: Kind = Kind { window: 7, all_windows: true, ..MISTRAL };
pub const OLMO2: Kind = Kind { whole: true, before: false, behind: true, ..QWEN3 };
pub const GEMMA3: Kind = Kind { behind: true, gelu: true, window: 5, ..QWEN3 };
pub const KINDS: [Kind; 9] = [QWEN3, LLAMA3, LLAMA_BIAS, QWEN2, MISTRAL, MINISTRAL3, WINDOWED, OLMO2, GEMMA3];
pub const EXPERTS: Kind = Kind { experts: 5, ..QWEN3 };
pub const MIXTRAL: Kind = Kind { experts: 9, normalized: true, window: 9, all_windows: true, ..MISTRAL };
pub const AROUND_EXPERTS: Kind = Kind { experts: 3, ..GEMMA3 };
/// Options of gpt-oss. In these tests the first layer has an MLP with the same activation instead of experts.
pub const GPT_OSS: Kind = Kind {
    qkv_bias: true,
    other_bias: true,
    tied: false,
    window: 6,
    experts: 6,
    normalized: true,
    expert_bias: true,
    clamped: true,
    sinks: true,
    ..LLAMA
};
pub const LLAMA4: Kind = Kind { window: 6, experts: 5, grows: true, llama4: true, ..MISTRAL };
pub const QUANTIZED: [Kind; 2] = [Kind { fraction: 3, ..GEMMA3 }, Kind { fraction: 2, ..LLAMA_BIAS }];
pub const MIXTURES: [Kind; 5] = [EXPERTS, MIXTRAL, AROUND_EXPERTS, GPT_OSS, LLAMA4];

pub struct LayerNumbers {
    pub input_norm: Vec<f32>,
    pub q: Dense,
    pub k: Dense,
    pub v: Dense,
    pub q_norm: Vec<f32>,
    pub k_norm: Vec<f32>,
    pub o: Dense,
    pub output_norm: Vec<f32>,
    pub mlp_output_norm: Vec<f32>,
    pub post_norm: Vec<f32>,
    pub gate: Dense,
    pub up: Dense,
    pub down: Dense,
    /// Router of the experts; `None` if the layer has the MLP above.
    pub router: Option<Dense>,
    /// Gate, up and down of each expert.
    pub experts: Vec<[Dense; 3]>,
    pub sinks: Vec<f32>,
}

pub struct Model {
    pub shape: ModelShape,
    pub kind: Kind,
    pub embedding: Vec<f32>,
    pub layers: Vec<LayerNumbers>,
    pub final_norm: Vec<f32>,
    pub lm_head: Dense,
    pub frequencies: Vec<f32>,
}

fn draw(n: &mut Numbers, len: usize, scale: f32, offset: f32, bf16: bool) -> Vec<f32> {
    let number = |n: &mut Numbers| {
        let x = n.unit() * scale + offset;
        if bf16 { Bf16::from_f32(x).to_f32() } else { x }
    };
    (0..len).map(|_| number(n)).collect()
}

impl Model {
    pub fn random(shape: ModelShape, num_layers: usize, kind: Kind, seed: u64) -> Self {
        let n = &mut Numbers(seed);
        let (hidden, dim, bf16) = (shape.hidden_size, shape.head_dim, kind.bf16);
        let dense = |n: &mut Numbers, outputs: usize, inputs: usize, bias: bool| {
            let mut weight = draw(n, outputs * inputs, 1.7 / (inputs as f32).sqrt(), 0.0, bf16);
            let stored = (kind.code_bits != 0).then(|| {
                let group = if kind.code_bits == 4 { group_of(inputs) } else { inputs };
                let values = Values::F32(Memory::from_vec(weight.clone()));
                Stored::new(&values, inputs, kind.code_bits, group, 2)
            });
            if let Some(stored) = &stored {
                weight = stored.codes().into_iter().map(|(q, s)| q as f32 * s).collect();
            }
            Dense { weight, bias: bias.then(|| draw(n, outputs, 0.5, 0.0, bf16)), inputs, stored, added: None }
        };
        // Other than an MLP's, so that no buffer is of both.
        let expert_size = if kind.code_bits != 0 || kind.bf16_rows { 32 } else { shape.intermediate_size / 2 + 1 };
        let layer = |n: &mut Numbers, sparse: bool| LayerNumbers {
            input_norm: draw(n, hidden, 0.3, 1.0, bf16),
            q: dense(n, shape.num_heads * dim, hidden, kind.qkv_bias),
            k: dense(n, shape.num_kv_heads * dim, hidden, kind.qkv_bias),
            v: dense(n, shape.num_kv_heads * dim, hidden, kind.qkv_bias),
            q_norm: draw(n, if kind.whole { shape.num_heads * dim } else { dim }, 0.5, 1.0, bf16),
            k_norm: draw(n, if kind.whole { shape.num_kv_heads * dim } else { dim }, 0.5, 1.0, bf16),
            o: dense(n, hidden, shape.num_heads * dim, kind.other_bias),
            output_norm: if kind.behind { draw(n, hidden, 0.3, 1.0, bf16) } else { Vec::new() },
            mlp_output_norm: if kind.behind { draw(n, hidden, 0.3, 1.0, bf16) } else { Vec::new() },
            post_norm: draw(n, hidden, 0.3, 1.0, bf16),
            gate: dense(n, shape.intermediate_size, hidden, kind.other_bias),
            up: dense(n, shape.intermediate_size, hidden, kind.other_bias),
            down: dense(n, hidden, shape.intermediate_size, kind.other_bias),
            router: sparse.then(|| Dense {
                weight: draw(n, kind.experts * hidden, 1.7 / (hidden as f32).sqrt(), 0.0, bf16),
                bias: kind.expert_bias.then(|| draw(n, kind.experts, 0.5, 0.0, bf16)),
                inputs: hidden,
                stored: None,
                added: None,
            }),
            experts: (0..if sparse { kind.experts } else { 0 })
                .map(|_| {
                    let [gate, up] = std::array::from_fn(|_| dense(n, expert_size, hidden, kind.expert_bias));
                    [gate, up, dense(n, hidden, expert_size, kind.expert_bias)]
                })
                .collect(),
            sinks: if kind.sinks { draw(n, shape.num_heads, 2.0, 0.5, bf16) } else { Vec::new() },
        };
        let layers = (0..num_layers).map(|i| layer(n, kind.experts > 0 && (i > 0 || num_layers == 1))).collect();
        let embedding = draw(n, shape.vocab_size * hidden, 1.0, 0.0, bf16);
        let lm_head = match kind.tied {
            true => Dense { weight: embedding.clone(), bias: None, inputs: hidden, stored: None, added: None },
            false => Dense {
                weight: draw(n, shape.vocab_size * hidden, 1.7 / (hidden as f32).sqrt(), 0.0, bf16),
                bias: None,
                inputs: hidden,
                stored: None,
                added: None,
            },
        };
        let final_norm = draw(n, hidden, 0.3, 1.0, bf16);
        Self { shape, kind, embedding, layers, final_norm, lm_head, frequencies: frequencies(dim, kind.scaled) }
    }

    /// Returns the crate's weights of this model.
    pub fn weights(&self) -> Arc<Weights> {
        let values = |x: &[f32]| -> Values {
            match self.kind.bf16 {
                true => Values::Bf16(Memory::from_vec(x.iter().map(|&x| Bf16::from_f32(x)).collect())),
                false => Values::F32(Memory::from_vec(x.to_vec())),
            }
        };
        let linear = |parts: &[&Dense]| {
            let inputs = parts[0].inputs;
            let part = |weight: &[f32], stored: Option<Stored>, bias: Option<&[f32]>| {
                let bias = bias.map(values);
                match stored {
                    Some(stored) => Part::new(stored.weight(), bias.as_ref(), weight.len() / inputs),
                    None => Part::new(values(weight), bias.as_ref(), weight.len() / inputs),
                }
            };
            let parts = match self.kind.split {
                true => parts.iter().map(|p| part(&p.weight, p.stored.clone(), p.bias.as_deref())).collect(),
                false => {
                    let weight: Vec<f32> = parts.iter().flat_map(|p| p.weight.clone()).collect();
                    let bias: Vec<f32> = parts.iter().filter_map(|p| p.bias.clone()).flatten().collect();
                    let stored: Option<Vec<Stored>> = parts.iter().map(|p| p.stored.clone()).collect();
                    vec![part(&weight, stored.map(Stored::join), (!bias.is_empty()).then_some(&bias))]
                }
            };
            Linear::new("test", inputs, parts).unwrap()
        };
        let layer = |l: &LayerNumbers| LayerWeights {
            varied: specrs_cpu::VariedLayer::default(),
            output_gate: false,
            state: None,
            input_norm: self.kind.before.then(|| values(&l.input_norm)),
            qkv: linear(&[&l.q, &l.k, &l.v]),
            qk_norm: self.kind.qk_norm.then(|| QkNorm {
                q: values(&l.q_norm),
                k: values(&l.k_norm),
                whole: self.kind.whole,
            }),
            sinks: self.kind.sinks.then(|| values(&l.sinks)),
            o: linear(&[&l.o]),
            attention_output_norm: self.kind.behind.then(|| values(&l.output_norm)),
            post_attention_norm: self.kind.before.then(|| values(&l.post_norm)),
            mlp: match &l.router {
                None => Mlp::Dense { gate_up: linear(&[&l.gate, &l.up]), down: linear(&[&l.down]) },
                Some(router) => Mlp::Experts(Box::new(Experts {
                    router: linear(&[router]),
                    experts: l.experts.iter().map(|[gate, up, down]| (linear(&[gate, up]), linear(&[down]))).collect(),
                    per_token: 2,
                    normalized: self.kind.normalized,
                    sigmoids: self.kind.llama4,
                    bias: None,
                    factor: 1.0,
                    weighs_input: self.kind.llama4,
                    shared: None,
                    scales: None,
                    mlp: None,
                })),
            },
            mlp_output_norm: self.kind.behind.then(|| values(&l.mlp_output_norm)),
        };
        let layers = self.layers.iter().map(layer).collect();
        let weights = Weights::new(DecoderWeights {
            shape: self.shape,
            embedding: values(&self.embedding).into(),
            layers,
            final_norm: values(&self.final_norm),
            lm_head: linear(&[&self.lm_head]),
            frequencies: self.frequencies.clone(),
        });
        let windows: Vec<Option<usize>> = (0..self.layers.len()).map(|i| self.window(i)).collect();
        let activation = match self.kind {
            Kind { clamped: true, .. } => Activation::ClampedSwiglu { alpha: ALPHA, limit: LIMIT },
            Kind { gelu: true, .. } => Activation::GeluTanh,
            _ => Activation::Silu,
        };
        let weights = weights.and_then(|weights| weights.with_activation(activation));
        let weights = weights.and_then(|weights| weights.with_windows(&windows));
        let weights = match self.kind.grows {
            true => weights.and_then(|weights| weights.with_query_scaling(self.growth())),
            false => weights,
        };
        let weights = match self.kind.llama4 {
            true => weights.and_then(|weights| {
                let rotations = vec![Rotation { frequencies: self.frequencies.clone(), magnitude: 1.0 }];
                let layers: Vec<_> = (0..self.layers.len()).map(|i| self.is_rotated(i).then_some(0)).collect();
                weights.with_chunks().with_interleaved_rope().with_rotations(rotations, &layers)
            }),
            false => weights,
        };
        Arc::new(weights.and_then(|weights| weights.with_kv_scales(&vec![KV_SCALES; windows.len()])).unwrap())
    }

    /// Adds an adapter of some projections, of ranks from 1 to 40, in the type of the norms.
    #[must_use]
    pub fn adapted(mut self, seed: u64) -> Self {
        let (n, bf16) = (&mut Numbers(seed), self.kind.bf16);
        for layer in &mut self.layers {
            let mut dense = vec![&mut layer.q, &mut layer.k, &mut layer.v, &mut layer.o];
            if layer.router.is_none() {
                dense.extend([&mut layer.gate, &mut layer.up, &mut layer.down]);
            }
            dense.extend(layer.experts.as_flattened_mut());
            for dense in dense {
                let (inputs, outputs, rank) = (dense.inputs, dense.weight.len() / dense.inputs, 1 + n.below(40));
                if n.below(4) > 0 {
                    let a = draw(n, rank * inputs, 1.7 / (inputs as f32).sqrt(), 0.0, bf16);
                    let b = draw(n, outputs * rank, 1.0 / (rank as f32).sqrt(), 0.0, bf16);
                    dense.added = Some(LowRank { a, b, rank });
                }
            }
        }
        self
    }

    /// Returns the model's adapter as a `Lora` of the crate.
    pub fn lora(&self, weights: &Weights) -> Arc<Lora> {
        let values = |x: &[f32]| -> Values {
            match self.kind.bf16 {
                true => Values::Bf16(Memory::from_vec(x.iter().map(|&x| Bf16::from_f32(x)).collect())),
                false => Values::F32(Memory::from_vec(x.to_vec())),
            }
        };
        let parts = |above: &[&Dense]| {
            let (mut first, mut parts) = (0, Vec::new());
            for dense in above {
                if let Some(LowRank { a, b, rank }) = &dense.added {
                    parts.push(LoraPart::new("test", values(a), values(b), *rank, first).unwrap());
                }
                first += dense.weight.len() / dense.inputs;
            }
            parts
        };
        let expert = |[gate, up, down]: &[Dense; 3]| ExpertLora { gate_up: parts(&[gate, up]), down: parts(&[down]) };
        let layer = |l: &LayerNumbers| LoraLayer {
            qkv: parts(&[&l.q, &l.k, &l.v]),
            o: parts(&[&l.o]),
            gate_up: parts(&[&l.gate, &l.up]),
            down: parts(&[&l.down]),
            experts: l.experts.iter().map(expert).collect(),
        };
        Arc::new(Lora::new(weights, self.layers.iter().map(layer).collect()).unwrap())
    }

    /// Returns how queries grow.
    pub fn growth(&self) -> QueryScaling {
        let llama4 = self.kind.llama4;
        QueryScaling { offset: u32::from(llama4), unrotated: llama4, ..GROWTH }
    }

    /// Returns whether a layer rotates queries and keys.
    pub fn is_rotated(&self, layer: usize) -> bool {
        !self.kind.llama4 || layer + 1 < self.layers.len()
    }

    /// Returns the window of a layer.
    pub fn window(&self, layer: usize) -> Option<usize> {
        let slides = self.kind.all_windows || layer + 1 < self.layers.len();
        (self.kind.window > 0 && slides).then_some(self.kind.window)
    }

    /// Returns a decoder of the model's weights. It rounds rows and uses prompt tiles if the model's `kind` says so.
    pub fn decoder(&self, isa: Isa, threads: usize) -> Decoder {
        let decoder = Decoder::with_isa(self.weights(), Arc::new(Pool::new(threads).unwrap()), isa);
        let rounding = if self.kind.int8_rows { Rounding::Int8 } else { Rounding::Int16 };
        let decoder = decoder.with_rounding(rounding);
        let decoder = if self.kind.bf16_rows { decoder.with_bf16_rows().unwrap() } else { decoder };
        let tiles = Tiles::detect().filter(|_| isa.name() != "portable").unwrap_or(Tiles::portable());
        if self.kind.prompt_tiles { decoder.with_prompt_tiles(tiles) } else { decoder }
    }

    pub fn kv_cache(&self, num_blocks: usize, block_size: usize) -> KvCache {
        let shape =
            KvShape { num_blocks, block_size, num_kv_heads: self.shape.num_kv_heads, head_dim: self.shape.head_dim };
        let codes = |_| match self.kind.fraction {
            3 => ValuesMut::E4m3(MemoryMut::from_vec(vec![E4m3(0); shape.layer_len()])),
            _ => ValuesMut::E5m2(MemoryMut::from_vec(vec![E5m2(0); shape.layer_len()])),
        };
        match self.kind.fraction {
            0 => KvCache::allocate(shape, self.layers.len(), self.kind.bf16).unwrap(),
            _ => KvCache::new(shape, (0..self.layers.len()).map(codes).collect()).unwrap(),
        }
    }
}

/// Returns frequencies of theta = 10,000; with `scaled` Llama 3.1's scaling of factor 8 for an original length of 64.
pub fn frequencies(dim: usize, scaled: bool) -> Vec<f32> {
    let scale = |f: f64| {
        let (length, low, high, factor) = (64.0, 1.0, 4.0, 8.0);
        let wavelength = 2.0 * std::f64::consts::PI / f;
        if !scaled || wavelength < length / high {
            return f;
        }
        if wavelength > length / low {
            return f / factor;
        }
        let s = (length / wavelength - low) / (high - low);
        (1.0 - s) * f / factor + s * f
    };
    (0..dim / 2).map(|i| scale(10_000_f64.powf(-2.0 * i as f64 / dim as f64)) as f32).collect()
}

impl std::fmt::Debug for Model {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:?} {:?} {} layers", self.shape, self.kind, self.layers.len())
    }
}
