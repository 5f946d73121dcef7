"""generate() and stream(): tokenise, run the loop, detokenise."""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jax.sharding import Mesh

from specjax.api.acceptance_alarm import AcceptanceAlarm
from specjax.api.assemble import Setup, acceptance_kind
from specjax.api.requests import Prompt, as_list
from specjax.api.results import (
    Chunk,
    ChunkWriter,
    Generation,
    completion_of,
    refusal,
    self_check_of,
)
from specjax.api.totals import Totals
from specjax.config.engine import EngineConfig
from specjax.config.keywords import keyword_check
from specjax.config.rules import VerificationRule
from specjax.config.sampling import SamplingSource
from specjax.config.speculation import SpeculationConfig
from specjax.heads.loading import DrafterSource
from specjax.models.base import Model
from specjax.models.mesh_axes import MeshAxisMap
from specjax.policy.interface import SpeculationPolicy
from specjax.runtime import compilation_cache
from specjax.runtime.jax_settings import entrance
from specjax.runtime.progress import Progress, Report


@entrance("specjax.generate", keyword_check)
def generate(
    target: Model | str | os.PathLike[str],
    prompts: Prompt | Sequence[Prompt],
    *,
    drafter: DrafterSource = None,
    sampling: SamplingSource | Sequence[SamplingSource] | None = None,
    verification: VerificationRule | None = None,
    num_speculative_tokens: int | None = None,
    speculative_config: SpeculationConfig | Mapping[str, Any] | str | None = None,
    engine: EngineConfig | Mapping[str, Any] | None = None,
    policy: SpeculationPolicy | None = None,
    mesh: Mesh | None = None,
    mesh_axes: MeshAxisMap | None = None,
    progress: bool | Report | None = None,
) -> Generation:
    """Generates text; speculation does not change it.

    It is the same token for token under `greedy`, `seeded` and `delta`, and in distribution
    under `rejection`, `block` and `traversal`. Under the lossy rules it differs.

    Args:
      target: a Model, a folder in Hugging Face format, a hub name, or "demo".
      prompts: one prompt or many, of any lengths: text, chat messages, or token ids.
      drafter: None, "ngram", "demo", a folder, a Model, a DrafterSpec of your own, or what
        load_drafter returned.
      sampling: SamplingParams, or a mapping of some as {"max_tokens": 64}, for all prompts, or
        one per prompt. Temperature, top-k, top-p, min-p and penalties that it leaves open are
        those of the model's generation_config.json. Output that reaches the end of the context
        stops there, with finish_reason "length" and fewer than max_tokens.
      verification: "seeded" (default), "greedy", "delta", "rejection", "block" or
        "traversal"; "lenient", "typical" and "synthetic" are lossy, and results say so.
        For a drafter without probabilities (n-gram), `rejection` to `lenient` run as `delta`.
      num_speculative_tokens: K, the most tokens drafted per step; 0 is plain decoding. By default
        up to 7, as measured speed says.
      speculative_config: vLLM's --speculative-config, as JSON or a mapping; the
        arguments above override it.
      engine: sizes, or a mapping of them; by default chosen from the requests.
      policy: chooses K before each burst; by default that of speculative_config, else
        goodput: the K with the most expected tokens per second, up to num_speculative_tokens.
      mesh: devices to split over, axes "data" and "tensor". Models given by name are read
        slice by slice onto the devices that keep them.
      mesh_axes: what axes of other names split, such as {"fsdp": "data", "tp": "tensor"}: "data"
        rows and pages, "tensor" heads, MLP and vocabulary.
      progress: None shows long operations as bars on stderr where that is a terminal, and in a
        notebook; True always, False never. A function is called instead, as
        report(what, done, total), with total 0 if it is unknown.

    Returns:
      The completions in the order of the prompts, n for each, with `stats`. A
      request that is invalid, or whose logits turn NaN, has finish_reason "error"
      and the reason in `error`; the others complete.

    Raises:
      ValueError: the call itself or every request is invalid; raised before any compilation.
    """
    stream_ = Stream(
        target,
        prompts,
        drafter=drafter,
        sampling=sampling,
        verification=verification,
        num_speculative_tokens=num_speculative_tokens,
        speculative_config=speculative_config,
        engine=engine,
        policy=policy,
        mesh=mesh,
        mesh_axes=mesh_axes,
        progress=progress,
    )
    for _ in stream_:
        pass
    return stream_.result()


