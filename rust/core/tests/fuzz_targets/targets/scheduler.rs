//! Fuzz target for the scheduler: any settings and requests, any order of calls, and possible and impossible results of
//! a device. Its state agrees after every call, rejected calls change nothing, and in the end everything is free.

use super::bytes::Bytes;
use specrs_core::sampling::MAX_STOP_IDS;
use specrs_core::scheduler::layout::{
    FINISH_LENGTH, FINISH_NONE, FINISH_STOP, FLAG_TARGET_NON_FINITE, HEADER_NUM_ADMITTED, HEADER_NUM_DECODE,
    HEADER_NUM_PREFILL, HEADER_STEP_ID,
};
use specrs_core::{
    Drafter, ExtraKey, KvEvent, Lora, PlanOutcome, RequestParams, RequestSampling, Scheduler, SchedulerConfig,
};
use std::collections::{HashMap, VecDeque};

/// Sequence of a step: row, K, and whether it emits.
type Sequence = (usize, usize, bool);

/// Row of the device.
#[derive(Clone, Default)]
struct Row {
    /// Number of tokens of the row.
    n: usize,
    /// Number of tokens that the row may still emit.
    left: usize,
    /// Stop tokens of the row.
    stops: Vec<i64>,
    /// Position from which the stop tokens count.
    min_len: i64,
}

struct Run {
    scheduler: Scheduler,
    record: Vec<i64>,
    results: Vec<i64>,
    settled: Vec<i64>,
    in_flight: VecDeque<(u64, Vec<Sequence>)>,
    rows: Vec<Row>,
    /// Block under each hash that is cached according to KV events.
    cached: HashMap<u128, i64>,
}

pub fn scheduler(data: &[u8]) {
    let mut bytes = Bytes(data);
    let block_size = bytes.below(6);
    let max_model_len = 2 + bytes.below(60);
    let mut config = SchedulerConfig::new(
        bytes.below(5),
        max_model_len,
        max_model_len.div_ceil(block_size.max(1)) + bytes.below(20),
        block_size,
        bytes.below(40),
    );
    config.num_speculative_tokens = bytes.below(6);
    if bytes.byte() % 4 > 0 {
        config.drafter = Drafter::Cached {
            max_model_len: 1 + bytes.below(80),
            max_draft_lag: 1 + bytes.below(3),
            mask_token_id: if bytes.below(4) == 0 { Some(0) } else { None },
            cost_ratio: f64::from(bytes.byte()) / 64.0,
        };
    }
    config.max_in_flight = 1 + bytes.below(3);
    config.max_loras = bytes.below(3);
    config.enable_prefix_caching = bytes.byte() % 4 > 0;
    config.enable_kv_cache_events = bytes.byte() % 2 > 0;
    config.sliding_window = (bytes.byte() % 3 == 0).then(|| 2 + bytes.below(12));
    if bytes.byte() % 3 == 0 {
        config.window_groups = (0..bytes.below(3)).map(|_| 1 + bytes.below(12)).collect();
        config.enable_kv_cache_events &= bytes.byte() % 8 == 0;
        config.num_blocks *= config.num_groups();
    }
    let Ok(scheduler) = Scheduler::new(config) else { return };
    let mut run = Run {
        record: vec![0; scheduler.record_layout().size],
        results: vec![0; scheduler.results_layout().size],
        settled: vec![0; scheduler.settled_layout().size],
        in_flight: VecDeque::new(),
        rows: vec![Row::default(); scheduler.config().max_num_seqs],
        cached: HashMap::new(),
        scheduler,
    };
    while !bytes.is_empty() {
        match bytes.byte() % 16 {
            0..=3 => run.add(&mut bytes),
            4..=8 => _ = run.plan(),
            9..=12 => run.settle(&mut bytes),
            13 => _ = run.scheduler.abort(bytes.number()),
            14 => _ = run.scheduler.preempt(bytes.number()),
            _ => _ = run.scheduler.reset_prefix_cache(),
        }
        run.scheduler.check_integrity().expect("integrity");
        run.follow(&mut bytes);
    }
    run.drain();
}

