#!/usr/bin/env bash
# transformers 5.24.0, torch 2.13.0. Prompt lookup: drafts that are copied from the text before.
#
# Guess: of several places that match the last tokens equally well the latest is copied, since what
# is written now is most like what was written last.
# Seen: the earliest is, and the draft ends where the text ends. vLLM's n-gram drafter does the same.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"
"$work/venv/bin/pip" install -q torch==2.13.0 transformers==5.24.0
"$work/venv/bin/python" - <<'PYTHON'
import torch
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

early, late, match = [9, 8, 7], [5, 6, 4], [1, 2]
lookup = PromptLookupCandidateGenerator(
    None, num_output_tokens=3, max_matching_ngram_size=2, max_length=100
)


def draft(text):
    return lookup.get_candidates(torch.tensor([text]))[0][0, len(text) :].tolist()


print(draft(match + early + match + late + match))
assert draft(match + early + match + late + match) == early
assert draft(match + [3] + match) == [3] + match  # two of three: no token past the end
PYTHON
