"""How the command line is read: vLLM's spellings, merged JSON, one-line errors. No model is loaded here."""

import re
from argparse import SUPPRESS

import pytest
from hypothesis import given
from hypothesis import strategies as st
from specrs.cli import main, parser
from specrs.cli.arguments import spell
from specrs.errors import near_names
from specrs.vllm_arguments import ENGINE, REJECTED, SERVER


def speculative_config(*argv: str) -> object:
    return parser().parse_args(spell(["generate", "--prompt", "x", *argv])).speculative_config


@pytest.mark.parametrize(
    ("argv", "spelled"),
    [
        (["--max_tokens", "3"], ["--max-tokens", "3"]),
        (["--max_tokens=3_0"], ["--max-tokens=3_0"]),
        (["--speculative_config.model=a_b/c.d"], ['--speculative-config={"model": "a_b/c.d"}']),
        (["--speculative-config.model", "7"], ['--speculative-config={"model": 7}']),
        (["--speculative-config.max-model-len=64"], ['--speculative-config={"max_model_len": 64}']),
        (["-sc.max-model-len=64", "-sc.model", "7"], ['-sc={"max_model_len": 64}', '-sc={"model": 7}']),
        (["--temperature", "-.5", "-1.5", "-tp", "a.b"], ["--temperature", "-.5", "-1.5", "-tp", "a.b"]),
        (["--stop=--x_y.z", "a_b"], ["--stop=--x_y.z", "a_b"]),
        (["--seed", "1", "--", "--max_tokens", "a.b"], ["--seed", "1", "--", "--max_tokens", "a.b"]),
    ],
)
def test_spellings(argv: list[str], spelled: list[str]) -> None:
    assert spell(argv) == spelled


