//! Suffix decoding: proposes the most frequent continuation of a text, counted in the text itself and in earlier
//! outputs. Needs no model.
//!
//! After Oliaro et al., arXiv 2411.04975, with vLLM's settings. Each running request has a tree of the substrings of
//! its prompt and output. One more tree for each cache salt has the substrings of all outputs with that salt, including
//! finished ones until the oldest are evicted. `tree` counts substrings, `nodes` keeps children in order, and this file drafts and evicts.
//!
//! *What is drafted.* A pattern is the last m tokens of a text (m < D). The draft begins with the most frequent token
//! after the pattern, then the most frequent token after that one, and so on. It ends where a token's count, divided by
//! the pattern's, falls below `min_token_prob`. It has at most `max_spec_factor * m` tokens, and at most D - m, because
//! the tree is no deeper.
//!
//! The draft with the largest sum of these ratios is taken. Ties, to nine digits, go to the request's own tree, then to
//! the pattern that may draft more tokens, then to the longer pattern. Of equally frequent tokens the lowest id is
//! taken. So drafts are a function of the texts alone. The pattern's count includes its occurrence at the very end of
//! the text, as in `ArcticInference`.
//!
//! *What it costs.* A token takes up to D steps in each of two trees. A draft starts at the known place of the text's
//! end in the trees and follows counts from there: `benches/rust/suffix.rs`.

mod nodes;
mod outputs;
mod proposer;
mod tree;

use std::collections::{HashMap, VecDeque};

use rustc_hash::FxBuildHasher;

use crate::error::{Error, Result};
use crate::hash::BlockHash;
use outputs::Outputs;
use tree::{Place, Tree};

/// Maximum tree depth. Each token of a repetitive text takes as many nodes.
const MAX_DEPTH: usize = 256;
/// Difference above which a score counts as larger than another.
const CLOSE: f64 = 1e-9;

/// Settings of a [`SuffixCache`]. Begin with [`Self::default`] and set the fields that differ, because minor versions
/// add fields.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SuffixSettings {
    /// D: maximum number of tokens in a substring, pattern and draft together. 2 to 256; 24 by default.
    pub max_tree_depth: usize,
    /// Maximum number of ended requests whose outputs are kept. With 0, no other request's output is used, not even
    /// those of running requests. 10000 by default.
    pub max_cached_requests: usize,
    /// Number of draft tokens per token of the pattern. Finite, above 0; 1 by default.
    pub max_spec_factor: f64,
    /// Minimum ratio of a draft token's count to its pattern's count. 0 to 1; 0.1 by default.
    pub min_token_prob: f64,
    /// Number of bytes above which outputs of ended requests are evicted, oldest first. The trees of running requests
    /// are never cut. 1 GiB by default.
    pub max_memory_bytes: usize,
}

impl Default for SuffixSettings {
    fn default() -> Self {
        Self {
            max_tree_depth: 24,
            max_cached_requests: 10_000,
            max_spec_factor: 1.0,
            min_token_prob: 0.1,
            max_memory_bytes: 1 << 30,
        }
    }
}

impl SuffixSettings {
    /// Checks that each setting is within its range.
    ///
    /// # Errors
    /// [`Error::InvalidConfig`] naming the first setting outside its range.
    pub fn validate(&self) -> Result<()> {
        if !(2..=MAX_DEPTH).contains(&self.max_tree_depth) {
            return Err(Error::invalid_config("max_tree_depth", self.max_tree_depth, format!("from 2 to {MAX_DEPTH}")));
        }
        if !self.max_spec_factor.is_finite() || self.max_spec_factor <= 0.0 {
            return Err(Error::invalid_config("max_spec_factor", self.max_spec_factor, "finite and above 0"));
        }
        if !(0.0..=1.0).contains(&self.min_token_prob) {
            return Err(Error::invalid_config("min_token_prob", self.min_token_prob, "from 0 to 1"));
        }
        Ok(())
    }
}

/// Sizes of a [`SuffixCache`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct SuffixStats {
    /// Number of running requests.
    pub num_requests: usize,
    /// Number of ended requests whose outputs are kept.
    pub num_cached_requests: usize,
    /// Number of tokens in the tree of all outputs, including those of running requests.
    pub num_output_tokens: usize,
    /// Number of tokens in the trees of running requests.
    pub num_request_tokens: usize,
    /// Number of nodes in all trees.
    pub num_nodes: usize,
    /// Number of bytes in use. Allocations are up to twice that, because vectors grow by doubling.
    pub memory_bytes: usize,
}

