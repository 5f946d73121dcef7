"""A drafter that learns while an engine serves: from the right states; and no token changes."""

import dataclasses
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_engine_is_empty, first_layer, tiny_llama

import specjax
from specjax.heads.specs import EagleDrafter
from specjax.models.dense import sequence_logits
from specjax.policy.interface import Fixed
from specjax.training import eagle3
from specjax.training.kinds import KINDS
from specjax.training.texts import Target, TextBatch

# So few pages that rows are preempted.
ENGINE = specjax.EngineConfig(page_size=8, max_rows=4, max_context=64, burst_steps=4, num_pages=12)
FIXED = {"policy": "fixed"}
NEVER = 10**9  # tokens
PROMPTS = [[1 + i % 2, 2 + i % 3, 3, *range(4, 4 + 5 * (i % 3))] for i in range(10)]


@pytest.fixture(scope="module")
def target():
    return tiny_llama(0)


@pytest.fixture(scope="module")
def head(target):
    config = eagle3.configure(target.config, {"aux_layers": (1, 2)})
    params = eagle3.begin(jax.random.key(0), config, Target(target.config, target.params), None)
    return specjax.LoadedDrafter("head", EagleDrafter(config), params)


def _adapt(learning_rate=0.02, **others):
    settings = dict(every_tokens=48, rows=8, length=24, replay=12, max_share=1.0)
    return specjax.Adapt(optax.adam(learning_rate), **(settings | others))


def _engine(target, drafter, **others):
    settings = dict(engine=ENGINE, num_speculative_tokens=3, speculative_config=FIXED)
    return specjax.Engine(target, drafter=drafter, **(settings | others))


def _sampling(i, **others):
    settings = dict(temperature=0.8 if i % 2 else 0.0, max_tokens=30, seed=i, ignore_eos=True)
    return specjax.SamplingParams(**(settings | others))


def _finished(engine, **others):
    """Steps until there is no work; returns the completions by request and sample."""
    found = {}
    while engine.has_work:
        for chunk in engine.step(**others):
            if chunk.completion is not None:
                found[chunk.prompt_index, chunk.sample_index] = chunk.completion
    return found


def _tokens(completions):
    return {key: (each.token_ids, each.finish_reason) for key, each in completions.items()}


def _check_states(target, engine, texts):
    """Asserts that windows hold what the dense forward says along the texts of requests; returns
    the number of tokens that were compared."""
    run = engine._loop._run
    layers = run.decoder.kept_layers
    states = [np.asarray(each) for each in run.device_state.kept.states]
    padded = np.zeros((len(texts), ENGINE.max_context), np.int32)
    for row, text in enumerate(texts):
        padded[row, : len(text)] = text
    _, dense = sequence_logits(target.params, target.config, padded, taps=layers)
    expected = np.stack(list(map(np.asarray, dense)), axis=-1)
    count = 0
    for kept in run.windows.texts:
        own = list(kept.token_ids)
        found = np.stack([state[kept.window, : len(own)] for state in states], axis=-1)
        # A few tokens may stand in several texts.
        errors = [
            np.abs(found - expected[row, at : at + len(own)]).max()
            for row, text in enumerate(texts)
            for at in range(len(text) - len(own) + 1)
            if text[at : at + len(own)] == own
        ]
        assert min(errors) < 5e-3, kept
        count += len(own)
    return count


def _whole(prompts, completions):
    return [prompts[key[0]] + list(each.token_ids) for key, each in sorted(completions.items())]


CASES = {
    "chains": {},
    "plain steps": {"policy": "k0"},
    "all pages": {"engine": dataclasses.replace(ENGINE, num_pages=32)},
    "long prompts": {"engine": dataclasses.replace(ENGINE, max_prefill_tokens=16)},
    "prompts alone": {"engine": dataclasses.replace(ENGINE, mixed_prefill=False)},
    "row buckets": {"engine": dataclasses.replace(ENGINE, row_buckets=(1, 2))},
    "invariant": {"engine": dataclasses.replace(ENGINE, numerics="invariant")},
    "beside history": {"speculative_config": FIXED | {"corpus_tokens": 1024}},
    "rejection": {"verification": "rejection"},
    "trees": {"speculative_config": FIXED | {"tree_top_k": 2}},
}
STATES = [f"{kind}, {case}" for case in CASES for kind in ("head", "draft model")]


