//! Layer of a decoder: its weights, and the checks of their shapes. Computes nothing.

use crate::error::{Error, Result, check_len};
use crate::linear::Linear;
use crate::shape::ModelShape;
use crate::values::Values;

/// Activation function that the MLP applies to its gate.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum Activation {
    /// `SiLU`: `x / (1 + e^-x)`
    #[default]
    Silu,
    /// GELU, in its approximation with tanh.
    GeluTanh,
    /// Clamped `SwiGLU` (`OpenAI` 2025, gpt-oss): `x / (1 + e^(-alpha x))` of a gate x of at most `limit`, times 1 plus
    /// the value, which is clamped to -limit to limit.
    ClampedSwiglu {
        /// Factor of the sigmoid's argument.
        alpha: f32,
        /// Limit of gates and values.
        limit: f32,
    },
}

/// Norms of queries and keys before `RoPE`.
pub struct QkNorm {
    /// Weight of the query norm: `[head_dim]` for each head, or with `whole` `[heads head_dim]`.
    pub q: Values,
    /// Weight of the key norm: `[head_dim]` for each key head, or with `whole` `[kv_heads head_dim]`.
    pub k: Values,
    /// Whether all query heads are normed as one, and all key heads as one.
    pub whole: bool,
}

/// MLP or experts of a layer, after its attention.
pub enum Mlp {
    /// One MLP for all rows.
    Dense {
        /// Projection `hidden -> 2 intermediate`: gate, then up.
        gate_up: Linear,
        /// Projection `intermediate -> hidden`.
        down: Linear,
    },
    /// Experts, of which each row uses several.
    Experts(Experts),
}

/// Mixture of experts: each row is sent to the experts with its largest router logits, whose outputs are added by
/// weight.
///
/// The weights are the softmax of the router's logits over all experts (Fedus et al. 2021, eq. 1).
pub struct Experts {
    /// Projection `hidden -> experts`; its rows are never rounded.
    pub router: Linear,
    /// Two projections per expert: `hidden -> 2 intermediate`, gate, then up, and `intermediate -> hidden`.
    pub experts: Vec<(Linear, Linear)>,
    /// Number of experts per row.
    pub per_token: usize,
    /// Whether the weights of a row's experts are divided by their sum.
    pub normalized: bool,
}

/// Sizes that all layers with experts have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ExpertSizes {
    pub(crate) count: usize,
    pub(crate) per_token: usize,
    pub(crate) intermediate: usize,
}

impl Experts {
    pub(crate) fn sizes(&self) -> ExpertSizes {
        let intermediate = self.experts.first().map_or(0, |expert| expert.1.inputs);
        ExpertSizes { count: self.experts.len(), per_token: self.per_token, intermediate }
    }

    fn check(&self, name: &str, hidden: usize) -> Result<()> {
        let sizes = self.sizes();
        if !(1..=sizes.count).contains(&self.per_token) {
            let allowed = format!("1 to the number of experts = {}", sizes.count);
            return Err(Error::invalid(format!("{name}.per_token"), self.per_token, allowed));
        }
        self.router.check(&format!("{name}.router"), sizes.count, hidden)?;
        for (i, (gate_up, down)) in self.experts.iter().enumerate() {
            gate_up.check(&format!("{name}.gate_up[{i}]"), 2 * sizes.intermediate, hidden)?;
            down.check(&format!("{name}.down[{i}]"), hidden, sizes.intermediate)?;
        }
        Ok(())
    }
}

/// Weights of one layer as a caller passes them; norms are copied, projections are not.
pub struct LayerWeights {
    /// Weight of the norm before attention, `[hidden]`; `None` if attention is fed the residual stream without a norm.
    pub input_norm: Option<Values>,
    /// Projection `hidden -> (heads + 2 kv_heads) head_dim`: all q heads, then all k heads, then all v heads.
    pub qkv: Linear,
    /// Norms of queries and keys, if the model has them.
    pub qk_norm: Option<QkNorm>,
    /// Attention sinks, `[heads]`: an additional score of each query head, with no position and a value of zero.
    pub sinks: Option<Values>,
    /// Output projection of attention, `heads head_dim -> hidden`.
    pub o: Linear,
    /// Weight of the norm of the attention output before it is added to the residual stream, `[hidden]`.
    pub attention_output_norm: Option<Values>,
    /// Weight of the norm before the MLP, `[hidden]`; `None` if the MLP is fed the residual stream without a norm.
    pub post_attention_norm: Option<Values>,
    /// The MLP, or experts.
    pub mlp: Mlp,
    /// Weight of the norm of the MLP output before it is added to the residual stream, `[hidden]`.
    pub mlp_output_norm: Option<Values>,
}

