"""The same tokens with and without speculation, whatever the drafter, K, batch, burst and pages."""

import dataclasses
import itertools
import sysconfig
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from helpers import AlternatingDrafter, race_scores

import specjax
from specjax.config import EngineConfig, SamplingParams, SpeculationConfig
from specjax.drafters.loading import LoadedDrafter
from specjax.models.architectures import architecture_of
from specjax.models.layers import dense_causal_attention
from specjax.requests import derive_seed
from specjax.sampling import RowSampling, process_logits, row_values
from specjax.seeded_noise import TARGET_TOKEN, token_keys
from specjax.trees import static_shapes

# A row may differ from where rounding decides: two best scores this close, or a
# token this close to a filter's threshold. Matmuls of different shapes round differently.
SCORE_TIE, THRESHOLD_TIE = 1e-4, 1e-5
MOST_TIES = 1e-3  # of all rows

NUM_PROMPTS = 50
MAX_TOKENS = 24

FACTORS = {
    "drafting": [("none", 0)]
    + [(kind, k) for kind in ("ngram", "demo") for k in (1, 3, 7)],
    "max_rows": [1, 16],
    "burst_steps": [1, 16],
    "page_size": [8, 64],
    "sampling": ["greedy", "everything"],
}
EVERYTHING = SamplingParams(
    temperature=0.8,
    top_p=0.95,
    repetition_penalty=1.05,
    presence_penalty=0.2,
    frequency_penalty=0.1,
    logit_bias={10: 1.5, 200: -2.0},
    max_tokens=MAX_TOKENS,
    seed=7,
)
SAMPLING = {
    "greedy": SamplingParams(temperature=0, max_tokens=MAX_TOKENS),
    "everything": EVERYTHING,
}


def covering_set(factors):
    """Returns configurations such that every pair of values of two factors occurs in one."""
    names = list(factors)
    everything = [
        dict(zip(names, values)) for values in itertools.product(*factors.values())
    ]
    pairs = lambda chosen: {
        (a, chosen[a], b, chosen[b]) for a, b in itertools.combinations(names, 2)
    }
    missing = set().union(*map(pairs, everything))
    chosen = []
    while missing:
        best = max(everything, key=lambda candidate: len(pairs(candidate) & missing))
        chosen.append(best)
        missing -= pairs(best)
    return chosen


COVERING = covering_set(FACTORS)
ALL = [dict(zip(FACTORS, values)) for values in itertools.product(*FACTORS.values())]


def name_of(configuration):
    kind, k = configuration["drafting"]
    rest = [
        f"{key}={value}" for key, value in configuration.items() if key != "drafting"
    ]
    return "-".join([f"{kind}{k}", *rest])


@pytest.fixture(scope="module")
def target():
    return specjax.load_model("demo")


@pytest.fixture(scope="module")
def prompts(target):
    """Token ids from the standard library's source, of 5 to 60 tokens."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    files = ["argparse.py", "heapq.py", "json/decoder.py", "random.py", "textwrap.py"]
    cut = []
    for index in range(NUM_PROMPTS):
        ids = target.tokenizer.encode((folder / files[index % 5]).read_text())
        start = 97 * index % (len(ids) - 60)
        cut.append(ids[start : start + 5 + (11 * index) % 56])
    return cut


@pytest.fixture(scope="module")
def plain(target, prompts):
    """Plain decoding's output per sampling: what every configuration is held against."""
    return {
        name: run(target, prompts, {"drafting": ("none", 0), "sampling": name})
        for name in SAMPLING
    }


@pytest.fixture(scope="module")
def num_ties():
    """Rows that differ at a near-tie, by configuration, as test_full_product finds them."""
    return {}


def run(target, prompts, configuration):
    kind, k = configuration["drafting"]
    sizes = {
        name: configuration[name]
        for name in ("max_rows", "burst_steps", "page_size")
        if name in configuration
    }
    return specjax.generate(
        target,
        prompts,
        drafter=None if kind == "none" else kind,
        num_speculative_tokens=k,
        sampling=SAMPLING[configuration["sampling"]],
        engine=EngineConfig(**sizes),
    )


def is_tie(target, completion, expected_ids):
    """Whether rounding decides the first token in which a completion differs."""
    differs = next(
        i
        for i, (a, b) in enumerate(
            itertools.zip_longest(completion.token_ids, expected_ids)
        )
        if a != b
    )
    params = SAMPLING["everything" if completion_is_sampled(completion) else "greedy"]
    prompt = completion.prompt_token_ids
    text = [*prompt, *expected_ids[:differs]]
    config = target.config
    architecture = architecture_of(config)

    def attend(layer, q, k, v, cache):
        return dense_causal_attention(q, k, v, scale=config.scale), cache

    ids = jnp.asarray(text)[None]
    hidden, _ = architecture.forward(
        target.params,
        config,
        ids,
        jnp.arange(len(text))[None],
        attend,
        (None,) * config.num_layers,
    )
    logits = architecture.logits(target.params, config, hidden[0, -1:])
    scores = []
    for nudge in (-THRESHOLD_TIE, 0.0, THRESHOLD_TIE):
        nudged = dataclasses.replace(params, top_p=min(params.top_p + nudge, 1.0))
        values = row_values(
            nudged,
            prompt_length=len(prompt),
            eos_token_ids=config.eos_token_ids,
            seed=derive_seed(completion.seed, completion.sample_index),
            engine_config=EngineConfig(),
        )
        row = RowSampling(
            **{name: jnp.asarray(value)[None] for name, value in values.items()}
        )
        place = jnp.array([len(text) - 1])
        processed = process_logits(
            logits, row, jnp.zeros(1, jnp.int32), place, jnp.asarray(text)[None]
        )
        if params.temperature > 0:
            keys = token_keys(row.seeds, place + 1, TARGET_TOKEN)
            processed = race_scores(processed, keys)
        scores.append(np.asarray(processed[0]))
    best = np.sort(scores[1])[-2:]
    choices = {int(np.argmax(score)) for score in scores}
    return best[1] - best[0] < SCORE_TIE or len(choices) > 1


