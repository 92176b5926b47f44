//! Costs of prompt tokens, learnt from the times of steps, and the number of tokens that fit into a time. Measures
//! no time and plans nothing.
//!
//! A step's prompt work takes `rate * (tokens + attention * positions)` milliseconds. `positions` is the number of
//! positions that the tokens attend to, and `attention` is [`crate::SchedulerConfig::attention_cost_ratio`]. The rate
//! falls with the tokens of a step, because weights are read once for all of them. It falls in jumps if a device
//! computes long chunks in another way. So there is a rate for each power of two, and never a larger one for more
//! tokens.
//!
//! If attention costs more than `attention` says, the measured rates rise. Deep in a context fewer tokens fit, so these
//! smaller sizes learn rates of their own.

use super::Scheduler;
use crate::error::{Error, Result};

/// Number of prompt tokens that a step may always compute, whatever their time. Fewer would cost as much, because the
/// weights are read anyway.
const LEAST_TOKENS: usize = 16;
/// Number of powers of two of tokens in a step; a step has fewer than 2^32 tokens.
const SIZES: usize = 32;
/// Weight of one step's time in the rate. With a half, a step that is twice as slow as expected is followed by one
/// that is slower by a third.
const WEIGHT: f64 = 0.5;
/// Bounds of a measured time as multiples of the expected time. One step may be slow for external reasons (a page
/// fault, a kernel that is compiled), so the upper bound is tight. A fast step always has a reason, so the lower bound
/// is wide.
const BOUNDS: (f64, f64) = (1.0 / 16.0, 4.0);
/// Factor between the rate of the smallest measured size and the assumed rate of smaller sizes.
const UNKNOWN: f64 = 2.0;
/// Minimum share of a step's time that is attributed to prompt tokens, whatever decoding is expected to take.
const LEAST_PART: f64 = 0.125;
/// Weight of a longer time in the estimate of decoding. It is low, because time attributed to decoding is not
/// attributed to prompts. A shorter time replaces the estimate immediately.
const DECODE_WEIGHT: f64 = 0.125;

/// Work of prompt tokens: their number and the positions that they attend to.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Work {
    tokens: f64,
    positions: f64,
}

impl Work {
    fn of_chunk(start: usize, len: usize) -> Self {
        let (start, len) = (start as f64, len as f64);
        Self { tokens: len, positions: len * (start + 0.5 * len) }
    }

    /// Returns the work in equivalent tokens at the start of a context.
    fn weight(self, attention: f64) -> f64 {
        self.tokens + attention * self.positions
    }

    fn add(&mut self, other: Self) {
        self.tokens += other.tokens;
        self.positions += other.positions;
    }
}

/// Work of a step other than drafting.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct StepWork {
    /// Work of prompt chunks, and of draft chunks times the draft's cost ratio.
    plain: Work,
    /// Work of prompt chunks whose log probabilities are reported. Each token also costs an LM head, a search for the
    /// most probable tokens, and work of the host.
    told: Work,
    decode_tokens: usize,
}

impl StepWork {
    pub(super) fn add_chunk(&mut self, told: bool, start: usize, len: usize) {
        let kind = if told { &mut self.told } else { &mut self.plain };
        kind.add(Work::of_chunk(start, len));
    }

    pub(super) fn add_draft_chunk(&mut self, cost_ratio: f64, start: usize, len: usize) {
        let Work { tokens, positions } = Work::of_chunk(start, len);
        self.plain.add(Work { tokens: cost_ratio * tokens, positions: cost_ratio * positions });
    }

    /// Returns this work for a step that also verifies `decode_tokens` tokens.
    pub(super) fn with_decode_tokens(self, decode_tokens: usize) -> Self {
        Self { decode_tokens, ..self }
    }

    fn prompt_tokens(&self) -> usize {
        (self.plain.tokens + self.told.tokens) as usize
    }
}

/// Costs of one kind of token.
#[derive(Clone, Debug)]
struct Costs {
    /// Milliseconds per token at the start of a context, by power of two of the step's tokens. `None` until a step
    /// of this size was timed.
    rates: [Option<f64>; SIZES],
    /// Cost of attending to one position, relative to a token.
    attention: f64,
}

