"""Drafts that are trained along a text are those of the served drafter after these tokens.

The equations in numpy, which the tests of the served drafters compare with, are fed a text's tokens
in place of draft tokens.
"""

import dataclasses
import functools

import eagle3_heads
import jax
import jax.numpy as jnp
import numpy as np
import pair_heads
import pytest
import test_dflash
import test_eagle1
import test_mtp
import test_newest_state
import test_parallel_eagle
from asked_for import quick
from head_equations import TARGET, VOCAB, mlp, rms, wide

from specjax.models import llama
from specjax.models.dense import sequence_logits
from specjax.testing.tiny_models import tiny_config
from specjax.training import dflash as dflash_kind
from specjax.training import draft_model as draft_model_kind
from specjax.training import eagle as eagle_kind
from specjax.training import eagle3 as eagle3_kind
from specjax.training import medusa as medusa_kind
from specjax.training import mlp_speculator as mlp_kind
from specjax.training.objective import Objective, loss_of
from specjax.training.texts import Target, TextBatch, states_along

LENGTHS, LENGTH, DEPTH = (14, 3, 1, 0), 14, 3
FROZEN = Target(TARGET.config, TARGET.params)


def make_text(seed=3):
    """Returns texts, most of which are shorter than a chain, and what stands after them."""
    rng = np.random.default_rng(seed)
    token_ids = rng.integers(0, VOCAB, (len(LENGTHS), LENGTH)).astype(np.int32)
    is_learned = rng.random(token_ids.shape) < 0.8
    return TextBatch(token_ids, np.array(LENGTHS), is_learned)


run_target = jax.jit(sequence_logits, static_argnums=1, static_argnames="taps")


@functools.cache
def taps_along(tokens, taps):
    """Returns [len(tokens), taps, width] of a text by itself, in float64."""
    _, found = run_target(TARGET.params, TARGET.config, np.array([tokens]), taps=taps)
    return np.stack([np.asarray(each[0], np.float64) for each in found], axis=1)


# Each returns the logits of the draft tokens after a root of a text that is known, in the target's
# vocabulary, and what a confidence head says or None. tokens: up to the last but one that is said.


def of_eagle3(config, params, tokens, root, taps):
    params, rows = wide(params), []
    target = wide(TARGET.params)
    table = params["embed_tokens"] if config.has_embedding else target["embed_tokens"]
    head = target.get("lm_head", target["embed_tokens"])
    features = eagle3_heads.feature_of(params, config, taps[:root])
    for end in range(root + 1, len(tokens) + 1):
        r = eagle3_heads.outputs_of(params, config, table[tokens[1:end]], features)[-1]
        rows.append(eagle3_heads.logits_of(params, config, head, r))
        following = rms(r, params["norm"]) if config.norm_output else r
        features = np.concatenate([features, following[None]])
    return np.stack(rows), None


def of_pairs(reference, config, params, tokens, root, taps):
    head, rows, features = reference(config, params), [], taps[:root, 0]
    for end in range(root + 1, len(tokens) + 1):
        r = head.outputs(tokens[:end], features)[-1]
        rows.append(r @ head.head.T)
        features = np.concatenate([features, r[None]])
    return np.stack(rows), None


def of_masks(config, params, tokens, root, taps):
    head, depth = test_parallel_eagle.OverMasks(config, params), len(tokens) - root
    r, _ = head.draft(list(tokens[: root + 1]), taps[:root], depth)
    return eagle3_heads.logits_of(head.params, config, head.head, r), None


def of_dflash(config, params, tokens, root, taps):
    reference, rows, state = test_dflash.Reference(config, params), [], np.zeros(config.markov_rank)
    params = reference.params
    contexts = taps[:root].reshape(root, -1) @ params["fc"].T
    contexts = rms(contexts, params["hidden_norm"])
    x = test_dflash.outputs_of(params, config, reference.table, tokens[root], contexts)
    x = x[config.first_row :][: len(tokens) - root]
    said = test_dflash.logits_of(params, config, reference.head, x)
    for logits, normed, before in zip(said, rms(x, params["norm"]), tokens[root:]):
        if config.markov_rank:
            embedded = params["markov_w1"][before]
            latent, state = test_dflash.markov_of(params, config, embedded, normed, state)
            own = params["markov_w2"] @ latent
            logits = logits + test_dflash.in_target_vocabulary(params, config, own)
        rows.append(logits)
    sure = None
    if config.has_confidence:
        sure = test_dflash.confidence_of(config, params, x, tokens[root:])
    return np.stack(rows), sure


