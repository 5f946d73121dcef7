"""The target in few bits drafts for itself: tokens of plain decoding, whatever it writes.

It drafts into the target's pages. `Poisoned` fills every slot past a row's final tokens with NaN
after each draft: a target that read one of them would give NaN.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from asked_for import quick
from helpers import tiny_gpt2, tiny_llama

import specjax
from specjax import EngineConfig, SamplingParams
from specjax.decode.made_weights import made_weights
from specjax.drafters.self_drafter import SelfDrafter
from specjax.drafters.spec import HybridDrafter
from specjax.heads.loading import LoadedDrafter
from specjax.models.quantised import num_bytes
from specjax.paged import kv_cache
from specjax.trees.expanding import Growth
from specjax.trees.static_shapes import from_widths

# A prompt of one token; two that begin with the same two pages; one that ends at a page's end.
LONG = [3, 1, 4, 1, 5, 9, 2, 6] * 2
PROMPTS = [[7], [*LONG, 5, 3], [*LONG, 8], [*LONG], [1, 2, 3, 1, 2, 3, 1]]
# Pages for two rows of four.
ENGINE = EngineConfig(page_size=8, max_rows=4, burst_steps=4, max_context=64, num_pages=12)
SAMPLED = SamplingParams(temperature=0.8, max_tokens=20, seed=5, ignore_eos=True)
GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
FIXED = {"policy": "fixed", "num_speculative_tokens": 3}


@dataclasses.dataclass(frozen=True)
class Poisoned(SelfDrafter):
    """Leaves NaN in all slots that it may write to, which is more than it does."""

    def build(self, context):
        drafter = super().build(context)

        def draft(params, state, decode_state, num_tokens):
            drafted = drafter.draft(params, state, decode_state, num_tokens)
            return drafted._replace(pages=poisoned(decode_state, drafted.pages))

        return drafter._replace(draft=draft)


def poisoned(decode_state, pages):
    """Returns pages with NaN in the slots of each active row from its root on; 127 in int8."""
    cache = decode_state.cache
    rows, width = cache.block_table.shape
    positions = jnp.tile(jnp.arange(width * cache.page_size), rows)
    row_ids = jnp.repeat(jnp.arange(rows), width * cache.page_size)
    sizes = {"page_size": cache.page_size, "num_slots": cache.num_slots}
    slots = kv_cache.slots(cache.block_table, row_ids, positions, **sizes)
    is_past = (positions >= cache.lengths[row_ids]) & decode_state.is_active[row_ids]
    slots = jnp.where(is_past, slots, cache.num_slots)

    def fill(page):  # [num_pages, lines, page_size, width]
        bad = jnp.nan if jnp.issubdtype(page.dtype, jnp.inexact) else 127
        by_slot = jnp.moveaxis(page, 2, 1).reshape(-1, page.shape[1], page.shape[3])
        by_slot = by_slot.at[slots].set(jnp.asarray(bad, page.dtype), mode="drop")
        shape = page.shape[0], page.shape[2], page.shape[1], page.shape[3]
        return jnp.moveaxis(by_slot.reshape(shape), 1, 2)

    return jax.tree.map(fill, pages)


@functools.cache
def target(**fields):
    return tiny_llama(0, **fields)


def run(drafter, sampling, model=None, *, engine=ENGINE, **config):
    mesh = config.pop("mesh", None)
    return specjax.generate(
        model or target(),
        PROMPTS,
        drafter=drafter,
        sampling=sampling,
        engine=engine,
        speculative_config=FIXED | config,
        mesh=mesh,
    )


def tokens_of(result):
    return [completion.token_ids for completion in result]


def assert_drafts(result, least=0.3):
    acceptance = result.stats.acceptance
    assert acceptance.num_accepted > least * acceptance.num_drafted > 0


TREE = from_widths((2, 1, 1))
CASES = {
    "greedy": (Poisoned(), GREEDY, {}),
    "sampled": (Poisoned(), SAMPLED, {}),
    "int4": (Poisoned(4, group_size=8), SAMPLED, {}),
    "delta": (Poisoned(), SAMPLED, {"verification": "delta"}),
    "tree": (Poisoned(shape=TREE), SAMPLED, {}),
    "grown tree": (Poisoned(shape=Growth(3, 2, 4)), SAMPLED, {}),
    "ranked": (Poisoned(), SAMPLED, {"max_drafts_per_step": 4}),
}


@pytest.mark.full
@pytest.mark.parametrize("name", quick(CASES, "sampled"))
def test_the_tokens_are_those_of_plain_decoding(name):
    drafter, sampling, config = CASES[name]
    found = run(drafter, sampling, **config)
    plain = run(None, sampling, num_speculative_tokens=0)
    assert tokens_of(found) == tokens_of(plain)
    # Under delta it proposes its likeliest token, and the target draws.
    assert_drafts(found, least=0.05 if name == "delta" else 0.3)


@pytest.mark.full
def test_requests_that_are_preempted():
    sampling = dataclasses.replace(SAMPLED, max_tokens=40)
    found = run(Poisoned(), sampling)
    assert tokens_of(found) == tokens_of(run(None, sampling, num_speculative_tokens=0))
    assert_drafts(found)
    assert found.stats.num_preemptions > 0


@pytest.mark.full
@pytest.mark.parametrize("change", [{"kv_cache_dtype": "int8"}, {"numerics": "invariant"}])
@pytest.mark.parametrize("shape", [None, TREE])
def test_pages_of_int8_and_invariant_numerics(change, shape):
    engine = dataclasses.replace(ENGINE, **change)
    wanted = run(None, SAMPLED, engine=engine, num_speculative_tokens=0)
    found = run(Poisoned(shape=shape), SAMPLED, engine=engine)
    assert tokens_of(found) == tokens_of(wanted)
    assert_drafts(found)


MODELS = {
    "tied": lambda: target(tie_word_embeddings=True),
    "qwen3": lambda: target(family="qwen3", qk_norm=True),
    "biases": lambda: target(qkv_bias=True, o_bias=True, mlp_bias=True),
    "windows": lambda: target(num_layers=3, layer_windows=(5, None, 7)),
    "gpt2": lambda: tiny_gpt2(0),
}


@pytest.mark.full
@pytest.mark.parametrize("name", MODELS)
def test_models_of_other_kinds(name):
    model = MODELS[name]()
    found = run("self-int8", SAMPLED, model)
    assert tokens_of(found) == tokens_of(run(None, SAMPLED, model, num_speculative_tokens=0))
    assert_drafts(found)


@pytest.mark.full
def test_layers_that_are_skipped():
    model = target(num_layers=3, layer_windows=(5, None, 7))
    plain = run(None, SAMPLED, model, num_speculative_tokens=0)
    found = run(Poisoned(skip_layers=(1,)), SAMPLED, model)
    assert tokens_of(found) == tokens_of(plain)
    whole = run("self-int8", SAMPLED, model)
    assert 0 < found.stats.acceptance.acceptance_rate < whole.stats.acceptance.acceptance_rate


@pytest.mark.full
@pytest.mark.parametrize(("data", "tensor"), [(1, 2), (2, 2), (4, 1)])
@pytest.mark.parametrize("drafter", [SelfDrafter(4, group_size=8), SelfDrafter()])
def test_meshes(data, tensor, drafter):
    devices = np.array(jax.devices()[: data * tensor]).reshape(data, tensor)
    mesh = jax.sharding.Mesh(devices, ("data", "tensor"))
    engine = dataclasses.replace(ENGINE, num_pages=12 * data, max_rows=4)
    found = run(drafter, SAMPLED, engine=engine, mesh=mesh)
    assert tokens_of(found) == tokens_of(run(None, SAMPLED, num_speculative_tokens=0))
    assert_drafts(found)


@pytest.mark.full
def test_each_device_makes_its_own_part():
    """Of weights that are split already, no other device's part is read."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("tensor",))
    model = target()
    split = specjax.param_shardings(model.config, mesh)
    params = jax.tree.map(jax.device_put, model.params, split)
    maker = made_weights(SelfDrafter(4, group_size=8).split(2), model.config, mesh)
    made = maker(params)
    down = made["layers"]["0"]["down_proj"]  # whose inputs are split
    assert down.values.sharding.spec[0] == "tensor"
    assert made["layers"]["0"]["q_proj"].values.sharding.spec[1] == "tensor"
    (program,) = maker._compiled.values()
    assert "all-gather" not in program.as_text()
    assert "all-to-all" not in program.as_text()
    assert maker.num_bytes == sum(num_bytes(leaf) for leaf in jax.tree.leaves(made))
    assert maker(params) is made
    assert maker.num_bytes == 0
    assert maker.num_traces == 1


