//! Weights of a decoder or of a drafting head, and the checks of their shapes. Computes nothing.

use crate::blocks::Packed;
use crate::error::{Error, Result, check_len};
use crate::kernels::{LEAST_WEIGHT, PAIRS};
use crate::layer::{Activation, ExpertSizes, Layer, LayerWeights, Mlp};
use crate::linear::{Linear, Weight};
use crate::memory::Bf16;
use crate::shape::DeltaShape;
use crate::shape::ModelShape;
use crate::values::Values;
use std::sync::Arc;

/// Embeddings `[vocab, hidden]`.
pub enum Embedding {
    /// Embeddings as numbers.
    Values(Values),
    /// Embeddings as blocks of a GGUF type. A tied LM head may share them.
    Packed(Arc<Packed>),
}

impl From<Values> for Embedding {
    fn from(values: Values) -> Self {
        Self::Values(values)
    }
}

impl Embedding {
    fn len(&self) -> usize {
        match self {
            Self::Values(values) => values.len(),
            Self::Packed(packed) => packed.outputs() * packed.inputs(),
        }
    }

    /// Writes the embedding of `token`, fp32, into `out` `[hidden]`.
    pub(crate) fn write(&self, token: usize, out: &mut [f32]) {
        match self {
            Self::Values(values) => values.expand(token * out.len(), out),
            Self::Packed(packed) => packed.row(token, out),
        }
    }
}

/// Rotation of queries and keys in some layers.
#[derive(Clone, Debug, PartialEq)]
pub struct Rotation {
    /// Angle of each pair at position 1, scaling included, `[P]`, with P at most half of `head_dim`. Features after the
    /// first 2 P of a head are not rotated.
    pub frequencies: Vec<f32>,
    /// Factor of cosines and sines.
    pub magnitude: f32,
}

/// Embeddings that layers read in addition, one for each token and layer (per-layer embeddings in Gemma). For the
/// scaled embedding e of a token, layer i's is `(norm(projection e / sqrt(hidden))[i] + table[token][i] * sqrt(size)) /
/// sqrt(2)`.
pub struct LayerEmbedding {
    /// Embeddings, `[ids, layers * size]`, at least as many ids as the vocabulary has.
    pub table: Embedding,
    /// Projection `hidden -> layers * size`.
    pub projection: Linear,
    /// Weight of the norm of each layer's part of the projection, `[size]`.
    pub norm: Values,
}

/// [`LayerEmbedding`] in the form that passes read.
pub(crate) struct Added {
    pub(crate) table: Embedding,
    pub(crate) projection: Linear,
    pub(crate) norm: Vec<f32>,
    /// Number of features for each layer.
    pub(crate) size: usize,
}

/// Constant factors of a pass.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Multipliers {
    /// Factor of embeddings.
    pub embedding: f32,
    /// Factor of the outputs of attention and MLP before they are added to the residual stream.
    pub residual: f32,
    /// Factor of attention scores.
    pub scores: f32,
}

/// Weights of an EAGLE-3 head in addition to its layer (Li et al. 2025), with which it reads the target's hidden
/// states.
pub struct Eagle3Weights {
    /// Layers of the target whose input states the head reads, L of them.
    pub hidden_layers: Vec<usize>,
    /// Projection from L hidden states of the target to one of the head, `L * target's hidden -> hidden`.
    pub fc: Linear,
    /// Weight of the norm before `fc`, `[L * target's hidden]`: one norm over the states of all L layers, or with
    /// `fc_norm_each` one norm for each layer's state.
    pub fc_norm: Option<Values>,
    /// Whether `fc_norm` norms each layer's state by itself, not all of them as one.
    pub fc_norm_each: bool,
    /// Weight of the norm of the hidden state, `[hidden]`; the layer's `input_norm` norms the embedding.
    pub hidden_norm: Values,
    /// Whether the residual is the normed hidden state.
    pub norm_before_residual: bool,
    /// Whether a draft pass is fed the head's state of the previous pass after the final norm, rather than before it.
    pub norm_output: bool,
    /// Target's id of each of the head's ids, ascending.
    pub target_ids: Vec<i64>,
}