def completion_is_sampled(completion):
    return completion.seed == EVERYTHING.seed


def check(target, prompts, plain, configuration):
    expected = plain[configuration["sampling"]]
    actual = run(target, prompts, configuration)
    num_differing = hold_against(target, actual, expected)
    counts = actual.stats.acceptance
    if configuration["drafting"][1]:
        assert 0 < counts.num_accepted < counts.num_drafted
    else:
        assert counts.num_drafted == 0
    return num_differing


def assert_few_ties(num_ties, num_configurations, say):
    rows = NUM_PROMPTS * num_configurations
    say(f"{num_ties} of {rows} rows differ at a near-tie")
    assert num_ties <= MOST_TIES * rows


def test_covering_set_of_configurations(target, prompts, plain, say):
    assert len(COVERING) >= 14
    ties = [check(target, prompts, plain, configuration) for configuration in COVERING]
    assert_few_ties(sum(ties), len(COVERING), say)


@pytest.mark.slow
@pytest.mark.parametrize("configuration", ALL, ids=name_of)
def test_full_product(target, prompts, plain, num_ties, configuration):
    num_ties[name_of(configuration)] = check(target, prompts, plain, configuration)


@pytest.mark.slow
def test_ties_of_the_full_product(num_ties, say):
    if len(num_ties) < len(ALL):
        pytest.skip(f"{len(num_ties)} of {len(ALL)} configurations ran, and passed")
    assert_few_ties(sum(num_ties.values()), len(ALL), say)


class RandomDepth:
    """Another K for every burst, plain decoding among them."""

    max_speculative_tokens = 3

    def __init__(self, seed):
        self._rng = np.random.default_rng(seed)
        self.chosen = set()

    def choose(self, load):
        depth = int(self._rng.integers(4))
        self.chosen.add(depth)
        return depth

    def observe(self, *what):
        pass


TREES = {
    "full": dict(model="demo", speculative_token_tree=(3, 2, 1)),
    "uneven": dict(
        model="demo",
        speculative_token_tree="[(0,), (1,), (2,), (0, 0), (1, 0), (0, 0, 0)]",
    ),
    "matches": dict(method="ngram", prompt_lookup_matches=3, prompt_lookup_min=1),
}


def hold_against(target, actual, expected):
    """Asserts that completions differ at near-ties only; returns how many do."""
    differing = [
        (ours, theirs.token_ids)
        for ours, theirs in zip(actual, expected)
        if ours.token_ids != theirs.token_ids
    ]
    for ours, theirs in differing:
        assert is_tie(target, ours, theirs), (ours.prompt_index, ours.token_ids, theirs)
    return len(differing)


@pytest.mark.parametrize(
    "tree",
    ["full", *(pytest.param(t, marks=pytest.mark.slow) for t in TREES if t != "full")],
)
def test_trees_sample_the_same_tokens(target, prompts, plain, tree):
    out = specjax.generate(
        target,
        prompts,
        sampling=EVERYTHING,
        speculative_config=SpeculationConfig(**TREES[tree]),
    )
    assert hold_against(target, out, plain["everything"]) <= 1
    assert 0 < out.stats.acceptance.num_accepted < out.stats.acceptance.num_drafted


def test_depth_tree_and_drafter_change_from_step_to_step(target, prompts, plain):
    draft = specjax.load_model("demo-draft")
    shape = static_shapes.from_widths((3, 2, 1))
    policy = RandomDepth(0)
    out = specjax.generate(
        target,
        prompts,
        drafter=LoadedDrafter(
            "alternating", AlternatingDrafter(draft.config, shape), draft.params
        ),
        sampling=EVERYTHING,
        num_speculative_tokens=3,
        engine=EngineConfig(burst_steps=1),
        policy=policy,
    )
    assert policy.chosen == {0, 1, 2, 3}
    assert hold_against(target, out, plain["everything"]) <= 1
    assert 0 < out.stats.acceptance.num_accepted < out.stats.acceptance.num_drafted


def test_rules_that_sample_the_same_tokens(target, prompts, plain):
    for rule in ("seeded", "delta"):
        out = specjax.generate(
            target,
            prompts[:8],
            drafter="demo",
            verification=rule,
            sampling=EVERYTHING,
            num_speculative_tokens=3,
        )
        for ours, theirs in zip(out, plain["everything"]):
            assert ours.token_ids == theirs.token_ids or is_tie(
                target, ours, theirs.token_ids
            )


def test_samples_do_not_depend_on_the_batch(target, prompts):
    params = SamplingParams(temperature=1, max_tokens=12, seed=3, n=4)
    together = specjax.generate(target, prompts[:3], sampling=params)
    alone = specjax.generate(
        target, prompts[1], sampling=params, engine=EngineConfig(max_rows=1)
    )
    assert [c.token_ids for c in together[4:8]] == [c.token_ids for c in alone]
    assert len({tuple(c.token_ids) for c in alone}) > 1
