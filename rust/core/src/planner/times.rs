//! What launches cost by now: a table that is given, and what the launches' own times say since. Measures and chooses nothing.

use crate::cost_model::CostModel;

/// Weight of one launch's time in how fast the machine is: a slow-down shows after some 16 launches, and one outlier moves it by
/// [`TIME_BOUNDS`] times this at the most, 6 %.
const MACHINE_WEIGHT: f64 = 0.06;
/// Weight in the cost of its own batch and K. A quarter of the machine's, so that a drift is first taken for the machine's.
const TIME_WEIGHT: f64 = 0.015;
/// Weight of a trial's time: a K that is not the chosen one is timed once in hundreds of launches, so one time has to count.
const TRIAL_WEIGHT: f64 = 0.2;
/// A time counts between these multiples of what was expected: a page fault, another process or a clock change is not the launch.
const TIME_BOUNDS: (f64, f64) = (0.5, 2.0);
/// Weight of one mixed launch's time in what such launches take: ten, because few launches are mixed where they do not pay.
const MIXED_WEIGHT: f64 = 0.1;
/// How far below and above the sum of its parts a mixed launch may be: wide above, since a host may have graphs for equal K alone.
const MIXED_BOUNDS: (f64, f64) = (0.5, 4.0);

/// Milliseconds of launches by batch and K, refined as they are timed.
#[derive(Clone, Debug)]
pub(super) struct LaunchTimes {
    costs: CostModel,
    /// How much slower the machine is by now than when `costs` were measured.
    scale: f64,
    /// How much longer a launch takes whose requests draft differently than its parts.
    mixed: f64,
}

impl LaunchTimes {
    pub(super) fn new(costs: CostModel) -> Self {
        Self { costs, scale: 1.0, mixed: 1.0 }
    }

    /// Costs by now. Only their ratios mean anything: a machine that slows down as a whole does not change them.
    pub(super) fn costs(&self) -> &CostModel {
        &self.costs
    }

    /// What a launch costs whose requests differ, over the sum of its parts.
    pub(super) fn mixed(&self) -> f64 {
        self.mixed
    }

    /// Whether times of such a batch say something of the table.
    pub(super) fn covers(&self, batch: usize) -> bool {
        let batches = self.costs.batches();
        batch >= batches[0] && batch <= batches[batches.len() - 1]
    }

    /// A launch whose requests drafted differently took `ms`; its parts cost `parts`.
    pub(super) fn observe_mixed(&mut self, ms: f64, parts: f64) {
        let factor = (ms / (self.scale * parts)).clamp(MIXED_BOUNDS.0, MIXED_BOUNDS.1);
        self.mixed += MIXED_WEIGHT * (factor - self.mixed);
    }

    /// A launch of `batch` requests with `k` drafts each took `ms`. The `chosen` K tells of the machine, too: one that slows down slows
    /// down every K, also those that are not tried now. The cost itself moves unless this is the first launch of a trial.
    pub(super) fn observe(&mut self, batch: usize, k: usize, ms: f64, chosen: bool, first_of_trial: bool) {
        let expected = self.costs.ms(batch, k);
        let surprise = (ms / (self.scale * expected)).clamp(TIME_BOUNDS.0, TIME_BOUNDS.1);
        if chosen {
            self.scale *= 1.0 + MACHINE_WEIGHT * (surprise - 1.0);
        }
        if !first_of_trial {
            let weight = if chosen { TIME_WEIGHT } else { TRIAL_WEIGHT };
            // A K outside the grid teaches nothing about it; the grid of a host need not reach K.
            let _ = self.costs.observe(batch, k, expected * surprise, weight);
        }
    }
}
