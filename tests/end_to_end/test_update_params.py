"""Engine.update_params: every token under the weights that its completion says, replayed."""

import asyncio
import collections
import dataclasses
import gc
import random
import threading
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from asked_for import quick
from helpers import FEW_PAGES as ENGINE
from helpers import assert_engine_is_empty, first_layer, tiny_llama
from replayed_weights import SCORE_TIE, Replay

import specjax
from specjax.api import handed_weights
from specjax.config.sampling import SamplingParams
from specjax.heads.equations import eagle3
from specjax.heads.equations.eagle3 import Eagle3Config
from specjax.heads.loading import LoadedDrafter
from specjax.heads.specs import EagleDrafter

# Pages for two rows of four: requests are preempted. Those of test_engine: equal steps.
SAMPLING = SamplingParams(temperature=0.8, max_tokens=24, ignore_eos=True, seed=5)
MOST_TIES = 1e-3  # of all tokens


def weights_of(version, seed=0):
    """Returns the target's weights after some updates: near those of version 0, not equal."""
    first = tiny_llama(seed).params
    if not version:
        return first
    rng = np.random.default_rng(version)
    return jax.tree.map(
        lambda leaf: leaf + np.float32(0.05) * rng.standard_normal(leaf.shape, np.float32), first
    )


@pytest.fixture(scope="module")
def make(target, draft):
    """Returns engines with a draft model; the same compiled steps for the same settings."""

    def make_engine(config=ENGINE, **arguments):
        arguments = {"drafter": draft, "num_speculative_tokens": 3} | arguments
        return specjax.Engine(target, engine=config, **arguments)

    return make_engine


class Load:
    """Requests of many kinds on one engine, whose weights change on their way.

    With deadlines of 0 s the same seed gives the same run.
    """

    def __init__(self, engine, seed, deadline_s):
        self.deadline_s = deadline_s
        self.engine, self.draw = engine, random.Random(seed)
        self.weights = {engine.params_version: weights_of(0)}
        self.temperatures, self.completions, self.tokens = {}, [], collections.defaultdict(list)
        self.stems = [self._tokens(length) for length in (4, 41, 64)]

    def run(self, num_requests, num_updates):
        """Runs requests to their end, with updates at any of their steps."""
        at = sorted(self.draw.sample(range(1, num_requests), num_updates))
        num_added = num_steps = 0
        while num_added < num_requests or self.engine.has_work:
            while num_added < num_requests and self.draw.random() < 0.3:
                num_added += self._add()
            num_steps += 1
            if at and num_added >= at[0] and num_steps >= 4:
                del at[0]
                num_steps = 0
                self._update()
            if self.temperatures and self.draw.random() < 0.03:
                self.engine.abort(self.draw.choice(list(self.temperatures)))
            self._step(self.draw.choice([None, 1, 1, 2]))
        assert not at

    def check(self):
        """Asserts that every token is the one that the record gives; returns the near-ties."""
        replay = Replay(tiny_llama(0).config, self.weights)
        num_ties = num_tokens = 0
        for done in self.completions:
            gaps = replay.gaps(done, self.temperatures[done.prompt_index])
            assert max(gaps, default=0.0) < SCORE_TIE, (done, done.params_versions, gaps)
            assert done.params_versions == sorted(done.params_versions)
            num_ties += sum(gap > 0 for gap in gaps)
            num_tokens += len(gaps)
            key = done.prompt_index, done.sample_index
            assert self.tokens[key] == list(zip(done.token_ids, done.params_versions))
        assert num_ties <= MOST_TIES * num_tokens
        return num_ties

    def _tokens(self, count):
        return [self.draw.randrange(61) for _ in range(count)]

    def _add(self):
        draw = self.draw
        sampling = dataclasses.replace(
            SAMPLING,
            n=draw.choice([1, 1, 2]),
            temperature=draw.choice([0.0, 0.8]),
            max_tokens=draw.randint(8, 40),
            speculate=draw.random() < 0.9,
            seed=draw.randrange(1000),
        )
        prompt = [*draw.choice(self.stems), *self._tokens(draw.randrange(40))]
        request_id = self.engine.add(
            prompt,
            sampling,
            priority=draw.choice([0, 0, 1]),
            deadline_s=draw.choice([None] * 9 + [self.deadline_s]),
        )
        self.temperatures[request_id] = sampling.temperature
        return 1

    def _update(self):
        version = max(self.weights) + 1
        params = weights_of(version)
        running = self.draw.choice(["keep", "recompute"])
        assert self.engine.update_params(params, running=running) == version
        self.weights[version] = params

    def _step(self, max_burst_steps):
        for chunk in self.engine.step(max_burst_steps=max_burst_steps):
            key = chunk.prompt_index, chunk.sample_index
            self.tokens[key] += zip(chunk.token_ids, chunk.params_versions, strict=True)
            if chunk.completion is not None:
                assert chunk.error is None
                self.completions.append(chunk.completion)


