"""`specrs advise`: replays equal a naive simulation, choices follow from speeds, the file is read by `serve`."""

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from quantized_files import gptq
from specrs import LLM, SamplingParams
from specrs.cli import main
from specrs.cli.advise import choice, report, traffic
from specrs.cli.advise.choice import Candidate, Drafted, Forecast
from specrs.cli.advise.measure import Machine
from specrs.cli.advise.replay import KnownText, replay
from specrs.cli.advise.traffic import LoggedRequest
from specrs.core import CostModel, HostDrafter, SuffixCache
from specrs.pair import TARGET
from specrs.server import run
from specrs.speculative_config import AUTO, SpeculativeConfig
from specrs.tokenizer import Tokenizer

TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=30)
TEXTS = st.lists(st.builds(KnownText, TOKENS, TOKENS), max_size=4)
SHORT = ["--num-prompts", "2", "--max-tokens", "12", "--max-k", "3", "--seconds", "0", "--threads", "1"]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(str(TARGET))


def simulate(text: KnownText, k: int, propose: Callable[[list[int], int], list[int]]) -> tuple[Counter[int], int]:
    """Decode a known answer greedily. Return the passes by their number of drafts, and the tokens of these passes."""
    passes: Counter[int] = Counter()
    answer, done = list(text.answer), 1  # the prompt's pass gives the first token
    while done < len(answer):
        room = len(answer) - done - 1  # the target adds a token of its own
        drafts = propose([*text.prompt, *answer[:done]], k)[:room] if room else []
        right = 0
        while right < len(drafts) and drafts[right] == answer[done + right]:
            right += 1
        passes[len(drafts)] += 1
        done += right + 1
    return passes, len(answer) - 1


def lookup(text: list[int], k: int, least: int, most: int) -> list[int]:
    """Draft by prompt lookup: try every n-gram at every place."""
    for n in range(most, least - 1, -1):
        for start in range(len(text) - n - 1, -1, -1):
            if text[start : start + n] == text[-n:]:
                return (text[start + n :] * k)[:k]
    return []


@given(TEXTS, st.integers(1, 5), st.integers(1, 3), st.integers(0, 2))
def test_a_replay_of_ngrams_equals_a_simulation(texts: list[KnownText], k: int, least: int, more: int) -> None:
    drafter = HostDrafter("ngram", prompt_lookup_min=least, prompt_lookup_max=least + more)
    found = replay(texts, [drafter], k)
    simulated = [simulate(text, k, lambda seen, count: lookup(seen, count, least, least + more)) for text in texts]
    assert found.passes == sum((passes for passes, _ in simulated), Counter())
    assert found.tokens == sum(tokens for _, tokens in simulated)


@given(TEXTS, st.integers(1, 5))
def test_a_replay_of_suffixes_equals_a_simulation_that_learns(texts: list[KnownText], k: int) -> None:
    """Check that a replay of suffix decoding equals a simulation. In both, later texts draft from an earlier answer
    only if the drafter was asked for a draft of that answer."""
    found = replay(texts, [HostDrafter("suffix")], k)
    cache, passes = SuffixCache(), Counter[int]()
    for number, text in enumerate(texts):
        told = 0

        def tell(seen: list[int], number: int = number) -> None:
            nonlocal told
            cache.append(number, np.array(seen[told:], dtype=np.int64))
            told = len(seen)

        def propose(seen: list[int], count: int, number: int = number, text: KnownText = text) -> list[int]:
            nonlocal told
            if number not in cache:
                cache.start_request(number, np.array(text.prompt, dtype=np.int64))
                told = len(text.prompt)
            tell(seen)
            return list(map(int, cache.propose(number, count)[0]))

        passes += simulate(text, k, propose)[0]
        if number in cache:
            tell([*text.prompt, *text.answer])
            cache.stop_request(number)
    assert found.passes == passes


@given(TEXTS, st.integers(0, 5))
def test_a_replay_without_drafters_has_a_pass_for_each_token(texts: list[KnownText], k: int) -> None:
    found = replay(texts, [], k)
    assert found.passes == Counter({0: found.tokens} if found.tokens else {})
    assert found.tokens_per_pass == 1.0


