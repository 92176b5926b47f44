//! Results of requests with pooling: the final hidden state of a prompt's last token, or logits of some ids there. Runs
//! no model.

use crate::error::Result;
use specrs_core::scheduler::StepHeader;
use specrs_core::scheduler::layout::RecordView;

use super::prefill::chunk_is_finite;
use super::{Iteration, Model};

/// Result of a request with pooling, whose prompt has ended.
#[derive(Clone, Debug, PartialEq)]
pub struct Pooled {
    /// Id of the request.
    pub request_id: i64,
    /// Final hidden state of the prompt's last token, `[hidden_size]`. With `allowed_token_ids`, that token's logits of
    /// these ids, in ascending order of the ids.
    pub values: Vec<f32>,
}

impl Iteration {
    /// Reports the results of prompts that end in this step, for requests with pooling. `last` has the index of each
    /// chunk's last row among the hidden states that `target` kept.
    ///
    /// Also fills `tops` and `best` of these requests' chunks: token 0, and a logit that is finite if the hidden state
    /// is.
    pub(super) fn pool(
        &mut self,
        record: &RecordView<'_>,
        header: StepHeader,
        last: &[usize],
        target: &mut dyn Model,
    ) -> Result<()> {
        let (vocab_size, hidden_size) = (self.sampler.vocab_size(), target.facts().hidden_size);
        for chunk in 0..header.num_prefill {
            let processors = &self.processors[record.seq_row[header.num_decode + chunk] as usize];
            if !processors.pooling {
                continue;
            }
            let mut hidden = vec![0.0; hidden_size];
            target.hidden(&last[chunk..=chunk], &mut hidden)?;
            let is_finite = hidden.iter().all(|x| x.is_finite());
            (self.best[chunk], self.tops[chunk]) = (0, if is_finite { 0.0 } else { f32::NAN });
            // The sequence of a chunk that does not end its prompt does not run.
            if !is_finite || !self.sequences[chunk].runs() || !chunk_is_finite(record, chunk, target) {
                continue;
            }
            let logits = |ids: Vec<usize>| ids.iter().map(|id| self.logits[chunk * vocab_size + id]).collect();
            let values = processors.allowed_ids().map_or(hidden, logits);
            self.pooled.push(Pooled { request_id: processors.request_id, values });
        }
        Ok(())
    }
}
