//! The KV cache of one model: its memory and where a position lies in it. Knows no request.

use crate::error::{Error, Result, check_len};
use crate::memory::{Bf16, MemoryMut};
use crate::weights::{ModelShape, ValuesMut};

/// Sizes of a KV cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvShape {
    /// Blocks that can be handed out; one more, the last, is scratch and never read.
    pub num_blocks: usize,
    /// Positions of a block.
    pub block_size: usize,
    /// KV heads.
    pub num_kv_heads: usize,
    /// Features of a head.
    pub head_dim: usize,
}

impl KvShape {
    /// Elements of one layer, `[num_blocks + 1, 2, num_kv_heads, block_size, head_dim]`.
    pub fn layer_len(&self) -> usize {
        (self.num_blocks + 1) * 2 * self.num_kv_heads * self.block_size * self.head_dim
    }

    /// Slots that can be written and read: `num_blocks * block_size`.
    pub fn num_slots(&self) -> usize {
        self.num_blocks * self.block_size
    }
}

/// Keys and values of every layer in blocks; slot s is block `s / block_size`, offset `s % block_size`.
pub struct KvCache {
    pub(crate) layers: Vec<ValuesMut>,
    pub(crate) shape: KvShape,
}

impl KvCache {
    /// A cache on memory of others: per layer `[num_blocks + 1, 2, num_kv_heads, block_size, head_dim]` contiguous,
    /// dimension 1 is K, V. All layers have one type.
    ///
    /// # Errors
    /// Where a size is 0, a layer has another length, or layers differ in type.
    pub fn new(shape: KvShape, layers: Vec<ValuesMut>) -> Result<Self> {
        let sizes =
            [("block_size", shape.block_size), ("num_kv_heads", shape.num_kv_heads), ("head_dim", shape.head_dim)];
        for (field, size) in sizes {
            if size == 0 {
                return Err(Error::invalid(field, size, "at least 1"));
            }
        }
        for (i, layer) in layers.iter().enumerate() {
            check_len(&format!("kv_cache.layers[{i}]"), layer.len(), shape.layer_len())?;
            if matches!(layer, ValuesMut::F32(_)) != matches!(layers[0], ValuesMut::F32(_)) {
                return Err(Error::invalid(format!("kv_cache.layers[{i}]"), "another type", "the type of layer 0"));
            }
        }
        Ok(Self { layers, shape })
    }

    /// A zeroed cache of its own; bf16 where `bf16`.
    ///
    /// # Errors
    /// As [`KvCache::new`].
    pub fn allocate(shape: KvShape, num_layers: usize, bf16: bool) -> Result<Self> {
        let len = shape.layer_len();
        let layer = |_| {
            if bf16 {
                ValuesMut::Bf16(MemoryMut::from_vec(vec![Bf16::default(); len]))
            } else {
                ValuesMut::F32(MemoryMut::from_vec(vec![0.0; len]))
            }
        };
        Self::new(shape, (0..num_layers).map(layer).collect())
    }

    /// Its sizes.
    pub fn shape(&self) -> &KvShape {
        &self.shape
    }

    /// Its layers, whose elements a host may read and write between passes.
    pub fn layers_mut(&mut self) -> &mut [ValuesMut] {
        &mut self.layers
    }

    /// Refuses a cache that is not of this model.
    pub(crate) fn check(&self, shape: &ModelShape, num_layers: usize) -> Result<()> {
        let found = [self.layers.len(), self.shape.num_kv_heads, self.shape.head_dim];
        let expected = [num_layers, shape.num_kv_heads, shape.head_dim];
        if found == expected {
            return Ok(());
        }
        Err(Error::invalid(
            "kv_cache's [layers, num_kv_heads, head_dim]",
            format!("{found:?}"),
            format!("{expected:?}"),
        ))
    }
}
