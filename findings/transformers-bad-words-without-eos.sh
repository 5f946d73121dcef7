#!/usr/bin/env bash
# transformers 5.24.0, torch 2.13.0.
#
# Guess: bad_words_ids=[[eos], [5]] keeps a text from ending, as the same list does in vLLM.
# Seen: token 5 is forbidden, the end-of-text token is not: it is taken out of the list, without a
# warning. Alone in the list it leaves nothing forbidden.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"
"$work/venv/bin/pip" install -q torch==2.13.0 transformers==5.24.0
"$work/venv/bin/python" - <<'PYTHON'
import torch
from transformers.generation.logits_process import NoBadWordsLogitsProcessor

EOS, PROMPT, LOGITS = 7, torch.tensor([[1, 2]]), torch.zeros(1, 8)


def forbidden(words):
    processed = NoBadWordsLogitsProcessor(words, eos_token_id=EOS)(PROMPT, LOGITS)
    return torch.isinf(processed)[0].nonzero().flatten().tolist()


print(forbidden([[EOS], [5]]))
assert forbidden([[EOS], [5]]) == [5]
assert forbidden([[EOS, 5], [2, EOS]]) == [EOS]  # in a sequence it stays
PYTHON
