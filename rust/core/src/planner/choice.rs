//! Which K each request drafts in one launch: the most expected tokens per millisecond. Estimates and remembers nothing.
//!
//! With `c_i` requests that draft at least i tokens, a launch of B requests costs
//! `ms(B, 0) + sum over i of (ms(c_i, i) - ms(c_i, i - 1))`, which is `ms(B, K)` where all draft K. Requests differ by one factor
//! on the odds of acceptance, so the better of two is better at every position, and level i is drafted by the first requests in
//! order of that factor. The ratio is maximised by Dinkelbach's iteration (Management Science 13(7), 1967): for a rate r, maximise
//! `tokens - r * ms` level by level from the deepest, each with a running maximum; then r becomes what that choice yields.
//! O(B K) a step. Exact where all may draft equally deep; with differing bounds still at least as good as any one K for all.

use crate::cost_model::CostModel;

/// Far more than it takes: rates grow superlinearly towards the best.
const MAX_STEPS: usize = 16;

/// One request as the choice sees it, in order of `odds` descending.
#[derive(Clone, Copy, Debug)]
pub(super) struct Candidate {
    /// Factor on the odds of acceptance at every position.
    pub(super) odds: f64,
    /// The most it may draft.
    pub(super) cap: usize,
    /// What its first draft costs besides, in milliseconds.
    pub(super) penalty: f64,
}

/// Buffers of the choice, kept between launches.
#[derive(Clone, Debug)]
pub(super) struct Choice {
    k: usize,
    /// Elements of a level, `max_rows + 1`.
    stride: usize,
    /// `[stride]`: `ms(b, 0)`; 0 for none.
    base: Vec<f64>,
    /// `[K, stride]`: `ms(c, i) - ms(c, i - 1)` at level i - 1; 0 for none.
    steps: Vec<f64>,
    /// `[K, stride]`: expected tokens that the first m candidates gain at a level.
    gains: Vec<f64>,
    /// `[K, stride]`: how many of the first m candidates may draft at a level.
    counts: Vec<u32>,
    /// `[stride]`: penalties of the first m candidates.
    penalties: Vec<f64>,
    /// `[K, stride]`: the best number of candidates at a level, of at most m.
    best: Vec<u32>,
    /// `[stride]`: the most that deeper levels yield to at most m candidates.
    ahead: Vec<f64>,
    /// `[stride]`: how likely each candidate's drafts stand up to a level.
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
            steps: vec![0.0; k * stride],
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

    /// Takes over the costs of `model`: exact at the grid's batch sizes and linear between them, as the model is.
    pub(super) fn set_costs(&mut self, model: &CostModel) {
        let most = self.stride - 1;
        let mut low = 1;
        for high in model.batches().iter().copied().filter(|&b| b > 1 && b < most).chain([most]) {
            for k in 0..=self.k {
                let step = |batch| model.ms(batch, k) - if k == 0 { 0.0 } else { model.ms(batch, k - 1) };
                let (first, last) = (step(low), step(high));
                let out = if k == 0 { &mut self.base } else { &mut self.steps[(k - 1) * self.stride..] };
                let slope = (last - first) / (high - low).max(1) as f64;
                for (i, out) in out[low..=high].iter_mut().enumerate() {
                    *out = first + i as f64 * slope;
                }
            }
            low = high;
        }
    }

    /// `ms(b, 0)`.
    pub(super) fn base_ms(&self, batch: usize) -> f64 {
        self.base[batch]
    }

    /// What the draft at `level` costs for `count` requests.
    pub(super) fn step_ms(&self, level: usize, count: usize) -> f64 {
        self.steps[level * self.stride + count]
    }

    /// Prepares for these candidates, in order of odds descending; `odds` are those of acceptance at each position.
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

    /// Expected tokens per millisecond if the candidates draft `ks`.
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
            ms += self.steps[row + count];
        }
        tokens / ms
    }

    /// The best of one K for all, cut to what each may draft, and its rate. Where that comes to differing K, they cost `mixed` times
    /// what they should.
    pub(super) fn best_uniform(&self, mixed: f64) -> (usize, f64) {
        let best = |best: (usize, f64), (k, rate, _)| if rate > best.1 { (k, rate) } else { best };
        self.uniform(mixed).fold((0, 0.0), best)
    }

    /// The best of `ks` for all below `pivot`, and from there on: K, rate and milliseconds. `ks` ascend; all may draft as many.
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

    /// One K for all after the other: K, rate and milliseconds.
    fn uniform(&self, mixed: f64) -> impl Iterator<Item = (usize, f64, f64)> {
        let (mut tokens, mut ms) = (self.len as f64, self.base[self.len]);
        (0..=self.depth).map(move |k| {
            let Some(level) = k.checked_sub(1) else { return (0, tokens / ms, ms) };
            let all = level * self.stride + self.len;
            tokens += self.gains[all];
            let count = self.counts[all] as usize;
            ms += self.steps[level * self.stride + count];
            if level == 0 {
                ms += self.penalties[self.len];
            }
            let ms = ms * if count == self.len { 1.0 } else { mixed };
            (k, tokens / ms, ms)
        })
    }

    /// Writes the best K of each candidate and returns the rate; `guess` is a rate to begin with.
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

    /// The choice that is best at `rate`, and its own rate.
    fn improve(&mut self, rate: f64, ks: &mut [usize]) -> f64 {
        let len = self.len;
        self.ahead[..=len].fill(0.0);
        for level in (0..self.depth).rev() {
            let row = level * self.stride;
            let (steps, charge) = (&self.steps[row..row + self.stride], if level == 0 { rate } else { 0.0 });
            let (mut most, mut at) = (0.0, 0);
            let scan = self.ahead[..=len].iter_mut().zip(&mut self.best[row..]);
            let values = self.gains[row..].iter().zip(&self.counts[row..]).zip(&self.penalties);
            for (m, ((ahead, best), ((gain, &count), penalty))) in scan.zip(values).enumerate() {
                let value = gain - rate * steps[count as usize] - charge * penalty + *ahead;
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
            ms += self.steps[row + self.counts[row + m] as usize];
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
