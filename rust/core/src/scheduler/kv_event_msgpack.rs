//! Encoding of KV events for routers: one batch in vLLM's format, in `MessagePack`. Sends nothing.
//!
//! A batch is the array `[timestamp, events, data_parallel_rank]`; an event is a map whose key `type` names it. Hashes
//! are the lower 64 bits of a block's hash. That is vLLM's default, and it fits an integer of `MessagePack`.

use super::kv_events::KvEvent;
use crate::hash::BlockHash;

/// Encodes events as one batch.
///
/// `timestamp` is in seconds since 1970. `sliding_window` is the setting of the scheduler that stored the blocks. An
/// extra key is a string if it is UTF-8 and binary otherwise; the same holds for the cache salt of a first block. Like
/// vLLM, it leaves out the offset of an extra key. Snapshots of states are in group 1, of the kind `mamba`, which is
/// vLLM's word for layers with states.
pub fn encode_kv_events(
    events: &[KvEvent],
    timestamp: f64,
    data_parallel_rank: u32,
    sliding_window: Option<usize>,
) -> Vec<u8> {
    let mut out = Writer::default();
    out.array(3);
    out.float(timestamp);
    out.array(events.len());
    for event in events {
        out.event(event, sliding_window);
    }
    out.uint(data_parallel_rank.into());
    out.bytes
}

/// Writer of `MessagePack`, as far as events need it: the shortest form of each value.
#[derive(Default)]
struct Writer {
    bytes: Vec<u8>,
}

impl Writer {
    fn event(&mut self, event: &KvEvent, sliding_window: Option<usize>) {
        match event {
            KvEvent::BlockStored {
                block_hashes,
                parent_block_hash,
                token_ids,
                extra_keys,
                cache_salt,
                lora,
                is_snapshot,
                ..
            } => {
                self.map(11 + usize::from(sliding_window.is_some()));
                self.entry("type").string("BlockStored");
                self.entry("block_hashes").hashes(block_hashes);
                self.entry("parent_block_hash");
                match parent_block_hash {
                    Some(hash) => self.hash(*hash),
                    None => self.nil(),
                }
                self.entry("token_ids").array(token_ids.len());
                for &token in token_ids {
                    self.uint(token.into());
                }
                self.entry("block_size").uint((token_ids.len() / block_hashes.len().max(1)) as u64);
                self.entry("lora_id");
                match lora {
                    Some(lora) => self.uint(lora.id.into()),
                    None => self.nil(),
                }
                self.entry("medium").string("GPU");
                self.entry("lora_name");
                match lora {
                    Some(lora) => self.string(&lora.name),
                    None => self.nil(),
                }
                self.entry("extra_keys").array(extra_keys.len());
                for (i, keys) in extra_keys.iter().enumerate() {
                    let salt = (i == 0 && !cache_salt.is_empty()).then_some(cache_salt);
                    self.keys(salt.into_iter().chain(keys.iter().map(|(_, key)| key)));
                }
                self.entry("group_idx").uint(u64::from(*is_snapshot));
                let kind = match (is_snapshot, sliding_window) {
                    (true, _) => "mamba",
                    (false, Some(_)) => "sliding_window",
                    (false, None) => "full_attention",
                };
                self.entry("kv_cache_spec_kind").string(kind);
                if let Some(window) = sliding_window {
                    self.entry("kv_cache_spec_sliding_window").uint(window as u64);
                }
            }
            KvEvent::BlockRemoved { block_hashes, is_snapshot, .. } => {
                self.map(4);
                self.entry("type").string("BlockRemoved");
                self.entry("block_hashes").hashes(block_hashes);
                self.entry("medium").string("GPU");
                self.entry("group_idx").uint(u64::from(*is_snapshot));
            }
            KvEvent::AllBlocksCleared => {
                self.map(1);
                self.entry("type").string("AllBlocksCleared");
            }
        }
    }

    fn hashes(&mut self, hashes: &[BlockHash]) {
        self.array(hashes.len());
        for &hash in hashes {
            self.hash(hash);
        }
    }

    fn hash(&mut self, hash: BlockHash) {
        self.uint(hash as u64);
    }

    fn keys<'a>(&mut self, keys: impl Iterator<Item = &'a Box<[u8]>> + Clone) {
        match keys.clone().count() {
            0 => self.nil(),
            count => self.array(count),
        }
        for key in keys {
            if let Ok(text) = std::str::from_utf8(key) {
                self.string(text);
            } else {
                self.length(key.len(), None, Some(0xc4), 0xc5);
                self.bytes.extend_from_slice(key);
            }
        }
    }

    /// Writes a key of a map; its value must follow.
    fn entry(&mut self, key: &str) -> &mut Self {
        self.string(key);
        self
    }

    fn nil(&mut self) {
        self.bytes.push(0xc0);
    }

    fn float(&mut self, value: f64) {
        self.bytes.push(0xcb);
        self.bytes.extend_from_slice(&value.to_be_bytes());
    }

    fn uint(&mut self, value: u64) {
        match value {
            0..=0x7f => self.bytes.push(value as u8),
            0x80..=0xff => self.bytes.extend_from_slice(&[0xcc, value as u8]),
            0x100..=0xffff => {
                self.bytes.push(0xcd);
                self.bytes.extend_from_slice(&(value as u16).to_be_bytes());
            }
            0x1_0000..=0xffff_ffff => {
                self.bytes.push(0xce);
                self.bytes.extend_from_slice(&(value as u32).to_be_bytes());
            }
            _ => {
                self.bytes.push(0xcf);
                self.bytes.extend_from_slice(&value.to_be_bytes());
            }
        }
    }

    fn string(&mut self, text: &str) {
        self.length(text.len(), Some((0xa0, 31)), Some(0xd9), 0xda);
        self.bytes.extend_from_slice(text.as_bytes());
    }

    fn array(&mut self, len: usize) {
        self.length(len, Some((0x90, 15)), None, 0xdc);
    }

    fn map(&mut self, len: usize) {
        self.length(len, Some((0x80, 15)), None, 0xde);
    }

    /// Writes a length in the shortest of its forms. `fixed` is the form within the first byte: the byte for 0 and the
    /// maximum length. `one` and `two` are the first bytes of the forms with one and two more bytes; that of four more
    /// bytes is `two + 1`.
    fn length(&mut self, len: usize, fixed: Option<(u8, usize)>, one: Option<u8>, two: u8) {
        match (fixed, one) {
            (Some((first, most)), _) if len <= most => self.bytes.push(first | len as u8),
            (_, Some(first)) if len <= 0xff => self.bytes.extend_from_slice(&[first, len as u8]),
            _ if len <= 0xffff => {
                self.bytes.push(two);
                self.bytes.extend_from_slice(&(len as u16).to_be_bytes());
            }
            _ => {
                self.bytes.push(two + 1);
                self.bytes.extend_from_slice(&(len as u32).to_be_bytes());
            }
        }
    }
}
