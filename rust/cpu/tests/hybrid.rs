//! Layers with delta nets and short convolutions: logits have the same bits on every instruction set, with any number of threads, for any
//! division into passes, and after any rejected drafts.

mod support;

use proptest::prelude::*;
use specrs_cpu::{
    ConvShape, ConvWeights, Decoder, DecoderWeights, DeltaShape, DeltaWeights, Experts, Isa, KvCache, KvShape,
    LayerWeights, Linear, Memory, Mlp, ModelShape, Output, Part, Pass, Pool, QkNorm, SharedExpert, StateShape,
    StateSnapshot, StateWeights, Values, Weights,
};
use std::sync::Arc;
use support::Numbers;

const VOCAB: usize = 41;
const BLOCK: usize = 8;
const LEN: usize = 80;
const SHAPE: ModelShape = ModelShape {
    vocab_size: VOCAB,
    hidden_size: 40,
    intermediate_size: 70,
    num_heads: 4,
    num_kv_heads: 2,
    head_dim: 12,
    rms_norm_eps: 1e-6,
};
/// Sizes of delta nets: not divisible into vectors, one vector, and more columns than are computed together. Sizes of
/// short convolutions, whose last block of channels is not full.
const NETS: [StateShape; 6] = [
    StateShape::Delta(DeltaShape { key_heads: 2, value_heads: 6, key_dim: 10, value_dim: 7, kernel: 4 }),
    StateShape::Delta(DeltaShape { key_heads: 3, value_heads: 3, key_dim: 16, value_dim: 16, kernel: 2 }),
    StateShape::Delta(DeltaShape { key_heads: 1, value_heads: 2, key_dim: 9, value_dim: 70, kernel: 5 }),
    StateShape::Delta(DeltaShape { key_heads: 5, value_heads: 10, key_dim: 4, value_dim: 40, kernel: 3 }),
    StateShape::Conv(ConvShape { channels: SHAPE.hidden_size, kernel: 3 }),
    StateShape::Conv(ConvShape { channels: SHAPE.hidden_size, kernel: 2 }),
];

fn draw(n: &mut Numbers, len: usize, scale: f32, offset: f32) -> Values {
    Values::F32(Memory::from_vec((0..len).map(|_| n.unit() * scale + offset).collect()))
}

fn linear(n: &mut Numbers, inputs: usize, outputs: &[usize]) -> Linear {
    let scale = 1.7 / (inputs as f32).sqrt();
    let parts = outputs.iter().map(|&outputs| Part::new(draw(n, outputs * inputs, scale, 0.0), None, outputs));
    Linear::new("test", inputs, parts.collect()).unwrap()
}

/// Returns the weights of what has a state of these sizes, and the outputs of its input projection.
fn state(n: &mut Numbers, shape: StateShape) -> (StateWeights, Vec<usize>, usize) {
    match shape {
        StateShape::Delta(shape) => {
            let delta = DeltaWeights {
                shape,
                conv: draw(n, shape.kernel * shape.conv_dim(), 1.0, 0.0),
                a_log: draw(n, shape.value_heads, 1.0, -1.0),
                dt_bias: draw(n, shape.value_heads, 1.0, 0.0),
                norm: draw(n, shape.value_dim, 0.3, 1.0),
                turned: shape.key_heads == 2,
                by_key_head: shape.key_heads == 5,
            };
            let outputs = vec![shape.conv_dim(), shape.inner(), shape.value_heads, shape.value_heads];
            (StateWeights::Delta(delta), outputs, shape.inner())
        }
        StateShape::Conv(shape) => {
            let conv = ConvWeights { shape, conv: draw(n, shape.kernel * shape.channels, 1.0, 0.0) };
            (StateWeights::Conv(conv), vec![3 * shape.channels], shape.channels)
        }
    }
}

