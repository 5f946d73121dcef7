"""The README's examples run, with nothing but jax and numpy installed."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "pallas_kernels"
OPS = [path.name for path in FOLDER.iterdir() if (path / "api.py").exists()]
OTHERS = "absl flax optax orbax chex specjax tokenizers jinja2 pytest hypothesis"

# Whatever else is installed cannot be imported.
BLOCK = """
import importlib.abc, sys

class Blocked(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {names!r}:
            raise ModuleNotFoundError(name + " is blocked")

sys.meta_path.insert(0, Blocked())
"""


@pytest.mark.full
def test_every_op_has_an_example_that_runs_alone():
    text = (FOLDER / "README.md").read_text(encoding="utf-8")
    examples = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    for op in OPS:
        assert any(f"{op}(" in example for example in examples), op
    program = BLOCK.format(names=set(OTHERS.split())) + "\n".join(examples)
    subprocess.run([sys.executable, "-c", program], check=True, timeout=300)
