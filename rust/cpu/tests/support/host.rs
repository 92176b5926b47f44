//! Memory around passes in tests: paged KV, block tables, adapters of sequences.

use super::{KeysValues, Model, Numbers};
use specrs_cpu::{Bf16, Decoder, E4m3, E5m2, KvCache, Lora, Output, Pass, ValuesMut};
use std::sync::Arc;

/// KV cache with a scattered block table, and the tokens of its sequences. Every slot holds NaN until it is written.
pub struct Host {
    pub kv: KvCache,
    pub table: Vec<i64>,
    pub max_blocks: usize,
    pub block_size: usize,
    /// First position that each sequence attends to; empty for 0 everywhere.
    pub k_start: Vec<i64>,
    /// Adapter of each sequence; empty for none.
    pub adapters: Vec<Option<Arc<Lora>>>,
}

impl Host {
    /// Makes room for `num_seqs` sequences of `len` tokens.
    pub fn new(model: &Model, num_seqs: usize, len: usize, block_size: usize, seed: u64) -> Self {
        let max_blocks = len.div_ceil(block_size);
        let num_blocks = num_seqs * max_blocks;
        let mut table: Vec<i64> = (0..num_blocks as i64).collect();
        let n = &mut Numbers(seed);
        for i in (1..num_blocks).rev() {
            table.swap(i, n.below(i + 1));
        }
        let mut kv = model.kv_cache(num_blocks, block_size);
        for layer in kv.layers_mut() {
            match layer {
                ValuesMut::F32(memory) => memory.as_mut_slice().fill(f32::NAN),
                ValuesMut::Bf16(memory) => memory.as_mut_slice().fill(Bf16::from_f32(f32::NAN)),
                ValuesMut::E4m3(memory) => memory.as_mut_slice().fill(E4m3::from_f32(f32::NAN)),
                ValuesMut::E5m2(memory) => memory.as_mut_slice().fill(E5m2::from_f32(f32::NAN)),
            }
        }
        Self { kv, table, max_blocks, block_size, k_start: Vec::new(), adapters: Vec::new() }
    }

    /// Writes NaN over the keys and values of the first `len` positions of sequence 0.
    pub fn forget(&mut self, model: &Model, len: usize) {
        let (heads, dim, block_size) = (model.shape.num_kv_heads, model.shape.head_dim, self.block_size);
        for layer in self.kv.layers_mut() {
            let ValuesMut::F32(memory) = layer else { panic!("fp32") };
            for (p, head) in (0..len).flat_map(|p| (0..2 * heads).map(move |head| (p, head))) {
                let plane = self.table[p / block_size] as usize * 2 * heads + head;
                memory.as_mut_slice()[(plane * block_size + p % block_size) * dim..][..dim].fill(f32::NAN);
            }
        }
    }

    /// Writes random keys and values of the first `len` positions of sequence 0, and returns them by layer.
    pub fn fill(&mut self, model: &Model, len: usize, seed: u64) -> Vec<KeysValues> {
        let n = &mut Numbers(seed);
        let (heads, dim, block_size) = (model.shape.num_kv_heads, model.shape.head_dim, self.block_size);
        let table = &self.table;
        let mut fill = |layer: &mut ValuesMut| {
            let mut halves = [Vec::new(), Vec::new()];
            for p in 0..len {
                for (half, rows) in halves.iter_mut().enumerate() {
                    let mut row = Vec::new();
                    for head in 0..heads {
                        let plane = (table[p / block_size] as usize * 2 + half) * heads + head;
                        let start = (plane * block_size + p % block_size) * dim;
                        let x: Vec<Bf16> = (0..dim).map(|_| Bf16::from_f32(3.0 * n.unit())).collect();
                        row.push(x.iter().map(|x| f64::from(x.to_f32())).collect());
                        match layer {
                            ValuesMut::F32(memory) => {
                                for (out, x) in memory.as_mut_slice()[start..].iter_mut().zip(&x) {
                                    *out = x.to_f32();
                                }
                            }
                            ValuesMut::Bf16(memory) => memory.as_mut_slice()[start..][..dim].copy_from_slice(&x),
                            _ => panic!("numbers"),
                        }
                    }
                    rows.push(row);
                }
            }
            let [keys, values] = halves;
            (keys, values)
        };
        self.kv.layers_mut().iter_mut().map(&mut fill).collect()
    }

    /// Runs one pass over (sequence, position, token). A row is masked if its position is `None`.
    pub fn pass(&mut self, decoder: &mut Decoder, rows: &[(usize, Option<usize>, usize)], output: Output<'_>) {
        let slot = |&(seq, position, _): &(usize, Option<usize>, usize)| {
            position.map_or(-1, |p| {
                let block = self.table[seq * self.max_blocks + p / self.block_size];
                block * self.block_size as i64 + (p % self.block_size) as i64
            })
        };
        let adapter = |row: &(usize, Option<usize>, usize)| self.adapters[row.0].as_deref();
        let adapters: Vec<_> = if self.adapters.is_empty() { vec![] } else { rows.iter().map(adapter).collect() };
        let pass = Pass {
            tokens: &rows.iter().map(|row| row.2 as i64).collect::<Vec<_>>(),
            positions: &rows.iter().map(|row| row.1.map_or(-1, |p| p as i64)).collect::<Vec<_>>(),
            slots: &rows.iter().map(slot).collect::<Vec<_>>(),
            sequences: &rows.iter().map(|row| row.0).collect::<Vec<_>>(),
            block_table: &self.table,
            max_blocks: self.max_blocks,
            k_start: &self.k_start,
            prompts: true,
            adapters: &adapters,
            ..Pass::default()
        };
        decoder.forward(&pass, &mut self.kv, output).unwrap();
    }

    /// Runs a pass over `rows` and returns the logits of all of them.
    pub fn logits(&mut self, decoder: &mut Decoder, rows: &[(usize, Option<usize>, usize)]) -> Vec<Vec<f32>> {
        let vocab = decoder.weights().shape().vocab_size;
        let asked: Vec<usize> = (0..rows.len()).collect();
        let mut logits = vec![f32::NAN; rows.len() * vocab];
        self.pass(decoder, rows, Output::Logits { rows: &asked, num_ids: vocab, logits: &mut logits });
        logits.chunks(vocab).map(<[f32]>::to_vec).collect()
    }
}
