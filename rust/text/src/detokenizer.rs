//! Conversion of token ids to text as they come, and stop strings in that text. Knows one request's text, no stop ids,
//! and no other ends.

use crate::decoder::{REPLACEMENT, Step, Stream, TokenDecoder};
use crate::error::{Error, Result};
use crate::stops::Stops;
use std::sync::Arc;

/// Number of prompt tokens that the decoder sees before the output. They suffice for the first word to get or lose its
/// space.
const CONTEXT: usize = 8;
/// Maximum number of tokens that are held back. Older tokens can no longer become a character and are returned. Each
/// step decodes all held tokens.
const MAX_PENDING: usize = 32;
/// Maximum number of tokens of an unfinished UTF-8 character, which has at most three bytes.
const MAX_CHAR_TOKENS: usize = 3;

/// Text parameters of a request.
#[derive(Clone, Debug, Default)]
pub struct TextParams {
    /// Whether special tokens have no text.
    pub skip_special_tokens: bool,
    /// Stop strings, none of them empty.
    pub stop: Vec<String>,
    /// Whether the text includes the stop string that ended it.
    pub include_stop_str_in_output: bool,
    /// 0-based index of the first output token that may complete a stop string.
    pub min_tokens: usize,
}

/// Result of taking new tokens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Update {
    /// Number of tokens taken: all, or those up to the one that completed a stop string.
    pub taken: usize,
    /// Index of the stop string that ended the text.
    pub stop: Option<usize>,
}

/// Text of one request's output, token by token.
///
/// The text equals that of decoding all ids at once, except that a stop string ends it. If it ends in a run of bytes
/// that are no text, the number of replacement characters may differ too. Bytes of an unfinished character are held
/// back until it is complete, or until [`Self::finish`]. If one token completes several stop strings, the one that ends
/// first counts; among those, the longest.
#[derive(Debug)]
pub struct Detokenizer {
    decoder: Arc<TokenDecoder>,
    params: TextParams,
    stops: Stops,
    text: String,
    num_tokens: usize,
    ended: bool,
    /// Ids of the last piece of text, which are the decoder's context.
    shown: Vec<u32>,
    /// Ids that were taken but have no text yet.
    pending: Vec<u32>,
    stream: Stream,
    /// Whether `stream` does not know `shown`, because tokens with their own text came after its last step.
    stale: bool,
    /// Length of the text after each token, during an update with stop strings.
    ends: Vec<usize>,
}

impl Detokenizer {
    /// Makes an empty text. The last few tokens of `prompt` are context for the decoder; their text is not part of the
    /// output.
    ///
    /// # Errors
    /// [`Error::Decode`] if the prompt cannot be decoded.
    pub fn new(decoder: Arc<TokenDecoder>, params: TextParams, prompt: &[u32]) -> Result<Self> {
        let mut made = Self {
            decoder,
            stops: Stops::new(params.stop.clone()),
            params,
            text: String::new(),
            num_tokens: 0,
            ended: false,
            shown: Vec::new(),
            pending: Vec::new(),
            stream: Stream::default(),
            stale: false,
            ends: Vec::new(),
        };
        for &token in &prompt[prompt.len().saturating_sub(CONTEXT)..] {
            made.step(token)?;
        }
        if !made.pending.is_empty() {
            // The prompt ends within a character. Its bytes belong to the prompt's text, so the output starts afresh.
            made.restart(Vec::new())?;
        }
        made.text.clear();
        Ok(made)
    }

    /// Returns all text so far. It ends before a stop string, or after it with `include_stop_str_in_output`.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// Returns the part of the text that no further token can remove: a possible beginning of a stop string is left
    /// out.
    pub fn stable_text(&self) -> &str {
        let held_back =
            if self.ended || self.params.include_stop_str_in_output { 0 } else { self.stops.held_back(&self.text) };
        &self.text[..self.text.len() - held_back]
    }

