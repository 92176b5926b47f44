//! Temperature, min-p, top-k and top-p of one row of logits, and the kept tokens with their probabilities. Draws
//! nothing.

use super::SamplingParams;
use crate::math::exp_nonpositive;

/// Number of histogram cells per nat (difference of 1 between logits) below the largest logit.
const RESOLUTION: f32 = 32.0;
/// Number of histogram cells. The last one has all logits that are too small for the others.
const CELLS: usize = 1024;

/// Work space for one row, and the tokens that the last row kept. Allocates nothing after the first row.
#[derive(Debug, Default)]
pub(super) struct Filter {
    scaled: Vec<f32>,            // [V] logits over temperature, -inf where removed
    cells: Vec<u32>,             // [V] cell of each token
    counts: Vec<u32>,            // [CELLS]
    sums: Vec<f64>,              // [CELLS]
    boundary: Vec<(f32, f32)>,   // logits and weights of the cell in which a cut lies
    pub(super) tokens: Vec<u32>, // kept, ascending
    pub(super) logits: Vec<f32>, // of the kept tokens, over temperature
    weights: Vec<f32>,           // of the kept tokens, e^(logit - largest)
    total: f64,                  // of all weights
}

impl Filter {
    /// Filters one row and keeps its tokens. A row whose largest logit is not finite has no distribution; token 0 is
    /// kept then, so that a token can be drawn. Callers find such rows by [`largest`].
    pub(super) fn read(&mut self, row: &[f32], params: &SamplingParams) {
        self.tokens.clear();
        self.logits.clear();
        self.weights.clear();
        self.total = 1.0;
        if params.greedy {
            return self.keep_only(argmax(row));
        }
        self.scaled.clear();
        self.scaled.extend(row.iter().map(|x| x / params.temperature));
        let max = largest(&self.scaled);
        if !max.is_finite() {
            return self.keep_only(0);
        }
        // The largest always stays, whatever was asked for.
        let least = params.log_min_p.min(0.0);
        if least > f32::NEG_INFINITY {
            self.scaled.iter_mut().for_each(|x| *x = if *x - max < least { f32::NEG_INFINITY } else { *x });
        }
        // `as` takes infinity to the largest integer and NaN to 0.
        let top_k = (params.top_k as usize).max(1);
        let (by_count, by_share) = (top_k < row.len(), params.top_p < 1.0);
        if by_count || by_share {
            self.cells.clear();
            self.cells.extend(self.scaled.iter().map(|x| cell(max - x)));
        }
        if by_count {
            let lowest = self.kth_largest(top_k);
            self.remove_below(lowest);
        }
        if by_share {
            let lowest = self.nucleus(f64::from(params.top_p), max);
            self.remove_below(lowest);
        }
        self.collect(max);
    }

    /// Returns the probability of the `index`-th kept token.
    pub(super) fn probability(&self, index: usize) -> f32 {
        (f64::from(self.weights[index]) / self.total) as f32
    }

    /// Returns the probability of a token, 0 if it was removed.
    pub(super) fn probability_of(&self, token: u32) -> f32 {
        self.tokens.binary_search(&token).map_or(0.0, |index| self.probability(index))
    }

    fn keep_only(&mut self, token: u32) {
        self.tokens.push(token);
        self.logits.push(0.0);
        self.weights.push(1.0);
    }

    fn remove_below(&mut self, lowest: f32) {
        self.scaled.iter_mut().for_each(|x| *x = if *x < lowest { f32::NEG_INFINITY } else { *x });
    }

    /// Returns the k-th largest remaining logit, or minus infinity if fewer remain.
    fn kth_largest(&mut self, k: usize) -> f32 {
        self.counts.clear();
        self.counts.resize(CELLS, 0);
        for &cell in &self.cells {
            self.counts[cell as usize] += 1;
        }
        let (mut cell, mut before) = (0, 0);
        while cell < CELLS - 1 && before + (self.counts[cell] as usize) < k {
            before += self.counts[cell] as usize;
            cell += 1;
        }
        self.collect_boundary(cell, |_| 0.0);
        if before + self.boundary.len() < k {
            return f32::NEG_INFINITY; // what is missing was removed before
        }
        self.boundary.select_nth_unstable_by(k - before - 1, |a, b| b.0.total_cmp(&a.0)).1.0
    }

