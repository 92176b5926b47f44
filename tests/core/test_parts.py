"""The binding of the parts that embedders use alone: slots, blocks, hashes, acceptance statistics."""

from typing import Any

import numpy as np
import pytest
from specrs import core
from specrs.core import AcceptanceTracker, BlockHasher, BlockPool, SlotMapper


def ints(*values: int) -> Any:
    return np.array(values, np.int64)


def test_slots_of_one_request() -> None:
    mapper = SlotMapper(4)
    positions = ints(-1, 0, 3, 4, 7, 8, 11, 12)
    out = np.full(8, -7)
    mapper.map(ints(5, 2, -1), positions, out)
    assert out.tolist() == [-1, 20, 23, 8, 11, -1, -1, -1]
    assert [mapper.slot(ints(5, 2, -1), int(position)) for position in positions] == out.tolist()
    assert mapper.block_size == 4


def test_slots_of_a_batch() -> None:
    tables = np.array([[3, 1], [9, 0], [5, 6]])
    out = np.full(4, -7)
    SlotMapper(4).map_batch(tables, ints(0, 2, 2, 4), ints(0, 7, 4, 8), out)
    assert out.tolist() == [12, 7, 24, -1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((np.zeros((2, 2), np.int64), ints(0, 3), ints(0, 0, 0)), "block_tables: has 2 rows; must have 1"),
        ((np.zeros((0, 2), np.int64), ints(), ints(0, 0, 0)), "q_start"),
        ((np.zeros((1, 2), np.int64), ints(0, 2), ints(0, 0, 0)), "q_start=0..2: "),
        ((np.zeros((2, 2), np.int64), ints(0, 4, 3), ints(0, 0, 0)), "q_start"),
        ((np.zeros((1, 2), np.int64), ints(0, 2), ints(0, 0)), "out=3 elements"),
        ((np.asfortranarray(np.zeros((2, 2), np.int64)), ints(0, 1, 3), ints(0, 0, 0)), "block_tables: strides"),
        ((np.zeros(2, np.int64), ints(0, 3), ints(0, 0, 0)), "block_tables: shape"),
        ((np.zeros((1, 2), np.int32), ints(0, 3), ints(0, 0, 0)), "block_tables: dtype is int32"),
    ],
)
def test_wrong_batches_change_nothing(arguments: tuple[Any, Any, Any], message: str) -> None:
    out = np.full(3, -7)
    with pytest.raises(core.InvalidBufferError, match=message):
        SlotMapper(4).map_batch(*arguments, out)
    assert out.tolist() == [-7, -7, -7]


@pytest.mark.parametrize("block_size", [0, -4])
def test_block_size_is_positive(block_size: int) -> None:
    with pytest.raises(core.InvalidConfigError, match=f"block_size={block_size}: "):
        SlotMapper(block_size)
    with pytest.raises(core.InvalidConfigError, match=f"block_size={block_size}: "):
        BlockHasher().hash_blocks(ints(1), block_size)


def test_a_block_through_its_states() -> None:
    pool = BlockPool(2)
    first = pool.allocate()
    assert (first, pool.num_free, pool.ref_count(first), pool.ref_count(5)) == (0, 1, 1, None)
    assert pool.register(first, 1 << 127)
    assert pool.lookup(1 << 127) == first
    assert pool.is_registered(first)
    assert pool.claim(first, 3)
    assert not pool.claim(first, 4)
    assert pool.claimant(first) == 3
    assert not pool.release_claim(first, 4)
    assert pool.release_claim(first, 3)
    pool.mark_draft(first)
    assert pool.has_draft(first)
    pool.share(first)
    pool.free(first)
    pool.free(first)
    assert (pool.num_free, pool.lookup(1 << 127)) == (2, first)
    second = pool.allocate()
    assert not pool.register(second, 1 << 127)
    assert pool.allocate() == first, "the cached block is evicted once nothing is free"
    assert pool.lookup(1 << 127) is None
    with pytest.raises(core.OutOfBlocksError, match="all 2 "):
        pool.allocate()
    assert not pool.reset_prefix_cache()
    pool.free(second)
    pool.free(first)
    assert pool.reset_prefix_cache()
    pool.check_integrity()


@pytest.mark.parametrize("block", [-1, 1, 2, 1 << 40])
def test_invalid_blocks(block: int) -> None:
    pool = BlockPool(2)
    pool.allocate()
    for operation in (pool.free, pool.share, pool.mark_draft):
        with pytest.raises(core.InvalidBlockError, match=f"block={block} "):
            operation(block)
    with pytest.raises(core.InvalidBlockError, match=f"block={block} "):
        pool.register(block, 1)
    with pytest.raises(core.InvalidBlockError, match=f"block={block} "):
        pool.claim(block, 1)
    assert pool.num_free == 1


