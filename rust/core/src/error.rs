//! What can go wrong, as one enum. Messages name the field, the value and what is allowed; nothing here prints or logs.

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
        /// The value given.
        value: String,
        /// What is allowed.
        allowed: String,
    },
    /// A request can never be served as given.
    #[error("request {request_id}: {field} = {value} is not allowed: expected {allowed}")]
    InvalidRequest {
        /// Id of the refused request.
        request_id: i64,
        /// Name of the parameter.
        field: &'static str,
        /// The value given.
        value: String,
        /// What is allowed.
        allowed: String,
    },
    /// A request with this id is waiting or running.
    #[error("request_id = {request_id} is already live: expected an id that is neither waiting nor running")]
    DuplicateRequest {
        /// The id given twice.
        request_id: i64,
    },
    /// No request with this id is waiting or running.
    #[error("request_id = {request_id} is not live: expected the id of a waiting or running request")]
    UnknownRequest {
        /// The id given.
        request_id: i64,
    },
    /// The operation needs a running request and this one is waiting.
    #[error("request_id = {request_id} is waiting: expected the id of a running request")]
    NotRunning {
        /// The id given.
        request_id: i64,
    },
    /// The pool has no block to give.
    #[error("out of KV blocks: all {num_blocks} are referenced, expected at least 1 free")]
    OutOfBlocks {
        /// Size of the pool.
        num_blocks: usize,
    },
    /// A block id is outside the pool, or its state does not allow the operation.
    #[error("block = {block} ({state}) is not allowed: expected {allowed}")]
    InvalidBlock {
        /// The id given.
        block: i64,
        /// What the pool knows about it.
        state: String,
        /// What is allowed.
        allowed: &'static str,
    },
    /// A buffer has the wrong size or content for its role.
    #[error("{name} = {value} is not allowed: expected {allowed}")]
    InvalidBuffer {
        /// Name of the buffer.
        name: &'static str,
        /// Its length, or the value found in it.
        value: String,
        /// What is allowed.
        allowed: String,
    },
    /// A draft was recorded with impossible counts.
    #[error("drafted = {drafted}, accepted = {accepted} is not allowed: expected accepted <= drafted <= {allowed}")]
    InvalidAcceptance {
        /// Tokens drafted.
        drafted: usize,
        /// Tokens accepted.
        accepted: usize,
        /// The most tokens a draft can have.
        allowed: usize,
    },
    /// Launches settle in the order in which they were planned.
    #[error("launch_id = {launch_id} cannot settle now: expected {}", match expected {
        Some(id) => format!("{id}, the oldest launch in flight"),
        None => "a launch in flight, and there is none".to_owned(),
    })]
    SettleOrder {
        /// The launch given.
        launch_id: u64,
        /// The launch whose turn it is, if any is in flight.
        expected: Option<u64>,
    },
    /// The device reported something that its launch cannot have produced.
    #[error("launch {launch_id}, entry {entry}: {field} = {value} is not allowed: expected {allowed}")]
    InvalidResults {
        /// The launch being settled.
        launch_id: u64,
        /// Index of the entry in the launch.
        entry: usize,
        /// Section of the results buffer.
        field: &'static str,
        /// The value found.
        value: i64,
        /// What is allowed.
        allowed: String,
    },
    /// The books of this crate contradict each other: a bug in it.
    #[error("integrity: {what}")]
    Integrity {
        /// The contradiction, with its numbers.
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

/// Refuses a buffer that does not have exactly `expected` elements.
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
                Error::SettleOrder { launch_id: 3, expected: Some(2) },
                "launch_id = 3 cannot settle now: expected 2, the oldest launch in flight",
            ),
            (
                Error::SettleOrder { launch_id: 3, expected: None },
                "launch_id = 3 cannot settle now: expected a launch in flight, and there is none",
            ),
        ];
        for (error, message) in cases {
            assert_eq!(error.to_string(), message);
        }
    }
}
