"""New weights while rows run: which keys and values are whose, over a decoder of integers."""

import random

import pytest
from fake_decoder import NOTHING, VOCAB, FakeDecoder, mix
from test_loop import check, make_request

from specjax.engine.lineage import CacheFill, Lineage
from specjax.engine.loop import Loop
from specjax.policy.interface import Fixed
from specjax.types import DecoderParams


def mix_under(version, number, token):
    return mix(number, token + 1000 * version)


class VersionedDecoder(FakeDecoder):
    """Its weights are a number, and what a slot holds depends on it, and on the slot before."""

    weights = 0

    def mix(self, number, token):
        return mix_under(self.weights, number, token)

    def _check(self, table, row):
        pass  # the test replays the tokens instead

    def prefill(self, params, *arguments, **options):
        self.weights = params.target
        return super().prefill(params, *arguments, **options)

    def mixed(self, params, *arguments, **options):
        self.weights = params.target
        return super().mixed(params, *arguments, **options)

    def burst(self, params, *arguments, **options):
        self.weights = params.target
        return super().burst(params, *arguments, **options)


def replayed(request):
    """Returns the tokens of a request that its lineage gives, one by one and without pages."""
    tokens, held = list(request.prompt_token_ids), []
    num_tokens = len(request.output_token_ids)
    fills = dict(request.lineage.fills)
    assert all(count <= num_tokens for count in fills)
    for place, version in enumerate(request.lineage.versions(0, num_tokens)):
        if place in fills:
            held = []
            for token in tokens[:-1]:
                held.append(mix_under(fills[place], held[-1] if held else NOTHING, token))
        held.append(mix_under(version, held[-1] if held else NOTHING, tokens[-1]))
        tokens.append(held[-1] % VOCAB)
    return tokens[len(request.prompt_token_ids) :]


def begin(decoder, prompts, output=30, policy=None):
    """Returns a loop under weights 0, and its requests."""
    engine = Loop(decoder, DecoderParams(0), policy or Fixed(0))
    requests = [make_request(i, prompt, output) for i, prompt in enumerate(prompts)]
    for request in requests:
        engine.add(request)
    return engine, requests


def update(engine, version, **options):
    engine.take_params(DecoderParams(version), version=version, **options)
    check(engine)


def step_until(engine, is_so):
    while not is_so():
        engine.step()
        check(engine)


def finish(engine, requests):
    while engine.has_work:
        engine.step()
        check(engine)
    for request in requests:
        assert request.output_token_ids == replayed(request)
    assert all(pool.num_held == 0 for pool in engine.scheduler.pools)


def versions(request):
    return request.lineage.versions(0, len(request.output_token_ids))


@pytest.mark.parametrize("k", [0, 3])
@pytest.mark.parametrize("recomputes", [False, True])
def test_a_row_that_decodes_goes_on_under_new_weights(k, recomputes):
    engine, (request,) = begin(VersionedDecoder(rows=1), [[1, 2, 3]], policy=Fixed(k))
    step_until(engine, lambda: request.output_token_ids)
    num_read, num_sent = len(request.output_token_ids), len(engine._run.flights)
    assert num_sent == 1
    update(engine, 1, recomputes=recomputes)
    engine.step()
    num_of_old = len(request.output_token_ids)
    assert num_of_old > num_read  # the burst in flight
    assert set(versions(request)) == {0}
    finish(engine, [request])
    assert versions(request) == [0] * num_of_old + [1] * (30 - num_of_old)
    recomputed = [CacheFill(num_of_old, 1)] if recomputes else []
    assert request.lineage.fills == [CacheFill(0, 0), *recomputed]
    assert request.num_preemptions == 0


@pytest.mark.parametrize("k", [0, 3])
def test_weights_that_change_after_every_step_hold_nothing_up(k):
    """A prompt that is fed whole is not fed again before its first token."""
    decoder = VersionedDecoder(rows=2, num_pages=64)
    engine, requests = begin(decoder, [[1, 2, 3], [4] * 9, [5]], output=12, policy=Fixed(k))
    for version in range(1, 60):
        engine.step()
        if not engine.has_work:
            break
        update(engine, version)
    assert not engine.has_work
    finish(engine, requests)
    assert requests[0].lineage.fills == [CacheFill(0, 0)]
    assert versions(requests[0])[0] == 1  # drawn a step after the prompt was fed


def test_prompts_that_wait_or_are_fed_in_part_start_under_the_new_weights():
    prompts = [[1] * 5, [2] * 400, [3] * 5]
    engine, requests = begin(VersionedDecoder(rows=2, num_pages=256), prompts)
    engine.step()
    assert not any(request.output_token_ids for request in requests)
    assert engine.num_prefilled
    update(engine, 1)
    finish(engine, requests)
    fed_whole, *others = requests
    assert fed_whole.lineage.fills == [CacheFill(0, 0)]
    for request in others:
        assert request.lineage.fills == [CacheFill(0, 1)]
        assert set(versions(request)) == {1}


