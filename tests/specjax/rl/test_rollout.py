"""Rollouts: what they return, what they are a function of, and what bad input does."""

from __future__ import annotations

import dataclasses
import functools
import gc
import warnings
import weakref
from types import SimpleNamespace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from asked_for import quick
from helpers import ROLLOUTS, first_layer, tiny_llama, uncached_logits

import specjax
from specjax import DecoderParams, EngineConfig, SamplingParams
from specjax.drafters.spec import ModelDrafter
from specjax.models import sharding
from specjax.rl.batch import ERROR, LENGTH, STOP, UNFINISHED
from specjax.rl.beginning import begun, expect, longest_first, resumed

FULL = pytest.mark.full
EOS = 7
PROMPTS = [[1, 2, 3], [4, 5, 6, 8, 9, 1, 2], [11], [20, 21] * 9]
SAMPLING = SamplingParams(temperature=0.8, max_tokens=40, seed=3)
ENGINE = dataclasses.replace(ROLLOUTS, row_buckets=(2,))
K = {"num_speculative_tokens": 3}
FIXED = K | {"policy": "fixed"}


@functools.cache
def target():
    return tiny_llama(0, eos_token_ids=(EOS,))


@functools.cache
def decoder(name):
    """Returns one of a few decoders; tests share what they compile, and what they learned."""
    drafters = {
        "plain": {},
        "ngram": {"drafter": "ngram"} | K,
        "history": {"drafter": "history"} | K,
        "trees": {
            "drafter": "history",
            "speculative_config": {"prompt_lookup_matches": 2},
        }
        | K,
        "hybrid": {
            "drafter": first_layer(target()),
            "speculative_config": {"corpus_tokens": 512},
        }
        | K,
    }
    return specjax.build_decoder(target(), engine=ENGINE, **drafters[name])


@functools.cache
def expected():
    """Returns the rollout that all others are held against."""
    return roll("plain")


def roll(name, params=None, prompts=PROMPTS, **arguments):
    arguments = {"num_samples": 2, "sampling": SAMPLING} | arguments
    weights = target().params if params is None else params
    return specjax.rollout(decoder(name), weights, prompts, **arguments)


def assert_same(actual, wanted):
    """Equal to the last bit in all that the policy decides."""
    for name in ("completion_ids", "completion_mask", "lengths", "finish_reasons"):
        np.testing.assert_array_equal(getattr(actual, name), getattr(wanted, name), name)
    chex.assert_trees_all_equal(actual.logprobs, wanted.logprobs)
    np.testing.assert_array_equal(actual.seeds, wanted.seeds)


def moved(params, by=0.05, seed=0):
    """Returns weights near others, as after a step of an optimiser."""
    rng = np.random.default_rng(seed)
    add = lambda x: x + by * jnp.asarray(rng.standard_normal(x.shape), x.dtype)
    return jax.tree.map(add, params)


# What it returns


@pytest.mark.full
def test_prompts_end_where_completions_begin():
    batch = expected()
    assert batch.prompt_ids.shape == (8, 18)
    assert batch.completion_ids.shape == (8, SAMPLING.max_tokens)
    assert batch.prompt_index.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    for index, prompt in enumerate(batch.prompt_index.tolist()):
        own = np.asarray(batch.prompt_ids)[index][np.asarray(batch.prompt_mask)[index]]
        assert own.tolist() == PROMPTS[prompt]
        assert np.asarray(batch.prompt_mask)[index, -1]
        length = int(batch.lengths[index])
        mask = np.asarray(batch.completion_mask)[index]
        assert mask.tolist() == [True] * length + [False] * (SAMPLING.max_tokens - length)
        tokens = np.asarray(batch.completion_ids)[index, :length].tolist()
        is_stopped = tokens[-1] == EOS
        assert int(batch.finish_reasons[index]) == (STOP if is_stopped else LENGTH)
        assert EOS not in tokens[:-1]
    assert len({tuple(row) for row in batch.completion_ids.tolist()}) >= 7
    assert set(np.unique(batch.finish_reasons)) == {STOP, LENGTH}
    np.testing.assert_array_equal(batch.is_truncated, batch.finish_reasons == LENGTH)
    share = float(np.mean(batch.is_truncated))
    assert share != 0.5
    assert batch.metrics["truncated_share"] == share
    assert (batch.metrics["num_unfinished"], batch.metrics["num_errors"]) == (0, 0)
    assert batch.metrics["longest"] == batch.lengths.max()
    assert batch.is_finished
    assert batch.is_exact
    assert batch.token_ids.shape == batch.token_mask.shape == (8, 58)
    assert (np.asarray(batch.params_versions) > 0).tolist() == batch.completion_mask.tolist()


@pytest.mark.full
def test_it_passes_through_jit():
    batch = expected()

    @jax.jit
    def loss(batch):
        total = jnp.sum(batch.logprobs.tempered * batch.completion_mask)
        return total - jnp.sum(batch.acceptance_rates), batch

    total, same = loss(batch)
    assert total < 0
    assert isinstance(same, specjax.Rollout)
    np.testing.assert_array_equal(same.completion_ids, batch.completion_ids)


