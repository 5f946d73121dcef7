"""Rules that change the output: each does what it says, and no more than it says."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from enumeration import (
    LAW_TOLERANCE,
    Shape,
    chain,
    compiled,
    make_proposal,
    mean_accepted,
    noise_shape,
    random_law,
    sampler,
    step_laws,
    top_down,
    tree,
)

from specjax.decode.accept import (
    accept_by_rejection,
    accept_leniently,
    accept_synthetic,
    accept_typical,
)

SHAPES = [chain(3), tree(2, 2), Shape((-1, 0, 0, 1, 3, 2))]
ids = str
FULL = pytest.mark.full


def lenient_by(lenience: float):
    def rule(noise, proposal, target_probs):
        per_row = jnp.full(noise.shape[0], lenience)
        return accept_leniently(noise, proposal, target_probs, per_row)

    return compiled(rule)


@pytest.mark.parametrize("shape", [chain(2), pytest.param(tree(2, 1), marks=FULL)], ids=ids)
def test_lenience_bounds_what_it_distorts(shape):
    target, drafter, lenience = random_law(0), sampler(random_law(100)), 0.4
    strict, lenient = (
        step_laws(rule, shape, top_down, target, drafter, [()])[()]
        for rule in (lenient_by(1.0), lenient_by(lenience))
    )
    first = np.zeros(3)
    for emitted, chance in lenient.items():
        first[emitted[0]] += chance
    assert first.sum() == pytest.approx(1, abs=LAW_TOLERANCE)
    assert np.all(first <= target(()) / lenience + LAW_TOLERANCE)
    assert np.abs(first - target(())).sum() / 2 > 0.01, "it should be lossy"
    assert mean_accepted(lenient) > mean_accepted(strict) + 0.1


def test_lenience_by_hand():
    # Token 1 has target .2 and draft .5: with lenience .5 it stands below .8.
    target = jnp.tile(jnp.array([0.7, 0.2, 0.1]), (2, 2, 1))
    proposal = make_proposal(chain(1), [[1]] * 2, np.tile([0.3, 0.5, 0.2], (2, 1, 1)))
    noise = jnp.array([[[0.79, 0.5], [0.5, 0.5]], [[0.81, 0.95], [0.5, 0.5]]])
    acceptance = jax.jit(accept_leniently)(noise, proposal, target, jnp.full(2, 0.5))
    assert acceptance.num_accepted.tolist() == [1, 0]
    # The rest is (.7, .2, .1) less (.15, .25, .1): token 0.
    assert acceptance.token_ids[1, 0] == 0


@pytest.mark.parametrize("shape", [chain(3), pytest.param(tree(2, 2), marks=FULL)], ids=ids)
def test_lenience_of_one_is_rejection(shape):
    rng = np.random.default_rng(0)
    target, draft = rng.dirichlet(np.ones(4), (2, 256, shape.num_nodes))
    tokens = rng.integers(4, size=(256, shape.num_nodes - 1))
    noise = jnp.asarray(rng.uniform(size=(256, *noise_shape(shape, 4))), jnp.float32)
    proposal = make_proposal(shape, tokens, draft[:, :-1])
    target = jnp.asarray(target, jnp.float32)
    lenience = np.where(np.arange(256) % 2, 0.3, 1.0)
    some = jax.jit(accept_leniently)(noise, proposal, target, lenience)
    other = jax.jit(accept_by_rejection)(noise, proposal, target)
    for got, expected in zip(jax.tree.leaves(some), jax.tree.leaves(other)):
        assert np.array_equal(got[::2], expected[::2])
    assert np.any(some.num_accepted[1::2] > other.num_accepted[1::2])


def test_lenience_is_one_number_per_row():
    proposal = make_proposal(chain(1), [[1]] * 2, np.full((2, 1, 3), 1 / 3))
    arguments = jnp.full((2, 2, 2), 0.5), proposal, jnp.full((2, 2, 3), 1 / 3)
    for lenience in (0.5, jnp.ones(1), jnp.ones((2, 1))):
        with pytest.raises(ValueError, match="lenience"):
            accept_leniently(*arguments, lenience)


def typical_by_loop(shape, tokens, num_tokens, target, choices, epsilon, delta):
    """Returns the path and what follows it, of one row."""
    best = []
    for node in range(1, num_tokens + 1):
        path = shape.path(node)
        for at in path:
            law = target[shape.parents[at]]
            entropy = -np.sum(law[law > 0] * np.log(law[law > 0]))
            if law[tokens[at - 1]] <= min(epsilon, delta * np.exp(-entropy)):
                break
        else:
            best = path if len(path) > len(best) else best
    return best, choices[best[-1] if best else 0]


@pytest.mark.parametrize("shape", SHAPES, ids=ids)
def test_typical_tokens(shape):
    rng = np.random.default_rng(1)
    target = rng.dirichlet([0.5] * 4, (256, shape.num_nodes)).astype(np.float32)
    target[::4] = np.eye(4)[rng.integers(4, size=(64, shape.num_nodes))]
    tokens = rng.integers(4, size=(256, shape.num_nodes - 1))
    num_tokens = rng.integers(shape.num_nodes, size=256)
    choices = rng.integers(4, size=(256, shape.num_nodes))
    proposal = make_proposal(shape, tokens, None, num_tokens)
    accept = jax.jit(accept_typical)
    for epsilon, delta in ((0.09, 0.3), (0.3, 0.8)):
        acceptance = accept(proposal, target, choices, epsilon=epsilon, delta=delta)
        lengths = set()
        for row in range(256):
            path, after = typical_by_loop(
                shape,
                tokens[row],
                num_tokens[row],
                target[row],
                choices[row],
                epsilon,
                delta,
            )
            count = acceptance.num_accepted[row]
            assert count == len(path)
            emitted = [*(tokens[row, node - 1] for node in path), after]
            assert acceptance.token_ids[row, : count + 1].tolist() == emitted
            if shape.is_tree:
                assert acceptance.nodes[row, :count].tolist() == path
            lengths.add(len(path))
        assert len(lengths) == max(shape.depths) + 1


def test_typical_by_hand():
    # Four tokens of .25 each: entropy log 4, so a token needs more than
    # min(.09, .3 / 4) = .075. One at .9: the entropy of (.9, .08, .02, 0) is .375, and
    # .3 * exp(-.375) = .206, so it needs more than .09.
    target = jnp.array([[[0.25] * 4, [0.9, 0.08, 0.02, 0.0], [0.25] * 4]] * 2)
    proposal = make_proposal(chain(2), [[3, 1], [3, 0]])
    choices = jnp.array([[0, 2, 3]] * 2)
    acceptance = jax.jit(accept_typical)(proposal, target, choices)
    assert acceptance.num_accepted.tolist() == [1, 2]
    assert acceptance.token_ids[0, :2].tolist() == [3, 2]
    assert acceptance.token_ids[1].tolist() == [3, 0, 3]
    with pytest.raises(ValueError, match="target_probs"):
        accept_typical(proposal, target[:, 1:], choices)


@pytest.mark.parametrize("shape", SHAPES, ids=ids)
def test_synthetic_rates(shape):
    rates, depth = [0.75, 0.5, 0.25], max(shape.depths)
    grid = (np.arange(8) + 0.5) / 8  # every rate is a multiple of 1 / 8
    noise = np.array(list(itertools.product(grid, repeat=depth)), np.float32)
    rng = np.random.default_rng(0)
    tokens = rng.integers(9, size=(len(noise), shape.num_nodes - 1))
    choices = rng.integers(9, size=(len(noise), shape.num_nodes))
    acceptance = jax.jit(accept_synthetic)(
        noise, make_proposal(shape, tokens), choices, jnp.array(rates[:depth])
    )
    counts = np.asarray(acceptance.num_accepted)
    first_children = [0]
    while children := shape.children(first_children[-1]):
        first_children.append(children[0])
    for place in range(depth):
        assert np.mean(counts > place) == pytest.approx(np.prod(rates[: place + 1]))
    for row, count in enumerate(counts):
        path = first_children[1 : count + 1]
        after = choices[row, first_children[count]]
        emitted = [*(tokens[row, node - 1] for node in path), after]
        assert acceptance.token_ids[row, : count + 1].tolist() == emitted
        if shape.is_tree:
            assert acceptance.nodes[row, :count].tolist() == path


@pytest.mark.full
def test_synthetic_stops_where_no_more_stand():
    noise = jnp.full((3, 2), 0.5)
    proposal = make_proposal(chain(2), [[1, 2]] * 3, None, [0, 1, 2])
    choices = jnp.array([[7, 8, 9]] * 3)
    acceptance = accept_synthetic(noise, proposal, choices, jnp.ones(2))
    assert acceptance.num_accepted.tolist() == [0, 1, 2]
    assert acceptance.token_ids.tolist() == [[7, 7, 7], [1, 8, 8], [1, 2, 9]]
    never = accept_synthetic(noise, proposal, choices, jnp.zeros(2))
    assert never.num_accepted.tolist() == [0, 0, 0]
    for wrong in (jnp.ones(1), jnp.ones(3)):
        with pytest.raises(ValueError, match="rates"):
            accept_synthetic(noise, proposal, choices, wrong)