def run_load(engine, num_requests, num_updates, seed=0, deadline_s=0.0):
    """Runs a load, replays all of it, and checks that nothing was compiled twice for it."""
    with engine:
        load = Load(engine, seed, deadline_s)
        load.run(num_requests, num_updates)
        assert_engine_is_empty(engine)
        num_preemptions = engine.stats.num_preemptions
        assert engine.stats.params_version == num_updates
        decoder = engine._loop.decoder
        for traces in (decoder.traces, decoder.plain.traces):
            assert set(traces.values()) <= {1}, "new weights had something compiled again"
        acceptance = engine.stats.acceptance
    num_ties = load.check()
    drawn = set().union(*(done.params_versions for done in load.completions))
    assert len(drawn) > 0.7 * num_updates  # the last ones may come when all is done
    return load, num_preemptions, acceptance, num_ties


@pytest.mark.full
def test_forty_requests_and_four_updates(make):
    load, num_preemptions, acceptance, _ = run_load(make(), 40, 4, seed=3)
    assert num_preemptions
    assert acceptance.num_accepted
    assert any(len(set(done.params_versions)) > 1 for done in load.completions)
    assert any(len(done.cache_fills) > 1 for done in load.completions)


@pytest.mark.slow
def test_five_hundred_requests_and_twenty_updates(make, say):
    load, num_preemptions, acceptance, num_ties = run_load(make(), 500, 20, deadline_s=0.1)
    num_tokens = sum(len(done.token_ids) for done in load.completions)
    num_mixed = sum(len(set(done.params_versions)) > 1 for done in load.completions)
    num_fed_again = sum(len(done.cache_fills) > 1 for done in load.completions)
    assert min(num_preemptions, num_mixed) > 10
    assert num_fed_again > 5
    say(
        f"{len(load.completions)} samples, {num_tokens} tokens, {num_mixed} of several weights, "
        f"{num_fed_again} fed again, {num_preemptions} preemptions, "
        f"{acceptance.num_accepted} drafts accepted, {num_ties} near-ties"
    )


EAGLE3 = Eagle3Config(
    layers=first_layer(tiny_llama(0)).config,
    aux_layers=(0, 1, 2),
    target_hidden_size=32,
    target_vocab_size=61,
)


@pytest.mark.parametrize(
    "kind", quick([None, "ngram", "history", "eagle3"], slow=[None, "ngram", "history"])
)
def test_any_drafter(make, kind):
    drafter = kind
    if kind == "eagle3":
        drafter = LoadedDrafter(
            kind, EagleDrafter(EAGLE3), eagle3.init(jax.random.key(1), EAGLE3, std=0.3)
        )
    load, *_ = run_load(make(drafter=drafter), 40, 5, seed=kind or "none")
    assert any(len(set(done.params_versions)) > 1 for done in load.completions)


# One request, or a few, step by step.

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


def drain(engine):
    """Steps to the end; returns the completions by request id."""
    done = {}
    while engine.has_work:
        for chunk in engine.step():
            if chunk.completion is not None:
                done[chunk.prompt_index] = chunk.completion
    return done


def step_until_tokens(engine):
    """Steps until a chunk has tokens; returns it."""
    while True:
        for chunk in engine.step():
            if chunk.token_ids:
                return chunk


def replayed(completion, temperature=SAMPLING.temperature):
    versions = {*completion.params_versions, *dict(completion.cache_fills).values()}
    replay = Replay(tiny_llama(0).config, {version: weights_of(version) for version in versions})
    return max(replay.gaps(completion, temperature), default=0.0) < SCORE_TIE


@pytest.fixture(scope="module")
def alone(target):
    """Returns the tokens that PROMPT has under the weights of one version."""

    def tokens(version, sampling=SAMPLING, **engine):
        model = dataclasses.replace(target, params=weights_of(version))
        config = dataclasses.replace(ENGINE, **engine)
        (completion,) = specjax.generate(model, PROMPT, sampling=sampling, engine=config)
        return completion.token_ids

    return tokens


