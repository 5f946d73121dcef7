"""Which K brings the most tokens per second: by replays of made-up costs, and by hand."""

import dataclasses
import itertools
import json

import numpy as np
import pytest
from asked_for import quick

from benchmarks.replay import Clock, Costs, Replay, Workload
from specjax.decode.bucket import Bucket
from specjax.policy import goodput
from specjax.policy.cost_files import Known
from specjax.policy.goodput import Goodput, ladder
from specjax.policy.interface import Decision, Fixed, Load, Outcome
from specjax.policy.ledger import Ledger
from specjax.policy.ranked_slots import RankedSlots
from specjax.policy.step_cost import MEMORY, StepCosts
from specjax.policy.survival import Survival

ROW_BUCKETS = (1, 2, 4, 8, 16, 32)
FULL = pytest.mark.full


def best_fixed(workload, costs, depths):
    """Returns the K of `depths` that runs a workload fastest when it never changes."""
    runs = {depth: Replay(workload, costs, Fixed(depth)).run() for depth in depths}
    best = min(runs, key=lambda depth: runs[depth].seconds)
    return best, runs[best]


def step_s(bucket, context):
    """A device that is bound by memory up to some tokens, by operations beyond."""
    drafts = bucket.rows * bucket.num_speculative_tokens
    if bucket.max_drafts is not None:
        drafts = bucket.max_drafts
    drafting = bucket.num_speculative_tokens * (1e-4 + 8e-6 * bucket.rows)
    return 1e-3 + 4e-5 * (bucket.rows + drafts) + drafting + 1e-8 * context


COSTS = Costs(step_s, catch_up_s=3e-5, row_buckets=ROW_BUCKETS)


def load(rows=1, **fields):
    known = {
        "row_buckets": [b for b in ROW_BUCKETS if b >= rows],
        "requests": np.arange(rows),
        "draft_caps": np.full(rows, 9),
        "num_behind": np.ones(rows, int),
        "num_steps_left": 10**6,
        "num_probe_steps": 32,
        "num_context_tokens": 100 * rows,
    }
    return Load(num_decoding_rows=rows, **known | fields)


def outcome(policy_load, decision, *, accepted=0, seconds=1.0, steps=32, behind=1, proposes=True):
    """Returns what a burst did in which every row accepted `accepted` of its drafts.

    Args:
      proposes: False of a drafter that found nothing to propose.
    """
    rows, depth = policy_load.num_decoding_rows, decision.num_speculative_tokens
    bucket = Bucket(decision.row_bucket, depth, decision.max_drafts)
    drafted = np.full((steps, rows), depth * proposes)
    stood = np.minimum(drafted, accepted)
    return Outcome(
        decision=decision,
        bucket=bucket,
        num_rows=rows,
        seconds=seconds,
        num_context_tokens=policy_load.num_context_tokens,
        num_behind=behind,
        requests=policy_load.requests,
        asked_depth=np.full(rows, depth),
        num_committed=stood + 1,
        num_accepted=stood,
        draft_depth=drafted,
        proposed_depth=drafted,
    )


def trained(*, accepted, most=4, rows=1):
    """Returns a policy that knows COSTS of some rows, and what is accepted."""
    policy = Goodput(most)
    for bucket in [*policy.buckets([rows])] * 2:  # a bucket measured once would be looked at again
        policy.costs.observe(bucket, 100 * rows, step_s(bucket, 100 * rows))
    now = load(rows)
    first = dataclasses.replace(
        policy.choose(now),
        num_speculative_tokens=most,
        max_drafts=None,
        row_bucket=rows,
    )
    for _ in range(10):
        policy.observe(outcome(now, first, accepted=accepted, seconds=None))
    return policy


@pytest.mark.parametrize(
    ("most", "expected"),
    [
        (1, (1,)),
        (2, (1, 2)),
        (4, (1, 2, 3, 4)),
        (5, (1, 2, 3, 5)),
        (8, (1, 2, 3, 5, 7, 8)),
        (16, (1, 2, 3, 5, 7, 11, 15, 16)),
    ],
)
def test_the_ladder(most, expected):
    assert ladder(most) == expected


def cold(rows=1, compiled=(), **fields):
    """Returns a load of which only some buckets are compiled, in a set that tests add to."""
    compiled = set(compiled)
    known = {"compile_s": 5.0, "row_buckets": [rows], "num_steps_left": 128}
    return load(rows, is_compiled=compiled.__contains__, **known | fields), compiled


def shape_of(decision):
    return Bucket(decision.row_bucket, decision.num_speculative_tokens, decision.max_drafts)


@pytest.mark.parametrize("second_s", [6e-3, 25e-3])
def test_one_disturbed_measurement_does_not_end_drafting(second_s):
    """The last process ended after one burst that drafted, which took four times too long, or as
    long as it does: it is measured again, and left or kept."""
    policy = Goodput(4, depths=(3,))
    plain, drafting = Bucket(8, 0), Bucket(8, 3)
    policy.costs.observe(plain, 800, 4e-3)
    policy.costs.observe(drafting, 800, 25e-3)
    now, _ = cold(8, {plain, drafting}, num_steps_left=10**6)
    depths = []
    for _ in range(150):
        decision = policy.choose(now)
        depth, steps = decision.num_speculative_tokens, decision.num_steps or 32
        depths.append(depth)
        seconds = steps * (second_s if depth else 4e-3)
        policy.observe(outcome(now, decision, accepted=3, seconds=seconds, steps=steps))
    assert 3 in depths[:50]
    share = np.mean(np.array(depths[-50:]) == 3)
    assert share > 0.9 if second_s == 6e-3 else share < 0.1


def test_plain_decoding_runs_while_what_drafts_is_compiled_beside_it():
    policy = Goodput(4)
    now, compiled = cold(3, row_buckets=[4, 8, 16, 32], num_steps_left=10**6)
    for _ in range(50):
        decision = policy.choose(now)
        # A bucket for all rows will do whoever comes.
        assert shape_of(decision) == Bucket(32, 0)
        assert decision.prepare is not None
        assert decision.prepare.rows == 32
        assert decision.reason == "nothing measured yet"
        policy.observe(outcome(now, decision, seconds=None))  # compiling disturbs it
    compiled |= {Bucket(32, 0), decision.prepare}
    depths = []
    for _ in range(60):
        decision = policy.choose(now)
        assert decision.row_bucket == 32
        depths.append(decision.num_speculative_tokens)
        steps = decision.num_steps or 32
        seconds = steps * step_s(shape_of(decision), 300)
        policy.observe(outcome(now, decision, seconds=seconds, steps=steps))
    assert any(depths)  # what drafts is measured
    assert np.mean(np.array(depths[-20:]) > 0) < 0.2  # nothing stood


