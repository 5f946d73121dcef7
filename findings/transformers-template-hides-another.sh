#!/usr/bin/env bash
# transformers 5.24.0: a tokenizer with a chat template in tokenizer_config.json gets a second one,
# additional_chat_templates/tool_use.jinja.
#
# Guess: chats go on as before, and tools take the new one.
# Seen: the first is gone, also under its name. A chat without tools raises ValueError.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"
"$work/venv/bin/pip" install -q tokenizers==0.23.3 transformers==5.24.0 jinja2==3.1.6
cd "$work"
"$work/venv/bin/python" - <<'PYTHON'
import json
from pathlib import Path

from tokenizers import Tokenizer, models
from transformers import AutoTokenizer

folder = Path("model")
(folder / "additional_chat_templates").mkdir(parents=True)
Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).save(str(folder / "tokenizer.json"))
config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": "plain"}
(folder / "tokenizer_config.json").write_text(json.dumps(config))
chat = [{"role": "user", "content": "a"}]
assert AutoTokenizer.from_pretrained(folder).apply_chat_template(chat, tokenize=False) == "plain"
(folder / "additional_chat_templates" / "tool_use.jinja").write_text("with tools")
tokenizer = AutoTokenizer.from_pretrained(folder)
print(tokenizer.chat_template)
assert tokenizer.chat_template == {"tool_use": "with tools"}
try:
    tokenizer.apply_chat_template(chat, tokenize=False)
except ValueError as error:
    print(error)
    assert "no default specified" in str(error)
else:
    raise AssertionError("a chat without tools is rendered")
PYTHON
