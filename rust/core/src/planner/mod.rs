//! The number of tokens that each request drafts in the next step, possibly none. Measures no time and runs nothing.
//!
//! The planner has two inputs: the costs of steps ([`CostModel`], milliseconds by batch and K) and the results of
//! drafts (`settle`). `decide` returns the K of each request that yields the most expected tokens per millisecond of
//! the step.
//!
//! | file | knows |
//! | --- | --- |
//! | `estimates` | how likely drafts are to be accepted |
//! | `choice` | which K is best, given that and the costs |
//! | `times` | what steps cost by now |
//! | `explore` | when to look again: probes of drafts, trials of costs |
//! | this one | when to change, whose draft KV is broken |
//!
//! *Mixed steps*, whose requests draft different numbers, may run slower than their parts, because graphs and
//! kernels are made for equal numbers. The planner learns by how much as such steps happen. If it is too much, all
//! requests get one K.
//!
//! *`LoRA` adapters*: a step with an adapter may run other graphs and take longer. So it may have costs of its own
//! ([`SpeculationPlanner::with_lora_costs`]).
//!
//! *Change*: a choice stays until another promises [`MARGIN`] more.

mod choice;
pub(crate) mod estimates;
mod explore;
#[cfg(test)]
mod tests;
mod times;

use crate::cost_model::CostModel;
use crate::error::{Error, Result, check_len};
use choice::{Candidate, Choice};
use estimates::{Overall, Own};
use explore::{Probe, Trial};
use times::StepTimes;

/// Ratio by which another choice must be better than the last one: 0.5 % more tokens per millisecond. A change costs
/// one step with kernels and caches that are not ready for it. Estimates of steady requests move by less.
const MARGIN: f64 = 0.005;
/// Ratio by which differing K must be better than one K for all: 3 %. The best of many estimates is too high on
/// average: even for requests that are alike, their scatter promises a gain.
const MIXED_MARGIN: f64 = 0.03;
/// Share of the time that probes may cost. This is what a useless drafter costs in the long run.
const PROBE_SHARE: f64 = 0.004;
/// Share of the time that trials may cost, in steps that are timed.
const TRIAL_SHARE: f64 = 0.002;
/// Share of the time that trials may cost at first, when only a short measurement is known: 2 % falling with the number
/// of steps. It adds up to about five steps, enough to try each neighbouring K once or twice.
const EARLY_TRIALS: (f64, f64) = (2.0, 100.0);
/// Number of steps over which the cost of catching up a request's draft KV is spread. It corresponds to an answer of
/// 64 to 128 tokens, the shortest usual ones.
const CATCH_UP_STEPS: f64 = 32.0;
/// Number of steps between updates of the cost table. The table is written out for every batch size, which takes as
/// long as a decision.
const REFRESH_STEPS: u32 = 16;
/// Value for no K: none was chosen yet, or requests have different K.
const NO_K: usize = usize::MAX;

/// Chooses K for each request of each step.
///
/// Requests are named by *row*: a number below `max_num_seqs` that belongs to one request while it runs, as in
/// [`crate::Scheduler`]. The scheduler drives a planner by [`crate::Scheduler::speculate`]. On its own, a planner needs
/// `reset` for a new request on a row, `decide` before each step and `settle` after it. With steps in flight, its
/// statistics are some steps old.
#[derive(Clone, Debug)]
pub struct SpeculationPlanner {
    k: usize,
    times: StepTimes,
    /// Cost in milliseconds of each position of a draft catch-up chunk.
    catch_up_ms: f64,
    since_refresh: u32,
    /// K that was last chosen for all requests, or `NO_K` if their K differed.
    uniform: usize,
    /// Whether only their caps made the K of the last decision differ, if they did.
    capped: bool,
    /// Milliseconds saved for trials.
    trial_credit: f64,
    /// Number of steps that were timed.
    timed: u64,
    trial: Option<Trial>,
    /// Whether the last trial was of a K above the chosen one.
    tried_above: bool,
    choice: Choice,
    overall: Overall,
    own: Vec<Own>,
    /// Whether the request has a `LoRA` adapter, by row.
    lora: Vec<bool>,
    /// Whether `choice` has the costs of steps with an adapter.
    has_lora: bool,
    /// K of the last decision, by row.
    last: Vec<usize>,
    /// Milliseconds saved for probes.
    credit: f64,
    probe: Option<Probe>,
    probed: usize,
    collapsed: Vec<i64>,
    rate: f64,
    /// Expected tokens per millisecond of the last choice.
    promised: f64,
    /// Index of each candidate's row in the caller's order, and a sort key of the candidate's odds.
    order: Vec<(u32, u32)>,
    candidates: Vec<Candidate>,
    ks: Vec<usize>,
    kept: Vec<usize>,
    counts: Vec<usize>,
}

