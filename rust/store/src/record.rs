//! Form of a record: a header of 64 bytes, then the payload. Does no I/O.

use std::hash::Hasher;

use rustc_hash::FxHasher;
use siphasher::sip::SipHasher24;

/// First bytes of every record; the digit is the version of the form.
const MAGIC: [u8; 8] = *b"specrs-1";
/// Number of bytes before a record's payload.
pub const HEADER_BYTES: usize = 64;
/// Number of header bytes that the header's own checksum covers.
const COVERED: usize = 56;

/// Record to be written.
#[derive(Clone, Debug)]
pub struct Record {
    /// Key that the record is found by.
    pub key: u128,
    /// Kind of record. A record replaces another of the same key if its kind is greater.
    pub kind: u32,
    /// Number that is returned with the payload.
    pub detail: u32,
    /// Whether the record replaces another of the same key whatever the kinds are.
    pub replaces: bool,
    /// Room for the header, then the payload.
    bytes: Vec<u8>,
}

impl Record {
    /// Makes a record without payload and with room for `capacity` bytes of it.
    pub fn new(key: u128, kind: u32, detail: u32, replaces: bool, capacity: usize) -> Self {
        let mut bytes = Vec::with_capacity(HEADER_BYTES + capacity);
        bytes.resize(HEADER_BYTES, 0);
        Self { key, kind, detail, replaces, bytes }
    }

    /// Returns the vector to append the payload to. Its first [`HEADER_BYTES`] bytes belong to the header.
    pub fn payload_mut(&mut self) -> &mut Vec<u8> {
        &mut self.bytes
    }

    /// Returns the number of bytes that the record takes in a segment.
    pub fn len(&self) -> usize {
        self.bytes.len()
    }

    /// Returns whether the record has no payload.
    pub fn is_empty(&self) -> bool {
        self.bytes.len() == HEADER_BYTES
    }

    /// Writes the header for the namespace with `keys`, and returns all bytes of the record.
    pub(crate) fn seal(&mut self, keys: &Keys) -> &[u8] {
        let header = Header {
            key: self.key,
            kind: self.kind,
            detail: self.detail,
            payload_len: (self.bytes.len() - HEADER_BYTES) as u64,
            payload_sum: payload_sum(&self.bytes[HEADER_BYTES..]),
        };
        self.bytes[..HEADER_BYTES].copy_from_slice(&header.encode(keys));
        &self.bytes
    }
}

/// Key of a namespace's checksums.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Keys(SipHasher24);

impl Keys {
    pub(crate) fn new(namespace: &[u8; 32]) -> Self {
        let mut key = [0; 16];
        key.copy_from_slice(&namespace[16..]);
        Self(SipHasher24::new_with_key(&key))
    }

    /// Returns the keyed checksum of `bytes`.
    pub(crate) fn sum(&self, bytes: &[u8]) -> u64 {
        self.0.hash(bytes)
    }
}

/// Header of a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Header {
    pub(crate) key: u128,
    pub(crate) kind: u32,
    pub(crate) detail: u32,
    pub(crate) payload_len: u64,
    pub(crate) payload_sum: u64,
}

impl Header {
    fn encode(&self, keys: &Keys) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8..24].copy_from_slice(&self.key.to_le_bytes());
        bytes[24..28].copy_from_slice(&self.kind.to_le_bytes());
        bytes[28..32].copy_from_slice(&self.detail.to_le_bytes());
        bytes[32..40].copy_from_slice(&self.payload_len.to_le_bytes());
        bytes[40..48].copy_from_slice(&self.payload_sum.to_le_bytes());
        let sum = keys.sum(&bytes[..COVERED]);
        bytes[COVERED..].copy_from_slice(&sum.to_le_bytes());
        bytes
    }

    /// Reads a header; `None` unless it is whole and of the namespace with `keys`.
    pub(crate) fn decode(bytes: &[u8], keys: &Keys) -> Option<Self> {
        let bytes = bytes.first_chunk::<HEADER_BYTES>()?;
        let word = |at: usize| u64::from_le_bytes(std::array::from_fn(|i| bytes[at + i]));
        if bytes[..8] != MAGIC || word(COVERED) != keys.sum(&bytes[..COVERED]) {
            return None;
        }
        Some(Self {
            key: u128::from(word(16)) << 64 | u128::from(word(8)),
            kind: word(24) as u32,
            detail: (word(24) >> 32) as u32,
            payload_len: word(32),
            payload_sum: word(40),
        })
    }

    /// Returns whether length and checksum of `payload` are those in the header.
    pub(crate) fn matches(&self, payload: &[u8]) -> bool {
        payload.len() as u64 == self.payload_len && payload_sum(payload) == self.payload_sum
    }
}

/// Checksum of a payload. It finds accidents and is fast, so that a read takes little longer than the copy.
fn payload_sum(payload: &[u8]) -> u64 {
    let mut hasher = FxHasher::default();
    hasher.write(payload);
    hasher.finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_flipped_bit_is_found() {
        let keys = Keys::new(&[7; 32]);
        let mut record = Record::new(0x0123_4567_89ab_cdef << 64 | 5, 1, 9, false, 0);
        record.payload_mut().extend((0..100_u8).map(|i| i.wrapping_mul(37)));
        let whole = record.seal(&keys).to_vec();
        let is_valid =
            |bytes: &[u8]| Header::decode(bytes, &keys).is_some_and(|header| header.matches(&bytes[HEADER_BYTES..]));
        assert!(is_valid(&whole));
        let header = Header::decode(&whole, &keys).unwrap();
        assert_eq!((header.key, header.kind, header.detail), (record.key, 1, 9));
        for bit in 0..whole.len() * 8 {
            let mut flipped = whole.clone();
            flipped[bit / 8] ^= 1 << (bit % 8);
            assert!(!is_valid(&flipped), "bit {bit}");
        }
        for len in 0..whole.len() {
            assert!(!is_valid(&whole[..len]), "{len} bytes");
        }
        assert!(Header::decode(&whole, &Keys::new(&[8; 32])).is_none(), "of another namespace");
    }
}
