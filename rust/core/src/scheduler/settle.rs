//! What results mean.

use super::{Scheduler, check_len};
use crate::error::{Error, Result};

impl Scheduler {
    /// Takes the results of the oldest launch in flight and writes what came of each entry into `settled`.
    ///
    /// # Errors
    /// [`Error::SettleOrder`] if it is not this launch's turn, [`Error::InvalidBuffer`] if a buffer does not have its layout's size,
    /// [`Error::InvalidResults`] if the launch cannot have had these results.
    pub fn settle(&mut self, launch_id: u64, results: &[i64], settled: &mut [i64]) -> Result<()> {
        check_len("results", results.len(), self.results_layout.size)?;
        check_len("settled", settled.len(), self.settled_layout.size)?;
        Err(Error::SettleOrder { launch_id, expected: None })
    }

    /// Checks that the scheduler's books agree. O(blocks + tokens in flight).
    ///
    /// # Errors
    /// [`Error::Integrity`] naming the first contradiction.
    pub fn check_integrity(&self) -> Result<()> {
        self.pool.check_integrity()
    }
}
