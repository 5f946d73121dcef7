"""What drafts bring to rollouts of a policy that decoding waits for memory of.

    python -m specjax.examples.replay --json replay.json

A small policy is trained by GRPO; at some of its checkpoints its rollouts are run again on the
same function widened to a few hundred million parameters (`specjax.bench.widen`), plain and
with drafts, in turns. Decoders know what the training run had sampled by then, as one that runs
in it would. The tail is what ran with at most TAIL_ROWS rows.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

import specjax
from specjax.bench import measuring
from specjax.bench.widen import widen
from specjax.examples import grpo
from specjax.models.base import Model, Params

TAIL_ROWS = 2
DRAFT_SHARE = 0.05  # of the policy's parameters, those of the draft model
# K by rows: on two shared CPU cores a step of 56 tokens took some four times as long as one of
# 8. Goodput would compile a smaller bucket once it has lost as much time without it as that
# takes; a few rollouts of seconds each are over before.
TABLE = ((1, 2, 6), (3, 4, 4), (5, 8, 2))
# Bursts are short: rows that are done leave their bucket between them.
ENGINE = specjax.EngineConfig(
    max_rows=8, row_buckets=(2, 4), max_context=96, burst_steps=2, max_logprobs=1
)


@dataclasses.dataclass
class Replay:
    """One rollout of one checkpoint."""

    step: int  # of training
    drafter: str
    num_tokens: int
    seconds: float
    tail_tokens: int
    tail_s: float
    mean_acceptance_length: float
    num_bursts_by_k: dict[int, int]


class Replayer:
    """A decoder of the widened policy, and what the training run had told it by each checkpoint."""

    def __init__(
        self, drafter: str, run: grpo.Run, draft: Params, num_parameters: float
    ):
        policy = Model(grpo.CONFIG, run.params, name="policy")
        small = widen(
            Model(grpo.DRAFT_CONFIG, draft, name="draft"), DRAFT_SHARE * num_parameters
        )
        self.drafter = drafter
        self._run = run
        self._num_parameters = num_parameters
        self._draft = small.params
        options: dict[str, Any] = {"engine": ENGINE}
        by_rows: dict[str, Any] = {"num_speculative_tokens_per_batch_size": TABLE}
        if drafter == "history+draft":
            by_rows |= {"corpus_tokens": 32_768}
            options |= {"drafter": small, "speculative_config": by_rows}
        elif drafter != "none":
            options |= {"drafter": drafter, "speculative_config": by_rows}
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
        before = len(decoder.decisions)
        batch = specjax.rollout(
            decoder,
            specjax.DecoderParams(params, self._draft)
            if self.drafter == "history+draft"
            else params,
            run.prompts[step][:num_prompts],
            num_samples=num_samples,
            sampling=specjax.SamplingParams(
                temperature=1.0, max_tokens=grpo.MAX_TOKENS, seed=step
            ),
        )
        bursts = decoder.decisions[before:]
        tail = [burst for burst in bursts if burst.num_rows <= TAIL_ROWS]
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
            tail_tokens=round(sum(b.measured_tokens * b.num_steps for b in tail)),
            tail_s=sum(b.measured_step_s * b.num_steps for b in tail),
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
    report: Callable[[str], None] = lambda line: None,
) -> list[Replay]:
    """Returns rollouts of every checkpoint of a run, each `rounds` times, drafters in turns.

    The first checkpoint is run once more before, which compiles, and teaches what steps cost.
    """
    players = [Replayer(name, run, draft, num_parameters) for name in drafters]
    steps = sorted(run.checkpoints)
    for player in players:
        for _ in range(2):
            warm = player.play(steps[0], num_prompts, num_samples)
            report(f"{player.drafter}: warmed up in {warm.seconds:.1f} s")
    replays = []
    for _ in range(rounds):
        for step in steps:
            for player in players:
                one = player.play(step, num_prompts, num_samples)
                replays.append(one)
                report(
                    f"step {step:3d}  {one.drafter:14s} {one.num_tokens / one.seconds:6.1f} tokens/s, "
                    f"tail {one.tail_tokens / max(one.tail_s, 1e-9):6.1f}, "
                    f"{one.mean_acceptance_length:.2f} tokens per step, K {one.num_bursts_by_k}"
                )
    return replays


def speedups(replays: Sequence[Replay]) -> dict[str, dict[str, dict[int, float]]]:
    """Returns times plain decoding's tokens per second, medians of rounds: by drafter, whole and tail, step."""
    rates: dict[tuple[str, str, int], list[float]] = {}
    for one in replays:
        for part, tokens, seconds in (
            ("whole", one.num_tokens, one.seconds),
            ("tail", one.tail_tokens, one.tail_s),
        ):
            if seconds:
                place = one.drafter, part, one.step
                rates.setdefault(place, []).append(tokens / seconds)
    found: dict[str, dict[str, dict[int, float]]] = {}
    for (drafter, part, step), values in rates.items():
        plain = rates.get(("none", part, step))
        if drafter == "none" or plain is None:
            continue
        ratio = statistics.median(values) / statistics.median(plain)
        found.setdefault(drafter, {}).setdefault(part, {})[step] = ratio
    return found


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m specjax.examples.replay")
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
    for drafter, parts in ratios.items():
        for part, by_step in parts.items():
            middle = float(np.median(list(by_step.values())))
            shown = ", ".join(f"{step}: {ratio:.2f}" for step, ratio in by_step.items())
            print(f"{drafter}, {part}: {middle:.2f} times plain ({shown})")
    if options.json:
        document = {
            "environment": measuring.environment(),
            "num_parameters": options.parameters,
            "speedups": ratios,
            "replays": [dataclasses.asdict(one) for one in found],
        }
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(document, file, indent=1)


if __name__ == "__main__":
    main()
