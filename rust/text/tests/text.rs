//! Tests that text as it comes equals text decoded at once, and that stop strings end it as a search of the whole text
//! would.

use proptest::prelude::*;
use proptest::sample::select;
use serde_json::json;
use specrs_text::{Detokenizer, Error, TextParams, TokenDecoder, Update};
use std::sync::Arc;

/// Words of the tokenizer, by id: letters, a space before a letter, the two halves of é, the bytes of an emoji, a
/// special token.
const WORDS: [&str; 12] = ["a", "b", "c", "Ġa", "Ġ", "Ã", "©", "Ã©", "ðŁ", "ĺ", "Ģ", "<e>"];

fn decoder() -> Arc<TokenDecoder> {
    let vocab: serde_json::Map<_, _> = WORDS.iter().zip(0..).map(|(word, id)| ((*word).into(), json!(id))).collect();
    let special = json!({
        "id": 11, "content": "<e>", "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": true,
    });
    let byte_level = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true});
    let json = json!({
        "version": "1.0",
        "added_tokens": [special],
        "model": {"type": "BPE", "vocab": vocab, "merges": [["Ã", "©"]]},
        "decoder": byte_level,
    });
    Arc::new(TokenDecoder::from_json(&json.to_string()).expect("a tokenizer"))
}

fn params(skip_special_tokens: bool, stop: &[&str], min_tokens: usize) -> TextParams {
    let stop = stop.iter().map(ToString::to_string).collect();
    TextParams { skip_special_tokens, stop, min_tokens, ..TextParams::default() }
}

/// Finds the first stop in the text of `pieces` by trying every end in turn: `(tokens, end, start, index)`.
fn search(pieces: &[&str], stops: &[&str], min_tokens: usize) -> Option<(usize, usize, usize, usize)> {
    let mut text = String::new();
    for (number, piece) in pieces.iter().enumerate() {
        for letter in piece.chars() {
            text.push(letter);
            let found = stops.iter().enumerate().filter(|(_, stop)| number >= min_tokens && text.ends_with(**stop));
            if let Some((index, stop)) = found.max_by_key(|(index, stop)| (stop.len(), usize::MAX - index)) {
                return Some((number + 1, text.len(), text.len() - stop.len(), index));
            }
        }
    }
    None
}

proptest! {
    #[test]
    fn text_is_what_decoding_at_once_gives(
        ids in prop::collection::vec(0..12u32, 0..40),
        prompt in prop::collection::vec(0..12u32, 0..12),
        skip in any::<bool>(),
        chunk in 1..6usize,
    ) {
        let decoder = decoder();
        let mut text = Detokenizer::new(decoder.clone(), params(skip, &["never"], 0), &prompt).unwrap();
        let mut shown = String::new();
        for ids in ids.chunks(chunk) {
            let update = text.update(ids.iter().copied()).unwrap();
            prop_assert_eq!(update, Update { taken: ids.len(), stop: None });
            prop_assert!(text.stable_text().starts_with(&shown));
            shown = text.stable_text().to_owned();
        }
        text.finish().unwrap();
        text.finish().unwrap();
        prop_assert!(text.stable_text().starts_with(&shown));
        prop_assert_eq!(text.text(), decoder.decode(&ids, skip).unwrap());
    }

    /// Decodes more invalid bytes than are held back, each a replacement character, with words before and after them.
    #[test]
    fn long_runs_of_bytes_that_are_no_text_are_given_out_once(
        runs in prop::collection::vec((select(&[5_u32, 6, 8][..]), 0..100usize, prop::collection::vec(0..4u32, 1..4)), 1..4),
        skip in any::<bool>(),
        chunk in 1..9usize,
    ) {
        let decoder = decoder();
        let mut text = Detokenizer::new(decoder.clone(), params(skip, &[], 0), &[]).unwrap();
        let ids: Vec<u32> = runs.iter().flat_map(|(byte, count, words)| [vec![*byte; *count], words.clone()].concat()).collect();
        for ids in ids.chunks(chunk) {
            text.update(ids.iter().copied()).unwrap();
        }
        text.finish().unwrap();
        prop_assert_eq!(text.text(), decoder.decode(&ids, skip).unwrap());
        let bytes: usize = runs.iter().map(|(_, count, _)| count).sum();
        prop_assert_eq!(text.text().chars().filter(|&letter| letter == char::REPLACEMENT_CHARACTER).count(), bytes);
    }

    #[test]
    fn a_stop_string_ends_the_text_where_a_search_of_all_of_it_would(
        ids in prop::collection::vec(0..5u32, 1..30),
        stops in prop::collection::vec(select(&["ab", "b a", "a", "cc", " ab", "bca", "c "][..]), 1..4),
        min_tokens in 0..6usize,
        chunk in 1..6usize,
        keep in any::<bool>(),
    ) {
        let pieces: Vec<&str> = ids.iter().map(|&id| ["a", "b", "c", " a", " "][id as usize]).collect();
        let settings = TextParams { include_stop_str_in_output: keep, ..params(true, &stops, min_tokens) };
        let mut text = Detokenizer::new(decoder(), settings, &[]).unwrap();
        let (mut taken, mut stop) = (0, None);
        for ids in ids.chunks(chunk) {
            let update = text.update(ids.iter().copied()).unwrap();
            taken += update.taken;
            stop = update.stop;
            if stop.is_some() {
                break;
            }
        }
        let whole = pieces.concat();
        match search(&pieces, &stops, min_tokens) {
            None => prop_assert_eq!((taken, stop, text.text()), (ids.len(), None, &whole[..])),
            Some((number, end, start, index)) => {
                let expected = &whole[..if keep { end } else { start }];
                prop_assert_eq!((taken, stop.map(|at| stops[at]), text.text()), (number, Some(stops[index]), expected));
                prop_assert_eq!(text.stable_text(), expected);
            }
        }
    }
}

#[test]
fn the_beginning_of_a_stop_string_is_held_back() {
    let mut text = Detokenizer::new(decoder(), params(true, &["ab c", "bb"], 0), &[]).unwrap();
    for (id, stable) in [(2, "c"), (0, "c"), (1, "c"), (0, "cab"), (1, "cab"), (2, "cababc")] {
        text.update([id]).unwrap();
        assert_eq!(text.stable_text(), stable);
    }
}

#[test]
fn what_is_no_tokenizer_says_so() {
    for json in ["", "7", "{}", r#"{"model": {"type": "BPE"}}"#, r#"{"version": "1.0", "model": {"type": "?"}}"#] {
        assert!(matches!(TokenDecoder::from_json(json), Err(Error::InvalidTokenizer(_))), "{json}");
    }
}
