"""A draft model over masks in the engine: as many drafts are accepted as a dense forward says.

Text is the target's whatever is drafted. What stale keys of masks would change is acceptance.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import tiny_llama, uncached_logits
from test_absorb import ENGINE, GREEDY, MAX_LENGTH, PROMPTS

import specjax
from specjax.drafters.spec import ModelDrafter

pytestmark = pytest.mark.full

DEPTH, MASK = 3, 9


@pytest.fixture(scope="module")
def models():
    """A target, and a draft model whose first draft is often right."""
    target = tiny_llama(0)
    other = tiny_llama(5)
    mix = lambda ours, theirs: 0.8 * ours + 0.2 * theirs
    params = jax.tree.map(mix, target.params, other.params)
    config = dataclasses.replace(target.config, mask_token_id=MASK)
    return target, dataclasses.replace(target, config=config, params=params)


def drafts_of(draft, text):
    """Returns i32[len(text), DEPTH], the likeliest tokens after each root of a text."""
    texts = np.full((MAX_LENGTH, MAX_LENGTH + DEPTH), MASK, np.int32)
    for root in range(len(text)):
        texts[root, : root + 1] = text[: root + 1]
    found = np.asarray(uncached_logits(draft.params, draft.config, jnp.asarray(texts)))
    likeliest = found.argmax(axis=2)
    return np.stack([likeliest[root, root : root + DEPTH] for root in range(len(text))])


def steps_of(draft, prompt, output):
    """Yields the numbers of drafted and accepted tokens of each step of a greedy text."""
    text = [*prompt, *output]
    drafts = drafts_of(draft, text)
    root = len(prompt) - 1
    while root < len(text) - 1:
        num_drafted = min(DEPTH, len(text) - root - 2)
        num_accepted = 0
        while (
            num_accepted < num_drafted
            and drafts[root, num_accepted] == text[root + 1 + num_accepted]
        ):
            num_accepted += 1
        yield num_drafted, num_accepted
        root += num_accepted + 1


def test_acceptance_is_that_of_a_dense_forward(models):
    """Chunks of prompts, pages that rows share, rows that are used again."""
    target, draft = models
    found = [
        specjax.generate(
            target,
            PROMPTS,
            drafter=drafter,
            speculative_config={"policy": "fixed", "num_speculative_tokens": DEPTH},
            sampling=GREEDY,
            engine=ENGINE,
        )
        for drafter in (
            None,
            specjax.LoadedDrafter("masks", ModelDrafter(draft.config), draft.params),
        )
    ]
    plain, out = ([one.token_ids for one in each] for each in found)
    assert out == plain
    steps = [
        step for one in found[1] for step in steps_of(draft, one.prompt_token_ids, one.token_ids)
    ]
    acceptance = found[1].stats.acceptance
    num_drafted, num_accepted = map(sum, zip(*steps, strict=True))
    assert (acceptance.num_drafted, acceptance.num_accepted) == (num_drafted, num_accepted)
    assert {accepted for _, accepted in steps} >= {0, 1, 2}
