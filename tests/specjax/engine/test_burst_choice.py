"""What the policy is told of the rows that decode."""

from types import SimpleNamespace

import numpy as np
import pytest
from helpers import ENGINE, tiny_llama

import specjax
from specjax.engine.burst_choice import BurstChoice
from specjax.policy.interface import Decision, Fixed, Load, check_decision

LOAD = Load(num_decoding_rows=2, row_buckets=(2, 8))


@pytest.mark.parametrize(
    ("depth", "asked", "expected"),
    [(None, None, [1, 30, 5, 8]), (0, [0, 0, 0], [1, 30, 5, 8]), (3, [3, 0, 1], [1, 30, 5, 1])],
)
def test_a_burst_in_flight_catches_up_with_the_rows_that_it_drafts_for(depth, asked, expected):
    rows, tokens = np.array([0, 1, 3, 5]), np.array([9, 40, 7, 20])
    flights = []
    if depth is not None:
        # Row 3 joined after it was sent.
        flights = [SimpleNamespace(depth=depth, own=np.array([0, 1, 5]), asked_depth=asked)]
    final = np.array([8, 10, 0, 2, 0, 12])
    table = SimpleNamespace(num_drafter_final=final)
    scheduler = SimpleNamespace(needs_drafter=True, catches_up=True, table=table)
    choice = BurstChoice.__new__(BurstChoice)
    choice._run = SimpleNamespace(flights=flights, scheduler=scheduler)
    assert choice._num_behind(rows, tokens).tolist() == expected
    for name in ("needs_drafter", "catches_up"):
        setattr(scheduler, name, False)
        assert choice._num_behind(rows, tokens).tolist() == [1, 1, 1, 1]
        setattr(scheduler, name, True)


@pytest.mark.parametrize(("beside", "expected"), [(None, 2), ("prompts", 8)])
def test_one_row_without_pages_for_drafts_decodes_plainly_in_few_rows(beside, expected):
    """Beside prompts steps of all rows alone are sure to be compiled."""
    scheduler = SimpleNamespace(
        waiting=[],
        reserve=lambda rows, num_tokens, least: np.array([num_tokens > 1]),
        row_buckets=lambda rows, buckets: [*buckets, 8],
    )
    choice = BurstChoice.__new__(BurstChoice)
    faults = SimpleNamespace(is_dropped=lambda bucket, beside: False)
    choice._run = SimpleNamespace(flights=[], scheduler=scheduler, faults=faults)
    choice._row_buckets = (2, 4)
    drafting = Decision(num_speculative_tokens=3, reason="goodput")
    flight = choice.reserve(np.array([1]), 1, drafting, beside)
    assert flight.decision == Decision(
        num_speculative_tokens=0, reason="pages", row_bucket=expected
    )
    assert flight.num_steps == 1


@pytest.mark.parametrize(
    ("decision", "error", "message"),
    [
        (2, TypeError, "Fixed.choose returned 2; expected a specjax.policy.interface.Decision, as"),
        (None, TypeError, "returned None"),
        ({"num_speculative_tokens": -1}, ValueError, "=-1; .* from 0 to max_speculative_tokens=3"),
        ({"num_speculative_tokens": 4}, ValueError, "=4; .* from 0 to max_speculative_tokens=3"),
        ({"num_speculative_tokens": None}, ValueError, "num_speculative_tokens=None"),
        ({"num_steps": 0}, ValueError, "num_steps=0; expected a whole number from 1"),
        ({"row_bucket": 1.5}, ValueError, "row_bucket=1.5"),
        ({"max_drafts": 0}, ValueError, "max_drafts=0"),
        ({"row_bucket": 9}, ValueError, "row_bucket=9; .* from 1 to 8, the largest of load.row_b"),
        (
            {"draft_caps": np.ones(7, int)},
            ValueError,
            "draft_caps=.*expected 2 whole numbers",
        ),
        ({"draft_caps": [0.5, 1]}, ValueError, "draft_caps="),
        ({"draft_caps": [-1, 2]}, ValueError, "draft_caps=.*expected 2 whole numbers from 0"),
        ({"draft_caps": np.array([-1, 2])}, ValueError, "draft_caps="),
        ({"draft_caps": "ab"}, ValueError, "draft_caps='ab'"),
        ({"prepare": "x"}, TypeError, "prepare='x'; expected a Bucket or None"),
    ],
)
def test_a_decision_that_no_burst_can_follow_is_refused(decision, error, message):
    if isinstance(decision, dict):
        decision = Decision(**{"num_speculative_tokens": 2, "reason": "mine"} | decision)
    with pytest.raises(error, match=message):
        check_decision(decision, Fixed(3), LOAD)


@pytest.mark.parametrize("caps", [None, [1, 0], np.array([3, 3])])
def test_a_decision_that_a_burst_can_follow_is_taken(caps):
    decision = Decision(
        num_speculative_tokens=3, reason="mine", num_steps=1, row_bucket=8, draft_caps=caps
    )
    check_decision(decision, Fixed(3), LOAD)


@pytest.mark.full  # it compiles a prefill
def test_a_policy_that_decides_nonsense_is_told_so_by_a_generation():
    class Nonsense:
        max_speculative_tokens, chooses_rows = 3, False

        def choose(self, load):
            return Decision(num_speculative_tokens=-1, reason="mine")

        def observe(self, outcome):
            del outcome

    with pytest.raises(ValueError, match=r"Nonsense.choose returned num_speculative_tokens=-1"):
        specjax.generate(tiny_llama(0), [[1, 2]], drafter="ngram", policy=Nonsense(), engine=ENGINE)
