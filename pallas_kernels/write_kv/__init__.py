"""Writes of new keys and values into a paged cache."""

from pallas_kernels.write_kv.api import write_kv as write_kv
