//! `LoRA` adapters in a pass: for the rows that have one, they add `B A x` to a projection's outputs, where `A x` has
//! few features. Each thread computes all of `A x`, which takes less time than another phase, and its own outputs of B.
//! So sums have one order, regardless of other rows and of threads.

use super::{CHUNK, Context};
use crate::lora::{Lora, Projection};
use crate::pass::MAX_TILE_ROWS;
use crate::shape::ModelShape;
use specrs_cpu_kernels::{LANES, Product, Vector, Vectors};
use std::borrow::Cow;
use std::ops::Range;

/// Neighbouring rows that use the same adapter, of a tile or of what an expert is fed.
#[derive(Clone)]
pub(super) struct AdaptedRows<'a> {
    rows: Range<usize>,
    lora: &'a Lora,
}

impl<'a> AdaptedRows<'a> {
    /// Groups neighbouring rows of a tile that use the same adapter.
    pub(super) fn of(adapters: &[Option<&'a Lora>]) -> Vec<Self> {
        let mut found: Vec<Self> = Vec::new();
        for (row, lora) in adapters.iter().enumerate() {
            let Some(lora) = *lora else { continue };
            match found.last_mut() {
                Some(last) if last.rows.end == row && std::ptr::eq(last.lora, lora) => last.rows.end += 1,
                _ => found.push(Self { rows: row..row + 1, lora }),
            }
        }
        found
    }

    /// Returns the adapters of the rows `sent` of a tile, which ascend. Rows are counted among these.
    fn among(adapted: &[Self], sent: &[usize]) -> Vec<Self> {
        let place = |row: usize| sent.partition_point(|&sent| sent < row);
        let among = adapted.iter().map(|own| Self { rows: place(own.rows.start)..place(own.rows.end), ..own.clone() });
        among.filter(|own| !own.rows.is_empty()).collect()
    }
}

/// Scratch memory of one thread for the products of adapters; empty before the first adapter.
#[derive(Default)]
pub(super) struct LoraRoom {
    /// Products `A x` of one adapter's rows, part by part, `[rows, vectors]`.
    low: Vectors,
    /// Products `B A x`, `[rows, chunk]`.
    y: Vec<f32>,
}

impl LoraRoom {
    /// Reserves memory for an adapter with `vectors` vectors per row, in a model with layers of the sizes `kinds`.
    pub(super) fn reserve(&mut self, vectors: usize, kinds: &[ModelShape]) {
        if self.low.len() < MAX_TILE_ROWS * vectors {
            self.low = Vectors::new(MAX_TILE_ROWS * vectors);
            let widest = kinds.iter().map(|kind| kind.head_dim).fold(CHUNK, usize::max);
            self.y = vec![0.0; MAX_TILE_ROWS * widest];
        }
    }

    pub(super) fn poison(&mut self) {
        self.low.as_flattened_mut().fill(f32::NAN);
        self.y.fill(f32::NAN);
    }
}

/// Products of adapters that are to be added to a projection's outputs.
pub(super) struct Added<'a> {
    adapted: Cow<'a, [AdaptedRows<'a>]>,
    projection: Projection,
    low: &'a [Vector],
    y: &'a mut [f32],
}

impl<'c> Context<'c> {
    /// Computes `A x` of the rows that have adapters, from `x` `[rows, ceil(inputs / 16)]`. Returns `None` if no row
    /// has an adapter.
    pub(super) fn lower<'a>(
        &self,
        projection: Projection,
        inputs: usize,
        x: &[Vector],
        room: &'a mut LoraRoom,
    ) -> Option<Added<'a>>
    where
        'c: 'a,
    {
        self.lower_of(Cow::Borrowed(self.adapted), projection, inputs, x, room)
    }

    /// Computes `A x` of the rows that have adapters among the rows `sent` of the tile, which ascend, from `x`
    /// `[sent, ceil(inputs / 16)]`. Returns `None` if no row has an adapter.
    pub(super) fn lower_sent<'a>(
        &self,
        sent: &[usize],
        projection: Projection,
        inputs: usize,
        x: &[Vector],
        room: &'a mut LoraRoom,
    ) -> Option<Added<'a>>
    where
        'c: 'a,
    {
        if self.adapted.is_empty() {
            return None;
        }
        self.lower_of(Cow::Owned(AdaptedRows::among(self.adapted, sent)), projection, inputs, x, room)
    }

    fn lower_of<'a>(
        &self,
        adapted: Cow<'a, [AdaptedRows<'a>]>,
        projection: Projection,
        inputs: usize,
        x: &[Vector],
        room: &'a mut LoraRoom,
    ) -> Option<Added<'a>> {
        if adapted.is_empty() {
            return None;
        }
        let (width, vectors) = (room.low.len() / MAX_TILE_ROWS, inputs.div_ceil(LANES));
        for AdaptedRows { rows, lora } in adapted.iter() {
            let x = &x[rows.start * vectors..rows.end * vectors];
            let mut from = rows.start * width;
            for part in lora.parts(self.layer, projection) {
                let low = &mut room.low[from..from + rows.len() * part.vectors()];
                from += low.len();
                let y = low.as_flattened_mut();
                y.fill(0.0);
                let y_stride = part.vectors() * LANES;
                self.by_vectors(&part.a, 0..part.rank(), Product { inputs, x, rows: rows.len(), y, y_stride });
            }
        }
        Some(Added { adapted, projection, low: &room.low, y: &mut room.y })
    }

    /// Adds `B A x` to outputs `outputs` of the rows that have adapters. `y` has the rows of
    /// [`product`](Self::product), each `stride` long.
    pub(super) fn raise(&self, added: &mut Added<'_>, outputs: &Range<usize>, y: &mut [f32], stride: usize) {
        let width = added.low.len() / MAX_TILE_ROWS;
        for AdaptedRows { rows, lora } in added.adapted.iter() {
            let mut from = rows.start * width;
            for part in lora.parts(self.layer, added.projection) {
                let x = &added.low[from..from + rows.len() * part.vectors()];
                from += x.len();
                let (start, end) = (outputs.start.max(part.first), outputs.end.min(part.first + part.b.outputs));
                if start >= end {
                    continue;
                }
                let given = &mut added.y[..rows.len() * (end - start)];
                let product = Product { inputs: part.rank(), x, rows: rows.len(), y: given, y_stride: end - start };
                self.by_vectors(&part.b, start - part.first..end - part.first, product);
                for (row, given) in rows.clone().zip(given.chunks_exact(end - start)) {
                    let y = &mut y[row * stride + start - outputs.start..][..end - start];
                    for (y, given) in y.iter_mut().zip(given) {
                        *y += given;
                    }
                }
            }
        }
    }
}
