"""A drafter that keeps what it is told of the target's hidden states, to look at from outside."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.api.engine import Engine
from specjax.drafters.base import Drafter, DrafterContext, DrafterSpec, by_none, by_page
from specjax.models.base import Model, ModelConfig
from specjax.models.dense import sequence_logits
from specjax.paged import kv_cache
from specjax.paged.kv_cache import NO_PAGE


@dataclasses.dataclass(frozen=True)
class TapKeeper(DrafterSpec):
    """Drafts as another does, and keeps what `absorb` says of each token.

    Under the slot of token j + 1 lie the taps of token j side by side, and then the id of
    token j + 1 as it was told.
    """

    inner: DrafterSpec
    layers: tuple[int, ...] = (-1, 0)

    @property
    def taps(self) -> tuple[int, ...]:
        return self.layers

    @property
    def is_tree(self) -> bool:
        return self.inner.is_tree

    def num_nodes(self, num_speculative_tokens: int) -> int:
        return self.inner.num_nodes(num_speculative_tokens)

    def tree_slots(self, num_speculative_tokens: int) -> int:
        return self.inner.tree_slots(num_speculative_tokens)

    def bytes_per_token(self, target: ModelConfig, dtype: Any) -> int:
        del dtype  # float32, whatever the target's is
        return 4 * (len(self.layers) * target.hidden_size + 1)

    def build(self, context: DrafterContext) -> Drafter:
        inner = self.inner.build(context)
        width = len(context.taps) * context.target.hidden_size + 1

        def init(rows, max_length, num_pages, page_size):
            kept = jnp.full((num_pages, page_size, width), jnp.nan)
            return {"inner": inner.init(rows, max_length, num_pages, page_size), "kept": kept}

        def absorb(params, state, fed, next_token_ids, taps, row_ids, max_tokens_per_row):
            kept = state["kept"]
            num_slots = kept.shape[0] * kept.shape[1]
            slots = kv_cache.slots(
                fed.block_table,
                fed.row_ids,
                fed.positions + 1,
                page_size=kept.shape[1],
                num_slots=num_slots,
            )
            told = jnp.concatenate([*taps, next_token_ids[:, None].astype(jnp.float32)], axis=1)
            flat = kept.reshape(num_slots, width).at[slots].set(told, mode="drop")
            return state | {"kept": flat.reshape(kept.shape)}

        def draft(params, state, decode_state, num_tokens):
            drafted = inner.draft(params, state["inner"], decode_state, num_tokens)
            state = state | {"inner": drafted.state}
            return drafted._replace(state=state, written=None)

        def enter_rows(state, row_ids, drafter_lengths):
            return state | {"inner": inner.enter_rows(state["inner"], row_ids, drafter_lengths)}

        def state_axes(state):
            return {"inner": by_none(state["inner"]), "kept": by_page(state["kept"])}

        return Drafter(
            draft, init=init, absorb=absorb, enter_rows=enter_rows, state_axes=state_axes
        )


class Told:
    """What the drafter of an engine was told, beside the dense forward of its rows' tokens.

    Args:
      layers: of the keeper, from 0 to num_layers.
    """

    def __init__(self, target: Model, layers: tuple[int, ...], max_length: int):
        self._target, self._max_length = target, max_length
        run = lambda params, ids: sequence_logits(params, target.config, ids, taps=layers)[1]
        self._run = jax.jit(run)
        self.num_compared = 0
        self._filled: dict[tuple[int, int, int], list[np.ndarray]] = {}

    def check(self, engine: Engine) -> None:
        """Asserts that every row's pages hold what the dense forward says of its tokens."""
        assert engine._loop is not None
        run = engine._loop._run
        for row, told, token_ids in self._rows(run):
            expected = self.expected(token_ids)
            np.testing.assert_allclose(
                told, expected, rtol=1e-3, atol=1e-3, err_msg=f"row {row}, tokens {token_ids}"
            )
            self.num_compared += len(told)
        self.check_full_pages(run)

    def check_full_pages(self, run: Any) -> None:
        """Asserts that nobody writes to a page again that others may read."""
        pages = jax.tree.map(np.asarray, run.device_state.cache.pages)
        num_pages = run.scheduler.pools[0].num_pages
        for row in run.scheduler.occupied:
            own = run.scheduler.block_table[row.index]
            for prefix, page in zip(row.prefixes, own.tolist()):
                place = page + row.shard * num_pages
                held = [leaf[place] for leaf in jax.tree.leaves(pages)]
                before = self._filled.setdefault((row.shard, prefix, page), held)
                for was, now in zip(before, held, strict=True):
                    np.testing.assert_array_equal(was, now, err_msg="a full page was rewritten")

    def expected(self, token_ids: np.ndarray) -> np.ndarray:
        """Returns what is told of the tokens that have one after them, [tokens - 1, width]."""
        padded = np.zeros((1, self._max_length), np.int32)
        padded[0, : len(token_ids)] = token_ids
        taps = self._run(self._target.params, padded)
        told = [np.asarray(tap)[0, : len(token_ids) - 1] for tap in taps]
        return np.concatenate([*told, token_ids[1:, None]], axis=1)

    def _rows(self, run: Any) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        """Yields of every row what lies in its pages, and its tokens, the root the last."""
        state, num_shards = run.device_state, run.decoder.num_shards
        kept = np.asarray(state.drafter["kept"])
        lengths, history = np.asarray(state.cache.lengths), np.asarray(state.history)
        tables = run.scheduler.block_table  # what was reserved since is not filled
        pages_per_shard = kept.shape[0] // num_shards
        for row in run.scheduler.occupied:
            length = lengths[row.index]
            pages = tables[row.index][: length // kept.shape[1] + 1]
            assert np.all(pages != NO_PAGE)
            own = kept[pages + row.shard * pages_per_shard].reshape(-1, kept.shape[2])
            yield row.index, own[1 : length + 1], history[row.index, : length + 1]
