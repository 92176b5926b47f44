//! `CpuKVCache`: KV caches of native models, in arrays of the caller.

use crate::error::{Class, cpu_to_py};
use crate::mutex::lock;
use crate::tensors::{codes_mut, values_mut};
use numpy::Ix5;
use pyo3::prelude::*;
use specrs_cpu::{KvCache, KvLayer, KvShape};
use std::sync::Mutex;

/// KV cache in borrowed arrays.
#[pyclass(frozen)]
pub(crate) struct CpuKVCache(pub(crate) Mutex<KvCache>);

#[pymethods]
impl CpuKVCache {
    #[new]
    #[pyo3(signature = (layers, groups = None, codes = None))]
    #[expect(clippy::needless_pass_by_value, reason = "extracted from Python objects")]
    fn new(
        py: Python<'_>,
        layers: Vec<Bound<'_, PyAny>>,
        groups: Option<Vec<(usize, usize)>>,
        codes: Option<&str>,
    ) -> PyResult<Self> {
        let (mut made, mut heads, mut first) = (Vec::with_capacity(layers.len()), Vec::new(), None);
        if let Some(other) = codes.filter(|codes| !["fp8_e4m3", "fp8_e5m2"].contains(codes)) {
            let allowed = "'fp8_e4m3' or 'fp8_e5m2'";
            return Err(Class::InvalidConfig.out_of_range(py, "codes", format_args!("{other:?}"), allowed));
        }
        for (i, array) in layers.iter().enumerate() {
            let name = format!("layers[{i}]");
            let (layer, shape) = match codes {
                None => values_mut::<Ix5>(&name, array)?,
                Some(codes) => codes_mut::<Ix5>(&name, array, codes == "fp8_e4m3")?,
            };
            let expected = first.get_or_insert_with(|| shape.clone());
            if [shape[0], shape[3]] != [expected[0], expected[3]] || shape[0] == 0 || shape[1] != 2 {
                let allowed =
                    "[num_blocks + 1, 2, num_kv_heads, block_size, head_dim], with the same blocks in all layers";
                return Err(Class::InvalidBuffer.error(py, format!("{name}: shape is {shape:?}; must be {allowed}")));
            }
            heads.push((shape[2], shape[4]));
            made.push(layer);
        }
        let Some(shape) = first else {
            return Err(Class::InvalidBuffer.error(py, "layers: 0 layers; must be at least 1"));
        };
        let shape =
            KvShape { num_blocks: shape[0] - 1, num_kv_heads: shape[2], block_size: shape[3], head_dim: shape[4] };
        KvCache::of_heads(shape, heads, made)
            .and_then(|cache| match groups {
                Some(groups) => {
                    let layer = |(group, place)| KvLayer { group, place };
                    cache.with_groups(groups.into_iter().map(layer).collect())
                }
                None => Ok(cache),
            })
            .map(|cache| Self(Mutex::new(cache)))
            .map_err(|error| cpu_to_py(py, &error))
    }

    /// Bytes of the states that rows have next to the KV.
    #[getter]
    fn state_bytes(&self, py: Python<'_>) -> usize {
        py.detach(|| lock(&self.0).state_bytes())
    }

    /// Bytes of the snapshots of states.
    #[getter]
    fn snapshot_bytes(&self, py: Python<'_>) -> usize {
        py.detach(|| lock(&self.0).snapshot_bytes())
    }

    fn __repr__(&self, py: Python<'_>) -> String {
        // A step that holds the lock may wait for the interpreter.
        py.detach(|| {
            let cache = lock(&self.0);
            format!("CpuKVCache(num_blocks={}, block_size={})", cache.shape().num_blocks, cache.shape().block_size)
        })
    }
}
