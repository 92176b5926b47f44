//! Drafts of a draft model with another tokenizer, compared as text: string-level exact match (SLEM, Timor et al.
//! 2025).
//!
//! The draft model generates its own tokens, and the host translates their text to the target's tokens. The target
//! draws every token, and a draft is accepted if it equals that token. So the output does not depend on how the drafted
//! text is divided into tokens. Each state row has draft KV for the row's text in the draft model's ids. When the
//! text changes, the KV of the ids that are still its beginning is kept.

use crate::error::{Result, check_len};
use crate::{Entries, Output, Pass};
use specrs_core::scheduler::StepHeader;
use specrs_core::scheduler::layout::{FLAG_NOTHING_DRAFTED, RecordView};

use super::{Facts, Host, Iteration, Model, RowState};

/// Maximum number of tokens of a text that one pass feeds.
const CHUNK: usize = 512;

/// Minimum number of ids that each text is fed in a step, whatever the others take. A text that lacks at most this many
/// ids is fed to its end, so it drafts in any step. So many neighbouring positions cost about as much as one.
const NEAR: usize = 16;

/// Limits of a draft model whose drafts are compared as text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TextLimits {
    /// Maximum number of the draft model's tokens in a text. Row r of state has blocks `r * B` to `r * B + B - 1` of
    /// its KV cache, where B blocks hold that many tokens.
    pub context: usize,
    /// Approximate maximum number of tokens that the draft model is fed in one step.
    pub max_fed: usize,
    /// Number of tokens in a block of the draft model's KV cache.
    pub block_size: usize,
}

/// State of the draft model for each row's text.
#[derive(Debug)]
pub(super) struct TextDrafts {
    limits: TextLimits,
    rows: Vec<Row>,
}

#[derive(Clone, Debug, Default)]
struct Row {
    /// Draft model's ids whose KV is valid.
    fed: Vec<i64>,
    /// Number of the cache salt of the request that was admitted last.
    salt: i64,
}

/// Text that is drafted for in this step.
struct Plan {
    row: usize,
    /// Draft model's ids of the text.
    own: Vec<i64>,
    /// Number of ids that have KV at the end of this step.
    end: usize,
    /// Number of drafts wanted.
    k: usize,
    drafted: Vec<i64>,
    /// Index of the sequence in the iteration's list of sequences.
    index: usize,
}

impl Plan {
    fn goes_on(&self, fed: usize) -> bool {
        if self.end == self.own.len() { self.drafted.len() < self.k } else { fed < self.end }
    }
}

impl TextDrafts {
    pub(super) fn new(limits: TextLimits, rows: usize) -> Self {
        Self { limits, rows: vec![Row::default(); rows] }
    }

    /// Forgets the draft KV of rows whose new request has another cache salt than the row's previous request.
    pub(super) fn admit(&mut self, record: &RecordView<'_>, header: StepHeader) {
        for i in 0..header.num_admitted {
            let row = &mut self.rows[record.admit_row[i] as usize];
            if row.salt != record.admit_salt[i] {
                row.fed.clear();
            }
            row.salt = record.admit_salt[i];
        }
    }

    /// Keeps the longest prefix of each text whose draft KV is still valid, and sets how far each text is fed in this
    /// step. Texts that lack the fewest tokens are fed to their end, and the others in pieces. So a step feeds the
    /// draft model no more than about `max_fed` tokens.
    fn begin(&mut self, plans: &mut [Plan]) {
        for plan in plans.iter() {
            let fed = &mut self.rows[plan.row].fed;
            let same = fed.iter().zip(&plan.own).take_while(|(fed, own)| fed == own).count();
            fed.truncate(same.min(plan.own.len() - 1));
        }
        let mut room = self.limits.max_fed;
        let mut order: Vec<usize> = (0..plans.len()).collect();
        order.sort_by_key(|&i| plans[i].own.len() - self.rows[plans[i].row].fed.len());
        for i in order {
            let start = self.rows[plans[i].row].fed.len();
            plans[i].end = plans[i].own.len().min(start + room.max(NEAR));
            room = room.saturating_sub(plans[i].end - start);
        }
    }

