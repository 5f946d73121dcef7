"""Trains the embedded pair: `python -m specjax.demo.train --work-folder /tmp/pair`.

Three stages: the draft learns the standard library's source; the target is grown from
it and goes on; the draft learns from the target. A run that was stopped continues
from its last checkpoint. About an hour on two cores.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
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
from tokenizers import Tokenizer
from tqdm import tqdm

from specjax.demo import WEIGHTS_FOLDER, corpus, learning, pair
from specjax.demo.checkpoint_files import save_model
from specjax.demo.continuing import choose_prompts, continue_prompts
from specjax.demo.growing import grow
from specjax.models import llama
from specjax.models.base import Params

SEED = 0
TOKENS_PER_STEP = 2048
CHECKPOINT_EVERY = 50
OWN_TEXT_BATCHES = 10
OWN_TEXT_ROWS = 64
OWN_TEXT_PROMPT_LENGTH = 32


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stage:
    """One run of the optimiser; the rate falls to zero over its last `decay` steps."""

    name: str
    num_steps: int
    warmup: int
    decay: int
    scale: float = 1.0  # of the optimiser's rates
    length: int = 256  # tokens of a window
    seed: int = 0  # of the order of the windows

    @property
    def rows(self) -> int:
        return TOKENS_PER_STEP // self.length


DRAFT_TEXT = Stage(name="draft_text", num_steps=1100, warmup=30, decay=0)
TARGET_TEXT = Stage(name="target_text", num_steps=180, warmup=10, decay=110, length=512)
TARGET_TEXT_AGAIN = Stage(
    name="target_text_again", num_steps=300, warmup=10, decay=200, length=512, seed=1
)
DRAFT_DISTILLED = Stage(
    name="draft_distilled", num_steps=250, warmup=5, decay=200, scale=0.5, seed=2
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
    optimiser = learning.optimizer(stage.num_steps, stage.warmup, stage.decay, stage.scale)
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
        log.add(step, float(value))
        progress.set_postfix(loss=f"{float(value):.3f}")
        if (step + 1) % CHECKPOINT_EVERY == 0 or step + 1 == stage.num_steps:
            state = {"params": params, "opt_state": opt_state}
            checkpoints.save(step + 1, args=ocp.args.StandardSave(state))
            checkpoints.wait_until_finished()
            export(params)
    checkpoints.close()
    return params


class LossLog:
    """Appends to a CSV file, one row per step: its loss and the time since the start."""

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
    training_files = [file for file in files if not file.is_held_out]
    tokenizer = corpus.train_tokenizer(files)
    train_ids = corpus.encode(training_files, tokenizer)
    print(f"{len(files)} files, {len(train_ids)} training tokens")
    (work_folder / "manifest.json").write_text(json.dumps(corpus.manifest(files), indent=1) + "\n")
    weights = work_folder / "weights"
    draft_key, target_key, _ = jax.random.split(jax.random.key(SEED), 3)
    larger = lambda draft: grow(draft, pair.DRAFT, pair.TARGET, target_key)
    save_draft = lambda params: save_model(weights / "draft", params, pair.DRAFT, tokenizer)
    save_target = lambda params: save_model(weights / "target", params, pair.TARGET, tokenizer)

    def windows_of(stage: Stage) -> Callable[[int], np.ndarray]:
        return lambda step: corpus.windows(train_ids, step, stage.rows, stage.length, stage.seed)

    def save_both(params: Params) -> None:
        save_draft(params)
        save_target(larger(params))

    draft = run_stage(
        DRAFT_TEXT,
        work_folder,
        llama.init(draft_key, pair.DRAFT),
        lambda params, batch: learning.text_loss(params, pair.DRAFT, batch),
        windows_of(DRAFT_TEXT),
        save_both,
    )
    target = larger(draft)
    target_loss = lambda params, batch: learning.text_loss(params, pair.TARGET, batch)
    for stage in (TARGET_TEXT, TARGET_TEXT_AGAIN):
        target = run_stage(stage, work_folder, target, target_loss, windows_of(stage), save_target)
    texts = own_text(target, training_files, tokenizer, work_folder / "own_text.npy")

    def half_own_text(step: int) -> tuple[Params, np.ndarray]:
        rows, length = DRAFT_DISTILLED.rows, DRAFT_DISTILLED.length
        windows = corpus.windows(train_ids, step, rows // 2, length - 1, DRAFT_DISTILLED.seed)
        rng = np.random.default_rng([SEED, step])
        own = texts[rng.choice(len(texts), rows - rows // 2, replace=False)]
        return target, np.concatenate([windows, own])

    run_stage(
        DRAFT_DISTILLED,
        work_folder,
        draft,
        lambda params, batch: learning.distillation_loss(
            params, pair.DRAFT, batch[0], pair.TARGET, batch[1]
        ),
        half_own_text,
        save_draft,
    )
    shutil.copytree(weights, output, dirs_exist_ok=True)
    shutil.copy(work_folder / "manifest.json", output)
    for log in work_folder.glob("*_loss.csv"):
        shutil.copy(log, output)


def own_text(
    target: Params, files: list[corpus.SourceFile], tokenizer: Tokenizer, path: Path
) -> np.ndarray:
    """Returns i32[texts, length] by the target, half of it greedy, kept in `path`."""
    if path.exists():
        return np.load(path)
    temperatures = jnp.tile(jnp.asarray([0.0, 0.8]), OWN_TEXT_ROWS // 2)
    num_tokens = DRAFT_DISTILLED.length - OWN_TEXT_PROMPT_LENGTH
    texts = []
    for index in tqdm(range(OWN_TEXT_BATCHES), desc="own_text"):
        prompts = choose_prompts(
            files, tokenizer, OWN_TEXT_ROWS, OWN_TEXT_PROMPT_LENGTH, SEED + index
        )
        key = jax.random.fold_in(jax.random.key(SEED), index)
        texts.append(continue_prompts(target, pair.TARGET, prompts, num_tokens, temperatures, key))
    np.save(path, np.concatenate(texts))
    return np.load(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work-folder", type=Path, required=True)
    parser.add_argument("--output", type=Path, default=WEIGHTS_FOLDER)
    arguments = parser.parse_args()
    arguments.work_folder.mkdir(parents=True, exist_ok=True)
    train(arguments.work_folder, arguments.output)


if __name__ == "__main__":
    main()
