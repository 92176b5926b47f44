"""Checkpoints that score texts, with Qwen3's special tokens, and embedding models. Holds no tests."""

import json
from pathlib import Path

from checkpoints import make_checkpoint, write_tokenizer

VOCAB = 400
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"


def make_reranker(folder: Path) -> Path:
    """Write a random checkpoint whose tokenizer has the tokens of Qwen3-Reranker's prompt."""
    make_checkpoint(folder, vocab=VOCAB, seed=4, max_position_embeddings=2048)
    write_tokenizer(folder, VOCAB, padding=0)
    return with_answers(folder)


def with_answers(folder: Path, *, chatml: bool = True) -> Path:
    """Give the tokenizer in `folder` single tokens for the answers, and Qwen3's special tokens if `chatml`. The tokens
    that had its last eight ids are removed."""
    content = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    for token in list(vocabulary):
        if vocabulary[token] >= VOCAB - 8:
            del vocabulary[token]
    content["model"]["merges"] = [
        merge
        for merge in content["model"]["merges"]
        if "".join(merge if isinstance(merge, list) else merge.split()) in vocabulary
    ]
    added = ["yes", "no", *(("<|im_start|>", "<|im_end|>", "<think>", "</think>") if chatml else ())]
    for at, token in enumerate(added):
        content["added_tokens"].append(
            {
                "id": VOCAB - 1 - at, "content": token, "special": False, "single_word": False,
                "lstrip": False, "rstrip": False, "normalized": False,
            }
        )  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(content))
    return folder


def question(query: str, document: str, instruction: str = INSTRUCTION) -> str:
    """Return the prompt of Qwen3-Reranker, as its authors print it."""
    return (
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
        'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
        f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )


def as_embedding(source: Path, folder: Path, mode: str = "lasttoken", last: str = "Normalize") -> Path:
    """Link the files of the checkpoint `source` into `folder`, and add the files of sentence-transformers. `mode` is
    the pooling, and `last` the type of the last module."""
    folder.mkdir()
    for file in source.iterdir():
        (folder / file.name).symlink_to(file)
    kinds = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Last", last)]
    modules = [{"path": path, "type": f"sentence_transformers.models.{kind}"} for path, kind in kinds]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    modes = {f"pooling_mode_{name}": name == mode for name in ("cls_token", "mean_tokens", "lasttoken")}
    (folder / "1_Pooling/config.json").write_text(json.dumps({"word_embedding_dimension": 96, **modes}))
    return folder
