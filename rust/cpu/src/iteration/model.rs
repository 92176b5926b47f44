//! What an iteration asks of a model: passes over flat rows. Gathers no rows and draws no tokens.

use super::translate::Translation;
use crate::error::{Error, Result};
use crate::{Beside, Decoder, Entries, KvCache, Lora, Output, Pass};

/// Sizes of a model, and the ids that its logits are for.
#[derive(Clone, Copy, Debug)]
pub struct Facts<'a> {
    /// Ids that it can be fed.
    pub vocab_size: usize,
    /// Numbers of a hidden state.
    pub hidden_size: usize,
    /// Layers.
    pub num_layers: usize,
    /// Logits of a row.
    pub num_ids: usize,
    /// `[num_ids]` the target's id of each logit, ascending; None: logit i is for id i.
    pub target_ids: Option<&'a [i64]>,
    /// Layers of the target at whose entry an EAGLE-3 head reads hidden states, and the numbers of one state; empty for a model.
    pub hidden_layers: (&'a [usize], usize),
}

/// A model with a KV cache, whose passes an iteration runs. [`Cached`] is the native one; a host may bring another.
///
/// Outputs of a row must not depend on the other rows of its pass: drafts change which rows there are.
pub trait Model {
    /// Its sizes.
    fn facts(&self) -> Facts<'_>;

    /// Feeds the rows of `pass`: writes their K and V, what `output` asks for, and the hidden states of `entries`. `pass.adapters`
    /// is empty: the model knows the adapters of rows of state, which `pass.entries` names for a target.
    ///
    /// `beside` is what an EAGLE-3 head is fed next to the tokens, None for a model. A head leaves what its next pass is fed in
    /// `entries` at layer 1.
    ///
    /// # Errors
    /// Where the pass cannot be run; KV of its rows may have been written.
    fn forward(
        &mut self,
        pass: &Pass<'_>,
        beside: Option<Beside<'_>>,
        output: Output<'_>,
        entries: Entries<'_>,
    ) -> Result<()>;

    /// [`forward`](Self::forward) that keeps the final hidden states of `rows`, ascending, for [`logits`](Self::logits).
    ///
    /// # Errors
    /// As of `forward`.
    fn forward_keeping(&mut self, pass: &Pass<'_>, rows: &[usize], entries: Entries<'_>) -> Result<()>;

    /// Writes the logits `[rows, num_ids]` of some of the hidden states that the last [`forward_keeping`](Self::forward_keeping)
    /// kept, by their index among them.
    ///
    /// # Errors
    /// Where the host fails.
    fn logits(&mut self, rows: &[usize], logits: &mut [f32]) -> Result<()>;

    /// By row of the last pass, whether its final hidden state is finite; empty where the last row of a prompt chunk tells that of
    /// all rows before it, because the last layer attends all positions.
    fn finite(&self) -> &[bool];

    /// Combines the target's hidden states `[N, layers, size]` into what a head is fed, `[N, hidden_size]`.
    ///
    /// # Errors
    /// For a model that is no head.
    fn fuse(&mut self, states: &[f32], fused: &mut [f32]) -> Result<()>;
}

/// A native decoder and its KV cache.
pub struct Cached<'a> {
    /// Runs the passes.
    pub decoder: &'a mut Decoder,
    /// What they write.
    pub kv_cache: &'a mut KvCache,
    /// `[R + 1]` by row of state the adapter that it is computed with; empty: none has one.
    pub adapters: &'a [Option<&'a Lora>],
    kept: Vec<f32>,
}

impl<'a> Cached<'a> {
    /// `adapters` `[R + 1]` are those of rows of state; empty: none has one.
    pub fn new(decoder: &'a mut Decoder, kv_cache: &'a mut KvCache, adapters: &'a [Option<&'a Lora>]) -> Self {
        Self { decoder, kv_cache, adapters, kept: Vec::new() }
    }
}

