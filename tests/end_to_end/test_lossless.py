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
from specjax.config import EngineConfig, SamplingParams

# What a compiled step is made for; each runs under both ways of sampling.
FACTORS = {
    "drafter": ["none", "ngram", "demo"],
    "k": [0, 1, 3, 7],
    "max_rows": [1, 16],
    "burst_steps": [1, 16],
    "page_size": [8, 64],
}


def product(factors):
    """Returns every configuration; plain decoding has K = 0, and nothing else has."""
    every = [
        dict(zip(factors, values)) for values in itertools.product(*factors.values())
    ]
    return [each for each in every if (each["drafter"] == "none") == (each["k"] == 0)]


def covering_set(factors):
    """Returns configurations such that every possible pair of values occurs in one."""
    pairs = lambda each: set(itertools.combinations(each.items(), 2))
    missing = set().union(*map(pairs, product(factors)))
    chosen = []
    while missing:
        best = max(
            product(factors),
            # Of equals not one step of one row at a time, which takes the longest.
            key=lambda each: (
                len(pairs(each) & missing),
                each["max_rows"] * each["burst_steps"],
            ),
        )
        chosen.append(best)
        missing -= pairs(best)
    return chosen


def configurations(steps):
    """Returns them with each way of sampling, those that share compiled steps together."""
    return [(step, sampling) for step in steps for sampling in SAMPLING]


COVERING = configurations(covering_set(FACTORS))
ALL = configurations(product(FACTORS))


def name_of(configuration):
    step, sampling = configuration
    return "-".join([f"{key}={value}" for key, value in step.items()] + [sampling])


@pytest.fixture(scope="module")
def num_ties():
    """Rows that differ at a near-tie, by configuration, as test_full_product finds them."""
    return {}


def check(configuration):
    step, sampling = configuration
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


def assert_few_ties(num_ties, num_configurations, say):
    rows = NUM_PROMPTS * num_configurations
    say(f"{num_ties} of {rows} rows differ at a near-tie")
    assert num_ties <= MOST_TIES * rows


def test_covering_set_of_configurations(say):
    assert len(COVERING) >= 14
    assert_few_ties(sum(map(check, COVERING)), len(COVERING), say)


@pytest.mark.slow
@pytest.mark.parametrize("configuration", ALL, ids=name_of)
def test_full_product(num_ties, configuration):
    num_ties[name_of(configuration)] = check(configuration)


@pytest.mark.slow
def test_ties_of_the_full_product(num_ties, say):
    if len(num_ties) < len(ALL):
        pytest.skip(f"{len(num_ties)} of {len(ALL)} configurations ran, and passed")
    assert_few_ties(sum(num_ties.values()), len(ALL), say)


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


def test_samples_do_not_depend_on_the_batch():
    params = SamplingParams(temperature=1, max_tokens=12, seed=3, n=4)
    together = specjax.generate(target(), prompts()[:3], sampling=params)
    alone = specjax.generate(
        target(), prompts()[1], sampling=params, engine=EngineConfig(max_rows=1)
    )
    assert [c.token_ids for c in together[4:8]] == [c.token_ids for c in alone]
    assert len({tuple(c.token_ids) for c in alone}) > 1
