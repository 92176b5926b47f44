//! Translation between two vocabularies by their shared tokens: token-level intersection (Timor et al. 2025). Runs no
//! model.

use crate::Output;
use crate::error::{Error, Result};
use specrs_core::sampling::{largest, lowest_id};

/// Tokens that a target and a draft model share, and the draft's input for each of the target's ids.
#[derive(Debug)]
pub struct Translation {
    /// Pairs (target's id, draft's id) of the shared tokens, `[S]`, ascending by the target's id.
    shared: Vec<(usize, usize)>,
    pub(super) fed: Fed,
    /// Logits of a pass over the draft's ids, `[rows, draft's ids]`.
    pub(super) scores: Vec<f32>,
    /// Logits of one row over the shared tokens, `[S]`.
    row: Vec<f32>,
}

/// Draft model's ids for the target's ids that a pass is fed.
#[derive(Debug)]
pub(super) struct Fed {
    /// Draft's id for each of the target's ids, `[V]`.
    pub(super) ids: Vec<i64>,
    /// Draft's ids of a pass, `[N]`.
    pub(super) tokens: Vec<i64>,
}

impl Translation {
    /// Makes a translation from the pairs `shared` (target's id, draft's id), in any order. For tokens of the target's
    /// `vocab_size` that the draft does not have, it is fed `unknown`.
    ///
    /// # Errors
    /// If one of the target's ids is out of range or comes twice, if a draft's id or `unknown` is negative, or if
    /// nothing is shared.
    pub fn new(shared: &[(i64, i64)], unknown: i64, vocab_size: usize) -> Result<Self> {
        let mut fed = vec![-1; vocab_size];
        for &(target, draft) in shared {
            let place = usize::try_from(target).ok().and_then(|target| fed.get_mut(target)).filter(|place| **place < 0);
            let Some(place) = place else {
                let allowed = format!("from 0 to {}, each once", vocab_size as i64 - 1);
                return Err(Error::invalid("id of the target in shared", target, allowed));
            };
            *place = draft;
        }
        if let Some(&(_, draft)) = shared.iter().find(|&&(_, draft)| draft < 0) {
            return Err(Error::invalid("id of the draft in shared", draft, "at least 0"));
        }
        if shared.is_empty() || unknown < 0 {
            let (field, value, allowed) = if shared.is_empty() {
                ("shared", "no tokens".to_string(), "at least one token that both vocabularies have")
            } else {
                ("unknown", unknown.to_string(), "an id of the draft, at least 0")
            };
            return Err(Error::invalid(field, value, allowed));
        }
        let shared = (0..vocab_size).filter(|&id| fed[id] >= 0).map(|id| (id, fed[id] as usize)).collect();
        fed.iter_mut().filter(|id| **id < 0).for_each(|id| *id = unknown);
        Ok(Self { shared, fed: Fed { ids: fed, tokens: Vec::new() }, scores: Vec::new(), row: Vec::new() })
    }

    /// Returns the number of the target's ids.
    pub fn vocab_size(&self) -> usize {
        self.fed.ids.len()
    }

    /// Rejects ids that a draft of `known` ids does not have.
    pub(super) fn check(&self, known: usize) -> Result<()> {
        match self.fed.ids.iter().find(|&&id| id as usize >= known) {
            Some(id) => Err(Error::invalid("id of the draft in shared or unknown", id, format!("below {known}"))),
            None => Ok(()),
        }
    }

    /// Fills `output` from `scores`, whose rows have `own` logits: minus infinity for tokens that are not shared.
    pub(super) fn write(&mut self, own: usize, output: Output<'_>) {
        let Self { shared, scores, row, .. } = self;
        match output {
            Output::Logits { num_ids, logits, .. } => {
                logits.fill(f32::NEG_INFINITY);
                for (scores, logits) in scores.chunks_exact(own).zip(logits.chunks_exact_mut(num_ids)) {
                    for &(target, draft) in shared.iter().filter(|(target, _)| *target < num_ids) {
                        logits[target] = scores[draft];
                    }
                }
            }
            Output::Argmax { ids, top, .. } => {
                for ((scores, id), top) in scores.chunks_exact(own).zip(ids).zip(top) {
                    row.clear();
                    row.extend(shared.iter().map(|&(_, draft)| scores[draft]));
                    *top = largest(row);
                    *id = shared[lowest_id(row, *top)].0 as i64;
                }
            }
            Output::Nothing | Output::Hidden { .. } => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Translation;
    use crate::Output;

    fn translation() -> Translation {
        Translation::new(&[(4, 0), (1, 2)], 3, 5).unwrap()
    }

    #[test]
    fn logits_are_those_of_shared_tokens() {
        let mut translation = translation();
        translation.scores = vec![1.0, 2.0, 3.0, 4.0, 9.0, 8.0, 7.0, 6.0];
        let (mut logits, mut ids, mut top) = ([0.0; 10], [0; 2], [0.0; 2]);
        translation.write(4, Output::Logits { rows: &[0, 1], num_ids: 5, logits: &mut logits });
        let none = f32::NEG_INFINITY;
        let expected = [none, 3.0, none, none, 1.0, none, 7.0, none, none, 9.0];
        assert_eq!(logits.map(f32::to_bits), expected.map(f32::to_bits));
        translation.write(4, Output::Argmax { rows: &[0, 1], num_ids: 5, ids: &mut ids, top: &mut top });
        assert_eq!((ids, top.map(f32::to_bits)), ([1, 4], [3.0_f32, 9.0].map(f32::to_bits)));
    }

    #[test]
    fn a_tie_goes_to_the_lowest_id_of_the_target() {
        let mut translation = translation();
        translation.scores = vec![5.0, 9.0, 5.0, 9.0];
        let (mut ids, mut top) = ([0], [0.0]);
        translation.write(4, Output::Argmax { rows: &[0], num_ids: 5, ids: &mut ids, top: &mut top });
        assert_eq!(ids, [1]);
    }

    #[test]
    fn wrong_ids_are_rejected() {
        assert!(Translation::new(&[(5, 0)], 0, 5).is_err());
        assert!(Translation::new(&[(1, 0), (1, 2)], 0, 5).is_err());
        assert!(Translation::new(&[(1, -1)], 0, 5).is_err());
        assert!(Translation::new(&[], 0, 5).is_err());
        assert!(Translation::new(&[(1, 0)], -1, 5).is_err());
        assert!(translation().check(3).is_err());
        assert!(translation().check(4).is_ok());
    }
}
