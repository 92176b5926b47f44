"""Runs specrs under Ray Serve: `build_openai_app` makes an application whose replicas each have an engine and its
routes.

Starts no cluster and chooses no machines; Ray does that. Needs `ray[serve]`, which `specrs[ray]` installs.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

from ray import serve
from ray.serve.config import AutoscalingContext

from specrs.backends.table import backend_of
from specrs.config import EngineConfig
from specrs.errors import InvalidConfigError, check_int, invalid, unknown_key
from specrs.server.app import build_app
from specrs.server.run import ServerSettings, close_context, make_context, one_model

logger = logging.getLogger("specrs")

DEFAULT_TARGET = 64
"""Default number of running and waiting requests per replica that autoscaling aims at."""
MAX_ONGOING_REQUESTS = 1024
"""Maximum number of requests that Ray sends to a replica at once. The engine's own queue batches them."""
DEPLOYMENT = "specrs"
_ARGUMENTS = frozenset(
    {"engine", "server", "num_replicas", "autoscaling_config", "ray_actor_options", "max_ongoing_requests"}
)

_RAYS = frozenset({"host", "port", "root_path", "tls", "shutdown_timeout", "access_log", "log_stats_interval"})
"""Fields of `ServerSettings` about how a process listens, ends and logs. Under Ray they may not be set, because Ray
decides these things."""


class Replica:
    """One engine, and its ASGI application. Ray makes an actor of it."""

    def __init__(self, engine: Mapping[str, Any], server: Mapping[str, Any]) -> None:
        """Load the weights. `engine`: arguments of `LLM`. `server`: fields of `ServerSettings` that Ray does not set
        itself."""
        self._context = make_context(engine, ServerSettings(**server))

    def __serve_build_asgi_app__(self) -> Any:
        """Return the ASGI application that Ray sends requests to."""
        return build_app(one_model(self._context), self._context.shared)

    def check_health(self) -> None:
        """Raise the error that broke the engine, if it is broken. Ray then replaces the replica."""
        if self._context.llm.error is not None:
            raise self._context.llm.error

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the numbers of running and waiting requests, which `QueueLengthPolicy` reads, and the used share of
        the KV cache."""
        stats = await self._context.llm.stats()
        return {
            "num_requests_running": float(stats.num_running),
            "num_requests_waiting": float(stats.num_waiting),
            "kv_cache_usage_perc": stats.kv_cache_usage,
        }

    def __del__(self) -> None:
        if hasattr(self, "_context"):
            close_context(self._context)
            self._context.shared.close()


class QueueLengthPolicy:
    """Autoscaling policy of Ray Serve. It chooses the number of replicas so that each has `target` requests: those that
    run or wait in an engine, and those that no replica has taken yet."""

    def __init__(self, target: float = DEFAULT_TARGET) -> None:
        """Set the target. `target`: number of requests per replica, above 0."""
        self.target = target

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        """Return the wanted number of replicas, within Ray's bounds, and an empty state."""
        figures = context.aggregated_metrics or {}
        engines = sum(
            value
            for name in ("num_requests_running", "num_requests_waiting")
            for value in figures.get(name, {}).values()
        )
        wanted = math.ceil((engines + (context.total_queued_requests or 0.0)) / self.target)
        least, most = context.capacity_adjusted_min_replicas, context.capacity_adjusted_max_replicas
        return max(least, min(most, wanted)), {}


def build_openai_app(args: Mapping[str, Any]) -> serve.Application:
    """Return an application with OpenAI's routes and the others of `specrs serve`, for `serve.run` or a Serve config
    file.

    `args`:
        engine: arguments of `LLM`, such as `model`, `speculative_config` and `tensor_parallel_size`.
        server: fields of `ServerSettings`, such as `served_model_names` and `api_keys`, except those about how a
            process listens, ends and logs.
        num_replicas: number of engines, 1 by default; not with `autoscaling_config`.
        autoscaling_config: Ray Serve's, such as `{"min_replicas": 1, "max_replicas": 8}`. Unless it names a `policy`,
            `QueueLengthPolicy` aims at its `target_ongoing_requests` (64) over the engines' own queues.
        ray_actor_options: resources of a replica; by default a CPU, and a GPU for each rank if `device` is a GPU.
        max_ongoing_requests: maximum number of requests that a replica gets at once, 1024 by default.

    Raises:
        InvalidConfigError: an argument is unknown or wrong. Arguments of the engine that depend on the checkpoint are
            checked later.
    """
    for name in args:
        if name not in _ARGUMENTS:
            raise unknown_key(InvalidConfigError, "build_openai_app", name, _ARGUMENTS)
    engine, server = dict(args.get("engine") or {}), dict(args.get("server") or {})
    config = EngineConfig.from_kwargs(**engine)
    _check_server(server)
    options: dict[str, Any] = {
        "name": DEPLOYMENT,
        "ray_actor_options": args.get("ray_actor_options") or _actor_options(config, engine),
        "max_ongoing_requests": check_int(
            InvalidConfigError,
            "max_ongoing_requests",
            args.get("max_ongoing_requests", MAX_ONGOING_REQUESTS),
            1,
            2**31 - 1,
        ),
    }
    autoscaling = args.get("autoscaling_config")
    if autoscaling is None:
        replicas = args.get("num_replicas", 1)
        options["num_replicas"] = check_int(InvalidConfigError, "num_replicas", replicas, 1, 2**31 - 1)
    elif "num_replicas" in args:
        raise invalid(
            InvalidConfigError, "num_replicas", args["num_replicas"], "must be left out with autoscaling_config"
        )
    else:
        options["autoscaling_config"] = _autoscaling(autoscaling)
    deployment = serve.deployment(**options)(serve.ingress()(Replica))
    return deployment.bind(engine, server)


def _check_server(given: Mapping[str, Any]) -> None:
    known = set(ServerSettings.__dataclass_fields__) - _RAYS
    for name in given:
        if name not in known:
            raise unknown_key(InvalidConfigError, "server", name, known)


def _actor_options(config: EngineConfig, engine: Mapping[str, Any]) -> dict[str, Any]:
    # Where the device is left open, a replica is given no GPU, so that it runs on any node.
    named = config.device != "auto"
    gpus = (engine.get("tensor_parallel_size") or 1) * backend_of(config.device).gpus_per_rank if named else 0
    return {"num_cpus": 1, "num_gpus": gpus}


def _autoscaling(given: Mapping[str, Any]) -> dict[str, Any]:
    options = {"target_ongoing_requests": DEFAULT_TARGET, **given}
    if "policy" not in options:
        options["policy"] = {
            "policy_function": f"{__name__}:{QueueLengthPolicy.__name__}",
            "policy_kwargs": {"target": options["target_ongoing_requests"]},
        }
    return options
