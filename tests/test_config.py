"""EngineConfig: wrong values are rejected, and vLLM's other arguments if they would have an effect."""

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
from specrs import pair
from specrs.config import EngineConfig, resolve_max_model_len
from specrs.engine_options import LOGPROBS_MODES
from specrs.errors import InvalidConfigError, UnsupportedConfigError
from specrs.speculative_config import SpeculativeConfig
from specrs.verify.logprobs import LogprobsMode


def test_defaults() -> None:
    config = EngineConfig()
    assert (config.most_seqs, config.batched_tokens, config.block_size) == (256, 2048, 16)
    assert (config.enable_prefix_caching, config.seed, config.max_steps_in_flight, config.num_speculative_tokens) == (
        None,
        0,
        None,
        0,
    )
    assert (config.target, config.draft, config.cpu_prefill) == (str(pair.TARGET), None, "exact")


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("model", "", "a folder or a hub id"),
        ("model", 3, "a folder or a hub id"),
        ("tokenizer", "", "a folder or a hub id"),
        ("revision", "", "a string that is not empty, or None"),
        ("max_model_len", 0, "an integer of at least 2, or None"),
        ("max_model_len", 1, "an integer of at least 2, or None"),
        ("max_model_len", "2k", "an integer of at least 2, or None"),
        ("max_num_seqs", 0, "an integer from 1 to 65536"),
        ("max_num_batched_tokens", 0, "an integer from 1 to"),
        ("long_prefill_token_threshold", -1, "an integer from 0 to"),
        ("max_prefill_stall_ms", -1, "a finite number from 0 to"),
        ("max_prefill_stall_ms", float("nan"), "a finite number from 0 to"),
        ("num_reserved_decode_tokens", 1.0, "an integer from 0 to"),
        ("priority_aging_steps", None, "an integer from 0 to"),
        ("block_size", 0, "an integer from 1 to 1024"),
        ("block_size", 2048, "an integer from 1 to 1024"),
        ("block_size", 24, "a power of two from 1 to 1024"),
        ("num_gpu_blocks_override", 0, "an integer of at least 1, or None"),
        ("kv_cache_memory_bytes", -1, "an integer of at least 1, or None"),
        ("max_steps_in_flight", 0, "an integer from 1 to 2, or None"),
        ("max_steps_in_flight", 3, "an integer from 1 to 2, or None"),
        ("seed", 1.5, "an integer from"),
        ("seed", None, "an integer from"),
        ("enable_prefix_caching", 1, "True or False"),
        ("enforce_eager", "yes", "True or False"),
        ("load_format", "pt", "one of auto, safetensors"),
        ("cpu_activations", "int4", "one of auto, int16, int8, fp32, bf16"),
        ("cuda_fp8_rows", 1, "True or False"),
        ("cpu_prefill", "fast", "must be one of exact, amx"),
        ("cpu_prefill", None, "must be one of exact, amx"),
        ("dtype", "int8", "one of auto, float32, float64, bfloat16"),
        ("device", "tpu", "'auto', 'cpu', 'cuda' or 'cuda:N'"),
        ("max_logprobs", -2, "an integer from -1 to"),
        ("max_logprobs", None, "an integer from -1 to"),
        ("max_logprobs", 2**31, "an integer from -1 to"),
        (
            "logprobs_mode",
            "raw",
            "must be one of raw_logprobs, processed_logprobs, raw_logits, processed_logits",
        ),
        ("speculative_config", 5, "a dictionary, a SpeculativeConfig, or None"),
    ],
)
def test_wrong_values_are_rejected(field: str, value: object, allowed: str) -> None:
    with pytest.raises(InvalidConfigError) as caught:
        EngineConfig(**{field: value})  # type: ignore[arg-type]
    message = str(caught.value)
    assert message.startswith(f"{field}={value!r}: ")
    assert allowed in message


