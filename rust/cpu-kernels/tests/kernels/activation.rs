//! Activations against float64.

use specrs_cpu_kernels::{Activation, GateMul, Isa, LANES, Softcap};

/// Checks GELU against float64, and that all instruction sets give the same bits. The allowed error grows with the
/// sigmoid's argument.
#[test]
fn gelu_is_accurate_and_the_same_everywhere() {
    for i in (-90_000..90_000_i32).step_by(LANES) {
        let x: [f32; LANES] = std::array::from_fn(|j| (i + j as i32) as f32 * 1e-4);
        let of = |isa: Isa| {
            let mut out = [[f32::NAN; LANES]];
            GateMul { activation: Activation::GeluTanh, gate: &x, up: &[1.0; LANES], out: &mut out }.run(isa);
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
    let activation = Activation::ClampedSwiglu { alpha, limit };
    for i in (-120_000..120_000_i32).step_by(LANES) {
        let gate: [f32; LANES] = std::array::from_fn(|j| (i + j as i32) as f32 * 1e-4);
        let up: [f32; LANES] = std::array::from_fn(|j| ((i * 7919 + j as i32) % 90_000) as f32 * 1e-4);
        let of = |isa: Isa| {
            let mut out = [[f32::NAN; LANES]; 2];
            // Whole vectors and one that is not.
            GateMul { activation, gate: &gate, up: &up, out: &mut out[..1] }.run(isa);
            GateMul { activation, gate: &gate[..5], up: &up[..5], out: &mut out[1..] }.run(isa);
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
        GateMul { activation, gate: &[f32::NAN, 1.0], up: &[1.0, f32::NAN], out: &mut out }.run(isa);
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
            Softcap { x: &mut out, cap }.run(isa);
            tail.copy_from_slice(&x[..5]);
            Softcap { x: &mut tail, cap }.run(isa);
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
        Softcap { x: &mut x, cap }.run(isa);
        assert!(x[0].is_nan() && x[1..] == [cap, -cap, 0.0], "{}: {x:?}", isa.name());
    }
}

#[test]
fn ends_of_gelu() {
    let mut x = [0.0_f32; LANES];
    x[..6].copy_from_slice(&[0.0, 1e30, -1e30, f32::NAN, f32::INFINITY, -20.0]);
    for isa in Isa::available() {
        let mut out = [[f32::NAN; LANES]];
        GateMul { activation: Activation::GeluTanh, gate: &x, up: &[1.0; LANES], out: &mut out }.run(isa);
        let [y] = out;
        assert!(y[0].abs() == 0.0 && y[1] > 9e29 && y[3].is_nan() && y[4] > f32::MAX, "{}: {y:?}", isa.name());
        assert!(y[2].abs() < 1e-7 && y[5].abs() < 1e-30, "{}: {y:?}", isa.name());
    }
}