@given(TEXTS, st.integers(1, 5))
def test_a_list_of_drafters_is_replayed_to_the_end(texts: list[KnownText], k: int) -> None:
    listed = replay(texts, [HostDrafter("ngram", prompt_lookup_min=1), HostDrafter("suffix")], k)
    assert listed.tokens == sum(len(text.answer) - 1 for text in texts)
    assert 1 <= listed.tokens_per_pass <= k + 1


def test_a_replay_has_the_passes_of_an_engine(tokenizer: Tokenizer) -> None:
    """Check that a replay of one drafter has the passes of an engine, in float64, where greedy text does not depend on
    the number of rows. A list of drafters must only have as many tokens."""
    requests = traffic.sample(tokenizer, bundled=True)[:2]
    machine = Machine(None, {"dtype": "float64", "threads": 1}, max_model_len=256, max_tokens=40, max_k=4)
    plain = LLM(dtype="float64", threads=1, max_model_len=256, max_num_seqs=1)
    _, texts, timed = machine.answers(plain, requests, 60.0)
    assert timed.passes == timed.tokens == 2 * 39
    own = plain.generate(
        requests[1].prompt, SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True), use_tqdm=False
    )
    assert texts[1].answer == own[0].outputs[0].token_ids
    candidates = [Candidate(name, 4, None, {"method": name}) for name in ("ngram", "suffix", "ngram,suffix")]
    ran = machine.compare(candidates, requests)
    for candidate in candidates:
        replayed = replay(texts, [HostDrafter(name) for name in candidate.name.split(",")], 4, [0.1, 0.2, 0.3, 0.4])
        if "," not in candidate.name:  # a list chooses by the costs that the engine measured
            assert ran[candidate].passes == replayed.passes.total()
        assert ran[candidate].tokens == replayed.tokens == 2 * 39


COSTS = CostModel([1], [0, 1, 2, 3, 4, 5], [[2.0, 2.5, 3.0, 3.5, 4.0, 4.5]])


@given(TEXTS, st.integers(1, 5), st.floats(0.5, 2.0), st.floats(0.0, 1.0))
def test_a_forecast_from_a_replay_adds_up_the_passes(
    texts: list[KnownText], k: int, scale: float, drafting: float
) -> None:
    replayed = replay(texts, [HostDrafter("suffix")], k)
    forecast = choice.from_replay(Candidate("suffix", k), replayed, COSTS, scale, drafting)
    spent = 0.0
    for drafts in replayed.passes.elements():
        spent += scale * COSTS.ms(1, drafts) + drafting
    expected = spent / replayed.tokens if replayed.tokens else scale * 2.0
    assert forecast.ms_per_token == pytest.approx(expected)
    assert forecast.tokens_per_second == pytest.approx(1e3 / expected)


@given(st.lists(st.integers(0, 6), min_size=1, max_size=20), st.integers(1, 6), st.floats(0.0, 2.0))
def test_a_forecast_from_runs_cuts_the_drafts_to_k(accepted: list[int], k: int, more: float) -> None:
    histogram = [accepted.count(i) for i in range(7)]
    few = Drafted(1, 3.0, len(accepted), [accepted.count(0), len(accepted) - accepted.count(0)])
    many = Drafted(6, 8.0, len(accepted), histogram)
    forecast = choice.from_runs(Candidate("draft_model", k), k, [many, few], more)
    per_pass = sum(1 + min(one, k) for one in accepted) / len(accepted)
    assert forecast.tokens_per_pass == pytest.approx(per_pass)
    assert forecast.ms_per_token == pytest.approx((2.0 + k + more) / per_pass)


def test_a_forecast_from_one_run_has_its_times() -> None:
    run = Drafted(1, 3.0, 4, [1, 3])
    assert choice.from_runs(Candidate("eagle3", 1), 1, [run]).ms_per_token == pytest.approx(3.0 / 1.75)


