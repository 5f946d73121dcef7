"""Tiny random models, the uncached forward, and a drafter that follows a script."""

from __future__ import annotations

import dataclasses
import functools
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from best_first import best_first

from pallas_kernels.ngram_match import ngram_match
from specjax.api.engine import Engine
from specjax.config.engine import EngineConfig
from specjax.drafters import ngram
from specjax.drafters.base import NOT_KEPT, Draft, Drafter, DrafterContext, DrafterSpec
from specjax.drafters.spec import ModelDrafter, NgramDrafter
from specjax.heads.loading import LoadedDrafter
from specjax.models.base import Model, ModelConfig, Params
from specjax.models.families import family_of
from specjax.models.layers import dense_causal_attention
from specjax.paged.kv_cache import NO_PAGE
from specjax.sampling.seeded_noise import gumbel_noise
from specjax.testing import save_model
from specjax.testing.tiny_models import random_model as random_model
from specjax.testing.tiny_models import tiny_config
from specjax.trees.static_shapes import TreeShape
from specjax.types import Proposal

# Of whoever needs no other: tests of one engine share compiled steps between files. Calls with
# three prompts or more have the same sizes as an Engine.
ENGINE = EngineConfig(page_size=8, max_rows=4, burst_steps=4, max_context=256)
FEW_PAGES = dataclasses.replace(ENGINE, num_pages=24)  # rows are preempted
ROLLOUTS = EngineConfig(
    page_size=8,
    max_rows=4,
    burst_steps=8,
    row_buckets=(),
    max_context=96,
    numerics="invariant",
    token_bucket=8,
    max_logprobs=4,
)


def tiny_llama_config(**overrides) -> ModelConfig:
    """Returns a Llama of two layers with grouped queries, fields replaced."""
    return tiny_config(**overrides)


def tiny_gpt2_config(**overrides) -> ModelConfig:
    """Returns a GPT-2 of two layers, fields replaced."""
    fields = {
        "architecture": "gpt2",
        "family": "gpt2",
        "vocab_size": 61,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 4,
        "head_dim": 8,
        "max_position_embeddings": 256,
        "norm_eps": 1e-5,
        "tie_word_embeddings": True,
    }
    return ModelConfig(**(fields | overrides))


def tiny_llama(seed: int, **overrides) -> Model:
    """Returns a random Llama, no tokenizer; overrides are fields of its config."""
    return random_model(tiny_llama_config(**overrides), seed)


def save_llama(folder, model: Model, **keys) -> None:
    """Writes a Llama with the config.json that it is read from, and more keys in it."""
    config = model.config
    raw = {
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope.theta,
        "tie_word_embeddings": config.tie_word_embeddings,
    }
    save_model(folder, model, raw | keys)


def tiny_gpt2(seed: int, **overrides) -> Model:
    """Returns a random GPT-2, no tokenizer; overrides are fields of its config."""
    return random_model(tiny_gpt2_config(**overrides), seed)


def first_layer(target: Model) -> Model:
    """Returns the target's first layer as a draft model: right often, not always."""
    config = dataclasses.replace(target.config, num_layers=1)
    params = {**target.params, "layers": target.params["layers"][:1]}
    return dataclasses.replace(target, config=config, params=params, name="draft")


# Compiled as a whole: op by op each shape would take a hundred small executables.
@functools.partial(jax.jit, static_argnums=1)
def uncached_logits(params: Params, config: ModelConfig, token_ids) -> jax.Array:
    """Returns f32[rows, length, vocab] of whole sequences i32[rows, length]: no cache."""

    def attend(layer, q, k, v, cache, sinks=None):
        options = config.attention_options(layer)
        return dense_causal_attention(q, k, v, sinks=sinks, **options), cache

    architecture = family_of(config)
    rows, length = token_ids.shape
    positions = jnp.broadcast_to(jnp.arange(length), (rows, length))
    nothing = (None,) * config.num_layers
    hidden, _ = architecture.forward(params, config, token_ids, positions, attend, nothing)
    return architecture.logits(params, config, hidden)


