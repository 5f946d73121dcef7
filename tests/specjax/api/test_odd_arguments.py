"""Arguments of another kind: one clear error, and other requests go on."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax.models import Family
from specjax.testing import tiny_model

ENGINE = specjax.EngineConfig(max_rows=2, max_context=32, burst_steps=4, row_buckets=())


@pytest.fixture(scope="module")
def target():
    return tiny_model(num_layers=1, vocab_size=31)


@pytest.mark.full
@pytest.mark.parametrize(
    ("logprobs", "number"), [(21, 21), (2**31, 2**31), (2**70, 2**70), (-1, 31)]
)
def test_too_many_logprobs_end_their_own_request(target, logprobs, number):
    sampling = [specjax.SamplingParams(max_tokens=4, logprobs=asked) for asked in (None, logprobs)]
    fine, refused = specjax.generate(target, [[1, 2, 3], [4]], sampling=sampling, engine=ENGINE)
    assert len(fine.token_ids) == 4
    assert f"logprobs={number} exceeds EngineConfig.max_logprobs=20" in refused.error


@pytest.mark.full  # steps that report a whole vocabulary
def test_minus_one_is_the_whole_vocabulary(target):
    engine = dataclasses.replace(ENGINE, max_logprobs=40)
    sampling = specjax.SamplingParams(max_tokens=2, logprobs=-1, top_k=3, seed=-1)
    completion = specjax.generate(target, [[1, 2, 3]], sampling=sampling, engine=engine)[0]
    for token in completion.logprobs:
        ids, values = zip(*token.top_raw)
        assert sorted(ids) == list(range(31))
        np.testing.assert_allclose(np.exp(values).sum(), 1, rtol=1e-5)
        assert np.isfinite([value for _, value in token.top_processed]).sum() == 3
    decoder = specjax.build_decoder(target, engine=engine)
    batch = specjax.rollout(decoder, target.params, [[1, 2, 3]], sampling=sampling)
    assert batch.top_ids.shape == (1, 2, 31)
    feed = iter([[1, 2, 3]])
    with specjax.rollout_stream(decoder, target.params, feed, sampling=sampling) as stream:
        assert next(iter(stream)).top_ids.shape[2] == 31


@pytest.mark.parametrize(
    "policy", ["fixed", 5, {}, print], ids=["text", "number", "dict", "function"]
)
def test_a_policy_is_one(target, policy):
    with pytest.raises(TypeError, match=r"policy=.* has no .*; expected a"):
        specjax.generate(target, [[1, 2]], drafter="ngram", policy=policy, engine=ENGINE)


def test_a_dtype_is_no_name_of_one():
    with pytest.raises(ValueError, match=r"kv_cache_dtype=dtype\('int8'\)"):
        specjax.EngineConfig(kv_cache_dtype=np.dtype("int8"))


def test_whole_numbers_of_jax_are_whole_numbers():
    three = jnp.int32(3)
    assert specjax.SamplingParams(seed=three).seed == 3
    for name in ("memory_bytes", "kv_cache_bytes", "logit_bytes"):
        assert getattr(specjax.EngineConfig(**{name: three}), name) == 3


def test_rollouts_name_what_they_are_given():
    model = tiny_model(num_layers=1, vocab_size=31)
    decoder = specjax.build_decoder(model, engine=ENGINE)
    sampling = specjax.SamplingParams(max_tokens=2)
    with pytest.raises(ValueError, match=r"sampling=\[.* must be a SamplingParams or a mapping"):
        specjax.rollout(decoder, model.params, [[1]], sampling=[sampling])
    with pytest.raises(TypeError, match="decoder is 5; expected what"):
        specjax.rollout(5, model.params, [[1]], sampling=sampling)
    with pytest.raises(TypeError, match="batch is 5; expected a Rollout"):
        specjax.score(decoder, model.params, 5)


@pytest.mark.parametrize(
    "family", [None, 5, "llama", Family], ids=["none", "number", "text", "class"]
)
def test_what_is_no_family_is_not_registered(family):
    with pytest.raises(TypeError, match="expected an instance of"):
        specjax.models.register(family)
