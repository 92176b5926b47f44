"""A runner without a model: the next token is a function of all tokens of a row, so an error in the row shows."""

from collections.abc import Sequence

import torch
from specrs.backends.extras import ExtrasLookup
from specrs.backends.ring import Header, Ring, RingSlot
from specrs.config import EngineConfig
from specrs.core import FINISH_LENGTH, FINISH_NONE, CachedDrafter, Scheduler
from specrs.engine.engine import Engine
from specrs.engine.parts import EngineParts
from specrs.engine.request import Request
from specrs.sampling import RequestLimits
from specrs.speculative_config import SpeculativeConfig
from specrs.verify.token_logprobs import TokenLogprobs

VOCAB, K, MAX_MODEL_LEN, BLOCK_SIZE, EOS = 2048, 3, 64, 4, 0


def next_token(tokens: Sequence[int]) -> int:
    """Return the next token: it depends on all of `tokens` and their number, and is never eos."""
    return 1 + (sum(tokens) * 31 + len(tokens) * 7) % 255


def continuation(prompt: Sequence[int], count: int) -> list[int]:
    """Return the next `count` tokens after `prompt`."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


class ScriptedRunner:
    """Runner that keeps every row's tokens and limit from the record alone, as a device does. The number of accepted
    drafts depends on the row's length, and the log probability of token t is -t."""

    drafter = kv_cache = None

    def __init__(self) -> None:
        self.num_target_passes = 0
        self.tokens: dict[int, list[int]] = {}
        self.limit: dict[int, int] = {}
        self.admitted: dict[int, tuple[int, int]] = {}  # by row: request id, tokens

    def use_extras(self, lookup: ExtrasLookup) -> None:
        self.lookup = lookup

    def execute(self, slot: RingSlot, header: Header) -> None:
        record, results = slot.record_arrays, slot.results_arrays
        slot.logprobs.clear()
        slot.prompt_logprobs.clear()
        for name in results:
            results[name].fill(0)
        at = 0
        for i in range(header.num_admitted):
            row, length = int(record["admit_row"][i]), int(record["admit_num_tokens"][i])
            self.tokens[row] = record["upload_token"][at : at + length].tolist()
            self.limit[row] = int(record["admit_limit"][i])
            self.admitted[row] = int(record["admit_request_id"][i]), length
            at += length
        for sequence in range(header.num_decode + header.num_prefill):
            row, k = int(record["seq_row"][sequence]), int(record["seq_k"][sequence])
            prefill = sequence - header.num_decode
            if prefill < 0 or record["chunk_is_last"][prefill]:
                self._iterate(sequence, row, k, slot)
        self.num_target_passes += 1

    def close(self) -> None:
        """Do nothing: this runner has no threads."""

    def wait(self, slot: RingSlot) -> None:
        pass

    def _iterate(self, sequence: int, row: int, k: int, slot: RingSlot) -> None:
        results = slot.results_arrays
        tokens, limit = self.tokens[row], self.limit[row]
        if len(tokens) >= limit:
            return
        request_id, before = self.admitted[row]
        extras = self.lookup(request_id)
        if extras is not None:
            assert extras.matcher.num_accepted == len(tokens) - before, "a mask would be another text's"
        drafted = min(k, limit - len(tokens) - 1)
        accepted = min(drafted, len(tokens) % (K + 1))
        new = continuation(tokens, accepted + 1)
        tokens += new
        results["num_drafted"][sequence], results["num_accepted"][sequence] = drafted, accepted
        results["num_emitted"][sequence] = len(new)
        results["finish_reason"][sequence] = FINISH_LENGTH if len(tokens) == limit else FINISH_NONE
        width = K + 1
        results["tokens"][sequence * width : sequence * width + len(new)] = new
        values = -torch.tensor(new, dtype=torch.float32)
        none = torch.empty(len(new), 0)
        slot.logprobs[sequence] = TokenLogprobs(values, torch.ones(len(new), dtype=torch.int64), none.long(), none)


def make_engine(
    depth: int,
    *,
    num_blocks: int = 64,
    max_num_seqs: int = 3,
    max_model_len: int = MAX_MODEL_LEN,
    max_num_batched_tokens: int = 16,
    max_prefill_stall_ms: float = 0.0,
    runner: ScriptedRunner | None = None,
) -> Engine:
    """Make an engine with a scripted runner."""
    scheduler = Scheduler(
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        max_num_batched_tokens=max_num_batched_tokens,
        num_speculative_tokens=K,
        drafter=CachedDrafter(max_model_len=MAX_MODEL_LEN),
        max_in_flight=depth,
        max_prefill_stall_ms=max_prefill_stall_ms,
    )
    config = EngineConfig(
        speculative_config=SpeculativeConfig(num_speculative_tokens=K),
        max_steps_in_flight=depth,
        max_num_seqs=max_num_seqs,
        max_prefill_stall_ms=max_prefill_stall_ms,
    )
    limits = RequestLimits(
        max_model_len=max_model_len, vocab_size=VOCAB, num_speculative_tokens=K, eos_token_ids=(EOS,)
    )
    ring = Ring(scheduler, K, depth)
    return Engine(EngineParts(config, None, limits, scheduler, ring, runner or ScriptedRunner()))  # type: ignore[arg-type]


def told(request: Request) -> list[int]:
    """Return the output that a request should have when it has ended by its length."""
    assert request.params.max_tokens is not None
    return continuation(request.prompt_token_ids, request.params.max_tokens)
