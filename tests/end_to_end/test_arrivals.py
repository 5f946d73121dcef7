"""Rows draft in the steps that feed other rows' prompts; texts are those of plain decoding."""

import dataclasses
import itertools

import jax.numpy as jnp
import pytest
from asked_for import quick
from helpers import assert_engine_is_empty, first_layer, scripted_drafter, tiny_llama

import specjax
from specjax.config.engine import EngineConfig
from specjax.config.sampling import SamplingParams
from specjax.decode.bucket import Bucket
from specjax.decode.sizes import PromptShape
from specjax.drafters.spec import NgramDrafter
from specjax.policy.interface import Decision, Fixed

K = 3
ENGINE = EngineConfig(
    page_size=4,
    max_rows=4,
    burst_steps=4,
    max_context=64,
    max_prefill_tokens=4,  # prompts take several steps
    row_buckets=(2,),
    prefix_caching=False,
)
SEEDED = SamplingParams(temperature=0.7, max_tokens=14, ignore_eos=True, seed=3)
GREEDY = dataclasses.replace(SEEDED, temperature=0.0, max_tokens=22)  # repeats itself
# The first two decode while the others arrive: prompts of one token, of a chunk, of several.
PROMPTS = [[7, 8] * 5, [1, 2, 3] * 4, [5], [*range(20, 25)], [*range(3, 16)], [9, 9, 2] * 7]
SAMPLING = [GREEDY, SEEDED, GREEDY, SEEDED, GREEDY, SEEDED]


@pytest.fixture(scope="module")
def target():
    return tiny_llama(0)


@pytest.fixture(scope="module")
def plain(target):
    """Returns the text of each request alone, decoded plainly."""
    texts = []
    for prompt, sampling in zip(PROMPTS, SAMPLING, strict=True):
        out = specjax.generate(target, prompt, sampling=sampling, engine=ENGINE)
        texts.append(out[0].token_ids)
    return texts


def run(engine, every, *, sampling=SAMPLING):
    """Adds two requests, and another after each `every` steps; returns their token ids."""
    texts, errors = {}, {}
    waiting = list(zip(PROMPTS, sampling, strict=True))
    add = lambda: texts.setdefault(engine.add(*waiting.pop(0)), [])
    add(), add()
    for number in itertools.count():
        if waiting and ((number and number % every == 0) or not engine.has_work):
            add()
        if not engine.has_work:
            break
        for chunk in engine.step():
            texts[chunk.prompt_index] += chunk.token_ids
            errors[chunk.prompt_index] = chunk.error
    assert_engine_is_empty(engine)
    return [texts[each] for each in sorted(texts)], [errors[each] for each in sorted(texts)]


def mixed_of(engine):
    return [record for record in engine._loop.records if record.prompt_tokens]


DRAFTERS = {
    "scripted": (None, {}),
    "chain": (NgramDrafter(1, 3), {}),
    "tree": (NgramDrafter(1, 3, num_matches=3), {}),
    "model": ("first layer", {}),
    "all rows": (NgramDrafter(1, 3), {"row_buckets": ()}),
    "int8": (NgramDrafter(1, 3), {"kv_cache_dtype": "int8"}),
    "separate": (NgramDrafter(1, 3), {"mixed_prefill": False}),
    "invariant": (NgramDrafter(1, 3), {"numerics": "invariant"}),
}


@pytest.mark.parametrize("name", quick(DRAFTERS, slow=["tree", "model", "int8"]))
def test_prompts_that_arrive_at_any_phase_change_no_text(target, plain, name):
    drafter, settings = DRAFTERS[name]
    if drafter == "first layer":
        drafter = first_layer(target)
    if drafter is None:
        every_text = [p + text for p, text in zip(PROMPTS, plain, strict=True)]
        drafter = scripted_drafter(every_text, num_right=(3, 2, 0, 3), vocab_size=61)
    engine = dataclasses.replace(ENGINE, **settings)
    texts = plain
    if "kv_cache_dtype" in settings:  # another cache, another text
        with specjax.Engine(target, engine=engine) as undrafted:
            texts, _ = run(undrafted, 3)
    with specjax.Engine(
        target, drafter=drafter, num_speculative_tokens=K, engine=engine, policy=Fixed(K)
    ) as running:
        for every in (1, 2, 3, 5):
            found, errors = run(running, every)
            assert found == texts, every
            assert set(errors) == {None}
        mixed = mixed_of(running)
        if name in ("separate", "invariant"):
            assert not mixed
            return
        assert {record.num_speculative_tokens for record in mixed} == {K}
        if name == "scripted":  # more than one token for each row: drafts were accepted
            assert any(r.measured_tokens > r.num_rows for r in mixed)
        buckets = {record.row_bucket for record in mixed}
        assert buckets == ({4} if name == "all rows" else {2, 4})
        decoder = running._loop.decoder
        traced = {key: n for key, n in decoder.traces.items() if key.kind == "mixed"}
        # One executable per row bucket and token bucket of prompts, traced once.
        assert {key.bucket for key in traced} <= {Bucket(4, K), Bucket(2, K)}
        assert {key.prompts for key in traced} <= {PromptShape(4, 4)}
        assert set(traced.values()) == {1}


class InTurn:
    """A K for every burst and mixed step, one after the other."""

    max_speculative_tokens = K
    chooses_rows = False

    def __init__(self, *depths):
        self._depths = itertools.cycle(depths)

    def choose(self, load):
        depth = load.limit(next(self._depths))
        return Decision(num_speculative_tokens=depth, reason="in turn")

    def observe(self, outcome):
        if outcome.prompt_tokens:
            assert outcome.seconds is None
            assert outcome.mixed_s is None or outcome.mixed_s > 0


@pytest.mark.parametrize("drafter", quick(["chain", "model"], slow=["chain"]))
def test_a_drafter_catches_up_beside_prompts(target, plain, drafter):
    """After steps at K = 0, with prompts and without, it has tokens to catch up with."""
    source = first_layer(target) if drafter == "model" else NgramDrafter(1, 3)
    with specjax.Engine(
        target,
        drafter=source,
        num_speculative_tokens=K,
        engine=ENGINE,
        policy=InTurn(0, K, 0, 0),
    ) as running:
        for every in (1, 3):
            assert run(running, every)[0] == plain
        assert {r.num_speculative_tokens for r in mixed_of(running)} == {0, K}


@pytest.mark.full
def test_a_row_of_nan_and_limits_of_single_requests_beside_prompts(target, plain):
    """Per-request K holds in mixed steps; a row whose logits are NaN ends alone."""
    others = [*PROMPTS[:4], PROMPTS[5], *plain[:4], plain[5]]
    poison = next(each for each in PROMPTS[4] if all(each not in text for text in others))
    table = target.params["embed_tokens"].at[poison].set(jnp.nan)
    poisoned = dataclasses.replace(target, params={**target.params, "embed_tokens": table})
    sampling = [*SAMPLING]
    sampling[0] = dataclasses.replace(GREEDY, speculate=False)
    sampling[3] = dataclasses.replace(SEEDED, num_speculative_tokens=1)
    with specjax.Engine(
        poisoned,
        drafter=NgramDrafter(1, 3),
        num_speculative_tokens=K,
        engine=ENGINE,
        policy=Fixed(K),
    ) as running:
        for every in (1, 2):
            found, errors = run(running, every, sampling=sampling)
            assert found.pop(4) == []
            assert "NaN" in errors.pop(4)
            assert set(errors) == {None}
            assert found == [*plain[:4], plain[5]]
        assert mixed_of(running)
