"""Predicts the memory of uncompiled steps from compiled ones. No jax.

XLA reports exactly the bytes that a compiled step needs beside its arguments. They are, to a
good approximation, the larger of two parts that do not live at the same time:

    the head   arrays of [tokens, vocabulary] while tokens are chosen   bursts, mixed steps
    the body   activations of [tokens, width] inside a layer            prefills, mixed steps

and each is linear in its tokens, with a step where the compiler changes the layout (that of
a product of few tokens differs from that of many).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence

import numpy as np

from specjax.decode.bucket import BURST, MIXED, PREFILL

KINDS = (BURST, PREFILL, MIXED)

# Largest relative error with which one line is accepted; above it a bend is searched for.
LINE_TOLERANCE = 0.02
# Largest relative error with which fewer features are preferred to a closer fit.
FEATURE_TOLERANCE = 0.002


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepShape:
    """Static sizes of one compiled step, per shard."""

    kind: str  # BURST, PREFILL or MIXED
    rows: int  # rows that decode, or prompts of a prefill
    tokens: int  # flat tokens of the target's forward
    logit_tokens: int = 0  # tokens whose logits exist at once
    law_tokens: int = 0  # tokens whose distributions rules compare at once
    # Rows of a burst of fewer than all rows: their state is copied out and back.
    copied_rows: int = 0
    num_speculative_tokens: int = 0  # K of a burst or mixed step
    prompt_tokens: int = 0  # token bucket of the prompts of a mixed step
    prompt_places: int = 0  # most prompts of a mixed step

    def __post_init__(self):
        if self.kind not in KINDS:
            raise ValueError(
                f"kind={self.kind!r} is none of {', '.join(KINDS)}; say which step it is."
            )
        if self.rows < 1 or self.tokens < self.rows:
            raise ValueError(
                f"a bucket of {self.rows} rows and {self.tokens} tokens cannot be; a row "
                "has one token at least."
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class BucketMemory:
    """Memory of a compiled bucket by XLA's memory_analysis(), in bytes of one chip."""

    bucket: StepShape
    argument_bytes: int
    output_bytes: int
    temp_bytes: int
    alias_bytes: int  # bytes of the output that lie in donated arguments
    code_bytes: int

    @classmethod
    def of(cls, bucket: StepShape, analysis: object) -> BucketMemory:
        """Reads the object that `jax.stages.Compiled.memory_analysis()` returns."""
        read = lambda name: int(getattr(analysis, f"{name}_size_in_bytes"))
        return cls(
            bucket=bucket,
            argument_bytes=read("argument"),
            output_bytes=read("output"),
            temp_bytes=read("temp"),
            alias_bytes=read("alias"),
            code_bytes=read("generated_code"),
        )

    @property
    def scratch_bytes(self) -> int:
        """Bytes taken while it runs, and free again once its report is read."""
        return self.temp_bytes + self.output_bytes - self.alias_bytes

    @property
    def workspace_bytes(self) -> int:
        """Bytes that it needs beside its arguments."""
        return self.scratch_bytes + self.code_bytes


def combined_bytes(memories: Sequence[BucketMemory]) -> int:
    """Returns the bytes of several executables: all are loaded, one runs at a time."""
    most = max((m.scratch_bytes for m in memories), default=0)
    return most + sum(m.code_bytes for m in memories)


@dataclasses.dataclass(frozen=True)
class Line:
    """Bytes as a linear function of sizes, on a range of the first size."""

    first: float
    last: float
    coefficients: tuple[float, ...]

    def __call__(self, sizes: Sequence[float]) -> float:
        return float(np.dot(self.coefficients, sizes))


@dataclasses.dataclass(frozen=True)
class Lines:
    """One or two lines; between their ranges the higher one counts."""

    lines: tuple[Line, ...]
    error: float  # largest relative error over the samples

    def __call__(self, sizes: Sequence[float]) -> float:
        size = sizes[0]
        if size <= self.lines[0].last:
            return self.lines[0](sizes)
        if size >= self.lines[-1].first:
            return self.lines[-1](sizes)
        return max(line(sizes) for line in self.lines)

    @property
    def bend(self) -> float | None:
        """The first size from which the second line counts alone, if there is one."""
        return self.lines[-1].first if len(self.lines) > 1 else None