@entrance("specjax.stream")
def stream(
    target: Model | str | os.PathLike[str],
    prompts: Prompt | Sequence[Prompt],
    **arguments: Any,
) -> Stream:
    """Generates text and hands it out as it is committed; arguments as `generate`.

    Returns:
      An iterable of `Chunk`; a possible beginning of a stop string, and incomplete
      UTF-8, are held back. `result()` runs the rest and gives what `generate` returns, its
      statistics among it: `result().stats`. A stream that nobody holds any more runs no further.
    """
    keyword_check(generate, "stream")(arguments)
    return Stream(target, prompts, is_streamed=True, **arguments)


class Stream:
    """A running generation."""

    def __init__(
        self,
        target: Model | str | os.PathLike[str],
        prompts: Prompt | Sequence[Prompt],
        *,
        sampling: SamplingSource | Sequence[SamplingSource] | None = None,
        policy: SpeculationPolicy | None = None,
        progress: bool | Report | None = None,
        is_streamed: bool = False,
        **options: Any,  # of `Setup.of`
    ):
        self._begun_at = time.perf_counter()
        compilation_cache.enable()
        self._progress, self._is_streamed = Progress(progress), is_streamed
        with contextlib.closing(self._progress):
            self._progress.report("loading", 0, 0)
            setup = Setup.of(target, **options)
            requests, refused = setup.requests(as_list(prompts), sampling)
            self._setup = setup.for_run(
                (each.rule for each in requests), policy, acceptance_kind(requests)
            ).with_memory_for(requests)
            sizes, self._requests, unfit = self._setup.sizes(requests)
            self._failed = [refusal(each) for each in [*refused, *unfit]]
            if sizes is None:
                raise ValueError(self._failed[0].error)
            rules = (request.rule for request in self._requests)
            self._loop = self._setup.loop(sizes, rules, on_progress=self._progress.report)
        for request in self._requests:
            request.is_streamed = is_streamed
            self._loop.add(request)
        self._chunks = self._run()

    def __iter__(self) -> Iterator[Chunk]:
        return self._chunks

    def _run(self) -> Iterator[Chunk]:
        for failed in self._failed:
            place = failed.prompt_index, failed.sample_index
            yield Chunk(*place, "", [], [], "error", failed.error)
        writer, num_tokens = ChunkWriter(), 0
        total = sum(request.params.max_tokens for request in self._requests)
        try:
            for moved in self._loop.run():
                if self._is_streamed:
                    self._progress.close()  # the caller writes text now
                for request in moved:
                    chunk = writer.chunk(request)
                    num_tokens += len(chunk.token_ids)
                    yield chunk
                if moved and not self._is_streamed:
                    self._progress.report("tokens", num_tokens, total)
        finally:
            self._progress.close()
        self._setup.keep(self._loop)
        alarm = AcceptanceAlarm(self._setup.drafter, self._setup.speculation.verification)
        alarm.look(self._totals().acceptance)

    def result(self) -> Generation:
        """Returns what `generate` returns, after running the rest."""
        for _ in self._chunks:
            pass
        done = [completion_of(request) for request in self._requests] + self._failed
        done.sort(key=lambda completion: (completion.prompt_index, completion.sample_index))
        checked = self_check_of(done)
        stats = self._totals().stats(self._setup, self._loop.records, self_check=checked)
        return Generation(done, stats)

    def _totals(self) -> Totals:
        totals = Totals(self._begun_at)
        for _, samples in itertools.groupby(self._requests, lambda each: each.prompt_index):
            totals.add([*samples])
        totals.num_prompts += len({each.prompt_index for each in self._failed})
        totals.look_at(self._loop)
        return totals
