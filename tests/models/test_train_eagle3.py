"""The passes that training unrolls are those of drafting: compared row by row with the plain script."""

from pathlib import Path
from typing import Any

import pytest
import torch
from eagle3_reference import Head
from module_files import load_file
from torch.nn.functional import linear

SCRIPT = Path(__file__).parents[2] / "scripts" / "train_eagle3.py"
ROWS, PASSES, HIDDEN = 9, 4, 24


@pytest.fixture(scope="module")
def script() -> Any:
    return load_file("train_eagle3", SCRIPT)


def test_a_row_of_pass_j_is_that_of_a_draft_of_depth_j(script: Any) -> None:
    torch.manual_seed(0)
    shape = script.Shape(
        hidden=HIDDEN, intermediate=20, heads=4, kv_heads=2, head_dim=6, eps=1e-5, theta=100.0, layer_ids=[1, 2]
    )
    made = script.Head(shape, torch.rand(HIDDEN) + 0.5, torch.randn(11, HIDDEN))
    for parameter in made.parameters():
        if parameter.ndim == 2:
            parameter.data.normal_(0, 0.3)
    reference = Head.__new__(Head)
    reference.tensors = {name: tensor.detach().clone() for name, tensor in made.state_dict().items()}
    reference.layer, reference.heads, reference.kv_heads, reference.head_dim = "midlayer.", 4, 2, 6
    reference.eps, reference.theta, reference.lm_head = 1e-5, 100.0, reference.tensors["lm_head.weight"]
    reference.flags, reference.fc_norm = {"norm_before_residual": False, "norm_output": False}, False
    reference.embedding = torch.randn(50, HIDDEN)
    tokens, entries = torch.randint(0, 50, (ROWS,)), torch.randn(ROWS, 2 * HIDDEN)
    with torch.inference_mode():
        found = list(made(entries[None], reference.embedding[tokens][None], PASSES))
        fused = linear(entries, reference.tensors["fc.weight"])
        for j in range(PASSES):
            for i in range(j, ROWS):
                hidden = fused[: i - j + 1]  # true rows; then each what the one before has left
                for _ in range(j):
                    n = len(hidden)
                    left, _ = reference.run(hidden, tokens[:n], torch.arange(n))
                    hidden = torch.cat([hidden, left[-1:]])
                _, logits = reference.run(hidden, tokens[: i + 1], torch.arange(i + 1))
                torch.testing.assert_close(found[j][0, i], logits[-1], rtol=0, atol=2e-4)
