//! The choice of K for each request of one step: the most expected tokens per millisecond. Estimates and remembers
//! nothing.
//!
//! With `c_i` requests that draft at least i tokens, a step of B requests costs
//! `ms(B, 0) + sum over i of (ms(c_i, i) - ms(c_i, i - 1))`. That is `ms(B, K)` if all draft K. Requests differ by one
//! factor on the odds of acceptance, so the better of two is better at every position. Level i is thus drafted by the
//! first requests in order of that factor.
//!
//! The ratio of tokens to milliseconds is maximised by Dinkelbach's iteration (Management Science 13(7), 1967). For a
//! rate r, it maximises `tokens - r * ms` level by level from the deepest, each with a running maximum; then r becomes
//! the rate of that choice. One update is O(B K). The result is exact if all requests may draft equally deep. With
//! differing bounds it is at least as good as any one K for all.

use crate::cost_model::CostModel;

/// Maximum number of Dinkelbach updates, far above the usual number: rates converge superlinearly.
const MAX_STEPS: usize = 16;

/// Request for which the choice picks a K. Candidates are sorted by `odds`, descending.
#[derive(Clone, Copy, Debug)]
pub(super) struct Candidate {
    /// Factor on the odds of acceptance at every position, for this request.
    pub(super) odds: f64,
    /// Maximum number of drafts.
    pub(super) cap: usize,
    /// Extra cost of the request's first draft in milliseconds, such as the catch-up of its draft KV.
    pub(super) penalty: f64,
}

/// Buffers of the choice, kept between steps so that they are allocated once.
#[derive(Clone, Debug)]
pub(super) struct Choice {
    k: usize,
    /// Number of elements per level, `max_rows + 1`. Level i is the i-th draft of a request.
    stride: usize,
    /// Cost `ms(b, 0)` of a step of b requests without drafts, `[stride]`; 0 for b = 0.
    base: Vec<f64>,
    /// Milliseconds that the i-th draft of c requests costs, `ms(c, i) - ms(c, i - 1)`, by `i - 1` and c,
    /// `[K, stride]`; 0 without requests.
    increments: Vec<f64>,
    /// Expected tokens that the first m candidates gain by their i-th draft, by `i - 1` and m, `[K, stride]`.
    gains: Vec<f64>,
    /// Number of the first m candidates that may draft i tokens, by `i - 1` and m, `[K, stride]`.
    counts: Vec<u32>,
    /// Sum of the penalties of the first m candidates, `[stride]`.
    penalties: Vec<f64>,
    /// Best number of candidates with an i-th draft if at most m may have one, by `i - 1` and m, `[K, stride]`.
    best: Vec<u32>,
    /// Maximum value (expected tokens less rate times milliseconds) that all deeper drafts add if at most m candidates
    /// have them, by m, `[stride]`.
    ahead: Vec<f64>,
    /// Probability, for each candidate, that all its drafts up to the present level are accepted, `[stride]`.
    reach: Vec<f64>,
    len: usize,
    depth: usize,
}

impl Choice {
    pub(super) fn new(max_rows: usize, k: usize) -> Self {
        let stride = max_rows + 1;
        Self {
            k,
            stride,
            base: vec![0.0; stride],
            increments: vec![0.0; k * stride],
            gains: vec![0.0; k * stride],
            counts: vec![0; k * stride],
            penalties: vec![0.0; stride],
            best: vec![0; k * stride],
            ahead: vec![0.0; stride],
            reach: vec![0.0; stride],
            len: 0,
            depth: 0,
        }
    }

