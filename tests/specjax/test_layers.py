"""Imports only go down the layers."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("pallas_kernels", "specjax")
# Where the modules lie, and what they are imported as.
FOLDERS = {
    "pallas_kernels": "pallas_kernels",
    "specjax": "specjax",
    "configs": "specjax.configs",
}

# Top to bottom. A module imports from its own layer and from those below. The
# longest name decides: specjax.drafters.loading is not where specjax.drafters is.
LAYERS = (
    # At the edge.
    (
        "specjax.__main__",
        "specjax.bench",
        "specjax.cli",
        "specjax.demo",
        "specjax.examples",
        "specjax.integrations",
    ),
    # The public names; nothing below may import the package itself.
    ("specjax",),
    # What users call.
    (
        "specjax.generation",
        "specjax.outbox",
        "specjax.plan_report",
        "specjax.plan_request",
        "specjax.planning",
        "specjax.plotting",
        "specjax.results",
        "specjax.rl",
        "specjax.serving",
        "specjax.setup",
        "specjax.training",
    ),
    # Host side: queues, policies, from names to drafters.
    (
        "specjax.engine",
        "specjax.drafters.loading",
        "specjax.requests",
        "specjax.roofline",
        "specjax.sizing",
    ),
    # Device side, pure.
    ("specjax.decode", "specjax.drafters"),
    ("specjax.configs.models",),
    (
        "specjax.cache",
        "specjax.models",
        "specjax.sampling",
        "specjax.seeded_noise",
        "specjax.sharding",
        "specjax.trees",
    ),
    # Vocabulary and tools, which know nothing of models.
    (
        "specjax.batch_size_table",
        "specjax.bucket",
        "specjax.chat_template",
        "specjax.compilation_cache",
        "specjax.kept_files",
        "specjax.config",
        "specjax.configs",
        "specjax.detokenize",
        "specjax.model_files",
        "specjax.names",
        "specjax.progress",
        "specjax.speculative_config_json",
        "specjax.surroundings",
        "specjax.tokenization",
        "specjax.tokenizer_json",
        "specjax.turns",
        "specjax.types",
        "specjax.version",
    ),
    ("pallas_kernels", "specjax.configs.devices"),
)
# What a package may not import, by the same rule of names.
FORBIDDEN = {
    "specjax.engine": ("jax.numpy",),
    "specjax.engine.goodput": ("jax",),
    "specjax.engine.speculation_policy": ("jax", "numpy"),
    "specjax.engine.step_cost": ("jax",),
    "specjax.engine.survival": ("jax",),
}
# The whole of what a package may import beside the standard library.
KERNELS = ("jax", "numpy", "ml_dtypes", "pallas_kernels")
ALLOWED = {
    "pallas_kernels": KERNELS,
    "pallas_kernels.tree_attention.bench": (
        *KERNELS,
        "specjax.configs.devices",  # peaks of devices, where it is installed
    ),
}
# Other people's packages that only the edge and training may need.
OPTIONAL = (
    "torch",
    "transformers",
    "tunix",
    "huggingface_hub",
    "flax",
    "orbax",
    "matplotlib",
)
MAY_NEED_OPTIONAL = (
    "specjax.integrations",
    "specjax.training",
    "specjax.demo",
    "specjax.bench",
    "specjax.examples",
)
GUARDED = {("specjax.models.loading", "huggingface_hub")}  # inside try


def modules() -> dict[str, Path]:
    """Returns every module of the two packages by name."""
    found = {}
    for folder, package in FOLDERS.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            inner = path.relative_to(ROOT / folder).with_suffix("").parts
            name = ".".join([package, *(p for p in inner if p != "__init__")])
            if name not in found:  # a link is followed by some versions of Python
                found[name] = path
    return found


MODULES = modules()


def imports(name: str, *, at_start_only: bool = False) -> Iterator[tuple[str, int]]:
    """Yields what a module imports, in functions too, and the line.

    `from a import b` yields a.b where that is a module, else a. Imports that only
    a type checker follows count as well: they are dependencies of the reader.

    Args:
      at_start_only: leave out what the import of the module itself does not import.
    """
    tree = ast.parse(MODULES[name].read_text(encoding="utf-8"))
    for node in _run_at_import(tree) if at_start_only else ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}:{node.lineno}: relative import"
            assert node.module is not None
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                is_module = inner in MODULES or inner in ("jax.numpy", "jax.lax")
                yield inner if is_module else node.module, node.lineno


def _run_at_import(node: ast.AST) -> Iterator[ast.AST]:
    """Yields the nodes outside functions and `if TYPE_CHECKING`."""
    for child in ast.iter_child_nodes(node):
        is_function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
        is_typing = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(
            child.test
        )
        if not is_function and not is_typing:
            yield child
            yield from _run_at_import(child)


def covers(prefix: str, name: str) -> bool:
    """Returns whether `name` is `prefix` or lies inside it."""
    return name == prefix or name.startswith(prefix + ".")


def layer(name: str) -> int | None:
    """Returns how far down a module stands, None when the table lacks it."""
    best, depth = "", None
    for index, prefixes in enumerate(LAYERS):
        for prefix in prefixes:
            # The package itself is a layer; what it holds must be listed.
            fits = name == prefix if prefix == "specjax" else covers(prefix, name)
            if fits and len(prefix) > len(best):
                best, depth = prefix, index
    return depth


def rule(table: dict, name: str):
    """Returns the entry of the longest prefix of a module, None without one."""
    prefixes = [prefix for prefix in table if covers(prefix, name)]
    return table[max(prefixes, key=len)] if prefixes else None


def violations(name: str) -> Iterator[str]:
    """Yields each import of a module that goes up, or that its package may not make."""
    own, forbidden, allowed = layer(name), rule(FORBIDDEN, name), rule(ALLOWED, name)
    if own is None:
        yield f"{name} is in no layer; add it to LAYERS."
        return
    for target, line in imports(name):
        where = f"{name}:{line} imports {target}"
        root = target.partition(".")[0]
        if root in PACKAGES:
            below = layer(target)
            if below is None:
                yield f"{where}, which is in no layer."
            elif below < own:
                yield f"{where}, which stands above it."
        is_allowed = any(covers(prefix, target) for prefix in allowed or ())
        if allowed and not _is_standard(root) and not is_allowed:
            yield f"{where}; only {', '.join(allowed)} may be imported there."
        if forbidden and any(covers(prefix, target) for prefix in forbidden):
            yield f"{where}; {', '.join(forbidden)} may not be imported there."
        if root in OPTIONAL and not _may_need(name, root):
            yield f"{where}; that belongs to the edge."


def _is_standard(root: str) -> bool:
    return root in sys.stdlib_module_names


def _may_need(name: str, root: str) -> bool:
    is_edge = any(covers(prefix, name) for prefix in MAY_NEED_OPTIONAL)
    return is_edge or (name, root) in GUARDED


@pytest.mark.parametrize("name", MODULES)
def test_imports_go_down(name):
    found = [*violations(name)]
    assert not found, "\n".join(found)


def test_no_import_cycles():
    """Neighbours in a layer may import each other, but not in a circle."""
    graph = {
        name: {t for t, _ in imports(name, at_start_only=True) if t in MODULES}
        for name in MODULES
    }
    finished, path = set(), []

    def visit(name: str) -> None:
        assert name not in path, " -> ".join([*path[path.index(name) :], name])
        if name in finished:
            return
        path.append(name)
        for target in sorted(graph[name]):
            visit(target)
        path.pop()
        finished.add(name)

    for name in graph:
        visit(name)


def test_table_sees_a_violation(monkeypatch, tmp_path):
    (tmp_path / "bad.py").write_text(
        "def f():\n    import jax.numpy as jnp\n    from specjax import generation\n"
    )
    monkeypatch.setitem(MODULES, "specjax.engine.bad", tmp_path / "bad.py")
    found = [*violations("specjax.engine.bad")]
    assert len(found) == 2
    assert "jax.numpy" in found[0]
    assert "specjax.generation, which stands above it" in found[1]
