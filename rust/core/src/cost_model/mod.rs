//! Cost of an iteration in milliseconds by batch size and K, and the TPOT, speed-up, best K and break-even batch that
//! follow from it. Measures nothing.
//!
//! A cost model is a grid over batch sizes and numbers of draft tokens K. One iteration drafts K tokens and yields
//! AL(K) tokens, the acceptance length at K, so `TPOT = ms / AL`. The speed-up compares an iteration with one of the
//! same batch without drafts. `ITL = K * T_d + T_t` (`T_d` is a pass of the draft, `T_t` one of the target) is the
//! special case of [`CostModel::lines`].

mod choice;

use crate::error::{Error, Result};

/// Maximum batch size of a grid. It is far above any engine's batch, and a search over all batches stays below a
/// second.
const MAX_BATCH: usize = 1 << 20;

/// A straight cost line at one batch size, in milliseconds: K drafts cost `K * draft_ms + target_ms`, and no drafts
/// cost `vanilla_ms`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CostLine {
    /// Time of one draft pass, `T_d`; at least 0.
    pub draft_ms: f64,
    /// Time of everything in an iteration that does not grow with K, `T_t`; above 0.
    pub target_ms: f64,
    /// Time of an iteration without drafts; above 0. It is less than `target_ms` if some graphs or kernels work only
    /// without speculation.
    pub vanilla_ms: f64,
}

impl CostLine {
    /// Returns the `T_d` that explains an observed TPOT: `(tpot_ms * AL - T_t) / K`. It is negative if `T_t` alone
    /// exceeds `tpot_ms * AL`.
    ///
    /// # Errors
    /// [`Error::InvalidConfig`] unless the times are finite and above 0, `k` is at least 1 and AL from 1 to `k + 1`.
    pub fn implied_draft_ms(tpot_ms: f64, k: usize, acceptance_length: f64, target_ms: f64) -> Result<f64> {
        check_ms("tpot_ms", tpot_ms)?;
        check_ms("target_ms", target_ms)?;
        if k == 0 {
            return Err(Error::invalid_config("k", k, "at least 1; steps without drafts say nothing about T_d"));
        }
        check_length("acceptance_length", k, acceptance_length)?;
        Ok((tpot_ms * acceptance_length - target_ms) / k as f64)
    }
}

/// Milliseconds of an iteration by batch size and number of draft tokens.
///
/// Between grid points, costs are interpolated linearly. K = 0 is separate: costs at K >= 1 come only from grid points
/// with K >= 1, if there are at least two. Beyond the last K or batch size, costs continue the line of the last
/// segment, but never fall. Below the first K >= 1, K1, they continue the line of the first segment, but are at least
/// K / K1 of the cost at K1. Below the first batch size, the cost is constant.
#[derive(Clone, Debug, PartialEq)]
pub struct CostModel {
    /// Batch sizes of the grid, `[B]`, increasing.
    batches: Vec<usize>,
    /// Numbers of draft tokens of the grid, `[N]`, increasing, beginning with 0.
    ks: Vec<usize>,
    /// Costs of the grid in milliseconds, `[B, N]`, row by row, finite and above 0.
    ms: Vec<f64>,
}

impl CostModel {
    /// Makes a cost model of a grid: `ms[b * ks.len() + j]` is the cost of an iteration of `batches[b]` requests with
    /// `ks[j]` drafts each.
    ///
    /// # Errors
    /// [`Error::InvalidConfig`] unless `batches` and `ks` increase, batches are 1 to 2^20, and `ks` begins with 0. `ms`
    /// must have a cost for each pair, finite and above 0.
    pub fn new(batches: &[usize], ks: &[usize], ms: &[f64]) -> Result<Self> {
        if batches.is_empty() || batches[0] == 0 || !increase(batches) || batches[batches.len() - 1] > MAX_BATCH {
            return Err(invalid("batches", batches, "increasing batch sizes, from 1 to 1048576"));
        }
        if ks.first() != Some(&0) || !increase(ks) {
            return Err(invalid("ks", ks, "0, then increasing numbers of draft tokens"));
        }
        if ms.len() != batches.len() * ks.len() {
            let allowed = format!("{}, one for each batch size and K", batches.len() * ks.len());
            return Err(Error::invalid_config("len(ms)", ms.len(), allowed));
        }
        for &cost in ms {
            check_ms("ms", cost)?;
        }
        Ok(Self { batches: batches.to_vec(), ks: ks.to_vec(), ms: ms.to_vec() })
    }

