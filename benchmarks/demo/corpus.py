"""The text that the pair learns: the library that `specjax.demo.corpus` reads, and its tests.

    python -m benchmarks.demo.corpus text

writes the library's files as they are split. Tests are a text of their own, which the target reads
too.
"""

from __future__ import annotations

import argparse
import hashlib
import platform
import sysconfig
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from benchmarks.demo.pair import END_OF_TEXT, END_OF_TEXT_ID, VOCAB_SIZE
from specjax.demo.corpus import HELD_OUT_PERCENT, SourceFile, is_test, read_files, source_files

MOST_CHARACTERS_OF_A_TEST = 400_000  # larger ones are tables
_SKIPPED_TESTS = ("test/encoded", "lib2to3/tests/data")


def files_of_tests(root: Path | None = None) -> list[SourceFile]:
    """Returns the library's tests in order of their paths."""
    root = root or Path(sysconfig.get_paths()["stdlib"])
    files = read_files(root, [path for path in root.rglob("*.py") if is_test(root, path)])
    return [
        file
        for file in files
        if not file.path.startswith(_SKIPPED_TESTS) and len(file.text) < MOST_CHARACTERS_OF_A_TEST
    ]


def manifest(files: list[SourceFile], tests: list[SourceFile]) -> dict:
    """Returns what was read, so that another machine can tell whether it reads the same.

    Args:
      files: of the library, those that are held out among them.
      tests: that were read.
    """
    return {
        "source": "the Python standard library",
        "licence": "PSF-2.0",
        "python_version": platform.python_version(),
        "held_out_percent": HELD_OUT_PERCENT,
        "held_out": [file.path for file in files if file.is_held_out],
        "sha256": {file.path: file.sha256 for file in files},
        "num_tests": len(tests),
        "sha256_of_tests": _digest(tests),
    }


def _digest(files: list[SourceFile]) -> str:
    """Returns one sha256 of the paths and contents of files."""
    lines = "".join(f"{file.sha256}  {file.path}\n" for file in files)
    return hashlib.sha256(lines.encode()).hexdigest()


def train_tokenizer(files: list[SourceFile]) -> Tokenizer:
    """Returns a byte-level BPE of the files that are not held out."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    texts = (file.text for file in files if not file.is_held_out)
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def encode(files: list[SourceFile], tokenizer: Tokenizer) -> np.ndarray:
    """Returns i32[num_tokens]: every file, each preceded by the end of the one before."""
    parts = []
    for encoding in tokenizer.encode_batch_fast([file.text for file in files]):
        parts.append(np.asarray([END_OF_TEXT_ID, *encoding.ids], np.int32))
    return np.concatenate([*parts, np.asarray([END_OF_TEXT_ID], np.int32)])


def windows(token_ids: np.ndarray, step: int, rows: int, length: int, seed: int = 0) -> np.ndarray:
    """Returns the batch i32[rows, length + 1] of a step.

    An epoch visits every window once, in an order and from an offset of its own; the
    last token of a window is only predicted. The same step gives the same batch, so
    a resumed run continues where it stopped.
    """
    num_windows = (len(token_ids) - length - 1) // length
    epoch, index = divmod(step, num_windows // rows)
    rng = np.random.default_rng([seed, length, epoch])
    offset = rng.integers(length)
    chosen = rng.permutation(num_windows)[index * rows : (index + 1) * rows]
    starts = chosen * length + offset
    return token_ids[starts[:, None] + np.arange(length + 1)]


def main() -> None:
    """Writes the library's files as they are split, for `specjax train --data --held-out`."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("folder", type=Path, help="gets the folders library and held_out")
    folder = parser.parse_args().folder
    for file in source_files():
        path = folder / ("held_out" if file.is_held_out else "library") / file.path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(file.text, encoding="utf-8")


if __name__ == "__main__":
    main()
