//! Logits have the same bits on every instruction set, with any number of threads, and for any other rows in a pass.

mod support;

use proptest::prelude::*;
use specrs_cpu::{Isa, ModelShape, Output};
use support::{Host, KINDS, Kind, MIXTURES, Model, Numbers, QUANTIZED};

fn bits(rows: &[Vec<f32>]) -> Vec<Vec<u32>> {
    rows.iter().map(|row| row.iter().map(|x| x.to_bits()).collect()).collect()
}

/// Returns logits of each token of each sequence in a pass of its own, by the portable path on one thread.
fn alone(model: &Model, sequences: &[Vec<usize>]) -> Vec<Vec<Vec<u32>>> {
    let portable = Isa::by_name("portable").unwrap();
    let mut decoder = model.decoder(portable, 1);
    decoder.poison();
    let of = |sequence: &Vec<usize>| {
        let mut host = Host::new(model, 1, sequence.len(), 16, 1);
        let rows = sequence.iter().enumerate();
        rows.map(|(p, &token)| bits(&host.logits(&mut decoder, &[(0, Some(p), token)])).remove(0)).collect()
    };
    sequences.iter().map(of).collect()
}

/// Instruction set, threads, and division of texts into passes.
struct Case {
    isa: Isa,
    threads: usize,
    block_size: usize,
    /// Maximum number of rows of a sequence in a pass.
    most: usize,
    seed: u64,
}

/// Feeds all sequences in passes of random rows, in random order and with masked rows between them. Checks that the
/// logits have the bits of `exact`, which `alone` returned. Masked rows belong to no position and must be finite. Also
/// checks the most probable ids of some rows against the logits.
fn check(model: &Model, sequences: &[Vec<usize>], exact: &[Vec<Vec<u32>>], case: &Case) {
    let &Case { isa, threads, block_size, most, seed } = case;
    let n = &mut Numbers(seed);
    let mut decoder = model.decoder(isa, threads);
    let longest = sequences.iter().map(Vec::len).max().unwrap();
    let mut host = Host::new(model, sequences.len(), longest, block_size, seed);
    let mut done = vec![0; sequences.len()];
    while (0..sequences.len()).any(|seq| done[seq] < sequences[seq].len()) {
        let mut rows = Vec::new();
        let offset = n.below(sequences.len());
        for i in 0..sequences.len() {
            let seq = (i + offset) % sequences.len();
            let count = n.below(most + 1).min(sequences[seq].len() - done[seq]);
            rows.extend((done[seq]..done[seq] + count).map(|p| (seq, Some(p), sequences[seq][p])));
            rows.extend((0..n.below(3)).map(|_| (seq, None, n.below(model.shape.vocab_size))));
            done[seq] += count;
        }
        if rows.is_empty() {
            continue;
        }
        decoder.poison();
        let logits = host.logits(&mut decoder, &rows);
        for (row, found) in rows.iter().zip(bits(&logits)) {
            match row.1 {
                Some(p) => assert!(
                    found == exact[row.0][p],
                    "{} on {threads} threads: sequence {}, position {p}",
                    isa.name(),
                    row.0
                ),
                None => assert!(found.iter().all(|&x| f32::from_bits(x).is_finite()), "masked rows are finite"),
            }
        }
        // The same pass again, asked for the most probable ids of some rows among some ids.
        let asked: Vec<usize> = (0..rows.len()).filter(|_| n.below(2) == 0).collect();
        let num_ids = 1 + n.below(model.shape.vocab_size);
        let (mut ids, mut top) = (vec![-1; asked.len()], vec![f32::NAN; asked.len()]);
        host.pass(&mut decoder, &rows, Output::Argmax { rows: &asked, num_ids, ids: &mut ids, top: &mut top });
        for (i, &row) in asked.iter().enumerate() {
            let logits = &logits[row][..num_ids];
            let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            assert_eq!(top[i].to_bits(), largest.to_bits());
            assert_eq!(ids[i] as usize, logits.iter().position(|&x| x >= largest).unwrap());
        }
    }
}

/// Returns the number of cases of each test, at most 12. `PROPTEST_CASES` lowers it for emulators and sanitizers.
fn config() -> ProptestConfig {
    let default = ProptestConfig::default();
    ProptestConfig { cases: default.cases.min(12), failure_persistence: None, ..default }
}

prop_compose! {
    fn model(kinds: Vec<Kind>)(
        kind in prop::sample::select(kinds),
        bf16 in any::<bool>(),
        code_bits in prop::sample::select(vec![0, 8, 4]),
        (bf16_rows, int8_rows) in any::<(bool, bool)>(),
        prompt_tiles in any::<bool>(),
        kv_heads in 1..4_usize,
        group in 1..4_usize,
        half_dim in 1..25_usize,
        hidden in 1..90_usize,
        intermediate in 1..150_usize,
        vocab_size in 2..200_usize,
        layers in 1..3_usize,
        window in 1..40_usize,
        seed in any::<u64>(),
    ) -> Model {
        // Packed weights and pairs of bf16 numbers lie by 32 inputs; other projections would not be by tiles.
        let unit = if code_bits != 0 || bf16_rows || prompt_tiles { 32 } else { 1 };
        let (bf16, code_bits) = if bf16_rows { (true, 0) } else { (bf16, code_bits) };
        let shape = ModelShape {
            vocab_size,
            hidden_size: hidden.next_multiple_of(unit),
            intermediate_size: intermediate.next_multiple_of(unit),
            num_heads: kv_heads * group,
            num_kv_heads: kv_heads,
            head_dim: (2 * half_dim).next_multiple_of(unit),
            rms_norm_eps: 1e-6,
        };
        Model::random(shape, layers, Kind { bf16, bf16_rows, int8_rows, prompt_tiles, code_bits, window: window.min(kind.window * 8), ..kind }, seed)
    }
}

prop_compose! {
    /// Generates lengths of sequences, block size, maximum rows of a sequence in a pass, and the seeds of texts and
    /// passes.
    fn texts()(
        lens in prop::collection::vec(1..60_usize, 1..5),
        block_size in 1..40_usize,
        most in prop::sample::select(vec![1, 3, 9, 40]),
        seed in any::<u64>(),
    ) -> (Vec<usize>, usize, usize, u64) {
        (lens, block_size, most, seed)
    }
}

fn check_everywhere(model: &Model, (lens, block_size, most, seed): (Vec<usize>, usize, usize, u64)) {
    let n = &mut Numbers(seed);
    let vocab = model.shape.vocab_size;
    let sequences: Vec<Vec<usize>> = lens.iter().map(|&len| (0..len).map(|_| n.below(vocab)).collect()).collect();
    let exact = alone(model, &sequences);
    for isa in Isa::available() {
        let threads = [1, 2, 5][n.below(3)];
        check(model, &sequences, &exact, &Case { isa, threads, block_size, most, seed: n.next() });
    }
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn logits_are_the_same_bits_everywhere(model in model(KINDS.to_vec()), texts in texts()) {
        check_everywhere(&model, texts);
    }

    #[test]
    fn so_are_those_of_experts_and_of_quantized_caches(model in model([&MIXTURES[..], &QUANTIZED].concat()), texts in texts()) {
        check_everywhere(&model, texts);
    }
}
