"""Verification rules through generate(): per request, lossy ones named, refusals."""

import dataclasses

import numpy as np
import pytest
from helpers import ENGINE

import specjax
from specjax.api.generation import Stream
from specjax.config.sampling import SamplingParams
from specjax.config.speculation import SpeculationConfig
from specjax.heads.loading import load_drafter

SAMPLED = SamplingParams(temperature=1, max_tokens=20, seed=5, logprobs=0)
RULES = ("seeded", "rejection", "block", "typical", "traversal", "delta", "lenient")


@pytest.fixture(scope="module")
def prompts():
    rng = np.random.default_rng(0)
    return [rng.integers(0, 61, size).tolist() for size in (3, 9, 17, 2, 8, 30, 5)]


@pytest.mark.full
def test_rules_side_by_side_in_one_batch(target, draft, prompts):
    plain = specjax.generate(target, prompts, sampling=SAMPLED, engine=ENGINE)
    sampling = [dataclasses.replace(SAMPLED, verification=rule) for rule in RULES]
    # A row at temperature 0 under a rule by law is greedy.
    prompts = [*prompts, prompts[1]]
    certain = dataclasses.replace(SAMPLED, temperature=0, verification="rejection")
    out = specjax.generate(
        target,
        prompts,
        drafter=draft,
        sampling=[*sampling, certain],
        num_speculative_tokens=3,
        engine=ENGINE,
    )
    for rule, ours, theirs in zip(RULES, out, plain):
        assert ours.lossy == (rule if rule in ("typical", "lenient") else None)
        assert ours.acceptance.num_drafted > 0
        if rule in ("seeded", "delta"):
            assert ours.token_ids == theirs.token_ids
    assert out.stats.lossy == ("lenient", "typical")
    greedy = specjax.generate(
        target,
        prompts[-1],
        sampling=dataclasses.replace(SAMPLED, temperature=0),
        engine=ENGINE,
    )
    assert out[7].token_ids == greedy[0].token_ids


@pytest.mark.full
@pytest.mark.parametrize("tree", [None, pytest.param((2, 1, 1), marks=pytest.mark.slow)])
def test_synthetic_accepts_at_its_rates_and_says_so(target, draft, prompts, tree):
    config = SpeculationConfig(
        verification="synthetic",
        synthetic_acceptance_rates=[1.0, 1.0, 0.0],
        speculative_token_tree=tree,
        num_speculative_tokens=3,
    )
    out = specjax.generate(
        target,
        prompts,
        drafter=draft,
        sampling=dataclasses.replace(SAMPLED, max_tokens=40),
        speculative_config=config,
        engine=ENGINE,
    )
    assert {completion.lossy for completion in out} == {"synthetic"}
    assert out.stats.to_dict()["lossy"] == ("synthetic",)
    assert out.stats.acceptance.acceptance_by_position == [1.0, 1.0, 0.0]


def test_without_drafts_nothing_is_lossy(target, prompts):
    out = specjax.generate(
        target, prompts[:1], sampling=SAMPLED, verification="typical", engine=ENGINE
    )
    assert out[0].lossy is None


@pytest.mark.parametrize(
    ("drafter", "change", "message"),
    [
        (
            "model",
            {"verification": "block", "speculative_token_tree": (2,)},
            "traversal",
        ),
        ("ngram", {"verification": "lenient"}, "needs the drafter's probabilities"),
        ("ngram", {"speculative_token_tree": (2, 1)}, "leave them out"),
        ("model", {"prompt_lookup_matches": 3}, "is for method 'ngram'"),
        ("model", {"speculative_token_tree": (9, 9)}, "sliding window of 40"),
    ],
)
def test_refusals_before_any_compile(target, draft, drafter, change, message):
    windowed = dataclasses.replace(
        target, config=dataclasses.replace(target.config, layer_windows=(None, 40))
    )
    with pytest.raises(ValueError, match=message):
        specjax.generate(
            windowed,
            [[1, 2]],
            drafter=draft if drafter == "model" else drafter,
            speculative_config=SpeculationConfig(**change),
        )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"verification": "synthetic"}, "synthetic_acceptance_rates"),
        ({"synthetic_acceptance_rates": [1.5]}, "from 0 to 1"),
        ({"lenience": 0}, "lenience=0"),
        ({"typical_delta": 2}, "typical_delta=2"),
        ({"prompt_lookup_matches": 0}, "prompt_lookup_matches=0"),
        ({"num_draft_nodes": 256}, "num_draft_nodes=256"),
        ({"speculative_token_tree": (10**9,)}, "more than 255 nodes"),
        ({"speculative_token_tree": (1,) * 64}, "64 deep"),
    ],
)
def test_numbers_that_mean_nothing(change, message):
    with pytest.raises(ValueError, match=message):
        SpeculationConfig(**change)


def test_a_loaded_drafter_takes_the_tree_of_the_call(target, draft):
    loaded = load_drafter(draft, target, SpeculationConfig())
    config = SpeculationConfig(speculative_token_tree=(2, 1))
    assert load_drafter(loaded, target, config).is_tree
    loaded = load_drafter(draft, target, config)
    stream = Stream(target, [[1, 2]], drafter=loaded, sampling=SAMPLED, engine=ENGINE)
    assert stream._setup.speculation.depth == 2


@pytest.mark.parametrize(
    ("given", "depth"),
    [
        # Nobody says how deep: the tree that the drafter was loaded with does.
        ({}, 6),
        ({"verification": "traversal"}, 6),
        ({"speculative_config": {"verification": "traversal"}}, 6),
        ({"speculative_config": SpeculationConfig(verification="traversal")}, 6),
        ({"speculative_config": '{"verification": "traversal"}'}, 6),
        ({"num_speculative_tokens": 2}, 2),
        ({"speculative_config": {"num_speculative_tokens": 2}}, 2),
        ({"speculative_config": SpeculationConfig(num_speculative_tokens=2)}, 2),
        # It bounds what is written.
        ({"num_speculative_tokens": 9}, 6),
        ({"speculative_config": {"num_speculative_tokens": 9}}, 6),
        # A tree of the call's own.
        ({"speculative_config": {"speculative_token_tree": (2, 1)}}, 2),
        ({"speculative_config": {"tree_top_k": 2}}, 4),
        ({"num_speculative_tokens": 0}, 0),
        ({"speculative_config": {"num_speculative_tokens": 0}}, 0),
    ],
)
def test_how_deep_a_loaded_tree_is_drafted(target, draft, given, depth):
    config = SpeculationConfig(speculative_token_tree=(2, 1, 1, 1, 1, 1))
    loaded = load_drafter(draft, target, config)
    stream = Stream(target, [[1, 2]], drafter=loaded, sampling=SAMPLED, engine=ENGINE, **given)
    assert stream._setup.speculation.depth == depth


def test_a_tree_of_the_call_without_a_drafter_is_plain_decoding(target):
    for tree in ({"tree_top_k": 2}, {"speculative_token_tree": (2, 1)}):
        config = SpeculationConfig(**tree)
        stream = Stream(target, [[1, 2]], engine=ENGINE, speculative_config=config)
        assert stream._setup.speculation.depth == 0
