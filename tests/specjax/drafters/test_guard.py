"""A drafter whose functions return something else is turned off, and no request notices."""

import dataclasses
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from asked_for import quick
from jax.sharding import PartitionSpec

import specjax
from specjax.decode import burst, step
from specjax.drafters.base import Draft, Drafter, DrafterContext, DrafterSpec, by_page, by_row
from specjax.drafters.guard import DrafterError, guarded
from specjax.testing import tiny_model
from specjax.types import DraftTree, Proposal

K, VOCAB = 2, 31
ENGINE = specjax.EngineConfig(max_rows=2, max_context=32, burst_steps=4, row_buckets=())
ARGUMENTS = dict(num_speculative_tokens=K, engine=ENGINE)
SAMPLING = specjax.SamplingParams(temperature=0, max_tokens=6)


@dataclasses.dataclass(frozen=True)
class Returning(DrafterSpec):
    """Its draft, or another function of it, returns what it is made with."""

    what: str = ""

    def build(self, context):
        if self.what == "build":
            return None
        wrong = {"max_positions": "x"} if self.what == "max_positions" else {}
        if self.what in _STATES:
            name, returned = _STATES[self.what]
            wrong[name] = lambda *arguments: returned

        def draft(params, state, decode_state, num_tokens):
            rows = num_tokens.shape[0]
            fields = {"token_ids": jnp.ones((rows, K), jnp.int32), "num_tokens": num_tokens}
            if self.what in _FIELDS:
                fields |= _FIELDS[self.what](rows)
            drafted = Draft(Proposal(**fields), state)
            return _DRAFTS[self.what](drafted) if self.what in _DRAFTS else drafted

        return Drafter(draft, **wrong)


# By what is wrong: changed fields of a proposal, what stands in place of a Draft, and what other
# functions return.
_FIELDS = {
    "num_tokens of floats": lambda rows: {"num_tokens": jnp.ones(rows)},
    "num_tokens None": lambda rows: {"num_tokens": None},
    "token_ids of one axis": lambda rows: {"token_ids": jnp.ones(rows, jnp.int32)},
    "token_ids of fewer rows": lambda rows: {"token_ids": jnp.ones((rows - 1, K), jnp.int32)},
    "token_ids a list": lambda rows: {"token_ids": [[1] * K] * rows},
    "token_ids of floats": lambda rows: {"token_ids": jnp.ones((rows, K))},
    "tree a text": lambda rows: {"tree": "x"},
    "confidence of rows": lambda rows: {"path_probability": jnp.ones(rows)},
    "probs not drawn from": lambda rows: {"probs": jnp.ones((rows, K, VOCAB))},
}
_DRAFTS = {
    "draft None": lambda draft: None,
    "draft a proposal": lambda draft: draft.proposal,
    "proposal None": lambda draft: draft._replace(proposal=None),
    "another state": lambda draft: draft._replace(state={"more": jnp.zeros(3)}),
    "written of floats": lambda draft: draft._replace(written=jnp.zeros(2)),
}
_STATES = {
    "init a text": ("init", "x"),
    "enter_rows 5": ("enter_rows", 5),
    "prefill another": ("prefill", {"more": np.zeros(3)}),
}
MESSAGES = {
    "build": "its build returned None; expected a specjax.Drafter",
    "max_positions": "its max_positions is 'x'; expected an int or None",
    "num_tokens of floats": r"num_tokens of float32\[2\]; expected int32\[2\]",
    "num_tokens None": "num_tokens of None; expected",
    "token_ids of one axis": r"token_ids of int32\[2\]; expected int32\[2, num_drafts\]",
    "token_ids of fewer rows": r"token_ids of int32\[1, 2\]; expected int32\[2, num_drafts\]",
    "token_ids a list": "token_ids of a list; expected",
    "token_ids of floats": "token_ids of float32",
    "tree a text": "a tree that is 'x'",
    "confidence of rows": r"path_probability of float32\[2\]; expected float32\[2, 2\] or None",
    "probs not drawn from": "stored with earlier rollouts",
    "draft None": "its draft returned None; expected a specjax.Draft",
    "draft a proposal": "its draft returned a Proposal",
    "proposal None": "a Draft whose proposal is None",
    "another state": "its draft returned a state of other structure",
    "written of floats": "written of float32",
    "init a text": "its init returned a state with a leaf that is a str",
    "enter_rows 5": "its enter_rows returned a state of other structure",
    "prefill another": "its prefill returned a state of other structure",
}


