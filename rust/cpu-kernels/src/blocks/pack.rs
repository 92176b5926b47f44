//! Packing: from the blocks of a file, or from integers and their scales, to the layout of [`Packed`].

use super::types::Block;
use super::{BLOCK, BlockType, Format, Minima, Packed, Scales};
use crate::error::{Error, Result, check_len};
use crate::isa::LANES;
use crate::memory::{Bf16, Line, Pages, from_f16, to_f16};
use crate::quantize::check_groups;

/// Memory of a strip that is being filled.
struct Strip<'a> {
    format: Format,
    codes: &'a mut [Line],
    halves: &'a mut [u16],
    subs: &'a mut [i8],
}

impl Packed {
    /// Packs the rows of a file with `threads` threads. `blocks` is `[outputs, inputs]` in bytes, and `order[o]` is the
    /// row of output `o`; without `order`, rows keep their order. Errors call the matrix `name`.
    ///
    /// # Errors
    /// Where `inputs` are no whole blocks, `blocks` has another length, `order` names a row that does not exist, or a
    /// scale is not finite.
    pub fn new(
        name: &str,
        kind: BlockType,
        blocks: &[u8],
        inputs: usize,
        order: Option<&[usize]>,
        threads: usize,
    ) -> Result<Self> {
        let (bytes, numbers) = (kind.bytes(), kind.numbers());
        if inputs == 0 || !inputs.is_multiple_of(numbers) {
            return Err(Error::invalid(format!("{name}'s inputs"), inputs, format!("a multiple of {numbers}")));
        }
        let row = inputs / numbers * bytes;
        let outputs = order.map_or(blocks.len() / row, <[usize]>::len);
        check_len(&format!("{name}'s blocks"), blocks.len(), outputs * row)?;
        if let Some(from) = order.and_then(|order| order.iter().find(|&&from| from >= outputs)) {
            return Err(Error::invalid(format!("{name}'s order"), from, format!("a row below {outputs}")));
        }
        let mut made = Self::empty(kind.name(), kind.format(), outputs, inputs);
        made.fill(threads, |strip, output| {
            let (lane, from) = (output % LANES, order.map_or(output, |order| order[output]));
            for (i, block) in blocks[from * row..][..row].chunks_exact(bytes).enumerate() {
                let block = kind.read(block);
                if !strip.format.is_finite(&block) {
                    let field = format!("{name}'s scale of row {from}, block {i}");
                    return Err(Error::invalid(field, "not finite", "a finite number"));
                }
                strip.put_block(lane, i * numbers / BLOCK, numbers / BLOCK, &block);
            }
            Ok(())
        })?;
        Ok(made)
    }

