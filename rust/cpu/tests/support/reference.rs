//! Forward pass of a model in plain float64 loops, and the maximum difference of fp32 from it: the rounding errors, by
//! the length of each sum.
//!
//! A number that is rounded to fp32 is off by up to 2^-24 of itself, at random: a variance of a third of that squared.
//! Where `n` numbers are summed in 16 lanes, n / 16 roundings of partial sums come in a row, then 4 of the tree.
//! Variances add up, and go through a product by the squares of its weights.

use super::{ALPHA, Dense, KV_SCALES, KeysValues, LIMIT, Model};

/// Variance of rounding 1 to fp32.
const ROUNDING: f64 = (1.0 / (1 << 24) as f64) * (1.0 / (1 << 24) as f64) / 3.0;
/// Variance of rounding 1 to bf16, which has 16 significant bits less than fp32.
const ROUNDING_BF16: f64 = ROUNDING * (1_u64 << 32) as f64;
/// Number of standard deviations by which a result may be off.
const DEVIATIONS: f64 = 8.0;

/// Exact number, and the variance of its fp32 result.
#[derive(Clone, Copy, Debug, Default)]
pub struct Near {
    pub exact: f64,
    variance: f64,
}

impl Near {
    fn new(exact: f64) -> Self {
        Self { exact, variance: 0.0 }
    }

    /// Adds the variance of `times` roundings.
    fn rounded(self, times: f64) -> Self {
        Self { variance: self.variance + times * ROUNDING * self.exact * self.exact, ..self }
    }

    /// Returns the error of `x`, where 1 is the allowed maximum.
    pub fn off(&self, x: f32) -> f64 {
        (f64::from(x) - self.exact).abs() / (DEVIATIONS * self.variance.sqrt())
    }
}

impl std::ops::Add for Near {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self { exact: self.exact + other.exact, variance: self.variance + other.variance }.rounded(1.0)
    }
}

impl std::ops::Mul for Near {
    type Output = Self;

    fn mul(self, other: Self) -> Self {
        let variance = self.variance * other.exact * other.exact + other.variance * self.exact * self.exact;
        Self { exact: self.exact * other.exact, variance }
    }
}

/// Returns the sum of `n` products, in 16 lanes.
fn sum(products: impl Iterator<Item = Near>, n: usize) -> Near {
    let (mut sum, mut squares) = (Near::default(), 0.0);
    for product in products {
        sum.exact += product.exact;
        sum.variance += product.variance;
        squares += product.exact * product.exact;
    }
    sum.variance += ROUNDING * (n.div_ceil(16) + 4) as f64 * squares;
    sum.rounded(1.0)
}

impl Model {
    /// Returns logits `[tokens, vocab]` of a whole sequence. K and V of a bf16 model are rounded as in its cache.
    pub fn reference(&self, tokens: &[usize]) -> Vec<Vec<Near>> {
        let none: Vec<KeysValues> = self.layers.iter().map(|_| Default::default()).collect();
        self.reference_behind(tokens, &none)
    }

