"""`return_drafts` on the bundled pair: the drafts are what the draft model writes alone."""

from pathlib import Path

import pytest
import specrs.pair
from specrs import LLM, SamplingParams
from specrs.pair.prompts import PROMPTS

K = 4
PARAMS = SamplingParams(temperature=0.0, max_tokens=32, return_drafts=True)
DRAFT = Path(specrs.pair.__file__).with_name("draft")

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def alone() -> LLM:
    """The draft model as a target."""
    return LLM(str(DRAFT), max_model_len=256, max_num_seqs=16)


@pytest.mark.parametrize("depth", [1, 2])
def test_drafts_are_what_the_draft_model_writes(alone: LLM, depth: int) -> None:
    """Check that drafts are the tokens that the draft model generates greedily after the same tokens."""
    speculative = {"num_speculative_tokens": K}
    llm = LLM(speculative_config=speculative, max_steps_in_flight=depth, max_model_len=256, max_num_seqs=4)
    starts, drafted, lengths, rejected = [], [], [], 0
    for output in llm.generate(list(PROMPTS[:4]), PARAMS, use_tqdm=False):
        (completion,) = output.outputs
        tokens, drafts, histogram = completion.token_ids, completion.drafts, [0] * (K + 1)
        assert drafts is not None
        for draft in drafts:
            end = draft.start + draft.num_accepted
            histogram[draft.num_accepted] += 1
            rejected += len(draft.rejected_token_ids)
            if draft.rejected_token_ids:
                assert draft.rejected_token_ids[0] != tokens[end]
            starts.append({"prompt_token_ids": [*output.prompt_token_ids, *tokens[: draft.start]]})
            drafted.append([*tokens[draft.start : end], *draft.rejected_token_ids])
            lengths.append(PARAMS.replace(max_tokens=draft.num_drafted, ignore_eos=True, return_drafts=False))
        assert histogram == output.metrics.acceptance_histogram
        assert sum(draft.num_drafted for draft in drafts) == output.metrics.draft_tokens
    assert rejected > 20
    written = alone.generate(starts, lengths, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in written] == drafted


def test_drafts_are_not_reported_unasked(alone: LLM) -> None:
    (output,) = alone.generate(PROMPTS[0], PARAMS.replace(return_drafts=False, max_tokens=2), use_tqdm=False)
    assert output.outputs[0].drafts is None
    (output,) = alone.generate(PROMPTS[0], PARAMS.replace(max_tokens=2), use_tqdm=False)
    assert output.outputs[0].drafts == []
