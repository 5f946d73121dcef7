"""Which K beside prompts: by what drafting adds to the step, learned apart from bursts."""

import dataclasses

import pytest
from test_goodput import load, outcome, trained

from specjax.decode.bucket import Bucket
from specjax.policy.beside_prompts import MEMORY, PROBE_EVERY, BesidePrompts, MixedCosts, Option
from specjax.policy.goodput import Goodput

PLAIN, DRAFTING = Bucket(4, 0), Bucket(4, 3)
PROMPTS = 64
RATE = 1000.0  # tokens per second of a burst
# A burst's step takes 10 ms plainly and 12 with drafts, of which 2 tokens of each row stand.
OPTIONS = Option(PLAIN, 4.0, 0.010), [Option(DRAFTING, 12.0, 0.012)]


def beside(rows=4, compiled=(PLAIN, DRAFTING), **fields):
    is_compiled = lambda bucket: bucket in compiled
    return load(rows, prompt_tokens=PROMPTS, is_compiled=is_compiled, **fields)


def learned(plain_s, drafting_s, count=3):
    chooser = BesidePrompts()
    for _ in range(count):
        chooser.costs.observe(PLAIN, PROMPTS, plain_s)
        chooser.costs.observe(DRAFTING, PROMPTS, drafting_s)
    return chooser


@pytest.mark.parametrize(
    ("added_s", "bucket"),
    [
        (0.000, DRAFTING),
        (0.007, DRAFTING),  # 8 tokens more in 7 ms: above the 1,000 per second of a burst
        (0.009, PLAIN),
        (0.100, PLAIN),
    ],
)
def test_drafts_run_where_they_pay_better_than_a_burst(added_s, bucket):
    chooser = learned(0.050, 0.050 + added_s)
    chosen, prepare = chooser.choose(beside(), *OPTIONS, RATE)
    assert (chosen.bucket, prepare) == (bucket, None)


def test_unmeasured_drafts_are_thought_to_add_what_they_add_to_a_burst():
    costs = MixedCosts()
    plain, (drafting,) = OPTIONS
    costs.observe(PLAIN, PROMPTS, 0.050)
    costs.seconds(plain, PROMPTS)
    assert costs.seconds(drafting, PROMPTS) == pytest.approx(0.050 + 0.002)
    # Other prompts tell nothing of these.
    assert costs.seconds(drafting, 4 * PROMPTS) == pytest.approx(0.012)


def test_one_disturbed_step_does_not_count():
    costs = MixedCosts()
    for seconds in (0.05, 5.0, 0.05, 0.05):
        costs.observe(PLAIN, PROMPTS, seconds)
    assert costs.seconds(OPTIONS[0], PROMPTS) == 0.05
    for _ in range(MEMORY):
        costs.observe(PLAIN, PROMPTS, 0.08)  # what was is forgotten
    assert costs.seconds(OPTIONS[0], PROMPTS) == 0.08
    assert costs.count(PLAIN, PROMPTS) == MEMORY


def test_drafts_are_compiled_once_their_absence_cost_as_much():
    """8 tokens and 2 ms more are worth 6 ms of bursts: 10 steps for 60 ms of compiling."""
    chooser = BesidePrompts()
    now = beside(compiled=(PLAIN,), compile_s=0.0595, read_s=lambda bucket: None)
    told = [chooser.choose(now, *OPTIONS, RATE) for _ in range(10)]
    assert {chosen.bucket for chosen, _ in told} == {PLAIN}
    assert [prepare for _, prepare in told] == [None] * 9 + [DRAFTING]
    coming = dataclasses.replace(now, is_coming=lambda bucket: bucket == DRAFTING)
    for _ in range(20):
        assert chooser.choose(coming, *OPTIONS, RATE) == (OPTIONS[0], None)
    assert chooser.choose(beside(), *OPTIONS, RATE)[0].bucket == DRAFTING


