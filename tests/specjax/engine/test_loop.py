"""The loop over a decoder of integers that knows what every page must hold."""

import dataclasses
import itertools
import types

import fake_decoder
import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
from fake_decoder import PAGE_SIZE, FakeDecoder, continuation

from specjax.config.gate import SpeculationGate
from specjax.config.sampling import SamplingParams
from specjax.decode.bucket import Bucket
from specjax.decode.sizes import PromptSizes
from specjax.engine import burst_choice, deadlines, loop, sending, timing
from specjax.engine.loop import Loop
from specjax.engine.request import Request
from specjax.policy.interface import Decision, Fixed
from specjax.types import DecoderParams


def make_request(index, prompt, output, *, draft_cap=9, **fields):
    return Request(
        prompt_index=index,
        sample_index=0,
        prompt_token_ids=prompt,
        params=SamplingParams(max_tokens=output),
        seed=0,
        draft_cap=draft_cap,
        rule=1,
        max_length=len(prompt) + output,
        sampling_values={"prompt_lengths": len(prompt)},
        **fields,
    )


def set_clock(monkeypatch, clock):
    """Has all parts of a loop read the time from `clock.perf_counter`."""
    for module in (loop, deadlines, sending, timing):
        monkeypatch.setattr(module, "time", clock)


def start(decoder, outputs, *, prompts=None, policy=None, draft_caps=None, **arguments):
    """Returns a loop and its requests, numbered from 1, of these numbers of tokens.

    Prompts are numbers of tokens, all of them the request's number, or token ids.
    """
    engine = Loop(decoder, DecoderParams(None), policy or Fixed(0), **arguments)
    prompts = prompts or [1] * len(outputs)
    draft_caps = draft_caps or [9] * len(outputs)
    requests = [
        make_request(
            index,
            [index] * prompt if isinstance(prompt, int) else prompt,
            output,
            draft_cap=draft_cap,
        )
        for index, (prompt, output, draft_cap) in enumerate(
            zip(prompts, outputs, draft_caps, strict=True), start=1
        )
    ]
    for request in requests:
        engine.add(request)
    return engine, requests