@pytest.mark.parametrize("device", ["auto", "cpu", "cuda", "cuda:0", "cuda:3"])
def test_devices(device: str) -> None:
    assert EngineConfig(device=device).device == device


@pytest.mark.parametrize("device", ["gpu", "cuda:", "cuda:x", "cuda:-1", "cpu:0", "mps"])
def test_other_devices_are_rejected(device: str) -> None:
    with pytest.raises(InvalidConfigError, match=f"^device='{device}': must be 'auto', 'cpu', 'cuda' or 'cuda:N'"):
        EngineConfig(device=device)


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("gpu_memory_utilization", 0, "greater than 0 and at most 1"),
        ("gpu_memory_utilization", 1.1, "greater than 0 and at most 1"),
        ("cudagraph_capture_sizes", [], "must be a list of batch sizes, or None"),
        ("cudagraph_capture_sizes", 8, "must be a list of batch sizes, or None"),
        ("cudagraph_capture_sizes", [1, 0], "must be an integer from 1"),
        ("load_format", "pt", "one of auto, safetensors, dummy"),
    ],
)
def test_gpu_settings_are_rejected(field: str, value: object, allowed: str) -> None:
    with pytest.raises(InvalidConfigError, match=f"^{field}.*{allowed}"):
        EngineConfig(**{field: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("torch.float64", "float64"),
        ("double", "float64"),
        ("float", "float32"),
        ("bfloat16", "bfloat16"),
        ("auto", "auto"),
    ],
)
def test_dtype_names(given: str, name: str) -> None:
    assert EngineConfig(dtype=given).dtype == name


def test_logprobs_have_the_same_modes_everywhere() -> None:
    assert get_args(LogprobsMode) == LOGPROBS_MODES
    assert (EngineConfig().logprobs_mode, EngineConfig().max_logprobs) == ("raw_logprobs", 20)
    for mode in LOGPROBS_MODES:
        assert EngineConfig.from_kwargs(logprobs_mode=mode, max_logprobs=-1).logprobs_mode == mode


@pytest.mark.parametrize(
    "speculative",
    [
        {"num_speculative_tokens": 3, "rejection_sample_method": "coupled", "draft_tensor_parallel_size": 2},
        {"method": "eagle3", "model": "x", "num_speculative_tokens": 3, "aux_hidden_state_layer_ids": [1, 2]},
        {"method": "suffix,draft_model", "num_speculative_tokens": "auto", "max_num_speculative_tokens": 4},
    ],
)
def test_ranks_are_told_the_configuration_as_json(speculative: dict[str, Any]) -> None:
    given = EngineConfig(
        speculative_config=speculative,  # type: ignore[arg-type]
        tensor_parallel_size=2,
        cudagraph_capture_sizes=[1, 2],  # type: ignore[arg-type]
    )
    assert EngineConfig(**json.loads(json.dumps(dataclasses.asdict(given)))) == given


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tensor_parallel_size": True}, r"^tensor_parallel_size=True: must be an integer from 1 to 1024"),
        ({"tensor_parallel_size": 0}, r"^tensor_parallel_size=0: must be"),
        ({"distributed_timeout": 0}, r"^distributed_timeout=0: must be a finite number greater than 0"),
        ({"tensor_parallel_size": 2, "model_impl": "transformers"}, r"^tensor_parallel_size=2: .*model_impl="),
        ({"tensor_parallel_size": 2, "quantization": "int8"}, r"^tensor_parallel_size=2: .*quantization='int8'"),
        ({"tensor_parallel_size": 2, "cpu_activations": "bf16"}, r"^tensor_parallel_size=2: .*cpu_activations='bf16'"),
        (
            {"tensor_parallel_size": 2, "cpu_activations": "int16"},
            r"^tensor_parallel_size=2: .*cpu_activations='int16'",
        ),
        ({"tensor_parallel_size": 2, "quantization": "q4_0"}, r"^tensor_parallel_size=2: .*quantization='q4_0'"),
        (
            {
                "tensor_parallel_size": 4,
                "speculative_config": {"num_speculative_tokens": 3} | {"draft_tensor_parallel_size": 2},
            },
            r"^speculative_config.draft_tensor_parallel_size=2: must be 1 or 4, the target's tensor_parallel_size$",
        ),
        (
            {
                "tensor_parallel_size": 2,
                "speculative_config": {
                    "num_speculative_tokens": 3,
                    "quantization": "int8",
                    "draft_tensor_parallel_size": 2,
                },
            },
            r"^tensor_parallel_size=2: .*speculative_config.quantization='int8'.*draft_tensor_parallel_size=1$",
        ),
    ],
)
def test_ranks_refuse(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidConfigError, match=message):
        EngineConfig(**fields)


