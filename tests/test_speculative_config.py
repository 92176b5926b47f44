"""SpeculativeConfig: fields of each method, and errors for other values."""

import inspect
from typing import Any

import pytest
from specrs import pair
from specrs.backends.table import BACKENDS
from specrs.config import EngineConfig, resolve_draft_max_model_len
from specrs.core import SuffixCache
from specrs.drafters import methods_of
from specrs.errors import InvalidConfigError
from specrs.options import Integer, options_of, show
from specrs.speculative_config import METHODS, SpeculativeConfig, for_repeats


def speculative(**fields: Any) -> SpeculativeConfig:
    return SpeculativeConfig.from_mapping({"model": "draft", "num_speculative_tokens": 5} | fields)


def synthetic(rates: object, method: str = "synthetic") -> SpeculativeConfig:
    return SpeculativeConfig(
        num_speculative_tokens=2,
        rejection_sample_method=method,
        synthetic_acceptance_rates=rates,  # type: ignore[arg-type]
    )


def test_synthetic_acceptance() -> None:
    assert synthetic([0.75, 0.5]).synthetic_acceptance_rates == (0.75, 0.5)
    assert EngineConfig(speculative_config=synthetic((1, 0))).synthetic
    assert not EngineConfig(speculative_config=SpeculativeConfig(num_speculative_tokens=2)).synthetic
    for rates, message in (
        (None, "must be a list of num_speculative_tokens=2 rates"),
        ([0.5], "must be a list of num_speculative_tokens=2 rates"),
        ([0.5, 1.5], "from 0 to 1"),
        ([0.5, float("nan")], "from 0 to 1"),
        ([0.5, 0.6], "must not rise"),
    ):
        with pytest.raises(InvalidConfigError, match=f"^speculative_config.synthetic_acceptance_rates.*{message}"):
            synthetic(rates)
    with pytest.raises(InvalidConfigError, match="allowed only with rejection_sample_method='synthetic'"):
        synthetic([0.5, 0.4], "rejection")


