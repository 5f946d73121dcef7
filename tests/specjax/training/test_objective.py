"""Losses of drafts: by hand, by enumeration over three tokens, and by drawing with shared noise."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from specjax.testing.tiny_models import tiny_config
from specjax.training import comparison
from specjax.training.drafts import Drafts
from specjax.training.objective import Objective, loss_of, steps_along
from specjax.training.texts import Along, Target, TextBatch

VOCAB = 3
P, Q = np.array([0.5, 0.3, 0.2]), np.array([0.1, 0.6, 0.3])
NONE = dict.fromkeys(("distribution", "likeliest", "text", "overlap", "accepted"), 0.0)


def compared(p, q, tokens, target_ids=None, estimate=0.0, **weights):
    """Compares one pair of distributions along texts with each of these tokens."""
    n = len(tokens)
    rows = lambda law: np.tile(np.log(np.asarray(law, np.float32)), (n, 1))
    objective = Objective(**{**NONE, "overlap": 1.0, "confidence": 0.0} | weights)
    ids = None if target_ids is None else np.asarray(target_ids, np.int32)
    estimates = np.full(n, estimate, np.float32)
    return compare(objective, rows(p), rows(q), np.asarray(tokens, np.int32), estimates, ids)


ACCEPT = Objective(**NONE | {"accepted": 1.0})
compare = jax.jit(comparison.compare, static_argnums=0)


def drawn_alike(p, q, draws=200_000):
    """Returns for each token x: P(drafter draws x | target draws x), and its standard error."""
    noise = np.random.default_rng(0).gumbel(size=(draws, len(p)))
    with np.errstate(divide="ignore"):
        target, draft = (np.argmax(np.log(law) + noise, axis=1) for law in (p, q))
    counts = np.bincount(target, minlength=len(p))
    share = np.bincount(target[target == draft], minlength=len(p)) / counts
    return share, np.sqrt(np.maximum(share * (1 - share), 1e-6) / counts)


@pytest.mark.parametrize("q", [Q, P, np.array([0.98, 0.01, 0.01])], ids=["other", "same", "sure"])
def test_accepted_is_the_chance_under_shared_noise(q):
    found = np.asarray(compared(P, q, [0, 1, 2]).accepted)
    share, error = drawn_alike(P, q)
    assert np.all(np.abs(found - share) < 5 * error + 1e-6)
    by_hand = [1 / sum(np.maximum(P, q * P[x] / q[x])) for x in range(VOCAB)]
    np.testing.assert_allclose(found, by_hand, rtol=1e-5)


def test_accepted_of_certain_laws_is_finite():
    """What is nearly impossible gives no NaN. A token that the target draws by its noise alone is
    drawn by a drafter that is sure of it."""
    sure = np.array([[300.0, -300.0, 0.0]], np.float32)
    ids = np.zeros(1, np.int32)
    cases = {"same": (sure, sure, 1), "other": (sure, -sure, 0), "by noise": (-sure, sure, 1)}
    estimate = np.zeros(1, np.float32)
    for name, (target, draft, expected) in cases.items():
        ask = lambda q, p=target: compare(ACCEPT, p, q, ids, estimate, None).accepted[0]
        value, slope = jax.value_and_grad(ask)(draft)
        assert np.all(np.isfinite(slope)), name
        np.testing.assert_allclose(value, expected, atol=1e-6, err_msg=name)


def test_accepted_of_a_drafter_that_says_some_tokens_only():
    p, said, target_ids = np.array([0.4, 0.3, 0.2, 0.1]), np.array([0.7, 0.3]), [0, 2]
    told = compared(p, said, [0, 1, 2, 3], target_ids)
    share, error = drawn_alike(p, np.array([0.7, 0, 0.3, 0]))
    assert np.all(np.abs(told.accepted - share) < 5 * error + 1e-6)
    assert np.all(np.asarray(told.accepted)[[1, 3]] == 0)
    np.testing.assert_allclose(told.overlap, np.full(4, 0.4 + 0.2), rtol=1e-6)
    assert np.all(told.agreed == 1)
    assert np.all(compared(p[::-1], said, [0], target_ids).agreed == 0)  # it cannot say the best


TERMS = {
    "distribution": -np.sum(P * np.log(Q)),
    "likeliest": -np.log(Q[0]),
    "text": -np.log(Q),
    "overlap": 1 - (0.1 + 0.3 + 0.2),
}


@pytest.mark.parametrize("name", TERMS)
def test_each_loss_by_hand(name):
    told = compared(P, Q, [0, 1, 2], **{**NONE, name: 2.0})
    np.testing.assert_allclose(told.loss, 2 * np.broadcast_to(TERMS[name], 3), rtol=1e-5)
    np.testing.assert_allclose(told.overlap, np.full(3, 0.6), rtol=1e-6)
    assert np.all(told.agreed == 0)


def test_losses_of_a_part_of_the_vocabulary():
    """The cross-entropy is to the target's law among the tokens that the drafter can say."""
    p, said = np.array([0.4, 0.3, 0.2, 0.1]), np.array([0.7, 0.3])
    ids = [1, 3]
    told = compared(p, said, [1, 0], ids, **{**NONE, "distribution": 1.0})
    np.testing.assert_allclose(
        told.loss, np.full(2, -(0.75 * np.log(0.7) + 0.25 * np.log(0.3))), rtol=1e-5
    )
    told = compared(p, said, [3, 0], ids, **{**NONE, "text": 1.0})
    np.testing.assert_allclose(told.loss, [-np.log(0.3), 0], rtol=1e-5)
    told = compared(p, said, [3, 0], ids, **{**NONE, "likeliest": 1.0})
    np.testing.assert_allclose(told.loss, [0, 0], rtol=1e-5)


