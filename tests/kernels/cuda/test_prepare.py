"""Inputs of an iteration: kernels against the rules of docs/start.md, integer for integer, into poisoned buffers."""

from dataclasses import dataclass
from random import Random

import torch
from hypothesis import given
from hypothesis import strategies as st
from specrs.backends.cuda.hidden_rows import HiddenRows
from specrs.core import DRAFTER_DEVICE, DRAFTERS
from specrs.kernels.cuda.prepare import (
    DraftRows,
    IterationInputs,
    PlannedSequences,
    Proposed,
    Sizes,
    VerifyRows,
    assemble_drafts,
    prepare_iteration,
)
from specrs.kernels.cuda.row_state import Sequences
from sweep import sweep
from torch import Tensor

from kernels.cuda.row_states import BLOCK_SIZE, MAX_K, Case, Planned, cases, planned

POISON = -(2**40)
MASK = 89


@dataclass(frozen=True)
class Kind:
    """A kind of drafter. `width`: number of committed tokens in pass 1. `mask`: the mask token, if it has one.
    `hidden`: hidden states, if it reads them. `on_host`: whether the host drafts for each sequence."""

    width: int = 2
    mask: int | None = None
    hidden: HiddenRows | None = None
    on_host: Tensor | None = None  # [count] bool

    @property
    def sizes(self) -> Sizes:
        return Sizes(0, self.width, BLOCK_SIZE, MAX_K, self.mask)


@st.composite
def kinds(draw: st.DrawFn, case: Case) -> Kind:
    on_host = draw(st.none() | st.lists(st.booleans(), min_size=case.count, max_size=case.count))
    placed = None if on_host is None else torch.tensor(on_host)
    name = draw(st.sampled_from(("passes", "parallel", "hidden")))
    if name == "parallel":
        return Kind(MAX_K + 1, MASK, None, placed)
    if name == "passes":
        return Kind(2, None, None, placed)
    width = MAX_K + draw(st.integers(1, 4))
    rows = case.state.num_tokens.shape[0]
    hidden = HiddenRows.allocate(rows - 1, width, 1, 1, torch.float32, torch.device("cpu"))
    for row in range(rows - 1):
        n, draft_len = int(case.state.num_tokens[row]), int(case.state.draft_len[row])
        hidden.start[row] = max(0, n - 1 - draw(st.integers(0, width)))
        hidden.draft_start[row] = draw(st.integers(0, draft_len))
    return Kind(width, None, hidden, placed)


def run(case: Case, emits: Tensor | None = None, kind: Kind = Kind(), chunks: int | None = None) -> dict[str, Tensor]:
    """Run the prepare kernel and return everything that it writes, by name. The kernel's K is the largest K planned for
    a sequence. The last `chunks` sequences are prompt chunks."""
    state, k, first_pass_rows = case.state, case.planned[0], kind.sizes.first_pass_rows

    def poisoned(*shape: int) -> Tensor:
        return torch.full(shape, POISON, dtype=torch.int64)

    stride = case.batch + 2
    drafts = {name: poisoned(MAX_K, stride)[:k, : case.batch] for name in ("positions", "slots", "draws")}
    firsts = {f"first_{name}": poisoned(case.batch * first_pass_rows) for name in ("ids", "positions", "slots")}
    verify = {name: poisoned(case.num_rows) for name in ("ids", "positions", "slots", "draws", "rows")}
    out = {
        **{name: poisoned(case.batch) for name in ("row", "n", "k", "alive", "capacity")},
        "q_start": poisoned(case.batch + 1),
        **firsts,
        **{f"draft_{name}": tensor for name, tensor in drafts.items()},
        **{f"verify_{name}": tensor for name, tensor in verify.items()},
        "table": poisoned(case.batch, state.block_table.shape[1]),
        "on_host": poisoned(case.batch),
        "k_start": poisoned(case.batch),
    }
    drafters = None
    if kind.on_host is not None:
        drafters = case.section(torch.where(kind.on_host, DRAFTERS.index("ngram"), DRAFTER_DEVICE).tolist())
    prepare_iteration(
        state,
        PlannedSequences(
            count=torch.tensor([case.count] if chunks is None else [case.count - chunks, chunks]),
            row=case.section(case.rows),
            k=case.section(case.planned),
            capacity=case.section(case.capacity),
            emits=emits,
            drafter=drafters,
        ),
        IterationInputs(
            sequences=sequences_of(out),
            table=out["table"],
            draft=DraftRows(
                **firsts,
                **drafts,
            ),
            verify=VerifyRows(
                **{name: out[f"verify_{name}"] for name in ("ids", "positions", "slots", "draws", "rows")}
            ),
            on_host=out["on_host"],
            k_start=out["k_start"],
        ),
        Sizes(case.draft_context, kind.width, BLOCK_SIZE, MAX_K, kind.mask),
        kind.hidden,
    )
    return out


