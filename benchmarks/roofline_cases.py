"""The steps whose bytes are counted: models, drafts, rows and devices; compiled from shapes."""

from __future__ import annotations

import dataclasses
import functools
import gzip
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar, NamedTuple

from pallas_kernels.implementations import lowered_for
from specjax.config.engine import EngineConfig
from specjax.config.speculation import SpeculationConfig
from specjax.configs import heads as published
from specjax.configs.models import SHAPES
from specjax.drafters.self_drafter import SelfDrafter
from specjax.drafters.spec import DrafterSpec, ModelDrafter, NgramDrafter, NoDrafter
from specjax.heads.equations.dflash import DFlashConfig
from specjax.heads.equations.eagle3 import Eagle3Config
from specjax.heads.specs import DFlashDrafter, EagleDrafter
from specjax.models.base import ModelConfig, RopeConfig
from specjax.planning.abstract_decoder import AbstractDecoder
from specjax.planning.devices import find_device
from specjax.planning.layer_pattern import FEW_LAYERS, LayerCounts, layers_to_compile
from specjax.planning.plan_request import PlanRequest, with_split_drafter

CONTEXTS = 2048, 8192  # tokens that each row has
MAX_CONTEXT = 16_384
POOL_TOKENS = 65_536  # as where a plan measures memory; the kernels keep pools in main memory
DEPTH = 4  # K of chains, and the depth of trees
PLAIN, CHAIN, TREE = "plain", "chain", "tree"
# Heads over the target: a chain, a block, and a chain from masks.
EAGLE3, DFLASH, P_EAGLE = "EAGLE-3", "DFlash", "P-EAGLE"
SELF = "self-int8", "self-int4"  # chains of the target in few bits
P_EAGLE_LAYERS = 4  # as published ones have
BLOCK = 8  # tokens of a DFlash block, the newest of the text among them
HEAD_LAYERS = 6  # of the target, in the smaller program beside a head, which captures some of them
# Eight nodes of a draft model, and up to eight drafts of n-gram matches.
MODEL_TREE = ((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 0, 0))
NGRAM_MATCHES, NGRAM_NODES = 4, 8


def gemma_like() -> ModelConfig:
    """Returns the sizes of Gemma 3 4B, in Llama's skeleton: without the norms after branches."""
    windows = tuple(None if layer % 6 == 5 else 1024 for layer in range(34))
    near, far = RopeConfig(theta=1e4), RopeConfig(theta=1e6, kind="linear", factor=8.0)
    return ModelConfig(
        architecture="llama",
        family="qwen3",
        vocab_size=262_144,
        hidden_size=2560,
        intermediate_size=10_240,
        num_layers=34,
        num_heads=8,
        num_kv_heads=4,
        head_dim=256,
        max_position_embeddings=131_072,
        tie_word_embeddings=True,
        qk_norm=True,
        layer_windows=windows,
        layer_ropes=tuple(far if window is None else near for window in windows),
        eos_token_ids=(1,),
    )


def eagle3_head() -> Eagle3Config:
    """Returns the EAGLE-3 head, which captures first layers here: which ones changes no bytes."""
    return dataclasses.replace(published.LLAMA_EAGLE3, aux_layers=(2, 3, 4))


def dflash_head() -> DFlashConfig:
    """Returns the DFlash head, which captures first layers here, too."""
    return dataclasses.replace(published.LLAMA_DFLASH, aux_layers=(1, 2, 3, 4, 5))


def p_eagle_head() -> Eagle3Config:
    """Returns the EAGLE-3 head with more layers and a mask token, as P-EAGLE has them."""
    own = eagle3_head()
    layers = dataclasses.replace(own.layers, num_layers=P_EAGLE_LAYERS)
    return dataclasses.replace(own, layers=layers, mask_token_id=0)


HEADS = {EAGLE3: eagle3_head, DFLASH: dflash_head, P_EAGLE: p_eagle_head}


class Pair(NamedTuple):
    """A target and its draft model; None: n-gram matching drafts."""

    target: ModelConfig
    draft: ModelConfig | None


def few_layers(config: ModelConfig) -> LayerCounts:
    """Returns two numbers of first layers, from which whole periods lead to all of them."""
    few, more = layers_to_compile(config)
    period = more - few
    if period == 0:
        return LayerCounts(few, more)
    rest = (config.num_layers - FEW_LAYERS) % period + FEW_LAYERS
    return LayerCounts(rest, rest + period)


class Layers(NamedTuple):
    """Numbers of layers of target and draft model."""

    target: int
    draft: int = 0


@functools.cache
def pairs() -> dict[str, Pair]:
    """Returns the models by name."""
    return {
        "Llama-3.1-8B": Pair(SHAPES["llama-3.1-8b"], SHAPES["llama-3.2-1b"]),
        "Qwen3-0.6B": Pair(SHAPES["qwen3-0.6b"], None),
        "Gemma-like-4B": Pair(gemma_like(), None),
    }


@dataclasses.dataclass(frozen=True)
class _OneWidthNgram(NgramDrafter):
    """Compiled at one width: what is recorded are the bytes of a step in which all rows draft."""

    abstains: ClassVar[bool] = False


