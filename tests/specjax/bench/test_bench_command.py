"""`specjax bench`: what its arguments say."""

import pytest

from specjax.bench import command


@pytest.mark.parametrize(
    ("text", "number"), [("300M", 3e8), ("1.5B", 1.5e9), ("20k", 2e4), ("3e8", 3e8)]
)
def test_numbers_of_parameters(text, number):
    options = command._parser().parse_args(["--calibrate", "--widen", text])
    assert options.widen == number


def test_a_number_that_is_none():
    with pytest.raises(SystemExit):
        command._parser().parse_args(["--widen", "large"])
