//! Layers of different sizes that share keys and values, add embeddings, and have experts next to their MLP (Gemma 4):
//! logits have the same bits on every instruction set, with any number of threads and for any division into passes.
//! Each property of a layer changes them.

mod support;

use proptest::prelude::*;
use specrs_cpu::{
    Activation, Addition, AssistantWeights, Decoder, DecoderWeights, Entries, Experts, HeadStates, HeadWeights, Isa,
    KvCache, KvShape, LayerEmbedding, LayerSizes, LayerWeights, Linear, Memory, MemoryMut, Mlp, ModelShape, Output,
    ParallelMlp, Part, Pass, Pool, QkNorm, Rotation, RouterScales, Values, ValuesMut, VariedLayer, Weights,
};
use std::sync::Arc;
use support::Numbers;

const VOCAB: usize = 41;
const BLOCK: usize = 8;
const LEN: usize = 48;
const SIZE: usize = 21;
const SHAPE: ModelShape = ModelShape {
    vocab_size: VOCAB,
    hidden_size: 40,
    intermediate_size: 150,
    num_heads: 4,
    num_kv_heads: 2,
    head_dim: 24,
    rms_norm_eps: 1e-6,
};
const SMALL: LayerSizes = LayerSizes { num_kv_heads: 2, head_dim: 12, intermediate_size: 70 };
const LARGE: LayerSizes = LayerSizes { num_kv_heads: 1, head_dim: 24, intermediate_size: 70 };

/// A layer's sizes, whether keys are values, and the layer whose keys it attends.
type Kind = (LayerSizes, bool, Option<usize>);

fn kinds() -> Vec<Kind> {
    let wide = |sizes| LayerSizes { intermediate_size: 150, ..sizes };
    vec![
        (SMALL, false, None),
        (SMALL, false, None),
        (LARGE, true, None),
        (wide(SMALL), false, Some(1)),
        (wide(LARGE), false, Some(2)),
    ]
}

/// Change of a layer's weights, given its index.
type Change = fn(usize, &mut LayerWeights);

fn draw(n: &mut Numbers, len: usize, scale: f32, offset: f32) -> Values {
    Values::F32(Memory::from_vec((0..len).map(|_| n.unit() * scale + offset).collect()))
}

fn linear(n: &mut Numbers, inputs: usize, outputs: usize) -> Linear {
    let scale = 1.7 / (inputs as f32).sqrt();
    Linear::new("test", inputs, vec![Part::new(draw(n, outputs * inputs, scale, 0.0), None, outputs)]).unwrap()
}

fn layer(n: &mut Numbers, (sizes, keys_are_values, source): Kind) -> LayerWeights {
    let (hidden, dim) = (SHAPE.hidden_size, sizes.head_dim);
    let keys = if source.is_some() { 0 } else { sizes.num_kv_heads * if keys_are_values { 1 } else { 2 } };
    let norm = |n: &mut Numbers| Some(draw(n, hidden, 0.3, 1.0));
    LayerWeights {
        input_norm: norm(n),
        qkv: linear(n, hidden, (SHAPE.num_heads + keys) * dim),
        output_gate: false,
        state: None,
        qk_norm: Some(QkNorm { q: draw(n, dim, 0.5, 1.0), k: draw(n, dim, 0.5, 1.0), whole: false }),
        sinks: None,
        o: linear(n, SHAPE.num_heads * dim, hidden),
        attention_output_norm: norm(n),
        post_attention_norm: norm(n),
        mlp: Mlp::Dense {
            gate_up: linear(n, hidden, 2 * sizes.intermediate_size),
            down: linear(n, sizes.intermediate_size, hidden),
        },
        mlp_output_norm: norm(n),
        varied: VariedLayer {
            sizes: Some(sizes),
            keys_are_values,
            source,
            value_norm: true,
            addition: Some(Addition {
                gate: linear(n, hidden, SIZE),
                projection: linear(n, SIZE, hidden),
                norm: draw(n, hidden, 0.3, 1.0),
            }),
            scalar: 1.0 + 0.3 * n.unit(),
        },
    }
}

