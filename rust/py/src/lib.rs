//! Python binding of `specrs-core`: conversions only, no decisions.
//!
//! Docstrings are only in `python/specrs/_core.pyi`. Two wheels contain the module, `specrs` and `specrs-core`. Every
//! class is frozen with its state in a mutex, so that threads can share it, also on a free-threaded interpreter.

use pyo3::prelude::*;
use pyo3::types::PyTuple;
use specrs_core::DrafterKind;
use specrs_core::philox::Purpose;
use specrs_core::sampling as core_sampling;
use specrs_core::scheduler::layout;

mod acceptance;
mod block_pool;
mod buffers;
mod called;
mod cost_model;
mod cpu_decoder;
mod cpu_kv_cache;
mod cpu_pool;
mod cpu_weights;
mod drafts;
mod error;
mod host;
mod iteration;
mod kv_events;
mod kv_store;
mod lora;
mod mutex;
mod outputs;
mod packed;
mod philox;
mod planner;
mod quantize;
mod request_sampling;
mod request_view;
mod rows;
mod sampling;
mod scheduler;
mod slot_mapper;
mod suffix;
mod tensors;

#[pymodule]
mod _core {
    use pyo3::prelude::*;
    use pyo3::types::PyType;

    #[pymodule_export]
    use super::acceptance::AcceptanceTracker;
    #[pymodule_export]
    use super::block_pool::{BlockHasher, BlockPool};
    #[pymodule_export]
    use super::cost_model::CostModel;
    #[pymodule_export]
    use super::cpu_decoder::CpuDecoder;
    #[pymodule_export]
    use super::cpu_kv_cache::CpuKVCache;
    #[pymodule_export]
    use super::cpu_pool::{CpuPool, cpu_instruction_sets};
    #[pymodule_export]
    use super::cpu_weights::CpuWeights;
    #[pymodule_export]
    use super::drafts::{CachedDrafter, HiddenDrafter, HostDrafter, NgramProposer, SharedKVDrafter, TextDrafter};
    #[pymodule_export]
    use super::iteration::CpuIteration;
    #[pymodule_export]
    use super::kv_events::{AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch};
    #[pymodule_export]
    use super::kv_store::KVStore;
    #[pymodule_export]
    use super::lora::CpuLora;
    #[pymodule_export]
    use super::outputs::{Output, Outputs, TokenDecoder};
    #[pymodule_export]
    use super::packed::PackedMatrix;
    #[pymodule_export]
    use super::philox::{philox_gumbel, philox_uniform};
    #[pymodule_export]
    use super::planner::SpeculationPlanner;
    #[pymodule_export]
    use super::quantize::{quantize_q4_k, quantize_weight};
    #[pymodule_export]
    use super::request_sampling::RequestSampling;
    #[pymodule_export]
    use super::request_view::RequestView;
    #[pymodule_export]
    use super::sampling::Sampler;
    #[pymodule_export]
    use super::scheduler::Scheduler;
    #[pymodule_export]
    use super::slot_mapper::SlotMapper;
    #[pymodule_export]
    use super::suffix::SuffixCache;

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        for (name, value) in super::CONSTANTS {
            module.add(name, value)?;
        }
        for (name, names) in super::NAMES {
            module.add(name, super::PyTuple::new(module.py(), names)?)?;
        }
        module.add("GREEDY_BELOW", super::core_sampling::GREEDY_BELOW)?;
        module.add("UNKNOWN_BELOW", super::core_sampling::UNKNOWN_BELOW)?;
        super::error::register(module)?;
        // The same extension is `specrs._core` in one wheel and `specrs_core._core` in another.
        let name = module.name()?;
        for item in module.dict().values() {
            if let Ok(class) = item.cast::<PyType>() {
                class.setattr("__module__", &name)?;
            }
        }
        Ok(())
    }
}

/// Constants of the core, by name, for Python code that compares numbers in buffers and settings with them.
const CONSTANTS: [(&str, i64); 21] = [
    ("LOGPROBS_ALL", core_sampling::LOGPROBS_ALL),
    ("LOGPROBS_NONE", core_sampling::LOGPROBS_NONE),
    ("MAX_STOP_IDS", core_sampling::MAX_STOP_IDS as i64),
    ("PLAN_IDLE", scheduler::PLAN_IDLE),
    ("PLAN_STEP", scheduler::PLAN_STEP),
    ("PLAN_SETTLE_FIRST", scheduler::PLAN_SETTLE_FIRST),
    ("FLAG_TARGET_NON_FINITE", layout::FLAG_TARGET_NON_FINITE),
    ("FLAG_DRAFT_NON_FINITE", layout::FLAG_DRAFT_NON_FINITE),
    ("FLAG_NOTHING_DRAFTED", layout::FLAG_NOTHING_DRAFTED),
    ("FLAG_CAPACITY", layout::FLAG_CAPACITY),
    ("FLAG_NO_TOKEN_ALLOWED", layout::FLAG_NO_TOKEN_ALLOWED),
    ("FINISH_NONE", layout::FINISH_NONE),
    ("FINISH_STOP", layout::FINISH_STOP),
    ("DRAFTER_DEVICE", DrafterKind::Device as i64),
    ("FINISH_LENGTH", layout::FINISH_LENGTH),
    ("FINISH_ABORT", specrs_text::FINISH_ABORT),
    ("FINISH_ERROR", layout::FINISH_ERROR),
    ("PURPOSE_DRAFT", Purpose::Draft as i64),
    ("PURPOSE_ACCEPT", Purpose::Accept as i64),
    ("PURPOSE_RECOVER", Purpose::Recover as i64),
    ("PURPOSE_GUMBEL", Purpose::Gumbel as i64),
];

/// Names and descriptions, indexed by number, of drafters, header elements, parameter columns and sampling steps.
const NAMES: [(&str, &[&str]); 7] = [
    ("DRAFTERS", &DrafterKind::NAMES),
    ("HEADER_FIELDS", layout::HEADER_FIELDS),
    ("HEADER_DOCS", layout::HEADER_DOCS),
    ("PARAM_COLUMNS", core_sampling::PARAM_COLUMNS),
    ("PARAM_COLUMN_DOCS", core_sampling::PARAM_COLUMN_DOCS),
    ("SAMPLING_STEPS", core_sampling::SAMPLING_STEPS),
    ("SAMPLING_STEP_DOCS", core_sampling::SAMPLING_STEP_DOCS),
];
