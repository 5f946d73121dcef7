"""What save_orbax writes, load_orbax reads: models and drafters, over meshes, with equal bits."""

import dataclasses
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
from concurrent import futures

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from asked_for import quick
from etils import epath
from helpers import tiny_gpt2, tiny_llama

import specjax
from specjax.api.loading import load_target
from specjax.checkpoints import folders, records
from specjax.checkpoints.any_model import config_of
from specjax.checkpoints.stored_tree import store_of

# Heads enough for a tensor axis of eight.
WIDE = {"num_heads": 8, "num_kv_heads": 8, "head_dim": 4, "vocab_size": 64}


def assert_same(given, expected, dtype=None):
    """Trees of equal structure, dtypes and bits."""
    assert jax.tree.structure(given) == jax.tree.structure(expected)
    for ours, theirs in zip(jax.tree.leaves(given), jax.tree.leaves(expected), strict=True):
        theirs = np.asarray(theirs).astype(dtype or theirs.dtype)
        assert ours.dtype == theirs.dtype
        assert np.asarray(ours).tobytes() == theirs.tobytes()


def mesh_of(num_devices):
    return jax.make_mesh((num_devices,), ("tensor",), devices=jax.devices()[:num_devices])


@pytest.fixture(scope="module")
def model():
    return dataclasses.replace(
        tiny_llama(0, **WIDE), generation_defaults={"temperature": 0.5}, name="wide"
    )


@pytest.fixture(scope="module")
def saved(model, tmp_path_factory):
    """Returns the folder of a checkpoint of `model`, whose weights lay on eight devices."""
    folder = tmp_path_factory.mktemp("saved") / "run"
    places = specjax.param_shardings(model.config, mesh_of(8))
    on_mesh = jax.tree.map(jax.device_put, model.params, places)
    specjax.save_orbax(folder, dataclasses.replace(model, params=on_mesh))
    return folder


@pytest.mark.parametrize("num_devices", [4, 1, None])
def test_weights_of_eight_devices_on_fewer(num_devices, model, saved):
    mesh = None if num_devices is None else mesh_of(num_devices)
    loaded = specjax.load_orbax(saved, mesh=mesh)
    assert_same(loaded.params, model.params)
    if mesh is not None:
        places = specjax.param_shardings(model.config, mesh)
        of = lambda leaf, place: leaf.sharding.is_equivalent_to(place, leaf.ndim)
        assert jax.tree.all(jax.tree.map(of, loaded.params, places))
        assert {each.sharding.mesh.size for each in jax.tree.leaves(loaded.params)} == {num_devices}


def test_what_comes_back(model, saved):
    loaded = specjax.load_orbax(saved)
    assert loaded.config == model.config
    assert loaded.name == "wide"
    assert loaded.generation_defaults == {"temperature": 0.5}
    assert loaded.tokenizer is None


@pytest.mark.parametrize("dtype", ["bfloat16", "fp16", np.float32])
def test_another_dtype(dtype, model, saved):
    expected = {"fp16": jnp.float16}.get(dtype, dtype)
    assert_same(specjax.load_orbax(saved, dtype=dtype).params, model.params, jnp.dtype(expected))


def test_the_tokenizer_comes_along(tmp_path):
    model = specjax.load_model("demo")
    specjax.save_orbax(tmp_path, model)
    loaded = specjax.load_orbax(tmp_path)
    text = "def main():\n    return 1"
    assert loaded.tokenizer.encode(text) == model.tokenizer.encode(text)
    assert loaded.tokenizer.special_tokens == model.tokenizer.special_tokens
    assert_same(loaded.params, model.params)


