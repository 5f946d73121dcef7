"""Every kind of head over a target, and a draft model over masks: the tokens of plain decoding.

Whatever happens to rows.

All of it takes ten minutes on two cores:

    pytest -n 2 --dist load -m "slow or full" tests/end_to_end/test_heads.py
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_engine_is_empty, tiny_llama
from test_absorb import ENGINE, PROMPTS, SAMPLING, InTurn, add_all, drain

import specjax
from specjax.config.sampling import SamplingParams
from specjax.drafters.spec import HybridDrafter, ModelDrafter
from specjax.heads.equations import dflash, eagle, eagle3, medusa, mlp_speculator
from specjax.heads.equations.dflash import DFlashConfig
from specjax.heads.equations.eagle import EagleConfig
from specjax.heads.equations.eagle3 import Eagle3Config
from specjax.heads.equations.medusa import MedusaConfig
from specjax.heads.equations.mlp_speculator import MlpSpeculatorConfig
from specjax.heads.specs import DFlashDrafter, EagleDrafter, NewestStateDrafter
from specjax.models.base import ModelConfig, before_final_norm

SLOW = pytest.mark.slow

WIDTH, VOCAB, DEPTH = 32, 61, 2
OWN = ModelConfig(
    architecture="llama",
    family="llama",
    vocab_size=VOCAB,
    hidden_size=WIDTH,
    intermediate_size=48,
    num_layers=1,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_position_embeddings=64,
)
OF_TARGET = {"target_hidden_size": WIDTH, "target_vocab_size": VOCAB}
LAST = {"aux_layers": (DEPTH,)}
BLOCK = {"aux_layers": (1, 2), "block_size": 4, "mask_token_id": 60, "causal_layers": (False,)}
HEADS = {
    "eagle": (EagleDrafter, eagle, EagleConfig(layers=OWN, target_vocab_size=VOCAB, **LAST)),
    "eagle3": (EagleDrafter, eagle3, Eagle3Config(layers=OWN, aux_layers=(0, 1, 2), **OF_TARGET)),
    "p_eagle": (
        EagleDrafter,
        eagle3,
        Eagle3Config(
            layers=dataclasses.replace(OWN, num_layers=2),
            aux_layers=(0, 1, 2),
            mask_token_id=60,
            **OF_TARGET,
        ),
    ),
    "mtp": (
        EagleDrafter,
        eagle,
        EagleConfig(
            layers=dataclasses.replace(OWN, qkv_bias=True),
            target_vocab_size=VOCAB,
            aux_layers=(before_final_norm(DEPTH),),
            is_mtp=True,
            has_hidden_first=True,
        ),
    ),
    "medusa": (NewestStateDrafter, medusa, MedusaConfig(most_drafts=3, **OF_TARGET, **LAST)),
    "mlp_speculator": (
        NewestStateDrafter,
        mlp_speculator,
        MlpSpeculatorConfig(most_drafts=3, inner_size=24, **OF_TARGET, **LAST),
    ),
    "dflash": (DFlashDrafter, dflash, DFlashConfig(layers=OWN, **OF_TARGET, **BLOCK)),
    "dflash2": (
        DFlashDrafter,
        dflash,
        DFlashConfig(
            layers=OWN,
            conv_kernel_size=2,
            conv_group_size=8,
            markov_rank=8,
            markov_kind="selector",
            selector_top_k=16,
            **OF_TARGET,
            **BLOCK,
        ),
    ),
    "dspark": (
        DFlashDrafter,
        dflash,
        DFlashConfig(layers=OWN, markov_rank=8, samples_from_anchor=True, **OF_TARGET, **BLOCK),
    ),
    "dspark_rnn": (
        DFlashDrafter,
        dflash,
        DFlashConfig(
            layers=OWN,
            markov_rank=8,
            markov_kind="rnn",
            samples_from_anchor=True,
            **OF_TARGET,
            **BLOCK,
        ),
    ),
}
# Heads that store features where others of their kind do not, and the other way round.
HEADS |= {
    name: (functools.partial(HEADS[of][0], store_features=stores), *HEADS[of][1:])
    for name, of, stores in (
        ("eagle3_stored", "eagle3", True),
        ("eagle3_captured", "eagle3", "captured"),
        ("p_eagle_at_once", "p_eagle", False),
        ("dflash_stored", "dflash", True),
        ("dflash_captured", "dflash", "captured"),
    )
}
PARALLEL = "pard"
# One of each pair that differs in what is stored alone.
KINDS = (*(name for name in HEADS if name not in ("eagle3_stored", "dflash_stored")), PARALLEL)
CHAINS_ALONE = (
    "dflash",
    "dflash2",
    "dflash_captured",
    "dflash_stored",
    "dspark",
    "dspark_rnn",
    "p_eagle",
    "p_eagle_at_once",
)
TREES = [name for name in KINDS if name not in (*CHAINS_ALONE, PARALLEL)]
QUICKEST = "mlp_speculator"
TREE = {"speculative_token_tree": [[0], [1], [0, 0], [0, 1], [0, 0, 0]]}
GROWN = {"tree_top_k": 2, "num_speculative_tokens": 3}


@pytest.fixture(scope="module")
def target():
    target = tiny_llama(0)
    assert target.config.hidden_size == WIDTH
    assert target.config.num_layers == DEPTH
    return target


def head(name, vocab=VOCAB, **fields):
    if name == PARALLEL:
        draft = tiny_llama(1, num_layers=1, mask_token_id=60, vocab_size=vocab)
        return specjax.LoadedDrafter(name, ModelDrafter(draft.config), draft.params)
    spec, equations, config = HEADS[name]
    fields["target_vocab_size"] = vocab
    if hasattr(config, "layers"):
        fields["layers"] = dataclasses.replace(config.layers, vocab_size=vocab)
    config = dataclasses.replace(config, **fields)
    params = equations.init(jax.random.key(1), config, std=0.3)
    return specjax.LoadedDrafter(name, spec(config), params)


def run(target, drafter, *, engine=ENGINE, depth=3, **options):
    with specjax.Engine(
        target,
        drafter=drafter,
        num_speculative_tokens=depth,
        engine=engine,
        **options,
    ) as running:
        tokens = drain(running, add_all(running))
        assert_engine_is_empty(running)
        return tokens, running._loop


@pytest.fixture(scope="module")
def plain(target):
    with specjax.Engine(target, engine=ENGINE) as engine:
        return drain(engine, add_all(engine))


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.full if name == "dspark" else SLOW) for name in KINDS],
)
def test_whatever_happens_to_rows(target, plain, name):
    """Chunks of prompts, shared prefixes, reused rows, two row buckets, K = 0 between drafts."""
    policy = InTurn(3, 0, 0)
    tokens, _ = run(target, head(name), policy=policy)
    assert tokens == plain
    assert {2, 4} <= policy.row_buckets
    assert len(policy.accepted) > 5


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.full if name == QUICKEST else SLOW) for name in KINDS],
)
def test_bfloat16_with_hidden_states_in_float32(target, name):
    """Heads read hidden states in their own dtype; what they draft changes no token."""
    half = lambda tree: jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), tree)
    target = dataclasses.replace(target, params=half(target.params))
    engine = dataclasses.replace(ENGINE, activation_dtype="float32", row_buckets=())
    with specjax.Engine(target, engine=engine) as running:
        plain = drain(running, add_all(running))
    own = head(name)
    policy = InTurn(3, 0, 0)
    drafter = dataclasses.replace(own, params=half(own.params))
    tokens, _ = run(target, drafter, policy=policy, engine=engine)
    assert tokens == plain
    assert len(policy.accepted) > 5


@SLOW
@pytest.mark.parametrize("name", KINDS)
def test_rows_that_are_preempted(target, plain, name):
    engine = dataclasses.replace(ENGINE, num_pages=17, burst_steps=1)
    tokens, loop = run(target, head(name), policy=InTurn(3, 0, 2), engine=engine)
    assert loop.num_preemptions > 0
    assert tokens == plain


@SLOW
@pytest.mark.parametrize("tree", [TREE, GROWN], ids=["tree", "grown"])
@pytest.mark.parametrize("name", TREES)
def test_trees(target, plain, name, tree):
    options = {"speculative_config": {"policy": "fixed"} | tree}
    with specjax.Engine(target, drafter=head(name), engine=ENGINE, **options) as engine:
        assert drain(engine, add_all(engine)) == plain


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.full if name == QUICKEST else SLOW)
        for name in KINDS
        if name != PARALLEL
    ],
)
def test_beside_history(target, plain, name):
    """Rows take a match where they expect more of it; the head sees every token all the same."""
    policy, config = InTurn(3, 0), {"corpus_tokens": 512}
    engine = dataclasses.replace(ENGINE, row_buckets=())
    tokens, loop = run(target, head(name), policy=policy, engine=engine, speculative_config=config)
    assert tokens == plain
    assert isinstance(loop.decoder.drafter, HybridDrafter)
    assert len(policy.accepted) > 5


@SLOW
@pytest.mark.parametrize("name", ["eagle3", "dflash", "dflash_captured"])
def test_beside_history_over_a_mesh(target, plain, name):
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), devices=jax.devices()[:4])
    config = {"corpus_tokens": 512}
    tokens, _ = run(
        target, head(name), policy=InTurn(3, 0, 2), mesh=mesh, speculative_config=config
    )
    assert tokens == plain


@SLOW
@pytest.mark.parametrize("shape", [(2, 1), (1, 2), (2, 2)], ids=str)
@pytest.mark.parametrize("name", KINDS)
def test_over_a_mesh(target, plain, name, shape):
    mesh = jax.make_mesh(shape, ("data", "tensor"), devices=jax.devices()[: shape[0] * shape[1]])
    tokens, _ = run(target, head(name), policy=InTurn(3, 0, 2), mesh=mesh)
    assert tokens == plain


@SLOW  # test_dflash has slices of a head in the quick set, test_split_drafter_tokens a model's
@pytest.mark.parametrize("name", KINDS)
def test_drafts_over_slices_of_the_vocabulary(name):
    """Two devices have half of the tokens each, and draft what one device drafts of all."""
    vocab = 64  # which two devices divide
    target, found = tiny_llama(0, vocab_size=vocab), []
    drafter = head(name, vocab, **{"has_head": False} if name in ("eagle3", "medusa") else {})
    for mesh in (None, jax.make_mesh((1, 2), ("data", "tensor"), devices=jax.devices()[:2])):
        policy = InTurn(3)
        engine = dataclasses.replace(ENGINE, row_buckets=())
        tokens, _ = run(target, drafter, policy=policy, mesh=mesh, engine=engine)
        found.append((tokens, policy.accepted))
    assert found[0] == found[1]
    assert sum(found[0][1]) > 5


@SLOW
@pytest.mark.parametrize("name", KINDS)
def test_requests_of_every_kind(target, name):
    """Rules that return the target's tokens, n, penalties, stops and bias, in one batch."""
    base = SamplingParams(temperature=0.9, max_tokens=14, seed=5)
    kinds = [
        dataclasses.replace(base, n=2),
        dataclasses.replace(base, repetition_penalty=1.3, presence_penalty=0.4),
        dataclasses.replace(base, top_k=5, min_p=0.05, stop_token_ids=(3, 9)),
        dataclasses.replace(base, temperature=0.0, logit_bias={7: 1.5}),
        dataclasses.replace(base, verification="delta", top_p=0.8),
    ]
    sampling = [kinds[i % len(kinds)] for i in range(len(PROMPTS))]
    found = [
        specjax.generate(
            target,
            PROMPTS,
            drafter=drafter,
            speculative_config={"policy": "fixed", "num_speculative_tokens": 3},
            sampling=sampling,
            engine=ENGINE,
        )
        for drafter in (None, head(name))
    ]
    texts = [[one.token_ids for one in out] for out in found]
    assert texts[0] == texts[1]