def sequences_of(out: dict[str, Tensor]) -> Sequences:
    return Sequences(*(out[name] for name in ("row", "n", "k", "alive", "capacity", "q_start")))


def sequences(case: Case, kind: Kind = Kind()) -> list[Planned]:
    on_host = None if kind.on_host is None else kind.on_host.tolist()
    return planned(case, kind.width if kind.hidden is None else None, on_host)


def slot(case: Case, it: Planned, position: int) -> int:
    """Return the KV slot of a position; -1 if it is masked, or beyond the row's blocks."""
    if not 0 <= position < it.capacity:
        return -1
    return int(case.state.block_table[it.row, position // BLOCK_SIZE]) * BLOCK_SIZE + position % BLOCK_SIZE


@sweep(80)
@given(st.data())
def test_prepare(data: st.DataObject) -> None:
    case = data.draw(cases())
    kind = data.draw(kinds(case))
    starts = None if kind.hidden is None else (kind.hidden.start.tolist(), kind.hidden.draft_start.tolist())
    out, expected, state, count = run(case, kind=kind), sequences(case, kind), case.state, case.count
    padding, total = case.batch - count, sum(case.planned) + count
    assert out["row"].tolist() == case.rows + [state.num_tokens.shape[0] - 1] * padding
    assert out["n"].tolist()[:count] == [it.n for it in expected]
    assert out["k"].tolist() == [it.k for it in expected] + [0] * padding
    assert out["alive"].tolist() == [it.alive for it in expected] + [0] * padding
    assert out["capacity"].tolist()[:count] == case.capacity
    assert out["q_start"].tolist() == [it.first for it in expected] + [total] * (padding + 1)
    assert (out["verify_positions"][total:] == -1).all()
    assert (out["verify_slots"][total:] == -1).all()
    assert 0 <= out["verify_ids"].min() <= out["verify_ids"].max() < 90
    if kind.on_host is not None:
        assert out["on_host"].tolist() == kind.on_host.tolist() + [0] * padding
    if case.planned[0]:
        assert (out["first_positions"].view(case.batch, -1)[count:] == -1).all()
    for b, (it, planned_k) in enumerate(zip(expected, case.planned, strict=True)):
        for i in range(planned_k + 1):
            row, position = it.first + i, it.n - 1 + i if it.alive and i <= it.k else -1
            assert out["verify_positions"][row] == position
            assert out["verify_slots"][row] == slot(case, it, position)
            assert out["verify_draws"][row] == it.n + i
            assert out["verify_rows"][row] == it.row
        assert out["verify_ids"][it.first] == state.tokens[it.row, it.n - 1]
        if it.alive:
            blocks = min(-(-(it.n + it.k) // BLOCK_SIZE), state.block_table.shape[1])
            assert out["table"][b, :blocks].equal(state.block_table[it.row, :blocks])
        if case.planned[0]:
            check_drafting(case, kind, out, b, it, starts)


def check_drafting(
    case: Case, kind: Kind, out: dict[str, Tensor], b: int, it: Planned, starts: tuple[list[int], list[int]] | None
) -> None:
    """Check the inputs of the draft passes of sequence `b`.

    `starts`: `start` and `draft_start` of the hidden rows before the kernel ran. None: the drafter reads no hidden
    states.
    """
    offset, draws = int(starts is not None), kind.on_host is None or not kind.on_host[b]
    missing, tokens = int(case.state.draft_len[it.row]), case.state.tokens[it.row]
    if starts is not None:
        start, draft_start = (each[it.row] for each in starts)
        if it.k and draws and missing < start:
            draft_start = start  # it starts anew
        assert kind.hidden is not None
        assert kind.hidden.draft_start[it.row] == out["k_start"][b] == draft_start
        missing = max(missing, start)

    def fed(column: int) -> tuple[int, int]:
        """Return the position and KV slot that `column` of the draft inputs is fed. The first `width` columns are the
        first pass, whose last position is n - 1 - offset. Each later column is one more draft pass."""
        position, pass_number = it.n + column - kind.width - offset, max(column - kind.width + 2, 1)
        if not draws or it.k < pass_number or position < 0 or (starts is not None and position < missing):
            return -1, -1
        return position, slot(case, it, position) if position >= missing else -1

    rows = kind.sizes.first_pass_rows
    for column in range(rows):
        at, (position, kv_slot) = b * rows + column, fed(column)
        assert out["first_positions"][at] == position
        assert out["first_slots"][at] == kv_slot
        token = 0 if position < 0 else MASK if column >= kind.width else int(tokens[position + offset])
        assert out["first_ids"][at] == token
    for i in range(1, case.planned[0] + 1):
        assert out["draft_draws"][i - 1, b] == it.n + i - 1
        if i > 1:
            position, kv_slot = fed(kind.width + i - 2)
            assert out["draft_positions"][i - 1, b] == position
            assert out["draft_slots"][i - 1, b] == kv_slot
            assert (out["draft_positions"][i - 1, case.count :] == -1).all()


@sweep(30)
@given(cases(max_k=0))
def test_prepare_of_prompt_chunks(case: Case) -> None:
    emits = torch.tensor([sequence % 2 for sequence in range(case.batch)])
    out, alive = run(case, emits), torch.tensor([it.alive for it in sequences(case)]).long()
    assert out["alive"][: case.count].equal(alive * emits[: case.count])
    dead = out["alive"][: case.count] == 0
    assert (out["verify_positions"][: case.count][dead] == -1).all()


@sweep(40)
@given(cases(), st.data())
def test_prepare_of_chunks_after_sequences_that_decode(case: Case, data: st.DataObject) -> None:
    """Check prompt chunks after decoding sequences: a chunk that ends its prompt is prepared like a decoding sequence.
    Another one draws no token and drafts nothing: its `alive` and `k` are 0, its positions and slots -1."""
    ends = data.draw(st.lists(st.integers(0, 1), max_size=case.count))
    out, plain = run(case, torch.tensor([*ends, 1, 1]), chunks=len(ends)), run(case)
    live = torch.tensor([1] * (case.count - len(ends)) + ends + [0] * (case.batch - case.count))
    for name in ("row", "n", "capacity", "q_start", "verify_draws", "verify_rows"):
        assert out[name].equal(plain[name])
    for name in ("alive", "k"):
        assert out[name].equal(plain[name] * live)
    rows = plain["q_start"].diff()
    for name in ("verify_positions", "verify_slots"):
        is_live = torch.cat((live.repeat_interleave(rows), live.new_zeros(case.num_rows - int(rows.sum()))))
        assert out[name].equal(torch.where(is_live != 0, plain[name], -1))


@sweep(40)
@given(cases(), st.booleans(), st.randoms(use_true_random=False))
def test_assemble(case: Case, mixes: bool, random: Random) -> None:
    k = case.planned[0]
    if k == 0:
        return
    out = run(case)
    proposed, placed = None, [mixes and random.random() < 0.5 for _ in range(case.batch)]
    tokens = 1000 + torch.arange((case.batch + 2) * MAX_K).view(-1, MAX_K)
    if mixes:
        proposed = Proposed(torch.tensor(placed).long(), tokens)
    before = case.state.tokens.clone()
    ids = out["verify_ids"].clone()
    drawn = torch.arange(100, 100 + MAX_K * (case.batch + 1)).view(MAX_K, -1)[:k, : case.batch]
    drafts = torch.full((case.batch, MAX_K), POISON)[:, :k]
    assemble_drafts(drawn, sequences_of(out), case.state.tokens, out["verify_ids"], drafts, MAX_K, proposed)
    expected_tokens, expected_drafts = before.clone(), torch.zeros(case.batch, k, dtype=torch.int64)
    for sequence, row in enumerate(case.rows):
        n, start = int(out["n"][sequence]), int(out["q_start"][sequence])
        for i in range(int(out["k"][sequence])):
            expected_tokens[row, n + i] = expected_drafts[sequence, i] = ids[start + 1 + i] = (
                tokens[sequence, i] if placed[sequence] else drawn[i, sequence]
            )
    assert case.state.tokens.equal(expected_tokens)
    assert out["verify_ids"].equal(ids)
    assert drafts.equal(expected_drafts)
