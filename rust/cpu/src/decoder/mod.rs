//! The forward pass of a decoder: checks, and its division into tiles.
//!
//! A pass is a sequence of phases. In each phase, the threads write disjoint parts of a buffer and read the
//! results of earlier phases. Hidden states are fp32 between all products, even if weights are bf16.

mod added;
mod attention;
mod conv;
mod delta;
mod experts;
mod fuse;
mod head;
mod loras;
mod mlp;
mod products;
mod scratch;
mod shares;
mod states;
mod tile;

use crate::error::{Error, Result, check_len};
use crate::kv_cache::KvCache;
use crate::pass::{Entries, HeadStates, MAX_TILE_ROWS, Output, Pass};
use crate::pool::{Pool, Session};
use crate::shape::ModelShape;
use crate::states::{FedRows, of_tile};
use crate::weights::Weights;
use loras::AdaptedRows;
use products::TileRoom;
use scratch::{Buffers, Private};
use shares::Shares;
use specrs_cpu_kernels::{Isa, Rounding, Tiles};
use states::StateTile;
use std::ops::Range;
use std::sync::Arc;

/// Number of outputs that a product computes at once, before they are used.
const CHUNK: usize = 64;

/// Model ready for passes: its weights, its threads, and the memory that a pass needs.
pub struct Decoder {
    weights: Arc<Weights>,
    pool: Arc<Pool>,
    isa: Isa,
    activations: Activations,
    /// Tiles that multiply the rows of prompts; `None` if they are multiplied by vectors.
    prompt_tiles: Option<Tiles>,
    /// Splits of a pass's work among threads, by number of threads (element 0 for one), and for each of the layers'
    /// sizes.
    shares: Vec<Vec<Shares>>,
    buffers: Buffers,
    private: Vec<Private>,
    /// Whether each row of the last pass is finite; see [`finite`](Self::finite).
    finite: Vec<bool>,
}

/// Rounding of rows before products.
#[derive(Clone, Copy, Default)]
struct Activations {
    /// Whether all rows are rounded to bf16.
    bf16: bool,
    /// Rounding for packed weights.
    packed: Rounding,
}

/// Data that all phases of a tile share.
#[derive(Clone, Copy)]
struct Context<'a> {
    isa: Isa,
    activations: Activations,
    /// Tiles that multiply these rows; `None` if they are multiplied by vectors.
    tiles: Option<Tiles>,
    weights: &'a Weights,
    shares: &'a Shares,
    /// Splits of the work for each of the layers' sizes; `shares` is one of them.
    kinds: &'a [Shares],
    session: &'a Session<'a>,
    /// Rows of the tile, with their slots and blocks in the first KV group.
    tile: Pass<'a>,
    /// The whole pass that the tile is a part of.
    pass: Pass<'a>,
    /// Index in `pass` of the tile's first row.
    first: usize,
    /// Hidden states that a head is fed with its tokens; `None` for other models.
    head_states: Option<HeadStates<'a>>,
    /// Rows of the tile that have adapters.
    adapted: &'a [AdaptedRows<'a>],
    /// Index of the layer being computed.
    layer: usize,
}

impl Decoder {
    /// Makes a decoder of these weights on these threads, with the fastest instructions of this machine.
    pub fn new(weights: Arc<Weights>, pool: Arc<Pool>) -> Self {
        Self::with_isa(weights, pool, Isa::detect())
    }

    /// Makes a decoder of these weights on these threads, with the given instructions. They change only the time.
    pub fn with_isa(weights: Arc<Weights>, pool: Arc<Pool>, isa: Isa) -> Self {
        let state = weights.states.map(|(state, _)| state);
        let added = weights.layer_embedding.as_ref().map_or((0, 0), |added| (added.size, added.projection.outputs()));
        let of_kind = |kind: &ModelShape, participants| {
            let made = Shares::new(*kind, weights.sliding_window(), weights.experts, state, participants);
            made.with_added(added).with_states(weights.state_size())
        };
        Self {
            shares: (1..=pool.threads())
                .map(|participants| weights.kinds.iter().map(|kind| of_kind(kind, participants)).collect())
                .collect(),
            buffers: Buffers::new(&weights),
            private: (0..pool.threads()).map(|_| Private::new(&weights, isa)).collect(),
            weights,
            pool,
            isa,
            activations: Activations::default(),
            prompt_tiles: None,
            finite: Vec::new(),
        }
    }

    /// Makes the decoder round rows to bf16 before every product except those of routers and of shared experts' gates,
    /// so that products multiply bf16 pairs and add in fp32. A sum still has one order: its bits do not depend on other
    /// rows, threads and instructions.
    ///
    /// # Errors
    /// If another matrix than these is not bf16, or its number of inputs is no multiple of 32.
    pub fn with_bf16_rows(self) -> Result<Self> {
        self.weights.check_pairs()?;
        let tiny = self.isa.has_dots() && self.weights.has_tiny();
        let activations = Activations { bf16: true, ..self.activations };
        Ok(Self { activations, isa: if tiny { self.isa.without_dots() } else { self.isa }, ..self })
    }

