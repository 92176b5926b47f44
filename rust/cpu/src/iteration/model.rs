//! Interface of a model in an iteration: passes over flat rows. Gathers no rows and draws no tokens.

use super::translate::Translation;
use crate::error::{Error, Result};
use crate::{Decoder, Entries, HeadStates, KvCache, Lora, Output, Pass};

/// Sizes of a model, and the ids of its logits.
#[derive(Clone, Copy, Debug)]
pub struct Facts<'a> {
    /// Number of ids that the model can be fed.
    pub vocab_size: usize,
    /// Numbers in a hidden state.
    pub hidden_size: usize,
    /// Number of layers.
    pub num_layers: usize,
    /// Number of logits in a row.
    pub num_ids: usize,
    /// Target's id of each logit, `[num_ids]`, ascending; `None` if logit i is for id i.
    pub target_ids: Option<&'a [i64]>,
    /// Layers of the target whose input states a head reads (EAGLE-3, MTP or an assistant), and the numbers in one
    /// state; empty for other models.
    pub hidden_layers: (&'a [usize], usize),
    /// Whether it is a head without KV of its own, which attends the target's.
    pub shares_kv: bool,
}

/// Model with a KV cache, whose passes an iteration runs. [`Cached`] is the native one; a host may provide another.
///
/// Outputs of a row must not depend on the other rows of its pass, because drafts change the rows of a pass.
pub trait Model {
    /// Returns the model's sizes.
    fn facts(&self) -> Facts<'_>;

    /// Feeds the rows of `pass`: writes their K and V, the requested `output`, and the hidden states of `entries`.
    /// `pass.adapters` is empty. The model knows the adapters of state rows, which `pass.sequences` names for a
    /// target.
    ///
    /// `head_states` is the input of a head (EAGLE-3, MTP or an assistant) in addition to its tokens, `None` for other
    /// models. A head writes the input of its next pass to `entries` at layer 1.
    ///
    /// # Errors
    /// If the pass cannot be run; KV of its rows may have been written.
    fn forward(
        &mut self,
        pass: &Pass<'_>,
        head_states: Option<HeadStates<'_>>,
        output: Output<'_>,
        entries: Entries<'_>,
    ) -> Result<()>;

    /// Runs [`forward`](Self::forward) and keeps the final hidden states of `rows`, ascending, for
    /// [`logits`](Self::logits).
    ///
    /// # Errors
    /// If the pass cannot be run; KV of its rows may have been written.
    fn forward_keeping(&mut self, pass: &Pass<'_>, rows: &[usize], entries: Entries<'_>) -> Result<()>;

    /// Writes the logits `[rows, num_ids]` of some of the hidden states that the last
    /// [`forward_keeping`](Self::forward_keeping) kept, by their index among them.
    ///
    /// # Errors
    /// If the host fails.
    fn logits(&mut self, rows: &[usize], logits: &mut [f32]) -> Result<()>;

    /// Writes some of the hidden states `[rows, hidden_size]` that the last
    /// [`forward_keeping`](Self::forward_keeping) kept, by their index among them.
    ///
    /// # Errors
    /// If the host fails.
    fn hidden(&mut self, rows: &[usize], hidden: &mut [f32]) -> Result<()>;

    /// Returns for each row of the last pass whether its final hidden state is finite. It is empty if the last layer
    /// attends all positions, because then the last row of a prompt chunk shows it for all rows before it.
    fn finite(&self) -> &[bool];

    /// Gives a state row the states of a snapshot that a pass wrote into `slot`.
    ///
    /// # Errors
    /// If no layer has states, or the slot was not written.
    fn restore_states(&mut self, row: usize, slot: usize) -> Result<()>;

    /// Returns the native KV cache; `None` if the host holds it.
    fn kv_cache(&mut self) -> Option<&mut KvCache> {
        None
    }

    /// Runs [`forward`](Self::forward) for a head that attends the keys and values of a target, in the target's cache
    /// `kv_cache`.
    ///
    /// # Errors
    /// If the model is no such head, or the pass cannot be run.
    fn forward_on(
        &mut self,
        _kv_cache: &mut KvCache,
        _pass: &Pass<'_>,
        _head_states: Option<HeadStates<'_>>,
        _output: Output<'_>,
        _entries: Entries<'_>,
    ) -> Result<()> {
        Err(Error::invalid("draft", "a model with KV of its own", "a head that attends the target's"))
    }

    /// Combines the target's hidden states `[N, layers, size]` into what a head is fed, `[N, hidden_size]`.
    ///
    /// # Errors
    /// If the model is no head.
    fn fuse(&mut self, states: &[f32], fused: &mut [f32]) -> Result<()>;
}

/// Native decoder with its KV cache.
pub struct Cached<'a> {
    /// Decoder that runs the passes.
    pub decoder: &'a mut Decoder,
    /// KV cache that the passes write.
    pub kv_cache: &'a mut KvCache,
    /// Adapter of each state row, `[R + 1]`; empty if no row has one.
    pub adapters: &'a [Option<&'a Lora>],
    kept: Vec<f32>,
}

