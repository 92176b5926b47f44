//! Settings of a drafter as names and numbers, the form in which other languages pass them.

use crate::error::{Error, Result};

/// The value of a setting.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Number {
    /// An integer.
    Integer(i64),
    /// A number with a fraction.
    Float(f64),
}

impl Number {
    fn text(self) -> String {
        match self {
            Self::Integer(value) => value.to_string(),
            Self::Float(value) => value.to_string(),
        }
    }
}

/// Settings that a drafter reads by name. Names that the drafter never reads are rejected at the end.
pub(crate) struct Settings<'a> {
    given: &'a [(&'a str, Number)],
    known: Vec<&'static str>,
}

impl<'a> Settings<'a> {
    pub(super) fn new(given: &'a [(&'a str, Number)]) -> Self {
        Self { given, known: Vec::new() }
    }

    fn get(&mut self, name: &'static str) -> Option<Number> {
        self.known.push(name);
        self.given.iter().find(|given| given.0 == name).map(|given| given.1)
    }

    /// Reads a non-negative integer setting; `default` if it is not given.
    ///
    /// # Errors
    /// [`Error::InvalidConfig`] unless it is an integer, 0 or above.
    pub(super) fn size(&mut self, name: &'static str, default: usize) -> Result<usize> {
        let wrong = |value: Number| Error::invalid_config(name, value.text(), "an integer of at least 0");
        match self.get(name) {
            None => Ok(default),
            Some(value @ Number::Integer(size)) => usize::try_from(size).map_err(|_| wrong(value)),
            Some(value) => Err(wrong(value)),
        }
    }

    /// Reads a setting that may be any number; `default` if it is not given.
    pub(super) fn number(&mut self, name: &'static str, default: f64) -> f64 {
        match self.get(name) {
            None => default,
            Some(Number::Integer(value)) => value as f64,
            Some(Number::Float(value)) => value,
        }
    }

    /// Checks that every given setting was read.
    ///
    /// # Errors
    /// [`Error::InvalidConfig`] for a name that the drafter did not read.
    pub(super) fn finish(self) -> Result<()> {
        match self.given.iter().find(|given| !self.known.contains(&given.0)) {
            None => Ok(()),
            Some((name, _)) => Err(Error::invalid_config("setting", name, format!("one of {}", self.known.join(", ")))),
        }
    }
}
