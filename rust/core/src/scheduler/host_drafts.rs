//! Drafts that the host proposes, which are searched once for each row and number of tokens, and the choice of a row's
//! drafter if there are several.
//!
//! *The choice.* A drafter promises `(1 + E) / (1 + k * cost)` tokens per time of a step without drafts, where E is
//! the expected number of accepted drafts among its k. E is estimated as in the planner: by position over all requests,
//! times one factor for this request. Host proposals are also estimated by the length of their match, because a long
//! match says more than the drafter's kind.
//!
//! A draft token costs its verification row. On the device it also costs a drafting pass and the chunk that closes the
//! lag of the draft KV. Host proposals are compared with the step's output, whether they were drafted or not. The
//! drafter on the device is tried within a share of the time.

use super::request::Request;
use super::row::{Row, RowIndex};
use super::{Scheduler, SchedulerConfig};
use crate::drafts::{Drafter, DrafterKind, HostProposers, Proposal, Text};
use crate::error::{Error, Result};
use crate::planner::estimates::{Overall, Own};

/// Cost of a verification row as a share of a step without drafts, until the host sets it.
const ROW_COST: f64 = 1.0 / 32.0;
/// Credit for trials of the drafter on the device that is added whenever a row chooses other drafts. It keeps the
/// statistics of the device's drafts current. The unit is the time of a step without drafts.
const DEVICE_TRIAL_SHARE: f64 = 0.01;
/// Credit for trials of the drafter on the device at the start. The unit is the time of a step without drafts.
const FIRST_TRIALS: f64 = 4.0;
/// Maximum number of drafts that are counted as the cost of a trial of the drafter on the device, if a planner chooses
/// K. The planner rarely chooses more drafts while other drafters are better.
const TRIAL_DRAFTS: usize = 7;
const KINDS: usize = DrafterKind::ALL.len();
/// Number of match classes, which have separate statistics: matches of 1, 2 or 3, 4 to 7, 8 to 15, and more tokens.
const MATCHES: usize = 5;

/// Proposals for a row.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Looked {
    /// Request for which the proposals were made, by its arrival, and its number of tokens then.
    whose: Option<(u64, usize)>,
    /// Number of drafts and match class of each drafter's proposal.
    found: [Found; KINDS],
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Found {
    len: usize,
    class: usize,
}

impl Found {
    fn new(Proposal { len, match_len }: &Proposal) -> Self {
        let (len, match_len) = (*len, *match_len);
        Self { len, class: (match_len.max(1).ilog2() as usize).min(MATCHES - 1) }
    }
}

/// How many of a drafter's proposed tokens a step verifies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verified {
    /// All, because K is fixed.
    All,
    /// The best number of them, but at least one.
    Some,
    /// The best number of them, possibly none.
    SomeOrNone,
}

/// Statistics of accepted drafts by drafter, and costs of drafting.
#[derive(Clone, Debug)]
struct Statistics {
    /// Acceptance by drafter and match class. The device's drafts have no match and count in the first class.
    overall: [[Overall; MATCHES]; KINDS],
    /// Statistics of each row's request by drafter, with the arrival of that request.
    own: Vec<(u64, [Own; KINDS])>,
    /// Cost of verifying 1, 2, .. K drafts as shares of a step without drafts, `[K]`.
    rows: Vec<f64>,
    /// Cost of a drafting pass on the device as a share of a step without drafts.
    pass: f64,
    /// Cost of each position of a chunk that closes a lag, as a share of a step without drafts. A whole chunk costs
    /// at least `pass`.
    catch_up: f64,
    /// Time that trials of the drafter on the device may still take, in steps without drafts.
    trial_credit: f64,
}

/// Proposals of the drafters on the host; empty without such drafters.
#[derive(Clone, Debug, Default)]
pub(super) struct HostDrafts {
    /// Proposed tokens, `[R, drafters, K]`.
    tokens: Vec<u32>,
    rows: Vec<Looked>,
    pub(super) proposers: HostProposers,
    /// Statistics for the choice of a drafter; `None` unless there are several drafters.
    statistics: Option<Statistics>,
    /// Number of failures of each drafter, and its last error.
    pub(super) errors: [(u64, Option<Error>); KINDS],
}

