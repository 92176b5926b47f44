//! Layer of a decoder: its weights, and the checks of their shapes. Computes nothing.

use crate::error::{Error, Result, check_len};
use crate::kv_cache::KvLayer;
use crate::linear::Linear;
use crate::shape::ModelShape;
use crate::state_layer::{StateLayer, StateWeights};
use specrs_cpu_kernels::Values;

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
    Experts(Box<Experts>),
}

/// Mixture of experts: each row is sent to the experts with its largest router logits, whose outputs are added by
/// weight.
///
/// The weights are the softmax of the router's logits over all experts (Fedus et al. 2021, eq. 1), or the sigmoids of
/// the chosen logits. With `bias`, the experts with the largest sums of sigmoid and bias are chosen.
pub struct Experts {
    /// Projection `hidden -> experts`; its rows are never rounded.
    pub router: Linear,
    /// Two projections per expert: `hidden -> 2 intermediate`, gate, then up, and `intermediate -> hidden`.
    pub experts: Vec<(Linear, Linear)>,
    /// Number of experts per row.
    pub per_token: usize,
    /// Whether the weights of a row's experts are divided by their sum.
    pub normalized: bool,
    /// Whether weights are sigmoids.
    pub sigmoids: bool,
    /// Numbers added to sigmoids for the choice of experts, and not to weights, `[experts]`; `None` if the largest
    /// logits are chosen.
    pub bias: Option<Values>,
    /// Factor of the weights of all experts.
    pub factor: f32,
    /// Whether weights multiply the experts' inputs in place of their outputs.
    pub weighs_input: bool,
    /// Expert that every row uses in addition; `None` if there is none.
    pub shared: Option<SharedExpert>,
    /// Factors of a router that reads the residual stream; `None` if the router reads the same normed rows as the
    /// experts.
    pub scales: Option<RouterScales>,
    /// MLP that every row uses next to the experts; `None` if there is none.
    pub mlp: Option<ParallelMlp>,
}

/// Factors of a router that reads the residual stream h itself: its input is `norm(h) * hidden / sqrt(size of h)`, and
/// the norm has no weights.
pub struct RouterScales {
    /// Factor of the router's input, `[hidden]`.
    pub hidden: Values,
    /// Factor of the weight of each chosen expert, `[experts]`.
    pub experts: Values,
}

/// MLP of a layer that has experts, too. Both read the residual stream h, and the layer adds
/// `mlp_output_norm(output_norm(mlp(post_attention_norm(h))) + expert_output_norm(experts(expert_input_norm(h))))`.
pub struct ParallelMlp {
    /// Projection `hidden -> 2 intermediate`: gate, then up.
    pub gate_up: Linear,
    /// Projection `intermediate -> hidden`.
    pub down: Linear,
    /// Weight of the norm of the MLP's output, `[hidden]`.
    pub output_norm: Values,
    /// Weight of the norm before the experts, `[hidden]`.
    pub expert_input_norm: Values,
    /// Weight of the norm of the experts' output, `[hidden]`.
    pub expert_output_norm: Values,
}

/// Norms and factors of a layer's experts in the form that passes read.
#[derive(Default)]
pub(crate) struct ExpertVectors {
    /// Weight of the norm before the router, `[hidden]`: the router's factor over the root of its length. Empty without
    /// factors.
    pub(crate) router_norm: Vec<f32>,
    /// Factor of the weight of each chosen expert, `[experts]`.
    pub(crate) scales: Vec<f32>,
    /// Numbers added to sigmoids for the choice of experts, `[experts]`; empty if the largest logits are chosen.
    pub(crate) bias: Vec<f32>,
    /// Norms of an MLP's output, of the experts' input, and of the experts' output; `None` without an MLP.
    pub(crate) norms: Option<[Vec<f32>; 3]>,
}

/// Expert that every row uses.
pub struct SharedExpert {
    /// Projection `hidden -> 1`; its rows are never rounded. The output is multiplied by its sigmoid; `None` if it is
    /// added as it is.
    pub gate: Option<Linear>,
    /// Projection `hidden -> 2 intermediate`: gate, then up.
    pub gate_up: Linear,
    /// Projection `intermediate -> hidden`.
    pub down: Linear,
}