fn layer(n: &mut Numbers, net: Option<StateShape>) -> LayerWeights {
    let (hidden, dim) = (SHAPE.hidden_size, SHAPE.head_dim);
    let (q, kv) = (SHAPE.num_heads * dim, SHAPE.num_kv_heads * dim);
    let (state, inputs, inner) = match net.map(|shape| state(n, shape)) {
        Some((state, outputs, inner)) => (Some(state), outputs, inner),
        None => (None, vec![2 * q, kv, kv], q),
    };
    let dense = net.is_none_or(|net| !matches!(net, StateShape::Delta(net) if net.key_heads != 3));
    LayerWeights {
        varied: specrs_cpu::VariedLayer::default(),
        input_norm: Some(draw(n, hidden, 0.3, 1.0)),
        qkv: linear(n, hidden, &inputs),
        output_gate: net.is_none(),
        state,
        qk_norm: net.is_none().then(|| QkNorm { q: draw(n, dim, 0.5, 1.0), k: draw(n, dim, 0.5, 1.0), whole: false }),
        sinks: None,
        o: linear(n, inner, &[hidden]),
        attention_output_norm: None,
        post_attention_norm: Some(draw(n, hidden, 0.3, 1.0)),
        mlp: mlp(n, dense),
        mlp_output_norm: None,
    }
}

/// Returns an MLP, or experts with a shared expert, which has more features than an MLP.
fn mlp(n: &mut Numbers, dense: bool) -> Mlp {
    let hidden = SHAPE.hidden_size;
    if dense {
        let gate_up = linear(n, hidden, &[2 * SHAPE.intermediate_size]);
        return Mlp::Dense { gate_up, down: linear(n, SHAPE.intermediate_size, &[hidden]) };
    }
    let gate_up = linear(n, hidden, &[2 * 90]);
    let shared = SharedExpert { gate: Some(linear(n, hidden, &[1])), gate_up, down: linear(n, 90, &[hidden]) };
    Mlp::Experts(Box::new(Experts {
        router: linear(n, hidden, &[4]),
        experts: (0..4).map(|_| (linear(n, hidden, &[2 * 20]), linear(n, 20, &[hidden]))).collect(),
        per_token: 2,
        normalized: true,
        sigmoids: false,
        bias: None,
        factor: 1.0,
        weighs_input: false,
        shared: Some(shared),
        scales: None,
        mlp: None,
    }))
}

fn weights(net: StateShape, seed: u64) -> Arc<Weights> {
    let n = &mut Numbers(seed);
    let layers = [Some(net), None, Some(net)].map(|net| layer(n, net)).into();
    let embedding = draw(n, VOCAB * SHAPE.hidden_size, 1.0, 0.0).into();
    let final_norm = draw(n, SHAPE.hidden_size, 0.3, 1.0);
    let lm_head = linear(n, SHAPE.hidden_size, &[VOCAB]);
    let frequencies = (0..SHAPE.head_dim / 2).map(|i| 0.3_f32.powi(i as i32)).collect();
    let given = DecoderWeights { shape: SHAPE, embedding, layers, final_norm, lm_head, frequencies };
    Arc::new(Weights::new(given).unwrap())
}

fn cache(num_seqs: usize) -> KvCache {
    let shape = KvShape {
        num_blocks: num_seqs * LEN / BLOCK,
        block_size: BLOCK,
        num_kv_heads: SHAPE.num_kv_heads,
        head_dim: SHAPE.head_dim,
    };
    KvCache::allocate(shape, 1, false).unwrap()
}

/// Row of a pass: its sequence, its position (`None` masks it), its token.
type Row = (usize, Option<usize>, usize);

/// Returns logits of a pass's rows, as bits.
fn feed(decoder: &mut Decoder, kv: &mut KvCache, rows: &[Row], prompts: bool) -> specrs_cpu::Result<Vec<Vec<u32>>> {
    feed_keeping(decoder, kv, rows, prompts, &[])
}

