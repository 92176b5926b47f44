//! Quantized weights in the packed layout that kernels read, with sixteen outputs side by side.

mod pack;
mod super_blocks;
mod types;

pub use super_blocks::quantize_q4_k;
pub use types::BlockType;
pub(crate) use types::{BLOCK, Format, Minima, SUPER, Scales};

use crate::error::{Error, Result};
use crate::isa::LANES;
use crate::memory::{Line, Pages, from_f16};

/// A matrix `[outputs, inputs]` of integers with scales. Together they are exactly the weights of the file.
///
/// Outputs are stored in strips of sixteen, the last strip padded with zeros. Each 32 inputs of a strip are a packed
/// block: lines of codes, then lines of their high bits. Byte `4 o + k` of a line belongs to output `o`. Inputs
/// `4 r .. 4 r + 4` of a block are run `r`; byte k has input `4 r + k`. A line has one run of 8-bit codes, or two runs
/// of 4-bit codes with the earlier one in the lower halves of the bytes, or four runs of 2-bit codes. With one high bit
/// per code, bit r of a byte belongs to run r. With two high bits, run r has the two bits from `2 (r % 4)` on in line
/// `r / 4`.
pub struct Packed {
    /// GGML's name of the block type, or INT4 or INT8.
    kind: &'static str,
    format: Format,
    outputs: usize,
    inputs: usize,
    /// Quantized weights (codes), `[strips, blocks, lines of a block]`.
    codes: Pages<Line>,
    /// Bits of 16-bit scales and minima, `[strips, scales, halves of a scale, 16]`; there is a scale for every `1 <<
    /// shift` blocks.
    halves: Pages<u16>,
    /// Eight-bit scales and minima. With [`Scales::Sub`] `[strips, blocks, 1 or 2 with minima, groups of a block, 16]`;
    /// with [`Minima::Zeros`] `[strips, scales, 16]`.
    subs: Pages<i8>,
    /// Index of the input at each place of an output's codes, `[inputs]`; `None` if inputs are in their own order.
    order: Option<Box<[u32]>>,
}

impl Packed {
    /// Returns the matrix with inputs in another order: place i of the codes belongs to input `order[i]`. Products
    /// round rows in this order. Errors call the matrix `name`.
    ///
    /// # Errors
    /// If `order` does not have each input once.
    pub fn with_order(mut self, name: &str, order: &[usize]) -> Result<Self> {
        let mut seen = vec![false; self.inputs];
        let is_new = |&input: &usize| seen.get_mut(input).is_some_and(|seen| !std::mem::replace(seen, true));
        if order.len() != self.inputs || !order.iter().all(is_new) {
            let allowed = format!("each input from 0 to {} once", self.inputs - 1);
            return Err(Error::invalid(format!("{name}'s order"), format!("{} inputs", order.len()), allowed));
        }
        self.order = Some(order.iter().map(|&input| input as u32).collect());
        Ok(self)
    }

    /// Returns the input at each place of an output's codes; `None` if inputs are in their own order.
    pub fn order(&self) -> Option<&[u32]> {
        self.order.as_deref()
    }

    /// Returns GGML's name of the block type, or INT4 or INT8.
    pub fn kind(&self) -> &'static str {
        self.kind
    }

    /// Returns the number of output features.
    pub fn outputs(&self) -> usize {
        self.outputs
    }

    /// Returns the number of input features.
    pub fn inputs(&self) -> usize {
        self.inputs
    }

    /// Returns the number of bytes of the matrix in memory.
    pub fn num_bytes(&self) -> usize {
        let order = self.order.as_deref().map_or(0, size_of_val);
        size_of_val(&*self.codes) + self.halves.len() * 2 + self.subs.len() + order
    }

    pub(crate) fn format(&self) -> Format {
        self.format
    }

    pub(crate) fn blocks(&self) -> usize {
        self.inputs / BLOCK
    }

    fn strips(&self) -> usize {
        self.outputs.div_ceil(LANES)
    }

    /// Returns the lines of codes of a strip.
    pub(crate) fn codes(&self, strip: usize) -> &[Line] {
        let lines = self.blocks() * self.format.lines();
        &self.codes[strip * lines..][..lines]
    }

    /// Returns scales and minima of a strip: bits of 16-bit numbers, and 8-bit integers.
    pub(crate) fn scales(&self, strip: usize) -> (&[u16], &[i8]) {
        let (halves, subs) = (self.halves.len() / self.strips(), self.subs.len() / self.strips());
        (&self.halves[strip * halves..][..halves], &self.subs[strip * subs..][..subs])
    }

    /// Dequantizes an output into `out` `[inputs]`: `scale * q + minimum`, rounded once.
    pub fn row(&self, output: usize, out: &mut [f32]) {
        let (strip, lane) = (output / LANES, output % LANES);
        let (format, (halves, subs)) = (self.format, self.scales(strip));
        for (block, lines) in self.codes(strip).chunks_exact(format.lines()).enumerate() {
            for input in 0..BLOCK {
                let group = if format.halves { input / 16 } else { 0 };
                let (scale, min) = format.numbers(halves, subs, block, group, lane);
                let q = format.code(lines, lane, input) as f32;
                let place = block * BLOCK + input;
                let input = self.order().map_or(place, |order| order[place] as usize);
                out[input] = if format.minima == Minima::None { scale * q } else { scale.mul_add(q, min) };
            }
        }
    }
}

impl Format {
    /// Returns the integer q that the code of input `input` in a packed block means.
    fn code(self, lines: &[Line], lane: usize, input: usize) -> i32 {
        let (run, byte) = (input / 4, 4 * lane + input % 4);
        let bits = |first: usize, width: u32| {
            let per_line = 8 / width as usize;
            let shift = (run % per_line) as u32 * width;
            u32::from(lines[first + run / per_line].0[byte]) >> shift & ((1 << width) - 1)
        };
        let low = bits(0, self.low);
        let high = if self.high > 0 { bits(self.low_lines(), self.high) << self.low } else { 0 };
        let code = low | high;
        match self.table {
            Some(table) => i32::from(table[code as usize]),
            None if self.low == 8 => i32::from((code as u8).cast_signed()),
            None => code as i32 - self.offset,
        }
    }

    /// Returns scale and minimum of a group, from the scales of a strip.
    fn numbers(self, halves: &[u16], subs: &[i8], block: usize, group: usize, lane: usize) -> (f32, f32) {
        let (slot, stored) = (block >> self.shift, self.stored());
        let half = |i: usize| halves[(slot * self.halves_per_scale() + i) * LANES + lane];
        let number = |i: usize| match self.scales {
            Scales::F16 => from_f16(half(i)),
            Scales::Bf16 => f32::from_bits(u32::from(half(i)) << 16),
            Scales::F32 => f32::from_bits(u32::from(half(0)) << 16 | u32::from(half(1))),
            Scales::Sub => {
                let sub = subs[((block * stored + i) * self.groups() + group) * LANES + lane];
                from_f16(half(i)) * f32::from(sub)
            }
        };
        let min = match self.minima {
            Minima::None => 0.0,
            Minima::Stored => number(1),
            Minima::Zeros => number(0) * f32::from(subs[slot * LANES + lane]),
        };
        (number(0), min)
    }
}
