//! Block types of GGUF files and the layout of a block's bytes. Computes nothing.

/// Type of quantized weights: small integers with a scale for each group of 16 or 32 inputs.
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

/// Form of a format's scales.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Scales {
    /// Scales in fp16.
    F16,
    /// Scales in bf16.
    Bf16,
    /// Scales in fp32, with upper and lower halves stored separately.
    F32,
    /// An 8-bit integer for each group, times an fp16 number for each 256 inputs.
    Sub,
}

/// Form of a format's minima, which are added to the weights of a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Minima {
    /// No minima.
    None,
    /// Minima in the form of the scales.
    Stored,
    /// Minima that are the scale times an 8-bit integer for each scale: a negative zero point.
    Zeros,
}

/// Format of quantized weights: `scale * (code - offset) + minimum`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Format {
    /// Number of bits of a code in the first lines of a packed block: 2, 4 or 8; codes of 8 bits are signed.
    pub(crate) low: u32,
    /// Number of further, higher bits of a code, which are in the last lines of a packed block: 0, 1 or 2.
    pub(crate) high: u32,
    /// Whether a group has 16 inputs; otherwise it has 32.
    pub(crate) halves: bool,
    pub(crate) minima: Minima,
    pub(crate) scales: Scales,
    /// Binary logarithm of the number of packed blocks that share a stored scale.
    pub(crate) shift: u32,
    pub(crate) offset: i32,
    /// Integers that the 4-bit codes stand for; `None` if codes stand for themselves.
    pub(crate) table: Option<&'static [i8; 16]>,
}

/// Number of inputs in a packed block.
pub(crate) const BLOCK: usize = 32;
/// Maximum number of inputs in a block of a file.
pub(crate) const SUPER: usize = 256;

/// Integers that the 4-bit codes of `IQ4_NL` and `IQ4_XS` stand for.
const IQ4: [i8; 16] = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];
/// Four-bit floats of the OCP Microscaling specification (E2M1), times two.
const E2M1: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

/// One block of a file, unpacked: codes of its inputs in order, and its scales.
pub(crate) struct Block {
    pub(crate) codes: [u8; SUPER],
    /// Bits of the fp16 or bf16 scale.
    pub(crate) scale: u16,
    /// Bits of the fp16 minimum, or of the factor of the integers in `sub_mins`.
    pub(crate) min: u16,
    /// Integer factor of each group's scale.
    pub(crate) sub_scales: [i8; 16],
    /// Integer factor of each group's minimum.
    pub(crate) sub_mins: [i8; 16],
}

impl Format {
    /// Makes a format with codes of `low` bits, a scale for every `1 << shift` blocks, and no minima.
    pub(crate) fn integers(low: u32, offset: i32, scales: Scales, shift: u32) -> Self {
        Self { low, high: 0, halves: false, minima: Minima::None, scales, shift, offset, table: None }
    }

    /// Returns whether codes become signed bytes, rather than unsigned ones, when they are decoded: 8-bit codes, and
    /// 4-bit codes with a table.
    pub(crate) fn is_signed(self) -> bool {
        self.low == 8 || self.table.is_some()
    }

    /// Returns the largest byte that a decoded code can be, read as unsigned. It is 255 for signed codes, because of
    /// negative ones.
    pub(crate) fn largest_byte(self) -> i32 {
        if self.is_signed() { 255 } else { (1 << (self.low + self.high)) - 1 }
    }

    /// Returns the number of groups in a packed block.
    pub(crate) fn groups(self) -> usize {
        if self.halves { 2 } else { 1 }
    }

    /// Returns the number of stored numbers for each scale: 2 with stored minima.
    pub(crate) fn stored(self) -> usize {
        if self.minima == Minima::Stored { 2 } else { 1 }
    }

    /// Returns the number of 16-bit values for each scale.
    pub(crate) fn halves_per_scale(self) -> usize {
        if self.scales == Scales::F32 { 2 } else { self.stored() }
    }

    /// Returns the number of 8-bit integers for each `1 << shift` blocks.
    pub(crate) fn subs_per_scale(self) -> usize {
        match (self.scales, self.minima) {
            (Scales::Sub, _) => (self.stored() * self.groups()) << self.shift,
            (_, Minima::Zeros) => 1,
            _ => 0,
        }
    }

    /// Returns the number of lines with lower bits in a packed block.
    pub(crate) fn low_lines(self) -> usize {
        self.low as usize
    }

    /// Returns the number of lines in a packed block.
    pub(crate) fn lines(self) -> usize {
        self.low_lines() + self.high as usize
    }
}

impl BlockType {
    /// All block types.
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

    /// Returns GGML's name of the type.
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

    /// Returns the type with this GGML name; `None` if it is not supported.
    pub fn by_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.name() == name)
    }

    /// Returns the number of inputs in a block of a file: 32 or 256.
    pub fn numbers(self) -> usize {
        if self.format().scales == Scales::Sub { SUPER } else { BLOCK }
    }

    /// Returns the number of bytes in a block of a file.
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

    /// Unpacks a block of a file.
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

/// Returns the bits of `-x`, for the bits `x` of an fp16 number.
fn negated(x: u16) -> u16 {
    x ^ 0x8000
}

/// Writes the lower halves of 16 bytes to `codes`, then their upper halves.
fn nibbles(bytes: &[u8], codes: &mut [u8]) {
    for (i, byte) in bytes.iter().enumerate() {
        (codes[i], codes[i + 16]) = (byte & 15, byte >> 4);
    }
}

/// Unpacks codes of 2 bits, 128 from each 32 bytes: the lowest bits of all bytes first, then the next ones.
fn crumbs(bytes: &[u8], codes: &mut [u8; SUPER]) {
    for (i, code) in codes.iter_mut().enumerate() {
        *code = bytes[i / 128 * 32 + i % 32] >> (i % 128 / 32 * 2) & 3;
    }
}

/// Returns scale and minimum `i` of eight, which have 6 bits each in 12 bytes.
fn six_bits(bytes: &[u8], i: usize) -> (u8, u8) {
    if i < 4 {
        return (bytes[i] & 63, bytes[i + 4] & 63);
    }
    let low = bytes[i + 4];
    (low & 15 | bytes[i - 4] >> 6 << 4, low >> 4 | bytes[i] >> 6 << 4)
}
