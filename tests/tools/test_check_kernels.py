"""What the check says of kernels that compile, and of those that do not; nothing is compiled."""

import json

import pytest

from pallas_kernels.gpu_targets import TARGETS
from pallas_kernels.names import IMPLEMENTATIONS
from tools import check_kernels as check


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
        *("is_compiled", "registers", "spill_bytes", "launches"),
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
    kernel, xla = check.check_gpu("h100", [shape])
    for one, implementation in ((kernel, "mosaic_gpu"), (xla, "xla")):
        assert (one.ok, one.device, one.error) == (True, "H100", None)
        assert one.shape == f"{shape}, 1 chip, {implementation}"
        assert not one.is_compiled
    assert check.main(["--gpu", "h100", "--only", shape]) == 0
    assert capsys.readouterr().out.count("lowered, not compiled") == 2


@pytest.mark.full
def test_only_hopper_has_the_kernel_and_quantised_pages_have_xla_alone(no_plugin):
    shapes = ["Qwen3-0.6B, 1 row", "fp8, 1 row"]
    for name in ("t4", "a100", "l4"):
        found = list(check.check_gpu(name, shapes))
        assert [result.shape.split(", ")[-1] for result in found] == ["xla", "xla"]
        assert all(result.ok for result in found), found
    found = check.check_gpu("h200", shapes)
    assert [result.shape.split(", ")[-1] for result in found] == ["mosaic_gpu", "xla", "xla"]


def test_a_gpu_is_compiled_for(capsys):
    if check.gpu_to_compile_for("h100") is None:
        pytest.skip('no CUDA plugin of jax is installed (pip install "jax[cuda12]")')
    assert check.main(["--gpu", "h100", "--only", "Qwen3-0.6B, 8 rows, mixed"]) == 0
    kernel, xla = capsys.readouterr().out.splitlines()
    assert " registers, " in kernel
    # 10 for 64 keys of each row in the form for CPUs; see docs/benchmarks/kernels.md.
    launches = int(xla.split(" launches a turn")[0].split()[-1])
    assert 10 <= launches <= 18


PROGRAM = """
%region (argument: (s32[], f32[8])) -> (s32[], f32[8]) {
  %argument = (s32[], f32[8]) parameter(0)
  %fused = f32[8]{0} fusion(%argument), kind=kLoop, calls=%computation
  %same = f32[8]{0} bitcast(%fused)
  %copied = f32[8]{0} copy(%same)
  ROOT %both = (s32[], f32[8]) tuple(%argument, %copied)
}

ENTRY %main () -> f32[8] {
  %before = f32[8]{0} fusion(), kind=kLoop, calls=%computation
  %while = (s32[], f32[8]) while(%before), condition=%other, body=%region
}
"""


def test_launches_are_those_of_the_loop():
    assert check.launches_of_a_turn(PROGRAM) == 2
    assert check.launches_of_a_turn(PROGRAM.replace("while(", "call(")) is None


def test_a_target_is_told_from_others():
    texts = {name: target.text for name, target in TARGETS.items()}
    assert "cuda_compute_capability { major: 7 minor: 5 }" in texts["t4"]
    assert "shared_memory_per_block_optin: 65536" in texts["t4"]  # Turing keeps none of it
    assert "shared_memory_per_block_optin: 232448" in texts["h100"]
    kinds = [target.kind for target in TARGETS.values()]
    assert len(set(kinds)) == len(kinds)


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
