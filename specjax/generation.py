"""generate() and stream(): tokenise, run the engine, detokenise."""

from __future__ import annotations

import dataclasses
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from specjax import compilation_cache, sharding
from specjax.config import (
    VERIFICATION_RULES,
    EngineConfig,
    SamplingParams,
    SpeculationConfig,
)
from specjax.decode.decoder import Decoder, Sizes, build_decoder
from specjax.detokenize import IncrementalText
from specjax.drafters.loading import LoadedDrafter, load_drafter
from specjax.engine.loop import Engine
from specjax.engine.request import AcceptanceCounts, Piece, Request, TokenLogProbs
from specjax.engine.speculation_policy import Fixed, SpeculationPolicy
from specjax.models.base import Model
from specjax.models.loading import load_model
from specjax.progress import Progress
from specjax.sampling import row_values
from specjax.types import REJECTION, DecoderParams

# Text, the messages of a chat, or token ids.
Prompt = str | Sequence[Mapping[str, Any]] | Sequence[int]

# Streaming reads back after this many steps: a few tokens at once, and little waiting.
STREAM_BURST_STEPS = 2
MIN_ROW_TOKENS = 256  # smallest bucket of a row's capacity


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
    seed: int  # pass it as SamplingParams.seed to get the same text again
    acceptance: AcceptanceCounts
    pieces: list[Piece]  # the text by token, and who proposed each
    prompt_token_ids: list[int]


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
            if f.name != "acceptance"
        }
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