    /// Packs the integers `values` `[outputs, inputs]` with `scales`, with `threads` threads.
    ///
    /// Scales are stored as bf16 or fp16 if that holds them exactly. The matrix then becomes INT4 if in every group the
    /// integers differ by less than 16. With fp32 scales it becomes INT4 if all integers are from -8 to 7. Otherwise it
    /// becomes INT8. Errors call the matrix `name`.
    ///
    /// # Errors
    /// Where groups are no multiple of 32 inputs, a scale is not finite, or INT8 does not hold the integers.
    pub fn grouped(name: &str, values: &[i16], inputs: usize, scales: &[f32], threads: usize) -> Result<Self> {
        let outputs = values.len() / inputs.max(1);
        check_len(&format!("{name}'s values"), values.len(), outputs * inputs)?;
        if values.is_empty() {
            return Err(Error::invalid(format!("{name}'s values"), "0 elements", "at least 1 element"));
        }
        check_groups(&format!("{name}'s scales"), scales.len(), outputs, inputs, BLOCK)?;
        if let Some(i) = scales.iter().position(|scale| !scale.is_finite()) {
            return Err(Error::invalid(format!("{name}'s scales"), scales[i], "a finite number"));
        }
        let group = values.len() / scales.len();
        let ranges: Vec<(i16, i16)> = values.chunks_exact(group).map(range).collect();
        let (mut low, mut high, mut width) = (i16::MAX, i16::MIN, 0);
        for &(least, most) in &ranges {
            (low, high) = (low.min(least), high.max(most));
            width = width.max(i32::from(most) - i32::from(least));
        }
        if low < -128 || high > 127 {
            let given = format!("integers from {low} to {high}");
            return Err(Error::invalid(format!("{name}'s values"), given, "integers from -128 to 127"));
        }
        let (kind, format) = {
            let shift = (group / BLOCK).trailing_zeros();
            let bits = smallest(scales);
            match () {
                () if low >= -8 && high <= 7 => ("INT4", Format::integers(4, 8, bits, shift)),
                // A scale of 24 bits times a zero point would be rounded.
                () if width < 16 && bits != Scales::F32 => {
                    ("INT4", Format { minima: Minima::Zeros, ..Format::integers(4, 0, bits, shift) })
                }
                () => ("INT8", Format::integers(8, 0, bits, shift)),
            }
        };
        let mut made = Self::empty(kind, format, outputs, inputs);
        let (groups, inputs_of_slot) = (inputs / group, BLOCK << format.shift);
        made.fill(threads, |strip, output| {
            let lane = output % LANES;
            for slot in 0..inputs / inputs_of_slot {
                let of = output * groups + slot * inputs_of_slot / group;
                let zero = if format.minima == Minima::Zeros { ranges[of].0 } else { 0 };
                let taken = if format.minima == Minima::Zeros { zero } else { -(format.offset as i16) };
                strip.put_scale(lane, slot, scales[of], zero as i8);
                let first = output * inputs + slot * inputs_of_slot;
                for (i, values) in values[first..][..inputs_of_slot].as_chunks::<BLOCK>().0.iter().enumerate() {
                    strip.put_codes(lane, (slot << format.shift) + i, &values.map(|q| (q - taken) as u8));
                }
            }
            Ok(())
        })?;
        Ok(made)
    }

    fn empty(kind: &'static str, format: Format, outputs: usize, inputs: usize) -> Self {
        let (strips, blocks) = (outputs.div_ceil(LANES), inputs / BLOCK);
        let scales = strips * (blocks >> format.shift) * LANES;
        Self {
            kind,
            format,
            outputs,
            inputs,
            codes: Pages::zeroed(strips * blocks * format.lines()),
            halves: Pages::zeroed(scales * format.halves_per_scale()),
            subs: Pages::zeroed(scales * format.subs_per_scale()),
            order: None,
        }
    }

    /// Calls `put` for each output with the strip that it belongs to. Strips are shared out among `threads` threads.
    fn fill(&mut self, threads: usize, put: impl Fn(&mut Strip<'_>, usize) -> Result<()> + Sync) -> Result<()> {
        let (strips, outputs, format) = (self.strips(), self.outputs, self.format);
        let each = |len: usize| len / strips.max(1);
        let (codes, halves, subs) = (each(self.codes.len()), each(self.halves.len()), each(self.subs.len()));
        let mut rest = (&mut *self.codes, &mut *self.halves, &mut *self.subs);
        let mut memory: Vec<Strip<'_>> = Vec::with_capacity(strips);
        for _ in 0..strips {
            let (a, b, c) = (rest.0.split_at_mut(codes), rest.1.split_at_mut(halves), rest.2.split_at_mut(subs));
            memory.push(Strip { format, codes: a.0, halves: b.0, subs: c.0 });
            rest = (a.1, b.1, c.1);
        }
        let share = strips.div_ceil(threads.max(1)).max(1);
        std::thread::scope(|scope| {
            let put = &put;
            let work = move |first: usize, strips: &mut [Strip<'_>]| -> Result<()> {
                for (i, strip) in strips.iter_mut().enumerate() {
                    let start = (first + i) * LANES;
                    (start..outputs.min(start + LANES)).try_for_each(|output| put(strip, output))?;
                }
                Ok(())
            };
            let shares = memory.chunks_mut(share).enumerate();
            let threads: Vec<_> = shares.map(|(i, strips)| scope.spawn(move || work(i * share, strips))).collect();
            threads.into_iter().try_for_each(|thread| thread.join().expect("packing does not panic"))
        })
    }
}

impl Strip<'_> {
    /// Writes the codes of a packed block of one output, a word of four inputs at a time.
    fn put_codes(&mut self, lane: usize, block: usize, codes: &[u8; BLOCK]) {
        let format = self.format;
        let lines = &mut self.codes[block * format.lines()..][..format.lines()];
        let runs: [u32; BLOCK / 4] = std::array::from_fn(|run| u32::from_le_bytes(codes.as_chunks().0[run]));
        // Bits `from .. from + width` of each code.
        let mut put = |first: usize, from: u32, width: u32| {
            let mask = 0x0101_0101 * ((1_u32 << width) - 1);
            for (line, runs) in lines[first..].iter_mut().zip(runs.chunks(8 / width as usize)) {
                let bits = |(i, run): (usize, &u32)| (run >> from & mask) << (i as u32 * width);
                let word = runs.iter().enumerate().map(bits).fold(0, |word, bits| word | bits);
                line.0.as_chunks_mut().0[lane] = word.to_le_bytes();
            }
        };
        put(0, 0, format.low);
        if format.high > 0 {
            put(format.low_lines(), format.low, format.high);
        }
    }

