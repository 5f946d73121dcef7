"""Text that the target writes itself: what it will be asked to verify, and no label at all.

A drafter is accepted where it agrees with the target along text of the target. So its own text
trains better than any other, and expected accepted tokens can be counted along it alone
(`specjax.training.objective`).
"""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from specjax.api.generation import generate
from specjax.config.sampling import SamplingParams
from specjax.heads.loading import DrafterSource
from specjax.models.base import Model
from specjax.runtime.progress import Progress, Report
from specjax.runtime.stack_level import of_the_caller
from specjax.training import learning
from specjax.training.data import TrainingText, from_token_ids
from specjax.training.fingerprints import weights_fingerprint

PROMPTS_AT_ONCE = 64


def text_of_target(
    target: Model,
    prompts: Sequence[Sequence[int]],
    *,
    sampling: SamplingParams | Sequence[SamplingParams],
    length: int = 512,
    folder: str | os.PathLike[str] | None = None,
    drafter: DrafterSource = None,
    progress: bool | Report | None = None,
) -> TrainingText:
    """Returns what the target writes after prompts, of which what it wrote is learned.

    Args:
      prompts: token ids of each.
      sampling: of all prompts, or of each, with n = 1.
      length: tokens of a piece, see `from_token_ids`.
      folder: where finished parts are kept: a call that was stopped goes on from there.
      drafter: what drafts while the target writes; it changes the speed alone.
      progress: as for `specjax.generate`.

    Raises:
      ValueError: there are no prompts, or as many sampling parameters as prompts are needed, or the
        folder holds the text of other prompts or another target.
    """
    if not prompts:
        raise ValueError("there are no prompts; give some text for the target to go on from.")
    each = [sampling] * len(prompts) if isinstance(sampling, SamplingParams) else list(sampling)
    if len(each) != len(prompts):
        raise ValueError(
            f"{len(each)} sampling parameters for {len(prompts)} prompts; give one each."
        )
    if any(one.n != 1 for one in each):
        raise ValueError("n must be 1 in all sampling parameters; repeat the prompt instead.")
    parts = _Parts(None if folder is None else Path(folder), _fingerprint(target, prompts, each))
    bar, texts = Progress(progress), []
    for number, start in enumerate(range(0, len(prompts), PROMPTS_AT_ONCE)):
        bar.report("text of the target", start, len(prompts))
        part = slice(start, start + PROMPTS_AT_ONCE)
        found = parts.read(number)
        if found is None:
            out = generate(target, prompts[part], drafter=drafter, sampling=each[part])
            found = [
                ([*prompt, *done.token_ids], len(prompt))
                for prompt, done in zip(prompts[part], out, strict=True)
                if done.finish_reason != "error"
            ]
            parts.write(number, found)
        texts += found
    bar.close()
    if missing := len(prompts) - len(texts):
        warnings.warn(
            f"{missing} of {len(prompts)} prompts ended with an error and are left out: look at "
            "generate's results for them.",
            stacklevel=of_the_caller(),
        )
    return from_token_ids(texts, length, f"text of {target.name or 'the target'} itself")


def prompts_of(text: TrainingText, count: int, num_tokens: int, seed: int = 0) -> list[list[int]]:
    """Returns pieces of a text for the target to go on from, each of `num_tokens` tokens.

    Texts take turns, and a piece begins anywhere in one; a shorter text is taken whole.

    Args:
      count: of pieces.
      num_tokens: at least 1.
      seed: of the places.

    Raises:
      ValueError: a number is out of range.
    """
    numbers = {"count": count, "num_tokens": num_tokens}
    learning.check_whole(numbers, {"count": 0, "num_tokens": 1})
    rng = np.random.default_rng(seed)
    prompts = []
    while len(prompts) < count:
        for index in rng.permutation(len(text))[: count - len(prompts)]:
            spare = max(int(text.lengths[index]) - num_tokens, 0)
            start = int(rng.integers(spare + 1))
            end = min(start + num_tokens, int(text.lengths[index]))
            prompts.append(text.token_ids[index, start:end].tolist())
    return prompts


def _fingerprint(
    target: Model, prompts: Sequence[Sequence[int]], sampling: Sequence[SamplingParams]
) -> str:
    said = (target.config, weights_fingerprint(target.params), list(sampling))
    digest = hashlib.sha256(repr(said).encode())
    for prompt in prompts:
        digest.update(np.asarray(prompt, np.int32).tobytes() + b"|")
    return digest.hexdigest()[:16]


class _Parts:
    """Parts of a text in a folder, as arrays: token ids side by side, and where each text ends."""

    def __init__(self, folder: Path | None, fingerprint: str):
        self._folder = folder
        if folder is None:
            return
        folder.mkdir(parents=True, exist_ok=True)
        said = folder / "fingerprint"
        if said.exists() and said.read_text() != fingerprint:
            raise ValueError(
                f"{folder} holds text of other prompts, sampling or another target; give a folder "
                "of its own."
            )
        said.write_text(fingerprint)

    def read(self, number: int) -> list[tuple[list[int], int]] | None:
        path = self._path(number)
        if path is None or not path.exists():
            return None
        with np.load(path) as stored:
            ids, ends, prompts = stored["token_ids"], stored["ends"], stored["prompts"]
        starts = [0, *ends[:-1]]
        return [
            (ids[start:end].tolist(), int(prompt))
            for start, end, prompt in zip(starts, ends, prompts, strict=True)
        ]

    def write(self, number: int, texts: list[tuple[list[int], int]]) -> None:
        path = self._path(number)
        if path is None:
            return
        partial = path.with_suffix(".partial")
        with partial.open("wb") as file:
            np.savez(
                file,
                token_ids=np.asarray([one for ids, _ in texts for one in ids], np.int32),
                ends=np.cumsum([len(ids) for ids, _ in texts], dtype=np.int64),
                prompts=np.asarray([prompt for _, prompt in texts], np.int64),
            )
        partial.replace(path)  # a reader sees a whole part or none

    def _path(self, number: int) -> Path | None:
        return None if self._folder is None else self._folder / f"part-{number:05}.npz"
