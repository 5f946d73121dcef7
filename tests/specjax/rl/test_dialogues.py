"""Dialogues: their tokens are those of the whole text fed anew, and nothing is fed twice."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import time
from concurrent import futures

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from asked_for import quick
from helpers import ROLLOUTS as ENGINE
from helpers import first_layer, tiny_llama

import specjax
from specjax import Reply, SamplingParams
from specjax.engine.loop import Loop
from specjax.policy.interface import Fixed
from specjax.rl import turns
from specjax.rl.batch import ENVIRONMENT, ERROR, LENGTH, STOP, UNFINISHED
from specjax.text.tokenization import Tokenizer

FULL = pytest.mark.full
EOS = 7
PROMPTS = [[1, 2, 3], [4, 5, 6, 8, 9, 1, 2, 3, 4], [11], [20, 21] * 9]
SAMPLING = SamplingParams(temperature=0.8, max_tokens=12, seed=3)
DRAFTERS = ("plain", "ngram", "history", "draft")


@functools.cache
def target():
    """Returns a tiny model whose tokenizer has a word for each token, and a first token."""
    model = tiny_llama(0, eos_token_ids=(EOS,))
    words = {f"w{number}": number for number in range(model.config.vocab_size)}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="w1 $A", special_tokens=[("w1", 1)]
    )
    return dataclasses.replace(model, tokenizer=Tokenizer(backend))


def build(name, engine=ENGINE, **more):
    drafters = {
        "plain": {},
        "ngram": {"drafter": "ngram", "num_speculative_tokens": 3},
        "history": {"drafter": "history", "num_speculative_tokens": 3},
        "draft": {"drafter": first_layer(target()), "num_speculative_tokens": 3},
    }
    return specjax.build_decoder(target(), engine=engine, **drafters[name], **more)


decoder = functools.cache(build)


def answer(turn):
    """An environment: replies of one to four tokens, which are functions of the turn."""
    count = 1 + (turn.prompt_index + turn.turn_index + turn.token_ids[0]) % 4
    return Reply(token_ids=[30 + count] * count, reward=float(turn.turn_index + 1))


def talk(name="plain", environment=answer, prompts=PROMPTS, **arguments):
    arguments = {"sampling": SAMPLING, "max_turns": 3} | arguments
    own = name if isinstance(name, specjax.RolloutDecoder) else decoder(name)
    batch = specjax.rollout_turns(own, target().params, prompts, environment, **arguments)
    assert_no_page_is_held(own)
    return batch


def assert_no_page_is_held(own):
    scheduler = own._loop.scheduler
    scheduler.check()
    assert not scheduler.occupied
    assert all(pool.num_held == 0 for pool in scheduler.pools)


@functools.cache
def expected():
    """Returns the dialogues that others are held against."""
    return talk(num_samples=2)


def turns_of(batch, index):
    """Yields (tokens before, the policy's tokens, their places) of a dialogue's turns."""
    prompt = np.asarray(batch.prompt_ids)[index][np.asarray(batch.prompt_mask)[index]].tolist()
    completion = np.asarray(batch.completion_ids)[index]
    own = np.where(batch.loss_mask, batch.turns.index, -1)[index]
    for turn in range(int(batch.turns.counts[index])):
        places = np.flatnonzero(own == turn)
        if len(places):
            before = [*prompt, *completion[: places[0]].tolist()]
            yield before, completion[places].tolist(), places


def assert_as_if_fed_anew(batch, sampling=SAMPLING, params=None):
    """Each turn is a request of its own, whose prompt is all text before it."""
    fresh = decoder("plain")
    fresh.forget()
    loop = fresh.hand_over(target().params if params is None else params)
    wanted = []
    for index in range(batch.num_samples):
        for before, tokens, places in turns_of(batch, index):
            asked = dataclasses.replace(sampling, seed=0, logprobs=sampling.logprobs or 0)
            ((request,), _) = fresh.requests([before], [asked])
            request.sampling_values["seeds"] = np.asarray(batch.seeds)[index]
            request.keeps_scores = True
            loop.add(request)
            wanted.append((request, index, tokens, places))
    for _ in loop.run():
        pass
    for request, index, tokens, places in wanted:
        assert request.output_token_ids[: len(tokens)] == tokens
        raw = np.array([scores.columns[2] for scores in request.logprobs[: len(tokens)]])
        np.testing.assert_array_equal(np.asarray(batch.logprobs.raw)[index, places], raw)
    fresh.let_go()


def assert_same(actual, wanted):
    names = ("completion_ids", "completion_mask", "loss_mask", "lengths", "finish_reasons")
    for name in (*names, "seeds"):
        np.testing.assert_array_equal(getattr(actual, name), getattr(wanted, name), name)
    chex.assert_trees_all_equal(actual.logprobs, wanted.logprobs)
    chex.assert_trees_all_equal(actual.turns, wanted.turns)


# What it returns


@pytest.mark.full
def test_a_progress_function_is_told_of_dialogues():
    told = []
    talk(max_turns=2, progress=lambda *of: told.append(of))
    counts = [of[1:] for of in told if of[0] == "dialogues"]
    assert counts[-1] == (4, 4)
    assert [done for done, _ in counts] == sorted(done for done, _ in counts)


@pytest.mark.full
def test_masks_say_who_wrote_each_token():
    batch = expected()
    assert batch.completion_ids.shape == (8, 96)
    assert batch.turns.counts.tolist() == [3] * 8
    assert batch.turns.rewards.tolist() == [[1.0, 2.0, 3.0]] * 8
    assert set(np.unique(batch.turns.finish_reasons)) == {STOP, LENGTH}
    np.testing.assert_array_equal(batch.turns.finish_reasons[:, 2], batch.finish_reasons)
    for index in range(8):
        text, length = np.asarray(batch.completion_ids)[index], int(batch.lengths[index])
        is_own, turns = np.asarray(batch.loss_mask)[index], np.asarray(batch.turns.index)[index]
        place = 0
        for turn in range(3):
            if turn:
                count = text[place] - 30
                assert 1 <= count <= 4
                assert text[place : place + count].tolist() == [30 + count] * count
                assert not is_own[place : place + count].any()
                assert set(turns[place : place + count]) == {turn - 1}
                place += count
            end = place + int(np.argmin((turns == turn)[place:] & is_own[place:]))
            own = text[place:end].tolist()
            assert EOS not in own[:-1]
            stopped = batch.turns.finish_reasons[index, turn] == STOP
            assert (own[-1] == EOS) if stopped else (len(own) == 12)
            place = end
        assert place == length
        assert np.asarray(batch.completion_mask)[index].tolist() == [True] * length + [False] * (
            96 - length
        )
        assert not is_own[length:].any()
        assert set(turns[length:]) == {-1}
    for values in jax.tree.leaves(batch.logprobs):
        values = np.asarray(values)
        assert not values[~np.asarray(batch.loss_mask)].any()
        assert np.all(values[np.asarray(batch.loss_mask)] < 0)
    versions = np.asarray(batch.params_versions)
    assert set(versions[np.asarray(batch.loss_mask)]) == {batch.metrics["params_version"]}
    assert batch.metrics["num_turns"] == 24
    assert batch.metrics["num_tokens"] == int(batch.loss_mask.sum())
    assert batch.is_finished
    assert batch.errors == {}
    assert jax.tree.map(lambda leaf: leaf[2:4], batch).turns.counts.tolist() == [3, 3]


@pytest.mark.full
def test_a_rollout_without_an_environment_has_a_loss_mask_too():
    batch = specjax.rollout(decoder("plain"), target().params, PROMPTS, sampling=SAMPLING)
    np.testing.assert_array_equal(batch.loss_mask, batch.completion_mask)
    assert batch.turns is None


@pytest.mark.full
def test_scores_are_those_of_the_dialogue():
    own = decoder("plain")
    told = specjax.score(own, target().params, expected())
    chex.assert_trees_all_equal(told, expected().logprobs)
    mask = expected().loss_mask
    gap = specjax.logprob_gap(expected().logprobs.raw, told.raw, mask)
    assert float(gap["largest_gap"]) == 0.0


@FULL
def test_scores_where_a_turn_begins_matter():
    sampling = dataclasses.replace(SAMPLING, presence_penalty=1.5, min_tokens=3)
    batch = talk("history", sampling=sampling)
    told = specjax.score(decoder("plain"), target().params, batch)
    chex.assert_trees_all_close(told, batch.logprobs, atol=1e-5)
    assert_as_if_fed_anew(batch, sampling)


# What it is a function of


@pytest.mark.parametrize("name", quick(DRAFTERS, "history"))
def test_tokens_are_those_of_the_whole_text_fed_anew(name):
    batch = talk(name, num_samples=2)
    assert_same(batch, expected())
    if name in ("plain", "draft"):
        assert_as_if_fed_anew(batch)


@FULL
@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(temperature=0, max_tokens=9, seed=0),
        SamplingParams(temperature=0.9, max_tokens=10, seed=1, stop=["w9", "w31 w3"]),
        SamplingParams(max_tokens=10, seed=1, top_k=9, frequency_penalty=0.7, min_tokens=4),
    ],
)
def test_so_it_is_with_other_parameters(name, sampling):
    environment = lambda turn: Reply(text=f"w{40 + turn.turn_index} w31", reward=1.0)
    batch = talk(name, environment, sampling=sampling, num_samples=2)
    assert_as_if_fed_anew(batch, sampling)
    assert_same(batch, talk("plain", environment, sampling=sampling, num_samples=2))


@pytest.mark.parametrize("shape", quick([(2,), (2, 2)], slow=[(2,)]))
def test_over_a_mesh(shape):
    mesh = jax.make_mesh(shape, ("data", "tensor")[: len(shape)])
    split = build("history", dataclasses.replace(ENGINE, numerics="fast"), mesh=mesh)
    batch = talk(split, num_samples=2)
    for name in ("completion_ids", "loss_mask", "finish_reasons"):
        np.testing.assert_array_equal(getattr(batch, name), getattr(expected(), name))
    chex.assert_trees_all_equal(batch.turns, expected().turns)


@pytest.mark.slow
@pytest.mark.goodput
def test_rounding_is_all_that_remains_without_invariant_numerics():
    fast = dataclasses.replace(ENGINE, numerics="fast")
    batch = talk(build("draft", fast), num_samples=2)
    np.testing.assert_array_equal(batch.completion_ids, expected().completion_ids)


def test_by_hand_it_is_the_same():
    own = decoder("plain")
    batch = specjax.rollout(own, target().params, PROMPTS, num_samples=2, sampling=SAMPLING)
    for turn in range(3):
        rewards = [float(turn + 1)] * 8
        replies = []
        for index in range(8):
            (*_, (_, tokens, _)) = turns_of(as_dialogue(batch), index)
            count = 1 + (int(batch.prompt_index[index]) + turn + tokens[0]) % 4
            replies.append([30 + count] * count if turn < 2 else None)
        batch = batch.continued(replies, rewards=rewards, width=96)
        if turn < 2:
            assert set(batch.finish_reasons.tolist()) == {UNFINISHED}
            batch = specjax.rollout(own, target().params, batch, token_budget=5)
            while not batch.is_finished:
                batch = specjax.rollout(own, target().params, batch, token_budget=5)
    assert_same(batch, expected())


def as_dialogue(batch):
    return batch.continued([None] * batch.num_samples)


def test_replies_by_hand_are_checked():
    batch = specjax.rollout(decoder("plain"), target().params, PROMPTS[:2], sampling=SAMPLING)
    with pytest.raises(ValueError, match="1 replies were given for 2 samples"):
        batch.continued([[1]])
    with pytest.raises(ValueError, match=r"rewards have shape \(1,\); expected \(2,\)"):
        batch.continued([[1], None], rewards=[1.0])
    with pytest.raises(ValueError, match="width=3 must be at least"):
        batch.continued([[1], None], width=3)
    begun = batch.continued([[1], None])
    assert begun.completion_ids.shape[1] == max(12, int(batch.lengths[0]) + 1 + 12)
    with pytest.raises(ValueError, match="sample 0 has finish reason 0, and a reply"):
        begun.continued([[1], None])
    with pytest.raises(ValueError, match="token id 999 is outside the vocabulary"):
        specjax.rollout(decoder("plain"), target().params, batch.continued([[999], None]))


def test_new_weights_between_turns_read_no_old_keys():
    own = decoder("plain")
    batch = specjax.rollout(own, target().params, PROMPTS, sampling=SAMPLING)
    batch = batch.continued([[5, 6]] * 4)
    other = jax.tree.map(lambda leaf: leaf * 1.05, target().params)
    batch = specjax.rollout(own, other, batch)
    first, second = np.unique(np.asarray(batch.params_versions)[np.asarray(batch.loss_mask)])
    is_second = (np.asarray(batch.turns.index) == 1) & np.asarray(batch.loss_mask)
    versions = np.asarray(batch.params_versions)
    assert set(versions[is_second]) == {second}
    assert set(versions[np.asarray(batch.loss_mask) & ~is_second]) == {first}
    only_second = dataclasses.replace(batch, loss_mask=jnp.asarray(is_second))
    assert_as_if_fed_anew(only_second, params=other)


# What is computed


def num_fed_at_least(batch):
    """Returns the tokens that have to be fed as prompts: the texts before the turns."""
    prompts = np.asarray(batch.prompt_mask).sum(axis=1) - 1
    replies = (np.asarray(batch.completion_mask) & ~np.asarray(batch.loss_mask)).sum(axis=1)
    return int(np.sum(prompts + replies))


@pytest.mark.parametrize(
    ("name", "goodput"),
    [
        ("plain", False),
        pytest.param("ngram", False, marks=FULL),
        ("history", False),
        pytest.param("draft", False, marks=FULL),
        pytest.param("draft", True, marks=[FULL, pytest.mark.goodput]),
    ],
)
def test_nothing_is_fed_twice(name, goodput):
    own = decoder(name)
    if own._loop is None:
        talk(name)
    own.forget()
    before = own._loop.num_prefilled
    batch = talk(name)
    num_fed = own._loop.num_prefilled - before
    assert num_fed == num_fed_at_least(batch)
    assert batch.metrics["num_preemptions"] == 0


@FULL
def test_a_draft_model_catches_up_with_turns_that_it_did_not_see():
    """It is the target itself, so that each draft is right if it has seen all of the text."""
    own = specjax.build_decoder(
        target(), drafter=target(), num_speculative_tokens=3, engine=ENGINE, policy=Fixed(3)
    )
    plain = dataclasses.replace(SAMPLING, num_speculative_tokens=0)
    prompts = [PROMPTS[3], PROMPTS[1]]
    batch = specjax.rollout(own, target().params, prompts, sampling=plain)
    assert batch.metrics["num_drafted"] == 0
    before = own._loop.num_prefilled
    batch = batch.continued([list(range(30, 41)), [30, 31]])
    batch = specjax.rollout(own, target().params, batch, sampling=SAMPLING)
    assert own._loop.num_prefilled - before == 11 + 2
    assert batch.metrics["num_drafted"] > 0
    assert batch.metrics["num_accepted"] == batch.metrics["num_drafted"]
    assert_as_if_fed_anew(batch)


@pytest.mark.full
def test_too_few_pages_cost_time_and_change_nothing():
    small = dataclasses.replace(ENGINE, num_pages=14)
    own = build("plain", small)
    batch = talk(own, num_samples=2, completion_width=96)
    assert_same(batch, expected())
    assert own._loop.num_prefilled > num_fed_at_least(batch)


def test_rows_decode_while_the_environment_works():
    """The first dialogue's tool ends only after all others were heard."""
    heard = set()

    def environment(turn):
        if turn.prompt_index == 0:
            give_up = time.monotonic() + 20
            while len(heard) < 3 and time.monotonic() < give_up:
                time.sleep(0.001)
        heard.add(turn.prompt_index)
        return answer(turn)

    batch = talk(environment=environment)
    assert heard == {0, 1, 2, 3}
    assert_same(batch, jax.tree.map(lambda leaf: leaf[::2], expected()))


@pytest.mark.parametrize("name", ["rollout", "score"])
def test_a_decoder_that_runs_refuses_another_call(name):
    """An environment that judges with the policy is such a call."""
    own, params, errors = decoder("plain"), target().params, []
    alone = specjax.rollout(own, params, PROMPTS, sampling=SAMPLING)

    def judge(turn):
        try:
            if name == "score":
                specjax.score(own, params, alone)
            else:
                specjax.rollout(own, params, PROMPTS, sampling=SAMPLING)
        except RuntimeError as error:
            errors.append(str(error))

    batch = talk(environment=judge, max_turns=2)
    assert len(errors) == len(PROMPTS)
    assert all("shares_steps=True" in error for error in errors)
    for index, length in enumerate(np.asarray(alone.lengths)):
        np.testing.assert_array_equal(
            batch.completion_ids[index, :length], alone.completion_ids[index, :length]
        )


def test_dialogues_of_two_threads_share_steps():
    own = build("plain", shares_steps=True)
    parts = [PROMPTS[:2], PROMPTS[2:]]

    def part(prompts):
        return specjax.rollout_turns(
            own, target().params, prompts, answer_to_text, max_turns=3, sampling=SAMPLING
        )

    with futures.ThreadPoolExecutor(2) as threads:
        batches = list(threads.map(part, parts))
    wanted = talk(environment=answer_to_text)
    for batch, rows in zip(batches, (slice(2), slice(2, 4))):
        np.testing.assert_array_equal(batch.completion_ids, wanted.completion_ids[rows])
        np.testing.assert_array_equal(batch.loss_mask, wanted.loss_mask[rows])
    assert_no_page_is_held(own)


def test_a_turn_that_another_threads_step_ended_is_answered(monkeypatch):
    own, wanted = build("plain", shares_steps=True), talk()
    take_ended = turns._Dialogues._take_ended

    def then_another_thread_steps(dialogues):
        take_ended(dialogues)
        while dialogues._loop.has_work:
            dialogues._loop.step()

    monkeypatch.setattr(turns._Dialogues, "_take_ended", then_another_thread_steps)
    assert_same(talk(own), wanted)


def test_a_turn_that_ends_as_the_time_does_is_answered_later(monkeypatch):
    own, wanted = build("plain"), talk(environment=answer_to_text)
    pause = Loop.pause

    def once_all_have_ended(loop):
        while loop.has_work:
            loop.step()  # as bursts in flight that are read back
        return pause(loop)

    monkeypatch.setattr(Loop, "pause", once_all_have_ended)
    first = talk(own, environment=answer_to_text, time_budget_s=1e-9)
    assert first.turns.counts.tolist() == [1] * 4
    assert first.finish_reasons.tolist() == [UNFINISHED] * 4
    rest = specjax.rollout_turns(own, target().params, first, answer_to_text, max_turns=3)
    assert_same(rest, wanted)


def answer_to_text(turn):
    """As `answer`, whatever the number of the prompt."""
    return Reply(token_ids=[30 + turn.token_ids[0] % 4], reward=1.0)


# Ends


def test_the_environment_sees_the_last_turn_and_may_end_a_dialogue():
    seen = []

    def environment(turn):
        seen.append(turn)
        if turn.prompt_index == 0:
            return Reply(token_ids=[30], is_over=True, reward=0.5)
        if turn.prompt_index == 1:
            return None
        return Reply(text="w41 w42")

    batch = talk(environment=environment, max_turns=2, num_samples=1)
    assert batch.turns.counts.tolist() == [1, 1, 2, 2]
    assert batch.turns.rewards.tolist() == [[0.5, 0], [0, 0], [0, 0], [0, 0]]
    assert sorted(turn.is_last for turn in seen) == [False] * 4 + [True] * 2
    assert 30 not in np.asarray(batch.completion_ids)[0]
    for turn in seen:
        index = turn.prompt_index
        assert turn.prompt_token_ids == PROMPTS[index]
        text = [*PROMPTS[index], *np.asarray(batch.completion_ids)[index].tolist()]
        assert turn.dialogue_token_ids == text[: len(turn.dialogue_token_ids)]
        assert turn.dialogue_token_ids[-len(turn.token_ids) :] == turn.token_ids
        spoken = turn.token_ids[:-1] if turn.finish_reason == "stop" else turn.token_ids
        assert turn.text == "".join(f" w{token}" for token in spoken)
        assert turn.finish_reason in ("stop", "length")
        assert turn.stop_reason == (EOS if turn.finish_reason == "stop" else None)
    # Replies in text have no token that begins a text.
    (_, (before, _, _)) = turns_of(batch, 2)
    assert before[-2:] == [41, 42]


def test_a_reply_that_does_not_fit_ends_a_dialogue_with_length():
    long = lambda turn: Reply(token_ids=[9] * 40, reward=1.0)
    batch = talk(environment=long, max_turns=5, completion_width=60)
    assert batch.completion_ids.shape == (4, 60)
    assert batch.finish_reasons.tolist() == [LENGTH] * 4
    assert set(batch.turns.counts.tolist()) == {2}
    assert batch.turns.rewards.shape == (4, 5)
    # As long as the width: the last turn is cut there, and its environment hears so.
    seen = []
    short = lambda turn: (seen.append(turn), Reply(token_ids=[9] * 5))[1]
    batch = talk(environment=short, max_turns=9, completion_width=20, prompts=PROMPTS[:1])
    assert int(batch.lengths[0]) <= 20
    assert seen[-1].is_last == (int(batch.lengths[0]) == 20)


@pytest.mark.parametrize("num_left", [7, 8])
def test_a_reply_that_leaves_no_room_for_min_tokens_does_not_fit(num_left):
    sampling = dataclasses.replace(SAMPLING, min_tokens=8)
    seen = []

    def environment(turn):
        seen.append(turn)
        return Reply(token_ids=[9] * (96 - num_left - len(turn.dialogue_token_ids)))

    batch = talk(environment=environment, sampling=sampling, max_turns=5)
    assert batch.errors == {}
    is_own = np.asarray(batch.loss_mask) == np.asarray(batch.completion_mask)
    if num_left == 7:
        assert batch.turns.counts.tolist() == [1] * 4
        assert batch.finish_reasons.tolist() == [LENGTH] * 4
        assert is_own.all()  # the reply is not in it
    else:
        assert batch.turns.counts.tolist() == [2] * 4
        assert not is_own.all(axis=1).any()
        assert np.all((np.asarray(batch.turns.index) == 1).sum(axis=1) == 8)
    # The environment hears that no reply fits any more.
    assert [turn.is_last for turn in seen] == [turn.turn_index == 1 for turn in seen]


def test_errors_say_what_failed_while_a_turn_was_drawn():
    embedding = target().params["embed_tokens"]
    params = target().params | {"embed_tokens": embedding.at[41].set(np.nan)}
    environment = lambda turn: Reply(token_ids=[40 + turn.prompt_index], reward=1.0)
    arguments = {"sampling": SAMPLING, "max_turns": 2}
    with pytest.warns(UserWarning, match="1 of 8 samples have finish reason ERROR"):
        batch = specjax.rollout_turns(decoder("plain"), params, PROMPTS, environment, **arguments)
    assert np.flatnonzero(np.asarray(batch.finish_reasons) == ERROR).tolist() == [1]
    assert list(batch.errors) == [1]
    assert "the model's logits were NaN" in batch.errors[1]


def failing(turn):
    if turn.turn_index == 1:
        if turn.prompt_index == 0:
            raise ValueError("no such tool")
        if turn.prompt_index == 1:
            time.sleep(60)
        if turn.prompt_index == 2:
            return Reply(token_ids=[61])
    return answer(turn)


def test_a_tool_that_fails_ends_its_own_dialogue_alone():
    with pytest.warns(UserWarning, match="failed in 3 of 4 dialogues.*no such tool") as warned:
        batch = talk(environment=failing, turn_timeout_s=0.5)
    assert len(warned) == 1
    assert batch.finish_reasons.tolist()[:3] == [ENVIRONMENT] * 3
    assert "longer than 0.5 s" in batch.errors[1]
    assert "from 0 to 60" in batch.errors[2]
    assert batch.metrics["num_environment_failures"] == 3
    assert batch.turns.counts.tolist() == [2, 2, 2, 3]
    others = jax.tree.map(lambda leaf: leaf[::2], expected())
    np.testing.assert_array_equal(batch.completion_ids[3], others.completion_ids[3])
    for index in range(3):
        length = int(batch.lengths[index])
        own, wanted = (np.asarray(b.completion_ids)[index, :length] for b in (batch, others))
        np.testing.assert_array_equal(own, wanted)
    # In jit, and where rollouts are joined, errors have no place.
    assert jax.jit(lambda batch: batch)(batch).errors == {}


@pytest.mark.parametrize("reward", [np.nan, "1", None, 1e300])
def test_a_reward_that_is_no_number_is_a_failure(reward):
    with pytest.warns(UserWarning, match="expected a finite number"):
        batch = talk(environment=lambda turn: Reply(token_ids=[1], reward=reward))
    assert set(batch.finish_reasons.tolist()) == {ENVIRONMENT}
    assert not np.any(batch.turns.rewards)


class Raises:
    """An object whose every use raises."""

    def _fail(self, *_):
        raise RuntimeError("no use")

    __float__ = __iter__ = __len__ = __repr__ = __bool__ = _fail


def test_a_reply_that_cannot_be_read_ends_its_own_dialogue_alone():
    bad = {
        (0, 0): Reply(text=123),
        (0, 1): Reply(text=b"w5"),
        (1, 0): Reply(token_ids=[1], reward=10**400),
        (1, 1): Reply(token_ids=[1], reward=Raises()),
        (2, 0): Reply(token_ids=Raises()),
        (2, 1): Raises(),
        (3, 0): Reply(text="\ud800"),
    }

    def environment(turn):
        reply = bad.get((turn.prompt_index, turn.sample_index))
        return answer(turn) if reply is None else reply

    with pytest.warns(UserWarning, match="failed in 7 of 8 dialogues"):
        batch = talk(environment=environment, num_samples=2)
    assert batch.finish_reasons.tolist()[:7] == [ENVIRONMENT] * 7
    for index, words in enumerate(
        [
            "its text is 123; expected a str",
            "its text is b'w5'; expected a str",
            "its reward is 1000",
            "its reward is an object of Raises whose repr fails; expected a finite",
            "its token_ids are an object of Raises whose repr fails",
            "it returned an object of Raises whose repr fails; expected specjax.Reply",
        ]
    ):
        assert words in batch.errors[index]
    assert sorted(batch.errors) == list(range(7))
    np.testing.assert_array_equal(batch.completion_ids[7], expected().completion_ids[7])


def test_a_prompt_that_is_refused_leaves_the_others():
    with pytest.warns(UserWarning, match="1 of 3 samples were refused"):
        batch = talk(prompts=[PROMPTS[0], [1] * 96, PROMPTS[2]], prompt_width=18)
    assert batch.finish_reasons.tolist()[1] == ERROR
    assert batch.turns.counts.tolist()[::2] == [3, 3]
    assert list(batch.errors) == [1]


def test_a_width_below_a_turn_ends_it():
    batch = talk(completion_width=5)
    assert batch.completion_ids.shape[1] == 5
    assert set(batch.lengths.tolist()) <= {1, 2, 3, 4, 5}
    wanted, turns = (
        np.asarray(x)[::2] for x in (expected().completion_ids, expected().turns.index)
    )
    for row, length in enumerate(batch.lengths.tolist()):
        first = turns[row] == 0
        own = min(length, int(first.sum()))
        np.testing.assert_array_equal(batch.completion_ids[row, :own], wanted[row, :own])


def test_an_environment_that_is_no_function_is_refused_at_once():
    with pytest.raises(TypeError, match="environment is 3; expected a function"):
        talk(environment=3)


@pytest.mark.parametrize("place", ["environment", "step"])
def test_an_interrupted_call_holds_no_page(place, monkeypatch):
    step, steps = Loop.step, iter(range(99))

    def interrupted(*_):
        raise KeyboardInterrupt

    def few_steps(loop):
        return interrupted() if next(steps) == 2 else step(loop)

    with monkeypatch.context() as patch:
        if place == "step":
            patch.setattr(Loop, "step", few_steps)
        else:
            patch.setattr(specjax.rl.turns._Dialogues, "_take_answer", interrupted)
        with pytest.raises(KeyboardInterrupt):
            talk()
    assert_no_page_is_held(decoder("plain"))
    assert_same(talk(num_samples=2), expected())


@pytest.mark.full
def test_a_call_that_ran_out_of_time_goes_on():
    """Turns that run are continued, and turns that waited are asked about again."""
    begun = time.monotonic()
    heard = np.zeros((8, 3), int)

    def environment(turn):
        reason = {"stop": STOP, "length": LENGTH}[turn.finish_reason]
        heard[2 * turn.prompt_index + turn.sample_index, turn.turn_index] = reason
        if turn.turn_index == 1 and time.monotonic() - begun < 1.5:
            time.sleep(1.5)
        return answer(turn)

    batch = talk(environment=environment, num_samples=2, time_budget_s=1.0)
    assert set(batch.finish_reasons.tolist()) == {UNFINISHED}
    with pytest.raises(ValueError, match="dialogues wait for an environment's reply"):
        specjax.rollout(decoder("plain"), target().params, batch)
    heard[:] = 0
    own = np.asarray(batch.turns.finish_reasons)
    batch = talk("plain", environment, batch, sampling=None)
    assert_same(batch, expected())
    waited = (own > 0) & (heard > 0)
    assert set(heard[waited]) == {STOP, LENGTH}
    np.testing.assert_array_equal(heard[heard > 0], batch.turns.finish_reasons[heard > 0])


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"max_turns": 0}, "max_turns=0 must be a whole number of at least 1"),
        ({"max_calls": 0}, "max_calls=0 must be"),
        ({"completion_width": 0}, "completion_width=0 must be"),
        ({"turn_timeout_s": 0}, "turn_timeout_s=0 must be seconds above 0"),
    ],
)
def test_refused_arguments(arguments, match):
    with pytest.raises(ValueError, match=match):
        talk(**arguments)


