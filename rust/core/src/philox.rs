//! Counter-based random numbers: Philox4x32-10 and the uniform and Gumbel values that sampling draws from it.
//!
//! Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011. Every value is a pure
//! function of `(seed, position, token, purpose)`; there is no state, so batch, preemption and replay cannot change a
//! draw. This module does not derive seeds and does not sample.
//!
//! The layout is frozen: recorded outputs and the GPU twin depend on it.
//!
//! | word | content |
//! | --- | --- |
//! | `key[0]`, `key[1]` | low, high 32 bits of the seed |
//! | `counter[0]` | `token / 4` |
//! | `counter[1]`, `counter[2]` | low, high 32 bits of the position |
//! | `counter[3]` | [`Purpose`] |
//! | output lane | `token % 4` |

use crate::math::{ln, to_f64};

/// Use of a random number. Different purposes at one `(seed, position)` are independent streams.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Purpose {
    /// Draw of a draft token from q.
    Draft = 0,
    /// Uniform that accepts or rejects a draft token.
    Accept = 1,
    /// Reserved and unused: the token after the drafts is drawn with the noise of `Gumbel` under every rule.
    Recover = 2,
    /// Noise of the target's own draw, which the draft shares under the `coupled` rule.
    Gumbel = 3,
}

impl Purpose {
    /// Returns the purpose with this number, or `None` outside `0..=3`.
    pub fn from_index(index: i64) -> Option<Self> {
        match index {
            0 => Some(Self::Draft),
            1 => Some(Self::Accept),
            2 => Some(Self::Recover),
            3 => Some(Self::Gumbel),
            _ => None,
        }
    }
}

const MULTIPLIERS: [u32; 2] = [0xD251_1F53, 0xCD9E_8D57];
const WEYL: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];

/// Computes Philox4x32-10: four 32-bit words from a 128-bit counter and a 64-bit key.
#[inline]
pub fn philox4x32(counter: [u32; 4], key: [u32; 2]) -> [u32; 4] {
    let [mut c0, mut c1, mut c2, mut c3] = counter;
    let [mut k0, mut k1] = key;
    for _ in 0..10 {
        let p0 = u64::from(MULTIPLIERS[0]) * u64::from(c0);
        let p1 = u64::from(MULTIPLIERS[1]) * u64::from(c2);
        c0 = (p1 >> 32) as u32 ^ c1 ^ k0;
        c1 = p1 as u32;
        c2 = (p0 >> 32) as u32 ^ c3 ^ k1;
        c3 = p0 as u32;
        k0 = k0.wrapping_add(WEYL[0]);
        k1 = k1.wrapping_add(WEYL[1]);
    }
    [c0, c1, c2, c3]
}

/// Returns the four words of tokens `4 * group .. 4 * group + 4`.
#[inline]
fn words(seed: u64, position: u64, purpose: Purpose, group: u32) -> [u32; 4] {
    philox4x32([group, position as u32, (position >> 32) as u32, purpose as u32], [seed as u32, (seed >> 32) as u32])
}

/// Returns the 32-bit word of one token.
pub fn word(seed: u64, position: u64, purpose: Purpose, token: u32) -> u32 {
    words(seed, position, purpose, token / 4)[(token % 4) as usize]
}

/// Converts a word to a uniform value in (0, 1): `((word >> 9) + 0.5) * 2^-23`, exact in f32, in `[2^-24, 1 - 2^-24]`.
///
/// It uses 23 bits, because with 24 bits `(word >> 8) + 0.5` needs 25 significant bits, is rounded, and reaches 1.0.
#[inline]
pub fn uniform_from_word(word: u32) -> f32 {
    ((word >> 9) as f32 + 0.5) * (1.0 / 8_388_608.0)
}

/// Converts a word to a standard Gumbel value `-ln(-ln((word + 0.5) * 2^-32))`, computed in f64 and rounded once to
/// f32.
///
/// All 32 bits are used, unlike in [`uniform_from_word`]. A token of probability p is drawn when `-ln u` falls below
/// about p. A grid of 2^-23 would almost never draw tokens under 1e-8, which can have a total probability of 1e-3 in a
/// vocabulary of 150,000. The error is at most 1 ulp where `|g| >= 2^-16`, and 2^-40 absolute closer to the root. The
/// range is `[-3.14, 22.88]`.
#[inline]
pub fn gumbel_from_word(word: u32) -> f32 {
    let u = (to_f64(u64::from(word)) + 0.5) * (1.0 / 4_294_967_296.0);
    -ln(-ln(u)) as f32
}

