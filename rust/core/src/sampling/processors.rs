//! Logits processors of one request: masks, biases and penalties of one row of logits, before it is sampled.
//!
//! The order is that of vLLM's sampler: `allowed_token_ids` and the grammar, `bad_words`, `min_tokens`, `logit_bias`,
//! then repetition, frequency and presence penalty. The torch reference is `specrs.verify.processing`; both compute the
//! same bits.

use super::{
    LOGPROBS_NONE, NUM_PARAMS, PARAM_FREQUENCY_PENALTY, PARAM_PRESENCE_PENALTY, PARAM_REPETITION_PENALTY,
    STEP_CONSTRAINTS, STEP_COUNTS, STEP_EXTRAS, STEP_MIN_TOKENS, STEP_POOLING, STEP_REPETITION,
};
use crate::scheduler::layout::RecordView;

/// Logits processors of one request, and the log probabilities that it wants.
#[derive(Clone, Debug, PartialEq)]
#[expect(clippy::struct_excessive_bools, reason = "each is a property of its own")]
pub struct LogitsProcessors {
    /// Id of the request.
    pub request_id: i64,
    /// Whether a grammar masks the request's rows. The host has the grammar and provides the masks.
    pub has_grammar: bool,
    /// Number of top tokens to report with each output token, `LOGPROBS_ALL` or [`LOGPROBS_NONE`].
    pub logprobs: i64,
    /// Number of top tokens to report with each prompt token, `LOGPROBS_ALL` or [`LOGPROBS_NONE`].
    pub prompt_logprobs: i64,
    /// Whether the request wants the final hidden state of its prompt's last token, or that token's logits of
    /// [`allowed_ids`](Self::allowed_ids).
    pub pooling: bool,
    /// Whether stop ids are masked before `min_tokens`.
    masks_stops: bool,
    /// Mask of `allowed_token_ids`: bit t % 32 of word t / 32 is set for an allowed id t. `None` allows all ids.
    allowed: Option<Box<[u32]>>,
    bad_words: Box<[Box<[i64]>]>,
    bias: Box<[(usize, f32)]>,
    /// Repetition penalty; 1 is off.
    repetition: f32,
    /// Frequency penalty; 0 is off.
    frequency: f32,
    /// Presence penalty; 0 is off.
    presence: f32,
    has_penalties: bool,
}

impl Default for LogitsProcessors {
    /// Makes processors that change no logits and report no log probabilities.
    fn default() -> Self {
        Self {
            request_id: -1,
            has_grammar: false,
            logprobs: LOGPROBS_NONE,
            prompt_logprobs: LOGPROBS_NONE,
            pooling: false,
            masks_stops: false,
            allowed: None,
            bad_words: Box::default(),
            bias: Box::default(),
            repetition: 1.0,
            frequency: 0.0,
            presence: 0.0,
            has_penalties: false,
        }
    }
}

/// Context of a row of logits: the tokens before it, and the tokens excluded at its position.
#[derive(Clone, Copy, Debug)]
pub struct RowContext<'a> {
    /// All tokens before the row's position: prompt, output and drafts.
    pub tokens: &'a [i64],
    /// Number of `tokens` that belong to the prompt.
    pub prompt_len: usize,
    /// Stop ids of the request; -1 is padding.
    pub stop_ids: &'a [i64],
    /// Whether the position lies before `min_tokens`.
    pub is_before_min_len: bool,
    /// Mask of the grammar, `[ceil(V / 32)]` words: bit t % 32 of word t / 32 is set for ids that may come next.
    pub grammar: Option<&'a [u32]>,
}

/// Work space of [`LogitsProcessors::apply`] with the number of occurrences of each token. All zero between calls.
#[derive(Clone, Debug, Default)]
pub struct TokenCounts {
    /// Number of occurrences of each token in the output, `[V]`.
    output: Vec<u32>,
    /// Whether each token occurs in the prompt, `[V]`.
    in_prompt: Vec<bool>,
    /// Ids of tokens that occurred, each once.
    seen: Vec<usize>,
}