    /// Writes a block of a file, which becomes `count` packed blocks from `first` on.
    fn put_block(&mut self, lane: usize, first: usize, count: usize, block: &Block) {
        let (format, groups, stored) = (self.format, self.format.groups(), self.format.stored());
        for (i, codes) in block.codes.as_chunks().0.iter().take(count).enumerate() {
            self.put_codes(lane, first + i, codes);
            if format.scales == Scales::Sub {
                for group in 0..groups {
                    let at = ((first + i) * stored * groups + group) * LANES + lane;
                    self.subs[at] = block.sub_scales[i * groups + group];
                    if format.minima == Minima::Stored {
                        self.subs[at + groups * LANES] = block.sub_mins[i * groups + group];
                    }
                }
            }
        }
        let at = (first >> format.shift) * stored * LANES + lane;
        self.halves[at] = block.scale;
        if format.minima == Minima::Stored {
            self.halves[at + LANES] = block.min;
        }
    }

    /// Writes a scale, and the zero point if the format has zero points.
    fn put_scale(&mut self, lane: usize, slot: usize, scale: f32, zero: i8) {
        let bits = match self.format.scales {
            Scales::F32 => [(scale.to_bits() >> 16) as u16, scale.to_bits() as u16],
            Scales::Bf16 => [(scale.to_bits() >> 16) as u16, 0],
            Scales::F16 | Scales::Sub => [to_f16(scale), 0],
        };
        let halves = self.format.halves_per_scale();
        for (i, bits) in bits.into_iter().take(halves).enumerate() {
            self.halves[(slot * halves + i) * LANES + lane] = bits;
        }
        if self.format.minima == Minima::Zeros {
            self.subs[slot * LANES + lane] = zero;
        }
    }
}

impl Format {
    /// Returns whether all weights of a block are finite for any codes.
    fn is_finite(self, block: &Block) -> bool {
        // Only a bf16 scale is ever so large that a code's number overflows.
        let largest = self.table.into_iter().flatten().map(|q| q.unsigned_abs()).max().unwrap_or(1);
        let number = |bits| match self.scales {
            Scales::Bf16 => f32::from_bits(u32::from(bits) << 16) * f32::from(largest),
            Scales::F16 | Scales::F32 | Scales::Sub => from_f16(bits),
        };
        number(block.scale).is_finite() && number(block.min).is_finite()
    }
}

/// Returns the smallest and the largest of some integers.
fn range(values: &[i16]) -> (i16, i16) {
    values.iter().fold((i16::MAX, i16::MIN), |(low, high), &q| (low.min(q), high.max(q)))
}

/// Returns the smallest type that holds all scales exactly.
fn smallest(scales: &[f32]) -> Scales {
    let hold = |rounded: fn(f32) -> f32| scales.iter().all(|&x| rounded(x).to_bits() == x.to_bits());
    if hold(|x| Bf16::from_f32(x).to_f32()) {
        Scales::Bf16
    } else if hold(|x| from_f16(to_f16(x))) {
        Scales::F16
    } else {
        Scales::F32
    }
}
