"""rollout(): samples completions of the current policy with speculative decoding, as arrays.

prompts, seeds -> requests -> the engine's loop -> arrays
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from specjax.config.checks import is_number
from specjax.config.keywords import keyword_check
from specjax.config.sampling import SamplingSource
from specjax.engine.loop import is_added
from specjax.models.base import Params
from specjax.rl.batch import Rollout
from specjax.rl.beginning import (
    as_rows,
    begun,
    check_numbers,
    check_resumed,
    expect,
    longest_first,
    recorded,
    resumed,
    rule_of,
    sampling_of,
)
from specjax.rl.decoder import RolloutDecoder, check_decoder
from specjax.rl.reporting import ALARM_RATE, Run, alarm, learn_lengths, refuse_nonsense
from specjax.runtime.jax_settings import entrance
from specjax.runtime.progress import Report
from specjax.types import DecoderParams


@entrance("specjax.rollout", keyword_check)
def rollout(
    decoder: RolloutDecoder,
    params: Params | DecoderParams,
    prompts: Any,
    *,
    num_samples: int | None = None,
    sampling: SamplingSource | None = None,
    seeds: Sequence[int] | np.ndarray | None = None,
    prompt_mask: Any = None,
    prompt_width: int | None = None,
    params_version: int | None = None,
    token_budget: int | None = None,
    time_budget_s: float | None = None,
    expected_lengths: Sequence[float] | np.ndarray | None = None,
    alarm_rate: float = ALARM_RATE,
    progress: bool | Report | None = None,
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
      sampling: SamplingParams, or a mapping of some, for all prompts. What is not given is never
        taken from the model's generation_config.json: temperature 1, no penalty and nothing cut,
        so that a loss knows what was sampled. None: that and at most 128 tokens, or for a Rollout
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
      progress: as for `generate`; by default nothing where threads share the decoder's steps.

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
    sampling = sampling_of(prompts, sampling).over(decoder.config.vocab_size)
    check_numbers(num_samples, token_budget, time_budget_s, sampling)
    if not (is_number(alarm_rate) and 0 <= alarm_rate <= 1):
        raise ValueError(f"{alarm_rate=!r} must be a share of accepted drafts, from 0 to 1.")
    rule = rule_of(decoder, sampling)
    if is_resumed:
        check_resumed(num_samples, seeds, prompt_mask)
        table, requests = resumed(decoder, prompts, sampling, rule)
    else:
        table, requests = begun(
            decoder,
            *as_rows(decoder, prompts, prompt_mask),
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
    expect(decoder, table, requests, expected_lengths)
    handed_at = time.perf_counter()
    # Requests left by an exception are dropped by the next call.
    with (
        decoder.using(params, params_version) as loop,
        decoder.showing(progress) as report,
    ):
        run = Run(loop, handed_at)
        for index in longest_first(requests):
            is_added(loop, requests[index])
        deadline = None if time_budget_s is None else begun_at + time_budget_s
        while loop.has_work:
            if deadline is not None and time.perf_counter() >= deadline:
                loop.pause()
                break
            loop.step()
            num_ended = sum(request.is_finished for request in requests.values())
            report("samples", num_ended, len(requests))
    for index, request in requests.items():
        table.fill(index, request, most[request])
    refuse_nonsense(table, requests)
    learn_lengths(decoder, table, requests)
    metrics = run.metrics(decoder, table, requests, begun_at)
    alarm(metrics, decoder, alarm_rate)
    given = prompts.prompt_ids if is_resumed else prompts
    place = decoder.placing(getattr(given, "sharding", None), len(table.lengths))
    return table.placed(
        place,
        sampling=recorded(sampling, rule),
        metrics=metrics,
        errors=table.errors,
        is_exact=decoder.is_exact_under(rule),
    )
