//! Rows rounded to pairs of bf16 numbers.

use specrs_cpu_kernels::{Isa, LANES, PAIRS, RoundPairs, Vector};

/// Absolute value below which numbers of rows become zeros: 2^-40.
const LEAST_ROW: f32 = 9.094_947e-13;

/// Checks rounding to the nearest bf16, ties to even. Tiny numbers become positive zeros. Both layouts hold the
/// same pairs.
#[test]
fn rows_are_rounded_and_paired() {
    let tie = |bits: u32| f32::from_bits(bits << 16 | 0x8000);
    let given = [
        (1.0, 1.0),
        (1.0 + 1.0 / 512.0, 1.0),
        (tie(0x3F80), 1.0),
        (tie(0x3F81), 1.0 + 1.0 / 64.0),
        (-tie(0x3F81), -1.0 - 1.0 / 64.0),
        (LEAST_ROW, LEAST_ROW),
        (-LEAST_ROW, -LEAST_ROW),
        (LEAST_ROW * 0.9999, 0.0),
        (-LEAST_ROW * 0.9999, 0.0),
        (f32::MIN_POSITIVE / 2.0, 0.0),
        (f32::INFINITY, f32::INFINITY),
        (f32::MAX, f32::INFINITY),
    ];
    let x: [f32; PAIRS] = std::array::from_fn(|i| given[i % given.len()].0);
    let nan = std::array::from_fn(|i| if i == 3 { f32::NAN } else { x[i] });
    for (x, nan_at) in [(x, PAIRS), (nan, 3)] {
        for isa in Isa::available() {
            let mut vectors: [Vector; 2] = std::array::from_fn(|v| std::array::from_fn(|i| x[v * LANES + i]));
            RoundPairs { x: &mut vectors }.run(isa);
            for i in 0..PAIRS {
                let found = if isa.name() == "portable" || isa.has_dots() {
                    let bits = vectors[0][i / 2].to_bits();
                    f32::from_bits(if i % 2 == 0 { bits << 16 } else { bits & 0xFFFF_0000 })
                } else {
                    vectors[1 - i % 2][i / 2]
                };
                let expected = given[i % given.len()].1;
                let right = if i == nan_at { found.is_nan() } else { found.to_bits() == expected.to_bits() };
                assert!(right, "{}: {i}: {found:?}", isa.name());
            }
        }
    }
}