impl Run {
    fn add(&mut self, bytes: &mut Bytes<'_>) {
        let (id, len) = (bytes.number(), bytes.below(40));
        // Two alphabets, so that prefixes are shared.
        let letters = 1 + i64::from(bytes.byte() % 2) * 30;
        let mut prompt: Vec<i64> = (0..len as i64).map(|i| i % letters).collect();
        if bytes.byte() == 0 {
            prompt.push(bytes.number());
        }
        let key = |position| ExtraKey { position, key: b"key" };
        let extra_keys = [key(bytes.below(12)), key(bytes.below(40))];
        let stop = [bytes.number(), 3];
        let loras = [1, 2].map(|id| Lora { id, name: "adapter".into() });
        let params = RequestParams {
            limit: if bytes.byte() == 0 { bytes.word() as usize } else { prompt.len() + 1 + bytes.below(40) },
            min_tokens: if bytes.byte() == 0 { usize::MAX } else { bytes.below(4) },
            num_speculative_tokens: bytes.below(7),
            priority: bytes.number(),
            caller: [None, Some(0), Some(1)][bytes.below(3)],
            stop_token_ids: &stop[..bytes.below(3)],
            sampling: RequestSampling::default(),
            cache_salt: &[0, 1][..bytes.below(2)],
            extra_keys: &extra_keys[..bytes.below(3)],
            lora: [None, loras.first(), loras.last()][bytes.below(3)],
            prediction: if bytes.byte().is_multiple_of(2) { &prompt } else { &[] },
        };
        let before = (self.scheduler.num_waiting(), self.scheduler.num_running());
        if self.scheduler.add_request(id, &prompt, &params).is_err() {
            assert_eq!(before, (self.scheduler.num_waiting(), self.scheduler.num_running()));
        }
    }

    /// Takes the KV events now and then. Checks that they never name more than is cached, and that requests can be
    /// viewed.
    fn follow(&mut self, bytes: &mut Bytes<'_>) {
        for id in self.scheduler.request_ids().collect::<Vec<_>>() {
            let view = self.scheduler.request(id).expect("a live request");
            assert!(view.num_computed_tokens < view.limit && view.num_draft_computed_tokens < view.limit);
            let held = |&block: &i64| block < 0 || self.scheduler.block_pool().ref_count(block) > Some(0);
            for group in 0..self.scheduler.config().num_groups() {
                assert!(self.scheduler.group_block_table(id, group).expect("a live request").iter().all(held));
            }
        }
        if bytes.byte().is_multiple_of(8) {
            return;
        }
        for event in self.scheduler.take_kv_events() {
            match event {
                KvEvent::BlockStored { blocks, block_hashes, .. } => {
                    self.cached.extend(block_hashes.into_iter().zip(blocks));
                }
                KvEvent::BlockRemoved { block_hashes, .. } => {
                    for hash in block_hashes {
                        self.cached.remove(&hash);
                    }
                }
                KvEvent::AllBlocksCleared => self.cached.clear(),
                _ => unreachable!("another event"),
            }
        }
        for (&hash, &block) in &self.cached {
            assert_eq!(self.scheduler.block_pool().lookup(hash), Some(block));
        }
    }

    fn plan(&mut self) -> bool {
        if !matches!(self.scheduler.plan(&mut self.record), Ok(PlanOutcome::Step(_))) {
            return false;
        }
        let layout = *self.scheduler.record_layout();
        let decode = self.record[HEADER_NUM_DECODE] as usize;
        for i in 0..self.record[HEADER_NUM_ADMITTED] as usize {
            let at = |offset: usize| self.record[offset + i];
            let n = at(layout.admit_num_tokens.offset) as usize;
            let stops = &self.record[layout.admit_stop_ids.offset + i * MAX_STOP_IDS..][..MAX_STOP_IDS];
            self.rows[at(layout.admit_row.offset) as usize] = Row {
                n,
                left: at(layout.admit_limit.offset) as usize - n,
                stops: stops.iter().copied().filter(|&id| id >= 0).collect(),
                min_len: at(layout.admit_min_len.offset),
            };
        }
        let sequences = (0..decode + self.record[HEADER_NUM_PREFILL] as usize).map(|i| {
            let last = i < decode || self.record[layout.chunk_is_last.offset + i - decode] == 1;
            let (row, k) = (self.record[layout.seq_row.offset + i], self.record[layout.seq_k.offset + i]);
            (row as usize, k as usize, last)
        });
        self.in_flight.push_back((self.record[HEADER_STEP_ID] as u64, sequences.collect()));
        true
    }

