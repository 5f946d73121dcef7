"""A queue of prompts that nobody watches: evaluation, rollouts."""

from specjax.config.engine import EngineConfig


def get_config() -> EngineConfig:
    """Returns sizes with many rows, and bursts long enough to keep the host out of the way."""
    return EngineConfig(max_rows=64, burst_steps=64)