impl Costs {
    fn new(attention: f64) -> Self {
        Self { rates: [None; SIZES], attention }
    }

    fn size_of(tokens: f64) -> usize {
        (tokens.max(1.0) as u64).ilog2().min(SIZES as u32 - 1) as usize
    }

    /// Returns the milliseconds per token in steps of `size`. Between two measured sizes it is their geometric mean;
    /// `None` before any size was measured.
    fn rate(&self, size: usize) -> Option<f64> {
        let below = self.rates[..=size].iter().rev().find_map(|&rate| rate);
        let above = self.rates[size..].iter().find_map(|&rate| rate);
        match (below, above) {
            (Some(below), Some(above)) => Some((below * above).sqrt()),
            (Some(below), None) => Some(below),
            (None, above) => above.map(|rate| UNKNOWN * rate),
        }
    }

    /// Returns the milliseconds that `work` takes. It is infinite before any step was timed, so that no other work is
    /// planned next to it.
    fn ms(&self, work: Work) -> f64 {
        if work.tokens == 0.0 {
            return 0.0;
        }
        self.rate(Self::size_of(work.tokens)).unwrap_or(f64::INFINITY) * work.weight(self.attention)
    }

    /// Returns the length of the longest prompt chunk that begins at position `start`, has at most `most` tokens, and
    /// takes at most `ms` milliseconds together with `before`. A token of the chunk costs as much as `ratio` ordinary
    /// tokens.
    fn fitting(&self, before: Work, start: usize, ratio: f64, most: usize, ms: f64) -> usize {
        let (weight, attention) = (before.weight(self.attention), self.attention);
        let (first, last) = (Self::size_of(before.tokens), Self::size_of(before.tokens + ratio * most as f64));
        // From the largest size on: a step of a larger one may be the cheaper.
        for size in (first..=last).rev() {
            let Some(rate) = self.rate(size) else { return 0 };
            // len + attention * len * (start + len / 2) <= left
            let left = (ms / rate - weight) / ratio;
            if left <= 0.0 {
                continue;
            }
            let linear = 1.0 + attention * start as f64;
            let fits = (2.0 * left) / (linear + (linear * linear + 2.0 * attention * left).sqrt());
            let end_of_size = (2.0 * (1_u64 << size) as f64 - before.tokens) / ratio;
            let len = fits.min(most as f64).min(if size == last { f64::INFINITY } else { end_of_size.ceil() - 1.0 });
            if before.tokens + ratio * len.floor() >= (1_u64 << size) as f64 || size == first {
                return len.max(0.0) as usize;
            }
        }
        0
    }

    fn observe(&mut self, work: Work, ms: f64) {
        let (size, weight) = (Self::size_of(work.tokens), work.weight(self.attention));
        let Some(expected) = self.rate(size) else {
            self.rates[size] = Some(ms / weight);
            return;
        };
        let surprise = (ms / (expected * weight)).clamp(BOUNDS.0, BOUNDS.1) - 1.0;
        let by = if self.rates[size].is_none() { 1.0 } else { WEIGHT };
        let rate = expected * (1.0 + by * surprise);
        self.rates[size] = Some(rate);
        for (other, known) in self.rates.iter_mut().enumerate() {
            if let Some(known) = known {
                *known = if other < size { known.max(rate) } else { known.min(rate) };
            }
        }
    }
}

/// Costs of a step's work other than drafting, learnt from measured times.
#[derive(Clone, Debug)]
pub(super) struct PrefillCosts {
    plain: Costs,
    told: Costs,
    /// Milliseconds and tokens of steps that only decode.
    decode: Option<(f64, usize)>,
}

impl PrefillCosts {
    /// Makes costs without measurements. `attention` is [`crate::SchedulerConfig::attention_cost_ratio`].
    pub(super) fn new(attention: f64) -> Self {
        Self { plain: Costs::new(attention), told: Costs::new(attention), decode: None }
    }

