"""compare(): the same texts with each of some drafters, and without, in turn."""

from __future__ import annotations

import dataclasses
import os
import secrets
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from specjax.api import generation
from specjax.api.assemble import Setup
from specjax.api.plots import draw_comparison
from specjax.api.requests import Prompt, as_list, one_each
from specjax.api.results import Generation
from specjax.config.checks import is_int
from specjax.config.keywords import keyword_check
from specjax.config.names import NO_DRAFTER
from specjax.config.sampling import SamplingParams, SamplingSource
from specjax.decode import background
from specjax.heads.loading import DrafterSource
from specjax.models.base import Model
from specjax.runtime.jax_settings import entrance
from specjax.runtime.progress import Progress, Report

# Most runs of one way before those measured, in which its policy settles on a K; and most while
# drafts are only expected to be faster, as where a step of an earlier process is still on disk.
MOST_WARM, MOST_UNPROVEN = 16, 6
# Reasons of bursts that run while a policy has no K yet; see `engine.metrics.BurstRecord`.
UNSETTLED = frozenset({"nothing measured yet", "probe", "prompts"})
_UNSETTLED = (
    "Too short a text to choose a K: a longer one, or speculative_config={'policy': 'fixed'}, "
    "shows what drafts bring"
)


@dataclasses.dataclass(frozen=True)
class ComparedDrafter:
    """What one drafter brought, or decoding without any. Seconds are medians over repeats."""

    drafter: str  # its name; "none" is plain decoding
    run_s: float
    tokens_per_second: float
    speedup: float  # seconds of plain decoding over these
    mean_acceptance_length: float
    acceptance_rate: float
    num_drafted: int  # draft tokens of the last repeat; 0: all of it was plain decoding
    num_equal: int  # tokens of all texts before the first that differs from plain decoding
    num_tokens: int  # of the texts of plain decoding
    why: str  # GenerationStats.why of the last repeat; and what to change where no K was chosen

    @property
    def is_equal(self) -> bool:
        """Whether every text is that of plain decoding."""
        return self.num_equal == self.num_tokens


@dataclasses.dataclass(frozen=True, repr=False)
class Comparison:
    """Drafters beside plain decoding, which is first; print it for a table."""

    rows: tuple[ComparedDrafter, ...]
    repeats: int

    def __repr__(self) -> str:
        names = ["drafter", *(row.drafter for row in self.rows)]
        width = max(map(len, names))
        lines = [f"{'drafter':{width}}  tokens/s  speedup  tokens/step  accepted  same text"]
        for row in self.rows:
            same = "yes" if row.is_equal else f"{row.num_equal} of {row.num_tokens} tokens"
            accepted = f"{row.acceptance_rate:.0%}" if row.num_drafted else "-"
            lines.append(
                f"{row.drafter:{width}}  {row.tokens_per_second:8.1f}  {row.speedup:7.2f}  "
                f"{row.mean_acceptance_length:11.2f}  {accepted:>8}  {same}"
            )
        lines += [f"{row.drafter}: {row.why}" for row in self.rows if row.why]
        return "\n".join([*lines, f"medians of {self.repeats} runs each, in turn"])

    def plot(self, path: str | os.PathLike[str] | None = None) -> Any:
        """Draws tokens per second as bars; returns matplotlib's figure, which a notebook shows.

        Args:
          path: where a PNG is written; None: nowhere.

        Raises:
          NotImplementedError: matplotlib is not installed.
        """
        return draw_comparison(self.rows, path)


@entrance("specjax.compare", keyword_check)
def compare(
    target: Model | str | os.PathLike[str],
    prompts: Prompt | Sequence[Prompt],
    drafters: Sequence[DrafterSource] = ("ngram",),
    *,
    sampling: SamplingSource | Sequence[SamplingSource] | None = None,
    repeats: int = 3,
    progress: bool | Report | None = None,
    **options: Any,
) -> Comparison:
    """Generates the same texts with each drafter and without, and measures the seconds.

    Each way runs before, compiling and learning included, and is not measured: once, and again,
    up to MOST_WARM times, while its policy has chosen no K, and MOST_UNPROVEN while it expects one
    to be faster. Then all run in turn, `repeats` times,
    in changing order, so that a machine that slows down favours none.

    Args:
      target, prompts, sampling: as of `generate`. A prompt without a seed gets one, the same in
        every run.
      drafters: each as of `generate`; plain decoding is compared in any case.
      options: others of `generate`: num_speculative_tokens, engine, ... Those of speculation are
        for the drafters alone.

    Raises:
      ValueError: no drafter, or a prompt cannot be served.
    """
    if not is_int(repeats) or repeats < 1:
        raise ValueError(f"repeats={repeats!r} must be a whole number of at least 1.")
    is_many = isinstance(drafters, Sequence) and not isinstance(drafters, str)
    if not is_many or not drafters:
        raise ValueError(f"drafters={drafters!r:.100} must be a list, as ['ngram', 'demo'].")
    keyword_check(generation.generate)(options)
    model, ways = _ways(target, drafters, options)
    prompts = as_list(prompts)
    own = _seeded(sampling, model, len(prompts))
    shown, done = Progress(progress), 0
    total = (1 + repeats) * len(ways)
    runs: dict[str, list[Generation]] = {name: [] for name in ways}
    try:
        for turn in range(1 + repeats):
            for name in list(ways) if turn % 2 == 0 else reversed(ways):
                done += 1
                at = f"comparing, run {done} of {total} ({name})"

                def run_once(name: str = name, at: str = at) -> Generation:
                    report = lambda what, *counts: shown.report(f"{at}, {what}", *counts)
                    options = {"sampling": _of_way(name, own), "progress": report, **ways[name]}
                    return _checked(generation.generate(model, prompts, **options))

                run, num_warm = run_once(), 1
                while turn == 0 and num_warm < _most_warm(run):
                    shown.report(f"{at}, compiling in the background", 0, 0)
                    background.wait_for_all()
                    run, num_warm = run_once(), num_warm + 1
                runs[name].append(run)
    finally:
        shown.close()
    measured = {name: all_runs[1:] for name, all_runs in runs.items()}
    plain = measured[NO_DRAFTER]
    plain_s = statistics.median(run.stats.run_s for run in plain)
    rows = tuple(_row(name, each, plain[-1], plain_s) for name, each in measured.items())
    return Comparison(rows, repeats)


