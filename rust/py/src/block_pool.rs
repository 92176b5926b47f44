//! `BlockPool` and `BlockHasher` for Python, one to one.

use crate::buffers::{In, readonly};
use crate::error::{Class, OrRaise, size};
use pyo3::prelude::*;
use pyo3::sync::MutexExt;
use std::sync::{Mutex, MutexGuard, PoisonError};

pub(crate) const DEFAULT_HASH_KEY: &[u8] = &[0; 16];
pub(crate) const NO_SALT: &[u8] = b"";

#[pyclass(frozen, module = "specrs._core")]
pub(crate) struct BlockPool(Mutex<specrs_core::BlockPool>);

impl BlockPool {
    fn pool(&self, py: Python<'_>) -> MutexGuard<'_, specrs_core::BlockPool> {
        self.0.lock_py_attached(py).unwrap_or_else(PoisonError::into_inner)
    }
}

#[pymethods]
impl BlockPool {
    #[new]
    fn new(py: Python<'_>, num_blocks: i64) -> PyResult<Self> {
        let num_blocks = size(py, Class::InvalidConfig, "num_blocks", num_blocks)?;
        specrs_core::BlockPool::new(num_blocks).map(|pool| Self(Mutex::new(pool))).or_raise(py)
    }

    #[getter]
    fn num_blocks(&self, py: Python<'_>) -> usize {
        self.pool(py).num_blocks()
    }

    #[getter]
    fn num_free(&self, py: Python<'_>) -> usize {
        self.pool(py).num_free()
    }

    fn ref_count(&self, py: Python<'_>, block: i64) -> Option<usize> {
        self.pool(py).ref_count(block)
    }

    fn allocate(&self, py: Python<'_>) -> PyResult<i64> {
        self.pool(py).allocate().or_raise(py)
    }

    fn share(&self, py: Python<'_>, block: i64) -> PyResult<()> {
        self.pool(py).share(block).or_raise(py)
    }

    fn free(&self, py: Python<'_>, block: i64) -> PyResult<()> {
        self.pool(py).free(block).or_raise(py)
    }

    fn lookup(&self, py: Python<'_>, block_hash: u128) -> Option<i64> {
        self.pool(py).lookup(block_hash)
    }

    fn register(&self, py: Python<'_>, block: i64, block_hash: u128) -> PyResult<bool> {
        self.pool(py).register(block, block_hash).or_raise(py)
    }

    fn is_registered(&self, py: Python<'_>, block: i64) -> bool {
        self.pool(py).is_registered(block)
    }

    fn has_draft(&self, py: Python<'_>, block: i64) -> bool {
        self.pool(py).has_draft(block)
    }

    fn mark_draft(&self, py: Python<'_>, block: i64) -> PyResult<()> {
        self.pool(py).mark_draft(block).or_raise(py)
    }

    fn claim(&self, py: Python<'_>, block: i64, claimant: i64) -> PyResult<bool> {
        // The core keeps u32::MAX for itself: it stands for nobody.
        let Some(claimant) = u32::try_from(claimant).ok().filter(|&claimant| claimant != u32::MAX) else {
            let message = format!("claimant = {claimant} is not allowed: expected 0 to {}", u32::MAX - 1);
            return Err(Class::InvalidBlock.error(py, message));
        };
        self.pool(py).claim(block, claimant).or_raise(py)
    }

    fn claimant(&self, py: Python<'_>, block: i64) -> Option<u32> {
        self.pool(py).claimant(block)
    }

    fn release_claim(&self, py: Python<'_>, block: i64, claimant: i64) -> bool {
        u32::try_from(claimant).is_ok_and(|claimant| self.pool(py).release_claim(block, claimant))
    }

    fn reset_prefix_cache(&self, py: Python<'_>) -> bool {
        self.pool(py).reset_prefix_cache()
    }

    fn check_integrity(&self, py: Python<'_>) -> PyResult<()> {
        self.pool(py).check_integrity().or_raise(py)
    }

    fn __repr__(&self, py: Python<'_>) -> String {
        let pool = self.pool(py);
        format!("BlockPool(num_blocks={}, num_free={})", pool.num_blocks(), pool.num_free())
    }
}

#[pyclass(frozen, module = "specrs._core")]
pub(crate) struct BlockHasher(specrs_core::BlockHasher);

#[pymethods]
impl BlockHasher {
    #[new]
    #[pyo3(signature = (hash_key = DEFAULT_HASH_KEY))]
    fn new(py: Python<'_>, hash_key: &[u8]) -> PyResult<Self> {
        hash_key_bytes(py, hash_key).map(|key| Self(specrs_core::BlockHasher::new(&key)))
    }

    #[pyo3(signature = (token_ids, block_size, cache_salt = NO_SALT))]
    fn hash_blocks(
        &self,
        py: Python<'_>,
        token_ids: &Bound<'_, PyAny>,
        block_size: i64,
        cache_salt: &[u8],
    ) -> PyResult<Vec<u128>> {
        let token_ids: In = readonly("token_ids", token_ids)?;
        // Only the check: the mapper and the hasher cut tokens into the same blocks.
        let block_size = size(py, Class::InvalidConfig, "block_size", block_size)
            .and_then(|block_size| specrs_core::SlotMapper::new(block_size).or_raise(py))?
            .block_size();
        let mut parent = self.0.root(cache_salt);
        let blocks = token_ids.as_slice()?.chunks_exact(block_size);
        Ok(blocks
            .map(|tokens| {
                parent = self.0.chain(parent, tokens);
                parent
            })
            .collect())
    }

    /// Without the key, which is a secret: who knows it can build colliding prompts.
    #[expect(clippy::unused_self, reason = "a Python method has one")]
    fn __repr__(&self) -> &'static str {
        "BlockHasher(hash_key=...)"
    }
}

/// The 16 bytes of a hash key.
pub(crate) fn hash_key_bytes(py: Python<'_>, hash_key: &[u8]) -> PyResult<[u8; 16]> {
    hash_key.try_into().map_err(|_| {
        let message = format!("hash_key has {} bytes, which is not allowed: expected 16", hash_key.len());
        Class::InvalidConfig.error(py, message)
    })
}