@pytest.mark.parametrize("claimant", [-1, (1 << 32) - 1, 1 << 32])
def test_invalid_claimants(claimant: int) -> None:
    pool = BlockPool(1)
    pool.register(pool.allocate(), 1)
    with pytest.raises(core.InvalidBlockError, match=f"claimant={claimant}: "):
        pool.claim(0, claimant)
    assert not pool.release_claim(0, claimant)
    assert pool.claimant(0) is None


def test_pools_have_blocks() -> None:
    for num_blocks in (0, -1):
        with pytest.raises(core.InvalidConfigError, match=f"num_blocks={num_blocks}: "):
            BlockPool(num_blocks)


def test_hashes_name_content_and_prefix() -> None:
    tokens = np.arange(11)
    hasher = BlockHasher()
    hashes = hasher.hash_blocks(tokens, 4)
    assert len(hashes) == 2
    assert hasher.hash_blocks(tokens[:8].copy(), 4) == hashes
    assert hasher.hash_blocks(tokens[4:].copy(), 4)[0] != hashes[1], "the prefix is part of the name"
    assert hasher.hash_blocks(tokens, 4, b"tenant") != hashes
    assert BlockHasher(b"k" * 16).hash_blocks(tokens, 4) != hashes
    assert BlockHasher(bytes(16)).hash_blocks(tokens, 4) == hashes
    assert "k" * 16 not in repr(BlockHasher(b"k" * 16))
    with pytest.raises(core.InvalidConfigError, match="hash_key=15 bytes"):
        BlockHasher(b"k" * 15)


def test_hashing_goes_on_from_a_parent() -> None:
    tokens, hasher = np.arange(12), BlockHasher()
    whole = hasher.hash_blocks(tokens, 4, b"tenant", extra_keys=[(0, b"adapter"), (9, b"image")])
    first = hasher.hash_blocks(tokens[:8].copy(), 4, b"tenant", extra_keys=[(0, b"adapter")])
    assert first + hasher.hash_blocks(tokens[8:].copy(), 4, parent=first[-1], extra_keys=[(1, b"image")]) == whole
    assert len({*whole, *hasher.hash_blocks(tokens, 4, b"tenant"), *hasher.hash_blocks(tokens, 4)}) == 9
    with pytest.raises(core.InvalidConfigError, match="cache_salt"):
        hasher.hash_blocks(tokens, 4, b"tenant", parent=first[-1])
    for keys in ([(12, b"x")], [(-1, b"x")], [(2, b"x"), (1, b"x")], [(0, b"")]):
        with pytest.raises(core.InvalidBufferError, match="extra_keys"):
            hasher.hash_blocks(tokens, 4, extra_keys=keys)


def test_an_eviction_is_known_before_it_happens() -> None:
    pool = BlockPool(1)
    pool.register(pool.allocate(), 7)
    assert (pool.next_eviction(), pool.block_hash(0)) == (None, 7)
    pool.free(0)
    assert pool.next_eviction() == 0
    pool.allocate()
    assert (pool.next_eviction(), pool.block_hash(0), pool.block_hash(5)) == (None, None, None)


def test_acceptance_statistics() -> None:
    statistics = AcceptanceTracker(3)
    assert (statistics.acceptance_length, statistics.acceptance_rate) == (1.0, 0.0)
    assert statistics.per_position == [0.0, 0.0, 0.0]
    for drafted, accepted in [(3, 3), (3, 1), (2, 0), (0, 0), (2, 2)]:
        statistics.record(drafted, accepted)
    assert (statistics.drafts, statistics.draft_tokens, statistics.accepted_tokens) == (4, 10, 6)
    assert (statistics.acceptance_length, statistics.acceptance_rate) == (2.5, 0.6)
    assert statistics.histogram == [1, 1, 1, 1]
    assert statistics.accepted_per_position == [3, 2, 1]
    assert statistics.per_position == [0.75, 0.5, 0.25]
    assert statistics.num_speculative_tokens == 3
    statistics.reset()
    assert (statistics.drafts, statistics.histogram) == (0, [0, 0, 0, 0])


@pytest.mark.parametrize("counts", [(4, 0), (2, 3), (-1, 0), (2, -1)])
def test_impossible_acceptance_changes_nothing(counts: tuple[int, int]) -> None:
    statistics = AcceptanceTracker(3)
    with pytest.raises(core.InvalidAcceptanceError, match=r"(drafted|accepted)[,=]"):
        statistics.record(*counts)
    assert statistics.drafts == 0


