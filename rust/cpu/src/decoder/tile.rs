//! The way of a tile through the layers, and what several phases use: embeddings, norms, and the input of attention.

use super::scratch::{Buffers, Private};
use super::states::StateTile;
use super::{Context, Range};
use crate::kv_cache::{KvCache, KvLayer};
use crate::layer::Mlp;
use crate::pass::{Entries, MAX_TILE_ROWS};
use crate::weights::{HeadInput, QueryScaling};
use specrs_cpu_kernels::{Angles, LANES, RmsNorm, ValuesMut, Vector, query_factor};

impl Context<'_> {
    pub(super) fn rows(&self) -> usize {
        self.tile.len()
    }

    pub(super) fn layers(
        &self,
        kv: &mut KvCache,
        requests: StateTile<'_>,
        buffers: &mut Buffers,
        private: &mut [Private],
        mut entries: Entries<'_>,
    ) {
        self.embed(buffers);
        if let Some(added) = &self.weights.layer_embedding {
            Context { tiles: None, ..*self }.embed_layers(added, buffers, private);
        }
        if let Some(head) = self.weights.head.as_ref().filter(|head| head.combines()) {
            Context { tiles: None, ..*self }.combine(head, buffers, private);
        }
        let kv_shape = kv.shape;
        let mut with_keys = kv.layers.iter();
        for (i, layer) in self.weights.layers.iter().enumerate() {
            if !self.weights.shares_kv() {
                self.keep(i, &buffers.h, &mut entries);
            }
            let cx = Context { layer: i, shares: &self.kinds[layer.kind], ..*self };
            if let Some(state) = &layer.state {
                cx.state_layer(layer, state, &mut kv.states, requests, buffers, private);
            } else if let Some(KvLayer { group, place }) = layer.kv_layer(&kv.layers, &mut with_keys) {
                let paging = self.paging(group, kv_shape);
                match &mut kv.places[place] {
                    ValuesMut::F32(kv) => cx.attention(layer, kv.as_mut_slice(), &paging, buffers, private),
                    ValuesMut::Bf16(kv) => cx.attention(layer, kv.as_mut_slice(), &paging, buffers, private),
                    ValuesMut::E4m3(kv) => cx.attention(layer, kv.as_mut_slice(), &paging, buffers, private),
                    ValuesMut::E5m2(kv) => cx.attention(layer, kv.as_mut_slice(), &paging, buffers, private),
                }
            }
            match &layer.mlp {
                Mlp::Dense { gate_up, down } => cx.mlp(layer, gate_up, down, buffers, private),
                Mlp::Experts(mixture) => cx.experts(layer, mixture, buffers, private),
            }
            if let Some((gate, projection, norm)) = &layer.addition {
                let linears = (gate, projection);
                Context { tiles: None, ..cx }.add_embedding(linears, norm, layer.scalar, buffers, private);
            }
        }
        if let Some(post) = self.weights.head.as_ref().and_then(|head| head.post.as_ref()) {
            return Context { tiles: None, ..*self }.leave(post, &buffers.h, entries.states, private);
        }
        let last = self.weights.layers.len();
        self.keep(last, &buffers.h, &mut entries);
        self.keep(last + 1, &buffers.h, &mut entries);
        self.norm_kept(last + 1, &mut buffers.t, &mut entries);
        if self.weights.head.as_ref().is_some_and(|head| head.norm_output) {
            self.norm_kept(last, &mut buffers.t, &mut entries);
        }
    }

    /// Copies the residual stream `h` before layer `i` to `entries`, if that layer is requested.
    fn keep(&self, i: usize, h: &[f32], entries: &mut Entries<'_>) {
        let hidden = self.weights.shape.hidden_size;
        for (at, _) in entries.layers.iter().enumerate().filter(|&(_, &layer)| layer == i) {
            let rows = entries.states.chunks_exact_mut(entries.layers.len() * hidden);
            for (states, h) in rows.zip(h.chunks_exact(hidden)) {
                states[at * hidden..][..hidden].copy_from_slice(h);
            }
        }
    }

    /// Applies the final norm to the states kept as number `i`.
    fn norm_kept(&self, i: usize, t: &mut [Vector], entries: &mut Entries<'_>) {
        let (hidden, eps) = (self.weights.shape.hidden_size, self.weights.shape.rms_norm_eps);
        for (at, _) in entries.layers.iter().enumerate().filter(|&(_, &layer)| layer == i) {
            for states in entries.states.chunks_exact_mut(entries.layers.len() * hidden) {
                let state = &mut states[at * hidden..][..hidden];
                let out = &mut t[..hidden.div_ceil(LANES)];
                RmsNorm { x: state, weight: &self.weights.final_norm, eps, out }.run(self.isa);
                state.copy_from_slice(&out.as_flattened()[..hidden]);
            }
        }
    }

    /// Computes the rows' embeddings, zeros for masked rows, and the angles and query factors of their positions.
    fn embed(&self, buffers: &mut Buffers) {
        let hidden = self.weights.shape.hidden_size;
        for row in 0..self.rows() {
            let (token, position) = (self.tile.tokens[row], self.tile.positions[row]);
            let h = &mut buffers.h[row * hidden..][..hidden];
            let token = if position < 0 { None } else { Some(token as usize) };
            match (self.head_states, &self.weights.head) {
                (Some(head_states), Some(head)) if head.shares_kv() => {
                    let size = head.state_size;
                    let (e, state) = buffers.e[row * 2 * size..][..2 * size].split_at_mut(size);
                    self.expand(token, e);
                    match token {
                        Some(_) => state.copy_from_slice(&head_states.hidden[row * size..][..size]),
                        None => state.fill(0.0),
                    }
                }
                (Some(head_states), Some(head)) => {
                    match token {
                        Some(_) => h.copy_from_slice(&head_states.hidden[row * hidden..][..hidden]),
                        None => h.fill(0.0),
                    }
                    let eps = self.weights.shape.rms_norm_eps;
                    let mut norm = |x: &mut [f32], weight: &[f32]| {
                        let out = &mut buffers.t[..hidden.div_ceil(LANES)];
                        RmsNorm { x, weight, eps, out }.run(self.isa);
                        x.copy_from_slice(&out.as_flattened()[..hidden]);
                    };
                    match &head.input {
                        HeadInput::Eagle3 { before_residual, .. } => {
                            self.expand(token, &mut buffers.e[row * hidden..][..hidden]);
                            if *before_residual {
                                norm(h, &head.hidden_norm);
                            }
                        }
                        HeadInput::Mtp { embedding_norm } => {
                            let (e, state) = buffers.e[row * 2 * hidden..][..2 * hidden].split_at_mut(hidden);
                            self.expand(token, e);
                            norm(e, embedding_norm);
                            state.copy_from_slice(h);
                            norm(state, &head.hidden_norm);
                        }
                        HeadInput::Assistant => unreachable!("it has no norms"),
                    }
                }
                _ => self.expand(token, h),
            }
            // The row of a head without keys is rotated as the token that it is fed, and attends the positions before.
            let rotated = position.max(0) + i64::from(self.weights.shares_kv());
            for (i, rotation) in self.weights.rotations.iter().enumerate() {
                let angles = self.angles(i, row);
                Angles {
                    position: rotated,
                    frequencies: &rotation.frequencies,
                    magnitude: rotation.magnitude,
                    cos: &mut buffers.cos[angles.clone()],
                    sin: &mut buffers.sin[angles],
                }
                .run(self.isa);
            }
            if let Some(QueryScaling { beta, length, offset, .. }) = self.weights.query_scaling {
                buffers.query_factors[row] = query_factor(position.max(0) + i64::from(offset), beta, length);
            }
        }
    }

    /// Returns the range of a row's cosines and sines of a rotation.
    pub(super) fn angles(&self, rotation: usize, row: usize) -> Range<usize> {
        let start = (rotation * MAX_TILE_ROWS + row) * (self.weights.shape.head_dim / 2);
        start..start + self.weights.rotations[rotation].frequencies.len()
    }

    /// Writes a token's embedding into `out`; zeros for no token.
    fn expand(&self, token: Option<usize>, out: &mut [f32]) {
        match token {
            Some(token) => {
                self.weights.embedding.write(token, out);
                for x in out {
                    *x *= self.weights.multipliers.embedding;
                }
            }
            None => out.fill(0.0),
        }
    }

    /// Writes the input of a layer's q, k and v into the thread's `x`: the normed residual stream. In an EAGLE-3
    /// head the normed embeddings `e` come before it.
    pub(super) fn attention_input(&self, h: &[f32], e: &[f32], input_norm: Option<&[f32]>, own: &mut Private) {
        let head = self.weights.head.as_ref().filter(|head| !head.combines());
        let (Some(head), Some(input_norm)) = (head, input_norm) else {
            return self.norm(0..self.rows(), h, input_norm, &mut own.x);
        };
        let normed_before = matches!(head.input, HeadInput::Eagle3 { before_residual: true, .. });
        let hidden = self.weights.shape.hidden_size;
        let eps = self.weights.shape.rms_norm_eps;
        let rows = own.x.chunks_exact_mut((2 * hidden).div_ceil(LANES)).take(self.rows());
        for (row, x) in rows.enumerate() {
            let (h, e) = (&h[row * hidden..][..hidden], &e[row * hidden..][..hidden]);
            let (first, rest) = x.as_flattened_mut().split_at_mut(hidden);
            let (second, padding) = rest.split_at_mut(hidden);
            let t = &mut own.t[..hidden.div_ceil(LANES)];
            RmsNorm { x: e, weight: input_norm, eps, out: t }.run(self.isa);
            first.copy_from_slice(&t.as_flattened()[..hidden]);
            if normed_before {
                second.copy_from_slice(h);
            } else {
                RmsNorm { x: h, weight: &head.hidden_norm, eps, out: t }.run(self.isa);
                second.copy_from_slice(&t.as_flattened()[..hidden]);
            }
            padding.fill(0.0);
        }
    }

    /// Writes the norms of rows of the residual stream `[.., hidden]` into `x`; without `weight` it copies the rows.
    pub(super) fn norm(&self, rows: impl Iterator<Item = usize>, h: &[f32], weight: Option<&[f32]>, x: &mut [Vector]) {
        let hidden = self.weights.shape.hidden_size;
        let eps = self.weights.shape.rms_norm_eps;
        for (row, out) in rows.zip(x.chunks_exact_mut(hidden.div_ceil(LANES))) {
            let x = &h[row * hidden..][..hidden];
            if let Some(weight) = weight {
                RmsNorm { x, weight, eps, out }.run(self.isa);
            } else {
                let (values, padding) = out.as_flattened_mut().split_at_mut(hidden);
                values.copy_from_slice(x);
                padding.fill(0.0);
            }
        }
    }
}