def test_confidence_is_taught_the_overlap():
    told = compared(P, Q, [0], estimate=2.0, **{**NONE, "overlap": 1e-9, "confidence": 1.0})
    sure = 1 / (1 + np.exp(-2.0))
    expected = -(0.6 * np.log(sure) + 0.4 * np.log(1 - sure))
    np.testing.assert_allclose(told.loss, [expected], rtol=1e-5)


def test_temperature_sharpens_both():
    sharp = lambda law: law**2 / np.sum(law**2)
    warm = compared(P, Q, [0, 1, 2], distribution=1.0, temperature=0.5)
    plain = compared(sharp(P), sharp(Q), [0, 1, 2], distribution=1.0)
    for name in ("loss", "overlap", "accepted"):
        np.testing.assert_allclose(getattr(warm, name), getattr(plain, name), rtol=1e-5)
    text = [compared(P, Q, [1], **NONE | {"text": 1.0}, temperature=t).loss for t in (1.0, 0.5)]
    np.testing.assert_allclose(*text)


class Spelled(Target):
    """A target whose hidden states are its logits."""

    def logits(self, hidden):
        return hidden


TARGET = Spelled(tiny_config(vocab_size=VOCAB), {})


def toy(rows=2, length=14, depth=3, seed=0):
    """Returns texts, what the target says and drafts after every token, both as logits."""
    rng = np.random.default_rng(seed)
    logits = lambda *shape: (2 * rng.standard_normal((*shape, VOCAB))).astype(np.float32)
    is_learned = rng.random((rows, length)) < 0.8
    token_ids = rng.integers(0, VOCAB, (rows, length)).astype(np.int32)
    text = TextBatch(token_ids, np.array([length, length - 2]), is_learned)
    roots = np.tile(np.arange(length), (rows, 1))
    is_root = (roots > 0) & (roots < text.lengths[:, None])
    hidden = tuple(logits(rows, length) for _ in range(depth))
    return text, logits(rows, length), roots, is_root, hidden


def score(read, s):
    return read * (1 + s)