    /// Returns the length of the longest chunk from `start` on, at most `most`, with which the prompt work of a step
    /// takes at most `ms`. It allows [`LEAST_TOKENS`] prompt tokens per step in any case. With `told`, the chunk's
    /// log probabilities are reported.
    pub(super) fn fitting(&self, work: &StepWork, told: bool, start: usize, most: usize, ms: f64) -> usize {
        let (costs, before, others) = if told {
            (&self.told, work.told, self.plain.ms(work.plain))
        } else {
            (&self.plain, work.plain, self.told.ms(work.told))
        };
        let least = LEAST_TOKENS.saturating_sub(work.prompt_tokens()).min(most);
        costs.fitting(before, start, 1.0, most, ms - others).max(least)
    }

    /// Returns the length of the longest draft chunk from `start` on, at most `most`, with which all chunks take at
    /// most `ms`.
    pub(super) fn fitting_draft(&self, work: &StepWork, ratio: f64, start: usize, most: usize, ms: f64) -> usize {
        self.plain.fitting(work.plain, start, ratio, most, ms - self.told.ms(work.told))
    }

    /// Returns the milliseconds of draft chunks that cost as much as `tokens` target tokens.
    pub(super) fn draft_ms(&self, tokens: usize) -> f64 {
        self.plain.ms(Work { tokens: tokens as f64, positions: 0.0 })
    }

    fn observe(&mut self, work: &StepWork, ms: f64) {
        let StepWork { plain, told, decode_tokens } = *work;
        if plain.tokens + told.tokens < 1.0 {
            self.observe_decode(ms, decode_tokens);
            return;
        }
        let ms = (ms - self.decode_ms(decode_tokens)).max(LEAST_PART * ms);
        if told.tokens == 0.0 {
            self.plain.observe(plain, ms);
        } else {
            self.told.observe(told, (ms - self.plain.ms(plain)).max(LEAST_PART * ms));
        }
    }

    fn observe_decode(&mut self, ms: f64, tokens: usize) {
        let before = self.decode.map_or(ms, |(before, _)| before);
        let weight = if ms > before { DECODE_WEIGHT } else { 1.0 };
        self.decode = Some((before + weight * (ms - before), tokens.max(1)));
    }

    /// Returns the milliseconds of decoding `tokens` tokens. It never exceeds the measured time, so that prompts are
    /// estimated as too slow rather than too fast.
    fn decode_ms(&self, tokens: usize) -> f64 {
        self.decode.map_or(0.0, |(ms, before)| ms * (tokens as f64 / before as f64).min(1.0))
    }
}

impl Scheduler {
    /// Records how long the step that settled last took. The time starts at its beginning or at the end of the step
    /// before it, and ends when all its waiting clients have their results. With these times, plans limit prompt tokens
    /// next to decoding requests by [`crate::SchedulerConfig::max_prefill_stall_ms`]. If that setting is 0, the call
    /// does nothing.
    ///
    /// # Errors
    /// [`Error::SettleOrder`] if another step settled last, [`Error::InvalidBuffer`] if `ms` is not a finite time
    /// above 0. Nothing has changed then.
    pub fn time_step(&mut self, step_id: u64, ms: f64) -> Result<()> {
        let expected = self.settled.map(|(id, _)| id);
        let Some((_, work)) = self.settled.filter(|&(id, _)| id == step_id) else {
            return Err(Error::SettleOrder { step_id, expected });
        };
        if !(ms.is_finite() && ms > 0.0) {
            return Err(Error::invalid_buffer("ms", ms, "a finite time above 0"));
        }
        if self.config.max_prefill_stall_ms > 0.0 {
            self.prefill_costs.observe(&work, ms);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Generates steps: prompt tokens, their start, and milliseconds.
    fn times() -> impl Strategy<Value = Vec<(usize, usize, f64)>> {
        proptest::collection::vec((1_usize..3000, 0_usize..20_000, 0.01_f64..5000.0), 0..12)
    }

    fn learnt(times: &[(usize, usize, f64)], attention: f64) -> Costs {
        let mut costs = Costs::new(attention);
        for &(len, start, ms) in times {
            costs.observe(Work::of_chunk(start, len), ms);
        }
        costs
    }

    /// Generates costs of attention: none, small, large.
    fn attentions() -> impl Strategy<Value = f64> {
        prop::sample::select(vec![0.0, 1.0 / 4096.0, 1.0 / 64.0])
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2000))]