/// Sizes that all layers with experts have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ExpertSizes {
    pub(crate) count: usize,
    pub(crate) per_token: usize,
    pub(crate) intermediate: usize,
    /// Intermediate size of the shared expert; 0 if there is none.
    pub(crate) shared: usize,
}

impl Experts {
    pub(crate) fn sizes(&self) -> ExpertSizes {
        let intermediate = self.experts.first().map_or(0, |expert| expert.1.inputs);
        let shared = self.shared.as_ref().map_or(0, |shared| shared.down.inputs);
        ExpertSizes { count: self.experts.len(), per_token: self.per_token, intermediate, shared }
    }

    /// Checks the shapes of all tensors. `intermediate` is the size of an MLP next to the experts.
    fn check(&self, name: &str, hidden: usize, intermediate: usize) -> Result<ExpertVectors> {
        let sizes = self.sizes();
        if !(1..=sizes.count).contains(&self.per_token) {
            let allowed = format!("from 1 to {}, the number of experts", sizes.count);
            return Err(Error::invalid(format!("{name}.per_token"), self.per_token, allowed));
        }
        self.router.check(&format!("{name}.router"), sizes.count, hidden)?;
        for (i, (gate_up, down)) in self.experts.iter().enumerate() {
            gate_up.check(&format!("{name}.gate_up[{i}]"), 2 * sizes.intermediate, hidden)?;
            down.check(&format!("{name}.down[{i}]"), hidden, sizes.intermediate)?;
        }
        if let Some(SharedExpert { gate, gate_up, down }) = &self.shared {
            if let Some(gate) = gate {
                gate.check(&format!("{name}.shared.gate"), 1, hidden)?;
            }
            gate_up.check(&format!("{name}.shared.gate_up"), 2 * sizes.shared, hidden)?;
            down.check(&format!("{name}.shared.down"), hidden, sizes.shared)?;
        }
        let mut vectors = ExpertVectors { scales: vec![self.factor; sizes.count], ..ExpertVectors::default() };
        if let Some(RouterScales { hidden: router, experts }) = &self.scales {
            check_len(&format!("{name}.scales.hidden"), router.len(), hidden)?;
            check_len(&format!("{name}.scales.experts"), experts.len(), sizes.count)?;
            let root = (hidden as f32).sqrt();
            vectors.router_norm = router.to_f32().into_iter().map(|scale| scale / root).collect();
            vectors.scales.iter_mut().zip(experts.to_f32()).for_each(|(scale, own)| *scale *= own);
        }
        if let Some(bias) = &self.bias {
            if !self.sigmoids {
                return Err(Error::invalid(format!("{name}.bias"), "numbers", "none without sigmoids"));
            }
            check_len(&format!("{name}.bias"), bias.len(), sizes.count)?;
            vectors.bias = bias.to_f32();
        }
        if let Some(ParallelMlp { gate_up, down, output_norm, expert_input_norm, expert_output_norm }) = &self.mlp {
            gate_up.check(&format!("{name}.mlp.gate_up"), 2 * intermediate, hidden)?;
            down.check(&format!("{name}.mlp.down"), hidden, intermediate)?;
            check_len(&format!("{name}.mlp.output_norm"), output_norm.len(), hidden)?;
            check_len(&format!("{name}.mlp.expert_input_norm"), expert_input_norm.len(), hidden)?;
            check_len(&format!("{name}.mlp.expert_output_norm"), expert_output_norm.len(), hidden)?;
            vectors.norms = Some([output_norm, expert_input_norm, expert_output_norm].map(Values::to_f32));
        }
        Ok(vectors)
    }
}

/// Sizes of one layer, in models whose layers differ.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayerSizes {
    /// Number of KV heads, a divisor of the number of query heads.
    pub num_kv_heads: usize,
    /// Number of features in a head, even.
    pub head_dim: usize,
    /// Number of features between gate, up and down.
    pub intermediate_size: usize,
}

/// Weights with which a layer adds its embedding e of the row's token to the residual stream h:
/// `h += norm(projection (act(gate h) * e))`.
pub struct Addition {
    /// Projection `hidden -> size`.
    pub gate: Linear,
    /// Projection `size -> hidden`.
    pub projection: Linear,
    /// Weight of the norm of what is added, `[hidden]`.
    pub norm: Values,
}

