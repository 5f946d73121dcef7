"""The same tokens with and without speculation, whatever the drafter, K, batch, burst and pages."""

import itertools

import pytest
from lossless import (
    EVERYTHING,
    MOST_TIES,
    NUM_PROMPTS,
    SAMPLING,
    hold_against,
    is_tie,
    plain,
    prompts,
    target,
)

import specjax
from specjax.config.engine import EngineConfig

pytestmark = pytest.mark.full

# What a compiled step is made for, and how its rows sample.
FACTORS = {
    "drafter": ["none", "ngram", "demo"],
    "k": [0, 1, 3, 7],
    "max_rows": [1, 16],
    "burst_steps": [1, 16],
    "page_size": [8, 64],
    "sampling": [*SAMPLING],
}


def product(factors):
    """Returns every configuration; plain decoding has K = 0, and nothing else has."""
    every = [dict(zip(factors, values)) for values in itertools.product(*factors.values())]
    return [each for each in every if (each["drafter"] == "none") == (each["k"] == 0)]


def pairs(step):
    return set(itertools.combinations(step.items(), 2))


# Few of them, such that every possible pair of values occurs in one.
COVERING = [
    dict(zip(FACTORS, values))
    for values in [
        ("none", 0, 1, 1, 8, "greedy"),
        ("none", 0, 16, 16, 64, "everything"),
        ("ngram", 1, 1, 16, 64, "greedy"),
        ("demo", 1, 16, 1, 8, "everything"),
        ("ngram", 3, 1, 16, 8, "everything"),
        ("demo", 3, 16, 1, 64, "greedy"),
        ("ngram", 7, 16, 1, 8, "greedy"),
        ("demo", 7, 1, 16, 64, "everything"),
    ]
]


def check(configuration):
    """Holds a configuration's tokens against plain decoding's; returns how many rows differ."""
    step, sampling = configuration, configuration["sampling"]
    print(step)  # a failure shows it
    sizes = {name: step[name] for name in ("max_rows", "burst_steps", "page_size")}
    actual = specjax.generate(
        target(),
        prompts(),
        drafter=None if step["drafter"] == "none" else step["drafter"],
        num_speculative_tokens=step["k"],
        sampling=SAMPLING[sampling],
        engine=EngineConfig(**sizes),
    )
    num_differing = hold_against(actual, plain(sampling))
    counts = actual.stats.acceptance
    if step["k"]:
        assert 0 < counts.num_accepted < counts.num_drafted
    else:
        assert counts.num_drafted == 0
    return num_differing


def test_the_covering_set_covers():
    possible = set().union(*map(pairs, product(FACTORS)))
    assert set().union(*map(pairs, COVERING)) == possible


@pytest.mark.parametrize(
    "chosen",
    [
        pytest.param(COVERING[4:6], id="some"),  # of the others tests have tiny models
        pytest.param(COVERING, id="covering", marks=pytest.mark.slow),
        pytest.param(product(FACTORS), id="all", marks=pytest.mark.slow),
    ],
)
def test_same_tokens_in_every_configuration(chosen, say):
    num_ties, num_rows = sum(map(check, chosen)), NUM_PROMPTS * len(chosen)
    say(f"{num_ties} of {num_rows} rows differ at a near-tie")
    assert num_ties <= MOST_TIES * num_rows


@pytest.mark.slow
def test_rules_that_sample_the_same_tokens():
    for rule in ("seeded", "delta"):
        out = specjax.generate(
            target(),
            prompts()[:8],
            drafter="demo",
            verification=rule,
            sampling=EVERYTHING,
            num_speculative_tokens=3,
        )
        for ours, theirs in zip(out, plain("everything")):
            assert ours.token_ids == theirs.token_ids or is_tie(ours, theirs.token_ids)
