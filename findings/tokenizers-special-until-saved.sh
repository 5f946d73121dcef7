#!/usr/bin/env bash
# tokenizers 0.23.3: a special token that is added again as one that is not special.
#
# Guess: from then on decode() writes it, since its flag says so.
# Seen: the flag is false and decode() leaves it out. Once saved and loaded, decode() writes it.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"
"$work/venv/bin/pip" install -q tokenizers==0.23.3
"$work/venv/bin/python" - <<'PYTHON'
from tokenizers import AddedToken, Tokenizer, models

tokenizer = Tokenizer(models.WordLevel({"a": 0, "<call>": 1}, unk_token="a"))
for special in (True, False):
    tokenizer.add_tokens([AddedToken("<call>", special=special)])
loaded = Tokenizer.from_str(tokenizer.to_str())
flags = [each.get_added_tokens_decoder()[1].special for each in (tokenizer, loaded)]
texts = [each.decode([0, 1], skip_special_tokens=True) for each in (tokenizer, loaded)]
print(flags, texts)
assert flags == [False, False]
assert texts == ["a", "a <call>"]
PYTHON
