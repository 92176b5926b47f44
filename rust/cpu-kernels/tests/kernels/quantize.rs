//! Quantization of weights to integers with scales, and to `Q4_K`.

use crate::numbers::{Numbers, f16};
use specrs_cpu_kernels::{Bf16, BlockType, Memory, Packed, Values, quantize, quantize_q4_k};

/// Largest absolute value that `Q4_K` holds.
const LARGEST: f32 = 63.0 * 65_504.0;

fn values(x: Vec<f32>) -> Values {
    Values::F32(Memory::from_vec(x))
}

#[test]
fn scales_are_the_least() {
    let (tiny, most) = (f32::from_bits(1), 2_f32.powi(127).next_down());
    for x in [0.0, tiny, 1e-39, 1e-38, 0.999_999, 1.0, 127.0, 127.000_01, 3.0, 1e38, most] {
        for largest in [7_i8, 127] {
            let (mut codes, mut scales, number) = ([0], [Bf16(1)], f32::from(largest));
            quantize("w", &values(vec![x]), 1, largest, &mut codes, &mut scales, 1).unwrap();
            let found = scales[0];
            assert!(found.to_f32() * number >= x && (found.to_f32() * number).is_finite(), "{x:e}");
            assert!(found == Bf16(0) || Bf16(found.0 - 1).to_f32() * number < x, "{x:e} {largest}");
        }
    }
}

fn q4_k(x: Vec<f32>) -> Vec<u8> {
    let mut blocks = vec![0; x.len() / 256 * 144];
    quantize_q4_k("w", &values(x), 256, &mut blocks, 1).unwrap();
    blocks
}

/// Returns the bits of the fp16 factor of minima for blocks whose smallest weight is `-largest`.
fn unit(largest: f32) -> u16 {
    let block = q4_k(vec![-largest; 256]);
    u16::from_le_bytes([block[2], block[3]])
}

#[test]
fn units_reach_the_largest_number() {
    let smallest = 2_f32.powi(-24);
    for largest in
        [0.0, smallest / 2.0, smallest, 64.0 * smallest, 100.0 * smallest, 1e-3, 1.0, 63.0, 63.01, 1e5, LARGEST]
    {
        let found = unit(largest);
        assert!(f16(found).is_finite() && f16(found) * 63.0 >= 0.999 * largest, "{largest:e}");
        assert!(found == 0 || f16(found - 1) * 63.0 < largest, "{largest:e}");
    }
}

/// Checks that numbers become the nearest fp16 number, ties to even, where its 63rd multiple is exact.
#[test]
fn units_are_accurate() {
    for bits in (0x0400..0x7BFF_u16).step_by(7) {
        let (below, above) = (f16(bits), f16(bits + 1));
        assert_eq!(unit(63.0 * below), bits);
        let (middle, little) = (f32::midpoint(below, above), (above - below) / 32.0);
        assert_eq!(unit(63.0 * middle), bits + bits % 2, "{middle}");
        assert_eq!((unit(63.0 * (middle - little)), unit(63.0 * (middle + little))), (bits, bits + 1), "{middle}");
    }
}

/// Checks that the fp16 scales of a file are read as their numbers.
#[test]
fn scales_are_read_accurately() {
    let finite: Vec<u16> = (0..=u16::MAX).filter(|&bits| f16(bits).is_finite()).collect();
    let block = |bits: &u16| [&bits.to_le_bytes()[..], &[1; 32]].concat();
    let blocks: Vec<u8> = finite.iter().flat_map(block).collect();
    let packed = Packed::new("w", BlockType::Q8_0, &blocks, 32, None, 2).unwrap();
    for (output, &bits) in finite.iter().enumerate() {
        let mut row = [f32::NAN; 32];
        packed.row(output, &mut row);
        assert_eq!(row.map(f32::to_bits), [f16(bits).to_bits(); 32], "{bits:x}");
    }
}

#[test]
fn numbers_that_a_block_holds_come_back() {
    // Super-blocks with random codes, of which each block has the first and the last one.
    let mut numbers = Numbers(1);
    for _ in 0..200 {
        let mut x = [[0.0; 32]; 8];
        for (i, x) in x.iter_mut().enumerate() {
            // The first block has the largest integers, so that the units are found.
            let (scale, min) = if i == 0 { (63, 63) } else { (20 + numbers.next() % 44, numbers.next() % 64) };
            let mut codes = [0; 32].map(|_| numbers.next() % 16);
            (codes[3], codes[7]) = (0, 15);
            *x = codes.map(|code| (scale * code) as f32 / 128.0 - min as f32 / 16.0);
        }
        let block = q4_k(x.as_flattened().to_vec());
        let half = |at: usize| f16(u16::from_le_bytes([block[at], block[at + 1]]));
        assert_eq!((half(0), half(2)), (1.0 / 128.0, 1.0 / 16.0));
        let mut found = [f32::NAN; 256];
        Packed::new("w", BlockType::Q4_K, &block, 256, None, 1).unwrap().row(0, &mut found);
        for (found, x) in found.iter().zip(x.as_flattened()) {
            assert!((found - x).abs() < 1e-6, "{found} {x}");
        }
    }
}

#[test]
fn threads_change_no_byte() {
    let weight: Vec<f32> = (0..5 * 512).map(|i| ((i * i) % 997) as f32 - 400.0).collect();
    let of = |threads| {
        let mut blocks = vec![0; 10 * 144];
        quantize_q4_k("w", &values(weight.clone()), 512, &mut blocks, threads).unwrap();
        blocks
    };
    assert!(of(1) == of(3) && of(1) == of(100));
}
