"""When a drafter learns between bursts, and from what: a learner and a clock that are made up."""

import types
import warnings

import pytest
from test_loop import make_request

from specjax.engine.adapting import Adapting, Learned
from specjax.engine.windows import KeptText
from specjax.policy.interface import Fixed


class _Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


class _Learner:
    rows, num_bytes = 3, 1000

    def __init__(self, clock, seconds=2.0):
        self.clock, self.seconds = clock, seconds
        self.texts, self.restarts, self.is_gone = [], [], False
        self.learned = Learned("new", 1.5, (0.5, 0.25))

    def restart(self, params):
        self.restarts.append(params)

    def learn(self, target, states, texts):
        assert (target, states) == ("target", "states")
        self.clock.now += self.seconds
        self.texts.append([text.number for text in texts])
        if isinstance(self.learned, Exception):
            raise self.learned
        return self.learned

    def let_go(self):
        self.is_gone = True


class _Told(Fixed):
    def __init__(self):
        super().__init__(3)
        self.told = []

    def expect_acceptance(self, survival):
        self.told.append(tuple(survival))


class _Run:
    """What Adapting reads of a RunState."""

    def __init__(self):
        self.kept_texts = []
        self.num_kept, self.has_windows = 0, True
        self.faults = types.SimpleNamespace(is_drafter_off=False)
        self.device_state = types.SimpleNamespace(kept=types.SimpleNamespace(states="states"))
        self.params = types.SimpleNamespace(target="target", drafter="old")
        self.requests, self.deadlines = [], []
        self.taken = []

    def keep(self, count, tokens=10):
        """Adds texts of `tokens` learned tokens each; the oldest of more than six go."""
        for _ in range(count):
            number = self.num_kept // tokens
            text = KeptText(number, tuple(range(tokens)), 0, 1.0, 1, number)
            self.kept_texts = [*self.kept_texts, text][-6:]
            self.num_kept += tokens

    def take_drafter(self, params):
        assert params.target == "target"
        self.taken.append(params.drafter)


@pytest.fixture
def clock():
    return _Clock()


@pytest.fixture
def learner(clock):
    return _Learner(clock)


def _adapting(learner, **others):
    settings = dict(every_tokens=20, max_share=0.1, idle_steps=2, kept_bytes=500, first_s=2.0)
    return Adapting(learner, clock=learner.clock, **(settings | others))


def _learn(adapting, run, policy=None):
    adapting.learn(run, policy or Fixed(3), begun_at=adapting.clock())


def test_steps_stay_within_their_share_of_the_time(clock, learner):
    adapting, run = _adapting(learner), _Run()
    run.keep(6)
    begun, learned_at = clock.now, []
    for _ in range(1000):
        clock.now += 0.5  # a burst
        run.keep(2)
        if adapting.is_due(run, 0.01):
            _learn(adapting, run)
            learned_at.append(clock.now - begun)
            elapsed = clock.now - begun
            assert adapting.stats(run).learn_s <= 0.1 * elapsed + 1e-9 + 0.1 * learner.seconds
    # The first as soon as a tenth of the time holds it, and then one in twenty seconds.
    assert learned_at[0] == pytest.approx(22.0, abs=0.5)
    assert len(learned_at) == pytest.approx((clock.now - begun) / 20, abs=2)
    assert adapting.stats(run).share <= 0.1 + 1e-9


def test_a_night_without_work_buys_no_more_than_two_steps(clock, learner):
    adapting, run = _adapting(learner, idle_steps=0), _Run()
    run.keep(6)
    clock.now += 8 * 3600
    begun, count = clock.now, 0
    for _ in range(100):
        clock.now += 0.5
        run.keep(2)
        if adapting.is_due(run, 0.01):
            _learn(adapting, run)
            count += 1
    assert count == pytest.approx(2 + 0.1 * (clock.now - begun) / learner.seconds, abs=1)


