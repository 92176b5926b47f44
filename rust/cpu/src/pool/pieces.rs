//! Distribution of a job's pieces: each thread claims its own pieces from the first on, then others' pieces from the
//! last on.

use super::Line;
use std::cell::Cell;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

/// Pieces of a job that no thread has claimed: a range for each participant, with its start in the low 32 bits of a
/// word.
#[derive(Default)]
pub(super) struct Unclaimed(Vec<Line<AtomicU64>>);

fn pack(range: &Range<usize>) -> u64 {
    range.start as u64 | (range.end as u64) << 32
}

fn unpack(word: u64) -> Range<usize> {
    (word & 0xFFFF_FFFF) as usize..(word >> 32) as usize
}

impl Unclaimed {
    pub(super) fn new(participants: usize) -> Self {
        Self((0..participants).map(|_| Line::default()).collect())
    }

    /// Assigns the pieces `first[t]..first[t + 1]` to each participant t. No thread may claim pieces meanwhile.
    pub(super) fn reset(&self, first: &[usize]) {
        for (word, bounds) in self.0.iter().zip(first.windows(2)) {
            word.store(pack(&(bounds[0]..bounds[1])), Ordering::Relaxed);
        }
    }

    /// Takes the first or the last piece of participant `of`. Each piece of a job is taken once, because a range only
    /// shrinks. The atomic is relaxed, because the inputs of a piece were written before its job began.
    fn take(&self, of: usize, last: bool) -> Option<usize> {
        let mut word = self.0[of].load(Ordering::Relaxed);
        loop {
            let Range { start, end } = unpack(word);
            if start >= end {
                return None;
            }
            let (piece, left) = if last { (end - 1, start..end - 1) } else { (start, start + 1..end) };
            match self.0[of].compare_exchange_weak(word, pack(&left), Ordering::Relaxed, Ordering::Relaxed) {
                Ok(_) => return Some(piece),
                Err(now) => word = now,
            }
        }
    }

    /// Claims one of the participant's own pieces, or else one of another participant's.
    fn claim(&self, participant: usize, participants: usize) -> Option<usize> {
        let mut others = (1..participants).map(|i| (participant + i) % participants);
        self.take(participant, false).or_else(|| others.find_map(|of| self.take(of, true)))
    }
}

/// Iterator over the pieces that one participant claims, one by one.
pub(crate) struct Pieces<'a>(Source<'a>);

enum Source<'a> {
    /// All pieces, if there is no other participant.
    All(Range<usize>),
    Claimed(Claimed<'a>),
}

struct Claimed<'a> {
    unclaimed: &'a Unclaimed,
    participant: usize,
    participants: usize,
    next: Option<usize>,
    /// Number of pieces claimed so far.
    count: &'a Cell<usize>,
}

impl Claimed<'_> {
    fn claim(&mut self) {
        self.next = self.unclaimed.claim(self.participant, self.participants);
        self.count.set(self.count.get() + usize::from(self.next.is_some()));
    }
}

impl<'a> Pieces<'a> {
    /// Makes an iterator over all pieces for the only participant.
    pub(super) fn all(pieces: Range<usize>) -> Self {
        Self(Source::All(pieces))
    }

    /// Makes an iterator that claims pieces and adds their number to `count`. Returns `None` if no piece is left.
    pub(super) fn claimed(
        unclaimed: &'a Unclaimed,
        participant: usize,
        participants: usize,
        count: &'a Cell<usize>,
    ) -> Option<Self> {
        let mut claimed = Claimed { unclaimed, participant, participants, next: None, count };
        claimed.claim();
        claimed.next.is_some().then_some(Self(Source::Claimed(claimed)))
    }
}

impl Iterator for Pieces<'_> {
    type Item = usize;

    #[inline]
    fn next(&mut self) -> Option<usize> {
        match &mut self.0 {
            Source::All(pieces) => pieces.next(),
            Source::Claimed(claimed) => {
                if claimed.next.is_none() {
                    claimed.claim();
                }
                claimed.next.take()
            }
        }
    }
}