def of_newest(config, params, tokens, root, taps):
    equations = test_newest_state.equations_of(config)
    before = tokens[root:][: config.most_drafts]
    return equations(config, wide(params), taps[root - 1, 0], before), None


def of_model(config, params, tokens, root, taps):
    params, positions = wide(params), np.arange(len(tokens), dtype=np.float64)
    x = params["embed_tokens"][tokens]
    for layer in params["layers"]:
        read = rms(x, layer["input_norm"])
        x = x + pair_heads.attention(read, layer, config, positions)
        x = x + mlp(rms(x, layer["post_attention_norm"]), layer)
    return rms(x[root:], params["norm"]) @ params["embed_tokens"].T, None


DRAFT = tiny_config(hidden_size=16, num_kv_heads=4, tie_word_embeddings=True)
CONFIDENT = {"has_confidence": True, "confidence_reads_token": True}


def learned_dflash(name, **more):
    """Returns a head of random weights, of which many roots are drawn."""
    config, params = test_dflash.make_head(name, **more)
    fields = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    return dflash_kind.LearnedConfig(**fields, tokens_per_root=2), params


def newest_head(name):
    head = test_newest_state.make_head(name)
    return head.spec.config, head.params


CASES = {
    **{
        f"EAGLE-3, {name}": (
            eagle3_kind.KIND,
            of_eagle3,
            lambda name=name: eagle3_heads.make_head(name),
        )
        for name in eagle3_heads.FLAGS
    },
    **{
        f"P-EAGLE, {name}": (
            eagle3_kind.KIND_OF_MASKS,
            of_masks,
            lambda name=name: eagle3_heads.make_head(name, mask_token_id=test_parallel_eagle.MASK),
        )
        for name in eagle3_heads.FLAGS
    },
    **{
        f"EAGLE, {name}": (
            eagle_kind.KIND,
            functools.partial(of_pairs, pair_heads.Reference),
            lambda name=name: test_eagle1.make_head(name),
        )
        for name in test_eagle1.FLAGS
    },
    **{
        f"MTP, {name}": (
            eagle_kind.KIND_OF_MTP,
            functools.partial(of_pairs, test_mtp.MtpReference),
            lambda name=name: test_mtp.make_layer(name),
        )
        for name in test_mtp.KINDS
    },
    **{
        f"DFlash, {name}": (dflash_kind.KIND, of_dflash, lambda name=name: learned_dflash(name))
        for name in test_dflash.FLAGS
        if "DFlash2" not in name
    },
    "DSpark, recurrent": (
        dflash_kind.KIND_OF_DSPARK,
        of_dflash,
        lambda: learned_dflash("a recurrent Markov head", **CONFIDENT),
    ),
    "DSpark, gated": (
        dflash_kind.KIND_OF_DSPARK,
        of_dflash,
        lambda: learned_dflash("a gated Markov head", has_confidence=True),
    ),
    **{
        name: (
            mlp_kind.KIND if name.startswith("MLP") else medusa_kind.KIND,
            of_newest,
            lambda name=name: newest_head(name),
        )
        for name in test_newest_state.HEADS
    },
    "draft model": (
        draft_model_kind.KIND,
        of_model,
        lambda: (DRAFT, llama.init(jax.random.key(5), DRAFT, std=0.3)),
    ),
}


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def drafted(kind, config, depth, params, text):
    """Returns the drafts along texts, and for each depth their logits [rows, roots, tokens]."""
    along = states_along(FROZEN, text, kind.taps(config))
    drafts = kind.propose(params, config, along, depth, jax.random.key(1))
    logits = [
        drafts.score(each.reshape(-1, each.shape[-1]), s).reshape(*each.shape[:2], -1)
        for s, each in enumerate(drafts.hidden)
    ]
    estimates = drafts.estimates
    if drafts.is_aligned:  # to the roots
        logits = [jnp.roll(each, -s, axis=1) for s, each in enumerate(logits)]
    return (drafts.roots, drafts.is_root, estimates), logits


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def learned(kind, config, depth, params, text):
    """Returns ((loss, sums), gradient)."""
    fixed = {name: each for name, each in params.items() if name == "target_ids"}

    def loss(own):
        along = states_along(FROZEN, text, kind.taps(config))
        key = jax.random.key(1)
        drafts = kind.propose(own | fixed, config, along, depth, key)
        every = Objective(text=0.1, overlap=0.1, accepted=0.1)
        return loss_of(every, along, drafts)

    own = {name: each for name, each in params.items() if name not in fixed}
    return jax.value_and_grad(loss, has_aux=True)(own)


