"""specjax generate: continue prompts, with or without speculation."""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specjax.cli import (
    comparison,
    engine_arguments,
    json_document,
    mesh_argument,
    prompts,
    sampling_arguments,
    terminal,
)
from specjax.cli.parser import add_aux_layer_ids, json_or_file
from specjax.config.names import BY_NAME, DRAFTERS, NO_DRAFTER, check_drafter
from specjax.config.rules import VERIFICATION_RULES
from specjax.config.speculation import DEFAULT_MOST, SpeculationConfig
from specjax.config.vllm_json import HEADS

if TYPE_CHECKING:
    from specjax.api.generation import Generation
    from specjax.config.engine import EngineConfig
    from specjax.models.base import Model

DEFAULT_MODEL = "demo"
# Draft tokens of the embedded pair: up to temperature WARM, and above it. With the token before
# them they are 8 and 4, which products of a CPU are padded to.
EMBEDDED_K, EMBEDDED_WARM_K, WARM = 7, 3, 0.5
EMBEDDED_TEMPERATURE = 0.5  # where none is given: of its generation_config.json
_ENGINE_OPTIONS = {
    "kv_cache_dtype": "of the target's keys and values (default: the dtype of the weights)",
    "page_size": "tokens per page of keys and values (default: chosen by device and model)",
    "num_pages": "pages in all (default: what the prompts need)",
    "max_rows": "prompts decoded at a time; the others wait",
    "burst_steps": "steps on the device between looks of the host",
    "max_context": "tokens of prompt and output together (default: the model's)",
    "token_bucket": "tokens computed at a time under --numerics invariant",
    "numerics": "'invariant': equal bits whatever is drafted or decoded beside",
    "activation_dtype": "of hidden states; 'float32' leaves hardly any rounding that depends on "
    "what is drafted beside weights in bfloat16 (default that of the weights)",
}


def add_parser(commands: Any) -> None:
    """Adds the command to the subparsers of `specjax`."""
    parser = commands.add_parser(
        "generate",
        help="continue prompts",
        description="Continues prompts; the text is the same with and without a drafter.",
    )
    parser.set_defaults(run=run, command_parser=parser)
    parser.add_argument("prompts", nargs="*", metavar="PROMPT")
    parser.add_argument(
        "--prompts",
        dest="prompts_file",
        metavar="FILE",
        help='JSON lines ("-": stdin): a string, or an object with prompt (text or token ids) '
        "or messages, and sampling parameters of its own; in a file named .txt a prompt per line",
    )
    parser.add_argument("--chat", action="store_true", help="send text through the chat template")
    parser.add_argument(
        "--chat-arguments",
        type=prompts.chat_arguments,
        metavar="JSON",
        help='of the template, for every chat: {"enable_thinking": false, "tools": [...], '
        '"chat_template": "a name or a text", "continue_final_message": true}',
    )
    _add_model_options(parser)
    sampling_arguments.add_options(parser)
    _add_output_options(parser)
    engine_arguments.add_options(parser, _ENGINE_OPTIONS)


def _add_model_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("model and speculation")
    group.add_argument(
        "--model",
        default=DEFAULT_MODEL,
        help="a folder in Hugging Face format, a hub name, or the embedded %(default)r",
    )
    group.add_argument(
        "--drafter",
        help=f"{', '.join(map(repr, DRAFTERS))}, or a folder or hub name of a draft model "
        "(default: 'demo' with the embedded model, else none)",
    )
    add_aux_layer_ids(group)
    group.add_argument(
        "--num-speculative-tokens",
        type=int,
        metavar="K",
        help=f"most tokens drafted per step; 0 is off (default: up to {DEFAULT_MOST}; "
        f"{EMBEDDED_K} for one text of the embedded model, or {EMBEDDED_WARM_K} above "
        f"temperature {WARM})",
    )
    group.add_argument(
        "--verification",
        choices=VERIFICATION_RULES,
        help="how drafts are accepted (default seeded)",
    )
    group.add_argument(
        "--speculative-config",
        type=json_or_file,
        metavar="JSON|FILE",
        help="the same and more in vLLM's form, or a file of it; options above win over it",
    )
    group.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="of the weights (default float32 on CPU and T4, bfloat16 elsewhere)",
    )
    mesh_argument.add_option(group)


