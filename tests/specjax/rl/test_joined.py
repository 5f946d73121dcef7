"""Rollouts of several threads on one decoder: in the same steps, with the same samples."""

import threading
import time

import jax
import numpy as np
import pytest
from helpers import tiny_llama

import specjax
from specjax.config.engine import EngineConfig
from specjax.config.sampling import SamplingParams

ENGINE = EngineConfig(page_size=8, max_rows=4, burst_steps=4, max_context=64)
SAMPLING = SamplingParams(temperature=0.8, max_tokens=24, ignore_eos=True, seed=5)
PROMPTS = [[1, 2, 3], [4, 5], [6] * 9, [7, 8], [9], [1, 2, 3, 4]]


@pytest.fixture(scope="module")
def model():
    return tiny_llama(0)


@pytest.fixture(scope="module")
def make(model):
    def make_decoder(**options):
        return specjax.build_decoder(model, drafter="ngram", engine=ENGINE, **options)

    return make_decoder


@pytest.fixture(scope="module")
def alone(make):
    """Returns the rollout of one prompt alone."""
    decoder = make()

    def run(prompt, params, **options):
        return specjax.rollout(decoder, params, [prompt], sampling=SAMPLING, **options)

    return run


def in_threads(calls):
    """Runs calls at the same time; returns their results, or the exceptions they raised."""
    results = [None] * len(calls)
    barrier = threading.Barrier(len(calls))

    def run(index):
        barrier.wait()
        try:
            results[index] = calls[index]()
        except Exception as error:
            results[index] = error

    threads = [threading.Thread(target=run, args=(n,), daemon=True) for n in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=300)
        assert not thread.is_alive(), "a rollout waits for ever"
    return results


def call(decoder, prompt, params, **options):
    return lambda: specjax.rollout(decoder, params, [prompt], sampling=SAMPLING, **options)


def same(batch, other):
    return np.array_equal(batch.completion_ids, other.completion_ids)


def is_idle(decoder):
    loop = decoder._loop
    held = [pool.num_held for pool in loop.scheduler.pools]
    return not (decoder._shares or decoder._line or loop.has_work or any(held))


def others(params):
    return jax.tree.map(lambda leaf: leaf * 1.1, params)


@pytest.mark.full
def test_threads_share_steps_and_get_their_own_samples(make, alone, model):
    decoder = make(shares_steps=True)
    batches = in_threads([call(decoder, prompt, model.params) for prompt in PROMPTS])
    for prompt, batch in zip(PROMPTS, batches):
        assert same(batch, alone(prompt, model.params))
        assert batch.is_finished
        assert np.all(np.asarray(batch.params_versions) == 1)
    assert max(record.num_rows for record in decoder.decisions) > 1
    assert is_idle(decoder)
    assert decoder._loop.params.target is None


@pytest.mark.full
def test_one_thread_is_a_rollout_as_ever(make, alone, model):
    decoder = make(shares_steps=True)
    for params in (model.params, others(model.params)):
        batch = specjax.rollout(decoder, params, PROMPTS, sampling=SAMPLING)
        expected = np.concatenate([alone(prompt, params).completion_ids for prompt in PROMPTS])
        assert np.array_equal(batch.completion_ids, expected)
        scores = specjax.score(decoder, params, batch)
        np.testing.assert_allclose(scores.raw, batch.logprobs.raw, atol=1e-4)
    assert decoder.params_version == 2
    assert is_idle(decoder)


@pytest.mark.full
def test_other_weights_wait_for_their_turn(make, alone, model):
    decoder, trees = make(shares_steps=True), [model.params, others(model.params)]
    chosen = [trees[n % 2] for n in range(len(PROMPTS))]
    calls = [call(decoder, prompt, tree) for prompt, tree in zip(PROMPTS, chosen)]
    for prompt, tree, batch in zip(PROMPTS, chosen, in_threads(calls)):
        assert same(batch, alone(prompt, tree))
        assert len(set(np.asarray(batch.params_versions).flat)) == 1
    assert is_idle(decoder)


@pytest.mark.full
def test_groups_budgets_and_refused_prompts(make, alone, model):
    decoder = make(shares_steps=True)
    calls = [
        call(decoder, PROMPTS[0], model.params, num_samples=3),
        call(decoder, PROMPTS[1], model.params, token_budget=9),
        call(decoder, [1] * 70, model.params),
        call(decoder, [], model.params),
        call(decoder, PROMPTS[2], {"norm": 1}),
        call(decoder, PROMPTS[3], model.params),
    ]
    group, cut, long, empty, wrong, whole = in_threads(calls)
    assert same(group, alone(PROMPTS[0], model.params, num_samples=3))
    assert same(cut, alone(PROMPTS[1], model.params, token_budget=9))
    assert not cut.is_finished
    assert all(isinstance(error, ValueError) for error in (long, empty, wrong))
    assert same(whole, alone(PROMPTS[3], model.params))
    rest = specjax.rollout(decoder, model.params, cut, sampling=SAMPLING)
    assert same(rest, alone(PROMPTS[1], model.params))
    assert is_idle(decoder)


@pytest.mark.full
def test_a_time_budget_ends_one_rollout_alone(make, alone, model):
    decoder = make(shares_steps=True)
    calls = [
        call(decoder, PROMPTS[0], model.params, time_budget_s=1e-6),
        call(decoder, PROMPTS[1], model.params),
    ]
    cut, whole = in_threads(calls)
    assert not cut.is_finished
    assert same(whole, alone(PROMPTS[1], model.params))
    assert is_idle(decoder)


@pytest.mark.full
def test_a_step_that_fails_ends_all_rollouts_and_none_after(make, alone, model, monkeypatch):
    decoder = make(shares_steps=True)
    first = specjax.rollout(decoder, model.params, [PROMPTS[0]], sampling=SAMPLING)
    loop, num_steps = decoder._loop, []

    def broken(*arguments):
        num_steps.append(1)
        if len(num_steps) == 6:
            raise ZeroDivisionError("broken")
        time.sleep(0.01)  # until all have joined
        return type(loop)._send(loop, *arguments)

    monkeypatch.setattr(loop, "_send", broken)
    results = in_threads([call(decoder, prompt, model.params) for prompt in PROMPTS[:3]])
    assert sorted(type(error).__name__ for error in results) == [
        "RuntimeError",
        "RuntimeError",
        "ZeroDivisionError",
    ]
    monkeypatch.undo()
    again = specjax.rollout(decoder, model.params, [PROMPTS[0]], sampling=SAMPLING)
    assert same(again, first)
    assert is_idle(decoder)


@pytest.mark.full
def test_many_threads_one_after_the_other_and_beside_each_other(make, alone, model):
    decoder, trees = make(shares_steps=True), [model.params, others(model.params)]

    def calls_of(number):
        def run():
            return [
                call(decoder, PROMPTS[(number + n) % 6], trees[n // 3], num_samples=1 + n % 2)()
                for n in range(6)
            ]

        return run

    for number, batches in enumerate(in_threads([calls_of(n) for n in range(8)])):
        assert isinstance(batches, list), batches
        for n, batch in enumerate(batches):
            expected = alone(PROMPTS[(number + n) % 6], trees[n // 3], num_samples=1 + n % 2)
            assert same(batch, expected)
    assert is_idle(decoder)
