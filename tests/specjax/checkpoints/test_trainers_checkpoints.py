"""Weights out of checkpoints of trainers: {"params", "opt_state", "step"} in each layout."""

import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
import tensorstore
from asked_for import quick
from flax import nnx
from helpers import tiny_llama, tiny_llama_config
from trainers_models import LinenLlama, NnxLlama

import specjax
from specjax.models.base import RopeConfig
from specjax.models.layouts import Layout, linen, maxtext
from specjax.models.layouts import nnx as nnx_layout
from specjax.models.layouts.tables import ROOT, Place, nested

CONFIG = tiny_llama_config(num_layers=3)
MAXTEXT = tiny_llama_config(
    num_layers=3, head_dim=16, rope=RopeConfig(kind="llama3", theta=5e5, factor=8.0)
)
TUNIX = tiny_llama_config(num_layers=3, family="qwen3", qk_norm=True, tie_word_embeddings=True)


def drawn(config, layout):
    """Returns a random tree in a layout."""
    rng = np.random.default_rng(0)
    shapes = layout.expected(config)
    leaves = {
        path: jnp.asarray(rng.standard_normal(leaf.shape), jnp.float32)
        for path, leaf in shapes.items()
    }
    return {ROOT: nested(leaves)} if layout.is_wrapped else nested(leaves)


def of_nnx():
    _, state = nnx.split(NnxLlama(CONFIG, nnx.Rngs(0)))
    return CONFIG, "nnx", state


def of_nnx_stacked():
    return CONFIG, "nnx", drawn(CONFIG, nnx_layout(CONFIG, is_stacked=True, has_heads=True))


def of_linen(is_scanned):
    ids = jnp.ones((1, 4), jnp.int32)
    return CONFIG, "linen", LinenLlama(CONFIG, is_scanned).init(jax.random.key(0), ids)


def of_maxtext(is_stacked):
    return MAXTEXT, "maxtext", drawn(MAXTEXT, maxtext(MAXTEXT, is_stacked=is_stacked))


def of_tunix():
    params = tiny_llama(0, num_layers=3, family="qwen3", qk_norm=True, tie_word_embeddings=True)
    return TUNIX, "tunix", specjax.convert_back(params.params, "tunix", TUNIX)


TRAINERS = {
    "nnx": of_nnx,
    "nnx, stacked": of_nnx_stacked,
    "linen": lambda: of_linen(False),
    "linen, scanned": lambda: of_linen(True),
    "maxtext": lambda: of_maxtext(False),
    "maxtext, scanned": lambda: of_maxtext(True),
    "tunix": of_tunix,
    "specjax": lambda: (CONFIG, "specjax", tiny_llama(0, num_layers=3).params),
}


@pytest.fixture(scope="module", params=quick(TRAINERS, "nnx", "maxtext, scanned"))
def trained(request):
    """Returns config, layout, the weights as the trainer has them, and its whole state."""
    config, layout, params = TRAINERS[request.param]()
    opt_state = optax.adam(1e-3).init(params)
    return config, layout, params, {"params": params, "opt_state": opt_state, "step": 7}


def equal(given, expected):
    assert jax.tree.structure(given) == jax.tree.structure(expected)
    for ours, theirs in zip(jax.tree.leaves(given), jax.tree.leaves(expected)):
        assert ours.dtype == theirs.dtype
        np.testing.assert_array_equal(ours, theirs)


def save_tree(folder, tree, **options):
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(**options)) as checkpointer:
        checkpointer.save(folder, args=ocp.args.PyTreeSave(tree))


def without_optimiser(folder):
    """Deletes what a checkpoint with a folder per array holds of the optimiser."""
    gone = [path for path in folder.iterdir() if path.name.startswith("opt_state")]
    assert len(gone) > 20
    for path in gone:
        shutil.rmtree(path)


@pytest.fixture
def stored(trained, tmp_path):
    """Returns config, layout, the weights in ours, and a folder that has lost the optimiser."""
    config, layout, params, state = trained
    save_tree(tmp_path / "tree", state, use_ocdbt=False)
    without_optimiser(tmp_path / "tree")
    return config, layout, specjax.convert(params, layout, config), tmp_path / "tree"


