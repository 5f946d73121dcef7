"""K = 0 for 200 tokens in mid-text: what is accepted afterwards is what it would have been anyway.

Where a head's state is a function of the text alone, this holds exactly: the run with the phase and
one without it meet at a root, and from there on each step accepts the same number of drafts.
"""

import dataclasses

import pytest
from helpers import tiny_llama
from test_heads import HEADS, PARALLEL, head

import specjax
from specjax.config.engine import EngineConfig
from specjax.config.sampling import SamplingParams
from specjax.decode import burst
from specjax.decode.decoder import shared_decoder
from specjax.policy.interface import Decision

K, BEFORE, PHASE, AFTER = 3, 60, 200, 100  # tokens of the text
SHORT_PHASES = 12
PROMPT = [7, 8, 9, 7, 8]
# The target and a head draw with the same noise, so that they often agree; a head that reads a
# wrong state agrees elsewhere.
SAMPLING = SamplingParams(
    temperature=1.5, max_tokens=BEFORE + PHASE + AFTER + 8, ignore_eos=True, seed=3
)
ENGINE = EngineConfig(page_size=16, max_rows=1, burst_steps=8, max_context=400)
IN_THE_GATE = ("eagle3", "p_eagle", "dflash_captured")


@dataclasses.dataclass
class Step:
    """What one step of the only row did."""

    root: int  # tokens of the text before it
    k: int
    num_committed: int
    num_accepted: int


class Scripted:
    """K for so many steps, and then another; notes what each step did."""

    max_speculative_tokens = K
    chooses_rows = False

    def __init__(self, *script):
        self._script = list(script)  # of (steps, K)
        self.steps: list[Step] = []

    def choose(self, load):
        left, k = self._script[0] if self._script else (ENGINE.burst_steps, K)
        num_steps = min(left, ENGINE.burst_steps)
        if self._script:
            self._script[0] = (left - num_steps, k)
            if left == num_steps:
                del self._script[0]
        return Decision(num_speculative_tokens=k, reason="script", num_steps=num_steps)

    def observe(self, outcome):
        k = outcome.decision.num_speculative_tokens
        for committed, accepted in zip(outcome.num_committed, outcome.num_accepted, strict=True):
            root = self.steps[-1].root + self.steps[-1].num_committed if self.steps else 0
            self.steps.append(Step(root, k, int(committed[0]), int(accepted[0])))


def run(target, name, *script):
    """Returns the tokens of a text, and what each step did."""
    policy = Scripted(*script)
    out = []
    with specjax.Engine(
        target, drafter=head(name), num_speculative_tokens=K, engine=ENGINE, policy=policy
    ) as engine:
        engine.add(PROMPT, SAMPLING)
        while engine.has_work:
            out += [token for chunk in engine.step() for token in chunk.token_ids]
    return out, policy.steps


@pytest.fixture(scope="module")
def target():
    return tiny_llama(0)


@pytest.fixture(scope="module")
def plain(target):
    return specjax.generate(target, [PROMPT], sampling=SAMPLING)[0].token_ids


def first_from(steps, root):
    """Returns the number of the first step whose root is at least `root`."""
    return next(i for i, step in enumerate(steps) if step.root >= root)


def check(target, plain, name):
    """Raises AssertionError unless a phase changes neither the text nor what is accepted later.

    Short phases follow the long one: every other step is made of plain ones.
    """
    tokens, without = run(target, name)
    assert tokens == plain
    begin = first_from(without, BEFORE)
    end = first_from(without, without[begin].root + PHASE)
    num_plain = without[end].root - without[begin].root
    every_other = range(end, end + 2 * SHORT_PHASES, 2)
    script = [(begin, K), (num_plain, 0)]
    for i in every_other:
        script += [(1, K), (without[i + 1].num_committed, 0)]
    tokens, steps = run(target, name, *script)
    assert tokens == plain
    assert steps[:begin] == without[:begin]
    assert [step.k for step in steps[begin : begin + num_plain]] == [0] * num_plain
    after = [step for step in steps[begin + num_plain :] if step.k]
    expected = [without[i] for i in every_other] + without[end + 2 * SHORT_PHASES :]
    assert after == expected, "other drafts are accepted after the phase"
    assert sum(step.num_accepted for step in after) > 1


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.full if name in IN_THE_GATE else pytest.mark.slow)
        for name in (*HEADS, PARALLEL)
    ],
)
def test_acceptance_after_a_phase_is_that_without_one(target, plain, name):
    check(target, plain, name)


@pytest.mark.slow  # test_absorb shows the same mistake in the gate
@pytest.mark.parametrize("name", HEADS)
def test_a_phase_that_a_head_is_not_told_of_shows(target, plain, monkeypatch, name):
    shared_decoder.cache_clear()
    lost = lambda spec, params, state, waiting: state
    monkeypatch.setattr(burst, "absorb_waiting", lost)
    try:
        with pytest.raises(AssertionError, match="other drafts are accepted"):
            check(target, plain, name)
    finally:
        shared_decoder.cache_clear()
