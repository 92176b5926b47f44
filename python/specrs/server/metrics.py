"""Prometheus metrics under vLLM's names. Token counts come from the engine; times are measured when outputs arrive."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from specrs.async_llm import AsyncLLM
from specrs.config import EngineConfig
from specrs.errors import EngineDeadError
from specrs.outputs import DiskCacheStats, EngineStats, RequestOutput, StateCacheStats
from specrs.server.models import Model
from specrs.server.response_store import ResponseStore

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_PROCESS = ProcessCollector(registry=None)  # in no registry
_FIRST_TOKEN_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_TOKEN_BUCKETS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_REQUEST_BUCKETS = (
    *(0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)


class Metrics:
    """All metrics of one model, in a registry of their own. They stay when the model's engine ends."""

    def __init__(self, llm: AsyncLLM | None, model_name: str, responses: ResponseStore | None = None) -> None:
        """Create the metrics, with those of `responses` if it is given. Each has the label `model_name`, and the label
        `engine`, which is always 0. `llm` None: the model is not loaded yet."""
        self._registry = CollectorRegistry()
        self._labels = {"model_name": model_name, "engine": "0"}
        self._engine = _EngineCollector(self._labels)
        self._registry.register(self._engine)
        if responses is not None:
            self._registry.register(_ResponsesCollector(responses, self._labels))
        self._llm: AsyncLLM | None = None
        if llm is not None:
            self.attach(llm)
        names, values = tuple(self._labels), tuple(self._labels.values())

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"vllm:{name}", text, names, registry=self._registry, buckets=buckets).labels(*values)

        self.first_token = histogram(
            "time_to_first_token_seconds", "From a request's arrival to its first token.", _FIRST_TOKEN_BUCKETS
        )
        self.inter_token = histogram(
            "inter_token_latency_seconds",
            "Between two iterations that brought a completion tokens, however many they brought.",
            _TOKEN_BUCKETS,
        )
        self.latency = histogram(
            "e2e_request_latency_seconds", "From a request's arrival to its end.", _REQUEST_BUCKETS
        )
        self._success = Counter(
            "vllm:request_success",
            "Completions that ended, by their reason.",
            (*names, "finished_reason"),
            registry=self._registry,
        )
        for reason in ("stop", "length", "abort", "error"):
            self._success.labels(*values, reason)

    def request(self, num_prompts: int, completions: int) -> RequestRecorder:
        """Return an observer that records the times and ends of a request with `completions` for each prompt."""
        return RequestRecorder(self, num_prompts * completions)

    def count_ends(self, reason: str, completions: int) -> None:
        """Count completions that ended with the finish reason `reason`."""
        self._success.labels(*self._labels.values(), reason).inc(completions)

    def attach(self, llm: AsyncLLM) -> None:
        """Report the statistics of the engine of `llm` from now on. Its counters start anew."""
        self._llm = llm
        self._engine.config, self._engine.num_drafts = llm.config, llm.limits.num_speculative_tokens
        self._engine.stats = EngineStats()

    def detach(self, stats: EngineStats | None) -> None:
        """Forget the engine, which ends. `stats`: its last statistics, if they are known; its counters stay."""
        self._llm = None
        last = self._engine.stats if stats is None else stats
        self._engine.stats = replace(last, num_running=0, num_waiting=0, num_blocks=0, num_free_blocks=0)

    def count_loads(self, model: Model[Any]) -> None:
        """Report, too, whether `model` is loaded, and how often it was loaded."""
        self._registry.register(_ModelCollector(model, self._labels))

    async def render(self) -> bytes:
        """Return these metrics as text. If the engine is broken, they have its last known values."""
        return await render([self])

    async def refresh(self) -> None:
        """Read the engine's statistics. If it is broken, the last known values stay."""
        llm = self._llm
        if llm is not None:
            with contextlib.suppress(EngineDeadError):
                stats = await llm.stats()
                if self._llm is llm:  # it may have ended while its statistics were on their way
                    self._engine.stats = stats

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of this model."""
        yield from self._registry.collect()


async def render(models: Sequence[Metrics]) -> bytes:
    """Return the metrics of all `models`, and those of the process, as one text."""
    for one in models:
        await one.refresh()
    return generate_latest(_Together(models))


class _Together:
    """The metrics of several models, each name once, as the text format demands."""

    def __init__(self, models: Sequence[Metrics]) -> None:
        self._models = models

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for model in self._models:
            for family in model.collect():
                if family.name in families:
                    families[family.name].samples += family.samples
                else:
                    families[family.name] = family
        yield from families.values()
        yield from _PROCESS.collect()


class RequestRecorder:
    """Records the times of one request, and the end of each of its completions exactly once."""

    def __init__(self, metrics: Metrics, completions: int) -> None:
        self._metrics = metrics
        self._running = completions
        self._last: dict[tuple[int, int], float] = {}  # when tokens last came, by prompt and completion

    def observe(self, index: int, output: RequestOutput) -> None:
        """Record an output of prompt `index`. Must be called with every output; they must be
        `RequestOutputKind.DELTA`."""
        metrics, now = self._metrics, time.monotonic()
        arrival = output.metrics.arrival_time
        for completion in output.outputs:
            if completion.token_ids:
                key = index, completion.index
                if key in self._last:
                    metrics.inter_token.observe(now - self._last[key])
                elif arrival is not None:
                    metrics.first_token.observe(now - arrival)
                self._last[key] = now
        if output.finished:
            self._running -= len(output.outputs)
            for completion in output.outputs:
                metrics.count_ends(completion.finish_reason or "error", 1)
            if arrival is not None:
                metrics.latency.observe(now - arrival)

    def close(self) -> None:
        """Count completions that have not ended, because their client disconnected, as aborted. May be called
        twice."""
        self._metrics.count_ends("abort", self._running)
        self._running = 0


class _EngineCollector(Collector):
    """Prometheus collector of the engine's statistics, as of the last scrape."""

    def __init__(self, labels: dict[str, str]) -> None:
        self.stats = EngineStats()
        self.config: EngineConfig | None = None
        """Configuration of the engine; None before the model is loaded for the first time."""
        self.num_drafts = 0
        """Maximum number of draft tokens per iteration."""
        self._labels = labels

    def collect(self) -> Iterator[Metric]:
        stats, config = self.stats, self.config
        if config is None:
            return
        names, values = tuple(self._labels), tuple(self._labels.values())

        def counter(name: str, text: str, value: float, of: str = "vllm") -> Metric:
            family = CounterMetricFamily(f"{of}:{name}", text, labels=names)
            family.add_metric(values, value)
            return family

        def gauge(name: str, text: str, value: float, of: str = "vllm") -> Metric:
            family = GaugeMetricFamily(f"{of}:{name}", text, labels=names)
            family.add_metric(values, value)
            return family

        yield gauge("num_requests_running", "Requests that run.", stats.num_running)
        yield gauge("num_requests_waiting", "Requests that wait to run.", stats.num_waiting)
        yield gauge("kv_cache_usage_perc", "Share of KV blocks that requests hold; 1 is all.", stats.kv_cache_usage)
        yield counter("prompt_tokens", "Tokens of prompts.", stats.prompt_tokens)
        yield counter("generation_tokens", "Tokens generated.", stats.generation_tokens)
        yield counter("num_preemptions", "Requests that lost their blocks.", stats.num_preemptions)
        yield counter("prefix_cache_queries", "Tokens looked up in the prefix cache.", stats.prompt_tokens)
        yield counter("prefix_cache_hits", "Tokens found in the prefix cache.", stats.num_cached_tokens)
        if config.kv_cache_path is not None:
            disk = stats.disk_cache or DiskCacheStats()
            for name, text, value in (
                ("queries", "Prompt tokens looked up in the prefix cache on disk.", disk.queried_tokens),
                ("hits", "Prompt tokens read from the prefix cache on disk.", disk.loaded_tokens),
                ("snapshots", "Snapshots of states read from the prefix cache on disk.", disk.loaded_snapshots),
                ("read_bytes", "Bytes read from the prefix cache on disk.", disk.read_bytes),
                ("written_bytes", "Bytes written to the prefix cache on disk.", disk.written_bytes),
                ("errors", "Records and files on disk that could not be read or written.", disk.errors),
            ):
                yield counter(f"disk_cache_{name}", text, value, of="specrs")
            text = "Whether this process writes to the prefix cache on disk: 1, or 0 while another one does."
            yield gauge("disk_cache_is_writer", text, disk.is_writer, of="specrs")
        if config.state_cache_memory_bytes is not None:
            states = stats.state_cache or StateCacheStats()
            for name, text, count in (
                ("hits", "Requests that began with a snapshot of states.", states.hits),
                ("stored", "Snapshots of states written.", states.stored),
                ("evictions", "Snapshots of states that were evicted for others or with a KV block.", states.evictions),
            ):
                yield counter(f"state_cache_{name}", text, count, of="specrs")
            for name, text, count in (
                ("bytes", "Bytes of the snapshots of states that can be found.", states.num_bytes),
                ("capacity_bytes", "Bytes of snapshots of states that fit.", config.state_cache_memory_bytes),
            ):
                yield gauge(f"state_cache_{name}", text, count, of="specrs")
        if self.num_drafts:
            yield counter("spec_decode_num_drafts", "Iterations that drafted.", stats.drafts)
            yield counter("spec_decode_num_draft_tokens", "Tokens drafted.", stats.draft_tokens)
            yield counter("spec_decode_num_accepted_tokens", "Draft tokens accepted.", stats.accepted_tokens)
            per_position = CounterMetricFamily(
                "vllm:spec_decode_num_accepted_tokens_per_pos",
                "Drafts whose token at this position was accepted.",
                labels=(*names, "position"),
            )
            counts = stats.accepted_per_position or [0] * self.num_drafts
            for position, count in enumerate(counts):
                per_position.add_metric((*values, str(position)), count)
            yield per_position
            for name, text in (
                ("drafts", "Iterations that drafted, by drafter."),
                ("draft_tokens", "Tokens drafted, by drafter."),
                ("accepted_tokens", "Draft tokens accepted, by drafter."),
            ):
                family = CounterMetricFamily(f"specrs:spec_decode_num_{name}", text, labels=(*names, "drafter"))
                for drafter, figures in stats.drafters.items():
                    family.add_metric((*values, drafter), getattr(figures, name))
                yield family
            errors = CounterMetricFamily(
                "specrs:spec_decode_num_draft_errors", "Failures of a drafter, by drafter.", labels=(*names, "drafter")
            )
            for drafter, count in stats.draft_errors.items():
                errors.add_metric((*values, drafter), count)
            yield errors
        if config.enable_lora:
            loras = {
                "max_lora": str(config.max_loras),
                "running_lora_adapters": ",".join(stats.running_loras),
                "waiting_lora_adapters": ",".join(stats.waiting_loras),
            }
            text = "LoRA adapters of requests; the value is the time in seconds since 1970."
            lora_info = GaugeMetricFamily("vllm:lora_requests_info", text, labels=(*names, *loras))
            lora_info.add_metric((*values, *loras.values()), time.time())
            yield lora_info
        info = {
            "block_size": str(config.block_size),
            "num_gpu_blocks": str(stats.num_blocks),
            "enable_prefix_caching": str(config.enable_prefix_caching),
            "cache_dtype": config.kv_cache_dtype,
        }
        config_info = GaugeMetricFamily("vllm:cache_config_info", "How the KV cache is set up.", labels=(*names, *info))
        config_info.add_metric((*values, *info.values()), 1)
        yield config_info


