//! Products of rows with what a projection is stored as, and what rows become for them. Phases and their order are not here.

use super::Context;
use super::loras::{Added, LoraRoom};
use crate::isa::{LANES, Tile, Tiles, Vector};
use crate::kernels::{Layout, PAIRS, Product, RoundPairs, Split, TileProduct};
use crate::linear::{Linear, Part, Weight};
use crate::lora::Projection;
use crate::memory::Vectors;
use crate::pass::MAX_TILE_ROWS;
use crate::weights::{ModelShape, Values};
use std::ops::Range;

/// What a projection is fed, and what is added to what it gives.
pub(super) struct Fed<'a> {
    input: Input<'a>,
    /// Where some row has an adapter.
    added: Option<Added<'a>>,
}

impl<'a> Fed<'a> {
    /// Rows that went through [`round`](Context::round), of a projection that no adapter adds to.
    pub(super) fn rows(x: &'a [Vector]) -> Self {
        Self { input: Input::Rows(x), added: None }
    }
}

/// Rows as products take them.
enum Input<'a> {
    /// `[rows, ceil(inputs / 16)]`, which went through [`round`](Context::round).
    Rows(&'a [Vector]),
    /// Rows as tiles, and room for a block of weights `[inputs / 32, 2]`.
    Tiles { tiles: Tiles, layout: Layout, rows: &'a [Tile], block: &'a mut [Tile] },
}

/// A participant's memory for what projections are fed.
#[derive(Default)]
pub(super) struct FedRoom {
    pub(super) tiles: TileRoom,
    pub(super) loras: LoraRoom,
}

/// A participant's memory for products by tiles; none where there are no such products.
#[derive(Default)]
pub(super) struct TileRoom {
    rows: Vectors,
    block: Vectors,
}

impl TileRoom {
    /// For all projections of a model of `shape`.
    pub(super) fn new(shape: &ModelShape) -> Self {
        let inputs = shape.hidden_size.max(shape.intermediate_size).max(shape.num_heads * shape.head_dim) * 2;
        let vectors = |tiles: usize| tiles * size_of::<Tile>() / size_of::<Vector>();
        let rows = Layout::new(MAX_TILE_ROWS, false).tiles(inputs);
        Self { rows: Vectors::new(vectors(rows)), block: Vectors::new(vectors(inputs / PAIRS * 2)) }
    }

    pub(super) fn poison(&mut self) {
        self.rows.as_flattened_mut().fill(f32::NAN);
        self.block.as_flattened_mut().fill(f32::NAN);
    }
}

/// Whether products of this projection may be by tiles: with bf16 weights of a multiple of 32 inputs.
fn by_tiles(linear: &Linear) -> bool {
    let bf16 = |weight: &Weight| matches!(weight, Weight::Bf16(_));
    linear.inputs.is_multiple_of(PAIRS) && linear.parts.iter().all(|part| bf16(&part.weight))
}

