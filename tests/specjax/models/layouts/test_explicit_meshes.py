"""Trees over a mesh whose axes are of type Explicit: shardings are part of the arrays' types."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from asked_for import quick
from helpers import tiny_llama
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import specjax
from specjax.models.base import RopeConfig
from specjax.models.layouts import Layout, Offset, Place, Transposed
from specjax.models.layouts.named import NAMES, variants

# MaxText interleaves its heads, and scales its queries by a power of two.
MODEL = tiny_llama(0, head_dim=16, rope=RopeConfig(kind="llama3", factor=8.0))
PARAMS, CONFIG = MODEL.params, MODEL.config
CASES = {
    variant.name: (layout, variant) for layout in NAMES for variant in variants(layout, CONFIG)
}
WHERE = ["outside jit", "inside jit"]


def mesh_of(kind=AxisType.Explicit):
    return jax.make_mesh((4, 2), ("fsdp", "tp"), axis_types=(kind, kind))


def split(x, order=1, kind=AxisType.Explicit):
    """Splits the first axes that can be over "fsdp" and "tp", or the last ones."""
    names, left = [None] * x.ndim, ["fsdp", "tp"]
    mesh = mesh_of(kind)
    for axis in range(x.ndim)[::order]:
        if left and x.shape[axis] % mesh.shape[left[0]] == 0:
            names[axis] = left.pop(0)
    return jax.device_put(x, NamedSharding(mesh, PartitionSpec(*names)))


def run(function, tree, where):
    return (jax.jit(function) if where == "inside jit" else function)(tree)


def assert_equal(one, other):
    assert jax.tree.structure(one) == jax.tree.structure(other)
    jax.tree.map(np.testing.assert_array_equal, one, other)


def assert_explicit(tree):
    for leaf in jax.tree.leaves(tree):
        assert jax.typeof(leaf).sharding.mesh.axis_types == (AxisType.Explicit,) * 2


@pytest.mark.parametrize("order", quick([1, -1], -1))
@pytest.mark.parametrize("where", quick(WHERE, "inside jit"))
@pytest.mark.parametrize("name", quick(CASES, "maxtext, layers stacked"))
def test_there_and_back(name, where, order):
    layout, variant = CASES[name]
    theirs = specjax.convert_back(PARAMS, variant, CONFIG)
    ours = specjax.convert(theirs, layout, CONFIG)
    to_ours = functools.partial(specjax.convert, layout=layout, config=CONFIG)
    to_theirs = functools.partial(specjax.convert_back, layout=variant, config=CONFIG)
    place = functools.partial(split, order=order)
    found = run(to_ours, jax.tree.map(place, theirs), where)
    assert_equal(found, ours)
    assert_explicit(found)
    back = run(to_theirs, jax.tree.map(place, ours), where)
    assert_equal(back, theirs)
    assert_explicit(back)
    assert_equal(run(to_theirs, found, where), theirs)


@pytest.mark.full
@pytest.mark.parametrize("where", WHERE)
def test_under_the_mesh(where):
    """As a program has it that sets its mesh for all it does."""
    theirs = jax.tree.map(split, specjax.convert_back(PARAMS, "maxtext", CONFIG))
    with jax.set_mesh(mesh_of()):
        found = run(lambda tree: specjax.convert(tree, "maxtext", CONFIG), theirs, where)
    assert_equal(found, PARAMS)
    assert_explicit(found)


def specs(tree):
    return jax.tree.map(lambda leaf: jax.typeof(leaf).sharding.spec, tree)


@pytest.mark.full
@pytest.mark.parametrize("where", WHERE)
def test_what_is_split_stays_split(where):
    """Heads side by side are over the axes that heads were over, and the other way."""
    mesh = mesh_of()
    on = lambda x, *names: jax.device_put(x, NamedSharding(mesh, PartitionSpec(*names)))
    theirs = specjax.convert_back(PARAMS, "tunix", CONFIG)
    theirs = jax.tree.map(lambda x: on(x), theirs)
    attention, mlp = theirs["layers"][0]["attn"], theirs["layers"][0]["mlp"]
    attention["q_proj"]["w"] = on(attention["q_proj"]["w"], "fsdp", "tp")
    attention["k_proj"]["w"] = on(attention["k_proj"]["w"], None, None, "fsdp")
    attention["o_proj"]["w"] = on(attention["o_proj"]["w"], "tp", None, "fsdp")
    mlp["up_proj"]["kernel"] = on(mlp["up_proj"]["kernel"], None, ("fsdp", "tp"))
    ours = run(lambda tree: specjax.convert(tree, "tunix", CONFIG), theirs, where)
    layer = specs(ours["layers"][0])
    assert layer["q_proj"] == PartitionSpec("tp", "fsdp")
    # Each device had a part of every head: side by side that is no split.
    assert layer["k_proj"] == PartitionSpec(None, None)
    assert layer["o_proj"] == PartitionSpec("fsdp", "tp")
    assert layer["up_proj"] == PartitionSpec(("fsdp", "tp"), None)
    back = run(lambda tree: specjax.convert_back(tree, "tunix", CONFIG), ours, where)
    heads = specs(back["layers"][0]["attn"])
    assert heads["q_proj"]["w"] == PartitionSpec("fsdp", "tp", None)
    assert heads["o_proj"]["w"] == PartitionSpec("tp", None, "fsdp")
    # Four devices cannot have two heads.
    ours["layers"][0]["k_proj"] = on(ours["layers"][0]["k_proj"], "fsdp")
    back = run(lambda tree: specjax.convert_back(tree, "tunix", CONFIG), ours, where)
    spec = specs(back["layers"][0]["attn"]["k_proj"]["w"])
    assert spec == PartitionSpec(None, None, None)


class Reversed:
    """An operation of one's own, which says nothing of meshes."""

    def to_ours(self, x):
        return x[..., ::-1]

    to_theirs = to_ours


