"""Tokens that a TPU's kernel chooses, by the interpreter, are those that XLA chooses."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.implementations import by_name, lowered_for
from pallas_kernels.seeded_sample import api
from specjax.config.engine import EngineConfig
from specjax.config.sampling import SamplingParams
from specjax.sampling import Choice, RowSampling, choose_tokens, choosing, row_values

NUM_TOKENS, VOCAB = 9, 700
PLAIN = [
    SamplingParams(temperature=temperature, ignore_eos=True) for temperature in (0.0, 0.3, 1.0, 1.7)
]
FILTERED = [
    *PLAIN[:2],
    SamplingParams(temperature=0.9, top_k=20, top_p=0.8, ignore_eos=True),
    SamplingParams(temperature=1.2, logit_bias={5: 8.0, 9: -100.0}, ignore_eos=True),
]


@pytest.fixture
def kernel_calls(monkeypatch):
    """Interprets the kernel, and notes how often it is traced."""
    calls = []
    kernel = api.seeded_sample_mosaic_tpu

    def interpreted(*arguments):
        calls.append(arguments)
        return kernel(*arguments, interpret=pltpu.InterpretParams())

    monkeypatch.setattr(api, "seeded_sample_mosaic_tpu", interpreted)
    return calls


def rows_of(params):
    fields = [
        row_values(
            one,
            prompt_length=3,
            eos_token_ids=(),
            seed=seed,
            engine_config=EngineConfig(),
        )
        for seed, one in enumerate(params)
    ]
    return RowSampling(
        **{name: jnp.asarray(np.stack([f[name] for f in fields])) for name in fields[0]}
    )


@pytest.mark.full
def test_any_implementation_of_the_op_can_be_asked_for(monkeypatch):
    def mine(logits, keys, temperature, *, implementation):
        raise NotImplementedError(f"{implementation} covers nothing.")

    names = {"seeded_sample": ("mine", "xla", "reference")}
    monkeypatch.setattr(choosing, "IMPLEMENTATIONS", names)
    monkeypatch.setattr(choosing, "seeded_sample", mine)
    logits = jnp.zeros((NUM_TOKENS, VOCAB))
    expected = pytest.raises(
        NotImplementedError, match="seeded_sample by implementation='mine': mine covers nothing"
    )
    with by_name([("seeded_sample", "mine")]), expected:
        chosen(logits, PLAIN)
    chosen(logits, PLAIN)  # the next one is taken


def chosen(logits, params) -> Choice:
    """Returns two choices of each row, and one of padding."""
    row_ids = jnp.arange(NUM_TOKENS, dtype=jnp.int32) // 2
    positions = 5 + row_ids % 2
    history = jnp.zeros((len(params), 16), jnp.int32)
    arguments = logits, rows_of(params), row_ids, positions, history
    return jax.jit(lambda *arguments: choose_tokens(*arguments))(*arguments)


@pytest.mark.slow
@pytest.mark.parametrize("params", [PLAIN, FILTERED], ids=["plain", "filtered"])
def test_tokens_are_those_of_xla(params, kernel_calls):
    rng = np.random.default_rng(0)
    logits = jnp.asarray(rng.normal(0.0, 2.0, (NUM_TOKENS, VOCAB)), jnp.float32)
    logits = logits.at[6, 3].set(jnp.nan)
    expected = chosen(logits, params)
    assert not kernel_calls
    with lowered_for("tpu"):
        actual = chosen(logits, params)
    assert kernel_calls
    np.testing.assert_array_equal(actual.is_invalid, expected.is_invalid)
    assert actual.is_invalid.tolist() == [row == 6 for row in range(NUM_TOKENS)]
    valid = ~np.asarray(expected.is_invalid)
    np.testing.assert_array_equal(actual.token_ids[valid], expected.token_ids[valid])


@pytest.mark.slow
def test_a_filter_in_another_row_changes_no_token(kernel_calls):
    """Whether logits come scaled or not, the kernel takes the same of them."""
    rng = np.random.default_rng(1)
    logits = jnp.asarray(rng.normal(0.0, 2.0, (NUM_TOKENS, VOCAB)), jnp.float32)
    with lowered_for("tpu"):
        alone = chosen(logits, [*PLAIN[:3], PLAIN[1]])
        beside = chosen(logits, [*PLAIN[:3], FILTERED[2]])
    assert len(kernel_calls) == 4
    np.testing.assert_array_equal(alone.token_ids[:6], beside.token_ids[:6])