@pytest.mark.parametrize(
    ("num_steps", "left", "step_s", "waits"),
    [
        (128, 65, 1.0, False),
        (128, 64, 1.0, True),
        (31, 8, 1.0, False),
        (32, 16, 1.0, True),
        # 5 s to compile, of which 6.2 s, 1.55 s, 0.5 s have passed.
        (128, 64, 0.1, True),
        (128, 64, 0.025, False),
        (64, 32, 0.016, False),
    ],
)
def test_a_run_waits_halfway_for_what_is_compiled(num_steps, left, step_s, waits):
    """Its second half measures both, and the next run knows; too short a run does not wait."""
    now_s = 0.0
    policy = Goodput(4, clock=lambda: now_s)
    now, _ = cold(num_steps_left=num_steps)
    assert policy.choose(now).num_speculative_tokens == 0
    for steps in range(num_steps - 1, left - 1, -1):
        now = dataclasses.replace(now, num_steps_left=steps)
        decision = policy.choose(now)
        now_s += step_s
        assert decision.num_speculative_tokens == 0 or steps == left
    assert (decision.num_speculative_tokens > 0) == waits
    assert decision.reason == ("probe" if waits else "nothing measured yet")


@pytest.mark.parametrize("proposes", [True, False])
def test_the_second_policy_knows_what_the_first_measured(proposes):
    """Also of a drafter that was asked and had nothing to propose."""
    first = Goodput(4)
    now, compiled = cold(num_steps_left=10**6)
    for _ in range(60):
        decision = first.choose(now)
        compiled |= {shape_of(decision), decision.prepare or Bucket(1, 0)}
        steps = decision.num_steps or 32
        seconds = steps * step_s(shape_of(decision), 100)
        ran = {"accepted": 0, "seconds": seconds, "steps": steps, "proposes": proposes}
        first.observe(outcome(now, decision, **ran))
    assert first.survival.num_told >= 8
    kept = Survival.of_record(first.survival.to_record(), 4)
    second = Goodput(4, first.costs, survival=kept)
    decisions = [second.choose(now) for _ in range(20)]
    assert {d.num_speculative_tokens for d in decisions} == {0}
    assert {d.prepare for d in decisions} == {None}


def test_what_drafts_runs_first_where_it_is_known_to_be_accepted_and_kept():
    """Plain decoding, whose cost is predicted from other rows, is compiled beside it."""
    known = trained(accepted=4, rows=2)
    policy = Goodput(4, known.costs, survival=known.survival)
    drafting = lambda bucket: 0.1 if bucket.num_speculative_tokens else None
    now, _ = cold(1, read_s=drafting)
    decision = policy.choose(now)
    assert decision.num_speculative_tokens > 0
    assert decision.prepare == Bucket(1, 0)


def test_plain_decoding_is_timed_again_where_a_process_begins_without_it():
    """It was measured in another process, and drafting takes twice as long in this one."""
    policy = trained(accepted=1, most=3)
    now, compiled = cold(1, {Bucket(1, 3)}, num_steps_left=10**6, read_s=lambda bucket: 0.2)
    plain_s, slow_s = step_s(Bucket(1, 0), 100), 3 * step_s(Bucket(1, 3), 100)
    depths = []
    for _ in range(400):
        decision = policy.choose(now)
        depth, steps = decision.num_speculative_tokens, decision.num_steps or 32
        depths.append(depth)
        compiled |= {shape_of(decision), decision.prepare or shape_of(decision)}
        seconds = steps * (slow_s if depth else plain_s)
        policy.observe(outcome(now, decision, accepted=1, seconds=seconds, steps=steps))
    assert Bucket(1, 0) in compiled
    assert np.mean(np.array(depths[-100:]) > 0) < 0.1


def test_a_probe_that_never_ran_costs_nothing_and_keeps_no_other_from_running():
    """Pages were short: the burst that ran drafted nothing."""
    policy, now = trained(accepted=2), load(row_buckets=[1])
    plain = Decision(num_speculative_tokens=0, reason="pages", row_bucket=1)
    num_probes = 0
    for _ in range(200):
        decision = policy.choose(now)
        num_probes += decision.reason == "probe"
        policy.observe(outcome(now, plain, seconds=32 * step_s(Bucket(1, 0), 100)))
    assert num_probes > 2
    assert policy.seconds_lost == 0


def test_what_a_short_process_compiled_is_what_the_next_one_measures():
    """The one before ended before it ran; another K would be compiled in vain again."""
    kept = {Bucket(1, 0), Bucket(1, 2)}
    now, compiled = cold(1, read_s=lambda bucket: 0.2 if bucket in kept else None)
    policy = Goodput(4)
    decision = policy.choose(now)
    assert (shape_of(decision), decision.prepare) == (Bucket(1, 0), Bucket(1, 2))
    compiled |= kept
    depths = []
    for _ in range(12):
        steps = decision.num_steps or 32
        seconds = steps * step_s(shape_of(decision), 100)
        policy.observe(outcome(now, decision, accepted=4, seconds=seconds, steps=steps))
        decision = policy.choose(now)
        depths.append(decision.num_speculative_tokens)
    assert 2 in depths


def test_what_is_on_disk_is_read_before_another_k_is_compiled():
    """Earlier processes missed K = 2 for longer than compiling it takes; K = 4 gains as much."""
    known, kept = trained(accepted=4, rows=1), Bucket(1, 4)
    ledger = Ledger()
    for bucket in (Bucket(1, 2), kept):
        ledger.miss(bucket, 10.0)
    ledger = Ledger.of_record(ledger.to_record())
    read_s = lambda bucket: 0.6 if bucket == kept else None
    now, _ = cold(1, {Bucket(1, 0)}, num_steps_left=64, read_s=read_s)
    policy, prepared, waited_s = (
        Goodput(4, known.costs, ledger=ledger, survival=known.survival),
        [],
        0.0,
    )
    for _ in range(100):
        if any(prepared):
            break
        decision = policy.choose(now)
        prepared.append(decision.prepare)
        seconds = 32 * step_s(Bucket(1, 0), 100)
        policy.observe(outcome(now, decision, seconds=seconds))
        waited_s += seconds
    assert prepared[-1] == kept
    assert waited_s < 3 * 0.6


def test_a_run_waits_for_no_bucket_that_its_rows_have_outgrown():
    now_s = 0.0
    policy = Goodput(4, clock=lambda: now_s)
    kept = lambda bucket: 0.2 if bucket == Bucket(1, 0) else None
    now, _ = cold(1, row_buckets=[1, 8], read_s=kept)
    assert policy.choose(now).prepare.rows == 1
    now_s = 100.0
    grown = dataclasses.replace(cold(4, row_buckets=[8])[0], num_steps_left=60)
    assert policy.choose(grown).row_bucket == 8


def test_nothing_is_compiled_that_cannot_pay():
    known = trained(accepted=0, rows=2)
    for bucket in known.buckets([4, 8]):
        known.costs.observe(bucket, 100.0 * bucket.rows, 2 * step_s(bucket, 100))
    policy = Goodput(4, known.costs, survival=known.survival)
    now, _ = cold(1)
    decision = policy.choose(now)
    assert (shape_of(decision), decision.prepare) == (Bucket(1, 0), None)


