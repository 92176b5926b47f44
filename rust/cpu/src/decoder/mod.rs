//! The forward pass of a dense decoder: checks, tiles, and the order of phases.
//!
//! A pass is a sequence of phases; in each the participants write parts of a buffer that no other has, and read what the
//! phases before have left. Hidden states are fp32 between all products, also where weights are bf16.

mod attention;
mod head;
mod mlp;
mod scratch;
mod shares;

use crate::error::{Error, Result};
use crate::isa::{Isa, LANES};
use crate::kernels::{Angles, Product, RmsNorm, Vector};
use crate::kv_cache::KvCache;
use crate::linear::{Linear, Weight};
use crate::pass::{Beside, Entries, MAX_TILE_ROWS, Output, Pass};
use crate::pool::{Pool, Session};
use crate::weights::{ValuesMut, Weights};
use scratch::{Buffers, Private};
use shares::Shares;
use std::ops::Range;
use std::sync::Arc;

/// A model ready for passes: its weights, its threads, and the memory that a pass needs.
pub struct Decoder {
    weights: Arc<Weights>,
    pool: Arc<Pool>,
    isa: Isa,
    /// By participants less one.
    shares: Vec<Shares>,
    buffers: Buffers,
    private: Vec<Private>,
}

/// What all phases of a tile know.
struct Context<'a> {
    isa: Isa,
    weights: &'a Weights,
    shares: &'a Shares,
    session: &'a Session<'a>,
    /// The tile's rows.
    tile: Pass<'a>,
    /// What they are fed beside their tokens.
    beside: Option<Beside<'a>>,
}

impl Decoder {
    /// A decoder of these weights on these threads, with the fastest instructions of this machine.
    ///
    /// # Errors
    /// None yet.
    pub fn new(weights: Arc<Weights>, pool: Arc<Pool>) -> Result<Self> {
        Ok(Self::with_isa(weights, pool, Isa::detect()))
    }

    /// The same with instructions of choice. They change nothing but the time.
    pub fn with_isa(weights: Arc<Weights>, pool: Arc<Pool>, isa: Isa) -> Self {
        let shape = weights.shape;
        Self {
            shares: (1..=pool.threads()).map(|participants| Shares::new(shape, participants)).collect(),
            buffers: Buffers::new(&shape, weights.beside.is_some()),
            private: (0..pool.threads()).map(|_| Private::new(&shape, weights.beside.is_some())).collect(),
            weights,
            pool,
            isa,
        }
    }

    /// Its weights.
    pub fn weights(&self) -> &Arc<Weights> {
        &self.weights
    }

    /// Its threads.
    pub fn pool(&self) -> &Arc<Pool> {
        &self.pool
    }

    /// Its instructions.
    pub fn isa(&self) -> Isa {
        self.isa
    }

    /// Fills the memory that passes need with NaN, for tests: nothing of it may reach what a pass gives.
    pub fn poison(&mut self) {
        self.buffers.poison();
        self.private.iter_mut().for_each(Private::poison);
    }

    /// Feeds the rows of `pass`: writes their K and V into `kv`, and what `output` asks for. Allocates nothing.
    ///
    /// # Errors
    /// Where the pass names a token, slot, block or row that does not exist, or the process is a fork of the pool's;
    /// nothing is written then.
    pub fn forward(&mut self, pass: &Pass<'_>, kv: &mut KvCache, output: Output<'_>) -> Result<()> {
        self.forward_keeping(pass, kv, output, Entries { layers: &[], states: &mut [] })
    }

    /// The same, and keeps hidden states on the way.
    ///
    /// # Errors
    /// As [`forward`](Self::forward), and for a layer that does not exist.
    pub fn forward_keeping(
        &mut self,
        pass: &Pass<'_>,
        kv: &mut KvCache,
        output: Output<'_>,
        entries: Entries<'_>,
    ) -> Result<()> {
        self.run(pass, None, kv, output, entries)
    }

    /// The pass of an EAGLE-3 head, with hidden states beside the tokens. What a row leaves for the next, before the final
    /// norm, is in `entries` at layer 1.
    ///
    /// # Errors
    /// As [`forward_keeping`](Self::forward_keeping), and for states of another size or a start behind a row.
    pub fn forward_beside(
        &mut self,
        pass: &Pass<'_>,
        beside: Beside<'_>,
        kv: &mut KvCache,
        output: Output<'_>,
        entries: Entries<'_>,
    ) -> Result<()> {
        self.run(pass, Some(beside), kv, output, entries)
    }