    /// Runs one pass over the next ids of `plans`, by index. Each text that is fed to its end gets a draft.
    fn feed(&mut self, plans: &mut [Plan], live: &[usize], draft: &mut dyn Model) -> Result<()> {
        let TextLimits { context, block_size, .. } = self.limits;
        let blocks = context.div_ceil(block_size);
        let (mut tokens, mut positions, mut slots, mut of) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        let (mut table, mut last) = (Vec::new(), Vec::new());
        for (b, &i) in live.iter().enumerate() {
            let plan = &plans[i];
            let first_block = plan.row * blocks;
            let fed = self.rows[plan.row].fed.len();
            let text = plan.own[..plan.end].iter().chain(&plan.drafted);
            for (position, &token) in text.enumerate().skip(fed).take(CHUNK) {
                tokens.push(token);
                positions.push(position as i64);
                slots.push((first_block * block_size + position) as i64);
                of.push(b);
            }
            table.extend((first_block..first_block + blocks).map(|block| block as i64));
            last.push(tokens.len() - 1);
        }
        let pass = Pass {
            tokens: &tokens,
            positions: &positions,
            slots: &slots,
            sequences: &of,
            block_table: &table,
            max_blocks: blocks,
            ..Pass::default()
        };
        let (mut ids, mut top) = (vec![0; live.len()], vec![0.0; live.len()]);
        let Facts { num_ids, .. } = draft.facts();
        let output = Output::Argmax { rows: &last, num_ids, ids: &mut ids, top: &mut top };
        draft.forward(&pass, None, output, Entries { layers: &[], states: &mut [] })?;
        for (&token, &b) in tokens.iter().zip(&of) {
            self.rows[plans[live[b]].row].fed.push(token);
        }
        for (&i, token) in live.iter().zip(ids) {
            let plan = &mut plans[i];
            let fed = self.rows[plan.row].fed.len();
            if plan.end == plan.own.len() && fed == plan.end + plan.drafted.len() {
                plan.drafted.push(token);
            }
        }
        Ok(())
    }
}

impl Iteration {
    /// Draws up to `K_r` drafts per sequence from the text that the draft model generates. `K_r` becomes the number of
    /// the target's tokens in that text, at most the planned number. If there are none, `FLAG_NOTHING_DRAFTED` is set.
    /// A sequence whose text was not fed to its end gets no drafts and no flag.
    pub(super) fn draft_text(
        &mut self,
        state: &mut RowState<'_>,
        draft: &mut dyn Model,
        host: &mut dyn Host,
    ) -> Result<()> {
        let Some(mut texts) = self.texts.take() else {
            return check_len("text drafts", 0, 1);
        };
        let done = self.write_drafts(&mut texts, state, draft, host);
        self.texts = Some(texts);
        done
    }

    fn write_drafts(
        &mut self,
        texts: &mut TextDrafts,
        state: &mut RowState<'_>,
        draft: &mut dyn Model,
        host: &mut dyn Host,
    ) -> Result<()> {
        let (context, known) = (texts.limits.context, draft.facts().vocab_size as i64);
        let mut plans = Vec::new();
        for (index, sequence) in self.sequences.iter_mut().enumerate().filter(|(_, sequence)| sequence.on_device()) {
            let wanted = sequence.passes();
            sequence.k = 0;
            if wanted == 0 {
                continue;
            }
            let own = host.draft_ids(state.tokens_before(sequence.row, sequence.n))?;
            // A tokenizer may have ids that the model has no embedding of.
            let fits = !own.is_empty() && own.len() + wanted <= context && own.iter().all(|id| (0..known).contains(id));
            if fits {
                plans.push(Plan { row: sequence.row, own, end: 0, k: wanted, drafted: Vec::new(), index });
            }
        }
        texts.begin(&mut plans);
        let mut live: Vec<usize> = (0..plans.len()).collect();
        while !live.is_empty() {
            texts.feed(&mut plans, &live, draft)?;
            self.counts.draft_passes += 1;
            live.retain(|&i| plans[i].goes_on(texts.rows[plans[i].row].fed.len()));
        }
        let vocab_size = self.sampler.vocab_size() as i64;
        for plan in plans.into_iter().filter(|plan| plan.end == plan.own.len()) {
            let mut sequence = self.sequences[plan.index];
            let mut read = host.target_ids(state.tokens_before(sequence.row, sequence.n), &plan.own, &plan.drafted)?;
            let known = read.iter().position(|id| !(0..vocab_size).contains(id)).unwrap_or(read.len());
            read.truncate(known.min(plan.k));
            sequence.k = read.len();
            if read.is_empty() {
                sequence.flags |= FLAG_NOTHING_DRAFTED;
            }
            state.write_tokens(sequence.row, sequence.n, &read);
            for (i, &token) in (1..).zip(&read) {
                self.advance_grammar(&sequence, i, token, host)?;
            }
            self.sequences[plan.index] = sequence;
        }
        Ok(())
    }
}
