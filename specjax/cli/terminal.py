"""Terminal output: text coloured by target or drafter, a status line, a summary."""

from __future__ import annotations

import itertools
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TextIO

from specjax.cli.prompts import messages_of
from specjax.runtime.seconds import every_second

if TYPE_CHECKING:
    from specjax.api.results import Chunk, Completion, GenerationStats
    from specjax.engine.request import TextPiece, TokenLogProbs

DIM, DRAFT, BOLD, RESET = "\x1b[2m", "\x1b[32m", "\x1b[1m", "\x1b[0m"
_CLEAR_LINE = "\r\x1b[K"
# Control characters that a terminal would act on; generated text may contain them.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def use_color(choice: str, stream: TextIO, environment: Mapping[str, str]) -> bool:
    """Returns whether to colour: `choice` is "always", "never" or "auto".

    "auto" colours terminals, unless NO_COLOR is set (no-color.org) or TERM is "dumb".
    """
    if choice != "auto":
        return choice == "always"
    is_wanted = not environment.get("NO_COLOR") and environment.get("TERM") != "dumb"
    return is_wanted and stream.isatty()


class TextWriter:
    """Writes prompts and generated text to a stream."""

    def __init__(self, stream: TextIO, *, has_color: bool, tokenizer: Any = None):
        self._tokenizer = tokenizer  # None: of a model without text
        self._stream = stream
        self._has_color = has_color
        self._is_terminal = stream.isatty()
        self._at_line_start = True

    def prompt(self, prompt: Any) -> None:
        """Writes a prompt before its text, on a terminal or with colour; of a chat its end."""
        if not (self._is_terminal or self._has_color):
            return
        if messages_of(prompt) is not None:
            prompt = f"{first_line(prompt)}\n"
        elif not isinstance(prompt, str):
            prompt = "".join(f"{token_id} " for token_id in prompt)
        self._write(prompt, DIM)

    def header(self, text: str) -> None:
        """Writes a header line."""
        self.end()
        self._write(f"=== {text} ===\n", BOLD)

    def output(self, part: Chunk | Completion) -> None:
        """Writes the text of a part, or its token ids where there is none."""
        if self._tokenizer is None:
            self.token_ids(part.token_ids)
        else:
            self.pieces(part.pieces)

    def pieces(self, pieces: Iterable[TextPiece]) -> None:
        """Writes text, with accepted draft tokens in another colour."""
        for is_draft, run in itertools.groupby(pieces, lambda piece: piece.is_draft):
            self._write("".join(piece.text for piece in run), DRAFT if is_draft else "")
        self._stream.flush()

    def token_ids(self, token_ids: Iterable[int]) -> None:
        """Writes the tokens of a model without a tokenizer."""
        self._write("".join(f"{token_id} " for token_id in token_ids), "")
        self._stream.flush()

    def logprobs(self, logprobs: Sequence[TokenLogProbs]) -> None:
        """Writes a line per token: its log-probabilities, and the most likely tokens'."""
        if not logprobs:
            return
        self.end()
        has_entropy = logprobs[0].entropy is not None
        entropy = ", entropy" if has_entropy else ""
        self._write(
            f"log-probability processed, raw{entropy}: token; most likely processed\n",
            BOLD,
        )
        for one in logprobs:
            line = f"{one.processed:9.4f} {one.raw:9.4f}"
            line += "" if one.entropy is None else f" {one.entropy:9.4f}"
            line += f": {self._name(one.token_id)}"
            if one.top_processed:
                top = (f"{self._name(i)} {value:.4f}" for i, value in one.top_processed)
                line += "; " + ", ".join(top)
            self._write(line + "\n", "")
        self._stream.flush()

    def _name(self, token_id: int) -> str:
        """Returns a token as its id, and its text if there is a tokenizer."""
        if self._tokenizer is None:
            return str(token_id)
        text = lambda *ids: self._tokenizer.decode(ids, skip_special_tokens=False)
        # After itself a token keeps the space that some tokenizers take from the first one.
        return f"{token_id} {text(token_id, token_id)[len(text(token_id)) :]!r}"

    def end(self) -> None:
        """Ends the line that is under way."""
        if not self._at_line_start:
            self._write("\n", "")
        self._stream.flush()

    def _write(self, text: str, color: str) -> None:
        if not text:
            return
        if self._is_terminal:
            text = _CONTROL.sub("\N{REPLACEMENT CHARACTER}", text)
        self._at_line_start = text.endswith("\n")
        is_colored = self._has_color and color
        self._stream.write(f"{color}{text}{RESET}" if is_colored else text)


