"""The persistent buffers of an iteration, at fixed addresses for as long as the engine lives. Computes nothing.

Graphs are recorded over these addresses; a smaller shape uses the first entries of the same memory, so every graph of
every shape reads and writes the same buffers. Sizes: B = max_num_seqs entries, K drafts, N = B * (K + 1) flat rows,
V tokens, G KV groups. The draft logits `[K, B, V]` are the q of the `rejection` rule: with the logits of verification
they are most of these bytes, and are counted before the KV pool is sized.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from specrs.core import Scheduler
from specrs.kernels.cuda.group_rows import GroupRows
from specrs.kernels.cuda.prepare import DraftRows, IterationInputs, VerifyRows
from specrs.kernels.cuda.row_state import Entries
from specrs.runner.cuda.shapes import MERGED_ROWS, Shape
from specrs.runner.cuda.slots import Results, section_views


@dataclass(frozen=True, slots=True)
class DraftSizes:
    """What a drafter needs of buffers."""

    dtype: torch.dtype
    first_pass_rows: int  # rows an entry of pass 1
    in_parallel: bool = False  # one pass makes all drafts
    hidden_size: int = 0  # of states that passes leave, 0: none do
    states_size: int = 0  # of the target's hidden states of a position, L * hidden
    num_ids: int = 0  # ids of a reduced vocabulary, 0: the target's


@dataclass(frozen=True, slots=True)
class Buffers:
    """Inputs, tokens and logits of one iteration. int64 unless said otherwise."""

    # Of each entry, from `prepare_iteration`.
    row: Tensor  # [B] state row; the padding row behind the launch's entries
    n: Tensor  # [B]
    k: Tensor  # [B] K_r
    alive: Tensor  # [B] 0 or 1
    capacity: Tensor  # [B]
    q_start: Tensor  # [B + 1]
    table: Tensor  # [B, max_blocks], in the first KV group
    group_tables: Tensor  # [G - 1, B, max_blocks], in those behind it
    on_host: Tensor  # [B] 0 or 1, whether the record has the entry's drafts
    uniform_start: Tensor  # [first_pass_rows + 1, B + 1], row r: 0, r, 2 r .., q_start of passes of r rows an entry

    # Draft pass 1, and what passes 2..K feed and draw.
    draft_ids: Tensor  # [B * first_pass_rows], what is fed for the target's ids where the draft has others, or none
    first_ids: Tensor  # [B * first_pass_rows]
    first_positions: Tensor
    first_slots: Tensor
    draft_positions: Tensor  # [K, B]
    draft_slots: Tensor  # [K, B]
    draft_draws: Tensor  # [K, B]
    drawn: Tensor  # [K, B], the token of pass i in row i - 1
    draft_top: Tensor  # [K, B] fp32, largest raw logit
    draft_cut: Tensor  # [K, B] fp32
    draft_lse: Tensor  # [K, B] float64
    draft_logits: Tensor  # [K, B, V] fp32; [0, B, V] where q is a point mass; in parallel a view of [B, K, V]
    own_ids: Tensor  # [B], ids of a reduced vocabulary; in parallel [B * K], drafts entry by entry
    own_top: Tensor  # [B * K] fp32, of these; empty unless in parallel
    own_logits: Tensor  # [B, S] fp32, over a reduced vocabulary

    # Of a head over hidden states, of the model's dtype unless said otherwise.
    first_states: Tensor  # [B * first_pass_rows, L * hidden], what pass 1 reads
    left: Tensor  # [B, H], what a pass leaves to the next; in parallel [B * K, H], the rows that drafts are drawn from
    k_start: Tensor  # [B] int64, where its KV begins; of a draft model with windows, too
    keep_first: Tensor  # [B] int64, see `kernels.cuda.hidden_states.Kept`
    keep_count: Tensor  # [B] int64

    # Verification.
    verify_ids: Tensor  # [max(N, 64)], behind the rows of verification those of chunks
    verify_positions: Tensor  # like `verify_ids`
    verify_slots: Tensor  # like `verify_ids`
    group_slots: Tensor  # [G - 1, max(N, 64)], in the KV groups behind the first
    verify_draws: Tensor  # [N]
    verify_rows: Tensor  # [N]
    drafts: Tensor  # [B, K]
    logits: Tensor  # [N, V] fp32
    target_ids: Tensor  # [N]
    target_top: Tensor  # [N] fp32
    target_cut: Tensor  # [N] fp32
    target_lse: Tensor  # [N] float64
    accepted: Tensor  # [B]
    emitted: Tensor  # [B, K + 1]

    @classmethod
    def allocate(
        cls,
        *,
        max_num_seqs: int,
        num_speculative_tokens: int,
        drafting: DraftSizes,
        keeps_q: bool,
        num_groups: int,
        max_blocks: int,
        vocab_size: int,
        device: torch.device,
    ) -> Buffers:
        """Zeroed buffers; draft logits are -inf, which stays where the draft's vocabulary ends before the target's."""
        b, k, first_pass_rows = max_num_seqs, num_speculative_tokens, drafting.first_pass_rows
        n, own = b * (k + 1), b * (k if drafting.in_parallel else 1)
        passed = max(n, MERGED_ROWS[-1])

        def ints(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=device)

        def floats(*shape: int, fill: float = 0.0) -> Tensor:
            return torch.full(shape, fill, dtype=torch.float32, device=device)

        def states(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=drafting.dtype, device=device)

        kept = k if keeps_q else 0
        draft_logits = floats(*((b, kept) if drafting.in_parallel else (kept, b)), vocab_size, fill=-torch.inf)
        steps = torch.arange(first_pass_rows + 1, device=device)[:, None] * torch.arange(b + 1, device=device)
        return cls(
            **{name: ints(b) for name in ("row", "n", "k", "alive", "capacity", "on_host", "accepted")},
            q_start=ints(b + 1),
            table=ints(b, max_blocks),
            group_tables=ints(num_groups - 1, b, max_blocks),
            uniform_start=steps,
            draft_ids=ints(b * first_pass_rows),
            **{f"first_{name}": ints(b * first_pass_rows) for name in ("ids", "positions", "slots")},
            **{f"draft_{name}": ints(k, b) for name in ("positions", "slots", "draws")},
            drawn=ints(k, b),
            **{f"draft_{name}": floats(k, b) for name in ("top", "cut")},
            draft_lse=floats(k, b).double(),
            draft_logits=draft_logits.transpose(0, 1) if drafting.in_parallel else draft_logits,
            own_ids=ints(own),
            own_top=floats(own if drafting.in_parallel else 0),
            own_logits=floats(b if drafting.num_ids else 0, drafting.num_ids),
            first_states=states(b * first_pass_rows if drafting.states_size else 0, drafting.states_size),
            left=states(own if drafting.hidden_size else 0, drafting.hidden_size),
            **{name: ints(b) for name in ("k_start", "keep_first", "keep_count")},
            **{f"verify_{name}": ints(passed) for name in ("ids", "positions", "slots")},
            **{f"verify_{name}": ints(n) for name in ("draws", "rows")},
            group_slots=ints(num_groups - 1, passed),
            drafts=ints(b, k),
            logits=floats(n, vocab_size),
            target_ids=ints(n),
            **{f"target_{name}": floats(n) for name in ("top", "cut")},
            target_lse=floats(n).double(),
            emitted=ints(b, k + 1),
        )

    def entries(self, batch: int) -> Entries:
        """The first `batch` entries."""
        b = slice(0, batch)
        return Entries(self.row[b], self.n[b], self.k[b], self.alive[b], self.capacity[b], self.q_start[: batch + 1])

    def inputs(self, shape: Shape) -> IterationInputs:
        """What `prepare_iteration` writes for a shape."""
        at, rows = (slice(0, shape.max_k), slice(0, shape.batch)), slice(0, shape.rows)
        return IterationInputs(
            entries=self.entries(shape.batch),
            table=self.table[: shape.batch],
            on_host=self.on_host[: shape.batch],
            k_start=self.k_start[: shape.batch],
            draft=DraftRows(
                first_ids=self.first_ids,
                first_positions=self.first_positions,
                first_slots=self.first_slots,
                positions=self.draft_positions[at],
                slots=self.draft_slots[at],
                draws=self.draft_draws[at],
            ),
            verify=VerifyRows(
                ids=self.verify_ids[rows],
                positions=self.verify_positions[rows],
                slots=self.verify_slots[rows],
                draws=self.verify_draws[rows],
                rows=self.verify_rows[rows],
            ),
        )

    def groups(self, batch: int, rows: int) -> GroupRows:
        """Of `batch` entries and `rows` rows of verification, in the KV groups behind the first."""
        return GroupRows(self.group_tables[:, :batch], self.group_slots[:, :rows])

    @property
    def num_bytes(self) -> int:
        """Bytes of all buffers."""
        return sum(tensor.nbytes for tensor in self.tensors().values())

    def tensors(self) -> dict[str, Tensor]:
        """All buffers by name."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}


class DeviceRecord:
    """The device's copy of the launch record and of the results; one of each, because launches follow each other.

    On a CPU (Triton's interpreter) the ring slot's own memory is copied as well, so that the same code runs.
    """

    def __init__(self, scheduler: Scheduler, num_speculative_tokens: int, device: torch.device) -> None:
        # The last section stays behind: constraints are stacked on the host, for the few launches that have any.
        sections = dict(scheduler.record_layout())
        end, _ = sections.pop("constraint")
        self.record = torch.zeros(end, dtype=torch.int64, device=device)
        self.results = torch.zeros(scheduler.results_size, dtype=torch.int64, device=device)
        self.views = section_views(self.record, sections)
        self.results_view = Results.of(section_views(self.results, scheduler.results_layout()), num_speculative_tokens)
