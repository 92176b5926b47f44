//! Sampling parameters of a request for Python, which own the data that the core borrows.

use crate::buffers::{In, readonly};
use crate::error::{Class, size};
use pyo3::prelude::*;
use pyo3::types::PyDict;
use specrs_core::sampling::{LOGPROBS_NONE, LogitsDtype};

/// Sampling parameters of a request. Arguments are checked when a scheduler takes the request, so that the message
/// names its id.
#[pyclass(frozen)]
pub(crate) struct RequestSampling {
    /// All parameters except the lists.
    numbers: specrs_core::RequestSampling<'static>,
    allowed_token_ids: Option<Vec<i64>>,
    logit_bias_ids: Vec<i64>,
    logit_bias: Vec<f64>,
    bad_words: Vec<Vec<i64>>,
}

impl RequestSampling {
    pub(crate) fn core(&self) -> specrs_core::RequestSampling<'_> {
        specrs_core::RequestSampling {
            allowed_token_ids: self.allowed_token_ids.as_deref(),
            logit_bias_ids: &self.logit_bias_ids,
            logit_bias: &self.logit_bias,
            bad_words: &self.bad_words,
            ..self.numbers
        }
    }
}

#[pymethods]
impl RequestSampling {
    #[new]
    #[pyo3(signature = (
        *, seed = 0, temperature = 1.0, top_k = 0, top_p = 1.0, min_p = 0.0, repetition_penalty = 1.0, presence_penalty = 0.0,
        frequency_penalty = 0.0, logprobs = None, prompt_logprobs = None, allowed_token_ids = None, logit_bias = None,
        bad_words_token_ids = Vec::new(), has_extras = false, pooling = false,
    ))]
    #[expect(clippy::too_many_arguments, reason = "keyword-only parameters")]
    fn new(
        py: Python<'_>,
        seed: i64,
        temperature: f64,
        top_k: i64,
        top_p: f64,
        min_p: f64,
        repetition_penalty: f64,
        presence_penalty: f64,
        frequency_penalty: f64,
        logprobs: Option<i64>,
        prompt_logprobs: Option<i64>,
        allowed_token_ids: Option<&Bound<'_, PyAny>>,
        logit_bias: Option<&Bound<'_, PyDict>>,
        bad_words_token_ids: Vec<Vec<i64>>,
        has_extras: bool,
        pooling: bool,
    ) -> PyResult<Self> {
        let allowed: Option<In> = allowed_token_ids.map(|array| readonly("allowed_token_ids", array)).transpose()?;
        let (mut logit_bias_ids, mut biases) = (Vec::new(), Vec::new());
        for (id, bias) in logit_bias.into_iter().flatten() {
            logit_bias_ids.push(id.extract()?);
            biases.push(bias.extract()?);
        }
        Ok(Self {
            numbers: specrs_core::RequestSampling {
                seed,
                temperature,
                top_k: size(py, Class::InvalidRequest, "top_k", top_k)?,
                top_p,
                min_p,
                repetition_penalty,
                presence_penalty,
                frequency_penalty,
                logprobs: logprobs.unwrap_or(LOGPROBS_NONE),
                prompt_logprobs: prompt_logprobs.unwrap_or(LOGPROBS_NONE),
                has_extras,
                pooling,
                ..specrs_core::RequestSampling::default()
            },
            allowed_token_ids: allowed.map(|array| array.as_slice().map(<[i64]>::to_vec)).transpose()?,
            logit_bias_ids,
            logit_bias: biases,
            bad_words: bad_words_token_ids,
        })
    }

    fn columns(&self, py: Python<'_>, logits_dtype: &str) -> PyResult<(Vec<f64>, i64)> {
        let (values, steps) = self.core().columns(parse_dtype(py, logits_dtype)?);
        Ok((values.to_vec(), steps))
    }

    fn __repr__(&self) -> String {
        let core = self.core();
        format!("RequestSampling(temperature={}, seed={})", core.temperature, core.seed)
    }
}

/// Converts a dtype's name, as in torch and numpy.
pub(crate) fn parse_dtype(py: Python<'_>, name: &str) -> PyResult<LogitsDtype> {
    match name {
        "float32" => Ok(LogitsDtype::Float32),
        "float64" => Ok(LogitsDtype::Float64),
        _ => {
            let allowed = "'float32' or 'float64'";
            Err(Class::InvalidConfig.out_of_range(py, "logits_dtype", format_args!("{name:?}"), allowed))
        }
    }
}
