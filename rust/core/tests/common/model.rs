//! A language model without weights: the next token is a function of a hash of all tokens before it. The draft agrees
//! with the target on about three of four prefixes.

/// Number of tokens in the vocabulary.
pub const VOCAB: i64 = 97;

/// Hash of no tokens.
pub const EMPTY: u64 = 0x9e37_79b9_7f4a_7c15;

/// Returns the hash of a prefix extended by `token`.
pub fn extend(prefix: u64, token: i64) -> u64 {
    mix(prefix ^ mix(token as u64 + 1))
}

/// Returns the hash of a prefix with an extra key that belongs to its next token.
pub fn with_key(prefix: u64, key: &[u8]) -> u64 {
    key.iter().fold(mix(!prefix), |hash, &byte| extend(hash, i64::from(byte)))
}

/// Computes splitmix64's output function.
pub fn mix(mut x: u64) -> u64 {
    x = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// Returns the target's token after a prefix, never one of `masked`.
pub fn target_token(prefix: u64, masked: &[i64]) -> i64 {
    let mut token = (mix(prefix) % VOCAB as u64) as i64;
    while masked.contains(&token) {
        token = (token + 1) % VOCAB;
    }
    token
}

/// Returns the draft's guess of the target's token after a prefix.
pub fn draft_token(prefix: u64, masked: &[i64]) -> i64 {
    let token = target_token(prefix, masked);
    if mix(prefix ^ 0xd0).is_multiple_of(4) { (token + 1) % VOCAB } else { token }
}

/// Returns the `k` tokens that a text proposes by the definition of prompt lookup: the longest n-gram first, places
/// from the right.
pub fn lookup(tokens: &[i64], min: usize, max: usize, k: usize) -> Vec<i64> {
    let mut text = tokens.to_vec();
    for n in (min..=max.min(tokens.len())).rev() {
        let first = tokens.len() - n;
        if let Some(place) = (0..first).rev().find(|&place| tokens[place..place + n] == tokens[first..]) {
            for i in place + n..place + n + k {
                text.push(text[i]);
            }
            break;
        }
    }
    text.split_off(tokens.len())
}

/// Computes the output of a request without any scheduling, as the reference.
pub fn generate(
    prompt: &[i64],
    extra_keys: &[(usize, Vec<u8>)],
    limit: usize,
    min_tokens: usize,
    stop: &[i64],
) -> Vec<i64> {
    let mut prefix = EMPTY;
    for (position, &token) in prompt.iter().enumerate() {
        let keys = extra_keys.iter().filter(|&&(at, _)| at == position);
        prefix = extend(keys.fold(prefix, |prefix, (_, key)| with_key(prefix, key)), token);
    }
    let mut output = Vec::new();
    while prompt.len() + output.len() < limit {
        let masked = if output.len() < min_tokens { stop } else { &[] };
        let token = target_token(prefix, masked);
        prefix = extend(prefix, token);
        output.push(token);
        if output.len() > min_tokens && stop.contains(&token) {
            break;
        }
    }
    output
}