class _Sometimes:
    """A policy that does not draft in two of three bursts."""

    max_speculative_tokens = 3
    chooses_rows = False

    def __init__(self):
        self._inner, self._count = Fixed(3), 0

    def choose(self, load):
        self._count += 1
        decision = self._inner.choose(load)
        if self._count % 3:
            decision = dataclasses.replace(decision, num_speculative_tokens=0)
        return decision

    def observe(self, outcome):
        pass


@pytest.mark.full
@pytest.mark.parametrize("states", STATES)
def test_windows_hold_the_states_of_their_tokens(target, head, states):
    kind, case = states.split(", ")
    settings = dict(CASES[case])
    if settings.pop("policy", None):
        settings |= dict(policy=_Sometimes())
    drafter = head if kind == "head" else first_layer(target)
    with _engine(target, drafter, adapt=_adapt(every_tokens=NEVER), **settings) as engine:
        for i, prompt in enumerate(PROMPTS):
            engine.add(prompt, _sampling(i))
        texts = _whole(PROMPTS, _finished(engine))
        engine._loop._run.collect_windows()
        assert _check_states(target, engine, texts) > 60
        if case in ("chains", "all pages"):
            assert (engine.stats.num_preemptions > 0) == (case == "chains")


def _served(engine):
    """Runs requests that end, stop, share prefixes, are aborted or have no drafts, in two waves;
    returns their tokens."""
    found = {}
    for wave in range(2):
        for i, prompt in enumerate(PROMPTS):
            stops = dict(stop_token_ids=[5, 9, 17]) if i % 4 == 1 else {}
            settings = dict(n=2, max_tokens=12) if i % 4 == 2 else {}
            if i % 5 == 3:
                settings |= dict(speculate=False)
            engine.add(prompt, _sampling(i + 100 * wave, **stops, **settings))
        aborted = engine.add([1, 2, 3], _sampling(50, max_tokens=40))
        engine.step()
        engine.abort(aborted)
        found |= _finished(engine)
    return {key: value for key, value in _tokens(found).items() if value[1] != "abort"}


def _wave(engine, seed=0):
    """Runs one request per prompt; returns the share of drafts that were accepted."""
    before = engine.stats.acceptance
    for i, prompt in enumerate(PROMPTS):
        engine.add(prompt, _sampling(i + seed))
    _finished(engine)
    after = engine.stats.acceptance
    drafted = after.num_drafted - before.num_drafted
    return (after.num_accepted - before.num_accepted) / drafted


@pytest.mark.full
def test_no_token_changes_and_more_drafts_are_accepted(target, head):
    with _engine(target, None, speculative_config=None) as engine:
        expected = _served(engine)
    with _engine(target, head, adapt=_adapt(every_tokens=NEVER)) as engine:
        first = _wave(engine)
        assert engine.adaptation.num_updates == 0
        assert engine.adaptation.num_tokens > 100
    with _engine(target, head, adapt=_adapt()) as engine:
        assert _served(engine) == expected
        traces, updates = engine._loop.decoder.all_traces.total(), engine.adaptation.num_updates
        last = [_wave(engine) for _ in range(4)][-1]
        stats = engine.adaptation
        assert engine._loop.decoder.all_traces.total() == traces
        assert engine._loop.adapting._learner.num_traces == 1
        assert_engine_is_empty(engine)
        assert engine.stats.num_preemptions > 0
    assert last > first + 0.05
    assert stats.num_updates > updates > 0
    assert stats.num_dropped == 0
    assert np.isfinite(stats.loss)


def _loss_of_whole_texts(engine, drafter, requests):
    """Returns the loss along texts as the trainer has it, with a forward of the target."""
    learner = engine._loop.adapting._learner
    rows = [(prompt + list(done.token_ids))[:-1] for prompt, done in requests]
    token_ids = np.zeros((learner.rows, 24), np.int32)
    is_learned = np.zeros(token_ids.shape, bool)
    for i, (row, (prompt, _)) in enumerate(zip(rows, requests, strict=True)):
        token_ids[i, : len(row)] = row
        is_learned[i, len(prompt) : len(row)] = True
    lengths = np.array([len(row) for row in rows], np.int32)
    text = TextBatch(token_ids, lengths, is_learned)
    key = jax.random.fold_in(jax.random.key(0), 0)
    params = engine._loop.params
    value, _ = jax.jit(learner._learner.loss)(drafter.params, params.target, text, key)
    return float(value)


