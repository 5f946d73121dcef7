"""Mistakes that are easily made, in rules and in drafters: the enumeration notices each.

The distances are those of one drafter and one target, three tokens, vocabulary 3.
"""

import jax.numpy as jnp
import numpy as np
import pytest
from enumeration import (
    LAW_TOLERANCE,
    Drafted,
    bottom_up,
    chain,
    compiled,
    compiled_quickly,
    draws_without_replacement,
    every_draft,
    probs_of,
    random_law,
    sampler,
    step_laws,
    top_down,
    total_variation,
    tree,
)

from specjax.decode.accept import (
    accept_by_blocks,
    accept_by_rejection,
    accept_by_traversal,
    block,
    drawing,
    nodes,
    rejection,
    traversal,
)
from specjax.decode.accept.drawing import draw_way

TARGET, DRAFT = random_law(10), random_law(126)
NOTICED = 0.01

reject, traverse = compiled(accept_by_rejection), compiled(accept_by_traversal)
in_blocks = compiled(accept_by_blocks)


# Mistakes inside a rule: a named step of it replaced.


def resume_from_target(target, draft, vocabulary):
    return target


def leave_as_it_is(weights, vocabulary):
    return weights


def capped_excess(excess, survival):
    return jnp.minimum(1.0, excess)


RULE_MISTAKES = {
    "q not renormalised between siblings": (
        (nodes, "renormalise", leave_as_it_is),
        (accept_by_rejection, tree(2, 1), top_down),
    ),
    "q not renormalised between siblings, bottom up": (
        (nodes, "renormalise", leave_as_it_is),
        (accept_by_traversal, tree(2, 1), bottom_up),
    ),
    "q of the first sibling for all": (
        (nodes, "without_replacement", lambda probs, token_ids, is_drawn, vocabulary: probs),
        (accept_by_rejection, tree(2, 1), top_down),
    ),
    "residual not updated between siblings": (
        (rejection, "subtract_draft", resume_from_target),
        (accept_by_rejection, tree(2, 1), top_down),
    ),
    "residual not renormalised between siblings": (
        (rejection, "renormalise", leave_as_it_is),
        (accept_by_rejection, tree(2, 1), top_down),
    ),
    "traversal with a wrong survival after a deletion": (
        (traversal, "survival_after_deletion", capped_excess),
        (accept_by_traversal, tree(2, 1), bottom_up),
    ),
    "traversal with the survival left as it was": (
        (traversal, "survival_after_deletion", lambda excess, survival: survival),
        (accept_by_traversal, tree(2, 1), bottom_up),
    ),
    "survival not capped": (
        (traversal, "capped_ratio", lambda survival, p, q: survival * p / q),
        (accept_by_traversal, tree(2, 1), bottom_up),
    ),
    "resume from the target after a rejection": (
        (rejection, "subtract_draft", resume_from_target),
        (accept_by_rejection, chain(2), top_down),
    ),
    "blocks resume from the target": (
        (block, "subtract_draft", resume_from_target),
        (accept_by_blocks, chain(2), bottom_up),
    ),
    "blocks by the survival of the prefix alone": (
        (block, "is_prefix_accepted", lambda draw, excess, survival: draw < survival),
        (accept_by_blocks, chain(2), bottom_up),
    ),
    "accept without q": (
        (rejection, "is_accepted", lambda draw, p, q: draw < p),
        (accept_by_rejection, chain(2), top_down),
    ),
    "accept what is likelier": (
        (rejection, "is_accepted", lambda draw, p, q: q <= p),
        (accept_by_rejection, chain(2), top_down),
    ),
    "absolute difference": (
        (rejection, "subtract_draft", lambda target, draft, vocabulary: abs(target - draft)),
        (accept_by_rejection, chain(2), top_down),
    ),
}


