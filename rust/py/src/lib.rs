//! Python binding of `specrs-core`: conversions only, no decisions.
use pyo3::prelude::*;

#[pymodule]
mod _core {}
