"""Few pages and heavy batches: gated, preempted, and never at the cost of a token."""

import itertools

import jax
import numpy as np
import pytest
from fake_decoder import FakeDecoder
from test_loop import finish, make_request, start

from specjax.config.gate import SpeculationGate
from specjax.drafters.spec import NoDrafter
from specjax.engine.loop import Loop
from specjax.policy.interface import Fixed
from specjax.types import DecoderParams

NUM_REQUESTS = 2000


def adversarial_loop(*, gate, gate_tokens, most_tokens=None, num_requests=NUM_REQUESTS, seed=0):
    """Returns a loop and requests of few rows, of which some have very long contexts."""
    rng = np.random.default_rng(seed)
    decoder = FakeDecoder(rows=4, num_pages=40, gate=gate)
    loop = Loop(
        decoder,
        DecoderParams(None),
        Fixed(3),
        gate=SpeculationGate(max_tokens=gate_tokens),
        most_tokens=most_tokens,
    )
    requests = []
    for index in range(num_requests):
        is_long = index % 50 < 3
        prompt = int(rng.integers(30, 70) if is_long else rng.integers(1, 7))
        output = int(rng.integers(40, 80) if is_long else rng.integers(1, 6))
        request = make_request(index, [index % 50] * prompt, output)
        requests.append(request)
        loop.add(request)
    return loop, requests


def test_a_batch_of_the_weight_limit_lets_nobody_else_in():
    decoder = FakeDecoder(rows=3, num_pages=64)
    loop, requests = start(
        decoder, [10, 10, 1], prompts=[60, 50, 3], policy=Fixed(1), most_tokens=100
    )
    loop.step()
    assert [row.request for row in loop.scheduler.occupied] == requests[:1]
    while not requests[0].is_finished:
        loop.step()
        assert requests[1] not in [row.request for row in loop.scheduler.occupied]
    loop.step()
    assert [row.request for row in loop.scheduler.occupied] == requests[1:]
    finish(loop, requests)


def test_the_weight_limit_spares_preemptions():
    loops = []
    for most_tokens in (None, 100):
        loop, requests = adversarial_loop(
            gate="current", gate_tokens=None, most_tokens=most_tokens, num_requests=300
        )
        finish(loop, requests)
        loops.append(loop.num_preemptions)
    assert loops[1] < loops[0]


def test_the_weight_limit_counts_the_worst_case_where_it_is_asked_to():
    loop, requests = adversarial_loop(
        gate="worst_case", gate_tokens=None, most_tokens=100, num_requests=300
    )
    while loop.has_work:
        loop.step()
        rows = loop.scheduler.occupied
        worst = sum(row.request.max_length for row in rows)
        assert worst <= 100 or len(rows) == 1
    finish(loop, requests)


class SmallDevice(FakeDecoder):
    """Has no memory for a burst beside more pages than it has room for."""

    def __init__(self, *, most_pages, fails_at=3, **sizes):
        super().__init__(num_pages=sizes.pop("num_pages", 64), **sizes)
        self.options = dict(most_pages=most_pages, fails_at=1, **sizes)
        self.most_pages, self.fails_at = most_pages, fails_at

    @property
    def drafter(self):
        return NoDrafter()

    def fewer(self):
        return SmallDevice(num_pages=self.sizes.num_pages * 3 // 4, **self.options)

    def burst(self, params, state, plan, **sizes):
        if len(self.bursts) + 1 >= self.fails_at:
            self.fail()
        return super().burst(params, state, plan, **sizes)

    def fail(self):
        if self.sizes.num_pages > self.most_pages:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")


class SmallerStill(SmallDevice):
    """Has no room for the state either."""

    def init(self, *, has_drafter=True):
        if self.fails_at == 1:
            self.fail()
        return super().init(has_drafter=has_drafter)

    def fewer(self):
        return SmallerStill(num_pages=self.sizes.num_pages * 3 // 4, **self.options)


@pytest.mark.parametrize("device", [SmallDevice, SmallerStill])
def test_memory_that_runs_out_leaves_fewer_pages_and_no_request_lost(device):
    decoder = device(most_pages=30, rows=3)
    loop, requests = start(
        decoder,
        [30, 30, 30, 12],
        prompts=[5, 5, 5, 9],
        policy=Fixed(2),
        gate=SpeculationGate(max_tokens=64),
        most_tokens=200,
        fewer_pages=lambda decoder: decoder.fewer(),
    )
    finish(loop, requests)
    (pool,) = loop.scheduler.pools
    assert pool.num_pages == 27  # of 64, 48, 36
    assert 60 / 64 * 27 / 1.1 < loop.gate.max_tokens <= 27
    assert sum(request.num_preemptions for request in requests) >= 3


def test_a_request_that_fewer_pages_cannot_hold_ends_with_an_error():
    decoder = SmallDevice(most_pages=30, rows=3)
    loop, requests = start(
        decoder,
        [30, 150, 12],
        prompts=[5, 5, 9],
        policy=Fixed(2),
        fewer_pages=lambda decoder: decoder.fewer(),
    )
    moved = [request for step in itertools.islice(loop.run(), 1000) for request in step]
    small, large, other = requests
    assert large.finish_reason == "error"
    assert "the pool holds 144" in large.error
    assert large in moved
    finish(loop, [small, other])


def test_memory_that_runs_out_at_the_fewest_pages_ends_all_with_the_error():
    decoder = SmallDevice(most_pages=30, rows=3)
    loop, requests = start(decoder, [30, 30], prompts=[5, 5], policy=Fixed(2))
    with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED"):
        list(loop.run())
    assert {request.finish_reason for request in requests} == {"error"}


def depths_above(loop, tokens):
    """Returns the K of bursts whose rows had more tokens than this."""
    return {r.num_speculative_tokens for r in loop.records if r.context_tokens > tokens}


@pytest.mark.full
def test_with_the_gate_on_the_worst_case_nobody_is_preempted():
    loop, requests = adversarial_loop(gate="worst_case", gate_tokens=100)
    finish(loop, requests)
    assert loop.num_preemptions == 0
    assert depths_above(loop, 100) == {0}
    reasons = {record.reason for record in loop.records}
    assert {"fixed", "memory gate"} <= reasons
    assert "pages" not in reasons


@pytest.mark.full
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
    loop, requests = start(
        decoder, [40, 4], prompts=[60, 1], policy=Fixed(3), gate=SpeculationGate(max_tokens=80)
    )
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
        decoder,
        [30, 30, 30],
        prompts=[5, 5, 5],
        policy=Fixed(2),
        gate=SpeculationGate(max_tokens=60),
    )
    loop.step()
    (pool,) = loop.scheduler.pools
    stolen = pool.take(min(num_stolen, pool.num_free))
    while loop.has_work:
        loop.step()
    pool.give_back(stolen)
    assert loop.num_preemptions > 0
    finish(loop, requests)  # all texts are right, and no page is lost
