"""Runs a pass of a native model, and of everything it may be loaded with, in numpy alone. Holds no tests.

Run as a script it blocks torch, triton and transformers, runs the cases of a JSON file, and writes their logits.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

BLOCKED = ("torch", "triton", "transformers")
TOKENS = [3, 1, 4, 1, 5, 9, 2, 6]
BLOCK_SIZE = 4


def logits_of(case: dict[str, Any]) -> Any:
    """Return the logits of a prompt, of rows of an adapter, or of a head's first drafts, `[8, ids]` float32.

    A case has `source`. It may have `load` (arguments of `load_native`), `exact` (whether numbers that passes cannot
    read keep their dtype), `kv` (FP8 dtype of the cache), `head` and `lora` (folders), and `mtp` (whether the source
    has its own head).
    """
    import numpy as np
    from specrs.backends.cpu.eagle3 import load_eagle3
    from specrs.backends.cpu.mtp import load_mtp
    from specrs.backends.cpu.weights import Rounding, load_native
    from specrs.drafters.eagle3.native import NativeEagle3Head
    from specrs.drafters.mtp.files import open_mtp
    from specrs.drafters.mtp.native import NativeMtpHead
    from specrs.models.kv_dtypes import CODES
    from specrs.models.lora_loader import load_lora
    from specrs.models.native_inputs import NativeInputs

    kv = case.get("kv")
    codes, rounding = None if kv is None else CODES[kv], Rounding(exact=case.get("exact", True))
    model = load_native(case["source"], **case.get("load", {}), cache_dtype=codes, rounding=rounding)
    count = len(TOKENS)
    table = np.array([[2, 0, 1]])
    positions = np.arange(count)
    slots = table[0, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
    adapters = []
    if "lora" in case:
        adapter = load_lora(Path(case["lora"]), model, name="a", lora_int_id=1, max_lora_rank=8)
        adapters = [(adapter, [1, 3, 4, 7])]
    inputs = NativeInputs(np.array(TOKENS), positions, slots, np.array([0, count]), table, adapters=adapters)
    if "head" not in case and "mtp" not in case:
        return model.compute_logits(model.forward(inputs, model.allocate_cache(3, BLOCK_SIZE)).final)
    if "mtp" in case:
        head: Any = load_mtp(open_mtp(case["source"], model, revision=None, size=30, counts=None), model)
    else:
        head = load_eagle3(case["head"], model)
    assert isinstance(head, NativeEagle3Head | NativeMtpHead)
    states = model.forward(inputs, model.allocate_cache(3, BLOCK_SIZE), head.aux_layer_ids).entries
    assert states is not None
    _, final = head.forward(inputs, head.fuse(states), head.allocate_cache(3, BLOCK_SIZE))
    return head.compute_logits(final)


def main(cases: str, out: str) -> None:
    """Write the logits of each case to `out`, and which of the blocked packages each imported."""
    sys.modules.update(dict.fromkeys(BLOCKED))  # type: ignore[arg-type]
    import numpy as np

    found, imported = {}, {}
    for name, case in json.loads(Path(cases).read_text()).items():
        found[name] = logits_of(case)
        imported[name] = [package for package in (*BLOCKED, "gguf") if sys.modules.get(package) is not None]
    np.savez(out, **found)
    Path(out).with_suffix(".json").write_text(json.dumps(imported))


if __name__ == "__main__":
    main(*sys.argv[1:])
