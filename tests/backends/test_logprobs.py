"""Log probabilities of a step's drafts: equal to those of all rows at once, in bounded memory."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import specrs.backends.cuda.sampling.logprobs as logprobs
import torch
from specrs.backends.cuda.sampling.sampling_state import SequenceSampling
from specrs.backends.cuda.sequences import flat_rows
from specrs.verify.logprobs import LogprobsMode, logprob_values, token_logprobs
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

ROWS, VOCAB = 8, 50


class Largest(TorchDispatchMode):
    """Records the number of elements of the largest tensor that an op has made."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, Tensor):
                self.numel = max(self.numel, tensor.numel())
        return result


def coldest(adjusted: Tensor, sequences: Tensor) -> Tensor:
    """A filter that depends on the sequence of a row: sequence b loses its tokens below `b % 5`."""
    return adjusted.masked_fill(torch.arange(VOCAB) < sequences[:, None] % 5, -torch.inf)


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"])
@pytest.mark.parametrize("wanted", [dict.fromkeys(range(14), 3), {0: 3, 1: 1, 4: 0, 5: 3, 6: 2, 13: 3}, {3: 3}])
def test_rows_that_ask_run_a_few_at_a_time(
    mode: LogprobsMode, wanted: dict[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logprobs, "RANKED_ROWS", ROWS)
    planned = (3, 3, 2, *[1] * 9, 0, 0)
    flat, random = flat_rows(planned), torch.Generator().manual_seed(0)
    total, width = len(flat.sequence), max(planned) + 1
    logits = torch.randn(total, VOCAB, generator=random)
    tokens = torch.randint(VOCAB, (len(planned), width), generator=random)
    sampling = cast(SequenceSampling, SimpleNamespace(logprobs=wanted, filter=coldest, it=SimpleNamespace(flat=flat)))
    with Largest() as largest:
        found = dict(logprobs.sequence_logprobs(mode, logits, tokens, sampling))
    assert len(planned) * width > 4 * ROWS
    assert largest.numel <= ROWS * VOCAB, "a tensor holds more rows than run at once"

    values = logprob_values(mode, logits, coldest(logits, flat.sequence))
    assert list(found) == list(wanted)
    for sequence, num_top in wanted.items():
        own = token_logprobs(values[flat.index[sequence]], tokens[sequence], num_top)
        for name in ("value", "rank", "top_ids", "top_values"):
            given = getattr(found[sequence], name)
            assert (given[:, :num_top] if name.startswith("top") else given).equal(getattr(own, name))
