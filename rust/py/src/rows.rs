//! Row state of an iteration, in arrays of the caller.

use crate::error::Class;
use crate::tensors::numbers_mut;
use numpy::{Element, Ix1, Ix2};
use pyo3::prelude::*;
use pyo3::types::PyDict;
use specrs_core::Drafter;
use specrs_core::sampling::{MAX_STOP_IDS, NUM_PARAMS};
use specrs_cpu::MemoryMut;
use specrs_cpu::iteration::{HiddenRows, RowState};

/// Row state in arrays of the caller.
pub(crate) struct Rows {
    num_tokens: MemoryMut<i64>,
    draft_len: MemoryMut<i64>,
    draft_start: MemoryMut<i64>,
    limit: MemoryMut<i64>,
    min_len: MemoryMut<i64>,
    prompt_len: MemoryMut<i64>,
    seeds: MemoryMut<i64>,
    active: MemoryMut<bool>,
    tokens: MemoryMut<i64>,
    block_table: MemoryMut<i64>,
    group_tables: MemoryMut<i64>,
    stop_ids: MemoryMut<i64>,
    params: MemoryMut<f32>,
    hidden: Option<Hidden>,
}

/// Hidden states of the target, kept by row for a head that reads them.
struct Hidden {
    states: MemoryMut<f32>,
    start: MemoryMut<i64>,
}

impl Rows {
    /// Borrows the arrays of a Python object.
    ///
    /// # Errors
    /// If an array is missing, or has another dtype or shape than the rows of a scheduler with these settings.
    pub(crate) fn borrow(
        arrays: &Bound<'_, PyDict>,
        config: &specrs_core::SchedulerConfig,
        hidden_size: usize,
    ) -> PyResult<Self> {
        let rows = config.max_num_seqs + 1;
        let (width, blocks) = (config.max_model_len + 1, config.max_model_len.div_ceil(config.block_size));
        let one = |name| numbers::<i64>(arrays, name, &[rows]);
        let wide = |name, width| numbers::<i64>(arrays, name, &[rows, width]);
        let hidden = match config.drafter {
            Drafter::Hidden { max_draft_lag, .. } => Some(Hidden {
                states: numbers(arrays, "hidden_states", &[rows, max_draft_lag * hidden_size])?,
                start: one("hidden_start")?,
            }),
            Drafter::SharedKv { .. } => Some(Hidden {
                states: numbers(arrays, "hidden_states", &[rows, hidden_size])?,
                start: one("hidden_start")?,
            }),
            _ => None,
        };
        Ok(Self {
            hidden,
            num_tokens: one("num_tokens")?,
            draft_len: one("draft_len")?,
            draft_start: one("draft_start")?,
            limit: one("limit")?,
            min_len: one("min_len")?,
            prompt_len: one("prompt_len")?,
            seeds: one("seeds")?,
            active: numbers(arrays, "active", &[rows])?,
            tokens: wide("tokens", width)?,
            block_table: wide("block_table", blocks)?,
            group_tables: match config.num_groups() - 1 {
                0 => MemoryMut::from_vec(Vec::new()),
                further => numbers(arrays, "group_tables", &[further * rows, blocks])?,
            },
            stop_ids: wide("stop_ids", MAX_STOP_IDS)?,
            params: numbers(arrays, "params", &[rows, NUM_PARAMS])?,
        })
    }

    /// Borrows the row state for a step.
    pub(crate) fn state(&mut self) -> RowState<'_> {
        RowState {
            num_tokens: self.num_tokens.as_mut_slice(),
            draft_len: self.draft_len.as_mut_slice(),
            draft_start: self.draft_start.as_mut_slice(),
            limit: self.limit.as_mut_slice(),
            min_len: self.min_len.as_mut_slice(),
            prompt_len: self.prompt_len.as_mut_slice(),
            seeds: self.seeds.as_mut_slice(),
            active: self.active.as_mut_slice(),
            tokens: self.tokens.as_mut_slice(),
            block_table: self.block_table.as_mut_slice(),
            group_tables: self.group_tables.as_mut_slice(),
            stop_ids: self.stop_ids.as_mut_slice(),
            params: self.params.as_mut_slice(),
            hidden: self
                .hidden
                .as_mut()
                .map(|hidden| HiddenRows { states: hidden.states.as_mut_slice(), start: hidden.start.as_mut_slice() }),
        }
    }
}

fn numbers<T>(arrays: &Bound<'_, PyDict>, name: &str, expected: &[usize]) -> PyResult<MemoryMut<T>>
where
    T: Element + Copy + Send + Sync + 'static,
{
    let py = arrays.py();
    let Some(array) = arrays.get_item(name)? else {
        return Err(Class::InvalidBuffer.error(py, format!("state: has no {name:?}; must have an array of that name")));
    };
    let (memory, shape) =
        if expected.len() == 1 { numbers_mut::<T, Ix1>(name, &array)? } else { numbers_mut::<T, Ix2>(name, &array)? };
    if shape == expected {
        return Ok(memory);
    }
    Err(Class::InvalidBuffer.error(py, format!("{name}: shape is {shape:?}; must be {expected:?}")))
}