def test_the_optimiser_is_not_read(stored):
    config, layout, expected, folder = stored
    model = specjax.load_orbax(folder, layout=layout, config=config)
    equal(model.params, expected)
    assert model.config == config
    assert model.name == "tree"


@pytest.mark.full
@pytest.mark.parametrize("num_devices", [1, 2])
def test_over_a_mesh_in_another_dtype(stored, num_devices):
    config, layout, expected, folder = stored
    mesh = jax.make_mesh((num_devices,), ("tensor",), devices=jax.devices()[:num_devices])
    model = specjax.load_orbax(folder, layout=layout, config=config, mesh=mesh, dtype="bf16")
    equal(model.params, jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), expected))
    places = specjax.param_shardings(config, mesh)
    for leaf, place in zip(jax.tree.leaves(model.params), jax.tree.leaves(places)):
        assert leaf.sharding.is_equivalent_to(place, leaf.ndim)


def test_checkpoints_by_step(trained, tmp_path):
    """As CheckpointManager writes them, and MaxText: <base>/<step>/items."""
    config, layout, params, state = trained
    options = ocp.CheckpointManagerOptions(step_prefix="step")
    with ocp.CheckpointManager(tmp_path, item_names=("items", "iter"), options=options) as manager:
        for step, factor in ((3, 2.0), (12, 1.0)):
            scaled = jax.tree.map(lambda leaf, factor=factor: leaf * factor, state)
            of_loader = ocp.args.JsonSave({"position": step})
            manager.save(
                step, args=ocp.args.Composite(items=ocp.args.PyTreeSave(scaled), iter=of_loader)
            )
    expected = specjax.convert(params, layout, config)
    for folder in (tmp_path, tmp_path / "step_12", tmp_path / "step_12" / "items"):
        equal(specjax.load_orbax(folder, layout=layout, config=config).params, expected)
    loaded = specjax.load_orbax(tmp_path, layout=layout, config=config, step=3)
    doubled = specjax.convert(jax.tree.map(lambda leaf: leaf * 2, params), layout, config)
    equal(loaded.params, doubled)


def test_a_missing_piece_is_not_read_as_zeros(tmp_path):
    model = tiny_llama(0)
    save_tree(tmp_path / "tree", model.params, use_ocdbt=False)
    (tmp_path / "tree" / "layers.1.q_proj" / "0.0").unlink()
    with pytest.raises(ValueError, match=r"array 'layers.1.q_proj' cannot be read .*copy it again"):
        specjax.load_orbax(tmp_path / "tree", config=model.config)


def bytes_read():
    metrics = tensorstore.experimental_collect_matching_metrics("/tensorstore/kvstore/file/")
    found = {each["name"]: each["values"][0] for each in metrics}
    return found["/tensorstore/kvstore/file/bytes_read"]["value"]


@pytest.mark.parametrize("zarr3", [False, True])
def test_bytes_read_are_those_of_the_weights(zarr3, tmp_path):
    """Of a tree in a database: the optimiser's part of it is thrice as large as what is read."""
    config = tiny_llama_config(vocab_size=4096, hidden_size=128)
    rng = np.random.default_rng(0)
    shapes = config.param_shapes()
    draw = lambda leaf: rng.standard_normal(leaf.shape).astype(np.float32)
    params = jax.tree.map(draw, shapes)
    moments = (optax.ScaleByAdamState(0, jax.tree.map(draw, shapes), jax.tree.map(draw, shapes)),)
    state = {"params": params, "opt_state": moments, "step": 1}
    save_tree(tmp_path / "tree", state, use_ocdbt=True, use_zarr3=zarr3)
    before = bytes_read()
    model = specjax.load_orbax(tmp_path / "tree", config=config)
    read = bytes_read() - before
    equal(model.params, params)
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    assert 0.5 * size < read < 1.1 * size, (read, size)


# Where the weights lie