impl<'a> Cached<'a> {
    /// Combines a decoder and its KV cache. `adapters` has the adapter of each state row, `[R + 1]`; empty if no row
    /// has one.
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
            shares_kv: weights.shares_kv(),
        }
    }

    fn forward(
        &mut self,
        pass: &Pass<'_>,
        head_states: Option<HeadStates<'_>>,
        output: Output<'_>,
        entries: Entries<'_>,
    ) -> Result<()> {
        let mut adapters: Vec<Option<&Lora>> = Vec::new();
        if !self.adapters.is_empty() {
            for &row in pass.sequences {
                let Some(adapter) = self.adapters.get(row) else {
                    let allowed = format!("one for each state row, {row} included");
                    return Err(Error::invalid("adapters", format!("{} entries", self.adapters.len()), allowed));
                };
                adapters.push(*adapter);
            }
        }
        let pass = Pass { adapters: &adapters, ..*pass };
        match head_states {
            None => self.decoder.forward_keeping(&pass, self.kv_cache, output, entries),
            Some(head_states) => self.decoder.forward_head(&pass, head_states, self.kv_cache, output, entries),
        }
    }

    fn kv_cache(&mut self) -> Option<&mut KvCache> {
        Some(&mut *self.kv_cache)
    }

    fn forward_on(
        &mut self,
        kv_cache: &mut KvCache,
        pass: &Pass<'_>,
        head_states: Option<HeadStates<'_>>,
        output: Output<'_>,
        entries: Entries<'_>,
    ) -> Result<()> {
        Cached::new(&mut *self.decoder, kv_cache, self.adapters).forward(pass, head_states, output, entries)
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
        let mut hidden = vec![0.0; rows.len() * hidden_size];
        self.hidden(rows, &mut hidden)?;
        self.decoder.logits(&hidden, num_ids, logits)
    }

    fn hidden(&mut self, rows: &[usize], hidden: &mut [f32]) -> Result<()> {
        let size = self.facts().hidden_size;
        for (&row, hidden) in rows.iter().zip(hidden.chunks_exact_mut(size)) {
            hidden.copy_from_slice(&self.kept[row * size..][..size]);
        }
        Ok(())
    }

    fn finite(&self) -> &[bool] {
        self.decoder.finite()
    }

    fn restore_states(&mut self, row: usize, slot: usize) -> Result<()> {
        self.kv_cache.restore_states(row, slot)
    }

    fn fuse(&mut self, states: &[f32], fused: &mut [f32]) -> Result<()> {
        self.decoder.fuse(states, fused)
    }
}

/// Head that attends the target's keys and values, with the target whose cache its passes read.
pub(super) struct Attending<'a> {
    pub(super) head: &'a mut dyn Model,
    pub(super) target: &'a mut dyn Model,
}

impl Model for Attending<'_> {
    fn facts(&self) -> Facts<'_> {
        self.head.facts()
    }

    fn forward(
        &mut self,
        pass: &Pass<'_>,
        head_states: Option<HeadStates<'_>>,
        output: Output<'_>,
        entries: Entries<'_>,
    ) -> Result<()> {
        let Some(kv_cache) = self.target.kv_cache() else {
            return Err(Error::invalid("target", "a model that the host computes", "a native one, whose KV is read"));
        };
        self.head.forward_on(kv_cache, pass, head_states, output, entries)
    }

    fn forward_keeping(&mut self, pass: &Pass<'_>, rows: &[usize], entries: Entries<'_>) -> Result<()> {
        self.head.forward_keeping(pass, rows, entries)
    }

    fn logits(&mut self, rows: &[usize], logits: &mut [f32]) -> Result<()> {
        self.head.logits(rows, logits)
    }

    fn hidden(&mut self, rows: &[usize], hidden: &mut [f32]) -> Result<()> {
        self.head.hidden(rows, hidden)
    }

    fn finite(&self) -> &[bool] {
        self.head.finite()
    }

    fn restore_states(&mut self, row: usize, slot: usize) -> Result<()> {
        self.head.restore_states(row, slot)
    }

    fn fuse(&mut self, states: &[f32], fused: &mut [f32]) -> Result<()> {
        self.head.fuse(states, fused)
    }
}

/// Draft model with another tokenizer, in the target's ids: it is fed and read by the tokens that both vocabularies
/// have.
pub struct Translated<'a> {
    model: &'a mut dyn Model,
    translation: &'a mut Translation,
}

impl<'a> Translated<'a> {
    /// Wraps `model` with a translation of its ids.
    ///
    /// # Errors
    /// If the translation contains ids that `model` does not have.
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
        head_states: Option<HeadStates<'_>>,
        output: Output<'_>,
        entries: Entries<'_>,
    ) -> Result<()> {
        let own = self.model.facts().num_ids;
        let Translation { fed, scores, .. } = &mut *self.translation;
        fed.tokens.clear();
        fed.tokens.extend(pass.tokens.iter().map(|&token| fed.ids[token as usize]));
        let pass = Pass { tokens: &fed.tokens, ..*pass };
        let (Output::Logits { rows, .. } | Output::Argmax { rows, .. }) = &output else {
            return self.model.forward(&pass, head_states, output, entries);
        };
        let rows = *rows;
        scores.resize(rows.len() * own, 0.0);
        self.model.forward(&pass, head_states, Output::Logits { rows, num_ids: own, logits: scores }, entries)?;
        self.translation.write(own, output);
        Ok(())
    }

    fn forward_keeping(&mut self, _pass: &Pass<'_>, _rows: &[usize], _entries: Entries<'_>) -> Result<()> {
        Err(Error::invalid("model", "a translated draft model", "the target, whose hidden states are kept"))
    }

    fn logits(&mut self, _rows: &[usize], _logits: &mut [f32]) -> Result<()> {
        self.forward_keeping(&Pass::default(), &[], Entries { layers: &[], states: &mut [] })
    }

    fn hidden(&mut self, rows: &[usize], hidden: &mut [f32]) -> Result<()> {
        self.logits(rows, hidden)
    }

    fn finite(&self) -> &[bool] {
        self.model.finite()
    }

    fn restore_states(&mut self, row: usize, slot: usize) -> Result<()> {
        self.model.restore_states(row, slot)
    }

    fn fuse(&mut self, states: &[f32], fused: &mut [f32]) -> Result<()> {
        self.model.fuse(states, fused)
    }
}
