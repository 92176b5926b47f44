//! Log probabilities of emitted tokens and of the most probable ones. Chooses no tokens.
//!
//! The torch reference is `specrs.verify.logprobs`, which has equal ranks for equal values. Logarithms may differ from
//! it in their last bits.

use super::LOGPROBS_ALL;
use super::filter::largest;
use crate::math::{exp_nonpositive, ln};
use std::cmp::Ordering;

/// Values that `logprobs` reports, with vLLM's names.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LogprobsMode {
    /// `log_softmax` of the model's logits.
    #[default]
    RawLogprobs,
    /// Logits of the model.
    RawLogits,
    /// `log_softmax` of the logits after masks, penalties, temperature and filters. A greedy row has no temperature and
    /// no filters.
    ProcessedLogprobs,
    /// Logits after masks, penalties, temperature and filters.
    ProcessedLogits,
}

impl LogprobsMode {
    /// Returns the mode with this name, or `None` if there is none.
    pub fn of_name(name: &str) -> Option<Self> {
        Some(match name {
            "raw_logprobs" => Self::RawLogprobs,
            "raw_logits" => Self::RawLogits,
            "processed_logprobs" => Self::ProcessedLogprobs,
            "processed_logits" => Self::ProcessedLogits,
            _ => return None,
        })
    }

    /// Returns whether the values come from logits after masks, penalties, temperature and filters.
    pub fn is_processed(self) -> bool {
        matches!(self, Self::ProcessedLogprobs | Self::ProcessedLogits)
    }

    /// Returns whether the values are log probabilities rather than logits.
    pub fn is_normalized(self) -> bool {
        matches!(self, Self::RawLogprobs | Self::ProcessedLogprobs)
    }
}

/// Maximum number of top tokens that are kept sorted while a row is read. If more are asked for, they are selected
/// first and then sorted.
const INSERTED: usize = 64;

/// Log probabilities of m tokens, with the n = `num_top` most probable tokens for each.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TokenLogprobs {
    /// n, the number of most probable tokens per token.
    pub num_top: usize,
    /// Log probability of each token, `[m]`.
    pub values: Vec<f32>,
    /// Rank of each token, `[m]`, 1 for the most probable; of equally probable tokens the lowest id ranks first.
    pub ranks: Vec<i64>,
    /// Ids of the most probable tokens, `[m, n]`, in the order of ranks.
    pub top_ids: Vec<i64>,
    /// Log probabilities of the most probable tokens, `[m, n]`.
    pub top_values: Vec<f32>,
}

impl TokenLogprobs {
    /// Makes an empty list with room for `count` tokens over V ids. The number of top tokens follows from `logprobs`,
    /// the request's parameter.
    pub fn with_top(logprobs: i64, vocab_size: usize, count: usize) -> Self {
        let num_top = if logprobs == LOGPROBS_ALL { vocab_size } else { (logprobs.max(0) as usize).min(vocab_size) };
        let mut empty = Self { num_top, ..Self::default() };
        empty.top_ids.reserve_exact(count * num_top);
        empty.top_values.reserve_exact(count * num_top);
        empty
    }

    /// Appends the log probability of `token` from a row `[V]` of values. `num_top` must be at most V.
    pub fn push(&mut self, row: &[f32], token: usize) {
        let value = row[token];
        // Equal values rank by id.
        let before = row[..token].iter().filter(|&&x| x >= value).count();
        let after = row[token + 1..].iter().filter(|&&x| x > value).count();
        self.values.push(value);
        self.ranks.push((1 + before + after) as i64);
        let mut top: Vec<(f32, usize)> = Vec::with_capacity(self.num_top + 1);
        if self.num_top <= INSERTED {
            // Most values are below the least of the top ones, and one comparison tells.
            let mut least = f32::NEG_INFINITY;
            for (index, &x) in row.iter().enumerate() {
                if top.len() < self.num_top || x > least {
                    let at = top.partition_point(|&(other, _)| other >= x);
                    top.insert(at, (x, index));
                    top.truncate(self.num_top);
                    least = if top.len() < self.num_top {
                        f32::NEG_INFINITY
                    } else {
                        top.last().map_or(f32::INFINITY, |last| last.0)
                    };
                }
            }
        } else {
            top.extend(row.iter().enumerate().map(|(index, &x)| (x, index)));
            let order = |a: &(f32, usize), b: &(f32, usize)| {
                b.0.partial_cmp(&a.0).unwrap_or(Ordering::Equal).then(a.1.cmp(&b.1))
            };
            if self.num_top < top.len() {
                top.select_nth_unstable_by(self.num_top, order);
                top.truncate(self.num_top);
            }
            top.sort_unstable_by(order);
        }
        self.top_ids.extend(top.iter().map(|&(_, index)| index as i64));
        self.top_values.extend(top.iter().map(|&(x, _)| x));
    }
}

/// Replaces a row `[V]` of logits by the logarithms of their softmax.
pub fn log_softmax(row: &mut [f32]) {
    let max = largest(row);
    let sum: f64 = row.iter().map(|&x| f64::from(exp_nonpositive(x - max))).sum();
    let log_sum = ln(sum) as f32;
    for x in row {
        *x = *x - max - log_sum;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn top(row: &[f32], token: usize, num_top: usize) -> TokenLogprobs {
        let mut found = TokenLogprobs { num_top, ..TokenLogprobs::default() };
        found.push(row, token);
        found
    }

    #[test]
    fn equal_values_rank_by_id_however_many_are_asked_for() {
        let mut row = vec![-9.0; 200];
        (row[3], row[7], row[40], row[41]) = (1.0, 2.0, 1.0, 1.0);
        for num_top in [0, 1, 3, 7, INSERTED, INSERTED + 1, 199, 200] {
            let found = top(&row, 40, num_top);
            assert_eq!(found.ranks, [3]);
            let mut expected: Vec<i64> = vec![7, 3, 40, 41];
            expected.extend((0..200).filter(|id| ![3, 7, 40, 41].contains(id)));
            assert_eq!(found.top_ids, expected[..num_top], "{num_top}");
            assert!(
                found.top_values.iter().zip(&found.top_ids).all(|(x, &id)| x.to_bits() == row[id as usize].to_bits())
            );
        }
    }

    #[test]
    fn excluded_tokens_rank_after_all_others() {
        let none = f32::NEG_INFINITY;
        let row = [none, 0.0, none, -1.0, none, none, none, none, none, none, none, none, none, none, none, none, none];
        assert_eq!(top(&row, 2, 2).ranks, [4]);
        assert_eq!(top(&row, 2, 2).top_ids, [1, 3]);
        assert_eq!(top(&row, 2, 4).top_ids, [1, 3, 0, 2]);
    }

    #[test]
    fn probabilities_add_up_to_one() {
        let mut row: Vec<f32> = (0..1000).map(|i| ((i * 37) % 101) as f32 / 7.0).collect();
        row[5] = f32::NEG_INFINITY;
        let exact: f64 = row.iter().map(|&x| f64::from(x).exp()).sum::<f64>().ln();
        let logits = row.clone();
        log_softmax(&mut row);
        assert!((row.iter().map(|&x| f64::from(x).exp()).sum::<f64>() - 1.0).abs() < 1e-6);
        assert!(row.iter().zip(&logits).skip(6).all(|(&y, &x)| (f64::from(y) - (f64::from(x) - exact)).abs() < 2e-6));
        assert!(row[5].is_infinite());
    }
}
