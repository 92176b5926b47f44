//! KV blocks and outputs of a scheduler on disk: copies between a store's records and KV caches.

use crate::block_pool::hash_key_bytes;
use crate::cpu::{CpuKVCache, lock};
use crate::error::{Class, OrRaise, size};
use crate::scheduler::Scheduler;
use pyo3::exceptions::PyOSError;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use specrs_core::{BlockHasher, EndedOutput, Error};
use specrs_store::{FolderError, HEADER_BYTES, Record, Settings, Store};
use std::path::PathBuf;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Kind of a record: the target's KV of a block.
const TARGET: u32 = 0;
/// Kind of a record: the KV of target and draft of a block. The detail is the token after the block for which the
/// draft's is valid.
const TARGET_AND_DRAFT: u32 = 1;
/// Kind of a record: the output of a request, after the hash of its cache salt.
const OUTPUT: u32 = 2;
/// Maximum number of bytes that wait to be written.
const QUEUE_BYTES: usize = 64 << 20;
/// Number of bytes that are read before they are copied, so that they are still in a processor's caches.
const BATCH_BYTES: usize = 4 << 20;

#[pyclass(frozen)]
pub(crate) struct KVStore {
    store: Store,
    /// Memory that records are read into, kept because new memory costs more than the copy.
    buffers: Mutex<Vec<Vec<u8>>>,
    /// Blocks of prompts that were looked for in the store.
    queried: AtomicU64,
    /// Blocks that were copied into the KV cache.
    loaded: AtomicU64,
}

#[pymethods]
impl KVStore {
    #[new]
    #[pyo3(signature = (path, namespace, *, max_bytes, segment_bytes, owner, fresh_key))]
    fn new(
        py: Python<'_>,
        path: PathBuf,
        namespace: &[u8],
        max_bytes: i64,
        segment_bytes: i64,
        owner: u32,
        fresh_key: &[u8],
    ) -> PyResult<Self> {
        let namespace = namespace.try_into().map_err(|_| {
            let message = format!("namespace has {} bytes, which is not allowed: expected 32", namespace.len());
            Class::InvalidConfig.error(py, message)
        })?;
        let settings = Settings {
            root: path,
            namespace,
            max_bytes: size(py, Class::InvalidConfig, "max_bytes", max_bytes)? as u64,
            segment_bytes: size(py, Class::InvalidConfig, "segment_bytes", segment_bytes)? as u64,
            queue_bytes: QUEUE_BYTES,
            owner,
            fresh_key: hash_key_bytes(py, fresh_key)?,
            hook: None,
        };
        let store = py.detach(|| Store::open(settings)).map_err(|error| match &error {
            FolderError::Io { error: fault, .. } => {
                PyOSError::new_err((fault.raw_os_error().unwrap_or_default(), error.to_string()))
            }
            _ => Class::InvalidConfig.error(py, error.to_string()),
        })?;
        Ok(Self { store, buffers: Mutex::default(), queried: AtomicU64::new(0), loaded: AtomicU64::new(0) })
    }

    #[getter]
    fn hash_key(&self) -> [u8; 16] {
        self.store.hash_key()
    }

    fn await_load(&self, py: Python<'_>, scheduler: &Scheduler, request_id: i64) -> PyResult<bool> {
        self.store.refresh();
        let mut core = scheduler.core(py);
        let (_, missing) = core.missing_prefix(request_id).or_raise(py)?;
        self.queried.fetch_add(missing.len() as u64, Ordering::Relaxed);
        let is_there = self.store.run_len(&missing) > 0;
        if is_there {
            core.await_load(request_id).or_raise(py)?;
        }
        Ok(is_there)
    }

