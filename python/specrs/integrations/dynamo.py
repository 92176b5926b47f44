"""specrs as a worker of NVIDIA Dynamo: token ids in, token ids out. Knows no templates and no text; the frontend does.

    python -m specrs.integrations.dynamo --engine '{"model": "FOLDER"}' --served-model-name NAME

Needs `ai-dynamo` and `ai-dynamo-runtime` 1.6. Dynamo's own settings are its environment variables.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import AsyncIterator, Mapping
from typing import Any

from dynamo.common.backend.engine import EngineConfig, LLMEngine, LlmRegistration
from dynamo.common.backend.run import run
from dynamo.common.backend.worker import WorkerConfig
from dynamo.llm.exceptions import InvalidArgument

from specrs.async_llm import AsyncLLM, OutputStream
from specrs.errors import InvalidRequestError, invalid_config, invalid_request
from specrs.sampling import RequestOutputKind, SamplingParams

SAMPLING = frozenset(
    {"temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty", "repetition_penalty"}
)
"""Fields of Dynamo's `sampling_options` that `SamplingParams` has under the same name."""
STOPS = frozenset({"max_tokens", "min_tokens", "ignore_eos"})
"""Fields of Dynamo's `stop_conditions` that `SamplingParams` has under the same name."""
_WITHOUT_EFFECT: Mapping[str, tuple[object, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "use_beam_search": (False,),
    "length_penalty": (1.0,),
    "include_stop_str_in_output": (False,),
}


class Worker(LLMEngine):
    """A specrs engine as a worker of NVIDIA Dynamo, whose frontend sends it requests."""

    def __init__(self, settings: Mapping[str, Any], name: str) -> None:
        """Store the settings; nothing is loaded yet. `settings` are arguments of `LLM`; `name` is the model name in
        requests."""
        self._settings = {**settings, "skip_tokenizer_init": True}
        self._name = name
        self._llm: AsyncLLM | None = None
        self._streams: dict[str, OutputStream] = {}

    @classmethod
    async def from_args(cls, argv: list[str] | None = None) -> tuple[Worker, WorkerConfig]:
        """Build a worker and Dynamo's configuration of it from command line arguments. With None, reads the process's
        own arguments."""
        parser = argparse.ArgumentParser(description="A worker of NVIDIA Dynamo.")
        parser.add_argument("--engine", default="{}", metavar="JSON", help="arguments of specrs.LLM")
        parser.add_argument("--served-model-name", help="what requests call the model; default: its folder or hub id")
        parser.add_argument("--namespace", default="dynamo")
        parser.add_argument("--component", default="specrs")
        parser.add_argument("--endpoint", default="generate")
        given = parser.parse_args(argv)
        settings = json.loads(given.engine)
        model = settings.get("model")
        if not isinstance(model, str):
            raise invalid_config("--engine", given.engine, "must be a JSON object with a model")
        name = given.served_model_name or model
        config = WorkerConfig(
            namespace=given.namespace,
            component=given.component,
            endpoint=given.endpoint,
            model_name=model,
            served_model_name=name,
            discovery_backend=os.environ.get("DYN_DISCOVERY_BACKEND", "etcd"),
            request_plane=os.environ.get("DYN_REQUEST_PLANE", "tcp"),
            enable_kv_routing=False,
        )
        return cls(settings, name), config

    async def start(self, worker_id: int) -> EngineConfig:
        """Load the engine. Return what Dynamo's router has to know of it. Raises `InvalidConfigError` or one of its
        subclasses if a setting is wrong or a checkpoint cannot be loaded."""
        self._llm = AsyncLLM(**self._settings)
        config, stats = self._llm.config, await self._llm.stats()
        return EngineConfig(
            model=config.target,
            served_model_name=self._name,
            llm=LlmRegistration(
                context_length=self._llm.limits.max_model_len,
                kv_cache_block_size=config.block_size,
                total_kv_blocks=stats.num_blocks,
                max_num_seqs=config.most_seqs,
                max_num_batched_tokens=config.batched_tokens,
            ),
        )

    async def generate(self, request: Mapping[str, Any], context: Any) -> AsyncIterator[dict[str, Any]]:
        """Run one request. Yields a chunk each time tokens arrive; the last one has the finish reason and usage.

        Raises Dynamo's `InvalidArgument` for a rejected request, so that Dynamo does not take the worker for broken. If
        the engine ends the request with an error, that error is raised.
        """
        assert self._llm is not None
        prompt, sent = list(request["token_ids"]), 0
        try:
            params = sampling_params(request, self._llm.limits.max_model_len - len(prompt))
            submitted = await self._llm.submit([{"prompt_token_ids": prompt}], params)
        except InvalidRequestError as fault:
            raise InvalidArgument(str(fault)) from None
        async with submitted as stream:
            self._streams[context.id()] = stream
            try:
                while news := await stream.get():
                    ((_, output),) = news
                    if output.error is not None:
                        raise output.error
                    (completion,) = output.outputs
                    chunk: dict[str, Any] = {"token_ids": completion.token_ids, "index": 0}
                    sent += len(completion.token_ids)
                    if output.finished:
                        reason = completion.finish_reason
                        chunk["finish_reason"] = "cancelled" if reason == "abort" else reason
                        chunk["completion_usage"] = {
                            "prompt_tokens": len(prompt),
                            "completion_tokens": sent,
                            "total_tokens": len(prompt) + sent,
                        }
                    yield chunk
            finally:
                self._streams.pop(context.id(), None)

    async def abort(self, context: Any) -> None:
        """End the request of `context`, because its client has disconnected."""
        stream = self._streams.get(context.id())
        if stream is not None:
            stream.close()

    async def cleanup(self) -> None:
        """Shut the engine down. May be called again."""
        if self._llm is not None:
            self._llm.shutdown()


def sampling_params(request: Mapping[str, Any], room: int) -> SamplingParams:
    """Convert a request of Dynamo's preprocessor to `SamplingParams`. `room` is the maximum number of tokens that still
    fit.

    Raises `InvalidRequestError` for an option that is not implemented, unless its value has no effect.
    """
    fields: dict[str, Any] = {"max_tokens": room, "detokenize": False, "output_kind": RequestOutputKind.DELTA}
    sampling, stops = request.get("sampling_options") or {}, request.get("stop_conditions") or {}
    for name, value in sampling.items():
        if name in SAMPLING and value is not None:
            fields[name] = value
        elif value is not None and value not in _WITHOUT_EFFECT.get(name, ()):
            raise invalid_request(f"sampling_options.{name}", value, "is not implemented")
    for name in STOPS:
        if stops.get(name) is not None:
            fields[name] = stops[name]
    # strings to stop at are the frontend's, which has the text
    ids = [*(stops.get("stop_token_ids") or ()), *(stops.get("stop_token_ids_hidden") or ())]
    if ids and not fields.get("ignore_eos"):
        fields["stop_token_ids"] = sorted(set(ids))
    output = request.get("output_options") or {}
    for name in ("logprobs", "prompt_logprobs"):
        if output.get(name) is not None:
            raise invalid_request(f"output_options.{name}", output[name], "is not implemented")
    return SamplingParams(**fields)


if __name__ == "__main__":
    run(Worker)
