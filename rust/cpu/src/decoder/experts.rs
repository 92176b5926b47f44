//! Experts of a layer in place of its MLP or next to it: three phases, four if a norm follows, five with a shared
//! expert, and the MLP's two before them. Rows are grouped by expert, so that the weights of each expert are read once
//! per tile.

use super::products::{Fed, FedRoom};
use super::scratch::{Buffers, Mixture, Private};
use super::{Activations, CHUNK, Context};
use crate::layer::{ExpertVectors, Experts, Layer, SharedExpert};
use crate::lora::Projection;
use specrs_cpu_kernels::{Columns, ColumnsMut, LANES, RmsNorm, Route, Vector, sigmoid};

impl Context<'_> {
    pub(super) fn experts(&self, layer: &Layer, experts: &Experts, buffers: &mut Buffers, private: &mut [Private]) {
        if let Some(mlp) = &experts.mlp {
            self.mlp_output(layer, &mlp.gate_up, &mlp.down, true, buffers, private);
        }
        // Products of experts stay as they are for prompts.
        Context { tiles: None, ..*self }.mixture(layer, experts, buffers, private);
    }

    fn mixture(&self, layer: &Layer, experts: &Experts, buffers: &mut Buffers, private: &mut [Private]) {
        let (rows, hidden, sizes) = (self.rows(), self.weights.shape.hidden_size, experts.sizes());
        let Buffers { h, added, mixture_output, act: shared_act, mixture, .. } = buffers;
        let vectors = &layer.expert_vectors;
        let input_norm = match &vectors.norms {
            Some([_, input, _]) => Some(&input[..]),
            None => layer.post_attention_norm.as_deref(),
        };
        let router_norm = if experts.scales.is_some() { Some(&vectors.router_norm[..]) } else { input_norm };
        {
            let logits = Columns::new(&mut mixture.logits, rows, sizes.count, &self.shares.router.bounds);
            let own = Columns::new(private, 1, self.shares.participants, &self.shares.each);
            self.session.run(&self.shares.router.first, &|t, pieces| {
                let mut own = own.take(t);
                let Private { x, y, .. } = &mut own.row_mut(0)[0];
                self.norm(0..rows, h, router_norm, x);
                // A rounded row might be sent elsewhere.
                let exact = Context { activations: Activations { bf16: false, ..self.activations }, ..*self };
                for piece in pieces {
                    exact.put_product(&experts.router, &mut Fed::rows(x), rows, y, &mut logits.take(piece));
                }
            });
        }
        self.route(experts, &layer.expert_vectors, mixture);
        let Mixture { starts, rows: sent, weights, act, .. } = mixture;
        let (starts, sent, weights) = (&starts[..], &sent[..starts[sizes.count]], &weights[..]);
        let vectors = sizes.intermediate.div_ceil(LANES);
        {
            let acts = Columns::new(act, sent.len(), vectors, &self.shares.expert.bounds);
            let own = Columns::new(private, 1, self.shares.participants, &self.shares.each);
            self.session.run(&self.shares.expert.first, &|t, pieces| {
                let mut own = own.take(t);
                let Private { x, y, z, sent: copied, room, .. } = &mut own.row_mut(0)[0];
                // Again, because another thread may have had all of the router's pieces.
                self.norm(0..rows, h, input_norm, x);
                if !experts.weighs_input {
                    self.round(x, rows, hidden);
                }
                for piece in pieces {
                    let mut acts = acts.take(piece);
                    for (i, (gate_up, _)) in experts.experts.iter().enumerate() {
                        let of = starts[i]..starts[i + 1];
                        if !of.is_empty() {
                            let (sent, vectors) = (&sent[of.clone()], hidden.div_ceil(LANES));
                            let x = if experts.weighs_input {
                                weigh(x, sent, &weights[of.clone()], vectors, copied);
                                self.round(copied, of.len(), hidden);
                                &copied[..of.len() * vectors]
                            } else {
                                gather(x, sent, vectors, copied)
                            };
                            let mut fed = self.fed_sent(Projection::ExpertGateUp(i), gate_up, x, sent, room);
                            self.gate_up(gate_up, &mut fed, of, None, (y, z), &mut acts);
                        }
                    }
                }
            });
        }
        if let Some(shared) = &experts.shared {
            self.shared_features(layer, shared, h, shared_act, private);
        }
        let act = &act[..sent.len() * vectors];
        let norm = layer.mlp_output_norm.as_deref();
        let out = match (&layer.expert_vectors.norms, norm) {
            (Some(_), _) => &mut *mixture_output,
            (None, Some(_)) => &mut *added,
            (None, None) => &mut *h,
        };
        let outs = Columns::new(out, rows, hidden, &self.shares.mixed.bounds);
        let own = Columns::new(private, 1, self.shares.participants, &self.shares.each);
        self.session.run(&self.shares.mixed.first, &|t, pieces| {
            let mut own = own.take(t);
            let Private { y, room, .. } = &mut own.row_mut(0)[0];
            for piece in pieces {
                let outs = &mut outs.take(piece);
                self.mix(experts, norm.is_some(), (starts, sent, weights), act, (y, room), outs);
            }
        });
        if let Some([mlp, _, expert]) = &layer.expert_vectors.norms {
            self.add_norms(added, mlp, mixture_output, expert, private);
        }
        self.add_normed(norm, layer.mlp_scalar(), added, h, private);
        if let Some(shared) = &experts.shared {
            self.add_shared(shared, shared_act, h, private);
        }
    }

    /// Computes the features of the shared expert between gate, up and down, times the sigmoid of each row's gate if it
    /// has one. The down projection is linear, so this also multiplies the output of the expert by the gate.
    fn shared_features(
        &self,
        layer: &Layer,
        shared: &SharedExpert,
        h: &[f32],
        act: &mut [Vector],
        private: &mut [Private],
    ) {
        let (rows, hidden) = (self.rows(), self.weights.shape.hidden_size);
        let acts = Columns::new(act, rows, shared.down.inputs.div_ceil(LANES), &self.shares.shared.bounds);
        let own = Columns::new(private, 1, self.shares.participants, &self.shares.each);
        self.session.run(&self.shares.shared.first, &|t, pieces| {
            let mut own = own.take(t);
            let Private { x, y, z, scales, room, .. } = &mut own.row_mut(0)[0];
            self.norm(0..rows, h, layer.post_attention_norm.as_deref(), x);
            let gates = shared.gate.as_ref().map(|gate| {
                let exact = Context { activations: Activations { bf16: false, ..self.activations }, ..*self };
                exact.product(gate, 0..1, &mut Fed::rows(x), rows, y, 1);
                let gates = &mut scales[..rows];
                gates.iter_mut().zip(&*y).for_each(|(gate, &y)| *gate = sigmoid(y));
                &*gates
            });
            self.round(x, rows, hidden);
            let mut fed = self.fed_rows(&shared.gate_up, x, rows, &mut room.rounded);
            for piece in pieces {
                let acts = &mut acts.take(piece);
                self.gate_up(&shared.gate_up, &mut fed, 0..rows, gates, (y, z), acts);
            }
        });
    }

    /// Replaces `added`, the output of an MLP, by the sum of its norm and the norm of the output of experts, as one phase
    /// by rows.
    fn add_norms(
        &self,
        added: &mut [f32],
        mlp_norm: &[f32],
        of_experts: &[f32],
        expert_norm: &[f32],
        private: &mut [Private],
    ) {
        let (hidden, eps) = (self.weights.shape.hidden_size, self.weights.shape.rms_norm_eps);
        let vectors = hidden.div_ceil(LANES);
        let sums = Columns::new(added, 1, self.rows() * hidden, &self.shares.rows.bounds);
        let own = Columns::new(private, 1, self.shares.participants, &self.shares.each);
        self.session.run(&self.shares.rows.first, &|t, pieces| {
            let mut own = own.take(t);
            let (first, rest) = own.row_mut(0)[0].x.split_at_mut(vectors);
            let second = &mut rest[..vectors];
            for piece in pieces {
                let mut sums = sums.take(piece);
                let of_experts = &of_experts[sums.columns()];
                for (sum, x) in sums.row_mut(0).chunks_exact_mut(hidden).zip(of_experts.chunks_exact(hidden)) {
                    RmsNorm { x: sum, weight: mlp_norm, eps, out: &mut *first }.run(self.isa);
                    RmsNorm { x, weight: expert_norm, eps, out: &mut *second }.run(self.isa);
                    let parts = first.as_flattened().iter().zip(second.as_flattened());
                    sum.iter_mut().zip(parts).for_each(|(sum, (a, b))| *sum = a + b);
                }
            }
        });
    }

    /// Adds the output of the shared expert to the residual stream.
    fn add_shared(&self, shared: &SharedExpert, act: &[Vector], h: &mut [f32], private: &mut [Private]) {
        let rows = self.rows();
        let act = &act[..rows * shared.down.inputs.div_ceil(LANES)];
        let hs = Columns::new(h, rows, self.weights.shape.hidden_size, &self.shares.hidden.bounds);
        let own = Columns::new(private, 1, self.shares.participants, &self.shares.each);
        self.session.run(&self.shares.hidden.first, &|t, pieces| {
            let mut own = own.take(t);
            let Private { y, room, .. } = &mut own.row_mut(0)[0];
            let mut fed = self.fed_rows(&shared.down, act, rows, &mut room.rounded);
            for piece in pieces {
                self.give(&shared.down, false, &mut fed, y, &mut hs.take(piece));
            }
        });
    }

    /// Computes a piece of the experts' output. It is added to the residual stream, or written to a buffer if a norm
    /// follows.
    fn mix(
        &self,
        experts: &Experts,
        normed: bool,
        (starts, sent, weights): (&[usize], &[usize], &[f32]),
        act: &[Vector],
        (y, room): (&mut [f32], &mut FedRoom),
        outs: &mut ColumnsMut<'_, f32>,
    ) {
        let vectors = experts.sizes().intermediate.div_ceil(LANES);
        if normed {
            (0..self.rows()).for_each(|row| outs.row_mut(row).fill(0.0));
        }
        let multiplier = if normed { 1.0 } else { self.weights.multipliers.residual };
        for (i, (_, down)) in experts.experts.iter().enumerate() {
            let of = starts[i]..starts[i + 1];
            if !of.is_empty() {
                let act = &act[of.start * vectors..of.end * vectors];
                let weight = |weight: &f32| if experts.weighs_input { 1.0 } else { *weight };
                let rows = &sent[of.clone()];
                let sent = rows.iter().zip(&weights[of]).map(|(&row, own)| (row, weight(own) * multiplier));
                let mut fed = self.fed_sent(Projection::ExpertDown(i), down, act, rows, room);
                for first in outs.columns().step_by(CHUNK) {
                    let chunk = first..(first + CHUNK).min(outs.columns().end);
                    self.product(down, chunk.clone(), &mut fed, sent.len(), y, CHUNK);
                    add(outs, first, chunk.len(), y, sent.clone());
                }
            }
        }
    }

    /// Assigns each row that is not masked to its experts, by the layer's biases, and multiplies the experts' weights by
    /// its factors.
    fn route(&self, experts: &Experts, ExpertVectors { scales, bias, .. }: &ExpertVectors, mixture: &mut Mixture) {
        let (count, per_token) = (experts.experts.len(), experts.per_token);
        let Mixture { logits, chosen, shares, starts, rows, weights, .. } = mixture;
        starts.fill(0);
        let masked = |row: usize| self.tile.positions[row] < 0;
        for row in (0..self.rows()).filter(|&row| !masked(row)) {
            let of = row * per_token..(row + 1) * per_token;
            Route {
                logits: &mut logits[row * count..(row + 1) * count],
                normalized: experts.normalized,
                sigmoids: experts.sigmoids,
                bias,
                chosen: &mut chosen[of.clone()],
                shares: &mut shares[of.clone()],
            }
            .run(self.isa);
            chosen[of].iter().for_each(|&expert| starts[expert + 1] += 1);
        }
        // How many rows lie before those of each expert; then, while rows come to their places, before its next.
        for expert in 0..count {
            starts[expert + 1] += starts[expert];
        }
        for row in (0..self.rows()).filter(|&row| !masked(row)) {
            for at in row * per_token..(row + 1) * per_token {
                let place = &mut starts[chosen[at]];
                (rows[*place], weights[*place]) = (row, shares[at] * scales[chosen[at]]);
                *place += 1;
            }
        }
        // Each is where the next began.
        starts.copy_within(0..count, 1);
        starts[0] = 0;
    }
}

