"""specjax plan: memory, rows and K of a model, a drafter and a device, without running them."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import math
import sys
import time
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from specjax.cli.parser import EXIT_BAD_INPUT, layer_ids
from specjax.config.checks import CAPTURED
from specjax.config.engine import GATES, KV_CACHE_DTYPES, EngineConfig
from specjax.config.speculation import SpeculationConfig
from specjax.runtime.seconds import every_second
from specjax.runtime.stack_level import of_the_caller

if TYPE_CHECKING:
    from specjax.planning.plan_request import PlanRequest

DTYPES = ("float32", "bfloat16", "float16")
_DEFAULT_ROWS = 64
_DEFAULT_K = 4


def add_parser(commands: Any) -> None:
    """Adds the command to the subparsers of `specjax`."""
    parser = commands.add_parser(
        "plan",
        help="memory, batch sizes and K for a device that need not be there",
        description="Prints at once an estimate by formulas: memory, pages, rows, and by the "
        "device's published figures the K to draft. Then compiles a few steps from shapes alone "
        "and prints what follows from those. No weights are read and no step is run.",
    )
    parser.set_defaults(run=run, command_parser=parser)
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="a folder with config.json, 'demo', a known shape, as llama-3.1-8b, or a name on the "
        "Hugging Face Hub",
    )
    parser.add_argument(
        "--drafter",
        metavar="D",
        default="none",
        help="the same, 'ngram', 'history', 'self-int8', 'self-int4' or 'none'",
    )
    parser.add_argument(
        "--aux-layer-ids",
        type=layer_ids,
        metavar="IDS",
        help="layers of the model whose inputs a head over it captures, as 2,16,29 (default: as "
        "its files say)",
    )
    storing = parser.add_mutually_exclusive_group()
    storing.add_argument(
        "--store-features",
        action=argparse.BooleanOptionalAction,
        help="whether a head stores a vector per token, as store_features of a speculative config "
        "says (default: heads of several EAGLE layers do)",
    )
    storing.add_argument(
        "--store-captured",
        dest="store_features",
        action="store_const",
        const=CAPTURED,
        help='a head stores the hidden states that it captures: store_features="captured"',
    )
    parser.add_argument(
        "--device",
        default="cpu",
        help="cpu, h100, v5e, v5e:2x2 and the like (default %(default)s)",
    )
    parser.add_argument(
        "--tensor-parallel",
        type=int,
        metavar="N",
        help="chips that the target is split over (default: all of a TPU topology, else 1)",
    )
    parser.add_argument(
        "--draft-tensor-parallel",
        type=int,
        metavar="N",
        help="chips that a draft model is split over; 1: each chip holds all of it (default: the "
        "number with the shortest time of a draft token by roofline)",
    )
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        help="of weights, and of keys and values without --kv-cache-dtype (default float32 on "
        "CPU and T4, bfloat16 elsewhere)",
    )
    parser.add_argument(
        "--num-speculative-tokens",
        type=int,
        metavar="K",
        default=_DEFAULT_K,
        help="most tokens drafted per step (default %(default)s)",
    )
    parser.add_argument(
        "--acceptance-rate",
        type=float,
        default=0.7,
        metavar="P",
        help="how often a draft token stands, assumed to choose K (default %(default)s)",
    )
    _add_engine_options(parser)
    parser.add_argument(
        "--estimate",
        action="store_true",
        help="stop after the estimate from formulas; nothing is compiled",
    )
    parser.add_argument(
        "--explain", action="store_true", help="say at the end what each word of the tables means"
    )
    parser.add_argument("--json", action="store_true", help="one JSON document")
    parser.add_argument("--plot", metavar="FILE", help="draw K and tokens/s as PNG")


def _add_engine_options(parser: argparse.ArgumentParser) -> None:
    default = EngineConfig()
    group = parser.add_argument_group("engine")
    group.add_argument(
        "--max-rows",
        type=int,
        metavar="N",
        default=_DEFAULT_ROWS,
        help="requests decoded at a time (default %(default)s)",
    )
    group.add_argument(
        "--row-buckets",
        metavar="N,N,...",
        help="fewer rows that bursts are compiled for, as EngineConfig has them (default: "
        "max-rows by 4, by 16, ...)",
    )
    group.add_argument(
        "--max-context",
        type=int,
        metavar="N",
        help="tokens of prompt and output together (default: the model's)",
    )
    _add_memory_options(group, default)


def _add_memory_options(group: Any, default: EngineConfig) -> None:
    group.add_argument(
        "--page-size",
        type=int,
        metavar="N",
        help="tokens of a page (default: chosen by device and model)",
    )
    group.add_argument(
        "--kv-cache-dtype",
        choices=KV_CACHE_DTYPES,
        help="of the target's keys and values (default: the dtype of the weights)",
    )
    group.add_argument(
        "--num-pages",
        type=int,
        metavar="N",
        help="pages of the pool (default: as many as fit)",
    )
    group.add_argument(
        "--logit-bytes",
        type=float,
        metavar="N",
        default=default.logit_bytes,
        help="most that float32 logits take at a time while drafts are verified (default "
        "%(default)s; 1e8 may be written)",
    )
    group.add_argument(
        "--memory-bytes",
        type=float,
        metavar="N",
        help="of each chip (default: what the device has; 16e9 may be written)",
    )
    group.add_argument(
        "--batch-safety-margin",
        type=float,
        metavar="PERCENT",
        default=default.batch_safety_margin,
        help="of the free memory, kept from batches (default %(default)s)",
    )
    group.add_argument(
        "--speculation-weight-fraction",
        type=float,
        metavar="F",
        default=default.speculation_weight_fraction,
        help="of the weight limit, up to where batches speculate (default %(default)s)",
    )
    group.add_argument(
        "--gate",
        choices=GATES,
        default=default.gate,
        help="which tokens of a batch weigh: those that rows have, or all that they may "
        "ever have (default %(default)s)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Prints the plan; returns the exit code."""
    engine = engine_config(arguments)
    import jax

    if arguments.owns_process:
        # A described device needs no real one, and a present TPU must stay free.
        jax.config.update("jax_platforms", "cpu")
    # A program that calls the command keeps its devices.
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        return _plan(arguments, engine)