def fit_lines(
    sizes: Sequence[Sequence[float]],
    targets: Sequence[float],
    *,
    known_bend: float | None = None,
) -> Lines:
    """Returns one line, or two where one does not fit, that lie below no sample.

    Args:
      sizes: one row of features per sample; a bend is searched for in the first one.
      targets: bytes, above 0.
      known_bend: the largest first size of the first line, if known; used if one line does
        not fit.

    Raises:
      ValueError: no samples.
    """
    if not len(sizes):
        raise ValueError("nothing to fit: compile one bucket of each kind at least.")
    order = np.lexsort(np.asarray(sizes, float).T[::-1])
    features = np.asarray(sizes, float)[order]
    wanted = np.asarray(targets, float)[order]
    whole = _line(features, wanted)
    best = Lines((whole,), _error(whole, features, wanted))
    if best.error <= LINE_TOLERANCE:
        return _raised(best, features, wanted)
    splits = _splits(features[:, 0], known_bend)
    for split in splits:
        parts = [slice(None, split), slice(split, None)]
        lines = tuple(_line(features[part], wanted[part]) for part in parts)
        if known_bend is not None and features[split - 1, 0] <= known_bend:
            lines = _at_bend(lines, known_bend, features[split, 0])
        pairs = zip(lines, parts)
        error = max(_error(line, features[p], wanted[p]) for line, p in pairs)
        if error < best.error:
            best = Lines(lines, error)
    return _raised(best, features, wanted)


