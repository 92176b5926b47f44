"""A block manager and scheduler in plain Python, to compare the Rust core with. Nothing else uses it.

The same job as a serving engine's: continuous batching, chunked prefill under a token budget, a prefix cache of full
blocks by chained hash with LRU eviction, K drafts a request with KV reserved for them, preemption of the latest request
when blocks are short. Written for speed as far as plain Python goes: slots, local names, no object per token. It leaves
out what the core has beyond that: rows, draft catch-up, marks and claims, steps in flight, checks of its input.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass, field


@dataclass(slots=True)
class Block:
    """A KV block and its holders."""

    index: int
    ref_count: int = 0
    hash: int | None = None


class BlockManager:
    """Pool that allocates free blocks first, then the least recently freed cached one."""

    def __init__(self, num_blocks: int) -> None:
        self.free: deque[Block] = deque(Block(i) for i in range(num_blocks))
        self.cached: OrderedDict[int, Block] = OrderedDict()  # by hash, not held
        self.by_hash: dict[int, Block] = {}

    @property
    def num_free(self) -> int:
        """Return the number of blocks that `allocate` can give."""
        return len(self.free) + len(self.cached)

    def allocate(self) -> Block:
        """Return a block with one holder."""
        if self.free:
            block = self.free.popleft()
        else:
            _, block = self.cached.popitem(last=False)
            assert block.hash is not None
            del self.by_hash[block.hash]
            block.hash = None
        block.ref_count = 1
        return block

    def find(self, block_hash: int) -> Block | None:
        """Return the block with this content, with one more holder; None if there is none."""
        block = self.by_hash.get(block_hash)
        if block is not None:
            if block.ref_count == 0:
                del self.cached[block_hash]
            block.ref_count += 1
        return block

    def register(self, block: Block, block_hash: int) -> None:
        """Make `block` findable, unless another block has its content."""
        if block_hash not in self.by_hash:
            self.by_hash[block_hash] = block
            block.hash = block_hash

    def release(self, block: Block) -> None:
        """Remove one holder. A registered block without holders stays cached, any other becomes free."""
        block.ref_count -= 1
        if block.ref_count == 0:
            if block.hash is None:
                self.free.appendleft(block)
            else:
                self.cached[block.hash] = block


@dataclass(slots=True)
class Request:
    """A request from arrival to end."""

    request_id: int
    tokens: list[int]
    limit: int
    k: int
    num_computed: int = 0
    blocks: list[Block] = field(default_factory=list)
    hashes: list[int] = field(default_factory=list)
    num_registered: int = 0


@dataclass(slots=True)
class StepSequence:
    """A request's part in a step: `num_drafts` drafts, or a chunk of its prompt."""

    request: Request
    num_drafts: int
    chunk: int  # tokens of the prompt; 0 where it decodes
    is_last: bool


class PythonScheduler:
    """Plans steps and settles their results, one step in flight."""

    def __init__(
        self, *, max_num_seqs: int, num_blocks: int, block_size: int, max_num_batched_tokens: int, num_drafts: int
    ) -> None:
        self.max_num_seqs = max_num_seqs
        self.block_size = block_size
        self.budget = max_num_batched_tokens
        self.num_drafts = num_drafts
        self.pool = BlockManager(num_blocks)
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []

    def add_request(self, request_id: int, tokens: list[int], limit: int) -> None:
        """Queue a request."""
        self.waiting.append(Request(request_id, list(tokens), limit, self.num_drafts))

    def plan(self) -> list[StepSequence]:
        """Return the next step: every running request, then new ones."""
        sequences: list[StepSequence] = []
        left = self.budget
        place = 0
        while place < len(self.running):
            request = self.running[place]
            n = len(request.tokens)
            chunk = min(n - request.num_computed, left) if request.num_computed < n - 1 or not request.blocks else 0
            drafts = 0 if chunk else min(request.k, request.limit - n - 1)
            while not self._grow(request, request.num_computed + chunk if chunk else n + drafts):
                victim = self.running.pop()
                self._preempt(victim)
                if victim is request:
                    break
            else:
                sequences.append(StepSequence(request, drafts, chunk, request.num_computed + chunk == n))
                left -= chunk or drafts + 1
                place += 1
        while self.waiting and left > 0 and len(self.running) < self.max_num_seqs:
            request = self.waiting[0]
            if self.pool.num_free * self.block_size < len(request.tokens) + self.num_drafts + 1:
                break
            self.waiting.popleft()
            self._share_prefix(request)
            chunk = min(len(request.tokens) - request.num_computed, left)
            self._grow(request, request.num_computed + chunk)
            self.running.append(request)
            sequences.append(StepSequence(request, 0, chunk, request.num_computed + chunk == len(request.tokens)))
            left -= chunk
        return sequences

    def settle(self, sequences: list[StepSequence], emitted: list[list[int]]) -> list[Request]:
        """Add the tokens of each sequence to its request. Return the requests that ended."""
        ended = []
        for sequence, tokens in zip(sequences, emitted, strict=True):
            request = sequence.request
            if sequence.chunk:
                request.num_computed += sequence.chunk
            if not tokens:
                continue
            own = request.tokens
            own.extend(tokens)
            request.num_computed = len(own) - 1
            if request.num_computed // self.block_size > request.num_registered:
                self._register(request)
            if len(own) >= request.limit:
                ended.append(request)
        if ended:
            gone = {request.request_id for request in ended}
            self.running = [request for request in self.running if request.request_id not in gone]
            for request in ended:
                self._release(request)
        return ended

    def _grow(self, request: Request, positions: int) -> bool:
        missing = -(-positions // self.block_size) - len(request.blocks)
        if missing > self.pool.num_free:
            return False
        for _ in range(missing):
            request.blocks.append(self.pool.allocate())
        return True

    def _hash(self, request: Request, index: int) -> int:
        hashes, size = request.hashes, self.block_size
        while len(hashes) <= index:
            at = len(hashes) * size
            hashes.append(hash((hashes[-1] if hashes else 0, tuple(request.tokens[at : at + size]))))
        return hashes[index]

    def _share_prefix(self, request: Request) -> None:
        for index in range((len(request.tokens) - 1) // self.block_size):
            block = self.pool.find(self._hash(request, index))
            if block is None:
                break
            request.blocks.append(block)
        request.num_registered = len(request.blocks)
        request.num_computed = len(request.blocks) * self.block_size

    def _register(self, request: Request) -> None:
        for index in range(request.num_registered, request.num_computed // self.block_size):
            self.pool.register(request.blocks[index], self._hash(request, index))
            request.num_registered = index + 1

    def _preempt(self, request: Request) -> None:
        self._release(request)
        request.num_computed = request.num_registered = 0
        self.waiting.appendleft(request)

    def _release(self, request: Request) -> None:
        for block in reversed(request.blocks):
            self.pool.release(block)
        request.blocks.clear()
