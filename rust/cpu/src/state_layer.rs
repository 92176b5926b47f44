//! Layer with a state in the place of keys and values: its weights besides its projections, and the checks of their
//! shapes. Computes nothing.

use crate::error::{Result, check_len};
use crate::shape::{ConvShape, DeltaShape, StateShape};
use specrs_cpu_kernels::{LANES, Values, Vectors, rate};

/// Weights of a gated delta net besides its projections, in the place of attention.
pub struct DeltaWeights {
    /// Sizes.
    pub shape: DeltaShape,
    /// Weights of the convolution, `[kernel, conv_dim]`, the last for a row's own input.
    pub conv: Values,
    /// Logarithm of each head's rate of decay, `[value_heads]`.
    pub a_log: Values,
    /// Number added to each head's a, `[value_heads]`.
    pub dt_bias: Values,
    /// Weight of the norm of each value head's output, `[value_dim]`.
    pub norm: Values,
    /// Whether the output projection reads the first value head of every key head, then the second of every key head,
    /// and so on. Otherwise it reads all value heads of the first key head first.
    pub turned: bool,
    /// Whether outputs of the input projection lie by key head: of each q, k, v and z, then of each b and a. Otherwise
    /// they are q, k, v, z, b and a of all heads.
    pub by_key_head: bool,
}

/// Weights of a gated delta net in the form that passes read.
pub(crate) struct DeltaLayer {
    pub(crate) shape: DeltaShape,
    /// Weights of the convolution by key head, `[key_heads, kernel, width]` in vectors.
    pub(crate) conv: Vectors,
    /// Rate of decay of each value head.
    pub(crate) rates: Vec<f64>,
    pub(crate) dt_bias: Vec<f32>,
    pub(crate) norm: Vec<f32>,
    /// Whether the output projection reads the first value head of every key head, then the second of every key head,
    /// and so on.
    pub(crate) turned: bool,
    /// Whether outputs of the input projection lie by key head.
    pub(crate) by_key_head: bool,
}

impl DeltaWeights {
    fn check(self, name: &str) -> Result<DeltaLayer> {
        let shape = self.shape;
        shape.check(name)?;
        check_len(&format!("{name}.conv"), self.conv.len(), shape.kernel * shape.conv_dim())?;
        check_len(&format!("{name}.a_log"), self.a_log.len(), shape.value_heads)?;
        check_len(&format!("{name}.dt_bias"), self.dt_bias.len(), shape.value_heads)?;
        check_len(&format!("{name}.norm"), self.norm.len(), shape.value_dim)?;
        let given = self.conv.to_f32();
        let mut conv = Vectors::new(shape.key_heads * shape.kernel * shape.width() / LANES);
        let rows = conv.as_flattened_mut().chunks_exact_mut(shape.width());
        for (i, row) in rows.enumerate() {
            let (head, j) = (i / shape.kernel, i % shape.kernel);
            shape.places(head, false).gather(&shape, &given[j * shape.conv_dim()..][..shape.conv_dim()], row);
        }
        Ok(DeltaLayer {
            shape,
            conv,
            rates: self.a_log.to_f32().into_iter().map(rate).collect(),
            dt_bias: self.dt_bias.to_f32(),
            norm: self.norm.to_f32(),
            turned: self.turned,
            by_key_head: self.by_key_head,
        })
    }
}

/// Weights of a gated short convolution besides its projections, in the place of attention.
///
/// The input projection has outputs B, C and x, one of each for every channel. The layer's output is the output
/// projection of `C * (convolution of B * x)`.
pub struct ConvWeights {
    /// Sizes.
    pub shape: ConvShape,
    /// Weights of the convolution, `[kernel, channels]`, the last for a row's own input.
    pub conv: Values,
}

/// Weights of a short convolution in the form that passes read.
pub(crate) struct ConvLayer {
    pub(crate) shape: ConvShape,
    /// Weights of the convolution by block, `[blocks, kernel, ConvShape::BLOCK]` in vectors, with zeros after the last
    /// channel.
    pub(crate) conv: Vectors,
}

