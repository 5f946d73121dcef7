"""Training runs of a tiny head: they learn, resume to the bit, and refuse what does not fit."""

import dataclasses
import itertools
import json
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from asked_for import quick
from helpers import ENGINE, tiny_llama

import specjax
from pallas_kernels import implementations
from specjax.testing import tiny_model
from specjax.training import data, learning, own_text, trainer
from specjax.training.objective import Objective
from specjax.training.run_store import RunMemory
from specjax.training.trainer import TrainingConfig, train

CONFIG = TrainingConfig(depth=2, rows=2, steps=6, eval_every=2, checkpoint_every=2, warmup=1)


@pytest.fixture(scope="module")
def target():
    return tiny_llama(0)


@pytest.fixture(scope="module")
def text(target):
    rng = np.random.default_rng(0)
    vocab = target.config.vocab_size
    return data.from_token_ids([(rng.integers(0, vocab, 12).tolist(), 0) for _ in range(12)], 12)


class _Killed(Exception):
    pass


def _stop_at(step):
    def on_look(look):
        if look.step == step:
            raise _Killed

    return on_look


def _assert_equal(one, other):
    jax.tree.map(
        lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), one, other
    )


@pytest.mark.full
def test_a_run_that_was_stopped_ends_with_the_same_bits(target, text, tmp_path):
    whole = train(target, text, config=CONFIG)
    for step in (0, 4):
        folder = tmp_path / str(step)
        with pytest.raises(_Killed):
            train(target, text, config=CONFIG, folder=folder, on_look=_stop_at(step))
        again = train(target, text, config=CONFIG, folder=folder)
        _assert_equal(again.drafter.params, whole.drafter.params)
        drop = lambda looks: [dataclasses.replace(look, seconds=0) for look in looks]
        assert drop(again.looks) == drop(whole.looks)
    # A run that has ended gives what it had.
    ended = train(target, text, config=CONFIG, folder=folder, on_look=_stop_at(0))
    _assert_equal(ended.drafter.params, whole.drafter.params)


@pytest.mark.full
def test_a_folder_of_another_run_is_refused(target, text, tmp_path):
    train(target, text, config=CONFIG, folder=tmp_path)
    other = dataclasses.replace(CONFIG, seed=1)
    with pytest.raises(ValueError, match="a run with another config"):
        train(target, text, config=other, folder=tmp_path)
    with pytest.raises(ValueError, match="a run with another text"):
        train(target, text.take(slice(3, None)), config=CONFIG, folder=tmp_path)
    with pytest.raises(ValueError, match="a run with another target"):
        train(tiny_llama(1), text, config=CONFIG, folder=tmp_path)
    with pytest.raises(ValueError, match="a run with another optimizer"):
        train(target, text, config=CONFIG, folder=tmp_path, optimizer=optax.sgd(0.1))
    with pytest.raises(ValueError, match="a run with another head"):
        train(target, text, config=CONFIG, folder=tmp_path, head={"norm_output": True})


def test_it_learns_text_that_the_target_repeats(target):
    prompts = [[i, i + 1] for i in range(8)]
    sampling = specjax.SamplingParams(temperature=0, max_tokens=22)
    text = own_text.text_of_target(target, prompts, sampling=sampling, length=24)
    config = TrainingConfig(
        depth=2,
        rows=8,
        steps=60,
        learning_rate=0.02,
        warmup=1,
        eval_every=30,
        objective=Objective(likeliest=1.0, distribution=0.0),
    )
    reports = []
    report = lambda *of: reports.append(of)
    trained = train(target, text, config=config, held_out=text, progress=report)
    look, training = "looking at held-out text", "training"
    assert [what for what, _ in itertools.groupby(of[0] for of in reports)] == [
        "compiling the look at held-out text",
        *(look, "compiling the update", training, look, training, look),
    ]
    assert {(training, 1, 60), (training, 60, 60), (look, 8, 8)} <= set(reports)
    first, last = trained.looks[0].figures, trained.looks[-1].figures
    assert last.mean_loss < 0.5 * first.mean_loss
    assert last.greedy_length > 2.0 > first.greedy_length
    out = specjax.generate(
        target, prompts, drafter=trained.drafter, sampling=sampling, num_speculative_tokens=2
    )
    plain = specjax.generate(target, prompts, sampling=sampling)
    assert [one.token_ids for one in out] == [one.token_ids for one in plain]
    # What training says of drafts is what drafting brings.
    assert out.stats.mean_acceptance_length > 0.8 * last.greedy_length