CANDIDATES = st.builds(
    Candidate, st.sampled_from(["suffix", "ngram"]), st.integers(1, 3), st.sampled_from([None, "int8"])
)
FORECASTS = st.dictionaries(CANDIDATES, st.floats(0.1, 10.0)).map(
    lambda found: [Forecast(Candidate(), 1.0, 1.0), *(Forecast(one, 2.0, ms) for one, ms in found.items())]
)


@given(FORECASTS)
def test_finalists(forecasts: list[Forecast]) -> None:
    chosen = choice.finalists(forecasts)
    assert chosen[0] == Candidate()
    assert len(chosen) == len(set(chosen)) <= 8
    drafting = sorted((one for one in forecasts if one.candidate.k), key=lambda one: one.ms_per_token)
    assert {one.candidate for one in drafting[:2]} <= set(chosen)
    near = {one.candidate.name for one in drafting if one.ms_per_token < drafting[0].ms_per_token / 0.9001}
    assert near <= {one.name for one in chosen}
    far = [one.candidate for one in drafting[2:] if one.ms_per_token > drafting[0].ms_per_token / 0.8999]
    assert not set(far) & set(chosen)
    assert [one for one in chosen if one.k == AUTO] == [replace(one.candidate, k=AUTO) for one in drafting[:1]]


def test_not_more_than_four_drafters_run() -> None:
    forecasts = [Forecast(Candidate(), 1.0, 1.0), *(Forecast(Candidate(name, 2), 1.0, 0.5) for name in "abcdef")]
    assert [one.name for one in choice.finalists(forecasts)] == ["", "a", "b", "c", "d", "a"]


@given(st.dictionaries(CANDIDATES | st.just(Candidate("suffix", AUTO)), st.floats(1.0, 100.0)), st.floats(1.0, 100.0))
def test_a_choice_loses_at_most_the_margins(found: dict[Candidate, float], plain: float) -> None:
    speeds = {Candidate(): plain, **found}
    chosen = choice.choose(speeds)
    assert speeds.get(chosen, plain) >= 0.99 * 0.99 * max(speeds.values()) or chosen.quantization is not None
    if max(speeds.values()) == plain:
        assert chosen == Candidate()


@pytest.mark.parametrize(
    ("suffix", "auto", "expected"),
    [
        (100.9, 100.9, Candidate()),  # too little gain
        (102.0, 100.9, Candidate("suffix", 3)),
        (102.0, 101.0, Candidate("suffix", AUTO)),
        (90.0, 101.5, Candidate("suffix", AUTO)),
        (90.0, 99.9, Candidate()),
    ],
)
def test_margins(suffix: float, auto: float, expected: Candidate) -> None:
    speeds = {Candidate(): 100.0, Candidate("suffix", 3): suffix, Candidate("suffix", AUTO): auto}
    assert choice.choose(speeds) == expected


def test_forecasts_are_ratios_to_the_speed_without_drafts() -> None:
    drafting, auto = Candidate("suffix", 3), Candidate("suffix", AUTO)
    given = [Forecast(Candidate(), 1.0, 10.0), Forecast(drafting, 2.0, 6.0)]
    speeds = {Candidate(): 50.0, drafting: 100.0, auto: 90.0}
    forecasts = choice.rescaled(given, speeds)
    assert [one.ms_per_token for one in forecasts] == pytest.approx([20.0, 12.0])
    assert choice.error_of(forecasts, speeds) == pytest.approx(1.0 / 6.0)
    assert choice.error_of(forecasts, {Candidate(): 50.0}) == 0.0
    assert report.conclusion(drafting, forecasts, speeds, 7) == (
        "Use suffix, K = 3: 100.0 tokens/s expected, 2.00x; forecasts were off by up to 17 %."
    )
    assert report.conclusion(Candidate(), forecasts, speeds, 7).startswith("Use no speculation: 50.0 tokens/s")
    rows = report.table(forecasts, speeds).splitlines()
    assert rows[1].split() == ["suffix", "3", "2.00", "83.3", "1.67x", "100.0", "2.00x", "-16.7", "%"]
    assert rows[3].split() == ["suffix", "auto", "90.0", "1.80x"]


