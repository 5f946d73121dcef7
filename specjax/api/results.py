"""The results of a call: completions, statistics, and chunks of a stream."""

from __future__ import annotations

import collections
import dataclasses
import os
from collections.abc import Sequence
from typing import Any

from specjax.api.plots import draw_decisions
from specjax.api.requests import Refused
from specjax.config.keywords import hints_at
from specjax.config.rules import LOSSY_RULES, Rule
from specjax.config.sampling import SamplingParams
from specjax.engine.lineage import CacheFill
from specjax.engine.metrics import BurstRecord, which_k
from specjax.engine.request import (
    AcceptanceCounts,
    Request,
    SelfCheck,
    TextPiece,
    TokenLogProbs,
)

_MOST_SHOWN = 5  # completions
_MOST_CHARACTERS = 60


@dataclasses.dataclass(frozen=True)
class Completion:
    """One sampled sequence."""

    prompt_index: int
    sample_index: int  # which of the prompt's n
    text: str | None  # None without a tokenizer
    token_ids: list[int]  # a stop token included
    finish_reason: str  # "stop", "length", "error"; "abort" or "deadline" from outside
    error: str | None
    logprobs: list[TokenLogProbs] | None
    # Pass it as SamplingParams.seed to get the same text again; under rules that compare
    # distributions, with the same drafter and K, and without max_drafts_per_step.
    seed: int
    acceptance: AcceptanceCounts
    pieces: list[TextPiece]  # the text by token, and whether the drafter proposed it
    prompt_token_ids: list[int]
    lossy: str | None = None  # the rule, where the text need not be the target's
    self_check: SelfCheck | None = None  # where SamplingParams.self_check asks for it
    # Where finish_reason is "stop": the stop string that ended the text, or the id of the
    # token that did, of stop_token_ids or the model's end of text.
    stop_reason: int | str | None = None
    # With which it was drawn, and the model's generation defaults among them; None where refused.
    sampling: SamplingParams | None = None
    # Version of the weights that drew each token: see Engine.update_params.
    params_versions: list[int] = dataclasses.field(default_factory=list)
    # Which weights computed keys and values before tokens were drawn: of the prompt first.
    cache_fills: tuple[CacheFill, ...] = ()

    def __repr__(self) -> str:
        place = f"prompt {self.prompt_index}, sample {self.sample_index}"
        if self.error is not None:
            return f"Completion({place}: {self.finish_reason!r}, {_shortened(self.error)})"
        text = "" if self.text is None else f", {_shortened(self.text)}"
        ended = repr(self.finish_reason)
        if self.stop_reason is not None:
            ended += f" by {self.stop_reason!r}"
        return f"Completion({place}: {_count(len(self.token_ids), 'token')}, {ended}{text})"


