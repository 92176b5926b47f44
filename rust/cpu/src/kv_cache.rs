//! KV cache of one model: its memory and the location of each position. Knows no requests.

use crate::error::{Error, Result, check_len};
use crate::shape::ModelShape;
use crate::states::States;
use specrs_cpu_kernels::{Bf16, MemoryMut, ValuesMut};
use std::mem::discriminant;

/// Sizes of a KV cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvShape {
    /// Number of blocks that can be allocated. The cache has one more block, the last, which is scratch and never read.
    pub num_blocks: usize,
    /// Number of positions in a block.
    pub block_size: usize,
    /// Number of KV heads.
    pub num_kv_heads: usize,
    /// Number of features in a head.
    pub head_dim: usize,
}

impl KvShape {
    /// Returns the number of elements in one layer, `[num_blocks + 1, 2, num_kv_heads, block_size, head_dim]`.
    pub fn layer_len(&self) -> usize {
        (self.num_blocks + 1) * 2 * self.num_kv_heads * self.block_size * self.head_dim
    }

    /// Returns the number of slots that can be written and read: `num_blocks * block_size`.
    pub fn num_slots(&self) -> usize {
        self.num_blocks * self.block_size
    }
}

/// Group and memory of a layer's KV.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvLayer {
    /// KV group of the layer: layers in one group share a block table.
    pub group: usize,
    /// Index of the layer in its group. Layers with the same index in different groups share memory, of which each
    /// block belongs to one group at a time.
    pub place: usize,
}

/// Keys and values of every layer in blocks; slot s is block `s / block_size`, offset `s % block_size`.
pub struct KvCache {
    /// Memory of the layers, by place.
    pub(crate) places: Vec<ValuesMut>,
    pub(crate) layers: Vec<KvLayer>,
    pub(crate) shape: KvShape,
    /// Number of KV heads and `head_dim` of each place.
    heads: Vec<(usize, usize)>,
    /// States of rows, for models whose layers have some.
    pub(crate) states: States,
}

impl KvCache {
    /// Makes a cache in borrowed memory: per layer `[num_blocks + 1, 2, num_kv_heads, block_size, head_dim]`,
    /// contiguous, where dimension 1 is K, V. All layers have one type and are in one group.
    ///
    /// # Errors
    /// If a size is 0, a layer has a wrong length, or layers differ in type.
    pub fn new(shape: KvShape, layers: Vec<ValuesMut>) -> Result<Self> {
        let heads = vec![(shape.num_kv_heads, shape.head_dim); layers.len()];
        Self::of_heads(shape, heads, layers)
    }

    /// Makes a cache as [`new`](Self::new) does, of layers that may have different heads: `heads` has the number of KV
    /// heads and `head_dim` of each. The other sizes of `shape` hold for all layers.
    ///
    /// # Errors
    /// If a size is 0, a layer has a wrong length, or layers differ in type.
    pub fn of_heads(shape: KvShape, heads: Vec<(usize, usize)>, layers: Vec<ValuesMut>) -> Result<Self> {
        let sizes =
            [("block_size", shape.block_size), ("num_kv_heads", shape.num_kv_heads), ("head_dim", shape.head_dim)];
        for (field, size) in sizes {
            if size == 0 {
                return Err(Error::invalid(field, size, "at least 1"));
            }
        }
        check_len("heads", heads.len(), layers.len())?;
        for (i, layer) in layers.iter().enumerate() {
            let (num_kv_heads, head_dim) = heads[i];
            let own = KvShape { num_kv_heads, head_dim, ..shape };
            check_len(&format!("kv_cache.layers[{i}]"), layer.len(), own.layer_len())?;
            if discriminant(layer) != discriminant(&layers[0]) {
                return Err(Error::invalid(format!("kv_cache.layers[{i}]"), "another type", "the type of layer 0"));
            }
        }
        let own = (0..layers.len()).map(|place| KvLayer { group: 0, place }).collect();
        Ok(Self { places: layers, layers: own, shape, heads, states: States::default() })
    }

    /// Assigns this memory to the layers of a model in several groups. The cache's layers so far become the places of
    /// `layers`.
    ///
    /// # Errors
    /// If a place does not exist, two layers of a group have one place, or a group without layers comes before others.
    pub fn with_groups(self, layers: Vec<KvLayer>) -> Result<Self> {
        let num_groups = layers.iter().map(|layer| layer.group + 1).max().unwrap_or(0);
        for (i, layer) in layers.iter().enumerate() {
            let field = || format!("groups[{i}]");
            if layer.place >= self.places.len() {
                let (given, most) = (format!("place {}", layer.place), self.places.len());
                return Err(Error::invalid(field(), given, format!("a place below {most}, the number of arrays")));
            }
            if layers[..i].contains(layer) {
                let given = format!("place {} of group {}", layer.place, layer.group);
                return Err(Error::invalid(field(), given, "a place for each layer of a group"));
            }
        }
        if let Some(empty) = (0..num_groups).find(|&group| layers.iter().all(|layer| layer.group != group)) {
            return Err(Error::invalid("groups", format!("no layer in group {empty}"), "at least one layer in each"));
        }
        Ok(Self { layers, ..self })
    }

    /// Returns G, the number of KV groups (layers with a block table of their own).
    pub fn num_groups(&self) -> usize {
        self.layers.iter().map(|layer| layer.group).max().map_or(1, |last| last + 1)
    }

    /// Makes a zeroed cache with its own memory, in bf16 if `bf16`, else in fp32.
    ///
    /// # Errors
    /// If a size is 0.
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

    /// Returns the bytes of the states that rows have next to the KV. It grows when a row is first used.
    pub fn state_bytes(&self) -> usize {
        self.states.bytes()
    }