/// Puts experts next to the MLP of a layer.
fn with_experts(i: usize, layer: &mut LayerWeights) {
    let (n, hidden) = (&mut Numbers(40 + i as u64), SHAPE.hidden_size);
    let intermediate = layer.varied.sizes.map_or(0, |sizes| sizes.intermediate_size);
    layer.mlp = Mlp::Experts(Box::new(Experts {
        router: linear(n, hidden, 5),
        experts: (0..5).map(|_| (linear(n, hidden, 2 * 20), linear(n, 20, hidden))).collect(),
        per_token: 2,
        normalized: true,
        sigmoids: false,
        bias: None,
        factor: 1.0,
        weighs_input: false,
        shared: None,
        scales: Some(RouterScales { hidden: draw(n, hidden, 1.0, 2.0), experts: draw(n, 5, 0.5, 1.0) }),
        mlp: Some(ParallelMlp {
            gate_up: linear(n, hidden, 2 * intermediate),
            down: linear(n, intermediate, hidden),
            output_norm: draw(n, hidden, 0.5, 1.0),
            expert_input_norm: draw(n, hidden, 0.5, 1.0),
            expert_output_norm: draw(n, hidden, 0.5, 1.0),
        }),
    }));
}

/// Returns a change that gives all layers experts and applies `change` to those of layer 1.
fn of_experts(change: impl Fn(&mut Experts)) -> impl Fn(usize, &mut LayerWeights) {
    move |i, layer| {
        with_experts(i, layer);
        if let (1, Mlp::Experts(experts)) = (i, &mut layer.mlp) {
            change(experts);
        }
    }
}

fn ones(len: usize) -> Values {
    Values::F32(Memory::from_vec(vec![1.0; len]))
}

fn made(kinds: &[Kind], change: impl Fn(usize, &mut LayerWeights)) -> specrs_cpu::Result<Weights> {
    let n = &mut Numbers(7);
    let mut layers: Vec<_> = kinds.iter().map(|&kind| layer(n, kind)).collect();
    layers.iter_mut().enumerate().for_each(|(i, layer)| change(i, layer));
    let embedding = draw(n, VOCAB * SHAPE.hidden_size, 1.0, 0.0).into();
    let final_norm = draw(n, SHAPE.hidden_size, 0.3, 1.0);
    let lm_head = linear(n, SHAPE.hidden_size, VOCAB);
    let added = LayerEmbedding {
        table: draw(n, VOCAB * kinds.len() * SIZE, 1.0, 0.0).into(),
        projection: linear(n, SHAPE.hidden_size, kinds.len() * SIZE),
        norm: draw(n, SIZE, 0.3, 1.0),
    };
    let rotation = |pairs: usize, base: f32| Rotation {
        frequencies: (0..pairs).map(|i| if 2 * i < pairs { base.powi(i as i32) } else { 0.0 }).collect(),
        magnitude: 1.0,
    };
    let of_layers: Vec<_> = kinds.iter().map(|kind| Some(usize::from(kind.0.head_dim == 24))).collect();
    let windows: Vec<_> = kinds.iter().map(|kind| (kind.0.head_dim == 12).then_some(9)).collect();
    let (shape, frequencies) = (SHAPE, vec![0.0; SHAPE.head_dim / 2]);
    Weights::new(DecoderWeights { shape, embedding, layers, final_norm, lm_head, frequencies })?
        .with_rotations(vec![rotation(6, 0.3), rotation(12, 0.6)], &of_layers)?
        .with_windows(&windows)?
        .with_activation(Activation::GeluTanh)?
        .with_layer_embedding(added)?
        .with_softcap(5.0)
}

fn cache(kinds: &[Kind]) -> KvCache {
    let own: Vec<_> = kinds.iter().filter(|kind| kind.2.is_none()).map(|kind| kind.0).collect();
    let heads: Vec<_> = own.iter().map(|sizes| (sizes.num_kv_heads, sizes.head_dim)).collect();
    let shape = KvShape { num_blocks: LEN / BLOCK, block_size: BLOCK, num_kv_heads: heads[0].0, head_dim: heads[0].1 };
    let layer = |&(num_kv_heads, head_dim): &(usize, usize)| {
        let own = KvShape { num_kv_heads, head_dim, ..shape };
        ValuesMut::F32(MemoryMut::from_vec(vec![f32::NAN; own.layer_len()]))
    };
    KvCache::of_heads(shape, heads.clone(), heads.iter().map(layer).collect()).unwrap()
}

