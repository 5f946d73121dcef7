"""GRPO on one page: rollouts by specjax, the policy a flax nnx module, the update by optax.

    python examples/grpo.py --drafters none draft draft+adapt --plot reward.png

The policy learns running sums by demonstrations that slip, and then, by its own samples, to
slip less. The samples are the same whatever drafts them: so are rewards and weights. A drafter
whose name ends in "+adapt" goes on learning from the samples.

Source: Shao et al. 2024, "DeepSeekMath" (arXiv:2402.03300), group-relative advantages;
Liu et al. 2025 (arXiv:2503.20783) for leaving the division by lengths and deviations out.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import running_sums
from flax import nnx
from jax import Array

import specjax
from specjax.heads.specs import EagleDrafter
from specjax.models import llama
from specjax.models.base import Model, ModelConfig, Params
from specjax.models.dense import sequence_logits
from specjax.policy.interface import Fixed
from specjax.training import AdapterStats, eagle3, optimizers
from specjax.training.texts import Target

CONFIG = ModelConfig(
    architecture="llama",
    family="llama",
    vocab_size=running_sums.VOCAB_SIZE,
    hidden_size=64,
    intermediate_size=192,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    max_position_embeddings=256,
    eos_token_ids=(running_sums.END,),
)
DRAFT_CONFIG = dataclasses.replace(
    CONFIG, hidden_size=32, intermediate_size=96, num_layers=1, head_dim=8
)
HEAD_CONFIG = eagle3.configure(CONFIG, {"aux_layers": (0, 1, 2)})
MAX_TOKENS = 48
PROMPT_WIDTH = 32
SLIPS = 0.1
ENGINE = specjax.EngineConfig(
    max_rows=32,
    max_context=96,
    numerics="invariant",
    token_bucket=32,
    burst_steps=16,
    row_buckets=(8,),
    max_logprobs=1,
)


class Policy(nnx.Module):
    """A Llama whose weights are nnx.Params: what an optimiser trains, and what samples."""

    def __init__(self, config: ModelConfig, params: Params):
        self.config = config
        self.weights = nnx.data(jax.tree.map(nnx.Param, params))

    @property
    def params(self) -> Params:
        """The weights as specjax takes them: the same arrays."""
        is_param = lambda leaf: isinstance(leaf, nnx.Param)
        return jax.tree.map(lambda leaf: leaf.get_value(), self.weights, is_leaf=is_param)

    def __call__(self, token_ids: Array, mask: Array) -> Array:
        """Returns f32[rows, length, vocab]."""
        return sequence_logits(self.params, self.config, token_ids, mask)


# Demonstrations


def demonstrated_loss(params: Params, config: ModelConfig, batch: Any) -> Array:
    """Returns the mean cross-entropy of answers after their prompts, in nats per token."""
    token_ids, is_answer = batch
    logits = sequence_logits(params, config, token_ids, token_ids != running_sums.PAD)
    each = optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], token_ids[:, 1:])
    return jnp.sum(each * is_answer[:, 1:]) / jnp.sum(is_answer)


def pretrained(
    config: ModelConfig, seed: int, num_steps: int = 250, batch_size: int = 32
) -> Params:
    """Returns weights that continue problems as demonstrations do, slips included."""
    params = llama.init(jax.random.key(seed), config, std=0.05)
    vocab_sizes = frozenset([config.vocab_size])
    optimiser = optimizers.muon(0.02, num_steps, num_steps // 10, num_steps // 2, vocab_sizes)
    opt_state = optimiser.init(params)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def update(params, opt_state, batch):
        loss, grads = jax.value_and_grad(demonstrated_loss)(params, config, batch)
        updates, opt_state = optimiser.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    rng = np.random.default_rng(seed)
    for _ in range(num_steps):
        token_ids, is_answer = np.zeros((2, batch_size, PROMPT_WIDTH + MAX_TOKENS), np.int32)
        for row, problem in enumerate(running_sums.draw(rng, batch_size)):
            prompt, answer = problem.prompt_ids, problem.demonstration(rng, SLIPS)
            text = [*prompt, *answer]
            token_ids[row, : len(text)] = text
            is_answer[row, len(prompt) : len(text)] = 1
        params, opt_state, _ = update(params, opt_state, (token_ids, is_answer))
    return params


# Reinforcement


def advantages(rewards: Array, num_samples: int) -> Array:
    """Returns each sample's reward less the mean of its group, f32[num_samples of all]."""
    groups = rewards.reshape(-1, num_samples)
    return (groups - jnp.mean(groups, axis=1, keepdims=True)).reshape(-1)


