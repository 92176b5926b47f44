//! Which K a cost model chooses, and where drafting stops paying. Knows acceptance lengths as given, fits nothing.

use super::{CostModel, check_length};
#[cfg(doc)]
use crate::error::Error;
use crate::error::Result;

impl CostModel {
    /// The K of the lowest TPOT, 0 among them; of equal ones the smallest. `acceptance_lengths[i]` is AL at K = i + 1.
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

    /// The largest of the given K that is still faster than no drafts, 0 if none is. Arguments and errors as
    /// [`CostModel::best_k`].
    ///
    /// # Errors
    /// As [`CostModel::best_k`].
    pub fn last_paying_k(&self, batch: usize, acceptance_lengths: &[f64]) -> Result<usize> {
        check(acceptance_lengths)?;
        let paying = |&(k, &length): &(usize, &f64)| self.ms(batch, k) / length < self.ms(batch, 0);
        Ok((1..).zip(acceptance_lengths).filter(paying).map(|(k, _)| k).last().unwrap_or(0))
    }

    /// The smallest batch within the grid at which no K is faster than no drafts; `None` if there is none. Acceptance lengths
    /// as in [`CostModel::best_k`]: they do not depend on the batch.
    ///
    /// # Errors
    /// As [`CostModel::best_k`].
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
