//! Passes of one model on a CPU, on arrays of the caller.

use crate::buffers::{In, In2, Out, check_len, readonly, readwrite};
use crate::cpu_kv_cache::CpuKVCache;
use crate::cpu_pool::CpuPool;
use crate::cpu_weights::CpuWeights;
use crate::error::{Class, cpu_to_py, size};
use crate::lora::{GivenAdapters, by_row};
use crate::mutex::lock;
use numpy::{Ix1, Ix2, Ix3, PyReadonlyArray, PyReadwriteArray, PyUntypedArrayMethods};
use pyo3::prelude::*;
use specrs_cpu::{Decoder, Entries, HeadStates, Output, Pass, Rounding, guarded};
use std::sync::{Arc, Mutex};

/// Decoder that runs the passes of a model.
#[pyclass(frozen)]
pub(crate) struct CpuDecoder(pub(crate) Mutex<Decoder>);

#[pymethods]
impl CpuDecoder {
    #[new]
    #[pyo3(signature = (weights, pool, *, activations = "auto", prompt_tiles = false))]
    fn new(
        py: Python<'_>,
        weights: &CpuWeights,
        pool: &CpuPool,
        activations: &str,
        prompt_tiles: bool,
    ) -> PyResult<Self> {
        let made = Decoder::with_isa(Arc::clone(&weights.0), Arc::clone(&pool.pool), pool.isa);
        let made = match activations {
            "auto" | "int16" | "fp32" => Ok(made),
            "int8" => Ok(made.with_rounding(Rounding::Int8)),
            "bf16" => made.with_bf16_rows(),
            _ => {
                let (value, allowed) = (format!("{activations:?}"), "'auto', 'int16', 'int8', 'fp32' or 'bf16'");
                return Err(Class::InvalidConfig.out_of_range(py, "activations", value, allowed));
            }
        };
        let decoder = made.map_err(|error| cpu_to_py(py, &error))?;
        if !prompt_tiles {
            return Ok(Self(Mutex::new(decoder)));
        }
        let Some(tiles) = pool.isa.tiles() else {
            let allowed = "False on this machine, which has no AMX tiles of bf16 numbers, or whose system does not let \
                           this process use them, or where the pool is limited to other instructions";
            return Err(Class::InvalidConfig.out_of_range(py, "prompt_tiles", "True", allowed));
        };
        Ok(Self(Mutex::new(decoder.with_prompt_tiles(tiles))))
    }

    #[getter]
    fn snapshot_bytes(&self) -> usize {
        lock(&self.0).snapshot_bytes()
    }

