"""How requests are run: sizes, memory, numerics."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Mapping
from typing import Any

from pallas_kernels.names import IMPLEMENTATIONS
from specjax.config.checks import is_int, is_number

NUMERICS = ("fast", "invariant")

# Of each op, what may run it. References are for tests: they are slow.
KERNELS = {op: names[:-1] for op, names in IMPLEMENTATIONS.items()}

# What pages may hold instead of the weights' dtype, and other names of the same.
KV_CACHE_DTYPES = ("int8", "fp8")
_SAME_DTYPES = {"auto": None, "fp8_e4m3": "fp8", "float8_e4m3fn": "fp8"}

GATES = ("current", "worst_case")  # which tokens of a batch weigh

KV_CACHE_BYTES = 2**30  # of pages, where nobody says how many

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
    # Which implementation runs an op, by the op's name: {"tree_attention": "mosaic_gpu"}. Any
    # mapping is taken; what is kept are pairs, so that the config is hashable. An op that is not
    # named runs the best implementation for its case.
    kernels: Mapping[str, str] | tuple[tuple[str, str], ...] = ()
    # What the target's keys and values are kept as: "int8", "fp8" (e4m3), or None, the weights'
    # dtype. Each key head of each layer has a scale, which is measured on the weights in use.
    # Texts are those of this cache, with and without speculation. docs/guides/memory.md.
    kv_cache_dtype: str | None = None

    def __post_init__(self):
        self._check_kv_cache_dtype()
        if self.numerics not in NUMERICS:
            raise ValueError(
                f"EngineConfig.numerics={self.numerics!r} must be one of {', '.join(NUMERICS)}."
            )
        self._check_memory()
        for field in dataclasses.fields(self):
            value: Any = getattr(self, field.name)
            if isinstance(field.default, bool) and not isinstance(value, bool):
                raise ValueError(f"EngineConfig.{field.name}={value!r} must be True or False.")
        for name, most in _MOST.items():
            self._check_size(name, most)
        self._check_row_buckets()
        self._check_slots()
        object.__setattr__(self, "kernels", _named_kernels(self.kernels))

    def _check_kv_cache_dtype(self) -> None:
        given: Any = self.kv_cache_dtype
        kept = _SAME_DTYPES.get(given, given) if isinstance(given, str) else given
        if kept is not None and kept not in KV_CACHE_DTYPES:
            raise ValueError(
                f"EngineConfig.kv_cache_dtype={given!r:.100} must be one of "
                f"{', '.join(KV_CACHE_DTYPES)}, or None for the dtype of the weights."
            )
        if kept is not None and self.numerics == "invariant":
            raise ValueError(
                f"EngineConfig.kv_cache_dtype={given!r} does not go with numerics='invariant', "
                "whose attention reads no quantised pages; leave one of them out."
            )
        object.__setattr__(self, "kv_cache_dtype", kept)

    def _check_size(self, name: str, most: int) -> None:
        """Refuses a size that is no whole number, or that nothing could hold."""
        value: Any = getattr(self, name)
        if value is None and type(self).__dataclass_fields__[name].default is None:
            return
        if not is_int(value) or not 1 <= value <= most:
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
            raise ValueError(f"EngineConfig.gate={self.gate!r} must be one of {', '.join(GATES)}.")
        margin, fraction = self.batch_safety_margin, self.speculation_weight_fraction
        if not is_number(margin) or not 0 <= margin < 100:
            raise ValueError(
                f"EngineConfig.batch_safety_margin={margin!r} must be a percentage from 0 to "
                "below 100."
            )
        if not is_number(fraction) or not 0 < fraction <= 1:
            raise ValueError(
                f"EngineConfig.speculation_weight_fraction={fraction!r} must be above 0 and "
                "at most 1."
            )

    def _check_row_buckets(self) -> None:
        buckets: Any = self.row_buckets
        if buckets is None:
            return
        if not isinstance(buckets, tuple | list) or not all(
            is_int(bucket) and 1 <= bucket <= self.max_rows for bucket in buckets
        ):
            raise ValueError(
                f"EngineConfig.row_buckets={buckets!r} must be whole numbers from 1 to "
                f"max_rows={self.max_rows}."
            )
        as_ints = map(operator.index, buckets)
        object.__setattr__(self, "row_buckets", tuple(sorted(set(as_ints))))


def _named_kernels(given: Any) -> tuple[tuple[str, str], ...]:
    """Returns pairs of an op and an implementation, in order.

    Raises:
      ValueError: there is no such op, or none of its implementations has the name.
    """
    try:
        named = dict(given)
    except (TypeError, ValueError):
        raise ValueError(
            f"EngineConfig.kernels={given!r:.200} must be a mapping of an op to its "
            'implementation, as {"tree_attention": "xla"}.'
        ) from None
    for op, name in named.items():
        if op not in KERNELS:
            raise ValueError(
                f"EngineConfig.kernels has {op!r:.100}, which is no op; expected any of "
                f"{', '.join(KERNELS)}."
            )
        if name not in KERNELS[op]:
            raise ValueError(
                f"EngineConfig.kernels[{op!r}]={name!r:.100} must be one of "
                f"{', '.join(KERNELS[op])}."
            )
    return tuple(sorted(named.items()))
