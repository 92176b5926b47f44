//! `CpuWeights`: weights of native models, in arrays of the caller.

use crate::buffers::readonly;
use crate::error::{Class, cpu_to_py, size};
use crate::tensors::{embedding as embedding_of, values, weight as weight_of};
use numpy::{Ix1, PyReadonlyArray, PyUntypedArray, PyUntypedArrayMethods};
use pyo3::prelude::*;
use specrs_cpu::{
    Activation, Addition, AssistantWeights, ConvShape, ConvWeights, DecoderWeights, DeltaShape, DeltaWeights,
    Eagle3Weights, Experts, HeadWeights, LayerEmbedding, LayerSizes, LayerWeights, Linear, Mlp, ModelShape, MtpWeights,
    Multipliers, ParallelMlp, Part, QkNorm, QueryScaling, Rotation, RouterScales, SharedExpert, StateWeights, Values,
    VariedLayer, Weights,
};
use std::sync::Arc;

/// Weights of a decoder or of a drafting head, with or without experts. Arrays are borrowed from Python, not copied.
#[pyclass(frozen)]
pub(crate) struct CpuWeights(pub(crate) Arc<Weights>);

/// Projection as Python passes it: a list of parts whose outputs are stacked. Each part has a weight (an array or a
/// `PackedMatrix`) and an optional bias.
type Projection<'py> = Vec<(Bound<'py, PyAny>, Option<Bound<'py, PyAny>>)>;

/// Rotations as pairs of frequencies and magnitude, and the index of each layer's rotation.
type Rotations = (Vec<(Vec<f32>, f32)>, Vec<Option<usize>>);

/// Experts of a layer in the form that Python passes.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
struct ExpertArrays<'py> {
    router: Projection<'py>,
    gate_up: Vec<Projection<'py>>,
    down: Vec<Projection<'py>>,
    per_token: i64,
    normalized: bool,
    #[pyo3(default)]
    sigmoids: bool,
    /// Numbers added to sigmoids for the choice of experts.
    #[pyo3(default)]
    bias: Option<Bound<'py, PyAny>>,
    #[pyo3(default = 1.0)]
    factor: f32,
    #[pyo3(default)]
    weighs_input: bool,
    #[pyo3(default)]
    shared: Option<SharedArrays<'py>>,
    /// Factors of the router's input and of the weights of experts.
    #[pyo3(default)]
    scales: Option<(Bound<'py, PyAny>, Bound<'py, PyAny>)>,
    /// Norms of an MLP's output, of the experts' input, and of the experts' output.
    #[pyo3(default)]
    norms: Option<[Bound<'py, PyAny>; 3]>,
}

/// Expert that every row uses, in the form that Python passes.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
struct SharedArrays<'py> {
    #[pyo3(default)]
    gate: Option<Projection<'py>>,
    gate_up: Projection<'py>,
    down: Projection<'py>,
}

impl SharedArrays<'_> {
    /// Converts the arrays to weights. The number of inputs of `down` is half the outputs of `gate_up`.
    fn weights(&self, name: &str, hidden: usize) -> PyResult<SharedExpert> {
        let gate_up = linear(&format!("{name}.gate_up"), hidden, &self.gate_up)?;
        let down = linear(&format!("{name}.down"), gate_up.outputs() / 2, &self.down)?;
        let gate = self.gate.as_ref().map(|gate| linear(&format!("{name}.gate"), hidden, gate)).transpose()?;
        Ok(SharedExpert { gate, gate_up, down })
    }
}

