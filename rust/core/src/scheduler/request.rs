//! What the scheduler remembers of a request, from `add_request` to its end, and the slab that holds them.

use std::ops::{Index, IndexMut};

use super::loras::Lora;
use crate::hash::{BlockHash, BlockHasher};
use crate::sampling::{LOGPROBS_NONE, LogitsDtype, NUM_PARAMS, STEP_MIN_TOKENS};

/// A request's place in the slab.
pub(super) type RequestIndex = u32;

/// Who goes first, the smaller one: priority, less what arriving earlier is worth, then arrival.
pub(super) type Order = (i128, u64);

/// What every launch looks at comes first, in one cache line.
#[derive(Clone, Debug)]
#[repr(C, align(64))]
pub(super) struct Request {
    /// Settled tokens: the prompt, then the output. Never taken back, so a preempted request keeps them.
    pub(super) tokens: Vec<u32>,
    pub(super) id: i64,
    pub(super) limit: usize,
    /// The draft's logits were not finite once; it does not draft again.
    pub(super) draft_failed: bool,
    /// It has had a row before.
    pub(super) admitted: bool,

    pub(super) stop_token_ids: Vec<i64>,
    /// Output tokens before which stop ids do not count, after the prompt.
    pub(super) min_len: usize,
    pub(super) order: Order,
    pub(super) caller: Option<i64>,
    pub(super) k: usize,
    /// Its row while running.
    pub(super) row: Option<u32>,
    pub(super) root: BlockHash,
    pub(super) cache_salt: Box<[u8]>,
    /// By position, which does not decrease.
    extra_keys: Vec<(usize, Box<[u8]>)>,
    /// Hashes of its first full blocks, computed once as far as they were needed.
    hashes: Vec<BlockHash>,
    pub(super) prompt_len: usize,
    pub(super) sampling: Sampling,
    pub(super) lora: Option<Lora>,
}

/// What the record says of a request's sampling whenever it is admitted.
#[derive(Clone, Debug)]
pub(super) struct Sampling {
    pub(super) seed: i64,
    pub(super) steps: i64,
    pub(super) logprobs: i64,
    pub(super) prompt_logprobs: i64,
    pub(super) num_allowed: i64,
    pub(super) num_biases: i64,
    pub(super) num_bad_words: i64,
    pub(super) params: [f64; NUM_PARAMS],
    pub(super) constraints: Box<[i64]>,
}

impl Sampling {
    fn new(params: &super::RequestParams<'_>, dtype: LogitsDtype) -> Self {
        let sampling = &params.sampling;
        let (columns, steps) = sampling.columns(dtype);
        Self {
            seed: sampling.seed,
            steps: steps | if params.min_tokens > 0 { STEP_MIN_TOKENS } else { 0 },
            logprobs: sampling.logprobs,
            prompt_logprobs: sampling.prompt_logprobs,
            num_allowed: sampling.allowed_token_ids.map_or(-1, |ids| ids.len() as i64),
            num_biases: sampling.logit_bias_ids.len() as i64,
            num_bad_words: sampling.bad_words.len() as i64,
            params: columns,
            constraints: sampling.constraints(),
        }
    }
}

impl Request {
    pub(super) fn new(
        id: i64,
        order: Order,
        prompt: &[i64],
        params: &super::RequestParams<'_>,
        root: BlockHash,
        dtype: LogitsDtype,
    ) -> Self {
        Self {
            prompt_len: prompt.len(),
            sampling: Sampling::new(params, dtype),
            id,
            order,
            caller: params.caller,
            tokens: prompt.iter().map(|&token| token as u32).collect(),
            limit: params.limit,
            min_len: prompt.len().saturating_add(params.min_tokens),
            k: params.num_speculative_tokens,
            stop_token_ids: params.stop_token_ids.to_vec(),
            row: None,
            draft_failed: false,
            admitted: false,
            root,
            cache_salt: params.cache_salt.into(),
            extra_keys: params.extra_keys.iter().map(|extra| (extra.position, extra.key.into())).collect(),
            hashes: Vec::new(),
            lora: params.lora.cloned(),
        }
    }