def test_block_sizes_are_powers_of_two() -> None:
    for size in (1, 8, 1024):
        assert EngineConfig(block_size=size).block_size == size


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("trust_remote_code", True),
        ("pipeline_parallel_size", 2),
        ("quantization", "bitsandbytes"),
        ("kv_cache_dtype", "nvfp4"),
        ("calculate_kv_scales", True),
        ("tokenizer_mode", "slow"),
        ("fully_sharded_loras", True),
        ("hf_overrides", {"a": 1}),
        ("swap_space", 8),
        ("cpu_offload_gb", 10),
        ("enable_chunked_prefill", False),
        # 1 == True and 0 == False in Python, but not here
        ("trust_remote_code", 0),
        ("pipeline_parallel_size", True),
    ],
)
def test_arguments_of_vllm_that_would_change_something(name: str, value: object) -> None:
    with pytest.raises(UnsupportedConfigError, match=f"^{name}=.*: not implemented; allowed: "):
        EngineConfig.from_kwargs(**{name: value})


def test_quantization() -> None:
    """Quantization of target and draft is set separately, on any device."""
    for kind in (
        None,
        "fp8",
        "int8",
        "int4",
        "q8_0",
        "q4_0",
        "q4_k",
        "compressed-tensors",
        "gptq",
        "awq",
        "mxfp4",
        "gguf",
    ):
        assert EngineConfig.from_kwargs(quantization=kind).quantization == kind
        for fields in ({"device": "cuda:1"}, {"dtype": "double"}, {"enforce_eager": True}):
            assert EngineConfig(quantization=kind, **fields).quantization == kind  # type: ignore[arg-type]
        made = EngineConfig(speculative_config={"num_speculative_tokens": 2, "quantization": kind})  # type: ignore[arg-type]
        assert made.quantization is None
        assert made.speculative_config is not None
        assert made.speculative_config.quantization == kind
    own = "'compressed-tensors', 'gptq', 'awq', 'mxfp4', 'gguf'"
    allowed = f"not implemented; allowed: None, 'fp8', 'int8', 'int4', 'q8_0', 'q4_0', 'q4_k', {own}"
    for bad in ("marlin", "INT8", 8, ["int8"], ""):
        with pytest.raises(UnsupportedConfigError, match=rf"^quantization=.*: {allowed}$"):
            EngineConfig(quantization=bad)  # type: ignore[arg-type]
        with pytest.raises(UnsupportedConfigError, match=rf"^speculative_config.quantization=.*: {allowed}$"):
            SpeculativeConfig(num_speculative_tokens=2, quantization=bad)  # type: ignore[arg-type]
    with pytest.raises(InvalidConfigError, match=r"^speculative_config.quantization='int8': not allowed with method="):
        SpeculativeConfig(num_speculative_tokens=2, method="ngram", quantization="int8")