impl ConvWeights {
    fn check(self, name: &str, hidden: usize) -> Result<ConvLayer> {
        let shape = self.shape;
        shape.check(name, hidden)?;
        check_len(&format!("{name}.conv"), self.conv.len(), shape.kernel * shape.channels)?;
        let given = self.conv.to_f32();
        let blocks = shape.channels.div_ceil(ConvShape::BLOCK);
        let mut conv = Vectors::new(blocks * shape.kernel * ConvShape::BLOCK / LANES);
        for (i, out) in conv.as_flattened_mut().chunks_exact_mut(ConvShape::BLOCK).enumerate() {
            let channels = &given[i % shape.kernel * shape.channels..][..shape.channels];
            let channels = channels.chunks(ConvShape::BLOCK).nth(i / shape.kernel).unwrap_or_default();
            out[..channels.len()].copy_from_slice(channels);
        }
        Ok(ConvLayer { shape, conv })
    }
}

/// Weights of a layer that has a state in the place of keys and values.
pub enum StateWeights {
    /// Gated delta net.
    Delta(DeltaWeights),
    /// Short convolution.
    Conv(ConvWeights),
}

/// Layer that has a state, in the form that passes read.
pub(crate) struct StateLayer {
    pub(crate) net: StateNet,
    pub(crate) shape: StateShape,
    /// Index of the layer among those with states.
    pub(crate) index: usize,
}

/// Weights of a layer with a state, by kind.
pub(crate) enum StateNet {
    Delta(DeltaLayer),
    Conv(ConvLayer),
}

impl StateWeights {
    pub(crate) fn check(self, name: &str, hidden: usize) -> Result<StateLayer> {
        let (net, shape) = match self {
            Self::Delta(delta) => {
                let delta = delta.check(&format!("{name}.delta"))?;
                let shape = StateShape::Delta(delta.shape);
                (StateNet::Delta(delta), shape)
            }
            Self::Conv(conv) => {
                let conv = conv.check(&format!("{name}.conv"), hidden)?;
                let shape = StateShape::Conv(conv.shape);
                (StateNet::Conv(conv), shape)
            }
        };
        Ok(StateLayer { net, shape, index: 0 })
    }
}

/// Where a key head's outputs of the input projection begin.
#[derive(Clone, Copy)]
pub(crate) struct KeyHeadPlaces {
    query: usize,
    key: usize,
    value: usize,
    /// Gates z of its value heads, `[shared, value_dim]`.
    pub(crate) gate: usize,
    /// b of each value head.
    pub(crate) b: usize,
    /// a of each value head.
    pub(crate) a: usize,
}

impl DeltaShape {
    /// Returns where the outputs of key head `head` begin. `by_key_head` is the layout as in [`DeltaWeights`].
    pub(crate) fn places(&self, head: usize, by_key_head: bool) -> KeyHeadPlaces {
        let (dim, shared) = (self.key_dim, self.shared());
        let (keys, values, gates) = (self.key_heads * dim, shared * self.value_dim, self.conv_dim() + self.inner());
        if by_key_head {
            let (query, b) = (head * 2 * (dim + values), gates + head * 2 * shared);
            let value = query + 2 * dim;
            return KeyHeadPlaces { query, key: query + dim, value, gate: value + values, b, a: b + shared };
        }
        let (query, value, b) = (head * dim, 2 * keys + head * values, gates + head * shared);
        let gate = self.conv_dim() + head * values;
        KeyHeadPlaces { query, key: keys + query, value, gate, b, a: b + self.value_heads }
    }
}

impl KeyHeadPlaces {
    /// Copies the key head's features of q, k and v to `out` `[width]`, with zeros after them.
    pub(crate) fn gather(&self, shape: &DeltaShape, features: &[f32], out: &mut [f32]) {
        let (dim, values) = (shape.key_dim, shape.shared() * shape.value_dim);
        let (query, rest) = out.split_at_mut(dim);
        let (key, rest) = rest.split_at_mut(dim);
        let (value, padding) = rest.split_at_mut(values);
        query.copy_from_slice(&features[self.query..][..dim]);
        key.copy_from_slice(&features[self.key..][..dim]);
        value.copy_from_slice(&features[self.value..][..values]);
        padding.fill(0.0);
    }
}
