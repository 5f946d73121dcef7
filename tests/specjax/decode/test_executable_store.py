"""Compiled steps kept whole: found again, and never where something they follow from differs."""

import os
import subprocess
import sys
import textwrap
import uuid
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.decode import executable_store as store
from specjax.runtime import compilation_cache


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """A folder of the test's own; jax's cache, which tests share, is asked nothing."""
    monkeypatch.setenv("SPECJAX_CACHE_DIR", str(tmp_path))
    compilation_cache._warn_once.cache_clear()
    return tmp_path


def kept(value=2.0, description="step", keeps=True):
    """Compiles x * value + y, gives x away, and keeps it; returns its name and inputs."""
    inputs = jnp.ones(3), {"y": jnp.arange(3.0)}
    name = store.name_of(description, inputs)

    def function(x, tree):
        return x * value + tree["y"], (x.sum(), None)

    # A constant of its own for each test: jax's cache would hand out what it was asked before.
    function.__name__ = f"{description}_{uuid.uuid4().hex}"
    lowered = jax.jit(function, donate_argnums=0).lower(*inputs)
    compiled, is_new = store.compile_new(name, lowered)
    assert is_new
    if keeps:
        store.save(name, compiled)
    return name, inputs


def test_what_was_kept_runs_again():
    name, inputs = kept()
    assert store.size(name)
    run = store.load(name, inputs)
    result, (total, nothing) = run(*inputs)
    np.testing.assert_array_equal(result, [2.0, 3.0, 4.0])
    assert (float(total), nothing) == (3.0, None)
    assert inputs[0].is_deleted()  # it was given away, as when it was compiled


@pytest.mark.parametrize(
    "change",
    [
        lambda monkeypatch: monkeypatch.setattr(jax, "__version__", "0.0.0"),
        lambda monkeypatch: monkeypatch.setenv("XLA_FLAGS", "--xla_other"),
        lambda monkeypatch: monkeypatch.setattr(store, "_source_digest", lambda: "other code"),
        lambda monkeypatch: monkeypatch.setattr(compilation_cache, "processor", lambda: "another"),
    ],
)
def test_other_surroundings_find_nothing(monkeypatch, change):
    name, inputs = kept()
    change(monkeypatch)
    assert store.name_of("step", inputs) != name


def test_other_inputs_and_settings_find_nothing():
    name, inputs = kept()
    assert store.name_of("step", inputs) == name
    x, tree = inputs
    others = [
        (x.astype(jnp.int32), tree),
        (jnp.ones(4), tree),
        (x, {"z": tree["y"]}),
    ]
    assert name not in {store.name_of("step", other) for other in others}
    assert store.name_of("another step", inputs) != name
    with jax.default_matmul_precision("highest"):
        assert store.name_of("step", inputs) != name
    # Shapes alone have the name of arrays.
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), inputs)
    assert store.name_of("step", shapes) == name


def test_nothing_is_kept_over_several_devices_or_where_nothing_may_be(monkeypatch):
    there = jax.device_put(jnp.ones(3), jax.devices()[1])
    assert store.name_of("step", (there,)) is None
    monkeypatch.setenv("SPECJAX_CACHE_DIR", "off")
    assert store.name_of("step", (jnp.ones(3),)) is None
    assert store.size(None) is None
    assert store.load(None, ()) is None


@pytest.mark.parametrize("cut", [0, 10, 1000])
def test_a_file_that_was_cut_short_is_dropped(cut):
    name, inputs = kept()
    path = store._path(name)
    path.write_bytes(path.read_bytes()[:cut])
    assert store.load(name, inputs) is None
    assert store.size(name) is None


@pytest.mark.skipif(os.name != "posix", reason="permissions of POSIX")
def test_a_folder_that_others_may_write_to_is_not_read():
    name, inputs = kept()
    store._path(name).parent.chmod(0o777)
    with pytest.warns(UserWarning, match="others may write"):
        assert store.load(name, inputs) is None