def test_kv_cache_dtype() -> None:
    """Cache dtypes of target and draft model are set separately; an EAGLE-3 head has the target's."""
    names = {"auto": "auto", "bfloat16": "bfloat16", "fp8": "fp8_e4m3", "fp8_e4m3": "fp8_e4m3", "fp8_e5m2": "fp8_e5m2"}
    for given, name in names.items():
        assert EngineConfig.from_kwargs(kv_cache_dtype=given).kv_cache_dtype == name
        made = EngineConfig(speculative_config={"num_speculative_tokens": 2, "kv_cache_dtype": given})  # type: ignore[arg-type]
        assert made.kv_cache_dtype == "auto"
        assert made.speculative_config is not None
        assert made.speculative_config.kv_cache_dtype == name
    allowed = "not implemented; allowed: 'auto', 'bfloat16', 'float16', 'fp8', 'fp8_e4m3', 'fp8_e5m2'"
    for bad in ("int8", "FP8", 8, ["fp8"], "", None):
        with pytest.raises(UnsupportedConfigError, match=rf"^kv_cache_dtype=.*: {allowed}$"):
            EngineConfig(kv_cache_dtype=bad)  # type: ignore[arg-type]
    allowed = allowed.replace("allowed: ", "allowed: None, ")
    with pytest.raises(UnsupportedConfigError, match=rf"^speculative_config.kv_cache_dtype='int8': {allowed}$"):
        SpeculativeConfig(num_speculative_tokens=2, kv_cache_dtype="int8")
    for method in ("ngram", "eagle3"):
        with pytest.raises(InvalidConfigError, match=r"^speculative_config.kv_cache_dtype='fp8': not allowed with me"):
            SpeculativeConfig(num_speculative_tokens=2, method=method, kv_cache_dtype="fp8")
    with pytest.raises(UnsupportedConfigError, match=r"^cpu_activations='bf16': .* kv_cache_dtype='fp8_e5m2'; allow"):
        EngineConfig(cpu_activations="bf16", kv_cache_dtype="fp8_e5m2")


def test_bf16_activations() -> None:
    """Check that bf16 activations are rejected, with the field's name, wherever a native pass does not compute bf16
    weights."""
    assert not EngineConfig().rounds_to_bf16
    assert EngineConfig.from_kwargs(cpu_activations="bf16", dtype="bfloat16").rounds_to_bf16
    for fields, why in (
        ({"device": "cuda"}, "device='cuda'; allowed: 'auto', or device='cpu'"),
        ({"dtype": "float64"}, "dtype='float64'; allowed: 'auto', or dtype='float32' or 'bfloat16'"),
        ({"enforce_eager": True}, "enforce_eager=True; allowed: 'auto', or enforce_eager=False"),
        ({"quantization": "int8"}, "quantization='int8'; allowed: 'auto', or quantization=None"),
        ({"quantization": "fp8"}, "quantization='fp8'; allowed: 'auto', or quantization=None"),
        (
            {"speculative_config": SpeculativeConfig(num_speculative_tokens=2, quantization="int4")},
            "speculative_config.quantization='int4'; allowed: 'auto', or speculative_config.quantization=None",
        ),
    ):
        with pytest.raises(UnsupportedConfigError, match=f"^cpu_activations='bf16': not implemented with {why}$"):
            EngineConfig(cpu_activations="bf16", **fields)  # type: ignore[arg-type]


def test_fp8_rows() -> None:
    """Check that `cuda_fp8_rows` is rejected, with the name of the field in conflict, wherever no kernel rounds
    activations to FP8."""
    assert not EngineConfig().cuda_fp8_rows
    assert EngineConfig.from_kwargs(cuda_fp8_rows=True, device="cuda:1", dtype="bfloat16").cuda_fp8_rows
    for fields, why in (
        ({"device": "cpu"}, "device='cpu'; allowed: False, or device='cuda'"),
        ({"dtype": "float16"}, "dtype='float16'; allowed: False, or dtype='bfloat16'"),
        ({"dtype": "float64"}, "dtype='float64'; allowed: False, or dtype='bfloat16'"),
    ):
        with pytest.raises(UnsupportedConfigError, match=f"^cuda_fp8_rows=True: not implemented with {why}$"):
            EngineConfig(cuda_fp8_rows=True, **fields)  # type: ignore[arg-type]


