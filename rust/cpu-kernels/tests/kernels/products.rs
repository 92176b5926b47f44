//! Tests of products with packed weights: bit by bit against their rules in plain Rust, with the numbers of real files.

use crate::numbers::{Numbers, f16};
use proptest::prelude::*;
use specrs_cpu_kernels::{Bf16, BlockProduct, BlockType, Isa, Packed, Round, RoundedRoom, Rounding, Tiles, Vector};

impl Numbers {
    /// Returns a number of a row. In one of sixteen blocks it is sometimes extreme.
    fn number(&mut self, odd: bool) -> f32 {
        let plain = (self.next() as f32 / 2_f32.powi(30) - 1.0) * 2_f32.powi(self.next().rem_euclid(5).cast_signed());
        if !odd {
            return plain;
        }
        match self.next() % 8 {
            0 => 0.0,
            1 => -0.0,
            2 => f32::from_bits(self.next() % (1 << 23)),
            3 => plain * 2_f32.powi(100),
            4 => plain * 2_f32.powi(-100),
            5 => plain * 2_f32.powi(-120),
            6 if self.next().is_multiple_of(16) => {
                [f32::NAN, f32::INFINITY, f32::NEG_INFINITY][self.next() as usize % 3]
            }
            _ => plain,
        }
    }
}

/// Weight of a block as its type defines it: `scale * q + minimum`.
type Term = (i32, f32, f32);

