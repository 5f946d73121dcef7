"""The hybrid's choice between history and a draft model: what it learns from, and what it
ignores."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
from helpers import tiny_llama

from specjax.config.speculation import SpeculationConfig
from specjax.drafters import base, hybrid, none
from specjax.drafters.hybrid import MODEL, NO_KIND
from specjax.drafters.spec import HybridDrafter
from specjax.heads.equations.dflash import DFlashConfig
from specjax.heads.equations.eagle import EagleConfig
from specjax.heads.equations.medusa import MedusaConfig
from specjax.heads.specs import DFlashDrafter, EagleDrafter, NewestStateDrafter

DRAFTER = hybrid.drafter(none.drafter(), num_speculative_tokens=4, capacity=100, min_match=2)


OWN = tiny_llama(0, num_layers=1).config
SIZES = {"target_vocab_size": OWN.vocab_size, "aux_layers": (2,)}
WIDTH = {"target_hidden_size": OWN.hidden_size}
HEADS = {
    "EAGLE": EagleDrafter(EagleConfig(layers=OWN, **SIZES)),
    "Medusa": NewestStateDrafter(MedusaConfig(most_drafts=3, **SIZES, **WIDTH)),
    "DFlash": DFlashDrafter(
        DFlashConfig(
            layers=OWN, block_size=4, mask_token_id=0, causal_layers=(False,), **SIZES, **WIDTH
        )
    ),
}


def state_of(kinds, roots, num_proposed):
    state = DRAFTER.init(len(kinds), 32, 4, 8)
    integers = lambda values: jnp.asarray(values, jnp.int32)
    return dataclasses.replace(
        state,
        kinds=integers(kinds),
        roots=integers(roots),
        num_proposed=integers(num_proposed),
    )


def learned(state, lengths, takes_part=None):
    rows = SimpleNamespace(cache=SimpleNamespace(lengths=jnp.asarray(lengths)))
    part = jnp.ones(len(lengths), bool) if takes_part is None else takes_part
    return hybrid._learn(state, rows, part)


def test_kinds_are_the_powers_of_two_of_matches():
    kinds = hybrid._kind_of(jnp.array([1, 2, 3, 4, 7, 8, 32, 63]))
    assert kinds.tolist() == [0, 1, 1, 2, 2, 3, 5, 5]


def test_what_came_of_a_proposal_is_how_far_the_row_got_less_one():
    state = learned(state_of([1, MODEL], [10, 20], [4, 4]), [13, 21])
    assert np.asarray(state.num_steps).sum() == 2
    assert state.num_accepted[0, 1] == 2
    assert state.num_accepted[1, MODEL] == 0
    assert state.num_steps[1, MODEL] == 1


def test_steps_without_drafts_tell_nothing():
    """A row that got further than was proposed has decoded plainly in between."""
    state = learned(state_of([MODEL, MODEL], [10, 10], [3, 3]), [14, 15])
    assert np.asarray(state.num_steps).sum(axis=1).tolist() == [1, 0]
    state = learned(state_of([NO_KIND], [10], [3]), [12])
    assert not np.asarray(state.num_steps).any()
    state = learned(state_of([MODEL], [10], [3]), [12], jnp.array([False]))
    assert not np.asarray(state.num_steps).any()


def test_the_kind_that_does_better_is_expected_to():
    state = state_of([0, MODEL], [0, 0], [4, 4])
    before = hybrid._expected(state, 4)
    assert before[MODEL] > before[0]
    for _ in range(50):
        state = learned(dataclasses.replace(state, roots=jnp.zeros(2, jnp.int32)), [5, 1])
    after = hybrid._expected(state, 4)
    assert after[0] == pytest.approx(4, abs=0.5)
    assert after[MODEL] == pytest.approx(0, abs=0.5)
    # Kinds that nothing is known of keep what they began with.
    np.testing.assert_allclose(after[1:MODEL], before[1:MODEL])


def test_rows_are_taken_and_put_back():
    state = state_of([0, 1, 2], [5, 6, 7], [1, 2, 3])
    part = base.take_rows(DRAFTER, state, jnp.array([2, 1]))
    assert part.roots.tolist() == [7, 6]
    part = dataclasses.replace(part, num_proposed=jnp.array([8, 9]))
    whole = base.put_rows(DRAFTER, state, jnp.array([2, 3]), part)  # row 3 is none
    assert whole.num_proposed.tolist() == [1, 2, 8]


@pytest.mark.parametrize("name", HEADS)
def test_a_head_stands_beside_history_as_a_draft_model_does(name):
    spec = HEADS[name]
    settings = {"corpus_tokens": 512, "prompt_lookup_min": 3}
    beside = spec.configured(SpeculationConfig(**settings))
    assert beside == HybridDrafter(spec, 512, 3)
    assert beside.configured(SpeculationConfig(**settings)) == beside
    target = tiny_llama(0).config
    for of in (
        lambda one: one.taps,
        lambda one: one.likely_faults,
        lambda one: one.tree_slots(3),
        lambda one: one.bytes_per_token(target, "float32"),
        lambda one: one.work(target, jnp.float32),
        lambda one: one.abstract_params(target, jnp.float32),
    ):
        assert of(beside) == of(spec)
    assert not beside.has_probs
    with pytest.raises(ValueError, match="tree"):
        spec.configured(SpeculationConfig(speculative_token_tree=[[0], [1]], corpus_tokens=512))
    with pytest.raises(ValueError, match="max_model_len"):
        spec.configured(SpeculationConfig(max_model_len=9))
