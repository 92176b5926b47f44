"""The table of families, formats and devices: what runs where. Made from the registry; decides nothing itself."""

from specrs.models.features import NATIVE, features_of_family
from specrs.models.gguf.config import ARCHITECTURES
from specrs.models.quantization.table import AT_LOAD, METHODS
from specrs.models.registry import FAMILIES, Family

_HEADER = (
    "architecture",
    "models",
    "CPU, op by op",
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
    native = passes(family, NATIVE)
    at_load = ", ".join(f"`{name}`" for name in AT_LOAD if name == "fp8" or not native.startswith(NO))
    return (
        f"`{architecture}`",
        family.models,
        YES,
        native,
        YES,
        ", ".join(f"`{method}`" for method in METHODS),
        at_load,
        YES if architecture in files else NO,
    )


def passes(family: Family, known: frozenset[str]) -> str:
    """Whether passes that know so much compute a family: `yes`, what it may not have, or `no` with what is missing."""
    missing = {name: always for name, always in features_of_family(family).items() if name not in known}
    always = [name for name, has in missing.items() if has]
    if always:
        return f"{NO}: {', '.join(always)}"
    return f"without {', '.join(missing)}" if missing else YES


def table() -> str:
    """The table in Markdown, as docs/supported.md has it."""
    rows = [_HEADER, ("---",) * len(_HEADER), *(row(name, family) for name, family in FAMILIES.items())]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in rows)