TABLE = {"num_speculative_tokens_per_batch_size": [[1, 1, 3], [2, 2, 1], [3, 4, 0]]}
GOODPUT = {"policy": "goodput", "num_speculative_tokens": 3}


@SLOW
@pytest.mark.parametrize("config", [TABLE, GOODPUT], ids=["table", "goodput"])
@pytest.mark.parametrize("name", KINDS)
def test_k_by_the_policies_that_users_have(target, name, config):
    """Rows end one after the other, so that by the table K goes from 0 over 1 to 3."""
    sampling = [
        SamplingParams(temperature=0.9, max_tokens=8 + 10 * row, seed=row, ignore_eos=True)
        for row in range(4)
    ]
    found = [
        specjax.generate(
            target,
            PROMPTS[:4],
            drafter=drafter,
            speculative_config=config if drafter else None,
            sampling=sampling,
            engine=dataclasses.replace(ENGINE, max_rows=4, burst_steps=2),
        )
        for drafter in (None, head(name))
    ]
    texts = [[one.token_ids for one in out] for out in found]
    assert texts[0] == texts[1]
    chosen = [decision.num_speculative_tokens for decision in found[1].stats.decisions]
    if config is TABLE:
        assert set(chosen) == {0, 1, 3}
        assert chosen == sorted(chosen)


