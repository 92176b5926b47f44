//! Stop strings: the end of a text at one, and the part of a text that may yet become one.

/// Stop strings of one request, none of them empty.
#[derive(Clone, Debug, Default)]
pub(crate) struct Stops {
    strings: Vec<String>,
    longest: usize,
}

/// Occurrence of a stop string in a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Found {
    pub(crate) end: usize,
    pub(crate) start: usize,
    /// Index of the stop string.
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

    /// Finds the stop string that ends first after byte `from` of `text`; of several with that end, the longest.
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

    /// Returns the number of bytes in the longest end of `text` that is a proper beginning of a stop string.
    pub(crate) fn held_back(&self, text: &str) -> usize {
        let text = text.as_bytes();
        let is_beginning = |&len: &usize| {
            let tail = &text[text.len() - len..];
            self.strings.iter().any(|stop| stop.len() > len && stop.as_bytes().starts_with(tail))
        };
        (1..=self.longest.saturating_sub(1).min(text.len())).rev().find(is_beginning).unwrap_or(0)
    }
}

/// Returns the first position of `needle` in `text`. The text has only a few tokens, so a more complex search would not
/// pay.
fn position(text: &[u8], needle: &[u8]) -> Option<usize> {
    let (&first, rest) = needle.split_first()?;
    let last = text.len().checked_sub(needle.len())?;
    (0..=last).find(|&at| text[at] == first && &text[at + 1..at + needle.len()] == rest)
}
