"""A host around the scheduler, with numpy alone: prompt chunks, draft catch-up, drafts, and two steps in flight.

    python examples/scheduler.py

Runs with `specrs_core` (the wheel specrs-core) or with `specrs.core`. The "models" look at what lies in their paged
caches, so a wrong slot or block changes the text; everything else is what a host with real ones does.
"""

from collections import deque
from dataclasses import dataclass

import numpy as np

try:
    import specrs_core as core
except ImportError:
    from specrs import core

VOCAB, DIM, BLOCK_SIZE, NUM_BLOCKS, ROWS, MAX_LEN, K = 50, 16, 4, 64, 4, 64, 4


class Model:
    """Toy model: the next token depends on an exponentially weighted sum of cached values. Any function of the cache
    would do."""

    def __init__(self, noise: float = 0.0) -> None:
        random = np.random.default_rng(1)
        self.embedding = random.standard_normal((VOCAB, DIM))
        self.head = random.standard_normal((DIM, VOCAB)) + noise * random.standard_normal((DIM, VOCAB))
        self.cache = np.full((NUM_BLOCKS * BLOCK_SIZE, DIM), np.nan)

    def feed(self, tokens: list[int], slots: np.ndarray, written: np.ndarray | None = None) -> list[int]:
        """Write the KV of `tokens`, and return the most probable token after each of them. `slots` has the KV slot of
        every position of the text; `tokens` are at the last positions.

        `written` has the slot to write each token's KV to, by default its slot in `slots`. -1 writes nothing, because
        the KV is in the cache already.
        """
        written = slots[len(slots) - len(tokens) :] if written is None else written
        self.cache[written[written >= 0]] = self.embedding[tokens][written >= 0]
        ends = range(len(slots) - len(tokens) + 1, len(slots) + 1)
        return [self.after(self.cache[slots[:end]]) for end in ends]

    def after(self, values: np.ndarray) -> int:
        """Return the most probable token after positions with these values `[n, DIM]`."""
        return int(((-0.9) ** np.arange(len(values) - 1, -1, -1) @ values @ self.head).argmax())


@dataclass
class Row:
    """Data of a running request on the device."""

    tokens: list[int]
    limit: int
    draft_len: int


