//! Layers in several KV groups: the bits of one group, for any contents of blocks that have left a window.

mod support;

use specrs_cpu::{Decoder, Isa, KvCache, KvLayer, KvShape, Output, Pass, ValuesMut};
use support::{GEMMA3, Host, Kind, MIXTRAL, Model, Numbers, SMALL};

const BLOCK_SIZE: usize = 3;
const MAX_BLOCKS: usize = 30;
/// Number of layers: three with windows, each in a group of its own after that of the last layer, in the memory of one
/// layer.
const LAYERS: usize = 4;
const GROUPS: [usize; LAYERS] = [1, 2, 3, 0];
const NUM_SEQS: usize = 2;

/// Sequences whose blocks outside the window are freed: their memory becomes NaN, and their ids invalid.
struct Grouped {
    kv: KvCache,
    /// Block tables, `[G, sequences, max_blocks]`.
    tables: Vec<i64>,
    free: Vec<i64>,
    window: usize,
}

fn nan(layer: &mut ValuesMut, block: i64, len: usize) {
    let ValuesMut::F32(memory) = layer else { panic!("fp32") };
    memory.as_mut_slice()[block as usize * len..][..len].fill(f32::NAN);
}

impl Grouped {
    fn new(model: &Model) -> Self {
        let num_blocks = NUM_SEQS * (MAX_BLOCKS + 3 * 26);
        let (num_kv_heads, head_dim) = (model.shape.num_kv_heads, model.shape.head_dim);
        let shape = KvShape { num_blocks, block_size: BLOCK_SIZE, num_kv_heads, head_dim };
        let mut kv = KvCache::allocate(shape, 1, false).unwrap();
        let len = shape.layer_len() / (num_blocks + 1);
        for block in 0..=num_blocks as i64 {
            nan(&mut kv.layers_mut()[0], block, len);
        }
        let kv = kv.with_groups(GROUPS.map(|group| KvLayer { group, place: 0 }).to_vec()).unwrap();
        assert_eq!(kv.num_groups(), LAYERS);
        let window = model.window(0).unwrap();
        let free = (0..num_blocks as i64).map(|i| i * 7 % num_blocks as i64).collect();
        Self { kv, tables: vec![i64::MIN; LAYERS * NUM_SEQS * MAX_BLOCKS], free, window }
    }

    fn at(&mut self, group: usize, seq: usize, index: usize) -> &mut i64 {
        &mut self.tables[(group * NUM_SEQS + seq) * MAX_BLOCKS + index]
    }

    /// Returns logits of the rows (sequence, position, token), after a masked row.
    fn logits(&mut self, decoder: &mut Decoder, rows: &[(usize, usize, usize)]) -> Vec<Vec<f32>> {
        let (mut slots, mut seqs) = (vec![vec![-1]; LAYERS], vec![0]);
        for &(seq, position, _) in rows {
            seqs.push(seq);
            for (group, slots) in slots.iter_mut().enumerate() {
                if *self.at(group, seq, position / BLOCK_SIZE) < 0 {
                    let block = self.free.pop().expect("blocks come back");
                    *self.at(group, seq, position / BLOCK_SIZE) = block;
                }
                let block = *self.at(group, seq, position / BLOCK_SIZE);
                slots.push(block * BLOCK_SIZE as i64 + (position % BLOCK_SIZE) as i64);
            }
        }
        let (first, further) = self.tables.split_at(NUM_SEQS * MAX_BLOCKS);
        let pass = Pass {
            tokens: &[0].into_iter().chain(rows.iter().map(|row| row.2 as i64)).collect::<Vec<_>>(),
            positions: &[-1].into_iter().chain(rows.iter().map(|row| row.1 as i64)).collect::<Vec<_>>(),
            slots: &slots[0],
            sequences: &seqs,
            block_table: first,
            max_blocks: MAX_BLOCKS,
            group_slots: &slots[1..].concat(),
            group_tables: further,
            ..Pass::default()
        };
        let (asked, vocab): (Vec<_>, _) = ((1..=rows.len()).collect(), SMALL.vocab_size);
        let mut logits = vec![f32::NAN; rows.len() * vocab];
        let output = Output::Logits { rows: &asked, num_ids: vocab, logits: &mut logits };
        decoder.forward(&pass, &mut self.kv, output).unwrap();
        for &(seq, position, _) in rows {
            self.give_back(seq, position + 1);
        }
        logits.chunks(vocab).map(<[f32]>::to_vec).collect()
    }

