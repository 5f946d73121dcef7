"""train(): a drafter from text, with checkpoints that resume to the bit."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import time
import warnings
from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from specjax.checkpoints.pretrained import save_pretrained
from specjax.config.checks import is_number
from specjax.config.names import OptimizerName, TrainedKind
from specjax.drafters.spec import ModelDrafter
from specjax.heads.loading import LoadedDrafter, load_drafter
from specjax.models.base import Model, Params
from specjax.runtime.progress import Progress, Report
from specjax.runtime.stack_level import of_the_caller
from specjax.training import figures, learning, optimizers, options
from specjax.training.data import TrainingText
from specjax.training.drafts import Kind
from specjax.training.fingerprints import weights_fingerprint
from specjax.training.kinds import kind_of, kind_of_spec
from specjax.training.learning import Learner
from specjax.training.objective import Objective, check_is_objective, value_of
from specjax.training.run_store import Look, RunMemory, RunStore
from specjax.training.texts import TextBatch

RATES = {"muon": 0.02, "adamw": 1e-3}  # peaks, where none is given
FIGURES = "by step"  # what the acceptance lengths of looks mean; runs of another are refused
DATA = "data"  # the axis of a mesh that texts are split over
LEAST_LOOKED = 64  # held-out texts that every look takes, where there are as many


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """How long a drafter is trained, and on what.

    Attributes:
      depth: draft tokens per root that it is trained on.
      rows: texts of a step; over a mesh a multiple of its data axis.
      steps: updates.
      optimizer: "muon", which learns several times faster from nothing, or "adamw".
      learning_rate: peak; None: 0.02 of Muon, beside which embeddings and norms learn by Adam at a
        fifth of it, or 0.001 of AdamW; a tenth of these where a trained drafter goes on (`start`).
      warmup, decay: steps at the beginning and at the end in which the rate rises and falls; decay
        None: three fifths of the steps.
      objective: the losses.
      eval_every: steps between looks at held-out text.
      patience: such looks in a row without a lower loss after which training stops; None: never.
      checkpoint_every: steps.
      seed: of the first weights, the order of texts, and what is drawn.
    """

    depth: int = 4
    rows: int = 8
    steps: int = 1000
    optimizer: OptimizerName = "muon"
    learning_rate: float | None = None
    warmup: int = 20
    decay: int | None = None
    objective: Objective = dataclasses.field(default_factory=Objective)
    eval_every: int = 100
    patience: int | None = None
    checkpoint_every: int = 100
    seed: int = 0

    def __post_init__(self):
        least = dict.fromkeys(("depth", "rows", "steps", "eval_every", "checkpoint_every"), 1)
        least |= {"warmup": 0, "decay": 0, "patience": 1}
        learning.check_whole(vars(self), least, may_be_none=("decay", "patience"))
        if self.optimizer not in RATES:
            raise ValueError(
                f"optimizer={self.optimizer!r} must be one of {', '.join(RATES)}; any other of "
                "optax is an argument of train()."
            )
        rate = self.learning_rate
        if rate is not None and (not is_number(rate) or not 0 < rate < math.inf):
            raise ValueError(f"learning_rate={rate!r} must be a number above 0, or None.")
        learning.check_seed(self.seed)
        check_is_objective(self.objective)

    def resolved(self) -> dict[str, Any]:
        """Returns the fields that may be None, as they count."""
        rate = RATES[self.optimizer] if self.learning_rate is None else self.learning_rate
        decay = self.steps * 3 // 5 if self.decay is None else self.decay
        return {"learning_rate": rate, "decay": decay}

    def going_on(self) -> TrainingConfig:
        """Returns the config for a drafter that has been trained: a tenth of the usual rate."""
        if self.learning_rate is not None:
            return self
        return dataclasses.replace(self, learning_rate=RATES[self.optimizer] / 10)

    def transformation(self, vocab_sizes: Collection[int]) -> optax.GradientTransformation:
        """Returns the optimiser.

        Args:
          vocab_sizes: of the target and of the drafter.
        """
        rate, decay = self.resolved().values()
        if self.optimizer == "adamw":
            return optimizers.adamw(rate, self.steps, self.warmup, decay)
        return optimizers.muon(rate, self.steps, self.warmup, decay, frozenset(vocab_sizes))


@dataclasses.dataclass(frozen=True)
class Trained:
    """A trained drafter.

    Attributes:
      drafter: for `generate`, `save_pretrained` and all that takes a drafter: the weights with the
        lowest loss on held-out text.
      looks: at held-out text, in order; the first is before training.
      facts: for the card of a saved folder, JSON-like.
      target: that it was trained for.
    """

    drafter: LoadedDrafter
    looks: tuple[Look, ...]
    facts: dict[str, Any]
    target: Model = dataclasses.field(repr=False)

    def save(self, folder: str | os.PathLike[str], **options: Any) -> None:
        """Writes the drafter in a published format, with its facts on a head's card.

        Args:
          options: of `specjax.save_pretrained`, as naming and max_file_bytes.
        """
        if isinstance(self.drafter.spec, ModelDrafter):
            save_pretrained(self.drafter, folder, **options)
        else:
            save_pretrained(self.drafter, folder, target=self.target, card=self.facts, **options)

    @property
    def best(self) -> Look:
        """The look with the lowest loss."""
        return min(self.looks, key=lambda look: look.loss)


def train(
    target: Model,
    text: TrainingText,
    kind: TrainedKind = "eagle3",
    *,
    config: TrainingConfig | None = None,
    head: Mapping[str, Any] | None = None,
    held_out: TrainingText | float = 0.05,
    start: Model | LoadedDrafter | None = None,
    folder: str | os.PathLike[str] | None = None,
    optimizer: optax.GradientTransformation | None = None,
    minutes: float | None = None,
    progress: bool | Report | None = None,
    on_look: Callable[[Look], None] | None = None,
) -> Trained:
    """Trains a drafter for a target, which stays as it is.

    The target's hidden states are computed once per batch. Over a mesh the target stays where its
    weights are, texts are split over the axis "data", and every device holds the drafter.

    Args:
      target: its weights may lie on a mesh.
      text: what the drafter learns along; `text_of_target` makes the best.
      kind: "eagle3", "p-eagle", "eagle", "mtp", "dflash", "dspark", "medusa", "mlp_speculator" or
        "draft_model".
      head: options of the kind, as num_layers; each module `specjax.training.<kind>` lists its own.
      held_out: text to look at, or the fraction of `text` that is kept for it. Of more than
        LEAST_LOOKED texts a look takes a quarter of the texts learned between two looks, spread
        evenly, so that looking is a small share of the time.
      start: a draft model or a head that goes on learning, of any kind that can be trained; `kind`
        and `head` are then its own, and are left out.
      folder: of checkpoints. A call that was stopped goes on from the last one there, and ends with
        the same weights to the bit. Of an `optimizer` of your own, give the same again.
      optimizer: any of optax that updates by gradients and weights alone, over the drafter's
        weights in float32; None: the config's.
      minutes: after which this call ends, between two steps, with a last look and a checkpoint; a
        further call goes on from there. That look counts as any other: it may choose the weights.
        None: config.steps alone end it.
      progress: as for `generate`.
      on_look: called after each look at held-out text.

    Returns:
      The drafter, in the dtype of the target's weights, and what held-out text said of it.

    Raises:
      TypeError: an argument is of another type.
      ValueError: the kind or an option does not exist, the text is of another vocabulary or longer
        than the target's context, the kind cannot draft so deep, the optimizer needs more than
        gradients and weights, the target gives NaN, or the folder holds the run of other arguments.
    """
    config = TrainingConfig() if config is None else config
    _check_types(target, text, config, head, held_out)
    if minutes is not None and not (is_number(minutes) and minutes > 0):
        raise ValueError(f"minutes={minutes!r} must be a number above 0, or None.")
    is_text = isinstance(held_out, TrainingText)
    training, looked_at = (text, held_out) if is_text else text.split(held_out)
    looked_at = _sample(looked_at, config)
    for each in (training, looked_at):
        _check_text(each, target, config)
    learner, given = _learner(target, kind, config, dict(head or {}), start)
    config = config if given is None else config.going_on()
    sizes = {target.config.vocab_size, getattr(learner.config, "vocab_size", 0)}
    used = config.transformation(sizes) if optimizer is None else optimizer
    learning.check_is_optimizer(used)
    run = _Run(learner, config, used, target, training, looked_at)
    memory = run.begin(given)
    said = run.said(given, "default" if optimizer is None else "given")
    bar = Progress(progress)
    with contextlib.closing(bar), contextlib.closing(RunStore(folder, said)) as store:
        memory = store.restore(memory)
        seconds = math.inf if minutes is None else 60.0 * minutes
        run.steps(memory, store, bar.report, on_look, seconds)
    return run.trained(memory, said)


def _check_types(target: Any, text: Any, config: Any, head: Any, held_out: Any) -> None:
    """Raises TypeError for arguments of `train` of another type."""
    if not isinstance(target, Model) or not isinstance(text, TrainingText):
        raise TypeError(
            f"target is {target!r:.100} and text {text!r:.100}; expected what load_model returns, "
            "and a TrainingText, as of training.from_files."
        )
    if not isinstance(config, TrainingConfig):
        raise TypeError(f"config is {config!r:.100}; expected a TrainingConfig.")
    if head is not None and not isinstance(head, Mapping):
        raise TypeError(f"head is {head!r:.100}; expected a mapping of options, as num_layers.")
    if not isinstance(held_out, TrainingText) and not is_number(held_out):
        raise TypeError(
            f"held_out is {held_out!r:.100}; expected a TrainingText, or a number above 0 and "
            "below 1."
        )


def check(
    target: Model, kind: TrainedKind, config: TrainingConfig, head: Mapping[str, Any] | None = None
) -> None:
    """Raises the errors of `train` that need no text."""
    _learner(target, kind, config, dict(head or {}))


@dataclasses.dataclass(frozen=True)
class _Run:
    """What is static about a run; `RunMemory` is what changes."""

    learner: Learner
    config: TrainingConfig
    optimizer: optax.GradientTransformation
    target: Model
    training: TrainingText
    looked_at: TrainingText

    def begin(self, given: Params | None = None) -> RunMemory:
        """Returns the memory before the first step.

        Args:
          given: weights to begin with, in float32; None: new ones.
        """
        ids, seed, params = None, self.config.seed, self.target.params
        if getattr(self.learner.config, "maps_vocabulary", False):
            # A vocabulary that is a part has the most frequent tokens of what is learned.
            counts = self.training.counts(self.learner.target.vocab_size)
            ids = jnp.asarray(options.frequent_tokens(counts, self.learner.config.vocab_size))
        state = learning.begin(self.learner, self.optimizer, params, seed, ids, given)
        learning.check_optimizer(self.optimizer, learning.split(state.params)[0])
        return RunMemory.of(jax.device_put(state, learning.place_beside(params)))

    def steps(
        self,
        memory: RunMemory,
        store: RunStore,
        report: Report,
        on_look: Callable[[Look], None] | None,
        seconds: float,
    ) -> None:
        """Trains until the last step, for so many seconds, or until held-out text says no more."""
        config, start = self.config, time.perf_counter()

        def look() -> None:
            found = self.look(memory, report, time.perf_counter() - start)
            if on_look is not None:
                on_look(found)

        if not memory.looks:
            report("compiling the look at held-out text", 0, 0)
            look()
        is_late = False
        report("compiling the update", 0, 0)
        while memory.step < config.steps and not memory.is_stale(config.patience) and not is_late:
            step = memory.step
            self.update(memory)
            step += 1
            report("training", step, config.steps)
            is_late = time.perf_counter() - start >= seconds
            if step % config.eval_every == 0 or step == config.steps or is_late:
                look()
            has_ended = step == config.steps or memory.is_stale(config.patience) or is_late
            if step % config.checkpoint_every == 0 or has_ended:
                store.save(memory)

    def update(self, memory: RunMemory) -> None:
        """Takes a step. Warns of the first whose loss is not finite, which changes nothing."""
        batch = self.training.batch(memory.step, self.config.rows, self.config.seed)
        params = self.target.params
        with learning.traced_beside(params):
            memory.state, value = learning.update(
                self.learner, self.optimizer, memory.state, params, self.placed(batch)
            )
        loss = float(value)
        if math.isfinite(loss):
            memory.loss_sum += loss
            memory.loss_count += 1
            return
        if not memory.num_skipped:
            warnings.warn(
                f"the loss of step {memory.step} is {loss}: the step changes nothing. A lower "
                "learning_rate may help.",
                stacklevel=of_the_caller(),
            )
        memory.num_skipped += 1

    def look(self, memory: RunMemory, report: Report, seconds: float) -> Look:
        """Returns what held-out text says of the weights, and notes it; keeps the best ones.

        Args:
          seconds: since this process began or went on with the run.
        """
        total, params = None, self.target.params
        for index, batch in enumerate(self.looked_at.in_order(self.config.rows)):
            placed = self.placed(batch)
            with learning.traced_beside(params):
                found = learning.evaluate(self.learner, memory.state.params, params, placed)
            total = figures.add(total, found)
            num_seen = min((index + 1) * self.config.rows, len(self.looked_at))
            report("looking at held-out text", num_seen, len(self.looked_at))
        assert total is not None
        value = float(value_of(self.learner.objective, total))
        if not memory.looks and not math.isfinite(value):
            raise ValueError(
                f"the loss along held-out text is {value} before the first step: the target or "
                "the drafter gives numbers that are not finite. Check the target's weights."
            )
        if all(value < look.loss for look in memory.looks):
            memory.best = jax.tree.map(jnp.copy, memory.state.params)
        loss = memory.loss_sum / memory.loss_count if memory.loss_count else None
        look = Look(memory.step, loss, value, figures.figures_of(total), seconds)
        memory.looks.append(look)
        memory.loss_sum, memory.loss_count = 0.0, 0
        return look

    def placed(self, batch: TextBatch) -> TextBatch:
        """Returns a batch where the target is."""
        sharding = learning.place_beside(self.target.params, DATA)
        return TextBatch(*(jax.device_put(each, sharding) for each in batch))

    def said(self, given: Params | None, optimizer: str) -> dict[str, Any]:
        """Returns what a run depends on, JSON-like: a folder goes on with the same alone."""
        fields = json.loads(json.dumps(dataclasses.asdict(self.config)))
        for name in ("checkpoint_every", "patience"):  # which change no weight
            del fields[name]
        return {
            "kind": self.learner.kind.name,
            "head": repr(self.learner.config),
            "start": None if given is None else weights_fingerprint(given),
            "target": f"{self.learner.target!r} {weights_fingerprint(self.target.params)}",
            "config": fields,
            "optimizer": optimizer,
            "figures": FIGURES,
            "text": self.training.fingerprint,
            "held_out": self.looked_at.fingerprint,
        }

    def trained(self, memory: RunMemory, said: dict[str, Any]) -> Trained:
        """Returns the drafter with the best weights, and what there is to say of it."""
        learner, target = self.learner, self.target
        params = learning.cast(memory.best, learner.dtype)
        name = f"{learner.kind.name} for {target.name or 'a target'}"
        spec = learner.kind.spec(learner.config)
        is_model = isinstance(spec, ModelDrafter)  # which is saved with its tokenizer
        drafter = LoadedDrafter(name, spec, params, (), target.tokenizer if is_model else None)
        trained = Trained(drafter, tuple(memory.looks), {}, target)
        config = said["config"] | self.config.resolved()
        if said["optimizer"] == "given":  # which leaves these unused
            config["optimizer"] = "given"
            for unused in ("learning_rate", "warmup", "decay"):
                del config[unused]
        facts = {
            "target": target.name,
            "kind": learner.kind.name,
            "text": self.training.source,
            "training_tokens": self.training.num_tokens,
            "held_out_tokens": self.looked_at.num_tokens,
            "steps": memory.step,
            "step_of_weights": trained.best.step,
            "steps_skipped": memory.num_skipped,
            "config": config,
            "held_out": trained.best.figures.as_json(),
            "jax": jax.__version__,
        }
        return dataclasses.replace(trained, facts=facts)


def _sample(text: TrainingText, config: TrainingConfig) -> TrainingText:
    """Returns the held-out texts that a look takes."""
    most = max(LEAST_LOOKED, config.rows * config.eval_every // 4)
    if len(text) <= most:
        return text
    return text.take([i * len(text) // most for i in range(most)])


def _learner(
    target: Model,
    kind_name: str,
    config: TrainingConfig,
    head: dict[str, Any],
    start: Model | LoadedDrafter | None = None,
) -> tuple[Learner, Params | None]:
    """Returns what is static about a run, and the weights that it begins with, if given."""
    if start is None:
        kind, given = kind_of(kind_name), None
        own = kind.configure(target.config, head)
    else:
        kind, own, given = _given(target, start, head)
    learner = Learner(
        kind=kind,
        config=own,
        target=target.config,
        depth=config.depth,
        objective=config.objective,
        dtype=learning.compute_dtype(target.params),
    )
    return learner, given


def _given(
    target: Model, start: Model | LoadedDrafter, head: dict[str, Any]
) -> tuple[Kind, Any, Params]:
    """Returns kind, config and float32 weights of a drafter that goes on learning."""
    if head:
        raise ValueError(
            f"head={head!r:.200} is for a new drafter, and `start` has sizes of its own; leave one "
            "of them out."
        )
    drafter = load_drafter(start, target)
    kind, own = kind_of_spec(drafter.spec)
    copies = jax.tree.map(lambda leaf: jnp.array(leaf), drafter.params)
    return kind, own, learning.cast(copies, jnp.float32)


def _check_text(text: TrainingText, target: Model, config: TrainingConfig) -> None:
    """Raises ValueError for text or a batch that the target cannot take."""
    least, largest = int(text.token_ids.min()), int(text.token_ids.max())
    if least < 0 or largest >= target.config.vocab_size:
        raise ValueError(
            f"the text holds tokens from {least} to {largest}, and the target has "
            f"{target.config.vocab_size} tokens, from 0; encode it with the target's tokenizer."
        )
    most = target.config.max_position_embeddings
    if int(text.lengths.max()) > most:
        raise ValueError(
            f"a text of {int(text.lengths.max())} tokens is longer than the target's context of "
            f"{most}; cut the text by a smaller length."
        )
    if config.depth > text.length - 2:
        raise ValueError(
            f"depth={config.depth} is more than the {text.length - 2} tokens after the first that "
            f"texts of {text.length} tokens have to draft; lower it, or give longer texts."
        )
    mesh = getattr(learning.place_beside(target.params), "mesh", None)
    rows = 1 if mesh is None else mesh.shape.get(DATA, 1)
    if config.rows % rows:
        raise ValueError(
            f"rows={config.rows} must be a multiple of the {rows} parts that the mesh's axis "
            f'"{DATA}" splits texts over.'
        )
