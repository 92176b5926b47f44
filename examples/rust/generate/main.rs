//! Text from a folder with a checkpoint, in plain Rust: `specrs-core` plans and judges, `specrs-cpu` computes a step in
//! one call.
//!
//! The folder holds config.json, safetensors files and tokenizer.json of a dense decoder; a smaller one with the same tokenizer
//! drafts. Weights are read where the files are mapped.
//!
//! ```text
//! cargo run --release --example generate -- FOLDER "prompt" [--draft FOLDER] [-k 3] [--max-tokens 128] [--temperature 0] [--threads 1]
//! ```
#![allow(clippy::print_stdout)] // an example shows what it does

mod checkpoint;

use std::{io::Write, path::Path, sync::Arc, time::Instant};

use checkpoint::Checkpoint;
use specrs_core::sampling::{LogprobsMode, RequestSampling};
use specrs_core::{Drafter, PlanOutcome, RequestParams, Scheduler, SchedulerConfig};
use specrs_cpu::iteration::{Cached, Iteration, Model, NoHost, OwnedRowState, Rule};
use specrs_cpu::{Decoder, KvCache, KvShape, ModelShape, Pool, Weights};
use tokenizers::Tokenizer;

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

const BLOCK_SIZE: usize = 16;
/// Maximum number of tokens of a text, prompt and output.
const MAX_LEN: usize = 2048;
const FLAGS: [&str; 5] = ["--draft", "-k", "--max-tokens", "--temperature", "--threads"];

/// Returns a model that runs on these threads, with a KV cache of its own.
fn model(weights: Weights, pool: &Arc<Pool>) -> Result<(Decoder, KvCache)> {
    let (weights, num_blocks) = (Arc::new(weights), MAX_LEN / BLOCK_SIZE);
    let &ModelShape { num_kv_heads, head_dim, .. } = weights.shape();
    let shape = KvShape { num_blocks, block_size: BLOCK_SIZE, num_kv_heads, head_dim };
    let cache = KvCache::allocate(shape, weights.num_layers(), false)?;
    Ok((Decoder::new(weights, Arc::clone(pool)), cache))
}

/// Options of a generation.
struct Options<'a> {
    folder: &'a Path,
    draft: Option<&'a Path>,
    k: usize,
    max_tokens: usize,
    temperature: f64,
    threads: usize,
}