/// Properties of a layer that differs from the others of its model (Gemma 4).
pub struct VariedLayer {
    /// Sizes of the layer, none larger than the model's; `None` if they are the model's.
    pub sizes: Option<LayerSizes>,
    /// Whether `qkv` has no v heads: values are the output of the k heads, before their norm and rotation.
    pub keys_are_values: bool,
    /// Earlier layer whose keys and values the layer attends. Then `qkv` has q heads alone.
    pub source: Option<usize>,
    /// Whether each head of values is normed, without a weight.
    pub value_norm: bool,
    /// Embedding that the layer adds for the row's token.
    pub addition: Option<Addition>,
    /// Factor of the layer's output, residual stream included. Other factors than 1 need an `mlp_output_norm`.
    pub scalar: f32,
}

impl Default for VariedLayer {
    fn default() -> Self {
        Self { sizes: None, keys_are_values: false, source: None, value_norm: false, addition: None, scalar: 1.0 }
    }
}

/// Weights of one layer as a caller passes them; norms are copied, projections are not.
pub struct LayerWeights {
    /// Weight of the norm before attention, `[hidden]`; `None` if attention is fed the residual stream without a norm.
    pub input_norm: Option<Values>,
    /// Projection `hidden -> (heads + 2 kv_heads) head_dim`: all q heads, then all k heads, then all v heads. With
    /// `output_gate` each query is followed by its gate. With `state` it is the input projection of what replaces
    /// attention.
    pub qkv: Linear,
    /// Whether the output of attention is multiplied by the sigmoid of a gate.
    pub output_gate: bool,
    /// Delta net or short convolution in the place of attention; `None` if the layer has attention.
    pub state: Option<StateWeights>,
    /// Norms of queries and keys, if the model has them.
    pub qk_norm: Option<QkNorm>,
    /// Attention sinks, `[heads]`: an additional score of each query head, with no position and a value of zero.
    pub sinks: Option<Values>,
    /// Output projection of attention, `heads head_dim -> hidden`, or of what replaces it.
    pub o: Linear,
    /// Weight of the norm of the attention output before it is added to the residual stream, `[hidden]`.
    pub attention_output_norm: Option<Values>,
    /// Weight of the norm before the MLP, `[hidden]`; `None` if the MLP is fed the residual stream without a norm.
    pub post_attention_norm: Option<Values>,
    /// MLP or experts of the layer.
    pub mlp: Mlp,
    /// Weight of the norm of the MLP output before it is added to the residual stream, `[hidden]`.
    pub mlp_output_norm: Option<Values>,
    /// Properties in which the layer differs from other layers.
    pub varied: VariedLayer,
}

/// Weights of one layer as passes read them.
pub(crate) struct Layer {
    pub(crate) input_norm: Option<Vec<f32>>,
    pub(crate) qkv: Linear,
    pub(crate) output_gate: bool,
    pub(crate) state: Option<StateLayer>,
    pub(crate) qk_norm: Option<(Vec<f32>, Vec<f32>)>,
    /// Whether `qk_norm` norms all heads as one.
    pub(crate) qk_norm_whole: bool,
    pub(crate) sinks: Option<Vec<f32>>,
    pub(crate) o: Linear,
    pub(crate) attention_output_norm: Option<Vec<f32>>,
    pub(crate) post_attention_norm: Option<Vec<f32>>,
    pub(crate) mlp: Mlp,
    pub(crate) expert_vectors: ExpertVectors,
    pub(crate) mlp_output_norm: Option<Vec<f32>>,
    /// Index of the layer's rotation; `None` if queries and keys are not rotated.
    pub(crate) rotation: Option<usize>,
    /// Number of last positions that a row attends; `usize::MAX` for all.
    pub(crate) window: usize,
    /// Scales of K and V if the cache is quantized.
    pub(crate) kv_scales: (f32, f32),
    /// Sizes of the model, with those of this layer where layers differ.
    pub(crate) shape: ModelShape,
    /// Index of `shape` among those of the model's layers.
    pub(crate) kind: usize,
    pub(crate) keys_are_values: bool,
    pub(crate) source: Option<usize>,
    /// Index of the layer whose keys and values this layer attends to, counted among the layers that have keys and
    /// values.
    pub(crate) source_place: Option<usize>,
    /// Weight of the norm of values, `[head_dim]` ones; `None` if they are not normed.
    pub(crate) value_norm: Option<Vec<f32>>,
    pub(crate) addition: Option<(Linear, Linear, Vec<f32>)>,
    pub(crate) scalar: f32,
}

