"""Verify: one forward of the target over every root and every draft token."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.implementations import by_platform
from pallas_kernels.ragged import tokens_of
from specjax.decode.accept import accept_by_equality
from specjax.decode.rules import Target, choose_by_row, decide, is_decided_by
from specjax.decode.state import DecodeState
from specjax.decode.step_spec import StepSpec
from specjax.models.base import Params
from specjax.paged.forward import (
    Part,
    Tapped,
    forward,
    make_batch,
    make_decode_batch,
    make_tree_batch,
    own_logits,
)
from specjax.paged.kv_cache import PagedKVCache, Pages
from specjax.paged.token_buckets import equal_chunk, in_buckets, round_up
from specjax.sampling import (
    Choice,
    LogProbs,
    TreeHistory,
    choose_and_score,
    choose_tokens,
    process_logits,
    target_probs,
    token_logprobs,
)
from specjax.sampling.packing import take
from specjax.sampling.processing import History
from specjax.sampling.vocabulary import Vocabulary
from specjax.trees import draft_tree
from specjax.types import Acceptance, Proposal, TokenBatch


class Verification(NamedTuple):
    """The result of verifying a proposal against the target."""

    acceptance: Acceptance
    # bool[rows, max_depth + 1]: the logits behind this token were NaN, or no token could be
    # chosen from them
    is_invalid: Array
    logprobs: LogProbs  # of acceptance.token_ids, leading [rows, max_depth + 1]
    # With spec.read only: hidden states of all tokens that were fed, and the batch index of
    # the node before each of acceptance.token_ids, i32[rows, max_depth + 1].
    tapped: Tapped | None = None
    places: Array | None = None


def verify(
    spec: StepSpec,
    params: Params,
    state: DecodeState,
    proposal: Proposal,
    beside: Part | None = None,
) -> tuple[PagedKVCache, Verification]:
    """Runs the target over each active row's root and drafts, and applies the row's rule.

    Where the drafter may propose nothing, the forward is as wide as what was proposed: the
    narrowest of `widths` that holds it. On a CPU so are logits and choices, where all fit at once.

    Args:
      beside: prompt tokens of other rows, to run through the same matmuls.

    Returns:
      The cache with the keys and values of all nodes written and lengths unchanged, and the
      verification.
    """
    size = _tokens_at_once(spec, proposal, state.rows)
    batch = _make_batch(spec, state, proposal, size)
    num_tokens = batch.token_ids.shape[0]
    by_rules = bool(spec.rules and proposal.max_depth)
    narrows = spec.decoder.narrows and proposal.max_depth > 0 and beside is None
    # On a CPU logits and choices too are as wide as what was proposed. Elsewhere they take little
    # time, and logits that the loops below hand on would take their memory twice.
    is_cpu = by_platform(cpu=lambda: True, default=lambda: False)
    has_scores = is_cpu and narrows and size is None and not by_rules

    def run(width: Width, pages: tuple[Pages, ...]) -> tuple[Array, tuple[Pages, ...], Tapped]:
        hidden, pages, tapped = forward(
            params,
            spec.config,
            pages,
            batch.first(width.num_tokens),
            max_tokens_per_row=width.per_row,
            token_bucket=spec.token_bucket,
            tensor_axis=spec.tensor_axis,
            beside=beside,
            kv_scales=state.cache.scales,
            taps=spec.read,
        )
        if has_scores:
            hidden, _ = own_logits(params, spec.config, hidden, spec.tensor_axis)
        return hidden, pages, tapped

    width = Width(num_tokens, proposal.num_nodes)
    if narrows:
        every = widths(state.rows, width)
        place = spec.most_of_shards(narrowest(every, batch.row_starts))
        states, pages, tapped = _run_at(place, every, run, state.cache.pages)
    else:
        states, pages, tapped = run(width, state.cache.pages)
    nodes, num_used = _nodes(state, proposal, batch, states), batch.row_starts[-1]
    if has_scores:
        # Shards of a vocabulary meet in the loop over parts: all devices take as many turns.
        num_used = spec.most_of_shards(num_used)
        nodes = nodes._replace(hidden=None, scores=states)
        size = state.rows if num_tokens % state.rows == 0 else None
    flat = tokens_of(batch.row_starts, num_tokens, proposal.num_nodes)
    decide_rows = _Decision(spec, params, state)
    if by_rules:
        verification = decide_rows.by_rules_in_chunks(proposal, nodes, flat)
    else:
        said = _choose(decide_rows, nodes, size, num_used)
        verification = _by_equality(proposal, said, flat)
    if spec.read:
        path = nodes_on_path(verification.acceptance)
        places = jnp.take_along_axis(flat, path, axis=1)
        verification = verification._replace(tapped=tapped, places=places)
    return dataclasses.replace(state.cache, pages=pages), verification


class Width(NamedTuple):
    """How much a forward holds: tokens of all rows together, and of any one."""

    num_tokens: int
    per_row: int


def widths(num_rows: int, widest: Width) -> list[Width]:
    """Returns the widths of a step whose drafter may propose nothing, ascending.

    The first is that of plain decoding. Of several rows few may have drafts: half of the widest
    comes between.
    """
    half = widest._replace(num_tokens=widest.num_tokens // 2)
    return [Width(num_rows, 1), *[half] * (half.num_tokens > num_rows > 1), widest]


def narrowest(every: Sequence[Width], row_starts: Array) -> Array:
    """Returns the place of the narrowest width that holds a batch, i32[].

    Args:
      every: ascending; the last holds it.
      row_starts: i32[rows + 1], of the batch.
    """
    most, per_row = row_starts[-1], jnp.max(jnp.diff(row_starts))
    is_over = [(most > width.num_tokens) | (per_row > width.per_row) for width in every[:-1]]
    return sum(is_over, jnp.int32(0))


def _run_at(
    place: Array,
    every: Sequence[Width],
    run: Callable[[Width, tuple[Pages, ...]], tuple[Array, tuple[Pages, ...], Tapped]],
    pages: tuple[Pages, ...],
) -> tuple[Array, tuple[Pages, ...], Tapped]:
    """Returns run(every[place], pages), the states of tokens padded to the widest."""
    num_tokens = every[-1].num_tokens

    def padded(width: Width, pages: tuple[Pages, ...]) -> tuple[Array, tuple[Pages, ...], Tapped]:
        hidden, pages, tapped = run(width, pages)
        pad = lambda states: jnp.pad(states, ((0, num_tokens - width.num_tokens), (0, 0)))
        return pad(hidden), pages, jax.tree.map(pad, tapped)

    # jit keeps the trace of the widest, whose shapes are those of all.
    runs = [jax.jit(functools.partial(padded, width), inline=True) for width in every]
    hidden, _, tapped = jax.eval_shape(runs[-1], pages)
    empty = lambda like: jax.tree.map(lambda each: jnp.zeros(each.shape, each.dtype), like)
    found = empty(hidden), pages, empty(tapped)
    for own, run_here in enumerate(runs):
        # A loop of one turn or none: it updates pages in place, and a conditional copies them.
        turn = lambda _, found, run_here=run_here: run_here(found[1])
        found = lax.fori_loop(0, (place == own).astype(jnp.int32), turn, found)
    return found


def nodes_on_path(acceptance: Acceptance) -> Array:
    """Returns the node before each of acceptance.token_ids, i32[rows, max_depth + 1]."""
    rows, width = acceptance.token_ids.shape
    if acceptance.nodes is None:
        return jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32), (rows, width))
    return jnp.pad(jnp.maximum(acceptance.nodes, 0), ((0, 0), (1, 0)))


class _Nodes(NamedTuple):
    """Inputs of sampling for every node; leading [num_tokens], or [rows, num_nodes]."""

    hidden: Array | None  # [..., hidden_size]; None where `scores` are there
    row_ids: Array
    positions: Array
    scores: Array | None = None  # f32[num_tokens, width], this device's slice of the logits
    # For trees only; see TreeHistory.
    roots: Array | None = None
    path_token_ids: Array | None = None


@dataclasses.dataclass(frozen=True)
class _Decision:
    """Turns hidden states into the target's choices, and applies the rules to them."""

    spec: StepSpec
    params: Params
    state: DecodeState

    def choose(self, nodes: _Nodes) -> tuple[Choice, LogProbs]:
        """Returns the target's own token after each of nodes [num_tokens], and its logprobs."""
        scores, vocabulary = self.logits(nodes)
        return choose_and_score(
            scores,
            *self.where(nodes),
            max_logprobs=self.spec.max_logprobs,
            vocabulary=vocabulary,
        )

    def by_rules_in_chunks(self, proposal: Proposal, nodes: _Nodes, flat: Array) -> Verification:
        """Verifies each row by its own rule, in chunks of rows that fit spec.logit_bytes.

        Args:
          nodes: [num_tokens], of all rows.
          flat: i32[rows, num_nodes], index of each row's nodes in `nodes`.
        """
        num_rows, num_nodes = flat.shape
        rows = jnp.arange(num_rows, dtype=jnp.int32)
        row_bytes = 4 * self.spec.config.vocab_size * num_nodes
        num_chunks = -(-num_rows // max(self.spec.logit_bytes // row_bytes, 1))
        if num_chunks == 1:
            return self.by_rules(proposal, nodes, flat, rows)
        at_once = -(-num_rows // num_chunks)
        # The last chunk repeats the last row.
        chunks = jnp.minimum(jnp.arange(num_chunks * at_once), num_rows - 1)
        own = jnp.arange(at_once * num_nodes).reshape(at_once, num_nodes)
        decided = lax.map(
            lambda rows: self.by_rules(
                _at(proposal, rows), _at(nodes, flat[rows].reshape(-1)), own, rows
            ),
            chunks.astype(jnp.int32).reshape(-1, at_once),
        )
        return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:num_rows], decided)

    def by_rules(self, proposal: Proposal, nodes: _Nodes, flat: Array, rows: Array) -> Verification:
        """Verifies the rows i32[n], whose nodes are nodes[flat], flat i32[n, num_nodes]."""
        state, where = self.state, self.where(nodes)
        scores, vocabulary = self.logits(nodes)
        processed = process_logits(scores, *where, vocabulary=vocabulary)
        choice = choose_tokens(scores, *where, processed=processed, vocabulary=vocabulary)
        seeds, roots = state.sampling.seeds[rows], state.cache.lengths[rows]
        rules, temperature = state.rules[rows], state.sampling.temperature[rows]
        has_rule = [
            jnp.any(state.is_active[rows] & is_decided_by(rule, rules, temperature))
            for rule in self.spec.rules
        ]
        probs = lax.cond(
            functools.reduce(jnp.logical_or, has_rule),
            lambda: target_probs(processed, state.sampling, nodes.row_ids, vocabulary),
            lambda: jnp.zeros_like(processed),
        )
        target = Target(choice.token_ids[flat], probs[flat], vocabulary)
        proposal = _of_slices(proposal, probs.shape[1], vocabulary)
        acceptance = accept_by_equality(proposal, target.token_ids)
        for rule, is_used in zip(self.spec.rules, has_rule):
            own = functools.partial(
                decide, rule, self.spec.rule_options, proposal, target, seeds, roots
            )
            choose = functools.partial(choose_by_row, rules, rule, temperature)
            acceptance = lax.cond(
                is_used,
                lambda before, own=own, choose=choose: choose(own(), before),
                lambda before: before,
                acceptance,
            )
        path = jnp.take_along_axis(flat, nodes_on_path(acceptance), axis=1)
        # Inactive rows have no nodes: their entries of `flat` point at other rows' nodes.
        is_emitted = state.is_active[rows][:, None] & (
            jnp.arange(path.shape[1])[None] <= acceptance.num_accepted[:, None]
        )
        num_tokens = scores.shape[0]
        # Nodes outside the path get the logprob of token 0, which is not read.
        following = jnp.zeros(num_tokens, jnp.int32)
        following = following.at[jnp.where(is_emitted, path, num_tokens)].set(
            acceptance.token_ids, mode="drop"
        )
        logprobs = token_logprobs(
            scores,
            following,
            *where,
            max_logprobs=self.spec.max_logprobs,
            processed=processed,
            vocabulary=vocabulary,
        )
        is_invalid, logprobs = take((choice.is_invalid, logprobs), path)
        return Verification(acceptance, is_invalid, logprobs)

    def logits(self, nodes: _Nodes) -> tuple[Array, Vocabulary]:
        spec = self.spec
        if nodes.scores is None:
            assert nodes.hidden is not None
            return own_logits(self.params, spec.config, nodes.hidden, spec.tensor_axis)
        width, vocab_size = nodes.scores.shape[1], spec.config.vocab_size
        return nodes.scores, Vocabulary.of_width(width, vocab_size, spec.tensor_axis)

    def where(self, nodes: _Nodes) -> tuple[Any, Array, Array, History]:
        """Returns sampling parameters, row, position and prefix of each of nodes [num_tokens]."""
        history: History = self.state.history
        if nodes.roots is not None and nodes.path_token_ids is not None:
            history = TreeHistory(history, nodes.roots, nodes.path_token_ids)
        return self.state.sampling, nodes.row_ids, nodes.positions, history


