//! Choice of the best K by a cost model, and the batch size at which drafting stops paying. Acceptance lengths are
//! inputs; nothing is fitted.

use super::{CostModel, check_length};
#[cfg(doc)]
use crate::error::Error;
use crate::error::Result;

impl CostModel {
    /// Returns the K with the lowest time per output token (TPOT), where 0 is a candidate and ties go to the smallest
    /// K. `acceptance_lengths[i]` is the acceptance length at K = i + 1.
    ///
    /// # Errors
    /// [`Error::InvalidConfig`] unless each acceptance length at K is from 1 to K + 1.
    pub fn best_k(&self, batch: usize, acceptance_lengths: &[f64]) -> Result<usize> {
        check(acceptance_lengths)?;
        let mut best = (0, self.ms(batch, 0));
        for (k, &length) in (1..).zip(acceptance_lengths) {
            let tpot = self.ms(batch, k) / length;
            if tpot < best.1 {
                best = (k, tpot);
            }
        }
        Ok(best.0)
    }

    /// Returns the largest K that is still faster than no drafts, or 0 if none is. `acceptance_lengths[i]` is the
    /// acceptance length at K = i + 1.
    ///
    /// # Errors
    /// [`Error::InvalidConfig`] unless each acceptance length at K is from 1 to K + 1.
    pub fn last_paying_k(&self, batch: usize, acceptance_lengths: &[f64]) -> Result<usize> {
        check(acceptance_lengths)?;
        let paying = |&(k, &length): &(usize, &f64)| self.ms(batch, k) / length < self.ms(batch, 0);
        Ok((1..).zip(acceptance_lengths).filter(paying).map(|(k, _)| k).last().unwrap_or(0))
    }

    /// Returns the smallest batch size within the grid at which no K is faster than no drafts, or `None` if there is
    /// none. `acceptance_lengths[i]` is the acceptance length at K = i + 1; it does not depend on the batch size.
    ///
    /// # Errors
    /// [`Error::InvalidConfig`] unless each acceptance length at K is from 1 to K + 1.
    pub fn break_even_batch(&self, acceptance_lengths: &[f64]) -> Result<Option<usize>> {
        check(acceptance_lengths)?;
        let (first, last) = (self.batches[0], self.batches[self.batches.len() - 1]);
        let faster = |batch| {
            let plain = self.ms(batch, 0);
            (1..).zip(acceptance_lengths).any(|(k, &length)| self.ms(batch, k) / length < plain)
        };
        Ok((first..=last).find(|&batch| !faster(batch)))
    }
}

fn check(acceptance_lengths: &[f64]) -> Result<()> {
    (1..).zip(acceptance_lengths).try_for_each(|(k, &length)| check_length("acceptance_lengths", k, length))
}
