"""generate() and stream(): tokenise, run the engine, detokenise."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from specjax import compilation_cache, sharding
from specjax.config import (
    LOSSY_RULES,
    VERIFICATION_RULES,
    EngineConfig,
    SamplingParams,
    SpeculationConfig,
)
from specjax.decode.decoder import Decoder, Sizes, build_decoder
from specjax.decode.rules import RuleOptions
from specjax.drafters.loading import LoadedDrafter, load_drafter
from specjax.engine.loop import Engine
from specjax.engine.request import (
    AcceptanceCounts,
    Piece,
    Request,
    SelfCheck,
    TokenLogProbs,
)
from specjax.engine.speculation_policy import Fixed, SpeculationPolicy
from specjax.models.base import Model
from specjax.models.loading import load_model
from specjax.progress import Progress, Report
from specjax.requests import Prompt, Refused, as_list, make_requests, one_each
from specjax.sizing import choose_sizes
from specjax.types import DecoderParams

# Streaming reads back after this many steps: a few tokens at once, and little waiting.
STREAM_BURST_STEPS = 2


@dataclasses.dataclass(frozen=True)
class Completion:
    """One sampled sequence."""

    prompt_index: int
    sample_index: int  # which of the prompt's n
    text: str | None  # None without a tokenizer
    token_ids: list[int]  # a stop token included
    finish_reason: str  # "stop", "length" or "error"
    error: str | None
    logprobs: list[TokenLogProbs] | None
    # Pass it as SamplingParams.seed to get the same text again; under rules by law, with
    # the same drafter and K, and without max_drafts_per_step.
    seed: int
    acceptance: AcceptanceCounts
    pieces: list[Piece]  # the text by token, and who proposed each
    prompt_token_ids: list[int]
    lossy: str | None = None  # the rule, where the text need not be the target's
    self_check: SelfCheck | None = None  # where SamplingParams.self_check asks for it


@dataclasses.dataclass(frozen=True)
class GenerationStats:
    """What a call did; seconds are wall time."""

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

    def to_dict(self) -> dict[str, Any]:
        """Returns the figures by name, for JSON."""
        counts = self.acceptance
        own = {
            f.name: getattr(self, f.name)
            for f in dataclasses.fields(self)
            if f.name not in ("acceptance", "self_check")
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
        }


class Generation(Sequence[Completion]):
    """The completions of a call, prompt by prompt and sample by sample, and its statistics."""

    def __init__(self, completions: list[Completion], stats: GenerationStats):
        self.completions = completions
        self.stats = stats

    def __getitem__(self, index):
        return self.completions[index]

    def __len__(self) -> int:
        return len(self.completions)


@dataclasses.dataclass(frozen=True)
class Chunk:
    """What one request gained since its last chunk."""

    prompt_index: int
    sample_index: int
    text: str  # empty when all of it is held back
    token_ids: list[int]
    pieces: list[Piece]  # `text` by token
    finish_reason: str | None
    error: str | None = None
    lossy: str | None = None  # as in Completion, from the first draft on


def generate(
    target: Model | str | os.PathLike[str],
    prompts: Prompt | Sequence[Prompt],
    *,
    drafter: LoadedDrafter | Model | str | os.PathLike[str] | None = None,
    sampling: SamplingParams | Sequence[SamplingParams] | None = None,
    verification: str | None = None,
    num_speculative_tokens: int | None = None,
    speculative_config: SpeculationConfig | Mapping[str, Any] | str | None = None,
    engine: EngineConfig | None = None,
    policy: SpeculationPolicy | None = None,
    mesh: Mesh | None = None,
    progress: bool | Report = False,
) -> Generation:
    """Generates text, with or without speculation: the same text either way.

    Token for token under `greedy`, `seeded` and `delta`, in law under `rejection`,
    `block` and `traversal`, and not at all under the lossy rules.

    Args:
      target: a Model, a folder in Hugging Face format, a hub name, or "demo".
      prompts: one prompt or many, of any lengths: text, chat messages, or token ids.
      drafter: None, "ngram", "demo", a folder, a Model, or what load_drafter returned.
      sampling: for all prompts, or one per prompt; None is what the model's
        generation_config.json says. Output ends where the context does.
      verification: "seeded" (default), "greedy", "delta", "rejection", "block" or
        "traversal"; "lenient", "typical" and "synthetic" are lossy, and results say so.
        Where a drafter has no probabilities (n-gram), a rule by law runs as `delta`.
      num_speculative_tokens: K, the most tokens drafted per step; 0 is plain decoding.
      speculative_config: vLLM's --speculative-config, as JSON or a mapping; the
        arguments above win over it.
      engine: sizes; chosen from the requests where None.
      policy: which K before each burst; a fixed K where None.
      mesh: devices to split over, axes "data" and "tensor".
      progress: True shows on stderr what takes long; a function is told instead,
        as report(what, done, total), with total 0 where nobody knows.

    Returns:
      The completions in the order of the prompts, n for each, with `stats`. A
      request that is invalid, or whose logits turn NaN, has finish_reason "error"
      and says why in `error`; the others complete.

    Raises:
      ValueError: the call itself is wrong, or every request is; before any compile.
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
        progress=progress,
        max_burst_steps=None,
    )
    for _ in stream_:
        pass
    return stream_.result()


