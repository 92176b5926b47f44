"""benches/bench_cpu_peers.py without its engines: how it reports results, and engines that are missing or fail."""

import json
import os
import shutil
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from gguf_files import write_gguf
from peers import engines, figures, goals, machine, prepare_gguf, prompts, run_llama_cpp, settings, tables
from peers.job import Job
from specrs.cli.demo.chats import CHATS
from specrs.pair import TARGET
from tokenizers import Tokenizer

ROOT = Path(__file__).parents[2]

PLAIN = settings.Line("specrs", 0, "float32")
SETTING = settings.SETS["pair1"]


def group(ids: list[list[int]], first_s: float, total_s: float, passes: float | None = None) -> dict[str, Any]:
    return {"ids": ids, "first_s": first_s, "total_s": total_s, "first_tokens": len(ids), "passes": passes}


def measured(line: settings.Line, *speeds: float, first_ms: float = 1.0) -> figures.Measured:
    runs = [{figures.SPEED: speed, figures.FIRST: first_ms, figures.ITERATION: 1e3 / speed} for speed in speeds]
    return figures.Measured(line, runs)


def test_figures_of_a_run() -> None:
    # Two requests at once, 5 tokens each: 8 after the first in 2 s; with drafts, 4 passes gave them.
    groups = [group([[1] * 5, [2] * 5], 1.0, 3.0)]
    assert figures.figures(groups, 2) == {
        figures.SPEED: 4.0, figures.FIRST: 1000.0, figures.ITERATION: 500.0,
    }  # fmt: skip
    found = figures.figures([group([[1] * 5, [2] * 5], 1.0, 3.0, passes=4)], 2)
    assert (found[figures.ITERATION], found[figures.LENGTH]) == (1000.0, 2.0)


def test_first_difference() -> None:
    assert figures.first_difference([[1, 2], [3, 4]], [[1, 2], [3, 4]]) is None
    assert figures.first_difference([[1, 2], [3, 4]], [[1, 2], [3, 5]]) == (1, 1)
    assert figures.first_difference([[1, 2], [3, 4]], [[1, 2], [3]]) == (1, 1)


def test_ids_are_compared_with_transformers_and_short_ones_counted() -> None:
    ids = [[1] * SETTING.new_tokens]
    lines = [
        figures.Measured(PLAIN, [{}], ids=[[1] * (SETTING.new_tokens - 1) + [2]]),
        figures.Measured(settings.Line("transformers", 0, "float32"), [{}], ids=ids),
        figures.Measured(settings.Line("llama.cpp", 3, "float32"), [{}], ids=[ids[0][:-1]]),
        figures.Measured(settings.Line("vllm", 0, "bfloat16"), [{}], ids=[[7] * SETTING.new_tokens]),
        figures.Measured(settings.Line("specrs", 0, "float32", sampled=True), [{}], ids=[[9] * SETTING.new_tokens]),
        figures.Measured(settings.Line("openvino", 0, "float32"), reason="not installed"),
    ]
    own, reference, short, other_dtype, sampled = figures.compare_ids(lines, SETTING)
    assert own["reference"] == "transformers"
    assert own["first_difference"] == (0, SETTING.new_tokens - 1)
    assert short["short"] == 1
    for row in (reference, other_dtype, sampled):
        assert "reference" not in row
    text = "\n".join(tables.id_rows([own, reference, short]))
    where = f"the first difference is at token {SETTING.new_tokens - 1} of text 0"
    assert f"specrs, K = 0, float32: 0 of 1 texts are those of transformers, K = 0; {where}" in text
    assert "1 requests ended early" in text


