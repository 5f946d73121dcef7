"""Sizes for an engine: each module's get_config() returns an EngineConfig."""
