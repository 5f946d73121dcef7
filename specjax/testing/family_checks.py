"""Checks a family of models of a program's own, and writes folders to load.

Most mistakes of a family raise where it is first run. Those that only change numbers are found by
comparing: one device with two, a forward over pages with one over whole sequences, a text that
was drafted with one that was not.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, PartitionSpec

from specjax.api.generation import generate
from specjax.config.engine import EngineConfig
from specjax.config.sampling import SamplingParams
from specjax.models import sharding
from specjax.models.abstract import abstract_weights
from specjax.models.base import (
    Family,
    ForwardWork,
    Json,
    LayerCache,
    Model,
    ModelConfig,
    Params,
    before_final_norm,
)
from specjax.models.families import family_of, register
from specjax.models.hf_config import parse_config
from specjax.models.layers import dense_causal_attention
from specjax.models.loading import load_params
from specjax.models.weight_writing import SINGLE, of_array, tensors_of, write_file
from specjax.models.weights import Source, Stacked
from specjax.paged import forward as paged
from specjax.paged import kv_cache
from specjax.runtime.progress import Progress

NUM_SHARDS = 2
ROWS, LENGTH, PAGE_SIZE = 2, 24, 8  # of the text that the forwards are compared on
FIRST_TOKENS, NEXT_TOKENS = 16, (5, 3)  # fed at once, then for each row
NUM_PADDING = 4
K = 2
PROMPT_LENGTHS, MAX_TOKENS, MAX_CONTEXT = (13, 3), 8, 32
# Sums in another order differ by rounding; a wrong scale, norm or window by far more.
RTOL, ATOL = 1e-3, 1e-3
STD = 0.2  # of norms and biases, so that none of them can be forgotten unseen
ONE_DEVICE = (
    "there is one device, so a mesh is not checked. On a CPU set "
    f"XLA_FLAGS=--xla_force_host_platform_device_count={NUM_SHARDS} before jax starts."
)


def check_family(config: ModelConfig | Mapping[str, Any], family: Family | None = None) -> None:
    """Checks a family of models with random weights of one small config.

    - `axes` and `sources` are trees like the weights of `init`; every leaf has as many axes as
      dimensions, of names that `specjax.models.sharding.RULES` has.
    - A folder that holds the tensors of `sources` is read as the weights that were written.
    - Tap i is the input of layer i: it depends on the weights of all layers before i and of no
      other. The last tap is the hidden state that `forward` returns.
    - `embed` returns what tokens add to tap 0 wherever they stand.
    - `parse` reads the config from what `unparse` writes, if the family has one.
    - `work` reads some of the weights and no more than there are, multiplies by some, and has the
      windows of config.
    - Logits over two shards of a tensor axis equal those of one device. That takes two devices;
      with one, a warning says what to set.
    - Logits over pages, fed in two parts with padding, equal those of whole sequences.
    - Text that was drafted (K = 2, the draft model is the target) equals plain decoding at
      temperature 0, and drafts are accepted.

    It does not compare with the code that the family was published with: docs/adding-a-model.md
    says how to.

    Args:
      config: a small config of the family, or the contents of its config.json: at least two
        layers; vocab_size, num_heads, num_kv_heads and intermediate_size even;
        max_position_embeddings at least 32. Windows are seen if they are shorter than 16 tokens.
        Some eight functions are compiled for it.
      family: registered here if it is not yet; None: the registered family of config.

    Raises:
      AssertionError: it says which of these does not hold.
      ValueError: config is of another family or has other sizes than these, or the family cannot
        be registered.
    """
    if family is not None:
        register(family)
    if not isinstance(config, ModelConfig):
        config = parse_config(dict(config))
    if family is not None and config.architecture != family.name:
        raise ValueError(
            f"config.architecture={config.architecture!r} is not the family {family.name!r}; give "
            "a config that its parse returns."
        )
    _check_sizes(config)
    with contextlib.closing(Progress()) as progress:
        progress.report("checking the family", 0, 0)
        _Check(config).run()


def save_model(folder: str | os.PathLike[str], model: Model, raw: Json) -> None:
    """Writes a folder that `specjax.load_model` reads a model from.

    Args:
      folder: where config.json and model.safetensors are written; it is made if it is absent.
      model: float32 or bfloat16 weights of a family whose sources are `Source` and `Stacked`.
      raw: the contents of config.json.

    Raises:
      ValueError: two weights are read from the same numbers of a tensor, or a weight and its
        source differ in shape.
      NotImplementedError: a source of another class.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    sources = family_of(model.config).sources(model.config, ())
    write_file(folder / SINGLE, tensors_of(sources, model.params))
    (folder / "config.json").write_text(json.dumps(raw), encoding="utf-8")


