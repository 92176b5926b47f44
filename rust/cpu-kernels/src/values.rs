//! Numbers in borrowed memory, in one of the types of weights or KV caches. Knows no shapes.

use crate::memory::{Bf16, E4m3, E5m2, Memory, MemoryMut, bytes_of, bytes_of_mut};
use std::ops::Range;

/// Read-only numbers in one of the types of weights.
pub enum Values {
    /// Numbers in fp32.
    F32(Memory<f32>),
    /// Numbers in bf16.
    Bf16(Memory<Bf16>),
}

impl Values {
    /// Returns the number of elements.
    pub fn len(&self) -> usize {
        match self {
            Self::F32(memory) => memory.as_slice().len(),
            Self::Bf16(memory) => memory.as_slice().len(),
        }
    }

    /// Returns whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Converts elements from `start` on to f32, into all of `out`.
    pub fn expand(&self, start: usize, out: &mut [f32]) {
        match self {
            Self::F32(memory) => out.copy_from_slice(&memory.as_slice()[start..][..out.len()]),
            Self::Bf16(memory) => {
                for (out, x) in out.iter_mut().zip(&memory.as_slice()[start..]) {
                    *out = x.to_f32();
                }
            }
        }
    }

    /// Returns all elements as f32: a copy, for short tensors (norms, biases).
    pub fn to_f32(&self) -> Vec<f32> {
        let mut out = vec![0.0; self.len()];
        self.expand(0, &mut out);
        out
    }
}

/// Writable numbers in one of the types of a KV cache.
pub enum ValuesMut {
    /// Numbers in fp32.
    F32(MemoryMut<f32>),
    /// Numbers in bf16.
    Bf16(MemoryMut<Bf16>),
    /// FP8 codes with 3 bits of fraction, each times a scale of its layer.
    E4m3(MemoryMut<E4m3>),
    /// FP8 codes with 2 bits of fraction, each times a scale of its layer.
    E5m2(MemoryMut<E5m2>),
}

impl ValuesMut {
    /// Returns the number of elements.
    pub fn len(&self) -> usize {
        match self {
            Self::F32(memory) => memory.as_slice().len(),
            Self::Bf16(memory) => memory.as_slice().len(),
            Self::E4m3(memory) => memory.as_slice().len(),
            Self::E5m2(memory) => memory.as_slice().len(),
        }
    }

    /// Returns whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the number of bytes of an element.
    pub fn element_bytes(&self) -> usize {
        match self {
            Self::F32(_) => 4,
            Self::Bf16(_) => 2,
            Self::E4m3(_) | Self::E5m2(_) => 1,
        }
    }

    /// Returns the bytes of some elements.
    pub fn bytes(&self, elements: Range<usize>) -> &[u8] {
        match self {
            Self::F32(memory) => bytes_of(&memory.as_slice()[elements]),
            Self::Bf16(memory) => bytes_of(&memory.as_slice()[elements]),
            Self::E4m3(memory) => bytes_of(&memory.as_slice()[elements]),
            Self::E5m2(memory) => bytes_of(&memory.as_slice()[elements]),
        }
    }

    /// Returns the bytes of some elements, writable.
    pub fn bytes_mut(&mut self, elements: Range<usize>) -> &mut [u8] {
        match self {
            Self::F32(memory) => bytes_of_mut(&mut memory.as_mut_slice()[elements]),
            Self::Bf16(memory) => bytes_of_mut(&mut memory.as_mut_slice()[elements]),
            Self::E4m3(memory) => bytes_of_mut(&mut memory.as_mut_slice()[elements]),
            Self::E5m2(memory) => bytes_of_mut(&mut memory.as_mut_slice()[elements]),
        }
    }
}