def _add_output_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("output")
    group.add_argument("--json", action="store_true", help="one JSON document on stdout")
    group.add_argument(
        "--output", metavar="FILE", help="JSON lines, one per text, in place of text on stdout"
    )
    group.add_argument(
        "--color",
        choices=("auto", "always", "never"),
        default="auto",
        help="tell accepted drafts apart (default: on a terminal, unless NO_COLOR is set)",
    )
    group.add_argument(
        "--compare",
        action=argparse.BooleanOptionalAction,
        help="decode again with and without drafts, in turn, and say how much faster drafts are "
        "(default: for one prompt of the embedded model)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Runs the command; returns the exit code."""
    entries = prompts.collect(
        arguments.prompts,
        arguments.prompts_file,
        is_chat=arguments.chat,
        chat_arguments=arguments.chat_arguments,
    )
    speculation = speculation_config(arguments)
    comparison.check(arguments, speculation)
    if len(entries) == 1 and getattr(arguments, "n", 1) == 1:
        speculation = _of_embedded_pair(arguments, entries[0], speculation)
    engine = engine_arguments.config_of(arguments, _ENGINE_OPTIONS)
    _check_output(arguments)
    with terminal.Status() as status:
        return _generate(arguments, entries, speculation, engine, status)


def _check_output(arguments: argparse.Namespace) -> None:
    """Raises ValueError for an --output that cannot be written, before there is something to."""
    if arguments.output is None:
        return
    if arguments.json:
        raise ValueError("--output writes JSON lines in place of --json; leave out one of them.")
    path = Path(arguments.output)
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        folder = path.parent
        reason = "is a folder" if path.is_dir() else "cannot be written"
        if not folder.is_dir():
            reason = f"lies in {folder}, which is no folder"
        raise ValueError(f"--output {path} {reason}; name a file in a folder of yours.")


def speculation_config(arguments: argparse.Namespace) -> SpeculationConfig:
    """Returns the config of vLLM's JSON, overridden by the options.

    Raises:
      ValueError: invalid JSON, an unknown method, or a value out of range.
    """
    given = SpeculationConfig()
    if arguments.speculative_config is not None:
        given = SpeculationConfig.from_json(arguments.speculative_config)
    names = "num_speculative_tokens", "verification"
    changes = {name: getattr(arguments, name) for name in names}
    changes = {name: value for name, value in changes.items() if value is not None}
    drafter = arguments.drafter
    if drafter is None and given.method is None and arguments.model == DEFAULT_MODEL:
        drafter = "demo"
    if drafter is not None:
        check_drafter(drafter)
        is_model = drafter not in (NO_DRAFTER, *BY_NAME)
        method = None if drafter == NO_DRAFTER else drafter
        changes["model"] = drafter if is_model else None
        changes["method"] = "draft_model" if is_model else method
    return dataclasses.replace(given, **changes)


def _of_embedded_pair(
    arguments: argparse.Namespace, entry: prompts.PromptEntry, config: SpeculationConfig
) -> SpeculationConfig:
    """Returns a config that drafts from the first step on, for one prompt of the embedded model.

    By default a call decodes plainly until it has measured that drafting is faster. One text of
    this small model ends before that, and what drafts bring it was measured: docs/benchmarks.
    """
    is_asked = arguments.drafter is not None or arguments.speculative_config is not None
    if is_asked or arguments.model != DEFAULT_MODEL:
        return config
    depth = arguments.num_speculative_tokens
    if depth is None:
        given = sampling_arguments.given_options(arguments) | dict(entry.sampling)
        is_warm = given.get("temperature", EMBEDDED_TEMPERATURE) > WARM
        depth = EMBEDDED_WARM_K if is_warm else EMBEDDED_K
    return dataclasses.replace(config, policy="fixed", num_speculative_tokens=depth)


def _generate(arguments, entries, speculation, engine, status) -> int:
    status.show("starting")
    # Not before: these import jax, which takes longer than reading the arguments.
    from specjax.api import generation
    from specjax.heads.loading import LoadedDrafter
    from specjax.runtime import compilation_cache

    compilation_cache.enable()
    status.show(f"loading {arguments.model}")
    mesh = mesh_argument.mesh_of(arguments.mesh)
    target, drafter = _load(arguments, speculation, engine, mesh)
    if isinstance(drafter, LoadedDrafter):
        status.clear()
        for note in drafter.notes:  # a wrong guess is silent otherwise: few drafts are accepted
            print(f"specjax: the drafter {note}", file=sys.stderr)
    shared = sampling_arguments.given_options(arguments)
    sampling = [{**shared, **entry.sampling} for entry in entries]
    call: dict[str, Any] = {
        "drafter": drafter,
        "speculative_config": speculation,
        "engine": engine,
        "mesh": mesh,
    }
    is_one = len(entries) == 1 and sampling[0].get("n", 1) == 1
    is_streamed = is_one and not arguments.json and arguments.output is None
    try:
        if is_streamed:
            stream = generation.stream(
                target,
                [entries[0].prompt],
                sampling=sampling,
                progress=status.report,
                **call,
            )
            result = _write_stream(_writer(arguments, target), entries[0].prompt, stream, status)
        else:
            status.clear()
            result = generation.generate(
                target,
                [entry.prompt for entry in entries],
                sampling=sampling,
                progress=status.is_terminal,
                **call,
            )
            status.clear()
            _write_result(arguments, entries, result, target, drafter)
        code = _report(arguments, entries, result)
        if comparison.is_wanted(arguments, is_streamed, result):
            with terminal.Status() as again:  # that of the text has ended
                line = comparison.of(target, entries, result, call, again.report)
            print(line, file=sys.stderr)
    except ValueError as error:
        raise ValueError(_with_source(str(error), entries)) from error
    return code


def _load(
    arguments: argparse.Namespace, config: SpeculationConfig, engine: EngineConfig, mesh: Any
):
    """Returns the target, and the drafter, its weights or its name."""
    from specjax.api.loading import load_draft_model
    from specjax.checkpoints.any_model import load_any_model
    from specjax.heads.loading import is_head, load_drafter

    source = None if config.method in BY_NAME else config.model
    if source is not None:
        check_drafter(source)
    target = load_any_model(arguments.model, dtype=arguments.dtype, mesh=mesh)
    if config.method in HEADS or (source is not None and is_head(source)):
        return target, load_drafter(source, target, config, aux_layer_ids=arguments.aux_layer_ids)
    if arguments.aux_layer_ids is not None:
        raise ValueError("--aux-layer-ids is for a head over the model; leave it out.")
    if source is None:
        return target, config.method
    options = {"engine": engine, "mesh": mesh, "dtype": arguments.dtype}
    draft = load_draft_model(source, target, config, **options)
    return target, load_drafter(draft, target, config)


def _write_stream(writer: terminal.TextWriter, prompt, stream, status) -> Generation:
    """Writes text as it comes; returns the whole result."""
    is_begun = False
    try:
        for chunk in stream:
            if not is_begun:
                status.end()
                writer.prompt(prompt)
                is_begun = True
            writer.output(chunk)
    finally:
        status.clear()
        writer.end()
    result = stream.result()
    writer.logprobs(result[0].logprobs or ())
    return result


def _write_result(arguments, entries, result: Generation, target, drafter) -> None:
    """Writes everything at once: a JSON document, or texts under headers."""
    if arguments.output is not None:
        lines = json_document.lines(result, [entry.prompt for entry in entries])
        Path(arguments.output).write_text(lines, encoding="utf-8")
        return
    if arguments.json:
        about = {
            "model": target.name,
            "drafter": getattr(drafter, "name", drafter),
        }
        print(json_document.render(result, about))
        return
    writer = _writer(arguments, target)
    for completion in result:
        entry = entries[completion.prompt_index]
        place = f"prompt {completion.prompt_index}"
        if sum(c.prompt_index == completion.prompt_index for c in result) > 1:
            place += f", sample {completion.sample_index}"
        writer.header(f"{place}: {terminal.first_line(entry.prompt)}")
        if completion.error is None:
            writer.prompt(entry.prompt)
        writer.output(completion)
        writer.logprobs(completion.logprobs or ())
        writer.end()


def _writer(arguments: argparse.Namespace, target: Model) -> terminal.TextWriter:
    has_color = terminal.use_color(arguments.color, sys.stdout, os.environ)
    return terminal.TextWriter(sys.stdout, has_color=has_color, tokenizer=target.tokenizer)


def _report(arguments, entries, result: Generation) -> int:
    """Writes failures and measurements to stderr; returns the exit code."""
    failed = [completion for completion in result if completion.error is not None]
    for completion in failed:
        message = _with_source(f"{completion.error}", entries, completion.prompt_index)
        print(f"specjax: error: {message}", file=sys.stderr)
    _warn_of_cuts(result)
    if not arguments.json:
        if result.stats.acceptance.num_drafted and terminal.use_color(
            arguments.color, sys.stderr, os.environ
        ):
            print(terminal.legend(), file=sys.stderr)
        print(terminal.summary(result.stats), file=sys.stderr)
    return 1 if failed else 0


def _warn_of_cuts(result: Generation) -> None:
    """Warns of texts that ended at the context limit, before their max_tokens."""
    cut = [
        completion
        for completion in result
        if completion.finish_reason == "length"
        and completion.sampling is not None
        and len(completion.token_ids) < completion.sampling.max_tokens
    ]
    if not cut:
        return
    first = cut[0]
    assert first.sampling is not None
    others = f", and {len(cut) - 1} more texts did" if len(cut) > 1 else ""
    print(
        f"specjax: warning: prompt {first.prompt_index} ended after "
        f"{len(first.token_ids)} of max_tokens="
        f"{first.sampling.max_tokens} tokens, where its context ended: "
        f"{len(first.prompt_token_ids)} tokens of prompt and {len(first.token_ids)} of "
        f"output fill it{others}; shorten the prompt or raise --max-context where the "
        "model takes more.",
        file=sys.stderr,
    )


def _with_source(message: str, entries, index: int | None = None) -> str:
    """Returns an error message with the line of its prompt."""
    named = re.match(r"prompt (\d+): ", message)
    if named is not None and len(entries) == 1:
        message = message[named.end() :]
    if index is None and named is not None:
        index = int(named[1])
    if index is None or not entries[index].source:
        return message
    return f"{entries[index].source}: {message}"
