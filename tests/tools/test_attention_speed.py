"""How fast attention over pages is: what is measured, and what is printed of it."""

import functools
import json
import sys

import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.tree_attention import tree_attention
from pallas_kernels.tree_attention.block_sizes import CANDIDATES
from pallas_kernels.tree_attention.mosaic_tpu import tree_attention_mosaic_tpu
from specjax.cli.bench.device_report import attention_speed
from tools.attention_speed import main


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(attention_speed, "COPIED_BYTES", 1 << 16)
    monkeypatch.setattr(attention_speed, "LEAST_S", 1e-4)
    monkeypatch.setattr(attention_speed, "ROUNDS", 3)


@pytest.mark.full
def test_it_says_what_must_move_and_how_fast_it_did(quick, capsys):
    shape = "--rows 3 --context 40 --nodes 1 5 --heads 4 --kv-heads 2 --head-dim 64"
    assert main([*shape.split(), "--dtype", "float32", "--json"]) == 0
    one, five = json.loads(capsys.readouterr().out)
    of_pages = 2 * 3 * 48 * 2 * 64 * 4
    assert attention_speed.Shape(**five["shape"]).moved_bytes == of_pages + 2 * 15 * 4 * 64 * 4
    for result in (one, five):
        shape = attention_speed.Shape(**result["shape"])
        moved = result["bytes_per_s"] * result["seconds"]
        assert moved == pytest.approx(shape.moved_bytes)
        assert result["implementation"] == "xla"
        assert result["of_peak"] is None
    assert main(["--rows", "1", "--context", "40", "--nodes", "1"]) == 0
    assert "1 rows,     40 tokens,   1 nodes" in capsys.readouterr().out


@pytest.mark.full
def test_it_attends_to_its_tree(quick):
    shape = attention_speed.Shape(2, 30, 6, heads=4, kv_heads=2, head_dim=64, dtype="float32")
    q, attend, arrays = attention_speed.make_call(shape)
    xla, reference = (
        attend(q, arrays, tree_attention, implementation=name) for name in ("xla", "reference")
    )
    np.testing.assert_allclose(xla, reference, rtol=1e-5, atol=1e-5)
    in_order = attend(q, arrays | {"ancestor_bits": None}, tree_attention, implementation="xla")
    assert not jnp.allclose(xla, in_order)


def test_pages_are_no_constants_of_what_is_timed(quick, monkeypatch):
    texts = []

    def timed(program, count):
        if program.keywords["held"] is not None:
            lowered = program.func.lower(jnp.int32(count), **program.keywords)
            texts.append(lowered.as_text())
        return 1.0

    monkeypatch.setattr(attention_speed, "_timed", timed)
    attention_speed.measure(attention_speed.Shape(4, 500, 1, dtype="float32"), "xla", 1e9)
    assert texts
    assert max(map(len, texts)) < 200_000  # the pages alone are 16 MB


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [64, 128])
def test_tuning_times_every_size_that_fits(head_dim, quick, monkeypatch):
    """By the interpreter: which is fastest there means nothing."""
    shape = attention_speed.Shape(2, 30, 3, heads=4, kv_heads=2, head_dim=head_dim)
    monkeypatch.setattr(attention_speed, "ROUNDS", 1)
    monkeypatch.setattr(attention_speed, "LEAST_S", 0.0)
    monkeypatch.setattr(
        attention_speed,
        "tree_attention_mosaic_tpu",
        functools.partial(tree_attention_mosaic_tpu, interpret=pltpu.InterpretParams()),
    )
    monkeypatch.setattr(attention_speed, "target_platform", lambda: "tpu")
    result = attention_speed.measure(shape, "mosaic_tpu", 1e9, tunes=True)
    assert result.sizes in CANDIDATES
    entry = attention_speed.entry_of(result, "TPU v4")
    assert (entry.head_dim, entry.group) == (128, 4 if head_dim == 64 else 2)


def test_only_a_tpu_is_tuned(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["attention_speed"])
    with pytest.raises(SystemExit):
        main(["--tune"])
    assert "--tune needs a TPU" in capsys.readouterr().err