    /// Copies the costs of `model`. They are exact at the grid's batch sizes and linear between them, as in the model.
    pub(super) fn set_costs(&mut self, model: &CostModel) {
        let most = self.stride - 1;
        let mut low = 1;
        for high in model.batches().iter().copied().filter(|&b| b > 1 && b < most).chain([most]) {
            for k in 0..=self.k {
                let increment = |batch| model.ms(batch, k) - if k == 0 { 0.0 } else { model.ms(batch, k - 1) };
                let (first, last) = (increment(low), increment(high));
                let out = if k == 0 { &mut self.base } else { &mut self.increments[(k - 1) * self.stride..] };
                let slope = (last - first) / (high - low).max(1) as f64;
                for (i, out) in out[low..=high].iter_mut().enumerate() {
                    *out = first + i as f64 * slope;
                }
            }
            low = high;
        }
    }

    /// Returns the cost of a step of `batch` requests without drafts, in milliseconds.
    pub(super) fn base_ms(&self, batch: usize) -> f64 {
        self.base[batch]
    }

    /// Returns the extra cost in milliseconds of the draft at index `level`, 0 for the first, for `count` requests.
    pub(super) fn increment_ms(&self, level: usize, count: usize) -> f64 {
        self.increments[level * self.stride + count]
    }

    /// Prepares the buffers for `candidates`, sorted by odds in descending order. `odds` are the overall odds of
    /// acceptance at each position.
    pub(super) fn set_candidates(&mut self, candidates: &[Candidate], odds: &[f64]) {
        self.len = candidates.len();
        self.depth = candidates.iter().map(|candidate| candidate.cap).max().unwrap_or(0).min(self.k);
        let mut penalty = 0.0;
        for (at, candidate) in candidates.iter().enumerate() {
            penalty += if candidate.cap > 0 { candidate.penalty } else { 0.0 };
            self.penalties[at + 1] = penalty;
        }
        self.reach[..self.len].fill(1.0);
        for (level, &odds) in odds[..self.depth].iter().enumerate() {
            let row = level * self.stride;
            let (mut gain, mut count) = (0.0, 0);
            (self.gains[row], self.counts[row]) = (0.0, 0);
            for (at, (candidate, reach)) in candidates.iter().zip(&mut self.reach[..self.len]).enumerate() {
                let scaled = candidate.odds * odds;
                let may = candidate.cap > level;
                *reach = if may { *reach * scaled / (1.0 + scaled) } else { 0.0 };
                gain += *reach;
                count += u32::from(may);
                self.gains[row + at + 1] = gain;
                self.counts[row + at + 1] = count;
            }
        }
    }

    /// Returns the expected tokens per millisecond if the candidates draft `ks`.
    pub(super) fn rate(&self, ks: &[usize]) -> f64 {
        let (mut tokens, mut ms) = (self.len as f64, self.base[self.len]);
        for level in 0..self.depth {
            let row = level * self.stride;
            let mut count = 0;
            for (at, _) in ks.iter().enumerate().filter(|(_, k)| **k > level) {
                tokens += self.gains[row + at + 1] - self.gains[row + at];
                count += 1;
                if level == 0 {
                    ms += self.penalties[at + 1] - self.penalties[at];
                }
            }
            if count == 0 {
                break;
            }
            ms += self.increments[row + count];
        }
        tokens / ms
    }

    /// Returns the best K for all candidates, each limited to its cap, and its rate. If caps make the K differ, the
    /// step costs `mixed` times the sum of its parts, but at most as much as if all drafted the largest K: a host that
    /// has graphs for equal K only pads the other requests.
    pub(super) fn best_uniform(&self, mixed: f64) -> (usize, f64) {
        let best = |best: (usize, f64), (k, rate, _)| if rate > best.1 { (k, rate) } else { best };
        self.uniform(mixed).fold((0, 0.0), best)
    }

    /// Returns the best element of `ks` below `pivot`, and the best at or above it: K, rate and milliseconds of each.
    /// `ks` must ascend, and all candidates must be allowed to draft as many.
    pub(super) fn best_around(&self, pivot: usize, ks: impl Iterator<Item = usize>) -> [Option<(usize, f64, f64)>; 2] {
        let mut best: [Option<(usize, f64, f64)>; 2] = [None; 2];
        let mut all = self.uniform(1.0);
        for found in ks.filter_map(|k| all.find(|found| found.0 == k)) {
            let side = &mut best[usize::from(found.0 >= pivot)];
            if side.is_none_or(|other| found.1 > other.1) {
                *side = Some(found);
            }
        }
        best
    }

