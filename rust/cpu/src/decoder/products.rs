//! Products of rows with a projection's weights, and the conversion of rows for them.

use super::Context;
use super::loras::{Added, LoraRoom};
use crate::linear::{Linear, Part, Weight};
use crate::lora::Projection;
use crate::pass::MAX_TILE_ROWS;
use crate::weights::Weights;
use specrs_cpu_kernels::{
    BlockProduct, Isa, LANES, Layout, PAIRS, Product, Round, RoundPairs, Rounded, RoundedRoom, Rounding, Split, Tile,
    TileProduct, Tiles, Unpacked, Vector, Vectors,
};
use std::ops::Range;

/// Returns whether tiles multiply packed weights by `rows` rows faster than vectors do. Tiles take sixteen rows at
/// once, so they are faster if most of the sixteen are used and vectors do not take all rows in one go.
fn fill_tiles(rows: usize, to: Rounding) -> bool {
    let least = match to {
        Rounding::Int16 => 10,
        Rounding::Int8 => 13,
    };
    rows >= (least * rows.div_ceil(LANES)).max(13)
}

/// Input of a projection, and the products of adapters that are added to its outputs.
pub(super) struct Fed<'a> {
    input: Input<'a>,
    /// Products of adapters, if some row has one.
    added: Option<Added<'a>>,
}

impl<'a> Fed<'a> {
    /// Makes the input of a projection without packed parts to which no adapter adds. `x` must have gone through
    /// [`round`](Context::round).
    pub(super) fn rows(x: &'a [Vector]) -> Self {
        Self { input: Input::Rows { x, rounded: None }, added: None }
    }
}

/// Rows in the form that products take.
enum Input<'a> {
    /// Rows `[rows, ceil(inputs / 16)]` that went through [`round`](Context::round), and the same rows rounded for
    /// packed parts.
    Rows { x: &'a [Vector], rounded: Option<Rounded<'a>> },
    /// Rows as tiles, and room for a block of weights `[inputs / 32, 2]`.
    Tiles { tiles: Tiles, layout: Layout, rows: &'a [Tile], block: &'a mut [Tile] },
}

/// Scratch memory of one thread for inputs of projections.
#[derive(Default)]
pub(super) struct FedRoom {
    pub(super) tiles: TileRoom,
    pub(super) rounded: RoundedRoom,
    pub(super) loras: LoraRoom,
}

impl FedRoom {
    /// Reserves memory for the packed projections of a model.
    pub(super) fn new(weights: &Weights, isa: Isa) -> Self {
        let packed = weights.projections().filter(|(_, linear)| linear.has_packed());
        let inputs = packed.map(|(_, linear)| linear.inputs).max().unwrap_or(0);
        Self { rounded: RoundedRoom::new(MAX_TILE_ROWS, inputs, isa.tiles().is_some()), ..Self::default() }
    }

    pub(super) fn poison(&mut self) {
        self.tiles.poison();
        self.rounded.poison();
        self.loras.poison();
    }
}

/// Scratch memory of one thread for products by tiles; empty without such products.
#[derive(Default)]
pub(super) struct TileRoom {
    rows: Vectors,
    block: Vectors,
}

impl TileRoom {
    /// Reserves memory for all projections of a model.
    pub(super) fn new(weights: &Weights) -> Self {
        let inputs = weights.projections().map(|(_, linear)| linear.inputs).max().unwrap_or(0).next_multiple_of(PAIRS);
        let vectors = |tiles: usize| tiles * size_of::<Tile>() / size_of::<Vector>();
        let rows = Layout::new(MAX_TILE_ROWS, false).tiles(inputs);
        Self { rows: Vectors::new(vectors(rows)), block: Vectors::new(vectors(inputs / PAIRS * 2)) }
    }

    pub(super) fn poison(&mut self) {
        self.rows.as_flattened_mut().fill(f32::NAN);
        self.block.as_flattened_mut().fill(f32::NAN);
    }
}

/// Returns whether this projection can be multiplied by tiles: its weights are bf16 with a multiple of 32 inputs.
fn by_tiles(linear: &Linear) -> bool {
    let bf16 = |weight: &Weight| matches!(weight, Weight::Bf16(_));
    linear.inputs.is_multiple_of(PAIRS) && linear.parts.iter().all(|part| bf16(&part.weight))
}

impl<'c> Context<'c> {
    /// Rounds `rows` rows of `inputs` numbers to bf16 before a product, if the decoder does so. Does nothing to rows
    /// that tiles multiply, which are rounded when they are laid out as tiles.
    pub(super) fn round(&self, x: &mut [Vector], rows: usize, inputs: usize) {
        if self.activations.bf16 && self.tiles.is_none() {
            RoundPairs { x: &mut x[..rows * (inputs / LANES)] }.run(self.isa);
        }
    }

