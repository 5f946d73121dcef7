"""The engine's loop over a decoder of numpy arrays: admission, pages, prefill, bursts."""

import types

import numpy as np
import pytest

from specjax.config import EngineConfig, SamplingParams
from specjax.decode.decoder import Sizes
from specjax.engine import loop
from specjax.engine.loop import Engine
from specjax.engine.request import Request
from specjax.engine.speculation_policy import Fixed, Load
from specjax.types import OUT_OF_LENGTH, StepInfo

PAGE_SIZE = 4
BURST_STEPS = 5


class FakeDecoder:
    """Keeps rows and pages as the device does; a step accepts every draft.

    The token at a position is 1000 times the prompt's first one, plus the position.
    """

    def __init__(self, *, rows=2, num_pages=64, num_shards=1, pages_per_row=256):
        self.sizes = Sizes(
            rows=rows,
            page_size=PAGE_SIZE,
            num_pages=num_pages,
            pages_per_row=pages_per_row,
            burst_steps=BURST_STEPS,
        )
        self.num_shards = num_shards
        self.engine_config = EngineConfig()
        self.compile_s = self.now_s = 0.0
        self.length, self.end, self.first, self.prompt = np.zeros((4, rows), int)
        self.is_active = np.zeros(rows, bool)
        self.admitted, self.prefills, self.bursts = [], [], []
        self.version = 0  # of the state: an old one has been donated

    def place_params(self, params):
        return params

    def init(self):
        return self.version

    def _next(self, state):
        assert state == self.version
        self.version += 1
        return self.version

    def exchange(self, state, release_mask, admission):
        assert not np.any(admission.mask & (self.end > 0) & ~release_mask)
        new = admission.mask
        self.end[release_mask] = 0
        self.end[new] = admission.max_lengths[new]
        self.first[new] = admission.history[new, 0]
        self.prompt[new] = admission.sampling.prompt_lengths[new]
        self.length[new] = 0
        if new.any():
            rows = np.flatnonzero(new).tolist()
            self.admitted.append(dict(zip(self.first[new].tolist(), rows)))
        held = -(-self.end.reshape(self.num_shards, -1) // PAGE_SIZE)
        pages = self.sizes.num_pages // self.num_shards
        return self._next(state), held.sum(axis=1) > pages

    def prefill(self, params, state, row_ids, counts, *, max_tokens_per_row):
        self.prefills.append((max_tokens_per_row, row_ids.tolist(), counts.tolist()))
        by_shard = lambda values: values.reshape(self.num_shards, -1)
        for own, ids, added in zip(*map(by_shard, (self.length, row_ids, counts))):
            assert np.all((ids == own.size) == (added == 0))
            own[ids[added > 0]] += added[added > 0]
        return self._next(state)

    def burst(self, params, state, plan, *, num_speculative_tokens):
        width = num_speculative_tokens + 1
        self.bursts.append((num_speculative_tokens, plan))
        self.now_s += 2.0
        if len(self.bursts) == 1:
            self.now_s, self.compile_s = self.now_s + 7.0, self.compile_s + 7.0
        assert np.all(self.length[plan.activate] == self.prompt[plan.activate] - 1)
        self.is_active |= plan.activate
        assert np.any(self.is_active), "the engine goes round in circles"
        count, finish = np.zeros((2, BURST_STEPS, self.sizes.rows), np.int32)
        token_ids = np.zeros((*count.shape, width), np.int32)
        for num_steps in range(1, plan.num_steps + 1):
            step = num_steps - 1
            room = np.where(self.is_active, self.end - self.length - 1, 0)
            count[step] = np.minimum(room, width)
            place = self.length[:, None] + 1 + np.arange(width)
            token_ids[step] = 1000 * self.first[:, None] + place
            self.length += count[step]
            has_ended = self.is_active & (count[step] == room)
            finish[step, has_ended] = OUT_OF_LENGTH
            self.is_active &= ~has_ended
            is_cut = plan.stop_when_finished and np.any(has_ended)
            if is_cut or not np.any(self.is_active):
                break
        drafted = np.minimum(count, width - 1)
        info = StepInfo(
            token_ids=token_ids,
            num_committed=count,
            num_accepted=drafted,
            num_drafted=drafted,
            draft_depth=drafted,
            finish=finish,
            logprobs=None,
        )
        return self._next(state), info, np.int32(num_steps)


def start(decoder, outputs, *, prompts=None, policy=None, draft_caps=None, **arguments):
    """Returns an engine and its requests, numbered from 1, of these numbers of tokens."""
    engine = Engine(decoder, None, policy or Fixed(0), **arguments)
    prompts = prompts or [1] * len(outputs)
    draft_caps = draft_caps or [9] * len(outputs)
    requests = [
        Request(
            prompt_index=index,
            sample_index=0,
            prompt_token_ids=[index] * prompt,
            params=SamplingParams(max_tokens=output),
            seed=0,
            draft_cap=draft_cap,
            rule=1,
            max_length=prompt + output,
            sampling_values={"prompt_lengths": prompt},
        )
        for index, (prompt, output, draft_cap) in enumerate(
            zip(prompts, outputs, draft_caps, strict=True), start=1
        )
    ]
    for request in requests:
        engine.add(request)
    return engine, requests


def run(decoder, outputs, **arguments):
    """Runs to the end; every request has all of its own tokens."""
    engine, requests = start(decoder, outputs, **arguments)
    for _ in engine.run():
        pass
    for request in requests:
        first, size = request.prompt_index, len(request.prompt_token_ids)
        expected = range(1000 * first + size, 1000 * first + request.max_length)
        assert request.output_token_ids == list(expected)
        assert request.finish_reason == "length"
    return engine


@pytest.mark.parametrize("k", [0, 1, 3])
def test_first_come_first_served(k):
    decoder = FakeDecoder(rows=2)
    engine = run(decoder, [30, 3, 7, 1, 12, 2], policy=Fixed(k))
    assert [first for new in decoder.admitted for first in new] == [1, 2, 3, 4, 5, 6]
    assert decoder.admitted[0] == {1: 0, 2: 1}
    assert not engine.has_work


def test_pages_of_ended_rows_return():
    decoder = FakeDecoder(rows=3, num_pages=5)
    run(decoder, [4, 5, 6, 7] * 5)  # each takes 2 of the 5
    assert max(map(len, decoder.admitted)) == 2


def test_a_request_that_waits_for_pages_is_not_overtaken():
    decoder = FakeDecoder(rows=3, num_pages=4)
    run(decoder, [9, 5, 1])  # 3, 2 and 1 pages
    assert decoder.admitted == [{1: 0}, {2: 0, 3: 1}]


def test_shards_are_filled_evenly_and_by_their_own_pages():
    decoder = FakeDecoder(rows=4, num_pages=16, num_shards=2)
    run(decoder, [11, 3, 3, 3, 27])  # 3, 1, 1, 1 and 7 of a shard's 8 pages
    # Shard 1 has most pages until its rows are taken.
    assert decoder.admitted == [{1: 0, 2: 2, 3: 3, 4: 1}, {5: 2}]


@pytest.mark.parametrize(
    ("prompt", "chunks"),
    [
        (1, []),
        (2, [(64, 1)]),
        (128, [(64, 64), (64, 63)]),
        (129, [(256, 128)]),
        (600, [(256, 256), (256, 256), (64, 64), (64, 23)]),
    ],
)
def test_prefill_of_one_row_is_wide_where_it_is_long(prompt, chunks):
    decoder = FakeDecoder(rows=2, num_pages=256)
    run(decoder, [1], prompts=[prompt])
    assert decoder.prefills == [(width, [0], [count]) for width, count in chunks]


def test_prefill_of_several_rows():
    decoder, reports = FakeDecoder(rows=10, num_pages=256), []
    on_progress = lambda *report: reports.append(report)
    prompts = [70, 10, 200, 1, 5, 5, 5, 5, 5, 5]
    run(decoder, [1] * 10, prompts=prompts, on_progress=on_progress)
    assert decoder.prefills == [
        (64, [0, 1, 2, 4, 5, 6, 7, 8], [64, 9, 64, 4, 4, 4, 4, 4]),
        (64, [0, 2, 9, 10, 10, 10, 10, 10], [5, 64, 4, 0, 0, 0, 0, 0]),
        (64, [2], [64]),
        (64, [2], [7]),
    ]
    assert reports == [("prefill", done, 301) for done in (0, 157, 230, 294, 301)]


def test_prefill_gives_each_shard_places_and_row_ids_of_its_own():
    decoder = FakeDecoder(rows=4, num_shards=2)
    run(decoder, [1, 1, 1], prompts=[10, 5, 4])
    assert decoder.admitted == [{1: 0, 2: 2, 3: 3}]
    assert decoder.prefills == [(64, [0, 2, 0, 1], [9, 0, 4, 3])]


def test_plain_decoding_once_nobody_wants_drafts():
    decoder = FakeDecoder(rows=2)
    run(decoder, [60, 30], draft_caps=[0, 1], policy=Fixed(2))
    assert [k for k, _ in decoder.bursts] == [2, 2, 0, 0, 0, 0, 0, 0]


def test_a_burst_ends_with_a_row_only_while_something_waits():
    decoder = FakeDecoder(rows=2)
    engine, _ = start(decoder, [9, 2, 1, 8])
    bursts = engine.run(max_burst_steps=3)
    moved = [[request.prompt_index for request in burst] for burst in bursts]
    assert moved == [[1, 2], [1, 3], [1, 4], [1, 4], [4]]
    plans = [plan for _, plan in decoder.bursts]
    stops = [bool(plan.stop_when_finished) for plan in plans]
    assert stops == [True, True, False, False, False]
    assert {int(plan.num_steps) for plan in plans} == {3}
    activated = [np.flatnonzero(plan.activate).tolist() for plan in plans]
    assert activated == [[0, 1], [1], [1], [], []]


def test_the_policy_sees_the_load_and_what_came_of_it(monkeypatch):
    decoder = FakeDecoder(rows=2)
    clock = types.SimpleNamespace(perf_counter=lambda: decoder.now_s)
    monkeypatch.setattr(loop, "time", clock)
    loads, outcomes = [], []
    policy = types.SimpleNamespace(
        choose=lambda load: loads.append(load) or 1,
        observe=lambda *outcome: outcomes.append(outcome),
    )
    engine = run(decoder, [12, 4, 3], policy=policy)
    assert loads == [
        Load(num_decoding_rows=2, num_waiting=1),
        Load(num_decoding_rows=2, num_waiting=0),
    ]
    # K, steps, tokens, and seconds without those of compiling.
    assert outcomes == [(1, 2, 8, 2.0), (1, 4, 11, 2.0)]
    assert engine.run_s == 4.0


@pytest.mark.parametrize(
    "sizes",
    [{"num_pages": 64, "pages_per_row": 2}, {"num_pages": 4, "num_shards": 2}],
    ids=["row", "pool of a shard"],
)
def test_a_request_too_long_is_refused(sizes):
    start(FakeDecoder(**sizes), [5], prompts=[3])
    with pytest.raises(ValueError, match="need 9 tokens of context, the pool holds 8"):
        start(FakeDecoder(**sizes), [5], prompts=[4])