QUICK = (
    "build",
    "num_tokens of floats",
    "token_ids of fewer rows",
    "tree a text",
    "confidence of rows",
    "draft None",
    "another state",
    "enter_rows 5",
)


@pytest.fixture(scope="module")
def target():
    return tiny_model(num_layers=1, vocab_size=VOCAB)


def guarding(target, drafter, spec=None):
    context = DrafterContext(
        target=target.config, num_speculative_tokens=K, dtype=jnp.dtype("float32")
    )
    return guarded(drafter, spec or Returning(), context)


PROMPTS = ([1, 2, 3], True), ([4], False)  # and whether the request speculates


def run(target, spec, prompts=PROMPTS, **changes):
    """Returns the tokens of requests, and what warned."""
    tokens = {}
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with specjax.Engine(target, drafter=spec, **ARGUMENTS | changes) as engine:
            for prompt, speculates in prompts:
                own = dataclasses.replace(SAMPLING, speculate=speculates)
                tokens[engine.add(prompt, own)] = []
            while engine.has_work:
                for chunk in engine.step():
                    assert chunk.error is None
                    tokens[chunk.prompt_index] += chunk.token_ids
    return list(tokens.values()), [str(warning.message) for warning in told]


@pytest.fixture(scope="module")
def plain(target):
    return run(target, None)[0]


class KeepingDrafts(Returning):
    """Its state has room for the tokens that it drafted last."""

    def build(self, context):
        depth = context.num_speculative_tokens

        def draft(params, state, decode_state, num_tokens):
            token_ids = jnp.ones((len(num_tokens), depth), jnp.int32)
            return Draft(Proposal(token_ids=token_ids, num_tokens=num_tokens), token_ids)

        return Drafter(draft, init=lambda rows, *sizes: jnp.zeros((rows, depth), jnp.int32))


@pytest.mark.full
def test_a_state_that_depends_on_the_depth_is_told_apart(target):
    _, (told,) = run(target, KeepingDrafts(), prompts=PROMPTS[:1])
    assert "A state may not depend on K: its init is of a build for K = 1" in told


@pytest.mark.parametrize("what", quick(MESSAGES, *QUICK))
def test_it_is_turned_off_and_says_why(target, plain, what):
    tokens, told = run(target, Returning(what))
    assert tokens == plain
    assert len(told) == 1
    with pytest.raises(UserWarning, match=MESSAGES[what]):
        raise UserWarning(told[0])


@dataclasses.dataclass(frozen=True)
class Branching(DrafterSpec):
    """Drafts what it knows to follow, as a chain of three nodes that it calls a tree."""

    text: tuple[int, ...]  # by position
    parents: tuple[int, ...]
    depths: tuple[int, ...]
    is_tree: bool = True

    def num_nodes(self, num_speculative_tokens):
        return 4

    def tree_slots(self, num_speculative_tokens):
        return 3

    def build(self, context):
        def draft(params, state, decode_state, num_tokens):
            ahead = decode_state.cache.lengths[:, None] + jnp.arange(1, 4)[None]
            nodes = lambda values: jnp.tile(jnp.array(values), (len(num_tokens), 1))
            proposal = Proposal(
                token_ids=jnp.array(self.text)[ahead],
                num_tokens=jnp.where(num_tokens > 0, 3, 0),
                tree=DraftTree(parents=nodes(self.parents), depths=nodes(self.depths), max_depth=3),
            )
            return Draft(proposal, state)

        return Drafter(draft)


class Tree(Returning):
    is_tree = True

    def num_nodes(self, num_speculative_tokens):
        return 4


def chain(max_depth):
    parents = jnp.tile(jnp.arange(-1, K), (2, 1))
    return DraftTree(parents=parents, depths=parents + 1, max_depth=max_depth)


