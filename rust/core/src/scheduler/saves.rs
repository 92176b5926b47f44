//! Cached blocks that the host keeps elsewhere too, such as on a disk: which blocks to copy out, and prefixes to copy
//! in. Copies no KV itself. Off unless enabled.
//!
//! A block is due when its KV will not get more complete: it got `draft_valid`, or its last holder freed it.
//! Without a drafter that has KV, it is due as soon as it has `target_valid`. A due block that is evicted
//! before the host takes it is lost to the host.
//!
//! A head that reads hidden states writes the KV of a prompt's chunk in the step after the chunk's. Its marks count
//! here once that step has settled.
//!
//! Snapshots of states are copied out and in as well: `snapshot_saves.rs`.
//!
//! A request can wait until the host has copied in blocks of its prompt. The wait begins when the request could
//! otherwise be admitted, so loaded blocks are used immediately.

use std::collections::VecDeque;

use super::kv_events::KvEventLog;
use super::request::Request;
use super::snapshot_pool::Snapshots;
use super::snapshot_saves::DueSnapshots;
use super::{Scheduler, SchedulerConfig};
use crate::block_pool::BlockPool;
use crate::error::{Error, Result};
use crate::hash::BlockHash;

/// Maximum number of outputs that are kept until the host takes them. The oldest are dropped.
const MAX_OUTPUTS: usize = 1024;

/// Cached block to copy out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct DueBlock {
    /// Id of the block.
    pub block: i64,
    /// Hash that the block is found by.
    pub hash: BlockHash,
    /// Token after the block for which its draft KV is valid, `u32::MAX` for any; `None` if its draft KV is not valid.
    pub draft: Option<u32>,
    /// Whether an earlier copy of the block must be replaced, because its draft KV turned out to be broken.
    pub replaces: bool,
}

/// Output of an ended request, for suffix decoding in other processes.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct EndedOutput {
    /// Hash of the request's cache salt. Only requests with the same hash may see the output.
    pub salt: BlockHash,
    /// Tokens of the output.
    pub token_ids: Vec<u32>,
}

/// Part of a block's KV that the host has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Saved {
    #[default]
    Nothing,
    Target,
    TargetAndDraft,
    /// Target and draft KV, of which the latter turned out to be broken.
    BrokenDraft,
    /// Nothing. The host never copies the block, because no other request will find it.
    Private,
}

#[derive(Clone, Copy, Debug, Default)]
struct BlockState {
    saved: Saved,
    is_queued: bool,
    /// Id of the step after which the block's draft KV is written, if the block has `draft_valid`.
    drafted_by: u64,
}

/// Due blocks and outputs that the host has not taken yet.
#[derive(Clone, Debug)]
pub(super) struct SaveLog {
    /// Blocks that became due, each once. Blocks evicted since are skipped when the host takes them.
    due: VecDeque<u32>,
    states: Vec<BlockState>,
    /// Blocks with `draft_valid` whose draft KV a step that has not settled will write.
    drafted_later: Vec<u32>,
    /// Snapshots that became due.
    pub(super) snapshots: DueSnapshots,
    /// Id of the step that settled last.
    settled: u64,
    pub(super) outputs: VecDeque<EndedOutput>,
}

impl SaveLog {
    pub(super) fn new(config: &SchedulerConfig) -> Self {
        let blocks = config.num_blocks;
        let states = vec![BlockState::default(); blocks];
        Self {
            due: VecDeque::with_capacity(blocks),
            states,
            drafted_later: Vec::new(),
            snapshots: DueSnapshots::new(config.num_snapshots),
            settled: 0,
            outputs: VecDeque::new(),
        }
    }

    /// Notes that a block is as complete as it gets for now.
    pub(super) fn due(&mut self, block: i64) {
        let state = &mut self.states[block as usize];
        let takes = !matches!(state.saved, Saved::TargetAndDraft | Saved::Private);
        if takes && !std::mem::replace(&mut state.is_queued, true) {
            self.due.push_back(block as u32);
        }
    }

    /// Notes that a block got `draft_valid` in the step that settles. `is_later` says that the next step writes the
    /// draft KV.
    pub(super) fn drafted(&mut self, block: i64, is_later: bool) {
        self.states[block as usize].drafted_by = self.settled + u64::from(is_later);
        if is_later {
            self.drafted_later.push(block as u32);
        } else {
            self.due(block);
        }
    }

