"""Tokenizers of checkpoints: text to ids, chats to text, and whether two tokenizers are the same. Runs no model."""

from specrs.tokenizer.load import end_ids, load_tokenizer
from specrs.tokenizer.pairs import check_same_tokenizer, shared_ids, unknown_id
from specrs.tokenizer.text import Tokenizer

__all__ = ["Tokenizer", "check_same_tokenizer", "end_ids", "load_tokenizer", "shared_ids", "unknown_id"]
