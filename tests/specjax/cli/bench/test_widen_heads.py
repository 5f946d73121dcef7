"""A head that is widened with its target drafts the same."""

import jax
import numpy as np
import pytest
from helpers import tiny_llama

import specjax
from specjax.cli.bench.widen import widen
from specjax.cli.bench.widen_heads import widen_head
from specjax.heads.equations import dflash, eagle3
from specjax.heads.specs import EagleDrafter
from specjax.training.data import from_token_ids
from specjax.training.kinds import kind_of, kind_of_spec
from specjax.training.texts import Target, states_along

KINDS = {
    "eagle3": ("eagle3", {"aux_layers": (0, 1, 2), "num_layers": 2, "has_fc_norms": True}),
    "eagle3, part of the vocabulary": ("eagle3", {"draft_vocab_size": 30}),
    "dflash": ("dflash", {"block_size": 4, "aux_layers": (0, 2)}),
    "dspark, gated": ("dspark", {"block_size": 4, "markov_rank": 3, "markov_kind": "gated"}),
    "dspark, rnn": ("dspark", {"block_size": 4, "markov_rank": 3, "markov_kind": "rnn"}),
}


QUICK = "eagle3", "dspark, rnn"
FULL = [pytest.param(name, marks=pytest.mark.full) for name in KINDS if name not in QUICK]


@pytest.mark.full
@pytest.mark.parametrize("name", [*QUICK, *FULL])
def test_a_wide_head_drafts_the_same(name):
    kind_name, options = KINDS[name]
    target, kind = tiny_llama(0), kind_of(kind_name)
    config = kind.configure(target.config, options)
    module = eagle3 if kind_name == "eagle3" else dflash
    params = module.init(jax.random.key(1), config, std=0.3)
    drafter = specjax.LoadedDrafter("head", kind.spec(config), params)
    wide = widen(target, 4 * target.num_parameters())
    wide_drafter = widen_head(drafter, target.config, wide.config)
    count = lambda tree: sum(leaf.size for leaf in jax.tree.leaves(tree))
    assert count(wide_drafter.params) > 1.5 * count(params)
    text = from_token_ids([(list(range(1, 13)), 0), (list(range(20, 29)), 0)], 12).batch(0, 2)
    scores = [
        _scores(model, each, text) for model, each in ((target, drafter), (wide, wide_drafter))
    ]
    for one, other in zip(*scores, strict=True):
        np.testing.assert_allclose(one, other, atol=2e-4, rtol=2e-4)


def _scores(model, drafter, text):
    kind, config = kind_of_spec(drafter.spec)
    target = Target(model.config, model.params)
    along = states_along(target, text, kind.taps(config))
    key = jax.random.key(0)
    drafts = kind.propose(drafter.params, config, along, 3, key)
    found = []
    for s, hidden in enumerate(drafts.hidden):
        flat = hidden[drafts.is_root & (drafts.roots + s < text.lengths[:, None])]
        found.append(drafts.score(flat, s))
    return found


@pytest.mark.full
def test_heads_that_are_not_widened_are_refused():
    target = tiny_llama(0)
    wide = widen(target, 4 * target.num_parameters()).config
    with pytest.raises(NotImplementedError, match="cannot be widened"):
        widen_head(specjax.load_drafter("ngram", target), target.config, wide)
    config = kind_of("eagle3").configure(target.config, {"norm_before_fc": True})
    head = specjax.LoadedDrafter(
        "head", EagleDrafter(config), eagle3.init(jax.random.key(0), config)
    )
    with pytest.raises(NotImplementedError, match="a norm before fc"):
        widen_head(head, target.config, wide)
