//! What a request asks of sampling, and the numbers that a device keeps of it: a row of parameter columns and the steps that it needs.
//! Every column, step and limit is listed here and nowhere else. Draws nothing.

use super::SamplingParams;
use crate::error::{Error, Result};

/// Temperatures under this are greedy: logits divided by less could overflow.
pub const GREEDY_BELOW: f64 = 1e-5;
/// Stop tokens of one request that a row of device state holds.
pub const MAX_STOP_IDS: usize = 64;
/// `logprobs` or `prompt_logprobs` of a request that wants none.
pub const LOGPROBS_NONE: i64 = -2;
/// `logprobs` or `prompt_logprobs` of a request that wants those of the whole vocabulary.
pub const LOGPROBS_ALL: i64 = -1;

macro_rules! columns {
    ($($(#[$doc:meta])* $constant:ident = $name:literal,)*) => {
        /// Counts the columns.
        #[allow(non_camel_case_types, clippy::upper_case_acronyms)]
        #[repr(usize)]
        enum Column { $($constant,)* }

        $($(#[$doc])* pub const $constant: usize = Column::$constant as usize;)*

        /// Names of the parameter columns by index.
        pub const PARAM_COLUMNS: &[&str] = &[$($name),*];
    };
}

columns! {
    /// 1 in greedy rows, else 0. Greedy rows have temperature 1 and all filters off.
    PARAM_GREEDY = "greedy",
    /// Positive.
    PARAM_TEMPERATURE = "temperature",
    /// At least 1; infinity is off.
    PARAM_TOP_K = "top_k",
    /// In (0, 1); infinity is off.
    PARAM_TOP_P = "top_p",
    /// `ln(min_p)`; minus infinity is off.
    PARAM_LOG_MIN_P = "log_min_p",
    /// Positive; 1 is off.
    PARAM_REPETITION_PENALTY = "repetition_penalty",
    /// 0 is off.
    PARAM_PRESENCE_PENALTY = "presence_penalty",
    /// 0 is off.
    PARAM_FREQUENCY_PENALTY = "frequency_penalty",
}

/// Parameter columns of a row.
pub const NUM_PARAMS: usize = PARAM_COLUMNS.len();

macro_rules! steps {
    ($($(#[$doc:meta])* $constant:ident = $name:literal,)*) => {
        /// Counts the bits.
        #[allow(non_camel_case_types, clippy::upper_case_acronyms)]
        enum Step { $($constant,)* }

        $($(#[$doc])* pub const $constant: i64 = 1 << Step::$constant as i64;)*

        /// Names of the steps by bit.
        pub const STEPS: &[&str] = &[$($name),*];
    };
}

steps! {
    /// Takes the largest logit.
    STEP_GREEDY = "greedy",
    /// Draws.
    STEP_RANDOM = "random",
    /// Divides by a temperature.
    STEP_TEMPERATURE = "temperature",
    /// Keeps the k largest.
    STEP_TOP_K = "top_k",
    /// Keeps the largest that hold a share.
    STEP_TOP_P = "top_p",
    /// Keeps what is likely enough beside the largest.
    STEP_MIN_P = "min_p",
    /// Has a repetition penalty.
    STEP_REPETITION = "repetition",
    /// Has a presence or frequency penalty.
    STEP_COUNTS = "counts",
    /// Has allowed ids, biases or bad words.
    STEP_CONSTRAINTS = "constraints",
    /// Does not write stop tokens before `min_tokens`.
    STEP_MIN_TOKENS = "min_tokens",
    /// Reports log probabilities.
    STEP_LOGPROBS = "logprobs",
    /// Needs what no record can hold.
    STEP_EXTRAS = "extras",
}

/// What the logits are computed in, which parameters are rounded to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LogitsDtype {
    /// 32 bits.
    #[default]
    Float32,
    /// 64 bits.
    Float64,
}

/// What a request asks of sampling, under vLLM's names and with vLLM's defaults.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RequestSampling<'a> {
    /// Its random numbers depend on these 64 bits, the position and nothing else.
    pub seed: i64,
    /// At least 0, finite; below [`GREEDY_BELOW`] greedy, and the parameters of randomness have no effect.
    pub temperature: f64,
    /// Keeps this many; 0 is all.
    pub top_k: usize,
    /// Above 0, at most 1.
    pub top_p: f64,
    /// 0 to 1.
    pub min_p: f64,
    /// Above 0, finite.
    pub repetition_penalty: f64,
    /// Finite.
    pub presence_penalty: f64,
    /// Finite.
    pub frequency_penalty: f64,
    /// Most likely tokens to report beside each output token, [`LOGPROBS_NONE`] or [`LOGPROBS_ALL`].
    pub logprobs: i64,
    /// The same of the prompt's tokens.
    pub prompt_logprobs: i64,
    /// The only tokens that may be written; `None` for all.
    pub allowed_token_ids: Option<&'a [i64]>,
    /// Tokens whose logits something is added to.
    pub logit_bias_ids: &'a [i64],
    /// What is added to each of them; finite.
    pub logit_bias: &'a [f64],
    /// Token sequences that are not written, none of them empty.
    pub bad_words: &'a [Vec<i64>],
    /// It needs what no record can hold, such as a compiled grammar; the host finds that by the request's id.
    pub has_extras: bool,
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
        }
    }
}

impl RequestSampling<'_> {
    /// The greedy one, everything else off: what a padding row holds.
    pub fn greedy() -> Self {
        Self { temperature: 0.0, ..Self::default() }
    }

    /// The parameter columns, rounded to `dtype` where they are exact in it, and the `STEP_*` bits that they need.
    ///
    /// "Off" leaves a row as it is to the bit, so that a batch may run a step that only one row needs.
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
        ];
        (values.map(round), steps.iter().map(|&(bit, needed)| if needed { bit } else { 0 }).sum())
    }

    /// Elements that allowed ids, biases and bad words take in a record.
    pub(crate) fn num_constraints(&self) -> usize {
        let words: usize = self.bad_words.iter().map(|word| 1 + word.len()).sum();
        self.allowed_token_ids.map_or(0, <[i64]>::len) + 2 * self.logit_bias_ids.len() + words
    }

    /// Those elements, in the order of the record.
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

    /// # Errors
    /// [`Error::InvalidRequest`] naming the first parameter outside its range; ids are those for which `is_token`.
    pub(crate) fn validate(&self, request_id: i64, is_token: impl Fn(i64) -> bool) -> Result<()> {
        let least = f64::from_bits(1); // the smallest above 0
        let positive = least..=f64::MAX;
        let finite = f64::MIN..=f64::MAX;
        let numbers = [
            ("temperature", self.temperature, 0.0..=f64::MAX, "finite and at least 0"),
            ("top_p", self.top_p, least..=1.0, "above 0, at most 1"),
            ("min_p", self.min_p, 0.0..=1.0, "0 to 1"),
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
                let allowed = format!("at least 0, {LOGPROBS_ALL} for all, {LOGPROBS_NONE} for none");
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
                return Err(Error::invalid_request(request_id, field, token, "token ids"));
            }
        }
        Ok(())
    }
}

impl SamplingParams {
    /// The parameters in a row of columns.
    ///
    /// # Panics
    /// If there are fewer than [`NUM_PARAMS`].
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