def test_nothing_is_explored_where_nothing_may_be_drafted():
    policy = Goodput(4)
    now, _ = cold(most_speculative_tokens=0, limited_by="user")
    decision = policy.choose(now)
    assert (decision.num_speculative_tokens, decision.reason) == (0, "user")
    assert decision.prepare is None
    assert policy.choose(cold()[0]).prepare == Bucket(1, 3)


@pytest.mark.parametrize("num_steps", [32, 9000])
@pytest.mark.parametrize("kept", [(), (0,), (0, 4), (2,)])
def test_a_process_begins_with_what_is_there(kept, num_steps):
    """It waits for no compilation that it can do without; what ends it first is compiled beside,
    where the run is long enough."""
    policy = trained(accepted=4)
    read_s = lambda bucket: 0.01 if bucket.num_speculative_tokens in kept else None
    now, compiled = cold(read_s=read_s, num_steps_left=num_steps)
    decision = policy.choose(now)
    assert decision.num_speculative_tokens == (kept[-1] if kept else 0)
    needs_compiling = num_steps == 9000 and 4 not in kept and 2 not in kept
    assert decision.prepare == (Bucket(1, 4) if needs_compiling else None)
    compiled.add(shape_of(decision))
    assert policy.choose(now).num_speculative_tokens == decision.num_speculative_tokens


def test_plain_decoding_may_begin_a_process_however_seldom_it_was_measured():
    """Of four processes three drafted: that K was measured oftener makes it no faster."""
    policy = trained(accepted=4)
    for _ in range(5):
        policy.costs.observe(Bucket(1, 4), 100, step_s(Bucket(1, 4), 100))
    assert policy.costs.count(Bucket(1, 0)) < 3 < policy.costs.count(Bucket(1, 4))
    read_s = lambda bucket: 0.3 + 0.1 * bucket.num_speculative_tokens
    now, _ = cold(read_s=read_s, num_steps_left=128)
    assert policy.choose(now).num_speculative_tokens == 0
    now, _ = cold(read_s=read_s, num_steps_left=9000)
    assert policy.choose(now).num_speculative_tokens == 4


def test_what_short_runs_lose_adds_up():
    """Each call has a policy of its own; drafting is better, and not compiled."""
    ledger, known = Ledger(), trained(accepted=4)
    now, _ = cold(1, [Bucket(1, 0)])
    num_runs = 0
    while num_runs < 100:
        policy = Goodput(4, known.costs, ledger=ledger, survival=known.survival)
        decision = policy.choose(now)
        assert decision.num_speculative_tokens == 0
        if decision.prepare is not None:
            break
        num_runs += 1
        steps = round(0.5 / step_s(Bucket(1, 0), 100))
        policy.observe(outcome(now, decision, seconds=0.5, steps=steps))
    gain = 1 - step_s(Bucket(1, 4), 100) / (5 * step_s(Bucket(1, 0), 100))
    assert num_runs == pytest.approx(goodput.SURE_SHARE * 5.0 / (0.5 * gain), abs=1)
    assert decision.prepare == Bucket(1, 4)


@pytest.mark.parametrize("is_kept", [False, True])
def test_what_short_processes_lose_repays_compiling_and_no_reading(is_kept):
    """What is compiled serves all processes to come; each of them reads it anew."""
    ledger, known = Ledger(), trained(accepted=4)
    read_s = lambda bucket: 0.5 if is_kept else None
    now, _ = cold(1, [Bucket(1, 0)], read_s=read_s)
    for _ in range(100):
        ledger = Ledger.of_record(ledger.to_record())
        policy = Goodput(4, known.costs, ledger=ledger, survival=known.survival)
        decision = policy.choose(now)
        if decision.prepare is not None:
            break
        steps = round(0.5 / step_s(Bucket(1, 0), 100))
        policy.observe(outcome(now, decision, seconds=0.5, steps=steps))
    assert decision.prepare == (None if is_kept else Bucket(1, 4))
    # One that goes on repays it.
    policy.observe(outcome(now, decision, seconds=5.0, steps=10 * steps))
    assert policy.choose(now).prepare == Bucket(1, 4)


@pytest.mark.parametrize("rate", [0.0, 0.5, 0.8, 0.95])
@pytest.mark.parametrize("rows", quick([1, 4, 32], 4))
def test_never_slower_than_the_best_k(rate, rows):
    workload = Workload(np.full(rows, 3000), np.full(rows, rate), context=100)
    _, best = best_fixed(workload, COSTS, (0, 1, 2, 4, 7))
    ran = Replay(workload, COSTS, Goodput(7)).run()
    assert ran.num_tokens == best.num_tokens == 3000 * rows
    share = ran.tokens_per_second(after_steps=200) / best.tokens_per_second(200)
    # Up to 1.5 % goes into asking whether drafts are worth anything by now.
    assert share >= (0.98 if rate == 0 else 0.94)
    assert best.seconds / ran.seconds > 0.92  # learning included


@pytest.mark.full
def test_rows_that_differ_are_drafted_for_differently():
    """Half the rows copy, half are random: no K for all is as good as slots by rank."""
    rates = np.where(np.arange(32) % 2, 0.95, 0.2)
    workload = Workload(np.full(32, 6000), rates, context=100)
    _, best = best_fixed(workload, COSTS, (0, 1, 2, 4, 7))
    ranked = Replay(workload, COSTS, Goodput(7)).run()
    one_for_all = Replay(workload, COSTS, Goodput(7, ranks=False)).run()
    rate = lambda run: (
        sum(b.num_tokens for b in run.bursts if b.num_rows == 32)
        / sum(b.seconds for b in run.bursts if b.num_rows == 32)
    )
    assert rate(ranked) > 1.02 * rate(one_for_all)
    assert rate(ranked) > 1.02 * rate(best)
    assert any(b.decision.max_drafts is not None for b in ranked.bursts)


@pytest.mark.full
def test_k_rises_as_rows_drain():
    rng = np.random.default_rng(5)
    lengths = np.sort((600 * (1 + rng.pareto(1.2, 32))).astype(int).clip(max=9000))
    workload = Workload(lengths, np.full(32, 0.7), context=100)
    policy = Goodput(7)
    for bucket in policy.buckets(ROW_BUCKETS):
        context = 100 * bucket.rows
        for _ in range(MEMORY):
            policy.costs.observe(bucket, context, step_s(bucket, context))
    ran = Replay(workload, COSTS, policy).run()
    depths = lambda rows: [
        b.decision.num_speculative_tokens
        for b in ran.bursts
        if b.num_rows in rows and b.decision.reason == "goodput"
    ]
    assert np.mean(depths(range(1, 3))) > np.mean(depths(range(24, 33))) + 1
    _, best = best_fixed(workload, COSTS, (0, 1, 2, 4, 7))
    assert best.seconds / ran.seconds > 1.0
    # And of which nothing was measured before.
    cold = Replay(workload, COSTS, Goodput(7)).run()
    assert best.seconds / cold.seconds > 0.95


def test_everything_accepted_and_nothing_accepted():
    assert trained(accepted=4).choose(load()).num_speculative_tokens == 4
    assert trained(accepted=0).choose(load()).num_speculative_tokens == 0