def test_ratios_and_goals() -> None:
    lines = [
        measured(PLAIN, 900.0, 1000.0, 5000.0, first_ms=2.0),
        measured(settings.Line("specrs", 0, "float32", cpu_prefill="amx"), 900.0, first_ms=0.5),
        measured(settings.Line("specrs", 3, "float32"), 1500.0),
        measured(settings.Line("specrs", 5, "float32"), 1200.0),
        measured(settings.Line("llama.cpp", 0, "float32"), 400.0, first_ms=4.0),
        measured(settings.Line("openvino", 0, "float32"), 200.0),
        measured(settings.Line("vllm", 0, "float32"), 500.0, first_ms=4.0),
        measured(settings.Line("vllm", 3, "float32"), 250.0),
    ]
    found = {goal.what: goal for goal in goals.goals("pair1", lines, {"float32": 1.0, "bfloat16": 4000.0})}
    better = found["K = 0, of the better of llama.cpp and OpenVINO in float32"]
    assert (better.value, better.met) == (2.5, True)
    assert found["K = 0, of the better of llama.cpp and OpenVINO in bfloat16"].met is None
    assert found["best K, of its own K = 0"].value == 1.5
    slow = found["best K, of the best peer in float32 at any K"]
    assert (slow.value, slow.met) == (3.0, False)
    assert found["first token by exact prompts, of the best peer's"].value == 2.0
    assert found["first token by amx prompts, of the best peer's"].value == 0.5
    rows = tables.rows_of(SETTING, lines, {"passes_per_s": {"float32": 1.0, "bfloat16": 4000.0}, "stored": "bfloat16"})
    assert rows[2] == "| specrs | float32 | 0 | 1,000 (900 to 5,000) | 2.00 | 2.00 |  | 2.0 (2.0 to 2.0) |  | 0.25 |  |"


def test_windows_have_their_length_and_differ() -> None:
    found = prompts.windows(list(range(50)), 20, 128)
    assert {len(window) for window in found} == {128}
    assert len({tuple(window) for window in found}) == 20
    made = prompts.make_prompts(settings.SETS["pair8"], TARGET)
    assert [len(part) for part in (made["warm"], made["groups"])] == [1, 3]
    assert {len(part) for part in (*made["warm"], *made["groups"])} == {8}


def test_chats_are_by_the_models_template(tmp_path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        shutil.copy(TARGET / name, tmp_path)
    (tmp_path / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.content }}{% endfor %}#", encoding="utf-8"
    )
    found = prompts.make_prompts(settings.SETS["chats"], tmp_path)
    tokenizer = Tokenizer.from_file(str(TARGET / "tokenizer.json"))
    texts = [tokenizer.decode(ids) for (ids,) in found["groups"]]
    assert texts == [f"{chat}#" for chat in CHATS]
    assert found["warm"] == found["groups"][:1]


def test_drafts_from_the_text_are_asked_for_by_name() -> None:
    line = settings.Line("llama.cpp", 5, "bfloat16", method="ngram")
    assert line.name == "llama.cpp, ngram"
    job = Job(
        model="m.gguf", draft=None, k=5, dtype="bfloat16", threads=2, batch=1, new_tokens=8, sampled=False, peers="p",
        cpu_prefill="exact", warm=[], groups=[[[5]]], method="ngram",
    )  # fmt: skip
    command = " ".join(run_llama_cpp.command(job, 1))
    assert "--spec-type ngram-simple --spec-ngram-simple-size-n 3 --spec-ngram-simple-size-m 5" in command
    assert job.drafts
    assert not replace(job, method="").drafts


def test_files_are_read_by_both_engines(tmp_path: Path) -> None:
    """Check the files that engines get: specrs and llama.cpp load the same file, OpenVINO a folder of its own; the
    dtype of K and V is the engine's choice."""
    lines = settings.SETS["qwen3-files-2"].lines
    loaded = {engines.model_path(line, "qwen3-0.6b-shape", tmp_path).name for line in lines}
    files = {f"qwen3-0.6b-shape-{kind}.gguf" for kind in ("q4_0", "q8_0", "q4_k_m")}
    assert loaded == {*files, "qwen3-0.6b-shape-int4"}
    assert {line.engine for line in lines if line.dtype == "q4_0"} == {"specrs", "llama.cpp"}
    job = Job(
        model="m.gguf", draft=None, k=0, dtype="q4_0", threads=2, batch=1, new_tokens=8, sampled=False, peers="p",
        cpu_prefill="exact", warm=[], groups=[[[5]]],
    )  # fmt: skip
    assert job.is_quantized
    assert not replace(job, dtype="bfloat16").is_quantized
    assert "-ctk f16 -ctv f16" in " ".join(run_llama_cpp.command(job, 1))


