"""K = 0 beside a head: what the drafter keeps does not depend on how steps are cut into bursts."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from asked_for import quick
from helpers import tiny_llama
from test_burst import ENGINE, request_of

from specjax.cli.bench.fixed_batch import begin, plan_for_all
from specjax.decode.absorb import FEW_STEPS, WINDOW
from specjax.decode.config import DecoderConfig
from specjax.decode.decoder import Decoder
from specjax.decode.sizes import Sizes
from specjax.drafters.base import Drafter, by_none
from specjax.drafters.spec import DrafterSpec
from specjax.heads.equations import dflash, eagle3
from specjax.heads.equations.dflash import DFlashConfig
from specjax.heads.equations.eagle3 import Eagle3Config
from specjax.heads.specs import DFlashDrafter, EagleDrafter
from specjax.types import DecoderParams

MODEL = tiny_llama(0, num_layers=1)
STEPS, SHORT = 20, 9  # of the longest row and of another, which ends in mid-window
SIZES = Sizes(rows=2, page_size=8, num_pages=8, pages_per_row=4, burst_steps=STEPS)
OF_TARGET = {
    "target_hidden_size": MODEL.config.hidden_size,
    "target_vocab_size": MODEL.config.vocab_size,
}
MASK = {"mask_token_id": 60}


def eagle3_of(num_layers, **fields):
    layers = dataclasses.replace(MODEL.config, num_layers=num_layers)
    config = Eagle3Config(layers=layers, aux_layers=(0, 0, 1), **OF_TARGET, **fields)
    return EagleDrafter, eagle3, config


DFLASH = DFlashConfig(
    layers=MODEL.config,
    aux_layers=(0, 1),
    block_size=4,
    causal_layers=(False,),
    **OF_TARGET,
    **MASK,
)
HEADS = {
    "eagle3": eagle3_of(1),
    "p_eagle": eagle3_of(2, **MASK),
    "dflash": (DFlashDrafter, dflash, DFLASH),
}
HEADS["p_eagle, captured"] = (
    functools.partial(EagleDrafter, store_features="captured"),
    *HEADS["p_eagle"][1:],
)
HEADS |= {
    f"dflash, {stored}": (functools.partial(DFlashDrafter, store_features=stored), dflash, DFLASH)
    for stored in (True, "captured")
}
CUTS = [(1, 1, 2, 3, 4, 9), (FEW_STEPS,) * (STEPS // FEW_STEPS), (FEW_STEPS + 1, WINDOW + 1)]


def run(drafter, params, cut, *, is_whole=True):
    """Returns the state of the drafter after bursts of so many steps each."""
    decoder = Decoder(
        DecoderConfig(target=MODEL.config, drafter=drafter, sizes=SIZES, engine=ENGINE)
    )
    params = DecoderParams(MODEL.params, params)
    state = begin(decoder, params, [request_of(0, STEPS), request_of(1, SHORT)])
    for most in cut:
        plan = plan_for_all(decoder, most)
        state, _, num_steps = decoder.burst(params, state, plan, num_speculative_tokens=0)
        assert int(num_steps) == most
    assert not is_whole or np.asarray(state.cache.lengths).tolist() == [STEPS, SHORT]
    return state.drafter


@pytest.mark.full
@pytest.mark.parametrize("name", quick(HEADS, "p_eagle"))
def test_what_a_head_keeps_does_not_depend_on_bursts(name):
    spec, equations, config = HEADS[name]
    params = equations.init(jax.random.key(1), config, std=0.3)
    whole = run(spec(config), params, (STEPS,))
    num_kept = sum(int(jnp.sum(jnp.any(leaf != 0, axis=-1))) for leaf in jax.tree.leaves(whole))
    assert num_kept >= STEPS + SHORT
    for cut in CUTS:
        found = run(spec(config), params, cut)
        jax.tree.map(
            lambda one, other: np.testing.assert_allclose(one, other, atol=1e-5), found, whole
        )


@dataclasses.dataclass(frozen=True)
class Counting(DrafterSpec):
    """Counts the tokens per row that it is given room for, and drafts nothing."""

    @property
    def taps(self):
        return (0,)

    def build(self, context):
        def absorb(params, state, fed, next_token_ids, taps, row_ids, max_tokens_per_row):
            return state.at[max_tokens_per_row].add(fed.row_starts[-1])

        return Drafter(
            lambda *_: None,
            init=lambda *_: jnp.zeros(STEPS + 1, jnp.int32),
            absorb=absorb,
            state_axes=by_none,
        )


@pytest.mark.full
@pytest.mark.parametrize(
    ("cut", "of_few", "of_whole"),
    [
        pytest.param((FEW_STEPS,), 2 * FEW_STEPS, 0, marks=pytest.mark.full),
        ((1, FEW_STEPS), 2 * (1 + FEW_STEPS), 0),
        pytest.param((FEW_STEPS + 1,), 0, 2 * (FEW_STEPS + 1), marks=pytest.mark.full),
        ((WINDOW + FEW_STEPS,), FEW_STEPS, WINDOW + SHORT),
        ((WINDOW + FEW_STEPS + 1,), 0, WINDOW + FEW_STEPS + 1 + SHORT),
    ],
    ids=str,
)
def test_how_many_tokens_per_row_are_absorbed_together(cut, of_few, of_whole):
    expected = np.zeros(STEPS + 1, np.int32)
    expected[[FEW_STEPS, WINDOW]] = of_few, of_whole
    found = np.asarray(run(Counting(), None, cut, is_whole=False))
    np.testing.assert_array_equal(found, expected)
