"""Tiny heads of every format from a seed, and what they draft over one text.

`tests/goldens/make_head_goldens.py` stores what the equations say; the test asks our drafters.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import eagle3_heads
import jax.numpy as jnp
import numpy as np
import pair_heads
import test_dflash
import test_dflash_files
import test_eagle1
import test_eagle_files
import test_mtp
import test_newest_state
import test_parallel_eagle
from head_equations import TARGET, VOCAB, wide
from head_folders import random_tensors, write

import specjax
from specjax.models import eagle, medusa, mlp_speculator
from specjax.models.eagle import MTP_PREFIX
from specjax.models.eagle3 import FLAT_PREFIX

FOLDER = Path(__file__).resolve().parents[2] / "goldens" / "heads"
# Tokens of the prompt come in chunks. Then one of two drafts was rejected, the first, and then both
# were accepted.
CHUNKS, ROOTS, NUM_DRAFTS = ((0, 5), (5, 6), (6, 11)), (11, 12, 15), 2
NUM_TOKENS = 16
EPS = {"rms_norm_eps": 1e-6}


class GoldenHead(NamedTuple):
    """A format of heads.

    Attributes:
      tensors: of its file, before they are scaled.
      expected: (config, params, tokens, taps, root) -> logits of the drafts, in float64.
      found: (config, params, tokens, taps) -> the same for all roots, of our drafter.
    """

    target: Any
    raw: dict[str, Any]
    tensors: dict[str, np.ndarray]
    expected: Callable[..., np.ndarray]
    found: Callable[..., np.ndarray]

    def load(self, folder: Path) -> specjax.LoadedDrafter:
        """Returns the head that is read from a folder, which is written first."""
        tensors = {name: _narrow(name, each) for name, each in self.tensors.items()}
        return specjax.load_drafter(write(folder, self.raw, tensors), self.target)


def _narrow(name: str, tensor: np.ndarray) -> np.ndarray:
    """Returns weights of which no draft is certain: norms around 1, all else small."""
    if tensor.dtype != np.float32:
        return tensor
    return (1 + tensor / 4 if "norm" in name else tensor / 4).astype(np.float32)


def text(num_captured: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns tokens i32[NUM_TOKENS], and hidden states [NUM_TOKENS, num_captured, width]."""
    rng = np.random.default_rng(7)
    tokens = rng.integers(0, VOCAB, NUM_TOKENS).astype(np.int32)
    width = TARGET.config.hidden_size
    return tokens, rng.standard_normal((NUM_TOKENS, num_captured, width)).astype(np.float32)


# What the equations say.


def _of_pairs(kind: Any) -> Callable[..., np.ndarray]:
    def expected(config, params, tokens, taps, root):
        reference = kind(config, params)
        found, _ = reference.draft(tokens[: root + 1].tolist(), taps[:root], NUM_DRAFTS)
        return found @ reference.head.T

    return expected


def _of_eagle3(config, params, tokens, taps, root):
    reference = eagle3_heads.Reference(config, params)
    found, _ = reference.draft(tokens[: root + 1].tolist(), taps[:root], NUM_DRAFTS)
    return eagle3_heads.logits_of(reference.params, config, reference.head, found)


def _of_block(config, params, tokens, taps, root):
    reference = test_dflash.Reference(config, params)
    _, logits, _ = reference.draft(int(tokens[root]), taps[:root])
    return logits[:NUM_DRAFTS]


def _of_newest(config, params, tokens, taps, root):
    equations, before = test_newest_state.equations_of(config), [int(tokens[root])]
    while True:
        logits = equations(config, wide(params), taps[root - 1, 0], before)
        if len(before) == NUM_DRAFTS:
            return logits
        before.append(int(np.argmax(logits[-1])))


# What our drafters say. The root and accepted drafts are absorbed between two roots.


def _parts() -> list[tuple[int, int]]:
    return [*CHUNKS, *itertools.pairwise(ROOTS)]


def _by_pairs(config, params, tokens, taps):
    rows, said = pair_heads.Rows(config, params, NUM_DRAFTS), []
    rows.write(1, tokens.tolist())
    for first, end in _parts():
        if first in ROOTS:
            said.append(_drafted_by_pairs(rows, first))
        rows.absorb(1, first, taps[first:end])
    return np.stack([*said, _drafted_by_pairs(rows, ROOTS[-1])])