/// Weights of an MTP head in addition to its layer, which is a layer of the target's kind. The head reads the target's
/// hidden state after the final norm, and its own state after its final norm.
pub struct MtpWeights {
    /// Number of layers of the target.
    pub target_layers: usize,
    /// Projection `2 hidden -> hidden` of the normed embedding, then the normed hidden state.
    pub fc: Linear,
    /// Weight of the norm of the embedding, `[hidden]`.
    pub embedding_norm: Values,
    /// Weight of the norm of the hidden state, `[hidden]`.
    pub hidden_norm: Values,
    /// Target's id of each of the head's ids, ascending. The LM head's further outputs are not used.
    pub target_ids: Vec<i64>,
}

/// Weights of a head without KV (Gemma 4's assistant), in addition to its layers. The head reads the target's hidden
/// state after the final norm, and its layers attend the target's keys and values. A pass outputs a state of the
/// target's size, which the next pass reads.
pub struct AssistantWeights {
    /// Number of layers of the target.
    pub target_layers: usize,
    /// Projection `2 * target's hidden -> hidden`. Its input is the target's scaled embedding of a token, then the
    /// hidden state.
    pub pre: Linear,
    /// Projection `hidden -> target's hidden`, from the state after the final norm to the state that the next pass
    /// reads.
    pub post: Linear,
    /// Target's id of each of the head's ids, ascending. The LM head's further outputs are not used.
    pub target_ids: Vec<i64>,
}

/// Weights of a head that reads hidden states of a target, in addition to its layer, in the form that passes read.
pub(crate) struct Head {
    /// Target's hidden states that the head reads, as [`Entries`](crate::Entries) numbers them.
    pub(crate) hidden_layers: Vec<usize>,
    /// Number of elements of one hidden state of the target.
    pub(crate) state_size: usize,
    /// Projection of a head's input to its own size; `input` says what it reads.
    pub(crate) fc: Linear,
    /// Projection `hidden -> state_size` from the final state to the state that the next pass reads, for a head that
    /// attends the target's keys and values; `None` for other heads.
    pub(crate) post: Option<Linear>,
    pub(crate) hidden_norm: Vec<f32>,
    /// Whether the next pass reads a pass's state after the final norm, rather than before it.
    pub(crate) norm_output: bool,
    pub(crate) target_ids: Vec<i64>,
    pub(crate) input: HeadInput,
}

/// Input of a head's `fc`, and where the embedding enters.
pub(crate) enum HeadInput {
    /// `fc` combines the target's states before the passes. The layer reads the normed embedding and the normed state.
    Eagle3 {
        fc_norm: Option<Vec<f32>>,
        /// Number of inputs of `fc` that are normed together.
        together: usize,
        before_residual: bool,
    },
    /// `fc` is the first phase of a pass and combines the normed embedding and the normed state.
    Mtp { embedding_norm: Vec<f32> },
    /// `fc` is the first phase of a pass and combines the target's embedding and the state as they are.
    Assistant,
}

impl Head {
    /// Returns whether `fc` is the first phase of a pass, which combines embeddings and states.
    pub(crate) fn combines(&self) -> bool {
        !matches!(self.input, HeadInput::Eagle3 { .. })
    }

    /// Returns whether the head has no keys and values, and its layers attend the target's.
    pub(crate) fn shares_kv(&self) -> bool {
        matches!(self.input, HeadInput::Assistant)
    }
}