def test_weights_under_other_names_and_beside_copies(tmp_path):
    model = tiny_llama(0)
    state = {"policy": {"model": model.params}, "optimizer": {"mu": model.params}}
    save_tree(tmp_path / "one", state)
    equal(specjax.load_orbax(tmp_path / "one", config=model.config).params, model.params)
    halved = jax.tree.map(lambda leaf: leaf / 2, model.params)
    save_tree(tmp_path / "two", state | {"reference": {"model": halved}})
    with pytest.raises(
        ValueError, match=r"several names: 'policy.model', 'reference.model'.* root="
    ):
        specjax.load_orbax(tmp_path / "two", config=model.config)
    loaded = specjax.load_orbax(tmp_path / "two", config=model.config, root="reference.model")
    equal(loaded.params, halved)
    with pytest.raises(
        ValueError, match=r"root='actor': .* no such node; at its top are optimizer"
    ):
        specjax.load_orbax(tmp_path / "two", config=model.config, root="actor")


def test_weights_in_params_come_before_copies(tmp_path):
    model = tiny_llama(0)
    averaged = jax.tree.map(lambda leaf: leaf / 2, model.params)
    save_tree(tmp_path / "tree", {"params": {"params": model.params}, "ema": averaged})
    equal(specjax.load_orbax(tmp_path / "tree", config=model.config).params, model.params)
    loaded = specjax.load_orbax(tmp_path / "tree", config=model.config, root="ema")
    equal(loaded.params, averaged)


def test_weights_alone_and_weights_in_an_item_of_their_own(tmp_path):
    model = tiny_llama(0)
    save_tree(tmp_path / "alone", model.params)
    equal(specjax.load_orbax(tmp_path / "alone", config=model.config).params, model.params)
    items = {"model_params": model.params, "optimizer_state": {"mu": model.params}}
    with ocp.CheckpointManager(tmp_path / "steps", item_names=tuple(items)) as manager:
        saved = {name: ocp.args.PyTreeSave(tree) for name, tree in items.items()}
        manager.save(1, args=ocp.args.Composite(**saved))
    equal(specjax.load_orbax(tmp_path / "steps", config=model.config).params, model.params)
    (tmp_path / "steps/1/model_params").rename(tmp_path / "steps/1/actor")
    with pytest.raises(ValueError, match="holds 2 trees, actor, optimizer_state"):
        specjax.load_orbax(tmp_path / "steps", config=model.config)
    equal(specjax.load_orbax(tmp_path / "steps/1/actor", config=model.config).params, model.params)


def test_counters_beside_the_weights_are_passed_over(tmp_path):
    model = tiny_llama(0)
    rngs = {"count": jnp.uint32(3), "key": jnp.zeros(2, jnp.uint32)}
    save_tree(tmp_path / "tree", {"params": {**model.params, "rngs": rngs}})
    equal(specjax.load_orbax(tmp_path / "tree", config=model.config).params, model.params)


def test_a_layout_of_ones_own(tmp_path):
    """An operation that does not say its bounds reads whole arrays, on any mesh."""

    class Negative:
        def to_ours(self, x):
            return -x

        to_theirs = to_ours

    places = {
        name: Place(f"w.{place.path}", (*place.operations, Negative()), place.stack_axis)
        for name, place in linen(CONFIG, is_stacked=True).places.items()
    }
    layout = Layout("negative", places)
    tree = drawn(CONFIG, layout)
    save_tree(tmp_path / "tree", tree)
    mesh = jax.make_mesh((2,), ("tensor",), devices=jax.devices()[:2])
    model = specjax.load_orbax(tmp_path / "tree", config=CONFIG, layout=layout, mesh=mesh)
    equal(model.params, specjax.convert(tree, layout, CONFIG))


@pytest.mark.full
def test_a_config_and_a_tokenizer_from_a_folder(tmp_path):
    model = specjax.load_model("demo")
    save_tree(
        tmp_path / "tree", {"params": specjax.convert_back(model.params, "nnx", model.config)}
    )
    loaded = specjax.load_orbax(tmp_path / "tree", layout="nnx", config="demo")
    equal(loaded.params, model.params)
    assert loaded.config == model.config
    assert loaded.generation_defaults == model.generation_defaults
    assert loaded.tokenizer.encode("x = 1") == model.tokenizer.encode("x = 1")


# What does not fit


@pytest.fixture(scope="module")
def linen_tree(tmp_path_factory):
    config, _, params = of_linen(False)
    folder = tmp_path_factory.mktemp("linen") / "tree"
    save_tree(folder, {"params": params, "opt_state": optax.adam(1e-3).init(params)})
    return config, folder


