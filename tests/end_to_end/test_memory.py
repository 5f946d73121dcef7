"""An engine that is given bytes: its pages fit beside weights and steps, and texts stay."""

import dataclasses

import jax
import numpy as np
import pytest
from helpers import ENGINE

import specjax
from specjax.config.sampling import SamplingParams
from specjax.planning.workspace_fit import BucketMemory, StepShape, combined_bytes

pytestmark = pytest.mark.full

SAMPLING = SamplingParams(temperature=0.8, max_tokens=48, ignore_eos=True, seed=5)
BYTES_OF_PAGES = 180_000  # beside weights and steps: for fewer tokens than rows can have


def prompts():
    rng = np.random.default_rng(7)
    return [rng.integers(0, 61, length).tolist() for length in (64, 61, 58, 55)]


def bytes_of(tree):
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


def run_memory(run):
    """Returns what XLA says of an executable; which one is no matter."""
    any_bucket = StepShape(kind="burst", rows=1, tokens=1)
    return BucketMemory.of(any_bucket, run.memory_analysis())


@pytest.fixture(scope="module")
def tight(target, draft):
    """Returns a config with so many bytes that few pages fit, from what steps need."""
    roomy = dataclasses.replace(ENGINE, memory_bytes=2 * 10**9)
    engine = specjax.Engine(target, drafter=draft, num_speculative_tokens=3, engine=roomy)
    with engine:
        memory = engine._setup.memory
    resident = roomy.memory_bytes - memory.free_bytes
    needed = resident + memory.workspace_bytes + BYTES_OF_PAGES
    return dataclasses.replace(ENGINE, memory_bytes=needed)


def test_all_that_an_engine_takes_lies_within_its_bytes(target, draft, tight):
    plain = [
        specjax.generate(target, prompt, sampling=SAMPLING, engine=ENGINE)[0].token_ids
        for prompt in prompts()
    ]
    # So few pages that their ends are a large part: which is said, and kept.
    with pytest.warns(UserWarning, match="page ends and the largest prefill ask for"):
        engine = specjax.Engine(target, drafter=draft, num_speculative_tokens=3, engine=tight)
    with engine:
        ids = [engine.add(prompt, SAMPLING) for prompt in prompts()]
        texts = {}
        while engine.has_work:
            for chunk in engine.step():
                texts.setdefault(chunk.prompt_index, []).extend(chunk.token_ids)
        plan, decoder = engine._setup.memory, engine._loop.decoder
        assert plan is not None
        assert decoder.sizes.num_pages <= plan.num_pages
        # Fewer than rows can have: it is memory that bounds them.
        assert plan.num_pages < ENGINE.max_rows * ENGINE.max_context // 8
        steps = [run_memory(run) for run in decoder.executables.runs.values()]
        held = bytes_of([engine._loop.params, engine._loop._run.device_state])
        assert held + combined_bytes(steps) <= tight.memory_bytes
        decisions = engine.stats.decisions
    assert [texts[i] for i in ids] == plain
    gated = [d for d in decisions if d.reason == "memory gate"]
    assert gated
    assert all(d.num_speculative_tokens == 0 for d in gated)
    assert any(d.num_speculative_tokens > 0 for d in decisions)
