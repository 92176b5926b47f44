//! The forward pass of a dense decoder.

use crate::error::{Error, Result, check_len};
use crate::kv_cache::KvCache;
use crate::memory::Bf16;
use crate::pass::{Output, Pass};
use crate::pool::Pool;
use crate::weights::{Layer, Linear, ValuesMut, Weights};
use std::sync::Arc;

/// A model ready for passes: its weights, its threads, and the memory that a pass needs.
pub struct Decoder {
    weights: Arc<Weights>,
    pool: Arc<Pool>,
}

impl Decoder {
    /// A decoder of these weights on these threads.
    ///
    /// # Errors
    /// None yet.
    pub fn new(weights: Arc<Weights>, pool: Arc<Pool>) -> Result<Self> {
        Ok(Self { weights, pool })
    }

    /// Its weights.
    pub fn weights(&self) -> &Arc<Weights> {
        &self.weights
    }

    /// Its threads.
    pub fn pool(&self) -> &Arc<Pool> {
        &self.pool
    }

    /// Feeds the rows of `pass`: writes their K and V into `kv`, and what `output` asks for.
    ///
    /// # Errors
    /// Where the pass names a token, slot, block or row that does not exist; nothing is written then.
    pub fn forward(&mut self, pass: &Pass<'_>, kv: &mut KvCache, mut output: Output<'_>) -> Result<()> {
        let weights = &*self.weights;
        let shape = weights.shape;
        kv.check(&shape, weights.layers.len())?;
        pass.check(&shape, &kv.shape, &output)?;
        let (hidden, dim) = (shape.hidden_size, shape.head_dim);
        let mut h = vec![vec![0.0_f32; hidden]; pass.len()];
        for (row, h) in h.iter_mut().enumerate() {
            if pass.positions[row] >= 0 {
                weights.embedding.expand(pass.tokens[row] as usize * hidden, h);
            }
        }
        for (i, layer) in weights.layers.iter().enumerate() {
            let mut queries = Vec::new();
            for (row, h) in h.iter().enumerate() {
                let x = norm(h, &layer.input_norm, shape.rms_norm_eps);
                let mut qkv = linear(&layer.qkv, &x);
                for (j, head) in qkv.chunks_exact_mut(dim).enumerate().take(shape.num_heads + shape.num_kv_heads) {
                    if let Some((q, k)) = &layer.qk_norm {
                        let weight = if j < shape.num_heads { q } else { k };
                        head.copy_from_slice(&norm(head, weight, shape.rms_norm_eps));
                    }
                    rotate(head, pass.positions[row], &weights.frequencies);
                }
                if pass.slots[row] >= 0 && pass.positions[row] >= 0 {
                    let slot = pass.slots[row] as usize;
                    for (j, head) in qkv[shape.num_heads * dim..].chunks_exact(dim).enumerate() {
                        let start = (slot / kv.shape.block_size * 2 * shape.num_kv_heads + j) * kv.shape.block_size
                            + slot % kv.shape.block_size;
                        store(&mut kv.layers[i], start * dim, head);
                    }
                }
                queries.push(qkv);
            }
            for (row, h) in h.iter_mut().enumerate() {
                let attended = attend(pass, row, &queries[row], kv, i, shape.num_heads);
                add(h, &linear(&layer.o, &attended));
                let x = norm(h, &layer.post_attention_norm, shape.rms_norm_eps);
                add(h, &mlp(layer, &x));
            }
        }
        let logits_of = |row: usize| linear(&weights.lm_head, &norm(&h[row], &weights.final_norm, shape.rms_norm_eps));
        match &mut output {
            Output::Nothing => {}
            Output::Hidden { rows, hidden: out } => {
                for (&row, out) in rows.iter().zip(out.chunks_exact_mut(hidden)) {
                    out.copy_from_slice(&norm(&h[row], &weights.final_norm, shape.rms_norm_eps));
                }
            }
            Output::Logits { rows, num_ids, logits } => {
                for (&row, logits) in rows.iter().zip(logits.chunks_exact_mut(*num_ids)) {
                    logits.copy_from_slice(&logits_of(row)[..*num_ids]);
                }
            }
            Output::Argmax { rows, num_ids, ids, top } => {
                for (i, &row) in rows.iter().enumerate() {
                    let logits = logits_of(row);
                    (ids[i], top[i]) = best_of(&logits[..*num_ids]);
                }
            }
        }
        Ok(())
    }

    /// Logits of the first `num_ids` ids of final hidden states `[L, hidden_size]`, into `logits` `[L, num_ids]`: the bits
    /// that a pass gives for them.
    ///
    /// # Errors
    /// Where a slice has another length, or `num_ids` is none of the vocabulary.
    pub fn logits(&mut self, hidden: &[f32], num_ids: usize, logits: &mut [f32]) -> Result<()> {
        let rows = self.check_head(hidden, num_ids)?;
        check_len("logits", logits.len(), rows * num_ids)?;
        let size = self.weights.shape.hidden_size;
        for (hidden, logits) in hidden.chunks_exact(size).zip(logits.chunks_exact_mut(num_ids)) {
            logits.copy_from_slice(&linear(&self.weights.lm_head, hidden)[..num_ids]);
        }
        Ok(())
    }