@pytest.mark.full
def test_rollouts_are_sliced_joined_and_reshaped():
    batch, other = expected(), roll("plain", prompts=PROMPTS[:1], prompt_width=18)
    assert batch.metrics != other.metrics
    slices = [jax.tree.map(lambda x, at=at: x[at], batch) for at in np.split(np.arange(8), 4)]
    assert [part.num_samples for part in slices] == [2] * 4
    assert slices[1].lengths.tolist() == batch.lengths[2:4].tolist()
    joined = jax.tree.map(lambda *parts: jnp.concatenate(parts), *slices)
    chex.assert_trees_all_equal(joined, batch)
    assert (joined.metrics, joined.sampling) == (batch.metrics, batch.sampling)
    # Of another step, with other metrics.
    both = jax.tree.map(lambda *parts: jnp.concatenate(parts), batch, other)
    assert both.num_samples == 10
    grouped = jax.tree.map(lambda x: x.reshape(4, 2, *x.shape[1:]), batch)
    assert grouped.logprobs.raw.shape == (4, 2, SAMPLING.max_tokens)
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(batch))
    names = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(batch)]
    assert ".logprobs.behaviour" in names
    assert not any("metrics" in name for name in names)


@pytest.mark.full
def test_neither_metrics_nor_the_seed_compile_a_loss_anew():
    traced = []

    @jax.jit
    def loss(batch):
        traced.append((batch.metrics, batch.sampling))
        return jnp.sum(batch.logprobs.raw), batch

    colder = dataclasses.replace(SAMPLING, temperature=0.6, seed=4)
    for batch in (expected(), roll("plain", sampling=colder)):
        _, back = loss(batch)
        # Not those of the call that was compiled.
        assert (back.metrics, back.sampling) == ({}, None)
    assert traced == [({}, None)]


def log_softmax(x):
    return np.asarray(jax.nn.log_softmax(jnp.asarray(x, jnp.float32), axis=-1))


@pytest.mark.full
@pytest.mark.parametrize("name", ["plain", "history"])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_log_probabilities_are_what_they_are_called(name, temperature):
    sampling = SamplingParams(
        temperature=temperature,
        top_k=5,
        logit_bias={3: 1.5},
        max_tokens=12,
        seed=1,
        logprobs=3,
        entropy=True,
    )
    batch = roll(name, num_samples=1, sampling=sampling)
    for index, prompt in enumerate(PROMPTS):
        length = int(batch.lengths[index])
        tokens = np.asarray(batch.completion_ids)[index, :length]
        text = jnp.asarray([*prompt, *tokens[:-1]])[None]
        logits = uncached_logits(target().params, target().config, text)
        logits = np.asarray(logits)[0, len(prompt) - 1 :]
        biased = logits.copy()
        biased[:, 3] += 1.5
        if temperature:
            biased /= temperature
            least = np.sort(biased, axis=1)[:, -5][:, None]
            biased = np.where(biased >= least, biased, -np.inf)

        def of(values, tokens=tokens):
            return np.take_along_axis(values, tokens[:, None], 1)[:, 0]

        def own(values, index=index, length=length):
            return np.asarray(values)[index, :length]

        behaviour, raw = log_softmax(biased), log_softmax(logits)
        tempered = log_softmax(logits / (temperature or 1.0))
        near = functools.partial(np.testing.assert_allclose, atol=2e-5)
        near(own(batch.logprobs.behaviour), of(behaviour))
        near(own(batch.logprobs.tempered), of(tempered))
        near(own(batch.logprobs.raw), of(raw))
        probs = np.exp(behaviour)
        entropy = -np.sum(probs * np.where(probs > 0, behaviour, 0), axis=1)
        near(own(batch.entropy), entropy)
        near(own(batch.top_logprobs), -np.sort(-behaviour, axis=1)[:, :3])
        at = np.take_along_axis(behaviour, own(batch.top_ids), axis=1)
        near(own(batch.top_logprobs), at)
    after = ~np.asarray(batch.completion_mask)
    for values in (*jax.tree.leaves(batch.logprobs), batch.entropy):
        assert not np.asarray(values)[after].any()


# What it is a function of


@pytest.mark.parametrize(
    "name",
    quick(["history", "ngram", "trees", "hybrid"], "history", slow=["ngram", "trees"]),
)
def test_drafts_change_nothing(name):
    for _ in range(2):  # the second time the corpus holds the answers
        actual = roll(name)
        assert_same(actual, expected())
    assert actual.metrics["num_drafted"] > 0
    assert int(np.sum(actual.num_accepted)) == actual.metrics["num_accepted"]
    assert np.all(np.asarray(actual.acceptance_rates) <= 1)


@pytest.mark.full
def test_earlier_answers_are_drafted():
    history = specjax.build_decoder(
        target(), drafter="history", engine=ENGINE, speculative_config=FIXED
    )
    rates = [
        specjax.rollout(
            history, target().params, PROMPTS, num_samples=2, sampling=SAMPLING
        ).metrics["acceptance_rate"]
        for _ in range(2)
    ]
    assert rates[1] > max(0.8, rates[0])


def test_neither_order_nor_company_matter():
    order = [3, 1, 0, 2]
    shuffled = roll("history", prompts=[PROMPTS[i] for i in order])
    for place, index in enumerate(order):
        for sample in range(2):
            np.testing.assert_array_equal(
                shuffled.completion_ids[2 * place + sample],
                expected().completion_ids[2 * index + sample],
            )
    alone = roll("plain", prompts=PROMPTS[:1], num_samples=1)
    np.testing.assert_array_equal(alone.completion_ids[0], expected().completion_ids[0])


def test_a_prompt_that_comes_twice_has_samples_of_its_own():
    twice = roll("plain", prompts=[PROMPTS[0], PROMPTS[0]])
    assert len({tuple(row) for row in twice.completion_ids.tolist()}) == 4
    np.testing.assert_array_equal(twice.completion_ids[:2], expected().completion_ids[:2])