@pytest.mark.full
@pytest.mark.parametrize("kind", ["p-eagle", "eagle", "mtp"])
def test_heads_of_pairs_learn_are_saved_and_draft(target, kind, tmp_path):
    """The texts repeat: a head that learns them drafts well, from its folder too."""
    prompts = [[i, i + 1] for i in range(4)]
    sampling = specjax.SamplingParams(temperature=0, max_tokens=22)
    text = own_text.text_of_target(target, prompts, sampling=sampling, length=24)
    greedy = Objective(likeliest=1.0, distribution=0.0)
    config = dataclasses.replace(CONFIG, rows=4, steps=60, eval_every=60, objective=greedy)
    head = {"num_layers": 2} if kind == "p-eagle" else None
    trained = train(target, text, kind, config=config, head=head, held_out=text)
    first, last = (look.figures for look in trained.looks)
    assert last.mean_loss < 0.7 * first.mean_loss
    assert last.greedy_length > first.greedy_length + 0.3
    trained.save(tmp_path / "saved")
    loaded = specjax.load_drafter(tmp_path / "saved", target)
    _assert_equal(loaded.params, trained.drafter.params)
    assert loaded.spec == trained.drafter.spec
    options = {"sampling": sampling, "num_speculative_tokens": 2, "engine": ENGINE}
    options["speculative_config"] = {"policy": "fixed"}
    out = specjax.generate(target, prompts, drafter=loaded, **options)
    plain = specjax.generate(target, prompts, sampling=sampling, engine=ENGINE)
    assert [one.token_ids for one in out] == [one.token_ids for one in plain]
    assert out.stats.mean_acceptance_length > 1.5
    # A head that is there goes on learning.
    again = train(target, text, config=CONFIG, start=loaded, held_out=text)
    assert again.facts["kind"] == kind


class _Traced(Exception):
    pass


@pytest.mark.full
def test_steps_are_traced_for_the_devices_of_the_target(target, text, monkeypatch):
    """On a mesh of CPUs beside a default device of another kind."""
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()[:1]).reshape(1, 1), ("data", "tensor"))
    shardings = specjax.param_shardings(target.config, mesh)
    placed = dataclasses.replace(target, params=jax.device_put(target.params, shardings))
    seen = []

    def note(*arguments):
        seen.append(implementations.target_platform())
        raise _Traced

    monkeypatch.setattr(learning.Learner, "loss_along", note)
    learner, _ = trainer._learner(target, "eagle3", CONFIG, {}, None)
    used = optax.sgd(0.1)
    state = learning.begin(learner, used, placed.params, 0)
    run = trainer._Run(learner, CONFIG, used, placed, text, text)
    memory = RunMemory.of(state)
    memory.looks.append(types.SimpleNamespace(loss=0.0))
    idle = lambda *_: None
    steps = {
        "a look": lambda: run.look(memory, idle, 0.0),
        "a step": lambda: run.steps(memory, None, idle, None, np.inf),
    }
    for name, step in steps.items():
        with implementations.lowered_for("tpu"), pytest.raises(_Traced):
            step()
        assert seen.pop() == "cpu", name


@pytest.mark.full
def test_training_stops_when_held_out_text_says_no_more(target, text):
    config = dataclasses.replace(CONFIG, steps=40, learning_rate=1.0, patience=2)
    trained = train(target, text, config=config)
    assert trained.looks[-1].step < 40
    losses = [look.loss for look in trained.looks]
    assert min(losses) == losses[-3] == trained.best.loss


@pytest.mark.full
def test_a_run_that_stopped_early_is_there_again(target, text, tmp_path):
    config = dataclasses.replace(
        CONFIG, steps=40, learning_rate=1.0, patience=2, checkpoint_every=100
    )
    first = train(target, text, config=config, folder=tmp_path)
    looks = []
    again = train(target, text, config=config, folder=tmp_path, on_look=looks.append)
    assert not looks
    _assert_equal(again.drafter.params, first.drafter.params)


@pytest.mark.full
def test_expected_accepted_tokens_alone_choose_the_best_weights(target, text):
    objective = Objective(distribution=0, likeliest=0, accepted=1)
    config = dataclasses.replace(CONFIG, steps=20, learning_rate=0.02, objective=objective)
    trained = train(target, text, config=config, held_out=text)
    lengths = [look.figures.sampled_length for look in trained.looks]
    assert trained.best.figures.sampled_length == max(lengths) > lengths[0]
    losses = [look.loss for look in trained.looks]
    expected = [-(length - 1) / config.depth for length in lengths]
    np.testing.assert_allclose(losses, expected, rtol=1e-5)


