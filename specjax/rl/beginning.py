"""From a caller's arguments to the requests of a rollout, and the table that they fill."""

from __future__ import annotations

import collections
import copy
import dataclasses
import hashlib
import operator
import secrets
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np

from specjax.api.requests import as_list, derive_seed
from specjax.config.keywords import made
from specjax.config.sampling import SamplingParams, SamplingSource
from specjax.engine.request import Request
from specjax.engine.text_feed import group_of
from specjax.rl.batch import ERROR, UNFINISHED, Rollout
from specjax.rl.decoder import MOST_PROMPTS, RolloutDecoder
from specjax.rl.table import Table
from specjax.runtime.stack_level import of_the_caller


def sampling_of(prompts: Any, sampling: SamplingSource | None) -> SamplingParams:
    """Returns the parameters to sample with: those given, or those of a Rollout, or the usual.

    What they leave open has the library's values, not the model's generation defaults: what is
    sampled is the policy.
    """
    if sampling is None and isinstance(prompts, Rollout):
        sampling = prompts.sampling
    return made(SamplingParams, sampling, "sampling").filled({})


def check_resumed(num_samples: Any, seeds: Any, prompt_mask: Any) -> None:
    """Raises ValueError for arguments that a continued rollout has already."""
    if num_samples is not None or seeds is not None or prompt_mask is not None:
        raise ValueError(
            "a Rollout that goes on has its own samples, seeds and mask; leave out "
            "num_samples, seeds and prompt_mask."
        )


def asked_again(sampling: SamplingParams) -> SamplingParams:
    """Returns the parameters of requests whose seeds are set afterwards."""
    return dataclasses.replace(sampling, logprobs=sampling.logprobs or 0, seed=0)


def check_numbers(
    num_samples: int | None,
    token_budget: int | None,
    time_budget_s: float | None,
    sampling: SamplingParams,
) -> None:
    """Raises ValueError for invalid numbers."""
    for name, value in (("num_samples", num_samples), ("token_budget", token_budget)):
        is_whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
        if value is not None and (not is_whole or value < 1):
            raise ValueError(f"{name}={value!r} must be a whole number of at least 1, or None.")
    if time_budget_s is not None and not time_budget_s > 0:
        raise ValueError(f"{time_budget_s=!r} must be seconds above 0, or None.")
    if sampling.n != 1:
        raise ValueError(
            f"sampling.n={sampling.n!r} must be left at 1; num_samples says how many "
            "completions each prompt gets."
        )


def rule_of(decoder: RolloutDecoder, sampling: SamplingParams) -> str:
    """Returns the rule that drafts are verified by.

    Raises:
      ValueError: it is neither a rule by equality, which every decoder has, nor the decoder's.
    """
    rule = sampling.verification or decoder.verification
    if rule not in ("greedy", "seeded", "delta", decoder.verification):
        raise ValueError(
            f"sampling.verification={rule!r} is not compiled into this decoder, which has "
            f"{decoder.verification!r}; pass verification={rule!r} to build_decoder."
        )
    return rule


def as_rows(
    decoder: RolloutDecoder, prompts: Any, prompt_mask: Any
) -> tuple[list[Any], int | None]:
    """Returns the prompts as a list, and the width of the array if they came in one."""
    if not hasattr(prompts, "ndim"):
        if prompt_mask is not None:
            raise ValueError("prompt_mask goes with an array of prompts, not with lists.")
        return as_list(prompts), None
    ids = np.asarray(prompts)
    if ids.ndim != 2 or not np.issubdtype(ids.dtype, np.integer):
        raise ValueError(
            f"prompts is {ids.dtype}{ids.shape}; expected whole numbers "
            "[num_prompts, width], or a list of prompts."
        )
    if prompt_mask is None:
        raise ValueError(
            "an array of prompts needs prompt_mask, bool of the same shape, where they are "
            "text: np.ones_like(prompts, bool) if they all have this length."
        )
    mask = np.asarray(prompt_mask).astype(bool)
    if mask.shape != ids.shape:
        raise ValueError(f"{mask.shape=} must be that of the prompts, {ids.shape}.")
    if not len(ids):
        raise ValueError("no prompts were given.")
    return [row[own].tolist() for row, own in zip(ids, mask)], ids.shape[1]


def _seeded(
    sampling: SamplingParams, rows: Sequence[Sequence[int]], seeds: Any
) -> list[SamplingParams]:
    """Returns the sampling parameters of every prompt, each with its own seed."""
    sampling.validate()
    if seeds is not None:
        # Without an array: numpy turns a mix of numbers below and above 2**63 into floats.
        given = [_checked_seed(seed) for seed in seeds]
        if len(given) != len(rows):
            raise ValueError(
                f"{len(given)} seeds were given for {len(rows)} prompts; pass one each."
            )
        return [dataclasses.replace(sampling, seed=seed) for seed in given]
    derived = PromptSeeds(sampling.seed)
    return [dataclasses.replace(sampling, seed=derived.next(row)) for row in rows]


