//! One layer of a decoder: its weights, and what their shapes must be. Computes nothing.

use crate::error::{Error, Result, check_len};
use crate::linear::Linear;
use crate::weights::{ModelShape, Values};

/// What the MLP applies to its gate.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum Activation {
    /// `x / (1 + e^-x)`
    #[default]
    Silu,
    /// GELU, by its approximation with tanh.
    GeluTanh,
    /// `x / (1 + e^(-alpha x))` of a gate of at most `limit`, times 1 more than the value, from -limit to limit (`OpenAI` 2025,
    /// gpt-oss).
    ClampedSwiglu {
        /// Of the sigmoid's argument.
        alpha: f32,
        /// Of gates and values.
        limit: f32,
    },
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

/// What a layer does behind its attention.
pub enum Mlp {
    /// The same for all rows.
    Dense {
        /// `hidden -> 2 intermediate`: gate, then up.
        gate_up: Linear,
        /// `intermediate -> hidden`
        down: Linear,
    },
    /// One of several for each row.
    Experts(Experts),
}

/// A mixture of experts: each row is sent to those of its largest router logits, whose results are added by weight.
///
/// The weights are the softmax of the router's logits over all experts (Fedus et al. 2021, eq. 1).
pub struct Experts {
    /// `hidden -> experts`; its rows are never rounded.
    pub router: Linear,
    /// Of each expert `hidden -> 2 intermediate`, gate, then up, and `intermediate -> hidden`.
    pub experts: Vec<(Linear, Linear)>,
    /// Experts of a row.
    pub per_token: usize,
    /// Weights of a row's experts are divided by their sum.
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

/// One layer as it is handed over; norms are copied, projections are not.
pub struct LayerWeights {
    /// `[hidden]`, of what attention is fed; none: it is fed the residual stream as it is.
    pub input_norm: Option<Values>,
    /// `hidden -> (heads + 2 kv_heads) head_dim`: all q heads, then all k heads, then all v heads.
    pub qkv: Linear,
    /// Of queries and keys.
    pub qk_norm: Option<QkNorm>,
    /// `[heads]`, of each query head a score more, of no position and with a value of zero.
    pub sinks: Option<Values>,
    /// `heads head_dim -> hidden`
    pub o: Linear,
    /// `[hidden]`, of what attention adds to the residual stream.
    pub attention_output_norm: Option<Values>,
    /// `[hidden]`, of what the MLP is fed, like `input_norm`.
    pub post_attention_norm: Option<Values>,
    /// The MLP, or experts.
    pub mlp: Mlp,
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
    pub(crate) sinks: Option<Vec<f32>>,
    pub(crate) o: Linear,
    pub(crate) attention_output_norm: Option<Vec<f32>>,
    pub(crate) post_attention_norm: Option<Vec<f32>>,
    pub(crate) mlp: Mlp,
    pub(crate) mlp_output_norm: Option<Vec<f32>>,
    /// Which rotation; none: queries and keys stay as they are.
    pub(crate) rotation: Option<usize>,
    /// The last positions that a row sees; `usize::MAX`: all.
    pub(crate) window: usize,
    /// Of K and V where they are cached as codes.
    pub(crate) kv_scales: (f32, f32),
}

impl Layer {
    /// All projections of layer `i` by name, but routers.
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