def policy_loss(policy: Policy, batch: specjax.Rollout, advantage: Array) -> tuple[Array, Array]:
    """Returns the loss whose gradient is GRPO's where samples are the policy's own, and their
    log-probabilities.

    The ratio to the policy that sampled is 1 in value and has the gradient of log p, since
    every batch is used once.
    """
    logits = policy(batch.token_ids, batch.token_mask)
    first = batch.prompt_ids.shape[1]
    log_probs = jax.nn.log_softmax(logits[:, first - 1 : -1])
    chosen = jnp.take_along_axis(log_probs, batch.completion_ids[:, :, None], axis=2)
    chosen = chosen[:, :, 0]
    ratio = jnp.exp(chosen - jax.lax.stop_gradient(chosen))
    gain = ratio * advantage[:, None] * batch.completion_mask
    return -jnp.sum(gain) / batch.num_samples / MAX_TOKENS, chosen


@dataclasses.dataclass
class Run:
    """What a training run was; lists have one entry per step."""

    rewards: list[float] = dataclasses.field(default_factory=list)
    prompts: list[list[list[int]]] = dataclasses.field(default_factory=list)
    tokens: list[np.ndarray] = dataclasses.field(default_factory=list)
    lengths: list[np.ndarray] = dataclasses.field(default_factory=list)
    metrics: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    # Largest difference between the trainer's log-probabilities and the sampler's.
    gaps: list[float] = dataclasses.field(default_factory=list)
    checkpoints: dict[int, Params] = dataclasses.field(default_factory=dict)
    adapted: list[AdapterStats] = dataclasses.field(default_factory=list)
    # Functions traced so far, of the decoder and of the adapter.
    traces: list[int] = dataclasses.field(default_factory=list)
    params: Any = None  # after the last


def train(
    decoder: specjax.RolloutDecoder,
    start: Params,
    *,
    draft: Params | None = None,
    adapter: specjax.DrafterAdapter | None = None,
    num_steps: int = 30,
    num_prompts: int = 8,
    num_samples: int = 8,
    pool: int = 64,
    learning_rate: float = 1e-3,
    seed: int = 0,
    checkpoint_every: int = 7,
    report: Callable[[str], None] = lambda line: None,
) -> Run:
    """Trains a policy from some weights by its own samples.

    Args:
      decoder: for CONFIG; nothing of the result depends on what it drafts with.
      start: weights to begin with; not changed.
      draft: weights of the decoder's drafter, if it has some.
      adapter: lets the drafter follow the policy, from `draft` on; None: it stays as it is.
      pool: different prompts, of which each step takes num_prompts: each comes again.
      report: is told a line per step.
    """
    policy = Policy(CONFIG, start)
    optimiser = nnx.Optimizer(policy, optax.adam(learning_rate), wrt=nnx.Param)
    problems = running_sums.draw(np.random.default_rng(seed), pool)
    run = Run()
    followed: Any = None if adapter is None else adapter.init(draft)

    @nnx.jit
    def update(policy, optimiser, batch, advantage):
        gradient = nnx.value_and_grad(policy_loss, has_aux=True)
        (_, log_probs), grads = gradient(policy, batch, advantage)
        optimiser.update(policy, grads)
        return specjax.logprob_gap(batch.logprobs.behaviour, log_probs, batch.completion_mask)

    for step in range(num_steps):
        params = policy.params
        if step % checkpoint_every == 0:
            run.checkpoints[step] = params
        chosen = [problems[(step * num_prompts + i) % pool] for i in range(num_prompts)]
        own = draft if adapter is None else adapter.draft_weights(followed)
        batch = specjax.rollout(
            decoder,
            params if own is None else specjax.DecoderParams(params, own),
            [problem.prompt_ids for problem in chosen],
            num_samples=num_samples,
            sampling=specjax.SamplingParams(temperature=1.0, max_tokens=MAX_TOKENS, seed=step),
            prompt_width=PROMPT_WIDTH,
        )
        completions, lengths = map(np.asarray, (batch.completion_ids, batch.lengths))
        rewards = [
            running_sums.reward(chosen[prompt], tokens[:length])
            for prompt, tokens, length in zip(batch.prompt_index.tolist(), completions, lengths)
        ]
        advantage = advantages(jnp.asarray(rewards), num_samples)
        metrics = dict(batch.metrics)
        gap = update(policy, optimiser, dataclasses.replace(batch, metrics={}), advantage)
        if adapter is not None:
            followed, stats = adapter.step(followed, policy.params, batch)
            run.adapted.append(stats)
        of_adapter = 0 if adapter is None else adapter.num_traces
        run.traces.append(decoder.num_traces + of_adapter)
        run.gaps.append(float(gap["largest_gap"]))
        run.rewards.append(float(np.mean(rewards)))
        run.prompts.append([problem.prompt_ids for problem in chosen])
        run.tokens.append(completions)
        run.lengths.append(lengths)
        run.metrics.append(metrics)
        report(
            f"step {step:3d}  reward {run.rewards[-1]:.3f}  "
            f"{metrics['tokens_per_second']:6.0f} tokens/s  "
            f"{metrics['mean_acceptance_length']:.2f} tokens per step"
        )
    run.params = policy.params
    return run


