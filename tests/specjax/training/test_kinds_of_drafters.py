"""What kinds begin with, what their options say, and which roots blocks are drawn after."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from asked_for import quick

from specjax.drafters.spec import ModelDrafter
from specjax.testing import tiny_model
from specjax.training import dflash, draft_model, eagle3, roots
from specjax.training.dflash_options import LearnedConfig
from specjax.training.kinds import KINDS, kind_of_spec
from specjax.training.objective import Objective, loss_of
from specjax.training.texts import Target, TextBatch, states_along

MODEL = tiny_model()
TARGET = Target(MODEL.config, MODEL.params)
VOCAB, DEPTH = MODEL.config.vocab_size, 3
SMALL = {
    "p-eagle": {"num_layers": 2},
    "dflash": {"block_size": 4, "num_layers": 2},
    "dspark": {"block_size": 4, "markov_rank": 8},
    "medusa": {"most_drafts": DEPTH},
    "mlp_speculator": {"most_drafts": DEPTH, "inner_size": 16},
}
PARTIAL = "eagle3", "p-eagle", "dflash", "dspark"


def texts(rows=2, length=16, seed=0):
    rng = np.random.default_rng(seed)
    token_ids = rng.integers(0, VOCAB, (rows, length)).astype(np.int32)
    return TextBatch(
        token_ids, np.array([length, length - 5])[:rows], np.ones((rows, length), bool)
    )


def begun(name, target_ids=None, **options):
    kind = KINDS[name]
    config = kind.configure(MODEL.config, SMALL.get(name, {}) | options)
    ids = None if target_ids is None else jnp.asarray(target_ids, jnp.int32)
    return kind, config, kind.begin(jax.random.key(0), config, TARGET, ids)


@functools.partial(jax.jit, static_argnums=(0, 1))
def sums_of(kind, config, params, text, target_params=MODEL.params):
    target = Target(MODEL.config, target_params)
    along = states_along(target, text, kind.taps(config))
    drafts = kind.propose(params, config, along, DEPTH, jax.random.key(1))
    return loss_of(Objective(), along, drafts)


@pytest.mark.parametrize("name", KINDS)
def test_what_begins_is_what_the_drafter_is_made_of(name):
    """Names, shapes and float32, none of them shared with the target or twice with each other."""
    kind, config, params = begun(name)
    spec = kind.spec(config)
    expected = spec.abstract_params(MODEL.config, jnp.float32)
    shape = lambda leaf: (leaf.shape, leaf.dtype)
    assert jax.tree.map(shape, params) == jax.tree.map(shape, expected)
    pointers = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves((params, MODEL.params))]
    assert len(set(pointers)) == len(pointers)
    found, own = kind_of_spec(spec)
    assert found.name == name
    assert own == (config.served if isinstance(config, LearnedConfig) else config)
    assert kind.most_drafts(config) is None or kind.most_drafts(config) >= DEPTH
    hash((kind, config))


@pytest.mark.full
@pytest.mark.parametrize("name", quick(PARTIAL, "dspark"))
def test_a_part_of_the_vocabulary(name):
    ids = [3, 5, 8, 13, 21]
    kind, config, params = begun(name, ids, draft_vocab_size=len(ids))
    assert params["target_ids"].tolist() == ids
    np.testing.assert_array_equal(params["lm_head"], MODEL.params["lm_head"][np.array(ids)])
    text = texts()
    value, _ = sums_of(kind, config, params, text)
    assert np.isfinite(value)
    # Only what it can say is ever accepted.
    none = text._replace(token_ids=np.full_like(text.token_ids, 4))
    some = text._replace(token_ids=np.full_like(text.token_ids, 5))
    assert np.all(np.asarray(sums_of(kind, config, params, none)[1].accepted) == 0)
    assert np.all(np.asarray(sums_of(kind, config, params, some)[1].accepted) > 0)


@pytest.mark.parametrize("has_head", [True, False])
@pytest.mark.full
def test_medusa_begins_as_the_target_itself(has_head):
    """Each head says what the target said at the token before the root."""
    kind, config, params = begun("medusa", has_head=has_head)
    text = texts()
    along = states_along(TARGET, text, kind.taps(config))
    key = jax.random.key(0)
    drafts = kind.propose(params, config, along, DEPTH, key)
    for s, read in enumerate(drafts.hidden):
        said = drafts.score(read.reshape(-1, read.shape[-1]), s).reshape(*read.shape[:2], -1)
        before = TARGET.logits(along.hidden)[:, : -1 - s]
        np.testing.assert_allclose(said[:, 1 + s :], before, atol=1e-5)


@pytest.mark.full
@pytest.mark.parametrize("name", ["eagle", "mtp"])
def test_a_head_of_pairs_begins_near_the_target_itself(name):
    """Its first draft token is about what the target said at the token before the root."""
    kind, config, params = begun(name)
    text = texts()
    along = states_along(TARGET, text, kind.taps(config))
    drafts = kind.propose(params, config, along, 1, None)
    said = drafts.score(drafts.hidden[0], 0)[:, 1:]
    before = TARGET.logits(along.hidden)[:, :-1]
    assert np.corrcoef(np.ravel(said), np.ravel(before))[0, 1] > 0.9


@pytest.mark.full
@pytest.mark.parametrize("name", quick(KINDS, "mlp_speculator"))
def test_a_target_in_bfloat16(name):
    kind, config, params = begun(name)
    narrow = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), MODEL.params)
    value, _ = sums_of(kind, config, params, texts(), narrow)
    expected, _ = sums_of(kind, config, params, texts())
    np.testing.assert_allclose(value, expected, rtol=0.05)


def test_a_draft_model_that_is_given():
    model = tiny_model(3, hidden_size=16, num_kv_heads=4)
    config, params = model.config, model.params
    assert kind_of_spec(ModelDrafter(config))[0] is draft_model.KIND
    told = sums_of(draft_model.KIND, config, params, texts())[1]
    assert np.all(np.asarray(told.count) > 0)
    certain = sums_of(draft_model.KIND, MODEL.config, MODEL.params, texts())[1]
    np.testing.assert_allclose(certain.accepted, certain.count, rtol=1e-3)  # it is the target


@pytest.mark.full
@pytest.mark.parametrize("tokens_per_root", quick([1, 5], 5))
def test_blocks_after_every_token(tokens_per_root):
    """Without a key, some roots at a time; each says what it says where it is drawn."""
    kind, config, params = begun("dspark", tokens_per_root=tokens_per_root)
    params = params | {"layers": dflash.dflash.init(jax.random.key(3), config, std=0.3)["layers"]}
    text = texts(length=12)
    along = states_along(TARGET, text, kind.taps(config))
    ask = jax.jit(lambda key: kind.propose(params, config, along, DEPTH, key)[:3])
    roots, is_root, every = ask(None)
    np.testing.assert_array_equal(roots, np.tile(np.arange(12), (2, 1)))
    some, is_drawn, hidden = ask(jax.random.key(1))
    assert is_drawn.any()
    assert is_root.sum() > is_drawn.sum() - (tokens_per_root == 1)
    for s in range(DEPTH):
        same = np.take_along_axis(np.asarray(every[s]), np.asarray(some)[..., None], axis=1)
        # A block that goes on past the text reads no token there.
        inside = is_drawn & (np.asarray(some) + s < np.asarray(text.lengths)[:, None])
        np.testing.assert_allclose(hidden[s][inside], same[inside], atol=1e-5)


def drawn(text, depth, count, seed=0):
    return roots.sampled(jax.random.key(seed), text, depth, count)


def test_roots_have_something_to_learn():
    """Of a text of 12 tokens, 7 and 9 are learned; of one of 2, the last; others teach nothing."""
    is_learned = np.zeros((4, 12), bool)
    is_learned[0, [7, 9]] = is_learned[1, 1] = is_learned[2, 11] = is_learned[3, 0] = True
    text = TextBatch(np.zeros((4, 12), np.int32), np.array([12, 2, 8, 12]), is_learned)
    found, is_root = map(np.asarray, drawn(text, 3, 12))
    assert sorted(found[0][is_root[0]].tolist()) == [4, 5, 6, 7, 8]
    # The token at 1 follows that at 0, of which the target itself speaks; 11 is past the text.
    assert not is_root[1:].any()
    assert np.all(found[~is_root] == 0)


def test_roots_are_drawn_alike():
    text = texts(rows=1, length=12)
    many = jax.vmap(lambda key: roots.sampled(key, text, 2, 4))
    found, is_root = map(np.asarray, many(jax.random.split(jax.random.key(0), 4000)))
    assert is_root.all()
    assert all(len(set(each)) == 4 for each in found[:200, 0].tolist())
    counts = np.bincount(found.ravel(), minlength=12)
    assert counts[0] == counts[11] == 0
    share, expected = counts[1:11] / 4000, 4 / 10
    assert np.all(np.abs(share - expected) < 5 * np.sqrt(expected * (1 - expected) / 4000))


@pytest.mark.full
def test_blocks_in_slices_say_the_same(monkeypatch):
    kind, config, params = begun("dflash", tokens_per_root=2)
    params = params | {"layers": dflash.dflash.init(jax.random.key(3), config, std=0.3)["layers"]}
    ask = jax.jit(lambda params: sums_of.__wrapped__(kind, config, params, texts())[0])
    whole, slopes = jax.value_and_grad(ask)(params)
    monkeypatch.setattr(dflash, "QUERIES_AT_ONCE", 3 * config.block_size)
    again = jax.jit(lambda params: sums_of.__wrapped__(kind, config, params, texts())[0])
    parts, same = jax.value_and_grad(again)(params)
    np.testing.assert_allclose(parts, whole, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), same, slopes)


@pytest.mark.full
def test_queries_in_parts_say_the_same(monkeypatch):
    kind, config, params = begun("eagle3")
    ask = lambda params: sums_of.__wrapped__(kind, config, params, texts())[0]
    whole, slopes = jax.jit(jax.value_and_grad(lambda params: ask(params)))(params)
    monkeypatch.setattr(eagle3, "QUERIES_AT_ONCE", 6)  # of 16
    parts, same = jax.jit(jax.value_and_grad(lambda params: ask(params)))(params)
    np.testing.assert_allclose(parts, whole, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), same, slopes)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("medusa", {"num_layers": 1}, "num_layers: no option of 'medusa'"),
        ("medusa", {"most_drafts": 0}, "most_drafts=0 must be a whole number"),
        ("medusa", {"has_head": 1}, "has_head=1 must be True or False"),
        ("mlp_speculator", {"inner_size": 1.5}, "inner_size=1.5"),
        ("draft_model", {"num_heads": 3, "num_kv_heads": 2}, "must be a multiple of"),
        ("dflash", {"block_size": 1}, "block_size=1 must be from 2 to 64"),
        ("dflash", {"block_size": 65}, "block_size=65 must be from 2 to 64"),
        ("eagle", {"aux_layers": (1,)}, "aux_layers: no option of 'eagle'"),
        ("mtp", {"num_layers": 2}, "num_layers: no option of 'mtp'"),
        ("eagle3", {"mask_token_id": 1}, "mask_token_id: no option of 'eagle3'"),
        ("p-eagle", {"mask_token_id": VOCAB}, "mask_token_id=61 must be a token of the target"),
        ("p-eagle", {"mask_token_id": True}, "mask_token_id=True must be a token of the target"),
        ("dflash", {"markov_rank": 8}, "markov_rank: no option of 'dflash'"),
        ("dflash", {"mask_token_id": VOCAB}, "mask_token_id=61 must be a token of the target"),
        ("dflash", {"aux_layers": (0, 9)}, "aux_layers="),
        ("dspark", {"markov_kind": "cubic"}, "markov_kind='cubic' must be one of vanilla"),
        ("dspark", {"markov_rank": 0, "confidence_reads_token": True}, "raise markov_rank"),
        ("dspark", {"markov_kind": "rnn", "samples_from_anchor": False}, "is not supported"),
    ],
)
def test_options_that_are_refused(name, options, message):
    with pytest.raises(ValueError, match=message):
        KINDS[name].configure(MODEL.config, options)


def test_defaults_of_blocks():
    config = KINDS["dflash"].configure(MODEL.config, {})
    assert (config.block_size, config.mask_token_id, config.most_drafts) == (16, VOCAB - 1, 15)
    assert (config.layers.num_layers, config.layers.qk_norm, config.has_head) == (5, True, False)
    config = KINDS["dspark"].configure(MODEL.config, {"markov_rank": 0})
    assert (config.block_size, config.most_drafts, config.markov_rank) == (7, 7, 0)
    assert config.has_confidence
    assert not config.confidence_reads_token
    deep = tiny_model(num_layers=12).config
    assert KINDS["dflash"].configure(deep, {}).aux_layers == (2, 4, 6, 8, 10)
