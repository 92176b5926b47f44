//! Nodes of a suffix tree and the order of their children. Stores no sequences.
//!
//! A node with one child stores it. A node with more children has a *family*: a binary heap with the most frequent
//! child on top, of equally frequent ones the lowest id. A hash table finds its children. The root's children are only
//! in the table, because no draft begins with the most frequent token of all.

use std::collections::HashMap;

use rustc_hash::FxBuildHasher;

/// Index of a node in the slab.
pub(super) type NodeIndex = u32;
/// Root node, which stands for the empty substring.
pub(super) const ROOT: NodeIndex = 0;

/// Content below a node: text, one child, or a family of children.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Below {
    Nothing,
    /// Continuation in the text of the only suffix that reaches the node: the suffix's sequence and its start in it.
    Text {
        sequence: u32,
        start: u32,
    },
    Child(NodeIndex),
    Family(u32),
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Node {
    pub(super) token: u32,
    /// Number of suffixes that reach the node; 0 for the root.
    pub(super) count: u32,
    pub(super) below: Below,
    parent: NodeIndex,
    /// Index of the node in its parent's family.
    place: u32,
}

/// Bytes of a hash table entry: key and value, one control byte, and a share of the seventh of the table that is empty.
const TABLE_ENTRY_BYTES: usize = 15;

#[derive(Clone, Debug)]
pub(super) struct Nodes {
    slab: Vec<Node>,
    free: Vec<NodeIndex>,
    families: Vec<Vec<NodeIndex>>,
    free_families: Vec<u32>,
    /// Number of places in all families, to compute their memory.
    num_places: usize,
    /// Children in families and of the root, by parent and token.
    table: HashMap<(NodeIndex, u32), NodeIndex, FxBuildHasher>,
}

impl Nodes {
    pub(super) fn new() -> Self {
        let root = Node { token: 0, count: 0, below: Below::Nothing, parent: ROOT, place: 0 };
        Self {
            slab: vec![root],
            free: Vec::new(),
            families: Vec::new(),
            free_families: Vec::new(),
            num_places: 0,
            table: HashMap::default(),
        }
    }

    pub(super) fn get(&self, index: NodeIndex) -> &Node {
        &self.slab[index as usize]
    }

    pub(super) fn len(&self) -> usize {
        self.slab.len() - self.free.len()
    }

    pub(super) fn memory_bytes(&self) -> usize {
        self.len() * size_of::<Node>()
            + self.table.len() * TABLE_ENTRY_BYTES
            + self.num_places * size_of::<NodeIndex>()
            + (self.families.len() - self.free_families.len()) * size_of::<Vec<NodeIndex>>()
    }

    #[inline]
    pub(super) fn child(&self, parent: NodeIndex, token: u32) -> Option<NodeIndex> {
        match self.slab[parent as usize].below {
            Below::Child(child) => Some(child).filter(|&child| self.slab[child as usize].token == token),
            Below::Nothing if parent == ROOT => self.table.get(&(parent, token)).copied(),
            Below::Family(_) => self.table.get(&(parent, token)).copied(),
            Below::Nothing | Below::Text { .. } => None,
        }
    }

    /// Returns the most frequent child of a node that is not the root; of equally frequent children the one with the
    /// lowest token id.
    #[inline]
    pub(super) fn most_frequent(&self, parent: NodeIndex) -> Option<NodeIndex> {
        match self.slab[parent as usize].below {
            Below::Child(child) => Some(child),
            Below::Family(family) => self.families[family as usize].first().copied(),
            Below::Nothing | Below::Text { .. } => None,
        }
    }

    /// Adds a child that one suffix reaches. `parent` must not have [`Below::Text`].
    pub(super) fn add_child(&mut self, parent: NodeIndex, token: u32, below: Below) -> NodeIndex {
        let node = Node { token, count: 1, below, parent, place: 0 };
        let child = if let Some(index) = self.free.pop() {
            self.slab[index as usize] = node;
            index
        } else {
            self.slab.push(node);
            (self.slab.len() - 1) as NodeIndex
        };
        match self.slab[parent as usize].below {
            _ if parent == ROOT => {
                self.table.insert((ROOT, token), child);
            }
            Below::Nothing => self.slab[parent as usize].below = Below::Child(child),
            Below::Child(first) => {
                let family = self.free_families.pop().unwrap_or_else(|| {
                    self.families.push(Vec::new());
                    (self.families.len() - 1) as u32
                });
                self.slab[parent as usize].below = Below::Family(family);
                self.join_family(parent, family, first);
                self.join_family(parent, family, child);
            }
            Below::Family(family) => self.join_family(parent, family, child),
            Below::Text { .. } => debug_assert!(false, "the text below a node becomes a child before another comes"),
        }
        child
    }

