"""Logits of all draft tokens of a step are kept: what a compiled burst does with them."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import pytest
from helpers import tiny_llama

from specjax.config.engine import EngineConfig
from specjax.decode.config import DecoderConfig
from specjax.decode.sizes import Sizes
from specjax.heads.equations.dflash import DFlashConfig
from specjax.heads.specs import DFlashDrafter
from specjax.planning.abstract_decoder import AbstractDecoder

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(jax.default_backend() != "cpu", reason="reads what XLA for CPU compiles"),
]

ROWS, K, VOCAB, RANK = 4, 3, 4096, 8  # tokens of the vocabulary tell logits by their width
TARGET = dataclasses.replace(tiny_llama(0).config, vocab_size=VOCAB)


@pytest.mark.parametrize("kind", ["vanilla", "rnn"])
def test_a_markov_head_lays_nothing_beside_the_logits(kind):
    config = DFlashConfig(
        layers=dataclasses.replace(TARGET, num_layers=1, architecture="llama"),
        target_vocab_size=VOCAB,
        target_hidden_size=TARGET.hidden_size,
        aux_layers=(0, 1),
        block_size=4,
        mask_token_id=5,
        causal_layers=(False,),
        samples_from_anchor=True,
        markov_rank=RANK,
        markov_kind=kind,
    )
    drafter = DFlashDrafter(config)
    sizes = Sizes(
        rows=ROWS,
        page_size=8,
        num_pages=32,
        pages_per_row=4,
        burst_steps=4,
        tree_slots=drafter.tree_slots(K),
        dtype=jnp.float32,
    )
    decoder = AbstractDecoder(
        DecoderConfig(target=TARGET, drafter=drafter, sizes=sizes, engine=EngineConfig())
    )
    program = decoder.compile_burst(K).as_text()
    widths = {int(width) for width in re.findall(rf"f32\[{ROWS},(\d+)\]", program)}
    assert VOCAB in widths
    assert not widths & set(range(VOCAB + 1, VOCAB + 4 * RANK))