def test_files_that_were_not_read_for_longest_go_first(monkeypatch):
    first, inputs = kept(description="first")
    second, _ = kept(description="second")
    path = store._path(first)
    os.utime(path, (1, 1))
    os.utime(store._path(second), (2, 2))
    store.load(first, inputs)  # is read: the second is older now
    monkeypatch.setattr(store, "MOST_BYTES", int(2.5 * path.stat().st_size))
    third, _ = kept(description="third")
    assert [bool(store.size(name)) for name in (first, second, third)] == [
        True,
        False,
        True,
    ]


@pytest.mark.full
def test_what_jaxs_cache_handed_out_is_not_kept(tmp_path):
    """XLA does not write it whole again on a CPU: a later process could not run it."""
    script = textwrap.dedent("""
        import jax, jax.numpy as jnp
        from specjax.decode import executable_store as store
        jax.config.update("jax_compilation_cache_dir", {cache!r})
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        lowered = jax.jit(lambda x: jnp.tanh(x @ x) + 1).lower(jnp.ones((8, 8)))
        print(store.compile_new("name", lowered)[1])
    """).format(cache=str(tmp_path / "jax"))
    said = [
        subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, check=True
        ).stdout.strip()
        for _ in range(2)
    ]
    assert said == ["True", "False"]


@pytest.mark.full
def test_a_second_process_traces_no_step(tmp_path):
    """Nor one with another drafter what both of them run."""
    script = textwrap.dedent("""
        import sys
        import specjax
        from specjax.decode.steps import Steps

        traced, lower = [], Steps.lower
        def counted(self, step, *arguments, **options):
            traced.append(step.key)
            return lower(self, step, *arguments, **options)
        Steps.lower = counted
        out = specjax.generate(
            "demo",
            "def f(",
            drafter=None if sys.argv[1] == "none" else sys.argv[1],
            sampling=specjax.SamplingParams(max_tokens=4, temperature=0),
        )
        print(len(traced), out[0].token_ids)
    """)
    run = lambda drafter: (
        subprocess.run(
            [sys.executable, "-c", script, drafter],
            capture_output=True,
            text=True,
            check=True,
            env=os.environ | {"SPECJAX_CACHE_DIR": str(tmp_path)},
        )
        .stdout.strip()
        .split(" ", 1)
    )
    first, tokens = run("none")
    assert int(first) > 0
    assert run("none") == ["0", tokens]
    assert list(Path(tmp_path, "executables").rglob("*.bin"))


@pytest.mark.parametrize("place", [5, 40, -1])
def test_a_damaged_file_is_dropped(place, monkeypatch, tmp_path):
    """One bit, in the digest, in the content, in its last byte."""
    monkeypatch.setenv("SPECJAX_CACHE_DIR", str(tmp_path / "own"))
    inputs = (jax.numpy.zeros(3),)
    name = store.name_of("a function", inputs)
    compiled, _ = store.compile_new(name, jax.jit(lambda x: (x + 1,)).lower(*inputs))
    store.save(name, compiled)
    (path,) = (tmp_path / "own").rglob(f"{name}.bin")
    assert store.load(name, inputs) is not None
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)
    assert store.load(name, inputs) is None
    assert not path.exists()


def test_what_cannot_be_deleted_or_touched_ends_no_call(monkeypatch, tmp_path):
    """A folder in its place; a file whose time cannot be set, as where nothing may be written."""
    monkeypatch.setenv("SPECJAX_CACHE_DIR", str(tmp_path / "own"))
    inputs = (jax.numpy.zeros(3),)
    name = store.name_of("another function", inputs)
    compiled, _ = store.compile_new(name, jax.jit(lambda x: (x + 2,)).lower(*inputs))
    store.save(name, compiled)
    (path,) = (tmp_path / "own").rglob(f"{name}.bin")

    def refuse(*arguments, **options):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(os, "utime", refuse)
    assert store.load(name, inputs) is not None
    path.unlink()
    path.mkdir()
    assert store.load(name, inputs) is None