@SLOW
@pytest.mark.parametrize("rule", ["rejection", "block", "traversal"])
@pytest.mark.parametrize("name", KINDS)
def test_rules_by_law_run_to_their_end(target, name, rule):
    out = specjax.generate(
        target,
        PROMPTS,
        drafter=head(name),
        verification=rule,
        speculative_config={"policy": "fixed", "num_speculative_tokens": 3},
        sampling=SAMPLING,
        engine=ENGINE,
    )
    assert all(len(one.token_ids) == SAMPLING.max_tokens for one in out)
    assert 0 < out.stats.acceptance.num_accepted < out.stats.acceptance.num_drafted


@SLOW
@pytest.mark.parametrize("name", KINDS)
def test_rollouts_with_new_weights(target, name):
    """A head that reads the target's tables reads those of each call."""
    newer = jax.tree.map(lambda leaf: leaf * 1.03, target.params)
    sampling, made = dataclasses.replace(SAMPLING, max_tokens=12), []
    for drafter in (None, head(name)):
        decoder = specjax.build_decoder(
            target, drafter=drafter, num_speculative_tokens=3 * bool(drafter), engine=ENGINE
        )
        own = () if drafter is None else drafter.params
        made.append(
            [
                specjax.rollout(
                    decoder,
                    specjax.DecoderParams(params, own) if drafter else params,
                    PROMPTS[:4],
                    num_samples=2,
                    sampling=sampling,
                )
                for params in (target.params, newer, target.params)
            ]
        )
    for ours, theirs in zip(*made, strict=True):
        np.testing.assert_array_equal(ours.completion_ids, theirs.completion_ids)
