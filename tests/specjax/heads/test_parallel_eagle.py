"""P-EAGLE heads: against their equations written out in numpy, and in the engine."""

import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from asked_for import quick
from eagle3_heads import FLAGS, WIDTH, Reference, feature_of, logits_of, make_head, outputs_of
from head_equations import TARGET, VOCAB
from pair_heads import PAGE, PAGES_PER_ROW, Rows, check_texts

import specjax
from specjax.config.speculation import SpeculationConfig
from specjax.drafters import one_pass
from specjax.drafters.one_pass import Asked
from specjax.drafters.spec import HybridDrafter
from specjax.drafters.token_by_token import Fed, of_head
from specjax.heads import deferring
from specjax.heads.parallel_eagle import ParallelHead
from specjax.heads.specs import EagleDrafter
from specjax.testing import check_drafter
from specjax.trees import static_shapes

MASK, CAPTURED, DEPTH = 60, 3, 3


def drafter_of(name, **more):
    config, params = make_head(name, mask_token_id=MASK, **more)
    return specjax.LoadedDrafter("head", EagleDrafter(config), params)


class OverMasks(Reference):
    """A head over one text and masks after it, as training has it, everything computed anew."""

    def draft(self, tokens, taps, depth):
        params, config = self.params, self.config
        tokens = [*tokens, *[MASK] * (depth - 1)]
        state = params["mask_hidden"].reshape(1, CAPTURED, -1)
        features = feature_of(params, config, np.concatenate([taps, *[state] * (depth - 1)]))
        r = outputs_of(params, config, self.table[tokens[1:]], features)[-depth:]
        return r, np.argmax(logits_of(params, config, self.head, r), axis=1).tolist()


class MaskRows(Rows):
    """Two rows of a head's own pages, which hold NaN before anything is written."""

    @property
    def parallel(self):
        return ParallelHead(**of_head(self.spec.config, self.context), stores=self.spec.stores)

    def at(self, roots):
        """Returns what a head reads of the state of rows with these roots."""
        cache = SimpleNamespace(
            block_table=self.table,
            page_size=PAGE,
            num_slots=2 * PAGES_PER_ROW * PAGE,
            lengths=jnp.array(roots, jnp.int32),
        )
        return SimpleNamespace(cache=cache, rows=2, history=self.history)

    def follow(self, row, root, drafts):
        """Returns r of the root and of masks after it, and the likeliest tokens."""
        head, decode_state = self.parallel, self.at([root, root])
        is_asked = jnp.arange(2) == row
        counts = jnp.where(is_asked, len(drafts), 0)
        pages, num_masks = self.state.pages, jnp.maximum(counts - 1, 0)
        first, _ = self.head.begin(self.params, self.state, decode_state, is_asked)
        masks, _ = head.run_masks(self.params, pages, decode_state, num_masks)
        found = np.concatenate([first[row][None], masks[row]])[: len(drafts)]
        asked = Asked(self.state, counts)
        hidden, drafting = head.begin(self.params, asked, decode_state, is_asked)
        tokens = []
        for ahead in range(1, len(drafts) + 1):
            tokens.append(int(np.argmax(head.logits(self.params, hidden, ahead - 1)[row])))
            # Every draft token is another than said, as none is read.
            history = self.history.at[row, root + ahead].set((tokens[-1] + 1) % VOCAB)
            positions = jnp.full(2, root + ahead, jnp.int32)
            fed = Fed(decode_state, history, positions, is_asked, hidden, ahead)
            hidden, drafting = head.feed(self.params, drafting, fed)
        # With the keys and values of masks, as a step leaves them.
        self.state = self.state._replace(pages=drafting.pages)
        return found, tokens


def two_texts(rows, length):
    """Writes a text to either row; returns both, and what is captured of all but the last token."""
    rng = np.random.default_rng(5)
    texts = rng.integers(0, VOCAB, (2, length)).tolist()
    for row, text in enumerate(texts):
        rows.write(row, text)
    return texts, rng.standard_normal((2, length - 1, CAPTURED, WIDTH))


ONE_BY_ONE = {"own tables, logits one by one": "own_tables"}


@pytest.mark.full
@pytest.mark.parametrize("name", [*FLAGS, *ONE_BY_ONE])
def test_what_it_says_is_what_its_equations_say(name, monkeypatch):
    if name not in FLAGS:
        monkeypatch.setattr(one_pass, "MOST_LOGIT_BYTES", 0)
        name = ONE_BY_ONE[name]
    config, params = make_head(name, mask_token_id=MASK)
    rows = MaskRows(config, params, DEPTH)
    check_texts(OverMasks(config, params), rows, CAPTURED, VOCAB)