def check(engine):
    """Every page is accounted for, and no row has more than the work sent may need."""
    engine.scheduler.check()
    table = engine.scheduler.table
    for row in engine.scheduler.occupied:
        flying = [flight for flight in engine._run.flights if row in flight.rows]
        assert table.flying_most[row.index] == sum(f.growth for f in flying)
        assert table.flying_least[row.index] == sum(f.least for f in flying)
        slots = table.most[row.index] + engine.decoder.sizes.tree_slots
        assert len(engine.scheduler.pages(row)) == -(-slots // PAGE_SIZE)


def finish(engine, requests):
    """Runs to the end; every request has all of its own tokens, and no page is lost."""
    while engine.has_work:
        engine.step()
        check(engine)
    for request in requests:
        assert request.finish_reason == "length"
        assert request.output_token_ids == continuation(
            request.prompt_token_ids, request.params.max_tokens
        )
    assert all(pool.num_held == 0 for pool in engine.scheduler.pools)
    return engine


def run(decoder, outputs, **arguments):
    return finish(*start(decoder, outputs, **arguments))


@pytest.mark.parametrize("k", [0, 1, 3])
def test_first_come_first_served(k):
    decoder = FakeDecoder(rows=2)
    run(decoder, [30, 3, 7, 1, 12, 2], policy=Fixed(k))
    assert [first for new in decoder.admitted for first in new] == [1, 2, 3, 4, 5, 6]
    assert decoder.admitted[0] == {1: 0, 2: 1}


def test_priorities_come_before_arrival():
    decoder = FakeDecoder(rows=1)
    engine = Loop(decoder, DecoderParams(None), Fixed(0))
    requests = [
        make_request(index, [index], 3, priority=priority)
        for index, priority in enumerate([1, 0, 1, -2, 0], start=1)
    ]
    for request in requests:
        engine.add(request)
    finish(engine, requests)
    assert [first for new in decoder.admitted for first in new] == [4, 2, 5, 1, 3]


@pytest.mark.parametrize("k", [0, 3])
def test_preemption_when_pages_run_out(k):
    decoder = FakeDecoder(rows=3, num_pages=14)
    engine, requests = start(decoder, [40, 40, 40], prompts=[6, 6, 6], policy=Fixed(k))
    finish(engine, requests)
    # The latest goes first, and the first never.
    preempted = [request.num_preemptions for request in requests]
    assert preempted[0] == 0
    assert sum(preempted) > 0


def test_as_many_rows_are_admitted_with_drafts_as_without(monkeypatch):
    """Pages for four rows of 8 tokens beside plain bursts; drafts are accepted as often as ever."""
    monkeypatch.setattr(fake_decoder, "BURST_STEPS", 32)
    outputs, num_steps, num_rows = list(range(30, 70)), {}, {}
    for k in (0, 4):
        decoder = FakeDecoder(rows=8, num_pages=40)
        decoder.sizes = dataclasses.replace(decoder.sizes, burst_steps=32)
        engine, requests = start(decoder, outputs, prompts=[8] * 40, policy=Fixed(k))
        engine._admit()
        num_rows[k] = len(engine.scheduler.occupied)
        finish(engine, requests)
        num_steps[k] = sum(record.num_steps for record in engine.records)
    assert num_rows == {0: 4, 4: 4}
    # Three tokens per row and step are committed; with fewer rows more steps were needed.
    assert num_steps[4] < num_steps[0] / 2.5


def bursts_of(steps, monkeypatch, **fields):
    """Returns a decoder whose bursts have so many steps."""
    monkeypatch.setattr(fake_decoder, "BURST_STEPS", steps)
    decoder = FakeDecoder(**fields)
    decoder.sizes = dataclasses.replace(decoder.sizes, burst_steps=steps)
    return decoder


def test_room_for_a_few_steps_that_draft_is_kept_where_these_take_more(monkeypatch):
    """Four steps of 8 tokens, not 8 of one: 32 tokens and the root's slot, pages of four."""
    for k, num_rows in ((0, 8), (7, 3)):
        decoder = bursts_of(8, monkeypatch, rows=8, num_pages=32)
        engine, requests = start(decoder, [40] * 8, prompts=[4] * 8, policy=Fixed(k))
        engine.step()
        assert len(engine.scheduler.occupied) == num_rows
        finish(engine, requests)


def test_a_row_is_preempted_before_drafts_are_given_up():
    decoder = FakeDecoder(rows=3, num_pages=16)
    engine, requests = start(decoder, [40] * 3, prompts=[6] * 3, policy=Fixed(3))
    while not engine.num_preemptions:
        engine.step()
    # The others have room for more than the one step that there was room for.
    assert decoder.bursts[-1][1].num_steps > 1
    finish(engine, requests)
    assert {record.reason for record in engine.records} == {"fixed"}
    assert {record.num_speculative_tokens for record in engine.records} == {3}


def test_one_row_gives_up_drafts_for_prompts_that_are_fed_in_turn_with_it():
    """The prompt of 30 tokens holds 8 pages of 13; the row drafts as long as it needs five."""
    decoder = FakeDecoder(rows=2, num_pages=13, mixed_prefill=False)
    decoder.prompt_sizes = PromptSizes((4,), 1)
    engine, requests = start(decoder, [50, 1], prompts=[1, 30], policy=Fixed(3))
    while not engine.num_preemptions:
        engine.step()
    assert [record.reason for record in engine.records][-2:] == ["fixed", "pages"]
    finish(engine, requests)


def test_a_burst_knows_the_tokens_of_its_rows_when_it_begins():
    """Two rows have 4 tokens each, and gain 5 with the burst in flight."""
    engine, requests = start(FakeDecoder(rows=2), [10, 10], prompts=[4, 4])
    finish(engine, requests)
    assert [record.context_tokens for record in engine.records] == [8, 18]


class LastRowDrafts:
    """K = 3 for the last row alone."""

    max_speculative_tokens = 3
    chooses_rows = False

    def choose(self, load):
        caps = np.zeros(load.num_decoding_rows, np.int64)
        caps[-1] = 3
        return Decision(num_speculative_tokens=3, reason="test", draft_caps=caps)

    def observe(self, outcome):
        assert np.count_nonzero(outcome.asked_depth) <= 1


def test_what_rows_are_to_draft_holds_after_one_was_preempted():
    decoder = FakeDecoder(rows=4, num_pages=18)
    engine, requests = start(decoder, [40] * 4, prompts=[6] * 4, policy=LastRowDrafts())
    finish(engine, requests)
    assert engine.num_preemptions > 0
    for _, plan in decoder.bursts:
        assert np.count_nonzero(plan.draft_caps) <= 1


def test_a_burst_is_made_shorter_before_those_in_flight_are_read_back(monkeypatch):
    """Pages for 16 more steps of two rows, beside 32 in flight."""
    decoder = bursts_of(32, monkeypatch, rows=2, num_pages=28)
    engine, requests = start(decoder, [100, 100])
    sent = []
    for _ in range(2):
        engine.step()
        sent += [flight.num_steps for flight in engine._run.flights]
    assert sent == [32, 16]
    finish(engine, requests)


def test_a_preempted_request_finds_its_pages_again():
    decoder = FakeDecoder(rows=2, num_pages=12)
    engine, requests = start(decoder, [24, 40], prompts=[5, 5])
    finish(engine, requests)
    assert requests[1].num_preemptions == 1
    fed = sum(sum(counts) for _, _, counts in decoder.prefills)
    fed += sum(sum(counts) for _, _, counts in decoder.mixed_calls)
    assert fed < 4 + 4 + 12  # and not all that it had again


def test_a_preempted_request_comes_before_those_that_arrived_later():
    decoder = FakeDecoder(rows=2, num_pages=12)
    engine, requests = start(decoder, [24, 40, 3], prompts=[5, 5, 5])
    finish(engine, requests)
    order = [first for new in decoder.admitted for first in new]
    assert order == [1, 2, 2, 3]


def test_a_prompt_of_whole_pages_that_was_seen_before():
    """Its last token is fed again: it is the root, which says what follows."""
    decoder = FakeDecoder(rows=1)
    engine, requests = start(decoder, [9], prompts=[[1, 2, 3, 4, 5, 6, 7, 8]])
    finish(engine, requests)
    again = make_request(2, [1, 2, 3, 4, 5, 6, 7, 8], 9)
    engine.add(again)
    finish(engine, [again])
    assert [counts for _, _, counts in decoder.prefills] == [[7], [3]]


def test_a_request_that_waits_for_pages_is_not_overtaken():
    decoder = FakeDecoder(rows=3, num_pages=3)
    run(decoder, [11, 5, 1])  # the last would fit beside the first
    assert [first for new in decoder.admitted for first in new] == [1, 2, 3]
    assert decoder.admitted[0] == {1: 0}


def test_samples_of_one_prompt_share_its_pages():
    prompt = list(range(1, 40))
    decoder = FakeDecoder(rows=4, num_pages=24)
    engine, requests = start(decoder, [4] * 4, prompts=[prompt] * 4)
    engine.step()  # the first is fed; the others wait for its pages
    assert len(engine.scheduler.occupied) == 1
    engine.step()
    assert len(engine.scheduler.occupied) == 4
    # 9 full pages once, and one of its own for each row.
    assert engine.scheduler.pools[0].num_held <= 9 + 4 * 3
    finish(engine, requests)
    fed = [sum(counts) for _, _, counts in decoder.prefills]
    assert sum(fed) == 38 + 3 * 2


def test_a_prompt_that_was_seen_before_is_not_fed_again():
    decoder = FakeDecoder(rows=1, num_pages=32)
    prompt = list(range(1, 30))
    engine, requests = start(decoder, [6], prompts=[prompt])
    finish(engine, requests)
    follow_up = [*prompt, *requests[0].output_token_ids, 7, 8, 9]
    second = make_request(2, follow_up, 3)
    engine.add(second)
    finish(engine, [second])
    # 34 tokens had their keys and values written: 8 full pages, and a part of one.
    assert [counts for _, _, counts in decoder.prefills] == [[28], [37 - 34]]


def test_without_prefix_caching_nothing_is_shared():
    prompt = list(range(1, 30))
    decoder = FakeDecoder(rows=2, prefix_caching=False)
    run(decoder, [6] * 4, prompts=[prompt] * 4, policy=Fixed(2))
    fed = sum(sum(counts) for _, _, counts in decoder.prefills)
    fed += sum(sum(counts) for _, _, counts in decoder.mixed_calls)
    assert fed == 4 * 28


def test_shards_are_filled_evenly_and_by_their_own_pages():
    decoder = FakeDecoder(rows=4, num_pages=16, num_shards=2)
    run(decoder, [2] * 4, prompts=[9, 3, 3, 3])
    # Shard 1 has most pages until its rows are taken.
    first = {key: row for new in decoder.admitted for key, row in new.items()}
    assert [first[n] for n in (1, 2, 3, 4)] == [0, 2, 3, 1]


def test_a_shard_short_of_pages_preempts_its_own_rows():
    """The last request is in the other shard, whose pages suffice for both of its rows."""
    decoder = FakeDecoder(rows=4, num_pages=20, num_shards=2)
    engine, requests = start(decoder, [20, 10, 20, 18], prompts=[4, 9, 4, 1])
    engine.step()
    assert [engine._run.row_of(request).shard for request in requests] == [0, 1, 0, 1]
    finish(engine, requests)
    assert [request.num_preemptions > 0 for request in requests] == [False, False, True, False]


@pytest.mark.parametrize(
    ("prompt", "chunks"),
    [
        (1, []),
        (2, [(64, 1)]),
        (128, [(64, 64), (64, 63)]),
        (240, [(256, 239)]),
        (600, [(256, 256), (256, 256), (64, 64), (64, 23)]),
    ],
)
def test_a_prompt_takes_the_bucket_that_costs_least_per_token(prompt, chunks):
    decoder = FakeDecoder(rows=2, num_pages=256)
    run(decoder, [1], prompts=[prompt])
    assert decoder.prefills == [(bucket, [0, 2], [count, 0]) for bucket, count in chunks]


def test_prefill_of_several_rows():
    decoder, reports = FakeDecoder(rows=10, num_pages=256), []
    on_progress = lambda *report: reports.append(report)
    prompts = [70, 10, 200, 1, 5, 5, 5, 5, 5, 5]
    run(decoder, [1] * 10, prompts=prompts, on_progress=on_progress)
    assert decoder.prefills == [
        (256, [0, 1, 2, *[10] * 5], [69, 9, 178, *[0] * 5]),
        (64, [2, 4, 5, 6, 7, 8, 9, 10], [21, 4, 4, 4, 4, 4, 4, 0]),
    ]
    assert reports == [("prefill", done, 301) for done in (0, 256, 301)]


def test_prefill_gives_each_shard_places_and_row_ids_of_its_own():
    decoder = FakeDecoder(rows=4, num_shards=2)
    run(decoder, [1, 1, 1], prompts=[10, 5, 4])
    assert decoder.admitted == [{1: 0, 2: 2, 3: 3}]
    assert decoder.prefills == [(64, [0, 2, 0, 1], [9, 0, 4, 3])]


def test_new_prompts_are_fed_beside_rows_that_decode():
    decoder = FakeDecoder(rows=2, num_pages=128)
    engine, requests = start(decoder, [60, 3, 5], prompts=[2, 2, 150], policy=Fixed(2))
    finish(engine, requests)
    # The third prompt's 149 tokens, while the first row goes on drafting.
    assert [sum(counts) for _, _, counts in decoder.mixed_calls] == [64, 64, 21]
    assert {k for k, _, _ in decoder.mixed_calls} == {2}
    assert len(decoder.prefills) == 1


def test_where_pages_are_short_beside_prompts_drafts_go_first_and_then_a_row():
    """A long prompt is fed in many steps, in which the others outgrow what was kept for them."""
    decoder = FakeDecoder(rows=3, num_pages=50, prefix_caching=False)
    decoder.prompt_sizes = PromptSizes((4,), 16)
    prompts = [4, 4, 120]
    engine, requests = start(decoder, [70, 70, 9], prompts=prompts, policy=Fixed(3))
    finish(engine, requests)
    short = [r for r in engine.records if r.reason == "pages" and r.prompt_tokens]
    assert short
    assert {r.num_speculative_tokens for r in short} == {0}
    assert [request.num_preemptions for request in requests] == [0, 0, 1]
    assert {k for k, _, _ in decoder.mixed_calls} == {0, 3}


def test_under_invariant_numerics_prompts_have_calls_of_their_own():
    decoder = FakeDecoder(rows=2, num_pages=128, numerics="invariant")
    run(decoder, [60, 3, 5], prompts=[2, 2, 150])
    assert not decoder.mixed_calls


def test_a_long_prompt_does_not_hold_up_the_batch_it_came_with():
    decoder = FakeDecoder(rows=2, num_pages=600, pages_per_row=600)
    run(decoder, [30, 3], prompts=[2, 2000])
    assert decoder.mixed_calls


def test_plain_decoding_once_nobody_wants_drafts():
    decoder = FakeDecoder(rows=2)
    run(decoder, [60, 12], draft_caps=[0, 1], policy=Fixed(2))
    depths = [k for k, _ in decoder.bursts]
    assert depths == sorted(depths, reverse=True)
    assert depths[0] == 2
    assert depths[-1] == 0


def test_a_burst_ends_with_a_row_only_while_something_waits():
    decoder = FakeDecoder(rows=2)
    engine, requests = start(decoder, [9, 2, 1, 8])
    finish(engine, requests)
    stops = [bool(plan.stop_when_finished) for _, plan in decoder.bursts]
    assert stops == sorted(stops, reverse=True)
    assert stops[0]
    assert not stops[-1]


def test_few_rows_run_in_a_small_bucket():
    decoder = FakeDecoder(rows=4, row_buckets=(1, 2))
    run(decoder, [3, 3, 12, 30], policy=Fixed(1))
    assert decoder.num_rows_run[0] == 4
    assert decoder.num_rows_run == sorted(decoder.num_rows_run, reverse=True)
    assert set(decoder.num_rows_run) == {4, 2, 1}


def test_buckets_are_of_all_shards_together():
    decoder = FakeDecoder(rows=8, num_shards=2, row_buckets=(2, 4))
    run(decoder, [3, 3, 3, 30, 9], policy=Fixed(1))
    assert set(decoder.num_rows_run) <= {8, 4, 2}
    assert {8, 2} <= set(decoder.num_rows_run)


def test_the_next_burst_is_sent_before_the_last_is_read():
    decoder = FakeDecoder(rows=1)
    engine, requests = start(decoder, [12])
    moved = [engine.step() for _ in range(4)]
    assert [bool(each) for each in moved] == [False, True, True, True]
    assert len(decoder.bursts) == 3
    # 5 and 5 steps, and no more than are left.
    assert [int(plan.num_steps) for _, plan in decoder.bursts] == [5, 5, 2]
    finish(engine, requests)


def test_an_aborted_request_frees_its_pages_at_once():
    decoder = FakeDecoder(rows=2, num_pages=12)
    engine, requests = start(decoder, [30, 30, 30], prompts=[5, 5, 5])
    for _ in range(3):
        engine.step()
    held = engine.scheduler.pools[0].num_held
    assert engine.abort(requests[0])
    assert engine.scheduler.pools[0].num_held < held
    assert requests[0].finish_reason == "abort"
    assert not engine.abort(requests[0])
    finish(engine, requests[1:])
    assert requests[0].output_token_ids == continuation(
        requests[0].prompt_token_ids, len(requests[0].output_token_ids)
    )


def test_bursts_are_short_while_a_row_of_theirs_is_streamed():
    """Row 2 is streamed: alone, beside batch work, until it ends, until it is left."""
    found = {}
    for name, outputs, streamed, left_after in (
        ("nobody", [30, 30], (), None),
        ("all", [10, 10], (1, 2), None),
        ("one of two", [31, 9], (2,), None),
        ("left", [31, 60], (2,), 3),
    ):
        decoder = FakeDecoder(rows=2)
        engine, requests = start(decoder, outputs)
        for request in requests:
            request.is_streamed = request.prompt_index in streamed
        for count in itertools.count(1):
            engine.step()
            if count == left_after:
                assert engine.abort(requests[1])
            if not engine.has_work:
                break
        assert requests[0].output_token_ids == continuation([1], outputs[0])
        found[name] = [int(plan.num_steps) for _, plan in decoder.bursts]
    short = burst_choice.STREAMED_STEPS
    assert short == 2
    assert found == {
        "nobody": [5] * 6,
        "all": [2] * 5,
        "one of two": [2] * 5 + [5] * 4 + [1],
        "left": [2] * 3 + [5] * 5,
    }


def test_a_streams_burst_is_no_longer_than_asked_for():
    for asked, expected in ((1, 1), (4, 2), (None, 2)):
        decoder = FakeDecoder(rows=1)
        engine, requests = start(decoder, [30])
        requests[0].is_streamed = True
        engine.step(asked)
        assert int(decoder.bursts[0][1].num_steps) == expected, asked


def test_a_waiting_request_can_be_aborted():
    engine, requests = start(FakeDecoder(rows=1), [9, 9, 9])
    engine.step()
    assert engine.abort(requests[1])
    finish(engine, [requests[0], requests[2]])
    assert requests[1].output_token_ids == []


def test_deadlines(monkeypatch):
    decoder = FakeDecoder(rows=1)
    clock = types.SimpleNamespace(perf_counter=lambda: decoder.now_s)
    set_clock(monkeypatch, clock)
    engine = Loop(decoder, DecoderParams(None), Fixed(0))
    requests = [
        make_request(1, [1], 40, deadline=12.0),
        make_request(2, [2], 5, deadline=3.0),
        make_request(3, [3], 5, deadline=99.0),
    ]
    for request in requests:
        engine.add(request)
    while engine.has_work:
        engine.step()
    assert [request.finish_reason for request in requests] == [
        "deadline",
        "deadline",
        "length",
    ]
    assert 0 < len(requests[0].output_token_ids) < 40
    assert requests[1].output_token_ids == []


def test_the_policy_sees_the_load_and_what_came_of_it(monkeypatch):
    decoder = FakeDecoder(rows=2)
    clock = types.SimpleNamespace(perf_counter=lambda: decoder.now_s)
    set_clock(monkeypatch, clock)
    loads, outcomes = [], []
    policy = types.SimpleNamespace(
        max_speculative_tokens=1,
        choose=lambda load: loads.append(load) or Fixed(1).choose(load),
        observe=outcomes.append,
    )
    engine = run(decoder, [12, 4, 3], policy=policy)
    first, last = loads[0], loads[-1]
    assert (first.num_decoding_rows, first.num_waiting) == (2, 1)
    assert first.row_buckets == [2]
    assert first.draft_caps.tolist() == [9, 9]
    assert first.num_context_tokens == 1 + 1
    assert last.num_waiting == 0
    # Who waits takes the place of who ends: then it does not matter when rows do.
    assert len(first.tokens_left) == 0
    assert first.num_steps_left == burst_choice.ENDLESS
    alone = [load for load in loads if not load.num_waiting]
    assert all(len(load.tokens_left) == load.num_decoding_rows for load in alone)
    assert all(load.num_steps_left == max(load.tokens_left) for load in alone)
    assert {min(load.tokens_left) > 0 for load in alone} == {True}
    assert len({number for load in loads for number in load.requests}) == 3
    tokens = sum(int(outcome.num_committed.sum()) for outcome in outcomes)
    beside = sum(r.measured_tokens for r in engine.records if r.reason == "prompts")
    assert tokens + beside == 12 + 4 + 3
    assert all(outcome.bucket == Bucket(2, 1) for outcome in outcomes)
    # Seconds without those of compiling.
    assert {outcome.seconds for outcome in outcomes} <= {None, 2.0, 4.0}
    assert engine.run_s == 2.0 * len(decoder.bursts)


def test_the_first_bursts_of_an_executable_are_no_measurements(monkeypatch):
    class Warming(FakeDecoder):
        def burst(self, *arguments, **named):
            self.num_warm_ups += len(self.bursts) < 2
            return super().burst(*arguments, **named)

    decoder, outcomes = Warming(rows=1), []
    set_clock(monkeypatch, types.SimpleNamespace(perf_counter=lambda: decoder.now_s))
    policy = types.SimpleNamespace(
        max_speculative_tokens=0, choose=Fixed(0).choose, observe=outcomes.append
    )
    run(decoder, [5 * fake_decoder.BURST_STEPS], policy=policy)
    assert len(outcomes) == 5
    assert outcomes[0].seconds is outcomes[1].seconds is None
    # A clock that is read in another thread may find two bursts done at once.
    assert any(outcome.seconds for outcome in outcomes[2:])


@pytest.mark.parametrize(
    "sizes",
    [{"num_pages": 64, "pages_per_row": 2}, {"num_pages": 4, "num_shards": 2}],
    ids=["row", "pool of a shard"],
)
def test_a_request_too_long_is_refused(sizes):
    start(FakeDecoder(**sizes), [5], prompts=[3])
    with pytest.raises(ValueError, match="need 9 tokens of context, the pool holds 8"):
        start(FakeDecoder(**sizes), [5], prompts=[4])


@pytest.mark.full
@hypothesis.settings(max_examples=150, deadline=None)
@hypothesis.given(data=st.data())
def test_random_loads_lose_and_mix_up_nothing(data):
    """Prompts with common beginnings, too few pages, aborts: after every step all pages are
    counted."""
    draw = lambda strategy: data.draw(strategy)
    num_shards = draw(st.sampled_from([1, 1, 2]))
    # The longest prompt takes one chunk, or several.
    longest, least_pages = draw(st.sampled_from([(20, 9), (150, 45), (400, 110)]))
    decoder = FakeDecoder(
        rows=num_shards * draw(st.integers(1, 3)),
        num_pages=num_shards * (least_pages + draw(st.integers(0, 15))),
        num_shards=num_shards,
        tree_slots=draw(st.sampled_from([0, 3])),
        prefix_caching=draw(st.booleans()),
        mixed_prefill=draw(st.booleans()),
        row_buckets=draw(st.sampled_from([(), (2,), (1, 2)])),
        max_rows=99,
        gate=draw(st.sampled_from(["current", "worst_case"])),
    )
    limit = st.sampled_from([None, 10, 40, 200])
    engine = Loop(
        decoder,
        DecoderParams(None),
        Fixed(draw(st.integers(0, 3))),
        gate=SpeculationGate(max_tokens=draw(limit)),
        most_tokens=draw(limit),
    )
    beginnings = [list(range(length)) for length in (1, 5, 9, 14, longest)]
    requests, aborted = [], []

    def arrive(count):
        slots = least_pages * PAGE_SIZE - decoder.sizes.tree_slots
        for _ in range(count):
            # Some go on with the text of a request that has ended, or was aborted.
            texts = [r.token_ids for r in requests if len(r.token_ids) < slots - 4]
            prompt = draw(st.sampled_from([*beginnings, *texts]))[:]
            prompt += draw(st.lists(st.integers(0, 2), max_size=4))
            output = draw(st.integers(1, min(slots - len(prompt), 60)))
            requests.append(
                make_request(len(requests), prompt, output, priority=draw(st.integers(0, 1)))
            )
            engine.add(requests[-1])

    arrive(draw(st.integers(1, 5)))
    for _ in range(3000):
        if not engine.has_work:
            break
        engine.step(draw(st.sampled_from([None, None, 1, 2])))
        check(engine)
        event = draw(st.sampled_from(["", "", "", "", "arrive", "abort"]))
        if event == "arrive" and len(requests) < 12:
            arrive(1)
        if event == "abort":
            victim = draw(st.sampled_from(requests))
            if engine.abort(victim):
                aborted.append(victim)
    assert not engine.has_work, "it goes round in circles"
    if decoder.engine_config.gate == "worst_case":
        assert engine.num_preemptions == 0
    assert all(pool.num_held == 0 for pool in engine.scheduler.pools)
    for request in requests:
        expected = continuation(request.prompt_token_ids, request.params.max_tokens)
        if request in aborted:
            expected = expected[: len(request.output_token_ids)]
        assert request.output_token_ids == expected


def test_the_prompt_that_was_to_be_fed_is_preempted():
    decoder = FakeDecoder(rows=3, num_pages=505, pages_per_row=1024)
    run(decoder, [120, 120, 3], prompts=[2, 2, 2000])


def test_bursts_and_prompts_take_turns_where_they_do_not_mix():
    decoder = FakeDecoder(rows=2, num_pages=600, pages_per_row=600, mixed_prefill=False)
    engine, _ = start(decoder, [40, 2, 3], prompts=[2, 2, 1500])
    finished = []
    while engine.has_work:
        finished += [r.prompt_index for r in engine.step() if r.is_finished]
    assert finished == [2, 1, 3]


def test_prompts_are_fed_by_priority():
    decoder = FakeDecoder(rows=3, num_pages=900, pages_per_row=900)
    engine = Loop(decoder, DecoderParams(None), Fixed(0))
    requests = [
        make_request(index, [index] * length, output, priority=priority)
        for index, (length, output, priority) in enumerate(
            [(2, 200, 5), (2000, 3, 9), (70, 3, 0)], start=1
        )
    ]
    engine.add(requests[0])
    for _ in range(2):
        engine.step()
    engine.add(requests[1])
    engine.step()
    engine.add(requests[2])
    for _ in range(6):
        engine.step()
    assert requests[2].is_finished
    finish(engine, requests)


def test_others_pass_those_who_wait_for_pages_to_share():
    decoder = FakeDecoder(rows=4, num_pages=2000, pages_per_row=900)
    engine, requests = start(decoder, [3, 3, 3], prompts=[[7] * 1500, [7] * 1500, [1, 2]])
    engine.step()
    assert [row.request.prompt_index for row in engine.scheduler.occupied] == [1, 3]
    finish(engine, requests)


def test_a_shard_without_pages_holds_nobody_up():
    decoder = FakeDecoder(rows=4, num_pages=24, num_shards=2)
    engine, requests = start(decoder, [4, 4], prompts=[list(range(36))] * 2)
    engine.step()
    engine.step()
    assert {row.shard for row in engine.scheduler.occupied} == {0, 1}
    finish(engine, requests)


def test_block_tables_are_copies():
    """What was sent must not change when the host goes on planning."""
    decoder = FakeDecoder(rows=1)
    engine, requests = start(decoder, [30])
    engine.step()
    table = decoder.bursts[0][1].block_table
    before = table.copy()
    finish(engine, requests)
    np.testing.assert_array_equal(table, before)


def test_who_has_most_left_is_the_most_urgent():
    ends, tokens = np.array([100, 60, 40]), np.array([20, 20, 39])
    np.testing.assert_allclose(burst_choice.urgency(ends, tokens), [1, 0.25, 0.01])
    assert burst_choice.urgency(np.array([100, 0, 40]), tokens) == ()  # one is not known
