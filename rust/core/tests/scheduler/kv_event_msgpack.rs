//! Tests of KV events as routers read them: a mirror that knows only the payloads has exactly the cached blocks.

use std::collections::{BTreeMap, HashSet};

use specrs_core::{BlockHasher, ExtraKey, KvEvent, SchedulerConfig, encode_kv_events};

use crate::common::driver::{Ask, Driver};
use crate::{ask, small, speculative};

/// A value of `MessagePack`, of the kinds that payloads have.
#[derive(Clone, Debug, PartialEq)]
enum Value {
    Nil,
    Float(f64),
    Uint(u64),
    Text(String),
    Binary(Vec<u8>),
    Array(Vec<Value>),
    Map(BTreeMap<String, Value>),
}

/// Reader by the table of formats in the `MessagePack` specification; it panics on formats that payloads do not have.
struct Reader<'a>(&'a [u8]);

impl Reader<'_> {
    fn take(&mut self, count: usize) -> &[u8] {
        let (taken, rest) = self.0.split_at(count);
        self.0 = rest;
        taken
    }

    fn number(&mut self, width: usize) -> u64 {
        self.take(width).iter().fold(0, |value, &byte| value << 8 | u64::from(byte))
    }

    fn value(&mut self) -> Value {
        let first = self.take(1)[0];
        let low = |mask: u8| usize::from(first & mask);
        match first {
            0x00..=0x7f => Value::Uint(first.into()),
            0x80..=0x8f => self.map(low(0x0f)),
            0x90..=0x9f => self.array(low(0x0f)),
            0xa0..=0xbf => self.text(low(0x1f)),
            0xc0 => Value::Nil,
            0xc4..=0xc6 => {
                let len = self.number(1 << (first - 0xc4)) as usize;
                Value::Binary(self.take(len).to_vec())
            }
            0xcb => Value::Float(f64::from_bits(self.number(8))),
            0xcc..=0xcf => Value::Uint(self.number(1 << (first - 0xcc))),
            0xd9..=0xdb => {
                let len = self.number(1 << (first - 0xd9)) as usize;
                self.text(len)
            }
            0xdc..=0xdd => {
                let len = self.number(2 << (first - 0xdc)) as usize;
                self.array(len)
            }
            other => panic!("{other:#x}"),
        }
    }

    fn text(&mut self, len: usize) -> Value {
        Value::Text(String::from_utf8(self.take(len).to_vec()).unwrap())
    }

    fn array(&mut self, len: usize) -> Value {
        Value::Array((0..len).map(|_| self.value()).collect())
    }

    fn map(&mut self, len: usize) -> Value {
        let entry = |reader: &mut Self| match reader.value() {
            Value::Text(key) => (key, reader.value()),
            other => panic!("a key {other:?}"),
        };
        let map: BTreeMap<_, _> = (0..len).map(|_| entry(self)).collect();
        assert_eq!(map.len(), len, "a key twice");
        Value::Map(map)
    }
}

impl Value {
    fn array(&self) -> &[Value] {
        let Value::Array(values) = self else { panic!("{self:?} is no array") };
        values
    }

    fn uint(&self) -> u64 {
        let Value::Uint(value) = self else { panic!("{self:?} is no number") };
        *value
    }

    fn uints(&self) -> Vec<u64> {
        self.array().iter().map(Value::uint).collect()
    }

    fn text(&self) -> &str {
        let Value::Text(text) = self else { panic!("{self:?} is no text") };
        text
    }

    fn bytes(&self) -> Vec<u8> {
        match self {
            Value::Text(text) => text.as_bytes().to_vec(),
            Value::Binary(bytes) => bytes.clone(),
            other => panic!("{other:?} is no key"),
        }
    }
}

fn text(text: &str) -> Value {
    Value::Text(text.into())
}

/// Returns the events of a payload, and checks that the payload ends with the last one.
fn events_of(payload: &[u8], timestamp: f64, rank: u64) -> Vec<BTreeMap<String, Value>> {
    let mut reader = Reader(payload);
    let batch = reader.value();
    assert!(reader.0.is_empty(), "{} bytes behind the batch", reader.0.len());
    let [stamp, events, of_rank] = batch.array() else { panic!("{batch:?}") };
    assert_eq!((stamp, of_rank), (&Value::Float(timestamp), &Value::Uint(rank)));
    let map = |event: &Value| match event {
        Value::Map(map) => map.clone(),
        other => panic!("an event {other:?}"),
    };
    events.array().iter().map(map).collect()
}