# Many


@pytest.mark.parametrize("name", quick(["plain", "history"], slow=["history"]))
def test_two_hundred_dialogues_with_a_tool_that_fails_or_hangs(name):
    rng = np.random.default_rng(0)
    prompts = [rng.integers(8, 60, rng.integers(1, 25)).tolist() for _ in range(200)]

    async def tool(turn):
        await asyncio.sleep(0.002 * (turn.prompt_index % 5))
        if turn.turn_index == turn.prompt_index % 3:
            if turn.prompt_index % 10 == 3:
                raise RuntimeError("the tool failed")
            if turn.prompt_index % 10 == 7:
                await asyncio.sleep(600)
        return answer(turn)

    own = build(name, dataclasses.replace(ENGINE, max_rows=8, num_pages=2000))
    with pytest.warns(UserWarning, match="failed in 40 of 200 dialogues"):
        batch = talk(own, tool, prompts, turn_timeout_s=2.0)
    failed = np.asarray(batch.finish_reasons) == ENVIRONMENT
    assert failed.sum() == 40
    assert set(np.flatnonzero(failed) % 10) == {3, 7}
    counts = [1 + n % 3 if n % 10 in (3, 7) else 3 for n in range(200)]
    assert batch.turns.counts.tolist() == counts
    assert own._loop.num_prefilled <= num_fed_at_least(batch)
    # Prompts with equal first pages share them; nothing else is saved.
    assert own._loop.num_prefilled >= num_fed_at_least(batch) - 8 * 5
    assert_as_if_fed_anew(batch)