    /// Returns logits `[tokens, vocab]` of tokens that follow a prefix, whose keys and values are given by layer.
    pub fn reference_behind(&self, tokens: &[usize], prefix: &[KeysValues]) -> Vec<Vec<Near>> {
        let start = prefix.first().map_or(0, |layer| layer.0.len());
        let s = &self.shape;
        let (hidden, dim, eps) = (s.hidden_size, s.head_dim, f64::from(s.rms_norm_eps));
        let mut h: Vec<Vec<Near>> = tokens.iter().map(|t| wide(&self.embedding[t * hidden..][..hidden])).collect();
        for (number, (layer, (keys, values))) in self.layers.iter().zip(prefix).enumerate() {
            let exact =
                |heads: &Vec<Vec<f64>>| heads.iter().map(|x| x.iter().map(|&x| Near::new(x)).collect()).collect();
            let mut keys: Vec<Vec<Vec<Near>>> = keys.iter().map(exact).collect();
            let mut values: Vec<Vec<Vec<Near>>> = values.iter().map(exact).collect();
            for (i, h) in h.iter_mut().enumerate() {
                let x = if self.kind.before { rms_norm(h, &layer.input_norm, eps) } else { h.clone() };
                let whole = self.kind.whole;
                let heads = |dense: &Dense, norm: Option<&Vec<f32>>, rotated: bool| -> Vec<Vec<Near>> {
                    let y = self.product(dense, &x);
                    let y = norm.filter(|_| whole).map_or(y.clone(), |w| rms_norm(&y, w, eps));
                    y.chunks(dim)
                        .map(|head| {
                            let norm = norm.filter(|_| !whole);
                            let head = norm.map_or(head.to_vec(), |w| rms_norm(head, w, eps));
                            if rotated { self.rotated(&head, start + i) } else { head }
                        })
                        .collect()
                };
                let qk_norm = self.kind.qk_norm;
                let turns = self.is_rotated(number);
                let mut q = heads(&layer.q, qk_norm.then_some(&layer.q_norm), turns);
                if self.kind.grows && !(self.growth().unrotated && turns) {
                    let factor = self.grown(start + i);
                    q.iter_mut().flatten().for_each(|x| *x = (*x * factor).rounded(1.0));
                }
                keys.push(self.stored(heads(&layer.k, qk_norm.then_some(&layer.k_norm), turns), KV_SCALES.0));
                values.push(self.stored(heads(&layer.v, None, false), KV_SCALES.1));
                let mut attended = Vec::new();
                let seen = self.window(number).map_or(0, |window| match start + i {
                    position if self.kind.llama4 => position / window * window,
                    position => (position + 1).saturating_sub(window),
                });
                for (j, q) in q.iter().enumerate() {
                    let head = j / (s.num_heads / s.num_kv_heads);
                    attended.extend(attend(q, &keys[seen..], &values[seen..], head, layer.sinks.get(j)));
                }
                let behind = |x: Vec<Near>, w: &Vec<f32>| if self.kind.behind { rms_norm(&x, w, eps) } else { x };
                add(h, &behind(self.product(&layer.o, &attended), &layer.output_norm));
                let x = if self.kind.before { rms_norm(h, &layer.post_norm, eps) } else { h.clone() };
                let given = match &layer.router {
                    None => self.mlp(&layer.gate, &layer.up, &layer.down, &x),
                    Some(router) => self.mixture(router, &layer.experts, &x),
                };
                add(h, &behind(given, &layer.mlp_output_norm));
            }
        }
        h.iter().map(|h| self.product(&self.lm_head, &rms_norm(h, &self.final_norm, eps))).collect()
    }

    /// Applies rotary position embeddings, of halves of a head or of neighbouring features.
    fn rotated(&self, x: &[Near], position: usize) -> Vec<Near> {
        if !self.kind.llama4 {
            return rotate(x, position, &self.frequencies);
        }
        let halves: Vec<Near> = x.iter().step_by(2).chain(x.iter().skip(1).step_by(2)).copied().collect();
        let turned = rotate(&halves, position, &self.frequencies);
        let (low, high) = turned.split_at(x.len() / 2);
        low.iter().zip(high).flat_map(|(&a, &b)| [a, b]).collect()
    }

    /// Returns the factor of queries at a position.
    fn grown(&self, position: usize) -> Near {
        let growth = self.growth();
        let steps = ((position + growth.offset as usize) / growth.length) as f64;
        Near::new(1.0 + f64::from(growth.beta) * (1.0 + steps).ln()).rounded(1.0)
    }

    fn mlp(&self, gate: &Dense, up: &Dense, down: &Dense, x: &[Near]) -> Vec<Near> {
        let (gate, up) = (self.product(gate, x), self.product(up, x));
        let activate = if self.kind.gelu { gelu } else { silu };
        let activate = |g, u| if self.kind.clamped { clamped(g, u) } else { activate(g) * u };
        let act: Vec<Near> = gate.iter().zip(&up).map(|(&g, &u)| activate(g, u).rounded(1.0)).collect();
        self.product(down, &act)
    }

    /// Returns the output of the two experts with the largest logits, weighted by the softmax over all. Each weight
    /// depends on all logits. With `llama4`, their inputs are multiplied by the sigmoids of their logits instead.
    fn mixture(&self, router: &Dense, experts: &[[Dense; 3]], x: &[Near]) -> Vec<Near> {
        let logits = self.product(router, x);
        let mut order: Vec<usize> = (0..experts.len()).collect();
        order.sort_by(|&a, &b| logits[b].exact.total_cmp(&logits[a].exact));
        let chosen = &order[..2];
        let among: &[usize] = if self.kind.normalized { chosen } else { &order };
        let total: f64 = among.iter().map(|&i| logits[i].exact.exp()).sum();
        let part = |i: usize| logits[i].exact.exp() / total;
        let mut out = vec![Near::default(); x.len()];
        for &i in chosen {
            if self.kind.llama4 {
                let Near { exact, variance } = logits[i];
                let sigmoid = 1.0 / (1.0 + (-exact).exp());
                let slope = sigmoid * (1.0 - sigmoid);
                let share = Near { exact: sigmoid, variance: variance * slope * slope }.rounded(12.0);
                let sent: Vec<Near> = x.iter().map(|&x| (x * share).rounded(1.0)).collect();
                let [gate, up, down] = &experts[i];
                add(&mut out, &self.mlp(gate, up, down, &sent));
                continue;
            }
            let own = |j: usize| if i == j { 1.0 - part(j) } else { part(j) };
            let variance: f64 = among.iter().map(|&j| own(j).powi(2) * logits[j].variance).sum();
            let share = Near { exact: part(i), variance: variance * part(i) * part(i) }.rounded(12.0);
            let [gate, up, down] = &experts[i];
            let given: Vec<Near> = self.mlp(gate, up, down, x).into_iter().map(|y| (y * share).rounded(1.0)).collect();
            add(&mut out, &given);
        }
        out
    }