@pytest.mark.full
@pytest.mark.parametrize("asked", [(3, 3), (1, 3), (3, 2), (0, 3)], ids=str)
def test_rows_are_asked_for_numbers_of_their_own(asked, monkeypatch):
    monkeypatch.setattr(one_pass, "MOST_LOGIT_BYTES", 0)  # what is kept are hidden states
    config, params = make_head("two_layers", mask_token_id=MASK)
    rows, reference = MaskRows(config, params, DEPTH), OverMasks(config, params)
    roots = 8, 4
    texts, taps = two_texts(rows, 9)
    for row, root in enumerate(roots):
        rows.absorb(row, 0, taps[row, :root])
    counts = jnp.array(asked)
    _, drafting = rows.parallel.begin(
        rows.params, Asked(rows.state, counts), rows.at(roots), counts > 0
    )
    for row, root in enumerate(roots):
        expected, _ = reference.draft(texts[row][: root + 1], taps[row, :root], DEPTH)
        found = drafting.said[: asked[row], row]
        np.testing.assert_allclose(found, expected[: asked[row]], rtol=1e-5, atol=1e-4)


@pytest.mark.full
@pytest.mark.parametrize("store_features", [None, "captured"])
@pytest.mark.parametrize("name", quick(["two_layers", "plain"], "two_layers"))
def test_a_head_catches_up_from_what_it_stored(name, store_features):
    config, params = make_head(name, mask_token_id=MASK)
    store_features = store_features or (True if name == "plain" else None)
    rows, reference = MaskRows(config, params, DEPTH, store_features), OverMasks(config, params)
    roots = 9, 24
    texts, taps = two_texts(rows, 26)
    for row, root in enumerate(roots):
        rows.absorb(row, 0, taps[row, :3])
        for first in range(3, root, 8):  # row 1 lacks more pairs than one pass runs
            rows.absorb(row, first, taps[row, first : min(first + 8, root)], defers=True)
    before = rows.state
    assert rows.catch_up(roots, (3, 3), (False, True)) == [3, 24]
    assert rows.catch_up(roots, (3, 24), (False, True)) == [3, 24]
    expected, drafts = reference.draft(texts[1][:25], taps[1, :24], DEPTH)
    found, said = rows.follow(1, 24, drafts)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-4)
    assert said == drafts
    # Another row's keys, values and newest pair stay as they were.
    np.testing.assert_array_equal(rows.state.newest[0], before.newest[0])
    own = np.asarray(rows.table[0])
    for now, then in zip(jax.tree.leaves(rows.state.pages), jax.tree.leaves(before.pages)):
        np.testing.assert_array_equal(np.asarray(now)[own], np.asarray(then)[own])
    # Absorbing goes on from there, and so does the other row.
    rows.absorb(1, 24, taps[1, 24:25])
    assert rows.catch_up((9, 25), (3, 25), (True, True)) == [9, 25]
    for row, root in ((0, 9), (1, 25)):
        expected, drafts = reference.draft(texts[row][: root + 1], taps[row, :root], 2)
        np.testing.assert_allclose(rows.follow(row, root, drafts)[0], expected, 1e-5, 1e-4)


@pytest.mark.parametrize("temperature", quick([0.0, 0.8], slow=[0.0]))
def test_tokens_are_those_of_plain_decoding(temperature):
    sampling = specjax.SamplingParams(temperature=temperature, max_tokens=20, seed=3)
    prompts = [[1, 2, 3], [5], [7, 8] * 9]
    found = [
        specjax.generate(TARGET, prompts, drafter=of, speculative_config=how, sampling=sampling)
        for of, how in (
            (None, None),
            (drafter_of("own_tables"), {"policy": "fixed", "num_speculative_tokens": 3}),
        )
    ]
    assert [out.token_ids for out in found[0]] == [out.token_ids for out in found[1]]
    assert found[1].stats.acceptance.num_drafted > 20


