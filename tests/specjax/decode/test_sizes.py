"""Token buckets of prompts: by setting or device, and which of them some tokens take."""

import types

import jax.numpy as jnp
import pytest

from specjax.configs import devices
from specjax.decode.sizes import PromptShape, PromptSizes, ridge_tokens


def device(kind, platform="tpu"):
    return types.SimpleNamespace(platform=platform, device_kind=kind)


@pytest.mark.parametrize(
    ("platform", "kind", "buckets"),
    [
        ("cpu", "cpu", (16, 64, 256)),
        ("tpu", "TPU v6 lite", (128, 512, 2048)),
        ("tpu", "TPU v5 lite", (32, 128, 512)),
        ("tpu", "TPU v5", (32, 128, 512)),
        ("gpu", "NVIDIA H100 80GB HBM3", (64, 256, 1024)),
        ("gpu", "Tesla T4", (32, 128, 512)),  # no figures of it
    ],
)
def test_the_default_holds_twice_the_ridge_of_the_device(platform, kind, buckets):
    sizes = PromptSizes.of(None, device(kind, platform), jnp.bfloat16)
    assert sizes.buckets == buckets
    assert buckets[-1] >= 2 * sizes.ridge_tokens
    figures = devices.of_kind(kind)
    if figures is not None:
        # Bytes of weights over bandwidth = operations over peak, with two of them per weight.
        weight_s = 2 / figures.bytes_per_s
        token_s = 2 / figures.flops_per_s
        assert sizes.ridge_tokens == pytest.approx(weight_s / token_s, abs=0.5)


def test_twice_the_bytes_per_weight_are_twice_the_ridge():
    in_bytes = {size: ridge_tokens("tpu", "TPU v5 lite", size) for size in (2, 4)}
    assert in_bytes[4] == pytest.approx(2 * in_bytes[2], abs=1)


@pytest.mark.parametrize(
    ("most", "buckets"),
    [(1, (1,)), (16, (16,)), (63, (63,)), (64, (16, 64)), (1000, (62, 250, 1000))],
)
def test_a_setting_is_the_largest_bucket(most, buckets):
    assert PromptSizes.of(most, device("TPU v6 lite"), jnp.bfloat16).buckets == buckets


@pytest.mark.parametrize(
    ("ridge", "num_tokens", "bucket"),
    [
        # Where tokens cost what they are, padding is avoided by several calls.
        (16, 152, 64),
        (16, 240, 256),
        (16, 24, 16),
        (16, 60, 64),
        (16, 5000, 256),
        # Where reading the weights costs as much as any of these buckets, by one.
        (500, 152, 256),
        (500, 24, 64),
        (500, 5, 16),
    ],
)
def test_tokens_take_the_bucket_that_costs_least(ridge, num_tokens, bucket):
    assert PromptSizes((16, 64, 256), ridge).best(num_tokens) == bucket


def test_places_grow_with_the_bucket_and_end_with_the_rows():
    sizes = PromptSizes((4, 64, 1024), 16)
    shapes = [PromptShape(4, 4), PromptShape(8, 64), PromptShape(16, 1024)]
    assert sizes.shapes(32) == shapes
    assert [shape.places for shape in sizes.shapes(2)] == [2, 2, 2]