def padded_otherwise(text):
    """Returns the texts with other tokens after them."""
    is_text = np.arange(LENGTH) < text.lengths[:, None]
    return text._replace(
        token_ids=np.where(is_text, text.token_ids, VOCAB - 1 - text.token_ids),
        is_learned=np.where(is_text, text.is_learned, ~text.is_learned),
    )


@pytest.mark.parametrize("name", quick(CASES, "EAGLE-3, two_layers", "DSpark, recurrent"))
def test_drafts_along_a_text_are_those_of_the_equations(name):
    kind, equations, make = CASES[name]
    (config, params), text = make(), make_text()
    depth = min(DEPTH, kind.most_drafts(config) or DEPTH)
    (roots, is_root, estimates), found = drafted(kind, config, depth, params, text)
    ids = np.asarray(params.get("target_ids", np.arange(VOCAB)))
    compared = 0
    for row, length in enumerate(LENGTHS[:2]):
        taps = taps_along(tuple(text.token_ids[row, :length].tolist()), kind.taps(config) or (0,))
        for place in np.flatnonzero(is_root[row]).tolist():
            root = int(roots[row, place])
            assert 1 <= root < length
            # All tokens but the last stand before a draft token.
            tokens = text.token_ids[row, : min(root + depth, length)].tolist()
            expected, sure = equations(config, params, tokens, root, taps)
            for s, logits in enumerate(expected[:depth]):
                np.testing.assert_allclose(found[s][row, place], logits[ids], atol=1e-4)
                compared += 1
                if sure is not None:
                    estimate = 1 / (1 + np.exp(-np.asarray(estimates[s][row, place])))
                    np.testing.assert_allclose(estimate, sure[s], atol=1e-4)
    assert compared > 10
    assert not np.any(is_root[2:])


@pytest.mark.full
@pytest.mark.parametrize("name", quick(CASES, "EAGLE-3, own_tables"))
def test_learning_reads_nothing_after_a_text(name):
    kind, _, make = CASES[name]
    (config, params), text = make(), make_text()
    depth = min(DEPTH, kind.most_drafts(config) or DEPTH)
    (value, sums), slopes = learned(kind, config, depth, params, text)
    assert np.all(np.asarray(sums.count) > 0)
    again = learned(kind, config, depth, params, padded_otherwise(text))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), ((value, sums), slopes), again
    )
    leaves = jax.tree.leaves(slopes)
    assert all(np.all(np.isfinite(leaf)) for leaf in leaves)
    # Of all weights but those that are not read at this depth.
    is_moved = [bool(np.any(np.asarray(leaf) != 0)) for leaf in leaves]
    assert all(is_moved), [leaf.shape for leaf, moved in zip(leaves, is_moved) if not moved]


@pytest.mark.full
@pytest.mark.parametrize(
    "name", ["EAGLE-3, plain", "DSpark, gated", "MLP", "Medusa", "draft model"]
)
def test_texts_of_one_token_teach_nothing(name):
    kind, _, make = CASES[name]
    config, params = make()
    text = make_text()._replace(lengths=np.array([1, 1, 0, 0]))
    (value, sums), slopes = learned(kind, config, DEPTH, params, text)
    assert value == 0
    assert all(np.all(np.asarray(each) == 0) for each in jax.tree.leaves((sums, slopes)))
