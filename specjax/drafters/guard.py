"""Turns whatever is wrong with a drafter's functions into a `DrafterError` while they are traced.

What a function returns is checked here, since elsewhere a wrong shape would end the step that
uses it, and every request with it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.config.checks import is_int
from specjax.drafters.base import Draft, Drafter, DrafterContext, DrafterSpec
from specjax.models import sharding
from specjax.models.base import ModelConfig
from specjax.trees import draft_tree
from specjax.types import NO_PARENT, DraftTree, Proposal


class DrafterError(Exception):
    """A drafter's function raised or returned something else; __cause__ holds its error."""


# The functions of a Drafter, and which of their arguments is the state that they return anew.
_STATE_ARGUMENT = {
    "draft": 1,
    "prefill": 1,
    "absorb": 1,
    "defer": 1,
    "enter_rows": 0,
    "move": 0,
    "remember": 0,
}
_FUNCTIONS = (*_STATE_ARGUMENT, "init", "state_axes")
_MAY_BE_NONE = ("defer", "remember")


def abstract_drafter_params(spec: DrafterSpec, target: ModelConfig, dtype: Any) -> Any:
    """Returns shapes and dtypes of a drafter's weights, as its spec says.

    Raises:
      DrafterError: its `abstract_params` raised.
    """
    try:
        return spec.abstract_params(target, dtype)
    except Exception as error:  # a spec may be third-party code, and raise anything
        raise DrafterError(f"its abstract_params raised {error!r}") from error


def is_own(spec: DrafterSpec) -> bool:
    """Whether a drafter's class comes with specjax."""
    return type(spec).__module__.startswith("specjax.")


def guarded(drafter: Drafter, spec: DrafterSpec, context: DrafterContext) -> Drafter:
    """Returns the drafter with functions that raise DrafterError alone.

    It stands for their own exceptions, and for results of another kind than `Drafter` says.
    The depths of a tree are computed from its parents: the target takes positions from them.

    Args:
      drafter: what `spec.build(context)` returned.

    Raises:
      DrafterError: `drafter` is no Drafter, or one of its fields is of another kind.
    """
    if not isinstance(drafter, Drafter):
        raise DrafterError(f"its build returned {_kind(drafter)}; expected a specjax.Drafter")
    most = drafter.max_positions
    if not (most is None or isinstance(most, int | np.integer)):
        raise DrafterError(f"its max_positions is {most!r:.100}; expected an int or None")

    def guard(name: str) -> Callable[..., Any]:
        function = getattr(drafter, name)
        if not callable(function):
            raise DrafterError(f"its {name} is {_kind(function)}; expected a function")

        @functools.wraps(function)
        def run(*arguments: Any) -> Any:
            try:
                result = function(*arguments)
            except Exception as error:  # a drafter may be third-party code, and raise anything
                raise DrafterError(f"its {name} raised {error!r}") from error
            if name == "init":
                _check_leaves(result)
                rows, _, num_pages, _ = arguments
                sizes = {"rows": rows, "pages": num_pages}
                _check_sizes(guard("state_axes")(result), result, sizes)
            elif name == "state_axes":
                _check_axes(result, arguments[0])
            elif name == "draft":
                rows, draws_afresh = arguments[3].shape[0], drafter.draws_afresh
                result = _checked(result, rows, spec, context, draws_afresh)
                _check_pages(result.pages, arguments[2], spec)
                _check_written(result.written, drafter)
                _check_state(name, result.state, arguments[1])
            else:
                _check_state(name, result, arguments[_STATE_ARGUMENT[name]])
            return result

        return run

    is_left = lambda name: name in _MAY_BE_NONE and getattr(drafter, name) is None
    return drafter._replace(**{name: guard(name) for name in _FUNCTIONS if not is_left(name)})


