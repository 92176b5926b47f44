//! The store: look-ups and reads by any thread, and a thread that writes.

use std::collections::VecDeque;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime};

use crate::folder::{Folder, FolderError, Result, make_folder};
use crate::index::Index;
use crate::record::{HEADER_BYTES, Header, Keys, Record};
use crate::writer::{Appended, Hook, Writer};

/// Time between two attempts to become the process that writes.
const LOCK_INTERVAL: Duration = Duration::from_secs(1);
/// Time after which another read counts as another use of the same segment.
const USE_INTERVAL: Duration = Duration::from_secs(1);

/// Settings of a [`Store`].
#[derive(Clone)]
pub struct Settings {
    /// Folder of the store, which is made with mode 0700 if it is missing.
    pub root: PathBuf,
    /// Digest of everything that records depend on besides their key.
    pub namespace: [u8; 32],
    /// Maximum number of bytes of all segments, those of other namespaces included.
    pub max_bytes: u64,
    /// Number of bytes after which a new segment begins.
    pub segment_bytes: u64,
    /// Number of bytes of records that may wait to be written.
    pub queue_bytes: usize,
    /// Id of the user whom folder and files must belong to.
    pub owner: u32,
    /// Random key for a folder that has none.
    pub fresh_key: [u8; 16],
    /// Faults for tests.
    pub hook: Option<Hook>,
}

/// Counters of a [`Store`] since it was opened, and its present size.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Stats {
    /// Records that were read.
    pub reads: u64,
    /// Bytes of payload that were read.
    pub read_bytes: u64,
    /// Records that were written.
    pub writes: u64,
    /// Bytes that were written, headers included.
    pub written_bytes: u64,
    /// Records that could not be read or written, and files that could not be used.
    pub errors: u64,
    /// Records in the index.
    pub records: u64,
    /// Whether this process writes.
    pub is_writer: bool,
}

#[derive(Default)]
struct Counters {
    reads: AtomicU64,
    read_bytes: AtomicU64,
    writes: AtomicU64,
    written_bytes: AtomicU64,
    errors: AtomicU64,
}

#[derive(Default)]
struct Queue {
    records: VecDeque<Record>,
    bytes: usize,
    /// Whether to try to become the process that writes.
    wants_lock: bool,
    is_busy: bool,
    is_closing: bool,
}

struct Shared {
    settings: Settings,
    folder: Folder,
    namespace: PathBuf,
    keys: Keys,
    index: Mutex<Index>,
    queue: Mutex<Queue>,
    changed: Condvar,
    counters: Counters,
    is_writer: AtomicBool,
    last_error: Mutex<Option<String>>,
}

/// Records of one namespace.
pub struct Store {
    shared: Arc<Shared>,
    hash_key: [u8; 16],
    thread: Mutex<Option<JoinHandle<()>>>,
    asked_for_lock: Mutex<Instant>,
    /// Segment that was used last, and when.
    used: Mutex<Option<(u64, Instant)>>,
}

impl Store {
    /// Opens a store and reads the headers of its records. Writes from now on if no other process does.
    ///
    /// # Errors
    /// [`FolderError`] if the folder cannot be made or must not be used.
    pub fn open(settings: Settings) -> Result<Self> {
        let folder = Folder::open(settings.root.clone(), settings.owner)?;
        let lock = folder.try_lock()?;
        let hash_key = folder.key(settings.fresh_key, lock.is_some())?;
        let mut name = [0; 16];
        name.copy_from_slice(&settings.namespace[..16]);
        let namespace = folder.root.join(format!("{:032x}", u128::from_be_bytes(name)));
        make_folder(&namespace).map_err(|error| FolderError::io(&namespace, error))?;
        let shared = Arc::new(Shared {
            keys: Keys::new(&settings.namespace),
            folder,
            namespace,
            settings,
            index: Mutex::default(),
            queue: Mutex::default(),
            changed: Condvar::new(),
            counters: Counters::default(),
            is_writer: AtomicBool::new(false),
            last_error: Mutex::default(),
        });
        let writer = lock.map(|lock| shared.begin(lock));
        if writer.is_none() {
            shared.refresh();
        }
        let own = Arc::clone(&shared);
        let thread = std::thread::Builder::new()
            .name("specrs-kv-store".into())
            .spawn(move || own.run(writer))
            .map_err(|error| FolderError::io(&shared.folder.root, error))?;
        Ok(Self {
            shared,
            hash_key,
            thread: Mutex::new(Some(thread)),
            asked_for_lock: Mutex::new(Instant::now()),
            used: Mutex::default(),
        })
    }