/// Returns logits of a pass's rows, as bits. The pass writes snapshots on the way.
fn feed_keeping(
    decoder: &mut Decoder,
    kv: &mut KvCache,
    rows: &[Row],
    prompts: bool,
    snapshots: &[StateSnapshot],
) -> specrs_cpu::Result<Vec<Vec<u32>>> {
    let blocks = LEN / BLOCK;
    let seqs = kv.shape().num_blocks / blocks;
    let table: Vec<i64> = (0..(seqs * blocks) as i64).collect();
    let positions: Vec<i64> = rows.iter().map(|row| row.1.map_or(-1, |p| p as i64)).collect();
    let slots: Vec<i64> = rows.iter().map(|row| row.1.map_or(-1, |p| (row.0 * LEN + p) as i64)).collect();
    let tokens: Vec<i64> = rows.iter().map(|row| row.2 as i64).collect();
    let of: Vec<usize> = rows.iter().map(|row| row.0).collect();
    let pass = Pass {
        tokens: &tokens,
        positions: &positions,
        slots: &slots,
        sequences: &of,
        block_table: &table,
        max_blocks: blocks,
        prompts,
        snapshots,
        ..Pass::default()
    };
    let wanted: Vec<usize> = (0..rows.len()).collect();
    let mut logits = vec![f32::NAN; rows.len() * VOCAB];
    decoder.poison();
    decoder.forward(&pass, kv, Output::Logits { rows: &wanted, num_ids: VOCAB, logits: &mut logits })?;
    Ok(logits.chunks_exact(VOCAB).map(|row| row.iter().map(|x| x.to_bits()).collect()).collect())
}

/// Returns the bits of the logits after each token of `text`. Feeds one token per pass, with the portable instruction
/// set on one thread.
fn alone(weights: &Arc<Weights>, text: &[usize]) -> Vec<Vec<u32>> {
    let pool = Arc::new(Pool::new(1).unwrap());
    let mut decoder = Decoder::with_isa(Arc::clone(weights), pool, Isa::by_name("portable").unwrap());
    let mut kv = cache(1);
    let rows = text.iter().enumerate();
    rows.map(|(p, &token)| feed(&mut decoder, &mut kv, &[(0, Some(p), token)], false).unwrap().remove(0)).collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn bits_depend_on_nothing_but_the_text(
        net in prop::sample::select(NETS.to_vec()),
        isa in prop::sample::select(Isa::available()),
        threads in 1..=4_usize,
        seqs in 1..=4_usize,
        most in prop::sample::select(vec![2_usize, 5, 40]),
        seed in 0..1000_u64,
    ) {
        let weights = weights(net, seed % 3);
        let n = &mut Numbers(seed);
        let mut decoder = Decoder::with_isa(Arc::clone(&weights), Arc::new(Pool::new(threads).unwrap()), isa);
        let mut kv = cache(seqs);
        // The first texts' rows are used again for the second ones.
        for _ in 0..2 {
            let texts: Vec<Vec<usize>> =
                (0..seqs).map(|_| (0..n.below(50) + 20).map(|_| n.below(VOCAB)).collect()).collect();
            let exact: Vec<Vec<Vec<u32>>> = texts.iter().map(|text| alone(&weights, text)).collect();
            kv.poison_states();
            let mut done = vec![0; seqs];
            // Snapshots at random lengths, two of each text, and the positions that each text's base state covers.
            // A base state covers at least one position, so the first snapshot is always taken.
            let mut snapshots: Vec<StateSnapshot> = (0..2 * seqs)
                .map(|i| StateSnapshot { row: i / 2, len: n.below(texts[i / 2].len() - 1) + 1, slot: 2 * seqs - 1 - i })
                .collect();
            snapshots[0].len = 1;
            for snapshot in &snapshots {
                kv.poison_snapshot(snapshot.slot);
            }
            let mut base = vec![0; seqs];
            while (0..seqs).any(|seq| done[seq] < texts[seq].len()) {
                // A pass of prompts, or of decoding with drafts, of which some first ones are those of the text.
                let prompts = n.below(3) == 0;
                let (mut rows, mut known) = (Vec::new(), Vec::new());
                let offset = n.below(seqs);
                for i in 0..seqs {
                    let seq = (i + offset) % seqs;
                    let (text, from) = (&texts[seq], done[seq]);
                    let count = n.below(most + 1).min(text.len() - from);
                    let right = if prompts { count } else { n.below(count + 1).max(count.min(1)) };
                    for (p, &token) in text.iter().enumerate().skip(from).take(count) {
                        let token = if p < from + right { token } else { n.below(VOCAB) };
                        if n.below(4) == 0 {
                            rows.push((seq, None, 0));
                            known.push(None);
                        }
                        rows.push((seq, Some(p), token));
                        known.push((p < from + right).then_some((seq, p)));
                    }
                    if count > 0 {
                        base[seq] = if prompts { from + count } else { from + 1 };
                    }
                    done[seq] += right;
                }
                if rows.is_empty() {
                    continue;
                }
                let found = feed_keeping(&mut decoder, &mut kv, &rows, prompts, &snapshots).unwrap();
                for (known, found) in known.iter().zip(found) {
                    match *known {
                        Some((seq, p)) => prop_assert!(
                            found == exact[seq][p],
                            "{} on {threads} threads: seq {seq}, position {p}", isa.name()
                        ),
                        None => prop_assert!(found.iter().all(|&x| f32::from_bits(x).is_finite())),
                    }
                }
            }
            kv.poison_states();
            snapshots.retain(|snapshot| snapshot.len <= base[snapshot.row]);
            prop_assert!(!snapshots.is_empty());
            for StateSnapshot { row, len, slot } in snapshots {
                kv.restore_states(row, slot).unwrap();
                let rest: Vec<Row> = (len..texts[row].len()).map(|p| (row, Some(p), texts[row][p])).collect();
                let found = feed(&mut decoder, &mut kv, &rest, true).unwrap();
                prop_assert!(found == exact[row][len..], "{}: from {len} positions of text {row}", isa.name());
            }
        }
    }
}

