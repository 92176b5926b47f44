//! The error of this crate. Messages name the argument, the value and the allowed values.

use thiserror::Error as ThisError;

/// Shorthand for results of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An argument is outside its range, or does not match the others.
#[derive(Clone, Debug, PartialEq, Eq, ThisError)]
#[error("{field}={value}: must be {allowed}")]
pub struct Error {
    /// Name of the argument, with the row where there are several.
    pub field: String,
    /// Value that was passed in.
    pub value: String,
    /// Description of the allowed values.
    pub allowed: String,
}

// Values are numbers or short names, made into text here and nowhere else.
#[allow(clippy::needless_pass_by_value)]
impl Error {
    /// Makes an error. `allowed` may end with a remedy after a semicolon.
    pub fn invalid(field: impl Into<String>, value: impl ToString, allowed: impl Into<String>) -> Self {
        Self { field: field.into(), value: value.to_string(), allowed: allowed.into() }
    }
}

/// Rejects a length other than `expected`.
pub(crate) fn check_len(field: &str, len: usize, expected: usize) -> Result<()> {
    if len == expected {
        return Ok(());
    }
    Err(Error::invalid(field, format!("{len} elements"), expected.to_string()))
}