def test_files_are_held_to_their_goals() -> None:
    of = settings.Line
    lines = [
        measured(of("specrs", 0, "q4_0"), 130.0, first_ms=100.0),
        measured(of("llama.cpp", 0, "q4_0"), 100.0, first_ms=50.0),
        measured(of("specrs", 0, "q8_0"), 10.0),
    ]
    speed, first, *others = goals.goals("smollm2-files-1", lines, {"q4_0": 200.0})
    assert (speed.value, speed.sign, speed.bar, speed.met) == (1.3, ">=", 1.25, True)
    assert (first.value, first.sign, first.bar, first.met) == (2.0, "<=", 0.95, False)
    assert all(goal.met is None for goal in others)
    assert {name for name in settings.SETS if "files" in name} <= set(goals.GOALS)
    rows = tables.rows_of(settings.SETS["smollm2-files-1"], lines, {"passes_per_s": {"q4_0": 200.0}, "stored": "file"})
    assert rows[2].endswith("| 100.0 (100.0 to 100.0) |  | 0.65 |  |")
    assert rows[4].endswith("|  |  |  |"), "a file whose size is not known has no limit"


def test_prompts_of_a_file_are_by_its_tokenizer(tmp_path: Path) -> None:
    path = write_gguf(TARGET, tmp_path / "model.gguf", "BF16")
    setting = settings.SETS["gemma3-files-1"]
    assert prompts.make_prompts(setting, path) == prompts.make_prompts(setting, TARGET)


def test_chats_are_held_to_their_goals() -> None:
    of = settings.Line
    lines = [
        measured(of("specrs", 0, "bfloat16"), 50.0),
        measured(of("specrs", "auto", "bfloat16", method="ngram,suffix"), 60.0),
        measured(of("llama.cpp", 0, "bfloat16"), 40.0),
        measured(of("llama.cpp", 5, "bfloat16", method="ngram"), 80.0),
    ]
    own, peer = goals.goals("chats", lines, {"bfloat16": 100.0})
    assert (own.value, own.met) == (1.2, True)
    assert (peer.value, peer.met) == (0.75, False)


def test_bandwidth_and_weights() -> None:
    assert machine.read_bandwidth(1 << 16, 1) > 0
    assert machine.read_bandwidth(1 << 16, 2) > 0
    stored, number = machine.weights(TARGET)
    assert stored == "bfloat16"
    assert 2 * number <= (TARGET / "model.safetensors").stat().st_size < 2.01 * number


