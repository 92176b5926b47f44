//! Doubly linked lists threaded through one `Vec`: every element is in at most one list, every operation is O(1).

const NONE: u32 = u32::MAX;

#[derive(Clone, Copy, Debug)]
struct Link {
    prev: u32,
    next: u32,
}

/// One of the lists of a [`Lists`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ListId {
    /// Blocks whose content nobody can find any more.
    Free,
    /// Unreferenced blocks whose content is in the prefix cache, least recently used first.
    Cached,
}

/// Two lists over the elements `0..n`; the sentinels are the elements n and n + 1.
#[derive(Clone, Debug)]
pub(super) struct Lists {
    links: Vec<Link>,
    len: [usize; 2],
}

impl Lists {
    /// All elements in no list.
    pub(super) fn new(elements: usize) -> Self {
        let mut links = vec![Link { prev: NONE, next: NONE }; elements];
        for sentinel in [elements as u32, elements as u32 + 1] {
            links.push(Link { prev: sentinel, next: sentinel });
        }
        Self { links, len: [0; 2] }
    }

    fn sentinel(&self, list: ListId) -> u32 {
        (self.links.len() - 2) as u32 + list as u32
    }

    pub(super) fn len(&self, list: ListId) -> usize {
        self.len[list as usize]
    }

    pub(super) fn push_front(&mut self, list: ListId, element: u32) {
        let sentinel = self.sentinel(list);
        self.insert(list, element, sentinel, self.links[sentinel as usize].next);
    }

    pub(super) fn push_back(&mut self, list: ListId, element: u32) {
        let sentinel = self.sentinel(list);
        self.insert(list, element, self.links[sentinel as usize].prev, sentinel);
    }

    fn insert(&mut self, list: ListId, element: u32, prev: u32, next: u32) {
        debug_assert!(!self.contains(element));
        self.links[element as usize] = Link { prev, next };
        self.links[prev as usize].next = element;
        self.links[next as usize].prev = element;
        self.len[list as usize] += 1;
    }

    pub(super) fn pop_front(&mut self, list: ListId) -> Option<u32> {
        let first = self.links[self.sentinel(list) as usize].next;
        if first == self.sentinel(list) {
            return None;
        }
        self.remove(list, first);
        Some(first)
    }

    /// Takes `element` out of `list`, which must hold it.
    pub(super) fn remove(&mut self, list: ListId, element: u32) {
        let Link { prev, next } = self.links[element as usize];
        self.links[prev as usize].next = next;
        self.links[next as usize].prev = prev;
        self.links[element as usize] = Link { prev: NONE, next: NONE };
        self.len[list as usize] -= 1;
    }

    /// Whether `element` is in either list.
    pub(super) fn contains(&self, element: u32) -> bool {
        self.links[element as usize].next != NONE
    }

    /// The elements of `list` in order; stops after one more than exist if the links form a wrong cycle.
    pub(super) fn iter(&self, list: ListId) -> impl Iterator<Item = u32> + '_ {
        let sentinel = self.sentinel(list);
        std::iter::successors(Some(self.links[sentinel as usize].next), |&at| {
            self.links.get(at as usize).map(|link| link.next)
        })
        .take_while(move |&at| at != sentinel)
        .take(self.links.len())
    }
}
