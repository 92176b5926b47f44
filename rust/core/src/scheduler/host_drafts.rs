//! Drafts that drafters on the host propose for the rows, looked for once for each length of a row; and which drafter a row has, where
//! there are several.
//!
//! *The choice.* A drafter promises `(1 + E) / (1 + k * cost)` tokens for the time of a launch without drafts: E are the drafts expected to
//! stand of the k that it has, by position over all requests and by one factor for this one, as the planner reckons. A draft token costs its
//! verification row, on the device a drafting pass besides. What a drafter on the host proposed is judged by what came of the launch, whether it
//! was drafted or not; the one on the device is tried now and then.

use super::request::Request;
use super::row::{Row, RowIndex};
use super::{Scheduler, SchedulerConfig};
use crate::drafts::{Drafter, DrafterKind, SuffixCache};
use crate::error::{Error, Result};
use crate::planner::estimates::{Overall, Own};

/// What a verification row costs of a launch without drafts, until a host says otherwise.
const ROW_COST: f64 = 1.0 / 32.0;
/// A row whose drafts come from the host has those of the device in one launch of so many, so that their chances stay known.
const TRIAL_LAUNCHES: u64 = 64;
const KINDS: usize = DrafterKind::ALL.len();

/// What is known of the proposals for a row.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Looked {
    /// The request's arrival and length that they are for.
    whose: Option<(u64, usize)>,
    /// Drafts by drafter.
    found: [usize; KINDS],
}

/// How drafts fared, by drafter.
#[derive(Clone, Debug)]
struct Books {
    overall: [Overall; KINDS],
    /// By row: the arrival of the request that it is of.
    own: Vec<(u64, [Own; KINDS])>,
    /// What a draft token costs of a launch without drafts.
    costs: [f64; KINDS],
}

/// The proposals; nothing without a drafter on the host.
#[derive(Clone, Debug, Default)]
pub(super) struct HostDrafts {
    /// `[R, drafters, K]`.
    tokens: Vec<u32>,
    rows: Vec<Looked>,
    suffix: Option<SuffixCache>,
    /// Where there are several drafters.
    books: Option<Books>,
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
        let books = || Books {
            overall: DrafterKind::ALL.map(|_| Overall::new(k)),
            own: vec![(u64::MAX, [Own::NEW; KINDS]); rows],
            costs: DrafterKind::ALL.map(|kind| ROW_COST + if kind == DrafterKind::Device { pass } else { 0.0 }),
        };
        Ok(Self {
            tokens: vec![0; rows * KINDS * k],
            rows: vec![Looked::default(); rows],
            suffix: drafters.suffix.map(SuffixCache::new).transpose()?,
            books: several.then(books),
        })
    }

    /// Whether a choice is made of what became of drafts.
    pub(super) fn learns(&self) -> bool {
        self.books.is_some()
    }

    /// Takes in what became of a row's drafts: `drafted` with their counts and drafter, and `emitted` from where the proposals begin.
    pub(super) fn learn(
        &mut self,
        row: RowIndex,
        whose: (u64, usize),
        (drafted, accepted, drafter): (usize, usize, DrafterKind),
        emitted: &[i64],
    ) {
        let Some(books) = &mut self.books else { return };
        let (looked, width) = (&self.rows[row as usize], self.tokens.len() / (self.rows.len() * KINDS));
        let (of, own) = &mut books.own[row as usize];
        if *of != whose.0 {
            (*of, *own) = (whose.0, [Own::NEW; KINDS]);
        }
        for kind in DrafterKind::ALL {
            let (mut drafted, mut accepted) = if kind == drafter { (drafted, accepted) } else { (0, 0) };
            if kind != DrafterKind::Device {
                // Drafted or not: what was emitted says how far the proposal would have stood.
                let found = if looked.whose == Some(whose) { looked.found[kind as usize] } else { 0 };
                let tokens = &self.tokens[(row as usize * KINDS + kind as usize) * width..][..found];
                drafted = found.min(emitted.len());
                accepted =
                    tokens.iter().zip(emitted).take_while(|(draft, token)| i64::from(**draft) == **token).count();
            }
            if drafted > 0 {
                let overall = &mut books.overall[kind as usize];
                overall.record(drafted, accepted);
                own[kind as usize].record(drafted, accepted, overall.chances());
            }
        }
    }

    /// A launch has settled.
    pub(super) fn learned(&mut self) {
        if let Some(books) = &mut self.books {
            books.overall.iter_mut().for_each(Overall::finish);
        }
    }

    /// A request has ended; its output is kept for others.
    pub(super) fn forget(&mut self, request: &Request) {
        if let Some(suffix) = &mut self.suffix {
            let id = request.order.1 as i64;
            if suffix.is_running(id) {
                // What fails here costs drafts of others, never a request.
                let _ = bring_up(suffix, request).and_then(|()| suffix.stop_request(id));
            }
        }
    }

    /// What `kind` promises for a row with `k` drafts, or, with `fewer`, with the best number up to that: the number and the promise.
    fn promise(&self, row: RowIndex, arrival: u64, kind: DrafterKind, most: usize, fewer: bool) -> (usize, f64) {
        let Some(books) = &self.books else { return (most, 1.0 + most as f64) };
        let (of, own) = &books.own[row as usize];
        let odds = if *of == arrival { own[kind as usize].odds } else { 1.0 };
        let (mut tokens, mut reach, mut best) = (1.0, 1.0, (0, 1.0));
        for (i, overall) in books.overall[kind as usize].odds().iter().enumerate().take(most) {
            let scaled = odds * overall;
            reach *= scaled / (1.0 + scaled);
            tokens += reach;
            let promise = tokens / (1.0 + (i + 1) as f64 * books.costs[kind as usize]);
            if promise > best.1 || !fewer {
                best = (i + 1, promise);
            }
        }
        best
    }
}

