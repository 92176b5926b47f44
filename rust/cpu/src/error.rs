//! What can go wrong, as one enum. Messages name the field, the value and what is allowed.

use std::panic::{AssertUnwindSafe, catch_unwind};
use thiserror::Error as ThisError;

/// Shorthand for results of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Every failure of this crate. An operation that returns one has written nothing, unless it panicked.
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
    /// The process around an iteration failed in what it does for it.
    #[error("{message}")]
    Host {
        /// What it said.
        message: String,
    },
    /// A pool of threads is used after its end.
    #[error("the pool's threads have ended: the engine was shut down")]
    Closed,
    /// A pass has panicked, which is a bug in specrs.
    #[error("a pass panicked: {message}")]
    Panicked {
        /// What it said.
        message: String,
    },
}

/// What `part` returns, an error where it panics: for parts whose work space nothing reads that they have left half done.
///
/// # Errors
/// [`Error::Panicked`], and those of `part`.
pub fn guarded<T>(part: impl FnOnce() -> Result<T>) -> Result<T> {
    catch_unwind(AssertUnwindSafe(part)).unwrap_or_else(|panic| {
        let said = panic.downcast_ref::<&str>().map(|text| (*text).to_string());
        let message = said.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_default();
        Err(Error::Panicked { message })
    })
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

#[cfg(test)]
mod tests {
    use super::{Error, guarded};

    #[test]
    fn panics_are_errors() {
        let short: [u8; 0] = std::hint::black_box([]);
        let of_index = guarded(|| Ok(short[std::hint::black_box(1)]));
        assert!(matches!(&of_index, Err(Error::Panicked { message }) if message.contains("index out of bounds")));
        let message = "as it should".to_string();
        assert_eq!(guarded::<()>(|| panic!("as it should")), Err(Error::Panicked { message }));
        assert_eq!(guarded::<()>(|| Err(Error::Closed)), Err(Error::Closed));
        assert_eq!(guarded(|| Ok(1)), Ok(1));
    }
}
