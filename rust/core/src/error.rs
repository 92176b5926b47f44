//! Errors of this crate, as one enum. Messages name the field, the value and the allowed values; nothing here prints or
//! logs.

use thiserror::Error as ThisError;

/// Shorthand for results of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Every failure of this crate. An operation that returns one has changed nothing.
#[derive(Clone, Debug, PartialEq, Eq, ThisError)]
#[non_exhaustive]
pub enum Error {
    /// A setting is outside its range; found at construction.
    #[error("{field} = {value} is not allowed: expected {allowed}")]
    InvalidConfig {
        /// Name of the setting.
        field: &'static str,
        /// Value that was passed in.
        value: String,
        /// Description of the allowed values.
        allowed: String,
    },
    /// A request can never be served as given.
    #[error("request {request_id}: {field} = {value} is not allowed: expected {allowed}")]
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
    #[error("request_id = {request_id} is already live: expected an id that is neither waiting nor running")]
    DuplicateRequest {
        /// Id of the request that was added twice.
        request_id: i64,
    },
    /// No request with this id is waiting or running.
    #[error("request_id = {request_id} is not live: expected the id of a waiting or running request")]
    UnknownRequest {
        /// Id that no live request has.
        request_id: i64,
    },
    /// The operation needs a running request and this one is waiting.
    #[error("request_id = {request_id} is waiting: expected the id of a running request")]
    NotRunning {
        /// Id of the waiting request.
        request_id: i64,
    },
    /// Every block of the pool is held.
    #[error("out of KV blocks: all {num_blocks} are referenced, expected at least 1 free")]
    OutOfBlocks {
        /// Number of blocks in the pool.
        num_blocks: usize,
    },
    /// A block id is outside the pool, or its state does not allow the operation.
    #[error("block = {block} ({state}) is not allowed: expected {allowed}")]
    InvalidBlock {
        /// Block id that was passed in.
        block: i64,
        /// State of the block in the pool.
        state: String,
        /// Description of the allowed values.
        allowed: &'static str,
    },
    /// A buffer has the wrong size or content for its role.
    #[error("{name} = {value} is not allowed: expected {allowed}")]
    InvalidBuffer {
        /// Name of the buffer.
        name: &'static str,
        /// Length of the buffer, or the wrong value in it.
        value: String,
        /// Description of the allowed values.
        allowed: String,
    },
    /// A verified draft was recorded with more accepted tokens than drafted ones, or more drafted ones than allowed.
    #[error("drafted = {drafted}, accepted = {accepted} is not allowed: expected accepted <= drafted <= {allowed}")]
    InvalidAcceptance {
        /// Number of drafted tokens in the record.
        drafted: usize,
        /// Number of accepted tokens in the record.
        accepted: usize,
        /// Maximum number of tokens in a draft.
        allowed: usize,
    },
    /// A step was settled out of order; steps settle in the order in which they were planned.
    #[error("step_id = {step_id} cannot settle now: expected {}", match expected {
        Some(id) => format!("{id}, the oldest step in flight"),
        None => "a step in flight, and there is none".to_owned(),
    })]
    SettleOrder {
        /// Id of the step that was passed in.
        step_id: u64,
        /// Id of the oldest step in flight, which must settle next; `None` if no step is in flight.
        expected: Option<u64>,
    },
    /// The device reported results that the step cannot have produced.
    #[error("step {step_id}, sequence {sequence}: {field} = {value} is not allowed: expected {allowed}")]
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
    Err(Error::invalid_buffer(name, format!("{len} elements"), format!("{expected} elements")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_name_field_value_and_what_is_allowed() {
        let cases = [
            (
                Error::invalid_config("block_size", 0, "at least 1"),
                "block_size = 0 is not allowed: expected at least 1",
            ),
            (
                Error::invalid_request(7, "limit", 9, "at most 8"),
                "request 7: limit = 9 is not allowed: expected at most 8",
            ),
            (
                Error::SettleOrder { step_id: 3, expected: Some(2) },
                "step_id = 3 cannot settle now: expected 2, the oldest step in flight",
            ),
            (
                Error::SettleOrder { step_id: 3, expected: None },
                "step_id = 3 cannot settle now: expected a step in flight, and there is none",
            ),
        ];
        for (error, message) in cases {
            assert_eq!(error.to_string(), message);
        }
    }
}
