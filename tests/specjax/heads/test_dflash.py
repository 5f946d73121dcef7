"""DFlash heads: against their equations written out in numpy, and in the engine."""

import dataclasses
import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pair_heads
import pytest
from asked_for import quick
from head_equations import TARGET, VOCAB, attention_of, mlp, rms, rotated, wide
from jax.sharding import Mesh, PartitionSpec

import specjax
from specjax.config.speculation import SpeculationConfig
from specjax.drafters import one_pass
from specjax.drafters.base import DrafterContext
from specjax.drafters.token_by_token import Fed, of_head
from specjax.heads import deferring
from specjax.heads.dflash import _Head
from specjax.heads.equations import dflash
from specjax.heads.equations.dflash import DFlashConfig
from specjax.heads.specs import DFlashDrafter
from specjax.models import sharding
from specjax.models.base import ModelConfig, RopeConfig
from specjax.paged.forward import make_batch
from specjax.testing import check_drafter, tiny_model
from specjax.types import DecoderParams

WIDTH, DRAFT_VOCAB, MASK = 32, 20, 60
PAGE, PAGES_PER_ROW = 4, 12
LENGTH = PAGE * PAGES_PER_ROW
DFLASH2 = {
    "conv_kernel_size": 2,
    "conv_group_size": 4,
    "markov_rank": 6,
    "markov_kind": "selector",
    "selector_top_k": 5,
}
FLAGS = {
    "plain": {},
    "causal": {"causal_layers": (True, True)},
    "one causal layer with a window": {
        "causal_layers": (True, False),
        "layer_windows": (3, None),
    },
    "from the anchor": {"samples_from_anchor": True},
    "own tables": {
        "has_embedding": True,
        "has_head": True,
        "maps_vocabulary": True,
        "draft_vocab": DRAFT_VOCAB,
    },
    "a Markov head": {"markov_rank": 6, "samples_from_anchor": True},
    "a Markov head of its own tokens": {
        "markov_rank": 6,
        "has_embedding": True,
        "has_head": True,
        "maps_vocabulary": True,
        "draft_vocab": DRAFT_VOCAB,
    },
    "a gated Markov head": {"markov_rank": 6, "markov_kind": "gated"},
    "a recurrent Markov head": {
        "markov_rank": 6,
        "markov_kind": "rnn",
        "samples_from_anchor": True,
        "has_embedding": True,
        "has_head": True,
        "maps_vocabulary": True,
        "draft_vocab": DRAFT_VOCAB,
    },
    "DFlash2": DFLASH2,
    "causal DFlash2 of three taps": DFLASH2
    | {"conv_kernel_size": 3, "causal_layers": (True, True), "conv_group_size": 16},
    "DFlash2 of own tables": DFLASH2 | {"has_embedding": True, "has_head": True},
    "without norms of heads": {"qk_norm": False, "rope": RopeConfig(theta=123.0)},
}


def make_head(name="plain", seed=1, **more):
    """Returns a head of random weights for TARGET."""
    flags = FLAGS[name] | more
    of_layers = {"qk_norm": True, "num_kv_heads": 2} | {
        key: flags.pop(key)
        for key in ("qk_norm", "rope", "layer_windows", "num_kv_heads")
        if key in flags
    }
    own = ModelConfig(
        architecture="llama",
        family="llama",
        vocab_size=flags.pop("draft_vocab", VOCAB),
        hidden_size=WIDTH,
        intermediate_size=48,
        num_layers=2,
        num_heads=4,
        head_dim=8,
        max_position_embeddings=16,
        **of_layers,
    )
    config = DFlashConfig(
        layers=own,
        target_vocab_size=VOCAB,
        target_hidden_size=TARGET.config.hidden_size,
        aux_layers=(1, 2),
        mask_token_id=MASK,
        **{"block_size": 5, "causal_layers": (False, False)} | flags,
    )
    params = dflash.init(jax.random.key(seed), config, std=0.3)
    return config, params | {"layers": tuple(map(tame, params["layers"]))}


