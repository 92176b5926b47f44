//! Choice of the experts for a row.

use super::exp::exp;
use super::sigmoid;
use crate::isa::{Kernel, LANES, Simd, Vector};

/// Number added to the sum of sigmoids before weights are divided by it, as in transformers.
const SUM_EPS: f32 = 1e-6;

/// Chooses the experts with the largest logits, the first of equal ones, and their weights: the softmax over all
/// logits, or the sigmoids of the chosen ones.
pub struct Route<'a> {
    /// Logits of the router; overwritten.
    pub logits: &'a mut [f32],
    /// Whether weights are divided by their sum.
    pub normalized: bool,
    /// Whether weights are sigmoids.
    pub sigmoids: bool,
    /// Numbers that are added to sigmoids for the choice, and not to weights, `[experts]`. If empty, the largest logits
    /// are chosen. Only with `sigmoids`.
    pub bias: &'a [f32],
    /// Chosen experts, `[per_token]`, distinct for any logits.
    pub chosen: &'a mut [usize],
    /// Weights of the experts in `chosen`, `[per_token]`.
    pub shares: &'a mut [f32],
}

impl Kernel for Route<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let biased = !self.bias.is_empty();
        if biased {
            self.logits.iter_mut().for_each(|x| *x = sigmoid(*x));
        }
        let score = |id: usize| if biased { self.logits[id] + self.bias[id] } else { self.logits[id] };
        let mut len = 0;
        for id in 0..self.logits.len() {
            let at = self.chosen[..len].iter().position(|&other| score(id) > score(other)).unwrap_or(len);
            if at < self.chosen.len() {
                len = (len + 1).min(self.chosen.len());
                self.chosen.copy_within(at..len - 1, at + 1);
                self.chosen[at] = id;
            }
        }
        if self.sigmoids {
            for (share, &id) in self.shares.iter_mut().zip(self.chosen.iter()) {
                *share = if biased { self.logits[id] } else { sigmoid(self.logits[id]) };
            }
            if self.normalized {
                let sum = self.shares.iter().sum::<f32>() + SUM_EPS;
                self.shares.iter_mut().for_each(|share| *share /= sum);
            }
            return;
        }
        let largest = s.splat(self.logits[self.chosen[0]]);
        let mut total = s.splat(0.0);
        for part in self.logits.chunks_mut(LANES) {
            let mut x: Vector = [f32::NEG_INFINITY; LANES];
            x[..part.len()].copy_from_slice(part);
            let exps = exp(s, s.sub(s.load(&x), largest));
            total = s.add(total, exps);
            s.store(exps, &mut x);
            part.copy_from_slice(&x[..part.len()]);
        }
        let total = s.sum(total);
        for (share, &id) in self.shares.iter_mut().zip(self.chosen.iter()) {
            *share = self.logits[id] / total;
        }
        if self.normalized {
            let sum: f32 = self.shares.iter().sum();
            self.shares.iter_mut().for_each(|share| *share /= sum);
        }
    }
}
