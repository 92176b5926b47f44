"""Sets of cases to measure. A case (`Line`) is one line of a result table: an engine at one K, dtype and form of
weights. Runs nothing."""

from __future__ import annotations

from dataclasses import dataclass

ENGINES = ("specrs", "llama.cpp", "openvino", "vllm", "transformers")
FILES = ("f32", "q4_0", "q4_1", "q8_0", "q4_k_m")
"""Types of GGUF files, used as `dtype` of a line. specrs and llama.cpp read the same file, each with its default KV
cache."""
INT4 = "int4"
"""`dtype` of OpenVINO's own 4-bit weights, with its default activations and KV cache."""


@dataclass(frozen=True)
class Line:
    """One measured setting of one engine. `k`: drafts per iteration, 0 for none, or auto. `fp32_weights`: the weights
    do not fit bf16, so specrs keeps them as fp32. `sampled`: temperature 0.8, top-p 0.9 instead of greedy.
    `cpu_prefill`: option of specrs. `method`: drafter that copies from the text; empty: the draft model."""

    engine: str
    k: int | str
    dtype: str
    fp32_weights: bool = False
    sampled: bool = False
    cpu_prefill: str = "exact"
    method: str = ""

    @property
    def name(self) -> str:
        """Name of the line in tables."""
        prompts = "" if self.cpu_prefill == "exact" else f", cpu_prefill={self.cpu_prefill}"
        drafts = f", {self.method}" if self.method else ""
        return self.engine + drafts + ", weights as fp32" * self.fp32_weights + ", sampled" * self.sampled + prompts


@dataclass(frozen=True)
class Setting:
    """A set of cases that share model and prompts: `num_prompts` prompts of `prompt_tokens` tokens, `batch` at a time,
    with `new_tokens` output tokens each. With `chats`, the demo's chats."""

    title: str
    target: str
    draft: str | None
    batch: int
    threads: int
    new_tokens: int
    num_prompts: int
    lines: tuple[Line, ...]
    prompt_tokens: int = 128
    chats: bool = False


def everywhere(k: int, dtype: str) -> list[Line]:
    """Return the cases (`Line`) of every engine with `k` drafts and this dtype, one each."""
    return [Line(engine, k, dtype) for engine in ENGINES]


def plain(dtype: str) -> list[Line]:
    """Return the cases (`Line`) without drafts: one for every engine, and one more for specrs with
    `cpu_prefill="amx"`."""
    return [Line("specrs", 0, dtype, cpu_prefill="amx"), *everywhere(0, dtype)]


def pair1() -> list[Line]:
    """Return the cases (`Line`) of pair 1 in the order in which they run, so that compared ones follow each other. For
    each K: every engine, then the settings that only specrs has at this K."""
    lines = []
    for k in (0, 1, 2, 3, 5):
        lines += everywhere(k, "float32") if k else plain("float32")
        if k == 0:
            lines += [line for line in everywhere(0, "bfloat16") if line.engine != "specrs"]
        if k in (0, 3):
            lines.append(Line("specrs", k, "float32", sampled=True))
            lines.append(Line("specrs", k, "float32", fp32_weights=True))
    return lines


def from_text(k: int) -> list[Line]:
    """Return the cases (`Line`) with drafts copied from the text: `k` drafts by n-grams for the engines that have them,
    `k` by suffix decoding for specrs, and specrs with its own choice of drafter and K."""
    peers = [Line(engine, k, "bfloat16", method="ngram") for engine in ("specrs", "llama.cpp", "openvino")]
    return [
        *peers,
        Line("specrs", k, "bfloat16", method="suffix"),
        Line("specrs", "auto", "bfloat16", method="ngram,suffix"),
    ]


def of_files(types: tuple[str, ...]) -> tuple[Line, ...]:
    """Return the cases (`Line`) without drafts: specrs and llama.cpp on the same GGUF files of these types, and
    OpenVINO with its own 4-bit weights."""
    lines = [Line(engine, 0, kind) for kind in types for engine in ("specrs", "llama.cpp")]
    return (*lines, Line("openvino", 0, INT4))


