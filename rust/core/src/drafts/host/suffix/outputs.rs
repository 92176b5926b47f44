//! Outputs of running and ended requests: a tree of substrings for each cache salt. Evicts nothing by itself.

use std::collections::HashMap;

use rustc_hash::FxBuildHasher;

use super::tree::Tree;
use crate::hash::BlockHash;

/// Tree of one salt's outputs.
#[derive(Clone, Debug)]
struct Salted {
    tree: Tree,
    /// Number of outputs in the tree, those of running requests included.
    num_outputs: usize,
}

/// Trees of outputs by the hash of their cache salt, and their sizes together.
#[derive(Clone, Debug)]
pub(super) struct Outputs {
    depth: usize,
    trees: HashMap<BlockHash, Salted, FxBuildHasher>,
    pub(super) num_tokens: usize,
    pub(super) num_nodes: usize,
    pub(super) memory_bytes: usize,
}

impl Outputs {
    /// Makes an empty set for substrings of up to `depth` tokens.
    pub(super) fn new(depth: usize) -> Self {
        Self { depth, trees: HashMap::default(), num_tokens: 0, num_nodes: 0, memory_bytes: 0 }
    }

    /// Returns the tree of a salt; `None` if it has no output.
    pub(super) fn tree(&self, salt: BlockHash) -> Option<&Tree> {
        self.trees.get(&salt).map(|salted| &salted.tree)
    }

    /// Adds an output without tokens and returns its index in the salt's tree.
    pub(super) fn begin(&mut self, salt: BlockHash) -> u32 {
        let depth = self.depth;
        let salted = self.trees.entry(salt).or_insert_with(|| Salted { tree: Tree::new(depth), num_outputs: 0 });
        // What an empty tree takes is counted with its first output, and taken off with its last.
        let before = if salted.num_outputs == 0 { [0; 3] } else { sizes(&salted.tree) };
        salted.num_outputs += 1;
        let output = salted.tree.begin();
        let after = sizes(&salted.tree);
        self.resize(before, after);
        output
    }

    /// Appends tokens to an output that is not finished.
    pub(super) fn append(&mut self, salt: BlockHash, output: u32, tokens: &[u32]) {
        self.change(salt, |tree| tokens.iter().for_each(|&token| tree.append(output, token)));
    }

    /// Ends an output, which then no longer grows.
    pub(super) fn finish(&mut self, salt: BlockHash, output: u32) {
        self.change(salt, |tree| tree.finish(output));
    }

    /// Removes a finished output, and its tree if that was the last.
    pub(super) fn remove(&mut self, salt: BlockHash, output: u32) {
        self.change(salt, |tree| tree.remove(output));
        let Some(salted) = self.trees.get_mut(&salt) else { return };
        salted.num_outputs -= 1;
        if salted.num_outputs == 0 {
            let before = sizes(&salted.tree);
            self.trees.remove(&salt);
            self.resize(before, [0; 3]);
        }
    }

    fn change(&mut self, salt: BlockHash, change: impl FnOnce(&mut Tree)) {
        let Some(salted) = self.trees.get_mut(&salt) else { return };
        let before = sizes(&salted.tree);
        change(&mut salted.tree);
        let after = sizes(&salted.tree);
        self.resize(before, after);
    }

    fn resize(&mut self, before: [usize; 3], after: [usize; 3]) {
        self.num_tokens = self.num_tokens + after[0] - before[0];
        self.num_nodes = self.num_nodes + after[1] - before[1];
        self.memory_bytes = self.memory_bytes + after[2] - before[2];
    }
}

fn sizes(tree: &Tree) -> [usize; 3] {
    [tree.num_tokens(), tree.num_nodes(), tree.memory_bytes()]
}
