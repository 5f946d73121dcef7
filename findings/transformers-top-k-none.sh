#!/usr/bin/env bash
# transformers 5.24.0, torch 2.13.0. A tiny random model of 128 tokens.
#
# Guess: generate(do_sample=True) draws from all 128 tokens, as vLLM does; and top_k=None says so in
# any place.
# Seen: it draws from 50. top_k=None as an argument lifts that; the same None in a GenerationConfig
# does not: it counts as unset, and unset is 50. Write top_k=0.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"
"$work/venv/bin/pip" install -q torch==2.13.0 transformers==5.24.0
"$work/venv/bin/python" - <<'PYTHON'
import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

size = dict(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
model = LlamaForCausalLM(LlamaConfig(vocab_size=128, pad_token_id=0, **size)).eval()
prompt = torch.tensor([[5]])


def candidates(**settings):
    """Returns how many tokens may be drawn."""
    out = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=1,
        output_scores=True,
        return_dict_in_generate=True,
        **settings,
    )
    return int(torch.isfinite(out.scores[0]).sum())


in_config = lambda **values: candidates(generation_config=GenerationConfig(do_sample=True, **values))
found = {
    "not given": candidates(do_sample=True),
    "argument None": candidates(do_sample=True, top_k=None),
    "config None": in_config(top_k=None),
    "config 0": in_config(top_k=0),
}
print(found)
assert list(found.values()) == [50, 128, 50, 128]
PYTHON
