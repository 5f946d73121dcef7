"""The self-test of attention's kernel: it passes what is right, and finds what is wrong."""

import json

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.implementations import lowered_for, trusted_for, trusting
from pallas_kernels.tree_attention import self_test, tree_attention
from pallas_kernels.tree_attention.example_inputs import make_inputs

FULL = pytest.mark.full


@FULL
def test_a_right_implementation_passes():
    assert self_test.find_fault("xla") is None


def test_a_kernel_that_cannot_run_is_a_fault():
    fault = self_test.find_fault()
    assert fault.startswith("decoding: NotForThis: ")
    assert "runs on gpu, and this is cpu" in fault


@pytest.fixture
def wrong(monkeypatch):
    """Returns a function that changes what XLA computes before the self-test sees it."""

    def change(how):
        def changed(*arguments, implementation, **options):
            out = tree_attention(*arguments, **options, implementation=implementation)
            return out if implementation == "reference" else how(out)

        monkeypatch.setattr(self_test, "tree_attention", changed)

    return change


@pytest.mark.full
@pytest.mark.parametrize(
    "how",
    [
        pytest.param(lambda out: out.at[1, 2, 3].add(0.1), id="one number"),
        pytest.param(lambda out: out.at[1, 2, 3].set(jnp.nan), id="one NaN", marks=FULL),
        pytest.param(lambda out: jnp.roll(out, 1, axis=1), id="heads in another order", marks=FULL),
    ],
)
def test_wrong_numbers_are_a_fault(how, wrong):
    wrong(how)
    assert "numbers are not those of the reference" in self_test.find_fault("xla")


@FULL
def test_bits_that_differ_between_runs_are_a_fault(wrong):
    runs = iter(range(100))

    def how(out):
        noise = jax.pure_callback(
            lambda: jnp.float32(next(runs) % 2 * 2**-7), jax.ShapeDtypeStruct((), jnp.float32)
        )
        return (out.astype(jnp.float32) * (1 + 0.3 * noise)).astype(out.dtype)

    wrong(how)
    assert "two runs gave different bits" in self_test.find_fault("xla")


@pytest.mark.full
@pytest.mark.parametrize("name", self_test.CASES)
def test_the_kernel_covers_every_case(name):
    """Otherwise no device could pass."""
    pytest.importorskip("jax.experimental.pallas.mosaic_gpu")
    arguments, options = make_inputs(self_test.CASES[name])

    def attend(*arguments):
        return tree_attention(*arguments, **options)

    with lowered_for("gpu"):
        plain = str(jax.make_jaxpr(attend)(*arguments))
        with trusting([("tree_attention", "mosaic_gpu")]):
            trusted = str(jax.make_jaxpr(attend)(*arguments))
    is_kernel = lambda text: "mosaic_gpu" in text or "mpmd_map" in text
    assert not is_kernel(plain)
    assert is_kernel(trusted)


@FULL
def test_a_trusted_kernel_gives_way_where_it_covers_nothing():
    arguments, options = make_inputs(self_test.CASES["decoding"])
    q, k, v, *rest = arguments
    wide = (q.astype(jnp.float32), k.astype(jnp.float32), v.astype(jnp.float32), *rest)
    with trusting([("tree_attention", "mosaic_gpu")]):
        assert trusted_for("tree_attention") == "mosaic_gpu"
        assert trusted_for("write_kv") is None
        tree_attention(*arguments, **options)  # on a CPU
        with lowered_for("gpu"):
            tree_attention(*wide, **options)  # in float32
    assert trusted_for("tree_attention") is None


def test_a_name_goes_before_trust():
    pytest.importorskip("jax.experimental.pallas.mosaic_gpu")
    arguments, options = make_inputs(self_test.CASES["decoding"])
    attend = lambda *arguments: tree_attention(*arguments, **options, implementation="xla")
    with lowered_for("gpu"), trusting([("tree_attention", "mosaic_gpu")]):
        assert "mosaic_gpu" not in str(jax.make_jaxpr(attend)(*arguments))


def test_it_prints_a_document(capsys, monkeypatch):
    monkeypatch.setattr(self_test, "find_fault", lambda: "decoding: wrong")
    assert self_test.main() == 0
    assert json.loads(capsys.readouterr().out) == {"fault": "decoding: wrong"}
