"""What modules may import, beyond what `lint-imports` holds: that imports go down the rooms."""

import ast
import functools
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("benchmarks", "pallas_kernels", "specjax", "tools")
# Where the modules lie, and what they are imported as.
FOLDERS = {
    "pallas_kernels": "pallas_kernels",
    "specjax": "specjax",
    "configs": "specjax.configs",
    "benchmarks": "benchmarks",
    "tools": "tools",
}
# Run from a clone: no wheel has them.
NOT_INSTALLED = ("benchmarks", "tools", "examples")

# Only what stands at the edge asks for the public names; all else asks where they live.
MAY_IMPORT_SPECJAX = (
    "benchmarks",
    "specjax.__main__",
    "specjax.cli",
    "specjax.integrations",
)
# What a package may not import, by the same rule of names.
FORBIDDEN = {
    "specjax.engine": ("jax.numpy",),
    "specjax.policy": ("jax",),
    "specjax.policy.cost_files": (),  # its key names the device
    "specjax.policy.interface": ("jax", "numpy"),
}
# The whole of what a package may import beside the standard library.
KERNELS = ("jax", "numpy", "ml_dtypes", "pallas_kernels")
ALLOWED = {
    "pallas_kernels": KERNELS,
    "tools.check_kernels": KERNELS,  # runs where nothing but jax is installed
    "tools.kernel_bundles": (*KERNELS, "tools.check_kernels"),
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
    "benchmarks",
    "specjax.checkpoints",
    "specjax.integrations",
    "specjax.training.run_store",
    "specjax.demo",
    "specjax.cli.bench",
    "tools.chat_templates",
)
# Inside try.
GUARDED = {
    (module, "huggingface_hub")
    for module in ("specjax.models.loading", "specjax.planning.named_models")
}


def modules() -> dict[str, Path]:
    """Returns every module of the packages by name, with those that are not installed."""
    found = {}
    for folder, package in FOLDERS.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            inner = path.relative_to(ROOT / folder).with_suffix("").parts
            name = ".".join([package, *(p for p in inner if p != "__init__")])
            if name not in found:  # a link is followed by some versions of Python
                found[name] = path
    return found


MODULES = modules()


@functools.cache
def parsed(path: Path) -> ast.AST:
    """Returns a module's tree; several tests ask for it."""
    return ast.parse(path.read_text(encoding="utf-8"))


def imports(name: str, *, at_start_only: bool = False) -> Iterator[tuple[str, int]]:
    """Yields what a module imports, in functions too, and the line.

    `from a import b` yields a.b where that is a module, else a. Imports that only
    a type checker follows count as well: they are dependencies of the reader.

    Args:
      at_start_only: leave out what the import of the module itself does not import.
    """
    tree = parsed(MODULES[name])
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
        is_typing = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test)
        if not is_function and not is_typing:
            yield child
            yield from _run_at_import(child)


def covers(prefix: str, name: str) -> bool:
    """Returns whether `name` is `prefix` or lies inside it."""
    return name == prefix or name.startswith(prefix + ".")


def rule(table: dict, name: str):
    """Returns the entry of the longest prefix of a module, None without one."""
    prefixes = [prefix for prefix in table if covers(prefix, name)]
    return table[max(prefixes, key=len)] if prefixes else None


def violations(name: str) -> Iterator[str]:
    """Yields each import that a module may not make."""
    forbidden, allowed = rule(FORBIDDEN, name), rule(ALLOWED, name)
    for target, line in imports(name):
        where = f"{name}:{line} imports {target}"
        root = target.partition(".")[0]
        is_edge = name == "specjax" or any(covers(edge, name) for edge in MAY_IMPORT_SPECJAX)
        if target == "specjax" and not is_edge:
            yield f"{where}; import a name from the module that it lives in."
        is_allowed = any(covers(prefix, target) for prefix in allowed or ())
        if allowed and not _is_standard(root) and not is_allowed:
            yield f"{where}; only {', '.join(allowed)} may be imported there."
        if forbidden and any(covers(prefix, target) for prefix in forbidden):
            yield f"{where}; {', '.join(forbidden)} may not be imported there."
        if root in NOT_INSTALLED and name.partition(".")[0] not in NOT_INSTALLED:
            yield f"{where}; no wheel has that."
        if root in OPTIONAL and not _may_need(name, root):
            yield f"{where}; that belongs to the edge."


def _is_standard(root: str) -> bool:
    return root in sys.stdlib_module_names


def _may_need(name: str, root: str) -> bool:
    is_edge = any(covers(prefix, name) for prefix in MAY_NEED_OPTIONAL)
    return is_edge or (name, root) in GUARDED


def test_what_is_installed_is_imported():
    """Neither more nor less than the modules import, beside what is an extra's."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    others = {"orbax-checkpoint": "orbax", "absl-py": "absl"}
    names = [re.match(r"[\w-]+", line)[0] for line in project["dependencies"]]
    installed = {others.get(name, name) for name in names}
    roots = {target.partition(".")[0] for name in MODULES for target, _ in imports(name)}
    of_jax = {"absl"}  # Pallas imports it, and jax does not ask for it
    assert installed - of_jax <= roots
    optional = {"torch", "transformers", "tunix", "huggingface_hub", "matplotlib"}
    assert {r for r in roots if not _is_standard(r)} - {*PACKAGES} <= installed | optional


def test_modules_import_what_they_may():
    found = [violation for name in MODULES for violation in violations(name)]
    assert not found, "\n".join(found)


def test_no_import_cycles():
    """Neighbours in a room may import each other, but not in a circle."""
    graph = {
        name: {t for t, _ in imports(name, at_start_only=True) if t in MODULES} for name in MODULES
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


def test_rules_are_of_modules_that_are_there():
    edges = {*MAY_IMPORT_SPECJAX, *MAY_NEED_OPTIONAL, *(name for name, _ in GUARDED)}
    assert {*edges, *FORBIDDEN, *ALLOWED} <= {*MODULES}


def test_rules_see_a_violation(monkeypatch, tmp_path):
    (tmp_path / "bad.py").write_text(
        "def f():\n    import jax.numpy as jnp\n    from specjax import generate\n"
        "    from benchmarks.replay import Clock\n"
    )
    monkeypatch.setitem(MODULES, "specjax.engine.bad", tmp_path / "bad.py")
    found = [*violations("specjax.engine.bad")]
    assert len(found) == 3
    assert "jax.numpy" in found[0]
    assert "no wheel has that" in found[2]
    assert "import a name from the module that it lives in" in found[1]


def test_the_public_names_are_those_that_are_looked_up():
    import specjax

    assert {"generate", "__version__"} < set(specjax.__all__)
    lines = (ROOT / "specjax" / "__init__.pyi").read_text().splitlines()
    assert len(specjax.__all__) == sum(line.startswith("from specjax.") for line in lines)
    assert dir(specjax) == specjax.__all__
    assert all(getattr(specjax, name) is not None for name in specjax.__all__)
    named = {}
    exec("from specjax import *", named)
    assert set(specjax.__all__) <= set(named)
