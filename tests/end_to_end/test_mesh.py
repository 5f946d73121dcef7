"""Several devices: the same tokens through the same code, and no page crosses the mesh."""

import dataclasses
import re

import jax
import numpy as np
import pytest
from helpers import first_layer, tiny_gpt2, tiny_llama
from jax.sharding import Mesh

import specjax
from specjax.api.generation import Stream
from specjax.config.engine import EngineConfig
from specjax.config.sampling import SamplingParams
from specjax.models import sharding

PAGE_SIZE = 8
COLLECTIVE = re.compile(
    r"= (.+?) (?:all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)"
)


@pytest.fixture(scope="module")
def mesh():
    devices = jax.devices()
    assert len(devices) >= 4, "tests/conftest.py asks for eight CPU devices"
    return Mesh(np.array(devices[:4]).reshape(2, 2), ("data", "tensor"))


GREEDY = SamplingParams(temperature=0, max_tokens=20)
SAMPLED = SamplingParams(temperature=0.8, top_p=0.95, seed=5, max_tokens=20, logprobs=1)


@pytest.mark.slow  # the gate has a draft model under every rule on four devices
@pytest.mark.parametrize("make", [tiny_llama, tiny_gpt2])
def test_same_tokens_on_four_devices(mesh, make):
    target = make(0)
    drafter = make(0, num_layers=1) if make is tiny_llama else "ngram"
    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, 61, size).tolist() for size in (1, 5, 90, 17, 8, 33)]
    arguments = {
        "drafter": drafter,
        "num_speculative_tokens": 3,
        "sampling": [GREEDY, SAMPLED] * 3,
        "engine": EngineConfig(page_size=PAGE_SIZE, max_rows=4),
    }
    single = specjax.generate(target, prompts, **arguments)
    stream = Stream(target, prompts, mesh=mesh, **arguments)
    split = stream.result()
    assert [c.token_ids for c in split] == [c.token_ids for c in single]

    assert_no_page_crosses(stream._loop.decoder.compiled_burst(3).as_text())


def assert_no_page_crosses(text):
    shapes = set(COLLECTIVE.findall(text))  # of a tuple, all of its shapes
    assert shapes, "a tensor-parallel step adds partial sums"
    # Pages are the only arrays whose third axis is the page size.
    page_like = [shape for shape in shapes if f",{PAGE_SIZE}," in shape]
    assert not page_like, page_like


@pytest.mark.slow
@pytest.mark.parametrize("axis", ["data", "tensor"])
def test_a_mesh_of_one_axis(axis):
    target = tiny_llama(0)
    prompts = [[1, 2, 3], [4, 5], [6]]
    sampling = SamplingParams(temperature=0.8, seed=1, max_tokens=8)
    single = specjax.generate(target, prompts, sampling=sampling)
    line = Mesh(np.array(jax.devices()[:2]), (axis,))
    split = specjax.generate(target, prompts, sampling=sampling, mesh=line)
    assert [c.token_ids for c in split] == [c.token_ids for c in single]


# Collectives stand in loops then, whose lengths differ between data shards.
IN_PARTS = EngineConfig(page_size=PAGE_SIZE, max_rows=4, logit_bytes=4 * 61 * 3)
INVARIANT = EngineConfig(page_size=PAGE_SIZE, max_rows=4, numerics="invariant", token_bucket=4)


@pytest.mark.slow
@pytest.mark.parametrize("engine", [IN_PARTS, INVARIANT], ids=["chunks", "invariant"])
def test_loops_over_tokens_on_four_devices(mesh, engine):
    target = tiny_llama(0)
    rng = np.random.default_rng(3)
    # All work in one data shard for a while: the other's loops are shorter.
    prompts = [rng.integers(0, 61, size).tolist() for size in (4, 30, 17)]
    arguments = {
        "drafter": tiny_llama(0, num_layers=1),
        "sampling": [GREEDY, SAMPLED, SAMPLED],
        "engine": engine,
        "speculative_config": {"num_speculative_tokens": 3, "max_drafts_per_step": 8},
    }
    single = specjax.generate(target, prompts, **arguments)
    split = specjax.generate(target, prompts, mesh=mesh, **arguments)
    assert [c.token_ids for c in split] == [c.token_ids for c in single]
    with pytest.raises(ValueError, match="below the mesh's 2 data shards"):
        specjax.generate(
            target,
            prompts,
            mesh=mesh,
            **arguments | {"speculative_config": {"max_drafts_per_step": 1}},
        )


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["seeded", "rejection"])
def test_trees_and_rules_on_four_devices(mesh, rule):
    target = tiny_llama(0)
    rng = np.random.default_rng(2)
    prompts = [rng.integers(0, 61, size).tolist() for size in (4, 30, 17, 8)]
    arguments = {
        "drafter": tiny_llama(0, num_layers=1),
        "verification": rule,
        "speculative_config": {"speculative_token_tree": [2, 2]},
        "sampling": SAMPLED,
        "engine": EngineConfig(page_size=PAGE_SIZE, max_rows=4),
    }
    single = specjax.generate(target, prompts, **arguments)
    split = specjax.generate(target, prompts, mesh=mesh, **arguments)
    assert [c.token_ids for c in split] == [c.token_ids for c in single]
    assert split.stats.acceptance.num_drafted > 0


