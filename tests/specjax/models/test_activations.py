"""Activations of GPT-2 and GPTBigCode: names of transformers, and the MLP that they run in."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.models import blocks, gpt2, unparsing
from specjax.models.hf_config import parse_config

GPT2 = {"model_type": "gpt2", "vocab_size": 19, "n_embd": 8, "n_layer": 1, "n_head": 2}
GPT2 |= {"n_positions": 16}
# Of transformers' ACT2FN 5.24.
TANH = ("gelu_new", "gelu_pytorch_tanh", "gelu_python_tanh", "gelu_fast", "gelu_accurate")
NAMES = {
    **dict.fromkeys(("gelu", "gelu_python"), lambda x: x * 0.5 * (1 + math.erf(x / 2**0.5))),
    **dict.fromkeys(
        TANH, lambda x: x / 2 * (1 + math.tanh((2 / math.pi) ** 0.5 * (x + 0.044715 * x**3)))
    ),
    "quick_gelu": lambda x: x / (1 + math.exp(-1.702 * x)),
}


def test_each_name_is_its_function():
    x = np.linspace(-4, 4, 9, dtype=np.float32)
    for family in ("gpt2", "gpt_bigcode"):
        for name, function in NAMES.items():
            config = parse_config(GPT2 | {"model_type": family, "activation_function": name})
            found = blocks.ACTIVATIONS[config.activation or "gelu_tanh"](x)
            right = [function(float(each)) for each in x]
            np.testing.assert_allclose(found, right, atol=2e-6, err_msg=name)
            raw = unparsing.gpt2(config) | {"model_type": family}
            assert parse_config(raw) == config
        assert parse_config(GPT2 | {"model_type": family}).activation is None
    with pytest.raises(ValueError, match="activation_function='relu' is not supported"):
        parse_config(GPT2 | {"activation_function": "relu"})


def test_the_mlp_runs_it_and_the_head_is_its_own():
    """One token through one layer, in float64: attention over itself alone gives its value."""
    raw = GPT2 | {"activation_function": "gelu", "tie_word_embeddings": False}
    config = parse_config(raw)
    params = gpt2.init(jax.random.key(0), config, std=0.5)
    attend = lambda layer, q, k, v, cache: (v, cache)

    @jax.jit
    def logits(params):
        hidden, _ = gpt2.forward(
            params, config, jnp.array([3]), jnp.array([1]), attend, (None,) * config.num_layers
        )
        return gpt2.logits(params, config, hidden)

    wide = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    (layer,) = wide["layers"]

    def norm(x, owner, name):
        scaled = (x - x.mean()) / np.sqrt(x.var() + config.norm_eps)
        return scaled * owner[name] + owner[f"{name}_bias"]

    project = lambda x, name: layer[name] @ x + layer[f"{name}_bias"]
    x = wide["embed_tokens"][3] + wide["embed_positions"][1]
    x = x + project(project(norm(x, layer, "input_norm"), "v_proj"), "o_proj")
    inner = project(norm(x, layer, "post_attention_norm"), "up_proj")
    x = x + project(np.array([NAMES["gelu"](each) for each in inner]), "down_proj")
    right = wide["lm_head"] @ norm(x, wide, "norm")
    np.testing.assert_allclose(logits(params)[0], right, atol=2e-5)