def test_a_step_that_became_slow_is_waited_for_longer(clock, learner):
    adapting, run = _adapting(learner), _Run()
    run.keep(6)
    clock.now += 30
    assert adapting.is_due(run, None)
    learner.seconds = 10.0
    _learn(adapting, run)
    run.keep(2)
    clock.now += 159
    assert not adapting.is_due(run, None)  # 10 spent and 10 more are above a tenth of 199
    clock.now += 2
    assert adapting.is_due(run, None)


def test_time_that_requests_waited_for_bursts_to_end_counts(clock, learner):
    adapting, run = _adapting(learner), _Run()
    run.keep(6)
    clock.now += 100
    begun = clock.now
    clock.now += 3  # bursts in flight are read
    adapting.learn(run, Fixed(3), begun_at=begun)
    assert adapting.stats(run).learn_s == 5.0


def test_it_learns_once_enough_tokens_have_come(clock, learner):
    adapting, run = _adapting(learner, max_share=1.0), _Run()
    clock.now += 100
    due = []
    for _ in range(5):
        due.append(adapting.is_due(run, 0.0))
        if due[-1]:
            _learn(adapting, run)
        run.keep(1)
    assert due == [False, False, True, False, True]


def test_the_newest_texts_come_first_and_others_beside_them(clock, learner):
    adapting, run = _adapting(learner, max_share=1.0), _Run()
    run.keep(2)
    _learn(adapting, run)
    run.keep(1)
    _learn(adapting, run)
    run.keep(5)
    _learn(adapting, run)
    first, second, third = learner.texts
    assert first == [1, 0]
    assert second[0] == 2
    assert sorted(second[1:]) == [0, 1]
    assert third == [7, 6, 5]
    # Those that were passed over are old by then.
    _learn(adapting, run)
    assert len(set(learner.texts[3])) == 3


def test_a_deadline_is_not_missed_for_it(clock, learner):
    adapting, run = _adapting(learner, max_share=1.0), _Run()
    run.keep(6)
    clock.now += 100
    request = make_request(1, [1, 2], 50)
    run.requests, run.deadlines = [request], [request]
    # Fifty tokens at a tenth of a second each, and the two seconds of a step.
    request.deadline = clock.now + 6.9
    assert not adapting.is_due(run, 0.1)
    request.deadline = clock.now + 7.1
    assert adapting.is_due(run, 0.1)
    request.output_token_ids += [5] * 40
    request.deadline = clock.now + 3.1
    assert adapting.is_due(run, 0.1)


def test_an_engine_without_work_learns_a_few_times_and_stops(clock, learner):
    adapting, run = _adapting(learner, max_share=0.01), _Run()
    policy = Fixed(3)
    assert not adapting.learn_idle(run, policy)  # there was no work yet
    run.keep(2)
    adapting.is_due(run, None)  # as a step with work asks
    assert [adapting.learn_idle(run, policy) for _ in range(4)] == [True, True, False, False]
    adapting.is_due(run, None)
    assert adapting.learn_idle(run, policy)
    stats = adapting.stats(run)
    assert stats.learn_s == 6.0
    assert stats.share == 0.0  # nobody waited


def test_new_weights_are_used_and_the_policy_is_told(clock, learner):
    adapting, run, policy = _adapting(learner), _Run(), _Told()
    run.keep(2)
    _learn(adapting, run, policy)
    assert run.taken == ["new"]
    assert policy.told == [(0.5, 0.25)]
    learner.learned = Learned("newer", 1.4, ())
    _learn(adapting, run, policy)
    assert run.taken == ["new", "newer"]
    assert policy.told == [(0.5, 0.25)]
    stats = adapting.stats(run)
    assert (stats.num_updates, stats.num_dropped, stats.loss) == (2, 0, 1.4)
    assert (stats.num_tokens, stats.num_texts) == (20, 2)
    assert (stats.kept_bytes, stats.learner_bytes) == (500, 1000)


