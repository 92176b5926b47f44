//! KV events for Python: one class for each kind, with lists and arrays of its blocks, or all of a step as one payload.

use numpy::{PyArray1, ToPyArray};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList};
use specrs_core::{KvEvent, KvEventBatch, Lora, encode_kv_events};

#[pyclass(frozen)]
pub(crate) struct BlockStored {
    blocks: Vec<i64>,
    block_hashes: Vec<u128>,
    parent_block_hash: Option<u128>,
    token_ids: Vec<i64>,
    extra_keys: Vec<Vec<(usize, Box<[u8]>)>>,
    cache_salt: Box<[u8]>,
    lora: Option<Lora>,
    is_snapshot: bool,
}

#[pymethods]
impl BlockStored {
    #[getter]
    fn blocks(&self) -> Vec<i64> {
        self.blocks.clone()
    }

    #[getter]
    fn block_hashes(&self) -> Vec<u128> {
        self.block_hashes.clone()
    }

    #[getter]
    fn parent_block_hash(&self) -> Option<u128> {
        self.parent_block_hash
    }

    #[getter]
    fn token_ids<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<i64>> {
        self.token_ids.to_pyarray(py)
    }

    #[getter]
    fn block_size(&self) -> usize {
        self.token_ids.len() / self.blocks.len()
    }

    #[getter]
    fn extra_keys<'py>(&self, py: Python<'py>) -> Vec<Vec<(usize, Bound<'py, PyBytes>)>> {
        let keys = |keys: &Vec<(usize, Box<[u8]>)>| {
            keys.iter().map(|(offset, key)| (*offset, PyBytes::new(py, key))).collect()
        };
        self.extra_keys.iter().map(keys).collect()
    }

    #[getter]
    fn cache_salt<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.cache_salt)
    }

    #[getter]
    fn lora_id(&self) -> Option<u32> {
        self.lora.as_ref().map(|lora| lora.id)
    }

    #[getter]
    fn lora_name(&self) -> Option<&str> {
        self.lora.as_ref().map(|lora| &*lora.name)
    }

    #[getter]
    fn is_snapshot(&self) -> bool {
        self.is_snapshot
    }

    fn __repr__(&self) -> String {
        format!("BlockStored(blocks={:?}, {} tokens)", self.blocks, self.token_ids.len())
    }
}

#[pyclass(frozen)]
pub(crate) struct BlockRemoved {
    blocks: Vec<i64>,
    block_hashes: Vec<u128>,
    has_draft: Vec<bool>,
    is_snapshot: bool,
}

#[pymethods]
impl BlockRemoved {
    #[getter]
    fn blocks(&self) -> Vec<i64> {
        self.blocks.clone()
    }

    #[getter]
    fn block_hashes(&self) -> Vec<u128> {
        self.block_hashes.clone()
    }

    #[getter]
    fn has_draft(&self) -> Vec<bool> {
        self.has_draft.clone()
    }

    #[getter]
    fn is_snapshot(&self) -> bool {
        self.is_snapshot
    }

    fn __repr__(&self) -> String {
        format!("BlockRemoved(blocks={:?})", self.blocks)
    }
}

#[pyclass(frozen)]
pub(crate) struct AllBlocksCleared;

#[pymethods]
impl AllBlocksCleared {
    #[expect(clippy::unused_self, reason = "a Python method has one")]
    fn __repr__(&self) -> &'static str {
        "AllBlocksCleared()"
    }
}

/// Batch of KV events that were not converted to Python objects yet.
#[pyclass(frozen)]
pub(crate) struct KVEventBatch {
    pub(crate) batch: KvEventBatch,
    pub(crate) sliding_window: Option<usize>,
}

#[pymethods]
impl KVEventBatch {
    #[pyo3(signature = (timestamp, data_parallel_rank=0))]
    fn msgpack<'py>(&self, py: Python<'py>, timestamp: f64, data_parallel_rank: u32) -> Bound<'py, PyBytes> {
        let encode = || encode_kv_events(&self.batch.to_events(), timestamp, data_parallel_rank, self.sliding_window);
        PyBytes::new(py, &py.detach(encode))
    }

    fn events<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        to_list(py, self.batch.to_events())
    }

    #[expect(clippy::unused_self, reason = "a Python method has one")]
    fn __repr__(&self) -> &'static str {
        "KVEventBatch()"
    }
}

/// Converts events of the core to a list of Python objects.
pub(crate) fn to_list(py: Python<'_>, events: Vec<KvEvent>) -> PyResult<Bound<'_, PyList>> {
    let list = PyList::empty(py);
    for event in events {
        match event {
            KvEvent::BlockStored {
                blocks,
                block_hashes,
                parent_block_hash,
                token_ids,
                extra_keys,
                cache_salt,
                lora,
                is_snapshot,
                ..
            } => {
                let token_ids = token_ids.into_iter().map(i64::from).collect();
                let stored = BlockStored {
                    blocks,
                    block_hashes,
                    parent_block_hash,
                    token_ids,
                    extra_keys,
                    cache_salt,
                    lora,
                    is_snapshot,
                };
                list.append(Bound::new(py, stored)?)?;
            }
            KvEvent::BlockRemoved { blocks, block_hashes, has_draft, is_snapshot, .. } => {
                list.append(Bound::new(py, BlockRemoved { blocks, block_hashes, has_draft, is_snapshot })?)?;
            }
            KvEvent::AllBlocksCleared => list.append(Bound::new(py, AllBlocksCleared)?)?,
            other => unreachable!("{other:?} has no class here"),
        }
    }
    Ok(list)
}
