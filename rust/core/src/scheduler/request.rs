//! State of a request from `add_request` to its end, and the slab that holds all requests.

use std::ops::{Index, IndexMut};

use super::config::Lora;
use crate::hash::{BlockHash, BlockHasher};
use crate::sampling::{LOGPROBS_NONE, LogitsDtype, NUM_PARAMS, STEP_MIN_TOKENS};

/// Index of a request in the slab.
pub(super) type RequestIndex = u32;

/// Order of requests, smaller first: priority minus the bonus for arriving earlier, then arrival.
pub(super) type Order = (i128, u64);

/// State of a request. Fields that every step reads come first, in one cache line.
#[derive(Clone, Debug)]
#[repr(C, align(64))]
pub(super) struct Request {
    /// Settled tokens: the prompt, then the output. They are never removed, so a preempted request keeps them.
    pub(super) tokens: Vec<u32>,
    pub(super) id: i64,
    pub(super) limit: usize,
    /// Whether the drafter's logits for this request were NaN or infinite at least once. The request then never drafts
    /// again.
    pub(super) draft_failed: bool,
    /// Whether the request has had a row before.
    pub(super) admitted: bool,
    /// Whether the request waits for the host to copy in blocks of its prompt.
    pub(super) awaits_load: bool,

    pub(super) stop_token_ids: Vec<i64>,
    /// Number of tokens, prompt included, before which stop ids do not count.
    pub(super) min_len: usize,
    /// Number of the request's first blocks whose KV was in the prefix cache, or stored by the host, when the host last
    /// checked.
    pub(super) num_stored: usize,
    pub(super) order: Order,
    pub(super) caller: Option<i64>,
    pub(super) k: usize,
    /// Row of the request while it runs.
    pub(super) row: Option<u32>,
    pub(super) root: BlockHash,
    /// Hash of `cache_salt`.
    pub(super) salt: BlockHash,
    pub(super) cache_salt: Box<[u8]>,
    /// Extra keys by position, which does not decrease.
    extra_keys: Vec<(usize, Box<[u8]>)>,
    /// Hashes of the request's first full blocks, as far as they were needed; each is computed once.
    hashes: Vec<BlockHash>,
    pub(super) prompt_len: usize,
    pub(super) sampling: Sampling,
    pub(super) lora: Option<Lora>,
    /// Tokens that the request predicts for its output.
    pub(super) prediction: Box<[u32]>,
    /// Tokens that the request's grammar forces or makes likely, and the number of tokens after which they come.
    grammar_drafts: (usize, Vec<u32>),
}

/// Sampling parameters in the form that the record has whenever the request is admitted.
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
        (salt, root): (BlockHash, BlockHash),
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
            awaits_load: false,
            num_stored: 0,
            root,
            salt,
            cache_salt: params.cache_salt.into(),
            extra_keys: params.extra_keys.iter().map(|extra| (extra.position, extra.key.into())).collect(),
            hashes: Vec::new(),
            lora: params.lora.cloned(),
            prediction: params.prediction.iter().map(|&token| token as u32).collect(),
            grammar_drafts: (0, Vec::new()),
        }
    }

    /// Returns the tokens that the request's grammar forces or makes likely after its present ones.
    pub(super) fn grammar_drafts(&self) -> &[u32] {
        if self.grammar_drafts.0 == self.tokens.len() { &self.grammar_drafts.1 } else { &[] }
    }

    /// Sets the tokens that the request's grammar forces after its present ones.
    pub(super) fn set_grammar_drafts(&mut self, tokens: &[i64]) {
        self.grammar_drafts.0 = self.tokens.len();
        self.grammar_drafts.1.clear();
        self.grammar_drafts.1.extend(tokens.iter().map(|&token| token as u32));
    }

    /// Returns whether log probabilities of the request's prompt are reported.
    pub(super) fn tells_prompt(&self) -> bool {
        self.sampling.prompt_logprobs != LOGPROBS_NONE
    }

    /// Appends the first `emitted` of `tokens`.
    ///
    /// It copies all `tokens` and then truncates: a loop over the emitted tokens alone mispredicts its end, which costs
    /// more than copying K tokens.
    #[inline]
    pub(super) fn append(&mut self, tokens: &[i64], emitted: usize) {
        let n = self.tokens.len();
        self.tokens.extend(tokens.iter().map(|&token| token as u32));
        self.tokens.truncate(n + emitted);
    }

    /// Reserves memory for all tokens that the request may reach, so that nothing is allocated while it runs. Up to
    /// `width` tokens are appended at a time.
    pub(super) fn reserve(&mut self, block_size: usize, width: usize) {
        self.tokens.reserve_exact(self.limit + width - self.tokens.len());
        self.hashes.reserve_exact(self.limit / block_size - self.hashes.len());
    }

    /// Returns the hash of the request's full block `index`.
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

    /// Returns the parent to hash the block at `start` on, which includes the block's extra keys.
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

    /// Returns whether the request has extra keys.
    pub(super) fn has_extra_keys(&self) -> bool {
        !self.extra_keys.is_empty()
    }

    /// Returns the extra keys of the block at `start`, with their offsets in it.
    pub(super) fn extra_keys_of(&self, start: usize, block_size: usize) -> impl Iterator<Item = (usize, &[u8])> {
        let first = self.extra_keys.partition_point(|&(position, _)| position < start);
        let keys = self.extra_keys[first..].iter().take_while(move |&&(position, _)| position < start + block_size);
        keys.map(move |(position, key)| (position - start, &**key))
    }

    /// Returns the hash of the block before `index`, which must have been computed; `None` before the first block.
    pub(super) fn parent_hash(&self, index: usize) -> Option<BlockHash> {
        index.checked_sub(1).map(|parent| self.hashes[parent])
    }
}

/// Slab of requests at stable indices, which are reused after removal.
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
