"""Verification rules, enumerated exactly: the law of the output is the target's."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.decode.accept import accept_by_equality, accept_by_rejection, draw_token
from specjax.types import Acceptance, Proposal

VOCAB = 3
# Noise is float32: the edge of a cell is known to 6e-8, and few cells meet.
LAW_TOLERANCE = 1e-6
PADDED_TO = 8192

reject = jax.jit(accept_by_rejection)


def propose(token_ids, probs=None, num_tokens=None) -> Proposal:
    token_ids = jnp.asarray(token_ids, jnp.int32)
    if num_tokens is None:
        num_tokens = [token_ids.shape[1]] * token_ids.shape[0]
    return Proposal(
        token_ids=token_ids,
        num_tokens=jnp.asarray(num_tokens, jnp.int32),
        probs=None if probs is None else jnp.asarray(probs, jnp.float32),
    )


def random_laws(depth: int, seed: int, *, sharpness: float = 1.0) -> dict:
    """Returns a law of the next token for every prefix of up to `depth` tokens."""
    rng = np.random.default_rng(seed)
    prefixes = itertools.chain.from_iterable(
        itertools.product(range(VOCAB), repeat=length) for length in range(depth + 1)
    )
    return {prefix: rng.dirichlet([sharpness] * VOCAB) for prefix in prefixes}


def joint_law(laws: dict, depth: int) -> np.ndarray:
    """Returns the probability of every sequence of depth + 1 tokens."""
    joint = np.ones([VOCAB] * (depth + 1))
    for tokens in itertools.product(range(VOCAB), repeat=depth + 1):
        for length, token in enumerate(tokens):
            joint[tokens] *= laws[tokens[:length]][token]
    return joint


def noise_cells(edges: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the midpoints and lengths of the intervals into which edges cut (0, 1)."""
    edges = np.unique(np.clip(np.concatenate([[0.0], edges, [1.0]]), 0, 1))
    length = np.diff(edges)
    return (edges[:-1] + edges[1:])[length > 0] / 2, length[length > 0]


def output_law(rule, target: dict, draft: dict, depth: int, num_tokens: int):
    """Returns the joint law of depth + 1 tokens that `rule` emits, integrated exactly.

    The rule is a function of uniform noise that is constant between breakpoints.
    So it is run once at the middle of every cell, over all drafts, and weighted by
    the cell's volume; where it emits fewer tokens, plain sampling goes on. A rule
    that breaks elsewhere is integrated roughly, which is enough to notice it.
    """
    drafts, noises, weights, draft_probs, target_probs = [], [], [], [], []
    for tokens in itertools.product(range(VOCAB), repeat=depth):
        prefixes = [tokens[:length] for length in range(depth + 1)]
        p = np.array([target[prefix] for prefix in prefixes])
        q = np.array([draft[prefix] for prefix in prefixes[:depth]])
        # Tokens past num_tokens are drawn but do not stand.
        chance = np.prod([q[place][token] for place, token in enumerate(tokens)])
        if chance == 0:
            continue
        axes = []
        for place in range(depth + 1):
            thresholds, levels = [], [np.cumsum(p[place])]
            if place < num_tokens:
                thresholds = [p[place, tokens[place]] / q[place, tokens[place]]]
                rest = np.maximum(p[place] - q[place], 0)
                levels += [np.cumsum(rest) / rest.sum()] if rest.sum() > 0 else []
            axes += [noise_cells(np.array(thresholds))]
            axes += [noise_cells(np.concatenate(levels))]
        middles = np.meshgrid(*[middle for middle, _ in axes], indexing="ij")
        volumes = np.meshgrid(*[length for _, length in axes], indexing="ij")
        noise = np.stack([m.reshape(-1) for m in middles], axis=1)
        noises.append(noise.reshape(-1, depth + 1, 2))
        weights.append(chance * np.prod([v.reshape(-1) for v in volumes], axis=0))
        count = len(noise)
        drafts.append(np.tile(tokens, (count, 1)))
        draft_probs.append(np.tile(q, (count, 1, 1)))
        target_probs.append(np.tile(p, (count, 1, 1)))
    drafts, noises, weights, draft_probs, target_probs = map(
        np.concatenate, (drafts, noises, weights, draft_probs, target_probs)
    )
    # One shape, and so one compilation, for all laws of a depth: the last case
    # again, of no weight.
    num_padded = -len(drafts) % PADDED_TO
    weights = np.pad(weights, (0, num_padded))
    drafts, noises, draft_probs, target_probs = (
        np.pad(each, [(0, num_padded)] + [(0, 0)] * (each.ndim - 1), mode="edge")
        for each in (drafts, noises, draft_probs, target_probs)
    )
    proposal = propose(drafts, draft_probs, [num_tokens] * len(drafts))
    acceptance = rule(
        jnp.asarray(noises, jnp.float32),
        proposal,
        jnp.asarray(target_probs, jnp.float32),
    )
    token_ids, num_accepted = map(np.asarray, acceptance[:2])
    assert num_accepted.max() <= num_tokens
    law = np.zeros([VOCAB] * (depth + 1))
    for count in range(depth + 1):
        emitted = token_ids[num_accepted == count, : count + 1]
        mass = np.zeros([VOCAB] * (count + 1))
        np.add.at(mass, tuple(emitted.T), weights[num_accepted == count])
        for tokens in itertools.product(range(VOCAB), repeat=depth + 1):
            rest = [target[tokens[:n]][tokens[n]] for n in range(count + 1, depth + 1)]
            law[tokens] += mass[tokens[: count + 1]] * np.prod(rest)
    return law


