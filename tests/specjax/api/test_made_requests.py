"""From what a user passes to requests: how long, under which rule, by which noise."""

import dataclasses

import pytest
import tokenizers
from helpers import tiny_llama

from specjax.api.requests import derive_seed, make_requests
from specjax.config.engine import EngineConfig
from specjax.config.sampling import SamplingParams
from specjax.config.speculation import SpeculationConfig
from specjax.heads.loading import load_drafter
from specjax.text.tokenization import Tokenizer
from specjax.types import DELTA, REJECTION, SEEDED

CONTEXT = 64


@pytest.fixture(scope="module")
def target():
    return tiny_llama(0, max_position_embeddings=CONTEXT, eos_token_ids=(7,))


def made(target, prompts, *, drafter=None, engine=None, depth=4, config=None, **params):
    """Returns requests and what was refused."""
    drafter = load_drafter(drafter, target)
    config = config or SpeculationConfig(num_speculative_tokens=depth)
    sampling = [SamplingParams(**params)] * len(prompts)
    engine = EngineConfig(**(engine or {}))
    return make_requests(target, prompts, sampling, config, drafter, engine)


@pytest.mark.filterwarnings("ignore:max_tokens=.* do not fit beside the prompt")
@pytest.mark.parametrize(
    ("prompt", "max_tokens", "max_context", "length"),
    [
        (50, 5, None, 55),
        (50, 14, None, CONTEXT),
        (50, 15, None, CONTEXT),
        (50, 10**6, None, CONTEXT),
        (50, 100, 60, 60),
        (50, 100, 1000, CONTEXT),
        (CONTEXT - 1, 5, None, CONTEXT),
    ],
)
def test_no_request_is_longer_than_the_context(target, prompt, max_tokens, max_context, length):
    (request,), refused = made(
        target,
        [[1] * prompt],
        max_tokens=max_tokens,
        engine={"max_context": max_context},
    )
    assert request.max_length == length
    assert refused == []


@pytest.mark.parametrize(("prompt", "max_context"), [(CONTEXT, None), (60, 60)])
def test_a_prompt_that_leaves_no_room_is_refused(target, prompt, max_context):
    requests, refused = made(target, [[1] * prompt, [1]], engine={"max_context": max_context})
    assert [request.prompt_index for request in requests] == [1]
    assert f"prompt has {prompt} tokens and the context holds {prompt}" in (refused[0].error)


def test_a_prompt_that_is_nested_is_refused_alone(target):
    deep = [1]
    for _ in range(5_000):
        deep = [deep]
    requests, refused = made(target, [[1], deep, [1, deep], [1]])
    assert [request.prompt_index for request in requests] == [0, 3]
    assert [each.error[:25] for each in refused] == [
        "prompt 1: a prompt holds ",
        "prompt 2: a prompt holds ",
    ]


@pytest.mark.filterwarnings("ignore:max_tokens=.* do not fit beside the prompt")
def test_the_least_output_must_fit(target):
    assert made(target, [[1] * 60], min_tokens=4, max_tokens=9)[1] == []
    (refused,) = made(target, [[1] * 60], min_tokens=5, max_tokens=9)[1]
    assert "needs 5 at least" in refused.error


def test_what_drafts_nothing_is_verified_by_equality(target):
    by_law = {"verification": "rejection", "temperature": 1.0}
    draft = {"drafter": target}
    (drafts,), _ = made(target, [[1]], **draft, **by_law)
    assert (drafts.rule, drafts.draft_cap) == (REJECTION, 4)
    for cannot in ({"speculate": False}, {"num_speculative_tokens": 0}):
        (request,), _ = made(target, [[1]], **draft, **by_law, **cannot)
        assert (request.rule, request.draft_cap) == (DELTA, 0)
    # Matches have no law.
    (request,), _ = made(target, [[1]], drafter="ngram", **by_law)
    assert request.rule == DELTA
    (request,), _ = made(target, [[1]], **draft, temperature=1.0)
    assert request.rule == SEEDED


def test_a_request_drafts_what_it_asks_for_and_no_more_than_the_call(target):
    few, _ = made(target, [[1]], drafter=target, num_speculative_tokens=2)
    with pytest.warns(UserWarning, match="drafts at most 4"):
        many, _ = made(target, [[1]], drafter=target, num_speculative_tokens=9)
    assert [request.draft_cap for request in (*few, *many)] == [2, 4]
    with pytest.warns(UserWarning, match="num_speculative_tokens=9; this call has no drafter"):
        made(target, [[1]], num_speculative_tokens=9, depth=0)


def noises(requests):
    return [tuple(request.sampling_values["seeds"].tolist()) for request in requests]


def test_samples_have_noise_of_their_own_and_prompts_of_one_seed_share_it(target):
    requests, _ = made(target, [[1], [2]], n=3, seed=5)
    first, second = noises(requests[:3]), noises(requests[3:])
    assert len(set(first)) == 3
    assert first == second
    assert first == noises(made(target, [[1]], n=3, seed=5)[0])
    assert [request.seed for request in requests] == [5] * 6


def test_rules_by_law_under_a_budget_give_each_prompt_noise_of_its_own(target):
    config = SpeculationConfig(
        num_speculative_tokens=4, max_drafts_per_step=3, verification="rejection"
    )
    requests, _ = made(
        target, [[1], [1]], n=2, seed=5, drafter=target, config=config, temperature=1.0
    )
    assert len(set(noises(requests))) == 4


def test_derived_seeds_differ_and_stay_below_64_bits():
    derived = [derive_seed(seed, n) for seed in (0, 1, 2**64 - 1) for n in range(20)]
    assert len(set(derived)) == len(derived)
    assert all(0 <= seed < 2**64 for seed in derived)
    # A seed's first sample is fixed for good: others have stored it.
    assert derive_seed(0, 0) == 0xE220A8397B1DCDAF


def test_text_follows_the_prompt_as_the_parameters_say(target):
    words = {word: i for i, word in enumerate(["<s>", "[CALL]", "\u2581the", "\u2581cat"])}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<s>"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    backend.decoder = tokenizers.decoders.Metaspace()
    backend.add_special_tokens(["<s>", "[CALL]"])
    spoken = dataclasses.replace(target, tokenizer=Tokenizer(backend))
    for prompt in ("the", [2], [0, 2, 1]):
        requests, _ = made(spoken, [prompt], n=2, stop="[CALL]")
        for request in requests:
            assert request.text.feed([3]).text == " cat", prompt
            assert request.text.feed([1]).stopped_by == "[CALL]", prompt
        (request,), _ = made(spoken, [prompt], skip_special_tokens=False)
        assert request.text.feed([1, 3]).text == "[CALL] cat", prompt
        (request,), _ = made(spoken, [prompt], stop=" c", include_stop_str_in_output=True)
        assert request.text.feed([2, 3]).text == " the c", prompt