    fn join_family(&mut self, parent: NodeIndex, family: u32, child: NodeIndex) {
        let members = &mut self.families[family as usize];
        self.slab[child as usize].place = members.len() as u32;
        members.push(child);
        self.num_places += 1;
        self.table.insert((parent, self.slab[child as usize].token), child);
        self.rise(child);
    }

    pub(super) fn set_below(&mut self, index: NodeIndex, below: Below) {
        self.slab[index as usize].below = below;
    }

    /// Counts one more suffix that reaches a node.
    #[inline]
    pub(super) fn increment(&mut self, index: NodeIndex) {
        self.slab[index as usize].count += 1;
        self.rise(index);
    }

    /// Counts one suffix fewer that reaches a node and returns the remaining number. At 0 the node is removed from its
    /// parent, and the caller releases it.
    pub(super) fn decrement(&mut self, index: NodeIndex) -> u32 {
        let node = &mut self.slab[index as usize];
        node.count -= 1;
        let Node { token, count, parent, place, .. } = *node;
        if count > 0 {
            self.sink(index);
            return count;
        }
        match self.slab[parent as usize].below {
            _ if parent == ROOT => {
                self.table.remove(&(ROOT, token));
            }
            Below::Family(family) => {
                self.table.remove(&(parent, token));
                let members = &mut self.families[family as usize];
                members.swap_remove(place as usize);
                self.num_places -= 1;
                let (moved, emptied) = (members.get(place as usize).copied(), members.is_empty());
                if let Some(moved) = moved {
                    self.slab[moved as usize].place = place;
                    self.rise(moved);
                    self.sink(moved);
                }
                if emptied {
                    self.free_families.push(family);
                    self.slab[parent as usize].below = Below::Nothing;
                }
            }
            _ => self.slab[parent as usize].below = Below::Nothing,
        }
        0
    }

    /// Frees a node that no suffix reaches and that has no children.
    pub(super) fn release(&mut self, index: NodeIndex) {
        debug_assert!(
            !matches!(self.slab[index as usize].below, Below::Child(_) | Below::Family(_)),
            "it has children"
        );
        self.free.push(index);
    }

    fn family_of(&self, index: NodeIndex) -> Option<u32> {
        let parent = self.slab[index as usize].parent;
        match self.slab[parent as usize].below {
            Below::Family(family) => Some(family),
            _ => None,
        }
    }

    fn before(&self, a: NodeIndex, b: NodeIndex) -> bool {
        let (a, b) = (&self.slab[a as usize], &self.slab[b as usize]);
        (b.count, a.token) < (a.count, b.token)
    }

    /// Moves a node up in its family until the heap is in order.
    #[inline]
    fn rise(&mut self, index: NodeIndex) {
        if self.slab[index as usize].place == 0 {
            return;
        }
        let Some(family) = self.family_of(index) else { return };
        let mut place = self.slab[index as usize].place as usize;
        while place > 0 {
            let above = (place - 1) / 2;
            let other = self.families[family as usize][above];
            if !self.before(index, other) {
                break;
            }
            self.put(family, place, other);
            place = above;
        }
        self.put(family, place, index);
    }

    /// Moves a node down in its family until the heap is in order.
    fn sink(&mut self, index: NodeIndex) {
        let Some(family) = self.family_of(index) else { return };
        let (mut place, len) = (self.slab[index as usize].place as usize, self.families[family as usize].len());
        loop {
            let (left, right) = (2 * place + 1, 2 * place + 2);
            if left >= len {
                break;
            }
            let members = &self.families[family as usize];
            let mut best = left;
            if right < len && self.before(members[right], members[left]) {
                best = right;
            }
            let other = members[best];
            if !self.before(other, index) {
                break;
            }
            self.put(family, place, other);
            place = best;
        }
        self.put(family, place, index);
    }

    fn put(&mut self, family: u32, place: usize, index: NodeIndex) {
        self.families[family as usize][place] = index;
        self.slab[index as usize].place = place as u32;
    }
}