    /// Notes that a step settles: blocks whose draft KV it has written are due.
    pub(super) fn settles(&mut self, step_id: u64) {
        self.settled = step_id;
        if self.drafted_later.is_empty() {
            return;
        }
        for block in std::mem::take(&mut self.drafted_later) {
            if self.states[block as usize].drafted_by <= step_id {
                self.due(i64::from(block));
            } else {
                self.drafted_later.push(block);
            }
        }
    }

    /// Notes that a block which no other request will find was registered.
    pub(super) fn private(&mut self, block: i64) {
        self.states[block as usize].saved = Saved::Private;
    }

    /// Notes that a block left the prefix cache.
    pub(super) fn evicted(&mut self, block: i64) {
        self.states[block as usize].saved = Saved::Nothing;
    }

    /// Notes that the draft KV of a block turned out to be broken, so that a copy of it must be replaced.
    pub(super) fn draft_lost(&mut self, block: i64) {
        let saved = &mut self.states[block as usize].saved;
        if *saved == Saved::TargetAndDraft {
            *saved = Saved::BrokenDraft;
        }
    }

    /// Notes that no block is cached any more.
    pub(super) fn cleared(&mut self) {
        self.due.clear();
        self.drafted_later.clear();
        self.snapshots.clear();
        self.states.fill(BlockState::default());
    }

    /// Keeps the output of a request that ends, for the host.
    pub(super) fn output(&mut self, request: &Request) {
        let token_ids = request.tokens[request.prompt_len..].to_vec();
        if token_ids.is_empty() {
            return;
        }
        if self.outputs.len() == MAX_OUTPUTS {
            self.outputs.pop_front();
        }
        self.outputs.push_back(EndedOutput { salt: request.salt, token_ids });
    }
}

/// Allocates a block by evicting a cached one, and records the eviction.
#[inline]
pub(super) fn allocate(
    pool: &mut BlockPool,
    mut events: Option<&mut KvEventLog>,
    saves: Option<&mut SaveLog>,
    snapshots: Option<&mut Snapshots>,
) -> Result<i64> {
    let evicted = pool.allocate_cached()?;
    let block = evicted.block;
    if let Some(snapshots) = snapshots {
        snapshots.forget(evicted.hash, events.as_deref_mut())?;
    }
    if let Some(saves) = saves {
        saves.evicted(block);
    }
    if let Some(events) = events {
        events.removed(&evicted);
    }
    Ok(block)
}

impl Scheduler {
    /// Returns whether a block, a snapshot or an output is due to be saved.
    pub fn has_due(&self) -> bool {
        let has_due =
            |saves: &SaveLog| !saves.due.is_empty() || !saves.outputs.is_empty() || !saves.snapshots.is_empty();
        self.saves.as_ref().is_some_and(has_due)
    }

    /// Takes the next cached block whose KV the host should copy out, before the next [`Self::plan`]. A block comes
    /// again if its draft KV becomes valid later. Always `None` unless `enable_block_saves` is set.
    pub fn take_due_block(&mut self) -> Option<DueBlock> {
        let saves = self.saves.as_mut()?;
        while let Some(block) = saves.due.pop_front() {
            let state = &mut saves.states[block as usize];
            state.is_queued = false;
            let block = i64::from(block);
            let Some(hash) = self.pool.block_hash(block) else { continue };
            let draft = self.pool.draft_successor(block).filter(|_| state.drafted_by <= saves.settled);
            let complete = if draft.is_some() { Saved::TargetAndDraft } else { Saved::Target };
            let replaces = state.saved == Saved::BrokenDraft;
            if replaces || state.saved == Saved::Nothing || state.saved == Saved::Target && draft.is_some() {
                state.saved = complete;
                return Some(DueBlock { block, hash, draft, replaces });
            }
        }
        None
    }

    /// Takes the next output of an ended request that suffix decoding has kept. Always `None` unless
    /// `enable_block_saves` is set and a request had a suffix drafter.
    pub fn take_ended_output(&mut self) -> Option<EndedOutput> {
        self.saves.as_mut()?.outputs.pop_front()
    }

    /// Adds the output of a request that ended in an earlier process to the suffix drafter, if there is one. `salt` is
    /// the hash of the request's cache salt.
    pub fn restore_output(&mut self, salt: BlockHash, token_ids: &[u32]) {
        if let Some(suffix) = &mut self.host_drafts.proposers.suffix {
            suffix.restore(salt, token_ids);
        }
    }

