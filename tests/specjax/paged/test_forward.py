"""The flat step over pages against the uncached forward of whole sequences."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import (
    random_model,
    tiny_gpt2_config,
    tiny_llama_config,
    uncached_logits,
)

from pallas_kernels import layout
from specjax.models.base import ModelConfig, RopeConfig
from specjax.paged import forward as flat
from specjax.paged import kv_cache
from specjax.paged.kv_cache import NO_PAGE
from specjax.types import TokenBatch

ROWS, LENGTH, WIDTH = 3, 72, 8
NUM_TOKENS = ROWS * WIDTH
# float32: sums in another order, over two layers; logits are of order 1 to 10.
TOLERANCE = 1e-4

LLAMA3_ROPE = RopeConfig(
    theta=500.0, kind="llama3", factor=8.0, original_max_position_embeddings=16
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    config: ModelConfig
    page_size: int

    @property
    def pages_per_row(self) -> int:
        return -(-LENGTH // self.page_size)


SETTINGS = {
    "llama, small pages": Setting(config=tiny_llama_config(), page_size=8),
    "llama3 rope, window, large pages": Setting(
        config=tiny_llama_config(rope=LLAMA3_ROPE, layer_windows=(None, 20)),
        page_size=64,
    ),
    "gpt2, small pages": Setting(config=tiny_gpt2_config(), page_size=8),
}


@functools.cache
def compiled_step(config: ModelConfig, num_tokens: int, width: int):
    """One executable each for chunks of up to WIDTH tokens, and for single tokens."""

    @jax.jit
    def run(params, pages, history, block_table, lengths, counts):
        batch = flat.make_batch(
            history,
            block_table,
            lengths,
            counts,
            num_tokens=num_tokens,
            page_size=layout.page_size(pages[0][0]),
            num_slots=layout.num_slots(pages[0][0]),
        )
        hidden, pages = flat.forward(params, config, pages, batch, max_tokens_per_row=width)
        return flat.logits(params, config, hidden), pages, batch.row_starts

    return run


class Cached:
    """Rows that grow through the flat step; pages nobody wrote hold NaN."""

    def __init__(self, setting: Setting, params, history: np.ndarray, seed: int = 0):
        self.config, self.params = setting.config, params
        self.history = history.copy()
        num_pages = ROWS * setting.pages_per_row + 3
        pages = kv_cache.init_pages(setting.config, num_pages, setting.page_size, jnp.float32)
        self.pages = jax.tree.map(lambda leaf: jnp.full_like(leaf, jnp.nan), pages)
        order = np.random.default_rng(seed).permutation(num_pages)
        held = order[: ROWS * setting.pages_per_row]
        self.table = held.reshape(ROWS, -1).astype(np.int32)
        self.unheld = order[ROWS * setting.pages_per_row :]
        self.lengths = np.zeros(ROWS, np.int32)

    def step(self, counts, *, commit=None) -> list[np.ndarray]:
        """Feeds counts[row] tokens; returns each row's logits [count, vocab]."""
        is_single = max(counts) <= 1
        shape = (ROWS, 1) if is_single else (NUM_TOKENS, WIDTH)
        scores, self.pages, starts = compiled_step(self.config, *shape)(
            self.params,
            self.pages,
            jnp.asarray(self.history),
            jnp.asarray(self.table),
            jnp.asarray(self.lengths),
            jnp.asarray(counts, jnp.int32),
        )
        self.lengths += np.asarray(counts if commit is None else commit, np.int32)
        scores, starts = np.asarray(scores), np.asarray(starts)
        return [scores[starts[row] :][: counts[row]] for row in range(ROWS)]


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=pytest.mark.full if "window" in name else ()) for name in SETTINGS
    ],
)
def case(request):
    """Returns the setting, the weights, random texts and their uncached logits."""
    setting = SETTINGS[request.param]
    params = random_model(setting.config, seed=1).params
    rng = np.random.default_rng(2)
    texts = rng.integers(0, setting.config.vocab_size, (ROWS, LENGTH), np.int32)
    return setting, params, texts, uncached(setting.config, params, texts)


def uncached(config: ModelConfig, params, texts) -> np.ndarray:
    return np.asarray(_uncached(config)(params, jnp.asarray(texts)))


@functools.cache
def _uncached(config: ModelConfig):
    return jax.jit(lambda params, texts: uncached_logits(params, config, texts))


def assert_close(actual, expected) -> None:
    np.testing.assert_allclose(actual, expected, rtol=TOLERANCE, atol=TOLERANCE)


def test_the_texts_decide_the_logits(case):
    """Else agreement would mean little."""
    setting, params, texts, expected = case
    assert expected.std() > 0.5
    changed = texts.copy()
    changed[:, LENGTH - 10] += 1
    changed %= setting.config.vocab_size
    difference = uncached(setting.config, params, changed) - expected
    assert np.abs(difference[:, : LENGTH - 10]).max() == 0
    assert np.abs(difference[:, -1]).max() > 0.01


def test_prefill_in_chunks_of_any_size(case):
    setting, params, texts, expected = case
    cached = Cached(setting, params, texts)
    chunks = [(8, 3, 1), (8, 8, 0), (5, 0, 8)] * 4 + [(0, 7, 2)] * 3
    for counts in chunks:
        left = LENGTH - cached.lengths
        counts = [min(count, int(most)) for count, most in zip(counts, left)]
        begin = cached.lengths.copy()
        for row, scores in enumerate(cached.step(counts)):
            end = begin[row] + counts[row]
            assert_close(scores, expected[row, begin[row] : end])
    assert cached.lengths.max() == LENGTH