def tame(layer):
    """Returns a layer whose convolutions change what goes through them by about a fifth."""
    convolutions = {name: leaf / 6 for name, leaf in layer.items() if "_conv_" in name}
    for name in convolutions:
        if name.endswith("base"):
            convolutions[name] = convolutions[name].at[:, 0].add(1)
    return layer | convolutions


# The equations of the published code, in float64, everything computed anew.


def convolved(x, kernels, base):
    """Returns x [block_size, width] convolved with kernels [block_size, taps, groups] and base."""
    out, group = np.zeros_like(x), x.shape[1] // kernels.shape[2]
    for place in range(len(x)):
        for tap in range(min(place + 1, len(base))):
            kernel = base[tap] + np.repeat(kernels[place, tap], group)
            out[place] += kernel * x[place - tap]
    return out


def around(config, layer, name, y, branch):
    """Returns what a branch says of its normed input, between its two convolutions."""
    taps = config.conv_kernel_size
    if not taps:
        return branch(y)
    base, kernels = layer[f"{name}_conv_base"], y @ layer[f"{name}_conv_proj"].T
    before, after = kernels.reshape(len(y), 2, taps, -1).swapaxes(0, 1)
    return convolved(branch(convolved(y, before, base[0])), after, base[1])


def outputs_of(params, config, table, root, contexts):
    """Returns x [block_size, width] of the block after contexts [root position, width]."""
    own, start, size = config.layers, len(contexts), config.block_size
    tokens = [root] + [config.mask_token_id] * (size - 1)
    x = table[tokens]
    at = np.arange(start + size, dtype=np.float64)
    heads = lambda y, count: y.reshape(len(y), count, own.head_dim)

    def attention(y, index, layer):
        both = np.concatenate([contexts, y])
        q = heads(y @ layer["q_proj"].T, own.num_heads)
        k, v = (heads(both @ layer[f"{name}_proj"].T, own.num_kv_heads) for name in "kv")
        if own.qk_norm:
            q, k = rms(q, layer["q_norm"]), rms(k, layer["k_norm"])
        q, k = rotated(q, at[start:], own.rope.theta), rotated(k, at, own.rope.theta)
        key, query = np.arange(start + size)[None], start + np.arange(size)[:, None]
        is_seen, oldest = np.ones((size, start + size), bool), start
        if config.causal_layers[index]:
            is_seen, oldest = key <= query, query
        if (window := own.window(index)) is not None:
            is_seen = is_seen & (key > oldest - window)
        return attention_of(q, k, v, is_seen) @ layer["o_proj"].T

    for index, layer in enumerate(params["layers"]):
        attend = functools.partial(attention, index=index, layer=layer)
        x = x + around(config, layer, "attention", rms(x, layer["input_norm"]), attend)
        y = rms(x, layer["post_attention_norm"])
        x = x + around(config, layer, "mlp", y, functools.partial(mlp, layer=layer))
    return x


def logits_of(params, config, target_head, x):
    normed = rms(x, params["norm"])
    if not config.has_head:
        return normed @ target_head.T
    return in_target_vocabulary(params, config, normed @ params["lm_head"].T)


def in_target_vocabulary(params, config, scores):
    if not config.maps_vocabulary:
        return scores
    full = np.full((*scores.shape[:-1], VOCAB), -np.inf)
    full[..., params["target_ids"]] = scores
    return full


def markov_of(params, config, embedded, normed, state):
    """Returns z of the next draft token, and the state after it."""
    sigmoid = lambda y: 1 / (1 + np.exp(-y))
    if config.markov_kind == "gated":
        gate = params["gate_proj"] @ np.r_[normed, embedded] + params["gate_proj_bias"]
        return sigmoid(gate) * embedded, state
    if config.markov_kind == "rnn":
        joint = params["joint_proj"] @ np.r_[state, embedded, normed] + params["joint_proj_bias"]
        kept, new, out = np.split(joint, 3)
        return np.tanh(out), sigmoid(kept) * state + (1 - sigmoid(kept)) * np.tanh(new)
    if config.markov_kind == "selector":
        return params["hidden_projection"] @ normed * embedded, state
    return embedded, state