class _ResponsesCollector(Collector):
    """Prometheus collector of the statistics of stored responses."""

    def __init__(self, store: ResponseStore, labels: dict[str, str]) -> None:
        self._store = store
        self._labels = labels

    def collect(self) -> Iterator[Metric]:
        store, names, values = self._store, tuple(self._labels), tuple(self._labels.values())
        store.expire()
        for name, text, value in (
            ("stored_responses", "Responses that are stored.", len(store)),
            ("stored_responses_bytes", "Bytes of memory that stored responses take.", store.num_bytes),
        ):
            gauge = GaugeMetricFamily(f"specrs:{name}", text, labels=names)
            gauge.add_metric(values, value)
            yield gauge
        evictions = CounterMetricFamily(
            "specrs:stored_responses_evictions",
            "Stored responses that were evicted, by the limit that evicted them: `bytes` or `age`.",
            labels=(*names, "limit"),
        )
        for limit, count in store.evictions.items():
            evictions.add_metric((*values, limit), count)
        yield evictions


class _ModelCollector(Collector):
    """Prometheus collector of how often a model was loaded, of a server with several models."""

    def __init__(self, model: Model[Any], labels: dict[str, str]) -> None:
        self._model = model
        self._labels = labels

    def collect(self) -> Iterator[Metric]:
        model, names, values = self._model, tuple(self._labels), tuple(self._labels.values())
        loaded = GaugeMetricFamily("specrs:model_loaded", "Whether the model is loaded: 1 or 0.", labels=names)
        loaded.add_metric(values, model.state == "loaded")
        yield loaded
        for name, text, count in (
            ("loads", "Loads of the model.", model.loads),
            ("load_failures", "Loads of the model that failed.", model.failures),
        ):
            counter = CounterMetricFamily(f"specrs:model_{name}", text, labels=names)
            counter.add_metric(values, count)
            yield counter
