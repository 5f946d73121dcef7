"""Tiny heads of every format from a seed, and what they draft over one text.

`tests/goldens/make_head_goldens.py` stores what the equations say; the test asks our drafters.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import eagle3_heads
import jax
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
from head_equations import TARGET, VOCAB, mlp, rms, wide
from head_folders import random_tensors, write

import specjax
from specjax.drafters.one_pass import Asked
from specjax.drafters.parallel_model import _ParallelModel
from specjax.heads.equations import eagle, medusa, mlp_speculator
from specjax.heads.equations.eagle import MTP_PREFIX
from specjax.heads.equations.eagle3 import FLAT_PREFIX, NUMBERED_PREFIX
from specjax.models.families import family_of
from specjax.models.hf_config import parse_config
from specjax.paged import kv_cache
from specjax.types import DecoderParams

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
      sure: both of a confidence head, f64[drafts] and the same for all roots; None without one.
    """

    target: Any
    raw: dict[str, Any]
    tensors: dict[str, np.ndarray]
    expected: Callable[..., np.ndarray]
    found: Callable[..., np.ndarray]
    sure: tuple[Callable[..., np.ndarray], Callable[..., np.ndarray]] | None = None

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


def _sure_of_block(config, params, tokens, taps, root):
    reference = test_dflash.Reference(config, params)
    x, _, drafts = reference.draft(int(tokens[root]), taps[:root])
    return test_dflash.confidence_of(config, reference.params, x, [int(tokens[root]), *drafts])[
        :NUM_DRAFTS
    ]


def _of_model(config, params, tokens, taps, root):
    """A draft model over masks: plain layers over the text and a mask less than is drafted."""
    del taps
    params = wide(params)
    text = [*tokens[: root + 1], *[config.mask_token_id] * (NUM_DRAFTS - 1)]
    x, positions = params["embed_tokens"][text], np.arange(len(text), dtype=np.float64)
    for layer in params["layers"]:
        x = x + pair_heads.attention(rms(x, layer["input_norm"]), layer, config, positions)
        x = x + mlp(rms(x, layer["post_attention_norm"]), layer)
    return rms(x[-NUM_DRAFTS:], params["norm"]) @ params["lm_head"].T


def _of_masks(config, params, tokens, taps, root):
    reference = test_parallel_eagle.OverMasks(config, params)
    found, _ = reference.draft(tokens[: root + 1].tolist(), taps[:root], NUM_DRAFTS)
    return eagle3_heads.logits_of(reference.params, config, reference.head, found)


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


def by_pairs(config, params, tokens, taps):
    rows, said = pair_heads.Rows(config, params, NUM_DRAFTS), []
    rows.write(1, tokens.tolist())
    for first, end in _parts():
        if first in ROOTS:
            said.append(_drafted(rows, first))
        rows.absorb(1, first, taps[first:end])
    return np.stack([*said, _drafted(rows, ROOTS[-1])])


def _drafted(rows, root):
    """Returns logits of the drafts, each after those before it."""
    drafts = [0] * NUM_DRAFTS
    for place in range(NUM_DRAFTS):
        found, said = rows.follow(1, root, drafts[: place + 1])
        drafts[place] = said[place]
    return np.asarray(rows.head.logits(rows.params, found, 0))


def by_masks(config, params, tokens, taps):
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


def by_block(config, params, tokens, taps):
    return np.stack([logits for logits, _ in _said_by_block(config, params, tokens, taps)])


def sure_by_block(config, params, tokens, taps):
    return np.stack([sure for _, sure in _said_by_block(config, params, tokens, taps)])


def _said_by_block(config, params, tokens, taps):
    """Returns logits and confidences of the drafts after each root."""
    rows, said = test_dflash.Rows(config, params, says_confidence=config.has_confidence), []

    def draft(root):
        logits = rows.draft(1, root, int(tokens[root]))[1][:NUM_DRAFTS]
        said.append((logits, np.asarray(rows.estimates[:NUM_DRAFTS])))

    for first, end in _parts():
        if first in ROOTS:
            draft(first)
        rows.absorb(1, first, taps[first:end])
    draft(ROOTS[-1])
    return said


