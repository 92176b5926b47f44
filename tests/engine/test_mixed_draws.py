"""`rejection` in steps that mix drafters: point masses, q over all ids, and q over some of them.

Each text is drawn from the target's exact distribution, enumerated by transformers over 16 ids.
"""

from pathlib import Path
from typing import Any

import pytest
from checkpoints import make_checkpoint, make_eagle3
from specrs.config import EngineConfig
from specrs.core import DRAFTERS
from specrs.engine.build import build_engine
from sweep import some

from engine.other_vocabulary import rename
from engine.test_drafter_lists import count_drafters
from engine.test_sampling import TWO_TOKENS, check_two_token_draws


@pytest.fixture(scope="module")
def sixteen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A target over 16 ids and its drafters: over all ids, over the 9 that another tokenizer shares, over 9 that a head
    has."""
    folder = tmp_path_factory.mktemp("sixteen_mixed")
    shape: dict[str, Any] = {"vocab": 16, "hidden": 32, "layers": 6, "kv_heads": 1, "head_dim": 16}
    shape["initializer_range"] = 0.4
    target = make_checkpoint(folder / "target", seed=5, **shape)
    plain = make_checkpoint(folder / "draft", seed=6, **(shape | {"layers": 1}))
    return {
        "target": target,
        "full": plain,
        "shared": rename(plain, folder / "renamed", dropped=4).path,
        "reduced": make_eagle3(folder / "head", target, seed=3, vocab=9),
    }


@pytest.mark.parametrize(("dtype", "q"), some(2, ["float64", "float32"], ["full", "shared", "reduced"]))
def test_two_token_draws_are_the_targets_own(sixteen: dict[str, Path], q: str, dtype: str) -> None:
    """Check that pairs of drawn tokens have the target's distribution, with prompt lookup next to a drafter with a q.
    Most steps have drafts of both."""
    speculative = {
        "method": "ngram,eagle3" if q == "reduced" else "ngram,draft_model",
        "model": str(sixteen[q]),
        "num_speculative_tokens": 3,
        "prompt_lookup_min": 1,
        "prompt_lookup_max": 2,
    }
    if q == "shared":
        speculative["use_heterogeneous_vocab"] = True
    engine = build_engine(
        EngineConfig(model=str(sixteen["target"]), speculative_config=speculative, dtype=dtype, **TWO_TOKENS)
    )
    # By costs of passes and rows alone a small target's drafts would all come from one of them.
    engine.scheduler.set_draft_costs(0.05, [0.03, 0.06, 0.09], 0.0)
    seen = count_drafters(engine)
    draws = 8_000 if dtype == "float32" else 3_000
    check_two_token_draws(engine, sixteen["target"], 3, draws, least_acceptance=0.02)
    mixed = sum(drafters == {DRAFTERS.index("device"), DRAFTERS.index("ngram")} for drafters in seen)
    assert mixed > len(seen) / 4
