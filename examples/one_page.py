"""Speculative decoding on one page: plain JAX, one row, no KV cache, weights from a seed.

    python examples/one_page.py

A draft proposes K tokens, one after the other. The target verifies all of them in one forward, and
a prefix is kept so that the output has the target's distribution (arXiv:2211.17192, 2302.01318).
`specjax/decode/step.py` is the same step for batches, trees and paged keys and values.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

VOCAB, WIDTH, LENGTH = 16, 32, 48
PROMPT, NUM_TOKENS, MOST, NUM_SEEDS = [3, 1, 4, 1, 5], 30, 3, 5_000  # MOST: the largest K
TEXT = np.pad(PROMPT, (0, LENGTH - len(PROMPT)))


@jax.jit
def make_params(key):
    """Returns random weights of one layer of causal attention."""
    rows = {"q": WIDTH, "k": WIDTH, "v": WIDTH, "mlp": WIDTH, "embed": VOCAB, "position": LENGTH}
    keys = jax.random.split(key, len(rows))
    return {name: jax.random.normal(k, (rows[name], WIDTH)) / 4 for k, name in zip(keys, rows)}


@functools.partial(jax.jit, static_argnames="temperature")
def probs_of(params, token_ids, temperature):
    """Returns the distribution after each token of i32[LENGTH], f32[LENGTH, VOCAB]."""
    x = params["embed"][token_ids] + params["position"]
    scores = (x @ params["q"]) @ (x @ params["k"]).T / WIDTH**0.5
    scores = jnp.where(jnp.tri(LENGTH, dtype=bool), scores, -jnp.inf)  # none sees later tokens
    x = x + jax.nn.softmax(scores) @ x @ params["v"]
    logits = (x + jnp.tanh(x @ params["mlp"])) @ params["embed"].T
    if temperature == 0:
        return jax.nn.one_hot(jnp.argmax(logits, axis=-1), VOCAB)
    return jax.nn.softmax(logits / temperature)


def sample(key, probs):
    return jax.random.categorical(key, jnp.log(probs))


def draft(params, key, token_ids, length, temperature, num_speculative_tokens):
    """Returns the text with draft tokens behind it, and draft_probs f32[K, VOCAB] of each."""
    draft_probs = []
    for ahead in range(num_speculative_tokens):
        probs = probs_of(params, token_ids, temperature)[length + ahead - 1]
        draft_probs.append(probs)
        token = sample(jax.random.fold_in(key, ahead), probs)
        token_ids = token_ids.at[length + ahead].set(token)
    return token_ids, jnp.array(draft_probs).reshape(num_speculative_tokens, VOCAB)


def verify(params, token_ids, length, temperature, num_speculative_tokens):
    """Returns target_probs f32[K + 1, VOCAB] of every draft token, and after them: one forward."""
    probs = probs_of(params, token_ids, temperature)
    return jax.lax.dynamic_slice_in_dim(probs, length - 1, num_speculative_tokens + 1)


def accept(key, draft_token_ids, draft_probs, target_probs):
    """Returns num_accepted, from 0 to K, and the token that follows what was accepted.

    Draft token x is accepted with probability min(1, target(x) / draft(x)). The first that is not
    is replaced by a recovered token, from max(target - draft, 0); behind the last, where draft is
    0, that is a bonus token from the target.
    """
    place = jnp.arange(len(draft_token_ids))
    ratio = target_probs[place, draft_token_ids] / draft_probs[place, draft_token_ids]
    accept_key, recover_key = jax.random.split(key)
    is_accepted = jax.random.uniform(accept_key, place.shape) < ratio
    num_accepted = jnp.sum(jnp.cumprod(is_accepted), dtype=int)
    rest = target_probs - jnp.pad(draft_probs, ((0, 1), (0, 0)))
    return num_accepted, sample(recover_key, jnp.maximum(rest, 0)[num_accepted])


@functools.partial(jax.jit, static_argnames=("temperature", "num_speculative_tokens"))
def step(target, drafter, token_ids, length, key, temperature, num_speculative_tokens):
    """Advances a text by 1 to K + 1 tokens: draft, verify, accept, commit. K = 0 is plain."""
    draft_key, accept_key = jax.random.split(key)
    options = length, temperature, num_speculative_tokens
    token_ids, draft_probs = draft(drafter, draft_key, token_ids, *options)
    target_probs = verify(target, token_ids, *options)
    drafts = jax.lax.dynamic_slice_in_dim(token_ids, length, num_speculative_tokens)
    num_accepted, token = accept(accept_key, drafts, draft_probs, target_probs)
    # Draft tokens behind it stay where they are: the next step writes over them.
    return token_ids.at[length + num_accepted].set(token), length + num_accepted + 1


def generate(target, drafter, temperature, num_speculative_tokens):
    """Returns NUM_TOKENS tokens after the prompt, and how many steps they took."""
    token_ids, length, num_steps = TEXT, len(PROMPT), 0
    while length < len(PROMPT) + NUM_TOKENS:
        options = jax.random.key(num_steps), temperature, num_speculative_tokens
        token_ids, length = step(target, drafter, token_ids, length, *options)
        num_steps += 1
    return np.asarray(token_ids)[len(PROMPT) :][:NUM_TOKENS].tolist(), num_steps


def main():
    target, other = map(make_params, jax.random.split(jax.random.key(0)))
    drafter = jax.tree.map(lambda ours, theirs: ours + 0.3 * theirs, target, other)  # is alike
    (plain, _), (tokens, num_steps) = (generate(target, drafter, 0.0, k) for k in (0, MOST))
    assert tokens == plain, "greedy tokens are those of plain decoding"
    print(f"greedy: the same {NUM_TOKENS} tokens in {num_steps} forwards of the target")
    once = lambda key: step(target, drafter, TEXT, len(PROMPT), key, 1.0, MOST)[0][len(PROMPT)]
    first = jax.vmap(once)(jax.random.split(jax.random.key(1), NUM_SEEDS))
    found = np.bincount(first, minlength=VOCAB) / NUM_SEEDS
    law, of_draft = (np.array(probs_of(p, TEXT, 1.0)[len(PROMPT) - 1]) for p in (target, drafter))
    most = 5 * np.sqrt(law * (1 - law) / NUM_SEEDS)  # five standard deviations
    assert np.all(abs(found - law) < most), "first tokens are distributed as the target's"
    assert not np.all(abs(of_draft - law) < most), "and the draft's are not"
    away = [f"{abs(probs - law).sum() / 2:.3f}" for probs in (found, of_draft)]
    print(f"sampled: {away[0]} from the target's distribution; the draft, {away[1]}")


if __name__ == "__main__":
    main()