/// Fills `out[token]` with uniforms of tokens `0..out.len()`; every value is strictly inside (0, 1).
pub fn fill_uniform(seed: u64, position: u64, purpose: Purpose, out: &mut [f32]) {
    fill(seed, position, purpose, out, uniform_from_word);
}

/// Fills `out[token]` with standard Gumbel values of tokens `0..out.len()`; all are finite.
pub fn fill_gumbel(seed: u64, position: u64, purpose: Purpose, out: &mut [f32]) {
    fill(seed, position, purpose, out, gumbel_from_word);
}

/// Writes the standard Gumbel values of `tokens`, which ascend, into `out`, which has the same length. They equal those
/// of [`fill_gumbel`].
///
/// # Panics
/// If the lengths differ.
pub fn gumbel_of(seed: u64, position: u64, purpose: Purpose, tokens: &[u32], out: &mut [f32]) {
    const AT_ONCE: usize = 64;
    assert_eq!(tokens.len(), out.len(), "a value for each token");
    let mut buffer = [0_u32; AT_ONCE];
    let (mut group, mut four) = (0, words(seed, position, purpose, 0));
    for (tokens, values) in tokens.chunks(AT_ONCE).zip(out.chunks_mut(AT_ONCE)) {
        for (word, &token) in buffer.iter_mut().zip(tokens) {
            if token / 4 != group {
                group = token / 4;
                four = words(seed, position, purpose, group);
            }
            *word = four[(token % 4) as usize];
        }
        for (value, &word) in values.iter_mut().zip(&buffer) {
            *value = gumbel_from_word(word);
        }
    }
}

