//! Source of numbers for fuzz targets: reads them from the fuzzer's bytes, and gives zeros when the bytes have run out.

pub struct Bytes<'a>(pub &'a [u8]);

impl Bytes<'_> {
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub fn byte(&mut self) -> u8 {
        let Some((&first, rest)) = self.0.split_first() else { return 0 };
        self.0 = rest;
        first
    }

    pub fn word(&mut self) -> u64 {
        (0..8).fold(0, |word, _| word << 8 | u64::from(self.byte()))
    }

    /// Returns a number from 0 to `n - 1`, for `n` up to 65,536.
    pub fn below(&mut self, n: usize) -> usize {
        let drawn = if n <= 256 { usize::from(self.byte()) } else { self.word() as usize >> 48 };
        drawn % n.max(1)
    }

    /// Returns any number, most often a small one.
    pub fn number(&mut self) -> i64 {
        match self.byte() {
            255 => self.word() as i64,
            small => i64::from(small) - 4,
        }
    }
}
