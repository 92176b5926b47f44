"""Masks, biases and penalties on the logits of the sequences that ask for them, in place. Other rows are not touched.

The order is that of `specrs.verify.processing`: bias, masks, then penalties. A masked token has a logit of -inf, which
no bias or penalty changes, so it does not matter that masks come after biases here.

Launches, for at most as many sequences at a time as there are rows of counts:

    tops       largest raw logit of each tile; zeroes the counts of sequences with penalties
    history    counts the tokens of prompt and output; only with penalties
    edit       biases, bad words and stop ids before `min_tokens`, one program for each row
    adjust     allowed ids, grammar masks and penalties, tile by tile

Tokens of drafts that precede a row are not in the counts. The last kernel adds them, so that all rows of a sequence
share its counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from specrs.core import MAX_STOP_IDS, PARAM_COLUMNS
from specrs.kernels.cuda._distribution import PARAMS
from specrs.kernels.cuda.sampling_scratch import BLOCK, SamplingScratch, expect, tile_of
from specrs.kernels.cuda.variants import Variant
from specrs.verify.history import TokenCounts
from specrs.verify.params import SamplingRows, Steps
from specrs.verify.processing import Constraints, adjust_logits, leaves_only_stops
from torch import Tensor

COLUMNS = tl.constexpr(8)
"""Number of columns of `Asked.table`, in which each row describes one sequence."""
SEQUENCE, PENALISED, ALLOWED, FIRST_BIAS, NUM_BIASES, FIRST_WORD, NUM_WORDS, STOPS = (tl.constexpr(i) for i in range(8))
"""Columns of `Asked.table`. SEQUENCE: sequence of the iteration. PENALISED: 1 if it has a penalty. ALLOWED: row of
`Asked.allowed`; -1: all ids are allowed. FIRST_BIAS, FIRST_WORD: where its biases and bad words begin in `Asked.lists`.
STOPS: 1 if stop ids are forbidden before `min_len`."""
_REPETITION, _FREQUENCY, _PRESENCE = (
    tl.constexpr(PARAM_COLUMNS.index(f"{name}_penalty")) for name in ("repetition", "frequency", "presence")
)
_IN_PROMPT = tl.constexpr(1 << 30)
"""Bit of a count that says that the token occurs in the prompt. The bits below count it in the output."""
_NUM_STOPS = tl.constexpr(MAX_STOP_IDS)
_LANES = 128
"""Number of biases, of bad words, or of mask words that a program of `edit_kernel` handles at a time."""
_TILES = 256
"""Number of tiles of a row in kernels that are compiled ahead of time: a vocabulary of 151,936."""


@dataclass(frozen=True, slots=True)
class Asked:
    """Masks, biases, bad words and penalties of A sequences, on the device, made by
    `specrs.backends.cuda.sampling.asked`."""

    table: Tensor
    """[A, COLUMNS] int64"""
    lists: Tensor
    """[L] int64: ids of biases, then `(start, length)` of each bad word, then the tokens of bad words. Starts are
    indices into `lists`."""
    biases: Tensor
    """[at least the number of biases] fp32; biases[i] belongs to the id lists[i]."""
    allowed: Tensor
    """[D, ceil(V / 32)] int32, bit i of word j is 1 if id 32 j + i is allowed."""


@dataclass(frozen=True, slots=True)
class AskedRows:
    """Rows of logits, M in total, of the sequences in an `Asked`, sequence after sequence, on the device."""

    row: Tensor
    """[M] int64, row of the logits."""
    asked: Tensor
    """[M] int64, ascending row of `Asked.table`."""
    mask: Tensor
    """[M] int64, row of the grammar masks; -1: the row has none."""
    counts: Sequence[int]
    """Number of rows of each asked sequence, on the host."""


@dataclass(frozen=True, slots=True)
class History:
    """Row state that masks and penalties read, and the sequences of the iteration."""

    row: Tensor
    """[B] int64, state row of each sequence."""
    n: Tensor
    """[B] int64, number of committed tokens. Drafts come after them in `tokens`."""
    tokens: Tensor
    """[R + 1, >= n + K] int64"""
    prompt_len: Tensor
    """[R + 1] int64, number of tokens of the prompt; no draft is one of them."""
    stop_ids: Tensor
    """[R + 1, MAX_STOP_IDS] int64, -1 is padding."""
    min_len: Tensor
    """[R + 1] int64, positions before it must not have a stop id."""
    values: Tensor
    """[R + 1, 8] fp32 of `SamplingRows`."""
    max_context: int
    """No sequence has more committed tokens; 0 if none has a penalty."""

    def tensors(self) -> list[Tensor]:
        """Return all tensors, in the order of the fields."""
        return [self.row, self.n, self.tokens, self.prompt_len, self.stop_ids, self.min_len, self.values]


@triton.jit(do_not_specialize=["first", "tile"], do_not_specialize_on_alignment=["row_of", "asked_of"])
def tops_kernel(  # type: ignore[no-untyped-def]
    logits, row_of, asked_of, table, tile_value, counts, stride, V, first, tile, tile_stride, BLOCK: tl.constexpr
):
    """Write the largest logit of each tile, NaN if the tile has one. The first row of a sequence with penalties also
    zeroes its counts."""
    t, m = tl.program_id(0), tl.program_id(1).to(tl.int64)
    asked = tl.load(asked_of + m)
    row_ptr = logits + tl.load(row_of + m) * stride
    is_first = tl.load(asked_of + m - 1, mask=m > 0, other=-1) != asked
    zeroed = tl.where(is_first & (tl.load(table + asked * COLUMNS + PENALISED) != 0), V, 0)
    own = counts + (asked - first) * V
    top = tl.full([BLOCK], -float("inf"), tl.float32)
    faulty = tl.zeros([BLOCK], tl.int32)
    for start in range(t * tile, tl.minimum(t * tile + tile, V), BLOCK):
        token = start + tl.arange(0, BLOCK)
        x = tl.load(row_ptr + token, mask=token < V, other=-float("inf"))
        faulty = faulty | (x != x).to(tl.int32)
        top = tl.maximum(top, tl.where(x == x, x, -float("inf")))
        tl.store(own + token, tl.zeros([BLOCK], tl.int32), mask=token < zeroed)
    best = tl.where(tl.max(faulty, axis=0) > 0, float("nan"), tl.max(top, axis=0))
    tl.store(tile_value + m * 2 * tile_stride + t, best)


@triton.jit(do_not_specialize=["first", "tokens_stride"])
def history_kernel(  # type: ignore[no-untyped-def]
    table, state_row, n_of, tokens, prompt_len, counts, tokens_stride, V, first, BLOCK: tl.constexpr
):
    """Add one block of a sequence's committed tokens to the sequence's token counts."""
    slot = tl.program_id(1).to(tl.int64)
    own = table + (first + slot) * COLUMNS
    if tl.load(own + PENALISED) != 0:
        sequence = tl.load(own + SEQUENCE)
        row, n = tl.load(state_row + sequence), tl.load(n_of + sequence)
        position = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        token = tl.load(tokens + row * tokens_stride + position, mask=position < n, other=-1)
        known = (token >= 0) & (token < V)
        in_prompt = position < tl.load(prompt_len + row)
        at = counts + slot * V + token
        tl.atomic_add(at, tl.full([BLOCK], 1, tl.int32), mask=known & ~in_prompt, sem="relaxed")
        tl.atomic_or(at, tl.full([BLOCK], _IN_PROMPT, tl.int32), mask=known & in_prompt, sem="relaxed")


@triton.jit
def _ends_bad_word(lists, word, position, sequence_ptr, LANES: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return `(last token, whether the tokens before `position` are all but the last)` of each bad word at `word`, -1
    where there is none."""
    start = tl.load(lists + word, mask=word >= 0, other=0)
    length = tl.load(lists + word + 1, mask=word >= 0, other=1)
    found = (word >= 0) & (position >= length - 1)
    for j in range(0, tl.max(length, axis=0) - 1):
        inside = found & (j < length - 1)
        wanted = tl.load(lists + start + j, mask=inside, other=0)
        there = tl.load(sequence_ptr + position - (length - 1) + j, mask=inside, other=0)
        found = found & (wanted == there)
    return tl.load(lists + start + length - 1, mask=word >= 0, other=0), found


