//! Factors of queries by position, in f64 by products and sums that are rounded one by one, so that every machine has
//! the same bits.

use super::gates::ln_1p;

/// Returns `1 + beta ln(1 + floor(position / length))` of a position of at least 0, rounded once. It is 1 at positions
/// below `length`.
pub(crate) fn query_factor(position: i64, beta: f32, length: usize) -> f32 {
    let steps = position as usize / length;
    (1.0 + f64::from(beta) * ln((1 + steps) as f64)) as f32
}

/// Returns `ln x` of a finite `x >= 1`, within 2^-42 of it. `x = 2^n m` with m in [1, 2).
fn ln(x: f64) -> f64 {
    const FRACTION: u64 = (1 << 52) - 1;
    let bits = x.to_bits();
    let n = (bits >> 52) as f64 - 1023.0;
    let m = f64::from_bits(bits & FRACTION | 1023 << 52);
    n * std::f64::consts::LN_2 + ln_1p(m - 1.0)
}

#[cfg(test)]
mod tests {
    use super::query_factor;

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
}
