"""Training drafters for a target: heads over its hidden states, and draft models."""
