"""Streams: the samples of rollouts, whatever the order; new weights, staleness, what is left."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import subprocess
import sys

import chex
import jax
import numpy as np
import pytest
from asked_for import quick
from helpers import ROLLOUTS as ENGINE
from helpers import first_layer, tiny_llama

import specjax
from specjax import SamplingParams
from specjax.engine.loop import Loop
from specjax.rl.batch import ERROR
from specjax.rl.beginning import PromptSeeds

FULL = pytest.mark.full
EOS = 7
RNG = np.random.default_rng(1)
PROMPTS = [RNG.integers(8, 60, RNG.integers(1, 18)).tolist() for _ in range(9)]
PROMPTS[5] = PROMPTS[2]  # a prompt that comes again
SAMPLING = SamplingParams(temperature=0.8, max_tokens=24, seed=3, logprobs=1, entropy=True)
SHORT = dataclasses.replace(SAMPLING, logit_bias={EOS: 2.5})  # of many lengths
WIDTH = 18


@functools.cache
def target():
    return tiny_llama(0, eos_token_ids=(EOS,))


def build(name, engine=ENGINE, **more):
    drafters = {
        "plain": {},
        "history": {"drafter": "history", "num_speculative_tokens": 3},
        "draft": {"drafter": first_layer(target()), "num_speculative_tokens": 3},
    }
    return specjax.build_decoder(target(), engine=engine, **drafters[name], **more)


decoder = functools.cache(build)


@functools.cache
def weights(number):
    return jax.tree.map(lambda leaf: leaf * (1 + 0.02 * number), target().params)


def begin(own="plain", prompts=PROMPTS, **arguments):
    own = decoder(own) if isinstance(own, str) else own
    arguments = {"num_samples": 2, "sampling": SAMPLING, "prompt_width": WIDTH} | arguments
    return specjax.rollout_stream(own, weights(0), prompts, **arguments)


@functools.cache
def expected():
    return specjax.rollout(
        decoder("plain"),
        weights(0),
        PROMPTS,
        num_samples=2,
        sampling=SAMPLING,
        prompt_width=WIDTH,
    )


def joined(batches):
    """Returns Rollouts as one, in the order of the feed."""
    batch = jax.tree.map(lambda *parts: np.concatenate(parts), *batches)
    order = np.argsort(batch.prompt_index, kind="stable")
    return jax.tree.map(lambda leaf: leaf[order], batch)


def assert_same_samples(actual, wanted):
    """Equal but for what depends on the company: the counts of steps and drafts."""
    nothing = np.zeros(0)
    beside = {name: nothing for name in ("num_drafted", "num_accepted", "num_steps")}
    beside["params_versions"] = nothing
    actual, wanted = (dataclasses.replace(batch, **beside) for batch in (actual, wanted))
    chex.assert_trees_all_equal(actual, wanted)


def assert_is_free(own="plain"):
    """No row and no page is held, and the decoder serves others again."""
    own = decoder(own) if isinstance(own, str) else own
    scheduler = own._loop.scheduler
    scheduler.check()
    assert not own._loop.has_work
    assert all(pool.num_held == 0 for pool in scheduler.pools)
    again = specjax.rollout(own, weights(0), PROMPTS[:1], sampling=SAMPLING)
    np.testing.assert_array_equal(again.completion_ids[0], expected().completion_ids[0])


# What it is a function of


@pytest.mark.parametrize("name", quick(["plain", "history", "draft"], "plain", slow=["draft"]))
@pytest.mark.parametrize("in_order", quick([False, True], True))
def test_the_samples_are_those_of_one_rollout(name, in_order):
    batches = list(begin(name, iter(PROMPTS), in_order=in_order, batch_groups=2))
    assert [batch.num_samples for batch in batches] == [4, 4, 4, 4, 2]
    numbers = [number for batch in batches for number in batch.prompt_index[::2].tolist()]
    assert sorted(numbers) == list(range(9))
    if in_order:
        assert numbers == list(range(9))
    assert_same_samples(joined(batches), expected())
    assert_is_free(name)


@pytest.mark.slow  # dialogues and rollouts have one in the gate
def test_over_a_mesh():
    mesh = jax.make_mesh((2,), ("data",))
    split = build("history", dataclasses.replace(ENGINE, numerics="fast"), mesh=mesh)
    batches = list(begin(split, batch_groups=3))
    assert batches[0].completion_ids.sharding.mesh == mesh
    actual = joined(batches)
    np.testing.assert_array_equal(actual.completion_ids, expected().completion_ids)
    assert all(pool.num_held == 0 for pool in split._loop.scheduler.pools)


@pytest.mark.full
def test_with_too_few_pages():
    own = build("plain", dataclasses.replace(ENGINE, num_pages=10))
    batches = list(begin(own))
    assert_same_samples(joined(batches), expected())
    assert own._loop.num_preemptions > 0


def test_prompts_are_taken_as_rows_come_free():
    taken = []

    def feed():
        for prompt in itertools.cycle(PROMPTS):
            taken.append(prompt)
            yield prompt

    with begin(prompts=feed()) as stream:
        assert taken == []
        for count, _ in zip(range(1, 30), stream):
            # Four rows hold two groups; one more waits for the next row.
            assert count <= len(taken) <= count + 4
    assert stream.metrics["num_prompts"] == len(taken)
    assert_is_free()


def test_prompts_that_come_again_have_other_seeds_however_many_came_between(monkeypatch):
    monkeypatch.setattr("specjax.rl.beginning.MOST_PROMPTS", 3)
    rng = np.random.default_rng(0)
    seeds, first = PromptSeeds(5), PromptSeeds(5)
    prompts = [[int(token)] for token in rng.integers(0, 6, 2000)]
    given = {}
    for prompt in prompts:
        given.setdefault(prompt[0], []).append(seeds.next(prompt))
    assert all(len(set(each)) == len(each) > 200 for each in given.values())
    # Until one is dropped, the place in the feed does not matter.
    other = PromptSeeds(5)
    one_way = [first.next([token]) for token in (2, 1, 2)]
    assert [one_way[1], one_way[0], one_way[2]] == [other.next([token]) for token in (1, 2, 2)]


@FULL
def test_a_stream_that_is_open_when_the_program_ends_is_silent():
    program = """