/// Returns the bits of the logits of a text. Each pass feeds as many of its tokens as the next number of `cuts` says;
/// after the last number the first comes again.
fn logits(decoder: &mut Decoder, kv: &mut KvCache, text: &[usize], cuts: &[usize]) -> Vec<u32> {
    let table: Vec<i64> = (0..(LEN / BLOCK) as i64).collect();
    let (mut at, mut found) = (0, Vec::new());
    for &count in cuts.iter().cycle() {
        let rows = at..(at + count).min(text.len());
        let positions: Vec<i64> = rows.clone().map(|p| p as i64).collect();
        let tokens: Vec<i64> = text[rows.clone()].iter().map(|&token| token as i64).collect();
        let pass = Pass {
            tokens: &tokens,
            positions: &positions,
            slots: &positions,
            sequences: &vec![0; rows.len()],
            block_table: &table,
            max_blocks: LEN / BLOCK,
            ..Pass::default()
        };
        let wanted: Vec<usize> = (0..rows.len()).collect();
        let mut logits = vec![f32::NAN; rows.len() * VOCAB];
        decoder.poison();
        decoder.forward(&pass, kv, Output::Logits { rows: &wanted, num_ids: VOCAB, logits: &mut logits }).unwrap();
        found.extend(logits.iter().map(|x| x.to_bits()));
        at = rows.end;
        if at == text.len() {
            break;
        }
    }
    found
}

fn text() -> Vec<usize> {
    let n = &mut Numbers(3);
    (0..LEN).map(|_| n.below(VOCAB)).collect()
}

fn of(kinds: &[Kind], change: impl Fn(usize, &mut LayerWeights)) -> Vec<u32> {
    let weights = Arc::new(made(kinds, change).unwrap());
    let mut decoder = Decoder::with_isa(weights, Arc::new(Pool::new(1).unwrap()), Isa::by_name("portable").unwrap());
    logits(&mut decoder, &mut cache(kinds), &text(), &[1])
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn bits_depend_on_nothing_but_the_text(
        isa in prop::sample::select(Isa::available()),
        threads in 1..=5_usize,
        cuts in prop::collection::vec(1..=LEN, 1..4),
        sparse in any::<bool>(),
    ) {
        let change: Change = if sparse { with_experts } else { |_, _| () };
        let exact = of(&kinds(), change);
        prop_assert!(exact.iter().all(|&x| f32::from_bits(x).abs() <= 5.0));
        let weights = Arc::new(made(&kinds(), change).unwrap());
        let mut decoder = Decoder::with_isa(weights, Arc::new(Pool::new(threads).unwrap()), isa);
        prop_assert!(logits(&mut decoder, &mut cache(&kinds()), &text(), &cuts) == exact, "{}", isa.name());
    }
}

/// Features of the states that an assistant is fed and leaves.
const STATE: usize = 56;

/// Makes the weights of a head that attends the keys and values of the layers at `places` of [`kinds`].
fn assistant(places: [usize; 2]) -> specrs_cpu::Result<Weights> {
    let n = &mut Numbers(11);
    let kinds = [(SMALL, false, Some(places[0])), (LARGE, false, Some(places[1]))];
    let mut layers: Vec<_> = kinds.iter().map(|&kind| layer(n, kind)).collect();
    for layer in &mut layers {
        layer.varied.addition = None;
    }
    let embedding = draw(n, VOCAB * STATE, 1.0, 0.0).into();
    let final_norm = draw(n, SHAPE.hidden_size, 0.3, 1.0);
    let lm_head = linear(n, SHAPE.hidden_size, VOCAB);
    let own = HeadWeights::Assistant(AssistantWeights {
        target_layers: 5,
        pre: linear(n, 2 * STATE, SHAPE.hidden_size),
        post: linear(n, SHAPE.hidden_size, STATE),
        target_ids: (0..VOCAB as i64).collect(),
    });
    let frequencies = (0..SHAPE.head_dim / 2).map(|i| 0.5_f32.powi(i as i32)).collect();
    let rotation = |pairs: usize| Rotation { frequencies: vec![0.4; pairs], magnitude: 1.0 };
    let given = DecoderWeights { shape: SHAPE, embedding, layers, final_norm, lm_head, frequencies };
    Weights::head(given, own)?
        .with_rotations(vec![rotation(6), rotation(12)], &[Some(0), Some(1)])?
        .with_windows(&[Some(10), None])
}