@pytest.mark.full
@pytest.mark.parametrize("mistake", RULE_MISTAKES)
def test_the_enumeration_notices_a_wrong_rule(mistake, monkeypatch):
    (module, name, wrong), (rule, shape, order) = RULE_MISTAKES[mistake]
    monkeypatch.setattr(module, name, wrong)
    drafter = sampler(DRAFT)
    gap = total_variation(compiled_quickly(rule), shape, order, TARGET, drafter)
    print(f"{mistake}: {gap:.4f}")
    assert gap > NOTICED


@pytest.mark.full
def test_the_enumeration_notices_what_is_subtracted_though_it_does_not_stand(
    monkeypatch,
):
    def all_of_them(proposal):
        return jnp.pad(proposal.probs, ((0, 0), (0, 1), (0, 0)))

    monkeypatch.setattr(rejection, "padded_draft_probs", all_of_them)
    drafter = sampler(DRAFT, num_tokens=1)
    gap = total_variation(
        compiled_quickly(accept_by_rejection), chain(2), top_down, TARGET, drafter
    )
    print(f"subtracted though it does not stand: {gap:.4f}")
    assert gap > NOTICED


@pytest.mark.full
@pytest.mark.parametrize("shared", [(0, 1), (1, 2)])
def test_the_enumeration_notices_one_draw_for_two_purposes(shared, monkeypatch):
    """To accept and to recover, and for both levels of a token."""
    monkeypatch.setattr(drawing, "WAYS", 2)
    some, other = shared

    def one_draw(noise, proposal, target_probs):
        noise = noise.at[:, :, other].set(noise[:, :, some])
        return accept_by_rejection(noise, proposal, target_probs)

    with pytest.raises(AssertionError, match=r"its noise in another way|more pieces than ways"):
        total_variation(compiled_quickly(one_draw), chain(2), top_down, TARGET, sampler(DRAFT))


DRAWING_MISTAKES = {
    "the first part always": lambda draw, weights: jnp.zeros_like(draw, jnp.int32),
    "parts of equal chances": lambda draw, weights: (draw * weights.shape[1]).astype(jnp.int32),
    "the other part": lambda draw, weights: weights.shape[1] - 1 - draw_way(draw, weights),
}


@pytest.mark.full
@pytest.mark.parametrize("mistake", DRAWING_MISTAKES)
def test_the_enumeration_notices_a_wrong_part(mistake, monkeypatch):
    monkeypatch.setattr(drawing, "WAYS", 2)
    monkeypatch.setattr(drawing, "draw_way", DRAWING_MISTAKES[mistake])
    # Of four tokens every part has two.
    target, drafter = random_law(10, 4), sampler(random_law(126, 4))
    rule = compiled_quickly(accept_by_rejection)
    gap = total_variation(rule, chain(1), top_down, target, drafter, length=2)
    print(f"{mistake}: {gap:.4f}")
    assert gap > NOTICED


# Mistakes of the drafter: what it says its tokens were drawn from, or what it leaves out.


def most_likely_children(shape, context):
    """Siblings are the most likely tokens, said to be drawn from the softmax."""
    tokens = []
    for node in range(1, shape.num_nodes):
        law = DRAFT(context + shape.prefix(tokens, shape.parents[node]))
        tokens.append(int(np.argsort(-law)[len(shape.earlier_siblings(node))]))
    probs = probs_of(shape, context, tokens, DRAFT)[:-1]
    yield Drafted(1.0, tuple(tokens), len(tokens), probs)


def likelier_of_two(shape, context):
    """Draws two without replacement, keeps the one of higher q, says it was drawn from q."""

    def kept(prefix):
        law = DRAFT(prefix)
        chances = np.zeros_like(law)
        for first, chance in enumerate(law):
            for second, then in enumerate(draws_without_replacement(law, [first])):
                better = first if law[first] > law[second] else second
                chances[better] += chance * then
        return chances

    for probability, tokens in every_draft(shape, context, kept):
        probs = probs_of(shape, context, tokens, DRAFT)[:-1]
        yield Drafted(probability, tokens, len(tokens), probs)