fn check_target_ids(ids: &[i64], shape: &ModelShape) -> Result<()> {
    let outside = |&&id: &&i64| usize::try_from(id).map_or(true, |id| id >= shape.vocab_size);
    if let Some(id) = ids.iter().find(outside) {
        return Err(Error::invalid("target_ids", id, format!("from 0 to vocab_size - 1 = {}", shape.vocab_size - 1)));
    }
    if !ids.is_sorted_by(|a, b| a < b) {
        return Err(Error::invalid("target_ids", "ids that do not ascend", "ascending ids"));
    }
    Ok(())
}

/// Rejects the target's ids of a head that uses the first outputs of an LM head with `num_ids` outputs: if there are
/// none, more than outputs, or if one is out of range or they do not ascend.
fn check_first_ids(ids: &[i64], shape: &ModelShape, num_ids: usize) -> Result<()> {
    if !(1..=num_ids).contains(&ids.len()) {
        let given = format!("{} ids", ids.len());
        return Err(Error::invalid("target_ids", given, format!("from 1 to {num_ids}, the LM head's outputs")));
    }
    check_target_ids(ids, shape)
}

impl AssistantWeights {
    fn check(self, shape: &ModelShape, num_ids: usize) -> Result<Head> {
        let state_size = self.post.outputs();
        self.pre.check("pre", shape.hidden_size, 2 * state_size)?;
        self.post.check("post", state_size.max(1), shape.hidden_size)?;
        check_first_ids(&self.target_ids, shape, num_ids)?;
        Ok(Head {
            hidden_layers: vec![self.target_layers + 1],
            state_size,
            fc: self.pre,
            post: Some(self.post),
            hidden_norm: Vec::new(),
            norm_output: false,
            target_ids: self.target_ids,
            input: HeadInput::Assistant,
        })
    }
}

impl MtpWeights {
    fn check(self, shape: &ModelShape, num_ids: usize) -> Result<Head> {
        let hidden = shape.hidden_size;
        self.fc.check("fc", hidden, 2 * hidden)?;
        check_len("embedding_norm", self.embedding_norm.len(), hidden)?;
        check_len("hidden_norm", self.hidden_norm.len(), hidden)?;
        check_first_ids(&self.target_ids, shape, num_ids)?;
        Ok(Head {
            hidden_layers: vec![self.target_layers + 1],
            state_size: hidden,
            fc: self.fc,
            post: None,
            hidden_norm: self.hidden_norm.to_f32(),
            norm_output: true,
            target_ids: self.target_ids,
            input: HeadInput::Mtp { embedding_norm: self.embedding_norm.to_f32() },
        })
    }
}

impl Eagle3Weights {
    fn check(self, shape: &ModelShape, num_ids: usize) -> Result<Head> {
        let (layers, inputs) = (self.hidden_layers.len(), self.fc.inputs);
        check_len("hidden_norm", self.hidden_norm.len(), shape.hidden_size)?;
        self.fc.check("fc", shape.hidden_size, inputs)?;
        if layers == 0 || inputs == 0 || !inputs.is_multiple_of(layers) {
            let allowed = format!("a divisor of the {inputs} inputs of fc");
            return Err(Error::invalid("hidden_layers", format!("{layers} layers"), allowed));
        }
        if let Some(norm) = &self.fc_norm {
            check_len("fc_norm", norm.len(), inputs)?;
        }
        check_len("target_ids", self.target_ids.len(), num_ids)?;
        check_target_ids(&self.target_ids, shape)?;
        Ok(Head {
            hidden_layers: self.hidden_layers,
            state_size: inputs / layers,
            fc: self.fc,
            post: None,
            hidden_norm: self.hidden_norm.to_f32(),
            norm_output: self.norm_output,
            target_ids: self.target_ids,
            input: HeadInput::Eagle3 {
                fc_norm: self.fc_norm.as_ref().map(Values::to_f32),
                together: if self.fc_norm_each { inputs / layers } else { inputs },
                before_residual: self.norm_before_residual,
            },
        })
    }
}

