//! Suffix decoding with a million cached tokens: a draft of 8 tokens, a token more, an old request evicted; prints the memory that a token takes.
//!
//! Three kinds of outputs: phrases of a common stock, as answers in one domain are; random tokens, of which nothing repeats; and two copies
//! of each text, where every substring is in the tree to its full depth.

use criterion::{BatchSize, Criterion, criterion_group, criterion_main};
use specrs_core::{SuffixCache, SuffixSettings};
use std::hint::black_box;

const K: usize = 8;
const OUTPUT: usize = 500;
const OUTPUTS: i64 = 2000;

/// Generator of numbers below a given n: uniform ones, or products of two uniform ones, of which low numbers are more
/// frequent.
struct Draws(u64);

impl Draws {
    fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % n
    }

    fn frequent(&mut self, n: usize) -> usize {
        self.below(n) * self.below(n) / n
    }
}

fn phrases(draws: &mut Draws) -> Vec<Vec<u32>> {
    let phrase = |draws: &mut Draws| (0..3 + draws.below(30)).map(|_| draws.frequent(50_000) as u32).collect();
    (0..20_000).map(|_| phrase(draws)).collect()
}

fn from_phrases(draws: &mut Draws, stock: &[Vec<u32>]) -> Vec<u32> {
    let mut text = Vec::new();
    while text.len() < OUTPUT {
        text.extend(&stock[draws.frequent(stock.len())]);
    }
    text.truncate(OUTPUT);
    text
}

fn filled(name: &str, mut output: impl FnMut(i64) -> Vec<u32>) -> SuffixCache {
    let settings = SuffixSettings { max_memory_bytes: usize::MAX, ..SuffixSettings::default() };
    let mut cache = SuffixCache::new(settings).expect("allowed settings");
    for id in 0..OUTPUTS {
        cache.start_request(id, &[]).expect("a new request");
        cache.append(id, &output(id)).expect("a running request");
        cache.stop_request(id).expect("a running request");
    }
    let stats = cache.stats();
    let per_token = stats.memory_bytes as f64 / stats.num_output_tokens as f64;
    let nodes = stats.num_nodes as f64 / stats.num_output_tokens as f64;
    eprintln!("{name}: {} tokens, {nodes:.2} nodes and {per_token:.0} bytes a token", stats.num_output_tokens);
    cache
}

fn bench(c: &mut Criterion) {
    let mut draws = Draws(7);
    let stock = phrases(&mut draws);
    let mut group = c.benchmark_group("suffix 1M tokens");
    group.sample_size(20);
    for (name, copies) in [("phrases", 0), ("random", 1), ("twice", 2)] {
        let mut text = || match copies {
            0 => from_phrases(&mut draws, &stock),
            _ => (0..OUTPUT).map(|_| draws.below(50_000) as u32).collect::<Vec<_>>(),
        };
        let different: Vec<_> = (0..OUTPUTS as usize / copies.max(1)).map(|_| text()).collect();
        let mut cache = filled(name, |id| different[id as usize % different.len()].clone());
        // 64 requests in the middle of an output like those cached, in turn: what one reads is out of the caches when its turn comes again.
        let texts: Vec<Vec<u32>> = (0..64).map(|i| if copies == 2 { different[i].clone() } else { text() }).collect();
        for (id, text) in (OUTPUTS..).zip(&texts) {
            cache.start_request(id, &text[..100]).expect("a new request");
            cache.append(id, &text[100..300]).expect("a running request");
        }
        let mut drafts = [0; K];
        let mut turn = 0;
        group.bench_function(format!("propose/{name}"), |b| {
            b.iter(|| {
                turn = (turn + 1) % 64;
                black_box(cache.propose(OUTPUTS + turn, &mut drafts).expect("a running request"));
            });
        });
        let mut at = 0;
        group.bench_function(format!("append/{name}"), |b| {
            b.iter(|| {
                at += 1;
                let token = texts[at % 64][300 + at / 64 % 200];
                cache.append(OUTPUTS + (at % 64) as i64, &[token]).expect("a running request");
            });
        });
        let mut oldest = 0;
        group.bench_function(format!("evict an output/{name}"), |b| {
            let next = || {
                oldest += 1;
                oldest - 1
            };
            b.iter_batched(next, |id| cache.evict(id), BatchSize::PerIteration);
        });
    }
    group.finish();
}

criterion_group!(benches, bench);
criterion_main!(benches);
