"""What the policy is told of the rows that decode."""

from types import SimpleNamespace

import numpy as np
import pytest

from specjax.engine.burst_choice import BurstChoice


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
