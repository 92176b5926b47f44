//! `CpuPool`: threads of native passes, and the instructions of this machine.

use crate::error::{Class, size};
use pyo3::prelude::*;
use specrs_cpu::{Isa, Pool, Tiles};
use std::sync::Arc;

/// Pool of threads that passes are shared among, and the instructions that they use.
#[pyclass(frozen)]
pub(crate) struct CpuPool {
    pub(crate) pool: Arc<Pool>,
    pub(crate) isa: Isa,
}

#[pymethods]
impl CpuPool {
    #[new]
    #[pyo3(signature = (threads, instructions = None))]
    fn new(py: Python<'_>, threads: i64, instructions: Option<&str>) -> PyResult<Self> {
        let threads = size(py, Class::InvalidConfig, "threads", threads)?;
        let isa = instructions.map_or_else(|| Ok(Isa::detect()), Isa::by_name);
        let isa = isa.map_err(|error| Class::InvalidConfig.error(py, error.to_string()))?;
        let pool = Pool::new(threads).map_err(|error| Class::InvalidConfig.error(py, error.to_string()))?;
        Ok(Self { pool: Arc::new(pool), isa })
    }

    #[getter]
    fn threads(&self) -> usize {
        self.pool.threads()
    }

    #[getter]
    fn instructions(&self) -> &'static str {
        self.isa.name()
    }

    fn close(&self, py: Python<'_>) {
        py.detach(|| self.pool.close());
    }

    fn __repr__(&self) -> String {
        format!("CpuPool(threads={}, instructions='{}')", self.threads(), self.isa.name())
    }
}

#[pyfunction]
pub(crate) fn cpu_instruction_sets() -> Vec<&'static str> {
    let sets = Isa::available().into_iter().map(Isa::name);
    Tiles::detect().map(|_| "amx").into_iter().chain(sets).collect()
}
