"""Draft models with another tokenizer (`use_heterogeneous_vocab`): what they propose, and that the text stays the
target's."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from checkpoints import edit_json, make_checkpoint, write_tokenizer
from hf_reference import load
from specrs.config import EngineConfig
from specrs.drafters.cpu import CpuDrafter
from specrs.engine.build import build_engine
from specrs.engine.engine import Engine
from specrs.engine.weights import load_weights
from specrs.errors import InvalidConfigError, TokenizerMismatchError
from specrs.llm import LLM
from specrs.tokenizer import Tokenizer, shared_ids

from engine.harness import LONGEST, Bank, config, poison, request, run
from engine.other_vocabulary import rename
from engine.test_sampling import SAMPLED, TWO_TOKENS, check_two_token_draws, sampled, vanilla_text, with_rule


def translated(target: Path, draft: Path, k: int, dtype: str, **fields: object) -> EngineConfig:
    """Return the configuration of an engine whose draft model has another tokenizer."""
    speculative = {"model": str(draft), "num_speculative_tokens": k, "use_heterogeneous_vocab": True}
    return replace(config(target, draft, k=k, dtype=dtype, **fields), speculative_config=speculative)


def make_engine(bank: Bank, draft: Path, k: int, **fields: object) -> Engine:
    engine = build_engine(translated(bank.target, draft, k, bank.dtype, **fields))
    assert isinstance(engine.drafter, CpuDrafter)
    assert engine.drafter.shared is not None
    return engine


def test_the_target_in_other_ids_is_always_accepted(either: Bank, tmp_path: Path) -> None:
    """Check that the target as its own draft in other ids is always accepted, except at ids that no tokenizer has: the
    padding of a random model."""
    draft, k = rename(either.target, tmp_path / "draft"), 4
    engine = make_engine(either, draft.path, k)
    poison(engine)
    known = [
        all(draft.ids[t] is not None for t in p + c) for p, c in zip(either.prompts, either.continuations, strict=True)
    ]
    for i, is_known in enumerate(known):
        job = request(i, either.prompts[i], k=None, max_tokens=1 + 3 * (k + 1), engine_k=k, ignore_eos=True)
        engine.add_request(job)
        run(engine)
        assert job.output_token_ids == either.continuations[i][: 1 + 3 * (k + 1)]
        if is_known:
            assert job.acceptance.acceptance_length == k + 1
    assert sum(known) > 3


def test_drafts_and_counts_are_those_of_a_plain_script(either: Bank, tmp_path: Path) -> None:
    """Check drafts and counts against a plain script by transformers: unknown tokens are fed as EOS, and only shared
    tokens are proposed."""
    renamed, k = rename(either.drafts["close"], tmp_path / "draft", dropped=60), 3
    model, to_draft = load(renamed.path), renamed.ids
    eos = to_draft[0]
    shared = [i for i, own in enumerate(to_draft) if own is not None]
    engine, drafts, accepted, unknown = make_engine(either, renamed.path, k), 0, 0, 0
    for i in range(5):
        prompt, text = either.prompts[i], either.expected(i, LONGEST)
        engine.add_request(request(i, prompt, k=None, max_tokens=LONGEST, engine_k=k))
        run(engine)
        done, limit = 1, LONGEST
        while done < len(text):
            k_r, proposed = min(k, limit - done - 1), []
            for _ in range(k_r):
                fed = [to_draft[t] if to_draft[t] is not None else eos for t in prompt + text[:done] + proposed]
                unknown += any(to_draft[t] is None for t in prompt + text[:done])
                with torch.inference_mode():
                    logits = model(torch.tensor([fed])).logits[0, -1]
                proposed.append(shared[int(logits[[to_draft[t] for t in shared]].argmax())])
            # after a stop id the target goes on, unseen: its own continuation
            truth = either.continuations[i][done : done + k_r]
            m = next((j for j in range(k_r) if j >= len(truth) or proposed[j] != truth[j]), k_r)
            drafts, accepted, done = drafts + (k_r > 0), accepted + m, done + m + 1
    assert (engine.stats().drafts, engine.stats().accepted_tokens) == (drafts, accepted)
    assert unknown
    assert accepted > 0


@pytest.mark.parametrize("rule", ["rejection", "coupled"])
def test_greedy_and_coupled_text_is_that_without_drafts(either: Bank, rule: str, tmp_path: Path) -> None:
    renamed = rename(either.drafts["close"], tmp_path / "draft", dropped=60)
    engine = with_rule(make_engine(either, renamed.path, 4, num_gpu_blocks_override=10), rule)
    poison(engine)
    jobs = [sampled(i, either.prompts[i], i, 1 + i % 4, 4, **SAMPLED[i % len(SAMPLED)]) for i in range(12)]
    for job in jobs:
        engine.add_request(job)
    run(engine)
    for i, job in enumerate(jobs):
        own = vanilla_text(either.target, tuple(either.prompts[i]), i % len(SAMPLED), i, i % 3 == 0, either.dtype)
        if rule == "coupled" or SAMPLED[i % len(SAMPLED)]["temperature"] == 0.0:
            assert job.output_token_ids == own
    assert engine.stats().accepted_tokens > 0


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_rejection_draws_are_the_targets_own(dtype: str, tmp_path: Path) -> None:
    """Check that draws under `rejection` have the target's distribution, with a q that is 0 on seven ids of sixteen."""
    shape = {"vocab": 16, "hidden": 32, "layers": 1, "kv_heads": 1, "head_dim": 16, "initializer_range": 0.4}
    target = make_checkpoint(tmp_path / "target", seed=5, **shape)
    draft = rename(make_checkpoint(tmp_path / "plain", seed=6, **shape), tmp_path / "draft", dropped=4)
    engine = with_rule(build_engine(translated(target, draft.path, 3, dtype, **TWO_TOKENS)), "rejection")
    check_two_token_draws(engine, target, 3, 8_000 if dtype == "float32" else 3_000)


