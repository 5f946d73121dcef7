"""Loads a drafter from a name, a folder or a model."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import jax

from specjax.config.checks import is_int
from specjax.config.names import BY_NAME, NO_DRAFTER, SELF_DRAFTING, DrafterName, check_drafter
from specjax.config.rules import Rule
from specjax.config.speculation import SpeculationConfig
from specjax.drafters.base import DrafterSpec, ModelWork
from specjax.drafters.guard import DrafterError, abstract_drafter_params
from specjax.drafters.other_vocabulary import are_equal, recoded, recoding
from specjax.drafters.self_drafter import SelfDrafter
from specjax.drafters.spec import (
    HistoryDrafter,
    ModelDrafter,
    NgramDrafter,
    NoDrafter,
)
from specjax.heads import kinds
from specjax.heads.namings import mtp_files
from specjax.models.abstract import shape_difference, tree_difference
from specjax.models.base import Model, ModelConfig, parameters
from specjax.models.hf_config import read_config
from specjax.models.loading import load_model, resolve_folder
from specjax.types import BY_LAW, DELTA, SYNTHETIC, TYPICAL


@dataclasses.dataclass(frozen=True)
class LoadedDrafter:
    """A drafter and its weights. `params` may be replaced at any time, like a target's."""

    name: str
    spec: DrafterSpec
    params: Any = ()
    notes: tuple[str, ...] = ()  # what was decided where its files leave it open
    # Of the target in whose vocabulary a draft model drafts; None where it is not known.
    tokenizer: Any = dataclasses.field(default=None, compare=False)

    def __post_init__(self):
        if not isinstance(self.spec, DrafterSpec):
            raise TypeError(
                f"spec is {self.spec!r:.200}; expected a specjax.DrafterSpec: derive the class of "
                "a drafter of your own from it."
            )
        try:
            hash(self.spec)
        except TypeError as error:
            raise TypeError(
                f"spec is {self.spec!r:.200}, which is not hashable ({error}); make its class a "
                "dataclass(frozen=True) with hashable fields: it is part of the key of every step."
            ) from None
        _check_members(self.spec)

    def __repr__(self) -> str:
        kind = type(self.spec).__name__
        notes = "".join(f"; {note}" for note in self.notes)
        stored = getattr(self.spec, "store_features", None)
        setting = "" if stored is None else f", store_features={stored!r}"
        return f"LoadedDrafter({self.name!r}, {kind}{parameters(self.params)}{setting}{notes})"

    @property
    def can_draft(self) -> bool:
        return self.spec.can_draft

    @property
    def has_probs(self) -> bool:
        """Whether its proposals can set the distributions that their tokens were drawn from."""
        return self.spec.has_probs

    @property
    def is_tree(self) -> bool:
        """Whether drafts are trees."""
        return self.spec.is_tree

    @property
    def max_depth(self) -> int | None:
        """Depth of the tree it was loaded with; None: drafts may be of any depth."""
        return self.spec.max_depth

    def num_nodes(self, num_speculative_tokens: int) -> int:
        """Returns the nodes verified per row, root included.

        Raises:
          TypeError: the spec says something else than an int of at least 1.
        """
        said = self.spec.num_nodes(num_speculative_tokens)
        return self._int_from("num_nodes", said, 1)

    def tree_slots(self, num_speculative_tokens: int) -> int:
        """Returns the slots that a row takes past its root, see `DrafterSpec.tree_slots`.

        Raises:
          TypeError: the spec says something else than an int of at least 0, or of a tree less
            than the nodes behind its root.
        """
        said = self.spec.tree_slots(num_speculative_tokens)
        least = self.num_nodes(num_speculative_tokens) - 1 if self.is_tree else 0
        return self._int_from("tree_slots", said, least)

    def check_params(self, target: ModelConfig, dtype: Any) -> None:
        """Raises ValueError where its weights are not of the names and shapes that its spec says.

        Where the spec says nothing, any will do; a drafter that runs models has some.

        Args:
          dtype: of its weights, or of the target's.

        Raises:
          TypeError: `abstract_params` raised.
        """
        if self.spec.made_by is not None:
            if jax.tree.leaves(self.params):
                raise ValueError(
                    f"the weights of drafter {self.name!r} are made from the target's, and it was "
                    "given some; leave them out."
                )
            return
        has_own = type(self.spec).abstract_params is not DrafterSpec.abstract_params
        if not has_own and (jax.tree.leaves(self.params) or not self.configs):
            return
        try:
            expected = abstract_drafter_params(self.spec, target, dtype)
        except DrafterError as error:
            raise TypeError(
                f"drafter {self.name!r}: {error}; expected a tree of jax.ShapeDtypeStruct."
            ) from error
        if not jax.tree.leaves(expected):
            return
        difference = tree_difference(self.params, expected)
        difference = difference or shape_difference(self.params, expected)
        if difference:
            raise ValueError(
                f"the weights of drafter {self.name!r} are not those that abstract_params of its "
                f"spec says: {difference}; pass specjax.LoadedDrafter(name, spec, params) with "
                "weights of that tree, or mend abstract_params."
            )

    def check_windows(self, target: ModelConfig, num_speculative_tokens: int) -> None:
        """Raises ValueError where a sliding window might hide a node from its own tree."""
        num_nodes = self.tree_slots(num_speculative_tokens) + 1
        words = -(-num_nodes // 32) if self.is_tree else 0
        for config in (target, *self.configs):
            windows = [config.window(layer) for layer in range(config.num_layers)]
            narrow = [w for w in windows if w is not None and w <= 32 * words]
            if words and narrow:
                raise ValueError(
                    f"a sliding window of {min(narrow)} tokens is too narrow for trees of "
                    f"{num_nodes} nodes, which need more than "
                    f"{32 * words}; draft fewer nodes, or chains."
                )

    def check_rule(self, rule: str, numerics: str = "fast") -> None:
        """Raises ValueError where a verification rule cannot be applied to its drafts.

        Args:
          numerics: of the EngineConfig.
        """
        if numerics == "invariant" and self.effective_rules([Rule.of(rule)]):
            raise ValueError(
                f"numerics='invariant' makes tokens independent of what is drafted, and under "
                f"verification={rule!r} they depend on it; use 'seeded', 'greedy' or 'delta'."
            )
        if rule == "block" and self.is_tree and self.has_probs:
            raise ValueError(
                "verification='block' is for chains; use 'traversal', which is the same on "
                "a chain and covers trees."
            )
        if self.spec.is_grown and Rule.of(rule) in BY_LAW:
            raise ValueError(
                f"verification={rule!r} would be biased on trees grown with tree_top_k, which "
                "keep nodes for the tokens that were drawn; use 'seeded', 'greedy' or "
                "'delta', or a fixed speculative_token_tree."
            )
        if rule == "lenient" and self.can_draft and not self.has_probs:
            raise ValueError(
                f"verification='lenient' needs the drafter's probabilities, and {self.name!r} "
                "has none; use 'delta', or a draft model."
            )

    def effective_rules(self, rules: Iterable[int]) -> tuple[int, ...]:
        """Returns the rules among these that a step must implement besides equality.

        Without probabilities a proposal is deterministic, and rules by law run as
        `delta`, which has the same output distribution.
        """
        return tuple(
            sorted(
                rule
                for rule in set(rules)
                if rule > DELTA
                and self.can_draft
                and (self.has_probs or rule in (TYPICAL, SYNTHETIC))
            )
        )

    @property
    def configs(self) -> tuple[ModelConfig, ...]:
        """Configs of the models it runs."""
        return self.spec.configs

    def bytes_per_token(self, target: ModelConfig, dtype: Any) -> int:
        """Returns the bytes of its pages on one device per token of a row.

        Raises:
          TypeError: the spec says something else than an int of at least 0.
        """
        return self._int_from("bytes_per_token", self.spec.bytes_per_token(target, dtype), 0)

    def work(
        self, target: ModelConfig, dtype: Any, num_weights: int | None = None
    ) -> tuple[ModelWork, ...]:
        """Returns the bytes and operations of one draft token, see DrafterSpec.work.

        Raises:
          TypeError: the spec says something else than a tuple of ModelWork.
        """
        said = self.spec.work(target, dtype, num_weights)
        if not _is_tuple_of(ModelWork, said):
            raise TypeError(
                f"work of drafter {self.name!r} returned {said!r:.100}; expected a tuple of "
                "ModelWork."
            )
        return said

    def _int_from(self, name: str, said: Any, least: int) -> int:
        """Returns what a function of the spec returned, if it is an int of at least `least`."""
        if not is_int(said) or said < least:
            raise TypeError(
                f"{name} of drafter {self.name!r} returned {said!r:.100}; expected an int of at "
                f"least {least}."
            )
        return said


# Accepted wherever a caller names a drafter.
DrafterSource: TypeAlias = (
    DrafterSpec | LoadedDrafter | Model | DrafterName | str | os.PathLike[str] | None
)


def load_drafter(
    source: DrafterSource,
    target: Model,
    config: SpeculationConfig | None = None,
    *,
    aux_layer_ids: Sequence[int] | None = None,
) -> LoadedDrafter:
    """Returns a drafter for a target.

    Args:
      source: None or "none" (plain decoding), "ngram", "history", "self-int8", "self-int4",
        "demo", "demo-eagle3" or "demo-dspark" (for the embedded target), a folder or hub name
        ("org/name") of a draft model or of a head over the target (EAGLE, EAGLE-3, Medusa, MLP
        speculator, DFlash, DFlash2, DSpark, MTP), a Model, a DrafterSpec (SelfDrafter, or your
        own), or a LoadedDrafter. A path is always a folder. None with method "mtp" in the config
        is the target's own folder.
      config: prompt_lookup_* and num_draft_nodes of an n-gram drafter, the tree of a
        draft model. Its fields override those that a LoadedDrafter was loaded with; a
        field at its default sets nothing.
      aux_layer_ids: layers of the target whose inputs a head captures, where its folder
        says others or none. What was resolved is in `LoadedDrafter.notes`.

    Raises:
      ValueError: no drafter has that name, nothing says which tokens of a draft model of another
        vocabulary are the target's, its mask token has no row there, a head's files are not those
        of a head for this target, the config names another kind of head by its method, or sets a
        field that does not apply to this drafter.
      TypeError: `source` is none of these, `target` is no Model, or a class derived from a drafter
        of specjax cannot be made with that drafter's fields.
    """
    if not isinstance(target, Model):
        raise TypeError(f"target is {target!r:.100}; expected a Model, as load_model returns.")
    config = config or SpeculationConfig()
    if source == config.model:  # else it overrides what the config names
        if source is None and config.method == mtp_files.METHOD:
            source = _own_folder(target)
        kinds.check_method(source, config.method)
    loaded = _load(source, target, aux_layer_ids, config.parallel_drafting)
    kinds.check_drafts_by(loaded.spec, source, config)
    try:
        spec = loaded.spec.configured(config)
    except TypeError as error:
        name = type(loaded.spec).__name__
        raise TypeError(
            f"{name}.configured(config) raised TypeError({str(error)!r}). A class derived from a "
            "drafter of specjax must be a dataclass whose __init__ takes that drafter's fields by "
            "name, or define configured(config) itself."
        ) from error
    return loaded if spec == loaded.spec else dataclasses.replace(loaded, spec=spec)


def _own_folder(target: Model) -> str:
    """Returns the folder of a target, whose files hold its MTP layer too."""
    if target.folder is None:
        raise ValueError(
            f"method='mtp' takes the layer from the target's folder, and {target.name!r} was "
            "loaded from none; name the folder as 'model'."
        )
    return target.folder


def model_path(source: str | os.PathLike[str]) -> str | os.PathLike[str] | None:
    """Returns what `load_model` loads for a drafter's name; None for those that are no models."""
    if source in (NO_DRAFTER, *BY_NAME):
        return None
    return "demo-draft" if source == "demo" else source


def _is_tuple_of(kind: Any, value: Any) -> bool:
    return isinstance(value, tuple) and all(isinstance(each, kind) for each in value)


def _check_members(spec: DrafterSpec) -> None:
    """Raises TypeError for a member of a spec that is of another kind than DrafterSpec says."""

    checks: dict[str, tuple[Callable[[Any], bool], str]] = {
        "configs": (functools.partial(_is_tuple_of, ModelConfig), "a tuple of ModelConfig"),
        "taps": (
            lambda taps: isinstance(taps, tuple) and all(map(is_int, taps)),
            "a tuple of ints",
        ),
        "max_depth": (
            lambda depth: depth is None or (is_int(depth) and depth >= 1),
            "an int of at least 1, or None",
        ),
        "most_drafts": (
            lambda most: most is None or (is_int(most) and most >= 1),
            "an int of at least 1, or None",
        ),
    }
    checks["likely_faults"] = (functools.partial(_is_tuple_of, str), "a tuple of str")
    flags = "can_draft", "has_probs", "abstains", "takes_text", "learns", "is_tree", "is_grown"
    checks |= {name: (lambda value: isinstance(value, bool), "a bool") for name in flags}
    for name, (is_right, expected) in checks.items():
        value = getattr(spec, name)
        if not is_right(value):
            hint = "; make it a property" if callable(value) else ""
            raise TypeError(
                f"{type(spec).__name__}.{name} is {value!r:.100}; expected {expected}{hint}."
            )


def is_head(source: str | os.PathLike[str]) -> bool:
    """Returns whether a name or a folder is that of a head over the target, which is no model."""
    return _head_of(source) is not None


def _head_of(source: str | os.PathLike[str]) -> tuple[Path, kinds.HeadKind] | None:
    """Returns the folder and the kind of a head over the target; None for other drafters."""
    check_drafter(source)
    path = model_path(source)
    if path is None or path == "demo-draft":
        return None
    folder = resolve_folder(path)
    kind = kinds.kind_in(folder)
    return None if kind is None else (folder, kind)


def _is_draft_model(folder: Path, kind: kinds.HeadKind, target: Model) -> bool:
    """Whether a folder of a model with a layer of its own that drafts is meant as a draft model:
    the layer is for a target of the same sizes."""
    if kind.method != mtp_files.METHOD or not mtp_files.is_in_model(folder):
        return False
    own, of = read_config(folder)[0], target.config
    sizes = lambda config: (config.hidden_size, config.num_layers, config.vocab_size)
    return sizes(own) != sizes(of)


def _load(
    source: DrafterSource,
    target: Model,
    aux_layer_ids: Sequence[int] | None = None,
    parallel_drafting: bool | None = None,
) -> LoadedDrafter:
    """Returns the drafter of a source, before a config is applied.

    Args:
      parallel_drafting: of the config; False: a mask token is not needed.
    """
    is_name = isinstance(source, str | os.PathLike)
    if is_name and (found := _head_of(source)) and not _is_draft_model(*found, target):
        folder, kind = found
        head = kind.read(folder, target.config, _dtype_of(target.params), aux_layer_ids)
        head = kinds.without_copies(head, target)
        name = Path(source).name or folder.resolve().name
        return LoadedDrafter(name, kind.spec(head.config), head.params, head.notes)
    if aux_layer_ids is not None:
        raise ValueError(
            f"{aux_layer_ids=} is for the name of a folder with a head over the target, and the "
            f"drafter is {source!r:.200}; give the folder, or leave it out."
        )
    if isinstance(source, DrafterSpec):
        source = LoadedDrafter(type(source).__name__, source)
    if isinstance(source, LoadedDrafter):
        kinds.check_fits(source.spec, target.config)
        _check_vocabulary(source, target)
        return source
    if source is None or source == NO_DRAFTER:
        return LoadedDrafter(NO_DRAFTER, NoDrafter())
    if source == "ngram":
        return LoadedDrafter("ngram", NgramDrafter())
    if source == "history":
        return LoadedDrafter("history", HistoryDrafter())
    if source in SELF_DRAFTING:
        return LoadedDrafter(str(source), SelfDrafter.named(str(source)))
    if isinstance(source, str | os.PathLike):
        source = load_model(model_path(source) or source)
    if not isinstance(source, Model):
        raise TypeError(
            f"drafter is {source!r:.200}; expected None, 'ngram', 'history', 'self-int8', "
            "'self-int4', 'demo', a folder or hub name, a Model, a DrafterSpec, or what "
            "load_drafter returned."
        )
    by = recoding(target, source)
    if by is None:
        said_by = None if source.tokenizer is None else target.tokenizer
        return LoadedDrafter(source.name, ModelDrafter(source.config), source.params, (), said_by)
    by.warn()
    own = recoded(source, by)
    mask = source.config.mask_token_id
    if mask is not None and own.config.mask_token_id is None and parallel_drafting is not False:
        raise ValueError(
            f"the mask token of draft {source.name!r}, {mask}, has no row in the vocabulary of the "
            f"target {target.name!r}; choose a draft of the target's vocabulary, or draft token by "
            "token with parallel_drafting=False."
        )
    return LoadedDrafter(
        source.name,
        ModelDrafter(own.config, said=by.said),
        own.params,
        () if by.said is None else (by.note(),),
        target.tokenizer,
    )


def _check_vocabulary(drafter: LoadedDrafter, target: Model) -> None:
    """Raises ValueError where the models of a drafter have another vocabulary than the target."""
    made_for, own = drafter.tokenizer, target.tokenizer
    if made_for is not None and own is not None and not are_equal(made_for, own):
        raise ValueError(
            f"drafter {drafter.name!r} drafts in the vocabulary of another target than "
            f"{target.name!r}; load it for this one, by specjax.load_drafter(draft_model, target)."
        )
    for config in drafter.configs:
        if config.vocab_size != target.config.vocab_size:
            raise ValueError(
                f"drafter {drafter.name!r} is for a vocabulary of {config.vocab_size} tokens, and "
                f"target {target.name!r} has {target.config.vocab_size}; load it for this target, "
                "by specjax.load_drafter(draft_model, target)."
            )


def _dtype_of(params: Any) -> Any:
    """Returns the dtype of the target's weights, which the weights of a head get too."""
    return next(leaf.dtype for leaf in jax.tree.leaves(params))