ADAPTED = "+adapt"
DRAFTERS = (
    *("none", "ngram", "history", "history+draft", "self-int8"),
    *("draft", "eagle3", f"draft{ADAPTED}", f"eagle3{ADAPTED}"),
)


def make_decoder(
    drafter: str, draft: Params | None = None, **options: Any
) -> specjax.RolloutDecoder:
    """Returns a decoder for the policy; those of all DRAFTERS sample the same.

    Args:
      draft: weights of the draft model or of the head, for drafters that have some.
      options: of build_decoder, instead of those of this example.
    """
    common: dict[str, Any] = {"engine": ENGINE, "num_speculative_tokens": 6} | options
    name = drafter.removesuffix(ADAPTED)
    if name == "none":
        del common["num_speculative_tokens"]
        return specjax.build_decoder(CONFIG, **common)
    if name == "eagle3":
        head = specjax.LoadedDrafter(name, EagleDrafter(HEAD_CONFIG), draft or ())
        return specjax.build_decoder(CONFIG, drafter=head, **common)
    if name not in ("draft", "history+draft"):
        return specjax.build_decoder(CONFIG, drafter=name, **common)
    if name == "history+draft":
        common["speculative_config"] = {"corpus_tokens": 32_768}
    return specjax.build_decoder(
        CONFIG, drafter=Model(DRAFT_CONFIG, draft or {}, name="draft"), **common
    )


def make_adapter(decoder: specjax.RolloutDecoder) -> specjax.DrafterAdapter:
    """Returns what lets a decoder's drafter follow the policy in this example."""
    return specjax.DrafterAdapter(
        decoder, optax.adam(3e-3), updates=4, rows=32, replay=256, max_tokens=80, depth=4
    )


def train_with(
    drafter: str,
    start: Params,
    draft_weights: dict[str, Params],
    fixed_k: int | None = None,
    **options: Any,
) -> Run:
    """Trains a policy with one of DRAFTERS.

    Args:
      draft_weights: by name, of "draft" and of "eagle3".
      fixed_k: draft tokens of every step; None: as the default policy chooses.
      options: of `train`.
    """
    own = draft_weights.get(drafter.removesuffix(ADAPTED).removeprefix("history+"))
    fixed = {} if fixed_k is None or drafter == "none" else {"policy": Fixed(fixed_k)}
    decoder = make_decoder(drafter, own, **fixed)
    adapter = make_adapter(decoder) if drafter.endswith(ADAPTED) else None
    return train(decoder, start, draft=own, adapter=adapter, **options)


