"""Names that `specrs` exports."""

import pytest
import specrs
import specrs.llm
import specrs.sampling


def test_every_public_name_exists() -> None:
    for name in specrs.__all__:
        assert getattr(specrs, name) is not None
    assert set(specrs.__all__) <= set(dir(specrs))
    assert specrs.LLM is specrs.llm.LLM
    assert specrs.SamplingParams is specrs.sampling.SamplingParams


def test_unknown_name() -> None:
    with pytest.raises(AttributeError, match="module 'specrs' has no attribute 'Nonsense'"):
        specrs.Nonsense  # noqa: B018