impl Layer {
    /// Returns the factor of the residual stream after the MLP or the experts. A layer that adds an embedding is
    /// multiplied by its factor after that.
    pub(crate) fn mlp_scalar(&self) -> f32 {
        if self.addition.is_some() { 1.0 } else { self.scalar }
    }

    /// Returns whether the layer has keys and values of its own.
    pub(crate) fn has_keys(&self) -> bool {
        self.state.is_none() && self.source.is_none()
    }

    /// Returns the place of the layer's keys and values: the next of `with_keys`, the places of layers that have keys,
    /// or that of its source. `None` for a layer without attention.
    pub(crate) fn kv_layer<'a>(
        &self,
        all: &[KvLayer],
        with_keys: &mut impl Iterator<Item = &'a KvLayer>,
    ) -> Option<KvLayer> {
        match self.source {
            Some(_) => self.source_place.map(|place| all[place]),
            None => with_keys.next().copied(),
        }
    }

    /// Returns all projections of layer `i` by name, except routers and gates of shared experts.
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
                if let Some(SharedExpert { gate_up, down, .. }) = &mixture.shared {
                    named.push(("experts.shared.gate_up".to_owned(), gate_up));
                    named.push(("experts.shared.down".to_owned(), down));
                }
                if let Some(ParallelMlp { gate_up, down, .. }) = &mixture.mlp {
                    named.push(("experts.mlp.gate_up".to_owned(), gate_up));
                    named.push(("experts.mlp.down".to_owned(), down));
                }
            }
        }
        if let Some((gate, projection, _)) = &self.addition {
            named.extend([("addition.gate".to_owned(), gate), ("addition.projection".to_owned(), projection)]);
        }
        named.into_iter().map(|(name, linear)| (format!("layers[{i}].{name}"), linear)).collect()
    }
}