def test_steps(tmp_path, model):
    small = tiny_llama(1)
    first = specjax.save_orbax(tmp_path, small)
    assert first.path == str(tmp_path / "0")
    assert specjax.save_orbax(tmp_path, model, step=10).path == str(tmp_path / "10")
    specjax.save_orbax(tmp_path, tiny_llama(2))
    assert folders.steps_in(tmp_path) == [11, 10, 0]
    assert_same(specjax.load_orbax(tmp_path).params, tiny_llama(2).params)
    assert_same(specjax.load_orbax(tmp_path, step=0).params, small.params)
    for one in (tmp_path / "10", tmp_path / "10" / "params"):
        assert_same(specjax.load_orbax(one).params, model.params)
    with pytest.raises(ValueError, match=r"step=11 is not after the newest checkpoint .*, 11;"):
        specjax.save_orbax(tmp_path, model, step=11)
    with pytest.raises(FileNotFoundError, match=r"no whole checkpoint of step=5; it has 11, 10, 0"):
        specjax.load_orbax(tmp_path, step=5)
    with pytest.raises(ValueError, match=r"step=5, and .* is one checkpoint"):
        specjax.load_orbax(tmp_path / "10", step=5)
    specjax.save_orbax(tmp_path, small, keep=2)
    assert folders.steps_in(tmp_path) == [12, 11]


@pytest.mark.parametrize("has_checkpoint", [True, False])
def test_a_folder_named_by_a_number_without_a_checkpoint(has_checkpoint, tmp_path):
    """Orbax takes it for a step, and writes none before it."""
    before = [0] if has_checkpoint else []
    if has_checkpoint:
        specjax.save_orbax(tmp_path, tiny_llama(0, num_layers=1))
    (tmp_path / "7").mkdir()
    model = tiny_llama(1, num_layers=1)
    with pytest.raises(ValueError, match=r"step=3 is not after the folder without a .*, 7;"):
        specjax.save_orbax(tmp_path, model, step=3)
    assert specjax.save_orbax(tmp_path, model).path == str(tmp_path / "8")
    assert folders.steps_in(tmp_path) == [8, *before]
    assert_same(specjax.load_orbax(tmp_path).params, model.params)


def test_a_step_that_orbax_does_not_write(tmp_path, monkeypatch):
    monkeypatch.setattr(ocp.CheckpointManager, "should_save", lambda self, step: False)
    with pytest.raises(RuntimeError, match=r"would not write .*/0; it has the steps none"):
        specjax.save_orbax(tmp_path, tiny_llama(0, num_layers=1))


def test_a_save_that_is_waited_for_later(tmp_path):
    params = {name: leaf for name, leaf in tiny_llama(0).params.items()}
    model = dataclasses.replace(tiny_llama(0), params=jax.tree.map(jnp.array, params))
    saving = specjax.save_orbax(tmp_path, model, wait=False)
    jax.tree.map(lambda leaf: leaf.delete(), model.params)  # as a donated step does
    assert saving.wait() == saving.wait() == str(tmp_path / "0")
    assert_same(specjax.load_orbax(tmp_path).params, params)


def test_a_save_while_another_is_under_way(tmp_path):
    models = [tiny_llama(seed) for seed in range(3)]
    savings = [specjax.save_orbax(tmp_path, model, wait=False) for model in models]
    assert [saving.wait() for saving in savings] == [str(tmp_path / str(step)) for step in range(3)]
    for step, model in enumerate(models):
        assert_same(specjax.load_orbax(tmp_path, step=step).params, model.params)


def test_saves_of_several_threads(tmp_path):
    models = [tiny_llama(seed, num_layers=1) for seed in range(3)]
    save = functools.partial(specjax.save_orbax, tmp_path / "run")
    with futures.ThreadPoolExecutor(3) as pool:
        paths = [saving.path for saving in pool.map(save, models)]
    assert sorted(epath.Path(path).name for path in paths) == ["0", "1", "2"]
    for path, model in zip(paths, models):
        step = int(epath.Path(path).name)
        assert_same(specjax.load_orbax(tmp_path / "run", step=step).params, model.params)