    #[pyo3(signature = (scheduler, request_id, target, draft = None, *, ms = f64::INFINITY))]
    fn load(
        &self,
        py: Python<'_>,
        scheduler: &Scheduler,
        request_id: i64,
        target: &CpuKVCache,
        draft: Option<&CpuKVCache>,
        ms: f64,
    ) -> PyResult<bool> {
        let missing = scheduler.core(py).missing_prefix(request_id);
        let (first, hashes) = match missing {
            Err(Error::UnknownRequest { .. }) => return Ok(true), // it has ended
            missing => missing.or_raise(py)?,
        };
        let sizes = (lock(&target.0).block_bytes(), draft.map_or(0, |draft| lock(&draft.0).block_bytes()));
        let end = deadline(ms);
        let (mut at, mut is_done) = (0, false);
        let mut buffers = std::mem::take(&mut *lock(&self.buffers));
        while !is_done {
            let (found, is_last) = py.detach(|| self.read(&hashes[at..], sizes, end, &mut buffers));
            let drafts: Vec<_> =
                found.iter().map(|&(kind, detail)| (kind == TARGET_AND_DRAFT).then_some(detail)).collect();
            let adopted = scheduler.core(py).adopt(request_id, first + at, &drafts).or_raise(py)?;
            is_done = is_last || adopted.len() < found.len();
            at += found.len();
            let (mut target, mut draft) = (lock(&target.0), draft.map(|draft| lock(&draft.0)));
            for ((&(kind, _), bytes), block) in found.iter().zip(&buffers).zip(adopted) {
                let Some(block) = block else { continue };
                let (of_target, of_draft) = bytes[HEADER_BYTES..].split_at(sizes.0);
                target.fill_block(block as usize, of_target);
                if let Some(draft) = draft.as_mut().filter(|_| kind == TARGET_AND_DRAFT) {
                    draft.fill_block(block as usize, of_draft);
                }
                self.loaded.fetch_add(1, Ordering::Relaxed);
            }
            if end.is_some_and(|end| Instant::now() >= end) {
                break;
            }
        }
        *lock(&self.buffers) = buffers;
        if is_done {
            scheduler.core(py).end_load(request_id);
        }
        Ok(is_done)
    }

    #[pyo3(signature = (scheduler, target, draft = None, *, ms = f64::INFINITY))]
    fn save(
        &self,
        py: Python<'_>,
        scheduler: &Scheduler,
        target: &CpuKVCache,
        draft: Option<&CpuKVCache>,
        ms: f64,
    ) -> bool {
        if !self.store.is_writer() {
            return false;
        }
        let end = deadline(ms);
        let mut core = scheduler.core(py);
        let (target, draft) = (lock(&target.0), draft.map(|draft| lock(&draft.0)));
        let capacity = target.block_bytes() + draft.as_ref().map_or(0, |draft| draft.block_bytes());
        while let Some(output) = core.take_ended_output() {
            self.store.put(record_of(&output));
        }
        while self.store.room() >= capacity.min(QUEUE_BYTES) {
            let Some(due) = core.take_due_block() else { return true };
            let of_draft = draft.as_ref().zip(due.draft);
            let (kind, detail) = of_draft.as_ref().map_or((TARGET, 0), |&(_, next)| (TARGET_AND_DRAFT, next));
            if due.replaces || !self.store.has(due.hash, kind) {
                let mut record = Record::new(due.hash, kind, detail, due.replaces, capacity);
                target.append_block(due.block as usize, record.payload_mut());
                if let Some((draft, _)) = of_draft {
                    draft.append_block(due.block as usize, record.payload_mut());
                }
                self.store.put(record);
            }
            if end.is_some_and(|end| Instant::now() >= end) {
                break;
            }
        }
        false
    }

    fn restore_outputs(&self, py: Python<'_>, scheduler: &Scheduler) {
        let mut bytes = Vec::new();
        for key in self.store.keys_of(OUTPUT) {
            if self.store.get(key, &mut bytes).is_none() {
                continue;
            }
            match output_of(&bytes[HEADER_BYTES..]) {
                Some((salt, token_ids)) => scheduler.core(py).restore_output(salt, &token_ids),
                None => self.store.discard(key),
            }
        }
    }

