//! The record's first section: counts of the step, as a struct and by index. Python's `Header` is generated from it.

/// Number of elements in the header.
pub const HEADER_LEN: usize = 16;

macro_rules! header {
    ($($(#[doc = $doc:literal])* $field:ident: $type:ty = $index:ident,)*) => {
        /// Counts of a planned step, as in the record's header.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        #[non_exhaustive]
        pub struct StepHeader {
            $($(#[doc = $doc])* pub $field: $type,)*
        }

        /// Enumerates the elements, so that each constant is an element's index.
        #[allow(non_camel_case_types, clippy::upper_case_acronyms)]
        #[repr(usize)]
        enum Index { $($index,)* }

        $($(#[doc = $doc])* pub const $index: usize = Index::$index as usize;)*

        /// Names of the header's elements by index. The elements after them are 0.
        pub const HEADER_FIELDS: &[&str] = &[$(stringify!($field)),*];

        /// Descriptions of the header's elements by index.
        pub const HEADER_DOCS: &[&str] = &[$(concat!($($doc),*)),*];

        impl StepHeader {
            /// Reads the header of a planned record.
            ///
            /// # Panics
            /// If `record` is shorter than a header.
            pub fn read(record: &[i64]) -> Self {
                Self { $($field: record[$index] as $type,)* }
            }

            pub(super) fn write(&self, record: &mut [i64]) {
                record[..HEADER_LEN].fill(0);
                $(record[$index] = self.$field as i64;)*
            }
        }
    };
}

header! {
    /// Id of the step. Steps are numbered from 0.
    step_id: u64 = HEADER_STEP_ID,
    /// Decoding sequences. They come first.
    num_decode: usize = HEADER_NUM_DECODE,
    /// Prefill sequences, after the decoding sequences.
    num_prefill: usize = HEADER_NUM_PREFILL,
    /// Tokens of all prefill chunks.
    num_prefill_tokens: usize = HEADER_NUM_PREFILL_TOKENS,
    /// Draft catch-up chunks, including chunks of length 0.
    num_draft_chunks: usize = HEADER_NUM_DRAFT_CHUNKS,
    /// Tokens of all draft catch-up chunks.
    num_draft_tokens: usize = HEADER_NUM_DRAFT_TOKENS,
    /// Requests that get their row in this step.
    num_admitted: usize = HEADER_NUM_ADMITTED,
    /// Tokens of the admitted requests, all of them uploaded.
    num_upload_tokens: usize = HEADER_NUM_UPLOAD_TOKENS,
    /// Block table entries to set.
    num_block_updates: usize = HEADER_NUM_BLOCK_UPDATES,
    /// Largest K among the decoding sequences of this step.
    max_k: usize = HEADER_MAX_K,
    /// Requests that lost their row in this plan.
    num_preempted: usize = HEADER_NUM_PREEMPTED,
    /// Elements of the admitted requests' constraints.
    num_constraints: usize = HEADER_NUM_CONSTRAINTS,
    /// Snapshots of states that the step may write.
    num_snapshots: usize = HEADER_NUM_SNAPSHOTS,
    /// Elements of the record up to the last one that this step reads.
    used_len: usize = HEADER_USED_LEN,
}

const _: () = assert!(HEADER_FIELDS.len() <= HEADER_LEN, "the header is full");