def test_bfloat16_and_a_tied_head(tmp_path):
    model = tiny_gpt2(0)
    halved = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), model.params)
    specjax.save_orbax(tmp_path, dataclasses.replace(model, params=halved))
    assert_same(specjax.load_orbax(tmp_path).params, halved)


@pytest.mark.parametrize("num_devices", [None, 2])
def test_weights_of_several_dtypes_keep_them(num_devices, tmp_path):
    model = tiny_llama(0, num_layers=2)
    first, second = model.params["layers"]
    layers = (first | {"input_norm": first["input_norm"].astype(jnp.bfloat16)}, second)
    params = {**model.params, "layers": layers, "norm": model.params["norm"].astype(jnp.float16)}
    specjax.save_orbax(tmp_path, dataclasses.replace(model, params=params))
    mesh = None if num_devices is None else mesh_of(num_devices)
    assert_same(specjax.load_orbax(tmp_path, mesh=mesh).params, params)
    assert_same(specjax.load_orbax(tmp_path, dtype="bf16").params, params, jnp.bfloat16)


def test_a_trainers_tree_under_our_names(tmp_path):
    model = tiny_llama(0)
    as_lists = {**model.params, "layers": list(model.params["layers"])}
    specjax.save_orbax(tmp_path, dataclasses.replace(model, params={"params": as_lists}))
    assert_same(specjax.load_orbax(tmp_path).params, model.params)


# Drafters


def test_a_draft_model(tmp_path):
    target = specjax.load_model("demo")
    drafter = specjax.load_drafter(
        "demo",
        target,
        specjax.SpeculationConfig(speculative_token_tree=((0,), (1,), (0, 0))),
    )
    specjax.save_orbax(tmp_path, drafter)
    loaded = specjax.load_orbax(tmp_path, target=target)
    assert loaded.spec == drafter.spec
    assert loaded.name == drafter.name
    assert_same(loaded.params, drafter.params)
    on_mesh = specjax.load_orbax(tmp_path, mesh=mesh_of(2), dtype="bfloat16")
    assert_same(on_mesh.params, drafter.params, jnp.bfloat16)
    assert all(leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(on_mesh.params))
    with pytest.raises(ValueError, match="vocabulary"):
        specjax.load_orbax(tmp_path, target=tiny_llama(0))
    with pytest.raises(ValueError, match=r"config= is for a model, and .* holds a drafter"):
        specjax.load_orbax(tmp_path, config=target.config)


def test_a_draft_model_of_another_vocabulary(tmp_path):
    from specjax.drafters.spec import ModelDrafter
    from specjax.drafters.token_set import TokenSet

    model = tiny_llama(0)
    said = TokenSet.of(np.arange(61) % 3 == 0)
    drafter = specjax.LoadedDrafter("part", ModelDrafter(model.config, said=said), model.params)
    specjax.save_orbax(tmp_path, drafter)
    assert specjax.load_orbax(tmp_path).spec == drafter.spec


@pytest.mark.parametrize("name", ["ngram", "history"])
def test_a_drafter_without_weights(name, tmp_path):
    target = tiny_llama(0)
    drafter = specjax.load_drafter(name, target)
    specjax.save_orbax(tmp_path, drafter)
    assert specjax.load_orbax(tmp_path, target=target) == drafter


# Where models are named


def test_a_target_by_the_name_of_a_folder(saved, model, tmp_path):
    assert_same(load_target(str(saved)).params, model.params)
    assert config_of(saved) == model.config
    assert config_of("demo") == specjax.load_model("demo").config
    with pytest.raises(FileNotFoundError, match=r"but an Orbax checkpoint; .* specjax.load_orbax"):
        specjax.load_model(saved)
    specjax.save_orbax(tmp_path, specjax.load_drafter("ngram", model))
    with pytest.raises(ValueError, match=r"holds the drafter 'ngram'; name a model"):
        load_target(tmp_path)
    with pytest.raises(ValueError, match=r"config is None, expected a ModelConfig"):
        config_of(tmp_path)


