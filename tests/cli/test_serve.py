"""How `specrs serve` reads its flags: vLLM's spellings, published commands, and errors that name the flag. Serves
nothing."""

from pathlib import Path
from typing import Any

import pytest
from specrs.cli import main
from specrs.cli.model_flags import DEFAULT_TEXT_DRAFTS
from specrs.config import EngineConfig
from specrs.server import run
from specrs.server.run import ServerSettings
from specrs.server.tools import ToolSettings


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[tuple[EngineConfig, ServerSettings]]:
    """Return a list that gets the settings that `specrs serve` hands to the server, which is not started."""
    seen: list[tuple[EngineConfig, ServerSettings]] = []

    def serve(engine: Any, settings: ServerSettings) -> int:
        seen.append((EngineConfig.from_kwargs(**engine), settings))
        return 0

    monkeypatch.setattr(run, "run_server", serve)
    for name in ("SPECRS_API_KEY", "VLLM_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    return seen


@pytest.mark.parametrize(
    "argv",
    [
        [
            *("--model=Qwen/Qwen3-4B", "--max-model-len", "2000", "--speculative-config"),
            '{"model": "Qwen/Qwen3-0.6B", "method": "draft_model", "num_speculative_tokens": 3, "max-model-len": 2000}',
        ],
        [
            *("Qwen/Qwen3-4B", "--max-model-len", "2000", "--disable-uvicorn-access-log", "--speculative_config"),
            '{"method": "draft_model", "model": "Qwen/Qwen3-0.6B", "num_speculative_tokens": 3, "max_model_len": 2000, '
            '"disable_padded_drafter_batch": true}',
        ],
        [
            *("Qwen/Qwen3-4B", "--max_model_len=2k", "--speculative_config.model=Qwen/Qwen3-0.6B"),
            *("--speculative-config.num_speculative_tokens", "3", "--speculative-config.max-model-len=2000"),
        ],
    ],
)
def test_the_references_commands(served: list[tuple[EngineConfig, ServerSettings]], argv: list[str]) -> None:
    assert main(["serve", *argv]) == 0
    ((config, settings),) = served
    assert config.model == "Qwen/Qwen3-4B"
    assert config.max_model_len == 2000
    assert config.speculative_config is not None
    assert config.speculative_config.model == "Qwen/Qwen3-0.6B"
    assert config.speculative_config.num_speculative_tokens == 3
    assert config.speculative_config.max_model_len == 2000
    assert (settings.host, settings.port) == ("127.0.0.1", 8000)


def test_prompt_lookup(served: list[tuple[EngineConfig, ServerSettings]]) -> None:
    speculative = '{"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4, "prompt_lookup_min": 2}'
    assert main(["serve", "Qwen/Qwen3-4B", "--speculative-config", speculative]) == 0
    ((config, _),) = served
    assert config.speculative_config is not None
    assert (config.draft, config.num_speculative_tokens) == (None, 5)
    assert config.speculative_config.prompt_lookup == (2, 4)


def test_every_flag_of_the_engine(served: list[tuple[EngineConfig, ServerSettings]]) -> None:
    flags = "--tokenizer t --revision r --dtype bfloat16 --seed 3 --max-model-len 4K --max-num-seqs 7 --block-size 32"
    more = "--max-num-batched-tokens 1k --num-gpu-blocks-override 9 --no-enable-prefix-caching --enforce-eager"
    policy = "--long-prefill-token-threshold 1K --num-reserved-decode-tokens 128 --priority-aging-steps 50"
    stall = "--max-prefill-stall-ms 62.5"
    cpu = "--kv-cache-dtype fp8 --cpu-prefill amx --cpu-activations fp32 --no-cuda-fp8-rows -tp 2"
    cpu += " --distributed-timeout 7.5"
    given = [*flags.split(), *more.split(), *policy.split(), *stall.split(), *cpu.split()]
    given += ["--cudagraph-capture-sizes", "1", "2", "8"]
    assert main(["serve", "m/m", *given, "--max-logprobs", "5"]) == 0
    ((config, _),) = served
    assert config == EngineConfig(
        model="m/m",
        speculative_config=DEFAULT_TEXT_DRAFTS,  # type: ignore[arg-type]
        tokenizer="t",
        revision="r",
        dtype="bfloat16",
        seed=3,
        max_model_len=4096,
        max_num_seqs=7,
        block_size=32,
        max_num_batched_tokens=1000,
        long_prefill_token_threshold=1024,
        num_reserved_decode_tokens=128,
        priority_aging_steps=50,
        max_prefill_stall_ms=62.5,
        num_gpu_blocks_override=9,
        enable_prefix_caching=False,
        enforce_eager=True,
        cudagraph_capture_sizes=(1, 2, 8),
        kv_cache_dtype="fp8_e4m3",
        cpu_prefill="amx",
        cpu_activations="fp32",
        tensor_parallel_size=2,
        distributed_timeout=7.5,
        max_logprobs=5,
    )


def test_every_flag_of_the_server(
    served: list[tuple[EngineConfig, ServerSettings]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPECRS_API_KEY", "c")
    monkeypatch.setenv("VLLM_API_KEY", "d")
    flags = "--host ::1 --port 0 --api-key a b --served-model-name x y --max-num-queued-reqs 9 --shutdown-timeout 2.5"
    more = "--disable-uvicorn-access-log --per-request-spec-decode-metrics summary --generation-config vllm"
    assert main(["serve", *flags.split(), *more.split(), "--chat-template", "{{ messages }}"]) == 0
    ((config, settings),) = served
    assert config.uses_bundled_target
    assert config.dtype == "float32"
    assert config.plans_speculation
    assert settings == ServerSettings(
        host="::1",
        port=0,
        ui=True,
        api_keys=["a", "b", "c", "d"],
        served_model_names=("x", "y"),
        max_num_queued_reqs=9,
        shutdown_timeout=2.5,
        access_log=False,
        report_speculation=True,
        use_generation_config=False,
        tools=ToolSettings(tool_parser="auto"),
        chat_template="{{ messages }}",
    )


def test_short_forms(served: list[tuple[EngineConfig, ServerSettings]]) -> None:
    """Check vLLM's short flags: some have an effect, and others are accepted only at their defaults."""
    given = ["-tp", "2", "-q", "fp8", "-sc", '{"method": "ngram"}', "-sc.num_speculative_tokens=3"]
    assert main(["serve", "Qwen/Qwen3-4B", *given]) == 0
    defaults = "-pp 1 -dp 1 -dcp 1 -asc 1 -ep False -cc {} -cc=0"
    assert main(["serve", "Qwen/Qwen3-4B", *defaults.split()]) == 0
    (config, _), (plain, _) = served
    assert (config.tensor_parallel_size, config.quantization) == (2, "fp8")
    assert config.speculative_config is not None
    assert (config.speculative_config.method, config.num_speculative_tokens) == ("ngram", 3)
    assert plain == EngineConfig(model="Qwen/Qwen3-4B", speculative_config=DEFAULT_TEXT_DRAFTS)  # type: ignore[arg-type]


def test_keys_of_the_speculation_as_flags(served: list[tuple[EngineConfig, ServerSettings]]) -> None:
    """Flags that newer versions of vLLM have."""
    assert main(["serve", "m/m", "--spec-method", "draft_model", "--spec-model", "d/d", "--spec-tokens", "auto"]) == 0
    assert main(["serve", "--spec-tokens=3"]) == 0
    assert main(["serve", "-sc", '{"num_speculative_tokens": 3}', "-sc.num_speculative_tokens=2"]) == 0
    configs = [config.speculative_config for config, _ in served]
    assert [(config.model, config.num_speculative_tokens) for config in configs if config is not None] == [
        ("d/d", "auto"),
        (None, 3),
        (None, 2),
    ]


def test_flags_of_drafting_replace_keys_of_the_file(
    served: list[tuple[EngineConfig, ServerSettings]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Flags on the command line replace what other flags of the file gave. Flags in the file must not contradict each
    other."""
    flags = tmp_path / "flags.yaml"
    flags.write_text("speculative-config: {method: suffix, num-speculative-tokens: 5}\n")
    assert main(["serve", "m/m", "--config", str(flags), "--spec-tokens=2", "--spec-method", "ngram"]) == 0
    flags.write_text("spec-method: ngram\nspec-tokens: 2\n")
    assert main(["serve", "m/m", "--config", str(flags), "-sc.method=suffix"]) == 0
    configs = [config.speculative_config for config, _ in served]
    assert [(config.method, config.num_speculative_tokens) for config in configs if config is not None] == [
        ("ngram", 2),
        ("suffix", 2),
    ]
    flags.write_text("spec-method: ngram\nspeculative-config: {method: suffix}\n")
    with pytest.raises(SystemExit):
        main(["serve", "m/m", "--config", str(flags)])
    message = "--speculative-config.method='suffix': contradicts --spec-method='ngram'; leave one of them out"
    assert message in capsys.readouterr().err


def test_lists_in_a_file_of_flags_leave_the_model_alone(
    served: list[tuple[EngineConfig, ServerSettings]], tmp_path: Path
) -> None:
    flags = tmp_path / "flags.yaml"
    flags.write_text("served-model-name: [x, y]\ncudagraph_capture_sizes: [1, 4]\n")
    for argv in (
        ["m/m", "--config", str(flags)],
        ["--config", str(flags), "m/m"],
        [f"--config={flags}", "--model=m/m"],
    ):
        assert main(["serve", *argv]) == 0
    for config, settings in served:
        assert (config.model, config.cudagraph_capture_sizes) == ("m/m", (1, 4))
        assert settings.served_model_names == ("x", "y")


@pytest.mark.parametrize("flag", ["--enforce-eager", "--enforce_eager"])
@pytest.mark.parametrize(
    ("given", "on"),
    [((), True), (("true",), True), (("True",), True), (("false",), False), ("=True", True), ("=false", False)],
)
def test_switches_carry_values_or_none(
    served: list[tuple[EngineConfig, ServerSettings]], flag: str, given: str | tuple[str, ...], on: bool
) -> None:
    argv = [flag + given] if isinstance(given, str) else [flag, *given]
    assert main(["serve", *argv, "m/m"]) == 0
    assert main(["serve", "m/m", "--no-enforce-eager"]) == 0
    assert [config.enforce_eager for config, _ in served] == [on, False]
    assert {config.model for config, _ in served} == {"m/m"}


def test_everyday_switches_of_vllm(served: list[tuple[EngineConfig, ServerSettings]]) -> None:
    for flags in ("--enable-chunked-prefill", "--enable-chunked-prefill True", "--uvicorn-log-level warning"):
        assert main(["serve", "m/m", *flags.split(), "--enable-prefix-caching=False"]) == 0
    for flags in ("--async-scheduling", "--async-scheduling --max-steps-in-flight 2", "--no-async-scheduling"):
        assert main(["serve", "m/m", *flags.split()]) == 0
    depths = [config.max_steps_in_flight for config, _ in served]
    assert depths == [None, None, None, 2, 2, 1]
    assert [config.enable_prefix_caching for config, _ in served] == [False] * 3 + [None] * 3


def test_flags_without_meaning_are_served_at_their_defaults(served: list[tuple[EngineConfig, ServerSettings]]) -> None:
    flags = (
        "-tp 1 --kv-cache-dtype auto --no-trust-remote-code --disable-log-requests --chat-template-content-format auto"
    )
    assert main(["serve", "m/m", *flags.split()]) == 0
    assert len(served) == 1


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["-pp", "2"], "pipeline_parallel_size=2: not implemented; allowed: 1"),
        (["-tp", "3"], "has num_attention_heads=4; allowed: its divisors"),
        (["--kv-cache-dtype", "int4"], "kv_cache_dtype='int4': not implemented; allowed: 'auto', 'bfloat16', "),
        (["--trust-remote-code"], "trust_remote_code=True: not implemented; allowed: False"),
        (["--uds", "s.sock"], "--uds='s.sock': not implemented; allowed: None"),
        (
            ["--reasoning-parser", "thinking"],
            "--reasoning-parser='thinking': must be one of deepseek_r1, deepseek_v3, ",
        ),
        (["--api-server-count", "2"], "--api-server-count=2: not implemented; allowed: 1"),
        (["--port", "70000"], "--port=70000: must be an integer from 0 to 65535"),
        (["--shutdown-timeout", "-1"], "--shutdown-timeout=-1.0: must be a finite number of at least 0"),
        (["--max-num-queued-reqs", "0"], "--max-num-queued-reqs=0: "),
        (["--http-header-timeout", "0"], "--http-header-timeout=0.0: "),
        (["--generation-config", "x"], "--generation-config='x': must be one of auto, vllm"),
        (["--chat-template", "nowhere.jinja"], "--chat-template='nowhere.jinja': must be a file"),
        (
            ["--chat-template", "{% for x in messages %}"],
            "--chat-template='{% for x in messages %}': is no Jinja template",
        ),
        (["m/m", "--model", "n/n"], "--model='n/n': must equal MODEL=m/m"),
        (["--speculative-config.num_speculative_tokens=17"], "num_speculative_tokens=17: "),
        (["--device", "tpu"], "device='tpu'"),
        (["--cudagraph-capture-sizes", "4", "0"], "cudagraph_capture_sizes[1]=0: must be an integer from 1 to 65536"),
        (["-ep"], "enable_expert_parallel=True: not implemented; allowed: False"),
        (["-dcp", "2"], "decode_context_parallel_size=2: not implemented; allowed: 1"),
        (["-cc.cudagraph_mode=NONE"], "compilation_config={'cudagraph_mode': 'NONE'}: not implemented; allowed: None"),
        (["-asc", "2"], "--api-server-count=2: not implemented; allowed: 1"),
        (["-sc.num_speculative_tokens=17"], "num_speculative_tokens=17: "),
        (["--spec-tokens", "17"], "num_speculative_tokens=17: "),
        (["--no-enable-chunked-prefill"], "enable_chunked_prefill=False: not implemented; allowed: None or True"),
        (
            ["--async-scheduling", "--max-steps-in-flight", "1"],
            "async_scheduling=True: contradicts max_steps_in_flight=1",
        ),
    ],
)
def test_rejected_values_are_one_line(argv: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", *argv]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("specrs serve: error: ")
    assert says in line


def test_a_port_that_is_taken(capsys: pytest.CaptureFixture[str]) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", "--port", str(port)]) == 2
    wanted = f"port={port}: cannot listen on 127.0.0.1: Address already in use; use another --port, or stop what uses"
    assert wanted in capsys.readouterr().err


@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-host.invalid"])
def test_a_host_that_is_no_address_of_this_machine(host: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--host", host, "--port", "0"]) == 2
    assert f"host='{host}': is no address to listen on: " in capsys.readouterr().err
