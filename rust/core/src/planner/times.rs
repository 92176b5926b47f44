//! Costs of steps: given tables, corrected by the measured times of steps. Measures and chooses nothing.

use crate::cost_model::CostModel;

/// Weight of one step's time in the estimate of the machine's speed. A slow-down shows after about 16 steps. One
/// outlier moves the estimate by at most 6 %, this weight times the largest deviation in [`TIME_BOUNDS`].
const MACHINE_WEIGHT: f64 = 0.06;
/// Weight of one step's time in the cost of its own batch and K. It is a quarter of [`MACHINE_WEIGHT`], so that a
/// drift first counts as a change of the machine's speed.
const TIME_WEIGHT: f64 = 0.015;
/// Weight of a trial's time. A K that is not chosen is timed once in hundreds of steps, so a single time has to
/// count.
const TRIAL_WEIGHT: f64 = 0.2;
/// Bounds of a measured time as multiples of the expected time. Larger deviations come from page faults, other
/// processes or clock changes, not from the step.
const TIME_BOUNDS: (f64, f64) = (0.5, 2.0);
/// Weight of one mixed step's time in the cost of mixing. It corresponds to ten steps, because few steps are
/// mixed if mixing does not pay.
const MIXED_WEIGHT: f64 = 0.1;
/// Bounds of a mixed step's time as multiples of the sum of its parts. The upper bound is wide, because a host may
/// have graphs for equal K only.
const MIXED_BOUNDS: (f64, f64) = (0.5, 4.0);

/// Costs of steps of one kind: without adapters, or with one.
#[derive(Clone, Debug)]
struct Table {
    costs: CostModel,
    /// Whether a step was timed, by batch size and K of the grid as in `costs`. The time of the first one teaches
    /// nothing, because a kernel may be compiled or a graph uploaded in it.
    timed: Vec<bool>,
}

impl Table {
    fn new(costs: CostModel) -> Self {
        let timed = vec![false; costs.table().len()];
        Self { costs, timed }
    }

    /// Notes a step of `batch` requests with `k` drafts each. Returns true if it is the first step whose batch and K
    /// are rounded up to the same grid point.
    fn is_first(&mut self, batch: usize, k: usize) -> bool {
        let (batches, ks) = (self.costs.batches(), self.costs.ks());
        let row = batches.partition_point(|&other| other < batch).min(batches.len() - 1);
        let column = ks.partition_point(|&other| other < k).min(ks.len() - 1);
        !std::mem::replace(&mut self.timed[row * ks.len() + column], true)
    }
}

/// Times of steps in milliseconds by batch and K, refined by measurements.
///
/// Steps in which a request has a `LoRA` adapter have a table of their own, if it is given. The machine's speed and the
/// cost of mixing are the same for both.
#[derive(Clone, Debug)]
pub(super) struct StepTimes {
    base: Table,
    with_lora: Option<Table>,
    /// Ratio of the machine's current times to those of the tables.
    scale: f64,
    /// Ratio of the time of a mixed step, whose requests draft different numbers, to the sum of its parts.
    mixed: f64,
}

impl StepTimes {
    pub(super) fn new(costs: CostModel) -> Self {
        Self { base: Table::new(costs), with_lora: None, scale: 1.0, mixed: 1.0 }
    }

    /// Sets the costs of steps in which a request has a `LoRA` adapter.
    pub(super) fn set_lora_costs(&mut self, costs: CostModel) {
        self.with_lora = Some(Table::new(costs));
    }

    /// Returns the current costs of steps in which a request has a `LoRA` adapter, or of steps in which none has. Only
    /// ratios of costs are meaningful: if the whole machine slows down, the costs stay the same.
    pub(super) fn costs(&self, has_lora: bool) -> &CostModel {
        &self.with_lora.as_ref().filter(|_| has_lora).unwrap_or(&self.base).costs
    }

    /// Returns the ratio of a mixed step's time to the sum of its parts.
    pub(super) fn mixed(&self) -> f64 {
        self.mixed
    }

    /// Returns whether the table covers this batch size, so that a step's time can refine it.
    pub(super) fn covers(&self, batch: usize, has_lora: bool) -> bool {
        let batches = self.costs(has_lora).batches();
        batch >= batches[0] && batch <= batches[batches.len() - 1]
    }

    /// Records the time `ms` of a mixed step, whose parts cost `parts`.
    pub(super) fn observe_mixed(&mut self, ms: f64, parts: f64) {
        let factor = (ms / (self.scale * parts)).clamp(MIXED_BOUNDS.0, MIXED_BOUNDS.1);
        self.mixed += MIXED_WEIGHT * (factor - self.mixed);
    }

    /// Records the time `ms` of a step of `batch` requests with `k` drafts each, of which one or more have an adapter
    /// if `has_lora`. If `chosen`, the time also corrects the machine's speed, which applies to every K. The cost itself
    /// is corrected unless this is the first step of a trial. The first step of a batch size and K corrects neither.
    pub(super) fn observe(
        &mut self,
        (batch, k, has_lora): (usize, usize, bool),
        ms: f64,
        chosen: bool,
        first_of_trial: bool,
    ) {
        let table = self.with_lora.as_mut().filter(|_| has_lora).unwrap_or(&mut self.base);
        if table.is_first(batch, k) {
            return;
        }
        let expected = table.costs.ms(batch, k);
        let surprise = (ms / (self.scale * expected)).clamp(TIME_BOUNDS.0, TIME_BOUNDS.1);
        if chosen {
            self.scale *= 1.0 + MACHINE_WEIGHT * (surprise - 1.0);
        }
        if !first_of_trial {
            let weight = if chosen { TIME_WEIGHT } else { TRIAL_WEIGHT };
            // A K outside the grid teaches nothing about it; the grid of a host need not reach K.
            let _ = table.costs.observe(batch, k, expected * surprise, weight);
        }
    }
}