impl LogitsProcessors {
    /// Reads the processors of the record's admitted request `index`. Ids are below `vocab_size`.
    pub fn read(record: &RecordView<'_>, index: usize, vocab_size: usize) -> Self {
        let (steps, params) = (record.admit_steps[index], &record.admit_params[index * NUM_PARAMS..][..NUM_PARAMS]);
        let param = |column: usize| f64::from_bits(params[column] as u64) as f32;
        let mut read = Self {
            request_id: record.admit_request_id[index],
            has_grammar: steps & STEP_EXTRAS != 0,
            logprobs: record.admit_logprobs[index],
            prompt_logprobs: record.admit_prompt_logprobs[index],
            pooling: steps & STEP_POOLING != 0,
            masks_stops: steps & STEP_MIN_TOKENS != 0,
            repetition: param(PARAM_REPETITION_PENALTY),
            frequency: param(PARAM_FREQUENCY_PENALTY),
            presence: param(PARAM_PRESENCE_PENALTY),
            has_penalties: steps & (STEP_REPETITION | STEP_COUNTS) != 0,
            ..Self::default()
        };
        if steps & STEP_CONSTRAINTS != 0 {
            let start = record.admit_constraint_start[index] as usize;
            read.read_constraints(record, index, &record.constraint[start..], vocab_size);
        }
        read
    }

    /// Reads allowed ids, biases and bad words, in the order of the record's section `constraint`.
    fn read_constraints(&mut self, record: &RecordView<'_>, index: usize, constraint: &[i64], vocab_size: usize) {
        let num_allowed = record.admit_num_allowed[index];
        let (allowed, rest) = constraint.split_at(num_allowed.max(0) as usize);
        let (bias_ids, rest) = rest.split_at(record.admit_num_biases[index] as usize);
        let (biases, rest) = rest.split_at(bias_ids.len());
        let (lengths, mut words) = rest.split_at(record.admit_num_bad_words[index] as usize);
        self.allowed = (num_allowed >= 0).then(|| {
            let mut mask = vec![0; vocab_size.div_ceil(32)].into_boxed_slice();
            for &id in allowed {
                if let Some(word) = mask.get_mut(id as usize / 32) {
                    *word |= 1 << (id % 32);
                }
            }
            mask
        });
        let bias = |(&id, &bits): (&i64, &i64)| (id as usize, f64::from_bits(bits as u64) as f32);
        self.bias = bias_ids.iter().zip(biases).map(bias).collect();
        let mut word = |&length: &i64| {
            let (word, rest) = words.split_at(length as usize);
            words = rest;
            word.into()
        };
        self.bad_words = lengths.iter().map(&mut word).collect();
    }

    /// Returns whether the request has `allowed_token_ids`.
    pub fn limits_ids(&self) -> bool {
        self.allowed.is_some()
    }

    /// Returns the ids of `allowed_token_ids`, ascending; `None` if all ids are allowed.
    pub fn allowed_ids(&self) -> Option<Vec<usize>> {
        let mask = self.allowed.as_deref()?;
        Some((0..32 * mask.len()).filter(|&id| mask[id / 32] >> (id % 32) & 1 == 1).collect())
    }

    /// Returns whether [`apply`](Self::apply) may change a row of this request.
    pub fn change_logits(&self) -> bool {
        self.has_grammar
            || self.masks_stops
            || self.has_penalties
            || self.allowed.is_some()
            || !self.bad_words.is_empty()
            || !self.bias.is_empty()
    }

    /// Applies all processors to a row `[V]` of logits. Excluded tokens become minus infinity.
    pub fn apply(&self, logits: &mut [f32], context: &RowContext<'_>, counts: &mut TokenCounts) {
        if let Some(allowed) = &self.allowed {
            keep_only(logits, allowed);
        }
        if let Some(grammar) = context.grammar {
            keep_only(logits, grammar);
        }
        for word in &self.bad_words {
            if let Some((&last, before)) = word.split_last()
                && context.tokens.ends_with(before)
            {
                add(logits, last as usize, f32::NEG_INFINITY);
            }
        }
        if self.masks_stops && context.is_before_min_len {
            // Where a grammar leaves nothing but the end, the text is complete.
            if !context.grammar.is_some_and(|grammar| leaves_only(grammar, logits.len(), context.stop_ids)) {
                for &id in context.stop_ids.iter().filter(|&&id| id >= 0) {
                    add(logits, id as usize, f32::NEG_INFINITY);
                }
            }
        }
        for &(id, bias) in &self.bias {
            add(logits, id, bias);
        }
        if self.has_penalties {
            self.penalize(logits, context, counts);
        }
    }

