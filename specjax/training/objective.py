"""Losses of drafts along a text, and how many of them the target would accept.

With the target's distribution p and the drafter's q of a draft token, and the text's token x there:

    distribution   -sum p log q                       cross-entropy to the target's distribution
    likeliest      -log q(argmax p)
    text           -log q(x)
    overlap        1 - sum min(p, q)                  the chance that rejection sampling rejects
    accepted       -A, with  A = 1 / sum_y max(p(y), q(y) p(x) / q(x))

A is the chance that a drafter which draws with the target's own Gumbel noise (the rule `seeded`)
proposes x where the target draws x. So along text that the target has drawn, the sum over s of the
product of A over the draft tokens up to s is the expected number of accepted tokens of a root,
without bias. A step begins at a root with a chance that follows from those before it.

Why: with noise G the target draws x if log p(x) + G(x) is largest, and the drafter proposes x if
log q(x) + G(x) is. Both hold if an exponential clock of rate 1 at x rings before those of all y
at max(p(y) / p(x), q(y) / q(x)), which has the chance 1 / sum_y max(...); divided by p(x) it is A.

Sources: Zhou et al. 2023, arXiv:2310.08461 (distribution); Li et al. 2025, arXiv:2503.01840,
section 3 (weights that fall with the depth); DSpark, arXiv:2607.05147 (overlap and confidence).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from specjax.config.checks import is_number
from specjax.training import comparison
from specjax.training.comparison import Compared, in_slices
from specjax.training.drafts import Drafts
from specjax.training.texts import Along


def check_is_objective(objective: Any) -> None:
    """Raises TypeError for what is no Objective."""
    if not isinstance(objective, Objective):
        raise TypeError(f"objective is {objective!r:.100}; expected a training.Objective.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Objective:
    """Weights of the losses; see the module.

    Attributes:
      temperature: of the text that will be drafted for, above 0: p and q are softmax of logits over
        it, but in `likeliest` and `text`, where it is 1.
      decay: the losses of draft token s weigh decay**s.
      accepted: of the expected share of accepted tokens, of as many as a chain has. It is taken
        over whole chains, each by how likely a step begins with it, and ignores `decay`. The
        gradient takes how likely steps begin as given.
      confidence: of the cross-entropy between a confidence head and 1 - overlap.
    """

    distribution: float = 0.7
    likeliest: float = 0.3
    text: float = 0.0
    overlap: float = 0.0
    accepted: float = 0.0
    confidence: float = 1.0
    temperature: float = 1.0
    decay: float = 0.8

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not is_number(value) or not 0 <= value < math.inf:
                raise ValueError(f"{field.name}={value!r} must be a finite number of at least 0.")
        if self.temperature == 0 or self.decay == 0:
            raise ValueError(
                f"temperature={self.temperature} and decay={self.decay} must be above 0; for "
                "text of temperature 0 raise the weight `likeliest`."
            )
        if not any((self.distribution, self.likeliest, self.text, self.overlap, self.accepted)):
            raise ValueError(
                "all weights are 0; give one of distribution, likeliest, text, overlap and "
                "accepted a weight."
            )


class Chains(NamedTuple):
    """Sums over the roots that have draft token s and all before it in the text, f32[depth] each.

    A root counts by how likely a step of decoding along this text begins there. Steps pass over the
    tokens that they accept, so they begin more often where little is. Where the roots are drawn,
    that is not known, and every one counts as 1.

    Attributes:
      steps: how likely steps begin at the roots.
      survived: draft token s and all before it are kept.
    """

    steps: Any
    survived: Any


class Sums(NamedTuple):
    """Sums over the draft tokens of a batch, f32[depth] each, that add up over batches.

    Attributes:
      count: draft tokens.
      loss: weighted losses of single tokens, nats.
      agreed: whose likeliest token is the target's.
      overlap: sum min(p, q).
      accepted: A, see the module.
      greedy, sampled, by_law: of chains that are kept while they agree, are accepted, or overlap;
        the last is an approximation: rejection sampling keeps a draft token that is also the
        text's with another chance than the overlap.
    """

    count: Any
    loss: Any
    agreed: Any
    overlap: Any
    accepted: Any
    greedy: Chains
    sampled: Chains
    by_law: Chains


def loss_of(objective: Objective, along: Along, drafts: Drafts) -> tuple[Array, Sums]:
    """Returns the loss of drafts, f32[], differentiable in what they were made of, and sums."""
    per_token = _told(objective, along, drafts)
    count = jnp.sum(per_token.is_there, axis=(1, 2))
    total = lambda x: jnp.sum(jnp.where(per_token.is_there, x, 0.0), axis=(1, 2))
    is_whole = jnp.cumprod(per_token.is_there, axis=0)  # of the tokens up to each
    kept = jnp.stack([per_token.agreed, per_token.accepted, per_token.overlap])
    survived = jnp.where(is_whole[None] > 0, jnp.cumprod(kept, axis=1), 0.0)
    steps = jnp.ones_like(survived[:, 0])
    if drafts.has_all_roots:
        begin = jax.vmap(steps_along, in_axes=(0, None))
        steps = begin(lax.stop_gradient(survived), is_whole[0] > 0)
    over = lambda x: jnp.sum(steps[:, None] * x, axis=(2, 3))
    begun, survived = over(is_whole[None]), over(survived)
    greedy, sampled, by_law = map(Chains, begun, survived)
    sums = Sums(
        count=count,
        loss=total(per_token.loss),
        agreed=total(per_token.agreed),
        overlap=total(per_token.overlap),
        accepted=total(per_token.accepted),
        greedy=greedy,
        sampled=sampled,
        by_law=by_law,
    )
    return value_of(objective, sums), lax.stop_gradient(sums)


def steps_along(survived: Array, is_root: Array) -> Array:
    """Returns how likely a step begins at each place of texts, f32[rows, length].

    The step that begins at place i and accepts n draft tokens is followed by one at i + n + 1. The
    first of a text, or behind a gap, begins at its first root.

    Args:
      survived: f32[depth, rows, length], chance that draft token s of each place and all before it
        are kept; 0 where the text has none.
      is_root: bool[rows, length], places that have a first draft token.
    """
    none = jnp.zeros_like(survived[:1])
    up_to = jnp.concatenate([none + 1.0, survived, none])
    accepts = up_to[:-1] - up_to[1:]  # n = 0 ... depth draft tokens
    is_first = is_root & ~jnp.pad(is_root, ((0, 0), (1, 0)))[:, :-1]

    def place(coming: Array, at: tuple[Array, Array, Array]) -> tuple[Array, Array]:
        is_root, is_first, accepts = at
        begins = jnp.where(is_root, jnp.where(is_first, 1.0, coming[0]), 0.0)
        return jnp.concatenate([coming[1:], none[:, :, 0]]) + begins[None] * accepts, begins

    inputs = is_root.T, is_first.T, jnp.moveaxis(accepts, 2, 0)
    coming = jnp.zeros_like(accepts[:, :, 0])  # chances of the places from the next on
    return lax.scan(place, coming, inputs, unroll=8)[1].T


def value_of(objective: Objective, sums: Sums) -> Any:
    """Returns the loss that sums stand for, f32[]; depths without draft tokens have no part."""
    decays = objective.decay ** np.arange(len(sums.count), dtype=np.float32)
    weights = decays * (sums.count > 0)
    mean = sums.loss / (sums.count + (sums.count == 0))
    value = (weights * mean).sum() / (weights.sum() + (weights.sum() == 0))
    if objective.accepted:
        steps, survived = sums.sampled
        survival = survived / (steps + (steps == 0))
        value = value - objective.accepted * survival.sum() / len(sums.count)
    return value


class _Told(NamedTuple):
    """What is known of the draft tokens of every root, f32[depth, rows, num_roots] each."""

    is_there: Array
    loss: Array
    agreed: Array
    overlap: Array
    accepted: Array


def _told(objective: Objective, along: Along, drafts: Drafts) -> _Told:
    text, depth = along.text, len(drafts.hidden)
    at = functools.partial(_compared_at, objective, along, drafts)
    if drafts.is_aligned:
        # The target says one thing at a token, whichever root it is drafted from.
        firsts = [_index_of(each, drafts.hidden) for each in drafts.hidden]
        which = sorted(set(firsts))
        each = at(drafts.roots, which)
        to_roots = lambda x, s: jnp.roll(x, -s, axis=1)
        compared = [
            jax.tree.map(lambda x, s=s: to_roots(x, s), each[which.index(first)])
            for s, first in enumerate(firsts)
        ]
    else:
        compared = [at(drafts.roots + s, [s])[0] for s in range(depth)]
    ahead = drafts.roots[None] + jnp.arange(1, depth + 1)[:, None, None]
    is_learned = jnp.stack([_taken(text.is_learned, each) for each in ahead])
    is_there = drafts.is_root[None] & is_learned & (ahead < text.lengths[None, :, None])
    together = jax.tree.map(lambda *each: jnp.stack(each), *compared)
    return _Told(is_there.astype(jnp.float32), *together)


def _index_of(one: Array, arrays: Sequence[Array]) -> int:
    return next(index for index, each in enumerate(arrays) if each is one)


def _taken(x: Array, places: Array) -> Array:
    """Returns x [rows, length, ...] at places i32[rows, n], any where there is no such place."""
    places = jnp.minimum(places, x.shape[1] - 1)
    return jnp.take_along_axis(x, places.reshape(*places.shape, *(1,) * (x.ndim - 2)), axis=1)


def _compared_at(
    objective: Objective, along: Along, drafts: Drafts, places: Array, which: Sequence[int]
) -> list[Compared]:
    """Compares some draft tokens that follow the same tokens, [rows, n] for each.

    Args:
      places: i32[rows, n], of the tokens that they follow.
      which: of the draft tokens of a root.
    """
    no_estimate = jnp.zeros(places.shape, jnp.float32)
    if not drafts.estimates:
        objective = dataclasses.replace(objective, confidence=0.0)

    def compare(
        frees: bool,
        said: Array,
        token_ids: Array,
        read: tuple[Array, ...],
        estimates: tuple[Array, ...],
    ) -> list[Compared]:
        target_logits = along.target.logits(said)

        def one(s: int, target_logits: Array, read: Array, estimate: Array) -> Compared:
            logits, ids = drafts.score(read, s), drafts.target_ids
            return comparison.compare(objective, target_logits, logits, token_ids, estimate, ids)

        each = [functools.partial(one, s) for s in which]
        each = [jax.checkpoint(f) for f in each] if frees else each
        arguments = zip(read, estimates, strict=True)
        return [f(target_logits, *own) for f, own in zip(each, arguments, strict=True)]

    estimates = [drafts.estimates[s] if drafts.estimates else no_estimate for s in which]
    arrays = (
        _taken(along.hidden, places),
        _taken(along.text.token_ids, places + 1),
        tuple(drafts.hidden[s] for s in which),
        tuple(estimates),
    )
    return in_slices(compare, arrays, along.target.config.vocab_size)