def _plan(arguments: argparse.Namespace, engine: EngineConfig) -> int:
    from specjax.cli import plan_document, plan_report
    from specjax.planning import devices, plans
    from specjax.planning.estimate import estimate

    request = _request(arguments, engine)
    if arguments.plot:
        plan_report.check_can_draw(request.device, arguments.plot)
    plan = found = estimate(request)
    document = plan_document.of_estimate(found)
    if found.misfit is not None:
        print(f"specjax: error: {found.misfit}", file=sys.stderr, flush=True)
    if not arguments.json:
        print(plan_report.render_estimate(found), flush=True)
    if not arguments.estimate and found.misfit is None:
        speed = request.device.speed
        try:
            device = devices.find_device(arguments.device, arguments.tensor_parallel)
        except NotImplementedError as error:
            warnings.warn(f"the estimate stands: {error}", stacklevel=of_the_caller())
        else:
            device = dataclasses.replace(device, speed=speed)
            with contextlib.closing(_Progress()) as progress:
                plan = plans.make_plan(dataclasses.replace(request, device=device), progress)
            if not arguments.json:
                print(f"\n{plan_report.render(plan)}")
            document = plan_document.to_dict(plan, document)
    if arguments.json:
        print(json.dumps(document, indent=2))
    elif arguments.explain:
        print(f"\n{plan_report.explained()}")
    if arguments.plot and found.misfit is None:
        plan_report.draw(plan, arguments.plot)
        print(f"drawn: {arguments.plot}", file=sys.stderr)
    return 0 if found.misfit is None else EXIT_BAD_INPUT


