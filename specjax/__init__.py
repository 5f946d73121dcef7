"""specjax: lossless speculative decoding for JAX."""

from specjax.config import EngineConfig as EngineConfig
from specjax.config import SamplingParams as SamplingParams
from specjax.config import SpeculationConfig as SpeculationConfig
from specjax.drafters.loading import load_drafter as load_drafter
from specjax.generation import generate as generate
from specjax.generation import stream as stream
from specjax.models.base import Model as Model
from specjax.models.base import ModelConfig as ModelConfig
from specjax.models.loading import load_model as load_model

__version__ = "0.1.0"
