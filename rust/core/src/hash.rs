//! Content hashes of KV blocks: a keyed 128-bit hash of a block's tokens and of all tokens before them. Stores nothing.
//!
//! `H_0 = SipHash'(salt)`, `H_{b+1} = SipHash(H_b, tokens of block b)`, SipHash-2-4 with 128-bit output (Aumasson and
//! Bernstein 2012). The key keeps clients from constructing prompts that collide with another tenant's. The salt
//! separates tenants and adapters that share the key.
//!
//! KV may depend on more than tokens, such as an image in place of placeholder tokens, or an adapter from some position
//! on. Each such dependency is an extra key of its block: `H_b` is then `SipHash''(H_b, offset in the block, extra
//! key)`, for each of them in order. A chain continues from any `H_b`, so the caller may keep one and hash later tokens
//! from it.

use std::hash::Hasher;

use siphasher::sip128::{Hasher128, SipHasher24};

use crate::error::{Error, Result};

/// Word that is hashed before the 64 bits of a token outside `0..u32::MAX`; other tokens are hashed as 32 bits.
pub(crate) const ESCAPE: u32 = u32::MAX;

/// Hash of a block's content and of all content before it.
pub type BlockHash = u128;

/// Extra dependency of the KV from a position on, besides the tokens. It enters the hash of the position's block and
/// thus of all blocks after it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExtraKey<'a> {
    /// Index of the first token whose KV depends on the key.
    pub position: usize,
    /// Bytes that identify the dependency, such as the hash of an image. At least one byte.
    pub key: &'a [u8],
}

/// Checks extra keys for `num_tokens` tokens: positions must be token indices and not decrease, and keys must not be
/// empty.
///
/// # Errors
/// Index and value of the first wrong key, and a description of what is allowed.
pub(crate) fn check_extra_keys(extra_keys: &[ExtraKey<'_>], num_tokens: usize) -> Result<(), (String, String)> {
    let mut least = 0;
    for (at, extra) in extra_keys.iter().enumerate() {
        if extra.position < least || extra.position >= num_tokens {
            return Err((
                format!("position {} at index {at}", extra.position),
                format!("positions from 0 to {} that do not decrease", num_tokens.saturating_sub(1)),
            ));
        }
        if extra.key.is_empty() {
            return Err((format!("an empty key at index {at}"), "at least 1 byte".into()));
        }
        least = extra.position;
    }
    Ok(())
}

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
    keyed_extra: SipHasher24,
}

impl BlockHasher {
    /// Makes a hasher with the given key. Engines whose prefix caches should agree must use the same key.
    pub fn new(key: &[u8; 16]) -> Self {
        // Keys of their own, so that neither a salt nor an extra key spells a parent and its tokens.
        Self {
            keyed: SipHasher24::new_with_key(key),
            keyed_root: SipHasher24::new_with_key(&key.map(|byte| byte ^ 0x5a)),
            keyed_extra: SipHasher24::new_with_key(&key.map(|byte| byte ^ 0xa5)),
        }
    }

    /// Returns the start of a chain: the parent of a sequence's first block.
    pub fn root(&self, salt: &[u8]) -> BlockHash {
        let mut hasher = self.keyed_root;
        hasher.write(salt);
        hasher.finish128().as_u128()
    }

    /// Returns the parent to use in place of `parent` for a block with an extra key, which counts from the block's
    /// token `offset` on. Several keys are applied one after the other.
    pub fn with_extra_key(&self, parent: BlockHash, offset: usize, key: &[u8]) -> BlockHash {
        let mut hasher = self.keyed_extra;
        hasher.write(&parent.to_le_bytes());
        hasher.write(&(offset as u64).to_le_bytes());
        hasher.write(key);
        hasher.finish128().as_u128()
    }

    /// Returns the tag of a KV group after the first. The hash of a block in that group is the first group's hash XOR
    /// this tag; the first group has none.
    pub(crate) fn group_tag(&self, group: usize) -> BlockHash {
        self.with_extra_key(0, group, b"KV group")
    }