def of_candidates(config, logits, scores):
    """Returns logits and scores added, -inf where a selector does not choose."""
    if not config.selector_top_k:
        return logits + scores
    chosen = np.argsort(-logits)[: config.selector_top_k]
    found = np.full_like(logits, -np.inf)
    found[chosen] = logits[chosen] + scores[chosen]
    return found


def confidence_of(config, params, x, tokens):
    """Returns how likely each draft is accepted, of the rows that draft; tokens: root first."""
    read = rms(x, params["norm"])
    if config.confidence_reads_token:
        read = np.concatenate([read, params["markov_w1"][tokens[: len(x)]]], axis=1)
    score = read @ params["confidence"][0] + params["confidence_bias"]
    return 1 / (1 + np.exp(-score))


class Reference:
    """A head over one text, in float64."""

    def __init__(self, config, params):
        self.config, self.params = config, wide(params)
        target = wide(TARGET.params)
        self.head = target.get("lm_head", target["embed_tokens"])
        has_own = config.has_embedding
        self.table = self.params["embed_tokens"] if has_own else target["embed_tokens"]

    def draft(self, root, taps):
        """Returns x, the logits and the likeliest token of each row that drafts.

        Args:
          root: the newest token.
          taps: [n, 2, width], of all tokens before it.
        """
        config, params = self.config, self.params
        contexts = rms(taps.reshape(len(taps), -1) @ params["fc"].T, params["hidden_norm"])
        x = outputs_of(params, config, self.table, root, contexts)[config.first_row :]
        tokens, all_logits, state = [], [], np.zeros(config.markov_rank)
        for logits, normed in zip(
            logits_of(params, config, self.head, x), rms(x, params["norm"]), strict=True
        ):
            if config.markov_rank:
                before = params["markov_w1"][tokens[-1] if tokens else root]
                latent, state = markov_of(params, config, before, normed, state)
                own = params["markov_w2"] @ latent
                own = in_target_vocabulary(params, config, own)
                logits = of_candidates(config, logits, own)
            tokens.append(int(np.argmax(logits)))
            all_logits.append(logits)
        return x, np.stack(all_logits), tokens