def test_an_update_that_was_dropped_warns_once(clock, learner):
    adapting, run, policy = _adapting(learner), _Run(), _Told()
    run.keep(2)
    learner.learned = Learned(None, float("nan"))
    with pytest.warns(UserWarning, match="was dropped"):
        _learn(adapting, run, policy)
    _learn(adapting, run, policy)  # warnings are errors
    assert run.taken == policy.told == []
    assert adapting.stats(run).num_dropped == 2
    assert not adapting.stats(run).is_off


def test_an_error_ends_learning_and_nothing_else(clock, learner):
    adapting, run = _adapting(learner, max_share=1.0), _Run()
    run.keep(2)
    clock.now += 100
    learner.learned = RuntimeError("RESOURCE_EXHAUSTED")
    with pytest.warns(UserWarning, match="learns no more: .*RESOURCE_EXHAUSTED"):
        _learn(adapting, run)
    assert learner.is_gone
    assert run.taken == []
    run.keep(6)
    assert not adapting.is_due(run, None)
    assert not adapting.learn_idle(run, Fixed(3))
    stats = adapting.stats(run)
    assert stats.is_off
    assert (stats.learner_bytes, stats.kept_bytes) == (0, 500)  # steps go on writing windows


@pytest.mark.parametrize("where", ["new weights", "policy"])
def test_what_raises_once_it_has_learned_ends_no_request(where, clock, learner):
    def refuse(*arguments):
        raise ValueError("no")

    adapting, run, policy = _adapting(learner), _Run(), _Told()
    run.keep(2)
    if where == "policy":
        policy.expect_acceptance = refuse
    else:
        run.take_drafter = refuse
    with pytest.warns(UserWarning, match="learns no more: .*no"):
        _learn(adapting, run, policy)
    assert adapting.stats(run).is_off


def test_a_drafter_that_is_off_does_not_learn(clock, learner):
    adapting, run = _adapting(learner, max_share=1.0), _Run()
    run.keep(6)
    clock.now += 100
    assert adapting.is_due(run, None)
    run.faults.is_drafter_off = True
    assert not adapting.is_due(run, None)
    assert learner.is_gone  # its memory is free
    run.faults.is_drafter_off, run.has_windows = False, False
    assert not adapting.is_due(run, None)


def test_what_is_read_before_a_step_may_turn_the_drafter_off(clock, learner):
    adapting, run = _adapting(learner, max_share=1.0), _Run()
    run.keep(6)
    clock.now += 100
    assert adapting.is_due(run, None)
    begun_at = adapting.clock()
    clock.now += 1.0  # a burst is read back, and its drafts were NaN
    run.faults.is_drafter_off, run.device_state.kept = True, ()
    adapting.learn(run, Fixed(3), begun_at=begun_at)
    assert learner.texts == []
    stats = adapting.stats(run)
    assert stats.is_off
    assert stats.share == pytest.approx(1.0 / 101)


def test_an_interrupt_loses_one_step(clock, learner):
    adapting, run = _adapting(learner, max_share=1.0), _Run()
    run.keep(6)
    learn, learner.learn = learner.learn, _interrupted
    with pytest.raises(KeyboardInterrupt):
        _learn(adapting, run)
    learner.learn = learn
    run.keep(2)
    _learn(adapting, run)
    assert learner.restarts == ["old"]  # what was donated to the step is gone
    assert run.taken == ["new"]


def _interrupted(*arguments):
    raise KeyboardInterrupt


def test_it_goes_on_from_weights_that_a_trainer_brings(clock, learner):
    adapting, run = _adapting(learner), _Run()
    run.params.drafter = "brought"
    adapting.restart(run)
    assert learner.restarts == ["brought"]
    adapting.close()
    with warnings.catch_warnings():
        adapting.restart(run)
    assert learner.restarts == ["brought"]
