//! Causal convolution of single channels, as delta nets and short convolutions have it.
//!
//! A sum has one accumulator for each channel and ascending positions, so that neither the instruction set nor the split
//! of the channels changes a bit.

use super::delta::silu;
use crate::isa::{Kernel, Simd, Vector};

/// Computes `out = silu(sum over j of weight[j] inputs[row + j])` of each channel, for some rows.
pub struct ConvSilu<'a> {
    /// Inputs of the rows and of the `kernel - 1` rows before them, `[rows + kernel - 1, vectors]`. `kernel` is the
    /// width of the convolution.
    pub inputs: &'a [Vector],
    /// Weights, `[kernel, vectors]`.
    pub weight: &'a [Vector],
    /// Number of vectors of sixteen channels.
    pub vectors: usize,
    /// Results, `[rows, vectors]`.
    pub out: &'a mut [Vector],
}

impl Kernel for ConvSilu<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Self { inputs, weight, vectors, out } = self;
        for (row, out) in out.chunks_exact_mut(vectors).enumerate() {
            for (v, out) in out.iter_mut().enumerate() {
                s.store(silu(s, convolved(s, &inputs[row * vectors + v..], &weight[v..], vectors)), out);
            }
        }
    }
}

/// Computes `gated = gated * sum over j of weight[j] inputs[row + j]` of each channel, in place, for some rows.
pub struct GatedConv<'a> {
    /// Inputs as in [`ConvSilu`].
    pub inputs: &'a [Vector],
    /// Weights, `[kernel, vectors]`.
    pub weight: &'a [Vector],
    /// Number of vectors of sixteen channels.
    pub vectors: usize,
    /// Gates of the rows, and then the results, `[rows, vectors]`.
    pub gated: &'a mut [Vector],
}

impl Kernel for GatedConv<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Self { inputs, weight, vectors, gated } = self;
        for (row, gated) in gated.chunks_exact_mut(vectors).enumerate() {
            for (v, gated) in gated.iter_mut().enumerate() {
                let sum = convolved(s, &inputs[row * vectors + v..], &weight[v..], vectors);
                s.store(s.mul(s.load(gated), sum), gated);
            }
        }
    }
}

/// Returns the sums of one vector of channels, whose inputs and weights lie `stride` vectors apart.
#[inline(always)]
fn convolved<S: Simd>(s: S, inputs: &[Vector], weight: &[Vector], stride: usize) -> S::V {
    let mut terms = inputs.iter().step_by(stride).zip(weight.iter().step_by(stride));
    let mut sum = s.splat(0.0);
    if let Some((x, weight)) = terms.next() {
        sum = s.mul(s.load(x), s.load(weight));
    }
    for (x, weight) in terms {
        sum = s.fma(s.load(x), s.load(weight), sum);
    }
    sum
}
