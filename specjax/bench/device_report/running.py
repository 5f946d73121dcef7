"""Runs the cases of a report, and keeps the document after each."""

from __future__ import annotations

import dataclasses
import gc
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from specjax.bench.device_report import document as documents
from specjax.bench.device_report import page
from specjax.bench.device_report.cases import Case, Context, LeftOut, Stage
from specjax.bench.device_report.document import Document

PAGE = "report.md"
MOST_MESSAGE, MOST_LINE = 400, 200  # characters of an error, and of a line of progress

Say = Callable[[str], None]


@dataclasses.dataclass
class Run:
    """One run of a report: until all cases are over, or the time is.

    Attributes:
      minutes: no case begins later than this.
      again: whether cases that are over run once more.
      say: gets a line per case.
      begin: gets the name of each case that begins.
      clock: seconds.
    """

    document: Document
    folder: Path
    stages: Sequence[Stage]
    context: Context
    minutes: float
    again: bool
    say: Say
    begin: Say = lambda what: None
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self):
        platform = self.context.device.platform
        self._began = self.clock()
        self._cases = [
            (stage, case)
            for stage in self.stages
            for case in stage.cases(self.context.size, platform)
        ]
        self._counts: Counter[str] = Counter()
        self._ran: set[str] = set()

    def run(self) -> Counter[str]:
        """Runs what is left; returns how many cases ended in which way, those before as "kept"."""
        kept = sum(self._is_over(*each) for each in self._cases)
        self._counts["kept"] = kept
        if kept:
            self.say(f"{kept} of {len(self._cases)} cases are there from an earlier run.")
        try:
            self._run_stages()
        finally:  # an interrupt leaves a page, too
            self._save()
        return self._counts

    def _run_stages(self) -> None:
        share = 0.0
        for stage in self.stages:
            share += stage.share
            self._run_until(share, [each for each in self._cases if each[0] is stage])
            self._tidy()
        self._run_until(1.0, self._cases)  # in the time that later stages left
        for stage, case in self._cases:
            if self._is_over(stage, case):
                continue
            self._counts["not reached"] += 1
            key = key_of(stage, case)
            before = self.document["cases"].get(key, {})
            if not documents.is_over(before):
                reason = f"the limit of {self.minutes:g} minutes came first"
                self.document["cases"][key] = before | {"not_reached": reason}

    def _run_until(self, share: float, cases: Sequence[tuple[Stage, Case]]) -> None:
        """Runs cases that are not over, as long as this share of the time has not passed."""
        for stage, case in cases:
            if self._is_over(stage, case):
                continue
            if self.clock() - self._began >= 60 * self.minutes * min(share, 1.0):
                return
            self._run_case(stage, case)

    def _run_case(self, stage: Stage, case: Case) -> None:
        key = key_of(stage, case)
        attempts = self.document["cases"].get(key, {}).get("attempts", 0)
        self._ran.add(key)
        place = f"{self._counts['kept'] + len(self._ran):4d}/{len(self._cases)}  {key}"
        self.begin(place)
        began = self.clock()
        if attempts >= documents.MOST_ATTEMPTS:
            ended = f"its process ended {attempts} times before it did"
            outcome: dict[str, Any] = {"failed": ended, "error": "ProcessEnded"}
        else:
            self._set(key, {"attempts": attempts + 1})
            outcome = self._outcome(key, case, attempts)
        outcome["took_s"] = round(self.clock() - began, 2)
        (way,) = (kind for kind in ("result", "failed", "left_out") if kind in outcome)
        self._counts[way] += 1
        self._set(key, outcome)
        said = {"result": ""}.get(way, f"  {way.replace('_', ' ')}: {outcome[way]}")
        self.say(f"{place}  {outcome['took_s']:.1f} s{said}"[:MOST_LINE])

    def _outcome(self, key: str, case: Case, attempts: int) -> dict[str, Any]:
        """Runs a case; whatever it raises is its outcome, but for an interrupt."""
        try:
            return {"result": documents.plain(case.run(self.context))}
        except LeftOut as reason:
            return {"left_out": str(reason)}
        except KeyboardInterrupt:
            # Not the case's fault: it begins anew.
            self._set(key, {"attempts": attempts})
            raise
        except Exception as error:
            message = " ".join(str(error).split())[:MOST_MESSAGE]
            self._tidy()
            return {"failed": message or "no message", "error": type(error).__name__}

    def _is_over(self, stage: Stage, case: Case) -> bool:
        key = key_of(stage, case)
        is_over = documents.is_over(self.document["cases"].get(key))
        return key in self._ran if self.again else is_over

    def _set(self, key: str, outcome: dict[str, Any]) -> None:
        self.document["cases"][key] = outcome
        documents.save(self.folder, self.document)

    def _save(self) -> None:
        documents.save(self.folder, self.document)
        (self.folder / PAGE).write_text(page.as_markdown(self.document), encoding="utf-8")

    def _tidy(self) -> None:
        """Frees what a stage, or a case that failed, leaves on the device."""
        self.context.models.release()
        gc.collect()


def key_of(stage: Stage, case: Case) -> str:
    """Returns the name of a case in the document."""
    return f"{stage.name}: {case.name}"
