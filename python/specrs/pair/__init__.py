"""Paths of the bundled pair and of the bundled hybrid. Loads nothing.

The pair is a target of 5.2 M parameters and a draft model of 0.46 M (Qwen3 architecture, one tokenizer of 2,048
tokens). Both were trained on the sources of the Python standard library by `scripts/train_pair.py`. They continue
Python code; they do not chat.

With them comes an EAGLE-3 head of the target, 1.0 M parameters with 1,280 ids to draft. It was trained by
`scripts/train_eagle3.py --num-prompts 1024 --layers 1 3 5 --draft-vocab-size 1280 --intermediate-size 384 --num-heads 2
--num-kv-heads 1 --passes 4 --steps 580 --lr 2e-3`.

The hybrid is a target of another architecture, Qwen3.5: six layers with a gated delta net and two with attention, 3.5 M
parameters, and an MTP head of 0.41 M parameters that drafts for it. Tokenizer and text are those of the pair. It was
trained by `scripts/train_hybrid.py`.
"""

from pathlib import Path
from typing import Final

TARGET: Final = Path(__file__).parent / "target"
DRAFT: Final = Path(__file__).parent / "draft"
EAGLE3: Final = Path(__file__).parent / "eagle3"
HYBRID: Final = Path(__file__).parent / "hybrid"
