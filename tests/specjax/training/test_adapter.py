"""A drafter that follows a policy: it is accepted more, and changes nothing else."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import tiny_llama

import specjax
from specjax.heads.specs import EagleDrafter
from specjax.policy.goodput import Goodput
from specjax.policy.survival import Survival
from specjax.training import eagle3, figures, replay
from specjax.training.adapter import DrafterAdapter, draft_loss
from specjax.training.objective import Objective
from specjax.training.texts import Target, TextBatch

ENGINE = specjax.EngineConfig(page_size=8, max_rows=8, max_context=48, burst_steps=8)
SAMPLING = specjax.SamplingParams(temperature=0.7, max_tokens=16, seed=0, ignore_eos=True)
PROMPTS = [[i, i + 1, 3] for i in range(8)]


@pytest.fixture(scope="module")
def policy():
    return tiny_llama(0)


@pytest.fixture(scope="module")
def head(policy):
    config = eagle3.configure(policy.config, {"aux_layers": (1, 2)})
    target = Target(policy.config, policy.params)
    params = eagle3.begin(jax.random.key(0), config, target, None)
    return specjax.LoadedDrafter("head", EagleDrafter(config), params)


@pytest.fixture(scope="module")
def decoder(policy, head):
    return specjax.build_decoder(
        policy.config, drafter=head, engine=ENGINE, num_speculative_tokens=2
    )


@pytest.fixture(scope="module")
def adapter(decoder):
    return DrafterAdapter(decoder, optax.adam(0.02), updates=4, rows=8, replay=16)


def _sampled(decoder, weights, seed=0, **others):
    sampling = dataclasses.replace(SAMPLING, seed=seed)
    return specjax.rollout(
        decoder, weights, PROMPTS, sampling=sampling, prompt_width=4, alarm_rate=0, **others
    )


@pytest.mark.full
def test_it_is_accepted_more_and_changes_no_token(policy, decoder, adapter):
    plain = specjax.build_decoder(policy.config, engine=ENGINE)
    state, rates, traces = adapter.init(), [], set()
    for step in range(8):
        batch = _sampled(decoder, adapter.weights(policy.params, state), seed=step % 2)
        expected = _sampled(plain, policy.params, seed=step % 2)
        np.testing.assert_array_equal(batch.completion_ids, expected.completion_ids)
        before = state
        state, stats = adapter.step(state, policy.params, batch)
        assert stats.has_learned
        assert np.isfinite(stats.loss)
        rates.append(stats.acceptance_rate)
        traces.add((decoder.num_traces, adapter.num_traces))
    assert rates[-1] > rates[0] + 0.2
    assert len(traces) == 1  # nothing was compiled after the first step
    # What a step is given stays as it was.
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(before.params))
    assert (state.num_calls, state.num_updates) == (8, 32)


@pytest.mark.full
def test_batches_of_any_shape_share_the_executable(policy, decoder, adapter):
    traces = adapter.num_traces
    batch = _sampled(decoder, policy.params, num_samples=2)
    state, _ = adapter.step(adapter.init(), policy.params, batch)
    part = jax.tree.map(lambda x: x[:3], batch)
    adapter.step(state, policy.params, part)
    assert adapter.num_traces == max(traces, 1)


@pytest.mark.full
def test_it_learns_every_few_calls(policy, decoder):
    adapter = DrafterAdapter(decoder, optax.adam(0.01), every=3, rows=4)
    batch = _sampled(decoder, policy.params)
    state, learned = adapter.init(), []
    for _ in range(6):
        state, stats = adapter.step(state, policy.params, batch)
        learned.append(stats.has_learned)
    assert learned == [False, False, True] * 2
    assert state.replay.num_seen == 6 * len(PROMPTS)


@pytest.mark.full
def test_it_learns_where_too_few_drafts_are_accepted(policy, decoder):
    batch = _sampled(decoder, policy.params)
    assert int(batch.num_drafted.sum()) > 0
    rate = int(batch.num_accepted.sum()) / int(batch.num_drafted.sum())
    nothing = dataclasses.replace(batch, num_drafted=jnp.zeros_like(batch.num_drafted))
    for below, given, learns in (
        (rate, batch, False),
        (min(rate + 0.01, 1.0), batch, True),
        (0.0, nothing, True),
    ):
        adapter = DrafterAdapter(decoder, optax.adam(0.01), below=below, rows=2)
        _, stats = adapter.step(adapter.init(), policy.params, given)
        assert stats.has_learned == learns
        assert stats.acceptance_rate == (None if given is nothing else pytest.approx(rate))


@pytest.mark.full
def test_the_policy_of_k_is_told(policy, head):
    decoder = specjax.build_decoder(
        policy.config,
        drafter=head,
        engine=ENGINE,
        num_speculative_tokens=2,
        policy=Goodput(2),
    )
    count = len(PROMPTS)
    adapter = DrafterAdapter(decoder, optax.adam(0.01), rows=count, replay=count)
    batch = _sampled(decoder, policy.params)
    state, _ = adapter.step(adapter.init(), policy.params, batch)
    told = decoder._loop.policy.survival
    rates = told.of_rates(told.rates(np.array([0])))[0]
    # It is the changed drafter's figure, at the temperature of the samples.
    objective = Objective(temperature=SAMPLING.temperature)
    own = adapter.draft_weights(state)
    _, sums = draft_loss(decoder, own, policy.params, batch, objective=objective)
    found = figures.figures_of(sums)
    np.testing.assert_allclose(rates, found.sampled_survival, atol=0.1)
    before = rates.copy()
    # Weights that are NaN change neither the drafter nor what is known of it.
    broken = jax.tree.map(lambda x: x * jnp.nan, policy.params)
    after, stats = adapter.step(state, broken, batch)
    assert not stats.has_learned
    jax.tree.map(np.testing.assert_array_equal, after.params, state.params)
    np.testing.assert_array_equal(told.of_rates(told.rates(np.array([0])))[0], before)


@pytest.mark.full
def test_completions_shorter_than_the_depth_tell_what_they_can(policy, head):
    decoder = specjax.build_decoder(
        policy.config,
        drafter=head,
        engine=ENGINE,
        num_speculative_tokens=4,
        policy=Goodput(4),
    )
    adapter = DrafterAdapter(decoder, optax.adam(0.01), rows=8, replay=8)
    sampling = dataclasses.replace(SAMPLING, max_tokens=2)
    batch = specjax.rollout(
        decoder, policy.params, PROMPTS, sampling=sampling, prompt_width=4, alarm_rate=0
    )
    _, stats = adapter.step(adapter.init(), policy.params, batch)
    assert stats.figures.sampled_survival[1] > 0 == stats.figures.sampled_survival[3]
    told = decoder._loop.policy.survival
    assert told.of_rates(told.rates(np.array([0])))[0, 0] > 0.05


def test_survival_that_is_not_finite_changes_nothing():
    survival = Survival(2)
    before = survival.to_record()
    survival.expect([0.5, np.nan])
    survival.expect([])
    assert survival.to_record() == before


@pytest.mark.parametrize("rates", [(0.8, 0.5, 0.4), (0.3, 0.29), (0.0, 0.0), (1.0, 1.0, 1.0)])
def test_expected_survival_replaces_what_was_known(rates):
    survival = Survival(3)
    observed = np.full((50, 2), 3)
    survival.observe(np.array([0, 1]), observed + 1, observed, observed, observed, observed)
    survival.expect(np.cumprod(rates))
    found = survival.of_rates(survival.rates(np.array([0])))[0]
    padded = np.cumprod([*rates, *[rates[-1]] * (3 - len(rates))])
    np.testing.assert_allclose(found, padded, atol=0.06)


def test_a_drafter_that_cannot_be_trained_is_refused(policy):
    decoder = specjax.build_decoder(policy.config, drafter="ngram", engine=ENGINE)
    with pytest.raises(NotImplementedError, match="NgramDrafter cannot be trained"):
        DrafterAdapter(decoder, optax.adam(0.1))


@pytest.mark.parametrize(
    "wrong",
    [
        {"every": 0},
        {"updates": 0},
        {"rows": 1.5},
        {"below": 2},
        {"depth": 0},
        {"depth": 9},
        {"max_tokens": 7},
        {"seed": -1},
        {"seed": 2**63},
    ],
    ids=str,
)
def test_numbers_are_checked(decoder, wrong):
    (name,) = wrong
    with pytest.raises(ValueError, match=name):
        DrafterAdapter(decoder, optax.adam(0.1), **wrong)


def test_sizes_are_those_of_what_there_is(decoder):
    """More tokens than a row holds, and more texts of an update than are kept, take no memory."""
    adapter = DrafterAdapter(decoder, optax.adam(0.1), rows=10**9, replay=3, max_tokens=10**9)
    texts = adapter.init().replay.texts
    assert texts.token_ids.shape == (3, decoder.max_length)
    assert adapter._rows == 3


OF_ANOTHER_FORM = optax.GradientTransformation(
    lambda params: (), lambda updates, state, params: (jax.tree.map(lambda x: x[None], updates), ())
)


def test_an_optimizer_of_another_form_is_refused(decoder):
    wrong = OF_ANOTHER_FORM
    nothing = optax.GradientTransformation(wrong.init, lambda updates, state, params: (None, ()))
    for optimizer, found in ((wrong, r"\(1, \d+"), (nothing, "none")):
        with pytest.raises(ValueError, match=f"the optimizer's update of .* has the shape {found}"):
            DrafterAdapter(decoder, optimizer).init()
    grows = optax.GradientTransformation(
        wrong.init, lambda updates, state, params: (updates, (*state, 1))
    )
    with pytest.raises(ValueError, match="the optimizer's state has another form after an update"):
        DrafterAdapter(decoder, grows).init()
    needs_value = optax.contrib.reduce_on_plateau()
    with pytest.raises(ValueError, match="by gradients and weights alone"):
        DrafterAdapter(decoder, needs_value).init()


def test_optimizers_of_many_kinds_are_taken(decoder):
    adam = optax.adam(0.1)
    masked = optax.masked(adam, lambda params: jax.tree.map(lambda leaf: leaf.ndim > 1, params))
    for optimizer in (masked, optax.MultiSteps(adam, 2).gradient_transformation(), optax.sgd(0.1)):
        DrafterAdapter(decoder, optimizer).init()


@pytest.mark.full
def test_a_state_of_an_adapter_of_other_sizes_goes_on(policy, decoder, adapter):
    begun = DrafterAdapter(decoder, optax.adam(0.02), replay=5, max_tokens=9).init()
    after, stats = adapter.step(begun, policy.params, _sampled(decoder, policy.params))
    assert stats.has_learned
    assert after.replay.texts.token_ids.shape == (5, 9)


@pytest.mark.full
def test_a_policy_of_nan_agrees_with_nothing(policy, decoder, adapter):
    broken = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), policy.params)
    state = adapter.init()
    after, stats = adapter.step(state, broken, _sampled(decoder, policy.params))
    assert not stats.has_learned
    assert max(stats.figures.agreed) == 0
    jax.tree.map(np.testing.assert_array_equal, after.params, state.params)


@pytest.mark.full
def test_the_loss_is_that_of_the_adapter_and_spares_the_policy(policy, head, decoder):
    batch = _sampled(decoder, policy.params)
    both = lambda own, target: draft_loss(decoder, own, target, batch)[0]
    value, (own, target) = jax.value_and_grad(both, argnums=(0, 1))(head.params, policy.params)
    assert np.isfinite(value)
    assert any(float(jnp.max(jnp.abs(leaf))) > 0 for leaf in jax.tree.leaves(own))
    assert all(float(jnp.max(jnp.abs(leaf))) == 0 for leaf in jax.tree.leaves(target))
    adapter = DrafterAdapter(decoder, optax.sgd(0.0), rows=len(PROMPTS), replay=len(PROMPTS))
    _, stats = adapter.step(adapter.init(), policy.params, batch)
    _, sums = draft_loss(decoder, head.params, policy.params, batch)
    np.testing.assert_allclose(figures.figures_of(sums).loss, stats.figures.loss, rtol=1e-5)


@pytest.mark.full
def test_states_and_weights_of_other_trees(policy, head, decoder, adapter):
    batch = _sampled(decoder, policy.params)
    given = nnx.State(jax.tree.map(nnx.Param, head.params))
    state, _ = adapter.step(adapter.init(given), policy.params, batch)
    expected, _ = adapter.step(adapter.init(), policy.params, batch)
    jax.tree.map(np.testing.assert_array_equal, state.params, expected.params)
    # A state that went through a checkpoint may be all arrays of jax.
    adapter.step(jax.device_put(state), specjax.DecoderParams(policy.params, ()), batch)
    with pytest.raises(ValueError, match="lack fc"):
        adapter.init({name: leaf for name, leaf in head.params.items() if name != "fc"})
    with pytest.raises(ValueError, match="have other"):
        adapter.init(head.params | {"other": head.params["fc"]})
    # What it begins with is a copy: a loop that donates its own does not delete the decoder's.
    jax.tree.map(lambda x: x.delete(), adapter.init().params)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(head.params))


@pytest.mark.full
def test_an_environments_tokens_are_not_learned(policy, decoder):
    batch = _sampled(decoder, policy.params)
    none = dataclasses.replace(batch, loss_mask=jnp.zeros_like(batch.loss_mask))
    adapter = DrafterAdapter(decoder, optax.adam(0.1), rows=2)
    state, stats = adapter.step(adapter.init(), policy.params, none)
    assert not stats.has_learned
    assert state.replay.num_texts == 0
    _, sums = draft_loss(decoder, decoder.draft_params, policy.params, none)
    assert float(sums.count.sum()) == 0


def _texts(first, count):
    ids = np.arange(first, first + count, dtype=np.int32)[:, None].repeat(3, 1)
    return TextBatch(ids, np.full(count, 3, np.int32), np.ones((count, 3), bool))


def test_a_ring_keeps_the_newest_texts():
    ring = replay.empty(4, 3)
    for first, count, expected in (
        (0, 3, {0, 1, 2}),
        (3, 3, {2, 3, 4, 5}),
        (6, 9, {11, 12, 13, 14}),
        (15, 0, {11, 12, 13, 14}),
    ):
        before = ring.texts.token_ids.copy(), ring
        ring = ring.added(_texts(first, count))
        np.testing.assert_array_equal(before[1].texts.token_ids, before[0])
        assert set(ring.texts.token_ids[: ring.num_texts, 0].tolist()) == expected
    drawn = ring.drawn(5, 4, seed=1)
    assert drawn.token_ids.shape == (5, 4, 3)
    assert all(len(set(part[:, 0])) == 4 for part in drawn.token_ids)
    few = replay.empty(4, 3).added(_texts(0, 2)).drawn(2, 3, seed=0)
    assert set(few.token_ids.ravel()) <= {0, 1}


def test_padding_inside_texts_is_left_out():
    ids = np.array([[0, 7, 8, 0, 9, 6], [0, 0, 0, 0, 0, 0], [1, 2, 3, 4, 5, 6]])
    mask = np.array([[0, 1, 1, 0, 1, 1], [0] * 6, [1] * 6], bool)
    learned = np.array([[0, 0, 0, 0, 1, 1], [1] * 6, [0, 0, 0, 0, 0, 1]], bool)
    texts = replay.texts_of(ids, mask, learned, 4)
    # Of the last text the end is kept.
    assert texts.token_ids.tolist() == [[7, 8, 9, 6], [3, 4, 5, 6]]
    assert texts.lengths.tolist() == [4, 4]
    assert texts.is_learned.tolist() == [[False, False, True, True], [False] * 3 + [True]]
    wide = replay.texts_of(ids, mask, learned, 8)
    assert wide.token_ids.tolist() == [[7, 8, 9, 6, 0, 0, 0, 0], [1, 2, 3, 4, 5, 6, 0, 0]]
    assert wide.lengths.tolist() == [4, 6]


@pytest.mark.full
@pytest.mark.parametrize("weights", ["policy", "narrow"])
def test_weights_that_are_not_the_drafters_are_refused(policy, head, decoder, adapter, weights):
    narrow = jax.tree.map(lambda x: x[..., :1], head.params)
    given = policy.params if weights == "policy" else narrow
    batch = _sampled(decoder, policy.params)
    with pytest.raises(ValueError, match="drafter's weights"):
        adapter.init(given)
    with pytest.raises(ValueError, match="drafter's weights"):
        draft_loss(decoder, given, policy.params, batch)
    with pytest.raises(ValueError, match="depth=0 must be a whole number"):
        draft_loss(decoder, head.params, policy.params, batch, depth=0)


@pytest.mark.full
def test_an_update_that_is_not_finite_changes_nothing(policy, decoder):
    adapter = DrafterAdapter(decoder, optax.sgd(float("nan")), rows=2)
    state = adapter.init()
    after, stats = adapter.step(state, policy.params, _sampled(decoder, policy.params))
    assert not stats.has_learned
    jax.tree.map(np.testing.assert_array_equal, after.params, state.params)


@pytest.mark.full
def test_what_is_no_state_no_rollout_or_traced_is_refused(policy, decoder, adapter):
    batch = _sampled(decoder, policy.params)
    with pytest.raises(TypeError, match="expected an AdapterState"):
        adapter.step(policy.params, policy.params, batch)
    with pytest.raises(TypeError, match="outside jit"):
        jax.jit(lambda b: adapter.step(adapter.init(), policy.params, b)[1].loss)(batch)
    with pytest.raises(TypeError, match="expected an optax"):
        DrafterAdapter(decoder, None)
    with pytest.raises(TypeError, match=r"expected a training\.Objective"):
        DrafterAdapter(decoder, optax.sgd(0.1), objective="accepted")
    more = policy.config.vocab_size
    other = dataclasses.replace(batch, completion_ids=batch.completion_ids + more)
    with pytest.raises(ValueError, match=f"the policy has {more} tokens"):
        adapter.step(adapter.init(), policy.params, other)
