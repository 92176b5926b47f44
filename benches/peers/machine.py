"""Properties of the machine: processor, cores, caches, and its speed of reading memory. Knows no engine."""

from __future__ import annotations

import ctypes
import json
import mmap
import platform
import struct
import threading
import time
from pathlib import Path
from typing import Any

from specrs.backends.cpu.threads import physical_cores, usable_processors

SYSTEM = Path("/sys/devices/system/cpu")
REPEATS = 15
SECONDS = 0.02
"""Least seconds of one repeat, roughly."""


def processor() -> str:
    """Return the name of the processor, as the operating system gives it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def has_tiles() -> bool:
    """Return whether the processor has AMX's tiles of bf16 numbers."""
    info = Path("/proc/cpuinfo")
    return info.exists() and "amx_bf16" in info.read_text(encoding="utf-8").split()


def caches() -> dict[str, int]:
    """Return the bytes of each cache that the first processor of this process reads through, such as L2; empty if
    unknown."""
    found = {}
    for index in sorted((SYSTEM / f"cpu{min(usable_processors())}/cache").glob("index*")):
        kind, level, size = ((index / name).read_text().strip() for name in ("type", "level", "size"))
        if kind != "Instruction":
            units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
            found[f"L{level}"] = int(size[:-1]) * units[size[-1]] if size[-1] in units else int(size)
    return found


def describe() -> dict[str, Any]:
    """Processor, cores, caches, and read bandwidth with one and with all threads from beyond L2 and from beyond L3."""
    sizes = caches()
    cores, l2, l3 = physical_cores(), sizes.get("L2", 1 << 20), sizes.get("L3", 32 << 20)
    # A size that the cores' own caches do not hold, and one of which nothing stays in L3.
    places = {"beyond L2": min(4 * l2 * cores, l3 // 2), "beyond L3": min(4 * l3, 1 << 30)}
    reads = [
        {
            "where": where,
            "bytes": num_bytes,
            "threads": threads,
            "gb_per_s": round(read_bandwidth(num_bytes, threads), 2),
        }
        for where, num_bytes in places.items()
        for threads in sorted({1, cores})
    ]
    return {
        "processor": processor(),
        "system": f"{platform.system()} {platform.machine()}",
        "usable_processors": len(usable_processors()),
        "physical_cores": cores,
        "caches": sizes,
        "memory_reads": reads,
    }


def read_bandwidth(num_bytes: int, threads: int) -> float:
    """GB/s at which `threads` threads read a buffer of `num_bytes` between them, again and again: the best of some
    repeats. The reader is the C library's memchr, which looks for a byte that is not there."""
    library = ctypes.CDLL(None)
    library.memchr.argtypes, library.memchr.restype = (ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t), ctypes.c_void_p
    share = num_bytes // threads
    with mmap.mmap(-1, share * threads) as buffer:
        if hasattr(mmap, "MADV_HUGEPAGE"):
            buffer.madvise(mmap.MADV_HUGEPAGE)
        view = ctypes.c_char.from_buffer(buffer)
        address = ctypes.addressof(view)
        ctypes.memset(address, 1, share * threads)
        began = time.perf_counter()
        library.memchr(address, 0, share)
        passes = max(1, int(SECONDS / max(time.perf_counter() - began, 1e-9)))
        barrier = threading.Barrier(threads)
        times: list[tuple[float, float]] = []

        def read(start: int) -> None:
            for _ in range(REPEATS):
                barrier.wait()
                began = time.perf_counter()
                for _ in range(passes):
                    library.memchr(start, 0, share)
                times.append((began, time.perf_counter()))
                barrier.wait()

        workers = [threading.Thread(target=read, args=(address + i * share,)) for i in range(threads)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        del view  # it holds the buffer
    # Repeats do not overlap, so those of one repeat are neighbours.
    repeats = [times[i : i + threads] for i in range(0, len(times), threads)]
    seconds = min(max(end for _, end in repeat) - min(begin for begin, _ in repeat) for repeat in repeats)
    return share * threads * passes / seconds / 1e9


def weights(folder: Path) -> tuple[str, int]:
    """Stored dtype and number of the weights that a pass over the checkpoint in `folder` reads: all but the embedding,
    unless that is the LM head too."""
    with (folder / "model.safetensors").open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    if "lm_head.weight" in header:
        header.pop("model.embed_tokens.weight")
    number = 0
    for tensor in header.values():
        size = 1
        for extent in tensor["shape"]:
            size *= extent
        number += size
    kinds = {tensor["dtype"] for tensor in header.values()}
    return ("bfloat16" if kinds == {"BF16"} else "float32"), number
