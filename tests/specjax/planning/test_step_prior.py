"""What a step is expected to take before any was measured."""

import dataclasses
import json
import os
import time

import pytest

from specjax.decode.bucket import Bucket
from specjax.paged.work import Block
from specjax.planning import processor_speed
from specjax.planning.roofline import ModelWork
from specjax.planning.step_prior import (
    LAUNCHES_PER_DRAFT,
    LAUNCHES_PER_LAYER,
    LAUNCHES_PER_STEP,
    Accelerator,
    ProcessorSpeed,
    step_prior,
)
from specjax.policy.step_cost import StepCosts
from specjax.runtime import compilation_cache

SPEED = ProcessorSpeed(1e10, ((1, 1.0), (2, 1.4), (4, 2.0)), 1e-6)
TARGET = ModelWork(weight_bytes=1e8, token_flops=5e7, context_bytes=1e4, context_flops=1e3)
DRAFT = ModelWork(weight_bytes=1e7, token_flops=5e6, context_bytes=1e3, context_flops=1e2)


@pytest.mark.parametrize(("tokens", "factor"), [(1, 1), (2, 1.4), (3, 2.0), (8, 4.0)])
def test_products_with_more_tokens(tokens, factor):
    assert SPEED.factor(tokens) == pytest.approx(factor)


def test_a_step_by_hand():
    prior = step_prior(SPEED, (TARGET, 10), [(DRAFT, 2)])
    launches = LAUNCHES_PER_STEP + 10 * LAUNCHES_PER_LAYER
    plain = (1e8 + 2 * 50 * 1e4) / 1e10  # two rows of 50 tokens each
    plain += 1e8 * 0.4 / 1e10  # two tokens at once
    assert prior(Bucket(2, 0), 100) == pytest.approx(plain + 1e-6 * launches)
    verify = (1e8 * 2.0 + 2 * 50 * 1e4) / 1e10
    draft = (1e7 * 1.4 + 2 * 50 * 1e3) / 1e10
    draft += 1e-6 * (2 * LAUNCHES_PER_LAYER + LAUNCHES_PER_DRAFT)
    expected = verify + 1e-6 * launches + draft
    assert prior(Bucket(2, 1), 100) == pytest.approx(expected)


def test_an_accelerator_goes_by_its_roofline():
    class Peaks:
        bytes_per_s, flops_per_s = 1e12, 1e14

    prior = step_prior(Accelerator(Peaks(), launch_s=0.0), (TARGET, 10), [])
    assert prior(Bucket(1, 0), 0) == pytest.approx(1e8 / 1e12)
    assert prior(Bucket(1, 4), 0) == pytest.approx(1e8 / 1e12)  # bound by memory
    assert prior(Bucket(999, 1), 0) == pytest.approx(1998 * 5e7 / 1e14)


def test_a_block_has_as_many_tokens_as_k_takes():
    block = dataclasses.replace(DRAFT, block=Block(-1, per_draft=1))
    masks, without = (step_prior(SPEED, (TARGET, 10), drafters) for drafters in ([(block, 2)], []))
    launches = 1e-6 * 2 * LAUNCHES_PER_LAYER
    for k, factor in ((2, 1.0), (3, 1.4), (4, 2.0)):
        drafting = masks(Bucket(1, k), 0) - without(Bucket(1, k), 0)
        assert drafting == pytest.approx(1e7 * factor / 1e10 + launches)


def test_what_was_measured_says_how_far_off_it_is():
    prior = step_prior(SPEED, (TARGET, 10), [(DRAFT, 2)])
    costs = StepCosts(prior=prior)
    assert costs.seconds(Bucket(4, 2), 400) == pytest.approx(prior(Bucket(4, 2), 400), rel=0.03)
    assert costs.measured == []
    slower = 3 * prior(Bucket(4, 0), 400)
    for _ in range(5):
        costs.observe(Bucket(4, 0), 400, slower)
    assert costs.seconds(Bucket(4, 0), 400) == pytest.approx(slower, rel=0.01)
    expected = 3 * prior(Bucket(4, 2), 400)
    assert costs.seconds(Bucket(4, 2), 400) == pytest.approx(expected, rel=0.05)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("SPECJAX_CACHE_DIR", str(tmp_path))
    processor_speed.processor_speed.cache_clear()
    yield tmp_path
    processor_speed.processor_speed.cache_clear()


@pytest.mark.full
def test_the_processor_is_measured_once_per_machine(folder, monkeypatch):
    found = processor_speed.processor_speed()
    assert 1e6 < found.bytes_per_s < 1e13
    assert 1e-8 < found.launch_s < 1.0
    assert [n for n, _ in found.factors] == list(processor_speed.TOKENS)
    processor_speed.processor_speed.cache_clear()
    monkeypatch.setattr(processor_speed, "measure", lambda: pytest.fail("again"))
    assert processor_speed.processor_speed() == found
    (kept,) = folder.glob("processor-*.json")
    long_ago = time.time() - 1.1 * processor_speed.EXPIRES_S
    os.utime(kept, (long_ago, long_ago))
    processor_speed.processor_speed.cache_clear()
    with pytest.raises(pytest.fail.Exception, match="again"):
        processor_speed.processor_speed()
    monkeypatch.setattr(compilation_cache, "processor", lambda: "another")
    processor_speed.processor_speed.cache_clear()
    with pytest.raises(pytest.fail.Exception, match="again"):
        processor_speed.processor_speed()


FACTORS = [[count, 1.0] for count in processor_speed.TOKENS]
SOUND = {"bytes_per_s": 1e10, "factors": FACTORS, "launch_s": 1e-6}


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        "[[",
        *(
            json.dumps(SOUND | change)
            for change in (
                {"bytes_per_s": -1},
                {"bytes_per_s": 5e-324},
                {"bytes_per_s": 10**400},
                {"launch_s": 1e308},
                {"factors": FACTORS[:-1]},
                {"factors": FACTORS[::-1]},
                {"factors": [[count, 1e308] for count, _ in FACTORS]},
                {"factors": [*FACTORS[:-1], [FACTORS[-1][0], 10**400]]},
            )
        ),
    ],
)
def test_a_broken_file_is_measured_again(folder, monkeypatch, text):
    path = folder / f"processor-{compilation_cache.processor()}.json"
    path.write_text(json.dumps(SOUND))
    monkeypatch.setattr(processor_speed, "measure", lambda: SPEED)
    assert processor_speed.processor_speed() != SPEED
    processor_speed.processor_speed.cache_clear()
    path.write_text(text)
    assert processor_speed.processor_speed() == SPEED
    processor_speed.processor_speed.cache_clear()
    assert processor_speed.processor_speed() == SPEED