    /// Frees the blocks that no row from position `n` on attends to.
    fn give_back(&mut self, seq: usize, n: usize) {
        let len = self.kv.shape().layer_len() / (self.kv.shape().num_blocks + 1);
        for group in 1..LAYERS {
            for index in 0..(n + 1).saturating_sub(self.window) / BLOCK_SIZE {
                let block = std::mem::replace(self.at(group, seq, index), i64::MIN);
                if block >= 0 {
                    nan(&mut self.kv.layers_mut()[0], block, len);
                    self.free.push(block);
                }
            }
        }
    }
}

#[test]
fn groups_change_no_bit() {
    for kind in [GEMMA3, Kind { all_windows: false, ..MIXTRAL }] {
        let model = Model::random(SMALL, LAYERS, kind, 5);
        for (isa, threads) in Isa::available().into_iter().zip([1, 2, 3].into_iter().cycle()) {
            let mut decoder = model.decoder(isa, threads);
            decoder.poison();
            let mut grouped = Grouped::new(&model);
            let mut whole = Host::new(&model, NUM_SEQS, BLOCK_SIZE * MAX_BLOCKS, BLOCK_SIZE, 5);
            let (n, mut done) = (&mut Numbers(9), [0; NUM_SEQS]);
            // Of both sequences in one pass, also of more rows than a tile has.
            for counts in [[1, 4], [70, 0], [3, 60], [1, 1], [0, 13], [9, 2]] {
                let rows: Vec<_> = (0..NUM_SEQS)
                    .flat_map(|seq| (done[seq]..done[seq] + counts[seq]).map(move |p| (seq, p)))
                    .map(|(seq, p)| (seq, p, n.below(SMALL.vocab_size)))
                    .collect();
                let expected: Vec<_> = rows.iter().map(|&(seq, p, token)| (seq, Some(p), token)).collect();
                let expected = whole.logits(&mut decoder, &expected).concat();
                let found = grouped.logits(&mut decoder, &rows).concat();
                assert!(expected.iter().all(|x| x.is_finite()));
                let bits = |logits: &[f32]| logits.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
                assert_eq!(bits(&found), bits(&expected), "{} {threads} {counts:?}", isa.name());
                done = [done[0] + counts[0], done[1] + counts[1]];
            }
        }
    }
}

#[test]
fn wrong_groups_are_named() {
    let model = Model::random(SMALL, 2, GEMMA3, 3);
    let shape = KvShape { num_blocks: 4, block_size: 3, num_kv_heads: SMALL.num_kv_heads, head_dim: SMALL.head_dim };
    for (layers, expected) in [
        (vec![(0, 0), (1, 1)], "groups[1]=place 1: must be a place below 1, the number of arrays"),
        (vec![(0, 0), (0, 0)], "groups[1]=place 0 of group 0: must be a place for each layer of a group"),
        (vec![(0, 0), (2, 0)], "groups=no layer in group 1: must be at least one layer in each"),
    ] {
        let layers = layers.into_iter().map(|(group, place)| KvLayer { group, place }).collect();
        let error = KvCache::allocate(shape, 1, false).unwrap().with_groups(layers).err().unwrap();
        assert_eq!(error.to_string(), expected);
    }
    let layers = vec![KvLayer { group: 1, place: 0 }, KvLayer { group: 0, place: 0 }];
    let mut kv = KvCache::allocate(shape, 1, false).unwrap().with_groups(layers).unwrap();
    let mut decoder = model.decoder(Isa::detect(), 1);
    // The window is 5, so of group 1 the row at 8 sees from position 4 on.
    let base = Pass {
        tokens: &[1],
        positions: &[8],
        slots: &[5],
        sequences: &[0],
        block_table: &[0, 1, 2],
        max_blocks: 3,
        group_slots: &[11],
        group_tables: &[-1, 2, 3],
        ..Pass::default()
    };
    decoder.forward(&base, &mut kv, Output::Nothing).unwrap();
    for (pass, expected) in [
        (Pass { group_slots: &[], ..base }, "group_slots=0 elements: must be 1"),
        (Pass { group_tables: &[1, 2], ..base }, "group_tables=2 elements: must be 3"),
        (Pass { group_slots: &[12], ..base }, "group_slots[0, 0]=12: must be from -1 to 11"),
        (Pass { group_tables: &[-1, -1, 3], ..base }, "group_tables[0, 0, 1]=-1: must be from 0 to num_blocks - 1 = 3"),
        (Pass { group_tables: &[0, 1, 4], ..base }, "group_tables[0, 0, 2]=4: must be from 0 to num_blocks - 1 = 3"),
    ] {
        assert_eq!(decoder.forward(&pass, &mut kv, Output::Nothing).unwrap_err().to_string(), expected);
    }
    let mut one = model.kv_cache(4, 3);
    let error = decoder.forward(&base, &mut one, Output::Nothing).unwrap_err().to_string();
    assert_eq!(error, "group_slots=1 elements: must be 0");
}
