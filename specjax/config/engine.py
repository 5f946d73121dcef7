"""How requests are run: sizes, memory, numerics."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Mapping
from typing import Any, Literal, TypeAlias, get_args

from pallas_kernels.names import IMPLEMENTATIONS
from specjax.config.checks import is_int, is_number
from specjax.config.keywords import holds_fields

Numerics: TypeAlias = Literal["fast", "invariant"]
NUMERICS = get_args(Numerics)

ActivationDtype: TypeAlias = Literal["float32"]
ACTIVATION_DTYPES = get_args(ActivationDtype)

# Implementations by op. References are left out: they are slow and for tests.
KERNELS = {op: names[:-1] for op, names in IMPLEMENTATIONS.items()}

# Dtypes that pages may have instead of the weights' dtype, and aliases of them.
KV_CACHE_DTYPES = ("int8", "fp8")
KvCacheDtype: TypeAlias = Literal["int8", "fp8", "auto", "fp8_e4m3", "float8_e4m3fn"]
_SAME_DTYPES = {"auto": None, "fp8_e4m3": "fp8", "float8_e4m3fn": "fp8"}

Gate: TypeAlias = Literal["current", "worst_case"]
GATES = get_args(Gate)  # which tokens count towards a batch's weight

KV_CACHE_BYTES = 2**30  # default bytes of all pages

MOST_BYTES = 2**53  # 9 petabytes: more than all devices of a program together have

_MOST_SLOTS = 2**31 - 1  # tokens of a pool, numbered by an int32

# Largest value of each size in EngineConfig. Above it no step could be compiled, or no device
# could hold its arrays, whatever the model; a model's own needs are checked against the device
# later.
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


@holds_fields("engine")
@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Sizes of the compiled executables and of the page pool; None is chosen from the requests.

    A capacity (`max_...`) is the size of a row's arrays, declared because shapes are static.
    A request beyond a capacity fails alone, with an error that names it.
    """

    # Tokens of a page. By default 16 on a CPU and 64 to 256 on a TPU or GPU, by the bytes of a
    # token, max_rows and max_context. docs/guides/memory.md.
    page_size: int | None = None
    num_pages: int | None = None
    max_rows: int = 32
    # Row buckets below max_rows, each compiled when it is first used: a burst with few rows
    # left costs less in a small bucket. () uses max_rows alone. By default the policy chooses:
    # powers of two where they pay, or none.
    row_buckets: tuple[int, ...] | None = None
    burst_steps: int = 32
    max_context: int | None = (
        None  # tokens of prompt and output together; by default the model's own limit
    )
    # Most bytes of all devices for pages if num_pages is None; by default what memory_bytes
    # leaves, else KV_CACHE_BYTES.
    kv_cache_bytes: int | None = None
    # Bytes of each device for weights, pages and steps together. By default an Engine takes
    # what the device reports as not in use by others. Where the device reports nothing, as on
    # CPU, in generate() and over a mesh's data axis only kv_cache_bytes counts.
    memory_bytes: int | None = None
    # Percent of the memory left beside the weights that batches leave free.
    batch_safety_margin: float = 20.0
    # Fraction of the weight limit up to which a batch speculates.
    speculation_weight_fraction: float = 0.75
    # Tokens that count towards the weight of a batch. "current": those that rows have, or may
    # gain by the work being sent. "worst_case": the full length of every row, so that no
    # admitted request is ever preempted.
    gate: Gate = "current"
    max_bias_entries: int = 64  # logit_bias and bad_token_ids together
    max_allowed_tokens: int = 256
    max_stop_tokens: int = 16
    max_logprobs: int = 20
    # Most bytes of float32 logits during verification; more tokens are split into chunks. Under
    # rules that compare distributions a chunk is one row at least, and holds up to six arrays
    # of that size (processed logits, both distributions, their difference); under invariant
    # numerics a chunk is token_bucket tokens.
    logit_bytes: int = 10**9
    # "fast", or "invariant": the bits of every token depend on its own row alone, whatever else
    # is drafted and decoded, at the cost of computing token_bucket tokens where one would do.
    # docs/invariant-numerics.md.
    numerics: Numerics = "fast"
    token_bucket: int = 16
    # Whether requests read pages that earlier requests filled with the same tokens.
    prefix_caching: bool = True
    # Most prompt tokens per call and data shard, which prompts share as they need them; smaller
    # token buckets of a quarter and a sixteenth serve few and short prompts. By default chosen
    # by the device: 256 on a CPU, 512 to 4,096 where reading the weights takes as long as the
    # products of some hundred tokens.
    max_prefill_tokens: int | None = None
    # Whether prompts are prefilled in the same matmuls as rows that decode and draft, or in
    # separate calls, as always under invariant numerics.
    mixed_prefill: bool = True
    # Implementations by op: {"tree_attention": "mosaic_gpu"}. Any mapping is accepted and kept
    # as pairs, so that the config is hashable. An op that is not named uses the best
    # implementation for its case.
    kernels: Mapping[str, str] | tuple[tuple[str, str], ...] = ()
    # Dtype of the target's cached keys and values: "int8", "fp8" (e4m3), or None for the
    # weights' dtype. Each key head of each layer has a scale, measured on the weights in use.
    # Text is that of this cache, with and without speculation. docs/guides/memory.md.
    kv_cache_dtype: KvCacheDtype | None = None
    # Dtype of the target's hidden states: "float32", or None for the weights' dtype. With weights
    # of 16 bits, float32 leaves hardly any rounding that depends on the number of tokens in a
    # step: docs/policy-logprobs.md.
    activation_dtype: ActivationDtype | None = None

    def __post_init__(self):
        self._check_kv_cache_dtype()
        if self.numerics not in NUMERICS:
            raise ValueError(
                f"EngineConfig.numerics={self.numerics!r} must be one of {', '.join(NUMERICS)}."
            )
        if self.activation_dtype not in (None, *ACTIVATION_DTYPES):
            raise ValueError(
                f"EngineConfig.activation_dtype={self.activation_dtype!r:.100} must be 'float32', "
                "or None for the dtype of the weights."
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
        named = dict(self.kernels).get("tree_attention")
        if self.kv_cache_dtype is not None and named == "mosaic_gpu":
            raise ValueError(
                f"EngineConfig.kv_cache_dtype={self.kv_cache_dtype!r} does not go with "
                "kernels={'tree_attention': 'mosaic_gpu'}, which reads no quantised pages; leave "
                "one of them out."
            )

    @property
    def chosen_page_size(self) -> int:
        """page_size, where it is given or was chosen.

        Raises:
          ValueError: it is still to be chosen; see `specjax.paged.page_sizes`.
        """
        if self.page_size is None:
            raise ValueError("EngineConfig.page_size=None is chosen once the model is known.")
        return self.page_size

    def _check_kv_cache_dtype(self) -> None:
        given: Any = self.kv_cache_dtype
        kept = _SAME_DTYPES.get(given, given) if isinstance(given, str) else given
        if kept is not None and not (isinstance(kept, str) and kept in KV_CACHE_DTYPES):
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
        """Raises if a size is not a whole number from 1 to `most`."""
        value: Any = getattr(self, name)
        if value is None and type(self).__dataclass_fields__[name].default is None:
            return
        if not is_int(value) or not 1 <= operator.index(value) <= most:
            raise ValueError(
                f"EngineConfig.{name}={value!r} must be a whole number from 1 to {most:,}."
            )
        # A numpy integer may have few bits, and products of sizes are large.
        object.__setattr__(self, name, operator.index(value))

    def _check_slots(self) -> None:
        """Raises if an int32 cannot number the slots of the pool."""
        if self.num_pages is None or self.page_size is None:
            return
        if self.num_pages * self.page_size > _MOST_SLOTS:
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
      ValueError: an op is unknown, or has no implementation of that name.
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
