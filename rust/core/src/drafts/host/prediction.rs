//! Drafts from the text that a request predicts for its own output (`prediction` of `OpenAI`'s API).
//!
//! The drafter keeps a place in the prediction. If the next output token is the one that the prediction has at this
//! place, the place moves on by one. After any other token the place is looked for again: it is where most of the
//! output's last tokens occur, and of several such places the nearest one ahead.

use std::collections::HashMap;

use rustc_hash::FxBuildHasher;

use super::{HostProposer, HostSettings, Proposal, Settings, Text};
use crate::error::Result;

/// Maximum number of tokens at the end of the output that are compared with a place of the prediction.
const MOST_COMPARED: usize = 32;
/// Number of tokens after the last known place. A new place within them needs only one equal token.
const NEAR: usize = 64;
/// Number of equal tokens that a new place needs if it is further away than [`NEAR`] tokens.
const FAR_MATCH: usize = 4;
/// Maximum number of places that are compared in a search, which bounds its time. Each is an occurrence of the output's
/// last token.
const MOST_PLACES: usize = 4096;

/// Drafter that proposes the rest of the prediction that a request came with
/// ([`crate::RequestParams::prediction`]).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PredictionSettings;

/// Running requests' places in their predictions.
#[derive(Clone, Debug, Default)]
pub struct PredictionProposer {
    places: HashMap<i64, Place, FxBuildHasher>,
}

/// Place of an output in its prediction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Place {
    /// Number of output tokens that have been followed.
    num_followed: usize,
    /// Index in the prediction of the token that is expected next.
    next: usize,
    /// Number of tokens before `next` that equal the end of the output.
    match_len: usize,
}

impl Place {
    /// Moves the place in `prediction` along the tokens of `output` that came since the last call.
    fn follow(&mut self, output: &[u32], prediction: &[u32]) {
        for end in self.num_followed + 1..=output.len() {
            if prediction.get(self.next) == Some(&output[end - 1]) {
                (self.next, self.match_len) = (self.next + 1, self.match_len + 1);
            } else {
                self.find(&output[..end], prediction);
            }
        }
        self.num_followed = self.num_followed.max(output.len());
    }

    /// Moves to the place of the prediction where most of the output's last tokens occur. Of equally good places it
    /// takes the first from `next` on, else the last before `next`. If too few tokens are equal at every place, it
    /// stays, and the match is empty.
    fn find(&mut self, output: &[u32], prediction: &[u32]) {
        let Some(&last) = output.last() else { return };
        let (mut best, mut found) = (0, None);
        let ahead = self.next.min(prediction.len())..prediction.len();
        let places = ahead.clone().chain((0..ahead.start).rev()).filter(|&at| prediction[at] == last);
        for at in places.take(MOST_PLACES) {
            let pairs = output.iter().rev().zip(prediction[..=at].iter().rev());
            let len = pairs.take(MOST_COMPARED).take_while(|(a, b)| a == b).count();
            let is_near = ahead.contains(&at) && at - ahead.start < NEAR;
            if len > best && (is_near || len >= FAR_MATCH) {
                (best, found) = (len, Some(at + 1));
            }
            if best == MOST_COMPARED {
                break;
            }
        }
        (self.next, self.match_len) = (found.unwrap_or(self.next), best);
    }

    /// Writes the tokens from `next` on to the start of `drafts`. Proposes none if the end of the output has no match
    /// in the prediction.
    fn propose(&self, prediction: &[u32], drafts: &mut [u32]) -> Proposal {
        // The start is the place of an output without tokens, which nothing can match.
        if self.match_len == 0 && self.num_followed > 0 {
            return Proposal::NONE;
        }
        let rest = prediction.get(self.next..).unwrap_or_default();
        let len = rest.len().min(drafts.len());
        drafts[..len].copy_from_slice(&rest[..len]);
        Proposal { len, match_len: self.match_len }
    }
}

impl HostSettings for PredictionSettings {
    type Proposer = PredictionProposer;

    fn read(_given: &mut Settings<'_>) -> Result<Self> {
        Ok(Self)
    }

    fn start(self) -> Result<PredictionProposer> {
        Ok(PredictionProposer::default())
    }
}

impl HostProposer for PredictionProposer {
    fn propose(&mut self, text: Text<'_>, drafts: &mut [u32]) -> Result<Proposal> {
        if text.prediction.is_empty() {
            return Ok(Proposal::NONE);
        }
        let place = self.places.entry(text.id).or_default();
        place.follow(text.output(), text.prediction);
        Ok(place.propose(text.prediction, drafts))
    }

    fn propose_after(&mut self, text: Text<'_>, more: &[u32], drafts: &mut [u32]) -> Result<Proposal> {
        if text.prediction.is_empty() {
            return Ok(Proposal::NONE);
        }
        let place = self.places.entry(text.id).or_default();
        place.follow(text.output(), text.prediction);
        let end = &text.output()[text.output().len().saturating_sub(MOST_COMPARED)..];
        let mut place = Place { num_followed: end.len(), ..*place };
        place.follow(&[end, more].concat(), text.prediction);
        Ok(place.propose(text.prediction, drafts))
    }

