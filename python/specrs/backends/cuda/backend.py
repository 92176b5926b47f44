"""The backend of NVIDIA GPUs, by torch and Triton. Imports them only when a GPU is used."""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING

from specrs.backends.blueprint import Blueprint, MergedPrefill
from specrs.backends.cuda.device import CUDA_DTYPES, KIND, check_fp8, gpu_of_rank, has_gpu, resolve_gpu
from specrs.backends.kv_memory import host_memory
from specrs.backends.model_source import ModelSource
from specrs.config import EngineConfig
from specrs.core import Scheduler
from specrs.drafters.assistant.reader import AssistantFiles
from specrs.drafters.eagle3.reader import HeadFiles
from specrs.drafters.mtp.reader import MtpFiles
from specrs.engine_options import BATCHED_TOKENS, BATCHED_TOKENS_OF_LARGE_GPUS
from specrs.errors import UnsupportedConfigError, invalid
from specrs.models.config import ModelConfig
from specrs.models.decoder_weights import DecoderFacts
from specrs.models.shards import check_gpu_parts
from specrs.parallel.connection import ExchangeError
from specrs.speculative_config import DEFAULT_MAX_SPECULATIVE_TOKENS_OF_GPUS

if TYPE_CHECKING:
    from specrs.backends.base import FindAdapter, SlotType
    from specrs.backends.cuda.runner import CudaRunner
    from specrs.drafters.assistant.torch_loader import TorchAssistant
    from specrs.drafters.eagle3.head import Eagle3Head
    from specrs.drafters.mtp.head import MtpHead
    from specrs.models.torch_decoder import TorchDecoder
    from specrs.parallel.ranks import Ranks
    from specrs.parallel.start import Meeting


LARGE_GPU_BYTES = 80 * 10**9
"""Bytes of a GPU's memory from which steps have `BATCHED_TOKENS_OF_LARGE_GPUS`."""


def batched_tokens_of(memory: float) -> int:
    """Return the default of `max_num_batched_tokens` on a GPU with `memory` bytes."""
    return BATCHED_TOKENS_OF_LARGE_GPUS if memory >= LARGE_GPU_BYTES else BATCHED_TOKENS


class CudaBackend:
    """GPUs, one per rank. `Backend` documents the members.

    In tests its runner also serves a CPU, where Triton's interpreter runs the kernels.
    """

    name = KIND
    dtypes = CUDA_DTYPES
    max_steps_in_flight = 2
    max_speculative_tokens = DEFAULT_MAX_SPECULATIVE_TOKENS_OF_GPUS
    gpus_per_rank = 1
    drafts_text = False
    adapts_experts = False

    def is_available(self) -> bool:
        return has_gpu()

    def resolve_device(self, device: str) -> str:
        return resolve_gpu(device)

    def device_of_rank(self, device: str, size: int, place: tuple[int, int]) -> str:
        return gpu_of_rank(device, size, place)

    def current(self, device: str) -> AbstractContextManager[None]:
        """Make `device` the calling thread's current CUDA device while the context lasts.

        Triton launches kernels on the current device, wherever their tensors are. torch's default stream, too, is that
        of the current device. A step needs no such context: its runner's stream makes its own device current.
        """
        import torch

        return torch.cuda.device(device)

    def free_memory(self, device: str, ranks: int = 1) -> int:
        import torch

        if torch.device(device).type != KIND:  # kernels are interpreted
            return host_memory() // ranks
        return int(torch.cuda.mem_get_info(device)[0])

    def check_config(self, config: EngineConfig, device: str, ranks: Ranks | None) -> None:
        from specrs.backends.cuda.fit import check_formats, check_models, check_weights_fit

        speculative = config.speculative_config
        if speculative is not None and speculative.quantization == "fp8" and device.startswith(KIND):
            check_fp8("speculative_config.quantization", device)

        if config.model_impl == "transformers":
            reason = f"not implemented on device={device!r}; allowed: 'auto' or 'specrs', or device='cpu'"
            raise invalid(UnsupportedConfigError, "model_impl", config.model_impl, reason)
        check_formats(config)
        check_models(config, device)
        check_weights_fit(config, device, ranks)

    def check_rank_parts(self, model: ModelConfig, field: str, size: int) -> None:
        check_gpu_parts(model, field, size)

    def load_model(self, source: ModelSource, device: str, ranks: Ranks | None) -> TorchDecoder:
        from specrs.backends.cuda.loader import load

        return load(source, device, ranks)

    def load_head(
        self, files: HeadFiles | MtpFiles | AssistantFiles, target: DecoderFacts, ranks: Ranks | None
    ) -> Eagle3Head | MtpHead | TorchAssistant:
        from specrs.backends.cuda.loader import load_head

        return load_head(files, target, ranks)

    def batched_tokens(self, device: str) -> int:
        import torch

        if torch.device(device).type != KIND:  # kernels are interpreted
            return BATCHED_TOKENS
        return batched_tokens_of(torch.cuda.mem_get_info(device)[1])

    def merged_prefill(self, blueprint: Blueprint) -> MergedPrefill:
        """Return the room for prompt tokens in captured iterations. Without graphs there is none."""
        import torch

        if blueprint.config.enforce_eager or torch.device(blueprint.device).type != KIND:  # kernels are interpreted
            return MergedPrefill()
        from specrs.backends.cuda.build import make_merged_prefill

        return make_merged_prefill(blueprint)

    def longest_request(self, blueprint: Blueprint) -> int:
        """Return the blueprint's own length: memory for KV is measured later, and a model that leaves too little is
        rejected."""
        return blueprint.max_model_len

    def num_blocks(self, blueprint: Blueprint) -> int:
        from specrs.backends.cuda.kv_memory import measure_num_blocks

        return measure_num_blocks(blueprint, self.free_memory)

    def slot_type(self, device: str) -> SlotType:
        import torch

        from specrs.backends.cuda.slots import TensorSlot

        return partial(TensorSlot, pinned=torch.device(device).type == KIND)

    def make_runner(
        self,
        blueprint: Blueprint,
        scheduler: Scheduler,
        num_blocks: int,
        ranks: Ranks | None = None,
        find_adapter: FindAdapter | None = None,
    ) -> CudaRunner:
        from specrs.backends.cuda.build import make_cuda_runner

        return make_cuda_runner(blueprint, scheduler, num_blocks, ranks, find_adapter)

    def connect_ranks(self, ranks: Ranks, device: str, meeting: Meeting, config: EngineConfig) -> None:
        import torch

        from specrs.parallel.gpus import connect_gpus

        timeout = meeting.exchange_timeout(config.distributed_timeout)
        ranks.device = torch.device(device)
        try:
            with self.current(device):
                ranks.exchanges = connect_gpus(ranks, meeting.store, ranks.device, timeout, meeting.place[1])
        except RuntimeError as fault:
            raise ExchangeError(f"rank {meeting.rank} could not connect to the other GPUs: {fault}") from fault
