#!/usr/bin/env bash
# llguidance 1.9.1. What a JSON schema allows while a text is written under it.
#
# Guess: each document that is valid under the schema can be written.
# Seen: declared keys come in the schema's order only, and undeclared ones, which are allowed, only
# after them. An integer may not be written as 1.0, which the schema language calls an integer.
# So a forced answer cannot have its keys in the order in which the model would give them.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"
"$work/venv/bin/pip" install -q llguidance==1.9.1
"$work/venv/bin/python" - <<'PYTHON'
from llguidance import LLMatcher, LLTokenizer

tokenizer = LLTokenizer("byte")
integer = {"type": "integer"}
schema = {"type": "object", "properties": {"a": integer, "b": integer}, "required": ["a", "b"]}


def can_be_written(schema, text):
    matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_json_schema(schema))
    token_ids = tokenizer.tokenize_str(text)
    return matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting()


found = {
    text: can_be_written(schema, text)
    for text in (
        '{"a":1,"b":2}',
        '{"b":2,"a":1}',
        '{"a":1,"b":2,"c":3}',
        '{"c":3,"a":1,"b":2}',
        '{"a":1.0,"b":2}',
    )
}
print(found)
assert list(found.values()) == [True, False, True, False, False]
PYTHON
