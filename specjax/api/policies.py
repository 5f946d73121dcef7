"""Which policy chooses K: that of the config, with what earlier runs learned."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from specjax.config.checks import is_int
from specjax.config.speculation import SpeculationConfig
from specjax.decode.decoder import Decoder
from specjax.heads.loading import LoadedDrafter
from specjax.models.layers import product_width
from specjax.policy.goodput import Goodput
from specjax.policy.interface import Fixed, SpeculationPolicy, Table
from specjax.policy.shelf import shelf_of
from specjax.policy.step_cost import Prior
from specjax.policy.survival import Survival

DEFAULT_POLICY = "goodput"  # "goodput" or "fixed", used if the config names none


def kind_of_policy(
    config: SpeculationConfig, rules: Sequence[int]
) -> type[Table | Fixed | Goodput]:
    """Returns the class of the config's policy, for steps with the given rules."""
    has_table = config.num_speculative_tokens_per_batch_size is not None
    # Under rules that compare distributions the text depends on K: a seed reproduces it
    # only if K does not depend on timing.
    policy = config.policy or ("fixed" if rules else DEFAULT_POLICY)
    if has_table and config.depth and not config.policy:
        return Table
    return Fixed if not config.depth or policy == "fixed" else Goodput


def policy_of(
    config: SpeculationConfig,
    drafter: LoadedDrafter,
    decoder: Decoder,
    acceptance_kind: str,
    prior: Callable[[], Prior | None],
) -> SpeculationPolicy:
    """Returns the policy that chooses K: the config's table, goodput, or a fixed K.

    Args:
      acceptance_kind: the kind of sampling whose acceptance goodput begins with.
      prior: returns what predicts a step's seconds by bytes and operations, if the device is known.
    """
    most, kind = config.depth, kind_of_policy(config, decoder.config.rules)
    table = config.num_speculative_tokens_per_batch_size
    if kind is Table:
        assert table is not None
        return Table(table, most)
    if kind is Fixed:
        return Fixed(most)
    known = shelf_of(decoder).known()
    num_nodes = {k: drafter.num_nodes(k) for k in range(most + 1)}
    width = product_width if decoder.device.platform == "cpu" else None
    known.costs.describe(num_nodes, prior(), width)
    kept = known.acceptance.get(acceptance_kind)
    is_bounded = decoder.config.max_drafts_per_shard is not None
    return Goodput(
        most,
        known.costs,
        survival=Survival.of_record(kept, most) if kept else None,
        depths=(most,) if drafter.is_tree else None,
        # Ranked slots would make rows depend on each other's draws under rules that compare
        # distributions; slots of trees are counted by node.
        ranks=not (drafter.is_tree or decoder.config.rules or is_bounded),
        knows_confidence=drafter.has_probs,
        abstains=decoder.config.narrows,
        ledger=known.ledgers.get(acceptance_kind),
    )


def check_policy(policy: Any) -> None:
    """Raises TypeError for what is no SpeculationPolicy."""
    lacks = [name for name in ("choose", "observe") if not callable(getattr(policy, name, None))]
    if not is_int(getattr(policy, "max_speculative_tokens", None)):
        lacks.append("max_speculative_tokens")
    if lacks:
        raise TypeError(
            f"policy={policy!r:.100} has no {' and no '.join(lacks)}; expected a "
            "specjax.policy.interface.SpeculationPolicy. Policies of specjax are named in "
            'speculative_config, as {"policy": "fixed"}.'
        )