    fn product(&self, dense: &Dense, x: &[Near]) -> Vec<Near> {
        let rounding = if self.kind.bf16_rows { ROUNDING_BF16 } else { 0.0 };
        let mut x: Vec<Near> =
            x.iter().map(|x| Near { variance: x.variance + rounding * x.exact * x.exact, ..*x }).collect();
        let before = x.clone();
        if dense.stored.is_some() {
            // A number of a block of 32 is off by up to half of a unit, which is the largest magnitude over 32,512.
            for block in x.chunks_mut(32) {
                let unit = block.iter().fold(0.0_f64, |most, x| most.max(x.exact.abs())) / 32_512.0;
                for x in block.iter_mut() {
                    x.variance += unit * unit / 12.0;
                }
            }
        }
        let dot = |w: &[f32], x: &[Near]| sum(w.iter().zip(x).map(|(&w, &x)| Near::new(f64::from(w)) * x), x.len());
        let low =
            dense.added.as_ref().map(|added| added.a.chunks(x.len()).map(|a| dot(a, &before)).collect::<Vec<_>>());
        let row = |(o, row): (usize, &[f32])| {
            let y = sum(row.iter().zip(&x).map(|(&w, &x)| Near::new(f64::from(w)) * x), dense.inputs);
            let y = dense.bias.as_ref().map_or(y, |bias| y + Near::new(f64::from(bias[o])));
            dense.added.as_ref().zip(low.as_ref()).map_or(y, |(added, low)| y + dot(&added.b[o * added.rank..], low))
        };
        dense.weight.chunks_exact(dense.inputs).enumerate().map(row).collect()
    }

    /// Returns numbers as a bf16 or FP8 cache stores them, exactly, unless a number is so close to halfway that it may
    /// be either of two. Then it is one large error, whose effects are not independent, so its variance is its whole
    /// square.
    fn stored(&self, heads: Vec<Vec<Near>>, scale: f32) -> Vec<Vec<Near>> {
        let scale = f64::from(scale);
        let store = |x: Near| {
            // Bits of the fraction, the least exponent, and the scale.
            let (bits, least, scale) = match (self.kind.fraction, self.kind.bf16) {
                (3, _) => (3.0, -6.0, scale),
                (2, _) => (2.0, -14.0, scale),
                (_, true) => (7.0, -126.0, 1.0),
                _ => return x,
            };
            let apart = scale * ((x.exact / scale).abs().log2().floor().max(least) - bits).exp2();
            let exact = (x.exact / apart).round_ties_even() * apart;
            let from_middle = apart / 2.0 - (x.exact - exact).abs();
            let either = from_middle < DEVIATIONS * x.variance.sqrt();
            Near { exact, variance: if either { apart * apart } else { 0.0 } }
        };
        heads.into_iter().map(|head| head.into_iter().map(store).collect()).collect()
    }
}

fn wide(x: &[f32]) -> Vec<Near> {
    x.iter().map(|&x| Near::new(f64::from(x))).collect()
}

fn rms_norm(x: &[Near], weight: &[f32], eps: f64) -> Vec<Near> {
    let total = sum(x.iter().map(|&x| x * x), x.len());
    let mean = total.exact / x.len() as f64 + eps;
    // Each square is of one number, so its error is twice that of a product of two; that of a root is half.
    let own: f64 = x.iter().map(|x| 2.0 * x.exact * x.exact * x.variance).sum();
    let relative = (total.variance + own) / (total.exact * total.exact).max(f64::MIN_POSITIVE) / 4.0;
    let scale = Near { exact: 1.0 / mean.sqrt(), variance: relative / mean }.rounded(4.0);
    x.iter().zip(weight).map(|(&x, &w)| (x * scale * Near::new(f64::from(w))).rounded(2.0)).collect()
}