impl Context<'_> {
    /// Rounds `rows` rows of `inputs` numbers, which a product will be fed, where that is asked for.
    pub(super) fn round(&self, x: &mut [Vector], rows: usize, inputs: usize) {
        if self.bf16_rows && self.tiles.is_none() {
            self.isa.run_pairs(RoundPairs { x: &mut x[..rows * (inputs / LANES)] });
        }
    }

    /// What a projection is fed of the tile's rows in `x`, which went through [`round`](Self::round).
    pub(super) fn fed<'a>(
        &self,
        projection: Projection,
        linear: &Linear,
        x: &'a [Vector],
        room: &'a mut FedRoom,
    ) -> Fed<'a> {
        let added = self.lower(projection, linear.inputs, x, &mut room.loras);
        Fed { input: self.input(linear, x, self.rows(), &mut room.tiles), added }
    }

    fn input<'a>(&self, linear: &Linear, x: &'a [Vector], rows: usize, room: &'a mut TileRoom) -> Input<'a> {
        let Some(tiles) = self.tiles.filter(|_| by_tiles(linear)) else { return Input::Rows(x) };
        let layout = Layout::new(rows, self.bf16_rows);
        let (inputs, x) = (linear.inputs, &x[..rows * (linear.inputs / LANES)]);
        let out = &mut room.rows.as_chunks_mut().0[..layout.tiles(inputs)];
        self.isa.run(Split { layout, inputs, x, out });
        Input::Tiles { tiles, layout, rows: out, block: &mut room.block.as_chunks_mut().0[..inputs / PAIRS * 2] }
    }

    /// Outputs `outputs` of a projection, bias and adapters included, of `rows` rows: `y[row, i]` is that of output
    /// `outputs.start + i`, rows of y are `stride` long. What it is fed is [`fed`](Self::fed) for it.
    pub(super) fn product(
        &self,
        linear: &Linear,
        outputs: Range<usize>,
        fed: &mut Fed<'_>,
        rows: usize,
        y: &mut [f32],
        stride: usize,
    ) {
        let mut first = 0;
        for part in &linear.parts {
            let (start, end) = (outputs.start.max(first), outputs.end.min(first + part.outputs));
            if start < end {
                let inside = start - first..end - first;
                let y = &mut y[start - outputs.start..];
                let (inputs, w) = (linear.inputs, inside.start * linear.inputs..inside.end * linear.inputs);
                match (&mut fed.input, &part.weight) {
                    (Input::Tiles { tiles, layout, rows: x, block }, Weight::Bf16(all)) => {
                        let (tiles, layout, w) = (*tiles, *layout, &all.as_slice()[w]);
                        self.isa.run(TileProduct { tiles, layout, inputs, w, x, rows, block, y, y_stride: stride });
                    }
                    (Input::Tiles { .. }, _) => unreachable!("only bf16 weights are multiplied by tiles"),
                    (Input::Rows(x), _) => {
                        self.by_vectors(part, inside.clone(), Product { inputs, x, rows, y, y_stride: stride });
                    }
                }
                if let Some(bias) = &part.bias {
                    for row in y.chunks_mut(stride).take(rows) {
                        for (y, bias) in row.iter_mut().zip(&bias[inside.clone()]) {
                            *y += bias;
                        }
                    }
                }
            }
            first += part.outputs;
        }
        if let Some(added) = &mut fed.added {
            self.raise(added, &outputs, y, stride);
        }
    }

    /// Outputs `inside` of one part.
    pub(super) fn by_vectors(&self, part: &Part, inside: Range<usize>, product: Product<'_>) {
        let inputs = product.inputs;
        let w = inside.start * inputs..inside.end * inputs;
        match &part.weight {
            Weight::F32(all) => self.isa.run(product.with::<_, f32, 1>(&all.as_slice()[w], &[], inputs)),
            Weight::Bf16(all) if self.bf16_rows => {
                let pairs = all.as_slice()[w].as_chunks::<2>().0;
                self.isa.run_pairs(product.with::<_, f32, 2>(pairs, &[], inputs));
            }
            Weight::Bf16(all) => self.isa.run(product.with::<_, f32, 1>(&all.as_slice()[w], &[], inputs)),
            Weight::Int8 { codes, scales } => {
                let (codes, groups) = (&codes.as_slice()[w], scales.len() / part.outputs);
                let (of, group) = (inside.start * groups..inside.end * groups, inputs / groups);
                match scales {
                    Values::F32(all) => self.isa.run(product.with(codes, &all.as_slice()[of], group)),
                    Values::Bf16(all) => self.isa.run(product.with(codes, &all.as_slice()[of], group)),
                }
            }
            Weight::Int4 { codes, scales } => {
                let codes = &codes.as_slice()[w.start / 2..w.end / 2];
                let groups = scales.len() / part.outputs;
                let (of, group) = (inside.start * groups..inside.end * groups, inputs / groups);
                match scales {
                    Values::F32(all) => self.isa.run(product.with(codes, &all.as_slice()[of], group)),
                    Values::Bf16(all) => self.isa.run(product.with(codes, &all.as_slice()[of], group)),
                }
            }
        }
    }
}
