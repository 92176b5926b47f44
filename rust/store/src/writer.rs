//! The writer: appends records to the newest segment, and deletes the least recently used segments. One process at a
//! time has one, by the folder's lock.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::SystemTime;

use crate::folder::{Folder, make_folder};
use crate::index::{Index, Place, Segment, segment_number, segment_path};
use crate::record::{Keys, Record};

/// Operation on a file that a [`Hook`] can let fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Operation {
    /// A segment is created.
    Create,
    /// This many bytes are appended.
    Append(usize),
    /// A segment is truncated after its last whole record.
    Truncate,
    /// A segment is deleted.
    Remove,
}

/// Function that is asked before each operation, for tests of faults. `Ok` lets it happen. An error fails the
/// operation; of an append, the number of bytes before it still gets into the file.
pub type Hook = Arc<dyn Fn(Operation) -> std::result::Result<(), (usize, io::Error)> + Send + Sync>;

/// Segment that records are appended to.
struct Active {
    number: u64,
    file: Arc<File>,
    end: u64,
}

/// State of the process that writes.
pub(crate) struct Writer {
    folder: Folder,
    namespace: PathBuf,
    keys: Keys,
    max_bytes: u64,
    segment_bytes: u64,
    hook: Option<Hook>,
    /// Number of bytes of all segments of all namespaces.
    total: u64,
    active: Option<Active>,
    next_number: u64,
    /// Keeps other processes from writing.
    _lock: File,
}

/// Outcome of an append.
pub(crate) enum Appended {
    Written,
    /// A record that is as good is there already.
    Known,
}

impl Writer {
    /// Begins to write: reads what other processes wrote, and cuts off the record that a killed process left torn.
    /// Returns the number of errors, too.
    pub(crate) fn begin(
        folder: &Folder,
        namespace: &Path,
        keys: Keys,
        (max_bytes, segment_bytes): (u64, u64),
        hook: Option<Hook>,
        locked: File,
        index: &Mutex<Index>,
    ) -> (Self, u64) {
        let mut writer = Self {
            folder: folder.clone(),
            namespace: namespace.to_path_buf(),
            keys,
            max_bytes,
            segment_bytes,
            hook,
            total: 0,
            active: None,
            next_number: 1,
            _lock: locked,
        };
        let mut scanned = lock(index);
        let mut errors = scanned.refresh(folder, namespace, &keys);
        let numbers = writer.segments().into_iter().filter_map(|segment| segment.number);
        writer.next_number = numbers.max().map_or(1, |newest| newest + 1);
        if let Some((&number, segment)) = scanned.segments.last_key_value()
            && number + 1 == writer.next_number
        {
            let cut = writer.ask(Operation::Truncate).and_then(|()| segment.file.set_len(segment.end));
            match cut {
                Ok(()) => {
                    writer.active = Some(Active { number, file: Arc::clone(&segment.file), end: segment.end });
                }
                Err(_) => errors += 1, // a new segment follows
            }
        }
        writer.total = writer.segments().iter().map(|segment| segment.bytes).sum();
        drop(scanned);
        errors += writer.make_room(0, index).map_or(1, |()| 0);
        (writer, errors)
    }

    /// Appends a record and adds it to the index. After an error the index has no new record, and what was written is
    /// cut off again. If that fails, too, nothing more is written to this segment.
    pub(crate) fn append(&mut self, mut record: Record, index: &Mutex<Index>) -> io::Result<Appended> {
        let known = lock(index).places.get(&record.key).map(|place| place.kind);
        if known.is_some_and(|kind| kind >= record.kind && !record.replaces) {
            return Ok(Appended::Known);
        }
        let len = record.len() as u64;
        if len > self.max_bytes {
            return Err(io::ErrorKind::FileTooLarge.into());
        }
        if let Some(full) = self.active.take_if(|active| active.end > 0 && active.end + len > self.segment_bytes) {
            // Reads set finer times than writes do, and would make older segments look newer.
            let _ = full.file.set_modified(SystemTime::now());
        }
        self.make_room(len, index)?;
        if self.active.is_none() {
            self.create(index)?;
        }
        let Some(Active { number, file, end }) = self.active.as_ref() else { return Err(io::ErrorKind::Other.into()) };
        let (number, file, offset) = (*number, Arc::clone(file), *end);
        let (key, kind) = (record.key, record.kind);
        let bytes = record.seal(&self.keys);
        if let Err(error) = self.write(&file, bytes, offset) {
            if self.ask(Operation::Truncate).and_then(|()| file.set_len(offset)).is_err() {
                // What is torn stays at the end of this segment, and nothing more is written to it.
                self.total += file.metadata().map_or(len, |status| status.len().saturating_sub(offset));
                self.active = None;
            }
            return Err(error);
        }
        self.total += len;
        if let Some(active) = &mut self.active {
            active.end += len;
        }
        let mut index = lock(index);
        if let Some(segment) = index.segments.get_mut(&number) {
            segment.end = offset + len;
            index.add(key, Place { segment: number, offset, len: len as usize, kind });
        }
        Ok(Appended::Written)
    }

