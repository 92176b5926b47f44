//! Search for the most probable of some logits.

use crate::isa::{Kernel, LANES, Simd};

/// Returns whether a later logit `x` is the most probable so far: the first NaN wins, then the largest, then the lowest
/// id.
#[inline(always)]
pub fn better(x: f32, best: f32) -> bool {
    x > best || (x.is_nan() && !best.is_nan())
}

/// Finds the first most probable of `x` and its index, if it is better than `best`.
pub struct Argmax<'a> {
    /// Logits.
    pub x: &'a [f32],
    /// Largest logit so far; `-inf` if there is none.
    pub best: f32,
}

impl Kernel for Argmax<'_> {
    type Output = Option<(usize, f32)>;

    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> Option<(usize, f32)> {
        let (vectors, tail) = self.x.as_chunks::<LANES>();
        // Where all is finite and nothing larger, which is mostly, one look at each vector is enough.
        let (mut largest, mut finite) = (s.splat(self.best), s.splat(0.0));
        for x in vectors {
            let x = s.load(x);
            largest = s.max(x, largest);
            finite = s.fma(x, s.splat(0.0), finite);
        }
        let mut lanes = [0.0; LANES];
        s.store(largest, &mut lanes);
        let none = lanes.iter().all(|&x| !better(x, self.best)) && s.sum(finite) == 0.0;
        let skipped = if none { self.x.len() - tail.len() } else { 0 };
        let (mut found, mut best) = (None, self.best);
        for (i, &x) in self.x.iter().enumerate().skip(skipped) {
            if better(x, best) {
                (found, best) = (Some((i, x)), x);
            }
        }
        found
    }
}
