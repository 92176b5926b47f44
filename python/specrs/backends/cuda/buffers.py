"""Persistent buffers of an iteration, at fixed addresses for the engine's life. Computes nothing.

CUDA graphs are recorded over these addresses. A smaller shape uses the beginning of the same memory, so all graphs read
and write the same buffers. Sizes: B = max_num_seqs sequences, K drafts, N = B * (K + 1) flat rows, V tokens, G KV
groups. The draft logits `[K, B, V]`, which are q of the `rejection` rule, and the logits of verification are most of
these bytes. They are counted before the KV pool is sized.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from specrs.backends.cuda.shapes import MERGED_ROWS, Shape
from specrs.backends.cuda.slots import Results, section_views
from specrs.core import Scheduler
from specrs.kernels.cuda.group_rows import GroupRows
from specrs.kernels.cuda.prepare import DraftRows, IterationInputs, VerifyRows
from specrs.kernels.cuda.row_state import Sequences


@dataclass(frozen=True, slots=True)
class DraftSizes:
    """Sizes that a drafter needs for its buffers."""

    dtype: torch.dtype
    first_pass_rows: int  # rows per sequence in draft pass 1
    in_parallel: bool = False  # one pass makes all drafts
    hidden_size: int = 0  # size of the states that a pass leaves for the next one; 0: none
    states_size: int = 0  # size of the target's hidden states of a position, L * hidden; 0: not read
    num_ids: int = 0  # ids of a reduced vocabulary, 0: the target's


@dataclass(frozen=True, slots=True)
class Buffers:
    """Inputs, tokens and logits of one iteration, by sequence or flat row. int64 unless a comment says otherwise."""

    # For each sequence, from `prepare_iteration`.
    row: Tensor  # [B] state row; the padding row after the step's sequences
    n: Tensor  # [B] committed tokens
    k: Tensor  # [B] number of drafts, K_r
    alive: Tensor  # [B] 0 or 1
    capacity: Tensor  # [B] positions for which there are KV blocks
    q_start: Tensor  # [B + 1]
    table: Tensor  # [B, max_blocks], in the first KV group
    group_tables: Tensor  # [G - 1, B, max_blocks], in the KV groups after the first
    on_host: Tensor  # [B] 0 or 1, whether the record has the sequence's drafts
    uniform_start: Tensor  # [first_pass_rows + 1, B + 1], row r: 0, r, 2 r .., q_start of passes of r rows per sequence

    # Inputs of draft pass 1, and inputs and draws of passes 2..K.
    draft_ids: Tensor  # [B * first_pass_rows], the draft's ids for the target's, if they differ
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
    draft_logits: Tensor  # [K, B, V] fp32; [0, B, V] if q is a point mass; in parallel a view of [B, K, V]
    own_ids: Tensor  # [B], ids of a reduced vocabulary; in parallel [B * K], drafts by sequence
    own_top: Tensor  # [B * K] fp32, logits of `own_ids`; empty unless in parallel
    own_logits: Tensor  # [B, S] fp32, over a reduced vocabulary

    # For a head over hidden states, in the model's dtype unless a comment says otherwise.
    first_states: Tensor  # [B * first_pass_rows, L * hidden], what pass 1 reads
    left: Tensor  # [B, H], states that a pass leaves for the next; in parallel [B * K, H], the final states of drafts
    k_start: Tensor  # [B] int64, position at which draft KV begins; also for a draft model with windows
    keep_first: Tensor  # [B] int64, see `kernels.cuda.hidden_states.Kept`
    keep_count: Tensor  # [B] int64

    # Verification.
    verify_ids: Tensor  # [max(N, 64)], rows of verification, then rows of chunks
    verify_positions: Tensor  # like `verify_ids`
    verify_slots: Tensor  # like `verify_ids`
    group_slots: Tensor  # [G - 1, max(N, 64)], in the KV groups after the first
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
        """Return zeroed buffers. Draft logits are -inf, and stay so for ids of the target that the draft's vocabulary
        lacks."""
        b, k, first_pass_rows = max_num_seqs, num_speculative_tokens, drafting.first_pass_rows
        n, own = b * (k + 1), b * (k if drafting.in_parallel else 1)
        passed = max(n, MERGED_ROWS.totals[-1])

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

    def sequences(self, batch: int) -> Sequences:
        """Return views of the first `batch` sequences."""
        b = slice(0, batch)
        return Sequences(self.row[b], self.n[b], self.k[b], self.alive[b], self.capacity[b], self.q_start[: batch + 1])

    def inputs(self, shape: Shape) -> IterationInputs:
        """Return views of what `prepare_iteration` writes for a shape."""
        at, rows = (slice(0, shape.max_k), slice(0, shape.batch)), slice(0, shape.rows)
        return IterationInputs(
            sequences=self.sequences(shape.batch),
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
        """Return views of the block tables of `batch` sequences, and of the slots of `rows` rows of verification, in
        the KV groups after the first."""
        return GroupRows(self.group_tables[:, :batch], self.group_slots[:, :rows])

    @property
    def num_bytes(self) -> int:
        """Number of bytes of all buffers."""
        return sum(tensor.nbytes for tensor in self.tensors().values())

    def tensors(self) -> dict[str, Tensor]:
        """All buffers by name."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}


class DeviceRecord:
    """Copy on the device of a step's record and results. There is one of each, because steps run one after the other.

    On a CPU (Triton's interpreter) the ring slot's memory is copied too, so that the same code runs.
    """

    def __init__(self, scheduler: Scheduler, num_speculative_tokens: int, device: torch.device) -> None:
        # The last section is not copied: constraints are stacked on the host, for the few steps that have any.
        sections = dict(scheduler.record_layout())
        end, _ = sections.pop("constraint")
        self.record = torch.zeros(end, dtype=torch.int64, device=device)
        self.results = torch.zeros(scheduler.results_size, dtype=torch.int64, device=device)
        self.views = section_views(self.record, sections)
        self.results_view = Results.of(section_views(self.results, scheduler.results_layout()), num_speculative_tokens)
