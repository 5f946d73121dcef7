"""What a loop ends, keeps and forgets when a step fails, a row breaks or time is over."""

import types

import pytest
from fake_decoder import FakeDecoder
from test_loop import finish, make_request, set_clock, start
from test_memory_gate import SmallDevice

from specjax.config.gate import SpeculationGate
from specjax.engine.deadlines import MOST_STALE
from specjax.engine.loop import Loop
from specjax.policy.interface import Fixed
from specjax.types import INVALID_LOGITS, DecoderParams


class Clock:
    """Stands for the time module; `now_s` is set by the test."""

    now_s = 0.0

    def perf_counter(self):
        return self.now_s


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    set_clock(monkeypatch, clock)
    return clock


class BrokenDecoder(FakeDecoder):
    """Fails in every burst with an error that is not the device's."""

    def burst(self, *arguments, **options):
        raise ZeroDivisionError("broken")


@pytest.mark.parametrize("how", ["asked to", "by an exception"])
def test_who_waits_is_ended_as_well_as_who_runs(how):
    decoder = FakeDecoder(rows=1) if how == "asked to" else BrokenDecoder(rows=1)
    engine, requests = start(decoder, [9, 9, 9])
    if how == "asked to":
        engine.step()
        engine.abandon()
    else:
        with pytest.raises(ZeroDivisionError):
            engine.step()
    assert {request.finish_reason for request in requests} == {"error"}
    assert all(request.error for request in requests)
    assert not engine.has_work


def test_deadlines_hold_after_the_pages_became_fewer(clock):
    decoder = SmallDevice(most_pages=30, rows=1)
    engine = Loop(
        decoder,
        DecoderParams(None),
        Fixed(2),
        fewer_pages=lambda decoder: decoder.fewer(),
    )
    requests = [make_request(n, [n] * 5, 90, deadline=100.0) for n in (1, 2)]
    for request in requests:
        engine.add(request)
    while engine.decoder is decoder:
        engine.step()
    engine.step()
    assert not any(request.is_finished for request in requests)
    clock.now_s = 100.0
    engine.step()
    assert [request.finish_reason for request in requests] == ["deadline"] * 2


def test_deadlines_hold_after_those_of_ended_requests_were_dropped(clock):
    engine = Loop(FakeDecoder(rows=1), DecoderParams(None), Fixed(0))
    requests = [make_request(n, [n], 200, deadline=100.0 - n) for n in range(MOST_STALE + 10)]
    for request in requests:
        engine.add(request)
    left = [requests[5], requests[-1], requests[0]]
    for request in requests:
        if request not in left:
            engine.abort(request)
    late = make_request(99, [99], 200, deadline=200.0)
    engine.add(late)
    assert len(engine._run.deadlines) == len(left) + 1
    clock.now_s = 100.0
    engine.step()
    assert {request.finish_reason for request in left} == {"deadline"}
    assert not late.is_finished
    clock.now_s = 200.0
    engine.step()
    assert late.finish_reason == "deadline"


def test_fewer_pages_lower_the_limit_of_tokens():
    decoder = SmallDevice(most_pages=30, rows=3, gate="worst_case")
    engine, requests = start(
        decoder,
        [30, 30, 30, 12],
        prompts=[5, 5, 5, 9],
        policy=Fixed(2),
        most_tokens=200,
        fewer_pages=lambda decoder: decoder.fewer(),
    )
    while engine.decoder.sizes.num_pages > 30:
        engine.step()
    most = 200 * engine.decoder.sizes.num_pages // 64
    assert sum(request.max_length for request in requests[2:]) <= most
    while engine.has_work:
        engine.step()
        rows = engine.scheduler.occupied
        assert sum(row.request.max_length for row in rows) <= most
    finish(engine, requests)


class NotANumber(FakeDecoder):
    """Reports of every row's first step that its logits were NaN."""

    def _steps(self, plan, depth):
        info, num_run = super()._steps(plan, depth)
        info.num_committed[:] = info.num_accepted[:] = 0
        info.finish[0] = INVALID_LOGITS
        self.is_active[:] = False
        return info, num_run


def test_nobody_reads_the_pages_of_a_row_of_nan():
    prompt = list(range(1, 12))
    engine, (request,) = start(NotANumber(rows=1), [9], prompts=[prompt])
    while engine.has_work:
        engine.step()
    assert request.finish_reason == "error"
    (pool,) = engine.scheduler.pools
    assert pool.find(prompt) == []
    assert pool.num_held == 0
    pool.check()


def test_the_gate_on_the_worst_case_counts_tokens_that_are_still_to_come():
    depths = {}
    for gate in ("worst_case", "current"):
        decoder = FakeDecoder(rows=1, num_pages=64, gate=gate)
        engine, requests = start(
            decoder, [100], policy=Fixed(3), gate=SpeculationGate(max_tokens=60)
        )
        finish(engine, requests)
        depths[gate] = {depth for depth, _ in decoder.bursts}
    assert depths == {"worst_case": {0}, "current": {0, 3}}


@pytest.mark.parametrize("is_new", [False, True])
def test_pages_are_forgotten_with_the_weights_that_filled_them(is_new):
    prompt = list(range(1, 12))
    engine, requests = start(FakeDecoder(rows=1), [3], prompts=[prompt])
    finish(engine, requests)
    engine.take_params(DecoderParams("others"), is_new=is_new)
    (pool,) = engine.scheduler.pools
    assert len(pool.find(prompt)) == (0 if is_new else 2)
    pool.check()


def test_more_rows_than_may_speculate_do_not():
    decoder = FakeDecoder(rows=3)
    engine, requests = start(
        decoder, [5, 30, 60], policy=Fixed(2), gate=SpeculationGate(max_rows=2)
    )
    finish(engine, requests)
    reasons = {
        record.num_rows: (record.num_speculative_tokens, record.reason) for record in engine.records
    }
    assert reasons[3] == (0, "rows")
    assert reasons[2][0] == reasons[1][0] == 2


class Listening(FakeDecoder):
    """Has a drafter that is told what rows have written."""

    def __init__(self, **sizes):
        super().__init__(**sizes)
        self.told = []

    @property
    def drafter(self):
        return types.SimpleNamespace(takes_text=True, made_by=None)

    def remember(self, state, pieces):
        for token_ids, count in zip(pieces.token_ids, pieces.counts.tolist()):
            if count:
                self.told.append(token_ids[:count].tolist())
        return self._next(state)


def test_a_drafter_is_told_all_that_a_paused_request_has_written():
    decoder = Listening(rows=1)
    engine, (request,) = start(decoder, [60])
    while len(request.output_token_ids) < 10:
        engine.step()
    assert engine.pause() == [request]
    assert len(request.output_token_ids) < 60
    engine.remember([], [])
    (piece,) = decoder.told
    assert piece == request.token_ids