def stream(
    target: Model | str | os.PathLike[str],
    prompts: Prompt | Sequence[Prompt],
    **arguments: Any,
) -> Stream:
    """Generates text and hands it out as it is committed; arguments as `generate`.

    Returns:
      An iterable of `Chunk`; a possible beginning of a stop string, and incomplete
      UTF-8, are held back. Afterwards `result()` gives what `generate` returns.
    """
    return Stream(target, prompts, max_burst_steps=STREAM_BURST_STEPS, **arguments)


class Stream:
    """A generation under way."""

    def __init__(
        self,
        target: Model | str | os.PathLike[str],
        prompts: Prompt | Sequence[Prompt],
        *,
        drafter: LoadedDrafter | Model | str | os.PathLike[str] | None = None,
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        verification: str | None = None,
        num_speculative_tokens: int | None = None,
        speculative_config: SpeculationConfig | Mapping[str, Any] | str | None = None,
        engine: EngineConfig | None = None,
        policy: SpeculationPolicy | None = None,
        mesh: Mesh | None = None,
        progress: bool | Report = False,
        max_burst_steps: int | None = None,
    ):
        self._started_at = time.perf_counter()
        compilation_cache.enable()
        self._max_burst_steps = max_burst_steps
        self._progress = Progress(progress)
        self._progress.report("loading", 0, 0)
        self._target = _load_target(target)
        self._drafter, self._speculation = _choose_drafter(
            self._target,
            drafter,
            _speculation(
                speculative_config, drafter, verification, num_speculative_tokens
            ),
        )
        engine_config = engine or EngineConfig()
        sizes = self._admit(as_list(prompts), sampling, engine_config, mesh)
        self._decoder = self._build_decoder(sizes, engine_config, mesh)
        self._compile_s_before = self._decoder.compile_s
        self._engine = Engine(
            self._decoder,
            DecoderParams(self._target.params, self._drafter.params),
            policy or Fixed(self._speculation.depth),
            on_progress=self._progress.report,
        )
        for request in self._requests:
            self._engine.add(request)
        self._chunks = self._run()

    def __iter__(self) -> Iterator[Chunk]:
        return self._chunks

    def _admit(
        self, prompts: list[Prompt], sampling, engine: EngineConfig, mesh: Mesh | None
    ) -> Sizes:
        """Sets the requests that can run and those that cannot; returns the sizes they need.

        Raises:
          ValueError: none can run.
        """
        requests, refused = make_requests(
            self._target,
            prompts,
            one_each(sampling, self._target, len(prompts)),
            self._speculation,
            self._drafter,
            engine,
        )
        sizes, self._requests, unfit = choose_sizes(
            requests,
            [self._target.config, *self._drafter.configs],
            engine,
            jax.tree.leaves(self._target.params)[0].dtype,
            sharding.axis_size(mesh, sharding.DATA),
            self._drafter.tree_slots(self._speculation.depth),
        )
        self._failed = [_failure(each) for each in [*refused, *unfit]]
        if sizes is None:
            raise ValueError(self._failed[0].error)
        return sizes

    def _build_decoder(
        self, sizes: Sizes, engine: EngineConfig, mesh: Mesh | None
    ) -> Decoder:
        """Returns the compiled functions for the requests' rules, perhaps built before."""
        config = self._speculation
        return build_decoder(
            self._target.config,
            self._drafter.spec,
            sizes,
            engine,
            self._drafter.effective_rules(request.rule for request in self._requests),
            _rule_options(config),
            _drafts_per_shard(
                config.max_drafts_per_step, self._drafter, config.depth, sizes, mesh
            ),
            mesh,
        )

    def _run(self) -> Iterator[Chunk]:
        for failed in self._failed:
            place = failed.prompt_index, failed.sample_index
            yield Chunk(*place, "", [], [], "error", failed.error)
        seen = {id(request): (0, 0) for request in self._requests}
        total = sum(request.params.max_tokens for request in self._requests)
        num_tokens = 0
        for moved in self._engine.run(max_burst_steps=self._max_burst_steps):
            for request in moved:
                first_token, first_piece = seen[id(request)]
                seen[id(request)] = len(request.output_token_ids), len(request.shown)
                pieces = [piece for piece in request.shown[first_piece:] if piece.text]
                token_ids = request.output_token_ids[first_token:]
                num_tokens += len(token_ids)
                yield Chunk(
                    request.prompt_index,
                    request.sample_index,
                    "".join(piece.text for piece in pieces),
                    token_ids,
                    pieces,
                    request.finish_reason,
                    request.error,
                    _lossy(request),
                )
            self._progress.report("tokens", num_tokens, total)
        self._progress.close()

    def result(self) -> Generation:
        """Returns what `generate` would; runs what is left to run."""
        for _ in self._chunks:
            pass
        done = [_completion(request) for request in self._requests] + self._failed
        done.sort(
            key=lambda completion: (completion.prompt_index, completion.sample_index)
        )
        return Generation(done, self._stats(done))

    def _stats(self, completions: list[Completion]) -> GenerationStats:
        total = AcceptanceCounts()
        for request in self._requests:
            total.merge(request.counts)
        first = [
            r.first_token_at for r in self._requests if r.first_token_at is not None
        ]
        return GenerationStats(
            num_prompts=len({c.prompt_index for c in completions}),
            num_prompt_tokens=sum(len(r.prompt_token_ids) for r in self._requests),
            num_output_tokens=sum(len(c.token_ids) for c in completions),
            acceptance=total,
            run_s=self._engine.run_s,
            compile_s=self._decoder.compile_s - self._compile_s_before,
            time_to_first_token_s=min(first) - self._started_at if first else 0.0,
            num_speculative_tokens=self._speculation.depth,
            drafter=self._drafter.name,
            verification=self._speculation.verification,
            lossy=tuple(sorted({c.lossy for c in completions if c.lossy})),
            self_check=_self_check(completions),
        )