    fn write(&self, file: &File, bytes: &[u8], offset: u64) -> io::Result<()> {
        if let Some(hook) = &self.hook
            && let Err((written, error)) = hook(Operation::Append(bytes.len()))
        {
            file.write_all_at(&bytes[..written.min(bytes.len())], offset)?;
            return Err(error);
        }
        file.write_all_at(bytes, offset)
    }

    fn ask(&self, operation: Operation) -> io::Result<()> {
        self.hook.as_ref().map_or(Ok(()), |hook| hook(operation).map_err(|(_, error)| error))
    }

    /// Begins a new segment.
    fn create(&mut self, index: &Mutex<Index>) -> io::Result<()> {
        let number = self.next_number;
        self.next_number += 1;
        self.ask(Operation::Create)?;
        make_folder(&self.namespace)?;
        let path = segment_path(&self.namespace, number);
        let file = Arc::new(File::options().create_new(true).read(true).write(true).mode(0o600).open(path)?);
        lock(index).segments.insert(number, Segment { file: Arc::clone(&file), end: 0 });
        self.active = Some(Active { number, file, end: 0 });
        Ok(())
    }

    /// Deletes the least recently used segments, except the one being written, until `len` more bytes are within the
    /// limit.
    fn make_room(&mut self, len: u64, index: &Mutex<Index>) -> io::Result<()> {
        if self.total + len <= self.max_bytes {
            return Ok(());
        }
        let mut segments = self.segments();
        segments.sort_by_key(|segment| (segment.used, segment.number));
        self.total = segments.iter().map(|segment| segment.bytes).sum();
        for segment in segments {
            if self.total + len <= self.max_bytes {
                return Ok(());
            }
            let own = segment.number.filter(|_| segment.path.parent() == Some(&*self.namespace));
            if own.is_some() && own == self.active.as_ref().map(|active| active.number) {
                continue;
            }
            self.ask(Operation::Remove)?;
            fs::remove_file(&segment.path)?;
            self.total -= segment.bytes;
            match own {
                Some(number) => lock(index).forget(number),
                None => drop(segment.path.parent().map(fs::remove_dir)), // that of other settings, if it is empty
            }
        }
        if self.total + len <= self.max_bytes { Ok(()) } else { Err(io::ErrorKind::StorageFull.into()) }
    }

    /// Lists the segments of all namespaces.
    fn segments(&self) -> Vec<Listed> {
        let namespaces = fs::read_dir(&self.folder.root).into_iter().flatten().flatten().map(|entry| entry.path());
        let folders = namespaces.filter(|path| path.is_dir());
        let files = folders.flat_map(|path| fs::read_dir(path).into_iter().flatten().flatten());
        files.filter_map(|entry| self.listed(entry.path())).collect()
    }

    fn listed(&self, path: PathBuf) -> Option<Listed> {
        let number = segment_number(&path)?;
        let status = fs::symlink_metadata(&path).ok()?;
        let used = status.modified().ok()?;
        let number = (path.parent() == Some(&*self.namespace)).then_some(number);
        Some(Listed { number, bytes: status.len(), used, path })
    }
}

/// Segment of any namespace.
struct Listed {
    path: PathBuf,
    /// Number of the segment if it is in the writer's namespace.
    number: Option<u64>,
    bytes: u64,
    used: SystemTime,
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
