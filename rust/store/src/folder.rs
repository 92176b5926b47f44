//! The folder: who may use it, its lock, and its key. Reads no records.

use std::fs::{self, DirBuilder, File, OpenOptions, TryLockError};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use thiserror::Error;

use crate::record::Keys;

/// Shorthand for results of this crate.
pub type Result<T> = std::result::Result<T, FolderError>;

/// Reason why a folder cannot be used.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum FolderError {
    /// The folder must not be used as it is.
    #[error("{path} {reason}")]
    Refused {
        /// The folder or file.
        path: String,
        /// Fault of the folder, and how to fix it.
        reason: String,
    },
    /// The system refused an operation.
    #[error("{path}: {error}")]
    Io {
        /// The folder or file.
        path: String,
        /// Error of the system.
        error: io::Error,
    },
}

impl FolderError {
    pub(crate) fn io(path: &Path, error: io::Error) -> Self {
        Self::Io { path: path.display().to_string(), error }
    }
}

/// Number of bytes of the key file: the key, then its checksum.
const KEY_FILE_BYTES: usize = 24;
/// Attempts to read a key that another process is about to write, 10 ms apart.
const KEY_ATTEMPTS: usize = 300;

/// Folder of the cache that passed the checks.
#[derive(Clone, Debug)]
pub(crate) struct Folder {
    pub(crate) root: PathBuf,
    /// User id that folder and files must have.
    pub(crate) owner: u32,
}

impl Folder {
    /// Opens the folder, or makes it with mode 0700.
    pub(crate) fn open(root: PathBuf, owner: u32) -> Result<Self> {
        make_folder(&root).map_err(|error| FolderError::io(&root, error))?;
        let status = fs::metadata(&root).map_err(|error| FolderError::io(&root, error))?;
        let refused = |reason: String| Err(FolderError::Refused { path: root.display().to_string(), reason });
        if !status.is_dir() {
            return refused("is not a folder; name another path".into());
        }
        if status.uid() != owner {
            let reason =
                format!("belongs to user {}, not to user {owner} who runs specrs; name another path", status.uid());
            return refused(reason);
        }
        if status.permissions().mode() & 0o077 != 0 {
            let mode = status.permissions().mode() & 0o777;
            return refused(format!("has mode {mode:o}, so that other users can use it; run chmod 700 on it"));
        }
        Ok(Self { root, owner })
    }

    /// Returns whether a file may be read: a plain file of the owner that no other user can write or read.
    pub(crate) fn trusts(&self, path: &Path) -> bool {
        fs::symlink_metadata(path).is_ok_and(|status| {
            let others = status.permissions().mode() & 0o077;
            status.is_file() && status.uid() == self.owner && others == 0
        })
    }

    /// Takes the writer's lock. Returns the locked file, or `None` while another process has it.
    pub(crate) fn try_lock(&self) -> Result<Option<File>> {
        let path = self.root.join("lock");
        let open = || OpenOptions::new().create(true).truncate(false).write(true).mode(0o600).open(&path);
        let file = open().map_err(|error| FolderError::io(&path, error))?;
        match file.try_lock() {
            Ok(()) => Ok(Some(file)),
            Err(TryLockError::WouldBlock) => Ok(None),
            Err(TryLockError::Error(error)) => Err(FolderError::io(&path, error)),
        }
    }

    /// Returns the folder's key. If there is none, or a torn one, the process with the lock writes `fresh`, and others
    /// wait for it for up to 3 seconds.
    pub(crate) fn key(&self, fresh: [u8; 16], has_lock: bool) -> Result<[u8; 16]> {
        let path = self.root.join("key");
        let attempts = if has_lock { 1 } else { KEY_ATTEMPTS };
        for attempt in 0..attempts {
            if attempt > 0 {
                std::thread::sleep(Duration::from_millis(10));
            }
            if let Some(key) = self.read_key(&path) {
                return Ok(key);
            }
        }
        if !has_lock {
            let reason = "holds no key that can be read; end the process that writes there, or name another path";
            return Err(FolderError::Refused { path: path.display().to_string(), reason: reason.into() });
        }
        let new = self.root.join("key.new");
        let write = || {
            let _ = fs::remove_file(&new); // of a process that was killed
            let mut file = OpenOptions::new().create_new(true).write(true).mode(0o600).open(&new)?;
            file.write_all(&[&fresh[..], &key_sum(&fresh)].concat())?;
            file.sync_all()?;
            fs::rename(&new, &path)
        };
        write().map_err(|error| FolderError::io(&path, error))?;
        Ok(fresh)
    }

    fn read_key(&self, path: &Path) -> Option<[u8; 16]> {
        if !self.trusts(path) {
            return None;
        }
        let mut bytes = Vec::new();
        File::open(path).ok()?.take(KEY_FILE_BYTES as u64 + 1).read_to_end(&mut bytes).ok()?;
        let key = *bytes.first_chunk::<16>()?;
        (bytes.len() == KEY_FILE_BYTES && bytes[16..] == key_sum(&key)).then_some(key)
    }
}

/// Makes a folder with mode 0700, with its parents, unless it is there.
pub(crate) fn make_folder(path: &Path) -> io::Result<()> {
    if path.exists() {
        return Ok(());
    }
    DirBuilder::new().recursive(true).mode(0o700).create(path)
}

fn key_sum(key: &[u8; 16]) -> [u8; 8] {
    Keys::new(b"checksum of the key of a folder.").sum(key).to_le_bytes()
}