    /// Returns the key of block hashes, which all processes with this folder share.
    pub fn hash_key(&self) -> [u8; 16] {
        self.hash_key
    }

    /// Returns how many of the first `keys` have records, without a gap.
    pub fn run_len(&self, keys: &[u128]) -> usize {
        let index = lock(&self.shared.index);
        keys.iter().take_while(|key| index.places.contains_key(key)).count()
    }

    /// Reads what another process has written since the last call. Does nothing in the process that writes.
    pub fn refresh(&self) {
        if !self.shared.is_writer.load(Ordering::Relaxed) {
            self.shared.refresh();
        }
    }

    /// Returns the keys of all records of a kind, in the order in which they were written.
    pub fn keys_of(&self, kind: u32) -> Vec<u128> {
        let index = lock(&self.shared.index);
        let mut found: Vec<_> = index.places.iter().filter(|(_, place)| place.kind == kind).collect();
        found.sort_unstable_by_key(|(_, place)| (place.segment, place.offset));
        found.into_iter().map(|(&key, _)| key).collect()
    }

    /// Reads the record of a key into `bytes`: the header's bytes, then the payload. Returns its kind and detail.
    /// `None` if there is no such record, or it is not whole; it is then forgotten and counted as an error.
    pub fn get(&self, key: u128, bytes: &mut Vec<u8>) -> Option<(u32, u32)> {
        let (place, file) = {
            let index = lock(&self.shared.index);
            let place = *index.places.get(&key)?;
            (place, Arc::clone(&index.segments.get(&place.segment)?.file))
        };
        bytes.resize(place.len, 0);
        let whole = file.read_exact_at(bytes, place.offset).ok().and_then(|()| {
            let header = Header::decode(bytes, &self.shared.keys)?;
            (header.key == key && header.matches(&bytes[HEADER_BYTES..])).then_some(header)
        });
        let Some(Header { kind, detail, .. }) = whole else {
            self.discard(key);
            return None;
        };
        let counters = &self.shared.counters;
        counters.reads.fetch_add(1, Ordering::Relaxed);
        counters.read_bytes.fetch_add((place.len - HEADER_BYTES) as u64, Ordering::Relaxed);
        let mut used = lock(&self.used);
        if used.is_none_or(|(segment, at)| segment != place.segment || at.elapsed() > USE_INTERVAL) {
            *used = Some((place.segment, Instant::now()));
            let _ = file.set_modified(SystemTime::now()); // else it is evicted earlier
        }
        Some((kind, detail))
    }

    /// Forgets a record that cannot be used, and counts an error.
    pub fn discard(&self, key: u128) {
        self.shared.counters.errors.fetch_add(1, Ordering::Relaxed);
        lock(&self.shared.index).places.remove(&key);
    }

    /// Returns whether this process writes. If another process does, tries again from time to time.
    pub fn is_writer(&self) -> bool {
        let is_writer = self.shared.is_writer.load(Ordering::Acquire);
        let mut asked = lock(&self.asked_for_lock);
        if !is_writer && asked.elapsed() > LOCK_INTERVAL {
            *asked = Instant::now();
            self.ask_for_lock();
        }
        is_writer
    }

    /// Tries, in the thread that writes, to become the process that writes.
    pub fn ask_for_lock(&self) {
        lock(&self.shared.queue).wants_lock = true;
        self.shared.changed.notify_all();
    }

    /// Returns how many more bytes may wait to be written.
    pub fn room(&self) -> usize {
        self.shared.settings.queue_bytes.saturating_sub(lock(&self.shared.queue).bytes)
    }

