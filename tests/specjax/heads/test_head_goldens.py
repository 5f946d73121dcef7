"""Our drafters against what the equations of each format of heads said, to 1e-4.

A head is written to a folder, read from it, and drafts over one text: after a prompt in chunks,
after a rejection, and after all of its drafts were accepted.
"""

import golden_heads
import numpy as np
import pytest
from asked_for import quick

HEADS = golden_heads.golden_heads()


@pytest.mark.parametrize("name", quick(HEADS, "eagle3", "mlp_speculator"))
def test_drafts_are_those_of_the_golden_file(tmp_path, name):
    head = HEADS[name]
    with np.load(golden_heads.FOLDER / f"{name}.npz") as golden:
        tokens, taps, expected = (golden[key] for key in ("tokens", "taps", "logits"))
        sure = golden.get("confidence")
    loaded = head.load(tmp_path)
    found = head.found(loaded.spec.config, loaded.params, tokens, taps)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)
    if head.sure is not None:
        found = head.sure[1](loaded.spec.config, loaded.params, tokens, taps)
        np.testing.assert_allclose(found, sure, rtol=0, atol=1e-4)
        assert np.ptp(sure) > 0.1
    # A draft is no matter of rounding, or a wrong one would change what is compared after it.
    best = np.sort(np.where(np.isfinite(expected), expected, -1e9), axis=-1)[..., -2:]
    assert np.min(best[..., 1] - best[..., 0]) > 1e-3


def test_every_golden_file_is_tested_and_small():
    files = {path.stem: path.stat().st_size for path in golden_heads.FOLDER.iterdir()}
    assert set(files) == set(HEADS)
    assert max(files.values()) < 50_000