    /// The most probable of the first `num_ids` ids of final hidden states `[L, hidden_size]`, and its logit, as
    /// [`Output::Argmax`] has them.
    ///
    /// # Errors
    /// As [`logits`](Self::logits).
    pub fn argmax(&mut self, hidden: &[f32], num_ids: usize, ids: &mut [i64], top: &mut [f32]) -> Result<()> {
        let rows = self.check_head(hidden, num_ids)?;
        check_len("ids", ids.len(), rows)?;
        check_len("top", top.len(), rows)?;
        let size = self.weights.shape.hidden_size;
        for (i, hidden) in hidden.chunks_exact(size).enumerate() {
            (ids[i], top[i]) = best_of(&linear(&self.weights.lm_head, hidden)[..num_ids]);
        }
        Ok(())
    }

    /// Rows of final hidden states.
    fn check_head(&self, hidden: &[f32], num_ids: usize) -> Result<usize> {
        let shape = &self.weights.shape;
        if !hidden.len().is_multiple_of(shape.hidden_size) {
            let allowed = format!("a multiple of hidden_size = {}", shape.hidden_size);
            return Err(Error::invalid("hidden", format!("{} elements", hidden.len()), allowed));
        }
        if num_ids == 0 || num_ids > shape.vocab_size {
            return Err(Error::invalid("num_ids", num_ids, format!("1 to vocab_size = {}", shape.vocab_size)));
        }
        Ok(hidden.len() / shape.hidden_size)
    }
}

fn best_of(logits: &[f32]) -> (i64, f32) {
    let mut best = 0;
    for (id, &logit) in logits.iter().enumerate() {
        if !logits[best].is_nan() && (logit > logits[best] || logit.is_nan()) {
            best = id;
        }
    }
    (best as i64, logits[best])
}

fn norm(x: &[f32], weight: &[f32], eps: f32) -> Vec<f32> {
    let mean = x.iter().map(|x| x * x).sum::<f32>() / x.len() as f32;
    let scale = 1.0 / (mean + eps).sqrt();
    x.iter().zip(weight).map(|(x, w)| x * scale * w).collect()
}

fn linear(w: &Linear, x: &[f32]) -> Vec<f32> {
    let mut y = Vec::new();
    let mut row = vec![0.0; w.inputs];
    for part in &w.parts {
        for o in 0..part.outputs {
            part.weight.expand(o * w.inputs, &mut row);
            let sum: f32 = row.iter().zip(x).map(|(w, x)| w * x).sum();
            y.push(sum + part.bias.as_ref().map_or(0.0, |bias| bias[o]));
        }
    }
    y
}

fn rotate(x: &mut [f32], position: i64, frequencies: &[f32]) {
    let (a, b) = x.split_at_mut(frequencies.len());
    for ((a, b), f) in a.iter_mut().zip(b).zip(frequencies) {
        let angle = f64::from(position.max(0) as f32 * f);
        let (sin, cos) = (angle.sin() as f32, angle.cos() as f32);
        (*a, *b) = (*a * cos - *b * sin, *b * cos + *a * sin);
    }
}

fn store(layer: &mut ValuesMut, start: usize, x: &[f32]) {
    match layer {
        ValuesMut::F32(memory) => memory.as_mut_slice()[start..][..x.len()].copy_from_slice(x),
        ValuesMut::Bf16(memory) => {
            for (out, &x) in memory.as_mut_slice()[start..].iter_mut().zip(x) {
                *out = Bf16::from_f32(x);
            }
        }
    }
}

fn load(layer: &ValuesMut, index: usize) -> f32 {
    match layer {
        ValuesMut::F32(memory) => memory.as_slice()[index],
        ValuesMut::Bf16(memory) => memory.as_slice()[index].to_f32(),
    }
}

fn attend(pass: &Pass<'_>, row: usize, q: &[f32], kv: &KvCache, layer: usize, heads: usize) -> Vec<f32> {
    let (dim, kv_heads, block_size) = (kv.shape.head_dim, kv.shape.num_kv_heads, kv.shape.block_size);
    let mut out = vec![0.0; heads * dim];
    let table = &pass.block_table[pass.entries[row].min(pass.block_table.len() / pass.max_blocks) * pass.max_blocks..];
    for (head, out) in out.chunks_exact_mut(dim).enumerate() {
        let at = |p: usize, part: usize| {
            let block = table[p / block_size] as usize;
            (((block * 2 + part) * kv_heads + head / (heads / kv_heads)) * block_size + p % block_size) * dim
        };
        let q = &q[head * dim..][..dim];
        let scores: Vec<f32> = (0..=pass.positions[row])
            .map(|p| {
                let start = at(p as usize, 0);
                let sum: f32 = q.iter().enumerate().map(|(d, q)| q * load(&kv.layers[layer], start + d)).sum();
                sum / (dim as f32).sqrt()
            })
            .collect();
        let largest = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let weights: Vec<f32> = scores.iter().map(|s| (s - largest).exp()).collect();
        let total: f32 = weights.iter().sum();
        for (p, weight) in weights.iter().enumerate() {
            for (d, out) in out.iter_mut().enumerate() {
                *out += weight / total * load(&kv.layers[layer], at(p, 1) + d);
            }
        }
    }
    out
}

fn mlp(layer: &Layer, x: &[f32]) -> Vec<f32> {
    let gate_up = linear(&layer.gate_up, x);
    let (gate, up) = gate_up.split_at(gate_up.len() / 2);
    let act: Vec<f32> = gate.iter().zip(up).map(|(g, u)| g / (1.0 + (-g).exp()) * u).collect();
    linear(&layer.down, &act)
}

fn add(h: &mut [f32], x: &[f32]) {
    for (h, x) in h.iter_mut().zip(x) {
        *h += x;
    }
}
