//! Passes of decoders on a CPU: a forward pass over flat rows as one call, on borrowed memory.
//!
//! Weights are `[out, in]` as in checkpoints, and KV is paged. The crate has no Python, no scheduling, and no clock
//! except for benchmarks. A row's sums have one order, whatever the other rows of a pass, the threads and the
//! instruction set, so its logits always have the same bits.

#![deny(missing_docs)]
#![deny(unsafe_code)]
// A kernel that is not inlined into the function that has an instruction set's features is compiled without them.
#![allow(clippy::inline_always)]

mod blocks;
mod decoder;
mod error;
mod isa;
pub mod iteration;
mod kernels;
mod kv_cache;
mod layer;
mod linear;
mod lora;
mod memory;
mod pass;
mod pool;
mod quantize;
mod shape;
mod states;
mod values;
mod weights;

pub use blocks::{BlockType, Packed, quantize_q4_k};
pub use decoder::Decoder;
pub use error::{Error, Result, guarded};
pub use isa::{Isa, Tiles};
pub use kernels::Rounding;
pub use kv_cache::{KvCache, KvLayer, KvShape};
pub use layer::{
    Activation, Addition, ConvWeights, DeltaWeights, Experts, LayerSizes, LayerWeights, Mlp, ParallelMlp, QkNorm,
    RouterScales, SharedExpert, StateWeights, VariedLayer,
};
pub use linear::{Linear, Part, Weight};
pub use lora::{Lora, LoraLayer, LoraPart};
pub use memory::{Bf16, E4m3, E5m2, Memory, MemoryMut, Owner};
pub use pass::{Entries, HeadStates, MAX_TILE_ROWS, Output, Pass};
pub use pool::Pool;
pub use quantize::quantize;
pub use shape::{ConvShape, DeltaShape, ModelShape, StateShape};
pub use states::StateSnapshot;
pub use values::{Values, ValuesMut};
pub use weights::{
    AssistantWeights, Eagle3Weights, Embedding, HeadWeights, LayerEmbedding, MtpWeights, Multipliers, QueryScaling,
    Rotation, Weights,
};

/// Returns the settings of a property test with at most `most` cases. Miri tries three, and cannot write failures to a
/// file.
#[cfg(test)]
fn cases(most: u32) -> proptest::test_runner::Config {
    let default = proptest::test_runner::Config::default();
    let most = if cfg!(miri) { 3 } else { most };
    proptest::test_runner::Config { cases: default.cases.min(most), failure_persistence: None, ..default }
}
