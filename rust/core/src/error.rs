//! Errors of this crate, as one enum. Messages name the field, the value and the allowed values; nothing here prints or
//! logs.

use std::fmt::Display;
use thiserror::Error as ThisError;

/// Shorthand for results of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Returns the message for a value outside its range: `field=value: must be allowed`. `allowed` may end with a remedy
/// after a semicolon.
#[allow(clippy::needless_pass_by_value)] // values are numbers, short names or `format_args!`
pub fn must_be(field: impl Display, value: impl Display, allowed: impl Display) -> String {
    format!("{field}={value}: must be {allowed}")
}

/// Every failure of this crate. An operation that returns one has changed nothing.
#[derive(Clone, Debug, PartialEq, Eq, ThisError)]
#[non_exhaustive]
pub enum Error {
    /// A setting, or an argument that belongs to no request and no buffer, is outside its range.
    #[error("{}", must_be(field, value, allowed))]
    InvalidConfig {
        /// Name of the setting.
        field: &'static str,
        /// Value that was passed in.
        value: String,
        /// Description of the allowed values.
        allowed: String,
    },
    /// A request has a parameter with which it can never be served.
    #[error("request {request_id}: {}", must_be(field, value, allowed))]
    InvalidRequest {
        /// Id of the rejected request.
        request_id: i64,
        /// Name of the parameter.
        field: &'static str,
        /// Value that was passed in.
        value: String,
        /// Description of the allowed values.
        allowed: String,
    },
    /// A request with this id is waiting or running.
    #[error("request_id={request_id}: already live; must be an id that is neither waiting nor running")]
    DuplicateRequest {
        /// Id of the request that was added twice.
        request_id: i64,
    },
    /// No request with this id is waiting or running.
    #[error("request_id={request_id}: not live; must be the id of a waiting or running request")]
    UnknownRequest {
        /// Id that no live request has.
        request_id: i64,
    },
    /// The operation needs a running request and this one is waiting.
    #[error("request_id={request_id}: still waiting; must be the id of a running request")]
    NotRunning {
        /// Id of the waiting request.
        request_id: i64,
    },
    /// No KV block can be allocated, because requests hold all blocks of the pool.
    #[error("out of KV blocks: all {num_blocks} are referenced; free at least 1")]
    OutOfBlocks {
        /// Number of blocks in the pool.
        num_blocks: usize,
    },
    /// A block id is outside the pool, or its state does not allow the operation.
    #[error("{}", must_be("block", format_args!("{block} ({state})"), allowed))]
    InvalidBlock {
        /// Block id that was passed in.
        block: i64,
        /// State of the block in the pool.
        state: String,
        /// Description of the allowed values.
        allowed: &'static str,
    },
    /// A buffer that the caller passed in has a wrong length, or a wrong value in it.
    #[error("{}", must_be(name, value, allowed))]
    InvalidBuffer {
        /// Name of the buffer.
        name: &'static str,
        /// Length of the buffer, or the wrong value in it.
        value: String,
        /// Description of the allowed values.
        allowed: String,
    },
    /// A verified draft was recorded with more accepted tokens than drafted ones, or more drafted ones than allowed.
    #[error("{}", must_be(
        "(drafted, accepted)",
        format_args!("({drafted}, {accepted})"),
        format_args!("at most {allowed} drafted, and no more accepted than drafted")
    ))]
    InvalidAcceptance {
        /// Number of drafted tokens in the record.
        drafted: usize,
        /// Number of accepted tokens in the record.
        accepted: usize,
        /// Maximum number of tokens in a draft.
        allowed: usize,
    },
    /// A step was settled out of order; steps settle in the order in which they were planned.
    #[error("step_id={step_id}: cannot settle now; {}", match expected {
        Some(id) => format!("must be {id}, the oldest step in flight"),
        None => "no step is in flight".to_owned(),
    })]
    SettleOrder {
        /// Id of the step that was passed in.
        step_id: u64,
        /// Id of the oldest step in flight, which must settle next; `None` if no step is in flight.
        expected: Option<u64>,
    },
    /// The device reported results that the step cannot have produced.
    #[error("step {step_id}, sequence {sequence}: {}", must_be(field, value, allowed))]
    InvalidResults {
        /// Id of the step being settled.
        step_id: u64,
        /// Index of the sequence in the step.
        sequence: usize,
        /// Section of the results buffer.
        field: &'static str,
        /// Value found in the section.
        value: i64,
        /// Description of the allowed values.
        allowed: String,
    },
    /// The crate found two parts of its own state in contradiction, which is a bug in the crate.
    #[error("integrity: {what}")]
    Integrity {
        /// Description of the contradiction, with its numbers.
        what: String,
    },
}

// Values are numbers or short names, made into text here and nowhere else.
#[allow(clippy::needless_pass_by_value)]
impl Error {
    pub(crate) fn invalid_config(field: &'static str, value: impl ToString, allowed: impl Into<String>) -> Self {
        Self::InvalidConfig { field, value: value.to_string(), allowed: allowed.into() }
    }

    pub(crate) fn invalid_request(
        request_id: i64,
        field: &'static str,
        value: impl ToString,
        allowed: impl Into<String>,
    ) -> Self {
        Self::InvalidRequest { request_id, field, value: value.to_string(), allowed: allowed.into() }
    }

    pub(crate) fn invalid_buffer(name: &'static str, value: impl ToString, allowed: impl Into<String>) -> Self {
        Self::InvalidBuffer { name, value: value.to_string(), allowed: allowed.into() }
    }

    pub(crate) fn integrity(what: impl Into<String>) -> Self {
        Self::Integrity { what: what.into() }
    }
}

/// Rejects a buffer that does not have exactly `expected` elements.
pub(crate) fn check_len(name: &'static str, len: usize, expected: usize) -> Result<()> {
    if len == expected {
        return Ok(());
    }
    Err(Error::invalid_buffer(name, format!("{len} elements"), expected.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_name_field_value_and_what_is_allowed() {
        let cases = [
            (Error::invalid_config("block_size", 0, "at least 1"), "block_size=0: must be at least 1"),
            (Error::invalid_request(7, "limit", 9, "at most 8"), "request 7: limit=9: must be at most 8"),
            (
                Error::SettleOrder { step_id: 3, expected: Some(2) },
                "step_id=3: cannot settle now; must be 2, the oldest step in flight",
            ),
            (Error::SettleOrder { step_id: 3, expected: None }, "step_id=3: cannot settle now; no step is in flight"),
        ];
        for (error, message) in cases {
            assert_eq!(error.to_string(), message);
        }
    }
}
