"""One request at a time, read as it is written."""

from specjax.config.engine import EngineConfig


def get_config() -> EngineConfig:
    """Returns sizes with a single row, and bursts short enough to stop soon after an answer."""
    return EngineConfig(max_rows=1, burst_steps=8)