def test_gguf_never_ends() -> None:
    assert prepare_gguf.unrecognized("<|im_end|>") == b"<!im_end|>"
    assert prepare_gguf.unrecognized(b"ab<|") == b"ab<|"
    vocabulary = json.loads((TARGET / "tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"]
    assert prepare_gguf.never_generated(TARGET) == vocabulary["\u00c0"]


def test_missing_is_named(tmp_path: Path) -> None:
    assert engines.missing(PLAIN, SETTING, tmp_path) is None
    vllm = engines.missing(settings.Line("vllm", 0, "float32"), SETTING, tmp_path)
    assert vllm == "not installed: FOLDER/venv-vllm/bin/python"
    assisted = settings.Line("transformers", 3, "float32")
    assert (
        engines.missing(assisted, settings.SETS["pair8"], tmp_path) == "assisted generation takes one request at a time"
    )


def interpreter(folder: Path, script: str) -> None:
    """Write a shell script to `folder` that stands in for an environment's Python, which is called with `-m MODULE JOB
    RESULT`."""
    folder.mkdir(parents=True)
    (folder / "python").write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    (folder / "python").chmod(0o755)


def test_failure_has_its_last_words(tmp_path: Path) -> None:
    interpreter(tmp_path / "venv-tf/bin", "echo some; echo last words of $0 >&2; exit 3")
    line = settings.Line("transformers", 0, "float32")
    found = engines.run(line, SETTING, tmp_path, {"warm": [], "groups": []}, 60.0)
    assert found == {"error": "exit status 3: last words of FOLDER/venv-tf/bin/python"}


def test_process_that_takes_too_long_ends_with_its_children(tmp_path: Path) -> None:
    # The children hold the pipe's other end: it has an end when they have, or this test runs out of time.
    os.mkfifo(tmp_path / "pipe")
    pipe = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    interpreter(tmp_path / "venv-tf/bin", f"exec 3>{tmp_path}/pipe; sleep 1000 & wait")
    line = settings.Line("transformers", 0, "float32")
    found = engines.run(line, SETTING, tmp_path, {"warm": [], "groups": []}, 2.0)
    assert found == {"error": "took more than 2 s"}
    os.set_blocking(pipe, True)
    assert os.read(pipe, 1) == b""
    os.close(pipe)


def test_the_command(tmp_path: Path) -> None:
    # As fast as a file is copied; what it measured is the test's.
    ids = [[1] * SETTING.new_tokens]
    result = {"versions": {"transformers": "0"}, "load_s": 1.0, "groups": [group(ids, 0.5, 1.5)]}
    (tmp_path / "result.json").write_text(json.dumps(result), encoding="utf-8")
    interpreter(tmp_path / "peers/venv-tf/bin", f'cp {tmp_path}/result.json "$4"')
    done = subprocess.run(
        [
            sys.executable, str(ROOT / "benches/bench_cpu_peers.py"), "--peers", str(tmp_path / "peers"),
            "--sets", "pair1", "--engines", "transformers", "openvino", "--rounds", "2", "--out", "out/file.json",
        ],
        cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "left out of pair1: openvino, K = 5, float32: not installed: FOLDER/venv-ov/bin/python" in done.stdout
    assert "| transformers | float32 | 0 | 127 (127 to 127) |" in done.stdout
    text = (tmp_path / "out/file.json").read_text(encoding="utf-8")
    assert str(tmp_path) not in text
    report = json.loads(text)
    plain = next(line for line in report["sets"]["pair1"]["lines"] if line["engine"] == "transformers")
    assert (plain["k"], len(plain["runs"])) == (0, 2)
    assert plain["medians"][figures.SPEED] == 127.0
    assert {"before", "after"} == set(report["load_average"])


SERVER = """
    import json, sys
    from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

    if "--version" in sys.argv:
        print("version: 1 (abc)")
        sys.exit()

    class Handler(BaseHTTPRequestHandler):
        def answer(self, body):
            data = json.dumps(body).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def do_GET(self):
            self.answer({"status": "ok"})

        def do_POST(self):
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            timings = {"prompt_ms": 250.0, "predicted_ms": 750.0, "draft_n_accepted": 3}
            self.answer({"tokens": [asked["prompt"][0]] * asked["n_predict"], "timings": timings})

        def log_message(self, *_):
            pass

    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""


def test_llama_server_is_asked_and_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = tmp_path / run_llama_cpp.SERVER
    server.parent.mkdir(parents=True)
    server.write_text(f"#!{sys.executable}\n{textwrap.dedent(SERVER)}", encoding="utf-8")
    server.chmod(0o755)
    job = Job(
        model="target.gguf", draft="draft.gguf", k=3, dtype="float32", threads=1, batch=2, new_tokens=8, sampled=False,
        peers=str(tmp_path), cpu_prefill="exact", warm=[], groups=[[[5, 6]], [[7], [8]]],
    )  # fmt: skip
    result = tmp_path / "result.json"
    monkeypatch.setattr(sys, "argv", ["", "", str(result)])
    run_llama_cpp.main(job)
    found = json.loads(result.read_text(encoding="utf-8"))
    assert found["versions"] == {"llama.cpp": "1 (abc)"}
    assert found["peak_bytes"] > 1 << 20
    one, two = found["groups"]
    assert one == {"ids": [[5] * 8], "first_s": 0.25, "total_s": 1.0, "first_tokens": 1, "passes": 4}
    assert (two["ids"], two["passes"]) == ([[7] * 8, [8] * 8], 8)


def test_llama_server_that_ends_is_an_error(tmp_path: Path) -> None:
    server = tmp_path / run_llama_cpp.SERVER
    server.parent.mkdir(parents=True)
    server.write_text("#!/bin/sh\nexit 4\n", encoding="utf-8")
    server.chmod(0o755)
    with subprocess.Popen([str(server)]) as process:
        process.wait()
        with pytest.raises(RuntimeError, match="ended with 4"):
            run_llama_cpp.wait_until_ready(process, run_llama_cpp.free_port())