    /// Makes a cost model of one straight line per batch size: `ITL = K * T_d + T_t`.
    ///
    /// # Errors
    /// [`Error::InvalidConfig`] unless `batches` increase from at least 1 to at most 2^20 and each has a line. `T_d`
    /// must be finite and at least 0, the other times finite and above 0.
    pub fn lines(batches: &[usize], lines: &[CostLine]) -> Result<Self> {
        if lines.len() != batches.len() {
            return Err(Error::invalid_config(
                "len(lines)",
                lines.len(),
                format!("{}, one for each batch size", batches.len()),
            ));
        }
        let mut ms = Vec::with_capacity(3 * lines.len());
        for line in lines {
            if !line.draft_ms.is_finite() || line.draft_ms < 0.0 {
                return Err(Error::invalid_config("draft_ms", line.draft_ms, "a finite number of at least 0"));
            }
            check_ms("target_ms", line.target_ms)?;
            check_ms("vanilla_ms", line.vanilla_ms)?;
            ms.extend([line.vanilla_ms, line.target_ms + line.draft_ms, line.target_ms + 2.0 * line.draft_ms]);
        }
        Self::new(batches, &[0, 1, 2], &ms)
    }

    /// Returns the batch sizes of the grid, `[B]`.
    pub fn batches(&self) -> &[usize] {
        &self.batches
    }

    /// Returns the numbers of draft tokens of the grid, `[N]`, 0 first.
    pub fn ks(&self) -> &[usize] {
        &self.ks
    }

    /// Returns the costs of the grid in milliseconds, `[B, N]`, row by row.
    pub fn table(&self) -> &[f64] {
        &self.ms
    }

    /// Returns the cost of one iteration of `batch` requests that draft `k` tokens each, in milliseconds. Batch 0
    /// counts as 1.
    pub fn ms(&self, batch: usize, k: usize) -> f64 {
        let (low, high, share) = bracket(&self.batches, batch);
        let first = self.row_ms(low, k);
        let last = self.row_ms(high, k);
        if share > 1.0 { last + (share - 1.0) * (last - first).max(0.0) } else { first + share * (last - first) }
    }

    /// Returns the milliseconds per output token at an acceptance length of `acceptance_length` tokens per iteration.
    ///
    /// # Errors
    /// [`Error::InvalidConfig`] unless `acceptance_length` is from 1 to `k + 1`.
    pub fn tpot(&self, batch: usize, k: usize, acceptance_length: f64) -> Result<f64> {
        check_length("acceptance_length", k, acceptance_length)?;
        Ok(self.ms(batch, k) / acceptance_length)
    }

    /// Returns the speed-up of `k` drafts: TPOT without drafts divided by TPOT with `k` of them.
    ///
    /// # Errors
    /// [`Error::InvalidConfig`] unless `acceptance_length` is from 1 to `k + 1`.
    pub fn speedup(&self, batch: usize, k: usize, acceptance_length: f64) -> Result<f64> {
        Ok(self.ms(batch, 0) / self.tpot(batch, k, acceptance_length)?)
    }