def total_variation(rule, target, draft, depth, num_tokens=None) -> float:
    num_tokens = depth if num_tokens is None else num_tokens
    law = output_law(rule, target, draft, depth, num_tokens)
    assert law.sum() == pytest.approx(1, abs=1e-9)
    return np.abs(law - joint_law(target, depth)).sum() / 2


@pytest.mark.parametrize("depth", [2, 3])
def test_rejection_has_the_target_law(depth):
    for seed in range(3 if depth == 2 else 1):
        target = random_laws(depth, seed)
        draft = random_laws(depth, 100 + seed, sharpness=0.5)
        assert total_variation(reject, target, draft, depth) < LAW_TOLERANCE


def test_rejection_has_the_target_law_when_some_rows_draft_fewer():
    target, draft = random_laws(2, 5), random_laws(2, 6)
    for num_tokens in (0, 1):
        assert total_variation(reject, target, draft, 2, num_tokens) < LAW_TOLERANCE


def test_rejection_has_the_target_law_at_its_edges():
    some, other = random_laws(2, 7), random_laws(2, 8)
    one_hot = {prefix: np.eye(VOCAB)[len(prefix)] for prefix in some}
    # Each lacks a token that the other may have.
    cut, shifted = (
        {prefix: np.roll([0.0, 0.3, 0.7], by + len(prefix)) for prefix in some}
        for by in (0, 1)
    )
    pairs = {
        "equal": (some, some),
        "one-hot draft": (some, one_hot),
        "one-hot target": (one_hot, some),
        "both one-hot": (one_hot, one_hot),
        "disjoint in part": (cut, shifted),
        "draft without a token": (other, cut),
        "target without a token": (cut, other),
    }
    for name, (target, draft) in pairs.items():
        assert total_variation(reject, target, draft, 2) < LAW_TOLERANCE, name


def rule_by_loop(noise, proposal, target_probs, *, fault: str = "") -> Acceptance:
    """The rule row by row, right or with one of the faults that are easily made."""
    target_probs, draft_probs = np.asarray(target_probs), np.asarray(proposal.probs)
    rows, depth = proposal.token_ids.shape
    emitted, counts = np.zeros((rows, depth + 1), int), np.zeros(rows, int)
    drafted, num_tokens = map(np.asarray, (proposal.token_ids, proposal.num_tokens))
    for row, (to_accept, to_recover) in enumerate(np.asarray(noise).swapaxes(1, 2)):
        for place in range(depth + 1):
            p = q = target_probs[row, place]
            rest = p
            if place < num_tokens[row]:
                token, q = drafted[row, place], draft_probs[row, place]
                chance = p[token] / q[token] if q[token] else 0
                chance = p[token] if fault == "accept without q" else chance
                chance = float(chance >= 1) if fault == "accept likelier" else chance
                if to_accept[place] < chance:
                    emitted[row, place] = token
                    counts[row] += 1
                    continue
                rest = np.maximum(p - q, 0)
                rest = np.abs(p - q) if fault == "absolute difference" else rest
                rest = p if fault == "resume from the target" else rest
            elif place < depth and fault == "subtract what does not stand":
                rest = np.maximum(p - draft_probs[row, place], 0)
            rest = rest if rest.sum() > 0 else p
            draws = to_accept if fault == "one draw for two purposes" else to_recover
            levels = np.cumsum(rest) / rest.sum()
            place_of = np.searchsorted(levels, draws[place], side="right")
            emitted[row, place] = min(place_of, VOCAB - 1)
            break
    return Acceptance(emitted, counts)