    /// Returns the bytes of the snapshots of states. It grows when a slot is first used.
    pub fn snapshot_bytes(&self) -> usize {
        self.states.snapshot_bytes()
    }

    /// Gives a row the states of the snapshot in `slot`. The row's next position is the snapshot's length.
    ///
    /// # Errors
    /// If nothing was written into the slot, or states of another model.
    pub fn restore_states(&mut self, row: usize, slot: usize) -> Result<()> {
        self.states.restore(row, slot)
    }

    /// Appends the bytes of a snapshot of states to `out`.
    ///
    /// # Panics
    /// If nothing was written into the slot.
    pub fn append_snapshot(&self, slot: usize, out: &mut Vec<u8>) {
        self.states.append_snapshot(slot, out);
    }

    /// Overwrites a snapshot of states with bytes that [`Self::append_snapshot`] gave, of states after `len` positions.
    /// [`Decoder::snapshot_bytes`](crate::Decoder::snapshot_bytes) says how many a model has.
    ///
    /// # Panics
    /// If `bytes` are no whole numbers.
    pub fn fill_snapshot(&mut self, slot: usize, len: usize, bytes: &[u8]) {
        self.states.fill_snapshot(slot, len, bytes);
    }

    /// Fills a slot of snapshots with NaN, for tests.
    pub fn poison_snapshot(&mut self, slot: usize) {
        self.states.poison_snapshot(slot);
    }

    /// Fills the memory of states with NaN, for tests: a request that begins at position 0 reads none of it.
    pub fn poison_states(&mut self) {
        self.states.poison();
    }

    /// Returns the sizes.
    pub fn shape(&self) -> &KvShape {
        &self.shape
    }

    /// Returns the memory of the layers, by place, whose elements a host may read and write between passes.
    pub fn layers_mut(&mut self) -> &mut [ValuesMut] {
        &mut self.places
    }

    /// Returns the number of bytes of one block, K and V of all places.
    pub fn block_bytes(&self) -> usize {
        let elements: usize = (0..self.places.len()).map(|place| self.block_len(place)).sum();
        elements * self.places.first().map_or(0, ValuesMut::element_bytes)
    }

    /// Appends the bytes of a block to `out`, place after place.
    ///
    /// # Panics
    /// If the block is not among the blocks that can be allocated.
    pub fn append_block(&self, block: usize, out: &mut Vec<u8>) {
        assert!(block < self.shape.num_blocks, "block {block} of {}", self.shape.num_blocks);
        for (i, place) in self.places.iter().enumerate() {
            let len = self.block_len(i);
            out.extend_from_slice(place.bytes(block * len..(block + 1) * len));
        }
    }

    /// Overwrites a block with bytes that [`Self::append_block`] gave.
    ///
    /// # Panics
    /// If the block is not among the blocks that can be allocated, or `bytes` has another length than a block.
    pub fn fill_block(&mut self, block: usize, bytes: &[u8]) {
        assert!(block < self.shape.num_blocks, "block {block} of {}", self.shape.num_blocks);
        assert_eq!(bytes.len(), self.block_bytes(), "bytes of a block");
        let lens: Vec<usize> = (0..self.places.len()).map(|place| self.block_len(place)).collect();
        let mut rest = bytes;
        for (place, len) in self.places.iter_mut().zip(lens) {
            let out = place.bytes_mut(block * len..(block + 1) * len);
            let (own, others) = rest.split_at(out.len());
            out.copy_from_slice(own);
            rest = others;
        }
    }

    /// Returns the number of elements of one block in a place.
    fn block_len(&self, place: usize) -> usize {
        let (num_kv_heads, head_dim) = self.heads[place];
        2 * num_kv_heads * self.shape.block_size * head_dim
    }

    /// Makes a cache without layers, for a head that attends the target's keys and values.
    #[must_use]
    pub fn empty() -> Self {
        let shape = KvShape { num_blocks: 0, block_size: 1, num_kv_heads: 1, head_dim: 1 };
        Self { places: Vec::new(), layers: Vec::new(), shape, heads: Vec::new(), states: States::default() }
    }

    /// Rejects a target's cache whose layers do not match those of a head that reads it: `layers` has the place and
    /// sizes of the keys and values of each layer.
    pub(crate) fn check_sources<'a>(
        &self,
        layers: impl Iterator<Item = (Option<usize>, &'a ModelShape)>,
    ) -> Result<()> {
        for (i, (source, shape)) in layers.enumerate() {
            let found = source.and_then(|source| self.layers.get(source)).map(|layer| self.heads[layer.place]);
            if found != Some((shape.num_kv_heads, shape.head_dim)) {
                let allowed = format!("the target's layer {source:?}, which has {found:?}");
                let given = format!("{} KV heads of {} features", shape.num_kv_heads, shape.head_dim);
                return Err(Error::invalid(format!("layers[{i}].source"), given, allowed));
            }
        }
        Ok(())
    }

    /// Rejects a cache whose sizes do not match the model: `shapes` has those of each layer with keys and values.
    pub(crate) fn check<'a>(&self, shapes: impl Iterator<Item = &'a ModelShape> + Clone) -> Result<()> {
        let num_layers = shapes.clone().count();
        let mut at = self.layers.iter();
        for shape in shapes {
            let expected = [num_layers, shape.num_kv_heads, shape.head_dim];
            let (kv_heads, head_dim) = at.next().map_or((0, 0), |layer| self.heads[layer.place]);
            let found = [self.layers.len(), kv_heads, head_dim];
            if found != expected {
                return Err(Error::invalid(
                    "kv_cache's [layers, num_kv_heads, head_dim]",
                    format!("{found:?}"),
                    format!("{expected:?}"),
                ));
            }
        }
        Ok(())
    }
}
