//! Errors of a tokenizer and its text.

/// Reason why a text cannot be produced.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The tokenizer's JSON is invalid, or contains parts that the library does not know.
    #[error("the tokenizer cannot be read: {0}")]
    InvalidTokenizer(String),
    /// The tokenizer's decoder failed on these tokens.
    #[error("its tokens cannot be decoded: {0}")]
    Decode(String),
}

/// Result with this crate's error.
pub type Result<T> = std::result::Result<T, Error>;
