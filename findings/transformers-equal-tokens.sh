#!/usr/bin/env bash
# transformers 5.24.0, torch 2.13.0. 64 tokens with equal logits, as after rounding to 16 bits.
#
# Guess: top_k=2 keeps 2 of them, and top_p=0.05 all 64, since no one is likelier than another.
# Seen: the other way round. top_k keeps all 64: it compares with the second largest logit. top_p
# keeps 4: it cuts a sorted list, wherever the sort put them.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"
"$work/venv/bin/pip" install -q torch==2.13.0 transformers==5.24.0
"$work/venv/bin/python" - <<'PYTHON'
import torch
from transformers.generation.logits_process import TopKLogitsWarper, TopPLogitsWarper

PROMPT, LOGITS = torch.tensor([[1]]), torch.zeros(1, 64)
num_kept = lambda warper: int(torch.isfinite(warper(PROMPT, LOGITS)).sum())
found = num_kept(TopKLogitsWarper(2)), num_kept(TopPLogitsWarper(0.05))
print("top_k=2 keeps %d, top_p=0.05 keeps %d" % found)
assert found == (64, 4)
PYTHON
