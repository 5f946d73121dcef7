"""What a user may ask for: sampling parameters and speculation, checked before any compile."""

from __future__ import annotations

import ast
import dataclasses
import itertools
import math
import numbers
import operator
import os
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard, cast

from specjax import batch_size_table, speculative_config_json
from specjax.names import MATCHING as MATCHING

VERIFICATION_RULES = (
    "greedy",
    "seeded",
    "delta",
    "rejection",
    "block",
    "traversal",
    "lenient",
    "typical",
    "synthetic",
)
# Output under these is not the target's.
LOSSY_RULES = ("lenient", "typical", "synthetic")
NUMERICS = ("fast", "invariant")
POLICIES = ("goodput", "fixed")
GATES = ("current", "worst_case")  # which tokens of a batch weigh
KV_CACHE_BYTES = 2**30  # of pages, where nobody says how many
DEFAULT_NUM_SPECULATIVE_TOKENS = 4
MAX_DRAFT_NODES = 255
MAX_DEPTH = 63
MOST_BYTES = 2**53  # 9 petabytes: more than all devices of a program together have
_MOST_SLOTS = 2**31 - 1  # tokens of a pool, numbered by an int32
# Of EngineConfig: the most that each size may be. Beyond it no step could be compiled or its
# arrays held, whatever the model; what a model needs is held against the device when it is
# known.
_MOST = {
    "page_size": 2**12,
    "num_pages": _MOST_SLOTS,
    "max_rows": 2**14,
    "burst_steps": 2**12,
    "max_context": 2**30,
    "kv_cache_bytes": MOST_BYTES,
    "memory_bytes": MOST_BYTES,
    "max_bias_entries": 2**20,
    "max_allowed_tokens": 2**20,
    "max_stop_tokens": 2**20,
    "max_logprobs": 2**20,
    "logit_bytes": MOST_BYTES,
    "token_bucket": 2**12,
    "max_prefill_tokens": 2**18,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one request is sampled. The meaning and order of vLLM's parameters.

    Logits pass: allowed ids, bad ids, min_tokens, logit_bias, penalties,
    temperature, min_p, top_k, top_p. All of them work with speculation.

    The first min_tokens output tokens hold no stop token, and a stop string that one
    of them completes does not end the output; it is text like any other. One that
    begins among them and is completed by a later token does.

    `seed`, from 0 to 2**64 - 1, makes the text a function of (weights, prompt, these
    parameters, seed); under the rules that keep the law alone (`rejection` and those after it) of what is drafted
    too. Without one fresh entropy is drawn, and reported in the result. Sample i of n uses
    a seed derived from (seed, i).

    Raises:
      ValueError: a value that means nothing, or two that contradict; when it is made.
    """

    temperature: float = 1.0  # 0 is greedy
    top_k: int = 0  # 0 or -1: off
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # over prompt and output
    presence_penalty: float = 0.0  # over output
    frequency_penalty: float = 0.0  # over output, per occurrence
    logit_bias: Mapping[int, float] = dataclasses.field(default_factory=dict)
    bad_token_ids: Sequence[int] = ()
    allowed_token_ids: Sequence[int] | None = None
    min_tokens: int = 0  # so many are no stop token and complete no stop string
    max_tokens: int = 128
    stop_token_ids: Sequence[int] = ()
    stop: str | Sequence[str] | None = ()  # stop strings, cut from the text
    ignore_eos: bool = False
    seed: int | None = None
    n: int = 1
    logprobs: int | None = (
        None  # k: of the chosen token and the k most likely; 0: chosen only
    )
    # The entropy of the distribution that each token was drawn from; with logprobs.
    entropy: bool = False
    num_speculative_tokens: int | None = None  # this request's own K; 0 is off
    # False is plain decoding for this request alone, whatever num_speculative_tokens says:
    # the same text under `greedy`, `seeded` and `delta`.
    speculate: bool = True
    verification: str | None = None  # this request's own rule; None is the call's
    self_check: bool = False  # holds the draws against their law, see specjax.SelfCheck

    def __post_init__(self):
        self.validate()

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    def validate(
        self, vocab_size: int | None = None, eos_token_ids: Sequence[int] = ()
    ) -> None:
        """Refuses values that mean nothing or contradict, naming the parameter.

        Called when parameters are made, and with the model's arguments when a request is.

        Args:
          vocab_size: token ids are held against it when given.
          eos_token_ids: stop tokens of the model, unless `ignore_eos`.

        Raises:
          ValueError: a value of the wrong type too.
        """
        for name, low, high in _RANGES:
            value: Any = getattr(self, name)
            is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
            if not is_number or not low <= cast(float, value) <= high:
                raise ValueError(
                    f"{name}={value!r} is out of range; expected a number from {low} to {high}."
                )
        if self.repetition_penalty <= 0:
            raise ValueError(
                f"repetition_penalty={self.repetition_penalty!r} must be above 0; 1 is off."
            )
        for name in ("top_k", "min_tokens", "max_tokens", "n"):
            if not _is_int(getattr(self, name)):
                raise ValueError(
                    f"{name}={getattr(self, name)!r} must be a whole number."
                )
        for name in ("logprobs", "num_speculative_tokens"):
            value = getattr(self, name)
            if value is not None and (not _is_int(value) or value < 0):
                raise ValueError(
                    f"{name}={value!r} must be a whole number of at least 0, or None."
                )
        seed = self.seed
        if seed is not None and not (_is_int(seed) and 0 <= seed < 2**64):
            raise ValueError(
                f"seed={seed!r} must be a whole number from 0 to 2**64 - 1, or None."
            )
        if self.verification not in (None, *VERIFICATION_RULES):
            raise ValueError(_unknown_rule(self.verification))
        if self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens={self.min_tokens!r} exceeds max_tokens={self.max_tokens!r}; lower min_tokens or raise max_tokens."
            )
        for name in ("ignore_eos", "speculate", "self_check", "entropy"):
            if getattr(self, name) not in (True, False):
                raise ValueError(
                    f"{name}={getattr(self, name)!r} must be True or False."
                )
        if self.entropy and self.logprobs is None:
            raise ValueError(
                "entropy=True comes with the log-probabilities; set logprobs=0 or more."
            )
        is_many = self.stop is None or _is_sized(self.stop)
        if not is_many or any(
            not isinstance(text, str) or not text for text in self.stop_strings
        ):
            raise ValueError(f"stop={self.stop!r} must hold non-empty strings.")
        if not isinstance(self.logit_bias, Mapping):
            raise ValueError(
                f"logit_bias={self.logit_bias!r} must map token ids to numbers."
            )
        if not all(map(_is_bias, self.logit_bias.values())):
            raise ValueError(
                f"logit_bias={self.logit_bias!r} must hold finite numbers of float32, at most "
                f"{_FLOAT32_MAX:.3g} in size (or -inf to forbid a token)."
            )
        self._validate_token_ids(vocab_size)
        if self.allowed_token_ids is not None:
            self._validate_allowed(self.allowed_token_ids, eos_token_ids)

    def _validate_allowed(
        self, allowed: Sequence[int], eos_token_ids: Sequence[int]
    ) -> None:
        """Refuses allowed_token_ids of which nothing is left."""
        left = set(map(int, allowed))
        if not left:
            raise ValueError(
                "allowed_token_ids is empty, so no token could be chosen; pass None "
                "to allow all."
            )
        left -= set(map(int, self.bad_token_ids))
        left -= {int(i) for i, bias in self.logit_bias.items() if bias == -math.inf}
        if not left:
            raise ValueError(
                "bad_token_ids (or logit_bias of -inf) forbids every one of "
                "allowed_token_ids; no token could be chosen."
            )
        stops = {*map(int, self.stop_token_ids)}
        stops.update(() if self.ignore_eos else map(int, eos_token_ids))
        if self.min_tokens > 0 and not left - stops:
            raise ValueError(
                f"min_tokens={self.min_tokens} forbids stop tokens, and nothing else is "
                "left of allowed_token_ids; allow another token, or set min_tokens=0."
            )

    def _validate_token_ids(self, vocab_size: int | None) -> None:
        groups = {
            "logit_bias": list(self.logit_bias),
            "bad_token_ids": self.bad_token_ids,
            "allowed_token_ids": ()
            if self.allowed_token_ids is None
            else self.allowed_token_ids,
            "stop_token_ids": self.stop_token_ids,
        }
        for name, ids in groups.items():
            if not _is_sized(ids):
                raise ValueError(f"{name}={ids!r} must be a sequence of token ids.")
            for token_id in ids:
                if (
                    not _is_int(token_id)
                    or token_id < 0
                    or (vocab_size is not None and token_id >= vocab_size)
                ):
                    raise ValueError(
                        f"{name} holds {token_id!r}, which is no token id; expected whole numbers from 0 "
                        f"to {'the vocabulary size' if vocab_size is None else vocab_size - 1}."
                    )


_FLOAT32_MAX = (2 - 2**-23) * 2.0**127
_RANGES = (
    ("temperature", 0.0, 100.0),
    ("top_k", -1, 2**31 - 1),
    ("top_p", 1e-6, 1.0),
    ("min_p", 0.0, 1.0),
    ("repetition_penalty", 0.0, 1e6),
    ("presence_penalty", -1e6, 1e6),
    ("frequency_penalty", -1e6, 1e6),
    ("min_tokens", 0, 2**31 - 1),
    ("max_tokens", 1, 2**31 - 1),
    ("n", 1, 2**16),
)


def _is_int(value: Any) -> TypeGuard[int]:
    try:
        operator.index(value)
    except TypeError:
        return False
    return not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _is_sized(value: Any) -> bool:
    """Whether a value can be read more than once: a list, a set, an array, ..."""
    try:
        len(value)
        iter(value)
    except TypeError:
        return False
    return True


def _is_bias(value: Any) -> bool:
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    return is_number and (value == -math.inf or -_FLOAT32_MAX <= value <= _FLOAT32_MAX)


def _unknown_rule(rule: Any) -> str:
    return f"verification={rule!r} is unknown; expected one of {', '.join(VERIFICATION_RULES)}."


def _check_lossy(config: SpeculationConfig) -> None:
    """Refuses numbers of the lossy rules that mean nothing; makes the rates a tuple."""
    for name, low in (("lenience", 0), ("typical_epsilon", 0), ("typical_delta", 0)):
        value: Any = getattr(config, name)
        is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
        if not is_number or not low < cast(float, value) <= 1:
            raise ValueError(f"{name}={value!r} must be above {low} and at most 1.")
    rates = config.synthetic_acceptance_rates
    if rates is None:
        if config.verification == "synthetic":
            raise ValueError(
                "verification='synthetic' needs synthetic_acceptance_rates, one per "
                "depth, as in [0.8, 0.7, 0.6]."
            )
        return
    is_rate = lambda rate: isinstance(rate, numbers.Real) and 0 <= float(rate) <= 1
    if not _is_sized(rates) or not len(rates) or not all(map(is_rate, rates)):
        raise ValueError(
            f"synthetic_acceptance_rates={rates!r} must list numbers from 0 to 1."
        )
    as_floats = tuple(map(float, rates))
    object.__setattr__(config, "synthetic_acceptance_rates", as_floats)


def _rank_paths(tree: Any) -> tuple[tuple[int, ...], ...] | None:
    """Returns a tree's nodes by their ranks, from any of the forms that users write."""
    if tree is None:
        return None
    given = tree
    try:
        if isinstance(given, str):
            given = ast.literal_eval(given)
        if all(_is_int(width) and width >= 1 for width in given):
            # One more than may be is enough to be refused by name.
            ranks = [range(min(width, MAX_DRAFT_NODES + 1)) for width in given]
            paths = [
                path
                for depth in range(1, len(ranks) + 1)
                for path in itertools.islice(
                    itertools.product(*ranks[:depth]), MAX_DRAFT_NODES + 1
                )
            ]
        else:
            paths = [tuple(map(operator.index, path)) for path in given]
            paths = [path for path in paths if path]
    except (TypeError, ValueError, SyntaxError):
        paths = []
    if paths and max(map(len, paths)) > MAX_DEPTH:
        raise ValueError(
            f"speculative_token_tree is {max(map(len, paths))} deep; at most {MAX_DEPTH} is allowed."
        )
    if not paths or any(min(path) < 0 for path in paths):
        raise ValueError(
            f"speculative_token_tree={tree!r} must list nodes, as '[(0,), (1,), (0, 0)]', "
            "or children per depth, as (2, 1)."
        )
    if len(paths) > MAX_DRAFT_NODES:
        raise ValueError(
            f"speculative_token_tree={tree!r} has more than {MAX_DRAFT_NODES} nodes; "
            "list fewer."
        )
    return tuple(paths)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpeculationConfig:
    """Which drafter, how many tokens, verified how.

    The keys of vLLM's `--speculative-config`. A drafter that is passed beside this
    needs neither `method` nor `model`.
    """

    method: str | None = None  # None, "ngram", "history" or "draft_model"
    model: str | None = None  # a folder, a hub name, or "demo"
    # Most draft tokens along one path, as it was asked for; `depth` is what comes of it.
    num_speculative_tokens: int | None = None
    # K by the number of rows that decode: [[first, last, K], ...], see batch_size_table.
    num_speculative_tokens_per_batch_size: Any = None  # tuple[Entry, ...], once made
    # "goodput": the K of the most expected tokens per second, up to num_speculative_tokens;
    # "fixed": that K always. None is goodput, or the table above where there is one.
    policy: str | None = None
    # Most decoding rows with which drafts are made; None is no limit.
    speculation_max_rows: int | None = None
    # Positions that a draft model is fed; None is as many as it was made for.
    max_model_len: int | None = None
    verification: str = "seeded"
    prompt_lookup_min: int = 2
    prompt_lookup_max: int = 4
    prompt_lookup_matches: int = 1  # continuations; more than one are drafted as a tree
    # Most tokens of such a tree, or of one grown with tree_top_k. None: all of them, or
    # tree_top_k per depth.
    num_draft_nodes: int | None = None
    # Of method "history": tokens of the text that rows share, their own prompts' answers and
    # earlier ones; beside a draft model: that drafts where nothing better is found there. None
    # is drafters.spec.CORPUS_TOKENS for the former, and none for the latter.
    corpus_tokens: int | None = None
    # A draft model's tree, each node by the ranks on the way to it: "[(0,), (1,), (0, 0)]",
    # the same as a list, or the children per depth, (2, 1). None drafts chains.
    speculative_token_tree: Any = None  # tuple[tuple[int, ...], ...], once made
    # A draft model's tree, grown where the model is surest (EAGLE-2's top-k): so many
    # nodes expanded per depth, so many children looked at of each.
    tree_top_k: int | None = None
    # Most draft tokens verified per step over all rows, those likeliest to stand; None: all
    # that are drafted.
    max_drafts_per_step: int | None = None
    lenience: float = 0.5  # of "lenient": draft probabilities are multiplied by it
    typical_epsilon: float = 0.09  # of "typical": its thresholds
    typical_delta: float = 0.3
    # Of "synthetic": how often a draft token at each depth stands, the last going on.
    synthetic_acceptance_rates: Any = None  # tuple[float, ...], once made

    def __post_init__(self):
        tree = _rank_paths(self.speculative_token_tree)
        object.__setattr__(self, "speculative_token_tree", tree)
        self._set_table()
        speculative_config_json.check_method(self.method)
        if self.policy not in (None, *POLICIES):
            raise ValueError(
                f"policy={self.policy!r} is unknown; expected one of {', '.join(map(repr, POLICIES))}, "
                "or None."
            )
        if self.policy is not None and self.num_speculative_tokens_per_batch_size:
            raise ValueError(
                f"policy={self.policy!r} and num_speculative_tokens_per_batch_size both say "
                "which K; leave one of them out."
            )
        if self.model is not None and not isinstance(self.model, str | os.PathLike):
            raise ValueError(f"model={self.model!r} must name a folder or a model.")
        if self.method == "draft_model" and self.model is None:
            raise ValueError(
                "method 'draft_model' needs 'model': a folder, or \"demo\"."
            )
        if not _is_int(self.depth) or not 0 <= self.depth <= MAX_DEPTH:
            raise ValueError(
                f"num_speculative_tokens={self.num_speculative_tokens!r} must be a whole number from 0 (no speculation) to {MAX_DEPTH}."
            )
        if tree is not None and self.depth > max(map(len, tree)):
            raise ValueError(
                f"num_speculative_tokens={self.num_speculative_tokens!r} is deeper than "
                f"speculative_token_tree, {max(map(len, tree))}; leave it out or lower it."
            )
        if tree is not None and self.method in MATCHING:
            raise ValueError(
                "speculative_token_tree is the shape of a draft model's tree; with "
                f"method {self.method!r} leave it out."
            )
        self._check_growth()
        for name in (
            "max_drafts_per_step",
            "speculation_max_rows",
            "max_model_len",
            "corpus_tokens",
        ):
            most = getattr(self, name)
            if most is not None and (not _is_int(most) or most < 1):
                raise ValueError(
                    f"{name}={most!r} must be a whole number of at least 1, or None."
                )
        if self.verification not in VERIFICATION_RULES:
            raise ValueError(_unknown_rule(self.verification))
        _check_lossy(self)
        low, high = self.prompt_lookup_min, self.prompt_lookup_max
        if not (_is_int(low) and _is_int(high) and 1 <= low <= high <= 16):
            raise ValueError(
                f"prompt_lookup_min={self.prompt_lookup_min!r} and prompt_lookup_max={self.prompt_lookup_max!r} must satisfy 1 <= min <= max <= 16."
            )
        matches, nodes = self.prompt_lookup_matches, self.num_draft_nodes
        if not (_is_int(matches) and 1 <= matches <= 16):
            raise ValueError(
                f"prompt_lookup_matches={matches!r} must be a whole number from 1 to 16."
            )
        if nodes is not None and not (_is_int(nodes) and 1 <= nodes <= MAX_DRAFT_NODES):
            raise ValueError(
                f"num_draft_nodes={nodes!r} must be a whole number from 1 to {MAX_DRAFT_NODES}."
            )

    @property
    def depth(self) -> int:
        """Most draft tokens along one path: what was asked for, else a tree's depth, else the default."""
        if self.num_speculative_tokens is not None:
            return self.num_speculative_tokens
        table = self.num_speculative_tokens_per_batch_size
        if table is not None and self.speculative_token_tree is None:
            return batch_size_table.most(table)
        tree = self.speculative_token_tree
        return DEFAULT_NUM_SPECULATIVE_TOKENS if tree is None else max(map(len, tree))

    @property
    def has_tree(self) -> bool:
        """Whether it says what tree a draft model is to draft."""
        return self.speculative_token_tree is not None or self.tree_top_k is not None

    def _set_table(self) -> None:
        """Checks num_speculative_tokens_per_batch_size, and warns of what it cannot have."""
        if self.num_speculative_tokens_per_batch_size is None:
            return
        table = batch_size_table.parse(self.num_speculative_tokens_per_batch_size)
        most = self.num_speculative_tokens
        if _is_int(most) and batch_size_table.most(table) > most:
            warnings.warn(
                f"{batch_size_table.NAME} asks for K = {batch_size_table.most(table)}, and "
                f"num_speculative_tokens={most} is the most; raise it, or no more is drafted.",
                stacklevel=4,
            )
            table = batch_size_table.at_most(table, most)
        object.__setattr__(self, batch_size_table.NAME, table)

    def _check_growth(self) -> None:
        """Refuses a tree_top_k that means nothing or contradicts."""
        top_k, depth = self.tree_top_k, self.depth
        if top_k is None:
            return
        if not _is_int(top_k) or not 1 <= top_k <= 32:
            raise ValueError(
                f"tree_top_k={top_k!r} must be a whole number from 1 to 32."
            )
        if self.speculative_token_tree is not None or self.method in MATCHING:
            raise ValueError(
                "tree_top_k grows a draft model's tree; leave it out together with "
                "speculative_token_tree or method 'ngram' or 'history'."
            )
        if depth == 0 or (depth - 1) * top_k > MAX_DRAFT_NODES:
            raise ValueError(
                f"tree_top_k={top_k!r} and num_speculative_tokens={depth!r} grow a tree of "
                f"{max(depth - 1, 0) * top_k} nodes; expected a depth of at least 1 and at "
                f"most {MAX_DRAFT_NODES} nodes. Lower either."
            )

    @classmethod
    def from_json(cls, text_or_mapping: str | Mapping[str, Any]) -> SpeculationConfig:
        """Reads vLLM's `--speculative-config`, JSON or what JSON was read to.

        A warning names the keys of vLLM that have no use here and why; another one keys
        that are unknown and like no other. The table is in docs/speculative-config.md.

        Raises:
          ValueError: not a JSON object, a method that specjax does not have, a key that is
            misspelt, or keys that contradict.
        """
        defaults = {field.name: field.default for field in dataclasses.fields(cls)}
        reading = speculative_config_json.read(text_or_mapping, defaults)
        for warning in reading.warnings:
            warnings.warn(warning, stacklevel=2)
        return cls(**reading.fields)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Sizes of the compiled executables and of the page pool; None is chosen from the requests.

    A capacity is what a row's arrays hold, declared because shapes are static;
    a request beyond one fails alone with an error that names it.
    """

    page_size: int = 16
    num_pages: int | None = None
    max_rows: int = 32
    # Numbers of rows below max_rows that bursts are compiled for, the first time each is
    # used: one with few rows left costs less in a small bucket. () is max_rows alone; None
    # leaves it to the policy: powers of two, as they pay, or none of them.
    row_buckets: tuple[int, ...] | None = None
    burst_steps: int = 32
    max_context: int | None = (
        None  # tokens of prompt and output together; None is the model's own limit
    )
    # Most the pages of all devices may take when num_pages is None; None is what memory_bytes
    # leaves, else KV_CACHE_BYTES.
    kv_cache_bytes: int | None = None
    # What weights, pages and steps may take together, of each device. None is, for an Engine,
    # what others leave of what the device reports; where it reports nothing, as on CPU, in
    # generate() and over a mesh's data axis only kv_cache_bytes counts.
    memory_bytes: int | None = None
    # Percent of the memory left beside the weights that a batch's weight stays below.
    batch_safety_margin: float = 20.0
    # Of the weight limit, up to where a batch speculates.
    speculation_weight_fraction: float = 0.75
    # Which tokens weigh: "current", those that rows have or may get by what is being sent, or
    # "worst_case", all that they may ever have: nobody is admitted then who might have to
    # be preempted.
    gate: str = "current"
    max_bias_entries: int = 64  # logit_bias and bad_token_ids together
    max_allowed_tokens: int = 256
    max_stop_tokens: int = 16
    max_logprobs: int = 20
    # Most that float32 logits take while drafts are verified: what is beyond it waits for
    # the next chunk. Under rules by law a chunk is one row at least, and holds up to six
    # arrays of that size (processed logits, both laws, their difference); under
    # invariant numerics it is token_bucket.
    logit_bytes: int = 10**9
    # "fast", or "invariant": the bits of every token follow from its own row, whatever
    # is drafted and decoded beside it, at the price of computing token_bucket tokens
    # where one would do. docs/invariant-numerics.md.
    numerics: str = "fast"
    token_bucket: int = 16
    # Whether requests read pages that others filled with the same tokens before.
    prefix_caching: bool = True
    # Most prompt tokens that one call feeds, of each data shard: an eighth of them for each of
    # eight rows, or half for a long prompt alone, as beside rows that decode.
    max_prefill_tokens: int = 512
    # Whether prompts are prefilled beside rows that decode, in the same matmuls, or in calls
    # of their own; those it is under invariant numerics.
    mixed_prefill: bool = True

    def __post_init__(self):
        if self.numerics not in NUMERICS:
            raise ValueError(
                f"EngineConfig.numerics={self.numerics!r} must be one of {', '.join(NUMERICS)}."
            )
        self._check_memory()
        for field in dataclasses.fields(self):
            value: Any = getattr(self, field.name)
            if isinstance(field.default, bool) and not isinstance(value, bool):
                raise ValueError(
                    f"EngineConfig.{field.name}={value!r} must be True or False."
                )
        for name, most in _MOST.items():
            self._check_size(name, most)
        self._check_row_buckets()
        self._check_slots()

    def _check_size(self, name: str, most: int) -> None:
        """Refuses a size that is no whole number, or that nothing could hold."""
        value: Any = getattr(self, name)
        if value is None and type(self).__dataclass_fields__[name].default is None:
            return
        if not _is_int(value) or not 1 <= value <= most:
            raise ValueError(
                f"EngineConfig.{name}={value!r} must be a whole number from 1 to {most:,}."
            )
        # Of numpy it may have few bits, and products of sizes are large.
        object.__setattr__(self, name, operator.index(value))

    def _check_slots(self) -> None:
        """Refuses pools whose slots are more than an int32 numbers."""
        if self.num_pages is not None and self.num_pages * self.page_size > _MOST_SLOTS:
            raise ValueError(
                f"EngineConfig.num_pages={self.num_pages} pages of {self.page_size} tokens are "
                f"more than the {_MOST_SLOTS:,} tokens that a pool may have; lower it."
            )

    def _check_memory(self) -> None:
        if self.gate not in GATES:
            raise ValueError(
                f"EngineConfig.gate={self.gate!r} must be one of {', '.join(GATES)}."
            )
        margin, fraction = self.batch_safety_margin, self.speculation_weight_fraction
        if not _is_number(margin) or not 0 <= margin < 100:
            raise ValueError(
                f"EngineConfig.batch_safety_margin={margin!r} must be a percentage from 0 to "
                "below 100."
            )
        if not _is_number(fraction) or not 0 < fraction <= 1:
            raise ValueError(
                f"EngineConfig.speculation_weight_fraction={fraction!r} must be above 0 and "
                "at most 1."
            )

    def _check_row_buckets(self) -> None:
        buckets: Any = self.row_buckets
        if buckets is None:
            return
        if not isinstance(buckets, tuple | list) or not all(
            _is_int(bucket) and 1 <= bucket <= self.max_rows for bucket in buckets
        ):
            raise ValueError(
                f"EngineConfig.row_buckets={buckets!r} must be whole numbers from 1 to max_rows={self.max_rows}."
            )
        as_ints = map(operator.index, buckets)
        object.__setattr__(self, "row_buckets", tuple(sorted(set(as_ints))))
