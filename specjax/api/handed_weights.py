"""Weights that a trainer hands over: completed, checked, and known again the next time."""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import jax

from specjax.api.given_weights import GivenWeights, drafter_mover
from specjax.api.moved_weights import WeightMover
from specjax.config.checks import is_int
from specjax.models.abstract import tree_difference
from specjax.models.base import ModelConfig, Params
from specjax.models.layouts.tables import Layout, LayoutName, leaves_of
from specjax.models.views import is_view, matrices_of
from specjax.types import DecoderParams

LAST_VERSION = 2**31 - 1  # versions are reported as int32


class _Arrays(NamedTuple):
    """All arrays of weights, as they were given."""

    target: list[jax.Array]
    drafter: list[jax.Array]


class _Seen(NamedTuple):
    """Weak references to arrays, so that the trainer can free them."""

    target: list[weakref.ref[jax.Array]]
    drafter: list[weakref.ref[jax.Array]]

    @classmethod
    def of(cls, arrays: _Arrays) -> _Seen:
        """Returns references to arrays."""
        return cls(*([*map(weakref.ref, part)] for part in arrays))

    def is_of(self, arrays: _Arrays, *, has_drafter: bool) -> bool:
        """Returns whether these are the very same arrays, those of the drafter if it has some."""
        pairs = list(zip(self, arrays))[: 2 if has_drafter else 1]
        return all(
            len(seen) == len(given) and all(ref() is x for ref, x in zip(seen, given))
            for seen, given in pairs
        )


def _arrays_of(params: DecoderParams) -> _Arrays | None:
    """Returns all arrays of weights; None if some may change in place."""
    are_fixed = lambda arrays: all(isinstance(x, jax.Array) for x in arrays)
    target, drafter = jax.tree.leaves(params.target), jax.tree.leaves(params.drafter)
    if not are_fixed(target):  # boxes around arrays, or arrays of numpy
        target = [*leaves_of(params.target).values()]
    return _Arrays(target, drafter) if are_fixed(target) and are_fixed(drafter) else None


class Taken(NamedTuple):
    """Checked weights that steps may use, and the version that they have then."""

    params: DecoderParams  # on the devices of steps, split as steps have them
    is_new: bool  # whether they differ from the weights of the last time
    version: int
    given: _Arrays | None  # the arrays that came; None if some may change in place


class HandedWeights:
    """Takes weights in one layout, and tells new ones from those of the last time.

    Args:
      target, drafter: trees with the shapes and dtypes that steps are compiled for.
      places: the shardings that steps have them in; None: one device.
      viewed: heads axes of the views that steps take; none: steps take no views.

    Attributes:
      version: of the weights that were settled last.
    """

    def __init__(
        self,
        layout: LayoutName | Layout,
        config: ModelConfig,
        *,
        target: Any,
        drafter: Any,
        places: DecoderParams | None,
        viewed: tuple[int | None, ...] = (),
    ):
        """Raises ValueError or NotImplementedError for a layout that does not fit the config."""
        own, others = places or (None, None)
        self._given = GivenWeights(layout, config, target, own, viewed=viewed)
        self._drafters = drafter_mover(drafter, others)
        self._target, self._drafter = target, drafter
        self._used: tuple[_Seen, ...] = ()  # the weights in use, as they may come again
        self.version = 0

    @property
    def layout(self) -> LayoutName | Layout:
        """Layout of the target's weights."""
        return self._given.layout

    @property
    def bytes_moved(self) -> int:
        """Bytes of weights that were copied at the last `take`: converted, cast or moved."""
        return sum(mover.bytes_moved for mover in self._movers)

    @property
    def seconds(self) -> float:
        """Seconds that took, without compiling."""
        return sum(mover.seconds for mover in self._movers)

    @property
    def num_traces(self) -> int:
        """How many functions were traced to convert or move weights."""
        return sum(mover.num_traces for mover in self._movers)

    @property
    def _movers(self) -> tuple[WeightMover, WeightMover]:
        return self._given.mover, self._drafters

    def take(
        self,
        params: DecoderParams,
        version: int | None = None,
        *,
        has_drafter: bool = True,
        increases: bool = False,
    ) -> Taken:
        """Returns weights for `Loop.take_params`; call `settle` once they are in use.

        Args:
          params: weights of the target in the layout, and of the drafter in its own tree. Numpy
            arrays may change in place, so they count as new each time, and are copied to the
            device.
          version: the caller's version of these weights; None: the last one, plus 1 if they
            are new. Other than the last one, they are new.
          has_drafter: whether weights of the drafter are wanted, and so checked.
          increases: whether new weights must have a version above the last.

        Raises:
          ValueError: shapes, dtypes or names are not those that steps were built for,
            or the version is none that these weights may have.
        """
        given = _arrays_of(params)
        # A drafter for which no weights came may learn meanwhile, in a step of another thread.
        is_same = given is not None and any(
            each.is_of(given, has_drafter=has_drafter) for each in self._used
        )
        is_same = is_same and version in (None, self.version)
        # First, so that what is refused has changed nothing.
        version = self._version_of(version, is_same, increases)
        if has_drafter:
            self._check_drafter(params.drafter)
        target = self._given(params.target)
        _check_same(target, self._target, "params", "the tree of docs/weights-layout.md")
        drafter = self._moved_drafter(params.drafter) if has_drafter else params.drafter
        if not is_same:  # until `settle`, so that an exception in between leaves no reuse
            self._used = ()
        return Taken(DecoderParams(target, drafter), not is_same, version, given)

    def settle(self, taken: Taken) -> None:
        """Notes that weights are in use."""
        self.version = taken.version
        if taken.is_new and taken.given is not None:
            # A drafter's weights come again as they were given, or as they were moved.
            moved = taken.given._replace(drafter=jax.tree.leaves(taken.params.drafter))
            self._used = _Seen.of(taken.given), _Seen.of(moved)

    def note(self, params: DecoderParams) -> None:
        """Notes that weights, in specjax's tree, are in use as version 0."""
        given = _arrays_of(params)
        self._used = () if given is None else (_Seen.of(given),)

    def note_drafter(self, drafter: Any) -> None:
        """Notes that a drafter's weights have changed beside the target's, which stay in use."""
        refs = [*map(weakref.ref, jax.tree.leaves(drafter))]
        self._used = tuple(seen._replace(drafter=refs) for seen in self._used)

    def _version_of(self, version: int | None, is_same: bool, increases: bool) -> int:
        """Returns the version of weights, as `take`; raises ValueError."""
        _check_version(version)
        if version is None:
            version = self.version if is_same else self.version + 1
            if version > LAST_VERSION:
                raise ValueError(
                    f"the weights in use have version {self.version}, and there is none above it; "
                    "pass a version with the weights, or begin anew."
                )
        if increases and not is_same and version <= self.version:
            raise ValueError(
                f"{version=} must be above {self.version}, the version of the weights in use."
            )
        return version

    def forget(self) -> None:
        """Counts the next weights as new, and frees converted ones."""
        self._used = ()
        for mover in self._movers:
            mover.drop()

    def _check_drafter(self, params: Any) -> None:
        _check_same(
            params,
            self._drafter,
            "the drafter's params",
            "the tree of the weights that the drafter was loaded with, or of its "
            "abstract_params, as DecoderParams(policy, draft)",
        )

    def _moved_drafter(self, params: Any) -> Any:
        leaves, structure = jax.tree.flatten(params)
        moved = self._drafters({str(index): leaf for index, leaf in enumerate(leaves)})
        return jax.tree.unflatten(structure, moved)


