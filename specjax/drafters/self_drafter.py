"""The spec of a drafter that is the target itself with weights of few bits."""

from __future__ import annotations

import dataclasses
from typing import Any

from pallas_kernels.implementations import target_platform
from specjax.config.checks import is_int
from specjax.config.names import SELF_DRAFTING
from specjax.config.speculation import SpeculationConfig
from specjax.drafters import self_draft
from specjax.drafters.base import (
    Drafter,
    DrafterContext,
    ModelWork,
    check_no_features,
    check_no_masks,
    check_num_shards,
)
from specjax.drafters.quantised_target import QuantisedTarget
from specjax.drafters.spec import HybridDrafter, Shaped, beside_history
from specjax.models.base import ModelConfig
from specjax.models.quantised import INTEGERS
from specjax.paged.work import model_work
from specjax.trees.expanding import Growth
from specjax.trees.static_shapes import TreeShape

GROUP_SIZES = {8: None, 4: 128}  # by bits, where none is asked for
_BITS = {"self-int8": 8, "self-int4": 4}
assert tuple(_BITS) == SELF_DRAFTING


@dataclasses.dataclass(frozen=True)
class SelfDrafter(Shaped):
    """The target's current weights, in 8 or 4 bits, draft; they need no training.

    They are made on the device whenever the target's weights change. Keys and values are the
    target's own.

    Attributes:
      bits: of the matrices in layers; the head has 8.
      skip_layers: layers of the target that are left out of drafts.
      group_size: most inputs of a matrix that share a scale per output. By default all of them
        at 8 bits, 128 at 4.
      shape: of its trees; None: chains.
      num_shards: set by `split`; the devices that the target is split over.
    """

    bits: int = 8
    skip_layers: tuple[int, ...] = ()
    group_size: int | None = None
    shape: TreeShape | Growth | None = None
    num_shards: int = 1

    def __post_init__(self):
        if not is_int(self.bits) or self.bits not in INTEGERS:
            raise ValueError(f"bits={self.bits!r:.100} must be 8 or 4.")
        size = self.group_size
        if size is not None and not (is_int(size) and size >= 1):
            raise ValueError(f"group_size={size!r:.100} must be a whole number from 1, or None.")
        check_num_shards(self.num_shards)
        try:
            layers = tuple(sorted(set(self.skip_layers)))
        except TypeError:
            layers = (None,)
        if not all(is_int(layer) and layer >= 0 for layer in layers):
            raise ValueError(
                f"skip_layers={self.skip_layers!r:.200} must be numbers of layers from 0, as "
                "(3, 5)."
            )
        object.__setattr__(self, "skip_layers", layers)

    @classmethod
    def named(cls, name: str) -> SelfDrafter:
        """Returns the drafter of a name in SELF_DRAFTING."""
        return cls(_BITS[name])

    def check_fits(self, target: ModelConfig) -> None:
        """Raises ValueError for layers to skip that the target lacks, or that are all it has."""
        count = target.num_layers
        wrong = [layer for layer in self.skip_layers if layer >= count]
        if wrong or len(self.skip_layers) == count:
            found = f"{wrong} are not" if wrong else "none would be left"
            raise ValueError(
                f"skip_layers={self.skip_layers} must be some of the target's {count} layers, "
                f"from 0 to {count - 1}, and {found}."
            )

    @property
    def made_by(self) -> QuantisedTarget:
        size = GROUP_SIZES[self.bits] if self.group_size is None else self.group_size
        return QuantisedTarget(self.bits, size, self.skip_layers, self.num_shards)

    @property
    def uses_target_pages(self) -> bool:
        return True

    @property
    def likely_faults(self) -> tuple[str, ...]:
        few = "more bits, smaller groups" if self.bits == 4 else "smaller groups"
        return (f"the target needs {few} or more layers: SelfDrafter(...) says others",)

    def can_split(self, num_shards: int) -> bool:
        del num_shards
        return True

    def split(self, num_shards: int) -> SelfDrafter:
        return dataclasses.replace(self, num_shards=num_shards)

    def configured(self, config: SpeculationConfig) -> SelfDrafter | HybridDrafter:
        return beside_history(self, config)

    def with_tree(self, config: SpeculationConfig) -> SelfDrafter:
        """Returns the spec with the tree of a config.

        Raises:
          ValueError: the config sets a field that does not apply to this drafter.
        """
        if config.max_model_len is not None:
            raise ValueError(
                f"max_model_len={config.max_model_len!r} does not apply to a drafter over the "
                "target's keys and values; leave it out."
            )
        check_no_masks(config, "SelfDrafter")
        check_no_features(config, "SelfDrafter")
        # A tree that expands more tokens than there are is refused once it is drawn.
        return dataclasses.replace(self, shape=self.shape_of(config, config.tree_top_k or 1))

    def abstract_params(self, target: ModelConfig, dtype: Any) -> Any:
        return self.made_by.abstract(target, dtype)

    def work(
        self, target: ModelConfig, dtype: Any, num_weights: int | None = None
    ) -> tuple[ModelWork, ...]:
        """Returns the work of one draft token: weights of few bits, and the target's keys and
        values. A CPU widens the weights first: it writes them, and reads them again."""
        del num_weights
        own = self.made_by.config(target)
        whole = model_work(own, dtype, self.num_shards)
        few = self.made_by.num_bytes(target) / self.num_shards
        if target_platform() == "cpu":
            few += 2 * whole.weight_bytes
        return (dataclasses.replace(whole, weight_bytes=few),)

    def build(self, context: DrafterContext) -> Drafter:
        return self_draft.drafter(self.made_by, context, self._cut(context.num_speculative_tokens))
