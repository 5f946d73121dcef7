"""Finds the weights in the tree of a training checkpoint, by the names alone."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from specjax.checkpoints.stored_tree import StoredTree, listed, unboxed

Root = tuple[str, ...]

_WRAPPER = "params"
_NUM_SOUGHT = 4  # names, the shortest, by which nodes are found: those of no layer
# Below these lie means and copies of the weights, under the names of the weights.
_OF_OPTIMISERS = {"opt_state", "opt_states", "optimizer", "optimizer_state", "opt", "mu", "nu"}


def find_root(tree: StoredTree, expected: Sequence[Collection[str]], root: str | None) -> Root:
    """Returns the keys of the node that holds the weights.

    Args:
      expected: the paths of the weights in each variant of a layout.
      root: the path that a caller names, "" for the top; None: the node with most of the expected
        paths below it that is not of an optimiser, and the one in {"params": ...} first.

    Raises:
      ValueError: the tree has no such node, or several.
    """
    if root is not None:
        named = tuple(key for key in root.split(".") if key)
        if not tree.paths_below(named):
            raise ValueError(
                f"root={root!r:.200}: the tree of {tree.folder} has no such node; at its top are "
                f"{listed(sorted({keys[0] for keys in tree.keys if keys}))}."
            )
        return named
    counts = _counts(tree, expected)
    most = max(counts.values(), default=0)
    found = [each for each, count in counts.items() if count == most]
    wrapped = [each for each in found if set(each) <= {_WRAPPER}]
    found = sorted(wrapped or found, key=lambda keys: (len(keys), keys))
    if len(found) > 1 and not wrapped:
        raise ValueError(
            f"the tree of {tree.folder} holds weights under several names: "
            f"{listed(map(shown, found))}. Say which by root=."
        )
    return found[0] if found else _unwrapped(tree)


def shown(root: Root) -> str:
    """Returns a root as a caller names it, in quotes."""
    return repr(".".join(root))


def _counts(tree: StoredTree, expected: Sequence[Collection[str]]) -> dict[Root, int]:
    """Returns how many expected paths lie below each node that has one of the shortest."""
    stored = {".".join(unboxed(keys)) for keys in tree.keys}
    roots = {
        tuple(name.removesuffix(path).split(".")[:-1])
        for paths in expected
        for path in sorted(paths, key=len)[:_NUM_SOUGHT]
        for name in stored
        if name == path or name.endswith(f".{path}")
    }
    below = lambda root, paths: sum(".".join((*root, path)) in stored for path in paths)
    return {
        root: max(below(root, paths) for paths in expected)
        for root in roots
        if not _OF_OPTIMISERS.intersection(root)
    }


def _unwrapped(tree: StoredTree) -> Root:
    """Returns the node inside {"params": ...}, once or more often; the top where there is none."""
    root: Root = ()
    while any(keys[: len(root) + 1] == (*root, _WRAPPER) for keys in tree.keys):
        root = (*root, _WRAPPER)
    return root
