//! Row state: the data of every running request, in memory of the caller. Decides nothing.

use crate::error::{Result, check_len};
use specrs_core::Drafter;
use specrs_core::sampling::{MAX_STOP_IDS, NUM_PARAMS, PARAM_GREEDY, SamplingParams};
use specrs_core::scheduler::layout::RecordView;
use specrs_core::scheduler::{SchedulerConfig, StepHeader};

/// Row state of R = `max_num_seqs` rows, followed by one reserved row of length 0, borrowed for one step.
///
/// Positions `[0, num_tokens)` of `tokens` are committed; `[num_tokens, num_tokens + K_r)` hold the drafts of the
/// running iteration. The last column of `tokens` is scratch for runners that mask writes; nothing here uses it.
#[derive(Debug)]
pub struct RowState<'a> {
    /// Number of tokens of each row, n, `[R + 1]`.
    pub num_tokens: &'a mut [i64],
    /// Position after the last valid draft KV of each row, `[R + 1]`. Draft KV is valid on `[draft_start, draft_len)`.
    pub draft_len: &'a mut [i64],
    /// First position of the context of each row's draft KV, `[R + 1]`; 0 except for drafters that start anew.
    pub draft_start: &'a mut [i64],
    /// Maximum number of tokens of each row, `[R + 1]`.
    pub limit: &'a mut [i64],
    /// First position at which stop ids of each row count, `[R + 1]`.
    pub min_len: &'a mut [i64],
    /// Number of prompt tokens of each row, `[R + 1]`, because penalties treat prompt and output differently.
    pub prompt_len: &'a mut [i64],
    /// Seed of each row, `[R + 1]`.
    pub seeds: &'a mut [i64],
    /// Whether each row has a live request, `[R + 1]`.
    pub active: &'a mut [bool],
    /// Tokens of each row, `[R + 1, max_model_len + 1]`.
    pub tokens: &'a mut [i64],
    /// Block table of each row in the first KV group, `[R + 1, max_blocks]`.
    pub block_table: &'a mut [i64],
    /// Block tables of each row in the groups after the first, `[G - 1, R + 1, max_blocks]`.
    pub group_tables: &'a mut [i64],
    /// Stop ids of each row, `[R + 1, MAX_STOP_IDS]`; -1 is padding.
    pub stop_ids: &'a mut [i64],
    /// Parameter columns of each row, `[R + 1, NUM_PARAMS]`.
    pub params: &'a mut [f32],
    /// Hidden states for a drafter that reads the target's; `None` for other drafters.
    pub hidden: Option<HiddenRows<'a>>,
}

/// Hidden states of the target that a drafter will read, for every row.
///
/// For a row with n tokens, the states of positions `[start, n - 1)` are kept, at most W, beginning in column 0.
#[derive(Debug)]
pub struct HiddenRows<'a> {
    /// Hidden states, `[R + 1, W + 1, L, the target's hidden size]`; the last column is scratch for runners that mask
    /// writes.
    pub states: &'a mut [f32],
    /// First position whose hidden state is kept in each row, `[R + 1]`.
    pub start: &'a mut [i64],
}

/// Row state with its own memory, for drafters that read no hidden states.
#[derive(Clone, Debug)]
pub struct OwnedRowState {
    /// Number of tokens, `draft_len`, `draft_start`, `limit`, `min_len`, `prompt_len` and seed of each row, each `[R +
    /// 1]`.
    numbers: [Vec<i64>; 7],
    active: Vec<bool>,
    tokens: Vec<i64>,
    block_table: Vec<i64>,
    group_tables: Vec<i64>,
    stop_ids: Vec<i64>,
    params: Vec<f32>,
}

impl OwnedRowState {
    /// Makes the state of an engine without requests.
    ///
    /// # Panics
    /// If the drafter of `config` reads hidden states.
    #[must_use]
    pub fn new(config: &SchedulerConfig) -> Self {
        assert!(
            !matches!(config.drafter, Drafter::Hidden { .. } | Drafter::SharedKv { .. }),
            "no room for hidden states"
        );
        let rows = config.max_num_seqs + 1;
        let max_blocks = config.max_model_len.div_ceil(config.block_size);
        OwnedRowState {
            numbers: std::array::from_fn(|_| vec![0; rows]),
            active: vec![false; rows],
            tokens: vec![0; rows * (config.max_model_len + 1)],
            block_table: vec![0; rows * max_blocks],
            group_tables: vec![0; (config.num_groups() - 1) * rows * max_blocks],
            stop_ids: vec![0; rows * MAX_STOP_IDS],
            params: vec![0.0; rows * NUM_PARAMS],
        }
    }

    /// Borrows the state for a step.
    pub fn borrow(&mut self) -> RowState<'_> {
        let [num_tokens, draft_len, draft_start, limit, min_len, prompt_len, seeds] = &mut self.numbers;
        RowState {
            num_tokens,
            draft_len,
            draft_start,
            limit,
            min_len,
            prompt_len,
            seeds,
            active: &mut self.active,
            tokens: &mut self.tokens,
            block_table: &mut self.block_table,
            group_tables: &mut self.group_tables,
            stop_ids: &mut self.stop_ids,
            params: &mut self.params,
            hidden: None,
        }
    }
}

