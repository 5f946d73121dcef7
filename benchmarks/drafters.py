"""Drafters beside each other on one target: acceptance, their share of a step, and speed.

    python -m benchmarks.drafters --widen 300M --head eagle3=HEAD --k 1 2 4 6 8 --rounds 7

The target goes on from held-out files, at temperature 0 and 0.8. Every drafter, with as many K as
a process keeps decoders for, and plain decoding take their turn in each round, in an order of
chance, and only the compiled calls and reading them back count. With --widen the target is padded
with zeros to the cost of a larger model, and heads with it, so that real text is drafted at a cost
where steps wait for memory.

A drafter's share of a step is what a step takes longer than one whose K drafts cost nothing: a
drafter that proposes the same token always.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import jax.numpy as jnp

import specjax
from specjax.cli.bench import embedded, measuring
from specjax.cli.bench.command import parameters_of
from specjax.cli.bench.widen import widen
from specjax.cli.bench.widen_heads import widen_head
from specjax.cli.parser import at_least
from specjax.config.rules import VERIFICATION_RULES
from specjax.decode.decoder import MOST_DRAFTING
from specjax.heads.loading import is_head
from specjax.heads.specs import EagleDrafter
from specjax.models.base import Model

PLAIN, FREE = "plain", "free drafts"
MATCHING = {"n-gram": "ngram", "history": "history"}
TREE = " tree"


@dataclasses.dataclass(frozen=True)
class FreeDrafts(specjax.DrafterSpec):
    """Proposes K times token 0, which costs nothing: what verifying K drafts takes."""

    def build(self, context: specjax.DrafterContext) -> specjax.Drafter:
        depth = context.num_speculative_tokens

        def draft(params: Any, state: Any, decode_state: Any, num_tokens: Any) -> specjax.Draft:
            del params
            rows = decode_state.history.shape[0]
            token_ids = jnp.zeros((rows, depth), jnp.int32)
            count = jnp.minimum(num_tokens, depth)
            return specjax.Draft(specjax.Proposal(token_ids=token_ids, num_tokens=count), state)

        return specjax.Drafter(draft)


class Contender(NamedTuple):
    """A drafter, and fields of SpeculationConfig beside K."""

    drafter: Any
    options: dict[str, Any]


class Call(NamedTuple):
    """What decoding all prompts took, and gave."""

    seconds: float
    num_steps: int  # of rows
    num_tokens: int
    mean_acceptance_length: float


class Work(Protocol):
    """The same requests for every contender."""

    def call(self, contender: Contender | None, k: int | None) -> Call:
        """Decodes everything.

        Args:
          contender: None: plain decoding.
          k: draft tokens of every step; None: as the default policy chooses.
        """
        ...


@dataclasses.dataclass(frozen=True)
class Workload:
    """Prompts that go on, some at a time; a `Work`.

    Attributes:
      most: largest K of the policy, where it chooses.
    """

    target: Model
    prompts: list[list[int]]
    batch: int
    sampling: specjax.SamplingParams
    most: int

    def call(self, contender: Contender | None, k: int | None) -> Call:
        """Decodes all prompts, `batch` at a time; arguments as for `Work.call`."""
        fixed = {} if k is None else {"policy": "fixed"}
        config = None
        if contender is not None:
            depth = {"num_speculative_tokens": self.most if k is None else k}
            config = specjax.SpeculationConfig(**{**depth, **fixed, **contender.options})
        seconds, tokens, counts = 0.0, 0, None
        for start in range(0, len(self.prompts), self.batch):
            out = specjax.generate(
                self.target,
                self.prompts[start : start + self.batch],
                drafter=None if contender is None else contender.drafter,
                speculative_config=config,
                sampling=self.sampling,
            )
            seconds += out.stats.run_s
            tokens += out.stats.num_output_tokens
            if counts is None:
                counts = out.stats.acceptance
            else:
                counts.merge(out.stats.acceptance)
        assert counts is not None
        return Call(seconds, counts.num_steps, tokens, counts.mean_acceptance_length)


def compare(
    work: Work,
    contenders: dict[str, Contender],
    depths: Sequence[int],
    rounds: int,
    *,
    has_shares: bool = True,
    has_best: bool = True,
) -> list[dict[str, Any]]:
    """Returns a row per contender and K: against plain decoding in the same round.

    Args:
      depths: values of K; 0 stands for the default policy's choice.
      has_shares: whether drafters' shares of a step are measured, with one more run per K.
      has_best: whether the default policy's choice is also compared with the best fixed K of its
        drafter in `depths`, plain decoding included.
    """
    cells: dict[tuple[str, int], Contender | None] = {(PLAIN, 0): None}
    if has_shares:
        cells |= {(FREE, k): Contender(FreeDrafts(), {}) for k in depths if k}
    cells |= {(name, k): each for name, each in contenders.items() for k in depths}
    found: dict[tuple[str, int], list[Call]] = {cell: [] for cell in cells}
    source, order = random.Random(0), list(cells)
    for number in range(rounds + 1):
        order = order[::-1] if number % 2 else source.sample(order, len(order))
        for cell in order:
            call = work.call(cells[cell], cell[1] or None)
            if number:  # the first compiles
                found[cell].append(call)
    plain = found[PLAIN, 0]
    rows = []
    for (name, k), calls in found.items():
        if name in (PLAIN, FREE):
            continue
        row = _row(name, k, calls, plain, found.get((FREE, k)))
        if not k and has_best:
            fixed = {0: plain} | {k: found[name, k] for k in depths if k}
            row |= _of_best(calls, plain, fixed)
        rows.append(row)
    return rows


def _seconds(calls: list[Call]) -> list[float]:
    return [call.seconds for call in calls]


def _of_best(calls: list[Call], plain: list[Call], fixed: dict[int, list[Call]]) -> dict[str, Any]:
    """Returns the policy's speed over that of the fixed K that is most times plain, by rounds."""
    best = max(fixed, key=lambda k: measuring.ratio(_seconds(plain), _seconds(fixed[k])))
    of_best, least, most = measuring.ratio_interval(_seconds(fixed[best]), _seconds(calls))
    return {"best_k": best, "of_best": of_best, "of_best_interval": [least, most]}


