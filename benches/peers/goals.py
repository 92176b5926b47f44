"""Ratios that specrs should reach, computed from the measurements. Ratios are of medians."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from peers.figures import FIRST, ITERATION, SPEED, Measured, best_peer, find, ratio
from peers.settings import SETS, Line


@dataclass(frozen=True)
class Goal:
    """A goal: `what` should be at least or at most (`sign`) `bar`. `value` is None if a case that it needs has not
    run."""

    what: str
    value: float | None
    sign: str
    bar: float

    @property
    def met(self) -> bool | None:
        """Whether the goal is met; None if its value was not measured."""
        if self.value is None:
            return None
        return self.value >= self.bar if self.sign == ">=" else self.value <= self.bar


@dataclass(frozen=True)
class Results:
    """Lines of a set, found by their properties. `passes_per_s`: the read limit, by dtype."""

    lines: Sequence[Measured]
    dtype: str
    passes_per_s: dict[str, float]

    def specrs(
        self,
        k: int | str = 0,
        key: str = SPEED,
        *,
        fp32_weights: bool = False,
        sampled: bool = False,
        cpu_prefill: str = "exact",
    ) -> float | None:
        """Return specrs's median of the figure `key`; None if the case has no runs."""
        each = find(self.lines, Line("specrs", k, self.dtype, fp32_weights, sampled, cpu_prefill))
        return None if each is None else each.median(key)

    def best_k(self) -> float | None:
        """Return specrs's speed at its best fixed K; None if none ran."""
        speeds = [speed for k in (1, 2, 3, 5) if (speed := self.specrs(k)) is not None]
        return max(speeds, default=None)

    def peer(
        self, k: int | None = 0, dtype: str | None = None, key: str = SPEED, names: Sequence[str] = ()
    ) -> float | None:
        """Return the best peer's median, of all peers or of those named; K None is any K."""
        lines = [each for each in self.lines if not names or each.line.engine in names]
        return best_peer(lines, dtype or self.dtype, k, key)

    def first_token(self) -> Iterator[Goal]:
        """Yield goals for the first token: specrs's time over that of the best peer, for each value of
        `cpu_prefill`."""
        for way in ("exact", "amx"):
            what = f"first token by {way} prompts, of the best peer's"
            yield Goal(what, ratio(self.specrs(key=FIRST, cpu_prefill=way), self.peer(key=FIRST)), "<=", 1)


def pair1(of: Results) -> Iterator[Goal]:
    """Goals of one request on one thread."""
    for dtype, bar in (("float32", 2.5), ("bfloat16", 1.5)):
        better = of.peer(dtype=dtype, names=("llama.cpp", "openvino"))
        what = f"K = 0, of the better of llama.cpp and OpenVINO in {dtype}"
        yield Goal(what, ratio(of.specrs(), better), ">=", bar)
    yield Goal("best K, of its own K = 0", ratio(of.best_k(), of.specrs()), ">=", 1.15)
    yield Goal("best K, of the best peer in float32 at any K", ratio(of.best_k(), of.peer(None)), ">=", 3.5)
    fp32 = ratio(of.specrs(3, fp32_weights=True), of.specrs(0, fp32_weights=True))
    yield Goal("K = 3 with weights as fp32, of the same at K = 0", fp32, ">=", 1.5)
    for k in (0, 3):
        sampled = ratio(of.specrs(k, ITERATION, sampled=True), of.specrs(k, ITERATION))
        yield Goal(f"a sampled iteration, of a greedy one, K = {k}", sampled, "<=", 1.10)
    yield from of.first_token()


def pair8(of: Results) -> Iterator[Goal]:
    """Yield the goals of eight requests on two threads."""
    yield Goal("K = 0, of OpenVINO's", ratio(of.specrs(), of.peer(names=("openvino",))), ">=", 1.8)
    yield Goal("auto, of its own K = 0", ratio(of.specrs("auto"), of.specrs()), ">=", 1)