@pytest.mark.parametrize(
    ("spec", "num_drafts", "tree", "message"),
    [
        (Returning(), 40, None, "40 draft tokens a row at K = 2; expected at most the 2 that its"),
        (Returning(), 2, chain(2), "returned a tree; expected None, .* is_tree=False"),
        (Tree(), 2, None, "returned no tree; expected a tree, .* is_tree=True"),
        (Tree(), 2, chain(3), "a tree of max_depth=3; expected 0 to K = 2"),
        (Tree(), 2, chain(-1), "a tree of max_depth=-1; expected"),
    ],
    ids=["columns", "a tree", "no tree", "too deep", "no depth"],
)
def test_a_proposal_has_the_form_that_the_spec_says(target, spec, num_drafts, tree, message):
    proposal = Proposal(
        token_ids=jnp.ones((2, num_drafts), jnp.int32), num_tokens=jnp.ones(2, jnp.int32), tree=tree
    )
    drafter = guarding(target, Drafter(lambda *arguments: Draft(proposal, ())), spec)
    with pytest.raises(DrafterError, match=message):
        drafter.draft(None, (), None, proposal.num_tokens)


@pytest.fixture(scope="module")
def long_text(target):
    return tokens_of_one(target, None, max_tokens=24)


def tokens_of_one(target, drafter, max_tokens):
    out = specjax.generate(
        target,
        [[1, 2, 3]],
        drafter=drafter,
        engine=ENGINE,
        speculative_config={"policy": "fixed", "num_speculative_tokens": 3},
        sampling=dataclasses.replace(SAMPLING, max_tokens=max_tokens),
    )
    assert drafter is None or out.stats.acceptance.num_accepted > 0
    return out[0].token_ids


@pytest.mark.full
@pytest.mark.parametrize(
    ("parents", "depths"),
    [((-1, 0, 1, 2), (0, 1, 1, 1)), ((-1, 0, 1, 2), (0, 0, 0, 0)), ((0, 0, 1, 2), (0, 1, 2, 3))],
    ids=["depths of siblings", "no depths", "a root with a parent"],
)
def test_positions_follow_from_the_parents_of_a_tree(target, long_text, parents, depths):
    text = (1, 2, 3, *long_text, *[0] * 8)
    assert tokens_of_one(target, Branching(text, parents, depths), max_tokens=24) == long_text


def test_axes_of_another_structure_are_refused(target):
    wrong = Drafter(lambda *arguments: None, state_axes=lambda state: None)
    drafter = guarding(target, wrong)
    with pytest.raises(DrafterError, match="its state_axes returned another structure"):
        drafter.state_axes({"kept": jnp.zeros(3)})


def spec_of(*names):
    return lambda state: jax.tree.map(lambda leaf: PartitionSpec(*names), state)


@pytest.mark.parametrize(
    ("shape", "axes", "message"),
    [
        ((), by_row, r"says \('rows',\) of a leaf of shape \(\) .* expected at most 0 axes"),
        ((3, 2), by_row, "expected 4 entries, as there are 4 rows"),
        ((5, 4), by_page, "expected 6 entries, as there are 6 pages"),
        ((2, 5), spec_of(None, "pages"), "expected 6 entries"),
        ((4,), spec_of("row"), "expected names among 'rows', 'pages',"),
    ],
    ids=["scalar", "rows", "pages", "second", "unknown"],
)
def test_a_state_has_the_axes_that_it_is_said_to_have(target, shape, axes, message):
    made = lambda *sizes: {"kept": jnp.zeros(shape)}
    drafter = guarding(target, Drafter(lambda *arguments: None, init=made, state_axes=axes))
    with pytest.raises(DrafterError, match=message):
        drafter.init(4, 32, 6, 8)


@jax.tree_util.register_pytree_node_class
class Box:
    """A state whose repr is another for each object."""

    def __init__(self, held):
        self.held = held

    def tree_flatten(self):
        return (self.held,), None

    @classmethod
    def tree_unflatten(cls, _, held):
        return cls(*held)


def test_equal_states_of_a_class_are_equal(target):
    right = Drafter(lambda *arguments: None, move=lambda state, *slots: Box(state.held + 1))
    assert guarding(target, right).move(Box(jnp.zeros(3)), None, None).held.tolist() == [1, 1, 1]


@pytest.mark.full
def test_integers_of_another_width_are_right(target, plain):
    """8 bits have no room for the number that stands for NaN."""
    _FIELDS["small"] = lambda rows: {"token_ids": jnp.ones((rows, K), jnp.int8)}
    tokens, told = run(target, Returning("small"))
    assert (tokens, told) == (plain, [])


class WithoutLaws(Returning):
    has_probs = True


