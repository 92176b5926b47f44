//! Row state: the truth about every running request, in memory of the caller. Decides nothing.

use crate::error::{Result, check_len};
use specrs_core::Drafter;
use specrs_core::sampling::{MAX_STOP_IDS, NUM_PARAMS, PARAM_GREEDY, SamplingParams};
use specrs_core::scheduler::layout::RecordView;
use specrs_core::scheduler::{LaunchHeader, SchedulerConfig};

/// Row state of R = `max_num_seqs` rows and one reserved row of length 0 behind them, borrowed for one launch.
///
/// Positions `[0, num_tokens)` of `tokens` are committed; `[num_tokens, num_tokens + K_r)` hold the drafts of the running
/// iteration. The last column of `tokens` is scratch for runners that mask writes; nothing here uses it.
#[derive(Debug)]
pub struct RowState<'a> {
    /// n, `[R + 1]`.
    pub num_tokens: &'a mut [i64],
    /// Draft KV is valid on `[draft_start, draft_len)`, `[R + 1]`.
    pub draft_len: &'a mut [i64],
    /// The first position that draft KV has a context from, `[R + 1]`; 0 but for drafters that begin anew.
    pub draft_start: &'a mut [i64],
    /// The largest n that the row may reach, `[R + 1]`.
    pub limit: &'a mut [i64],
    /// Stop ids count only at positions from here on, `[R + 1]`.
    pub min_len: &'a mut [i64],
    /// Tokens of the prompt, `[R + 1]`, which penalties tell from the output.
    pub prompt_len: &'a mut [i64],
    /// `[R + 1]`
    pub seeds: &'a mut [i64],
    /// `[R + 1]`
    pub active: &'a mut [bool],
    /// `[R + 1, max_model_len + 1]`
    pub tokens: &'a mut [i64],
    /// `[R + 1, max_blocks]`, in the first KV group.
    pub block_table: &'a mut [i64],
    /// `[G - 1, R + 1, max_blocks]`, in the groups behind it.
    pub group_tables: &'a mut [i64],
    /// `[R + 1, MAX_STOP_IDS]`, -1 is padding.
    pub stop_ids: &'a mut [i64],
    /// Parameter columns, `[R + 1, NUM_PARAMS]`.
    pub params: &'a mut [f32],
    /// What is kept for a drafter that reads the target's hidden states; None with any other.
    pub hidden: Option<HiddenRows<'a>>,
}

/// Hidden states of the target that a drafter will read, of every row.
///
/// Of a row with n tokens those of positions `[start, n - 1)`, at most W, are kept, the first in column 0.
#[derive(Debug)]
pub struct HiddenRows<'a> {
    /// `[R + 1, W + 1, L, the target's hidden size]`; the last column is scratch for runners that mask writes.
    pub states: &'a mut [f32],
    /// `[R + 1]`
    pub start: &'a mut [i64],
}

/// Row state with memory of its own.
#[derive(Clone, Debug)]
pub struct OwnedRowState {
    /// `num_tokens`, `draft_len`, `draft_start`, `limit`, `min_len`, `prompt_len`, `seeds`: each `[R + 1]`
    numbers: [Vec<i64>; 7],
    active: Vec<bool>,
    tokens: Vec<i64>,
    block_table: Vec<i64>,
    group_tables: Vec<i64>,
    stop_ids: Vec<i64>,
    params: Vec<f32>,
    /// States and starts of [`HiddenRows`]; None with a drafter that reads none.
    hidden: Option<(Vec<f32>, Vec<i64>)>,
}

impl OwnedRowState {
    /// The state of an engine without requests. `hidden_size` are the numbers of a position that a drafter reads of the target's
    /// hidden states, of all its layers; 0: it reads none.
    #[must_use]
    pub fn new(config: &SchedulerConfig, hidden_size: usize) -> Self {
        let rows = config.max_num_seqs + 1;
        let hidden = match config.drafter {
            Drafter::Hidden { max_draft_lag, .. } => {
                Some((vec![0.0; rows * max_draft_lag * hidden_size], vec![0; rows]))
            }
            _ => None,
        };
        let max_blocks = config.max_model_len.div_ceil(config.block_size);
        OwnedRowState {
            numbers: std::array::from_fn(|_| vec![0; rows]),
            active: vec![false; rows],
            tokens: vec![0; rows * (config.max_model_len + 1)],
            block_table: vec![0; rows * max_blocks],
            group_tables: vec![0; (config.num_groups() - 1) * rows * max_blocks],
            stop_ids: vec![0; rows * MAX_STOP_IDS],
            params: vec![0.0; rows * NUM_PARAMS],
            hidden,
        }
    }

    /// Borrowed for a launch.
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
            hidden: self.hidden.as_mut().map(|(states, start)| HiddenRows { states, start }),
        }
    }
}

impl RowState<'_> {
    /// Refuses tensors whose sizes do not belong together.
    ///
    /// # Errors
    /// Naming the tensor.
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

    /// Tokens of a row, scratch included.
    pub fn token_width(&self) -> usize {
        self.tokens.len() / self.num_tokens.len()
    }

    /// Blocks of a row.
    pub fn table_width(&self) -> usize {
        self.block_table.len() / self.num_tokens.len()
    }

    /// The token of a row at a position.
    pub fn token(&self, row: usize, position: usize) -> i64 {
        self.tokens[row * self.token_width() + position]
    }

    /// The tokens of a row before `position`.
    pub(super) fn tokens_before(&self, row: usize, position: usize) -> &[i64] {
        &self.tokens[row * self.token_width()..][..position]
    }

    /// Sets tokens of a row from `position` on.
    pub fn write_tokens(&mut self, row: usize, position: usize, tokens: &[i64]) {
        let start = row * self.token_width() + position;
        self.tokens[start..start + tokens.len()].copy_from_slice(tokens);
    }

    /// The KV slot of a row's position in the first group.
    pub fn slot(&self, row: usize, position: usize, block_size: usize) -> i64 {
        slot_in(&self.block_table[row * self.table_width()..], position, block_size)
    }

    /// The same in the groups behind it, `[G - 1]`.
    pub(super) fn group_slots(&self, row: usize, position: usize, block_size: usize) -> impl Iterator<Item = i64> + '_ {
        let tables = self.group_tables.chunks_exact(self.block_table.len());
        tables.map(move |table| slot_in(&table[row * self.table_width()..], position, block_size))
    }

    /// What sampling reads of a row.
    pub fn sampling(&self, row: usize) -> SamplingParams {
        SamplingParams::of_columns(&self.params[row * NUM_PARAMS..][..NUM_PARAMS])
    }

    /// Whether a row takes the largest logit.
    pub fn is_greedy(&self, row: usize) -> bool {
        self.params[row * NUM_PARAMS + PARAM_GREEDY] != 0.0
    }

    /// Whether a token is one of the row's stop ids.
    pub fn is_stop(&self, row: usize, token: i64) -> bool {
        self.stop_ids(row).contains(&token)
    }

    /// The stop ids of a row, `[MAX_STOP_IDS]`, -1 is padding.
    pub(super) fn stop_ids(&self, row: usize) -> &[i64] {
        &self.stop_ids[row * MAX_STOP_IDS..][..MAX_STOP_IDS]
    }

    /// Initialises the rows that the launch admits and writes its block table updates.
    pub(super) fn upload(&mut self, record: &RecordView<'_>, header: LaunchHeader) {
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

/// The slot of a position by a row's blocks.
fn slot_in(blocks: &[i64], position: usize, block_size: usize) -> i64 {
    blocks[position / block_size] * block_size as i64 + (position % block_size) as i64
}
