"""The table of families, formats and devices: what runs where. Made from the registry; decides nothing itself."""

from specrs.models.gguf.config import ARCHITECTURES
from specrs.models.quantization.table import AT_LOAD, methods_of
from specrs.models.registry import FAMILIES, Family

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
    """The cells of a family."""
    files = {known.name for known in ARCHITECTURES.values()}
    methods = methods_of(stacked=family.experts is not None and family.experts.stacked)
    return (
        f"`{architecture}`",
        family.models,
        YES,
        YES,
        YES,
        ", ".join(f"`{method}`" for method in methods),
        ", ".join(f"`{name}`" for name in AT_LOAD),
        YES if architecture in files else NO,
    )


def table() -> str:
    """The table in Markdown, as docs/supported.md has it."""
    rows = [_HEADER, ("---",) * len(_HEADER), *(row(name, family) for name, family in FAMILIES.items())]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in rows)
