"""Verification in chunks, a budget of drafts per step, and the check of draws against their law."""

import dataclasses
import re

import numpy as np
import pytest
from helpers import ENGINE

import specjax
from specjax.api.generation import Stream
from specjax.config.sampling import SamplingParams
from specjax.config.speculation import SpeculationConfig

pytestmark = pytest.mark.full

VOCAB = 61
SAMPLED = SamplingParams(
    temperature=1,
    top_p=0.95,
    presence_penalty=0.3,
    max_tokens=20,
    logprobs=2,
    seed=5,
    self_check=True,
)


@pytest.fixture(scope="module")
def prompts():
    rng = np.random.default_rng(0)
    return [rng.integers(0, VOCAB, size).tolist() for size in (1, 9, 30, 7, 16, 3)]


@pytest.fixture(scope="module")
def whole(target, draft, prompts):
    """Returns runs of a rule with all logits at once, each made once."""
    made = {}

    def run(rule):
        if rule not in made:
            made[rule] = specjax.generate(
                target,
                prompts,
                drafter=draft,
                num_speculative_tokens=3,
                sampling=SAMPLED,
                verification=rule,
                engine=ENGINE,
            )
        return made[rule]

    return run


def logits_in(stream):
    """Returns the leading sizes of all float32 arrays of a vocabulary in the compiled burst."""
    text = stream._loop.decoder.compiled_burst(3).as_text()
    shapes = re.findall(rf"f32\[([\d,]+),{VOCAB}\]", text)
    return {int(np.prod([int(n) for n in shape.split(",")])) for shape in shapes}


@pytest.mark.parametrize(
    ("rule", "num_at_once"),
    [
        ("seeded", 3),
        # Two rows of four nodes; a row at least, however little is allowed.
        pytest.param("rejection", 8, marks=pytest.mark.slow),
        pytest.param("rejection", 1, marks=pytest.mark.slow),
    ],
)
def test_chunks_and_the_whole_agree(target, draft, prompts, whole, rule, num_at_once):
    engine = dataclasses.replace(ENGINE, logit_bytes=4 * VOCAB * num_at_once)
    stream = Stream(
        target,
        prompts,
        drafter=draft,
        num_speculative_tokens=3,
        sampling=SAMPLED,
        verification=rule,
        engine=engine,
    )
    for ours, theirs in zip(stream.result(), whole(rule)):
        assert ours.token_ids == theirs.token_ids
        for one, other in zip(ours.logprobs, theirs.logprobs, strict=True):
            np.testing.assert_allclose(one.raw, other.raw, atol=1e-5)
            np.testing.assert_allclose(one.processed, other.processed, atol=1e-5)
    if rule == "seeded":
        # The draft model's own logits are of one token per row.
        assert max(logits_in(stream)) <= max(num_at_once, ENGINE.max_rows)


@pytest.mark.parametrize("rule", ["seeded", pytest.param("rejection", marks=pytest.mark.slow)])
def test_few_drafts_per_step(target, draft, prompts, whole, rule):
    stream = Stream(
        target,
        prompts,
        drafter=draft,
        sampling=SAMPLED,
        verification=rule,
        engine=ENGINE,
        speculative_config=SpeculationConfig(num_speculative_tokens=3, max_drafts_per_step=4),
    )
    out = stream.result()
    counts, every = out.stats.acceptance, whole(rule).stats.acceptance
    if rule == "seeded":
        assert [c.token_ids for c in out] == [c.token_ids for c in whole(rule)]
        # What is verified was chosen, and is right more often than what is not.
        assert counts.acceptance_rate > every.acceptance_rate
        # Four rows and four drafts: eight tokens a step and not sixteen.
        assert max(logits_in(stream)) <= 8
    assert 0 < counts.num_accepted < counts.num_drafted
    assert counts.num_drafted / counts.num_steps < 0.6 * every.num_drafted / every.num_steps


@pytest.fixture
def by_law_with_a_budget(draft):
    """Arguments of `generate` and `Engine`."""
    return {
        "drafter": draft,
        "verification": "rejection",
        "engine": ENGINE,
        "speculative_config": SpeculationConfig(num_speculative_tokens=3, max_drafts_per_step=4),
    }


@pytest.mark.slow
def test_rows_by_law_of_one_seed_share_no_noise_under_a_budget(
    target, prompts, by_law_with_a_budget
):
    """Or what one row verifies would follow from the noise that drew another's tokens."""
    same = [prompts[1]] * 4
    out = specjax.generate(target, same, sampling=SAMPLED, **by_law_with_a_budget)
    texts = [tuple(c.token_ids) for c in out]
    assert len(set(texts)) == 4
    with specjax.Engine(target, **by_law_with_a_budget) as engine:
        streams = [engine.stream(prompt, SAMPLED) for prompt in same]
        chunks = [list(each) for each in streams]
    # A row's text depends on its neighbours, so these need not be the ones above.
    assert len({tuple(t for c in each for t in c.token_ids) for each in chunks}) == 4


def test_an_engine_gives_requests_of_one_seed_the_noise_that_generate_gives_them(
    target, prompts, by_law_with_a_budget
):
    at_once = Stream(target, prompts[:3], sampling=SAMPLED, **by_law_with_a_budget)._requests
    with specjax.Engine(target, **by_law_with_a_budget) as engine:
        for prompt in prompts[:3]:
            engine.add(prompt, SAMPLED)
        one_by_one = list(engine._new)
    noise_of = lambda made: [tuple(r.sampling_values["seeds"].tolist()) for r in made]
    assert noise_of(one_by_one) == noise_of(at_once)
    assert len(set(noise_of(at_once))) == 3
    assert {request.seed for request in one_by_one} == {SAMPLED.seed}


def test_noise_follows_from_the_seed_alone_where_rows_do_not_depend_on_each_other(
    target, prompts, by_law_with_a_budget
):
    arguments = by_law_with_a_budget | {"verification": "seeded"}
    with specjax.Engine(target, **arguments) as engine:
        for prompt in prompts[:2]:
            engine.add(prompt, SAMPLED)
        first, second = (request.sampling_values["seeds"] for request in engine._new)
    assert first.tolist() == second.tolist()


def test_exact_draws_pass_the_self_check_and_lossy_ones_do_not(target, draft, prompts, whole):
    out = whole("seeded")
    for completion in out:
        check = completion.self_check
        assert check.num_tokens == len(completion.token_ids)
        assert check.variance > 0
        assert check.z_score == pytest.approx(check.surplus / check.variance**0.5)
    overall = out.stats.self_check
    assert overall.num_tokens == sum(len(c.token_ids) for c in out)
    assert abs(overall.z_score) < 4
    lossy = specjax.generate(
        target,
        prompts * 4,
        drafter=draft,
        sampling=[dataclasses.replace(SAMPLED, seed=i) for i in range(24)],
        speculative_config=SpeculationConfig(
            num_speculative_tokens=3, verification="lenient", lenience=0.05
        ),
        engine=ENGINE,
    )
    # The draft model's words, unlikely for the target.
    assert lossy.stats.self_check.z_score < -4
    assert "self_check" in lossy.stats.to_dict()


def test_who_does_not_ask_or_draws_nothing_has_no_score(target, prompts):
    asks = SamplingParams(temperature=0, max_tokens=4, self_check=True)
    silent = SamplingParams(temperature=1, max_tokens=4, seed=1)
    out = specjax.generate(target, prompts[:2], sampling=[asks, silent], engine=ENGINE)
    assert out[0].self_check.z_score is None
    assert out[1].self_check is None
    assert out.stats.self_check.num_tokens == 4
