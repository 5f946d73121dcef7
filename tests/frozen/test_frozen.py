"""What tests/frozen/frozen.json holds is as it was frozen: freeze.py says how it is renewed."""

import json
import os
import subprocess
import sys

import freeze
import jax
import pytest
from asked_for import quick
from frozen_steps import STEPS, text_of

RECORD = json.loads(freeze.FROZEN.read_text())
of_these_versions = pytest.mark.skipif(
    RECORD["made_with"] != freeze.made_with(),
    reason=f"frozen with {RECORD['made_with']}, and this is {freeze.made_with()}",
)
QUICK = "llama, chain", "gpt2, prompts", "mesh 2x2, plain"


@of_these_versions
@pytest.mark.parametrize("name", quick(STEPS, *QUICK))
def test_a_step_is_lowered_as_it_was(name):
    frozen = {name: RECORD["steps"][name]} if name in RECORD["steps"] else {}
    assert freeze.differences(frozen, {name: freeze.entry_of(text_of(STEPS[name]))}) == []


@of_these_versions
@pytest.mark.slow  # tokens are also of the processor's rounding
@pytest.mark.parametrize("part", [part for part in freeze.PARTS if part != "steps"])
def test_a_part_is_as_it_was(part):
    """In a process of its own, whose settings are those that it was frozen under."""
    kept = jax.config.jax_compilation_cache_dir
    own = {} if kept is None else {"JAX_COMPILATION_CACHE_DIR": kept}
    command = [sys.executable, freeze.__file__, part]
    ran = subprocess.run(command, env=os.environ | own, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_no_step_is_frozen_that_is_gone():
    assert set(RECORD["steps"]) == set(STEPS)


def test_what_differs_is_named():
    contents = {"text": "a", "bytes": b"a", "share": 0.98765432, "moved": 0.5, "only here": "b"}
    found = {name: freeze.entry_of(content) for name, content in contents.items()}
    assert found["text"] == found["bytes"] == "ca978112ca1bbdca"  # as sha256sum says
    assert found["share"] == 0.98765
    assert freeze.differences(found, found) == []
    frozen = found | {"text": "0", "share": 0.9880, "moved": 0.49, "only there": "c"}
    del frozen["only here"]
    assert freeze.differences(frozen, found) == [
        "gone: only there",
        "changed: text",
        "changed: moved, 0.49 -> 0.5",
        "new: only here",
    ]
