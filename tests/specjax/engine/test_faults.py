"""The loop goes on without what failed: a drafter, a K, a row bucket, mixed steps."""

import warnings

import jax
import pytest
from fake_decoder import FakeDecoder
from test_loop import check, finish, make_request, start

from specjax.decode.bucket import ADMIT, BURST, MIXED, PREFILL, Bucket, StepKey
from specjax.decode.executables import TooLarge
from specjax.decode.sizes import PromptShape
from specjax.drafters.guard import DrafterError
from specjax.drafters.none import TurnedOff
from specjax.drafters.spec import NoDrafter
from specjax.engine.faults import Faults
from specjax.policy.interface import Fixed
from specjax.types import NOT_A_NUMBER, OUTSIDE_VOCABULARY, DecoderParams


def burst_of(rows, depth, max_drafts=None):
    return StepKey(BURST, Bucket(rows, depth, max_drafts))


def mixed_of(rows, depth, prompts):
    return StepKey(MIXED, Bucket(rows, depth), prompts)


class FaultyDecoder(FakeDecoder):
    """Fails where it is told to, before it touches anything, as a compile does.

    Args:
      too_large: keys of executables that do not fit.
      raises_in: "init", "prefill", "mixed" or "burst", where the drafter raises.
      fault: what the device reports of every step that drafts.
      breaks_at: the call of `burst` that the device fails in.
    """

    def __init__(self, *, too_large=(), raises_in=None, fault=0, breaks_at=None, **sizes):
        super().__init__(**sizes)
        self.too_large, self.raises_in = too_large, raises_in
        self.fault, self.breaks_at = fault, breaks_at
        self.num_inits = 0

    def place_params(self, params):
        return DecoderParams(None, "weights")

    def init(self, *, has_drafter=True):
        self.num_inits += 1
        if has_drafter:
            self._try("init", StepKey("init"))
        drafter = () if has_drafter else TurnedOff()
        self.is_active[:] = False
        self.slots[:] = -1
        self.version += 1
        return type(super().init())(self.version, drafter)

    def prefill(self, params, state, *arguments, **sizes):
        self._try("prefill", StepKey(PREFILL), state)
        return super().prefill(params, state, *arguments, **sizes)

    def mixed(self, params, state, *arguments, **sizes):
        prompts = PromptShape(len(arguments[1]), sizes["num_tokens"])
        bucket = Bucket(self.sizes.rows, sizes["num_speculative_tokens"])
        self._try("mixed", StepKey(MIXED, bucket, prompts), state)
        return super().mixed(params, state, *arguments, **sizes)

    def burst(self, params, state, plan, *, num_speculative_tokens, max_drafts=None):
        rows = self.sizes.rows if plan.row_ids is None else len(plan.row_ids)
        key = burst_of(rows, num_speculative_tokens)
        self._try("burst" if num_speculative_tokens else "plain", key, state)
        assert isinstance(state.drafter, TurnedOff) == (params.drafter == ())
        if len(self.bursts) == self.breaks_at:
            self.breaks_at = None
            raise jax.errors.JaxRuntimeError("INTERNAL: it broke")
        state, report, num_steps = super().burst(
            params, state, plan, num_speculative_tokens=num_speculative_tokens
        )
        if num_speculative_tokens:
            report.drafter_fault[0, 0] = self.fault
        return state, report, num_steps

    def _try(self, name, key, state=None):
        is_off = state is not None and isinstance(state.drafter, TurnedOff)
        if name == self.raises_in and not is_off:
            raise DrafterError(f"its {name} raised ValueError('so it is')")
        if key in self.too_large:
            raise TooLarge(key, MemoryError("RESOURCE_EXHAUSTED: 9 GB"))


def run(decoder, outputs, *, k=3, **arguments):
    engine, requests = start(decoder, outputs, policy=Fixed(k), **arguments)
    return finish(engine, requests)


def depths_of(decoder):
    return [depth for depth, _ in decoder.bursts]


