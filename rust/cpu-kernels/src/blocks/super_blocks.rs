//! Quantization of weights to `Q4_K`, the super-blocks of llama.cpp's files: 256 weights with codes of 4 bits. Reads no
//! file.
//!
//! A super-block has eight blocks of 32 weights. A weight of a block becomes `scale * code - minimum` with a code from
//! 0 to 15. Scales and minima are integers from 0 to 63, times two fp16 numbers of the super-block.
//!
//! 1. Each block gets the scale and minimum with the least squared error, by least squares for the codes of some ranges.
//!    All weights count alike, because no activations are known.
//! 2. The largest scale and the largest minimum determine the two fp16 numbers.
//! 3. Each block takes the pair of integers, among those next to its scale and minimum, with the least squared error.
//!
//! Sums have a fixed order of eight lanes, so all instruction sets give the same bytes.

// Loops over arrays, which become vectors.
#![allow(clippy::needless_range_loop)]

use super::{BLOCK, BlockType, SUPER};
use crate::error::{Error, Result, check_len};
use crate::memory::{from_f16, to_f16};
use crate::values::Values;

/// Number of blocks in a super-block.
const BLOCKS: usize = SUPER / BLOCK;
/// Largest integer of a scale or minimum.
const TOP: f32 = 63.0;
/// Largest code of a weight.
const TOP_CODE: f32 = 15.0;
/// Largest absolute value of a weight. For a larger one, fp16 cannot hold the minimum of its block.
const LARGEST: f32 = TOP * 65_504.0;
/// Blocks whose weights are all smaller than this become zeros. The smallest fp16 number is larger.
const LEAST: f32 = 1e-30;
/// Candidates for a block's range: shares of the range by which they begin after its smallest weight and end before its
/// largest. Negative shares extend the range. Weights outside a candidate's range get the code at its end.
const CUTS: [(f32, f32); 9] = [
    (0.0, 0.0),
    (-0.03, -0.03),
    (0.03, 0.03),
    (0.06, 0.06),
    (0.1, 0.1),
    (0.0, 0.08),
    (0.08, 0.0),
    (0.0, 0.16),
    (0.16, 0.0),
];
/// `x + SHIFT - SHIFT` is the integer nearest to x, ties to even, for small x.
const SHIFT: f32 = 12_582_912.0;
const LANES: usize = 8;

type Weights = [f32; BLOCK];

/// Scale and minimum of a block: code q stands for `scale * q - min`.
#[derive(Clone, Copy)]
struct Line {
    scale: f32,
    min: f32,
}

/// Writes `weight` `[outputs, inputs]` as blocks of `Q4_K` into `blocks` `[outputs, bytes]`, with `threads` threads.
///
/// # Errors
/// If `inputs` is no multiple of 256, a slice has another length, a weight is not finite, or its absolute value is
/// above 4,126,752, the largest number of the format. `blocks` may be written in part then. `name` is the error's
/// field.
pub fn quantize_q4_k(name: &str, weight: &Values, inputs: usize, blocks: &mut [u8], threads: usize) -> Result<()> {
    if inputs == 0 || !inputs.is_multiple_of(SUPER) {
        return Err(Error::invalid(format!("{name}'s inputs"), inputs, format!("a multiple of {SUPER}")));
    }
    check_len(name, weight.len(), weight.len() / inputs * inputs)?;
    check_len("blocks", blocks.len(), weight.len() / SUPER * BlockType::Q4_K.bytes())?;
    write(name, weight, inputs, blocks, threads)
}

/// Writes all super-blocks. Each thread does one share of them.
fn write(name: &str, weight: &Values, inputs: usize, blocks: &mut [u8], threads: usize) -> Result<()> {
    let bytes = BlockType::Q4_K.bytes();
    let share = (weight.len() / SUPER).div_ceil(threads.max(1)).max(1);
    std::thread::scope(|scope| {
        let work = move |first: usize, blocks: &mut [u8]| -> Result<()> {
            let mut x = [[0.0; BLOCK]; BLOCKS];
            for (i, block) in blocks.chunks_exact_mut(bytes).enumerate() {
                let start = (first + i) * SUPER;
                weight.expand(start, x.as_flattened_mut());
                if let Some(at) = x.as_flattened().iter().position(|x| x.is_nan() || x.abs() > LARGEST) {
                    let (row, column) = ((start + at) / inputs, (start + at) % inputs);
                    let allowed = format!("a number of at most {LARGEST}");
                    return Err(Error::invalid(format!("{name}[{row}, {column}]"), x.as_flattened()[at], allowed));
                }
                quantize(&x, block);
            }
            Ok(())
        };
        let shares = blocks.chunks_mut(share * bytes).enumerate();
        let threads: Vec<_> = shares.map(|(i, blocks)| scope.spawn(move || work(i * share, blocks))).collect();
        threads.into_iter().try_for_each(|thread| thread.join().expect("quantizing does not panic"))
    })
}

/// Writes one super-block.
fn quantize(x: &[Weights; BLOCKS], out: &mut [u8]) {
    let lines = x.each_ref().map(fit);
    let largest = |of: fn(&Line) -> f32| lines.iter().map(of).fold(0.0, f32::max);
    let (of_scales, of_mins) = (unit(largest(|line| line.scale)), unit(largest(|line| line.min)));
    let units = Line { scale: from_f16(of_scales), min: from_f16(of_mins) };
    out.fill(0);
    out[..2].copy_from_slice(&of_scales.to_le_bytes());
    out[2..4].copy_from_slice(&of_mins.to_le_bytes());
    for (i, (x, line)) in x.iter().zip(&lines).enumerate() {
        let (scale, min) = integers(x, *line, units);
        put_six_bits(&mut out[4..16], i, scale as u8, min as u8);
        let codes = codes(x, Line { scale: units.scale * scale, min: units.min * min });
        for (byte, code) in out[16 + i / 2 * BLOCK..][..BLOCK].iter_mut().zip(codes) {
            *byte |= (code as u8) << (i % 2 * 4);
        }
    }
}