/// Returns the rows `rows` of `x`, which ascend. If they are consecutive, they are borrowed from `x`, else copied.
fn gather<'a>(x: &'a [Vector], rows: &[usize], vectors: usize, copied: &'a mut [Vector]) -> &'a [Vector] {
    let (first, last) = (rows[0], rows[rows.len() - 1]);
    if last - first + 1 == rows.len() {
        return &x[first * vectors..(last + 1) * vectors];
    }
    for (out, row) in copied.chunks_exact_mut(vectors).zip(rows) {
        out.copy_from_slice(&x[row * vectors..][..vectors]);
    }
    &copied[..rows.len() * vectors]
}

/// Copies the rows `rows` of `x` to `out`, each times its weight.
fn weigh(x: &[Vector], rows: &[usize], weights: &[f32], vectors: usize, out: &mut [Vector]) {
    for (out, (row, weight)) in out.chunks_exact_mut(vectors).zip(rows.iter().zip(weights)) {
        let x = x[row * vectors..][..vectors].as_flattened();
        out.as_flattened_mut().iter_mut().zip(x).for_each(|(out, x)| *out = x * weight);
    }
}

/// Adds features `first..first + len` of rows of `y` to rows of `outs`, each times its weight.
fn add(outs: &mut ColumnsMut<'_, f32>, first: usize, len: usize, y: &[f32], sent: impl Iterator<Item = (usize, f32)>) {
    let from = first - outs.columns().start;
    for ((row, weight), y) in sent.zip(y.chunks_exact(CHUNK)) {
        for (out, y) in outs.row_mut(row)[from..][..len].iter_mut().zip(y) {
            *out += y * weight;
        }
    }
}
