"""Predictions of a closed loop, against a simulation of it with the engine's scheduler, and against the measured
throughput of one wave."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean

import pytest
import specrs.forecast.steady as steady
from closed_loop import OUTPUT, PROMPT, RATES, chunks, roofline, simulate
from specrs.backends.cuda.shapes import Buckets
from specrs.cli import main
from specrs.forecast.gpus import GAP_US
from specrs.forecast.steady import StepCosts, auto_k, mean_steps, one_wave, shares_of, steady_state

from .test_roofline import MEASURED, folders  # noqa: F401 (a fixture)

MT_BENCH = (0.80, 0.60, 0.47, 0.41, 0.25)
"""Acceptance by position in the measured wave, unconditional."""


def costs(k: int, *, merges: bool = True) -> StepCosts:
    return StepCosts.of_engine(roofline(), k, PROMPT, merges=merges)


def predicted(concurrency: int, k: int, *, merges: bool = True) -> float:
    return steady_state(costs(k, merges=merges), concurrency, OUTPUT, RATES).tokens_per_s


def simulated(concurrency: int, k: int, *, merges: bool = True) -> float:
    """Return the mean tokens per second of three runs, in which outputs have 100 to 300 tokens."""
    waves = 30 if concurrency < 16 else 12
    return fmean(
        simulate(concurrency, k, merges=merges, waves=waves, depth=2, output_spread=100, seed=seed).tokens_per_s
        for seed in range(3)
    )


@pytest.mark.parametrize(
    ("concurrency", "k", "merges"),
    [
        (1, 0, True),
        (1, 5, True),
        (8, 0, True),
        (16, 0, False),
        (16, 0, True),
        (16, 4, True),
        (64, 0, True),
        (64, 2, True),
        (64, 2, False),
        (128, 0, True),
        (128, 1, True),
        (256, 0, True),
        (256, 1, True),
    ],
)
def test_a_simulated_loop_has_the_predicted_throughput(concurrency: int, k: int, merges: bool) -> None:
    found = simulated(concurrency, k, merges=merges)
    assert predicted(concurrency, k, merges=merges) == pytest.approx(found, rel=0.012)


@pytest.mark.parametrize(("concurrency", "k"), [(64, 0), (128, 0), (256, 1)])
def test_short_prompts_that_wait_for_rooms(concurrency: int, k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check requests of 20 tokens in and out, of which more arrive in a step than ride in a pass. A model in which they
    wait for a room in fewer steps is found."""
    found = fmean(
        simulate(concurrency, k, prompt=20, output=20, waves=30, depth=2, output_spread=10, seed=seed).tokens_per_s
        for seed in range(3)
    )
    own = StepCosts.of_engine(roofline(), k, 20)
    assert steady_state(own, concurrency, 20, RATES).tokens_per_s == pytest.approx(found, rel=0.015)
    monkeypatch.setattr(steady, "_MAX_DELAYS", 0)
    own = StepCosts.of_engine(roofline(), k, 20)
    assert steady_state(own, concurrency, 20, RATES).tokens_per_s != pytest.approx(found, rel=0.015)


