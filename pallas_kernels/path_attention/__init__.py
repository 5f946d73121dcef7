"""Attention of single tokens, each over its own path, with arithmetic that depends on nothing
else."""

from pallas_kernels.path_attention.api import path_attention as path_attention