def completed(params: Params | DecoderParams, drafter: Any) -> DecoderParams:
    """Returns the weights of target and drafter, the latter as given here if not in `params`."""
    if isinstance(params, DecoderParams) and len(jax.tree.leaves(params.drafter)):
        return params
    own = params.target if isinstance(params, DecoderParams) else params
    return DecoderParams(own, drafter)


def wait_for(params: Params | DecoderParams) -> None:
    """Waits until weights are computed."""
    for leaf in jax.tree.leaves(params):
        if isinstance(leaf, jax.Array) and not leaf.is_deleted():
            leaf.block_until_ready()


def _check_version(version: int | None) -> None:
    if version is not None and not (is_int(version) and 0 <= version <= LAST_VERSION):
        raise ValueError(f"params_version={version!r} must be from 0 to 2**31 - 1.")


def _check_same(given: Any, expected: Any, what: str, tree: str) -> None:
    """Raises ValueError at the first difference of names, shapes or dtypes."""
    if difference := tree_difference(given, expected):
        raise ValueError(
            f"{what} is not the tree of weights that the decoder was built for: {difference}; "
            f"expected {tree}."
        )
    pairs = zip(matrices_of(given), jax.tree.leaves(expected), strict=True)
    for index, (leaf, wanted) in enumerate(pairs):
        shape, dtype = getattr(leaf, "shape", None), getattr(leaf, "dtype", None)
        if shape != wanted.shape or dtype != wanted.dtype:
            path, _ = jax.tree_util.tree_flatten_with_path(given, is_leaf=is_view)[0][index]
            raise ValueError(
                f"{what}{jax.tree_util.keystr(path)} is {dtype}{shape}, and the decoder was "
                f"built for {wanted.dtype}{wanted.shape}; cast or reshape it, or build a "
                "decoder for these weights (build_decoder takes dtype=). Weights of a draft model "
                "of another vocabulary are rewritten by specjax.load_drafter(draft, target).params."
            )
        array = leaf.array if is_view(leaf) else leaf
        if isinstance(array, jax.Array) and array.is_deleted():
            path, _ = jax.tree_util.tree_flatten_with_path(given, is_leaf=is_view)[0][index]
            raise ValueError(
                f"{what}{jax.tree_util.keystr(path)} was deleted, as donating it to another "
                "function does; pass the weights that came out of that function."
            )