@pytest.mark.parametrize("where", ["init", "prefill", "mixed", "burst"])
def test_a_drafter_that_raises_is_off_for_the_run(where):
    decoder = FaultyDecoder(rows=2, num_pages=128, raises_in=where)
    message = f"drafter 'dicey' is turned off .*its {where} raised ValueError.*so it is"
    with pytest.warns(UserWarning, match=message) as caught:
        engine = run(decoder, [60, 3, 5], prompts=[2, 2, 150], drafter_name="dicey")
    assert len(caught) == 1
    assert engine.faults.is_drafter_off
    assert depths_of(decoder)[-1] == 0
    if where != "mixed":
        assert set(depths_of(decoder)) == {0}
    # What was being fed was fed once.
    fed = [counts for _, _, counts in (*decoder.prefills, *decoder.mixed_calls)]
    assert sum(map(sum, fed)) == 1 + 1 + 149


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (OUTSIDE_VOCABULARY, "ids outside the vocabulary"),
        (NOT_A_NUMBER, "it proposed NaN"),
    ],
)
def test_what_the_device_reports_turns_the_drafter_off(fault, message):
    decoder = FaultyDecoder(rows=2, fault=fault)
    with pytest.warns(UserWarning, match=message) as caught:
        run(decoder, [60, 50])
    assert len(caught) == 1
    # The second was sent before the first was read.
    depths = depths_of(decoder)
    assert depths == [3, 3] + [0] * (len(depths) - 2)


def test_a_device_error_with_a_drafter_loses_no_token():
    decoder = FaultyDecoder(rows=2, breaks_at=3)
    engine, requests = start(decoder, [60, 50, 20], policy=Fixed(2))
    with pytest.warns(UserWarning, match="a step failed on the device") as caught:
        finish(engine, requests)
    assert len(caught) == 1
    assert decoder.num_inits == 2
    assert depths_of(decoder)[:3] == [2, 2, 2]
    assert set(depths_of(decoder)[3:]) == {0}
    # The queue went on as well: whoever comes now comes last.
    later = make_request(9, [9], 5)
    engine.add(later)
    assert later.arrival == 3
    finish(engine, [later])


def test_a_device_error_without_a_drafter_ends_the_requests(monkeypatch):
    monkeypatch.setattr(FaultyDecoder, "drafter", NoDrafter())
    decoder = FaultyDecoder(rows=2, breaks_at=2)
    engine, requests = start(decoder, [60, 50])
    with pytest.raises(jax.errors.JaxRuntimeError, match="it broke"):
        finish(engine, requests)
    assert [request.finish_reason for request in requests] == ["error"] * 2


def test_a_device_error_once_the_drafter_is_off_ends_the_requests():
    decoder = FaultyDecoder(rows=2, breaks_at=2, raises_in="init")
    with pytest.warns(UserWarning, match="turned off"):
        engine, requests = start(decoder, [60, 50], policy=Fixed(2))
    with pytest.raises(jax.errors.JaxRuntimeError, match="it broke"):
        finish(engine, requests)
    assert [request.finish_reason for request in requests] == ["error"] * 2
    assert isinstance(engine._run.device_state.drafter, TurnedOff)


def test_a_k_that_does_not_fit_is_dropped():
    decoder = FaultyDecoder(rows=2, num_pages=40, too_large=[burst_of(2, 3)])
    with pytest.warns(UserWarning, match="2 rows at K = 3 is dropped.*goes on with") as one:
        engine = run(decoder, [30, 20, 9])
    assert len(one) == 1
    assert set(depths_of(decoder)) == {0}
    assert not engine.faults.is_drafter_off
    dropped = [engine.faults.is_dropped(Bucket(2, k)) for k in range(6)]
    assert dropped == [False] * 3 + [True] * 3
    reasons = {record.reason for record in engine.records}
    assert reasons <= {"dropped", "prompts"}


def test_a_row_bucket_that_does_not_fit_is_dropped():
    too_large = [burst_of(1, 1), burst_of(2, 1)]
    decoder = FaultyDecoder(rows=4, row_buckets=(1, 2), too_large=too_large)
    with pytest.warns(UserWarning, match="burst of . rows at K = 1 is dropped") as two:
        engine = run(decoder, [3, 3, 12, 30], k=1)
    assert len(two) == 2
    assert set(decoder.num_rows_run) == {4}
    dropped = {k: [engine.faults.is_dropped(Bucket(n, k)) for n in (1, 2, 4)] for k in (0, 1)}
    assert dropped == {0: [False] * 3, 1: [True, True, False]}