/// Integers that the codes of `IQ4_NL` and `IQ4_XS` stand for.
const IQ4: [i32; 16] = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];
/// Twice the numbers that the codes of `MXFP4` stand for (E2M1 of the OCP Microscaling specification).
const TWICE_E2M1: [i32; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

/// Returns whether a type has groups of 16 weights; otherwise they have 32.
fn has_halves(kind: BlockType) -> bool {
    matches!(kind, BlockType::Q2_K | BlockType::Q3_K | BlockType::Q6_K)
}

/// Returns whether the groups of a type have minima.
fn has_minima(kind: BlockType) -> bool {
    matches!(kind, BlockType::Q4_1 | BlockType::Q5_1 | BlockType::Q2_K | BlockType::Q4_K | BlockType::Q5_K)
}

/// Dequantizes weight `i` of a block, by the layouts of GGML's types.
fn term(kind: BlockType, block: &[u8], i: usize) -> Term {
    let byte = |at: usize| i32::from(block[at]);
    let half = |at: usize| f16(u16::from_le_bytes([block[at], block[at + 1]]));
    // Four bits of a byte, of whose 16 bytes the lower halves come first; and a bit of a mask.
    let nibble = |at: usize, i: usize| byte(at + i % 16) >> (i / 16 * 4) & 15;
    let bit = |at: usize| byte(at + i / 8) >> (i % 8) & 1;
    // Of 256 weights: 64 share 32 bytes of four bits, and 128 share 32 bytes of two.
    let (fours, twos) = (i / 64 * 32 + i % 32, i / 128 * 32 + i % 32);
    let four = |at: usize| byte(at + fours) >> (i / 32 % 2 * 4) & 15;
    let two = |at: usize| byte(at + twos) >> (i / 32 % 4 * 2) & 3;
    // Bit i / 32 of the byte of i % 32.
    let plane = |at: usize| byte(at + i % 32) >> (i / 32) & 1;
    // Scale and minimum of 32 weights in six bits each: bytes 0-3 and 4-7 of the first four groups, and of the last four
    // the halves of bytes 8-11 below the upper two bits of the others.
    let sixes = |at: usize| {
        let group = i / 32;
        if group < 4 {
            (byte(at + group) & 63, byte(at + 4 + group) & 63)
        } else {
            let low = byte(at + 4 + group);
            (low & 15 | byte(at + group - 4) >> 6 << 4, low >> 4 | byte(at + group) >> 6 << 4)
        }
    };
    match kind {
        BlockType::Q4_0 => (nibble(2, i) - 8, half(0), 0.0),
        BlockType::Q4_1 => (nibble(4, i), half(0), half(2)),
        BlockType::Q5_0 => ((nibble(6, i) | bit(2) << 4) - 16, half(0), 0.0),
        BlockType::Q5_1 => (nibble(8, i) | bit(4) << 4, half(0), half(2)),
        BlockType::Q8_0 => (i32::from(block[2 + i].cast_signed()), half(0), 0.0),
        BlockType::IQ4_NL => (IQ4[nibble(2, i) as usize], half(0), 0.0),
        BlockType::MXFP4 => (TWICE_E2M1[nibble(1, i) as usize], 2_f32.powi(byte(0) - 128), 0.0),
        BlockType::Q2_K => {
            let both = byte(i / 16);
            (two(16), half(80) * (both & 15) as f32, -half(82) * (both >> 4) as f32)
        }
        BlockType::Q3_K => {
            let group = i / 16;
            let scale =
                byte(96 + group % 8) >> (group / 8 * 4) & 15 | (byte(104 + group % 4) >> (group / 4 * 2) & 3) << 4;
            ((two(32) | plane(0) << 2) - 4, half(108) * (scale - 32) as f32, 0.0)
        }
        BlockType::Q4_K => {
            let (scale, min) = sixes(4);
            (four(16), half(0) * scale as f32, -half(2) * min as f32)
        }
        BlockType::Q5_K => {
            let (scale, min) = sixes(4);
            (four(48) | plane(16) << 4, half(0) * scale as f32, -half(2) * min as f32)
        }
        BlockType::Q6_K => {
            // 128 weights share 64 bytes of four bits: 64 the lower halves, then 64 the upper ones.
            let low = byte(i / 128 * 64 + i % 64) >> (i % 128 / 64 * 4) & 15;
            ((low | two(128) << 4) - 32, half(208) * f32::from(block[192 + i / 16].cast_signed()), 0.0)
        }
        BlockType::IQ4_XS => {
            let group = i / 32;
            let high = i32::from(u16::from_le_bytes([block[2], block[3]])) >> (2 * group) & 3;
            let scale = byte(4 + group / 2) >> (group % 2 * 4) & 15 | high << 4;
            (IQ4[nibble(8 + 16 * group, i % 32) as usize], half(0) * (scale - 32) as f32, 0.0)
        }
    }
}

/// Dequantizes a row of blocks.
fn terms(kind: BlockType, row: &[u8]) -> Vec<Term> {
    let of_block = |block| (0..kind.numbers()).map(move |i| term(kind, block, i));
    row.chunks_exact(kind.bytes()).flat_map(of_block).collect()
}

/// Weights of an output, and the grouping of its sums.
struct Output {
    weights: Vec<Term>,
    halves: bool,
    mins: bool,
}

impl Output {
    fn of_file(kind: BlockType, row: &[u8]) -> Self {
        Self { weights: terms(kind, row), halves: has_halves(kind), mins: has_minima(kind) }
    }

    /// Makes an output of integers with scales. With `zeros`, integers of a group count from the smallest of them.
    fn of_group(values: &[i16], scales: &[f32], zeros: bool) -> Self {
        let group = values.len() / scales.len();
        let weights = values.chunks_exact(group).zip(scales).flat_map(|(values, &scale)| {
            let least = if zeros { values.iter().copied().min().unwrap() } else { 0 };
            values.iter().map(move |&q| (i32::from(q - least), scale, scale * f32::from(least)))
        });
        Self { weights: weights.collect(), halves: false, mins: zeros }
    }

    /// Returns the product with a row, by the rules.
    fn product(&self, x: &[f32], top_code: f32) -> f32 {
        let mut acc = 0.0_f32;
        for (x, weights) in x.chunks_exact(32).zip(self.weights.chunks_exact(32)) {
            let largest = x.iter().fold(0.0_f32, |a, x| if x.abs() > a { x.abs() } else { a });
            let finite = x.iter().all(|x| x.is_finite());
            let d = match () {
                () if !finite => f32::NAN,
                () if largest < 2_f32.powi(-100) => 0.0,
                () => largest / top_code,
            };
            let factor = top_code / largest;
            let code = |x: f32| if d > 0.0 { (x * factor).round_ties_even() as i32 } else { 0 };
            for group in 0..if self.halves { 2 } else { 1 } {
                let of = if self.halves { 16 * group..16 * group + 16 } else { 0..32 };
                let (mut dot, mut sum) = (0_i64, 0_i64);
                for i in of.clone() {
                    dot += i64::from(weights[i].0) * i64::from(code(x[i]));
                    sum += i64::from(code(x[i]));
                }
                let (_, scale, min) = weights[of.start];
                acc = (dot as f32).mul_add(scale * d, acc);
                if self.mins {
                    acc = min.mul_add(d * sum as f32, acc);
                }
            }
        }
        acc
    }
}

fn same(a: f32, b: f32) -> bool {
    a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan()
}

/// Returns random bytes of a file's rows. Scales are finite, because a loader rejects others.
fn file(kind: BlockType, outputs: usize, inputs: usize, numbers: &mut Numbers) -> Vec<u8> {
    let mut bytes: Vec<u8> =
        (0..outputs * (inputs / kind.numbers()) * kind.bytes()).map(|_| numbers.next() as u8).collect();
    for block in bytes.chunks_exact_mut(kind.bytes()) {
        let scales: &[usize] = match kind {
            BlockType::Q4_1 | BlockType::Q5_1 | BlockType::Q4_K | BlockType::Q5_K => &[1, 3],
            BlockType::Q2_K => &[81, 83],
            BlockType::Q3_K => &[109],
            BlockType::Q6_K => &[209],
            BlockType::MXFP4 => &[0],
            _ => &[1],
        };
        for &at in scales {
            // The largest exponents of fp16 are those of numbers that are not finite.
            block[at] = if kind == BlockType::MXFP4 { 100 + block[at] % 40 } else { block[at] & 0xBF };
        }
    }
    bytes
}

fn check(kind: BlockType, outputs: usize, blocks: usize, rows: usize, range: (usize, usize), seed: u64) {
    let numbers = &mut Numbers(seed);
    let inputs = blocks * kind.numbers();
    let bytes = file(kind, outputs, inputs, numbers);
    let order: Vec<usize> = (0..outputs).map(|o| (o * 7 + 3) % outputs).collect();
    let order = (!outputs.is_multiple_of(7) && seed.is_multiple_of(2)).then_some(order);
    let packed = Packed::new("w", kind, &bytes, inputs, order.as_deref(), 1 + seed as usize % 3).unwrap();
    let row = bytes.len() / outputs;
    let of = |o: usize| order.as_ref().map_or(o, |order| order[o]);
    let expected: Vec<Output> = (0..outputs).map(|o| Output::of_file(kind, &bytes[of(o) * row..][..row])).collect();
    compare(&packed, &expected, rows, range, numbers);
}

/// Type of scales of packed integers.
#[derive(Clone, Copy, Debug)]
enum Scales {
    F16,
    Bf16,
    F32,
}

/// Random packed integers: the type of scales, and the size of integers.
#[derive(Clone, Copy, Debug)]
struct Integers {
    scales: Scales,
    /// Number of bits of the integers, 4 or 8. With `zeros` they count from any number.
    bits: u32,
    zeros: bool,
}

impl Integers {
    fn all() -> Vec<Self> {
        let of = |scales, bits, zeros| Self { scales, bits, zeros };
        let halves = [Scales::F16, Scales::Bf16];
        let kinds = [(4, false), (4, true), (8, false)];
        let all = halves.iter().flat_map(|&scales| kinds.iter().map(move |&(bits, zeros)| of(scales, bits, zeros)));
        all.chain([of(Scales::F32, 4, false), of(Scales::F32, 8, false)]).collect()
    }

    fn scale(self, numbers: &mut Numbers) -> f32 {
        match self.scales {
            Scales::Bf16 => Bf16::from_f32(numbers.number(false)).to_f32(),
            Scales::F16 => f16((numbers.next() as u16) & 0xBFFF),
            Scales::F32 => numbers.number(false),
        }
    }
}

fn check_groups(of: Integers, outputs: usize, (group, groups): (usize, usize), rows: usize, seed: u64) {
    let numbers = &mut Numbers(seed);
    let inputs = group * groups;
    let mut values = vec![0_i16; outputs * inputs];
    for group in values.chunks_exact_mut(group) {
        let first = match (of.bits, of.zeros) {
            (8, _) => -128,
            (_, true) => (numbers.next() % 240) as i16 - 128,
            (_, false) => -8,
        };
        group.fill_with(|| first + (numbers.next() % (1 << of.bits)) as i16);
    }
    // The ends of the range make sure of the type.
    values[0] = if of.zeros { 50 } else { values[0] };
    if of.zeros {
        values[1..group].fill(65);
    } else if of.bits == 8 {
        (values[0], values[1]) = (-128, 127);
    }
    let mut scales = vec![0.0; outputs * groups];
    scales.fill_with(|| of.scale(numbers));
    scales[0] = match of.scales {
        Scales::F32 => 1.0 / 3.0,
        Scales::F16 => 1.0 + 2_f32.powi(-10),
        Scales::Bf16 => 2_f32.powi(100),
    };
    let packed = Packed::grouped("w", &values, inputs, &scales, 1 + seed as usize % 3).unwrap();
    // Inputs in another order: a step that is coprime to their number, which is 32 times a small one.
    let order: Option<Vec<usize>> =
        seed.is_multiple_of(2).then(|| (0..inputs).map(|place| (place * 11_213 + 5) % inputs).collect());
    let packed = match &order {
        Some(order) => packed.with_order("w", order).unwrap(),
        None => packed,
    };
    assert_eq!(packed.kind(), if of.bits == 8 { "INT8" } else { "INT4" });
    let of_output = |(values, scales): (&[i16], &[f32])| Output::of_group(values, scales, of.zeros);
    let expected: Vec<Output> = values.chunks_exact(inputs).zip(scales.chunks_exact(groups)).map(of_output).collect();
    for (output, values) in values.chunks_exact(inputs).enumerate() {
        let mut row = vec![f32::NAN; inputs];
        packed.row(output, &mut row);
        for (i, &q) in values.iter().enumerate() {
            let found = row[order.as_ref().map_or(i, |order| order[i])];
            let number = f32::from(q) * scales[output * groups + i / group];
            assert!((found - number).abs() <= 0.0, "{of:?}: {found} for {number}");
        }
    }
    compare(&packed, &expected, rows, (0, outputs - 1), numbers);
}

/// Compares products of `rows` rows with part of the outputs on every instruction set.
fn compare(packed: &Packed, outputs: &[Output], rows: usize, range: (usize, usize), numbers: &mut Numbers) {
    let (inputs, count) = (packed.inputs(), outputs.len());
    let mut x = vec![[0.0; 16]; rows * inputs / 16];
    for block in x.as_flattened_mut().chunks_exact_mut(32) {
        let odd = numbers.next().is_multiple_of(16);
        // A block of such numbers alone is rounded to zeros.
        let size = if numbers.next().is_multiple_of(8) { 2_f32.powi(-120) } else { 1.0 };
        block.fill_with(|| numbers.number(odd) * size);
    }
    let range = range.0 % count..range.0 % count + 1 + range.1 % (count - range.0 % count);
    for (to, top_code) in [(Rounding::Int16, 32_512.0), (Rounding::Int8, 127.0)] {
        let expected: Vec<Vec<f32>> = x
            .as_flattened()
            .chunks_exact(inputs)
            .map(|x| packed.order().map_or(x.to_vec(), |order| order.iter().map(|&input| x[input as usize]).collect()))
            .map(|x| outputs[range.clone()].iter().map(|output| output.product(&x, top_code)).collect())
            .collect();
        for (isa, tiles) in ways() {
            let found = product((isa, tiles, to), packed, &x, rows, &range);
            for (found, expected) in found.chunks_exact(range.len() + 3).zip(&expected) {
                for (o, (found, expected)) in found.iter().zip(expected).enumerate() {
                    let way = format!("{} on {isa:?}, {tiles:?}, {to:?}", packed.kind());
                    assert!(same(*found, *expected), "{way}, output {o}: {found} and {expected}");
                }
            }
        }
    }
}

/// Returns all ways to multiply: each instruction set by vectors, by portable tiles, and by its own tiles.
fn ways() -> Vec<(Isa, Option<Tiles>)> {
    let of = |isa: Isa| {
        let tiles = [Some(Tiles::portable()), isa.tiles()].into_iter().flatten().map(Some);
        std::iter::once(None).chain(tiles).map(move |tiles| (isa, tiles)).collect::<Vec<_>>()
    };
    Isa::available().into_iter().flat_map(of).collect()
}

fn product(
    (isa, tiles, to): (Isa, Option<Tiles>, Rounding),
    packed: &Packed,
    x: &[Vector],
    rows: usize,
    range: &std::ops::Range<usize>,
) -> Vec<f32> {
    let (inputs, y_stride) = (packed.inputs(), range.len() + 3);
    let mut room = RoundedRoom::new(rows, inputs, tiles.is_some());
    let mut y = vec![f32::NAN; rows * y_stride];
    let rounded = Round { x, inputs, order: packed.order(), to, tiles, room: &mut room }.run(isa);
    let outputs = range.clone();
    BlockProduct { w: packed, outputs, x: rounded, y: &mut y, y_stride }.run(isa);
    y
}

proptest! {
    #![proptest_config(crate::cases(40))]

    #[test]
    fn products_have_the_bits_of_the_rules(
        kind in prop::sample::select(BlockType::ALL.to_vec()),
        outputs in 1..40_usize,
        blocks in 1..4_usize,
        rows in 1..40_usize,
        range in (0..40_usize, 0..40_usize),
        seed in any::<u64>(),
    ) {
        check(kind, outputs, blocks, rows, range, seed);
    }

    #[test]
    fn products_with_integers_have_the_bits_of_the_rules(
        of in prop::sample::select(Integers::all()),
        outputs in 1..40_usize,
        group in (1..9_usize, 1..4_usize),
        rows in 1..20_usize,
        seed in any::<u64>(),
    ) {
        check_groups(of, outputs, (32 * group.0, group.1), rows, seed);
    }
}

#[test]
fn every_type_has_the_bits_of_the_rules() {
    for kind in BlockType::ALL {
        check(kind, 18, 9 * 32 / kind.numbers() + 1, 9, (0, 17), 1);
        check(kind, 16, 1, 1, (0, 15), 2);
    }
    for of in Integers::all() {
        check_groups(of, 18, (128, 3), 9, 1);
        check_groups(of, 16, (32 * 12, 1), 1, 2);
    }
}

#[test]
fn numbers_of_an_output_are_those_of_its_file() {
    for kind in BlockType::ALL {
        let bytes = file(kind, 17, 512, &mut Numbers(3));
        let packed = Packed::new("w", kind, &bytes, 512, None, 2).unwrap();
        for (output, row) in bytes.chunks_exact(bytes.len() / 17).enumerate() {
            let mut found = [0.0; 512];
            packed.row(output, &mut found);
            for (found, (q, scale, min)) in found.iter().zip(terms(kind, row)) {
                assert_eq!(
                    (q as f32).mul_add(scale, min).to_bits() & !(1 << 31),
                    found.to_bits() & !(1 << 31),
                    "{kind:?}"
                );
            }
        }
    }
}

#[test]
fn what_is_no_matrix_of_blocks_is_an_error() {
    let of = |inputs, bytes: usize, order: Option<&[usize]>| {
        Packed::new("w", BlockType::Q4_K, &vec![0; bytes], inputs, order, 2).map(|packed| packed.outputs())
    };
    assert_eq!(of(512, 3 * 288, None).unwrap(), 3);
    for (inputs, bytes, order) in [(0, 288, None), (128, 72, None), (512, 300, None), (512, 576, Some(&[0, 2][..]))] {
        assert!(of(inputs, bytes, order).is_err(), "{inputs} inputs, {bytes} bytes");
    }
    let mut blocks = vec![0; 2 * 34];
    blocks[34 + 1] = 0x7C;
    let message = Packed::new("w", BlockType::Q8_0, &blocks, 32, None, 2).map(|_| ()).unwrap_err().to_string();
    assert!(message.contains("w's scale of row 1, block 0"), "{message}");
}

#[test]
fn an_order_has_each_input_once() {
    let of = |order: &[usize]| {
        let packed = Packed::grouped("w", &[1; 64], 32, &[1.0; 2], 1).unwrap();
        packed.with_order("w", order).map(|packed| packed.order().unwrap().to_vec())
    };
    let turned: Vec<usize> = (0..32).rev().collect();
    assert_eq!(of(&turned).unwrap(), (0..32).rev().collect::<Vec<u32>>());
    for wrong in [&turned[1..], &[0; 32], &[&turned[1..], &[32]].concat(), &[&turned[..], &[0]].concat()] {
        let message = of(wrong).unwrap_err().to_string();
        assert!(message.contains("w's order"), "{message}");
    }
}

/// Matrices of several threads, larger and smaller than what they share memory with, keep their numbers while others are
/// made and dropped.
#[test]
fn matrices_share_no_bytes() {
    let holds = |packed: &Packed, value: i16| {
        let mut row = vec![0.0; packed.inputs()];
        (0..packed.outputs()).all(|output| {
            packed.row(output, &mut row);
            row.iter().all(|x| x.to_bits() == f32::from(value).to_bits())
        })
    };
    std::thread::scope(|scope| {
        for thread in 0..3_i16 {
            scope.spawn(move || {
                let mut kept: Vec<(Packed, i16)> = Vec::new();
                for i in 0..if cfg!(miri) { 7 } else { 60 } {
                    let value = 1 + (20 * thread + i) % 100;
                    let (outputs, inputs) = if i % 20 == 7 { (4_100, 4_096) } else { (17 + i as usize, 96) };
                    let values = vec![value; outputs * inputs];
                    let packed = Packed::grouped("w", &values, inputs, &vec![1.0; outputs], 1).unwrap();
                    kept.push((packed, value));
                    if kept.len() > 5 {
                        kept.remove((i as usize * 7) % kept.len());
                    }
                }
                for (packed, value) in &kept {
                    assert!(holds(packed, *value), "a matrix of {value}");
                }
            });
        }
    });
}

/// A dropped matrix gives its memory back while another one of the same region is kept.
// A page has 4 KiB there.
#[cfg(all(target_os = "linux", target_arch = "x86_64", not(miri)))]
#[test]
fn dropped_matrices_give_memory_back() {
    let resident = || {
        let pages = std::fs::read_to_string("/proc/self/statm").unwrap();
        pages.split(' ').nth(1).unwrap().parse::<usize>().unwrap() * 4 / 1024
    };
    let of = |outputs: usize| {
        let file = vec![0; outputs * 34 * 64];
        Packed::new("w", BlockType::Q8_0, &file, 32 * 64, None, 1).unwrap()
    };
    let before = resident();
    let (kept, large): (Vec<Packed>, Vec<Packed>) = (0..8).map(|_| (of(16), of(16_384))).unzip();
    let full = resident();
    drop(large);
    let after = resident();
    // Eight times 34 MiB. Other tests run next to this one.
    assert!(full > before + 200 && after < full - 200, "{before}, {full} and {after} MiB");
    drop(kept);
}
