//! `BlockPool` and `BlockHasher` for Python, one to one.

use crate::buffers::{In, readonly};
use crate::error::{Class, OrRaise, size};
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;
use pyo3::sync::MutexExt;
use specrs_core::ExtraKey;
use std::sync::{Mutex, MutexGuard, PoisonError};

pub(crate) const DEFAULT_HASH_KEY: &[u8] = &[0; 16];
pub(crate) const NO_SALT: &[u8] = b"";

#[pyclass(frozen)]
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

    fn next_eviction(&self, py: Python<'_>) -> Option<i64> {
        self.pool(py).next_eviction()
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

    fn block_hash(&self, py: Python<'_>, block: i64) -> Option<u128> {
        self.pool(py).block_hash(block)
    }

    fn has_draft(&self, py: Python<'_>, block: i64) -> bool {
        self.pool(py).has_draft(block)
    }

    fn mark_draft(&self, py: Python<'_>, block: i64) -> PyResult<()> {
        self.pool(py).mark_draft(block).or_raise(py)
    }

    fn claim(&self, py: Python<'_>, block: i64, claimant: i64) -> PyResult<bool> {
        // The core keeps u32::MAX for itself: it stands for no claimant.
        let Some(claimant) = u32::try_from(claimant).ok().filter(|&claimant| claimant != u32::MAX) else {
            let allowed = format!("from 0 to {}", u32::MAX - 1);
            return Err(Class::InvalidBlock.out_of_range(py, "claimant", claimant, allowed));
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

#[pyclass(frozen)]
pub(crate) struct BlockHasher(specrs_core::BlockHasher);

#[pymethods]
impl BlockHasher {
    #[new]
    #[pyo3(signature = (hash_key = DEFAULT_HASH_KEY))]
    fn new(py: Python<'_>, hash_key: &[u8]) -> PyResult<Self> {
        hash_key_bytes(py, hash_key).map(|key| Self(specrs_core::BlockHasher::new(&key)))
    }

    #[pyo3(signature = (token_ids, block_size, cache_salt = NO_SALT, *, parent = None, extra_keys = None))]
    #[expect(clippy::needless_pass_by_value, reason = "an argument from Python is owned")]
    fn hash_blocks(
        &self,
        py: Python<'_>,
        token_ids: &Bound<'_, PyAny>,
        block_size: i64,
        cache_salt: &[u8],
        parent: Option<u128>,
        extra_keys: Option<ExtraKeys>,
    ) -> PyResult<Vec<u128>> {
        let token_ids: In = readonly("token_ids", token_ids)?;
        let block_size = size(py, Class::InvalidConfig, "block_size", block_size)?;
        if parent.is_some() && !cache_salt.is_empty() {
            let message = "cache_salt: given with parent; leave it out and give a parent that was hashed with it";
            return Err(Class::InvalidConfig.error(py, message));
        }
        let parent = parent.unwrap_or_else(|| self.0.root(cache_salt));
        let extra_keys = self::extra_keys(py, Class::InvalidBuffer, extra_keys.as_deref())?;
        self.0.hash_blocks(parent, token_ids.as_slice()?, block_size, &extra_keys).or_raise(py)
    }

    /// Returns the class's name without the key. The key is secret, because it allows building prompts with colliding
    /// hashes.
    #[expect(clippy::unused_self, reason = "a Python method has one")]
    fn __repr__(&self) -> &'static str {
        "BlockHasher(hash_key=...)"
    }
}

/// Converts a hash key to its 16 bytes.
pub(crate) fn hash_key_bytes(py: Python<'_>, hash_key: &[u8]) -> PyResult<[u8; 16]> {
    hash_key.try_into().map_err(|_| {
        Class::InvalidConfig.out_of_range(py, "hash_key", format_args!("{} bytes", hash_key.len()), "16 bytes")
    })
}

/// Positions and keys in the form that Python passes.
pub(crate) type ExtraKeys = Vec<(i64, PyBackedBytes)>;

/// Converts extra keys to the core's form. The core checks everything except the sign of a position.
pub(crate) fn extra_keys<'a>(
    py: Python<'_>,
    class: Class,
    extra_keys: Option<&'a [(i64, PyBackedBytes)]>,
) -> PyResult<Vec<ExtraKey<'a>>> {
    let keys = extra_keys.unwrap_or_default().iter();
    keys.map(|(position, key)| Ok(ExtraKey { position: size(py, class, "extra_keys", *position)?, key })).collect()
}