/// Generates a continuation of `prompt`, and calls `deliver` with new text. Returns the number of tokens and the mean
/// acceptance length.
fn generate(prompt: &str, options: &Options<'_>, mut deliver: impl FnMut(&str)) -> Result<(usize, f64)> {
    let tokenizer = Tokenizer::from_file(options.folder.join("tokenizer.json")).map_err(|error| error.to_string())?;
    let checkpoint = Checkpoint::open(options.folder)?;
    let pool = Arc::new(Pool::new(options.threads)?);
    let (mut decoder, mut kv_cache) = model(checkpoint.weights()?, &pool)?;
    let draft = options.draft.map(|folder| model(Checkpoint::open(folder)?.weights()?, &pool));
    let mut draft = draft.transpose()?;

    let mut config = SchedulerConfig::new(1, MAX_LEN, MAX_LEN / BLOCK_SIZE, BLOCK_SIZE, 512);
    if draft.is_some() {
        config.num_speculative_tokens = options.k;
        config.drafter =
            Drafter::Cached { max_model_len: MAX_LEN, max_draft_lag: 2, mask_token_id: None, cost_ratio: 0.25 };
    }
    let mut scheduler = Scheduler::new(config.clone())?;
    let encoding = tokenizer.encode(prompt, true).map_err(|error| error.to_string())?;
    let ids: Vec<i64> = encoding.get_ids().iter().map(|&id| i64::from(id)).collect();
    let params = RequestParams {
        limit: (ids.len() + options.max_tokens).min(MAX_LEN),
        num_speculative_tokens: config.num_speculative_tokens,
        stop_token_ids: &checkpoint.stop_ids(),
        sampling: RequestSampling { temperature: options.temperature, ..RequestSampling::default() },
        ..RequestParams::default()
    };
    scheduler.add_request(0, &ids, &params)?;

    let mut state = OwnedRowState::new(&config);

    let (mode, vocab_size) = (LogprobsMode::default(), decoder.weights().shape().vocab_size);
    let mut iteration = Iteration::new(config, Rule::Rejection, None, mode, vocab_size)?;
    let mut record = vec![0; scheduler.record_layout().size];
    let mut results = vec![0; scheduler.results_layout().size];
    let mut settled = vec![0; scheduler.settled_layout().size];
    let (mut stream, mut count) = (tokenizer.decode_stream(true), 0);
    while let PlanOutcome::Step(header) = scheduler.plan(&mut record)? {
        let mut target = Cached::new(&mut decoder, &mut kv_cache, &[]);
        let mut draft = draft.as_mut().map(|(decoder, kv_cache)| Cached::new(decoder, kv_cache, &[]));
        let draft = draft.as_mut().map(|draft| draft as &mut dyn Model);
        iteration.run(&record, &mut results, &mut state.borrow(), &mut target, draft, &mut NoHost)?;
        scheduler.settle(header.step_id, &results, &mut settled)?;
        let new = scheduler.settled_layout().view(&settled).num_new[0] as usize;
        for &id in &scheduler.results_layout().view(&results).tokens[..new] {
            if let Some(text) = stream.step(id as u32).map_err(|error| error.to_string())? {
                deliver(&text);
            }
        }
        count += new;
    }
    Ok((count, scheduler.acceptance().acceptance_length()))
}

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [folder, prompt, flags @ ..] = &arguments[..] else { return Err("expected FOLDER and a prompt".into()) };
    if let Some(pair) = flags.chunks(2).find(|pair| pair.len() < 2 || !FLAGS.contains(&&*pair[0])) {
        return Err(format!("flags={pair:?}: must be of {FLAGS:?}, each with a value").into());
    }
    let flag =
        |name: &str| flags.chunks(2).find(|pair| pair[0] == name).and_then(|pair| pair.get(1)).map(String::as_str);
    let options = Options {
        folder: folder.as_ref(),
        draft: flag("--draft").map(Path::new),
        k: flag("-k").unwrap_or("3").parse()?,
        max_tokens: flag("--max-tokens").unwrap_or("128").parse()?,
        temperature: flag("--temperature").unwrap_or("0").parse()?,
        threads: flag("--threads").unwrap_or("1").parse()?,
    };
    let mut first = None;
    let (count, length) = generate(prompt, &options, |text| {
        first.get_or_insert_with(Instant::now);
        print!("{text}");
        let _ = std::io::stdout().flush();
    })?;
    let seconds = first.map_or(f64::NAN, |first| first.elapsed().as_secs_f64());
    println!(
        "\n{count} tokens, {:.0} tokens/s behind the first, acceptance length {length:.2}",
        (count as f64 - 1.0) / seconds
    );
    Ok(())
}

/// Checks that the greedy text of the bundled pair equals that of its target alone and that of the Python engine.
#[test]
fn drafts_do_not_change_the_text() -> Result<()> {
    let pair = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../python/specrs/pair");
    let (target, draft) = (pair.join("target"), pair.join("draft"));
    let prompt = "class JobQueue:\n    \"\"\"Jobs in the order in which they arrived.\"\"\"\n\n    def __init__(self, maxsize=0):\n";
    let expected = "\nclass StreamWriter(Codec, map=None, errors=False):\n    \"\"\"Create a file object.\n\n    This is a string \
        of the file object.\n\n    This is a string of the file object.\n    \"\"\"";
    let mut lengths = Vec::new();
    for draft in [None, Some(&*draft)] {
        let options = Options { folder: &target, draft, k: 3, max_tokens: 48, temperature: 0.0, threads: 1 };
        let mut text = String::new();
        let (count, length) = generate(prompt, &options, |new| text.push_str(new))?;
        assert_eq!((text.as_str(), count), (expected, 48));
        lengths.push(length);
    }
    assert!(lengths[1] > lengths[0].max(2.0), "{lengths:?}");
    Ok(())
}