    fn end(&mut self, text: Text<'_>) -> Result<()> {
        self.places.remove(&text.id);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hash::BlockHash;
    use proptest::prelude::*;

    fn text<'a>(tokens: &'a [u32], prediction: &'a [u32]) -> Text<'a> {
        Text { id: 1, salt: BlockHash::default(), tokens, prompt_len: 1, grammar_drafts: &[], prediction }
    }

    /// Returns the drafts after each prefix of `output`, as a scheduler asks for them.
    fn drafts_along(output: &[u32], prediction: &[u32], k: usize) -> Vec<Vec<u32>> {
        let (mut proposer, tokens) = (PredictionProposer::default(), [&[0], output].concat());
        (1..=tokens.len())
            .map(|end| {
                let mut drafts = vec![0; k];
                let len = proposer.propose(text(&tokens[..end], prediction), &mut drafts).unwrap().len;
                drafts.truncate(len);
                drafts
            })
            .collect()
    }

    #[test]
    fn the_prediction_is_proposed_from_its_start_to_its_end() {
        assert_eq!(drafts_along(&[5, 6, 7], &[5, 6, 7], 2), [vec![5, 6], vec![6, 7], vec![7], vec![]]);
        assert_eq!(drafts_along(&[5], &[], 2), [vec![], Vec::new()]);
    }

    #[test]
    fn it_finds_its_place_again_after_an_edit() {
        let prediction = [1, 2, 3, 4, 5, 6, 7, 8];
        // Replaced: 9 for 3. Inserted: 9 9 after 2. Removed: 3 4.
        assert_eq!(drafts_along(&[1, 2, 9, 4], &prediction, 2)[3..], [vec![], vec![5, 6]]);
        assert_eq!(drafts_along(&[1, 2, 9, 9, 3], &prediction, 2)[3..], [vec![], vec![], vec![4, 5]]);
        assert_eq!(drafts_along(&[1, 2, 5], &prediction, 2)[3..], [[6, 7]]);
    }

    #[test]
    fn of_equal_places_the_next_one_ahead_counts_and_far_ones_need_more_tokens() {
        assert_eq!(drafts_along(&[1, 2, 9, 4], &[4, 1, 2, 3, 4, 5, 4, 6], 1)[4], [5]);
        let mut far = vec![1, 2, 3, 4, 5];
        far.extend(100..100 + NEAR as u32 + 8);
        assert_eq!(drafts_along(&[100, 9, 3], &far, 1)[3], [0_u32; 0], "one token far back is not enough");
        assert_eq!(drafts_along(&[100, 9, 1, 2, 3, 4], &far, 1)[6], [5], "four are");
    }

    #[test]
    fn grammar_drafts_move_the_place_for_one_proposal_only() {
        let (mut proposer, prediction) = (PredictionProposer::default(), [5, 6, 7, 8]);
        let mut drafts = [0; 1];
        proposer.propose(text(&[0, 5], &prediction), &mut drafts).unwrap();
        assert_eq!(drafts, [6]);
        proposer.propose_after(text(&[0, 5], &prediction), &[6, 7], &mut drafts).unwrap();
        assert_eq!(drafts, [8]);
        proposer.propose(text(&[0, 5], &prediction), &mut drafts).unwrap();
        assert_eq!(drafts, [6]);
    }

    #[test]
    fn an_ended_request_leaves_nothing() {
        let mut proposer = PredictionProposer::default();
        proposer.propose(text(&[0, 5], &[5, 6]), &mut [0]).unwrap();
        proposer.end(text(&[0, 5], &[5, 6])).unwrap();
        assert!(proposer.places.is_empty());
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 1000, failure_persistence: None, ..ProptestConfig::default() })]

        /// Checks that the drafts are the same whether the drafter is asked after every token or only now and then.
        #[test]
        fn drafts_depend_on_the_text_alone(
            output in prop::collection::vec(0..4_u32, 0..40),
            prediction in prop::collection::vec(0..4_u32, 0..40),
            asked in prop::collection::vec(any::<bool>(), 41),
        ) {
            let tokens = [&[0], output.as_slice()].concat();
            let along = drafts_along(&output, &prediction, 3);
            let mut proposer = PredictionProposer::default();
            for end in (1..=tokens.len()).filter(|end| asked[end - 1]) {
                let mut drafts = vec![0; 3];
                let len = proposer.propose(text(&tokens[..end], &prediction), &mut drafts).unwrap().len;
                prop_assert_eq!(&drafts[..len], &along[end - 1]);
            }
        }

        /// Checks that all tokens of an output that equals its prediction are drafted.
        #[test]
        fn an_exact_prediction_is_always_right(output in prop::collection::vec(0..9_u32, 1..60)) {
            for (end, drafts) in drafts_along(&output, &output, 4).into_iter().enumerate() {
                prop_assert_eq!(&drafts[..], &output[end..(end + 4).min(output.len())]);
            }
        }
    }
}