def _checked(
    draft: Any, rows: int, spec: DrafterSpec, context: DrafterContext, draws_afresh: bool
) -> Draft:
    """Returns what `draft` returned, its integers as int32."""
    if not isinstance(draft, Draft):
        raise DrafterError(f"its draft returned {_kind(draft)}; expected a specjax.Draft")
    proposal = draft.proposal
    if not isinstance(proposal, Proposal):
        raise DrafterError(
            f"its draft returned a Draft whose proposal is {_kind(proposal)}; expected a "
            "specjax.Proposal"
        )
    shape = np.shape(proposal.token_ids)
    if len(shape) != 2 or shape[0] != rows:
        raise DrafterError(
            f"its draft returned token_ids of {_described(proposal.token_ids)}; expected "
            f"int32[{rows}, num_drafts]"
        )
    if proposal.probs is not None and not draws_afresh:
        raise DrafterError(
            "its draft returned probs, and the drafter does not say draws_afresh; expected the "
            "distributions that its tokens were drawn from in this step. Verification by "
            "probabilities stored with earlier rollouts would be biased: give probs=None, and "
            "rules that compare distributions run as delta, which is exact for tokens however "
            "chosen"
        )
    if proposal.probs is None and spec.has_probs and context.keeps_probs:
        raise DrafterError(
            "its spec says has_probs, and its draft gave no probs where context.keeps_probs asks "
            "for them"
        )
    by_draft, by_node = shape, (rows, shape[1] + 1)
    depth = context.num_speculative_tokens
    most = spec.num_nodes(depth) - 1
    if shape[1] > most:
        raise DrafterError(
            f"its draft returned {shape[1]} draft tokens a row at K = {depth}; expected at most "
            f"the {most} that its spec's num_nodes leaves beside the root"
        )
    tree = proposal.tree
    if tree is not None:
        tree = _checked_tree(tree, by_node, depth, has_depths=is_own(spec))
    if (tree is not None) != spec.is_tree:
        found, expected = ("a tree", "None") if tree is not None else ("no tree", "a tree")
        raise DrafterError(
            f"its draft returned {found}; expected {expected}, as its spec says is_tree="
            f"{spec.is_tree}"
        )
    for name in ("prior_confidence", "path_probability"):
        _check_numbers(name, getattr(proposal, name), by_draft)
    _check_numbers("probs", proposal.probs, (*by_draft, context.target.vocab_size))
    proposal = dataclasses.replace(
        proposal,
        token_ids=_integers("token_ids", proposal.token_ids, by_draft),
        num_tokens=_integers("num_tokens", proposal.num_tokens, (rows,)),
        tree=tree,
    )
    written, kept_at = draft.written, draft.kept_at
    return draft._replace(
        proposal=proposal,
        written=None if written is None else _integers("written", written, (rows,)),
        kept_at=None if kept_at is None else _integers("kept_at", kept_at, by_node),
    )


def _checked_tree(tree: Any, shape: tuple[int, ...], depth: int, *, has_depths: bool) -> DraftTree:
    """Returns a tree whose depths are those of its parents.

    Args:
      has_depths: whether they are so already. The drafters of specjax make theirs by
        `from_parents` or from one shape: another computation would cost each step.
    """
    if not isinstance(tree, DraftTree) or not is_int(tree.max_depth):
        raise DrafterError(
            f"its draft returned a tree that is {tree!r:.100}; expected a specjax DraftTree "
            "with an int max_depth"
        )
    if not 0 <= tree.max_depth <= depth:
        raise DrafterError(
            f"its draft returned a tree of max_depth={tree.max_depth}; expected 0 to K = {depth}"
        )
    parents = _integers("tree.parents", tree.parents, shape)
    depths = _integers("tree.depths", tree.depths, shape)
    if has_depths:
        return dataclasses.replace(tree, parents=parents, depths=depths)
    return draft_tree.from_parents(parents.at[:, 0].set(NO_PARENT), int(tree.max_depth))


def _integers(name: str, found: Any, shape: tuple[int, ...]) -> jax.Array:
    if not _is_of(found, shape, jnp.integer):
        raise DrafterError(
            f"its draft returned {name} of {_described(found)}; expected int32{list(shape)}"
        )
    return jnp.asarray(found).astype(jnp.int32)


