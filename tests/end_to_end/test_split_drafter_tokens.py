"""A drafter over 1, 2, 4 or all devices of the target's tensor axis: the tokens of one device."""

import dataclasses
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from asked_for import quick
from helpers import first_layer, save_llama, tiny_llama
from jax.sharding import Mesh, PartitionSpec

from specjax.api.assemble import Setup
from specjax.api.generation import Stream
from specjax.config.engine import EngineConfig
from specjax.config.sampling import SamplingParams
from specjax.decode.sizes import Sizes
from specjax.drafters import draft_model, one_pass
from specjax.drafters.base import Draft
from specjax.drafters.spec import ModelDrafter
from specjax.heads.loading import LoadedDrafter
from specjax.models import partition
from specjax.types import Proposal

WIDE = dict(
    vocab_size=64,
    hidden_size=64,
    intermediate_size=128,
    num_heads=8,
    num_kv_heads=8,
    head_dim=8,
)
ENGINE = EngineConfig(page_size=8, max_rows=4)
GREEDY = SamplingParams(temperature=0, max_tokens=20)
SAMPLED = SamplingParams(temperature=0.8, top_p=0.95, seed=5, max_tokens=20)
SIZES = (1, 5, 40, 17)
SIZES_OF_STATE = Sizes(
    rows=4,
    page_size=8,
    num_pages=32,
    pages_per_row=8,
    burst_steps=4,
    tree_slots=0,
    dtype=jnp.dtype("float32"),
)


def mesh_of(**sizes):
    count = int(np.prod([*sizes.values()]))
    return Mesh(np.array(jax.devices()[:count]).reshape(*sizes.values()), tuple(sizes))


@pytest.fixture(scope="module")
def target():
    return tiny_llama(0, **WIDE)


def prompts_of(seed=1):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 64, size).tolist() for size in SIZES]


def run(target, drafter, mesh=None, sampling=(GREEDY, SAMPLED) * 2, engine=ENGINE, **config):
    stream = Stream(
        target,
        prompts_of(),
        drafter=drafter,
        speculative_config={"num_speculative_tokens": 3, "policy": "fixed"} | config,
        sampling=[*sampling] if isinstance(sampling, tuple) else sampling,
        engine=engine,
        mesh=mesh,
    )
    result = stream.result()
    assert [c.error for c in result] == [None] * len(SIZES)
    return stream, [c.token_ids for c in result], result.stats.acceptance


def weight_shapes(stream, name):
    """Returns the shapes in which devices hold a weight of the drafter's first layer."""
    leaf = stream._loop.params.drafter["layers"][0][name]
    return {shard.data.shape for shard in leaf.addressable_shards}


def page_shapes(stream):
    pages = jax.tree.leaves(stream._loop._run.device_state.drafter)
    return {shard.data.shape[1] for leaf in pages for shard in leaf.addressable_shards}


@pytest.fixture(scope="module")
def single(target):
    _, tokens, acceptance = run(target, first_layer(target))
    assert acceptance.num_accepted > 0
    return tokens, acceptance


