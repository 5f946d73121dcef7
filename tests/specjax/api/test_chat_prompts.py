"""Chats as prompts, with arguments of the template."""

import types

import pytest

import specjax
from specjax.api.requests import as_list, token_ids

MESSAGES = [{"role": "user", "content": "hi"}]


class _Tokenizer:
    def encode_chat(self, messages, **arguments):
        if arguments.get("padding"):
            raise ValueError("padding=True is not available")
        return [len(messages), len(arguments)]


TARGET = types.SimpleNamespace(
    tokenizer=_Tokenizer(), name="a model", config=types.SimpleNamespace(vocab_size=9)
)


def test_a_chat_stands_where_a_prompt_does():
    chat = specjax.Chat(MESSAGES, tools=[], enable_thinking=False)
    assert as_list(chat) == [chat]
    assert as_list([chat, MESSAGES, "text"]) == [chat, MESSAGES, "text"]
    assert as_list(MESSAGES) == [MESSAGES]
    assert token_ids(TARGET, chat) == [1, 2]
    assert token_ids(TARGET, MESSAGES) == token_ids(TARGET, specjax.Chat(MESSAGES)) == [1, 0]
    assert repr(chat) == f"Chat({MESSAGES!r}, tools=[], enable_thinking=False)"


def test_what_a_chat_cannot_be_is_an_error_of_its_prompt():
    with pytest.raises(ValueError, match="padding=True is not available"):
        token_ids(TARGET, specjax.Chat(MESSAGES, padding=True))
    without = types.SimpleNamespace(tokenizer=None, name="a model", config=TARGET.config)
    with pytest.raises(ValueError, match="'a model' has no tokenizer"):
        token_ids(without, specjax.Chat(MESSAGES))
    with pytest.raises(ValueError, match=r"a prompt is 5 .*a Chat"):
        token_ids(TARGET, 5)
