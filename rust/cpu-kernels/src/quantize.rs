//! Quantization of weights to integers with scales: symmetric, each weight to the nearest integer.
//!
//! A scale is the least bf16 at which the largest weight of its group has a code, so a weight is off by at most half of
//! it.

use crate::error::{Error, Result, check_len};
use crate::memory::Bf16;
use crate::values::Values;

/// Weights of at least this absolute value are rejected: their scale times the largest integer may overflow fp32.
const TOO_LARGE: f32 = 1.701_411_8e38; // 2^127

/// 1.5 * 2^52: adding it rounds to an integer, ties to even.
const ROUND: f64 = 6_755_399_441_055_744.0;

/// Weights to be quantized.
struct Source<'a> {
    name: &'a str,
    weight: &'a Values,
    inputs: usize,
    /// Integer of the largest weight of a group.
    largest: f32,
}

/// Writes `weight` `[outputs, inputs]` as integers from `-largest` to `largest` times scales, with `threads` threads.
/// The weights of each output form as many groups of equal size as `scales` has numbers for an output.
///
/// # Errors
/// Where a slice has another length, groups are not of equal size, or a weight is not finite or 2^127 and above. `name`
/// is the error's field. `codes` and `scales` may be written in part then.
pub fn quantize(
    name: &str,
    weight: &Values,
    inputs: usize,
    largest: i8,
    codes: &mut [i8],
    scales: &mut [Bf16],
    threads: usize,
) -> Result<()> {
    let outputs = weight.len() / inputs.max(1);
    check_len(name, weight.len(), outputs * inputs)?;
    check_groups("scales", scales.len(), outputs, inputs, 1)?;
    check_len("codes", codes.len(), weight.len())?;
    if codes.is_empty() {
        return Ok(());
    }
    Source { name, weight, inputs, largest: f32::from(largest) }.groups(codes, scales, threads)
}

/// Rejects scales that make no groups of a multiple of `unit` inputs.
pub(crate) fn check_groups(name: &str, scales: usize, outputs: usize, inputs: usize, unit: usize) -> Result<()> {
    let groups = scales / outputs.max(1);
    if groups * outputs == scales && (groups > 0 || outputs == 0) && inputs.is_multiple_of(groups.max(1) * unit) {
        return Ok(());
    }
    let allowed =
        format!("{outputs} for each group of inputs, with groups that are a multiple of {unit} and divide {inputs}");
    Err(Error::invalid(name, format!("{scales} elements"), allowed))
}

impl Source<'_> {
    /// Quantizes all groups, in as many shares as there are threads.
    fn groups(&self, codes: &mut [i8], scales: &mut [Bf16], threads: usize) -> Result<()> {
        let (group, share) = (codes.len() / scales.len(), scales.len().div_ceil(threads.max(1)));
        std::thread::scope(|scope| {
            let work = move |first: usize, codes: &mut [i8], scales: &mut [Bf16]| -> Result<()> {
                let mut x = vec![0.0; group];
                for (i, (codes, scale)) in codes.chunks_mut(group).zip(scales).enumerate() {
                    let start = (first + i) * group;
                    self.weight.expand(start, &mut x);
                    *scale = self.group(start, &x, codes)?;
                }
                Ok(())
            };
            let shares = codes.chunks_mut(share * group).zip(scales.chunks_mut(share)).enumerate();
            let threads: Vec<_> =
                shares.map(|(i, (codes, scales))| scope.spawn(move || work(i * share, codes, scales))).collect();
            threads.into_iter().try_for_each(|thread| thread.join().expect("quantizing does not panic"))
        })
    }

    /// Writes the integers of one group and returns their scale. `start` is its first weight.
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

/// Returns the smallest bf16 whose `largest` multiple, which is exact, is at least `x`.
fn scale(x: f32, largest: f32) -> Bf16 {
    let nearest = Bf16::from_f32(x / largest);
    if nearest.to_f32() * largest < x { Bf16(nearest.0 + 1) } else { nearest }
}