def _drafter_of(target, kind):
    if kind == "draft_model":
        return first_layer(target)
    own = KINDS[kind]
    options = {"aux_layers": (1,)} if kind in ("dflash", "dspark") else {}
    options |= {"block_size": 4} if kind in ("dflash", "dspark") else {}
    options |= {"most_drafts": 3} if kind in ("medusa", "mlp_speculator") else {}
    config = own.configure(target.config, options)
    params = own.begin(jax.random.key(1), config, Target(target.config, target.params), None)
    return specjax.LoadedDrafter(kind, own.spec(config), params)


@pytest.mark.full
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_the_loss_is_that_of_a_forward_of_the_target(target, head, kind):
    drafter = head if kind == "eagle3" else _drafter_of(target, kind)
    prompts = [[3, 1], [7, 2, 9], [4, 4, 4, 4]]
    adapt = _adapt(every_tokens=NEVER, rows=3)
    with _engine(target, drafter, adapt=adapt) as engine:
        for i, prompt in enumerate(prompts):
            engine.add(prompt, _sampling(i, max_tokens=16))
        done = _finished(engine)
        # The newest texts come first, and equal lengths end in the order of their rows.
        engine._loop._run.collect_windows()
        order = [
            next(i for i, p in enumerate(prompts) if list(t.token_ids[: len(p)]) == p)
            for t in reversed(engine._loop._run.windows.texts)
        ]
        before = engine.drafter
        expected = _loss_of_whole_texts(engine, before, [(prompts[i], done[i, 0]) for i in order])
        engine.step()  # without work it learns
        assert engine.adaptation.num_updates == 1
        assert engine.adaptation.loss == pytest.approx(expected, rel=1e-3)
        after = engine.drafter
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves((before.params, after.params)))
    changed = jax.tree.map(lambda a, b: bool(jnp.any(a != b)), before.params, after.params)
    assert any(jax.tree.leaves(changed))
    like = lambda tree: jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), tree)
    assert like(before.params) == like(after.params)


@pytest.mark.full
@pytest.mark.parametrize(
    "optimizer", [optax.scale(np.nan), optax.sgd(1e4)], ids=["not finite", "diverges"]
)
def test_an_update_that_does_harm_is_dropped(target, head, optimizer):
    adapt = dataclasses.replace(_adapt(), optimizer=optimizer)
    with _engine(target, head, adapt=adapt) as engine:
        before = engine.drafter.params
        with pytest.warns(UserWarning, match="an update of the drafter was dropped"):
            _wave(engine)
        _wave(engine)  # which warns no more
        stats, after = engine.adaptation, engine.drafter.params
        assert not stats.is_off
    assert stats.num_updates == 0
    assert stats.num_dropped > 1
    assert all(a is b for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(after)))


@pytest.mark.full
def test_new_weights_of_the_target(target, head):
    other = tiny_llama(1)
    with _engine(target, head, adapt=_adapt()) as engine:
        _wave(engine)
        learned = engine.drafter.params
        updates = engine.adaptation.num_updates
        assert updates > 0
        # The same arrays are the same weights, whatever the drafter has learned meanwhile.
        assert engine.update_params(target.params) == 0
        # Nor has a step of another thread noted yet what it learned.
        engine._handed.note_drafter(head.params)
        assert engine.update_params(target.params) == 0
        for i, prompt in enumerate(PROMPTS):
            engine.add(prompt, _sampling(i))
        for _ in range(3):
            engine.step()
        learned = engine.drafter.params
        assert engine.update_params(other.params) == 1
        assert engine.update_params(other.params) == 1
        run = engine._loop._run
        assert run.windows.texts == []
        assert not run.windows._writing
        assert engine.drafter.params is not head.params
        assert all(map(_is, jax.tree.leaves(engine.drafter.params), jax.tree.leaves(learned)))
        # States of rows that go on are those that steps saw, over keys of both weights.
        engine.update_params(specjax.DecoderParams(other.params, head.params), running="recompute")
        engine._loop.adapting._every_tokens = NEVER
        done = _finished(engine)
        run.collect_windows()
        texts = [PROMPTS[key[0] % 10] + list(each.token_ids) for key, each in done.items()]
        assert _check_states(other, engine, texts) > 60
        # It goes on from the weights that were brought.
        assert engine.adaptation.num_updates >= updates
        own = engine._loop.adapting._learner._params
        jax.tree.map(np.testing.assert_array_equal, own, head.params)


