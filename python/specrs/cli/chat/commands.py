"""Commands of a chat, such as `/reset`: their effect on the conversation, and their replies."""

from __future__ import annotations

from specrs.cli.chat.conversation import Conversation
from specrs.errors import did_you_mean

HELP = {
    "/reset": "forget the conversation, and keep the system prompt",
    "/system [TEXT]": "set the system prompt, for later turns; without TEXT, show it",
    "/speculation [on, off]": "turn drafts on or off; without a word, say which",
    "/help": "this list",
    "/exit": "end the chat; so do Ctrl-D and the end of the input",
}
"""Commands and their arguments, with a description for the help."""
NAMES = tuple(usage.split()[0] for usage in HELP)
_KEYS = {
    "Ctrl-C": "end the answer, or drop the line that you type",
    "\\ at the end of a line": "the text goes on in the next line",
}


def obey(conversation: Conversation, line: str) -> str | None:
    """Execute the command `line`, which starts with `/`. Return the reply to the user; None: the chat ends.

    Mutates `conversation`.
    """
    name, _, rest = line.strip().partition(" ")
    rest = rest.strip()
    match name:
        case "/exit":
            return None
        case "/help":
            return "\n".join(f"{left:<24} {right}" for left, right in (HELP | _KEYS).items())
        case "/reset":
            conversation.reset()
            return "The conversation is empty."
        case "/system":
            if rest:
                conversation.system = rest
                return "The system prompt is set."
            return "No system prompt is set." if conversation.system is None else conversation.system
        case "/speculation":
            return _speculation(conversation, rest)
    return f"{name}: there is no such command{did_you_mean(name, NAMES)}; /help lists the commands"


def _speculation(conversation: Conversation, word: str) -> str:
    if word not in ("", "on", "off"):
        return f"/speculation {word}: must be on or off"
    if word == "on" and not conversation.can_speculate:
        return "/speculation on: the engine has no drafter; start the chat without --no-speculation"
    if word:
        conversation.speculation = word == "on"
    return f"Drafts are {'on' if conversation.speculation else 'off'}."
