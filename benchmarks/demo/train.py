"""Trains the embedded pair: `python -m benchmarks.demo.train --work-folder /tmp/pair`.

The target learns the standard library's source and its tests; the draft learns the
library, then from the target, and last from it along longer texts. A run that was stopped continues
from its last checkpoint. The first three stages take five minutes on an NVIDIA H200,
and half a day on two cores.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import functools
import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax import Array
from tqdm import tqdm

from benchmarks.demo import corpus, learning, pair
from benchmarks.demo.checkpoint_files import save_model
from benchmarks.demo.continuing import continue_prompts
from specjax.demo import WEIGHTS_FOLDER
from specjax.models import llama
from specjax.models.base import Params
from specjax.training import optimizers

CHECKPOINT_EVERY = 100
LOG_EVERY = 50
OWN_TEXT_BATCHES = 10
OWN_TEXT_ROWS = 2048
OWN_TEXT_PROMPT_LENGTH = 32
OWN_TEXT_SEED = 5
MATRIX_RATE = 0.02  # of Muon
ADAM_SHARE = 0.25
WEIGHT_DECAY = 0.05


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stage:
    """One run of the optimiser; the rate falls to zero over its last `decay` steps."""

    name: str
    num_steps: int
    warmup: int
    decay: int
    scale: float = 1.0  # of the optimiser's rates
    rows: int  # windows of a step
    length: int  # tokens of a window
    seed: int  # of the order of the windows


TARGET_TEXT = Stage(
    name="target_text", num_steps=2845, warmup=100, decay=1707, rows=32, length=512, seed=0
)
DRAFT_TEXT = Stage(
    name="draft_text", num_steps=1500, warmup=100, decay=900, rows=64, length=256, seed=1
)
DRAFT_DISTILLED = Stage(
    name="draft_distilled",
    num_steps=3000,
    warmup=100,
    decay=1800,
    scale=0.5,
    rows=64,
    length=256,
    seed=2,
)

DRAFT_LONG = Stage(
    name="draft_long", num_steps=400, warmup=20, decay=300, scale=0.2, rows=4, length=768, seed=3
)


def run_stage(
    stage: Stage,
    work_folder: Path,
    params: Params,
    loss: Callable[[Params, Any], Array],
    batch_of: Callable[[int], Any],
    export: Callable[[Params], None],
) -> Params:
    """Returns the params after a stage, from its last checkpoint if there is one.

    Args:
      loss: loss(params, batch) -> f32[].
      batch_of: what a step sees; depends on the step alone.
      export: called after each checkpoint.
    """
    optimiser = optimizers.muon(
        MATRIX_RATE * stage.scale,
        stage.num_steps,
        stage.warmup,
        stage.decay,
        frozenset([pair.VOCAB_SIZE]),
        WEIGHT_DECAY,
        ADAM_SHARE,
    )
    state = {"params": params, "opt_state": optimiser.init(params)}
    checkpoints = ocp.CheckpointManager(
        (work_folder / stage.name).absolute(),
        options=ocp.CheckpointManagerOptions(max_to_keep=2),
    )
    done = checkpoints.latest_step() or 0
    if done:
        state = checkpoints.restore(done, args=ocp.args.StandardRestore(state))
    params, opt_state = state["params"], state["opt_state"]
    log = LossLog(work_folder / f"{stage.name}_loss.csv")
    steps = range(done, stage.num_steps)
    for step in (progress := tqdm(steps, desc=stage.name, mininterval=5)):
        params, opt_state, value = learning.update(
            loss, optimiser, params, opt_state, batch_of(step)
        )
        if (step + 1) % LOG_EVERY == 0 or step + 1 == stage.num_steps:
            log.add(step + 1, float(value))  # waits for the device
            progress.set_postfix(loss=f"{float(value):.3f}")
        if (step + 1) % CHECKPOINT_EVERY == 0 or step + 1 == stage.num_steps:
            state = {"params": params, "opt_state": opt_state}
            checkpoints.save(step + 1, args=ocp.args.StandardSave(state))
            checkpoints.wait_until_finished()
            export(params)
    checkpoints.close()
    return params


class LossLog:
    """Appends to a CSV file: steps, the loss of the last, and the time since the start."""

    def __init__(self, path: Path):
        self._path = path
        self._start_s = time.time()
        if not path.exists():
            self._append(["step", "loss", "seconds"])

    def add(self, step: int, loss: float) -> None:
        self._append([step, f"{loss:.4f}", f"{time.time() - self._start_s:.1f}"])

    def _append(self, row: list) -> None:
        with open(self._path, "a", newline="") as file:
            csv.writer(file).writerow(row)


def train(work_folder: Path, output: Path) -> None:
    """Runs all stages and writes both models to `output`."""
    files = corpus.source_files()
    library, tests = [file for file in files if not file.is_held_out], corpus.files_of_tests()
    tokenizer = corpus.train_tokenizer(files)
    library_ids, test_ids = corpus.encode(library, tokenizer), corpus.encode(tests, tokenizer)
    print(f"{len(library_ids)} tokens of the library, {len(test_ids)} of its tests")
    manifest = corpus.manifest(files, tests)
    (work_folder / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
    weights = work_folder / "weights"

    def windows_of(stage: Stage, token_ids: np.ndarray) -> Callable[[int], np.ndarray]:
        return lambda step: corpus.windows(token_ids, step, stage.rows, stage.length, stage.seed)

    target = run_stage(
        TARGET_TEXT,
        work_folder,
        llama.init(jax.random.key(0), pair.TARGET),
        lambda params, batch: learning.text_loss(params, pair.TARGET, batch),
        windows_of(TARGET_TEXT, np.concatenate([library_ids, test_ids])),
        lambda params: save_model(
            weights / "target", params, pair.TARGET, tokenizer, stored="int8"
        ),
    )
    save_draft = lambda params: save_model(
        weights / "draft", params, pair.DRAFT, tokenizer, stored="int8"
    )
    draft = run_stage(
        DRAFT_TEXT,
        work_folder,
        llama.init(jax.random.key(1), pair.DRAFT),
        lambda params, batch: learning.text_loss(params, pair.DRAFT, batch),
        windows_of(DRAFT_TEXT, library_ids),
        save_draft,
    )
    texts = own_text(target, library_ids, work_folder / "own_text.npy")

    for stage in (DRAFT_DISTILLED, DRAFT_LONG):
        draft = run_stage(
            stage,
            work_folder,
            draft,
            distillation_loss,
            functools.partial(half_own_text, stage, target, library_ids, texts),
            save_draft,
        )
    shutil.copytree(weights, output, dirs_exist_ok=True)
    shutil.copy(work_folder / "manifest.json", output)
    for log in work_folder.glob("*_loss.csv"):
        shutil.copy(log, output)


def distillation_loss(params: Params, batch: tuple[Params, Array]) -> Array:
    """Returns the loss of the draft along a batch of `half_own_text`."""
    target, token_ids = batch
    return learning.distillation_loss(params, pair.DRAFT, target, pair.TARGET, token_ids)


def half_own_text(
    stage: Stage, target: Params, library_ids: np.ndarray, texts: np.ndarray, step: int
) -> tuple[Params, np.ndarray]:
    """Returns the target and i32[rows, length]: half of it the library, half the target's own.

    Args:
      texts: i32[texts, length] by the target; several in a row fill a longer window.
    """
    rows = stage.rows // 2
    windows = corpus.windows(library_ids, step, rows, stage.length - 1, stage.seed)
    rng = np.random.default_rng([0, step])
    in_a_row = stage.length // texts.shape[1]
    own = texts[rng.choice(len(texts), rows * in_a_row, replace=False)]
    return target, np.concatenate([windows, own.reshape(rows, -1)])


def own_text(target: Params, token_ids: np.ndarray, path: Path) -> np.ndarray:
    """Returns i32[texts, length] by the target, half of it greedy, kept in `path`.

    Args:
      token_ids: i32[num_tokens], text whose pieces it goes on from.
    """
    if path.exists():
        return np.load(path).astype(np.int32)
    temperatures = jnp.tile(jnp.asarray([0.0, 0.8]), OWN_TEXT_ROWS // 2)
    length = OWN_TEXT_PROMPT_LENGTH
    rng = np.random.default_rng(OWN_TEXT_SEED)
    texts = []
    for index in tqdm(range(OWN_TEXT_BATCHES), desc="own_text"):
        starts = rng.integers(0, len(token_ids) - length - 1, OWN_TEXT_ROWS)
        prompts = token_ids[starts[:, None] + np.arange(length)]
        num_tokens = DRAFT_DISTILLED.length - length
        key = jax.random.key(1000 + index)
        texts.append(continue_prompts(target, pair.TARGET, prompts, num_tokens, temperatures, key))
    np.save(path, np.concatenate(texts).astype(np.uint16))
    return np.load(path).astype(np.int32)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work-folder", type=Path, required=True)
    parser.add_argument("--output", type=Path, default=WEIGHTS_FOLDER)
    arguments = parser.parse_args()
    arguments.work_folder.mkdir(parents=True, exist_ok=True)
    train(arguments.work_folder, arguments.output)


if __name__ == "__main__":
    main()
