"""Greedy output of the embedded target equals that of transformers."""

import json

import pytest
from goldens import make_demo_goldens as goldens

import specjax
from specjax.config.sampling import SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=goldens.NEW_TOKENS)


def check(texts):
    out = specjax.generate(
        "demo", [text["prompt"] for text in texts], drafter="demo", sampling=GREEDY
    )
    for completion, text in zip(out, texts, strict=True):
        assert completion.token_ids == text["output"]


@pytest.mark.full
def test_greedy_output_equals_the_golden_of_transformers():
    golden = json.loads(goldens.GOLDEN.read_text())
    assert golden["weights_sha256"] == goldens.weights_digest(), (
        "the embedded weights have changed; run tests/goldens/make_demo_goldens.py"
    )
    assert len(golden["texts"]) == 20
    check(golden["texts"])


@pytest.mark.reference
def test_greedy_output_equals_transformers():
    check(goldens.transformers_outputs())