    /// Prepares the tile's rows in `x` as input of a projection. They must have gone through [`round`](Self::round).
    pub(super) fn fed<'a>(
        &self,
        projection: Projection,
        linear: &Linear,
        x: &'a [Vector],
        room: &'a mut FedRoom,
    ) -> Fed<'a>
    where
        'c: 'a,
    {
        let added = self.lower(projection, linear.inputs, x, &mut room.loras);
        let input = match self.tiles.filter(|_| by_tiles(linear)) {
            Some(tiles) => self.split(tiles, linear, x, self.rows(), &mut room.tiles),
            None => self.input(linear, x, self.rows(), &mut room.rounded),
        };
        Fed { input, added }
    }

    /// Prepares the rows `sent` of the tile, which ascend and lie in `x`, as input of an expert's projection. They must
    /// have gone through [`round`](Self::round).
    pub(super) fn fed_sent<'a>(
        &self,
        projection: Projection,
        linear: &Linear,
        x: &'a [Vector],
        sent: &[usize],
        room: &'a mut FedRoom,
    ) -> Fed<'a>
    where
        'c: 'a,
    {
        let added = self.lower_sent(sent, projection, linear.inputs, x, &mut room.loras);
        Fed { input: self.input(linear, x, sent.len(), &mut room.rounded), added }
    }

    /// Prepares `rows` rows in `x` as input of a projection to which no adapter adds. They must have gone through
    /// [`round`](Self::round).
    pub(super) fn fed_rows<'a>(
        &self,
        linear: &Linear,
        x: &'a [Vector],
        rows: usize,
        room: &'a mut RoundedRoom,
    ) -> Fed<'a> {
        Fed { input: self.input(linear, x, rows, room), added: None }
    }

    fn input<'a>(&self, linear: &Linear, x: &'a [Vector], rows: usize, room: &'a mut RoundedRoom) -> Input<'a> {
        let rounded = linear.has_packed().then(|| {
            let (x, to) = (&x[..rows * (linear.inputs / LANES)], self.activations.packed);
            let tiles = self.isa.tiles().filter(|_| fill_tiles(rows, to));
            Round { x, inputs: linear.inputs, order: linear.order(), to, tiles, room }.run(self.isa)
        });
        Input::Rows { x, rounded }
    }

    fn split<'a>(
        &self,
        tiles: Tiles,
        linear: &Linear,
        x: &'a [Vector],
        rows: usize,
        room: &'a mut TileRoom,
    ) -> Input<'a> {
        let layout = Layout::new(rows, self.activations.bf16);
        let (inputs, x) = (linear.inputs, &x[..rows * (linear.inputs / LANES)]);
        let out = &mut room.rows.as_chunks_mut().0[..layout.tiles(inputs)];
        Split { layout, inputs, x, out }.run(self.isa);
        Input::Tiles { tiles, layout, rows: out, block: &mut room.block.as_chunks_mut().0[..inputs / PAIRS * 2] }
    }

    /// Computes outputs `outputs` of a projection for `rows` rows, including bias and adapters. `y[row, i]` is output
    /// `outputs.start + i`, and rows of `y` are `stride` long. `fed` is the result of [`fed`](Self::fed) for this
    /// projection.
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
                        TileProduct { tiles, layout, inputs, w, x, rows, block, y, y_stride: stride }.run(self.isa);
                    }
                    (Input::Tiles { .. }, _) => unreachable!("only bf16 weights are multiplied by tiles"),
                    (Input::Rows { rounded: Some(x), .. }, Weight::Packed(w)) => {
                        let (outputs, x) = (inside.clone(), *x);
                        BlockProduct { w, outputs, x, y, y_stride: stride }.run(self.isa);
                    }
                    (Input::Rows { x, .. }, _) => {
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

    /// Computes outputs `inside` of one part of a projection by vectors.
    pub(super) fn by_vectors(&self, part: &Part, inside: Range<usize>, product: Product<'_>) {
        let inputs = product.inputs;
        let w = inside.start * inputs..inside.end * inputs;
        let w = match &part.weight {
            Weight::Packed(_) => unreachable!("rows are rounded for packed parts"),
            Weight::F32(all) => Unpacked::F32(&all.as_slice()[w]),
            Weight::Bf16(all) if self.activations.bf16 => Unpacked::Pairs(all.as_slice()[w].as_chunks().0),
            Weight::Bf16(all) => Unpacked::Bf16(&all.as_slice()[w]),
        };
        product.run(w, self.isa);
    }
}