/// Length, score and pattern length of a draft.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct SuffixDraft {
    /// Number of draft tokens; 0 if the text has no known continuation.
    pub len: usize,
    /// Sum over the draft tokens of their counts divided by the pattern's: the expected number of accepted tokens.
    pub score: f64,
    /// Number of tokens in the pattern.
    pub match_len: usize,
}

#[derive(Clone, Debug)]
struct Running {
    /// Tree of the request's own prompt and output, which are its sequence 0.
    own: Tree,
    /// Hash of the request's cache salt.
    salt: BlockHash,
    /// Sequence of the request's output in the salt's tree of outputs, if outputs are kept.
    output: Option<u32>,
    num_output_tokens: usize,
}

/// Kept output of an ended request.
#[derive(Clone, Copy, Debug)]
struct Ended {
    /// Id of the request; `None` if it ran in another process.
    id: Option<i64>,
    salt: BlockHash,
    /// Index of the output in its salt's tree.
    output: u32,
}

/// Drafter that proposes the most frequent continuation of a request's text, counted in that text and in the outputs of
/// other requests.
///
/// ```
/// use specrs_core::{SuffixCache, SuffixSettings};
///
/// let mut cache = SuffixCache::new(SuffixSettings::default())?;
/// cache.start_request(7, &[1, 2, 3, 4, 5, 1, 2])?;
/// let mut drafts = [0; 4];
/// let draft = cache.propose(7, &mut drafts)?;
/// assert_eq!(drafts[..draft.len], [3, 4]); // as many as the pattern [1, 2] has tokens
/// cache.append(7, &[3, 9])?;
/// cache.stop_request(7)?;
///
/// cache.start_request(8, &[2])?; // another text has the output [3, 9]
/// cache.append(8, &[3])?;
/// assert_eq!(cache.propose(8, &mut drafts)?.len, 1);
/// assert_eq!(drafts[0], 9);
/// # Ok::<(), specrs_core::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct SuffixCache {
    settings: SuffixSettings,
    outputs: Outputs,
    requests: HashMap<i64, Running, FxBuildHasher>,
    /// Ended requests whose outputs are kept, oldest first.
    ended: VecDeque<Ended>,
    /// Bytes of the trees of running requests.
    own_bytes: usize,
    /// Number of nodes of the trees of running requests.
    own_nodes: usize,
    /// Number of tokens in the trees of running requests.
    own_tokens: usize,
    scratch: Vec<u32>,
}

impl SuffixCache {
    /// Makes an empty cache.
    ///
    /// # Errors
    /// [`Error::InvalidConfig`] naming the first setting outside its range.
    pub fn new(settings: SuffixSettings) -> Result<Self> {
        settings.validate()?;
        Ok(Self {
            settings,
            outputs: Outputs::new(settings.max_tree_depth),
            requests: HashMap::default(),
            ended: VecDeque::new(),
            own_bytes: 0,
            own_nodes: 0,
            own_tokens: 0,
            scratch: Vec::new(),
        })
    }

    /// Returns the settings.
    pub fn settings(&self) -> &SuffixSettings {
        &self.settings
    }

    /// Adds a running request with its prompt.
    ///
    /// # Errors
    /// [`Error::DuplicateRequest`] if a request with this id is running.
    pub fn start_request(&mut self, request_id: i64, prompt: &[u32]) -> Result<()> {
        self.start_request_of(request_id, 0, prompt)
    }

    /// Adds a running request with its prompt and the hash of its cache salt. It sees outputs of requests with the same
    /// salt alone.
    ///
    /// # Errors
    /// [`Error::DuplicateRequest`] if a request with this id is running.
    pub fn start_request_of(&mut self, request_id: i64, salt: BlockHash, prompt: &[u32]) -> Result<()> {
        if self.requests.contains_key(&request_id) {
            return Err(Error::DuplicateRequest { request_id });
        }
        let mut own = Tree::new(self.settings.max_tree_depth);
        own.begin();
        for &token in prompt {
            own.append(0, token);
        }
        self.enter(&own);
        let output = (self.settings.max_cached_requests > 0).then(|| self.outputs.begin(salt));
        self.requests.insert(request_id, Running { own, salt, output, num_output_tokens: 0 });
        self.make_room();
        Ok(())
    }

    /// Returns whether a request is running.
    pub fn is_running(&self, request_id: i64) -> bool {
        self.requests.contains_key(&request_id)
    }

    /// Returns the number of tokens of a running request, including its prompt.
    ///
    /// # Errors
    /// [`Error::UnknownRequest`] unless the request is running.
    pub fn num_tokens(&self, request_id: i64) -> Result<usize> {
        Ok(self.running(request_id)?.own.num_tokens())
    }

