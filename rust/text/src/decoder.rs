//! Token ids to text, by a tokenizer's own decoder.

use crate::error::{Error, Result};
use serde::de::{Deserialize, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::Value;
use serde_json::value::RawValue;
use std::collections::BTreeMap;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::OnceLock;
use tokenizers::Tokenizer;
use tokenizers::tokenizer::{DecodeStreamError, step_decode_stream};

/// Replacement character, which a text has in place of bytes that are not valid UTF-8.
pub(crate) const REPLACEMENT: char = '\u{fffd}';

/// Places in an output at which the text of a token depends on that token alone, and not on its neighbours.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Local {
    /// No place, as far as is known.
    Nowhere,
    /// Every place except the first: the first token of a text may lose a space. The id is that of a token after which
    /// other tokens are decoded alone, to get their text.
    Behind(u32),
    /// Every place.
    Everywhere,
}

/// Text of a token that depends on that token alone.
#[derive(Debug)]
pub(crate) struct Piece {
    pub(crate) text: Box<str>,
    pub(crate) special: bool,
}

/// Decoding half of a tokenizer, which all its requests share.
#[derive(Debug)]
pub struct TokenDecoder {
    tokenizer: Tokenizer,
    local: Local,
    /// Pieces by token id, each made on first use. `None`: bytes of a character, or a token whose text depends on
    /// others.
    pieces: Vec<OnceLock<Option<Piece>>>,
}

/// State of the library's decoding of a stream of tokens, kept between steps.
#[derive(Clone, Debug, Default)]
pub(crate) struct Stream {
    ids: Vec<u32>,
    prefix: String,
    prefix_index: usize,
}

impl Stream {
    /// Makes a stream that continues after `ids`, whose text it does not return.
    pub(crate) fn behind(ids: &[u32]) -> Self {
        Self { ids: ids.to_vec(), ..Self::default() }
    }
}

/// Result of one step of a stream.
pub(crate) enum Step {
    /// New text.
    Text(String),
    /// No text yet, because the last character is not complete.
    Wait,
    /// The decoder has changed text that it gave out before.
    Changed,
}

impl TokenDecoder {
    /// Makes a decoder from the JSON of `tokenizer.json`. It uses the model's vocabulary, the added tokens and the
    /// decoder.
    ///
    /// # Errors
    /// [`Error::InvalidTokenizer`] if the JSON cannot be read.
    pub fn from_json(json: &str) -> Result<Self> {
        let DecodingPart { json, local, num_ids } =
            DecodingPart::of(json).map_err(|error| Error::InvalidTokenizer(error.to_string()))?;
        let tokenizer: Tokenizer =
            json.parse().map_err(|error: tokenizers::Error| Error::InvalidTokenizer(error.to_string()))?;
        let mut decoder = Self { tokenizer, local, pieces: Vec::new() };
        if matches!(decoder.local, Local::Behind(_)) {
            decoder.local = (0..num_ids as u32).find(|&id| decoder.is_word(id)).map_or(Local::Nowhere, Local::Behind);
        }
        if decoder.local != Local::Nowhere {
            decoder.pieces.resize_with(num_ids, OnceLock::new);
        }
        Ok(decoder)
    }

    /// Decodes `ids`, all at once.
    ///
    /// # Errors
    /// [`Error::Decode`] if the decoder fails.
    pub fn decode(&self, ids: &[u32], skip_special_tokens: bool) -> Result<String> {
        if ids.is_empty() {
            return Ok(String::new());
        }
        unless_panic(|| self.tokenizer.decode(ids, skip_special_tokens))?
            .map_err(|error| Error::Decode(error.to_string()))
    }

    /// Returns a token's own text after other text, or at the beginning if `first`; `None` if its text depends on more
    /// than that.
    #[inline]
    pub(crate) fn piece(&self, id: u32, first: bool) -> Option<&Piece> {
        if first && self.local != Local::Everywhere {
            return None;
        }
        self.pieces.get(id as usize)?.get_or_init(|| self.make_piece(id)).as_ref()
    }

    /// Feeds one token to a stream.
    pub(crate) fn step(&self, stream: &mut Stream, id: u32, skip_special_tokens: bool) -> Result<Step> {
        let Stream { ids, prefix, prefix_index } = stream;
        match unless_panic(|| {
            step_decode_stream(&self.tokenizer, vec![id], skip_special_tokens, ids, prefix, prefix_index)
        })? {
            Ok(Some(text)) => Ok(Step::Text(text)),
            Ok(None) => Ok(Step::Wait),
            Err(error) => match error.downcast_ref::<DecodeStreamError>() {
                Some(DecodeStreamError::InvalidPrefix { .. }) => Ok(Step::Changed),
                _ => Err(Error::Decode(error.to_string())),
            },
        }
    }

    #[cold]
    fn make_piece(&self, id: u32) -> Option<Piece> {
        let token = self.tokenizer.id_to_token(id)?;
        if is_byte(&token) {
            return None;
        }
        let text = match self.local {
            Local::Nowhere => return None,
            Local::Everywhere => self.decode(&[id], false).ok()?,
            Local::Behind(word) => {
                let both = self.decode(&[word, id], false).ok()?;
                both.strip_prefix(&self.decode(&[word], false).ok()?)?.to_string()
            }
        };
        let special = self.tokenizer.get_added_vocabulary().is_special_token(&token);
        (!text.contains(REPLACEMENT)).then(|| Piece { text: text.into(), special })
    }

