"""What a user may ask for, checked before anything is compiled."""

from specjax.config.engine import EngineConfig as EngineConfig
from specjax.config.sampling import SamplingParams as SamplingParams
from specjax.config.speculation import SpeculationConfig as SpeculationConfig