    /// Whether log probabilities of its prompt are asked for.
    pub(super) fn tells_prompt(&self) -> bool {
        self.sampling.prompt_logprobs != LOGPROBS_NONE
    }

    /// Appends the first `emitted` of `tokens`.
    ///
    /// Copies all of them before it cuts: a loop over the emitted ones mispredicts its end, which costs more than the K tokens.
    #[inline]
    pub(super) fn append(&mut self, tokens: &[i64], emitted: usize) {
        let n = self.tokens.len();
        self.tokens.extend(tokens.iter().map(|&token| token as u32));
        self.tokens.truncate(n + emitted);
    }

    /// Makes room for all that it may become, so that nothing is allocated while it runs; `width` tokens come at a time.
    pub(super) fn reserve(&mut self, block_size: usize, width: usize) {
        self.tokens.reserve_exact(self.limit + width - self.tokens.len());
        self.hashes.reserve_exact(self.limit / block_size - self.hashes.len());
    }

    /// Hash of its full block `index`.
    #[inline]
    pub(super) fn block_hash(&mut self, index: usize, block_size: usize, hasher: &BlockHasher) -> BlockHash {
        while self.hashes.len() <= index {
            let start = self.hashes.len() * block_size;
            let mut parent = self.hashes.last().copied().unwrap_or(self.root);
            if !self.extra_keys.is_empty() {
                parent = self.with_extra_keys(parent, start, block_size, hasher);
            }
            self.hashes.push(hasher.chain_tokens(parent, &self.tokens[start..start + block_size]));
        }
        self.hashes[index]
    }

    /// What the block at `start` is hashed on from, its extra keys being part of it.
    #[cold]
    pub(super) fn with_extra_keys(
        &self,
        parent: BlockHash,
        start: usize,
        block_size: usize,
        hasher: &BlockHasher,
    ) -> BlockHash {
        self.extra_keys_of(start, block_size)
            .fold(parent, |parent, (offset, key)| hasher.with_extra_key(parent, offset, key))
    }

    /// Whether it has any.
    pub(super) fn has_extra_keys(&self) -> bool {
        !self.extra_keys.is_empty()
    }

    /// Offsets and extra keys of the block at `start`.
    pub(super) fn extra_keys_of(&self, start: usize, block_size: usize) -> impl Iterator<Item = (usize, &[u8])> {
        let first = self.extra_keys.partition_point(|&(position, _)| position < start);
        let keys = self.extra_keys[first..].iter().take_while(move |&&(position, _)| position < start + block_size);
        keys.map(move |(position, key)| (position - start, &**key))
    }

    /// Hash of the block before `index`, which has been computed; none before the first.
    pub(super) fn parent_hash(&self, index: usize) -> Option<BlockHash> {
        index.checked_sub(1).map(|parent| self.hashes[parent])
    }
}

/// Requests at stable indices; indices of removed ones are used again.
#[derive(Clone, Debug, Default)]
pub(super) struct Requests {
    slots: Vec<Option<Request>>,
    free: Vec<RequestIndex>,
}

impl Requests {
    pub(super) fn insert(&mut self, request: Request) -> RequestIndex {
        if let Some(index) = self.free.pop() {
            self.slots[index as usize] = Some(request);
            return index;
        }
        self.slots.push(Some(request));
        (self.slots.len() - 1) as RequestIndex
    }

    pub(super) fn remove(&mut self, index: RequestIndex) -> Request {
        self.free.push(index);
        self.slots[index as usize].take().expect("a live request")
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (RequestIndex, &Request)> {
        self.slots.iter().enumerate().filter_map(|(index, slot)| Some((index as RequestIndex, slot.as_ref()?)))
    }
}

impl Index<RequestIndex> for Requests {
    type Output = Request;

    fn index(&self, index: RequestIndex) -> &Request {
        self.slots[index as usize].as_ref().expect("a live request")
    }
}

impl IndexMut<RequestIndex> for Requests {
    fn index_mut(&mut self, index: RequestIndex) -> &mut Request {
        self.slots[index as usize].as_mut().expect("a live request")
    }
}