    /// Takes new output ids. Ids after the one that completes a stop string are not taken. Must not be called again
    /// after a stop string or [`Self::finish`].
    ///
    /// # Errors
    /// [`Error::Decode`] if the ids cannot be decoded; the text must not be used any more.
    pub fn update(&mut self, tokens: impl IntoIterator<Item = u32>) -> Result<Update> {
        // Where text begins that may complete a stop string. All tokens first, then one search: most find nothing.
        let mut from = None;
        self.ends.clear();
        let mut fault: Option<Error> = None;
        for token in tokens {
            if self.num_tokens >= self.params.min_tokens && from.is_none() {
                from = Some(self.text.len());
            }
            if let Err(error) = self.step(token) {
                fault = Some(error);
                break;
            }
            self.num_tokens += 1;
            self.ends.push(self.text.len());
        }
        if !self.stops.is_empty()
            && let Some(from) = from
            && let Some(found) = self.stops.find(&self.text, from)
        {
            self.text.truncate(if self.params.include_stop_str_in_output { found.end } else { found.start });
            self.ended = true;
            let before = self.ends.partition_point(|&end| end < found.end);
            return Ok(Update { taken: before + 1, stop: Some(found.index) });
        }
        fault.map_or(Ok(Update { taken: self.ends.len(), stop: None }), Err)
    }

    /// Ends the text: bytes held back become replacement characters. A second call changes nothing.
    ///
    /// # Errors
    /// [`Error::Decode`] if the held tokens cannot be decoded.
    pub fn finish(&mut self) -> Result<()> {
        if std::mem::replace(&mut self.ended, true) || self.pending.is_empty() {
            return Ok(());
        }
        self.flush(self.pending.len())
    }

    /// Decodes one more token id.
    #[inline]
    fn step(&mut self, token: u32) -> Result<()> {
        if self.pending.is_empty()
            && let Some(piece) = self.decoder.piece(token, self.shown.is_empty())
        {
            let shows = !(piece.special && self.params.skip_special_tokens);
            if shows && !piece.text.is_empty() {
                self.text.push_str(&piece.text);
                self.shown.clear();
                self.shown.push(token);
                self.stale = true;
            }
            return Ok(());
        }
        self.step_stream(token)
    }

    /// Feeds one id whose text depends on others.
    fn step_stream(&mut self, token: u32) -> Result<()> {
        if std::mem::take(&mut self.stale) {
            self.stream = Stream::behind(&self.shown);
        }
        self.pending.push(token);
        match self.decoder.step(&mut self.stream, token, self.params.skip_special_tokens)? {
            Step::Text(piece) => {
                self.text.push_str(&piece);
                std::mem::swap(&mut self.shown, &mut self.pending);
                self.pending.clear();
                Ok(())
            }
            Step::Wait if self.pending.len() > MAX_PENDING => self.flush(self.pending.len() - MAX_CHAR_TOKENS),
            Step::Wait => Ok(()),
            // As with a fallback to bytes, where one invalid byte makes all of its run replacement characters.
            Step::Changed => self.flush(self.pending.len()),
        }
    }

    /// Adds the text of the first `count` pending ids as they are, and continues after them with a new stream.
    fn flush(&mut self, count: usize) -> Result<()> {
        let tail = self.pending.split_off(count);
        let head = std::mem::take(&mut self.pending);
        let context = self.decoder.decode(&self.shown, self.params.skip_special_tokens)?;
        let both =
            self.decoder.decode(&[self.shown.as_slice(), head.as_slice()].concat(), self.params.skip_special_tokens)?;
        match both.strip_prefix(&context) {
            Some(piece) => self.text.push_str(piece),
            None => self.text.push_str(&self.decoder.decode(&head, self.params.skip_special_tokens)?),
        }
        self.restart(head)?;
        tail.into_iter().try_for_each(|token| self.step(token))
    }

    /// Starts a new stream after `shown`, whose text is not returned again.
    fn restart(&mut self, shown: Vec<u32>) -> Result<()> {
        // Of context that ends in a replacement character, the library's stream would give out the text once more.
        let unusable = self.decoder.decode(&shown, self.params.skip_special_tokens)?.ends_with(REPLACEMENT);
        self.stream = Stream::behind(if unusable { &[] } else { &shown });
        (self.shown, self.stale) = (shown, false);
        self.pending.clear();
        Ok(())
    }
}