/// Tells the cache of a request's tokens that it has not seen.
fn bring_up(suffix: &mut SuffixCache, request: &Request) -> Result<()> {
    let (id, tokens) = (request.order.1 as i64, &request.tokens);
    if !suffix.is_running(id) {
        suffix.start_request(id, &tokens[..request.prompt_len])?;
    }
    let known = suffix.num_tokens(id)?;
    suffix.append(id, &tokens[known..])
}

impl Scheduler {
    /// What drafts cost, as shares of a launch without any: a drafting pass on the device, and a verification row. By these a request's
    /// drafter is chosen where there are several; until they are given, a pass costs what [`crate::Drafter`] says, a row 1/32.
    ///
    /// # Errors
    /// [`Error::InvalidConfig`] unless both are finite and at least 0.
    pub fn set_draft_costs(&mut self, pass: f64, row: f64) -> Result<()> {
        for (field, value) in [("pass_cost", pass), ("row_cost", row)] {
            if !(value.is_finite() && value >= 0.0) {
                return Err(Error::invalid_config(field, value, "finite and at least 0"));
            }
        }
        if let Some(books) = &mut self.host_drafts.books {
            books.costs = DrafterKind::ALL.map(|kind| row + if kind == DrafterKind::Device { pass } else { 0.0 });
        }
        Ok(())
    }

    /// What there is of `most` drafts for a live row; `most` itself unless they come from the host.
    #[inline]
    pub(super) fn proposed(&mut self, row_index: RowIndex, most: usize) -> usize {
        let drafter = self.rows[row_index as usize].drafter;
        if drafter == DrafterKind::Device || most == 0 {
            return most;
        }
        self.look(row_index);
        self.host_drafts.rows[row_index as usize].found[drafter as usize].min(most)
    }