    /// Iterates over one K for all candidates, from 0 up: K, rate and milliseconds.
    fn uniform(&self, mixed: f64) -> impl Iterator<Item = (usize, f64, f64)> {
        let (mut tokens, mut ms) = (self.len as f64, self.base[self.len]);
        let mut padded = ms;
        (0..=self.depth).map(move |k| {
            let Some(level) = k.checked_sub(1) else { return (0, tokens / ms, ms) };
            let all = level * self.stride + self.len;
            tokens += self.gains[all];
            let count = self.counts[all] as usize;
            ms += self.increments[level * self.stride + count];
            padded += self.increments[all];
            if level == 0 {
                ms += self.penalties[self.len];
                padded += self.penalties[self.len];
            }
            let ms = if count == self.len { ms } else { (ms * mixed).min(padded.max(ms)) };
            (k, tokens / ms, ms)
        })
    }

    /// Returns the cost of a step in which all requests are padded to the largest of `ks`, divided by the sum of the
    /// step's parts; at least 1. None unless caps are the only reason why the `ks` differ.
    pub(super) fn padding(&self, candidates: &[Candidate], ks: &[usize]) -> Option<f64> {
        let most = ks.iter().copied().max().unwrap_or(0);
        if ks.iter().zip(candidates).any(|(&k, candidate)| k != candidate.cap.min(most)) {
            return None;
        }
        let (mut ms, mut padded) = (self.base[self.len], self.base[self.len]);
        for level in 0..most {
            ms += self.increments[level * self.stride + self.counts[level * self.stride + self.len] as usize];
            padded += self.increments[level * self.stride + self.len];
        }
        Some((padded / ms).max(1.0))
    }

    /// Writes the best K of each candidate into `ks` and returns the rate. `guess` is the rate to begin with.
    pub(super) fn solve(&mut self, guess: f64, ks: &mut [usize]) -> f64 {
        let mut rate = guess;
        for _ in 0..MAX_STEPS {
            let next = self.improve(rate, ks);
            if (next - rate).abs() <= 1e-12 * rate {
                return next;
            }
            rate = next;
        }
        rate
    }

    /// Writes the best choice at `rate` into `ks` and returns that choice's own rate.
    fn improve(&mut self, rate: f64, ks: &mut [usize]) -> f64 {
        let len = self.len;
        self.ahead[..=len].fill(0.0);
        for level in (0..self.depth).rev() {
            let row = level * self.stride;
            let (increments, charge) = (&self.increments[row..row + self.stride], if level == 0 { rate } else { 0.0 });
            let (mut most, mut at) = (0.0, 0);
            let scan = self.ahead[..=len].iter_mut().zip(&mut self.best[row..]);
            let values = self.gains[row..].iter().zip(&self.counts[row..]).zip(&self.penalties);
            for (m, ((ahead, best), ((gain, &count), penalty))) in scan.zip(values).enumerate() {
                let value = gain - rate * increments[count as usize] - charge * penalty + *ahead;
                if value > most {
                    (most, at) = (value, m as u32);
                }
                (*ahead, *best) = (most, at);
            }
        }
        ks.fill(0);
        let (mut tokens, mut ms, mut m) = (len as f64, self.base[len], len);
        for level in 0..self.depth {
            let row = level * self.stride;
            m = self.best[row + m] as usize;
            if m == 0 {
                break;
            }
            tokens += self.gains[row + m];
            ms += self.increments[row + self.counts[row + m] as usize];
            if level == 0 {
                ms += self.penalties[m];
            }
            for (at, k) in ks[..m].iter_mut().enumerate() {
                *k += (self.counts[row + at + 1] - self.counts[row + at]) as usize;
            }
        }
        tokens / ms
    }
}