def test_weights_that_no_step_ran_under_draw_nothing():
    engine, (request,) = begin(VersionedDecoder(rows=1), [[1, 2]])
    step_until(engine, lambda: request.output_token_ids)
    update(engine, 1)
    update(engine, 2, recomputes=True)
    update(engine, 3)
    finish(engine, [request])
    assert set(versions(request)) == {0, 3}
    assert [fill.params_version for fill in request.lineage.fills] == [0, 3]


def test_pages_are_found_again_only_under_the_weights_that_filled_them():
    prompt = [*range(1, 10)]
    engine, (first,) = begin(VersionedDecoder(rows=2), [prompt], output=40)
    step_until(engine, lambda: first.output_token_ids)
    text = [*prompt, *first.output_token_ids]
    (pool,) = engine.scheduler.pools
    assert pool.find(text)
    update(engine, 1)
    assert not pool.find(text)
    # The first row goes on and fills more pages, which nobody may read; the second one's are
    # of the new weights alone.
    second, third = (make_request(n, text, 20) for n in (2, 3))
    engine.add(second)
    step_until(engine, lambda: second.is_finished)
    num_fed = engine.num_prefilled
    engine.add(third)
    finish(engine, [first, second, third])
    assert third.output_token_ids == second.output_token_ids
    assert engine.num_prefilled - num_fed <= 4  # less than a page


def test_a_preempted_row_is_fed_again_under_the_newest_weights():
    engine, requests = begin(VersionedDecoder(rows=2, num_pages=14), [[1] * 4, [2] * 4], output=40)
    step_until(engine, lambda: all(request.output_token_ids for request in requests))
    update(engine, 1)
    finish(engine, requests)
    (preempted,) = [request for request in requests if request.num_preemptions]
    counts = [count for count, version in preempted.lineage.fills if version == 1]
    assert counts
    assert counts[0] > 0


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("num_shards", [1, 2])
def test_any_order_of_events_is_replayed(seed, num_shards):
    draw = random.Random(f"{seed} {num_shards}")
    decoder = VersionedDecoder(
        rows=4, num_pages=draw.choice([34, 48, 80]), num_shards=num_shards, pages_per_row=16
    )
    engine = Loop(decoder, DecoderParams(0), Fixed(draw.choice([0, 2, 3])))
    stems = [[draw.randrange(9) for _ in range(draw.choice([3, 12, 30]))] for _ in range(3)]
    requests, version = [], 0
    while len(requests) < 25 or engine.has_work:
        event = draw.random()
        if event < 0.3 and len(requests) < 25:
            prompt = [*draw.choice(stems), *[draw.randrange(9) for _ in range(draw.randrange(9))]]
            for _ in range(draw.choice([1, 2])):
                request = make_request(
                    len(requests), prompt or [1], draw.randint(1, 25), priority=draw.randrange(3)
                )
                engine.add(request)
                requests.append(request)
        elif event < 0.4:
            version += draw.randint(1, 3)
            update(engine, version, recomputes=draw.random() < 0.3)
        elif event < 0.43 and requests:
            engine.abort(draw.choice(requests))
        engine.step(draw.choice([None, 1, 2]))
        check(engine)
    finish(engine, requests)
    drawn = [versions(request) for request in requests]
    assert version
    assert all(own == sorted(own) for own in drawn)
    assert any(len(set(own)) > 1 for own in drawn)


def test_a_fill_that_changes_nothing_is_not_noted():
    lineage = Lineage()
    lineage.fill(0, 4)
    lineage.draw(0, 4)
    lineage.fill(7, 4)  # a preemption under the same weights
    assert lineage.fills == [CacheFill(0, 4)]
    lineage.draw(7, 5)
    lineage.fill(9, 5)
    assert lineage.fills == [CacheFill(0, 4), CacheFill(9, 5)]
    lineage.fill(9, 6)  # nothing was drawn in between
    lineage.draw(9, 6)
    assert lineage.fills == [CacheFill(0, 4), CacheFill(9, 6)]
    assert lineage.versions(0, 11) == [4] * 7 + [5] * 2 + [6] * 2
    assert lineage.versions(8, 10) == [5, 6]


def test_tokens_of_an_earlier_run_are_of_no_known_weights():
    lineage = Lineage()
    lineage.fill(3, 1)
    lineage.draw(3, 1)
    assert lineage.versions(0, 5) == [-1] * 3 + [1] * 2
    assert lineage.versions(4, 4) == []
