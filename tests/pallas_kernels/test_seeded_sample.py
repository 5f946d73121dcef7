"""Sampling with seeded noise: the noise, every implementation, and what they refuse."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from asked_for import quick
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import counter_noise
from pallas_kernels.seeded_sample import seeded_sample
from pallas_kernels.seeded_sample.example_inputs import EXAMPLES, Example, make_inputs
from pallas_kernels.seeded_sample.mosaic_tpu import (
    seeded_sample_mosaic_tpu,
    vmem_bytes,
)

INTERPRET = pltpu.InterpretParams(detect_races=True)
# The interpreter takes 1 to 3 s for each.
QUICK = ("one_row", "few_tokens")


def by_kernel(logits, keys, temperature, *, bias=None, thresholds=None):
    if thresholds is None:
        thresholds = jnp.full(logits.shape[0], -jnp.inf)
    return seeded_sample_mosaic_tpu(
        logits, keys, temperature, bias, thresholds, interpret=INTERPRET
    )


def by_reference(arguments, options):
    compiled = jax.jit(functools.partial(seeded_sample, implementation="reference"))
    return compiled(*arguments, **options)


def assert_same(sample, expected):
    """Log-probabilities are sums of thousands of float32 numbers, in different orders."""
    np.testing.assert_array_equal(sample.is_invalid, expected.is_invalid)
    np.testing.assert_array_equal(sample.token_ids, expected.token_ids)
    np.testing.assert_allclose(sample.logprobs, expected.logprobs, rtol=0, atol=1e-5)


# Noise


def words():
    """Every edge of a binary order, words near 0 and near 2**32, and random ones."""
    rng = np.random.default_rng(0)
    near = np.arange(-40, 41)
    edges = (2 ** np.arange(32)[:, None] + near[None]).reshape(-1)
    scattered = rng.integers(0, 2**32, 1 << 20) >> rng.integers(0, 32, 1 << 20)
    drawn = rng.integers(0, 2**32, 1 << 20)
    every = np.concatenate([edges, near, scattered, ~scattered, drawn]) % 2**32
    return jnp.asarray(every.astype(np.uint32))


def ulps(actual, exact, *, least=0.0):
    """Of f32 numbers, in units in the last place of what is exact, or of `least`."""
    size = np.maximum(np.abs(exact), least).astype(np.float32)
    return np.abs(np.asarray(actual, np.float64) - exact) / np.spacing(size)


def test_words_are_what_they_were():
    """What a key draws is part of its meaning, on every device and version."""
    keys = jnp.array([[58847309, 1029151133], [637097876, 3472169538]], jnp.uint32)
    assert counter_noise.random_bits(keys, 3).tolist() == [
        [806817661, 2710438534, 3694571888],
        [3712598452, 3030404833, 2002187367],
    ]


@pytest.mark.full
def test_the_bound_is_above_every_noise():
    """By more than rounding takes: what the bound rules out cannot win."""
    bits = words()
    bound = np.asarray(jax.jit(counter_noise.gumbel_bound)(bits), np.float64)
    for gumbel in (counter_noise.gumbel, counter_noise.gumbel_by_polynomials):
        above = bound - np.asarray(jax.jit(gumbel)(bits))
        assert above.min() > counter_noise.BOUND_SLACK / 2


def test_words_become_the_same_units_by_halves():
    bits = words()
    np.testing.assert_array_equal(
        counter_noise.open_unit(bits), counter_noise.open_unit_by_halves(bits)
    )


def test_both_logarithms_are_within_2_ulp():
    unit = counter_noise.open_unit(words())
    exponential = jax.jit(counter_noise.negative_log1m)(unit)
    assert ulps(exponential, -np.log1p(-np.asarray(unit, np.float64))).max() < 1
    logarithm = jax.jit(counter_noise.log)(exponential)
    assert ulps(logarithm, np.log(np.asarray(exponential, np.float64))).max() < 1
    sizes = np.exp(np.random.default_rng(0).uniform(-87, 88, 100_000))
    values = jnp.asarray(sizes, jnp.float32)
    exact = np.log(np.asarray(values, np.float64))
    assert ulps(jax.jit(counter_noise.log)(values), exact).max() < 1


def test_noise_is_within_2_ulp_of_float64():
    """Below 1 of those of 1: the logarithm of what is rounded near 1 is no better."""
    bits = words()
    unit = np.asarray(counter_noise.open_unit(bits), np.float64)
    exact = -np.log(-np.log1p(-unit))
    for gumbel in (counter_noise.gumbel, counter_noise.gumbel_by_polynomials):
        noise = jax.jit(gumbel)(bits)
        assert ulps(noise, exact, least=1.0).max() < 2
        # What wins is large: there nothing is lost.
        assert ulps(noise, exact)[exact > 7].max() < 1


def test_bits_and_units_of_a_kernel_are_equal(has_races):
    keys = jnp.asarray([[0, 0], [1, 2], [2**32 - 1, 2**31], [7, 2**32 - 1]], jnp.uint32)
    shape = len(keys), 256
    ids = 262_000 + jnp.arange(256, dtype=jnp.int32)[None]

    def kernel(keys, ids, bits, unit):
        bits[...] = counter_noise.random_bits(keys[...], ids[...])
        unit[...] = counter_noise.open_unit_by_halves(bits[...])

    out_shape = [jax.ShapeDtypeStruct(shape, dtype) for dtype in ("uint32", "float32")]
    bits, unit = pl.pallas_call(kernel, out_shape=out_shape, interpret=INTERPRET)(keys, ids)
    expected = counter_noise.random_bits(keys, ids)
    np.testing.assert_array_equal(bits, expected)
    np.testing.assert_array_equal(unit, counter_noise.open_unit(expected))
    assert not has_races()


# Implementations


@pytest.mark.parametrize(
    "name",
    quick(
        EXAMPLES,
        *(
            "past_a_tile",
            "bias_and_thresholds",
            "nothing_left",
            "not_finite",
            "rivals",
        ),
    ),
)
def test_xla_is_the_reference(name):
    arguments, options = make_inputs(EXAMPLES[name])
    compiled = jax.jit(functools.partial(seeded_sample, implementation="xla"))
    assert_same(compiled(*arguments, **options), by_reference(arguments, options))


@pytest.mark.full
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in EXAMPLES],
)
def test_the_kernel_is_the_reference(name, has_races):
    arguments, options = make_inputs(EXAMPLES[name])
    sample = by_kernel(*arguments, **options)
    assert_same(sample, by_reference(arguments, options))
    assert not has_races()


@pytest.mark.slow
def test_twice_the_same_bits():
    arguments, options = make_inputs(EXAMPLES["past_a_tile"])
    for one, other in zip(*(by_kernel(*arguments, **options) for _ in "12")):
        np.testing.assert_array_equal(one, other)


@pytest.mark.slow
def test_a_row_does_not_depend_on_the_others():
    """Nor on its place in the batch: alone, among others, or beside NaN."""
    (logits, keys, temperature), _ = make_inputs(EXAMPLES["two_blocks"])
    together = by_kernel(logits, keys, temperature)
    broken = by_kernel(logits.at[0].set(jnp.nan), keys, temperature)
    for row in (1, 4, 11):
        alone = by_kernel(*(x[row : row + 1] for x in (logits, keys, temperature)))
        for values in zip(together, broken, alone, strict=True):
            assert values[0][row] == values[1][row] == values[2][0]


def test_a_kernel_is_taken_only_on_its_platform():
    arguments, options = make_inputs(EXAMPLES["one_row"])
    with pytest.raises(NotImplementedError, match="runs on tpu, and this is cpu"):
        seeded_sample(*arguments, **options, implementation="mosaic_tpu")
    assert_same(seeded_sample(*arguments, **options), by_reference(arguments, options))


# What the definition says


IMPLEMENTATIONS = ["reference", "xla"]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_numbers_by_hand(implementation):
    """Softmax of log 1, log 2, log 5 is 1/8, 1/4, 5/8; at temperature 1/2 their squares."""
    logits = jnp.log(jnp.array([[1.0, 2.0, 5.0]] * 4))
    temperature = jnp.array([0.0, 0.0, 1.0, 0.5])
    thresholds = jnp.array([-jnp.inf, 1.0, 0.0, jnp.log(0.3) / 0.5])
    keys = jnp.zeros((4, 2), jnp.uint32)
    bias = jnp.zeros((4, 3)).at[0, 2].set(-jnp.inf)
    sample = seeded_sample(
        logits,
        keys,
        temperature,
        bias=bias,
        thresholds=thresholds,
        implementation=implementation,
    )
    tokens = sample.token_ids.tolist()
    assert tokens[:3] == [1, 2, 2]
    probs = {1: 4 / 29, 2: 25 / 29}
    expected = np.log([2 / 3, 1.0, 1.0, probs[tokens[3]]])
    np.testing.assert_allclose(sample.logprobs, expected, atol=1e-6)
    assert not sample.is_invalid.any()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_invalid_rows_are_token_0_and_touch_no_other(implementation):
    arguments, options = make_inputs(EXAMPLES["not_finite"])
    sample = seeded_sample(*arguments, **options, implementation=implementation)
    assert sample.is_invalid.tolist() == [True] * 6 + [False] * 3
    assert sample.token_ids[:6].tolist() == [0] * 6
    assert (sample.logprobs[:6] == -jnp.inf).all()
    assert jnp.isfinite(sample.logprobs[6:]).all()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_the_lowest_of_equals_is_chosen(implementation):
    arguments, options = make_inputs(EXAMPLES["ties"])
    sample = seeded_sample(*arguments, **options, implementation=implementation)
    np.testing.assert_array_equal(sample.token_ids, np.argmax(arguments[0], axis=1))
    assert (np.sum(arguments[0] == arguments[0].max(1, keepdims=True), 1) > 1).any()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_what_a_threshold_leaves_is_what_is_drawn(implementation):
    """One token where it is 0, the largest processed logit; then its probability is 1."""
    arguments, options = make_inputs(EXAMPLES["one_left"])
    sample = seeded_sample(*arguments, **options, implementation=implementation)
    np.testing.assert_array_equal(sample.token_ids, np.argmax(arguments[0], axis=1))
    np.testing.assert_array_equal(sample.logprobs, np.zeros(2))


# Refusals


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logits": jnp.zeros((2, 3), jnp.int32)}, "logits must be f32 or bf16"),
        ({"logits": jnp.zeros((2, 0))}, "not empty"),
        ({"logits": jnp.zeros(3)}, "logits must be"),
        ({"keys": jnp.zeros((2, 2), jnp.int32)}, r"keys must be uint32\[2, 2\]"),
        ({"temperature": jnp.zeros(3)}, r"temperature must be float32\[2\]"),
        ({"bias": jnp.zeros((2, 4))}, r"bias must be float32\[2, 3\]"),
        ({"thresholds": jnp.zeros((2, 1))}, r"thresholds must be float32\[2\]"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(change, message):
    arguments = {
        "logits": jnp.zeros((2, 3)),
        "keys": jnp.zeros((2, 2), jnp.uint32),
        "temperature": jnp.zeros(2),
    }
    with pytest.raises(ValueError, match=message):
        seeded_sample(**(arguments | change))


def test_a_vocabulary_that_does_not_fit_is_refused():
    """Those of models do, with a bias too."""
    of = jax.ShapeDtypeStruct
    widest = of((512, 262_144), jnp.float32)
    assert vmem_bytes(widest, widest) < 14 << 20
    arguments, _ = make_inputs(Example(temperature=(1.0,), vocab=500_000))
    with pytest.raises(NotImplementedError, match="bytes of VMEM"):
        by_kernel(*arguments)
