"""One sampled sequence on the host: its parameters, output and counts."""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from specjax.config.sampling import SamplingParams
from specjax.engine.lineage import Lineage
from specjax.text.detokenize import IncrementalText
from specjax.types import INVALID_LOGITS, OUT_OF_LENGTH, STOPPED

# StepInfo.finish to the finish_reason that users read.
FINISH_REASONS = {STOPPED: "stop", OUT_OF_LENGTH: "length", INVALID_LOGITS: "error"}
INVALID_LOGITS_ERROR = (
    "the model's logits were NaN, or every token was forbidden, at output position {position}; "
    "check the weights, the dtype, and allowed_token_ids, bad_token_ids and logit_bias."
)


@dataclasses.dataclass(frozen=True)
class TokenLogProbs:
    """Natural logarithms of one output token's probability.

    `processed` is under the distribution that was sampled; at temperature 0, where that has
    one token, under the logits after bias and penalties. `raw` is under the model's own logits
    at temperature 1. `tempered` is under the raw logits divided by the temperature, with no
    other edit (at temperature 0 it is `raw`). The two lists hold (token id, log-probability)
    of the most likely tokens. `entropy`, in nats, is that of the distribution of `processed`,
    if SamplingParams.entropy asks for it.
    """

    token_id: int
    processed: float
    raw: float
    top_processed: tuple[tuple[int, float], ...] = ()
    top_raw: tuple[tuple[int, float], ...] = ()
    tempered: float | None = None
    entropy: float | None = None


# The columns of TokenScores.columns, by the names of sampling.LogProbs.
SCORE_COLUMNS = ("processed", "tempered", "raw", "entropy")


class TokenScores(NamedTuple):
    """The figures of TokenLogProbs for one token as arrays, to convert many at once."""

    columns: np.ndarray  # f32[4], SCORE_COLUMNS
    top_ids: np.ndarray  # i32[max_logprobs], the most likely under `processed`
    top: np.ndarray  # f32[max_logprobs]


class TextPiece(NamedTuple):
    """Text that became certain with one token."""

    text: str
    is_draft: bool  # the token was proposed by the drafter