class Rows:
    """Two rows of a head's own pages, which hold NaN before anything is written."""

    def __init__(self, config, params, says_confidence=False, store_features=None):
        self.params = DecoderParams(TARGET.params, params)
        self.context = DrafterContext(
            target=TARGET.config,
            num_speculative_tokens=config.most_drafts,
            dtype=jnp.dtype(jnp.float32),
            taps=config.aux_layers,
            says_confidence=says_confidence,
        )
        spec = DFlashDrafter(config, store_features)
        self.drafter = spec.build(self.context)
        self.head = _Head(**of_head(config, self.context), stores=spec.stores)
        state = self.drafter.init(2, LENGTH, 2 * PAGES_PER_ROW, PAGE)
        self.state = jax.tree.map(lambda leaf: jnp.full_like(leaf, jnp.nan), state)
        pages = np.random.default_rng(0).permutation(2 * PAGES_PER_ROW)
        self.cache = SimpleNamespace(
            block_table=jnp.asarray(pages.reshape(2, PAGES_PER_ROW), jnp.int32),
            page_size=PAGE,
            num_slots=2 * PAGES_PER_ROW * PAGE,
        )
        self.history = jnp.zeros((2, LENGTH), jnp.int32)
        once = lambda function: jax.jit(function, static_argnums=6)
        self.absorb_once = once(self.drafter.absorb)
        self.defer_once = None if self.drafter.defer is None else once(self.drafter.defer)
        self.draft_once = jax.jit(self._draft)

    def absorb(self, row, first, taps, *, defers=False):
        counts = jnp.zeros(2, jnp.int32).at[row].set(len(taps))
        starts = jnp.full(2, first, jnp.int32)
        fed = make_batch(
            self.history,
            self.cache.block_table,
            starts,
            counts,
            num_tokens=8,
            page_size=PAGE,
            num_slots=self.cache.num_slots,
        )
        padded = jnp.zeros((8, *taps.shape[1:])).at[: len(taps)].set(taps.astype(np.float32))
        self.state = (self.defer_once if defers else self.absorb_once)(
            self.params,
            self.state,
            fed,
            jnp.zeros(8, jnp.int32),
            tuple(padded[:, i] for i in range(taps.shape[1])),
            jnp.arange(2, dtype=jnp.int32),
            8,
        )

    def catch_up(self, roots, absorbed, takes_part):
        sizes = {"page_size": PAGE, "num_slots": self.cache.num_slots}
        table = self.cache.block_table
        return pair_heads.catch_up(self, table, sizes, roots, absorbed, takes_part)

    def draft(self, row, root, token):
        """Returns x, the logits and the likeliest token of each row that drafts."""
        self.history = self.history.at[row, root].set(token)
        takes_part = jnp.arange(2) == row
        block, logits, tokens, self.estimates, pages = self.draft_once(
            self.params, self.state, self.history, jnp.full(2, root, jnp.int32), takes_part
        )
        # With the keys and values of the block, as a step leaves them.
        self.state = self.state._replace(pages=pages)
        self.estimates = [estimate[row] for estimate in self.estimates]
        drafting = block[row, self.head.config.first_row :]
        return np.asarray(drafting), np.asarray(logits[:, row]), tokens[:, row].tolist()

    def _draft(self, params, state, history, lengths, takes_part):
        cache = SimpleNamespace(**vars(self.cache), lengths=lengths)
        decode_state = SimpleNamespace(cache=cache, rows=2, history=history)
        block, _ = self.head.block(params, state, decode_state, takes_part)
        hidden, state = self.head.begin(params, state, decode_state, takes_part)
        tokens, all_logits, estimates = [], [], []
        for ahead in range(1, 1 + self.context.num_speculative_tokens):
            if (estimate := self.head.confidence(hidden)) is not None:
                estimates.append(estimate)
            all_logits.append(self.head.logits(params, hidden, ahead - 1))
            tokens.append(jnp.argmax(all_logits[-1], axis=1))
            positions = lengths + ahead
            history = history.at[jnp.arange(2), positions].set(tokens[-1])
            fed = Fed(decode_state, history, positions, takes_part, hidden, ahead)
            hidden, state = self.head.feed(params, state, fed)
        return block, jnp.stack(all_logits), jnp.stack(tokens), estimates, state.pages


QUICK = ("DFlash2, one by one",)
ONE_BY_ONE = {
    "own tables, logits one by one": "own tables",
    "Markov, one by one": "a Markov head",
    "recurrent, one by one": "a recurrent Markov head",
    "DFlash2, one by one": "DFlash2",
}


@pytest.mark.parametrize("name", quick([*FLAGS, *ONE_BY_ONE], *QUICK))
def test_what_it_says_is_what_its_equations_say(name, monkeypatch):
    """Prompts in chunks, drafts, and absorbing after all, none and one of them were accepted."""
    if name not in FLAGS:
        monkeypatch.setattr(one_pass, "MOST_LOGIT_BYTES", 0)
        name = ONE_BY_ONE[name]
    config, params = make_head(name)
    rng = np.random.default_rng(7)
    tokens = rng.integers(0, VOCAB, 24).tolist()
    taps = rng.standard_normal((24, 2, TARGET.config.hidden_size))
    reference, rows = Reference(config, params), Rows(config, params)
    rows.absorb(0, 0, taps[3:8])
    rows.absorb(1, 0, taps[:5])
    rows.absorb(1, 5, taps[5:6])
    rows.absorb(1, 6, taps[6:11])
    root = 11
    for num_more in (5, 1, 2):
        *expected, drafts = reference.draft(tokens[root], taps[:root])
        *found, said = rows.draft(1, root, tokens[root])
        for ours, theirs in zip(found, expected, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4)
        assert said == drafts
        rows.absorb(1, root, taps[root : root + num_more])
        root += num_more
    # Neither row reads what is the other's.
    expected = reference.draft(tokens[0], taps[3:8])[0]
    np.testing.assert_allclose(rows.draft(0, 5, tokens[0])[0], expected, rtol=0, atol=1e-4)