def _is(one, other):
    return one is other


@pytest.mark.full
def test_what_windows_held_before_is_not_learned(target, head):
    with _engine(target, head, adapt=_adapt()) as engine:
        run = engine._loop._run
        kept = run.device_state.kept
        broken = dataclasses.replace(kept, states=tuple(x * jnp.nan for x in kept.states))
        run.device_state = dataclasses.replace(run.device_state, kept=broken)
        _wave(engine)
        stats = engine.adaptation
    assert stats.num_updates > 0
    assert stats.num_dropped == 0


@pytest.mark.full
def test_an_engine_without_requests_stops(target, head):
    with _engine(target, head, adapt=_adapt(every_tokens=NEVER, idle_steps=2)) as engine:
        assert engine.step() == []
        _wave(engine)
        counts = []
        for _ in range(4):
            assert not engine.has_work
            assert engine.step() == []
            counts.append(engine.adaptation.num_updates)
    assert counts == [1, 2, 2, 2]


@pytest.mark.full
def test_closing_waits_for_a_step_that_learns(target, head):
    begun, goes_on = threading.Event(), threading.Event()
    engine = _engine(target, head, adapt=_adapt())
    adapting = engine._loop.adapting
    learner, learn = adapting._learner, adapting._learner.learn

    def slow(*arguments):
        begun.set()
        assert goes_on.wait(60)
        return learn(*arguments)

    learner.learn = slow
    for i, prompt in enumerate(PROMPTS):
        engine.add(prompt, _sampling(i))
    serving = threading.Thread(target=lambda: _until_closed(engine))
    serving.start()
    assert begun.wait(60)
    closing = threading.Thread(target=engine.close)
    closing.start()
    closing.join(0.2)
    assert closing.is_alive()
    goes_on.set()
    closing.join(60)
    serving.join(60)
    assert not closing.is_alive()
    assert not serving.is_alive()
    stats = engine.adaptation
    assert stats.num_updates >= 1
    assert learner._params is None
    # What it has learned stays.
    leaves = jax.tree.leaves(engine.drafter.params)
    assert not any(leaf.is_deleted() for leaf in leaves)
    assert leaves[0] is not jax.tree.leaves(head.params)[0]


def _until_closed(engine):
    try:
        while engine.has_work:
            engine.step()
    except RuntimeError:
        pass


@pytest.mark.full
def test_a_drafter_that_is_turned_off_frees_the_windows(target, head):
    broken = jax.tree.map(lambda leaf: leaf * jnp.nan, head.params)
    with _engine(target, head, adapt=_adapt()) as engine:
        engine.update_params(specjax.DecoderParams(target.params, broken))
        for i, prompt in enumerate(PROMPTS):
            engine.add(prompt, _sampling(i))
        with pytest.warns(UserWarning, match="turned off"):
            done = _finished(engine)
        assert {each.finish_reason for each in done.values()} == {"length"}
        assert engine._loop.kept_states == ()
        assert engine.adaptation.kept_bytes == 0
        assert engine.drafter.params == ()
        # Weights that are sound turn it on again, and it learns.
        engine.update_params(specjax.DecoderParams(target.params, head.params))
        _wave(engine)
        assert engine.adaptation.num_updates > 0


@pytest.mark.parametrize("drafter", ["ngram", "history", "self-int8"])
def test_drafters_that_cannot_learn_are_refused(target, drafter):
    with pytest.raises(NotImplementedError, match="cannot be trained; expected one of eagle3"):
        _engine(target, drafter, adapt=_adapt())


