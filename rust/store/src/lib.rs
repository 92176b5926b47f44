//! Records in a folder that survive restarts: an append-only log in segments, found by key, within a limit of bytes.
//! Knows neither models nor KV blocks.
//!
//! ```text
//! ROOT/lock               locked by the process that writes; all others read
//! ROOT/key                random key of the block hashes, with a checksum
//! ROOT/NAMESPACE/N.kv     segment N: records one after another
//! ```
//!
//! *Namespaces.* Records of different settings lie in different folders. Every checksum depends on the namespace, so a
//! file that was moved from another folder is not read as valid.
//!
//! *Writing.* One thread appends whole records; no other thread waits for the disk. A record is valid once all its bytes are
//! there. A process that is killed leaves at most one torn record, at the end of the newest segment. The next writer
//! cuts it off. No step needs a sync: a checksum tells whether the bytes of a record reached the disk.
//!
//! *Reading.* The index in memory is built from the headers. A read checks the whole record again. A record that fails
//! counts as an error and is forgotten.
//!
//! *Eviction.* Whole segments are deleted, the least recently used of all namespaces first. A segment was used when it
//! was last written or read, which its modification time says.

#![forbid(unsafe_code)]
#![deny(missing_docs)]

mod folder;
mod index;
mod record;
mod store;
mod writer;

pub use folder::{FolderError, Result};
pub use record::{HEADER_BYTES, Record};
pub use store::{Settings, Stats, Store};
pub use writer::{Hook, Operation};
