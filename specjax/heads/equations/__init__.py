"""Configs and equations of heads: what follows from weights and hidden states, without a cache."""