@triton.jit
def _allows_more(words, stops, V, LANES: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return whether a grammar's mask `words` allows an id that is not among `stops` [NUM_STOPS]."""
    more = tl.zeros([LANES], tl.int32)
    for start in range(0, (V + 31) // 32, LANES):
        index = start + tl.arange(0, LANES)
        left = tl.load(words + index, mask=index < (V + 31) // 32, other=0)
        left = tl.where(index == V // 32, left & ((1 << (V % 32)) - 1), left)
        for s in range(0, _NUM_STOPS):
            stop = tl.load(stops + s).to(tl.int32)
            word = tl.where(stop >= 0, stop // 32, -1)
            left = tl.where(index == word, left & ~(1 << (stop % 32)), left)
        more = more | left
    return tl.max((more != 0).to(tl.int32), axis=0) != 0


@triton.jit(
    do_not_specialize=["num_tiles", "tokens_stride"],
    do_not_specialize_on_alignment=["row_of", "asked_of", "mask_of", "positions", "raw_top"],
)
def edit_kernel(  # type: ignore[no-untyped-def]
    logits,
    row_of,
    asked_of,
    mask_of,
    positions,
    table,
    lists,
    biases,
    grammar,
    state_row,
    tokens,
    stop_ids,
    min_len,
    tile_value,
    raw_top,
    stride,
    V,
    tokens_stride,
    num_tiles,
    tile_stride,
    TILES: tl.constexpr,
    LANES: tl.constexpr,
):
    """Write the largest raw logit of a row, and change the few logits that its biases, bad words and stop ids name."""
    m = tl.program_id(0).to(tl.int64)
    flat, own = tl.load(row_of + m), table + tl.load(asked_of + m) * COLUMNS
    position, row = tl.load(positions + flat), tl.load(state_row + tl.load(own + SEQUENCE))
    row_ptr = logits + flat * stride
    t = tl.arange(0, TILES)
    tops = tl.load(tile_value + m * 2 * tile_stride + t, mask=t < num_tiles, other=-float("inf"))
    faulty = tl.max((tops != tops).to(tl.int32), axis=0) > 0
    top = tl.max(tl.where(tops == tops, tops, -float("inf")), axis=0)
    tl.store(raw_top + m, tl.where(faulty, float("nan"), top))

    lane = tl.arange(0, LANES)
    first, count = tl.load(own + FIRST_BIAS), tl.load(own + NUM_BIASES)
    for start in range(0, count, LANES):
        has = start + lane < count
        at = row_ptr + tl.load(lists + first + start + lane, mask=has, other=0)
        bias = tl.load(biases + first + start + lane, mask=has, other=0.0)
        tl.store(at, tl.load(at, mask=has, other=0.0) + bias, mask=has)
    tl.debug_barrier()  # a bias must not undo a mask of the same token

    first, count = tl.load(own + FIRST_WORD), tl.load(own + NUM_WORDS)
    for start in range(0, count, LANES):
        has = start + lane < count
        word = tl.where(has, first + 2 * (start + lane), -1)
        last, found = _ends_bad_word(lists, word, position, tokens + row * tokens_stride, LANES)
        tl.store(row_ptr + last, tl.full([LANES], -float("inf"), tl.float32), mask=found)

    if (tl.load(own + STOPS) != 0) & (position < tl.load(min_len + row)):
        mask = tl.load(mask_of + m)
        forbidden = tl.full([], _NUM_STOPS, tl.int32)
        if mask >= 0:
            # A grammar that allows nothing but stop ids has a complete text, to which min_tokens does not apply.
            more = _allows_more(grammar + mask * ((V + 31) // 32), stop_ids + row * _NUM_STOPS, V, LANES)
            forbidden = tl.where(more, _NUM_STOPS, 0)
        s = tl.arange(0, _NUM_STOPS)
        stop = tl.load(stop_ids + row * _NUM_STOPS + s)
        tl.store(row_ptr + stop, tl.full([_NUM_STOPS], -float("inf"), tl.float32), mask=(stop >= 0) & (s < forbidden))


@triton.jit
def _is_allowed(words, token, V):  # type: ignore[no-untyped-def]
    """Return whether the mask `words` allows each token."""
    word = tl.load(words + token // 32, mask=token < V, other=0)
    return (word >> (token % 32)) & 1 != 0


@triton.jit(
    do_not_specialize=["first", "tile", "tokens_stride"],
    do_not_specialize_on_alignment=["row_of", "asked_of", "mask_of", "positions"],
)
def adjust_kernel(  # type: ignore[no-untyped-def]
    logits,
    row_of,
    asked_of,
    mask_of,
    positions,
    table,
    allowed,
    grammar,
    state_row,
    n_of,
    tokens,
    values,
    counts,
    stride,
    V,
    tokens_stride,
    first,
    tile,
    BLOCK: tl.constexpr,
):
    """Apply the masks and penalties of a row to one tile."""
    t, m = tl.program_id(0), tl.program_id(1).to(tl.int64)
    flat, asked = tl.load(row_of + m), tl.load(asked_of + m)
    own = table + asked * COLUMNS
    penalised, mine, mask = tl.load(own + PENALISED) != 0, tl.load(own + ALLOWED), tl.load(mask_of + m)
    if penalised | (mine >= 0) | (mask >= 0):
        row_ptr, num_words = logits + flat * stride, (V + 31) // 32
        sequence = tl.load(own + SEQUENCE)
        row, n = tl.load(state_row + sequence), tl.load(n_of + sequence)
        params = values + row * PARAMS
        repetition = tl.load(params + _REPETITION)
        frequency, presence = tl.load(params + _FREQUENCY), tl.load(params + _PRESENCE)
        drafts = tokens + row * tokens_stride + n
        num_drafts = (tl.load(positions + flat) - n).to(tl.int32)
        for start in range(t * tile, tl.minimum(t * tile + tile, V), BLOCK):
            token = start + tl.arange(0, BLOCK)
            x = tl.load(row_ptr + token, mask=token < V, other=0.0)
            if mine >= 0:
                x = tl.where(_is_allowed(allowed + mine * num_words, token, V), x, -float("inf"))
            if mask >= 0:
                x = tl.where(_is_allowed(grammar + mask * num_words, token, V), x, -float("inf"))
            if penalised:
                seen = tl.load(counts + (asked - first) * V + token, mask=token < V, other=0)
                for j in range(0, num_drafts):
                    seen += (token == tl.load(drafts + j)).to(tl.int32)
                times = seen & (_IN_PROMPT - 1)
                scaled = tl.where(x > 0, tl.div_rn(x, repetition), x * repetition)
                x = tl.where(seen > 0, scaled, x)
                x = x - frequency * times.to(tl.float32) - presence * (times > 0).to(tl.float32)
            tl.store(row_ptr + token, x, mask=token < V)


def adjust(
    logits: Tensor,
    positions: Tensor,
    asked: Asked,
    rows: AskedRows,
    grammar: Tensor | None,
    history: History,
    raw_top: Tensor,
    scratch: SamplingScratch,
) -> None:
    """Apply masks, biases and penalties to rows of logits. The reference is `adjust_reference`.

    Args:
        logits: `[N, V]` fp32, rows of any stride. Only rows in `rows.row` are read and written.
        positions: `[N]` int64, position whose token each row predicts. Its history is every token before it.
        asked: what the sequences ask.
        rows: rows of these sequences, all or those of the first ones.
        grammar: `[G, ceil(V / 32)]` int32, masks that `rows.mask` names. None: no row has any.
        history: row state and sequences.
        raw_top: `[M]` fp32, becomes the largest logit of each row before it was changed, NaN if the row has one.
        scratch: `counts` says how many sequences are adjusted at the same time.
    """
    tables = [asked.table, asked.lists, asked.biases, asked.allowed]
    torch.ops.specrs.adjust_logits(
        logits,
        positions,
        [rows.row, rows.asked, rows.mask],
        list(rows.counts),
        [*tables, asked.allowed if grammar is None else grammar, *history.tensors()],
        history.max_context,
        raw_top,
        [scratch.tile_value, scratch.counts],
    )


@torch.library.custom_op("specrs::adjust_logits", mutates_args=["logits", "raw_top", "scratch"])
def _adjust_logits(
    logits: Tensor,
    positions: Tensor,
    rows: list[Tensor],
    row_counts: list[int],
    read: list[Tensor],
    max_context: int,
    raw_top: Tensor,
    scratch: list[Tensor],
) -> None:
    """Launch the kernels. `rows` are those of `AskedRows`; `read` are the tensors of `Asked`, the grammar masks, and
    the tensors of `History`."""
    (table, lists, biases, allowed, grammar, *history), (tile_value, counts) = read, scratch
    state_row, n, tokens, prompt_len, stop_ids, min_len, values = history
    stride, vocab_size = logits.stride(0), logits.shape[1]
    tokens_stride, tile_stride = tokens.stride(0), tile_value.shape[2]
    after, fused = 0, {"enable_fp_fusion": True}
    for first in range(0, len(row_counts), counts.shape[0]):
        num_asked = min(counts.shape[0], len(row_counts) - first)
        before, after = after, after + sum(row_counts[first : first + num_asked])
        row, of, mask = (each[before:after] for each in rows)
        tile = tile_of(after - before, vocab_size)
        tiles = triton.cdiv(vocab_size, tile)
        tops_kernel[(tiles, after - before)](
            logits,
            row,
            of,
            table,
            tile_value,
            counts,
            stride,
            vocab_size,
            first,
            tile,
            tile_stride,
            BLOCK=BLOCK,
            **fused,
        )
        if max_context:
            history_kernel[(triton.cdiv(max_context, BLOCK), num_asked)](
                table, state_row, n, tokens, prompt_len, counts, tokens_stride, vocab_size, first, BLOCK=BLOCK, **fused
            )
        edit_kernel[(after - before,)](
            logits,
            row,
            of,
            mask,
            positions,
            table,
            lists,
            biases,
            grammar,
            state_row,
            tokens,
            stop_ids,
            min_len,
            tile_value,
            raw_top[before:after],
            stride,
            vocab_size,
            tokens_stride,
            tiles,
            tile_stride,
            TILES=triton.next_power_of_2(tile_stride),
            LANES=_LANES,
            **fused,
        )
        adjust_kernel[(tiles, after - before)](
            logits,
            row,
            of,
            mask,
            positions,
            table,
            allowed,
            grammar,
            state_row,
            n,
            tokens,
            values,
            counts,
            stride,
            vocab_size,
            tokens_stride,
            first,
            tile,
            BLOCK=BLOCK,
            **fused,
        )


@_adjust_logits.register_fake
def _(
    logits: Tensor,
    positions: Tensor,
    rows: list[Tensor],
    row_counts: list[int],
    read: list[Tensor],
    max_context: int,
    raw_top: Tensor,
    scratch: list[Tensor],
) -> None:
    table, _, biases, allowed, grammar = read[:5]
    words, count = triton.cdiv(logits.shape[1], 32), rows[0].shape
    expect("logits", logits, logits.shape, torch.float32)
    expect("positions", positions, logits.shape[:1], torch.int64)
    expect("table", table, (table.shape[0], COLUMNS.value), torch.int64)
    expect("biases", biases, biases.shape, torch.float32)
    expect("allowed", allowed, (allowed.shape[0], words), torch.int32)
    expect("grammar", grammar, (grammar.shape[0], words), torch.int32)
    for name, tensor in zip(("row", "asked", "mask"), rows, strict=True):
        expect(name, tensor, count, torch.int64)
    expect("raw_top", raw_top, count, torch.float32)
    if sum(row_counts) != count[0] or len(row_counts) > table.shape[0]:
        raise ValueError(f"counts: {row_counts}, must add up to {count[0]} rows of at most {table.shape[0]} sequences")


def adjust_reference(
    logits: Tensor,
    positions: Tensor,
    asked: Asked,
    rows: AskedRows,
    grammar: Tensor | None,
    history: History,
    raw_top: Tensor,
) -> None:
    """Do what `adjust` does, row by row in torch."""
    vocab_size, every_step = logits.shape[1], Steps.of(-1)
    every_row = zip(*(x.tolist() for x in (rows.row, rows.asked, rows.mask)), strict=True)
    for m, (flat, of, mask) in enumerate(every_row):
        sequence, penalised, allowed, first_bias, num_biases, first_word, num_words, stops = asked.table[of].tolist()
        row, position = int(history.row[sequence]), int(positions[flat])
        raw_top[m] = logits[flat].max()
        forbidden = torch.zeros(vocab_size, dtype=torch.bool)
        if mask >= 0:
            assert grammar is not None
            forbidden |= _forbidden(grammar[mask], vocab_size)
        stop_ids = history.stop_ids[row : row + 1]
        early = bool(stops) and position < int(history.min_len[row])
        if mask >= 0 and early:
            early = not bool(leaves_only_stops(forbidden[None], stop_ids))
        if allowed >= 0:
            forbidden |= _forbidden(asked.allowed[allowed], vocab_size)
        before = history.tokens[row, :position].tolist()
        for word in range(first_word, first_word + 2 * num_words, 2):
            start, length = asked.lists[word : word + 2].tolist()
            *begin, last = asked.lists[start : start + length].tolist()
            if len(before) >= len(begin) and before[len(before) - len(begin) :] == begin:
                forbidden[last] = True
        at = slice(first_bias, first_bias + num_biases)
        constraints = Constraints(
            forbidden=forbidden[None],
            stop_ids=stop_ids,
            stops_forbidden=torch.tensor([early]),
            bias_ids=asked.lists[None, at],
            bias=asked.biases[None, at],
        )
        params = SamplingRows(history.values[row : row + 1]) if penalised else SamplingRows.allocate(1)
        output, prompt = torch.zeros(vocab_size, dtype=torch.int32), torch.zeros(vocab_size, dtype=torch.bool)
        for i, token in enumerate(before):
            if i < int(history.prompt_len[row]):
                prompt[token] = True
            else:
                output[token] += 1
        counts = TokenCounts(output[None], prompt[None])
        changed = adjust_logits(logits[flat : flat + 1], params, every_step, constraints=constraints, counts=counts)
        logits[flat] = changed[0]


def _forbidden(words: Tensor, vocab_size: int) -> Tensor:
    """Return `[V]` bool, true where a packed mask `[ceil(V / 32)]` has no bit."""
    token = torch.arange(vocab_size)
    return (words[token // 32] >> (token % 32).to(torch.int32)) & 1 == 0


def _variants() -> tuple[Variant, ...]:
    types = {
        **dict.fromkeys(("logits", "biases", "tile_value", "raw_top", "values"), "*fp32"),
        **dict.fromkeys(("counts", "allowed", "grammar"), "*i32"),
        **dict.fromkeys(("stride", "V", "first", "tile", "tile_stride", "tokens_stride", "num_tiles"), "i32"),
    }
    sizes = {"BLOCK": BLOCK, "TILES": _TILES, "LANES": _LANES}

    def variant(name: str, fn: triton.JITFunction) -> Variant:
        constants = {key: size for key, size in sizes.items() if key in fn.arg_names}
        signature = {arg: types.get(arg, "*i64") for arg in fn.arg_names if arg not in constants}
        return Variant(f"adjust_{name}", fn, signature, constants)

    kernels = {"tops": tops_kernel, "history": history_kernel, "edit": edit_kernel, "logits": adjust_kernel}
    return tuple(variant(name, fn) for name, fn in kernels.items())


VARIANTS = _variants()