def _load_target(target: Any) -> Model:
    """Returns a loaded model from a model, a folder, a hub name or "demo"."""
    if isinstance(target, str | os.PathLike):
        return load_model(target)
    if not isinstance(target, Model):
        raise TypeError(
            f"target must be a Model, a folder or a name, got {type(target).__name__}."
        )
    return target


def _speculation(
    given, drafter, verification, num_speculative_tokens
) -> SpeculationConfig:
    """Returns one config from vLLM's JSON and the arguments, which win."""
    if given is None:
        config = SpeculationConfig()
    elif isinstance(given, SpeculationConfig):
        config = given
    else:
        config = SpeculationConfig.from_json(given)
    if verification is not None:
        config = dataclasses.replace(config, verification=verification)
    if num_speculative_tokens is not None:
        config = dataclasses.replace(
            config, num_speculative_tokens=num_speculative_tokens
        )
    return config


def _choose_drafter(
    target: Model, drafter: Any, config: SpeculationConfig
) -> tuple[LoadedDrafter, SpeculationConfig]:
    """Returns the drafter of a call, and the config with the K that it drafts with.

    Args:
      drafter: as `generate` takes it; it wins over what the config names.
    """
    source = drafter
    if source is None:
        source = "ngram" if config.method == "ngram" else config.model
    loaded = load_drafter(source, target, config)
    if not loaded.can_draft or config.depth == 0:
        # Plain decoding keeps no pages for a drafter.
        loaded = load_drafter(None, target)
    config = _with_depth(config, loaded)
    loaded.check_windows(target.config, config.depth)
    return loaded, config


