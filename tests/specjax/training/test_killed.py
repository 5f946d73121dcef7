"""Training in a process that is killed, and the same call again: bits of a run that was not."""

import random
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
from helpers import tiny_llama

from specjax.training import data
from specjax.training.trainer import TrainingConfig, train

CONFIG = TrainingConfig(depth=2, rows=2, steps=24, eval_every=4, checkpoint_every=2, warmup=1)
HEADS = {
    "eagle3": {"aux_layers": (1, 2)},
    "dflash": {"block_size": 4, "num_layers": 1},
    "dspark": {"block_size": 4, "num_layers": 1, "markov_rank": 8},
}
PROGRAM = """
import sys
sys.path[:0] = ["tests", "tests/specjax/training"]
import test_killed
test_killed.run(sys.argv[1], sys.argv[2], on_look=lambda look: print(look.step, flush=True))
"""


def run(kind, folder=None, on_look=None):
    """Trains a head of a tiny target; returns its weights and looks."""
    target, rng = tiny_llama(0), np.random.default_rng(0)
    vocab = target.config.vocab_size
    texts = [(rng.integers(0, vocab, 12).tolist(), 0) for _ in range(12)]
    text = data.from_token_ids(texts, 12)
    options = {"config": CONFIG, "head": HEADS[kind], "folder": folder, "on_look": on_look}
    trained = train(target, text, kind, **options)
    looks = [(look.step, look.training_loss, look.loss) for look in trained.looks]
    return trained.drafter.params, looks


def killed(kind, folder, at, wait_s):
    """Trains in another process and kills it some seconds after its look of step `at`; returns
    whether it was in the middle."""
    command = [sys.executable, "-c", PROGRAM, kind, str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if int(line) >= at:
                break
        time.sleep(wait_s)
        process.send_signal(signal.SIGKILL)
        return process.wait() == -signal.SIGKILL


def check(kind, folder, moments):
    """Asserts that a run which is killed at each of these moments ends as one that is not."""
    params, looks = run(kind)
    kills = sum(killed(kind, folder, at, wait_s) for at, wait_s in moments)
    again, same = run(kind, folder)
    assert kills
    assert same == looks
    jax.tree.map(np.testing.assert_array_equal, again, params)


@pytest.mark.full
@pytest.mark.parametrize("kind", HEADS)
def test_a_run_that_is_killed_ends_with_the_same_bits(kind, tmp_path):
    check(kind, tmp_path, [(4, 0.0), (12, 0.01)])


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("kind", HEADS)
def test_a_run_that_is_killed_often_ends_with_the_same_bits(kind, seed, tmp_path):
    draw = random.Random(seed)
    steps = sorted(draw.choices(range(0, 24, 4), k=3))
    check(kind, tmp_path, [(at, draw.choice((0.0, 0.003, 0.03, 0.2))) for at in steps])
