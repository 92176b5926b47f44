//! Decisions of speculative decoding: scheduling, KV blocks, slot mappings, acceptance books. No Python, no GPU, no I/O, no clock.
#![forbid(unsafe_code)]
