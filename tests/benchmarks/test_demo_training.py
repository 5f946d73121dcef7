"""The recipe of the embedded pair, on shapes small enough to run in seconds."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

import specjax
from benchmarks.demo import checkpoint_files, corpus, evaluate, learning
from benchmarks.demo.continuing import continue_prompts
from benchmarks.demo.pair import DRAFT, TARGET
from specjax.demo.corpus import is_held_out
from specjax.models import llama
from specjax.models.dense import sequence_logits
from specjax.training import optimizers

pytestmark = pytest.mark.full  # of benchmarks/, which nobody installs

TINY = dataclasses.replace(
    DRAFT,
    vocab_size=64,
    hidden_size=16,
    intermediate_size=24,
    num_layers=1,
    head_dim=8,
)
all_logits = jax.jit(sequence_logits, static_argnums=1)


def tiny_windows(rows=2, length=12):
    return jax.random.randint(jax.random.key(7), (rows, length), 0, TINY.vocab_size)


def test_split_is_deterministic_and_disjoint():
    files = corpus.source_files()
    held_out = {file.path for file in files if file.is_held_out}
    training = {file.path for file in files if not file.is_held_out}
    assert files == sorted(files)
    assert not held_out & training
    assert 0.01 < len(held_out) / len(files) < 0.06
    assert is_held_out("turtle.py")  # fixed by the path, on any machine
    assert not is_held_out("textwrap.py")


def test_nothing_of_this_machine_is_read():
    paths = [file.path for file in corpus.source_files()]
    assert not [path for path in paths if "_sysconfigdata" in path]
    assert not [path for path in paths if "site-packages" in path]


def test_windows_visit_everything_once_per_epoch():
    token_ids = np.arange(103, dtype=np.int32)
    batches = [corpus.windows(token_ids, step, rows=3, length=8) for step in range(4)]
    starts = np.concatenate(batches)[:, 0]
    assert len(set(starts)) == 12
    assert batches[0].shape == (3, 9)
    np.testing.assert_array_equal(batches[1], corpus.windows(token_ids, 1, 3, 8))


@pytest.mark.full
def test_step_reduces_loss_on_a_repeated_batch():
    params = llama.init(jax.random.key(0), TINY)
    optimiser = optimizers.muon(0.02, 40, 2, 20, frozenset([TINY.vocab_size]), 0.05)
    opt_state = optimiser.init(params)
    loss = lambda params, batch: learning.text_loss(params, TINY, batch)
    losses = []
    for _ in range(40):
        params, opt_state, value = learning.update(
            loss, optimiser, params, opt_state, tiny_windows()
        )
        losses.append(float(value))
    assert losses[0] == pytest.approx(np.log(TINY.vocab_size), abs=0.1)
    assert losses[-1] < 0.7 * losses[0]


@pytest.mark.full
def test_distillation_is_least_at_the_target_itself():
    target = llama.init(jax.random.key(0), TINY, std=0.3)
    other = llama.init(jax.random.key(1), TINY, std=0.3)
    loss = lambda draft: learning.distillation_loss(
        draft, TINY, target, TINY, tiny_windows(), likeliest_weight=0.0
    )
    loss_and_gradient = jax.jit(jax.value_and_grad(loss))
    least, gradient = loss_and_gradient(target)
    assert least < loss_and_gradient(other)[0]
    assert max(jnp.abs(leaf).max() for leaf in jax.tree.leaves(gradient)) < 1e-5


@pytest.mark.full
def test_cached_generation_follows_the_dense_logits():
    params = llama.init(jax.random.key(0), TINY, std=0.3)
    token_ids = continue_prompts(params, TINY, tiny_windows(), 6, jnp.zeros(2), jax.random.key(0))
    dense = jnp.argmax(all_logits(params, TINY, token_ids), axis=-1)
    np.testing.assert_array_equal(token_ids[:, 12:], dense[:, 11:-1])


# One means kept. A step takes what is kept of its k drafts, then one token more.
@pytest.mark.parametrize(
    "k, kept, expected",
    [
        (1, [1, 1, 0, 1, 0], 1 + (1 + 0 + 1) / 3),
        (2, [1, 0, 1, 0, 0, 1, 1], 1 + (1 + 1 + 0) / 3),
        (3, [1, 1, 1, 0, 1, 0, 1, 1], 1 + (3 + 1) / 2),
    ],
)
def test_mean_acceptance_length_by_hand(k, kept, expected):
    row = np.asarray([kept], float)
    length = evaluate.mean_acceptance_length(row, k, np.random.default_rng(0))
    assert length == pytest.approx(expected)


def test_safetensors_round_trip(tmp_path):
    params = llama.init(jax.random.key(0), TINY)
    path = tmp_path / "model.safetensors"
    tensors = checkpoint_files.to_tensors(params)
    checkpoint_files.write_safetensors(path, tensors)
    again = checkpoint_files.read_safetensors(path)
    assert list(again) == list(tensors)
    for name, array in tensors.items():
        np.testing.assert_array_equal(again[name], array)
    assert again["model.layers.0.mlp.down_proj.weight"].shape == (16, 24)
    restored = checkpoint_files.from_tensors(again, TINY.num_layers)
    for leaf, original in zip(jax.tree.leaves(restored), jax.tree.leaves(params), strict=True):
        np.testing.assert_array_equal(leaf, original.astype(jnp.bfloat16).astype(jnp.float32))


def test_a_model_in_int8_is_as_save_pretrained_writes_it(tmp_path):
    """From float32, rounded once; vectors in bfloat16."""
    params = llama.init(jax.random.key(0), TINY)
    tokenizer = Tokenizer(WordLevel({"a": 0}, unk_token="a"))
    checkpoint_files.save_model(tmp_path / "a", params, TINY, tokenizer, stored="int8")
    loaded = specjax.load_model(tmp_path / "a")
    assert loaded.config.num_layers == TINY.num_layers
    specjax.save_pretrained(specjax.Model(TINY, params), tmp_path / "b", stored="int8")
    in_bfloat16 = lambda leaf: leaf.astype(jnp.bfloat16).astype(jnp.float32)
    expected = jax.tree.map(
        lambda leaf: leaf if leaf.ndim > 1 else in_bfloat16(leaf),
        specjax.load_model(tmp_path / "b").params,
    )
    for leaf, other in zip(jax.tree.leaves(loaded.params), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(leaf, other)
    tensors = checkpoint_files.read_safetensors(tmp_path / "a" / "model.safetensors")
    restored = checkpoint_files.from_tensors(tensors, TINY.num_layers)
    jax.tree.map(np.testing.assert_array_equal, restored, loaded.params)


def test_header_is_what_the_format_says(tmp_path):
    path = tmp_path / "one.safetensors"
    checkpoint_files.write_safetensors(path, {"x": np.ones((2, 3), np.float32)})
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    assert header["x"] == {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}
    assert len(data) == 8 + length + 24


def test_shapes_of_the_pair():
    assert TARGET.vocab_size == DRAFT.vocab_size
    assert DRAFT.num_layers <= 2