def own_probabilities(shape, context, tokens):
    """Returns each draft token's own q."""
    places = range(1, shape.num_nodes)
    laws = [DRAFT(context + shape.prefix(tokens, shape.parents[n])) for n in places]
    return [law[token] for law, token in zip(laws, tokens, strict=True)]


def drop_unlikely_tokens(shape, context, tokens):
    """Stops before the first token whose own q is low."""
    chances = own_probabilities(shape, context, tokens)
    low = [place for place, chance in enumerate(chances) if chance < 0.3]
    return min(low, default=len(tokens))


def best_length_in_retrospect(shape, context, tokens):
    """Chooses the length of most expected tokens at a price each, when all are drawn."""
    survival = np.cumprod([1.0, *own_probabilities(shape, context, tokens)])
    gains = np.cumsum(survival[1:] - 0.3)
    return int(np.argmax([0.0, *gains]))


def prune_by(confidence, threshold=0.6):
    """Returns the drafter that stops before the first node of low confidence."""

    def stand(shape, context, tokens):
        for node in range(1, shape.num_nodes):
            law = DRAFT(context + shape.prefix(tokens, shape.parents[node]))
            if confidence(law, tokens[node - 1]) < threshold:
                return node - 1
        return shape.num_nodes - 1

    return sampler(DRAFT, num_tokens=stand)


def prior_confidence(law, token):
    return law.max()


def leaked_confidence(law, token):
    return law[token]


DRAFTER_MISTAKES = {
    "most likely siblings verified with softmax q": (
        most_likely_children,
        [(reject, tree(2, 1), top_down), (traverse, tree(2, 1), bottom_up)],
    ),
    "rank after sampling": (
        likelier_of_two,
        [(reject, chain(2), top_down), (in_blocks, chain(2), bottom_up)],
    ),
    "drop a token because its own q is low": (
        sampler(DRAFT, num_tokens=drop_unlikely_tokens),
        [(reject, chain(2), top_down), (in_blocks, chain(2), bottom_up)],
    ),
    "truncate in retrospect": (
        sampler(DRAFT, num_tokens=best_length_in_retrospect),
        [(reject, chain(2), top_down), (in_blocks, chain(2), bottom_up)],
    ),
    "confidence that knows the token": (
        prune_by(leaked_confidence),
        [
            (reject, chain(2), top_down),
            (in_blocks, chain(2), bottom_up),
            (reject, tree(2, 1), top_down),
            (traverse, tree(2, 1), bottom_up),
        ],
    ),
}


@pytest.mark.full
@pytest.mark.parametrize("mistake", DRAFTER_MISTAKES)
def test_the_enumeration_notices_a_drafter_that_misleads(mistake):
    drafter, verifications = DRAFTER_MISTAKES[mistake]
    for rule, shape, order in verifications:
        gap = total_variation(rule, shape, order, TARGET, drafter)
        print(f"{mistake}, {order.__name__} {shape.parents}: {gap:.4f}")
        assert gap > NOTICED, shape


@pytest.mark.full
def test_pruning_by_confidence_before_the_token_is_exact():
    drafter = prune_by(prior_confidence)
    assert len({drafted.num_tokens for drafted in drafter(chain(2), ())}) > 1
    for rule, shape, order in DRAFTER_MISTAKES["confidence that knows the token"][1]:
        gap = total_variation(rule, shape, order, TARGET, drafter)
        assert gap < LAW_TOLERANCE


def test_truncation_in_retrospect_by_hand():
    # The drafter says one of two tokens, and takes token 1 back. So token 0 is emitted
    # with .5 as drafted, and .5 * .7 from the target where nothing was.
    target, draft = (
        (lambda prefix: np.array([0.7, 0.3])),
        (lambda prefix: np.array([0.5, 0.5])),
    )
    drafter = sampler(draft, num_tokens=lambda shape, context, tokens: 1 - tokens[0])
    laws = step_laws(reject, chain(1), top_down, target, drafter, [()])[()]
    first = [sum(p for emitted, p in laws.items() if emitted[0] == t) for t in (0, 1)]
    assert first == pytest.approx([0.85, 0.15], abs=1e-6)
