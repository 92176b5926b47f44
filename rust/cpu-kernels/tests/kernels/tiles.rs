//! Rows as tiles.

use specrs_cpu_kernels::{Isa, LANES, Layout, PAIRS, Split, Tile, Vector};

/// Returns input `i` of row `row` of a tile of bf16 pairs.
fn number(tile: &Tile, i: usize, row: usize) -> f32 {
    let pair = tile[i / 2][row].to_bits();
    f32::from_bits(if i.is_multiple_of(2) { pair << 16 } else { pair & 0xFFFF_0000 })
}

/// Checks that every number of sixteen rows is at its place, to the bit, also those that are not finite.
#[test]
fn rows_are_transposed_to_the_bit() {
    let bits = |i: usize| match i % 32 {
        0 => 0x7FC0_0000 + ((i as u32) << 16 & 0x3F_0000),
        1 => 0xFF80_0000,
        _ => 0x3F80_0000 + ((i as u32) << 16),
    };
    let x: [Vector; 2 * LANES] = std::array::from_fn(|v| std::array::from_fn(|i| f32::from_bits(bits(v * LANES + i))));
    for isa in Isa::available() {
        let mut out = [[[f32::NAN; LANES]; LANES]];
        Split { layout: Layout::new(LANES, true), inputs: PAIRS, x: &x, out: &mut out }.run(isa);
        for (row, x) in x.as_flattened().chunks_exact(PAIRS).enumerate() {
            for (i, x) in x.iter().enumerate() {
                assert_eq!(number(&out[0], i, row).to_bits(), x.to_bits(), "{}: [{row}, {i}]", isa.name());
            }
        }
    }
}

/// Checks that the three parts of a number add up to it, also for the largest and for those with a bit in every
/// place. Parts of a number that is not finite are not finite.
#[test]
fn parts_add_up_to_the_number() {
    let given = [1.0, -1.0 / 3.0, f32::MAX, f32::MIN, f32::from_bits(0x3FFF_FFFF), 1e-30, 0.0, std::f32::consts::PI];
    let bad = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, f32::from_bits(0x7F80_0001)];
    let given_at = |i: usize| if i.is_multiple_of(3) { bad[i / 3 % bad.len()] } else { given[i % given.len()] };
    let x: [Vector; 2] = std::array::from_fn(|v| std::array::from_fn(|i| given_at(v * LANES + i)));
    let layout = Layout::new(1, false);
    for isa in Isa::available() {
        let mut out = [[[f32::NAN; LANES]; LANES]; 3];
        Split { layout, inputs: PAIRS, x: &x, out: &mut out }.run(isa);
        for (i, x) in x.as_flattened().iter().enumerate() {
            let sum: f64 = out.iter().map(|part| f64::from(number(part, i, 0))).sum();
            let same = if x.is_finite() { sum.to_bits() == f64::from(*x).to_bits() } else { !sum.is_finite() };
            assert!(same, "{}: {x} as {sum}", isa.name());
        }
        assert!(out.iter().flatten().all(|row| row[1..].iter().all(|x| x.to_bits() == 0)), "behind the rows");
    }
}

/// Checks that every layout has a place for all rows, and less than two tiles more.
#[test]
fn layouts_hold_all_rows() {
    for rows in 0..=64 {
        for (rounded, parts) in [(false, 3), (true, 1)] {
            let tiles = Layout::new(rows, rounded).tiles(PAIRS);
            let room = tiles / parts * LANES;
            assert!(tiles.is_multiple_of(parts) && room >= rows && room < rows + 2 * LANES, "{rows}: {tiles} tiles");
        }
    }
}
