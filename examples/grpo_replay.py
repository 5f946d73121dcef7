"""What drafts bring to rollouts of a policy that decoding waits for memory of.

    python examples/grpo_replay.py --json replay.json

A small policy is trained by GRPO; at some of its checkpoints its rollouts are run again on the
same function widened to a few hundred million parameters (`specjax.cli.bench.widen`), plain and
with drafts, in turns. Decoders know what the training run had sampled by then, as one that runs
in it would. A tail is what ran with at most 4 rows, or 2.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable, Sequence
from typing import Any

import grpo
import jax
import numpy as np

import specjax
from specjax.cli.bench import measuring
from specjax.cli.bench.widen import widen
from specjax.models.base import Model, Params

PARTS = {"whole": None, "tail of 4 rows": 4, "tail of 2 rows": 2}  # most rows of each
DRAFT_SHARE = 0.05  # of the policy's parameters, those of the draft model
# K by rows, so that a step has 16 tokens, or 32: the next product width of a CPU (models/layers.py)
# costs what these do. Goodput would have to run each first, and a few rollouts are over before.
Table = tuple[tuple[int, int, int], ...]
TABLE: Table = ((1, 2, 7), (3, 4, 3), (5, 8, 3))
# Bursts are short: rows that are done leave their bucket between them. Prompts are short: larger
# token buckets would only be compiled.
ENGINE = specjax.EngineConfig(
    max_rows=8,
    row_buckets=(2, 4),
    max_context=96,
    max_prefill_tokens=128,
    burst_steps=2,
    max_logprobs=1,
)


@dataclasses.dataclass
class Replay:
    """One rollout of one checkpoint."""

    step: int  # of training
    drafter: str
    num_tokens: int
    seconds: float
    bursts: list[tuple[int, float, float]]  # rows, tokens and seconds of each
    mean_acceptance_length: float
    num_bursts_by_k: dict[int, int]

    def part(self, most_rows: int | None) -> tuple[float, float]:
        """Returns tokens and seconds of what ran with so many rows; None is all, prompts
        included."""
        if most_rows is None:
            return self.num_tokens, self.seconds
        own = [burst[1:] for burst in self.bursts if burst[0] <= most_rows]
        return sum(tokens for tokens, _ in own), sum(seconds for _, seconds in own)


class Replayer:
    """A decoder of the widened policy, and what the training run had told it by each checkpoint."""

    def __init__(
        self,
        drafter: str,
        run: grpo.Run,
        draft: Params,
        num_parameters: float,
        table: Table | None,
    ):
        policy = Model(grpo.CONFIG, run.params, name="policy")
        small = widen(Model(grpo.DRAFT_CONFIG, draft, name="draft"), DRAFT_SHARE * num_parameters)
        self.drafter = drafter
        self._run = run
        self._num_parameters = num_parameters
        self._draft = small.params
        options: dict[str, Any] = {"engine": ENGINE}
        speculation: dict[str, Any] = {}
        if table is not None:
            speculation["num_speculative_tokens_per_batch_size"] = table
        if drafter == "history+draft":
            speculation["corpus_tokens"] = 32_768
            options |= {"drafter": small, "speculative_config": speculation}
        elif drafter != "none":
            options |= {"drafter": drafter, "speculative_config": speculation}
        wide = widen(policy, num_parameters)
        self._decoder = specjax.build_decoder(wide.config, **options)

    def play(self, step: int, num_prompts: int, num_samples: int) -> Replay:
        """Runs the rollout of a checkpoint again, with its prompts and its seed."""
        run, decoder = self._run, self._decoder
        # Of this step it must not know anything, an earlier play of it included.
        decoder.forget()
        for earlier in range(step):
            prompts = run.prompts[earlier]
            each = len(run.tokens[earlier]) // len(prompts)
            answers = zip(run.tokens[earlier], run.lengths[earlier])
            decoder.remember(
                [prompt for prompt in prompts for _ in range(each)],
                [tokens[:length] for tokens, length in answers],
            )
        policy = Model(grpo.CONFIG, run.checkpoints[step], name="policy")
        params = widen(policy, self._num_parameters).params
        jax.block_until_ready(params)
        before = decoder.decisions  # of which the oldest may be forgotten meanwhile
        batch = specjax.rollout(
            decoder,
            specjax.DecoderParams(params, self._draft)
            if self.drafter == "history+draft"
            else params,
            run.prompts[step][:num_prompts],
            num_samples=num_samples,
            sampling=specjax.SamplingParams(temperature=1.0, max_tokens=grpo.MAX_TOKENS, seed=step),
        )
        known = {id(burst) for burst in before}
        bursts = [burst for burst in decoder.decisions if id(burst) not in known]
        counts: dict[int, int] = {}
        for burst in bursts:
            depth = burst.num_speculative_tokens
            counts[depth] = counts.get(depth, 0) + 1
        metrics = batch.metrics
        return Replay(
            step=step,
            drafter=self.drafter,
            num_tokens=metrics["num_tokens"],
            seconds=metrics["rollout_s"] - metrics["compile_s"],
            bursts=[
                (b.num_rows, n * b.measured_tokens, n * b.measured_step_s)
                for b, n in ((b, b.num_steps) for b in bursts)
            ],
            mean_acceptance_length=metrics["mean_acceptance_length"],
            num_bursts_by_k=dict(sorted(counts.items())),
        )


def replay(
    run: grpo.Run,
    draft: Params,
    *,
    drafters: Sequence[str] = ("none", "history", "history+draft"),
    num_parameters: float = 3e8,
    num_prompts: int = 4,
    num_samples: int = 2,
    rounds: int = 3,
    warm_ups: int = 1,
    table: Table | None = TABLE,
    report: Callable[[str], None] = lambda line: None,
) -> list[Replay]:
    """Returns rollouts of every checkpoint of a run, each `rounds` times, drafters in turns.

    Args:
      warm_ups: how often every checkpoint is played before, so that all is compiled.
      table: K by rows; None: the default policy chooses it, once it has measured in warm_ups.
    """
    players = [Replayer(name, run, draft, num_parameters, table) for name in drafters]
    steps = sorted(run.checkpoints)
    for player in players:
        warm = [
            player.play(step, num_prompts, num_samples) for _ in range(warm_ups) for step in steps
        ]
        report(f"{player.drafter}: warmed up in {sum(w.seconds for w in warm):.1f} s")
    replays = []
    for _ in range(rounds):
        for step in steps:
            for player in players:
                one = player.play(step, num_prompts, num_samples)
                replays.append(one)
                report(
                    f"step {step:3d}  {one.drafter:14s} {one.num_tokens / one.seconds:6.1f} "
                    f"tokens/s, "
                    f"{one.mean_acceptance_length:.2f} tokens per step, K {one.num_bursts_by_k}"
                )
    return replays


def rates(replays: Sequence[Replay]) -> dict[str, dict[str, float]]:
    """Returns tokens per second by drafter and part, of all checkpoints together.

    Of each checkpoint the round of the median seconds counts. A part is of the checkpoints at
    which every drafter had it, and left out where there are none.
    """
    rounds: dict[str, dict[int, list[Replay]]] = {}
    for one in replays:
        rounds.setdefault(one.drafter, {}).setdefault(one.step, []).append(one)
    median = lambda own: sorted(own, key=lambda one: one.seconds)[len(own) // 2]
    middle = {
        drafter: {step: median(own) for step, own in by_step.items()}
        for drafter, by_step in rounds.items()
    }
    found: dict[str, dict[str, float]] = {drafter: {} for drafter in middle}
    for name, most_rows in PARTS.items():
        parts = {
            drafter: {step: one.part(most_rows) for step, one in by_step.items()}
            for drafter, by_step in middle.items()
        }
        common = [
            step
            for step in {one.step for one in replays}
            if all(own.get(step, (0, 0))[1] for own in parts.values())
        ]
        for drafter, own in parts.items() if common else ():
            tokens, seconds = np.sum([own[step] for step in common], axis=0)
            found[drafter][name] = float(tokens / seconds)
    return found


def speedups(replays: Sequence[Replay]) -> dict[str, dict[str, float]]:
    """Returns how many times plain decoding's tokens per second, by drafter and part."""
    by_drafter = rates(replays)
    plain = by_drafter.pop("none")
    return {
        drafter: {part: own[part] / plain[part] for part in own if part in plain}
        for drafter, own in by_drafter.items()
    }


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python examples/grpo_replay.py")
    parser.add_argument("--parameters", type=float, default=3e8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", metavar="FILE", help="where the figures are written")
    options = parser.parse_args(argv)
    start = grpo.pretrained(grpo.CONFIG, 0)
    draft = grpo.pretrained(grpo.DRAFT_CONFIG, 1)
    run = grpo.train(grpo.make_decoder("none"), start)
    found = replay(
        run,
        draft,
        num_parameters=options.parameters,
        rounds=options.rounds,
        report=print,
    )
    ratios = speedups(found)
    steps = sorted(run.checkpoints)
    at = {step: speedups([one for one in found if one.step == step]) for step in steps}
    for drafter, parts in ratios.items():
        for part, ratio in parts.items():
            own = ((step, at[step].get(drafter, {}).get(part)) for step in steps)
            shown = ", ".join(f"{step}: {x:.2f}" for step, x in own if x is not None)
            print(f"{drafter}, {part}: {ratio:.2f} times plain ({shown})")
    if options.json:
        document = {
            "environment": measuring.environment(),
            "num_parameters": options.parameters,
            "speedups": ratios,
            "speedups_by_step": at,
            "replays": [dataclasses.asdict(one) for one in found],
        }
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(document, file, indent=1)


if __name__ == "__main__":
    main()