    /// Applies the repetition penalty (Keskar et al. 2019, section 4.1, with the sign rule), then the frequency and
    /// presence penalties.
    fn penalize(&self, logits: &mut [f32], context: &RowContext<'_>, counts: &mut TokenCounts) {
        counts.count(context, logits.len());
        for &token in &counts.seen {
            let (count, logit) = (counts.output[token], &mut logits[token]);
            *logit = if *logit > 0.0 { *logit / self.repetition } else { *logit * self.repetition };
            let occurs = if count > 0 { 1.0 } else { 0.0 };
            *logit = *logit - self.frequency * count as f32 - self.presence * occurs;
        }
        counts.clear();
    }
}

impl TokenCounts {
    fn count(&mut self, context: &RowContext<'_>, vocab_size: usize) {
        self.output.resize(vocab_size, 0);
        self.in_prompt.resize(vocab_size, false);
        let (prompt, output) = context.tokens.split_at(context.prompt_len.min(context.tokens.len()));
        for token in prompt.iter().map(|&token| token as usize) {
            if !self.in_prompt[token] {
                self.in_prompt[token] = true;
                self.seen.push(token);
            }
        }
        for token in output.iter().map(|&token| token as usize) {
            if self.output[token] == 0 && !self.in_prompt[token] {
                self.seen.push(token);
            }
            self.output[token] += 1;
        }
    }

    fn clear(&mut self) {
        for token in self.seen.drain(..) {
            self.output[token] = 0;
            self.in_prompt[token] = false;
        }
    }
}

/// Adds `amount` to the logit of an id; does nothing if the vocabulary does not have the id.
fn add(logits: &mut [f32], id: usize, amount: f32) {
    if let Some(logit) = logits.get_mut(id) {
        *logit += amount;
    }
}

/// Sets the logits of all ids that are not in a mask to minus infinity.
fn keep_only(logits: &mut [f32], mask: &[u32]) {
    for (logits, &word) in logits.chunks_mut(32).zip(mask) {
        match word {
            u32::MAX => {}
            0 => logits.fill(f32::NEG_INFINITY),
            _ => {
                for (bit, logit) in logits.iter_mut().enumerate() {
                    *logit = if word >> bit & 1 == 1 { *logit } else { f32::NEG_INFINITY };
                }
            }
        }
    }
}

