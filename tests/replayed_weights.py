"""A sample replayed under the weights that its completion names: slow, one token at a time.

Keys and values lie in one list per layer, in float64. The completion's fills say when all of
them are computed anew and under which weights, its versions which weights compute the next.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from head_equations import mlp, rms, rotated, wide

from specjax.api.requests import derive_seed
from specjax.sampling.row_sampling import seed_words
from specjax.sampling.seeded_noise import TARGET_TOKEN, gumbel_noise, token_keys

SCORE_TIE = 1e-4  # two scores this close: float32 decides differently than float64
MOST_POSITIONS = 256


class Replay:
    """The function that a sample is of: its weights by version, and its record.

    Args:
      config: of a Llama without biases and norms of heads.
      weights: trees by version.
    """

    def __init__(self, config, weights):
        self._config = config
        self._weights = {version: wide(params) for version, params in weights.items()}

    def gaps(self, completion, temperature):
        """Returns by how much each token's score is below the best one's: 0 where it is chosen.

        The tokens of the completion themselves go on, so that all are judged after a near-tie.
        """
        prompt, tokens = completion.prompt_token_ids, completion.token_ids
        assert len(completion.params_versions) == len(tokens)
        fills = dict(completion.cache_fills)
        assert 0 in fills or not tokens
        ended_from_outside = completion.finish_reason in ("abort", "deadline")
        assert ended_from_outside or all(count < len(tokens) for count in fills)
        noise = _noise(completion, len(prompt), len(tokens), self._config.vocab_size)
        text, gaps, held = list(prompt), [], None
        for place, (token, version) in enumerate(zip(tokens, completion.params_versions)):
            if place in fills:
                held = [([], []) for _ in range(self._config.num_layers)]
                for position, old in enumerate(text[:-1]):
                    self._logits(fills[place], held, old, position)
            logits = self._logits(version, held, text[-1], len(text) - 1)
            scores = logits / temperature + noise[place] if temperature else logits
            gaps.append(float(scores.max() - scores[token]))
            text.append(token)
        return gaps

    def _logits(self, version, held, token, position):
        """Returns the logits after a token; adds its keys and values to `held`."""
        config, params = self._config, self._weights[version]
        assert len(held[0][0]) == position
        x = params["embed_tokens"][token]
        for layer, (keys, values) in zip(params["layers"], held, strict=True):
            normed = rms(x, layer["input_norm"], config.norm_eps)
            names = ("q_proj", "k_proj", "v_proj")
            q, k, v = ((layer[name] @ normed).reshape(-1, config.head_dim) for name in names)
            q, k = (rotated(x[None], np.array([position]), config.rope.theta)[0] for x in (q, k))
            keys.append(k)
            values.append(v)
            mixed = _attended(q, np.array(keys), np.array(values))
            x = x + layer["o_proj"] @ mixed.reshape(-1)
            x = x + mlp(rms(x, layer["post_attention_norm"], config.norm_eps), layer)
        head = "embed_tokens" if config.tie_word_embeddings else "lm_head"
        return params[head] @ rms(x, params["norm"], config.norm_eps)


def _attended(q, keys, values):
    """q [heads, d]; keys and values [tokens, kv_heads, d]."""
    grouped = q.reshape(keys.shape[1], -1, q.shape[-1])
    scores = np.einsum("ghd,tgd->ght", grouped, keys) / np.sqrt(q.shape[-1])
    shares = np.exp(scores - scores.max(axis=-1, keepdims=True))
    shares /= shares.sum(axis=-1, keepdims=True)
    return np.einsum("ght,tgd->ghd", shares, values)


def _noise(completion, num_before, num_tokens, vocab_size):
    """Returns the draws that a sample's tokens race with, f64[tokens, vocab]."""
    seed = seed_words(derive_seed(completion.seed, completion.sample_index))
    drawn = _all_noise(jnp.array(seed, jnp.uint32), vocab_size)
    return np.asarray(drawn, np.float64)[num_before : num_before + num_tokens]


@functools.partial(jax.jit, static_argnums=1)
def _all_noise(seed, vocab_size):
    seeds = jnp.broadcast_to(seed, (MOST_POSITIONS, 2))
    keys = token_keys(seeds, jnp.arange(MOST_POSITIONS), TARGET_TOKEN)
    return gumbel_noise(keys, vocab_size)
