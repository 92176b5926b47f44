//! The exponential inside kernels, seen through the two whose results are hardly more than it.

use specrs_cpu_kernels::{Isa, Route, Sigmoid};

/// Returns `e^x / (1 + e^x)` and `1 / (1 + e^x)` for x < 0: the weights of two experts.
fn weights(isa: Isa, x: f32) -> [f32; 2] {
    let (mut chosen, mut shares) = ([9; 2], [f32::NAN; 2]);
    Route {
        logits: &mut [x, 0.0],
        normalized: false,
        sigmoids: false,
        bias: &[],
        chosen: &mut chosen,
        shares: &mut shares,
    }
    .run(isa);
    assert_eq!(chosen, [1, 0]);
    [shares[1], shares[0]]
}

/// Returns `1 / (1 + e^x)` of sixteen x.
fn below_one(isa: Isa, x: [f32; 16]) -> [f32; 16] {
    let mut out = [[f32::NAN; 16]];
    Sigmoid { x: &x.map(|x| -x), out: &mut out }.run(isa);
    out[0]
}

#[test]
fn exponentials_are_accurate_and_the_same_everywhere() {
    let sets = Isa::available();
    for i in 1..86_990 {
        let x = i as f32 * -1e-3;
        let found = weights(sets[0], x);
        let same = |&isa: &Isa| weights(isa, x).map(f32::to_bits) == found.map(f32::to_bits);
        assert!(i % 16 > 0 || sets.iter().all(same), "{x}");
        let (quotient, exact) = (f64::from(found[0]) / f64::from(found[1]), f64::from(x).exp());
        let error = (quotient - exact).abs() / exact;
        // Where 1 + e^x is 1, the weight is the exponential itself. Elsewhere quotients are rounded, too.
        let bound = 2_f64.powi(if x < -17.0 { -23 } else { -22 });
        assert!(error < bound, "e^{x} is off by {error:e} of itself");
    }
    for i in (0..87_000_i32).step_by(16) {
        let x = std::array::from_fn(|j| (i + j as i32) as f32 * 1e-3);
        let found = below_one(sets[0], x);
        assert!(sets.iter().all(|&isa| below_one(isa, x).map(f32::to_bits) == found.map(f32::to_bits)), "{x:?}");
        for (x, found) in x.iter().zip(found) {
            let exact = 1.0 / (1.0 + f64::from(*x).exp());
            let error = (f64::from(found) - exact).abs() / exact;
            assert!(error < 2_f64.powi(-22), "1 / (1 + e^{x}) is off by {error:e} of itself");
        }
    }
}

#[test]
fn ends_are_as_documented() {
    for isa in Isa::available() {
        for x in [-87.1, -1e30, f32::NEG_INFINITY] {
            assert_eq!(weights(isa, x).map(f32::to_bits), [0.0_f32, 1.0].map(f32::to_bits), "{}: {x}", isa.name());
        }
        assert_eq!(weights(isa, -1e-30).map(f32::to_bits), [0.5_f32, 0.5].map(f32::to_bits));
        let mut x = [0.0; 16];
        x[..5].copy_from_slice(&[-0.0, f32::NEG_INFINITY, f32::NAN, 1e30, f32::INFINITY]);
        let y = below_one(isa, x);
        assert_eq!((y[0], y[1], y[5]), (0.5, 1.0, 0.5), "{}", isa.name());
        // The largest exponential is finite, so that no quotient is 0.
        assert!(y[2].is_nan() && y[3] > 0.0 && y[3] < 1e-38 && y[4] > 0.0, "{}: {y:?}", isa.name());
    }
}