    /// Returns whether a record with this key and this kind or a greater one is in the index, so that a copy is not
    /// worth making.
    pub fn has(&self, key: u128, kind: u32) -> bool {
        lock(&self.shared.index).places.get(&key).is_some_and(|place| place.kind >= kind)
    }

    /// Hands a record to the thread that writes. It is dropped after [`Self::close`], and while another process writes.
    /// A full queue takes it, too: callers look at [`Self::room`] first.
    pub fn put(&self, record: Record) {
        let mut queue = lock(&self.shared.queue);
        if !queue.is_closing {
            queue.bytes += record.len();
            queue.records.push_back(record);
            drop(queue);
            self.shared.changed.notify_all();
        }
    }

    /// Waits until all records handed over so far are written or failed.
    pub fn flush(&self) {
        let mut queue = lock(&self.shared.queue);
        while !queue.records.is_empty() || queue.is_busy || queue.wants_lock {
            queue = self.shared.changed.wait(queue).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Writes all waiting records and ends the thread. May be called twice.
    pub fn close(&self) {
        lock(&self.shared.queue).is_closing = true;
        self.shared.changed.notify_all();
        if let Some(thread) = lock(&self.thread).take() {
            let _ = thread.join();
        }
    }

    /// Returns the counters.
    pub fn stats(&self) -> Stats {
        let Counters { reads, read_bytes, writes, written_bytes, errors } = &self.shared.counters;
        let [reads, read_bytes, writes, written_bytes, errors] =
            [reads, read_bytes, writes, written_bytes, errors].map(|counter| counter.load(Ordering::Relaxed));
        let records = lock(&self.shared.index).places.len() as u64;
        let is_writer = self.shared.is_writer.load(Ordering::Relaxed);
        Stats { reads, read_bytes, writes, written_bytes, errors, records, is_writer }
    }

    /// Takes the last error of a write.
    pub fn take_error(&self) -> Option<String> {
        lock(&self.shared.last_error).take()
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        self.close();
    }
}

impl Shared {
    fn begin(&self, file: std::fs::File) -> Writer {
        let limits = (self.settings.max_bytes, self.settings.segment_bytes);
        let hook = self.settings.hook.clone();
        let (writer, errors) = Writer::begin(&self.folder, &self.namespace, self.keys, limits, hook, file, &self.index);
        self.counters.errors.fetch_add(errors, Ordering::Relaxed);
        self.is_writer.store(true, Ordering::Release);
        writer
    }

    fn refresh(&self) {
        let errors = lock(&self.index).refresh(&self.folder, &self.namespace, &self.keys);
        self.counters.errors.fetch_add(errors, Ordering::Relaxed);
    }

    /// Runs the thread that writes, until the store is closed and nothing waits.
    fn run(&self, mut writer: Option<Writer>) {
        loop {
            let mut queue = lock(&self.queue);
            queue.is_busy = false;
            self.changed.notify_all();
            while queue.records.is_empty() && !queue.wants_lock && !queue.is_closing {
                queue = self.changed.wait(queue).unwrap_or_else(PoisonError::into_inner);
            }
            if queue.records.is_empty() && queue.is_closing {
                return;
            }
            queue.is_busy = true;
            let wants_lock = std::mem::take(&mut queue.wants_lock);
            let record = queue.records.pop_front();
            drop(queue);
            if wants_lock && writer.is_none() {
                writer = self.folder.try_lock().ok().flatten().map(|file| self.begin(file));
            }
            let Some(record) = record else { continue };
            let len = record.len();
            let outcome = match &mut writer {
                Some(writer) => writer.append(record, &self.index),
                None => Ok(Appended::Known), // another process writes
            };
            match outcome {
                Ok(Appended::Written) => {
                    self.counters.writes.fetch_add(1, Ordering::Relaxed);
                    self.counters.written_bytes.fetch_add(len as u64, Ordering::Relaxed);
                }
                Ok(Appended::Known) => {}
                Err(error) => self.failed(&error),
            }
            lock(&self.queue).bytes -= len;
        }
    }

    fn failed(&self, error: &io::Error) {
        self.counters.errors.fetch_add(1, Ordering::Relaxed);
        *lock(&self.last_error) = Some(format!("{}: {error}", self.namespace.display()));
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