impl HostDrafts {
    pub(super) fn new(config: &SchedulerConfig) -> Result<Self> {
        let (drafters, rows, k) = (config.host_drafters, config.max_num_seqs, config.num_speculative_tokens);
        if !drafters.is_some() {
            return Ok(Self::default());
        }
        let on_device = config.drafter != Drafter::None;
        let several =
            usize::from(on_device) + DrafterKind::ON_HOST.iter().filter(|&&kind| drafters.has(kind)).count() > 1;
        let pass = config.drafter.cost_ratio();
        let statistics = || Statistics {
            overall: DrafterKind::ALL.map(|_| std::array::from_fn(|_| Overall::new(k))),
            own: vec![(u64::MAX, [Own::NEW; KINDS]); rows],
            rows: (1..=k).map(|drafts| drafts as f64 * ROW_COST).collect(),
            pass,
            catch_up: 0.0,
            trial_credit: FIRST_TRIALS,
        };
        Ok(Self {
            tokens: vec![0; rows * KINDS * k],
            rows: vec![Looked::default(); rows],
            proposers: HostProposers::start(&drafters)?,
            statistics: several.then(statistics),
            errors: Default::default(),
        })
    }

    /// Returns whether drafters are chosen by statistics of accepted drafts, which is the case if there are several.
    pub(super) fn learns(&self) -> bool {
        self.statistics.is_some()
    }

    /// Records the results of a row's drafts: the numbers drafted and accepted, and the drafter. `emitted` are the
    /// tokens from the position where the proposals begin; host proposals are compared with them.
    pub(super) fn learn(
        &mut self,
        row: RowIndex,
        whose: (u64, usize),
        (drafted, accepted, drafter): (usize, usize, DrafterKind),
        emitted: &[i64],
    ) {
        let Some(statistics) = &mut self.statistics else { return };
        let (looked, width) = (&self.rows[row as usize], self.tokens.len() / (self.rows.len() * KINDS));
        let (of, own) = &mut statistics.own[row as usize];
        if *of != whose.0 {
            (*of, *own) = (whose.0, [Own::NEW; KINDS]);
        }
        for kind in DrafterKind::ALL {
            let (mut drafted, mut accepted, mut class) =
                if kind == drafter { (drafted, accepted, 0) } else { (0, 0, 0) };
            if kind != DrafterKind::Device {
                // Drafted or not: what was emitted says how far the proposal would have stood.
                let found = if looked.whose == Some(whose) { looked.found[kind as usize] } else { Found::default() };
                let tokens = &self.tokens[(row as usize * KINDS + kind as usize) * width..][..found.len];
                (drafted, class) = (found.len.min(emitted.len()), found.class);
                accepted =
                    tokens.iter().zip(emitted).take_while(|(draft, token)| i64::from(**draft) == **token).count();
            }
            if drafted > 0 {
                let overall = &mut statistics.overall[kind as usize][class];
                overall.record(drafted, accepted);
                own[kind as usize].record(drafted, accepted, overall.chances());
            }
        }
    }

    /// Adds the acceptance counts of a settled step to the averages of each drafter and match class.
    pub(super) fn learned(&mut self) {
        if let Some(statistics) = &mut self.statistics {
            statistics.overall.as_flattened_mut().iter_mut().for_each(Overall::finish);
        }
    }

    /// Removes an ended request from every drafter on the host. An error is only counted: it may cost other requests
    /// drafts, but never fails a request.
    pub(super) fn forget(&mut self, request: &Request) {
        let Self { proposers, errors, .. } = self;
        proposers.each(|kind, proposer| {
            if let Err(error) = proposer.end(text_of(request)) {
                count(errors, kind, error);
            }
        });
    }

    /// Returns the number of drafts of `kind` for a row and the tokens that it promises per time of a step without
    /// drafts. The number is the best of `least` to `most`. A chunk over `lag` positions comes first.
    fn promise(
        &self,
        row: RowIndex,
        arrival: u64,
        kind: DrafterKind,
        most: usize,
        lag: usize,
        least: usize,
    ) -> (usize, f64) {
        let Some(statistics) = &self.statistics else { return (most, 1.0 + most as f64) };
        let time = 1.0 + statistics.catch_up_cost(lag);
        let (of, own) = &statistics.own[row as usize];
        let odds = if *of == arrival { own[kind as usize].odds } else { 1.0 };
        let class = if kind == DrafterKind::Device { 0 } else { self.rows[row as usize].found[kind as usize].class };
        let (mut tokens, mut reach, mut best) = (1.0, 1.0, (0, 1.0));
        for (i, overall) in statistics.overall[kind as usize][class].odds().iter().enumerate().take(most) {
            let scaled = odds * overall;
            reach *= scaled / (1.0 + scaled);
            tokens += reach;
            let promise = tokens / (time + statistics.cost(kind, i + 1));
            if i < least || promise > best.1 {
                best = (i + 1, promise);
            }
        }
        best
    }
}

