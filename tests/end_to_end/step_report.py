"""Prints what XLA says of the steps of tiny models, and the tokens they give, as JSON.

Run it before and after a change that must not change a computation, and compare:

    PYTHONPATH=BEFORE:tests python tests/end_to_end/step_report.py > before.json
    PYTHONPATH=AFTER:tests python tests/end_to_end/step_report.py > after.json
"""

import json
import os
import sys
import tempfile

os.environ["SPECJAX_CACHE_DIR"] = tempfile.mkdtemp()
# Buffers are assigned before machine code is made: the same figures, in half the time.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")

from helpers import tiny_gpt2, tiny_llama

import specjax
from specjax.decode.executables import Executables

ENGINE = specjax.EngineConfig(
    max_rows=2, row_buckets=(), max_context=64, burst_steps=4, page_size=8, num_pages=32
)
DRAFTERS = {
    "none": (0, {}),
    "ngram": (3, {"method": "ngram"}),
    "draft model": (3, {}),
    "tree": (3, {"speculative_token_tree": (2, 1, 1)}),
}
PROMPTS = ([5, 6, 7, 5, 6], [9, 8, 9, 8, 9, 8, 9])


def figures(compiled):
    """Returns the numbers of memory_analysis() and cost_analysis()."""
    memory = compiled.memory_analysis()
    names = ("argument", "output", "temp", "alias")
    bytes_of = {name: int(getattr(memory, f"{name}_size_in_bytes")) for name in names}
    costs = compiled.cost_analysis()
    costs = costs[0] if isinstance(costs, list) else costs
    return {"memory": bytes_of, "costs": {name: costs[name] for name in sorted(costs)}}


def report(make, drafter, rule):
    """Returns the figures of every step of a short generation, and its tokens."""
    depth, config = DRAFTERS[drafter]
    found, make_step = {}, Executables._make

    def record(self, name, step, *inputs, **options):
        make_step(self, name, step, *inputs, **options)
        found[f"{type(self._steps.drafter).__name__} {step.key}"] = self.runs[name]

    target = make(0)
    draft = make(1) if drafter in ("draft model", "tree") else None
    Executables._make = record
    try:
        out = specjax.generate(
            target,
            PROMPTS,
            drafter=draft,
            sampling=specjax.SamplingParams(max_tokens=9, seed=3, temperature=0.8),
            speculative_config={
                "num_speculative_tokens": depth,
                "policy": "fixed",
                "verification": rule,
                **config,
            },
            engine=ENGINE,
        )
        tokens = [list(map(int, completion.token_ids)) for completion in out]
    finally:
        Executables._make = make_step
    return {"tokens": tokens, "steps": {name: figures(found[name]) for name in sorted(found)}}


def main():
    families = {"llama": tiny_llama, "gpt2": tiny_gpt2}
    reports = {}
    for family, make in families.items():
        for drafter in DRAFTERS:
            for rule in ("seeded", "rejection"):
                name = f"{family}, {drafter}, {rule}"
                print(name, file=sys.stderr, flush=True)
                reports[name] = report(make, drafter, rule)
    json.dump(reports, sys.stdout, indent=1, sort_keys=True)


if __name__ == "__main__":
    main()
