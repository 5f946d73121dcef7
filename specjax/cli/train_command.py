"""specjax train: a drafter for a target, from text or from what the target writes."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

from specjax.cli.parser import add_aux_layer_ids, at_least
from specjax.config.names import OptimizerName, TrainedKind

KINDS = get_args(TrainedKind)
RUN_FOLDER = "training"  # beside the drafter: checkpoints, own text, plot


def add_parser(commands: Any) -> None:
    """Adds the command to the subparsers of `specjax`."""
    parser = commands.add_parser(
        "train",
        help="train a drafter for a model",
        description="Trains a drafter along text, or along what the target writes itself after the "
        "beginnings of that text, and saves it in a published format. A command that was stopped "
        "goes on from its last checkpoint when it is run again.",
    )
    parser.set_defaults(run=run, command_parser=parser)
    parser.add_argument(
        "--target", metavar="T", required=True, help="a folder, a hub name, or 'demo'"
    )
    parser.add_argument("--kind", choices=KINDS, default="eagle3", help="(default %(default)s)")
    parser.add_argument(
        "--data",
        metavar="PATH",
        nargs="+",
        required=True,
        help="files of text, files .jsonl with 'text' or 'prompt' and 'completion', or folders",
    )
    parser.add_argument("--out", metavar="FOLDER", required=True, help="of the drafter")
    parser.add_argument(
        "--stored",
        choices=("int8",),
        help="stores matrices in int8, which specjax alone reads in heads (default: as computed)",
    )
    parser.add_argument(
        "--start",
        metavar="FOLDER",
        help="a head or a draft model that goes on learning, in place of a new one of --kind",
    )
    parser.add_argument(
        "--held-out",
        metavar="PATH",
        nargs="+",
        help="held-out data; each look uses at most a quarter of the texts trained on since the "
        "last look, and at least 64 (default: a twentieth of the data)",
    )
    _add_own_text(parser)
    _add_head(parser)
    _add_training(parser)
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")


def _add_own_text(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("text of the target itself")
    group.add_argument(
        "--own-texts",
        metavar="N",
        type=at_least(0),
        default=0,
        help="texts that the target writes; 0: the data itself is learned (default %(default)s)",
    )
    group.add_argument(
        "--prompt-tokens",
        metavar="N",
        type=at_least(1),
        default=32,
        help="tokens of a text that the target goes on from (default %(default)s)",
    )
    group.add_argument(
        "--temperatures",
        metavar="T,T,...",
        default="0,0.8",
        help="that it writes with, in turn (default %(default)s)",
    )


def _add_head(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("drafter")
    add_aux_layer_ids(
        group, "layers of the target whose inputs it reads (eagle3, p-eagle, dflash, dspark)"
    )
    group.add_argument(
        "--draft-vocab-size",
        type=at_least(1),
        metavar="N",
        help="most frequent tokens of the text, the only ones that it can say (eagle3, p-eagle, "
        "dflash, dspark; default: all)",
    )
    group.add_argument(
        "--head",
        metavar="NAME=VALUE",
        nargs="+",
        default=[],
        help="other options of the kind, as num_layers=2; docs/training.md lists them",
    )


def _add_training(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("training")
    whole = {
        "depth": (4, "draft tokens per position that it learns"),
        "rows": (8, "texts of a step"),
        "length": (256, "tokens of a text"),
        "steps": (1000, "updates"),
        "eval-every": (100, "steps between looks at held-out text"),
        "checkpoint-every": (100, "steps"),
    }
    for name, (default, what) in whole.items():
        group.add_argument(
            f"--{name}",
            metavar="N",
            type=at_least(1),
            default=default,
            help=f"{what} (default %(default)s)",
        )
    group.add_argument(
        "--minutes",
        metavar="N",
        type=float,
        help="after which it ends with a checkpoint, to go on from when it is run again (default: "
        "--steps alone end it)",
    )
    group.add_argument(
        "--patience",
        metavar="N",
        type=at_least(1),
        help="looks without a lower loss after which it stops (default: never)",
    )
    group.add_argument(
        "--optimizer",
        choices=get_args(OptimizerName),
        default="muon",
        help="(default %(default)s)",
    )
    group.add_argument(
        "--learning-rate",
        metavar="R",
        type=float,
        help="peak (default 0.02 of muon, 0.001 of adamw; with --start a tenth of these)",
    )
    group.add_argument(
        "--seed", metavar="N", type=at_least(0), default=0, help="(default %(default)s)"
    )
    group.add_argument(
        "--objective",
        metavar="NAME=WEIGHT",
        nargs="+",
        default=[],
        help="weights of losses, as likeliest=1 accepted=0.5 decay=0.8; docs/training.md",
    )


def run(arguments: argparse.Namespace) -> int:
    """Runs the command; returns the exit code."""
    # Not before: this imports jax.
    import specjax
    from specjax.checkpoints.pretrained_folder import check_folder
    from specjax.training import report, trainer
    from specjax.training.figures import table

    # What is wrong is said before hours of work, not after.
    config, head = _config(arguments), _head(arguments)
    folder = Path(arguments.out).expanduser().absolute()
    check_folder(folder)
    _check_out(folder, arguments.target)
    target = specjax.load_model(arguments.target)
    start = None
    if arguments.start is not None:
        start = specjax.load_drafter(arguments.start, target)
    else:
        trainer.check(target, arguments.kind, config, head)
    work = folder.with_name(f"{folder.name}.{RUN_FOLDER}")
    text, held_out = _texts(arguments, target, work)
    _say(arguments, f"{text.num_tokens:,} tokens of {text.source}")

    def on_look(look: Any) -> None:
        loss = "" if look.training_loss is None else f", training loss {look.training_loss:.3f}"
        _say(arguments, f"\nstep {look.step}{loss}\n{table(look.figures)}")

    trained = trainer.train(
        target,
        text,
        arguments.kind,
        config=config,
        head=head,
        held_out=held_out,
        start=start,
        folder=work / "run",
        minutes=arguments.minutes,
        progress=sys.stderr.isatty(),
        on_look=on_look,
    )
    trained.save(folder, stored=arguments.stored)
    plot = report.try_draw(trained.looks, work / "training.png")
    if arguments.json:
        print(json.dumps(trained.facts | {"out": str(folder)}, indent=2))
        return 0
    print(
        f"\nheld-out text, the weights of step {trained.best.step}:\n{table(trained.best.figures)}"
    )
    print(f"saved in {folder}" + (f", curves in {plot}" if plot else ""))
    print(
        f"try it: specjax generate --model {arguments.target} --drafter {folder} --compare PROMPT"
    )
    return 0


def _check_out(folder: Path, target: str) -> None:
    """Raises ValueError where the drafter would replace a model that was not trained here."""
    from specjax.checkpoints.pretrained_folder import has_own_card

    is_target = Path(target).expanduser().absolute() == folder
    if is_target or (folder.exists() and any(folder.iterdir()) and not has_own_card(folder)):
        what = "the target" if is_target else "a model that was not trained by this command"
        raise ValueError(f"--out {folder} holds {what}, which would be replaced; give another.")


def _say(arguments: argparse.Namespace, text: str) -> None:
    print(text, file=sys.stderr if arguments.json else sys.stdout, flush=True)


def _texts(arguments: argparse.Namespace, target: Any, work: Path) -> tuple[Any, Any]:
    """Returns what is learned, and what is held out, or its fraction."""
    from specjax.training import data, own_text

    if target.tokenizer is None:
        raise ValueError(
            f"{arguments.target} has no tokenizer; use specjax.training.train, which takes token "
            "ids."
        )
    read = lambda paths: data.from_files(paths, target.tokenizer, arguments.length)
    text = read(arguments.data)
    held_out = read(arguments.held_out) if arguments.held_out else 0.05
    if not arguments.own_texts:
        return text, held_out
    write = lambda source, count, name: own_text.text_of_target(
        target,
        own_text.prompts_of(source, count, arguments.prompt_tokens, arguments.seed),
        sampling=_sampling(arguments, count),
        length=arguments.length,
        folder=work / name,
        progress=sys.stderr.isatty(),
    )
    if arguments.held_out:
        count = max(8, arguments.own_texts // 20)
        held_out = write(held_out, count, "held_out_text")
    return write(text, arguments.own_texts, "own_text"), held_out


def _sampling(arguments: argparse.Namespace, count: int) -> list[Any]:
    import specjax

    try:
        temperatures = [float(part) for part in arguments.temperatures.split(",")]
    except ValueError:
        raise ValueError(
            f"--temperatures {arguments.temperatures!r} must be numbers with commas, as 0,0.8."
        ) from None
    most = arguments.length - arguments.prompt_tokens
    if most < 1:
        raise ValueError(
            f"--prompt-tokens {arguments.prompt_tokens} leave no room in --length "
            f"{arguments.length}; lower them."
        )
    return [
        specjax.SamplingParams(
            temperature=temperatures[i % len(temperatures)],
            max_tokens=most,
            seed=arguments.seed + i,
        )
        for i in range(count)
    ]


def _head(arguments: argparse.Namespace) -> dict[str, Any]:
    head = _pairs("--head", arguments.head)
    if arguments.aux_layer_ids is not None:
        head["aux_layers"] = arguments.aux_layer_ids
    if arguments.draft_vocab_size is not None:
        head["draft_vocab_size"] = arguments.draft_vocab_size
    return head


def _config(arguments: argparse.Namespace) -> Any:
    from specjax.training.objective import Objective
    from specjax.training.trainer import TrainingConfig

    weights = _pairs("--objective", arguments.objective)
    try:
        objective = Objective(**weights)
    except TypeError as error:
        names = ", ".join(Objective.__dataclass_fields__)
        raise ValueError(
            f"--objective {' '.join(arguments.objective)}: expected some of {names}."
        ) from error
    names = {field.name for field in dataclasses.fields(TrainingConfig)} - {"objective"}
    given = {name: value for name, value in vars(arguments).items() if name in names}
    return TrainingConfig(objective=objective, **given)


def _pairs(option: str, given: Sequence[str]) -> dict[str, Any]:
    """Returns values by name; they are JSON, or else text."""
    found = {}
    for each in given:
        name, is_pair, value = each.partition("=")
        if not is_pair:
            raise ValueError(f"{option} {each!r} must be NAME=VALUE.")
        try:
            found[name] = json.loads(value)
        except json.JSONDecodeError:
            found[name] = value
    return found
