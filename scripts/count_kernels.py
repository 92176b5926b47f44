"""Count the kernels of passes and iterations of Qwen3-32B with Qwen3-1.7B on a GPU, without one: docs/gpu.md's table.

    python scripts/count_kernels.py           print it
    python scripts/count_kernels.py --write   write it into docs/gpu.md
    python scripts/count_kernels.py --start   print how many kernels the start compiles

Kernels are counted as they are launched, an op of cuBLAS or torch as one. Measures no time.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/gpu.md"
BEGIN, END = "<!-- scripts/count_kernels.py -->\n", "<!-- end -->\n"
sys.path.insert(0, str(ROOT / "tests"))


def counts() -> dict[str, tuple[int, int]]:
    """Kernels, greedy and sampled, of what the table has."""
    from kernel_launches import Recorder, fake_context, reference_configs
    from specrs.backends.cuda import drafting, iteration
    from specrs.backends.cuda.context import sequences_of
    from specrs.backends.cuda.shapes import LogitsMode, Shape

    k = 5
    found: dict[str, tuple[int, int]] = {}
    with tempfile.TemporaryDirectory() as folder, fake_context(*reference_configs(Path(folder)), k) as ctx:
        sequences = sequences_of(ctx.record.views, "num_decode")

        def add(name: str, work: Callable[[LogitsMode], None]) -> None:
            numbers = []
            for logits_mode in (LogitsMode.GREEDY, LogitsMode.SAMPLED):
                with Recorder() as recorder:
                    work(logits_mode)
                numbers.append(len(recorder.kernels))
            found[name] = numbers[0], numbers[1]

        def verify(batch: int, rows: int) -> Callable[[LogitsMode], None]:
            return lambda logits_mode: iteration.verify_pass(
                ctx, batch, batch * rows, rows, greedy=logits_mode is LogitsMode.GREEDY
            )

        add("draft pass, batch 1", lambda logits_mode: drafting.draft_pass(ctx, 2, 1, logits_mode))
        add("draft pass, batch 64", lambda logits_mode: drafting.draft_pass(ctx, 2, 64, logits_mode))
        add("target pass, batch 1, K = 0", verify(1, 1))
        add("target pass, batch 1, K = 5", verify(1, k + 1))
        add("target pass, batch 64, K = 0", verify(64, 1))
        add("target pass, batch 64, K = 5", verify(64, k + 1))
        add("iteration, batch 1, K = 0", lambda logits_mode: iteration.run(ctx, Shape(1, 0, 1, logits_mode), sequences))
        add(
            "iteration, batch 1, K = 5",
            lambda logits_mode: iteration.run(ctx, Shape(1, k, k + 1, logits_mode), sequences),
        )
    return found


def compiled_at_start(max_num_seqs: int = 64) -> list[tuple[str, int]]:
    """How many kernels are compiled for graphs, and how many more for graphs with chunks after verification and for
    what launches run outside of graphs, at K = 5."""
    from kernel_launches import Recorder, fake_context, reference_configs
    from specrs.backends.cuda.context import sequences_of
    from specrs.backends.cuda.graphs import tasks
    from specrs.backends.cuda.shapes import MERGED_CHUNKS, Buckets, MergedShape, batch_buckets
    from specrs.backends.cuda.warm_up import warm_up

    k, sizes = 5, {"max_chunk_rows": 2048, "max_chunks": max_num_seqs, "merges": MERGED_CHUNKS}
    buckets = Buckets(batch_buckets(max_num_seqs), k, **sizes)
    with (
        tempfile.TemporaryDirectory() as folder,
        fake_context(*reference_configs(Path(folder)), k, max_num_seqs=max_num_seqs) as ctx,
    ):
        work = list(tasks(ctx, buckets, sequences_of(ctx.record.views, "num_decode")))
        kinds: dict[str, list[Callable[[], None]]] = {
            "graphs": [run for key, run in work if not isinstance(key, MergedShape)],
            "graphs with chunks after verification": [run for key, run in work if isinstance(key, MergedShape)],
            "outside of graphs": [lambda: warm_up(ctx, buckets)],
        }
        known: set[tuple[object, ...]] = set()
        found = []
        for kind, runs in kinds.items():
            before = len(known)
            for run in runs:
                with Recorder() as recorder:
                    run()
                known |= {launch.key() for launch in recorder.launches}
            found.append((kind, len(known) - before))
    return found


def table(found: dict[str, tuple[int, int]]) -> str:
    """Return the counts as the table in docs/gpu.md."""
    rows = [f"| {name} | {greedy:,} | {sampled:,} |" for name, (greedy, sampled) in found.items()]
    return "\n".join(["| kernels of a | greedy | sampled |", "| --- | --- | --- |", *rows]) + "\n"


def page_with(text: str, page: str) -> str:
    """`page` with the table `text` in its place."""
    whole = f"{BEGIN}\n{text}\n{END}"
    changed, count = re.subn(re.escape(BEGIN) + ".*?" + re.escape(END), lambda _: whole, page, flags=re.DOTALL)
    assert count == 1, f"{PAGE.name} has {count} places for the table"
    return changed


def main() -> None:
    """Print or write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write docs/gpu.md")
    parser.add_argument("--start", action="store_true", help="print what the start compiles instead: a minute")
    arguments = parser.parse_args()
    if arguments.start:
        found = compiled_at_start()
        print(*(f"{kind}: {count}" for kind, count in found), f"all: {sum(n for _, n in found)}", sep="\n")
        return
    text = table(counts())
    if arguments.write:
        PAGE.write_text(page_with(text, PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    print(text, end="")


if __name__ == "__main__":
    main()
