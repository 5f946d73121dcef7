"""Step costs measured by us, with their provenance; none so far. See
specjax/policy/cost_files.py."""
