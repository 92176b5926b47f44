//! KV blocks, snapshots of states and outputs of a scheduler on disk: copies between a store's records and KV caches.

use crate::block_pool::hash_key_bytes;
use crate::cpu_kv_cache::CpuKVCache;
use crate::error::{Class, OrRaise, size};
use crate::mutex::lock;
use crate::scheduler::Scheduler;
use pyo3::exceptions::PyOSError;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use specrs_core::{BlockHash, BlockHasher, EndedOutput, Error, Scheduler as Core};
use specrs_cpu::KvCache;
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
/// Kind of a record: a snapshot of the target's states. The detail is the number of positions that they cover.
const SNAPSHOT: u32 = 3;
/// Maximum number of bytes that wait to be written.
const QUEUE_BYTES: usize = 64 << 20;
/// Number of bytes that are read before they are copied, so that they are still in a processor's caches.
const BATCH_BYTES: usize = 4 << 20;

#[pyclass(frozen)]
pub(crate) struct KVStore {
    store: Store,
    /// Bytes of a snapshot of the target's states; 0 if no layer has a state.
    snapshot_bytes: usize,
    /// Memory that records are read into, kept because new memory costs more than the copy.
    buffers: Mutex<Vec<Vec<u8>>>,
    /// Blocks of prompts that were looked for in the store.
    queried: AtomicU64,
    /// Blocks that were copied into the KV cache.
    loaded: AtomicU64,
    /// Snapshots that were copied into the KV cache.
    loaded_snapshots: AtomicU64,
}

/// Blocks and snapshot that a load copies from the store into the caches.
struct Goal {
    /// Index of the request's first block that is not cached.
    first: usize,
    /// Hashes of the blocks to load, from `first` on.
    hashes: Vec<BlockHash>,
    /// Number of blocks before the snapshot to load, and the hash of the last one. `None` if no layer has a state.
    snapshot: Option<(usize, BlockHash)>,
}

/// Why the loading of blocks ended.
#[derive(PartialEq, Eq)]
enum Loaded {
    /// All blocks are cached.
    All,
    /// A record is missing or broken.
    Missing,
    /// Requests hold all blocks of the pool.
    Full,
    /// Time is up.
    Late,
}