def test_a_decision_says_what_it_expects():
    policy = trained(accepted=4)
    decision = policy.choose(load())
    assert decision.reason == "goodput"
    assert decision.predicted_step_s == pytest.approx(step_s(Bucket(1, 4), 100), rel=0.01)
    assert decision.predicted_tokens == pytest.approx(5.0, rel=0.05)


def test_what_a_load_allows_wins():
    policy = trained(accepted=4)
    decision = policy.choose(load(most_speculative_tokens=2, limited_by="memory gate"))
    assert decision.num_speculative_tokens == 2
    assert decision.reason == "memory gate"
    decision = policy.choose(load(most_speculative_tokens=0, limited_by="rows"))
    assert (decision.num_speculative_tokens, decision.reason) == (0, "rows")
    # Whoever would not draft anyway is not limited.
    policy = trained(accepted=0)
    assert policy.choose(load(most_speculative_tokens=0)).reason == "goodput"


def test_limits_hold_before_anything_is_measured():
    decision = Goodput(4).choose(load(most_speculative_tokens=0, limited_by="pages"))
    assert (decision.num_speculative_tokens, decision.reason) == (0, "pages")


def test_nobody_drafts_where_no_row_may():
    policy = trained(accepted=4, rows=2)
    now = load(2, draft_caps=np.zeros(2, int))
    assert policy.choose(now).num_speculative_tokens == 0


def test_leaving_plain_decoding_must_repay_the_drafter_catching_up():
    policy = trained(accepted=1, most=1)
    plain = load(most_speculative_tokens=0)
    assert policy.choose(plain).num_speculative_tokens == 0
    behind = np.full(1, 5000)
    decision = policy.choose(load(num_behind=behind, num_steps_left=40))
    assert (decision.reason, decision.num_speculative_tokens) == ("unproven", 0)
    assert policy.choose(load(num_steps_left=40)).num_speculative_tokens == 1


@pytest.mark.parametrize("share", [0.02, 0.5])
def test_catching_up_is_no_part_of_what_a_step_costs(share):
    """A fraction of a burst, or half of it."""
    policy, now, bucket = trained(accepted=4), load(), Bucket(1, 4)
    before = policy.costs.seconds(bucket, 100)
    num_behind = int(share * 32 * before / 2e-5)
    decision = Decision(num_speculative_tokens=4, reason="test", row_bucket=1)
    for number in range(60):
        behind = num_behind * (number % 2)  # it catches up in every other burst
        seconds = 32 * before + behind * 2e-5
        policy.observe(outcome(now, decision, accepted=4, seconds=seconds, behind=behind + 1))
    assert policy.costs.seconds(bucket, 100) == pytest.approx(before, rel=0.02)
    late_s = 32 * (policy.costs.seconds(bucket, 100, 32, num_behind) - before)
    assert late_s == pytest.approx(num_behind * 2e-5, rel=0.3, abs=0.02 * 32 * before)


@pytest.mark.full
def test_probes_cost_no_more_than_their_share():
    rates = np.full(4, 0.6)
    workload = Workload(np.full(4, 60_000), rates, context=100)
    policy = Goodput(4)
    ran = Replay(workload, COSTS, policy).run()
    probes = [b for b in ran.bursts if b.decision.reason == "probe"]
    assert len(probes) > 3
    first_s = goodput.FIRST_STEPS * step_s(Bucket(4, 0), 400)
    assert policy.seconds_lost < goodput.BUDGET_SHARE * ran.seconds + 2 * first_s


def few_trials(*, stood):
    """Returns a policy at K = 0 that asked for 40 tokens, of which some stood."""
    policy, now = trained(accepted=0, most=1), load(row_buckets=[1])
    policy.survival = Survival(1)
    for place in range(40):
        decision = Decision(num_speculative_tokens=1, reason="test", row_bucket=1)
        accepted = int(place < stood)
        burst = outcome(now, decision, accepted=accepted, seconds=None, steps=1)
        policy.observe(burst)
    for bucket in (Bucket(1, 0), Bucket(1, 1)):
        for _ in range(16):
            policy.costs.observe(bucket, 100, step_s(bucket, 100))
    assert policy.choose(now).num_speculative_tokens == 0
    return policy, now


@pytest.mark.parametrize(("stood", "least"), [(0, 0.0), (1, 0.0), (5, 0.2)])
def test_what_may_well_be_worth_drafting_is_asked_more_often(stood, least):
    """Drafting pays from about a seventh on: one of forty is hardly that, five may be more."""
    policy, now = few_trials(stood=stood)
    plain_s, num_probes = 32 * step_s(Bucket(1, 0), 100), 0
    for _ in range(20):
        decision = policy.choose(now)
        num_probes += decision.reason == "probe"
        plain = dataclasses.replace(
            decision, num_speculative_tokens=0, num_steps=None, row_bucket=1
        )
        policy.observe(outcome(now, plain, seconds=plain_s))
    assert num_probes >= least * 20
    if not least:
        assert num_probes <= 2


@pytest.mark.full
def test_drafting_begins_again_with_requests_that_copy():
    """At K = 0 new requests, which the drafter has seen, are asked."""
    policy = trained(accepted=0, rows=4)
    depths = []
    for first in range(4, 4000, 4):
        now = load(4, requests=np.arange(first, first + 4))
        decision = policy.choose(now)
        depths.append(decision.num_speculative_tokens)
        seconds = decision.num_steps or 32
        bucket = Bucket(4, decision.num_speculative_tokens, decision.max_drafts)
        seconds = seconds * step_s(bucket, 400)
        policy.observe(
            outcome(
                now,
                decision,
                accepted=9,
                seconds=seconds,
                steps=decision.num_steps or 32,
            )
        )
    assert depths[0] == 0
    assert np.mean(depths[-500:]) > 3.8  # but for probes


@pytest.mark.parametrize(
    ("runs", "share"), [(0, goodput.SURE_SHARE), (3, goodput.COMPILE_SHARE)], ids=["sure", "little"]
)
def test_a_bucket_is_compiled_once_it_would_have_paid(runs, share):
    """K = 4 is 3 times as fast as plain decoding, and 14 % faster than K = 3."""
    policy, compiled = trained(accepted=4), {Bucket(1, 0), Bucket(1, runs)}
    now = load(compile_s=2.0, is_compiled=compiled.__contains__, row_buckets=[1])
    rate = lambda depth: (depth + 1) / step_s(Bucket(1, depth), 100)
    lost = 0.0
    for _ in itertools.count():
        decision = policy.choose(now)
        if decision.prepare is not None:
            break
        assert lost < 4.0
        depth = decision.num_speculative_tokens
        seconds = 32 * step_s(Bucket(1, depth), 100)
        policy.observe(outcome(now, decision, accepted=depth, seconds=seconds))
        lost += (1 - rate(depth) / rate(4)) * seconds
    assert lost == pytest.approx(share * 2.0, abs=0.15)  # what probes lose is no regret
    assert decision.prepare == Bucket(1, 4)
    coming = dataclasses.replace(now, is_any_coming=lambda: True)  # whatever it is
    assert policy.choose(coming).prepare is None
    compiled.add(Bucket(1, 4))
    for _ in range(20):  # it may wait for what a probe may lose
        decision = policy.choose(now)
        if decision.num_speculative_tokens == 4:
            break
        seconds = 32 * step_s(Bucket(1, runs), 100)
        policy.observe(outcome(now, decision, accepted=runs, seconds=seconds))
    assert decision.num_speculative_tokens == 4