@pytest.mark.full
def test_seeds_are_those_of_generate():
    batch = roll("plain", seeds=[5, 6, 7, 8])
    sampling = [SamplingParams(temperature=0.8, max_tokens=40, seed=s, n=2) for s in (5, 6, 7, 8)]
    said = specjax.generate(target(), PROMPTS, sampling=sampling, engine=ENGINE)
    for index, completion in enumerate(said):
        length = int(batch.lengths[index])
        assert batch.completion_ids[index, :length].tolist() == completion.token_ids


def test_without_a_seed_each_call_is_another():
    loose = SamplingParams(max_tokens=10)
    first, second = (roll("plain", sampling=loose) for _ in range(2))
    assert np.any(first.completion_ids != second.completion_ids)
    assert np.any(first.seeds != second.seeds)


def test_arrays_of_prompts_may_be_padded_on_either_side():
    ids, mask = np.zeros((4, 20), np.int32), np.zeros((4, 20), bool)
    for row, prompt in enumerate(PROMPTS):
        where = slice(20 - len(prompt), 20) if row % 2 else slice(len(prompt))
        ids[row, where], mask[row, where] = prompt, True
    batch = roll("plain", prompts=jnp.asarray(ids), prompt_mask=jnp.asarray(mask))
    assert_same(batch, expected())
    assert batch.prompt_ids.shape == (8, 20)


# Weights


@pytest.mark.full
def test_new_weights_compile_nothing_and_are_not_held():
    name, params = "hybrid", target().params
    roll(name)
    for _ in range(3):  # until all that the policy may choose was compiled
        roll(name, moved(params))
    num_traces, num_arrays = decoder(name).num_traces, None
    hand_over_s = []
    for step in range(100):
        params = moved(params, by=1e-3, seed=step)
        kept = weakref.ref(jax.tree.leaves(params)[0])
        batch = roll(name, params, prompts=PROMPTS[:1], num_samples=1)
        hand_over_s.append(batch.metrics["hand_over_s"])
        version = batch.metrics["params_version"]
        assert set(batch.params_versions[batch.completion_mask].tolist()) == {version}
        del batch
        if step == 50:
            gc.collect()
            num_arrays = len(jax.live_arrays())
    gc.collect()
    assert len(jax.live_arrays()) <= num_arrays
    assert decoder(name).num_traces == num_traces
    assert np.median(hand_over_s) < 2e-2  # below 1e-3 where nothing else runs
    del params
    gc.collect()
    assert kept() is None


@pytest.mark.full
def test_pages_of_other_weights_are_not_read():
    other = moved(target().params)
    fresh = specjax.build_decoder(target(), engine=ENGINE)
    wanted = specjax.rollout(fresh, other, PROMPTS, num_samples=2, sampling=SAMPLING)
    roll("history")
    assert_same(roll("history", other), wanted)
    assert np.any(wanted.completion_ids != expected().completion_ids)


@pytest.mark.full
def test_the_trainer_keeps_its_buffers():
    params = moved(target().params)
    roll("hybrid", params)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(params))


def test_arrays_of_numpy_are_read_anew_each_time():
    params = jax.tree.map(np.array, target().params)
    assert_same(roll("plain", params), expected())
    for leaf in jax.tree.leaves(params):
        leaf *= 1.3
    changed = roll("plain", params)
    assert_same(changed, roll("plain", jax.tree.map(jnp.array, params)))
    assert np.any(changed.completion_ids != expected().completion_ids)


@pytest.mark.full
def test_a_draft_model_may_be_renewed_with_the_policy():
    draft = first_layer(target()).params
    params = DecoderParams(target().params, jax.tree.map(lambda x: x * 1.0, draft))
    assert_same(roll("hybrid", params), expected())
    assert_same(roll("plain", DecoderParams(target().params)), expected())


@pytest.mark.full
def test_the_weights_of_a_drafter_may_come_with_the_policy():
    draft = first_layer(target())
    bare = specjax.build_decoder(
        target(), drafter=ModelDrafter(draft.config), engine=ENGINE, speculative_config=FIXED
    )
    run = lambda params: specjax.rollout(bare, params, PROMPTS, num_samples=2, sampling=SAMPLING)
    with pytest.raises(
        ValueError, match=r"the drafter's params is not .* or of its abstract_params"
    ):
        run(target().params)
    found = run(DecoderParams(target().params, draft.params))
    assert_same(found, expected())
    assert found.metrics["num_accepted"] > 0


@pytest.mark.full
def test_a_drafter_whose_weights_are_nan_is_off_until_there_are_others():
    nan = jax.tree.map(lambda x: x * jnp.nan, first_layer(target()).params)
    single = specjax.build_decoder(
        target(), drafter=first_layer(target()), engine=ENGINE, speculative_config=FIXED
    )
    run = lambda params: specjax.rollout(single, params, PROMPTS, num_samples=2, sampling=SAMPLING)
    with pytest.warns(UserWarning, match="turned off for this run: it proposed NaN"):
        assert_same(run(DecoderParams(target().params, nan)), expected())
    again = run(target().params)
    assert_same(again, expected())
    assert again.metrics["num_accepted"] > 0


# Stopping and going on


def finish(name, batch, params=None, **arguments):
    """Goes on until all have ended; returns the rollout and how many calls it took."""
    calls = 0
    while not batch.is_finished:
        weights = target().params if params is None else params
        batch = specjax.rollout(decoder(name), weights, batch, sampling=SAMPLING, **arguments)
        calls += 1
    return batch, calls