@pytest.mark.full
@pytest.mark.parametrize("num_shards", quick([1, 2, 4, 8], 2, slow=[1, 8]))
def test_tokens_of_one_device(target, single, num_shards):
    mesh, draft = mesh_of(tensor=8), first_layer(target)
    stream, tokens, acceptance = run(target, draft, mesh, draft_tensor_parallel_size=num_shards)
    assert tokens == single[0]
    # The same drafts, but for near-ties: a shard with other keys would accept far fewer.
    assert acceptance.num_accepted > 0.9 * single[1].num_accepted
    assert acceptance.num_drafted > 0
    assert weight_shapes(stream, "q_proj") == {(64 // num_shards, 64)}
    assert weight_shapes(stream, "down_proj") == {(64, 128 // num_shards)}
    assert page_shapes(stream) == {8 // num_shards}


@pytest.mark.slow
@pytest.mark.parametrize(
    "config",
    [
        {"speculative_token_tree": [2, 2, 1]},
        {"tree_top_k": 2},
        {"corpus_tokens": 256},
        {"verification": "rejection", "draft_tensor_parallel_size": 4},
        {"verification": "rejection", "speculative_token_tree": [2, 1, 1]},
        {"max_drafts_per_step": 8},
    ],
    ids=lambda config: "_".join(map(str, config)),
)
def test_drafts_of_every_kind(target, config):
    """Over part of an axis, beside a data axis whose shards have work of different lengths."""
    draft = first_layer(target)
    config = {"draft_tensor_parallel_size": 2} | config
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # without a mesh there is nothing to split over
        _, expected, _ = run(target, draft, **config)
    stream, tokens, acceptance = run(target, draft, mesh_of(data=2, tensor=4), **config)
    assert stream._setup.drafter.spec.num_shards == config["draft_tensor_parallel_size"]
    assert acceptance.num_drafted > 0
    assert tokens == expected


@pytest.mark.parametrize(
    ("most_logit_bytes", "depth"),
    [
        pytest.param(one_pass.MOST_LOGIT_BYTES, 3, marks=pytest.mark.slow),
        pytest.param(0, 2, marks=pytest.mark.full),  # steps of an equal K would be shared
    ],
)
def test_a_model_over_masks(target, monkeypatch, most_logit_bytes, depth):
    """Logits of all draft tokens at once, and of one after the other from slices of the head."""
    monkeypatch.setattr(one_pass, "MOST_LOGIT_BYTES", most_logit_bytes)
    draft = first_layer(target)
    draft = dataclasses.replace(draft, config=dataclasses.replace(draft.config, mask_token_id=9))
    how = {"num_speculative_tokens": depth}
    _, expected, alone = run(target, draft, **how)
    stream, tokens, acceptance = run(
        target, draft, mesh_of(data=2, tensor=4), draft_tensor_parallel_size=2, **how
    )
    assert stream._setup.drafter.spec.num_shards == 2
    assert stream._setup.drafter.spec.takes_masks
    assert tokens == expected
    assert acceptance.num_accepted > 0.9 * alone.num_accepted > 0


def test_copies_that_disagree_draft_what_the_first_one_does():
    """Rounding may differ between copies; here all but the first are far off."""
    mesh = partition.factored(mesh_of(tensor=4), 2)
    split = draft_model.Partition(2, partition.PART, partition.copies_axis(mesh))

    def draft(offset):
        place = jax.lax.axis_index(partition.COPIES)
        ids = jnp.array([[3, 7]], jnp.int32) + offset * place
        probs = jnp.full((1, 2, 4), 0.25) * (1 + place)
        proposal = Proposal(token_ids=ids, num_tokens=ids[0, :1], probs=probs)
        own = jnp.full(2, place)
        return split.agreed(Draft(proposal, own, ids[:, 1]))

    run = jax.shard_map(
        draft,
        mesh=mesh,
        in_specs=PartitionSpec(),
        out_specs=PartitionSpec((partition.COPIES, partition.PART)),
        check_vma=False,
    )
    found = jax.jit(run)(jnp.int32(40))
    np.testing.assert_array_equal(found.proposal.token_ids, [[3, 7]] * 4)
    np.testing.assert_array_equal(found.proposal.probs, np.full((4, 2, 4), 0.25))
    np.testing.assert_array_equal(found.written, [7] * 4)
    np.testing.assert_array_equal(found.state, [0] * 4 + [1] * 4)  # each keeps its own


@pytest.mark.full
def test_models_by_name_lie_where_they_are_used(tmp_path, target, single):
    folders = tmp_path / "target", tmp_path / "draft"
    for folder, model in zip(folders, (target, first_layer(target))):
        save_llama(folder, model)
    mesh = mesh_of(tensor=8)
    arguments = dict(drafter=str(folders[1]), draft_tensor_parallel_size=4)
    stream, tokens, _ = run(str(folders[0]), mesh=mesh, **arguments)
    assert tokens == single[0]
    assert weight_shapes(stream, "q_proj") == {(64 // 4, 64)}
    # What was loaded is what runs: nothing was placed anew.
    loaded, running = stream._setup.params, stream._loop.params
    pointers = lambda tree: [
        shard.data.unsafe_buffer_pointer()
        for leaf in jax.tree.leaves(tree)
        for shard in leaf.addressable_shards
    ]
    assert pointers(loaded) == pointers(running)


def test_a_split_that_is_not_possible_is_named(target):
    draft = tiny_llama(1, **WIDE | {"num_kv_heads": 2, "num_layers": 1})
    setup = lambda **config: Setup.of(
        target,
        drafter=draft,
        speculative_config={"draft_tensor_parallel_size": 8} | config,
        mesh=mesh_of(tensor=8),
    )
    with pytest.warns(UserWarning, match="num_kv_heads=2 of the draft model .* over 2 devices"):
        assert setup().drafter.spec.num_shards == 2
    # No note where nothing is drafted.
    assert setup(num_speculative_tokens=0).drafter.spec.num_shards == 1


def test_a_spec_split_for_another_mesh_is_refused_by_the_decoder(target):
    draft = first_layer(target)
    spec = ModelDrafter(draft.config).split(4)
    with pytest.raises(ValueError, match="over 4 devices does not fit a tensor axis of 2"):
        dataclasses.replace(
            Setup.of(target, mesh=mesh_of(tensor=2)),
            drafter=LoadedDrafter("draft", spec, draft.params),
        ).decoder(SIZES_OF_STATE, [])