@dataclasses.dataclass
class AcceptanceCounts:
    """Counts of drafted and accepted tokens, over steps whose tokens were kept.

    `num_accepted` counts draft tokens that were committed. A step that a stop rule cut may
    end in a draft token, without one of the target's own; the averages still count one more
    token for it.
    """

    num_steps: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    drafted_at: list[int] = dataclasses.field(
        default_factory=list
    )  # [j]: steps that drafted deeper than j tokens
    accepted_at: list[int] = dataclasses.field(
        default_factory=list
    )  # [j]: of those, that accepted more than j

    def add(self, num_drafted: int, num_accepted: int, draft_depth: int | None = None) -> None:
        """Adds one step of one row; the depth of a chain is its number of drafted tokens."""
        depth = num_drafted if draft_depth is None else draft_depth
        self.num_steps += 1
        self.num_drafted += num_drafted
        self.num_accepted += num_accepted
        missing = depth - len(self.drafted_at)
        self.drafted_at.extend([0] * missing)
        self.accepted_at.extend([0] * missing)
        for place in range(depth):
            self.drafted_at[place] += 1
            self.accepted_at[place] += place < num_accepted

    def merge(self, other: AcceptanceCounts) -> None:
        """Adds another's counts."""
        self.num_steps += other.num_steps
        self.num_drafted += other.num_drafted
        self.num_accepted += other.num_accepted
        for name in ("drafted_at", "accepted_at"):
            mine, theirs = getattr(self, name), getattr(other, name)
            mine.extend([0] * (len(theirs) - len(mine)))
            for depth, count in enumerate(theirs):
                mine[depth] += count

    @property
    def acceptance_rate(self) -> float:
        """Accepted over drafted tokens; 0 if no token was drafted."""
        return self.num_accepted / self.num_drafted if self.num_drafted else 0.0

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens per step, 1 + accepted / steps: the target's own token counts, as usual.

        A step that ends in an accepted stop token counts one more than it committed,
        once per sequence at most.
        """
        return 1.0 + self.num_accepted / self.num_steps if self.num_steps else 0.0

    @property
    def acceptance_by_position(self) -> list[float]:
        """Fraction of the steps that drafted a token j in which it was accepted."""
        return [accepted / drafted for accepted, drafted in zip(self.accepted_at, self.drafted_at)]


@dataclasses.dataclass
class SelfCheck:
    """Tests whether drawn tokens are as likely as exact draws from their distributions.

    Under exact sampling log p(token) + H(p), summed over tokens, is a martingale, so its sum
    over the root of its summed variances is near a standard normal after some hundred tokens:
    |z_score| above 4 is an alarm. The test detects draws that are too likely or too unlikely
    (drafts accepted too often, a wrong temperature), but no bias that keeps the mean
    log-probability.
    """

    num_tokens: int = 0
    surplus: float = 0.0  # sum of log p + H(p), in nats
    variance: float = 0.0  # sum of the variances of log p

    def add(self, surplus: float, variance: float) -> None:
        """Adds one token."""
        self.num_tokens += 1
        self.surplus += surplus
        self.variance += variance

    @classmethod
    def of_all(cls, checks: Sequence[SelfCheck], seeds: Sequence[Any]) -> SelfCheck:
        """Returns the check of several requests together.

        Requests of different seeds are independent. Those of one seed share their noise and
        may be the same text: their standard deviations are added as if they were, so that
        repetition does not raise the score.
        """
        total = cls()
        deviation_of: dict[Any, float] = {}
        for check, seed in zip(checks, seeds, strict=True):
            total.num_tokens += check.num_tokens
            total.surplus += check.surplus
            deviation_of[seed] = deviation_of.get(seed, 0.0) + check.variance**0.5
        total.variance = sum(deviation**2 for deviation in deviation_of.values())
        return total

    @property
    def z_score(self) -> float | None:
        """Standard deviations from the mean of exact sampling; None if every token was certain.

        Infinite if a token of probability 0 was drawn.
        """
        if self.variance > 0:
            return self.surplus / self.variance**0.5
        return self.surplus * math.inf if self.surplus else None

    def to_dict(self) -> dict[str, Any]:
        """Returns the figures by name, for JSON."""
        return dataclasses.asdict(self) | {"z_score": self.z_score}


@dataclasses.dataclass(eq=False)
class Request:
    """A sequence to be sampled; a row's occupant while it runs."""

    prompt_index: int
    sample_index: int
    prompt_token_ids: Sequence[int]
    params: SamplingParams
    seed: int  # of this sample
    draft_cap: int
    rule: int
    max_length: int  # tokens, prompt included, at which the row ends
    sampling_values: dict[str, Any]  # the row's entries of RowSampling
    text: IncrementalText | None = None  # None without a tokenizer
    output_token_ids: list[int] = dataclasses.field(default_factory=list)
    is_draft: list[bool] = dataclasses.field(
        default_factory=list
    )  # per output token: proposed by the drafter
    logprobs: list[Any] = dataclasses.field(default_factory=list)
    counts: AcceptanceCounts = dataclasses.field(default_factory=AcceptanceCounts)
    self_check: SelfCheck = dataclasses.field(default_factory=SelfCheck)
    finish_reason: str | None = None
    # With finish_reason "stop": the stop string, or the id of the stop token, that ended it.
    stop_reason: int | str | None = None
    error: str | None = None
    shown: list[TextPiece] = dataclasses.field(default_factory=list)  # text that may be shown
    first_token_at: float | None = None  # time.perf_counter()
    priority: int = 0  # the lowest goes first
    deadline: float | None = None  # time.perf_counter() at which it is ended
    number: int = dataclasses.field(default_factory=itertools.count().__next__)
    arrival: int | None = None  # its number in the queue, once it was there
    num_preemptions: int = 0
    keeps_scores: bool = False  # `logprobs` are TokenScores
    is_streamed: bool = False  # its tokens are read as they come: its bursts are short
    expected_length: int = 0  # expected number of output tokens; 0 if unknown
    num_resumed: int = 0  # output tokens from an earlier run
    # Number that samples of one prompt share, for a drafter that matches text; None: that of
    # its own prompt. A turn of a dialogue has that of the first turn's prompt.
    group: int | None = None
    lineage: Lineage = dataclasses.field(default_factory=Lineage)

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def token_ids(self) -> list[int]:
        """Prompt and output so far."""
        return [*self.prompt_token_ids, *self.output_token_ids]

    def end(self, reason: str) -> None:
        """Ends it from outside, with the output it has."""
        self.finish_reason = reason
        if self.text is not None:
            self.shown.append(TextPiece(self.text.finish(), False))

    def fail(self, error: str) -> None:
        """Ends it with an error, unless it has ended."""
        if not self.is_finished:
            self.error = error
            self.end("error")

    def take_step(
        self,
        token_ids: Sequence[int],
        num_accepted: int,
        num_drafted: int,
        finish: int,
        logprobs: Sequence[Any],
        draft_depth: int | None = None,
        surpluses: Sequence[tuple[float, float]] = (),
        params_version: int = 0,
    ) -> None:
        """Adds the tokens that one step committed for this row.

        Stop strings are matched here: tokens that the burst ran past one are discarded and
        not counted.

        Args:
          surpluses: LogProbs.surplus and .variance by token, if the request has a self-check.
          params_version: of the weights that drew the tokens.
        """
        if self.is_finished:
            return
        if self.first_token_at is None and token_ids:
            self.first_token_at = time.perf_counter()
        used = self._show(token_ids, num_accepted, finish == STOPPED)
        if used:
            num_accepted = min(num_accepted, used)
            self.counts.add(num_drafted, num_accepted, draft_depth)
            self.lineage.draw(len(self.output_token_ids), params_version)
            self.output_token_ids.extend(token_ids[:used])
            self.is_draft.extend(place < num_accepted for place in range(used))
            self.logprobs.extend(logprobs[:used])
            for surplus, variance in surpluses[:used]:
                self.self_check.add(surplus, variance)
        if self.finish_reason is None and finish in FINISH_REASONS:
            self.finish_reason = FINISH_REASONS[finish]
            if finish == STOPPED and token_ids:
                self.stop_reason = int(token_ids[-1])
            if self.finish_reason == "error":
                self.error = INVALID_LOGITS_ERROR.format(position=len(self.output_token_ids))
            if self.text is not None:
                self.shown.append(TextPiece(self.text.finish(), False))

    def _show(self, token_ids: Sequence[int], num_accepted: int, ends_in_stop_token: bool) -> int:
        """Adds the text that may be shown to `shown`.

        Returns:
          The number of tokens that belong to the output.
        """
        if self.text is None:
            return len(token_ids)
        num_before = len(self.output_token_ids)
        num_spoken = len(token_ids) - ends_in_stop_token
        for place, token_id in enumerate(token_ids[:num_spoken]):
            is_early = num_before + place < self.params.min_tokens
            fed = self.text.feed(token_id, may_stop=not is_early)
            self.shown.append(TextPiece(fed.text, place < num_accepted))
            if fed.stopped_by is not None:
                self.finish_reason, self.stop_reason = "stop", fed.stopped_by
                return place + 1
        if ends_in_stop_token and self.params.include_stop_str_in_output:
            fed = self.text.feed(token_ids[-1], may_stop=False)
            self.shown.append(TextPiece(fed.text, num_spoken < num_accepted))
        return len(token_ids)