    /// Makes the decoder round rows to these integers before products with packed weights; 16 bits are the default.
    #[must_use]
    pub fn with_rounding(mut self, rounding: Rounding) -> Self {
        self.activations.packed = rounding;
        self
    }

    /// Makes the decoder multiply the rows of [`prompts`](Pass::prompts) by tiles, in fp32, if weights are bf16 and
    /// have a multiple of 32 inputs. That is faster, and sums have another order, which does not depend on other rows,
    /// threads and chunks. Products of the LM head and of experts stay unchanged.
    #[must_use]
    pub fn with_prompt_tiles(mut self, tiles: Tiles) -> Self {
        self.prompt_tiles = Some(tiles);
        self.private.iter_mut().for_each(|own| own.room.tiles = TileRoom::new(&self.weights));
        self
    }

    /// Returns the weights.
    pub fn weights(&self) -> &Arc<Weights> {
        &self.weights
    }

    /// Returns the pool of threads.
    pub fn pool(&self) -> &Arc<Pool> {
        &self.pool
    }

    /// Returns the number of bytes of a snapshot of the states of one request; 0 if no layer has a state.
    pub fn snapshot_bytes(&self) -> usize {
        self.weights.states.map_or(0, |(shape, layers)| size_of::<f32>() * layers * shape.parts() * shape.base_len())
    }

    /// Returns the instruction set.
    pub fn isa(&self) -> Isa {
        self.isa
    }

    /// Returns whether rows are rounded to bf16 before products.
    pub fn has_bf16_rows(&self) -> bool {
        self.activations.bf16
    }

    /// Returns the integers to which rows are rounded for packed weights.
    pub fn rounding(&self) -> Rounding {
        self.activations.packed
    }

    /// Returns whether rows of prompts are multiplied by tiles.
    pub fn has_prompt_tiles(&self) -> bool {
        self.prompt_tiles.is_some()
    }

    /// Fills the memory that passes need with NaN. For tests, which check that no stale memory reaches the results of a
    /// pass.
    pub fn poison(&mut self) {
        self.buffers.poison();
        self.private.iter_mut().for_each(Private::poison);
    }

    /// Returns for each row of the last pass whether its residual stream after the last layer is finite. Only for
    /// models whose last layer has a window: there, later rows do not show faults before their window. Empty for other
    /// models.
    pub(crate) fn finite(&self) -> &[bool] {
        &self.finite
    }

    /// Runs a pass: feeds its rows, writes their K and V into `kv`, and writes the results that `output` asks for.
    /// Allocates nothing except for adapters and for layers with states.
    ///
    /// # Errors
    /// If the pass names a token, slot, block or row that does not exist, if the decoder is a head, or if the process
    /// was forked off the pool's. Nothing is written then.
    pub fn forward(&mut self, pass: &Pass<'_>, kv: &mut KvCache, output: Output<'_>) -> Result<()> {
        self.forward_keeping(pass, kv, output, Entries { layers: &[], states: &mut [] })
    }

    /// Runs a pass as [`forward`](Self::forward) does, and keeps hidden states on the way.
    ///
    /// # Errors
    /// If the pass is invalid as in [`forward`](Self::forward), or a layer does not exist.
    pub fn forward_keeping(
        &mut self,
        pass: &Pass<'_>,
        kv: &mut KvCache,
        output: Output<'_>,
        entries: Entries<'_>,
    ) -> Result<()> {
        self.run(pass, None, kv, output, entries)
    }

    /// Runs a pass of a head (EAGLE-3, MTP or an assistant), which is fed hidden states with the tokens. The hidden
    /// states for the next pass are in `entries` at layer 1.
    ///
    /// # Errors
    /// If the pass is invalid as in [`forward_keeping`](Self::forward_keeping), hidden states have another size, or
    /// attention starts after a row's position.
    pub fn forward_head(
        &mut self,
        pass: &Pass<'_>,
        head_states: HeadStates<'_>,
        kv: &mut KvCache,
        output: Output<'_>,
        entries: Entries<'_>,
    ) -> Result<()> {
        self.run(pass, Some(head_states), kv, output, entries)
    }