    /// Looks for a live row's drafts where its length is new.
    fn look(&mut self, row_index: RowIndex) {
        let (row, width, index) =
            (&self.rows[row_index as usize], self.config.num_speculative_tokens, row_index as usize);
        let request = &self.requests[row.request];
        let whose = Some((request.order.1, row.n));
        let HostDrafts { tokens, rows, suffix, .. } = &mut self.host_drafts;
        if rows[index].whose == whose {
            return;
        }
        let mut found = [0; KINDS];
        // As many as it may ever ask for: a smaller K takes the first of them.
        let mut out = |kind: DrafterKind, propose: &mut dyn FnMut(&mut [u32]) -> usize| {
            found[kind as usize] =
                propose(&mut tokens[(index * KINDS + kind as usize) * width..][..row.max_k as usize]);
        };
        if let Some(ngram) = self.config.host_drafters.ngram {
            out(DrafterKind::Ngram, &mut |drafts| ngram.propose(&request.tokens, drafts));
        }
        if let Some(suffix) = suffix {
            let id = request.order.1 as i64;
            // One that fails costs the drafts of a launch.
            out(DrafterKind::Suffix, &mut |drafts| {
                bring_up(suffix, request).and_then(|()| suffix.propose(id, drafts)).map_or(0, |draft| draft.len)
            });
        }
        rows[index] = Looked { whose, found };
    }

    /// Chooses whose drafts a live row has in the next launch, unless [`Self::choose_drafter_and_k`] has.
    pub(super) fn choose_drafter(&mut self, row_index: RowIndex) {
        if std::mem::take(&mut self.rows[row_index as usize].decided) {
            return;
        }
        if self.host_drafts.learns() {
            self.choose(row_index, false);
        } else {
            self.rows[row_index as usize].drafter = self.config.host_drafters.first();
        }
    }

    /// Chooses whose drafts a live row has in the next launch, and how many if they come from the host.
    pub(super) fn choose_drafter_and_k(&mut self, row_index: RowIndex) {
        let k = self.choose(row_index, true);
        let row = &mut self.rows[row_index as usize];
        row.decided = true;
        if row.drafter != DrafterKind::Device {
            row.k = k as u32;
        }
    }

    fn choose(&mut self, row_index: RowIndex, fewer: bool) -> usize {
        self.look(row_index);
        let Row { limit, max_k, request, rebuild, .. } = self.rows[row_index as usize];
        let (n, arrival) = (self.rows[row_index as usize].lower_bound(), self.requests[request].order.1);
        let room = |end: usize| (max_k as usize).min(end.saturating_sub(n));
        let on_device = if rebuild { 0 } else { room((limit - 1).min(self.drafts.end_of_drafts)) };
        let (mut best, mut best_k) = (DrafterKind::Device, 0);
        let mut most = 0.0;
        for kind in DrafterKind::ALL {
            let drafts = match kind {
                DrafterKind::Device => on_device,
                _ => self.host_drafts.rows[row_index as usize].found[kind as usize].min(room(limit - 1)),
            };
            let (k, promise) = self.host_drafts.promise(row_index, arrival, kind, drafts, fewer);
            // Without drafts nothing is promised: a drafter that has some goes before.
            let promise = if k == 0 { 0.0 } else { promise };
            if promise > most {
                (best, best_k, most) = (kind, k, promise);
            }
        }
        if on_device > 0 && self.next_launch_id % TRIAL_LAUNCHES == u64::from(row_index) % TRIAL_LAUNCHES {
            best = DrafterKind::Device;
        }
        self.rows[row_index as usize].drafter = best;
        best_k
    }

    /// The first `k` drafts that `drafter` proposed for a row.
    pub(super) fn host_drafts_of(&self, row_index: RowIndex, drafter: DrafterKind, k: usize) -> &[u32] {
        let place = row_index as usize * KINDS + drafter as usize;
        &self.host_drafts.tokens[place * self.config.num_speculative_tokens..][..k]
    }
}
