//! Outputs of all running requests, and the effect of a step on them. Settles nothing itself.

use crate::output::Output;
use rustc_hash::FxHashMap;
use specrs_core::scheduler::layout::{
    FINISH_ERROR, FINISH_NONE, FINISH_STOP, FLAG_CAPACITY, FLAG_NO_TOKEN_ALLOWED, ResultsLayout, Section, SettledLayout,
};
use std::sync::{Arc, Mutex, PoisonError};

/// Reason why a whole step failed; `None` if it did not fail.
pub type Fault<'a> = Option<&'a str>;

/// Requests of a step by id, grouped by the step's effect on them, in the order of its sequences.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Delivered {
    /// Requests that received tokens or ended.
    pub touched: Vec<i64>,
    /// Requests that ended.
    pub ended: Vec<i64>,
    /// Requests that ended here, by a stop string or because their output cannot be decoded. The scheduler still has
    /// them.
    pub stopped: Vec<i64>,
}

/// Outputs by request id, of requests that have not ended. Other threads may read an output at the same time.
#[derive(Debug, Default)]
pub struct Outputs {
    by_id: FxHashMap<i64, Arc<Mutex<Output>>>,
    num_tokens: u64,
    delivered: Delivered,
}

impl Outputs {
    /// Makes an empty collection.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds the output of a request.
    pub fn insert(&mut self, request_id: i64, output: Arc<Mutex<Output>>) {
        self.by_id.insert(request_id, output);
    }

    /// Removes a request that ended outside a step, for example by an abort. Returns whether the request was known.
    pub fn remove(&mut self, request_id: i64) -> bool {
        self.by_id.remove(&request_id).is_some()
    }

    /// Returns the number of requests that have not ended.
    pub fn len(&self) -> usize {
        self.by_id.len()
    }

    /// Returns whether there are no requests.
    pub fn is_empty(&self) -> bool {
        self.by_id.is_empty()
    }

    /// Returns the number of tokens handed to requests since the start.
    pub fn num_tokens(&self) -> u64 {
        self.num_tokens
    }

    /// Hands the settled results that `Scheduler::settle` wrote into `settled` to their requests, and corrects them.
    /// `num_new` becomes the number of tokens that a request kept. `finish_reason` then also reports stop strings and
    /// output that cannot be decoded.
    ///
    /// `results` are those that were settled. `fault` is the reason why the step failed as a whole, if it did; requests
    /// that end with `FINISH_ERROR` get it as their message. The request id becomes -1 where the request has no output
    /// here.
    pub fn deliver(
        &mut self,
        (results_layout, results): (&ResultsLayout, &[i64]),
        (settled_layout, settled): (&SettledLayout, &mut [i64]),
        now: f64,
        fault: Fault<'_>,
    ) -> &Delivered {
        let Delivered { touched, ended, stopped } = &mut self.delivered;
        touched.clear();
        ended.clear();
        stopped.clear();
        let section = |section: Section| &results[section.range()];
        let (accepted, drafted) = (section(results_layout.num_accepted), section(results_layout.num_drafted));
        let (flags, tokens) = (section(results_layout.flags), section(results_layout.tokens));
        let sections = [settled_layout.request_id, settled_layout.num_new, settled_layout.finish_reason];
        let Ok([ids, counts, reasons]) = settled.get_disjoint_mut(sections.map(Section::range)) else {
            unreachable!("sections are disjoint")
        };
        let width = tokens.len() / ids.len().max(1);
        for sequence in 0..ids.len() {
            let id = ids[sequence];
            let Some(output) = self.by_id.get(&id) else {
                ids[sequence] = -1;
                continue;
            };
            let mut output = output.lock().unwrap_or_else(PoisonError::into_inner);
            let told = &tokens[sequence * width..][..width];
            if drafted[sequence] > 0 {
                // Counts that the scheduler has checked.
                let (drafted, accepted) = (drafted[sequence] as usize, accepted[sequence] as usize);
                let _ = output.acceptance_mut().record(drafted, accepted);
                output.keep_draft(accepted, &told[accepted + 1..=drafted]);
            }
            let (reason, new) = (reasons[sequence], &told[..counts[sequence] as usize]);
            let flags = if fault.is_some() { 0 } else { flags[sequence] };
            let mut error = (reason == FINISH_ERROR).then(|| describe(&output, flags, fault));
            match output.append(new, reason == FINISH_STOP, now) {
                Ok((kept, stopped)) => {
                    counts[sequence] = kept as i64;
                    if stopped {
                        reasons[sequence] = FINISH_STOP;
                    }
                }
                Err(broken) => {
                    (counts[sequence], reasons[sequence]) = (0, FINISH_ERROR);
                    error = Some(format!("request {id}: its output could not be read: {broken}"));
                }
            }
            self.num_tokens += counts[sequence] as u64;
            if counts[sequence] > 0 || reasons[sequence] != FINISH_NONE {
                touched.push(id);
            }
            if reasons[sequence] != FINISH_NONE {
                ended.push(id);
                match error {
                    Some(error) => output.fail(error, flags, now),
                    None => output.finish(reasons[sequence], None, now),
                }
                drop(output);
                self.by_id.remove(&id);
                if reason == FINISH_NONE {
                    stopped.push(id);
                }
            }
        }
        &self.delivered
    }
}

/// Returns the message of a request that ends with an error: `fault`, or else what the device's flags mean.
#[cold]
fn describe(output: &Output, flags: i64, fault: Fault<'_>) -> String {
    let id = output.request_id();
    if let Some(fault) = fault {
        return fault.to_string();
    }
    if flags & FLAG_CAPACITY != 0 {
        return format!("request {id}: a position lay beyond its KV blocks; its step wrote nothing there");
    }
    let position = output.num_prompt_tokens() + output.tokens().len();
    if flags & FLAG_NO_TOKEN_ALLOWED != 0 {
        return format!("request {id}: no token is allowed at position {position}: its constraints exclude every one");
    }
    format!(
        "request {id}: the target's logits at position {position}, or a draft's after it, are not finite (NaN or infinity)"
    )
}
