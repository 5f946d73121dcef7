"""Log-probabilities of given text under the policy, differentiable: what a loss is made of."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.core import Tracer
from jax.sharding import AxisType, NamedSharding, PartitionSpec, auto_axes

from pallas_kernels.running_softmax import precision_of
from specjax.models.base import LayerCache, ModelConfig, Params
from specjax.models.blocks import BRANCH
from specjax.models.families import family_of
from specjax.models.layers import dense_causal_attention
from specjax.models.layouts.converting import convert
from specjax.rl.batch import Rollout
from specjax.rl.decoder import RolloutDecoder, check_decoder
from specjax.rl.scoring import Texts
from specjax.runtime.jax_settings import own_arithmetic
from specjax.sampling.row_sampling import MIN_TEMPERATURE
from specjax.types import DecoderParams

# Most bytes of float32 logits that exist at once, forwards and backwards.
LOGIT_BYTES = 2**28
# Queries of a text whose attention scores exist at once, if memory is saved: with all of them the
# scores grow with the square of the width.
QUERIES_AT_ONCE = 256


class PolicyLogProbs(NamedTuple):
    """Natural log-probabilities of the completion's tokens; 0 outside completion_mask."""

    tempered: Array  # f32[num_samples, completion_width], of the logits over the temperature
    raw: Array  # f32[num_samples, completion_width], of the logits
    # f32[num_samples, completion_width], nats, of the distribution of `tempered`.
    entropy: Array


def policy_logprobs(
    decoder: RolloutDecoder,
    params: Params | DecoderParams,
    batch: Rollout | Texts,
    *,
    temperature: float | Array,
    is_saving_memory: bool = True,
) -> PolicyLogProbs:
    """Returns the log-probabilities of completions under given weights; for use inside jax.grad.

    Pure and traceable. It computes what the decoder's rollouts compute, in the same dtypes and
    with the same roundings, on whole sequences instead of pages: the model's own layers, keys and
    values rounded as pages hold them, softmax in float32. Other libraries call this
    get_per_token_logps.

    Under EngineConfig(activation_dtype="float32") the gap to a rollout's own log-probabilities is
    near that of float32 even with weights in bfloat16. Without, rounding in bfloat16 depends on
    how many tokens are computed at once, and the gap is what that makes: docs/policy-logprobs.md.

    Args:
      params: as for `rollout`, traced or not; a float dtype other than the decoder's is cast to
        it, and gradients have the dtype that was given.
      batch: a Rollout, or any texts. Padding may stand anywhere.
      temperature: that the texts were sampled with, a number or f32[num_samples]. At 0 `tempered`
        equals `raw`.
      is_saving_memory: whether the backward pass computes the inside of layers, and logits, a
        second time instead of keeping them, and attention goes over 256 queries of a text at a
        time.

    Raises:
      ValueError: the tree is not in the decoder's layout, or a temperature that is not traced is
        none.
    """
    check_decoder(decoder)
    if not isinstance(batch, Rollout | Texts):
        raise TypeError(f"batch is {batch!r:.100}; expected a Rollout or specjax.Texts.")
    given = params.target if isinstance(params, DecoderParams) else params
    text = Texts(*(jnp.asarray(getattr(batch, name)) for name in Texts._fields))
    heat = _checked_temperature(temperature, len(text.prompt_ids))
    with own_arithmetic():
        run = functools.partial(_policy_logprobs, decoder, is_saving_memory)
        return _over_automatic_axes(run, given, text, heat)


def _checked_temperature(temperature: float | Array, num_samples: int) -> Array:
    """Returns temperatures, f32[] or f32[num_samples]; raises ValueError for what is none."""
    heat = jnp.asarray(temperature, jnp.float32)
    is_known = not isinstance(heat, Tracer)
    if heat.shape not in ((), (num_samples,)) or (is_known and not np.all(np.asarray(heat) >= 0)):
        raise ValueError(
            f"temperature={temperature!r:.200} must be a number of at least 0, or one for each of "
            f"{num_samples} samples."
        )
    return heat


def _policy_logprobs(
    decoder: RolloutDecoder, is_saving_memory: bool, given: Params, texts: Texts, heat: Array
) -> PolicyLogProbs:
    config, text = decoder.running_config, _Text.of(texts)
    params = decoder.cast(convert(given, decoder.layout, decoder.config))
    at_once = QUERIES_AT_ONCE if is_saving_memory else None
    run = functools.partial(_hidden, config, decoder.pages_dtype, at_once)
    if is_saving_memory:
        run = jax.checkpoint(run, policy=jax.checkpoint_policies.save_only_these_names(BRANCH))
    hidden = run(params, text)
    before = jnp.take_along_axis(hidden, text.before[..., None], axis=1)
    heat = jnp.broadcast_to(jnp.where(heat < MIN_TEMPERATURE, 1.0, heat), before.shape[:1])
    describe = functools.partial(_described, config, params, heat)
    told = _in_chunks(describe, before, text.completion_ids, config.vocab_size)
    return PolicyLogProbs(*[jnp.where(text.completion_mask, each, 0.0) for each in told])