@pytest.mark.full
def test_a_target_that_gives_nan_is_refused(target, text):
    broken = dataclasses.replace(target, params=jax.tree.map(lambda x: x * np.nan, target.params))
    with pytest.raises(ValueError, match="numbers that are not finite"):
        train(broken, text, config=CONFIG)


@pytest.mark.full
@pytest.mark.parametrize("kind", ["eagle3", "draft_model"])
def test_a_drafter_goes_on_learning(target, text, kind):
    first = train(target, text, kind, config=CONFIG, held_out=text)
    more = dataclasses.replace(CONFIG, learning_rate=1e-4)
    second = train(target, text, config=more, held_out=text, start=first.drafter)
    assert second.looks[0].loss == pytest.approx(first.best.loss, rel=1e-5)
    assert second.drafter.spec == first.drafter.spec
    with pytest.raises(ValueError, match="`start` has sizes of its own"):
        train(target, text, config=CONFIG, start=first.drafter, head={"num_layers": 2})


def test_what_is_no_optimizer_is_refused(target, text, tmp_path):
    for wrong in ("adam", 0):
        with pytest.raises(TypeError, match=r"expected an optax\.GradientTransformation"):
            train(target, text, config=CONFIG, optimizer=wrong, folder=tmp_path)
    needs_loss = optax.contrib.reduce_on_plateau()
    with pytest.raises(ValueError, match="does not update by gradients and weights alone"):
        train(target, text, config=CONFIG, optimizer=needs_loss, folder=tmp_path)
    assert not list(tmp_path.iterdir())  # the folder is there for another try


@pytest.mark.full
def test_a_run_whose_figures_meant_something_else_is_refused(target, text, tmp_path):
    train(target, text, config=CONFIG, folder=tmp_path)
    (path,) = tmp_path.rglob("run.json")
    said = json.loads(path.read_text())
    del said["figures"]
    path.write_text(json.dumps(said))
    with pytest.raises(ValueError, match="of another version of specjax, in which acceptance"):
        train(target, text, config=CONFIG, folder=tmp_path)


def test_texts_that_the_target_cannot_read_are_refused(target):
    vocab, most = target.config.vocab_size, target.config.max_position_embeddings
    long = data.from_token_ids([([1] * (most + 1), 0)] * 3, most + 1)
    with pytest.raises(ValueError, match="longer than the target's context"):
        train(target, long, config=CONFIG)
    negative = data.from_token_ids([([1, -2, 3], 0)] * 3, 3)
    with pytest.raises(ValueError, match=f"tokens from -2 to 3, and the target has {vocab}"):
        train(target, negative, config=CONFIG)


@pytest.mark.full
def test_a_part_of_the_vocabulary_is_that_of_frequent_tokens(target, text):
    trained = train(target, text, config=CONFIG, head={"draft_vocab_size": 7})
    training, _ = text.split(0.05)
    counts = training.counts(target.config.vocab_size)
    ids = np.asarray(trained.drafter.params["target_ids"])
    assert ids.shape == (7,)
    assert ids.dtype == np.int32
    assert counts[ids].min() >= np.delete(counts, ids).max()
    assert trained.drafter.params["lm_head"].shape == (7, target.config.hidden_size)


@pytest.mark.full
def test_a_gradient_that_is_not_finite_changes_nothing(target, text):
    learner, _ = trainer._learner(target, "eagle3", CONFIG, {})
    optimizer = CONFIG.transformation([target.config.vocab_size])
    state = learning.begin(learner, optimizer, target.params, 0)
    before = jax.tree.map(jnp.copy, state)
    broken = jax.tree.map(lambda x: x * jnp.nan, target.params)
    after, _ = learning.update(learner, optimizer, state, broken, text.batch(0, 2))
    _assert_equal(after.params, before.params)
    _assert_equal(after.opt_state, before.opt_state)
    assert int(after.step) == 1


@pytest.mark.full
def test_a_drafter_that_goes_on_learns_at_a_tenth_of_the_rate(target, text):
    first = train(target, text, config=CONFIG)
    again = train(target, text, config=CONFIG, start=first.drafter)
    rates = [each.facts["config"]["learning_rate"] for each in (first, again)]
    assert rates == [0.02, 0.002]
    asked = dataclasses.replace(CONFIG, learning_rate=0.5)
    assert asked.going_on() == asked