/// Returns the logits of an assistant's rows and the states that they leave, as bits, after a target was fed the text.
fn attending(weights: Weights, isa: Isa, threads: usize, rows: &[usize]) -> specrs_cpu::Result<Vec<Vec<u32>>> {
    let target = Arc::new(made(&kinds(), |_, _| ()).unwrap());
    let mut target = Decoder::with_isa(target, Arc::new(Pool::new(1).unwrap()), isa);
    let mut kv = cache(&kinds());
    // Positions that no row attends have no keys and values.
    let end = rows.iter().max().unwrap() + 1;
    logits(&mut target, &mut kv, &text()[..end], &[LEN]);
    let n = &mut Numbers(5);
    let all: Vec<f32> = (0..LEN * STATE).map(|_| n.unit()).collect();
    let states: Vec<f32> = rows.iter().flat_map(|&row| all[row * STATE..][..STATE].to_vec()).collect();
    let tokens: Vec<i64> = rows.iter().map(|&row| text()[row] as i64).collect();
    let positions: Vec<i64> = rows.iter().map(|&row| row as i64).collect();
    let table: Vec<i64> = (0..(LEN / BLOCK) as i64).collect();
    let pass = Pass {
        tokens: &tokens,
        positions: &positions,
        slots: &vec![-1; rows.len()],
        sequences: &vec![0; rows.len()],
        block_table: &table,
        max_blocks: LEN / BLOCK,
        ..Pass::default()
    };
    let mut decoder = Decoder::with_isa(Arc::new(weights), Arc::new(Pool::new(threads).unwrap()), isa);
    let wanted: Vec<usize> = (0..rows.len()).collect();
    let (mut logits, mut left) = (vec![f32::NAN; rows.len() * VOCAB], vec![f32::NAN; rows.len() * STATE]);
    decoder.poison();
    let output = Output::Logits { rows: &wanted, num_ids: VOCAB, logits: &mut logits };
    let entries = Entries { layers: &[1], states: &mut left };
    decoder.forward_head(&pass, HeadStates { hidden: &states }, &mut kv, output, entries)?;
    let of_row = |(logits, left): (&[f32], &[f32])| logits.iter().chain(left).map(|x| x.to_bits()).collect();
    Ok(logits.chunks_exact(VOCAB).zip(left.chunks_exact(STATE)).map(of_row).collect())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 16, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn bits_of_an_assistant_depend_on_nothing_but_the_row(
        isa in prop::sample::select(Isa::available()),
        threads in 1..=5_usize,
        rows in prop::sample::subsequence((0..LEN).collect::<Vec<_>>(), 1..LEN),
    ) {
        let portable = Isa::by_name("portable").unwrap();
        let found = attending(assistant([1, 2]).unwrap(), isa, threads, &rows).unwrap();
        for (&row, found) in rows.iter().zip(&found).take(3) {
            let exact = attending(assistant([1, 2]).unwrap(), portable, 1, &[row]).unwrap();
            prop_assert!(found.iter().all(|&x| f32::from_bits(x).is_finite()));
            prop_assert!(&exact[0] == found, "row {row} by {}", isa.name());
        }
    }
}

#[test]
fn an_assistant_attends_the_layer_that_it_names() {
    let isa = Isa::by_name("portable").unwrap();
    let exact = attending(assistant([1, 2]).unwrap(), isa, 1, &[30]).unwrap();
    assert_ne!(attending(assistant([0, 2]).unwrap(), isa, 1, &[30]).unwrap(), exact);
    for (places, field) in [([2, 2], "layers[0].source"), ([1, 0], "layers[1].source"), ([1, 3], "layers[1].source")] {
        let told = attending(assistant(places).unwrap(), isa, 1, &[30]).unwrap_err().to_string();
        assert!(told.contains(field), "{told}");
    }
}