impl SpeculationPlanner {
    /// Makes a planner without statistics for rows below `max_num_seqs` and at most `num_speculative_tokens` (K)
    /// drafts. `costs` are those of steps that only decode; `catch_up_ms` is the additional cost of each position of
    /// a draft catch-up chunk.
    ///
    /// # Errors
    /// [`Error::InvalidConfig`] unless `max_num_seqs` is 1 to 65536, `num_speculative_tokens` 1 to 1024, and
    /// `catch_up_ms` finite and at least 0.
    pub fn new(max_num_seqs: usize, num_speculative_tokens: usize, costs: CostModel, catch_up_ms: f64) -> Result<Self> {
        for (field, value, most) in
            [("max_num_seqs", max_num_seqs, 1 << 16), ("num_speculative_tokens", num_speculative_tokens, 1 << 10)]
        {
            if value == 0 || value > most {
                return Err(Error::invalid_config(field, value, format!("from 1 to {most}")));
            }
        }
        if !(catch_up_ms.is_finite() && catch_up_ms >= 0.0) {
            return Err(Error::invalid_config(
                "catch_up_ms",
                catch_up_ms,
                "a finite number of milliseconds, at least 0",
            ));
        }
        let mut choice = Choice::new(max_num_seqs, num_speculative_tokens);
        choice.set_costs(&costs);
        Ok(Self {
            k: num_speculative_tokens,
            times: StepTimes::new(costs),
            catch_up_ms,
            since_refresh: 0,
            uniform: NO_K,
            capped: false,
            trial_credit: 0.0,
            timed: 0,
            trial: None,
            tried_above: false,
            choice,
            overall: Overall::new(num_speculative_tokens),
            own: vec![Own::NEW; max_num_seqs],
            lora: vec![false; max_num_seqs],
            has_lora: false,
            last: vec![NO_K; max_num_seqs],
            credit: 0.0,
            probe: None,
            probed: 0,
            collapsed: Vec::with_capacity(max_num_seqs),
            rate: 0.0,
            promised: 0.0,
            order: Vec::with_capacity(max_num_seqs),
            candidates: Vec::with_capacity(max_num_seqs),
            ks: Vec::with_capacity(max_num_seqs),
            kept: Vec::with_capacity(max_num_seqs),
            counts: vec![0; num_speculative_tokens],
        })
    }

    /// Sets the costs of steps in which a request has a `LoRA` adapter. Without this call they are those of all other
    /// steps.
    #[must_use]
    pub fn with_lora_costs(mut self, costs: CostModel) -> Self {
        self.times.set_lora_costs(costs);
        self
    }

    /// Returns the maximum number of drafts that the planner chooses.
    pub fn num_speculative_tokens(&self) -> usize {
        self.k
    }

    /// Returns the number of rows.
    pub fn max_num_seqs(&self) -> usize {
        self.own.len()
    }

    /// Returns the costs of steps, refined by their measured times: of those in which a request has a `LoRA` adapter if
    /// `has_lora`, else of those in which none has.
    pub fn costs(&self, has_lora: bool) -> &CostModel {
        self.times.costs(has_lora)
    }

    /// Returns the chance of each draft token of an average request, given that the drafts before it were accepted,
    /// `[K]`.
    pub fn conditional_acceptance(&self) -> &[f64] {
        self.overall.chances()
    }

    /// Starts the statistics of a new request on `row` and discards those of the request before it. `has_lora`: the
    /// request has a `LoRA` adapter.
    ///
    /// # Errors
    /// [`Error::InvalidBuffer`] if there is no such row.
    pub fn reset(&mut self, row: usize, has_lora: bool) -> Result<()> {
        let rows = self.own.len();
        let own = self.own.get_mut(row).ok_or_else(|| no_row(row as i64, rows))?;
        *own = Own::NEW;
        self.lora[row] = has_lora;
        self.last[row] = NO_K;
        self.probe = self.probe.filter(|probe| probe.row != row);
        self.collapsed.retain(|&collapsed| collapsed != row as i64);
        Ok(())
    }

