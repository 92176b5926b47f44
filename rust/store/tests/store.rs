//! Tests of the store on real files: restarts, several processes, broken and foreign files, limits, faults at every
//! operation.

use std::fs::{self, File, Permissions};
use std::io;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, SystemTime};

use specrs_store::{HEADER_BYTES, Hook, Operation, Record, Settings, Store};

/// Folder that is deleted with its content at the end.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        static COUNT: AtomicUsize = AtomicUsize::new(0);
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("specrs-store-{}-{name}-{count}", std::process::id()));
        let _ = fs::remove_dir_all(&path);
        Self(path)
    }

    fn settings(&self) -> Settings {
        Settings {
            root: self.0.clone(),
            namespace: [5; 32],
            max_bytes: 1 << 20,
            segment_bytes: 1 << 18,
            queue_bytes: 1 << 20,
            owner: own_id(),
            fresh_key: [3; 16],
            hook: None,
        }
    }

    fn open(&self) -> Store {
        Store::open(self.settings()).unwrap()
    }

    /// Returns all segments, oldest first.
    fn segments(&self) -> Vec<PathBuf> {
        let mut found: Vec<PathBuf> = (fs::read_dir(&self.0).unwrap().flatten())
            .filter(|entry| entry.path().is_dir())
            .flat_map(|entry| fs::read_dir(entry.path()).unwrap().flatten())
            .map(|entry| entry.path())
            .collect();
        found.sort();
        found
    }

    fn num_bytes(&self) -> u64 {
        self.segments().iter().map(|path| fs::symlink_metadata(path).unwrap().len()).sum()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Returns the id of the user who runs the tests: the owner of a file that was just made.
fn own_id() -> u32 {
    let path = std::env::temp_dir().join(format!("specrs-store-owner-{}", std::process::id()));
    File::create(&path).unwrap().metadata().unwrap().uid()
}

fn payload(key: u128) -> Vec<u8> {
    (0..100 + 37 * (key as usize % 5)).map(|i| (i as u128 * 31 + key * 7) as u8).collect()
}

fn record(key: u128, kind: u32) -> Record {
    let mut record = Record::new(key, kind, key as u32 + 1, false, 0);
    record.payload_mut().extend(payload(key));
    record
}

fn write(store: &Store, keys: impl IntoIterator<Item = u128>) {
    keys.into_iter().for_each(|key| store.put(record(key, 0)));
    store.flush();
}

/// Returns whether the store has a record of `key`. Panics if the record's payload or detail is wrong.
fn has(store: &Store, key: u128) -> bool {
    let mut bytes = Vec::new();
    let found = store.get(key, &mut bytes);
    if let Some((_, detail)) = found {
        assert_eq!(bytes[HEADER_BYTES..], payload(key), "wrong bytes for {key}");
        assert_eq!(detail, key as u32 + 1);
    }
    found.is_some()
}

fn count(store: &Store, keys: std::ops::Range<u128>) -> usize {
    keys.filter(|&key| has(store, key)).count()
}

#[test]
fn records_survive_a_restart() {
    let folder = Folder::new("restart");
    let store = folder.open();
    write(&store, 0..50);
    let key = store.hash_key();
    store.close();
    let store = Store::open(Settings { fresh_key: [9; 16], ..folder.settings() }).unwrap();
    assert_eq!(store.hash_key(), key, "the key of the first process");
    assert_eq!((count(&store, 0..50), has(&store, 50)), (50, false));
    assert_eq!(store.run_len(&[0, 1, 99, 2]), 2);
    assert_eq!(store.stats().errors, 0);
    assert_eq!(folder.segments().len(), 1, "the segment is gone on with");
    write(&store, 50..60);
    assert_eq!((count(&store, 0..60), folder.segments().len()), (60, 1));
}

#[test]
fn folder_and_files_are_the_owners_alone() {
    let folder = Folder::new("modes");
    let store = folder.open();
    write(&store, 0..3);
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!(mode(&folder.0), 0o700);
    for path in folder.segments().iter().chain([&folder.0.join("lock"), &folder.0.join("key")]) {
        assert_eq!(mode(path), 0o600, "{}", path.display());
    }
    store.close();
    fs::set_permissions(&folder.0, Permissions::from_mode(0o750)).unwrap();
    let error = Store::open(folder.settings()).err().unwrap().to_string();
    assert!(error.contains("has mode 750") && error.contains("chmod 700"), "{error}");
    fs::set_permissions(&folder.0, Permissions::from_mode(0o700)).unwrap();
    let owner = folder.settings().owner + 1;
    let error = Store::open(Settings { owner, ..folder.settings() }).err().unwrap().to_string();
    assert!(error.contains(&format!("not to user {owner}")), "{error}");
    let file = Settings { root: folder.segments()[0].clone(), ..folder.settings() };
    assert!(Store::open(file).err().unwrap().to_string().contains("is not a folder"));
}

#[test]
fn one_process_writes_and_others_read() {
    let folder = Folder::new("two");
    let (first, second) = (folder.open(), folder.open());
    assert!(first.is_writer() && !second.is_writer());
    assert_eq!(first.hash_key(), second.hash_key());
    write(&first, 0..10);
    assert!(!has(&second, 0), "not looked for yet");
    second.refresh();
    assert_eq!(count(&second, 0..10), 10);
    write(&second, 10..20);
    assert_eq!(second.stats().writes, 0);
    first.close();
    drop(first);
    second.ask_for_lock();
    second.flush();
    assert!(second.is_writer(), "the other one has ended");
    write(&second, 10..20);
    assert_eq!(count(&second, 0..20), 20);
    assert_eq!(count(&folder.open(), 0..20), 20);
}

#[test]
fn a_torn_segment_gives_its_whole_records() {
    let folder = Folder::new("torn");
    write(&folder.open(), 0..3);
    let path = folder.segments().remove(0);
    let whole = fs::read(&path).unwrap();
    let ends: Vec<usize> = (0..3)
        .map(|key| record(key, 0).len())
        .scan(0, |end, len| Some(std::mem::replace(end, *end + len) + len))
        .collect();
    assert_eq!(whole.len(), ends[2]);
    for len in 0..whole.len() {
        fs::write(&path, &whole[..len]).unwrap();
        let expected = ends.iter().filter(|&&end| end <= len).count();
        let store = folder.open();
        assert_eq!(count(&store, 0..3), expected, "{len} bytes");
        assert_eq!(store.stats().errors, 0, "a torn end is no error");
        write(&store, 0..4);
        assert_eq!(count(&store, 0..4), 4);
        store.close();
        assert_eq!(count(&folder.open(), 0..4), 4, "{len} bytes, then written again");
    }
}

#[test]
fn flipped_bits_are_never_read() {
    let folder = Folder::new("flipped");
    write(&folder.open(), 0..2);
    let path = folder.segments().remove(0);
    let whole = fs::read(&path).unwrap();
    let first = record(0, 0).len();
    for at in 0..whole.len() {
        let mut bytes = whole.clone();
        bytes[at] ^= 1 << (at % 8);
        // Both before the index is built, and after.
        fs::write(&path, &bytes).unwrap();
        let store = folder.open();
        assert_eq!((has(&store, 0), at >= first), (at >= first, at >= first), "byte {at}");
        assert!(!has(&store, 1) || at < first);
        store.close();
        fs::write(&path, &whole).unwrap();
        let store = folder.open();
        fs::write(&path, &bytes).unwrap();
        assert_eq!((has(&store, 0), has(&store, 1)), (at >= first, at < first), "byte {at}");
        assert_eq!(store.stats().errors, 1);
        assert_eq!(store.run_len(&[u128::from(at >= first)]), 0, "it is forgotten");
        store.close();
        fs::write(&path, &whole).unwrap();
    }
}

#[test]
fn foreign_files_are_never_read() {
    let folder = Folder::new("foreign");
    write(&folder.open(), 0..3);
    let other = Settings { namespace: [6; 32], ..folder.settings() };
    let store = Store::open(other.clone()).unwrap();
    assert_eq!(count(&store, 0..3), 0, "records of other settings");
    write(&store, 100..103);
    store.close();
    let (own, foreign) = (folder.segments()[0].clone(), folder.segments()[1].clone());
    let place = |number: u64| own.with_file_name(format!("{number:010}.kv"));
    fs::copy(&foreign, place(2)).unwrap();
    fs::write(place(3), vec![0_u8; 5000]).unwrap();
    fs::set_permissions(place(3), Permissions::from_mode(0o600)).unwrap();
    symlink(&own, place(4)).unwrap();
    fs::create_dir(place(5)).unwrap();
    fs::copy(&own, place(6)).unwrap();
    fs::set_permissions(place(6), Permissions::from_mode(0o644)).unwrap();
    fs::write(own.with_file_name("notes.txt"), "no segment").unwrap();
    let store = folder.open();
    assert_eq!((count(&store, 0..3), count(&store, 100..103)), (3, 0));
    assert_eq!(store.stats().errors, 3, "a link, a folder, a file that others can read");
    write(&store, 3..6);
    assert_eq!(count(&store, 0..6), 6);
    store.close();
    fs::write(folder.0.join("key"), [1_u8; 24]).unwrap();
    let store = folder.open();
    assert_eq!(store.hash_key(), [3; 16], "a broken key is replaced");
}

#[test]
fn the_least_recently_used_segments_go_first() {
    let folder = Folder::new("limit");
    let each = record(0, 0).len() as u64;
    let keys = |range: std::ops::Range<u128>| range.map(|i| 5 * i); // all of one length
    let settings = Settings { max_bytes: 8 * each, segment_bytes: 2 * each, ..folder.settings() };
    let store = Store::open(settings.clone()).unwrap();
    write(&store, keys(0..8));
    assert_eq!(folder.segments().len(), 4);
    // Long ago, so that the clock's resolution does not matter.
    for (i, path) in folder.segments().iter().enumerate() {
        let used = SystemTime::UNIX_EPOCH + Duration::from_secs(1000 + i as u64);
        File::options().write(true).open(path).unwrap().set_modified(used).unwrap();
    }
    assert!(has(&store, 0), "which uses the first segment");
    write(&store, keys(8..9));
    assert_eq!(keys(0..9).filter(|&key| has(&store, key)).collect::<Vec<_>>(), [0, 5, 20, 25, 30, 35, 40]);
    for key in keys(9..60) {
        write(&store, [key]);
        assert!(folder.num_bytes() <= 8 * each, "{} bytes", folder.num_bytes());
    }
    assert!(has(&store, 5 * 59));
    store.close();
    // Segments of other settings count, and go as well.
    let other = Store::open(Settings { namespace: [6; 32], ..settings.clone() }).unwrap();
    write(&other, keys(0..8));
    assert_eq!(keys(0..8).filter(|&key| has(&other, key)).count(), 8);
    assert!(folder.num_bytes() <= 8 * each);
    assert_eq!(other.stats().errors, 0);
    other.close();
    let smaller = Store::open(Settings { max_bytes: 4 * each, ..settings }).unwrap();
    assert!(folder.num_bytes() <= 4 * each, "a smaller limit holds at once");
    smaller.put({
        let mut large = record(1, 0);
        large.payload_mut().resize(5 * each as usize, 0);
        large
    });
    smaller.flush();
    assert_eq!(smaller.stats().errors, 1, "what can never fit is not written");
    assert!(folder.num_bytes() > 0, "and evicts nothing");
}

#[test]
fn better_records_replace_others() {
    let folder = Folder::new("replace");
    let store = folder.open();
    for (kind, replaces, writes) in [(1, false, 1), (0, false, 1), (1, false, 1), (2, false, 2), (0, true, 3)] {
        let mut record = record(7, kind);
        record.replaces = replaces;
        store.put(record);
        store.flush();
        assert_eq!(store.stats().writes, writes);
    }
    assert!(store.has(7, 0) && !store.has(7, 1));
    store.close();
    let store = folder.open();
    assert!(store.has(7, 0) && !store.has(7, 1), "the last one counts");
    assert_eq!((store.keys_of(0), store.keys_of(2)), (vec![7], vec![]));
}

/// Returns a hook that fails operation `n` once, or with `forever` that and all later ones, after `written` bytes of an
/// append. Also returns the number of operations, which the hook counts.
fn failing(n: usize, written: usize, forever: bool) -> (Hook, Arc<AtomicUsize>) {
    let count = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&count);
    let hook = move |operation: Operation| {
        let number = counted.fetch_add(1, Ordering::SeqCst);
        let fails = number == n || forever && number > n;
        let written = if number == n && matches!(operation, Operation::Append(_)) { written } else { 0 };
        if fails { Err((written, io::Error::from_raw_os_error(28))) } else { Ok(()) } // ENOSPC
    };
    (Arc::new(hook), count)
}