def test_a_model_that_leaves_something_out_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that the comparison finds prompts that are cut over too few steps, and a draft that never sees prompts."""
    few, many = simulated(128, 0), simulated(64, 5)
    with monkeypatch.context() as patch:
        patch.setattr(steady, "MERGED_STEPS", 1)
        assert predicted(128, 0) != pytest.approx(few, rel=0.012)
    assert predicted(64, 5) == pytest.approx(many, rel=0.012)
    monkeypatch.setattr(StepCosts, "_catch_up_ms", lambda *_: 0.0)
    assert predicted(64, 5) != pytest.approx(many, rel=0.012)


def test_a_request_that_decodes_alone() -> None:
    """Check the figure of one request by hand: its prompt, then 199 steps."""
    own = costs(0)
    ms = own.step(0, 1, PROMPT).ms + (OUTPUT - 1) * own.step(1, 0, 0).ms
    assert predicted(1, 0) == pytest.approx(1e3 * OUTPUT / ms)
    assert own.step(1, 0, 0).ms == pytest.approx(roofline().iteration_ms(1, 0) + 1e-3 * GAP_US)
    assert own.step(0, 1, PROMPT).ms == pytest.approx(roofline().prompts_ms(chunks(160, 1)) + 1e-3 * GAP_US)


@pytest.mark.parametrize(
    ("k", "decoding", "prompts", "left", "tokens", "merged"),
    [
        (0, 16, 1, 44, 44, True),  # 16 rows, 4 ends and 44 rows of a prompt are 64
        (0, 16, 1, 88, 44, True),
        (0, 16, 1, 150, 150, True),  # two rooms of 44 are too few, and 192 rows have room for 172
        (0, 16, 4, 600, 172, True),
        (0, 16, 5, 750, 172, True),  # four prompts may have a chunk in the step, and the fifth does not count
        (0, 64, 1, 150, 150, True),
        (0, 64, 2, 300, 156, True),
        (5, 8, 1, 150, 150, True),
        (1, 64, 1, 150, 150, True),
        (1, 64, 5, 600, 188, True),
        (0, 255, 1, 150, 150, True),
        (0, 256, 1, 150, 150, False),  # more than max_num_seqs
        (0, 0, 1, 150, 150, False),
    ],
)
def test_prompts_ride_where_there_is_room(
    k: int, decoding: int, prompts: int, left: int, tokens: int, merged: bool
) -> None:
    step = costs(k).step(decoding, prompts, left)
    assert (step.tokens, step.merged) == (tokens, merged)
    apart = costs(k, merges=False).step(decoding, prompts, left)
    assert (apart.tokens, apart.merged) == (left, False)
    if merged and tokens == left:
        assert step.ms < apart.ms


def test_prompts_that_do_not_ride() -> None:
    """Check prompts that exceed four rooms, and short ones of which a step has four chunks at most. After two steps
    that left no room for some of them, all have a pass of their own."""
    long, short = (StepCosts.of_engine(roofline(), 0, tokens) for tokens in (345, 30))
    for left, tokens, merged in ((688, 172, True), (690, 690, False)):  # 4 times 172 are 688
        step = long.step(16, 2, left)
        assert (step.tokens, step.merged) == (tokens, merged)
    for delays, tokens, merged in ((0, 120, True), (1, 120, True), (2, 270, False)):
        step = short.step(16, 9, 270, delays)
        assert (step.tokens, step.merged) == (tokens, merged)


def test_long_prompts_take_what_decoding_leaves_of_a_step() -> None:
    own = StepCosts.of_engine(roofline(), 5, 20_000)
    assert own.step(100, 2, 40_000).tokens == 6_667, "a third of a prompt is at most 8,192 - 600 tokens"
    assert own.step(0, 2, 40_000).tokens == 6_667
    short = StepCosts.of_engine(roofline(), 0, 3000)
    assert short.step(256, 9, 27_000).tokens == 6000, "two whole prompts"
    found = steady_state(short, 256, 20, ())
    assert found.arrivals == pytest.approx(2, rel=0.01), "prompts take all steps' tokens"


def test_steps_of_a_request() -> None:
    assert shares_of([1.72, 2.24, 2.58]) == pytest.approx(RATES[:3])
    assert shares_of([1.5, 2.4, 2.5]) == pytest.approx([0.5, 0.5, 0.1])
    assert mean_steps(7, ()) == 7
    assert mean_steps(0, RATES) == 0
    assert mean_steps(7, (1.0, 1.0)) == 3
    # One token with probability 0.4, two with 0.6: three tokens take two steps, unless the first two have one each.
    assert mean_steps(3, (0.6,)) == pytest.approx(2 + 0.4**2)


def test_auto_takes_the_k_of_the_fastest_steps() -> None:
    every = [costs(k) for k in range(6)]
    found = {batch: auto_k(every, batch, RATES) for batch in (1, 64, 256)}
    lengths = [1.0, 1.72, 2.24, 2.58, 2.85, 3.06]
    for batch, k in found.items():
        tpot = [roofline().iteration_ms(batch, k) / length for k, length in enumerate(lengths)]
        assert k == tpot.index(min(tpot))
    assert found[1] > found[64] > found[256]


@pytest.mark.parametrize("k", [0, 5])
def test_measured_throughput_of_one_wave_within_eight_percent(k: int) -> None:
    """Check the engine of that day: no graphs of passes over chunks, six batch sizes, and steps of 2,048 tokens."""
    measured, sizes = json.loads(Path(MEASURED).read_text())["throughput"][f"k{k}"], [1, 4, 16, 64, 128, 256]
    own = StepCosts(roofline(), Buckets(sizes, k), k, 150, 2048)
    for batch in sizes:
        rate = one_wave(own, batch, 200, MT_BENCH, waves=1 + 128 // batch)
        assert rate == pytest.approx(measured[str(batch)]["tokens_per_s"], rel=0.08), batch


def test_the_command(folders: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:  # noqa: F811
    numbers = tmp_path / "out.json"
    rates = ",".join(map(str, RATES))
    given = ["forecast", "--roofline", "H200", "--model", str(folders[0]), "--draft-model", str(folders[1])]
    given += ["--acceptance-rates", rates, "--batch", "1,16,256", "--json", str(numbers)]
    lengths = ["--input-len", "150", "--output-len", "200"]
    assert main([*given, *lengths]) == 0
    out = capsys.readouterr().out
    assert "250 positions a request" in out
    assert "150 tokens in, 200 out" in out
    record = json.loads(numbers.read_text())["steady"]
    assert [one["concurrency"] for one in record] == [1, 16, 256]
    for one in record:
        by_k = {state["k"]: state["tokens_per_s"] for state in one["states"]}
        assert by_k == pytest.approx({k: predicted(one["concurrency"], k) for k in range(6)})
        assert one["best_k"] == max(range(1, 6), key=by_k.__getitem__)
        assert one["auto_k"] == auto_k([costs(k) for k in range(6)], one["concurrency"], RATES)
        best = by_k[one["best_k"]]
        assert f"{one['concurrency']:>8}{by_k[0]:>12,.0f}{one['best_k']:>8}{best:>10,.0f}{best / by_k[0]:>8.2f}x" in out
    for more, message in (
        (["--input-len", "150"], "--output-len=None: must be given with --input-len"),
        (["--output-len", "150"], "--input-len=None: must be given with --output-len"),
        (["--input-len", "0", "--output-len", "2"], "--input-len=0: must be an integer from 1"),
        ([*lengths, "--context", "9"], "--context=9: has no meaning with --output-len"),
    ):
        assert main([*given, *more]) == 2
        assert message in capsys.readouterr().err
    assert main(["forecast", "--target-ms", "9", "--draft-ms", "1", "--acceptance-rates", rates, *lengths]) == 2
    assert "--input-len=150: has no meaning with --target-ms" in capsys.readouterr().err