@pytest.mark.full
@pytest.mark.parametrize("store_features", [True, "captured"])
@pytest.mark.parametrize("name", quick(["plain", "a recurrent Markov head"], "plain"))
def test_a_head_that_defers_catches_up_from_what_it_stored(name, store_features, monkeypatch):
    """In passes of four contexts, which rows share: row 0 lacks 5, of which it makes none at first,
    and row 1 lacks 12."""
    monkeypatch.setattr(deferring, "LEAST_CATCH_UP", 4)
    monkeypatch.setattr(deferring, "MOST_CATCH_UP", 4)
    config, params = make_head(name)
    rng = np.random.default_rng(7)
    tokens = rng.integers(0, VOCAB, 24).tolist()
    taps = rng.standard_normal((2, 24, 2, TARGET.config.hidden_size))
    reference, rows = Reference(config, params), Rows(config, params, store_features=store_features)
    roots = 8, 15
    for row, root in enumerate(roots):
        rows.absorb(row, 0, taps[row, :3])
        for first in range(3, root, 8):
            rows.absorb(row, first, taps[row, first : min(first + 8, root)], defers=True)
    before = rows.state
    made = ~np.isnan(np.asarray(before.pages[0][0]))
    assert made.sum() == 2 * 3 * 2 * 8, "of the three tokens of each row that were absorbed alone"
    assert rows.catch_up(roots, (3, 3), (False, True)) == [3, 15]
    # Another row's keys and values stay as they were, and nothing is left to do.
    own = np.asarray(rows.cache.block_table[0])
    for now, then in zip(jax.tree.leaves(rows.state.pages), jax.tree.leaves(before.pages)):
        np.testing.assert_array_equal(np.asarray(now)[own], np.asarray(then)[own])
    assert rows.catch_up(roots, (3, 15), (False, True)) == [3, 15]
    check = lambda row, root: np.testing.assert_allclose(
        rows.draft(row, root, tokens[root])[0],
        reference.draft(tokens[root], taps[row, :root])[0],
        rtol=0,
        atol=1e-4,
    )
    check(1, 15)
    # Absorbing goes on from there, and so does the other row.
    rows.absorb(1, 15, taps[1, 15:17])
    assert rows.catch_up((8, 17), (3, 17), (True, True)) == [8, 17]
    check(1, 17)
    check(0, 8)


def test_a_head_says_whether_it_stores_features():
    config, params = make_head()
    spec = DFlashDrafter(config)
    bytes_of = lambda spec: spec.bytes_per_token(TARGET.config, jnp.float32)
    assert not spec.defers
    stored = spec.configured(SpeculationConfig(store_features=True))
    assert stored == DFlashDrafter(config, store_features=True)
    assert bytes_of(stored) - bytes_of(spec) == 4 * WIDTH
    captured = spec.configured(SpeculationConfig(store_features="captured"))
    said = "store_features='captured'"
    assert said in repr(specjax.LoadedDrafter("head", captured, params))
    assert "store_features" not in repr(specjax.LoadedDrafter("head", spec, params))
    assert bytes_of(captured) - bytes_of(spec) == 4 * 2 * TARGET.config.hidden_size
    assert stored.configured(SpeculationConfig()) == stored
    assert not stored.configured(SpeculationConfig(store_features=False)).defers
    beside = spec.configured(SpeculationConfig(store_features=True, corpus_tokens=512))
    assert beside.model == stored


@pytest.mark.full
def test_windows_of_layers_that_are_not_causal():
    """The whole block sees the contexts that its first token sees."""
    config, params = make_head("DFlash2", layer_windows=(33, None))
    taps = np.random.default_rng(7).standard_normal((40, 2, TARGET.config.hidden_size))
    reference, rows = Reference(config, params), Rows(config, params)
    for first in range(0, 40, 8):
        rows.absorb(1, first, taps[first : first + 8])
    *expected, drafts = reference.draft(9, taps)
    *found, said = rows.draft(1, 40, 9)
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4)
    assert said == drafts