def served(path: Path) -> dict[str, object]:
    """Return the engine's arguments that `specrs serve --config` takes from a file."""
    seen: list[dict[str, object]] = []

    def serve(engine: dict[str, object], settings: object) -> int:
        seen.append(engine)
        return 0

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "run_server", serve)
        assert main(["serve", "--config", str(path)]) == 0
    return seen[0]


@pytest.mark.parametrize(
    ("chosen", "model"),
    [
        (Candidate(), None),
        (Candidate("suffix", 3, None, {"method": "suffix"}), "a model"),
        (Candidate("x", AUTO, "int8", {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 5}), "models/a"),
    ],
)
def test_the_file_is_what_was_chosen(chosen: Candidate, model: str | None, tmp_path: Path) -> None:
    path = tmp_path / "specrs.yaml"
    report.write_config(path, report.config_of(model, {"threads": 2}, chosen, 5), "a comment: of one line")
    settings = served(path)
    assert settings["model"] == model
    assert settings["threads"] == 2
    assert settings.get("quantization") == chosen.quantization
    assert settings.get("speculative_config") == chosen.speculative_config(5)
    if chosen.k != 0:
        config = SpeculativeConfig.from_mapping(chosen.speculative_config(5) or {})
        assert config.num_speculative_tokens == chosen.k
        assert config.most_speculative_tokens == (5 if chosen.k == AUTO else chosen.k)


