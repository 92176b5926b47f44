//! States of layers with a gated delta net or a short convolution, and the rows of a pass by request. Computes no state.
//!
//! A state row has one base state, after its first `len` positions, and a log with the updates of drafts after them.
//! The position of a request's next row says how many of these drafts were accepted: the pass replays so many updates,
//! in the same order of sums, and goes on. So a rejected draft leaves no trace, and nothing is copied.
//!
//! A snapshot is a copy of a base state after a given number of positions. A pass writes it while the base passes that
//! number, so it never includes a draft that may be rejected. Another row can begin with it.

use crate::error::{Error, Result};
use crate::shape::{MAX_TILE_ROWS, StateShape};
use specrs_cpu_kernels::{Columns, bytes_of, bytes_of_mut};

/// Snapshot of a row's states that a pass writes if the row passes its length. A pass does not write it if it does not
/// feed the row, if it ends before this length, or if it begins at this length or later.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StateSnapshot {
    /// State row that is copied.
    pub row: usize,
    /// Number of positions that the states cover, all of them committed: drafts count once a later pass has accepted
    /// them.
    pub len: usize,
    /// Slot that the snapshot is written to.
    pub slot: usize,
}

/// Rows of one request in one tile.
#[derive(Debug)]
pub(crate) struct Run {
    /// Index of the tile in the pass.
    tile: usize,
    /// State row of the request.
    pub(crate) state: usize,
    /// Rows of the tile, ascending; masked ones are left out.
    pub(crate) rows: Vec<usize>,
    /// Whether the request begins here, with a state of zeros.
    pub(crate) zero: bool,
    /// Number of logged updates before the first row.
    pub(crate) replay: usize,
    /// Number of first rows that change the base state; the later rows are logged.
    pub(crate) commit: usize,
    /// First entry of the log that the rows after `commit` write.
    pub(crate) log_from: usize,
    /// Snapshots that the rows write: the number of updates of the base before each, replayed ones included, and its
    /// slot.
    pub(crate) snapshots: Vec<(usize, usize)>,
}

/// States of layers that have some, by state row. A row gets its memory when it is first used.
#[derive(Default)]
pub(crate) struct States {
    shape: Option<StateShape>,
    layers: usize,
    /// Entries of each row's log.
    capacity: usize,
    rows: Vec<RowStates>,
    slots: Vec<Slot>,
}

/// Memory of a snapshot.
#[derive(Default)]
struct Slot {
    /// States as in `RowStates::base`; empty if the slot was not used yet.
    base: Vec<f32>,
    /// Number of positions in `base`.
    len: usize,
}

/// Snapshot of a run: the number of updates before it, and its memory split by parts.
pub(crate) type SnapshotColumns<'a> = (usize, Columns<'a, f32>);

/// Memory of a run in one layer, split by parts: base, log, and snapshots.
pub(crate) type RunColumns<'a> = (Columns<'a, f32>, Columns<'a, f32>, Vec<SnapshotColumns<'a>>);

#[derive(Default)]
struct RowStates {
    /// For each layer and part its state: with a delta net the states of its value heads, then inputs of the
    /// convolution. Empty if not used yet.
    base: Vec<f32>,
    /// For each layer and part the entries of the log.
    log: Vec<f32>,
    /// Number of positions in `base`.
    len: usize,
    /// Number of logged updates after the positions in `base`.
    drafts: usize,
}

/// Rows of a pass, as far as states depend on them.
#[derive(Clone, Copy)]
pub(crate) struct FedRows<'a> {
    /// State row of each row, `[N]`.
    pub(crate) sequences: &'a [usize],
    /// Position of each row, `[N]`; negative for a masked row.
    pub(crate) positions: &'a [i64],
    /// Whether the rows belong to prompts, so that none of them is a draft.
    pub(crate) prompts: bool,
    /// Snapshots to write.
    pub(crate) snapshots: &'a [StateSnapshot],
}

