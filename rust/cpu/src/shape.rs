//! Sizes of a decoder, and the checks that they go together. Contains no weights.

use crate::error::{Error, Result};

/// Maximum number of rows that go through all layers together. Longer passes are cut into tiles of as many rows, in
/// order.
pub const MAX_TILE_ROWS: usize = 64;

/// Sizes of a dense decoder, with the names of its config.json.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ModelShape {
    /// Number of ids in the vocabulary.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Number of features between gate, up and down.
    pub intermediate_size: usize,
    /// Number of query heads.
    pub num_heads: usize,
    /// Number of KV heads, a divisor of `num_heads`.
    pub num_kv_heads: usize,
    /// Number of features in a head, even.
    pub head_dim: usize,
    /// Number added to the mean square before its root.
    pub rms_norm_eps: f32,
}

impl ModelShape {
    /// Returns the number of query heads per KV head.
    pub fn group(&self) -> usize {
        self.num_heads / self.num_kv_heads
    }

    pub(crate) fn check(&self) -> Result<()> {
        let sizes = [
            ("vocab_size", self.vocab_size),
            ("hidden_size", self.hidden_size),
            ("intermediate_size", self.intermediate_size),
            ("num_heads", self.num_heads),
            ("num_kv_heads", self.num_kv_heads),
            ("head_dim", self.head_dim),
        ];
        for (field, size) in sizes {
            if size == 0 {
                return Err(Error::invalid(field, size, "at least 1"));
            }
        }
        if !self.num_heads.is_multiple_of(self.num_kv_heads) {
            let allowed = format!("a divisor of num_heads = {}", self.num_heads);
            return Err(Error::invalid("num_kv_heads", self.num_kv_heads, allowed));
        }
        if !self.head_dim.is_multiple_of(2) {
            return Err(Error::invalid("head_dim", self.head_dim, "even, because RoPE rotates pairs"));
        }
        if !(self.rms_norm_eps >= 0.0 && self.rms_norm_eps.is_finite()) {
            return Err(Error::invalid("rms_norm_eps", self.rms_norm_eps, "a finite number of at least 0"));
        }
        Ok(())
    }
}