# Saves that are killed

# Saves a checkpoint, begins another, and is killed when `when` is reached in it.
KILLED = textwrap.dedent(
    """
    import os, signal, sys
    sys.path.insert(0, sys.argv[1])
    from helpers import tiny_llama
    import specjax
    from specjax.checkpoints import saving

    folder, when = sys.argv[2:]
    specjax.save_orbax(folder, tiny_llama(0))

    def killed(*args, **kwargs):
        os.kill(os.getpid(), signal.SIGKILL)

    if when == "files":
        saving.FilesHandler.save = killed
    else:
        import orbax.checkpoint as ocp
        from orbax.checkpoint._src.path import atomicity
        atomicity.AtomicRenameTemporaryPath.finalize = killed
    specjax.save_orbax(folder, tiny_llama(1))
    """
)


@pytest.mark.full
@pytest.mark.parametrize("when", quick(["files", "rename"], "files"))
def test_a_killed_save_leaves_the_last_one(when, tmp_path):
    tests = os.path.dirname(sys.modules["helpers"].__file__)
    command = [sys.executable, "-c", KILLED, tests, str(tmp_path), when]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == -signal.SIGKILL, done.stderr[-2000:]
    left = sorted(os.listdir(tmp_path))
    assert len(left) == 2, left
    assert left[0] == "0"
    assert left[1].startswith("1.orbax-checkpoint-tmp")
    assert_same(specjax.load_orbax(tmp_path).params, tiny_llama(0).params)
    with pytest.raises(ValueError, match="is a save that did not end"):
        specjax.load_orbax(tmp_path / left[1])
    # The next save takes the number, and away what was left.
    specjax.save_orbax(tmp_path, tiny_llama(2))
    assert sorted(os.listdir(tmp_path)) == ["0", "1"]
    assert_same(specjax.load_orbax(tmp_path).params, tiny_llama(2).params)


def test_what_other_versions_of_orbax_leave(tmp_path, tmp_path_factory):
    """They put a time at the end of the name; the tree in it may be whole."""
    specjax.save_orbax(tmp_path, tiny_llama(0))
    other = specjax.save_orbax(tmp_path_factory.mktemp("other"), tiny_llama(3)).path
    shutil.copytree(other, tmp_path / "7.orbax-checkpoint-tmp-1700000000")
    assert_same(specjax.load_orbax(tmp_path).params, tiny_llama(0).params)


# What does not fit


def described(folder):
    return next(folder.glob("*/specjax/checkpoint.json"))


def change(folder, **keys):
    path = described(folder)
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))


@pytest.fixture
def own(tmp_path):
    specjax.save_orbax(tmp_path / "own", tiny_llama(0))
    return tmp_path / "own"


def test_another_config_is_refused(own):
    config = dataclasses.replace(tiny_llama(0).config, norm_eps=1e-5, qkv_bias=True)
    message = (
        "the config that was given is not the one that .* was saved with: "
        "norm_eps=1e-05 for 1e-06, qkv_bias=True for False. Leave config out"
    )
    with pytest.raises(ValueError, match=message):
        specjax.load_orbax(own, config=config)
    assert specjax.load_orbax(own, config=tiny_llama(0).config).config == tiny_llama(0).config


def test_arguments_for_trainers_checkpoints_are_refused(own):
    for keys in ({"layout": "nnx"}, {"root": "params"}):
        with pytest.raises(
            ValueError, match="was written by save_orbax, whose layout is 'specjax'"
        ):
            specjax.load_orbax(own, **keys)
    with pytest.raises(ValueError, match=r"target= is for a drafter, and .* holds a model"):
        specjax.load_orbax(own, target=tiny_llama(0))