    /// Chooses the K of each decoding request of the next step into `ks`, in the order of `rows`.
    ///
    /// `rows` are distinct. `caps` are the maximum numbers of drafts of each request in this step, 0 for none; values
    /// above K count as K. `lags` are the positions that each request's draft KV would have to catch up first, 0 for
    /// none.
    ///
    /// # Errors
    /// [`Error::InvalidBuffer`] if the lengths differ, a row is out of range, or a cap or lag is negative; nothing has
    /// changed then.
    pub fn decide(&mut self, rows: &[i64], caps: &[i64], lags: &[i64], ks: &mut [i64]) -> Result<()> {
        self.check_rows(rows)?;
        for (name, values) in [("caps", caps), ("lags", lags), ("ks", &*ks)] {
            check_len(name, values.len(), rows.len())?;
        }
        for (name, values) in [("caps", caps), ("lags", lags)] {
            if let Some(value) = values.iter().find(|&&value| value < 0) {
                return Err(Error::invalid_buffer(name, value, "at least 0"));
            }
        }
        if rows.is_empty() {
            return Ok(());
        }
        self.refresh(rows);
        self.sort(rows, caps, lags);
        self.choose(rows);
        self.capped = self.choice.padding(&self.candidates, &self.ks).is_some();
        for (&(_, at), &k) in self.order.iter().zip(&self.ks) {
            ks[at as usize] = k as i64;
            self.last[rows[at as usize] as usize] = k;
        }
        self.uniform = if ks.iter().all(|&k| k == ks[0]) { ks[0] as usize } else { NO_K };
        self.explore(rows, caps, lags, ks);
        self.capped &= self.probe.is_none();
        if self.probe.is_none() {
            self.try_out(caps, lags, ks);
        }
        Ok(())
    }

    /// Records the results of a step. Each decoding sequence has its row, its K as decided, and its tokens `drafted` (K
    /// after the device's own limits) and `accepted`. `ms` is the step's duration if it did nothing but decode.
    ///
    /// # Errors
    /// [`Error::InvalidBuffer`] if the lengths differ, a row is out of range, a K is not 0 to the planner's, or `ms` is
    /// not a finite time above 0. [`Error::InvalidAcceptance`] unless `accepted <= drafted <= K`. Nothing has changed
    /// then.
    pub fn settle(
        &mut self,
        rows: &[i64],
        ks: &[i64],
        drafted: &[i64],
        accepted: &[i64],
        ms: Option<f64>,
    ) -> Result<()> {
        self.check_settled(rows, ks, drafted, accepted)?;
        if let Some(ms) = ms
            && !(ms.is_finite() && ms > 0.0)
        {
            return Err(Error::invalid_buffer("ms", ms, "a finite time above 0"));
        }
        for ((&row, &drafted), &accepted) in rows.iter().zip(drafted).zip(accepted) {
            let (row, drafted, accepted) = (row as usize, drafted as usize, accepted as usize);
            if drafted == 0 {
                continue;
            }
            self.overall.record(drafted, accepted);
            if self.own[row].record(drafted, accepted, self.overall.chances()) {
                self.collapsed.retain(|&other| other != row as i64);
                self.collapsed.push(row as i64);
            }
            if let Some(probe) = self.probe.as_mut().filter(|probe| probe.row == row) {
                probe.drafts -= 1;
            }
        }
        self.overall.finish();
        self.probe = self.probe.filter(|probe| probe.drafts > 0);
        if !rows.is_empty() {
            self.settle_time(rows, ks, ms);
        }
        Ok(())
    }