    /// Adds output tokens to a running request.
    ///
    /// # Errors
    /// [`Error::UnknownRequest`] unless the request is running.
    pub fn append(&mut self, request_id: i64, tokens: &[u32]) -> Result<()> {
        let running = self.requests.get_mut(&request_id).ok_or(Error::UnknownRequest { request_id })?;
        let (bytes, nodes) = (running.own.memory_bytes(), running.own.num_nodes());
        for &token in tokens {
            running.own.append(0, token);
        }
        if let Some(output) = running.output {
            self.outputs.append(running.salt, output, tokens);
        }
        running.num_output_tokens += tokens.len();
        // A tree may shrink: a token may end what a node was kept for.
        self.own_bytes = self.own_bytes + running.own.memory_bytes() - bytes;
        self.own_nodes = self.own_nodes + running.own.num_nodes() - nodes;
        self.own_tokens += tokens.len();
        self.make_room();
        Ok(())
    }

    /// Writes a draft for a running request to the start of `drafts`, at most as many tokens as it has room for.
    /// Elements after the draft's length mean nothing.
    ///
    /// # Errors
    /// [`Error::UnknownRequest`] unless the request is running.
    pub fn propose(&mut self, request_id: i64, drafts: &mut [u32]) -> Result<SuffixDraft> {
        let Self { settings, outputs, requests, scratch, .. } = self;
        let running = requests.get(&request_id).ok_or(Error::UnknownRequest { request_id })?;
        let text = running.own.tokens(0);
        let longest = (settings.max_tree_depth - 1).min(text.len());
        let mut best = Best { settings: *settings, draft: SuffixDraft::default(), drafts, scratch };
        best.for_each_len(longest, |best, len| best.consider(&running.own, len, || running.own.end_of(0, len)));
        if let Some((output, outputs)) = running.output.zip(outputs.tree(running.salt)) {
            // Its own output is among the others, so where its end is there is known; patterns that begin in the prompt are looked up.
            best.for_each_len(longest, |best, len| {
                let known = len <= running.num_output_tokens;
                let look_up = || outputs.find(text[text.len() - len..].iter().copied());
                best.consider(outputs, len, || if known { outputs.end_of(output, len) } else { look_up() });
            });
        }
        Ok(best.draft)
    }

    /// Writes a draft for a running request's text followed by the tokens `more`, as [`propose`](Self::propose) would
    /// if they were part of the text. The counts are those of the text without them.
    ///
    /// # Errors
    /// [`Error::UnknownRequest`] unless the request is running.
    pub fn propose_after(&mut self, request_id: i64, more: &[u32], drafts: &mut [u32]) -> Result<SuffixDraft> {
        let Self { settings, outputs, requests, scratch, .. } = self;
        let running = requests.get(&request_id).ok_or(Error::UnknownRequest { request_id })?;
        let text = running.own.tokens(0);
        let longest = (settings.max_tree_depth - 1).min(text.len() + more.len());
        let end: Vec<u32> = text[text.len().saturating_sub(longest)..].iter().chain(more).copied().collect();
        let mut best = Best { settings: *settings, draft: SuffixDraft::default(), drafts, scratch };
        for tree in std::iter::once(&running.own).chain(running.output.and_then(|_| outputs.tree(running.salt))) {
            best.for_each_len(longest, |best, len| {
                best.consider(tree, len, || tree.find(end[end.len() - len..].iter().copied()));
            });
        }
        Ok(best.draft)
    }

    /// Ends a running request and keeps its output for drafts of other requests.
    ///
    /// # Errors
    /// [`Error::UnknownRequest`] unless the request is running.
    pub fn stop_request(&mut self, request_id: i64) -> Result<()> {
        let running = self.requests.remove(&request_id).ok_or(Error::UnknownRequest { request_id })?;
        self.own_bytes -= running.own.memory_bytes();
        self.own_nodes -= running.own.num_nodes();
        self.own_tokens -= running.own.num_tokens();
        if let Some(output) = running.output {
            self.outputs.finish(running.salt, output);
            if running.num_output_tokens > 0 {
                self.ended.push_back(Ended { id: Some(request_id), salt: running.salt, output });
            } else {
                self.outputs.remove(running.salt, output);
            }
        }
        self.make_room();
        Ok(())
    }

    /// Returns whether a request is running whose output will be kept.
    pub(crate) fn keeps(&self, request_id: i64) -> bool {
        self.requests.get(&request_id).is_some_and(|running| running.output.is_some())
    }

    /// Adds the output of a request that ended in an earlier process. `salt` is the hash of the request's cache salt.
    /// Does nothing if `token_ids` is empty or `max_cached_requests` is 0.
    pub fn restore(&mut self, salt: BlockHash, token_ids: &[u32]) {
        if self.settings.max_cached_requests > 0 && !token_ids.is_empty() {
            let output = self.outputs.begin(salt);
            self.outputs.append(salt, output, token_ids);
            self.outputs.finish(salt, output);
            self.ended.push_back(Ended { id: None, salt, output });
            self.make_room();
        }
    }

