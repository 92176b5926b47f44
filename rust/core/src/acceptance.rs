//! Acceptance statistics: how many drafted tokens the target accepted. Counts what the device reports and estimates
//! nothing.
//!
//! One iteration of one request with `drafted >= 1` is one *draft* of `drafted` tokens, `accepted` of them accepted,
//! before stop tokens or length limits cut the text. All shares are of drafts or of draft tokens, so iterations at K =
//! 0 do not lower them.

use crate::error::Error;

/// Statistics of drafts of up to `num_speculative_tokens` (K) tokens.
///
/// ```
/// use specrs_core::AcceptanceTracker;
///
/// let mut statistics = AcceptanceTracker::new(3);
/// statistics.record(3, 3)?;
/// statistics.record(3, 0)?;
/// statistics.record(0, 0)?; // no draft, so it counts nowhere
/// assert_eq!(statistics.histogram(), [1, 0, 0, 1]);
/// assert!((statistics.acceptance_length() - 2.5).abs() < 1e-12);
/// assert!(statistics.record(2, 3).is_err(), "more accepted than drafted");
/// # Ok::<(), specrs_core::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AcceptanceTracker {
    /// `histogram[m]`: number of drafts with exactly m accepted tokens, `[K + 1]`. All statistics except `draft_tokens`
    /// follow from it.
    histogram: Vec<u64>,
    draft_tokens: u64,
}

impl AcceptanceTracker {
    /// Makes empty statistics for drafts of at most `num_speculative_tokens` tokens; with 0 nothing can be recorded.
    pub fn new(num_speculative_tokens: usize) -> Self {
        Self { histogram: vec![0; num_speculative_tokens + 1], draft_tokens: 0 }
    }

    /// Returns K, the maximum number of tokens in one draft.
    pub fn num_speculative_tokens(&self) -> usize {
        self.histogram.len() - 1
    }

    /// Records one iteration. `drafted == 0` is no draft and changes nothing.
    ///
    /// # Errors
    /// [`Error::InvalidAcceptance`] unless `accepted <= drafted <= K`; the statistics are unchanged.
    pub fn record(&mut self, drafted: usize, accepted: usize) -> Result<(), Error> {
        let allowed = self.num_speculative_tokens();
        if drafted > allowed || accepted > drafted {
            return Err(Error::InvalidAcceptance { drafted, accepted, allowed });
        }
        if drafted > 0 {
            self.histogram[accepted] += 1;
            self.draft_tokens += drafted as u64;
        }
        Ok(())
    }

    /// Returns these statistics without the drafts that `part` counts. All drafts of `part` must be in these
    /// statistics.
    pub(crate) fn without(mut self, part: &Self) -> Self {
        self.draft_tokens -= part.draft_tokens;
        self.histogram.iter_mut().zip(&part.histogram).for_each(|(all, part)| *all -= part);
        self
    }

    /// Forgets everything recorded.
    pub fn reset(&mut self) {
        self.histogram.fill(0);
        self.draft_tokens = 0;
    }

    /// Returns the number of iterations that drafted at least one token.
    pub fn drafts(&self) -> u64 {
        self.histogram.iter().sum()
    }

    /// Returns the number of drafted tokens.
    pub fn draft_tokens(&self) -> u64 {
        self.draft_tokens
    }

    /// Returns the number of drafted tokens that the target accepted.
    pub fn accepted_tokens(&self) -> u64 {
        self.histogram.iter().zip(0..).map(|(&drafts, accepted)| drafts * accepted).sum()
    }

    /// Returns the mean number of tokens emitted per draft, including the recovered or bonus token: `1 + accepted /
    /// drafts`. It is 1 without drafts.
    pub fn acceptance_length(&self) -> f64 {
        1.0 + ratio(self.accepted_tokens(), self.drafts())
    }

    /// Returns the share of draft tokens that the target accepted; 0 without drafts.
    pub fn acceptance_rate(&self) -> f64 {
        ratio(self.accepted_tokens(), self.draft_tokens)
    }

    /// Returns for each position i the number of drafts whose token i was accepted, `[K]`. It never increases with i.
    pub fn accepted_per_position(&self) -> Vec<u64> {
        let mut counts: Vec<u64> = self.histogram[1..].to_vec();
        for i in (1..counts.len()).rev() {
            counts[i - 1] += counts[i];
        }
        counts
    }

    /// Returns for each position i the share of all drafts whose token i was accepted, `[K]`. The shares are
    /// unconditional: a draft too short to have a token i counts as one without. They sum to `acceptance_length - 1`.
    pub fn per_position(&self) -> Vec<f64> {
        let drafts = self.drafts();
        self.accepted_per_position().into_iter().map(|accepted| ratio(accepted, drafts)).collect()
    }

    /// Returns the number of drafts by their number of accepted tokens, `[K + 1]`.
    pub fn histogram(&self) -> &[u64] {
        &self.histogram
    }
}