@pytest.mark.full
def test_drafting_begins_again_though_only_the_bucket_of_all_rows_can():
    """What drafts is compiled for 32 rows alone; plain decoding for 4 of them too."""
    compiled = {Bucket(32, 4), Bucket(32, 0), Bucket(4, 0)}
    policy = Goodput(4)
    for bucket in compiled:
        policy.costs.observe(bucket, 300, step_s(bucket, 300))
    depths = []
    for place in range(1200):
        now = load(
            3,
            requests=np.arange(3 * place, 3 * place + 3),
            compile_s=5.0,
            is_compiled=compiled.__contains__,
        )
        decision = policy.choose(now)
        bucket = shape_of(decision)
        compiled |= {bucket, decision.prepare or bucket}
        depths.append(decision.num_speculative_tokens)
        steps = decision.num_steps or 32
        policy.observe(
            outcome(
                now,
                decision,
                accepted=9 if place > 100 else 0,
                seconds=steps * step_s(bucket, 300),
                steps=steps,
            )
        )
    assert depths[99] == 0
    assert depths[-1] == 4


def test_a_row_that_once_did_badly_is_asked_again():
    rng = np.random.default_rng(0)
    policy, asked = trained(accepted=2, most=4, rows=8), []
    compiled = {Bucket(8, 4, 16), Bucket(8, 0)}
    now = load(8, compile_s=1e9, is_compiled=compiled.__contains__)
    for place in range(1500):
        decision = policy.choose(now)
        rates = np.where(np.arange(8) > 0, 0.9, 0.02 if place < 100 else 0.95)
        caps = decision.draft_caps
        depth = decision.num_speculative_tokens
        caps = np.full(8, depth) if caps is None else np.minimum(caps, depth)
        stands = rng.uniform(size=(8, 8, 4)) < rates[None, :, None]
        stood = np.minimum(stands.cumprod(axis=2).sum(axis=2), caps)
        drafted = np.broadcast_to(caps, stood.shape)
        result = outcome(now, decision, steps=8)
        result = dataclasses.replace(
            result,
            asked_depth=caps,
            num_committed=stood + 1,
            num_accepted=stood,
            draft_depth=drafted,
            proposed_depth=drafted,
            seconds=None,
        )
        policy.observe(result)
        asked.append(int(caps[0]))
    assert max(asked[60:100]) == 0
    assert np.mean(asked[-200:]) > 1


def steps_of_the_last_row(rows, tokens, rate, depth, repeats=200):
    """Returns the mean steps until all of so many rows have their tokens, by drawing."""
    rng = np.random.default_rng(0)
    left = np.full((repeats, rows), tokens)
    steps = np.zeros(repeats)
    while left.any():
        steps += left.any(axis=1)
        stands = rng.uniform(size=(*left.shape, depth)) < rate
        left = np.maximum(left - 1 - stands.cumprod(axis=-1).sum(axis=-1), 0)
    return steps.mean()


@pytest.mark.parametrize(
    ("rows", "tokens", "rate", "depth"),
    [
        (16, 96, 0.7, 1),
        (16, 40, 0.7, 2),
        (64, 200, 0.5, 4),
        (4, 96, 0.8, 7),
        (1, 60, 0.8, 7),
    ],
)
def test_how_long_the_last_of_rows_that_are_not_refilled_takes(rows, tokens, rate, depth):
    slots = slots_of(rows, tokens, rate)
    bucket = Bucket(rows, depth)
    per_step = 1 + slots.expected(bucket) / rows
    expected = tokens / per_step / slots.together(bucket)
    drawn = steps_of_the_last_row(rows, tokens, rate, depth)
    # The rate was learned from some thousand draws itself, and so was how little rows differ.
    assert expected == pytest.approx(drawn, rel=0.08)
    assert slots.together(Bucket(rows, 0)) == 1.0


@pytest.mark.parametrize("num_steps", [2, 5])
@pytest.mark.parametrize(("rows", "rate", "depth"), [(16, 0.7, 3), (4, 0.5, 1), (1, 0.8, 5)])
def test_a_few_steps_bring_the_end_nearer_by_what_the_last_row_gains(rows, rate, depth, num_steps):
    slots = slots_of(rows, 60, rate)
    stands = np.random.default_rng(0).uniform(size=(500, num_steps, rows, depth)) < rate
    gained = (1 + stands.cumprod(axis=-1).sum(axis=-1)).sum(axis=1)
    saved = slots.steps_saved(Bucket(rows, depth), num_steps)
    assert saved == pytest.approx(gained.min(axis=1).mean(), rel=0.2)
    assert num_steps <= saved <= gained.mean() * 1.05


def test_the_row_that_is_far_from_its_end_says_what_a_few_steps_save():
    left = np.array([200, 20, 20, 20])
    slots = slots_of(4, left, 0.7)
    alone = slots_of(1, 200, 0.7).steps_saved(Bucket(1, 3), 4)
    assert slots.steps_saved(Bucket(4, 3), 4) == pytest.approx(alone)


@pytest.mark.parametrize("rows", [1, 4])
def test_no_step_saves_what_lies_beyond_the_end(rows):
    slots = slots_of(rows, 4, 0.8)
    assert slots.steps_saved(Bucket(rows, 7), 2) == 4
    assert slots.steps_saved(Bucket(rows, 7), 6) == 4


def test_slots_by_rank_save_less_the_fewer_they_are():
    slots = slots_of(16, 60, 0.7)
    few, many, every = (slots.steps_saved(Bucket(16, 3, n), 8) for n in (8, 32, None))
    assert 8 <= few < many < every


def test_rows_of_which_nothing_is_known_may_differ():
    """Those of which much is known may not, and slots by rank leave out hard rows."""
    known = slots_of(16, 96, 0.7)
    unknown = RankedSlots(Survival(7), np.arange(16), np.full(16, 9), ladder(7), np.full(16, 96))
    bucket, ranked = Bucket(16, 3), Bucket(16, 3, 16)
    assert unknown.together(bucket) < 0.93 * known.together(bucket)
    assert unknown.together(ranked) > 1.05 * unknown.together(bucket)
    assert unknown.steps_saved(bucket, 4) < known.steps_saved(bucket, 4)


