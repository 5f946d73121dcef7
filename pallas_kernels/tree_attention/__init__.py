"""Attention of new tokens, in rows of any length or in trees, over a paged cache."""

from pallas_kernels.tree_attention.api import tree_attention as tree_attention