@pytest.mark.parametrize("name", ["plain", "history", pytest.param("hybrid", marks=FULL)])
@pytest.mark.parametrize("keeps", [True, False])
def test_stopped_every_16_tokens_and_resumed(name, keeps):
    batch = roll(name, token_budget=16)
    assert batch.lengths.max() == 16
    if not keeps:  # the pages are gone: all tokens are fed again
        decoder(name).hand_over(moved(target().params))
        decoder(name).let_go()
    batch, calls = finish(name, batch, token_budget=16)
    assert calls == 2
    assert_same(batch, expected())


def test_a_finished_rollout_is_returned_as_it_is():
    again = specjax.rollout(decoder("plain"), target().params, expected(), sampling=SAMPLING)
    assert_same(again, expected())
    assert again.metrics["num_tokens"] == 0


def test_versions_say_which_weights_sampled_a_token():
    first = roll("history", token_budget=10, params_version=41)
    other = moved(target().params)
    batch = specjax.rollout(decoder("history"), other, first, sampling=SAMPLING, params_version=42)
    versions, mask = (np.asarray(x) for x in (batch.params_versions, batch.completion_mask))
    assert np.all(versions[:, :10][mask[:, :10]] == 41)
    assert np.all(versions[:, 10:][mask[:, 10:]] == 42)
    old = lambda x: np.asarray(x)[:, :10]
    np.testing.assert_array_equal(old(batch.completion_ids), old(expected().completion_ids))
    chex.assert_trees_all_equal(
        jax.tree.map(old, batch.logprobs), jax.tree.map(old, expected().logprobs)
    )
    assert np.any(batch.completion_ids != expected().completion_ids)


def test_a_time_that_is_over_leaves_the_rest():
    batch = roll("history", time_budget_s=1e-9)
    assert np.all(np.asarray(batch.finish_reasons) == UNFINISHED)
    assert not np.asarray(batch.completion_mask).any()
    batch, _ = finish("history", batch)
    assert_same(batch, expected())


@pytest.mark.full
def test_stop_strings_go_on_where_they_were():
    demo = specjax.load_model("demo")
    engine = EngineConfig(max_rows=2, max_context=96, page_size=8)
    texts = specjax.build_decoder(demo, engine=engine)
    # Of two tokens, and the rollout stops after each.
    sampling = SamplingParams(temperature=0, max_tokens=24, stop=".assert")
    run = functools.partial(specjax.rollout, texts, demo.params, sampling=sampling)
    whole = run(["def fibonacci(n):", "class A:"])
    assert set(whole.finish_reasons.tolist()) <= {STOP, LENGTH}
    assert STOP in whole.finish_reasons.tolist()
    batch = run(["def fibonacci(n):", "class A:"], token_budget=1)
    while not batch.is_finished:
        batch = run(batch, token_budget=1)
    np.testing.assert_array_equal(batch.completion_ids, whole.completion_ids)
    np.testing.assert_array_equal(batch.finish_reasons, whole.finish_reasons)


@pytest.mark.parametrize(
    ("before", "after", "min_tokens", "num_used"),
    [
        (["END"], [" O", "F"], 0, 2),
        (["END", " O"], ["F", "END"], 0, 1),
        # The whole string stood there before a stop string could end the text.
        (["END", " O", "F"], ["END", " O"], 3, None),
        (["END", " O", "F"], ["END", " O", "F", "F"], 3, 3),
    ],
)
def test_a_stop_string_may_begin_before_a_pause(before, after, min_tokens, num_used):
    demo = specjax.load_model("demo")
    texts = specjax.build_decoder(demo, engine=ENGINE)
    sampling = SamplingParams(max_tokens=24, stop="END OF", min_tokens=min_tokens, seed=0)
    before, after = (
        [token for text in part for token in demo.tokenizer.encode(text)]
        for part in (before, after)
    )
    table, _ = begun(texts, ["x ="], None, sampling=sampling, num_samples=1, seeds=None, width=None)
    table.completion_ids[0, : len(before)] = before
    table.lengths[0], table.finish_reasons[0] = len(before), UNFINISHED
    paused = table.placed(None, sampling=None, metrics={}, is_exact=True)
    request = resumed(texts, paused, sampling, "seeded")[1][0]
    request.take_step(after, 0, 0, 0, [None] * len(after))
    assert request.finish_reason == (None if num_used is None else "stop")
    assert request.output_token_ids == before + after[:num_used]


def test_the_longest_go_first():
    new = specjax.build_decoder(target(), engine=ENGINE)
    made, _ = new.requests(PROMPTS, [SamplingParams(n=2, seed=0)] * 4)
    requests = dict(enumerate(made))
    table = SimpleNamespace(prompt_index=np.repeat(np.arange(4), 2))

    def order(lengths):
        expect(new, table, requests, lengths)
        return longest_first(requests)

    assert order([1, 9, 5, 3]) == [2, 3, 4, 5, 6, 7, 0, 1]
    assert order(None) == list(range(8))
    new.learn_length(PROMPTS[3], 20)
    new.learn_length(PROMPTS[1], 30)
    assert order(None) == [2, 3, 6, 7, 0, 1, 4, 5]


def test_lengths_are_learned():
    plain = decoder("plain")
    expected()
    for prompt in range(4):
        longest = int(expected().lengths[2 * prompt : 2 * prompt + 2].max())
        assert 0 < plain.expected_length(PROMPTS[prompt]) <= SAMPLING.max_tokens
        assert longest
    assert plain.expected_length([60]) == 0


# Meshes


