"""Admits waiting requests to rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from specjax.decode.decoder import Decoder
from specjax.decode.sizes import PLACES
from specjax.decode.state import Admission
from specjax.drafters.guard import DrafterError
from specjax.engine.rows import Row
from specjax.engine.run_state import RunState
from specjax.sampling import RowSampling, empty_row_values


def admit(run: RunState, growth: int) -> None:
    """Admits as many requests as rows and pages allow.

    Args:
      growth: tokens that every row is to have room to gain.
    """
    admitted = run.scheduler.admit(growth)
    run.prompts.num_tokens += sum(row.num_to_prefill for row in admitted)
    for row in admitted:
        row.request.lineage.fill(len(row.request.output_token_ids), run.params_version)
    for admission in make_admissions(run.decoder, admitted):
        _enter(run, admission)


def _enter(run: RunState, admission: Admission) -> None:
    """Writes requests into rows of the device's state; a drafter that raises is turned off."""
    try:
        run.device_state = run.decoder.admit(run.device_state, admission)
    except DrafterError as error:
        run.turn_drafter_off(str(error))
        run.device_state = run.decoder.admit(run.device_state, admission)


def make_admissions(decoder: Decoder, rows: Sequence[Row]) -> Iterator[Admission]:
    """Yields the admissions of rows, in groups of PLACES per shard, or of one."""
    by_shard = [[row for row in rows if row.shard == shard] for shard in range(decoder.num_shards)]
    most = max(map(len, by_shard))
    places = 1 if most == 1 else min(PLACES, decoder.sizes.rows // decoder.num_shards)
    for first in range(0, most, places):
        yield make_admission(decoder, [own[first : first + places] for own in by_shard], places)


def make_admission(decoder: Decoder, by_shard: Sequence[Sequence[Row]], places: int) -> Admission:
    """Returns the arrays that admit requests to rows, at most `places` per shard."""
    sizes, num_shards = decoder.sizes, decoder.num_shards
    rows_per_shard = sizes.rows // num_shards
    count = num_shards * places
    history = np.zeros((count, sizes.max_length), np.int32)
    row_ids = np.full(count, rows_per_shard, np.int32)
    max_lengths, rules, lengths, drafter_lengths = np.zeros((4, count), np.int32)
    sampling: dict[str, Any] = empty_row_values(count, decoder.engine_config)
    for shard, own in enumerate(by_shard):
        for place, row in enumerate(own, start=shard * places):
            request = row.request
            row_ids[place] = row.index % rows_per_shard
            history[place, : len(row.token_ids)] = row.token_ids
            max_lengths[place] = request.max_length
            rules[place] = request.rule
            lengths[place] = row.num_prefilled
            drafter_lengths[place] = row.num_drafter_final
            for name, value in request.sampling_values.items():
                sampling[name][place] = value
    return Admission(
        row_ids=row_ids,
        history=history,
        sampling=RowSampling(**sampling),
        max_lengths=max_lengths,
        rules=rules,
        lengths=lengths,
        drafter_lengths=drafter_lengths,
    )
