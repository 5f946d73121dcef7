"""Requests that fill the rows once and stay: for benchmarks, and loops of your own."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np

from specjax.config.speculation import MAX_DEPTH
from specjax.decode.decoder import Decoder
from specjax.decode.state import DecodeState, with_table
from specjax.engine.admission import make_admissions
from specjax.engine.request import Request
from specjax.engine.rows import Row
from specjax.paged.kv_cache import own_pages
from specjax.types import BurstPlan, DecoderParams

CHUNK = 64  # prompt tokens of a row that are fed at once


def begin(decoder: Decoder, params: DecoderParams, requests: Sequence[Request]) -> DecodeState:
    """Returns a state with request i in row i, prefilled, on pages of its own.

    Not for meshes.

    Raises:
      ValueError: there are more requests than rows, or too few pages for all rows.
    """
    sizes = decoder.sizes
    needed = sizes.rows * sizes.pages_per_row
    if len(requests) > sizes.rows or sizes.num_pages < needed:
        raise ValueError(
            f"{len(requests)} requests need as many rows and {needed} pages, the decoder "
            f"has {sizes.rows} rows and {sizes.num_pages} pages."
        )
    state = decoder.init()
    rows = [
        Row(index, 0, request, request.token_ids, 0, 0) for index, request in enumerate(requests)
    ]
    for admission in make_admissions(decoder, rows):
        state = decoder.admit(state, admission)
    table = own_pages(sizes.rows, sizes.pages_per_row)
    row_ids = np.arange(sizes.rows, dtype=np.int32)
    counts = np.zeros(sizes.rows, np.int32)
    while any(row.num_to_prefill for row in rows):
        for row in rows:
            counts[row.index] = min(row.num_to_prefill, CHUNK)
            row.num_prefilled += int(counts[row.index])
        state, _ = decoder.prefill(
            params, state, table, row_ids, counts.copy(), num_tokens=sizes.rows * CHUNK
        )
    caps = np.zeros(sizes.rows, np.int32)
    caps[: len(requests)] = [request.draft_cap for request in requests]
    return dataclasses.replace(with_table(state, table), draft_caps=jax.device_put(caps))


def plan_for_all(decoder: Decoder, num_steps: int) -> BurstPlan:
    """Returns the plan by which all rows of `begin` run num_steps steps."""
    sizes = decoder.sizes
    return BurstPlan(
        num_steps=np.int32(num_steps),
        stop_when_finished=np.bool_(False),
        activate=np.ones(sizes.rows, bool),
        keep=np.ones(sizes.rows, bool),
        draft_caps=np.full(sizes.rows, MAX_DEPTH, np.int32),
        block_table=own_pages(sizes.rows, sizes.pages_per_row),
    )