def trained_head(policy: Params, num_steps: int = 60, seed: int = 0) -> Params:
    """Returns an EAGLE-3 head for a policy, trained along what it samples."""
    decoder = make_decoder("eagle3", new_head(policy, seed))
    adapter = make_adapter(decoder)
    state = adapter.init()
    problems = running_sums.draw(np.random.default_rng(seed), 8 * 8)
    for step in range(num_steps // 4):
        batch = specjax.rollout(
            decoder,
            adapter.weights(policy, state),
            [problems[(8 * step + i) % len(problems)].prompt_ids for i in range(8)],
            num_samples=8,
            sampling=specjax.SamplingParams(temperature=1.0, max_tokens=MAX_TOKENS, seed=step),
            prompt_width=PROMPT_WIDTH,
            alarm_rate=0,
        )
        state, _ = adapter.step(state, policy, batch)
    return adapter.draft_weights(state)


def new_head(policy: Params, seed: int) -> Params:
    """Returns an EAGLE-3 head for a policy, before any training."""
    target = Target(CONFIG, policy)
    return eagle3.begin(jax.random.key(seed), HEAD_CONFIG, target, None)


def difference(one: Run, other: Run) -> dict[str, int]:
    """Returns in how much two runs differ: tokens, rewards, and numbers of the final weights."""
    pairs = zip(jax.tree.leaves(one.params), jax.tree.leaves(other.params), strict=True)
    return {
        "tokens": sum(int(np.sum(a != b)) for a, b in zip(one.tokens, other.tokens)),
        "rewards": sum(a != b for a, b in zip(one.rewards, other.rewards)),
        "weights": sum(int(jnp.sum(a != b)) for a, b in pairs),
    }


def main(argv: list[str] | None = None) -> None:
    """Trains with every drafter that is asked for, and holds the runs against the first."""
    parser = argparse.ArgumentParser(prog="python examples/grpo.py")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument(
        "--drafters", nargs="+", default=["none", "history+draft"], choices=DRAFTERS
    )
    parser.add_argument(
        "--fixed-k",
        type=int,
        metavar="K",
        help="draft K tokens in every step, to see what is accepted; by default specjax drafts "
        "where that is faster, and so small a policy is mostly faster alone",
    )
    parser.add_argument("--plot", metavar="PNG", help="where the curves are drawn")
    options = parser.parse_args(argv)
    begun_at = time.perf_counter()
    print("learning from demonstrations ...", flush=True)
    start = pretrained(CONFIG, 0)
    draft_weights = {"draft": pretrained(DRAFT_CONFIG, 1)}
    if any(drafter.startswith("eagle3") for drafter in options.drafters):
        draft_weights["eagle3"] = trained_head(start)
    print(f"demonstrations learnt in {time.perf_counter() - begun_at:.0f} s")
    runs = {}
    for drafter in options.drafters:
        begun_at = time.perf_counter()
        runs[drafter] = train_with(
            drafter, start, draft_weights, options.fixed_k, num_steps=options.steps, report=print
        )
        took = f"{time.perf_counter() - begun_at:.0f} s"
        traces = sorted(set(runs[drafter].traces))
        print(f"{drafter}: {took}, traces {traces}{_adapted(runs[drafter])}")
    first = options.drafters[0]
    for drafter in options.drafters[1:]:
        apart = difference(runs[first], runs[drafter])
        print(f"{drafter} beside {first}: {apart} differ")
    if options.plot:
        draw(runs, options.plot)


def _adapted(run: Run) -> str:
    """Returns how long the steps of an adapter took, as text; "" without one."""
    seconds = [stats.seconds for stats in run.adapted[1:]]
    return f", {np.median(seconds):.2f} s per step of the adapter" if seconds else ""


def draw(runs: dict[str, Run], path: str) -> None:
    """Draws the mean reward of every step, whose curves lie on each other, and the tokens that
    a step of the policy gave, as PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (axes, drafts) = pyplot.subplots(1, 2, figsize=(11, 3.5), layout="constrained")
    for place, (name, run) in enumerate(runs.items()):
        axes.plot(run.rewards, label=name, linewidth=max(6 - 1.5 * place, 1))
        drafts.plot([m["mean_acceptance_length"] for m in run.metrics], label=name)
    axes.set(xlabel="step", ylabel="mean reward", ylim=(0, 1))
    drafts.set(xlabel="step", ylabel="mean acceptance length", ylim=(1, None))
    axes.legend(title="drafts")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


if __name__ == "__main__":
    main()