#[test]
fn a_slot_that_no_pass_has_written_is_rejected_and_so_is_one_for_two_snapshots() {
    let (_, mut decoder, mut kv) = small();
    assert!(kv.restore_states(0, 1).unwrap_err().to_string().contains("snapshot=1"));
    let twice = [1, 2].map(|len| StateSnapshot { row: 0, len, slot: 3 });
    let rows = [(0, Some(0), 1), (0, Some(1), 1)];
    let told = feed_keeping(&mut decoder, &mut kv, &rows, true, &twice).unwrap_err().to_string();
    assert!(told.contains("snapshots[1].slot=3"), "{told}");
    assert_eq!((kv.snapshot_bytes(), kv.state_bytes()), (0, 0));
    feed_keeping(&mut decoder, &mut kv, &rows, true, &twice[1..]).unwrap();
    assert_eq!(kv.snapshot_bytes(), kv.state_bytes());
    // The state of another row goes on from there.
    kv.restore_states(1, 3).unwrap();
    let told = feed(&mut decoder, &mut kv, &[(1, Some(1), 1)], true).unwrap_err().to_string();
    assert!(told.contains("positions[0]=1"), "{told}");
}

#[test]
fn a_snapshot_goes_on_in_another_cache() {
    let (weights, mut decoder, mut kv) = small();
    let text = [3, 1, 4, 1, 5, 9, 2, 6];
    let exact = alone(&weights, &text);
    let rows = |from: usize, to: usize| -> Vec<Row> { (from..to).map(|p| (0, Some(p), text[p])).collect() };
    let kept = [StateSnapshot { row: 0, len: 3, slot: 2 }];
    feed_keeping(&mut decoder, &mut kv, &rows(0, 5), true, &kept).unwrap();
    let (mut block, mut states) = (Vec::new(), Vec::new());
    kv.append_block(0, &mut block);
    kv.append_snapshot(2, &mut states);
    assert_eq!((states.len(), decoder.snapshot_bytes()), (kv.snapshot_bytes(), kv.snapshot_bytes()));
    for used in [false, true] {
        // Before the first pass of a cache, and after other texts.
        let mut kv = cache(2);
        if used {
            feed(&mut decoder, &mut kv, &[(0, Some(0), 7), (0, Some(1), 8), (1, Some(0), 9)], false).unwrap();
        }
        kv.fill_block(0, &block);
        kv.fill_snapshot(1, 3, &states);
        kv.restore_states(0, 1).unwrap();
        // No update of the row's earlier text may be replayed.
        assert!(feed(&mut decoder, &mut kv, &rows(4, 5), false).is_err(), "used: {used}");
        let found: Vec<_> =
            (3..text.len()).flat_map(|p| feed(&mut decoder, &mut kv, &rows(p, p + 1), false).unwrap()).collect();
        assert_eq!(found, exact[3..], "used: {used}");
        kv.restore_states(0, 1).unwrap();
        // Drafts are logged, and one is accepted.
        let drafted = [(0, Some(3), text[3]), (0, Some(4), text[4]), (0, Some(5), 40)];
        assert_eq!(feed(&mut decoder, &mut kv, &drafted, false).unwrap()[..2], exact[3..5]);
        assert_eq!(feed(&mut decoder, &mut kv, &rows(5, 8), true).unwrap(), exact[5..]);
    }
}