@pytest.mark.full
@pytest.mark.parametrize("taps", [2, 3])
def test_a_block_reads_no_other_row(taps):
    """What lies before a block's first token counts as nothing, whoever drafts beside it."""
    config, params = make_head("DFlash2", conv_kernel_size=taps)
    reference, rows = Reference(config, params), Rows(config, params)
    captured = np.random.default_rng(7).standard_normal((5, 2, TARGET.config.hidden_size))
    for row in range(2):
        rows.absorb(row, 0, captured[row : row + 3])
        rows.history = rows.history.at[row, 3].set(7 + row)
    cache = SimpleNamespace(**vars(rows.cache), lengths=jnp.full(2, 3, jnp.int32))
    decode_state = SimpleNamespace(cache=cache, rows=2, history=rows.history)
    found, _ = rows.head.block(rows.params, rows.state, decode_state, jnp.ones(2, bool))
    for row in range(2):
        expected = reference.draft(7 + row, captured[row : row + 3])[0]
        np.testing.assert_allclose(found[row, 1:], expected, rtol=0, atol=1e-4)


CONFIDENT = {
    "of the block alone": ("plain", {}),
    "beside a Markov head": ("a Markov head", {}),
    "of the token before, too": ("a Markov head", {"confidence_reads_token": True}),
    "beside a state": ("a recurrent Markov head", {"confidence_reads_token": True}),
}


@pytest.mark.full
@pytest.mark.parametrize("kind", quick(CONFIDENT, "of the token before, too"))
def test_its_confidence_is_what_its_equations_say(kind):
    name, more = CONFIDENT[kind]
    config, params = make_head(name, has_confidence=True, **more)
    reference, rows = Reference(config, params), Rows(config, params, says_confidence=True)
    taps = np.random.default_rng(7).standard_normal((5, 2, TARGET.config.hidden_size))
    rows.absorb(1, 0, taps)
    x, logits, drafts = reference.draft(9, taps)
    _, found, said = rows.draft(1, 5, 9)
    np.testing.assert_allclose(found, logits, rtol=0, atol=1e-4)
    assert said == drafts
    expected = confidence_of(config, reference.params, x, [9, *drafts])
    np.testing.assert_allclose(rows.estimates, expected, rtol=0, atol=1e-4)
    assert np.std(rows.estimates) > 0.01
    assert Rows(config, params).head.confidence(jnp.zeros((1, 1))) is None


def test_a_causal_block_computes_the_rows_that_draft():
    config, _ = make_head("causal")
    assert [config.num_rows(k) for k in (1, 3, 4, 9)] == [2, 4, 5, 5]
    for name in ("plain", "one causal layer with a window"):
        whole, _ = make_head(name)
        assert whole.num_rows(1) == 5
    assert DFlashDrafter(whole).tree_slots(1) == 4


