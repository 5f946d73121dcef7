"""rollout(): samples completions of the current policy with speculative decoding, as arrays.

prompts, seeds -> requests -> the engine's loop -> arrays
"""

from __future__ import annotations

import collections
import copy
import dataclasses
import hashlib
import operator
import secrets
import time
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np

from specjax.api.requests import as_list, derive_seed
from specjax.config.checks import is_number
from specjax.config.sampling import SamplingParams
from specjax.engine.loop import Loop
from specjax.engine.request import AcceptanceCounts, Request
from specjax.engine.text_feed import group_of
from specjax.models.base import Params
from specjax.rl.batch import (
    ERROR,
    LENGTH,
    UNFINISHED,
    Rollout,
)
from specjax.rl.decoder import RolloutDecoder, check_decoder
from specjax.rl.table import Table
from specjax.runtime.jax_settings import entrance
from specjax.types import DecoderParams

# A warning calls the drafter stale below this acceptance rate, after at least this many drafts.
ALARM_RATE = 0.2
ALARM_DRAFTS = 512


@entrance("specjax.rollout")
def rollout(
    decoder: RolloutDecoder,
    params: Params | DecoderParams,
    prompts: Any,
    *,
    num_samples: int | None = None,
    sampling: SamplingParams | None = None,
    seeds: Sequence[int] | np.ndarray | None = None,
    prompt_mask: Any = None,
    prompt_width: int | None = None,
    params_version: int | None = None,
    token_budget: int | None = None,
    time_budget_s: float | None = None,
    expected_lengths: Sequence[float] | np.ndarray | None = None,
    alarm_rate: float = ALARM_RATE,
) -> Rollout:
    """Samples completions of a batch of prompts from the policy with these weights.

    Under `seeded` verification every completion depends only on params, its prompt,
    sampling and its seed, not on the drafter, K, the other prompts, their order, or
    earlier calls. With EngineConfig(numerics="invariant") that holds to the last bit,
    otherwise except for near-ties that rounding decides.

    Args:
      decoder: from `build_decoder`.
      params: weights of the policy, or DecoderParams(policy, draft model). They are neither
        donated nor held after the call, and other weights of the same shapes compile
        nothing. The policy's may be any tree in the decoder's layout: lists for tuples,
        nnx.State, nnx.Param, FrozenDict, {"params": ...}, and layers stacked along their first
        axis, see docs/weights-layout.md. Numpy arrays are copied, and with a mesh also arrays
        whose sharding differs from specjax's; `weights_bytes_moved` of the metrics says how much.
      prompts: lists of token ids of any lengths; i32[num_prompts, width] with prompt_mask;
        texts, if the decoder has a tokenizer; or an unfinished Rollout, whose completions
        are continued.
      num_samples: completions of each prompt, a group; None: 1. They share its pages.
      sampling: for all prompts; None: temperature 1 and at most 128 tokens, or for a Rollout
        its own parameters. For a Rollout, others are refused, except for the seed and the
        number of drafts. `n` must stay 1; `logprobs=k` adds the k most likely tokens,
        `entropy=True` the entropy.
      seeds: one per prompt, from which its samples' seeds are derived as in `generate`.
        None derives them from sampling.seed and the prompt's tokens, so that the order of
        prompts does not matter; a repeated prompt gets different samples each time.
        Without sampling.seed they are random. Rollout.seeds reports them.
      prompt_mask: bool[num_prompts, width], True for text; padding may be on either side.
      prompt_width: width of the result's prompts; None: that of an array, else the longest.
        The same value in each call keeps a jitted loss from being recompiled.
      params_version: version of these weights in the result; None: counted. Pages are reused
        from one call to the next only for the same array objects under the same version.
      token_budget: most tokens that each completion gains in this call.
      time_budget_s: seconds after which no more bursts are sent to the device; completions
        that have not ended are UNFINISHED.
      expected_lengths: expected tokens of each prompt's completions: the longest start first,
        and get more of the drafts where a step cannot verify all. None: lengths that this
        decoder saw for the same prompts.
      alarm_rate: acceptance rate below which a warning says that the drafter no longer fits
        the policy. The policy chooses K = 0 by itself where drafting does not pay.

    Returns:
      num_prompts * num_samples completions, over the data axis of the decoder's mesh; or
      with the sharding of the first axis of an array of prompts that is on a mesh.

    Raises:
      ValueError: weights have another shape, a group or the batch is empty, no prompt can be
        served, or logits are NaN for all of them. Where only some prompts fail, their
        samples have finish reason ERROR, and a warning is given.
    """
    begun_at = time.perf_counter()
    check_decoder(decoder)
    is_resumed = isinstance(prompts, Rollout)
    if sampling is None:
        own = prompts.sampling if is_resumed else None
        sampling = own or SamplingParams()
    if not isinstance(sampling, SamplingParams):
        raise TypeError(
            f"sampling is {sampling!r:.100}; expected one SamplingParams: all samples of a rollout "
            "are drawn alike."
        )
    _check(num_samples, token_budget, time_budget_s, sampling)
    if not (is_number(alarm_rate) and 0 <= alarm_rate <= 1):
        raise ValueError(f"{alarm_rate=!r} must be a share of accepted drafts, from 0 to 1.")
    rule = _rule(decoder, sampling)
    if is_resumed:
        if num_samples is not None or seeds is not None or prompt_mask is not None:
            raise ValueError(
                "a Rollout that goes on has its own samples, seeds and mask; leave out "
                "num_samples, seeds and prompt_mask."
            )
        table, requests = _resumed(decoder, prompts, sampling, rule)
    else:
        table, requests = _begun(
            decoder,
            *_as_rows(decoder, prompts, prompt_mask),
            sampling=sampling,
            num_samples=num_samples or 1,
            seeds=seeds,
            width=prompt_width,
        )
    most = {}  # tokens of prompt and completion, whatever the budget
    for request in requests.values():
        request.keeps_scores = True
        most[request] = request.max_length
        if token_budget is not None:
            now = len(request.prompt_token_ids) + len(request.output_token_ids)
            request.max_length = min(request.max_length, now + token_budget)
    _expect(decoder, table, requests, expected_lengths)
    handed_at = time.perf_counter()
    try:
        loop = decoder.hand_over(params, params_version)
        run = _Run(loop, handed_at)
        for index in _longest_first(requests):
            try:
                loop.add(requests[index])
            except ValueError as error:
                requests[index].error = str(error)
                requests[index].end("error")
        deadline = None if time_budget_s is None else begun_at + time_budget_s
        while loop.has_work:
            if deadline is not None and time.perf_counter() >= deadline:
                loop.pause()
                break
            loop.step()
    finally:
        # Requests left by an exception are dropped by the next call.
        decoder.let_go()
    for index, request in requests.items():
        table.fill(index, request, decoder.params_version, most[request])
    _refuse_nonsense(table, requests)
    _learn_lengths(decoder, table, requests)
    metrics = run.metrics(decoder, table, requests, begun_at)
    _alarm(metrics, decoder, alarm_rate)
    given = prompts.prompt_ids if is_resumed else prompts
    place = decoder.placing(getattr(given, "sharding", None), len(table.lengths))
    return table.placed(
        place,
        sampling=_recorded(sampling, rule),
        metrics=metrics,
        is_exact=decoder.is_exact_under(rule),
    )