def slots_of(rows, tokens, rate):
    survival = Survival(7)
    rng = np.random.default_rng(0)
    for _ in range(40):
        drafted = np.full((32, 8), 7)
        stood = (rng.uniform(size=(32, 8, 7)) < rate).cumprod(axis=-1).sum(axis=-1)
        asked = np.full(8, 7)
        survival.observe(np.arange(8) + 10**6, stood + 1, stood, drafted, drafted, asked)
    left = np.broadcast_to(tokens, rows)
    return RankedSlots(survival, np.arange(rows), np.full(rows, 9), ladder(7), left)


@pytest.mark.parametrize("rows", [8, 33, 256])
@pytest.mark.parametrize("place", [0, 0.5, 1])
def test_one_row_that_is_far_from_its_end_is_the_last_whatever_others_do(rows, place):
    left = np.full(rows, 60)
    left[int(place * (rows - 1))] = 3000
    slots = slots_of(rows, left, 0.6)
    assert slots.together(Bucket(rows, 1)) > 0.99
    assert slots.together(Bucket(rows, 7)) > 0.99


def test_of_rows_that_are_as_likely_those_far_from_their_end_get_more():
    policy = trained(accepted=3, most=6, rows=8)
    arguments = policy.survival, np.arange(8), np.full(8, 9), ladder(6), np.full(8, 60)
    urgency = np.array([1.0, 0.25, 0.05, 0.05, 0.05, 0.05, 0.05, 0.05])
    bucket = Bucket(8, 6, 8)
    alike = RankedSlots(*arguments).likeliest(bucket)
    given = RankedSlots(*arguments, urgency).likeliest(bucket)
    assert len(set(alike.tolist())) == 1
    assert given[0] >= given[1] > given[2]
    assert given[0] > alike[0] >= given[2]
    # Nobody expects more tokens than if the likeliest had been chosen.
    plain, urgent = RankedSlots(*arguments), RankedSlots(*arguments, urgency)
    assert urgent.expected(bucket) <= plain.expected(bucket) + 1e-9
    assert urgent.expected(Bucket(8, 6)) == plain.expected(Bucket(8, 6))


def test_rows_that_end_apart_are_drafted_for_only_where_that_still_pays():
    """K = 1 is better by a little per token, and worse until the last of 32 rows is done."""
    policy = trained(accepted=1, most=1, rows=32)
    for drafting in range(40):
        now = load(32)
        decision = dataclasses.replace(
            policy.choose(now), num_speculative_tokens=1, max_drafts=None
        )
        ran = outcome(now, decision, accepted=1, seconds=None)
        stood = (np.arange(32) + np.arange(32)[:, None] + drafting) % 2  # [steps, rows]
        policy.observe(dataclasses.replace(ran, num_accepted=stood, num_committed=stood + 1))
    slots = RankedSlots(policy.survival, np.arange(32), np.full(32, 9), (1,), ())
    rate = slots.expected(Bucket(32, 1)) / 32
    plain_s = 1e-3
    policy.costs = StepCosts()
    for depth in (0, 1):
        seconds = plain_s * (1 + depth * rate) / (1 + 0.06 * depth)
        for _ in range(MEMORY):
            policy.costs.observe(Bucket(32, depth), 3200, seconds)
    refilled = load(32, num_probe_steps=0)
    assert policy.choose(refilled).num_speculative_tokens == 1
    closed = load(32, num_probe_steps=0, tokens_left=np.full(32, 40), num_steps_left=40)
    assert policy.choose(closed).num_speculative_tokens == 0


def test_more_rows_than_needed_are_looked_at_only_for_what_is_missing():
    policy = trained(accepted=4, rows=4)
    for depth in (0, 4):
        # It looks twice as fast, and cannot be.
        seconds = step_s(Bucket(4, depth), 400) / 2
        for _ in range(MEMORY):
            policy.costs.observe(Bucket(8, depth), 400, seconds)
    assert policy.choose(load(4)).row_bucket == 4
    only_of_8 = lambda bucket: bucket.rows == 8
    assert policy.choose(load(4, is_compiled=only_of_8)).row_bucket == 8
    reasons = []
    for _ in range(300):
        now = load(4)
        decision = policy.choose(now)
        reasons.append(decision.reason)
        assert decision.row_bucket == 4
        bucket = Bucket(4, decision.num_speculative_tokens, decision.max_drafts)
        ran = outcome(now, decision, accepted=4, seconds=32 * step_s(bucket, 400))
        policy.observe(ran)
    assert "probe" in reasons


@pytest.mark.parametrize(
    ("rows", "rate"),
    [(1, 0.8), *(pytest.param(*at, marks=FULL) for at in [(4, 0.5), (16, 0.7), (32, 0.0)])],
)
def test_short_generations_on_a_machine_that_others_use_are_never_slower(rows, rate):
    """One policy, three bursts per generation; one in eight takes up to twice as long."""
    workload = Workload(np.full(rows, 96), np.full(rows, rate), context=100)
    _, best = best_fixed(workload, COSTS, (0, 1, 2, 4, 7))
    shares = []
    for seed in range(4):
        policy = Goodput(7)
        clock = Clock(seed, 0.06, wander=0.06, disturbed=0.12)
        seconds = []
        for number in range(40):
            run = Replay(workload, COSTS, policy, clock=clock, first_request=rows * number)
            seconds.append(run.run().seconds)
        shares.append(best.seconds / np.mean(seconds[20:]))
    assert np.mean(shares) > 0.94
    assert min(shares) > 0.86


@pytest.mark.full
@pytest.mark.parametrize("are_processes", [False, pytest.param(True, marks=FULL)])
@pytest.mark.parametrize(
    ("rows", "rate"),
    [
        (1, 0.8),
        *(pytest.param(*at, marks=FULL) for at in [(8, 0.0), (8, 0.9)]),
        *(pytest.param(*at, marks=pytest.mark.slow) for at in [(1, 0.0), (8, 0.5)]),
    ],
)
def test_calls_that_have_a_policy_each_are_never_slower(rows, rate, are_processes):
    """What is known goes from call to call, or through a file; the first runs at two thirds of the
    speed."""
    of_plain, of_best = [], []
    for seed in range(4):
        workloads = [
            Workload(np.full(rows, 128), np.full(rows, rate), context=64, seed=number)
            for number in range(25)
        ]
        fixed = np.array(
            [[Replay(each, COSTS, Fixed(k)).run().seconds for each in workloads] for k in range(5)]
        )
        clock = Clock(seed, 0.06, wander=0.06, disturbed=0.12)
        known, seconds = Known(StepCosts()), []
        for number, workload in enumerate(workloads):
            record = known.acceptance.get("")
            policy = Goodput(
                4,
                known.costs,
                survival=Survival.of_record(record, 4) if record else None,
                ledger=known.ledgers.get("", Ledger()),
            )
            slow = 1.0 if number else 1.5
            ran = Replay(
                workload,
                COSTS,
                policy,
                clock=lambda slow=slow, clock=clock: slow * clock(),
                first_request=number * rows,
            ).run()
            seconds.append(ran.seconds)
            acceptance = {"": policy.survival.to_record()}
            known = Known(policy.costs, acceptance, {"": policy.ledger})
            document, known = known.to_document(), known.copy()
            if are_processes:
                known = Known(StepCosts())
                known.add(json.loads(json.dumps(document)))
        of_plain.append(fixed[0, 1:].sum() / sum(seconds[1:]))
        of_best.append(fixed[:, 10:].sum(axis=1).min() / sum(seconds[10:]))
    assert np.mean(of_plain) > 0.98
    assert min(of_plain) > 0.95
    assert np.mean(of_best) > 0.96
    assert min(of_best) > 0.9


