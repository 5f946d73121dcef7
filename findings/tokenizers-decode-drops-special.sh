#!/usr/bin/env bash
# tokenizers 0.23.3, transformers 5.24.0, the same tokenizer in both.
#
# Guess: decode() of the same ids gives the same text.
# Seen: tokenizers leaves special tokens out, transformers writes them, each unless told. A stop
# string with a special token is found in one text and never in the other.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"
"$work/venv/bin/pip" install -q tokenizers==0.23.3 transformers==5.24.0
"$work/venv/bin/python" - <<'PYTHON'
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

plain = Tokenizer(models.WordLevel({"a": 0, "b": 1, "<eos>": 2}, unk_token="a"))
plain.pre_tokenizer = pre_tokenizers.Whitespace()
plain.add_special_tokens(["<eos>"])
wrapped = PreTrainedTokenizerFast(tokenizer_object=plain, eos_token="<eos>")
texts = plain.decode([0, 1, 2]), wrapped.decode([0, 1, 2])
print(texts)
assert texts == ("a b", "a b <eos>")
PYTHON
