"""EAGLE-3 heads: against their equations written out in numpy, and in the engine."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from head_equations import TARGET, attention_of, mlp, rms, rotated, wide

import specjax
from specjax.drafters.base import DrafterContext
from specjax.drafters.eagle import _Head
from specjax.drafters.spec import Eagle3Drafter
from specjax.drafters.token_by_token import of_head
from specjax.models import eagle3
from specjax.models.base import ModelConfig, RopeConfig
from specjax.models.eagle3 import Eagle3Config
from specjax.paged.forward import make_batch
from specjax.testing import check_drafter
from specjax.trees import static_shapes
from specjax.trees.expanding import Growth
from specjax.types import DecoderParams

WIDTH, TARGET_WIDTH, VOCAB, DRAFT_VOCAB = 32, 32, 61, 20
PAGE, PAGES_PER_ROW = 4, 8
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
    of_layers = ("num_layers", "qk_norm", "qkv_bias", "rope")
    own = ModelConfig(
        architecture="llama",
        family="llama",
        vocab_size=flags.get("draft_vocab", VOCAB),
        hidden_size=WIDTH,
        intermediate_size=48,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        max_position_embeddings=16,  # the size of a cache, not a limit
        **{"num_layers": 1} | {key: flags[key] for key in of_layers if key in flags},
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


def attention(x, layer, own, positions):
    """Causal attention of all rows of x [n, width] over each other."""
    n = x.shape[0]
    of = lambda name: x @ layer[f"{name}_proj"].T + layer.get(f"{name}_proj_bias", 0.0)
    q = of("q").reshape(n, own.num_heads, own.head_dim)
    k, v = (of(name).reshape(n, own.num_kv_heads, own.head_dim) for name in "kv")
    if own.qk_norm:
        q, k = rms(q, layer["q_norm"]), rms(k, layer["k_norm"])
    q, k = (rotated(part, positions, own.rope.theta) for part in (q, k))
    is_seen = np.tril(np.ones((n, n), bool))
    return attention_of(q, k, v, is_seen) @ layer["o_proj"].T


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


class Rows:
    """Two rows of a head's own pages, which hold NaN before anything is written."""

    def __init__(self, config, params, depth):
        self.spec, self.depth = Eagle3Drafter(config), depth
        self.params = DecoderParams(TARGET.params, params)
        self.context = DrafterContext(
            target=TARGET.config,
            num_speculative_tokens=depth,
            dtype=jnp.dtype(jnp.float32),
            taps=config.aux_layers,
        )
        self.drafter = self.spec.build(self.context)
        self.head = _Head(**of_head(config, self.context))
        state = self.drafter.init(2, 32, 2 * PAGES_PER_ROW, PAGE)
        self.state = jax.tree.map(lambda leaf: jnp.full_like(leaf, jnp.nan), state)
        pages = np.random.default_rng(0).permutation(2 * PAGES_PER_ROW)
        self.table = jnp.asarray(pages.reshape(2, PAGES_PER_ROW), jnp.int32)
        self.history = jnp.zeros((2, 32), jnp.int32)
        self.absorb_once = jax.jit(self.drafter.absorb, static_argnums=6)

    def write(self, row, tokens):
        self.history = self.history.at[row, : len(tokens)].set(jnp.array(tokens, jnp.int32))

    def absorb(self, row, first, taps):
        """Absorbs the tokens from position `first` on, as many as taps [n, 3, width] says."""
        counts = jnp.zeros(2, jnp.int32).at[row].set(len(taps))
        fed = make_batch(
            self.history,
            self.table,
            jnp.full(2, first, jnp.int32),
            counts,
            num_tokens=8,
            page_size=PAGE,
            num_slots=2 * PAGES_PER_ROW * PAGE,
        )
        following = self.history[jnp.minimum(fed.row_ids, 1), fed.positions + 1]
        padded = jnp.zeros((8, 3, TARGET_WIDTH)).at[: len(taps)].set(taps.astype(np.float32))
        self.state = self.absorb_once(
            self.params,
            self.state,
            fed,
            following,
            tuple(padded[:, i] for i in range(3)),
            jnp.arange(2, dtype=jnp.int32),
            8,
        )

    def follow(self, row, root, drafts):
        """Returns r before each of these draft tokens; the last is not fed."""
        cache = SimpleNamespace(
            block_table=self.table,
            page_size=PAGE,
            num_slots=2 * PAGES_PER_ROW * PAGE,
            lengths=jnp.full(2, root, jnp.int32),
        )
        decode_state = SimpleNamespace(cache=cache, rows=2)
        is_fed = jnp.arange(2) == row
        hidden, state = self.head.begin(self.params, self.state, decode_state, is_fed)
        found, history = [hidden[row]], self.history
        for ahead, token in enumerate(drafts[:-1], 1):
            history = history.at[row, root + ahead].set(token)
            positions = jnp.full(2, root + ahead, jnp.int32)
            hidden, state = self.head.feed(
                self.params, state, decode_state, history, positions, is_fed, hidden
            )
            found.append(hidden[row])
        self.state = state  # with the keys and values of drafts, as a step leaves them
        logits = self.head.logits(self.params, jnp.stack(found))
        return np.stack(found), np.argmax(logits, axis=1).tolist()


