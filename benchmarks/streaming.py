"""Tokens per second of `rollout_stream` beside `rollout`, on completions of very unequal lengths.

    python -m benchmarks.streaming --rows 8 --json streaming.json

The embedded model goes on with Python files up to the next blank line: half of its completions
end within a line or two, a few run on to the limit. `rollout` gets the prompts in batches of a
training step's size, and each batch waits for its longest completion; `rollout_stream` gets the
same prompts as one feed. Both take turns, round by round; compiling is left out by one round
before. The samples of both are the same.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import specjax
from specjax.cli.bench import embedded, measuring
from specjax.cli.bench.widen import widen

PROMPT_TOKENS = 32
MAX_TOKENS = 256
STOP = "\n\n"


class Feed:
    """One model, one decoder, and the prompts that every contender gets."""

    def __init__(self, options: argparse.Namespace):
        model = specjax.load_model("demo")
        assert model.tokenizer is not None
        texts = embedded.held_out_texts(options.prompts)
        rng = np.random.default_rng(0)
        self.prompts = []
        for index in range(options.prompts):
            ids = model.tokenizer.encode(texts[index % len(texts)][:20_000])
            first = int(rng.integers(0, max(len(ids) - PROMPT_TOKENS, 1)))
            self.prompts.append(ids[first : first + PROMPT_TOKENS])
        if options.parameters:
            model = widen(model, options.parameters)
        self._params, self._samples = model.params, options.samples
        context = PROMPT_TOKENS + MAX_TOKENS
        self._decoder = specjax.build_decoder(
            model,
            drafter=options.drafter,
            engine=specjax.EngineConfig(max_rows=options.rows, max_context=context),
        )
        self._sampling = specjax.SamplingParams(
            temperature=1.0, max_tokens=MAX_TOKENS, stop=STOP, seed=0
        )

    def forget(self) -> None:
        """Drops pages and text of earlier rounds."""
        self._decoder.forget()

    def rollout(self, batch: int) -> list[specjax.Rollout]:
        """Runs the prompts in batches of so many samples."""
        count = batch // self._samples
        starts = range(0, len(self.prompts), count)
        return [
            specjax.rollout(
                self._decoder,
                self._params,
                self.prompts[start : start + count],
                num_samples=self._samples,
                sampling=self._sampling,
            )
            for start in starts
        ]

    def stream(self, batch: int) -> list[specjax.Rollout]:
        """Runs the prompts as one feed; its Rollouts have as many samples."""
        with specjax.rollout_stream(
            self._decoder,
            self._params,
            self.prompts,
            num_samples=self._samples,
            batch_groups=batch // self._samples,
            sampling=self._sampling,
        ) as batches:
            return list(batches)


def lengths_of(batches: list[specjax.Rollout]) -> list[int]:
    """Returns the lengths of all completions; waits for them."""
    return [length for batch in batches for length in np.asarray(batch.lengths).tolist()]


def timed(
    feed: Feed, run: Callable[[int], list[specjax.Rollout]], batch: int
) -> tuple[float, list[int]]:
    """Returns tokens per second, and the lengths."""
    feed.forget()
    begun_at = time.perf_counter()
    lengths = lengths_of(run(batch))
    return sum(lengths) / (time.perf_counter() - begun_at), lengths


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Returns the figures of all batch sizes."""
    feed = Feed(options)
    contenders = {"rollout": feed.rollout, "rollout_stream": feed.stream}
    if options.only:
        contenders = {options.only: contenders[options.only]}
    figures: dict[str, Any] = dict(measuring.environment())
    for batch in options.batches:
        speeds: dict[str, list[float]] = {name: [] for name in contenders}
        lengths: list[int] = []
        for number in range(options.rounds + 1):
            for name, run in contenders.items():
                speed, lengths = timed(feed, run, batch)
                if number:
                    speeds[name].append(speed)
        medians = {name: statistics.median(each) for name, each in speeds.items()}
        figures[f"{batch} samples"] = medians | {"rounds": speeds}
        figures["lengths"] = {str(q): float(np.quantile(lengths, q)) for q in (0.1, 0.5, 0.9, 1)}
        figures["mean length"] = float(np.mean(lengths))
        if len(contenders) == 2:
            ratios = [b / a for a, b in zip(speeds["rollout"], speeds["rollout_stream"])]
            figures[f"{batch} samples"] |= {"ratio": statistics.median(ratios)}
    return figures


def main(argv: list[str] | None = None) -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--batches", type=int, nargs="+", default=[8, 16, 32], metavar="SAMPLES")
    parser.add_argument("--samples", type=int, default=2, help="of each prompt")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--drafter", default=None)
    parser.add_argument("--parameters", type=float, default=None, help="widen the model")
    parser.add_argument("--only", choices=["rollout", "rollout_stream"])
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args(argv)
    figures = measure(options)
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(figures, file, indent=1)
    for name, value in figures.items():
        print(f"{name:14s} {value}")


if __name__ == "__main__":
    main()
