//! Attention of a layer: queries, keys and values, their norm and rotation, the KV write, attention, output projection.
//! It takes two phases if KV heads split evenly among the threads, else three. It takes one more phase if all
//! heads are normed as one, and one more if a norm follows the attention.

use super::Context;
use super::products::Fed;
use super::scratch::{Buffers, Private, RUN};
use super::shares::Cut;
use crate::kv_cache::KvShape;
use crate::layer::Layer;
use crate::lora::Projection;
use crate::pass::{MAX_TILE_ROWS, Pass};
use specrs_cpu_kernels::{
    Attend, AttendScratch, Columns, KvElement, KvHead, LANES, Planes, PlanesMut, QkHead, RmsScale, Sigmoid, Vector,
};

/// Location of the KV of a tile's rows, in the blocks of one KV group.
pub(super) struct Paging<'a> {
    shape: KvShape,
    /// KV slots of the tile's rows.
    slots: &'a [i64],
    /// Block table of the tile's requests, `[rows, max_blocks]`.
    block_table: &'a [i64],
}

/// Piece of attention work, in units of (KV head, row).
struct Share<'a> {
    units: std::ops::Range<usize>,
    /// Queries, from head `first_head` on.
    q: &'a [Vector],
    first_head: usize,
    /// Output of attention, `[units, group * head_dim]`.
    out: &'a mut [f32],
}

/// Inputs of the heads of q, k and v, in addition to the rows that their projection is fed.
struct HeadInputs<'a> {
    /// Projected q, k and v of all rows, if one norm goes over all heads. Not read if each head has its own norm.
    projected: &'a [f32],
    /// Factors of the two norms over all query heads and over all key heads, for each row. Only with norms over all
    /// heads.
    scales: &'a [f32],
    cos: &'a [f32],
    sin: &'a [f32],
    /// Factor of each row's queries; empty if all are 1.
    query_factors: &'a [f32],
    /// KV slot of each row.
    slots: &'a [i64],
}

/// Outputs of a piece of the heads of q, k and v.
struct HeadOutputs<'a, 'p, T> {
    /// Queries, from the piece's first head on.
    q: &'a mut [Vector],
    /// Keys and values in the KV cache.
    planes: &'a mut PlanesMut<'p, T>,
}

