"""The drafters that are heads over a target, as hashable values."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, TypeGuard

import jax.numpy as jnp

from specjax.config.checks import CAPTURED, check_store_features, is_int
from specjax.config.speculation import SpeculationConfig
from specjax.drafters.base import (
    Block,
    Drafter,
    DrafterContext,
    DrafterSpec,
    ModelWork,
    check_no_features,
    check_no_masks,
)
from specjax.drafters.spec import Shaped, asked_for, beside_history
from specjax.heads import deferring, eagle, newest_state, parallel_eagle
from specjax.heads import dflash as dflash_head
from specjax.heads.equations import dflash, eagle3, medusa, mlp_speculator
from specjax.heads.equations import eagle as eagle1
from specjax.heads.equations.dflash import DFlashConfig
from specjax.heads.equations.eagle import EagleConfig
from specjax.heads.equations.eagle3 import Eagle3Config
from specjax.heads.equations.medusa import MedusaConfig
from specjax.heads.equations.mlp_speculator import MlpSpeculatorConfig
from specjax.models.base import ModelConfig
from specjax.paged import kv_cache
from specjax.trees.expanding import Growth
from specjax.trees.static_shapes import TreeShape

_EQUATIONS: dict[type, Any] = {
    EagleConfig: eagle1,
    Eagle3Config: eagle3,
    DFlashConfig: dflash,
    MedusaConfig: medusa,
    MlpSpeculatorConfig: mlp_speculator,
}
_OF_MATCHING = "prompt_lookup_min", "prompt_lookup_max"


class _OverTarget(DrafterSpec):
    """A head that reads hidden states of the target; `config` says which."""

    config: Any

    abstains: ClassVar[bool] = False

    @property
    def taps(self) -> tuple[int, ...]:
        return self.config.aux_layers

    @property
    def most_drafts(self) -> int | None:
        return getattr(self.config, "most_drafts", None)

    def abstract_params(self, target: ModelConfig, dtype: Any) -> Any:
        del target
        return _EQUATIONS[type(self.config)].abstract(self.config, dtype)

    def work(
        self, target: ModelConfig, dtype: Any, num_weights: int | None = None
    ) -> tuple[ModelWork, ...]:
        """Returns the work of one draft token, or of the block that drafts all: the layers, and
        the head's matrix."""
        del target, num_weights
        size, own = jnp.dtype(dtype).itemsize, getattr(self.config, "layers", None)
        products = _EQUATIONS[type(self.config)].draft_products(self.config)
        work = ModelWork(
            weight_bytes=size * products,
            token_flops=2 * products,
            context_bytes=0.0,
            context_flops=0.0,
            num_layers=1,
            block=self._block,
        )
        if own is None:
            return (work,)
        of_attention = dataclasses.replace(
            work,
            context_bytes=size * kv_cache.numbers_per_token(own),
            context_flops=4 * own.num_layers * own.num_heads * own.head_dim,
            layer_windows=own.layer_windows,
            num_layers=own.num_layers,
        )
        return (of_attention,)

    @property
    def _block(self) -> Block | None:
        """The tokens of a block that drafts all tokens of a step; None: one after the other."""
        return None

    def with_tree(self, config: SpeculationConfig) -> Any:
        """Returns the spec with all that a config says but what is of history."""
        return super().configured(config)

    def configured(self, config: SpeculationConfig) -> Any:
        return beside_history(self, config)

    @property
    def likely_faults(self) -> tuple[str, ...]:
        faults = ("it was trained for another target, or another version of this one",)
        if isinstance(self.config, Eagle3Config | DFlashConfig):
            layers = ", ".join(map(str, self.taps))
            faults += (
                f"it was trained on other hidden states than the inputs of layers {layers}: "
                "load_drafter(aux_layer_ids=...) says others",
            )
        if isinstance(self.config, EagleConfig) and self.config.is_mtp:
            faults += ("it reads the embedding and the hidden state in the other order",)
        if _takes_masks(self.config):
            token = self.config.mask_token_id
            faults += (f"it was trained with another mask token than {token}",)
        return faults


class _Storing(_OverTarget):
    """A head that may store something of each token, and run over it later (`deferring`).

    Attributes:
      store_features: as of SpeculationConfig. A field of the derived class.
    """

    store_features: bool | str | None

    @property
    def stores(self) -> str | None:
        """What it stores of each token, as of `deferring.Deferring`."""
        asked = self.store_features
        if asked == CAPTURED:
            return CAPTURED
        if asked is None:
            asked = self._stores_by_itself
        return deferring.FEATURES if asked else None

    @property
    def defers(self) -> bool:
        """Whether plain steps only store, see `Drafter.defer`."""
        return self.stores is not None

    @property
    def _stores_by_itself(self) -> bool:
        """Whether it stores features where store_features is None."""
        return False

    def bytes_per_token(self, target: ModelConfig, dtype: Any) -> int:
        """Returns the bytes of its keys and values per token, and of what it stores."""
        del target
        numbers = kv_cache.numbers_per_token(self.config.layers)
        numbers += sum(deferring.stored_widths(self.config, self.stores))
        return numbers * jnp.dtype(dtype).itemsize

    def _storing_of(self, config: SpeculationConfig) -> bool | str | None:
        """Returns what a config says of stored features, or its own."""
        return self.store_features if config.store_features is None else config.store_features


