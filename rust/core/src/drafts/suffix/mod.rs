//! Suffix decoding: drafts are what followed the end of a text most often, in the text itself and in earlier outputs. No model.
//!
//! After Oliaro et al., arXiv 2411.04975, with vLLM's settings. Each running request has a tree of the substrings of its prompt and output;
//! one more tree has those of all outputs, finished ones among them until the oldest make room. `tree` counts, `nodes` orders, this file
//! drafts and decides what stays.
//!
//! *What is drafted.* For a pattern, the last m tokens of a text (m < D), the most frequent token that follows, then the one behind it, while
//! its count over the pattern's is at least `min_token_prob`; at most `max_spec_factor * m` tokens, and D - m, what the tree knows. The
//! draft with the largest sum of these ratios is taken. Of equal ones, to nine digits: the request's own tree before that of all outputs,
//! the pattern that may draft more tokens, the longer one; of equally frequent tokens the lowest id. So drafts are a function of the texts
//! alone.
//! The pattern's count has its occurrence at the very end of the text in it, as `ArcticInference`'s.
//!
//! *What it costs.* A token takes up to D steps in each of two trees; a draft reads where the end of the text is in them, which is
//! known, and follows counts from there: `benches/rust/suffix.rs`.

mod nodes;
mod tree;

use std::collections::{HashMap, VecDeque};

use rustc_hash::FxBuildHasher;

use crate::error::{Error, Result};
use tree::{Place, Tree};

/// The deepest tree: a token of a text that repeats itself takes as many nodes.
const MAX_DEPTH: usize = 256;
/// What a score must be larger by to be larger.
const CLOSE: f64 = 1e-9;

/// Settings of a [`SuffixCache`]: begin with [`Self::default`] and set what differs, because fields come in minor versions.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SuffixSettings {
    /// D: tokens of the longest substring, pattern and draft together. 2 to 256; 24.
    pub max_tree_depth: usize,
    /// Outputs of ended requests that are kept; 0 looks at no other request's output, not at running ones either. 10000.
    pub max_cached_requests: usize,
    /// Draft tokens for each token of the pattern. Finite, above 0; 1.
    pub max_spec_factor: f64,
    /// The least that a draft token's count may be of its pattern's. 0 to 1; 0.1.
    pub min_token_prob: f64,
    /// Bytes in use beyond which outputs of ended requests go, the oldest first; what running requests need is never cut. 1 GiB.
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
    /// # Errors
    /// [`Error::InvalidConfig`] naming the first setting outside its range.
    pub fn validate(&self) -> Result<()> {
        if !(2..=MAX_DEPTH).contains(&self.max_tree_depth) {
            return Err(Error::invalid_config("max_tree_depth", self.max_tree_depth, format!("2 to {MAX_DEPTH}")));
        }
        if !self.max_spec_factor.is_finite() || self.max_spec_factor <= 0.0 {
            return Err(Error::invalid_config("max_spec_factor", self.max_spec_factor, "finite and above 0"));
        }
        if !(0.0..=1.0).contains(&self.min_token_prob) {
            return Err(Error::invalid_config("min_token_prob", self.min_token_prob, "0 to 1"));
        }
        Ok(())
    }
}

/// What a [`SuffixCache`] holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct SuffixStats {
    /// Running requests.
    pub num_requests: usize,
    /// Outputs of ended requests.
    pub num_cached_requests: usize,
    /// Tokens in the tree of all outputs, those of running requests among them.
    pub num_output_tokens: usize,
    /// Tokens in the trees of running requests.
    pub num_request_tokens: usize,
    /// Nodes of all trees.
    pub num_nodes: usize,
    /// Bytes in use. Allocations are up to twice that, as of vectors that have grown.
    pub memory_bytes: usize,
}

/// A draft, besides its tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct SuffixDraft {
    /// Draft tokens; 0 where nothing follows.
    pub len: usize,
    /// Sum over them of their counts over the pattern's: tokens that are expected to stand.
    pub score: f64,
    /// Tokens of the pattern.
    pub match_len: usize,
}

