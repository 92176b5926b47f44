//! Drafters that run on the host: the interface that each implements, and the table of all. A new drafter is a file
//! here and a row in the table.

mod grammar;
mod ngram;
mod prediction;
mod settings;
mod suffix;

use crate::error::{Error, Result};
use crate::hash::BlockHash;
pub use grammar::GrammarProposer;
pub use ngram::NgramProposer;
pub use prediction::{PredictionProposer, PredictionSettings};
pub use settings::Number;
pub(crate) use settings::Settings;
pub use suffix::{SuffixCache, SuffixDraft, SuffixSettings, SuffixStats};

/// Settings of a drafter on the host, from which a scheduler starts it.
pub(crate) trait HostSettings: Copy {
    /// Type that proposes drafts with these settings.
    type Proposer: HostProposer;

    /// Reads the settings by name; a setting that is not given has its default.
    ///
    /// # Errors
    /// [`Error::InvalidConfig`] naming the first setting outside its range.
    fn read(given: &mut Settings<'_>) -> Result<Self>;

    /// Makes a proposer that has not seen any request.
    ///
    /// # Errors
    /// [`Error::InvalidConfig`] naming the first setting outside its range.
    fn start(self) -> Result<Self::Proposer>;
}

/// Drafter on the host, as a scheduler runs it. A failed call costs one request its drafts in one step.
pub(crate) trait HostProposer {
    /// Writes drafts that may follow `text` to the start of `drafts`.
    fn propose(&mut self, text: Text<'_>, drafts: &mut [u32]) -> Result<Proposal>;

    /// Writes drafts that may follow `text` and `more` to the start of `drafts`. `more` are drafts of another drafter,
    /// which are not part of the request's text yet.
    fn propose_after(&mut self, text: Text<'_>, more: &[u32], drafts: &mut [u32]) -> Result<Proposal>;

    /// Removes the request of `text`, which has ended. Also called for requests that the drafter has never seen.
    fn end(&mut self, _text: Text<'_>) -> Result<()> {
        Ok(())
    }
}

/// View of a request that drafters on the host get.
#[derive(Clone, Copy)]
pub(crate) struct Text<'a> {
    /// Number of the request, unique in its scheduler.
    pub(crate) id: i64,
    /// Hash of the request's cache salt. A request never gets drafts from a request with another salt.
    pub(crate) salt: BlockHash,
    /// Tokens of the prompt, followed by the output.
    pub(crate) tokens: &'a [u32],
    /// Number of `tokens` that belong to the prompt.
    pub(crate) prompt_len: usize,
    /// Tokens that the request's grammar forces or makes likely after `tokens`.
    pub(crate) grammar_drafts: &'a [u32],
    /// Tokens that the request predicts for its output.
    pub(crate) prediction: &'a [u32],
}

impl<'a> Text<'a> {
    /// Returns the tokens after the prompt.
    fn output(&self) -> &'a [u32] {
        &self.tokens[self.prompt_len..]
    }
}

/// Length of a proposal and of the match that led to it. The proposed tokens are returned separately.
pub(crate) struct Proposal {
    /// Number of proposed draft tokens; 0 for none.
    pub(crate) len: usize,
    /// Number of tokens at the end of the text that matched. Acceptance is counted separately for short and long
    /// matches.
    pub(crate) match_len: usize,
}

impl Proposal {
    /// Proposal of no drafts.
    pub(crate) const NONE: Self = Self { len: 0, match_len: 0 };
}

macro_rules! table {
    ($($(#[$doc:meta])* $kind:ident = $number:literal, $method:ident: $settings:ty;)+) => {
        /// Drafters that propose on the host while a step is planned, without any KV: [`crate::Scheduler::plan`]
        /// writes their drafts into the record. They need the results of the last step, so at most one step can be
        /// in flight.
        ///
        /// If a scheduler has several drafters, including one on the device, each request gets in each step the
        /// drafter that promises the most.
        #[derive(Clone, Copy, Debug, Default, PartialEq)]
        pub struct HostDrafters {
            $($(#[$doc])* pub $method: Option<$settings>,)+
        }

        /// Kind of a drafter; its discriminant is the drafter's number in the record and in the statistics.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        #[repr(u8)]
        #[non_exhaustive]
        pub enum DrafterKind {
            /// The drafter on the device ([`crate::Drafter`]). Sequences without drafts have this kind too.
            #[default]
            Device = 0,
            $($(#[$doc])* $kind = $number,)+
        }

        impl DrafterKind {
            /// Kinds of drafters that run on the host.
            pub(crate) const ON_HOST: [Self; [$($number),+].len()] = [$(Self::$kind),+];
            /// All kinds of drafters, by number.
            pub const ALL: [Self; Self::ON_HOST.len() + 1] = [Self::Device, $(Self::$kind),+];
            /// Names of the drafters by number: `device`, then the methods of drafters on the host.
            pub const NAMES: [&str; Self::ALL.len()] = ["device", $(stringify!($method)),+];
        }

        impl HostDrafters {
            /// Returns whether the drafter on the host of this kind is set; false for [`DrafterKind::Device`].
            pub(crate) fn has(&self, kind: DrafterKind) -> bool {
                match kind {
                    DrafterKind::Device => false,
                    $(DrafterKind::$kind => self.$method.is_some(),)+
                }
            }

            /// Adds the drafter named `method`, with settings by name. Returns whether it replaced a drafter of the
            /// same method.
            ///
            /// # Errors
            /// [`Error::InvalidConfig`] for a name that does not exist, and for the first setting outside its range.
            pub fn add(&mut self, method: &str, given: &[(&str, Number)]) -> Result<bool> {
                let mut given = Settings::new(given);
                let replaced = match method {
                    $(stringify!($method) => {
                        let settings = <$settings as HostSettings>::read(&mut given)?;
                        given.finish()?;
                        self.$method.replace(settings).is_some()
                    })+
                    _ => {
                        let allowed = DrafterKind::NAMES[1..].join(" or ");
                        return Err(Error::invalid_config("method", method, allowed));
                    }
                };
                Ok(replaced)
            }
        }

        /// Running proposers of a scheduler's drafters on the host.
        #[derive(Clone, Debug, Default)]
        pub(crate) struct HostProposers {
            $(pub(crate) $method: Option<<$settings as HostSettings>::Proposer>,)+
        }

        impl HostProposers {
            /// Starts a proposer for each of `drafters`.
            ///
            /// # Errors
            /// [`Error::InvalidConfig`] naming the first setting outside its range.
            pub(crate) fn start(drafters: &HostDrafters) -> Result<Self> {
                Ok(Self { $($method: drafters.$method.map(HostSettings::start).transpose()?,)+ })
            }

            /// Calls `each` with every proposer that runs, in the order of the table of drafters.
            pub(crate) fn each(&mut self, mut each: impl FnMut(DrafterKind, &mut dyn HostProposer)) {
                $(if let Some(proposer) = &mut self.$method {
                    each(DrafterKind::$kind, proposer);
                })+
            }
        }
    };
}

table! {
    /// Prompt lookup: finds drafts in a request's own tokens.
    Ngram = 1, ngram: NgramProposer;
    /// Suffix decoding: counts the continuations of a text in the request's own tokens and in outputs of other
    /// requests. It sees only outputs of requests for which it may have drafted.
    Suffix = 2, suffix: SuffixSettings;
    /// Text that a request predicts for its own output. Only requests that have such a text get its drafts.
    Prediction = 3, prediction: PredictionSettings;
    /// Tokens that a request's grammar forces, continued by another drafter. Only requests with a grammar get them.
    Grammar = 4, grammar: GrammarProposer;
}

impl DrafterKind {
    /// Returns whether drafts of this kind come with a request. The scheduler chooses their number by its own
    /// statistics, and no planner counts them: they say nothing about other requests.
    pub(crate) fn comes_with_requests(self) -> bool {
        matches!(self, Self::Prediction | Self::Grammar)
    }
}

impl HostDrafters {
    /// Makes a set of drafters with prompt lookup alone.
    pub fn ngram(proposer: NgramProposer) -> Self {
        Self { ngram: Some(proposer), ..Self::default() }
    }

    /// Makes a set of drafters with suffix decoding alone.
    pub fn suffix(settings: SuffixSettings) -> Self {
        Self { suffix: Some(settings), ..Self::default() }
    }

    /// Returns whether there is a drafter whose drafts come with requests, or with `false` one that serves every
    /// request.
    pub(crate) fn has_any(&self, comes_with_requests: bool) -> bool {
        let mut kinds = DrafterKind::ON_HOST.into_iter();
        kinds.any(|kind| self.has(kind) && kind.comes_with_requests() == comes_with_requests)
    }

    /// Returns whether there is any drafter on the host.
    pub fn is_some(&self) -> bool {
        *self != Self::default()
    }

    /// Returns the first drafter on the host in the table, or [`DrafterKind::Device`] without any. Schedulers with only
    /// one drafter use it for every request.
    pub(crate) fn first(&self) -> DrafterKind {
        DrafterKind::ON_HOST.into_iter().find(|&kind| self.has(kind)).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::{DrafterKind, HostDrafters, NgramProposer, Number, SuffixSettings};

    #[test]
    fn kinds_are_numbered_as_the_table_lists_them() {
        assert!(DrafterKind::ALL.iter().enumerate().all(|(number, &kind)| kind as usize == number));
        assert_eq!(DrafterKind::ALL[1..], DrafterKind::ON_HOST);
    }

    #[test]
    fn settings_are_read_by_name_and_have_defaults() {
        let mut drafters = HostDrafters::default();
        assert!(!drafters.add("ngram", &[("prompt_lookup_min", Number::Integer(2))]).unwrap());
        assert!(!drafters.add("suffix", &[("max_spec_factor", Number::Integer(2))]).unwrap());
        let suffix = SuffixSettings { max_spec_factor: 2.0, ..SuffixSettings::default() };
        assert_eq!((drafters.ngram, drafters.suffix), (Some(NgramProposer::new(2, 5).unwrap()), Some(suffix)));
        assert!(drafters.add("ngram", &[]).unwrap(), "it was there");
    }

    #[test]
    fn an_unknown_setting_changes_no_drafter() {
        let mut drafters = HostDrafters::ngram(NgramProposer::new(2, 5).unwrap());
        let before = drafters;
        let given = [("prompt_lookup_max", Number::Integer(7)), ("depth", Number::Integer(1))];
        assert!(drafters.add("ngram", &given).is_err());
        assert_eq!(drafters, before);
    }

    #[test]
    fn wrong_names_and_values_are_rejected() {
        let rejected =
            |method, name, value| HostDrafters::default().add(method, &[(name, value)]).expect_err("wrong").to_string();
        assert_eq!(
            rejected("device", "", Number::Integer(1)),
            "method=device: must be ngram or suffix or prediction or grammar"
        );
        let unknown = rejected("ngram", "prompt_lookup_mix", Number::Integer(1));
        assert_eq!(unknown, "setting=prompt_lookup_mix: must be one of prompt_lookup_min, prompt_lookup_max");
        let negative = rejected("suffix", "max_memory_bytes", Number::Integer(-1));
        assert_eq!(negative, "max_memory_bytes=-1: must be an integer of at least 0");
        assert!(rejected("suffix", "max_tree_depth", Number::Float(2.5)).starts_with("max_tree_depth=2.5: "));
        assert!(rejected("suffix", "min_token_prob", Number::Float(1.5)).starts_with("min_token_prob=1.5: "));
        assert!(rejected("ngram", "prompt_lookup_max", Number::Integer(0)).starts_with("prompt_lookup_max=0: "));
    }
}
