"""policy_logprobs beside what rollouts report, and its gradients beside a plain forward's."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from asked_for import quick
from helpers import random_model, tiny_gpt2, tiny_llama
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from made_up_families import heron_config

import specjax
from specjax import EngineConfig, SamplingParams
from specjax.models.dense import sequence_logits
from specjax.rl import policy

PROMPTS = [[1, 2, 3], [4, 5, 6, 8, 9, 1, 2]]
SAMPLING = SamplingParams(temperature=0.7, max_tokens=24, seed=3, logprobs=0, entropy=True)
ENGINE = EngineConfig(page_size=8, max_rows=4, burst_steps=8, max_context=48)
WIDE = dataclasses.replace(ENGINE, activation_dtype="float32")
MODELS = {
    "llama": lambda: tiny_llama(0),
    "windows": lambda: tiny_llama(1, layer_windows=(5, None), qk_norm=True),
    "gpt2": lambda: tiny_gpt2(0),
}
EXPERTS = {"experts": lambda: random_model(heron_config(), 0)}
BFLOAT16 = {"dtype": jnp.bfloat16}


@functools.cache
def model(name="llama"):
    return (MODELS | EXPERTS)[name]()


@functools.cache
def decoder(name="llama", engine=ENGINE, **options):
    return specjax.build_decoder(
        model(name), engine=engine, drafter="ngram", num_speculative_tokens=3, **options
    )


@functools.cache
def batch(name="llama", engine=ENGINE, **options):
    run = decoder(name, engine, **options)
    return specjax.rollout(run, model(name).params, PROMPTS, num_samples=2, sampling=SAMPLING)


def logprobs(run, params, text, **options):
    options = {"temperature": SAMPLING.temperature} | options
    return jax.jit(lambda params, text: specjax.policy_logprobs(run, params, text, **options))(
        params, text
    )


def gap(told, text):
    return {
        name: float(value)
        for name, value in specjax.logprob_gap(
            text.logprobs.tempered, told.tempered, text.completion_mask
        ).items()
    }


def plain_tempered(params, name, text, temperature):
    """Returns what a trainer would write, from logits of the whole text."""
    logits = sequence_logits(params, model(name).config, text.token_ids, text.token_mask)
    first = text.prompt_ids.shape[1] - 1
    scores = jax.nn.log_softmax(logits[:, first:-1] / temperature)
    own = jnp.take_along_axis(scores, text.completion_ids[..., None], axis=-1)[..., 0]
    return jnp.where(text.completion_mask, own, 0.0)


@pytest.mark.full
@pytest.mark.parametrize("name", quick(MODELS, "llama"))
def test_in_float32_it_is_what_rollouts_report(name):
    text = batch(name)
    told = logprobs(decoder(name), model(name).params, text)
    np.testing.assert_allclose(told.tempered, text.logprobs.tempered, rtol=0, atol=3e-5)
    np.testing.assert_allclose(told.raw, text.logprobs.raw, rtol=0, atol=3e-5)
    np.testing.assert_allclose(told.entropy, text.entropy, rtol=0, atol=1e-4)
    assert (np.asarray(told.raw)[~np.asarray(text.completion_mask)] == 0).all()


@pytest.mark.full
def test_padding_may_stand_inside_a_text():
    """Windows count tokens of text, not places."""
    text = batch("windows")
    rng = np.random.default_rng(0)
    spread = {}
    for part in ("prompt", "completion"):
        ids, mask = (np.asarray(getattr(text, f"{part}_{name}")) for name in ("ids", "mask"))
        width = ids.shape[1] + 9
        spread[f"{part}_ids"] = np.full((len(ids), width), 60, np.int32)
        spread[f"{part}_mask"] = np.zeros((len(ids), width), bool)
        for row in range(len(ids)):
            places = np.sort(rng.choice(width, mask[row].sum(), replace=False))
            spread[f"{part}_ids"][row, places] = ids[row, mask[row]]
            spread[f"{part}_mask"][row, places] = True
    texts = specjax.Texts(**spread)
    told = logprobs(decoder("windows"), model("windows").params, texts)
    packed = logprobs(decoder("windows"), model("windows").params, text)
    for wide, dense in zip(told, packed, strict=True):
        own = np.asarray(wide)[spread["completion_mask"]]
        np.testing.assert_allclose(own, np.asarray(dense)[text.completion_mask], atol=1e-5)


@pytest.mark.full
def test_a_temperature_per_sample_and_none():
    text, params = batch(), model().params
    heats = np.array([0.7, 1.0, 0.0, 2.0], np.float32)
    told = logprobs(decoder(), params, text, temperature=heats)
    for row, heat in enumerate(heats):
        wanted = plain_tempered(params, "llama", text, heat or 1.0)
        np.testing.assert_allclose(told.tempered[row], wanted[row], atol=2e-5)
    np.testing.assert_allclose(told.tempered[2], told.raw[2], rtol=1e-6)


@pytest.mark.full
@pytest.mark.parametrize("name", quick([*MODELS, "experts"], "windows"))
def test_attention_over_blocks_of_queries_is_what_rollouts_report(name, monkeypatch):
    monkeypatch.setattr(policy, "QUERIES_AT_ONCE", 8)  # of 31
    assert batch(name).token_ids.shape[1] % 8
    test_in_float32_it_is_what_rollouts_report(name)


def test_only_pages_without_scales_round_what_they_hold():
    values = jnp.array([0.1, 1 / 3, 300.0])
    rounded = policy._as_kept(values, jnp.dtype("bfloat16"))
    np.testing.assert_array_equal(rounded, values.astype("bfloat16").astype("float32"))
    for dtype in ("int8", "float8_e4m3fn"):
        assert policy._as_kept(values, jnp.dtype(dtype)) is values


@pytest.mark.full
def test_memory_grows_with_the_width_and_not_its_square():
    run = decoder()

    def temp_bytes(width):
        ids, mask = (jax.ShapeDtypeStruct((4, width // 2), dtype) for dtype in (jnp.int32, bool))
        loss = lambda params, texts: specjax.policy_logprobs(
            run, params, texts, temperature=1.0
        ).raw.sum()
        texts = specjax.Texts(ids, mask, ids, mask)
        compiled = jax.jit(jax.grad(loss)).lower(model().params, texts).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    narrow, wide = temp_bytes(512), temp_bytes(2048)
    assert narrow < wide < 5 * narrow


@pytest.mark.full
@pytest.mark.parametrize("is_saving_memory", [True, False])
@pytest.mark.parametrize("name", quick(MODELS, "llama"))
def test_gradients_are_those_of_a_plain_forward(name, is_saving_memory, monkeypatch):
    if is_saving_memory:  # logits in chunks of five tokens of each sample, the last not full
        monkeypatch.setattr(policy, "LOGIT_BYTES", 4 * model(name).config.vocab_size * 4 * 5)
        monkeypatch.setattr(policy, "QUERIES_AT_ONCE", 8)
    run, text = decoder(name), batch(name)
    weights = jax.random.normal(jax.random.key(0), (4, 24))

    def loss(params):
        told = specjax.policy_logprobs(
            run, params, text, temperature=0.7, is_saving_memory=is_saving_memory
        )
        return jnp.sum(weights * told.tempered)

    def plain(params):
        return jnp.sum(weights * plain_tempered(params, name, text, 0.7))

    ours, theirs = (jax.jit(jax.value_and_grad(f))(model(name).params) for f in (loss, plain))
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for own, wanted in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs)):
        np.testing.assert_allclose(own, wanted, rtol=1e-3, atol=2e-4)


@pytest.mark.full
def test_what_is_saved_for_the_backward_pass():
    run, text = decoder(), batch()

    def saved(is_saving_memory):
        loss = lambda params: jnp.sum(
            specjax.policy_logprobs(
                run,
                params,
                text,
                temperature=1.0,
                is_saving_memory=is_saving_memory,
            ).tempered
        )
        backwards = jax.eval_shape(lambda params: jax.vjp(loss, params)[1], model().params)
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(backwards))

    assert saved(True) < 0.6 * saved(False)


@pytest.mark.parametrize("name", quick(["llama", "gpt2", "experts"], "llama"))
@pytest.mark.full
def test_bfloat16_with_hidden_states_in_float32(name):
    """The bounds are those that trainers need; without float32 the gap is some 30 times that."""
    text = batch(name, engine=WIDE, **BFLOAT16)
    narrow = batch(name, engine=ENGINE, **BFLOAT16)
    params = model(name).params
    wide = gap(logprobs(decoder(name, engine=WIDE, **BFLOAT16), params, text), text)
    assert wide["mean_gap"] < 2e-4
    assert wide["largest_gap"] < 5e-3
    other = gap(logprobs(decoder(name, engine=ENGINE, **BFLOAT16), params, narrow), narrow)
    assert other["mean_gap"] > 4 * wide["mean_gap"]


@pytest.mark.full
def test_float32_masters_are_cast_once_per_update():
    masters = model().params
    half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), masters)
    # One of its own, with the steps of the others.
    run = decoder.__wrapped__(engine=WIDE, **BFLOAT16)
    roll = lambda params: specjax.rollout(run, params, PROMPTS, sampling=SAMPLING)
    first, second, cast = roll(masters), roll(masters), roll(half)
    np.testing.assert_array_equal(first.completion_ids, cast.completion_ids)
    np.testing.assert_array_equal(first.logprobs.raw, cast.logprobs.raw)
    assert first.metrics["weights_bytes_moved"] == sum(x.nbytes for x in jax.tree.leaves(half))
    assert second.metrics["weights_bytes_moved"] == 0
    assert cast.metrics["weights_bytes_moved"] == 0
    newer = jax.tree.map(lambda leaf: leaf * 1.5, masters)
    assert roll(newer).metrics["weights_bytes_moved"] > 0
    assert not np.array_equal(roll(newer).logprobs.raw, first.logprobs.raw)
    loss = lambda params: jnp.sum(
        specjax.policy_logprobs(run, params, first, temperature=0.7).tempered
    )
    grads = jax.eval_shape(jax.grad(loss), masters)
    assert {leaf.dtype for leaf in jax.tree.leaves(grads)} == {jnp.dtype("float32")}


def test_weights_of_fewer_digits_than_the_decoder_are_refused():
    half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), model().params)
    with pytest.raises(ValueError, match=r"bfloat16.*build_decoder takes dtype="):
        specjax.rollout(decoder(), half, PROMPTS, sampling=SAMPLING)


@pytest.mark.full
def test_a_tree_in_another_layout():
    theirs = specjax.convert_back(model().params, "nnx", model().config)
    run = decoder(layout="nnx")
    text = batch()
    told = logprobs(run, theirs, text)
    np.testing.assert_allclose(told.tempered, text.logprobs.tempered, atol=3e-5)
    loss = lambda tree: specjax.policy_logprobs(run, tree, text, temperature=1.0).raw.sum()
    grads = jax.eval_shape(jax.grad(loss), theirs)
    assert jax.tree.structure(grads) == jax.tree.structure(theirs)


@pytest.mark.full
@pytest.mark.parametrize(
    ("shape", "kind"),
    [
        ((2, 2), AxisType.Auto),
        ((2, 2), AxisType.Explicit),
        pytest.param((4, 1), AxisType.Auto, marks=pytest.mark.full),
        pytest.param((1, 2), AxisType.Explicit, marks=pytest.mark.full),
    ],
)
def test_over_a_mesh(shape, kind, monkeypatch):
    monkeypatch.setattr(policy, "QUERIES_AT_ONCE", 8)
    devices = np.array(jax.devices()[: math.prod(shape)]).reshape(shape)
    mesh = Mesh(devices, ("data", "tensor"), axis_types=(kind, kind))
    config = model().config
    split = jax.device_put(model().params, specjax.param_shardings(config, mesh))
    rows = NamedSharding(mesh, PartitionSpec("data"))
    text = jax.device_put(batch(), rows)
    run = decoder()  # not built while a function is traced
    loss = lambda params, text: specjax.policy_logprobs(
        run, params, text, temperature=0.7
    ).tempered.sum()
    total, grads = jax.jit(jax.value_and_grad(loss))(split, text)
    alone, wanted = jax.jit(jax.value_and_grad(loss))(model().params, batch())
    np.testing.assert_allclose(total, alone, rtol=1e-5)
    for own, leaf in zip(jax.tree.leaves(grads), jax.tree.leaves(wanted)):
        np.testing.assert_allclose(own, leaf, rtol=1e-3, atol=2e-4)


def test_what_it_refuses():
    with pytest.raises(TypeError, match="expected a Rollout"):
        specjax.policy_logprobs(decoder(), model().params, [1, 2], temperature=1.0)
    with pytest.raises(TypeError, match="expected what"):
        specjax.policy_logprobs(None, model().params, batch(), temperature=1.0)
    with pytest.raises(ValueError, match="not in the layout"):
        specjax.policy_logprobs(decoder(), {"a": jnp.ones(3)}, batch(), temperature=1.0)
    for heat in (-1.0, float("nan"), jnp.ones(5), jnp.ones((4, 2))):
        with pytest.raises(ValueError, match="must be a number of at least 0, or one for each"):
            specjax.policy_logprobs(decoder(), model().params, batch(), temperature=heat)
    with pytest.raises(ValueError, match="activation_dtype='float64'"):
        EngineConfig(activation_dtype="float64")