    /// Removes the outputs of ended requests with this id. Returns whether there were any.
    pub fn evict(&mut self, request_id: i64) -> bool {
        let outputs = &mut self.outputs;
        let before = self.ended.len();
        self.ended.retain(|&Ended { id, salt, output }| {
            if id == Some(request_id) {
                outputs.remove(salt, output);
            }
            id != Some(request_id)
        });
        self.ended.len() < before
    }

    /// Returns the sizes of the cache.
    pub fn stats(&self) -> SuffixStats {
        SuffixStats {
            num_requests: self.requests.len(),
            num_cached_requests: self.ended.len(),
            num_output_tokens: self.outputs.num_tokens,
            num_request_tokens: self.own_tokens,
            num_nodes: self.outputs.num_nodes + self.own_nodes,
            memory_bytes: self.memory_bytes(),
        }
    }

    /// Returns the number of bytes in use.
    pub fn memory_bytes(&self) -> usize {
        self.outputs.memory_bytes + self.own_bytes
    }

    fn running(&self, request_id: i64) -> Result<&Running> {
        self.requests.get(&request_id).ok_or(Error::UnknownRequest { request_id })
    }

    fn enter(&mut self, own: &Tree) {
        self.own_bytes += own.memory_bytes();
        self.own_nodes += own.num_nodes();
        self.own_tokens += own.num_tokens();
    }

    /// Evicts the oldest outputs until the cache is within `max_cached_requests` and `max_memory_bytes`.
    fn make_room(&mut self) {
        while self.ended.len() > self.settings.max_cached_requests
            || self.memory_bytes() > self.settings.max_memory_bytes
        {
            let Some(Ended { salt, output, .. }) = self.ended.pop_front() else { return };
            self.outputs.remove(salt, output);
        }
    }
}

/// Best draft so far, while the patterns of a text are compared.
struct Best<'a> {
    settings: SuffixSettings,
    draft: SuffixDraft,
    drafts: &'a mut [u32],
    scratch: &'a mut Vec<u32>,
}

impl Best<'_> {
    /// Returns the maximum number of draft tokens after a pattern of `len` tokens.
    fn room(&self, len: usize) -> usize {
        // A product that is a whole number but for its last bits is that number.
        let most = (self.settings.max_spec_factor * len as f64 + 1e-6) as usize;
        most.min(self.settings.max_tree_depth - len).min(self.drafts.len())
    }

    /// Calls `consider` with pattern lengths up to `longest`: lengths that may draft the most tokens first, and of
    /// these the longest first.
    fn for_each_len(&mut self, longest: usize, mut consider: impl FnMut(&mut Self, usize)) {
        // Up to some length it may draft more the longer it is, from there on less.
        let Some(first) = (1..=longest).max_by_key(|&len| (self.room(len), len)) else { return };
        let (mut shorter, mut longer) = (first, first + 1);
        while shorter > 0 || longer <= longest {
            let turn = longer > longest || shorter > 0 && self.room(shorter) > self.room(longer);
            let len = if turn { &mut shorter } else { &mut longer };
            let this = *len;
            *len = if turn { this - 1 } else { this + 1 };
            consider(self, this);
        }
    }

    /// Drafts after a pattern of `len` tokens, which `place` finds in `tree`, and keeps the draft if it is better than
    /// the best so far.
    #[inline]
    fn consider(&mut self, tree: &Tree, len: usize, place: impl FnOnce() -> Option<Place>) {
        let room = self.room(len);
        // A token counts 1 at most.
        if room as f64 <= self.draft.score {
            return;
        }
        let Some(mut place) = place() else { return };
        let (pattern, mut score) = (f64::from(tree.count(place)), 0.0);
        self.scratch.clear();
        while self.scratch.len() < room {
            let Some((token, next)) = tree.follow(place) else { break };
            let ratio = f64::from(tree.count(next)) / pattern;
            if ratio < self.settings.min_token_prob {
                break;
            }
            self.scratch.push(token);
            score += ratio;
            // Later ones occur no more often.
            if score + ratio * ((room - self.scratch.len()) as f64) <= self.draft.score + CLOSE / 2.0 {
                return;
            }
            place = next;
        }
        if score > self.draft.score + CLOSE {
            self.draft = SuffixDraft { len: self.scratch.len(), score, match_len: len };
            self.drafts[..self.scratch.len()].copy_from_slice(self.scratch);
        }
    }
}