        #[test]
        fn what_fits_is_the_longest_chunk_that_costs_no_more(
            times in times(), before in 0_usize..300, start in 0_usize..5000, most in 0_usize..700, ms in -5.0_f64..400.0,
            ratio in prop::sample::select(vec![0.05, 1.0, 3.0]), attention in attentions(),
        ) {
            let costs = learnt(&times, attention);
            let before = Work::of_chunk(0, before);
            let cost = |len: usize| {
                let Work { tokens, positions } = Work::of_chunk(start, len);
                let all = Work { tokens: before.tokens + ratio * tokens, positions: before.positions + ratio * positions };
                costs.ms(all)
            };
            let len = costs.fitting(before, start, ratio, most, ms);
            prop_assert!(len <= most);
            if times.is_empty() {
                prop_assert_eq!(len, 0);
            } else {
                prop_assert!(len == 0 || cost(len) <= ms * (1.0 + 1e-9), "{} ms of {ms}", cost(len));
                let longer = (len + 1..=most).find(|&longer| cost(longer) <= ms * (1.0 - 1e-9));
                prop_assert_eq!(longer, None, "not {}", len);
            }
        }

        #[test]
        fn a_larger_step_never_costs_more_by_the_token(times in times(), attention in attentions()) {
            let costs = learnt(&times, attention);
            let rates: Vec<_> = (0..SIZES).filter_map(|size| costs.rates[size]).collect();
            prop_assert!(rates.is_sorted_by(|smaller, larger| smaller >= larger), "{rates:?}");
            prop_assert!(rates.iter().all(|rate| rate.is_finite() && *rate > 0.0), "{rates:?}");
        }
    }

    #[test]
    fn what_decoding_takes_is_not_taken_for_prompts() {
        let work = |len, decode_tokens| {
            let mut work = StepWork::default();
            work.add_chunk(false, 0, len);
            work.with_decode_tokens(decode_tokens)
        };
        let mut costs = PrefillCosts::new(0.25);
        costs.observe(&StepWork::default().with_decode_tokens(8), 40.0);
        costs.observe(&work(100, 8), 50.0);
        let rate = |costs: &PrefillCosts| costs.plain.rate(6).expect("a step of 100 tokens");
        let expected = 10.0 / Work::of_chunk(0, 100).weight(0.25);
        assert!((rate(&costs) - expected).abs() < 1e-9, "{}", rate(&costs));
        // Decoding that was measured slow is at most seven eighths of a step.
        let mut costs = PrefillCosts::new(0.25);
        costs.observe(&StepWork::default().with_decode_tokens(8), 4000.0);
        costs.observe(&work(100, 8), 80.0);
        assert!((rate(&costs) - expected).abs() < 1e-9, "{}", rate(&costs));
        // It follows a shorter time immediately, a longer one slowly, and is less for fewer tokens.
        costs.observe(&StepWork::default().with_decode_tokens(8), 40.0);
        assert!((costs.decode_ms(8) - 40.0).abs() < 1e-9);
        costs.observe(&StepWork::default().with_decode_tokens(8), 80.0);
        assert!((costs.decode_ms(8) - 45.0).abs() < 1e-9);
        assert!((costs.decode_ms(4) - 22.5).abs() < 1e-9 && (costs.decode_ms(64) - 45.0).abs() < 1e-9);
    }

    #[test]
    fn deep_in_a_context_a_chunk_costs_what_a_model_like_it_takes() {
        let attention = 1.0 / 1000.0;
        let mut costs = PrefillCosts::new(attention);
        let ms =
            |start: usize, len: usize| 0.1 * (len as f64 + attention * len as f64 * (start as f64 + 0.5 * len as f64));
        for size in 0..8 {
            let mut work = StepWork::default();
            work.add_chunk(false, 0, 1 << size);
            costs.observe(&work, ms(0, 1 << size));
        }
        for start in [0, 500, 2000] {
            let fits = costs.fitting(&StepWork::default(), false, start, 1000, 6.4);
            assert!(ms(start, fits) <= 6.4 && ms(start, fits + 1) > 6.4, "{fits} from {start} on");
        }
    }
}