@pytest.mark.full
def test_beside_history():
    found = run(HybridDrafter(Poisoned(), corpus_tokens=256, min_match=1), SAMPLED)
    assert tokens_of(found) == tokens_of(run(None, SAMPLED, num_speculative_tokens=0))
    assert_drafts(found)
    by_config = run("self-int8", SAMPLED, corpus_tokens=256)
    assert tokens_of(by_config) == tokens_of(found)


# New weights


def weights_of(version):
    """Returns other weights of the target, near those before."""
    rng = np.random.default_rng(version)
    return jax.tree.map(
        lambda leaf: leaf + np.float32(0.1 * version) * rng.standard_normal(leaf.shape, np.float32),
        target().params,
    )


def rollout(decoder, params):
    return specjax.rollout(decoder, params, PROMPTS, sampling=SAMPLED)


@pytest.mark.full
def test_a_rollout_drafts_with_the_weights_of_its_call():
    """Nothing is compiled again, and acceptance stays: a stale drafter would lose it."""
    config = target().config
    plain = specjax.build_decoder(config, engine=ENGINE)
    decoder = specjax.build_decoder(
        config, drafter="self-int8", speculative_config=FIXED, engine=ENGINE
    )
    for version in (0, 1, 2, 3):
        params = weights_of(version)
        found = rollout(decoder, params)
        np.testing.assert_array_equal(found.completion_ids, rollout(plain, params).completion_ids)
        assert found.metrics["acceptance_rate"] > 0.7, version
        made = SelfDrafter().made_by.num_bytes(config)
        assert found.metrics["weights_bytes_moved"] == made
        again = rollout(decoder, params)
        assert again.metrics["weights_bytes_moved"] == 0  # they are known again
        assert again.metrics["params_version"] == found.metrics["params_version"]
    assert decoder._made.num_traces == 1
    assert max(decoder._loop.decoder.traces.values()) == 1
    assert not decoder.has_draft_weights  # that could go stale