    #[allow(clippy::too_many_arguments)] // buffers, each with a name of its own
    #[allow(clippy::needless_pass_by_value)] // extracted from Python objects
    #[pyo3(signature = (
        tokens, positions, slots, q_start, block_table, kv_cache, hidden, hidden_layers = vec![], entries = None,
        head_states = None, k_start = None, group_slots = None, group_tables = None, prompts = false, adapters = vec![]
    ))]
    fn forward(
        &self,
        py: Python<'_>,
        tokens: &Bound<'_, PyAny>,
        positions: &Bound<'_, PyAny>,
        slots: &Bound<'_, PyAny>,
        q_start: &Bound<'_, PyAny>,
        block_table: &Bound<'_, PyAny>,
        kv_cache: &CpuKVCache,
        hidden: &Bound<'_, PyAny>,
        hidden_layers: Vec<i64>,
        entries: Option<&Bound<'_, PyAny>>,
        head_states: Option<&Bound<'_, PyAny>>,
        k_start: Option<&Bound<'_, PyAny>>,
        group_slots: Option<&Bound<'_, PyAny>>,
        group_tables: Option<&Bound<'_, PyAny>>,
        prompts: bool,
        adapters: GivenAdapters<'_>,
    ) -> PyResult<()> {
        let head_states: Option<PyReadonlyArray<'_, f32, Ix2>> =
            head_states.map(|array| readonly("head_states", array)).transpose()?;
        let k_start: Option<In<'_>> = k_start.map(|array| readonly("k_start", array)).transpose()?;
        let group_slots: Option<In2<'_>> = group_slots.map(|array| readonly("group_slots", array)).transpose()?;
        let group_tables: Option<PyReadonlyArray<'_, i64, Ix3>> =
            group_tables.map(|array| readonly("group_tables", array)).transpose()?;
        let layers: Vec<usize> = hidden_layers
            .iter()
            .map(|&layer| size(py, Class::InvalidBuffer, "hidden_layers", layer))
            .collect::<PyResult<_>>()?;
        let mut states: Option<PyReadwriteArray<'_, f32, Ix3>> =
            entries.map(|entries| readwrite("entries", entries)).transpose()?;
        let (tokens, positions): (In<'_>, In<'_>) = (readonly("tokens", tokens)?, readonly("positions", positions)?);
        let (slots, q_start): (In<'_>, In<'_>) = (readonly("slots", slots)?, readonly("q_start", q_start)?);
        let block_table: In2<'_> = readonly("block_table", block_table)?;
        let mut hidden: PyReadwriteArray<'_, f32, Ix2> = readwrite("hidden", hidden)?;
        let count = tokens.len();
        check_len(py, "q_start", q_start.len(), block_table.shape()[0] + 1)?;
        let (requests, positions) = sequences_of(py, q_start.as_slice()?, positions.as_slice()?, count)?;
        let rows: Vec<usize> = (0..count).collect();
        let adapters = by_row(py, &adapters, count)?;
        let pass = Pass {
            tokens: tokens.as_slice()?,
            positions: &positions,
            slots: slots.as_slice()?,
            sequences: &requests,
            block_table: block_table.as_slice()?,
            max_blocks: block_table.shape()[1],
            group_slots: group_slots.as_ref().map_or(Ok(&[][..]), |array| array.as_slice())?,
            group_tables: group_tables.as_ref().map_or(Ok(&[][..]), |array| array.as_slice())?,
            k_start: k_start.as_ref().map_or(Ok(&[][..]), |array| array.as_slice())?,
            prompts,
            adapters: &[],
            snapshots: &[],
        };
        let hidden = hidden.as_slice_mut()?;
        let states = match &mut states {
            Some(states) => states.as_slice_mut()?,
            None => &mut [],
        };
        let head_states = match &head_states {
            Some(array) => Some(HeadStates { hidden: array.as_slice()? }),
            None => None,
        };
        py.detach(|| {
            let adapters: Vec<_> = adapters.iter().map(Option::as_deref).collect();
            let pass = Pass { adapters: &adapters, ..pass };
            let output = Output::Hidden { rows: &rows, hidden };
            let entries = Entries { layers: &layers, states };
            let (mut decoder, mut cache) = (lock(&self.0), lock(&kv_cache.0));
            guarded(|| match head_states {
                Some(head_states) => decoder.forward_head(&pass, head_states, &mut cache, output, entries),
                None => decoder.forward_keeping(&pass, &mut cache, output, entries),
            })
        })
        .map_err(|error| cpu_to_py(py, &error))
    }

    fn fuse(&self, py: Python<'_>, states: &Bound<'_, PyAny>, out: &Bound<'_, PyAny>) -> PyResult<()> {
        let states: PyReadonlyArray<'_, f32, Ix3> = readonly("states", states)?;
        let mut out: PyReadwriteArray<'_, f32, Ix2> = readwrite("out", out)?;
        let (states, out) = (states.as_slice()?, out.as_slice_mut()?);
        py.detach(|| guarded(|| lock(&self.0).fuse(states, out))).map_err(|error| cpu_to_py(py, &error))
    }

    fn logits(&self, py: Python<'_>, hidden: &Bound<'_, PyAny>, logits: &Bound<'_, PyAny>) -> PyResult<()> {
        let hidden: PyReadonlyArray<'_, f32, Ix2> = readonly("hidden", hidden)?;
        let mut logits: PyReadwriteArray<'_, f32, Ix2> = readwrite("logits", logits)?;
        let num_ids = logits.shape()[1];
        let (hidden, logits) = (hidden.as_slice()?, logits.as_slice_mut()?);
        py.detach(|| guarded(|| lock(&self.0).logits(hidden, num_ids, logits))).map_err(|error| cpu_to_py(py, &error))
    }

    fn argmax(
        &self,
        py: Python<'_>,
        hidden: &Bound<'_, PyAny>,
        num_ids: i64,
        ids: &Bound<'_, PyAny>,
        top: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let hidden: PyReadonlyArray<'_, f32, Ix2> = readonly("hidden", hidden)?;
        let mut ids: Out<'_> = readwrite("ids", ids)?;
        let mut top: PyReadwriteArray<'_, f32, Ix1> = readwrite("top", top)?;
        let num_ids = size(py, Class::InvalidBuffer, "num_ids", num_ids)?;
        let (hidden, ids, top) = (hidden.as_slice()?, ids.as_slice_mut()?, top.as_slice_mut()?);
        py.detach(|| guarded(|| lock(&self.0).argmax(hidden, num_ids, ids, top))).map_err(|error| cpu_to_py(py, &error))
    }

    fn __repr__(&self, py: Python<'_>) -> String {
        // A step that holds the lock may wait for the interpreter.
        py.detach(|| {
            let decoder = lock(&self.0);
            let (layers, threads) = (decoder.weights().num_layers(), decoder.pool().threads());
            let rows = match (decoder.has_bf16_rows(), decoder.rounding()) {
                (true, _) => ", activations=bf16",
                (false, Rounding::Int8) => ", activations=int8",
                (false, Rounding::Int16) => "",
            };
            let tiles = if decoder.has_prompt_tiles() { ", prompt_tiles=True" } else { "" };
            format!("CpuDecoder(layers={layers}, threads={threads}{rows}{tiles})")
        })
    }
}

/// Returns the sequence of each row, and its position, -1 for rows that belong to no sequence.
fn sequences_of(py: Python<'_>, q_start: &[i64], positions: &[i64], count: usize) -> PyResult<(Vec<usize>, Vec<i64>)> {
    check_len(py, "positions", positions.len(), count)?;
    let ascending = q_start.windows(2).all(|pair| pair[0] <= pair[1]);
    if q_start[0] != 0 || !ascending || q_start[q_start.len() - 1] > count as i64 {
        let (value, allowed) = (format!("{q_start:?}"), format!("ascending numbers from 0 to {count}"));
        return Err(Class::InvalidBuffer.out_of_range(py, "q_start", value, allowed));
    }
    let mut sequences = Vec::with_capacity(count);
    for (sequence, pair) in q_start.windows(2).enumerate() {
        sequences.resize(pair[1] as usize, sequence);
    }
    let mut positions = positions.to_vec();
    positions[sequences.len()..].fill(-1);
    sequences.resize(count, 0);
    Ok((sequences, positions))
}