/// Fills `out` with `value` of each token's word. It computes words first and values second, because two plain loops
/// over a small array vectorise and one mixed loop does not.
#[inline]
fn fill(seed: u64, position: u64, purpose: Purpose, out: &mut [f32], value: impl Fn(u32) -> f32) {
    const GROUPS: usize = 16;
    let mut buffer = [0_u32; 4 * GROUPS];
    let mut group = 0_u32;
    for chunk in out.chunks_mut(buffer.len()) {
        for lane in buffer.chunks_exact_mut(4) {
            lane.copy_from_slice(&words(seed, position, purpose, group));
            group = group.wrapping_add(1);
        }
        for (slot, &word) in chunk.iter_mut().zip(&buffer) {
            *slot = value(word);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_answers_of_random123() {
        let vectors = [
            ([0; 4], [0; 2], [0x6627_E8D5, 0xE169_C58D, 0xBC57_AC4C, 0x9B00_DBD8]),
            ([u32::MAX; 4], [u32::MAX; 2], [0x408F_276D, 0x41C8_3B0E, 0xA20B_C7C6, 0x6D54_51FD]),
            (
                [0x243F_6A88, 0x85A3_08D3, 0x1319_8A2E, 0x0370_7344],
                [0xA409_3822, 0x299F_31D0],
                [0xD16C_FE09, 0x94FD_CCEB, 0x5001_E420, 0x2412_6EA1],
            ),
        ];
        for (counter, key, expected) in vectors {
            assert_eq!(philox4x32(counter, key), expected, "counter {counter:x?} key {key:x?}");
        }
    }

    /// Checks the layout table of the module, written out by hand, against the published pi vector.
    #[test]
    fn frozen_layout() {
        let seed = 0x299F_31D0_A409_3822;
        let position = 0x1319_8A2E_85A3_08D3;
        let group = 0x243F_6A88;
        let from_words = words(seed, position, Purpose::Accept, group);
        let by_hand = philox4x32([group, 0x85A3_08D3, 0x1319_8A2E, 1], [0xA409_3822, 0x299F_31D0]);
        assert_eq!(from_words, by_hand);
        for token in 0..8 {
            let expected = philox4x32([token / 4, 0x85A3_08D3, 0x1319_8A2E, 3], [0xA409_3822, 0x299F_31D0]);
            assert_eq!(word(seed, position, Purpose::Gumbel, token), expected[token as usize % 4]);
        }
        for (index, purpose) in [Purpose::Draft, Purpose::Accept, Purpose::Recover, Purpose::Gumbel].iter().enumerate()
        {
            assert_eq!(Purpose::from_index(index as i64), Some(*purpose));
            assert_eq!(*purpose as u32, index as u32);
        }
        assert_eq!(Purpose::from_index(-1), None);
        assert_eq!(Purpose::from_index(4), None);
    }

    #[test]
    fn uniforms_are_exact_and_open() {
        for word in [0, 1, 511, 512, 0x7FFF_FFFF, 0x8000_0000, 0xFFFF_FE00, u32::MAX] {
            let exact = (f64::from(word >> 9) + 0.5) / 8_388_608.0;
            let value = uniform_from_word(word);
            assert_eq!(f64::from(value).to_bits(), exact.to_bits(), "word {word:#x}");
            assert!(value > 0.0 && value < 1.0, "word {word:#x}");
        }
    }

    /// Compares with the standard library's f64 logarithms (`ln_1p` where u is near 1), including words near u = 1/e,
    /// the root of g.
    #[test]
    fn gumbel_is_accurate() {
        let root = (f64::exp(-1.0) * 4_294_967_296.0) as u32;
        let spread = (0..100_000_u32).map(|i| i.wrapping_mul(2_654_435_761));
        let ends = (0..1000).flat_map(|i| [i, u32::MAX - i]);
        let near_root = root - 1000..root + 1000;
        for word in spread.chain(ends).chain(near_root) {
            let e = if word < 1 << 31 {
                -((f64::from(word) + 0.5) / 4_294_967_296.0).ln()
            } else {
                -(-(f64::from(u32::MAX - word) + 0.5) / 4_294_967_296.0).ln_1p()
            };
            let exact = -e.ln();
            let error = (f64::from(gumbel_from_word(word)) - exact).abs();
            let ulp = f64::from(f32::EPSILON) * exact.abs().log2().floor().exp2();
            let allowed = if exact.abs() >= 2_f64.powi(-16) { ulp } else { 2_f64.powi(-40) };
            assert!(error <= allowed, "word {word:#x}: {exact} is off by {error:e}, allowed {allowed:e}");
        }
    }

    #[test]
    fn fills_agree_with_single_words_at_every_length() {
        for length in [0, 1, 3, 4, 5, 63, 64, 65, 130] {
            let (mut uniform, mut gumbel) = (vec![0.0; length], vec![0.0; length]);
            fill_uniform(7, 1 << 40, Purpose::Accept, &mut uniform);
            fill_gumbel(7, 1 << 40, Purpose::Gumbel, &mut gumbel);
            for token in 0..length {
                let accept = uniform_from_word(word(7, 1 << 40, Purpose::Accept, token as u32));
                let noise = gumbel_from_word(word(7, 1 << 40, Purpose::Gumbel, token as u32));
                assert_eq!(uniform[token].to_bits(), accept.to_bits());
                assert_eq!(gumbel[token].to_bits(), noise.to_bits());
            }
        }
    }

    /// Checks means, variances and the correlation between streams that differ in one coordinate, each within 5 sigma.
    #[test]
    fn moments_and_independence() {
        const N: usize = 1 << 16;
        let draw = |seed, position, purpose| {
            let mut out = vec![0.0_f32; N];
            fill_uniform(seed, position, purpose, &mut out);
            out.into_iter().map(|u| f64::from(u) - 0.5).collect::<Vec<_>>()
        };
        let n = N as f64;
        let base = draw(1, 1, Purpose::Draft);
        let mean = base.iter().sum::<f64>() / n;
        assert!(mean.abs() < 5.0 * (1.0 / 12.0 / n).sqrt(), "mean {mean}");
        let variance = base.iter().map(|u| u * u).sum::<f64>() / n;
        assert!((variance - 1.0 / 12.0).abs() < 5.0 * (1.0 / 180.0 / n).sqrt(), "variance {variance}");
        let others = [
            draw(2, 1, Purpose::Draft),
            draw(1 << 32, 1, Purpose::Draft),
            draw(1, 2, Purpose::Draft),
            draw(1, 1 << 32, Purpose::Draft),
            draw(1, 1, Purpose::Accept),
            [&base[1..], &base[..1]].concat(),
            [&base[4..], &base[..4]].concat(),
        ];
        for (index, other) in others.iter().enumerate() {
            let correlation = base.iter().zip(other).map(|(a, b)| a * b).sum::<f64>() / n * 12.0;
            assert!(correlation.abs() < 5.0 / n.sqrt(), "pair {index}: {correlation}");
        }

        let mut gumbel = vec![0.0_f32; N];
        fill_gumbel(3, 9, Purpose::Gumbel, &mut gumbel);
        let mean = gumbel.iter().copied().map(f64::from).sum::<f64>() / n;
        let (expected, variance) = (0.577_215_664_9, std::f64::consts::PI.powi(2) / 6.0);
        assert!((mean - expected).abs() < 5.0 * (variance / n).sqrt(), "Gumbel mean {mean}");
    }
}
