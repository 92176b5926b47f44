"""Where the bundled pair lies: paths only, nothing is loaded here.

A 5.2 M parameter target and a 0.46 M parameter draft (Qwen3 architecture, one tokenizer of 2,048 tokens), trained on
the sources of the Python standard library by `scripts/train_pair.py`. They continue Python code; they do not chat.
"""

from pathlib import Path
from typing import Final

TARGET: Final = Path(__file__).parent / "target"
DRAFT: Final = Path(__file__).parent / "draft"
