//! How likely drafts are to be accepted: by position over all requests, and one factor on the odds for each request.
//!
//! All figures are exponentially forgotten. The chance of a draft token is *conditional*: given that those before it stood. A request's
//! factor compares what it was accepted with what the overall figures expected of it, so that a request with few drafts counts as
//! the average one, and a change of K does not change the factor.

/// Trials of a position after which half of what was known is forgotten, about: a rate of 0.7 is then known to 0.03. In a large batch
/// this many launches' worth, so that one launch of 256 requests does not stand for everything.
const OVERALL_TRIALS: f64 = 256.0;
const OVERALL_LAUNCHES: f64 = 16.0;
/// Acceptance that is assumed of the first position before anything is known, as the bundled pair has it. It counts [`PRIOR_TRIALS`].
const FIRST_GUESS: f64 = 0.7;
/// Trials that a position takes after the one before it: few, since deep positions are rarely reached and soon outweigh it.
const PRIOR_TRIALS: f64 = 4.0;
/// Trials that a request takes after the average one: twelve accepted and twelve not. With 8, one lucky draft of K = 7 would double a
/// new request's odds.
const OWN_PRIOR_TRIALS: f64 = 24.0;
/// Drafts after which a request's own past counts a third: a text that turns from code to prose is noticed within a paragraph.
const OWN_DRAFTS: f64 = 64.0;
/// Bounds of a chance, so that odds stay finite: within a factor of 500 of even.
const CHANCES: (f64, f64) = (0.002, 0.998);
/// A collapse is a first position that stands a quarter as often as before.
const COLLAPSE: f64 = 0.25;
/// Logarithm of the likelihood ratio at which one is reported, and the highest chance that it reckons with: five misses in a row, each of
/// which counts ln 4. A false alarm comes at most once in e^6 = 400 drafts (Page, 1954), and costs one rebuilt draft KV.
const SUSPICION: f64 = 6.0;
const SUSPECT_CHANCE: f64 = 0.8;
/// Drafts before the next one may be found in the same request, as many as its past counts; doubles each time, so that a request
/// whose draft is simply bad is rebuilt a few times and no more.
const FIRST_PATIENCE: u32 = 64;

fn chance(accepted: f64, trials: f64) -> f64 {
    (accepted / trials).clamp(CHANCES.0, CHANCES.1)
}

#[derive(Clone, Copy, Debug, Default)]
struct Counts {
    trials: f64,
    accepted: f64,
}

/// Acceptance by position, over all requests.
#[derive(Clone, Debug)]
pub(crate) struct Overall {
    positions: Vec<Counts>,
    /// What the launch being recorded adds.
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

    /// Conditional acceptance by position.
    pub(crate) fn chances(&self) -> &[f64] {
        &self.chances
    }

    /// The same as odds.
    pub(crate) fn odds(&self) -> &[f64] {
        &self.odds
    }

    /// Counts one draft towards the launch; `finish` brings it in.
    pub(crate) fn record(&mut self, drafted: usize, accepted: usize) {
        for (position, fresh) in self.fresh[..drafted.min(accepted + 1)].iter_mut().enumerate() {
            fresh.trials += 1.0;
            fresh.accepted += f64::from(u8::from(position < accepted));
        }
    }

    /// Forgets as much as is new, position by position, and takes in what is.
    pub(crate) fn finish(&mut self) {
        if self.fresh.first().is_none_or(|first| first.trials == 0.0) {
            return; // whatever is recorded tried the first position
        }
        for (counts, fresh) in self.positions.iter_mut().zip(&mut self.fresh) {
            let window = OVERALL_TRIALS.max(OVERALL_LAUNCHES * fresh.trials);
            let kept = window / (window + fresh.trials);
            counts.trials = counts.trials * kept + fresh.trials;
            counts.accepted = counts.accepted * kept + fresh.accepted;
            *fresh = Counts::default();
        }
        self.estimate();
    }

    /// Lets what is known of positions from `first` on count at most `trials` from here on.
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

/// What is known of one row's request.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Own {
    counts: Counts,
    /// Acceptances that the overall figures expected in its trials.
    expected: f64,
    /// Factor on the overall odds.
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

    /// Takes in one draft of at least one token; true if its acceptance has collapsed. What was known is forgotten then.
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

    /// Half the prior's trials were accepted, of those observed and of those expected: little is learned where acceptance is nearly
    /// sure, or nearly never.
    fn estimate(&self) -> f64 {
        let (Counts { trials, accepted }, prior) = (self.counts, OWN_PRIOR_TRIALS / 2.0);
        let observed = (accepted + prior) / (trials - accepted + prior);
        let expected = (self.expected + prior) / (trials - self.expected + prior);
        observed / expected
    }

    /// Weighs one first position against `chance`, what it was until now.
    fn suspect(&mut self, chance: f64, accepted: bool) -> bool {
        self.cooldown = self.cooldown.saturating_sub(1);
        let chance = chance.min(SUSPECT_CHANCE);
        let collapsed = chance * COLLAPSE;
        let ratio = if accepted { COLLAPSE } else { (1.0 - collapsed) / (1.0 - chance) };
        self.suspicion = (self.suspicion + crate::math::ln(ratio)).max(0.0);
        self.suspicion > SUSPICION && self.cooldown == 0
    }
}
