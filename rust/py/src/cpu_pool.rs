//! `CpuPool`: threads of native passes, and the instructions of this machine.

use crate::error::{Class, size};
use pyo3::prelude::*;
use specrs_cpu::{Isa, Pool, Tiles};
use std::sync::Arc;

/// Pool of threads that passes are shared among.
#[pyclass(frozen)]
pub(crate) struct CpuPool(pub(crate) Arc<Pool>);

#[pymethods]
impl CpuPool {
    #[new]
    fn new(py: Python<'_>, threads: i64) -> PyResult<Self> {
        let threads = size(py, Class::InvalidConfig, "threads", threads)?;
        let made = Pool::new(threads).map_err(|error| Class::InvalidConfig.error(py, error.to_string()))?;
        Ok(Self(Arc::new(made)))
    }

    #[getter]
    fn threads(&self) -> usize {
        self.0.threads()
    }

    fn close(&self, py: Python<'_>) {
        py.detach(|| self.0.close());
    }

    fn __repr__(&self) -> String {
        format!("CpuPool(threads={})", self.threads())
    }
}

#[pyfunction]
pub(crate) fn cpu_instruction_sets() -> Vec<&'static str> {
    let sets = Isa::available().into_iter().map(Isa::name);
    Tiles::detect().map(|_| "amx").into_iter().chain(sets).collect()
}
