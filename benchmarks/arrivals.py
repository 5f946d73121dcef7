"""Wall time of requests that arrive one by one: with and without drafts beside their prompts.

    python -m benchmarks.arrivals --out arrivals.json

Prompts arrive as a Poisson process, somewhat faster than they can be served, so that some
prompt is fed in most steps. Contenders take turns on one engine each; a round gives all of them
the same requests at the same times. What is told are medians of the ratios within a round, with
the sign test's 95 % interval. The embedded pair is widened with zeros to the size of a model
whose steps are limited by memory.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import specjax
from specjax.cli.bench import embedded, measuring
from specjax.cli.bench.widen import widen
from specjax.config.engine import EngineConfig
from specjax.config.sampling import SamplingParams
from specjax.policy.goodput import Goodput
from specjax.policy.interface import Decision, Fixed, Load, SpeculationPolicy

# Arrivals per second, as a multiple of what the contender without such drafts serves.
OVERLOAD = 1.25
DRAFTS, PLAIN = "drafts beside prompts", "plain beside prompts"


class PlainBesidePrompts:
    """A policy like another, except that no row drafts in a step with prompts."""

    def __init__(self, policy: SpeculationPolicy):
        self._policy = policy
        self.max_speculative_tokens = policy.max_speculative_tokens
        self.chooses_rows = policy.chooses_rows
        self.observe = policy.observe

    def choose(self, load: Load) -> Decision:
        """Returns the other policy's decision, or K = 0 for all rows beside prompts."""
        if not load.prompt_tokens:
            return self._policy.choose(load)
        rows = load.row_buckets[-1]
        return Decision(num_speculative_tokens=0, reason="prompts", row_bucket=rows)


class Stream:
    """The same requests for every contender, each of which has an engine.

    Args:
      parameters: size that the embedded target is widened to.
      k: the K of both contenders; None: the goodput policy chooses.
    """

    def __init__(
        self,
        *,
        parameters: float,
        rows: int,
        requests: int,
        prompt_tokens: tuple[int, int],
        new_tokens: int,
        k: int | None,
        most: int = 4,
    ):
        target = widen(specjax.load_model("demo"), parameters)
        drafter = specjax.load_drafter("demo", target)
        encode = specjax.load_model("demo").tokenizer.encode
        rng = np.random.default_rng(0)
        texts = embedded.held_out_texts(requests)
        token_ids = [encode(text[:20_000]) for text in texts]
        self._prompts = []
        for index in range(requests):
            text = token_ids[index % len(texts)]
            count = int(rng.integers(prompt_tokens[0], prompt_tokens[1] + 1))
            first = int(rng.integers(0, max(len(text) - count, 1)))
            self._prompts.append(text[first : first + count])
        # Exponential gaps of mean 1, in units of the mean time between arrivals.
        self._gaps = rng.exponential(size=requests)
        self._sampling = SamplingParams(
            temperature=0.8, max_tokens=new_tokens, ignore_eos=True, seed=0
        )
        own = lambda: Goodput(most, knows_confidence=True) if k is None else Fixed(k)
        policies = {DRAFTS: own(), PLAIN: PlainBesidePrompts(own())}
        self._engines = {
            name: specjax.Engine(
                target,
                drafter=drafter,
                num_speculative_tokens=most if k is None else k,
                policy=policy,
                engine=EngineConfig(max_rows=rows, max_context=512, prefix_caching=False),
            )
            for name, policy in policies.items()
        }
        self.texts: dict[str, list[list[int]]] = {}  # by contender, of the last round
        self.records: dict[str, list[Any]] = {}

    def run(self, contender: str, gap_s: float) -> float:
        """Returns the seconds until every request has ended, compiling left out.

        Args:
          gap_s: mean seconds between arrivals.
        """
        engine = self._engines[contender]
        arrivals = np.cumsum(self._gaps) * gap_s
        waiting = list(zip(arrivals.tolist(), self._prompts))
        texts: dict[int, list[int]] = {}
        loop = engine._loop
        assert loop is not None
        num_records, compiled_before = len(loop.records), loop.compile_s
        start = time.perf_counter()
        now = lambda: time.perf_counter() - start - (loop.compile_s - compiled_before)
        while waiting or engine.has_work:
            while waiting and waiting[0][0] <= now():
                texts[engine.add(waiting.pop(0)[1], self._sampling)] = []
            if not engine.has_work:
                time.sleep(max(waiting[0][0] - now(), 0.0))
                continue
            for chunk in engine.step():
                texts[chunk.prompt_index] += chunk.token_ids
        self.texts[contender] = list(texts.values())
        self.records[contender] = list(loop.records)[num_records:]
        return now()

    def figures(self, rounds: int, burn_in: int) -> dict[str, Any]:
        """Returns the ratio of tokens per second, and what ran beside prompts."""
        for _ in range(burn_in):  # compiles, and the policy learns
            for name in self._engines:
                busy_s = self.run(name, 0.0)
        gap_s = busy_s / len(self._prompts) / OVERLOAD
        seconds: dict[str, list[float]] = {name: [] for name in self._engines}
        for number in range(rounds):
            names = [DRAFTS, PLAIN]
            for name in names if number % 2 else names[::-1]:
                seconds[name].append(self.run(name, gap_s))
        same = [a == b for a, b in zip(*self.texts.values(), strict=True)]
        return {
            "rounds": rounds,
            "arrivals_per_s": 1 / gap_s,
            "median_s": {name: measuring.median(each) for name, each in seconds.items()},
            "tokens_per_second_of_plain_beside": measuring.ratio_interval(
                seconds[PLAIN], seconds[DRAFTS]
            ),
            "equal_texts": sum(same) / len(same),
            "steps": {name: _steps(records) for name, records in self.records.items()},
        }


def _steps(records: Sequence[Any]) -> dict[str, Any]:
    """Returns the number of steps, those with prompts, and tokens of the latter by K."""
    mixed = [record for record in records if record.prompt_tokens]
    by_k: dict[int, int] = {}
    for record in mixed:
        k = record.num_speculative_tokens
        by_k[k] = by_k.get(k, 0) + 1
    return {
        "all": sum(record.num_steps for record in records),
        "with_prompts": len(mixed),
        "with_prompts_by_k": by_k,
        "tokens_beside_prompts": sum(record.measured_tokens for record in mixed),
        "seconds_with_prompts": sum(record.measured_step_s for record in mixed),
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.arrivals")
    parser.add_argument("--out", type=Path, help="a JSON file; printed without")
    parser.add_argument("--parameters", type=float, default=60e6)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--prompt-tokens", type=int, nargs=2, default=(16, 64))
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--k", type=int, help="of both; by default the goodput policy chooses")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--burn-in", type=int, default=4, help="rounds before those that count")
    options = parser.parse_args(argv)
    stream = Stream(
        parameters=options.parameters,
        rows=options.rows,
        requests=options.requests,
        prompt_tokens=tuple(options.prompt_tokens),
        new_tokens=options.new_tokens,
        k=options.k,
    )
    document = {
        "environment": measuring.environment(),
        "workload": {name: value for name, value in vars(options).items() if name != "out"},
        "arrivals": stream.figures(options.rounds, options.burn_in),
    }
    text = json.dumps(document, indent=1)
    print(text)
    if options.out is not None:
        options.out.write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
