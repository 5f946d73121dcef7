"""Rows of a head over pairs of a token and a hidden state, as EAGLE is; and its attention."""

import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
from head_equations import TARGET, VOCAB, attention_of, mlp, rms, rotated, wide

import specjax
from specjax.drafters.base import DrafterContext
from specjax.drafters.token_by_token import Fed, of_head
from specjax.heads.eagle import EagleHead
from specjax.heads.specs import EagleDrafter
from specjax.models.base import ModelConfig
from specjax.paged.forward import make_batch
from specjax.testing import tiny_model
from specjax.types import DecoderParams

PAGE, PAGES_PER_ROW = 4, 8


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


def own_layers(**fields):
    """Returns sizes of a head's layers; the target's but for fewer heads of keys."""
    defaults = {"num_layers": 1, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8}
    return ModelConfig(
        architecture="llama",
        family="llama",
        vocab_size=VOCAB,
        hidden_size=TARGET.config.hidden_size,
        intermediate_size=48,
        max_position_embeddings=2048,
        **defaults | fields,
    )


class Reference:
    """A head over one text: drafts as the published code does, everything computed anew.

    It is that of EAGLE; others change what the first layer reads, and what the head reads.
    """

    def __init__(self, config, params):
        self.config, self.params = config, wide(params)
        target = wide(TARGET.params)
        table = target["embed_tokens"]
        self.table = self.params.get("embed_tokens", table)
        self.head = self.params.get("lm_head", target.get("lm_head", table))

    def joined(self, embedded, features):
        return np.concatenate([embedded, features], axis=-1)

    def said(self, x):
        return x

    def outputs(self, tokens, features):
        """Returns r of every pair; pair i is (token i + 1, feature of token i)."""
        params, own = self.params, self.config.layers
        x = self.joined(self.table[tokens[1:]], features) @ params["fc"].T
        x = x + params.get("fc_bias", 0.0)
        positions = np.arange(len(x), dtype=np.float64)
        for layer in params["layers"]:
            normed = rms(x, layer["input_norm"]) if "input_norm" in layer else x
            x = x + attention(normed, layer, own, positions)
            x = x + mlp(rms(x, layer["post_attention_norm"]), layer)
        return self.said(x)

    def draft(self, tokens, taps, depth):
        """Returns r before each draft token, [depth, width], and these.

        Args:
          taps: [len(tokens) - 1, 1, width].
        """
        tokens, features = list(tokens), taps[:, 0]
        found, drafts = [], []
        for _ in range(depth):
            r = self.outputs(tokens, features)[-1]
            found.append(r)
            drafts.append(int(np.argmax(r @ self.head.T)))
            tokens.append(drafts[-1])
            features = np.concatenate([features, r[None]])
        return np.stack(found), drafts


class Rows:
    """Two rows of a head's own pages, which hold NaN before anything is written."""

    def __init__(self, config, params, depth, store_features=None):
        self.spec = EagleDrafter(config, store_features=store_features)
        self.depth = depth
        self.params = DecoderParams(TARGET.params, params)
        self.context = DrafterContext(
            target=TARGET.config,
            num_speculative_tokens=depth,
            dtype=jnp.dtype(jnp.float32),
            taps=config.aux_layers,
        )
        self.drafter = self.spec.build(self.context)
        self.head = EagleHead(**of_head(config, self.context), stores=self.spec.stores)
        state = self.drafter.init(2, 32, 2 * PAGES_PER_ROW, PAGE)
        self.state = jax.tree.map(lambda leaf: jnp.full_like(leaf, jnp.nan), state)
        pages = np.random.default_rng(0).permutation(2 * PAGES_PER_ROW)
        self.table = jnp.asarray(pages.reshape(2, PAGES_PER_ROW), jnp.int32)
        self.history = jnp.zeros((2, 32), jnp.int32)
        once = lambda function: jax.jit(function, static_argnums=6)
        self.absorb_once = once(self.drafter.absorb)
        self.defer_once = None if self.drafter.defer is None else once(self.drafter.defer)

    def write(self, row, tokens):
        self.history = self.history.at[row, : len(tokens)].set(jnp.array(tokens, jnp.int32))

    def absorb(self, row, first, taps, *, defers=False):
        """Absorbs tokens from position `first` on, as many as taps [n, captured, width] has, or
        defers them."""
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
        width = TARGET.config.hidden_size
        padded = jnp.zeros((8, taps.shape[1], width)).at[: len(taps)].set(taps.astype(np.float32))
        take = self.defer_once if defers else self.absorb_once
        self.state = take(
            self.params,
            self.state,
            fed,
            following,
            tuple(padded[:, i] for i in range(taps.shape[1])),
            jnp.arange(2, dtype=jnp.int32),
            8,
        )

    def catch_up(self, roots, absorbed, takes_part):
        sizes = {"page_size": PAGE, "num_slots": 2 * PAGES_PER_ROW * PAGE}
        return catch_up(self, self.table, sizes, roots, absorbed, takes_part)

    def follow(self, row, root, drafts):
        """Returns r before each of these draft tokens; the last is not fed."""
        cache = SimpleNamespace(
            block_table=self.table,
            page_size=PAGE,
            num_slots=2 * PAGES_PER_ROW * PAGE,
            lengths=jnp.full(2, root, jnp.int32),
        )
        decode_state = SimpleNamespace(cache=cache, rows=2, history=self.history)
        is_fed = jnp.arange(2) == row
        hidden, state = self.head.begin(self.params, self.state, decode_state, is_fed)
        found, history = [hidden[row]], self.history
        for ahead, token in enumerate(drafts[:-1], 1):
            history = history.at[row, root + ahead].set(token)
            positions = jnp.full(2, root + ahead, jnp.int32)
            fed = Fed(decode_state, history, positions, is_fed, hidden, ahead)
            hidden, state = self.head.feed(self.params, state, fed)
            found.append(hidden[row])
        self.state = state  # with the keys and values of drafts, as a step leaves them
        logits = self.head.logits(self.params, jnp.stack(found), 0)
        return np.stack(found), np.argmax(logits, axis=1).tolist()


