//! `LoRA` adapters (Hu et al. 2021), which add to the projections of the rows that have one. Data and its checks;
//! computes nothing.

use crate::error::{Error, Result};
use crate::layer::{Layer, Mlp};
use crate::linear::Part;
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
}

/// Name of a projection in a layer.
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
                    return Err(Error::invalid(
                        name,
                        "an adapter of experts",
                        "none, because adapters are only for dense layers",
                    ));
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
    /// If the number of layers differs, a part does not match its projection, or a part is for experts.
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
