"""Seconds that absorbing adds to a K = 0 step, by peaks; notes/heads-at-k-0.md states them."""

import dataclasses
import json
from pathlib import Path

import jax.numpy as jnp
import pytest

from benchmarks.absorbing import absorb_step_s, absorb_work
from specjax.configs.devices import DEVICES
from specjax.configs.heads import HEADS
from specjax.configs.models import SHAPES
from specjax.decode.absorb import WINDOW
from specjax.heads.equations.eagle import EagleConfig
from specjax.heads.specs import DFlashDrafter, EagleDrafter
from specjax.models.base import before_final_norm
from specjax.paged.work import model_work
from specjax.planning.roofline import roofline_step_s

DTYPE, CONTEXT = jnp.dtype(jnp.bfloat16), 2048
TARGET = SHAPES["llama-3.1-8b"]
EAGLE3 = HEADS["llama-3.1-8b-eagle3"]
ONE_LAYER = dataclasses.replace(TARGET, num_layers=1)

ROWS, CHIPS = (1, 8, 32), ("v5e", "v6e", "h100")


def peagle():
    layers = dataclasses.replace(EAGLE3.layers, num_layers=4)
    return EagleDrafter(dataclasses.replace(EAGLE3, layers=layers, mask_token_id=0))


HEADS = {
    "EAGLE": EagleDrafter(
        EagleConfig(layers=ONE_LAYER, target_vocab_size=TARGET.vocab_size, aux_layers=(32,))
    ),
    "MTP": EagleDrafter(
        EagleConfig(
            layers=ONE_LAYER,
            target_vocab_size=TARGET.vocab_size,
            aux_layers=(before_final_norm(32),),
            is_mtp=True,
        )
    ),
    "EAGLE-3": EagleDrafter(EAGLE3),
    "DFlash": DFlashDrafter(HEADS["llama-3.1-8b-dflash"]),
    "P-EAGLE": peagle(),
}
HEADS |= {
    f"DFlash, `{json.dumps(stored)}`": dataclasses.replace(HEADS["DFlash"], store_features=stored)
    for stored in (True, "captured")
}


def added(name, device, rows, num_steps=WINDOW, context=CONTEXT):
    """Returns the part of a plain step that absorbing adds to it."""
    figures = DEVICES[device].per_device()
    plain = roofline_step_s(
        model_work(TARGET, DTYPE, 1),
        (),
        figures,
        rows=rows,
        num_speculative_tokens=0,
        context=context,
    )
    work = absorb_work(HEADS[name], DTYPE)
    return absorb_step_s(work, figures, rows=rows, num_steps=num_steps, context=context) / plain


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("device", CHIPS)
@pytest.mark.parametrize("name", HEADS)
def test_a_head_adds_at_most_a_hundredth_to_a_plain_step(name, device, rows):
    assert 0 < added(name, device, rows) <= 0.01


@pytest.mark.parametrize("name", HEADS)
def test_with_256_rows_too(name):
    assert added(name, "v5e", 256) <= 0.01
    # With short rows arithmetic alone counts, of which DFlash adds 1.7 % to the target's.
    assert added(name, "v5e", 256, context=128) <= (0.015 if name == "DFlash" else 0.01)


def test_the_documents_state_these_figures():
    notes = Path(__file__).parents[2] / "docs" / "benchmarks" / "notes"
    page = (notes / "heads-at-k-0.md").read_text()
    for name in HEADS:
        cells = [f"{100 * added(name, chip, rows):.2f}" for chip in CHIPS for rows in ROWS]
        few, many = (100 * added(name, "v5e", 256, context=context) for context in (128, CONTEXT))
        assert " | ".join([name, *cells, f"{many:.1f}", f"{few:.1f}"]) in page


def test_by_hand():
    """EAGLE-3: fc, keys and values of pairs; 16 tokens per window and row, in two bytes each."""
    work = absorb_work(HEADS["EAGLE-3"], DTYPE)
    assert work.weight_bytes == 2 * (3 * 4096**2 + 2 * 2 * 4096 * 1024)
    assert (work.token_flops, work.context_bytes) == (work.weight_bytes, 0)
    # Three hidden states, written and read twice; and the keys and values.
    assert work.token_bytes == 2 * (4 * 3 * 4096 + 2 * 1024)
    assert WINDOW == 16


@pytest.mark.parametrize(
    ("name", "most"), [("DFlash", 0.017), ("DFlash, `true`", 0.0113), ('DFlash, `"captured"`', 0.0)]
)
def test_dflash_where_nothing_but_arithmetic_counts(name, most):
    """Operations of the products with weights, which are all of the target's at no context."""
    own = absorb_work(HEADS[name], DTYPE).token_flops
    assert own / model_work(TARGET, DTYPE, 1).token_flops == pytest.approx(most, rel=0.02)


def test_storing_what_is_captured_takes_less_than_a_hundredth_of_a_step_on_any_chip():
    """Of many rows without context: bytes of the hidden states beside operations of the target."""
    own = absorb_work(HEADS['DFlash, `"captured"`'], DTYPE)
    step = model_work(TARGET, DTYPE, 1).of(1, 1, 0).flops
    assert own.of(1, 1, 0).bytes == 2 * (4 + 1) * 5 * 4096
    figures = [chip.per_device() for chip in DEVICES.values()]
    parts = [own.of(1, 1, 0).seconds(chip) * chip.flops_per_s / step for chip in figures]
    assert max(parts) == pytest.approx(0.00764, rel=0.01), "on v6e"


def test_a_head_of_several_layers_reads_what_its_first_layer_takes_alone():
    work = absorb_work(HEADS["P-EAGLE"], DTYPE)
    assert (work.weight_bytes, work.num_layers) == (2 * 3 * 4096**2, 0)
    # Features of 4,096 numbers, beside keys and values of four layers.
    per_token = HEADS["P-EAGLE"].bytes_per_token(TARGET, DTYPE)
    assert per_token == 2 * (4 * 2 * 8 * 128 + 4096)
