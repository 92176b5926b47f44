//! Index of a namespace: where each record is. Built from headers; writes nothing.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustc_hash::FxBuildHasher;

use crate::folder::Folder;
use crate::record::{HEADER_BYTES, Header, Keys};

/// Place of a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) segment: u64,
    pub(crate) offset: u64,
    /// Number of bytes, header included.
    pub(crate) len: usize,
    pub(crate) kind: u32,
}

/// Segment file whose record headers were read.
#[derive(Clone, Debug)]
pub(crate) struct Segment {
    pub(crate) file: Arc<File>,
    /// Number of bytes of whole records at the start.
    pub(crate) end: u64,
}

/// Records of a namespace, by key.
#[derive(Debug, Default)]
pub(crate) struct Index {
    pub(crate) places: HashMap<u128, Place, FxBuildHasher>,
    pub(crate) segments: BTreeMap<u64, Segment>,
    /// Files that were refused, so that each counts as one error.
    refused: HashSet<u64>,
}

/// Returns the path of segment `number` in the folder of a namespace.
pub(crate) fn segment_path(namespace: &Path, number: u64) -> PathBuf {
    namespace.join(format!("{number:010}.kv"))
}

/// Returns the number of a segment by its file name; `None` for other files.
pub(crate) fn segment_number(path: &Path) -> Option<u64> {
    let digits = path.file_name()?.to_str()?.strip_suffix(".kv")?;
    (digits.len() == 10).then(|| digits.parse().ok())?
}

impl Index {
    /// Reads the headers that were written since the last call, and forgets segments that were deleted. Returns the
    /// number of files that could not be used, without those that an earlier call has counted.
    pub(crate) fn refresh(&mut self, folder: &Folder, namespace: &Path, keys: &Keys) -> u64 {
        let mut errors = 0;
        let mut found: Vec<u64> = match fs::read_dir(namespace) {
            Ok(entries) => entries.flatten().filter_map(|entry| segment_number(&entry.path())).collect(),
            Err(_) => Vec::new(),
        };
        found.sort_unstable();
        let gone: Vec<u64> =
            self.segments.keys().copied().filter(|number| found.binary_search(number).is_err()).collect();
        for number in gone {
            self.forget(number);
        }
        for number in found {
            if self.scan(number, folder, namespace, keys).is_err() {
                errors += u64::from(self.refused.insert(number));
            }
        }
        errors
    }

    /// Removes a segment and its records.
    pub(crate) fn forget(&mut self, number: u64) {
        if self.segments.remove(&number).is_some() {
            self.places.retain(|_, place| place.segment != number);
        }
    }

    /// Adds a record, in place of an earlier one with the same key.
    pub(crate) fn add(&mut self, key: u128, place: Place) {
        self.places.insert(key, place);
    }

    fn scan(&mut self, number: u64, folder: &Folder, namespace: &Path, keys: &Keys) -> io::Result<()> {
        let segment = match self.segments.entry(number) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(unknown) => {
                let path = segment_path(namespace, number);
                if !folder.trusts(&path) {
                    return Err(io::ErrorKind::PermissionDenied.into());
                }
                let file = Arc::new(File::options().read(true).write(true).open(&path)?);
                unknown.insert(Segment { file, end: 0 })
            }
        };
        let len = segment.file.metadata()?.len();
        let mut header = [0; HEADER_BYTES];
        while segment.end + HEADER_BYTES as u64 <= len {
            segment.file.read_exact_at(&mut header, segment.end)?;
            let Some(Header { key, kind, payload_len, .. }) = Header::decode(&header, keys) else { break };
            let Some(end) = (segment.end + HEADER_BYTES as u64).checked_add(payload_len) else { break };
            if end > len {
                break;
            }
            let place = Place { segment: number, offset: segment.end, len: (end - segment.end) as usize, kind };
            self.places.insert(key, place);
            segment.end = end;
        }
        Ok(())
    }
}
