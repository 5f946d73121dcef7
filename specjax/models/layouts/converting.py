"""convert() and convert_back(): from another tree of weights to specjax's, and back."""

from __future__ import annotations

import itertools
from typing import Any

from specjax.models.base import ModelConfig, Params
from specjax.models.layouts.named import NAMES, variants
from specjax.models.layouts.tables import (
    ROOT,
    Layout,
    LayoutName,
    Leaves,
    leaves_of,
    nested,
    unrooted,
)

MOST_SHOWN = 10  # differing leaves of a message

Shapes = dict[str, Any]  # by path

_REMEDY = (
    "specjax.convert({what}, {name}, config) converts it, and build_decoder(..., layout={name}) "
    "takes such trees."
)


def convert(tree: Any, layout: LayoutName | Layout, config: ModelConfig) -> Params:
    """Returns specjax's tree of weights from a tree in another layout.

    Pure, traceable and differentiable. Inside jit, transpositions fold into the products that
    use them; outside, every array that is moved is a new one. Leaves that both layouts have
    alike are the same objects.

    Args:
      tree: nested dicts, lists, nnx.State or FrozenDict of arrays or of nnx.Param, with or
        without {"params": ...} around it, once or more often.
      layout: "specjax", "nnx", "linen", "tunix", "maxtext", or one's own. Of a named one, layers
        may be stacked or not, and heads may be an axis or not: names and shapes tell.
      config: of the model.

    Returns:
      The tree of docs/weights-layout.md, with the dtypes that were given, as jax has them:
        numpy's float64 becomes float32 where values are moved.

    Raises:
      ValueError: names or shapes differ from the layout's; the message shows both trees.
      NotImplementedError: the layout has no models like this config.
    """
    leaves = leaves_of(tree)
    return matching(leaves, layout, config, "tree").to_ours(leaves, config)


def convert_back(
    params: Params, layout: LayoutName | Layout, config: ModelConfig
) -> dict[Any, Any]:
    """Returns a tree in another layout from specjax's; the inverse of `convert`.

    Where values are only moved, there and back gives equal bits.

    Args:
      params: specjax's tree.
      layout: as for `convert`. Of a named one this is the variant with an array per layer, and
        heads beside each other for "nnx" and "linen"; the functions of `specjax.models.layouts`,
        such as `specjax.models.layouts.maxtext`, give the others.

    Returns:
      Nested dicts of arrays; the numbers of layers are ints, as in nnx.to_pure_dict. For
      "linen" and "maxtext", {"params": ...}.

    Raises:
      ValueError: params is not specjax's tree.
      NotImplementedError: the layout has no models like this config.
    """
    chosen = variants(layout, config)[0]
    ours = convert(params, "specjax", config)
    tree = nested(chosen.to_theirs(ours, config))
    return {ROOT: tree} if chosen.is_wrapped else tree


def matching(
    leaves: Leaves,
    layout: LayoutName | Layout,
    config: ModelConfig,
    what: str,
    *,
    remedy: str = _REMEDY,
) -> Layout:
    """Returns the variant of a layout that arrays are in.

    Args:
      leaves: from `leaves_of`, or whatever has a shape.
      what: name of the tree, for messages.
      remedy: what messages say of a tree in another layout, {name}.

    Raises:
      ValueError: they are in none; the message shows the differences from the nearest.
    """
    given = _shapes(leaves)
    possible = variants(layout, config)
    expected = [_shapes(variant.expected(config)) for variant in possible]
    for variant, shapes in zip(possible, expected):
        if given == shapes:
            return variant
    common = [len(shapes.items() & given.items()) for shapes in expected]
    nearest = max(range(len(possible)), key=lambda index: common[index])  # the first of equals
    table = side_by_side(expected[nearest], given)
    raise ValueError(
        f"{what} is not in the layout {possible[nearest].name!r}:\n{table}\n"
        f"{_advice(leaves, config, what, remedy)}"
    )


def side_by_side(expected: Shapes, given: Shapes) -> str:
    """Returns a table of the first leaves that differ: those of one path, then all others."""
    both = [path for path in expected if path in given and expected[path] != given[path]]
    missing = [path for path in expected if path not in given]
    unknown = [path for path in given if path not in expected]
    rows = [(path, path) for path in both] + [*itertools.zip_longest(missing, unknown)]
    shown = [("expected", "given")]
    for ours, theirs in rows[:MOST_SHOWN]:
        shown.append((_shown(ours, expected), _shown(theirs, given)))
    width = max(len(left) for left, _ in shown)
    lines = [f"  {left:{width}}  {right}" for left, right in shown]
    if len(rows) > MOST_SHOWN:
        lines.append(f"  and {len(rows) - MOST_SHOWN} more")
    return "\n".join(lines)


def recognised(leaves: Leaves, config: ModelConfig) -> list[str]:
    """Returns the named layouts that arrays are in."""
    given, found = _shapes(leaves), []
    for name in NAMES:
        try:
            possible = variants(name, config)
        except NotImplementedError:
            continue
        if any(given == _shapes(variant.expected(config)) for variant in possible):
            found.append(name)
    return found


def _advice(leaves: Leaves, config: ModelConfig, what: str, remedy: str) -> str:
    names = recognised(leaves, config)
    inner = {} if names else _below_root(leaves)
    if found := recognised(inner, config):
        others = sorted({path.split(".")[0] for path in leaves} - {ROOT})
        return (
            f"The given tree holds more than weights ({', '.join(others)}), as a training state "
            f"does: {what}[{ROOT!r}] is in the layout {found[0]!r}; pass that."
        )
    if not names:
        return (
            "No named layout has the given names and shapes: check that the config is of this "
            "model, or describe the tree as a specjax.models.layouts.Layout."
        )
    name = names[0]
    return f"The given tree is in the layout {name!r}: {remedy.format(what=what, name=repr(name))}"


def _below_root(leaves: Leaves) -> Leaves:
    """Returns the arrays inside "params", once or more often, of a tree that holds others too."""
    inner = {path: leaf for path, leaf in leaves.items() if path.startswith(f"{ROOT}.")}
    return unrooted(inner)


def _shapes(leaves: Leaves) -> Shapes:
    """Returns the shape of each array; a leaf that is none is its type."""
    shape_of = lambda leaf: tuple(leaf.shape) if hasattr(leaf, "shape") else type(leaf).__name__
    return {path: shape_of(leaf) for path, leaf in leaves.items()}


def _shown(path: str | None, shapes: Shapes) -> str:
    return "-" if path is None else f"{path} {shapes[path]}"
