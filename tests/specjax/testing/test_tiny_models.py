"""Random models for tests of third-party code."""

import jax
import numpy as np
import pytest

import specjax
from specjax.models.dense import sequence_logits
from specjax.testing import tiny_model


def test_a_seed_gives_the_same_weights():
    first, again, other = tiny_model(3), tiny_model(3), tiny_model(4)
    assert first.config == again.config == other.config
    leaves = [jax.tree.leaves(model.params) for model in (first, again, other)]
    assert {leaf.dtype for leaf in leaves[0]} == {np.dtype("float32")}
    for ours, same, others in zip(*leaves, strict=True):
        np.testing.assert_array_equal(ours, same)
        assert not np.array_equal(ours, others)


def test_fields_are_those_of_its_config():
    model = tiny_model(vocab_size=13, num_layers=1, tie_word_embeddings=True)
    assert (model.config.vocab_size, model.config.num_heads) == (13, 4)
    assert model.params["embed_tokens"].shape == (13, 32)
    assert len(model.params["layers"]) == 1
    assert "lm_head" not in model.params
    with pytest.raises(TypeError, match="num_legs"):
        tiny_model(num_legs=4)


def test_tokens_depend_on_the_whole_text():
    model = tiny_model(vocab_size=13, num_layers=1)
    texts = np.arange(12, dtype=np.int32).reshape(1, -1).repeat(2, axis=0) % 13
    texts[1, 0] = 5
    first, other = sequence_logits(model.params, model.config, texts)[:, -1]
    assert np.abs(first - other).max() > 0.01


@pytest.mark.full
def test_it_generates():
    sampling = specjax.SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    out = specjax.generate(tiny_model(), [[1, 2, 3]], sampling=sampling)
    assert len(out[0].token_ids) == 3