def test_shared_tokens_stand_for_the_same_bytes(tmp_path: Path) -> None:
    """Check that shared tokens stand for the same bytes: byte-level and byte-fallback tokenizers write blanks and bytes
    differently."""
    write_tokenizer(tmp_path / "bytes", 400)
    from tokenizers import AddedToken, decoders, models
    from tokenizers import Tokenizer as Backend
    from transformers import PreTrainedTokenizerFast

    tokens = {
        "<unk>": 0,
        "<s>": 1,
        "</s>": 2,
        "<0x0A>": 3,
        "\u2581": 4,
        "e": 5,
        "\u2581t": 6,
        "\u2581th": 7,
        "nowhere": 8,
    }
    backend = Backend(models.BPE(tokens, [], unk_token="<unk>", byte_fallback=True))
    backend.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    backend.add_special_tokens([AddedToken(token, special=True) for token in ("<unk>", "<s>", "</s>")])
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", bos_token="<s>", eos_token="</s>")
    fast.save_pretrained(tmp_path / "pieces")
    target, draft = Tokenizer(str(tmp_path / "bytes")), Tokenizer(str(tmp_path / "pieces"))
    ours = target.backend.get_vocab()
    expected = {ours["\u010a"]: 3, ours["\u0120"]: 4, ours["e"]: 5}
    expected |= {ours[f"\u0120{x}"]: tokens[f"\u2581{x}"] for x in ("t", "th") if f"\u0120{x}" in ours}
    expected[target.eos_token_id] = 2
    assert dict(shared_ids(target, draft)) == expected
    assert dict(shared_ids(draft, target)) == {own: other for other, own in expected.items()}


def test_wrong_input(qwen_bank: Bank, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, renamed = qwen_bank.target, rename(qwen_bank.target, tmp_path / "draft")
    plain = config(target, renamed.path, k=2)
    with pytest.raises(TokenizerMismatchError, match="use_heterogeneous_vocab=True"):
        LLM(**{name: getattr(plain, name) for name in ("model", "dtype", "speculative_config", "max_model_len")})
    speculative = {"model": str(renamed.path), "num_speculative_tokens": 2, "use_heterogeneous_vocab": True}
    with pytest.raises(InvalidConfigError, match=r"use_heterogeneous_vocab=True: not implemented with"):
        replace(plain, speculative_config=speculative | {"parallel_drafting": True})
    with pytest.raises(InvalidConfigError, match=r"use_heterogeneous_vocab=True: not allowed with method='ngram'"):
        replace(
            plain, speculative_config={"method": "ngram", "num_speculative_tokens": 2, "use_heterogeneous_vocab": True}
        )
    stranger = rename(qwen_bank.target, tmp_path / "stranger")
    edit_json(stranger.path / "tokenizer_config.json", remove=("eos_token", "unk_token"))
    with pytest.raises(TokenizerMismatchError, match="no unk_token and no eos_token"):
        load_weights(translated(target, stranger.path, 2, "float64"))
    monkeypatch.setattr("specrs.drafters.other_tokenizer.shared_ids", lambda target, draft: [])
    with pytest.raises(TokenizerMismatchError, match=r"speculative_config\.model=.*shares no token"):
        load_weights(translated(target, renamed.path, 2, "float64"))
