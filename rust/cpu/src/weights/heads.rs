//! Weights of heads that draft from a target's hidden states, and the checks of their shapes.

use crate::error::{Error, Result, check_len};
use crate::layer::LayerWeights;
use crate::linear::Linear;
use crate::shape::ModelShape;
use specrs_cpu_kernels::Values;

/// Weights of an EAGLE-3 head in addition to its layer (Li et al. 2025), with which it reads the target's hidden
/// states. Its one layer has a `qkv` with `2 hidden` inputs: the normed embedding and the normed hidden state.
pub struct Eagle3Weights {
    /// Layers of the target whose input states the head reads, L of them.
    pub hidden_layers: Vec<usize>,
    /// Projection from L hidden states of the target to one of the head, `L * target's hidden -> hidden`.
    pub fc: Linear,
    /// Weight of the norm before `fc`, `[L * target's hidden]`: one norm over the states of all L layers, or with
    /// `fc_norm_each` one norm for each layer's state.
    pub fc_norm: Option<Values>,
    /// Whether `fc_norm` norms each layer's state by itself, not all of them as one.
    pub fc_norm_each: bool,
    /// Weight of the norm of the hidden state, `[hidden]`; the layer's `input_norm` norms the embedding.
    pub hidden_norm: Values,
    /// Whether the residual is the normed hidden state.
    pub norm_before_residual: bool,
    /// Whether a draft pass is fed the head's state of the previous pass after the final norm, rather than before it.
    pub norm_output: bool,
    /// Target's id of each of the head's ids, ascending.
    pub target_ids: Vec<i64>,
}

/// Weights of an MTP head in addition to its one layer, which is a layer of the target's kind. The head reads the target's
/// hidden state after the final norm, and its own state after its final norm.
pub struct MtpWeights {
    /// Number of layers of the target.
    pub target_layers: usize,
    /// Projection `2 hidden -> hidden` of the normed embedding, then the normed hidden state.
    pub fc: Linear,
    /// Weight of the norm of the embedding, `[hidden]`.
    pub embedding_norm: Values,
    /// Weight of the norm of the hidden state, `[hidden]`.
    pub hidden_norm: Values,
    /// Target's id of each of the head's ids, ascending. The LM head's further outputs are not used.
    pub target_ids: Vec<i64>,
}

/// Weights of a head without KV (Gemma 4's assistant), in addition to its layers. The head reads the target's hidden
/// state after the final norm, and its layers attend the target's keys and values. A pass outputs a state of the
/// target's size, which the next pass reads. The `source` of every layer is the index of the target's layer that it
/// attends, counted over the target's layers that have keys and values, and
/// [`forward_head`](crate::Decoder::forward_head) takes the target's cache.
pub struct AssistantWeights {
    /// Number of layers of the target.
    pub target_layers: usize,
    /// Projection `2 * target's hidden -> hidden`. Its input is the target's scaled embedding of a token, then the
    /// hidden state.
    pub pre: Linear,
    /// Projection `hidden -> target's hidden`, from the state after the final norm to the state that the next pass
    /// reads.
    pub post: Linear,
    /// Target's id of each of the head's ids, ascending. The LM head's further outputs are not used.
    pub target_ids: Vec<i64>,
}

/// Weights of a head that drafts from a target's hidden states, in addition to its layers.
pub enum HeadWeights {
    /// EAGLE-3 head.
    Eagle3(Eagle3Weights),
    /// Head that predicts several tokens, from the target's checkpoint.
    Mtp(MtpWeights),
    /// Head that attends the target's keys and values.
    Assistant(AssistantWeights),
}

impl HeadWeights {
    /// Checks the weights against the head's `shape`, its layers, and the number of outputs of its LM head.
    pub(super) fn check(self, shape: &ModelShape, layers: &[LayerWeights], num_ids: usize) -> Result<Head> {
        match self {
            Self::Eagle3(weights) => {
                if only_layer(layers)?.input_norm.is_none() {
                    return Err(Error::invalid("layers[0].input_norm", "none", "the norm of a head's embeddings"));
                }
                weights.check(shape, num_ids)
            }
            Self::Mtp(weights) => {
                only_layer(layers)?;
                weights.check(shape, num_ids)
            }
            Self::Assistant(weights) => {
                if let Some(i) = layers.iter().position(|layer| layer.varied.source.is_none()) {
                    return Err(Error::invalid(format!("layers[{i}].source"), "none", "a layer of the target"));
                }
                weights.check(shape, num_ids)
            }
        }
    }
}

/// Returns the only layer, or an error unless there is exactly one.
fn only_layer(layers: &[LayerWeights]) -> Result<&LayerWeights> {
    let [layer] = layers else {
        return Err(Error::invalid("layers", format!("{} layers", layers.len()), "1 in a head"));
    };
    Ok(layer)
}

/// Weights of a head that reads hidden states of a target, in addition to its layer, in the form that passes read.
pub(crate) struct Head {
    /// Target's hidden states that the head reads, as [`Entries`](crate::Entries) numbers them.
    pub(crate) hidden_layers: Vec<usize>,
    /// Number of elements of one hidden state of the target.
    pub(crate) state_size: usize,
    /// Projection of a head's input to its own size; `input` says what it reads.
    pub(crate) fc: Linear,
    /// Projection `hidden -> state_size` from the final state to the state that the next pass reads, for a head that
    /// attends the target's keys and values; `None` for other heads.
    pub(crate) post: Option<Linear>,
    pub(crate) hidden_norm: Vec<f32>,
    /// Whether the next pass reads a pass's state after the final norm, rather than before it.
    pub(crate) norm_output: bool,
    pub(crate) target_ids: Vec<i64>,
    pub(crate) input: HeadInput,
}

