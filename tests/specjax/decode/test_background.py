"""Work beside what runs."""

import time

from specjax.decode.background import MOST_SPANS, Background


def test_what_ran_is_remembered_for_a_while():
    background = Background()
    start = time.perf_counter()
    for key in range(MOST_SPANS + 9):
        background.start(key, lambda goes_on: None)
        background.wait(key)
    assert len(background._spans) <= MOST_SPANS
    assert background.ran_between(start, time.perf_counter())
    assert not background.ran_between(start - 2.0, start - 1.0)