@dataclasses.dataclass(frozen=True)
class ScriptedDrafter(DrafterSpec):
    """Knows how texts go on, and is wrong on purpose after a number of tokens.

    A row is drafted from the sequence that agrees with its text the longest, the
    first of equals, so sequences may come in any order and rows may be reused.
    From a root at position i the first num_right[i % len(num_right)] tokens are
    the sequence's next ones; those after them, and those past its end, are wrong.

    It has no weights and no state, and gives no probabilities.
    """

    sequences: tuple[tuple[int, ...], ...]  # prompt and output together
    num_right: tuple[int, ...]
    vocab_size: int

    def build(self, context: DrafterContext) -> Drafter:
        """Returns the drafter."""
        num_speculative_tokens = context.num_speculative_tokens
        assert not context.keeps_probs, "a script has no probabilities"
        longest = max(map(len, self.sequences)) + num_speculative_tokens + 1
        # -1 equals no token: past its end a sequence agrees with nothing.
        table = np.full((len(self.sequences), longest), -1, np.int32)
        for index, sequence in enumerate(self.sequences):
            table[index, : len(sequence)] = sequence
        num_right = np.array(self.num_right, np.int32)

        def draft(params, state, decode_state, num_tokens) -> Draft:
            del params
            root = decode_state.cache.lengths
            width = min(longest, decode_state.history.shape[1])
            text = decode_state.history[:, None, :width]  # [rows, 1, width]
            is_text = jnp.arange(width)[None, :] <= root[:, None]
            agrees = (text == table[None, :, :width]) & is_text[:, None]
            num_agreeing = jnp.sum(jnp.cumprod(agrees, axis=2), axis=2)
            best = jnp.argmax(num_agreeing, axis=1)
            ahead = jnp.arange(num_speculative_tokens)[None, :]
            place = jnp.minimum(root[:, None] + 1 + ahead, longest - 1)
            known = jnp.asarray(table)[best[:, None], place]
            is_right = ahead < jnp.asarray(num_right)[root % num_right.size][:, None]
            # One more than the right token; 0 past the sequence's end.
            wrong = (known + 1) % self.vocab_size
            token_ids = jnp.where(is_right & (known >= 0), known, wrong)
            proposal = Proposal(token_ids=token_ids, num_tokens=num_tokens)
            return Draft(proposal, state, root + 1)

        return Drafter(draft)


def race_scores(log_weights: jax.Array, keys: jax.Array) -> jax.Array:
    """Returns what `seeded` takes the argmax of, given keys u32[num_tokens, 2]: all of it."""
    return log_weights + gumbel_noise(keys, log_weights.shape[1])


def scripted_drafter(sequences, *, num_right: tuple[int, ...], vocab_size: int) -> LoadedDrafter:
    """Returns what `specjax.generate(drafter=...)` takes.

    Args:
      sequences: token ids of prompt and plain output together, one list per text.
      num_right: by the root's position, cyclically; see ScriptedDrafter.
    """
    spec = ScriptedDrafter(
        tuple(tuple(map(int, sequence)) for sequence in sequences),
        tuple(num_right),
        vocab_size,
    )
    return LoadedDrafter("scripted", spec)


