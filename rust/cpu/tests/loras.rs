//! Rows with low-rank adapters: the model plus `B A` by plain loops, with the same bits for any other rows in a pass.

mod support;

use proptest::prelude::*;
use specrs_cpu::{
    Decoder, Error, ExpertLora, Isa, KvCache, Lora, LoraLayer, LoraPart, Memory, ModelShape, Output, Pass, Values,
};
use std::sync::Arc;
use support::{BY_32, EXPERTS, Host, KINDS, Kind, MIXTURES, Model, Numbers, QWEN3, SMALL};

const SHAPE: ModelShape = ModelShape { vocab_size: 97, ..SMALL };

/// Returns a model, and the same model with each of two adapters.
fn family(shape: ModelShape, kind: Kind, seed: u64) -> [Model; 3] {
    let model = || Model::random(shape, 2, kind, seed);
    [model(), model().adapted(seed ^ 1), model().adapted(seed ^ 2)]
}

/// Returns the adapter of each sequence for a decoder: that of model `which[i]` for sequence i, none for model 0.
fn adapters(models: &[Model; 3], decoder: &Decoder, which: &[usize]) -> Vec<Option<Arc<Lora>>> {
    let made: Vec<_> = models.iter().map(|model| model.lora(decoder.weights())).collect();
    which.iter().map(|&i| (i > 0).then(|| Arc::clone(&made[i]))).collect()
}

fn bits(rows: &[Vec<f32>]) -> Vec<Vec<u32>> {
    rows.iter().map(|row| row.iter().map(|x| x.to_bits()).collect()).collect()
}

/// Runs passes of up to `most` rows per sequence with masked rows among them. Calls `each` with each unmasked row's
/// sequence, position and logits.
fn run(
    host: &mut Host,
    decoder: &mut Decoder,
    sequences: &[Vec<usize>],
    most: usize,
    n: &mut Numbers,
    mut each: impl FnMut(usize, usize, &[f32]),
) {
    let mut done = vec![0; sequences.len()];
    while (0..sequences.len()).any(|seq| done[seq] < sequences[seq].len()) {
        let (mut rows, offset) = (Vec::new(), n.below(sequences.len()));
        for seq in (0..sequences.len()).map(|i| (i + offset) % sequences.len()) {
            let count = n.below(most + 1).min(sequences[seq].len() - done[seq]);
            rows.extend((done[seq]..done[seq] + count).map(|p| (seq, Some(p), sequences[seq][p])));
            rows.extend((0..n.below(2)).map(|_| (seq, None, 0)));
            done[seq] += count;
        }
        if !rows.is_empty() {
            decoder.poison();
            for (row, logits) in rows.iter().zip(host.logits(decoder, &rows)) {
                match row.1 {
                    Some(position) => each(row.0, position, &logits),
                    None => assert!(logits.iter().all(|x| x.is_finite())),
                }
            }
        }
    }
}

fn check(shape: ModelShape, kind: Kind) {
    let (models, n) = (family(shape, kind, 7), &mut Numbers(3));
    let which = [1, 0, 2, 1];
    let sequences: Vec<Vec<usize>> = which.iter().map(|_| (0..30).map(|_| n.below(97)).collect()).collect();
    let expected: Vec<_> = which.iter().zip(&sequences).map(|(&i, s)| models[i].reference(s)).collect();
    let base: Vec<_> = sequences.iter().map(|s| models[0].reference(s)).collect();
    let mut decoder = models[0].decoder(Isa::detect(), 2);
    let mut host = Host::new(&models[0], which.len(), 30, 5, 1);
    host.adapters = adapters(&models, &decoder, &which);
    let (mut worst, mut apart) = (0.0_f64, f64::INFINITY);
    run(&mut host, &mut decoder, &sequences, 21, n, |seq, position, logits| {
        let off =
            |expected: &[support::Near]| logits.iter().zip(expected).map(|(x, near)| near.off(*x)).fold(0.0, f64::max);
        worst = worst.max(off(&expected[seq][position]));
        if which[seq] > 0 {
            apart = apart.min(off(&base[seq][position]));
        }
    });
    assert!(worst < 1.0 && worst > 0.1, "{kind:?}: {worst} of what rounding explains");
    assert!(apart > 50.0, "{kind:?}: {apart}, as if there were no adapter");
}

#[test]
fn rows_are_those_of_their_adapters_within_rounding() {
    for kind in KINDS {
        check(SHAPE, kind);
        check(SHAPE, Kind { bf16: true, ..kind });
        for code_bits in [8, 4] {
            check(BY_32, Kind { code_bits, ..kind });
        }
    }
    check(BY_32, Kind { prompt_tiles: true, bf16: true, ..QWEN3 });
    for kind in MIXTURES {
        check(SHAPE, kind);
    }
}