def catch_up(rows, block_table, sizes, roots, absorbed, takes_part):
    """Absorbs what rows deferred; returns `Draft.written`.

    Args:
      rows: with the head, its weights and state, and the history of two rows.
      sizes: page_size and num_slots.
      absorbed: tokens of each row that are absorbed.
    """
    lengths = jnp.array(roots, jnp.int32)
    decode_state = SimpleNamespace(
        cache=SimpleNamespace(block_table=block_table, lengths=lengths, **sizes),
        rows=2,
        history=rows.history,
        drafter_lengths=jnp.array(absorbed, jnp.int32),
    )
    rows.state, written = rows.head.catch_up(
        rows.params, rows.state, decode_state, jnp.array(takes_part)
    )
    return written.tolist()


def check_texts(reference, rows, num_captured, vocab):
    """Holds rows to a reference: prompts in chunks, drafts, and absorbing after some were accepted.

    Args:
      reference: `draft(tokens, taps, depth)` returns r before each draft token, and these.
      rows: two of the same head.
    """
    rng = np.random.default_rng(7)
    tokens, other = rng.integers(0, vocab, 24).tolist(), rng.integers(0, vocab, 6).tolist()
    taps = rng.standard_normal((24, num_captured, TARGET.config.hidden_size))
    rows.write(0, other)
    rows.absorb(0, 0, taps[:5])
    rows.write(1, tokens)
    rows.absorb(1, 0, taps[:5])
    rows.absorb(1, 5, taps[5:6])
    rows.absorb(1, 6, taps[6:11])
    root = 11
    for num_more in (4, 1, 2):  # all, none and one of three drafts were accepted
        expected, drafts = reference.draft(tokens[: root + 1], taps[:root], 3)
        found, said = rows.follow(1, root, drafts)
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-4)
        assert said == drafts
        rows.absorb(1, root, taps[root : root + num_more])
        root += num_more
    # Neither row reads what is the other's.
    expected, drafts = reference.draft(other, taps[:5], 2)
    np.testing.assert_allclose(rows.follow(0, 5, drafts)[0], expected, rtol=1e-5, atol=1e-4)


def copied_target():
    """Returns a target of one layer whose tokens a head can say that sees all but its first token.

    All keys and queries are one vector, so that attention depends on distances alone and fades
    within ten tokens; embeddings are as their own norms. So a text of 12 to 50 tokens goes on as
    if its first one were not there.
    """
    target = tiny_model(3, num_layers=1, num_kv_heads=4, qkv_bias=True)
    params, rng = target.params, np.random.default_rng(3)
    table = rng.standard_normal(params["embed_tokens"].shape)
    table /= np.sqrt(np.mean(table**2, axis=1, keepdims=True))
    (layer,) = params["layers"]
    random = lambda leaf: jnp.asarray(rng.standard_normal(leaf.shape) * 0.3, jnp.float32)
    own = {name: random(leaf) for name, leaf in layer.items()}
    own |= {name: jnp.ones_like(leaf) for name, leaf in layer.items() if "norm" in name}
    own |= constant_scores(layer, fades(30.0, heads=4))
    params = params | {
        "embed_tokens": jnp.asarray(table, jnp.float32),
        "norm": jnp.ones_like(params["norm"]),
        "layers": (own,),
    }
    return dataclasses.replace(target, params=params)


def fades(scale, heads):
    """Returns a key [heads * 8]; at a distance d its score is scale * (1 - cos(d / 10)) lower."""
    of_head = np.zeros(8)
    of_head[[1, 5]] = (scale * np.sqrt(8) / 2) ** 0.5
    return np.tile(of_head, heads)


def constant_scores(layer, key):
    """Returns weights and biases of a layer whose queries and keys are all `key`."""
    width = layer["q_proj"].shape[1]  # of a layer with as many queries as keys
    leaves = {}
    for name in ("q_proj", "k_proj"):
        leaves[name] = jnp.zeros((len(key), width), jnp.float32)
        leaves[f"{name}_bias"] = jnp.asarray(key, jnp.float32)
    return leaves


def check_all_accepted(target, drafter, count):
    prompts = [list(range(1, 13)), [5, 9] * 7]
    sampling = specjax.SamplingParams(temperature=0, max_tokens=4 * (count + 1) + 1)
    plain = specjax.generate(target, prompts, sampling=sampling)
    out = specjax.generate(
        target,
        prompts,
        drafter=drafter,
        speculative_config={"policy": "fixed", "num_speculative_tokens": count},
        sampling=sampling,
    )
    assert [one.token_ids for one in out] == [one.token_ids for one in plain]
    assert len({token for one in out for token in one.token_ids}) > 3
    acceptance = out.stats.acceptance
    assert acceptance.num_accepted == acceptance.num_drafted > 0
