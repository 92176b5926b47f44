//! The block types of GGUF files: what a block's bytes are. Knows no layout of its own and computes nothing.

/// A type of weights whose numbers are small integers with a scale for each group of 16 or 32 inputs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)] // GGML's names
#[allow(non_camel_case_types)]
pub enum BlockType {
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q8_0,
    Q2_K,
    Q3_K,
    Q4_K,
    Q5_K,
    Q6_K,
    IQ4_NL,
    IQ4_XS,
    MXFP4,
}

/// What the scales of a format are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Scales {
    /// fp16 numbers.
    F16,
    /// bf16 numbers.
    Bf16,
    /// fp32 numbers, upper halves and lower halves apart.
    F32,
    /// An integer of 8 bits for each group, times an fp16 number for each 256 inputs.
    Sub,
}

/// Minima of a format: what is added to the numbers of a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Minima {
    /// Nothing.
    None,
    /// Numbers that are stored as scales are.
    Stored,
    /// The scale times an integer of 8 bits, one for each scale: a negative zero point.
    Zeros,
}

/// How numbers come from codes: `scale * (code - offset) + minimum`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Format {
    /// Bits of a code in the first lines of a packed block: 2, 4 or 8; those of 8 are signed.
    pub(crate) low: u32,
    /// Bits of a code in the lines after them: 0, 1 or 2.
    pub(crate) high: u32,
    /// Whether a group has 16 inputs, else 32.
    pub(crate) halves: bool,
    pub(crate) minima: Minima,
    pub(crate) scales: Scales,
    /// A stored scale serves `1 << shift` packed blocks.
    pub(crate) shift: u32,
    pub(crate) offset: i32,
    /// What codes of 4 bits stand for, where it is not themselves.
    pub(crate) table: Option<&'static [i8; 16]>,
}

/// Inputs of a packed block.
pub(crate) const BLOCK: usize = 32;
/// Most inputs of a block of a file.
pub(crate) const SUPER: usize = 256;

/// Four-bit codes of `IQ4_NL` and `IQ4_XS`.
const IQ4: [i8; 16] = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];
/// Four-bit floats of the OCP Microscaling specification (E2M1), times two.
const E2M1: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

/// One block of a file, read: codes of its inputs in order, and its scales.
pub(crate) struct Block {
    pub(crate) codes: [u8; SUPER],
    /// Bits of the fp16 or bf16 scale.
    pub(crate) scale: u16,
    /// Bits of the fp16 minimum, or of what integers of minima are multiplied by.
    pub(crate) min: u16,
    /// Integers of the groups' scales.
    pub(crate) sub_scales: [i8; 16],
    /// Integers of the groups' minima.
    pub(crate) sub_mins: [i8; 16],
}

impl Format {
    /// Codes of `low` bits, scales for every `1 << shift` blocks, no minima.
    pub(crate) fn integers(low: u32, offset: i32, scales: Scales, shift: u32) -> Self {
        Self { low, high: 0, halves: false, minima: Minima::None, scales, shift, offset, table: None }
    }

    /// Whether codes stand for any signed byte.
    pub(crate) fn is_signed(self) -> bool {
        self.low == 8 || self.table.is_some()
    }

    /// The largest of the codes as unsigned bytes.
    pub(crate) fn largest_byte(self) -> i32 {
        if self.is_signed() { 255 } else { (1 << (self.low + self.high)) - 1 }
    }

    /// Groups of a packed block.
    pub(crate) fn groups(self) -> usize {
        if self.halves { 2 } else { 1 }
    }

    /// Stored numbers for each scale: 2 with stored minima.
    pub(crate) fn stored(self) -> usize {
        if self.minima == Minima::Stored { 2 } else { 1 }
    }

    /// Values of 16 bits for each scale.
    pub(crate) fn halves_per_scale(self) -> usize {
        if self.scales == Scales::F32 { 2 } else { self.stored() }
    }

    /// Integers of 8 bits for each `1 << shift` blocks.
    pub(crate) fn subs_per_scale(self) -> usize {
        match (self.scales, self.minima) {
            (Scales::Sub, _) => (self.stored() * self.groups()) << self.shift,
            (_, Minima::Zeros) => 1,
            _ => 0,
        }
    }

    /// Lines of the lower bits of a packed block.
    pub(crate) fn low_lines(self) -> usize {
        self.low as usize
    }

    /// Lines of a packed block.
    pub(crate) fn lines(self) -> usize {
        self.low_lines() + self.high as usize
    }
}

