"""Seconds from bytes and operations, counted by hand."""

import dataclasses
import types

import pytest

from specjax.paged.work import Block
from specjax.planning.roofline import (
    ModelWork,
    choose_num_speculative_tokens,
    compute_bound_tokens,
    expected_tokens,
    roofline_step_s,
    verify_work,
)

DEVICE = types.SimpleNamespace(bytes_per_s=100.0, flops_per_s=1000.0)  # ridge 10
TARGET = ModelWork(weight_bytes=1000, token_flops=1000, context_bytes=2, context_flops=1)
DRAFT = ModelWork(weight_bytes=100, token_flops=100, context_bytes=1, context_flops=0)


def step_s(rows, k, context=0, drafters=(DRAFT,)):
    return roofline_step_s(
        TARGET, drafters, DEVICE, rows=rows, num_speculative_tokens=k, context=context
    )


def test_reading_weights_bounds_few_tokens_and_arithmetic_many():
    assert step_s(1, 0) == pytest.approx(10)
    assert step_s(10, 0) == pytest.approx(10)
    assert step_s(20, 0) == pytest.approx(20)


def test_drafting_reads_the_drafter_once_per_token():
    assert step_s(1, 3) == pytest.approx(10 + 3)
    assert step_s(1, 3, drafters=()) == pytest.approx(10)
    assert step_s(1, 3, drafters=(DRAFT, DRAFT)) == pytest.approx(10 + 2 * 3)


def test_a_block_reads_the_drafter_once_with_as_many_tokens_as_k_takes():
    block = dataclasses.replace(DRAFT, token_flops=1000, block=Block(-1, per_draft=1, most=40))
    assert step_s(1, 3, drafters=(block,)) == pytest.approx(10 + 2)
    assert step_s(2, 11, drafters=(block,)) == pytest.approx(24 + 20)
    assert step_s(1, 51, drafters=(block,)) == pytest.approx(52 + 40)
    assert step_s(1, 0, drafters=(block,)) == pytest.approx(10)


def test_context_is_read_once_per_row_whatever_k_is():
    work = verify_work(TARGET, rows=2, k=3, context=100)
    assert work.bytes == 1000 + 2 * 100 * 2
    assert work.flops == 8 * (1000 + 100)
    assert work.intensity == pytest.approx(8800 / 1400)


def test_a_layer_reads_no_more_than_its_window():
    # Four layers, 0.5 bytes and 0.25 operations each per token of context.
    sliding = dataclasses.replace(TARGET, layer_windows=(None, 10, 10, 200))
    assert sliding.seen(5) == 5
    assert sliding.seen(100) == (100 + 10 + 10 + 100) / 4
    work = verify_work(sliding, rows=2, k=3, context=100)
    assert work.bytes == 1000 + 2 * 0.5 * (100 + 10 + 10 + 100)
    assert work.flops == 8 * (1000 + 0.25 * (100 + 10 + 10 + 100))
    assert sliding.of(2, 2, 5) == TARGET.of(2, 2, 5)


def test_windows_keep_a_long_context_compute_bound():
    sliding = dataclasses.replace(TARGET, layer_windows=(10,))
    assert compute_bound_tokens(TARGET, DEVICE, context=1000) is None
    tokens = compute_bound_tokens(sliding, DEVICE, context=1000)
    assert tokens == compute_bound_tokens(TARGET, DEVICE, context=10)


def test_tokens_that_turn_a_step_compute_bound():
    assert compute_bound_tokens(TARGET, DEVICE) == pytest.approx(10)
    tokens = compute_bound_tokens(TARGET, DEVICE, context=10, tokens_per_row=4)
    rows = tokens / 4
    work = TARGET.of(rows, tokens, 10)
    assert work.bytes / 100 == pytest.approx(work.flops / 1000)
    # Reading 1,000 tokens of context takes 20 s, computing with them 2 s.
    assert compute_bound_tokens(TARGET, DEVICE, context=1000) is None


def test_k_follows_the_load():
    choose = lambda rows, rate: choose_num_speculative_tokens(
        [step_s(rows, k) for k in range(8)], rate
    )
    assert choose(1, 0.8) > choose(4, 0.8) > choose(16, 0.8) == 0
    assert choose(1, 0.0) == 0
    assert [expected_tokens(0.5, k) for k in range(3)] == [1, 1.5, 1.75]


def test_of_equal_gains_the_smallest_k():
    assert choose_num_speculative_tokens([1.0, 2.0, 3.0], 1.0) == 0