class Status:
    """One line on stderr that says what is going on, and since when, where stderr is a terminal.

    It is gone after a `with` block.
    """

    def __init__(self, stream: TextIO | None = None):
        self._stream = stream or sys.stderr
        self._is_shown = False
        self._end_seconds: Callable[[], None] = lambda: None
        self.is_terminal = self._stream.isatty() and os.environ.get("TERM") != "dumb"
        self._is_over = os.environ.get("TQDM_DISABLE", "0").lower() not in ("", "0", "false")

    def show(self, text: str) -> None:
        if self.is_terminal and not self._is_over:
            self._end_seconds()
            self._write(f"{text} ...")
            self._is_shown = True
            self._end_seconds = every_second(
                lambda seconds: self._write(f"{text} ... {seconds:.0f} s")
            )

    def _write(self, text: str) -> None:
        self._stream.write(f"{_CLEAR_LINE}{DIM}{text}{RESET}")
        self._stream.flush()

    def clear(self) -> None:
        if self._is_shown:
            self._end_seconds()
            self._stream.write(_CLEAR_LINE)
            self._stream.flush()
            self._is_shown = False

    def report(self, what: str, done: int, total: int) -> None:
        """Shows how far something is; a `specjax.runtime.progress.Report`."""
        self.show(f"{what}: {done} of {total}" if total else what)

    def end(self) -> None:
        """Clears the line for good: text follows."""
        self.clear()
        self._is_over = True

    def __enter__(self) -> Status:
        return self

    def __exit__(self, *error: object) -> None:
        self.clear()


def legend() -> str:
    """Returns a line that explains the colours, in these colours."""
    return f"{DIM}prompt{RESET} · {DRAFT}drafted and accepted{RESET} · the target's own"


def summary(stats: GenerationStats) -> str:
    """Returns a one-line summary of the measurements."""
    parts = [
        f"{_count(stats.num_output_tokens, 'token')} in {_seconds(stats.run_s)} "
        f"({stats.tokens_per_second:.0f} tokens/s)",
        _speculation(stats),
        f"first token after {_seconds(stats.time_to_first_token_s)}",
        f"compile {_seconds(stats.compile_s)}",
    ]
    if stats.lossy:
        parts.append(f"not the target's own text ({', '.join(stats.lossy)})")
    if stats.self_check is not None:
        z_score = stats.self_check.z_score
        shown = "nothing drawn" if z_score is None else f"z = {z_score:+.1f}"
        parts.append(f"self-check {shown}")
    return " · ".join(parts)


def _speculation(stats: GenerationStats) -> str:
    if stats.drafter == "none" or stats.num_speculative_tokens == 0:
        return "no speculation"
    if stats.decisions and not any(d.num_speculative_tokens for d in stats.decisions):
        return f"no drafts: {stats.why}"
    if not stats.acceptance.num_drafted:
        return f"drafter {stats.drafter} proposed nothing"
    return (
        f"{stats.mean_acceptance_length:.2f} tokens per target step, "
        f"{100 * stats.acceptance_rate:.0f} % of drafts accepted"
    )


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value < 10 else f"{value:.0f} s"


def first_line(prompt: Any, limit: int = 60) -> str:
    """Returns a prompt's first words, for a header."""
    if isinstance(prompt, str):
        text = prompt
    elif (messages := messages_of(prompt)) is not None:
        text = str(messages[-1].get("content", ""))
    else:
        text = " ".join(map(str, prompt[:limit]))
    text = " ".join(text.split())
    return text if len(text) <= limit else text[: limit - 3] + "..."
