//! A tree of all substrings of up to D tokens of some sequences, with how often each occurs. Sequences grow and go. Drafts nothing.
//!
//! A node stands for a substring; the nodes on the way down to it are its prefixes. Of a suffix that shares its last node with no
//! other, the rest stays in the text, so a text without repetitions takes about one node a token, and one that is there twice at most
//! D for two. An append moves the D suffixes that still grow a token down: those with their last node to themselves stay where they
//! are, the others cost a look in a hash table each.

use super::nodes::{Below, NodeIndex, Nodes, ROOT};

/// Of a suffix's end: no other suffix reaches the node, so what follows is in the text. Kept here, too, because nodes of old suffixes are
/// rarely in a processor's caches.
const ALONE: NodeIndex = 1 << 31;

/// A sequence of tokens in the tree.
#[derive(Clone, Debug, Default)]
struct Sequence {
    tokens: Vec<u32>,
    /// While it grows, `[D]`: the last node of the suffix that starts at p, at p % D, and [`ALONE`]. Empty once it has ended.
    ends: Vec<NodeIndex>,
}

/// A tree of substrings.
#[derive(Clone, Debug)]
pub(super) struct Tree {
    depth: usize,
    nodes: Nodes,
    sequences: Vec<Sequence>,
    free: Vec<u32>,
    num_tokens: usize,
}

/// A substring in the tree: at a node, or behind one in the text of its only suffix.
#[derive(Clone, Copy, Debug)]
pub(super) struct Place {
    node: NodeIndex,
    /// Tokens of the substring.
    len: usize,
}

/// What says what follows a place.
enum Next {
    /// The text of its only suffix: the token, if there is one.
    InText(Option<u32>),
    Children,
}

impl Tree {
    /// An empty tree for substrings of up to `depth` tokens.
    pub(super) fn new(depth: usize) -> Self {
        Self { depth, nodes: Nodes::new(), sequences: Vec::new(), free: Vec::new(), num_tokens: 0 }
    }

    pub(super) fn num_tokens(&self) -> usize {
        self.num_tokens
    }

    pub(super) fn num_nodes(&self) -> usize {
        self.nodes.len()
    }

    /// Bytes in use; allocations are up to twice that, as of vectors that have grown.
    pub(super) fn memory_bytes(&self) -> usize {
        let live = self.sequences.len() - self.free.len();
        self.nodes.memory_bytes() + self.num_tokens * size_of::<u32>() + live * size_of::<Sequence>()
    }

    /// A new sequence without tokens.
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

    /// Adds a token to a sequence that grows.
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

    /// Moves the suffix of `sequence` at `start`, which ended at `end`, on by its last token.
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

    /// The suffix of `sequence` at `start` is no longer alone at `node`, `len` tokens on: its next token becomes a node of its own.
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

    /// The sequence grows no more.
    pub(super) fn finish(&mut self, sequence: u32) {
        self.sequences[sequence as usize].ends = Vec::new();
    }

    /// Takes a sequence and all that it counted out.
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

    /// Where the last `len` tokens of a sequence that grows are, if something may follow them: nothing does where they occur there alone.
    #[inline]
    pub(super) fn end_of(&self, sequence: u32, len: usize) -> Option<Place> {
        let own = &self.sequences[sequence as usize];
        let node = own.ends[(own.tokens.len() - len) % self.depth];
        (node & ALONE == 0).then_some(Place { node, len })
    }

    /// Where `tokens` are in the tree.
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

    /// How often the substring at a place occurs.
    #[inline]
    pub(super) fn count(&self, place: Place) -> u32 {
        self.nodes.get(place.node).count
    }

    /// The most frequent token behind a place that is not the empty one, and where it leads; of equally frequent ones the lowest id.
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
