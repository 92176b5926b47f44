"""Inputs of an iteration: the kernels against the CPU loop's, integer for integer, into poisoned buffers."""

import torch
from hypothesis import given, settings
from specrs.kernels.cuda.prepare import (
    DraftRows,
    IterationInputs,
    PlannedEntries,
    Sizes,
    VerifyRows,
    assemble_drafts,
    prepare_iteration,
)
from specrs.kernels.cuda.row_state import Entries
from specrs.runner.entries import Iteration
from specrs.runner.iteration import prepare
from torch import Tensor

from kernels.cuda.row_states import BLOCK_SIZE, MAX_K, Case, Drafter, cases

W = 2
POISON = -(2**40)


def run(case: Case, emits: Tensor | None = None) -> dict[str, Tensor]:
    """Everything that the kernel writes, by name; K is the largest planned one."""
    state, k = case.state, case.planned[0]

    def poisoned(*shape: int) -> Tensor:
        return torch.full(shape, POISON, dtype=torch.int64)

    stride = case.batch + 2
    drafts = {name: poisoned(MAX_K, stride)[:k, : case.batch] for name in ("positions", "slots", "draws")}
    firsts = {f"first_{name}": poisoned(case.batch * W) for name in ("ids", "positions", "slots")}
    verify = {name: poisoned(case.num_rows) for name in ("ids", "positions", "slots", "draws", "rows")}
    out = {
        **{name: poisoned(case.batch) for name in ("row", "n", "k", "alive", "capacity")},
        "q_start": poisoned(case.batch + 1),
        **firsts,
        **{f"draft_{name}": tensor for name, tensor in drafts.items()},
        **{f"verify_{name}": tensor for name, tensor in verify.items()},
        "table": poisoned(case.batch, state.block_table.shape[1]),
    }
    prepare_iteration(
        state,
        PlannedEntries(
            count=torch.tensor([case.count]),
            row=case.section(case.rows),
            k=case.section(case.planned),
            capacity=case.section(case.capacity),
            emits=emits,
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
        ),
        Sizes(case.draft_context, W, BLOCK_SIZE, MAX_K),
    )
    return out


def entries_of(out: dict[str, Tensor]) -> Entries:
    return Entries(*(out[name] for name in ("row", "n", "k", "alive", "capacity", "q_start")))


def reference(case: Case) -> Iteration:
    return prepare(
        case.state,
        torch.tensor(case.rows),
        case.planned,
        torch.tensor(case.capacity),
        block_size=BLOCK_SIZE,
        max_context=1000,
        drafter=Drafter(case.draft_context),
    )


@settings(max_examples=60)
@given(cases())
def test_prepare(case: Case) -> None:
    out, it = run(case), reference(case)
    count, n, k = case.count, it.num_tokens, it.num_drafts
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
    column = torch.arange(W - 1 + case.planned[0])
    live = k[:, None] >= (column - (W - 2)).clamp(min=1)
    fed = torch.where(live, n[:, None] + (column - W), -1).clamp(min=-1)
    slots = it.slots(fed).masked_fill(fed < case.state.draft_len[case.rows, None], -1)
    if case.planned[0]:
        assert out["first_positions"].view(-1, W)[:count].equal(fed[:, :W])
        assert out["first_slots"].view(-1, W)[:count].equal(slots[:, :W])
        assert (out["first_positions"].view(-1, W)[count:] == -1).all()
        tokens = case.state.tokens[torch.tensor(case.rows)[:, None], fed[:, :W].clamp(min=0)]
        assert out["first_ids"].view(-1, W)[:count].equal(torch.where(fed[:, :W] >= 0, tokens, 0))
    for i in range(2, case.planned[0] + 1):
        assert out["draft_positions"][i - 1, :count].equal(fed[:, W + i - 2])
        assert out["draft_slots"][i - 1, :count].equal(slots[:, W + i - 2])
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
@given(cases())
def test_assemble(case: Case) -> None:
    k = case.planned[0]
    if k == 0:
        return
    out = run(case)
    before = case.state.tokens.clone()
    ids = out["verify_ids"].clone()
    drawn = torch.arange(100, 100 + MAX_K * (case.batch + 1)).view(MAX_K, -1)[:k, : case.batch]
    drafts = torch.full((case.batch, MAX_K), POISON)[:, :k]
    assemble_drafts(drawn, entries_of(out), case.state.tokens, out["verify_ids"], drafts, max_k=MAX_K)
    expected_tokens, expected_drafts = before.clone(), torch.zeros(case.batch, k, dtype=torch.int64)
    for entry, row in enumerate(case.rows):
        n, start = int(out["n"][entry]), int(out["q_start"][entry])
        for i in range(int(out["k"][entry])):
            expected_tokens[row, n + i] = expected_drafts[entry, i] = ids[start + 1 + i] = drawn[i, entry]
    assert case.state.tokens.equal(expected_tokens)
    assert out["verify_ids"].equal(ids)
    assert drafts.equal(expected_drafts)