def repeating():
    """Returns a target that repeats its newest token for ever, and a head that knows it.

    Everything attends to all pairs alike and adds their embeddings, but for that of masks.
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
    config, head = make_head("target_head", mask_token_id=MASK, num_kv_heads=4)
    (layer,), mask = head["layers"], table[MASK]
    of_tokens = jnp.eye(WIDTH) - jnp.outer(mask, mask)
    layer |= {
        "q_proj": zero(layer["q_proj"]),
        "v_proj": jnp.concatenate([of_tokens, zero(of_tokens)], axis=1),
        "o_proj": jnp.eye(WIDTH),
        "down_proj": zero(layer["down_proj"]),
        "input_norm": jnp.ones(WIDTH),
    }
    head |= {"layers": (layer,), "fc": zero(head["fc"]), "norm": jnp.ones(WIDTH)}
    target = specjax.Model(TARGET.config, params, name="repeating")
    return target, specjax.LoadedDrafter("head", EagleDrafter(config), head)


@pytest.mark.full
@pytest.mark.parametrize("count", quick([1, 4], 4, slow=[1]))
def test_a_head_that_knows_its_target_is_always_accepted(count):
    target, drafter = repeating()
    num_tokens = 2 * (count + 1)
    out = specjax.generate(
        target,
        [[7, 7, 7], [9, 9]],
        drafter=drafter,
        speculative_config={"policy": "fixed", "num_speculative_tokens": count},
        sampling=specjax.SamplingParams(temperature=0, max_tokens=num_tokens + 1, seed=0),
    )
    assert [one.token_ids for one in out] == [[7] * (num_tokens + 1), [9] * (num_tokens + 1)]
    acceptance = out.stats.acceptance
    assert acceptance.num_accepted == acceptance.num_drafted > 0


def test_a_pass_runs_a_mask_less_than_is_drafted():
    """For a plan: one forward, whatever K is."""
    (work,) = drafter_of("plain").work(TARGET.config, jnp.bfloat16)
    by_token = specjax.LoadedDrafter("head", EagleDrafter(make_head("plain")[0])).work
    (other,) = by_token(TARGET.config, jnp.bfloat16)
    assert [work.num_forwards(count) for count in (1, 5)] == [1, 1]
    assert [other.num_forwards(count) for count in (1, 5)] == [1, 5]
    assert [work.forward_tokens(count) for count in (2, 4, 9)] == [1, 3, 8]
    assert work.weight_bytes == other.weight_bytes


def test_what_a_config_may_ask_for():
    spec = drafter_of("plain").spec
    for value in (None, True):
        assert spec.configured(SpeculationConfig(parallel_drafting=value)) == spec
    with pytest.raises(ValueError, match="trained to draft in one pass"):
        spec.configured(SpeculationConfig(parallel_drafting=False))
    with pytest.raises(ValueError, match="drafts chains"):
        spec.configured(SpeculationConfig(tree_top_k=2))
    with pytest.raises(ValueError, match="drafts chains"):
        EagleDrafter(spec.config, static_shapes.from_rank_paths([[0], [1]]))
    beside = spec.configured(SpeculationConfig(corpus_tokens=512, parallel_drafting=True))
    assert beside == HybridDrafter(spec, 512)
    assert "another mask token than 60" in " ".join(spec.likely_faults)


@pytest.mark.parametrize("token", [VOCAB, -1, True])
def test_a_mask_is_a_token_of_the_target(token):
    config, _ = make_head("plain", mask_token_id=token)
    with pytest.raises(ValueError, match=f"mask_token_id={token} must be a token of the target"):
        EagleDrafter(config)


def test_a_head_without_masks_takes_none():
    spec = EagleDrafter(make_head("plain")[0])
    with pytest.raises(ValueError, match="mask token"):
        spec.configured(SpeculationConfig(parallel_drafting=True))


def test_the_state_of_masks_is_as_wide_as_what_is_captured():
    spec = drafter_of("plain").spec
    found = spec.abstract_params(TARGET.config, jnp.float32)["mask_hidden"]
    assert found == jax.ShapeDtypeStruct((CAPTURED * WIDTH,), jnp.float32)


@pytest.mark.full
def test_rows_share_a_pass_of_what_they_lack(monkeypatch):
    """Four tokens per pass, of a row of 20 pairs and one of three."""
    monkeypatch.setattr(deferring, "LEAST_CATCH_UP", 4)
    monkeypatch.setattr(deferring, "MOST_CATCH_UP", 4)
    config, params = make_head("two_layers", mask_token_id=MASK)
    rows, reference = MaskRows(config, params, DEPTH), OverMasks(config, params)
    roots = 20, 3
    texts, taps = two_texts(rows, 26)
    for row, root in enumerate(roots):
        for first in range(0, root, 8):
            rows.absorb(row, first, taps[row, first : min(first + 8, root)], defers=True)
    assert rows.catch_up(roots, (0, 0), (True, True)) == [20, 3]
    for row, root in enumerate(roots):
        expected, drafts = reference.draft(texts[row][: root + 1], taps[row, :root], 2)
        np.testing.assert_allclose(rows.follow(row, root, drafts)[0], expected, 1e-5, 1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "store_features"), [("own_tables", None), ("two_layers", None), ("two_layers", False)]
)
def test_it_keeps_the_contract_of_drafters(name, store_features):
    drafter = drafter_of(name)
    spec = dataclasses.replace(drafter.spec, store_features=store_features)
    assert spec.defers == (name == "two_layers" and store_features is None)
    check_drafter(dataclasses.replace(drafter, spec=spec), TARGET)