def fewest_nonnegative(features: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Returns coefficients, none below 0, of the fewest features that fit the samples.

    Every subset of the few features is fitted by relative least squares. The smallest subset
    whose largest error is at most FEATURE_TOLERANCE is taken, else the one with the least
    largest error. Plain non-negative least squares differs: it uses every feature that
    lowers the sum of squares.

    Args:
      features: f64[samples, n].
      targets: f64[samples], above 0.
    """
    num_features = features.shape[1]
    weighted = features / targets[:, None]
    ones = np.ones(len(targets))
    best, least = np.zeros(num_features), np.inf
    for size in range(1, num_features + 1):
        for subset in itertools.combinations(range(num_features), size):
            columns = weighted[:, subset]
            found = np.linalg.lstsq(columns, ones, rcond=None)[0]
            if np.any(found < 0):
                continue
            missed = float(np.abs(columns @ found - ones).max())
            # The first of equal fits is kept: a slope rather than a constant.
            if missed < least - 1e-9:
                best, least = np.zeros(num_features), missed
                best[list(subset)] = found
        if least <= FEATURE_TOLERANCE:
            break
    return best


def _splits(first_sizes: np.ndarray, known_bend: float | None) -> list[int]:
    """Returns the places where samples may be split, with at least two on either side."""
    places = range(1, len(first_sizes))
    splits = [i for i in places if first_sizes[i] > first_sizes[i - 1]]
    if known_bend is not None:
        known = [i for i in splits if first_sizes[i - 1] <= known_bend < first_sizes[i]]
        if known:
            return known
    return [i for i in splits if 2 <= i <= len(first_sizes) - 2]


def _at_bend(lines: tuple[Line, ...], bend: float, following: float) -> tuple[Line, ...]:
    """Returns two lines that meet at a known bend between their samples."""
    if bend >= following:
        return lines
    below, above = lines
    return (
        dataclasses.replace(below, last=bend),
        dataclasses.replace(above, first=np.nextafter(bend, np.inf)),
    )


def _line(features: np.ndarray, targets: np.ndarray) -> Line:
    found = fewest_nonnegative(features, targets)
    first, last = float(features[0, 0]), float(features[-1, 0])
    return Line(first, last, tuple(map(float, found)))


def _error(line: Line, features: np.ndarray, targets: np.ndarray) -> float:
    predicted = features @ np.asarray(line.coefficients)
    return float(np.abs(predicted / targets - 1).max())


def _raised(lines: Lines, features: np.ndarray, targets: np.ndarray) -> Lines:
    """Returns lines raised so that no sample lies above: an underestimate is not safe."""
    raised = []
    for line in lines.lines:
        own = (features[:, 0] >= line.first) & (features[:, 0] <= line.last)
        predicted = features[own] @ np.asarray(line.coefficients)
        lift = 1.0
        if own.any() and np.all(predicted > 0):
            lift = max(1.0, float((targets[own] / predicted).max()))
        scaled = tuple(c * lift for c in line.coefficients)
        raised.append(dataclasses.replace(line, coefficients=scaled))
    lifted = dataclasses.replace(lines, lines=tuple(raised))
    misses = [abs(lifted(f) / wanted - 1) for f, wanted in zip(features, targets)]
    return dataclasses.replace(lifted, error=float(max(misses)))


@dataclasses.dataclass(frozen=True)
class WorkspaceFit:
    """Predicts the workspace of any bucket of one decoder.

    Attributes:
      head, body: bytes of scratch while tokens are chosen, and inside a layer.
      beside: largest excess of a mixed step over the larger of head and body, in bytes.
      code_bytes: by kind, the largest of the compiled buckets.
      error: largest relative error of scratch over all samples.
    """

    head: Lines | None
    body: Lines | None
    beside: float
    code_bytes: dict[str, int]
    error: float

    def scratch(self, bucket: StepShape) -> float:
        """Returns the scratch bytes of a bucket, without code."""
        head = self.head(_head_sizes(bucket)) if self.head else 0.0
        body = self.body(_body_sizes(bucket)) if self.body else 0.0
        if bucket.kind == BURST:
            return head if self.head else body
        if bucket.kind == PREFILL:
            return body if self.body else head
        return max(head, body) + self.beside

    def __call__(self, bucket: StepShape) -> float:
        """Returns the bytes that a bucket needs beside its arguments."""
        most = max(self.code_bytes.values(), default=0)
        return self.scratch(bucket) + self.code_bytes.get(bucket.kind, most)


def fit_workspaces(
    samples: Sequence[BucketMemory], *, known_bend: float | None = None
) -> WorkspaceFit:
    """Returns the fit to the compiled buckets of one decoder.

    Args:
      known_bend: number of tokens up to which products have another layout, if known.

    Raises:
      ValueError: no samples.
    """
    if not samples:
        raise ValueError("nothing to fit: compile one bucket of each kind at least.")
    of_kind = lambda kind: [s for s in samples if s.bucket.kind == kind]
    fit = lambda kind, sizes: _fit_kind(of_kind(kind), sizes, known_bend)
    head, body = fit(BURST, _head_sizes), fit(PREFILL, _body_sizes)
    code = {kind: max(s.code_bytes for s in of_kind(kind)) for kind in KINDS if of_kind(kind)}
    plain = WorkspaceFit(head, body, 0.0, code, 0.0)
    above = [s.scratch_bytes - plain.scratch(s.bucket) for s in of_kind(MIXED)]
    whole = dataclasses.replace(plain, beside=max([0.0, *above]))
    errors = [abs(whole.scratch(s.bucket) / max(s.scratch_bytes, 1) - 1) for s in samples]
    return dataclasses.replace(whole, error=max(errors))


def _fit_kind(
    samples: Sequence[BucketMemory],
    sizes: Callable[[StepShape], tuple[float, ...]],
    known_bend: float | None,
) -> Lines | None:
    if not samples:
        return None
    wanted = [float(max(s.scratch_bytes, 1)) for s in samples]
    return fit_lines([sizes(s.bucket) for s in samples], wanted, known_bend=known_bend)


def _head_sizes(bucket: StepShape) -> tuple[float, ...]:
    return (
        bucket.logit_tokens,
        bucket.rows,
        bucket.copied_rows,
        1.0,
        bucket.law_tokens,
    )


def _body_sizes(bucket: StepShape) -> tuple[float, ...]:
    # The layout of a single prompt differs from that of several: more bytes per token in
    # small models.
    alone = bucket.tokens if bucket.rows == 1 else 0
    if bucket.kind == MIXED:
        alone = bucket.prompt_tokens if bucket.prompt_places == 1 else 0
    return (bucket.tokens, alone, 1.0)