#[test]
fn a_snapshot_of_another_model_is_rejected() {
    let (_, mut decoder, mut kv) = small();
    kv.fill_snapshot(0, 2, &[0; 12]);
    kv.restore_states(0, 0).unwrap();
    let told = feed(&mut decoder, &mut kv, &[(0, Some(2), 1)], true).unwrap_err().to_string();
    assert!(told.contains("snapshot=3 numbers"), "{told}");
    let mut kv = cache(2);
    feed(&mut decoder, &mut kv, &[(1, Some(0), 1)], true).unwrap();
    kv.fill_snapshot(0, 2, &[0; 12]);
    let told = kv.restore_states(0, 0).unwrap_err().to_string();
    assert!(told.contains("snapshot=3 numbers"), "{told}");
}

fn small() -> (Arc<Weights>, Decoder, KvCache) {
    let weights = weights(NETS[0], 1);
    let decoder = Decoder::new(Arc::clone(&weights), Arc::new(Pool::new(1).unwrap()));
    (weights, decoder, cache(2))
}

#[test]
fn another_position_than_the_next_is_rejected_and_changes_nothing() {
    let (weights, mut decoder, mut kv) = small();
    let text = [3, 1, 4, 1, 5];
    let exact = alone(&weights, &text);
    let rows = |from: usize, to: usize| -> Vec<Row> { (from..to).map(|p| (0, Some(p), text[p])).collect() };
    feed(&mut decoder, &mut kv, &rows(0, 3), false).unwrap();
    for (from, to, field) in [(4, 5, "positions[0]"), (2, 4, ""), (1, 2, "positions[0]")] {
        let told = feed(&mut decoder, &mut kv, &rows(from, to), false);
        assert!(told.as_ref().err().map(ToString::to_string).unwrap_or_default().contains(field), "{told:?}");
        if field.is_empty() {
            assert_eq!(told.unwrap(), exact[2..4]);
        }
    }
    assert_eq!(feed(&mut decoder, &mut kv, &rows(3, 5), false).unwrap(), exact[3..5]);
    let twice = [(0, Some(5), 1), (1, Some(0), 1), (0, Some(6), 1)];
    let told = feed(&mut decoder, &mut kv, &twice, false).unwrap_err().to_string();
    assert!(told.contains("sequences[2]=0") && told.contains("next to the other rows of its sequence"), "{told}");
}