def test_plain_decoding_of_more_rows_is_compiled_where_that_of_fewer_did_not_fit():
    """Nothing is accepted, and all that may run at first drafts."""
    policy, compiled = Goodput(4), {Bucket(32, 4)}
    is_dropped = lambda bucket: bucket.rows == 4
    for _ in range(200):
        now = load(
            row_buckets=[4, 32],
            is_dropped=is_dropped,
            is_compiled=compiled.__contains__,
            compile_s=0.1,
        )
        decision = policy.choose(now)
        bucket = Bucket(decision.row_bucket, decision.num_speculative_tokens)
        assert not is_dropped(bucket)
        compiled |= {bucket, decision.prepare or bucket}
        policy.observe(outcome(now, decision, seconds=32 * step_s(bucket, 100)))
    assert bucket == Bucket(32, 0)


@pytest.mark.parametrize("rows", [1, 4])
def test_something_runs_whatever_did_not_fit(rows):
    is_plain = lambda bucket: not bucket.num_speculative_tokens
    for is_dropped, depths in (
        (lambda bucket: not is_plain(bucket), {0}),
        (is_plain, {1, 2, 3, 4}),
        (lambda bucket: True, {0}),
        (lambda bucket: bucket != Bucket(rows, 2), {2}),
    ):
        policy, compiled = Goodput(4), set()
        for _ in range(8):
            now = load(
                rows, is_dropped=is_dropped, is_compiled=compiled.__contains__, compile_s=1.0
            )
            decision = policy.choose(now)
            assert decision.num_speculative_tokens in depths
            assert decision.prepare is None or not is_dropped(decision.prepare)
            bucket = shape_of(decision)
            compiled |= {bucket, decision.prepare or bucket}
            policy.observe(outcome(now, decision, seconds=32 * step_s(bucket, 100)))


def test_what_may_be_best_is_never_free():
    """Costs of drafting steps alone, whose fit has no constant: plain decoding would cost
    nothing."""
    policy = Goodput(7)
    for bucket, seconds in ((Bucket(1, 2), 2e-3), (Bucket(1, 4), 4.1e-3)):
        policy.costs.observe(bucket, 100, seconds)
    with np.errstate(all="raise"):
        policy.choose(load())
    assert policy.costs.seconds(Bucket(1, 0), 100) > 1e-4


@pytest.mark.full
def test_drafts_are_asked_for_though_catching_up_is_thought_to_cost_much():
    """Late, and for no more than its share: what is thought of it may be wrong."""
    policy = trained(accepted=0)
    step = step_s(Bucket(1, 0), 100)
    for late in (0, 1000) * 9:  # 1 % of a step for each token
        seconds = step_s(Bucket(1, 1), 100) + 0.01 * step * late / 32
        policy.costs.observe(Bucket(1, 1), 100, seconds, 32, late)
    now_s, asked = 0.0, []
    behind = 1
    while now_s < 120.0:
        now = load(num_behind=np.array([behind]))
        decision = policy.choose(now)
        depth, steps = decision.num_speculative_tokens, decision.num_steps or 32
        bucket = Bucket(1, depth)
        seconds = steps * step_s(bucket, 100)
        if depth:
            seconds += 0.01 * step * (behind - 1)
            asked.append((now_s, seconds))
        ran = outcome(now, decision, seconds=seconds, steps=steps, behind=behind)
        behind = 1 if depth else behind + steps
        now_s += seconds
        policy.observe(ran)
    assert asked[1:]
    late = [seconds for when, seconds in asked if when > 20]
    assert len(late) >= 2
    assert sum(late) < 0.03 * now_s


def test_what_a_burst_read_from_disk_leaves_to_save_adds_up_over_processes():
    """K = 2 is kept on disk and read by each process, K = 4 is better and is not."""
    known, ledger = trained(accepted=4), Ledger()
    for _ in range(3):
        for bucket in known.buckets([1]):
            known.costs.observe(bucket, 100, step_s(bucket, 100))
    prepared, ran = [], set()
    for _ in range(200):
        ledger = Ledger.of_record(json.loads(json.dumps(ledger.to_record())))
        policy = Goodput(
            4, known.costs.copy(), ledger=ledger, survival=known.survival, depths=(2, 4)
        )
        read_s = lambda bucket: 0.05 if bucket == Bucket(1, 2) else None
        now, compiled = cold(1, [Bucket(1, 0)], read_s=read_s)
        left = 2000
        while left > 0 and Bucket(1, 4) not in prepared:
            decision = policy.choose(dataclasses.replace(now, num_steps_left=left))
            compiled |= {shape_of(decision), decision.prepare or Bucket(1, 0)}
            prepared += [decision.prepare] if decision.prepare else []
            ran.add(shape_of(decision))
            steps = decision.num_steps or 32
            left -= steps * (1 + decision.num_speculative_tokens)
            seconds = steps * step_s(shape_of(decision), 100)
            policy.observe(outcome(now, decision, accepted=4, seconds=seconds, steps=steps))
    assert Bucket(1, 2) in ran
    assert prepared == [Bucket(1, 4)]


@pytest.mark.full
@pytest.mark.parametrize("share", [0.02, 0.05])
def test_asking_goes_on_though_catching_up_takes_a_large_share(share):
    """Requests of 17 s each: once in half a minute an ask may take 3 % of half a minute."""
    policy, step = trained(accepted=0), step_s(Bucket(1, 0), 100)
    now_s, behind, asked = 0.0, 1, []
    while now_s < 150.0:
        behind = 1 if behind * step > 17.0 else behind
        now = load(num_behind=np.array([behind]))
        decision = policy.choose(now)
        depth, steps = decision.num_speculative_tokens, decision.num_steps or 32
        seconds = steps * step_s(Bucket(1, depth), 100)
        if depth:
            seconds += share * step * (behind - 1)
            asked.append((now_s, seconds))
        ran = outcome(now, decision, seconds=seconds, steps=steps, behind=behind)
        behind = 1 if depth else behind + steps
        now_s += seconds
        policy.observe(ran)
    late = [when for when, _ in asked if when > 20.0]
    assert len(late) >= 3
    for start in range(0, 120, 2):
        within = sum(seconds for when, seconds in asked if start + 20 < when < start + 50)
        assert within < 1.4 * 0.9 if share > 0.03 else within < 1.1


