"""A training run's changing part, and its checkpoints in a folder."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from specjax.models.base import Params
from specjax.training.figures import Figures
from specjax.training.learning import LearningState

RUN_FILE, STEPS = "run.json", "steps"


@dataclasses.dataclass(frozen=True)
class Look:
    """What held-out text said after some steps.

    Attributes:
      training_loss: mean since the look before; None before any step.
      loss: the objective along held-out text: what is made small.
      seconds: since this process began or went on with the run.
    """

    step: int
    training_loss: float | None
    loss: float
    figures: Figures
    seconds: float


@dataclasses.dataclass
class RunMemory:
    """A run's changing part: the state, the best weights so far, and the looks."""

    state: LearningState
    best: Params
    looks: list[Look]
    loss_sum: float = 0.0  # since the last look
    loss_count: int = 0
    num_skipped: int = 0  # steps whose loss was not finite

    @classmethod
    def of(cls, state: LearningState) -> RunMemory:
        return cls(state, jax.tree.map(jnp.copy, state.params), [])

    @property
    def step(self) -> int:
        return int(self.state.step)

    def is_stale(self, patience: int | None) -> bool:
        """Whether the last `patience` looks were all worse than one before."""
        losses = [look.loss for look in self.looks]
        return patience is not None and len(losses) - 1 - int(np.argmin(losses)) >= patience


class RunStore:
    """Checkpoints of a run, and the looks, in a folder; without a folder nothing is kept."""

    def __init__(self, folder: str | os.PathLike[str] | None, said: dict[str, Any]):
        self._folder = None if folder is None else Path(folder).expanduser().absolute()
        self._manager: ocp.CheckpointManager | None = None
        if self._folder is None:
            return
        if self._folder.exists() and not self._folder.is_dir():
            raise ValueError(f"{self._folder} is a file; give a folder for checkpoints.")
        self._folder.mkdir(parents=True, exist_ok=True)
        _check_run(self._folder / RUN_FILE, said)
        self._manager = ocp.CheckpointManager(
            self._folder / STEPS, options=ocp.CheckpointManagerOptions(max_to_keep=2)
        )

    def restore(self, memory: RunMemory) -> RunMemory:
        """Returns the memory of the last checkpoint; the one given where there is none."""
        if self._manager is None or (step := self._manager.latest_step()) is None:
            return memory
        like = _stored(memory)
        kept = self._manager.restore(
            step,
            args=ocp.args.Composite(
                arrays=ocp.args.StandardRestore(like), looks=ocp.args.JsonRestore()
            ),
        )
        arrays, beside = kept["arrays"], kept["looks"]
        key = jax.random.wrap_key_data(arrays["key"])
        state = LearningState(arrays["params"], arrays["opt_state"], arrays["step"], key)
        looks = [_look_of(each) for each in beside["looks"]]
        counts = [beside[name] for name in ("loss_sum", "loss_count", "num_skipped")]
        return RunMemory(state, arrays["best"], looks, *counts)

    def save(self, memory: RunMemory) -> None:
        if self._manager is None:
            return
        looks = {
            "looks": [dataclasses.asdict(look) for look in memory.looks],
            "loss_sum": memory.loss_sum,
            "loss_count": memory.loss_count,
            "num_skipped": memory.num_skipped,
        }
        self._manager.save(
            memory.step,
            args=ocp.args.Composite(
                arrays=ocp.args.StandardSave(_stored(memory)), looks=ocp.args.JsonSave(looks)
            ),
        )
        self._manager.wait_until_finished()  # the state is donated to the next step

    def close(self) -> None:
        if self._manager is not None:
            self._manager.close()


def _stored(memory: RunMemory) -> dict[str, Any]:
    state = memory.state
    return {
        "params": state.params,
        "opt_state": state.opt_state,
        "step": state.step,
        "key": jax.random.key_data(state.key),
        "best": memory.best,
    }


def _look_of(stored: Mapping[str, Any]) -> Look:
    found: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in stored["figures"].items()
    }
    return Look(**{**stored, "figures": Figures(**found)})


def _check_run(path: Path, said: dict[str, Any]) -> None:
    """Writes what a run depends on, or compares it with what is there."""
    if path.exists():
        before = json.loads(path.read_text(encoding="utf-8"))
        if before.get("figures") != said.get("figures"):
            raise ValueError(
                f"{path.parent} holds a run of another version of specjax, in which acceptance "
                "lengths meant something else; give another folder."
            )
        if before != said:
            names = [name for name in said if before.get(name) != said[name]]
            raise ValueError(
                f"{path.parent} holds a run with another {', '.join(names)}; give another folder, "
                "or the same arguments to go on with it."
            )
        return
    path.write_text(json.dumps(said, indent=1) + "\n", encoding="utf-8")
