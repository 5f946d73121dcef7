"""Step costs measured by us, with their provenance; none so far. See specjax/engine/cost_files.py."""
