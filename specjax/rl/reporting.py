"""From finished requests to the figures and warnings of a rollout."""

from __future__ import annotations

import time
import warnings
from typing import Any

import numpy as np

from specjax.engine.loop import Loop
from specjax.engine.request import AcceptanceCounts, Request
from specjax.rl.batch import ERROR, LENGTH, UNFINISHED
from specjax.rl.decoder import RolloutDecoder
from specjax.rl.table import Table
from specjax.runtime.stack_level import of_the_caller

# A warning calls the drafter stale below this acceptance rate, after at least this many drafts.
ALARM_RATE = 0.2
ALARM_DRAFTS = 512


def refuse_nonsense(table: Table, requests: dict[int, Request]) -> None:
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
        stacklevel=of_the_caller(),  # past the decorator of `rollout`
    )


def learn_lengths(decoder: RolloutDecoder, table: Table, requests: dict[int, Request]) -> None:
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


class Run:
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
        *,
        num_drawn: int | None = None,
    ) -> dict[str, Any]:
        """Returns metrics for a logger; docs/rollouts.md describes them.

        Args:
          begun_at: time.perf_counter() from which seconds count.
          num_drawn: tokens that were drawn since; None: those of the requests.
        """
        loop, counts, num_tokens = self._loop, AcceptanceCounts(), 0
        for request in requests.values():
            counts.merge(request.counts)
            num_tokens += len(request.output_token_ids) - request.num_resumed
        seconds = time.perf_counter() - begun_at
        compile_s = loop.compile_s - self._compile_s
        drawn = num_tokens if num_drawn is None else num_drawn
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
            "weights_move_s": decoder.weights_move_s,
            "tokens_per_second": drawn / max(seconds - compile_s, 1e-9),
            "num_drafted": counts.num_drafted,
            "num_accepted": counts.num_accepted,
            "acceptance_rate": counts.acceptance_rate,
            "mean_acceptance_length": counts.mean_acceptance_length,
            "num_preemptions": loop.num_preemptions - self._num_preemptions,
            "num_traces": decoder.num_traces,
            "params_version": decoder.params_version,
            "is_alarmed": 0,
        }


def alarm(metrics: dict[str, Any], decoder: RolloutDecoder, rate: float) -> None:
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
        stacklevel=of_the_caller(),  # past the decorator of `rollout`
    )