    /// Returns whether a token's text consists of letters, so that no decoder strips a part of it.
    fn is_word(&self, id: u32) -> bool {
        let is_byte = self.tokenizer.id_to_token(id).is_none_or(|token| is_byte(&token));
        let text = self.decode(&[id], true).unwrap_or_default();
        !is_byte && !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_alphabetic())
    }
}

/// Turns a panic of the decoder into an error. Some decoders panic on some tokens, for example one that strips both
/// ends of a token that it strips completely.
fn unless_panic<T>(decode: impl FnOnce() -> T) -> Result<T> {
    catch_unwind(AssertUnwindSafe(decode)).map_err(|_| Error::Decode("the decoder panicked".into()))
}

/// Returns whether a token stands for a byte, `<0x41>`, in a decoder with a fallback to bytes.
fn is_byte(token: &str) -> bool {
    token.len() == 6 && token.starts_with("<0x") && token.ends_with('>')
}

/// Derives from the decoder's JSON where a token's text depends only on the token. The listed kinds decode token by
/// token; others may not.
fn locality(decoder: &Value) -> Local {
    let kind = |decoder: &Value| decoder["type"].as_str().map(str::to_owned);
    let is_plain = |step: &Value| match kind(step).as_deref() {
        Some("Replace") => step["pattern"].get("String").is_some(),
        Some("Strip") => step["stop"] == 0,
        Some("ByteFallback" | "Fuse") => true,
        _ => false,
    };
    match kind(decoder).as_deref() {
        Some("ByteLevel") => Local::Everywhere,
        Some("Metaspace") => Local::Behind(0),
        Some("Sequence") => match decoder["decoders"].as_array() {
            Some(steps) if steps.iter().all(is_plain) => Local::Behind(0),
            _ => Local::Nowhere,
        },
        _ => Local::Nowhere,
    }
}

/// JSON object whose values are not parsed. The JSON of a large vocabulary takes ten times its length as values.
type Sections<'a> = BTreeMap<String, &'a RawValue>;

/// Decoding part of a tokenizer, without what only encoding needs.
struct DecodingPart {
    /// The part as `tokenizer.json`.
    json: String,
    local: Local,
    /// One more than the largest id.
    num_ids: usize,
}

impl DecodingPart {
    /// Takes the part from the JSON of `tokenizer.json`.
    fn of(json: &str) -> serde_json::Result<Self> {
        let (null, none): (&RawValue, &RawValue) = (serde_json::from_str("null")?, serde_json::from_str("[]")?);
        let mut file: Sections<'_> = serde_json::from_str(json)?;
        for section in ["normalizer", "pre_tokenizer", "post_processor", "truncation", "padding"] {
            file.insert(section.to_owned(), null);
        }
        let section = |name: &str| file.get(name).map_or("null", |section| section.get());
        let decoder: Value = serde_json::from_str(section("decoder"))?;
        let added: Value = serde_json::from_str(section("added_tokens"))?;
        let added = added.as_array().map(Vec::as_slice).unwrap_or_default();
        let mut num_ids = added.iter().filter_map(|token| token["id"].as_u64()).max().map_or(0, |id| id as usize + 1);
        let mut model: Option<Sections<'_>> = serde_json::from_str(section("model")).ok();
        if let Some(model) = &mut model {
            let vocab = model.get("vocab").map_or("null", |vocab| vocab.get());
            num_ids = num_ids.max(serde_json::from_str::<VocabSize>(vocab)?.0);
            // Merges are most of a tokenizer's JSON, and say how to encode.
            if let Some(merges) = model.get_mut("merges") {
                *merges = none;
            }
        }
        let model = model.map(|model| serde_json::value::to_raw_value(&model)).transpose()?;
        if let Some(model) = &model {
            file.insert("model".to_owned(), model);
        }
        Ok(Self { json: serde_json::to_string(&file)?, local: locality(&decoder), num_ids })
    }
}

/// One more than the largest id of a model's vocabulary, which maps tokens to ids or lists tokens; 0 for anything else.
struct VocabSize(usize);

impl<'de> Deserialize<'de> for VocabSize {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        struct Counter;

        impl<'de> Visitor<'de> for Counter {
            type Value = usize;

            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("a vocabulary")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> std::result::Result<usize, A::Error> {
                let mut size = 0;
                while let Some((IgnoredAny, id)) = map.next_entry::<IgnoredAny, Value>()? {
                    size = id.as_u64().map_or(size, |id| size.max(id as usize + 1));
                }
                Ok(size)
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> std::result::Result<usize, A::Error> {
                let mut size = 0;
                while list.next_element::<IgnoredAny>()?.is_some() {
                    size += 1;
                }
                Ok(size)
            }

            fn visit_unit<E>(self) -> std::result::Result<usize, E> {
                Ok(0)
            }
        }

        deserializer.deserialize_any(Counter).map(Self)
    }
}