def test_each_device_has_its_slice_of_the_logits(monkeypatch):
    """Those of the target's head, and what a Markov head adds to them."""
    monkeypatch.setattr(one_pass, "MOST_LOGIT_BYTES", 0)
    vocab, target = 64, tiny_model(vocab_size=64)  # which two devices divide
    config, _ = make_head("a Markov head")
    own = dataclasses.replace(config.layers, vocab_size=vocab)
    config = dataclasses.replace(config, layers=own, target_vocab_size=vocab)
    params = DecoderParams(target.params, dflash.init(jax.random.key(1), config, std=0.3))
    hidden = jax.random.normal(jax.random.key(2), (3, WIDTH + config.markov_rank))

    def logits(params, axis=None):
        context = DrafterContext(
            target=target.config,
            num_speculative_tokens=2,
            dtype=jnp.dtype(jnp.float32),
            tensor_axis=axis,
        )
        scores, vocabulary = _Head(**of_head(config, context)).own_logits(params, hidden, 0)
        assert (vocabulary.axis, scores.shape) == (axis, (3, vocab // 2 if axis else vocab))
        return scores

    mesh = Mesh(np.array(jax.devices()[:2]), ("tensor",))
    of_target = sharding.param_specs(target.params, mesh, target.config)
    whole = jax.tree.map(lambda _: PartitionSpec(), params.drafter)
    split = jax.shard_map(
        functools.partial(logits, axis="tensor"),
        mesh=mesh,
        in_specs=(DecoderParams(of_target, whole),),
        out_specs=PartitionSpec(None, "tensor"),
        check_vma=False,
    )
    np.testing.assert_allclose(jax.jit(split)(params), logits(params), rtol=0, atol=1e-5)


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:num_speculative_tokens")  # more than some draft
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize(
    "name",
    quick(
        ["own tables", "from the anchor", "a Markov head", "DFlash2"],
        "DFlash2",
        slow=["own tables", "from the anchor", "a Markov head"],
    ),
)
def test_tokens_are_those_of_plain_decoding(temperature, name):
    config, params = make_head(name)
    drafter = specjax.LoadedDrafter("head", DFlashDrafter(config), params)
    sampling = specjax.SamplingParams(temperature=temperature, max_tokens=20, seed=3)
    prompts = [[1, 2, 3], [5], [7, 8] * 9]
    found = [
        specjax.generate(TARGET, prompts, drafter=of, speculative_config=how, sampling=sampling)
        for of, how in (
            (None, None),
            (drafter, {"policy": "fixed", "num_speculative_tokens": 7}),  # more than a block has
        )
    ]
    assert [out.token_ids for out in found[0]] == [out.token_ids for out in found[1]]
    assert found[1].stats.acceptance.num_drafted > 20


def test_it_takes_no_tree():
    config, params = make_head()
    drafter = specjax.LoadedDrafter("head", DFlashDrafter(config), params)
    with pytest.raises(ValueError, match="leave them out"):
        specjax.generate(TARGET, [1, 2], drafter=drafter, speculative_config={"tree_top_k": 2})


@pytest.mark.full
def test_a_recurrent_markov_head_with_confidence_keeps_the_contract():
    config, params = make_head(
        "a recurrent Markov head", has_confidence=True, confidence_reads_token=True
    )
    check_drafter(specjax.LoadedDrafter("head", DFlashDrafter(config), params), TARGET)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "store_features"),
    [("plain", True), ("a recurrent Markov head", True), ("plain", "captured")],
)
def test_it_keeps_the_contract_where_it_stores_features(name, store_features):
    config, params = make_head(name)
    spec = DFlashDrafter(config, store_features=store_features)
    check_drafter(specjax.LoadedDrafter("head", spec, params), TARGET)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "own tables",
        "from the anchor",
        "a Markov head of its own tokens",
        "a recurrent Markov head",
        "DFlash2",
    ],
)
def test_it_keeps_the_contract_of_drafters(name):
    config, params = make_head(name)
    check_drafter(specjax.LoadedDrafter("head", DFlashDrafter(config), params), TARGET)


def repeating():
    """Returns a target that repeats its newest token for ever, and a head that knows it.

    The head's masks attend to everything alike, and values have the mask's direction taken out.
    """
    zero = lambda leaf: jnp.zeros_like(leaf)
    layers = tuple(
        layer | {"o_proj": zero(layer["o_proj"]), "down_proj": zero(layer["down_proj"])}
        for layer in TARGET.params["layers"]
    )
    table = TARGET.params["embed_tokens"]
    table = table / jnp.linalg.norm(table, axis=1, keepdims=True)
    params = TARGET.params | {"layers": layers, "embed_tokens": table}
    if "lm_head" in params:
        params["lm_head"] = table
    target = specjax.Model(TARGET.config, params, name="repeating")
    config, head = make_head("plain", num_kv_heads=4)
    mask = table[MASK]
    (first, second), width = head["layers"], WIDTH
    first |= {
        "q_proj": zero(first["q_proj"]),
        "v_proj": jnp.eye(width) - jnp.outer(mask, mask),
        "o_proj": 10 * jnp.eye(width),
        "down_proj": zero(first["down_proj"]),
    }
    second |= {"o_proj": zero(second["o_proj"]), "down_proj": zero(second["down_proj"])}
    head |= {"layers": (first, second), "fc": jnp.concatenate([jnp.eye(width)] * 2, axis=1)}
    return target, specjax.LoadedDrafter("head", DFlashDrafter(config), head)