def test_mixed_steps_that_do_not_fit_are_dropped():
    too_large = [mixed_of(2, k, PromptShape(2, 64)) for k in (0, 3)]
    decoder = FaultyDecoder(rows=2, num_pages=128, too_large=too_large)
    prompts = [2, 2, 130]
    with pytest.warns(UserWarning, match="is dropped") as two:
        run(decoder, [60, 3, 5], prompts=prompts)
    whats = "2 rows at K = 3 beside 64 prompt tokens", "steps with prompts beside"
    assert all(what in str(w.message) for what, w in zip(whats, two, strict=True))
    assert not decoder.mixed_calls
    fed = sum(sum(counts) for _, _, counts in decoder.prefills)
    assert fed == sum(prompts) - len(prompts)


def test_a_mixed_step_that_drafts_and_does_not_fit_runs_plainly():
    decoder = FaultyDecoder(rows=2, num_pages=128, too_large=[mixed_of(2, 3, PromptShape(2, 64))])
    with pytest.warns(UserWarning, match="goes on with other sizes, or K = 0 beside") as one:
        engine = run(decoder, [60, 3, 5], prompts=[2, 2, 130])
    assert len(one) == 1
    assert {k for k, _, _ in decoder.mixed_calls} == {0}
    assert set(depths_of(decoder)[1:-1]) == {3, 0}  # plain once, for the step that did not fit
    beside = PromptShape(2, 64), PromptShape(2, 256), PromptShape(2, 16), None
    dropped = [engine.faults.is_dropped(Bucket(2, 3), each) for each in beside]
    assert dropped == [True, True, False, False]


def test_without_anything_left_the_requests_end():
    decoder = FaultyDecoder(rows=2, too_large=[burst_of(2, 2), burst_of(2, 0)])
    engine, requests = start(decoder, [9, 9], policy=Fixed(2))
    with (
        pytest.warns(UserWarning, match="K = 2 is dropped"),
        pytest.raises(TooLarge, match=r"2 rows at K = 0 does not fit in memory: .*9 GB"),
    ):
        finish(engine, requests)
    assert [request.finish_reason for request in requests] == ["error"] * 2
    assert "9 GB" in requests[0].error


def test_pages_after_a_burst_that_was_not_sent():
    """What was reserved for it is given back, but for what the next burst needs."""
    decoder = FaultyDecoder(rows=2, num_pages=16, too_large=[burst_of(2, 3)])
    engine, requests = start(decoder, [30, 30], policy=Fixed(3))
    with pytest.warns(UserWarning, match="K = 3"):
        engine.step()
    check(engine)
    assert len(engine._run.flights) == 1
    assert engine._run.flights[0].growth == 5
    finish(engine, requests)


def test_faults_say_what_was_dropped_once():
    faults = Faults("dicey", 2)
    with pytest.warns(UserWarning, match="'dicey' is turned off for this run: why") as one:
        faults.turn_drafter_off("why")
    faults.turn_drafter_off("why else")
    assert len(one) == 1
    assert faults.is_dropped(Bucket(2, 3))
    assert not faults.is_dropped(Bucket(2, 0))
    for key in [
        StepKey(PREFILL, prompts=PromptShape(1, 64)),
        burst_of(2, 0),
        StepKey(ADMIT, count=1),
    ]:
        with pytest.raises(TooLarge):
            faults.drop(TooLarge(key, MemoryError()))
    assert not faults.is_dropped(Bucket(2, 0))


def test_a_bucket_with_fewer_slots_than_one_that_did_not_fit_may():
    faults = Faults("dicey", 8)
    with pytest.warns(UserWarning, match="4 rows at K = 4"):
        faults.drop(TooLarge(burst_of(4, 4, 8), MemoryError()))
    assert faults.is_dropped(Bucket(4, 4, 8))
    assert faults.is_dropped(Bucket(4, 4))
    assert not faults.is_dropped(Bucket(4, 4, 4))
    assert not faults.is_dropped(Bucket(4, 2))
    assert not faults.is_dropped(Bucket(8, 4, 8))