class PromptSeeds:
    """Derives the seed of each prompt from one seed and the prompt's tokens.

    A prompt that comes again gets another seed. How often it came is known of the last
    MOST_PROMPTS different prompts; once others were dropped, the seed of a prompt that is not
    among them depends on its number in the feed, too.
    """

    def __init__(self, seed: int | None):
        """Takes random numbers for a seed of None; raises ValueError for one out of range."""
        self._seed = secrets.randbits(63) if seed is None else _checked_seed(seed)
        # How often each prompt came, or a higher number.
        self._times: collections.OrderedDict[int, int] = collections.OrderedDict()
        self._num_given, self._has_dropped = 0, False

    def next(self, token_ids: Sequence[int]) -> int:
        """Returns the seed of the next prompt."""
        text = np.asarray(token_ids, np.int64).tobytes()
        own = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
        # It came at most so often, and had lower numbers then.
        times = self._times.pop(own, self._num_given if self._has_dropped else 0)
        self._times[own] = times + 1
        self._num_given += 1
        if len(self._times) > MOST_PROMPTS:
            self._times.popitem(last=False)
            self._has_dropped = True
        return derive_seed(self._seed ^ own, times)


def _checked_seed(seed: Any) -> int:
    try:
        number = operator.index(seed)
    except TypeError:
        number = -1
    if not 0 <= number < 2**64:
        raise ValueError(f"{seed=!r} must be a whole number from 0 to 2**64 - 1.")
    return number


def begun(
    decoder: RolloutDecoder,
    rows: Sequence[Any],
    array_width: int | None,
    *,
    sampling: SamplingParams,
    num_samples: int,
    seeds: Any,
    width: int | None,
) -> tuple[Table, dict[int, Request]]:
    """Returns the table of a new rollout, and its requests by sample index."""
    asked = dataclasses.replace(sampling, n=num_samples, logprobs=sampling.logprobs or 0)
    known = [decoder.tokenized(row) for row in rows]
    ids = [() if row is None else row for row in known]
    given = [row if own is None else own for row, own in zip(rows, known)]
    made, refused = decoder.requests(given, _seeded(asked, ids, seeds))
    if not made:
        raise ValueError(f"no prompt can be served: {refused[0].error}")
    served = {request.prompt_index for request in made}
    prompts = [own if index in served else () for index, own in enumerate(ids)]
    longest = max(len(request.prompt_token_ids) for request in made)
    width = width or array_width or longest
    if width < longest:
        raise ValueError(
            f"prompt_width={width} is below the {longest} tokens of the longest prompt; "
            "raise it, or shorten the prompt."
        )
    everybody = [prompt for prompt in prompts for _ in range(num_samples)]
    table = Table(everybody, width, min(sampling.max_tokens, decoder.max_length))
    table.describe(asked)
    table.prompt_index[:] = np.repeat(np.arange(len(rows)), num_samples)
    requests = {}
    for request in made:
        index = request.prompt_index * num_samples + request.sample_index
        without_text(request)
        requests[index] = request
        table.seeds[index] = request.sampling_values["seeds"]
    for each in refused:
        index = each.prompt_index * num_samples + each.sample_index
        table.finish_reasons[index], table.errors[index] = ERROR, each.error
    if refused:
        warnings.warn(
            f"{len(refused)} of {len(table.lengths)} samples were refused and have "
            f"finish reason ERROR: {refused[0].error}",
            stacklevel=of_the_caller(),  # past the decorator of `rollout`
        )
    return table, requests


def reopened(
    decoder: RolloutDecoder, batch: Rollout, sampling: SamplingParams, rule: str
) -> tuple[Table, SamplingParams]:
    """Returns the table of a continued rollout, and the parameters of its requests."""
    if batch.sampling is not None:
        _check_same(recorded(sampling, rule), batch.sampling)
    table = Table.of(batch)
    length = table.completion_ids.shape[1]
    # Of one turn; the width is that of a whole dialogue.
    most = min(sampling.max_tokens, decoder.max_length) if table.has_turns else length
    k = 0 if batch.top_ids is None else batch.top_ids.shape[2]
    for name, value, own in (
        ("max_tokens", min(sampling.max_tokens, decoder.max_length), most),
        ("entropy", sampling.entropy, batch.entropy is not None),
        ("logprobs", sampling.logprobs or 0, k),
    ):
        if value != own:
            raise _NotTheSame(name, value, own)
    asked = asked_again(sampling)
    table.describe(asked)
    return table, asked