class Device:
    """Simulated device: row state, block tables, and the KV of target and draft model."""

    def __init__(self, scheduler: core.Scheduler) -> None:
        self.target, self.draft = Model(), Model(noise=0.1)
        self.rows = [Row([], 0, 0) for _ in range(ROWS)]
        self.tables = np.full((ROWS, MAX_LEN // BLOCK_SIZE), -1, dtype=np.int64)
        self.mapper = core.SlotMapper(BLOCK_SIZE)
        self.record_layout, self.results_layout = scheduler.record_layout(), scheduler.results_layout()

    def slots(self, row: int, count: int) -> np.ndarray:
        """Return the slots of the row's first `count` positions."""
        out = np.empty(count, dtype=np.int64)
        self.mapper.map(self.tables[row], np.arange(count, dtype=np.int64), out)
        return out

    def execute(self, record: np.ndarray, results: np.ndarray) -> None:
        """Execute a planned step, and write its results into `results`, by sequence."""
        at = {name: record[offset : offset + length] for name, (offset, length) in self.record_layout.items()}
        report = {name: results[offset : offset + length] for name, (offset, length) in self.results_layout.items()}
        header = dict(zip(core.HEADER_FIELDS, at["header"].tolist(), strict=False))
        num_decode, num_prefill = header["num_decode"], header["num_prefill"]
        results[:] = 0

        uploads = deque(at["upload_token"].tolist())
        for i, row in enumerate(at["admit_row"][: header["num_admitted"]]):
            tokens = [uploads.popleft() for _ in range(at["admit_num_tokens"][i])]
            self.rows[row] = Row(tokens, int(at["admit_limit"][i]), int(at["admit_draft_len"][i]))
        updates = slice(header["num_block_updates"])
        self.tables[at["block_row"][updates], at["block_index"][updates]] = at["block_id"][updates]

        def emit(sequence: int, row: Row, new: list[int]) -> None:
            row.tokens += new
            report["num_emitted"][sequence] = len(new)
            # The device judges ends; these requests have no stop tokens.
            report["finish_reason"][sequence] = core.FINISH_LENGTH if len(row.tokens) == row.limit else core.FINISH_NONE
            report["tokens"].reshape(ROWS, K + 1)[sequence, : len(new)] = new

        # Prompt chunks run the target alone; the last one of a prompt gives a token.
        for j, row in enumerate(at["seq_row"][num_decode : num_decode + num_prefill]):
            fed = slice(*at["prefill_q_start"][j : j + 2])
            end = int(at["chunk_start"][j] + at["chunk_len"][j])
            best = self.target.feed(at["prefill_token"][fed].tolist(), self.slots(row, end), at["prefill_slot"][fed])
            if at["chunk_is_last"][j]:
                emit(num_decode + j, self.rows[row], best[-1:])

        # Catch-up chunks write the draft KV of tokens that are settled, and say nothing.
        for j, row in enumerate(at["draft_chunk_row"][: header["num_draft_chunks"]]):
            start, length = int(at["draft_chunk_start"][j]), int(at["draft_chunk_len"][j])
            fed, state = slice(*at["draft_q_start"][j : j + 2]), self.rows[row]
            if len(state.tokens) < state.limit:
                slots, written = self.slots(row, start + length), at["draft_slot"][fed]
                self.draft.feed(state.tokens[start : start + length], slots, written)
                state.draft_len = start + length

        # Decoding sequences draft, verify, accept. The host planned them with bounds; the device knows the lengths.
        for sequence, row in enumerate(at["seq_row"][:num_decode]):
            state = self.rows[row]
            n = len(state.tokens)
            if n == state.limit:
                continue  # it ended in the step before, which the host had not settled when it planned this one
            k = min(int(at["seq_k"][sequence]), state.limit - n - 1)
            drafts: list[int] = []
            for _ in range(k):
                fed_tokens = (state.tokens + drafts)[state.draft_len :]
                state.draft_len += len(fed_tokens)
                drafts += self.draft.feed(fed_tokens, self.slots(row, state.draft_len))[-1:]
            best = self.target.feed([state.tokens[-1], *drafts], self.slots(row, n + k))
            accepted = next((i for i in range(k) if drafts[i] != best[i]), k)
            emit(sequence, state, best[: accepted + 1])
            report["num_accepted"][sequence], report["num_drafted"][sequence] = accepted, k
            state.draft_len = min(state.draft_len, len(state.tokens) - 1)


def generate(
    prompts: list[list[int]], max_tokens: int, k: int = K, depth: int = 2
) -> tuple[list[list[int]], core.Scheduler]:
    """Continue `prompts` greedily; the texts are the target's own for every `k` and `depth` (steps in flight)."""
    scheduler = core.Scheduler(
        max_num_seqs=ROWS,
        max_model_len=MAX_LEN,
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
        max_num_batched_tokens=16,
        num_speculative_tokens=K,
        drafter=core.CachedDrafter(max_model_len=MAX_LEN, cost_ratio=0.25),
        max_in_flight=depth,
    )
    device = Device(scheduler)
    record = np.zeros(scheduler.record_size, dtype=np.int64)
    settled = np.zeros(scheduler.settled_size, dtype=np.int64)
    spare = [np.zeros(scheduler.results_size, dtype=np.int64) for _ in range(depth)]
    texts: list[list[int]] = [[] for _ in prompts]
    for request_id, prompt in enumerate(prompts):
        limit = len(prompt) + max_tokens
        scheduler.add_request(request_id, np.array(prompt), limit=limit, num_speculative_tokens=k)

    ids, num_new = (
        settled[slice(offset, offset + ROWS)]
        for offset, _ in (scheduler.settled_layout()[name] for name in ("request_id", "num_new"))
    )
    offset, length = scheduler.results_layout()["tokens"]
    in_flight: deque[tuple[int, np.ndarray]] = deque()
    while True:
        # A GPU would still run the step before while this one is planned; here each is over when `execute` returns.
        while scheduler.plan(record) == core.PLAN_STEP:
            results = spare.pop()
            device.execute(record, results)
            in_flight.append((int(record[core.HEADER_FIELDS.index("step_id")]), results))
        if not in_flight:
            return texts, scheduler
        step_id, results = in_flight.popleft()
        scheduler.settle(step_id, results, settled)
        tokens = results[offset : offset + length].reshape(ROWS, K + 1)
        for sequence in np.flatnonzero(ids >= 0):
            texts[ids[sequence]] += tokens[sequence, : num_new[sequence]].tolist()
        spare.append(results)


if __name__ == "__main__":
    shared = [3, 14, 15, 9, 26, 5, 35, 8, 9]
    texts, scheduler = generate([[*shared, *range(i)] for i in range(8)], 30)
    for text in texts:
        print(*text)
    statistics = scheduler.acceptance()
    print(
        f"{statistics.drafts} drafts, acceptance length {statistics.acceptance_length:.2f}, "
        f"{scheduler.num_cached_tokens} prompt tokens from the prefix cache"
    )
