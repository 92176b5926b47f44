//! `LoRA` adapters (Hu et al. 2021): what rows of a pass that have one add to projections. Data and its checks; computes nothing.

use crate::error::{Error, Result};
use crate::isa::LANES;
use crate::layer::{Layer, Mlp};
use crate::linear::Part;
use crate::weights::{ModelShape, Values, Weights};

/// `B A`, added to some outputs of a projection.
pub struct LoraPart {
    /// `[rank, inputs]`
    pub(crate) a: Part,
    /// `[outputs, rank]`
    pub(crate) b: Part,
    /// The first of these outputs among the projection's.
    pub(crate) first: usize,
    inputs: usize,
}

impl LoraPart {
    /// `a` is `[rank, inputs]`, `b` `[outputs, rank]` with the adapter's scale in it; the first output is output `first` of the
    /// projection.
    ///
    /// # Errors
    /// Where their elements are no multiple of the rank. `name` is the error's field.
    pub fn new(name: &str, a: Values, b: Values, rank: usize, first: usize) -> Result<Self> {
        for (matrix, len) in [("a", a.len()), ("b", b.len())] {
            if rank == 0 || len == 0 || !len.is_multiple_of(rank) {
                let allowed = format!("a multiple of rank = {rank}, which is at least 1");
                return Err(Error::invalid(format!("{name}.{matrix}"), format!("{len} elements"), allowed));
            }
        }
        let (inputs, outputs) = (a.len() / rank, b.len() / rank);
        Ok(Self { a: Part::new(a, None, rank), b: Part::new(b, None, outputs), first, inputs })
    }

    /// Rows of A.
    pub(crate) fn rank(&self) -> usize {
        self.a.outputs
    }

    /// Vectors of a row of `A x`.
    pub(crate) fn vectors(&self) -> usize {
        self.rank().div_ceil(LANES)
    }
}

/// What an adapter adds to the projections of a layer.
#[derive(Default)]
pub struct LoraLayer {
    /// To q, k and v.
    pub qkv: Vec<LoraPart>,
    /// To the projection of what attention gives.
    pub o: Vec<LoraPart>,
    /// To gate and up of an MLP.
    pub gate_up: Vec<LoraPart>,
    /// To its last projection.
    pub down: Vec<LoraPart>,
}

/// Which projection of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Projection {
    Qkv,
    O,
    GateUp,
    Down,
}

impl Projection {
    const ALL: [Self; 4] = [Self::Qkv, Self::O, Self::GateUp, Self::Down];
}

impl LoraLayer {
    fn of(&self, projection: Projection) -> &[LoraPart] {
        match projection {
            Projection::Qkv => &self.qkv,
            Projection::O => &self.o,
            Projection::GateUp => &self.gate_up,
            Projection::Down => &self.down,
        }
    }

    fn check(&self, i: usize, layer: &Layer) -> Result<()> {
        let linear = |projection| match (projection, &layer.mlp) {
            (Projection::Qkv, _) => Some(&layer.qkv),
            (Projection::O, _) => Some(&layer.o),
            (Projection::GateUp, Mlp::Dense { gate_up, .. }) => Some(gate_up),
            (Projection::Down, Mlp::Dense { down, .. }) => Some(down),
            (_, Mlp::Experts(_)) => None,
        };
        for projection in Projection::ALL {
            for (number, part) in self.of(projection).iter().enumerate() {
                let name = format!("layers[{i}].{projection:?}[{number}]").to_lowercase();
                let Some(linear) = linear(projection) else {
                    return Err(Error::invalid(name, "an adapter of experts", "none of them"));
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

/// An adapter of a decoder.
pub struct Lora {
    layers: Vec<LoraLayer>,
    shape: ModelShape,
    /// Of a row of `A x` of all parts of a projection, at most.
    pub(crate) vectors: usize,
}

impl Lora {
    /// An adapter for these weights.
    ///
    /// # Errors
    /// Where layers are not as many, or a part does not fit its projection; for parts of experts.
    pub fn new(weights: &Weights, layers: Vec<LoraLayer>) -> Result<Self> {
        if layers.len() != weights.layers.len() {
            return Err(Error::invalid("layers", layers.len(), weights.layers.len().to_string()));
        }
        for (i, (own, layer)) in layers.iter().zip(&weights.layers).enumerate() {
            own.check(i, layer)?;
        }
        let projections = |layer| {
            Projection::ALL.map(|projection| LoraLayer::of(layer, projection).iter().map(LoraPart::vectors).sum())
        };
        let vectors = layers.iter().flat_map(projections).max().unwrap_or(0);
        Ok(Self { layers, shape: weights.shape, vectors })
    }

    /// What is added to a projection.
    pub(crate) fn parts(&self, layer: usize, projection: Projection) -> &[LoraPart] {
        self.layers[layer].of(projection)
    }

    /// Refuses to be used with other weights than those that it was checked against.
    pub(crate) fn check(&self, weights: &Weights) -> Result<()> {
        let (made, given) = ((self.shape, self.layers.len()), (weights.shape, weights.layers.len()));
        if made == given {
            return Ok(());
        }
        Err(Error::invalid("adapters", format!("one for {made:?}"), format!("those for {given:?}")))
    }
}

impl std::fmt::Debug for Lora {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Lora({} layers)", self.layers.len())
    }
}
