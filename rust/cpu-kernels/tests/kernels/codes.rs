//! Elements of KV caches: rounding to them, and how attention reads them.

use crate::numbers::{e4m3, e5m2};
use specrs_cpu_kernels::{Attend, AttendScratch, Bf16, E4m3, E5m2, Isa, KvElement, KvHead};

/// Checks that every code is converted to itself, and numbers between two codes to the nearer one, with ties to even.
fn check(encode: impl Fn(f32) -> u8, value: impl Fn(u8) -> f32, largest: u8) {
    for code in 0..=largest {
        let (x, sign) = (value(code), 0x80);
        assert_eq!((encode(x), encode(-x)), (code, code | sign), "{x}");
        if code == largest {
            continue;
        }
        let next = value(code + 1);
        let middle = f32::midpoint(x, next);
        assert!(x < next, "{x} {next}");
        assert_eq!(encode(middle), code + (code & 1), "{middle}");
        assert_eq!(encode(middle.next_down()), code, "below {middle}");
        assert_eq!(encode(middle.next_up()), code + 1, "above {middle}");
    }
    for large in [value(largest) * 1.1, 1e30, f32::INFINITY] {
        assert_eq!((encode(large), encode(-large)), (largest, largest | 0x80));
    }
    assert!(value(encode(f32::NAN)).is_nan() && value(encode(-f32::NAN)).is_nan());
    assert_eq!((encode(1e-45), encode(-1e-45), encode(-0.0)), (0, 0x80, 0x80));
}

#[test]
fn codes_are_the_nearest() {
    check(|x| E4m3::from_f32(x).0, e4m3, 0x7E);
    check(|x| E5m2::from_f32(x).0, e5m2, 0x7B);
}

/// Checks that numbers of codes are divided by the scale before they are rounded, and other numbers are not.
#[test]
fn elements_are_written_as_the_nearest() {
    fn written<T: KvElement>(x: &[f32], zero: T) -> Vec<T> {
        let mut out = vec![zero; x.len()];
        T::write(x, 0.5, &mut out);
        out
    }
    let x = [0.0, -0.75, 100.3, 1e30, 0.1];
    assert_eq!(written(&x, E4m3(1)), x.map(|x| E4m3::from_f32(x / 0.5)));
    assert_eq!(written(&x, E5m2(1)), x.map(|x| E5m2::from_f32(x / 0.5)));
    assert_eq!(written(&x, Bf16(1)), x.map(Bf16::from_f32));
    assert_eq!(written(&x, 1.0_f32).iter().map(|x| x.to_bits()).collect::<Vec<_>>(), x.map(f32::to_bits));
}

/// Returns the attention of one row over two equal positions or one, in blocks of a single position: their value.
fn read<T: KvElement>(isa: Isa, value: &[T], zero: T, positions: usize) -> Vec<f32> {
    let dim = value.len();
    let block = [&vec![zero; dim], value].concat();
    let mut out = vec![f32::NAN; dim];
    let attend = Attend {
        kv: KvHead::Shared { layer: &[&*block, &*block].concat(), sizes: [2, 2, dim], key: 0, value: 1 },
        blocks: &[0, 1],
        block_size: 1,
        head_dim: dim,
        first: 0,
        window: positions,
        chunked: false,
        positions: &[1],
        heads: 1,
        sinks: None,
        q: &vec![[1.0; 16]; dim.div_ceil(16)],
        head_stride: dim.div_ceil(16),
        scale: 1.0,
        scratch: &mut AttendScratch::new(1, 1, dim),
        out: &mut out,
    };
    T::attend(attend, isa);
    out
}

/// Checks that attention reads the number of every code, on every instruction set: by vectors, from a vector that is
/// not full, and from positions that are gathered because their blocks are smaller than a group.
#[test]
fn codes_are_read_as_their_numbers() {
    let codes: Vec<u8> = (0..=255).collect();
    for isa in Isa::available() {
        for (dim, positions) in [(16, 1), (5, 1), (16, 2), (5, 2)] {
            for codes in codes.chunks(dim) {
                let of_e4m3 = read(isa, &codes.iter().map(|&code| E4m3(code)).collect::<Vec<_>>(), E4m3(0), positions);
                let of_e5m2 = read(isa, &codes.iter().map(|&code| E5m2(code)).collect::<Vec<_>>(), E5m2(0), positions);
                for (&code, (a, b)) in codes.iter().zip(of_e4m3.iter().zip(&of_e5m2)) {
                    for (found, exact) in [(*a, e4m3(code)), (*b, e5m2(code))] {
                        // Sums begin at 0, so that a negative zero has no sign.
                        let same = found.to_bits() == (exact + 0.0).to_bits() || found.is_nan() && exact.is_nan();
                        assert!(same, "{}: {found} for {exact}, code {code:x}", isa.name());
                    }
                }
            }
        }
    }
}
