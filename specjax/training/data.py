"""Texts that a drafter is trained on: from files, or written by the target itself."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np

from specjax.config.checks import is_int
from specjax.training.texts import TextBatch

LEAST_TOKENS = 3  # of a text: a token with one before it, and one that is drafted
JSON_LINES = ".jsonl"
_TEXT, _PROMPT, _COMPLETION = "text", "prompt", "completion"


@dataclasses.dataclass(frozen=True)
class TrainingText:
    """Texts of at most `length` tokens, as arrays.

    Attributes:
      token_ids: i32[num_texts, length]; 0 after a text.
      lengths: i32[num_texts].
      is_learned: bool[num_texts, length], tokens that the drafter learns to propose.
      source: where they come from, for reports.
    """

    token_ids: np.ndarray
    lengths: np.ndarray
    is_learned: np.ndarray
    source: str = ""

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def length(self) -> int:
        """Tokens that a row holds."""
        return self.token_ids.shape[1]

    @property
    def num_tokens(self) -> int:
        return int(self.lengths.sum())

    @property
    def fingerprint(self) -> str:
        """Sixteen digits that change with any token."""
        digest = hashlib.sha256()
        for array in (self.token_ids, self.lengths, self.is_learned):
            digest.update(np.ascontiguousarray(array).tobytes())
        return digest.hexdigest()[:16]

    def counts(self, vocab_size: int) -> np.ndarray:
        """Returns how often each token is learned, i64[vocab_size]."""
        return np.bincount(self.token_ids[self.is_learned], minlength=vocab_size)

    def batch(self, step: int, rows: int, seed: int = 0) -> TextBatch:
        """Returns the texts of a step, [rows, length]; they depend on the arguments alone.

        An epoch visits every text once, in an order of its own. With fewer texts than rows, some
        stand in several rows.
        """
        chosen = [self._at(place, seed) for place in range(step * rows, (step + 1) * rows)]
        return self._of(np.asarray(chosen))

    def in_order(self, rows: int) -> Iterator[TextBatch]:
        """Yields all texts once, [rows, length]; empty texts fill the last batch."""
        for start in range(0, len(self), rows):
            index = np.arange(start, min(start + rows, len(self)))
            batch = self._of(index)
            missing = rows - len(index)
            pad = lambda x, n=missing: np.pad(x, ((0, n),) + ((0, 0),) * (x.ndim - 1))
            yield TextBatch(*map(pad, batch))

    def split(self, fraction: float) -> tuple[TrainingText, TrainingText]:
        """Returns the first texts, and a fraction of them from the end, at least one, held out.

        Args:
          fraction: above 0 and below 1.

        Raises:
          ValueError: there are fewer than two texts, or the fraction leaves none.
        """
        is_part = 0.0 < fraction < 1.0  # NaN is none
        held_out = max(1, round(len(self) * fraction)) if is_part else 0
        if not 0 < held_out < len(self):
            raise ValueError(
                f"a part of {fraction} of {len(self)} texts leaves none to train on or none to "
                "hold out; give more text, or held-out text of its own."
            )
        count = len(self) - held_out
        return self.take(slice(count)), self.take(slice(count, None))

    def take(self, index: Any) -> TrainingText:
        """Returns some of the texts, by anything that indexes the first axis of an array."""
        parts = self.token_ids[index], self.lengths[index], self.is_learned[index]
        return TrainingText(*parts, self.source)

    def _at(self, place: int, seed: int) -> int:
        epoch, index = divmod(place, len(self))
        return int(_order(len(self), seed, epoch)[index])

    def _of(self, index: np.ndarray) -> TextBatch:
        return TextBatch(self.token_ids[index], self.lengths[index], self.is_learned[index])


@functools.lru_cache(maxsize=4)
def _order(count: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.default_rng([seed, epoch]).permutation(count)


def from_token_ids(
    texts: Iterable[tuple[Sequence[int], int]], length: int, source: str = ""
) -> TrainingText:
    """Returns texts cut into pieces of `length` tokens, which are all learned past their prompt.

    A piece begins with the last token of the one before. Pieces of fewer than 3 tokens are left
    out, and so are pieces that lie in the prompt.

    Args:
      texts: token ids of a text, and how many of them, from its beginning, are its prompt.
      length: tokens of a piece, at least 3.

    Raises:
      ValueError: no piece is left, or the length is too small.
    """
    if length < LEAST_TOKENS:
        raise ValueError(f"{length=} must be at least {LEAST_TOKENS} tokens.")
    rows, lengths, learned = [], [], []
    for token_ids, num_prompt in map(_checked, texts):
        ids = np.asarray(token_ids, np.int32)
        for start in range(0, max(len(ids) - 1, 1), length - 1):
            piece = ids[start : start + length]
            is_learned = np.arange(start, start + length) >= num_prompt
            is_learned &= np.arange(length) < len(piece)
            if len(piece) < LEAST_TOKENS or not is_learned[LEAST_TOKENS - 1 :].any():
                continue
            rows.append(np.pad(piece, (0, length - len(piece))))
            lengths.append(len(piece))
            learned.append(is_learned)
    if not rows:
        raise ValueError(
            f"{source or 'the data'} holds no text of {LEAST_TOKENS} tokens with something to "
            "learn; give longer texts."
        )
    return TrainingText(np.stack(rows), np.asarray(lengths, np.int32), np.stack(learned), source)


def _checked(text: Any) -> tuple[Sequence[int], int]:
    """Returns the token ids of a text and the tokens of its prompt.

    Raises:
      TypeError: it is no such pair.
    """
    ids: Any = None
    num_prompt: Any = None
    if isinstance(text, tuple | list) and len(text) == 2:
        ids, num_prompt = text
    is_ids = not isinstance(ids, str) and np.ndim(ids) == 1
    is_ids = is_ids and (not len(ids) or np.issubdtype(np.asarray(ids).dtype, np.integer))
    if not is_ids or not is_int(num_prompt) or num_prompt < 0:
        raise TypeError(
            f"a text is {text!r:.100}; expected a pair of token ids, whole numbers, and how many "
            "of them are its prompt, as ([5, 6, 7], 0)."
        )
    return cast(Sequence[int], ids), num_prompt


def from_files(
    paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    tokenizer: Any,
    length: int = 512,
) -> TrainingText:
    """Returns the texts in files.

    A file is one text in UTF-8. Of a file `.jsonl`, each line is an object: with "text", or with
    "prompt" and "completion", of which the completion is learned. Of a folder, all files in it and
    below are read in the order of their names; those that are not UTF-8 are left out.

    Args:
      paths: of files and folders, or one.
      tokenizer: of the target.
      length: tokens of a piece, see `from_token_ids`.

    Raises:
      TypeError: there is no tokenizer.
      FileNotFoundError: there is no such file.
      ValueError: a line is no such object, or nothing is left to learn.
    """
    if not callable(getattr(tokenizer, "encode", None)):
        raise TypeError(
            f"tokenizer is {tokenizer!r:.100}; expected that of the target. For a target without "
            "one, encode the texts, and pass their token ids to from_token_ids."
        )
    if isinstance(paths, str | os.PathLike):
        paths = [paths]
    files = [file for path in paths for file in _files_of(Path(path))]
    source = ", ".join(str(path) for path in paths)
    texts = (text for file, is_named in files for text in _texts_of(file, is_named))
    encoded = (_encoded(tokenizer, *text) for text in texts)
    return from_token_ids(encoded, length, source)


def _files_of(path: Path) -> list[tuple[Path, bool]]:
    """Returns files, and whether each was named itself."""
    if not path.exists():
        raise FileNotFoundError(f"there is no file or folder {path}.")
    if path.is_file():
        return [(path, True)]
    return [(file, False) for file in sorted(path.rglob("*")) if file.is_file()]


def _texts_of(file: Path, is_named: bool) -> Iterator[tuple[str, str]]:
    """Yields prompts and what is learned after them."""
    try:
        content = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        if is_named:
            raise ValueError(f"{file} is not text in UTF-8: {error}.") from error
        return
    if file.suffix != JSON_LINES:
        if content.strip():
            yield "", content
        return
    for number, line in enumerate(content.split("\n"), 1):
        if line.strip():
            yield _of_line(f"{file}, line {number}", line)


def _of_line(where: str, line: str) -> tuple[str, str]:
    try:
        found = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where} is not JSON: {error}.") from error
    is_text = lambda name: isinstance(found, dict) and isinstance(found.get(name), str)
    if is_text(_TEXT):
        return "", found[_TEXT]
    if is_text(_PROMPT) and is_text(_COMPLETION):
        return found[_PROMPT], found[_COMPLETION]
    raise ValueError(
        f'{where}: expected an object with "text", or with "prompt" and "completion", all text; '
        f"got {line[:100]!r}."
    )


def _encoded(tokenizer: Any, prompt: str, text: str) -> tuple[list[int], int]:
    """Returns token ids, and how many of them are the prompt."""
    if not prompt:
        return tokenizer.encode(text), 0
    before = tokenizer.encode(prompt)
    return [*before, *tokenizer.encode_more(text)], len(before)