def _request(arguments: argparse.Namespace, engine: EngineConfig) -> PlanRequest:
    """Returns the request of the arguments, for a device that nothing is compiled for yet."""
    from specjax.planning import devices, named_models, plan_request
    from specjax.planning.processor_speed import processor_speed

    device = devices.described(arguments.device, arguments.tensor_parallel)
    if device.name == devices.CPU:
        device = dataclasses.replace(device, speed=processor_speed())
    has_bfloat16 = device.figures is not None and device.figures.has_bfloat16
    target = named_models.find_config(arguments.model)
    drafter = named_models.find_drafter(arguments.drafter, target, arguments.aux_layer_ids)
    if arguments.store_features is not None:
        if arguments.store_features and not drafter.taps:
            what = "captured" if arguments.store_features == CAPTURED else "features"
            raise ValueError(
                f"--store-{what} is for a head over the target, and the drafter is "
                f"{arguments.drafter!r}; name the folder of a head, or leave it out."
            )
        drafter = drafter.configured(SpeculationConfig(store_features=arguments.store_features))
    request = plan_request.PlanRequest(
        target=target,
        target_name=arguments.model,
        drafter=drafter,
        drafter_name=arguments.drafter,
        device=device,
        dtype=arguments.dtype or ("bfloat16" if has_bfloat16 else "float32"),
        num_speculative_tokens=arguments.num_speculative_tokens,
        engine=engine,
        acceptance_rate=arguments.acceptance_rate,
    )
    return plan_request.with_split_drafter(request, arguments.draft_tensor_parallel)


def engine_config(arguments: argparse.Namespace) -> EngineConfig:
    """Returns the engine that the arguments describe."""
    rows = arguments.max_rows
    return EngineConfig(
        max_rows=rows,
        row_buckets=_row_buckets(arguments.row_buckets, rows),
        max_context=arguments.max_context,
        page_size=arguments.page_size,
        num_pages=arguments.num_pages,
        kv_cache_dtype=arguments.kv_cache_dtype,
        logit_bytes=_bytes("--logit-bytes", arguments.logit_bytes),
        gate=arguments.gate,
        memory_bytes=None
        if arguments.memory_bytes is None
        else _bytes("--memory-bytes", arguments.memory_bytes),
        batch_safety_margin=arguments.batch_safety_margin,
        speculation_weight_fraction=arguments.speculation_weight_fraction,
    )


def _bytes(option: str, value: float) -> int:
    """Returns whole bytes of a number that may be written as 16e9."""
    if not 1 <= value < math.inf:
        raise ValueError(f"{option} {value:g} must be a finite number of bytes, at least 1.")
    return int(value)


def _row_buckets(text: str | None, max_rows: int) -> tuple[int, ...]:
    if text is None:
        return tuple(max_rows // 4**i for i in range(1, 8) if max_rows >= 4**i)
    try:
        return tuple(int(part) for part in text.split(",") if part)
    except ValueError:
        raise ValueError(
            f"--row-buckets {text} must be whole numbers with commas, as 4,16."
        ) from None


class _Progress:
    """Says on a terminal which step compiles, of how many, and the seconds so far."""

    def __init__(self):
        self._began, self._is_shown = time.monotonic(), sys.stderr.isatty()
        self.close: Callable[[], None] = lambda: None  # ends what shows the seconds

    def __call__(self, what: str, done: int, total: int) -> None:
        if not self._is_shown:
            return
        self.close()
        before = time.monotonic() - self._began
        count = f"{min(done + 1, total)} of {total}"

        def show(seconds: float) -> None:
            line = f"\r\033[K{what} ({count}, {before + seconds:.0f} s so far)"
            print(line, end="\n" if done == total else "", file=sys.stderr, flush=True)

        show(0)
        if done < total:
            self.close = every_second(show)