/// Weights of one layer as passes read them.
pub(crate) struct Layer {
    pub(crate) input_norm: Option<Vec<f32>>,
    pub(crate) qkv: Linear,
    pub(crate) qk_norm: Option<(Vec<f32>, Vec<f32>)>,
    /// Whether `qk_norm` norms all heads as one.
    pub(crate) qk_norm_whole: bool,
    pub(crate) sinks: Option<Vec<f32>>,
    pub(crate) o: Linear,
    pub(crate) attention_output_norm: Option<Vec<f32>>,
    pub(crate) post_attention_norm: Option<Vec<f32>>,
    pub(crate) mlp: Mlp,
    pub(crate) mlp_output_norm: Option<Vec<f32>>,
    /// Index of the layer's rotation; `None` if queries and keys are not rotated.
    pub(crate) rotation: Option<usize>,
    /// Number of last positions that a row attends; `usize::MAX` for all.
    pub(crate) window: usize,
    /// Scales of K and V if the cache is quantized.
    pub(crate) kv_scales: (f32, f32),
}

impl Layer {
    /// Returns all projections of layer `i` by name, except routers.
    pub(crate) fn projections(&self, i: usize) -> Vec<(String, &Linear)> {
        let mut named = vec![("qkv".to_owned(), &self.qkv), ("o".to_owned(), &self.o)];
        match &self.mlp {
            Mlp::Dense { gate_up, down } => {
                named.extend([("gate_up".to_owned(), gate_up), ("down".to_owned(), down)]);
            }
            Mlp::Experts(mixture) => {
                for (expert, (gate_up, down)) in mixture.experts.iter().enumerate() {
                    named.push((format!("experts.gate_up[{expert}]"), gate_up));
                    named.push((format!("experts.down[{expert}]"), down));
                }
            }
        }
        named.into_iter().map(|(name, linear)| (format!("layers[{i}].{name}"), linear)).collect()
    }
}

impl LayerWeights {
    /// Checks the weights of layer `i`, whose projection of q, k and v has `inputs` inputs, and returns the layer.
    pub(crate) fn check(self, shape: &ModelShape, i: usize, inputs: usize) -> Result<Layer> {
        let layer = self;
        let (hidden, intermediate, dim) = (shape.hidden_size, shape.intermediate_size, shape.head_dim);
        let name = |field: &str| format!("layers[{i}].{field}");
        let norm = |field: &str, norm: &Option<Values>| {
            norm.as_ref().map(|norm| check_len(&name(field), norm.len(), hidden).map(|()| norm.to_f32())).transpose()
        };
        layer.qkv.check(&name("qkv"), (shape.num_heads + 2 * shape.num_kv_heads) * dim, inputs)?;
        layer.o.check(&name("o"), hidden, shape.num_heads * dim)?;
        match &layer.mlp {
            Mlp::Dense { gate_up, down } => {
                gate_up.check(&name("gate_up"), 2 * intermediate, hidden)?;
                down.check(&name("down"), hidden, intermediate)?;
            }
            Mlp::Experts(experts) => experts.check(&name("experts"), hidden)?,
        }
        if let Some(QkNorm { q, k, whole }) = &layer.qk_norm {
            let (heads, kv_heads) = if *whole { (shape.num_heads, shape.num_kv_heads) } else { (1, 1) };
            check_len(&name("q_norm"), q.len(), heads * dim)?;
            check_len(&name("k_norm"), k.len(), kv_heads * dim)?;
        }
        if let Some(sinks) = &layer.sinks {
            check_len(&name("sinks"), sinks.len(), shape.num_heads)?;
        }
        Ok(Layer {
            input_norm: norm("input_norm", &layer.input_norm)?,
            qkv: layer.qkv,
            qk_norm_whole: layer.qk_norm.as_ref().is_some_and(|norm| norm.whole),
            qk_norm: layer.qk_norm.map(|norm| (norm.q.to_f32(), norm.k.to_f32())),
            sinks: layer.sinks.as_ref().map(Values::to_f32),
            o: layer.o,
            attention_output_norm: norm("attention_output_norm", &layer.attention_output_norm)?,
            post_attention_norm: norm("post_attention_norm", &layer.post_attention_norm)?,
            mlp: layer.mlp,
            mlp_output_norm: norm("mlp_output_norm", &layer.mlp_output_norm)?,
            rotation: Some(0),
            window: usize::MAX,
            kv_scales: (1.0, 1.0),
        })
    }
}
