//! The gated activation of the MLP (Shazeer 2020, eq. 6). No projection.

use super::element::Element;
use super::exp::exp;
use crate::isa::{Kernel, LANES, Simd, Vector};

/// Computes `out = f(gate) * up`, with f(x) = `x / (1 + e^-x)`, or GELU's approximation with tanh.
pub(crate) struct GateMul<'a, const GELU: bool> {
    pub(crate) gate: &'a [f32],
    /// Values to multiply, one for each element of `gate`.
    pub(crate) up: &'a [f32],
    /// Results, with zeros after the last element.
    pub(crate) out: &'a mut [Vector],
}

impl<const GELU: bool> Kernel for GateMul<'_, GELU> {
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
pub(crate) struct ClampedGateMul<'a> {
    pub(crate) gate: &'a [f32],
    /// Values to multiply, one for each element of `gate`.
    pub(crate) up: &'a [f32],
    pub(crate) alpha: f32,
    pub(crate) limit: f32,
    /// Results, with zeros after the last element.
    pub(crate) out: &'a mut [Vector],
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
pub(crate) struct Softcap<'a> {
    pub(crate) x: &'a mut [f32],
    pub(crate) cap: f32,
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::isa::Isa;

    /// Checks GELU against float64, and that all instruction sets give the same bits. The allowed error grows with the
    /// sigmoid's argument.
    #[test]
    fn gelu_is_accurate_and_the_same_everywhere() {
        for i in (-90_000..90_000_i32).step_by(LANES) {
            let x: [f32; LANES] = std::array::from_fn(|j| (i + j as i32) as f32 * 1e-4);
            let of = |isa: Isa| {
                let mut out = [[f32::NAN; LANES]];
                isa.run(GateMul::<true> { gate: &x, up: &[1.0; LANES], out: &mut out });
                out[0]
            };
            let sets = Isa::available();
            let found = of(sets[0]);
            assert!(sets.iter().all(|&isa| of(isa).map(f32::to_bits) == found.map(f32::to_bits)), "{x:?}");
            for (&x, found) in x.iter().zip(found) {
                let x = f64::from(x);
                let u = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044_715 * x * x * x);
                let exact = x / (1.0 + (-2.0 * u).exp());
                let bound = 2_f64.powi(-23) * (4.0 + 4.0 * u.abs()) * exact.abs();
                assert!((f64::from(found) - exact).abs() <= bound + 1e-37, "{x}: {found} for {exact}");
            }
        }
    }

    #[test]
    fn clamped_gates_are_accurate_and_the_same_everywhere() {
        let (alpha, limit) = (1.702_f32, 7.0_f32);
        for i in (-120_000..120_000_i32).step_by(LANES) {
            let gate: [f32; LANES] = std::array::from_fn(|j| (i + j as i32) as f32 * 1e-4);
            let up: [f32; LANES] = std::array::from_fn(|j| ((i * 7919 + j as i32) % 90_000) as f32 * 1e-4);
            let of = |isa: Isa| {
                let mut out = [[f32::NAN; LANES]; 2];
                // Whole vectors and one that is not.
                isa.run(ClampedGateMul { gate: &gate, up: &up, alpha, limit, out: &mut out[..1] });
                isa.run(ClampedGateMul { gate: &gate[..5], up: &up[..5], alpha, limit, out: &mut out[1..] });
                out
            };
            let sets = Isa::available();
            let found = of(sets[0]);
            let bits = |x: [[f32; LANES]; 2]| x.map(|x| x.map(f32::to_bits));
            assert!(sets.iter().all(|&isa| bits(of(isa)) == bits(found)), "{gate:?}");
            assert!(found[1][..5] == found[0][..5] && found[1][5..] == [0.0; LANES - 5]);
            for ((&gate, &up), found) in gate.iter().zip(&up).zip(found[0]) {
                let (g, u) = (f64::from(gate.min(limit)), f64::from(up.clamp(-limit, limit)));
                let exact = g / (1.0 + (-f64::from(alpha) * g).exp()) * (u + 1.0);
                // 1 + u may be near 0: it is rounded at the size of u.
                let bound = 2_f64.powi(-23) * ((6.0 + 2.0 * g.abs()) * exact.abs() + g.abs() * u.abs());
                assert!((f64::from(found) - exact).abs() <= bound + 1e-37, "{gate} {up}: {found} for {exact}");
            }
        }
        for isa in Isa::available() {
            let mut out = [[0.0; LANES]];
            isa.run(ClampedGateMul { gate: &[f32::NAN, 1.0], up: &[1.0, f32::NAN], alpha, limit, out: &mut out });
            assert!(out[0][0].is_nan() && out[0][1].is_nan(), "{}", isa.name());
        }
    }

    #[test]
    fn softcaps_are_accurate_and_the_same_everywhere() {
        let cap = 30.0_f32;
        for i in (-200_000..200_000_i32).step_by(LANES) {
            let x: [f32; LANES] = std::array::from_fn(|j| (i + j as i32) as f32 * 1e-3);
            let of = |isa: Isa| {
                let (mut out, mut tail) = (x, [0.0; 5]);
                isa.run(Softcap { x: &mut out, cap });
                tail.copy_from_slice(&x[..5]);
                isa.run(Softcap { x: &mut tail, cap });
                assert_eq!(tail.map(f32::to_bits)[..], out.map(f32::to_bits)[..5]);
                out
            };
            let sets = Isa::available();
            let found = of(sets[0]);
            assert!(sets.iter().all(|&isa| of(isa).map(f32::to_bits) == found.map(f32::to_bits)), "{x:?}");
            for (x, found) in x.iter().zip(found) {
                let exact = f64::from(cap) * (f64::from(*x) / f64::from(cap)).tanh();
                assert!((f64::from(found) - exact).abs() < 1e-5, "{x}: {found} for {exact}");
            }
        }
        for isa in Isa::available() {
            let mut x = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 0.0];
            isa.run(Softcap { x: &mut x, cap });
            assert!(x[0].is_nan() && x[1..] == [cap, -cap, 0.0], "{}: {x:?}", isa.name());
        }
    }

    #[test]
    fn ends_of_gelu() {
        let mut x = [0.0_f32; LANES];
        x[..6].copy_from_slice(&[0.0, 1e30, -1e30, f32::NAN, f32::INFINITY, -20.0]);
        for isa in Isa::available() {
            let mut out = [[f32::NAN; LANES]];
            isa.run(GateMul::<true> { gate: &x, up: &[1.0; LANES], out: &mut out });
            let [y] = out;
            assert!(y[0].abs() == 0.0 && y[1] > 9e29 && y[3].is_nan() && y[4] > f32::MAX, "{}: {y:?}", isa.name());
            assert!(y[2].abs() < 1e-7 && y[5].abs() < 1e-30, "{}: {y:?}", isa.name());
        }
    }
}