def _drafted_by_pairs(rows, root):
    """Returns logits of the drafts, each after those before it."""
    drafts = [0] * NUM_DRAFTS
    for place in range(NUM_DRAFTS):
        found, said = rows.follow(1, root, drafts[: place + 1])
        drafts[place] = said[place]
    return np.asarray(rows.head.logits(rows.params, found, 0))


def _by_masks(config, params, tokens, taps):
    rows, said = test_parallel_eagle.MaskRows(config, params, NUM_DRAFTS), []
    rows.write(1, tokens.tolist())

    def drafted(root):
        found, _ = rows.follow(1, root, [0] * NUM_DRAFTS)
        said.append(np.asarray(rows.head.logits(rows.params, jnp.asarray(found), 0)))

    for first, end in _parts():
        if first in ROOTS:
            drafted(first)
        rows.absorb(1, first, taps[first:end])
    drafted(ROOTS[-1])
    return np.stack(said)


def _by_block(config, params, tokens, taps):
    rows = test_dflash.Rows(config, params)
    logits_at = lambda root: rows.draft(1, root, int(tokens[root]))[1][:NUM_DRAFTS]
    said = []
    for first, end in _parts():
        if first in ROOTS:
            said.append(logits_at(first))
        rows.absorb(1, first, taps[first:end])
    return np.stack([*said, logits_at(ROOTS[-1])])


def _by_newest(config, params, tokens, taps):
    rows, said = test_newest_state.Rows(config, params), []
    for first, end in [*_parts(), (ROOTS[-1], ROOTS[-1])]:
        if first in ROOTS:
            root = int(tokens[first])
            draft = int(np.argmax(rows.logits(1, [root])[0]))
            said.append(rows.logits(1, [root, draft]))
        if first < end:
            rows.absorb(taps[first:end, 0], (0, end - first))
    return np.stack(said)


def golden_heads() -> dict[str, GoldenHead]:
    """Returns a head of each format, with tables of its own: no weight of a target is read.

    Norms have the epsilon of the equations.
    """
    shallow, deep = TARGET, test_eagle_files.TARGET
    e1, e3, d, n = test_eagle1, test_eagle_files, test_dflash_files, test_newest_state
    own = {"has_embedding": True, "has_head": True}
    layer = eagle.weights_of(test_mtp.config_of(qk_norm=True, **own), MTP_PREFIX)
    small = {"vocab_size": d.DRAFT_VOCAB}
    flash, flash2, spark = (
        d.config_of(small, **d.OWN_TABLES),
        d.config_of(**own, **d.OF_DFLASH2),
        d.config_of(small, **d.OWN_TABLES, **d.MARKOV),
    )
    of_layers = {"transformer_layer_config": d.LAYERS | EPS}
    medusa_raw = {"medusa_num_heads": 3, "vocab_size": VOCAB}
    of_medusa = random_tensors(medusa.weights_of(n.HEADS["Medusa"]))
    of_mlp = random_tensors(mlp_speculator.weights_of(n.HEADS["MLP"]))
    of_eagle3 = e3.tensors_of(e3.config_of(has_embedding=True), FLAT_PREFIX)
    pairs, mtp = _of_pairs(pair_heads.Reference), _of_pairs(test_mtp.MtpReference)
    return {
        "eagle": GoldenHead(
            shallow, e1.raw_of(), e1.tensors_of(fc_bias=True, **own), pairs, _by_pairs
        ),
        "eagle3": GoldenHead(deep, e3.flat(**EPS), of_eagle3, _of_eagle3, _by_pairs),
        "mtp": GoldenHead(
            shallow, test_mtp.of_speculators(**EPS), random_tensors(layer), mtp, _by_pairs
        ),
        "medusa": GoldenHead(shallow, medusa_raw, of_medusa, _of_newest, _by_newest),
        "mlp_speculator": GoldenHead(shallow, n.mlp_raw(), of_mlp, _of_newest, _by_newest),
        "dflash": GoldenHead(
            deep, d.nested(**of_layers), d.tensors_of(flash), _of_block, _by_block
        ),
        "dflash2": GoldenHead(
            deep, d.nested2(**of_layers), d.tensors_of(flash2), _of_block, _by_block
        ),
        "dspark": GoldenHead(
            deep, d.dspark(**of_layers), d.tensors_of(spark), _of_block, _by_block
        ),
    }
