//! Sampling on a CPU: from rows of fp32 logits to drawn tokens, and the verification of drafts by both rules.
//!
//! The semantics are those of the torch reference (`specrs.verify`), with equal cuts, noise and rules; probabilities
//! differ from it in their last bits. Tokens that the filters remove cost nothing afterwards, and verification ends at
//! the first rejected draft. [`Sampler`] applies no masks, biases and penalties; [`LogitsProcessors`] apply them before
//! it.

mod filter;
mod logprobs;
mod processors;
mod request;
#[cfg(test)]
mod tests;

use crate::error::{Error, Result, check_len};
use crate::math::ln;
use crate::philox::{self, Purpose};
use filter::Filter;
pub use logprobs::{LogprobsMode, TokenLogprobs, log_softmax};
pub use processors::{LogitsProcessors, RowContext, TokenCounts};
pub use request::*;

/// Distance below a row's smallest logit at which a drafter's unknown target ids are placed. In fp32 this is
/// probability 0 at temperatures up to 96. Above 96 such a draft still has its true q. The distance is finite, so that
/// a request that allows none of the drafter's ids still has a distribution to draw from.
pub const UNKNOWN_BELOW: f32 = 1e4;

/// Result of verifying the drafts of one request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Verdict {
    /// m, the number of accepted drafts.
    pub num_accepted: usize,
    /// Token after the accepted drafts.
    pub token: u32,
}

/// Sampler that draws from and verifies rows of V logits. It keeps work space, but no state between calls that affects
/// a result.
///
/// ```
/// use specrs_core::philox::Purpose;
/// use specrs_core::sampling::{Sampler, SamplingParams};
///
/// let mut sampler = Sampler::new(4)?;
/// let off = f32::INFINITY;
/// let params = SamplingParams { greedy: false, temperature: 0.8, top_k: 2.0, top_p: off, log_min_p: -off };
/// let token = sampler.draw(&[0.0, 3.0, 1.0, 2.5], &params, 7, 0, Purpose::Gumbel)?;
/// assert!(token == 1 || token == 3);
/// # Ok::<(), specrs_core::Error>(())
/// ```
#[derive(Debug)]
pub struct Sampler {
    vocab_size: usize,
    filter: Filter,
    noise: Vec<f32>,
    residual: Vec<f32>,
}

impl Sampler {
    /// Makes a sampler for rows of `vocab_size` logits.
    ///
    /// # Errors
    /// [`Error::InvalidConfig`] unless `1 <= vocab_size <= 2^31`.
    pub fn new(vocab_size: usize) -> Result<Self> {
        if !(1..=1 << 31).contains(&vocab_size) {
            return Err(Error::invalid_config("vocab_size", vocab_size, "from 1 to 2147483648"));
        }
        Ok(Self { vocab_size, filter: Filter::default(), noise: Vec::new(), residual: Vec::new() })
    }

    /// Returns V, the number of logits per row.
    pub fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    /// Draws one token from the distribution of the filtered row: `argmax(x + g)` with the Gumbel noise of `(seed,
    /// position, purpose)`.
    ///
    /// A row whose largest logit is not finite gives some token of the vocabulary.
    ///
    /// # Errors
    /// [`Error::InvalidBuffer`] if `row` does not have V logits.
    pub fn draw(
        &mut self,
        row: &[f32],
        params: &SamplingParams,
        seed: u64,
        position: u64,
        purpose: Purpose,
    ) -> Result<u32> {
        check_len("row", row.len(), self.vocab_size)?;
        self.filter.read(row, params);
        Ok(self.draw_kept(seed, position, purpose))
    }

    /// Writes the filtered probabilities p of the row that was read last, `[V]`, 0 for removed tokens. After a
    /// rejection this is still p, not `max(0, p - q)`.
    ///
    /// # Errors
    /// [`Error::InvalidBuffer`] if `out` does not have V elements.
    pub fn probabilities(&self, out: &mut [f32]) -> Result<()> {
        check_len("out", out.len(), self.vocab_size)?;
        out.fill(0.0);
        for (index, &token) in self.filter.tokens.iter().enumerate() {
            out[token as usize] = self.filter.probability(index);
        }
        Ok(())
    }

    /// Writes the filtered row: `[V]` logits after temperature and filters, minus infinity for removed tokens. With
    /// `params.greedy` the row is copied unchanged.
    ///
    /// # Errors
    /// [`Error::InvalidBuffer`] if `row` or `out` does not have V elements.
    pub fn filter(&mut self, row: &[f32], params: &SamplingParams, out: &mut [f32]) -> Result<()> {
        check_len("row", row.len(), self.vocab_size)?;
        check_len("out", out.len(), self.vocab_size)?;
        if params.greedy {
            out.copy_from_slice(row);
            return Ok(());
        }
        self.filter.read(row, params);
        out.fill(f32::NEG_INFINITY);
        for (&token, &logit) in self.filter.tokens.iter().zip(&self.filter.logits) {
            out[token as usize] = logit;
        }
        Ok(())
    }