impl Statistics {
    /// Returns the cost of drafting and verifying `drafts` tokens, at least one, as a share of a step without drafts.
    fn cost(&self, kind: DrafterKind, drafts: usize) -> f64 {
        self.rows[drafts - 1] + if kind == DrafterKind::Device { drafts as f64 * self.pass } else { 0.0 }
    }

    fn catch_up_cost(&self, lag: usize) -> f64 {
        if lag == 0 { 0.0 } else { self.pass.max(lag as f64 * self.catch_up) }
    }

    /// Adds trial credit for a row that chose other drafts. Returns whether the credit now pays for `drafts` tokens of
    /// the drafter on the device, after a chunk over `lag` positions. If so, the credit is spent.
    fn tries(&mut self, drafts: usize, lag: usize) -> bool {
        self.trial_credit += DEVICE_TRIAL_SHARE;
        let cost = self.cost(DrafterKind::Device, drafts) + self.catch_up_cost(lag);
        let tries = cost <= self.trial_credit;
        if tries {
            self.trial_credit -= cost;
        }
        tries
    }
}

/// Counts a failure of a drafter on the host and keeps its error.
#[cold]
fn count(errors: &mut [(u64, Option<Error>); KINDS], kind: DrafterKind, error: Error) {
    let (failures, last) = &mut errors[kind as usize];
    (*failures, *last) = (*failures + 1, Some(error));
}

fn text_of(request: &Request) -> Text<'_> {
    Text {
        id: request.order.1 as i64,
        salt: request.salt,
        tokens: &request.tokens,
        prompt_len: request.prompt_len,
        grammar_drafts: request.grammar_drafts(),
        prediction: &request.prediction,
    }
}

/// Continues a grammar's drafts, which are the first `len` of `drafts`, with a proposal of another drafter. Of several
/// proposals the last one in the table of drafters counts. Returns the number of drafts.
fn continue_grammar_drafts(
    proposers: &mut HostProposers,
    text: Text<'_>,
    len: usize,
    drafts: &mut [u32],
    errors: &mut [(u64, Option<Error>); KINDS],
) -> usize {
    let (tokens, rest) = drafts.split_at_mut(len);
    let (mut more, mut continued) = (vec![0; rest.len()], 0);
    proposers.each(|kind, proposer| match proposer.propose_after(text, tokens, &mut more) {
        Ok(Proposal { len: 0, .. }) => {}
        Ok(proposal) => {
            continued = proposal.len;
            rest[..continued].copy_from_slice(&more[..continued]);
        }
        Err(error) => count(errors, kind, error),
    });
    len + continued
}

impl Scheduler {
    /// Sets the costs of drafts, as shares of a step without drafts: a drafting pass on the device, verifying 1, 2,
    /// .. K drafts, and a position of a chunk that closes a lag (the whole chunk costs at least a pass). With several
    /// drafters, each request's drafter is chosen by these costs. Until they are set, a pass costs the drafter's ratio
    /// in [`crate::Drafter`], a row 1/32, and a chunk a pass.
    ///
    /// # Errors
    /// [`Error::InvalidConfig`] unless all costs are finite and at least 0 and `rows` has K elements; nothing has
    /// changed then.
    pub fn set_draft_costs(&mut self, pass: f64, rows: Vec<f64>, catch_up: f64) -> Result<()> {
        let each = rows.iter().map(|&row| ("row_costs", row));
        for (field, value) in [("pass_cost", pass), ("catch_up_cost", catch_up)].into_iter().chain(each) {
            if !(value.is_finite() && value >= 0.0) {
                return Err(Error::invalid_config(field, value, "finite and at least 0"));
            }
        }
        let k = self.config.num_speculative_tokens;
        if rows.len() != k {
            return Err(Error::invalid_config("row_costs", format!("{} values", rows.len()), format!("{k} values")));
        }
        if let Some(statistics) = &mut self.host_drafts.statistics {
            (statistics.rows, statistics.pass, statistics.catch_up) = (rows, pass, catch_up);
        }
        Ok(())
    }

    /// Returns how many of `most` drafts the drafter of a live row has. That is `most` itself unless the drafts come
    /// from the host.
    #[inline]
    pub(super) fn proposed(&mut self, row_index: RowIndex, most: usize) -> usize {
        let drafter = self.rows[row_index as usize].drafter;
        if drafter == DrafterKind::Device || most == 0 {
            return most;
        }
        self.look(row_index);
        self.host_drafts.rows[row_index as usize].found[drafter as usize].len.min(most)
    }

