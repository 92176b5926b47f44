//! A tree of all substrings of up to D tokens of some sequences, with the number of their occurrences. Sequences can be
//! extended and removed. Drafts nothing.
//!
//! A node stands for a substring; the nodes on the way down to it are its prefixes. If only one suffix reaches a node,
//! the rest of the suffix stays in the text. So a text without repetitions takes about one node per token, and a text
//! that occurs twice takes at most D nodes per two tokens. An append moves the D suffixes that still grow down by one
//! token. A suffix that is alone at its last node stays there; each other suffix costs one look-up in a hash table.

use super::nodes::{Below, NodeIndex, Nodes, ROOT};

/// Flag of a suffix's end: no other suffix reaches the node, so the continuation is in the text. The flag is also kept
/// here, because nodes of old suffixes are rarely in a processor's caches.
const ALONE: NodeIndex = 1 << 31;

/// A sequence of tokens in the tree.
#[derive(Clone, Debug, Default)]
struct Sequence {
    tokens: Vec<u32>,
    /// Last node of each suffix that still grows, `[D]`: the suffix that starts at p is at index p % D, with the flag
    /// [`ALONE`]. Empty once the sequence is finished.
    ends: Vec<NodeIndex>,
}

/// Tree of substrings with their counts.
#[derive(Clone, Debug)]
pub(super) struct Tree {
    depth: usize,
    nodes: Nodes,
    sequences: Vec<Sequence>,
    free: Vec<u32>,
    num_tokens: usize,
}

/// Position of a substring in the tree: at a node, or after a node in the text of its only suffix.
#[derive(Clone, Copy, Debug)]
pub(super) struct Place {
    node: NodeIndex,
    /// Number of tokens in the substring.
    len: usize,
}

/// Source of the next token after a place.
enum Next {
    /// Next token in the text of the only suffix, if the text has one.
    InText(Option<u32>),
    Children,
}

impl Tree {
    /// Makes an empty tree for substrings of up to `depth` tokens.
    pub(super) fn new(depth: usize) -> Self {
        Self { depth, nodes: Nodes::new(), sequences: Vec::new(), free: Vec::new(), num_tokens: 0 }
    }

    pub(super) fn num_tokens(&self) -> usize {
        self.num_tokens
    }

    pub(super) fn num_nodes(&self) -> usize {
        self.nodes.len()
    }

    /// Returns the number of bytes in use. Allocations are up to twice that, because vectors grow by doubling.
    pub(super) fn memory_bytes(&self) -> usize {
        let live = self.sequences.len() - self.free.len();
        self.nodes.memory_bytes() + self.num_tokens * size_of::<u32>() + live * size_of::<Sequence>()
    }

    /// Adds a new sequence without tokens and returns its index.
    pub(super) fn begin(&mut self) -> u32 {
        let ends = vec![ROOT; self.depth];
        let sequence = Sequence { tokens: Vec::new(), ends };
        if let Some(index) = self.free.pop() {
            self.sequences[index as usize] = sequence;
            return index;
        }
        self.sequences.push(sequence);
        (self.sequences.len() - 1) as u32
    }

    pub(super) fn tokens(&self, sequence: u32) -> &[u32] {
        &self.sequences[sequence as usize].tokens
    }

    /// Appends a token to a sequence that is not finished.
    pub(super) fn append(&mut self, sequence: u32, token: u32) {
        let own = &mut self.sequences[sequence as usize];
        own.tokens.push(token);
        self.num_tokens += 1;
        let len = own.tokens.len();
        // The longest first: one that another meets has its last token already.
        for start in len.saturating_sub(self.depth)..len {
            let end = if start + 1 == len { ROOT } else { self.sequences[sequence as usize].ends[start % self.depth] };
            let next = self.step(end, sequence, start, token);
            self.sequences[sequence as usize].ends[start % self.depth] = next;
        }
    }

    /// Moves the suffix of `sequence` that starts at `start` on by its last token. `end` is the suffix's node before.
    /// Returns its node afterwards.
    #[inline]
    fn step(&mut self, end: NodeIndex, sequence: u32, start: usize, token: u32) -> NodeIndex {
        if end & ALONE != 0 {
            return end;
        }
        let Some(child) = self.nodes.child(end, token) else {
            return self.nodes.add_child(end, token, Below::Text { sequence, start: start as u32 }) | ALONE;
        };
        self.nodes.increment(child);
        if let Below::Text { sequence: other, start: first } = self.nodes.get(child).below {
            let len = self.sequences[sequence as usize].tokens.len() - start;
            self.part(child, len, other, first as usize);
        }
        child
    }