#[derive(Clone, Debug)]
struct Running {
    /// Prompt and output, as sequence 0.
    own: Tree,
    /// The output's sequence in the tree of all outputs, if that is kept.
    output: Option<u32>,
    num_output_tokens: usize,
}

/// Proposes what followed the end of a request's text most often, in that text and in the outputs of others.
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
    outputs: Tree,
    requests: HashMap<i64, Running, FxBuildHasher>,
    /// Ended requests and their sequences of `outputs`, oldest first.
    ended: VecDeque<(i64, u32)>,
    /// Bytes of the trees of running requests, and their nodes and tokens.
    own_bytes: usize,
    own_nodes: usize,
    own_tokens: usize,
    scratch: Vec<u32>,
}

impl SuffixCache {
    /// An empty cache.
    ///
    /// # Errors
    /// [`Error::InvalidConfig`] naming the first setting outside its range.
    pub fn new(settings: SuffixSettings) -> Result<Self> {
        settings.validate()?;
        Ok(Self {
            settings,
            outputs: Tree::new(settings.max_tree_depth),
            requests: HashMap::default(),
            ended: VecDeque::new(),
            own_bytes: 0,
            own_nodes: 0,
            own_tokens: 0,
            scratch: Vec::new(),
        })
    }

    /// The settings.
    pub fn settings(&self) -> &SuffixSettings {
        &self.settings
    }

    /// Takes in a request with its prompt.
    ///
    /// # Errors
    /// [`Error::DuplicateRequest`] if it is running.
    pub fn start_request(&mut self, request_id: i64, prompt: &[u32]) -> Result<()> {
        if self.requests.contains_key(&request_id) {
            return Err(Error::DuplicateRequest { request_id });
        }
        let mut own = Tree::new(self.settings.max_tree_depth);
        own.begin();
        for &token in prompt {
            own.append(0, token);
        }
        self.enter(&own);
        let output = (self.settings.max_cached_requests > 0).then(|| self.outputs.begin());
        self.requests.insert(request_id, Running { own, output, num_output_tokens: 0 });
        self.make_room();
        Ok(())
    }

    /// Whether a request is running.
    pub fn is_running(&self, request_id: i64) -> bool {
        self.requests.contains_key(&request_id)
    }

    /// Tokens of a running request, its prompt's among them.
    ///
    /// # Errors
    /// [`Error::UnknownRequest`] unless it is running.
    pub fn num_tokens(&self, request_id: i64) -> Result<usize> {
        Ok(self.running(request_id)?.own.num_tokens())
    }

    /// Adds output tokens to a running request.
    ///
    /// # Errors
    /// [`Error::UnknownRequest`] unless it is running.
    pub fn append(&mut self, request_id: i64, tokens: &[u32]) -> Result<()> {
        let running = self.requests.get_mut(&request_id).ok_or(Error::UnknownRequest { request_id })?;
        let (bytes, nodes) = (running.own.memory_bytes(), running.own.num_nodes());
        for &token in tokens {
            running.own.append(0, token);
            if let Some(output) = running.output {
                self.outputs.append(output, token);
            }
        }
        running.num_output_tokens += tokens.len();
        // A tree may shrink: a token may end what a node was kept for.
        self.own_bytes = self.own_bytes + running.own.memory_bytes() - bytes;
        self.own_nodes = self.own_nodes + running.own.num_nodes() - nodes;
        self.own_tokens += tokens.len();
        self.make_room();
        Ok(())
    }

