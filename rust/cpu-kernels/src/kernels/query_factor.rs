//! Factors of queries by position, in f64 by products and sums that are rounded one by one, so that every machine has
//! the same bits.

use super::gates::ln_1p;

/// Returns `1 + beta ln(1 + floor(position / length))` of a position of at least 0, rounded once. It is 1 at positions
/// below `length`.
pub fn query_factor(position: i64, beta: f32, length: usize) -> f32 {
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
