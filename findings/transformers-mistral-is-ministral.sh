#!/usr/bin/env bash
# transformers 5.24.0: a config.json of model_type "mistral" that says layer_types.
#
# Guess: AutoConfig gives a MistralConfig, and layer_types say which layers slide.
# Seen: it is a MinistralConfig. Code that looks for model_type "mistral" does not find it, though
# the file says so.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"
"$work/venv/bin/pip" install -q transformers==5.24.0
cd "$work"
"$work/venv/bin/python" - <<'PYTHON'
import json
from pathlib import Path

from transformers import AutoConfig

folder = Path("model")
folder.mkdir()
sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 16}
types = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}
found = []
for more in ({}, types):
    (folder / "config.json").write_text(json.dumps({"model_type": "mistral"} | sizes | more))
    config = AutoConfig.from_pretrained(folder)
    found.append((type(config).__name__, config.model_type))
print(found)
assert found == [("MistralConfig", "mistral"), ("MinistralConfig", "ministral")]
PYTHON