    /// Takes the rows whose requests' acceptance has collapsed since the last call, each once. Their draft KV should be
    /// rebuilt; `settle` has already restarted their statistics.
    pub fn take_collapsed(&mut self) -> impl Iterator<Item = i64> + '_ {
        self.collapsed.drain(..)
    }

    /// Brings the costs of steps of `rows` into `choice`, if they are others or have changed.
    fn refresh(&mut self, rows: &[i64]) {
        let has_lora = self.any_lora(rows);
        if self.since_refresh >= REFRESH_STEPS || has_lora != self.has_lora {
            (self.since_refresh, self.has_lora) = (0, has_lora);
            self.choice.set_costs(self.times.costs(has_lora));
        }
    }

    fn any_lora(&self, rows: &[i64]) -> bool {
        rows.iter().any(|&row| self.lora[row as usize])
    }

    /// Fills `candidates` in descending order of odds; equal odds stay in the order of `rows`.
    fn sort(&mut self, rows: &[i64], caps: &[i64], lags: &[i64]) {
        self.order.clear();
        // Positive floats are in the order of their bits.
        let key = |row: i64| !(self.own[row as usize].odds as f32).to_bits();
        self.order.extend(rows.iter().zip(0..).map(|(&row, at)| (key(row), at)));
        self.order.sort_unstable();
        self.candidates.clear();
        self.candidates.extend(self.order.iter().map(|&(_, at)| Candidate {
            odds: self.own[rows[at as usize] as usize].odds,
            cap: (caps[at as usize] as usize).min(self.k),
            penalty: lags[at as usize] as f64 * self.catch_up_ms / CATCH_UP_STEPS,
        }));
    }

    /// Writes the K of each candidate into `ks`: the best choice, or the last one if it is about as good.
    fn choose(&mut self, rows: &[i64]) {
        let len = self.candidates.len();
        self.choice.set_candidates(&self.candidates, self.overall.odds());
        self.ks.clear();
        self.ks.resize(len, 0);
        self.rate = self.choice.solve(self.rate, &mut self.ks);
        let mut rate = self.rate / self.cost_of_mixing(&self.ks);
        let (k, uniform) = self.choice.best_uniform(self.times.mixed());
        if uniform * (1.0 + MIXED_MARGIN) > rate {
            rate = uniform;
            for (own, candidate) in self.ks.iter_mut().zip(&self.candidates) {
                *own = candidate.cap.min(k);
            }
        }
        self.kept.clear();
        let kept = self.order.iter().zip(&self.candidates).zip(&self.ks).map(|((&(_, at), candidate), &k)| {
            let last = self.last[rows[at as usize] as usize];
            if last == NO_K { k } else { last.min(candidate.cap) }
        });
        self.kept.extend(kept);
        if self.kept != self.ks {
            let kept = self.choice.rate(&self.kept) / self.cost_of_mixing(&self.kept);
            if rate <= kept * (1.0 + MARGIN) {
                rate = kept;
                std::mem::swap(&mut self.ks, &mut self.kept);
            }
        }
        self.promised = rate;
    }

    /// Returns the cost of a step with these K, divided by the sum of its parts.
    fn cost_of_mixing(&self, ks: &[usize]) -> f64 {
        if ks.iter().all(|&k| k == ks[0]) {
            return 1.0;
        }
        let mixed = self.times.mixed();
        self.choice.padding(&self.candidates, ks).map_or(mixed, |padding| mixed.min(padding))
    }

    /// Adds to the credit of probes and trials, and refines the costs by the step's time.
    fn settle_time(&mut self, rows: &[i64], ks: &[i64], ms: Option<f64>) {
        let has_lora = self.any_lora(rows);
        let parts = self.parts_ms(ks);
        self.credit += PROBE_SHARE * parts;
        self.since_refresh = self.since_refresh.saturating_add(1);
        let Some(ms) = ms.filter(|_| self.times.covers(ks.len(), has_lora)) else { return };
        self.trial_credit += parts * TRIAL_SHARE.max(EARLY_TRIALS.0 / (EARLY_TRIALS.1 + self.timed as f64));
        self.timed += 1;
        if ks.iter().any(|&other| other != ks[0]) {
            // Where only caps differ, as at the ends of texts, the others may be padded, which says nothing about
            // choices that mix. Neither do parts of steps with other costs.
            if !self.capped && has_lora == self.has_lora {
                self.times.observe_mixed(ms, parts);
            }
        } else {
            let k = ks[0] as usize;
            let first_of_trial = self.time_trial(k);
            let chosen = self.uniform == NO_K || k == self.uniform;
            self.times.observe((ks.len(), k, has_lora), ms, chosen, first_of_trial);
        }
    }

    /// Returns the cost of a step with these K in milliseconds, as the sum of its parts.
    fn parts_ms(&mut self, ks: &[i64]) -> f64 {
        self.counts.fill(0);
        for &k in ks {
            for count in &mut self.counts[..k as usize] {
                *count += 1;
            }
        }
        let increments: f64 = (0..self.k).map(|level| self.choice.increment_ms(level, self.counts[level])).sum();
        self.choice.base_ms(ks.len()) + increments
    }

    fn check_rows(&self, rows: &[i64]) -> Result<()> {
        let known = self.own.len();
        if rows.len() > known {
            return Err(Error::invalid_buffer("rows", format!("{} elements", rows.len()), format!("at most {known}")));
        }
        match rows.iter().find(|&&row| row < 0 || row >= known as i64) {
            Some(&row) => Err(no_row(row, known)),
            None => Ok(()),
        }
    }

    fn check_settled(&self, rows: &[i64], ks: &[i64], drafted: &[i64], accepted: &[i64]) -> Result<()> {
        self.check_rows(rows)?;
        for (name, values) in [("ks", ks), ("drafted", drafted), ("accepted", accepted)] {
            check_len(name, values.len(), rows.len())?;
        }
        for ((&k, &drafted), &accepted) in ks.iter().zip(drafted).zip(accepted) {
            if k < 0 || k > self.k as i64 {
                return Err(Error::invalid_buffer("ks", k, format!("from 0 to {}", self.k)));
            }
            let [Ok(d), Ok(a)] = [usize::try_from(drafted), usize::try_from(accepted)] else {
                return Err(Error::invalid_buffer(
                    "(drafted, accepted)",
                    format!("({drafted}, {accepted})"),
                    "at least 0 each",
                ));
            };
            if d > k as usize || a > d {
                return Err(Error::InvalidAcceptance { drafted: d, accepted: a, allowed: k as usize });
            }
        }
        Ok(())
    }
}

fn no_row(row: i64, rows: usize) -> Error {
    Error::invalid_buffer("rows", row, format!("from 0 to {}", rows - 1))
}
