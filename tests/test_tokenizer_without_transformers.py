"""Tokenizers are read and chats are rendered without transformers and torch, from folders and from GGUF files."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from checkpoints import make_checkpoint
from gguf_files import write_gguf, write_metadata
from sentencepiece_files import corpus, metadata_of, train
from specrs import pair
from specrs.config import EngineConfig
from specrs.engine.tokenizer import load_tokenizer
from specrs.speculative_config import SpeculativeConfig
from specrs.tokenizer import Tokenizer
from tokenizer_files import copy_of_pair, with_bos

TEXTS = ["def f(x):\n    return '日本 é 🎉'", " a<|endoftext|> b", "the cat sat<s> on\n\n  12345", ""]
CHAT = [{"role": "system", "content": "one"}, {"role": "user", "content": "two"}]
_SCRIPT = """
import json, sys
sys.modules |= dict.fromkeys(["torch", "transformers", "triton"])
from specrs.config import EngineConfig
from specrs.speculative_config import SpeculativeConfig
from specrs.engine.tokenizer import load_tokenizer
from specrs.tokenizer import Tokenizer

given, found = json.loads(sys.argv[1]), {}
for source in given["sources"]:
    tokenizer = Tokenizer(source)
    ids = [tokenizer.encode(text) for text in given["texts"]]
    texts = [tokenizer.decode(one) for one in ids] + [tokenizer.decoder.decode(one) for one in ids]
    chat = tokenizer.render_chat(given["chat"], chat_template=given["template"])
    found[source] = [ids, texts, chat, tokenizer.eos_token_id]
draft = SpeculativeConfig(model=given["draft"], num_speculative_tokens=2)
loaded = load_tokenizer(EngineConfig(model=given["target"], speculative_config=draft))
print(json.dumps([found, loaded.vocab_size, loaded.render_chat(given["chat"])]))
"""
TEMPLATE = (
    "{% for m in messages %}{{ m | tojson }}{% generation %}{{ strftime_now('%%') }}{% endgeneration %}{% endfor %}"
)


def test_every_kind_of_tokenizer(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source", vocab=400, layers=1)
    gguf = {"tokenizer.chat_template": "{{ messages[0].content }}"}
    folders = [Path(pair.TARGET), copy_of_pair(tmp_path / "copy"), with_bos(tmp_path / "bos"), source]
    files = [write_gguf(source, tmp_path / "bytes.gguf", **{key.replace(".", "__"): gguf[key] for key in gguf})]
    files.append(write_metadata(tmp_path / "pieces.gguf", metadata_of(train(corpus())) | gguf))
    sources = [str(path) for path in (*folders, *files)]
    given = {"sources": sources, "texts": TEXTS, "chat": CHAT, "template": TEMPLATE}
    given |= {"target": str(pair.TARGET), "draft": str(pair.DRAFT)}
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT, json.dumps(given)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    found, vocab_size, rendered = json.loads(done.stdout)
    for name in sources:
        tokenizer = Tokenizer(name)
        ids = [tokenizer.encode(text) for text in TEXTS]
        texts = [tokenizer.decode(one) for one in ids] * 2
        chat = tokenizer.render_chat(CHAT, chat_template=TEMPLATE)
        assert found[name] == [ids, texts, chat, tokenizer.eos_token_id]
    draft = SpeculativeConfig(model=str(pair.DRAFT), num_speculative_tokens=2)
    loaded = load_tokenizer(EngineConfig(speculative_config=draft))
    assert loaded is not None
    assert (vocab_size, rendered) == (loaded.vocab_size, loaded.render_chat(CHAT))


def test_the_server_renders_without_transformers() -> None:
    script = """
import sys
sys.modules |= dict.fromkeys(["torch", "transformers"])
from specrs.server import template_worker
template_worker.main()
"""
    chat = Tokenizer(str(pair.TARGET)).chat_arguments(CHAT)
    lines = "\n".join(map(json.dumps, [{"memory": 2**31, "seconds": 5.0}, chat])) + "\n"
    done = subprocess.run(
        [sys.executable, "-c", script], input=lines, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout.splitlines() == ["{}", json.dumps({"text": "one\ntwo", "warnings": []})], done.stderr
