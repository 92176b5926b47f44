//! Kernels of passes on a CPU, written once for all instruction sets, and what they read: borrowed memory and packed
//! weights. Knows no models, no threads and no KV caches.
//!
//! A kernel is a struct of its operands with a function `run`, which takes the instruction set. It is compiled in this
//! crate, once for each set: nothing public is generic over sets, so no caller compiles a kernel again. The bits of a
//! result depend neither on the set nor on the other rows.

#![deny(missing_docs)]
#![deny(unsafe_code)]
// A kernel that is not inlined into the function that has an instruction set's features is compiled without them.
#![allow(clippy::inline_always)]

mod blocks;
mod error;
mod isa;
mod kernels;
mod memory;
mod quantize;
mod values;

pub use blocks::{BlockType, Packed, quantize_q4_k};
pub use error::{Error, Result};
pub use isa::{Isa, LANES, Tile, Tiles, Vector};
pub use kernels::{
    Activation, Angles, Argmax, Attend, AttendScratch, BlockProduct, ConvSilu, DeltaHead, GateMul, GatedConv,
    GatedNorm, KvElement, KvHead, LEAST_WEIGHT, Layout, LogPlaces, MAX_ROWS, PAIRS, Product, QkHead, RmsNorm, RmsScale,
    Round, RoundPairs, Rounded, RoundedRoom, Rounding, Route, Sigmoid, Softcap, Split, TileProduct, Unit, Unpacked,
    better, decay, query_factor, rate, sigmoid,
};
pub use memory::{
    Bf16, Columns, ColumnsMut, E4m3, E5m2, MAX_PARTS, Memory, MemoryMut, Owner, Planes, PlanesMut, Vectors, bytes_of,
    bytes_of_mut,
};
pub use quantize::quantize;
pub use values::{Values, ValuesMut};