fn ratio(part: u64, whole: u64) -> f64 {
    if whole == 0 { 0.0 } else { part as f64 / whole as f64 }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Compares every sequence of up to three records at K = 2 with a plain list of the records.
    #[test]
    fn small_scope_against_a_list() {
        let entries: Vec<(usize, usize)> = (0..=2).flat_map(|d| (0..=d).map(move |a| (d, a))).collect();
        let mut sequences: Vec<Vec<(usize, usize)>> = vec![vec![]];
        for _ in 0..3 {
            let longer = sequences.iter().flat_map(|s| entries.iter().map(move |e| [s.as_slice(), &[*e]].concat()));
            sequences = longer.chain(std::iter::once(vec![])).collect();
        }
        for sequence in sequences {
            let mut statistics = AcceptanceTracker::new(2);
            for &(drafted, accepted) in &sequence {
                statistics.record(drafted, accepted).unwrap();
            }
            let drafts: Vec<_> = sequence.iter().filter(|(drafted, _)| *drafted > 0).collect();
            let accepted: usize = drafts.iter().map(|(_, accepted)| accepted).sum();
            let n = drafts.len() as f64;
            assert_eq!(statistics.drafts(), drafts.len() as u64);
            assert_eq!(statistics.draft_tokens(), drafts.iter().map(|(drafted, _)| *drafted as u64).sum::<u64>());
            assert_eq!(statistics.accepted_tokens(), accepted as u64);
            for i in 0..2 {
                let count = drafts.iter().filter(|(_, accepted)| *accepted > i).count();
                assert_eq!(statistics.accepted_per_position()[i], count as u64);
                let share = if drafts.is_empty() { 0.0 } else { count as f64 / n };
                assert!((statistics.per_position()[i] - share).abs() < 1e-12);
            }
            for m in 0..=2 {
                assert_eq!(
                    statistics.histogram()[m],
                    drafts.iter().filter(|(_, accepted)| *accepted == m).count() as u64
                );
            }
            let length = if drafts.is_empty() { 1.0 } else { 1.0 + accepted as f64 / n };
            assert!((statistics.acceptance_length() - length).abs() < 1e-12);
            assert!((statistics.per_position().iter().sum::<f64>() + 1.0 - length).abs() < 1e-12);
            statistics.reset();
            assert_eq!(statistics, AcceptanceTracker::new(2));
        }
    }

    #[test]
    fn rate_is_over_draft_tokens() {
        let mut statistics = AcceptanceTracker::new(5);
        assert!(statistics.acceptance_rate().abs() < 1e-12 && (statistics.acceptance_length() - 1.0).abs() < 1e-12);
        statistics.record(5, 2).unwrap();
        statistics.record(3, 2).unwrap();
        assert!((statistics.acceptance_rate() - 0.5).abs() < 1e-12);
        assert!((statistics.acceptance_length() - 3.0).abs() < 1e-12);
    }

    /// Removing the records of some drafters from the statistics of all leaves exactly the records of the others.
    #[test]
    fn a_part_taken_away_leaves_the_other_part() {
        let records = [(3, 3, false), (3, 0, true), (2, 1, true), (1, 1, false), (3, 2, true), (1, 0, false)];
        let (mut all, mut parts) = (AcceptanceTracker::new(3), [AcceptanceTracker::new(3), AcceptanceTracker::new(3)]);
        for (drafted, accepted, on_host) in records {
            all.record(drafted, accepted).unwrap();
            parts[usize::from(on_host)].record(drafted, accepted).unwrap();
        }
        let [device, host] = parts;
        assert_eq!(all.clone().without(&host), device);
        assert_eq!(all.clone().without(&device), host);
        assert_eq!((device.draft_tokens(), host.draft_tokens()), (5, 8));
        assert_eq!(all.clone().without(&all), AcceptanceTracker::new(3));
    }

    #[test]
    fn impossible_counts_change_nothing() {
        let mut statistics = AcceptanceTracker::new(2);
        statistics.record(2, 1).unwrap();
        let before = statistics.clone();
        for (drafted, accepted) in [(3, 0), (3, 3), (2, 3), (0, 1), (1, 2), (usize::MAX, usize::MAX)] {
            let error = statistics.record(drafted, accepted).unwrap_err().to_string();
            assert!(error.contains(&drafted.to_string()) && error.contains(&accepted.to_string()), "{error}");
            assert_eq!(statistics, before);
        }
    }

    #[test]
    fn no_speculation_has_empty_statistics() {
        let mut statistics = AcceptanceTracker::new(0);
        statistics.record(0, 0).unwrap();
        assert!(statistics.record(1, 0).is_err());
        assert_eq!((statistics.per_position(), statistics.histogram()), (vec![], &[0_u64][..]));
    }
}
