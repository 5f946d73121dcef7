"""A drafter's logits compared with the target's, some draft tokens at a time."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from specjax.training.texts import in_parts

if TYPE_CHECKING:
    from specjax.training.objective import Objective

# Most bytes of float32 logits that exist at once, of draft tokens of one number and of the target.
LOGIT_BYTES = 2**28


class Compared(NamedTuple):
    """What is known of some draft tokens, f32[...] each.

    Attributes:
      loss: the weighted sum of an objective's losses of single tokens, nats.
      agreed: 1.0 where the likeliest token is the target's.
      overlap: sum min(p, q).
      accepted: A, see `specjax.training.objective`.
    """

    loss: Array
    agreed: Array
    overlap: Array
    accepted: Array


def compare(
    objective: Objective,
    target_logits: Array,
    draft_logits: Array,
    token_ids: Array,
    estimate: Array,
    target_ids: Array | None,
) -> Compared:
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
    accepted = _seeded_acceptance(p, q, take(log_p, index) - take(log_q, index), outside)
    accepted = jnp.where(can_say, accepted, 0.0)
    raw = jax.nn.log_softmax(draft_logits, axis=-1)
    agreed = can_say_best & (jnp.argmax(draft_logits, axis=-1) == best) & ~jnp.isnan(overlap)
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
    return Compared(loss, agreed.astype(jnp.float32), overlap, accepted)


def _seeded_acceptance(p: Array, q: Array, log_ratio: Array, outside: Array) -> Array:
    """Returns A f32[n], see the module.

    Args:
      p, q: f32[n, tokens].
      log_ratio: f32[n], log of p(x) / q(x) of the text's token.
      outside: f32[n], of p on tokens that have no q.
    """
    # Over the larger of 1 and the ratio, so that nothing overflows: the sum is at least about 1.
    of_p, of_q = jnp.exp(-jnp.maximum(log_ratio, 0.0)), jnp.exp(jnp.minimum(log_ratio, 0.0))
    total = jnp.sum(jnp.maximum(of_p[:, None] * p, of_q[:, None] * q), axis=-1)
    return of_p / (total + of_p * outside)


def _binary_cross_entropy(logits: Array, labels: Array) -> Array:
    """Returns f32[n], nats, for labels between 0 and 1."""
    return jax.nn.softplus(logits) - labels * logits


def in_slices(compare: Callable[..., Any], arrays: Any, vocab_size: int) -> Any:
    """Returns compare(frees, *arrays) of a tree of arrays [rows, n, ...], a tree of [rows, n].

    Where there are several slices, the logits of one exist at a time, and of those to be learned
    from those of one draft token, backwards too: `frees` says so.
    """
    rows, count = jax.tree.leaves(arrays)[0].shape[:2]
    size = max(1, LOGIT_BYTES // (16 * vocab_size * rows))
    num_slices = -(-count // size)

    def of_slice(frees: bool, part: Any) -> Any:
        width = jax.tree.leaves(part)[0].shape[1]
        flat = jax.tree.map(lambda x: x.reshape(rows * width, *x.shape[2:]), part)
        return jax.tree.map(lambda x: x.reshape(rows, width), compare(frees, *flat))

    if num_slices <= 1:
        return of_slice(False, arrays)
    # A slice has some places of every row: rows stay on the devices that hold them.
    one = jax.checkpoint(functools.partial(of_slice, True))
    return in_parts(one, arrays, -(-count // num_slices))