def _check_numbers(name: str, found: Any, shape: tuple[int, ...]) -> None:
    if found is not None and not _is_of(found, shape, jnp.floating):
        raise DrafterError(
            f"its draft returned {name} of {_described(found)}; expected float32{list(shape)} "
            "or None"
        )


def _is_of(found: Any, shape: tuple[int, ...], kind: Any) -> bool:
    return _is_array(found) and found.shape == shape and bool(jnp.issubdtype(found.dtype, kind))


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array | jax.ShapeDtypeStruct | np.ndarray | np.generic)


def _check_leaves(state: Any) -> None:
    for leaf in jax.tree.leaves(state):
        if not _is_array(leaf):
            raise DrafterError(
                f"its init returned a state with a leaf that is {_kind(leaf)}; expected arrays"
            )


def _check_state(name: str, state: Any, before: Any) -> None:
    found, expected = structure(state), structure(before)
    if found != expected:
        raise DrafterError(
            f"its {name} returned a state of other structure, shapes or dtypes than it was given: "
            f"{found!s:.300}; expected {expected!s:.300}. A state may not depend on K: its init is "
            "of a build for K = 1, and serves every K"
        )


def _check_pages(pages: Any, decode_state: Any, spec: DrafterSpec) -> None:
    if (pages is not None) != spec.uses_target_pages:
        raise DrafterError(
            f"its draft returned {'pages' if pages is not None else 'no pages'}, and its spec says "
            f"uses_target_pages={spec.uses_target_pages}; expected the target's pages where it does"
        )
    if pages is not None:
        _check_state("draft", pages, decode_state.cache.pages)


def _check_written(written: Any, drafter: Drafter) -> None:
    if drafter.defer is not None and written is None:
        raise DrafterError(
            "it has a defer, and its draft returned written=None; expected int32[rows]: the root "
            "of rows that it caught up with, decode_state.drafter_lengths of the others"
        )


def _check_axes(axes: Any, state: Any) -> None:
    is_spec = lambda leaf: isinstance(leaf, jax.sharding.PartitionSpec)
    found = jax.tree.structure(axes, is_leaf=is_spec)
    kinds = all(map(is_spec, jax.tree.leaves(axes, is_leaf=is_spec)))
    if found != jax.tree.structure(state) or not kinds:
        raise DrafterError(
            f"its state_axes returned another structure than its state: {axes!r:.200}; expected "
            "a PartitionSpec in place of each leaf"
        )


def _check_sizes(axes: Any, state: Any, sizes: dict[str, int]) -> None:
    """Raises DrafterError for axes that a leaf of a new state has not."""
    is_spec = lambda leaf: isinstance(leaf, jax.sharding.PartitionSpec)
    specs = jax.tree.leaves(axes, is_leaf=is_spec)
    for leaf, names in zip(jax.tree.leaves(state), map(tuple, specs), strict=True):
        shape = np.shape(leaf)
        said = f"its state_axes says {names} of a leaf of shape {shape} that its init returned"
        if len(names) > len(shape):
            raise DrafterError(f"{said}; expected at most {len(shape)} axes")
        for name, size in zip(names, shape):
            if name not in sharding.RULES:
                known = ", ".join(repr(one) for one in sharding.RULES if one is not None)
                raise DrafterError(f"{said}; expected names among {known}")
            if sizes.get(name, size) != size:
                raise DrafterError(
                    f"{said}; expected {sizes[name]} entries, as there are {sizes[name]} {name}"
                )


def structure(state: Any) -> tuple[Any, list[str]]:
    """Returns a value that is equal for states that one loop may carry."""
    leaves, tree = jax.tree.flatten(state)
    return tree, [_described(leaf) for leaf in leaves]


def _described(found: Any) -> str:
    if not _is_array(found):
        return _kind(found)
    return f"{found.dtype}{list(found.shape)}"


def _kind(found: Any) -> str:
    return "None" if found is None else f"a {type(found).__name__}"