def test_laws_that_were_promised_are_missed(target):
    arguments = dict(prompts=PROMPTS[:1], verification="rejection")
    tokens, told = run(target, WithoutLaws(), **arguments)
    assert tokens == run(target, None, **arguments)[0]
    assert len(told) == 1
    assert "its spec says has_probs, and its draft gave no probs where context.keeps" in told[0]


def test_what_no_check_sees_turns_it_off_too(target, plain, monkeypatch):
    right = step.draft

    def fails(drafter, params, state, depth, *rest, **more):
        if depth:
            raise ZeroDivisionError("in the step")
        return right(drafter, params, state, depth, *rest, **more)

    monkeypatch.setattr(step, "draft", fails)
    tokens, told = run(target, Returning("nothing"))
    assert tokens == plain
    assert len(told) == 1
    assert "could not be traced: ZeroDivisionError" in told[0]


@dataclasses.dataclass(frozen=True)
class Absorbing(Returning):
    taps: tuple[int, ...] = (-1,)


def test_what_no_check_sees_where_it_does_not_draft_turns_it_off_too(target, plain, monkeypatch):
    def fails(*arguments):
        raise ZeroDivisionError("in the step")

    monkeypatch.setattr(burst, "absorb_waiting", fails)  # a part of steps of K = 0 alone
    tokens, told = run(target, Absorbing("nothing"), prompts=(([4], False),))
    assert tokens == plain[1:]
    assert len(told) == 1
    assert "could not be traced: ZeroDivisionError" in told[0]


WITH_BYTES = dataclasses.replace(ENGINE, memory_bytes=10**8)


@pytest.mark.full
def test_memory_is_planned_without_a_drafter_that_cannot_be(target, plain):
    tokens, told = run(target, Returning("build"), engine=WITH_BYTES)
    assert tokens == plain
    assert len(told) == 1
    assert "'Returning' is turned off for this run: its build returned None" in told[0]


class Weighing(Returning):
    """It reads weights of which its spec says nothing."""

    def build(self, context):
        right = super().build(context)

        def draft(params, *arguments):
            drafted = right.draft(params, *arguments)
            token_ids = drafted.proposal.token_ids + params.drafter["more"]
            proposal = dataclasses.replace(drafted.proposal, token_ids=token_ids)
            return drafted._replace(proposal=proposal)

        return right._replace(draft=draft)


@pytest.mark.full
def test_memory_is_planned_with_the_weights_at_hand(target, plain):
    drafter = specjax.LoadedDrafter("weighing", Weighing(), {"more": np.int32([[2]])})
    assert run(target, drafter, engine=WITH_BYTES) == (plain, [])


class Odd(DrafterSpec):
    configs: object = 5


class Method(DrafterSpec):
    def max_depth(self):
        return 3


def saying(name, returned, **more):
    """Returns a spec one of whose functions returns something else."""
    members = {name: lambda self, *arguments: returned, **more}
    return type("Saying", (Returning,), members)()


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (Odd(), r"Odd.configs is 5; expected a tuple of ModelConfig\."),
        (
            Method(),
            "Method.max_depth is .*; expected an int of at least 1, or None; make it a property",
        ),
        (saying("num_nodes", 3, max_depth=0), "Saying.max_depth is 0; expected an int of at least"),
        (
            saying("num_nodes", 3, taps=(True,)),
            r"Saying.taps is \(True,\); expected a tuple of ints",
        ),
        (saying("bytes_per_token", "x"), "bytes_per_token of drafter 'Saying' returned 'x'"),
        (saying("num_nodes", "x"), "num_nodes of drafter 'Saying' returned 'x'; expected an int"),
        (saying("num_nodes", 0), "returned 0; expected an int of at least 1"),
        (saying("tree_slots", -5), "tree_slots .* returned -5; expected an int of at least 0"),
        (saying("tree_slots", 1, is_tree=True), "returned 1; expected an int of at least 2"),
        (saying("work", None), "work of drafter 'Saying' returned None; expected a tuple"),
    ],
    ids=[
        "configs",
        "max_depth",
        "no depth",
        "taps",
        "bytes",
        "nodes",
        "no nodes",
        "slots",
        "few slots",
        "work",
    ],
)
def test_a_member_of_another_kind_is_refused_at_once(target, spec, message):
    with pytest.raises(TypeError, match=message):
        specjax.Engine(target, drafter=spec, **ARGUMENTS)
