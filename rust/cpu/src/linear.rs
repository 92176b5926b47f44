//! Projections: what a matrix is stored as, and how matrices that share an input lie above each other. Computes nothing.

use crate::error::{Error, Result, check_len};
use crate::isa::LANES;
use crate::memory::{Bf16, Memory};
use crate::weights::Values;

/// A group's inputs are a multiple of this: the codes of 32 INT4 weights lie together.
pub const INT4_UNIT: usize = 32;
/// A group's inputs are a multiple of this, or all: the codes of 16 INT8 weights are loaded together.
pub const INT8_UNIT: usize = LANES;

/// What a matrix `[outputs, inputs]` is stored as, row by row.
///
/// A quantized weight is the number code times scale in fp32, which holds it exactly where the scale is bf16 or fp16: a
/// scale then has at most 11 significant bits and a code 7. Products have the bits that those with the same numbers in
/// fp32 have.
pub enum Weight {
    /// fp32
    F32(Memory<f32>),
    /// bf16
    Bf16(Memory<Bf16>),
    /// INT8, a scale for each output, or for each group of its inputs.
    Int8 {
        /// `[outputs, inputs]`
        codes: Memory<i8>,
        /// `[outputs, groups]`: one group, or groups with the same number of inputs, a multiple of 16.
        scales: Values,
    },
    /// INT4, a scale for each group of an output's inputs.
    Int4 {
        /// `[outputs, inputs / 2]`: of 32 inputs 16 bytes, of which byte i is `code + 8` of input i in its lower half and
        /// that of input 16 + i in its upper half.
        codes: Memory<u8>,
        /// `[outputs, groups]`; groups have the same number of inputs, a multiple of 32.
        scales: Values,
    },
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
    /// The name of what it is stored as.
    pub(crate) fn kind(&self) -> &'static str {
        match self {
            Self::F32(_) => "fp32",
            Self::Bf16(_) => "bf16",
            Self::Int8 { .. } => "INT8",
            Self::Int4 { .. } => "INT4",
        }
    }

    fn check(&self, name: &str, outputs: usize, inputs: usize) -> Result<()> {
        match self {
            Self::F32(memory) => check_len(name, memory.as_slice().len(), outputs * inputs),
            Self::Bf16(memory) => check_len(name, memory.as_slice().len(), outputs * inputs),
            Self::Int8 { codes, scales } => {
                check_len(&format!("{name}'s codes"), codes.as_slice().len(), outputs * inputs)?;
                let name = format!("{name}'s scales");
                if scales.len() == outputs {
                    return Ok(());
                }
                check_groups(&name, scales.len(), outputs, inputs, INT8_UNIT)
            }
            Self::Int4 { codes, scales } => {
                check_len(&format!("{name}'s codes"), codes.as_slice().len(), outputs * inputs / 2)?;
                check_groups(&format!("{name}'s scales"), scales.len(), outputs, inputs, INT4_UNIT)
            }
        }
    }
}

/// Refuses scales that make no groups of a multiple of `unit` inputs.
pub(crate) fn check_groups(name: &str, scales: usize, outputs: usize, inputs: usize, unit: usize) -> Result<()> {
    let groups = scales / outputs.max(1);
    if groups * outputs == scales && (groups > 0 || outputs == 0) && inputs.is_multiple_of(groups.max(1) * unit) {
        return Ok(());
    }
    let allowed = format!("{outputs} x groups of a multiple of {unit} among {inputs} inputs");
    Err(Error::invalid(name, format!("{scales} elements"), allowed))
}

/// Some output features of a projection: `weight` `[outputs, in]`, `bias` `[outputs]`.
pub struct Part {
    pub(crate) weight: Weight,
    pub(crate) bias: Option<Vec<f32>>,
    pub(crate) outputs: usize,
}

impl Part {
    /// The bias is copied, the weight is not.
    pub fn new(weight: impl Into<Weight>, bias: Option<&Values>, outputs: usize) -> Self {
        Self { weight: weight.into(), bias: bias.map(Values::to_f32), outputs }
    }
}

/// A projection of `inputs` features: its parts above each other, so that q, k and v may be one tensor or three.
pub struct Linear {
    pub(crate) parts: Vec<Part>,
    pub(crate) inputs: usize,
}

impl Linear {
    /// A projection of these parts, in this order.
    ///
    /// # Errors
    /// Where a part does not hold `outputs * inputs` weights, or its bias's not `outputs`. `name` is the error's field.
    pub fn new(name: &str, inputs: usize, parts: Vec<Part>) -> Result<Self> {
        for (i, part) in parts.iter().enumerate() {
            part.weight.check(&format!("{name}.parts[{i}].weight"), part.outputs, inputs)?;
            if let Some(bias) = &part.bias {
                check_len(&format!("{name}.parts[{i}].bias"), bias.len(), part.outputs)?;
            }
        }
        Ok(Self { parts, inputs })
    }

    /// Output features of all parts.
    pub fn outputs(&self) -> usize {
        self.parts.iter().map(|part| part.outputs).sum()
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
