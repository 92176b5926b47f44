//! Owned memory of vectors that begins at a cache line, because a load across two lines costs as much as two. Computes
//! nothing.

use std::ops::{Deref, DerefMut};

pub(crate) const LINE_BYTES: usize = 64;
/// Numbers in a vector, which fills a cache line.
const LANES: usize = LINE_BYTES / size_of::<f32>();

/// Vectors of sixteen numbers, none of which crosses a cache line.
#[derive(Default)]
pub struct Vectors {
    /// Numbers of the vectors, and almost one more cache line of room to align them.
    numbers: Vec<f32>,
    first: usize,
    len: usize,
}

impl Vectors {
    /// Allocates `len` vectors of zeros.
    pub fn new(len: usize) -> Self {
        let room = LANES - 1;
        let numbers = vec![0.0; len * LANES + room];
        // An interpreter may say that it does not know.
        let first = numbers.as_ptr().align_offset(LINE_BYTES).min(room);
        Self { numbers, first, len }
    }
}

impl Deref for Vectors {
    type Target = [[f32; LANES]];

    #[inline]
    fn deref(&self) -> &Self::Target {
        self.numbers[self.first..][..self.len * LANES].as_chunks().0
    }
}

impl DerefMut for Vectors {
    #[inline]
    fn deref_mut(&mut self) -> &mut Self::Target {
        self.numbers[self.first..][..self.len * LANES].as_chunks_mut().0
    }
}