    /// Writes what may follow a running request's text into `drafts`, at most all of it; what is behind the draft's length means nothing.
    ///
    /// # Errors
    /// [`Error::UnknownRequest`] unless it is running.
    pub fn propose(&mut self, request_id: i64, drafts: &mut [u32]) -> Result<SuffixDraft> {
        let Self { settings, outputs, requests, scratch, .. } = self;
        let running = requests.get(&request_id).ok_or(Error::UnknownRequest { request_id })?;
        let text = running.own.tokens(0);
        let longest = (settings.max_tree_depth - 1).min(text.len());
        let mut best = Best { settings: *settings, draft: SuffixDraft::default(), drafts, scratch };
        best.for_each_len(longest, |best, len| best.consider(&running.own, len, || running.own.end_of(0, len)));
        if let Some(output) = running.output {
            // Its own output is among the others, so where its end is there is known; patterns that begin in the prompt are looked up.
            best.for_each_len(longest, |best, len| {
                let known = len <= running.num_output_tokens;
                let look_up = || outputs.find(text[text.len() - len..].iter().copied());
                best.consider(outputs, len, || if known { outputs.end_of(output, len) } else { look_up() });
            });
        }
        Ok(best.draft)
    }

    /// Ends a running request; its output is kept for others.
    ///
    /// # Errors
    /// [`Error::UnknownRequest`] unless it is running.
    pub fn stop_request(&mut self, request_id: i64) -> Result<()> {
        let running = self.requests.remove(&request_id).ok_or(Error::UnknownRequest { request_id })?;
        self.own_bytes -= running.own.memory_bytes();
        self.own_nodes -= running.own.num_nodes();
        self.own_tokens -= running.own.num_tokens();
        if let Some(output) = running.output {
            self.outputs.finish(output);
            if running.num_output_tokens > 0 {
                self.ended.push_back((request_id, output));
            } else {
                self.outputs.remove(output);
            }
        }
        self.make_room();
        Ok(())
    }

    /// Forgets the outputs of ended requests of this id. Returns whether there were any.
    pub fn evict(&mut self, request_id: i64) -> bool {
        let outputs = &mut self.outputs;
        let before = self.ended.len();
        self.ended.retain(|&(id, output)| {
            if id == request_id {
                outputs.remove(output);
            }
            id != request_id
        });
        self.ended.len() < before
    }

    /// What it holds.
    pub fn stats(&self) -> SuffixStats {
        SuffixStats {
            num_requests: self.requests.len(),
            num_cached_requests: self.ended.len(),
            num_output_tokens: self.outputs.num_tokens(),
            num_request_tokens: self.own_tokens,
            num_nodes: self.outputs.num_nodes() + self.own_nodes,
            memory_bytes: self.memory_bytes(),
        }
    }

    /// Bytes in use.
    pub fn memory_bytes(&self) -> usize {
        self.outputs.memory_bytes() + self.own_bytes
    }

    fn running(&self, request_id: i64) -> Result<&Running> {
        self.requests.get(&request_id).ok_or(Error::UnknownRequest { request_id })
    }

    fn enter(&mut self, own: &Tree) {
        self.own_bytes += own.memory_bytes();
        self.own_nodes += own.num_nodes();
        self.own_tokens += own.num_tokens();
    }

    /// Lets the oldest outputs go that are more than may stay.
    fn make_room(&mut self) {
        while self.ended.len() > self.settings.max_cached_requests
            || self.memory_bytes() > self.settings.max_memory_bytes
        {
            let Some((_, output)) = self.ended.pop_front() else { return };
            self.outputs.remove(output);
        }
    }
}

/// The best draft so far.
struct Best<'a> {
    settings: SuffixSettings,
    draft: SuffixDraft,
    drafts: &'a mut [u32],
    scratch: &'a mut Vec<u32>,
}

impl Best<'_> {
    /// The most tokens behind a pattern of `len`.
    fn room(&self, len: usize) -> usize {
        // A product that is a whole number but for its last bits is that number.
        let most = (self.settings.max_spec_factor * len as f64 + 1e-6) as usize;
        most.min(self.settings.max_tree_depth - len).min(self.drafts.len())
    }

    /// Calls `consider` with lengths of patterns up to `longest`, those that may draft the most tokens first, of these the longest first.
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

    /// Takes what follows a pattern of `len` tokens, found by `place`, if that is better.
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
            // Those behind it occur no more often.
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