    fn run(
        &mut self,
        pass: &Pass<'_>,
        head_states: Option<HeadStates<'_>>,
        kv: &mut KvCache,
        mut output: Output<'_>,
        mut entries: Entries<'_>,
    ) -> Result<()> {
        let (hidden, state_size) = (self.weights.shape.hidden_size, self.weights.state_size());
        if self.weights.shares_kv() {
            kv.check_sources(self.weights.layers.iter().map(|layer| (layer.source_place, &layer.shape)))?;
        } else {
            kv.check(self.weights.with_keys().map(|layer| &layer.shape))?;
        }
        let window_of = |group| {
            let mut with_keys = kv.layers.iter();
            let attends = self.weights.layers.iter().filter(|layer| layer.state.is_none());
            let placed = attends.map(|layer| (layer, layer.kv_layer(&kv.layers, &mut with_keys)));
            let of_group = placed.filter(|(_, at)| at.is_some_and(|at| at.group == group));
            of_group.map(|(layer, _)| layer.window).max().unwrap_or(0)
        };
        pass.check(&self.weights.shape, self.weights.num_ids(), kv, &output, window_of)?;
        match (&head_states, &self.weights.head) {
            (Some(head_states), Some(_)) => head_states.check(pass, state_size)?,
            (None, None) => {}
            (given, _) => {
                let (given, allowed) = if given.is_some() {
                    ("given", "none, because the decoder is no head")
                } else {
                    ("none", "given, because the decoder is a head")
                };
                return Err(Error::invalid("head_states", given, allowed));
            }
        }
        entries.check(pass.len(), self.weights.layers.len(), state_size)?;
        self.adapt(pass)?;
        let session = self.pool.enter()?;
        let windowed = self.weights.ends_in_window();
        self.finite.clear();
        let runs = match self.weights.states {
            Some((shape, layers)) => {
                let &Pass { sequences, positions, prompts, snapshots, .. } = pass;
                kv.states.plan(shape, layers, FedRows { sequences, positions, prompts, snapshots })?
            }
            None => Vec::new(),
        };
        let kinds = &mut self.shares[session.participants() - 1];
        let mut log_bounds = Vec::new();
        if let Some((shape, _)) = &self.weights.states {
            let capacity = kv.states.capacity();
            self.private.iter_mut().for_each(|own| own.net.reserve(shape, capacity));
            log_bounds.extend(kinds[0].state_parts.bounds.iter().map(|part| part * capacity * shape.entry_len()));
        }
        if let Output::Logits { num_ids, .. } | Output::Argmax { num_ids, .. } = &output {
            kinds[0].set_ids(*num_ids);
        }
        for first in (0..pass.len()).step_by(MAX_TILE_ROWS) {
            let rows = first..(first + MAX_TILE_ROWS).min(pass.len());
            let tile = Pass {
                tokens: &pass.tokens[rows.clone()],
                positions: &pass.positions[rows.clone()],
                slots: &pass.slots[rows.clone()],
                sequences: &pass.sequences[rows.clone()],
                ..*pass
            };
            for shares in &mut *kinds {
                shares.set_tile(&tile);
            }
            let head_states = head_states.map(|all| HeadStates { hidden: &all.hidden[rows.start * state_size..] });
            let (isa, activations) = (self.isa, self.activations);
            let tiles = self.prompt_tiles.filter(|_| pass.prompts);
            let (weights, session) = (&*self.weights, &session);
            let adapted = AdaptedRows::of(pass.adapters.get(rows.clone()).unwrap_or_default());
            let cx = Context {
                isa,
                activations,
                tiles,
                weights,
                shares: &kinds[0],
                kinds,
                session,
                tile,
                pass: *pass,
                first,
                head_states,
                adapted: &adapted,
                layer: 0,
            };
            let width = entries.layers.len() * state_size;
            let (states, behind) = std::mem::take(&mut entries.states).split_at_mut(rows.len() * width);
            entries.states = behind;
            let requests = StateTile { runs: of_tile(&runs, first / MAX_TILE_ROWS), log_bounds: &log_bounds };
            let kept = Entries { layers: entries.layers, states };
            cx.layers(kv, requests, &mut self.buffers, &mut self.private, kept);
            if windowed {
                let rows = self.buffers.h.chunks_exact(hidden).take(rows.len());
                self.finite.extend(rows.map(|row| row.iter().all(|x| x.is_finite())));
            }
            Context { tiles: None, adapted: &[], ..cx }.output(&mut output, &rows, &self.buffers.h, &mut self.private);
        }
        Ok(())
    }

    /// Rejects adapters for weights of other sizes, and any adapter if rows are rounded to bf16. Reserves memory for
    /// the products of the pass's adapters.
    fn adapt(&mut self, pass: &Pass<'_>) -> Result<()> {
        if pass.adapters.is_empty() {
            return Ok(());
        }
        check_len("adapters", pass.adapters.len(), pass.len())?;
        let mut vectors = 0;
        for lora in pass.adapters.iter().flatten() {
            lora.check(&self.weights)?;
            if self.activations.bf16 {
                return Err(Error::invalid("adapters", "some", "none with bf16 rows"));
            }
            vectors = vectors.max(lora.vectors);
        }
        let kinds = &self.weights.kinds;
        self.private.iter_mut().for_each(|own| own.room.loras.reserve(vectors, kinds));
        Ok(())
    }
}

impl<'a> Context<'a> {
    /// Makes the context of products outside a pass.
    fn without_rows(
        isa: Isa,
        activations: Activations,
        weights: &'a Weights,
        shares: &'a Shares,
        session: &'a Session<'a>,
    ) -> Self {
        let (tile, pass) = (Pass::default(), Pass::default());
        let (tiles, head_states, adapted) = (None, None, &[]);
        let kinds = std::slice::from_ref(shares);
        Self {
            isa,
            activations,
            tiles,
            weights,
            shares,
            kinds,
            session,
            tile,
            pass,
            first: 0,
            head_states,
            adapted,
            layer: 0,
        }
    }
}