VOCAB = 1024  # halves in the tensor axis; with 61 tokens it stays whole
RULES = ("seeded", "rejection", "block", "typical", "traversal", "delta", "lenient")


def divided_arguments(**sampling):
    """Returns a target whose vocabulary is split, prompts, and arguments with every rule."""
    target = tiny_llama(0, vocab_size=VOCAB)
    rng = np.random.default_rng(4)
    # The eighth row is greedy under a rule by law.
    prompts = [rng.integers(0, VOCAB, size).tolist() for size in (3, 9, 17, 2, 8, 30, 5, 4)]
    drawn = SamplingParams(temperature=0.9, seed=7, max_tokens=12, logprobs=2, **sampling)
    rows = [dataclasses.replace(drawn, verification=rule) for rule in RULES]
    rows += [dataclasses.replace(drawn, temperature=0, verification="rejection")]
    return {
        "target": target,
        "prompts": prompts,
        "drafter": first_layer(target),
        "sampling": rows,
        "engine": EngineConfig(page_size=PAGE_SIZE, max_rows=8),
    }


def assert_same_completions(split, single):
    for ours, theirs in zip(split, single, strict=True):
        assert ours.token_ids == theirs.token_ids
        for one, other in zip(ours.logprobs, theirs.logprobs, strict=True):
            assert (one.processed, one.raw) == pytest.approx((other.processed, other.raw), abs=1e-5)
            assert [token for token, _ in one.top_raw] == [token for token, _ in other.top_raw]


@pytest.mark.full
@pytest.mark.parametrize(
    ("sampling", "tree"),
    [
        ({"top_k": 600, "top_p": 0.9, "logit_bias": {511: 3.0, 512: 3.0}}, None),
        pytest.param({}, (2, 1), marks=pytest.mark.slow),
    ],
    ids=["chain", "tree"],
)
def test_every_rule_over_halves_of_the_vocabulary(mesh, sampling, tree):
    arguments = divided_arguments(**sampling)
    shape = {"speculative_token_tree": list(tree)} if tree else {"num_speculative_tokens": 2}
    if tree:  # block verification takes chains
        arguments["sampling"] = [
            dataclasses.replace(row, verification="traversal")
            if row.verification == "block"
            else row
            for row in arguments["sampling"]
        ]
    arguments["speculative_config"] = shape
    single = specjax.generate(**arguments)
    stream = Stream(mesh=mesh, **arguments)
    assert_same_completions(stream.result(), single)
    assert single.stats.acceptance.num_accepted > 0

    text = stream._loop.decoder.compiled_burst(2).as_text()
    assert_no_page_crosses(text)
    # No collective of logits: the widest array is one sum per 16 tokens, of the draws.
    sizes = re.findall(r"\w+\[([\d,]*)\]", " ".join(COLLECTIVE.findall(text)))
    widest = max(int(size) for sizes_of in sizes for size in sizes_of.split(",") if size)
    assert widest < VOCAB // 2, widest


def test_models_that_do_not_divide_are_refused(mesh):
    target = tiny_llama(0, num_heads=3, num_kv_heads=3)
    with pytest.raises(ValueError, match="num_heads=3 is not divisible"):
        specjax.generate(target, [[1, 2]], mesh=mesh)


def test_every_array_has_logical_axes(mesh):
    for model in (tiny_llama(0), tiny_gpt2(0)):
        specs = sharding.param_specs(model.params, mesh, model.config)
        for spec, leaf in zip(jax.tree.leaves(specs), jax.tree.leaves(model.params)):
            assert len(spec) == leaf.ndim


@pytest.mark.full
def test_memory_is_planned_for_a_drafter_with_axes_of_its_own():
    line = jax.make_mesh((1, 2), ("data", "tensor"), devices=jax.devices()[:2])
    engine = EngineConfig(page_size=8, max_rows=2, max_context=64, memory_bytes=10**9)
    with specjax.Engine(tiny_llama(0), drafter="history", mesh=line, engine=engine) as running:
        running.add([1, 2, 1, 2], SamplingParams(max_tokens=4))
        while running.has_work:
            running.step()