@pytest.mark.parametrize("name", FLAGS)
def test_what_it_says_is_what_its_equations_say(name):
    """Prompts in chunks, drafts, and absorbing after all, none and one of them were accepted."""
    config, params = make_head(name)
    rng = np.random.default_rng(7)
    tokens = rng.integers(0, VOCAB, 24).tolist()
    taps = rng.standard_normal((24, 3, TARGET_WIDTH))
    reference, rows = Reference(config, params), Rows(config, params, 3)
    other = rng.integers(0, VOCAB, 6).tolist()
    rows.write(0, other)
    rows.absorb(0, 0, taps[:5])
    rows.write(1, tokens)
    rows.absorb(1, 0, taps[:5])
    rows.absorb(1, 5, taps[5:6])
    rows.absorb(1, 6, taps[6:11])
    root = 11
    for num_more in (4, 1, 2):
        expected, drafts = reference.draft(tokens[: root + 1], taps[:root], 3)
        found, said = rows.follow(1, root, drafts)
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)
        assert said == drafts
        rows.absorb(1, root, taps[root : root + num_more])
        root += num_more
    # Neither row reads what is the other's.
    expected, drafts = reference.draft(other, taps[:5], 2)
    np.testing.assert_allclose(rows.follow(0, 5, drafts)[0], expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_tokens_are_those_of_plain_decoding(temperature):
    config, params = make_head("own_tables")
    drafter = specjax.LoadedDrafter("head", Eagle3Drafter(config), params)
    sampling = specjax.SamplingParams(temperature=temperature, max_tokens=20, seed=3)
    prompts = [[1, 2, 3], [5], [7, 8] * 9]
    found = [
        specjax.generate(TARGET, prompts, drafter=of, speculative_config=how, sampling=sampling)
        for of, how in (
            (None, None),
            (drafter, {"policy": "fixed", "num_speculative_tokens": 3}),
        )
    ]
    assert [out.token_ids for out in found[0]] == [out.token_ids for out in found[1]]
    assert found[1].stats.acceptance.num_drafted > 20


@pytest.mark.full
@pytest.mark.parametrize(
    "shape",
    [
        None,
        static_shapes.from_rank_paths([[0], [1], [0, 0], [0, 1], [0, 0, 0]]),
        Growth(3, 2, 5).cut(3),
    ],
    ids=["chain", "tree", "grown"],
)
def test_it_keeps_the_contract_of_drafters(shape):
    config, params = make_head("own_tables")
    check_drafter(specjax.LoadedDrafter("head", Eagle3Drafter(config, shape), params), TARGET)
