"""The engine: while requests remain, admit -> prefill -> burst -> collect."""

from __future__ import annotations

import collections
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from specjax.decode.decoder import Decoder
from specjax.decode.state import Admission
from specjax.engine.request import Request, TokenLogProbs
from specjax.engine.speculation_policy import Load, SpeculationPolicy
from specjax.progress import Report
from specjax.sampling import RowSampling, empty_row_values
from specjax.types import DecoderParams, Plan, StepInfo

# Prompt tokens a row gets per prefill call: several rows at once, or one long row.
PREFILL_WIDTHS = (64, 256)
PREFILL_PLACES = 8


class Engine:
    """Runs requests on the rows of one decoder, first come first served.

    More requests than rows wait. A request is let in when its shard has pages for
    every token it may ever hold, so a burst never runs dry and nothing is preempted.
    """

    def __init__(
        self,
        decoder: Decoder,
        params: DecoderParams,
        policy: SpeculationPolicy,
        *,
        on_progress: Report = lambda what, done, total: None,
    ):
        self.decoder = decoder
        self.params = decoder.place_params(params)
        self.policy = policy
        self.run_s = 0.0  # seconds in compiled calls and in reading them back, compiling left out
        self._on_progress = on_progress
        self._state = decoder.init()
        self._waiting: collections.deque[Request] = collections.deque()
        self._rows: list[Request | None] = [None] * decoder.sizes.rows
        self._free_pages = [
            decoder.sizes.num_pages // decoder.num_shards
        ] * decoder.num_shards

    def add(self, request: Request) -> None:
        """Queues a request.

        Raises:
          ValueError: it could never fit.
        """
        sizes = self.decoder.sizes
        pool_tokens = sizes.num_pages // self.decoder.num_shards * sizes.page_size
        most = min(sizes.max_length, pool_tokens) - sizes.tree_slots
        if request.max_length > most:
            raise ValueError(
                f"prompt of {len(request.prompt_token_ids)} tokens and max_tokens={request.params.max_tokens!r} need "
                f"{request.max_length} tokens of context, the pool holds {most} for one row; lower max_tokens, "
                "shorten the prompt or raise num_pages."
            )
        self._waiting.append(request)

    @property
    def has_work(self) -> bool:
        return bool(self._waiting) or any(
            r is not None and not r.is_finished for r in self._rows
        )

    def run(self, *, max_burst_steps: int | None = None) -> Iterator[list[Request]]:
        """Runs until nothing is left; after each burst yields the requests that moved."""
        while self.has_work:
            yield self.step(max_burst_steps)

    def step(self, max_burst_steps: int | None = None) -> list[Request]:
        """Admits, prefills and runs one burst; returns the requests it advanced."""
        # The decoder may serve other engines in turn.
        self.decoder.on_compile = lambda what: self._on_progress(
            f"compiling the {what}", 0, 0
        )
        compiled_before = self.decoder.compile_s
        start = time.perf_counter()
        admitted = self._exchange_rows()
        self._prefill(admitted)
        moved = self._burst(admitted, max_burst_steps)
        self.run_s += (
            time.perf_counter() - start - (self.decoder.compile_s - compiled_before)
        )
        return moved

    def _exchange_rows(self) -> dict[int, Request]:
        """Releases ended rows and admits waiting requests; returns those admitted, by row."""
        ended = {
            r: q for r, q in enumerate(self._rows) if q is not None and q.is_finished
        }
        for row, request in ended.items():
            self._free_pages[self._shard(row)] += self._pages_needed(request)
            self._rows[row] = None
        admitted = {}
        while self._waiting:
            row = self._find_row(self._waiting[0])
            if row is None:
                break
            request = self._waiting.popleft()
            self._rows[row] = request
            self._free_pages[self._shard(row)] -= self._pages_needed(request)
            admitted[row] = request
        if not ended and not admitted:
            return {}
        release_mask = np.zeros(len(self._rows), bool)
        release_mask[list(ended)] = True
        admission = make_admission(self.decoder, admitted)
        self._state, is_out = self.decoder.exchange(
            self._state, release_mask, admission
        )
        assert not np.any(np.asarray(is_out)), "the host's count of free pages is wrong"
        return admitted

    def _find_row(self, request: Request) -> int | None:
        """Returns an empty row of the shard with most free pages, None when the request must wait."""
        shards = sorted(
            range(self.decoder.num_shards), key=lambda s: -self._free_pages[s]
        )
        for shard in shards:
            if self._free_pages[shard] < self._pages_needed(request):
                continue
            for row, occupant in enumerate(self._rows):
                if occupant is None and self._shard(row) == shard:
                    return row
        return None

    def _prefill(self, admitted: dict[int, Request]) -> None:
        """Feeds the prompts of new rows, all but their last tokens."""
        remaining = {
            row: len(request.prompt_token_ids) - 1 for row, request in admitted.items()
        }
        remaining = {row: count for row, count in remaining.items() if count > 0}
        total = sum(remaining.values())
        num_shards = self.decoder.num_shards
        rows_per_shard = len(self._rows) // num_shards
        while remaining:
            self._on_progress("prefill", total - sum(remaining.values()), total)
            by_shard = [
                [r for r in remaining if self._shard(r) == shard]
                for shard in range(num_shards)
            ]
            is_single = max(len(rows) for rows in by_shard) == 1
            places = 1 if is_single else min(PREFILL_PLACES, rows_per_shard)
            narrow, wide = PREFILL_WIDTHS
            width = (
                wide if is_single and max(remaining.values()) >= 2 * narrow else narrow
            )
            row_ids = np.full((num_shards, places), rows_per_shard, np.int32)
            counts = np.zeros((num_shards, places), np.int32)
            for shard, candidates in enumerate(by_shard):
                for place, row in enumerate(candidates[:places]):
                    row_ids[shard, place] = row % rows_per_shard
                    counts[shard, place] = min(width, remaining[row])
                    remaining[row] -= int(counts[shard, place])
            self._state = self.decoder.prefill(
                self.params,
                self._state,
                row_ids.reshape(-1),
                counts.reshape(-1),
                max_tokens_per_row=width,
            )
            remaining = {row: count for row, count in remaining.items() if count > 0}
        if total:
            self._on_progress("prefill", total, total)

    def _burst(
        self, admitted: dict[int, Request], max_burst_steps: int | None
    ) -> list[Request]:
        running = {
            r: q
            for r, q in enumerate(self._rows)
            if q is not None and not q.is_finished
        }
        load = Load(num_decoding_rows=len(running), num_waiting=len(self._waiting))
        depth = self.policy.choose(load)
        if depth > 0 and not any(request.draft_cap for request in running.values()):
            depth = 0  # nobody wants drafts: plain decoding's own executable
        activate = np.zeros(len(self._rows), bool)
        activate[list(admitted)] = True
        limit = self.decoder.sizes.burst_steps
        plan = Plan(
            num_steps=np.int32(min(limit, max_burst_steps or limit)),
            stop_when_finished=np.bool_(bool(self._waiting)),
            activate=activate,
        )
        compiled_before = self.decoder.compile_s
        start = time.perf_counter()
        self._state, report, num_steps = self.decoder.burst(
            self.params, self._state, plan, num_speculative_tokens=depth
        )
        num_steps = int(num_steps)
        num_committed = collect(report, num_steps, running)
        seconds = (
            time.perf_counter() - start - (self.decoder.compile_s - compiled_before)
        )
        self.policy.observe(depth, num_steps, num_committed, seconds)
        return list(running.values())

    def _shard(self, row: int) -> int:
        return row // (len(self._rows) // self.decoder.num_shards)

    def _pages_needed(self, request: Request) -> int:
        sizes = self.decoder.sizes
        return -(-(request.max_length + sizes.tree_slots) // sizes.page_size)


def collect(report: StepInfo, num_steps: int, running: dict[int, Request]) -> int:
    """Hands each row's tokens of a burst to its request; returns how many were committed."""
    fields = (
        "token_ids",
        "num_committed",
        "num_accepted",
        "num_drafted",
        "draft_depth",
        "finish",
    )
    host = {name: np.asarray(getattr(report, name)) for name in fields}
    is_described = any(
        request.params.logprobs is not None or request.params.self_check
        for request in running.values()
    )
    logprobs = (
        type(report.logprobs)(*map(np.asarray, report.logprobs))
        if is_described
        else None
    )
    for row, request in running.items():
        for step in range(num_steps):
            count = int(host["num_committed"][step, row])
            finish = int(host["finish"][step, row])
            if count == 0 and finish == 0:
                continue
            token_ids = host["token_ids"][step, row, :count].tolist()
            wanted = request.params.logprobs
            described = []
            if wanted is not None:
                described = [
                    _describe(logprobs, (step, row, place), token, wanted)
                    for place, token in enumerate(token_ids)
                ]
            surpluses = []
            if request.params.self_check:
                assert logprobs is not None
                surplus, variance = (
                    values[step, row, :count].tolist()
                    for values in (logprobs.surplus, logprobs.variance)
                )
                surpluses = list(zip(surplus, variance))
            request.take_step(
                token_ids,
                int(host["num_accepted"][step, row]),
                int(host["num_drafted"][step, row]),
                finish,
                described,
                int(host["draft_depth"][step, row]),
                surpluses,
            )
    return int(host["num_committed"][:num_steps].sum())


def _describe(
    logprobs, index: tuple[int, int, int], token_id: int, num_top: int
) -> TokenLogProbs:
    top = lambda ids, values: tuple(
        zip(ids[index][:num_top].tolist(), values[index][:num_top].tolist())
    )
    return TokenLogProbs(
        token_id=token_id,
        processed=float(logprobs.processed[index]),
        raw=float(logprobs.raw[index]),
        top_processed=top(logprobs.processed_top_ids, logprobs.processed_top),
        top_raw=top(logprobs.raw_top_ids, logprobs.raw_top),
    )


def make_admission(decoder: Decoder, requests: dict[int, Request]) -> Admission:
    """Returns the arrays that let requests into rows, by row."""
    sizes = decoder.sizes
    rows = sizes.rows
    history = np.zeros((rows, sizes.max_length), np.int32)
    mask = np.zeros(rows, bool)
    max_lengths, draft_caps, rules = (np.zeros(rows, np.int32) for _ in range(3))
    sampling: dict[str, Any] = empty_row_values(rows, decoder.engine_config)
    for row, request in requests.items():
        mask[row] = True
        history[row, : len(request.prompt_token_ids)] = request.prompt_token_ids
        max_lengths[row] = request.max_length
        draft_caps[row] = request.draft_cap
        rules[row] = request.rule
        for name, value in request.sampling_values.items():
            sampling[name][row] = value
    return Admission(
        mask=mask,
        history=history,
        sampling=RowSampling(**sampling),
        max_lengths=max_lengths,
        draft_caps=draft_caps,
        rules=rules,
    )