impl States {
    /// Returns the bytes of all states and logs.
    pub(crate) fn bytes(&self) -> usize {
        self.rows.iter().map(|row| size_of::<f32>() * (row.base.len() + row.log.len())).sum()
    }

    /// Returns the bytes of all snapshots.
    pub(crate) fn snapshot_bytes(&self) -> usize {
        self.slots.iter().map(|slot| size_of::<f32>() * slot.base.len()).sum()
    }

    /// Fills a slot with NaN, for tests.
    pub(crate) fn poison_snapshot(&mut self, slot: usize) {
        if let Some(slot) = self.slots.get_mut(slot) {
            slot.base.fill(f32::NAN);
        }
    }

    /// Gives a row the states of a snapshot. Its next position is the snapshot's length.
    ///
    /// # Errors
    /// If nothing was written into the slot, or states of another model.
    pub(crate) fn restore(&mut self, row: usize, slot: usize) -> Result<()> {
        let Some(found) = self.slots.get(slot).filter(|found| !found.base.is_empty()) else {
            return Err(Error::invalid("snapshot", slot, "a slot that was written"));
        };
        if let Some(expected) = self.base_len().filter(|&expected| expected != found.base.len()) {
            return Err(wrong_size(found.base.len(), expected));
        }
        let len = found.len;
        self.reserve(&[(row, len, 0)]);
        if self.rows.len() <= row {
            self.rows.resize_with(row + 1, RowStates::default);
        }
        let own = &mut self.rows[row];
        own.base.clone_from(&self.slots[slot].base);
        (own.len, own.drafts) = (len, 0);
        Ok(())
    }

    /// Appends the bytes of a snapshot to `out`.
    ///
    /// # Panics
    /// If nothing was written into the slot.
    pub(crate) fn append_snapshot(&self, slot: usize, out: &mut Vec<u8>) {
        let base = &self.slots[slot].base;
        assert!(!base.is_empty(), "slot {slot} has no snapshot");
        out.extend_from_slice(bytes_of(base));
    }

    /// Overwrites a snapshot with bytes that [`Self::append_snapshot`] gave, of states after `len` positions.
    ///
    /// # Panics
    /// If `bytes` are no whole numbers.
    pub(crate) fn fill_snapshot(&mut self, slot: usize, len: usize, bytes: &[u8]) {
        let numbers = bytes.len() / size_of::<f32>();
        assert_eq!(bytes.len(), numbers * size_of::<f32>(), "bytes of whole numbers");
        if self.slots.len() <= slot {
            self.slots.resize_with(slot + 1, Slot::default);
        }
        let slot = &mut self.slots[slot];
        slot.base.resize(numbers, 0.0);
        bytes_of_mut(&mut slot.base).copy_from_slice(bytes);
        slot.len = len;
    }

    /// Returns the number of elements in a base state; `None` until a pass was planned.
    fn base_len(&self) -> Option<usize> {
        self.shape.map(|shape| self.layers * shape.parts() * shape.base_len())
    }

    /// Fills all states and logs with NaN, for tests: requests that begin at position 0 must read none of them.
    pub(crate) fn poison(&mut self) {
        for row in &mut self.rows {
            row.base.fill(f32::NAN);
            row.log.fill(f32::NAN);
        }
    }

