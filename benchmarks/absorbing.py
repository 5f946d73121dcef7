"""What absorbing the tokens of K = 0 steps adds to them, by peak figures.

docs/benchmarks/notes/heads-at-k-0.md has its figures, which tests/benchmarks holds.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp

from specjax.config.checks import CAPTURED
from specjax.heads import deferring
from specjax.heads.eagle import equations_of
from specjax.heads.equations import dflash
from specjax.heads.equations.eagle3 import Eagle3Config
from specjax.heads.specs import DFlashDrafter, EagleDrafter
from specjax.models import weights
from specjax.paged import kv_cache
from specjax.paged.work import ModelWork, Peaks


def absorb_work(drafter: EagleDrafter | DFlashDrafter, dtype: Any) -> ModelWork:
    """Returns the work of a pass of `Drafter.absorb`.

    A head of EAGLE's kinds computes keys and values alone in its last layer, and all of the layers
    below; DFlash keys and values of the contexts in all layers. One that defers runs no layer. The
    captured hidden states are written and read twice: as they wait for others of the same window,
    and when the window is gathered by row.

    Args:
      dtype: of its weights.
    """
    config = drafter.config
    read, num_whole_layers = _read(drafter)
    numbers = 4 * sum(deferring.stored_widths(config, CAPTURED))
    numbers += sum(deferring.stored_widths(config, drafter.stores))
    if not drafter.defers:
        numbers += kv_cache.numbers_per_token(config.layers)
    own = dataclasses.replace(config.layers, num_layers=num_whole_layers)
    size, products = jnp.dtype(dtype).itemsize, weights.num_weights(read)
    return ModelWork(
        weight_bytes=size * products,
        token_flops=2 * products,
        context_bytes=size * kv_cache.numbers_per_token(own),
        context_flops=4 * own.num_layers * own.num_heads * own.head_dim,
        num_layers=own.num_layers,
        token_bytes=size * numbers,
    )


def _read(drafter: EagleDrafter | DFlashDrafter) -> tuple[Any, int]:
    """Returns the weights that absorbing reads, and how many layers it runs whole."""
    if isinstance(drafter, DFlashDrafter):
        leaves = dflash.weights_of(drafter.config)
        if drafter.defers:
            return (leaves["fc"] if drafter.stores == deferring.FEATURES else ()), 0
        return (leaves["fc"], [(one["k_proj"], one["v_proj"]) for one in leaves["layers"]]), 0
    leaves = equations_of(drafter.config).weights_of(drafter.config)
    if not drafter.defers:
        *below, last = leaves["layers"]
        return (leaves["fc"], below, last["k_proj"], last["v_proj"]), len(below)
    computes = drafter.stores == deferring.FEATURES and isinstance(drafter.config, Eagle3Config)
    return (leaves["fc"] if computes else ()), 0


def absorb_step_s(
    absorb: ModelWork, device: Peaks, *, rows: int, num_steps: int, context: int
) -> float:
    """Returns the least seconds per K = 0 step that a drafter takes to absorb its tokens.

    Args:
      absorb: as of `absorb_work`.
      num_steps: K = 0 steps that are absorbed together, `specjax.decode.absorb.WINDOW`.
      context: tokens that each row has.
    """
    return absorb.of(rows, rows * num_steps, context).seconds(device) / num_steps