def by_model(config, params, tokens, taps):
    del taps
    rows, page, pages_per_row, said = 2, pair_heads.PAGE, pair_heads.PAGES_PER_ROW, []
    model = _ParallelModel(
        VOCAB, keeps_probs=False, says_confidence=False, keeps_fed=False, config=config, depth=2
    )
    pages = kv_cache.init_pages(config, rows * pages_per_row, page, jnp.dtype(jnp.float32))
    cache = SimpleNamespace(
        block_table=jnp.arange(rows * pages_per_row, dtype=jnp.int32).reshape(rows, -1),
        page_size=page,
        num_slots=rows * pages_per_row * page,
    )
    history, both = jnp.tile(jnp.asarray(tokens), (rows, 2)), jnp.full(rows, NUM_DRAFTS)
    num_seen, params = 0, DecoderParams(TARGET.params, params)
    for root in ROOTS:
        cache.lengths = jnp.full(rows, root, jnp.int32)
        known = jnp.full(rows, num_seen, jnp.int32)
        decode_state = SimpleNamespace(
            cache=cache, rows=rows, history=history, drafter_lengths=known
        )
        asked = Asked(pages, both.astype(jnp.int32))
        _, drafting = model.begin(params, asked, decode_state, jnp.ones(rows, bool))
        said.append([model.logits(params, each, 0)[1] for each in drafting.said])
        pages, num_seen = drafting.pages, root + 1
    return np.asarray(said)


def by_newest(config, params, tokens, taps):
    rows, said = test_newest_state.Rows(config, params), []
    for first, end in [*_parts(), (ROOTS[-1], ROOTS[-1])]:
        if first in ROOTS:
            root = int(tokens[first])
            draft = int(np.argmax(rows.logits(1, [root])[0]))
            said.append(rows.logits(1, [root, draft]))
        if first < end:
            rows.absorb(taps[first:end, 0], (0, end - first))
    return np.stack(said)


# A draft model of two layers that drafts over masks.
PARD = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "pard_token": 60,
    **EPS,
}


def _tensors_of_model() -> dict[str, np.ndarray]:
    config = parse_config(PARD)
    rng = np.random.default_rng(0)
    return {
        name: rng.standard_normal(shape).astype(np.float32)
        for source in jax.tree.leaves(family_of(config).sources(config))
        for name, shape in source.tensors()
    }


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
    sure = {"has_confidence": True, "confidence_reads_token": True}
    of_kind = {
        kind: d.tensors_of(d.config_of(small, **d.OWN_TABLES, **d.MARKOV, **sure, markov_kind=kind))
        for kind in ("gated", "rnn")
    }
    masks = {"mask_token_id": test_parallel_eagle.MASK}
    of_masks = e3.tensors_of(
        e3.config_of(num_layers=2, has_embedding=True, **masks), NUMBERED_PREFIX
    )
    of_eagle3 = e3.tensors_of(e3.config_of(has_embedding=True), FLAT_PREFIX)
    pairs, mtp = _of_pairs(pair_heads.Reference), _of_pairs(test_mtp.MtpReference)
    return {
        "eagle": GoldenHead(
            shallow, e1.raw_of(), e1.tensors_of(fc_bias=True, **own), pairs, by_pairs
        ),
        "eagle3": GoldenHead(deep, e3.flat(**EPS), of_eagle3, _of_eagle3, by_pairs),
        "mtp": GoldenHead(
            shallow, test_mtp.of_speculators(**EPS), random_tensors(layer), mtp, by_pairs
        ),
        "peagle": GoldenHead(
            deep,
            e3.nested(
                speculators_model_type="peagle",
                transformer_layer_config=e3.LAYER | EPS,
                **masks,
            ),
            of_masks,
            _of_masks,
            by_masks,
        ),
        "pard": GoldenHead(shallow, PARD, _tensors_of_model(), _of_model, by_model),
        "medusa": GoldenHead(shallow, medusa_raw, of_medusa, _of_newest, by_newest),
        "mlp_speculator": GoldenHead(shallow, n.mlp_raw(), of_mlp, _of_newest, by_newest),
        "dflash": GoldenHead(deep, d.nested(**of_layers), d.tensors_of(flash), _of_block, by_block),
        "dflash2": GoldenHead(
            deep, d.nested2(**of_layers), d.tensors_of(flash2), _of_block, by_block
        ),
        "dspark": GoldenHead(deep, d.dspark(**of_layers), d.tensors_of(spark), _of_block, by_block),
        **{
            f"dspark_{kind}": GoldenHead(
                deep,
                d.dspark(**of_layers, markov_head_type=kind),
                tensors,
                _of_block,
                by_block,
                (_sure_of_block, sure_by_block),
            )
            for kind, tensors in of_kind.items()
        },
    }