impl ExpertArrays<'_> {
    /// Converts the arrays to weights. `mlp` has the projections of an MLP next to the experts, if they have norms.
    fn weights(
        &self,
        name: &str,
        py: Python<'_>,
        hidden: usize,
        mlp: impl FnOnce() -> PyResult<(Linear, Linear)>,
    ) -> PyResult<Experts> {
        let vector = |field: &str, array: &Bound<'_, PyAny>| vector(&format!("{name}.{field}"), array);
        if self.gate_up.len() != self.down.len() {
            let (given, expected) = (self.down.len(), self.gate_up.len());
            return Err(Class::InvalidBuffer
                .error(py, format!("{name}.down: {given} experts; must be {expected}, as in {name}.gate_up")));
        }
        let expert = |(i, (gate_up, down)): (usize, (&Projection<'_>, &Projection<'_>))| {
            let gate_up = linear(&format!("{name}.gate_up[{i}]"), hidden, gate_up)?;
            let down = linear(&format!("{name}.down[{i}]"), gate_up.outputs() / 2, down)?;
            Ok((gate_up, down))
        };
        let scales = |(hidden, experts): &(Bound<'_, PyAny>, Bound<'_, PyAny>)| {
            let (hidden, experts) = (vector("scales.hidden", hidden)?, vector("scales.experts", experts)?);
            Ok::<_, PyErr>(RouterScales { hidden, experts })
        };
        let parallel = |[output, expert_input, expert_output]: &[Bound<'_, PyAny>; 3]| {
            let (gate_up, down) = mlp()?;
            Ok::<_, PyErr>(ParallelMlp {
                gate_up,
                down,
                output_norm: vector("mlp.output_norm", output)?,
                expert_input_norm: vector("mlp.expert_input_norm", expert_input)?,
                expert_output_norm: vector("mlp.expert_output_norm", expert_output)?,
            })
        };
        Ok(Experts {
            router: linear(&format!("{name}.router"), hidden, &self.router)?,
            experts: self.gate_up.iter().zip(&self.down).enumerate().map(expert).collect::<PyResult<_>>()?,
            per_token: size(py, Class::InvalidConfig, "per_token", self.per_token)?,
            normalized: self.normalized,
            sigmoids: self.sigmoids,
            bias: self.bias.as_ref().map(|bias| vector("bias", bias)).transpose()?,
            factor: self.factor,
            weighs_input: self.weighs_input,
            shared: self.shared.as_ref().map(|s| s.weights(&format!("{name}.shared"), hidden)).transpose()?,
            scales: self.scales.as_ref().map(scales).transpose()?,
            mlp: self.norms.as_ref().map(parallel).transpose()?,
        })
    }
}

/// Weights and sizes of a gated delta net in the form that Python passes.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
struct DeltaArrays<'py> {
    key_heads: i64,
    value_heads: i64,
    key_dim: i64,
    value_dim: i64,
    kernel: i64,
    conv: Bound<'py, PyAny>,
    a_log: Bound<'py, PyAny>,
    dt_bias: Bound<'py, PyAny>,
    norm: Bound<'py, PyAny>,
    #[pyo3(default)]
    turned: bool,
    #[pyo3(default)]
    by_key_head: bool,
}

impl DeltaArrays<'_> {
    fn weights(&self, name: &str, py: Python<'_>) -> PyResult<DeltaWeights> {
        let size = |field: &str, value| size(py, Class::InvalidConfig, field, value);
        let vector = |field: &str, array| vector(&format!("{name}.{field}"), array);
        Ok(DeltaWeights {
            shape: DeltaShape {
                key_heads: size("key_heads", self.key_heads)?,
                value_heads: size("value_heads", self.value_heads)?,
                key_dim: size("key_dim", self.key_dim)?,
                value_dim: size("value_dim", self.value_dim)?,
                kernel: size("kernel", self.kernel)?,
            },
            conv: vector("conv", &self.conv)?,
            a_log: vector("a_log", &self.a_log)?,
            dt_bias: vector("dt_bias", &self.dt_bias)?,
            norm: vector("norm", &self.norm)?,
            turned: self.turned,
            by_key_head: self.by_key_head,
        })
    }
}

/// Weights and size of a short convolution in the form that Python passes. It has a channel for each element of the
/// residual stream.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
struct ConvArrays<'py> {
    kernel: i64,
    conv: Bound<'py, PyAny>,
}

impl ConvArrays<'_> {
    fn weights(&self, name: &str, py: Python<'_>, channels: usize) -> PyResult<ConvWeights> {
        let kernel = size(py, Class::InvalidConfig, "kernel", self.kernel)?;
        Ok(ConvWeights { shape: ConvShape { channels, kernel }, conv: vector(&format!("{name}.conv"), &self.conv)? })
    }
}

