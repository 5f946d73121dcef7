"""EAGLE-3 heads of random weights, and their equations written out in numpy."""

import jax
import numpy as np
from head_equations import TARGET, VOCAB, mlp, rms, wide
from pair_heads import attention

from specjax.heads.equations import eagle3
from specjax.heads.equations.eagle3 import Eagle3Config
from specjax.models.base import ModelConfig, RopeConfig

WIDTH, TARGET_WIDTH, DRAFT_VOCAB = 32, 32, 20
FLAGS = {
    "plain": {},
    "norm_before_fc": {"norm_before_fc": True},
    "fc_norms": {"has_fc_norms": True, "fc_bias": True},
    "norm_before_residual": {"norm_before_residual": True},
    "norm_output": {"norm_output": True},
    "two_layers": {"num_layers": 2, "qk_norm": True, "qkv_bias": True},
    "own_tables": {"has_embedding": True, "maps_vocabulary": True, "draft_vocab": DRAFT_VOCAB},
    "target_head": {"has_head": False, "rope": RopeConfig(theta=123.0)},
}


def make_head(name="plain", seed=1, **more):
    """Returns a head of random weights for TARGET."""
    flags = FLAGS[name] | more
    of_layers = ("num_layers", "num_kv_heads", "qk_norm", "qkv_bias", "rope")
    own = ModelConfig(
        architecture="llama",
        family="llama",
        vocab_size=flags.get("draft_vocab", VOCAB),
        hidden_size=WIDTH,
        intermediate_size=48,
        num_heads=4,
        head_dim=8,
        max_position_embeddings=16,  # the size of a cache, not a limit
        **{"num_layers": 1, "num_kv_heads": 2}
        | {key: flags[key] for key in of_layers if key in flags},
    )
    config = Eagle3Config(
        layers=own,
        target_hidden_size=TARGET_WIDTH,
        target_vocab_size=VOCAB,
        aux_layers=(0, 1, 2),
        **{key: flags[key] for key in flags if key not in (*of_layers, "draft_vocab")},
    )
    return config, eagle3.init(jax.random.key(seed), config, std=0.3)


# The equations of the paper and of published code, in float64 over whole texts.


def feature_of(params, config, taps):
    """taps [n, 3, width]."""
    if config.has_fc_norms:
        taps = np.stack([rms(taps[:, i], params["fc_norms"][i]) for i in range(3)], axis=1)
    z = taps.reshape(taps.shape[0], -1)
    if config.norm_before_fc:
        z = rms(z, params["fc_input_norm"])
    return z @ params["fc"].T + params.get("fc_bias", 0.0)


def outputs_of(params, config, embedded, features):
    """Returns r of every pair; pair i is (token i + 1, feature of token i), at position i."""
    own, positions = config.layers, np.arange(embedded.shape[0], dtype=np.float64)
    first, *others = params["layers"]
    u = rms(features, first["hidden_norm"])
    x = u if config.norm_before_residual else features
    mixed = np.concatenate([rms(embedded, first["input_norm"]), u], axis=-1)
    for layer in (first, *others):
        if layer is not first:
            mixed = rms(x, layer["input_norm"])
        x = x + attention(mixed, layer, own, positions)
        y = rms(x, layer["post_attention_norm"])
        x = x + mlp(y, layer)
    return x


def logits_of(params, config, target_head, r):
    normed = rms(r, params["norm"])
    if not config.has_head:
        return normed @ target_head.T
    scores = normed @ params["lm_head"].T
    if not config.maps_vocabulary:
        return scores
    full = np.full((*scores.shape[:-1], VOCAB), -np.inf)
    full[..., params["target_ids"]] = scores
    return full


class Reference:
    """A head over one text: drafts as the published code does, everything computed anew."""

    def __init__(self, config, params):
        self.config, self.params = config, wide(params)
        target = wide(TARGET.params)
        self.head = target.get("lm_head", target["embed_tokens"])
        has_own = config.has_embedding
        self.table = self.params["embed_tokens"] if has_own else target["embed_tokens"]

    def draft(self, tokens, taps, depth):
        """Returns r before each draft token, [depth, width], and the greedy draft tokens.

        Args:
          tokens: the text, the root last.
          taps: [len(tokens) - 1, 3, width], of all tokens before the root.
        """
        tokens = list(tokens)
        features = feature_of(self.params, self.config, taps)
        all_r, drafts = [], []
        for _ in range(depth):
            r = outputs_of(self.params, self.config, self.table[tokens[1:]], features)[-1]
            token = int(np.argmax(logits_of(self.params, self.config, self.head, r)))
            all_r.append(r)
            drafts.append(token)
            tokens.append(token)
            recurrent = rms(r, self.params["norm"]) if self.config.norm_output else r
            features = np.concatenate([features, recurrent[None]])
        return np.stack(all_r), drafts
