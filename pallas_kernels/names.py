"""Names of the ops and their implementations. It imports no jax, so that configs can check them."""

from __future__ import annotations

from collections.abc import Mapping

# Best first: the order in which they are tried where none is named.
IMPLEMENTATIONS: Mapping[str, tuple[str, ...]] = {
    "tree_attention": ("mosaic_tpu", "mosaic_gpu", "xla", "reference"),
    "path_attention": ("xla", "reference"),
    "write_kv": ("mosaic_tpu", "xla", "reference"),
    "move_kv": ("mosaic_tpu", "xla", "reference"),
    "ngram_match": ("xla", "reference"),
    "seeded_sample": ("mosaic_tpu", "xla", "reference"),
}
# Those that run on one platform alone.
PLATFORMS: Mapping[str, str] = {"mosaic_tpu": "tpu", "mosaic_gpu": "gpu"}
