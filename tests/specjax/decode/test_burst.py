"""When a burst ends: by its steps, with the last row, or with the first while work waits."""

import dataclasses

import numpy as np
import pytest
from helpers import tiny_llama

from specjax.cli.bench.fixed_batch import begin, plan_for_all
from specjax.config.engine import EngineConfig
from specjax.config.sampling import SamplingParams
from specjax.decode.config import DecoderConfig
from specjax.decode.decoder import Decoder
from specjax.decode.sizes import Sizes
from specjax.drafters.spec import NoDrafter
from specjax.engine.request import Request
from specjax.sampling import row_values
from specjax.types import GREEDY, OUT_OF_LENGTH, RUNNING, DecoderParams

MAX_STEPS = 8
ENGINE = EngineConfig(max_bias_entries=1, max_allowed_tokens=1)
SIZES = Sizes(rows=2, page_size=16, num_pages=2, pages_per_row=1, burst_steps=MAX_STEPS)


@pytest.fixture(scope="module")
def decoder_and_model():
    model = tiny_llama(0, vocab_size=11, num_layers=1)
    return Decoder(
        DecoderConfig(target=model.config, drafter=NoDrafter(), sizes=SIZES, engine=ENGINE)
    ), model


def request_of(row, max_tokens):
    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    return Request(
        prompt_index=row,
        sample_index=0,
        prompt_token_ids=[row + 1],
        params=params,
        seed=0,
        draft_cap=0,
        rule=GREEDY,
        max_length=1 + max_tokens,
        sampling_values=row_values(
            params, prompt_length=1, eos_token_ids=(), seed=0, engine_config=ENGINE
        ),
    )


@pytest.mark.parametrize(
    ("lengths", "most", "work_waits", "steps"),
    [
        ((3, 12), MAX_STEPS, False, 8),
        ((3, 12), MAX_STEPS, True, 3),
        ((3, 5), MAX_STEPS, False, 5),
        ((3, 5), 2, True, 2),
    ],
)
def test_when_a_burst_ends(decoder_and_model, lengths, most, work_waits, steps):
    decoder, model = decoder_and_model
    params = DecoderParams(model.params)
    requests = [request_of(row, length) for row, length in enumerate(lengths)]
    state = begin(decoder, params, requests)
    plan = dataclasses.replace(plan_for_all(decoder, most), stop_when_finished=np.bool_(work_waits))
    state, report, num_steps = decoder.burst(params, state, plan, num_speculative_tokens=0)
    assert int(num_steps) == steps
    gained = np.minimum(lengths, steps)
    assert np.asarray(report.num_committed)[:steps].sum(axis=0).tolist() == list(gained)
    finish = np.asarray(report.finish)[:steps]
    for row, length in enumerate(lengths):
        expected = [RUNNING] * steps
        if length <= steps:
            expected[length - 1] = OUT_OF_LENGTH
        assert finish[:, row].tolist() == expected
    assert np.asarray(state.cache.lengths).tolist() == list(gained)


def test_the_first_calls_of_an_executable_are_told():
    model = tiny_llama(0, vocab_size=11, num_layers=1)
    config = DecoderConfig(target=model.config, drafter=NoDrafter(), sizes=SIZES, engine=ENGINE)
    decoder, params = Decoder(config), DecoderParams(model.params)
    state = begin(decoder, params, [request_of(row, 8) for row in range(2)])
    before, told = decoder.num_warm_ups, []
    for _ in range(4):
        state, *_ = decoder.burst(params, state, plan_for_all(decoder, 2), num_speculative_tokens=0)
        told.append(decoder.num_warm_ups - before)
    assert told == [1, 2, 2, 2]