    /// Verifies K drafts of one request by the rule `rejection` (Leviathan et al. 2023, algorithm 1).
    ///
    /// Draft i, at position `n + i`, is accepted if `u q < p` with the uniform of purpose *accept* at its position. The
    /// token after m accepted drafts is drawn with the noise of purpose *gumbel* at `n + m`. It comes from `max(0, p -
    /// q)` after a rejection, else from the row as in [`draw`](Self::draw).
    ///
    /// `rows` is `[K + 1, V]` logits; `q` `[K, V]` has the distributions that the drafts were drawn from.
    ///
    /// # Errors
    /// [`Error::InvalidBuffer`] if a slice has another size or a draft is not in the vocabulary.
    pub fn verify_rejection(
        &mut self,
        rows: &[f32],
        params: &SamplingParams,
        seed: u64,
        n: u64,
        drafts: &[i64],
        q: &[f32],
    ) -> Result<Verdict> {
        self.check_drafts(rows, drafts)?;
        check_len("q", q.len(), drafts.len() * self.vocab_size)?;
        for (i, &draft) in drafts.iter().enumerate() {
            self.filter.read(&rows[i * self.vocab_size..][..self.vocab_size], params);
            let position = n.wrapping_add(i as u64);
            let u = philox::uniform_from_word(philox::word(seed, position, Purpose::Accept, 0));
            let q = &q[i * self.vocab_size..][..self.vocab_size];
            if u * q[draft as usize] < self.filter.probability_of(draft as u32) {
                continue;
            }
            return Ok(Verdict { num_accepted: i, token: self.draw_residual(q, seed, position) });
        }
        self.finish(rows, params, seed, n, drafts.len())
    }

    /// Verifies K drafts of one request by the rule `coupled`. Every row is drawn as [`draw`](Self::draw) does with
    /// purpose *gumbel* at its position. Drafts are accepted up to the first one that differs from its row's draw.
    ///
    /// `rows` is `[K + 1, V]` logits.
    ///
    /// # Errors
    /// [`Error::InvalidBuffer`] if a slice has another size or a draft is not in the vocabulary.
    pub fn verify_coupled(
        &mut self,
        rows: &[f32],
        params: &SamplingParams,
        seed: u64,
        n: u64,
        drafts: &[i64],
    ) -> Result<Verdict> {
        self.check_drafts(rows, drafts)?;
        for (i, &draft) in drafts.iter().enumerate() {
            let verdict = self.finish(rows, params, seed, n, i)?;
            if i64::from(verdict.token) != draft {
                return Ok(verdict);
            }
        }
        self.finish(rows, params, seed, n, drafts.len())
    }

    /// Draws the token that follows m accepted drafts, from row m.
    fn finish(&mut self, rows: &[f32], params: &SamplingParams, seed: u64, n: u64, m: usize) -> Result<Verdict> {
        let row = &rows[m * self.vocab_size..][..self.vocab_size];
        let token = self.draw(row, params, seed, n.wrapping_add(m as u64), Purpose::Gumbel)?;
        Ok(Verdict { num_accepted: m, token })
    }

    fn check_drafts(&self, rows: &[f32], drafts: &[i64]) -> Result<()> {
        check_len("rows", rows.len(), (drafts.len() + 1) * self.vocab_size)?;
        match drafts.iter().find(|&&draft| !(0..self.vocab_size as i64).contains(&draft)) {
            Some(draft) => {
                Err(Error::invalid_buffer("drafts", draft, format!("an id from 0 to {}", self.vocab_size - 1)))
            }
            None => Ok(()),
        }
    }

    fn draw_kept(&mut self, seed: u64, position: u64, purpose: Purpose) -> u32 {
        if self.filter.tokens.len() == 1 {
            return self.filter.tokens[0];
        }
        self.make_noise(seed, position, purpose);
        best(&self.filter.tokens, self.filter.logits.iter().zip(&self.noise).map(|(x, g)| x + g))
    }

    /// Draws from `max(0, p - q)`. If that is 0 everywhere after rounding, because p = q, it draws from p.
    fn draw_residual(&mut self, q: &[f32], seed: u64, position: u64) -> u32 {
        let tokens = &self.filter.tokens;
        self.residual.clear();
        self.residual.extend(
            tokens.iter().enumerate().map(|(index, &token)| self.filter.probability(index) - q[token as usize]),
        );
        if !self.residual.iter().any(|&r| r > 0.0) {
            return self.draw_kept(seed, position, Purpose::Gumbel);
        }
        self.make_noise(seed, position, Purpose::Gumbel);
        let score = |(&r, &g): (&f32, &f32)| if r > 0.0 { ln(f64::from(r)) as f32 + g } else { f32::NEG_INFINITY };
        best(&self.filter.tokens, self.residual.iter().zip(&self.noise).map(score))
    }

    fn make_noise(&mut self, seed: u64, position: u64, purpose: Purpose) {
        self.noise.resize(self.filter.tokens.len(), 0.0);
        philox::gumbel_of(seed, position, purpose, &self.filter.tokens, &mut self.noise);
    }
}

/// Returns the largest logit of a row, or NaN if the row contains one. It is not finite for rows without a
/// distribution.
pub fn largest(row: &[f32]) -> f32 {
    filter::largest(row)
}

/// Returns the lowest id with a row's largest logit: the first NaN if the row has one, and 0 if the row is empty. `top`
/// is the result of [`largest`] for the row.
pub fn lowest_id(row: &[f32], top: f32) -> usize {
    let is_top = |x: &f32| if top.is_nan() { x.is_nan() } else { *x >= top };
    row.iter().position(is_top).unwrap_or(0)
}

/// Returns the token with the largest score, the first of equal ones.
fn best(tokens: &[u32], scores: impl Iterator<Item = f32>) -> u32 {
    let (mut token, mut top) = (tokens[0], f32::NEG_INFINITY);
    for (&candidate, score) in tokens.iter().zip(scores) {
        if score > top {
            (token, top) = (candidate, score);
        }
    }
    token
}