def test_advise(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "specrs.yaml"
    assert main(["advise", *SHORT, "--quantization", "int8", "--out", str(path)]) == 0
    printed = capsys.readouterr()
    heads, *rows = printed.out.split("\n\n")[0].splitlines()
    assert heads.split()[:3] == ["drafter", "K", "weights"]
    named = {(row.split("  ")[0], "int8" in row) for row in rows}
    drafters = ("ngram", "ngram 2-5", "suffix", "ngram,suffix", "draft_model", "suffix,draft_model", "none")
    assert named == {(name, quantized) for name in drafters for quantized in (False, True)}
    assert sum(" auto " in row for row in rows) == 1
    advice = printed.out.split("\n\n")[1].splitlines()
    assert advice[0].startswith("Use ")
    assert advice[1] == f"config: {path}; start it with: specrs serve --config {path}"
    settings = served(path)
    assert settings["model"] is None
    assert settings["dtype"] == "float32"
    if "no speculation" in advice[0]:
        assert "speculative_config" not in settings
    else:
        assert SpeculativeConfig.from_mapping(settings["speculative_config"])  # type: ignore[arg-type]


def test_advise_on_traffic(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Check `advise` on traffic: a named model has no draft model unless one is named too, and too long requests are
    left out."""
    log = tmp_path / "log.jsonl"
    lines = [{"prompt": "def f(x):", "max_tokens": 6}, {"prompt": "a b c a b", "completion": " c a b c"}]
    lines.append({"prompt": "word " * 3000})
    log.write_text("\n".join(map(json.dumps, lines)))
    assert main(["advise", str(TARGET), *SHORT, "--traffic", str(log)]) == 0
    printed = capsys.readouterr()
    assert "draft_model" not in printed.out
    assert "suffix" in printed.out
    assert "1 of 3 requests exceed the model's " in printed.err


def test_requests(tokenizer: Tokenizer) -> None:
    def read(**body: object) -> list[LoggedRequest]:
        return traffic.requests_of(body, tokenizer)

    assert read(prompt="def", temperature=0.7) == [LoggedRequest(tokenizer.encode("def"))]
    assert read(prompt=[3, 4], max_tokens=5) == [LoggedRequest([3, 4], None, 5)]
    assert read(prompt=["a", [7]]) == [LoggedRequest(tokenizer.encode("a")), LoggedRequest([7])]
    messages = [{"role": "user", "content": "hi"}]
    (chat,) = read(messages=messages, max_tokens=3, max_completion_tokens=4)
    rendered = tokenizer.encode(tokenizer.render_chat(messages), add_special_tokens=False)
    assert chat == LoggedRequest(rendered, None, 4)
    (request,) = read(prompt="a", completion=" b")
    assert request.completion == tokenizer.encode(" b", add_special_tokens=False)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "is no JSON: "),
        ("[1]", "must be a JSON object"),
        ("{}", "must have either messages or prompt"),
        ('{"prompt": "a", "messages": []}', "must have either messages or prompt"),
        ('{"prompt": ""}', "prompt: must not be empty"),
        ('{"prompt": []}', "prompt: must not be empty"),
        ('{"prompt": 3}', "prompt: must be a text"),
        ('{"prompt": [1, true]}', "prompt: must be a text"),
        ('{"prompt": [1, 99999999]}', "prompt: token ids must be from 0 to "),
        ('{"prompt": "a", "max_tokens": 0}', "max_tokens=0: must be an integer of at least 1"),
        ('{"prompt": "a", "completion": 5}', "completion=5: must be a text"),
        ('{"prompt": ["a", "b"], "completion": "c"}', "completion: allowed with one prompt"),
        ('{"messages": "hello"}', "messages: must be a list"),
        ('{"messages": [{"role": "user", "content": 5}]}', "messages[0]"),
        ("[" * 100_000, "is nested too deeply"),
    ],
)
def test_a_wrong_line_is_named(
    line: str, reason: str, tmp_path: Path, tokenizer: Tokenizer, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "log.jsonl"
    log.write_text('{"prompt": "a"}\n\n' + line + '\n{"prompt": "b"}\n')
    assert main(["advise", *SHORT, "--traffic", str(log)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("specrs advise: error: --traffic=")
    assert "line 3 is wrong: " in error
    assert reason in error
    assert error.count("\n") == 1


def test_more_wrong_lines_are_numbered(
    tmp_path: Path, tokenizer: Tokenizer, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "log.jsonl"
    log.write_bytes(b'{"prompt": "\xff"}\n{"prompt": "a"}\n' + b"x\n" * 6)
    assert main(["advise", "--traffic", str(log)]) == 2
    error = capsys.readouterr().err
    assert "line 1 is wrong: is no UTF-8" in error
    assert "; also wrong, 6 in all: 3, 4, 5, 6, ..." in error


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--max-k", "0"], "--max-k=0: must be an integer from 1 to "),
        (["--max-tokens", "0"], "--max-tokens=0: must be an integer of at least 1"),
        (["--num-prompts", "-1"], "--num-prompts=-1: must be an integer of at least 1"),
        (["--seconds", "-1"], "--seconds=-1"),
        (["--traffic", "nowhere.jsonl"], "--traffic='nowhere.jsonl': cannot be read: No such file"),
        (["--out", "/nowhere/specrs.yaml"], "--out='/nowhere/specrs.yaml': cannot be written: No such file"),
        (["--max-tokens", "100000"], "traffic: no request fits into the model's "),
        (["nowhere"], "model='nowhere'"),
    ],
)
def test_wrong_options(argv: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["advise", *argv]) == 2
    error = capsys.readouterr().err
    assert says in error
    assert error.count("\n") == 1


def test_wrong_types_of_weights(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["advise", "--quantization", "int8,int3"])
    assert "'int8,int3' is not a list of different types among fp8, int8" in capsys.readouterr().err


def test_a_quantized_model_has_no_other_types_of_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = gptq(Path(TARGET), tmp_path / "quantized")
    assert main(["advise", str(folder), *SHORT, "--quantization", "int8"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("specrs advise: error: --quantization='int8': contradicts ")
    assert "whose weights are quantized by 'gptq'" in error
    assert error.count("\n") == 1, "nothing was measured"


def test_an_empty_log_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "log.jsonl"
    log.write_text("\n \n")
    assert main(["advise", "--traffic", str(log)]) == 2
    assert "has no request; must have a line of JSON for each" in capsys.readouterr().err


@given(st.integers(1, 30), st.integers(1, 30))
def test_requests_are_spread(total: int, count: int) -> None:
    requests = [LoggedRequest([i]) for i in range(total)]
    places = [one.prompt[0] for one in traffic.spread(requests, count)]
    assert len(places) == min(total, count)
    assert places == sorted(set(places))
    assert places[0] == 0
    gaps = {b - a for a, b in zip([*places, total], [*places[1:], total], strict=False) if b > a}
    assert max(gaps, default=0) - min(gaps, default=0) <= 1