def _checked(run: Generation) -> Generation:
    """Raises ValueError if a text of a run failed; returns the run."""
    failed = next((each.error for each in run if each.error is not None), None)
    if failed is not None:
        raise ValueError(failed)
    return run


def _is_settled(run: Generation) -> bool:
    """Returns whether the policy of a run chose a K, or there was none to choose."""
    return not run.stats.why or any(d.reason not in UNSETTLED for d in run.stats.decisions)


def _most_warm(run: Generation) -> int:
    """Returns the most runs of a way before those measured, by the last of them."""
    if not _is_settled(run):
        return MOST_WARM
    return MOST_UNPROVEN * any(d.reason == "unproven" for d in run.stats.decisions[-1:])


_OF_DRAFTS = ("speculative_config", "num_speculative_tokens", "verification", "policy")


def _ways(
    target: Any, drafters: Sequence[DrafterSource], options: Mapping[str, Any]
) -> tuple[Model, dict[str, dict[str, Any]]]:
    """Returns the target, and the arguments of `generate` by the name of each way.

    Models are read once.
    """
    shared = {name: value for name, value in options.items() if name not in _OF_DRAFTS}
    ways = {NO_DRAFTER: {**shared, "drafter": NO_DRAFTER}}
    for drafter in drafters:
        given = {name: value for name, value in options.items() if name != "policy"}
        setup = Setup.of(target, drafter=drafter, **given)
        target, name = setup.target, setup.drafter.name
        if name == NO_DRAFTER:
            raise ValueError(f"drafter {drafter!r:.100} drafts nothing; leave it out.")
        # Two of one name, as of two folders.
        name = name if name not in ways else f"{name} ({sum(name in way for way in ways) + 1})"
        ways[name] = {**options, "drafter": setup.drafter}
    return target, ways


def _seeded(sampling: Any, model: Model, num_prompts: int) -> list[SamplingParams]:
    """Returns the parameters of each prompt, all with a seed."""
    seeded = []
    for each in one_each(sampling, model, num_prompts):
        if isinstance(each, ValueError):
            raise each
        seed = secrets.randbits(63) if each.seed is None else each.seed
        seeded.append(dataclasses.replace(each, seed=seed))
    return seeded


def _of_way(name: str, sampling: Sequence[SamplingParams]) -> list[SamplingParams]:
    """Returns the parameters of a run; a number of drafts means nothing without a drafter."""
    if name != NO_DRAFTER:
        return list(sampling)
    return [dataclasses.replace(each, num_speculative_tokens=None) for each in sampling]


def _row(
    name: str, runs: Sequence[Generation], plain: Generation, plain_s: float
) -> ComparedDrafter:
    run_s = statistics.median(run.stats.run_s for run in runs)
    last = runs[-1].stats
    return ComparedDrafter(
        drafter=name,
        run_s=run_s,
        tokens_per_second=last.num_output_tokens / run_s if run_s else 0.0,
        speedup=plain_s / run_s if run_s else 0.0,
        mean_acceptance_length=last.mean_acceptance_length,
        acceptance_rate=last.acceptance_rate,
        num_drafted=last.acceptance.num_drafted,
        num_equal=sum(_num_equal(*pair) for pair in zip(runs[-1], plain, strict=True)),
        num_tokens=plain.stats.num_output_tokens,
        why=last.why if _is_settled(runs[-1]) else f"{last.why}. {_UNSETTLED}",
    )


def _num_equal(one: Any, other: Any) -> int:
    """Returns how many tokens two texts begin with alike."""
    pairs = zip(one.token_ids, other.token_ids, strict=False)
    differs = (index for index, (a, b) in enumerate(pairs) if a != b)
    return next(differs, min(len(one.token_ids), len(other.token_ids)))
