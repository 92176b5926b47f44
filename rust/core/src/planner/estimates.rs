//! Estimates of the probability that drafts are accepted: by position over all requests, and one factor on the odds for
//! each request.
//!
//! All figures are exponentially forgotten. The chance of a draft token is *conditional* on the acceptance of the
//! drafts before it. A request's factor compares its accepted drafts with the number that the overall figures expected.
//! So a request with few drafts counts as an average one, and a change of K does not change the factor.

/// Number of trials of a position after which the earlier evidence counts about a third. A rate of 0.7 is then known to
/// 0.03.
const OVERALL_TRIALS: f64 = 256.0;
/// Minimum number of steps over which the earlier evidence of a position is forgotten, so that one step of 256
/// requests does not replace all of it.
const OVERALL_STEPS: f64 = 16.0;
/// Acceptance assumed for the first position before any draft, measured with the bundled pair of models. It weighs
/// [`PRIOR_TRIALS`].
const FIRST_GUESS: f64 = 0.7;
/// Number of trials with which a position starts from the chance of the position before it. The number is small,
/// because deep positions are rarely reached and their own trials should soon outweigh it.
const PRIOR_TRIALS: f64 = 4.0;
/// Number of trials with which a request starts from the average: twelve accepted and twelve rejected. With 8, one
/// lucky draft of K = 7 would double a new request's odds.
const OWN_PRIOR_TRIALS: f64 = 24.0;
/// Number of drafts after which a request's earlier drafts count a third. So a text that changes from code to prose is
/// noticed within a paragraph.
const OWN_DRAFTS: f64 = 64.0;
/// Bounds of a chance, so that odds stay finite: within a factor of 500 of even odds.
const CHANCES: (f64, f64) = (0.002, 0.998);
/// A collapse multiplies a request's acceptance rate at the first draft position by this factor.
const COLLAPSE: f64 = 0.25;
/// Logarithm of the likelihood ratio at which a collapse of the acceptance is reported. On average a false alarm comes
/// at most once in e^6, about 400, drafts (Page, 1954). It costs one rebuild of draft KV.
const SUSPICION: f64 = 6.0;
/// Maximum chance that the likelihood ratio is computed with. At this chance each miss counts ln 4, so five misses in a
/// row report a collapse.
const SUSPECT_CHANCE: f64 = 0.8;
/// Number of drafts after a collapse within which no other collapse of the same request is reported, equal to
/// [`OWN_DRAFTS`]. It doubles each time, so that the draft KV of a request with poor drafts is rebuilt only a few
/// times.
const FIRST_PATIENCE: u32 = 64;

fn chance(accepted: f64, trials: f64) -> f64 {
    (accepted / trials).clamp(CHANCES.0, CHANCES.1)
}

#[derive(Clone, Copy, Debug, Default)]
struct Counts {
    trials: f64,
    accepted: f64,
}

/// Statistics of acceptance by position, over all requests.
#[derive(Clone, Debug)]
pub(crate) struct Overall {
    positions: Vec<Counts>,
    /// Counts of the step being recorded, by position.
    fresh: Vec<Counts>,
    chances: Vec<f64>,
    odds: Vec<f64>,
}

impl Overall {
    pub(crate) fn new(k: usize) -> Self {
        let mut positions = vec![Counts::default(); k];
        if let Some(first) = positions.first_mut() {
            *first = Counts { trials: PRIOR_TRIALS, accepted: FIRST_GUESS * PRIOR_TRIALS };
        }
        let mut overall =
            Self { positions, fresh: vec![Counts::default(); k], chances: vec![0.0; k], odds: vec![0.0; k] };
        overall.estimate();
        overall
    }

    /// Returns the conditional acceptance by position, `[K]`.
    pub(crate) fn chances(&self) -> &[f64] {
        &self.chances
    }

    /// Returns the conditional acceptance by position as odds, `[K]`.
    pub(crate) fn odds(&self) -> &[f64] {
        &self.odds
    }

    /// Counts one draft of the current step; `finish` adds the step to the statistics.
    pub(crate) fn record(&mut self, drafted: usize, accepted: usize) {
        for (position, fresh) in self.fresh[..drafted.min(accepted + 1)].iter_mut().enumerate() {
            fresh.trials += 1.0;
            fresh.accepted += f64::from(u8::from(position < accepted));
        }
    }

