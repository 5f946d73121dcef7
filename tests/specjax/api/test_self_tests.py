"""Which kernels are trusted by default; no GPU is at hand, and its process is a fake."""

import json
import subprocess
import sys

import jax
import pytest

from specjax.api import self_tests
from specjax.api.self_tests import Verdict, trusted_kernels
from specjax.config.engine import EngineConfig

TRUSTED = (("tree_attention", "mosaic_gpu"),)
ENGINE = EngineConfig()


class Gpu:
    platform = "gpu"
    device_kind = "NVIDIA H100 80GB HBM3"
    compute_capability = "9.0"


def gpu(**changes):
    return type("Device", (Gpu,), changes)()


@pytest.fixture
def runs(monkeypatch, tmp_path):
    """The self-tests that were run, and a cell with what the next one prints or raises."""
    monkeypatch.setenv("SPECJAX_CACHE_DIR", str(tmp_path))
    commands, result = [], ['{"fault": null}']

    def run(command, *, env, timeout, **options):
        commands.append(command)
        assert env["XLA_PYTHON_CLIENT_PREALLOCATE"] == "false"
        if isinstance(result[0], Exception):
            raise result[0]
        return subprocess.CompletedProcess(command, 1, result[0], "first\nlast line")

    monkeypatch.setattr(subprocess, "run", run)
    self_tests._passes.cache_clear()
    yield commands, result
    self_tests._passes.cache_clear()


def trusted(engine=ENGINE, devices=None, dtype="bfloat16"):
    """Returns what a new process trusts, by default on one H100."""
    self_tests._passes.cache_clear()
    return trusted_kernels(engine, [gpu()] if devices is None else devices, dtype)


def test_a_kernel_is_tested_once_and_then_trusted(runs):
    commands, _ = runs
    assert trusted_kernels(ENGINE, [gpu()], "bfloat16") == TRUSTED
    assert trusted_kernels(ENGINE, [gpu()], "bfloat16") == TRUSTED  # in this process
    assert trusted() == TRUSTED  # in a later one
    assert commands == [[sys.executable, "-m", "pallas_kernels.tree_attention.self_test"]]


@pytest.mark.parametrize(
    "change",
    [
        lambda patch: patch.setattr(jax, "__version__", "99.0"),
        lambda patch: patch.setattr(self_tests, "__version__", "99.0"),
        lambda patch: patch.setattr(self_tests, "_digest_of_source", lambda: "other"),
        lambda patch: patch.setattr(Gpu, "device_kind", "NVIDIA H200"),
    ],
    ids=["jax", "specjax", "source", "device"],
)
def test_another_version_or_device_is_tested_anew(change, runs, monkeypatch):
    commands, _ = runs
    trusted()
    change(monkeypatch)
    trusted()
    trusted()
    assert len(commands) == 2


def test_a_fault_is_one_warning_that_names_the_setting(runs, tmp_path):
    commands, result = runs
    result[0] = 'Some library says hello\n{"fault": "decoding: 3 of 8 numbers"}'
    with pytest.warns(UserWarning, match="did not pass its self-test") as seen:
        assert trusted() == ()
    assert trusted_kernels(ENGINE, [gpu()], "bfloat16") == ()  # warnings are errors here
    (warning,) = seen
    text = str(warning.message)
    assert "(decoding: 3 of 8 numbers), so XLA computes it" in text
    assert 'EngineConfig(kernels={"tree_attention": "xla"})' in text
    (path,) = tmp_path.rglob("self_tests/*/*.json")
    assert str(path) in text
    with pytest.warns(UserWarning, match="decoding"):
        assert trusted() == ()  # in a later process, of which each hears it once
    assert len(commands) == 1


@pytest.mark.parametrize(
    ("result", "fault", "is_kept"),
    [
        (subprocess.TimeoutExpired("python", 300), "no result after 300 s", True),
        (OSError("no memory"), "did not start: no memory", False),
        ("", "ended with code 1: last line", False),
        ("[]", "ended with code 1: last line", False),
        ('{"other": 1}', "ended with code 1: last line", False),
        ('{"fault": "RESOURCE_EXHAUSTED: 1 GB"}', "RESOURCE_EXHAUSTED", False),
        ('{"fault": "decoding: wrong"}', "decoding: wrong", True),
    ],
    ids=["hang", "no start", "crash", "a list", "no fault", "memory", "wrong"],
)
def test_only_what_the_kernel_is_to_blame_for_is_kept(result, fault, is_kept, runs):
    commands, cell = runs
    cell[0] = result
    with pytest.warns(UserWarning, match=fault):
        assert trusted() == ()
    cell[0] = '{"fault": null}'
    if is_kept:
        with pytest.warns(UserWarning, match=fault):
            assert trusted() == ()
    else:
        assert trusted() == TRUSTED
    assert len(commands) == (1 if is_kept else 2)


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"fault": 3}', "other key"])
def test_a_damaged_file_is_tested_anew(content, runs, tmp_path):
    commands, _ = runs
    trusted()
    (path,) = tmp_path.rglob("self_tests/*/*.json")
    document = json.loads(path.read_text())
    other = json.dumps(document | {"device": "another"})
    path.write_text(other if content == "other key" else content)
    assert trusted() == TRUSTED
    assert len(commands) == 2
    assert json.loads(path.read_text()) == document


def test_without_a_cache_each_process_tests(runs, monkeypatch):
    monkeypatch.setenv("SPECJAX_CACHE_DIR", "off")
    assert trusted() == trusted() == TRUSTED
    assert len(runs[0]) == 2


@pytest.mark.parametrize(
    "given",
    [
        dict(devices=jax.devices("cpu")),
        dict(devices=[gpu(compute_capability="8.0")]),
        dict(devices=[gpu(compute_capability="10.0")]),
        dict(devices=[gpu(), gpu(compute_capability="8.9")]),
        dict(dtype="float32"),
        dict(dtype="float16"),
        dict(engine=EngineConfig(kv_cache_dtype="fp8")),
        dict(engine=EngineConfig(numerics="invariant")),
        dict(engine=EngineConfig(kernels={"tree_attention": "xla"})),
        dict(engine=EngineConfig(kernels={"tree_attention": "mosaic_gpu"})),
    ],
    ids=[
        *("CPU", "A100", "B200", "a mixture", "float32", "float16", "fp8 pages"),
        *("invariant", "XLA by name", "itself by name"),
    ],
)
def test_where_the_kernel_would_not_be_used_nothing_is_tested(given, runs):
    assert trusted(**given) == ()
    assert runs[0] == []


def test_programs_of_several_processes_test_nothing(runs, monkeypatch):
    """A verdict per process might differ, and all must compile the same."""
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    assert trusted() == ()
    assert runs[0] == []


def test_a_process_of_its_own_finds_the_package(monkeypatch):
    """On a CPU the kernel cannot run, and says so in a document."""
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    verdict = self_tests.run_test()
    assert isinstance(verdict, Verdict)
    assert "runs on gpu, and this is cpu" in verdict.fault