    /// Returns whether drafts of a live row may come from the host.
    pub(super) fn may_draft_on_host(&self, row_index: RowIndex) -> bool {
        self.config.host_drafters.has_any(false) || self.has_drafts_of_request(row_index)
    }

    /// Returns whether a live row's request comes with drafts of its own: a prediction, or tokens that its grammar
    /// forces.
    pub(super) fn has_drafts_of_request(&self, row_index: RowIndex) -> bool {
        let request = &self.requests[self.rows[row_index as usize].request];
        self.config.host_drafters.has_any(true)
            && !(request.prediction.is_empty() && request.grammar_drafts().is_empty())
    }

    /// Searches for a live row's drafts on the host, unless it already has them for its present length.
    fn look(&mut self, row_index: RowIndex) {
        let (row, width, index) =
            (&self.rows[row_index as usize], self.config.num_speculative_tokens, row_index as usize);
        let request = &self.requests[row.request];
        let whose = Some((request.order.1, row.n));
        let HostDrafts { tokens, rows, proposers, errors, .. } = &mut self.host_drafts;
        if rows[index].whose == whose {
            return;
        }
        let (mut found, text) = ([Found::default(); KINDS], text_of(request));
        // As many as it may ever ask for: a smaller K takes the first of them.
        let place = |kind: DrafterKind| (index * KINDS + kind as usize) * width..;
        let most = row.max_k as usize;
        proposers.each(|kind, proposer| match proposer.propose(text, &mut tokens[place(kind)][..most]) {
            Ok(proposal) => found[kind as usize] = Found::new(&proposal),
            Err(error) => count(errors, kind, error),
        });
        let of_grammar = &mut found[DrafterKind::Grammar as usize];
        if (1..most).contains(&of_grammar.len) {
            let drafts = &mut tokens[place(DrafterKind::Grammar)][..most];
            of_grammar.len = continue_grammar_drafts(proposers, text, of_grammar.len, drafts, errors);
        }
        rows[index] = Looked { whose, found };
    }

    /// Chooses the drafter of a live row for the next step, unless [`Self::choose_drafter_and_k`] or
    /// [`Self::choose_planned_drafter`] has done so. All its drafts are verified.
    pub(super) fn choose_drafter(&mut self, row_index: RowIndex) {
        if !std::mem::take(&mut self.rows[row_index as usize].decided) {
            self.choose_if_several(row_index, Verified::All);
        }
    }

    /// Chooses the drafter of a live row for the next step. A planner then chooses the number of its drafts.
    pub(super) fn choose_planned_drafter(&mut self, row_index: RowIndex) {
        self.choose_if_several(row_index, Verified::Some);
        self.rows[row_index as usize].decided = self.drafts.on_host;
    }

    fn choose_if_several(&mut self, row_index: RowIndex, verified: Verified) {
        if self.host_drafts.learns() {
            self.choose(row_index, verified);
        } else {
            self.rows[row_index as usize].drafter = self.config.host_drafters.first();
        }
    }

    /// Chooses the drafter of a live row for the next step, and the number of drafts if they come from the host.
    pub(super) fn choose_drafter_and_k(&mut self, row_index: RowIndex) {
        let k = self.choose(row_index, Verified::SomeOrNone);
        let row = &mut self.rows[row_index as usize];
        row.decided = true;
        if row.drafter != DrafterKind::Device {
            row.k = k as u32;
        }
    }

    /// Chooses the drafter of a live row that promises the most tokens per time. Returns the number of drafts for which
    /// it does.
    fn choose(&mut self, row_index: RowIndex, verified: Verified) -> usize {
        self.look(row_index);
        let Row { limit, max_k, request, rebuild, .. } = self.rows[row_index as usize];
        let (n, arrival) = (self.rows[row_index as usize].lower_bound(), self.requests[request].order.1);
        let room = |end: usize| (max_k as usize).min(end.saturating_sub(n));
        let on_device =
            if rebuild || self.drafting_is_paused() { 0 } else { room((limit - 1).min(self.drafts.end_of_drafts)) };
        let Row { draft_len, drafting, .. } = self.rows[row_index as usize];
        let behind = if drafting > 0 || self.drafts.from_hidden {
            0
        } else {
            n - draft_len.max(self.held_from(row_index)).min(n)
        };
        let lag = if behind > self.drafts.max_draft_lag { behind } else { 0 };
        let (mut best, mut best_k) = (DrafterKind::Device, 0);
        let mut most = 0.0;
        for kind in DrafterKind::ALL {
            let drafts = match kind {
                DrafterKind::Device => on_device,
                _ => self.host_drafts.rows[row_index as usize].found[kind as usize].len.min(room(limit - 1)),
            };
            let lag = if kind == DrafterKind::Device { lag } else { 0 };
            let least = match verified {
                Verified::All => drafts,
                Verified::Some => 1,
                Verified::SomeOrNone => 0,
            };
            let (k, promise) = self.host_drafts.promise(row_index, arrival, kind, drafts, lag, least);
            // Without drafts nothing is promised: a drafter that has some goes before.
            let promise = if k == 0 { 0.0 } else { promise };
            if promise > most {
                (best, best_k, most) = (kind, k, promise);
            }
        }
        if on_device > 0 && best != DrafterKind::Device {
            let charged = if verified == Verified::All { on_device } else { on_device.min(TRIAL_DRAFTS) };
            let tried = self.host_drafts.statistics.as_mut().is_some_and(|statistics| statistics.tries(charged, lag));
            best = if tried { DrafterKind::Device } else { best };
        }
        self.rows[row_index as usize].drafter = best;
        best_k
    }