@functools.partial(jax.jit, static_argnums=(0, 6))
def loss_and_slopes(objective, text, said, roots, is_root, hidden, has_all_roots=True):
    """Returns ((loss, sums), its gradient for the drafts' logits)."""

    def loss(hidden):
        drafts = Drafts(roots, is_root, hidden, score, has_all_roots=has_all_roots)
        return loss_of(objective, Along(TARGET, text, (), said), drafts)

    return jax.value_and_grad(loss, has_aux=True)(hidden)


def softmax(x):
    x = np.exp(np.asarray(x, np.float64))
    return x / x.sum()


WAYS = "greedy", "sampled", "by_law"


@pytest.mark.full
@pytest.mark.parametrize("has_all_roots", [True, False])
def test_sums_along_chains(has_all_roots):
    """Against loops over roots: what is in the text and learned counts; chains end with it, and
    count by how likely a step begins there, where all roots are known."""
    text, said, roots, is_root, hidden = toy()
    depth, weights = 3, Objective(**NONE | {"text": 1.0, "accepted": 0.5}, decay=0.5)
    (value, sums), _ = loss_and_slopes(weights, text, said, roots, is_root, hidden, has_all_roots)
    singles = "count", "loss", "agreed", "accepted", "overlap"
    expected = {name: np.zeros(depth) for name in singles}
    (steps, survived), num_chains = np.zeros((2, len(WAYS), depth)), np.zeros(depth)
    for row, length in enumerate(text.lengths.tolist()):
        is_learned = text.is_learned[row, :length]
        begins = np.zeros((length + depth + 1, len(WAYS)))
        for root in range(1, length):
            chain, is_whole = np.ones(len(WAYS)), True
            if root + 1 < length and is_learned[root + 1]:
                if root == 1 or not is_learned[root]:
                    begins[root] = 1
            else:
                begins[root] = 0  # no draft token to tell of
            begun = begins[root] if has_all_roots else np.ones(len(WAYS))
            before, last = np.ones(len(WAYS)), root
            for s in range(depth):
                at = root + s + 1
                if at >= length or not is_learned[at]:
                    is_whole = False
                    continue
                p = softmax(said[row, at - 1])
                q = softmax(hidden[s][row, root] * (1 + s))
                x = int(text.token_ids[row, at])
                accepted = 1 / np.sum(np.maximum(p, q * p[x] / q[x]))
                agreed = p.argmax() == q.argmax()
                overlap = np.minimum(p, q).sum()
                chain = chain * (agreed, accepted, overlap)
                if is_whole:
                    steps[:, s] += begun
                    survived[:, s] += begun * chain
                    num_chains[s] += 1
                    begins[at] += begun * (before - chain)  # rejected here: the step ends
                    before, last = chain, at
                expected["count"][s] += 1
                expected["loss"][s] -= np.log(q[x])
                expected["agreed"][s] += agreed
                expected["accepted"][s] += accepted
                expected["overlap"][s] += overlap
            begins[last + 1] += begun * before  # all are kept
    assert 0 < num_chains[2] < num_chains[0]
    assert num_chains[2] < expected["count"][2]
    for name, one in expected.items():
        np.testing.assert_allclose(getattr(sums, name), one, rtol=1e-4, err_msg=name)
    for way, name in enumerate(WAYS):
        chains = getattr(sums, name)
        np.testing.assert_allclose(chains.steps, steps[way], rtol=1e-4, err_msg=name)
        np.testing.assert_allclose(chains.survived, survived[way], rtol=1e-4, err_msg=name)
    decays = 0.5 ** np.arange(depth)
    loss = np.sum(decays * expected["loss"] / expected["count"]) / decays.sum()
    loss -= 0.5 * np.sum(survived[1] / steps[1]) / depth
    np.testing.assert_allclose(value, loss, rtol=1e-4)