/// Lets every operation of a run fail in turn: a full disk, and then a process that is killed there, since nothing that
/// it does later succeeds. What was written before is read, what is read is right, and the files stay within the limit.
#[test]
fn a_fault_at_any_operation_costs_cache_alone() {
    let each = record(0, 0).len() as u64;
    let limits = (6 * each, 2 * each);
    let (_, total) = run(usize::MAX, 0, false, limits);
    assert!(total > 20, "{total} operations");
    for n in 0..total {
        for written in [0, 1, HEADER_BYTES, HEADER_BYTES + 1, each as usize - 1] {
            for forever in [false, true] {
                run(n, written, forever, limits);
            }
        }
    }
}

fn run(n: usize, written: usize, forever: bool, (max_bytes, segment_bytes): (u64, u64)) -> (usize, usize) {
    let folder = Folder::new("fault");
    let settings = Settings { max_bytes, segment_bytes, ..folder.settings() };
    let seed = Store::open(settings.clone()).unwrap();
    write(&seed, [1000]);
    seed.close();
    let (hook, count) = failing(n, written, forever);
    let store = Store::open(Settings { hook: Some(hook), ..settings.clone() }).unwrap();
    let keys: Vec<u128> = (0..14).map(|i| 5 * i).collect();
    let mut indexed = Vec::new();
    for &key in &keys {
        write(&store, [key]);
        indexed.retain(|&known| store.has(known, 0)); // the others were evicted
        if store.has(key, 0) {
            indexed.push(key);
        }
        assert!(folder.num_bytes() <= max_bytes, "operation {n}");
    }
    assert!(indexed.iter().all(|&key| has(&store, key)), "operation {n}");
    let errors = store.stats().errors;
    assert!(n == usize::MAX || errors > 0);
    if !forever {
        assert!(store.stats().writes >= 13, "operation {n}: one fault costs one record");
    }
    store.close();
    let next = Store::open(settings).unwrap();
    assert!(indexed.iter().all(|&key| has(&next, key)), "operation {n}: the next start uses what was whole");
    assert_eq!(next.stats().errors, 0);
    write(&next, (100..103).map(|i| 5 * i));
    assert!((100..103).all(|i| has(&next, 5 * i)));
    assert!(folder.num_bytes() <= max_bytes, "operation {n}");
    (indexed.len(), count.load(Ordering::SeqCst))
}