def chats_of(kind: str) -> tuple[Line, ...]:
    """Return the cases (`Line`) of specrs and llama.cpp on a GGUF file of type `kind`, without drafts and with drafts
    copied from the text, and those of OpenVINO with its INT4 weights."""
    drafting = [Line(engine, 5, kind, method="ngram") for engine in ("specrs", "llama.cpp")]
    own = [Line("specrs", 5, kind, method="suffix"), Line("specrs", "auto", kind, method="ngram,suffix")]
    peer = [Line("openvino", 0, INT4), Line("openvino", 5, INT4, method="ngram")]
    return (*(Line(engine, 0, kind) for engine in ("specrs", "llama.cpp")), *drafting, *own, *peer)


def file_sets() -> dict[str, Setting]:
    """Return settings with quantized files, by name: three models on one thread and on two, long prompts, batches, the
    demo's chats."""
    found = {}
    made = {
        "smollm2": ("SmolLM2-135M", "smollm2-135m", 64, 6, ("q4_0", "q8_0", "q4_k_m")),
        "qwen3": ("Qwen3-0.6B shape, random weights", "qwen3-0.6b-shape", 32, 3, ("q4_0", "q8_0", "q4_k_m")),
        "gemma3": ("Gemma 3 270M", "gemma3-270m", 64, 6, ("q4_k_m",)),
    }
    for name, (title, target, new_tokens, num_prompts, types) in made.items():
        for threads in (1, 2):
            told = f"{title}, GGUF files, batch 1, {threads} thread{'s' * (threads > 1)}"
            found[f"{name}-files-{threads}"] = Setting(
                told, target, None, 1, threads, new_tokens, num_prompts, of_files(types)
            )
        found[f"{name}-files-prompts"] = Setting(
            f"{title}, GGUF files, prompts of 512 tokens, 2 threads", target, None, 1, 2, 8, 3, of_files(types), 512
        )
    for batch in (8, 32):
        lines = tuple(Line(engine, 0, "q4_0") for engine in ("specrs", "llama.cpp"))
        title = f"SmolLM2-135M, GGUF file, batch {batch}, 2 threads"
        found[f"smollm2-files-batch{batch}"] = Setting(title, "smollm2-135m", None, batch, 2, 64, batch, lines)
    title = "SmolLM2-135M, GGUF file, the demo's chats, batch 1, 2 threads"
    found["chats-files"] = Setting(title, "smollm2-135m", None, 1, 2, 128, 10, chats_of("q4_0"), chats=True)
    return found


SETS = {
    "pair1": Setting("bundled pair, batch 1, 1 thread", "pair-target", "pair-draft", 1, 1, 128, 24, tuple(pair1())),
    "pair8": Setting(
        "bundled pair, batch 8, 2 threads",
        "pair-target",
        "pair-draft",
        8,
        2,
        128,
        24,
        (*plain("float32"), *everywhere(3, "float32"), Line("specrs", "auto", "float32")),
    ),
    "smollm2": Setting("SmolLM2-135M, batch 1, 2 threads", "smollm2-135m", None, 1, 2, 64, 6, tuple(plain("bfloat16"))),
    "chats": Setting(
        "SmolLM2-135M, the demo's chats, batch 1, 2 threads",
        "smollm2-135m",
        None,
        1,
        2,
        128,
        10,
        (*everywhere(0, "bfloat16"), *from_text(5)),
        chats=True,
    ),
    "qwen3": Setting(
        "Qwen3-0.6B shape, random weights, batch 1, 2 threads",
        "qwen3-0.6b-shape",
        None,
        1,
        2,
        32,
        3,
        tuple(plain("bfloat16")),
    ),
    "hybrid": Setting(
        "bundled hybrid, batch 1, 1 thread",
        "pair-hybrid",
        None,
        1,
        1,
        128,
        24,
        (Line("specrs", 0, "float32"), *(Line(engine, 0, "f32") for engine in ("specrs", "llama.cpp"))),
    ),
    **file_sets(),
}
