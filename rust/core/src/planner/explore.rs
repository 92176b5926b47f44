//! When a planner drafts otherwise than it would, to learn. Chooses nothing by what it learns.
//!
//! *Probes*: positions that no request drafts teach nothing, and at K = 0 none do. So time saves up [`super::PROBE_SHARE`] of itself
//! until it pays for a probe: one request, in turn, drafts as much as it may, [`PROBE_DRAFTS`] times. A useless draft costs that
//! share and no more, and one that becomes good is found.
//!
//! *Trials*: the costs of a K that is not in use are as wrong as when they were measured, and a machine that was busy then may have
//! shown any. So [`super::TRIAL_SHARE`] of the time goes into launches at another K for all, by turns the best one below and above
//! the chosen one. What they take is compared with the launches around them, not with what launches took when the table was made.

use super::SpeculationPlanner;

/// What a trial is taken to cost at least, as a share of its launch: one launch in ten, where the other K promises the same.
const TRIAL_FLOOR: f64 = 0.02;
/// The most launches that a trial waits for its two times: one or two more, where draft KV has to catch up first.
const TRIAL_LAUNCHES: u32 = 4;
/// Drafts of a probe: of a draft whose first token stands half the time they show none in one probe of 256, so a good one is found at
/// once. And the most launches that it waits for them, since draft KV may lag by a whole prompt.
const PROBE_DRAFTS: u32 = 8;
const PROBE_LAUNCHES: u32 = 64;
/// What old trials of a position that no request drafts count beside a probe's 8: as much at K = 0, where all that is known is old, and four
/// times that behind a shorter K, where the positions before it are watched.
const OLD_TRIALS: (f64, f64) = (8.0, 32.0);

/// One request that drafts more than it would, to learn.
#[derive(Clone, Copy, Debug)]
pub(super) struct Probe {
    pub(super) row: usize,
    pub(super) drafts: u32,
    launches: u32,
}

/// Launches at another K for all, to learn what it costs.
#[derive(Clone, Copy, Debug)]
pub(super) struct Trial {
    pub(super) k: usize,
    launches: u32,
    /// Its first launch has been timed. That one does not count: kernels and caches are not ready for a new K.
    pub(super) warm: bool,
}

impl SpeculationPlanner {
    /// Goes on with a probe, or begins one where the credit pays for it; `ks` are what would be drafted without.
    pub(super) fn explore(&mut self, rows: &[i64], caps: &[i64], lags: &[i64], ks: &mut [i64]) {
        if let Some(probe) = &mut self.probe {
            probe.launches -= 1;
            if let Some(at) = rows.iter().position(|&row| row == probe.row as i64).filter(|_| probe.launches > 0) {
                ks[at] = ks[at].max(caps[at].min(self.k as i64));
                return;
            }
            self.probe = None;
        }
        if self.credit <= 0.0 {
            return;
        }
        // The next row in turn of those that could teach something, and that may go all the way.
        let most = caps.iter().copied().max().unwrap_or(0).min(self.k as i64);
        let turn = |&at: &usize| (rows[at] as usize + self.own.len() - self.probed - 1) % self.own.len();
        let may = |&at: &usize| caps[at] >= most && ks[at] < most;
        let Some(at) = (0..rows.len()).filter(may).min_by_key(turn) else { return };
        let deepest = ks.iter().copied().max().unwrap_or(0) as usize;
        let (from, to) = (ks[at] as usize, most as usize);
        let drafts: f64 = (from..to).map(|level| self.choice.step_ms(level, 1).max(0.0)).sum();
        let cost = f64::from(PROBE_DRAFTS) * drafts + lags[at] as f64 * self.catch_up_ms;
        if self.credit < cost {
            return;
        }
        self.credit = 0.0;
        self.probed = rows[at] as usize;
        self.probe = Some(Probe { row: self.probed, drafts: PROBE_DRAFTS, launches: PROBE_LAUNCHES });
        self.overall.doubt(deepest, if deepest == 0 { OLD_TRIALS.0 } else { OLD_TRIALS.1 });
        ks[at] = most;
    }

    /// Goes on with a trial, or begins one where the credit pays for it; `ks` are what would be drafted without.
    pub(super) fn try_out(&mut self, caps: &[i64], lags: &[i64], ks: &mut [i64]) {
        let most = (caps.iter().copied().min().unwrap_or(0) as usize).min(self.k);
        if let Some(trial) = &mut self.trial {
            trial.launches -= 1;
            if trial.launches > 0 && trial.k <= most {
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
        let grid = self.times.costs().ks().iter().copied().take_while(|&k| k <= most);
        let [below, above] = self.choice.best_around(pivot, grid.filter(|&k| k != self.uniform));
        let Some((k, rate, ms)) = (if self.tried_above { below.or(above) } else { above.or(below) }) else { return };
        let lagging: f64 = if k > 0 { lags.iter().map(|&lag| lag as f64).sum() } else { 0.0 };
        let cost = 2.0 * ms * (1.0 - rate / self.promised).max(TRIAL_FLOOR) + lagging * self.catch_up_ms;
        if self.trial_credit < cost {
            return;
        }
        self.trial_credit = 0.0;
        self.tried_above = k >= pivot;
        self.trial = Some(Trial { k, launches: TRIAL_LAUNCHES, warm: false });
        ks.fill(k as i64);
    }

    /// A launch at `k` for all was timed. True if it was the first of a trial, whose time does not count; the second ends the trial.
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