/// Cached blocks according to the payloads.
#[derive(Default)]
struct Mirror {
    cached: HashSet<u64>,
    stored: usize,
    removed: usize,
    cleared: usize,
}

impl Mirror {
    fn follow(&mut self, driver: &mut Driver) {
        let events = driver.scheduler.take_kv_events();
        for event in events_of(&encode_kv_events(&events, 1.5, 3, None), 1.5, 3) {
            match event["type"].text() {
                "BlockStored" => {
                    for hash in event["block_hashes"].uints() {
                        assert!(self.cached.insert(hash), "stored twice");
                        self.stored += 1;
                    }
                }
                "BlockRemoved" => {
                    for hash in event["block_hashes"].uints() {
                        assert!(self.cached.remove(&hash), "removed, and never stored");
                        self.removed += 1;
                    }
                }
                "AllBlocksCleared" => {
                    self.cached.clear();
                    self.cleared += 1;
                }
                other => panic!("{other}"),
            }
        }
        let pool = driver.scheduler.block_pool();
        let registered = (0..pool.num_blocks() as i64).filter(|&block| pool.is_registered(block));
        let truth: HashSet<u64> = registered.map(|block| pool.block_hash(block).unwrap() as u64).collect();
        assert_eq!(self.cached, truth);
    }
}

#[test]
fn a_mirror_holds_what_is_cached_over_10_000_requests() {
    let mut random = 7_u64;
    let mut draw = |below: u64| {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (random >> 33) % below
    };
    let mut id = 0;
    let mut mirror = Mirror::default();
    for round in 0..100 {
        let (max_in_flight, num_blocks) = (1 + round % 3, [20, 33, 64][round % 3]);
        let config = SchedulerConfig { num_blocks, max_in_flight, enable_kv_cache_events: true, ..speculative() };
        let mut driver = Driver::new(config);
        mirror.cached.clear();
        for _ in 0..100 {
            // Few seeds, so that prompts share prefixes; their ends differ.
            let mut one = ask(draw(9), 1 + draw(30) as usize, 1 + draw(12) as usize);
            one.k = draw(4) as usize;
            one.prompt.extend((0..draw(4)).map(|_| draw(50) as i64));
            if draw(5) == 0 {
                one.salt = vec![b's', draw(2) as u8];
            }
            if draw(5) == 0 {
                one.extra_keys = vec![(draw(one.prompt.len() as u64) as usize, vec![draw(2) as u8])];
            }
            driver.add(id, &one).unwrap();
            id += 1;
            for _ in 0..draw(3) {
                driver.step();
                mirror.follow(&mut driver);
            }
            if draw(20) == 0 {
                let aborted = id - 1 - draw(3).min(id as u64 - 1) as i64;
                if driver.scheduler.request(aborted).is_ok() {
                    driver.abort(aborted).unwrap();
                    mirror.follow(&mut driver);
                }
            }
        }
        while driver.step() {
            mirror.follow(&mut driver);
        }
        mirror.follow(&mut driver);
        if round % 4 == 0 {
            assert!(driver.scheduler.reset_prefix_cache());
            mirror.follow(&mut driver);
            assert!(mirror.cached.is_empty());
        }
    }
    assert_eq!((id, mirror.cleared), (10_000, 25));
    assert!(mirror.stored > 10_000 && mirror.removed > 10_000, "{} stored, {} removed", mirror.stored, mirror.removed);
}