def smollm2(of: Results) -> Iterator[Goal]:
    """Goals of a model that does not fit in any cache."""
    yield Goal("K = 0, of the best peer", ratio(of.specrs(), of.peer()), ">=", 1.15)
    yield from of.first_token()


def chats(of: Results) -> Iterator[Goal]:
    """Yield the goals of drafts from the text."""
    auto = find(of.lines, Line("specrs", "auto", of.dtype, method="ngram,suffix"))
    speed = None if auto is None else auto.median(SPEED)
    yield Goal("n-grams or suffixes as chosen, of K = 0", ratio(speed, of.specrs()), ">=", 1)
    yield Goal("the same, of the best peer with or without drafts", ratio(speed, of.peer(None)), ">=", 1)


def qwen3(of: Results) -> Iterator[Goal]:
    """Goals of a larger model, whose passes mostly read weights."""
    yield Goal("K = 0, of the best peer", ratio(of.specrs(), of.peer()), ">=", 1.02)
    share = ratio(of.specrs(), of.passes_per_s[of.dtype])
    yield Goal("K = 0, of the measured read bandwidth", share, ">=", 0.85)


def files(bars: dict[str, float], first: dict[str, float]) -> Callable[[Results], Iterator[Goal]]:
    """Return the goals of quantized files: decoding, and the time of the first token, of llama.cpp's on the same
    file."""

    def made(of: Results) -> Iterator[Goal]:
        for kind, bar in bars.items():
            own, peer = (find(of.lines, Line(engine, 0, kind)) for engine in ("specrs", "llama.cpp"))
            for what, key, sign, limit in (
                ("decoding", SPEED, ">=", bar),
                ("first token", FIRST, "<=", 1 / first.get(kind, 1.05)),
            ):
                one, other = (None if each is None else each.median(key) for each in (own, peer))
                yield Goal(f"{kind}: {what}, of llama.cpp's", ratio(one, other), sign, round(limit, 2))

    return made


def chats_files(of: Results) -> Iterator[Goal]:
    """Yield the goal of the best drafts from the text, against llama.cpp's best."""
    own, peer = (
        max((speed for each in of.lines if each.line.engine == engine and (speed := each.median(SPEED))), default=None)
        for engine in ("specrs", "llama.cpp")
    )
    yield Goal("best of specrs, of llama.cpp's best", ratio(own, peer), ">=", 1.5)


_SMOLLM2 = files({"q4_0": 1.25, "q8_0": 1.1, "q4_k_m": 2.3}, {"q4_k_m": 2.3})
_QWEN3 = files({"q4_0": 1.4, "q8_0": 1.0, "q4_k_m": 1.5}, {})
_GEMMA3 = files({"q4_k_m": 1.3}, {})
_BATCH = files({"q4_0": 1.3}, {})
GOALS: dict[str, Callable[[Results], Iterator[Goal]]] = {
    **dict.fromkeys(("smollm2-files-1", "smollm2-files-2", "smollm2-files-prompts"), _SMOLLM2),
    **dict.fromkeys(("qwen3-files-1", "qwen3-files-2", "qwen3-files-prompts"), _QWEN3),
    **dict.fromkeys(("gemma3-files-1", "gemma3-files-2", "gemma3-files-prompts"), _GEMMA3),
    **dict.fromkeys(("smollm2-files-batch8", "smollm2-files-batch32"), _BATCH),
    "chats-files": chats_files,
    "hybrid": files({"f32": 1.0}, {}),
    "pair1": pair1,
    "pair8": pair8,
    "smollm2": smollm2,
    "chats": chats,
    "qwen3": qwen3,
}


def goals(name: str, lines: Sequence[Measured], passes_per_s: dict[str, float]) -> list[Goal]:
    """Compute the goals of the set `name`."""
    return list(GOALS[name](Results(lines, SETS[name].lines[0].dtype, passes_per_s)))
