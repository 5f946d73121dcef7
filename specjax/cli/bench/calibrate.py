"""`specjax bench --calibrate`: measures the step costs of a pair on this machine, by bucket.

Every bucket that the goodput policy may choose is compiled and timed at a short and a
long context, all of them in turn, so that a machine that slows down slows all. The costs
are kept in the user's cache directory, where `generate` and `Engine` look for them.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.api.assemble import Setup
from specjax.cli import table
from specjax.cli.bench import measuring
from specjax.cli.bench.widen import widen
from specjax.cli.bench.widen_heads import widen_head
from specjax.cli.plan_document import row_counts
from specjax.config.engine import EngineConfig
from specjax.config.names import DRAFTERS
from specjax.config.sampling import SamplingParams
from specjax.config.speculation import MAX_DEPTH
from specjax.configs.models import known_shape
from specjax.decode.bucket import Bucket
from specjax.decode.decoder import Decoder
from specjax.decode.state import DecodeState, with_table
from specjax.engine.admission import make_admissions
from specjax.engine.request import Request
from specjax.engine.rows import Row
from specjax.heads.loading import is_head, load_drafter
from specjax.models.base import Model
from specjax.models.families import family_of
from specjax.models.loading import load_model
from specjax.policy import cost_files
from specjax.policy.goodput import Goodput
from specjax.policy.step_cost import StepCosts
from specjax.runtime import compilation_cache
from specjax.runtime.progress import Progress, Report
from specjax.sampling import row_values
from specjax.types import BurstPlan, DecoderParams

SHORT_CONTEXT = 64


class StepTimer:
    """Bursts of any bucket of a decoder, from the same place each time.

    The keys and values that are read are zeros: what a step costs does not depend on
    them. Rows share pages where the pool is smaller than all rows together.

    Attributes:
      state: after admission, or the last burst, which donates the one before.
      reports: what the last burst of each bucket says of its steps.
    """

    def __init__(
        self,
        decoder: Decoder,
        params: DecoderParams,
        sampling: SamplingParams,
        *,
        rule: int = 1,
        num_steps: int = 8,
    ):
        self.decoder, self.params = decoder, decoder.place_params(params)
        self.num_steps = min(num_steps, decoder.sizes.burst_steps)
        self.reports: dict[Bucket, Any] = {}
        sizes = decoder.sizes
        table = np.arange(sizes.rows * sizes.pages_per_row, dtype=np.int32)
        table %= sizes.num_pages // decoder.num_shards
        self._table = table.reshape(sizes.rows, sizes.pages_per_row)
        self.state = with_table(decoder.init(), self._table)
        for admission in make_admissions(decoder, self._rows(sampling, rule)):
            self.state = decoder.admit(self.state, admission)

    def at(self, context: int, *, behind: int = 0) -> DecodeState:
        """Returns the state of rows with `context` tokens; a burst donates it.

        Args:
          behind: tokens of them that the drafter has not seen.
        """
        lengths = jnp.full(self.decoder.sizes.rows, context, jnp.int32)
        return dataclasses.replace(
            self.state,
            cache=dataclasses.replace(self.state.cache, lengths=lengths),
            drafter_lengths=lengths - behind,
            is_active=jnp.zeros_like(lengths, bool),
        )

    def longest_context(self, depth: int) -> int:
        """Returns the most tokens of a row from which a burst can run."""
        sizes = self.decoder.sizes
        room = self.num_steps * (1 + depth) + sizes.tree_slots + 2
        return sizes.max_length - room

    def prepare(self, bucket: Bucket) -> None:
        """Starts to compile a burst in the background; `run` waits for it."""
        self.decoder.prepare(self.params, self.state, bucket)

    def run(self, bucket: Bucket, context: int, *, behind: int = 0) -> Any:
        """Runs one burst of `num_steps` steps from `at(context)`."""
        self.state, self.reports[bucket], num_steps = self.decoder.burst(
            self.params,
            self.at(context, behind=behind),
            self._plan(bucket),
            num_speculative_tokens=bucket.num_speculative_tokens,
            max_drafts=bucket.max_drafts,
        )
        return num_steps

    def wide_share(self, bucket: Bucket) -> float:
        """Returns how many steps of a bucket's last burst had a draft token; 1 where all are as
        wide."""
        if not (self.decoder.config.narrows and bucket.num_speculative_tokens):
            return 1.0
        depths = np.asarray(self.reports[bucket].draft_depth)[: self.num_steps]
        return float(depths.any(axis=1).mean())

    def _plan(self, bucket: Bucket) -> BurstPlan:
        sizes, num_shards = self.decoder.sizes, self.decoder.num_shards
        per_shard, taken = sizes.rows // num_shards, bucket.rows // num_shards
        is_taken = np.tile(np.arange(per_shard) < taken, num_shards)
        own = np.tile(np.arange(taken, dtype=np.int32), num_shards)
        return BurstPlan(
            num_steps=np.int32(self.num_steps),
            stop_when_finished=np.bool_(False),
            activate=is_taken,
            keep=np.ones(sizes.rows, bool),
            block_table=self._table,
            draft_caps=np.full(sizes.rows, MAX_DEPTH, np.int32),
            row_ids=None if bucket.rows == sizes.rows else own,
        )

    def _rows(self, sampling: SamplingParams, rule: int) -> list[Row]:
        decoder = self.decoder
        rows = []
        for index in range(decoder.sizes.rows):
            values = row_values(
                sampling,
                prompt_length=1,
                eos_token_ids=(),
                seed=index,
                engine_config=decoder.engine_config,
            )
            request = Request(
                prompt_index=index,
                sample_index=0,
                prompt_token_ids=[0],
                params=sampling,
                seed=index,
                draft_cap=MAX_DEPTH,
                rule=rule,
                max_length=decoder.sizes.max_length,
                sampling_values=values,
            )
            shard = index // (decoder.sizes.rows // decoder.num_shards)
            rows.append(Row(index, shard, request, [0], 0, 0))
        return rows


@dataclasses.dataclass(frozen=True)
class Calibration:
    """Seconds per step by round, of every bucket, context and catch-up.

    Attributes:
      seconds: by bucket, tokens of context and tokens that the drafter has not seen, of each row.
      num_steps: of a burst.
      wide_shares: keys as of `seconds`; how many steps had a draft token, 1 where all are as wide.
    """

    seconds: dict[tuple[Bucket, int, int], list[float]]
    num_steps: int
    wide_shares: dict[tuple[Bucket, int, int], float]

    def records(self) -> list[dict[str, Any]]:
        """Returns the medians as StepCosts keeps them."""
        return [
            bucket._asdict()
            | {
                "context_tokens": float(bucket.rows * context),
                "step_s": measuring.median(measured),
                "num_steps": self.num_steps,
                "num_behind": behind,
                "wide_share": self.wide_shares[bucket, context, behind],
            }
            for (bucket, context, behind), measured in self.seconds.items()
        ]

    @property
    def catch_up_s(self) -> float:
        """Seconds per token that the drafter has not seen."""
        late = next((place for place in self.seconds if place[-1]), None)
        if late is None:
            return 0.0
        lags = zip(self.seconds[late], self.seconds[*late[:2], 0], strict=True)
        extra = measuring.median([late - ready for late, ready in lags])
        return max(extra * self.num_steps / late[-1], 0.0)


def calibrate(
    timer: StepTimer,
    buckets: Iterable[Bucket],
    *,
    rounds: int = 7,
    beside: Mapping[Any, Callable[[], Any]] | None = None,
    report: Report = lambda what, done, total: None,
) -> tuple[Calibration, dict[Any, list[float]]]:
    """Times every bucket at a short and a long context, in turn.

    Args:
      beside: other bursts of as many steps, to be timed in the same rounds.
      report: told how many buckets are compiled, and how many rounds are measured.

    Returns:
      The calibration, and the seconds per step of what is `beside`, by round.
    """
    buckets, beside = list(buckets), dict(beside or {})
    drafting = min((b for b in buckets if b.num_speculative_tokens), default=None)
    longest = timer.longest_context(max(b.num_speculative_tokens for b in buckets))
    contexts = sorted({min(SHORT_CONTEXT, longest), longest})
    for done, bucket in enumerate(buckets):
        report("compiling buckets", done, len(buckets))
        jax.block_until_ready(timer.run(bucket, contexts[0]))
    contenders: dict[Any, Callable[[], Any]] = beside | {
        (bucket, context, 0): functools.partial(timer.run, bucket, context)
        for bucket in buckets
        for context in contexts
    }
    if drafting is not None:
        context = contexts[-1]
        contenders[drafting, context, context - 1] = functools.partial(
            timer.run, drafting, context, behind=context - 1
        )
    seconds: dict[Any, list[float]] = {place: [] for place in contenders}
    for done in range(rounds):
        report("measuring", done, rounds)
        measured = measuring.interleaved(contenders, 1, warms_up=not done, seed=done)
        for place, (one,) in measured.items():
            seconds[place].append(one / timer.num_steps)
    report("measuring", rounds, rounds)
    own = {place: seconds[place] for place in contenders if place not in beside}
    shares = {}
    for place in own:  # a burst from one place drafts the same each time
        contenders[place]()
        shares[place] = timer.wide_share(place[0])
    return Calibration(own, timer.num_steps, shares), {place: seconds[place] for place in beside}


def of_pair(options: argparse.Namespace) -> dict[str, Any]:
    """Calibrates the pair of `specjax bench --calibrate`, and keeps its costs; returns them."""
    compilation_cache.enable()
    target = model(options.target)
    drafter = options.drafter if options.drafter in DRAFTERS else model(options.drafter)
    if options.widen is not None:
        loaded = load_model(target) if isinstance(target, str) else target
        target = widen(loaded, options.widen)
        if isinstance(drafter, str) and drafter not in DRAFTERS and is_head(drafter):
            drafter = widen_head(load_drafter(drafter, loaded), loaded.config, target.config)
    setup = Setup.of(
        target,
        drafter=drafter,
        num_speculative_tokens=options.num_speculative_tokens,
        engine=EngineConfig(max_rows=options.max_rows, max_context=options.max_context),
    )
    decoder = setup.decoder(setup.standing_sizes(), [])
    policy = setup.policy(decoder)
    if not isinstance(policy, Goodput):
        raise ValueError(
            "nothing is drafted, so there is no K to choose; pass --drafter, and a K of at least 1."
        )
    sampling = SamplingParams(temperature=options.temperature, ignore_eos=True)
    timer = StepTimer(decoder, setup.params, sampling)
    buckets = policy.buckets(row_counts(options.max_rows))
    progress = Progress(True)
    found, _ = calibrate(timer, buckets, rounds=options.rounds, report=progress.report)
    progress.close()
    costs = StepCosts()
    costs.add_records(found.records())
    kept = cost_files.Known(StepCosts())
    cost_files.load(decoder, kept)
    path = cost_files.save(decoder, cost_files.Known(costs, kept.acceptance, kept.ledgers))
    return {
        "environment": measuring.environment(),
        "key": cost_files.key_of(decoder),
        "rounds": options.rounds,
        "catch_up_s": found.catch_up_s,
        "steps": costs.to_records(),
        "file": None if path is None else str(path),
    }


def model(name: str) -> Any:
    """Returns a model with random weights where `name` is one of configs/models, else the name."""
    config = None if "/" in name else known_shape(name)
    if config is None:
        return name
    params = family_of(config).init(jax.random.key(0), config)
    return Model(config, params, name=name)


def as_text(document: Mapping[str, Any]) -> str:
    """Returns the costs of `of_pair` for readers."""
    steps = table.as_text(
        {
            "rows": step["rows"],
            "K": step["num_speculative_tokens"],
            "slots": step["max_drafts"] or "",
            "context": f"{step['context_tokens'] / step['rows']:.0f}",
            "ms per step": f"{1e3 * step['step_s']:.3f}",
        }
        for step in document["steps"]
        if not step["num_behind"]
    )
    late = f"catching up with a token after K = 0: {1e3 * document['catch_up_s']:.3f} ms"
    return f"{steps}\n{late}\nkept in {document['file']}"
