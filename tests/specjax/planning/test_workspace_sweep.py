"""Fits of a declared half of the buckets against what XLA says of the other half."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest

from specjax.config.engine import EngineConfig
from specjax.decode.config import DecoderConfig
from specjax.decode.sizes import PromptShape, Sizes
from specjax.drafters.spec import ModelDrafter, NgramDrafter, NoDrafter
from specjax.models.base import ModelConfig
from specjax.models.layers import MOST_TOKENS_FROM_THE_LEFT
from specjax.planning.abstract_decoder import AbstractDecoder
from specjax.planning.compiled_memory import (
    burst_bucket,
    compile_bucket,
    mixed_bucket,
    prefill_bucket,
    to_fit,
)
from specjax.planning.memory_model import MemoryLimits, bytes_per_token, plan_memory
from specjax.planning.workspace_fit import combined_bytes, fit_workspaces

GB = 10**9
ROWS, FEW_ROWS, PAGES = 32, 8, 512


def shape(vocab, hidden, mlp, heads, kv_heads, head_dim, **more):
    given = dict(architecture="llama", family="llama", max_position_embeddings=1024)
    return ModelConfig(
        **{**given, **more},
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=mlp,
        num_layers=2,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
    )


def with_draft(config):
    return ModelDrafter(dataclasses.replace(config, num_layers=1))


SMALL = shape(4096, 256, 512, 4, 2, 64, tie_word_embeddings=True)
MIDDLE = shape(32_000, 512, 1536, 8, 4, 64)
QWEN = shape(
    151_936,
    512,
    1536,
    8,
    2,
    128,
    family="qwen3",
    qk_norm=True,
    tie_word_embeddings=True,
)
GPT2 = shape(
    50_257,
    768,
    3072,
    12,
    12,
    64,
    architecture="gpt2",
    family="gpt2",
    tie_word_embeddings=True,
    qkv_bias=True,
    o_bias=True,
    mlp_bias=True,
)
SHAPES = {
    "4k words, draft model": (SMALL, with_draft(SMALL)),
    "32k words, draft model": (MIDDLE, with_draft(MIDDLE)),
    "152k words, n-grams": (QWEN, NgramDrafter()),
    "gpt2, no drafter": (GPT2, NoDrafter()),
}


def decoder_of(config, drafter, num_pages, rows=ROWS):
    sizes = Sizes(
        rows=rows,
        page_size=16,
        num_pages=num_pages,
        pages_per_row=64,
        burst_steps=16,
        dtype=jnp.dtype(jnp.float32),
    )
    return AbstractDecoder(
        DecoderConfig(target=config, drafter=drafter, sizes=sizes, engine=EngineConfig())
    )


def declared_and_held_out(decoder):
    """Returns the buckets that a fit may see, and those that it must predict."""
    plain = isinstance(decoder.drafter, NoDrafter)
    depths = (0,) if plain else (0, 1, 3)
    rows = (2, 4, FEW_ROWS, None) if plain else (FEW_ROWS, None)
    bursts = [burst_bucket(decoder, k, n) for k in depths for n in rows]
    bursts.sort(key=lambda b: (b.tokens, b.rows))
    # Plans compile every prompt step.
    calls = (8, 16), (8, 64), (8, 256)
    prefills = [prefill_bucket(decoder, *call) for call in calls]
    mixed = [
        mixed_bucket(decoder, PromptShape(8, count), k) for k in depths[::-1] for count in (256, 64)
    ]
    declared = [bursts[0], *bursts[2:-1:2], bursts[-1], *prefills, mixed[0]]
    held_out = [b for b in (*bursts, *prefills, *mixed) if b not in declared]
    return declared, held_out


def check_prediction(fit, memory, *, most_known=0):
    """Within 10 % or 1 MB, and never more than 2 % too low where it may be the largest step.

    Pages get what the largest step leaves: below `most_known`, the most bytes that a compiled step
    takes, a prediction changes nothing.
    """
    actual, predicted = memory.workspace_bytes, fit(memory.bucket)
    line = f"{memory.bucket}: {actual / 1e6:.3f} MB, off by {predicted / actual - 1:+.2%}"
    assert abs(predicted - actual) <= max(0.1 * actual, 10**6), line
    assert predicted >= 0.98 * actual or actual <= most_known, line
    return predicted / actual - 1


@pytest.mark.slow
@pytest.mark.parametrize("name", SHAPES)
def test_half_of_the_buckets_says_what_the_other_half_needs(name, say):
    config, drafter = SHAPES[name]
    decoder = decoder_of(config, drafter, PAGES)
    declared, held_out = declared_and_held_out(decoder)
    samples = [compile_bucket(decoder, bucket) for bucket in declared]
    fit = fit_workspaces(to_fit(samples), known_bend=MOST_TOKENS_FROM_THE_LEFT)
    trees = decoder.abstract_params, decoder.abstract_state
    resident = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(trees))
    c = page_bytes(config, drafter) / 16
    compiled, num_pages = [], []
    for budget in (1, 2, 4):
        limits = MemoryLimits(
            free_bytes=budget * GB - resident + round(c * 16 * PAGES),
            page_size=16,
            rows=4 * ROWS,
            max_context=10**5,
        )
        plan = plan_memory(limits, c, samples)
        larger = decoder_of(config, drafter, plan.num_pages)
        real = [compile_bucket(larger, bucket) for bucket in held_out]
        most_known = max(sample.workspace_bytes for sample in samples)
        errors = [check_prediction(fit, memory, most_known=most_known) for memory in real]
        say(
            f"{name}, {budget} GB, {plan.num_pages} pages: {len(declared)} buckets say of "
            f"{len(held_out)}: {min(errors):+.2%} to {max(errors):+.2%}"
        )
        taken = plan.num_pages * 16 * c + combined_bytes([*real, *samples])
        assert taken <= 1.02 * limits.free_bytes
        compiled.append(real)
        num_pages.append(plan.num_pages)
    for few, many, more_pages in (
        (compiled[0], compiled[1], num_pages[1] - num_pages[0]),
        (compiled[1], compiled[2], num_pages[2] - num_pages[1]),
    ):
        for small, large in zip(few, many):
            found = bytes_per_token(small, large, more_tokens=16 * more_pages)
            assert found == pytest.approx(c), small.bucket
            assert large.workspace_bytes == small.workspace_bytes, small.bucket


def page_bytes(config, drafter):
    configs = [config, *getattr(drafter, "configs", ())]
    return sum(2 * c.num_layers * c.num_kv_heads * c.head_dim * 16 * 4 for c in configs)


@pytest.mark.full
def test_prefills_and_a_burst_of_a_small_shape():
    """The same, of few buckets: what is compiled quickly."""
    config = shape(256, 64, 128, 4, 2, 16)
    decoder = decoder_of(config, NoDrafter(), PAGES, rows=8)
    compile_one = functools.partial(compile_bucket, decoder)
    calls = (8, 16), (8, 64), (8, 256)
    prefills = [compile_one(prefill_bucket(decoder, *call)) for call in calls]
    mixed = {count: mixed_bucket(decoder, PromptShape(8, count), 0) for count in (64, 128, 256)}
    samples = [compile_one(burst_bucket(decoder, 0)), *prefills, compile_one(mixed[256])]
    assert to_fit(samples) == [sample for sample in samples if sample is not prefills[0]]
    fit = fit_workspaces(to_fit(samples), known_bend=MOST_TOKENS_FROM_THE_LEFT)
    check_prediction(fit, compile_one(prefill_bucket(decoder, 8, 128)))
    check_prediction(fit, compile_one(prefill_bucket(decoder, 8, 512)))
    check_prediction(fit, compile_one(mixed[64]))
    check_prediction(fit, compile_one(mixed[128]))
    samples = prefills
    larger = decoder_of(config, NoDrafter(), 2 * PAGES, rows=8)
    again = compile_bucket(larger, samples[0].bucket)
    assert bytes_per_token(samples[0], again, more_tokens=16 * PAGES) == pytest.approx(
        2 * 2 * 2 * 16 * 4
    )
    assert again.workspace_bytes == samples[0].workspace_bytes
