"""The tokenizer in a GGUF file. Byte-level BPE is built here, others by transformers.

A file says by a name how text is split before merges, and a tokenizer that splits otherwise gives other ids without a
word: an unknown name is refused.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from specrs.errors import CheckpointError, invalid, short
from specrs.models.gguf.file import GGUFFile, open_gguf

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _REST
_QWEN2 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _REST
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT2, _DIGITS = "gpt2", "digits"
"""ByteLevel's own expression; each digit by itself before it."""
SPLITS = {
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "dbrx", "smaug-bpe"), _LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _QWEN2),
    "tekken": _TEKKEN,
    **dict.fromkeys(("gpt-2", "phi-2", "olmo", "jais", "mpt"), _GPT2),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), _DIGITS),
}
"""How text is split before merges, by `tokenizer.ggml.pre`."""
_WHOLE_WORDS = {"llama3", "llama-v3", "llama-bpe", "falcon3", "tekken"}
"""Those that look a word up before they merge its parts, and put BOS before a text where the file does not say."""
_CONTROL, _USER_DEFINED = 3, 4
"""Types of tokens that text is searched for as a whole: special ones, and others."""
_ROLES = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


def gguf_tokenizer(path: Path) -> PreTrainedTokenizerBase:
    """The file's tokenizer as transformers' object. Raises CheckpointError for one that is not known or not there."""
    file = open_gguf(path)
    kind = file.metadata.get("tokenizer.ggml.model")
    if kind == "llama":
        from transformers import AutoTokenizer

        try:
            made: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
                str(path.parent), gguf_file=path.name, trust_remote_code=False, local_files_only=True
            )
        except Exception as fault:  # it expects every field, and each of its own type
            reason = f"{type(fault).__name__}: {fault}".splitlines()[0]
            raise CheckpointError(f"{path}: its tokenizer (llama) could not be read: {reason}") from fault
        return made
    if kind != "gpt2":
        raise _refused(file, "tokenizer.ggml.model", kind, "'gpt2' (byte-level BPE) or 'llama' (sentencepiece)")
    from transformers import PreTrainedTokenizerFast

    tokens, template = _list(file, "tokens"), file.metadata.get("tokenizer.chat_template")
    if not tokens:
        raise _refused(file, "tokenizer.ggml.tokens", tokens, "a list of at least one string")
    if template is not None and not isinstance(template, str):
        raise _refused(file, "tokenizer.chat_template", template, "a string")
    roles = {role: _token(file, tokens, name) for role, name in _ROLES.items()}
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=_byte_level(file, tokens),
        clean_up_tokenization_spaces=False,
        chat_template=template,
        **{role: token for role, token in roles.items() if token is not None},
    )


def _byte_level(file: GGUFFile, tokens: list[str]) -> Tokenizer:
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

    name = file.metadata.get("tokenizer.ggml.pre")
    if not isinstance(name, str) or name not in SPLITS:
        raise _refused(file, "tokenizer.ggml.pre", name, ", ".join(SPLITS))
    vocab = {token: i for i, token in enumerate(tokens)}
    if len(vocab) < len(tokens):
        raise CheckpointError(f"{file.path}: tokenizer.ggml.tokens has the same token twice")
    merges: list[tuple[str, str]] = []
    for i, merge in enumerate(_list(file, "merges")):
        left, _, right = merge.partition(" ")
        if not {left, right, left + right} <= vocab.keys():
            at = f"tokenizer.ggml.merges[{i}]={short(merge)}"
            raise CheckpointError(f"{file.path}: {at}: no tokens of the vocabulary")
        merges.append((left, right))
    split = SPLITS[name]
    made = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=name in _WHOLE_WORDS))
    bytes_alone = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split in (_GPT2, _DIGITS))
    steps: dict[str, Any] = {
        _GPT2: [bytes_alone],
        _DIGITS: [pre_tokenizers.Digits(individual_digits=True), bytes_alone],
    }
    made.pre_tokenizer = pre_tokenizers.Sequence(
        steps.get(split) or [pre_tokenizers.Split(Regex(split), "isolated"), bytes_alone]
    )
    made.decoder = decoders.ByteLevel()
    kinds = file.metadata.get("tokenizer.ggml.token_type") or [0] * len(tokens)
    if not isinstance(kinds, list) or len(kinds) != len(tokens):
        raise _refused(file, "tokenizer.ggml.token_type", kinds, f"a list of {len(tokens)} numbers, one a token")
    for token, kind in zip(tokens, kinds, strict=True):
        if kind in (_CONTROL, _USER_DEFINED):
            made.add_tokens([AddedToken(token, normalized=False, special=kind == _CONTROL)])
    bos = _token(file, tokens, "bos")
    adds = file.metadata.get("tokenizer.ggml.add_bos_token", name in _WHOLE_WORDS)
    if type(adds) is not bool:
        raise _refused(file, "tokenizer.ggml.add_bos_token", adds, "true or false")
    if adds and bos is not None:
        made.post_processor = processors.TemplateProcessing(
            single=[bos, "$A"], pair=[bos, "$A", bos, "$B"], special_tokens=[(bos, vocab[bos])]
        )
    return made


def _list(file: GGUFFile, name: str) -> list[str]:
    value = file.metadata.get(f"tokenizer.ggml.{name}")
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise _refused(file, f"tokenizer.ggml.{name}", value, "a list of strings")
    return value


def _token(file: GGUFFile, tokens: list[str], role: str) -> str | None:
    field = f"tokenizer.ggml.{role}_token_id"
    value = file.metadata.get(field)
    if value is None:
        return None
    if type(value) is not int or not 0 <= value < len(tokens):
        raise _refused(file, field, value, f"an id below {len(tokens)}")
    return tokens[value]


def _refused(file: GGUFFile, field: str, value: object, allowed: str) -> CheckpointError:
    also = "; or pass tokenizer=..., the folder or hub id of the model that the file was made of"
    return invalid(CheckpointError, field, value, f"not implemented; allowed: {allowed}{also} ({file.path})")
