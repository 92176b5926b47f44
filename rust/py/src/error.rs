//! Exception classes, and the mapping of the core's errors to them.

use pyo3::exceptions::{PyException, PyValueError};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyDict, PyTuple, PyType};
use specrs_core::{Error, must_be};
use std::fmt::Display;

/// Exception class of the module; the discriminant indexes [`CLASSES`].
#[derive(Clone, Copy)]
pub(crate) enum Class {
    Specrs,
    InvalidConfig,
    InvalidRequest,
    DuplicateRequest,
    UnknownRequest,
    NotRunning,
    OutOfBlocks,
    InvalidBlock,
    InvalidBuffer,
    InvalidAcceptance,
    SettleOrder,
    InvalidResults,
    Integrity,
    InvalidTokenizer,
}

/// Name and docstring of each class, and whether it is also a `ValueError`.
const CLASSES: [(&str, &str, bool); 14] = [
    ("SpecrsError", "Base of every error that specrs raises on purpose.", false),
    ("InvalidConfigError", "A setting is outside its range.", true),
    ("InvalidRequestError", "A request can never be served as given.", true),
    ("DuplicateRequestError", "A request with this id is waiting or running.", false),
    ("UnknownRequestError", "No request with this id is waiting or running.", false),
    ("NotRunningError", "The operation needs a running request and this one is waiting.", false),
    ("OutOfBlocksError", "The block pool has no block to give.", false),
    ("InvalidBlockError", "A block id is outside the pool, or its state does not allow the operation.", false),
    ("InvalidBufferError", "A numpy buffer has the wrong dtype, shape, layout, size or content.", false),
    ("InvalidAcceptanceError", "A draft was recorded with impossible counts.", false),
    ("SettleOrderError", "Steps settle in the order in which they were planned.", false),
    ("InvalidResultsError", "The device reported something that its step cannot have produced.", false),
    ("IntegrityError", "The state of the scheduler or the block pool contradicts itself: a bug in specrs.", false),
    ("InvalidTokenizerError", "A tokenizer cannot be read, or fails on tokens.", false),
];

/// Class objects, made at import. They are made here because `create_exception!` has a single base, and some of the
/// classes are also `ValueError`.
static TYPES: PyOnceLock<Vec<Py<PyType>>> = PyOnceLock::new();

fn types(py: Python<'_>) -> PyResult<&[Py<PyType>]> {
    let make = || {
        let metaclass = py.get_type::<PyType>();
        let mut types: Vec<Py<PyType>> = Vec::with_capacity(CLASSES.len());
        for (name, doc, is_value_error) in CLASSES {
            let namespace = PyDict::new(py);
            namespace.set_item("__doc__", doc)?;
            let base = types.first().map_or_else(|| py.get_type::<PyException>(), |base| base.bind(py).clone());
            let mut bases = vec![base];
            if is_value_error {
                bases.push(py.get_type::<PyValueError>());
            }
            let class = metaclass.call1((name, PyTuple::new(py, bases)?, namespace))?;
            types.push(class.cast_into::<PyType>()?.unbind());
        }
        Ok(types)
    };
    TYPES.get_or_try_init(py, make).map(Vec::as_slice)
}

/// Adds the exception classes to the module.
pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    let py = module.py();
    for ((name, _, _), class) in CLASSES.iter().zip(types(py)?) {
        module.add(*name, class.bind(py))?;
    }
    Ok(())
}

impl Class {
    /// Makes an instance of this class with `message`.
    pub(crate) fn error(self, py: Python<'_>, message: impl Into<String>) -> PyErr {
        match types(py) {
            Ok(types) => PyErr::from_type(types[self as usize].bind(py).clone(), message.into()),
            Err(error) => error,
        }
    }

    /// Makes an instance of this class whose message is that of a value outside its range.
    pub(crate) fn out_of_range(
        self,
        py: Python<'_>,
        field: impl Display,
        value: impl Display,
        allowed: impl Display,
    ) -> PyErr {
        self.error(py, must_be(field, value, allowed))
    }
}

/// Converts an error of the core to its exception.
pub(crate) fn to_py(py: Python<'_>, error: &Error) -> PyErr {
    let class = match error {
        Error::InvalidConfig { .. } => Class::InvalidConfig,
        Error::InvalidRequest { .. } => Class::InvalidRequest,
        Error::DuplicateRequest { .. } => Class::DuplicateRequest,
        Error::UnknownRequest { .. } => Class::UnknownRequest,
        Error::NotRunning { .. } => Class::NotRunning,
        Error::OutOfBlocks { .. } => Class::OutOfBlocks,
        Error::InvalidBlock { .. } => Class::InvalidBlock,
        Error::InvalidBuffer { .. } => Class::InvalidBuffer,
        Error::InvalidAcceptance { .. } => Class::InvalidAcceptance,
        Error::SettleOrder { .. } => Class::SettleOrder,
        Error::InvalidResults { .. } => Class::InvalidResults,
        Error::Integrity { .. } => Class::Integrity,
        _ => Class::Specrs,
    };
    class.error(py, error.to_string())
}

/// Converts an error of `specrs-cpu` to its exception.
pub(crate) fn cpu_to_py(py: Python<'_>, error: &specrs_cpu::Error) -> PyErr {
    match error {
        specrs_cpu::Error::Core(error) => to_py(py, error),
        specrs_cpu::Error::Invalid { .. } => Class::InvalidBuffer.error(py, error.to_string()),
        _ => Class::Specrs.error(py, error.to_string()),
    }
}

/// Conversion of a result: `result.or_raise(py)?` turns an error of the core into its exception.
pub(crate) trait OrRaise<T> {
    fn or_raise(self, py: Python<'_>) -> PyResult<T>;
}

impl<T> OrRaise<T> for Result<T, Error> {
    fn or_raise(self, py: Python<'_>) -> PyResult<T> {
        self.map_err(|error| to_py(py, &error))
    }
}

/// Converts a Python int to a size. A negative value raises the given class with the field's name instead of
/// `OverflowError`.
pub(crate) fn size(py: Python<'_>, class: Class, field: &str, value: i64) -> PyResult<usize> {
    usize::try_from(value).map_err(|_| class.out_of_range(py, field, value, "at least 0"))
}
