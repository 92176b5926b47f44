"""Inputs of an iteration: the kernels against the CPU loop's, integer for integer, into poisoned buffers."""

from dataclasses import dataclass
from random import Random

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from specrs.core import DRAFTER_DEVICE, DRAFTER_NGRAM
from specrs.kernels.cuda.prepare import (
    DraftRows,
    IterationInputs,
    PlannedEntries,
    Proposed,
    Sizes,
    VerifyRows,
    assemble_drafts,
    prepare_iteration,
)
from specrs.kernels.cuda.row_state import Entries
from specrs.reference.iteration import prepare
from specrs.runner.cuda.entries import Iteration
from specrs.runner.cuda.hidden_rows import HiddenRows
from torch import Tensor

from kernels.cuda.row_states import BLOCK_SIZE, MAX_K, Case, Drafter, cases

POISON = -(2**40)
MASK = 89


@dataclass(frozen=True)
class Kind:
    """What drafts: `width` committed tokens in pass 1, masks behind them, hidden states; of some entries the host."""

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
    """Everything that the kernel writes, by name; K is the largest planned one. The last `chunks` entries are chunks
    behind those that decode."""
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
        drafters = case.section(torch.where(kind.on_host, DRAFTER_NGRAM, DRAFTER_DEVICE).tolist())
    prepare_iteration(
        state,
        PlannedEntries(
            count=torch.tensor([case.count] if chunks is None else [case.count - chunks, chunks]),
            row=case.section(case.rows),
            k=case.section(case.planned),
            capacity=case.section(case.capacity),
            emits=emits,
            drafter=drafters,
        ),
        IterationInputs(
            entries=entries_of(out),
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


def entries_of(out: dict[str, Tensor]) -> Entries:
    return Entries(*(out[name] for name in ("row", "n", "k", "alive", "capacity", "q_start")))


class HeadDrafter(Drafter):
    hidden_layers = (0,)


def reference(case: Case, kind: Kind = Kind()) -> Iteration:
    drafter = Drafter(case.draft_context) if kind.hidden is None else HeadDrafter(case.draft_context)
    if kind.hidden is None:
        drafter.max_draft_lag = kind.width  # type: ignore[misc]
    return prepare(
        case.state,
        torch.tensor(case.rows),
        case.planned,
        torch.tensor(case.capacity),
        block_size=BLOCK_SIZE,
        max_context=1000,
        drafter=drafter,
        on_host=kind.on_host,
    )


@settings(max_examples=80)
@given(st.data())
def test_prepare(data: st.DataObject) -> None:
    case = data.draw(cases())
    kind = data.draw(kinds(case))
    hidden = None
    if kind.hidden is not None:
        hidden = HiddenRows(*(getattr(kind.hidden, name).clone() for name in HiddenRows.__slots__))
    out, it = run(case, kind=kind), reference(case, kind)
    count, n, k, width = case.count, it.num_tokens, it.num_drafts, kind.width
    assert out["row"].tolist() == case.rows + [case.state.num_tokens.shape[0] - 1] * (case.batch - count)
    assert out["n"][:count].equal(n)
    assert out["k"].tolist() == k.tolist() + [0] * (case.batch - count)
    assert out["alive"].tolist() == it.alive.long().tolist() + [0] * (case.batch - count)
    assert out["capacity"][:count].tolist() == case.capacity
    total = sum(case.planned) + count
    assert out["q_start"].tolist() == it.flat.q_start.tolist() + [total] * (case.batch - count)

    # Verification, as runner.iteration.verify feeds it.
    column = torch.arange(case.planned[0] + 1)
    fed = torch.where(it.alive[:, None] & (column <= k[:, None]), n[:, None] - 1 + column, -1)
    padding = [-1] * (case.num_rows - total)
    assert out["verify_positions"].tolist() == it.flat.take(fed).tolist() + padding
    assert out["verify_slots"].tolist() == it.flat.take(it.slots(fed)).tolist() + padding
    assert out["verify_draws"][:total].equal(it.flat.take(n[:, None] + column))
    assert out["verify_rows"][:total].equal(torch.tensor(case.rows)[it.flat.entry])
    firsts = out["verify_ids"][it.flat.q_start[:-1]]
    assert firsts.equal(case.state.tokens[case.rows, n - 1])
    ids = out["verify_ids"]
    assert ids.min() >= 0
    assert ids.max() < 90

    # Drafting, as runner.iteration.draft feeds it: columns 0..W-1 in pass 1, column W + i - 2 in pass i.
    offset = 0 if hidden is None else 1
    column = torch.arange(width - 1 + MAX_K)
    live = k[:, None] >= (column - (width - 2)).clamp(min=1)
    if kind.on_host is not None:
        live &= ~kind.on_host[:, None]
        assert out["on_host"].tolist() == kind.on_host.long().tolist() + [0] * (case.batch - count)
    fed = torch.where(live, n[:, None] + (column - width - offset), -1).clamp(min=-1)
    missing = case.state.draft_len[case.rows]
    if hidden is not None and kind.hidden is not None and case.planned[0]:
        missing = hidden.begin(case.state, it, live[:, 0])
        fed.masked_fill_(fed < missing[:, None], -1)
        assert kind.hidden.draft_start.equal(hidden.draft_start)
        assert out["k_start"][:count].equal(hidden.draft_start[case.rows])
    slots = it.slots(fed).masked_fill(fed < missing[:, None], -1)
    if case.planned[0]:
        rows = kind.sizes.first_pass_rows
        assert out["first_positions"].view(-1, rows)[:count].equal(fed[:, :rows])
        assert out["first_slots"].view(-1, rows)[:count].equal(slots[:, :rows])
        assert (out["first_positions"].view(-1, rows)[count:] == -1).all()
        tokens = case.state.tokens[torch.tensor(case.rows)[:, None], fed[:, :rows].clamp(min=0) + offset]
        tokens[:, width:] = MASK
        assert out["first_ids"].view(-1, rows)[:count].equal(torch.where(fed[:, :rows] >= 0, tokens, 0))
    for i in range(2, case.planned[0] + 1):
        assert out["draft_positions"][i - 1, :count].equal(fed[:, width + i - 2])
        assert out["draft_slots"][i - 1, :count].equal(slots[:, width + i - 2])
        assert (out["draft_positions"][i - 1, count:] == -1).all()
    for i in range(1, case.planned[0] + 1):
        assert out["draft_draws"][i - 1, :count].equal(n + i - 1)

    for entry in range(count):
        if it.alive[entry]:
            blocks = min(-(-int(n[entry] + k[entry]) // BLOCK_SIZE), case.state.block_table.shape[1])
            assert out["table"][entry, :blocks].equal(case.state.block_table[case.rows[entry], :blocks])


@settings(max_examples=30)
@given(cases(max_k=0))
def test_prepare_of_prompt_chunks(case: Case) -> None:
    emits = torch.tensor([entry % 2 for entry in range(case.batch)])
    out, it = run(case, emits), reference(case)
    assert out["alive"][: case.count].equal(it.alive.long() * emits[: case.count])
    dead = out["alive"][: case.count] == 0
    assert (out["verify_positions"][: case.count][dead] == -1).all()


@settings(max_examples=40)
@given(cases(), st.data())
def test_prepare_of_chunks_behind_entries_that_decode(case: Case, data: st.DataObject) -> None:
    """Entries like the others, of which those that end no prompt do nothing."""
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


@settings(max_examples=40)
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
    assemble_drafts(drawn, entries_of(out), case.state.tokens, out["verify_ids"], drafts, MAX_K, proposed)
    expected_tokens, expected_drafts = before.clone(), torch.zeros(case.batch, k, dtype=torch.int64)
    for entry, row in enumerate(case.rows):
        n, start = int(out["n"][entry]), int(out["q_start"][entry])
        for i in range(int(out["k"][entry])):
            expected_tokens[row, n + i] = expected_drafts[entry, i] = ids[start + 1 + i] = (
                tokens[entry, i] if placed[entry] else drawn[i, entry]
            )
    assert case.state.tokens.equal(expected_tokens)
    assert out["verify_ids"].equal(ids)
    assert drafts.equal(expected_drafts)