@pytest.mark.full
def test_over_a_mesh_results_lie_as_rows_do():
    mesh = jax.make_mesh((2,), ("data",))
    split = specjax.build_decoder(target(), engine=ENGINE, drafter="history", mesh=mesh, **K)
    run = functools.partial(
        specjax.rollout,
        split,
        target().params,
        PROMPTS,
        num_samples=2,
        sampling=SAMPLING,
    )
    for _ in range(2):
        batch = run()
        np.testing.assert_array_equal(batch.completion_ids, expected().completion_ids)
    assert batch.completion_ids.sharding.spec == jax.sharding.PartitionSpec("data")
    assert len(batch.completion_ids.sharding.device_set) == 2
    assert batch.metrics["num_accepted"] > 0
    assert batch.completion_ids.sharding.mesh == mesh
    # Axes of a type that others do not mix with: a loss over the same mesh takes it.
    assert mesh.axis_types == (jax.sharding.AxisType.Explicit,)
    weights = jax.device_put(np.ones(8, np.float32), batch.lengths.sharding)
    with jax.set_mesh(mesh):
        in_context = run()
        total = jax.jit(lambda batch: jnp.sum(batch.acceptance_rates * weights))(batch)
    assert_same(in_context, expected())
    assert in_context.completion_ids.sharding.mesh == mesh
    assert total.sharding.mesh == mesh
    told = specjax.score(split, target().params, batch)
    assert told.raw.sharding == batch.completion_ids.sharding


@pytest.mark.full
@pytest.mark.parametrize("axis_type", ["Explicit", "Auto"])
def test_weights_that_lie_over_the_mesh_already_are_not_copied(axis_type):
    kind = getattr(jax.sharding.AxisType, axis_type)
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), axis_types=(kind, kind))
    specs = sharding.param_specs(target().params, mesh, target().config)
    params = sharding.place(target().params, specs, mesh)
    placed = decoder_of(mesh).place_params(DecoderParams(params)).target
    where = lambda tree: [
        shard.data.unsafe_buffer_pointer()
        for leaf in jax.tree.leaves(tree)
        for shard in leaf.addressable_shards
    ]
    assert where(placed) == where(params)
    # Those that lie otherwise are: that is what docs/rollouts.md says.
    elsewhere = decoder_of(mesh).place_params(DecoderParams(target().params)).target
    assert where(elsewhere) != where(target().params)


def decoder_of(mesh):
    """Returns the compiled functions of a rollout over a mesh, none compiled yet."""
    split = specjax.build_decoder(target(), engine=ENGINE, mesh=mesh)
    setup = split._setup
    return setup.decoder(setup.standing_sizes(), [])


@pytest.mark.parametrize(
    ("shape", "axes", "match"),
    [
        (
            (2,),
            ("model",),
            r"unknown names, 'model' \(2 devices\).*mesh_axes=\{'model': 'tensor'\}",
        ),
        ((4,), ("tensor",), "num_kv_heads=2 is not divisible by .* tensor axis of 4"),
    ],
)
def test_a_mesh_that_the_model_cannot_be_split_over(shape, axes, match):
    mesh = jax.make_mesh(shape, axes)
    for make in (
        lambda: specjax.build_decoder(target(), engine=ENGINE, mesh=mesh),
        lambda: specjax.Engine(target(), engine=ENGINE, mesh=mesh),
        lambda: specjax.generate(target(), PROMPTS, engine=ENGINE, mesh=mesh),
    ):
        with pytest.raises(ValueError, match=match):
            make()


def test_weights_over_several_devices_need_a_mesh():
    mesh = jax.make_mesh((2,), ("data",))
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    with pytest.raises(ValueError, match="lie over 2 devices, and no mesh was given"):
        roll("plain", jax.device_put(target().params, everywhere))
    assert_same(roll("plain"), expected())


@pytest.mark.full
def test_scores_over_a_mesh_of_tensors():
    mesh = jax.make_mesh((2,), ("tensor",))
    split = specjax.build_decoder(target(), engine=ENGINE, mesh=mesh)
    told = specjax.score(split, target().params, expected(), sampling=SAMPLING)
    mask = np.asarray(expected().completion_mask)
    for name in ("behaviour", "tempered", "raw"):
        actual, wanted = getattr(told, name), getattr(expected().logprobs, name)
        np.testing.assert_allclose(actual[mask], wanted[mask], atol=2e-5)


@pytest.mark.full
def test_preemption_changes_no_bit():
    """Pages for two of four rows at their longest: the others are put back to wait."""
    engine = dataclasses.replace(ENGINE, num_pages=13, burst_steps=4)
    tight = specjax.build_decoder(
        target(), engine=engine, drafter="ngram", speculative_config=FIXED
    )
    sampling = dataclasses.replace(SAMPLING, ignore_eos=True)
    batch = specjax.rollout(tight, target().params, PROMPTS, num_samples=2, sampling=sampling)
    assert batch.metrics["num_preemptions"] > 0
    assert_same(batch, roll("plain", sampling=sampling))


# What is refused, and what it leaves


def bad(match, name="plain", **arguments):
    with pytest.raises(ValueError, match=match):
        roll(name, **arguments)
    # Nothing is left of it.
    assert_same(roll(name), expected())


def test_weights_of_another_shape():
    params = target().params
    short = {**params, "norm": params["norm"][:-1]}
    bad(r"norm \(32,\)  norm \(31,\)\nNo named layout", params=short)
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    bad("bfloat16.*build_decoder takes dtype=", params=half)
    bad(r"norm \(32,\)  -\nNo", params={k: v for k, v in params.items() if k != "norm"})
    gone = jax.tree.map(lambda x: x * 1.0, params)
    gone["norm"].delete()
    bad(r"params\['norm'\] was deleted", params=gone)


