//! The weights of a dense decoder, and what their shapes must be. Computes nothing.

use crate::error::{Error, Result, check_len};
use crate::kernels::{LEAST_WEIGHT, PAIRS};
use crate::layer::{Activation, ExpertSizes, Layer, LayerWeights, Mlp};
use crate::linear::{Linear, Weight};
use crate::memory::{Bf16, E4m3, E5m2, Memory, MemoryMut};

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
    /// FP8 codes of 3 bits of fraction, each times a scale of its layer.
    E4m3(MemoryMut<E4m3>),
    /// The same of 2 bits.
    E5m2(MemoryMut<E5m2>),
}

impl ValuesMut {
    /// Elements.
    pub fn len(&self) -> usize {
        match self {
            Self::F32(memory) => memory.as_slice().len(),
            Self::Bf16(memory) => memory.as_slice().len(),
            Self::E4m3(memory) => memory.as_slice().len(),
            Self::E5m2(memory) => memory.as_slice().len(),
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

/// How some layers rotate queries and keys.
#[derive(Clone, Debug, PartialEq)]
pub struct Rotation {
    /// `[P]`, at most half of `head_dim`: the angle of each pair at position 1, scaling included. Features behind the first
    /// 2 P of a head are not rotated.
    pub frequencies: Vec<f32>,
    /// What cosines and sines are multiplied by.
    pub magnitude: f32,
}

/// What a pass multiplies by, beside weights.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Multipliers {
    /// Of embeddings.
    pub embedding: f32,
    /// Of what attention and MLP add to the residual stream.
    pub residual: f32,
    /// Of attention scores.
    pub scores: f32,
}

/// What an EAGLE-3 head has beside a layer (Li et al. 2025): how it reads the target's hidden states.
pub struct BesideWeights {
    /// The target's layers at whose entry it reads hidden states, L of them.
    pub hidden_layers: Vec<usize>,
    /// `L target's hidden -> hidden`
    pub fc: Linear,
    /// `[L target's hidden]`, of what `fc` is fed: a norm for all of it or, where `fc_norm_each`, for each layer's state.
    pub fc_norm: Option<Values>,
    /// See `fc_norm`.
    pub fc_norm_each: bool,
    /// `[hidden]`, of the hidden state, as `input_norm` is of the embedding.
    pub hidden_norm: Values,
    /// The residual is the normed hidden state.
    pub norm_before_residual: bool,
    /// A pass is fed what the pass before has left behind the final norm, not before it.
    pub norm_output: bool,
    /// The target's id of each of its own, ascending.
    pub target_ids: Vec<i64>,
}

/// The same as passes read it.
pub(crate) struct Normed {
    pub(crate) hidden_layers: Vec<usize>,
    pub(crate) fc: Linear,
    pub(crate) fc_norm: Option<Vec<f32>>,
    /// Inputs of `fc` that are normed together.
    pub(crate) together: usize,
    pub(crate) hidden_norm: Vec<f32>,
    pub(crate) before_residual: bool,
    pub(crate) norm_output: bool,
    pub(crate) target_ids: Vec<i64>,
}

impl BesideWeights {
    fn check(self, shape: &ModelShape, num_ids: usize) -> Result<Normed> {
        let (layers, inputs) = (self.hidden_layers.len(), self.fc.inputs);
        check_len("hidden_norm", self.hidden_norm.len(), shape.hidden_size)?;
        self.fc.check("fc", shape.hidden_size, inputs)?;
        if layers == 0 || inputs == 0 || !inputs.is_multiple_of(layers) {
            let allowed = format!("a divisor of the {inputs} inputs of fc");
            return Err(Error::invalid("hidden_layers", format!("{layers} of them"), allowed));
        }
        if let Some(norm) = &self.fc_norm {
            check_len("fc_norm", norm.len(), inputs)?;
        }
        check_len("target_ids", self.target_ids.len(), num_ids)?;
        let outside = |&&id: &&i64| usize::try_from(id).map_or(true, |id| id >= shape.vocab_size);
        if let Some(id) = self.target_ids.iter().find(outside) {
            return Err(Error::invalid("target_ids", id, format!("0 to vocab_size - 1 = {}", shape.vocab_size - 1)));
        }
        if !self.target_ids.is_sorted_by(|a, b| a < b) {
            return Err(Error::invalid("target_ids", "ids that do not ascend", "ascending ids"));
        }
        Ok(Normed {
            fc_norm: self.fc_norm.as_ref().map(Values::to_f32),
            together: if self.fc_norm_each { inputs / layers } else { inputs },
            hidden_layers: self.hidden_layers,
            fc: self.fc,
            hidden_norm: self.hidden_norm.to_f32(),
            before_residual: self.norm_before_residual,
            norm_output: self.norm_output,
            target_ids: self.target_ids,
        })
    }
}

/// All weights of a dense decoder, checked against its shape. Read-only: several decoders may share them.
pub struct Weights {
    pub(crate) shape: ModelShape,
    pub(crate) beside: Option<Normed>,
    pub(crate) embedding: Values,
    pub(crate) layers: Vec<Layer>,
    pub(crate) final_norm: Vec<f32>,
    pub(crate) lm_head: Linear,
    pub(crate) rotations: Vec<Rotation>,
    pub(crate) multipliers: Multipliers,
    pub(crate) activation: Activation,
    pub(crate) experts: Option<ExpertSizes>,
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
        beside: BesideWeights,
    ) -> Result<Self> {
        lm_head.check("lm_head", lm_head.outputs().max(1), shape.hidden_size)?;
        if layer.input_norm.is_none() {
            return Err(Error::invalid("layers[0].input_norm", "none", "the norm of a head's embeddings"));
        }
        let normed = beside.check(&shape, lm_head.outputs())?;
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
            .map(|(i, layer)| layer.check(&shape, i, inputs))
            .collect::<Result<Vec<Layer>>>()?;
        let mut experts = None;
        for (i, layer) in layers.iter().enumerate() {
            let Layer { mlp: Mlp::Experts(mixture), .. } = layer else { continue };
            let sizes = mixture.sizes();
            if *experts.get_or_insert(sizes) != sizes {
                let allowed = format!("{experts:?}, as of the layers before");
                return Err(Error::invalid(format!("layers[{i}].experts"), format!("{sizes:?}"), allowed));
            }
        }
        let scores = 1.0 / (shape.head_dim as f32).sqrt();
        Ok(Self {
            shape,
            beside,
            embedding,
            layers,
            final_norm: final_norm.to_f32(),
            lm_head,
            rotations: vec![Rotation { frequencies, magnitude: 1.0 }],
            multipliers: Multipliers { embedding: 1.0, residual: 1.0, scores },
            activation: Activation::Silu,
            experts,
        })
    }

    /// The same where layers rotate in several ways: `layers` has the index of each one's rotation, or none.
    ///
    /// # Errors
    /// Where there are not as many as layers, an index is none, or a rotation has no or too many pairs.
    pub fn with_rotations(mut self, rotations: Vec<Rotation>, layers: &[Option<usize>]) -> Result<Self> {
        check_len("rotations of layers", layers.len(), self.layers.len())?;
        let most = self.shape.head_dim / 2;
        for (i, rotation) in rotations.iter().enumerate() {
            if !(1..=most).contains(&rotation.frequencies.len()) {
                let field = format!("rotations[{i}].frequencies");
                let given = format!("{} elements", rotation.frequencies.len());
                return Err(Error::invalid(field, given, format!("1 to head_dim / 2 = {most} elements")));
            }
            check_multiplier(&format!("rotations[{i}].magnitude"), rotation.magnitude)?;
        }
        for (layer, &rotation) in self.layers.iter_mut().zip(layers) {
            if let Some(given) = rotation.filter(|&index| index >= rotations.len()) {
                return Err(Error::invalid("rotation", given, format!("less than {}", rotations.len())));
            }
            layer.rotation = rotation;
        }
        self.rotations = rotations;
        Ok(self)
    }

    /// The same where layers attend the last positions alone: `windows` has how many each sees, a row's own among them, or
    /// none where it sees all. No position before a window is read.
    ///
    /// # Errors
    /// Where there are not as many as layers, or one is 0.
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

    /// The same with this activation of the MLP; without, it is `SiLU`.
    ///
    /// # Errors
    /// Where a number of it is not finite and above 0.
    pub fn with_activation(self, activation: Activation) -> Result<Self> {
        if let Activation::ClampedSwiglu { alpha, limit } = activation {
            check_multiplier("activation's alpha", alpha)?;
            check_multiplier("activation's limit", limit)?;
        }
        Ok(Self { activation, ..self })
    }

    /// The same where a KV cache of codes has these scales, of each layer that of its keys and that of its values: a code is a
    /// number divided by its scale. Without, they are 1; caches of numbers have none.
    ///
    /// # Errors
    /// Where there are not as many as layers, or one is not finite and above 0.
    pub fn with_kv_scales(mut self, scales: &[(f32, f32)]) -> Result<Self> {
        check_len("kv_scales", scales.len(), self.layers.len())?;
        for (i, (layer, &(k, v))) in self.layers.iter_mut().zip(scales).enumerate() {
            check_multiplier(&format!("kv_scales[{i}] of K"), k)?;
            check_multiplier(&format!("kv_scales[{i}] of V"), v)?;
            layer.kv_scales = (k, v);
        }
        Ok(self)
    }

    /// The most positions that a layer sees; none where some sees all.
    pub fn sliding_window(&self) -> Option<usize> {
        self.layers.iter().map(|layer| layer.window).max().filter(|&window| window != usize::MAX)
    }

    /// Whether the last layer has a window: its K and V of a position may not be finite though rows behind the window are.
    pub(crate) fn ends_in_window(&self) -> bool {
        self.layers.last().is_some_and(|layer| layer.window != usize::MAX)
    }

    /// The same with these multipliers; without, scores are divided by the root of `head_dim`.
    ///
    /// # Errors
    /// Where one is not finite and above 0.
    pub fn with_multipliers(self, multipliers: Multipliers) -> Result<Self> {
        check_multiplier("embedding multiplier", multipliers.embedding)?;
        check_multiplier("residual multiplier", multipliers.residual)?;
        check_multiplier("scores multiplier", multipliers.scores)?;
        Ok(Self { multipliers, ..self })
    }

    /// Of an EAGLE-3 head the target's layers at whose entry it reads hidden states, and their size; else none.
    pub fn hidden_layers(&self) -> (&[usize], usize) {
        self.beside.as_ref().map_or((&[], 0), |head| (&head.hidden_layers, head.fc.inputs / head.hidden_layers.len()))
    }

    /// Of an EAGLE-3 head the target's id of each of its own, ascending.
    pub fn target_ids(&self) -> Option<&[i64]> {
        self.beside.as_ref().map(|head| &*head.target_ids)
    }

    /// Logits of a row: the vocabulary, or the ids of an EAGLE-3 head.
    pub fn num_ids(&self) -> usize {
        self.lm_head.outputs()
    }

    /// All projections by name.
    fn projections(&self) -> impl Iterator<Item = (String, &Linear)> {
        let fc = self.beside.iter().map(|beside| ("fc".to_owned(), &beside.fc));
        let layers = self.layers.iter().enumerate().flat_map(|(i, layer)| layer.projections(i));
        layers.chain(fc).chain([("lm_head".to_owned(), &self.lm_head)])
    }

    /// Refuses what cannot be multiplied as pairs of bf16 numbers.
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

    /// Whether some bf16 weight is nearer to zero than instructions for pairs may have it.
    pub(crate) fn has_tiny(&self) -> bool {
        let tiny = |x: &Bf16| x.to_f32().abs() < LEAST_WEIGHT && x.to_f32() != 0.0;
        self.projections().flat_map(|(_, linear)| &linear.parts).any(|part| match &part.weight {
            Weight::Bf16(all) => all.as_slice().iter().any(tiny),
            _ => false,
        })
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

fn check_multiplier(field: &str, given: f32) -> Result<()> {
    if given > 0.0 && given.is_finite() {
        return Ok(());
    }
    Err(Error::invalid(field, given, "a finite number above 0"))
}