    /// Returns the number of a live request's first blocks that are cached, and the hashes of its further blocks that a
    /// prefix hit could have.
    ///
    /// # Errors
    /// [`Error::UnknownRequest`] if the id is not live.
    pub fn missing_prefix(&mut self, request_id: i64) -> Result<(usize, Vec<BlockHash>)> {
        let index = self.live(request_id)?;
        if !self.config.enable_prefix_caching {
            return Ok((0, Vec::new()));
        }
        let (block_size, request) = (self.config.block_size, &mut self.requests[index]);
        let most = (request.tokens.len() - 1) / block_size;
        let mut hashes: Vec<_> = (0..most).map(|block| request.block_hash(block, block_size, &self.hasher)).collect();
        let cached = hashes.iter().take_while(|&&hash| self.pool.lookup(hash).is_some()).count();
        Ok((cached, hashes.split_off(cached)))
    }

    /// Keeps a waiting request from being admitted until the host, the program around this crate, has copied in blocks
    /// of the request's prompt. Once nothing else keeps the request from being admitted, [`Self::take_loads`] returns
    /// it.
    ///
    /// # Errors
    /// [`Error::UnknownRequest`] if the id is not live.
    pub fn await_load(&mut self, request_id: i64) -> Result<()> {
        let index = self.live(request_id)?;
        self.requests[index].awaits_load = true;
        Ok(())
    }

    /// Takes the waiting requests that the last [`Self::plan`] would have admitted if they did not wait for the host to
    /// copy in blocks of their prompts.
    pub fn take_loads(&mut self) -> Vec<i64> {
        std::mem::take(&mut self.loads)
    }

    /// Ends a request's wait for the host to copy in blocks of its prompt. Does nothing if it does not wait, or has
    /// ended.
    pub fn end_load(&mut self, request_id: i64) {
        if let Ok(index) = self.live(request_id) {
            self.requests[index].awaits_load = false;
        }
    }

    /// Puts blocks `first, first + 1, ..` of a live request's prompt into the prefix cache, one for each of `drafts`.
    /// An element says whether the draft KV that the host has is valid, as in [`DueBlock::draft`]. Returns the ids of
    /// the blocks, whose KV the host must fill before the next step. An id is `None` if the block was cached already.
    /// There are fewer ids if the pool has too few blocks that no request holds, and none if a block before `first` is
    /// no longer cached.
    ///
    /// # Errors
    /// [`Error::UnknownRequest`] if the id is not live. [`Error::InvalidBuffer`] if the request has not so many blocks
    /// that a prefix hit could have. Nothing has changed then.
    pub fn adopt(&mut self, request_id: i64, first: usize, drafts: &[Option<u32>]) -> Result<Vec<Option<i64>>> {
        let index = self.live(request_id)?;
        let (block_size, end) = (self.config.block_size, first + drafts.len());
        let most = (self.requests[index].tokens.len() - 1) / block_size;
        if end > most {
            let allowed = format!("at most {most} blocks, those before the last token");
            return Err(Error::invalid_buffer("drafts", format!("up to block {end}"), allowed));
        }
        // Held meanwhile, so that making room does not evict the prefix itself.
        let mut held = Vec::with_capacity(end);
        let mut adopted = Vec::with_capacity(drafts.len());
        for place in 0..end {
            let hash = self.requests[index].block_hash(place, block_size, &self.hasher);
            if let Some(block) = self.pool.lookup(hash) {
                self.pool.share(block)?;
                held.push(block);
                if place >= first {
                    adopted.push(None);
                }
                continue;
            }
            if place < first {
                break; // evicted since the caller looked: what follows it would not be found
            }
            let Some(block) = self.allocate_for_load()? else { break };
            held.push(block);
            self.pool.register(block, hash)?;
            if let Some(successor) = drafts[place - first] {
                self.pool.mark_draft_before(block, successor)?;
            }
            if let Some(saves) = &mut self.saves {
                let saved = if drafts[place - first].is_some() { Saved::TargetAndDraft } else { Saved::Target };
                saves.states[block as usize].saved = saved;
            }
            if let Some(events) = &mut self.kv_events {
                events.stored(block, &self.requests[index], place, hash);
            }
            adopted.push(Some(block));
        }
        for block in held.into_iter().rev() {
            self.pool.free(block)?;
        }
        Ok(adopted)
    }

    /// Allocates a block for content from elsewhere; `None` if requests hold all blocks.
    fn allocate_for_load(&mut self) -> Result<Option<i64>> {
        if let Some(block) = self.pool.allocate_free() {
            return Ok(Some(block));
        }
        match allocate(&mut self.pool, self.kv_events.as_mut(), self.saves.as_mut(), self.snapshots.as_mut()) {
            Ok(block) => Ok(Some(block)),
            Err(Error::OutOfBlocks { .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }
}
