"""What absorbing costs a K = 0 step, in operations of the compiled burst: keys and values alone."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from asked_for import quick
from helpers import tiny_llama

from benchmarks.absorbing import absorb_work
from specjax.config.engine import EngineConfig
from specjax.decode.absorb import FEW_STEPS
from specjax.decode.config import DecoderConfig
from specjax.decode.sizes import Sizes
from specjax.drafters.spec import NoDrafter
from specjax.heads import deferring
from specjax.heads.equations.dflash import DFlashConfig
from specjax.heads.equations.eagle import EagleConfig
from specjax.heads.equations.eagle3 import Eagle3Config
from specjax.heads.specs import DFlashDrafter, EagleDrafter
from specjax.models.base import before_final_norm
from specjax.planning.abstract_decoder import AbstractDecoder

pytestmark = pytest.mark.skipif(
    jax.default_backend() != "cpu", reason="counts what XLA for CPU compiles"
)

ROWS, STEPS = 4, 8  # of a burst, absorbed at once
TARGET = dataclasses.replace(
    tiny_llama(0).config,
    num_layers=1,
    hidden_size=256,
    intermediate_size=512,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
)
OTHER = 1.2  # operations of all kinds, by those of products with weights


def of_layers(num_layers):
    return dataclasses.replace(TARGET, num_layers=num_layers, architecture="llama")


def eagle3_head(num_layers):
    return Eagle3Config(
        layers=of_layers(num_layers),
        target_hidden_size=TARGET.hidden_size,
        target_vocab_size=TARGET.vocab_size,
        aux_layers=(0, 0, 1),
    )


def pair_head(**fields):
    return EagleConfig(layers=of_layers(1), target_vocab_size=TARGET.vocab_size, **fields)


DFLASH = DFlashConfig(
    layers=of_layers(2),
    target_hidden_size=TARGET.hidden_size,
    target_vocab_size=TARGET.vocab_size,
    aux_layers=(0, 1),
    block_size=4,
    mask_token_id=0,
    causal_layers=(False, False),
)
HEADS = {
    "EAGLE": EagleDrafter(pair_head(aux_layers=(1,))),
    "MTP": EagleDrafter(pair_head(aux_layers=(before_final_norm(1),), is_mtp=True)),
    "EAGLE-3": EagleDrafter(eagle3_head(1)),
    "EAGLE-3, stored": EagleDrafter(eagle3_head(1), store_features=True),
    "EAGLE-3 of two layers": EagleDrafter(eagle3_head(2)),
    "EAGLE-3 of two layers, at once": EagleDrafter(eagle3_head(2), store_features=False),
    "DFlash": DFlashDrafter(DFLASH),
    "DFlash, stored": DFlashDrafter(DFLASH, store_features=True),
}


def operations(drafter):
    """Returns the operations of a burst at K = 0; those of a loop count once, and one of few steps
    stands beside that of a whole window."""
    sizes = Sizes(
        rows=ROWS, page_size=8, num_pages=16, pages_per_row=4, burst_steps=STEPS, dtype=jnp.float32
    )
    config = DecoderConfig(target=TARGET, drafter=drafter, sizes=sizes, engine=EngineConfig())
    return AbstractDecoder(config).compile_burst(0).cost_analysis()["flops"]


@pytest.fixture(scope="module")
def plain():
    return operations(NoDrafter())


QUICK = ("DFlash, stored",)


@pytest.mark.full
@pytest.mark.parametrize("name", quick(HEADS, *QUICK))
def test_no_more_is_computed_than_it_reads(plain, name):
    """Of an EAGLE head's last layer keys and values alone; where features are stored, of none."""
    drafter = HEADS[name]
    least = num_absorbed() * absorb_work(drafter, jnp.float32).token_flops
    found = operations(drafter) - plain
    assert least < found < OTHER * least


@pytest.mark.full
@pytest.mark.parametrize("drafter", [EagleDrafter(eagle3_head(2)), DFlashDrafter(DFLASH)])
def test_next_to_nothing_is_computed_where_what_is_captured_is_stored(plain, drafter):
    drafter = dataclasses.replace(drafter, store_features="captured")
    work = absorb_work(drafter, jnp.float32)
    assert work.token_flops == work.weight_bytes == 0
    numbers = sum(deferring.stored_widths(drafter.config, drafter.stores))
    assert numbers == len(drafter.taps) * TARGET.hidden_size
    assert operations(drafter) - plain < 2 * numbers * num_absorbed(), "fc would be 256 times that"


def num_absorbed():
    """Returns the tokens that a burst absorbs, as its operations are counted."""
    return ROWS * (STEPS + FEW_STEPS)
