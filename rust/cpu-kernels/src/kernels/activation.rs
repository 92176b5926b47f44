//! The gated activation of the MLP (Shazeer 2020, eq. 6). No projection.

use super::element::Element;
use super::exp::exp;
use crate::isa::{Isa, Kernel, LANES, Simd, Vector};

/// Activation function that the MLP applies to its gate.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum Activation {
    /// `SiLU`: `x / (1 + e^-x)`
    #[default]
    Silu,
    /// GELU, in its approximation with tanh.
    GeluTanh,
    /// Clamped `SwiGLU` (`OpenAI` 2025, gpt-oss): `x / (1 + e^(-alpha x))` of a gate x of at most `limit`, times 1 plus
    /// the value, which is clamped to -limit to limit.
    ClampedSwiglu {
        /// Factor of the sigmoid's argument.
        alpha: f32,
        /// Limit of gates and values.
        limit: f32,
    },
}

/// Computes `out = f(gate) * up` of an activation function f, or what it is documented to compute instead.
pub struct GateMul<'a> {
    /// Activation function.
    pub activation: Activation,
    /// Gates.
    pub gate: &'a [f32],
    /// Values to multiply, one for each element of `gate`.
    pub up: &'a [f32],
    /// Results, with zeros after the last element.
    pub out: &'a mut [Vector],
}

impl GateMul<'_> {
    /// Runs the kernel with these instructions.
    pub fn run(self, isa: Isa) {
        let Self { activation, gate, up, out } = self;
        match activation {
            Activation::Silu => isa.run(PlainGateMul::<false> { gate, up, out }),
            Activation::GeluTanh => isa.run(PlainGateMul::<true> { gate, up, out }),
            Activation::ClampedSwiglu { alpha, limit } => isa.run(ClampedGateMul { gate, up, alpha, limit, out }),
        }
    }
}

/// Computes `out = f(gate) * up`, with f(x) = `x / (1 + e^-x)`, or GELU's approximation with tanh.
struct PlainGateMul<'a, const GELU: bool> {
    gate: &'a [f32],
    /// Values to multiply, one for each element of `gate`.
    up: &'a [f32],
    /// Results, with zeros after the last element.
    out: &'a mut [Vector],
}

impl<const GELU: bool> Kernel for PlainGateMul<'_, GELU> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let ((gates, gate_tail), (ups, up_tail)) = (self.gate.as_chunks::<LANES>(), self.up.as_chunks::<LANES>());
        for ((gate, up), out) in gates.iter().zip(ups).zip(self.out.iter_mut()) {
            s.store(gate_mul::<S, GELU>(s, s.load(gate), s.load(up)), out);
        }
        if let (false, Some(out)) = (gate_tail.is_empty(), self.out.last_mut()) {
            // The zeros after them give zeros.
            s.store(gate_mul::<S, GELU>(s, f32::load_tail(s, gate_tail), f32::load_tail(s, up_tail)), out);
        }
    }
}

#[inline(always)]
fn gate_mul<S: Simd, const GELU: bool>(s: S, gate: S::V, up: S::V) -> S::V {
    let negative = if GELU { s.sub(s.splat(0.0), tanh_argument(s, gate)) } else { s.sub(s.splat(0.0), gate) };
    s.mul(s.div(gate, s.add(s.splat(1.0), exp(s, negative))), up)
}

/// Computes `out = min(gate, limit) / (1 + e^(-alpha gate)) (up + 1)`, with the gate clamped in both places and `up`
/// clamped to -limit to limit.
struct ClampedGateMul<'a> {
    gate: &'a [f32],
    /// Values to multiply, one for each element of `gate`.
    up: &'a [f32],
    alpha: f32,
    limit: f32,
    /// Results, with zeros after the last element.
    out: &'a mut [Vector],
}

impl Kernel for ClampedGateMul<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let (alpha, limit) = (s.splat(-self.alpha), s.splat(self.limit));
        let (least, one) = (s.splat(-self.limit), s.splat(1.0));
        for ((gate, up), out) in self.gate.chunks(LANES).zip(self.up.chunks(LANES)).zip(self.out) {
            // NaN is the second operand, which is kept. The zeros after the last element give zeros.
            let gate = s.min(limit, f32::load_tail(s, gate));
            let up = s.max(least, s.min(limit, f32::load_tail(s, up)));
            let sigmoid = s.div(gate, s.add(one, exp(s, s.mul(gate, alpha))));
            s.store(s.mul(sigmoid, s.add(up, one)), out);
        }
    }
}

/// Computes `x = cap tanh(x / cap)`, as `cap (1 - 2 / (1 + e^(2x / cap)))`. NaN stays NaN.
pub struct Softcap<'a> {
    /// Numbers, overwritten.
    pub x: &'a mut [f32],
    /// Bound of the results' absolute values.
    pub cap: f32,
}

impl Kernel for Softcap<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let (one, two) = (s.splat(1.0), s.splat(2.0));
        let (cap, twice) = (s.splat(self.cap), s.splat(2.0 / self.cap));
        for x in self.x.chunks_mut(LANES) {
            let power = exp(s, s.mul(f32::load_tail(s, x), twice));
            let mut out = [0.0; LANES];
            s.store(s.mul(cap, s.sub(one, s.div(two, s.add(one, power)))), &mut out);
            x.copy_from_slice(&out[..x.len()]);
        }
    }
}

/// Returns `2 sqrt(2 / pi) (x + 0.044715 x^3)`: half of 1 + tanh(u) is 1 / (1 + e^-2u) (Hendrycks and Gimpel 2016,
/// section 2).
#[inline(always)]
fn tanh_argument<S: Simd>(s: S, x: S::V) -> S::V {
    const TWICE_ROOT: f32 = 1.595_769;
    let cubic = s.fma(s.mul(x, x), s.splat(0.044_715), s.splat(1.0));
    s.mul(s.mul(x, s.splat(TWICE_ROOT)), cubic)
}