/// One layer in the form that Python passes.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
struct LayerArrays<'py> {
    input_norm: Option<Bound<'py, PyAny>>,
    qkv: Projection<'py>,
    #[pyo3(default)]
    output_gate: bool,
    #[pyo3(default)]
    delta: Option<DeltaArrays<'py>>,
    #[pyo3(default)]
    conv: Option<ConvArrays<'py>>,
    q_norm: Option<Bound<'py, PyAny>>,
    k_norm: Option<Bound<'py, PyAny>>,
    #[pyo3(default)]
    qk_norm_whole: bool,
    #[pyo3(default)]
    sinks: Option<Bound<'py, PyAny>>,
    o: Projection<'py>,
    #[pyo3(default)]
    attention_output_norm: Option<Bound<'py, PyAny>>,
    post_attention_norm: Option<Bound<'py, PyAny>>,
    #[pyo3(default)]
    gate_up: Projection<'py>,
    #[pyo3(default)]
    down: Projection<'py>,
    #[pyo3(default)]
    experts: Option<ExpertArrays<'py>>,
    #[pyo3(default)]
    mlp_output_norm: Option<Bound<'py, PyAny>>,
    #[pyo3(default)]
    varied: Option<VariedArrays<'py>>,
}

/// Properties in which a layer differs from the others of its model (Gemma 4), as Python passes them.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
struct VariedArrays<'py> {
    num_kv_heads: i64,
    head_dim: i64,
    intermediate_size: i64,
    keys_are_values: bool,
    source: Option<usize>,
    value_norm: bool,
    /// Projections to and from the layer's embedding, and the weight of the norm of their result, which is added to the
    /// residual stream.
    addition: Option<(Projection<'py>, Projection<'py>, Bound<'py, PyAny>)>,
    scalar: f32,
}

impl VariedArrays<'_> {
    /// Converts the arrays of layer `i`. `embedding` is the number of features of a layer's embedding.
    fn weights(&self, i: usize, py: Python<'_>, hidden: usize, embedding: usize) -> PyResult<VariedLayer> {
        let size = |field: &str, value| size(py, Class::InvalidConfig, field, value);
        let name = |field: &str| format!("layers[{i}].addition.{field}");
        let addition = self.addition.as_ref().map(|(gate, projection, norm)| {
            Ok::<_, PyErr>(Addition {
                gate: linear(&name("gate"), hidden, gate)?,
                projection: linear(&name("projection"), embedding, projection)?,
                norm: vector(&name("norm"), norm)?,
            })
        });
        Ok(VariedLayer {
            sizes: Some(LayerSizes {
                num_kv_heads: size("num_kv_heads", self.num_kv_heads)?,
                head_dim: size("head_dim", self.head_dim)?,
                intermediate_size: size("intermediate_size", self.intermediate_size)?,
            }),
            keys_are_values: self.keys_are_values,
            source: self.source,
            value_norm: self.value_norm,
            addition: addition.transpose()?,
            scalar: self.scalar,
        })
    }
}

/// Per-layer embeddings in the form that Python passes: number of features for each layer, table, projection, norm.
type LayerEmbeddingArrays<'py> = (usize, Bound<'py, PyAny>, Projection<'py>, Bound<'py, PyAny>);

/// Weights of an EAGLE-3 head in addition to its layer, in the form that Python passes.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
struct HeadArrays<'py> {
    hidden_layers: Vec<i64>,
    fc: Projection<'py>,
    fc_norm: Option<Bound<'py, PyAny>>,
    fc_norm_each: bool,
    hidden_norm: Bound<'py, PyAny>,
    norm_before_residual: bool,
    norm_output: bool,
    target_ids: Vec<i64>,
}

/// Weights of an MTP head in addition to its layer, in the form that Python passes.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
struct MtpArrays<'py> {
    target_layers: usize,
    fc: Projection<'py>,
    embedding_norm: Bound<'py, PyAny>,
    hidden_norm: Bound<'py, PyAny>,
    target_ids: Vec<i64>,
}

/// Weights of a head that attends the target's keys and values, in addition to its layers, in the form that Python
/// passes.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
struct AssistantArrays<'py> {
    target_layers: usize,
    state_size: usize,
    pre: Projection<'py>,
    post: Projection<'py>,
    target_ids: Vec<i64>,
}

