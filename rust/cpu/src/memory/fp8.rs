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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::Element;

    /// Checks that every code is converted to itself, and numbers between two codes to the nearer one, with ties to
    /// even.
    fn check<T: Element>(encode: impl Fn(f32) -> u8, number: impl Fn(u8) -> T, largest: u8) {
        let value = |code: u8| number(code).expand();
        for code in 0..=largest {
            let (x, sign) = (value(code), 0x80);
            assert_eq!((encode(x), encode(-x)), (code, code | sign), "{x}");
            if code == largest {
                continue;
            }
            let next = value(code + 1);
            let middle = f32::midpoint(x, next);
            assert!(x < next, "{x} {next}");
            assert_eq!(encode(middle), code + (code & 1), "{middle}");
            assert_eq!(encode(middle.next_down()), code, "below {middle}");
            assert_eq!(encode(middle.next_up()), code + 1, "above {middle}");
        }
        for large in [value(largest) * 1.1, 1e30, f32::INFINITY] {
            assert_eq!((encode(large), encode(-large)), (largest, largest | 0x80));
        }
        assert!(value(encode(f32::NAN)).is_nan() && value(encode(-f32::NAN)).is_nan());
        assert_eq!((encode(1e-45), encode(-1e-45), encode(-0.0)), (0, 0x80, 0x80));
    }

    #[test]
    fn codes_are_the_nearest() {
        check(|x| E4m3::from_f32(x).0, E4m3, 0x7E);
        check(|x| E5m2::from_f32(x).0, E5m2, 0x7B);
    }

    #[test]
    fn numbers_of_some_codes() {
        let e4m3 = [(0x00, 0.0), (0x01, 2_f32.powi(-9)), (0x08, 2_f32.powi(-6)), (0x38, 1.0), (0x3D, 1.625)];
        for (code, number) in [&e4m3[..], &[(0x7E, 448.0), (0xC4, -3.0), (0x83, -3.0 * 2_f32.powi(-9))]].concat() {
            assert_eq!(E4m3(code).expand().to_bits(), number.to_bits(), "{code:x}");
        }
        let e5m2 = [(0x01, 2_f32.powi(-16)), (0x04, 2_f32.powi(-14)), (0x3C, 1.0), (0x7B, 57_344.0), (0xBD, -1.25)];
        for (code, number) in e5m2 {
            assert_eq!(E5m2(code).expand().to_bits(), number.to_bits(), "{code:x}");
        }
        assert!(E4m3(0x7F).expand().is_nan() && E4m3(0xFF).expand().is_nan() && E5m2(0x7D).expand().is_nan());
        assert_eq!((E5m2(0x7C).expand(), E5m2(0xFC).expand()), (f32::INFINITY, f32::NEG_INFINITY));
    }
}