def test_decoding_one_by_one(case):
    setting, params, texts, expected = case
    cached = Cached(setting, params, texts)
    for position in range(LENGTH):
        # Row 1 pauses now and then: rows without tokens leave no gap.
        counts = [1, int(position % 3 > 0), 1]
        begin = cached.lengths.copy()
        for row, scores in enumerate(cached.step(counts)):
            at = begin[row]
            assert_close(scores, expected[row, at : at + counts[row]])


def test_chains_are_verified_as_whole_texts(case):
    """Wrong drafts leave keys behind; whatever follows must not see them."""
    setting, params, texts, expected = case
    cached = Cached(setting, params, texts)
    rng = np.random.default_rng(3)
    while cached.lengths.max() + WIDTH < LENGTH:
        begin = cached.lengths.copy()
        counts = rng.integers(1, WIDTH + 1, ROWS).tolist()
        right = [int(rng.integers(1, count + 1)) for count in counts]
        for row in range(ROWS):
            wrong = slice(begin[row] + right[row], begin[row] + counts[row])
            cached.history[row, wrong] += 1
        cached.history %= setting.config.vocab_size
        scores = cached.step(counts, commit=right)
        cached.history[:] = texts
        for row in range(ROWS):
            seen = expected[row, begin[row] : begin[row] + right[row]]
            assert_close(scores[row][: right[row]], seen)


def test_wrong_drafts_get_the_logits_of_their_own_text(case):
    setting, params, texts, _ = case
    cached = Cached(setting, params, texts)
    for _ in range(2):
        cached.step([8, 5, 7])
    begin = cached.lengths.copy()
    counts = [1, 4, 8]
    drafted = (texts + 5) % setting.config.vocab_size
    for row in range(ROWS):
        draft = slice(begin[row] + 1, begin[row] + counts[row])
        cached.history[row, draft] = drafted[row, draft]
    expected = uncached(setting.config, params, cached.history)
    for row, scores in enumerate(cached.step(counts)):
        assert_close(scores, expected[row, begin[row] : begin[row] + counts[row]])


def test_only_held_slots_are_written(case):
    setting, params, texts, _ = case
    cached = Cached(setting, params, texts)
    lengths = np.array([8, 3, 0])
    cached.step(lengths.tolist())
    for k_pages, v_pages in cached.pages:
        for side in (k_pages, v_pages):
            pages = np.asarray(side).swapaxes(1, 2)  # [pages, page_size, heads, dim]
            assert np.isnan(pages[cached.unheld]).all()
            for row, length in enumerate(lengths):
                own = pages[cached.table[row]].reshape(-1, *pages.shape[2:])
                assert np.isfinite(own[:length]).all()
                assert np.isnan(own[length:]).all()


@pytest.mark.parametrize("taking_part", [(1, 1, 1, 1), (0, 1, 0, 1), (0, 0, 0, 1), (0, 0, 0, 0)])
def test_a_batch_of_single_tokens_is_that_of_make_batch(taking_part):
    history = jnp.arange(4 * 12, dtype=jnp.int32).reshape(4, 12)
    table = jnp.array([[0, 1, 2], [3, NO_PAGE, NO_PAGE], [5, 4, NO_PAGE], [6, 7, 8]], jnp.int32)
    place = history, table, jnp.array([11, 3, 5, 12], jnp.int32)  # the last is past its history
    counts, sizes = jnp.array(taking_part), {"page_size": 4, "num_slots": 36}
    batch = flat.make_decode_batch(*place, counts > 0, **sizes)
    expected = flat.make_batch(*place, counts, num_tokens=4, **sizes)
    num_tokens = sum(taking_part)
    for field in dataclasses.fields(TokenBatch):
        found, wanted = (getattr(each, field.name) for each in (batch, expected))
        if field.name == "token_ids":  # of padding they mean nothing
            found, wanted = found[:num_tokens], wanted[:num_tokens]
        np.testing.assert_array_equal(found, wanted, err_msg=field.name)


def test_make_batch_by_hand():
    history = jnp.arange(3 * 8, dtype=jnp.int32).reshape(3, 8)
    table = jnp.array([[2, 0], [1, NO_PAGE], [3, NO_PAGE]], jnp.int32)
    batch = flat.make_batch(
        history,
        table,
        jnp.array([3, 0, 3], jnp.int32),
        jnp.array([2, 0, 3], jnp.int32),
        num_tokens=7,
        page_size=4,
        num_slots=16,
    )
    assert isinstance(batch, TokenBatch)
    assert batch.row_starts.tolist() == [0, 2, 2, 5]
    assert batch.row_ids.tolist() == [0, 0, 2, 2, 2, 3, 3]
    assert batch.positions.tolist() == [3, 4, 3, 4, 5, 0, 0]
    assert batch.token_ids[:5].tolist() == [3, 4, 19, 20, 21]
    # Row 2 has no page for its positions 4 and 5; padding has no slot either.
    assert batch.slot_mapping.tolist() == [11, 0, 15, 16, 16, 16, 16]