import itertools, sys
sys.path.insert(0, "tests")
from helpers import tiny_llama
import specjax

model = tiny_llama(0)
engine = specjax.EngineConfig(page_size=8, max_rows=2, max_context=32, row_buckets=())
decoder = specjax.build_decoder(model, engine=engine)
sampling = specjax.SamplingParams(max_tokens=4)
stream = specjax.rollout_stream(decoder, model.params, itertools.cycle([[1, 2]]), sampling=sampling)
next(stream)
"""
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120
    )
    assert (ended.returncode, ended.stderr) == (0, "")


# Weights


def test_new_weights_between_rollouts():
    with begin(prompts=itertools.cycle(PROMPTS), params_version=10) as stream:
        assert stream.params_version == 10
        seen = set()
        for number in range(1, 8):
            batch = next(stream)
            versions = np.asarray(batch.params_versions)[np.asarray(batch.loss_mask)]
            assert versions.max() <= stream.params_version
            seen |= set(versions.tolist())
            for row, mask in zip(np.asarray(batch.params_versions), np.asarray(batch.loss_mask)):
                assert np.all(np.diff(row[mask]) >= 0)
            stream.update_params(weights(number), 10 + 2 * number)
            assert stream.params_version == 10 + 2 * number
        assert len(seen) > 3
        with pytest.raises(ValueError, match="must be above 24"):
            stream.update_params(weights(9), 24)
        with pytest.raises(ValueError, match="params is not in the layout"):
            stream.update_params({"a": 1})
        stream.update_params(weights(9))
        assert stream.params_version == 25
        next(stream)
    with pytest.raises(ValueError, match="the stream is closed"):
        stream.update_params(weights(1))


@pytest.mark.parametrize(
    "num_devices", [None, pytest.param(2, marks=FULL)], ids=["one_device", "mesh"]
)
@pytest.mark.full
def test_an_update_of_the_policy_alone_keeps_the_draft_model(num_devices):
    if num_devices is None:
        own = decoder("draft")
    else:
        fast = dataclasses.replace(ENGINE, numerics="fast")
        own = build("draft", fast, mesh=jax.make_mesh((num_devices,), ("data",)))
    built = first_layer(target()).params
    draft = jax.tree.map(lambda leaf: leaf * 1.5, built)
    both = specjax.DecoderParams(weights(0), draft)

    def assert_runs(wanted):
        running = stream._state._loop.params.drafter
        chex.assert_trees_all_equal(jax.device_get(running), jax.device_get(wanted))

    feed = itertools.cycle(PROMPTS)
    with specjax.rollout_stream(own, both, feed, sampling=SAMPLING, params_version=1) as stream:
        next(stream)
        stream.update_params(weights(0))  # the same again
        assert stream.params_version == 1
        assert_runs(draft)
        stream.update_params(both)
        assert stream.params_version == 1
        stream.update_params(weights(1))
        assert stream.params_version == 2
        assert own.weights_bytes_moved == 0 or num_devices
        assert_runs(draft)
        next(stream)
        stream.update_params(specjax.DecoderParams(weights(2), built))
        assert_runs(built)
        del built  # what steps use stays
        stream.update_params(weights(3))
        assert_runs(first_layer(target()).params)
        next(stream)


@pytest.mark.parametrize("most", quick([0, 1, 3], 1))
def test_no_token_is_too_old_and_no_prompt_is_lost(most):
    feed = PROMPTS * 3
    # Many end within their first burst, which may fly while weights are replaced.
    arguments = {"sampling": SHORT, "max_staleness": most, "batch_groups": 2}
    batches = []
    with begin(prompts=feed, params_version=1, **arguments) as stream:
        version = 1
        for batch in stream:
            versions = np.where(batch.loss_mask, batch.params_versions, version)
            assert versions.min() >= version - most
            assert batch.metrics["largest_staleness"] <= most
            batches.append(batch)
            version += 1
            stream.update_params(weights(len(batches) % 5), version)
        restarted = stream.metrics["num_restarted"]
    assert (restarted > 0) == (most < 3), restarted
    batch = joined(batches)
    assert batch.prompt_index.tolist() == [n for n in range(len(feed)) for _ in range(2)]
    assert stream.metrics["num_returned"] == len(feed)
    # Each keeps its seed, and what has one version is what these weights draw.
    alone = specjax.rollout(
        decoder("plain"), weights(0), PROMPTS, num_samples=2, sampling=SHORT, prompt_width=WIDTH
    )
    for index in range(batch.num_samples):
        versions = set(batch.params_versions[index][batch.loss_mask[index]].tolist())
        if versions == {1} and index < 2 * len(PROMPTS):
            own = alone.completion_ids[index]
            np.testing.assert_array_equal(batch.completion_ids[index], own)
    assert_is_free()


def test_tokens_that_were_in_flight_at_an_update_count_as_old(monkeypatch):
    short = dataclasses.replace(SAMPLING, max_tokens=4)  # within one burst
    stream = begin(prompts=PROMPTS[:2], sampling=short, max_staleness=0, params_version=1)
    step = Loop.step

    def after_an_update(loop, *arguments):
        if loop._run.flights and stream.params_version == 1:
            stream._state.update_params(weights(1), 2, recomputes=False)
        return step(loop, *arguments)

    monkeypatch.setattr(Loop, "step", after_an_update)
    batches = list(stream)
    assert stream.params_version == 2
    assert stream.metrics["num_restarted"] == 4
    for batch in batches:
        assert set(np.unique(batch.params_versions[batch.loss_mask])) == {2}


def test_tokens_per_second_count_what_was_drawn_since_the_last_rollout():
    long = dataclasses.replace(SAMPLING, max_tokens=24, ignore_eos=True)
    # Four rows draw both groups at the same time, and so they end.
    with begin(prompts=PROMPTS[:2], sampling=long) as stream:
        first, second = stream
    for batch in (first, second):
        assert batch.metrics["num_tokens"] == 48
    drawn = first.metrics["tokens_per_second"] * (
        first.metrics["rollout_s"] - first.metrics["compile_s"]
    )
    np.testing.assert_allclose(drawn, 96)
    assert second.metrics["tokens_per_second"] == 0


# The first of a group


def test_the_first_of_a_group_are_kept():
    arguments = {"num_samples": 3, "sampling": SHORT}
    with begin(keep_first=2, batch_groups=3, **arguments) as stream:
        batches = list(stream)
    assert [batch.num_samples for batch in batches] == [6] * 3
    every = specjax.rollout(decoder("plain"), weights(0), PROMPTS, **arguments)
    texts, lengths = np.asarray(every.completion_ids), np.asarray(every.lengths).reshape(9, 3)
    is_kept = np.zeros((9, 3), bool)
    for batch in batches:
        for group, row in zip(batch.prompt_index.tolist(), np.asarray(batch.completion_ids)):
            (sample,) = np.flatnonzero((texts[3 * group : 3 * group + 3] == row).all(axis=1))
            assert not is_kept[group, sample:].any()  # each once, in their order
            is_kept[group, sample] = True
    assert is_kept.sum(axis=1).tolist() == [2] * 9
    # Those that are left out are the long ones.
    assert lengths[is_kept].mean() < lengths[~is_kept].mean() - 2
    assert stream.metrics["num_aborted"] == 9
    assert stream.metrics["num_tokens_dropped"] > 0
    assert_is_free()


# What goes wrong


def test_a_prompt_that_is_refused_is_returned_with_its_error():
    feed = [PROMPTS[0], [], [999], [1] * 30, PROMPTS[1]]
    with pytest.warns(UserWarning, match="2 of 2 samples have finish reason ERROR") as warned:
        batches = list(begin(prompts=feed, in_order=True))
    assert len(warned) == 3
    assert [batch.finish_reasons.tolist() == [ERROR] * 2 for batch in batches] == [
        *(False, True, True, True, False)
    ]
    assert "prompt 3 of the feed has 30 tokens, and prompt_width=18" in batches[3].errors[1]
    np.testing.assert_array_equal(batches[4].completion_ids, expected().completion_ids[2:4])
    assert_is_free()


def test_weights_that_are_nan_end_samples_with_errors():
    nan = jax.tree.map(lambda leaf: leaf * np.nan, weights(0))
    with begin(prompts=itertools.cycle(PROMPTS)) as stream:
        next(stream)
        stream.update_params(nan)
        batches = []
        with pytest.warns(UserWarning, match="logits were NaN"):
            batches += itertools.islice(stream, 4)
        assert np.all(batches[-1].finish_reasons == ERROR)
        assert list(batches[-1].errors) == [0, 1]
        assert "logits were NaN" in batches[-1].errors[1]
    assert_is_free()


@pytest.mark.parametrize("in_order", [False, True])
@pytest.mark.parametrize("first", [[], [PROMPTS[0]]])
def test_prompts_that_are_refused_without_end_are_returned(first, in_order):
    def feed():
        yield from first
        for _ in range(100):
            yield [1] * (WIDTH + 1)
        pytest.fail("prompts are taken without end")

    with begin(prompts=feed(), in_order=in_order, batch_groups=2) as stream:
        with pytest.warns(UserWarning, match="samples have finish reason ERROR"):
            batches = list(itertools.islice(stream, 4))
        assert [batch.num_samples for batch in batches] == [4] * 4
        numbers = np.concatenate([batch.prompt_index for batch in batches])
        if in_order:
            assert numbers.tolist() == [number for number in range(8) for _ in range(2)]
        assert stream.metrics["num_prompts"] <= 8 + 2 + 3
    assert_is_free()


def test_a_feed_that_raises_leaves_nothing_and_loses_nothing():
    def feed():
        yield from PROMPTS[:4]
        raise OSError("the disk is gone")

    stream, batches = begin(prompts=feed(), batch_groups=3), []
    with pytest.raises(OSError, match="the disk is gone"):
        batches.extend(stream)
    # `extend` keeps what came before the exception.
    assert [batch.num_samples for batch in batches] == [6, 2]
    np.testing.assert_array_equal(joined(batches).completion_ids, expected().completion_ids[:8])
    assert_is_free()
    assert list(stream) == []


def test_an_interrupt_in_the_feed_comes_at_once():
    def feed():
        yield PROMPTS[0]
        raise KeyboardInterrupt

    stream = begin(prompts=feed())
    with pytest.raises(KeyboardInterrupt):
        next(stream)
    assert_is_free()


# Feeds that wait


def test_rows_go_on_while_the_feed_has_no_prompt():
    """It has one at every third question."""
    feed = (each for prompt in PROMPTS for each in (None, None, prompt))
    batches = list(begin(prompts=feed))
    assert [batch.num_samples for batch in batches] == [2] * 9
    assert_same_samples(joined(batches), expected())
    assert_is_free()


@pytest.mark.parametrize("in_order", [False, True])
def test_a_feed_may_wait_for_what_the_stream_returns(in_order):
    batches = []

    def feed():
        for number, prompt in enumerate(PROMPTS[:3]):
            for asked in itertools.count():
                if len(batches) == number:
                    break
                if asked > 300:
                    pytest.fail("the stream keeps the group that the feed waits for")
                yield None
            yield prompt

    # Two groups are never there at the same time.
    for batch in begin(prompts=feed(), batch_groups=2, in_order=in_order):
        batches.append(batch)
    assert [batch.num_samples for batch in batches] == [2] * 3
    np.testing.assert_array_equal(joined(batches).completion_ids, expected().completion_ids[:6])
    assert_is_free()


def test_a_feed_without_a_prompt_is_asked_again_after_a_while(monkeypatch):
    slept = []
    monkeypatch.setattr("specjax.rl.stream.time.sleep", slept.append)
    with begin(prompts=iter([None, None, None, PROMPTS[0], None])) as stream:
        assert next(stream).num_samples == 2
        assert slept == [specjax.rl.stream.ASK_AGAIN_S] * 3
        assert list(stream) == []
    assert stream.metrics["num_prompts"] == 1


def test_an_interrupted_stream_holds_no_page(monkeypatch):
    stream, step, steps = begin(), Loop.step, iter(range(99))

    def few_steps(loop, *arguments):
        if next(steps) == 3:
            raise KeyboardInterrupt
        return step(loop, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Loop, "step", few_steps)
        with pytest.raises(KeyboardInterrupt):
            list(stream)
    assert_is_free()


def test_a_dropped_stream_holds_no_page():
    stream = begin(prompts=itertools.cycle(PROMPTS))
    next(stream)
    with pytest.raises(ValueError, match="a rollout_stream is open on this decoder"):
        specjax.rollout(decoder("plain"), weights(0), PROMPTS)
    with pytest.raises(ValueError, match="a rollout_stream is open on this decoder"):
        begin()
    assert decoder("plain")._loop.has_work
    next(stream)  # it did not suffer
    del stream
    assert_is_free()
    never_begun = begin()
    del never_begun
    assert_is_free()


def test_a_decoder_that_shares_its_steps_is_refused():
    with pytest.raises(ValueError, match="build it without shares_steps"):
        begin(build("plain", shares_steps=True))


@pytest.mark.parametrize("name", ["next", "update_params", "close"])
def test_a_stream_that_works_takes_no_other_call(name):
    """Its feed is called while it works. The stream goes on where the feed sees the error."""
    calls = {
        "next": lambda: next(stream),
        "update_params": lambda: stream.update_params(weights(1)),
        "close": lambda: stream.close(),
    }

    def feed():
        yield PROMPTS[0]
        with pytest.raises(RuntimeError, match=f"{name} was called while the stream works"):
            calls[name]()
        yield PROMPTS[1]

    stream = begin(prompts=feed())
    assert sum(batch.num_samples for batch in stream) == 4
    assert_is_free()


def test_an_open_stream_keeps_its_decoder_from_forgetting():
    own, batches = decoder("plain"), []
    with begin() as stream:
        for batch in stream:
            batches.append(batch)
            with pytest.raises(ValueError, match="a rollout_stream is open on this decoder"):
                own.forget()
    assert_same_samples(joined(batches), expected())
    own.forget()
    assert_is_free()


def test_the_last_version_has_no_successor():
    stream = begin(prompts=PROMPTS[:2], params_version=1)
    next(stream)
    stream.update_params(weights(1), version=2**31 - 1)
    with pytest.raises(ValueError, match="there is none above it"):
        stream.update_params(weights(2))
    assert sum(batch.num_samples for batch in stream) == 2
    with pytest.raises(ValueError, match="pass a version with the weights"):
        begin()
    assert list(begin(prompts=[], params_version=3)) == []
    assert_is_free()


def test_errors_name_the_prompt_of_the_feed():
    stream = begin(prompts=[PROMPTS[0], [], [61]])
    with pytest.warns(UserWarning, match="finish reason ERROR"):
        batches = list(stream)
    errors = {int(b.prompt_index[0]): text for b in batches for text in b.errors.values()}
    assert {number: text.split(":")[0] for number, text in errors.items()} == {
        1: "prompt 1 of the feed",
        2: "prompt 2 of the feed",
    }


def test_a_feed_that_is_none_is_refused():
    with pytest.raises(TypeError, match="prompts is 3; expected an iterable"):
        begin(prompts=3)


def test_a_progress_function_is_told_of_the_groups_of_each_rollout():
    told = []
    with begin(batch_groups=3, progress=lambda *of: told.append(of)) as stream:
        next(stream)
        counts = [of[1:] for of in told if of[0] == "groups"]
        told.clear()
        next(stream)
    assert counts[-1] == (3, 3)
    assert {total for _, total in counts} == {3}
    later = [done for what, done, _ in told if what == "groups"]
    assert later == sorted(later)


def test_a_closed_stream_is_over():
    stream = begin()
    next(stream)
    stream.close()
    stream.close()
    assert list(stream) == []
    assert_is_free()


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"num_samples": 0}, "num_samples=0 must be"),
        ({"keep_first": 3}, "keep_first=3 must be at most num_samples=2"),
        ({"keep_first": 0}, "keep_first=0 must be a whole number of at least 1"),
        ({"batch_groups": 1.5}, "batch_groups=1.5 must be"),
        ({"max_staleness": -1}, "max_staleness=-1 must be a whole number of at least 0"),
        ({"prompt_width": 0}, "prompt_width=0 must be"),
        ({"sampling": SamplingParams(n=2)}, "sampling.n=2 must be left at 1"),
    ],
)
def test_refused_arguments(arguments, match):
    with pytest.raises(ValueError, match=match):
        begin(**arguments)
    assert decoder("plain")._stream is None