    /// Settles the oldest step with results that a device can produce, sometimes after impossible results.
    fn settle(&mut self, bytes: &mut Bytes<'_>) {
        let Some((step_id, sequences)) = self.in_flight.pop_front() else {
            return assert!(self.scheduler.settle(bytes.word(), &self.results, &mut self.settled).is_err());
        };
        self.results.fill(0);
        let layout = *self.scheduler.results_layout();
        let width = self.scheduler.config().num_speculative_tokens + 1;
        for (i, &(row, k, emits)) in sequences.iter().enumerate() {
            let row = &mut self.rows[row];
            let drafted = k.min(row.left.saturating_sub(1));
            let accepted = bytes.below(drafted + 1);
            let most = if emits && row.left > 0 { accepted + 1 } else { 0 };
            let (mut emitted, mut finish_reason) = (0, FINISH_NONE);
            while emitted < most && finish_reason == FINISH_NONE {
                let token = i64::from(bytes.byte() % 40);
                self.results[layout.tokens.offset + i * width + emitted] = token;
                let stops = row.n as i64 >= row.min_len && row.stops.contains(&token);
                (row.n, row.left, emitted) = (row.n + 1, row.left - 1, emitted + 1);
                if stops || row.left == 0 {
                    (row.left, finish_reason) = (0, if stops { FINISH_STOP } else { FINISH_LENGTH });
                }
            }
            self.results[layout.finish_reason.offset + i] = finish_reason;
            self.results[layout.num_emitted.offset + i] = emitted as i64;
            self.results[layout.num_accepted.offset + i] = accepted as i64;
            self.results[layout.num_drafted.offset + i] = drafted as i64;
            self.results[layout.flags.offset + i] = if bytes.byte() == 0 { bytes.number() & 15 } else { 0 };
        }
        if bytes.byte().is_multiple_of(4) {
            let wrong = bytes.below(self.results.len());
            let kept = std::mem::replace(&mut self.results[wrong], bytes.number());
            if self.scheduler.settle(step_id, &self.results, &mut self.settled).is_ok() {
                return;
            }
            self.scheduler.check_integrity().expect("integrity after a refused settle");
            self.results[wrong] = kept;
            assert!(self.scheduler.settle(step_id + 1, &self.results, &mut self.settled).is_err());
        }
        if self.scheduler.settle(step_id, &self.results, &mut self.settled).is_err() {
            // A row that went on although an earlier step was told of fewer tokens: only a fault is true of it now.
            self.results.fill(0);
            self.results[layout.flags.range()].fill(FLAG_TARGET_NON_FINITE);
            self.scheduler.settle(step_id, &self.results, &mut self.settled).expect("a fault can always be");
        }
    }

    /// Ends all requests and checks that every block is free.
    fn drain(&mut self) {
        for id in -4..256 {
            _ = self.scheduler.abort(id);
        }
        while !self.in_flight.is_empty() {
            self.settle(&mut Bytes(&[1; 4096]));
        }
        // Ids beyond the small ones.
        while self.scheduler.has_unfinished() {
            let planned = self.plan();
            self.scheduler.check_integrity().expect("integrity");
            assert!(planned || !self.in_flight.is_empty(), "requests, but nothing to do");
            if !self.in_flight.is_empty() {
                self.settle(&mut Bytes(&[1; 4096]));
            }
        }
        assert_eq!(self.scheduler.num_free_blocks(), self.scheduler.num_blocks());
        assert!(self.scheduler.reset_prefix_cache());
        self.scheduler.check_integrity().expect("integrity");
    }
}