/// Input of a head's `fc`, and where the embedding enters.
pub(crate) enum HeadInput {
    /// `fc` combines the target's states before the passes. The layer reads the normed embedding and the normed state.
    Eagle3 {
        fc_norm: Option<Vec<f32>>,
        /// Number of inputs of `fc` that are normed together.
        together: usize,
        before_residual: bool,
    },
    /// `fc` is the first phase of a pass and combines the normed embedding and the normed state.
    Mtp { embedding_norm: Vec<f32> },
    /// `fc` is the first phase of a pass and combines the target's embedding and the state as they are.
    Assistant,
}

impl Head {
    /// Returns whether `fc` is the first phase of a pass, which combines embeddings and states.
    pub(crate) fn combines(&self) -> bool {
        !matches!(self.input, HeadInput::Eagle3 { .. })
    }

    /// Returns whether the head has no keys and values, and its layers attend the target's.
    pub(crate) fn shares_kv(&self) -> bool {
        matches!(self.input, HeadInput::Assistant)
    }
}

/// Rejects ids that are not the target's, or that do not ascend.
pub(super) fn check_target_ids(ids: &[i64], shape: &ModelShape) -> Result<()> {
    let outside = |&&id: &&i64| usize::try_from(id).map_or(true, |id| id >= shape.vocab_size);
    if let Some(id) = ids.iter().find(outside) {
        return Err(Error::invalid("target_ids", id, format!("from 0 to vocab_size - 1 = {}", shape.vocab_size - 1)));
    }
    if !ids.is_sorted_by(|a, b| a < b) {
        return Err(Error::invalid("target_ids", "ids that do not ascend", "ascending ids"));
    }
    Ok(())
}

/// Rejects the target's ids of a head that uses the first outputs of an LM head with `num_ids` outputs: if there are
/// none, more than outputs, or if one is out of range or they do not ascend.
fn check_first_ids(ids: &[i64], shape: &ModelShape, num_ids: usize) -> Result<()> {
    if !(1..=num_ids).contains(&ids.len()) {
        let given = format!("{} ids", ids.len());
        return Err(Error::invalid("target_ids", given, format!("from 1 to {num_ids}, the LM head's outputs")));
    }
    check_target_ids(ids, shape)
}

impl AssistantWeights {
    fn check(self, shape: &ModelShape, num_ids: usize) -> Result<Head> {
        let state_size = self.post.outputs();
        self.pre.check("pre", shape.hidden_size, 2 * state_size)?;
        self.post.check("post", state_size.max(1), shape.hidden_size)?;
        check_first_ids(&self.target_ids, shape, num_ids)?;
        Ok(Head {
            hidden_layers: vec![self.target_layers + 1],
            state_size,
            fc: self.pre,
            post: Some(self.post),
            hidden_norm: Vec::new(),
            norm_output: false,
            target_ids: self.target_ids,
            input: HeadInput::Assistant,
        })
    }
}

impl MtpWeights {
    fn check(self, shape: &ModelShape, num_ids: usize) -> Result<Head> {
        let hidden = shape.hidden_size;
        self.fc.check("fc", hidden, 2 * hidden)?;
        check_len("embedding_norm", self.embedding_norm.len(), hidden)?;
        check_len("hidden_norm", self.hidden_norm.len(), hidden)?;
        check_first_ids(&self.target_ids, shape, num_ids)?;
        Ok(Head {
            hidden_layers: vec![self.target_layers + 1],
            state_size: hidden,
            fc: self.fc,
            post: None,
            hidden_norm: self.hidden_norm.to_f32(),
            norm_output: true,
            target_ids: self.target_ids,
            input: HeadInput::Mtp { embedding_norm: self.embedding_norm.to_f32() },
        })
    }
}

impl Eagle3Weights {
    fn check(self, shape: &ModelShape, num_ids: usize) -> Result<Head> {
        let (layers, inputs) = (self.hidden_layers.len(), self.fc.inputs);
        check_len("hidden_norm", self.hidden_norm.len(), shape.hidden_size)?;
        self.fc.check("fc", shape.hidden_size, inputs)?;
        if layers == 0 || inputs == 0 || !inputs.is_multiple_of(layers) {
            let allowed = format!("a divisor of the {inputs} inputs of fc");
            return Err(Error::invalid("hidden_layers", format!("{layers} layers"), allowed));
        }
        if let Some(norm) = &self.fc_norm {
            check_len("fc_norm", norm.len(), inputs)?;
        }
        check_len("target_ids", self.target_ids.len(), num_ids)?;
        check_target_ids(&self.target_ids, shape)?;
        Ok(Head {
            hidden_layers: self.hidden_layers,
            state_size: inputs / layers,
            fc: self.fc,
            post: None,
            hidden_norm: self.hidden_norm.to_f32(),
            norm_output: self.norm_output,
            target_ids: self.target_ids,
            input: HeadInput::Eagle3 {
                fc_norm: self.fc_norm.as_ref().map(Values::to_f32),
                together: if self.fc_norm_each { inputs / layers } else { inputs },
                before_residual: self.norm_before_residual,
            },
        })
    }
}