    /// Hashes the full blocks of `tokens`, which continue from `parent`: a [`root`](Self::root), or the last hash of
    /// the blocks before. Positions of extra keys count from `tokens[0]`.
    ///
    /// # Errors
    /// [`Error::InvalidConfig`] if `block_size` is 0. [`Error::InvalidBuffer`] if positions of extra keys decrease or
    /// are no token indices, or if a key is empty.
    pub fn hash_blocks(
        &self,
        parent: BlockHash,
        tokens: &[i64],
        block_size: usize,
        extra_keys: &[ExtraKey<'_>],
    ) -> Result<Vec<BlockHash>> {
        if block_size == 0 {
            return Err(Error::invalid_config("block_size", 0, "at least 1"));
        }
        check_extra_keys(extra_keys, tokens.len())
            .map_err(|(value, allowed)| Error::invalid_buffer("extra_keys", value, allowed))?;
        let mut parent = parent;
        let mut keys = extra_keys.iter().peekable();
        let blocks = tokens.chunks_exact(block_size).enumerate().map(|(index, tokens)| {
            let start = index * block_size;
            while let Some(extra) = keys.next_if(|extra| extra.position < start + block_size) {
                parent = self.with_extra_key(parent, extra.position - start, extra.key);
            }
            parent = self.chain(parent, tokens);
            parent
        });
        Ok(blocks.collect())
    }

    /// Returns the hash of the block that contains `tokens` after the block `parent`.
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

    /// Returns the hash of [`chain`](Self::chain) for tokens below [`ESCAPE`].
    pub(crate) fn chain_tokens(&self, parent: BlockHash, tokens: &[u32]) -> BlockHash {
        self.chain_words(parent, tokens, |token| token)
    }

    /// Hashes words in groups of hundreds of bytes. The hasher sets up and finishes partial words at every write, which
    /// takes two thirds of the time if every token is a write of its own.
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
            a.with_extra_key(root, 0, b"a"),
            a.with_extra_key(root, 1, b"a"),
            a.with_extra_key(root, 0, b"b"),
            a.with_extra_key(root, 0, b"ab"),
            a.with_extra_key(a.with_extra_key(root, 0, b"a"), 0, b"b"),
            a.with_extra_key(a.with_extra_key(root, 0, b"b"), 0, b"a"),
            b.with_extra_key(root, 0, b"a"),
            a.chain(a.with_extra_key(root, 0, b"a"), &[1, 2]),
            a.root(&[&root.to_le_bytes()[..], &[0; 8], b"a"].concat()),
        ];
        for (i, x) in hashes.iter().enumerate() {
            assert!(hashes[i + 1..].iter().all(|y| x != y), "hash {i} repeats");
        }
        assert_eq!(a.chain(root, &[1, 2]), BlockHasher::new(&[0; 16]).chain(root, &[1, 2]));
    }

    /// Compares with `SipHash` over the hashed bytes, written out: the parent, then 4 bytes per token, for any block
    /// length.
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

    /// Splits the tokens between two calls at every place, with extra keys on both sides; the chain is the same.
    #[test]
    fn goes_on_from_a_parent() {
        let hasher = BlockHasher::new(&[3; 16]);
        let tokens: Vec<i64> = (0..26).collect();
        let keys = [(1, "a"), (1, "b"), (4, "c"), (11, "d"), (12, "e"), (25, "beyond the full blocks")];
        let keys = keys.map(|(position, key)| ExtraKey { position, key: key.as_bytes() });
        let whole = hasher.hash_blocks(hasher.root(b"s"), &tokens, 4, &keys).unwrap();
        assert_eq!(whole.len(), 6);
        for cut in 0..=6 {
            let (before, after) = tokens.split_at(4 * cut);
            let at = keys.partition_point(|key| key.position < before.len());
            let shifted: Vec<_> =
                keys[at..].iter().map(|key| ExtraKey { position: key.position - before.len(), ..*key }).collect();
            let first = hasher.hash_blocks(hasher.root(b"s"), before, 4, &keys[..at]).unwrap();
            let parent = first.last().copied().unwrap_or(hasher.root(b"s"));
            let second = hasher.hash_blocks(parent, after, 4, &shifted).unwrap();
            assert_eq!([first, second].concat(), whole, "cut at block {cut}");
        }
        let plain = hasher.hash_blocks(hasher.root(b"s"), &tokens, 4, &[]).unwrap();
        assert!(plain.iter().zip(&whole).all(|(plain, whole)| plain != whole));
        let late = hasher.hash_blocks(hasher.root(b"s"), &tokens, 4, &keys[3..]).unwrap();
        assert_eq!(plain.iter().zip(&late).take_while(|(plain, late)| plain == late).count(), 2, "from its block on");
    }

    #[test]
    fn refuses_wrong_extra_keys() {
        let hasher = BlockHasher::new(&[3; 16]);
        let key = |position| ExtraKey { position, key: b"x" };
        let hash = |block_size, keys: &[ExtraKey<'_>]| hasher.hash_blocks(0, &[1, 2, 3], block_size, keys);
        for keys in [&[key(3)][..], &[key(2), key(1)], &[ExtraKey { position: 0, key: b"" }], &[key(usize::MAX)]] {
            assert!(matches!(hash(2, keys), Err(Error::InvalidBuffer { name: "extra_keys", .. })), "{keys:?}");
        }
        assert!(hash(2, &[key(1), key(1), key(2)]).is_ok());
        assert!(matches!(hash(0, &[]), Err(Error::InvalidConfig { field: "block_size", .. })));
    }
}
