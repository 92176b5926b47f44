//! Sampling parameters of a request, and their form on a device: a row of parameter columns, and the sampling steps
//! that the request needs. Every column, step and limit is listed only here. Draws nothing.

use crate::error::{Error, Result};

/// Temperature below which a request is greedy, because logits divided by less could overflow.
pub const GREEDY_BELOW: f64 = 1e-5;
/// Maximum number of stop tokens of one request, which fit in a row of device state.
pub const MAX_STOP_IDS: usize = 64;
/// Value of `logprobs` or `prompt_logprobs` for a request that wants no log probabilities.
pub const LOGPROBS_NONE: i64 = -2;
/// Value of `logprobs` or `prompt_logprobs` for a request that wants log probabilities of the whole vocabulary.
pub const LOGPROBS_ALL: i64 = -1;

macro_rules! columns {
    ($($(#[doc = $doc:literal])* $constant:ident = $name:literal,)*) => {
        /// Enumerates the columns, so that each constant is a column's index.
        #[allow(non_camel_case_types, clippy::upper_case_acronyms)]
        #[repr(usize)]
        enum Column { $($constant,)* }

        $($(#[doc = $doc])* pub const $constant: usize = Column::$constant as usize;)*

        /// Names of the parameter columns by index.
        pub const PARAM_COLUMNS: &[&str] = &[$($name),*];

        /// Descriptions of the parameter columns by index.
        pub const PARAM_COLUMN_DOCS: &[&str] = &[$(concat!($($doc),*)),*];
    };
}

columns! {
    /// 1 in greedy rows, else 0. Greedy rows have temperature 1 and no filter.
    PARAM_GREEDY = "greedy",
    /// Divisor of the logits, above 0. 1 is off.
    PARAM_TEMPERATURE = "temperature",
    /// Number of tokens to keep, at least 1. Infinity is off. fp32 counts up to 2^24.
    PARAM_TOP_K = "top_k",
    /// Share of probability to keep, in (0, 1). Infinity is off.
    PARAM_TOP_P = "top_p",
    /// `ln(min_p)`. Minus infinity is off.
    PARAM_LOG_MIN_P = "log_min_p",
    /// Repetition penalty, above 0. 1 is off.
    PARAM_REPETITION_PENALTY = "repetition_penalty",
    /// Presence penalty. 0 is off.
    PARAM_PRESENCE_PENALTY = "presence_penalty",
    /// Frequency penalty. 0 is off.
    PARAM_FREQUENCY_PENALTY = "frequency_penalty",
}

/// Number of parameter columns in a row.
pub const NUM_PARAMS: usize = PARAM_COLUMNS.len();

macro_rules! steps {
    ($($(#[doc = $doc:literal])* $constant:ident = $name:literal,)*) => {
        /// Enumerates the steps, so that each constant is a step's bit.
        #[allow(non_camel_case_types, clippy::upper_case_acronyms)]
        enum Step { $($constant,)* }

        $($(#[doc = $doc])* pub const $constant: i64 = 1 << Step::$constant as i64;)*

        /// Names of the steps by bit.
        pub const SAMPLING_STEPS: &[&str] = &[$($name),*];

        /// Descriptions of the steps by bit.
        pub const SAMPLING_STEP_DOCS: &[&str] = &[$(concat!($($doc),*)),*];
    };
}

steps! {
    /// Take the largest logit.
    STEP_GREEDY = "greedy",
    /// Draw a token at random.
    STEP_RANDOM = "random",
    /// Divide the logits by a temperature.
    STEP_TEMPERATURE = "temperature",
    /// Keep the k largest logits.
    STEP_TOP_K = "top_k",
    /// Keep the largest logits that hold a share of the probability.
    STEP_TOP_P = "top_p",
    /// Keep the tokens that are likely enough compared with the most likely one.
    STEP_MIN_P = "min_p",
    /// Apply a repetition penalty.
    STEP_REPETITION = "repetition",
    /// Apply a presence or frequency penalty.
    STEP_COUNTS = "counts",
    /// Apply allowed ids, biases or bad words.
    STEP_CONSTRAINTS = "constraints",
    /// Exclude stop tokens before `min_tokens`.
    STEP_MIN_TOKENS = "min_tokens",
    /// Report log probabilities.
    STEP_LOGPROBS = "logprobs",
    /// Apply what no record can hold, such as a grammar.
    STEP_EXTRAS = "extras",
    /// Report the final hidden state of the prompt's last token, or its logits of the allowed ids. Draw no token.
    STEP_POOLING = "pooling",
}

/// Steps that change logits or report them, other than by temperature, top k, top p and min p.
pub(crate) const STEPS_ON_LOGITS: i64 =
    STEP_REPETITION | STEP_COUNTS | STEP_CONSTRAINTS | STEP_MIN_TOKENS | STEP_LOGPROBS | STEP_EXTRAS;

/// Precision in which logits are computed and to which parameters are rounded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LogitsDtype {
    /// 32-bit floats.
    #[default]
    Float32,
    /// 64-bit floats.
    Float64,
}

/// Sampling parameters of a request, with vLLM's names and defaults.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RequestSampling<'a> {
    /// Seed of the request's random numbers, which depend only on these 64 bits and the position.
    pub seed: i64,
    /// Divisor of the logits, finite and at least 0. Below [`GREEDY_BELOW`] the request is greedy, and the parameters
    /// of randomness have no effect.
    pub temperature: f64,
    /// Number of most probable tokens to keep; 0 keeps all.
    pub top_k: usize,
    /// Share of the probability to keep, above 0 and at most 1.
    pub top_p: f64,
    /// Minimum probability of a kept token relative to the most probable one, 0 to 1.
    pub min_p: f64,
    /// Repetition penalty, finite and above 0; 1 is off.
    pub repetition_penalty: f64,
    /// Presence penalty, finite; 0 is off.
    pub presence_penalty: f64,
    /// Frequency penalty, finite; 0 is off.
    pub frequency_penalty: f64,
    /// Number of most probable tokens to report with each output token, [`LOGPROBS_NONE`] or [`LOGPROBS_ALL`].
    pub logprobs: i64,
    /// Number of most probable tokens to report with each prompt token, [`LOGPROBS_NONE`] or [`LOGPROBS_ALL`].
    pub prompt_logprobs: i64,
    /// Only ids that the output may contain; `None` allows all.
    pub allowed_token_ids: Option<&'a [i64]>,
    /// Ids of tokens whose logits get a bias.
    pub logit_bias_ids: &'a [i64],
    /// Bias of each id in `logit_bias_ids`; finite.
    pub logit_bias: &'a [f64],
    /// Token sequences that the output must not contain; none is empty.
    pub bad_words: &'a [Vec<i64>],
    /// Whether the request needs data that no record can hold, such as a compiled grammar. The host finds it by the
    /// request's id.
    pub has_extras: bool,
    /// Whether the request wants the final hidden state of its prompt's last token, or with `allowed_token_ids` that
    /// token's logits of these ids. No token is drawn: the output is token 0.
    pub pooling: bool,
}

impl Default for RequestSampling<'_> {
    fn default() -> Self {
        Self {
            seed: 0,
            temperature: 1.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            logprobs: LOGPROBS_NONE,
            prompt_logprobs: LOGPROBS_NONE,
            allowed_token_ids: None,
            logit_bias_ids: &[],
            logit_bias: &[],
            bad_words: &[],
            has_extras: false,
            pooling: false,
        }
    }
}

impl RequestSampling<'_> {
    /// Returns greedy parameters with everything else off, which a padding row has.
    pub fn greedy() -> Self {
        Self { temperature: 0.0, ..Self::default() }
    }

    /// Returns the parameter columns, rounded to `dtype` unless they are exact in it, and the `STEP_*` bits that they
    /// need.
    ///
    /// A parameter that is off leaves a row unchanged to the bit, so that a batch may run a step that only one row
    /// needs.
    #[expect(clippy::float_cmp, reason = "a value is off where it is exactly that")]
    pub fn columns(&self, dtype: LogitsDtype) -> ([f64; NUM_PARAMS], i64) {
        let greedy = self.temperature < GREEDY_BELOW;
        let Self { temperature, top_k, top_p, min_p, .. } =
            if greedy { Self { temperature: 1.0, ..Self::default() } } else { *self };
        let round = |value: f64| match dtype {
            LogitsDtype::Float32 => f64::from(value as f32),
            LogitsDtype::Float64 => value,
        };
        let tiny = match dtype {
            LogitsDtype::Float32 => f64::from(f32::MIN_POSITIVE),
            LogitsDtype::Float64 => f64::MIN_POSITIVE,
        };
        // A share may round to 1, which is off, or to 0, which would keep nothing. The logarithm is that of the rounded value:
        // that of another may lie on the other side of a token at exactly min_p.
        let share = round(top_p).max(tiny);
        let mut values = [0.0; NUM_PARAMS];
        values[PARAM_GREEDY] = f64::from(u8::from(greedy));
        values[PARAM_TEMPERATURE] = temperature;
        values[PARAM_TOP_K] = if top_k == 0 { f64::INFINITY } else { top_k as f64 };
        values[PARAM_TOP_P] = if share < 1.0 { share } else { f64::INFINITY };
        values[PARAM_LOG_MIN_P] = round(min_p).ln();
        values[PARAM_REPETITION_PENALTY] = self.repetition_penalty;
        values[PARAM_PRESENCE_PENALTY] = self.presence_penalty;
        values[PARAM_FREQUENCY_PENALTY] = self.frequency_penalty;
        let steps = [
            (STEP_GREEDY, greedy),
            (STEP_RANDOM, !greedy),
            (STEP_TEMPERATURE, temperature != 1.0),
            (STEP_TOP_K, top_k != 0),
            (STEP_TOP_P, share < 1.0),
            (STEP_MIN_P, min_p > 0.0),
            (STEP_REPETITION, self.repetition_penalty != 1.0),
            (STEP_COUNTS, self.presence_penalty != 0.0 || self.frequency_penalty != 0.0),
            (STEP_CONSTRAINTS, self.num_constraints() > 0 || self.allowed_token_ids.is_some()),
            (STEP_LOGPROBS, self.logprobs != LOGPROBS_NONE),
            (STEP_EXTRAS, self.has_extras),
            (STEP_POOLING, self.pooling),
        ];
        (values.map(round), steps.iter().map(|&(bit, needed)| if needed { bit } else { 0 }).sum())
    }

    /// Returns the number of elements that allowed ids, biases and bad words take in a record.
    pub(crate) fn num_constraints(&self) -> usize {
        let words: usize = self.bad_words.iter().map(|word| 1 + word.len()).sum();
        self.allowed_token_ids.map_or(0, <[i64]>::len) + 2 * self.logit_bias_ids.len() + words
    }

    /// Returns the elements of allowed ids, biases and bad words, in the order of the record.
    pub(crate) fn constraints(&self) -> Box<[i64]> {
        let lengths = self.bad_words.iter().map(|word| word.len() as i64);
        self.allowed_token_ids
            .unwrap_or_default()
            .iter()
            .copied()
            .chain(self.logit_bias_ids.iter().copied())
            .chain(self.logit_bias.iter().map(|bias| bias.to_bits() as i64))
            .chain(lengths)
            .chain(self.bad_words.iter().flatten().copied())
            .collect()
    }

    /// Checks the ranges that the computation needs: logits must stay finite, a distribution must not be empty, and ids
    /// must index the vocabulary. A host checks narrower ranges of its own; specrs declares them once, as the options
    /// of Python's `SamplingParams`.
    ///
    /// # Errors
    /// [`Error::InvalidRequest`] naming the first parameter outside its range. An id is valid if `is_token` returns
    /// true.
    pub(crate) fn validate(&self, request_id: i64, is_token: impl Fn(i64) -> bool) -> Result<()> {
        let least = f64::from_bits(1); // the smallest above 0
        let positive = least..=f64::MAX;
        let finite = f64::MIN..=f64::MAX;
        let numbers = [
            ("temperature", self.temperature, 0.0..=f64::MAX, "finite and at least 0"),
            ("top_p", self.top_p, least..=1.0, "above 0 and at most 1"),
            ("min_p", self.min_p, 0.0..=1.0, "from 0 to 1"),
            ("repetition_penalty", self.repetition_penalty, positive, "finite and above 0"),
            ("presence_penalty", self.presence_penalty, finite.clone(), "finite"),
            ("frequency_penalty", self.frequency_penalty, finite.clone(), "finite"),
        ];
        for (field, value, range, allowed) in numbers {
            if !range.contains(&value) {
                return Err(Error::invalid_request(request_id, field, value, allowed));
            }
        }
        for (field, value) in [("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)] {
            if value < LOGPROBS_NONE {
                let allowed = format!("at least 0, or {LOGPROBS_ALL} for all, or {LOGPROBS_NONE} for none");
                return Err(Error::invalid_request(request_id, field, value, allowed));
            }
        }
        if self.logit_bias.len() != self.logit_bias_ids.len() {
            let allowed = format!("one for each of {} ids", self.logit_bias_ids.len());
            return Err(Error::invalid_request(
                request_id,
                "logit_bias",
                format!("{} numbers", self.logit_bias.len()),
                allowed,
            ));
        }
        if let Some(at) = self.logit_bias.iter().position(|bias| !bias.is_finite()) {
            let value = format!("{} at index {at}", self.logit_bias[at]);
            return Err(Error::invalid_request(request_id, "logit_bias", value, "finite"));
        }
        if let Some(at) = self.bad_words.iter().position(Vec::is_empty) {
            let value = format!("no tokens at index {at}");
            return Err(Error::invalid_request(request_id, "bad_words", value, "at least 1 token each"));
        }
        let ids = [
            ("allowed_token_ids", self.allowed_token_ids.unwrap_or_default()),
            ("logit_bias_ids", self.logit_bias_ids),
        ];
        for (field, ids) in ids.into_iter().chain(self.bad_words.iter().map(|word| ("bad_words", &word[..]))) {
            if let Some(&token) = ids.iter().find(|&&token| !is_token(token)) {
                return Err(Error::invalid_request(request_id, field, token, "a token id"));
            }
        }
        Ok(())
    }
}

/// Sampling parameters of a row, as the sampler uses them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SamplingParams {
    /// Whether to take the largest logit, the lowest id of equal ones; the other fields do not count then.
    pub greedy: bool,
    /// Divisor of the logits; positive.
    pub temperature: f32,
    /// Number of largest logits to keep, and all that equal the smallest of them; infinity is off.
    pub top_k: f32,
    /// Share of the remaining probability to keep, in (0, 1); infinity is off.
    pub top_p: f32,
    /// Logarithm of the minimum ratio to the most probable token: tokens with `ln p >= ln max p + log_min_p` are kept.
    /// Minus infinity is off.
    pub log_min_p: f32,
}

impl SamplingParams {
    /// Reads the parameters from a row of columns.
    ///
    /// # Panics
    /// If there are fewer than [`NUM_PARAMS`] columns.
    pub fn of_columns(columns: &[f32]) -> Self {
        Self {
            greedy: columns[PARAM_GREEDY] != 0.0,
            temperature: columns[PARAM_TEMPERATURE],
            top_k: columns[PARAM_TOP_K],
            top_p: columns[PARAM_TOP_P],
            log_min_p: columns[PARAM_LOG_MIN_P],
        }
    }
}
