"""The `coupled` rule: every text equals its K = 0 text, and the tokens are distributed as the target's."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from specrs.verify.coupled import verify_coupled
from specrs.verify.processing import filter_logits, greedy_as_point_mass
from specrs.verify.sample import draw
from torch import Tensor

from verify.enumeration import STREAMS, VOCAB, make_noise, process, raw_logits, sigma
from verify.reference import Request, distribution
from verify.rows import sampling_rows

LENGTH, TEXTS = 60, 48


def model(seed: int) -> Tensor:
    """Return logits by the last two tokens, `[V, V, V]`: a model of order two."""
    return torch.randn((VOCAB,) * 3, generator=torch.Generator().manual_seed(seed)) * 2


def processed(table: Tensor, request: Request, *, coarse: bool = False) -> Tensor:
    rows, steps = sampling_rows([request] * VOCAB**2)
    flat = filter_logits(table.flatten(0, 1), rows, steps[0], coarse=coarse)
    return greedy_as_point_mass(flat, rows.greedy).view_as(table) if steps[0].greedy else flat.view_as(table)


def decode(target: Tensor, draft: Tensor, noise: Tensor, k: int, g: torch.Generator) -> tuple[Tensor, float]:
    """Return texts `[TEXTS, LENGTH]` after the tokens (0, 1), with K_r random in [0, k], and the share of accepted
    drafts."""
    tokens = torch.zeros((TEXTS, LENGTH + 2 + k + 1), dtype=torch.int64)
    tokens[:, 1] = 1
    n = torch.full((TEXTS,), 2)
    sequence = torch.arange(TEXTS)
    drafted, accepted = 0, 0
    while int(n.min()) < LENGTH + 2:
        n = n.clamp(max=LENGTH + 2)
        num_drafts = torch.randint(0, k + 1, (TEXTS,), generator=g)
        for i in range(k):
            x = draft[tokens[sequence, n + i - 2], tokens[sequence, n + i - 1]]
            tokens[sequence, n + i] = draw(x, noise[sequence, n + i])
        q_start = torch.zeros(TEXTS + 1, dtype=torch.int64)
        torch.cumsum(num_drafts + 1, 0, out=q_start[1:])
        of_row = sequence.repeat_interleave(num_drafts + 1)
        position = n[of_row] + torch.arange(len(of_row)) - q_start[of_row]
        m, out = verify_coupled(
            target[tokens[of_row, position - 2], tokens[of_row, position - 1]],
            noise[of_row, position],
            q_start,
            tokens[sequence[:, None], n[:, None] + torch.arange(k)],
            num_drafts,
        )
        tokens[sequence[:, None], n[:, None] + torch.arange(k + 1)] = out
        n = n + m + 1
        drafted, accepted = drafted + int(num_drafts.sum()), accepted + int(m.sum())
    return tokens[:, 2 : LENGTH + 2], accepted / max(drafted, 1)


REQUESTS = {
    "plain": Request(),
    "filters": Request(temperature=0.8, top_k=9, top_p=0.9, min_p=0.01),
    "greedy": Request(temperature=0.0),
}


@pytest.mark.parametrize("name", REQUESTS)
def test_text_does_not_depend_on_k_or_draft(name: str) -> None:
    g = torch.Generator().manual_seed(20)
    uniform = torch.rand((TEXTS, LENGTH + 24, VOCAB), generator=g).clamp_(min=1e-7)
    noise = -(-uniform.log()).log()
    target = processed(model(0), REQUESTS[name])
    vanilla, _ = decode(target, target, noise, 0, g)
    assert len(vanilla.unique(dim=0)) == (1 if name == "greedy" else TEXTS)
    rates = {}
    for draft, table in {"equal": model(0), "near": model(0) + model(1) / 4, "negative": -model(0)}.items():
        q = processed(table, REQUESTS[name], coarse=draft != "equal")
        for k in (1, 2, 5, 16):
            text, rates[draft, k] = decode(target, q, noise, k, g)
            assert torch.equal(text, vanilla), (draft, k)
    assert all(rates["equal", k] == 1.0 for k in (1, 2, 5, 16))
    assert rates["near", 1] > 0.4
    assert rates["negative", 1] < 0.2


def test_draws_have_the_target_distribution_and_the_acceptance_of_the_paper() -> None:
    """Check 200,000 draws per context: their distribution is the target's, and the acceptance at a position is at least
    (1 - d) / (1 + d) and at most 1 - d, d being the total variation distance."""
    noise = make_noise(21)
    request = Request(temperature=0.9, top_k=12, top_p=0.95, min_p=0.01)
    target = process(raw_logits(0), request)
    for node in (0, 5, 100):
        exact = distribution(raw_logits(0)[node].double().numpy(), request, [1], [])
        x = target[node].expand(STREAMS, VOCAB)
        for seed in (1, 2, 3):
            draft = process(raw_logits(seed), request)[node]
            d_1 = draw(draft.expand(STREAMS, VOCAB), noise.draft[:, 0])
            m, tokens = verify_coupled(
                torch.stack((x, x), dim=1).flatten(0, 1),
                noise.draft.flatten(0, 1),
                torch.arange(0, 2 * STREAMS + 1, 2),
                d_1[:, None],
                torch.ones(STREAMS, dtype=torch.int64),
            )
            assert torch.equal(tokens[:, 0], draw(x, noise.draft[:, 0]))
            assert sigma(np.bincount(tokens[:, 0].numpy(), minlength=VOCAB), exact) < 4.5
            both = tokens[m == 1]
            assert torch.equal(both[:, 1], draw(x, noise.draft[:, 1])[m == 1])
            # Given that the first draft stands, the token after it is still the target's own draw.
            assert sigma(np.bincount(both[:, 1].numpy(), minlength=VOCAB), exact) < 4.5
            distance = (target[node].softmax(dim=-1) - draft.softmax(dim=-1)).clamp(min=0).sum().item()
            rate, slack = m.double().mean().item(), 4.5 * 0.5 / STREAMS**0.5
            assert (1 - distance) / (1 + distance) - slack < rate < 1 - distance + slack


def test_a_draft_drawn_with_other_noise_changes_no_text() -> None:
    noise, other = make_noise(22, 5000), make_noise(23, 5000)
    x = process(raw_logits(0), Request())[0].expand(5000, VOCAB)
    d_1 = draw(x, other.draft[:, 0])
    rows = torch.stack((x, x), dim=1).flatten(0, 1)
    q_start, ones = torch.arange(0, 10001, 2), torch.ones(5000, dtype=torch.int64)
    m, tokens = verify_coupled(rows, noise.draft.flatten(0, 1), q_start, d_1[:, None], ones)
    assert torch.equal(tokens[:, 0], draw(x, noise.draft[:, 0]))
    assert 0.05 < m.double().mean() < 0.5


def test_ties_go_to_the_lowest_id() -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0], [0.0, 0.0, -1.0]])
    assert draw(logits, torch.zeros((2, 3))).tolist() == [1, 0]