# Before the rollout.


def _check(
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


def _rule(decoder: RolloutDecoder, sampling: SamplingParams) -> str:
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


def _as_rows(
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
    seed = sampling.seed
    seed = secrets.randbits(63) if seed is None else _checked_seed(seed)
    times: collections.Counter[bytes] = collections.Counter()
    seeded = []
    for row in rows:
        text = np.asarray(row, np.int64).tobytes()
        own = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
        seeded.append(dataclasses.replace(sampling, seed=derive_seed(seed ^ own, times[text])))
        times[text] += 1
    return seeded


def _checked_seed(seed: Any) -> int:
    try:
        number = operator.index(seed)
    except TypeError:
        number = -1
    if not 0 <= number < 2**64:
        raise ValueError(f"{seed=!r} must be a whole number from 0 to 2**64 - 1.")
    return number


def _begun(
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
        if not request.params.stop_strings:
            request.text = None
        requests[index] = request
        table.seeds[index] = request.sampling_values["seeds"]
    for each in refused:
        table.finish_reasons[each.prompt_index * num_samples + each.sample_index] = ERROR
    if refused:
        warnings.warn(
            f"{len(refused)} of {len(table.lengths)} samples were refused and have "
            f"finish reason ERROR: {refused[0].error}",
            stacklevel=4,  # past the decorator of `rollout`
        )
    return table, requests


def _resumed(
    decoder: RolloutDecoder, batch: Rollout, sampling: SamplingParams, rule: str
) -> tuple[Table, dict[int, Request]]:
    """Returns the table of a continued rollout, and its unfinished requests by sample index."""
    if batch.sampling is not None:
        _check_same(_recorded(sampling, rule), batch.sampling)
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
    asked = dataclasses.replace(sampling, logprobs=sampling.logprobs or 0, seed=0)
    table.describe(asked)
    left = np.flatnonzero(table.finish_reasons == UNFINISHED).tolist()
    if np.any(table.turn_reasons[left, table.counts[left] - 1] != UNFINISHED):
        raise ValueError(
            "dialogues wait for an environment's reply; give it with Rollout.continued, or pass "
            "the rollout to specjax.rollout_turns."
        )
    prompts = [table.prompt_of(index) for index in left]
    made, refused = decoder.requests(prompts, [asked] * len(left)) if left else ([], [])
    if refused:
        raise ValueError(f"the rollout cannot go on: {refused[0].error}")
    requests = {}
    for index, request in zip(left, made, strict=True):
        start, end = int(table.starts[index]), int(table.lengths[index])
        count = end - start
        request.output_token_ids = table.completion_ids[index, start:end].tolist()
        request.num_resumed = count
        room = length - start
        request.max_length = min(request.max_length, len(request.prompt_token_ids) + room)
        request.group = group_of(table.prompt_ids[index][table.prompt_mask[index]])
        request.sampling_values["seeds"] = table.seeds[index]
        request.is_draft = [False] * count
        if not request.params.stop_strings:
            request.text = None
        elif request.text is not None:
            for token in request.output_token_ids:
                request.text.feed(token, may_stop=False)
        requests[index] = request
    return table, requests


# The number of drafts affects only speed, and seeds are taken from the rollout.
_MAY_DIFFER = ("seed", "num_speculative_tokens", "speculate")


def _recorded(sampling: SamplingParams, rule: str) -> SamplingParams:
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


def _expect(
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


def _longest_first(requests: dict[int, Request]) -> list[int]:
    """Returns the sample indices of requests in order of admission.

    The longest start first, so that the rollout does not end with a long request alone.
    Samples of one prompt stay together, because they share its pages.
    """
    return sorted(requests, key=lambda index: (-requests[index].expected_length, index))


# After the rollout.


def _refuse_nonsense(table: Table, requests: dict[int, Request]) -> None:
    """Raises ValueError if every sample failed, and warns if some did."""
    failed = [request for request in requests.values() if request.finish_reason == "error"]
    if not failed:
        return
    has_gained = any(
        len(request.output_token_ids) > request.num_resumed for request in requests.values()
    )
    if len(failed) == len(requests) and not has_gained:
        raise ValueError(f"no sample could be drawn: {failed[0].error}")
    warnings.warn(
        f"{len(failed)} of {len(requests)} samples have finish reason ERROR: {failed[0].error}",
        stacklevel=4,  # past the decorator of `rollout`
    )


def _learn_lengths(decoder: RolloutDecoder, table: Table, requests: dict[int, Request]) -> None:
    """Records in the decoder the longest completion of each prompt whose samples all ended."""
    if table.has_turns:
        return  # an environment's tokens are no measure of the policy's
    prompts = {
        int(table.prompt_index[index]): request.prompt_token_ids
        for index, request in requests.items()
    }
    for prompt, token_ids in prompts.items():
        own = table.prompt_index == prompt
        reasons = table.finish_reasons[own]
        if UNFINISHED not in reasons and np.any(reasons != ERROR):
            decoder.learn_length(token_ids, int(table.lengths[own].max()))


class _Run:
    """Counters of the loop at the start of a rollout."""

    def __init__(self, loop: Loop, handed_at: float):
        self._loop = loop
        self._hand_over_s = time.perf_counter() - handed_at
        self._run_s, self._compile_s = loop.run_s, loop.compile_s
        self._num_preemptions = loop.num_preemptions

    def metrics(
        self,
        decoder: RolloutDecoder,
        table: Table,
        requests: dict[int, Request],
        begun_at: float,
    ) -> dict[str, Any]:
        """Returns metrics for a logger; docs/rollouts.md describes them."""
        loop, counts, num_tokens = self._loop, AcceptanceCounts(), 0
        for request in requests.values():
            counts.merge(request.counts)
            num_tokens += len(request.output_token_ids) - request.num_resumed
        seconds = time.perf_counter() - begun_at
        compile_s = loop.compile_s - self._compile_s
        reasons = table.finish_reasons
        return {
            "num_samples": len(reasons),
            "num_tokens": num_tokens,
            "num_steps": counts.num_steps,
            "num_unfinished": int(np.sum(reasons == UNFINISHED)),
            "num_errors": int(np.sum(reasons == ERROR)),
            "mean_length": float(np.mean(table.lengths)),
            "longest": int(np.max(table.lengths)),
            "truncated_share": float(np.mean(reasons == LENGTH)),
            "rollout_s": seconds,
            "compile_s": compile_s,
            "hand_over_s": self._hand_over_s,
            "weights_bytes_moved": decoder.weights_bytes_moved,
            "tokens_per_second": num_tokens / max(seconds - compile_s, 1e-9),
            "num_drafted": counts.num_drafted,
            "num_accepted": counts.num_accepted,
            "acceptance_rate": counts.acceptance_rate,
            "mean_acceptance_length": counts.mean_acceptance_length,
            "num_preemptions": loop.num_preemptions - self._num_preemptions,
            "num_traces": decoder.num_traces,
            "params_version": decoder.params_version,
            "is_alarmed": 0,
        }


def _alarm(metrics: dict[str, Any], decoder: RolloutDecoder, rate: float) -> None:
    """Warns if the acceptance rate shows that the drafter no longer fits the policy."""
    is_judged = decoder.has_draft_weights and metrics["num_drafted"] >= ALARM_DRAFTS
    if not is_judged or metrics["acceptance_rate"] >= rate:
        return
    metrics["is_alarmed"] = 1
    warnings.warn(
        f"{metrics['acceptance_rate']:.1%} of {metrics['num_drafted']} drafts of "
        f"{decoder.drafter!r} were accepted, below {rate:.0%}: it no longer fits the "
        f"policy, or {'; or '.join(decoder.likely_faults)}. Pass newer weights of the draft model "
        "as DecoderParams(policy, draft), or draft from history. Samples are not affected, and "
        "K = 0 is chosen where drafts do not pay.",
        stacklevel=4,  # past the decorator of `rollout`
    )
