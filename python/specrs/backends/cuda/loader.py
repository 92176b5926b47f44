"""Loader of models and heads onto a GPU. Does not check memory: see `fit`."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from specrs.backends.cuda.device import CUDA_DTYPES
from specrs.backends.model_source import ModelSource
from specrs.drafters.assistant.reader import AssistantFiles
from specrs.drafters.assistant.torch_loader import TorchAssistant, load_torch_assistant
from specrs.drafters.eagle3.head import Eagle3Head
from specrs.drafters.eagle3.reader import HeadFiles
from specrs.drafters.eagle3.torch_loader import load_torch_head
from specrs.drafters.mtp.head import MtpHead
from specrs.drafters.mtp.reader import MtpFiles
from specrs.drafters.mtp.torch_loader import load_torch_mtp
from specrs.errors import UnsupportedConfigError, invalid
from specrs.kernels.linear import DenseWeight, Weight, dense_weight
from specrs.kernels.quantized_weight import QuantizedWeight, fuse
from specrs.models.config import ModelConfig
from specrs.models.decoder_weights import DecoderFacts, ExpertWeights, SharedWeights
from specrs.models.experts import Experts
from specrs.models.quantization.base import QuantizedTensors
from specrs.models.quantized import quantized_weight, shard_codes
from specrs.models.shards import Shard
from specrs.models.torch_arrays import TORCH_DTYPES
from specrs.models.torch_decoder import TorchDecoder
from specrs.models.torch_loader import Loader, open_model, shard_of
from specrs.models.torch_weights import TorchExperts, TorchWeights, has_fp8_rows, with_fp8_rows
from specrs.parallel.ranks import Ranks

logger = logging.getLogger("specrs")


def load(source: ModelSource, device: str, ranks: Ranks | None) -> TorchDecoder:
    """Load a model onto `device`, or this rank's part of it. The runner makes a `CudaDecoder` of it.

    Quantized weights stay quantized if the kernels read their layout. A draft with `quantization="fp8"` rounds rows to
    FP8 in passes of more than 64 rows, unless its dtype is float16. Raises CheckpointError for tensors that are missing
    or misshapen, UnsupportedModelError for what is not implemented, and UnsupportedConfigError for `cuda_fp8_rows` with
    a target that has no FP8 weights.
    """
    config, types = source.config, source.types(CUDA_DTYPES)
    config.check_device(CUDA_DTYPES.kind, str(types.dtype))
    opened, checkpoint = open_model(
        source.path, source.revision, config.load_format, config.max_model_len, types.quantization
    )
    shard, where, dtype = shard_of(opened, source.path, ranks), torch.device(device), TORCH_DTYPES[types.dtype]
    if isinstance(checkpoint, QuantizedTensors):
        loader: Loader = QuantizedLoader(opened, checkpoint, dtype, where, shard)
    else:
        loader = Loader(opened, checkpoint, dtype, where, shard)
    loader.cache_dtype = TORCH_DTYPES[types.cache_dtype]
    loaded = TorchDecoder(loader.load(), ranks=ranks)
    if not config.cuda_fp8_rows:
        if source.is_draft and source.quantization == "fp8" and dtype != torch.float16:
            return replace(loaded, weights=with_fp8_rows(loaded.weights, wide_only=True))
        return loaded
    made = replace(loaded, weights=with_fp8_rows(loaded.weights))
    if not source.is_draft and not has_fp8_rows(made.weights):
        reason = f"{source.path} has no FP8 weights here; allowed: False"
        raise invalid(UnsupportedConfigError, "cuda_fp8_rows", True, reason)
    return made


def load_head(
    files: HeadFiles | MtpFiles | AssistantFiles, target: DecoderFacts, ranks: Ranks | None
) -> Eagle3Head | MtpHead | TorchAssistant:
    """Load an EAGLE-3 head, MTP head or assistant for `target`, or this rank's part of it. Raises CheckpointError for
    tensors that are missing, unknown or misshapen."""
    assert isinstance(target, TorchDecoder)
    if isinstance(files, AssistantFiles):
        assert ranks is None, "targets of assistants are not split over ranks"
        return load_torch_assistant(files, target, target.cache_dtype)
    if isinstance(files, MtpFiles):
        return load_torch_mtp(files, target, target.cache_dtype, ranks)
    return load_torch_head(files, target, target.cache_dtype, ranks)


class QuantizedLoader(Loader):
    """Loader that keeps weights quantized if the kernels read their layout, and dequantizes the others."""

    def __init__(
        self,
        config: ModelConfig,
        checkpoint: QuantizedTensors,
        dtype: torch.dtype,
        device: torch.device,
        shard: Shard | None = None,
    ) -> None:
        super().__init__(config, checkpoint, dtype, device, shard)
        self.codes, self.shard = checkpoint, shard
        self.num_codes, self.code_bytes = 0, 0

    def load(self) -> TorchWeights:
        """Check and read all tensors, and log how many matrices stay quantized. Raises CheckpointError for tensors that
        are missing, unknown or misshapen."""
        weights = super().load()
        logger.info(
            "%s: %d matrices of %d layers stay codes, %.2f GiB; others are %s",
            self.checkpoint.folder,
            self.num_codes,
            self.config.num_layers,
            self.code_bytes / 2**30,
            str(self.dtype).removeprefix("torch."),
        )
        return weights

    def linear(self, names: list[str], *, bias: bool) -> Weight:
        """Return the projections `names`, which share an input, as one: quantized if the kernels read all of them.

        Files like Q4_K_M have some of them in other super-blocks than the others. All then get codes of 8 bits.
        """
        biases = torch.cat([self.read(f"{name}.bias") for name in names]) if bias else None
        fused = self._fused([self.quantized(f"{name}.weight") for name in names], biases)
        if fused is None:
            groups = [group for name in names if (group := self.super_group(f"{name}.weight")) is not None]
            if len(groups) == len(names):
                fused = self._fused([self.widened(f"{name}.weight", min(groups)) for name in names], biases)
        if fused is None:
            return super().linear(names, bias=bias)
        self.num_codes, self.code_bytes = self.num_codes + 1, self.code_bytes + fused.num_bytes
        return fused

    def experts(self, prefix: str, experts: Experts) -> TorchExperts:
        """Return the router and experts of the layer whose tensor names begin with `prefix`: quantized if the kernels
        read all of their projections, in one coding for all gates and values and one for all outputs."""
        block, (gate, up, down) = prefix + experts.block, experts.projections
        names = [f"{block}experts.{i}." for i in range(experts.count)]
        gates = [[name + gate, name + up] for name in names]
        stacked = self._stacked_quantized(gates), self._stacked_quantized([[name + down] for name in names])
        if stacked[0] is None or stacked[1] is None:
            return super().experts(prefix, experts)
        self.num_codes += 3 * experts.count
        self.code_bytes += stacked[0].num_bytes + stacked[1].num_bytes
        biases = None
        if experts.biases:
            biases = self.stack(gates, "bias"), self.stack([[name + down] for name in names], "bias")
        router = f"{block}{experts.router}"
        return ExpertWeights(
            router=dense_weight(self.read(f"{router}.weight"), self.read(f"{router}.bias") if experts.biases else None),
            gate_up=stacked[0].split(experts.count, None if biases is None else biases[0]),
            down=stacked[1].split(experts.count, None if biases is None else biases[1]),
            stacked_quantized=(stacked[0], stacked[1]),
            stacked_biases=biases,
            shared=self.shared_expert(block, experts),
            scales=self.router_scales(block, experts),
        )

    def shared_expert(self, block: str, experts: Experts) -> SharedWeights[Weight] | None:
        """Return the expert that every row uses, of the experts whose tensor names begin with `block`: quantized if the
        kernels read its projections, but its gate dequantized. None: there is none."""
        shared = super().shared_expert(block, experts)
        if shared is None or shared.gate is None or isinstance(shared.gate, DenseWeight):
            return shared
        return replace(shared, gate=super().linear([f"{block}shared_expert_gate"], bias=False))

    def _stacked_quantized(self, names: list[list[str]]) -> QuantizedWeight | None:
        """Return the projections of all experts as one weight, by outputs. `names` has, for each expert, projections to
        be concatenated. None if they have to be dequantized."""
        parts = []
        for name in (name for of_expert in names for name in of_expert):
            part = self.quantized(f"{name}.weight")
            if part is None:
                return None
            parts.append(part.to(self.device))
        return fuse(parts)

    def _fused(self, quantized: Sequence[QuantizedWeight | None], biases: Tensor | None) -> QuantizedWeight | None:
        """Return weights that share an input as one on the device. None if one is None or their codings differ."""
        parts = [part.to(self.device) for part in quantized if part is not None]
        return fuse(parts, biases) if len(parts) == len(quantized) else None

    def quantized(self, name: str) -> QuantizedWeight | None:
        """Return the part of a quantized weight that this rank holds. None: it has to be dequantized."""
        return self._own_part(name, quantized_weight(self.codes.raw(name)) if self.codes.is_quantized(name) else None)

    def super_group(self, name: str) -> int | None:
        """Return the number of inputs of a group of a weight in super-blocks. None: it is not in such blocks."""
        return self.codes.super_group(name) if self.codes.is_quantized(name) else None

    def widened(self, name: str, group: int) -> QuantizedWeight | None:
        """Return the part of a weight in super-blocks that this rank holds, with codes of 8 bits and groups of `group`
        inputs. None: it has to be dequantized."""
        blocks = self.codes.super_blocks(name)
        assert blocks is not None
        return self._own_part(name, quantized_weight(blocks.widened(group)))

    def _own_part(self, name: str, whole: QuantizedWeight | None) -> QuantizedWeight | None:
        """Return this rank's part of the weight `name`. None if `whole` is None, or if no kernel reads the part."""
        return whole if whole is None or self.shard is None else shard_codes(self.shard, name, whole, self.config)
