//! The gated activation of the MLP (Shazeer 2020, eq. 6). No projection.

use super::element::{Element, Vector};
use super::exp::exp;
use crate::isa::{Kernel, LANES, Simd};

/// `out = gate / (1 + e^-gate) * up`
pub(crate) struct SiluMul<'a> {
    pub(crate) gate: &'a [f32],
    /// As many.
    pub(crate) up: &'a [f32],
    /// Zeros behind the last element.
    pub(crate) out: &'a mut [Vector],
}

impl Kernel for SiluMul<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let ((gates, gate_tail), (ups, up_tail)) = (self.gate.as_chunks::<LANES>(), self.up.as_chunks::<LANES>());
        for ((gate, up), out) in gates.iter().zip(ups).zip(self.out.iter_mut()) {
            s.store(silu_mul(s, s.load(gate), s.load(up)), out);
        }
        if let (false, Some(out)) = (gate_tail.is_empty(), self.out.last_mut()) {
            // Of the zeros behind them come zeros.
            s.store(silu_mul(s, f32::load_tail(s, gate_tail), f32::load_tail(s, up_tail)), out);
        }
    }
}

#[inline(always)]
fn silu_mul<S: Simd>(s: S, gate: S::V, up: S::V) -> S::V {
    let negative = s.sub(s.splat(0.0), gate);
    s.mul(s.div(gate, s.add(s.splat(1.0), exp(s, negative))), up)
}