@pytest.mark.full
def test_bfloat16_target(text):
    target = tiny_llama(0)
    target = dataclasses.replace(
        target, params=jax.tree.map(lambda x: x.astype(jnp.bfloat16), target.params)
    )
    trained = train(target, text, config=CONFIG)
    assert {leaf.dtype for leaf in jax.tree.leaves(trained.drafter.params)} == {
        jnp.dtype(jnp.bfloat16)
    }
    assert all(np.isfinite(look.figures.mean_loss) for look in trained.looks)


@pytest.mark.full
@pytest.mark.parametrize("kind", quick(["eagle3", "draft_model"], "eagle3"))
def test_it_is_saved_and_read(target, text, tmp_path, kind):
    trained = train(target, text, kind, config=CONFIG)
    trained.save(tmp_path / kind)
    again = specjax.load_drafter(tmp_path / kind, target)
    assert again.spec == trained.drafter.spec
    _assert_equal(again.params, trained.drafter.params)


def test_what_is_no_model_or_text_is_refused(target, text):
    with pytest.raises(TypeError, match="expected what load_model returns"):
        train("demo", text)
    with pytest.raises(TypeError, match="expected what load_model returns"):
        train(target, ["text"])


def test_arguments_of_other_types_are_refused(target, text, tmp_path):
    wrong = {
        "a TrainingConfig": {"config": {"steps": 1}},
        "a mapping of options": {"head": [1]},
        "a TrainingText, or a number": {"held_out": "0.1"},
    }
    for expected, arguments in wrong.items():
        with pytest.raises(TypeError, match=f"expected {expected}"):
            train(target, text, **({"config": CONFIG} | arguments))
    with pytest.raises(TypeError, match=r"expected a training\.Objective"):
        TrainingConfig(objective={"text": 1.0})
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="is a file; give a folder"):
        train(target, text, config=CONFIG, folder=tmp_path / "file")


def test_facts_are_json(target, text):
    facts = train(target, text, config=CONFIG).facts
    assert json.loads(json.dumps(facts))["steps"] == 6


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kind": "eagle9"}, "kind='eagle9' cannot be trained"),
        ({"head": {"layers": 2}}, "layers: no option of .eagle3."),
        ({"head": {"num_layers": 0}}, "num_layers=0 must be"),
        ({"head": {"num_heads": 3, "num_kv_heads": 2}}, "must be a multiple"),
        ({"head": {"aux_layers": (0, 99)}}, "must be different layers from 0 to"),
        ({"head": {"draft_vocab_size": 10**6}}, "draft_vocab_size=1000000 must be"),
        ({"head": {"norm_output": "no"}}, "norm_output='no' must be True or False"),
        ({"head": {"norm_before_fc": True, "has_fc_norms": True}}, "exclude each other"),
        ({"config": dataclasses.replace(CONFIG, depth=11)}, "depth=11 is more than the 10"),
        ({"held_out": 0.0}, "leaves none"),
        ({"held_out": float("nan")}, "leaves none"),
        ({"start": tiny_model(vocab_size=7)}, "vocabularies of .* and 7 tokens"),
    ],
)
def test_what_does_not_fit_is_refused(target, text, arguments, message):
    with pytest.raises(ValueError, match=message):
        train(target, text, **({"config": CONFIG} | arguments))


def test_text_of_another_vocabulary_is_refused(target):
    text = data.from_token_ids([([1, 2, 3, target.config.vocab_size], 0)] * 3, 4)
    with pytest.raises(ValueError, match="encode it with the target's tokenizer"):
        train(target, text, config=CONFIG)


@pytest.mark.parametrize(
    ("field", "value"),
    [("depth", 0), ("rows", 1.5), ("steps", -1), ("learning_rate", float("nan")), ("seed", 2**63)],
)
def test_config_values_are_checked(field, value):
    with pytest.raises(ValueError, match=f"{field}="):
        TrainingConfig(**{field: value})


def test_prompts_have_a_length(text):
    for numbers, name in (((-1, 4), "count"), ((3, 0), "num_tokens"), ((3, 1.5), "num_tokens")):
        with pytest.raises(ValueError, match=f"{name}="):
            own_text.prompts_of(text, *numbers)