@pytest.mark.parametrize("running", quick(["keep", "recompute"], "recompute"))
def test_a_burst_in_flight_ends_under_the_weights_it_was_sent_with(make, alone, running):
    with make() as engine:
        engine.add(PROMPT, SAMPLING)
        first = step_until_tokens(engine)
        engine.update_params(weights_of(1), running=running)
        assert engine.params_version == 1
        (in_flight,) = engine.step()
        (done,) = drain(engine).values()
    num_old = len(first.token_ids) + len(in_flight.token_ids)
    assert set(in_flight.params_versions) == {0}
    assert done.params_versions == [0] * num_old + [1] * (24 - num_old)
    assert done.cache_fills == ((0, 0), *([(num_old, 1)] if running == "recompute" else []))
    assert replayed(done)
    assert done.token_ids[:num_old] == alone(0)[:num_old]
    assert done.token_ids != alone(0)


def test_updates_without_a_step_between_them(make, alone):
    with make() as engine:
        assert engine.params_version == 0
        assert engine.update_params(weights_of(7)) == 1
        engine.add(PROMPT, SAMPLING)
        assert engine.update_params(weights_of(3), version=30) == 30
        (done,) = drain(engine).values()
        assert (engine.params_version, engine.stats.params_version) == (30, 30)
    assert set(done.params_versions) == {30}
    assert done.cache_fills == ((0, 30),)
    assert done.token_ids == alone(3)


def test_the_same_arrays_again_change_nothing(make):
    params = weights_of(1)
    with make() as engine:
        assert engine.update_params(params) == 1
        engine.add(PROMPT * 2, SAMPLING)
        drain(engine)
        num_fed = engine._loop.num_prefilled
        assert engine.update_params(params) == engine.update_params(params, version=1) == 1
        engine.add(PROMPT * 2, SAMPLING)
        drain(engine)
        assert engine._loop.num_prefilled == num_fed + 7  # 8 tokens were found again
        assert engine.update_params(params, version=2) == 2
        engine.add(PROMPT * 2, SAMPLING)
        drain(engine)
        assert engine._loop.num_prefilled == num_fed + 7 + 15


def test_the_arrays_that_it_was_made_with_change_nothing(make, target):
    with make() as engine:
        engine.add(PROMPT * 2, SAMPLING)
        drain(engine)
        assert engine.update_params(target.params) == 0
        num_fed = engine._loop.num_prefilled
        engine.add(PROMPT * 2, SAMPLING)
        drain(engine)
        assert engine._loop.num_prefilled < num_fed + 15  # cached pages were found


def test_refused_weights_leave_those_in_use_known(target):
    tree = lambda seed: specjax.convert_back(weights_of(seed), "nnx", target.config)
    used = tree(1)
    with specjax.Engine(target, engine=ENGINE, layout="nnx") as engine:
        assert engine.update_params(used) == 1
        with pytest.raises(ValueError, match="version=0 must be above 1"):
            engine.update_params(tree(2), version=0)
        assert engine.update_params(used) == 1


def test_steps_go_on_while_new_weights_are_computed(make, monkeypatch):
    may_end = threading.Event()
    monkeypatch.setattr(specjax.api.engine, "wait_for", lambda params: may_end.wait(60))
    with make() as engine:
        update = threading.Thread(target=lambda: engine.update_params(weights_of(1)))
        update.start()
        try:
            engine.add(PROMPT, SAMPLING)
            (done,) = drain(engine).values()
            assert set(done.params_versions) == {0}
        finally:
            may_end.set()
            update.join()
        assert engine.params_version == 1


def test_weights_are_waited_for():
    leaf = jnp.ones(3)
    gone = jnp.ones(3)
    gone.delete()
    handed_weights.wait_for({"a": leaf, "b": [np.ones(2)], "c": gone, "d": "no array"})


def refused_weights():
    """Yields names of bad arguments, the arguments, and what the error says."""
    good = weights_of(1)
    yield "shape", (good | {"norm": jnp.ones(3)},), {}, "is not in the layout"
    yield "dtype", (jax.tree.map(lambda x: x.astype(jnp.bfloat16), good),), {}, "bfloat16"
    yield "names", ({k: v for k, v in good.items() if k != "norm"},), {}, "norm"
    yield "nothing", (None,), {}, "params"
    draft = first_layer(tiny_llama(0)).params
    bad = specjax.DecoderParams(good, draft | {"norm": jnp.ones(3)})
    yield "drafter", (bad,), {}, "the drafter's params"
    deleted = jax.tree.map(jnp.copy, good)
    deleted["norm"].delete()
    yield "deleted", (deleted,), {}, "was deleted"
    yield "version", (good,), {"version": 1}, "must be above 1"
    yield "no version", (good,), {"version": -1}, "params_version=-1"
    yield "running", (good,), {"running": "stop"}, "keep"


