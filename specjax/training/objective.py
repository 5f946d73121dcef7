"""Losses of drafts along a text, and how many of them the target would accept.

With the target's distribution p and the drafter's q of a draft token, and the text's token x there:

    distribution   -sum p log q                       cross-entropy to the target's distribution
    likeliest      -log q(argmax p)
    text           -log q(x)
    overlap        1 - sum min(p, q)                  the chance that rejection sampling rejects
    accepted       -A, with  A = 1 / sum_y max(p(y), q(y) p(x) / q(x))

A is the chance that a drafter which draws with the target's own Gumbel noise (the rule `seeded`)
proposes x where the target draws x. So along text that the target has drawn, the sum over s of the
product of A over the draft tokens up to s is the expected number of accepted tokens, without bias.

Why: with noise G the target draws x if log p(x) + G(x) is largest, and the drafter proposes x if
log q(x) + G(x) is. Both hold if an exponential clock of rate 1 at x rings before those of all y
at max(p(y) / p(x), q(y) / q(x)), which has the chance 1 / sum_y max(...); divided by p(x) it is A.

Sources: Zhou et al. 2023, arXiv:2310.08461 (distribution); Li et al. 2025, arXiv:2503.01840,
section 3 (weights that fall with the depth); DSpark, arXiv:2607.05147 (overlap and confidence).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from specjax.config.checks import is_number
from specjax.training.drafts import Drafts
from specjax.training.texts import Target, TargetStates, TextBatch

# Most bytes of float32 logits that exist at once, forwards and backwards.
LOGIT_BYTES = 2**28


@dataclasses.dataclass(frozen=True, kw_only=True)
class Objective:
    """Weights of the losses; see the module.

    Attributes:
      temperature: of the text that will be drafted for, above 0: p and q are softmax of logits over
        it, but in `likeliest` and `text`, where it is 1.
      decay: the losses of draft token s weigh decay**s.
      accepted: of the expected number of accepted tokens, which is taken over whole chains and
        ignores `decay`.
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
                f"{self.temperature=} and {self.decay=} must be above 0; for text of temperature 0 "
                "raise the weight `likeliest`."
            )
        if not any((self.distribution, self.likeliest, self.text, self.overlap, self.accepted)):
            raise ValueError(
                "all weights are 0; give one of distribution, likeliest, text, overlap and "
                "accepted a weight."
            )


class Sums(NamedTuple):
    """Sums over the draft tokens of a batch, f32[depth] each, that add up over batches.

    Attributes:
      count: draft tokens.
      loss: weighted losses of single tokens, nats.
      agreed: whose likeliest token is the target's.
      overlap: sum min(p, q).
      accepted: A, see the module.
      greedy_survival, sampled_survival: draft token s and all before it agreed, or were accepted.
      chains: roots that have all their draft tokens in the text, of these.
    """

    count: Array
    loss: Array
    agreed: Array
    overlap: Array
    accepted: Array
    greedy_survival: Array
    sampled_survival: Array
    chains: Array


def loss_of(
    objective: Objective, target: Target, text: TextBatch, states: TargetStates, drafts: Drafts
) -> tuple[Array, Sums]:
    """Returns the loss of drafts, f32[], differentiable in what they were made of, and sums."""
    told = [_told(objective, target, text, states, drafts, s) for s in range(len(drafts.hidden))]
    per_token = jax.tree.map(lambda *each: jnp.stack(each), *told)  # [depth, rows, num_roots]
    count = jnp.sum(per_token.is_there, axis=(1, 2))
    total = lambda x: jnp.sum(jnp.where(per_token.is_there, x, 0.0), axis=(1, 2))
    is_whole = jnp.all(per_token.is_there > 0, axis=0)
    chains = jnp.sum(is_whole)
    along = lambda kept: jnp.sum(
        jnp.where(is_whole[None], jnp.cumprod(kept, axis=0), 0.0), axis=(1, 2)
    )
    sums = Sums(
        count=count,
        loss=total(per_token.loss),
        agreed=total(per_token.agreed),
        overlap=total(per_token.overlap),
        accepted=total(per_token.accepted),
        greedy_survival=along(per_token.agreed),
        sampled_survival=along(per_token.accepted),
        chains=jnp.broadcast_to(chains, count.shape),
    )
    decays = objective.decay ** jnp.arange(len(told), dtype=jnp.float32)
    value = jnp.sum(decays * sums.loss / jnp.maximum(count, 1.0)) / jnp.sum(decays)
    if objective.accepted:
        length = jnp.sum(sums.sampled_survival) / jnp.maximum(chains, 1.0)
        value -= objective.accepted * length / len(told)
    return value, lax.stop_gradient(sums)


class _Told(NamedTuple):
    """What is known of the draft tokens at one depth, f32[...] each."""

    is_there: Array
    loss: Array
    agreed: Array
    overlap: Array
    accepted: Array


