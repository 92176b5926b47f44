//! Output of requests: their tokens, the text as it comes, stop strings in it, and how they ended.
//!
//! One call takes the results of a settled step and hands them to all its requests. The crate has no Python, no
//! scheduling and no clock: the caller passes the time. The decoding itself is done by the `tokenizers` crate.

#![deny(missing_docs)]

mod decoder;
mod detokenizer;
mod error;
mod output;
mod outputs;
mod stops;

pub use decoder::TokenDecoder;
pub use detokenizer::{Detokenizer, TextParams, Update};
pub use error::{Error, Result};
pub use output::{Draft, End, FINISH_ABORT, Output};
pub use outputs::{Delivered, Fault, Outputs};
