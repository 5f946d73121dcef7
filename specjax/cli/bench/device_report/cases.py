"""A case of the report: one small measurement."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from specjax.cli.bench.device_report.peaks import Peaks, measured_peaks, published_peaks
from specjax.cli.bench.device_report.sizes import ReportSize
from specjax.cli.table import Row

if TYPE_CHECKING:
    from specjax.cli.bench.device_report.random_models import RandomModels

Results: TypeAlias = Mapping[str, Mapping[str, Any]]  # by the case's name
SPEED = "device: speed"  # the case of the first stage, which others are compared with


class LeftOut(Exception):
    """The case does not apply to this device; the message is a sentence that says why."""


class NotReached(Exception):
    """The case cannot begin yet; the message is a sentence that says why."""


@dataclasses.dataclass
class Context:
    """What a case may use.

    Attributes:
      out: the folder of the report.
      device: the jax.Device that is measured.
      result: returns what a case of the report found, in this run or an earlier one, by its key.
    """

    size: ReportSize
    out: Path
    device: Any
    models: RandomModels
    result: Callable[[str], dict[str, Any] | None]

    @property
    def is_cpu(self) -> bool:
        return self.device.platform == "cpu"

    @property
    def copy_bytes_per_s(self) -> float:
        """Bytes per second of a copy on this device, reads and writes counted.

        Raises:
          NotReached: it was not measured.
        """
        return self._measured["copy_bytes_per_s"]

    @property
    def peaks(self) -> Peaks:
        """The device's figures as published, or as measured here where none are known.

        Raises:
          NotReached: they are not published, and were not measured.
        """
        return published_peaks(self.device) or measured_peaks(self._measured)

    @property
    def _measured(self) -> dict[str, Any]:
        found = self.result(SPEED)
        if not found:
            raise NotReached(
                "the speed of the device was not measured: see its own case; with --again-failed "
                "it is tried once more"
            )
        return found


class Case(NamedTuple):
    """A measurement by its name; `run` returns plain JSON, or raises.

    Raises LeftOut where it does not apply.
    """

    name: str
    run: Callable[[Context], dict[str, Any]]


class Stage(NamedTuple):
    """Cases that belong together, and the section of the page that shows what they found.

    Attributes:
      share: of the time of the whole report. A stage may use what earlier ones left.
      cases: makes the cases for a size and a platform, "cpu", "gpu" or "tpu".
      table: makes the rows of its table from results by the name of their case.
      note: a paragraph before the table.
    """

    name: str
    share: float
    cases: Callable[[ReportSize, str], Sequence[Case]]
    title: str
    table: Callable[[Results], list[Row]]
    note: str = ""

    def by_key(self, size: ReportSize, platform: str) -> dict[str, Case]:
        """Returns its cases by their names in the document."""
        return {f"{self.name}: {case.name}": case for case in self.cases(size, platform)}

    def has(self, key: str) -> bool:
        """Returns whether a case is its own."""
        return key.startswith(f"{self.name}: ")
