//! What `LoRA` adapters add behind a projection: two products of few outputs for the rows that have one. Each participant
//! computes all of `A x`, which is less than a phase more, and the outputs of B that are its own; so sums have one order, whatever
//! the other rows and the threads.

use super::Context;
use super::scratch::CHUNK;
use crate::isa::{LANES, Vector};
use crate::kernels::Product;
use crate::lora::{Lora, Projection};
use crate::memory::Vectors;
use crate::pass::MAX_TILE_ROWS;
use crate::weights::ModelShape;
use std::ops::Range;

/// Rows of a tile that lie side by side and have an adapter.
pub(super) struct AdaptedRows<'a> {
    rows: Range<usize>,
    lora: &'a Lora,
}

impl<'a> AdaptedRows<'a> {
    /// Those of a tile's rows.
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
}

/// A participant's memory for these products; none before there are any.
#[derive(Default)]
pub(super) struct LoraRoom {
    /// `[rows, vectors]` A x, of one adapter's rows part by part.
    low: Vectors,
    /// `[rows, chunk]` B A x.
    y: Vec<f32>,
}

impl LoraRoom {
    /// Makes room for an adapter of so many vectors a row.
    pub(super) fn reserve(&mut self, vectors: usize, shape: &ModelShape) {
        if self.low.len() < MAX_TILE_ROWS * vectors {
            self.low = Vectors::new(MAX_TILE_ROWS * vectors);
            self.y = vec![0.0; MAX_TILE_ROWS * CHUNK.max(shape.head_dim)];
        }
    }

    pub(super) fn poison(&mut self) {
        self.low.as_flattened_mut().fill(f32::NAN);
        self.y.fill(f32::NAN);
    }
}

/// What is to be added to a projection's outputs.
pub(super) struct Added<'a> {
    projection: Projection,
    low: &'a [Vector],
    y: &'a mut [f32],
}

impl Context<'_> {
    /// `A x` of the rows that have adapters, `x` `[rows, ceil(inputs / 16)]`.
    pub(super) fn lower<'a>(
        &self,
        projection: Projection,
        inputs: usize,
        x: &[Vector],
        room: &'a mut LoraRoom,
    ) -> Option<Added<'a>> {
        if self.adapted.is_empty() {
            return None;
        }
        let (width, vectors) = (room.low.len() / MAX_TILE_ROWS, inputs.div_ceil(LANES));
        for AdaptedRows { rows, lora } in self.adapted {
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
        Some(Added { projection, low: &room.low, y: &mut room.y })
    }

    /// Adds `B A x` to outputs `outputs` of the rows that have adapters; `y` is as in [`product`](Self::product).
    pub(super) fn raise(&self, added: &mut Added<'_>, outputs: &Range<usize>, y: &mut [f32], stride: usize) {
        let width = added.low.len() / MAX_TILE_ROWS;
        for AdaptedRows { rows, lora } in self.adapted {
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
