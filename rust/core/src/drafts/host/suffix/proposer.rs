//! Suffix decoding as a scheduler runs it. The cache adds a request when drafts are first asked for, and its new tokens
//! before each proposal.

use super::{SuffixCache, SuffixSettings};
use crate::drafts::host::{HostProposer, HostSettings, Proposal, Settings, Text};
use crate::error::{Error, Result};

impl HostSettings for SuffixSettings {
    type Proposer = SuffixCache;

    fn read(given: &mut Settings<'_>) -> Result<Self> {
        let default = Self::default();
        let settings = Self {
            max_tree_depth: given.size("max_tree_depth", default.max_tree_depth)?,
            max_cached_requests: given.size("max_cached_requests", default.max_cached_requests)?,
            max_spec_factor: given.number("max_spec_factor", default.max_spec_factor),
            min_token_prob: given.number("min_token_prob", default.min_token_prob),
            max_memory_bytes: given.size("max_memory_bytes", default.max_memory_bytes)?,
        };
        settings.validate()?;
        Ok(settings)
    }

    fn start(self) -> Result<SuffixCache> {
        SuffixCache::new(self)
    }
}

impl HostProposer for SuffixCache {
    fn propose(&mut self, text: Text<'_>, drafts: &mut [u32]) -> Result<Proposal> {
        self.bring_up(text)?;
        let draft = Self::propose(self, text.id, drafts)?;
        Ok(Proposal { len: draft.len, match_len: draft.match_len })
    }

    fn propose_after(&mut self, text: Text<'_>, more: &[u32], drafts: &mut [u32]) -> Result<Proposal> {
        self.bring_up(text)?;
        let draft = Self::propose_after(self, text.id, more, drafts)?;
        Ok(Proposal { len: draft.len, match_len: draft.match_len })
    }

    /// Ends the request and keeps its output for drafts of other requests.
    fn end(&mut self, text: Text<'_>) -> Result<()> {
        if !self.is_running(text.id) {
            return Ok(());
        }
        let told = self.bring_up(text);
        told.and(self.stop_request(text.id))
    }
}

impl SuffixCache {
    /// Adds the tokens of a request that the cache does not have yet.
    fn bring_up(&mut self, Text { id, salt, tokens, prompt_len, .. }: Text<'_>) -> Result<()> {
        if !self.is_running(id) {
            self.start_request_of(id, salt, &tokens[..prompt_len])?;
        }
        let known = self.num_tokens(id)?;
        match tokens.get(known..) {
            Some(new) => self.append(id, new),
            None => {
                Err(Error::integrity(format!("the suffix tree of request {id} has {known} tokens of {}", tokens.len())))
            }
        }
    }
}