def _row(
    name: str, k: int, calls: list[Call], plain: list[Call], free: list[Call] | None
) -> dict[str, Any]:
    faster, least, most = measuring.ratio_interval(_seconds(plain), _seconds(calls))
    per_step = lambda several: [call.seconds / max(call.num_steps, 1) for call in several]
    share = None
    if free is not None and not name.endswith(TREE):
        share = 1.0 - measuring.ratio(per_step(free), per_step(calls))
    return {
        "drafter": name,
        "k": k or "goodput",
        "mean_acceptance_length": calls[-1].mean_acceptance_length,
        "share_of_step": share,
        "of_plain": faster,
        "of_plain_interval": [least, most],
        "tokens_per_second": measuring.median([call.num_tokens / call.seconds for call in calls]),
    }


def contenders_of(
    names: Sequence[str], heads: Sequence[str], narrow: Model, target: Model
) -> dict[str, Contender]:
    """Returns the contenders.

    Args:
      names: n-gram, history, draft model, hybrid, or a name that `load_drafter` takes.
      heads: NAME=FOLDER of heads over the narrow target; of EAGLE a tree comes beside.
      target: what they draft for, wider or the same.
    """
    found: dict[str, Contender] = {}
    for name in names:
        if name in ("draft model", "hybrid"):
            options = {"corpus_tokens": 32_768} if name == "hybrid" else {}
            found[name] = Contender("demo", options)
        else:
            drafter = MATCHING.get(name, name)
            specjax.load_drafter(drafter, narrow)  # or says what it expects
            found[name] = Contender(drafter, {})
    for text in heads:
        name, _, folder = text.partition("=")
        if not folder or not is_head(folder):
            raise ValueError(f"--head {text!r} must be NAME=FOLDER, the folder of a head.")
        head = specjax.load_drafter(folder, narrow)
        if target is not narrow:
            head = widen_head(head, narrow.config, target.config)
        found[name] = Contender(head, {})
        if isinstance(head.spec, EagleDrafter):
            found[f"{name}{TREE}"] = Contender(head, {"tree_top_k": 3})
    return found


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Returns the rows as a table in Markdown."""
    chooses = any("of_best" in row for row in rows)
    names = ["drafter", "K", "mean acceptance length", "share of a step", "of plain", "interval"]
    names += ["of the best K", "interval"] if chooses else []
    lines = [f"| {' | '.join(names)} |", "|---" * len(names) + "|"]
    for row in rows:
        share = "" if row["share_of_step"] is None else f"{max(row['share_of_step'], 0.0):.0%}"
        least, most = row["of_plain_interval"]
        line = (
            f"| {row['drafter']} | {row['k']} | {row['mean_acceptance_length']:.2f} | {share} | "
            f"{row['of_plain']:.2f} | {least:.2f} to {most:.2f} |"
        )
        if "of_best" in row:
            least, most = row["of_best_interval"]
            name = f"K = {row['best_k']}" if row["best_k"] else PLAIN
            line += f" {row['of_best']:.2f} ({name}) | {least:.2f} to {most:.2f} |"
        elif chooses:
            line += " | |"
        lines.append(line)
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Measures what is asked for; prints tables, or one JSON document."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.drafters")
    parser.add_argument("--widen", type=parameters_of, metavar="N", help="as of specjax bench")
    names = ["n-gram", "history", "draft model", "hybrid"]
    parser.add_argument("--drafters", nargs="*", default=names, metavar="NAME")
    parser.add_argument("--head", nargs="*", default=[], metavar="NAME=FOLDER")
    parser.add_argument(
        "--k",
        nargs="+",
        type=at_least(0),
        default=[1, 2, 3, 5, 7],
        help="0: as the policy chooses, up to the largest of these",
    )
    parser.add_argument("--temperatures", nargs="+", type=float, default=[0.0, 0.8])
    parser.add_argument(
        "--verification",
        choices=[rule for rule in VERIFICATION_RULES if rule != "greedy"],
        help="the rule above temperature 0 (default: seeded)",
    )
    parser.add_argument("--batches", nargs="+", type=at_least(1), default=[1])
    parser.add_argument("--prompts", type=at_least(1), default=4, help="files, at least a batch")
    parser.add_argument("--new-tokens", type=at_least(1), default=96)
    parser.add_argument("--rounds", type=at_least(1), default=7)
    parser.add_argument("--no-shares", action="store_true", help="of a step: not measured")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(argv)
    narrow = specjax.load_model("demo")
    target = narrow if options.widen is None else widen(narrow, options.widen)
    try:
        contenders = contenders_of(options.drafters, options.head, narrow, target)
        works = {
            f"temperature {temperature:g}, batch {batch}": _workload(
                target, temperature, batch, options
            )
            for temperature in options.temperatures
            for batch in options.batches
        }
    except (ValueError, OSError) as error:
        parser.error(str(error))
    if not contenders:
        parser.error("there is nothing to measure; give --drafters or --head.")
    figures = {}
    for name, work in works.items():
        rows = []
        groups = _together(options.k, len(contenders) + (not options.no_shares))
        for depths in groups:
            rows += compare(
                work,
                contenders,
                depths,
                options.rounds,
                has_shares=not options.no_shares,
                has_best=len(groups) == 1,  # else the best K may be of another group
            )
        rows.sort(key=lambda row: list(contenders).index(row["drafter"]))
        figures[name] = rows
        if not options.json:
            print(f"\n{name}\n\n{table(rows)}", flush=True)
    if options.json:
        print(measuring.document(vars(options), figures))
    return 0


def _together(depths: Sequence[int], num_cells: int) -> list[list[int]]:
    """Returns `depths` in groups that are measured in the same rounds.

    Beside plain decoding they fit the decoders that a process keeps; beyond these every call
    would compile anew.

    Args:
      num_cells: decoders per K.
    """
    distinct = list(dict.fromkeys(depths))
    most = max((MOST_DRAFTING - 1) // num_cells, 1)
    return [distinct[start : start + most] for start in range(0, len(distinct), most)]


def _workload(
    target: Model, temperature: float, batch: int, options: argparse.Namespace
) -> Workload:
    count = max(options.prompts, batch)
    texts = embedded.held_out_texts(count)
    encoded = [target.tokenizer.encode(text) for text in texts]
    tokens = embedded.PROMPT_TOKENS
    # Where there are fewer files than prompts, later parts of the files follow.
    prompts = [
        encoded[i % len(encoded)][tokens * (i // len(encoded)) :][:tokens] for i in range(count)
    ]
    sampling = specjax.SamplingParams(
        temperature=temperature,
        max_tokens=options.new_tokens,
        ignore_eos=True,
        seed=0,
        verification=options.verification if temperature else None,
    )
    return Workload(target, prompts, batch, sampling, max(*options.k, 1))


if __name__ == "__main__":
    sys.exit(main())
