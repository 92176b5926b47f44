//! Stop strings: where one ends a text, and how much of a text may yet become one.

/// Stop strings of one request, none of them empty.
#[derive(Clone, Debug, Default)]
pub(crate) struct Stops {
    strings: Vec<String>,
    longest: usize,
}

/// A stop string in a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Found {
    pub(crate) end: usize,
    pub(crate) start: usize,
    /// Which of the strings.
    pub(crate) index: usize,
}

impl Stops {
    pub(crate) fn new(strings: Vec<String>) -> Self {
        let longest = strings.iter().map(String::len).max().unwrap_or(0);
        Self { strings, longest }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.strings.is_empty()
    }

    /// The stop string that ends first behind byte `from` of `text`; of those the longest.
    pub(crate) fn find(&self, text: &str, from: usize) -> Option<Found> {
        let text = text.as_bytes();
        let found = self.strings.iter().enumerate().filter_map(|(index, stop)| {
            let stop = stop.as_bytes();
            let first = (from + 1).saturating_sub(stop.len());
            let start = first + position(&text[first..], stop)?;
            Some(Found { end: start + stop.len(), start, index })
        });
        found.min()
    }

    /// Bytes of the longest end of `text` that is the beginning of a stop string, but not all of it.
    pub(crate) fn held_back(&self, text: &str) -> usize {
        let text = text.as_bytes();
        let is_beginning = |&len: &usize| {
            let tail = &text[text.len() - len..];
            self.strings.iter().any(|stop| stop.len() > len && stop.as_bytes().starts_with(tail))
        };
        (1..=self.longest.saturating_sub(1).min(text.len())).rev().find(is_beginning).unwrap_or(0)
    }
}

/// Where `needle` first is in `text`. What is searched is a few tokens' text, too short for anything clever to pay.
fn position(text: &[u8], needle: &[u8]) -> Option<usize> {
    let (&first, rest) = needle.split_first()?;
    let last = text.len().checked_sub(needle.len())?;
    (0..=last).find(|&at| text[at] == first && &text[at + 1..at + needle.len()] == rest)
}
