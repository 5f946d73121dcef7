"""What a drafter is.

A drafter proposes; it can never change what is emitted, only how fast. Everything
it does runs inside the jitted burst: pure functions over its own state pytree.

    init(rows, max_length, num_pages, page_size) -> state
        A row holds at most max_length tokens. Keys and values, if it has any, live under
        the target's page ids, so that one allocation serves both.
    prefill(params, state, batch, max_tokens_per_row) -> state
        Feeds prompt tokens, the same flat batch that the target gets.
    draft(params, state, decode_state, num_tokens i32[rows]) -> Draft
        Proposes at most num_tokens[row] tokens after each row's root. A row that
        proposes fewer costs less.

A drafter that raises, or proposes NaN or ids outside the vocabulary, is turned off for
the run; decoding goes on without it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

from jax import Array

from specjax.types import Proposal

NOT_KEPT = -1


class Draft(NamedTuple):
    """What `draft` returns."""

    proposal: Proposal
    state: Any
    # i32[rows]: positions below it have their KV in the drafter's cache, right as
    # long as the drafted tokens that stand there are accepted.
    written: Array
    # Of a tree instead, i32[rows, num_nodes]: node j has its KV in the drafter's slot
    # of position root + kept_at[row, j], NOT_KEPT where it was not fed. `written`
    # counts the root then.
    kept_at: Array | None = None
    # i32[rows], of types.NO_FAULT and those after it: the step fills it in.
    fault: Array | None = None


class DrafterError(Exception):
    """A drafter's function raised while it was traced; the cause says what."""


class Drafter(NamedTuple):
    """A group of pure functions; the module's docstring gives their contract."""

    init: Callable[..., Any]
    prefill: Callable[..., Any]
    draft: Callable[..., Draft]
    # move(state, source_slots i32[n], target_slots i32[n]) -> state: moves keys and
    # values of accepted nodes of a tree; a drafter without any has nothing to move.
    move: Callable[..., Any] = lambda state, source_slots, target_slots: state
    # Rows of its state, where it keeps anything by row: take_rows(state, row_ids i32[n]),
    # and put_rows(state, row_ids, part), which drops ids past the last row. What all rows
    # share, as pages are, comes back from the part whole.
    take_rows: Callable[..., Any] = lambda state, row_ids: state
    put_rows: Callable[..., Any] = lambda state, row_ids, part: part
    # remember(state, pieces) -> state: takes in text that the host knows of, between bursts;
    # see `history`. None: it has no use for any.
    remember: Callable[..., Any] | None = None
    # Positions it was made for: nothing is drafted past them; None is no limit.
    max_positions: int | None = None
    # Whether its proposals' probs are what their tokens were drawn from in this very
    # step, with noise of the step. Probabilities that were stored with the tokens of
    # earlier rollouts are not: given the history such tokens are certain.
    draws_afresh: bool = False


def guarded(drafter: Drafter) -> Drafter:
    """Returns the drafter, whose functions raise DrafterError whatever they raise."""

    def guard(name: str) -> Callable[..., Any] | None:
        function = getattr(drafter, name)
        if function is None:
            return None

        @functools.wraps(function)
        def run(*arguments: Any) -> Any:
            try:
                return function(*arguments)
            except Exception as error:  # a drafter is anybody's code, and may raise any
                raise DrafterError(f"its {name} raised {error!r}") from error

        return run

    names = ("init", "prefill", "draft", "move", "take_rows", "put_rows", "remember")
    return drafter._replace(**{name: guard(name) for name in names})
