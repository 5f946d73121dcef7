"""specjax plan: memory, rows and K of a model, a drafter and a device, without running them."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import warnings
from typing import TYPE_CHECKING, Any

from specjax.cli import engine_arguments, terminal
from specjax.cli.parser import EXIT_BAD_INPUT, add_aux_layer_ids
from specjax.config.checks import CAPTURED
from specjax.config.engine import EngineConfig
from specjax.config.speculation import SpeculationConfig
from specjax.runtime.stack_level import of_the_caller

if TYPE_CHECKING:
    from specjax.planning.plan_request import PlanRequest

DTYPES = ("float32", "bfloat16", "float16")
_ENGINE_OPTIONS = {
    "max_rows": "requests decoded at a time",
    "row_buckets": "fewer rows that bursts are compiled for, as EngineConfig has them (default: "
    "max-rows by 4, by 16, ...)",
    "max_context": "tokens of prompt and output together (default: the model's)",
    "page_size": "tokens of a page (default: chosen by device and model)",
    "kv_cache_dtype": "of the target's keys and values (default: the dtype of the weights)",
    "num_pages": "pages of the pool (default: as many as fit)",
    "logit_bytes": "most that float32 logits take at a time while drafts are verified; 1e8 may be "
    "written",
    "memory_bytes": "of each chip (default: what the device has; 16e9 may be written)",
    "batch_safety_margin": "of the free memory, kept from batches",
    "speculation_weight_fraction": "of the weight limit, up to where batches speculate",
    "gate": "which tokens of a batch weigh: those that rows have, or all that they may ever have",
}


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
    add_aux_layer_ids(parser)
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
        default=4,
        help="most tokens drafted per step (default %(default)s)",
    )
    parser.add_argument(
        "--acceptance-rate",
        type=float,
        default=0.7,
        metavar="P",
        help="how often a draft token stands, assumed to choose K (default %(default)s)",
    )
    engine_arguments.add_options(parser, _ENGINE_OPTIONS, max_rows=64)
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
            request = dataclasses.replace(request, device=device)
            with terminal.Status() as status:
                plan = plans.make_plan(request, status.report)
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
    if arguments.row_buckets is None:
        arguments.row_buckets = tuple(rows // 4**i for i in range(1, 8) if rows >= 4**i)
    return engine_arguments.config_of(arguments, _ENGINE_OPTIONS)
