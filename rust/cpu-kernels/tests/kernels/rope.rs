//! Sines and cosines of positions against float64.

use specrs_cpu_kernels::{Angles, Isa};

#[test]
fn sines_and_cosines_are_accurate_at_every_position() {
    let frequencies = [1.0_f32, 0.749_894_2, 0.1, 1.0e-3, 1.0e-6];
    for position in (0..131_072).chain([1 << 20]) {
        let (mut cos, mut sin) = ([f32::NAN; 5], [f32::NAN; 5]);
        Angles { position, frequencies: &frequencies, magnitude: 1.0, cos: &mut cos, sin: &mut sin }.run(Isa::detect());
        for (i, frequency) in frequencies.iter().enumerate() {
            let x = position as f32 * frequency;
            let (exact_sin, exact_cos) = f64::from(x).sin_cos();
            for (found, exact) in [(sin[i], exact_sin), (cos[i], exact_cos)] {
                let error = (f64::from(found) - exact).abs();
                assert!(error <= 2_f64.powi(-24) * exact.abs().max(1e-4), "{x}: {found} for {exact}");
            }
        }
    }
}