def test_arguments_of_vllm_at_their_defaults_are_served() -> None:
    config = EngineConfig.from_kwargs(
        trust_remote_code=False,
        tensor_parallel_size=1,
        gpu_memory_utilization=0.9,
        swap_space=4,
        quantization=None,
        enforce_eager=True,
        disable_log_stats=True,
        tokenizer_mode="auto",
        enable_chunked_prefill=True,
        hf_overrides={},
        max_num_seqs=3,
    )
    assert config == EngineConfig(enforce_eager=True, max_num_seqs=3)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"enable_kv_cache_events": 1}, r"kv_events_config\.enable_kv_cache_events=1: .*True or False"),
        ({"publisher": "kafka"}, r"kv_events_config\.publisher='kafka': must be one of null, zmq"),
        ({"endpoint": "localhost:5557"}, r"kv_events_config\.endpoint='localhost:5557': must begin with one of tcp://"),
        ({"endpoint": None}, r"kv_events_config\.endpoint"),
        ({"replay_endpoint": ""}, r"kv_events_config\.replay_endpoint"),
        ({"buffer_steps": 0}, r"kv_events_config\.buffer_steps"),
        ({"hwm": 1.5}, r"kv_events_config\.hwm"),
        ({"max_queue_size": -1}, r"kv_events_config\.max_queue_size"),
        ({"topic": b"kv"}, r"kv_events_config\.topic"),
        ({"enable": True}, r"kv_events_config.*'enable'.*enable_kv_cache_events"),
    ],
)
def test_kv_events_config_refuses(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidConfigError, match=message):
        EngineConfig(kv_events_config=fields)


def test_kv_events_are_off_unless_enabled() -> None:
    given = {"enable_kv_cache_events": True}
    for config, expected in (
        (EngineConfig(), (False, None)),
        (EngineConfig(kv_events_config={}), (False, False)),
        (EngineConfig(kv_events_config=given), (True, True)),
        (EngineConfig(kv_events_config={**given, "publisher": "null"}), (True, False)),
    ):
        kv_events = config.kv_events_config
        publishes = None if kv_events is None else kv_events.publishes
        assert (config.enable_kv_cache_events, publishes) == expected
    with pytest.raises(
        InvalidConfigError, match=r"kv_events_config=3: must be a dictionary, a KVEventsConfig, or None"
    ):
        EngineConfig(kv_events_config=3)
    with pytest.raises(
        InvalidConfigError, match=r"enable_kv_cache_events=True: must be False with enable_prefix_caching"
    ):
        EngineConfig(kv_events_config=given, enable_prefix_caching=False)


def test_unknown_argument() -> None:
    with pytest.raises(InvalidConfigError, match=r"^LLM: unknown key 'max_modell_len'; did you mean max_model_len"):
        EngineConfig.from_kwargs(max_modell_len=5)
    with pytest.raises(InvalidConfigError, match="did you mean tensor_parallel_size"):
        EngineConfig.from_kwargs(tensor_paralel_size=1)


def test_paths_may_be_paths(tmp_path: Path) -> None:
    config = EngineConfig(model=tmp_path, tokenizer=tmp_path)  # type: ignore[arg-type]
    assert config.target == config.tokenizer == str(tmp_path)


def test_max_model_len_against_the_model() -> None:
    assert resolve_max_model_len(EngineConfig(), 2048) == 2048
    assert resolve_max_model_len(EngineConfig(max_model_len=100), 2048) == 100
    with pytest.raises(InvalidConfigError, match=r"^max_model_len=2049: must be at most 2048"):
        resolve_max_model_len(EngineConfig(max_model_len=2049), 2048)


def test_a_torch_dtype_counts_by_its_name() -> None:
    class Dtype(SimpleNamespace):
        def __str__(self) -> str:
            return "torch.float32"

    assert EngineConfig(dtype=Dtype()).dtype == "float32"  # type: ignore[arg-type]