#[test]
fn memory_of_states_grows_with_the_rows_that_are_used() {
    let (_, mut decoder, mut kv) = small();
    assert_eq!(kv.state_bytes(), 0);
    feed(&mut decoder, &mut kv, &[(0, Some(0), 1)], false).unwrap();
    let one = kv.state_bytes();
    // Two layers; values of 7 features have 16 lanes, and the convolution 48.
    assert_eq!(one, 2 * 4 * 2 * (3 * 10 * 16 + 3 * 48));
    feed(&mut decoder, &mut kv, &[(1, Some(0), 1)], false).unwrap();
    assert_eq!(kv.state_bytes(), 2 * one);
    feed(&mut decoder, &mut kv, &[(1, Some(1), 1), (1, Some(2), 1)], false).unwrap();
    assert_eq!(kv.state_bytes(), 2 * one + 2 * 2 * 4 * 2 * (48 + 10 + 3 * 17));
}

#[test]
fn a_convolution_s_state_is_its_earlier_inputs() {
    let weights = weights(NETS[4], 1);
    let mut decoder = Decoder::new(weights, Arc::new(Pool::new(1).unwrap()));
    let mut kv = cache(1);
    feed(&mut decoder, &mut kv, &[(0, Some(0), 1)], false).unwrap();
    // Two layers, and two blocks of 32 channels.
    assert_eq!((kv.state_bytes(), decoder.snapshot_bytes()), (2 * 2 * 32 * 2 * 4, 2 * 2 * 32 * 2 * 4));
    feed(&mut decoder, &mut kv, &[(0, Some(1), 1), (0, Some(2), 1)], false).unwrap();
    assert_eq!(kv.state_bytes(), 2 * 2 * 32 * (2 + 1) * 4);
}

#[test]
fn wrong_weights_are_rejected() {
    let n = &mut Numbers(5);
    let mut wrong = |net: StateShape, change: &dyn Fn(&mut StateWeights)| {
        let mut made = layer(n, Some(net));
        change(made.state.as_mut().unwrap());
        let embedding = draw(n, VOCAB * SHAPE.hidden_size, 1.0, 0.0).into();
        let final_norm = draw(n, SHAPE.hidden_size, 0.3, 1.0);
        let lm_head = linear(n, SHAPE.hidden_size, &[VOCAB]);
        let (shape, layers, frequencies) = (SHAPE, vec![made], vec![1.0; SHAPE.head_dim / 2]);
        let made = Weights::new(DecoderWeights { shape, embedding, layers, final_norm, lm_head, frequencies });
        made.err().expect("they are wrong").to_string()
    };
    let mut delta = |change: fn(&mut DeltaWeights)| {
        wrong(NETS[0], &|state| match state {
            StateWeights::Delta(delta) => change(delta),
            StateWeights::Conv(_) => unreachable!(),
        })
    };
    assert!(delta(|delta| delta.shape.value_heads = 5).contains("layers[0].delta.value_heads=5"));
    assert!(delta(|delta| delta.shape.kernel = 1).contains("layers[0].delta.kernel=1"));
    assert!(delta(|delta| delta.shape.key_dim = 11).contains("layers[0].delta.conv"));
    assert!(delta(|delta| delta.norm = Values::F32(Memory::from_vec(vec![1.0]))).contains("layers[0].delta.norm"));
    let mut conv = |change: fn(&mut ConvWeights)| {
        wrong(NETS[4], &|state| match state {
            StateWeights::Conv(conv) => change(conv),
            StateWeights::Delta(_) => unreachable!(),
        })
    };
    assert!(conv(|conv| conv.shape.kernel = 1).contains("layers[0].conv.kernel=1: must be at least 2"));
    assert!(conv(|conv| conv.shape.kernel = 4).contains("layers[0].conv.conv"));
    assert!(conv(|conv| conv.shape.channels = 39).contains("layers[0].conv.channels=39: must be hidden_size=40"));
}
