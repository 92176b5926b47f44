//! Weights of a decoder or of a drafting head, and the checks of what both have. Computes nothing.

use crate::error::{Error, Result, check_len};
use crate::layer::{ExpertSizes, Layer, LayerWeights, Mlp};
use crate::linear::{Linear, Weight};
use crate::shape::{ModelShape, StateShape};
use heads::check_target_ids;
pub use heads::{AssistantWeights, Eagle3Weights, HeadWeights, MtpWeights};
pub(crate) use heads::{Head, HeadInput};
use specrs_cpu_kernels::{Activation, Bf16, LEAST_WEIGHT, PAIRS, Packed, Values};
use std::sync::Arc;

mod heads;

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

/// Growth of queries with their position: after its rotation, a query is multiplied by
/// `1 + beta ln(1 + floor((position + offset) / length))`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct QueryScaling {
    /// Factor of the logarithm.
    pub beta: f32,
    /// Number of positions from one factor to the next.
    pub length: usize,
    /// Number that is added to a position.
    pub offset: u32,
    /// Whether only the queries of layers that are not rotated grow.
    pub unrotated: bool,
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

/// Weights that every decoder and every drafting head has, as they are given.
pub struct DecoderWeights {
    /// Sizes.
    pub shape: ModelShape,
    /// Embeddings, `[vocab, hidden]`. Those of an assistant are the target's, with the target's hidden size.
    pub embedding: Embedding,
    /// Layers, in order.
    pub layers: Vec<LayerWeights>,
    /// Weight of the final norm, `[hidden]`.
    pub final_norm: Values,
    /// LM head. Tied embeddings and their LM head are the same memory.
    pub lm_head: Linear,
    /// Angle of each pair at position 1, scaling included, `[head_dim / 2]`.
    pub frequencies: Vec<f32>,
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
    /// Whether neighbouring features of a head are rotated against each other, and not its halves.
    pub(crate) interleaved_rope: bool,
    /// Whether windows end where the row's chunk begins.
    pub(crate) chunked: bool,
    pub(crate) multipliers: Multipliers,
    /// Factors of queries by position; `None` if all are 1.
    pub(crate) query_scaling: Option<QueryScaling>,
    pub(crate) activation: Activation,
    pub(crate) experts: Option<ExpertSizes>,
    /// Sizes of the layers with a state, and their number; `None` if all layers have attention.
    pub(crate) states: Option<(StateShape, usize)>,
    /// Distinct sizes of layers.
    pub(crate) kinds: Vec<ModelShape>,
    pub(crate) layer_embedding: Option<Added>,
    /// Number c for which logits x become `c tanh(x / c)`.
    pub(crate) softcap: Option<f32>,
}

impl Weights {
    /// Makes the weights of a decoder: `lm_head` is hidden -> vocab.
    ///
    /// # Errors
    /// If a size is impossible or a tensor does not match the others.
    pub fn new(given: DecoderWeights) -> Result<Self> {
        let shape = given.shape;
        let made = Self::build(given, None)?;
        made.lm_head.check("lm_head", shape.vocab_size, shape.hidden_size)?;
        Ok(made)
    }

    /// Makes the weights of a draft model with logits for some ids only, the ascending `target_ids`: `lm_head` is
    /// hidden -> ids. The model is still fed any id of `embedding`.
    ///
    /// # Errors
    /// If a size is impossible or a tensor does not match the others.
    pub fn draft(given: DecoderWeights, target_ids: Vec<i64>) -> Result<Self> {
        given.lm_head.check("lm_head", target_ids.len().max(1), given.shape.hidden_size)?;
        check_target_ids(&target_ids, &given.shape)?;
        Ok(Self { target_ids: Some(target_ids), ..Self::build(given, None)? })
    }

    /// Makes the weights of a head that drafts from a target's hidden states. `layers` are the head's own.
    /// `lm_head` has exactly one output for each id that an EAGLE-3 head drafts, and at least one for each id of the
    /// other heads, in their order.
    ///
    /// # Errors
    /// If a size is impossible, a tensor does not match the others, or a layer is not of the kind that the head has.
    pub fn head(given: DecoderWeights, head: HeadWeights) -> Result<Self> {
        let DecoderWeights { shape, layers, lm_head, .. } = &given;
        lm_head.check("lm_head", lm_head.outputs().max(1), shape.hidden_size)?;
        let head = head.check(shape, layers, lm_head.outputs())?;
        Self::build(given, Some(head))
    }

    fn build(given: DecoderWeights, head: Option<Head>) -> Result<Self> {
        let DecoderWeights { shape, embedding, layers, final_norm, lm_head, frequencies } = given;
        shape.check()?;
        let hidden = shape.hidden_size;
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
        let mut states: Option<(StateShape, usize)> = None;
        for (i, layer) in layers.iter_mut().enumerate() {
            let Some(state) = &mut layer.state else { continue };
            let (shape, count) = states.get_or_insert((state.shape, 0));
            if *shape != state.shape || head.is_some() {
                let allowed = if head.is_some() { "none in a head".to_owned() } else { format!("{shape:?}") };
                return Err(Error::invalid(format!("layers[{i}].state"), format!("{:?}", state.shape), allowed));
            }
            state.index = *count;
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
            interleaved_rope: false,
            chunked: false,
            multipliers: Multipliers { embedding: 1.0, residual: 1.0, scores },
            query_scaling: None,
            activation: Activation::Silu,
            experts,
            states,
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

    /// Makes windows chunks: a row attends only to positions of its own chunk. Chunks are as long as the window, and the
    /// first begins at position 0.
    #[must_use]
    pub fn with_chunks(self) -> Self {
        Self { chunked: true, ..self }
    }

    /// Rotates neighbouring features of a head against each other. By default, its halves are.
    #[must_use]
    pub fn with_interleaved_rope(self) -> Self {
        Self { interleaved_rope: true, ..self }
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

    /// Sets the factors of queries by position. By default, all are 1.
    ///
    /// # Errors
    /// If beta is not finite and above 0, or the length is 0.
    pub fn with_query_scaling(self, scaling: QueryScaling) -> Result<Self> {
        check_multiplier("query_scaling's beta", scaling.beta)?;
        if scaling.length == 0 {
            return Err(Error::invalid("query_scaling's length", 0, "at least 1"));
        }
        Ok(Self { query_scaling: Some(scaling), ..self })
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
