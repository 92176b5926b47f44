//! Tests of the kernels: each against a second implementation of what it computes, on all instruction sets of this
//! machine.

mod activation;
mod codes;
mod exp;
mod gates;
mod numbers;
mod pairs;
mod products;
mod quantize;
mod query_factor;
mod rope;
mod route;
mod tiles;

use proptest::test_runner::Config;

/// Returns the settings of a property test with at most `most` cases. Miri tries three, and cannot write failures to a
/// file.
fn cases(most: u32) -> Config {
    let default = Config::default();
    let most = if cfg!(miri) { 3 } else { most };
    Config { cases: default.cases.min(most), failure_persistence: None, ..default }
}
