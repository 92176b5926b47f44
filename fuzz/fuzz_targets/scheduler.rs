#![no_main]

#[path = "../../rust/core/tests/fuzz_targets/targets/mod.rs"]
mod targets;

libfuzzer_sys::fuzz_target!(|data: &[u8]| targets::scheduler(data));