@dataclasses.dataclass(frozen=True)
class EagleDrafter(_Storing, Shaped):
    """An EAGLE or EAGLE-3 head over the target; `shape` describes its trees, None: chains.

    One with a mask token, P-EAGLE, drafts a chain in one pass (`parallel_eagle`). For
    `store_features` see `SpeculationConfig`.
    """

    config: EagleConfig | Eagle3Config
    shape: TreeShape | Growth | None = None
    store_features: bool | str | None = None

    def __post_init__(self):
        check_store_features(self.store_features)
        if self.shape is not None and _takes_masks(self.config):
            raise ValueError(
                "P-EAGLE drafts chains, in one pass; leave out speculative_token_tree and "
                "tree_top_k."
            )
        if _takes_masks(self.config):
            _check_mask(self.config)

    def with_tree(self, config: SpeculationConfig) -> EagleDrafter:
        """Returns the spec with the tree of a config.

        Raises:
          ValueError: the config sets a field that does not apply to a head over the target.
        """
        storing = self._storing_of(config)
        return dataclasses.replace(self, shape=_head_shape(self, config), store_features=storing)

    @property
    def _stores_by_itself(self) -> bool:
        """Whether it has several layers.

        Of one layer, absorbing makes keys and values alone, which takes less memory than features
        and hardly more time.
        """
        return self.config.layers.num_layers > 1

    @property
    def _block(self) -> Block | None:
        # The newest pair, whose last layer alone is run, says the first draft token: no mask does.
        return Block(-1, per_draft=1) if _takes_masks(self.config) else None

    def build(self, context: DrafterContext) -> Drafter:
        if _takes_masks(self.config):
            return parallel_eagle.drafter(self.config, context, stores=self.stores)
        shape = self._cut(context.num_speculative_tokens)
        return eagle.drafter(self.config, context, shape, stores=self.stores)


@dataclasses.dataclass(frozen=True)
class NewestStateDrafter(_OverTarget, Shaped):
    """Medusa heads or an MLP speculator over the target; `shape` describes its trees, None: chains.

    It drafts at most `config.most_drafts` tokens; a larger K of a chain drafts no more.
    """

    config: MedusaConfig | MlpSpeculatorConfig
    shape: TreeShape | Growth | None = None

    def with_tree(self, config: SpeculationConfig) -> NewestStateDrafter:
        """Returns the spec with the tree of a config.

        Raises:
          ValueError: the config sets a field that does not apply to a head over the target, or its
            tree is deeper than the head drafts.
        """
        check_no_features(config, "a Medusa head or an MLP speculator")
        shape, most = _head_shape(self, config), self.config.most_drafts
        if shape is not None and shape.max_depth > most:
            raise ValueError(
                f"a tree of depth {shape.max_depth} is deeper than the {most} tokens that this "
                "head drafts; use one of fewer levels."
            )
        return dataclasses.replace(self, shape=shape)

    def build(self, context: DrafterContext) -> Drafter:
        return newest_state.drafter(self.config, context, self._cut(context.num_speculative_tokens))


def _head_shape(
    spec: EagleDrafter | NewestStateDrafter, config: SpeculationConfig
) -> TreeShape | Growth | None:
    """Returns the tree of a config for a head over the target, or the head's own.

    Raises:
      ValueError: the config sets a field that does not apply to such a head.
    """
    if config.max_model_len is not None:
        raise ValueError(
            f"max_model_len={config.max_model_len!r} does not apply to a head over the target; "
            "leave it out."
        )
    if not _takes_masks(spec.config):
        check_no_masks(config, type(spec).__name__)
    elif config.parallel_drafting is False:
        raise ValueError(
            "parallel_drafting=False, and P-EAGLE is trained to draft in one pass; leave it out, "
            "or give an EAGLE-3 head."
        )
    of_matching = [name for name in _OF_MATCHING if asked_for(config, name) is not None]
    if of_matching:
        raise ValueError(
            f"{' and '.join(of_matching)} of the config would bound n-gram matches, and the "
            f"drafter is {type(spec).__name__!r}; leave what is named out."
        )
    return spec.shape_of(config, spec.config.vocab_size)


def _check_mask(config: Eagle3Config | DFlashConfig) -> None:
    """Raises ValueError for a mask that is no token of the target."""
    mask, last = config.mask_token_id, config.target_vocab_size - 1
    if not (is_int(mask) and 0 <= mask <= last):
        raise ValueError(f"mask_token_id={mask!r} must be a token of the target, 0 to {last}.")


def _takes_masks(config: Any) -> TypeGuard[Eagle3Config]:
    return isinstance(config, Eagle3Config) and config.takes_masks


@dataclasses.dataclass(frozen=True)
class DFlashDrafter(_Storing):
    """A DFlash head over the target, which drafts a chain in one pass over a block of masks.

    It drafts at most `DFlashConfig.most_drafts` tokens; a larger K drafts no more. For
    `store_features` see `SpeculationConfig`.
    """

    config: DFlashConfig
    store_features: bool | str | None = None

    has_probs: ClassVar[bool] = True

    def __post_init__(self):
        check_store_features(self.store_features)
        _check_mask(self.config)

    def with_tree(self, config: SpeculationConfig) -> DFlashDrafter:
        """Returns the spec with what a config says of stored features.

        Raises:
          ValueError: the config sets another field that does not apply to it.
        """
        # It drafts in one pass whatever the config says.
        others = dataclasses.replace(config, store_features=None, parallel_drafting=None)
        super().with_tree(others)
        return dataclasses.replace(self, store_features=self._storing_of(config))

    def tree_slots(self, num_speculative_tokens: int) -> int:
        """Returns the slots that a block takes past the newest token."""
        return self.config.num_rows(num_speculative_tokens) - 1

    @property
    def _block(self) -> Block:
        """The tokens of a block by K, as `DFlashConfig.num_rows` has them."""
        size = self.config.block_size
        if self.config.is_whole:
            return Block(size)
        return Block(self.config.first_row, per_draft=1, most=size)

    def build(self, context: DrafterContext) -> Drafter:
        return dflash_head.drafter(self.config, context, stores=self.stores)