@pytest.mark.full
def test_weights_that_are_nan_do_not_poison_the_next():
    nan = jax.tree.map(lambda x: x * jnp.nan, target().params)
    for name in ("plain", "history"):
        bad("no sample could be drawn: the model's logits were NaN", name, params=nan)
    # The very pages that hold NaN are read again, past what is final.
    assert_same(roll("hybrid"), expected())


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"num_samples": 0}, "num_samples=0 must be a whole number of at least 1"),
        ({"num_samples": 1.5}, "num_samples=1.5 must be"),
        ({"prompts": []}, "no prompts were given"),
        (
            {"prompts": [[1] * 96, [2] * 200]},
            "no prompt can be served: prompt 0: the prompt has 96",
        ),
        ({"prompts": [[]]}, "no prompt can be served: .*empty"),
        ({"prompts": np.ones((2, 3), np.int32)}, "needs prompt_mask"),
        ({"prompts": np.ones((2, 3))}, "float64.2, 3.; expected whole numbers"),
        (
            {"prompts": np.ones((2, 3), int), "prompt_mask": np.ones((2, 2), bool)},
            "must be that of the prompts",
        ),
        ({"prompt_mask": np.ones((2, 2), bool)}, "goes with an array"),
        ({"sampling": SamplingParams(n=3)}, "sampling.n=3 must be left at 1"),
        ({"sampling": SamplingParams(stop_token_ids=[61])}, "stop_token_ids holds 61"),
        ({"seeds": [1, 2]}, "2 seeds were given for 4 prompts"),
        ({"seeds": [1, 2, 3, 0.5]}, "seed=0.5 must be a whole number from 0"),
        ({"seeds": [1, 2, 3, 2**64]}, "seed=18446744073709551616 must be"),
        ({"sampling": SamplingParams(verification="block")}, "is not compiled into"),
        ({"params_version": 2**31}, "params_version=2147483648 must be from 0"),
        ({"params_version": "a"}, "params_version='a' must be from 0"),
        ({"alarm_rate": 9}, "alarm_rate=9 must be a share"),
        ({"expected_lengths": [1.0]}, "must be 4 numbers, one per prompt"),
        ({"expected_lengths": [1, 2, 3, np.nan]}, "must be 4 numbers"),
        ({"prompt_width": 3}, "prompt_width=3 is below the 18 tokens"),
        ({"token_budget": 0}, "token_budget=0 must be"),
        ({"time_budget_s": 0}, "time_budget_s=0 must be"),
    ],
)
def test_refused(arguments, match):
    with pytest.raises(ValueError, match=match):
        roll("plain", **arguments)


def test_one_prompt_that_is_too_long_is_its_own_error():
    with pytest.warns(UserWarning, match="2 of 10 samples were refused .* prompt 1"):
        batch = roll("plain", prompts=[PROMPTS[0], [1] * 96, *PROMPTS[1:]], prompt_width=18)
    reasons = batch.finish_reasons.tolist()
    assert reasons[2:4] == [ERROR, ERROR]
    assert not np.asarray(batch.completion_mask)[2:4].any()
    others = [0, 1, *range(4, 10)]
    np.testing.assert_array_equal(
        np.asarray(batch.completion_ids)[others], expected().completion_ids
    )


def test_what_goes_on_keeps_what_it_began_with():
    batch = roll("plain", token_budget=4)
    go_on = functools.partial(specjax.rollout, decoder("plain"), target().params, batch)
    with pytest.raises(ValueError, match="leave out num_samples"):
        go_on(num_samples=2, sampling=SAMPLING)
    for name, value, own in (
        ("max_tokens", 41, "40"),
        ("temperature", 0.9, "0.8"),
        ("top_p", 0.9, "1.0"),
        ("logit_bias", {3: 1.0}, "{}"),
        ("stop_token_ids", [5], r"\(\)"),
        ("verification", "greedy", "'seeded'"),
        ("logprobs", 2, "0"),
    ):
        other = dataclasses.replace(SAMPLING, **{name: value})
        message = rf"sampling.{name}=.* is not that of the rollout, {own}; pass the"
        with pytest.raises(ValueError, match=message):
            go_on(sampling=other)
    assert batch.sampling == dataclasses.replace(
        SAMPLING.filled({}), seed=None, verification="seeded", logprobs=0
    )
    # Out of jit it no longer says; what its arrays tell is held against them.
    bare = jax.jit(lambda batch: batch)(batch)
    with pytest.raises(ValueError, match="max_tokens=41 is not that of the rollout"):
        specjax.rollout(
            decoder("plain"),
            target().params,
            bare,
            sampling=dataclasses.replace(SAMPLING, max_tokens=41),
        )


def test_what_goes_on_needs_no_parameters():
    batch = roll("plain", token_budget=4)
    batch = specjax.rollout(decoder("plain"), target().params, batch)
    assert_same(batch, expected())
    # How much is drafted, and a seed that has no use any more, may be others.
    batch = roll("plain", token_budget=4)
    others = dataclasses.replace(SAMPLING, seed=9, speculate=False)
    batch = specjax.rollout(
        decoder("plain"), target().params, batch, sampling=others, token_budget=4
    )
    assert batch.lengths.max() == 8


@pytest.mark.full
def test_a_drafter_that_no_longer_fits_says_so():
    # Of the shape of the draft model above, whose steps it shares.
    other = tiny_llama(9, num_layers=1, eos_token_ids=(EOS,))
    wrong = specjax.build_decoder(target(), drafter=other, engine=ENGINE, speculative_config=FIXED)
    sampling = SamplingParams(max_tokens=60, ignore_eos=True, seed=0)
    run = functools.partial(
        specjax.rollout,
        wrong,
        target().params,
        PROMPTS,
        num_samples=4,
        sampling=sampling,
    )
    with pytest.warns(UserWarning, match="it no longer fits the policy"):
        batch = run()
    assert batch.metrics["is_alarmed"] == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(alarm_rate=0.0)