    /// Returns the largest logit t with `sum(p where x >= t) >= share * sum(p)`.
    fn nucleus(&mut self, share: f64, max: f32) -> f32 {
        self.sums.clear();
        self.sums.resize(CELLS, 0.0);
        self.weights.clear();
        self.weights.extend(self.scaled.iter().map(|x| exp_nonpositive(x - max)));
        for (&cell, &weight) in self.cells.iter().zip(&self.weights) {
            self.sums[cell as usize] += f64::from(weight);
        }
        let target = share * sum(&self.sums);
        let (mut cell, mut sum) = (0, 0.0);
        while cell < CELLS - 1 && sum + self.sums[cell] < target {
            sum += self.sums[cell];
            cell += 1;
        }
        self.collect_boundary(cell, |x| exp_nonpositive(x - max));
        self.boundary.sort_unstable_by(|a, b| b.0.total_cmp(&a.0));
        for &(logit, weight) in &self.boundary {
            sum += f64::from(weight);
            if sum >= target {
                return logit;
            }
        }
        // Sums in another order may fall short of the target by a rounding.
        self.boundary.last().map_or(f32::NEG_INFINITY, |last| last.0)
    }

    /// Collects every remaining logit of the histogram cell `cell` into `boundary`, each with its weight.
    fn collect_boundary(&mut self, cell: usize, weight: impl Fn(f32) -> f32) {
        self.boundary.clear();
        for (cells, logits) in self.cells.chunks(STRIDE).zip(self.scaled.chunks(STRIDE)) {
            if cells.iter().map(|&c| u32::from(c as usize == cell)).sum::<u32>() > 0 {
                let inside = cells.iter().zip(logits).filter(|&(&c, &x)| c as usize == cell && x > f32::NEG_INFINITY);
                self.boundary.extend(inside.map(|(_, &x)| (x, weight(x))));
            }
        }
    }

    fn collect(&mut self, max: f32) {
        for (index, logits) in self.scaled.chunks(STRIDE).enumerate() {
            if logits.iter().map(|&x| u32::from(x > f32::NEG_INFINITY)).sum::<u32>() > 0 {
                for (offset, &logit) in logits.iter().enumerate().filter(|(_, x)| **x > f32::NEG_INFINITY) {
                    self.tokens.push((index * STRIDE + offset) as u32);
                    self.logits.push(logit);
                }
            }
        }
        self.weights.clear();
        self.weights.extend(self.logits.iter().map(|x| exp_nonpositive(x - max)));
        self.total = self.weights.iter().map(|&weight| f64::from(weight)).sum();
    }
}

/// Number of values that are compared at once. Most strides contain no match, which a vector comparison shows.
const STRIDE: usize = 16;

/// Returns the histogram cell of a logit that is `gap >= 0` smaller than the largest. The conversion does not saturate,
/// which would take twice as long.
fn cell(gap: f32) -> u32 {
    // Adding 1.5 * 2^23 rounds to an integer and leaves it in the low bits.
    const ROUND: f32 = 12_582_912.0;
    let (scaled, last) = (gap * RESOLUTION, (CELLS - 1) as f32);
    (if scaled < last { scaled } else { last } + ROUND).to_bits() - ROUND.to_bits()
}

/// Sums the values in eight lanes, because additions one after the other wait for each other.
fn sum(values: &[f64]) -> f64 {
    const LANES: usize = 8;
    let mut lanes = [0.0; LANES];
    let (strides, rest) = values.as_chunks::<LANES>();
    for stride in strides {
        for (lane, value) in lanes.iter_mut().zip(stride) {
            *lane += value;
        }
    }
    lanes.iter().chain(rest).sum()
}

/// Returns the largest value of a row, NaN if the row contains one, and -inf for an empty row.
pub(super) fn largest(row: &[f32]) -> f32 {
    let (mut best, mut nan) = ([f32::NEG_INFINITY; STRIDE], [false; STRIDE]);
    let (strides, rest) = row.as_chunks::<STRIDE>();
    for stride in strides {
        for lane in 0..STRIDE {
            best[lane] = if stride[lane] > best[lane] { stride[lane] } else { best[lane] };
            nan[lane] |= stride[lane].is_nan();
        }
    }
    let max = best.iter().chain(rest).fold(f32::NEG_INFINITY, |best, &x| if x > best { x } else { best });
    if nan.contains(&true) || rest.iter().any(|x| x.is_nan()) { f32::NAN } else { max }
}

/// Returns the index of the largest value, the lowest of equal ones; 0 if no value compares.
fn argmax(row: &[f32]) -> u32 {
    let max = largest(row);
    row.iter().position(|&x| x >= max).unwrap_or(0) as u32
}
