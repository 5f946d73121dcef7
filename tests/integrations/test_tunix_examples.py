"""tunix's examples of GRPO and agentic GRPO, with its own engine and with specjax's."""

from __future__ import annotations

import collections
import functools
import warnings

import jax
import numpy as np
import pytest

from specjax.config.engine import EngineConfig

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # tunix uses what newer jax and flax deprecate
    pytest.importorskip("tunix")
    import tunix_scripts
    from tunix_scripts import EOS, PAD, Characters, agentic_grpo, grpo

    from specjax.integrations.tunix import SpecjaxRollout

pytestmark = [
    pytest.mark.tunix,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

ENGINE = EngineConfig(page_size=8, max_rows=12, burst_steps=8)
OURS = functools.partial(SpecjaxRollout, engine=ENGINE)
OTHER_MESH = jax.sharding.Mesh(np.array(jax.devices()[1:2]).reshape(1, 1), ("fsdp", "tp"))
AGREE = 1e-4  # of log-probabilities, in float32


@pytest.fixture(scope="module", autouse=True)
def ranks_promote():
    """tunix adds axes silently, in threads of its own too."""
    jax.config.update("jax_numpy_rank_promotion", "allow")
    yield
    jax.config.update("jax_numpy_rank_promotion", "raise")


def samples(run, step):
    """Returns what the engine was asked in a step and what it said, in an order of their own."""
    told = (
        (str(prompt), text, tokens.tolist(), logprobs)
        for at, prompts, output in run.calls
        if at == step
        for prompt, text, tokens, logprobs in zip(
            [prompts] if isinstance(prompts, str) else prompts,
            output.text,
            output.tokens,
            output.logprobs,
            strict=True,
        )
    )
    return sorted(told, key=lambda each: each[:3])


def assert_same_samples(run, other, step):
    own, its = samples(run, step), samples(other, step)
    assert own
    assert [each[:3] for each in own] == [each[:3] for each in its]
    for (*_, one), (*_, another) in zip(own, its, strict=True):
        np.testing.assert_allclose(one, another, atol=AGREE)


def assert_trained(run, steps):
    """The steps were run, and each moved the weights."""
    assert run.cluster.global_steps == steps
    assert len(run.weights) == steps
    run.weights.append(tunix_scripts.arrays(run.cluster.actor_trainer.model))
    for before, after in zip(run.weights, run.weights[1:]):
        assert any(np.any(one != another) for one, another in zip(before, after, strict=True))


# GRPO


def test_grpo_with_either_engine():
    """One argument differs. At temperature 0 both say the same, and rewards are the same."""
    theirs, ours = (grpo(engine, steps=2, top_p=None) for engine in ("vanilla", OURS))
    for run in (theirs, ours):
        assert_trained(run, 2)
    assert_same_samples(ours, theirs, 0)
    assert ours.rewards[0] == theirs.rewards[0]
    assert max(ours.rewards[0]) > 0


def test_grpo_trains(say):
    steps = 3
    run = grpo(OURS, steps=steps)
    assert_trained(run, steps)
    rollout = run.cluster.rollout
    assert rollout.num_conversions == steps  # weights are read anew in each
    assert run.traces[1] == run.traces[-1]
    gaps = []
    for (_, prompts, output), (_, logps), rewards in zip(
        run.calls, run.batches, run.rewards, strict=True
    ):
        assert [*map(str, prompts)] == [text for text in tunix_scripts.QUESTIONS for _ in range(4)]
        assert rewards == [sum(map(str.isdigit, text)) / 12 for text in output.text]
        assert len({*output.text}) > 6  # each sample of a group has its own noise
        gaps += [
            np.max(np.abs(own - theirs[: len(own)]), initial=0.0)
            for own, theirs in zip(output.logprobs, logps, strict=True)
        ]
    say(f"largest difference of log-probabilities {max(gaps):.2g}")
    assert max(gaps) < AGREE


# Agentic GRPO


def test_dialogues_with_either_engine():
    theirs, ours = (
        agentic_grpo(engine, steps=1, max_response=60, top_p=None) for engine in ("vanilla", OURS)
    )
    assert_same_samples(ours, theirs, 0)
    assert ours.cluster.global_steps == theirs.cluster.global_steps == 1
    assert any(prompt.count("<BOT>") > 1 for prompt, *_ in samples(ours, 0))


def test_tunix_own_engine_gives_a_group_one_dialogue():
    """Its noise is that of each call's seed, and an agentic learner makes a call per sample."""
    run = agentic_grpo("vanilla", steps=1, max_response=60)
    firsts = {prompt for prompt, *_ in samples(run, 0) if prompt.count("<BOT>") == 1}
    told = {(prompt, text) for prompt, text, *_ in samples(run, 0) if prompt in firsts}
    assert len(told) == len(firsts) == 3
    advantages = np.concatenate([example.advantages for example, _ in run.batches])
    np.testing.assert_array_equal(advantages, 0)


@pytest.fixture(scope="module")
def dialogues():
    """Returns a run whose samples keep the token that ends a turn, as the trainer's text does."""
    return agentic_grpo(functools.partial(OURS, keeps_eos=True), steps=3)


def test_agentic_grpo_trains(dialogues):
    run = dialogues
    assert_trained(run, 3)
    assert not run.learner.should_sync_weights
    assert run.cluster.rollout.num_conversions == 3
    assert run.traces[1] == run.traces[2]
    for step in range(3):
        firsts = [text for prompt, text, *_ in samples(run, step) if prompt.count("<BOT>") == 1]
        assert len(firsts) == 12
        assert len({*firsts}) > 6


def test_dialogues_go_through_the_tool(dialogues):
    prompts = [prompt for step in range(3) for prompt, *_ in samples(dialogues, step)]
    turns = {prompt.count("<BOT>") for prompt in prompts}
    assert turns == {1, 2, 3}
    results = [prompt.rsplit("<TOOL>", 1)[1] for prompt in prompts if "<TOOL>" in prompt]
    assert any("Error: Unsupported operator" in result for result in results)
    assert any("Error" not in result for result in results)
    # Rewards are those of the answers: of the texts that are no calls of the tool.
    texts = [text for step in range(3) for _, text, *_ in samples(dialogues, step)]
    answers = [text for text in texts if not tunix_scripts.Sums().parse(text)]
    assert len(dialogues.rewards) > 20
    # A dialogue that its limit of tokens cuts gets none.
    expected = collections.Counter(1 / (1 + len(text)) for text in answers)
    assert collections.Counter(dialogues.rewards) <= expected
    advantages = np.stack([np.asarray(each.advantages) for each, _ in dialogues.batches])
    assert np.any(advantages)


def test_log_probabilities_over_turns(dialogues, say):
    """Of all that the policy wrote, after what the tool said too."""
    gaps = []
    for example, logps in dialogues.batches:
        mask = np.asarray(example.completion_mask, bool)
        assert not np.any(np.asarray(example.completion_ids)[mask] == PAD)
        gaps.append(np.max(np.abs(example.old_per_token_logps - logps), where=mask, initial=0.0))
    say(f"largest difference of log-probabilities {max(gaps):.2g}")
    assert max(gaps) < AGREE
    masks = np.concatenate([np.asarray(each.completion_mask) for each, _ in dialogues.batches])
    begins = np.sum(np.diff(masks, axis=1) == 1, axis=1)  # turns after the first
    assert begins.max() == 2


def test_turns_end_with_the_token_that_the_template_has(dialogues):
    for example, _ in dialogues.batches:
        mask, ids = np.asarray(example.completion_mask), np.asarray(example.completion_ids)
        ends = np.diff(mask, axis=1) == -1
        followed = ends & (ids[:, 1:] != PAD)  # by what the tool said
        assert np.all(ids[:, :-1][followed] == EOS)


def test_dialogues_share_steps_and_pages(dialogues, say):
    decoder = dialogues.cluster.rollout.decoder
    rows = [record.num_rows for record in decoder.decisions]
    prompts = [prompt for step in range(3) for prompt, *_ in samples(dialogues, step)]
    asked = sum(len(Characters().encode(prompt)) for prompt in prompts)
    fed = decoder._loop.num_prefilled
    say(
        f"{dialogues.most_at_once} calls at once, {np.mean(rows):.2f} rows per step, "
        f"{fed} of {asked} tokens of prompts fed"
    )
    assert dialogues.most_at_once == 12
    assert np.mean(rows) > 1.1
    assert fed < asked / 2
    assert not any(pool.num_held for pool in decoder._loop.scheduler.pools)


def test_dialogues_with_weights_that_are_synchronised():
    run = agentic_grpo(
        functools.partial(OURS, keeps_eos=True),
        steps=3,
        max_response=60,
        rollout_mesh=OTHER_MESH,
    )
    assert run.learner.should_sync_weights
    assert_trained(run, 3)
    assert run.cluster.rollout.num_conversions == 3
    assert run.learner.policy_version == 3
    versions = [example.policy_version for example, _ in run.batches]
    assert [{*each.tolist()} for each in versions] == [{0}, {1}, {2}]
    for example, logps in run.batches:
        mask = np.asarray(example.completion_mask, bool)
        gap = np.max(np.abs(example.old_per_token_logps - logps), where=mask, initial=0.0)
        assert gap < AGREE


def test_updates_while_dialogues_run():
    """The trainer takes each group as it comes, while others are sampled from shared weights."""
    training = {"mini_batch_size": 1, "train_micro_batch_size": 1}
    run = agentic_grpo(OURS, steps=2, max_response=60, training=training)
    assert run.cluster.global_steps == 2
    assert len(run.batches) == 6
    assert run.cluster.rollout.num_conversions >= 2