/// Returns the number of cases. `PROPTEST_CASES` lowers it for emulators and sanitizers.
fn config() -> ProptestConfig {
    let default = ProptestConfig::default();
    ProptestConfig { cases: default.cases.min(16), failure_persistence: None, ..default }
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn they_are_the_same_bits_whatever_else_is_in_a_pass(
        kind in prop::sample::select([&KINDS[..], &MIXTURES].concat()),
        bf16 in any::<bool>(),
        prompt_tiles in any::<bool>(),
        code_bits in prop::sample::select(vec![0, 8, 4]),
        which in prop::collection::vec(0..3_usize, 1..6),
        len in 1..70_usize,
        most in prop::sample::select(vec![1, 4, 70]),
        seed in any::<u64>(),
    ) {
        let n = &mut Numbers(seed);
        let models = family(BY_32, Kind { bf16, prompt_tiles, code_bits, ..kind }, seed);
        let sequences: Vec<Vec<usize>> = which.iter().map(|_| (0..len).map(|_| n.below(97)).collect()).collect();
        let mut exact = vec![vec![Vec::new(); len]; which.len()];
        for (seq, sequence) in sequences.iter().enumerate() {
            let mut decoder = models[0].decoder(Isa::by_name("portable").unwrap(), 1);
            let mut host = Host::new(&models[0], 1, len, 16, 1);
            host.adapters = adapters(&models, &decoder, &which[seq..=seq]);
            for (position, &token) in sequence.iter().enumerate() {
                exact[seq][position] = bits(&host.logits(&mut decoder, &[(0, Some(position), token)])).remove(0);
            }
        }
        for isa in Isa::available() {
            let threads = [1, 2, 5][n.below(3)];
            let mut decoder = models[0].decoder(isa, threads);
            let mut host = Host::new(&models[0], which.len(), len, 1 + n.below(30), seed);
            host.adapters = adapters(&models, &decoder, &which);
            run(&mut host, &mut decoder, &sequences, most, &mut Numbers(seed ^ 9), |seq, position, logits| {
                let found: Vec<u32> = logits.iter().map(|x| x.to_bits()).collect();
                assert!(found == exact[seq][position], "{}, {threads} threads: {seq}, {position}", isa.name());
            });
        }
    }
}

fn part(inputs: usize, outputs: usize, first: usize) -> LoraPart {
    let zeros = |len| Values::F32(Memory::from_vec(vec![0.0; len]));
    LoraPart::new("test", zeros(2 * inputs), zeros(2 * outputs), 2, first).unwrap()
}

fn feed(decoder: &mut Decoder, kv: &mut KvCache, adapters: &[Option<&Lora>]) -> Result<(), Error> {
    let pass = Pass {
        tokens: &[1],
        positions: &[0],
        slots: &[0],
        sequences: &[0],
        block_table: &[0],
        max_blocks: 1,
        adapters,
        ..Pass::default()
    };
    decoder.forward(&pass, kv, Output::Nothing)
}

#[test]
fn what_does_not_fit_is_refused() {
    let model = Model::random(SHAPE, 2, EXPERTS, 1);
    let weights = model.weights();
    let refused = |layer: LoraLayer| Lora::new(&weights, vec![LoraLayer::default(), layer]).unwrap_err().to_string();
    let said = refused(LoraLayer { o: vec![part(59, 40, 0)], ..LoraLayer::default() });
    assert_eq!(said, "layers[1].o[0]'s inputs=59: must be 60");
    let said = refused(LoraLayer { qkv: vec![part(40, 60, 0), part(40, 20, 81)], ..LoraLayer::default() });
    assert_eq!(said, "layers[1].qkv[1]'s last output=101: must be at most the projection's 100");
    let said = refused(LoraLayer { down: vec![part(70, 40, 0)], ..LoraLayer::default() });
    assert_eq!(said, "layers[1].down[0]=an adapter: must be none, because the layer has no such projection");
    let of_expert = |i: usize| {
        let mut experts: Vec<_> = (0..=i).map(|_| ExpertLora::default()).collect();
        experts[i].down.push(part(70, 40, 0));
        refused(LoraLayer { experts, ..LoraLayer::default() })
    };
    assert_eq!(of_expert(1), "layers[1].experts[1].down[0]'s inputs=70: must be 36");
    let said = of_expert(EXPERTS.experts);
    assert!(said.ends_with("[0]=an adapter: must be none, because the layer has no such projection"), "{said}");
    let said = Lora::new(&weights, Vec::new()).unwrap_err().to_string();
    assert_eq!(said, "layers=0: must be 2");
    let numbers = |len| Values::F32(Memory::from_vec(vec![0.0; len]));
    for (a, b, rank) in [(5, 6, 3), (6, 5, 3), (6, 6, 0), (0, 6, 3)] {
        let said = LoraPart::new("x", numbers(a), numbers(b), rank, 0).err().unwrap().to_string();
        assert!(said.contains(": must be a multiple of rank="), "{said}");
    }
}

#[test]
fn passes_take_adapters_of_their_own_weights_one_a_row() {
    let model = Model::random(SHAPE, 2, QWEN3, 1).adapted(5);
    let (mut decoder, mut kv) = (model.decoder(Isa::detect(), 1), model.kv_cache(1, 4));
    let own = model.lora(decoder.weights());
    feed(&mut decoder, &mut kv, &[Some(&own)]).unwrap();
    let said = feed(&mut decoder, &mut kv, &[Some(&own), None]).unwrap_err().to_string();
    assert!(said.starts_with("adapters"), "{said}");
    let other = Model::random(BY_32, 2, QWEN3, 1).adapted(5);
    let foreign = other.lora(&other.weights());
    let said = feed(&mut decoder, &mut kv, &[Some(&foreign)]).unwrap_err().to_string();
    assert!(said.starts_with("adapters=one for (ModelShape"), "{said}");
    let rounding = Model::random(BY_32, 2, Kind { bf16: true, bf16_rows: true, ..QWEN3 }, 1).adapted(5);
    let (mut decoder, mut kv) = (rounding.decoder(Isa::detect(), 1), rounding.kv_cache(1, 4));
    let own = rounding.lora(decoder.weights());
    let said = feed(&mut decoder, &mut kv, &[Some(&own)]).unwrap_err().to_string();
    assert_eq!(said, "adapters=some: must be none with bf16 rows");
}
