"""Meshes of a trainer: its own axis names, weights where it keeps them, one mesh or two."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from asked_for import quick
from helpers import random_model, tiny_llama
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import specjax
from specjax import EngineConfig, SamplingParams
from specjax.api.moved_weights import COPIED, KEPT, MADE, SHARED, Source, WeightMover
from specjax.models.mesh_axes import axes_by_name, mapped
from specjax.types import DecoderParams

PROMPTS = [[1, 2, 3], [4, 5, 6, 8, 9, 1, 2]]
SAMPLING = SamplingParams(temperature=0.8, max_tokens=10, seed=3)
ENGINE = EngineConfig(
    page_size=8, max_rows=4, burst_steps=4, max_context=32, numerics="invariant", token_bucket=8
)
CONFIG = tiny_llama(0).config
AXES = {"fsdp": "data", "tp": "tensor"}


def params(seed):
    return tiny_llama(seed).params


def mesh_of(shape, names, kind=AxisType.Auto, first=0):
    count = int(np.prod(shape))
    devices = np.array(jax.devices()[first : first + count]).reshape(shape)
    return Mesh(devices, names, axis_types=(kind,) * len(names))


def size(tree):
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


def split_over(axis, mesh):
    """Returns how FSDP splits weights: each along its first dimension that divides evenly."""

    def place(leaf):
        count = mesh.shape[axis]
        at = next((i for i, n in enumerate(leaf.shape) if n % count == 0), None)
        names = [axis if i == at else None for i in range(leaf.ndim)]
        return NamedSharding(mesh, PartitionSpec(*names))

    return lambda tree: jax.device_put(tree, jax.tree.map(place, tree))


@functools.cache
def build(mesh, names=None, drafter=None):
    kwargs = {} if drafter is None else {"drafter": drafter, "num_speculative_tokens": 2}
    return specjax.build_decoder(
        CONFIG,
        engine=ENGINE,
        mesh=mesh,
        mesh_axes=None if names is None else dict(names),
        policy=None,
        **kwargs,
    )


def roll(decoder, tree, **arguments):
    return specjax.rollout(decoder, tree, PROMPTS, sampling=SAMPLING, num_samples=2, **arguments)


@functools.cache
def expected(seed):
    return roll(build(None), params(seed))


def assert_same(batch, wanted):
    np.testing.assert_array_equal(batch.completion_ids, wanted.completion_ids)
    np.testing.assert_allclose(batch.logprobs.raw, wanted.logprobs.raw, atol=2e-5)


# Names of axes


@pytest.mark.parametrize(
    "shape, names, mesh_axes, wanted",
    [
        ((2, 4), ("fsdp", "tp"), AXES, {"data": 2, "tensor": 4}),
        ((4, 2), ("tp", "fsdp"), AXES, {"tensor": 4, "data": 2}),
        ((1, 2, 4, 1), ("stage", "fsdp", "tp", "expert"), AXES, {"data": 2, "tensor": 4}),
        ((2, 4), ("data", "tp"), {"tp": "tensor"}, {"data": 2, "tensor": 4}),
        ((2, 2, 2), ("fsdp", "tp", "dp"), AXES | {"dp": "data"}, {"data": 4, "tensor": 2}),
        (
            (2, 4),
            ("data", "tensor"),
            {"data": "tensor", "tensor": "data"},
            {"tensor": 2, "data": 4},
        ),
        ((1, 1), ("stage", "expert"), None, {"data": 1}),
        ((8,), ("tp",), {"tp": "tensor"}, {"tensor": 8}),
        ((1, 8), ("fsdp", "tp"), {"tp": "tensor"}, {"tensor": 8}),
    ],
)
def test_axes_of_other_names(shape, names, mesh_axes, wanted):
    mesh = mesh_of(shape, names)
    own = mapped(mesh, mesh_axes)
    assert dict(own.shape) == wanted
    # A trainer's sharding over the axes of one name splits as ours over that name.
    for name, axes in axes_by_name(mesh, mesh_axes).items():
        theirs, ours = (
            NamedSharding(*pair)
            for pair in ((mesh, PartitionSpec(axes)), (own, PartitionSpec(name)))
        )
        assert theirs.devices_indices_map((16,)) == ours.devices_indices_map((16,))


def test_a_mesh_of_our_names_is_taken_as_it_is():
    mesh = mesh_of((2, 4), ("tensor", "data"), AxisType.Explicit)
    assert mapped(mesh) is mesh
    assert mapped(None) is None


@pytest.mark.parametrize(
    "mesh, mesh_axes, message",
    [
        (
            ("fsdp", "tp"),
            None,
            r"'fsdp' \(2 devices\), 'tp' \(4 .*mesh_axes=\{'fsdp': 'data', 'tp'",
        ),
        (("fsdp", "tp"), {"tp": "tensor"}, r"'fsdp' \(2 devices\); .*\{'tp': 'tensor', 'fsdp'"),
        (("fsdp", "tp"), AXES | {"ep": "data"}, "mesh_axes names 'ep', and the mesh has the axes"),
        (("fsdp", "tp"), AXES | {"tp": "heads"}, r"mesh_axes\['tp'\]='heads' must be 'data'"),
        (("fsdp", "tp"), AXES | {"tp": None}, r"mesh_axes\['tp'\]=None must be"),
        (None, AXES, "is for a mesh, and there is none"),
    ],
)
def test_axes_that_cannot_be_mapped(mesh, mesh_axes, message):
    mesh = None if mesh is None else mesh_of((2, 4), mesh)
    with pytest.raises(ValueError, match=message):
        specjax.build_decoder(CONFIG, mesh=mesh, mesh_axes=mesh_axes)


def test_shardings_have_the_names_of_the_trainer():
    mesh = mesh_of((2, 2, 2), ("tp", "fsdp", "sp"), AxisType.Explicit)
    config = dataclasses.replace(CONFIG, num_heads=4, num_kv_heads=4)
    places = specjax.param_shardings(config, mesh, AXES | {"sp": "tensor"})
    assert {place.mesh for place in jax.tree.leaves(places)} == {mesh}
    assert places["layers"][0]["q_proj"].spec == PartitionSpec(("tp", "sp"), None)
    assert places["norm"].spec == PartitionSpec(None)


# What moves


def mover(places):
    leaves = jax.tree.leaves(places)
    return WeightMover(
        lambda arrays: [Source(path, None, jnp.float32, p) for path, p in zip(arrays, leaves)]
    )


def test_what_is_done_for_an_array():
    mesh, spec = mesh_of((2, 2), ("data", "tensor")), PartitionSpec("tensor")
    place = NamedSharding(mesh, spec)
    source = Source("w", None, jnp.dtype("float32"), place)
    x = np.ones((4, 2), np.float32)
    assert source.way_of(jax.device_put(x, place)) == KEPT
    explicit = mesh_of((2, 2), ("data", "tensor"), AxisType.Explicit)
    assert source.way_of(jax.device_put(x, NamedSharding(explicit, spec))) == KEPT
    # The same slices on the same devices, which another mesh has in another order.
    turned = Mesh(mesh.devices.T, ("a", "b"))
    assert source.way_of(jax.device_put(x, NamedSharding(turned, PartitionSpec("a")))) == SHARED
    assert source.way_of(jax.device_put(x, NamedSharding(mesh, PartitionSpec("data")))) == MADE
    assert source.way_of(jax.device_put(x, NamedSharding(turned, PartitionSpec("b")))) == COPIED
    assert source.way_of(jax.device_put(x, jax.devices()[0])) == COPIED
    assert source.way_of(x) == COPIED
    half = source._replace(dtype=jnp.dtype("bfloat16"))
    assert half.way_of(jax.device_put(x, place)) == MADE
    assert source._replace(place=None).way_of(jax.device_put(x, place)) == KEPT


@pytest.mark.parametrize("spec", [("a",), ("b",), ("b", "a"), (("a", "b"),), ()], ids=str)
@pytest.mark.parametrize("order", ["same", "turned", "elsewhere"])
def test_values_arrive_whatever_the_sharding(order, spec):
    devices = np.array(jax.devices()[:4]).reshape(2, 2)
    others = np.array(jax.devices()[4:]).reshape(2, 2)
    theirs = {"same": devices, "turned": devices.T, "elsewhere": others}[order]
    place = NamedSharding(mesh_of((2, 2), ("data", "tensor")), PartitionSpec("tensor"))
    x = np.arange(32.0, dtype=np.float32).reshape(8, 4)
    for kind in (AxisType.Auto, AxisType.Explicit):
        mesh = Mesh(theirs, ("a", "b"), axis_types=(kind, kind))
        given = jax.device_put(x, NamedSharding(mesh, PartitionSpec(*spec)))
        move = mover([place])
        (moved,) = move({"w": given})
        np.testing.assert_array_equal(moved, x)
        assert moved.sharding.is_equivalent_to(place, 2)
        first = move.bytes_moved
        (again,) = move({"w": given})
        assert again is moved
        assert move.bytes_moved == 0
        # In place means that not one byte is copied.
        pointers = lambda array: {
            s.device: s.data.unsafe_buffer_pointer() for s in array.global_shards
        }
        assert (first == 0) == (pointers(moved) == pointers(given))


def test_leaves_that_lie_apart_are_moved_together():
    mesh = mesh_of((4,), ("tensor",))
    place, whole = (NamedSharding(mesh, PartitionSpec(*spec)) for spec in (("tensor",), ()))
    x = jnp.arange(8.0)
    arrays = {
        "kept": jax.device_put(x, place),
        "resharded": jax.device_put(x + 1, whole),
        "one device": jax.device_put(x + 2, jax.devices()[5]),
        "host": np.arange(8.0, dtype=np.float32) + 3,
    }
    move = mover([place] * 4)
    leaves = move(arrays)
    assert leaves[0] is arrays["kept"]
    for index, leaf in enumerate(leaves):
        np.testing.assert_array_equal(leaf, np.arange(8.0) + index)
        assert leaf.sharding.is_equivalent_to(place, 1)
    assert move.bytes_moved == 3 * 32
    assert move.seconds > 0
    arrays["host"][...] = 0  # arrays of numpy may change in place
    np.testing.assert_array_equal(move(arrays)[3], np.zeros(8))
    assert move.num_traces == 1


# Rollouts


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("names", quick([("fsdp", "tp"), ("tp", "fsdp")], ("fsdp", "tp")))
@pytest.mark.full
def test_one_mesh(names, kind):
    mesh = mesh_of((2, 2), names, kind)
    decoder = build(mesh, tuple(AXES.items()))
    in_place = jax.device_put(params(0), specjax.param_shardings(CONFIG, mesh, AXES))
    batch = roll(decoder, in_place)
    assert_same(batch, expected(0))
    assert batch.metrics["weights_bytes_moved"] == batch.metrics["weights_move_s"] == 0
    # Results are on the trainer's mesh, under its names: a loss takes both.
    assert batch.completion_ids.sharding == NamedSharding(mesh, PartitionSpec("fsdp"))
    loss = lambda tree, batch: jnp.sum(tree["norm"]) + jnp.sum(batch.logprobs.raw)
    assert np.isfinite(jax.jit(loss)(in_place, batch))
    trained = split_over("fsdp", mesh)(params(1))
    num_traces = None
    for seed in (1, 0):
        trained = split_over("fsdp", mesh)(params(seed))
        batch = roll(decoder, trained)
        assert_same(batch, expected(seed))
        # A vector that FSDP splits is moved as well, each leaf once.
        assert batch.metrics["weights_bytes_moved"] == size(params(0))
        assert batch.metrics["weights_move_s"] > 0
        again = roll(decoder, trained)
        assert_same(again, batch)
        assert again.metrics["weights_bytes_moved"] == again.metrics["weights_move_s"] == 0
        assert num_traces in (None, again.metrics["num_traces"])
        num_traces = again.metrics["num_traces"]
    assert decoder.num_traces == num_traces


def test_a_sharding_that_is_spelled_otherwise_compiles_nothing():
    mesh = mesh_of((2,), ("a",), AxisType.Explicit)
    move = mover([NamedSharding(mesh_of((2,), ("tensor",)), PartitionSpec("tensor", None))])
    num_traces = []
    for spec in ((), (None,), (None, None)):
        place = NamedSharding(mesh, PartitionSpec(*spec))
        (moved,) = move({"w": jax.device_put(jnp.ones((4, 2)), place)})
        np.testing.assert_array_equal(moved, np.ones((4, 2)))
        num_traces.append(move.num_traces)
    assert num_traces == [1, 1, 1]


@pytest.mark.full
def test_two_meshes():
    trainer = mesh_of((4,), ("fsdp",), AxisType.Explicit, first=4)
    decoder = build(mesh_of((2, 2), ("dp", "tp")), (("dp", "data"), ("tp", "tensor")))
    for seed in (0, 1):
        trained = split_over("fsdp", trainer)(params(seed))
        batch = roll(decoder, trained)
        assert_same(batch, expected(seed))
        assert batch.metrics["weights_bytes_moved"] == size(params(0))
        again = roll(decoder, trained)
        assert_same(again, batch)
        assert again.metrics["weights_bytes_moved"] == 0


@pytest.mark.full
def test_float32_masters_over_fsdp():
    """Cast and resharded by one function, before anything crosses devices as float32."""
    mesh = mesh_of((2, 2), ("fsdp", "tp"))
    decoder = specjax.build_decoder(
        CONFIG, engine=ENGINE, mesh=mesh, mesh_axes=AXES, dtype=jnp.bfloat16
    )
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params(0))
    wanted = roll(decoder, half)
    masters = split_over("fsdp", mesh)(params(0))
    batch = roll(decoder, masters)
    np.testing.assert_array_equal(batch.completion_ids, wanted.completion_ids)
    np.testing.assert_array_equal(batch.logprobs.raw, wanted.logprobs.raw)
    assert batch.metrics["weights_bytes_moved"] == size(half)


@pytest.mark.full
def test_a_draft_model_is_moved_once_too():
    mesh = mesh_of((2, 2), ("fsdp", "tp"))
    draft = random_model(dataclasses.replace(CONFIG, num_layers=1), 5)
    decoder = specjax.build_decoder(
        CONFIG,
        engine=ENGINE,
        mesh=mesh,
        mesh_axes=AXES,
        drafter=draft,
        num_speculative_tokens=2,
    )
    trained = split_over("fsdp", mesh)(params(0))
    batch = roll(decoder, trained)
    assert_same(batch, expected(0))
    assert batch.num_drafted.sum() > 0
    assert batch.metrics["weights_bytes_moved"] == size(params(0)) + size(draft.params)
    newer = split_over("fsdp", mesh)(params(1))
    assert roll(decoder, newer).metrics["weights_bytes_moved"] == size(params(0))
    both = DecoderParams(newer, split_over("tp", mesh)(draft.params))
    batch = roll(decoder, both)
    assert_same(batch, expected(1))
    assert batch.metrics["weights_bytes_moved"] == size(draft.params)
    assert roll(decoder, both).metrics["weights_bytes_moved"] == 0
    # The draft model's weights, as they were moved, are the same.
    version = decoder.params_version
    moved = DecoderParams(newer, decoder._handed._drafters.kept)
    ours = jax.tree.unflatten(jax.tree.structure(draft.params), moved.drafter)
    roll(decoder, DecoderParams(newer, ours))
    assert decoder.params_version == version


@pytest.mark.full
def test_an_engine_and_generate():
    mesh = mesh_of((2, 2), ("fsdp", "tp"), AxisType.Explicit)
    model = tiny_llama(0)
    greedy = SamplingParams(temperature=0, max_tokens=10)
    plain = specjax.generate(model, PROMPTS, sampling=greedy, engine=ENGINE)
    over = specjax.generate(
        model, PROMPTS, sampling=greedy, engine=ENGINE, mesh=mesh, mesh_axes=AXES
    )
    tokens = lambda generation: [each.token_ids for each in generation.completions]
    assert tokens(over) == tokens(plain)
    trained = split_over("fsdp", mesh)(params(1))
    with specjax.Engine(model, engine=ENGINE, mesh=mesh, mesh_axes=AXES) as engine:
        assert engine.update_params(trained) == 1
        assert engine.update_params(trained) == 1  # the same arrays change nothing
        texts = [[*engine.stream(prompt, greedy)][-1].completion for prompt in PROMPTS]
    newer = specjax.generate(tiny_llama(1), PROMPTS, sampling=greedy, engine=ENGINE)
    assert [text.token_ids for text in texts] == tokens(newer)


def test_a_model_is_loaded_onto_a_trainers_mesh(tmp_path):
    mesh = mesh_of((2, 2), ("fsdp", "tp"), AxisType.Explicit)
    places = specjax.param_shardings(CONFIG, mesh, AXES)
    specjax.save_pretrained(tiny_llama(0), tmp_path / "pretrained")
    specjax.save_orbax(tmp_path / "orbax", tiny_llama(0))
    for load, name in ((specjax.load_model, "pretrained"), (specjax.load_orbax, "orbax")):
        loaded = load(tmp_path / name, mesh=mesh, mesh_axes=AXES, dtype="float32").params
        jax.tree.map(np.testing.assert_array_equal, loaded, params(0))
        assert jax.tree.all(jax.tree.map(lambda x, place: x.sharding == place, loaded, places))
