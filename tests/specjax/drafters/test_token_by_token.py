"""Drawing by a model that drafts token by token: with the noise of the target's own choice."""

import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec
from test_draws import random_logits, rows_of

from specjax.config.sampling import SamplingParams
from specjax.drafters.token_by_token import TokenByToken
from specjax.sampling import choose_tokens
from specjax.sampling.seeded_noise import TARGET_TOKEN
from specjax.sampling.vocabulary import WHOLE, Vocabulary
from specjax.types import SEEDED

ROWS, VOCAB, DEPTH, COUNT = 40, 30, 2, 3


class HiddenAreLogits(TokenByToken):
    def own_logits(self, params, hidden, depth):
        return hidden, WHOLE


MODEL = HiddenAreLogits(vocab_size=VOCAB, keeps_probs=False, says_confidence=True, keeps_fed=False)
STATE = SimpleNamespace(
    sampling=rows_of([SamplingParams(), SamplingParams(temperature=0.6)], ROWS),
    rules=jnp.full(ROWS, SEEDED),
    cache=SimpleNamespace(lengths=jnp.arange(ROWS, dtype=jnp.int32)),
    history=jnp.zeros((ROWS, ROWS + 8), jnp.int32),
)
HIDDEN = jnp.asarray(random_logits("likely", ROWS, VOCAB))


@jax.jit
def children(hidden):
    """Returns what `draw` says, with and without confidence, and what `rank` says."""
    node = hidden[:, None], STATE
    where = DEPTH, STATE.history, COUNT
    unsure = dataclasses.replace(MODEL, says_confidence=False)
    draw = lambda model: model.draw(None, *node, jnp.array([2]), *where)
    return draw(MODEL), draw(unsure), MODEL.rank(None, *node, *where)


class HiddenAreSlices(TokenByToken):
    """The same logits, of which each device of an axis has its slice."""

    def own_logits(self, params, hidden, depth):
        slices = Vocabulary("tensor")
        return slices.slice_of(hidden, VOCAB // jax.lax.axis_size("tensor")), slices


@pytest.mark.full
@pytest.mark.parametrize("of_one", [True, False], ids=["one", "siblings"])
def test_slices_of_the_vocabulary_draw_what_the_whole_draws(of_one):
    """One token by a few numbers of other devices; several, and laws, of gathered logits."""
    mesh = Mesh(np.array(jax.devices()[:2]), ("tensor",))

    def draw(kind):
        model = kind(VOCAB, keeps_probs=not of_one, says_confidence=not of_one, keeps_fed=False)
        where = HIDDEN[:, None], STATE, jnp.array([2]), DEPTH, STATE.history
        return model.draw(None, *where, 1 if of_one else COUNT)

    over_devices = jax.shard_map(
        lambda: draw(HiddenAreSlices),
        mesh=mesh,
        in_specs=(),
        out_specs=PartitionSpec(),
        check_vma=False,
    )
    found, expected = jax.jit(over_devices)(), jax.jit(lambda: draw(HiddenAreLogits))()
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    gathered = jax.make_jaxpr(over_devices)()
    assert (f"f32[{ROWS},{VOCAB}] = all_gather" in str(gathered)) != of_one


@jax.jit
def target_choice(logits):
    """Returns the target's token after each of these nodes."""
    rows = jnp.arange(ROWS, dtype=jnp.int32)
    at = STATE.cache.lengths + DEPTH
    choice = choose_tokens(logits, STATE.sampling, rows, at, STATE.history, role=TARGET_TOKEN)
    return choice.token_ids


@pytest.mark.full
def test_the_first_child_of_a_seeded_row_is_what_the_target_would_choose():
    drawn, same, (log_probs, ranked) = children(HIDDEN)
    said = target_choice(HIDDEN)
    assert (said != HIDDEN.argmax(axis=1)).any()
    np.testing.assert_array_equal(drawn.token_ids[:, 0, 0], said)
    np.testing.assert_array_equal(same.token_ids, drawn.token_ids)
    np.testing.assert_array_equal(ranked, drawn.token_ids)
    np.testing.assert_allclose(drawn.probability, jnp.exp(log_probs), rtol=1e-5)