def test_the_loop_has_the_target_law():
    target, draft = random_laws(2, 5), random_laws(2, 6)
    for num_tokens in (1, 2):
        law = total_variation(rule_by_loop, target, draft, 2, num_tokens)
        assert law < LAW_TOLERANCE


@pytest.mark.parametrize(
    "fault",
    [
        "resume from the target",
        "accept without q",
        "accept likelier",
        "one draw for two purposes",
        "subtract what does not stand",
        "absolute difference",
    ],
)
def test_the_enumeration_notices_wrong_rules(fault):
    target, draft = random_laws(2, 5), random_laws(2, 6)
    rule = functools.partial(rule_by_loop, fault=fault)
    assert total_variation(rule, target, draft, 2, num_tokens=1) > 0.01


def test_rejection_by_hand():
    # Token 1 has target .2 and draft .5, so it stands below noise .4. The residual
    # is (.4, 0, 0) there: token 0 always.
    target = np.array([[[0.7, 0.2, 0.1], [0.1, 0.1, 0.8]]])
    draft = np.array([[[0.3, 0.5, 0.2]]])
    for draw, expected, num_accepted in [(0.39, [1, 2], 1), (0.41, [0], 0)]:
        noise = jnp.array([[[draw, 0.5], [0.5, 0.5]]])
        tokens, count, _ = reject(noise, propose([[1]], draft), jnp.asarray(target))
        assert count.tolist() == [num_accepted]
        assert tokens[0, : num_accepted + 1].tolist() == expected


def test_rejection_of_a_token_that_the_draft_could_not_have_drawn():
    target = jnp.array([[[0.5, 0.5, 0.0], [0.0, 0.0, 1.0]]] * 2)
    draft = [[[1.0, 0.0, 0.0]]] * 2
    noise = jnp.full((2, 2, 2), 0.999)
    tokens, count, _ = reject(noise, propose([[1], [2]], draft), target)
    # Drawn although its draft probability is 0: stands if the target may say it,
    # never if it may not.
    assert count.tolist() == [1, 0]
    assert tokens[0].tolist() == [1, 2]
    assert tokens[1, 0] == 1


@pytest.mark.parametrize("value", [1e-38, 2.0**-33, 1 - 2.0**-24])
def test_noise_at_the_ends_never_emits_what_the_target_cannot_say(value):
    possible = np.array([0.0, 0.6, 0.0, 0.4, 0.0], np.float32)
    rows = 5
    target = jnp.tile(possible, (rows, 2, 1))
    draft = jnp.full((rows, 1, 5), 0.2)
    noise = jnp.full((rows, 2, 2), value, jnp.float32)
    drafted = jnp.arange(rows)[:, None]
    tokens, count, _ = reject(noise, propose(drafted, draft), target)
    for row in range(rows):
        assert np.all(possible[tokens[row, : count[row] + 1]] > 0)


def test_draw_token_inverts_the_cumulative_sum():
    weights = jnp.tile(jnp.array([0.0, 2.0, 0.0, 1.0, 1.0, 0.0]), (5, 1))
    draws = jnp.array([1e-30, 0.49, 0.51, 0.74, 0.9999999])
    assert draw_token(draws, weights).tolist() == [1, 1, 3, 3, 4]


