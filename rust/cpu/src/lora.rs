//! `LoRA` adapters (Hu et al. 2021), which add to the projections of the rows that have one. Data and its checks;
//! computes nothing.

use crate::error::{Error, Result};
use crate::layer::{Layer, Mlp};
use crate::linear::{Linear, Part};
use crate::shape::ModelShape;
use crate::weights::Weights;
use specrs_cpu_kernels::{LANES, Values};

/// Product `B A` that is added to some outputs of a projection.
pub struct LoraPart {
    /// Matrix A, `[rank, inputs]`.
    pub(crate) a: Part,
    /// Matrix B, `[outputs, rank]`.
    pub(crate) b: Part,
    /// Index in the projection of the first output that the product is added to.
    pub(crate) first: usize,
    inputs: usize,
}

impl LoraPart {
    /// Makes a part from `a` `[rank, inputs]` and `b` `[outputs, rank]`, which includes the adapter's scale. Its first
    /// output is output `first` of the projection.
    ///
    /// # Errors
    /// If a number of elements is no multiple of the rank. `name` is the error's field.
    pub fn new(name: &str, a: Values, b: Values, rank: usize, first: usize) -> Result<Self> {
        for (matrix, len) in [("a", a.len()), ("b", b.len())] {
            if rank == 0 || len == 0 || !len.is_multiple_of(rank) {
                let allowed = format!("a multiple of rank={rank}, which is at least 1");
                return Err(Error::invalid(format!("{name}.{matrix}"), format!("{len} elements"), allowed));
            }
        }
        let (inputs, outputs) = (a.len() / rank, b.len() / rank);
        Ok(Self { a: Part::new(a, None, rank), b: Part::new(b, None, outputs), first, inputs })
    }

    /// Returns the rank, which is the number of rows of A.
    pub(crate) fn rank(&self) -> usize {
        self.a.outputs
    }

    /// Returns the number of vectors in a row of `A x`.
    pub(crate) fn vectors(&self) -> usize {
        self.rank().div_ceil(LANES)
    }
}

/// Parts that an adapter adds to the projections of a layer.
#[derive(Default)]
pub struct LoraLayer {
    /// Parts of the projection of q, k and v, or of the input projection of a layer with a state.
    pub qkv: Vec<LoraPart>,
    /// Parts of the output projection of attention, or of a layer with a state.
    pub o: Vec<LoraPart>,
    /// Parts of the gate and up projection of an MLP.
    pub gate_up: Vec<LoraPart>,
    /// Parts of the down projection of an MLP.
    pub down: Vec<LoraPart>,
    /// Parts of each expert's projections; empty if the adapter changes no expert of the layer.
    pub experts: Vec<ExpertLora>,
}

/// Parts that an adapter adds to the projections of one expert.
#[derive(Default)]
pub struct ExpertLora {
    /// Parts of the gate and up projection.
    pub gate_up: Vec<LoraPart>,
    /// Parts of the down projection.
    pub down: Vec<LoraPart>,
}

/// Name of a projection in a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Projection {
    Qkv,
    O,
    GateUp,
    Down,
    /// Gate and up projection of an expert, by its index.
    ExpertGateUp(usize),
    /// Down projection of an expert, by its index.
    ExpertDown(usize),
}

impl Projection {
    /// Returns the projections of a layer with parts for this number of experts.
    fn all(experts: usize) -> impl Iterator<Item = Self> {
        let of_experts = (0..experts).flat_map(|i| [Self::ExpertGateUp(i), Self::ExpertDown(i)]);
        [Self::Qkv, Self::O, Self::GateUp, Self::Down].into_iter().chain(of_experts)
    }

    /// Returns the projection's weights in a layer; `None` if the layer has no such projection.
    fn of(self, layer: &Layer) -> Option<&Linear> {
        match (self, &layer.mlp) {
            (Self::Qkv, _) => Some(&layer.qkv),
            (Self::O, _) => Some(&layer.o),
            (Self::GateUp, Mlp::Dense { gate_up, .. }) => Some(gate_up),
            (Self::Down, Mlp::Dense { down, .. }) => Some(down),
            (Self::GateUp, Mlp::Experts(experts)) => experts.mlp.as_ref().map(|mlp| &mlp.gate_up),
            (Self::Down, Mlp::Experts(experts)) => experts.mlp.as_ref().map(|mlp| &mlp.down),
            (Self::ExpertGateUp(i), Mlp::Experts(experts)) => experts.experts.get(i).map(|expert| &expert.0),
            (Self::ExpertDown(i), Mlp::Experts(experts)) => experts.experts.get(i).map(|expert| &expert.1),
            (Self::ExpertGateUp(_) | Self::ExpertDown(_), Mlp::Dense { .. }) => None,
        }
    }
}

