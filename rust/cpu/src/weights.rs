//! The weights of a dense decoder, and what their shapes must be. Computes nothing.

use crate::error::{Error, Result, check_len};
use crate::linear::Linear;
use crate::memory::{Bf16, Memory, MemoryMut};

/// Read-only numbers of one of the types that weights have.
pub enum Values {
    /// fp32
    F32(Memory<f32>),
    /// bf16
    Bf16(Memory<Bf16>),
}

impl Values {
    /// Elements.
    pub fn len(&self) -> usize {
        match self {
            Self::F32(memory) => memory.as_slice().len(),
            Self::Bf16(memory) => memory.as_slice().len(),
        }
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Elements from `start` on as f32, into all of `out`.
    pub(crate) fn expand(&self, start: usize, out: &mut [f32]) {
        match self {
            Self::F32(memory) => out.copy_from_slice(&memory.as_slice()[start..][..out.len()]),
            Self::Bf16(memory) => {
                for (out, x) in out.iter_mut().zip(&memory.as_slice()[start..]) {
                    *out = x.to_f32();
                }
            }
        }
    }

    /// All elements as f32: a copy, for the short ones (norms, biases).
    pub(crate) fn to_f32(&self) -> Vec<f32> {
        let mut out = vec![0.0; self.len()];
        self.expand(0, &mut out);
        out
    }
}

/// Numbers that passes write, of one of the types that a KV cache has.
pub enum ValuesMut {
    /// fp32
    F32(MemoryMut<f32>),
    /// bf16
    Bf16(MemoryMut<Bf16>),
}

impl ValuesMut {
    /// Elements.
    pub fn len(&self) -> usize {
        match self {
            Self::F32(memory) => memory.as_slice().len(),
            Self::Bf16(memory) => memory.as_slice().len(),
        }
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// Sizes of a dense decoder, by the names of its config.json.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ModelShape {
    /// Ids that it knows.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Features between gate, up and down.
    pub intermediate_size: usize,
    /// Query heads.
    pub num_heads: usize,
    /// KV heads, a divisor of `num_heads`.
    pub num_kv_heads: usize,
    /// Features of a head, even.
    pub head_dim: usize,
    /// Added to the mean square before its root.
    pub rms_norm_eps: f32,
}

impl ModelShape {
    /// Query heads of a KV head.
    pub fn group(&self) -> usize {
        self.num_heads / self.num_kv_heads
    }

    fn check(&self) -> Result<()> {
        let sizes = [
            ("vocab_size", self.vocab_size),
            ("hidden_size", self.hidden_size),
            ("intermediate_size", self.intermediate_size),
            ("num_heads", self.num_heads),
            ("num_kv_heads", self.num_kv_heads),
            ("head_dim", self.head_dim),
        ];
        for (field, size) in sizes {
            if size == 0 {
                return Err(Error::invalid(field, size, "at least 1"));
            }
        }
        if !self.num_heads.is_multiple_of(self.num_kv_heads) {
            let allowed = format!("a divisor of num_heads = {}", self.num_heads);
            return Err(Error::invalid("num_kv_heads", self.num_kv_heads, allowed));
        }
        if !self.head_dim.is_multiple_of(2) {
            return Err(Error::invalid("head_dim", self.head_dim, "even, because RoPE rotates pairs"));
        }
        if !(self.rms_norm_eps >= 0.0 && self.rms_norm_eps.is_finite()) {
            return Err(Error::invalid("rms_norm_eps", self.rms_norm_eps, "a finite number of at least 0"));
        }
        Ok(())
    }
}

/// One layer as it is handed over; norms are copied, projections are not.
pub struct LayerWeights {
    /// `[hidden]`
    pub input_norm: Values,
    /// `hidden -> (heads + 2 kv_heads) head_dim`: all q heads, then all k heads, then all v heads.
    pub qkv: Linear,
    /// `[head_dim]` each, of queries and keys, before `RoPE`.
    pub qk_norm: Option<(Values, Values)>,
    /// `heads head_dim -> hidden`
    pub o: Linear,
    /// `[hidden]`
    pub post_attention_norm: Values,
    /// `hidden -> 2 intermediate`: gate, then up.
    pub gate_up: Linear,
    /// `intermediate -> hidden`
    pub down: Linear,
}

/// One layer as passes read it.
pub(crate) struct Layer {
    pub(crate) input_norm: Vec<f32>,
    pub(crate) qkv: Linear,
    pub(crate) qk_norm: Option<(Vec<f32>, Vec<f32>)>,
    pub(crate) o: Linear,
    pub(crate) post_attention_norm: Vec<f32>,
    pub(crate) gate_up: Linear,
    pub(crate) down: Linear,
}

/// What a layer has that reads a hidden state beside the token: the layer of an EAGLE-3 head (Li et al. 2025).
pub struct BesideWeights {
    /// `[hidden]`, of the hidden state, as `input_norm` is of the embedding.
    pub hidden_norm: Values,
    /// The residual is the normed hidden state.
    pub norm_before_residual: bool,
}

/// The same as passes read it.
pub(crate) struct Normed {
    pub(crate) hidden_norm: Vec<f32>,
    pub(crate) before_residual: bool,
}

/// All weights of a dense decoder, checked against its shape. Read-only: several decoders may share them.
pub struct Weights {
    pub(crate) shape: ModelShape,
    pub(crate) beside: Option<Normed>,
    pub(crate) embedding: Values,
    pub(crate) layers: Vec<Layer>,
    pub(crate) final_norm: Vec<f32>,
    pub(crate) lm_head: Linear,
    pub(crate) frequencies: Vec<f32>,
}

impl Weights {
    /// `embedding` is `[vocab, hidden]`, `lm_head` hidden -> vocab (of tied embeddings: the same memory),
    /// `frequencies` `[head_dim / 2]` the angle of each pair at position 1, scaling included.
    ///
    /// # Errors
    /// Where a size is impossible or a tensor does not fit the others.
    pub fn new(
        shape: ModelShape,
        embedding: Values,
        layers: Vec<LayerWeights>,
        final_norm: &Values,
        lm_head: Linear,
        frequencies: Vec<f32>,
    ) -> Result<Self> {
        let vocab_size = shape.vocab_size;
        let made = Self::build(shape, embedding, layers, final_norm, lm_head, frequencies, None)?;
        made.lm_head.check("lm_head", vocab_size, shape.hidden_size)?;
        Ok(made)
    }

