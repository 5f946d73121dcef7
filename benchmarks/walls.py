"""Wall time of whole generations: the policy, every fixed K, and no drafter, in turn.

    python -m benchmarks.walls --out docs/benchmarks/scheduling_walls.json --ramp

With --ramp also a batch of 32 rows that drains, with lengths like those of a rollout; all
contenders have the same row buckets then, so that only K tells them apart.

Every round runs all contenders once; what is told are medians of the ratios within a
round, with the sign test's 95 % interval.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import specjax
from specjax.cli.bench import embedded, measuring
from specjax.cli.bench.calibrate import model
from specjax.config.engine import EngineConfig
from specjax.config.sampling import SamplingParams
from specjax.config.speculation import SpeculationConfig
from specjax.decode.bucket import standing_row_buckets
from specjax.policy.goodput import Goodput
from specjax.policy.interface import Fixed

DEPTHS = (0, 1, 2, 4, 7)
MOST = DEPTHS[-1]
BATCHES = (1, 4, 16)
MOST_ROWS = 32  # and those of a batch that drains
PROMPT_TOKENS = 48
BURN_IN_RUNS = 20  # of the policy, which learns from a few bursts in each
NONE, GOODPUT = "no drafter", "goodput"


def heavy_tailed(rows: int, seed: int = 0) -> np.ndarray:
    """Returns output lengths like those of a rollout: most short, a few very long."""
    rng = np.random.default_rng(seed)
    lengths = 24 * (1 + rng.pareto(1.1, rows))
    return lengths.astype(int).clip(max=400)


class Contest:
    """One pair, one batch: the same requests for every contender.

    Args:
      acceptance: synthetic acceptance rate; None: the pair's own.
      drains: most requests are short, a few very long.
    """

    def __init__(
        self,
        pair: str,
        batch: int,
        *,
        acceptance: float | None = None,
        new_tokens: int = 96,
        drains: bool = False,
    ):
        self.name = {"pair": pair, "batch": batch, "acceptance": acceptance}
        self.name |= {"drains": drains}
        if pair == "embedded":
            self._target = specjax.load_model("demo")
            self._drafter: Any = specjax.load_drafter("demo", self._target)
            encode = self._target.tokenizer.encode
            texts = embedded.held_out_texts(batch)
            texts = (texts * batch)[:batch]  # there are not that many
            self._prompts = [encode(text)[:PROMPT_TOKENS] for text in texts]
        else:
            self._target, drafter = model("bench_60m"), model("bench_60m_draft")
            self._drafter = specjax.load_drafter(drafter, self._target)
            rng = np.random.default_rng(0)
            self._prompts = rng.integers(0, 32000, (batch, PROMPT_TOKENS)).tolist()
        lengths = heavy_tailed(batch) if drains else np.full(batch, new_tokens)
        self._sampling = [
            SamplingParams(temperature=0.8, max_tokens=int(length), ignore_eos=True, seed=0)
            for length in lengths
        ]
        # Explicit row buckets: by default only a policy that chooses rows has smaller ones.
        row_buckets = tuple(standing_row_buckets(MOST_ROWS)) if drains else None
        self._engine = EngineConfig(max_rows=MOST_ROWS, row_buckets=row_buckets)
        self._options: dict[str, Any] = {}
        if acceptance is not None:
            self._options = {
                "verification": "synthetic",
                "synthetic_acceptance_rates": [acceptance],
            }
        self._bursts_by_k: dict[Any, dict[int, int]] = {}  # of the last run
        self._goodput = Goodput(MOST, ranks=acceptance is None, knows_confidence=True)

    def run(self, contender: str | int) -> float:
        """Returns the seconds of one generation, compiling left out."""
        # All that draft share their executables, and K = 0 has the drafter loaded.
        config = SpeculationConfig(num_speculative_tokens=MOST, **self._options)
        policy = self._goodput
        if contender != GOODPUT:
            policy = Fixed(contender if isinstance(contender, int) else 0)
        out = specjax.generate(
            self._target,
            self._prompts,
            drafter=None if contender == NONE else self._drafter,
            speculative_config=None if contender == NONE else config,
            sampling=self._sampling,
            policy=policy,
            engine=self._engine,
        )
        asked = sum(sampling.max_tokens for sampling in self._sampling)
        assert out.stats.num_output_tokens == asked
        self._bursts_by_k[contender] = out.stats.num_bursts_by_k
        return out.stats.run_s

    def figures(self, rounds: int) -> dict[str, Any]:
        """Returns the ratios of goodput to the best fixed K and to no drafter."""
        contenders = [NONE, *DEPTHS, GOODPUT]
        for contender in contenders:
            self.run(contender)  # compiles
        for _ in range(BURN_IN_RUNS):
            self.run(GOODPUT)
        seconds: dict[Any, list[float]] = {contender: [] for contender in contenders}
        for _ in range(rounds):
            for contender in contenders:
                seconds[contender].append(self.run(contender))
        medians = {str(c): measuring.median(s) for c, s in seconds.items()}
        best = min((*DEPTHS, NONE), key=lambda c: measuring.median(seconds[c]))
        best_drafting = min(DEPTHS[1:], key=lambda c: measuring.median(seconds[c]))
        interval = measuring.ratio_interval
        return self.name | {
            "rounds": rounds,
            "median_s": medians,
            "best": str(best),
            "goodput_bursts_by_k": self._bursts_by_k[GOODPUT],
            "goodput_of_best": interval(seconds[best], seconds[GOODPUT]),
            "goodput_of_best_above_0": interval(seconds[best_drafting], seconds[GOODPUT]),
            "goodput_of_no_drafter": interval(seconds[NONE], seconds[GOODPUT]),
            "k_0_over_no_drafter": interval(seconds[0], seconds[NONE]),
        }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.walls")
    parser.add_argument("--out", type=Path, required=True, help="a JSON file")
    parser.add_argument("--pair", choices=("embedded", "60M"), default="embedded")
    parser.add_argument("--batches", type=int, nargs="*", default=list(BATCHES))
    parser.add_argument("--acceptance", type=float, nargs="+", help="made up, of the 60M pair")
    parser.add_argument("--ramp", action="store_true", help="also a batch that drains")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--new-tokens", type=int, default=96)
    options = parser.parse_args(argv)
    rows = []
    for batch in options.batches:
        for rate in options.acceptance or [None]:
            contest = Contest(options.pair, batch, acceptance=rate, new_tokens=options.new_tokens)
            rows.append(contest.figures(options.rounds))
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    if options.ramp:
        contest = Contest(options.pair, MOST_ROWS, drains=True)
        rows.append(contest.figures(options.rounds))
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    document = {"environment": measuring.environment(), "walls": rows}
    options.out.write_text(json.dumps(document, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