#[test]
fn every_property_of_a_layer_changes_the_logits() {
    let exact = of(&kinds(), |_, _| ());
    let mut other_source = kinds();
    other_source[3].2 = Some(0);
    assert_ne!(of(&other_source, |_, _| ()), exact);
    let only = |wanted: usize, change: fn(&mut VariedLayer)| {
        of(&kinds(), move |i, layer| {
            if i == wanted {
                change(&mut layer.varied);
            }
        })
    };
    for layer in 0..5 {
        assert_ne!(only(layer, |varied| varied.scalar = 1.0), exact, "scalar of {layer}");
        // A layer without keys norms no values.
        assert_eq!(only(layer, |varied| varied.value_norm = false) == exact, layer > 2, "norm of {layer}");
    }
}

#[test]
fn every_property_of_experts_changes_the_logits() {
    let exact = of(&kinds(), with_experts);
    assert_ne!(exact, of(&kinds(), |_, _| ()));
    let differs = |name: &str, change: &dyn Fn(&mut Experts)| {
        assert_ne!(of(&kinds(), of_experts(change)), exact, "{name}");
    };
    let scales = |experts: &mut Experts, change: fn(&mut RouterScales)| change(experts.scales.as_mut().unwrap());
    let mlp = |experts: &mut Experts, change: fn(&mut ParallelMlp)| change(experts.mlp.as_mut().unwrap());
    differs("factor of the router", &|e| scales(e, |own| own.hidden = ones(40)));
    differs("factors of experts", &|e| scales(e, |own| own.experts = ones(5)));
    differs("no factors", &|e| e.scales = None);
    differs("shares", &|e| e.normalized = false);
    differs("a factor", &|e| e.factor = 1.5);
    differs("sigmoids", &|e| e.sigmoids = true);
    let sigmoids = of(&kinds(), of_experts(&|e: &mut Experts| e.sigmoids = true));
    let biased = |bias: fn() -> Values| {
        let change = |e: &mut Experts| (e.sigmoids, e.bias) = (true, Some(bias()));
        of(&kinds(), of_experts(&change))
    };
    assert_eq!(biased(|| ones(5)), sigmoids, "the same bias for all");
    assert_ne!(biased(|| draw(&mut Numbers(3), 5, 9.0, 0.0)), sigmoids, "biases");
    differs("norm of the MLP's output", &|e| mlp(e, |own| own.output_norm = ones(40)));
    differs("norm of experts' input", &|e| mlp(e, |own| own.expert_input_norm = ones(40)));
    differs("norm of experts' output", &|e| mlp(e, |own| own.expert_output_norm = ones(40)));
    differs("norms of the other part", &|e| {
        mlp(e, |own| std::mem::swap(&mut own.output_norm, &mut own.expert_output_norm));
    });
    differs("the MLP", &|e| e.mlp = None);
}

#[test]
fn a_layer_with_experts_is_multiplied_by_its_factor_once() {
    let with = |scalar: f32| {
        of(&kinds(), move |i, layer| {
            with_experts(i, layer);
            layer.varied.scalar = if i == 4 { scalar } else { 1.0 };
        })
    };
    // The final norm takes out a factor of all that the last layer leaves. Were what comes before the layer's embedding
    // multiplied, too, the embedding would have another share of it.
    assert!(close(&with(4.0), &with(1.0)));
    assert!(!close(&with(1.0), &of(&kinds(), with_experts)));
}

/// Returns whether the logits differ by less than 1e-4, which the epsilon of the final norm may cause.
fn close(found: &[u32], expected: &[u32]) -> bool {
    let pairs = found.iter().zip(expected);
    pairs.map(|(a, b)| (f32::from_bits(*a) - f32::from_bits(*b)).abs()).fold(0.0, f32::max) < 1e-4
}

type ExpertsChange<'a> = &'a dyn Fn(&mut Experts);