def test_a_device_that_has_no_room_for_a_new_state_hides_no_error(monkeypatch):
    """The first error is raised, and the next step asks for a state again."""
    monkeypatch.setattr(FaultyDecoder, "drafter", NoDrafter())
    decoder = FaultyDecoder(rows=2, breaks_at=2)
    engine, requests = start(decoder, [60, 50, 40], policy=Fixed(0))
    lost = jax.errors.JaxRuntimeError("INTERNAL: the device is lost")

    def fail(**arguments):
        raise lost

    with monkeypatch.context() as patch:
        patch.setattr(decoder, "init", fail)
        with pytest.raises(jax.errors.JaxRuntimeError, match="it broke"):
            finish(engine, requests)
        assert [request.finish_reason for request in requests] == ["error"] * 3
        assert all("it broke" in request.error for request in requests)
        assert not engine.has_work
        later = make_request(9, [9], 5)
        engine.add(later)
        with pytest.raises(jax.errors.JaxRuntimeError, match="device is lost"):
            engine.step()
        assert later.finish_reason == "error"
        assert not engine.has_work
    last = make_request(8, [8], 5)
    engine.add(last)
    finish(engine, [last])


def test_requests_end_where_nothing_can_begin_again(monkeypatch):
    """The device fails with a drafter, and once more for a state without one."""
    decoder = FaultyDecoder(rows=2, breaks_at=2)
    engine, requests = start(decoder, [60, 50, 40], policy=Fixed(0))

    def fail(**arguments):
        raise jax.errors.JaxRuntimeError("INTERNAL: the device is lost")

    monkeypatch.setattr(decoder, "init", fail)
    engine.step()
    engine.step()
    with (
        pytest.warns(UserWarning, match="a step failed on the device"),
        pytest.raises(jax.errors.JaxRuntimeError, match="device is lost") as caught,
    ):
        engine.step()
    assert "it broke" in str(caught.value.__context__)
    assert [request.finish_reason for request in requests] == ["error"] * 3
    assert not engine.has_work


def test_requests_wait_on_where_a_restart_fails(monkeypatch):
    """Memory runs out in a burst, and again for the state after it; nobody is forgotten."""
    decoder = FaultyDecoder(rows=2)
    fewer = iter([decoder, decoder])
    engine, requests = start(decoder, [60, 50, 20], fewer_pages=lambda decoder: next(fewer, None))
    engine.step()
    full = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: no room")

    def fails_once(name):
        work = getattr(decoder, name)

        def fail(*arguments, **sizes):
            monkeypatch.setattr(decoder, name, work)
            raise full

        monkeypatch.setattr(decoder, name, fail)

    fails_once("burst")
    fails_once("init")
    finish(engine, requests)
    assert next(fewer, None) is None, "both were asked for"
    assert [request.num_preemptions for request in requests] == [1, 1, 0]


@pytest.mark.parametrize("where", ["_update", "_observe"])
def test_a_request_that_ended_as_a_step_failed_is_told_of_and_not_run_again(monkeypatch, where):
    """Before or after its row was released."""
    decoder = FaultyDecoder(rows=2)
    engine, (short, long) = start(decoder, [3, 40], policy=Fixed(0))
    work, moved = getattr(engine._reader, where), []

    def fail(*arguments):
        if short.is_finished and not moved:
            raise jax.errors.JaxRuntimeError("INTERNAL: it broke")
        work(*arguments)

    monkeypatch.setattr(engine._reader, where, fail)
    while not short.is_finished:
        with warnings.catch_warnings(action="ignore"):  # the drafter is turned off
            moved += engine.step()
    assert short in moved
    assert short.num_preemptions == 0
    assert long.num_preemptions == 1
    finish(engine, [short, long])


def test_nobody_keeps_the_deadlines_of_requests_that_are_over():
    decoder = FaultyDecoder(rows=2)
    engine, _ = start(decoder, [])
    requests = [make_request(n, [n], 5, deadline=1e12) for n in range(1, 5)]
    for request in requests:
        engine.add(request)
    finish(engine, requests)
    assert not engine._run.deadlines
    waits = make_request(9, [9], 5, deadline=1e12)
    engine.add(waits)
    assert engine.abort(waits)
    assert not engine._run.deadlines