impl LayerWeights {
    /// Checks the weights of layer `i`, whose projection of q, k and v has `inputs` inputs, and returns the layer.
    pub(crate) fn check(self, model: &ModelShape, i: usize, inputs: usize) -> Result<Layer> {
        let layer = self;
        let shape = &layer.varied.shape(model, i)?;
        let (hidden, intermediate, dim) = (shape.hidden_size, shape.intermediate_size, shape.head_dim);
        let name = |field: &str| format!("layers[{i}].{field}");
        let norm = |field: &str, norm: &Option<Values>| {
            norm.as_ref().map(|norm| check_len(&name(field), norm.len(), hidden).map(|()| norm.to_f32())).transpose()
        };
        layer.check_varied(model, shape, i)?;
        let state = layer.state.map(|state| state.check(&format!("layers[{i}]"), hidden)).transpose()?;
        let queries = shape.num_heads * (1 + usize::from(layer.output_gate));
        let keys = match &layer.varied {
            VariedLayer { source: Some(_), .. } => 0,
            VariedLayer { keys_are_values: true, .. } => shape.num_kv_heads,
            _ => 2 * shape.num_kv_heads,
        };
        let attention = ((queries + keys) * dim, shape.num_heads * dim);
        let of_state = |state: &StateLayer| (state.shape.outputs(), state.shape.inner());
        let (outputs, inner) = state.as_ref().map_or(attention, of_state);
        layer.qkv.check(&name("qkv"), outputs, inputs)?;
        layer.o.check(&name("o"), hidden, inner)?;
        if layer.output_gate && layer.qk_norm.as_ref().is_some_and(|norm| norm.whole) {
            return Err(Error::invalid(name("output_gate"), true, "false with a norm over all heads"));
        }
        let mut expert_vectors = ExpertVectors::default();
        match &layer.mlp {
            Mlp::Dense { gate_up, down } => {
                gate_up.check(&name("gate_up"), 2 * intermediate, hidden)?;
                down.check(&name("down"), hidden, intermediate)?;
            }
            Mlp::Experts(experts) => {
                expert_vectors = experts.check(&name("experts"), hidden, intermediate)?;
                if experts.shared.is_some() && layer.mlp_output_norm.is_some() {
                    return Err(Error::invalid(name("mlp_output_norm"), "given", "none with a shared expert"));
                }
                if experts.mlp.is_some() && layer.mlp_output_norm.is_none() {
                    return Err(Error::invalid(name("mlp_output_norm"), "none", "one with an MLP next to experts"));
                }
            }
        }
        if let Some(QkNorm { q, k, whole }) = &layer.qk_norm {
            let (heads, kv_heads) = if *whole { (shape.num_heads, shape.num_kv_heads) } else { (1, 1) };
            check_len(&name("q_norm"), q.len(), heads * dim)?;
            check_len(&name("k_norm"), k.len(), kv_heads * dim)?;
        }
        if let Some(sinks) = &layer.sinks {
            check_len(&name("sinks"), sinks.len(), shape.num_heads)?;
        }
        let addition = layer.varied.addition.map(|Addition { gate, projection, norm }| {
            check_len(&name("addition.norm"), norm.len(), hidden)?;
            gate.check(&name("addition.gate"), projection.inputs, hidden)?;
            projection.check(&name("addition.projection"), hidden, projection.inputs)?;
            Ok::<_, Error>((gate, projection, norm.to_f32()))
        });
        Ok(Layer {
            shape: *shape,
            kind: 0,
            keys_are_values: layer.varied.keys_are_values,
            source: layer.varied.source,
            source_place: None,
            value_norm: layer.varied.value_norm.then(|| vec![1.0; dim]),
            addition: addition.transpose()?,
            scalar: layer.varied.scalar,
            input_norm: norm("input_norm", &layer.input_norm)?,
            qkv: layer.qkv,
            output_gate: layer.output_gate,
            state,
            qk_norm_whole: layer.qk_norm.as_ref().is_some_and(|norm| norm.whole),
            qk_norm: layer.qk_norm.map(|norm| (norm.q.to_f32(), norm.k.to_f32())),
            sinks: layer.sinks.as_ref().map(Values::to_f32),
            o: layer.o,
            attention_output_norm: norm("attention_output_norm", &layer.attention_output_norm)?,
            post_attention_norm: norm("post_attention_norm", &layer.post_attention_norm)?,
            mlp: layer.mlp,
            expert_vectors,
            mlp_output_norm: norm("mlp_output_norm", &layer.mlp_output_norm)?,
            rotation: Some(0),
            window: usize::MAX,
            kv_scales: (1.0, 1.0),
        })
    }

    /// Rejects properties of a varied layer that do not go together, or not with others.
    fn check_varied(&self, model: &ModelShape, shape: &ModelShape, i: usize) -> Result<()> {
        let VariedLayer { keys_are_values, source, value_norm, scalar, .. } = self.varied;
        let name = |field: &str| format!("layers[{i}].{field}");
        let varied = *shape != *model || keys_are_values || source.is_some() || value_norm;
        let whole = self.qk_norm.as_ref().is_some_and(|norm| norm.whole);
        if varied && (whole || self.output_gate || self.state.is_some()) {
            let allowed = "none with a norm over all heads, an output gate or a state";
            return Err(Error::invalid(name("varied"), "sizes or keys of its own", allowed));
        }
        let multiplies = scalar.to_bits() != 1.0_f32.to_bits();
        if !scalar.is_finite() || (multiplies && self.mlp_output_norm.is_none()) {
            return Err(Error::invalid(name("scalar"), scalar, "1, or a finite number with an mlp_output_norm"));
        }
        Ok(())
    }
}

impl VariedLayer {
    /// Returns the sizes of the model with those of layer `i`.
    fn shape(&self, model: &ModelShape, i: usize) -> Result<ModelShape> {
        let Some(LayerSizes { num_kv_heads, head_dim, intermediate_size }) = self.sizes else { return Ok(*model) };
        let shape = ModelShape { intermediate_size, num_kv_heads, head_dim, ..*model };
        shape.check()?;
        for (field, given, most) in [
            ("num_kv_heads", num_kv_heads, model.num_kv_heads),
            ("head_dim", head_dim, model.head_dim),
            ("intermediate_size", intermediate_size, model.intermediate_size),
        ] {
            if given > most {
                let allowed = format!("at most the model's {most}");
                return Err(Error::invalid(format!("layers[{i}].{field}"), given, allowed));
            }
        }
        Ok(shape)
    }
}