@pytest.mark.parametrize(
    "keys, message",
    [
        ({"format": "x"}, "does not say format 'specjax'"),
        ({"format_version": "1"}, "does not say format 'specjax'"),
        ({"format_version": 2, "specjax_version": "9.9"}, "format_version=2 .* of specjax '9.9'"),
        ({"kind": "adapter"}, "kind='adapter'"),
        ({"config": None}, "config is None, expected a ModelConfig"),
        ({"config": {"class": "a.Foreign"}}, "config: it names the class 'a.Foreign'"),
        ({"config": {"class": "RopeConfig"}}, "config is RopeConfig.*, expected a ModelConfig"),
        ({"config": {"class": "ModelConfig", "new": 1}}, "gives ModelConfig the fields new"),
        ({"config": {"class": "ModelConfig"}}, "ModelConfig refuses its values .*vocab_size"),
    ],
)
def test_a_description_that_does_not_fit(own, keys, message):
    change(own, **keys)
    with pytest.raises(ValueError, match=message):
        specjax.load_orbax(own)


@pytest.mark.parametrize("size", [10**9, -1, "2", True, None, 2.0])
def test_sizes_that_no_model_has(own, size):
    config = json.loads(described(own).read_text())["config"]
    change(own, config=config | {"num_layers": size})
    with pytest.raises(ValueError, match=r"num_layers=.* must be a whole number of at most 4096"):
        specjax.load_orbax(own)


def test_sampling_defaults_that_mean_nothing(own):
    change(own, generation_defaults={"temperature": -1.0})
    with pytest.raises(ValueError, match=r"temperature"):
        specjax.load_orbax(own)


def test_folders_that_tensorstore_opens():
    assert store_of(epath.Path("gs://bucket/run")) == "gs://bucket/run/"
    assert store_of(epath.Path("/a/b"), "c/") == {"driver": "file", "path": "/a/b/c/"}


@pytest.mark.parametrize("name", ["a b", "50%20", "x#y?z", "\u4f60"])
def test_odd_names_of_folders(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    specjax.save_orbax(f"~/{name}", tiny_llama(0))
    for path in (f"~/{name}", name, tmp_path / name):
        assert_same(specjax.load_orbax(path).params, tiny_llama(0).params)


def test_a_config_of_other_weights_is_refused(own):
    config = json.loads(described(own).read_text())["config"]
    change(own, config=config | {"num_layers": 3})
    with pytest.raises(ValueError, match=r"layers.2.down_proj \(32, 48\) +-"):
        specjax.load_orbax(own)


@pytest.mark.parametrize("name", ["_METADATA", "manifest.ocdbt", "d", "ocdbt.process_0"])
def test_half_a_checkpoint_is_refused(own, name):
    for path in own.glob(f"0/params/{name}"):
        subprocess.run(["rm", "-r", str(path)], check=True)
    with pytest.raises(ValueError, match=r"(?s)opy it again, or load another step"):
        specjax.load_orbax(own)


def test_what_cannot_be_saved(tmp_path):
    model = tiny_llama(0)
    with pytest.raises(TypeError, match="neither a Model nor what load_drafter returned"):
        specjax.save_orbax(tmp_path, model.params)
    short = {name: leaf for name, leaf in model.params.items() if name != "norm"}
    with pytest.raises(ValueError, match=r"norm \(32,\)"):
        specjax.save_orbax(tmp_path, dataclasses.replace(model, params=short))
    for keys in ({"step": -1}, {"keep": 0}, {"step": 1.5}):
        with pytest.raises(ValueError, match="must be a whole number of at least"):
            specjax.save_orbax(tmp_path, model, **keys)
    with pytest.raises(ValueError, match="cannot be saved"):
        records.to_json((1, object()))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "value",
    [
        None,
        (1, 2.5, float("inf"), (True, "x", ())),
        tiny_llama(0).config,
        dataclasses.replace(tiny_gpt2(0).config, layer_windows=(None, 4)),
        b"\x00\xff",
    ],
)
def test_records_keep_values(value):
    assert records.from_json(json.loads(json.dumps(records.to_json(value)))) == value