def _told(
    objective: Objective,
    target: Target,
    text: TextBatch,
    states: TargetStates,
    drafts: Drafts,
    s: int,
) -> _Told:
    """Returns what is known of draft token s of every root, [rows, num_roots]."""
    length = text.token_ids.shape[1]
    at = jnp.minimum(drafts.roots + s, length - 1)
    following = jnp.minimum(at + 1, length - 1)
    here = lambda x, places: jnp.take_along_axis(x, places, axis=1)
    is_in_text = drafts.roots + s + 1 < text.lengths[:, None]
    is_there = drafts.is_root & is_in_text & here(text.is_learned, following)
    hidden = jnp.take_along_axis(states.hidden, at[..., None], axis=1)
    estimate = drafts.estimates[s] if drafts.estimates else None
    if estimate is None:
        objective = dataclasses.replace(objective, confidence=0.0)
        estimate = jnp.zeros(at.shape, jnp.float32)

    def compare(draft: Array, said: Array, token_ids: Array, estimate: Array) -> _Told:
        return _compare(
            objective,
            target.logits(said),
            drafts.score(draft, s),
            token_ids,
            estimate,
            drafts.target_ids,
        )

    tokens = here(text.token_ids, following)
    told = _in_chunks(
        compare, (drafts.hidden[s], hidden, tokens, estimate), target.config.vocab_size
    )
    return told._replace(is_there=is_there.astype(jnp.float32))


def _compare(
    objective: Objective,
    target_logits: Array,
    draft_logits: Array,
    token_ids: Array,
    estimate: Array,
    target_ids: Array | None,
) -> _Told:
    """Compares distributions of n draft tokens.

    Args:
      target_logits: f32[n, vocab].
      draft_logits: f32[n, tokens that the drafter can say].
      token_ids: i32[n], of the text.
      estimate: f32[n], logits.
      target_ids: see Drafts.
    """
    log_p = jax.nn.log_softmax(target_logits / objective.temperature, axis=-1)
    best, index = jnp.argmax(target_logits, axis=-1), token_ids
    can_say_best = can_say = jnp.ones(token_ids.shape, bool)
    if target_ids is not None:
        place = jnp.full(target_logits.shape[-1], len(target_ids), jnp.int32)
        place = place.at[target_ids].set(jnp.arange(len(target_ids), dtype=jnp.int32))
        log_p, index, best = log_p[:, target_ids], place[index], place[best]
        can_say, can_say_best = index < len(target_ids), best < len(target_ids)
        index, best = (jnp.minimum(each, len(target_ids) - 1) for each in (index, best))
    take = lambda x, ids: jnp.take_along_axis(x, ids[:, None], axis=-1)[:, 0]
    log_q = jax.nn.log_softmax(draft_logits / objective.temperature, axis=-1)
    p, q = jnp.exp(log_p), jnp.exp(log_q)
    outside = jnp.maximum(1.0 - jnp.sum(p, axis=-1), 0.0)  # what the drafter cannot say
    overlap = jnp.sum(jnp.minimum(p, q), axis=-1)
    accepted = _seeded_acceptance(log_p, log_q, take(log_p, index), take(log_q, index), outside)
    accepted = jnp.where(can_say, accepted, 0.0)
    raw = jax.nn.log_softmax(draft_logits, axis=-1)
    agreed = can_say_best & (jnp.argmax(draft_logits, axis=-1) == best)
    terms = {
        "distribution": -jnp.sum(p * log_q, axis=-1) / jnp.maximum(1.0 - outside, 1e-6),
        "likeliest": jnp.where(can_say_best, -take(raw, best), 0.0),
        "text": jnp.where(can_say, -take(raw, index), 0.0),
        "overlap": 1.0 - overlap,
        "confidence": _binary_cross_entropy(estimate, lax.stop_gradient(overlap)),
    }
    weigh = {name: getattr(objective, name) for name in terms}
    loss = sum(weigh[name] * term for name, term in terms.items() if weigh[name])
    loss = jnp.zeros(token_ids.shape) + loss
    return _Told(loss, loss, agreed.astype(jnp.float32), overlap, accepted)


def _seeded_acceptance(
    log_p: Array, log_q: Array, log_px: Array, log_qx: Array, outside: Array
) -> Array:
    """Returns A f32[n], see the module; computed over p(x) / q(x) so that nothing overflows.

    Args:
      log_p, log_q: f32[n, tokens].
      log_px, log_qx: f32[n], of the text's token.
      outside: f32[n], of p on tokens that have no q.
    """
    ratio = (log_px - log_qx)[:, None]
    largest = jnp.maximum(log_p, log_q + ratio)
    total = jax.nn.logsumexp(largest, axis=-1)
    return jnp.exp(-jnp.logaddexp(total, jnp.log(jnp.maximum(outside, 1e-30))))


def _binary_cross_entropy(logits: Array, labels: Array) -> Array:
    """Returns f32[n], nats, for labels between 0 and 1."""
    return jax.nn.softplus(logits) - labels * logits


def _in_chunks(compare: Callable[..., _Told], arrays: tuple[Any, ...], vocab_size: int) -> _Told:
    """Returns compare(*arrays) of arrays [rows, num_roots, ...], [rows, num_roots].

    The logits of one slice exist at a time, backwards too.
    """
    rows, roots = arrays[0].shape[:2]
    flat = [x.reshape(rows * roots, *x.shape[2:]) for x in arrays]
    size = max(1, LOGIT_BYTES // (16 * vocab_size))
    count = -(-rows * roots // size)
    if count <= 1:
        told = compare(*flat)
        return jax.tree.map(lambda x: x.reshape(rows, roots), told)
    size = -(-rows * roots // count)

    def cut(x: Array) -> Array:  # [count, size, ...]
        wide = jnp.pad(x, ((0, count * size - rows * roots),) + ((0, 0),) * (x.ndim - 1))
        return wide.reshape(count, size, *x.shape[1:])

    told = lax.map(lambda part: jax.checkpoint(compare)(*part), tuple(map(cut, flat)))
    return jax.tree.map(lambda x: x.reshape(-1)[: rows * roots].reshape(rows, roots), told)
