"""A drafter that is a head over one hidden state of a row and attends to nothing; chains and trees.

Medusa and MLP speculators are such heads. All that is kept of a row is the target's last hidden
state at the newest token that was fed, the one before the root.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from specjax.drafters import token_by_token
from specjax.drafters.base import Draft, Drafter, DrafterContext, by_row
from specjax.drafters.token_by_token import Fed, FedNodes, TokenByToken, keep_newest, token_at
from specjax.heads.equations import medusa, mlp_speculator
from specjax.heads.equations.medusa import MedusaConfig
from specjax.heads.equations.mlp_speculator import MlpSpeculatorConfig
from specjax.sampling.vocabulary import WHOLE, Vocabulary
from specjax.trees.expanding import Growth
from specjax.trees.static_shapes import TreeShape
from specjax.types import DecoderParams, TokenBatch


class NewestState(NamedTuple):
    """The hidden state that the target's head read at each row's newest token that was fed.

    Attributes:
      newest: [rows, target_hidden_size].
    """

    newest: Array


def drafter(
    config: MedusaConfig | MlpSpeculatorConfig,
    context: DrafterContext,
    shape: TreeShape | Growth | None = None,
) -> Drafter:
    """Returns the functions of a head, which drafts at most `most_drafts` tokens.

    Args:
      shape: shape of a tree, whose depth is K, or how it grows; None: chains.
    """
    kind = _Medusa if isinstance(config, MedusaConfig) else _MlpSpeculator
    head = kind(**token_by_token.of_head(config, context))
    depth = context.num_speculative_tokens

    def init(rows: int, max_length: int, num_pages: int, page_size: int) -> NewestState:
        del max_length, num_pages, page_size
        return NewestState(jnp.zeros((rows, config.target_hidden_size), context.dtype))

    def draft(params: DecoderParams, state: Any, decode_state: Any, num_tokens: Array) -> Draft:
        asked = jnp.minimum(num_tokens, config.most_drafts)
        return token_by_token.draft(head, depth, shape, params, state, decode_state, asked)

    return Drafter(draft, init=init, absorb=_absorb, state_axes=_axes, draws_afresh=True)


def _axes(state: NewestState) -> Any:
    return NewestState(by_row(state.newest))


def _absorb(
    params: DecoderParams,
    state: NewestState,
    fed: TokenBatch,
    next_token_ids: Array,
    taps: tuple[Array, ...],
    row_ids: Array,
    max_tokens_per_row: int,
) -> NewestState:
    """Keeps the last state of each row that was fed; see `Drafter.absorb`."""
    del params, next_token_ids, max_tokens_per_row
    (last,) = taps
    return NewestState(keep_newest(state.newest, last, fed, row_ids))


def _of_depth(
    branches: Sequence[Callable[..., Array]], depth: int | Array, *inputs: Array
) -> Array:
    """Returns what the branch of a depth does; the last one past the end."""
    if len(branches) == 1:
        return branches[0](*inputs)
    if isinstance(depth, int):
        return branches[min(depth, len(branches) - 1)](*inputs)
    return jax.lax.switch(depth, branches, *inputs)


@dataclasses.dataclass(frozen=True)
class _Head(TokenByToken):
    """What both kinds have in common; hidden is [..., width] of their own."""

    config: Any
    context: DrafterContext


@dataclasses.dataclass(frozen=True)
class _Medusa(_Head):
    config: MedusaConfig

    def begin(
        self, params: DecoderParams, state: NewestState, decode_state: Any, takes_part: Array
    ) -> tuple[Array, NewestState]:
        del params, decode_state, takes_part
        return state.newest, state

    def feed(
        self, params: DecoderParams, state: NewestState, fed: Fed
    ) -> tuple[Array, NewestState]:
        del params
        return fed.hidden, state

    def feed_nodes(
        self, params: DecoderParams, state: NewestState, fed: FedNodes
    ) -> tuple[Array, NewestState]:
        del params
        return fed.hidden, state

    def own_logits(
        self, params: DecoderParams, hidden: Array, depth: int | Array
    ) -> tuple[Array, Vocabulary]:
        def of(index: int, hidden: Array) -> Array:
            x = medusa.forward(params.drafter, self.config, hidden, index)
            if self.config.has_head:
                return medusa.own_logits(params.drafter, self.config, x, index)
            return self.context.own_target_logits(params, x)[0]

        branches = [functools.partial(of, index) for index in range(self.config.most_drafts)]
        scores = _of_depth(branches, depth, hidden)
        if self.config.maps_vocabulary:
            return scores, token_by_token.own_vocabulary(params, self.config)
        axis = self.context.tensor_axis
        return scores, Vocabulary.of_width(scores.shape[1], self.vocab_size, axis)


@dataclasses.dataclass(frozen=True)
class _MlpSpeculator(_Head):
    config: MlpSpeculatorConfig

    def begin(
        self, params: DecoderParams, state: NewestState, decode_state: Any, takes_part: Array
    ) -> tuple[Array, NewestState]:
        del takes_part
        roots = token_at(decode_state.history, decode_state.cache.lengths)
        return mlp_speculator.begin(params.drafter, self.config, state.newest, roots), state

    def feed(
        self, params: DecoderParams, state: NewestState, fed: Fed
    ) -> tuple[Array, NewestState]:
        tokens = token_at(fed.history, fed.positions)
        return self._step(params, fed.hidden, tokens, fed.depth), state

    def feed_nodes(
        self, params: DecoderParams, state: NewestState, fed: FedNodes
    ) -> tuple[Array, NewestState]:
        tokens = fed.token_ids[:, jnp.array(fed.nodes) - 1].reshape(-1)
        flat = self._step(params, fed.hidden.reshape(len(tokens), -1), tokens, fed.depth)
        return flat.reshape(fed.hidden.shape), state

    def own_logits(
        self, params: DecoderParams, hidden: Array, depth: int | Array
    ) -> tuple[Array, Vocabulary]:
        def of(index: int, hidden: Array) -> Array:
            return mlp_speculator.logits(params.drafter, self.config, hidden, index)

        return _of_depth(self._branches(of, 0), depth, hidden), WHOLE

    def _step(
        self, params: DecoderParams, state: Array, token_ids: Array, depth: int | Array
    ) -> Array:
        def of(index: int, state: Array, token_ids: Array) -> Array:
            return mlp_speculator.step(params.drafter, self.config, state, token_ids, index)

        if self.config.most_drafts == 1:
            return state  # nothing is drafted after the first token
        return _of_depth(self._branches(of, 1), depth - 1, state, token_ids)

    def _branches(self, of: Callable[..., Array], first: int) -> list[Callable[..., Array]]:
        """Returns a function per draft token from `first` on; one where all have equal weights."""
        most = first + 1 if self.config.is_tied else self.config.most_drafts
        return [functools.partial(of, index) for index in range(first, most)]