impl std::fmt::Display for Projection {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Qkv => f.write_str("qkv"),
            Self::O => f.write_str("o"),
            Self::GateUp => f.write_str("gate_up"),
            Self::Down => f.write_str("down"),
            Self::ExpertGateUp(i) => write!(f, "experts[{i}].gate_up"),
            Self::ExpertDown(i) => write!(f, "experts[{i}].down"),
        }
    }
}

impl LoraLayer {
    fn of(&self, projection: Projection) -> &[LoraPart] {
        match projection {
            Projection::Qkv => &self.qkv,
            Projection::O => &self.o,
            Projection::GateUp => &self.gate_up,
            Projection::Down => &self.down,
            Projection::ExpertGateUp(i) => self.experts.get(i).map_or(&[], |expert| &expert.gate_up),
            Projection::ExpertDown(i) => self.experts.get(i).map_or(&[], |expert| &expert.down),
        }
    }

    fn projections(&self) -> impl Iterator<Item = Projection> {
        Projection::all(self.experts.len())
    }

    fn check(&self, i: usize, layer: &Layer) -> Result<()> {
        for projection in self.projections() {
            for (number, part) in self.of(projection).iter().enumerate() {
                let name = format!("layers[{i}].{projection}[{number}]");
                let Some(linear) = projection.of(layer) else {
                    return Err(Error::invalid(name, "an adapter", "none, because the layer has no such projection"));
                };
                let (inputs, outputs) = (linear.inputs, linear.outputs());
                if part.inputs != inputs {
                    return Err(Error::invalid(format!("{name}'s inputs"), part.inputs, inputs.to_string()));
                }
                let last = part.first + part.b.outputs;
                if last > outputs {
                    let allowed = format!("at most the projection's {outputs}");
                    return Err(Error::invalid(format!("{name}'s last output"), last, allowed));
                }
            }
        }
        Ok(())
    }
}

/// `LoRA` adapter of a decoder: the parts that it adds to each layer's projections.
pub struct Lora {
    layers: Vec<LoraLayer>,
    shape: ModelShape,
    /// Maximum number of 16-element vectors in a row of `A x`, over all parts of a projection.
    pub(crate) vectors: usize,
}

impl Lora {
    /// Makes an adapter for these weights.
    ///
    /// # Errors
    /// If the number of layers differs, or a part does not match its projection.
    pub fn new(weights: &Weights, layers: Vec<LoraLayer>) -> Result<Self> {
        if layers.len() != weights.layers.len() {
            return Err(Error::invalid("layers", layers.len(), weights.layers.len().to_string()));
        }
        for (i, (own, layer)) in layers.iter().zip(&weights.layers).enumerate() {
            own.check(i, layer)?;
        }
        let projections = |layer: &LoraLayer| {
            let vectors = |projection| layer.of(projection).iter().map(LoraPart::vectors).sum();
            layer.projections().map(vectors).max().unwrap_or(0)
        };
        let vectors = layers.iter().map(projections).max().unwrap_or(0);
        Ok(Self { layers, shape: weights.shape, vectors })
    }

    /// Returns the parts that are added to a projection.
    pub(crate) fn parts(&self, layer: usize, projection: Projection) -> &[LoraPart] {
        self.layers[layer].of(projection)
    }

    /// Rejects weights whose sizes or number of layers differ from those that the adapter was made for.
    pub(crate) fn check(&self, weights: &Weights) -> Result<()> {
        let (made, given) = ((self.shape, self.layers.len()), (weights.shape, weights.layers.len()));
        if made == given {
            return Ok(());
        }
        Err(Error::invalid("adapters", format!("one for {made:?}"), format!("one for {given:?}")))
    }
}

impl std::fmt::Debug for Lora {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Lora({} layers)", self.layers.len())
    }
}
