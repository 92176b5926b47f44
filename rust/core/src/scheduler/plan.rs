//! What the next launch does.

use super::{PlanOutcome, Scheduler, check_len};
use crate::error::Result;

/// Scratch of one `plan`.
#[derive(Clone, Debug, Default)]
pub(super) struct Plan {}

impl Scheduler {
    /// Plans the next launch into `record`. A record of [`PlanOutcome::Launch`] is in flight until it settles; otherwise what is in the record is
    /// unspecified.
    ///
    /// # Errors
    /// [`crate::Error::InvalidBuffer`] if `record` does not have the layout's size.
    pub fn plan(&mut self, record: &mut [i64]) -> Result<PlanOutcome> {
        check_len("record", record.len(), self.record_layout.size)?;
        Ok(PlanOutcome::Idle)
    }
}
