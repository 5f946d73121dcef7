"""Drafters on a text that is edited again and again: acceptance, and speed against plain decoding.

    python -m benchmarks.edited_text --k 0 4 8 16 32 63
    python -m benchmarks.edited_text --widen 300M --files 1 --drafters history n-gram --k 0 16 32

A session is a part of a held-out file, and then the same part with one edit more in each answer: a
name changed, a line added, an argument added, a line deleted, a comment changed. The target writes
every version whole, as an assistant does that was asked for the edit. No embedded model follows
such a request, so the text is forced (`benchmarks.forced_text`): steps cost what the target's
steps cost, and how much is accepted is that of a target that does what it was asked to.

In a `dialogue` a request holds all that was said before, as a chat does. Requests that stand
`apart` hold the request alone: earlier versions are known to a drafter that remembers other
requests, and to no other. The first version is not counted.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import specjax
from benchmarks import edits
from benchmarks.drafters import Call, Contender, compare, contenders_of, table
from benchmarks.forced_text import SCRIPT, forced, with_text
from specjax.cli.bench import embedded, measuring
from specjax.cli.bench.command import parameters_of
from specjax.cli.bench.widen import widen
from specjax.engine.request import AcceptanceCounts
from specjax.models.base import Model

DIALOGUE, APART = "dialogue", "apart"
HEADING = "# this is the file\n"


class Turn(NamedTuple):
    """One request, and what is written for it."""

    prompt: list[int]
    answer: list[int]
    following: list[int]  # more of the text, which is not asked for
    is_counted: bool


def part_of(text: str, tokenizer: Any, num_tokens: int) -> str:
    """Returns whole lines from the first function or class on, of at most so many tokens.

    Raises:
      ValueError: there is none, or its first line is longer.
    """
    begins = re.search(r"^(?:def|class) ", text, re.MULTILINE)
    lines = [] if begins is None else text[begins.start() :].splitlines(keepends=True)
    found, left = "", num_tokens
    for line in lines:
        left -= len(tokenizer.encode_more(line))
        if left < 0:
            break
        found += line
    if not found:
        raise ValueError(f"{text!r:.60} has no function or class within {num_tokens} tokens.")
    return found


def session(text: str, tokenizer: Any, num_edits: int, kind: str) -> list[Turn]:
    """Returns the requests of a session, in order."""
    written = edits.versions(text, num_edits)
    answers = [tokenizer.encode_more("\n".join(each.lines) + "\n") for each in written]
    asked = [tokenizer.encode_more(HEADING)]
    asked += [tokenizer.encode_more(f"\n# {each.request}\n") for each in written[1:]]
    if kind == APART:
        own = zip(asked, answers, strict=True)
        return [Turn(prompt, answer, [], turn > 0) for turn, (prompt, answer) in enumerate(own)]
    # The file is given: nothing but its keys and values is made before the first edit.
    said = asked[0] + answers[0]
    turns = [Turn(said, asked[1][:1], [], False)]
    for prompt, answer in zip(asked[1:], answers[1:], strict=True):
        turns.append(Turn(said + prompt, answer, [], True))
        said = said + prompt + answer
    # One text for the whole dialogue: the weights stay, and so do cached keys and values.
    whole = lambda turn: turn._replace(following=said[len(turn.prompt) + len(turn.answer) :])
    return list(map(whole, turns))


@dataclasses.dataclass(frozen=True)
class Sessions:
    """Sessions one after the other, of one request at a time, in an engine that starts empty.

    Attributes:
      target: `forced`.
      most: largest K of the default policy.
    """

    target: Model
    sessions: list[list[Turn]]
    most: int

    @classmethod
    def of(cls, model: Model, sessions: list[list[Turn]], most: int) -> Sessions:
        """Returns the sessions of a model that is not yet forced."""
        longest = max(len(turn.prompt) + len(turn.answer) for each in sessions for turn in each)
        return cls(forced(model, longest + most + 1), sessions, most)

    def call(self, contender: Contender | None, k: int | None) -> Call:
        """Returns what the counted requests took; arguments as for `drafters.Work.call`.

        Raises:
          RuntimeError: a text is not the one that was to be written.
        """
        config = drafter = None
        if contender is not None:
            policy = {"policy": "goodput" if k is None else "fixed"}
            depth = {"num_speculative_tokens": k or self.most}
            config = specjax.SpeculationConfig(**policy, **depth, **contender.options)
            drafter = contender.drafter
        seconds, num_tokens, counts = 0.0, 0, AcceptanceCounts()
        length = self.target.params[SCRIPT].shape[0]
        sizes = specjax.EngineConfig(max_rows=1, max_context=length)
        with specjax.Engine(
            self.target, drafter=drafter, speculative_config=config, engine=sizes
        ) as engine:
            script: list[int] = []
            for turn in (turn for each in self.sessions for turn in each):
                text = turn.prompt + turn.answer + turn.following
                if text != script:  # new weights empty the prefix cache
                    engine.update_params(with_text(self.target.params, text))
                    script = text
                took, done = self._write(engine, turn)
                if turn.is_counted:
                    seconds += took
                    num_tokens += len(turn.answer)
                    counts.merge(done.acceptance)
        return Call(seconds, counts.num_steps, num_tokens, counts.mean_acceptance_length)

    def _write(self, engine: specjax.Engine, turn: Turn) -> tuple[float, specjax.Completion]:
        """Returns the seconds of the request, without those of compiling, and its end."""
        sampling = specjax.SamplingParams(
            temperature=0, max_tokens=len(turn.answer), ignore_eos=True
        )
        before = engine.stats.run_s
        engine.add(turn.prompt, sampling)
        done = None
        while engine.has_work:
            for chunk in engine.step():
                done = chunk.completion or done
        if done is None or list(done.token_ids) != turn.answer:
            raise RuntimeError(f"the target did not write its text: {done!r:.200}")
        return engine.stats.run_s - before, done


def main(argv: Sequence[str] | None = None) -> int:
    """Measures what is asked for; prints tables, or one JSON document."""
    options = _parser().parse_args(argv)
    narrow = specjax.load_model("demo")
    target = narrow if options.widen is None else widen(narrow, options.widen)
    contenders = contenders_of(options.drafters, options.head, narrow, target)
    texts = [
        part_of(text, narrow.tokenizer, options.tokens)
        for text in embedded.held_out_texts(options.files)
    ]
    figures = {}
    for kind in options.sessions:
        sessions = [session(text, narrow.tokenizer, options.edits, kind) for text in texts]
        work = Sessions.of(target, sessions, max(options.most, *options.k))
        rows = compare(work, contenders, options.k, options.rounds, has_shares=False)
        figures[kind] = rows
        if not options.json:
            print(f"\n{kind}\n\n{table(rows)}", flush=True)
    if options.json:
        print(measuring.document(vars(options), figures))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.edited_text")
    parser.add_argument("--widen", type=parameters_of, metavar="N", help="as of specjax bench")
    names = ["history", "n-gram", "hybrid"]
    parser.add_argument("--drafters", nargs="*", default=names, metavar="NAME")
    parser.add_argument("--head", nargs="*", default=[], metavar="NAME=FOLDER")
    parser.add_argument("--k", nargs="+", type=int, default=[0, 4, 8, 16, 32, 63])
    parser.add_argument("--most", type=int, default=32, help="largest K of the policy (--k 0)")
    both = [DIALOGUE, APART]
    parser.add_argument("--sessions", nargs="+", default=both, choices=both)
    parser.add_argument("--files", type=int, default=4)
    parser.add_argument("--edits", type=int, default=len(edits.KINDS), help="of each file")
    parser.add_argument("--tokens", type=int, default=384, help="most of a file's part")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", action="store_true")
    return parser


if __name__ == "__main__":
    sys.exit(main())
