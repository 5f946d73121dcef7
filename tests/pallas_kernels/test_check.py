"""What the check says of kernels that compile, and of those that do not; nothing is compiled."""

import json

import pytest

from pallas_kernels import check
from pallas_kernels.names import IMPLEMENTATIONS


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
        *("is_compiled", "registers", "spill_bytes"),
    }


def test_every_kernel_for_a_tpu_is_compiled():
    kernels = {op for op, names in IMPLEMENTATIONS.items() if "mosaic_tpu" in names}
    assert {case.op for case in check.cases(1)} == kernels


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


@pytest.fixture
def no_plugin(monkeypatch):
    monkeypatch.setattr(check, "gpu_to_compile_for", lambda name: None)


def test_a_gpu_is_lowered_for(no_plugin, capsys):
    shape = "Qwen3-0.6B, 8 rows, trees of 8"
    (one,) = check.check_gpu("h100", [shape])
    assert (one.ok, one.device, one.error) == (True, "H100", None)
    assert not one.is_compiled
    assert check.main(["--gpu", "h100", "--only", shape]) == 0
    assert "lowered, not compiled" in capsys.readouterr().out


def test_a_gpu_is_compiled_for(capsys):
    if check.gpu_to_compile_for("h100") is None:
        pytest.skip('no CUDA plugin of jax is installed (pip install "jax[cuda12]")')
    assert check.main(["--gpu", "h100", "--only", "Qwen3-0.6B, 8 rows, mixed"]) == 0
    assert " registers, " in capsys.readouterr().out


PTXAS = """
ptxas info    : Compiling entry function 'kernel' for 'sm_90a'
ptxas         .     416 bytes stack frame, 48 bytes spill stores, 64 bytes spill loads
ptxas info    : Used 168 registers, used 16 barriers, 17 bytes smem
"""
SERIALIZED = (
    "ptxas info    : (C7512) Potential Performance Loss: wgmma.mma_async instructions are "
    "serialized due to insufficient register resources for the function 'kernel'"
)


def test_what_ptxas_says():
    found = check.said_by_ptxas(PTXAS)
    assert found == {"registers": 168, "spill_bytes": 48, "error": None}
    assert check.said_by_ptxas(SERIALIZED + PTXAS)["error"] == SERIALIZED
    assert check.said_by_ptxas("") == {}


def test_serialized_products_are_a_failure(monkeypatch, capsys):
    found = check.said_by_ptxas(SERIALIZED + PTXAS)
    monkeypatch.setattr(check, "gpu_to_compile_for", lambda name: "a device")
    monkeypatch.setattr(check, "_compile", lambda *arguments: found)
    assert check.main(["--gpu", "h100", "--only", "Phi-2, 1 row"]) == 1
    assert "(C7512)" in capsys.readouterr().out
