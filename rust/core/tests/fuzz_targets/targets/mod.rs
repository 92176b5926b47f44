//! Fuzz targets: each reads operations from bytes, and panics if the core breaks a promise.
#![allow(dead_code, unused_imports, unreachable_pub)] // each fuzzer uses one of them

mod block_pool;
mod bytes;
mod sampling;
mod scheduler;
mod slot_mapper;

pub use block_pool::block_pool;
pub use sampling::sampling;
pub use scheduler::scheduler;
pub use slot_mapper::slot_mapper;
