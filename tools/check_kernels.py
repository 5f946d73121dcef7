"""Checks that every kernel compiles for a TPU and for a GPU, without such a device.

    python -m tools.check_kernels --tpu v5e:2x2 v6e:2x2

compiles every op ahead of time for the shapes of some models, on one chip and split over
four, and prints the memory of each. It needs libtpu: pip install "jax[tpu]".

    python -m tools.check_kernels --gpu h100

compiles attention for a GPU. Of the kernel for Hopper it prints the report of ptxas: registers,
and bytes of spilled registers; it fails where wgmma is serialized. Of XLA's attention, which runs
on other GPUs, it prints the operations that a turn of its loop launches. It needs the CUDA plugin:
pip install "jax[cuda12]"; without it attention is only lowered, and each line says so. A message
of jaxlib that nvdisasm is missing does not matter. Without options, it compiles for every TPU and
for h100.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import dataclasses
import functools
import itertools
import json
import multiprocessing
import os
import pathlib
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from pallas_kernels.gpu_targets import TARGETS, described_devices

# Settings that libtpu asks of its machine; none of them is used.
NO_TPU = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # no chip is used
    "JAX_PLATFORMS": "cpu",
}
TOPOLOGIES = ("v4:2x2x1", "v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1")


@dataclasses.dataclass(frozen=True)
class _Model:
    heads: int
    kv_heads: int
    head_dim: int
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    has_sinks: bool = False
    page_dtype: str = "bfloat16"
    dtype: str = "bfloat16"  # of queries, new keys and new values
    page_size: int = 16


@dataclasses.dataclass(frozen=True)
class _Step:
    rows: int
    width: int  # most new tokens of a row
    num_tokens: int  # new ones of all rows
    words: int = 0  # of ancestor bits
    is_mixed: bool = False  # prompts beside trees


MODELS = {
    "Llama-3.1-8B": _Model(32, 8, 128),
    "Qwen3-0.6B": _Model(16, 8, 128),
    "Llama-3.2-1B": _Model(32, 8, 64),
    "Phi-2": _Model(32, 32, 80),
    "Gemma-3-4B": _Model(8, 4, 256, {"window": 1024}),
    "Gemma-2-2B": _Model(8, 4, 256, {"window": 4096, "softcap": 50.0}),
    "Llama-3.1-8B int8": _Model(32, 8, 128, page_dtype="int8", page_size=32),
    "Llama-3.2-1B fp8": _Model(32, 8, 64, page_dtype="float8_e4m3fn", page_size=64),
    "Llama-3.1-8B float32": _Model(32, 8, 128, dtype="float32"),
    "with sinks": _Model(32, 8, 128, {"window": 128}, has_sinks=True),
}
STEPS = {
    "1 row": _Step(1, 1, 1),
    "8 rows, trees of 8": _Step(8, 8, 64, 1),
    "64 rows": _Step(64, 1, 64),
    "64 rows, trees of 8": _Step(64, 8, 512, 1),
    "256 rows, trees of 8": _Step(256, 8, 2048, 1),
    "8 rows, trees of 64": _Step(8, 64, 512, 2),
    "1 prompt, 512 tokens": _Step(1, 512, 512),
    "8 rows, mixed, 512 tokens": _Step(8, 512, 512),
    "8 rows, prompts beside trees of 8": _Step(8, 456, 512, 1, is_mixed=True),
}
CONTEXT, NUM_PAGES, NUM_LAYERS = 2048, 4096, 4
VOCABULARIES = {"Llama-3.1": 128_256, "Qwen3": 151_936, "Gemma-3": 262_144}
SAMPLED = 1, 64, 512  # tokens


@dataclasses.dataclass(frozen=True)
class Result:
    """The result of compiling one op."""

    op: str
    shape: str
    device: str
    ok: bool
    seconds: float
    vmem_bytes: int | None  # as the op counts it, of what it keeps there
    temp_bytes: int | None  # of HBM, what surrounds the kernel included
    error: str | None
    is_compiled: bool = True  # False: only lowered
    # Per thread on a GPU, as ptxas reports; None for a kernel that it compiled before.
    registers: int | None = None
    spill_bytes: int | None = None
    launches: int | None = None  # of a turn of the loop of XLA's attention


@dataclasses.dataclass(frozen=True)
class _Case:
    op: str
    shape: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    vmem_bytes: Callable[[], int]
    donated: tuple[int, ...] = ()


def cases(chips: int) -> Iterator[_Case]:
    """Yields every op at every shape of one chip, of `chips` that share the heads."""
    for model, step in itertools.product(MODELS, STEPS):
        if MODELS[model].kv_heads % chips:
            continue
        yield from _cases_of(model, step, chips)
    if chips == 1:  # where the vocabulary is split, every chip samples all of it
        yield from _sampling_cases()


def _cases_of(model: str, step: str, chips: int) -> Iterator[_Case]:
    import jax
    import jax.numpy as jnp

    from pallas_kernels import (
        layout,
        move_kv,
        page_updates,
        tree_attention,
        write_kv,
    )
    from pallas_kernels.tree_attention import mosaic_tpu as attention

    own, new = MODELS[model], STEPS[step]
    heads, kv_heads, head_dim = own.heads // chips, own.kv_heads // chips, own.head_dim
    shape = f"{model}, {step}, {chips} chip{'s' * (chips > 1)}"
    of = jax.ShapeDtypeStruct
    integers = lambda *sizes: of(sizes, jnp.int32)
    sizes = layout.page_shape(NUM_PAGES, own.page_size, kv_heads, head_dim, in_lanes=True)
    page = of(sizes, own.page_dtype)
    scales: dict[str, Any] = {}
    if layout.is_quantized(page):
        scales = dict.fromkeys(("k_scale", "v_scale"), of((kv_heads,), jnp.float32))
    values = of((new.num_tokens, kv_heads, head_dim), own.dtype)
    arguments = [
        of((new.num_tokens, heads, head_dim), own.dtype),
        page,
        page,
        integers(new.rows, CONTEXT // own.page_size),
        integers(new.rows + 1),
        integers(new.rows),
    ]
    named: dict[str, Any] = dict(scales)
    if new.words:
        named["ancestor_bits"] = of((new.num_tokens, new.words), jnp.uint32)
    if new.is_mixed:
        named["is_causal"] = of((new.rows,), jnp.bool_)
    if own.has_sinks:
        named["sinks"] = of((heads,), jnp.float32)
    kernel = {"implementation": "mosaic_tpu"}

    def attend(*given: Any) -> Any:
        positional, rest = given[: len(arguments)], given[len(arguments) :]
        return tree_attention.tree_attention(
            *positional,
            **dict(zip(named, rest, strict=True)),
            **own.options,
            **kernel,
            num_kv_heads=kv_heads,
            scale=head_dim**-0.5,
            max_tokens_per_row=new.width,
        )

    yield _Case(
        "tree_attention",
        shape,
        attend,
        (*arguments, *named.values()),
        lambda: attention.vmem_bytes(
            of((new.num_tokens, heads, page.shape[3]), own.dtype),
            page,
            arguments[3],
            named.get("ancestor_bits"),
            max_tokens_per_row=new.width,
        ),
    )

    def write(*given: Any) -> Any:
        positional, rest = given[:5], given[5:]
        named = dict(zip(scales, rest, strict=True))
        return write_kv.write_kv(*positional, **named, **kernel)

    yield _Case(
        "write_kv",
        shape,
        write,
        (page, page, values, values, integers(new.num_tokens), *scales.values()),
        lambda: page_updates.vmem_bytes(page, new.num_tokens),
        donated=(0, 1),
    )
    if new.words and not new.is_mixed:
        pages = [page] * 2 * NUM_LAYERS
        slots = integers(new.rows * (new.width - 1))
        yield _Case(
            "move_kv",
            shape,
            functools.partial(move_kv.move_kv, **kernel),
            (pages, slots, slots),
            lambda: page_updates.vmem_bytes(page, slots.shape[0]),
            donated=(0,),
        )


def _sampling_cases() -> Iterator[_Case]:
    """Yields sampling, of float32 and of bfloat16 logits, with a bias and without."""
    import jax
    import jax.numpy as jnp

    from pallas_kernels.seeded_sample import mosaic_tpu, seeded_sample

    def sample(*given: Any) -> Any:
        arguments = dict(zip(("bias", "thresholds"), given[3:], strict=True))
        return seeded_sample(*given[:3], **arguments, implementation="mosaic_tpu")

    of = jax.ShapeDtypeStruct
    for (model, vocab), num_tokens, dtype, has_bias in itertools.product(
        VOCABULARIES.items(), SAMPLED, (jnp.float32, jnp.bfloat16), (False, True)
    ):
        logits = of((num_tokens, vocab), dtype)
        bias = of(logits.shape, jnp.float32) if has_bias else None
        numbers = of((num_tokens,), jnp.float32)
        shape = f"{model}, {num_tokens} token{'s' * (num_tokens > 1)}, {logits.dtype}"
        yield _Case(
            "seeded_sample",
            shape + ", bias" * has_bias,
            sample,
            (logits, of((num_tokens, 2), jnp.uint32), numbers, bias, numbers),
            functools.partial(mosaic_tpu.vmem_bytes, logits, bias),
        )


def check(topology: str, chips: int, only: Sequence[str] = ("",)) -> Iterator[Result]:
    """Yields the result of compiling each op for one or more chips of a topology.

    Args:
      only: an op is compiled if its name and shape contain one of these texts.

    Raises:
      ValueError: libtpu knows no such topology, or is not installed.
    """
    import jax
    import numpy as np
    from jax.experimental import topologies
    from jax.sharding import Mesh, PartitionSpec

    from pallas_kernels.implementations import lowered_for

    try:
        described = topologies.get_topology_desc(topology_name=topology, platform="tpu")
    except Exception as error:  # of several kinds, by what libtpu says
        raise ValueError(
            f"{topology!r} is no topology that libtpu knows, as {TOPOLOGIES} are, or libtpu "
            f'is not installed (pip install "jax[tpu]"): {error}'
        ) from error
    mesh = Mesh(np.array(described.devices[:chips]), ("tensor",))
    for case in cases(chips):
        if not any(text in f"{case.op}, {case.shape}" for text in only):
            continue
        # Every chip runs the kernel on its own heads.
        local = jax.shard_map(
            case.function,
            mesh=mesh,
            in_specs=PartitionSpec(),
            out_specs=PartitionSpec(),
            check_vma=False,
        )
        start, error = time.perf_counter(), None
        vmem_bytes = temp_bytes = None
        try:
            vmem_bytes = case.vmem_bytes()
            with lowered_for("tpu", described.devices[0].device_kind):
                step = jax.jit(local, donate_argnums=case.donated)
                compiled = step.lower(*case.arguments).compile()
            if (analysis := compiled.memory_analysis()) is not None:
                temp_bytes = analysis.temp_size_in_bytes
        # Ops, Mosaic and XLA refuse by errors of many kinds: each is a line of the table,
        # and makes the exit status 1.
        except Exception as problem:
            error = " ".join(str(problem).split())[:500]
        yield Result(
            op=case.op,
            shape=case.shape,
            device=topology,
            ok=error is None,
            seconds=round(time.perf_counter() - start, 2),
            vmem_bytes=vmem_bytes,
            temp_bytes=temp_bytes,
            error=error,
        )


def check_gpu(name: str, only: Sequence[str] = ("",)) -> Iterator[Result]:
    """Yields the result of compiling attention for a GPU, at every shape it covers.

    Args:
      name: a key of `GPUS`.
      only: as for `check`.
    """
    implementations = ("mosaic_gpu", "xla") if TARGETS[name].capability[0] == 9 else ("xla",)
    for model, step, implementation in itertools.product(MODELS, STEPS, implementations):
        shape = f"{model}, {step}, 1 chip, {implementation}"
        is_asked = any(text in f"tree_attention, {shape}" for text in only)
        # The kernel covers neither pages with scales nor queries in float32.
        dtypes = {MODELS[model].page_dtype, MODELS[model].dtype}
        is_covered = implementation == "xla" or dtypes == {"bfloat16"}
        if is_asked and is_covered:
            yield _check_on_gpu(name, model, step, shape, implementation)


def _check_on_gpu(name: str, model: str, step: str, shape: str, implementation: str) -> Result:
    import jax
    import jax.numpy as jnp

    from pallas_kernels import layout, tree_attention

    own, new = MODELS[model], STEPS[step]
    of = jax.ShapeDtypeStruct
    sizes = NUM_PAGES, own.page_size, own.kv_heads, own.head_dim
    in_lanes = own.head_dim % 64 > 0
    pages = of(layout.page_shape(*sizes, in_lanes=in_lanes), own.page_dtype)
    arguments = {
        "q": of((new.num_tokens, own.heads, own.head_dim), own.dtype),
        "k_pages": pages,
        "v_pages": pages,
        "block_table": of((new.rows, CONTEXT // own.page_size), jnp.int32),
        "row_starts": of((new.rows + 1,), jnp.int32),
        "lengths": of((new.rows,), jnp.int32),
    }
    if new.words:
        arguments["ancestor_bits"] = of((new.num_tokens, new.words), jnp.uint32)
    if new.is_mixed:
        arguments["is_causal"] = of((new.rows,), jnp.bool_)
    if own.has_sinks:
        arguments["sinks"] = of((own.heads,), jnp.float32)
    if layout.is_quantized(pages):
        scale = of((own.kv_heads,), jnp.float32)
        arguments |= {"k_scale": scale, "v_scale": scale}

    def attend(arguments: dict[str, Any]) -> Any:
        return tree_attention.tree_attention(
            **arguments,
            **own.options,
            num_kv_heads=own.kv_heads,
            scale=own.head_dim**-0.5,
            max_tokens_per_row=new.width,
            implementation=implementation,
        )

    device, start = gpu_to_compile_for(name), time.perf_counter()
    found: dict[str, Any] = {"temp_bytes": None, "error": None}
    try:
        if device is None:
            text = _lowered(name, attend, arguments)
            is_kernel = implementation == "mosaic_gpu"
            assert ("mosaic_gpu" in text) == is_kernel, "another implementation was lowered."
        else:
            found |= _compile(device, attend, arguments)
    # As above: of any kind.
    except Exception as problem:
        found["error"] = " ".join(str(problem).split())[:500]
    return Result(
        op="tree_attention",
        shape=shape,
        device=name.upper(),
        ok=found["error"] is None,
        seconds=round(time.perf_counter() - start, 2),
        vmem_bytes=None,
        is_compiled=device is not None,
        **found,
    )


def gpu_to_compile_for(name: str) -> Any:
    """Returns the device that jax describes, or None where its CUDA plugin is not installed."""
    devices = described_devices(name)
    return None if devices is None else devices[0]


def _lowered(name: str, function: Callable[..., Any], arguments: Any) -> str:
    """Lowers a function for a GPU, as far as jax goes without its compiler; returns the text."""
    import jax
    from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

    from pallas_kernels.implementations import lowered_for

    device = AbstractDevice(TARGETS[name].kind, None, "cuda")
    mesh = AbstractMesh((1,), ("x",), abstract_device=device)
    with lowered_for("gpu"), use_abstract_mesh(mesh):
        traced = jax.jit(function).trace(arguments)
        return traced.lower(lowering_platforms=("cuda",)).as_text()


def _compile(device: Any, function: Callable[..., Any], arguments: Any) -> dict[str, Any]:
    """Compiles a function for a GPU; returns some fields of its result."""
    import jax
    from jax.sharding import SingleDeviceSharding

    from pallas_kernels.implementations import lowered_for

    one = SingleDeviceSharding(device)
    step = jax.jit(function, in_shardings=one, out_shardings=one)
    with lowered_for("gpu"), _reports_of_ptxas() as reports:
        compiled = step.lower(arguments).compile()
        found = said_by_ptxas("".join(reports()))
    found["launches"] = launches_of_a_turn(compiled.as_text() or "")
    if (analysis := compiled.memory_analysis()) is not None:
        found["temp_bytes"] = analysis.temp_size_in_bytes
    return found


@contextlib.contextmanager
def _reports_of_ptxas() -> Iterator[Callable[[], list[str]]]:
    """Mosaic has ptxas report within; returns what reads it."""
    with tempfile.TemporaryDirectory() as folder:
        asked = {"MOSAIC_GPU_DUMP_PTXAS": "1", "MOSAIC_GPU_DUMP_TO": folder}
        before = {name: os.environ.get(name) for name in asked}
        os.environ.update(asked)
        try:
            paths = pathlib.Path(folder)
            yield lambda: [path.read_text() for path in paths.glob("*.ptxas")]
        finally:
            for name, value in before.items():
                os.environ.pop(name)
                if value is not None:
                    os.environ[name] = value


def said_by_ptxas(text: str) -> dict[str, Any]:
    """Returns the fields of a result that ptxas --verbose has; none where it was not called."""
    registers = re.search(r"Used (\d+) registers", text)
    spilled = re.search(r"(\d+) bytes spill stores", text)
    # For want of registers (C7512), or of another of ten kinds.
    serialized = re.search(r".*wgmma.mma_async instructions are serialized.*", text)
    if registers is None or spilled is None:
        return {}
    return {
        "registers": int(registers[1]),
        "spill_bytes": int(spilled[1]),
        "error": serialized and serialized[0],
    }


def launches_of_a_turn(text: str) -> int | None:
    """Returns the operations that the body of a program's only loop launches, if it has a loop.

    Args:
      text: an optimised program of XLA for a GPU, where each fusion, copy and call of a library
        is launched by itself.
    """
    body = re.search(r" while\(.*body=%?([\w.-]+)", text)
    if body is None:
        return None
    lines = re.search(rf"^%?{re.escape(body[1])} .*\{{\n((?:  .*\n)*)", text, re.MULTILINE)
    assert lines is not None, f"the program has no computation {body[1]}."
    launched = r" = .*\b(fusion|custom-call|copy|sort|scatter|gather|dot)\("
    return sum(re.search(launched, line) is not None for line in lines[1].splitlines())


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.check_kernels")
    parser.add_argument("--tpu", nargs="+", default=[], metavar="NAME")
    parser.add_argument("--gpu", nargs="+", default=[], choices=TARGETS)
    parser.add_argument(
        "--only", nargs="+", default=[""], metavar="TEXT", help="names with one of them"
    )
    parser.add_argument("--jobs", type=int, default=1, help="processes that compile")
    parser.add_argument("--json", action="store_true", help="a list of documents")
    options = parser.parse_args(argv)
    for name, value in NO_TPU.items():
        os.environ.setdefault(name, value)
    if not options.tpu and not options.gpu:
        options.tpu, options.gpu = TOPOLOGIES, ("h100",)
    work: list[tuple] = [
        (check, topology, chips, options.only)
        for topology, chips in itertools.product(options.tpu, (1, 4))
    ]
    work += [(check_gpu, name, options.only) for name in options.gpu]
    results = []
    try:
        for result in _results(work, options.jobs):
            results.append(result)
            if not options.json:
                print(_line(result), flush=True)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    if options.json:
        print(json.dumps([dataclasses.asdict(result) for result in results], indent=1))
    if not results:
        print(f"nothing has one of {options.only} in its name.", file=sys.stderr)
    return 0 if results and all(result.ok for result in results) else 1


def _results(work: Sequence[tuple], jobs: int) -> Iterator[Result]:
    """Yields what each piece of work does, a function and its arguments; in order."""
    if jobs == 1:
        for function, *arguments in work:
            yield from function(*arguments)
        return
    spawn = multiprocessing.get_context("spawn")  # libtpu does not survive a fork
    with concurrent.futures.ProcessPoolExecutor(jobs, mp_context=spawn) as pool:
        for results in pool.map(_checked, work):
            yield from results


def _checked(piece: tuple) -> list[Result]:
    function, *arguments = piece
    return list(function(*arguments))


def _line(result: Result) -> str:
    if not result.ok:
        return f"{result.device:14} {result.op:15} {result.shape:50} {result.error}"
    sizes = [
        "-" if size is None else f"{size / 1e6:.2f} MB"
        for size in (result.vmem_bytes, result.temp_bytes)
    ]
    on_chip = f"VMEM {sizes[0]:>9}"
    if not result.is_compiled:
        on_chip = "lowered, not compiled"
    elif result.launches is not None:
        on_chip = f"{result.launches} launches a turn"
    elif result.registers is not None:
        on_chip = f"{result.registers} registers, {result.spill_bytes:3} bytes spilled"
    elif result.device.lower() in TARGETS:
        on_chip = "a kernel that was compiled before"
    return (
        f"{result.device:14} {result.op:15} {result.shape:50} {result.seconds:6.1f} s  "
        f"{on_chip}  HBM temporaries {sizes[1]:>9}"
    )


if __name__ == "__main__":
    sys.exit(main())