def test_steps_that_take_long_are_measured_in_few():
    """0.5 s for each: a probe of eight of them would take a seventh of half a minute."""
    slow = lambda bucket, context: 400 * step_s(bucket, context)
    costs = Costs(slow, catch_up_s=1e-2, row_buckets=(1,))
    workload = Workload(np.full(1, 600), np.full(1, 0.05), context=100)
    options = {"until_s": 120.0}
    plain = Replay(workload, costs, Fixed(0), **options).run()
    policy = Goodput(4)
    for depth in (0, 3):
        policy.costs.observe(Bucket(1, depth), 100, slow(Bucket(1, depth), 100))
    ran = Replay(workload, costs, policy, **options).run()
    probes = [b for b in ran.bursts if b.decision.num_speculative_tokens]
    assert max(burst.num_steps for burst in probes) == 2
    # The first half minute, in which what is accepted was not known; 0.78 with longer ones.
    assert ran.least_of(plain, 30.0) > 0.92
    assert policy.costs.count(Bucket(1, 0)) > 1


def test_a_burst_that_pages_cut_has_fewer_steps_to_share_what_it_takes():
    """At K = 1 a step takes 1.14 times as long and commits half a token more; what a burst takes
    beside its steps is that of five. Pages of two tokens are one such step, or two plain ones."""
    policy = trained(accepted=0, most=1)
    drafting = Decision(num_speculative_tokens=1, reason="test", row_bucket=1)
    every_other = np.arange(32)[:, None] % 2
    ran = outcome(load(), drafting, seconds=None)
    ran = dataclasses.replace(ran, num_committed=1 + every_other, num_accepted=every_other)
    for _ in range(10):
        policy.observe(ran)
    for _ in range(30):
        for depth in (0, 1):
            for steps in (1, 8, 32):
                seconds = step_s(Bucket(1, depth), 100) + 5 * step_s(Bucket(1, 0), 100) / steps
                policy.costs.observe(Bucket(1, depth), 100, seconds, steps)
    chosen = lambda: policy.choose(load()).num_speculative_tokens
    assert chosen() == 1
    cut, whole = (dataclasses.replace(ran, growth=n, is_cut=n == 2) for n in (2, 64))
    policy.observe(cut)
    assert chosen() == 0
    # What one burst says changes no K; those that follow do.
    policy.observe(dataclasses.replace(cut, growth=64))
    assert chosen() == 0
    policy.observe(whole)
    assert chosen() == 1
    for _ in range(15):
        policy.observe(cut)
        assert chosen() == 1
    for _ in range(15):
        policy.observe(cut)
    assert chosen() == 0


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        # Of steps that take little more with every token, the longest draft may gain most; of
        # others the one that loses least.
        ([1.0, 1.5, 1.55, 1.6, 1.65], 3),
        ([1.0, 1.3, 2.2, 3.3, 4.5], 1),
        # Of those that differ by less than predictions err, the smallest K.
        ([1.0, 1.37, 1.81, 2.21, 2.8], 1),
    ],
)
def test_what_is_drafted_first_is_best_over_all_that_acceptance_may_be(seconds, expected):
    costs = StepCosts(prior=lambda bucket, context: 1e-3 * seconds[bucket.num_speculative_tokens])
    policy = Goodput(4, costs)
    now = load(row_buckets=[1], is_compiled=lambda bucket: False, num_steps_left=4000)
    decision = policy.choose(now)
    assert decision.num_speculative_tokens == 0
    assert decision.prepare == Bucket(1, expected)


def lost_until_prepared(policy, now, most_s=10.0):
    """Returns the seconds of plain bursts until something is compiled, and what; None: nothing."""
    seconds = 0.0
    while seconds < most_s:
        decision = policy.choose(now)
        if decision.prepare is not None:
            return seconds, decision.prepare
        assert decision.num_speculative_tokens == 0
        took_s = 32 * step_s(shape_of(decision), now.num_context_tokens)
        seconds += took_s
        policy.observe(outcome(now, decision, seconds=took_s))
    return None


def test_what_may_not_run_is_not_compiled():
    """Memory is short: the gate is closed, though drafts would bring three times the speed."""
    policy = trained(accepted=4)
    now = load(
        compile_s=5.0,
        is_compiled={Bucket(1, 0)}.__contains__,
        row_buckets=[1],
        most_speculative_tokens=0,
        limited_by="memory gate",
    )
    assert lost_until_prepared(policy, now) is None
    assert not policy.ledger.missed_s
    policy.ledger.miss(Bucket(1, 4), 100.0)  # while it was open
    assert policy.choose(now).prepare is None
    opened = dataclasses.replace(now, most_speculative_tokens=None, limited_by="")
    assert lost_until_prepared(policy, opened) is not None


def test_what_is_surely_better_is_compiled_soon_where_the_process_repays_it():
    """Of as many rows, by a margin that doubts do not reach; the last process decoded for a second,
    and a bucket twice as fast takes five to compile."""
    policy = trained(accepted=4)
    now = load(row_buckets=[1], compile_s=5.0, num_steps_left=9000)
    policy.choose(now)
    of = {c.bucket: c for c in policy._candidates(now)[0]}
    best = of[Bucket(1, 0)]._replace(rate=1.0, doubt=0.0)
    other = of[Bucket(1, 4)]._replace(rate=4.0, doubt=0.0)
    policy.ledger.miss(other.bucket, 2 * goodput.SURE_SHARE * 5.0)
    assert policy._repays(other, best, now)
    assert not policy._repays(other._replace(rate=1.05), best, now)
    assert not policy._repays(other._replace(doubt=5.0), best, now)
    larger = best._replace(bucket=Bucket(8, 0))
    assert not policy._repays(other, larger, now)
    policy.ledger.life_s = 1.0
    short = dataclasses.replace(now, num_steps_left=100)
    assert not policy._repays(other, best, short)
    assert policy._repays(other, best, now)
    policy.ledger.pass_(20.0, is_drafting=False)  # it has run longer than the last one
    assert policy._repays(other, best, short)
    # What processes lost together repays it whatever is left of this one.
    policy.ledger.lived_s = 0.0
    policy.ledger.miss(other.bucket, goodput.COMPILE_SHARE * 5.0)
    assert policy._repays(other, best, short)


def test_a_process_begins_with_larger_buckets_that_are_kept():
    """The last process had eight rows, and this one has one: nothing of one row is there."""
    known, kept = trained(accepted=4), {Bucket(8, 0), Bucket(8, 4)}
    for bucket in [*kept] * 3:
        known.costs.observe(bucket, 100, step_s(bucket, 100))
    read_s = lambda bucket: 0.3 if bucket in kept else None
    now, _ = cold(1, read_s=read_s, row_buckets=[1, 8], num_steps_left=9000)
    decision = Goodput(4, known.costs, survival=known.survival).choose(now)
    assert (decision.row_bucket, decision.num_speculative_tokens) == (8, 4)


def test_what_is_predicted_to_be_slower_is_not_compiled():
    """It was missed while more was accepted."""
    policy = trained(accepted=0)
    policy.ledger.miss(Bucket(1, 4), 100.0)
    now = load(compile_s=5.0, is_compiled={Bucket(1, 0)}.__contains__, row_buckets=[1])
    decision = policy.choose(now)
    assert decision.num_speculative_tokens == 0
    assert decision.prepare is None
