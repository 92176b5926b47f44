//! From weights to INT8 by output or INT4 by group: symmetric, each weight to the nearest code. Reads no file.
//!
//! A scale is the least bf16 at which the largest weight of its group has a code, so a weight is off by at most half of it.

use crate::error::{Error, Result, check_len};
use crate::linear::{INT4_UNIT, check_groups};
use crate::memory::Bf16;
use crate::weights::Values;

/// A weight of this size or above has no scale at which fp32 holds its code times the scale.
const TOO_LARGE: f32 = 1.701_411_8e38; // 2^127

/// 1.5 * 2^52: adding it rounds to an integer, ties to even.
const ROUND: f64 = 6_755_399_441_055_744.0;

/// Where weights come from, and the share of the work that a thread takes.
struct Source<'a> {
    name: &'a str,
    weight: &'a Values,
    inputs: usize,
    /// Weights that share a scale, which lie side by side.
    group: usize,
    /// The code of the largest.
    largest: f32,
    threads: usize,
}

/// Writes `weight` `[outputs, inputs]` as INT8, as [`Weight::Int8`](crate::Weight) lies, by `threads` threads.
///
/// # Errors
/// Where a slice has another length, or a weight is not finite or 2^127 and above. `name` is the error's field.
pub fn quantize_int8(
    name: &str,
    weight: &Values,
    inputs: usize,
    codes: &mut [i8],
    scales: &mut [Bf16],
    threads: usize,
) -> Result<()> {
    check_len(name, weight.len(), scales.len() * inputs)?;
    check_len("codes", codes.len(), weight.len())?;
    let source = Source { name, weight, inputs, group: inputs, largest: 127.0, threads };
    source.groups(codes, scales, inputs, <[i8]>::copy_from_slice)
}

/// Writes `weight` `[outputs, inputs]` as INT4, as [`Weight::Int4`](crate::Weight) lies, by `threads` threads. Groups are
/// as many as there are scales.
///
/// # Errors
/// As [`quantize_int8`]; where the groups are not of a multiple of 32 inputs.
pub fn quantize_int4(
    name: &str,
    weight: &Values,
    inputs: usize,
    codes: &mut [u8],
    scales: &mut [Bf16],
    threads: usize,
) -> Result<()> {
    let outputs = weight.len() / inputs.max(1);
    check_len(name, weight.len(), outputs * inputs)?;
    check_groups("scales", scales.len(), outputs, inputs, INT4_UNIT)?;
    check_len("codes", codes.len(), weight.len() / 2)?;
    let group = weight.len() / scales.len().max(1);
    let source = Source { name, weight, inputs, group, largest: 7.0, threads };
    source.groups(codes, scales, group / 2, |out, codes| {
        for (out, codes) in out.chunks_exact_mut(INT4_UNIT / 2).zip(codes.chunks_exact(INT4_UNIT)) {
            let (low, high) = codes.split_at(INT4_UNIT / 2);
            for ((out, low), high) in out.iter_mut().zip(low).zip(high) {
                *out = (low + 8) as u8 | ((high + 8) as u8) << 4;
            }
        }
    })
}

impl Source<'_> {
    /// Quantizes all groups, of which each has `packed` elements of `codes`; `pack` writes them.
    fn groups<T: Send>(
        &self,
        codes: &mut [T],
        scales: &mut [Bf16],
        packed: usize,
        pack: impl Fn(&mut [T], &[i8]) + Sync,
    ) -> Result<()> {
        if codes.is_empty() {
            return Ok(());
        }
        let share = scales.len().div_ceil(self.threads.max(1));
        std::thread::scope(|scope| {
            let pack = &pack;
            let shares = codes.chunks_mut(share * packed).zip(scales.chunks_mut(share)).enumerate();
            let work = |(i, (codes, scales)): (usize, (&mut [T], &mut [Bf16]))| -> Result<()> {
                let (mut x, mut q) = (vec![0.0; self.group], vec![0; self.group]);
                for (j, (codes, scale)) in codes.chunks_mut(packed).zip(scales).enumerate() {
                    let start = (i * share + j) * self.group;
                    self.weight.expand(start, &mut x);
                    *scale = self.group(start, &x, &mut q)?;
                    pack(codes, &q);
                }
                Ok(())
            };
            let threads: Vec<_> = shares.map(|share| scope.spawn(move || work(share))).collect();
            threads.into_iter().try_for_each(|thread| thread.join().expect("quantizing does not panic"))
        })
    }

    /// The codes of one group, and their scale. `start` is its first weight.
    fn group(&self, start: usize, x: &[f32], codes: &mut [i8]) -> Result<Bf16> {
        if let Some(i) = x.iter().position(|x| x.is_nan() || x.abs() >= TOO_LARGE) {
            let (row, column) = ((start + i) / self.inputs, (start + i) % self.inputs);
            return Err(Error::invalid(format!("{}[{row}, {column}]", self.name), x[i], "a number of less than 2^127"));
        }
        let scale = scale(x.iter().fold(0.0, |largest: f32, x| largest.max(x.abs())), self.largest);
        if scale == Bf16(0) {
            codes.fill(0);
            return Ok(scale);
        }
        // In f64 a quotient is on the side of a tie that it is on.
        let s = f64::from(scale.to_f32());
        for (code, x) in codes.iter_mut().zip(x) {
            *code = ((f64::from(*x) / s + ROUND) - ROUND) as i8;
        }
        Ok(scale)
    }
}

/// The least bf16 whose `largest` multiple, which is exact, is at least `x`.
fn scale(x: f32, largest: f32) -> Bf16 {
    let nearest = Bf16::from_f32(x / largest);
    if nearest.to_f32() * largest < x { Bf16(nearest.0 + 1) } else { nearest }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scales_are_the_least() {
        let tiny = f32::from_bits(1);
        for x in [0.0, tiny, 1e-39, 1e-38, 0.999_999, 1.0, 127.0, 127.000_01, 3.0, 1e38, TOO_LARGE.next_down()] {
            for largest in [7.0, 127.0] {
                let found = scale(x, largest);
                assert!(found.to_f32() * largest >= x && (found.to_f32() * largest).is_finite(), "{x:e}");
                assert!(found == Bf16(0) || Bf16(found.0 - 1).to_f32() * largest < x, "{x:e} {largest}");
            }
        }
    }
}