impl<'a> Context<'a> {
    pub(super) fn paging(&self, group: usize, shape: KvShape) -> Paging<'a> {
        let (slots, block_table) = self.pass.in_group(group, &(self.first..self.first + self.rows()));
        Paging { shape, slots, block_table }
    }

    pub(super) fn attention<T: KvElement>(
        &self,
        layer: &Layer,
        kv: &mut [T],
        paging: &Paging<'_>,
        buffers: &mut Buffers,
        private: &mut [Private],
    ) {
        let shape = &layer.shape;
        let (rows, shares, kv_heads) = (self.rows(), self.shares, shape.num_kv_heads);
        let sizes = [paging.shape.num_blocks + 1, 2 * kv_heads, paging.shape.block_size * shape.head_dim];
        let Buffers { h, e, added, heads, q, gates, attended, cos, sin, query_factors, .. } = buffers;
        if layer.qk_norm_whole {
            self.project(layer, &shares.qkv, h, e, heads, private);
        }
        let heads = &*heads;
        {
            let len = q.len();
            let qs = Columns::new(q, 1, len, &shares.q_vectors);
            let len = gates.len();
            let gates = layer.output_gate.then(|| Columns::new(gates, 1, len, &shares.q_vectors));
            let planes = Planes::new(kv, sizes, &shares.k.bounds, &shares.v.bounds);
            let len = attended.len();
            let outs = Columns::new(attended, 1, len, &shares.attended);
            let own = Columns::new(private, 1, shares.participants, &shares.each);
            self.session.run(&shares.q.first, &|t, pieces| {
                let mut own = own.take(t);
                let own = &mut own.row_mut(0)[0];
                if layer.qk_norm_whole {
                    self.whole_scales(heads, own);
                } else {
                    self.attention_input(h, e, layer.input_norm.as_deref(), own);
                    self.round(&mut own.x, rows, layer.qkv.inputs);
                }
                let Private { x, y, z, scales, attend, room, .. } = own;
                let whole = layer.qk_norm_whole;
                let mut fed = if whole { Fed::rows(&[]) } else { self.fed(Projection::Qkv, &layer.qkv, x, room) };
                let slots = paging.slots;
                let query_factors = if self.scales_queries(layer) { &**query_factors } else { &[] };
                let inputs = HeadInputs { projected: heads, scales, cos, sin, query_factors, slots };
                for piece in pieces {
                    if let Some(gates) = &gates {
                        self.gates(layer, piece, &mut fed, z, gates.take(piece).row_mut(0));
                    }
                    let (mut qs, mut planes) = (qs.take(piece), planes.take(piece));
                    let q = qs.row_mut(0);
                    self.heads(layer, piece, &inputs, &mut fed, y, HeadOutputs { q, planes: &mut planes });
                    if shares.fused {
                        let mut outs = outs.take(piece);
                        let (units, first_head) = (shares.units.piece(piece), shares.q.bounds[piece]);
                        let share = Share { units, q, first_head, out: outs.row_mut(0) };
                        let planes = &planes;
                        let head = |head| KvHead::Own { planes, key: head, value: kv_heads + head };
                        self.attend(layer, share, head, paging, attend);
                    }
                }
            });
        }
        if !shares.fused {
            let (kv, q) = (&*kv, &**q);
            let len = attended.len();
            let outs = Columns::new(attended, 1, len, &shares.attended);
            let own = Columns::new(private, 1, shares.participants, &shares.each);
            self.session.run(&shares.units.first, &|t, pieces| {
                let mut own = own.take(t);
                let scratch = &mut own.row_mut(0)[0].attend;
                for piece in pieces {
                    let mut outs = outs.take(piece);
                    let share = Share { units: shares.units.piece(piece), q, first_head: 0, out: outs.row_mut(0) };
                    let head = |head| KvHead::Shared { layer: kv, sizes, key: head, value: kv_heads + head };
                    self.attend(layer, share, head, paging, scratch);
                }
            });
        }
        let (attended, gates) = (&*attended, &**gates);
        let norm = layer.attention_output_norm.as_deref();
        let out = if norm.is_some() { &mut *added } else { &mut *h };
        let outs = Columns::new(out, rows, shape.hidden_size, &shares.hidden.bounds);
        let own = Columns::new(private, 1, shares.participants, &shares.each);
        self.session.run(&shares.hidden.first, &|t, pieces| {
            let mut own = own.take(t);
            let Private { x, y, room, .. } = &mut own.row_mut(0)[0];
            self.collect(layer, attended, x);
            if layer.output_gate {
                self.apply_gates(gates, x);
            }
            self.round(x, rows, layer.o.inputs);
            let mut fed = self.fed(Projection::O, &layer.o, x, room);
            for piece in pieces {
                self.give(&layer.o, norm.is_some(), &mut fed, y, &mut outs.take(piece));
            }
        });
        self.add_normed(norm, 1.0, added, h, private);
    }

    /// Writes a layer's input projection to `out` `[rows, outputs]`, as one phase: q, k and v of attention, or the
    /// inputs of what replaces it. `cut` splits the outputs among the threads.
    pub(super) fn project(
        &self,
        layer: &Layer,
        cut: &Cut,
        h: &[f32],
        e: &[f32],
        out: &mut [f32],
        private: &mut [Private],
    ) {
        let rows = self.rows();
        let outs = Columns::new(out, rows, layer.qkv.outputs(), &cut.bounds);
        let own = Columns::new(private, 1, self.shares.participants, &self.shares.each);
        self.session.run(&cut.first, &|t, pieces| {
            let mut own = own.take(t);
            let own = &mut own.row_mut(0)[0];
            self.attention_input(h, e, layer.input_norm.as_deref(), own);
            self.round(&mut own.x, rows, layer.qkv.inputs);
            let Private { x, y, room, .. } = own;
            let mut fed = self.fed(Projection::Qkv, &layer.qkv, x, room);
            for piece in pieces {
                self.put_product(&layer.qkv, &mut fed, rows, y, &mut outs.take(piece));
            }
        });
    }

    /// Computes the factors of the norms of all query heads and of all key heads for projected rows.
    fn whole_scales(&self, heads: &[f32], own: &mut Private) {
        let shape = &self.weights.shape;
        let (q, k) = (shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim);
        let (of_q, of_k) = own.scales.split_at_mut(MAX_TILE_ROWS);
        let scales = of_q.iter_mut().zip(of_k);
        for (row, (of_q, of_k)) in heads.chunks_exact(q + 2 * k).take(self.rows()).zip(scales) {
            *of_q = RmsScale { x: &row[..q], eps: shape.rms_norm_eps }.run(self.isa);
            *of_k = RmsScale { x: &row[q..q + k], eps: shape.rms_norm_eps }.run(self.isa);
        }
    }

    /// Writes the rows of head `head` of q, k and v, `[rows, head_dim]`, into `y`. If all heads are normed as one, they
    /// are read from `given` and normed.
    fn project_head(&self, layer: &Layer, head: usize, given: &HeadInputs<'_>, fed: &mut Fed<'_>, y: &mut [f32]) {
        let HeadInputs { projected: heads, scales, .. } = given;
        let shape = &layer.shape;
        let (dim, rows) = (shape.head_dim, self.rows());
        let Some((q_norm, k_norm)) = layer.qk_norm.as_ref().filter(|_| layer.qk_norm_whole) else {
            // With gates, each query is followed by its gate.
            let before = if layer.output_gate { head.min(shape.num_heads) } else { 0 };
            // Values that are keys are the product of the key head.
            let is_value = head >= shape.num_heads + shape.num_kv_heads;
            let behind = if layer.keys_are_values && is_value { shape.num_kv_heads } else { 0 };
            let first = (head + before - behind) * dim;
            return self.product(&layer.qkv, first..first + dim, fed, rows, y, dim);
        };
        let keys = shape.num_heads..shape.num_heads + shape.num_kv_heads;
        let (norm, scales) = match head {
            head if head < keys.start => (Some(&q_norm[head * dim..][..dim]), &scales[..rows]),
            head if head < keys.end => (Some(&k_norm[(head - keys.start) * dim..][..dim]), &scales[MAX_TILE_ROWS..]),
            _ => (None, &scales[..rows]),
        };
        let given = heads.chunks_exact(layer.qkv.outputs()).map(|row| &row[head * dim..][..dim]);
        for ((y, given), scale) in y.chunks_exact_mut(dim).zip(given).zip(scales).take(rows) {
            y.copy_from_slice(given);
            for (y, weight) in y.iter_mut().zip(norm.into_iter().flatten()) {
                *y = *y * scale * weight;
            }
        }
    }

    /// Returns whether the layer's queries are multiplied by their factors.
    fn scales_queries(&self, layer: &Layer) -> bool {
        self.weights.query_scaling.is_some_and(|scaling| !scaling.unrotated || layer.rotation.is_none())
    }

    /// Computes the gates of the query heads of a piece, after the sigmoid, `[heads, rows, ceil(head_dim / 16)]`.
    fn gates(&self, layer: &Layer, piece: usize, fed: &mut Fed<'_>, z: &mut [f32], out: &mut [Vector]) {
        let (dim, rows) = (layer.shape.head_dim, self.rows());
        let vectors = dim.div_ceil(LANES);
        for (head, out) in self.shares.q.piece(piece).zip(out.chunks_exact_mut(rows * vectors)) {
            let first = (2 * head + 1) * dim;
            self.product(&layer.qkv, first..first + dim, fed, rows, z, dim);
            for (x, out) in z.chunks_exact(dim).zip(out.chunks_exact_mut(vectors)) {
                Sigmoid { x, out }.run(self.isa);
            }
        }
    }

    /// Computes a piece of the heads of q, k and v. Keys and values go into the cache if the row has a slot and is not
    /// masked. A layer that attends another layer's KV computes only queries.
    fn heads<T: KvElement>(
        &self,
        layer: &Layer,
        piece: usize,
        given: &HeadInputs<'_>,
        fed: &mut Fed<'_>,
        y: &mut [f32],
        out: HeadOutputs<'_, '_, T>,
    ) {
        let HeadOutputs { q, planes } = out;
        let shape = &layer.shape;
        let (dim, heads, kv_heads, rows) = (shape.head_dim, shape.num_heads, shape.num_kv_heads, self.rows());
        let (vectors, shares) = (dim.div_ceil(LANES), self.shares);
        let block_size = planes.inner() / dim;
        let norms = layer.qk_norm.as_ref().filter(|_| !layer.qk_norm_whole);
        let interleaved = self.weights.interleaved_rope;
        let rotate = |row: usize, x: &mut [f32], norm| {
            let angles = layer.rotation.map_or(0..0, |rotation| self.angles(rotation, row));
            let (cos, sin) = (&given.cos[angles.clone()], &given.sin[angles]);
            QkHead { x, norm, eps: shape.rms_norm_eps, cos, sin, interleaved }.run(self.isa);
        };
        let queries = shares.q.piece(piece);
        for head in queries.clone() {
            self.project_head(layer, head, given, fed, y);
            let q = &mut q[(head - queries.start) * rows * vectors..][..rows * vectors];
            for (row, (q, y)) in q.chunks_exact_mut(vectors).zip(y.chunks_exact_mut(dim)).enumerate() {
                rotate(row, y, norms.map(|norms| &*norms.0));
                let (values, padding) = q.as_flattened_mut().split_at_mut(dim);
                values.copy_from_slice(y);
                padding.fill(0.0);
                if let Some(factor) = given.query_factors.get(row) {
                    for x in values {
                        *x *= factor;
                    }
                }
            }
        }
        if layer.source.is_some() {
            return;
        }
        // Key heads, then value heads, as in the projection and in a block.
        for head in shares.k.piece(piece).chain(shares.v.piece(piece)) {
            self.project_head(layer, heads + head, given, fed, y);
            for (row, y) in y.chunks_exact_mut(dim).take(rows).enumerate() {
                if head < kv_heads {
                    rotate(row, y, norms.map(|norms| &*norms.1));
                } else if let Some(norm) = &layer.value_norm {
                    let eps = shape.rms_norm_eps;
                    QkHead { x: &mut *y, norm: Some(norm), eps, cos: &[], sin: &[], interleaved }.run(self.isa);
                }
                if given.slots[row] >= 0 && self.tile.positions[row] >= 0 {
                    let slot = given.slots[row] as usize;
                    let plane = planes.plane_mut(slot / block_size, head);
                    let scale = if head < kv_heads { layer.kv_scales.0 } else { layer.kv_scales.1 };
                    T::write(y, scale, &mut plane[slot % block_size * dim..]);
                }
            }
        }
    }

    /// Computes a piece of attention. Neighbouring rows of one request are attended together.
    fn attend<'k, T: KvElement>(
        &self,
        layer: &Layer,
        Share { units, q, first_head, out }: Share<'_>,
        head_of: impl Fn(usize) -> KvHead<'k, T>,
        paging: &Paging<'_>,
        scratch: &mut AttendScratch,
    ) {
        let shape = &layer.shape;
        let (rows, group, dim) = (self.rows(), shape.group(), shape.head_dim);
        let vectors = dim.div_ceil(LANES);
        let (k_scale, v_scale) = if T::CODES { layer.kv_scales } else { (1.0, 1.0) };
        let Pass { positions, sequences, max_blocks, .. } = self.tile;
        let mut unit = units.start;
        while unit < units.end {
            let (head, row) = (unit / rows, unit % rows);
            let most = (units.end - unit).min(rows - row).min(RUN);
            let same =
                |&next: &usize| (positions[next] < 0) == (positions[row] < 0) && sequences[next] == sequences[row];
            let len = (row..row + most).take_while(same).count();
            let width = group * dim;
            let out = &mut out[(unit - units.start) * width..][..len * width];
            unit += len;
            if positions[row] < 0 {
                out.fill(0.0);
                continue;
            }
            let attend = Attend {
                kv: head_of(head),
                blocks: &paging.block_table[sequences[row] * max_blocks..][..max_blocks],
                block_size: paging.shape.block_size,
                head_dim: dim,
                first: self.tile.first(sequences[row]),
                window: layer.window,
                chunked: self.weights.chunked,
                positions: &positions[row..row + len],
                heads: group,
                sinks: layer.sinks.as_ref().map(|sinks| &sinks[head * group..(head + 1) * group]),
                q: &q[((head * group - first_head) * rows + row) * vectors..],
                head_stride: rows * vectors,
                scale: self.weights.multipliers.scores * k_scale,
                scratch: &mut *scratch,
                out: &mut *out,
            };
            T::attend(attend, self.isa);
            if T::CODES {
                for x in out.iter_mut() {
                    *x *= v_scale;
                }
            }
        }
    }

    /// Copies the attention output `[kv_heads, rows, group * head_dim]` to `x` as rows of a projection's input.
    fn collect(&self, layer: &Layer, attended: &[f32], x: &mut [Vector]) {
        let shape = &layer.shape;
        let (rows, width) = (self.rows(), shape.group() * shape.head_dim);
        let inputs = shape.num_heads * shape.head_dim;
        for (row, x) in x.chunks_exact_mut(inputs.div_ceil(LANES)).take(rows).enumerate() {
            let (values, padding) = x.as_flattened_mut().split_at_mut(inputs);
            for (head, out) in values.chunks_exact_mut(width).enumerate() {
                out.copy_from_slice(&attended[(head * rows + row) * width..][..width]);
            }
            padding.fill(0.0);
        }
    }
}
