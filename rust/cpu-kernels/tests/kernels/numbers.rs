//! Numbers of narrow types by their definition, and of a random generator.

/// Returns the fp16 number with these bits (IEEE 754, binary16).
pub(crate) fn f16(bits: u16) -> f32 {
    let (exponent, fraction) = (i32::from(bits >> 10 & 31), f32::from(bits & 1023));
    let size = match exponent {
        0 => fraction * 2_f32.powi(-24),
        31 if fraction > 0.0 => f32::NAN,
        31 => f32::INFINITY,
        _ => (1024.0 + fraction) * 2_f32.powi(exponent - 25),
    };
    if bits >> 15 == 0 { size } else { -size }
}

/// Returns the number of an FP8 code with 4 bits of exponent and 3 of fraction (OCP 2023, OFP8).
pub(crate) fn e4m3(code: u8) -> f32 {
    let (exponent, fraction) = (i32::from(code >> 3 & 15), f32::from(code & 7));
    let size = match exponent {
        0 => fraction * 2_f32.powi(-9),
        15 if fraction >= 7.0 => f32::NAN,
        _ => (8.0 + fraction) * 2_f32.powi(exponent - 10),
    };
    if code >> 7 == 0 { size } else { -size }
}

/// Returns the number of an FP8 code with 5 bits of exponent and 2 of fraction (OCP 2023, OFP8).
pub(crate) fn e5m2(code: u8) -> f32 {
    f16(u16::from(code) << 8)
}

/// Random number generator.
pub(crate) struct Numbers(pub(crate) u64);

impl Numbers {
    pub(crate) fn next(&mut self) -> u32 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as u32
    }
}
