"""Table of model families, formats and devices for docs/supported.md, derived from the registry."""

from specrs.models.gguf.architectures import READ
from specrs.models.quantization.table import AT_LOAD, methods_of
from specrs.models.registry import FAMILIES, Family
from specrs.models.wrappers import WRAPPERS

_HEADER = (
    "architecture",
    "models",
    "CPU, by torch",
    "CPU, native",
    "GPU",
    "quantized checkpoints",
    "quantized at load",
    "GGUF",
)
YES, NO = "yes", "no"


def row(architecture: str, family: Family) -> tuple[str, ...]:
    """Return the cells of a model family's row in the table of docs/supported.md."""
    methods = methods_of(stacked=family.experts is not None and family.experts.stacked == "alternating")
    return (
        f"`{architecture}`",
        family.models,
        YES,
        YES,
        YES,
        ", ".join(f"`{method}`" for method in methods),
        ", ".join(f"`{name}`" for name in AT_LOAD),
        YES if architecture in READ else NO,
    )


def table() -> str:
    """Return the table in Markdown, as docs/supported.md has it."""
    rows = [_HEADER, ("---",) * len(_HEADER), *(row(name, family) for name, family in FAMILIES.items())]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in rows)


def wrapped_table() -> str:
    """Return the table of multimodal checkpoints in Markdown, as docs/supported.md has it."""
    lines = ["| architecture | models | text model |", "| --- | --- | --- |"]
    for name, wrapper in WRAPPERS.items():
        texts = ", ".join(f"`{text}`" for text in wrapper.text_models.values())
        lines.append(f"| `{name}` | {wrapper.models} | {texts} |")
    return "\n".join(lines)