/// All weights of a decoder or of a drafting head, checked against its shape. Read-only: several decoders may share
/// them.
pub struct Weights {
    pub(crate) shape: ModelShape,
    /// Weights of a head that reads hidden states of a target; `None` for other models.
    pub(crate) head: Option<Head>,
    /// Target's id of each logit of a draft model that has logits for some ids only; `None` for other models.
    pub(crate) target_ids: Option<Vec<i64>>,
    pub(crate) embedding: Embedding,
    pub(crate) layers: Vec<Layer>,
    pub(crate) final_norm: Vec<f32>,
    pub(crate) lm_head: Linear,
    pub(crate) rotations: Vec<Rotation>,
    pub(crate) multipliers: Multipliers,
    pub(crate) activation: Activation,
    pub(crate) experts: Option<ExpertSizes>,
    /// Sizes of the delta nets, and the number of layers with one; `None` if all layers have attention.
    pub(crate) delta: Option<(DeltaShape, usize)>,
    /// Distinct sizes of layers.
    pub(crate) kinds: Vec<ModelShape>,
    pub(crate) layer_embedding: Option<Added>,
    /// Number c for which logits x become `c tanh(x / c)`.
    pub(crate) softcap: Option<f32>,
}

impl Weights {
    /// Makes the weights of a decoder: `embedding` is `[vocab, hidden]` and `lm_head` hidden -> vocab (the same memory
    /// for tied embeddings). `frequencies` `[head_dim / 2]` has the angle of each pair at position 1, scaling included.
    ///
    /// # Errors
    /// If a size is impossible or a tensor does not match the others.
    pub fn new(
        shape: ModelShape,
        embedding: impl Into<Embedding>,
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

    /// Makes the weights of a draft model with logits for some ids only, the ascending `target_ids`: `lm_head` is
    /// hidden -> ids. The model is still fed any id of `embedding`.
    ///
    /// # Errors
    /// If a size is impossible or a tensor does not match the others.
    pub fn draft(
        shape: ModelShape,
        embedding: impl Into<Embedding>,
        layers: Vec<LayerWeights>,
        final_norm: &Values,
        lm_head: Linear,
        frequencies: Vec<f32>,
        target_ids: Vec<i64>,
    ) -> Result<Self> {
        lm_head.check("lm_head", target_ids.len().max(1), shape.hidden_size)?;
        check_target_ids(&target_ids, &shape)?;
        let made = Self::build(shape, embedding, layers, final_norm, lm_head, frequencies, None)?;
        Ok(Self { target_ids: Some(target_ids), ..made })
    }

    /// Makes the weights of an EAGLE-3 head. Its one layer has a `qkv` with `2 hidden` inputs: the normed embedding and
    /// the normed hidden state. `lm_head` has one output for each id that the head drafts, in the order of
    /// `eagle3.target_ids`.
    ///
    /// # Errors
    /// If a size is impossible or a tensor does not match the others.
    pub fn head(
        shape: ModelShape,
        embedding: impl Into<Embedding>,
        layer: LayerWeights,
        final_norm: &Values,
        lm_head: Linear,
        frequencies: Vec<f32>,
        eagle3: Eagle3Weights,
    ) -> Result<Self> {
        lm_head.check("lm_head", lm_head.outputs().max(1), shape.hidden_size)?;
        if layer.input_norm.is_none() {
            return Err(Error::invalid("layers[0].input_norm", "none", "the norm of a head's embeddings"));
        }
        let head = eagle3.check(&shape, lm_head.outputs())?;
        Self::build(shape, embedding, vec![layer], final_norm, lm_head, frequencies, Some(head))
    }

    /// Makes the weights of an MTP head. Its one layer has the form of a decoder's layer. `embedding` and `lm_head` are
    /// the target's.
    ///
    /// # Errors
    /// If a size is impossible or a tensor does not match the others.
    pub fn mtp(
        shape: ModelShape,
        embedding: impl Into<Embedding>,
        layer: LayerWeights,
        final_norm: &Values,
        lm_head: Linear,
        frequencies: Vec<f32>,
        mtp: MtpWeights,
    ) -> Result<Self> {
        lm_head.check("lm_head", lm_head.outputs().max(1), shape.hidden_size)?;
        let head = mtp.check(&shape, lm_head.outputs())?;
        Self::build(shape, embedding, vec![layer], final_norm, lm_head, frequencies, Some(head))
    }

    /// Makes the weights of a head that attends the target's keys and values. `embedding` is the target's, whose states
    /// have another size. The `source` of every layer is the index of the target's layer that it attends, counted over
    /// the target's layers that have keys and values. [`forward_head`](crate::Decoder::forward_head) takes the target's
    /// cache.
    ///
    /// # Errors
    /// If a size is impossible or a tensor does not match the others.
    pub fn assistant(
        shape: ModelShape,
        embedding: impl Into<Embedding>,
        layers: Vec<LayerWeights>,
        final_norm: &Values,
        lm_head: Linear,
        frequencies: Vec<f32>,
        assistant: AssistantWeights,
    ) -> Result<Self> {
        lm_head.check("lm_head", lm_head.outputs().max(1), shape.hidden_size)?;
        let head = assistant.check(&shape, lm_head.outputs())?;
        if let Some(i) = layers.iter().position(|layer| layer.varied.source.is_none()) {
            return Err(Error::invalid(format!("layers[{i}].source"), "none", "a layer of the target"));
        }
        Self::build(shape, embedding, layers, final_norm, lm_head, frequencies, Some(head))
    }

    fn build(
        shape: ModelShape,
        embedding: impl Into<Embedding>,
        layers: Vec<LayerWeights>,
        final_norm: &Values,
        lm_head: Linear,
        frequencies: Vec<f32>,
        head: Option<Head>,
    ) -> Result<Self> {
        shape.check()?;
        let hidden = shape.hidden_size;
        let embedding = embedding.into();
        let embedded = head.as_ref().filter(|head| head.shares_kv()).map_or(hidden, |head| head.state_size);
        check_len("embedding", embedding.len(), shape.vocab_size * embedded)?;
        check_len("final_norm", final_norm.len(), hidden)?;
        check_len("frequencies", frequencies.len(), shape.head_dim / 2)?;
        let reads_pairs = head.as_ref().is_some_and(|head| !head.combines());
        let inputs = if reads_pairs { 2 * hidden } else { hidden };
        let mut layers = layers
            .into_iter()
            .enumerate()
            .map(|(i, layer)| layer.check(&shape, i, inputs))
            .collect::<Result<Vec<Layer>>>()?;
        let mut delta: Option<(DeltaShape, usize)> = None;
        for (i, layer) in layers.iter_mut().enumerate() {
            let Some(net) = &mut layer.delta else { continue };
            let (shape, count) = delta.get_or_insert((net.shape, 0));
            if *shape != net.shape || head.is_some() {
                let allowed = if head.is_some() { "none in a head".to_owned() } else { format!("{shape:?}") };
                return Err(Error::invalid(format!("layers[{i}].delta"), format!("{:?}", net.shape), allowed));
            }
            net.index = *count;
            *count += 1;
        }
        let mut experts = None;
        for (i, layer) in layers.iter().enumerate() {
            let Layer { mlp: Mlp::Experts(mixture), .. } = layer else { continue };
            let sizes = mixture.sizes();
            if *experts.get_or_insert(sizes) != sizes {
                let allowed = format!("{experts:?}, as in the layers before");
                return Err(Error::invalid(format!("layers[{i}].experts"), format!("{sizes:?}"), allowed));
            }
        }
        let mut kinds = Vec::new();
        for i in 0..layers.len() {
            let own = layers[i].shape;
            layers[i].kind = kinds.iter().position(|kind| *kind == own).unwrap_or(kinds.len());
            if layers[i].kind == kinds.len() {
                kinds.push(own);
            }
            let Some(source) = layers[i].source else { continue };
            if head.as_ref().is_some_and(Head::shares_kv) {
                layers[i].source_place = Some(source);
                continue;
            }
            let shared = |other: &Layer| {
                let heads = |shape: &ModelShape| (shape.num_kv_heads, shape.head_dim);
                other.source.is_none() && heads(&other.shape) == heads(&own)
            };
            if source >= i || !shared(&layers[source]) {
                let allowed = "an earlier layer with keys and values of the same sizes";
                return Err(Error::invalid(format!("layers[{i}].source"), source, allowed));
            }
            layers[i].source_place = Some(layers[..source].iter().filter(|layer| layer.has_keys()).count());
        }
        if kinds.is_empty() {
            kinds.push(shape);
        }
        let scores = 1.0 / (shape.head_dim as f32).sqrt();
        Ok(Self {
            shape,
            head,
            target_ids: None,
            embedding,
            layers,
            final_norm: final_norm.to_f32(),
            lm_head,
            rotations: vec![Rotation { frequencies, magnitude: 1.0 }],
            multipliers: Multipliers { embedding: 1.0, residual: 1.0, scores },
            activation: Activation::Silu,
            experts,
            delta,
            kinds,
            layer_embedding: None,
            softcap: None,
        })
    }

    /// Sets the rotations of layers that rotate in different ways: `layers` has the index of each layer's rotation, or
    /// `None` for no rotation.
    ///
    /// # Errors
    /// If the number of layers differs, an index is out of range, or a rotation has no or too many pairs, or a
    /// magnitude that is not finite and above 0.
    pub fn with_rotations(mut self, rotations: Vec<Rotation>, layers: &[Option<usize>]) -> Result<Self> {
        check_len("rotations of layers", layers.len(), self.layers.len())?;
        let most = self.shape.head_dim / 2;
        for (i, rotation) in rotations.iter().enumerate() {
            if !(1..=most).contains(&rotation.frequencies.len()) {
                let field = format!("rotations[{i}].frequencies");
                let given = format!("{} elements", rotation.frequencies.len());
                return Err(Error::invalid(field, given, format!("from 1 to head_dim / 2 = {most} elements")));
            }
            check_multiplier(&format!("rotations[{i}].magnitude"), rotation.magnitude)?;
        }
        for (layer, &rotation) in self.layers.iter_mut().zip(layers) {
            if let Some(given) = rotation.filter(|&index| index >= rotations.len()) {
                return Err(Error::invalid("rotation", given, format!("less than {}", rotations.len())));
            }
            let most = layer.shape.head_dim / 2;
            let pairs = rotation.map_or(0, |index| rotations[index].frequencies.len());
            if pairs > most {
                let field = "rotation of a layer".to_owned();
                return Err(Error::invalid(field, format!("{pairs} pairs"), format!("at most head_dim / 2 = {most}")));
            }
            layer.rotation = rotation;
        }
        self.rotations = rotations;
        Ok(self)
    }

    /// Sets the windows of layers. `windows` has the number of last positions that each layer attends, including a
    /// row's own, or `None` for all positions. No position before a window is read.
    ///
    /// # Errors
    /// If the number of layers differs, or a window is 0.
    pub fn with_windows(mut self, windows: &[Option<usize>]) -> Result<Self> {
        check_len("windows", windows.len(), self.layers.len())?;
        for (i, (layer, window)) in self.layers.iter_mut().zip(windows).enumerate() {
            if *window == Some(0) {
                return Err(Error::invalid(format!("windows[{i}]"), 0, "at least 1"));
            }
            layer.window = window.unwrap_or(usize::MAX);
        }
        Ok(self)
    }

    /// Sets the activation of the MLP. The default is `SiLU`.
    ///
    /// # Errors
    /// If a number of the activation is not finite and above 0.
    pub fn with_activation(self, activation: Activation) -> Result<Self> {
        if let Activation::ClampedSwiglu { alpha, limit } = activation {
            check_multiplier("activation's alpha", alpha)?;
            check_multiplier("activation's limit", limit)?;
        }
        Ok(Self { activation, ..self })
    }

    /// Sets the scales of a quantized KV cache, for each layer those of its keys and values. A code is a number divided
    /// by its scale. The default is 1; caches that are not quantized ignore the scales.
    ///
    /// # Errors
    /// If the number of layers differs, or a scale is not finite and above 0.
    pub fn with_kv_scales(mut self, scales: &[(f32, f32)]) -> Result<Self> {
        check_len("kv_scales", scales.len(), self.layers.len())?;
        for (i, (layer, &(k, v))) in self.layers.iter_mut().zip(scales).enumerate() {
            check_multiplier(&format!("kv_scales[{i}] of K"), k)?;
            check_multiplier(&format!("kv_scales[{i}] of V"), v)?;
            layer.kv_scales = (k, v);
        }
        Ok(self)
    }

    /// Sets the per-layer embeddings. Every layer must have an [`Addition`](crate::Addition) of their size.
    ///
    /// # Errors
    /// If a tensor does not match the others.
    pub fn with_layer_embedding(mut self, given: LayerEmbedding) -> Result<Self> {
        let LayerEmbedding { table, projection, norm } = given;
        let (size, layers) = (norm.len(), self.layers.len());
        let width = (size * layers).max(1);
        projection.check("layer_embedding.projection", size * layers, self.shape.hidden_size)?;
        if size == 0 || !table.len().is_multiple_of(width) || table.len() / width < self.shape.vocab_size {
            let allowed = format!("of shape [at least {}, {width}]", self.shape.vocab_size);
            return Err(Error::invalid("layer_embedding.table", format!("{} elements", table.len()), allowed));
        }
        for (i, layer) in self.layers.iter().enumerate() {
            let given = layer.addition.as_ref().map_or(0, |addition| addition.1.inputs);
            if given != size {
                let field = format!("layers[{i}].addition.projection's inputs");
                return Err(Error::invalid(field, given, format!("the layer embedding's size, {size}")));
            }
        }
        self.layer_embedding = Some(Added { table, projection, norm: norm.to_f32(), size });
        Ok(self)
    }

    /// Sets the number c for which logits x become `c tanh(x / c)`.
    ///
    /// # Errors
    /// If it is not finite and above 0.
    pub fn with_softcap(self, softcap: f32) -> Result<Self> {
        check_multiplier("softcap", softcap)?;
        Ok(Self { softcap: Some(softcap), ..self })
    }

    /// Returns the maximum number of positions that a layer attends; `None` if some layer attends all.
    pub fn sliding_window(&self) -> Option<usize> {
        self.layers.iter().map(|layer| layer.window).max().filter(|&window| window != usize::MAX)
    }

    /// Returns whether the last layer has a window. Then a row's result may be finite although K or V before its window
    /// are not.
    pub(crate) fn ends_in_window(&self) -> bool {
        self.layers.last().is_some_and(|layer| layer.window != usize::MAX)
    }

    /// Sets the multipliers. By default, scores are divided by the root of `head_dim`.
    ///
    /// # Errors
    /// If a multiplier is not finite and above 0.
    pub fn with_multipliers(self, multipliers: Multipliers) -> Result<Self> {
        check_multiplier("embedding multiplier", multipliers.embedding)?;
        check_multiplier("residual multiplier", multipliers.residual)?;
        check_multiplier("scores multiplier", multipliers.scores)?;
        Ok(Self { multipliers, ..self })
    }

    /// Returns the target's hidden states that a head reads, as [`Entries`](crate::Entries) numbers them, and the
    /// number of elements of a state. For other models, returns no states and 0.
    pub fn hidden_layers(&self) -> (&[usize], usize) {
        self.head.as_ref().map_or((&[], 0), |head| (&head.hidden_layers, head.state_size))
    }

    /// Returns the target's id of each logit, ascending, of a head and of a draft model that has logits for some ids
    /// only; `None` for other models.
    pub fn target_ids(&self) -> Option<&[i64]> {
        self.target_ids.as_deref().or_else(|| self.head.as_ref().map(|head| &*head.target_ids))
    }

    /// Returns the number of logits per row: the vocabulary, or the ids that a head or draft model drafts.
    pub fn num_ids(&self) -> usize {
        self.target_ids().map_or(self.lm_head.outputs(), <[i64]>::len)
    }

    /// Returns all projections by name, except routers and gates of shared experts.
    pub(crate) fn projections(&self) -> impl Iterator<Item = (String, &Linear)> {
        let fc = self.head.iter().map(|head| ("fc".to_owned(), &head.fc));
        let post = self.head.iter().filter_map(|head| head.post.as_ref().map(|post| ("post".to_owned(), post)));
        let layers = self.layers.iter().enumerate().flat_map(|(i, layer)| layer.projections(i));
        let added =
            self.layer_embedding.iter().map(|added| ("layer_embedding.projection".to_owned(), &added.projection));
        layers.chain(fc).chain(post).chain(added).chain([("lm_head".to_owned(), &self.lm_head)])
    }

    /// Rejects weights that cannot be multiplied as pairs of bf16 numbers.
    pub(crate) fn check_pairs(&self) -> Result<()> {
        for (name, linear) in self.projections() {
            if !linear.inputs.is_multiple_of(PAIRS) {
                let allowed = format!("a multiple of {PAIRS} with bf16 rows");
                return Err(Error::invalid(format!("{name}'s inputs"), linear.inputs, allowed));
            }
            let other = linear.parts.iter().map(|part| part.weight.kind()).find(|&kind| kind != "bf16");
            if let Some(kind) = other {
                return Err(Error::invalid(format!("{name}'s weight"), kind, "bf16 with bf16 rows"));
            }
        }
        Ok(())
    }

    /// Returns whether some bf16 weight is too close to zero for instructions that multiply pairs.
    pub(crate) fn has_tiny(&self) -> bool {
        let tiny = |x: &Bf16| x.to_f32().abs() < LEAST_WEIGHT && x.to_f32() != 0.0;
        self.projections().flat_map(|(_, linear)| &linear.parts).any(|part| match &part.weight {
            Weight::Bf16(all) => all.as_slice().iter().any(tiny),
            _ => false,
        })
    }

    /// Returns the sizes of the model.
    pub fn shape(&self) -> &ModelShape {
        &self.shape
    }

    /// Returns whether the model is a head without keys and values, whose layers attend the target's.
    pub fn shares_kv(&self) -> bool {
        self.head.as_ref().is_some_and(Head::shares_kv)
    }

    /// Returns the number of elements of a state that a head's pass reads and outputs. For a head that attends the
    /// target's keys and values it is the target's `hidden_size`, for every other model its own.
    pub(crate) fn state_size(&self) -> usize {
        let assistant = self.head.as_ref().filter(|head| head.shares_kv());
        assistant.map_or(self.shape.hidden_size, |head| head.state_size)
    }

    /// Returns the number of layers.
    pub fn num_layers(&self) -> usize {
        self.layers.len()
    }

    /// Iterates over the layers that have keys and values of their own.
    pub(crate) fn with_keys(&self) -> impl Iterator<Item = &Layer> + Clone {
        self.layers.iter().filter(|layer| layer.has_keys())
    }
}

fn check_multiplier(field: &str, given: f32) -> Result<()> {
    if given > 0.0 && given.is_finite() {
        return Ok(());
    }
    Err(Error::invalid(field, given, "a finite number above 0"))
}
