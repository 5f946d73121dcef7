"""The public names, and where each lives; `__init__.py` imports them on first use."""

# Classes that functions only return stand in docs/api, by the modules that they are imported from.
# What authors of drafters import besides is at the end of docs/your-own-drafter.md. Other names may
# change with any version.

# Text
from specjax.api.comparing import compare as compare
from specjax.api.engine import Engine as Engine
from specjax.api.generation import generate as generate
from specjax.api.generation import stream as stream
from specjax.api.results import Completion as Completion
from specjax.config.engine import EngineConfig as EngineConfig
from specjax.config.sampling import SamplingParams as SamplingParams
from specjax.config.speculation import SpeculationConfig as SpeculationConfig
from specjax.runtime.version import __version__ as __version__
from specjax.text.chat import Chat as Chat

# Models, their weights and checkpoints
from specjax.checkpoints.loading import load_orbax as load_orbax
from specjax.checkpoints.pretrained import save_pretrained as save_pretrained
from specjax.checkpoints.saving import save_orbax as save_orbax
from specjax.models.base import Model as Model
from specjax.models.base import ModelConfig as ModelConfig
from specjax.models.layouts.converting import convert as convert
from specjax.models.layouts.converting import convert_back as convert_back
from specjax.models.loading import load_model as load_model
from specjax.models.mesh_axes import param_shardings as param_shardings
from specjax.types import DecoderParams as DecoderParams

# Drafters, and their training
from specjax import testing as testing
from specjax import training as training
from specjax.drafters.base import Draft as Draft
from specjax.drafters.base import Drafter as Drafter
from specjax.drafters.base import DrafterContext as DrafterContext
from specjax.drafters.base import DrafterSpec as DrafterSpec
from specjax.drafters.self_drafter import SelfDrafter as SelfDrafter
from specjax.heads.loading import LoadedDrafter as LoadedDrafter
from specjax.heads.loading import load_drafter as load_drafter
from specjax.training.adapter import DrafterAdapter as DrafterAdapter
from specjax.training.adapter import draft_loss as draft_loss
from specjax.training.serving import Adapt as Adapt
from specjax.types import Proposal as Proposal

# Rollouts
from specjax.rl.batch import Rollout as Rollout
from specjax.rl.decoder import RolloutDecoder as RolloutDecoder
from specjax.rl.decoder import build_decoder as build_decoder
from specjax.rl.environment import Reply as Reply
from specjax.rl.environment import Turn as Turn
from specjax.rl.gaps import importance_weights as importance_weights
from specjax.rl.gaps import sequence_gaps as sequence_gaps
from specjax.rl.policy import policy_logprobs as policy_logprobs
from specjax.rl.rollout import rollout as rollout
from specjax.rl.scoring import Texts as Texts
from specjax.rl.scoring import logprob_gap as logprob_gap
from specjax.rl.scoring import score as score
from specjax.rl.stream import rollout_stream as rollout_stream
from specjax.rl.turns import rollout_turns as rollout_turns