@dataclasses.dataclass(frozen=True)
class GenerationStats:
    """Statistics of a call; seconds are wall time."""

    num_prompts: int
    num_prompt_tokens: int
    num_output_tokens: int
    acceptance: AcceptanceCounts
    run_s: float  # compiled calls and reading them back
    compile_s: float
    time_to_first_token_s: float  # of the first request, compiling included
    num_speculative_tokens: int
    drafter: str
    verification: str
    lossy: tuple[str, ...] = ()  # rules used under which text is not the target's
    self_check: SelfCheck | None = None  # over all requests that check themselves
    # The last bursts: K, the reason, predicted beside measured figures.
    decisions: tuple[BurstRecord, ...] = ()
    num_preemptions: int = 0  # number of times that a request was preempted
    params_version: int = 0  # of the newest weights

    def __repr__(self) -> str:
        parts = [
            f"{_count(self.num_prompts, 'prompt')}, {_count(self.num_output_tokens, 'token')}",
            f"{self.run_s:.3g} s ({self.tokens_per_second:.4g} tokens/s)",
            f"compile {self.compile_s:.3g} s",
            f"drafter {self.drafter!r}",
        ]
        if self.acceptance.num_drafted:
            parts.append(f"mean acceptance length {self.mean_acceptance_length:.2f}")
            parts.append(f"acceptance rate {self.acceptance_rate:.2f}")
        if self.lossy:
            parts.append(f"lossy {', '.join(self.lossy)}")
        why = f". {self.why}" if self.why else ""
        return f"GenerationStats({', '.join(parts)}{why})"

    @property
    def why(self) -> str:
        """Which K the last bursts had and why, in a line of words; "" where none could draft."""
        can_draft = self.drafter != "none" and self.num_speculative_tokens
        return which_k(self.decisions) if can_draft else ""

    @property
    def tokens_per_second(self) -> float:
        """Output tokens per second of run_s."""
        return self.num_output_tokens / self.run_s if self.run_s else 0.0

    @property
    def mean_acceptance_length(self) -> float:
        return self.acceptance.mean_acceptance_length

    @property
    def acceptance_rate(self) -> float:
        return self.acceptance.acceptance_rate

    @property
    def num_bursts_by_k(self) -> dict[int, int]:
        """The number of `decisions` by K."""
        counts = collections.Counter(d.num_speculative_tokens for d in self.decisions)
        return dict(sorted(counts.items()))

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draws the chosen K over time, and predicted beside measured figures, as PNG.

        Raises:
          ValueError: no burst was run.
          NotImplementedError: matplotlib is not installed: pip install matplotlib.
        """
        draw_decisions(self.decisions, path)

    def to_dict(self) -> dict[str, Any]:
        """Returns the figures by name, for JSON; without `decisions`, which are many."""
        counts = self.acceptance
        own = {
            f.name: getattr(self, f.name)
            for f in dataclasses.fields(self)
            if f.name not in ("acceptance", "self_check", "decisions")
        }
        if self.self_check is not None:
            own["self_check"] = self.self_check.to_dict()
        return own | {
            "tokens_per_second": self.tokens_per_second,
            "num_steps": counts.num_steps,
            "num_drafted": counts.num_drafted,
            "num_accepted": counts.num_accepted,
            "acceptance_rate": counts.acceptance_rate,
            "mean_acceptance_length": counts.mean_acceptance_length,
            "acceptance_by_position": counts.acceptance_by_position,
            "num_bursts_by_k": self.num_bursts_by_k,
        }


_OF_EACH = {
    field.name: f"each text has its own: out[0].{field.name}"
    for field in dataclasses.fields(Completion)
}


@hints_at(_OF_EACH)
class Generation(Sequence[Completion]):
    """The completions of a call, prompt by prompt and sample by sample, and its statistics."""

    def __init__(self, completions: list[Completion], stats: GenerationStats):
        self.completions = completions
        self.stats = stats

    def __getitem__(self, index: Any) -> Any:
        return self.completions[index]

    def __len__(self) -> int:
        return len(self.completions)

    def __repr__(self) -> str:
        shown = [f"  {completion!r}," for completion in self.completions[:_MOST_SHOWN]]
        if len(self) > _MOST_SHOWN:
            shown.append(f"  ... {len(self) - _MOST_SHOWN} more")
        return "\n".join(["Generation([", *shown, f"], {self.stats!r})"])


@dataclasses.dataclass(frozen=True)
class Chunk:
    """The text and tokens that one request gained since its last chunk."""

    prompt_index: int
    sample_index: int
    text: str  # empty when all of it is held back
    token_ids: list[int]
    pieces: list[TextPiece]  # `text` by token
    finish_reason: str | None
    error: str | None = None
    lossy: str | None = None  # as in Completion, from the first draft on
    completion: Completion | None = None  # all of it, with the last chunk
    params_versions: list[int] = dataclasses.field(default_factory=list)  # as in Completion

    def __repr__(self) -> str:
        ended = "" if self.finish_reason is None else f", {self.finish_reason!r}"
        error = "" if self.error is None else f", {_shortened(self.error)}"
        return (
            f"Chunk(prompt {self.prompt_index}, sample {self.sample_index}: "
            f"{_count(len(self.token_ids), 'token')}, {_shortened(self.text)}{ended}{error})"
        )


class ChunkWriter:
    """Makes chunks: the output of each request since its last chunk."""

    def __init__(self):
        self._seen: dict[Request, tuple[int, int]] = {}  # tokens, pieces

    @property
    def num_open(self) -> int:
        """Number of requests with a chunk but not the last one."""
        return len(self._seen)

    def chunk(self, request: Request) -> Chunk:
        """Returns the next chunk of a request."""
        first_token, first_piece = self._seen.get(request, (0, 0))
        self._seen[request] = len(request.output_token_ids), len(request.shown)
        if request.is_finished:
            del self._seen[request]
        pieces = [piece for piece in request.shown[first_piece:] if piece.text]
        return Chunk(
            request.prompt_index,
            request.sample_index,
            "".join(piece.text for piece in pieces),
            request.output_token_ids[first_token:],
            pieces,
            request.finish_reason,
            request.error,
            lossy_rule(request),
            completion_of(request) if request.is_finished else None,
            request.lineage.versions(first_token, len(request.output_token_ids)),
        )


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _shortened(text: str) -> str:
    """Returns text as Python writes it, its beginning where it is long."""
    if len(text) <= _MOST_CHARACTERS:
        return repr(text)
    return repr(text[:_MOST_CHARACTERS]) + "..."


def completion_of(request: Request) -> Completion:
    return Completion(
        prompt_index=request.prompt_index,
        sample_index=request.sample_index,
        text=None if request.text is None else "".join(piece.text for piece in request.shown),
        token_ids=request.output_token_ids,
        finish_reason=request.finish_reason or "error",
        error=request.error,
        logprobs=request.logprobs if request.params.logprobs is not None else None,
        seed=request.seed,
        acceptance=request.counts,
        pieces=[piece for piece in request.shown if piece.text],
        prompt_token_ids=list(request.prompt_token_ids),
        lossy=lossy_rule(request),
        self_check=request.self_check if request.params.self_check else None,
        stop_reason=request.stop_reason,
        sampling=request.params,
        params_versions=request.lineage.versions(0, len(request.output_token_ids)),
        cache_fills=tuple(request.lineage.fills),
    )


def lossy_rule(request: Request) -> str | None:
    """Returns the rule that verified drafts of a request, if its output is not the target's."""
    name = Rule(request.rule).label
    return name if name in LOSSY_RULES and request.counts.num_drafted else None


def self_check_of(completions: list[Completion]) -> SelfCheck | None:
    """Returns the self-check of all requests together; None where none was asked for."""
    checked = [c for c in completions if c.self_check is not None]
    if not checked:
        return None
    return SelfCheck.of_all(
        [c.self_check for c in checked if c.self_check is not None],
        [(c.seed, c.sample_index) for c in checked],
    )


def refusal(refused: Refused) -> Completion:
    return Completion(
        prompt_index=refused.prompt_index,
        sample_index=refused.sample_index,
        text=None,
        token_ids=[],
        finish_reason="error",
        error=refused.error,
        logprobs=None,
        seed=refused.seed,
        acceptance=AcceptanceCounts(),
        pieces=[],
        prompt_token_ids=[],
    )