def generate(
    target: Model | str,
    prompts: Prompt | Sequence[Prompt],
    *,
    drafter: LoadedDrafter | Model | str | None = None,
    sampling: SamplingParams | Sequence[SamplingParams] | None = None,
    verification: str | None = None,
    num_speculative_tokens: int | None = None,
    speculative_config: SpeculationConfig | Mapping[str, Any] | str | None = None,
    engine: EngineConfig | None = None,
    policy: SpeculationPolicy | None = None,
    mesh: Mesh | None = None,
    progress: bool = False,
) -> Generation:
    """Generates text, with or without speculation: the same text either way.

    Args:
      target: a Model, a folder in Hugging Face format, a hub name, or "demo".
      prompts: one prompt or many, of any lengths: text, chat messages, or token ids.
      drafter: None, "ngram", "demo", a folder, a Model, or what load_drafter returned.
      sampling: for all prompts, or one per prompt.
      verification: "seeded" (default), "greedy", "delta" or "rejection".
      num_speculative_tokens: K, the most tokens drafted per step; 0 is plain decoding.
      speculative_config: vLLM's --speculative-config, as JSON or a mapping; the
        arguments above win over it.
      engine: sizes; chosen from the requests where None.
      policy: which K before each burst; a fixed K where None.
      mesh: devices to split over, axes "data" and "tensor".
      progress: show progress on stderr.

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
    target: Model | str, prompts: Prompt | Sequence[Prompt], **arguments: Any
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
        target: Model | str,
        prompts: Prompt | Sequence[Prompt],
        *,
        drafter: LoadedDrafter | Model | str | None = None,
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        verification: str | None = None,
        num_speculative_tokens: int | None = None,
        speculative_config: SpeculationConfig | Mapping[str, Any] | str | None = None,
        engine: EngineConfig | None = None,
        policy: SpeculationPolicy | None = None,
        mesh: Mesh | None = None,
        progress: bool = False,
        max_burst_steps: int | None = None,
    ):
        self._started_at = time.perf_counter()
        compilation_cache.enable()
        self._max_burst_steps = max_burst_steps
        self._progress = Progress(enabled=progress)
        self._target = load_model(target) if isinstance(target, str) else target
        config = _speculation(
            speculative_config, drafter, verification, num_speculative_tokens
        )
        self._speculation = config
        self._drafter = load_drafter(
            _drafter_source(config, drafter), self._target, config
        )
        self._engine_config = engine or EngineConfig()
        self._requests, self._failed = self._make_requests(_as_list(prompts), sampling)
        self._finished = False
        self._engine: Engine | None = None
        if self._requests:
            self._decoder = self._build_decoder(mesh)
            self._compile_s_before = self._decoder.compile_s
            params = DecoderParams(self._target.params, self._drafter.params)
            chosen = policy or Fixed(
                config.num_speculative_tokens if self._drafter.can_draft else 0
            )
            self._engine = Engine(
                self._decoder, params, chosen, on_progress=self._progress.report
            )
            self._queue()
        if self._failed and not self._requests:
            raise ValueError(self._failed[0].error)

    def __iter__(self) -> Iterator[Chunk]:
        if self._engine is not None:
            seen = {id(request): (0, 0) for request in self._requests}
            total = sum(request.params.max_tokens for request in self._requests)
            for moved in self._engine.run(max_burst_steps=self._max_burst_steps):
                self._progress.report(
                    "tokens",
                    sum(len(r.output_token_ids) for r in self._requests),
                    total,
                )
                for request in moved:
                    num_tokens, num_pieces = seen[id(request)]
                    seen[id(request)] = (
                        len(request.output_token_ids),
                        len(request.shown),
                    )
                    pieces = [
                        piece for piece in request.shown[num_pieces:] if piece.text
                    ]
                    yield Chunk(
                        request.prompt_index,
                        request.sample_index,
                        "".join(piece.text for piece in pieces),
                        request.output_token_ids[num_tokens:],
                        pieces,
                        request.finish_reason,
                    )
        self._progress.close()
        self._finished = True

    def result(self) -> Generation:
        """Returns what `generate` would; runs what is left to run."""
        if not self._finished:
            for _ in self:
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
            run_s=self._engine.run_s if self._engine else 0.0,
            compile_s=self._decoder.compile_s - self._compile_s_before
            if self._engine
            else 0.0,
            time_to_first_token_s=min(first) - self._started_at if first else 0.0,
            num_speculative_tokens=self._speculation.num_speculative_tokens,
            drafter=self._drafter.name,
            verification=self._speculation.verification,
        )

    def _make_requests(
        self,
        prompts: list[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None,
    ) -> tuple[list[Request], list[Completion]]:
        """Returns the valid requests, and a failed completion for each invalid one."""
        if sampling is None:
            sampling = SamplingParams()
        each = (
            [sampling] * len(prompts)
            if isinstance(sampling, SamplingParams)
            else list(sampling)
        )
        if len(each) != len(prompts):
            raise ValueError(
                f"{len(each)} sampling parameters were given for {len(prompts)} prompts; "
                "pass one for all, or one per prompt."
            )
        requests, failed = [], []
        for index, (prompt, params) in enumerate(zip(prompts, each)):
            try:
                requests.extend(self._requests_of(index, prompt, params))
            except (ValueError, TypeError) as error:
                failed.append(_failure(index, f"prompt {index}: {error}"))
        return requests, failed

    def _requests_of(
        self, index: int, prompt: Prompt, params: SamplingParams
    ) -> list[Request]:
        config = self._target.config
        params.validate(config.vocab_size)
        if self._speculation.verification == "greedy" and params.temperature != 0:
            raise ValueError(
                f"verification='greedy' needs temperature 0, got {params.temperature=}; "
                "use 'seeded', which samples and is exact at any temperature."
            )
        token_ids = _token_ids(self._target, prompt)
        context = self._context
        if len(token_ids) >= context:
            raise ValueError(
                f"the prompt has {len(token_ids)} tokens and the context holds {context}, one of them "
                "for the output at least; shorten the prompt."
            )
        if params.stop_strings and self._target.tokenizer is None:
            raise ValueError(
                "stop strings need a tokenizer, and this model's folder has none; use stop_token_ids."
            )
        wanted = params.num_speculative_tokens
        most = self._speculation.num_speculative_tokens
        seed = params.seed if params.seed is not None else secrets.randbits(63)
        made = []
        for sample in range(params.n):
            sample_seed = derive_seed(seed, sample)
            values = row_values(
                params,
                prompt_length=len(token_ids),
                eos_token_ids=config.eos_token_ids,
                seed=sample_seed,
                engine_config=self._engine_config,
            )
            text = None
            if self._target.tokenizer is not None:
                text = IncrementalText(self._target.tokenizer, params.stop_strings)
            made.append(
                Request(
                    prompt_index=index,
                    sample_index=sample,
                    prompt_token_ids=token_ids,
                    params=params,
                    seed=seed,
                    draft_cap=most if wanted is None else min(wanted, most),
                    rule=VERIFICATION_RULES.index(self._speculation.verification),
                    max_length=min(len(token_ids) + params.max_tokens, context),
                    sampling_values=values,
                    text=text,
                )
            )
        return made

    @property
    def _context(self) -> int:
        """Most tokens of prompt and output together."""
        models = [self._target.config, *self._drafter.configs]
        limits = [config.max_position_embeddings for config in models]
        return min([*limits, self._engine_config.max_context or limits[0]])

    def _build_decoder(self, mesh: Mesh | None) -> Decoder:
        engine = self._engine_config
        shards = sharding.axis_size(mesh, sharding.DATA)
        rows = min(engine.max_rows, _power_of_two(len(self._requests)))
        rows = -(-rows // shards) * shards
        longest = max(request.max_length for request in self._requests)
        pages_per_row = _power_of_two(
            -(-max(longest, MIN_ROW_TOKENS) // engine.page_size)
        )
        dtype = jax.tree.leaves(self._target.params)[0].dtype
        num_pages = engine.num_pages
        if num_pages is None:
            configs = [self._target.config, *self._drafter.configs]
            page_bytes = sum(
                c.num_layers * c.num_kv_heads * c.head_dim for c in configs
            )
            page_bytes *= 2 * engine.page_size * dtype.itemsize
            num_pages = min(
                rows * pages_per_row, max(engine.kv_cache_bytes // page_bytes, 1)
            )
        num_pages = -(-num_pages // shards) * shards
        sizes = Sizes(
            rows=rows,
            page_size=engine.page_size,
            num_pages=num_pages,
            pages_per_row=pages_per_row,
            burst_steps=engine.burst_steps,
            dtype=dtype,
        )
        uses_rejection = self._drafter.is_model and any(
            r.rule == REJECTION for r in self._requests
        )
        return build_decoder(
            self._target.config, self._drafter.spec, sizes, engine, uses_rejection, mesh
        )

    def _queue(self) -> None:
        """Hands the requests to the engine; those that can never fit fail alone."""
        assert self._engine is not None
        kept = []
        for request in self._requests:
            try:
                self._engine.add(request)
                kept.append(request)
            except ValueError as error:
                message = f"prompt {request.prompt_index}: {error}"
                self._failed.append(
                    _failure(request.prompt_index, message, request.sample_index)
                )
        self._requests = kept


def derive_seed(seed: int, sample: int) -> int:
    """Returns the 64-bit seed of sample i of a request: a bijection of seed for each i.

    Source: the finaliser of SplitMix64 (Steele, Lea and Flood 2014).
    """
    mask = 2**64 - 1
    x = (seed + (sample + 1) * 0x9E3779B97F4A7C15) & mask
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
    return x ^ (x >> 31)


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


def _drafter_source(config: SpeculationConfig, drafter):
    """Returns what to load: the argument, else what the config names."""
    if drafter is not None:
        return drafter
    return "ngram" if config.method == "ngram" else config.model


def _as_list(prompts: Any) -> list[Prompt]:
    """Returns a list of prompts from one prompt or many."""
    if isinstance(prompts, str):
        return [prompts]
    prompts = list(prompts)
    if not prompts:
        raise ValueError("no prompts were given.")
    is_one = isinstance(prompts[0], Mapping) or hasattr(prompts[0], "__index__")
    return [prompts] if is_one else prompts


def _token_ids(target: Model, prompt: Any) -> list[int]:
    """Returns the ids of a prompt.

    Raises:
      ValueError: no tokenizer, an empty prompt, or ids outside the vocabulary.
    """
    if isinstance(prompt, str) or (len(prompt) and isinstance(prompt[0], Mapping)):
        if target.tokenizer is None:
            raise ValueError(
                f"model {target.name!r} has no tokenizer, so prompts must be lists of token ids, not text."
            )
        is_text = isinstance(prompt, str)
        ids = (
            target.tokenizer.encode(prompt)
            if is_text
            else target.tokenizer.encode_chat(prompt)
        )
    else:
        if not all(hasattr(token, "__index__") for token in prompt):
            raise ValueError(
                "a prompt must be text, a list of chat messages, or a list of whole numbers."
            )
        ids = [int(token) for token in prompt]
    if not ids:
        raise ValueError("the prompt is empty; give at least one token.")
    bad = next(
        (token for token in ids if not 0 <= token < target.config.vocab_size), None
    )
    if bad is not None:
        raise ValueError(
            f"token id {bad} is outside the vocabulary; expected 0 to {target.config.vocab_size - 1}."
        )
    return ids


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
    )


def _failure(prompt_index: int, error: str, sample_index: int = 0) -> Completion:
    return Completion(
        prompt_index,
        sample_index,
        None,
        [],
        "error",
        error,
        None,
        0,
        AcceptanceCounts(),
        [],
        [],
    )


def _power_of_two(number: int) -> int:
    return 1 << max(number - 1, 0).bit_length()
