"""Models with random weights, and whether they fit a device."""

from __future__ import annotations

import dataclasses
import gc
from typing import Any, ClassVar

import jax

from specjax.api.assemble import Setup
from specjax.cli.bench.device_report.cases import Context, LeftOut
from specjax.cli.bench.device_report.sizes import NGRAM, Pair
from specjax.config.engine import EngineConfig
from specjax.config.names import DRAFTERS
from specjax.configs.models import SHAPES
from specjax.decode.decoder import shared_decoder
from specjax.drafters.base import Draft, Drafter, DrafterContext
from specjax.drafters.spec import NgramDrafter
from specjax.models.base import Model, ModelConfig
from specjax.models.families import family_of
from specjax.models.loading import default_dtype
from specjax.planning import device_memory, plans
from specjax.planning.devices import HERE, Device
from specjax.planning.named_models import find_config, find_drafter
from specjax.planning.plan_request import PlanRequest
from specjax.types import DecoderParams

PAGES_SHARE = 0.6  # of the bytes that weights leave, for pages; the rest is for steps


def config_of(name: str) -> ModelConfig:
    """Returns the shape of a name of `specjax.configs.models`, or of "tiny"."""
    if name != "tiny":
        return find_config(name)
    return dataclasses.replace(
        SHAPES["bench_60m"], vocab_size=512, hidden_size=128, intermediate_size=256, num_layers=2
    )


@dataclasses.dataclass(frozen=True)
class AlwaysNgram(NgramDrafter):
    """N-gram matching that drafts K tokens of the row's text where it finds no match, too.

    Random weights repeat nothing: with matches alone nothing would be drafted, and a step would
    cost what a plain one does.
    """

    abstains: ClassVar[bool] = False

    def build(self, context: DrafterContext) -> Drafter:
        matching = super().build(context)

        def draft(
            params: DecoderParams, state: Any, decode_state: Any, num_tokens: jax.Array
        ) -> Draft:
            found = matching.draft(params, state, decode_state, num_tokens)
            # Where nothing matches, the continuations are those of the begin of the text.
            proposal = dataclasses.replace(found.proposal, num_tokens=num_tokens)
            return found._replace(proposal=proposal)

        return matching._replace(draft=draft)


class RandomModels:
    """Random weights by name. Those that are no longer asked for are dropped."""

    def __init__(self):
        self._kept: dict[str, Model] = {}

    def pair(self, pair: Pair) -> tuple[Model, Model | str]:
        """Returns a pair, of which the target is a model and the drafter one or a name."""
        is_model = pair.drafter not in DRAFTERS
        names = [pair.target, pair.drafter] if is_model else [pair.target]
        if not self._kept.keys() <= set(names):
            self.release({name: self._kept[name] for name in names if name in self._kept})
        for name in names:
            if name not in self._kept:
                self._kept[name] = _random_model(name)
        return self._kept[pair.target], self._kept[pair.drafter] if is_model else pair.drafter

    def release(self, kept: dict[str, Model] | None = None) -> None:
        """Frees the memory of all weights, but for those that are to be kept."""
        self._kept = kept or {}
        shared_decoder.cache_clear()  # decoders hold the weights that they ran with last
        gc.collect()


def _random_model(name: str) -> Model:
    config = config_of(name)
    params = family_of(config).init(jax.random.key(0), config, default_dtype())
    return Model(config, jax.block_until_ready(params), name=name)


def plan_request(pair: Pair, num_speculative_tokens: int, engine: EngineConfig) -> PlanRequest:
    """Returns the request of a plan for a pair on the default device."""
    config = config_of(pair.target)
    return PlanRequest(
        target=config,
        target_name=pair.target,
        drafter=find_drafter(pair.drafter),
        drafter_name=pair.drafter,
        device=Device(HERE, 1, None, None),
        dtype=default_dtype(),
        num_speculative_tokens=num_speculative_tokens,
        engine=engine,
    )


def check_fits(pair: Pair, device: Any, engine: EngineConfig) -> None:
    """Raises LeftOut where a pair does not fit a device, by the plan's own check."""
    total = device_memory.total_bytes(device)
    if total is None:
        return
    limited = dataclasses.replace(engine, memory_bytes=total)
    try:
        plans.check_memory(plan_request(pair, 1, limited))
    except ValueError as error:
        raise LeftOut(f"{pair} does not fit: {error}") from error


def setup_of(context: Context, pair: Pair, engine: EngineConfig, depth: int) -> Setup:
    """Returns the setup of a pair whose pages take a part of the memory beside its weights.

    The pair's drafter NGRAM is an `AlwaysNgram`.

    Raises:
      LeftOut: the pair does not fit the device.
    """
    check_fits(pair, context.device, engine)
    target, drafter = context.models.pair(pair)
    drafter = AlwaysNgram() if drafter == NGRAM else drafter
    free = device_memory.available_bytes(context.device)
    if free is not None:
        engine = dataclasses.replace(engine, kv_cache_bytes=int(PAGES_SHARE * free))
    return Setup.of(target, drafter=drafter, num_speculative_tokens=depth or None, engine=engine)
