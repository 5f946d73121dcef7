"""`specjax bench --device-report`: its arguments, and one whole run at the smallest size."""

import json

import pytest

from specjax.cli.bench import command
from specjax.cli.main import build_parser, main


def parse(argv):
    options = build_parser().parse_args(["bench", *argv])
    command.complete(options)
    return options


def test_arguments():
    options = parse(["--device-report", "out"])
    assert (options.device_report, options.minutes, options.size, options.again) == (
        "out",
        30.0,
        None,
        False,
    )
    options = parse(["--device-report", "out", "--minutes", "2.5", "--size", "tiny", "--again"])
    assert (options.minutes, options.size, options.again) == (2.5, "tiny", True)
    assert parse(["--device-report", "out", "--again-failed"]).again_failed
    assert parse([]).rounds == 9
    assert parse(["--quick", "--json", "--rounds", "2"]).rounds == 2


@pytest.mark.parametrize(
    "argv",
    [
        ["--device-report"],
        ["--device-report", ""],
        ["--device-report", "out", "--minutes", "0"],
        ["--device-report", "out", "--minutes", "nan"],
        ["--device-report", "out", "--minutes", "soon"],
        ["--device-report", "out", "--size", "huge"],
        ["--device-report", "out", "--quick"],
        ["--device-report", "out", "--again", "--again-failed"],
        ["--device-report", "out", "--json"],
        ["--device-report", "out", "--rounds", "9"],
        ["--minutes", "30"],
        ["--quick", "--size", "tiny"],
        ["--device-report", "out", "--only"],
        ["--device-report", "out", "--only", "speed", "--again"],
        ["--only", "speed"],
        ["--again"],
        ["--calibrate", "--again-failed"],
    ],
)
def test_arguments_that_are_none(argv, capsys):
    with pytest.raises(SystemExit) as end:
        parse(argv)
    assert end.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.slow
def test_a_whole_report(tmp_path, capsys):
    argv = ["--device-report", str(tmp_path), "--size", "tiny"]
    assert main(["bench", *argv]) == 0
    document = json.loads((tmp_path / "report.json").read_text())
    cases = document["cases"]
    assert [key for key, case in cases.items() if "result" not in case] == [
        "block sizes: tree_attention"
    ]
    for key, case in cases.items():
        if key.startswith("numerics"):
            assert case["result"]["agrees"], key
    (pair,) = [case["result"] for key, case in cases.items() if key.startswith("embedded")]
    assert all(mode["texts_as_plain"] == 2 for mode in pair["modes"].values())
    assert pair["modes"]["K = 2"]["mean_acceptance_length"] > 1
    page = (tmp_path / "report.md").read_text()
    assert page.count("\n## ") == 8
    assert "(synthetic acceptance)" in page
    capsys.readouterr()
    assert main(["bench", *argv]) == 0
    said = capsys.readouterr().err
    assert f"{len(cases)} of {len(cases)} cases are there from an earlier run." in said
    assert json.loads((tmp_path / "report.json").read_text()) == document
