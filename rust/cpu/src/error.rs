//! Errors of this crate, as one enum. Messages name the field, the value and the allowed values.

use std::panic::{AssertUnwindSafe, catch_unwind};
use thiserror::Error as ThisError;

/// Shorthand for results of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Every failure of this crate. A pass that returns one has written nothing, unless it panicked; a step or a
/// quantization may have written a part.
#[derive(Clone, Debug, PartialEq, Eq, ThisError)]
#[non_exhaustive]
pub enum Error {
    /// An argument is outside its range, or does not match the others.
    #[error(transparent)]
    Invalid(#[from] specrs_cpu_kernels::Error),
    /// The core rejected an argument of sampling.
    #[error(transparent)]
    Core(#[from] specrs_core::Error),
    /// A pool of threads is used in a process forked off the one that made it. Its threads exist only in the original
    /// process.
    #[error("the pool's threads are in process {process}, not in its fork {this}: make the engine after the fork")]
    Forked {
        /// Id of the process that made the pool.
        process: u32,
        /// Id of the process that uses the pool.
        this: u32,
    },
    /// The host of an iteration failed in one of its services.
    #[error("{message}")]
    Host {
        /// Message of the host.
        message: String,
    },
    /// A pool of threads is used after its end.
    #[error("the pool's threads have ended: the engine was shut down")]
    Closed,
    /// A pass has panicked, which is a bug in specrs.
    #[error("a pass panicked: {message}")]
    Panicked {
        /// Message of the panic.
        message: String,
    },
}

/// Returns the result of `part`, or an error if it panics. Nothing may later read work space that `part` left
/// unfinished.
///
/// # Errors
/// [`Error::Panicked`] if `part` panics, and the errors of `part`.
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
        Self::Invalid(specrs_cpu_kernels::Error::invalid(field, value, allowed))
    }
}

/// Rejects a length other than `expected`.
pub(crate) fn check_len(field: &str, len: usize, expected: usize) -> Result<()> {
    if len == expected {
        return Ok(());
    }
    Err(Error::invalid(field, format!("{len} elements"), expected.to_string()))
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