impl AssistantArrays<'_> {
    /// Converts the arrays to weights of a head with a residual stream of `hidden` elements.
    fn weights(self, hidden: usize) -> PyResult<AssistantWeights> {
        Ok(AssistantWeights {
            target_layers: self.target_layers,
            pre: linear("pre", 2 * self.state_size, &self.pre)?,
            post: linear("post", hidden, &self.post)?,
            target_ids: self.target_ids,
        })
    }
}

impl MtpArrays<'_> {
    /// Converts the arrays to weights of a head with states of `hidden` elements.
    fn weights(self, hidden: usize) -> PyResult<MtpWeights> {
        Ok(MtpWeights {
            target_layers: self.target_layers,
            fc: linear("fc", 2 * hidden, &self.fc)?,
            embedding_norm: vector("embedding_norm", &self.embedding_norm)?,
            hidden_norm: vector("hidden_norm", &self.hidden_norm)?,
            target_ids: self.target_ids,
        })
    }
}

impl HeadArrays<'_> {
    /// Converts the arrays to weights of a head. The number of inputs of `fc` is the length of its weight's rows.
    fn weights(self) -> PyResult<Eagle3Weights> {
        let mut inputs = 0;
        if let Some((weight, _)) = self.fc.first() {
            let Ok(&[_, width]) = weight.cast::<PyUntypedArray>().map(PyUntypedArrayMethods::shape) else {
                let message = "fc.parts[0].weight: must be an array of 2 dimensions";
                return Err(Class::InvalidBuffer.error(weight.py(), message));
            };
            inputs = width;
        }
        let py = self.hidden_norm.py();
        let layer = |&layer: &i64| size(py, Class::InvalidBuffer, "hidden_layers", layer);
        Ok(Eagle3Weights {
            hidden_layers: self.hidden_layers.iter().map(layer).collect::<PyResult<_>>()?,
            fc: linear("fc", inputs, &self.fc)?,
            fc_norm: self.fc_norm.map(|norm| vector("fc_norm", &norm)).transpose()?,
            fc_norm_each: self.fc_norm_each,
            hidden_norm: vector("hidden_norm", &self.hidden_norm)?,
            norm_before_residual: self.norm_before_residual,
            norm_output: self.norm_output,
            target_ids: self.target_ids,
        })
    }
}

fn vector(name: &str, array: &Bound<'_, PyAny>) -> PyResult<Values> {
    Ok(values::<Ix1>(name, array)?.0)
}

fn linear(name: &str, inputs: usize, parts: &Projection<'_>) -> PyResult<Linear> {
    let mut made = Vec::with_capacity(parts.len());
    for (i, (weight, bias)) in parts.iter().enumerate() {
        let (weight, outputs) = weight_of(&format!("{name}.parts[{i}].weight"), weight)?;
        let bias = bias.as_ref().map(|bias| vector(&format!("{name}.parts[{i}].bias"), bias)).transpose()?;
        made.push(Part::new(weight, bias.as_ref(), outputs));
    }
    Python::attach(|py| Linear::new(name, inputs, made).map_err(|error| cpu_to_py(py, &error)))
}

