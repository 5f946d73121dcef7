"""Runs the cases of a report, and keeps the document after each."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from specjax.cli import json_document
from specjax.cli.bench.device_report import document as documents
from specjax.cli.bench.device_report import page
from specjax.cli.bench.device_report.cases import Case, Context, LeftOut, NotReached, Stage
from specjax.cli.bench.device_report.document import Document
from specjax.cli.bench.device_report.page import DISAGREES
from specjax.cli.bench.device_report.sizes import counted

PAGE = "report.md"
MOST_MESSAGE, MOST_LINE = 400, 200  # characters of an error, and of a line of progress

Say = Callable[[str], None]


@dataclasses.dataclass
class Run:
    """One run of a report: until all cases are over, or the time is.

    Attributes:
      cases: by their names in the document, in order.
      minutes: no case begins later than this.
      retried: those that run though they are over. What they found is kept until they have.
      say: gets a line per case.
      begin: gets the name of each case that begins.
      clock: seconds.
    """

    document: Document
    stages: Sequence[Stage]
    cases: Mapping[str, Case]
    context: Context
    minutes: float
    say: Say
    begin: Say = lambda what: None
    retried: Collection[str] = ()
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self):
        self._began = self.clock()
        self._ran: set[str] = set()
        self._num_kept = sum(map(self._is_over, self.cases))

    def run(self) -> Counter[str]:
        """Runs what is left; returns how many cases of the document ended in which way.

        Beside the ways of `documents.WAYS` these are "disagrees", of those with a result,
        "kept", those that were over before, and "unwritten", pages that could not be written.

        Raises:
          OSError: the document cannot be written, or the page not even at the start.
        """
        self._save()
        if self._num_kept:
            self.say(f"{self._num_kept} of {len(self.cases)} cases are there from an earlier run.")
        try:
            self._run_stages()
        except BaseException:
            with contextlib.suppress(Exception):  # what ended the run is what is raised
                self._save()
            raise
        documents.save(self.context.out, self.document)
        counts = self._counts()
        try:
            self._save_page()
        except OSError as error:
            counts["unwritten"] = 1
            self.say(f"{error} The figures are in {self.context.out / documents.NAME}.")
        return counts

    def _counts(self) -> Counter[str]:
        counts: Counter[str] = Counter(kept=self._num_kept)
        for key in self.cases:
            outcome = self.document["cases"].get(key)
            is_over = documents.is_over(self.document, key)
            counts[documents.way_of(outcome) if is_over else "not_reached"] += 1
            counts["disagrees"] += is_over and documents.disagrees(outcome)
        return counts

    def _run_stages(self) -> None:
        share = 0.0
        for stage in self.stages:
            share += stage.share
            self._run_until(share, filter(stage.has, self.cases))
            self._tidy()
        self._run_until(1.0, self.cases)  # in the time that later stages left
        reason = f"the limit of {counted(self.minutes, 'minute')} came first"
        for key in self.cases:
            if not self._is_over(key):
                self._put_off(key, reason)

    def _put_off(self, key: str, reason: str) -> None:
        """Notes why a case was not reached, where nothing was found earlier."""
        before = self.document["cases"].get(key, {})
        if documents.way_of(before) in documents.NOT_OVER:
            self.document["cases"][key] = before | {"not_reached": reason}

    def _run_until(self, share: float, keys: Iterable[str]) -> None:
        """Runs cases that are not over, as long as this share of the time has not passed."""
        for key in keys:
            if self._is_over(key):
                continue
            if self.clock() - self._began >= 60 * self.minutes * min(share, 1.0):
                return
            self._run_case(key)

    def _run_case(self, key: str) -> None:
        before = dict(self.document["cases"].get(key, {}))
        before.pop("not_reached", None)
        attempts = before.get("attempts", 0)
        self._ran.add(key)
        place = f"{self._num_kept + len(self._ran):4d}/{len(self.cases)}  {key}"
        self.begin(place)
        began = self.clock()
        if attempts >= documents.MOST_ATTEMPTS:
            ended = f"its process ended {attempts} times before it did"
            outcome: dict[str, Any] = {"failed": ended, "error": "ProcessEnded"}
        else:
            self._set(key, before | {"attempts": attempts + 1})
            outcome = self._outcome(key, before | {"attempts": attempts})
        took_s = round(self.clock() - began, 2)
        said = _said(outcome)
        if "not_reached" in outcome:
            self.document["cases"][key] = before
            self._put_off(key, outcome["not_reached"])
            documents.save(self.context.out, self.document)
        else:
            number = documents.round_of(self.document)
            self._set(key, outcome | {"took_s": took_s} | ({"round": number} if number else {}))
        self.say(f"{place}  {took_s:.1f} s{said}"[:MOST_LINE])

    def _outcome(self, key: str, before: dict[str, Any]) -> dict[str, Any]:
        """Runs a case; whatever it raises is its outcome, but for an interrupt."""
        try:
            return {"result": json_document.plain(self.cases[key].run(self.context))}
        except LeftOut as reason:
            return {"left_out": str(reason)}
        except NotReached as reason:
            return {"not_reached": str(reason)}
        except KeyboardInterrupt:
            # Not the case's fault: it begins anew.
            with contextlib.suppress(OSError):
                self._set(key, before)
            raise
        except Exception as error:  # of a compiler, a device or a kernel: it must not end the rest
            message = " ".join(str(error).split())[:MOST_MESSAGE]
            self._tidy()
            return {"failed": message or "no message", "error": type(error).__name__}

    def _is_over(self, key: str) -> bool:
        if key in self._ran:
            return True
        return key not in self.retried and documents.is_over(self.document, key)

    def _set(self, key: str, outcome: dict[str, Any]) -> None:
        self.document["cases"][key] = outcome
        documents.save(self.context.out, self.document)

    def _save(self) -> None:
        documents.save(self.context.out, self.document)
        self._save_page()

    def _save_page(self) -> None:
        documents.save_text(self.context.out / PAGE, page.as_markdown(self.document))

    def _tidy(self) -> None:
        """Frees what a stage, or a case that failed, leaves on the device."""
        self.context.models.release()
        gc.collect()


def _said(outcome: Mapping[str, Any]) -> str:
    """Returns what the line of a case says about its outcome."""
    if documents.disagrees(outcome):
        return f"  {DISAGREES}"
    way = documents.way_of(outcome)
    return "" if way == "result" else f"  {way.replace('_', ' ')}: {outcome[way]}"
