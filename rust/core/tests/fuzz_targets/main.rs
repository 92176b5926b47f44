//! Runs of the targets that `fuzz/` runs under libFuzzer, on bytes from a seed, for toolchains without libFuzzer.
//! `SPECRS_FUZZ_RUNS` sets the number of runs.

mod targets;

/// Runs a target on streams of random bytes, and on streams of few different bytes, which repeat operations.
fn drive(target: fn(&[u8]), default_runs: u64) {
    let runs = std::env::var("SPECRS_FUZZ_RUNS").ok().and_then(|runs| runs.parse().ok()).unwrap_or(default_runs);
    for run in 0..runs {
        let mut state = run.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
        let mut next = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) as usize
        };
        let (len, values) = (next() % 600, if next() % 3 == 0 { 16 } else { 256 });
        let data: Vec<u8> = (0..len).map(|_| (next() % values) as u8).collect();
        if let Err(panic) = std::panic::catch_unwind(|| target(&data)) {
            eprintln!("run {run}: {data:?}");
            std::panic::resume_unwind(panic);
        }
    }
}

#[test]
fn block_pool() {
    drive(targets::block_pool, 1000);
}

#[test]
fn scheduler() {
    drive(targets::scheduler, 1000);
}

#[test]
fn slot_mapper() {
    drive(targets::slot_mapper, 4000);
}

#[test]
fn sampling() {
    drive(targets::sampling, 4000);
}