/// Applies rotary position embeddings. The angle is an fp32 product, as everywhere.
fn rotate(x: &[Near], position: usize, frequencies: &[f32]) -> Vec<Near> {
    let half = frequencies.len();
    let angle = |i: usize| f64::from(position as f32 * frequencies[i % half]);
    let part = |x: Near, by: f64| (x * Near::new(by).rounded(1.0)).rounded(1.0);
    (0..2 * half)
        .map(|i| {
            let (other, sign) = if i < half { (x[i + half], -1.0) } else { (x[i - half], 1.0) };
            part(x[i], angle(i).cos()) + part(other, sign * angle(i).sin())
        })
        .collect()
}

/// Computes a softmax by groups of 16 positions, whose sums are rounded once per group.
fn attend(
    q: &[Near],
    keys: &[Vec<Vec<Near>>],
    values: &[Vec<Vec<Near>>],
    head: usize,
    sink: Option<&f32>,
) -> Vec<Near> {
    let sink = sink.map_or(f64::NEG_INFINITY, |&sink| f64::from(sink));
    let scale = Near::new(1.0 / (q.len() as f64).sqrt()).rounded(3.0);
    let score = |k: &Vec<Vec<Near>>| {
        let products = k[head].iter().zip(q).map(|(&k, &q)| k * q);
        (sum(products, q.len()) * scale).rounded(1.0)
    };
    let scores: Vec<Near> = keys.iter().map(score).collect();
    let largest = scores.iter().map(|s| s.exact).fold(sink, f64::max);
    let weights: Vec<f64> = scores.iter().map(|s| (s.exact - largest).exp()).collect();
    let total: f64 = weights.iter().sum::<f64>() + (sink - largest).exp();
    let groups = keys.len().div_ceil(16) as f64;
    let mut out = vec![Near::default(); q.len()];
    for (d, out) in out.iter_mut().enumerate() {
        let shares = || weights.iter().zip(values).map(|(weight, v)| (weight / total, v[head][d]));
        out.exact = shares().map(|(share, v)| share * v.exact).sum();
        for ((share, v), s) in shares().zip(&scores) {
            // A weight is off by its score's error, and e^x by 2 units in the last place, 6 roundings' worth with the
            // difference.
            let weight = s.variance + ROUNDING * (6.0 + (s.exact - largest).powi(2));
            let away = v.exact - out.exact;
            let term = share * v.exact;
            out.variance +=
                share * share * (weight * away * away + v.variance) + ROUNDING * (groups + 16.0) * term * term;
        }
        *out = out.rounded(groups + 4.0);
    }
    out
}

/// Returns `g / (1 + e^-g)`.
fn silu(g: Near) -> Near {
    let sigmoid = 1.0 / (1.0 + (-g.exact).exp());
    let slope = sigmoid * (1.0 + g.exact * (1.0 - sigmoid));
    Near { exact: g.exact * sigmoid, variance: slope * slope * g.variance }.rounded(8.0)
}

/// Returns `g (1 + tanh(u)) / 2` with `u = sqrt(2 / pi) (g + 0.044715 g^3)`. fp32 rounds u about 4 times, and the
/// sigmoid of 2 u is off by as large a share of it.
fn gelu(g: Near) -> Near {
    let root = (2.0 / std::f64::consts::PI).sqrt();
    let x = g.exact;
    let (u, du) = (root * (x + 0.044_715 * x.powi(3)), root * (1.0 + 3.0 * 0.044_715 * x * x));
    let (half, tanh) = (0.5 * (1.0 + u.tanh()), u.tanh());
    let slope = half + x * 0.5 * (1.0 - tanh * tanh) * du;
    let own = x * 0.5 * (1.0 - tanh * tanh) * u;
    let variance = slope * slope * g.variance + 4.0 * ROUNDING * own * own;
    Near { exact: x * half, variance }.rounded(8.0)
}

/// Returns `g / (1 + e^(-alpha g)) (u + 1)`, with the gate at most the limit and the value within it.
fn clamped(g: Near, u: Near) -> Near {
    let (alpha, limit) = (f64::from(ALPHA), f64::from(LIMIT));
    let g = if g.exact > limit { Near::new(limit) } else { g };
    let u = if u.exact.abs() > limit { Near::new(limit * u.exact.signum()) } else { u };
    let sigmoid = 1.0 / (1.0 + (-alpha * g.exact).exp());
    let slope = sigmoid * (1.0 + alpha * g.exact * (1.0 - sigmoid));
    let gated = Near { exact: g.exact * sigmoid, variance: slope * slope * g.variance }.rounded(8.0);
    gated * (u + Near::new(1.0))
}

fn add(h: &mut [Near], x: &[Near]) {
    for (h, x) in h.iter_mut().zip(x) {
        *h = *h + *x;
    }
}