def test_lossy_rules_say_so():
    lossy = specjax.build_decoder(
        target(),
        drafter=first_layer(target()),
        verification="typical",
        engine=EngineConfig(),
    )
    assert not lossy.is_exact
    assert decoder("history").is_exact


# Scoring


@pytest.mark.full
@pytest.mark.parametrize("name", ["plain", "history"])
def test_a_rollout_scores_as_it_was_sampled(name):
    sampling = SamplingParams(temperature=0.7, top_p=0.9, max_tokens=30, seed=2)
    batch = roll(name, num_samples=3, sampling=sampling)
    told = specjax.score(decoder(name), target().params, batch, sampling=sampling)
    mask = np.asarray(batch.completion_mask)
    for field in ("behaviour", "tempered", "raw"):
        said, scored = (np.asarray(getattr(x, field)) for x in (batch.logprobs, told))
        np.testing.assert_array_equal(scored, said, err_msg=field)
        assert not scored[~mask].any()
    other = specjax.score(decoder(name), moved(target().params), batch, sampling=sampling)
    gap = jax.jit(specjax.logprob_gap)
    none = gap(batch.logprobs.tempered, told.tempered, mask)
    assert not any(float(none[key]) for key in ("mean_gap", "largest_gap", "kl"))
    assert float(none["mean_ratio"]) == 1
    some = gap(batch.logprobs.tempered, other.tempered, mask)
    assert float(some["mean_gap"]) > 1e-3
    assert float(some["kl"]) > 0


@pytest.mark.full
def test_texts_may_be_of_any_kind():
    engine = EngineConfig(page_size=8, max_rows=2, max_context=96)
    fast = specjax.build_decoder(target(), engine=engine)
    rng = np.random.default_rng(0)
    texts = [rng.integers(0, 61, n).tolist() for n in (90, 3, 17)]
    ids, mask = np.zeros((3, 90), np.int32), np.zeros((3, 90), bool)
    for row, text in enumerate(texts):
        ids[row, -len(text) :], mask[row, -len(text) :] = text, True
    given = specjax.Texts(ids[:, -2:], mask[:, -2:], ids[:, :-2], mask[:, :-2])
    # Columns are in the order of the text: the last two of it come first here.
    swapped = [[*text[-2:], *text[:-2]] for text in texts]
    told = specjax.score(fast, target().params, given)
    for row, text in enumerate(swapped):
        logits = uncached_logits(target().params, target().config, jnp.asarray([text]))
        after = log_softmax(logits)[0]
        wanted = [after[at - 1, text[at]] for at in range(2, len(text))]
        np.testing.assert_allclose(np.asarray(told.raw)[row][mask[row, :-2]], wanted, atol=2e-5)
    has_prompt = np.array([[1], [0], [1]], bool)
    empty = given._replace(prompt_mask=given.prompt_mask & has_prompt)
    with pytest.raises(ValueError, match="text 1 has an empty prompt"):
        specjax.score(fast, target().params, empty)
    long = [np.ones((1, n), int) for n in (9, 9, 90, 90)]
    with pytest.raises(ValueError, match="text 0 has 99 tokens and the decoder's rows hold 96"):
        specjax.score(fast, target().params, specjax.Texts(*long))


# What other runs said


@pytest.mark.full
def test_answers_of_other_runs_are_drafted():
    told = specjax.build_decoder(
        target(), drafter="history", engine=ENGINE, speculative_config=FIXED
    )
    run = functools.partial(
        specjax.rollout,
        told,
        target().params,
        PROMPTS,
        num_samples=2,
        sampling=SAMPLING,
    )
    batch = expected()
    prompts = [PROMPTS[index] for index in batch.prompt_index.tolist()]
    answers = [ids[:length] for ids, length in zip(np.asarray(batch.completion_ids), batch.lengths)]
    told.remember(prompts, answers)
    informed = run()
    assert_same(informed, batch)
    told.forget()
    ignorant = run()
    assert_same(ignorant, batch)
    rates = [each.metrics["acceptance_rate"] for each in (informed, ignorant)]
    assert rates[0] > max(0.8, rates[1])
    assert told.expected_length(PROMPTS[0]) > 0
    with pytest.raises(ValueError, match="8 prompts and 7 completions"):
        told.remember(prompts, answers[1:])
    decoder("plain").remember(prompts, answers)  # has no use for them
    assert_same(roll("plain"), batch)


# What a review found


@pytest.mark.full
def test_the_first_weights_are_not_held_either():
    history = specjax.build_decoder(target(), engine=ENGINE, drafter="history", **K)
    first = moved(target().params)
    kept = [weakref.ref(leaf) for leaf in jax.tree.leaves(first)]
    run = functools.partial(specjax.rollout, history, sampling=SAMPLING)
    run(first, PROMPTS)
    run(target().params, PROMPTS)
    del first
    gc.collect()
    assert not any(ref() for ref in kept)


