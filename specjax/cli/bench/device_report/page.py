"""The page of a report: a pure function of its document."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Any

from specjax.cli.bench.device_report.cases import Results, Stage
from specjax.cli.bench.device_report.document import INTERRUPTED, disagrees, is_over, way_of
from specjax.cli.bench.device_report.peaks import MEASURED, PUBLISHED
from specjax.cli.bench.device_report.sizes import counted
from specjax.cli.bench.device_report.stages import STAGES
from specjax.cli.table import as_markdown as table_in_markdown

DISAGREES = "DISAGREES"
_WAYS = {
    "left_out": "Left out",
    "failed": "Failed",
    "not_reached": "Not reached",
    INTERRUPTED: "Interrupted",
}


def as_markdown(document: Mapping[str, Any]) -> str:
    """Returns a page for docs/benchmarks/."""
    made_on, cases = document["made_on"], document["cases"]
    is_cpu = made_on["platform"] == "cpu"
    device = f"CPU ({made_on['host_cpu']})" if is_cpu else made_on["device_kind"]
    lines = [f"# {device}, specjax {made_on['specjax']}: device report", ""]
    lines += [_conditions(made_on), "", _summary(document)]
    if is_cpu:
        lines += ["", _OF_CPU]
    lines += _peak_line(cases)
    for stage in STAGES:
        lines += _section(stage, cases)
    return "\n".join(lines) + "\n"


_OF_CPU = (
    "These are figures of a CPU, which may share its cores with other programs. They show what "
    "a report has; they say nothing about a TPU or a GPU."
)


def _conditions(made_on: Mapping[str, Any]) -> str:
    devices = counted(made_on["num_devices"], "device")
    compiler = f", {made_on['plugin']}" if made_on["plugin"] else ""
    commit = f", commit {made_on['commit']}" if made_on["commit"] else ""
    cores = counted(made_on["host_cores"] or 0, "core")
    return (
        f"{devices} seen, one measured; host {made_on['host_cpu']}, {cores}; "
        f"jax {made_on['jax']}, jaxlib {made_on['jaxlib']}{compiler}, Python {made_on['python']}; "
        f"specjax {made_on['specjax']}{commit}; {made_on['date']}; size {made_on['size']}. Made by "
        "`specjax bench --device-report`."
    )


def _summary(document: Mapping[str, Any]) -> str:
    cases = document["cases"]
    counts = Counter(map(way_of, cases.values()))
    said = f"Cases: {len(cases)}; measured {counts['result']}"
    said += "".join(f", {words.lower()} {counts[way]}" for way, words in _WAYS.items())
    wrong = sum(map(disagrees, cases.values()))
    if wrong:
        said += f". {counted(wrong, 'kernel example')} {DISAGREES} with the definition of the op"
    old = sum(
        way_of(case) == "result" and not is_over(document, key) for key, case in cases.items()
    )
    if old:
        said += f". {counted(old, 'result')} of before the last --again"
    return f"{said}."


def _peak_line(cases: Mapping[str, Any]) -> list[str]:
    """Returns a line about the peaks of shares and rooflines, of those that were drawn by one."""
    found = [case["result"].get("peak") for case in cases.values() if "result" in case]
    used = [source for source in (PUBLISHED, MEASURED) if source in found]
    if not used:
        return []
    return ["", f"Shares and rooflines are of the device's speed as {' and as '.join(used)}."]


def _section(stage: Stage, cases: Mapping[str, Any]) -> list[str]:
    """Returns the lines of a stage: its table, then what is not in it and why."""
    own = {key.partition(": ")[2]: case for key, case in cases.items() if stage.has(key)}
    if not own:
        return []
    lines = ["", f"## {stage.title}", ""]
    results = {name: case["result"] for name, case in own.items() if "result" in case}
    if results:
        lines += [stage.note, ""] if stage.note else []
        lines += [*_table(stage, results), ""]
    for way, said in _WAYS.items():
        by_reason: dict[str, list[str]] = defaultdict(list)
        for name, case in own.items():
            if way_of(case) == way:
                by_reason[_reason(case, way)].append(name)
        lines += [f"- {said}: {_names(names)}. {why}" for why, names in by_reason.items()]
    while not lines[-1]:
        lines.pop()
    return lines


_BEGINS_ANEW = "the same command begins it anew"


def _table(stage: Stage, results: Results) -> list[str]:
    """Returns the table of a stage, or one line where figures are missing from the document."""
    try:
        return table_in_markdown(stage.table(results))
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        text = " ".join(str(error).split())[:100]
        return [f"- No table can be drawn of these results. {type(error).__name__}: {text}."]


def _reason(case: Mapping[str, Any], way: str) -> str:
    error = f"{case['error']}: " if "error" in case else ""
    text = f"{error}{case.get(way, _BEGINS_ANEW)}"
    text = text[:1].upper() + text[1:]
    return text if text.endswith(".") else f"{text}."


def _names(names: list[str], most: int = 4) -> str:
    """Returns names, and how many more there are."""
    more = len(names) - most
    return "; ".join(names[:most]) + (f"; and {more} more" if more > 0 else "")
