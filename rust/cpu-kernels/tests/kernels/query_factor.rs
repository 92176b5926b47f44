//! Factors of queries against float64.

use specrs_cpu_kernels::query_factor;

#[test]
fn factors_are_accurate_and_grow_at_multiples_of_the_length() {
    for (beta, length) in [(0.1_f32, 16_384), (0.7, 9), (3.0, 1)] {
        for steps in (0..300).chain([1 << 20, (1 << 31) + 7]) {
            let exact = 1.0 + f64::from(beta) * (1.0 + steps as f64).ln();
            for position in [steps * length, steps * length + length - 1] {
                let error = (f64::from(query_factor(position, beta, length as usize)) - exact).abs();
                assert!(error <= 2_f64.powi(-24) * exact, "{position} of {length}");
            }
        }
        assert!(query_factor(length - 1, beta, length as usize).to_bits() == 1.0_f32.to_bits());
    }
}
