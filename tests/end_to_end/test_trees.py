"""Trees of drafts: the same tokens as plain decoding, and caches as if nothing had branched."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from asked_for import quick
from helpers import ENGINE, first_layer, tiny_gpt2, tiny_llama

import specjax
from pallas_kernels import layout
from pallas_kernels.move_kv import move_kv
from specjax.api.generation import Stream
from specjax.config.sampling import SamplingParams
from specjax.config.speculation import SpeculationConfig
from specjax.decode import commit
from specjax.decode.decoder import shared_decoder
from specjax.models.families import family_of
from specjax.models.layers import dense_causal_attention
from specjax.paged import kv_cache

GREEDY = SamplingParams(temperature=0, max_tokens=20)
EVERYTHING = SamplingParams(
    temperature=1,
    top_p=0.95,
    repetition_penalty=1.1,
    presence_penalty=0.3,
    frequency_penalty=0.1,
    logit_bias={3: 1.0, 40: -2.0},
    max_tokens=20,
    logprobs=2,
    seed=5,
)
SAMPLING = {"greedy": GREEDY, "everything": EVERYTHING}
TREES = {
    "chain": (1, 1, 1),
    "wide": (4,),
    "full": (3, 2, 2),
    "uneven": "[(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0)]",
}


@pytest.fixture(scope="module")
def prompts():
    rng = np.random.default_rng(0)
    return [rng.integers(0, 61, size).tolist() for size in (1, 2, 7, 8, 9, 70, 16, 3)]


@pytest.fixture(scope="module")
def plain(target, prompts):
    return {
        name: specjax.generate(target, prompts, sampling=sampling, engine=ENGINE)
        for name, sampling in SAMPLING.items()
    }


def config_of(tree, **changes):
    return SpeculationConfig(speculative_token_tree=tree, **changes)


SLOW = pytest.mark.slow


@pytest.mark.full
@pytest.mark.parametrize("sampling", quick(SAMPLING, slow=["greedy"]))
@pytest.mark.parametrize(
    "tree", ["uneven", *(pytest.param(t, marks=SLOW) for t in TREES if t != "uneven")]
)
def test_trees_change_nothing(target, prompts, plain, tree, sampling):
    out = specjax.generate(
        target,
        prompts,
        drafter=first_layer(target),
        sampling=SAMPLING[sampling],
        engine=ENGINE,
        speculative_config=config_of(TREES[tree]),
    )
    counts = out.stats.acceptance
    assert 0 < counts.num_accepted < counts.num_drafted
    for ours, theirs in zip(out, plain[sampling]):
        assert ours.token_ids == theirs.token_ids
        for one, other in zip(ours.logprobs or (), theirs.logprobs or (), strict=True):
            assert one.token_id == other.token_id
            np.testing.assert_allclose(one.processed, other.processed, atol=1e-4)
            np.testing.assert_allclose(one.raw, other.raw, atol=1e-4)


@pytest.mark.slow
def test_a_chain_as_a_tree_accepts_what_the_chain_does(target, prompts):
    draft = first_layer(target)
    run = lambda **speculation: specjax.generate(
        target,
        prompts,
        drafter=draft,
        sampling=EVERYTHING,
        engine=ENGINE,
        speculative_config=SpeculationConfig(**speculation),
    )
    chain = run(num_speculative_tokens=3)
    tree = run(speculative_token_tree=(1, 1, 1))
    assert tree.stats.acceptance == chain.stats.acceptance


@pytest.mark.slow
def test_wider_trees_accept_more(target, prompts):
    lengths = [
        specjax.generate(
            target,
            prompts,
            drafter=first_layer(target),
            sampling=EVERYTHING,
            engine=ENGINE,
            speculative_config=config_of(tree),
        ).stats.mean_acceptance_length
        for tree in ((1, 1), (2, 2), (4, 4))
    ]
    assert lengths == sorted(set(lengths))


@pytest.mark.full
def test_a_request_caps_the_depth(target, prompts, plain):
    caps = [0, 1, 2, 3] * 2
    sampling = [dataclasses.replace(GREEDY, num_speculative_tokens=cap) for cap in caps]
    out = specjax.generate(
        target,
        prompts,
        drafter=first_layer(target),
        sampling=sampling,
        engine=ENGINE,
        speculative_config=config_of(TREES["uneven"]),
    )
    for cap, ours, theirs in zip(caps, out, plain["greedy"]):
        assert ours.token_ids == theirs.token_ids
        assert len(ours.acceptance.drafted_at) == cap
    # A step that caps the depth at 1 verifies the root's three children and no more.
    one = out[1].acceptance
    assert one.num_drafted <= 3 * one.num_steps


@pytest.mark.slow
def test_a_smaller_number_of_speculative_tokens_cuts_the_tree(target, prompts, plain):
    out = specjax.generate(
        target,
        prompts,
        drafter=first_layer(target),
        sampling=GREEDY,
        engine=ENGINE,
        num_speculative_tokens=1,
        speculative_config=config_of((2, 2, 1)),
    )
    assert [c.token_ids for c in out] == [c.token_ids for c in plain["greedy"]]
    assert len(out.stats.acceptance.drafted_at) == 1


@pytest.mark.full
@pytest.mark.parametrize(
    "max_tokens", [1, *(pytest.param(n, marks=pytest.mark.full) for n in (2, 3, 5))]
)
def test_the_end_of_a_row_cuts_the_tree(target, prompts, plain, max_tokens):
    out = specjax.generate(
        target,
        prompts,
        drafter=first_layer(target),
        sampling=dataclasses.replace(GREEDY, max_tokens=max_tokens),
        engine=ENGINE,
        speculative_config=config_of(TREES["uneven"]),
    )
    for ours, theirs in zip(out, plain["greedy"]):
        assert ours.token_ids == theirs.token_ids[:max_tokens]
    # A tree is as deep as the output may still grow, and has slots for all its nodes.
    counts = out.stats.acceptance
    assert len(counts.drafted_at) == min(max_tokens - 1, 3)
    if max_tokens > 3:
        # Seven nodes though only five tokens may come.
        assert max(c.acceptance.num_drafted for c in out) >= 7


@pytest.mark.parametrize("sampling", quick(SAMPLING, "greedy"))
@pytest.mark.parametrize("num_nodes", [None, pytest.param(5, marks=SLOW)])
def test_several_ngram_matches_make_a_tree(target, sampling, num_nodes):
    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, 4, size).tolist() for size in (40, 9, 70, 3)]
    few = {token: 8.0 for token in range(4)}  # a text of four words repeats itself
    params = dataclasses.replace(SAMPLING[sampling], logit_bias=few)
    run = lambda **more: specjax.generate(target, prompts, sampling=params, engine=ENGINE, **more)
    plain = run()
    lengths = []
    for num_matches in (1, 4):
        config = SpeculationConfig(
            method="ngram",
            num_speculative_tokens=4,
            prompt_lookup_matches=num_matches,
            num_draft_nodes=num_nodes if num_matches > 1 else None,
            prompt_lookup_min=1,
        )
        out = run(speculative_config=config)
        assert [c.token_ids for c in out] == [c.token_ids for c in plain]
        assert 0 < out.stats.acceptance.num_accepted < out.stats.acceptance.num_drafted
        lengths.append(out.stats.mean_acceptance_length)
    assert lengths[1] > lengths[0]


@pytest.mark.slow
def test_positions_of_gpt2(prompts):
    target = tiny_gpt2(0)
    run = lambda **more: specjax.generate(target, prompts, sampling=GREEDY, engine=ENGINE, **more)
    out = run(drafter=target, speculative_config=config_of((2, 2, 1)))
    assert [c.token_ids for c in out] == [c.token_ids for c in run()]
    assert out.stats.mean_acceptance_length > 2


@pytest.mark.slow
def test_sliding_windows():
    rng = np.random.default_rng(2)
    target = tiny_llama(0, layer_windows=(None, 40))
    prompts = [rng.integers(0, 61, size).tolist() for size in (70, 35)]
    run = lambda **more: specjax.generate(target, prompts, sampling=GREEDY, engine=ENGINE, **more)
    out = run(drafter=target, speculative_config=config_of((2, 1, 1)))
    assert [c.token_ids for c in out] == [c.token_ids for c in run()]
    assert out.stats.mean_acceptance_length > 3


@pytest.mark.parametrize(
    "verification",
    [pytest.param(rule, marks=SLOW) for rule in ("seeded", "delta", "rejection")],
)
def test_caches_hold_the_accepted_path_in_order(target, prompts, verification, monkeypatch):
    """After steps that accepted second siblings, keys and values are those of the text."""
    num_moved = []

    def counting(pages, source, target):
        # What stays is given no slot, twice.
        moved = jnp.sum(source != target)
        jax.debug.callback(lambda count: num_moved.append(int(count)), moved)
        return move_kv(pages, source, target)

    monkeypatch.setattr(commit, "move_kv", counting)
    # Nothing compiled before or after may be shared.
    shared_decoder.cache_clear()
    draft = first_layer(target)
    params = dataclasses.replace(EVERYTHING, logprobs=None, max_tokens=60)
    stream = Stream(
        target,
        prompts[6],
        drafter=draft,
        sampling=params,
        engine=ENGINE,
        speculative_config=config_of((3, 2, 1), verification=verification),
    )
    (completion,) = stream.result()
    shared_decoder.cache_clear()
    jax.effects_barrier()
    assert completion.acceptance.num_accepted > 5
    # Accepted nodes that did not already lie where a chain's would.
    assert sum(num_moved) > 0
    state = stream._loop._run.device_state
    text = [*completion.prompt_token_ids, *completion.token_ids]
    for model, pages, lengths in (
        (target, state.cache.pages, state.cache.lengths),
        (draft, state.drafter, state.drafter_lengths),
    ):
        length = int(lengths[0])
        assert len(text) - 6 <= length <= len(text) - 1
        check_cache(model, text, pages, state.cache, 0, length)


def check_cache(model, text, pages, cache, row, length):
    config = model.config

    def attend(layer, q, k, v, _):
        return dense_causal_attention(q, k, v, scale=config.scale), (k, v)

    _, expected = family_of(config).forward(
        model.params,
        config,
        jnp.asarray(text)[None],
        jnp.arange(len(text))[None],
        attend,
        (None,) * config.num_layers,
    )
    positions = jnp.arange(length)
    slots = kv_cache.slots(
        cache.block_table,
        jnp.full(length, row),
        positions,
        page_size=cache.page_size,
        num_slots=cache.num_slots,
    )
    for layer, dense in zip(pages, expected, strict=True):
        for ours, theirs in zip(layer, dense, strict=True):
            np.testing.assert_allclose(
                layout.read_slots(ours, slots), theirs[0, :length], atol=2e-5
            )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"speculative_token_tree": "[(0,), (1, 0)]"}, r"needs \(1,\)"),
        ({"speculative_token_tree": "tree"}, "must list nodes"),
        ({"speculative_token_tree": []}, "must list nodes"),
        ({"speculative_token_tree": (0, 2)}, "must list nodes"),
        ({"speculative_token_tree": (16, 16)}, "more than 255 nodes"),
        (
            {"speculative_token_tree": (2, 1), "num_speculative_tokens": 3},
            "deeper than speculative_token_tree",
        ),
        ({"speculative_token_tree": (2, 1), "method": "ngram"}, "leave it out"),
    ],
)
def test_bad_trees(target, change, message):
    with pytest.raises(ValueError, match=message):
        specjax.generate(
            target,
            [[1, 2]],
            drafter=None if "method" in change else target,
            speculative_config=SpeculationConfig(**change),
        )