#[pymethods]
impl KVStore {
    #[new]
    #[pyo3(signature = (path, namespace, *, max_bytes, segment_bytes, owner, fresh_key, snapshot_bytes = 0))]
    #[expect(clippy::too_many_arguments, reason = "settings, each with a name of its own")]
    fn new(
        py: Python<'_>,
        path: PathBuf,
        namespace: &[u8],
        max_bytes: i64,
        segment_bytes: i64,
        owner: u32,
        fresh_key: &[u8],
        snapshot_bytes: i64,
    ) -> PyResult<Self> {
        let snapshot_bytes = size(py, Class::InvalidConfig, "snapshot_bytes", snapshot_bytes)?;
        let namespace = namespace.try_into().map_err(|_| {
            Class::InvalidConfig.out_of_range(py, "namespace", format_args!("{} bytes", namespace.len()), "32 bytes")
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
        Ok(Self {
            store,
            snapshot_bytes,
            buffers: Mutex::default(),
            queried: AtomicU64::new(0),
            loaded: AtomicU64::new(0),
            loaded_snapshots: AtomicU64::new(0),
        })
    }

    #[getter]
    fn hash_key(&self) -> [u8; 16] {
        self.store.hash_key()
    }

    fn await_load(&self, py: Python<'_>, scheduler: &Scheduler, request_id: i64) -> PyResult<bool> {
        self.store.refresh();
        let mut core = scheduler.core(py);
        let (cached, missing) = core.missing_prefix(request_id).or_raise(py)?;
        self.queried.fetch_add(missing.len() as u64, Ordering::Relaxed);
        let stored = self.store.run_len(&missing);
        let is_there = if self.snapshot_bytes > 0 {
            core.note_stored(request_id, cached + stored).or_raise(py)?;
            self.goal(&mut core, request_id).or_raise(py)?.is_some()
        } else {
            stored > 0
        };
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
        let end = deadline(ms);
        loop {
            let goal = match self.goal(&mut scheduler.core(py), request_id) {
                Err(Error::UnknownRequest { .. }) => return Ok(true), // it has ended
                goal => goal.or_raise(py)?,
            };
            let Some(goal) = goal else { break };
            let loaded = self.load_blocks(py, scheduler, request_id, &goal, (target, draft), end)?;
            if loaded == Loaded::Late {
                return Ok(false);
            }
            let Some(snapshot) = goal.snapshot else { break };
            // Without a snapshot or its KV, an earlier one may do.
            match loaded {
                Loaded::All if self.load_snapshot(py, scheduler, request_id, snapshot, target)? => break,
                Loaded::Full => break,
                _ => {}
            }
        }
        scheduler.core(py).end_load(request_id);
        Ok(true)
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
            let Some(due) = core.take_due_block() else { return self.save_snapshots(&mut core, &target, end) };
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
        dict.set_item("loaded_snapshots", self.loaded_snapshots.load(Ordering::Relaxed))?;
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
    /// Returns what to copy in for a request. With states these are the blocks and the snapshot of the longest prefix hit
    /// that memory and disk make together; `None` if the disk makes it no longer.
    fn goal(&self, core: &mut Core, request_id: i64) -> specrs_core::Result<Option<Goal>> {
        let (first, mut hashes) = core.missing_prefix(request_id)?;
        if self.snapshot_bytes == 0 {
            return Ok(Some(Goal { first, hashes, snapshot: None }));
        }
        let known = first + self.store.run_len(&hashes);
        let (hit, ends) = core.missing_snapshots(request_id)?;
        let is_stored = |&hash: &BlockHash| self.store.has(snapshot_key(hash), SNAPSHOT);
        let Some(last) = ends[..known - hit].iter().rposition(is_stored) else { return Ok(None) };
        let num_blocks = hit + last + 1;
        hashes.truncate(num_blocks.saturating_sub(first));
        Ok(Some(Goal { first, hashes, snapshot: Some((num_blocks, ends[last])) }))
    }

    /// Copies the blocks of `goal` from the store into the KV caches, until one is missing or `end` has passed.
    fn load_blocks(
        &self,
        py: Python<'_>,
        scheduler: &Scheduler,
        request_id: i64,
        goal: &Goal,
        (target, draft): (&CpuKVCache, Option<&CpuKVCache>),
        end: Option<Instant>,
    ) -> PyResult<Loaded> {
        let sizes = (lock(&target.0).block_bytes(), draft.map_or(0, |draft| lock(&draft.0).block_bytes()));
        let mut at = 0;
        let mut buffers = std::mem::take(&mut *lock(&self.buffers));
        let loaded = loop {
            let (found, is_last) = py.detach(|| self.read(&goal.hashes[at..], sizes, end, &mut buffers));
            let drafts: Vec<_> =
                found.iter().map(|&(kind, detail)| (kind == TARGET_AND_DRAFT).then_some(detail)).collect();
            let adopted = scheduler.core(py).adopt(request_id, goal.first + at, &drafts).or_raise(py)?;
            let num_adopted = adopted.len();
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
            if num_adopted < found.len() {
                break Loaded::Full;
            }
            if is_last {
                break if at == goal.hashes.len() { Loaded::All } else { Loaded::Missing };
            }
            if end.is_some_and(|end| Instant::now() >= end) {
                break Loaded::Late;
            }
        };
        *lock(&self.buffers) = buffers;
        Ok(loaded)
    }

    /// Copies the snapshot after `num_blocks` blocks, the last of which has this hash, into the cache. Returns false if
    /// its record is missing or broken. Returns true without a copy if the scheduler gives no slot for it.
    fn load_snapshot(
        &self,
        py: Python<'_>,
        scheduler: &Scheduler,
        request_id: i64,
        (num_blocks, hash): (usize, BlockHash),
        target: &CpuKVCache,
    ) -> PyResult<bool> {
        let (len, key) = (num_blocks * scheduler.core(py).config().block_size, snapshot_key(hash));
        let mut bytes = Vec::new();
        let Some((kind, detail)) = py.detach(|| self.store.get(key, &mut bytes)) else { return Ok(false) };
        let payload = &bytes[HEADER_BYTES..];
        if (kind, detail as usize, payload.len()) != (SNAPSHOT, len, self.snapshot_bytes) {
            self.store.discard(key);
            return Ok(false);
        }
        if let Some(slot) = scheduler.core(py).adopt_snapshot(request_id, num_blocks).or_raise(py)? {
            lock(&target.0).fill_snapshot(slot as usize, len, payload);
            self.loaded_snapshots.fetch_add(1, Ordering::Relaxed);
        }
        Ok(true)
    }

    /// Copies due snapshots to the queue of the thread that writes, until `end` has passed or the queue is full.
    /// Returns whether no due snapshot is left.
    fn save_snapshots(&self, core: &mut Core, target: &KvCache, end: Option<Instant>) -> bool {
        while self.store.room() >= self.snapshot_bytes.min(QUEUE_BYTES) {
            let Some(due) = core.take_due_snapshot() else { return true };
            let key = snapshot_key(due.hash);
            if !self.store.has(key, SNAPSHOT) {
                let mut record = Record::new(key, SNAPSHOT, due.len as u32, false, self.snapshot_bytes);
                target.append_snapshot(due.slot as usize, record.payload_mut());
                self.store.put(record);
            }
            if end.is_some_and(|end| Instant::now() >= end) {
                break;
            }
        }
        false
    }

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

/// Returns the key of the snapshot at the end of the block with this hash.
fn snapshot_key(hash: BlockHash) -> u128 {
    BlockHasher::new(b"state snapshots.").chain(hash, &[])
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