@dataclasses.dataclass(frozen=True)
class AlternatingDrafter(DrafterSpec):
    """Drafts a row's tree with a model, or from matches, as its root's position decides."""

    config: ModelConfig
    shape: TreeShape
    is_tree: ClassVar[bool] = True

    @property
    def configs(self) -> tuple[ModelConfig, ...]:
        return (self.config,)

    @property
    def max_depth(self) -> int:
        return self.shape.max_depth

    def num_nodes(self, num_speculative_tokens: int) -> int:
        return self.shape.cut(num_speculative_tokens).num_nodes

    def tree_slots(self, num_speculative_tokens: int) -> int:
        return self.num_nodes(num_speculative_tokens) - 1

    def build(self, context: DrafterContext) -> Drafter:
        """Returns the drafter."""
        shape = self.shape.cut(context.num_speculative_tokens)
        context = dataclasses.replace(context, says_confidence=False)  # matches have none
        model = ModelDrafter(self.config, shape).build(context)
        # Matches enough that both trees have room for equally many tokens.
        ngram = NgramDrafter(1, 4, shape.num_drafts, shape.num_drafts).build(context)

        def draft(params, state, decode_state, num_tokens) -> Draft:
            # At random, by a hash of a few positions in a row, so that the model has
            # something to catch up.
            place = (decode_state.cache.lengths // 2).astype(jnp.uint32)
            is_matched = (place * jnp.uint32(2654435761)) >> 31 == 1
            ours = model.draft(params, state, decode_state, jnp.where(is_matched, 0, num_tokens))
            theirs = ngram.draft((), (), decode_state, num_tokens).proposal
            choose = lambda matched, drafted: jnp.where(
                is_matched.reshape(-1, *[1] * (matched.ndim - 1)), matched, drafted
            )
            proposal = jax.tree.map(choose, theirs, ours.proposal)
            kept_at = jnp.where(is_matched[:, None], NOT_KEPT, ours.kept_at)
            return Draft(proposal, ours.state, ours.written, kept_at)

        return model._replace(draft=draft)


@dataclasses.dataclass(frozen=True)
class MarginalsDrafter(DrafterSpec):
    """A parallel drafter's tree: the best paths of marginals, which matches of the text give."""

    num_matches: int
    num_drafts: int
    is_tree: ClassVar[bool] = True

    def num_nodes(self, num_speculative_tokens: int) -> int:
        return self.num_drafts + 1

    def tree_slots(self, num_speculative_tokens: int) -> int:
        return self.num_drafts

    def build(self, context: DrafterContext) -> Drafter:
        """Returns the drafter."""
        depth = context.num_speculative_tokens
        width = self.num_matches

        def draft(params, state, decode_state, num_tokens) -> Draft:
            history, length = decode_state.history, decode_state.cache.lengths + 1
            found = ngram_match(history, length, min_match=1, max_match=4, num_matches=width)
            is_found = found.lengths > 0
            tokens = ngram.continuations(history, length, found.starts, depth)
            weights = jnp.where(is_found, 0.5 ** jnp.arange(1, width + 1)[None], 0.0)
            tokens = jnp.swapaxes(tokens, 1, 2)  # [rows, depth, matches]
            is_same = tokens[:, :, :, None] == tokens[:, :, None, :]
            mass = jnp.sum(is_same * weights[:, None, None, :], axis=3)
            is_first = ~jnp.any(jnp.tril(is_same, -1), axis=3)
            is_within = jnp.arange(depth)[None, :, None] < num_tokens[:, None, None]
            probs = jnp.where(is_first & is_within, mass, 0.0)
            order = jnp.argsort(-probs, axis=2, stable=True)
            grown = best_first(
                jnp.take_along_axis(probs, order, axis=2),
                jnp.take_along_axis(tokens, order, axis=2),
                num_drafts=self.num_drafts,
            )
            proposal = Proposal(
                token_ids=grown.token_ids, num_tokens=grown.num_tokens, tree=grown.tree
            )
            return Draft(proposal, state, length)

        return Drafter(draft)


def match_by_loop(text: list[int], min_match: int, max_match: int) -> int | None:
    """Returns where the continuation of the longest, then latest, match stands."""
    for size in range(min(max_match, len(text)), min_match - 1, -1):
        suffix = text[-size:]
        for start in range(len(text) - size - 1, -1, -1):
            if text[start : start + size] == suffix:
                return start + size
    return None


def assert_engine_is_empty(engine: Engine) -> None:
    """Asserts that an engine keeps nothing of requests that are over: pages, queues, chunks.

    All of them must be over, and their chunks fetched. Pages may be kept for prefixes, by
    no holder. What the device still works on for rows that ended is read back first.
    """
    assert not engine.has_work
    loop = engine._loop
    assert loop is not None, "a closed engine has nothing to look at"
    while loop.has_work:
        assert engine.step() == []
    engine._outbox.check_is_empty()
    assert not engine._new
    assert not engine._to_end
    assert not engine._turns._line
    assert not loop._run.flights
    assert not loop._run.deadlines
    scheduler = loop.scheduler
    assert scheduler.rows == [None] * len(scheduler.rows)
    assert not scheduler.waiting._heap
    assert not scheduler.waiting._waiting
    assert not scheduler._prefilling
    assert np.all(scheduler.block_table == NO_PAGE)
    for name, figures in vars(scheduler.table).items():
        assert not figures.any(), f"{name} of an empty row: {figures}"
    scheduler.check()
    for pool in scheduler.pools:
        assert not pool._num_holders.any()
        assert pool.num_free == pool.num_pages
