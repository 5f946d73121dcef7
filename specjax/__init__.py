"""specjax: lossless speculative decoding for JAX."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specjax.api.comparing import ComparedDrafter as ComparedDrafter
    from specjax.api.comparing import Comparison as Comparison
    from specjax.api.comparing import compare as compare
    from specjax.api.engine import Engine as Engine
    from specjax.api.generation import generate as generate
    from specjax.api.generation import stream as stream
    from specjax.api.results import Chunk as Chunk
    from specjax.api.results import Completion as Completion
    from specjax.api.results import Generation as Generation
    from specjax.api.results import GenerationStats as GenerationStats
    from specjax.checkpoints.loading import load_orbax as load_orbax
    from specjax.checkpoints.pretrained import save_pretrained as save_pretrained
    from specjax.checkpoints.saving import save_orbax as save_orbax
    from specjax.config.engine import EngineConfig as EngineConfig
    from specjax.config.sampling import SamplingParams as SamplingParams
    from specjax.config.speculation import SpeculationConfig as SpeculationConfig
    from specjax.drafters.base import Draft as Draft
    from specjax.drafters.base import Drafter as Drafter
    from specjax.drafters.base import DrafterContext as DrafterContext
    from specjax.drafters.base import DrafterSpec as DrafterSpec
    from specjax.drafters.loading import LoadedDrafter as LoadedDrafter
    from specjax.drafters.loading import load_drafter as load_drafter
    from specjax.drafters.self_drafter import SelfDrafter as SelfDrafter
    from specjax.engine.adapting import AdaptStats as AdaptStats
    from specjax.engine.lineage import CacheFill as CacheFill
    from specjax.engine.request import SelfCheck as SelfCheck
    from specjax.layouts.converting import convert as convert
    from specjax.layouts.converting import convert_back as convert_back
    from specjax.models.base import Model as Model
    from specjax.models.base import ModelConfig as ModelConfig
    from specjax.models.loading import load_model as load_model
    from specjax.models.mesh_axes import param_shardings as param_shardings
    from specjax.rl.batch import Rollout as Rollout
    from specjax.rl.batch import RolloutTurns as RolloutTurns
    from specjax.rl.decoder import RolloutDecoder as RolloutDecoder
    from specjax.rl.decoder import build_decoder as build_decoder
    from specjax.rl.environment import Reply as Reply
    from specjax.rl.environment import Turn as Turn
    from specjax.rl.gaps import ImportanceWeights as ImportanceWeights
    from specjax.rl.gaps import importance_weights as importance_weights
    from specjax.rl.gaps import sequence_gaps as sequence_gaps
    from specjax.rl.policy import PolicyLogProbs as PolicyLogProbs
    from specjax.rl.policy import policy_logprobs as policy_logprobs
    from specjax.rl.rollout import rollout as rollout
    from specjax.rl.scoring import Texts as Texts
    from specjax.rl.scoring import logprob_gap as logprob_gap
    from specjax.rl.scoring import score as score
    from specjax.rl.stream import RolloutStream as RolloutStream
    from specjax.rl.stream import rollout_stream as rollout_stream
    from specjax.rl.turns import rollout_turns as rollout_turns
    from specjax.text.chat import Chat as Chat
    from specjax.training.adapter import AdapterState as AdapterState
    from specjax.training.adapter import AdapterStats as AdapterStats
    from specjax.training.adapter import DrafterAdapter as DrafterAdapter
    from specjax.training.adapter import draft_loss as draft_loss
    from specjax.training.serving import Adapt as Adapt
    from specjax.types import DecoderParams as DecoderParams
    from specjax.types import Proposal as Proposal

from specjax.version import __version__ as __version__

# The public surface. What authors of drafters import besides is listed at the end of
# docs/your-own-drafter.md; other names may change with any version.
__all__ = [
    "Adapt",
    "AdaptStats",
    "AdapterState",
    "AdapterStats",
    "CacheFill",
    "Chat",
    "Chunk",
    "ComparedDrafter",
    "Comparison",
    "Completion",
    "DecoderParams",
    "Draft",
    "Drafter",
    "DrafterAdapter",
    "DrafterContext",
    "DrafterSpec",
    "Engine",
    "EngineConfig",
    "Generation",
    "GenerationStats",
    "ImportanceWeights",
    "LoadedDrafter",
    "Model",
    "ModelConfig",
    "PolicyLogProbs",
    "Proposal",
    "Reply",
    "Rollout",
    "RolloutDecoder",
    "RolloutStream",
    "RolloutTurns",
    "SamplingParams",
    "SelfCheck",
    "SelfDrafter",
    "SpeculationConfig",
    "Texts",
    "Turn",
    "__version__",
    "build_decoder",
    "compare",
    "convert",
    "convert_back",
    "draft_loss",
    "generate",
    "importance_weights",
    "load_drafter",
    "load_model",
    "load_orbax",
    "logprob_gap",
    "param_shardings",
    "policy_logprobs",
    "rollout",
    "rollout_stream",
    "rollout_turns",
    "save_orbax",
    "save_pretrained",
    "score",
    "sequence_gaps",
    "stream",
]

# Imported on first use, so that `specjax --help` does not wait for jax.
_HOME = {
    "EngineConfig": "specjax.config",
    "SamplingParams": "specjax.config",
    "SpeculationConfig": "specjax.config",
    "Draft": "specjax.drafters.base",
    "Drafter": "specjax.drafters.base",
    "DrafterContext": "specjax.drafters.base",
    "DrafterSpec": "specjax.drafters.base",
    "LoadedDrafter": "specjax.drafters.loading",
    "load_drafter": "specjax.drafters.loading",
    "SelfDrafter": "specjax.drafters.self_drafter",
    "CacheFill": "specjax.engine.lineage",
    "SelfCheck": "specjax.engine.request",
    "load_orbax": "specjax.checkpoints.loading",
    "save_pretrained": "specjax.checkpoints.pretrained",
    "save_orbax": "specjax.checkpoints.saving",
    "ComparedDrafter": "specjax.api.comparing",
    "Comparison": "specjax.api.comparing",
    "compare": "specjax.api.comparing",
    "generate": "specjax.api.generation",
    "stream": "specjax.api.generation",
    "convert": "specjax.layouts.converting",
    "convert_back": "specjax.layouts.converting",
    "param_shardings": "specjax.models.mesh_axes",
    "Model": "specjax.models.base",
    "ModelConfig": "specjax.models.base",
    "load_model": "specjax.models.loading",
    "Chat": "specjax.text.chat",
    "Chunk": "specjax.api.results",
    "Completion": "specjax.api.results",
    "Generation": "specjax.api.results",
    "GenerationStats": "specjax.api.results",
    "Engine": "specjax.api.engine",
    "Rollout": "specjax.rl.batch",
    "RolloutTurns": "specjax.rl.batch",
    "RolloutDecoder": "specjax.rl.decoder",
    "build_decoder": "specjax.rl.decoder",
    "ImportanceWeights": "specjax.rl.gaps",
    "importance_weights": "specjax.rl.gaps",
    "sequence_gaps": "specjax.rl.gaps",
    "PolicyLogProbs": "specjax.rl.policy",
    "policy_logprobs": "specjax.rl.policy",
    "Reply": "specjax.rl.environment",
    "Turn": "specjax.rl.environment",
    "rollout": "specjax.rl.rollout",
    "rollout_turns": "specjax.rl.turns",
    "RolloutStream": "specjax.rl.stream",
    "rollout_stream": "specjax.rl.stream",
    "Texts": "specjax.rl.scoring",
    "logprob_gap": "specjax.rl.scoring",
    "score": "specjax.rl.scoring",
    "Adapt": "specjax.training.serving",
    "AdaptStats": "specjax.engine.adapting",
    "AdapterState": "specjax.training.adapter",
    "AdapterStats": "specjax.training.adapter",
    "DrafterAdapter": "specjax.training.adapter",
    "draft_loss": "specjax.training.adapter",
    "DecoderParams": "specjax.types",
    "Proposal": "specjax.types",
}


def __getattr__(name: str) -> Any:
    if name in ("testing", "training"):  # modules with names of their own
        return importlib.import_module(f"specjax.{name}")
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Returns the public names, without modules that are imported for them."""
    return sorted(__all__)