    /// Divides the rows of a pass into runs, one per request and tile. Checks that each request continues where its
    /// last pass ended, and reserves memory. Afterwards the pass must be run.
    ///
    /// # Errors
    /// If the states are another model's, or a row's position is not the next one. Nothing has changed then.
    pub(crate) fn plan(&mut self, shape: StateShape, layers: usize, fed: FedRows<'_>) -> Result<Vec<Run>> {
        if self.shape.is_some_and(|own| own != shape) || (self.layers != layers && self.layers != 0) {
            let allowed = format!("{} layers of {:?}", self.layers, self.shape);
            return Err(Error::invalid("states", format!("{layers} layers of {shape:?}"), allowed));
        }
        // Rows that began with snapshots of another process have states before the first pass.
        let base_len = layers * shape.parts() * shape.base_len();
        if let Some(row) = self.rows.iter().find(|row| !row.base.is_empty() && row.base.len() != base_len) {
            return Err(wrong_size(row.base.len(), base_len));
        }
        let mut runs: Vec<Run> = Vec::new();
        // Length and drafts of the state rows that the pass changes.
        let mut grown: Vec<(usize, usize, usize)> = Vec::new();
        // Number of positions in the base state before each run.
        let mut before_run: Vec<usize> = Vec::new();
        let mut before = None;
        for row in (0..fed.positions.len()).filter(|&row| fed.positions[row] >= 0) {
            let (state, position) = (fed.sequences[row], fed.positions[row] as usize);
            let (tile, within) = (row / MAX_TILE_ROWS, row % MAX_TILE_ROWS);
            let first = before != Some(state);
            before = Some(state);
            let (len, drafts) = match grown.last() {
                Some(&(last, len, drafts)) if !first && last == state => (len, drafts),
                _ if grown.iter().any(|&(other, ..)| other == state) => {
                    let allowed = "next to the other rows of its sequence";
                    return Err(Error::invalid(format!("sequences[{row}]"), state, allowed));
                }
                _ => self.rows.get(state).map_or((0, 0), |row| (row.len, row.drafts)),
            };
            if first {
                let zero = position == 0;
                let (len, drafts) = if zero { (0, 0) } else { (len, drafts) };
                if !(len..=len + drafts).contains(&position) {
                    let allowed = format!("0, or from {len} to {}, where row {state} has a state", len + drafts);
                    return Err(Error::invalid(format!("positions[{row}]"), position, allowed));
                }
                let replay = position - len;
                runs.push(Run {
                    tile,
                    state,
                    rows: vec![within],
                    zero,
                    replay,
                    commit: 1,
                    log_from: 0,
                    snapshots: vec![],
                });
                before_run.push(len);
                grown.push((state, position + 1, 0));
                continue;
            }
            if position != len + drafts {
                return Err(Error::invalid(format!("positions[{row}]"), position, (len + drafts).to_string()));
            }
            let last = runs.last_mut().expect("its first row has made one");
            if last.tile == tile {
                last.rows.push(within);
                last.commit += usize::from(fed.prompts);
            } else {
                let (rows, commit, snapshots) = (vec![within], usize::from(fed.prompts), vec![]);
                runs.push(Run { tile, state, rows, zero: false, replay: drafts, commit, log_from: drafts, snapshots });
                before_run.push(len);
            }
            let grown = grown.last_mut().expect("its first row has made one");
            if fed.prompts {
                grown.1 += 1;
            } else {
                grown.2 += 1;
            }
        }
        for (i, snapshot) in fed.snapshots.iter().enumerate() {
            if fed.snapshots[..i].iter().any(|other| other.slot == snapshot.slot) {
                let allowed = "a slot that no other snapshot of the pass has";
                return Err(Error::invalid(format!("snapshots[{i}].slot"), snapshot.slot, allowed));
            }
        }
        self.shape = Some(shape);
        self.layers = layers;
        self.reserve(&grown);
        self.place_snapshots(&mut runs, &before_run, fed.snapshots);
        for (state, len, drafts) in grown {
            (self.rows[state].len, self.rows[state].drafts) = (len, drafts);
        }
        Ok(runs)
    }

    /// Gives each run the snapshots whose lengths its committed rows pass, and reserves their memory.
    fn place_snapshots(&mut self, runs: &mut [Run], before: &[usize], snapshots: &[StateSnapshot]) {
        let Some(shape) = self.shape else { return };
        for snapshot in snapshots {
            let passes = |(run, before): &(&mut Run, &usize)| {
                let updates = if run.commit > 0 { run.replay + run.commit } else { 0 };
                run.state == snapshot.row && (**before + 1..=**before + updates).contains(&snapshot.len)
            };
            let Some((run, before)) = runs.iter_mut().zip(before).find(passes) else { continue };
            run.snapshots.push((snapshot.len - before, snapshot.slot));
            if self.slots.len() <= snapshot.slot {
                self.slots.resize_with(snapshot.slot + 1, Slot::default);
            }
            let slot = &mut self.slots[snapshot.slot];
            slot.base.resize(self.layers * shape.parts() * shape.base_len(), 0.0);
            slot.len = snapshot.len;
        }
    }