@pytest.mark.parametrize("depth", [1, 4])
def test_steps_begin_where_those_before_end(depth):
    """Against 4,000 decodings of a text whose draft tokens are kept by chance, with a gap. What
    comes over the gap does not count behind it."""
    rng = np.random.default_rng(depth)
    length, draws = 24, 4000
    is_root = np.arange(length)[None] % 12 < 11
    kept = rng.uniform(0.2, 0.95, (depth, length))
    for s in range(depth):
        kept[s, np.roll(~is_root[0], -s)] = 0
    found = steps_along(np.cumprod(kept, axis=0)[:, None], is_root)
    counts = np.zeros(length)
    for part in (range(11), range(12, 23)):
        for _ in range(draws):
            place = part[0]
            while place in part:
                counts[place] += 1
                is_kept = np.append(rng.random(depth) < kept[:, place], False)
                place += 1 + int(np.argmin(is_kept))
    np.testing.assert_allclose(found[0], counts / draws, atol=5 * 0.5 / draws**0.5)


LENGTHEN = Objective(**NONE | {"accepted": 1.0})


@pytest.mark.full
def test_texts_without_drafts():
    """Texts of one token, none, and none learned: nothing is counted and the loss is 0."""
    text, said, roots, is_root, hidden = toy()
    for lengths, learned in (([1, 0], True), ([14, 9], False)):
        none = text._replace(
            lengths=np.array(lengths), is_learned=np.full_like(text.is_learned, learned)
        )
        is_there = is_root & (roots < none.lengths[:, None])
        (value, sums), slopes = loss_and_slopes(LENGTHEN, none, said, roots, is_there, hidden)
        assert value == 0
        assert all(np.all(np.asarray(each) == 0) for each in jax.tree.leaves((sums, slopes)))


def test_the_gradient_of_accepted_makes_chains_longer():
    text, said, *roots, hidden = toy()
    (before, sums), slopes = loss_and_slopes(LENGTHEN, text, said, *roots, hidden)
    moved = tuple(x - 0.5 * np.asarray(slope) for x, slope in zip(hidden, slopes, strict=True))
    (after, longer), _ = loss_and_slopes(LENGTHEN, text, said, *roots, moved)
    assert after < before
    # In the order of draft tokens, each by the steps that have one.
    length = lambda sums: np.sum(sums.sampled.survived / sums.sampled.steps)
    assert length(longer) > length(sums)


@pytest.mark.full
def test_the_gradient_takes_where_steps_begin_as_given():
    """A text's first root counts 1 in it, and later ones by the chance that a step begins there."""
    text, said, *roots, hidden = toy(depth=1)
    (_, sums), (slopes,) = loss_and_slopes(LENGTHEN, text, said, *roots, hidden)
    (_, alike), (same,) = loss_and_slopes(LENGTHEN, text, said, *roots, hidden, False)
    share = float(sums.sampled.steps[0] / alike.sampled.steps[0])
    slopes, same = np.asarray(slopes), np.asarray(same)
    first = 1 + np.argmax(text.is_learned[:, 2:], axis=1)
    rows = np.arange(len(first))
    np.testing.assert_allclose(share * slopes[rows, first], same[rows, first], rtol=1e-3, atol=1e-8)
    is_told = np.abs(same) > 1e-4
    chance = share * slopes[is_told] / same[is_told]
    assert 0 <= chance.min() < 0.9
    assert chance.max() < 1.001


@pytest.mark.full
def test_slices_of_logits_change_nothing(monkeypatch):
    every = Objective(text=0.1, overlap=0.2, accepted=0.3)
    whole = loss_and_slopes(every, *toy())
    for slice_bytes in (1, 16 * VOCAB * 5):  # one draft token at a time, and 5: 28 are no multiple
        monkeypatch.setattr(comparison, "LOGIT_BYTES", slice_bytes)
        loss_and_slopes.clear_cache()
        parts = loss_and_slopes(every, *toy())
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), whole, parts)
    loss_and_slopes.clear_cache()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"text": -1.0}, "text=-1.0 must be"),
        ({"decay": float("nan")}, "decay=nan must be"),
        ({"temperature": 0.0}, "must be above 0"),
        (NONE, "all weights are 0"),
    ],
)
def test_what_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(Objective(), **fields)