def _over_automatic_axes(
    run: Callable[[Params, Texts, Array], PolicyLogProbs], params: Params, texts: Texts, heat: Array
) -> PolicyLogProbs:
    """Returns run(params, texts, heat) with every mesh axis of type Auto, as layers are written.

    Results are split as completion_ids are along the first axis.
    """
    places = [jax.typeof(leaf).sharding for leaf in jax.tree.leaves((params, texts, heat))]
    explicit = [place for place in places if AxisType.Explicit in place.mesh.axis_types]
    if not explicit:
        return run(params, texts, heat)
    rows = jax.typeof(texts.completion_ids).sharding.spec[:1]
    place = NamedSharding(explicit[0].mesh, PartitionSpec(*rows))
    automatic: Any = auto_axes(run, out_sharding=place)
    return automatic(params, texts, heat)


class _Text(NamedTuple):
    """Prompts and completions side by side; arrays of [num_samples, width] unless said."""

    token_ids: Array  # i32
    mask: Array  # bool
    completion_ids: Array  # i32[num_samples, completion_width]
    completion_mask: Array  # bool[num_samples, completion_width]
    # i32[num_samples, completion_width], where the token before each of the completion stands.
    before: Array

    @classmethod
    def of(cls, batch: Texts) -> _Text:
        ids, mask = (
            jnp.concatenate([jnp.asarray(a, dtype), jnp.asarray(b, dtype)], axis=1)
            for a, b, dtype in (
                (batch.prompt_ids, batch.completion_ids, jnp.int32),
                (batch.prompt_mask, batch.completion_mask, bool),
            )
        )
        first = jnp.shape(batch.prompt_ids)[1]
        place = jnp.where(mask, jnp.arange(ids.shape[1], dtype=jnp.int32)[None], 0)
        newest = lax.cummax(place, axis=1)  # the newest token of text up to each place
        before = jnp.pad(newest, ((0, 0), (1, 0)))[:, first:-1]
        return cls(ids, mask, ids[:, first:], mask[:, first:], before)


def _hidden(
    config: ModelConfig,
    pages_dtype: jnp.dtype,
    queries_at_once: int | None,
    params: Params,
    text: _Text,
) -> Array:
    """Returns the normed output of the last layer, [num_samples, width, hidden_size]."""
    positions = jnp.maximum(jnp.cumsum(text.mask, axis=1, dtype=jnp.int32) - 1, 0)

    def attend(
        layer: int, q: Array, k: Array, v: Array, cache: LayerCache, sinks: Array | None = None
    ) -> tuple[Array, LayerCache]:
        out = dense_causal_attention(
            q,
            _as_kept(k, pages_dtype),
            _as_kept(v, pages_dtype),
            sinks=sinks,
            key_mask=text.mask,
            positions=positions,
            queries_at_once=queries_at_once,
            precision=precision_of(q.dtype),
            **config.attention_options(layer),
        )
        return out, cache

    family = family_of(config)
    hidden, _ = family.forward(
        params,
        config,
        text.token_ids,
        positions,
        attend,
        (None,) * config.num_layers,
        is_token=text.mask if family.has_experts else None,
    )
    return hidden


def _as_kept(values: Array, dtype: jnp.dtype) -> Array:
    """Returns keys or values as pages of a dtype hold them, with the gradient of values."""
    if not jnp.issubdtype(dtype, jnp.floating) or jnp.dtype(dtype).itemsize < 2:
        return values  # pages of one byte have scales, which are not known here
    kept = values.astype(dtype).astype(values.dtype)
    return values + lax.stop_gradient(kept - values)


def _described(
    config: ModelConfig, params: Params, heat: Array, hidden: Array, token_ids: Array
) -> PolicyLogProbs:
    """Returns the results for token_ids [num_samples, n] from the hidden states before them."""
    logits = family_of(config).logits(params, config, hidden)
    of_chosen = lambda scores: jnp.take_along_axis(scores, token_ids[..., None], axis=-1)[..., 0]
    tempered = jax.nn.log_softmax(logits / heat[:, None, None], axis=-1)
    raw = of_chosen(logits) - jax.nn.logsumexp(logits, axis=-1)
    entropy = -jnp.sum(jnp.exp(tempered) * tempered, axis=-1)
    return PolicyLogProbs(of_chosen(tempered), raw, entropy)


def _in_chunks(
    describe: Callable[[Array, Array], PolicyLogProbs],
    hidden: Array,
    token_ids: Array,
    vocab_size: int,
) -> PolicyLogProbs:
    """Returns describe(hidden, token_ids) over slices of the second axis, which it keeps.

    The logits of one slice exist at a time, backwards too.
    """
    rows, width = token_ids.shape
    size = min(max(1, LOGIT_BYTES // (4 * vocab_size * max(rows, 1))), max(width, 1))
    count = -(-width // size)
    if count <= 1:
        return describe(hidden, token_ids)

    def cut(x: Array) -> Array:  # [count, rows, size, ...]
        wide = jnp.pad(x, ((0, 0), (0, count * size - width)) + ((0, 0),) * (x.ndim - 2))
        return jnp.moveaxis(wide.reshape(rows, count, size, *x.shape[2:]), 1, 0)

    told = lax.map(lambda part: jax.checkpoint(describe)(*part), (cut(hidden), cut(token_ids)))
    join = lambda x: jnp.moveaxis(x, 0, 1).reshape(rows, count * size)[:, :width]
    return PolicyLogProbs(*map(join, told))