    fn run(
        &mut self,
        pass: &Pass<'_>,
        beside: Option<Beside<'_>>,
        kv: &mut KvCache,
        mut output: Output<'_>,
        mut entries: Entries<'_>,
    ) -> Result<()> {
        let hidden = self.weights.shape.hidden_size;
        kv.check(&self.weights.shape, self.weights.layers.len())?;
        pass.check(&self.weights.shape, self.weights.num_ids(), &kv.shape, &output)?;
        match (&beside, &self.weights.beside) {
            (Some(beside), Some(_)) => beside.check(pass, &self.weights.shape)?,
            (None, None) => {}
            (given, _) => {
                let (given, allowed) =
                    if given.is_some() { ("given", "none: it is no head") } else { ("missing", "some") };
                return Err(Error::invalid("beside", given, allowed));
            }
        }
        entries.check(pass.len(), self.weights.layers.len(), &self.weights.shape)?;
        let session = self.pool.enter()?;
        let shares = &mut self.shares[session.participants() - 1];
        if let Output::Logits { num_ids, .. } | Output::Argmax { num_ids, .. } = &output {
            shares.set_ids(*num_ids);
        }
        for first in (0..pass.len()).step_by(MAX_TILE_ROWS) {
            let rows = first..(first + MAX_TILE_ROWS).min(pass.len());
            let tile = Pass {
                tokens: &pass.tokens[rows.clone()],
                positions: &pass.positions[rows.clone()],
                slots: &pass.slots[rows.clone()],
                entries: &pass.entries[rows.clone()],
                ..*pass
            };
            shares.set_tile(&tile);
            let beside = beside.map(|all| Beside { hidden: &all.hidden[rows.start * hidden..], k_start: all.k_start });
            let cx = Context { isa: self.isa, weights: &self.weights, shares, session: &session, tile, beside };
            let width = entries.layers.len() * hidden;
            let (states, behind) = std::mem::take(&mut entries.states).split_at_mut(rows.len() * width);
            entries.states = behind;
            cx.layers(kv, &mut self.buffers, &mut self.private, Entries { layers: entries.layers, states });
            cx.output(&mut output, &rows, &self.buffers.h, &mut self.private);
        }
        Ok(())
    }
}