def test_refused_weights_leave_everything_as_it_was(make):
    expected = None
    for is_disturbed in (False, True):
        with make() as engine:
            engine.update_params(weights_of(2))
            engine.add(PROMPT, SAMPLING)
            step_until_tokens(engine)
            for name, arguments, options, message in refused_weights() if is_disturbed else ():
                with pytest.raises(ValueError, match=message):
                    engine.update_params(*arguments, **options)
                assert engine.params_version == 1, name
            (done,) = drain(engine).values()
        expected = expected or done
    assert (done.token_ids, done.params_versions) == (expected.token_ids, [1] * 24)
    assert done.cache_fills == expected.cache_fills == ((0, 1),)


def test_a_closed_engine_takes_no_weights(make):
    engine = make()
    engine.update_params(weights_of(1))
    engine.close()
    with pytest.raises(RuntimeError, match="closed"):
        engine.update_params(weights_of(2))
    assert engine.params_version == 1


def test_from_within_a_step(make):
    errors = []

    def report(what, done, total):
        if what == "prefill":
            try:
                engine.update_params(weights_of(1))
            except RuntimeError as error:
                errors.append(str(error))

    with make(progress=report) as engine:
        engine.add(PROMPT, SAMPLING)
        drain(engine)
        assert engine.params_version == 0
    assert "from within a step" in errors[0]


def test_deleted_weights_end_requests_and_new_ones_serve_others(make, alone):
    params = weights_of(1)
    with make() as engine:
        engine.update_params(params)
        lost = engine.add(PROMPT, SAMPLING)
        step_until_tokens(engine)
        jax.block_until_ready(engine._loop._run.device_state)
        params["norm"].delete()
        with pytest.raises(RuntimeError, match="deleted"):
            drain(engine)
        (chunk,) = engine.step()
        assert (chunk.prompt_index, chunk.finish_reason) == (lost, "error")
        engine.update_params(weights_of(3), version=3)
        engine.add(PROMPT, SAMPLING)
        (done,) = drain(engine).values()
    assert done.token_ids == alone(3)


def test_new_weights_in_time_save_the_requests_of_deleted_ones(make):
    params = weights_of(1)
    with make() as engine:
        engine.update_params(params)
        engine.add(PROMPT, SAMPLING)
        step_until_tokens(engine)
        jax.block_until_ready(engine._loop._run.device_state)
        jax.tree.map(lambda leaf: leaf.delete(), params)
        engine.update_params(weights_of(2))
        (done,) = drain(engine).values()
    assert set(done.params_versions) == {1, 2}
    assert replayed(done)


def test_weights_that_are_replaced_are_let_go_at_once(make):
    with make() as engine:
        engine.update_params(params := weights_of(1))
        engine.add(PROMPT, SAMPLING)
        step_until_tokens(engine)
        seen = weakref.ref(params["embed_tokens"])
        del params
        engine.update_params(weights_of(2))
        gc.collect()
        assert seen() is None
        drain(engine)


def test_the_weights_that_an_engine_was_made_with_are_let_go(draft):
    model = tiny_llama(0)
    seen = weakref.ref(model.params["embed_tokens"])
    with specjax.Engine(model, drafter=draft, num_speculative_tokens=3, engine=ENGINE) as engine:
        del model
        engine.add(PROMPT, SAMPLING)
        step_until_tokens(engine)
        engine.update_params(weights_of(1))
        (done,) = drain(engine).values()
        gc.collect()
        assert seen() is None
    assert replayed(done)


def test_weights_of_numpy_are_copied(make, alone):
    params = jax.tree.map(np.array, weights_of(1))
    with make() as engine:
        engine.update_params(params)
        jax.tree.map(lambda leaf: leaf.fill(np.nan), params)
        engine.add(PROMPT, SAMPLING)
        (done,) = drain(engine).values()
    assert done.token_ids == alone(1)


def test_while_streams_are_open(make):
    async def read(engine, prompt):
        return [chunk async for chunk in engine.astream(prompt, SAMPLING)]

    async def run(engine):
        tasks = [asyncio.create_task(read(engine, [*PROMPT, n])) for n in range(3)]
        for version in (1, 2, 3):
            await asyncio.sleep(0.01)
            await asyncio.to_thread(engine.update_params, weights_of(version))
        return await asyncio.gather(*tasks)

    with make() as engine:
        streams = asyncio.run(run(engine))
        for chunk in engine.stream(PROMPT, SAMPLING):
            if engine.params_version == 3 and chunk.token_ids:
                engine.update_params(weights_of(4))
        assert_engine_is_empty(engine)
    for chunks in streams:
        assert replayed(chunks[-1].completion)
        versions = [version for chunk in chunks for version in chunk.params_versions]
        assert versions == chunks[-1].completion.params_versions
    assert set(chunk.completion.params_versions) == {3, 4}
    assert replayed(chunk.completion)