impl BlockType {
    /// All types.
    pub const ALL: [Self; 13] = [
        Self::Q4_0,
        Self::Q4_1,
        Self::Q5_0,
        Self::Q5_1,
        Self::Q8_0,
        Self::Q2_K,
        Self::Q3_K,
        Self::Q4_K,
        Self::Q5_K,
        Self::Q6_K,
        Self::IQ4_NL,
        Self::IQ4_XS,
        Self::MXFP4,
    ];

    /// GGML's name of the type.
    pub fn name(self) -> &'static str {
        match self {
            Self::Q4_0 => "Q4_0",
            Self::Q4_1 => "Q4_1",
            Self::Q5_0 => "Q5_0",
            Self::Q5_1 => "Q5_1",
            Self::Q8_0 => "Q8_0",
            Self::Q2_K => "Q2_K",
            Self::Q3_K => "Q3_K",
            Self::Q4_K => "Q4_K",
            Self::Q5_K => "Q5_K",
            Self::Q6_K => "Q6_K",
            Self::IQ4_NL => "IQ4_NL",
            Self::IQ4_XS => "IQ4_XS",
            Self::MXFP4 => "MXFP4",
        }
    }

    /// The type of GGML's name, if it is one of these.
    pub fn by_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.name() == name)
    }

    /// Inputs of a block of a file: 32, or 256.
    pub fn numbers(self) -> usize {
        if self.format().scales == Scales::Sub { SUPER } else { BLOCK }
    }

    /// Bytes of a block of a file.
    pub fn bytes(self) -> usize {
        match self {
            Self::Q4_0 | Self::IQ4_NL => 18,
            Self::Q4_1 => 20,
            Self::Q5_0 => 22,
            Self::Q5_1 => 24,
            Self::Q8_0 => 34,
            Self::Q2_K => 84,
            Self::Q3_K => 110,
            Self::Q4_K => 144,
            Self::Q5_K => 176,
            Self::Q6_K => 210,
            Self::IQ4_XS => 136,
            Self::MXFP4 => 17,
        }
    }

    pub(crate) fn format(self) -> Format {
        let plain = |low, high, offset, mins| {
            let minima = if mins { Minima::Stored } else { Minima::None };
            Format { high, minima, ..Format::integers(low, offset, Scales::F16, 0) }
        };
        let sub = |format, halves| Format { halves, scales: Scales::Sub, shift: (SUPER / BLOCK).ilog2(), ..format };
        match self {
            Self::Q4_0 => plain(4, 0, 8, false),
            Self::Q4_1 => plain(4, 0, 0, true),
            Self::Q5_0 => plain(4, 1, 16, false),
            Self::Q5_1 => plain(4, 1, 0, true),
            Self::Q8_0 => plain(8, 0, 0, false),
            Self::Q2_K => sub(plain(2, 0, 0, true), true),
            Self::Q3_K => sub(plain(2, 1, 4, false), true),
            Self::Q4_K => sub(plain(4, 0, 0, true), false),
            Self::Q5_K => sub(plain(4, 1, 0, true), false),
            Self::Q6_K => sub(plain(4, 2, 32, false), true),
            Self::IQ4_NL => Format { table: Some(&IQ4), ..plain(4, 0, 0, false) },
            Self::IQ4_XS => Format { table: Some(&IQ4), ..sub(plain(4, 0, 0, false), false) },
            Self::MXFP4 => Format { table: Some(&E2M1), scales: Scales::Bf16, ..plain(4, 0, 0, false) },
        }
    }

    /// Reads a block of a file.
    pub(crate) fn read(self, bytes: &[u8]) -> Block {
        let half = |at: usize| u16::from_le_bytes([bytes[at], bytes[at + 1]]);
        let mut of = Block { codes: [0; SUPER], scale: 0, min: 0, sub_scales: [0; 16], sub_mins: [0; 16] };
        match self {
            Self::Q4_0 | Self::IQ4_NL => {
                of.scale = half(0);
                nibbles(&bytes[2..18], &mut of.codes);
            }
            Self::Q4_1 => {
                (of.scale, of.min) = (half(0), half(2));
                nibbles(&bytes[4..20], &mut of.codes);
            }
            Self::Q5_0 | Self::Q5_1 => {
                of.scale = half(0);
                let rest = if self == Self::Q5_1 {
                    of.min = half(2);
                    &bytes[4..]
                } else {
                    &bytes[2..]
                };
                nibbles(&rest[4..20], &mut of.codes);
                let high = u32::from_le_bytes([rest[0], rest[1], rest[2], rest[3]]);
                for (i, code) in of.codes[..BLOCK].iter_mut().enumerate() {
                    *code |= ((high >> i & 1) as u8) << 4;
                }
            }
            Self::Q8_0 => {
                of.scale = half(0);
                of.codes[..BLOCK].copy_from_slice(&bytes[2..34]);
            }
            Self::Q2_K => {
                for (i, &both) in bytes[..16].iter().enumerate() {
                    (of.sub_scales[i], of.sub_mins[i]) = ((both & 15).cast_signed(), (both >> 4).cast_signed());
                }
                (of.scale, of.min) = (half(80), negated(half(82)));
                crumbs(&bytes[16..80], &mut of.codes);
            }
            Self::Q3_K => {
                of.scale = half(108);
                crumbs(&bytes[32..96], &mut of.codes);
                for (i, code) in of.codes.iter_mut().enumerate() {
                    *code |= (bytes[i % 32] >> (i / 32) & 1) << 2;
                }
                let packed = &bytes[96..108];
                for (i, sub) in of.sub_scales.iter_mut().enumerate() {
                    let low = packed[i % 8] >> (i / 8 * 4) & 15;
                    let high = packed[8 + i % 4] >> (i / 4 * 2) & 3;
                    *sub = (low | high << 4).cast_signed() - 32;
                }
            }
            Self::Q4_K | Self::Q5_K => {
                (of.scale, of.min) = (half(0), negated(half(2)));
                for i in 0..8 {
                    let (scale, min) = six_bits(&bytes[4..16], i);
                    (of.sub_scales[i], of.sub_mins[i]) = (scale.cast_signed(), min.cast_signed());
                }
                let low = &bytes[self.bytes() - 128..];
                for (i, code) in of.codes.iter_mut().enumerate() {
                    *code = low[i / 64 * 32 + i % 32] >> (i / 32 % 2 * 4) & 15;
                    if self == Self::Q5_K {
                        *code |= (bytes[16 + i % 32] >> (i / 32) & 1) << 4;
                    }
                }
            }
            Self::Q6_K => {
                of.scale = half(208);
                for (i, sub) in of.sub_scales.iter_mut().enumerate() {
                    *sub = bytes[192 + i].cast_signed();
                }
                for (i, code) in of.codes.iter_mut().enumerate() {
                    let (part, run, at) = (i / 128, i % 128 / 32, i % 32);
                    let low = bytes[part * 64 + run % 2 * 32 + at] >> (run / 2 * 4) & 15;
                    *code = low | (bytes[128 + part * 32 + at] >> (run * 2) & 3) << 4;
                }
            }
            Self::IQ4_XS => {
                of.scale = half(0);
                let high = half(2);
                for i in 0..8 {
                    let low = bytes[4 + i / 2] >> (i % 2 * 4) & 15;
                    of.sub_scales[i] = (low | ((high >> (2 * i) & 3) as u8) << 4).cast_signed() - 32;
                    nibbles(&bytes[8 + 16 * i..][..16], &mut of.codes[BLOCK * i..]);
                }
            }
            Self::MXFP4 => {
                // 2^(e - 128), because codes are twice the numbers that they stand for.
                let e = u16::from(bytes[0]);
                of.scale = match e {
                    255 => 0x7FC0,
                    0 | 1 => 0x20 << e,
                    _ => (e - 1) << 7,
                };
                nibbles(&bytes[1..17], &mut of.codes);
            }
        }
        of
    }
}

/// The bits of `-x`.
fn negated(x: u16) -> u16 {
    x ^ 0x8000
}

/// Lower halves of 16 bytes, then their upper halves.
fn nibbles(bytes: &[u8], codes: &mut [u8]) {
    for (i, byte) in bytes.iter().enumerate() {
        (codes[i], codes[i + 16]) = (byte & 15, byte >> 4);
    }
}

/// Codes of 2 bits, 128 in each 32 bytes: the lowest bits of all bytes, then the next.
fn crumbs(bytes: &[u8], codes: &mut [u8; SUPER]) {
    for (i, code) in codes.iter_mut().enumerate() {
        *code = bytes[i / 128 * 32 + i % 32] >> (i % 128 / 32 * 2) & 3;
    }
}

/// Scale and minimum `i` of eight, of 6 bits each in 12 bytes.
fn six_bits(bytes: &[u8], i: usize) -> (u8, u8) {
    if i < 4 {
        return (bytes[i] & 63, bytes[i + 4] & 63);
    }
    let low = bytes[i + 4];
    (low & 15 | bytes[i - 4] >> 6 << 4, low >> 4 | bytes[i] >> 6 << 4)
}
