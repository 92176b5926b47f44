//! Exploration: when a planner drafts more or less than its choice to learn. Chooses nothing by the results.
//!
//! *Probes*: positions that no request drafts yield no evidence, and at K = 0 none do. So the planner saves
//! [`super::PROBE_SHARE`] of the time until it pays for a probe: one request, in turn, drafts up to [`PROBE_REACH`]
//! tokens more than any does, [`PROBE_DRAFTS`] times. A useless draft costs no more than that share, and a draft that
//! becomes good is found. Where mixed steps are slow a probe costs more, so there are fewer; then trials show more of
//! the acceptance, because all requests draft in them.
//!
//! *Trials*: the costs of a K that is not in use stay as they were measured, and the machine may have been busy then.
//! So [`super::TRIAL_SHARE`] of the time goes into steps at another K for all requests, alternately the best one
//! below and above the chosen K. Their times are compared with the steps around them, not with the times when the
//! table was made.

use super::{NO_K, SpeculationPlanner};

/// Minimum cost that is assumed for a trial, as a share of its step. If the other K promises as much as the chosen one,
/// one step in ten is therefore a trial.
const TRIAL_FLOOR: f64 = 0.02;
/// Maximum number of steps that a trial waits for its two times. One or two more are needed if draft KV has to catch
/// up first.
const TRIAL_STEPS: u32 = 4;
/// Number of drafts in a probe. A draft whose first token is accepted half the time shows no acceptance in one probe of
/// 256, so the first probe finds a good one.
const PROBE_DRAFTS: u32 = 8;
/// Maximum number of positions by which a probe drafts more than the request that drafts the most. A probe from K = 0
/// to K = 16 would cost twice as much, so there would be half as many probes. If deep drafts are good, several probes
/// find it.
pub(super) const PROBE_REACH: i64 = 7;
/// Maximum number of steps that a probe waits for its drafts, because draft KV may lag by a whole prompt.
const PROBE_STEPS: u32 = 64;
/// Weight that earlier results keep when a probe of 8 drafts begins, for positions that no request drafts. The first
/// number is for K = 0, where all results are old: they weigh as much as the probe. The second is for larger K, where
/// earlier positions are still observed.
const OLD_TRIALS: (f64, f64) = (8.0, 32.0);

/// Probe: one request that drafts more than the choice, to learn its acceptance.
#[derive(Clone, Copy, Debug)]
pub(super) struct Probe {
    pub(super) row: usize,
    /// Number of drafts that the request makes at least in each step of the probe. If its cap in a step is lower, the
    /// cap counts.
    k: i64,
    pub(super) drafts: u32,
    steps: u32,
}

/// Trial: steps at another K for all requests, to learn their cost.
#[derive(Clone, Copy, Debug)]
pub(super) struct Trial {
    pub(super) k: usize,
    steps: u32,
    /// Whether the trial's first step has been timed. Its time does not count, because kernels and caches are not
    /// ready for a new K.
    pub(super) warm: bool,
}

impl SpeculationPlanner {
    /// Continues a probe, or begins one if the saved time pays for it. `ks` holds the choice without a probe and is
    /// changed for the probed request.
    pub(super) fn explore(&mut self, rows: &[i64], caps: &[i64], lags: &[i64], ks: &mut [i64]) {
        if let Some(probe) = &mut self.probe {
            probe.steps -= 1;
            if let Some(at) = rows.iter().position(|&row| row == probe.row as i64).filter(|_| probe.steps > 0) {
                ks[at] = ks[at].max(caps[at].min(probe.k));
                return;
            }
            self.probe = None;
        }
        if self.credit <= 0.0 {
            return;
        }
        // The next row in turn of those that could teach something, and that may go all the way.
        let deepest = ks.iter().copied().max().unwrap_or(0);
        let most = caps.iter().copied().max().unwrap_or(0).min(self.k as i64).min(deepest + PROBE_REACH);
        let turn = |&at: &usize| (rows[at] as usize + self.own.len() - self.probed - 1) % self.own.len();
        let may = |&at: &usize| caps[at] >= most && ks[at] < most;
        let Some(at) = (0..rows.len()).filter(may).min_by_key(turn) else { return };
        let deepest = deepest as usize;
        let (from, to) = (ks[at] as usize, most as usize);
        let drafts: f64 = (from..to).map(|level| self.choice.increment_ms(level, 1).max(0.0)).sum();
        let mut extra = drafts;
        if rows.len() > 1 && (self.uniform != NO_K || self.capped) {
            // The probe makes a mixed step of one that is not. With graphs for equal K alone, all rows pay for it.
            let parts = self.parts_ms(ks);
            extra += (self.times.mixed() - 1.0).max(0.0) * (parts + drafts);
        }
        let cost = f64::from(PROBE_DRAFTS) * extra + lags[at] as f64 * self.catch_up_ms;
        if self.credit < cost {
            return;
        }
        self.credit = 0.0;
        self.probed = rows[at] as usize;
        self.probe = Some(Probe { row: self.probed, k: most, drafts: PROBE_DRAFTS, steps: PROBE_STEPS });
        self.overall.doubt(deepest, if deepest == 0 { OLD_TRIALS.0 } else { OLD_TRIALS.1 });
        ks[at] = most;
    }

    /// Continues a trial, or begins one if the saved time pays for it. `ks` holds the choice without a trial and is set
    /// to the trial's K.
    pub(super) fn try_out(&mut self, caps: &[i64], lags: &[i64], ks: &mut [i64]) {
        let most = (caps.iter().copied().min().unwrap_or(0) as usize).min(self.k);
        if let Some(trial) = &mut self.trial {
            trial.steps -= 1;
            if trial.steps > 0 && trial.k <= most {
                ks.fill(trial.k as i64);
                return;
            }
            self.trial = None;
        }
        // A trial costs something: look for one only where there is enough for the cheapest.
        let base = self.choice.base_ms(ks.len());
        if self.trial_credit < TRIAL_FLOOR * base {
            return;
        }
        let pivot = ks.iter().copied().max().unwrap_or(0) as usize;
        // Of the grid alone: between its points a time would move the chosen one's cost, too.
        let grid = self.times.costs(self.has_lora).ks().iter().copied().take_while(|&k| k <= most);
        let [below, above] = self.choice.best_around(pivot, grid.filter(|&k| k != self.uniform));
        let Some((k, rate, ms)) = (if self.tried_above { below.or(above) } else { above.or(below) }) else { return };
        let lagging: f64 = if k > 0 { lags.iter().map(|&lag| lag as f64).sum() } else { 0.0 };
        let cost = 2.0 * ms * (1.0 - rate / self.promised).max(TRIAL_FLOOR) + lagging * self.catch_up_ms;
        if self.trial_credit < cost {
            return;
        }
        self.trial_credit = 0.0;
        self.tried_above = k >= pivot;
        self.trial = Some(Trial { k, steps: TRIAL_STEPS, warm: false });
        ks.fill(k as i64);
    }

    /// Notes that a step with `k` drafts for all was timed. Returns true for the first step of a trial, whose time
    /// does not count; the second step ends the trial.
    pub(super) fn time_trial(&mut self, k: usize) -> bool {
        match self.trial.as_mut().filter(|trial| trial.k == k) {
            Some(trial) if !trial.warm => {
                trial.warm = true;
                true
            }
            Some(_) => {
                self.trial = None;
                false
            }
            None => false,
        }
    }
}