@pytest.mark.full
def test_from_another_thread_while_one_steps(make):
    with make() as engine:
        for n in range(6):
            engine.add([*PROMPT, n], SAMPLING)

        def train():
            for version in range(1, 6):
                engine.update_params(weights_of(version))

        thread = threading.Thread(target=train)
        thread.start()
        completions = drain(engine)
        thread.join()
    assert len(completions) == 6
    for done in completions.values():
        assert replayed(done)
        assert done.params_versions == sorted(done.params_versions)


# Drafters, pages of one byte, other trees, meshes.


def test_a_draft_model_is_updated_beside_the_target_or_stays(make, draft):
    newer = jax.tree.map(lambda leaf: leaf * 1.0, draft.params)
    with make() as engine:
        engine.update_params(specjax.DecoderParams(weights_of(1), newer))
        assert engine._loop.params.drafter["norm"] is newer["norm"]
        engine.update_params(weights_of(2))
        assert engine._loop.params.drafter["norm"] is newer["norm"]
        engine.add(PROMPT, SAMPLING)
        (done,) = drain(engine).values()
        assert engine.stats.acceptance.num_drafted
    assert replayed(done)


@pytest.mark.full
def test_a_drafter_that_broke_is_tried_again_only_with_weights_of_its_own(make, draft):
    broken = jax.tree.map(lambda leaf: leaf * jnp.nan, draft.params)
    with make() as engine:
        engine.update_params(specjax.DecoderParams(weights_of(1), broken))
        engine.add(PROMPT, SAMPLING)
        with pytest.warns(UserWarning, match="turned off"):
            step_until_tokens(engine)
        engine.update_params(weights_of(2))
        assert engine._loop.faults.is_drafter_off
        step_until_tokens(engine)
        engine.update_params(specjax.DecoderParams(weights_of(3), draft.params))
        assert not engine._loop.faults.is_drafter_off
        num_drafted = engine.stats.acceptance.num_drafted
        engine.add([*PROMPT, 1], SAMPLING)
        completions = drain(engine)
        assert engine.stats.acceptance.num_drafted > num_drafted
    assert len(completions) == 2
    assert all(map(replayed, completions.values()))


@pytest.mark.parametrize("dtype", quick(["int8", "fp8"], slow=["fp8"]))
def test_pages_of_one_byte_are_filled_again_under_their_new_scales(target, make, dtype):
    config = dataclasses.replace(ENGINE, kv_cache_dtype=dtype)
    with make(config) as engine:
        engine.add(PROMPT, SAMPLING)
        step_until_tokens(engine)
        engine.update_params(weights_of(1))
        (done,) = drain(engine).values()
    (_, (count, version)) = done.cache_fills
    assert version == 1
    assert done.params_versions == [0] * count + [1] * (24 - count)
    # From each fill on it is the text of those weights alone: noise goes by position.
    for text, params, part in (
        (PROMPT, weights_of(0), slice(count)),
        ([*PROMPT, *done.token_ids[:count]], weights_of(1), slice(count, None)),
    ):
        model = dataclasses.replace(target, params=params)
        (own,) = specjax.generate(model, text, sampling=SAMPLING, engine=config)
        length = len(done.token_ids[part])
        assert own.token_ids[:length] == done.token_ids[part]


def test_a_trainers_tree_in_another_layout(target, make, alone):
    config = target.config
    theirs = specjax.convert_back(weights_of(1), "nnx", config)
    with make(layout="nnx") as engine:
        engine.update_params(theirs)
        engine.add(PROMPT, SAMPLING)
        (done,) = drain(engine).values()
        assert engine.update_params(theirs) == 1
    assert done.token_ids == alone(1)


@pytest.mark.full
def test_over_a_mesh_of_four_devices(target):
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), devices=jax.devices()[:4])
    config = dataclasses.replace(ENGINE, num_pages=48)
    engine = specjax.Engine(target, drafter="ngram", mesh=mesh, engine=config)
    load, *_ = run_load(engine, 30, 4)
    assert any(len(set(done.params_versions)) > 1 for done in load.completions)


def test_weights_on_another_device(make, alone):
    params = jax.device_put(weights_of(1), jax.devices()[1])
    with make() as engine:
        engine.update_params(params)
        engine.add(PROMPT, SAMPLING)
        (done,) = drain(engine).values()
    assert done.token_ids == alone(1)