def test_what_cannot_be_is_refused(target, head):
    with pytest.raises(ValueError, match="lets a drafter learn, and this engine has none"):
        _engine(target, None, adapt=_adapt())
    with pytest.raises(ValueError, match="lets a drafter learn, and this engine has none"):
        _engine(target, head, adapt=_adapt(), num_speculative_tokens=0)
    with pytest.raises(TypeError, match=r"expected a specjax\.Adapt"):
        _engine(target, head, adapt=optax.adam(0.1))
    with pytest.raises(ValueError, match=r"of a device that has .*; lower replay or length"):
        _engine(target, head, adapt=_adapt(replay=10**10))
    with pytest.raises(TypeError, match="expected an optax"):
        specjax.Adapt(0.1)
    with pytest.raises(ValueError, match=r"max_share=1.5 must be above 0 and at most 1"):
        _adapt(max_share=1.5)
    with pytest.raises(ValueError, match="rows=0 must be a whole number of at least 1"):
        _adapt(rows=0)
    with pytest.raises(ValueError, match="must be a whole number of at least 0 and below 2"):
        _adapt(seed=2**63)
    with pytest.raises(ValueError, match="depth=100 must be at most 8: a step drafts 2 tokens"):
        _engine(target, head, adapt=_adapt(depth=100), num_speculative_tokens=2)
    scaled = optax.GradientTransformation(
        lambda params: (), lambda updates, state, params: (jax.tree.map(jnp.sum, updates), ())
    )
    with pytest.raises(ValueError, match=r"optimizer's update of .* has the shape \(\)"):
        _engine(target, head, adapt=dataclasses.replace(_adapt(), optimizer=scaled))
    parallel = first_layer(target)
    config = dataclasses.replace(parallel.config, mask_token_id=60)
    parallel = dataclasses.replace(parallel, config=config)
    with pytest.raises(NotImplementedError, match="PARD"):
        _engine(target, parallel, adapt=_adapt())


@pytest.mark.full
def test_its_memory_is_planned(target, head):
    adapt, given = _adapt(length=32, replay=64), 24 << 20
    settings = dict(engine=dataclasses.replace(ENGINE, num_pages=None, memory_bytes=given))
    with _engine(target, head, **settings) as engine:
        without = engine.memory
    with _engine(target, head, adapt=adapt, **settings) as engine:
        plan, stats = engine.memory, engine.adaptation
        assert engine._loop.kept_states[0].shape == (64, 32, 32)
    # Layers 1 and 2 of the target, the second its output, in float32.
    assert plan.kept_bytes == stats.kept_bytes == 2 * 64 * 32 * 32 * 4
    assert plan.learner_bytes > stats.learner_bytes > 3 * 4 * 11_000  # weights and two moments
    assert without.kept_bytes == without.learner_bytes == 0
    beside = plan.kept_bytes + plan.learner_bytes
    assert without.free_bytes - plan.free_bytes == pytest.approx(beside, abs=200)
    few = dataclasses.replace(settings["engine"], memory_bytes=plan.learner_bytes)
    with pytest.raises(ValueError, match=r"a drafter that learns .* use more chips"):
        _engine(target, head, adapt=adapt, engine=few)


@pytest.mark.full
@pytest.mark.parametrize("shape", [(2,), (1, 2), (2, 2)], ids=str)
@pytest.mark.parametrize("kind", ["head", "draft model"])
def test_over_a_mesh(target, head, shape, kind):
    mesh = jax.make_mesh(shape, ("data", "tensor")[: len(shape)])
    drafter = head if kind == "head" else first_layer(target)
    engine = dataclasses.replace(ENGINE, num_pages=24)
    settings = dict(mesh=mesh, engine=engine)
    with _engine(target, None, speculative_config=None, engine=engine) as plain:
        expected = _served(plain)
    with _engine(target, drafter, adapt=_adapt(every_tokens=NEVER), **settings) as running:
        for i, prompt in enumerate(PROMPTS):
            running.add(prompt, _sampling(i))
        texts = _whole(PROMPTS, _finished(running))
        running._loop._run.collect_windows()
        assert _check_states(target, running, texts) > 60
    with _engine(target, drafter, adapt=_adapt(), **settings) as running:
        assert _served(running) == expected
        first, *_, last = [_wave(running) for _ in range(4)]
        assert running.adaptation.num_updates > 2
        assert running._loop.adapting._learner.num_traces == 1
    if kind == "head":
        assert last > first


@pytest.mark.full
def test_what_it_has_learned_can_be_saved(target, head, tmp_path):
    with _engine(target, head, adapt=_adapt()) as engine:
        _wave(engine)
    specjax.save_pretrained(engine.drafter, tmp_path / "head", target=target)
    again = specjax.load_drafter(tmp_path / "head", target)
    jax.tree.map(np.testing.assert_array_equal, again.params, engine.drafter.params)