    /// The weights of an EAGLE-3 head: one layer, whose `qkv` has `2 hidden` inputs, the normed embedding and the normed
    /// hidden state; `lm_head` gives as many ids as it has outputs.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn head(
        shape: ModelShape,
        embedding: Values,
        layer: LayerWeights,
        final_norm: &Values,
        lm_head: Linear,
        frequencies: Vec<f32>,
        beside: &BesideWeights,
    ) -> Result<Self> {
        check_len("hidden_norm", beside.hidden_norm.len(), shape.hidden_size)?;
        lm_head.check("lm_head", lm_head.outputs().max(1), shape.hidden_size)?;
        let normed = Normed { hidden_norm: beside.hidden_norm.to_f32(), before_residual: beside.norm_before_residual };
        Self::build(shape, embedding, vec![layer], final_norm, lm_head, frequencies, Some(normed))
    }

    fn build(
        shape: ModelShape,
        embedding: Values,
        layers: Vec<LayerWeights>,
        final_norm: &Values,
        lm_head: Linear,
        frequencies: Vec<f32>,
        beside: Option<Normed>,
    ) -> Result<Self> {
        shape.check()?;
        let hidden = shape.hidden_size;
        check_len("embedding", embedding.len(), shape.vocab_size * hidden)?;
        check_len("final_norm", final_norm.len(), hidden)?;
        check_len("frequencies", frequencies.len(), shape.head_dim / 2)?;
        let inputs = if beside.is_some() { 2 * hidden } else { hidden };
        let layers = layers
            .into_iter()
            .enumerate()
            .map(|(i, layer)| check_layer(&shape, i, inputs, layer))
            .collect::<Result<_>>()?;
        Ok(Self { shape, beside, embedding, layers, final_norm: final_norm.to_f32(), lm_head, frequencies })
    }

    /// Logits of a row: the vocabulary, or the ids of an EAGLE-3 head.
    pub fn num_ids(&self) -> usize {
        self.lm_head.outputs()
    }

    /// Its sizes.
    pub fn shape(&self) -> &ModelShape {
        &self.shape
    }

    /// Its layers' number.
    pub fn num_layers(&self) -> usize {
        self.layers.len()
    }
}

fn check_layer(shape: &ModelShape, i: usize, inputs: usize, layer: LayerWeights) -> Result<Layer> {
    let (hidden, intermediate, dim) = (shape.hidden_size, shape.intermediate_size, shape.head_dim);
    let name = |field: &str| format!("layers[{i}].{field}");
    check_len(&name("input_norm"), layer.input_norm.len(), hidden)?;
    check_len(&name("post_attention_norm"), layer.post_attention_norm.len(), hidden)?;
    layer.qkv.check(&name("qkv"), (shape.num_heads + 2 * shape.num_kv_heads) * dim, inputs)?;
    layer.o.check(&name("o"), hidden, shape.num_heads * dim)?;
    layer.gate_up.check(&name("gate_up"), 2 * intermediate, hidden)?;
    layer.down.check(&name("down"), hidden, intermediate)?;
    if let Some((q, k)) = &layer.qk_norm {
        check_len(&name("qk_norm.0"), q.len(), dim)?;
        check_len(&name("qk_norm.1"), k.len(), dim)?;
    }
    Ok(Layer {
        input_norm: layer.input_norm.to_f32(),
        qkv: layer.qkv,
        qk_norm: layer.qk_norm.map(|(q, k)| (q.to_f32(), k.to_f32())),
        o: layer.o,
        post_attention_norm: layer.post_attention_norm.to_f32(),
        gate_up: layer.gate_up,
        down: layer.down,
    })
}
