"""Chooses over how many devices of a tensor axis a draft model is split.

A draft token takes one forward of a small model, whose time is that of reading weights and keys
and values. Each of n devices reads an n-th of them, and waits for two sums over the n devices per
layer. A large drafter gains by that, and a very small one loses.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from specjax.drafters.base import DrafterSpec
from specjax.models.base import ModelConfig
from specjax.models.partition import undivided
from specjax.paged.work import Peaks

TABLE_CONTEXT = 2048  # most tokens of each row where one context stands for all

# Assumed seconds of a sum over devices of the few hundred kB that a draft token has per layer.
# It was not measured. It only chooses between numbers of shards, and a drafter of a billion
# weights is split with any value below some 120 microseconds (bfloat16, four chips of TPU v5e, 32
# rows of 2,048 tokens).
ALL_REDUCE_S = 1e-5


def draft_token_s(
    spec: DrafterSpec,
    target: ModelConfig,
    dtype: Any,
    device: Peaks,
    *,
    rows: int,
    context: int,
    num_speculative_tokens: int = 1,
    num_weights: int | None = None,
) -> float:
    """Returns the least seconds of one draft token of every row, with the sums over shards.

    Of a drafter that drafts all tokens in one forward, they are the seconds of that.

    Args:
      dtype: of the drafter's weights.
      context: tokens that each row has.
      num_weights: numbers in its weights, if known.
    """
    works = spec.work(target, dtype, num_weights)
    seconds = sum(
        work.of_forward(rows, context, num_speculative_tokens).seconds(device) for work in works
    )
    if spec.num_shards == 1:
        return seconds
    # Attention and MLP of each layer, the embedding and the logits.
    sums = sum(2 * work.num_layers + 2 for work in works)
    return seconds + sums * ALL_REDUCE_S


def possible_shards(spec: DrafterSpec, tensor_shards: int) -> list[int]:
    """Returns the numbers of shards, ascending, that a drafter can have on a tensor axis."""
    divisors = (n for n in range(1, tensor_shards + 1) if tensor_shards % n == 0)
    return [n for n in divisors if spec.can_split(n)]


def split_drafter(
    spec: DrafterSpec,
    asked: int | None,
    tensor_shards: int,
    seconds: Callable[[DrafterSpec], float] | None,
) -> tuple[DrafterSpec, str | None]:
    """Returns the spec split as asked for, else by the shortest time of a draft token.

    Where the number asked for is not possible, the largest one below it is taken, and a note for
    the user says why; otherwise the note is None.

    Args:
      asked: SpeculationConfig.draft_tensor_parallel_size; None: choose, unless the spec is split.
      tensor_shards: devices of the mesh's tensor axis; 1 without a mesh.
      seconds: seconds of one draft token of a split spec; None where the device is unknown: then
        each device holds the whole drafter.
    """
    if not spec.can_draft:
        return spec, None
    if spec.made_by is not None:  # of the target's weights, each device from its own
        return spec.split(tensor_shards), None
    asked = asked or (spec.num_shards if spec.num_shards > 1 else None)
    possible = possible_shards(spec, tensor_shards)
    if asked is None:
        if seconds is None or len(possible) == 1:
            return spec, None
        return min(map(spec.split, possible), key=seconds), None
    shards = max(n for n in possible if n <= asked)
    note = None
    if shards < asked:
        where = f"split over {shards} devices" if shards > 1 else "whole on each device"
        note = (
            f"draft_tensor_parallel_size={asked} is not possible: "
            f"{_obstacle(spec, asked, tensor_shards)}. The drafter is {where}."
        )
    return spec.split(shards), note


def _obstacle(spec: DrafterSpec, asked: int, tensor_shards: int) -> str:
    if not spec.configs:
        does = "splits no weights" if spec.taps else "runs no model"
        return f"{type(spec).__name__} {does}"
    if tensor_shards % asked:
        return f"the mesh's tensor axis has {tensor_shards} devices, which it must divide"
    for config in spec.configs:
        if (field := undivided(config, asked)) is not None:
            return f"{field}={getattr(config, field)} of the draft model is not divisible by it"
    return f"{type(spec).__name__} cannot be split"