@pytest.mark.full
def test_an_engine_takes_new_weights_on_the_way():
    """Tokens of requests that came after the update are those of plain decoding under it."""
    with specjax.Engine(
        target(), drafter=Poisoned(), speculative_config=FIXED, engine=ENGINE
    ) as engine:
        for prompt in PROMPTS[:3]:
            engine.add(prompt, SAMPLED)
        engine.step(max_burst_steps=1)
        params = weights_of(2)
        assert engine.update_params(params) == 1
        assert engine.update_params(params) == 1  # the same again
        later = [engine.add(prompt, SAMPLED) for prompt in PROMPTS]
        done = {}
        while engine.has_work:
            for chunk in engine.step():
                if chunk.completion is not None:
                    done[chunk.prompt_index] = chunk.completion
        assert all(done[index].finish_reason == "length" for index in done)
        stats = engine.stats
    model = dataclasses.replace(target(), params=params)
    plain = run(None, SAMPLED, model, num_speculative_tokens=0)
    assert [done[index].token_ids for index in later] == tokens_of(plain)
    assert stats.acceptance.acceptance_rate > 0.5


@pytest.mark.full
def test_weights_with_nan_harm_no_later_rollout():
    decoder = specjax.build_decoder(
        target().config, drafter="self-int8", speculative_config=FIXED, engine=ENGINE
    )
    before = rollout(decoder, weights_of(1))
    broken = jax.tree.map(lambda leaf: leaf.at[..., 0].set(jnp.nan), weights_of(1))
    # The target's own weights: no fault of the drafter.
    with pytest.raises(ValueError, match="no sample could be drawn"):
        rollout(decoder, broken)
    after = rollout(decoder, weights_of(1))
    np.testing.assert_array_equal(after.completion_ids, before.completion_ids)
    assert after.metrics["num_accepted"] == before.metrics["num_accepted"]


@pytest.mark.full
def test_few_bits_that_are_nan_leave_the_targets_tokens():
    """The drafter alone fails: its drafts are dropped, and the text is that of plain decoding."""

    class Broken(type(SelfDrafter().made_by)):
        def __call__(self, config, params):
            made = super().__call__(config, params)
            return jax.tree.map(
                lambda x: x * jnp.nan if jnp.issubdtype(x.dtype, jnp.floating) else x, made
            )

    class BrokenDrafter(SelfDrafter):
        @property
        def made_by(self):
            return Broken(8, None)

    with pytest.warns(UserWarning, match="is turned off"):
        found = run(BrokenDrafter(), SAMPLED)
    assert tokens_of(found) == tokens_of(run(None, SAMPLED, num_speculative_tokens=0))


def test_weights_are_freed_with_the_targets():
    model = tiny_llama(7)
    maker = made_weights(SelfDrafter(), model.config, None)
    made = maker(model.params)
    assert maker(model.params) is made
    other = maker(jax.tree.map(lambda leaf: leaf * 1.0, model.params))
    assert other is not made
    del model, made, other
    assert maker._once.result is None


@pytest.mark.full
def test_the_command_and_the_config_name_it():
    config = specjax.SpeculationConfig.from_json({"method": "self-int4"})
    found = specjax.generate(
        target(), PROMPTS, sampling=SAMPLED, engine=ENGINE, speculative_config=config
    )
    assert found.stats.drafter == "self-int4"
    assert isinstance(specjax.load_drafter("self-int8", target()), LoadedDrafter)
