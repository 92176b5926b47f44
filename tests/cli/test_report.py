"""The demo's arithmetic and what it prints and draws, from results made up here. No model is loaded."""

from pathlib import Path

import pytest
from specrs.cli import output as files
from specrs.cli.demo import plot, report
from specrs.cli.demo.measure import Result
from specrs.outputs import AcceptanceFigures, CompletionOutput, RequestMetrics, RequestOutput


def output(text: str, token_ids: list[int], draft_tokens: int = 0, histogram: list[int] | None = None) -> RequestOutput:
    metrics = RequestMetrics(draft_tokens=draft_tokens, acceptance_histogram=histogram or [0])
    completion = CompletionOutput(text=text, token_ids=token_ids)
    return RequestOutput(
        request_id="0", prompt="p", prompt_token_ids=[7], outputs=[completion], finished=True, metrics=metrics
    )


def made(k: int, tokens: int, seconds: float, histogram: list[int] | None = None) -> Result:
    """Return a setting's result with `tokens` generated in `seconds`; `histogram[i]`: iterations that accepted i
    drafts."""
    result = Result(k)
    drafted = k * sum(histogram or [])
    result.add(output("a", [1] * tokens, drafted, histogram), seconds)
    return result


def results() -> list[Result]:
    plain, drafted = Result(0), Result(2)
    plain.add(output("ab", [1, 2]), 1.5)
    plain.add(output("cd", [3, 4]), 0.5)
    drafted.add(output("ab", [1, 2], 4, [0, 1, 1, 0, 0]), 0.25)  # a histogram of an engine with a larger K
    drafted.add(output("cx", [3, 5], 6, [1, 2, 0]), 0.75)
    return [plain, drafted]


def test_figures_add_up() -> None:
    plain, drafted = results()
    assert (plain.tokens_per_second, drafted.tokens_per_second) == (2.0, 4.0)
    assert plain.acceptance == AcceptanceFigures()
    assert drafted.acceptance == AcceptanceFigures(draft_tokens=10, acceptance_histogram=[1, 3, 1])
    assert drafted.acceptance.per_position == [0.8, 0.2]
    assert drafted.same_texts(plain) == 1


def test_table() -> None:
    rows = [line.split() for line in report.table(results()).splitlines()]
    assert rows[-2] == ["vanilla", "2.0", "1.00x"]
    assert rows[-1] == ["K", "=", "2", "4.0", "2.00x", "2.00", "50.0", "80.0", "20.0"]


def test_the_row_of_auto_says_what_was_chosen() -> None:
    chosen = Result("auto")
    chosen.add(output("ab", [1, 2], 5, [0, 1, 1]), 1.0)
    lines = report.table([*results(), chosen]).splitlines()
    assert lines[-2].split() == ["auto", "2.0", "1.00x", "2.50", "60.0", "100.0", "50.0"]
    assert "2.5 drafts an iteration on average" in lines[-1]
    assert "no drafts on average" in report.table([*results(), Result("auto", seconds=1.0)])


def test_two_sentences_say_what_passes_cost_and_which_k_pays() -> None:
    told = " ".join(report.explanation([made(0, 8, 8.0), made(1, 8, 6.0, [2, 3]), made(3, 8, 7.5, [1, 1, 1])]).split())
    # K = 1: 8 tokens in 5 iterations of 1.2 s; K = 3: in 5 of 1.5 s; (1 * 0.2 + 3 * 0.5) / (1 + 9) = 0.17 s a draft
    assert told == (
        "a plain pass of the target takes 1000.00 ms here, and each draft, its pass and its row in the target's, "
        "170.00 ms more (17% of it), so that an iteration takes the time of 1.20 and 1.50 plain passes at K = 1 and 3. "
        "It brings 1.60 and 1.60 tokens where a plain pass brings 1, therefore K = 1 pays most, 1.60 tokens for 1.20 "
        "passes, 1.33x."
    )


def test_where_no_k_pays_it_says_so_and_why() -> None:
    told = " ".join(report.explanation([made(0, 8, 8.0), made(1, 8, 9.0, [4, 2])]).split())
    assert told.endswith("therefore no K pays here: even K = 1 brings 1.33 tokens for the time of 1.50 plain ones.")
    assert report.explanation([made(0, 8, 8.0)]) == ""


def test_equality_counts_texts_that_differ() -> None:
    plain, drafted = results()
    assert "1 of 2 texts" in report.equality([plain, drafted])
    assert "1 do not" in report.equality([plain, drafted])
    assert "All 4 texts" in report.equality([plain, plain, plain])


def test_text_is_shown_once_where_all_agree_and_twice_where_not() -> None:
    plain, drafted = results()
    assert "vanilla, K = 2\nab" in report.text("p", [plain, drafted])
    drafted.texts[0] = "ax"
    shown = report.text("p", [plain, drafted])
    assert ": vanilla\nab" in shown
    assert ": K = 2\nax" in shown


@pytest.mark.parametrize("suffix", files.FORMATS)
def test_picture(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"out{suffix}"
    files.check_picture(path)
    chosen = Result("auto")
    chosen.add(output("ab", [1, 2], 5, [0, 1, 1]), 1.0)
    plot.draw([*results(), chosen], "caption", path, "a model")
    assert path.stat().st_size > 1000