#[test]
fn wrong_experts_are_rejected_by_name() {
    let told = |change: &dyn Fn(&mut Experts)| {
        made(&kinds(), of_experts(change)).err().map(|told| told.to_string()).unwrap_or_default()
    };
    let scales = |experts: &mut Experts, change: fn(&mut RouterScales)| change(experts.scales.as_mut().unwrap());
    let mlp = |experts: &mut Experts, change: fn(&mut ParallelMlp)| change(experts.mlp.as_mut().unwrap());
    let cases: [(ExpertsChange<'_>, &str); 9] = [
        (&|e| e.bias = Some(ones(5)), "layers[1].experts.bias"),
        (&|e| (e.sigmoids, e.bias) = (true, Some(ones(4))), "layers[1].experts.bias"),
        (&|e| scales(e, |own| own.hidden = ones(39)), "layers[1].experts.scales.hidden"),
        (&|e| scales(e, |own| own.experts = ones(4)), "layers[1].experts.scales.experts"),
        (&|e| mlp(e, |own| own.output_norm = ones(41)), "layers[1].experts.mlp.output_norm"),
        (&|e| mlp(e, |own| own.expert_input_norm = ones(0)), "layers[1].experts.mlp.expert_input_norm"),
        (&|e| mlp(e, |own| own.expert_output_norm = ones(39)), "layers[1].experts.mlp.expert_output_norm"),
        (&|e| mlp(e, |own| own.gate_up = linear(&mut Numbers(1), 40, 138)), "layers[1].experts.mlp.gate_up"),
        (&|e| mlp(e, |own| own.down = linear(&mut Numbers(1), 69, 40)), "layers[1].experts.mlp.down"),
    ];
    for (change, field) in cases {
        assert!(told(change).contains(field), "{} for {field}", told(change));
    }
    let without = made(&kinds(), |i, layer| {
        with_experts(i, layer);
        layer.varied.scalar = 1.0;
        layer.mlp_output_norm = None;
    });
    let told = without.err().map(|told| told.to_string()).unwrap_or_default();
    assert!(told.contains("layers[0].mlp_output_norm"), "{told}");
}

#[test]
fn a_cache_of_other_heads_is_rejected() {
    let mut other = kinds();
    other[2].0.num_kv_heads = 2;
    let weights = Arc::new(made(&kinds(), |_, _| ()).unwrap());
    let mut decoder = Decoder::new(weights, Arc::new(Pool::new(1).unwrap()));
    let (mut kv, table) = (cache(&other), [0]);
    let pass = Pass {
        tokens: &[1],
        positions: &[0],
        slots: &[0],
        sequences: &[0],
        block_table: &table,
        max_blocks: 1,
        ..Pass::default()
    };
    let told = decoder.forward(&pass, &mut kv, Output::Nothing).unwrap_err().to_string();
    assert!(told.contains("[3, 2, 24]") && told.contains("[3, 1, 24]"), "{told}");
}

#[test]
fn blocks_of_layers_with_different_heads_are_copied_whole() {
    let mut kv = cache(&kinds());
    let sizes = [2 * 2 * 12, 2 * 2 * 12, 2 * 24].map(|each| each * BLOCK * 4);
    assert_eq!(kv.block_bytes(), sizes.iter().sum::<usize>());
    let bytes: Vec<u8> = (0..kv.block_bytes()).map(|i| (i % 251) as u8).collect();
    kv.fill_block(2, &bytes);
    let mut found = Vec::new();
    kv.append_block(2, &mut found);
    assert_eq!(found, bytes);
}

#[test]
fn wrong_layers_are_rejected_by_name() {
    let with = |change: Change| made(&kinds(), change).err().map(|told| told.to_string());
    let cases: [(Change, &str); 6] = [
        (|i, layer| layer.varied.source = if i == 3 { Some(4) } else { layer.varied.source }, "layers[3].source"),
        (|i, layer| layer.varied.source = if i == 4 { Some(1) } else { layer.varied.source }, "layers[4].source"),
        (|i, layer| layer.varied.source = if i == 4 { Some(3) } else { layer.varied.source }, "layers[4].source"),
        (|i, layer| layer.varied.scalar = if i == 1 { f32::NAN } else { 1.0 }, "layers[1].scalar"),
        (
            |i, layer| layer.varied.addition = if i == 2 { None } else { layer.varied.addition.take() },
            "layers[2].addition",
        ),
        (|_, layer| layer.varied.sizes = Some(LayerSizes { head_dim: 26, ..LARGE }), "layers[0].head_dim"),
    ];
    for (change, field) in cases {
        let told = with(change).unwrap_or_default();
        assert!(told.contains(field), "{told} for {field}");
    }
}
