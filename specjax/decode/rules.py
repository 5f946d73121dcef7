"""Applies to each row of a step the verification rule that the row uses."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from specjax.decode import accept
from specjax.sampling.seeded_noise import ACCEPT, RECOVER, node_role, uniforms
from specjax.sampling.vocabulary import WHOLE, Vocabulary
from specjax.types import (
    BLOCK,
    LENIENT,
    REJECTION,
    SYNTHETIC,
    TRAVERSAL,
    TYPICAL,
    Acceptance,
    Proposal,
    is_by_law,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RuleOptions:
    """Static parameters of the lossy rules."""

    lenience: float = 1.0
    typical_epsilon: float = 0.09
    typical_delta: float = 0.3
    synthetic_rates: tuple[float, ...] = ()  # by depth; the last holds for all deeper ones


NO_OPTIONS = RuleOptions()


class Target(NamedTuple):
    """The target's choice and distribution after every node."""

    token_ids: Array  # i32[rows, num_nodes], the target's own choice
    probs: Array  # f32[rows, num_nodes, vocab], rows sum to 1; or this device's slice of them
    vocabulary: Vocabulary = WHOLE  # how probs are split; proposal.probs are split alike


def decide(
    rule: int,
    options: RuleOptions,
    proposal: Proposal,
    target: Target,
    seeds: Array,
    roots: Array,
) -> Acceptance:
    """Returns the acceptance of every row under one rule.

    Args:
      rule: static, types.REJECTION or a rule after it.
      seeds: u32[rows, 2]; roots: i32[rows], the root's position. Noise is a function
        of both, and not of each node's own position: a rule that looks at a whole
        path may reject it for a draw at its end, and the next step must not use that
        draw again.
    """
    if rule == TYPICAL:
        return accept.accept_typical(
            proposal,
            target.probs,
            target.token_ids,
            epsilon=options.typical_epsilon,
            delta=options.typical_delta,
            vocabulary=target.vocabulary,
        )
    if rule == SYNTHETIC:
        rates = options.synthetic_rates
        place = jnp.minimum(jnp.arange(proposal.max_depth), len(rates) - 1)
        noise = uniforms(seeds, roots, ACCEPT, proposal.max_depth)
        rates = jnp.asarray(rates, jnp.float32)[place]
        return accept.accept_synthetic(noise, proposal, target.token_ids, rates)
    vocabulary = target.vocabulary
    noise = rule_noise(seeds, roots, proposal.num_nodes, vocabulary.size(target.probs.shape[2]))
    arguments = noise, proposal, target.probs
    if rule == LENIENT:
        lenience = jnp.full(roots.shape, options.lenience)
        return accept.accept_leniently(*arguments, lenience, vocabulary=vocabulary)
    by_law: dict[int, Callable[..., Acceptance]] = {
        REJECTION: accept.accept_by_rejection,
        BLOCK: accept.accept_by_blocks,
        TRAVERSAL: accept.accept_by_traversal,
    }
    return by_law[rule](*arguments, vocabulary=vocabulary)


def rule_noise(seeds: Array, roots: Array, num_nodes: int, vocab: int) -> Array:
    """Returns the noise of rules that compare distributions, f32[rows, num_nodes, 1 + num_draws].

    Args:
      seeds, roots: as for `decide`.
    """
    rows, count = roots.shape[0], accept.num_draws(vocab)
    accepting = uniforms(seeds, roots, ACCEPT, num_nodes)
    nodes = jnp.tile(jnp.arange(num_nodes), rows)
    recovering = uniforms(
        jnp.repeat(seeds, num_nodes, axis=0),
        jnp.repeat(roots, num_nodes),
        node_role(RECOVER, nodes),
        count,
    )
    recovering = recovering.reshape(rows, num_nodes, count)
    return jnp.concatenate([accepting[:, :, None], recovering], axis=2)


def is_decided_by(rule: int, rules: Array, temperature: Array) -> Array:
    """Returns which rows a rule applies to, bool[rows].

    At temperature 0 a rule by law equals equality, which has no rounding error.
    """
    return (rules == rule) & (~is_by_law(rules) | (temperature > 0))


def choose_by_row(
    rules: Array, rule: int, temperature: Array, own: Acceptance, others: Acceptance
) -> Acceptance:
    """Returns `own` in the rows that `rule` applies to, and `others` elsewhere.

    Args:
      rules, temperature: of the rows; see `is_decided_by`.
    """
    is_own = is_decided_by(rule, rules, temperature)

    def choose(new: Array, old: Array) -> Array:
        return jnp.where(is_own.reshape(-1, *[1] * (new.ndim - 1)), new, old)

    return jax.tree.map(choose, own, others)
