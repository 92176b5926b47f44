//! Sizes of a decoder, and the checks that they go together. Contains no weights.

use crate::error::{Error, Result};
use specrs_cpu_kernels::LANES;

/// Maximum number of rows that go through all layers together. Longer passes are cut into tiles of as many rows, in
/// order.
pub const MAX_TILE_ROWS: usize = specrs_cpu_kernels::MAX_ROWS;

/// Sizes of a decoder, with the names of its config.json.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ModelShape {
    /// Number of ids in the vocabulary.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Number of features between gate, up and down.
    pub intermediate_size: usize,
    /// Number of query heads.
    pub num_heads: usize,
    /// Number of KV heads, a divisor of `num_heads`.
    pub num_kv_heads: usize,
    /// Number of features in a head, even.
    pub head_dim: usize,
    /// Number added to the mean square before its root.
    pub rms_norm_eps: f32,
}

impl ModelShape {
    /// Returns the number of query heads per KV head.
    pub fn group(&self) -> usize {
        self.num_heads / self.num_kv_heads
    }

    pub(crate) fn check(&self) -> Result<()> {
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
            let allowed = format!("a divisor of num_heads={}", self.num_heads);
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

/// Sizes of a gated delta net, which all layers with one share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeltaShape {
    /// Number of query heads, and of key heads.
    pub key_heads: usize,
    /// Number of value heads, a multiple of `key_heads`: value head j has key head `j / (value_heads / key_heads)`.
    pub value_heads: usize,
    /// Number of features in a query and in a key.
    pub key_dim: usize,
    /// Number of features in a value.
    pub value_dim: usize,
    /// Number of positions that the convolution reads, including a row's own; at least 2.
    pub kernel: usize,
}

impl DeltaShape {
    /// Returns the number of features of q, k and v together, which the convolution mixes.
    pub fn conv_dim(&self) -> usize {
        2 * self.key_heads * self.key_dim + self.inner()
    }

    /// Returns the number of features of all value heads.
    pub fn inner(&self) -> usize {
        self.value_heads * self.value_dim
    }

    /// Returns the number of outputs of the input projection: q, k, v and z features, b and a of each value head.
    pub fn outputs(&self) -> usize {
        self.conv_dim() + self.inner() + 2 * self.value_heads
    }

    /// Returns the number of value heads that share a key head.
    pub(crate) fn shared(&self) -> usize {
        self.value_heads / self.key_heads
    }

    /// Returns the number of features of a key head's query, key and values, rounded up to whole vectors.
    pub(crate) fn width(&self) -> usize {
        (2 * self.key_dim + self.shared() * self.value_dim).next_multiple_of(LANES)
    }

    /// Returns the number of features in a value, rounded up to whole vectors.
    pub(crate) fn padded_value(&self) -> usize {
        self.value_dim.next_multiple_of(LANES)
    }

    /// Returns the number of elements that a key head keeps of a layer: states of its value heads, inputs of the
    /// convolution.
    pub(crate) fn base_len(&self) -> usize {
        self.shared() * self.key_dim * self.padded_value() + (self.kernel - 1) * self.width()
    }

    /// Returns the number of elements in a log entry of a key head: inputs of the convolution, key, and for each value
    /// head delta and decay.
    pub(crate) fn entry_len(&self) -> usize {
        self.width() + self.key_dim + self.shared() * (self.padded_value() + 1)
    }

    pub(crate) fn check(&self, name: &str) -> Result<()> {
        let least = [
            ("key_heads", self.key_heads, 1),
            ("value_heads", self.value_heads, 1),
            ("key_dim", self.key_dim, 1),
            ("value_dim", self.value_dim, 1),
            ("kernel", self.kernel, 2),
        ];
        for (field, size, least) in least {
            if size < least {
                return Err(Error::invalid(format!("{name}.{field}"), size, format!("at least {least}")));
            }
        }
        if !self.value_heads.is_multiple_of(self.key_heads) {
            let allowed = format!("a multiple of key_heads={}", self.key_heads);
            return Err(Error::invalid(format!("{name}.value_heads"), self.value_heads, allowed));
        }
        Ok(())
    }
}

/// Sizes of a short convolution, which all layers with one share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConvShape {
    /// Number of channels, each with a filter of its own: the width of the residual stream.
    pub channels: usize,
    /// Number of positions that the convolution reads, including a row's own; at least 2.
    pub kernel: usize,
}

impl ConvShape {
    /// Number of channels that are computed and kept together.
    pub(crate) const BLOCK: usize = 2 * LANES;

    pub(crate) fn check(&self, name: &str, hidden: usize) -> Result<()> {
        if self.channels != hidden {
            return Err(Error::invalid(format!("{name}.channels"), self.channels, format!("hidden_size={hidden}")));
        }
        if self.kernel < 2 {
            return Err(Error::invalid(format!("{name}.kernel"), self.kernel, "at least 2"));
        }
        Ok(())
    }
}

/// Sizes of the layers that have a state in the place of keys and values, which all such layers of a model share.
///
/// A layer's state is divided into parts, each of which one thread computes: key heads, or blocks of channels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StateShape {
    /// Gated delta nets.
    Delta(DeltaShape),
    /// Short convolutions.
    Conv(ConvShape),
}

impl StateShape {
    /// Returns the number of parts of a layer's state.
    pub(crate) fn parts(&self) -> usize {
        match self {
            Self::Delta(shape) => shape.key_heads,
            Self::Conv(shape) => shape.channels.div_ceil(ConvShape::BLOCK),
        }
    }

    /// Returns the maximum number of parts that a thread takes at once.
    pub(crate) fn parts_at_once(&self) -> usize {
        match self {
            Self::Delta(_) => 1,
            Self::Conv(_) => 8,
        }
    }

    /// Returns the number of outputs of the input projection.
    pub(crate) fn outputs(&self) -> usize {
        match self {
            Self::Delta(shape) => shape.outputs(),
            Self::Conv(shape) => 3 * shape.channels,
        }
    }

    /// Returns the number of inputs of the output projection.
    pub(crate) fn inner(&self) -> usize {
        match self {
            Self::Delta(shape) => shape.inner(),
            Self::Conv(shape) => shape.channels,
        }
    }

    /// Returns the first of the inputs of the output projection that part `part` computes.
    pub(crate) fn first_input(&self, part: usize) -> usize {
        match self {
            Self::Delta(shape) => part * shape.shared() * shape.value_dim,
            Self::Conv(shape) => (part * ConvShape::BLOCK).min(shape.channels),
        }
    }

    /// Returns the number of elements that a part keeps of a layer.
    pub(crate) fn base_len(&self) -> usize {
        match self {
            Self::Delta(shape) => shape.base_len(),
            Self::Conv(shape) => (shape.kernel - 1) * ConvShape::BLOCK,
        }
    }

    /// Returns the number of elements in a log entry of a part.
    pub(crate) fn entry_len(&self) -> usize {
        match self {
            Self::Delta(shape) => shape.entry_len(),
            Self::Conv(_) => ConvShape::BLOCK,
        }
    }

    /// Returns the number of positions that the layer's convolution reads, including a row's own.
    pub(crate) fn kernel(&self) -> usize {
        match self {
            Self::Delta(shape) => shape.kernel,
            Self::Conv(shape) => shape.kernel,
        }
    }

    /// Returns the number of inputs of the convolution in a part.
    pub(crate) fn width(&self) -> usize {
        match self {
            Self::Delta(shape) => shape.width(),
            Self::Conv(_) => ConvShape::BLOCK,
        }
    }
}