impl RowState<'_> {
    /// Checks that the sizes of all tensors except the hidden states match each other and the settings.
    ///
    /// # Errors
    /// Names the first tensor with a wrong size.
    pub fn check(&self, config: &SchedulerConfig) -> Result<()> {
        let (rows, max_model_len) = (config.max_num_seqs + 1, config.max_model_len);
        let max_blocks = max_model_len.div_ceil(config.block_size);
        for (name, len, width) in [
            ("num_tokens", self.num_tokens.len(), 1),
            ("draft_len", self.draft_len.len(), 1),
            ("draft_start", self.draft_start.len(), 1),
            ("limit", self.limit.len(), 1),
            ("min_len", self.min_len.len(), 1),
            ("prompt_len", self.prompt_len.len(), 1),
            ("seeds", self.seeds.len(), 1),
            ("active", self.active.len(), 1),
            ("tokens", self.tokens.len(), max_model_len + 1),
            ("block_table", self.block_table.len(), max_blocks),
            ("group_tables", self.group_tables.len(), (config.num_groups() - 1) * max_blocks),
            ("stop_ids", self.stop_ids.len(), MAX_STOP_IDS),
            ("params", self.params.len(), NUM_PARAMS),
        ] {
            check_len(name, len, rows * width)?;
        }
        if let Some(hidden) = &self.hidden {
            check_len("hidden_start", hidden.start.len(), rows)?;
        }
        Ok(())
    }

    /// Returns the number of token columns per row, scratch included.
    pub fn token_width(&self) -> usize {
        self.tokens.len() / self.num_tokens.len()
    }

    /// Returns the number of blocks per row.
    pub fn table_width(&self) -> usize {
        self.block_table.len() / self.num_tokens.len()
    }

    /// Returns the token of a row at a position.
    pub fn token(&self, row: usize, position: usize) -> i64 {
        self.tokens[row * self.token_width() + position]
    }

    /// Returns the tokens of a row before `position`.
    pub(super) fn tokens_before(&self, row: usize, position: usize) -> &[i64] {
        &self.tokens[row * self.token_width()..][..position]
    }

    /// Writes tokens of a row from `position` on.
    pub fn write_tokens(&mut self, row: usize, position: usize, tokens: &[i64]) {
        let start = row * self.token_width() + position;
        self.tokens[start..start + tokens.len()].copy_from_slice(tokens);
    }

    /// Returns the KV slot of a row's position in the first group.
    pub fn slot(&self, row: usize, position: usize, block_size: usize) -> i64 {
        slot_in(&self.block_table[row * self.table_width()..], position, block_size)
    }

    /// Returns the KV slots of a row's position in the groups after the first, `[G - 1]`.
    pub(super) fn group_slots(&self, row: usize, position: usize, block_size: usize) -> impl Iterator<Item = i64> + '_ {
        let tables = self.group_tables.chunks_exact(self.block_table.len());
        tables.map(move |table| slot_in(&table[row * self.table_width()..], position, block_size))
    }

    /// Returns the sampling parameters of a row.
    pub fn sampling(&self, row: usize) -> SamplingParams {
        SamplingParams::of_columns(&self.params[row * NUM_PARAMS..][..NUM_PARAMS])
    }

    /// Returns whether a row is greedy.
    pub fn is_greedy(&self, row: usize) -> bool {
        self.params[row * NUM_PARAMS + PARAM_GREEDY] != 0.0
    }

    /// Returns whether a token is one of the row's stop ids.
    pub fn is_stop(&self, row: usize, token: i64) -> bool {
        self.stop_ids(row).contains(&token)
    }

    /// Returns the stop ids of a row, `[MAX_STOP_IDS]`; -1 is padding.
    pub(super) fn stop_ids(&self, row: usize) -> &[i64] {
        &self.stop_ids[row * MAX_STOP_IDS..][..MAX_STOP_IDS]
    }

    /// Initialises the rows that the step admits, and writes the step's block table updates.
    pub(super) fn upload(&mut self, record: &RecordView<'_>, header: StepHeader) {
        let mut offset = 0;
        for i in 0..header.num_admitted {
            let row = record.admit_row[i] as usize;
            self.num_tokens[row] = record.admit_num_tokens[i];
            self.draft_len[row] = record.admit_draft_len[i];
            self.draft_start[row] = 0;
            self.limit[row] = record.admit_limit[i];
            self.min_len[row] = record.admit_min_len[i];
            self.prompt_len[row] = record.admit_prompt_len[i];
            self.seeds[row] = record.admit_seed[i];
            self.active[row] = true;
            if let Some(hidden) = &mut self.hidden {
                hidden.start[row] = 0;
            }
            let stops = &record.admit_stop_ids[i * MAX_STOP_IDS..][..MAX_STOP_IDS];
            self.stop_ids[row * MAX_STOP_IDS..][..MAX_STOP_IDS].copy_from_slice(stops);
            let params = &record.admit_params[i * NUM_PARAMS..][..NUM_PARAMS];
            for (own, &bits) in self.params[row * NUM_PARAMS..][..NUM_PARAMS].iter_mut().zip(params) {
                *own = f64::from_bits(bits as u64) as f32;
            }
            let length = record.admit_num_tokens[i] as usize;
            self.write_tokens(row, 0, &record.upload_token[offset..offset + length]);
            offset += length;
        }
        let whole = self.block_table.len();
        for i in 0..header.num_block_updates {
            let at = record.block_row[i] as usize * self.table_width() + record.block_index[i] as usize;
            match record.block_group.get(i).map_or(0, |&group| group as usize) {
                0 => self.block_table[at] = record.block_id[i],
                group => self.group_tables[(group - 1) * whole + at] = record.block_id[i],
            }
        }
    }
}

/// Returns the KV slot of a position, given a row's blocks.
fn slot_in(blocks: &[i64], position: usize, block_size: usize) -> i64 {
    blocks[position / block_size] * block_size as i64 + (position % block_size) as i64
}
