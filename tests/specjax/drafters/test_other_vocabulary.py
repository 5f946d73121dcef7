"""A draft model of another vocabulary, rewritten in the target's."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import tiny_gpt2, tiny_llama
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as Backend

from specjax.drafters.other_vocabulary import SPELT_AT_ONCE, UNKNOWN, recoded, recoding
from specjax.drafters.token_set import TokenSet
from specjax.heads.loading import load_drafter
from specjax.models.families import family_of
from specjax.sampling.vocabulary import WHOLE
from specjax.text.tokenization import Tokenizer

BYTE_LEVEL = decoders.ByteLevel()
PIECES = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])


def tokenizer(tokens, decoder=BYTE_LEVEL, special=(), **named):
    backend = Backend(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[]))
    backend.decoder = decoder
    backend.add_special_tokens([AddedToken(token) for token in special])
    return Tokenizer(backend, special_tokens=named)


def model(of=None, size=None, make=tiny_llama, name="", seed=0):
    size = size or of.vocab_size
    return dataclasses.replace(make(seed, vocab_size=size), tokenizer=of, name=name)


def by(ours, theirs, sizes=(None, None)):
    return recoding(
        model(ours, sizes[0], name="big"), model(theirs, sizes[1], name="little", seed=1)
    )


def test_an_equal_vocabulary_is_left_alone():
    ours = tokenizer(["a", "b", "c"])
    assert by(ours, tokenizer(["a", "b", "c"])) is None
    assert by(None, None, (3, 3)) is None
    assert by(ours, None, (3, 3)) is None
    draft = model(ours)
    loaded = load_drafter(draft, model(ours))
    assert loaded.params is draft.params
    assert loaded.spec.said is None
    assert loaded.notes == ()


@pytest.mark.parametrize(("sizes", "num_said"), [((8, 5), 5), ((5, 8), 5)])
def test_rows_for_no_token_may_be_more_or_fewer(sizes, num_said):
    ours = tokenizer(["a", "b", "c"])
    found = by(ours, ours, sizes)
    assert found.own.tolist() == [*range(num_said), *[UNKNOWN] * (sizes[0] - num_said)]
    if num_said < sizes[0]:
        assert found.said.flags.tolist() == (found.own != UNKNOWN).tolist()
    else:
        assert found.said is None
        assert load_drafter(model(ours, sizes[1]), model(ours, sizes[0])).notes == ()
    draft = model(ours, sizes[1], seed=1)
    table = recoded(draft, found).params["embed_tokens"]
    np.testing.assert_array_equal(table[:5], draft.params["embed_tokens"][:5])
    assert not np.any(table[5:])


@pytest.mark.parametrize(("ours", "theirs"), [(True, False), (False, True), (False, False)])
def test_without_tokenizers_sizes_must_be_equal(ours, theirs):
    of = lambda is_there: tokenizer(["a", "b", "c"]) if is_there else None
    who = "the draft" if ours else "the target"
    with pytest.raises(ValueError, match=f"'big' and draft 'little' .*3 and 4 tokens, and {who}"):
        by(of(ours), of(theirs), (3, 4))


def test_tokens_are_matched_by_what_they_spell():
    ours = tokenizer(["Ġa", "b", "ab", "Ċ", "x"])
    theirs = tokenizer(["<0x0A>", "b", "▁a", "a", "q"], PIECES)
    found = by(ours, theirs)
    assert found.own.tolist() == [2, 1, UNKNOWN, 0, UNKNOWN]
    assert found.said.flags.tolist() == [True, True, False, True, False]
    assert found.spelt == {2: (3, 1), 4: ()}


def test_the_longest_tokens_spell_what_the_draft_model_has_not():
    ours = tokenizer(["abcab", "?", "cab"])
    theirs = tokenizer(["a", "b", "c", "ab", "abc", "cab"])
    assert by(ours, theirs, (8, 6)).spelt == {0: (4, 3), 1: ()}


def test_two_tokens_of_one_meaning_are_drafted_as_one():
    ours = tokenizer(["<0x41>", "A", "b"], PIECES)
    theirs = tokenizer(["b", "<0x41>", "A"], PIECES)
    # The same strings in another order: "A" is "A", and a byte's own token is fed as "A" is.
    found = by(ours, theirs)
    assert found.own.tolist() == [2, 2, 0]
    assert found.said.flags.tolist() == [False, True, True]


def test_special_tokens_are_the_same_only_as_special_tokens():
    ours = tokenizer(["<s>", "a"], special=["<e>", "<end>"], eos_token="<end>")
    theirs = tokenizer(["<e>", "a"], special=["<s>", "</s>"], eos_token="</s>")
    found = by(ours, theirs)
    # Ends are ends, however they are written.
    assert found.own.tolist() == [UNKNOWN, 1, UNKNOWN, 3]
    assert found.spelt == {0: (), 2: (0,)}


def test_an_end_that_both_write_alike_is_not_moved():
    ours = tokenizer(["a"], special=["<e>", "<end>"], eos_token="<end>", bos_token="<e>")
    theirs = tokenizer(["a"], special=["<end>", "</s>"], eos_token="</s>", bos_token="</s>")
    assert by(ours, theirs).own.tolist() == [0, 2, 1]


def test_ids_beyond_the_models_rows_are_no_tokens():
    ours, theirs = tokenizer(["a", "b", "c"]), tokenizer(["c", "b", "a", "d"])
    found = by(ours, theirs, (2, 2))
    assert found.own.tolist() == [UNKNOWN, 1]


def test_nothing_in_common():
    with pytest.raises(ValueError, match="no token of the target 'big' is one of the draft"):
        by(tokenizer(["a"]), tokenizer(["b"]))


def _retable(draft, params, ours):
    draft = dataclasses.replace(draft, params=params)
    return recoded(draft, recoding(model(ours), draft))


@pytest.mark.parametrize("make", [tiny_llama, tiny_gpt2])
def test_rows_follow_the_target_and_other_weights_are_not_copied(make, monkeypatch):
    ours, theirs = tokenizer(["ab", "b", "?", "ba", "a", "Ġ"]), tokenizer(["a", "c", "b"])
    draft = model(theirs, make=make, seed=1)
    monkeypatch.setattr("specjax.drafters.other_vocabulary.SPELT_AT_ONCE", 1)
    assert SPELT_AT_ONCE > 1
    own = recoded(draft, recoding(model(ours, make=make), draft))
    assert own.config == dataclasses.replace(draft.config, vocab_size=6)
    for changed in (np.asarray, lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)):
        params = jax.tree.map(changed, draft.params)
        again = recoded(dataclasses.replace(draft, params=params), recoding(model(ours), draft))
        shapes = lambda tree: jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), tree)
        assert shapes(again.params) == shapes(own.params)
    traced = jax.jit(lambda params: _retable(draft, params, ours).params["embed_tokens"])
    np.testing.assert_allclose(traced(draft.params), own.params["embed_tokens"], rtol=1e-6)
    names = [name for name in ("embed_tokens", "lm_head") if name in draft.params]
    for name in names:
        table, rows = draft.params[name], own.params[name]
        mean = (np.asarray(table[0]) + np.asarray(table[2])) / 2
        expected = [mean, table[2], jnp.zeros_like(mean), mean, table[0], jnp.zeros_like(mean)]
        np.testing.assert_allclose(rows, np.stack(expected), rtol=1e-6)
        assert rows.dtype == table.dtype
    assert own.params["layers"][0] == draft.params["layers"][0]


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize(("size", "axis"), [(6, "tensor"), (5, None)])
def test_rows_lie_where_the_table_does(size, axis, kind):
    """Split over devices where that is even."""
    mesh = jax.make_mesh((2,), ("tensor",), axis_types=(kind,), devices=jax.devices()[:2])
    ours = tokenizer(["a", "b", "c"])
    draft = model(ours, 4, seed=1)
    split = NamedSharding(mesh, PartitionSpec("tensor", None))
    table = jax.device_put(draft.params["embed_tokens"], split)
    params = {**draft.params, "embed_tokens": table}
    draft = dataclasses.replace(draft, params=params)
    own = recoded(draft, recoding(model(ours, size), draft)).params["embed_tokens"]
    automatic = Mesh(mesh.devices, mesh.axis_names)
    expected = NamedSharding(automatic, PartitionSpec(axis, None))
    assert own.sharding.is_equivalent_to(expected, own.ndim)
    np.testing.assert_array_equal(own[:4], np.asarray(draft.params["embed_tokens"]))


def test_the_end_of_a_text_is_drafted_as_the_end():
    ours = tokenizer(["a"], special=["<p>", "<|longer_end|>"], eos_token="<|longer_end|>")
    theirs = tokenizer(["a"], special=["<p>"], eos_token="<p>")
    found = by(ours, theirs)
    assert found.own.tolist() == [0, 1, 1]
    assert found.said.flags.tolist() == [True, False, True]


def test_few_common_tokens_are_warned_of():
    ours, theirs = tokenizer(list("abcdefgh")), tokenizer(list("hijklmno"))
    with pytest.warns(UserWarning, match="drafts 1 of the target's 8 tokens"):
        load_drafter(model(theirs, seed=1), model(ours))


def test_a_table_without_a_row_per_token_is_refused(monkeypatch):
    ours, theirs = tokenizer(["ab", "b", "a"]), tokenizer(["a", "c", "b", "d"])
    draft = model(theirs)
    family = family_of(draft.config)
    swapped = lambda config: {**family.axes(config), "lm_head": ("embed", "vocab")}
    other = dataclasses.replace(family, axes=swapped)
    monkeypatch.setattr("specjax.drafters.other_vocabulary.family_of", lambda config: other)
    with pytest.raises(ValueError, match="has no row per token"):
        load_drafter(draft, model(ours))


def test_loading_says_what_may_be_drafted():
    ours, theirs = tokenizer(["ab", "b", "a"]), tokenizer(["a", "c", "b", "d"])
    loaded = load_drafter(model(theirs, seed=1), model(ours))
    assert loaded.spec.said.flags.tolist() == [False, True, True]
    assert loaded.notes == (
        "drafts 2 of the target's 3 tokens: those that are in its own vocabulary too",
    )
    assert loaded.spec.config.vocab_size == 3


def test_what_was_rewritten_for_a_target_is_not_taken_by_another():
    """Of equal size: nothing else would tell, and no draft would be accepted."""
    ours, theirs = tokenizer(["ab", "b", "a"]), tokenizer(["a", "c", "b", "d"])
    loaded = load_drafter(model(theirs, seed=1), model(ours))
    assert load_drafter(loaded, model(ours, seed=2)) is loaded
    assert load_drafter(loaded, model(tokenizer(["ab", "b", "a"]))) is loaded  # an equal one
    assert load_drafter(loaded, model(None, 3)) is loaded  # which nothing is known of
    with pytest.raises(ValueError, match="drafts in the vocabulary of another target"):
        load_drafter(loaded, model(tokenizer(["b", "ab", "a"]), name="other"))
    as_it_is = load_drafter(model(tokenizer(["ab", "b", "a"]), seed=1), model(ours))
    with pytest.raises(ValueError, match="drafts in the vocabulary of another target"):
        load_drafter(as_it_is, model(tokenizer(["b", "ab", "a"]), name="other"))


def test_more_children_than_tokens_that_may_be_drafted_are_refused():
    from specjax.config.speculation import SpeculationConfig

    ours, theirs = tokenizer(["ab", "b", "a"]), tokenizer(["a", "c", "b", "d"])
    with pytest.raises(ValueError, match="tree_top_k=3 is more than the 2 tokens"):
        load_drafter(model(theirs), model(ours), SpeculationConfig(tree_top_k=3))


def test_a_set_is_hashable_and_says_which_it_is():
    flags = np.array([True, False, True, True, False, False, False, False, True])
    one, same, other = TokenSet.of(flags), TokenSet.of(flags.copy()), TokenSet.of(~flags)
    assert one == same
    assert hash(one) == hash(same)
    assert one != other
    assert repr(one) == repr(same) != repr(other)
    assert (len(one), one.size, one.flags.tolist()) == (4, 9, flags.tolist())


def test_a_set_keeps_its_own_logits():
    flags = np.array([True, False, True])
    kept = TokenSet.of(flags).keep(jnp.arange(6.0).reshape(2, 3), WHOLE)
    np.testing.assert_array_equal(kept, [[0, -np.inf, 2], [3, -np.inf, 5]])