def _of_slices(proposal: Proposal, width: int, vocabulary: Vocabulary) -> Proposal:
    """Returns the proposal with this device's slice of its probabilities, as the target's are."""
    if proposal.probs is None:
        return proposal
    return dataclasses.replace(proposal, probs=vocabulary.slice_of(proposal.probs, width))


def _choose(
    decision: _Decision, nodes: _Nodes, size: int | None, num_used: Array
) -> tuple[Choice, LogProbs]:
    """Returns decision.choose of all nodes, computed in chunks of `size` unless it is None."""
    if size is None:
        return decision.choose(nodes)
    choose = lambda nothing, part: (nothing, decision.choose(part))
    return in_buckets(choose, (), nodes, size, num_used)[1]


def _by_equality(proposal: Proposal, said: tuple[Choice, LogProbs], flat: Array) -> Verification:
    """Accepts the drafts that equal the target's choice.

    Args:
      said: of all nodes, leading [num_tokens].
      flat: i32[rows, num_nodes], index of each row's nodes in `said`.
    """
    if proposal.tree is None:  # a chain's path is all of its nodes, in order
        choice, logprobs = take(said, flat)
        acceptance = accept_by_equality(proposal, choice.token_ids)
        return Verification(acceptance, choice.is_invalid, logprobs)
    acceptance = accept_by_equality(proposal, said[0].token_ids[flat])
    path = jnp.take_along_axis(flat, nodes_on_path(acceptance), axis=1)
    is_invalid, logprobs = take((said[0].is_invalid, said[1]), path)
    return Verification(acceptance, is_invalid, logprobs)


