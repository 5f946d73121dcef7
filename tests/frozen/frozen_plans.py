"""`specjax plan --json`: of devices by formulas, and of compiled steps for a CPU.

Seconds of a CPU follow from a speed that is given here: a machine's own is measured. What is
written for people, and the bytes of machine code, are left out.
"""

from __future__ import annotations

import contextlib
import io
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from specjax.cli.main import main

LARGE = ["llama-3.1-8b", "--drafter", "llama-3.2-1b", "--dtype", "bfloat16"]
DEVICES = "h100", "a100", "t4", "v5e:2x2", "tpu7x:2x2x1"
EMBEDDED = ["demo", "--drafter", "demo-eagle3", "--memory-bytes", "1e9"]
SHAPE = {
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
SMALL = ["--drafter", "ngram", "--num-speculative-tokens", "1", "--max-rows", "2"]
LEFT_OUT = "notes", "misfit", "code_bytes", "code_bytes_per_layer", "processor_speed"


def contents() -> dict[str, str]:
    found = {f"{device}, estimate": [*LARGE, "--device", device] for device in DEVICES}
    found["cpu, estimate"] = EMBEDDED
    found = {name: [*arguments, "--estimate"] for name, arguments in found.items()}
    with tempfile.TemporaryDirectory() as folder, speed_of_cpu():
        (Path(folder) / "config.json").write_text(json.dumps(SHAPE))
        found["cpu, compiled steps"] = [folder, *SMALL, "--memory-bytes", "2e6"]
        return {name: plan(*arguments).replace(folder, "") for name, arguments in found.items()}


@contextlib.contextmanager
def speed_of_cpu() -> Iterator[None]:
    """Has plans take a speed that no clock has measured."""
    from specjax.planning import processor_speed
    from specjax.planning.step_prior import ProcessorSpeed

    speed = ProcessorSpeed(bytes_per_s=2e10, factors=((1, 1.0), (64, 32.0)), launch_s=1e-5)
    with mock.patch.object(processor_speed, "processor_speed", return_value=speed):
        yield


def plan(*arguments: str) -> str:
    """Returns the document of a plan; of one that does not fit, too, which ends with 1."""
    printed, said = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(said):
        main(["plan", *arguments, "--json"])
    assert printed.getvalue(), said.getvalue()
    return json.dumps(rounded(json.loads(printed.getvalue())), indent=1)


def rounded(value: Any) -> Any:
    """Returns a document without what is left out, and without the last digits of sums."""
    if isinstance(value, dict):
        return {key: rounded(each) for key, each in value.items() if key not in LEFT_OUT}
    if isinstance(value, list):
        return [rounded(each) for each in value]
    return round(float(f"{value:.6g}"), 12) if isinstance(value, float) else value
