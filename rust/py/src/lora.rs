//! `LoRA` adapters of a decoder on a CPU, in arrays of the caller.

use crate::cpu_weights::CpuWeights;
use crate::error::{Class, cpu_to_py, size};
use crate::tensors::values;
use numpy::Ix2;
use pyo3::prelude::*;
use specrs_cpu::{ExpertLora, Lora, LoraLayer, LoraPart};
use std::sync::Arc;

/// Part of an adapter that is added to some outputs of a projection: A, B times the scale, and the first of these
/// outputs.
type Part<'py> = (Bound<'py, PyAny>, Bound<'py, PyAny>, i64);

/// Parts of an adapter for a layer's projections.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
struct LayerParts<'py> {
    qkv: Vec<Part<'py>>,
    o: Vec<Part<'py>>,
    gate_up: Vec<Part<'py>>,
    down: Vec<Part<'py>>,
    /// Parts of each expert's gate and up projection and of its down projection; empty without parts for experts.
    experts: Vec<(Vec<Part<'py>>, Vec<Part<'py>>)>,
}

/// Adapter in borrowed arrays.
#[pyclass(frozen)]
pub(crate) struct CpuLora(Arc<Lora>);

/// Adapters and the rows that use each of them.
pub(crate) type GivenAdapters<'py> = Vec<(PyRef<'py, CpuLora>, Vec<usize>)>;

/// Returns the adapter of each row; empty if no adapter is given.
pub(crate) fn by_row(py: Python<'_>, given: &GivenAdapters<'_>, count: usize) -> PyResult<Vec<Option<Arc<Lora>>>> {
    if given.is_empty() {
        return Ok(Vec::new());
    }
    let mut found = vec![None; count];
    for (lora, rows) in given {
        for &row in rows {
            let Some(place @ None) = found.get_mut(row) else {
                let (value, allowed) = (format!("row {row}"), format!("rows below {count}, each in one adapter only"));
                return Err(Class::InvalidBuffer.out_of_range(py, "adapters", value, allowed));
            };
            *place = Some(Arc::clone(&lora.0));
        }
    }
    Ok(found)
}

fn parts(py: Python<'_>, name: &str, given: &[Part<'_>]) -> PyResult<Vec<LoraPart>> {
    let part = |(i, (a, b, first)): (usize, &Part<'_>)| {
        let name = format!("{name}[{i}]");
        let (a, shape) = values::<Ix2>(&format!("{name}.a"), a)?;
        let (b, of_b) = values::<Ix2>(&format!("{name}.b"), b)?;
        let rank = shape[0];
        if of_b[1] != rank {
            let message = format!("{name}.b: shape is {of_b:?}; must be [outputs, {rank}]");
            return Err(Class::InvalidBuffer.error(py, message));
        }
        let first = size(py, Class::InvalidBuffer, "first", *first)?;
        LoraPart::new(&name, a, b, rank, first).map_err(|error| cpu_to_py(py, &error))
    };
    given.iter().enumerate().map(part).collect()
}

#[pymethods]
impl CpuLora {
    #[new]
    #[expect(clippy::needless_pass_by_value, reason = "extracted from Python objects")]
    fn new(py: Python<'_>, weights: &CpuWeights, layers: Vec<LayerParts<'_>>) -> PyResult<Self> {
        let layer = |(i, given): (usize, &LayerParts<'_>)| -> PyResult<LoraLayer> {
            let named = |field: &str, given| parts(py, &format!("layers[{i}].{field}"), given);
            let expert = |(j, (gate_up, down)): (usize, &(Vec<_>, Vec<_>))| -> PyResult<ExpertLora> {
                let named = |field: &str, given| parts(py, &format!("layers[{i}].experts[{j}].{field}"), given);
                Ok(ExpertLora { gate_up: named("gate_up", gate_up)?, down: named("down", down)? })
            };
            Ok(LoraLayer {
                qkv: named("qkv", &given.qkv)?,
                o: named("o", &given.o)?,
                gate_up: named("gate_up", &given.gate_up)?,
                down: named("down", &given.down)?,
                experts: given.experts.iter().enumerate().map(expert).collect::<PyResult<_>>()?,
            })
        };
        let layers = layers.iter().enumerate().map(layer).collect::<PyResult<_>>()?;
        Lora::new(&weights.0, layers).map(|lora| Self(Arc::new(lora))).map_err(|error| cpu_to_py(py, &error))
    }

    fn __repr__(&self) -> String {
        format!("CpuLora({:?})", self.0)
    }
}
