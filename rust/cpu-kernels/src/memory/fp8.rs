//! 8-bit floats of quantized KV caches (OCP 2023, OFP8). Applies no scale.

/// Float with 4 bits of exponent and 3 of fraction: up to 448, no infinity.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(transparent)]
pub struct E4m3(pub u8);

/// Float with 5 bits of exponent and 2 of fraction: up to 57,344; infinities are read and never written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(transparent)]
pub struct E5m2(pub u8);

/// Returns the code nearest to `x`, ties to even. Numbers whose absolute value is above `largest` get its code; NaN
/// stays NaN.
fn encode<const FRACTION: u32>(x: f32, largest: f32) -> u8 {
    let sign = (x.to_bits() >> 24) as u8 & 0x80;
    if x.is_nan() {
        return sign | 0x7F;
    }
    let bias = (1 << (6 - FRACTION)) - 1;
    let size = x.abs().min(largest);
    // The least that is no subnormal, whose exponent is 1.
    let least = f32::from_bits((128 - bias) << 23);
    if size < least {
        let unit = f32::from_bits((128 - bias - FRACTION) << 23);
        return sign | (size / unit).round_ties_even() as u8;
    }
    let (bits, dropped) = (size.to_bits(), 23 - FRACTION);
    let rounded = bits + (1 << (dropped - 1)) - 1 + (bits >> dropped & 1);
    sign | ((rounded >> dropped) - ((127 - bias) << FRACTION)) as u8
}

impl E4m3 {
    /// Converts to the nearest code, ties to even, at most the largest; NaN stays NaN.
    #[inline]
    pub fn from_f32(x: f32) -> Self {
        Self(encode::<3>(x, 448.0))
    }
}

impl E5m2 {
    /// Converts to the nearest code, ties to even, at most the largest finite one; NaN stays NaN.
    #[inline]
    pub fn from_f32(x: f32) -> Self {
        Self(encode::<2>(x, 57_344.0))
    }
}
