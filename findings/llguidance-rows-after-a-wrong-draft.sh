#!/usr/bin/env bash
# llguidance 1.9.1. Masks of the tokens that a grammar allows, one row per token of a draft.
#
# Guess: rows after a draft token that the grammar forbids allow nothing.
# Seen: they are not written. A new mask allows every token, so these rows do too; in a mask that is
# used again they hold what an earlier step left there.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"
"$work/venv/bin/pip" install -q llguidance==1.9.1 numpy==2.4.6
"$work/venv/bin/python" - <<'PYTHON'
import llguidance.numpy
import numpy as np
from llguidance import LLExecutor, LLMatcher, LLTokenizer

tokenizer, executor = LLTokenizer("byte"), LLExecutor()
matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_regex("ab+c"))
draft = tokenizer.tokenize_str("axb")  # x may not follow a


def allowed_per_row(mask):
    llguidance.numpy.fill_next_token_bitmask_par_with_draft_tokens(
        executor, [(matcher, 0, draft)], mask
    )
    return [int(np.unpackbits(row.view(np.uint8)).sum()) for row in mask]


mask = llguidance.numpy.allocate_token_bitmask(4, tokenizer.vocab_size)
everything = 32 * mask.shape[1]
print(allowed_per_row(mask), allowed_per_row(np.zeros_like(mask)))
assert allowed_per_row(mask) == [1, 1, everything, everything]
assert allowed_per_row(np.zeros_like(mask)) == [1, 1, 0, 0]
PYTHON