@pytest.mark.parametrize("k", [-1, 1025, 1 << 60])
def test_acceptance_statistics_have_bounds(k: int) -> None:
    with pytest.raises(core.InvalidConfigError, match=f"num_speculative_tokens={k}: "):
        AcceptanceTracker(k)


def test_ngram_proposer_finds_what_the_definition_says() -> None:
    def lookup(tokens: list[int], least: int, most: int, k: int) -> list[int]:
        text = list(tokens)
        for n in range(most, least - 1, -1):
            for place in range(len(tokens) - n - 1, -1, -1):
                if tokens[place : place + n] == tokens[len(tokens) - n :]:
                    text += [0] * k
                    for i in range(k):
                        text[len(tokens) + i] = text[place + n + i]
                    return text[len(tokens) :]
        return []

    rng = np.random.default_rng(3)
    for _ in range(400):
        tokens = rng.integers(0, rng.integers(1, 5) + 1, rng.integers(0, 60))
        least, k = int(rng.integers(1, 5)), int(rng.integers(0, 7))
        most = least + int(rng.integers(0, 4))
        found = core.NgramProposer(least, most).propose(tokens, k)
        assert (found.dtype, found.tolist()) == (np.int64, lookup(tokens.tolist(), least, most, k))


def test_suffix_cache_drafts_from_the_text_and_from_other_outputs() -> None:
    def ids(*tokens: int) -> np.ndarray:
        return np.array(tokens, np.int64)

    cache = core.SuffixCache(max_tree_depth=8)
    cache.start_request(1, ids(5, 6, 7, 8, 9, 5, 6))
    drafts, score, match_len = cache.propose(1, 4)
    # [5, 6] occurs twice, once with something after it
    assert (drafts.dtype, drafts.tolist(), score, match_len) == (np.int64, [7, 8], 1.0, 2)
    cache.append(1, ids(7, 1, 2, 3))
    cache.stop_request(1)
    assert 1 not in cache
    cache.start_request(2, ids(4))
    assert cache.propose(2, 4)[0].tolist() == []
    cache.append(2, ids(1, 2))
    assert 2 in cache
    assert cache.propose(2, 4)[0].tolist() == [3]
    stats = cache.stats()
    assert (stats["num_requests"], stats["num_cached_requests"]) == (1, 1)
    assert (stats["num_output_tokens"], stats["num_request_tokens"]) == (6, 3)
    assert cache.evict(1)
    assert not cache.evict(1)
    assert cache.stats()["memory_bytes"] < stats["memory_bytes"]
    assert cache.propose(2, 4)[0].tolist() == []
    assert repr(cache) == "SuffixCache(max_tree_depth=8, num_requests=1, num_cached_requests=0)"


def test_suffix_cache_names_what_is_wrong() -> None:
    for settings, message in (
        ({"max_tree_depth": 0}, "max_tree_depth=0: must be from 2 to 256"),
        ({"max_cached_requests": -1}, "max_cached_requests=-1: "),
        ({"max_spec_factor": 0.0}, "max_spec_factor=0: must be finite and above 0"),
        ({"min_token_prob": 1.5}, "min_token_prob=1.5: must be from 0 to 1"),
        ({"max_memory_bytes": -1}, "max_memory_bytes=-1: "),
    ):
        with pytest.raises(core.InvalidConfigError, match=message):
            core.SuffixCache(**settings)
    cache = core.SuffixCache()
    cache.start_request(3, np.zeros(2, np.int64))
    with pytest.raises(core.DuplicateRequestError, match="request_id=3: "):
        cache.start_request(3, np.zeros(2, np.int64))
    with pytest.raises(core.UnknownRequestError, match="request_id=4: "):
        cache.append(4, np.zeros(2, np.int64))
    with pytest.raises(core.InvalidBufferError, match="token_ids=-1: "):
        cache.append(3, np.full(1, -1))
    with pytest.raises(core.InvalidBufferError, match="prompt_token_ids: dtype"):
        cache.start_request(5, np.zeros(2, np.int32))
    with pytest.raises(core.InvalidConfigError, match="num_speculative_tokens=1025: "):
        cache.propose(3, 1025)


def test_ngram_proposer_names_what_is_wrong() -> None:
    assert repr(core.NgramProposer()) == "NgramProposer(prompt_lookup_min=5, prompt_lookup_max=5)"
    with pytest.raises(core.InvalidConfigError, match="prompt_lookup_min=4: must be from 0 to prompt_lookup_max=3"):
        core.NgramProposer(4, 3)
    with pytest.raises(core.InvalidConfigError, match="num_speculative_tokens=1025: "):
        core.NgramProposer().propose(np.zeros(3, np.int64), 1025)
    with pytest.raises(core.InvalidBufferError, match="token_ids"):
        core.NgramProposer().propose(np.zeros(3, np.int32), 2)