/// Returns whether a mask over V ids contains no ids except some of `ids`, of which negative ones are padding.
fn leaves_only(mask: &[u32], vocab_size: usize, ids: &[i64]) -> bool {
    mask.iter().enumerate().all(|(index, &word)| {
        let inside = (vocab_size - 32 * index).min(32);
        let mut left = word & (u32::MAX >> (32 - inside));
        for &id in ids {
            if id >= 0 && id as usize / 32 == index {
                left &= !(1 << (id % 32));
            }
        }
        left == 0
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const NONE: f32 = f32::NEG_INFINITY;

    fn context(tokens: &[i64], prompt_len: usize) -> RowContext<'_> {
        RowContext { tokens, prompt_len, stop_ids: &[], is_before_min_len: false, grammar: None }
    }

    fn applied(processors: &LogitsProcessors, logits: &[f32], context: &RowContext<'_>) -> Vec<f32> {
        let (mut row, mut counts) = (logits.to_vec(), TokenCounts::default());
        processors.apply(&mut row, context, &mut counts);
        // Work space that is not left empty would count tokens of another row.
        let mut again = logits.to_vec();
        processors.apply(&mut again, context, &mut counts);
        assert_eq!(
            row.iter().map(|x| x.to_bits()).collect::<Vec<_>>(),
            again.iter().map(|x| x.to_bits()).collect::<Vec<_>>()
        );
        row
    }

    #[test]
    fn penalties_tell_prompt_from_output() {
        let penalties = LogitsProcessors {
            repetition: 2.0,
            frequency: 0.5,
            presence: 0.25,
            has_penalties: true,
            ..LogitsProcessors::default()
        };
        // Token 0 is in the prompt, 1 twice in the output, 2 in both, 3 nowhere.
        let row = applied(&penalties, &[4.0, 4.0, -4.0, 4.0], &context(&[0, 2, 0, 1, 2, 1], 3));
        assert_eq!(row, [2.0, 2.0 - 1.0 - 0.25, -8.0 - 0.5 - 0.25, 4.0]);
    }

    #[test]
    fn bad_words_need_all_their_tokens_before() {
        let words = LogitsProcessors {
            bad_words: [vec![3], vec![1, 2], vec![0, 1, 0]].into_iter().map(Vec::into_boxed_slice).collect(),
            ..LogitsProcessors::default()
        };
        assert_eq!(applied(&words, &[0.0; 4], &context(&[0, 1], 2)), [NONE, 0.0, NONE, NONE]);
        assert_eq!(applied(&words, &[0.0; 4], &context(&[1], 1)), [0.0, 0.0, NONE, NONE]);
        assert_eq!(applied(&words, &[0.0; 4], &context(&[], 0)), [0.0, 0.0, 0.0, NONE]);
    }

    #[test]
    fn stop_ids_are_masked_unless_a_grammar_leaves_only_them() {
        let stops = LogitsProcessors { masks_stops: true, has_grammar: true, ..LogitsProcessors::default() };
        for (grammar, before, expected) in [
            (0b0110_u32, true, [NONE, 0.0, NONE, NONE]),
            (0b0110, false, [NONE, 0.0, 0.0, NONE]),
            (0b0100, true, [NONE, NONE, 0.0, NONE]),
            // Bits after the vocabulary are not ids.
            (0xFFFF_FFF4, true, [NONE, NONE, 0.0, NONE]),
        ] {
            let context = RowContext {
                stop_ids: &[2, -1],
                is_before_min_len: before,
                grammar: Some(&[grammar]),
                ..context(&[], 0)
            };
            assert_eq!(applied(&stops, &[0.0; 4], &context), expected, "{grammar:b} {before}");
        }
    }

    #[test]
    fn masks_have_a_word_for_each_32_ids() {
        let allowed: Vec<usize> = vec![0, 31, 32, 69];
        let mut words = [0_u32; 3];
        for id in &allowed {
            words[id / 32] |= 1 << (id % 32);
        }
        let grammar = LogitsProcessors { has_grammar: true, masks_stops: true, ..LogitsProcessors::default() };
        for (stop_ids, is_masked) in
            [(vec![0, 31, 32, 69], false), (vec![0, 31, 69], true), (vec![0, 31, 32, 64], true)]
        {
            let context =
                RowContext { stop_ids: &stop_ids, is_before_min_len: true, grammar: Some(&words), ..context(&[], 0) };
            let row = applied(&grammar, &[0.0; 70], &context);
            for (id, logit) in row.iter().enumerate() {
                let is_stop = is_masked && stop_ids.contains(&(id as i64));
                assert_eq!(logit.is_finite(), allowed.contains(&id) && !is_stop, "{id} {stop_ids:?}");
            }
        }
    }

    #[test]
    fn ids_beyond_the_vocabulary_have_no_logit() {
        let all = LogitsProcessors {
            bad_words: Box::new([Box::new([4])]),
            bias: Box::new([(9, 1.0)]),
            masks_stops: true,
            ..LogitsProcessors::default()
        };
        let context = RowContext { stop_ids: &[4], is_before_min_len: true, ..context(&[], 0) };
        assert_eq!(applied(&all, &[1.0; 4], &context), [1.0; 4]);
    }

    #[test]
    fn a_bias_does_not_bring_back_what_is_excluded() {
        let both = LogitsProcessors {
            allowed: Some(Box::new([0b1011])),
            bias: Box::new([(1, 5.0), (2, 5.0)]),
            ..LogitsProcessors::default()
        };
        assert_eq!(applied(&both, &[0.0; 4], &context(&[], 0)), [0.0, 5.0, NONE, 0.0]);
    }
}