@pytest.mark.full
def test_another_layout_is_named(linen_tree):
    config, folder = linen_tree
    with pytest.raises(
        ValueError, match=r"(?s)not in the layout 'specjax'.*layout='linen'. reads it"
    ):
        specjax.load_orbax(folder, config=config)
    with pytest.raises(ValueError, match=r"(?s)below 'params.params' is not in the layout 'nnx'"):
        specjax.load_orbax(folder, config=config, layout="nnx")


def test_no_config_is_asked_for(linen_tree):
    with pytest.raises(ValueError, match=r"says no config, .* pass config=, .* layout="):
        specjax.load_orbax(linen_tree[1])
    with pytest.raises(TypeError, match=r"must be a ModelConfig"):
        specjax.load_orbax(linen_tree[1], config=3)


def test_a_config_of_another_model_is_refused(linen_tree):
    _, folder = linen_tree
    wrong = tiny_llama_config(num_layers=3, hidden_size=64)
    with pytest.raises(
        ValueError, match=r"q_proj.kernel \(64, 32\) +layers_0.q_proj.kernel \(32, 32\)"
    ):
        specjax.load_orbax(folder, config=wrong, layout="linen")


def test_a_missing_tensor_is_named(tmp_path):
    model = tiny_llama(0)
    for name in ("norm", "embed_tokens"):
        params = {key: leaf for key, leaf in model.params.items() if key != name}
        save_tree(tmp_path / name, {"params": params, "opt_state": {"mu": model.params}})
        shape = re.escape(str(model.params[name].shape))
        with pytest.raises(ValueError, match=rf"(?s)below 'params' .*  {name} {shape} +-"):
            specjax.load_orbax(tmp_path / name, config=model.config)


def test_dtypes_that_are_not_one(tmp_path):
    model = tiny_llama(0)
    mixed = {**model.params, "norm": model.params["norm"].astype(jnp.bfloat16)}
    save_tree(tmp_path / "mixed", mixed)
    with pytest.raises(ValueError, match=r"several dtypes, bfloat16, float32; .* dtype="):
        specjax.load_orbax(tmp_path / "mixed", config=model.config)
    loaded = specjax.load_orbax(tmp_path / "mixed", config=model.config, dtype="float32")
    equal(loaded.params["layers"], model.params["layers"])
    whole = {**model.params, "norm": model.params["norm"].astype(jnp.int8)}
    save_tree(tmp_path / "whole", whole)
    with pytest.raises(ValueError, match=r"not floating point: norm is int8"):
        specjax.load_orbax(tmp_path / "whole", config=model.config)


def test_names_that_lead_to_other_folders(tmp_path):
    model = tiny_llama(0)
    save_tree(tmp_path / "tree", model.params, use_ocdbt=False)
    path = tmp_path / "tree" / "_METADATA"
    path.write_text(path.read_text().replace('"key": "norm"', '"key": "a/norm"'))
    with pytest.raises(ValueError, match=r"the name of array 'a/norm' holds a slash"):
        specjax.load_orbax(tmp_path / "tree", config=model.config)


def test_folders_that_are_none(tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        specjax.load_orbax(tmp_path / "none")
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"is no Orbax checkpoint: .* specjax.load_model"):
        specjax.load_orbax(tmp_path / "hf")
    for name in ("run/7", "run/8.orbax-checkpoint-tmp", "run/7/items"):
        (tmp_path / name).mkdir(parents=True, exist_ok=True)
    (tmp_path / "run/7/_CHECKPOINT_METADATA").write_text("{}")
    with pytest.raises(ValueError, match=r"holds no whole checkpoint: .* copy it again"):
        specjax.load_orbax(tmp_path / "run")


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"tree_metadata": {"a": 1}}', '{"tree_metadata": {"a": {"x": {}}}}']
)
def test_metadata_that_is_none(text, tmp_path):
    save_tree(tmp_path / "tree", tiny_llama(0).params)
    (tmp_path / "tree" / "_METADATA").write_text(text)
    with pytest.raises(ValueError, match=r"_METADATA"):
        specjax.load_orbax(tmp_path / "tree", config=CONFIG)
