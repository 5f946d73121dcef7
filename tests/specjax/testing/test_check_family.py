"""Families through the check for families, and families with a mistake that it must see."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import made_up_families
import numpy as np
import pytest
from asked_for import quick
from helpers import random_model, tiny_gpt2_config, tiny_llama_config
from made_up_families import HERON, STILT_JSON, heron_config, stilt

from specjax.models import blocks, register
from specjax.models.base import Model
from specjax.models.loading import load_model
from specjax.models.weights import Source
from specjax.testing import check_family, family_checks, save_model

HERON_CONFIG = heron_config(vocab_size=62, layer_windows=(9, None))
BIASES = {"qkv_bias": True, "o_bias": True, "mlp_bias": True}
FAMILIES = {
    "heron": (HERON_CONFIG, HERON),
    "stilt": (STILT_JSON | {"vocab_size": 62, "sliding_window": 9}, stilt.FAMILY),
    "llama": (tiny_llama_config(vocab_size=62, **BIASES, layer_windows=(9, 9)), None),
    "qwen3": (
        tiny_llama_config(vocab_size=62, family="qwen3", qk_norm=True, layer_windows=(None, 9)),
        None,
    ),
    "gpt2": (tiny_gpt2_config(vocab_size=62, **BIASES), None),
}


@pytest.mark.parametrize("name", quick(FAMILIES, slow=["stilt", "llama", "qwen3", "gpt2"]))
def test_a_right_family_holds(name):
    check_family(*FAMILIES[name])


def wrong(name, **functions):
    """Registers Heron under another name with some functions changed; returns its config."""
    register(dataclasses.replace(HERON, name=name, model_types={}, **functions))
    return dataclasses.replace(HERON_CONFIG, architecture=name)


def changed_leaf(function, key, change):
    """Returns axes or sources of Heron with one leaf of its second layer changed."""

    def run(config, *names):
        tree = function(config, *names)
        first, second = tree["layers"]
        return tree | {"layers": (first, change(second, key))}

    return run


def without(layer, key):
    return {name: leaf for name, leaf in layer.items() if name != key}


@pytest.mark.full
def test_swapped_axes_are_seen():
    swap = lambda layer, key: layer | {key: layer[key][::-1]}
    config = wrong("swapped axes", axes=changed_leaf(HERON.axes, "o_proj", swap))
    with pytest.raises(AssertionError, match=r"'swapped axes': logits over 2 shards .* raises"):
        check_family(config)


WRONG_TREES = {
    "axes short of one": (
        {"axes": changed_leaf(HERON.axes, "sinks", without)},
        "axes: layers.1.sinks of init are missing",
    ),
    "axes of another rank": (
        {"axes": changed_leaf(HERON.axes, "k_proj", lambda of, key: of | {key: ("kv_heads",)})},
        r"axes: layers.1.k_proj has the axes \('kv_heads',\), .* shape \[16, 32\]",
    ),
    "an axis without a rule": (
        {"axes": changed_leaf(HERON.axes, "sinks", lambda of, key: of | {key: ("head",)})},
        r"axes: layers.1.sinks .* \['head'\] have no rule",
    ),
    "sources with one more": (
        {"sources": changed_leaf(HERON.sources, "q", lambda of, key: of | {key: of["sinks"]})},
        "sources: layers.1.q are not in init",
    ),
    "one tensor for two weights": (
        {
            "sources": changed_leaf(
                HERON.sources, "v_proj", lambda of, key: of | {key: of["k_proj"]}
            )
        },
        r"sources raises ValueError: blocks.1.k.weight is the source of two weights",
    ),
    "a source of another shape": (
        {
            "sources": changed_leaf(
                HERON.sources, "sinks", lambda of, key: of | {key: Source("sinks", (5,))}
            )
        },
        r"sources raises ValueError: sinks is read as \[5\] and written as \[4\]",
    ),
}


@pytest.mark.parametrize("name", WRONG_TREES)
def test_trees_that_differ_are_seen(name):
    functions, message = WRONG_TREES[name]
    with pytest.raises(AssertionError, match=f"family '{name}': {message}"):
        check_family(wrong(name, **functions))


def raising(*arguments):
    raise RuntimeError("broken")


def work_with(**fields):
    return lambda config, count: HERON.work(config, count)._replace(**fields)


def test_a_config_json_that_says_another_config_is_seen():
    raw = lambda config: STILT_JSON | {"vocab_size": config.vocab_size, "hidden_size": 16}
    family = dataclasses.replace(stilt.FAMILY, name="misquoted", model_types={}, unparse=raw)
    register(family)
    read = stilt.FAMILY.parse(STILT_JSON | {"vocab_size": 62})
    config = dataclasses.replace(read, architecture="misquoted")
    with pytest.raises(AssertionError, match=r"unparse: .* another config .* hidden_size=16 for"):
        check_family(config)


WRONG_WORK = {
    "work that raises": (raising, "RuntimeError: broken"),
    "work of another kind": (lambda config, count: (count, count, 1), "returns a tuple"),
    "work that reads nothing": (work_with(weights_read=0), "weights_read=0; expected from 1 to"),
    "work that reads more than there is": (
        lambda config, count: HERON.work(config, 2 * count),
        r"weights_read=\d+; expected from 1 to \d+, the numbers",
    ),
    "work without products": (work_with(token_products=0), "token_products=0 must be above 0"),
    "work with a window too few": (
        work_with(layer_windows=(9,)),
        r"layer_windows=\(9,\); expected those of config, \(9, None\)",
    ),
}


@pytest.mark.parametrize("name", WRONG_WORK)
def test_work_that_cannot_be_is_seen(name):
    function, message = WRONG_WORK[name]
    with pytest.raises(AssertionError, match=f"family '{name}': work.* {message}"):
        check_family(wrong(name, work=function))


WRONG_EMBED = {
    "embed that raises": (raising, "RuntimeError: broken"),
    "embed of another shape": (
        lambda *arguments: HERON.embed(*arguments)[..., :-1],
        r"returns float32\[2, 24, 31\]; expected float32\[2, 24, 32\]",
    ),
    "embed in half": (
        lambda *arguments: HERON.embed(*arguments).astype(jnp.bfloat16),
        r"returns bfloat16\[2, 24, 32\]",
    ),
    "embed of another scale": (lambda *arguments: 2 * HERON.embed(*arguments), "off tap 0"),
    "embed with one more": (lambda *arguments: 1 + HERON.embed(*arguments), "off tap 0"),
}


@pytest.mark.full
@pytest.mark.parametrize("name", WRONG_EMBED)
def test_an_embed_that_is_not_what_layers_get_is_seen(name, monkeypatch):
    function, message = WRONG_EMBED[name]
    # Changing every weight is another test's.
    monkeypatch.setattr(family_checks._Check, "layer_of_each_leaf", lambda self: {})
    with pytest.raises(AssertionError, match=f"family '{name}': embed.* {message}"):
        check_family(wrong(name, embed=function))


@pytest.mark.full
def test_a_norm_of_each_shard_alone_is_seen(monkeypatch):
    right = made_up_families.norm_across_heads
    alone = lambda *arguments, tensor_axis=None, **options: right(*arguments, **options)
    monkeypatch.setattr(made_up_families, "norm_across_heads", alone)
    with pytest.raises(
        AssertionError, match=r"logits over 2 shards of a tensor axis: they are .* off"
    ):
        check_family(HERON_CONFIG)


def test_a_forgotten_tap_is_seen(monkeypatch):
    see = blocks.Taps.see
    monkeypatch.setattr(blocks.Taps, "see", lambda self, layer, x: layer or see(self, layer, x))
    with pytest.raises(AssertionError, match="forward with taps raises KeyError: 1"):
        check_family(HERON_CONFIG)


def test_a_tap_that_comes_too_late_is_seen(monkeypatch):
    """It is the output of layer 0, which its attention and its experts have changed."""

    class Late(blocks.Taps):
        def see(self, layer, x):
            if layer == 1:
                super().see(0, x)
            super().see(layer, x)

    monkeypatch.setattr(blocks, "Taps", Late)
    with pytest.raises(
        AssertionError, match=r"tap 0, .* depends on layers.0.\w+, a weight of layer 0"
    ):
        check_family(HERON_CONFIG)


@pytest.mark.full
def test_statistics_over_the_batch_are_seen():
    def forward(params, config, token_ids, *arguments, **options):
        mean = jnp.mean(params["embed_tokens"][token_ids], axis=range(token_ids.ndim))
        params = params | {"norm": params["norm"] - mean}
        return HERON.forward(params, config, token_ids, *arguments, **options)

    with pytest.raises(AssertionError, match=r"logits over pages: they are .* off those of whole"):
        check_family(wrong("statistics", forward=forward))


@pytest.mark.full
def test_text_that_drafts_change_is_seen():
    def forward(params, config, token_ids, *arguments, **options):
        verifies = token_ids.shape == ((family_checks.K + 1) * len(family_checks.PROMPT_LENGTHS),)
        if verifies:
            params = params | {"norm": -params["norm"]}
        return HERON.forward(params, config, token_ids, *arguments, **options)

    with pytest.raises(AssertionError, match=r"generate: plain decoding says .* with drafts"):
        check_family(wrong("drafts", forward=forward))


def test_one_device_says_what_to_set(monkeypatch):
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    # What would be compiled after it is another test's.
    monkeypatch.setattr(family_checks._Check, "check_pages", lambda self: None)
    monkeypatch.setattr(family_checks._Check, "check_drafted", lambda self: None)
    with pytest.warns(UserWarning, match="XLA_FLAGS=--xla_force_host_platform_device_count=2"):
        check_family(HERON_CONFIG)


@pytest.mark.parametrize(
    "config, message",
    [
        (heron_config(), "vocab_size=61 must be even"),
        (heron_config(vocab_size=62, num_kv_heads=1), "num_kv_heads=1 must be even"),
        (HERON_CONFIG.first_layers(1), "num_layers=1 must be at least 2"),
        (dataclasses.replace(HERON_CONFIG, max_position_embeddings=31), "must be at least 32"),
        (tiny_llama_config(), "config.architecture='llama' is not the family 'heron'"),
    ],
)
def test_configs_that_cannot_be_checked(config, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        check_family(config, HERON)


def test_a_saved_model_is_loaded(tmp_path):
    model = random_model(heron_config(), 0)
    save_model(tmp_path / "new", model, {"model_type": "heron"})
    loaded = load_model(tmp_path / "new", dtype="float32")
    assert loaded.config == model.config
    jax.tree.map(np.testing.assert_array_equal, loaded.params, model.params)
    half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), model.params)
    save_model(tmp_path, dataclasses.replace(model, params=half), {"model_type": "heron"})
    loaded = load_model(tmp_path, dtype="bfloat16")
    jax.tree.map(np.testing.assert_array_equal, loaded.params, half)


@dataclasses.dataclass(frozen=True)
class Doubled:
    """A source of a class of its own."""

    source: Source

    def tensors(self):
        return self.source.tensors()

    def read(self, tensors, dtype):
        return 2 * self.source.read(tensors, dtype)


def test_sources_of_other_classes(tmp_path, monkeypatch):
    double = lambda layer, key: layer | {key: Doubled(layer[key])}
    config = wrong("doubled", sources=changed_leaf(HERON.sources, "sinks", double))
    with pytest.raises(NotImplementedError, match="a source of class Doubled is not written"):
        save_model(tmp_path, Model(config, random_model(config, 0).params), {})
    for check in ("check_taps", "check_embed", "check_shards", "check_pages", "check_drafted"):
        monkeypatch.setattr(family_checks._Check, check, lambda self: None)
    check_family(config)
    short = functools.partial(Source, "sinks")
    config = wrong(
        "doubled and short",
        sources=changed_leaf(
            HERON.sources, "sinks", lambda of, key: of | {key: Doubled(short((5,)))}
        ),
    )
    with pytest.raises(AssertionError, match=r"layers.1.sinks is read as \[5\].* shape \[4\]"):
        check_family(config)