#[test]
fn a_payload_says_what_its_events_say() {
    let lengths = [1, 31, 32, 255, 256, 65_535, 65_536];
    let tokens = [0, 127, 128, 255, 256, 65_535, 65_536, (1 << 31) - 1];
    for block_size in [4, 16, 32] {
        let config = SchedulerConfig {
            block_size,
            max_num_batched_tokens: 4096,
            ..SchedulerConfig::new(4, 600, 160, block_size, 64)
        };
        let mut driver = Driver::new(SchedulerConfig { enable_kv_cache_events: true, hash_key: [9; 16], ..config });
        let prompt: Vec<i64> = tokens.iter().cycle().take(550).copied().collect();
        let mut extra_keys: Vec<_> = lengths.iter().enumerate().map(|(i, &len)| (9 * i, vec![b'a'; len])).collect();
        extra_keys.extend(lengths.iter().enumerate().map(|(i, &len)| (100 + 9 * i, vec![0xff; len])));
        let one = Ask { prompt: prompt.clone(), max_tokens: 1, salt: b"tenant".to_vec(), extra_keys, ..Ask::default() };
        driver.add(0, &one).unwrap();
        driver.run();
        let events = driver.scheduler.take_kv_events();
        let mut told = events_of(&encode_kv_events(&events, 2.5, 70_000, None), 2.5, 70_000);
        // Chunks of a prompt that settle apart are events apart, each behind the one before.
        let blocks = 550 / block_size;
        let hasher = BlockHasher::new(&[9; 16]);
        let keys: Vec<_> = one.extra_keys.iter().map(|&(position, ref key)| ExtraKey { position, key }).collect();
        let hashes = hasher.hash_blocks(hasher.root(b"tenant"), &prompt, block_size, &keys).unwrap();
        let low = |hash: u128| Value::Uint(hash as u64);
        let mut start = 0;
        for event in &mut told {
            let stored: Vec<_> = event["block_hashes"].array().to_vec();
            let end = start + stored.len();
            assert_eq!(stored, hashes[start..end].iter().map(|&hash| low(hash)).collect::<Vec<_>>());
            let parent = start.checked_sub(1).map_or(Value::Nil, |before| low(hashes[before]));
            let expected: Vec<_> = (start..end)
                .map(|block| {
                    let range = block * block_size..(block + 1) * block_size;
                    let salt = (block == 0).then(|| b"tenant".to_vec());
                    let keys = one.extra_keys.iter().filter(|(position, _)| range.contains(position));
                    salt.into_iter().chain(keys.map(|(_, key)| key.clone())).collect::<Vec<_>>()
                })
                .collect();
            let found: Vec<Vec<_>> = event["extra_keys"]
                .array()
                .iter()
                .map(|keys| if *keys == Value::Nil { vec![] } else { keys.array().iter().map(Value::bytes).collect() })
                .collect();
            assert_eq!(found, expected);
            let expected_tokens: Vec<u64> =
                prompt[start * block_size..end * block_size].iter().map(|&token| token as u64).collect();
            assert_eq!(event["token_ids"].uints(), expected_tokens);
            for taken in ["block_hashes", "token_ids", "extra_keys"] {
                event.remove(taken);
            }
            let rest = [
                ("type", text("BlockStored")),
                ("parent_block_hash", parent),
                ("block_size", Value::Uint(block_size as u64)),
                ("lora_id", Value::Nil),
                ("medium", text("GPU")),
                ("lora_name", Value::Nil),
                ("group_idx", Value::Uint(0)),
                ("kv_cache_spec_kind", text("full_attention")),
            ];
            assert_eq!(*event, rest.into_iter().map(|(key, value)| (key.to_owned(), value)).collect());
            start = end;
        }
        assert_eq!(start, blocks);
    }
}

#[test]
fn removed_blocks_windows_and_resets_are_reported() {
    let config = SchedulerConfig { num_blocks: 6, max_model_len: 24, ..small() };
    let mut driver = Driver::new(SchedulerConfig { enable_kv_cache_events: true, ..config });
    driver.add(0, &ask(1, 16, 1)).unwrap();
    driver.run();
    let stored = driver.scheduler.take_kv_events();
    let [windowed] = &events_of(&encode_kv_events(&stored, 0.0, 0, Some(300)), 0.0, 0)[..] else { panic!() };
    assert_eq!(windowed["kv_cache_spec_kind"], text("sliding_window"));
    assert_eq!(windowed["kv_cache_spec_sliding_window"], Value::Uint(300));
    driver.add(1, &ask(2, 16, 1)).unwrap();
    driver.run();
    assert!(driver.scheduler.reset_prefix_cache());
    let mut events = driver.scheduler.take_kv_events();
    assert_eq!(events, [KvEvent::AllBlocksCleared], "what was stored before counts no longer");
    for (id, seed) in [(2, 1), (3, 2)] {
        driver.add(id, &ask(seed, 20, 1)).unwrap();
        driver.run();
        events.extend(driver.scheduler.take_kv_events());
    }
    let told = events_of(&encode_kv_events(&events, 0.0, 0, None), 0.0, 0);
    assert_eq!(told[0], [("type".to_owned(), text("AllBlocksCleared"))].into());
    let removed = told.iter().find(|event| event["type"] == text("BlockRemoved")).expect("a full pool evicts");
    assert!(!removed["block_hashes"].array().is_empty());
    let mut keys: Vec<_> = removed.iter().filter(|(key, _)| *key != "block_hashes").collect();
    keys.sort_by_key(|(key, _)| key.as_str());
    let expected = [("group_idx", Value::Uint(0)), ("medium", text("GPU")), ("type", text("BlockRemoved"))];
    assert_eq!(keys.len(), 3);
    for ((key, value), (name, wanted)) in keys.into_iter().zip(expected) {
        assert_eq!((key.as_str(), value), (name, &wanted));
    }
}
