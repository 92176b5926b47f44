//! Conversion of fp16 numbers.

/// Converts the bits of an fp16 number to f32, exactly.
pub(crate) fn from_f16(bits: u16) -> f32 {
    let (sign, rest) = (u32::from(bits & 0x8000) << 16, u32::from(bits & 0x7FFF));
    let magnitude = if rest >= 0x7C00 {
        f32::from_bits(0x7F80_0000 | (rest & 0x3FF) << 13)
    } else {
        // The exponent's bias is 112 more; a subnormal number is brought there by a product.
        f32::from_bits(rest << 13) * f32::from_bits((254 - 15) << 23)
    };
    f32::from_bits(sign | magnitude.to_bits())
}

/// Returns the bits of the fp16 number nearest to `x`, ties to even. NaN becomes a NaN.
pub(crate) fn to_f16(x: f32) -> u16 {
    let (sign, size) = ((x.to_bits() >> 16) as u16 & 0x8000, x.abs());
    let bits = if size.is_nan() {
        0x7E00
    } else if size >= 65_520.0 {
        0x7C00
    } else if size < 2_f32.powi(-14) {
        // The unit of subnormal numbers is 2^-24; a sum with 2^23 rounds to an integer.
        ((size * 2_f32.powi(24) + 8_388_608.0).to_bits() & 0x7FF) as u16
    } else {
        let rebased = size.to_bits() - (112 << 23);
        ((rebased + 0xFFF + (rebased >> 13 & 1)) >> 13) as u16
    };
    sign | bits
}