fn layer(
    py: Python<'_>,
    i: usize,
    arrays: &LayerArrays<'_>,
    shape: &ModelShape,
    inputs: usize,
    embedding: usize,
) -> PyResult<LayerWeights> {
    let name = |field: &str| format!("layers[{i}].{field}");
    let hidden = shape.hidden_size;
    let norm = |field: &str, array: &Option<Bound<'_, PyAny>>| {
        array.as_ref().map(|array| vector(&name(field), array)).transpose()
    };
    let varied = arrays.varied.as_ref().map(|varied| varied.weights(i, py, hidden, embedding)).transpose()?;
    let varied = varied.unwrap_or_default();
    let (head_dim, intermediate) =
        varied.sizes.map_or((shape.head_dim, shape.intermediate_size), |own| (own.head_dim, own.intermediate_size));
    let (state, inner) = match (&arrays.delta, &arrays.conv) {
        (Some(delta), _) => {
            let delta = delta.weights(&name("delta"), py)?;
            let inner = delta.shape.inner();
            (Some(StateWeights::Delta(delta)), inner)
        }
        (None, Some(conv)) => (Some(StateWeights::Conv(conv.weights(&name("conv"), py, hidden)?)), hidden),
        (None, None) => (None, shape.num_heads * head_dim),
    };
    let mlp = || {
        let gate_up = linear(&name("gate_up"), hidden, &arrays.gate_up)?;
        Ok((gate_up, linear(&name("down"), intermediate, &arrays.down)?))
    };
    Ok(LayerWeights {
        input_norm: norm("input_norm", &arrays.input_norm)?,
        qkv: linear(&name("qkv"), inputs, &arrays.qkv)?,
        output_gate: arrays.output_gate,
        state,
        qk_norm: norm("q_norm", &arrays.q_norm)?.zip(norm("k_norm", &arrays.k_norm)?).map(|(q, k)| QkNorm {
            q,
            k,
            whole: arrays.qk_norm_whole,
        }),
        sinks: norm("sinks", &arrays.sinks)?,
        o: linear(&name("o"), inner, &arrays.o)?,
        attention_output_norm: norm("attention_output_norm", &arrays.attention_output_norm)?,
        post_attention_norm: norm("post_attention_norm", &arrays.post_attention_norm)?,
        mlp: match &arrays.experts {
            Some(experts) => Mlp::Experts(Box::new(experts.weights(&name("experts"), py, hidden, mlp)?)),
            None => mlp().map(|(gate_up, down)| Mlp::Dense { gate_up, down })?,
        },
        mlp_output_norm: norm("mlp_output_norm", &arrays.mlp_output_norm)?,
        varied,
    })
}