    /// Reserves memory for the states of some rows, and for their drafts.
    fn reserve(&mut self, rows: &[(usize, usize, usize)]) {
        let Some(shape) = self.shape else { return };
        let parts = self.layers * shape.parts();
        let entry = shape.entry_len();
        let needed = rows.iter().map(|&(_, _, drafts)| drafts).max().unwrap_or(0);
        if needed > self.capacity {
            for row in self.rows.iter_mut().filter(|row| !row.base.is_empty()) {
                let mut log = vec![0.0; parts * needed * entry];
                if self.capacity > 0 {
                    let kept = row.log.chunks_exact(self.capacity * entry);
                    for (new, old) in log.chunks_exact_mut(needed * entry).zip(kept) {
                        new[..old.len()].copy_from_slice(old);
                    }
                }
                row.log = log;
            }
            self.capacity = needed;
        }
        let most = rows.iter().map(|&(state, ..)| state + 1).max().unwrap_or(0);
        if self.rows.len() < most {
            self.rows.resize_with(most, RowStates::default);
        }
        for &(state, ..) in rows {
            let row = &mut self.rows[state];
            if row.base.is_empty() {
                row.base = vec![0.0; parts * shape.base_len()];
                row.log = vec![0.0; parts * self.capacity * entry];
            }
        }
    }

    /// Returns the number of entries in each row's log.
    pub(crate) fn capacity(&self) -> usize {
        self.capacity
    }

    /// Returns base, log and snapshots of each run's row in layer `layer` of those with states, split by parts.
    /// `base_bounds` and `log_bounds` are indices of fp32 elements in the base and in the log.
    pub(crate) fn split<'a>(
        &'a mut self,
        layer: usize,
        runs: &[Run],
        base_bounds: &'a [usize],
        log_bounds: &'a [usize],
    ) -> Vec<RunColumns<'a>> {
        let shape = self.shape.expect("a pass was planned");
        let base_len = shape.parts() * shape.base_len();
        let log_len = shape.parts() * self.capacity * shape.entry_len();
        let mut rows: Vec<Option<&mut RowStates>> = self.rows.iter_mut().map(Some).collect();
        let mut slots: Vec<Option<&mut Slot>> = Vec::new();
        if runs.iter().any(|run| !run.snapshots.is_empty()) {
            slots.extend(self.slots.iter_mut().map(Some));
        }
        let parts = runs.iter().map(|run| {
            let row = rows[run.state].take().expect("a state row has one run in a tile");
            let base = &mut row.base[layer * base_len..][..base_len];
            let log = &mut row.log[layer * log_len..][..log_len];
            let snapshots = run.snapshots.iter().map(|&(updates, slot)| {
                let slot = slots[slot].take().expect("a slot has one snapshot in a pass");
                (updates, Columns::new(&mut slot.base[layer * base_len..][..base_len], 1, base_len, base_bounds))
            });
            let snapshots = snapshots.collect();
            (Columns::new(base, 1, base_len, base_bounds), Columns::new(log, 1, log_len, log_bounds), snapshots)
        });
        parts.collect()
    }
}

fn wrong_size(found: usize, expected: usize) -> Error {
    Error::invalid("snapshot", format!("{found} numbers"), format!("{expected}, as the model's states have"))
}

/// Returns the runs of a tile.
pub(crate) fn of_tile(runs: &[Run], tile: usize) -> &[Run] {
    let first = runs.partition_point(|run| run.tile < tile);
    &runs[first..runs.partition_point(|run| run.tile <= tile)]
}
