"""Restoring takes little beside the weights: measured in processes of their own.

On CPU devices the weights lie in host memory, too, so that the peak is of both.
"""

import os
import pathlib
import subprocess
import sys
import textwrap

import pytest

# 200 MB in float32, in proportions of published models: no array has more than a quarter.
CONFIG = textwrap.dedent(
    """
    import hashlib, sys
    from pathlib import Path
    import jax, numpy as np
    import specjax
    from specjax.testing.tiny_models import tiny_config

    config = tiny_config(
        vocab_size=12288, hidden_size=1024, intermediate_size=2816, num_layers=3, num_heads=16,
        num_kv_heads=16, head_dim=64, tie_word_embeddings=True,
    )

    def memory(name):
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))

    def mesh():
        return jax.make_mesh((jax.device_count(),), ("tensor",))

    def digest(params):
        digests = (hashlib.sha256(np.asarray(leaf)).hexdigest() for leaf in jax.tree.leaves(params))
        return hashlib.sha256("".join(digests).encode()).hexdigest()
    """
)
SAVE = CONFIG + textwrap.dedent(
    """
    rng = np.random.default_rng(0)
    draw = lambda leaf, place: jax.device_put(rng.standard_normal(leaf.shape, np.float32), place)
    params = jax.tree.map(draw, config.param_shapes(), specjax.param_shardings(config, mesh()))
    specjax.save_orbax(sys.argv[1], specjax.Model(config, params))
    if sys.argv[2]:
        import orbax.checkpoint as ocp
        from specjax.models.layouts import linen
        from specjax.models.layouts.tables import nested
        tree = nested(linen(config, is_stacked=True).to_theirs(params, config))
        state = {"params": {"params": tree}, "opt_state": {"mu": tree, "nu": tree}}
        ocp.PyTreeCheckpointer().save(sys.argv[2], state)
    print(digest(params))
    """
)
LOAD = CONFIG + textwrap.dedent(
    """
    folder, layout, small = sys.argv[1:]
    keys = {"layout": layout, "config": config} if layout else {}
    specjax.save_orbax(small, specjax.testing.tiny_model())  # imports, and starts threads
    specjax.load_orbax(small)
    before = memory("VmRSS")
    model = specjax.load_orbax(folder, mesh=mesh(), **keys)
    peak = memory("VmHWM") - before
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(model.params))
    print(digest(model.params), weights, peak)
    """
)


def run(program, num_devices, *arguments):
    flags = f"--xla_force_host_platform_device_count={num_devices}"
    done = subprocess.run(
        [sys.executable, "-c", program, *map(str, arguments)],
        env=os.environ | {"XLA_FLAGS": flags},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.split()


@pytest.mark.full
@pytest.mark.skipif(not pathlib.Path("/proc/self/status").exists(), reason="needs Linux's /proc")
def test_peak_memory(tmp_path, say):
    (saved,) = run(SAVE, 8, tmp_path / "own", tmp_path / "linen")
    # Of a stack of layers, which a trainer wrote as one piece, the whole piece is decoded.
    for folder, layout, most in (("own", "", 1.2), ("linen", "linen", 1.5)):
        for num_devices in (4, 1):
            loaded, weights, peak = run(
                LOAD, num_devices, tmp_path / folder, layout, tmp_path / f"{folder}-{num_devices}"
            )
            share = int(peak) / int(weights)
            say(f"{folder}, 8 to {num_devices} devices: peak {share:.3f} of {int(weights):,} bytes")
            assert loaded == saved
            assert share < most