    /// Makes the next token of a suffix a node of its own, because the suffix is no longer alone at `node`. The suffix
    /// starts at `start` of `sequence`, and `node` stands for its first `len` tokens.
    fn part(&mut self, node: NodeIndex, len: usize, sequence: u32, start: usize) {
        self.nodes.set_below(node, Below::Nothing);
        let tokens = &self.sequences[sequence as usize].tokens;
        let (next, num_tokens, mut end) = (tokens.get(start + len).copied(), tokens.len(), node);
        if let Some(token) = next.filter(|_| len < self.depth) {
            end = self.nodes.add_child(node, token, Below::Text { sequence, start: start as u32 }) | ALONE;
        }
        let ends = &mut self.sequences[sequence as usize].ends;
        if !ends.is_empty() && start + self.depth >= num_tokens {
            ends[start % self.depth] = end;
        }
    }

    /// Marks a sequence as finished: it accepts no more tokens.
    pub(super) fn finish(&mut self, sequence: u32) {
        self.sequences[sequence as usize].ends = Vec::new();
    }

    /// Removes a sequence and subtracts its counts.
    pub(super) fn remove(&mut self, sequence: u32) {
        let tokens = std::mem::take(&mut self.sequences[sequence as usize]).tokens;
        self.num_tokens -= tokens.len();
        self.free.push(sequence);
        for start in 0..tokens.len() {
            let (mut node, mut gone) = (ROOT, None);
            for &token in tokens[start..].iter().take(self.depth) {
                let Some(child) = self.nodes.child(node, token) else { break };
                let left = self.nodes.decrement(child);
                if let Some(gone) = gone.take() {
                    self.nodes.release(gone);
                }
                if left == 0 {
                    gone = Some(child);
                    if matches!(self.nodes.get(child).below, Below::Text { .. }) {
                        break;
                    }
                }
                node = child;
            }
            if let Some(gone) = gone {
                self.nodes.release(gone);
            }
        }
    }

    /// Returns the place of the last `len` tokens of a growing sequence. Returns `None` if the tokens occur only there,
    /// because then they have no continuation.
    #[inline]
    pub(super) fn end_of(&self, sequence: u32, len: usize) -> Option<Place> {
        let own = &self.sequences[sequence as usize];
        let node = own.ends[(own.tokens.len() - len) % self.depth];
        (node & ALONE == 0).then_some(Place { node, len })
    }

    /// Returns the place of `tokens` in the tree.
    pub(super) fn find(&self, tokens: impl IntoIterator<Item = u32>) -> Option<Place> {
        let mut place = Place { node: ROOT, len: 0 };
        for token in tokens {
            let node = match self.next(place) {
                Next::InText(next) => (next == Some(token)).then_some(place.node),
                Next::Children => self.nodes.child(place.node, token),
            };
            place = Place { node: node?, len: place.len + 1 };
        }
        Some(place)
    }

    /// Returns the number of occurrences of the substring at a place.
    #[inline]
    pub(super) fn count(&self, place: Place) -> u32 {
        self.nodes.get(place.node).count
    }

    /// Returns the most frequent token after a non-empty place, and the place that it leads to; of equally frequent
    /// tokens the one with the lowest id.
    #[inline]
    pub(super) fn follow(&self, place: Place) -> Option<(u32, Place)> {
        let len = place.len + 1;
        match self.next(place) {
            Next::InText(next) => Some((next?, Place { len, ..place })),
            Next::Children => {
                let node = self.nodes.most_frequent(place.node)?;
                Some((self.nodes.get(node).token, Place { node, len }))
            }
        }
    }

    #[inline]
    fn next(&self, place: Place) -> Next {
        let Below::Text { sequence, start } = self.nodes.get(place.node).below else { return Next::Children };
        let tokens = &self.sequences[sequence as usize].tokens;
        Next::InText(tokens.get(start as usize + place.len).copied().filter(|_| place.len < self.depth))
    }
}
