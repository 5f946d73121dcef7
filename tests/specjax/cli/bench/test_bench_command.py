"""`specjax bench`: what its arguments say."""

import pytest

from specjax.cli.main import build_parser


@pytest.mark.parametrize(
    ("text", "number"), [("300M", 3e8), ("1.5B", 1.5e9), ("20k", 2e4), ("3e8", 3e8)]
)
def test_numbers_of_parameters(text, number):
    options = build_parser().parse_args(["bench", "--calibrate", "--widen", text])
    assert options.widen == number


@pytest.mark.parametrize(
    "argv",
    [
        ["--widen", "large"],
        ["--widen", "nan"],
        ["--rounds", "0"],
        ["--rounds", "-3"],
        ["--rounds", "1.5"],
        ["--calibrate", "-k", "0"],
        ["--calibrate", "--max-rows", "0"],
        ["--calibrate", "--max-context", "0"],
    ],
)
def test_a_number_that_is_none(argv, capsys):
    with pytest.raises(SystemExit) as end:
        build_parser().parse_args(["bench", *argv])
    assert end.value.code == 2
    error = capsys.readouterr().err
    assert "expected" in error or "at least 1" in error
    assert error.count("\n") == 1