@pytest.mark.parametrize("where", WHERE)
def test_operations_of_ones_own(where):
    own = variants("specjax", CONFIG)[0]
    places = {**own.places, "norm": Place("norm", (Offset(1.0), Reversed()))}
    places["lm_head"] = Place("lm_head", (Reversed(), Transposed()))
    layout = Layout("mine", places)
    theirs = specjax.convert_back(PARAMS, layout, CONFIG)
    expected = specjax.convert(theirs, layout, CONFIG)
    tree = jax.tree.map(split, theirs)
    found = run(lambda tree: specjax.convert(tree, layout, CONFIG), tree, where)
    assert_equal(found, expected)
    assert specs(found)["lm_head"] == PartitionSpec(None, None)


def test_layers_that_are_split_otherwise_are_stacked():
    ours = jax.tree.map(split, PARAMS)
    ours["layers"][1]["gate_proj"] = split(PARAMS["layers"][1]["gate_proj"], -1)
    stacked = variants("specjax", CONFIG)[1]
    for where in WHERE:
        back = run(lambda tree: specjax.convert_back(tree, stacked, CONFIG), ours, where)
        assert_equal(back, specjax.convert_back(PARAMS, stacked, CONFIG))


@pytest.mark.full
def test_gradients_are_split_as_weights():
    theirs = jax.tree.map(split, specjax.convert_back(PARAMS, "maxtext", CONFIG))
    weights = jax.tree.map(lambda x: jnp.arange(x.size, dtype=x.dtype).reshape(x.shape), PARAMS)

    def loss(tree):
        ours = specjax.convert(tree, "maxtext", CONFIG)
        parts = jax.tree.map(
            lambda x, w: jnp.sum(x * jax.sharding.reshard(w, jax.typeof(x).sharding)),
            ours,
            jax.tree.map(split, weights),
        )
        return sum(jax.tree.leaves(parts))

    with jax.set_mesh(mesh_of()):
        found = jax.jit(jax.grad(loss))(theirs)
    expected = specjax.convert_back(weights, "maxtext", CONFIG)
    for layer in ("layers_0", "layers_1"):
        # Theirs is ours by 1 / 4, so its gradient is ours by 4.
        query = expected["params"]["decoder"][layer]["self_attention"]["query"]
        query["kernel"] = query["kernel"] * 16
    assert_equal(found, expected)
    assert specs(found) == specs(theirs)


def test_axes_that_are_automatic_stay_so():
    theirs = specjax.convert_back(PARAMS, "maxtext", CONFIG)
    place = functools.partial(split, kind=AxisType.Auto)
    for where in WHERE:
        found = run(
            lambda tree: specjax.convert(tree, "maxtext", CONFIG),
            jax.tree.map(place, theirs),
            where,
        )
        assert_equal(found, PARAMS)
        kinds = {kind for leaf in jax.tree.leaves(found) for kind in leaf.sharding.mesh.axis_types}
        assert kinds == {AxisType.Auto}
