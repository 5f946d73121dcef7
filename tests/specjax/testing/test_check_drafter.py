"""Every drafter through the check for drafters, and drafters with a mistake that it must see."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from asked_for import quick
from helpers import AlternatingDrafter, MarginalsDrafter, tiny_llama
from tap_keeper import TapKeeper

import specjax
from specjax.decode import burst
from specjax.drafters.base import (
    ROWS,
    Draft,
    Drafter,
    DrafterContext,
    DrafterSpec,
    by_page,
    move_nothing,
)
from specjax.drafters.spec import (
    HistoryDrafter,
    HybridDrafter,
    ModelDrafter,
    NgramDrafter,
    NoDrafter,
)
from specjax.heads.loading import LoadedDrafter
from specjax.testing import check_drafter
from specjax.trees.expanding import Growth
from specjax.trees.static_shapes import from_widths
from specjax.types import Proposal

TARGET = tiny_llama(0, vocab_size=31, num_layers=1, hidden_size=16, intermediate_size=16)
# Of another seed: laws differ from the target's.
DRAFT = tiny_llama(1, vocab_size=31, num_layers=1, hidden_size=16, intermediate_size=16)
K = 2
TREE = from_widths((2, 1))
CHAIN = ModelDrafter(DRAFT.config)
DOCS = Path(__file__).parents[3] / "docs" / "your-own-drafter.md"

SPECS = {
    "none": NoDrafter(),
    "ngram": NgramDrafter(1, 3),
    "ngram tree": NgramDrafter(1, 3, num_matches=2, num_drafts=3),
    "history": HistoryDrafter(corpus_tokens=256, min_match=1),
    "hybrid": HybridDrafter(CHAIN, corpus_tokens=256, min_match=1),
    "chain": CHAIN,
    "tree": ModelDrafter(DRAFT.config, TREE),
    "grown": ModelDrafter(DRAFT.config, Growth(K, 2, 3)),
    "alternating": AlternatingDrafter(DRAFT.config, TREE),
    "marginals": MarginalsDrafter(2, 3),
}


def check(spec: DrafterSpec) -> None:
    params = DRAFT.params if spec.configs else ()
    check_drafter(LoadedDrafter("mine", spec, params), TARGET, num_speculative_tokens=K)


# Each compiles steps of its own. The gate has those that draft from text: what a model drafts,
# test_draft_model and tests of whole runs have, and heads have tests like this one.
@pytest.mark.full
@pytest.mark.parametrize(
    "name", quick(SPECS, "ngram", slow=[name for name in SPECS if name not in ("ngram", "history")])
)
def test_a_drafter_that_comes_with_specjax_holds(name):
    check(SPECS[name])


@pytest.fixture(scope="module")
def example() -> dict[str, Any]:
    """What the example of the docs defines and prints; its prompt runs through the demo target."""
    text = DOCS.read_text()
    code, laws, head, _, test = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    names: dict[str, Any] = {"__name__": "example"}
    exec(compile(code, str(DOCS), "exec", dont_inherit=True), names)
    exec(compile(head, str(DOCS), "exec", dont_inherit=True), names)
    # Of the test all but the line that loads a target.
    lines = [line for line in test.splitlines() if not line.startswith("target = ")]
    names |= {"test": "\n".join(lines), "laws": laws, "target": TARGET}
    return names


@pytest.mark.full
def test_the_example_of_the_docs_drafts(example):
    acceptance = example["out"].stats.acceptance
    assert acceptance.num_accepted > 0
    plain = specjax.generate(
        "demo",
        ["To be, or not to be"],
        sampling=specjax.SamplingParams(temperature=0, max_tokens=32),
    )
    assert example["out"][0].token_ids == plain[0].token_ids


@pytest.mark.slow  # the page itself runs in the gate
def test_the_example_of_the_docs_holds(example):
    exec(example["test"], example)


@pytest.mark.slow
def test_the_head_of_the_docs_holds(example):
    weight = 0.3 * np.random.default_rng(0).standard_normal((32, 16), np.float32)
    head = LoadedDrafter("head", example["LinearHead"](), {"weight": weight})
    check_drafter(head, TARGET, num_speculative_tokens=K)


@pytest.mark.slow
def test_the_laws_of_the_docs_hold(example):
    exec(compile(example["laws"], str(DOCS), "exec", dont_inherit=True), example)
    check_drafter(example["OwnTokens"](), TARGET, num_speculative_tokens=K)


@dataclasses.dataclass(frozen=True)
class Wrong(DrafterSpec):
    """Another drafter with its functions changed."""

    right: DrafterSpec
    change: Callable[[Drafter], Drafter]
    has_probs: ClassVar[bool] = True

    @property
    def configs(self):
        return self.right.configs

    @property
    def is_tree(self):
        return self.right.is_tree

    def num_nodes(self, num_speculative_tokens: int) -> int:
        return self.right.num_nodes(num_speculative_tokens)

    def tree_slots(self, num_speculative_tokens: int) -> int:
        return self.right.tree_slots(num_speculative_tokens)

    def build(self, context: DrafterContext) -> Drafter:
        return self.change(self.right.build(context))


class WrongWithoutLaws(Wrong):
    has_probs: ClassVar[bool] = False


def proposing(change: Callable[..., dict[str, Any]]) -> Callable[[Drafter], Drafter]:
    """Returns a change of a drafter that replaces fields of its proposals."""

    def changed(drafter: Drafter) -> Drafter:
        def draft(params, state, decode_state, num_tokens):
            drafted = drafter.draft(params, state, decode_state, num_tokens)
            fields = change(drafted.proposal, decode_state)
            return drafted._replace(proposal=dataclasses.replace(drafted.proposal, **fields))

        return drafter._replace(draft=draft)

    return changed


def wider_state(drafter: Drafter) -> Drafter:
    """Its prompts turn the state into another dtype."""

    def prefill(*arguments):
        return jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), drafter.prefill(*arguments))

    return drafter._replace(prefill=prefill)


def never_catches_up(drafter: Drafter) -> Drafter:
    """It thinks that it has seen whatever was committed."""

    def draft(params, state, decode_state, num_tokens):
        seen = dataclasses.replace(decode_state, drafter_lengths=decode_state.cache.lengths)
        return drafter.draft(params, state, seen, num_tokens)

    return drafter._replace(draft=draft)


def fails(drafter: Drafter) -> Drafter:
    def enter_rows(state, row_ids, drafter_lengths):
        raise KeyError("rows")

    return drafter._replace(enter_rows=enter_rows)


def roll_probs(proposal, decode_state):
    if proposal.probs is None:
        return {}
    return {"probs": jnp.roll(proposal.probs, 1, axis=0)}


def spoil(value, since=0):
    return lambda proposal, decode_state: {
        "token_ids": jnp.where(
            (decode_state.cache.lengths >= since)[:, None], value, proposal.token_ids
        )
    }


def anticipate(proposal, decode_state):
    return {"prior_confidence": proposal.path_probability}


def stop_at_unlikely(proposal, decode_state):
    """Proposes the second token only where the first one is likely: exact for no rule by law."""
    if proposal.path_probability is None:
        return {}
    stands = jnp.where(proposal.path_probability[:, 0] > 0.2, 2, 0)
    return {"num_tokens": jnp.minimum(proposal.num_tokens, stands)}


def halve(proposal, decode_state):
    return {} if proposal.probs is None else {"probs": proposal.probs / 2}


def flatten(proposal, decode_state):
    """Its laws are even; its draws are not."""
    if proposal.probs is None:
        return {}
    return {"probs": jnp.full_like(proposal.probs, 1 / proposal.probs.shape[-1])}


@dataclasses.dataclass(frozen=True)
class TapReader(TapKeeper):
    """Drafts by all that it was told of a row's tokens, in its pages.

    Attributes:
      first: slot that it reads first; nothing is written to slot 0.
      beyond: slots behind the root's that it reads, too.
    """

    first: int = 1
    beyond: int = 0

    def build(self, context):
        keeper = super().build(context)
        width = len(context.taps) * context.target.hidden_size
        vocab_size, depth = context.target.vocab_size, context.num_speculative_tokens
        weights = np.random.default_rng(0).normal(size=(width, depth * vocab_size))

        def draft(params, state, decode_state, num_tokens):
            cache, kept = decode_state.cache, state["kept"]
            own = kept[jnp.maximum(cache.block_table, 0)][..., :width]
            own = own.reshape(own.shape[0], -1, width)
            place = jnp.arange(own.shape[1])[None, :]
            is_read = (place >= self.first) & (place <= cache.lengths[:, None] + self.beyond)
            read = jnp.where(is_read[..., None], own, 0.0).sum(axis=1)
            scores = (read @ jnp.asarray(weights, read.dtype)).reshape(-1, depth, vocab_size)
            token_ids = jnp.argmax(scores, axis=2).astype(jnp.int32)
            return Draft(Proposal(token_ids=token_ids, num_tokens=num_tokens), state)

        return keeper._replace(draft=draft)


class LearningTapReader(TapReader):
    learns: ClassVar[bool] = True


WRONG = {
    "tells more tokens than it was asked for": (
        Wrong(CHAIN, proposing(lambda p, _: {"num_tokens": jnp.full_like(p.num_tokens, K)})),
        "says num_tokens",
    ),
    "tells fewer tokens than none": (
        Wrong(CHAIN, proposing(lambda p, _: {"num_tokens": p.num_tokens - 1})),
        "says num_tokens",
    ),
    "anticipates": (Wrong(CHAIN, proposing(anticipate)), "prior_confidence .* anticipates"),
    "proposes by what it drew": (
        Wrong(CHAIN, proposing(stop_at_unlikely)),
        "whether draft token 0 is proposed depends on",
    ),
    "gives laws of the wrong row": (Wrong(CHAIN, proposing(roll_probs)), "not distributed as"),
    "gives laws that it does not draw from": (
        Wrong(CHAIN, proposing(flatten)),
        "not distributed as",
    ),
    "gives half a law": (Wrong(CHAIN, proposing(halve)), "expected 1"),
    "has no laws": (
        Wrong(CHAIN, proposing(lambda p, _: {"probs": None})),
        "says has_probs, and its draft gave no probs",
    ),
    "proposes no token": (
        WrongWithoutLaws(NgramDrafter(1, 3), proposing(spoil(31, since=9))),
        "token ids outside the vocabulary",
    ),
    "proposes NaN": (
        WrongWithoutLaws(NgramDrafter(1, 3), proposing(spoil(-(2**31)))),
        "NaN",
    ),
    "changes its state": (Wrong(CHAIN, wider_state), "prefill .* other structure"),
    "never catches up": (
        WrongWithoutLaws(CHAIN, never_catches_up),
        "not those of a fresh row",
    ),
    "leaves accepted nodes where they are": (
        WrongWithoutLaws(
            ModelDrafter(DRAFT.config, TREE), lambda right: right._replace(move=move_nothing)
        ),
        "not those of a fresh row",
    ),
    "calls its pages rows": (
        WrongWithoutLaws(
            CHAIN,
            lambda right: right._replace(
                state_axes=lambda state: jax.tree.map(lambda leaf: ROWS, state)
            ),
        ),
        r"state_axes says \('rows',\) of a leaf of shape .* expected 4 entries",
    ),
    "keeps more than it says": (
        WrongWithoutLaws(
            NgramDrafter(1, 3),
            lambda right: right._replace(
                init=lambda rows, max_length, num_pages, page_size: jnp.zeros((num_pages, 3)),
                state_axes=by_page,
            ),
        ),
        "says 0, and its pages take 1.5 bytes per token",
    ),
    "reads a slot before its first": (
        TapReader(NgramDrafter(), first=0),
        "not those of a fresh row .* slots that nothing of the row was written to",
    ),
    "reads a slot behind its last": (
        TapReader(NgramDrafter(), beyond=1),
        "not those of a fresh row",
    ),
    "learns from such a slot": (
        LearningTapReader(NgramDrafter(), first=0),
        "its drafts are others when all is played again",
    ),
    "raises": (WrongWithoutLaws(NgramDrafter(1, 3), fails), r"its enter_rows raised KeyError"),
}


@pytest.mark.parametrize(
    "name",
    quick(
        WRONG,
        "changes its state",
        "calls its pages rows",
        "keeps more than it says",
        "raises",
        slow=[
            "never catches up",
            "leaves accepted nodes where they are",
            "learns from such a slot",
        ],
    ),
)
def test_a_drafter_with_a_mistake_is_found(name):
    spec, message = WRONG[name]
    with pytest.raises(AssertionError, match=message):
        check(spec)


@pytest.mark.full
@pytest.mark.parametrize(
    ("change", "message"),
    [
        # It keeps what it counted in the row before.
        (lambda right: right._replace(enter_rows=lambda state, *_: state), "not those of a fresh"),
        # Row buckets take all of its rows, and put back the bucket's.
        (lambda right: right._replace(state_axes=by_page), r"says \('pages',\) of a leaf of"),
    ],
)
def test_a_mistake_in_the_example_is_found(example, change, message):
    right = example["FrequentFollower"]()
    with pytest.raises(AssertionError, match=message):
        check(WrongWithoutLaws(right, change))


@pytest.mark.full
def test_a_drafter_that_reads_hidden_states(monkeypatch):
    check(TapReader(NgramDrafter()))
    # Another drafter: nothing that was compiled for the first is right for it.
    monkeypatch.setattr(burst, "absorb_waiting", lambda spec, params, state, waiting: state)
    with pytest.raises(AssertionError, match="after steps at K = 0: its drafts are not those"):
        check(TapReader(NgramDrafter(), layers=(1,)))


@pytest.mark.parametrize("number", [0, True])
def test_a_check_drafts(number):
    with pytest.raises(ValueError, match="without drafts there is nothing to check"):
        check_drafter("ngram", TARGET, num_speculative_tokens=number)


class Saying(NgramDrafter):
    """Its spec says of its work and weights what is not so."""

    def work(self, *arguments):
        return None

    def abstract_params(self, target, dtype):
        return {"weight": jax.ShapeDtypeStruct((2,), dtype)}


def test_what_a_spec_says_of_weights_and_work_is_checked():
    with pytest.raises(ValueError, match=r"not those that abstract_params .* missing"):
        check_drafter(Saying(), TARGET)
    with pytest.raises(TypeError, match="work of drafter 'mine' returned None"):
        check_drafter(LoadedDrafter("mine", Saying(), {"weight": np.zeros(2)}), TARGET)


def test_a_spec_is_one():
    with pytest.raises(TypeError, match=r"expected a specjax\.DrafterSpec"):
        LoadedDrafter("mine", object())
    with pytest.raises(NotImplementedError, match=r"DrafterSpec has no build\(context\)"):
        DrafterSpec().build(
            DrafterContext(target=TARGET.config, num_speculative_tokens=1, dtype="float32")
        )