/// Returns the bits of the fp16 number whose 63rd multiple is about `largest`. Among subnormal numbers, which are far
/// apart, it is the next larger one, so that one of the integers from 32 to 63 is near each number.
fn unit(largest: f32) -> u16 {
    let nearest = to_f16(largest / TOP);
    if from_f16(nearest) * TOP < 0.999 * largest { nearest + 1 } else { nearest }
}

/// Returns the scale and minimum with the least squared error among the candidates.
fn fit(x: &Weights) -> Line {
    let (low, high) = x.iter().fold((0.0_f32, f32::MIN), |(low, high), &x| (low.min(x), high.max(x)));
    let (range, size) = (high - low, high.abs().max(-low));
    if size < LEAST {
        return Line { scale: 0.0, min: 0.0 };
    }
    if range < LEAST {
        return Line { scale: 0.0, min: -low }; // one negative number for all
    }
    let x = x.map(|x| x / size); // so that no square overflows or vanishes
    let (low, range) = (low / size, range / size);
    let cut = |before: f32, after: f32| Line {
        scale: range * (1.0 - before - after) / TOP_CODE,
        min: (-low - before * range).max(0.0),
    };
    let mut best = cut(0.0, 0.0);
    let mut least = error(&x, best);
    let mut consider = |line: Option<Line>| {
        let Some(line) = line else { return best };
        let error = error(&x, line);
        if error < least {
            (best, least) = (line, error);
        }
        best
    };
    for (before, after) in CUTS {
        consider(solve(&x, cut(before, after)));
    }
    // The codes of the best line may allow a better one.
    let best = consider(None);
    let best = consider(solve(&x, best));
    Line { scale: best.scale * size, min: (best.min * size).min(LARGEST) }
}

/// Returns the line with the least squared error for the codes that the weights have with `line`. `None` if all codes
/// are equal, or if the line does not rise.
fn solve(x: &Weights, line: Line) -> Option<Line> {
    let q = codes(x, line);
    let (x_sum, q_sum) = (sum(|i| x[i]), sum(|i| q[i]));
    let (xq_sum, qq_sum) = (sum(|i| x[i] * q[i]), sum(|i| q[i] * q[i]));
    let count = BLOCK as f32;
    let spread = count * qq_sum - q_sum * q_sum;
    if spread <= 0.0 {
        return None;
    }
    let scale = (count * xq_sum - x_sum * q_sum) / spread;
    let min = (scale * q_sum - x_sum) / count;
    let line = if min >= 0.0 { Line { scale, min } } else { Line { scale: xq_sum / qq_sum, min: 0.0 } };
    (line.scale > 0.0).then_some(line)
}

/// Returns the integers of scale and minimum, next to those of `line`, with the least squared error. `units` are their
/// factors.
fn integers(x: &Weights, line: Line, units: Line) -> (f32, f32) {
    let near = |number: f32, unit: f32| {
        let nearest = if unit > 0.0 { (number / unit).round() } else { 0.0 };
        [0.0, -1.0, 1.0].map(|step| (nearest + step).clamp(0.0, if unit > 0.0 { TOP } else { 0.0 }))
    };
    let (scales, mins) = (near(line.scale, units.scale), near(line.min, units.min));
    let mut best = (f32::INFINITY, (scales[0], mins[0]));
    // Relative to the block's size, as in `fit`.
    let size = x.iter().fold(LEAST, |size, x| size.max(x.abs()));
    let x = x.map(|x| x / size);
    for scale in scales {
        for min in mins {
            let error = error(&x, Line { scale: units.scale * scale / size, min: units.min * min / size });
            if error < best.0 {
                best = (error, (scale, min));
            }
        }
    }
    best.1
}

/// Returns the nearest code of each weight.
#[inline(always)]
fn codes(x: &Weights, line: Line) -> Weights {
    let factor = if line.scale > 0.0 { 1.0 / line.scale } else { 0.0 };
    let mut q = [0.0; BLOCK];
    for i in 0..BLOCK {
        q[i] = ((x[i] + line.min) * factor).clamp(0.0, TOP_CODE) + SHIFT - SHIFT;
    }
    q
}

/// Returns the sum of the squared errors of weights at their nearest codes.
#[inline(always)]
fn error(x: &Weights, line: Line) -> f32 {
    let q = codes(x, line);
    sum(|i| {
        let error = line.scale * q[i] - line.min - x[i];
        error * error
    })
}

/// Returns the sum of a block's terms: eight lanes, then halves of them.
#[inline(always)]
fn sum(term: impl Fn(usize) -> f32) -> f32 {
    let mut lanes = [0.0; LANES];
    for first in (0..BLOCK).step_by(LANES) {
        for lane in 0..LANES {
            lanes[lane] += term(first + lane);
        }
    }
    for half in [4, 2, 1] {
        for lane in 0..half {
            lanes[lane] += lanes[lane + half];
        }
    }
    lanes[0]
}

/// Writes scale and minimum `i` of eight, of 6 bits each, into 12 bytes.
fn put_six_bits(bytes: &mut [u8], i: usize, scale: u8, min: u8) {
    if i < 4 {
        bytes[i] |= scale;
        bytes[i + 4] |= min;
        return;
    }
    bytes[i + 4] |= scale & 15 | (min & 15) << 4;
    bytes[i - 4] |= scale >> 4 << 6;
    bytes[i] |= min >> 4 << 6;
}