@pytest.mark.parametrize("at", ["step", "pause"])
def test_an_interruption_leaves_nothing(at, monkeypatch):
    roll("history")
    loop = decoder("history").hand_over(target().params)
    step, num_steps = type(loop).step, []

    def interrupted(self, *arguments):
        num_steps.append(1)
        if len(num_steps) == 3:
            raise KeyboardInterrupt
        return step(self, *arguments)

    def unreadable(self, moved):
        raise KeyboardInterrupt

    other = moved(target().params)
    with monkeypatch.context() as patch:
        if at == "step":
            patch.setattr(type(loop), "step", interrupted)
        else:
            patch.setattr(type(loop), "_read", unreadable)
        with pytest.raises(KeyboardInterrupt):
            roll("history", other)
    assert_same(roll("history"), expected())
    assert_same(roll("history"), expected())
    with monkeypatch.context() as patch:
        patch.setattr(type(loop), "_read", unreadable)
        with pytest.raises(KeyboardInterrupt):
            roll("history")
    decoder("history").forget()
    assert_same(roll("history"), expected())


def test_seeds_keep_all_their_bits():
    seeds = [1, 2**63 + 1, 2**63 + 2, 2]
    batch = roll("plain", seeds=seeds)
    assert len({tuple(words) for words in np.asarray(batch.seeds).tolist()}) == 8
    again = roll("plain", seeds=np.array(seeds, np.uint64))
    assert_same(again, batch)


def test_prompts_that_are_none_are_errors_of_their_own():
    strange = ["a", [1, None], [2**70], [[1, 2]], [-1], [61], [1.5]]
    for one in strange:
        with pytest.warns(UserWarning, match="2 of 4 samples were refused"):
            batch = roll("plain", prompts=[PROMPTS[0], one])
        np.testing.assert_array_equal(batch.completion_ids[:2], expected().completion_ids[:2])
        assert batch.finish_reasons.tolist()[2:] == [ERROR, ERROR]
        assert not np.asarray(batch.prompt_mask)[2:].any()
    told = specjax.score(decoder("plain"), target().params, batch, sampling=SAMPLING)
    np.testing.assert_array_equal(told.raw[:2], batch.logprobs.raw[:2])
    assert not np.asarray(told.raw[2:]).any()


@pytest.mark.full
def test_lengths_are_learned_once_all_samples_have_ended():
    slow = specjax.build_decoder(target(), engine=ENGINE)
    run = functools.partial(
        specjax.rollout, slow, target().params, sampling=SAMPLING, token_budget=8
    )
    batch = run(PROMPTS, num_samples=2)
    while not batch.is_finished:
        for index, prompt in enumerate(PROMPTS):
            own = np.asarray(batch.prompt_index) == index
            has_ended = not np.any(np.asarray(batch.finish_reasons)[own] == UNFINISHED)
            assert (slow.expected_length(prompt) > 0) == has_ended
        batch = run(batch)
    for index, prompt in enumerate(PROMPTS):
        own = np.asarray(batch.prompt_index) == index
        assert slow.expected_length(prompt) == np.asarray(batch.lengths)[own].max()


def test_errors_say_what_failed_while_samples_were_drawn():
    embedding = target().params["embed_tokens"]
    params = target().params | {"embed_tokens": embedding.at[11].set(jnp.nan)}
    with pytest.warns(UserWarning, match="1 of 2 samples have finish reason ERROR"):
        batch = roll("plain", params, prompts=[PROMPTS[1], [11]], num_samples=1)
    assert batch.finish_reasons.tolist() == [STOP, ERROR]
    np.testing.assert_array_equal(batch.completion_ids[0], expected().completion_ids[2])
    assert list(batch.errors) == [1]
    assert "the model's logits were NaN" in batch.errors[1]


def test_weights_that_are_nan_raise_on_resuming_too():
    begun = roll("plain", token_budget=4)
    nan = jax.tree.map(lambda x: x * jnp.nan, target().params)
    with pytest.raises(ValueError, match="no sample could be drawn"):
        specjax.rollout(decoder("plain"), nan, begun, sampling=SAMPLING)
    batch, _ = finish("plain", begun)
    assert_same(batch, expected())


@pytest.mark.full
def test_what_was_written_before_a_pause_is_drafted_from():
    history = specjax.build_decoder(
        target(), drafter="history", engine=ENGINE, speculative_config=FIXED
    )
    run = functools.partial(specjax.rollout, history, target().params, sampling=SAMPLING)
    batch = run(PROMPTS, num_samples=2, token_budget=16)
    loop = history.hand_over(target().params)
    assert loop._run.feed.num_waiting > 0 or np.asarray(loop._run.device_state.drafter.head) > 0
    assert_same(run(PROMPTS, num_samples=2), expected())
    del batch


def test_completions_are_no_wider_than_rows():
    long = SamplingParams(max_tokens=10**7, temperature=0.8, seed=3)
    batch = roll("plain", prompts=PROMPTS[:1], sampling=long)
    assert batch.completion_ids.shape == (2, ENGINE.max_context)


@pytest.mark.full
def test_samples_that_do_not_divide_over_the_mesh():
    mesh = jax.make_mesh((2,), ("data",))
    split = specjax.build_decoder(target(), engine=ENGINE, mesh=mesh)
    batch = specjax.rollout(split, target().params, PROMPTS[:3], num_samples=1, sampling=SAMPLING)
    np.testing.assert_array_equal(
        batch.completion_ids, np.asarray(expected().completion_ids)[[0, 2, 4]]
    )


def test_text_outside_the_vocabulary_is_refused_where_it_is_told():
    with pytest.raises(ValueError, match="token id 1000 is outside the vocabulary"):
        decoder("history").remember([[1, 2, 3]], [[4, 1000]])
    assert_same(roll("history"), expected())


def test_a_corpus_that_cannot_be_is_refused_at_once():
    with pytest.raises(ValueError, match="corpus_tokens=10 must be from 65"):
        specjax.build_decoder(target(), drafter="history", speculative_config={"corpus_tokens": 10})
