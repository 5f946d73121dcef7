"""Calls by the wall clock, from the first one on: goodput, every fixed K, and no drafter, in turn.

    python -m benchmarks.calls --pair embedded --drafter demo --batch 1 --temperature 0.8

Every round calls `specjax.generate` once for each contender, and the whole call counts:
setting up, compiling, prompts, tokens. The first round is told apart, since it compiles.
With --processes every call is a process of its own, whose whole life counts; all contenders
keep their compiled steps and what they learned in folders of their own, which are new.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

from specjax.cli.bench import measuring

NONE, GOODPUT = "no drafter", "goodput"
AGAIN = "no drafter again"  # how far two contenders that do the same lie apart is noise
CONTENDERS = (NONE, AGAIN, GOODPUT, "1", "2", "3", "4")
PROMPT_TOKENS = 48
SETTLED = 10  # rounds after which the policy is to have found the best


class Caller:
    """One pair, one batch: the same requests for every contender."""

    def __init__(self, options: argparse.Namespace):
        # Here, and not above: a process that only starts others needs none of it.
        import numpy as np

        import specjax
        from specjax.cli.bench import embedded
        from specjax.cli.bench.calibrate import model

        self._generate = specjax.generate
        self._speculation = specjax.SpeculationConfig
        if options.pair == "embedded":
            self._target = specjax.load_model("demo")
            encode = self._target.tokenizer.encode
            texts = embedded.held_out_texts(options.batch) * options.batch
            prompts = [encode(text)[:PROMPT_TOKENS] for text in texts]
            self._prompts = prompts[: options.batch]
            draft: Any = "demo"
        else:
            self._target, draft = model("bench_60m"), model("bench_60m_draft")
            shape = options.batch, PROMPT_TOKENS
            vocab = self._target.config.vocab_size
            self._prompts = np.random.default_rng(0).integers(0, vocab, shape).tolist()
        name = options.drafter
        self._drafter = specjax.load_drafter(draft if name == "model" else name, self._target)
        self._sampling = specjax.SamplingParams(
            temperature=options.temperature,
            max_tokens=options.new_tokens,
            ignore_eos=True,
            seed=0,
        )

    def call(self, contender: str) -> tuple[float, dict[int, int]]:
        """Returns the seconds of one call, and its bursts by K."""
        start = time.perf_counter()
        config = None
        is_plain = contender in (NONE, AGAIN)
        if not is_plain and contender != GOODPUT:
            config = self._speculation(num_speculative_tokens=int(contender), policy="fixed")
        out = self._generate(
            self._target,
            self._prompts,
            drafter=None if is_plain else self._drafter,
            speculative_config=config,
            sampling=self._sampling,
        )
        return time.perf_counter() - start, out.stats.num_bursts_by_k


def in_one_process(options: argparse.Namespace) -> list[dict[str, float]]:
    """Returns the seconds of each call, by round and contender."""
    caller = Caller(options)
    rounds = []
    for number in range(options.rounds):
        # Every second round is in reverse order: no contender always follows the same one.
        order = options.contenders[:: 1 if number % 2 else -1]
        found = {contender: caller.call(contender) for contender in order}
        rounds.append({contender: seconds for contender, (seconds, _) in found.items()})
        if options.verbose:
            print(found.get(GOODPUT), file=sys.stderr)
    return rounds


def in_processes(options: argparse.Namespace) -> list[dict[str, float]]:
    """Returns the seconds of each process, by round and contender."""
    rounds = []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(options.rounds):
            seconds = {}
            for contender in options.contenders[:: 1 if number % 2 else -1]:
                kept = os.path.join(folder, contender.replace(" ", "_"))
                environment = os.environ | {"SPECJAX_CACHE_DIR": kept}
                start = time.perf_counter()
                subprocess.run(
                    [
                        sys.executable,
                        "-m",
                        "benchmarks.calls",
                        *_own(options),
                        "--once",
                        contender,
                    ],
                    env=environment,
                    check=True,
                    stdout=subprocess.DEVNULL,
                )
                seconds[contender] = time.perf_counter() - start
            rounds.append(seconds)
            if options.verbose:
                print(seconds, file=sys.stderr)
    return rounds


def _own(options: argparse.Namespace) -> list[str]:
    names = ("pair", "drafter", "batch", "temperature", "new_tokens")
    pairs = ((f"--{name.replace('_', '-')}", getattr(options, name)) for name in names)
    return [str(word) for pair in pairs for word in pair]


def figures(rounds: Sequence[dict[str, float]]) -> dict[str, Any]:
    """Returns speed against no drafter call by call, and at last against the best contender."""
    of_plain = [each[NONE] / each[GOODPUT] for each in rounds]
    settled = rounds[SETTLED:] or rounds[1:]
    medians = {
        contender: measuring.median([each[contender] for each in settled])
        for contender in rounds[0]
    }
    best = min((c for c in medians if c not in (AGAIN, GOODPUT)), key=medians.__getitem__)
    again = [each[NONE] / each[AGAIN] for each in rounds if AGAIN in each]
    return {
        "of_plain_by_round": of_plain,
        "of_plain_from_the_second": measuring.median(of_plain[1:]),
        "plain_again_by_round": again,
        "best": best,
        "of_best": measuring.median([each[best] / each[GOODPUT] for each in settled]),
        "median_s": medians,
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.calls")
    parser.add_argument("--pair", choices=("embedded", "60M"), default="embedded")
    drafters = ("model", "ngram", "history")
    parser.add_argument("--drafter", choices=drafters, default="model")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--contenders", nargs="+", default=list(CONTENDERS))
    parser.add_argument("--processes", action="store_true")
    parser.add_argument("--verbose", action="store_true")
    parser.add_argument("--once", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.once:
        Caller(options).call(options.once)
        return 0
    run = in_processes if options.processes else in_one_process
    rounds = run(options)
    document = {
        "environment": measuring.environment(),
        "settings": {name: value for name, value in vars(options).items()},
        "figures": figures(rounds),
        "seconds": rounds,
    }
    print(json.dumps(document, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