def test_draw_token_never_draws_a_token_without_weight():
    # Over a long vocabulary a parallel cumulative sum rises by a rounding error at
    # tokens without weight. Draw exactly there.
    rng = np.random.default_rng(0)
    vocab, num_draws = 8192, 512
    weights = np.zeros(vocab, np.float32)
    weights[rng.permutation(vocab)[:400]] = rng.dirichlet(np.ones(400))
    tiled = jnp.tile(weights, (num_draws, 1))
    total = np.asarray(jax.jit(lambda rows: jnp.cumsum(rows, axis=1))(tiled))[0]
    rises = np.flatnonzero((np.diff(total) > 0) & (weights[1:] == 0))
    assert rises.size, "nothing to test: choose another seed"
    draws = (total[rises] / total[-1])[:, None]
    draws = (draws + np.float32(2.0**-25) * np.arange(-4, 5)).astype(np.float32)
    draws = np.resize(draws, num_draws)
    levels = draws * total[-1]
    assert any(((total[at] <= levels) & (levels < total[at + 1])).any() for at in rises)
    drawn = jax.jit(draw_token)(draws, tiled)
    assert np.all(weights[drawn] > 0)


def test_nothing_left_to_recover_falls_back_to_the_target():
    # The target is nowhere above the draft, as when both agree to rounding.
    target = jnp.tile(jnp.array([0.5, 0.25, 0.0]), (2, 2, 1))
    draft = np.tile([0.5, 0.5, 0.0], (2, 1, 1))
    noise = jnp.array([[[0.9, 0.5]] * 2, [[0.9, 0.9]] * 2])
    tokens, count, _ = reject(noise, propose([[1], [1]], draft), target)
    assert count.tolist() == [0, 0]
    assert tokens[:, 0].tolist() == [0, 1]


def test_a_draft_past_num_tokens_does_not_stand_however_good():
    probs = np.tile([0.0, 1.0, 0.0], (3, 3, 1))
    noise = jnp.full((3, 3, 2), 0.5)
    proposal = propose([[1, 1]] * 3, probs[:, :2], [0, 1, 2])
    tokens, count, _ = reject(noise, proposal, jnp.asarray(probs, jnp.float32))
    assert count.tolist() == [0, 1, 2]
    assert tokens.tolist() == [[1, 1, 1]] * 3


def test_rejection_refuses_what_does_not_fit():
    noise = jnp.full((1, 2, 2), 0.5)
    with pytest.raises(ValueError, match=r"proposal\.probs"):
        accept_by_rejection(noise, propose([[1]]), jnp.ones((1, 2, 3)))
    for shape in [(1, 1, 3), (1, 2, 4), (2, 2, 3)]:
        with pytest.raises(ValueError, match="target_probs"):
            accept_by_rejection(
                noise, propose([[1]], np.ones((1, 1, 3))), jnp.ones(shape)
            )


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_equality_emits_the_choices_along_the_path(depth):
    """For every tree of choices and every draft: the output is the undrafted text."""
    rng = np.random.default_rng(depth)
    drafts = list(itertools.product(range(VOCAB), repeat=depth))
    for num_tokens in range(depth + 1):
        for _ in range(10):
            choice = {
                prefix: int(rng.integers(VOCAB)) for prefix in random_laws(depth, 0)
            }
            plain = []
            for _ in range(depth + 1):
                plain.append(choice[tuple(plain)])
            after_nodes = [
                [choice[draft[:length]] for length in range(depth + 1)]
                for draft in drafts
            ]
            tokens = np.array(drafts, np.int32).reshape(len(drafts), depth)
            acceptance = accept_by_equality(
                propose(tokens, None, [num_tokens] * len(drafts)),
                jnp.asarray(after_nodes, jnp.int32),
            )
            emitted, counts = map(np.asarray, acceptance[:2])
            for draft, row, accepted in zip(drafts, emitted, counts, strict=True):
                right = 0
                while right < num_tokens and draft[right] == plain[right]:
                    right += 1
                assert accepted == right
                assert row[: right + 1].tolist() == plain[: right + 1]


def test_equality_by_hand():
    proposal = propose([[5, 6, 7]] * 5, None, [3, 3, 3, 2, 0])
    choices = [[5, 6, 7, 8], [5, 9, 7, 8], [4, 6, 7, 8], [5, 6, 7, 8], [5, 6, 7, 8]]
    acceptance = accept_by_equality(proposal, jnp.array(choices))
    assert isinstance(acceptance, Acceptance)
    # A right token after a wrong one does not count.
    assert acceptance.num_accepted.tolist() == [3, 1, 0, 2, 0]
    assert acceptance.token_ids.tolist() == choices
