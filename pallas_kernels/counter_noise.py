"""Counter-based noise: random words from (key, token id), and Gumbel draws from words.

It uses only elementwise integer and float32 arithmetic, the same inside a kernel as
outside, so that both draw the same bits.
"""

from __future__ import annotations

import math

import jax.numpy as jnp
from jax import Array, lax

# Above what rounding in `gumbel_bound` and in the logarithms of the noise can take away: a
# few units in the last place of numbers below 128.
BOUND_SLACK = 1e-3

# (log(1 + f) - f + f**2 / 2) / f**3 for 1 + f from sqrt(1/2) to sqrt(2), from the constant
# on: least squares at 4,000 Chebyshev nodes, reweighted until the relative errors of the
# logarithm were even, 8e-10 at most.
_LOG_TERMS = (
    0.3333331346511841,
    -0.25000008940696716,
    0.20002113282680511,
    -0.1666799634695053,
    0.14219646155834198,
    -0.12405642122030258,
    0.11887593567371368,
    -0.11675126105546951,
    0.06747174263000488,
)
# log(2) as 355/512, of which a multiple below 2**15 is exact, and the rest.
_LOG_2_HIGH, _LOG_2_LOW = 0.693359375, -2.12194440e-4
_ONE, _ROOT_HALF = 0x3F800000, 0x3F3504F3  # bits of 1.0 and of sqrt(1/2)


def random_bits(keys: Array, token_ids: int | Array) -> Array:
    """Returns u32[num_tokens, n] of independent words, given keys u32[num_tokens, 2].

    Two rounds of a mixer that changes every output bit with about half of the
    changes of any input bit, a key word before each: within a token the words are
    a permutation of the numbers below 2**32, so no two are equal.

    Args:
      token_ids: i32[num_tokens or 1, n]; a number n stands for 0 to n - 1.
    """
    if isinstance(token_ids, int):
        token_ids = jnp.arange(token_ids)[None, :]
    return _mix(_mix(token_ids.astype(jnp.uint32) ^ keys[:, :1]) + keys[:, 1:])


def _mix(words: Array) -> Array:
    """The 32-bit finaliser of MurmurHash3 (Austin Appleby, public domain)."""
    words = (words ^ (words >> 16)) * jnp.uint32(0x85EBCA6B)
    words = (words ^ (words >> 13)) * jnp.uint32(0xC2B2AE35)
    return words ^ (words >> 16)


def open_unit(bits: Array) -> Array:
    """Maps u32 to f32 strictly inside (0, 1), small values with full relative precision."""
    return _open_unit(bits.astype(jnp.float32))


def open_unit_by_halves(bits: Array) -> Array:
    """`open_unit`, equal to the bit, for kernels: words at or above 2**31 are no int32.

    Each half of a word is exact in float32, and their sum is rounded once, as the
    conversion of the whole word is.
    """
    high, low = (
        half.astype(jnp.int32).astype(jnp.float32)
        for half in (bits >> 16, bits & jnp.uint32(0xFFFF))
    )
    return _open_unit(high * jnp.float32(2.0**16) + low)


def _open_unit(words: Array) -> Array:
    unit = (words + 0.5) * jnp.float32(2.0**-32)
    return jnp.minimum(unit, jnp.float32(1 - 2.0**-24))


def exponential(bits: Array) -> Array:
    """Returns exponential draws f32, positive and finite, of words u32.

    The smallest of thousands win a race, so they are what must be precise: a
    uniform near 0 keeps 32 random bits in float32, one near 1 only 24.
    """
    return -jnp.log1p(-open_unit(bits))


def gumbel(bits: Array) -> Array:
    """Returns standard Gumbel draws f32, finite, of words u32; -log of the exponential ones."""
    return -jnp.log(exponential(bits))


def gumbel_by_polynomials(bits: Array) -> Array:
    """`gumbel` but for the last bits, for kernels: by the logarithms below.

    A device's own log(1 - u) may be coarse where u is small, of the draws that win.
    """
    return -log(negative_log1m(open_unit_by_halves(bits)))


def gumbel_bound(bits: Array) -> Array:
    """Returns f32 above the noise of the same words, with no logarithm.

    The bits of a float read as an integer are its logarithm to base 2, up to 0.086
    too low, so -log u is at most this line through them; and -log of -log(1 - u),
    the noise, is at most -log u. Where the noise is large, and wins races, the two
    are equal and the bound is at most 0.06 + BOUND_SLACK too high. A word below 2**10,
    one in four million, loses much with its last bit: up to 1.1 too high, and safe.
    """
    # Half the bits fit an int32, whose conversion has an instruction of its own; 2**31 u
    # is at least half + 1/4.
    half = (bits >> 1).astype(jnp.int32).astype(jnp.float32)
    as_integer = lax.bitcast_convert_type(half + jnp.float32(0.25), jnp.int32)
    log_2 = math.log(2)
    highest = (31 + 127) * log_2 + BOUND_SLACK
    slope = log_2 * 2.0**-23
    return jnp.float32(highest) - as_integer.astype(jnp.float32) * jnp.float32(slope)


def log(values: Array) -> Array:
    """Returns natural logarithms f32 of positive normal numbers f32, to 2 ulp."""
    exponent = _exponent(values)
    bits = lax.bitcast_convert_type(values, jnp.int32) - (exponent << 23)
    fraction = lax.bitcast_convert_type(bits, jnp.float32) - 1.0
    return _log_of_parts(exponent, fraction)


def negative_log1m(unit: Array) -> Array:
    """Returns -log(1 - u), f32 to 2 ulp, of u f32 in (0, 1 - 2**-24]."""
    exponent = _exponent(1.0 - unit)
    scale = lax.bitcast_convert_type(_ONE - (exponent << 23), jnp.float32)
    # Of (1 - u) * scale - 1 every term is exact, and so is their sum: 1 - u is not,
    # below 1/2.
    fraction = (scale - 1.0) - unit * scale
    return -_log_of_parts(exponent, fraction)


def _exponent(values: Array) -> Array:
    """Returns e, i32, such that values / 2**e lie from sqrt(1/2) to sqrt(2)."""
    return (lax.bitcast_convert_type(values, jnp.int32) - _ROOT_HALF) >> 23


def _log_of_parts(exponent: Array, fraction: Array) -> Array:
    """Returns log((1 + fraction) * 2**exponent), small terms first."""
    exponent = exponent.astype(jnp.float32)
    series = jnp.full_like(fraction, _LOG_TERMS[-1])
    for term in _LOG_TERMS[-2::-1]:
        series = series * fraction + term
    square = fraction * fraction
    small = series * fraction * square + exponent * _LOG_2_LOW - 0.5 * square
    return exponent * _LOG_2_HIGH + (fraction + small)