def test_what_is_kept_on_disk_runs_before_plain_steps_are_compiled():
    now = beside(compiled=(), read_s=lambda bucket: 0.1 if bucket == DRAFTING else None)
    assert BesidePrompts().choose(now, *OPTIONS, RATE)[0].bucket == DRAFTING
    assert learned(0.05, 0.2).choose(now, *OPTIONS, RATE)[0].bucket == PLAIN


@pytest.mark.parametrize("drafting_s", [0.050, 0.090])
def test_the_other_step_is_measured_now_and_then(drafting_s):
    chooser = learned(0.050, drafting_s)
    chooser.costs.observe(DRAFTING if drafting_s < 0.06 else PLAIN, PROMPTS, 0.050)
    chosen = [chooser.choose(beside(), *OPTIONS, RATE)[0].bucket for _ in range(2 * PROBE_EVERY)]
    usual, other = (DRAFTING, PLAIN) if drafting_s < 0.06 else (PLAIN, DRAFTING)
    assert chosen == ([usual] * (PROBE_EVERY - 1) + [other]) * 2


def test_nothing_is_drafted_beside_prompts_before_bursts_were_measured():
    decision = Goodput(4).choose(beside())
    assert (decision.num_speculative_tokens, decision.reason) == (0, "prompts")
    assert decision.prepare is None


@pytest.mark.parametrize(("accepted", "drafts"), [(4, True), (0, False)])
def test_goodput_drafts_beside_prompts_where_its_bursts_draft(accepted, drafts):
    policy = trained(accepted=accepted, rows=4)
    every = beside(compiled=tuple(Bucket(r, k) for r in (4, 8) for k in (0, 1, 2, 3, 4)))
    decision = policy.choose(every)
    assert (decision.num_speculative_tokens > 0) == drafts
    assert decision.row_bucket == 4
    closed = dataclasses.replace(every, most_speculative_tokens=0, limited_by="memory gate")
    decision = policy.choose(closed)
    assert (decision.num_speculative_tokens, decision.reason) == (0, "memory gate")
    dropped = dataclasses.replace(every, is_dropped=lambda b: b.num_speculative_tokens > 0)
    assert policy.choose(dropped).num_speculative_tokens == 0


def test_a_plain_step_beside_prompts_is_one_of_all_rows_until_another_is_compiled():
    """One executable serves every number of rows."""
    policy = trained(accepted=0, rows=4)
    most = beside().row_buckets[-1]
    assert policy.choose(beside(compiled=())).row_bucket == most
    assert policy.choose(beside(compiled=(Bucket(most, 0),))).row_bucket == most


def test_steps_with_prompts_teach_acceptance_and_no_seconds_of_bursts():
    policy = trained(accepted=2, rows=4)
    every = beside(compiled=tuple(Bucket(4, k) for k in range(5)))
    before = policy.costs.to_records()
    ledger = policy.ledger.copy()
    acceptance = policy.survival.to_record()
    decision = dataclasses.replace(
        policy.choose(every), num_speculative_tokens=4, row_bucket=4, max_drafts=None
    )
    for _ in range(50):
        # A hundred times what such a step of a burst takes.
        mixed = outcome(every, decision, accepted=2, seconds=None, steps=1)
        policy.observe(dataclasses.replace(mixed, mixed_s=1.0, prompt_tokens=PROMPTS))
    assert policy.costs.to_records() == before
    assert policy.ledger == ledger
    assert policy.survival.to_record() != acceptance
    assert policy._beside.costs.count(Bucket(4, 4), PROMPTS) == MEMORY


def test_drafter_catch_up_is_no_part_of_a_step_with_prompts():
    policy = trained(accepted=2, rows=4)
    every = beside()
    decision = policy.choose(every)
    for depth, counted in ((0, True), (3, False)):
        drawn = dataclasses.replace(
            decision, num_speculative_tokens=depth, row_bucket=4, max_drafts=None
        )
        mixed = outcome(every, drawn, seconds=None, steps=1, behind=30)
        policy.observe(dataclasses.replace(mixed, mixed_s=1.0, prompt_tokens=PROMPTS))
        assert policy._beside.costs.count(Bucket(4, depth), PROMPTS) == counted
