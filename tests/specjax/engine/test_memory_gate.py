"""Few pages and heavy batches: gated, preempted, and never at the cost of a token."""

import numpy as np
import pytest
from fake_decoder import FakeDecoder
from test_loop import finish, make_request, start

from specjax.engine.loop import Loop
from specjax.engine.speculation_policy import Fixed

NUM_REQUESTS = 2000


def adversarial_loop(*, gate, gate_tokens, num_requests=NUM_REQUESTS, seed=0):
    """Returns a loop and requests of few rows, of which some have very long contexts."""
    rng = np.random.default_rng(seed)
    decoder = FakeDecoder(rows=4, num_pages=40, gate=gate)
    loop = Loop(decoder, None, Fixed(3), gate_tokens=gate_tokens)
    requests = []
    for index in range(num_requests):
        is_long = index % 50 < 3
        prompt = int(rng.integers(30, 70) if is_long else rng.integers(1, 7))
        output = int(rng.integers(40, 80) if is_long else rng.integers(1, 6))
        request = make_request(index, [index % 50] * prompt, output)
        requests.append(request)
        loop.add(request)
    return loop, requests


def depths_above(loop, tokens):
    """Returns the K of bursts whose rows had more tokens than this."""
    return {r.num_speculative_tokens for r in loop.records if r.context_tokens > tokens}


def test_with_the_gate_on_the_worst_case_nobody_is_preempted():
    loop, requests = adversarial_loop(gate="worst_case", gate_tokens=100)
    finish(loop, requests)
    assert loop.num_preemptions == 0
    assert depths_above(loop, 100) == {0}
    reasons = {record.reason for record in loop.records}
    assert {"fixed", "memory gate"} <= reasons


def test_without_a_gate_requests_are_preempted_and_lose_nothing():
    loop, requests = adversarial_loop(gate="current", gate_tokens=None)
    finish(loop, requests)
    assert loop.num_preemptions > 0
    assert "memory gate" not in {record.reason for record in loop.records}


def test_the_gate_on_what_rows_have_now_lets_light_batches_speculate():
    loop, requests = adversarial_loop(gate="current", gate_tokens=100, num_requests=300)
    finish(loop, requests)
    assert depths_above(loop, 100) == {0}
    assert 3 in {record.num_speculative_tokens for record in loop.records}


def test_a_heavy_batch_of_few_rows_does_not_speculate():
    decoder = FakeDecoder(rows=2, num_pages=64)
    loop, requests = start(decoder, [40, 4], prompts=[60, 1], policy=Fixed(3))
    loop.gate_tokens = 80
    finish(loop, requests)
    by_tokens = [
        (record.context_tokens, record.num_speculative_tokens)
        for record in loop.records
        if record.reason != "prompts"
    ]
    assert {k for tokens, k in by_tokens if tokens > 80} == {0}
    assert {k for tokens, k in by_tokens if tokens < 60} <= {3}


@pytest.mark.parametrize("num_stolen", [6, 12])
def test_memory_that_is_secretly_less_preempts(num_stolen):
    """Pages that the engine counts on are gone while it runs."""
    decoder = FakeDecoder(rows=3, num_pages=24)
    loop, requests = start(
        decoder, [30, 30, 30], prompts=[5, 5, 5], policy=Fixed(2), gate_tokens=60
    )
    loop.step()
    (pool,) = loop.scheduler.pools
    stolen = pool.take(min(num_stolen, pool.num_free))
    while loop.has_work:
        loop.step()
    pool.give_back(stolen)
    assert loop.num_preemptions > 0
    finish(loop, requests)  # all texts are right, and no page is lost