    fn ask_for_lock(&self) {
        self.store.ask_for_lock();
    }

    fn flush(&self, py: Python<'_>) {
        py.detach(|| self.store.flush());
    }

    fn close(&self, py: Python<'_>) {
        py.detach(|| self.store.close());
    }

    fn take_error(&self) -> Option<String> {
        self.store.take_error()
    }

    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let stats = self.store.stats();
        let dict = PyDict::new(py);
        dict.set_item("queried_blocks", self.queried.load(Ordering::Relaxed))?;
        dict.set_item("loaded_blocks", self.loaded.load(Ordering::Relaxed))?;
        dict.set_item("read_bytes", stats.read_bytes)?;
        dict.set_item("writes", stats.writes)?;
        dict.set_item("written_bytes", stats.written_bytes)?;
        dict.set_item("errors", stats.errors)?;
        dict.set_item("records", stats.records)?;
        dict.set_item("is_writer", stats.is_writer)?;
        Ok(dict)
    }

    fn __repr__(&self) -> String {
        let stats = self.store.stats();
        format!("KVStore(records={}, is_writer={})", stats.records, if stats.is_writer { "True" } else { "False" })
    }
}

impl KVStore {
    /// Reads blocks into the first of `buffers` until one is missing or broken, `end` has passed, or they are a batch.
    /// Returns kind and detail of each, and whether there are no more.
    fn read(
        &self,
        hashes: &[u128],
        (target, draft): (usize, usize),
        end: Option<Instant>,
        buffers: &mut Vec<Vec<u8>>,
    ) -> (Vec<(u32, u32)>, bool) {
        let (mut found, mut num_bytes) = (Vec::new(), 0);
        for &hash in hashes {
            if num_bytes >= BATCH_BYTES || !found.is_empty() && end.is_some_and(|end| Instant::now() >= end) {
                return (found, false);
            }
            if buffers.len() == found.len() {
                buffers.push(Vec::new());
            }
            let bytes = &mut buffers[found.len()];
            let Some((kind, detail)) = self.store.get(hash, bytes) else { break };
            let expected = match kind {
                TARGET => target,
                TARGET_AND_DRAFT if draft > 0 => target + draft,
                _ => usize::MAX,
            };
            if bytes.len() - HEADER_BYTES != expected {
                self.store.discard(hash);
                break;
            }
            num_bytes += bytes.len();
            found.push((kind, detail));
        }
        (found, true)
    }
}

/// Time at which work of `ms` milliseconds ends; `None` if it has no bound.
fn deadline(ms: f64) -> Option<Instant> {
    Duration::try_from_secs_f64(ms.max(0.0) / 1e3).ok().and_then(|time| Instant::now().checked_add(time))
}

/// Makes the record of an output. Equal outputs with equal salts have one record.
fn record_of(output: &EndedOutput) -> Record {
    let tokens: Vec<i64> = output.token_ids.iter().copied().map(i64::from).collect();
    let key = BlockHasher::new(b"outputs in a log").chain(output.salt, &tokens);
    let mut record = Record::new(key, OUTPUT, 0, false, 16 + 4 * tokens.len());
    record.payload_mut().extend_from_slice(&output.salt.to_le_bytes());
    record.payload_mut().extend(output.token_ids.iter().flat_map(|token| token.to_le_bytes()));
    record
}

/// Reads the payload of an output's record: the hash of the cache salt, and the tokens.
fn output_of(payload: &[u8]) -> Option<(u128, Vec<u32>)> {
    let (salt, tokens) = payload.split_first_chunk::<16>()?;
    let (tokens, rest) = tokens.as_chunks::<4>();
    let tokens = tokens.iter().map(|bytes| u32::from_le_bytes(*bytes)).collect();
    rest.is_empty().then(|| (u128::from_le_bytes(*salt), tokens))
}
