"""A step as wide as its drafts: the same tokens, whatever width each step takes."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import tiny_llama

import specjax
from specjax import SamplingParams
from specjax.decode import verify
from specjax.decode.verify import Width, narrowest, widths

ENGINE = specjax.EngineConfig(
    max_rows=3, row_buckets=(), max_context=64, burst_steps=8, page_size=8, max_logprobs=2
)
PROMPTS = [[5, 6, 7, 5, 6], [9, 8, 9, 8, 9, 8, 9], [1, 2, 3]]
# How many tokens are proposed at a position, by its remainder: every width comes, and widths of
# neighbouring steps differ.
COUNTS = (0, 3, 0, 1, 2, 0, 0)


@dataclasses.dataclass(frozen=True)
class Knowing(specjax.DrafterSpec):
    """Proposes what it was told comes next, with a wrong token at some positions; often nothing."""

    texts: tuple[tuple[int, ...], ...]  # prompt and output of each row
    lone_row: bool = False  # whether only the first row gets drafts

    def build(self, context):
        depth = context.num_speculative_tokens
        width = max(map(len, self.texts)) + depth + 1
        known = jnp.array([[*text, *[0] * (width - len(text))] for text in self.texts])
        first = jnp.array([text[0] for text in self.texts])

        def draft(params, state, decode_state, num_tokens):
            root = decode_state.cache.lengths
            # Rows are told apart by their first tokens: rows of the engine change hands.
            own = jnp.argmax(decode_state.history[:, :1] == first[None, :], axis=1)
            place = root[:, None] + 1 + jnp.arange(depth)[None, :]
            tokens = known[own[:, None], jnp.minimum(place, width - 1)]
            tokens = jnp.where(place % 5 == 4, (tokens + 1) % context.target.vocab_size, tokens)
            count = jnp.array(COUNTS)[root % len(COUNTS)]
            if self.lone_row:
                count = jnp.where(own == 0, count, 0)
            count = jnp.minimum(count, num_tokens)
            return specjax.Draft(specjax.Proposal(token_ids=tokens, num_tokens=count), state)

        return specjax.Drafter(draft)


@dataclasses.dataclass(frozen=True)
class Wide(Knowing):
    """The same at one width."""

    abstains = False


SAMPLING = {
    "greedy": SamplingParams(temperature=0, max_tokens=24, logprobs=2),
    "penalties": SamplingParams(
        temperature=0.9, seed=4, max_tokens=24, presence_penalty=0.4, repetition_penalty=1.2, n=1
    ),
}


def generate(drafter=None, sampling="greedy", engine=ENGINE, **options):
    config = {"policy": "fixed", "num_speculative_tokens": 3} if drafter else None
    return specjax.generate(
        tiny_llama(0),
        PROMPTS,
        drafter=drafter,
        sampling=SAMPLING[sampling],
        speculative_config=config,
        engine=engine,
        **options,
    )


@pytest.fixture(scope="module")
def plain():
    return {name: generate(sampling=name) for name in SAMPLING}


def texts(generation):
    return tuple((*PROMPTS[each.prompt_index], *each.token_ids) for each in generation)


CASES = [
    ("greedy", False, "seeded"),
    ("penalties", True, "seeded"),
    ("penalties", False, "rejection"),
    ("greedy", True, "rejection"),
]


@pytest.mark.full  # it compiles seven steps
@pytest.mark.parametrize("case", CASES)
def test_widths_change_no_token(plain, case, monkeypatch):
    sampling, lone_row, rule = case
    ran, forward = [], verify.forward

    def counted(params, config, pages, batch, **options):
        jax.debug.callback(functools.partial(ran.append, len(batch.token_ids)))
        return forward(params, config, pages, batch, **options)

    monkeypatch.setattr(verify, "forward", counted)
    known = Knowing(texts(plain[sampling]), lone_row)
    drafted = generate(known, sampling, verification=rule)
    # Each step ran at one width, and every width came.
    assert len(ran) == sum(burst.num_steps for burst in drafted.stats.decisions)
    assert set(ran) == ({3, 6} if lone_row else {3, 6, 12})
    wide = generate(Wide(*dataclasses.astuple(known)), sampling, verification=rule)
    for one, other in ((drafted, wide), *[(drafted, plain[sampling])] * (rule == "seeded")):
        assert texts(one) == texts(other)
    assert drafted.stats.acceptance == wide.stats.acceptance
    assert drafted.stats.acceptance.num_accepted > 4
    assert drafted.stats.acceptance.num_drafted > drafted.stats.acceptance.num_accepted
    for one, other in zip(drafted, wide):
        for mine, theirs in zip(one.logprobs or (), other.logprobs or (), strict=True):
            np.testing.assert_allclose(mine.raw, theirs.raw, atol=1e-5)


@pytest.mark.full  # it compiles four steps each
@pytest.mark.parametrize("shape", [(2, 1), (2, 2)])
def test_shards_take_the_width_that_one_of_them_needs(plain, shape):
    """Two data shards of two rows, of which one holds the row with drafts."""
    known = Knowing(texts(plain["greedy"]), lone_row=True)
    mesh = jax.make_mesh(shape, ("data", "tensor"), devices=jax.devices()[: shape[0] * shape[1]])
    engine = dataclasses.replace(ENGINE, max_rows=4)
    drafted = generate(known, engine=engine, mesh=mesh)
    assert texts(drafted) == texts(plain["greedy"])
    assert drafted.stats.acceptance.num_accepted > 4


@pytest.mark.full  # it compiles four steps
def test_trees_of_matches_in_steps_of_any_width():
    """Logits in parts of five tokens, which are no whole number of rows."""
    options = {"policy": "fixed", "num_speculative_tokens": 3, "prompt_lookup_matches": 3}
    said = [
        specjax.generate(
            tiny_llama(0),
            PROMPTS,
            drafter=drafter,
            speculative_config=options if drafter else None,
            sampling={"temperature": 0, "max_tokens": 24},
            engine=dataclasses.replace(ENGINE, logit_bytes=parts),
        )
        for drafter, parts in ((None, 10**9), ("ngram", 10**9), ("ngram", 5 * 4 * 64))
    ]
    assert texts(said[0]) == texts(said[1]) == texts(said[2])
    assert said[1].stats.acceptance.num_accepted > 2


def test_which_widths_there_are():
    of = lambda rows, num_tokens, per_row: widths(rows, Width(num_tokens, per_row))
    assert of(1, 8, 8) == [Width(1, 1), Width(8, 8)]
    assert of(8, 64, 8) == [Width(8, 1), Width(32, 8), Width(64, 8)]
    assert of(8, 40, 8) == [Width(8, 1), Width(20, 8), Width(40, 8)]
    assert of(8, 16, 2) == [Width(8, 1), Width(16, 2)]


def test_the_narrowest_width_that_holds_the_drafts():
    every = Width(6, 1), Width(13, 4), Width(24, 4)
    rng, seen = np.random.default_rng(0), set()
    for _ in range(200):
        counts = rng.integers(0, rng.integers(2, 6), 6)
        fits = [sum(counts) <= width.num_tokens and max(counts) <= width.per_row for width in every]
        place = int(narrowest(every, jnp.array([0, *np.cumsum(counts)])))
        assert place == fits.index(True)
        seen.add((place, int(sum(counts))))
    # One more than a width holds takes the next; so does a row with a draft among rows that wait.
    assert {(1, 13), (2, 14), (0, 5), (1, 5)} <= seen