def _with_depth(config: SpeculationConfig, drafter: LoadedDrafter) -> SpeculationConfig:
    """Returns the config with the K that the call drafts with, and no tree where it drafts none."""
    if not drafter.can_draft:
        return dataclasses.replace(
            config,
            num_speculative_tokens=0,
            speculative_token_tree=None,
            tree_top_k=None,
        )
    depth = config.depth
    if drafter.max_depth is not None:
        # A tree that the drafter was loaded with bounds K, and is K where nobody says.
        is_asked_for = config.num_speculative_tokens is not None or config.has_tree
        depth = min(depth, drafter.max_depth) if is_asked_for else drafter.max_depth
    return dataclasses.replace(config, num_speculative_tokens=depth)


def _rule_options(config: SpeculationConfig) -> RuleOptions:
    return RuleOptions(
        lenience=config.lenience,
        typical_epsilon=config.typical_epsilon,
        typical_delta=config.typical_delta,
        synthetic_rates=config.synthetic_acceptance_rates or (),
    )


def _drafts_per_shard(
    most: int | None,
    drafter: LoadedDrafter,
    depth: int,
    sizes: Sizes,
    mesh: Mesh | None,
) -> int | None:
    """Returns how many draft tokens a shard's rows verify per step; None is all of them.

    Raises:
      ValueError: there are fewer than shards.
    """
    if most is None:
        return None
    num_shards = sharding.axis_size(mesh, sharding.DATA)
    if most < num_shards:
        raise ValueError(
            f"max_drafts_per_step={most} is below the mesh's {num_shards} data shards, of "
            "which each verifies an equal part; raise it."
        )
    num_drafts = drafter.num_nodes(depth) - 1
    is_bound = most // num_shards < sizes.rows // num_shards * num_drafts
    return most // num_shards if is_bound else None


def _completion(request: Request) -> Completion:
    return Completion(
        prompt_index=request.prompt_index,
        sample_index=request.sample_index,
        text=None
        if request.text is None
        else "".join(piece.text for piece in request.shown),
        token_ids=request.output_token_ids,
        finish_reason=request.finish_reason or "error",
        error=request.error,
        logprobs=request.logprobs if request.params.logprobs is not None else None,
        seed=request.seed,
        acceptance=request.counts,
        pieces=[piece for piece in request.shown if piece.text],
        prompt_token_ids=list(request.prompt_token_ids),
        lossy=_lossy(request),
        self_check=request.self_check if request.params.self_check else None,
    )


def _lossy(request: Request) -> str | None:
    """Returns the rule that verified drafts of a request, if its output is not the target's."""
    name = VERIFICATION_RULES[request.rule]
    return name if name in LOSSY_RULES and request.counts.num_drafted else None


def _self_check(completions: list[Completion]) -> SelfCheck | None:
    """Returns the self-check of all requests together; None where none was asked for."""
    checked = [c for c in completions if c.self_check is not None]
    if not checked:
        return None
    return SelfCheck.of_all(
        [c.self_check for c in checked if c.self_check is not None],
        [(c.seed, c.sample_index) for c in checked],
    )


def _failure(refused: Refused) -> Completion:
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
