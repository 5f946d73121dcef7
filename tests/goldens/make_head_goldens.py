"""Writes what the equations of each format of heads draft, in float64.

    PYTHONPATH=.:tests:tests/specjax/heads python tests/goldens/make_head_goldens.py

Each file of `heads` holds tokens i32[16], the hidden states that the head captured at them
f32[16, captured, 32], and logits f32[3, 2, vocab] of two drafts after three roots: after a prompt
that came in chunks, after the first of two drafts was rejected, and after both were accepted. Where
the head says how sure it is, confidence f32[3, 2]. Weights are those of a seed, see `golden_heads`.
Run again only where the equations were wrong.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import golden_heads
import numpy as np


def main() -> None:
    """Writes a file for each format."""
    golden_heads.FOLDER.mkdir(exist_ok=True)
    for name, head in golden_heads.golden_heads().items():
        with tempfile.TemporaryDirectory() as folder:
            loaded = head.load(Path(folder))
        config, params = loaded.spec.config, loaded.params
        tokens, taps = golden_heads.text(len(getattr(config, "aux_layers", ())))
        roots = golden_heads.ROOTS
        logits = [head.expected(config, params, tokens, taps, root) for root in roots]
        more = {}
        if head.sure is not None:
            sure = [head.sure[0](config, params, tokens, taps, root) for root in roots]
            more["confidence"] = np.stack(sure).astype(np.float32)
        np.savez_compressed(
            golden_heads.FOLDER / f"{name}.npz",
            tokens=tokens,
            taps=taps,
            logits=np.stack(logits).astype(np.float32),
            **more,
        )


if __name__ == "__main__":
    main()
