//! What requests have produced: their tokens, the text as it comes, stop strings in it, how they ended.
//!
//! One call takes what a launch settled and hands it to all its requests. No Python, no scheduling, no clock: the caller says what
//! time it is. The decoding itself is the `tokenizers` crate's.

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
