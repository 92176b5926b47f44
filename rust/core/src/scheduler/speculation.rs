//! Lets a planner choose K for each step, and rebuilds draft KV. The planner decides how much to draft and whose draft
//! KV is broken.

use super::Scheduler;
use super::layout::{FLAG_NOTHING_DRAFTED, StepHeader};
use super::row::{Row, RowIndex, RowState};
use crate::drafts::DrafterKind;
use crate::error::{Error, Result, check_len};
use crate::planner::SpeculationPlanner;

/// Buffers for a planner's inputs and answers, by decoding row; kept between steps to reuse their allocations.
#[derive(Clone, Debug, Default)]
pub(super) struct Speculation {
    rows: Vec<i64>,
    caps: Vec<i64>,
    lags: Vec<i64>,
    ks: Vec<i64>,
    /// Number of verified drafts by decoding sequence, an input of the planner.
    drafted: Vec<i64>,
    /// Number of accepted drafts by decoding sequence, an input of the planner.
    accepted: Vec<i64>,
}

impl Scheduler {
    /// Lets `planner` choose the K of each request for the next [`Self::plan`], within the request's own
    /// `num_speculative_tokens`. Also rebuilds the draft KV of requests whose acceptance the planner found collapsed.
    /// Without this call a request keeps the K chosen last, at first its own. After the step, pass its results to the
    /// planner with [`Self::tell`].
    ///
    /// # Errors
    /// [`Error::InvalidConfig`] if the planner's K or its number of rows is not this scheduler's; nothing has changed
    /// then.
    pub fn speculate(&mut self, planner: &mut SpeculationPlanner) -> Result<()> {
        let config = &self.config;
        for (field, value, own) in [
            ("planner.num_speculative_tokens", planner.num_speculative_tokens(), config.num_speculative_tokens),
            ("planner.max_num_seqs", planner.max_num_seqs(), config.max_num_seqs),
        ] {
            if value != own {
                return Err(Error::invalid_config(field, value, format!("{own}, the scheduler's")));
            }
        }
        let mut asked = std::mem::take(&mut self.speculation);
        asked.rows.clear();
        asked.caps.clear();
        asked.lags.clear();
        for place in 0..self.running.len() {
            let row_index = self.running[place];
            let row = &mut self.rows[row_index as usize];
            if std::mem::take(&mut row.fresh) {
                let request = row.request;
                planner.reset(row_index as usize, self.lora_id(request).is_some())?;
            }
            let row = &self.rows[row_index as usize];
            let n = row.lower_bound();
            if row.is_prefilling() || n >= row.limit {
                continue;
            }
            let lag = if row.drafting > 0 { 0 } else { n - row.draft_len.max(self.held_from(row_index)) };
            if self.drafts.mixes && self.drafts.on_host || self.has_drafts_of_request(row_index) {
                // Drafts on the host cost only their verification. The planner's costs include drafting passes.
                self.choose_drafter_and_k(row_index);
                if self.rows[row_index as usize].drafter != DrafterKind::Device {
                    continue;
                }
            } else {
                self.choose_planned_drafter(row_index);
            }
            let row = &self.rows[row_index as usize];
            asked.rows.push(i64::from(row_index));
            asked.lags.push(if lag > self.drafts.max_draft_lag { lag as i64 } else { 0 });
            let most = self.most_drafts(row, row.max_k);
            asked.caps.push(self.proposed(row_index, most) as i64);
        }
        asked.ks.clear();
        asked.ks.resize(asked.rows.len(), 0);
        planner.decide(&asked.rows, &asked.caps, &asked.lags, &mut asked.ks)?;
        for (&row, &k) in asked.rows.iter().zip(&asked.ks) {
            self.rows[row as usize].k = k as u32;
        }
        self.speculation = asked;
        for row in planner.take_collapsed() {
            let Row { state, max_k, .. } = self.rows[row as usize];
            if state == RowState::Live && max_k > 0 {
                self.discard_draft(row as RowIndex)?;
            }
        }
        Ok(())
    }

