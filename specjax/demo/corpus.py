"""The text: the standard library's own source, as found beside any Python.

The text is under the PSF-2.0 licence. Tests, tables of code points, the reference
manual as one string and files written by the build are left out; a library file is
held out whole when a hash of its path says so.
"""

from __future__ import annotations

import hashlib
import platform
import sysconfig
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from specjax.demo.pair import END_OF_TEXT, END_OF_TEXT_ID, VOCAB_SIZE

HELD_OUT_PERCENT = 3
_SKIPPED_FOLDERS = {
    *("site-packages", "dist-packages", "__pycache__"),
    *("test", "tests", "idle_test", "encodings", "pydoc_data", "__phello__"),
}


class SourceFile(NamedTuple):
    path: str  # relative to the standard library, with forward slashes
    text: str
    sha256: str

    @property
    def is_held_out(self) -> bool:
        return is_held_out(self.path)


def is_held_out(path: str) -> bool:
    """Returns whether a file is kept from training; depends on its path alone."""
    digest = hashlib.sha256(path.encode()).digest()
    return int.from_bytes(digest[:8], "big") % 100 < HELD_OUT_PERCENT


def source_files(root: Path | None = None) -> list[SourceFile]:
    """Returns the library's readable source files in order of their paths."""
    root = root or Path(sysconfig.get_paths()["stdlib"])
    files = []
    for path in root.rglob("*.py"):
        relative = path.relative_to(root)
        # The build writes _sysconfigdata_* and config-*/ with paths of one machine.
        is_written_by_build = any(
            part.startswith(("_sysconfigdata", "config-")) for part in relative.parts
        )
        if is_written_by_build or _SKIPPED_FOLDERS & set(relative.parts):
            continue
        data = path.read_bytes()
        try:
            text = data.decode("utf-8").replace("\r\n", "\n")
        except UnicodeDecodeError:
            continue
        if text.strip():
            sha256 = hashlib.sha256(data).hexdigest()
            files.append(SourceFile(relative.as_posix(), text, sha256))
    return sorted(files)


def manifest(files: list[SourceFile]) -> dict:
    """Returns what was read, so that another machine can tell whether it reads the same."""
    return {
        "source": "the Python standard library",
        "licence": "PSF-2.0",
        "python_version": platform.python_version(),
        "held_out_percent": HELD_OUT_PERCENT,
        "held_out": [file.path for file in files if file.is_held_out],
        "sha256": {file.path: file.sha256 for file in files},
    }


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