@pytest.mark.full
@pytest.mark.parametrize("count", quick([2, 4], 4, slow=[2]))
def test_a_head_that_knows_its_target_is_always_accepted(count):
    target, drafter = repeating()
    out = specjax.generate(
        target,
        [[7, 7, 7], [9]],
        drafter=drafter,
        speculative_config={"policy": "fixed", "num_speculative_tokens": count},
        sampling=specjax.SamplingParams(temperature=0, max_tokens=2 * (count + 1), seed=0),
    )
    assert [one.token_ids for one in out] == [[7] * 2 * (count + 1), [9] * 2 * (count + 1)]
    acceptance = out.stats.acceptance
    assert acceptance.num_accepted == acceptance.num_drafted > 0


def counting():
    """Returns a target that says the token after its newest one, and a Markov head that does."""
    zero = lambda leaf: jnp.zeros_like(leaf)
    layers = tuple(
        layer | {"o_proj": zero(layer["o_proj"]), "down_proj": zero(layer["down_proj"])}
        for layer in TARGET.params["layers"]
    )
    table = TARGET.params["embed_tokens"]
    table = table / jnp.linalg.norm(table, axis=1, keepdims=True)
    following = jnp.roll(table, 1, axis=0)  # row t + 1 is the embedding of token t
    assert not TARGET.config.tie_word_embeddings
    params = TARGET.params | {"layers": layers, "embed_tokens": table, "lm_head": following}
    target = specjax.Model(TARGET.config, params, name="counting")
    config, head = make_head("a Markov head", markov_rank=WIDTH)
    head |= {"norm": zero(head["norm"]), "markov_w1": table, "markov_w2": following}
    return target, specjax.LoadedDrafter("head", DFlashDrafter(config), head)


@pytest.mark.full
@pytest.mark.parametrize("count", quick([1, 5], 5, slow=[1]))
def test_a_markov_head_that_knows_its_target_is_always_accepted(count):
    """Its block says nothing: each draft token follows from the one before alone."""
    target, drafter = counting()
    out = specjax.generate(
        target,
        [[3, 4, 5], [50]],
        drafter=drafter,
        speculative_config={"policy": "fixed", "num_speculative_tokens": count},
        sampling=specjax.SamplingParams(temperature=0, max_tokens=2 * (count + 1)),
    )
    expected = [[(at + 1 + i) % VOCAB for i in range(2 * (count + 1))] for at in (5, 50)]
    assert [one.token_ids for one in out] == expected
    acceptance = out.stats.acceptance
    assert acceptance.num_accepted == acceptance.num_drafted > 0


@pytest.mark.full
@pytest.mark.parametrize("rule", quick(["seeded", "rejection"], "seeded"))
def test_a_request_may_allow_none_of_its_candidates(rule):
    """The selector says one token of each row, and the request allows another alone."""
    config, params = make_head("DFlash2", selector_top_k=1)
    out = specjax.generate(
        TARGET,
        [[1, 2, 3], [5]],
        drafter=specjax.LoadedDrafter("head", DFlashDrafter(config), params),
        verification=rule,
        speculative_config={"policy": "fixed", "num_speculative_tokens": 3},
        sampling=specjax.SamplingParams(
            temperature=0.8, max_tokens=9, seed=1, allowed_token_ids=[11, 12]
        ),
    )
    assert all(set(one.token_ids) <= {11, 12} and len(one.token_ids) == 9 for one in out)
    assert out.stats.acceptance.num_drafted > 0
