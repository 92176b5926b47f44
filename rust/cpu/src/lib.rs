//! Passes of decoders on a CPU: a forward pass over flat rows as one call, on borrowed memory.
//!
//! Weights are `[out, in]` as in checkpoints, and KV is paged. The crate has no Python, no scheduling, and no clock
//! except for benchmarks. A row's sums have one order, whatever the other rows of a pass, the threads and the
//! instruction set, so its logits always have the same bits.

#![deny(missing_docs)]
#![deny(unsafe_code)]

mod decoder;
mod error;
pub mod iteration;
mod kv_cache;
mod layer;
mod linear;
mod lora;
mod pass;
mod pool;
mod shape;
mod state_layer;
mod states;
mod weights;

pub use decoder::Decoder;
pub use error::{Error, Result, guarded};
pub use kv_cache::{KvCache, KvLayer, KvShape};
pub use layer::{
    Addition, Experts, LayerSizes, LayerWeights, Mlp, ParallelMlp, QkNorm, RouterScales, SharedExpert, VariedLayer,
};
pub use linear::{Linear, Part, Weight};
pub use lora::{ExpertLora, Lora, LoraLayer, LoraPart};
pub use pass::{Entries, HeadStates, MAX_TILE_ROWS, Output, Pass};
pub use pool::Pool;
pub use shape::{ConvShape, DeltaShape, ModelShape, StateShape};
pub use specrs_cpu_kernels::{
    Activation, Bf16, BlockType, E4m3, E5m2, Isa, Memory, MemoryMut, Owner, Packed, Rounding, Tiles, Values, ValuesMut,
    quantize, quantize_q4_k,
};
pub use state_layer::{ConvWeights, DeltaWeights, StateWeights};
pub use states::StateSnapshot;
pub use weights::{
    AssistantWeights, DecoderWeights, Eagle3Weights, Embedding, HeadWeights, LayerEmbedding, MtpWeights, Multipliers,
    QueryScaling, Rotation, Weights,
};

/// Returns the settings of a property test with at most `most` cases. Miri tries three, and cannot write failures to a
/// file.
#[cfg(test)]
fn cases(most: u32) -> proptest::test_runner::Config {
    let default = proptest::test_runner::Config::default();
    let most = if cfg!(miri) { 3 } else { most };
    proptest::test_runner::Config { cases: default.cases.min(most), failure_persistence: None, ..default }
}
