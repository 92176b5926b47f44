//! One layer of a decoder: its weights, and what their shapes must be. Computes nothing.

use crate::error::{Result, check_len};
use crate::linear::Linear;
use crate::weights::{ModelShape, Values};

/// What the MLP applies to its gate.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Activation {
    /// `x / (1 + e^-x)`
    #[default]
    Silu,
    /// GELU, by its approximation with tanh.
    GeluTanh,
}

/// The norms of queries and keys before `RoPE`.
pub struct QkNorm {
    /// `[head_dim]`, of each head; with `whole` `[heads head_dim]`.
    pub q: Values,
    /// The same of keys, `[head_dim]` or `[kv_heads head_dim]`.
    pub k: Values,
    /// All query heads are normed as one, and all key heads.
    pub whole: bool,
}

/// One layer as it is handed over; norms are copied, projections are not.
pub struct LayerWeights {
    /// `[hidden]`, of what attention is fed; none: it is fed the residual stream as it is.
    pub input_norm: Option<Values>,
    /// `hidden -> (heads + 2 kv_heads) head_dim`: all q heads, then all k heads, then all v heads.
    pub qkv: Linear,
    /// Of queries and keys.
    pub qk_norm: Option<QkNorm>,
    /// `heads head_dim -> hidden`
    pub o: Linear,
    /// `[hidden]`, of what attention adds to the residual stream.
    pub attention_output_norm: Option<Values>,
    /// `[hidden]`, of what the MLP is fed, like `input_norm`.
    pub post_attention_norm: Option<Values>,
    /// `hidden -> 2 intermediate`: gate, then up.
    pub gate_up: Linear,
    /// `intermediate -> hidden`
    pub down: Linear,
    /// `[hidden]`, of what the MLP adds to the residual stream.
    pub mlp_output_norm: Option<Values>,
}

/// One layer as passes read it.
pub(crate) struct Layer {
    pub(crate) input_norm: Option<Vec<f32>>,
    pub(crate) qkv: Linear,
    pub(crate) qk_norm: Option<(Vec<f32>, Vec<f32>)>,
    /// `qk_norm` is of all heads as one.
    pub(crate) qk_norm_whole: bool,
    pub(crate) o: Linear,
    pub(crate) attention_output_norm: Option<Vec<f32>>,
    pub(crate) post_attention_norm: Option<Vec<f32>>,
    pub(crate) gate_up: Linear,
    pub(crate) down: Linear,
    pub(crate) mlp_output_norm: Option<Vec<f32>>,
    /// Which rotation; none: queries and keys stay as they are.
    pub(crate) rotation: Option<usize>,
    /// The last positions that a row sees; `usize::MAX`: all.
    pub(crate) window: usize,
}

impl Layer {
    /// All projections of layer `i` by name.
    pub(crate) fn projections(&self, i: usize) -> [(String, &Linear); 4] {
        let named = [("qkv", &self.qkv), ("o", &self.o), ("gate_up", &self.gate_up), ("down", &self.down)];
        named.map(|(name, linear)| (format!("layers[{i}].{name}"), linear))
    }
}

impl LayerWeights {
    /// The weights of layer `i`, whose projection of q, k and v has so many inputs.
    pub(crate) fn check(self, shape: &ModelShape, i: usize, inputs: usize) -> Result<Layer> {
        let layer = self;
        let (hidden, intermediate, dim) = (shape.hidden_size, shape.intermediate_size, shape.head_dim);
        let name = |field: &str| format!("layers[{i}].{field}");
        let norm = |field: &str, norm: &Option<Values>| {
            norm.as_ref().map(|norm| check_len(&name(field), norm.len(), hidden).map(|()| norm.to_f32())).transpose()
        };
        layer.qkv.check(&name("qkv"), (shape.num_heads + 2 * shape.num_kv_heads) * dim, inputs)?;
        layer.o.check(&name("o"), hidden, shape.num_heads * dim)?;
        layer.gate_up.check(&name("gate_up"), 2 * intermediate, hidden)?;
        layer.down.check(&name("down"), hidden, intermediate)?;
        if let Some(QkNorm { q, k, whole }) = &layer.qk_norm {
            let (heads, kv_heads) = if *whole { (shape.num_heads, shape.num_kv_heads) } else { (1, 1) };
            check_len(&name("q_norm"), q.len(), heads * dim)?;
            check_len(&name("k_norm"), k.len(), kv_heads * dim)?;
        }
        Ok(Layer {
            input_norm: norm("input_norm", &layer.input_norm)?,
            qkv: layer.qkv,
            qk_norm_whole: layer.qk_norm.as_ref().is_some_and(|norm| norm.whole),
            qk_norm: layer.qk_norm.map(|norm| (norm.q.to_f32(), norm.k.to_f32())),
            o: layer.o,
            attention_output_norm: norm("attention_output_norm", &layer.attention_output_norm)?,
            post_attention_norm: norm("post_attention_norm", &layer.post_attention_norm)?,
            gate_up: layer.gate_up,
            down: layer.down,
            mlp_output_norm: norm("mlp_output_norm", &layer.mlp_output_norm)?,
            rotation: Some(0),
            window: usize::MAX,
        })
    }
}
