//! Names of KV blocks by content: a keyed 128-bit hash of a block's tokens and everything before them. Stores nothing.
//!
//! `H_0 = SipHash'(salt)`, `H_{b+1} = SipHash(H_b, tokens of block b)`, SipHash-2-4 with 128-bit output (Aumasson and Bernstein
//! 2012). The key keeps clients from constructing prompts that collide with another tenant's, the salt separates tenants and
//! adapters that share the key.

use std::hash::Hasher;

use siphasher::sip128::{Hasher128, SipHasher24};

/// Before a token that does not fit 32 bits.
pub(crate) const ESCAPE: u32 = u32::MAX;

/// Name of a block's content and its prefix.
pub type BlockHash = u128;

/// Computes the chain of block hashes under one key.
///
/// ```
/// use specrs_core::BlockHasher;
///
/// let hasher = BlockHasher::new(b"kept from others");
/// let first = hasher.chain(hasher.root(b""), &[1, 2, 3, 4]);
/// let second = hasher.chain(first, &[5, 6, 7, 8]);
/// assert_ne!(second, hasher.chain(hasher.root(b""), &[5, 6, 7, 8]), "the prefix is part of the name");
/// ```
#[derive(Clone, Copy, Debug)]
pub struct BlockHasher {
    keyed: SipHasher24,
    keyed_root: SipHasher24,
}

impl BlockHasher {
    /// A hasher with the given key; engines whose caches should agree use the same key.
    pub fn new(key: &[u8; 16]) -> Self {
        // A second key for roots, so that no salt spells a parent and its tokens.
        Self {
            keyed: SipHasher24::new_with_key(key),
            keyed_root: SipHasher24::new_with_key(&key.map(|byte| byte ^ 0x5a)),
        }
    }

    /// Start of a chain: the parent of a sequence's first block.
    pub fn root(&self, salt: &[u8]) -> BlockHash {
        let mut hasher = self.keyed_root;
        hasher.write(salt);
        hasher.finish128().as_u128()
    }

    /// Hash of the block that holds `tokens` after the block `parent`.
    pub fn chain(&self, parent: BlockHash, tokens: &[i64]) -> BlockHash {
        // Half the words of 64-bit tokens, so half the time; the escape keeps it unambiguous for any token.
        if tokens.iter().all(|&token| (0..i64::from(ESCAPE)).contains(&token)) {
            return self.chain_words(parent, tokens, |token| token as u32);
        }
        let mut hasher = self.keyed;
        hasher.write_u128(parent.to_le());
        for &token in tokens {
            match u32::try_from(token) {
                Ok(short) if short != ESCAPE => hasher.write_u32(short.to_le()),
                _ => {
                    hasher.write_u32(ESCAPE);
                    hasher.write_u64(token.to_le() as u64);
                }
            }
        }
        hasher.finish128().as_u128()
    }

    /// [`chain`](Self::chain) of tokens below [`ESCAPE`].
    pub(crate) fn chain_tokens(&self, parent: BlockHash, tokens: &[u32]) -> BlockHash {
        self.chain_words(parent, tokens, |token| token)
    }

    /// Hashes bytes by the hundred: the hasher sets up and finishes partial words at every write, which for a write a token is two
    /// thirds of the time.
    fn chain_words<T: Copy>(&self, parent: BlockHash, tokens: &[T], word: impl Fn(T) -> u32) -> BlockHash {
        const PARENT: usize = 16;
        const TOKENS: usize = 64;
        let mut hasher = self.keyed;
        let mut bytes = [0; PARENT + 4 * TOKENS];
        bytes[..PARENT].copy_from_slice(&parent.to_le_bytes());
        let mut start = 0;
        let mut chunks = tokens.chunks(TOKENS);
        while let Some(chunk) = chunks.next().or((start == 0).then_some(&[][..])) {
            for (out, &token) in bytes[PARENT..].chunks_exact_mut(4).zip(chunk) {
                out.copy_from_slice(&word(token).to_le_bytes());
            }
            hasher.write(&bytes[start..PARENT + 4 * chunk.len()]);
            start = PARENT;
        }
        hasher.finish128().as_u128()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn depends_on_key_salt_parent_and_every_token() {
        let a = BlockHasher::new(&[0; 16]);
        let b = BlockHasher::new(&[1; 16]);
        let root = a.root(b"");
        let hashes = [
            root,
            a.root(b"tenant"),
            b.root(b""),
            a.chain(root, &[1, 2]),
            a.chain(root, &[2, 1]),
            a.chain(root, &[1]),
            a.chain(a.root(b"tenant"), &[1, 2]),
            a.chain(a.chain(root, &[1]), &[2]),
            b.chain(root, &[1, 2]),
            a.chain(root, &[1 << 32, 2]),
            a.chain(root, &[-1, 2]),
            a.chain(root, &[i64::from(u32::MAX), 2]),
        ];
        for (i, x) in hashes.iter().enumerate() {
            assert!(hashes[i + 1..].iter().all(|y| x != y), "hash {i} repeats");
        }
        assert_eq!(a.chain(root, &[1, 2]), BlockHasher::new(&[0; 16]).chain(root, &[1, 2]));
    }

    /// The bytes that are hashed, written out: the parent, then 4 bytes a token, however long the block is.
    #[test]
    fn is_siphash_of_parent_and_tokens() {
        let hasher = BlockHasher::new(&[3; 16]);
        for len in [0, 1, 15, 16, 63, 64, 65, 128, 200] {
            let tokens: Vec<u32> = (0..len).map(|i| i * 0x0101_0101).collect();
            let parent = 0x0123_4567_89AB_CDEF_u128 << 64 | u128::from(len);
            let mut bytes = parent.to_le_bytes().to_vec();
            bytes.extend(tokens.iter().flat_map(|token| token.to_le_bytes()));
            let expected = SipHasher24::new_with_key(&[3; 16]).hash(&bytes).as_u128();
            assert_eq!(hasher.chain_tokens(parent, &tokens), expected, "{len} tokens");
            let wide: Vec<i64> = tokens.iter().map(|&token| i64::from(token)).collect();
            assert_eq!(hasher.chain(parent, &wide), expected, "{len} tokens");
        }
    }
}
