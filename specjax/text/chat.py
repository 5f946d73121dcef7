"""A chat as a prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


class Chat:
    """A prompt of chat messages with arguments of the chat template.

    It stands wherever a prompt does: `generate(target, [Chat(messages, tools=[now])])`. A list of
    messages is the same without arguments.
    """

    def __init__(self, messages: Sequence[Mapping[str, Any]], **arguments: Any):
        """Takes messages, and arguments as of `Tokenizer.encode_chat`: tools, documents,
        chat_template, add_generation_prompt, continue_final_message, variables."""
        self.messages = messages
        self.arguments = arguments

    def __repr__(self) -> str:
        more = "".join(f", {name}={value!r:.60}" for name, value in self.arguments.items())
        return f"Chat({self.messages!r:.200}{more})"