def test_auto_has_a_most() -> None:
    for given, most in ((None, 16), (1, 1), (16, 16)):
        auto = speculative(num_speculative_tokens="auto", max_num_speculative_tokens=given)
        assert (auto.num_speculative_tokens, auto.most_speculative_tokens) == ("auto", most)
        config = EngineConfig(model="target", speculative_config=auto)
        assert config.plans_speculation
        assert config.num_speculative_tokens == most
    fixed = EngineConfig(model="target", speculative_config=speculative(num_speculative_tokens=3))
    assert not fixed.plans_speculation
    rates = speculative(
        num_speculative_tokens="auto",
        max_num_speculative_tokens=2,
        rejection_sample_method="synthetic",
        synthetic_acceptance_rates=[0.7, 0.5],
    )
    assert rates.synthetic_acceptance_rates == (0.7, 0.5)
    # Without a maximum it is the number of rates.
    three = {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": [0.7, 0.5, 0.5]}
    assert speculative(num_speculative_tokens="auto", **three).most_speculative_tokens == 3
    with pytest.raises(InvalidConfigError, match=r"synthetic_acceptance_rates=.*must have at most 16 rates$"):
        speculative(num_speculative_tokens="auto", **(three | {"synthetic_acceptance_rates": [0.5] * 17}))


def test_the_device_has_the_default_of_the_maximum() -> None:
    auto = speculative(num_speculative_tokens="auto")
    assert BACKENDS["cpu"].max_speculative_tokens == auto.most_speculative_tokens == 16
    on_gpu = auto.on_device(BACKENDS["cuda"].max_speculative_tokens)
    assert (on_gpu.num_speculative_tokens, on_gpu.most_speculative_tokens) == ("auto", 7)
    rates = {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": [0.5] * 9}
    for given in (
        speculative(num_speculative_tokens=9),
        speculative(num_speculative_tokens="auto", max_num_speculative_tokens=9),
        speculative(num_speculative_tokens="auto", **rates),
    ):
        assert given.on_device(7) == given, "what is given stays"


def test_speculative_config_accepts_what_is_listed() -> None:
    config = speculative(
        method="draft_model",
        max_model_len=100,
        draft_tensor_parallel_size=1,
        revision="main",
        rejection_sample_method="standard",
        disable_padded_drafter_batch=True,
    )
    assert (config.model, config.num_speculative_tokens, config.max_model_len) == ("draft", 5, 100)
    assert config.rejection_sample_method == "rejection" == speculative().rejection_sample_method
    for k in (0, 16):
        assert speculative(num_speculative_tokens=k).num_speculative_tokens == k


def test_the_coupled_rule() -> None:
    assert speculative(rejection_sample_method="coupled").rejection_sample_method == "coupled"
    assert speculative(rejection_sample_method="rejection").rejection_sample_method == "rejection"


def test_dashes_equal_underscores() -> None:
    dashed = {"model": "draft", "num-speculative-tokens": 5, "max-model-len": 9, "draft-tensor-parallel-size": 1}
    assert SpeculativeConfig.from_mapping(dashed) == speculative(max_model_len=9)
    with pytest.raises(InvalidConfigError, match="max_model_len is given twice"):
        speculative(**{"max-model-len": 9, "max_model_len": 9})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"num_speculative_tokens": -1},
            r"^speculative_config.num_speculative_tokens=-1: must be an integer from 0 to 16",
        ),
        (
            {"num_speculative_tokens": 17},
            r"^speculative_config.num_speculative_tokens=17: must be an integer from 0 to 16",
        ),
        ({"num_speculative_tokens": None}, r"^speculative_config.num_speculative_tokens=None: "),
        ({"num_speculative_tokens": "best"}, r"^speculative_config.num_speculative_tokens='best': .*or 'auto'$"),
        (
            {"max_num_speculative_tokens": 3},
            r"^speculative_config.max_num_speculative_tokens=3: allowed only with num_speculative_tokens='auto'",
        ),
        (
            {"num_speculative_tokens": "auto", "max_num_speculative_tokens": 0},
            r"^speculative_config.max_num_speculative_tokens=0: must be an integer from 1 to 16, or None",
        ),
        ({"model": ""}, r"^speculative_config.model='': "),
        ({"max_model_len": 1}, r"^speculative_config.max_model_len=1: must be an integer of at least 2"),
        (
            {"method": "eagle"},
            r"^speculative_config.method='eagle': not implemented; methods are draft_model, eagle3, mtp, ngram, "
            r"suffix, prediction, grammar, or ",
        ),
        (
            {"method": "eagle3,draft_model"},
            r"^speculative_config.method='eagle3,draft_model': names two drafters with a model of their own; methods",
        ),
        (
            {"method": "sufix"},
            r"^speculative_config.method='sufix': not implemented; methods are .*; did you mean suffix\?$",
        ),
        ({"method": "ngram,sufix"}, r"did you mean suffix\?$"),
        ({"rejection_sample_method": "standart"}, r"did you mean standard\?$"),
        ({"method": "ngram,ngram"}, r"^speculative_config.method='ngram,ngram': names a method twice; methods are "),
        ({"method": "suffix,"}, r"^speculative_config.method='suffix,': not implemented; methods are "),
        ({"method": 3}, r"^speculative_config.method=3: not implemented; methods are "),
        (
            {"method": ["ngram", "suffix"]},
            r"^speculative_config.method=\['ngram', 'suffix'\]: not implemented; methods are ",
        ),
        (
            {"suffix_decoding_max_tree_depth": 9},
            r"max_tree_depth=9: not allowed with method='draft_model'; allowed with '",
        ),
        (
            {"method": "suffix,draft_model", "suffix_decoding_max_tree_depth": 0},
            r"^speculative_config.suffix_decoding_max_tree_depth=0: must be an integer from 2 to 256, or None$",
        ),
        (
            {"method": "suffix,draft_model", "suffix_decoding_max_cached_requests": -1},
            r"suffix_decoding_max_cached_requests=-1: must be an integer of at least 0, or None$",
        ),
        (
            {"method": "suffix,draft_model", "suffix_decoding_max_spec_factor": 0},
            r"suffix_decoding_max_spec_factor=0: must be a finite number greater than 0, or None$",
        ),
        (
            {"method": "suffix,draft_model", "suffix_decoding_min_token_prob": 1.5},
            r"suffix_decoding_min_token_prob=1.5: must be a finite number from 0 to 1, or None$",
        ),
        (
            {"method": "ngram"},
            r"^speculative_config.model='draft': not allowed with method='ngram'; allowed with",
        ),
        (
            {"prompt_lookup_min": 2},
            r"^speculative_config.prompt_lookup_min=2: not allowed with method='draft_model'; allowed with '",
        ),
        (
            {"prompt_lookup_max": 2},
            r"^speculative_config.prompt_lookup_max=2: not allowed with method='draft_model'; allowed with '",
        ),
        ({"draft_tensor_parallel_size": 2}, r"^speculative_config.draft_tensor_parallel_size=2: must be 1$"),
        (
            {"rejection_sample_method": "typical"},
            r"rejection_sample_method='typical': must be one of rejection, standard, coupled, synthetic$",
        ),
        ({"rejection_sample_method": None}, r"rejection_sample_method=None: must be one of rejection, standard"),
        ({"disable_padded_drafter_batch": 1}, r"disable_padded_drafter_batch=1: must be True or False"),
        ({"revision": 3}, r"^speculative_config.revision=3: "),
        ({"tensor_parallel_size": 1}, r"unknown key 'tensor_parallel_size'.*did you mean draft_tensor_parallel_size"),
        ({"nonsense": 1}, r"unknown key 'nonsense'; known: aux_hidden_state_layer_ids, disable_.*, synthetic_acc.*$"),
        ({3: 1}, r"unknown key 3; known: "),
    ],
)
def test_speculative_config_refuses(fields: dict[Any, Any], message: str) -> None:
    with pytest.raises(InvalidConfigError, match=message):
        EngineConfig(
            model="target",
            speculative_config={"model": "draft", "num_speculative_tokens": 5} | fields,  # type: ignore[arg-type]
        )