    /// Moves the grid towards a measured cost. Each of the up to four grid points around `(batch, k)` moves by its
    /// share in the interpolation times `weight`. On a grid point this is an exponential average with `weight` for the
    /// new value.
    ///
    /// # Errors
    /// [`Error::InvalidConfig`] unless `batch` lies within the grid, `k` is 0 or from the grid's first K >= 1 to its
    /// last, `ms` is finite and above 0, and `weight` is in (0, 1]. Nothing has changed then.
    pub fn observe(&mut self, batch: usize, k: usize, ms: f64, weight: f64) -> Result<()> {
        let last = self.batches[self.batches.len() - 1];
        if batch < self.batches[0] || batch > last {
            return Err(Error::invalid_config(
                "batch",
                batch,
                format!("from {} to {last}, the range of the grid", self.batches[0]),
            ));
        }
        let deepest = self.ks[self.ks.len() - 1];
        if k > deepest || (k > 0 && k < self.ks[1]) {
            let allowed = match self.ks.get(1) {
                Some(first) => format!("0, or from {first} to {deepest}, the range of the grid"),
                None => "0, the only K of the grid".to_owned(),
            };
            return Err(Error::invalid_config("k", k, allowed));
        }
        check_ms("ms", ms)?;
        if !(weight > 0.0 && weight <= 1.0) {
            return Err(Error::invalid_config("weight", weight, "a number above 0 and at most 1"));
        }
        // A ratio, not a difference: costs stay above 0 whatever is observed.
        let excess = ms / self.ms(batch, k) - 1.0;
        let rows = bracket(&self.batches, batch);
        let columns = if k == 0 { (0, 0, 0.0) } else { shifted(bracket(&self.ks[1..], k)) };
        for (row, row_share) in corners(rows) {
            for (column, column_share) in corners(columns) {
                self.ms[row * self.ks.len() + column] *= 1.0 + weight * row_share * column_share * excess;
            }
        }
        Ok(())
    }

    /// Returns the cost at batch size `batches[row]`, interpolated along K.
    fn row_ms(&self, row: usize, k: usize) -> f64 {
        let costs = &self.ms[row * self.ks.len()..(row + 1) * self.ks.len()];
        // With fewer than two points at K >= 1 the line starts at K = 0, for want of a better one.
        let from = usize::from(k > 0 && self.ks.len() > 2);
        if k == 0 || self.ks.len() == 1 {
            return costs[0];
        }
        let ks = &self.ks[from..];
        let costs = &costs[from..];
        let (low, high, share) = bracket(ks, k);
        let (first, last) = (costs[low], costs[high]);
        if k < ks[0] {
            let slope = (costs[1] - costs[0]) / (ks[1] - ks[0]) as f64;
            let reach = (ks[0] - k) as f64 * slope.max(0.0);
            return (costs[0] - reach).max(costs[0] * k as f64 / ks[0] as f64);
        }
        if share > 1.0 { last + (share - 1.0) * (last - first).max(0.0) } else { first + share * (last - first) }
    }
}

fn increase(values: &[usize]) -> bool {
    values.windows(2).all(|pair| pair[0] < pair[1])
}

fn invalid(field: &'static str, values: &[usize], allowed: &str) -> Error {
    Error::invalid_config(field, format!("{values:?}"), allowed)
}

fn check_ms(field: &'static str, value: f64) -> Result<()> {
    if value.is_finite() && value > 0.0 {
        return Ok(());
    }
    Err(Error::invalid_config(field, value, "a finite number of milliseconds above 0"))
}

fn check_length(field: &'static str, k: usize, value: f64) -> Result<()> {
    // Written so that NaN fails.
    if value >= 1.0 && value <= (k + 1) as f64 {
        return Ok(());
    }
    Err(Error::invalid_config(field, value, format!("a number from 1 to {} at K = {k}", k + 1)))
}

/// Returns the indices of the two increasing `points` around `x`, and the share of the way between them. The share is 0
/// on or before the first point, and above 1 beyond the last. With one point it is always 0.
fn bracket(points: &[usize], x: usize) -> (usize, usize, f64) {
    let last = points.len() - 1;
    if last == 0 || x <= points[0] {
        return (0, 0, 0.0);
    }
    let high = points.partition_point(|&point| point < x).min(last);
    let low = high - 1;
    (low, high, (x - points[low]) as f64 / (points[high] - points[low]) as f64)
}

/// Converts a bracket in `ks[1..]` to one in `ks`.
fn shifted((low, high, share): (usize, usize, f64)) -> (usize, usize, f64) {
    (low + 1, high + 1, share)
}

/// Iterates over the two ends of a bracket: the index of each, and its share in the interpolation. An end with share 0
/// is left out.
fn corners((low, high, share): (usize, usize, f64)) -> impl Iterator<Item = (usize, f64)> {
    [(low, 1.0 - share), (high, share)].into_iter().filter(|(_, share)| *share > 0.0)
}

#[cfg(test)]
mod tests;