def _check_sizes(config: ModelConfig) -> None:
    for field in ("vocab_size", "num_heads", "num_kv_heads", "intermediate_size"):
        value = getattr(config, field)
        if value % NUM_SHARDS:
            raise ValueError(f"{field}={value} must be even, to be split over two shards.")
    if config.num_layers < 2:
        raise ValueError(f"num_layers={config.num_layers} must be at least 2, to compare taps.")
    if config.max_position_embeddings < MAX_CONTEXT:
        raise ValueError(
            f"max_position_embeddings={config.max_position_embeddings} must be at least "
            f"{MAX_CONTEXT}, the context of the texts that are compared."
        )


class _Check:
    def __init__(self, config: ModelConfig):
        self.config = config
        self.family = family_of(config)
        self.rng = np.random.default_rng(0)

    def run(self) -> None:
        with self.naming("init"):
            self.shapes = abstract_weights(self.config, jnp.float32)
        self.check_structure()
        self.check_unparse()
        self.check_work()
        self.params = self.random_params()
        self.check_folder()
        self.token_ids = self.random_tokens(ROWS, LENGTH)
        with jax.default_matmul_precision("highest"):
            self.check_taps()
            self.check_embed()
            self.check_shards()
            self.check_pages()
        self.check_drafted()

    @contextlib.contextmanager
    def naming(self, what: str) -> Iterator[None]:
        """Context in which any error is an AssertionError that says where it arose."""
        try:
            yield
        except AssertionError as error:
            raise AssertionError(f"family {self.family.name!r}: {what}: {error}") from error
        except Exception as error:
            raise AssertionError(
                f"family {self.family.name!r}: {what} raises {type(error).__name__}: {error}"
            ) from error

    def check_unparse(self) -> None:
        """A config.json that the family writes is read as the config."""
        if self.family.unparse is None:
            return
        with self.naming("unparse"):
            raw = self.family.unparse(self.config) | {"model_type": self.config.family}
            read = self.family.parse(raw)
            said = vars(self.config)
            differ = [
                f"{name}={value!r:.99} for {said[name]!r:.99}"
                for name, value in vars(read).items()
                if value != said[name]
            ]
            assert not differ, (
                f"parse reads another config from it, {', '.join(differ)}; if no config.json can "
                "say these, check a config that one can."
            )

    # Trees

    def check_structure(self) -> None:
        """Axes and sources stand where init has weights."""
        expected = _by_place(self.shapes)
        with self.naming("axes"):
            is_axes = lambda x: isinstance(x, tuple) and not any(isinstance(y, dict) for y in x)
            axes = self.family.axes(self.config)
            _check_tree(axes, self.shapes, is_leaf=is_axes)
            for place, names in _by_place(axes, is_axes).items():
                shape = expected[place].shape
                assert len(names) == len(shape), (
                    f"{place} has the axes {names}, and init gives it the shape {list(shape)}; "
                    "name one axis per dimension."
                )
                unknown = [name for name in names if name not in sharding.RULES]
                assert not unknown, (
                    f"{place} has the axes {names}, of which {unknown} have no rule; expected "
                    f"names among {[*sharding.RULES]}."
                )
        with self.naming("sources"):
            _check_tree(self.family.sources(self.config, ()), self.shapes)

    def check_work(self) -> None:
        """The counts of `work` are possible."""
        config = self.config
        count = sum(leaf.size for leaf in jax.tree.leaves(self.shapes))
        with self.naming("work"):
            work = self.family.work(config, count)
            assert isinstance(work, ForwardWork), (
                f"it returns a {type(work).__name__}; expected a ForwardWork."
            )
            assert 0 < work.weights_read <= count, (
                f"weights_read={work.weights_read}; expected from 1 to {count}, the numbers in "
                "all weights."
            )
            for field in ("token_products", "context_products"):
                value = getattr(work, field)
                assert value > 0, f"{field}={value} must be above 0."
            windows = tuple(map(config.window, range(config.num_layers)))
            assert work.layer_windows in ((), windows), (
                f"layer_windows={work.layer_windows}; expected those of config, {windows}, or ()."
            )

    def random_params(self) -> Params:
        """Returns weights around the means of init's, large enough that each of them counts."""
        given = self.family.init(jax.random.key(0), self.config, jnp.float32)

        def fill(leaf: Array) -> Array:
            std = min(STD, leaf.shape[-1] ** -0.5) if leaf.ndim > 1 else STD
            values = np.mean(leaf) + std * self.rng.standard_normal(leaf.shape)
            return jnp.asarray(values, leaf.dtype)

        return jax.tree.map(fill, given)

    def random_tokens(self, *shape: int) -> np.ndarray:
        return self.rng.integers(0, self.config.vocab_size, shape, np.int32)

    def check_folder(self) -> None:
        """What is written by sources is read by them."""
        with self.naming("sources"), tempfile.TemporaryDirectory() as folder:
            sources = self.family.sources(self.config, ())
            is_known = all(isinstance(s, Source | Stacked) for s in jax.tree.leaves(sources))
            # Only its own code can say what a source of another class makes of its tensors.
            if is_known:
                tensors = tensors_of(sources, self.params)
            else:
                drawn = self.random_tensors(sources)
                tensors = {name: of_array(name, each) for name, each in drawn.items()}
            write_file(Path(folder) / SINGLE, tensors)
            found = _by_place(load_params(folder, self.config, dtype=jnp.float32))
            for place, leaf in _by_place(self.params).items():
                assert found[place].shape == leaf.shape, (
                    f"{place} is read as {list(found[place].shape)}, and init gives it the shape "
                    f"{list(leaf.shape)}."
                )
                assert not is_known or np.array_equal(found[place], leaf), (
                    f"{place} is not read as it was written."
                )

    def random_tensors(self, sources: Any) -> dict[str, np.ndarray]:
        return {
            name: self.rng.standard_normal(shape).astype(np.float32)
            for source in jax.tree.leaves(sources)
            for name, shape in source.tensors()
        }

    # Forwards

    def forward(
        self, params: Params, token_ids: Array, axis: str | None = None, taps: Any = None
    ) -> Any:
        """Returns logits of whole sequences; with taps, logits, hidden and the taps."""

        def attend(
            layer: int, q: Array, k: Array, v: Array, cache: LayerCache, sinks: Array | None = None
        ) -> tuple[Array, LayerCache]:
            options = self.config.attention_options(layer)
            return dense_causal_attention(q, k, v, sinks=sinks, **options), cache

        positions = jnp.broadcast_to(jnp.arange(token_ids.shape[1]), token_ids.shape)
        caches = (None,) * self.config.num_layers
        hidden, _, *tapped = self.family.forward(
            params, self.config, token_ids, positions, attend, caches, axis, taps=taps
        )
        logits = self.family.logits(params, self.config, hidden, axis)
        return (logits, hidden, *tapped) if taps is not None else logits

    def check_taps(self) -> None:
        """Each weight of layer j changes tap i if i is after j, and only then."""
        last = self.config.num_layers
        # Not in order: results have the order that is asked for.
        taps = (last, *range(last), before_final_norm(last))
        with self.naming("forward with taps"):
            run = jax.jit(functools.partial(self.forward, taps=taps))
            self.logits, hidden, tapped = run(self.params, self.token_ids)
            shapes = [tap.shape for tap in tapped]
            assert shapes == [hidden.shape] * len(taps), (
                f"{len(taps)} taps are asked for, of shape {hidden.shape}; there are {shapes}."
            )
            assert np.array_equal(tapped[0], hidden), (
                f"tap {last} is not the hidden state after the final norm."
            )
            assert not np.array_equal(tapped[-1], hidden), (
                f"tap {taps[-1]} is the hidden state after the final norm; call "
                f"`see({last}, x)` before it."
            )
            self.first_input = np.asarray(tapped[1])
            leaves, tree = jax.tree.flatten(self.params)
            for index, (place, layer) in enumerate(self.layer_of_each_leaf().items()):
                if layer is None:
                    continue
                noise = STD * self.rng.standard_normal(leaves[index].shape)
                changed = [*leaves]
                changed[index] = leaves[index] + jnp.asarray(noise, leaves[index].dtype)
                _, other_hidden, others = run(jax.tree.unflatten(tree, changed), self.token_ids)
                if np.array_equal(other_hidden, hidden):
                    continue  # this weight has no effect, such as the bias of a key without rope
                for tap, ours, theirs in zip(taps, tapped, others, strict=True):
                    changes = not np.array_equal(ours, theirs)
                    assert changes == (tap > layer), (
                        f"tap {tap}, the input of layer {tap}, "
                        f"{'depends' if changes else 'does not depend'} on {place}, a weight of "
                        f"layer {layer}. Call `see(index, x)` where each layer begins."
                    )

    def check_embed(self) -> None:
        """The input of layer 0 is what tokens add, and what their positions add if they do."""
        with self.naming("embed"):
            token_ids = jnp.asarray(self.token_ids)
            found = self.family.embed(self.params, self.config, token_ids, None)
            expected = self.first_input
            assert (found.shape, found.dtype) == (expected.shape, expected.dtype), (
                f"it returns {found.dtype}{list(found.shape)}; expected "
                f"{expected.dtype}{list(expected.shape)}, as tap 0 is."
            )
            # Rows have the same positions and other tokens.
            by_position = expected[:1] - np.asarray(found)[:1]
            if np.ptp(by_position, axis=1).max() < ATOL:  # positions add nothing
                by_position = 0.0
            _check_close(found + by_position, expected, "tap 0, less what positions add")

    def layer_of_each_leaf(self) -> dict[str, int | None]:
        """Returns the layer of each weight, None for those that belong to no single layer."""
        layers: dict[str, int | None] = dict.fromkeys(_by_place(self.shapes))
        known: set[str] = set()
        for num_layers in range(self.config.num_layers + 1):
            config = self.config.first_layers(num_layers)
            places = set(_by_place(abstract_weights(config, jnp.float32)))
            if num_layers:
                layers |= dict.fromkeys(places - known, num_layers - 1)
            known = places
        return layers

    def check_shards(self) -> None:
        """Shards of heads, MLP and vocabulary give the logits of the whole."""
        if jax.device_count() < NUM_SHARDS:
            warnings.warn(f"family {self.family.name!r}: {ONE_DEVICE}", stacklevel=4)
            return
        mesh = Mesh(np.array(jax.devices()[:NUM_SHARDS]), (sharding.TENSOR,))
        with self.naming(f"logits over {NUM_SHARDS} shards of a tensor axis"):
            split = jax.shard_map(
                functools.partial(self.forward, axis=sharding.TENSOR),
                mesh=mesh,
                in_specs=(sharding.param_specs(self.params, mesh, self.config), PartitionSpec()),
                out_specs=PartitionSpec(sharding.TENSOR),  # each shard's own logits
                check_vma=False,
            )
            logits = np.asarray(jax.jit(split)(self.params, self.token_ids))
            for shard in np.split(logits, NUM_SHARDS):
                _check_close(shard, self.logits, "those of one device")

    def check_pages(self) -> None:
        """Attention over pages, in two parts, is that over whole sequences."""
        config = self.config
        num_pages = ROWS * LENGTH // PAGE_SIZE
        table = jnp.asarray(kv_cache.own_pages(ROWS, LENGTH // PAGE_SIZE))

        def batch(first: int, counts: tuple[int, ...], num_tokens: int) -> Any:
            return paged.make_batch(
                jnp.asarray(self.token_ids),
                table,
                jnp.full(ROWS, first, jnp.int32),
                jnp.array(counts, jnp.int32),
                num_tokens=num_tokens,
                page_size=PAGE_SIZE,
                num_slots=num_pages * PAGE_SIZE,
            )

        def run(params: Params) -> Array:
            pages = kv_cache.init_pages(config, num_pages, PAGE_SIZE, jnp.float32)
            prefix = batch(0, (FIRST_TOKENS,) * ROWS, ROWS * FIRST_TOKENS)
            feed = functools.partial(paged.forward, params, config)
            _, pages = feed(pages, prefix, max_tokens_per_row=FIRST_TOKENS)
            rest = batch(FIRST_TOKENS, NEXT_TOKENS, sum(NEXT_TOKENS) + NUM_PADDING)
            hidden, _ = feed(pages, rest, max_tokens_per_row=max(NEXT_TOKENS))
            return paged.logits(params, config, hidden)

        with self.naming("logits over pages"):
            logits = np.asarray(jax.jit(run)(self.params))[: sum(NEXT_TOKENS)]
            expected = [
                np.asarray(self.logits)[row, FIRST_TOKENS : FIRST_TOKENS + count]
                for row, count in enumerate(NEXT_TOKENS)
            ]
            _check_close(logits, np.concatenate(expected), "those of whole sequences")

    def check_drafted(self) -> None:
        """Drafts change no text, and a draft model that is the target is right."""
        prompts = [self.random_tokens(length).tolist() for length in PROMPT_LENGTHS]
        model = Model(self.config, self.params, name=self.family.name)
        run = functools.partial(
            generate,
            model,
            prompts,
            sampling=SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True),
            engine=EngineConfig(
                page_size=PAGE_SIZE, max_rows=len(prompts), max_context=MAX_CONTEXT
            ),
        )
        with self.naming("generate"):
            plain = run()
            drafted = run(
                drafter=model,
                speculative_config={"num_speculative_tokens": K, "policy": "fixed"},
            )
            texts = [[each.token_ids for each in result] for result in (plain, drafted)]
            assert texts[0] == texts[1], (
                f"plain decoding says {texts[0]}, and with drafts (K = {K}, the draft model is "
                f"the target) it says {texts[1]}."
            )
            length = drafted.stats.mean_acceptance_length
            assert length > (1 + K) / 2, (
                f"the mean acceptance length is {length}, and the draft model is the target; "
                f"expected about {1 + K}."
            )


def _by_place(tree: Any, is_leaf: Any = None) -> dict[str, Any]:
    """Returns the leaves by the names on the way to them, such as layers.0.q_proj."""
    paths = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)[0]
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in paths}


def _check_tree(tree: Any, shapes: Any, is_leaf: Any = None) -> None:
    """Raises AssertionError unless a tree has the structure of the weights."""
    found, expected = _by_place(tree, is_leaf), _by_place(shapes)
    missing, others = sorted({*expected} - {*found}), sorted({*found} - {*expected})
    assert not missing, f"{', '.join(missing[:10])} of init are missing."
    assert not others, f"{', '.join(others[:10])} are not in init."
    structures = jax.tree.structure(tree, is_leaf=is_leaf), jax.tree.structure(shapes)
    assert structures[0] == structures[1], (
        f"the tree is {structures[0]}, and init returns {structures[1]}."
    )


def _check_close(actual: Any, expected: Any, of_what: str) -> None:
    """Raises AssertionError unless logits are equal but for rounding."""
    off = np.max(np.abs(np.asarray(actual) - np.asarray(expected)))
    assert np.allclose(actual, expected, rtol=RTOL, atol=ATOL), (
        f"they are {off:.3g} off {of_what}; rounding is below {ATOL:g}."
    )
