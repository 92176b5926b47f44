//! Gates of delta nets: one number for each head and row, in f64 by products and sums that are rounded one by one, so
//! that every machine has the same bits.

/// Returns e^x; 0 below -700, and e^700 above 700. NaN stays NaN.
///
/// `x = n ln 2 + r` with `|r| <= ln 2 / 2`, and the Taylor series of e^r to r^13, which is within 2^-60 of it.
fn exp(x: f64) -> f64 {
    // Adding 1.5 * 2^52 rounds to an integer and leaves it in the low bits.
    const ROUND: f64 = 6_755_399_441_055_744.0;
    // ln 2 in two parts: the first has so few bits that its product with n is exact.
    const LN_2_HIGH: f64 = 0.693_147_180_369_123_8;
    const LN_2_LOW: f64 = 1.908_214_929_270_587_7e-10;
    if x < -700.0 {
        return 0.0;
    }
    let x = if x > 700.0 { 700.0 } else { x };
    let shifted = x * std::f64::consts::LOG2_E + ROUND;
    let n = shifted - ROUND;
    let r = (x - n * LN_2_HIGH) - n * LN_2_LOW;
    let mut series = 1.0 / 6_227_020_800.0;
    for factorial in
        [479_001_600.0, 39_916_800.0, 3_628_800.0, 362_880.0, 40_320.0, 5_040.0, 720.0, 120.0, 24.0, 6.0, 2.0, 1.0, 1.0]
    {
        series = series * r + 1.0 / factorial;
    }
    series * f64::from_bits(((1023 + n as i64) as u64) << 52)
}

/// Returns `ln(1 + y)` of y in [0, 1]: `2 artanh(y / (2 + y))` as its series to the 25th power, which is within 2^-42
/// of it.
pub(super) fn ln_1p(y: f64) -> f64 {
    let t = y / (2.0 + y);
    let square = t * t;
    let mut series = 1.0 / 25.0;
    for odd in [23.0, 21.0, 19.0, 17.0, 15.0, 13.0, 11.0, 9.0, 7.0, 5.0, 3.0, 1.0] {
        series = series * square + 1.0 / odd;
    }
    2.0 * t * series
}

/// Returns `1 / (1 + e^-x)`.
pub fn sigmoid(x: f32) -> f32 {
    (1.0 / (1.0 + exp(-f64::from(x)))) as f32
}

/// Returns the rate of decay of a head, `e^A`.
pub fn rate(a_log: f32) -> f64 {
    exp(f64::from(a_log))
}

/// Returns the factor by which a head's state decays in a row: `exp(-rate softplus(a + dt_bias))`.
pub fn decay(a: f32, dt_bias: f32, rate: f64) -> f32 {
    let x = f64::from(a) + f64::from(dt_bias);
    let softplus = if x > 0.0 { x } else { 0.0 } + ln_1p(exp(-x.abs()));
    exp(-rate * softplus) as f32
}
