"""Settings of every test: CPU, strict ranks, compiled functions kept between runs."""

import gc
import os
import pathlib
import sys
import time
from importlib import metadata

# Where benchmarks/ and tools/ lie, which no wheel has. Last, so that the package is the installed
# one.
sys.path.append(str(pathlib.Path(__file__).resolve().parents[1]))

# Before jax starts: it reads the platform once.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Meshes are tested on devices that share this one; all else runs on the first.
EIGHT_DEVICES = "--xla_force_host_platform_device_count=8"
# Most of a test's time is compiling, which takes half as long so. A nightly run has all tests at
# the level that users have.
QUICKLY_COMPILED = (
    "--xla_backend_optimization_level=0",
    "--xla_cpu_parallel_codegen_split_count=1",
)
if metadata.version("jaxlib").startswith("0.10."):  # later ones know one kind of emitters
    QUICKLY_COMPILED = (*QUICKLY_COMPILED, "--xla_cpu_use_fusion_emitters=false")
# Of a flag given twice the last one counts: whoever runs the tests may ask for others.
flags = EIGHT_DEVICES, *QUICKLY_COMPILED, os.environ.get("XLA_FLAGS", "")
os.environ["XLA_FLAGS"] = " ".join(flags).strip()

# What steps cost in earlier runs would choose K, and tests would depend on each other.
os.environ["SPECJAX_CACHE_DIR"] = "off"

import asked_for
import costs
import jax
import progress
import pytest


def pytest_addoption(parser):
    asked_for.add_options(parser)
    costs.add_options(parser)


@pytest.hookimpl(trylast=True)  # pytest's own terminal is there by then
def pytest_configure(config):
    """Settings that hold from collection on, since modules may compile at import."""
    progress.register(config)
    costs.register(config)
    # Tracing makes many objects that live on: looking for garbage among them takes a third of it.
    gc.set_threshold(100_000, 50, 100)
    # Where a line of Python made each operation is a fifth of what compiling takes.
    jax.config.update("jax_traceback_in_locations_limit", 0)
    # [3] + [2, 3] is a mistake more often than a wish: write the axis.
    jax.config.update("jax_numpy_rank_promotion", "raise")
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ and hasattr(config, "cache"):
        folder = config.cache.mkdir(f"jax-{jax.__version__}")
        jax.config.update("jax_compilation_cache_dir", str(folder))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


@pytest.hookimpl(trylast=True)  # shares are of what -m left
def pytest_collection_modifyitems(config, items):
    """Keeps what is asked for."""
    asked_for.deselect(config, items)


# A process may hold 65,530 maps of memory on Linux, and what was compiled for a CPU lies in a
# few to some hundreds each. Past the limit the compiler crashes, so tests stay below half of it.
# Rarely: dropping all takes seconds, and what is used again is compiled again.
MAX_MAPS = 30_000
COMPILES_S = 1.0  # a test that took less has compiled little, and counting maps takes time


def drop_compiled_if_much():
    """Drops what was compiled so far if it takes more than MAX_MAPS maps of memory."""
    from specjax.decode.decoder import shared_decoder

    maps = pathlib.Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > MAX_MAPS:
        shared_decoder.cache_clear()
        jax.clear_caches()
        gc.collect()


@pytest.fixture(scope="module", autouse=True)
def few_memory_maps():
    """Between modules little of what was compiled can be used again."""
    yield
    drop_compiled_if_much()


@pytest.fixture(autouse=True)
def few_memory_maps_within_a_module():
    """One module can compile enough to reach the limit alone."""
    begin = time.monotonic()
    yield
    if time.monotonic() - begin > COMPILES_S:
        drop_compiled_if_much()


@pytest.fixture(autouse=True)
def drafts_without_waiting(request, monkeypatch):
    """Drafts K tokens wherever a test names no policy, and forgets what earlier tests measured.

    By default drafting has to earn its place: what a test meant for it would often run plain
    decoding alone. The marker `goodput` gives a test the real default.
    """
    from specjax.api import policies
    from specjax.policy.shelf import forget_speed

    forget_speed()
    if "goodput" not in request.keywords:
        monkeypatch.setattr(policies, "DEFAULT_POLICY", "fixed")


@pytest.fixture
def say(record_property):
    """Shows a line at the end of the run, from whichever process the test runs in."""
    return lambda line: record_property("said", line)


def pytest_terminal_summary(terminalreporter):
    """Shows what tests had to say."""
    for report in terminalreporter.getreports("passed"):
        for name, line in report.user_properties:
            if name == "said" and report.when == "call":
                terminalreporter.write_line(f"{report.nodeid}: {line}")
