"""What is compiled from shapes is what a decoder of real arrays compiles."""

import dataclasses
import sys
import types

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.implementations import lowered_for
from specjax.config.engine import EngineConfig
from specjax.decode import steps
from specjax.decode.config import DecoderConfig
from specjax.decode.decoder import Decoder
from specjax.decode.sizes import Sizes
from specjax.drafters.spec import NgramDrafter
from specjax.models import sharding
from specjax.models.base import ModelConfig
from specjax.models.families import family_of
from specjax.paged.forward import logits
from specjax.planning.abstract_decoder import AbstractDecoder, described_mesh
from specjax.types import DecoderParams

CONFIG = ModelConfig(
    architecture="llama",
    family="llama",
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_position_embeddings=64,
)
SIZES = Sizes(
    rows=2,
    page_size=8,
    num_pages=16,
    pages_per_row=8,
    burst_steps=4,
    dtype=jnp.dtype(jnp.float32),
)


def make(kind, mesh=None, config=CONFIG):
    return kind(
        DecoderConfig(
            target=config, drafter=NgramDrafter(), sizes=SIZES, engine=EngineConfig(), mesh=mesh
        )
    )


def sizes_of(compiled):
    analysis = compiled.memory_analysis()
    names = ("argument", "output", "temp", "alias")
    return {name: getattr(analysis, f"{name}_size_in_bytes") for name in names}


@pytest.mark.parametrize("num_chips", [1, pytest.param(2, marks=pytest.mark.full)])
def test_a_prefill_from_shapes_is_the_one_that_runs(num_chips):
    mesh = None
    if num_chips > 1:
        mesh = jax.make_mesh((num_chips,), (sharding.TENSOR,))
    decoder = make(Decoder, mesh)
    weights = family_of(CONFIG).init(jax.random.key(0), CONFIG, jnp.float32)
    params = decoder.place_params(DecoderParams(weights, ()))
    table = jnp.zeros((2, 8), jnp.int32)
    rows, counts = jnp.zeros(1, jnp.int32), jnp.ones(1, jnp.int32)
    decoder.prefill(params, decoder.init(), table, rows, counts, num_tokens=16)
    (real,) = decoder.executables.runs.values()
    ours = make(AbstractDecoder, mesh).compile_prefill(1, 16)
    assert sizes_of(ours) == sizes_of(real)
    assert sizes_of(ours)["temp"] > 0


@pytest.mark.full
def test_slices_of_a_vocabulary_whose_best_blocks_are_looked_for():
    """XLA ended the process here, where one barrier held both results of a top_k."""
    mesh = jax.make_mesh((2,), (sharding.TENSOR,))
    config = dataclasses.replace(CONFIG, vocab_size=16384, num_layers=1)
    assert make(AbstractDecoder, mesh, config).compile_burst(0)


@pytest.mark.parametrize("is_named", [False, True])
def test_steps_are_compiled_for_the_default_device(is_named):
    last = jax.devices()[-1]
    with jax.default_device("cpu" if is_named else last):
        assert make(AbstractDecoder).device == (jax.devices()[0] if is_named else last)
    assert make(AbstractDecoder).device == jax.devices()[0]


def test_the_state_is_donated():
    decoder = make(AbstractDecoder)
    sizes = sizes_of(decoder.compile_prefill(1, 16))
    # Keys and values of two layers lie in the donated state: slots, heads, 4 bytes.
    assert sizes["alias"] >= 2 * 2 * (16 * 8) * (2 * 8) * 4


def test_products_are_compiled_for_where_they_will_run():
    """The layout that few tokens get on CPU is CPU's, whatever this machine is."""
    from specjax.models.layers import linear

    shapes = (jax.ShapeDtypeStruct((4, 8), jnp.float32),) * 2

    def text(platform):
        with lowered_for(platform):
            return jax.jit(linear).trace(*shapes).lower(lowering_platforms=(platform,)).as_text()

    assert "optimization_barrier" in text("cpu")
    assert "optimization_barrier" not in text("tpu")


def test_logits_lie_token_by_token_once():
    """Branches that read what `linear` turned would each turn it for themselves, on a CPU."""
    params = {"lm_head": jax.ShapeDtypeStruct((64, 32), jnp.float32)}
    hidden = jax.ShapeDtypeStruct((4, 32), jnp.float32)

    def read(params, hidden, is_first):
        scores = logits(params, CONFIG, hidden)
        first = lambda: jnp.max(scores, axis=1)
        return jax.lax.cond(is_first, first, lambda: jnp.sum(scores, axis=1))

    is_first = jax.ShapeDtypeStruct((), jnp.bool_)

    def lower(platform):
        with lowered_for(platform):
            traced = jax.jit(read).trace(params, hidden, is_first)
            return traced.lower(lowering_platforms=(platform,))

    assert "LayoutConstraint" not in lower("tpu").as_text()
    lowered = lower("cpu")
    assert "LayoutConstraint" in lowered.as_text()
    if jax.default_backend() == "cpu":
        # What `linear` gives, and no branch that reads it so.
        assert lowered.compile().as_text().count("f32[4,64]{0,1}") == 1


def test_without_libtpu_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "libtpu", None)
    monkeypatch.delenv("TPU_LIBRARY_PATH", raising=False)
    with pytest.raises(NotImplementedError, match=r'pip install "jax\[tpu\]"'):
        described_mesh("v5e:2x2", 4)


def test_topologies_that_cannot_be():
    pytest.importorskip("libtpu")
    with pytest.raises(ValueError, match="not known to libtpu"):
        described_mesh("v5e:nonsense", 1)
    with pytest.raises(ValueError, match="has 4 chips, and 8"):
        described_mesh("v5e:2x2", 8)


def test_a_burst_is_compiled_with_the_options_of_the_decoder(monkeypatch):
    """Elsewhere than on a CPU, where a plan's executables need not be fast."""
    given = []
    lowered = types.SimpleNamespace(compile=lambda **options: given.append(options))
    monkeypatch.setattr(AbstractDecoder, "_lower", lambda *_, **__: lowered)
    gpu = types.SimpleNamespace(platform="gpu")
    monkeypatch.setattr(AbstractDecoder, "device", gpu)
    monkeypatch.setattr(steps, "burst_options", lambda device, mesh: {"of": device})
    abstract = make(AbstractDecoder)
    abstract.compile_burst(1)
    abstract.compile_prefill(1, 16)
    abstract.compile_mixed(1, 16)
    assert given == [{"compiler_options": {"of": gpu}}, {}, {}]
