"""Prompts of the demo for chat models: questions, and tasks whose answers repeat their input. Only texts."""

from typing import Final

_NOTES = (
    "The library opens at nine in the morning and closes at six in the evening. On Fridays it stays open until eight. "
    "Visitors may borrow up to five books for four weeks. Books can be renewed twice, unless another visitor waits for "
    "them. The reading room on the second floor is quiet, and the one on the ground floor is for groups."
)
_CODE = """def mean(values):
    total = 0
    for value in values:
        total += value
    return total / len(values)
"""

CHATS: Final[tuple[str, ...]] = (
    "What is the capital of France? Tell me two facts about it.",
    f"Repeat this text word for word:\n\n{_NOTES}",
    "Write three short sentences about the sea.",
    f"Replace 'library' by 'archive' in this text and write the whole text:\n\n{_NOTES}",
    f"Rename the variable total to s in this function and write the whole function:\n\n{_CODE}",
    "List the days of the week, each on a line of its own, three times.",
    f"Which rules do visitors have to know?\n\n{_NOTES}",
    "How do plants make use of sunlight? Answer in four sentences.",
    f"Add a docstring to this function and write the whole function:\n\n{_CODE}",
    "Give me a recipe for a simple tomato soup, with a list of ingredients.",
)
"""User turns, each of at most 120 tokens of a common tokenizer."""