#[pymethods]
impl CpuWeights {
    #[new]
    #[pyo3(signature = (
        *, vocab_size, hidden_size, intermediate_size, num_heads, num_kv_heads, head_dim, rms_norm_eps, embedding, layers,
        final_norm, lm_head, frequencies, head = None, mtp = None, assistant = None, rotations = None, multipliers = None,
        query_scaling = None, windows = None, activation = "silu", clamped_swiglu = None, kv_scales = None,
        layer_embedding = None, softcap = None, target_ids = None, chunked = false, interleaved_rope = false,
    ))]
    #[expect(clippy::too_many_arguments, reason = "keyword-only sizes and tensors")]
    #[expect(clippy::needless_pass_by_value, reason = "extracted from Python objects")]
    fn new(
        py: Python<'_>,
        vocab_size: i64,
        hidden_size: i64,
        intermediate_size: i64,
        num_heads: i64,
        num_kv_heads: i64,
        head_dim: i64,
        rms_norm_eps: f32,
        embedding: &Bound<'_, PyAny>,
        layers: Vec<LayerArrays<'_>>,
        final_norm: &Bound<'_, PyAny>,
        lm_head: Projection<'_>,
        frequencies: &Bound<'_, PyAny>,
        head: Option<HeadArrays<'_>>,
        mtp: Option<MtpArrays<'_>>,
        assistant: Option<AssistantArrays<'_>>,
        rotations: Option<Rotations>,
        multipliers: Option<(f32, f32, f32)>,
        query_scaling: Option<(f32, usize, u32, bool)>,
        windows: Option<Vec<Option<usize>>>,
        activation: &str,
        clamped_swiglu: Option<(f32, f32)>,
        kv_scales: Option<Vec<(f32, f32)>>,
        layer_embedding: Option<LayerEmbeddingArrays<'_>>,
        softcap: Option<f32>,
        target_ids: Option<Vec<i64>>,
        chunked: bool,
        interleaved_rope: bool,
    ) -> PyResult<Self> {
        let size = |field, value| size(py, Class::InvalidConfig, field, value);
        let shape = ModelShape {
            vocab_size: size("vocab_size", vocab_size)?,
            hidden_size: size("hidden_size", hidden_size)?,
            intermediate_size: size("intermediate_size", intermediate_size)?,
            num_heads: size("num_heads", num_heads)?,
            num_kv_heads: size("num_kv_heads", num_kv_heads)?,
            head_dim: size("head_dim", head_dim)?,
            rms_norm_eps,
        };
        let activation = match activation {
            "silu" => Activation::Silu,
            "gelu_pytorch_tanh" => Activation::GeluTanh,
            other => {
                let (value, allowed) = (format!("{other:?}"), "'silu' or 'gelu_pytorch_tanh'");
                return Err(Class::InvalidConfig.out_of_range(py, "activation", value, allowed));
            }
        };
        let activation = clamped_swiglu.map_or(activation, |(alpha, limit)| Activation::ClampedSwiglu { alpha, limit });
        let frequencies: PyReadonlyArray<'_, f32, Ix1> = readonly("frequencies", frequencies)?;
        let embedding = embedding_of("embedding", embedding)?;
        let inputs = shape.hidden_size * if head.is_some() { 2 } else { 1 };
        let features = layer_embedding.as_ref().map_or(0, |given| given.0);
        let layers = layers
            .iter()
            .enumerate()
            .map(|(i, arrays)| layer(py, i, arrays, &shape, inputs, features))
            .collect::<PyResult<Vec<_>>>()?;
        let final_norm = vector("final_norm", final_norm)?;
        let lm_head = linear("lm_head", shape.hidden_size, &lm_head)?;
        let frequencies = frequencies.as_slice()?.to_vec();
        let layer_embedding = layer_embedding
            .map(|(_, table, projection, norm)| {
                Ok::<_, PyErr>(LayerEmbedding {
                    table: embedding_of("layer_embedding.table", &table)?,
                    projection: linear("layer_embedding.projection", shape.hidden_size, &projection)?,
                    norm: vector("layer_embedding.norm", &norm)?,
                })
            })
            .transpose()?;
        let head = match (head, mtp, assistant) {
            (None, None, None) => None,
            (Some(head), None, None) => Some(HeadWeights::Eagle3(head.weights()?)),
            (None, Some(mtp), None) => Some(HeadWeights::Mtp(mtp.weights(shape.hidden_size)?)),
            (None, None, Some(assistant)) => Some(HeadWeights::Assistant(assistant.weights(shape.hidden_size)?)),
            _ => {
                let message = "head, mtp and assistant: two of them are given; leave out all but one".to_owned();
                return Err(Class::InvalidBuffer.error(py, message));
            }
        };
        let given = DecoderWeights { shape, embedding, layers, final_norm, lm_head, frequencies };
        let weights = match (head, target_ids) {
            (Some(head), _) => Weights::head(given, head),
            (None, Some(ids)) => Weights::draft(given, ids),
            (None, None) => Weights::new(given),
        };
        weights
            .and_then(|weights| match rotations {
                Some((given, layers)) => {
                    let made = |(frequencies, magnitude)| Rotation { frequencies, magnitude };
                    weights.with_rotations(given.into_iter().map(made).collect(), &layers)
                }
                None => Ok(weights),
            })
            .and_then(|weights| match multipliers {
                Some((embedding, residual, scores)) => {
                    weights.with_multipliers(Multipliers { embedding, residual, scores })
                }
                None => Ok(weights),
            })
            .and_then(|weights| match query_scaling {
                Some((beta, length, offset, unrotated)) => {
                    weights.with_query_scaling(QueryScaling { beta, length, offset, unrotated })
                }
                None => Ok(weights),
            })
            .and_then(|weights| match windows {
                Some(windows) => weights.with_windows(&windows),
                None => Ok(weights),
            })
            .and_then(|weights| match kv_scales {
                Some(scales) => weights.with_kv_scales(&scales),
                None => Ok(weights),
            })
            .and_then(|weights| match layer_embedding {
                Some(given) => weights.with_layer_embedding(given),
                None => Ok(weights),
            })
            .and_then(|weights| match softcap {
                Some(softcap) => weights.with_softcap(softcap),
                None => Ok(weights),
            })
            .and_then(|weights| weights.with_activation(activation))
            .map(|weights| if chunked { weights.with_chunks() } else { weights })
            .map(|weights| if interleaved_rope { weights.with_interleaved_rope() } else { weights })
            .map(|weights| Self(Arc::new(weights)))
            .map_err(|error| cpu_to_py(py, &error))
    }

    fn __repr__(&self) -> String {
        format!("CpuWeights(layers={}, vocab_size={})", self.0.num_layers(), self.0.shape().vocab_size)
    }
}