@dataclasses.dataclass(frozen=True)
class Case:
    """One compiled step."""

    model: str  # a name in `pairs`
    draft: str  # PLAIN, CHAIN or TREE
    rows: int
    generation: str  # of TPU: "v5e"
    chips: int

    @property
    def name(self) -> str:
        """What a command takes, as "Qwen3-0.6B, chain, 32 rows, v5e x4"."""
        return f"{self.model}, {self.draft}, {self.rows} rows, {self.generation} x{self.chips}"

    @property
    def num_speculative_tokens(self) -> int:
        return {PLAIN: 0, DFLASH: BLOCK - 1}.get(self.draft, DEPTH)

    @property
    def target(self) -> ModelConfig:
        return pairs()[self.model].target

    @property
    def all_layers(self) -> Layers:
        return Layers(self.target.num_layers, *[c.num_layers for c in self.spec.configs])

    @property
    def compiled_layers(self) -> list[Layers]:
        """Layers of the programs that stand for the whole models.

        The first has few layers, each other one more of one model: what they add is what later
        layers of that model add.
        """
        if self.draft in HEADS:
            return [Layers(HEAD_LAYERS), Layers(HEAD_LAYERS + 2)]
        counts = [few_layers(config) for config in (self.target, *self.spec.configs)]
        few = Layers(*(count.few for count in counts))
        more = [few._replace(**{name: count.more}) for name, count in zip(Layers._fields, counts)]
        return [few, *(layers for layers in more if layers != few)]

    @property
    def spec(self) -> DrafterSpec:
        """The drafter, as a user's config makes it, not yet split over chips."""
        draft = pairs()[self.model].draft
        if self.draft == PLAIN:
            return NoDrafter()
        if self.draft == DFLASH:
            return DFlashDrafter(dflash_head())
        if self.draft in HEADS:
            return EagleDrafter(HEADS[self.draft]())
        if self.draft in SELF:
            return SelfDrafter.named(self.draft)
        if draft is None:
            matches, nodes = (NGRAM_MATCHES, NGRAM_NODES) if self.draft == TREE else (1, None)
            return _OneWidthNgram().configured(
                SpeculationConfig(
                    method="ngram",
                    num_speculative_tokens=DEPTH,
                    prompt_lookup_matches=matches,
                    num_draft_nodes=nodes,
                )
            )
        tree = MODEL_TREE if self.draft == TREE else None
        config = SpeculationConfig(num_speculative_tokens=DEPTH, speculative_token_tree=tree)
        return ModelDrafter(draft).configured(config)

    def request(self) -> PlanRequest:
        """Returns what a plan of this model and device compiles.

        Raises:
          NotImplementedError: libtpu is not installed.
        """
        request = PlanRequest(
            target=self.target,
            target_name=self.model,
            drafter=self.spec,
            drafter_name=self.draft,
            device=find_device(f"tpu:{self.generation}:2x2", self.chips),
            dtype="bfloat16",
            num_speculative_tokens=self.num_speculative_tokens,
            engine=EngineConfig(max_rows=self.rows, max_context=MAX_CONTEXT),
        )
        return with_split_drafter(request)


def cases() -> Iterator[Case]:
    """Yields every case, those that weigh most first."""
    for rows, generation in ((32, "v5e"), (32, "v6e"), (1, "v5e"), (1, "v6e")):
        for model in pairs():
            for chips in (1, 4):
                for draft in (PLAIN, CHAIN, TREE):
                    yield Case(model, draft, rows, generation, chips)
    for generation in ("v5e", "v6e"):
        for head in HEADS:
            yield Case("Llama-3.1-8B", head, 32, generation, 4)
    for generation in ("v5e", "v6e"):
        for draft in SELF:
            yield Case("Llama-3.1-8B", draft, 32, generation, 4)


def of_first_layers(drafter: DrafterSpec, count: int) -> DrafterSpec:
    """Returns a drafter with the first layers of its model, if it has one."""
    if not isinstance(drafter, ModelDrafter):
        return drafter
    return dataclasses.replace(drafter, config=drafter.config.first_layers(count))


def program(case: Case, layers: Layers, folder: Path | None = None) -> str:
    """Returns the optimised program of a burst with the first layers of target and draft model.

    Args:
      folder: where programs are kept, and found again; None: nowhere.

    Raises:
      NotImplementedError: libtpu is not installed.
    """
    kept = None
    if folder is not None:
        kept = folder / f"{case.name}, {'+'.join(map(str, layers))} layers.txt.gz"
        if kept.exists():
            return gzip.decompress(kept.read_bytes()).decode()
    request = case.request()
    device = request.device
    few = of_first_layers(request.drafter, layers.draft)
    request = dataclasses.replace(request, drafter=few)
    with lowered_for(device.traced_for, device.kind):
        num_pages = POOL_TOKENS // request.engine.chosen_page_size
        decoder = AbstractDecoder(request.decoder_config(layers.target, num_pages))
        compiled = decoder.compile_burst(case.num_speculative_tokens)
    text = compiled.as_text()
    assert text is not None
    if kept is not None:
        kept.parent.mkdir(parents=True, exist_ok=True)
        whole = kept.with_suffix(".part")
        whole.write_bytes(gzip.compress(text.encode(), 6))
        whole.rename(kept)
    return text
