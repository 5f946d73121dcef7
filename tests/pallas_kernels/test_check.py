"""What the check says of kernels that compile, and of those that do not; nothing is compiled."""

import json

import pytest

from pallas_kernels import check


def result(ok, error=None):
    return check.Result("write_kv", "a shape", "v5e:2x2", ok, 0.5, 1000, 2000, error)


@pytest.fixture
def compiled(monkeypatch):
    """Returns what was asked for, and what each is to come to."""
    asked, results = [], [result(True)]

    def fake(topology, chips, only):
        asked.append((topology, chips, tuple(only)))
        yield from results

    monkeypatch.setattr(check, "check", fake)
    return asked, results


def test_everything_that_compiles_is_a_success(compiled, capsys):
    asked, _ = compiled
    assert check.main(["--tpu", "v5e:2x2", "v4:2x2x1", "--only", "8B", "Phi"]) == 0
    only = ("8B", "Phi")
    assert asked == [(t, c, only) for t in ("v5e:2x2", "v4:2x2x1") for c in (1, 4)]
    assert "HBM temporaries   0.00 MB" in capsys.readouterr().out


def test_one_refusal_is_a_failure(compiled, capsys):
    compiled[1].append(result(False, "needs more VMEM"))
    assert check.main(["--tpu", "v5e:2x2", "--json"]) == 1
    documents = json.loads(capsys.readouterr().out)
    assert documents[1]["error"] == "needs more VMEM"
    assert set(documents[0]) == {
        *("op", "shape", "device", "ok", "seconds"),
        *("vmem_bytes", "temp_bytes", "error"),
    }


def test_nothing_compiled_is_a_failure(compiled, capsys):
    compiled[1].clear()
    assert check.main(["--tpu", "v5e:2x2", "--only", "nothing"]) == 1
    assert "nothing has one of ['nothing']" in capsys.readouterr().err


def test_an_unknown_topology_is_said_in_a_line(monkeypatch, capsys):
    def fail(topology, chips, only):
        raise ValueError(f"{topology!r} is no topology")
        yield

    monkeypatch.setattr(check, "check", fail)
    assert check.main(["--tpu", "v9:1x1"]) == 2
    assert capsys.readouterr().err == "'v9:1x1' is no topology\n"


def test_every_shape_is_asked_for_once():
    cases = [(case.op, case.shape) for case in check.cases(1)]
    assert len(set(cases)) == len(cases)
    ops = {op for op, _ in cases}
    assert ops == {"tree_attention", "write_kv", "move_kv", "seeded_sample"}
    split = {shape for _, shape in ((c.op, c.shape) for c in check.cases(4))}
    assert all("4 chips" in shape for shape in split if "rows" in shape)


def test_a_gpu_is_lowered_for():
    (one,) = check.check_gpu("h100", ["Qwen3-0.6B, 8 rows, trees of 8"])
    assert (one.ok, one.device, one.error) == (True, "H100", None)
