# Installs specjax, and nothing where it is installed. The jax of this runtime and its GPU
# or TPU plugin belong together: both stay as they are, or, where too old, both are replaced.
import importlib.util
import re
import subprocess
import sys
from importlib import metadata

SPECJAX = "specjax[plot] @ git+https://github.com/specjax/specjax"
OLDEST_JAX = "0.10.2"
PLUGINS = {
    "jax-cuda12-plugin": "cuda12",
    "jax-cuda13-plugin": "cuda13",
    "libtpu": "tpu",
}


def requirements(installed: dict[str, str]) -> list[str]:
    """Returns what to ask pip for, given the versions of what is installed."""
    is_part = re.compile(r"jax|jaxlib|libtpu|jax-(cuda|rocm)\d+-\w+").fullmatch
    parts = {name: version for name, version in installed.items() if is_part(name)}
    number = lambda version: tuple(map(int, re.findall(r"\d+", version)[:3]))
    if number(parts.get("jax", "0")) >= number(OLDEST_JAX):
        return [SPECJAX, *(f"{name}=={parts[name]}" for name in sorted(parts))]
    extras = ",".join(extra for plugin, extra in PLUGINS.items() if plugin in parts)
    return [SPECJAX, f"jax[{extras}]>={OLDEST_JAX}"]


if importlib.util.find_spec("specjax") is None:
    found = [(each.metadata["Name"], each.version) for each in metadata.distributions()]
    installed = {re.sub("[-_.]+", "-", name).lower(): version for name, version in found}
    pip = [sys.executable, "-m", "pip", "install", "-q"]
    subprocess.run([*pip, *requirements(installed)], check=True)
    importlib.invalidate_caches()
    if "jax" in sys.modules and metadata.version("jax") != installed.get("jax"):
        print("Restart the runtime: the jax that was imported has been replaced.")
