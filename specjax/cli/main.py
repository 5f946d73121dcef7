"""specjax COMMAND ...: runs a command and sets the exit code."""

from __future__ import annotations

import argparse
import io
import os
import sys
import warnings
from collections.abc import Sequence

from specjax.cli import generate_command, inspect_command, plan_command, train_command
from specjax.cli.bench import command as bench_command
from specjax.cli.parser import EXIT_BAD_INPUT, Parser

EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit code.

    With argv None the process is the command's own: `plan` then leaves accelerators alone.

    0 is success, 1 a request that failed among others, 2 bad input. Messages go to
    stderr, results to stdout.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if sys.stdout is None or sys.stderr is None:
        # The next file that is opened would take its place, and what libraries write would go
        # there. With file=None, where stderr is the closed one, print takes stdout.
        print(
            "specjax: error: stdout or stderr is closed; send it somewhere, as to /dev/null.",
            file=sys.stderr,
        )
        return EXIT_BAD_INPUT
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a terminal without UTF-8
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            code = _run(arguments, owns_process=argv is None)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The pipe is closed; Python would raise again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE
    except (ValueError, NotImplementedError, OSError) as error:
        if os.environ.get("SPECJAX_TRACEBACK"):
            raise
        print(f"specjax: error: {_one_line(_worded(error))}", file=sys.stderr)
        return EXIT_BAD_INPUT


def _run(argv: list[str], owns_process: bool) -> int:
    parser = build_parser()
    arguments = parser.parse_args(argv)
    if "run" not in arguments:
        parser.print_help()
        return 0
    arguments.owns_process = owns_process
    return arguments.run(arguments)


def build_parser() -> Parser:
    """Returns the parser of every command."""
    parser = Parser(
        prog="specjax",
        description="Lossless speculative decoding for JAX.",
        epilog="An environment variable SPECJAX_TRACEBACK=1 shows where an error arose.",
    )
    parser.add_argument("--version", action=_Version, nargs=0)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    generate_command.add_parser(commands)
    plan_command.add_parser(commands)
    inspect_command.add_parser(commands)
    train_command.add_parser(commands)
    bench_command.add_parser(commands)
    return parser


class _Version(argparse.Action):
    """Prints the version; imports the package only when asked."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, help="show the version", **options)

    def __call__(self, parser, namespace, values, option_string=None):
        import specjax

        print(f"specjax {specjax.__version__}")
        parser.exit()


def _show_warning(message, category, filename, lineno, file=None, line=None) -> None:
    del category, filename, lineno, file, line
    print(f"specjax: warning: {_one_line(message)}", file=sys.stderr)


def _worded(error: Exception) -> str:
    """Returns an error's message; for an OSError the file and the reason, without its number."""
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return f"{os.fspath(error.filename)}: {error.strerror[:1].lower()}{error.strerror[1:]}."
    return str(error)


def _one_line(message: object) -> str:
    return " ".join(str(message).split())
