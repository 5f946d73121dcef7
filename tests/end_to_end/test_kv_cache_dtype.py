"""Keys and values kept as int8 or fp8: the texts of that cache, with and without speculation."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from asked_for import quick
from helpers import (
    assert_engine_is_empty,
    random_model,
    scripted_drafter,
    tiny_gpt2,
    tiny_llama,
    tiny_llama_config,
)

import specjax
from benchmarks import kv_cache_dtype
from pallas_kernels import layout
from specjax.config.engine import KV_CACHE_DTYPES, EngineConfig
from specjax.decode import kv_scales
from specjax.decode.decoder import shared_decoder
from specjax.drafters.spec import NgramDrafter
from specjax.models.dense import sequence_logits
from specjax.models.families import family_of
from specjax.paged import kv_cache

SAME = [*range(1, 9), 3]
PROMPTS = [[7, 8] * 9, SAME, [5], SAME, [*SAME[:4], 40, 41], [1, 2, 3, 1, 2, 3, 1]]
WARM = specjax.SamplingParams(temperature=0.7, max_tokens=18, ignore_eos=True, seed=3)
GREEDY = dataclasses.replace(WARM, temperature=0.0)
SAMPLING = [(WARM, GREEDY)[i % 2] for i in range(len(PROMPTS))]
ENGINE = EngineConfig(
    page_size=4, max_rows=4, burst_steps=4, max_context=64, max_prefill_tokens=16, row_buckets=()
)
# Every other case of a product beside the quick set: they compile steps of their own.
LONG = pytest.mark.full


def engine_of(name, **fields):
    return dataclasses.replace(ENGINE, kv_cache_dtype=name, **fields)


@pytest.fixture(scope="module")
def target():
    return tiny_llama(0)


def drain(engine):
    tokens = {engine.add(p, s): [] for p, s in zip(PROMPTS, SAMPLING, strict=True)}
    while engine.has_work:
        for chunk in engine.step():
            assert chunk.error is None
            tokens[chunk.prompt_index] += chunk.token_ids
    assert_engine_is_empty(engine)
    return list(tokens.values())


def texts(target, name, drafter=None, *, mesh=None, **fields):
    arguments = {} if drafter is None else {"num_speculative_tokens": 3}
    engine = engine_of(name, **fields)
    with specjax.Engine(target, drafter=drafter, engine=engine, mesh=mesh, **arguments) as running:
        return drain(running)


@pytest.fixture(scope="module")
def plain(target):
    found = functools.cache(lambda name: texts(target, name))
    return found


DRAFTERS = {
    "chains": NgramDrafter(1, 3),
    "trees": NgramDrafter(1, 3, num_matches=3),
}


@pytest.mark.parametrize(
    ("name", "drafter"),
    [
        pytest.param("int8", "trees", marks=pytest.mark.slow),
        pytest.param("fp8", "chains", marks=LONG),
        pytest.param("int8", "chains", marks=pytest.mark.slow),  # the next test has it
        pytest.param("fp8", "trees", marks=pytest.mark.slow),
    ],
)
def test_texts_are_the_same_with_and_without_speculation(target, plain, name, drafter):
    assert texts(target, name, DRAFTERS[drafter]) == plain(name)


@pytest.mark.parametrize("name", quick(KV_CACHE_DTYPES, slow=["fp8"]))
def test_preemption_chunks_and_shared_pages_change_no_text(target, plain, name):
    fields = dict(num_pages=17, max_prefill_tokens=8)
    assert texts(target, name, DRAFTERS["chains"], **fields) == plain(name)
    assert texts(target, name, prefix_caching=False, mixed_prefill=False) == plain(name)


@pytest.mark.slow
@pytest.mark.parametrize("num_right", [(3,), (0,)], ids=["all", "nothing"])
def test_all_or_nothing_accepted(target, plain, num_right):
    whole = [[*p, *t] for p, t in zip(PROMPTS, plain("int8"), strict=True)]
    drafter = scripted_drafter(whole, num_right=num_right, vocab_size=61)
    assert texts(target, "int8", drafter) == plain("int8")


@pytest.mark.full
def test_a_draft_model(target, plain):
    """Its own pages keep the dtype of its weights."""
    assert texts(target, "int8", tiny_llama(1)) == plain("int8")


@pytest.mark.full
def test_the_cache_is_not_that_of_the_weights(plain):
    """Or nothing above tells anything."""
    assert len({str(plain(name)) for name in (None, *KV_CACHE_DTYPES)}) == 3


@pytest.mark.parametrize("shape", quick([(1, 2), (2, 2)], slow=[(1, 2)]))
def test_over_a_mesh(target, shape):
    devices = jax.devices()[: shape[0] * shape[1]]
    mesh = jax.make_mesh(shape, ("data", "tensor"), devices=devices)
    with specjax.Engine(target, engine=engine_of("int8"), mesh=mesh) as engine:
        split = np.asarray(engine._loop._run.device_state.cache.scales)
        without = drain(engine)
    np.testing.assert_allclose(split, scales_of(target, "int8"), rtol=1e-5)
    assert texts(target, "int8", DRAFTERS["chains"], mesh=mesh) == without


def scales_of(model, name):
    dtype = kv_cache.pages_dtype(name, jnp.float32)
    measure = jax.jit(lambda p: kv_scales.measure_kv_scales(p, model.config, dtype))
    return np.asarray(measure(model.params))


def test_scales_follow_from_the_weights(target):
    """HEADROOM times what the largest key and value of the text asks for, head by head."""
    found = {}

    def attend(layer, q, k, v, cache, sinks=None):
        found[layer] = np.abs(np.asarray(k)).max((0, 1, 3)), np.abs(np.asarray(v)).max((0, 1, 3))
        return jnp.zeros_like(q), cache

    config = target.config
    ids = kv_scales.calibration_tokens(config.vocab_size)
    assert ids.min() >= 0
    assert len(np.unique(ids)) == config.vocab_size
    positions = jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape)
    first = dataclasses.replace(config, num_layers=1)
    params = {**target.params, "layers": target.params["layers"][:1]}
    family_of(config).forward(params, first, jnp.asarray(ids), positions, attend, (None,))
    for name, largest in (("int8", 127), ("fp8", 448)):
        scales = scales_of(target, name)
        assert scales.shape == (2, config.num_layers, config.num_kv_heads)
        expected = kv_scales.HEADROOM / largest * np.array(found[0])
        # Rounded to as many bits as bfloat16 has.
        np.testing.assert_allclose(scales[:, 0], expected, rtol=2**-8)
    assert len(np.unique(scales)) == scales.size


@pytest.mark.parametrize("make", [tiny_llama, tiny_gpt2])
def test_scales_of_each_family_are_sound(make):
    scales = scales_of(make(0), "int8")
    assert np.all(np.isfinite(scales) & (scales > 0))


def test_scales_of_weights_without_keys_are_sound(target):
    zero = jax.tree.map(jnp.zeros_like, target.params)
    scales = scales_of(dataclasses.replace(target, params=zero), "int8")
    assert np.all(np.isfinite(scales) & (scales > 0))


@pytest.mark.full
@pytest.mark.parametrize("name", ["int8", pytest.param("fp8", marks=LONG)])
def test_weights_whose_keys_are_nan_give_errors_and_no_text(target, name):
    """int8 has no NaN: its pages would hold zeros, and texts would look sound."""
    first, *others = target.params["layers"]
    first = first | {"k_proj": jnp.full_like(first["k_proj"], jnp.nan)}
    params = target.params | {"layers": (first, *others)}
    broken = dataclasses.replace(target, params=params)
    found = specjax.generate(broken, [[1, 2, 3]], sampling=GREEDY, engine=engine_of(name))
    assert found[0].finish_reason == "error"
    assert not found[0].token_ids


@pytest.mark.full
def test_weights_that_are_nan_for_one_token_give_errors_and_no_text(target):
    """int8 would hold a zero for it, and the text of a prompt that has it would look sound."""
    table = target.params["embed_tokens"]
    params = target.params | {"embed_tokens": table.at[50].set(jnp.nan)}
    broken = dataclasses.replace(target, params=params)
    found = specjax.generate(broken, [[1, 50, 3, 4]], sampling=GREEDY, engine=engine_of("int8"))
    assert found[0].finish_reason == "error"


def test_scales_are_measured_once_for_the_same_weights(target, monkeypatch):
    measured = []
    real = kv_scales._measure
    monkeypatch.setattr(kv_scales, "_measure", lambda *given: measured.append(1) or real(*given))
    monkeypatch.setattr(kv_scales, "_KNOWN", {})
    dtype = np.dtype(np.int8)
    first = kv_scales.kv_scales_of(target.params, target.config, dtype)
    assert kv_scales.kv_scales_of(target.params, target.config, dtype) is first
    other = jax.tree.map(lambda x: x + 0, target.params)
    kv_scales.kv_scales_of(other, target.config, dtype)
    assert len(measured) == 2
    of_numpy = jax.tree.map(np.asarray, target.params)
    for _ in range(2):
        np.testing.assert_array_equal(kv_scales.kv_scales_of(of_numpy, target.config, dtype), first)
    assert len(measured) == 4


def test_a_new_state_has_the_scales_again(target):
    """After a restart, without the drafter, with fewer pages, and after `forget`."""
    expected = scales_of(target, "int8")
    with specjax.Engine(target, drafter=DRAFTERS["chains"], engine=engine_of("int8")) as engine:
        run, loop = engine._loop._run, engine._loop

        def holds():
            np.testing.assert_array_equal(run.device_state.cache.scales, expected)
            return True

        assert holds()
        loop.forget()
        assert holds()
        with pytest.warns(UserWarning, match="is turned off for this run: a test"):
            run.turn_drafter_off("a test")
        assert holds()
        run.begin()
        assert holds()
        run.decoder = with_half_the_pages(run.decoder)
        run.begin()
        assert holds()


def with_half_the_pages(decoder):
    sizes = dataclasses.replace(decoder.sizes, num_pages=decoder.sizes.num_pages // 2)
    return shared_decoder(dataclasses.replace(decoder.config, sizes=sizes))


@pytest.mark.full
def test_scores_are_those_of_the_cache_that_samples(target):
    """So that the log-probabilities of rollouts and of `score` agree."""
    largest = {}
    for name in (None, "int8"):
        decoder = specjax.build_decoder(target, engine=engine_of(name))
        batch = specjax.rollout(decoder, target.params, PROMPTS, sampling=WARM)
        again = specjax.score(decoder, target.params, batch)
        both = batch.logprobs.raw, again.raw
        largest[name] = float(specjax.logprob_gap(*both, batch.completion_mask)["largest_gap"])
    # Rounding to int8 turns last bits into a step of its grid, seldom.
    assert largest[None] < 1e-4
    assert largest["int8"] < 5e-3


@pytest.mark.full
def test_other_weights_have_scales_of_their_own(target):
    """Rollouts change weights under one decoder: its texts are those of a new one."""
    other = dataclasses.replace(target, params=jax.tree.map(lambda x: 1.7 * x, target.params))
    decoder, fresh = (specjax.build_decoder(target, engine=engine_of("int8")) for _ in range(2))
    options = {"sampling": dataclasses.replace(WARM, max_tokens=12)}
    of_target = specjax.rollout(decoder, target.params, PROMPTS, **options)
    changed = specjax.rollout(decoder, other.params, PROMPTS, **options)
    expected = specjax.rollout(fresh, other.params, PROMPTS, **options)
    np.testing.assert_array_equal(changed.token_ids, expected.token_ids)
    assert not np.array_equal(changed.token_ids, of_target.token_ids)


def test_an_engine_holds_such_pages(target):
    with specjax.Engine(target, engine=engine_of("fp8")) as engine:
        cache = engine._loop._run.device_state.cache
        assert {page.dtype.name for page in jax.tree.leaves(cache.pages)} == {"float8_e4m3fn"}
        np.testing.assert_allclose(cache.scales, scales_of(target, "fp8"), rtol=1e-6)


@pytest.mark.parametrize(
    ("given", "kept"),
    [(None, None), ("auto", None), ("fp8_e4m3", "fp8"), ("float8_e4m3fn", "fp8"), ("int8", "int8")],
)
def test_names_of_the_same(given, kept):
    assert EngineConfig(kv_cache_dtype=given).kv_cache_dtype == kept


@pytest.mark.parametrize("given", ["fp4", "", 8, np.int8, ["int8"], "fp8_e5m2"])
def test_what_pages_cannot_hold_is_refused(given):
    with pytest.raises(
        ValueError, match=r"EngineConfig.kv_cache_dtype=.* must be one of int8, fp8"
    ):
        EngineConfig(kv_cache_dtype=given)


def test_invariant_numerics_are_refused_with_it():
    with pytest.raises(ValueError, match="does not go with numerics='invariant'"):
        EngineConfig(kv_cache_dtype="int8", numerics="invariant")


def test_a_kernel_that_reads_no_such_pages_is_refused_with_it():
    with pytest.raises(ValueError, match="does not go with kernels="):
        EngineConfig(kv_cache_dtype="fp8", kernels={"tree_attention": "mosaic_gpu"})


@pytest.mark.full
@pytest.mark.parametrize(("name", "most"), [("int8", 2e-3), ("fp8", 1e-2)])
def test_what_is_lost_is_little_and_something(name, most):
    """Of a random model; docs/guides/memory.md has the figures of a real one."""
    model = random_model(tiny_llama_config(max_position_embeddings=64), 0)
    ids = np.random.default_rng(0).integers(0, 61, (4, 64)).astype(np.int32)
    found = kv_cache_dtype.compare(model, ids, name)
    assert 0 < found["mean_kl"] < most
    assert found["mean_kl"] <= found["percentile_99_kl"] <= found["most_kl"]
    assert 0.85 < found["same_likeliest"] <= 1
    exact = np.asarray(
        kv_cache_dtype.log_distributions(model.params, model.config, jnp.asarray(ids), None)
    )
    dense = jax.nn.log_softmax(sequence_logits(model.params, model.config, jnp.asarray(ids)))
    np.testing.assert_allclose(exact, dense, atol=2e-4)


def test_every_quantised_dtype_has_a_largest_number():
    assert set(kv_cache.QUANTIZED) == set(KV_CACHE_DTYPES)
    assert set(kv_cache.QUANTIZED.values()) == set(layout.LARGEST)
