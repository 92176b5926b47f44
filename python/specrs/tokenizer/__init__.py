"""Tokenizers of checkpoints: text to ids, chats to text, and whether two tokenizers are the same. Runs no model."""

from specrs.tokenizer.ends import end_ids
from specrs.tokenizer.pairs import check_same_tokenizer, shared_ids, unknown_id
from specrs.tokenizer.text import Tokenizer

__all__ = ["Tokenizer", "check_same_tokenizer", "end_ids", "shared_ids", "unknown_id"]
