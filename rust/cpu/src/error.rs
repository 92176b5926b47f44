//! What can go wrong, as one enum. Messages name the field, the value and what is allowed.

use thiserror::Error as ThisError;

/// Shorthand for results of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Every failure of this crate. An operation that returns one has written nothing.
#[derive(Clone, Debug, PartialEq, Eq, ThisError)]
#[non_exhaustive]
pub enum Error {
    /// An argument is outside its range, or does not fit the others.
    #[error("{field} = {value} is not allowed: expected {allowed}")]
    Invalid {
        /// Name of the argument, with the layer or row where there are several.
        field: String,
        /// The value given.
        value: String,
        /// What is allowed.
        allowed: String,
    },
    /// What the core says of sampling.
    #[error(transparent)]
    Core(#[from] specrs_core::Error),
    /// A pool of threads is used in a process forked off the one that made it: its threads stayed there.
    #[error("the pool's threads are in process {process}, not in its fork {this}: make the engine after the fork")]
    Forked {
        /// The process that made the pool.
        process: u32,
        /// The one that uses it.
        this: u32,
    },
    /// A pool of threads is used after its end.
    #[error("the pool's threads have ended: the engine was shut down")]
    Closed,
}

// Values are numbers or short names, made into text here and nowhere else.
#[allow(clippy::needless_pass_by_value)]
impl Error {
    pub(crate) fn invalid(field: impl Into<String>, value: impl ToString, allowed: impl Into<String>) -> Self {
        Self::Invalid { field: field.into(), value: value.to_string(), allowed: allowed.into() }
    }
}

/// Refuses a length other than `expected`.
pub(crate) fn check_len(field: &str, len: usize, expected: usize) -> Result<()> {
    if len == expected {
        return Ok(());
    }
    Err(Error::invalid(field, format!("{len} elements"), format!("{expected} elements")))
}
