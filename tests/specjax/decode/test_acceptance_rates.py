"""How often each rule accepts at one position, against figures computed beforehand.

50 tokens, target logits N(0, sd), draft logits those plus N(0, .7). Each rule is run on
2,000 random pairs with drafts as its drafter would draw them.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from enumeration import chain, make_proposal, noise_shape, tree

from specjax.decode.accept import (
    accept_by_blocks,
    accept_by_equality,
    accept_by_rejection,
    accept_by_traversal,
)

VOCAB, NUM_PAIRS, NUM_DRAWS = 50, 2000, 8
ROWS = NUM_PAIRS * NUM_DRAWS
DEVIATIONS = (1, 2, 4, 8)

# Flat to peaked target, that is DEVIATIONS.
RATES = {
    "rejection": [0.734, 0.762, 0.832, 0.894],
    "shared noise": [0.672, 0.715, 0.808, 0.886],
    "most likely token, delta": [0.097, 0.284, 0.572, 0.767],
    "sampled token, delta": [0.049, 0.179, 0.462, 0.696],
    "two most likely tokens, delta": [0.163, 0.429, 0.759, 0.923],
    "two without replacement": [0.821, 0.856, 0.922, 0.971],
}

equality = jax.jit(accept_by_equality)
one_by_rejection = jax.jit(accept_by_rejection)
by_blocks, by_traversal = jax.jit(accept_by_blocks), jax.jit(accept_by_traversal)


def rate(acceptance) -> float:
    return float(np.mean(acceptance.num_accepted))


def softmax(logits):
    weights = np.exp(logits - logits.max(axis=1, keepdims=True))
    return weights / weights.sum(axis=1, keepdims=True)


@pytest.mark.full
@pytest.mark.parametrize("place", range(4), ids=[f"sd {sd}" for sd in DEVIATIONS])
def test_acceptance_at_one_position(place):
    rng = np.random.default_rng(place)
    logits = rng.normal(0, DEVIATIONS[place], (NUM_PAIRS, VOCAB))
    draft_logits = logits + rng.normal(0, 0.7, logits.shape)
    logits, draft_logits = (np.tile(x, (NUM_DRAWS, 1)) for x in (logits, draft_logits))
    gumbel, other = rng.gumbel(size=(2, ROWS, VOCAB))
    uniform = rng.uniform(1e-6, 1 - 1e-6, (ROWS, *noise_shape(tree(2), VOCAB)))
    uniform = uniform.astype(np.float32)
    target, draft = softmax(logits), softmax(draft_logits)
    chosen = np.argmax(logits + gumbel, axis=1)
    ranked = np.argsort(-draft_logits, axis=1)
    without = np.argsort(-(draft_logits + other), axis=1)  # independent of the target's

    def by_equality(tokens):
        shape = chain(1) if tokens.shape[1] == 1 else tree(2)
        choices = np.tile(chosen[:, None], (1, shape.num_nodes))
        return rate(equality(make_proposal(shape, tokens), jnp.asarray(choices)))

    def in_law(rule, tokens, shape):
        num_nodes = shape.num_nodes
        proposal = make_proposal(shape, tokens, np.tile(draft[:, None], (1, num_nodes - 1, 1)))
        probs = np.tile(target[:, None], (1, num_nodes, 1)).astype(np.float32)
        return rate(rule(uniform[:, :num_nodes], proposal, probs))

    shared = np.argmax(draft_logits + gumbel, axis=1)[:, None]
    one, two = without[:, :1], without[:, :2]
    found = {
        "rejection": in_law(one_by_rejection, one, chain(1)),
        "shared noise": by_equality(shared),
        "most likely token, delta": by_equality(ranked[:, :1]),
        "sampled token, delta": by_equality(one),
        "two most likely tokens, delta": by_equality(ranked[:, :2]),
        "two without replacement": in_law(one_by_rejection, two, tree(2)),
    }
    print(DEVIATIONS[place], {name: round(value, 3) for name, value in found.items()})
    for name, value in found.items():
        assert value == pytest.approx(RATES[name][place], abs=0.02), name
    # At one position deciding together gains nothing.
    assert in_law(by_blocks, one, chain(1)) == found["rejection"]
    two_together = in_law(by_traversal, two, tree(2))
    assert two_together == pytest.approx(found["two without replacement"], abs=1e-3)
    # And shared noise costs no more than it may: (1 - TV) / (1 + TV).
    distance = np.abs(target - draft).sum(axis=1).mean() / 2
    assert found["shared noise"] > (1 - distance) / (1 + distance) - 0.02