    /// Adds the counts of the current step, position by position. The more trials a step adds, the more weight older
    /// evidence loses.
    pub(crate) fn finish(&mut self) {
        if self.fresh.first().is_none_or(|first| first.trials == 0.0) {
            return; // whatever is recorded tried the first position
        }
        for (counts, fresh) in self.positions.iter_mut().zip(&mut self.fresh) {
            let window = OVERALL_TRIALS.max(OVERALL_STEPS * fresh.trials);
            let kept = window / (window + fresh.trials);
            counts.trials = counts.trials * kept + fresh.trials;
            counts.accepted = counts.accepted * kept + fresh.accepted;
            *fresh = Counts::default();
        }
        self.estimate();
    }

    /// Reduces the weight of what was observed at positions from `first` on to at most `trials` trials.
    pub(crate) fn doubt(&mut self, first: usize, trials: f64) {
        for counts in &mut self.positions[first..] {
            let share = (trials / counts.trials.max(trials)).min(1.0);
            counts.trials *= share;
            counts.accepted *= share;
        }
        self.estimate();
    }

    fn estimate(&mut self) {
        let mut before = None;
        for ((counts, value), odds) in self.positions.iter().zip(&mut self.chances).zip(&mut self.odds) {
            *value = match before {
                None => chance(counts.accepted, counts.trials),
                Some(before) => chance(counts.accepted + PRIOR_TRIALS * before, counts.trials + PRIOR_TRIALS),
            };
            *odds = *value / (1.0 - *value);
            before = Some(*value);
        }
    }
}

/// Statistics of one row's request.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Own {
    counts: Counts,
    /// Number of acceptances that the overall figures expected in the request's trials.
    expected: f64,
    /// Factor on the overall odds for this request.
    pub(crate) odds: f64,
    /// Evidence of a collapse, a CUSUM statistic (Page, Biometrika 41, 1954).
    suspicion: f64,
    cooldown: u32,
    patience: u32,
}

impl Own {
    pub(crate) const NEW: Self = Self {
        counts: Counts { trials: 0.0, accepted: 0.0 },
        expected: 0.0,
        odds: 1.0,
        suspicion: 0.0,
        cooldown: 0,
        patience: FIRST_PATIENCE,
    };

    /// Records one draft of at least one token. Returns whether the request's acceptance has collapsed; its statistics
    /// start again then.
    pub(crate) fn record(&mut self, drafted: usize, accepted: usize, chances: &[f64]) -> bool {
        let trials = drafted.min(accepted + 1);
        let first = self.odds * chances[0] / (1.0 - chances[0]);
        let collapsed = self.suspect(first / (1.0 + first), accepted > 0);
        let kept = OWN_DRAFTS / (OWN_DRAFTS + 1.0);
        self.counts.trials = self.counts.trials * kept + trials as f64;
        self.counts.accepted = self.counts.accepted * kept + accepted.min(trials) as f64;
        self.expected = self.expected * kept + chances[..trials].iter().sum::<f64>();
        self.odds = self.estimate();
        if collapsed {
            *self = Self { cooldown: self.patience, patience: self.patience.saturating_mul(2), ..Self::NEW };
        }
        collapsed
    }

    /// Returns the request's factor on the odds of acceptance. Half of the prior's trials count as accepted, both in
    /// the observed and in the expected number. So the factor changes little where acceptance is almost certain or
    /// almost impossible.
    fn estimate(&self) -> f64 {
        let (Counts { trials, accepted }, prior) = (self.counts, OWN_PRIOR_TRIALS / 2.0);
        let observed = (accepted + prior) / (trials - accepted + prior);
        let expected = (self.expected + prior) / (trials - self.expected + prior);
        observed / expected
    }

    /// Adds the acceptance of one first position to the evidence of a collapse, against `chance`, its estimate so far.
    /// Returns whether the evidence is sufficient.
    fn suspect(&mut self, chance: f64, accepted: bool) -> bool {
        self.cooldown = self.cooldown.saturating_sub(1);
        let chance = chance.min(SUSPECT_CHANCE);
        let collapsed = chance * COLLAPSE;
        let ratio = if accepted { COLLAPSE } else { (1.0 - collapsed) / (1.0 - chance) };
        self.suspicion = (self.suspicion + crate::math::ln(ratio)).max(0.0);
        self.suspicion > SUSPICION && self.cooldown == 0
    }
}
