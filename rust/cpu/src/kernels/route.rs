//! Choice of the experts for a row.

use super::exp::exp;
use crate::isa::{Kernel, LANES, Simd, Vector};

/// Chooses the experts with the largest logits, the first of equal ones, and their weights: the softmax over all
/// logits.
pub(crate) struct Route<'a> {
    /// Logits of the router; overwritten.
    pub(crate) logits: &'a mut [f32],
    /// Whether weights are divided by their sum.
    pub(crate) normalized: bool,
    /// Chosen experts, `[per_token]`, distinct for any logits.
    pub(crate) chosen: &'a mut [usize],
    /// Weights of the experts in `chosen`, `[per_token]`.
    pub(crate) shares: &'a mut [f32],
}

impl Kernel for Route<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let mut len = 0;
        for (id, x) in self.logits.iter().enumerate() {
            let at = self.chosen[..len].iter().position(|&other| *x > self.logits[other]).unwrap_or(len);
            if at < self.chosen.len() {
                len = (len + 1).min(self.chosen.len());
                self.chosen.copy_within(at..len - 1, at + 1);
                self.chosen[at] = id;
            }
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::isa::Isa;

    #[test]
    fn rows_go_to_the_largest_logits() {
        let cases: [(&[f32], &[usize]); 5] = [
            (&[0.0, 3.0, -1.0, 3.0, 2.0], &[1, 3, 4]),
            (&[1.0, 1.0, 1.0, 1.0], &[0, 1, 2]),
            (&[-5.0, -4.0, -3.0], &[2, 1, 0]),
            (&[f32::NEG_INFINITY, 0.0, f32::NEG_INFINITY, -1.0], &[1, 3, 0]),
            (&[9.0; 40], &[0, 1, 2]),
        ];
        for (logits, expected) in cases {
            let exps: Vec<f64> = logits.iter().map(|&x| f64::from(x).exp()).collect();
            for (isa, normalized) in Isa::available().into_iter().flat_map(|isa| [(isa, false), (isa, true)]) {
                let (mut chosen, mut shares) = ([99; 3], [f32::NAN; 3]);
                let mut logits = logits.to_vec();
                isa.run(Route { logits: &mut logits, normalized, chosen: &mut chosen, shares: &mut shares });
                assert_eq!(chosen[..], *expected, "{}", isa.name());
                let total: f64 = if normalized { expected.iter().map(|&id| exps[id]).sum() } else { exps.iter().sum() };
                for (share, &id) in shares.iter().zip(expected) {
                    assert!((f64::from(*share) - exps[id] / total).abs() < 1e-6, "{}: {share}", isa.name());
                }
            }
        }
    }

    #[test]
    fn nan_is_not_lost_and_experts_differ() {
        for isa in Isa::available() {
            for at in 0..5 {
                let (mut chosen, mut shares, mut logits) = ([99; 2], [0.0; 2], [0.5, 1.5, 2.5, 3.5, 4.5]);
                logits[at] = f32::NAN;
                isa.run(Route { logits: &mut logits, normalized: true, chosen: &mut chosen, shares: &mut shares });
                assert!(chosen[0] != chosen[1] && chosen.iter().all(|&id| id < 5), "{}: {chosen:?}", isa.name());
                assert!(shares.iter().all(|share| share.is_nan()), "{}: {shares:?}", isa.name());
            }
        }
    }
}
