"""Drafters that raise, or draft nonsense: the text is plain decoding's, and one warning says so."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax.config.engine import EngineConfig
from specjax.config.sampling import SamplingParams
from specjax.decode import steps as steps_module
from specjax.drafters.base import Drafter, DrafterContext, DrafterSpec
from specjax.drafters.spec import NgramDrafter
from specjax.heads.loading import LoadedDrafter

ENGINE = EngineConfig(page_size=8, max_rows=2, burst_steps=4, max_context=64)
SAMPLING = SamplingParams(temperature=0.8, max_tokens=16, ignore_eos=True, seed=5)
PROMPTS = [[1, 2, 3, 1, 2, 3, 1], [5, 6, 5, 6, 5], [7] * 20]


@dataclasses.dataclass(frozen=True)
class Faulty(DrafterSpec):
    """An n-gram drafter that goes wrong in one way, from a position of the root on."""

    how: str
    since: int = 8

    def build(self, context: DrafterContext) -> Drafter:
        if self.how == "build":
            raise KeyError("no such model")
        right = NgramDrafter(1, 2).build(context)

        def fail(*arguments):
            raise TypeError(f"{self.how} is not written yet")

        def draft(params, state, decode_state, num_tokens):
            drafted = right.draft(params, state, decode_state, num_tokens)
            proposal, root = drafted.proposal, decode_state.cache.lengths
            is_wrong = (root >= self.since)[:, None]
            token_ids, figure = proposal.token_ids, None
            if self.how == "callback":
                shape = jax.ShapeDtypeStruct(root.shape, root.dtype)
                root = jax.pure_callback(self._call, shape, root)
                num_tokens = jnp.where(root < 0, 0, proposal.num_tokens)
                proposal = dataclasses.replace(proposal, num_tokens=num_tokens)
            elif self.how in ("negative", "too large"):
                token = -3 if self.how == "negative" else 61
                token_ids = jnp.where(is_wrong, token, token_ids)
            elif self.how == "confidence":
                figure = jnp.where(is_wrong, jnp.nan, 0.5)
                figure = jnp.broadcast_to(figure, token_ids.shape)
            proposal = dataclasses.replace(proposal, token_ids=token_ids, path_probability=figure)
            return drafted._replace(proposal=proposal)

        faulty = right._replace(draft=draft)
        if self.how in ("init", "prefill", "draft", "enter_rows"):
            faulty = faulty._replace(**{self.how: fail})
        return faulty

    def _call(self, roots):
        if np.any(roots >= self.since):
            raise ConnectionError("the draft server is gone")
        return np.asarray(roots)


def generate(target, drafter=None, prompts=PROMPTS, sampling=SAMPLING, **arguments):
    arguments = {"engine": ENGINE, "num_speculative_tokens": 3} | arguments
    return specjax.generate(target, prompts, drafter=drafter, sampling=sampling, **arguments)


def ids(generation):
    assert {completion.finish_reason for completion in generation} == {"length"}
    return [completion.token_ids for completion in generation]


@pytest.fixture(scope="module")
def plain(target):
    return ids(generate(target))


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("draft", r"its draft raised TypeError\('draft is not"),
        *(
            pytest.param(*one, marks=pytest.mark.full)
            for one in [
                ("build", r"its build raised KeyError\('no such model'\)"),
                ("init", r"its init raised TypeError\('init is not written yet'\)"),
                ("prefill", r"its prefill raised TypeError\('prefill is not"),
                ("enter_rows", r"its enter_rows raised TypeError\('enter_rows is not"),
                ("negative", "it proposed token ids outside the vocabulary"),
                ("callback", r"a step failed on the device .*"),
                ("confidence", "it proposed NaN"),
            ]
        ),
        pytest.param(
            *("too large", "it proposed token ids outside the vocabulary"), marks=pytest.mark.slow
        ),
    ],
)
def test_a_faulty_drafter_is_off_and_the_text_is_plain(target, plain, how, message):
    # An error of the device takes along what was not read, here all of the first burst.
    since = 16 if how == "callback" else 8
    drafter = LoadedDrafter("dicey", Faulty(how, since))
    with pytest.warns(UserWarning, match=f"drafter 'dicey' is .*{message}") as caught:
        out = generate(target, drafter)
    assert len(caught) == 1
    assert ids(out) == plain
    if how in ("negative", "too large", "confidence", "callback"):
        # Until then it drafted, and nothing after it.
        assert out.stats.acceptance.num_drafted > 0


@pytest.mark.full
@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param({}, id="chain", marks=pytest.mark.slow),  # the next test has it
        pytest.param({"verification": "rejection"}, id="by law"),
        *(
            pytest.param({"speculative_config": config}, id=name, marks=pytest.mark.slow)
            for name, config in [
                ("tree", {"speculative_token_tree": (2, 1)}),
                ("grown", {"tree_top_k": 2}),
                ("ranked", {"max_drafts_per_step": 3}),
            ]
        ),
    ],
)
def test_a_draft_model_whose_weights_are_nan(target, draft, plain, arguments):
    broken = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), draft.params)
    broken = dataclasses.replace(draft, params=broken)
    if "speculative_config" in arguments:
        arguments = {"num_speculative_tokens": 2, **arguments}
    with pytest.warns(UserWarning, match="'draft' is turned off .* NaN") as caught:
        out = generate(target, broken, prompts=PROMPTS[:1], **arguments)
    assert len(caught) == 1
    assert out.stats.acceptance.num_drafted == 0
    if "verification" not in arguments:
        assert ids(out) == plain[:1]
    assert len(out[0].token_ids) == 16


@pytest.mark.full
def test_the_next_call_has_the_drafter_again(target, draft, plain):
    broken = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), draft.params)
    with pytest.warns(UserWarning, match="is turned off"):
        generate(target, dataclasses.replace(draft, params=broken))
    out = generate(target, draft)
    assert out.stats.acceptance.num_accepted > 0
    assert ids(out) == plain


@pytest.mark.full
def test_an_engine_goes_on_without_its_drafter(target, plain):
    drafter = LoadedDrafter("dicey", Faulty("callback"))
    with specjax.Engine(target, drafter=drafter, num_speculative_tokens=3, engine=ENGINE) as engine:
        first = [engine.add(prompt, SAMPLING) for prompt in PROMPTS[:2]]
        texts = {}

        def drain():
            while engine.has_work:
                for chunk in engine.step():
                    texts.setdefault(chunk.prompt_index, []).extend(chunk.token_ids)

        with pytest.warns(UserWarning, match="'dicey' is turned off for this run"):
            drain()
        later = engine.add(PROMPTS[2], SAMPLING)
        drain()
    assert [texts[request] for request in (*first, later)] == plain


@pytest.mark.full
@pytest.mark.parametrize("stage", ["lower", "compile"])
def test_a_burst_that_does_not_fit_is_dropped(target, plain, stage, monkeypatch):
    """K = 3, and K = 0 in the bucket of one row: memory runs out."""
    # One of its own, of which nothing is compiled yet.
    page_size = {"lower": 16, "compile": 32}[stage]
    engine = dataclasses.replace(ENGINE, row_buckets=(1,), page_size=page_size)
    right, too_large = steps_module.burst, []
    out_of_memory = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")

    def burst(spec, max_steps, params, state, plan, **arguments):
        del too_large[:]
        bucket = None if plan.row_ids is None else plan.row_ids.shape[0]
        if (spec.num_speculative_tokens, bucket) in ((3, None), (3, 1), (0, 1)):
            if stage == "lower":
                raise out_of_memory
            too_large.append(bucket)
        return right(spec, max_steps, params, state, plan, **arguments)

    compile_it = jax.stages.Lowered.compile

    def compile_if_it_fits(lowered, *arguments, **options):
        if too_large:
            too_large.clear()
            raise out_of_memory
        return compile_it(lowered, *arguments, **options)

    monkeypatch.setattr(steps_module, "burst", burst)
    monkeypatch.setattr(jax.stages.Lowered, "compile", compile_if_it_fits)
    fixed = {"policy": "fixed"}
    with pytest.warns(UserWarning, match="RESOURCE_EXHAUSTED") as caught:
        out = generate(target, "ngram", engine=engine, speculative_config=fixed)
    assert ids(out) == plain
    assert out.stats.acceptance.num_drafted == 0
    assert "dropped" in {decision.reason for decision in out.stats.decisions}
    said = sorted(str(warning.message).split(" is dropped")[0] for warning in caught)
    assert said == [f"a burst of {rows} rows at K = {k}" for rows, k in ((1, 0), (1, 3), (2, 3))]


@pytest.mark.full
def test_matches_are_found_where_nothing_is_wrong(target, plain):
    """The drafter of these tests drafts, and well enough to be believed."""
    out = generate(target, LoadedDrafter("fine", Faulty("not at all")))
    assert ids(out) == plain
    assert out.stats.acceptance.num_drafted > 0