def test_speculative_config_merges_and_the_later_value_holds() -> None:
    assert speculative_config() is None
    assert speculative_config(
        "--speculative-config",
        '{"model": "d", "num_speculative_tokens": 5}',
        "--speculative-config.num_speculative_tokens=3",
        "--speculative_config.revision",
        "main",
    ) == {"model": "d", "num_speculative_tokens": 3, "revision": "main"}


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["generate", "--prompt", "x", "--speculative-config", "{model: 1}"], "'{model: 1}' is not JSON"),
        (["generate", "--prompt", "x", "--speculative-config", "[5]"], "'[5]' is not a JSON object"),
        (["generate", "--prompt", "x", "--max-tokens", "many"], "invalid int value: 'many'"),
        (
            ["generate", "--prompt", "x", "--max-tok", "3"],
            "specrs generate: error: unrecognized arguments: --max-tok; did you mean --max-tokens? "
            "(see specrs generate --help)",
        ),
        (["generate", "m", "y"], "specrs generate: error: unrecognized arguments: y (see specrs generate --help)"),
        (["serve", "--help=zzz"], "--help=zzz: no flag has this in its name (see"),
        (["serve", "--help=threds"], "--help=threds: no flag has this in its name; did you mean --threads? (see"),
        (
            ["serve", "--max-modellen=8k"],
            "specrs serve: error: unrecognized arguments: --max-modellen=8k; did you",
        ),
        (
            ["bench", "serve", "--zzz"],
            "specrs bench serve: error: unrecognized arguments: --zzz (see specrs bench serve",
        ),
        (["serve", "--enable-eplb"], "specrs serve: error: --enable-eplb: not implemented (see specrs serve --help)"),
        (["serve", "--eplb-config.window_size=5"], "--eplb-config: not implemented (see"),
        (["serve", "--specialize_active_lora"], "--specialize-active-lora: not implemented (see"),
        (["serve", "--speculative-model", "x"], "--speculative-model: not implemented; use --spec-model (see"),
        (["serve", "-ac", "{}"], "-ac (--attention-config): not implemented (see"),
        (["serve", "-ac.backend=FLASH_ATTN"], "-ac (--attention-config): not implemented (see"),
        (["serve", "-O3"], "-O (--optimization-level): not implemented (see"),
        (["serve", "-O", "2"], "-O (--optimization-level): not implemented (see"),
        (["serve", "-O=2"], "-O (--optimization-level): not implemented (see"),
        (["serve", "-O.mode=3"], "-O (--optimization-level): not implemented (see"),
        (["serve", "-spec-draft-tp", "1"], "not implemented; use --speculative-config.draft_tensor_parallel_size (see"),
        (["serve", "--cudagraph-capture-sizes"], "argument --cudagraph-capture-sizes: expected at least one argument"),
        (["serve", "--cudagraph-capture-sizes", "1,2"], "--cudagraph-capture-sizes: invalid int value: '1,2'"),
        (["--zzz"], "specrs: error: unrecognized arguments: --zzz (see specrs --help)"),
        (["generate", "--prompt", "x", "--max-model-len", "8q"], "'8q' is not a number of tokens, such as 4096 or 4K"),
        (["bench", "throughput", "--max-model-len", "8q"], "'8q' is not a number of tokens"),
        (["demo", "--k", "1,,3"], "'1,,3' is not a list of different numbers from 1 to 16"),
        (["demo", "--k", "0,1"], "'0,1' is not a list of different numbers from 1 to 16"),
        (["demo", "--k", "17"], "'17' is not a list of different numbers from 1 to 16"),
        (["demo", "--k", "3,3"], "'3,3' is not a list of different numbers from 1 to 16"),
        (["demo", "--spec-tokens", "auto"], "argument --k/--spec-tokens: 'auto' is not a list of different numbers"),
        (["generate", "--k=3"], "unrecognized arguments: --k=3; did you mean --spec-tokens?"),
        (["generate", "--k=3", "--num-speculative-tokens=3"], "; did you mean --spec-tokens? (see"),
        (["demo", "--speculative-model", "x"], "--speculative-model x; did you mean --spec-model?"),
        (["chat", "--ngram-prompt-lookup-max=3"], "; did you mean --speculative-config.prompt_lookup_max?"),
        (["bench", "plot", "x.parquet", "--speculative-model=x"], "--speculative-model=x (see"),
        (["sever"], "specrs: error: argument COMMAND: invalid choice: 'sever'; did you mean serve? (choose from chat"),
        (["sevre"], "did you mean serve?"),
        (["demos"], "did you mean demo?"),
        (["convert_head", "x"], "did you mean convert-head?"),
        (["zzz"], "invalid choice: 'zzz' (choose from chat, generate, serve, bench, "),
        (["bench", "throughputs"], "argument KIND: invalid choice: 'throughputs'; did you mean throughput?"),
        (["serve", "--thread=2"], "--thread=2; did you mean --threads? (see"),
        (["serve", "--headles"], "unrecognized arguments: --headles (see"),
        (["generate", "--tokenizer", "hi"], "unrecognized arguments: --tokenizer (see"),
        (["bench", "latency", "--head", "x"], "unrecognized arguments: --head x (see"),
        (["serve", "--enforce-eager=maybe"], "argument --enforce-eager: 'maybe' is not true or false"),
    ],
)
def test_syntax_errors_are_one_line(argv: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(argv)
    assert stopped.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert line.startswith("specrs")
    assert says in line


@pytest.mark.parametrize("command", ["serve", "generate", "demo", "forecast"])
def test_no_hidden_flag_is_suggested(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Check that four commands suggest no hidden flag for a misspelled one. Every third hidden flag is misspelled in
    turn."""
    (commands,) = [action.choices for action in parser()._actions if action.dest == "command"]
    assert isinstance(commands, dict)
    hidden = {
        flag for action in commands["serve"]._actions if action.help == SUPPRESS for flag in action.option_strings
    }
    assert len(hidden) > 300
    for flag in sorted(hidden)[::3]:
        with pytest.raises(SystemExit):
            commands[command].refuse([f"{flag}x"])
    suggested = set(re.findall(r"did you mean (\S+)\?", capsys.readouterr().err))
    assert not hidden & suggested


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("max_modle_len", ["max_model_len"]),
        ("MAX-MODEL-LEN", ["max_model_len"]),
        ("tread", ["threads"]),
        ("max_model", ["max_model_len"]),
        ("max", []),
        ("headle", ["headless"]),
        ("thread_headings", []),
        ("--", []),
        ("", []),
    ],
)
def test_near_names(name: str, near: list[str]) -> None:
    assert near_names(name, ["threads", "headless", "max_model_len", "max_num_seqs", "tokenizer"]) == near


@given(st.text("abc-_.", max_size=8), st.lists(st.text("abc-_.", max_size=8), max_size=6))
def test_near_names_are_known_and_the_same_name_is_first(name: str, known: list[str]) -> None:
    found = near_names(name, known)
    assert len(found) <= 3
    assert set(found) <= set(known)
    letters = [re.sub("[-_.]", "", other) for other in (name, *near_names(name, [*known, name]))]
    assert letters[0] in ("", letters[min(1, len(letters) - 1)])


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["generate", "--prompt", "x", "--max-model-len", "8k"], "max_model_len=8000: "),
        (["generate", "--prompt", "x", "--max-tokens", "0"], "specrs generate: error: max_tokens=0: "),
        (["generate", "--prompt", "x", "--temperature", "nan"], "specrs generate: error: temperature=nan: "),
        (
            ["generate", "--prompt", "x", "--speculative-config.num_speculative_tokens=17"],
            "num_speculative_tokens=17: ",
        ),
        (["generate", "--prompt", "x", "--speculative-config.num_drafts=3"], "unknown key 'num_drafts'"),
        (["generate", "--prompt", "x", "--dtype", "int8"], "dtype='int8': "),
        (["generate", "def f(x):"], "MODEL='def f(x):': is no folder, GGUF file or hub id; give the text as --prompt"),
        (["chat", "m", "--model", "n"], "--model='n': must equal MODEL=m, or be left out"),
        (
            ["chat", "--no-speculation", "-sc.method=suffix"],
            "--speculative-config.method='suffix': contradicts --no-speculation; leave one of them out",
        ),
        (
            ["serve", "m", "--no-speculation", "--spec-tokens=3"],
            "--spec-tokens=3: contradicts --no-speculation; leave one of them out",
        ),
        (
            ["generate", "--spec-method=ngram", "--no-speculation"],
            "--spec-method='ngram': contradicts --no-speculation; leave one of them out",
        ),
        (
            ["chat", "--no-speculation", "-sc", "{}"],
            "--speculative-config={}: contradicts --no-speculation; leave one of them out",
        ),
        (
            ["forecast", "--itl=1=2,2=3", "--spec-method=ngram"],
            "--spec-method='ngram': has no meaning with --itl; leave it out",
        ),
        (["demo", "--head", "a"], "--head='a': must be the head of another model than the bundled ones; give that"),
        (
            ["demo", "--model=m", "--head", "a", "--spec-method=ngram"],
            "--head='a': contradicts --spec-method='ngram'; leave one of them out",
        ),
        (["chat", "--temperature", "nan"], "specrs chat: error: temperature=nan: "),
        (["chat", "--chat-template", "{% if"], "--chat-template='{% if': is no Jinja template"),
        (
            ["serve", "--tool-call-parser", "hermse"],
            "--tool-call-parser='hermse': must be one of auto, deepseek_v3, deepseek_v31, gemma4, glm45, glm47, "
            "harmony, hermes, kimi_k2, lfm2, llama3_json, minimax_m2, mistral, openai, pythonic, qwen3_coder, step3; "
            "did you mean hermes?",
        ),
        (["generate", "--prompt", "x", "--model", "/nowhere/at all"], "/nowhere/at all"),
        (["generate", "--prompt", ""], "prompt"),
        (
            ["demo", "--speculative-config", '{"num_speculative_tokens": 3}'],
            "--speculative-config.num_speculative_tokens=3: must come from --k; leave it out",
        ),
        (["demo", "--max-tokens", "-1"], "specrs demo: error: max_tokens=-1: "),
        (["demo", "--plot", "out.bmp"], "--plot='out.bmp': must end in .png, .svg, .pdf"),
        (
            ["demo", "--plot", "/nowhere/out.png"],
            "cannot be written: No such file or directory",
        ),
    ],
)
def test_rejected_values_are_one_line(argv: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert says in line


SHORT_FORMS = {name: row.short for name, row in (ENGINE | SERVER | REJECTED).items() if row.short is not None}


@pytest.mark.parametrize("name", SHORT_FORMS)
def test_every_short_form_is_known(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Check that every short form is accepted where its long flag is, and rejected with its name where the long flag
    is."""
    with pytest.raises(SystemExit) as stopped:
        main(["serve", SHORT_FORMS[name], "1", "--nowhere"])
    assert stopped.value.code == 2
    said = capsys.readouterr().err
    refused = f"error: {SHORT_FORMS[name]} (--{name}): not implemented"
    assert (refused if name in REJECTED else "error: unrecognized arguments: --nowhere") in said


def test_no_command_prints_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "generate" in capsys.readouterr().err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("specrs 0.")