impl Model for Cached<'_> {
    fn facts(&self) -> Facts<'_> {
        let weights = self.decoder.weights();
        let shape = weights.shape();
        Facts {
            vocab_size: shape.vocab_size,
            hidden_size: shape.hidden_size,
            num_layers: weights.num_layers(),
            num_ids: weights.num_ids(),
            target_ids: weights.target_ids(),
            hidden_layers: weights.hidden_layers(),
        }
    }

    fn forward(
        &mut self,
        pass: &Pass<'_>,
        beside: Option<Beside<'_>>,
        output: Output<'_>,
        entries: Entries<'_>,
    ) -> Result<()> {
        let mut adapters: Vec<Option<&Lora>> = Vec::new();
        if !self.adapters.is_empty() {
            for &row in pass.entries {
                let Some(adapter) = self.adapters.get(row) else {
                    let allowed = format!("one for each row of state, {row} included");
                    return Err(Error::invalid("adapters", format!("{} of them", self.adapters.len()), allowed));
                };
                adapters.push(*adapter);
            }
        }
        let pass = Pass { adapters: &adapters, ..*pass };
        match beside {
            None => self.decoder.forward_keeping(&pass, self.kv_cache, output, entries),
            Some(beside) => self.decoder.forward_beside(&pass, beside, self.kv_cache, output, entries),
        }
    }

    fn forward_keeping(&mut self, pass: &Pass<'_>, rows: &[usize], entries: Entries<'_>) -> Result<()> {
        let mut kept = std::mem::take(&mut self.kept);
        kept.resize(rows.len() * self.facts().hidden_size, 0.0);
        let done = self.forward(pass, None, Output::Hidden { rows, hidden: &mut kept }, entries);
        self.kept = kept;
        done
    }

    fn logits(&mut self, rows: &[usize], logits: &mut [f32]) -> Result<()> {
        let Facts { hidden_size, num_ids, .. } = self.facts();
        let mut hidden = Vec::with_capacity(rows.len() * hidden_size);
        for &row in rows {
            hidden.extend_from_slice(&self.kept[row * hidden_size..][..hidden_size]);
        }
        self.decoder.logits(&hidden, num_ids, logits)
    }

    fn finite(&self) -> &[bool] {
        self.decoder.finite()
    }

    fn fuse(&mut self, states: &[f32], fused: &mut [f32]) -> Result<()> {
        self.decoder.fuse(states, fused)
    }
}

/// A draft model of another tokenizer, in the target's ids: fed and read by the tokens that both know.
pub struct Translated<'a> {
    model: &'a mut dyn Model,
    translation: &'a mut Translation,
}

impl<'a> Translated<'a> {
    /// # Errors
    /// For ids that `model` does not know.
    pub fn new(model: &'a mut dyn Model, translation: &'a mut Translation) -> Result<Self> {
        let Facts { vocab_size, num_ids, .. } = model.facts();
        translation.check(vocab_size.min(num_ids))?;
        Ok(Self { model, translation })
    }
}

impl Model for Translated<'_> {
    fn facts(&self) -> Facts<'_> {
        let vocab_size = self.translation.vocab_size();
        Facts { vocab_size, num_ids: vocab_size, ..self.model.facts() }
    }

    fn forward(
        &mut self,
        pass: &Pass<'_>,
        beside: Option<Beside<'_>>,
        output: Output<'_>,
        entries: Entries<'_>,
    ) -> Result<()> {
        let own = self.model.facts().num_ids;
        let Translation { fed, scores, .. } = &mut *self.translation;
        fed.tokens.clear();
        fed.tokens.extend(pass.tokens.iter().map(|&token| fed.ids[token as usize]));
        let pass = Pass { tokens: &fed.tokens, ..*pass };
        let (Output::Logits { rows, .. } | Output::Argmax { rows, .. }) = &output else {
            return self.model.forward(&pass, beside, output, entries);
        };
        let rows = *rows;
        scores.resize(rows.len() * own, 0.0);
        self.model.forward(&pass, beside, Output::Logits { rows, num_ids: own, logits: scores }, entries)?;
        self.translation.write(own, output);
        Ok(())
    }

    fn forward_keeping(&mut self, _pass: &Pass<'_>, _rows: &[usize], _entries: Entries<'_>) -> Result<()> {
        Err(Error::invalid("model", "a translated draft model", "the target, whose log probabilities are reported"))
    }

    fn logits(&mut self, _rows: &[usize], _logits: &mut [f32]) -> Result<()> {
        self.forward_keeping(&Pass::default(), &[], Entries { layers: &[], states: &mut [] })
    }

    fn finite(&self) -> &[bool] {
        self.model.finite()
    }

    fn fuse(&mut self, states: &[f32], fused: &mut [f32]) -> Result<()> {
        self.model.fuse(states, fused)
    }
}