@pytest.mark.parametrize(
    ("fields", "sizes"),
    [
        ({}, (5, 5)),
        ({"prompt_lookup_min": 2}, (2, 2)),
        ({"prompt_lookup_max": 7}, (7, 7)),
        ({"prompt_lookup_min": 2, "prompt_lookup_max": 4}, (2, 4)),
    ],
)
def test_ngram_sizes_default_as_in_vllm(fields: dict[str, int], sizes: tuple[int, int]) -> None:
    config = EngineConfig(
        model="target",
        speculative_config=SpeculativeConfig(method="ngram", num_speculative_tokens="auto", **fields),
    )
    assert config.speculative_config is not None
    assert config.speculative_config.prompt_lookup == sizes
    assert (config.draft, config.num_speculative_tokens, config.plans_speculation) == (None, 16, True)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"revision": "main"},
            r"^speculative_config.revision='main': not allowed with method='ngram'; allowed with",
        ),
        (
            {"max_model_len": 9},
            r"^speculative_config.max_model_len=9: not allowed with method='ngram'; allowed with",
        ),
        ({"prompt_lookup_min": 0}, r"^speculative_config.prompt_lookup_min=0: must be an integer from 1 to 1024, or"),
        ({"prompt_lookup_max": 1025}, r"^speculative_config.prompt_lookup_max=1025: must be an integer from 1 to 1024"),
        (
            {"prompt_lookup_min": 4, "prompt_lookup_max": 3},
            r"^speculative_config.prompt_lookup_min=4: must be at most prompt_lookup_max=3$",
        ),
    ],
)
def test_ngram_refuses(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidConfigError, match=message):
        SpeculativeConfig(method="ngram", num_speculative_tokens=3, **fields)


def test_ngram_runs_one_step_at_a_time() -> None:
    speculative = {"method": "ngram", "num_speculative_tokens": 3}
    assert EngineConfig(model="target", speculative_config=speculative, max_steps_in_flight=1).max_steps_in_flight == 1  # type: ignore[arg-type]
    with pytest.raises(InvalidConfigError, match=r"^max_steps_in_flight=2: must be 1 or None with .*method='ngram'"):
        EngineConfig(model="target", speculative_config=speculative, max_steps_in_flight=2)  # type: ignore[arg-type]


@pytest.mark.parametrize("method", METHODS)
def test_the_engine_chooses_the_number_of_drafts_by_default(method: str) -> None:
    for made in (SpeculativeConfig(method=method), SpeculativeConfig.from_mapping({"method": method})):
        assert (made.num_speculative_tokens, made.most_speculative_tokens) == ("auto", 16)


def test_draft_may_be_left_out_for_the_bundled_target_only() -> None:
    wanted = SpeculativeConfig(num_speculative_tokens=3)
    for model in (None, str(pair.TARGET), pair.TARGET):
        config = EngineConfig(model=model, speculative_config=wanted)  # type: ignore[arg-type]
        assert (config.target, config.draft) == (str(pair.TARGET), str(pair.DRAFT))
    message = (
        r"^speculative_config\.model=None: must be a folder or hub id of a draft for model='other'; name one, or set"
    )
    with pytest.raises(InvalidConfigError, match=message):
        EngineConfig(model="other", speculative_config=wanted)
    assert EngineConfig(model="other", speculative_config=speculative()).draft == "draft"


def test_max_model_len_of_the_draft() -> None:
    assert resolve_draft_max_model_len(EngineConfig(), 512) == 512
    config = EngineConfig(speculative_config=SpeculativeConfig(num_speculative_tokens=1, max_model_len=64))
    assert resolve_draft_max_model_len(config, 512) == 64
    with pytest.raises(InvalidConfigError, match=r"^speculative_config.max_model_len=64: must be at most 32"):
        resolve_draft_max_model_len(config, 32)


def test_the_defaults_of_suffix_decoding_are_those_of_the_core() -> None:
    declared = options_of(SpeculativeConfig)
    parameters = inspect.signature(SuffixCache).parameters
    assert {f"suffix_decoding_{name}" for name in parameters} == {
        name for name in declared if methods_of(name) == ("suffix",)
    }
    for name, parameter in parameters.items():
        shown = show(parameter.default, Integer(0, units=True))
        assert declared[f"suffix_decoding_{name}"].default_text == shown


def test_drafters_for_prompts_that_come_again() -> None:
    """Check the recommended drafters for repeated prompts: suffix decoding then keeps no outputs of other requests,
    unless the user sets a limit."""
    key = "suffix_decoding_max_cached_requests"
    for method in ("suffix", "ngram, suffix", "suffix,draft_model"):
        assert for_repeats({"method": method, "model": "m"}) == {"method": method, "model": "m", key: 0}
    dashes = key.replace("_", "-")
    for config in ({}, {"method": "ngram"}, {"method": "suffix", key: 5}, {"method": "suffix", dashes: 5}):
        assert for_repeats(config) == config