    /// Returns the first `k` drafts that `drafter` proposed for a row.
    pub(super) fn host_drafts_of(&self, row_index: RowIndex, drafter: DrafterKind, k: usize) -> &[u32] {
        let place = row_index as usize * KINDS + drafter as usize;
        &self.host_drafts.tokens[place * self.config.num_speculative_tokens..][..k]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::drafts::{HostDrafters, NgramProposer, SuffixSettings};

    #[test]
    fn proposals_are_judged_by_the_length_of_their_match() {
        let host_drafters =
            HostDrafters { suffix: Some(SuffixSettings::default()), ..HostDrafters::ngram(NgramProposer::default()) };
        let config =
            SchedulerConfig { num_speculative_tokens: 2, host_drafters, ..SchedulerConfig::new(1, 32, 64, 2, 64) };
        let mut drafts = HostDrafts::new(&config).unwrap();
        let promised = |drafts: &mut HostDrafts, match_len: usize| {
            drafts.rows[0].found[DrafterKind::Ngram as usize] = Found::new(&Proposal { len: 2, match_len });
            drafts.promise(0, 0, DrafterKind::Ngram, 2, 0, 2).1.to_bits()
        };
        assert_eq!(promised(&mut drafts, 1), promised(&mut drafts, 12), "nothing is known yet");
        for _ in 0..100 {
            // The proposal is 0, 0: it comes after 12 tokens, and never after one.
            for (match_len, emitted) in [(1, [7, 7, 7]), (12, [0, 0, 7])] {
                drafts.rows[0] = Looked { whose: Some((0, 4)), found: [Found::default(); KINDS] };
                drafts.rows[0].found[DrafterKind::Ngram as usize] = Found::new(&Proposal { len: 2, match_len });
                drafts.learn(0, (0, 4), (0, 0, DrafterKind::Device), &emitted);
                drafts.learned();
            }
        }
        let (short, long) = (promised(&mut drafts, 1), promised(&mut drafts, 12));
        assert!(f64::from_bits(short) < 1.2 && f64::from_bits(long) > 2.5, "{short} {long}");
        assert_eq!(promised(&mut drafts, 8), long, "8 to 15 tokens are one class");
    }

    #[test]
    fn a_long_proposal_promises_what_its_best_part_does() {
        let host_drafters =
            HostDrafters { suffix: Some(SuffixSettings::default()), ..HostDrafters::ngram(NgramProposer::default()) };
        let config =
            SchedulerConfig { num_speculative_tokens: 16, host_drafters, ..SchedulerConfig::new(1, 32, 64, 2, 64) };
        let mut drafts = HostDrafts::new(&config).unwrap();
        let statistics = drafts.statistics.as_mut().unwrap();
        statistics.rows = (1..=16).map(|drafts| 0.3 * f64::from(drafts)).collect();
        let promise = |most, least| drafts.promise(0, 0, DrafterKind::Ngram, most, 0, least);
        let (best, least, all) = (promise(16, 0), promise(16, 1), promise(16, 16));
        assert_eq!((best, all.0), (least, 16), "one draft pays");
        assert!(best.0 < 8 && best.1 > 1.2 && all.1 < 0.7, "{best:?} {all:?}");
        assert_eq!(promise(best.0, best.0), best, "further proposals take nothing from it");
        drafts.statistics.as_mut().unwrap().rows = vec![9.0; 16];
        let promise = |least| drafts.promise(0, 0, DrafterKind::Ngram, 16, 0, least);
        assert_eq!((promise(0), promise(1).0 > 0), ((0, 1.0), true), "no draft pays");
    }
}