def _make_batch(
    spec: StepSpec, state: DecodeState, proposal: Proposal, size: int | None
) -> TokenBatch:
    """Lays out each active row's root and draft tokens, in whole buckets of `size`."""
    cache = state.cache
    counts = jnp.where(state.is_active, proposal.num_tokens + 1, 0)
    place = state.history, cache.block_table, cache.lengths, counts
    num_tokens = round_up(_num_nodes(spec, proposal, state.rows), size)
    if proposal.num_nodes == 1 and num_tokens == state.rows:
        return make_decode_batch(
            *place[:3], state.is_active, page_size=cache.page_size, num_slots=cache.num_slots
        )
    if proposal.tree is None:
        return make_batch(
            *place,
            num_tokens=num_tokens,
            page_size=cache.page_size,
            num_slots=cache.num_slots,
        )
    return make_tree_batch(
        *place,
        proposal.token_ids,
        proposal.tree,
        num_tokens=num_tokens,
        page_size=cache.page_size,
        num_slots=cache.num_slots,
        by_path=spec.token_bucket is not None,
    )


def _nodes(state: DecodeState, proposal: Proposal, batch: TokenBatch, hidden: Array) -> _Nodes:
    """Returns the inputs of sampling for every flat token."""
    nodes = _Nodes(hidden, batch.row_ids, batch.positions)
    if proposal.tree is None:
        return nodes
    row = jnp.minimum(batch.row_ids, state.rows - 1)
    node = jnp.arange(batch.row_ids.shape[0]) - batch.row_starts[row]
    node = jnp.clip(node, 0, proposal.num_nodes - 1)
    paths = draft_tree.path_token_ids(proposal.tree, proposal.token_ids)
    return nodes._replace(roots=state.cache.lengths[row], path_token_ids=paths[row, node])


def _num_nodes(spec: StepSpec, proposal: Proposal, num_rows: int) -> int:
    """Returns the most nodes that all rows together have."""
    num_nodes = proposal.num_nodes * num_rows
    if spec.max_drafts_per_shard is None:
        return num_nodes
    return min(num_rows + spec.max_drafts_per_shard, num_nodes)


def _tokens_at_once(spec: StepSpec, proposal: Proposal, num_rows: int) -> int | None:
    """Returns how many tokens have their logits computed at once; None means all of them."""
    if spec.token_bucket is not None:
        return spec.token_bucket
    num_nodes = _num_nodes(spec, proposal, num_rows)
    # Chunks of equal size: the batch is padded to a multiple of it.
    size = equal_chunk(num_nodes, spec.logit_bytes // (4 * spec.config.vocab_size))
    # Rules need whole rows, and have chunks of their own (by_rules_in_chunks).
    if size == num_nodes or (spec.rules and proposal.max_depth):
        return None
    return size


def _at(values: Any, index: Any) -> Any:
    """Returns values[index] of every array of a pytree."""
    return jax.tree.map(lambda leaf: leaf[index], values)