impl Context<'_> {
    fn rows(&self) -> usize {
        self.tile.len()
    }

    fn layers(&self, kv: &mut KvCache, buffers: &mut Buffers, private: &mut [Private], mut entries: Entries<'_>) {
        self.embed(buffers);
        let kv_shape = kv.shape;
        for (i, (layer, kv)) in self.weights.layers.iter().zip(&mut kv.layers).enumerate() {
            self.keep(i, &buffers.h, &mut entries);
            match kv {
                ValuesMut::F32(kv) => self.attention(layer, kv.as_mut_slice(), &kv_shape, buffers, private),
                ValuesMut::Bf16(kv) => self.attention(layer, kv.as_mut_slice(), &kv_shape, buffers, private),
            }
            self.mlp(layer, buffers, private);
        }
        self.keep(self.weights.layers.len(), &buffers.h, &mut entries);
    }

    /// Copies the residual stream `h` in front of layer `i` to where it is asked for.
    fn keep(&self, i: usize, h: &[f32], entries: &mut Entries<'_>) {
        let hidden = self.weights.shape.hidden_size;
        for (at, _) in entries.layers.iter().enumerate().filter(|&(_, &layer)| layer == i) {
            let rows = entries.states.chunks_exact_mut(entries.layers.len() * hidden);
            for (states, h) in rows.zip(h.chunks_exact(hidden)) {
                states[at * hidden..][..hidden].copy_from_slice(h);
            }
        }
    }

    /// The rows' embeddings, zeros where masked, and their angles.
    fn embed(&self, buffers: &mut Buffers) {
        let (hidden, half) = (self.weights.shape.hidden_size, self.weights.shape.head_dim / 2);
        for row in 0..self.rows() {
            let (token, position) = (self.tile.tokens[row], self.tile.positions[row]);
            let h = &mut buffers.h[row * hidden..][..hidden];
            let token = if position < 0 { None } else { Some(token as usize) };
            match (self.beside, &self.weights.beside) {
                (Some(beside), Some(normed)) => {
                    let e = &mut buffers.e[row * hidden..][..hidden];
                    self.expand(token, e);
                    match token {
                        Some(_) => h.copy_from_slice(&beside.hidden[row * hidden..][..hidden]),
                        None => h.fill(0.0),
                    }
                    if normed.before_residual {
                        let eps = self.weights.shape.rms_norm_eps;
                        let out = &mut buffers.t[..hidden.div_ceil(LANES)];
                        self.isa.run(RmsNorm { x: h, weight: &normed.hidden_norm, eps, out });
                        h.copy_from_slice(&out.as_flattened()[..hidden]);
                    }
                }
                _ => self.expand(token, h),
            }
            self.isa.run(Angles {
                position: position.max(0),
                frequencies: &self.weights.frequencies,
                cos: &mut buffers.cos[row * half..][..half],
                sin: &mut buffers.sin[row * half..][..half],
            });
        }
    }

    /// A token's embedding, zeros for none.
    fn expand(&self, token: Option<usize>, out: &mut [f32]) {
        match token {
            Some(token) => self.weights.embedding.expand(token * out.len(), out),
            None => out.fill(0.0),
        }
    }

    /// What a layer's q, k and v are made of, into `x`: the normed stream; in a head the normed embeddings `e` beside it.
    fn attention_input(&self, h: &[f32], e: &[f32], input_norm: &[f32], own: &mut Private) {
        let Some(normed) = &self.weights.beside else {
            return self.norm(0..self.rows(), h, input_norm, &mut own.x);
        };
        let hidden = self.weights.shape.hidden_size;
        let eps = self.weights.shape.rms_norm_eps;
        let rows = own.x.chunks_exact_mut((2 * hidden).div_ceil(LANES)).take(self.rows());
        for (row, x) in rows.enumerate() {
            let (h, e) = (&h[row * hidden..][..hidden], &e[row * hidden..][..hidden]);
            let (first, rest) = x.as_flattened_mut().split_at_mut(hidden);
            let (second, padding) = rest.split_at_mut(hidden);
            self.isa.run(RmsNorm { x: e, weight: input_norm, eps, out: &mut own.t });
            first.copy_from_slice(&own.t.as_flattened()[..hidden]);
            if normed.before_residual {
                second.copy_from_slice(h);
            } else {
                self.isa.run(RmsNorm { x: h, weight: &normed.hidden_norm, eps, out: &mut own.t });
                second.copy_from_slice(&own.t.as_flattened()[..hidden]);
            }
            padding.fill(0.0);
        }
    }

    /// The norms of rows of the residual stream `[.., hidden]`, into `x`.
    fn norm(&self, rows: impl Iterator<Item = usize>, h: &[f32], weight: &[f32], x: &mut [Vector]) {
        let hidden = self.weights.shape.hidden_size;
        let eps = self.weights.shape.rms_norm_eps;
        for (row, out) in rows.zip(x.chunks_exact_mut(hidden.div_ceil(LANES))) {
            self.isa.run(RmsNorm { x: &h[row * hidden..][..hidden], weight, eps, out });
        }
    }

    /// Outputs `outputs` of a projection, bias included, of `rows` rows of `x`: `y[row, i]` is that of output
    /// `outputs.start + i`, rows of y are `stride` long.
    fn product(&self, linear: &Linear, outputs: Range<usize>, x: &[Vector], rows: usize, y: &mut [f32], stride: usize) {
        let mut first = 0;
        for part in &linear.parts {
            let (start, end) = (outputs.start.max(first), outputs.end.min(first + part.outputs));
            if start < end {
                let inside = start - first..end - first;
                let y = &mut y[start - outputs.start..];
                let (inputs, w) = (linear.inputs, inside.start * linear.inputs..inside.end * linear.inputs);
                let product = Product { inputs, x, rows, y, y_stride: stride };
                match &part.weight {
                    Weight::F32(all) => self.isa.run(product.with(&all.as_slice()[w], &[], inputs)),
                    Weight::Bf16(all) => self.isa.run(product.with(&all.as_slice()[w], &[], inputs)),
                    Weight::Int8 { codes, scales } => {
                        let scales = &scales.as_slice()[inside.clone()];
                        self.isa.run(product.with(&codes.as_slice()[w], scales, inputs));
                    }
                    Weight::Int4 { codes, scales } => {
                        let groups = scales.as_slice().len() / part.outputs;
                        let scales = &scales.as_slice()[inside.start * groups..inside.end * groups];
                        self.isa.run(product.with(&codes.as_slice()[w.start / 2..w.end / 2], scales, inputs / groups));
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
    }
}