    /// Passes the results of a step to `planner`, from its record and its results. `ms` is the step's duration,
    /// which counts if the step did nothing but decode. A sequence whose drafter had nothing to propose counts as one
    /// rejected draft. With drafters on the device and on the host, the planner gets only the device's drafts; the
    /// scheduler judges the host's itself. Drafts that come with a request, from its grammar or its prediction, are
    /// never passed to the planner.
    ///
    /// # Errors
    /// [`Error::InvalidBuffer`] if a buffer does not have its layout's size, or if the planner rejects a row, a K or
    /// `ms`. [`Error::InvalidAcceptance`] if counts of drafted and accepted tokens are impossible. Nothing has changed
    /// then.
    pub fn tell(
        &mut self,
        planner: &mut SpeculationPlanner,
        record: &[i64],
        results: &[i64],
        ms: Option<f64>,
    ) -> Result<()> {
        check_len("record", record.len(), self.record_layout.size)?;
        check_len("results", results.len(), self.results_layout.size)?;
        let header = StepHeader::read(record);
        let (record, results) = (self.record_layout.view(record), self.results_layout.view(results));
        let mixes = self.drafts.mixes && self.drafts.on_host;
        let mut told = std::mem::take(&mut self.speculation);
        for list in [&mut told.rows, &mut told.ks, &mut told.drafted, &mut told.accepted] {
            list.clear();
        }
        let mut timed = header.num_prefill + header.num_draft_chunks == 0;
        for sequence in 0..header.num_decode.min(record.seq_row.len()) {
            let drafter = record.seq_drafter[sequence];
            let of_request = DrafterKind::ALL.iter().any(|&kind| kind as i64 == drafter && kind.comes_with_requests());
            if of_request || mixes && drafter != DrafterKind::Device as i64 {
                timed = false;
                continue;
            }
            let in_vain = i64::from(results.flags[sequence] & FLAG_NOTHING_DRAFTED != 0);
            told.rows.push(record.seq_row[sequence]);
            told.ks.push(record.seq_k[sequence]);
            told.drafted.push(results.num_drafted[sequence].max(in_vain));
            told.accepted.push(results.num_accepted[sequence]);
        }
        let done = if header.num_decode == 0 {
            Ok(())
        } else {
            planner.settle(&told.rows, &told.ks, &told.drafted, &told.accepted, ms.filter(|_| timed))
        };
        self.speculation = told;
        done
    }

    /// Rebuilds a running request's draft KV from position 0, by catch-up chunks. A head that reads the target's hidden
    /// states starts anew with the states that are kept. The request's blocks lose `draft_valid`. Requests
    /// that continued from those blocks rebuild too, because draft KV computed from broken KV is broken.
    ///
    /// # Errors
    /// [`Error::UnknownRequest`] if the id is not live, [`Error::NotRunning`] if it waits.
    pub fn rebuild_draft(&mut self, request_id: i64) -> Result<()> {
        let row = self.running_row(request_id)?;
        self.discard_draft(row)
    }

    /// Clears `draft_valid` of a row's registered blocks, and gives up the row's claims, which are rights to write the
    /// draft KV of a shared block. If another row shares a block whose flag was cleared, the same happens to that row's
    /// blocks from this block on.
    ///
    /// With a head that reads hidden states, every row that shares a block starts anew, even if the flag was not set: a
    /// row whose drafts were not finite has lost its flags, but other rows may have continued from its blocks before.
    /// Steps in flight may still draft for these rows. They set no flags, and the rows start anew after these steps
    /// have settled.
    fn discard_draft(&mut self, row: RowIndex) -> Result<()> {
        self.discard_from(vec![(row, 0)])
    }

    /// Clears `draft_valid` of blocks of several rows, and gives up the rows' claims, which are rights to write the
    /// draft KV of a shared block. `broken` has each row and the index of its first block to clear. The same happens to
    /// other rows, from the first cleared block on that they share. See [`discard_draft`](Self::discard_draft).
    pub(super) fn discard_from(&mut self, mut broken: Vec<(RowIndex, usize)>) -> Result<()> {
        if !self.drafts.has_kv {
            return Ok(());
        }
        while let Some((row_index, first)) = broken.pop() {
            let row = &mut self.rows[row_index as usize];
            row.rebuild = true;
            row.num_draft_marked = row.num_draft_marked.min(first);
            for index in first.max(row.first_block)..row.num_registered {
                let block = self.rows[row_index as usize].blocks[index];
                self.pool.release_claim(block, row_index);
                let from_hidden = self.drafts.from_hidden;
                if let Some(saves) = &mut self.saves {
                    saves.draft_lost(block);
                }
                if self.pool.unmark_draft(block)? || from_hidden {
                    for &other in self.running.iter().filter(|&&other| other != row_index) {
                        let row = &mut self.rows[other as usize];
                        if row.blocks.get(index) == Some(&block) && !(from_hidden && row.rebuild) {
                            // Of the first block that it shares. Blocks after it are handled in their own turn.
                            row.rebuild = true;
                            broken.push((other, index));
                        }
                    }
                }
            }
        }
        Ok(())
    }

    /// Begins a requested rebuild, unless a step in flight still drafts for the row: the device would continue from
    /// its KV.
    pub(super) fn begin_rebuild(&mut self, row_index: RowIndex) {
        let block_size = self.config.block_size;
        let row = &mut self.rows[row_index as usize];
        if row.drafting == 0 {
            row.rebuild = false;
            if self.drafts.from_hidden {
                // Nothing of it counts from here on, be this plan carried out or not.
                row.draft_len = 0;
                let hidden = &mut self.hidden[row_index as usize];
                (hidden.restart, hidden.draft_start) = (true, 0);
                return;
            }
            row.lower_draft_len(row.num_draft_marked * block_size);
        }
    }
}