def resumed(
    decoder: RolloutDecoder, batch: Rollout, sampling: SamplingParams, rule: str
) -> tuple[Table, dict[int, Request]]:
    """Returns the table of a continued rollout, and its unfinished requests by sample index."""
    table, asked = reopened(decoder, batch, sampling, rule)
    left = np.flatnonzero(table.finish_reasons == UNFINISHED)
    if np.any(table.is_answerable[left]):
        raise ValueError(
            "dialogues wait for an environment's reply; give it with Rollout.continued, or pass "
            "the rollout to specjax.rollout_turns."
        )
    return table, newest_turns(decoder, table, left.tolist(), asked)


def newest_turns(
    decoder: RolloutDecoder, table: Table, samples: Sequence[int], asked: SamplingParams
) -> dict[int, Request]:
    """Returns the requests that go on with some samples' newest turns, by sample index.

    Raises:
      ValueError: one of them cannot be served.
    """
    prompts = [table.prompt_of(index) for index in samples]
    made, refused = decoder.requests(prompts, [asked] * len(samples)) if samples else ([], [])
    if refused:
        raise ValueError(f"the rollout cannot go on: {refused[0].error}")
    requests = {}
    for index, request in zip(samples, made, strict=True):
        start, end = int(table.starts[index]), int(table.lengths[index])
        request.output_token_ids = table.completion_ids[index, start:end].tolist()
        request.num_resumed = end - start
        room = table.completion_ids.shape[1] - start
        request.max_length = min(request.max_length, len(request.prompt_token_ids) + room)
        request.group = group_of(table.prompt_ids[index][table.prompt_mask[index]])
        request.sampling_values["seeds"] = table.seeds[index]
        request.is_draft = [False] * request.num_resumed
        without_text(request)
        if request.text is not None:
            for token in request.output_token_ids:
                request.text.feed(token, may_stop=False)
        requests[index] = request
    return requests


def without_text(request: Request) -> None:
    """Drops a request's text unless stop strings are looked for in it."""
    if not request.params.stop_strings:
        request.text = None


# The number of drafts affects only speed, and seeds are taken from the rollout.
_MAY_DIFFER = ("seed", "num_speculative_tokens", "speculate")


def recorded(sampling: SamplingParams, rule: str) -> SamplingParams:
    """Returns the sampling parameters to record in a rollout, without those that may differ."""
    return copy.deepcopy(
        dataclasses.replace(sampling, seed=None, verification=rule, logprobs=sampling.logprobs or 0)
    )


def _check_same(given: SamplingParams, own: SamplingParams) -> None:
    """Raises ValueError where parameters differ from those of the continued rollout."""
    for field in dataclasses.fields(SamplingParams):
        value, wanted = (getattr(params, field.name) for params in (given, own))
        if field.name == "stop":
            value, wanted = given.stop_strings, own.stop_strings
        if field.name not in _MAY_DIFFER and _plain(value) != _plain(wanted):
            raise _NotTheSame(field.name, value, wanted)


def _plain(value: Any) -> Any:
    """Returns a value of SamplingParams in a form that compares by content."""
    is_list = isinstance(value, Sequence | np.ndarray) and not isinstance(value, str)
    return tuple(value) if is_list else value


class _NotTheSame(ValueError):
    """A rollout cannot be continued with other sampling parameters."""

    def __init__(self, name: str, value: Any, own: Any):
        super().__init__(
            f"sampling.{name}={value!r} is not that of the rollout, {own!r}; pass the "
            "sampling parameters it began with, or leave sampling out."
        )


def expect(
    decoder: RolloutDecoder, table: Table, requests: dict[int, Request], expected: Any
) -> None:
    """Sets the expected completion length of each request, in tokens; 0 if unknown."""
    given = None
    if expected is not None:
        given = np.asarray(expected, float).reshape(-1)
        count = int(table.prompt_index.max()) + 1
        if len(given) != count or not np.all(np.isfinite(given)):
            raise ValueError(
                f"expected_lengths={expected!r} must be {count} numbers, one per prompt."
            )
    for index, request in requests.items():
        length = decoder.expected_length(request.prompt_token_ids)
        if given is not None:
            length = float(given[table.prompt_index[index]])
        request.expected_length = max(round(length), 0)


def longest_first(requests: dict[int, Request]) -> list[int]:
    """Returns the sample indices of requests in order of admission.

    The longest start first, so that the rollout does not end with a long request alone.
    Samples of one prompt stay together, because they share its pages.
    """
    return sorted(requests, key=lambda index: (-requests[index].expected_length, index))
