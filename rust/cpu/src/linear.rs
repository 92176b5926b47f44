//! Projections: the types that a matrix is stored as, and the stacking of matrices that share an input. Computes
//! nothing.

use crate::error::{Error, Result, check_len};
use specrs_cpu_kernels::{Bf16, Memory, Packed, Values};
use std::sync::Arc;

/// Storage of a matrix `[outputs, inputs]`.
pub enum Weight {
    /// fp32, row by row.
    F32(Memory<f32>),
    /// bf16, row by row.
    Bf16(Memory<Bf16>),
    /// Integers with scales. Activations are rounded to integers for products with them.
    Packed(Arc<Packed>),
}

impl From<Values> for Weight {
    fn from(values: Values) -> Self {
        match values {
            Values::F32(memory) => Self::F32(memory),
            Values::Bf16(memory) => Self::Bf16(memory),
        }
    }
}

impl Weight {
    /// Returns the name of the storage type.
    pub(crate) fn kind(&self) -> &'static str {
        match self {
            Self::F32(_) => "fp32",
            Self::Bf16(_) => "bf16",
            Self::Packed(packed) => packed.kind(),
        }
    }

    fn check(&self, name: &str, outputs: usize, inputs: usize) -> Result<()> {
        match self {
            Self::F32(memory) => check_len(name, memory.as_slice().len(), outputs * inputs),
            Self::Bf16(memory) => check_len(name, memory.as_slice().len(), outputs * inputs),
            Self::Packed(packed) => {
                if (packed.outputs(), packed.inputs()) == (outputs, inputs) {
                    return Ok(());
                }
                let given = format!("[{}, {}]", packed.outputs(), packed.inputs());
                Err(Error::invalid(format!("{name}'s shape"), given, format!("[{outputs}, {inputs}]")))
            }
        }
    }
}

/// Some output features of a projection: `weight` `[outputs, in]`, `bias` `[outputs]`.
pub struct Part {
    pub(crate) weight: Weight,
    pub(crate) bias: Option<Vec<f32>>,
    pub(crate) outputs: usize,
}

impl Part {
    /// Makes a part. The bias is copied, the weight is not.
    pub fn new(weight: impl Into<Weight>, bias: Option<&Values>, outputs: usize) -> Self {
        Self { weight: weight.into(), bias: bias.map(Values::to_f32), outputs }
    }

    fn packed(&self) -> Option<&Packed> {
        if let Weight::Packed(packed) = &self.weight { Some(packed.as_ref()) } else { None }
    }
}

/// Projection of `inputs` features, made of parts stacked by outputs, so that q, k and v may be one tensor or three.
pub struct Linear {
    pub(crate) parts: Vec<Part>,
    pub(crate) inputs: usize,
}

impl Linear {
    /// Makes a projection of these parts, in this order.
    ///
    /// # Errors
    /// Where a part does not have `outputs * inputs` weights, its bias does not have `outputs` numbers, or packed parts
    /// have inputs in different orders. `name` is the error's field.
    pub fn new(name: &str, inputs: usize, parts: Vec<Part>) -> Result<Self> {
        for (i, part) in parts.iter().enumerate() {
            part.weight.check(&format!("{name}.parts[{i}].weight"), part.outputs, inputs)?;
            if let Some(bias) = &part.bias {
                check_len(&format!("{name}.parts[{i}].bias"), bias.len(), part.outputs)?;
            }
        }
        let made = Self { parts, inputs };
        if let Some(i) = made.parts.iter().position(|part| part.packed().is_some_and(|w| w.order() != made.order())) {
            let field = format!("{name}.parts[{i}].weight's order of inputs");
            return Err(Error::invalid(field, "another one", "the order of the packed parts before it"));
        }
        Ok(made)
    }

    /// Returns the order of inputs in which rows are rounded for packed parts; `None` if it is their own order.
    pub(crate) fn order(&self) -> Option<&[u32]> {
        self.parts.iter().find_map(Part::packed).and_then(Packed::order)
    }

    /// Returns the number of output features of all parts.
    pub fn outputs(&self) -> usize {
        self.parts.iter().map(|part| part.outputs).sum()
    }

    /// Returns whether some part is packed, so that rows are rounded for it.
    pub(crate) fn has_packed(&self) -> bool {
        self.parts.iter().any(|part| part.packed().is_some())
    }

    pub(crate) fn check(&self, name: &str, outputs: usize, inputs: usize) -> Result<()> {
        if (self.outputs(), self.inputs) == (outputs, inputs) {
            return Ok(());
        }
        Err(Error::invalid(
            format!("{name}'s shape"),
            format!("[{}, {}]", self.outputs(), self.inputs),
            format!("[{outputs}, {inputs}]"),
        ))
    }
}