@pytest.mark.full
def test_own_text_goes_on_where_it_was_stopped(target, tmp_path, monkeypatch):
    prompts = [[i] for i in range(5)]
    sampling = specjax.SamplingParams(temperature=1.0, max_tokens=6, seed=3, ignore_eos=True)
    monkeypatch.setattr(own_text, "PROMPTS_AT_ONCE", 2)
    whole = own_text.text_of_target(target, prompts, sampling=sampling, length=8)
    calls = []

    def counted(*arguments, **named):
        calls.append(1)
        if len(calls) == 2:
            raise _Killed
        return specjax.generate(*arguments, **named)

    monkeypatch.setattr(own_text, "generate", counted)
    with pytest.raises(_Killed):
        own_text.text_of_target(target, prompts, sampling=sampling, length=8, folder=tmp_path)
    again = own_text.text_of_target(target, prompts, sampling=sampling, length=8, folder=tmp_path)
    assert len(calls) == 4  # the first part was kept
    _assert_equal(again.token_ids, whole.token_ids)
    _assert_equal(again.is_learned, whole.is_learned)
    with pytest.raises(ValueError, match="other prompts, sampling or another target"):
        own_text.text_of_target(tiny_llama(1), prompts, sampling=sampling, folder=tmp_path)
    with pytest.raises(ValueError, match="n must be 1"):
        own_text.text_of_target(
            target, prompts, sampling=dataclasses.replace(sampling, n=2), folder=tmp_path / "other"
        )
    assert not (tmp_path / "other").exists()
    with pytest.warns(UserWarning, match="1 of 2 prompts ended with an error"):
        own_text.text_of_target(target, [[1], [10**6]], sampling=sampling)
    with pytest.raises(ValueError, match="other prompts, sampling or another target"):
        own_text.text_of_target(target, prompts[:4], sampling=sampling, length=8, folder=tmp_path)


@pytest.mark.parametrize(
    "shape",
    [
        pytest.param((2, 1), marks=pytest.mark.slow),
        pytest.param((1, 2), marks=pytest.mark.slow),
        pytest.param((2, 2), marks=pytest.mark.full),
    ],
)
def test_over_a_mesh_it_learns_the_same(target, text, tmp_path, shape):
    devices = np.asarray(jax.devices()[: shape[0] * shape[1]]).reshape(shape)
    mesh = jax.sharding.Mesh(devices, ("data", "tensor"))
    shardings = specjax.param_shardings(target.config, mesh)
    placed = dataclasses.replace(target, params=jax.device_put(target.params, shardings))
    config = dataclasses.replace(CONFIG, learning_rate=0.01)
    alone = train(target, text, config=config)
    with pytest.raises(_Killed):
        train(placed, text, config=config, folder=tmp_path, on_look=_stop_at(4))
    shared = train(placed, text, config=config, folder=tmp_path)
    for one, other in zip(alone.looks, shared.looks, strict=True):
        np.testing.assert_allclose(one.figures.loss, other.figures.loss, rtol=2e-3)
    out = specjax.generate(placed, [[1, 2, 3]], drafter=shared.drafter, mesh=mesh)
    assert len(out[0].token_ids) > 0


def test_a_look_takes_a_bounded_part_of_held_out_text(text):
    many = data.from_token_ids([([i % 60] * 4, 0) for i in range(1000)], 4)
    for rows, eval_every, count in [(8, 100, 200), (2, 2, trainer.LEAST_LOOKED), (64, 100, 1000)]:
        config = TrainingConfig(rows=rows, eval_every=eval_every)
        taken = trainer._sample(many, config)
        assert len(taken) == count
        spread = np.diff(trainer._sample(many, config).token_ids[:, 0]) % 60
        assert set(spread.tolist()) <= {1000 // count, -(-1000 // count)}
    assert trainer._sample(text, TrainingConfig()) is text


@pytest.mark.full
def test_a_run_ends_in_time_and_goes_on_from_there(target, text, tmp_path):
    short = train(target, text, config=CONFIG, folder=tmp_path, minutes=1e-9)
    assert [look.step for look in short.looks] == [0, 1]
    whole = train(target, text, config=CONFIG, folder=tmp_path)
    assert [look.step for look in whole.looks] == [0, 1, 2, 4, 6]
    for minutes in (0, -1.0, "5", True, float("nan")):
        with pytest.raises(ValueError, match=r"minutes=.* must be a number above 0"):
            train(target, text, config=CONFIG, minutes=minutes)
